"""Trees with and without boxes: Flax's wrappers that name an array's mesh axes."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import optax

from gradxform._trees import maps
from gradxform._trees.types import PyTree, T


def unboxed(params: PyTree[T]) -> PyTree[T]:
    """Parameters without their boxes.

    State with fewer axes than its parameter must not inherit the box: Flax would shard
    it by the names of axes that it does not have.
    """
    return jax.tree.map(_content, params, is_leaf=lambda x: isinstance(x, _boxes()))


def boxed(params: optax.Params, state: PyTree[T]) -> PyTree[T]:
    """Puts state that has one more axis, in front, into the boxes of its parameters.

    Without the names in the boxes, Flax would put all of it on every device. The new
    axis has no name. Only boxes of ``flax.linen`` can take another axis.
    """

    def box(p: PyTree[object], s: jax.Array) -> PyTree[jax.Array]:
        if not hasattr(p, "replace_boxed") or np.ndim(s) <= np.ndim(_content(p)):
            return s
        return p.replace_boxed(s).add_axis(0, {"partition_name": None})

    return jax.tree.map(box, params, state, is_leaf=lambda x: isinstance(x, _boxes()))


def _boxes() -> tuple[type, ...]:
    classes = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}
    modules = {name: sys.modules[name] for name in classes if name in sys.modules}
    return tuple(getattr(module, classes[name]) for name, module in modules.items())


def _content(box: PyTree[T]) -> T:
    """The content of a box, or a leaf as it is."""
    content: T = jax.tree.leaves(box, is_leaf=lambda x: x is not box)[0]
    return content


def as_in(like: PyTree[object], tree: PyTree[T]) -> PyTree[T]:
    """The leaves of a tree in the nodes of ``like``; the two differ only in boxes."""
    # Usually there are no boxes, and the first comparison is enough.
    nodes: Any = maps.structure
    wanted = nodes(like)
    if nodes(tree) == wanted or nodes(unboxed(tree)) != nodes(unboxed(like)):
        return tree
    return jax.tree.unflatten(wanted, maps.leaves(tree))
