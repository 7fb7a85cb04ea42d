"""Maps over trees that know every kind of leaf a gradient tree may hold.

A leaf of a gradient tree is an array, a ``SparseLeaf``, or says that there is no
gradient: ``None``, an ``optax.MaskedNode``, or the ``float0`` that JAX gives for
integers. The maps here show a function only the stored entries of a ``SparseLeaf``.
Where there is no gradient, the leaf stays in updates, a ``float0`` as ``None``, and
whatever other trees hold there is not looked at.

A function that is not linear in the gradient, or that also reads state or parameters,
needs more: see ``_rows.boundary``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._trees.types import (
    Gradient,
    Leaf,
    Param,
    Path,
    Prefix,
    PyTree,
    SparseLeaf,
    T,
)

Sparse = TypeVar("Sparse", bound=SparseLeaf)


# The keys of children of dicts and sequences.
_CONTAINED = jax.tree_util.DictKey, jax.tree_util.SequenceKey


def is_leaf(node: object) -> bool:
    """Whether the maps here stop at this node, although it is no array."""
    return node is None or isinstance(node, SparseLeaf | optax.MaskedNode)


# The functions of `jax.tree`, which stop at these nodes.
flatten = functools.partial(jax.tree.flatten, is_leaf=is_leaf)
leaves = functools.partial(jax.tree.leaves, is_leaf=is_leaf)
leaves_with_path = functools.partial(jax.tree.leaves_with_path, is_leaf=is_leaf)
map_leaves = functools.partial(jax.tree.map, is_leaf=is_leaf)
map_with_path = functools.partial(jax.tree.map_with_path, is_leaf=is_leaf)
structure = functools.partial(jax.tree.structure, is_leaf=is_leaf)


def nodes(
    tree: PyTree[object], is_one: Callable[[object], bool]
) -> list[tuple[Path, Any]]:  # Of any kind.
    """The outermost such nodes of a tree, from left to right, with their paths."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_one)
    return [(path, node) for path, node in found if is_one(node)]


# A class of named tuples, and the name of a field.
Field: TypeAlias = tuple[type, str]


def fields(tree: PyTree[object], *around: Field) -> Iterator[tuple[Field, ...]]:
    """For each leaf the fields of named tuples around it, the innermost last."""
    children = jax.tree.leaves_with_path(
        tree, is_leaf=lambda node: node is not tree or is_leaf(node)
    )
    for path, child in children:
        if not path:  # The tree is a leaf.
            yield around
        elif hasattr(tree, "_fields"):
            name = getattr(path[0], "name", "")  # A class may have keys of its own.
            yield from fields(child, *around, (type(tree), name))
        else:
            yield from fields(child, *around)


def has_gradient(g: T | None) -> TypeGuard[T]:
    """Whether a leaf holds a gradient."""
    if g is None or isinstance(g, optax.MaskedNode):
        return False
    return getattr(g, "dtype", None) != jax.dtypes.float0


def without_float0(updates: optax.Updates) -> optax.Updates:
    """The same updates, with ``None`` for each ``float0``, which JAX gives integers."""
    if all(map(has_gradient, leaves(updates))):
        return updates
    return map_leaves(lambda g: g if has_gradient(g) else nothing(g), updates)


def nothing(g: Leaf) -> optax.MaskedNode | None:
    """What an update has for a leaf without a gradient: a masked node stays."""
    return g if isinstance(g, optax.MaskedNode) else None


def masked_like(updates: optax.Updates, tree: PyTree[T]) -> PyTree[T]:
    """The tree, masked where the updates are; ``optax.masked`` does not do that.

    A tree of another structure comes back as it is.
    """

    def mask(g: Leaf, x: T) -> T | optax.MaskedNode:
        return g if isinstance(g, optax.MaskedNode) else x

    try:
        return map_leaves(mask, updates, tree)
    except ValueError:
        return tree


def is_like(value: object, updates: optax.Updates) -> bool:
    """Whether an extra argument is a tree like the parameters.

    An array that is like one that is all of the parameters may be anything else.
    """
    wanted: Any = structure(updates)
    if wanted.num_nodes <= 1 or wanted != structure(value):
        return False
    pairs = zip(leaves(value), leaves(updates), strict=True)
    return all(np.shape(x) == g.shape for x, g in pairs if isinstance(g, SparseLeaf))


def with_values(leaf: Sparse, values: jax.Array) -> Sparse:
    """The same places with other entries, unchecked."""
    new = object.__new__(type(leaf))
    vars(new).update(vars(leaf), values=values)
    return new


def stored(tree: PyTree[Leaf]) -> PyTree[Any]:
    """The same tree, with the stored entries of each sparse leaf in its place."""
    return map_leaves(_stored, tree)


def _stored(x: Leaf) -> Any:  # Any other leaf stays as it is.
    return x.values if isinstance(x, SparseLeaf) else x


def described(tree: PyTree[Leaf]) -> PyTree[Any]:
    """The same tree, with a description of the whole array of each sparse leaf."""

    def whole(x: Leaf) -> Leaf | jax.ShapeDtypeStruct:
        if not isinstance(x, SparseLeaf):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return map_leaves(whole, tree)


def gradient_dtype(g: Gradient) -> np.dtype[np.generic]:
    """The dtype of a gradient's entries, for any kind of leaf."""
    return jnp.asarray(_stored(g)).dtype


def map_updates(
    f: Callable[..., PyTree[jax.Array]], updates: optax.Updates, *rest: PyTree[object]
) -> optax.Updates:
    """``f`` of each gradient, or of the stored entries of a sparse leaf.

    For these ``f`` returns as many entries, and they stay in their places.
    """

    def update(g: Leaf, *r: object) -> PyTree[Leaf]:
        if not has_gradient(g):
            return nothing(g)
        new: Any = f(jnp.asarray(_stored(g)), *r)  # For a sparse leaf an array.
        return with_values(g, new) if isinstance(g, SparseLeaf) else new

    return map_leaves(update, updates, *rest)


def map_params(
    f: Callable[..., T], params: optax.Params, *rest: PyTree[object]
) -> PyTree[T]:
    """``jax.tree.map`` over parameters, which may be Python or NumPy numbers.

    They may also be descriptions, as in ``jax.eval_shape``: then ``f`` sees a
    ``jax.ShapeDtypeStruct``. Of a sparse leaf it sees the stored entries.
    """
    return jax.tree.map(lambda p, *r: f(param(p), *r), stored(params), *rest)


def param(p: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> Param:
    """A parameter as an array; a description stays as it is."""
    return p if isinstance(p, jax.ShapeDtypeStruct) else jnp.asarray(p)


def broadcast(prefix: Prefix[T], tree: PyTree[Leaf]) -> PyTree[T]:
    """One value of the prefix tree for each leaf of ``tree``; ``None`` stays.

    Values are found by path, so a dict may describe an NNX state. A value may also be
    alone in a box, as in a tree made from an NNX state by ``jax.tree.map``. The prefix
    may be a function of ``tree``. A tree without leaves comes back unchanged: in
    ``optax.tree.map_params`` one such node stands for all parameters.

    Raises:
      LookupError: a leaf has no value; the error has its path.
    """
    if not jax.tree.leaves(tree):
        return tree
    values = dict(leaves_with_path(prefix_of(prefix, tree)))
    boxed = _boxed(values)

    def value(path: Path, x: Leaf) -> T | optax.MaskedNode | None:
        if not has_gradient(x):
            return nothing(x)
        for end in range(len(path) + 1):
            if path[:end] in values:
                return values[path[:end]]
        if len(inside := boxed.get(path, [])) == 1:
            return inside[0]
        raise LookupError(path)

    return map_with_path(value, tree)


def _boxed(values: Mapping[Path, T]) -> dict[Path, list[T]]:
    """The values within each node that is no dict and no sequence, by its path.

    A box, such as Flax's that name mesh axes and haliax's named arrays, has one value.
    """
    found: dict[Path, list[T]] = {}
    for path, value in values.items():
        for n in reversed(range(len(path))):
            if isinstance(path[n], _CONTAINED):
                break
            found.setdefault(path[:n], []).append(value)
    return found


def matching(
    params: PyTree[Param], values: Sequence[T], default: T
) -> Callable[[Path, Leaf], T]:
    """A function of a path and a leaf: the value of the parameter with this path.

    A leaf of another shape, or without an array of its own, gets the default.

    Args:
      params: the parameters, or their descriptions.
      values: one for each of them.
      default: for all other leaves.
    """
    pairs = zip(jax.tree.leaves_with_path(params), values, strict=True)
    by_path = {path: (p.shape, value) for (path, p), value in pairs}

    def find(path: Path, x: Leaf) -> T:
        if not has_gradient(x) or isinstance(x, SparseLeaf):
            return default
        shape, value = by_path.get(path, (None, default))
        return value if shape == np.shape(x) else default

    return find


def prefix_of(prefix: Prefix[T], tree: PyTree[Leaf]) -> PyTree[T]:
    """The prefix tree; if a function was given, what it returns for ``tree``."""
    is_partial = isinstance(prefix, functools.partial)  # jax.tree_util's is a node too.
    # An Equinox module is callable, too, but it is a tree.
    if callable(prefix) and (is_partial or jax.tree_util.all_leaves([prefix])):
        return prefix(tree)
    return prefix


def cast_like(tree: optax.Updates, reference: PyTree[Gradient]) -> optax.Updates:
    """Each leaf in the dtype of its reference; ``None`` stays."""
    return map_updates(lambda x, r: x.astype(gradient_dtype(r)), tree, reference)
