"""Row-sparse gradients: the rows of a table that a batch touched, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gradxform._rows import opaque
from gradxform._rows.rows import (
    as_array,
    is_known,
    replicated,
    rows_of,
    searchsorted,
    summed,
    take_summed,
    to_jax,
    write_summed,
)
from gradxform._rows.stored_rows import RowSparseError, node
from gradxform._trees.arithmetic import expand, rounded_sum
from gradxform._trees.dtypes import wide_dtype
from gradxform._trees.types import SparseLeaf


class _NamesHint(type):
    """Tells the user what to do, wherever an error names the class."""

    def __repr__(cls) -> str:
        return f"<class 'gradxform.{cls.__name__}': {opaque.SHORT_HINT}>"


HINT = (
    "a row-sparse gradient (gradxform.IndexedSlices) was given to a function for dense "
    "ones, which would change its row indices along with its values. gradxform's own "
    "clips, adagrad, scale_by_learning_rate, apply_updates and wrappers take it as "
    "it is. Wrap an optimizer in gradxform.lazy, which runs it on these rows alone, or "
    "put gradxform.densify() in front of it. If optax.masked or optax.partition got a "
    "function for its mask or labels, call it once, on the parameters. Map a function "
    "with jax.tree.map(..., is_leaf=lambda x: isinstance(x, gradxform.IndexedSlices))."
)


@node(HINT)
class IndexedSlices(SparseLeaf, metaclass=_NamesHint):
    r"""The gradient of a table after a batch has read a few of its rows.

    .. math:: G_r = \sum_{i:\ indices_i = r} values_i

    It stands for the dense ``G`` of shape ``dense_shape``, and everything here treats
    it as ``G``: the rows of a repeated index are summed before anything else is done
    with them. An index equal to ``dense_shape[0]`` is padding. Its values count for
    nothing; they are set to zero, so that they fail no test for finite numbers.

    It is a pytree node, so it goes through ``jit``, ``lax.cond``, ``vmap``,
    ``all_gather`` and across processes. Code that multiplies or adds up the leaves of
    gradients would do the same to the indices. So the indices have a dtype that JAX
    itself refuses to calculate with: ``optax.scale`` and ``jax.lax.psum`` raise a
    ``TypeError``, however they get at the leaves. To use them, wrap an optimizer in
    :func:`lazy`, put :func:`densify` in front, or map with ``is_leaf=lambda x:
    isinstance(x, gx.IndexedSlices)``. NumPy does not know this dtype, so give
    ``(grads.indices, grads.values)`` to ``multihost_utils.process_allgather``. Code
    that leaves the indices alone, as ``optax.centralize`` does, is not refused: it acts
    on the rows as they were given, before repeated ones are summed. At the end of a
    step, ``optax.apply_updates`` computes ``table + updates``: the table with the rows
    added.

    A map keeps the structure, also one that makes a mask or labels. Optax maps these
    over parameters too, where a table is one leaf. So if they are a function, call it
    once, on the parameters: ``optax.partition(txs, labels(params))``.

    Args:
      indices: integers of shape [n], in any order, of any integer dtype; they are kept
        as int32.
      values: the rows, of shape [n, \*dense_shape[1:]] and of the table's dtype.
      dense_shape: the shape of the table, at most 2³¹ - 1 rows.

    Raises:
      TypeError: ``indices`` are not integers.
      ValueError: shapes do not fit; an index lies outside of [0, dense_shape[0]]. A
        traced index cannot be checked. If it lies outside, it counts as padding; a
        negative index does not count from the end.

    References:
      ``tf.IndexedSlices``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [9.0, 9.0]])
    >>> grads = gx.IndexedSlices([2, 0, 2, 4], rows, (4, 2))  # 4 is padding
    >>> grads.densify()
    Array([[3., 4.],
           [0., 0.],
           [6., 8.],
           [0., 0.]], dtype=float32)
    >>> grads.sum_duplicates().indices
    Array([0, 2, 4, 4], dtype=int32)
    >>> assert gx.global_norm(grads) == gx.global_norm(grads.densify())
    """

    # Whether the indices ascend without repetition, up to the padding at their end.
    # It belongs to this object and not to the pytree.
    _summed: bool
    _indices: Any  # int32[n], or of the opaque dtype, as in a pytree's leaves.

    def __init__(
        self,
        indices: jax.typing.ArrayLike | Sequence[int],
        values: jax.typing.ArrayLike,
        dense_shape: Sequence[int],
    ) -> None:
        given, rows = as_array(indices), as_array(values)
        shape = tuple(int(length) for length in dense_shape)
        if not shape or shape[0] > np.iinfo(np.int32).max:
            raise ValueError(
                "dense_shape must be that of a table with 0 to 2**31 - 1 rows, got "
                f"{shape}."
            )
        if given.ndim != 1 or rows.shape != given.shape + shape[1:]:
            raise ValueError(
                "indices and values must have shapes [n] and [n, *dense_shape[1:]], "
                f"got {list(given.shape)} and {list(rows.shape)} for dense_shape "
                f"{shape}."
            )
        # Sorting needs all rows of a gradient, so each device gets all of them.
        self._indices = replicated(to_jax(rows_of("indices", given, shape[0])))
        self.values = replicated(to_jax(rows))
        if not is_known(given) or np.any(np.asarray(given) == shape[0]):
            inside = jnp.expand_dims(
                self._indices < shape[0], tuple(range(1, rows.ndim))
            )
            self.values = jnp.where(inside, self.values, 0)
        self.dense_shape = shape
        self._summed = False

    @property
    def indices(self) -> jax.Array:
        """The rows of the table, int32[n]."""
        given = self._indices
        if not (hasattr(given, "dtype") and opaque.is_opaque(given.dtype)):
            return given
        if isinstance(given, jax.Array):
            return opaque.from_leaf(given, self.dense_shape[0])
        return given.update(dtype=jnp.dtype(jnp.int32))  # A description.

    def with_values(self, values: jax.Array) -> Self:
        """The same rows with other values, unchecked."""
        return self._make(self._indices, values, self.dense_shape, self._summed)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(indices={self.indices!r}, values={self.values!r}, "
            f"dense_shape={self.dense_shape!r})"
        )

    def densify(self, *, out_sharding: NamedSharding | None = None) -> jax.Array:
        """The dense gradient it stands for, an array of the table's size.

        On explicit mesh axes ``out_sharding`` says where it lies; by default it is
        whole on each device.
        """
        self._check_single()
        return self._sum_at(self.indices, self.dense_shape[0], out_sharding)

    def sum_duplicates(self) -> IndexedSlices:
        """The same gradient, with ascending indices that occur once, except padding.

        The number of rows stays n; the rest is padding, at the end, with zero values.
        Rows are added up in at least float32 and in the order in which they were given,
        as in :meth:`densify`: the two agree to the bit.
        """
        if self._summed:  # Comes first: then `values` may be one number for each row.
            return self
        self._check_single()
        if not self.values.shape[0]:
            return self._make(self._indices, self.values, self.dense_shape, True)
        indices, height = self.indices, self.dense_shape[0]
        n = len(indices)
        # Only the keys are sorted, and then each row looks up its position. On CPU a
        # sort of pairs of keys and positions takes six times as long.
        ordered = jax.lax.sort(jnp.asarray(indices))
        is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        position = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        rows = jnp.full_like(ordered, height).at[position].set(ordered)
        positions = jnp.where(indices < height, searchsorted(indices, rows), n)
        sums = self._sum_at(positions, n)
        return self._make(rows, sums, self.dense_shape, summed=True)

    def _sum_at(
        self, at: jax.Array, length: int, out_sharding: NamedSharding | None = None
    ) -> jax.Array:
        """Zeros, with each value added at its position if that is inside."""
        wide = np.promote_types(self.dtype, np.float32)
        if jnp.issubdtype(self.dtype, jnp.integer):
            wide = self.dtype
        shape = (length, *self.dense_shape[1:])
        sums = jnp.zeros(shape, wide, out_sharding=out_sharding)
        sums = sums.at[at].add(
            self.values.astype(wide), mode="drop", out_sharding=out_sharding
        )
        return sums.astype(self.dtype)

    def _check_single(self) -> None:
        if self.values.ndim != self.ndim:
            raise ValueError(
                f"this is a stack of row-sparse gradients, values of shape "
                f"{list(self.values.shape)} for dense_shape {self.dense_shape}, as "
                "jax.vmap and jax.lax.scan return them. Take them one by one, as in "
                "jax.vmap(lambda g: g.densify())(grads)."
            )

    def __radd__(self, table: jax.Array) -> jax.Array:
        """The table with these rows added, in its dtype, and rounded once."""
        if not (isinstance(table, jax.Array) and table.shape == self.shape):
            raise RowSparseError(HINT)
        rows = self.sum_duplicates()
        if wide_dtype(table) == table.dtype:
            # The sum needs no rounding to another dtype: one pass, in place.
            add = table.at[rows.indices].add
            return add(rows.values.astype(table.dtype), **summed(table))
        new = rounded_sum(rows.values, take_summed(table, rows.indices))
        return write_summed(table, rows.indices, new)

    # Values come first: optax.inject_hyperparams gives its numbers the dtype of the
    # first leaf.
    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Children and static data."""
        given = self._indices
        is_number = isinstance(given, jax.Array | np.ndarray) and given.dtype == "int32"
        leaf = opaque.to_leaf(given, self.dense_shape[0]) if is_number else given
        return (self.values, leaf), self.dense_shape

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[int, ...]]:
        """Children with their names, and static data."""
        children, dense_shape = self.tree_flatten()
        keys = map(jax.tree_util.GetAttrKey, ("values", "indices"))
        return tuple(zip(keys, children, strict=True)), dense_shape

    @classmethod
    def tree_unflatten(cls, dense_shape: tuple[int, ...], children: Any) -> Self:
        """From any children, as JAX also uses other objects than arrays.

        Raises:
          TypeError: the indices are plain numbers, so something has calculated them.
        """
        values, indices = children
        if isinstance(indices, jax.Array | np.ndarray):
            if indices.dtype == "uint32" and indices.shape[-1:] == (1,):
                # The form in host callbacks.
                indices = opaque.from_bits(indices, dense_shape[0])
            elif jnp.issubdtype(indices.dtype, np.number):
                raise RowSparseError(HINT)
        return cls._make(indices, values, dense_shape, summed=False)

    def _host_indices(self) -> np.ndarray[Any, Any]:
        given = self._indices
        if not (isinstance(given, jax.Array) and opaque.is_opaque(given.dtype)):
            return np.asarray(given)
        bits = np.asarray(jax.random.key_data(given))
        return opaque.from_bits(bits, self.dense_shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        indices: Any = self._host_indices()
        if isinstance(self.values, jax.Array):  # Both arrive as JAX's arrays.
            indices = jax.device_put(indices)
        return self._make, (indices, self.values, self.dense_shape, self._summed)

    @classmethod
    def _make(
        cls, indices: Any, values: Any, dense_shape: tuple[int, ...], summed: bool
    ) -> Self:
        self = object.__new__(cls)
        self._indices, self.values = indices, values
        self.dense_shape, self._summed = dense_shape, summed
        return self


def is_sparse(node: object) -> TypeGuard[IndexedSlices]:
    """Whether it is an ``IndexedSlices``; maps with this ``is_leaf`` take it whole."""
    return isinstance(node, IndexedSlices)


def ascending_rows(
    indices: jax.Array, values: jax.Array, dense_shape: tuple[int, ...]
) -> IndexedSlices:
    """From indices that ascend without repetition up to the padding; unchecked."""
    return IndexedSlices._make(indices, values, dense_shape, summed=True)


def padded_rows(g: IndexedSlices, length: int) -> IndexedSlices:
    """The same rows with padding at their end, in the memory of the host.

    It uses NumPy, so that no program is compiled for each number of rows.
    """
    n, shape = len(g.values), g.dense_shape
    values = np.zeros((length, *shape[1:]), g.dtype)
    values[:n] = g.values
    indices = np.full(length, shape[0], np.int32)
    indices[:n] = g._host_indices()
    return g._make(indices, values, shape, g._summed)


def filled(g: IndexedSlices, x: jax.Array, fill: Any) -> jax.Array:
    """``x`` with another value for padding; it may have several entries for a row."""
    inside, length = g.indices < g.dense_shape[0], len(x)
    if length != len(inside):
        inside = jnp.repeat(inside, length // len(inside), total_repeat_length=length)
    return jnp.where(expand(inside, x), x, jnp.asarray(fill, x.dtype))
