"""Trees with and without the boxes in which Flax names the mesh axes of an array."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from gradxform._trees.maps import is_leaf


def bare(params: Any) -> Any:
    """Parameters without the boxes in which Flax names the mesh axes of an array.

    State of fewer axes than its parameter must not inherit them: Flax would lay it out
    by the names of axes that it does not have.
    """

    def content(node: Any) -> Any:
        return _content(node) if isinstance(node, _boxes()) else node

    return jax.tree.map(content, params, is_leaf=lambda x: isinstance(x, _boxes()))


def boxed(params: Any, state: Any) -> Any:
    """Bare state with an axis in front of those of its parameters, in their boxes.

    Without the names in them Flax would lay all of it on every device. Boxes of
    ``flax.linen`` alone know how to take a further axis, which here has no name.
    """

    def box(p: Any, s: Any) -> Any:
        if not hasattr(p, "replace_boxed") or np.ndim(s) <= np.ndim(_content(p)):
            return s
        return p.replace_boxed(s).add_axis(0, {"partition_name": None})

    return jax.tree.map(box, params, state, is_leaf=lambda x: isinstance(x, _boxes()))


def _boxes() -> tuple[type, ...]:
    known = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}
    modules = {name: sys.modules[name] for name in known if name in sys.modules}
    return tuple(getattr(module, known[name]) for name, module in modules.items())


def _content(box: Any) -> Any:
    return jax.tree.leaves(box, is_leaf=lambda x: x is not box)[0]


def as_in(like: Any, tree: Any) -> Any:
    """The leaves of a tree in the nodes of ``like``; the two differ only in boxes."""

    def nodes(tree: Any) -> Any:
        return jax.tree.structure(tree, is_leaf=is_leaf)

    # Usually there are no boxes, and nothing to take apart and compare.
    wanted = nodes(like)
    if nodes(tree) == wanted or nodes(bare(tree)) != nodes(bare(like)):
        return tree
    return jax.tree.unflatten(wanted, jax.tree.leaves(tree, is_leaf=is_leaf))
