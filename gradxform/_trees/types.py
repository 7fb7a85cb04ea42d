"""Types of the leaves of a gradient tree, for annotations.

Python cannot describe a pytree: to a type checker ``PyTree[X]`` is an ``X``, or a
container of any kind. The name says which leaves are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import optax

from gradxform._rows.indexed_slices import IndexedSlices

T = TypeVar("T")
# Trees that come out in the type in which they came in.
Params = TypeVar("Params")
State = TypeVar("State")

PyTree: TypeAlias = T | Any
# What a tree has in common with other trees of its structure, or starts with; or a
# function of the parameters. Sphinx cannot evaluate ``optax.Params`` inside an alias.
Prefix: TypeAlias = PyTree[T] | Callable[[Any], PyTree[T]]

# A parameter, or its description, as in ``jax.eval_shape``.
Param: TypeAlias = jax.Array | jax.ShapeDtypeStruct
Gradient: TypeAlias = jax.typing.ArrayLike | IndexedSlices
# A leaf of a gradient tree. ``None``, a masked node and a ``float0`` are no gradient.
Leaf: TypeAlias = Gradient | optax.MaskedNode | None
# The keys that lead to a leaf, from the root.
Path: TypeAlias = tuple[Hashable, ...]
Shape: TypeAlias = tuple[int, ...]
# Ids of rows, by the path of their table.
Rows: TypeAlias = Mapping[str, jax.typing.ArrayLike]
