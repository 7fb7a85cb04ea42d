"""Trees with and without the boxes in which Flax names the mesh axes of an array."""

from __future__ import annotations

import sys
from typing import Any

import jax

from gradxform._trees.maps import is_leaf


def bare(params: Any) -> Any:
    """Parameters without the boxes in which Flax names the mesh axes of an array.

    State of fewer axes than its parameter must not inherit them: Flax would lay it out
    by the names of axes that it does not have.
    """
    known = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}
    modules = {name: sys.modules[name] for name in known if name in sys.modules}
    boxes = tuple(getattr(module, known[name]) for name, module in modules.items())

    def content(node: Any) -> Any:
        if not isinstance(node, boxes):
            return node
        return jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0]

    return jax.tree.map(content, params, is_leaf=lambda x: isinstance(x, boxes))


def as_in(like: Any, tree: Any) -> Any:
    """The leaves of a tree in the nodes of ``like``, from which boxes alone tell it."""

    def nodes(tree: Any) -> Any:
        return jax.tree.structure(tree, is_leaf=is_leaf)

    # Without boxes, as nearly always, there is nothing to take apart and compare.
    wanted = nodes(like)
    if nodes(tree) == wanted or nodes(bare(tree)) != nodes(bare(like)):
        return tree
    return jax.tree.unflatten(wanted, jax.tree.leaves(tree, is_leaf=is_leaf))
