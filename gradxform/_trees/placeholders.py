"""Nodes without leaves instead of parameters: ``init`` shows where their state is.

A transformation's own ``init`` gets such a node instead of a parameter, and the node
appears wherever the parameter's state would be.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax
import optax


@jax.tree_util.register_pytree_node_class
class Placeholder(optax.MaskedNode):
    """A node without leaves that replaces the leaf of this key."""

    key: Hashable

    def __new__(cls, key: Hashable) -> Placeholder:
        """A masked node that says which one it is."""
        node = super().__new__(cls)
        node.key = key
        return node

    def tree_flatten(self) -> tuple[tuple[()], Hashable]:
        """No children, and the key."""
        return (), self.key

    @classmethod
    def tree_unflatten(cls, key: Hashable, children: object) -> Placeholder:
        """The same again."""
        del children
        return cls(key)


def is_placeholder(node: object) -> bool:
    """Whether it is such a node; maps with this ``is_leaf`` stop at it."""
    return isinstance(node, Placeholder)
