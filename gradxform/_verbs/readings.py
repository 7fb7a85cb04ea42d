"""Which rows of its tables a loss reads, found in its jaxpr, whoever it is that reads.

A table is a variable of the jaxpr, and every use of it an equation that can be looked
at: a ``gather`` of whole rows is a reading, which ``gx.lookup``, ``jnp.take``,
``table[ids]`` and every framework's embedding layer come down to. A cast of the table
is put off until its rows are there, and a ``jit`` is looked into.

So the table itself need not be there: of a part of one, the rows that a server gave,
the loss sees the shape of the whole, and what it reads is then taken from the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._trees import maps, versions
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.rows import inside_or_padding, is_known, places, read_rows

# Is given the number of a table, the ids of a reading and its rows, and returns the
# rows that the loss goes on with.
Tap = Callable[[int, jax.Array, jax.Array], jax.Array]


class _Table(NamedTuple):
    """What the variable of a table stands for."""

    number: int
    array: Any  # Or the IndexedSlices that is a part of it.
    casts: tuple[Any, ...] = ()  # To which dtypes it was cast, one after another.


# What leaves the numbers of a table as they are, and makes no copy of its own accord.
_SAME = {"pvary", "pcast", "reshard", "sharding_constraint"}

_HOW = (
    "{0!r} is one of tables, so the loss can read rows of it alone, through "
    "gradxform.lookup(table, ids) or as jnp.take(table, ids, axis=0), table[ids] and "
    "the embedding layers do, and outside of scan, cond, checkpoint and the like; it "
    "was {1}. Look the rows up first, for ids of any shape, or leave {0!r} out of "
    "tables: its gradient then is a dense one."
)


def trace(
    loss_fn: Callable[[dict[int, Any], dict[int, Any]], Any],
    dense: dict[int, Any],
    tables: dict[int, Any],
    paths: Sequence[str],
) -> tuple[Callable[[dict[int, Any], Tap], Any], dict[int, list[Any]]]:
    """``loss_fn(dense, tables)`` as a function of ``dense`` and a tap; types of rows.

    Raises:
      TypeError: a table is used in any other way.
    """
    returned: list[Any] = []

    def arrays(dense: dict[int, Any], tables: dict[int, Any]) -> list[Any]:
        leaves, treedef = jax.tree.flatten(loss_fn(dense, tables))
        is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
        # What an aux holds beside arrays comes back as it was.
        rest = [None if t else x for t, x in zip(is_traced, leaves, strict=True)]
        returned[:] = treedef, is_traced, rest
        return [x for t, x in zip(is_traced, leaves, strict=True) if t]

    closed = jax.make_jaxpr(arrays)(dense, {i: _whole(x) for i, x in tables.items()})
    treedef, is_traced, rest = returned

    def run(dense: dict[int, Any], tap: Tap) -> Any:
        stand_ins = [_Table(i, table) for i, table in sorted(tables.items())]
        reader = _Reader(paths, tap)
        results = reader.run(closed, [*jax.tree.leaves(dense), *stand_ins])
        for x in results:
            if isinstance(x, _Table):
                reader.refuse(x, "returned as it is")
        traced = iter(results)
        leaves = [
            next(traced) if t else x for t, x in zip(is_traced, rest, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    types: dict[int, list[Any]] = {i: [] for i in tables}

    def note(i: int, _: jax.Array, rows: jax.Array) -> jax.Array:
        types[i].append(jax.typeof(rows))
        return rows

    def look() -> None:
        run(dense, note)

    jax.eval_shape(look)
    return run, types


class _Reader(NamedTuple):
    """Evaluates a jaxpr of which some variables are tables."""

    paths: Sequence[str]
    tap: Tap

    def run(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        from jax.extend.core import Literal

        jaxpr = closed.jaxpr
        variables = [*jaxpr.constvars, *jaxpr.invars]
        env = dict(zip(variables, [*closed.consts, *args], strict=True))

        def values(atoms: Sequence[Any]) -> list[Any]:
            return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

        for eqn in jaxpr.eqns:
            inputs = values(eqn.invars)
            used = [x for x in inputs if isinstance(x, _Table)]
            if used:
                results = self.use(eqn, used[0], inputs)
            else:
                results = versions.evaluate(eqn, inputs)
            env.update(zip(eqn.outvars, results, strict=True))
        return values(jaxpr.outvars)

    def use(self, eqn: Any, table: _Table, inputs: list[Any]) -> list[Any]:
        """What an equation makes of the first table among its inputs."""
        name = eqn.primitive.name
        if name == "jit":
            return self.run(eqn.params["jaxpr"], inputs)
        if name == "convert_element_type":
            return [table._replace(casts=(*table.casts, eqn.outvars[0].aval.dtype))]
        is_part = isinstance(table.array, IndexedSlices)
        if is_part and name == "reshard":
            return [table._replace(array=_moved(eqn, table.array))]
        if name == "copy" or (is_part and name in _SAME):
            return [table]  # No one can see which it is.
        if name in _SAME:
            return [table._replace(array=versions.evaluate(eqn, [table.array])[0])]
        with eqn.ctx.manager:  # Of explicit mesh axes it may have made automatic ones.
            ids = _ids(eqn, table, inputs)
            if ids is not None:
                if is_part:
                    rows, ids = _filled(eqn, table.array, ids)
                else:
                    (rows,) = versions.evaluate(eqn, [table.array, *inputs[1:]])
                rows = self.tap(table.number, ids, rows)
                for dtype in table.casts:
                    rows = rows.astype(dtype)
                return [rows]
        from jax.extend import source_info_util

        where = source_info_util.summarize(eqn.source_info)  # "" in an interpreter.
        self.refuse(table, f"used by {name!r} {where}".rstrip())

    def refuse(self, table: _Table, how: str) -> NoReturn:
        raise TypeError(_HOW.format(self.paths[table.number], how))


def _ids(eqn: Any, table: _Table, inputs: list[Any]) -> jax.Array | None:
    """The rows that an equation reads; None if it does anything else."""
    shape = table.array.shape
    if inputs[0] is not table or eqn.params.get("slice_sizes") != (1, *shape[1:]):
        return None
    clips = True
    if eqn.primitive.name == "dynamic_slice":  # As x[i] of a single i, which clips.
        ids = jnp.asarray(inputs[1])[None]
    elif eqn.primitive.name == "gather":
        dims, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
        axes = eqn.outvars[0].aval.ndim
        row_axes = tuple(range(axes - len(dims.offset_dims), axes))
        fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
        if (
            0 not in dims.start_index_map
            or dims.operand_batching_dims
            or dims.offset_dims != row_axes
            # The other indices are of axes that are taken whole: they can be 0 alone.
            or (fills and len(dims.start_index_map) > 1)
        ):
            return None
        ids = inputs[1][..., dims.start_index_map.index(0)]
        clips = mode == jax.lax.GatherScatterMode.CLIP
    else:
        return None
    if clips:
        if ids.dtype.itemsize < 4:  # They may not be able to count the rows.
            ids = ids.astype(np.int32)
        ids = jnp.clip(ids, 0, shape[0] - 1)
    return inside_or_padding(ids, shape[0])


def _filled(
    eqn: Any, part: IndexedSlices, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What an equation reads of a part, with what it has for ids outside of a table."""
    rows, held = of_part(part, ids)
    if eqn.params.get("mode") == jax.lax.GatherScatterMode.FILL_OR_DROP:
        fill = eqn.params["fill_value"]
        fill = jnp.asarray(np.nan if fill is None else fill, rows.dtype)
        rows = jnp.where(maps.expand(ids == part.shape[0], rows), fill, rows)
    # An axis of length 1 may be left where a single row was sliced out.
    return rows.reshape(eqn.outvars[0].aval.shape), held


def _moved(eqn: Any, part: IndexedSlices) -> IndexedSlices:
    """A part of a table that goes to other mesh axes: whole, as parts are."""
    there = NamedSharding(eqn.outvars[0].aval.sharding.mesh, P())
    indices, values = jax.sharding.reshard((part.indices, part.values), there)
    return IndexedSlices.ascending(indices, values, part.shape)


def of_part(part: IndexedSlices, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of a part of a table, and their ids: padding where it does not hold them.

    Raises:
      ValueError: it does not hold one that can be looked at.
    """
    part = part.sum_duplicates()
    at = places(ids, part.indices)
    missing = at == len(part.indices)
    if is_known(missing):
        absent = np.argwhere(missing & (ids < part.shape[0]))
        if len(absent):
            first = tuple(absent[0].tolist())
            raise ValueError(
                "ids must be among the rows that this part of the table holds, got "
                f"{ids[first]} at position {list(first)}. Pull that row, too."
            )
    return read_rows(part.values, at), jnp.where(missing, part.shape[0], ids)


def _whole(table: Any) -> Any:
    """What the loss sees of a table."""
    if not isinstance(table, IndexedSlices):
        return table
    # Its rows may differ by device, or lie on mesh axes, and the table then does too.
    return jax.eval_shape(
        lambda rows: jnp.broadcast_to(rows.sum(0), table.shape), table.values
    )
