"""Reading a few rows of a table, and the row-sparse gradients that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.extend.core
import jax.numpy as jnp

from gradxform import _checks, _tree
from gradxform._indexed_slices import IndexedSlices, check_rows, rows_of

# Which tables get row-sparse gradients: their paths, or a predicate on the path.
Tables = Sequence[str] | Callable[[str], bool]


def lookup(table: Any, ids: jax.typing.ArrayLike) -> jax.Array:
    r"""The rows of a table with these indices: ``table[ids]``.

    Under :func:`value_and_grad` a table that is named there and read through this gets
    a row-sparse gradient. Everywhere else this is a plain gather, of which JAX makes a
    dense gradient.

    Args:
      table: of shape [rows, \*row].
      ids: integers of any shape and integer dtype, in [0, rows]. ``rows`` is padding:
        it reads zeros and gets no gradient.

    Returns:
      An array of shape [\*ids.shape, \*row], of the dtype of the table.

    Raises:
      TypeError: ``ids`` are no integers.
      ValueError: an id lies outside of [0, rows]. A traced id cannot be looked at:
        outside, it counts as padding, and a negative one does not count from the end.

    Source: ``tf.nn.embedding_lookup``, ``tf.gather``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> assert gx.lookup(table, [[1], [2]]).tolist() == [[[3.0, 4.0]], [[0.0, 0.0]]]
    """
    ids = ids if isinstance(ids, jax.Array) else jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}.")
    check_rows("ids", ids, table.shape[0] + 1)
    ids = rows_of(ids, table.shape[0])
    if isinstance(table, _Table):
        return table.read(ids)
    return _gather(jnp.asarray(table), ids)


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

    def wrapped(params: Any, *batch: Any, **kwargs: Any) -> Any:
        flat, treedef = jax.tree.flatten_with_path(params)
        leaves = {_checks.slashed(path): leaf for path, leaf in flat}
        named = _select(tables, leaves)

        def loss(
            dense: dict[str, Any], read: dict[str, _Table]
        ) -> tuple[jax.Array, Any]:
            trace = jax.extend.core.get_opaque_trace_state()
            for table in read.values():
                table.trace = trace
            mixed = [(read if k in read else dense)[k] for k in leaves]
            value = loss_fn(jax.tree.unflatten(treedef, mixed), *batch, **kwargs)
            return value if has_aux else (value, None)

        def tapped(
            dense: dict[str, Any], taps: dict[str, list[jax.Array]]
        ) -> tuple[jax.Array, Any]:
            read = {k: _Table(k, table, taps[k]) for k, table in named.items()}
            value, aux = loss(dense, read)
            return value, (aux, {k: table.ids for k, table in read.items()})

        # A first tracing finds how many rows are read. In the second, each reading is
        # tapped: zeros, which need no memory, are taken to be added to the rows, and
        # their gradient is that of the rows.
        dense = {k: leaf for k, leaf in leaves.items() if k not in named}
        probes = {k: _Table(k, table) for k, table in named.items()}
        if named:
            jax.eval_shape(lambda: loss(dense, probes))
        taps = {
            k: [_tree.zeros_of_type(row_type) for row_type in probe.types]
            for k, probe in probes.items()
        }
        (value, (aux, ids)), (grads, rows) = jax.value_and_grad(
            tapped, argnums=(0, 1), has_aux=True
        )(dense, taps)
        for k, table in named.items():
            grads[k] = _slices(ids[k], rows[k], table)
        grads = jax.tree.unflatten(treedef, [grads[k] for k in leaves])
        return (value, aux) if has_aux else value, grads

    return wrapped


def _select(tables: Tables, leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves that are named, by path."""
    if callable(tables):
        named = [k for k in leaves if tables(k)]
    else:
        named = list(dict.fromkeys(tables))
    for k in named:
        if k not in leaves:
            raise ValueError(
                f"tables must name leaves of params, got {k!r}; there are "
                f"{', '.join(map(repr, leaves))}."
            )
        if not jnp.ndim(leaves[k]) or not jnp.issubdtype(
            jnp.result_type(leaves[k]), jnp.inexact
        ):
            raise ValueError(
                "tables must name arrays of floating-point rows, but "
                f"{k!r} is {jax.typeof(leaves[k]).str_short()}."
            )
    return {k: jnp.asarray(leaves[k]) for k in named}


def _slices(
    ids: list[jax.Array], rows: list[jax.Array], table: jax.Array
) -> IndexedSlices:
    """The gradient of a table that was read at ``ids``, where ``rows`` is theirs."""
    row = table.shape[1:]
    return IndexedSlices(
        jnp.concatenate([i.ravel() for i in ids] or [jnp.zeros(0, jnp.int32)]),
        jnp.concatenate(
            [r.reshape(-1, *row) for r in rows] or [jnp.zeros((0, *row), table.dtype)]
        ),
        table.shape,
    )


class _Table:
    """What the loss gets for a table that is named: :func:`lookup` reads it."""

    def __init__(
        self, path: str, array: jax.Array, taps: Sequence[jax.Array] = ()
    ) -> None:
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self.path, self.array, self.taps = path, array, taps
        self.ids: list[jax.Array] = []
        self.types: list[Any] = []
        self.trace: Any = None

    def read(self, ids: jax.Array) -> jax.Array:
        """The rows, tapped if there is a tap for this reading."""
        if self.trace != jax.extend.core.get_opaque_trace_state():
            self._refuse("inside a jit, vmap, scan or other transformation of its own")
        rows = _gather(self.array, ids)
        if self.taps:
            rows = _tap(rows, self.taps[len(self.ids)])
        self.ids.append(ids)
        self.types.append(jax.typeof(rows))
        return rows

    def _refuse(self, how: str) -> NoReturn:
        raise TypeError(
            f"{self.path!r} is one of tables, so the loss can read it through "
            f"gradxform.lookup(table, ids) alone, outside of transformations within "
            f"the loss; it was read {how}. Look the rows up first, for ids of any "
            f"shape, or leave {self.path!r} out of tables."
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f"by its attribute {name!r}")

    def _refuse_arithmetic(self, *_: Any) -> NoReturn:
        self._refuse("by an operator")

    __getitem__ = __len__ = __iter__ = __array__ = __neg__ = _refuse_arithmetic
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_arithmetic
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _refuse_arithmetic
    __matmul__ = __rmatmul__ = _refuse_arithmetic


def _gather(table: jax.Array, ids: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill", fill_value=0)


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
