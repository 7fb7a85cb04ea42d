"""Types of the leaves of a gradient tree, for annotations.

Python cannot describe a pytree: to a type checker ``PyTree[X]`` is an ``X``, or a
container of any kind. The name says which leaves are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
import optax

T = TypeVar("T")
# Trees that come out in the type in which they came in.
Params = TypeVar("Params")
State = TypeVar("State")

PyTree: TypeAlias = T | Any
# What a tree has in common with other trees of its structure, or starts with; or a
# function of the parameters. Sphinx cannot evaluate ``optax.Params`` inside an alias.
Prefix: TypeAlias = PyTree[T] | Callable[[Any], PyTree[T]]


class SparseLeaf:
    """A leaf that stores some entries of its array; ``_rows`` has the kinds of them.

    To JAX it is a node. To the maps it is one leaf, and they show its stored entries.
    If it is an update, ``p + leaf`` adds it to a parameter.
    """

    values: jax.Array  # The stored entries.
    dense_shape: tuple[int, ...]  # The shape of the whole array.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.dense_shape

    @property
    def ndim(self) -> int:
        """The number of axes of the whole array."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the entries."""
        return self.values.dtype

    def __radd__(self, table: jax.Array) -> jax.Array:
        """The sum of a parameter and this update."""
        raise NotImplementedError


# A parameter, or its description, as in ``jax.eval_shape``.
Param: TypeAlias = jax.Array | jax.ShapeDtypeStruct
Gradient: TypeAlias = jax.typing.ArrayLike | SparseLeaf
# A leaf of a gradient tree. ``None``, a masked node and a ``float0`` are no gradient.
Leaf: TypeAlias = Gradient | optax.MaskedNode | None
# The keys that lead to a leaf, from the root.
Path: TypeAlias = tuple[Hashable, ...]
Shape: TypeAlias = tuple[int, ...]
# Ids of rows, by the path of their table.
RowsByPath: TypeAlias = Mapping[str, jax.typing.ArrayLike]

# Arrays by the index of their leaf, or by their position.
ByIndex: TypeAlias = dict[int, jax.Array]
