"""Whose state a leaf of a state is: ``init`` shows it, in traces without values.

``init`` gets a node without leaves instead of a parameter, and the node appears
wherever the parameter's state would be. It gets larger parameters, and the shapes of
their state show which axes belong to them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import optax

from gradxform._trees.types import Path, Shape


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


class StateLeaf(NamedTuple):
    """A leaf of a state.

    Attributes:
      path: where it is.
      owner: the path of the placeholder that stands for it; None if none does.
      shape: its shape.
      grown: its shape for larger parameters; None if their state has no such leaf.
    """

    path: Path
    owner: Path | None
    shape: Shape
    grown: Shape | None


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


def leaves_of(
    state: optax.OptState, grown: optax.OptState, marks: optax.OptState = None
) -> list[StateLeaf]:
    """The leaves of a state, with the owners that :func:`owners` found.

    Args:
      state: that of the parameters, or its description.
      grown: that of larger parameters.
      marks: the result of :func:`owners`; by default no leaf has an owner.
    """
    shapes = {path: np.shape(x) for path, x in jax.tree.leaves_with_path(grown)}
    found = []

    def note(path: Path, mark: object, part: optax.OptState) -> None:
        owner = mark.path if isinstance(mark, Placeholder) else None
        for end, x in jax.tree.leaves_with_path(part):
            whole = (*path, *end)
            found.append(StateLeaf(whole, owner, np.shape(x), shapes.get(whole)))

    marks = state if marks is None else marks
    jax.tree.map_with_path(note, marks, state, is_leaf=is_placeholder)
    return found
