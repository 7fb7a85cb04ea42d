"""Row-sparse gradients: the rows of a table that a batch touched, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gradxform._numbers.arithmetic import expand, rounded_sum
from gradxform._rows import stored_rows
from gradxform._rows.opaque import SHORT_HINT
from gradxform._rows.rows import (
    as_array,
    has_values,
    replicated,
    rows_of,
    searchsorted,
    take_summed,
    to_jax,
    write_options,
    write_summed,
)
from gradxform._rows.stored_rows import RowSparseError, node, unchecked
from gradxform._trees.dtypes import wide_dtype
from gradxform._trees.types import SparseLeaf


class _NamesHint(type):
    """Tells the user what to do, wherever an error names the class."""

    def __repr__(cls) -> str:
        return f"<class 'gradxform.{cls.__name__}': {SHORT_HINT}>"


HINT = (
    "a row-sparse gradient (gradxform.IndexedSlices) was given to a function for dense "
    "ones, which would change its row indices along with its values. gradxform's own "
    "clips, adagrad, scale_by_learning_rate, apply_updates and wrappers take it as "
    "it is. Wrap an optimizer in gradxform.lazy, which runs it on these rows alone, or "
    "put gradxform.densify() in front of it. If optax.masked or optax.partition got a "
    "function for its mask or labels, call it once, on the parameters. Map a function "
    "with jax.tree.map(..., is_leaf=lambda x: isinstance(x, gradxform.IndexedSlices))."
)


@node
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

    _indices: Any  # See `stored_rows`.
    _summed: bool
    _hint = HINT

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
        self.dense_shape, self._summed = shape, False
        if not has_values(given) or np.any(np.asarray(given) == shape[0]):
            self.values = filled(self, self.values, 0)

    __reduce__ = stored_rows.reduced
    __repr__ = stored_rows.shown

    @property
    def indices(self) -> jax.Array:
        """The rows of the table, int32[n]."""
        return stored_rows.plain(self)

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
            return unchecked(
                IndexedSlices, self._indices, self.values, self.dense_shape, True
            )
        indices, height = self.indices, self.dense_shape[0]
        n = len(indices)
        # Only the keys are sorted, and then each row looks up its position. On CPU a
        # sort of pairs of keys and positions takes six times as long.
        ordered = jax.lax.sort(indices)
        is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        position = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        rows = jnp.full_like(ordered, height).at[position].set(ordered)
        positions = jnp.where(indices < height, searchsorted(indices, rows), n)
        sums = self._sum_at(positions, n)
        return unchecked(IndexedSlices, rows, sums, self.dense_shape, summed=True)

    def _sum_at(
        self, at: jax.Array, length: int, out_sharding: NamedSharding | None = None
    ) -> jax.Array:
        """Zeros, with each value added at its position if that is inside."""
        is_integer = jnp.issubdtype(self.dtype, jnp.integer)
        wide = self.dtype if is_integer else wide_dtype(self.values)
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
            return add(rows.values.astype(table.dtype), **write_options(table))
        new = rounded_sum(rows.values, take_summed(table, rows.indices))
        return write_summed(table, rows.indices, new)


def is_sparse(node: object) -> TypeGuard[IndexedSlices]:
    """Whether it is an ``IndexedSlices``; maps with this ``is_leaf`` take it whole."""
    return isinstance(node, IndexedSlices)


def filled(g: IndexedSlices, x: jax.Array, fill: Any) -> jax.Array:
    """``x`` with another value for padding; it may have several entries for a row."""
    inside, length = g.indices < g.dense_shape[0], len(x)
    if length != len(inside):
        inside = jnp.repeat(inside, length // len(inside), total_repeat_length=length)
    return jnp.where(expand(inside, x), x, jnp.asarray(fill, x.dtype))
