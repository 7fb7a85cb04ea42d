"""Reading a few rows of a table, and the row-sparse gradients that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._trees import checks, maps, versions
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.rows import (
    as_array,
    explicit_sharding,
    is_known,
    places,
    replicated,
    rows_of,
    take_rows,
)

# Which tables get row-sparse gradients: their paths, or a predicate on the path.
Tables = Sequence[str] | Callable[[str], bool]


def lookup(table: Any, ids: jax.typing.ArrayLike) -> jax.Array:
    r"""The rows of a table with these indices: ``table[ids]``.

    Under :func:`value_and_grad` a table that is named there and read through this gets
    a row-sparse gradient. Everywhere else this is a plain gather, of which JAX makes a
    dense gradient.

    Args:
      table: of shape [rows, \*row]; or a part of such a table, the rows that
        ``ParameterServer.pull(rows=...)`` gave, as an :class:`IndexedSlices`.
      ids: integers of any shape and integer dtype, in [0, rows]. ``rows`` is padding:
        it reads zeros and gets no gradient.

    Returns:
      An array of shape [\*ids.shape, \*row], of the dtype of the table.

    Raises:
      TypeError: ``ids`` are no integers.
      ValueError: an id lies outside of [0, rows]. A traced id cannot be looked at:
        outside, it counts as padding, and a negative one does not count from the end.
        The same holds for an id of which a part of a table has no row.

    Source: ``tf.nn.embedding_lookup``, ``tf.gather``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> assert gx.lookup(table, [[1], [2]]).tolist() == [[[3.0, 4.0]], [[0.0, 0.0]]]
    """
    if not isinstance(table, _Table | IndexedSlices):
        table = jnp.asarray(table)
    if not table.ndim:
        raise ValueError("table must have at least one axis, got a scalar.")
    ids = jnp.asarray(rows_of("ids", as_array(ids), table.shape[0]))
    return table.read(ids) if isinstance(table, _Table) else _read(table, ids)[0]


def value_and_grad(
    loss_fn: Callable[..., Any], *, tables: Tables = (), has_aux: bool = False
) -> Callable[..., Any]:
    r"""``jax.value_and_grad``, with row-sparse gradients for the tables named.

    .. math:: \partial L / \partial table_r = \sum_{i:\ ids_i = r} \partial L / \partial
        rows_i

    The loss reads each of those tables through :func:`lookup`, as often as it likes;
    the gradient then consists of the rows that were read, and no array of the table's
    size is made. All other parameters get the gradients that JAX gives.

    Args:
      loss_fn: ``loss_fn(params, *batch, **kwargs)`` returns a scalar, or ``(scalar,
        aux)`` where ``has_aux`` is set. It is traced twice: first for the shapes of the
        rows that it reads.
      tables: paths of leaves of ``params``, with slashes, as ``"encoder/emb"``; or a
        predicate on such a path.
      has_aux: as in ``jax.value_and_grad``.

    Returns:
      A function of ``(params, *batch, **kwargs)`` that returns ``(value, grads)``, or
      ``((value, aux), grads)``. Each gradient has the shape and dtype of its parameter;
      a table's is an :class:`IndexedSlices` with one row for each that was read.

    Raises:
      ValueError: ``tables`` names no leaf of ``params``, or one that is no table of
        floating-point rows.
      TypeError: the loss reads a named table in any other way than through
        :func:`lookup`, or inside a ``jit``, ``scan`` or other transformation of its
        own, from where its rows cannot be brought out.

    Inside ``jax.shard_map``, where each device has a part of the batch and a table of
    its own, ``jax.lax.all_gather(grads["emb"], axis, tiled=True, to="invarying")``
    (before JAX 0.8.2 ``all_gather_invariant``, without ``to``) gives all devices the
    rows of all, and the tables stay alike.

    Source: ``tf.gradients`` through ``tf.gather``.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> def loss_fn(params, ids):
    ...     rows = gx.lookup(params["emb"], ids)
    ...     return jnp.sum(rows**2) * params["scale"]
    >>> params = {"emb": jnp.arange(1e6).reshape(-1, 2), "scale": jnp.array(0.5)}
    >>> step = jax.jit(gx.value_and_grad(loss_fn, tables=["emb"]))
    >>> loss, grads = step(params, jnp.array([3, 0, 3]))
    >>> assert grads["emb"].indices.tolist() == [3, 0, 3]
    >>> assert grads["emb"].values.tolist() == [[6.0, 7.0], [0.0, 1.0], [6.0, 7.0]]
    >>> assert grads["scale"] == 171.0
    """
    if isinstance(tables, str):
        raise TypeError(f"tables must be a sequence of paths, got {tables!r}.")
    if tables:
        versions.before_tracing()

    def wrapped(params: Any, *batch: Any, **kwargs: Any) -> Any:
        flat, treedef = jax.tree.flatten_with_path(params, is_leaf=_is_part)
        paths = [checks.slashed(path) for path, _ in flat]
        leaves = dict(enumerate(leaf for _, leaf in flat))
        named = _select(tables, paths, leaves)

        def loss(
            dense: dict[int, Any], read: dict[int, _Table]
        ) -> tuple[jax.Array, Any]:
            for table in read.values():
                table.trace = versions.trace()
            mixed = [(read if i in read else dense)[i] for i in leaves]
            value = loss_fn(jax.tree.unflatten(treedef, mixed), *batch, **kwargs)
            return value if has_aux else (value, None)

        def tapped(
            dense: dict[int, Any], taps: dict[int, list[jax.Array]]
        ) -> tuple[jax.Array, Any]:
            read = {i: _Table(paths[i], named[i], taps[i]) for i in named}
            value, aux = loss(dense, read)
            return value, (aux, {i: table.ids for i, table in read.items()})

        # A first tracing finds how many rows are read. In the second, each reading is
        # tapped: zeros, which need no memory, are taken to be added to the rows, and
        # their gradient is that of the rows.
        dense = {i: leaf for i, leaf in leaves.items() if i not in named}
        probes = {i: _Table(paths[i], table) for i, table in named.items()}
        if named:
            _probe(lambda: loss(dense, probes), probes)
        taps = {
            i: [maps.zeros_of_type(row_type) for row_type in probe.types]
            for i, probe in probes.items()
        }
        (value, (aux, ids)), (grads, rows) = jax.value_and_grad(
            tapped, argnums=(0, 1), has_aux=True
        )(dense, taps)
        for i, table in named.items():
            grads[i] = _slices(ids[i], rows[i], table)
        grads = jax.tree.unflatten(treedef, [grads[i] for i in leaves])
        return (value, aux) if has_aux else value, grads

    return wrapped


def _select(tables: Tables, paths: list[str], leaves: dict[int, Any]) -> dict[int, Any]:
    """The leaves that are named, or parts of a table, by their number."""
    if not callable(tables):
        for path in tables:
            if path not in paths:
                raise ValueError(
                    f"tables must name leaves of params, got {path!r}; there are "
                    f"{', '.join(map(repr, paths))}."
                )
    is_named = tables if callable(tables) else tables.__contains__
    named = {}
    for i, leaf in leaves.items():
        if not _is_part(leaf) and not is_named(paths[i]):
            continue
        # A part of a table needs no name: there is no other gradient of it.
        named[i] = leaf.sum_duplicates() if _is_part(leaf) else jnp.asarray(leaf)
        if not named[i].ndim or not jnp.issubdtype(named[i].dtype, jnp.inexact):
            raise ValueError(
                "tables must name arrays of floating-point rows, but "
                f"{paths[i]!r} is {named[i].dtype}{list(named[i].shape)}."
            )
    return named


def _probe(loss: Callable[[], Any], probes: dict[int, _Table]) -> None:
    """Traces the loss once; a table that meets a function of JAX raises our error."""
    try:
        jax.eval_shape(loss)
    except TypeError as error:
        if _Table.__name__ not in str(error):
            raise
        paths = ", ".join(repr(table.path) for table in probes.values())
        raise TypeError(_HOW.format(paths, "by a function of JAX's")) from error


def _slices(ids: list[jax.Array], rows: list[jax.Array], table: Any) -> IndexedSlices:
    """The gradient of a table that was read at ``ids``, where ``rows`` is theirs."""
    row = table.shape[1:]
    flat_ids = [replicated(i).ravel() for i in ids]
    flat_rows = [replicated(r).reshape(-1, *row) for r in rows]
    return IndexedSlices(
        jnp.concatenate(flat_ids or [jnp.zeros(0, jnp.int32)]),
        jnp.concatenate(flat_rows or [jnp.zeros((0, *row), table.dtype)]),
        table.shape,
    )


_HOW = (
    "{0} is one of tables, so the loss can read it through gradxform.lookup(table, "
    "ids) alone, and outside of transformations within the loss; it was read {1}. Look "
    "the rows up first, for ids of any shape, or leave {0} out of tables."
)


class _Table:
    """What the loss gets for a table that is named: :func:`lookup` reads it."""

    def __init__(
        self,
        path: str,
        array: Any,
        taps: Sequence[jax.Array] | None = None,
    ) -> None:
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self.path, self.array, self.taps = path, array, taps
        self.ids: list[jax.Array] = []
        self.types: list[Any] = []
        self.trace: Any = None

    # To what picks the arrays out of its parameters it is one, and stays in.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return jax.Array

    def read(self, ids: jax.Array) -> jax.Array:
        """The rows, tapped if there is a tap for this reading."""
        if self.trace != versions.trace():
            self._refuse("inside a jit, vmap, scan or other transformation of its own")
        rows, ids = _read(self.array, ids)
        if self.taps is None:  # Of what is traced first no array may stay behind.
            self.types.append(jax.typeof(rows))
            return rows
        self.ids.append(ids)
        return _tap(rows, self.taps[len(self.ids) - 1])

    def _refuse(self, how: str) -> NoReturn:
        raise TypeError(_HOW.format(repr(self.path), how))

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"by its attribute {name!r}")

    def _refuse_arithmetic(self, *_: Any) -> NoReturn:
        self._refuse("by an operator")

    __getitem__ = __len__ = __iter__ = __array__ = __neg__ = _refuse_arithmetic
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_arithmetic
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse_arithmetic
    __matmul__ = __rmatmul__ = __floordiv__ = __rfloordiv__ = _refuse_arithmetic
    __mod__ = __rmod__ = __eq__ = __ne__ = __lt__ = __le__ = _refuse_arithmetic
    __gt__ = __ge__ = __pos__ = __abs__ = __contains__ = _refuse_arithmetic
    __float__ = __int__ = __bool__ = _refuse_arithmetic
    __hash__ = None  # type: ignore[assignment]


def _is_part(leaf: Any) -> bool:
    return isinstance(leaf, IndexedSlices)


def _read(table: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows, and their ids, padding where a part of a table does not hold them."""
    if not _is_part(table):
        return _gather(table, ids), ids
    part = table.sum_duplicates()
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
    return _gather(part.values, at), jnp.where(missing, part.shape[0], ids)


def _gather(table: jax.Array, ids: jax.Array) -> jax.Array:
    explicit = explicit_sharding(table)
    if explicit is not None:  # The rows lie as their ids do.
        of_ids = jax.typeof(ids).sharding.spec
        taken = _mesh_axes(*of_ids)
        of_row = (None if _mesh_axes(i) & taken else i for i in explicit.spec[1:])
        explicit = NamedSharding(explicit.mesh, P(*of_ids, *of_row))
    return take_rows(table, ids, out_sharding=explicit)


def _mesh_axes(*spec: Any) -> set[str]:
    """Those that cut an array somewhere, one or several an axis."""
    return {a for i in spec for a in (i if isinstance(i, tuple) else (i,)) if a}


@jax.custom_jvp
def _tap(rows: jax.Array, zeros: jax.Array) -> jax.Array:
    """``rows + zeros``, without the addition."""
    del zeros
    return rows


@_tap.defjvp
def _tap_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    rows, _ = primals
    rows_dot, zeros_dot = tangents
    return rows, rows_dot + zeros_dot
