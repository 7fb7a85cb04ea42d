"""Row-sparse gradients: the rows of a table that a batch touched, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@jax.tree_util.register_pytree_with_keys_class
class IndexedSlices:
    r"""The gradient of a table of which a batch has read a few rows.

    .. math:: G_r = \sum_{i:\ indices_i = r} values_i

    It stands for the dense ``G`` of shape ``dense_shape``, and everything here treats
    it as that: repeated indices add up before anything else is done with them. An
    index equal to ``dense_shape[0]`` is padding, and its values count for nothing.

    It is a pytree node, so it goes through ``jit``, ``lax.cond``, ``vmap``,
    ``all_gather`` and across processes. ``jax.tree.map`` and ``jax.lax.psum`` are
    refused, because what multiplies or adds up gradients would do the same to the
    indices: ``optax.scale`` raises a ``TypeError``. Where that is wanted, put
    :func:`densify` in front, or map with ``is_leaf=lambda x: isinstance(x,
    gx.IndexedSlices)``.

    Args:
      indices: integers of shape [n], in any order, of any integer dtype; int32 inside.
      values: the rows, of shape [n, \*dense_shape[1:]] and of the table's dtype.
      dense_shape: the shape of the table, at most 2³¹ - 1 rows.

    Raises:
      TypeError: ``indices`` are no integers.
      ValueError: shapes do not fit; an index lies outside of [0, dense_shape[0]]. A
        traced index cannot be looked at: outside, it counts as padding, and a negative
        one does not count from the end.

    Source: ``tf.IndexedSlices``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> rows = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [9.0, 9.0]])
    >>> grads = gx.IndexedSlices([2, 0, 2, 4], rows, (4, 2))  # 4 is padding
    >>> dense = jnp.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    >>> assert jnp.array_equal(grads.densify(), dense)
    >>> assert gx.global_norm(grads) == gx.global_norm(dense)
    >>> assert grads.sum_duplicates().indices.tolist() == [0, 2, 4, 4]
    """

    indices: jax.Array  # int32[n]
    values: jax.Array  # [n, *dense_shape[1:]]
    dense_shape: tuple[int, ...]
    # Whether the indices ascend without repetition, up to the padding at their end.
    # It belongs to this object and not to the pytree: what comes out of a conditional,
    # or into a jitted function, has lost it and is looked through again.
    _summed: bool

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
        # Sorting takes all rows of a gradient, so explicit mesh axes all get them.
        self.indices = replicated(rows_of("indices", given, shape[0]))
        self.values = replicated(jnp.asarray(rows))
        self.dense_shape = shape
        self._summed = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense gradient it stands for."""
        return self.dense_shape

    @property
    def ndim(self) -> int:
        """The number of axes of the dense gradient it stands for."""
        return len(self.dense_shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    def densify(self) -> jax.Array:
        """The dense gradient it stands for, an array of the table's size."""
        return self._sum_at(self.indices, self.dense_shape[0])

    def with_values(self, values: jax.Array) -> IndexedSlices:
        """The same rows with other values, unchecked."""
        return self._make(self.indices, values, self.dense_shape, self._summed)

    def sum_duplicates(self) -> IndexedSlices:
        """The same gradient, with ascending indices, each but the padding given once.

        The number of rows stays n; what is left over is padding, at the end, with zero
        values. Rows are added up in at least float32 and in the order in which they
        were given, as :meth:`densify` does it: the two agree to the bit.
        """
        if self._summed or not self.indices.size:
            return self
        height, n = self.dense_shape[0], len(self.indices)
        # Only the keys are sorted, and each row then looks up its place: on CPU sorting
        # pairs of keys and positions takes six times as long.
        ordered = jax.lax.sort(jnp.asarray(self.indices))
        is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        place = jnp.cumsum(is_first, dtype=jnp.int32) - 1
        rows = jnp.full_like(ordered, height).at[place].set(ordered)
        places = place[jnp.searchsorted(ordered, self.indices, method="scan_unrolled")]
        places = jnp.where(self.indices < height, places, n)
        sums = self._sum_at(places, n)
        return self._make(rows, sums, self.dense_shape, summed=True)

    def _sum_at(self, places: jax.Array, length: int) -> jax.Array:
        """Zeros with each of the values added at its place, if that is inside."""
        wide = np.promote_types(self.dtype, np.float32)
        sums = jnp.zeros((length, *self.dense_shape[1:]), wide)
        sums = sums.at[places].add(self.values.astype(wide), mode="drop")
        return sums.astype(self.dtype)

    def __repr__(self) -> str:
        return (
            f"IndexedSlices(indices={self.indices!r}, values={self.values!r}, "
            f"dense_shape={self.dense_shape!r})"
        )

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(_CURE)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
    __getitem__ = __array__ = _refuse

    # Values come first: optax.inject_hyperparams takes the dtype of its numbers from
    # the first leaf that it finds.
    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Children and static data."""
        _refuse_arithmetic_on_leaves()
        return (self.values, self.indices), self.dense_shape

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[int, ...]]:
        """Children with their names, and static data."""
        _refuse_arithmetic_on_leaves()
        key = jax.tree_util.GetAttrKey
        children = ((key("values"), self.values), (key("indices"), self.indices))
        return children, self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...], children: tuple[Any, Any]
    ) -> IndexedSlices:
        """Of anything that JAX puts in the place of arrays, unchecked."""
        values, indices = children
        return cls._make(indices, values, dense_shape, summed=False)

    @classmethod
    def _make(
        cls, indices: Any, values: Any, dense_shape: tuple[int, ...], summed: bool
    ) -> IndexedSlices:
        self = object.__new__(cls)
        self.indices, self.values = indices, values
        self.dense_shape, self._summed = dense_shape, summed
        return self


def rows_of(name: str, indices: Any, height: int) -> jax.Array:
    """Indices as int32 in [0, height], those outside of the table as padding.

    Raises:
      TypeError: they are no integers.
      ValueError: one lies outside of [0, height], if it can be looked at: a traced one
        has no value yet, and no process sees all those of several processes.
    """
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        if indices.size:
            raise TypeError(f"{name} must be integers, got {indices.dtype}.")
        indices = indices.astype(np.int32)  # An empty list is a list of floats.
    known = isinstance(indices, np.ndarray) or (
        not isinstance(indices, jax.core.Tracer) and indices.is_fully_addressable
    )
    if known and indices.size:
        _check_inside(name, np.asarray(indices), height)
    # They are compared before they are made narrower: the uint32 for -1 is no -1. And
    # after they are made wider: the height may be more than an int8 can count.
    if indices.dtype.itemsize < 4:
        indices = indices.astype(np.int32)
    inside = indices < height
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        inside &= indices >= 0
    return jnp.where(inside, indices.astype(np.int32), np.int32(height))


def _check_inside(name: str, indices: np.ndarray[Any, Any], height: int) -> None:
    outside = (indices < 0) | (indices > height)
    if outside.any():
        first = tuple(np.argwhere(outside)[0].tolist())
        raise ValueError(
            f"{name} must be in [0, {height}], where {height} is padding, got "
            f"{indices[first]} at position {list(first)}."
        )


def as_array(x: Any) -> Any:
    """Arrays as they are; what is none becomes NumPy's, which keeps every integer."""
    return x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x)


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """How ``x`` lies on mesh axes of type Explicit; None where there are none."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def replicated(x: jax.Array) -> jax.Array:
    """``x`` whole on each device of its explicit mesh axes; else as it is."""
    sharding = explicit_sharding(x)
    return x if sharding is None else jax.sharding.reshard(x, P())


_CURE = (
    "a row-sparse gradient (gradxform.IndexedSlices) was given to a function for dense "
    "ones, which would change its row indices along with its values. gradxform's own "
    "clips, adagrad, scale_by_learning_rate, apply_updates and wrappers take it as "
    "it is; for this one put gradxform.densify() in front, or map with "
    "jax.tree.map(..., is_leaf=lambda x: isinstance(x, gradxform.IndexedSlices))."
)

# These apply arithmetic to every leaf alike, and a node has no other way to refuse:
# an index multiplied by a learning rate still is an index, of another row. So it looks
# who asks for its leaves.
_ARITHMETIC = {
    f.__code__
    for f in (
        jax.tree.map,
        jax.tree.map_with_path,
        jax.tree_util.tree_map,
        jax.tree_util.tree_map_with_path,
        jax.lax.psum,
        jax.lax.pmean,
        jax.lax.pmax,
        jax.lax.pmin,
    )
}
# These move leaves about and do not calculate with them.
_MOVERS = frozenset({"chex", "equinox", "flax", "haiku", "orbax"})
_ZEROS = optax.tree.zeros_like.__code__  # The rows change, but what they hold is zero.


def _refuse_arithmetic_on_leaves() -> None:
    frame: Any = sys._getframe(2)
    entry = None  # The function of JAX that was called from outside of JAX.
    while frame is not None and _package(frame) == "jax":
        entry, frame = frame.f_code, frame.f_back
    if entry not in _ARITHMETIC or frame is None:
        return
    if _package(frame) not in _MOVERS and frame.f_code is not _ZEROS:
        raise TypeError(_CURE)


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
