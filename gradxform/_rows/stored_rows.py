"""A few rows of a table and their indices: how they are stored, and go through JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._rows.opaque import from_bits, from_leaf, is_opaque, to_leaf
from gradxform._rows.rows import as_array, is_known, replicated, rows_of, to_jax
from gradxform._trees.types import SparseLeaf


class RowSparseError(TypeError):
    """Row-sparse leaves were given to a function for arrays."""


class StoredRows(SparseLeaf):
    """Rows of a table, a pytree node; what they mean is up to each kind.

    An index equal to ``dense_shape[0]`` is padding, and its row is zero.
    """

    dense_shape: tuple[int, ...]
    # Whether the indices ascend without repetition, up to the padding at their end.
    # It belongs to this object and not to the pytree.
    _summed: bool
    _indices: Any  # int32[n], or of the opaque dtype, as in a pytree's leaves.

    # What to do instead of a calculation, and whether all objects are summed.
    _hint: ClassVar[str]
    _always_summed: ClassVar[bool] = False

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
        self._summed = self._always_summed
        self._finish()

    def _finish(self) -> None:
        """What else a kind of rows needs once these are known."""

    @property
    def indices(self) -> jax.Array:
        """The rows of the table, int32[n]."""
        given = self._indices
        if not (hasattr(given, "dtype") and is_opaque(given.dtype)):
            return given
        if isinstance(given, jax.Array):
            return from_leaf(given, self.dense_shape[0])
        return given.update(dtype=jnp.dtype(jnp.int32))  # A description.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole table."""
        return self.dense_shape

    def with_values(self, values: jax.Array) -> Self:
        """The same rows with other values, unchecked."""
        return self._make(self._indices, values, self.dense_shape, self._summed)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(indices={self.indices!r}, values={self.values!r}, "
            f"dense_shape={self.dense_shape!r})"
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise RowSparseError(self._hint)

    # Values come first: optax.inject_hyperparams gives its numbers the dtype of the
    # first leaf.
    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Children and static data."""
        given = self._indices
        is_number = isinstance(given, jax.Array | np.ndarray) and given.dtype == "int32"
        leaf = to_leaf(given, self.dense_shape[0]) if is_number else given
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
                indices = from_bits(indices, dense_shape[0])
            elif jnp.issubdtype(indices.dtype, np.number):
                raise RowSparseError(cls._hint)
        return cls._make(indices, values, dense_shape, summed=cls._always_summed)

    def _host_indices(self) -> np.ndarray[Any, Any]:
        given = self._indices
        if not (isinstance(given, jax.Array) and is_opaque(given.dtype)):
            return np.asarray(given)
        bits = np.asarray(jax.random.key_data(given))
        return from_bits(bits, self.dense_shape[0])

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


_OPERATORS = (
    "add radd sub rsub mul rmul neg truediv rtruediv pow matmul rmatmul getitem array"
)
for _name in _OPERATORS.split():
    setattr(StoredRows, f"__{_name}__", StoredRows._refuse)


def padded(rows: SparseLeaf, length: int) -> SparseLeaf:
    """The same rows with padding at their end, in the memory of the host.

    It uses NumPy, so that no program is compiled for each number of rows.
    """
    if not isinstance(rows, StoredRows):
        return rows
    n, shape = len(rows.values), rows.dense_shape
    values = np.zeros((length, *shape[1:]), rows.dtype)
    values[:n] = rows.values
    indices = np.full(length, shape[0], np.int32)
    indices[:n] = rows._host_indices()
    return rows._make(indices, values, shape, rows._summed)
