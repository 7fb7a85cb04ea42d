"""Whose state a leaf of a state is: ``init`` shows it, in traces without values.

``init`` gets a node without leaves instead of a parameter, and the node appears
wherever the parameter's state would be.
"""

from __future__ import annotations

import jax
import optax

from gradxform._trees.types import Path, PyTree


@jax.tree_util.register_pytree_node_class
class Placeholder(optax.MaskedNode):
    """A node without leaves that replaces the leaf at this path."""

    path: Path

    def __new__(cls, path: Path) -> Placeholder:
        """A masked node that says which one it is."""
        node = super().__new__(cls)
        node.path = path
        return node

    def tree_flatten(self) -> tuple[tuple[()], Path]:
        """No children, and the path."""
        return (), self.path

    @classmethod
    def tree_unflatten(cls, path: Path, children: object) -> Placeholder:
        """The same again."""
        del children
        return cls(path)


def is_placeholder(node: object) -> bool:
    """Whether it is such a node; maps with this ``is_leaf`` stop at it."""
    return isinstance(node, Placeholder)


def owners(
    init: optax.TransformInitFn, params: optax.Params, state: optax.OptState
) -> optax.OptState:
    """The state of parameters with placeholders: each stands for parts of ``state``.

    Raises:
      ValueError: ``init`` does not accept them, or ``state`` has other nodes.
    """
    try:
        marks = jax.eval_shape(init, params)
        jax.tree.map(lambda *_: None, marks, state, is_leaf=is_placeholder)
    except Exception as error:  # An ``init`` that knows no such node may raise any.
        raise ValueError("init and state show no state of these leaves.") from error
    return marks


def owned(
    init: optax.TransformInitFn, params: optax.Params, state: optax.OptState
) -> dict[Path, Path]:
    """The parameter to which a leaf of ``state`` belongs, for those of placeholders.

    Raises:
      ValueError: as :func:`owners`.
    """
    found: dict[Path, Path] = {}

    def own(start: Path, mark: object, part: optax.OptState) -> None:
        if isinstance(mark, Placeholder):
            ends = jax.tree.leaves_with_path(part)
            found.update(((*start, *end), mark.path) for end, _ in ends)

    marks = owners(init, params, state)
    jax.tree.map_with_path(own, marks, state, is_leaf=is_placeholder)
    return found


def state_for(
    init: optax.TransformInitFn, params: PyTree[jax.ShapeDtypeStruct]
) -> optax.OptState | None:
    """The state of parameters of other sizes; None if ``init`` does not take them."""
    try:
        return jax.eval_shape(init, params)
    except Exception:  # An ``init`` that expects other sizes may raise any.
        return None
