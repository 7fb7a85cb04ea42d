"""Finds in the jaxpr of a loss which rows of its tables it reads.

A table is a variable of the jaxpr, and every use of it is an equation. A ``gather`` of
whole rows is a reading: ``gx.lookup``, ``jnp.take``, ``table[ids]`` and every
framework's embedding layer become one. A slice of rows, ``table[0]`` or ``table[:n]``,
is a reading, too. A cast of the table is evaluated again, for the rows. The inside of a
``jit`` is searched, too. A ``jax.checkpoint`` is made again, around an inside that also
returns the ids of its readings.

So the whole table is not needed. If there is only a part of it, the rows that a server
gave, the loss sees the shape of the whole table and reads from the part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.jaxprs import LeafVariable
from gradxform._jax.versions import Op
from gradxform._numbers import arithmetic
from gradxform._rows import table_rows
from gradxform._rows.rows import inside_or_padding
from gradxform._rows.table_rows import TableRows

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

# A whole table, or rows of one.
WholeOrRows: TypeAlias = jax.Array | TableRows
# (index of a table, rows of a reading) -> the rows that the loss gets
OnRows = Callable[[int, jax.Array], jax.Array]
# The ids of all readings of each table, by its index.
Ids = dict[int, list[jax.Array]]
# The types of their rows.
Types = dict[int, list[jax.core.ShapedArray]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["index", "path", "equations"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Table(LeafVariable):
    """A variable that has the values of a table.

    Attributes:
      array: the table, before its equations.
    """

    array: WholeOrRows

    def refuse(self, how: str) -> NoReturn:
        raise TypeError(_HOW.format(self.path, how))


_HOW = (
    "{0!r} is one of tables, so the loss can only read rows of it, by "
    "gradxform.lookup(table, ids), jnp.take(table, ids, axis=0), table[ids], table[:n] "
    "or an embedding layer, and only outside of scan, cond and the like; it was {1}. "
    "Look the rows up first, for ids of any shape, or leave {0!r} out of tables: then "
    "its gradient is dense."
)


def trace(
    loss_fn: Callable[[dict[int, Any], dict[int, Any]], Any],
    dense: dict[int, Any],
    tables: dict[int, WholeOrRows],
    paths: Sequence[str],
) -> tuple[Callable[[dict[int, Any], OnRows], tuple[Any, Ids]], Types]:
    """``loss_fn(dense, tables)`` as a function of ``dense`` and ``on_rows``; row types.

    The function also returns the ids of the rows.

    Raises:
      TypeError: a table is used in another way than to read its rows.
    """
    returned: list[Any] = []

    def arrays(dense: dict[int, Any], tables: dict[int, Any]) -> list[Any]:
        leaves, treedef = jax.tree.flatten(loss_fn(dense, tables))
        is_traced = [isinstance(x, jax.core.Tracer) for x in leaves]
        # Entries of an aux that are not arrays come back as they were.
        rest = [None if t else x for t, x in zip(is_traced, leaves, strict=True)]
        returned[:] = treedef, is_traced, rest
        return [x for t, x in zip(is_traced, leaves, strict=True) if t]

    whole = {i: _whole(x) for i, x in tables.items()}
    closed = programs.with_placements(jax.make_jaxpr(arrays)(dense, whole))
    treedef, is_traced, rest = returned

    def run(dense: dict[int, Any], on_rows: OnRows) -> tuple[Any, Ids]:
        stand_ins = [_Table(i, paths[i], array=x) for i, x in sorted(tables.items())]
        reader = _Reader(on_rows, {i: [] for i in tables})
        results = reader.run(closed, [*jax.tree.leaves(dense), *stand_ins])
        for x in results:
            if isinstance(x, _Table):
                x.refuse("returned as it is")
        traced = iter(results)
        leaves = [
            next(traced) if t else x for t, x in zip(is_traced, rest, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves), reader.ids

    types: Types = {i: [] for i in tables}

    def note(i: int, rows: jax.Array) -> jax.Array:
        types[i].append(jax.typeof(rows))
        return rows

    def look() -> None:
        run(dense, note)

    jax.eval_shape(look)
    return run, types


class _Reader(NamedTuple):
    """Evaluates a jaxpr that has tables among its variables."""

    on_rows: OnRows
    ids: Ids

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        return jaxprs.run(closed.jaxpr, [*closed.consts, *args], self.apply)

    def apply(self, name: str, inputs: list[Any], eqn: JaxprEqn) -> list[Any] | None:
        """The result of an equation for the first table among its inputs, if any."""
        tables = (k for k, x in enumerate(inputs) if isinstance(x, _Table))
        if (k := next(tables, None)) is None:
            return None
        table: _Table = inputs[k]
        if name == Op.JIT:
            return programs.run(eqn, inputs, self.apply)
        if name == Op.UNSTACK and eqn.params["axis"] == 0:
            rows = jax.make_jaxpr(lambda x: [x[i] for i in range(len(x))])
            return self.run(rows(eqn.invars[0].aval), inputs)
        if name == Op.CHECKPOINT:
            return self.checkpoint(eqn, inputs)
        if name in versions.OF_ONE_ENTRY:
            return [table.then(eqn)]
        if name in versions.SAME_VALUES:
            array = table.array
            if not isinstance(array, TableRows):
                (array,) = versions.bind(eqn, [array])
            elif name == Op.RESHARD:
                # Wherever the table goes, its rows are whole on each device.
                there = NamedSharding(_type(eqn.outvars[0]).sharding.mesh, P())
                array = jax.sharding.reshard(array, there)
            return [dataclasses.replace(table, array=array)]
        with eqn.ctx.manager:  # It may have made explicit mesh axes automatic.
            reading = _reading(name, eqn, table, inputs)
            if reading is not None:
                return [self.read(eqn, table, inputs, *reading)]
        how = f"used by {jaxprs.with_line(eqn)}"
        dtype = _type(eqn.invars[k]).dtype
        if jnp.issubdtype(dtype, jnp.integer):
            # Indexing by an array first compares it with 0.
            kind = "as indices, " if name == Op.LESS else ""
            how = f"used {kind}cast to {dtype}, by {jaxprs.with_line(eqn)}"
        table.refuse(how)

    def checkpoint(self, eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        """The results of ``jax.checkpoint``, whose inside reads tables."""

        def inside(*inputs: object) -> tuple[list[Any], Ids]:
            reader = self._replace(ids={i: [] for i in self.ids})
            return programs.run(eqn, inputs, reader.apply), reader.ids

        how = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        results, read = jax.checkpoint(inside, **how)(*inputs)
        for i, ids in read.items():
            self.ids[i].extend(ids)
        return results

    def read(
        self,
        eqn: JaxprEqn,
        table: _Table,
        inputs: list[Any],
        ids: jax.Array,
        taken: jax.Array,
    ) -> jax.Array:
        """The result of an equation that reads the rows ``taken`` of a table."""
        height, part = table.array.shape[0], table.array
        fills = eqn.params.get("mode") == jax.lax.GatherScatterMode.FILL_OR_DROP
        fill = eqn.params.get("fill_value")
        if isinstance(part, TableRows):
            rows, there = table_rows.read_part(part, taken)
            # A slice of a single row may keep an axis of length 1.
            rows = rows.reshape(_type(eqn.outvars[0]).shape)
            ids = jnp.where(there == height, height, ids)
        else:
            if fills and table.equations:
                eqn = eqn.replace(params=eqn.params | {"fill_value": 0})
            (rows,) = versions.bind(eqn, [part, *inputs[1:]])
            fills = fills and bool(table.equations)
        if not table.is_stopped:
            self.ids[table.index].append(ids)
            rows = self.on_rows(table.index, rows)
        of_rows = (_of_rows(x, eqn) for x in table.equations)
        rows = jaxprs.evaluated(of_rows, rows)
        if fills:  # After casts: the table's dtype may not hold this number.
            outside = arithmetic.expand(taken == height, rows)
            # By default JAX fills with NaN, or with an end of the integers.
            beyond = jnp.zeros(1, rows.dtype).at[jnp.ones((), int)]
            rows = jnp.where(outside, beyond.get(mode="fill", fill_value=fill), rows)
        return rows


def _reading(
    name: str, eqn: JaxprEqn, table: _Table, inputs: list[Any]
) -> tuple[jax.Array, jax.Array] | None:
    """The rows that get a gradient in a reading, and the rows that it reads.

    Padding stands for ids outside of the table. It returns None if the equation does
    anything but read whole rows.
    """
    height, *row = shape = table.array.shape
    params = eqn.params
    if inputs[0] is not table:
        return None
    if name == Op.SLICE:
        strides = params["strides"] or (1,) * len(shape)
        starts, limits = params["start_indices"], params["limit_indices"]
        cut = [*zip(starts, limits, strides, strict=True)]
        if cut[1:] != [(0, length, 1) for length in row]:
            return None
        ids = jnp.arange(*cut[0], dtype=np.int32)
        return ids, ids
    if name not in (Op.DYNAMIC_SLICE, Op.GATHER):
        return None
    length, *sizes = params["slice_sizes"]
    if sizes != row:
        return None
    if name == Op.DYNAMIC_SLICE:  # x[i] with a single i becomes one. It clips.
        first = jnp.clip(_wide(jnp.asarray(inputs[1])), 0, height - length)
        ids = first.astype(np.int32) + jnp.arange(length, dtype=np.int32)
        return ids, ids
    dims, mode = params["dimension_numbers"], params["mode"]
    axes = _type(eqn.outvars[0]).ndim
    row_axes = tuple(range(axes - len(dims.offset_dims), axes))
    fills = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    if (
        length != 1
        or 0 not in dims.start_index_map
        or dims.operand_batching_dims
        or dims.offset_dims != row_axes
        # The other indices belong to axes that are taken whole, so they must be 0.
        or (fills and len(dims.start_index_map) > 1)
    ):
        return None
    wide = _wide(inputs[1][..., dims.start_index_map.index(0)])
    ids = inside_or_padding(wide, height)
    if fills:
        return ids, ids
    # With a promise that ids are inside, an id outside is clipped but has no gradient.
    taken = inside_or_padding(jnp.clip(wide, 0, height - 1), height)
    clips = mode == jax.lax.GatherScatterMode.CLIP
    return (taken if clips else ids), taken


def _of_rows(eqn: JaxprEqn, reading: JaxprEqn) -> JaxprEqn:
    """A table's equation for rows of a reading, which may be on other mesh axes."""
    sharding = dict.fromkeys({"sharding"} & eqn.params.keys())
    return eqn.replace(params=eqn.params | sharding, ctx=reading.ctx)


def _type(x: Var | Literal) -> jax.core.ShapedArray:
    """The type of a variable."""
    return x.aval  # type: ignore[return-value]  # No token, no ref.


def _wide(ids: jax.Array) -> jax.Array:
    """Widens small integers, which may be too narrow to count the rows."""
    return ids.astype(np.int32) if ids.dtype.itemsize < 4 else ids


def _whole(table: WholeOrRows) -> jax.Array | jax.ShapeDtypeStruct:
    """The table as the loss sees it."""
    if not isinstance(table, TableRows):
        return table
    # If its rows vary by device, or lie on mesh axes, the table does so, too.
    return jax.eval_shape(
        lambda rows: jnp.broadcast_to(rows.sum(0), table.shape), table.values
    )
