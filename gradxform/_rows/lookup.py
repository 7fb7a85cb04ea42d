"""Reading a few rows of a table, and the row-sparse gradients that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
    overload,
)

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._jax import versions
from gradxform._numbers import constants
from gradxform._rows import readings
from gradxform._rows.indexed_slices import IndexedSlices
from gradxform._rows.rows import (
    as_array,
    explicit_sharding,
    mesh_context,
    read_rows,
    replicated,
    rows_of,
)
from gradxform._rows.table_rows import TableRows, check_no_gradients, read_part
from gradxform._trees import maps
from gradxform._trees.types import Params

# Which tables get row-sparse gradients: their paths, or a predicate on the path.
Tables = Sequence[str] | Callable[[str], bool]

# The offsets of a table's readings, or the gradients of their rows, by its index.
Offsets: TypeAlias = dict[int, list[jax.Array]]

P = ParamSpec("P")
Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


class ValueAndGrad(Protocol[P, Value_co]):
    """What :func:`value_and_grad` returns without tables."""

    def __call__(
        self, params: Params, /, *batch: P.args, **kwargs: P.kwargs
    ) -> tuple[Value_co, Params]: ...


def lookup(
    table: jax.typing.ArrayLike | TableRows, ids: jax.typing.ArrayLike
) -> jax.Array:
    r"""The rows of a table with these indices: ``table[ids]``.

    It is a plain gather. JAX gives it a dense gradient; :func:`value_and_grad` gives a
    named table a row-sparse one. Unlike ``jnp.take`` it refuses ids that lie outside,
    and has an id for padding.

    Args:
      table: of shape [rows, \*row]; or a part of such a table, :class:`TableRows`.
      ids: integers of any shape and integer dtype, in [0, rows]. The id ``rows`` is
        padding: it reads zeros and gets no gradient.

    Returns:
      An array of shape [\*ids.shape, \*row], of the dtype of the table.

    Raises:
      TypeError: ``ids`` are not integers, or ``table`` is an :class:`IndexedSlices`.
      ValueError: an id lies outside of [0, rows]. A traced id cannot be checked. If it
        lies outside, it counts as padding; a negative id does not count from the end.
        The same holds for an id if ``table`` is a part that lacks its row.

    References:
      ``tf.nn.embedding_lookup``, ``tf.gather``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> gx.lookup(table, [1, 2])  # 2 is padding
    Array([[3., 4.],
           [0., 0.]], dtype=float32)
    """
    check_no_gradients("table", table)
    if not isinstance(table, TableRows):
        table = jnp.asarray(table)
    if not table.ndim:
        raise ValueError("table must have at least one axis, got a scalar.")
    ids = jnp.asarray(rows_of("ids", as_array(ids), table.shape[0]))
    if isinstance(table, TableRows):
        return read_part(table, ids)[0]
    return read_rows(table, ids)


@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Any, P], Value],
    *,
    tables: tuple[()] = ...,
    has_aux: bool = ...,
) -> ValueAndGrad[P, Value]: ...
@overload
def value_and_grad(
    loss_fn: Callable[Concatenate[Any, P], Value],
    *,
    tables: Tables,
    has_aux: bool = ...,
) -> Callable[Concatenate[Any, P], tuple[Value, Any]]: ...
def value_and_grad(
    loss_fn: Callable[..., Any], *, tables: Tables = (), has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    r"""``jax.value_and_grad``, with row-sparse gradients for the named tables.

    .. math:: \partial L / \partial table_r = \sum_{i:\ ids_i = r} \partial L / \partial
        rows_i

    The loss may read rows of these tables as often as it likes, through :func:`lookup`,
    ``jnp.take(table, ids, axis=0)``, ``table[ids]``, ``table[0]`` or ``table[:n]``, in
    an embedding layer of any framework, under ``jit``, ``vmap`` or ``checkpoint``. The
    gradient then consists of the rows that were read. No array of the table's size is
    made, even if the loss casts the table first. Rows of ``stop_gradient(table)`` are
    not among them. All other parameters get JAX's own gradients.

    A parameter may be a part of a table, :class:`TableRows`: the loss sees a table, and
    can read only those rows. It need not be named.

    Args:
      loss_fn: ``loss_fn(params, *batch, **kwargs)`` returns a scalar, or ``(scalar,
        aux)`` if ``has_aux`` is set. With ``tables`` it is traced, also without
        ``jit``, and its jaxpr is searched for the rows that it reads.
      tables: paths of leaves of ``params``, with slashes, as ``"encoder/emb"``; or a
        predicate on such a path.
      has_aux: as in ``jax.value_and_grad``.

    Returns:
      A function of ``(params, *batch, **kwargs)`` that returns ``(value, grads)``, or
      ``((value, aux), grads)``. Each gradient has the shape and dtype of its parameter;
      a table's is an :class:`IndexedSlices` with one row for each that was read.

    Raises:
      ValueError: ``tables`` names no leaf of ``params``, or one that is not a table of
        floating-point rows.
      TypeError: the loss uses a named table in any other way, such as a product with
        all of it; or reads it inside a ``scan``, ``cond`` or the like: the rows cannot
        get out of there.

    Inside ``jax.shard_map`` each device has a part of the batch and a table of its own.
    There ``jax.lax.all_gather(grads["emb"], axis, tiled=True, to="invarying")`` gives
    every device the rows of all devices, so the tables stay alike. Before JAX 0.8.2 it
    is ``all_gather_invariant``, without ``to``.

    References:
      ``tf.gradients`` through ``tf.gather``.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> def loss_fn(params, ids):
    ...     rows = gx.lookup(params["emb"], ids)
    ...     return jnp.sum(rows**2) * params["scale"]
    >>> params = {"emb": jnp.arange(1e6).reshape(-1, 2), "scale": jnp.ones(())}
    >>> step = jax.jit(gx.value_and_grad(loss_fn, tables=["emb"]))
    >>> loss, grads = step(params, jnp.array([3, 0, 3]))
    >>> grads["scale"], grads["emb"].indices
    (Array(171., dtype=float32), Array([3, 0, 3], dtype=int32))
    >>> grads["emb"].values
    Array([[12., 14.],
           [ 0.,  2.],
           [12., 14.]], dtype=float32)
    """
    if isinstance(tables, str):
        raise TypeError(f"tables must be a sequence of paths, got {tables!r}.")
    arguments.check_flags(has_aux=has_aux)
    if tables:
        versions.before_tracing()

    def wrapped(
        params: optax.Params, /, *batch: object, **kwargs: object
    ) -> tuple[Any, optax.Updates]:
        check_no_gradients("params", params)
        flat, treedef = jax.tree.flatten_with_path(params, is_leaf=_is_part)
        if not tables and not any(_is_part(leaf) for _, leaf in flat):
            dense_way = jax.value_and_grad(loss_fn, has_aux=has_aux)
            return dense_way(params, *batch, **kwargs)
        paths = [structures.path_str(path) for path, _ in flat]
        leaves = dict(enumerate(leaf for _, leaf in flat))
        is_named = structures.names(
            "tables", tables, "leaves of params", (path for path, _ in flat)
        )

        def loss(leaves: dict[int, Any]) -> tuple[Any, Any]:
            mixed = [leaves[i] for i in range(len(paths))]
            value = loss_fn(jax.tree.unflatten(treedef, mixed), *batch, **kwargs)
            return value if has_aux else (value, None)

        by_rows = LossOfRows.of(loss, leaves, is_named, paths)
        dense = {i: leaf for i, leaf in leaves.items() if i not in by_rows.tables}
        both = jax.value_and_grad(by_rows.loss, argnums=(0, 1), has_aux=True)
        with mesh_context(map(jnp.asarray, maps.stored(list(leaves.values())))):
            (value, (aux, ids)), (grads, rows) = both(dense, by_rows.offsets)
        grads |= by_rows.gradients(ids, rows)
        grads = jax.tree.unflatten(treedef, [grads[i] for i in leaves])
        return (value, aux) if has_aux else value, grads

    return wrapped


class LossOfRows(NamedTuple):
    """A loss as a function of dense leaves and of offsets of the rows that it reads.

    Each reading has an offset: zeros that count as added to the rows, without memory
    for them. Their gradient is the gradient of the rows.

    Attributes:
      loss: (dense leaves, offsets) -> (value, (aux, ids of the readings)).
      offsets: those of each table, by its index.
      tables: the tables, by their index.
    """

    loss: Callable[[dict[int, Any], Offsets], tuple[Any, tuple[Any, readings.Ids]]]
    offsets: Offsets
    tables: dict[int, readings.WholeOrRows]

    @classmethod
    def of(
        cls,
        loss_fn: Callable[[dict[int, Any]], tuple[Any, Any]],
        leaves: dict[int, Any],
        is_named: Callable[[str], bool],
        paths: Sequence[str],
    ) -> LossOfRows:
        """``loss_fn(leaves)`` returns a value and its aux.

        Those of the leaves are tables that are named by their ``paths``.

        Raises:
          ValueError: one of them is no table.
          TypeError: the loss uses a table in another way than to read its rows.
        """
        tables = _select(is_named, paths, leaves)
        dense = {i: leaf for i, leaf in leaves.items() if i not in tables}

        def of_both(dense: dict[int, Any], read: dict[int, Any]) -> tuple[Any, Any]:
            return loss_fn(dense | read)

        if not tables:  # Nothing is searched for their rows.

            def plain(dense: dict[int, Any], _: Offsets) -> tuple[Any, Any]:
                value, aux = loss_fn(dense)
                return value, (aux, {})

            return cls(plain, {}, {})
        run, types = readings.trace(of_both, dense, tables, paths)

        def loss(dense: dict[int, Any], offsets: Offsets) -> tuple[Any, Any]:
            following = {i: iter(zeros) for i, zeros in offsets.items()}

            def on_rows(i: int, rows: jax.Array) -> jax.Array:
                zeros = next(following[i])
                there = jax.typeof(rows).sharding
                if jax.typeof(zeros).sharding.mesh != there.mesh:
                    zeros = jax.sharding.reshard(zeros, there)
                return _plus(rows, zeros)

            (value, aux), ids = run(dense, on_rows)
            return value, (aux, ids)

        offsets = {i: [*map(constants.zeros_of_type, types[i])] for i in tables}
        return cls(loss, offsets, tables)

    def gradients(self, ids: readings.Ids, rows: Offsets) -> dict[int, IndexedSlices]:
        """The gradients of tables, from those of the rows with these ids."""
        return {i: _slices(ids[i], rows[i], x) for i, x in self.tables.items()}


def _is_part(node: object) -> TypeGuard[TableRows]:
    return isinstance(node, TableRows)


def _select(
    is_named: Callable[[str], bool], paths: Sequence[str], leaves: dict[int, Any]
) -> dict[int, readings.WholeOrRows]:
    """The leaves that are named, or parts of a table, by their index."""
    named: dict[int, readings.WholeOrRows] = {}
    for i, leaf in leaves.items():
        if not _is_part(leaf) and not is_named(paths[i]):
            continue
        # A part of a table needs no name: it has no other gradient.
        named[i] = leaf if _is_part(leaf) else jnp.asarray(leaf)
        if not named[i].ndim or not jnp.issubdtype(named[i].dtype, jnp.inexact):
            raise ValueError(
                "tables must name arrays of floating-point rows, but "
                f"{paths[i]!r} is {named[i].dtype}{list(named[i].shape)}."
            )
    return named


def _slices(
    ids: list[jax.Array], rows: list[jax.Array], table: readings.WholeOrRows
) -> IndexedSlices:
    """The gradient of a table; ``rows`` are the gradients of the rows at ``ids``."""
    row = table.shape[1:]
    # On explicit mesh axes each device gets all rows, even if a gather of them was on
    # automatic axes.
    shardings = map(explicit_sharding, [jnp.asarray(maps.stored(table)), *ids, *rows])
    mesh = next((s.mesh for s in shardings if s is not None), None)
    flat_ids = [replicated(i, mesh).ravel() for i in ids]
    flat_rows = [replicated(r, mesh).reshape(-1, *row) for r in rows]
    return IndexedSlices(
        jnp.concatenate(flat_ids or [jnp.zeros(0, jnp.int32)]),
        jnp.concatenate(flat_rows or [jnp.zeros((0, *row), table.dtype)]),
        table.shape,
    )


_Two: TypeAlias = tuple[jax.Array, jax.Array]


@jax.custom_jvp
def _plus(rows: jax.Array, zeros: jax.Array) -> jax.Array:
    """``rows + zeros``, without the addition."""
    del zeros
    return rows


@_plus.defjvp
def _plus_jvp(primals: _Two, tangents: _Two) -> _Two:
    rows, _ = primals
    rows_dot, zeros_dot = tangents
    return rows, rows_dot + zeros_dot
