"""How rows and their indices are stored, and go through JAX, pickle and messages.

The functions here serve both kinds of row-sparse leaves. Such a leaf has the fields
``values``, ``dense_shape``, and two that only this module and its class know:

- ``_indices``: int32[n], or of the opaque dtype, as in a pytree's leaves;
- ``_summed``: whether the indices ascend without repetition, up to the padding at
  their end. It belongs to the object and not to the pytree.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._rows import opaque
from gradxform._trees.types import SparseLeaf

Kind = TypeVar("Kind", bound=type[SparseLeaf])
Rows = TypeVar("Rows", bound=SparseLeaf)
Stored = Any  # A leaf of either kind, with these fields.

_OPERATORS = (
    "add radd sub rsub mul rmul neg truediv rtruediv pow matmul rmatmul getitem array"
)


class RowSparseError(TypeError):
    """Row-sparse leaves were given to a function for arrays."""


def node(kind: Kind) -> Kind:
    """Makes a class a pytree node; each operator it lacks raises an error.

    Its ``_hint`` says what to do instead of a calculation.
    """

    def refuse(self: Stored, *_: object) -> NoReturn:
        raise RowSparseError(self._hint)

    for name in _OPERATORS.split():
        if f"__{name}__" not in vars(kind):
            setattr(kind, f"__{name}__", refuse)
    jax.tree_util.register_pytree_with_keys(
        kind, _flatten_with_keys, functools.partial(_unflatten, kind), _flatten
    )
    return kind


def unchecked(
    kind: type[Rows],
    indices: object,
    values: object,
    dense_shape: tuple[int, ...],
    summed: bool = False,
) -> Rows:
    """A leaf of this kind; indices of ``TableRows`` have to ascend."""
    rows = object.__new__(kind)
    fields = {"_indices": indices, "values": values, "dense_shape": dense_shape}
    vars(rows).update(fields, _summed=summed)
    return rows


def plain(self: Stored) -> jax.Array:
    """The indices, int32[n]."""
    stored = self._indices
    if not (hasattr(stored, "dtype") and opaque.is_opaque(stored.dtype)):
        return stored
    if isinstance(stored, jax.Array):
        return opaque.from_leaf(stored, self.dense_shape[0])
    return stored.update(dtype=jnp.int32)  # A description.


def _on_host(self: Stored) -> np.ndarray[Any, Any]:
    stored = self._indices
    if not (isinstance(stored, jax.Array) and opaque.is_opaque(stored.dtype)):
        return np.asarray(stored)
    return opaque.from_bits(
        np.asarray(jax.random.key_data(stored)), self.dense_shape[0]
    )


def padded(rows: Rows, length: int) -> Rows:
    """The same rows with padding at their end, in the memory of the host.

    It uses NumPy, so that no program is compiled for each number of rows.
    """
    stored: Stored = rows
    n, shape = len(rows.values), rows.dense_shape
    values = np.zeros((length, *shape[1:]), rows.dtype)
    values[:n] = rows.values
    indices = np.full(length, shape[0], np.int32)
    indices[:n] = _on_host(rows)
    return unchecked(type(rows), indices, values, shape, stored._summed)


def shown(self: Stored) -> str:
    """The representation of a leaf."""
    return (
        f"{type(self).__name__}(indices={self.indices!r}, values={self.values!r}, "
        f"dense_shape={self.dense_shape!r})"
    )


# Values come first: optax.inject_hyperparams gives its numbers the dtype of the first
# leaf.
def _flatten(self: Stored) -> tuple[tuple[Any, Any], tuple[int, ...]]:
    """Children and static data."""
    stored = self._indices
    is_array = isinstance(stored, jax.Array | np.ndarray) and stored.dtype == "int32"
    leaf = opaque.to_leaf(stored, self.dense_shape[0]) if is_array else stored
    return (self.values, leaf), self.dense_shape


def _flatten_with_keys(self: Stored) -> tuple[Any, tuple[int, ...]]:
    """Children with their names, and static data."""
    children, dense_shape = _flatten(self)
    keys = map(jax.tree_util.GetAttrKey, ("values", "indices"))
    return tuple(zip(keys, children, strict=True)), dense_shape


def _unflatten(cls: Stored, dense_shape: tuple[int, ...], children: Any) -> Any:
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
            raise RowSparseError(cls._hint)
    return unchecked(cls, indices, values, dense_shape)


def reduced(self: Stored) -> tuple[Any, ...]:
    """How pickle makes it again."""
    indices: Any = _on_host(self)
    if isinstance(self.values, jax.Array):  # Both arrive as JAX's arrays.
        indices = jax.device_put(indices)
    fields = type(self), indices, self.values, self.dense_shape, self._summed
    return unchecked, fields
