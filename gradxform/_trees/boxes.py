"""The boxes in which Flax names the mesh axes of an array."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np


def bare(params: Any) -> Any:
    """Parameters without the boxes in which Flax names the mesh axes of an array.

    State of fewer axes than its parameter must not inherit them: Flax would lay it out
    by the names of axes that it does not have.
    """
    boxes = _boxes()

    def content(node: Any) -> Any:
        return _content(node) if isinstance(node, boxes) else node

    return jax.tree.map(content, params, is_leaf=lambda x: isinstance(x, boxes))


def boxed(params: Any, state: Any) -> Any:
    """Bare state with an axis in front of those of its parameters, in their boxes.

    Without the names in them Flax would lay all of it on every device. Boxes of
    ``flax.linen`` alone know how to take a further axis, which here has no name.
    """
    boxes = _boxes()

    def box(p: Any, s: Any) -> Any:
        if not hasattr(p, "replace_boxed") or np.ndim(s) <= np.ndim(_content(p)):
            return s
        return p.replace_boxed(s).add_axis(0, {"partition_name": None})

    return jax.tree.map(box, params, state, is_leaf=lambda x: isinstance(x, boxes))


def _boxes() -> tuple[type, ...]:
    known = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}
    modules = {name: sys.modules[name] for name in known if name in sys.modules}
    return tuple(getattr(module, known[name]) for name, module in modules.items())


def _content(box: Any) -> Any:
    return jax.tree.leaves(box, is_leaf=lambda x: x is not box)[0]
