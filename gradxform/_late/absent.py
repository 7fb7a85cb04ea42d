"""Leaves without a gradient take no part in a step.

``None`` for a leaf says that the loss gave it no gradient: it stays as it is, and so
does its state. A ``float0`` says the same, and so does a masked node where parameters
have a leaf. Transformations of this library know ``None``. Others may not: optax's own
fail on it, or forget the leaf's state. So they get a node without leaves in the place
of each such leaf, as with ``optax.masked``, and these leaves stay as they are. Their
``init`` shows which parts of a state belong to a leaf: it gets such a node instead of
the leaf, and the node appears wherever the leaf's state would be.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._trees import checks, maps
from gradxform._trees.indexed_slices import IndexedSlices


@jax.tree_util.register_pytree_node_class
class Absent(optax.MaskedNode):
    """A node without leaves that replaces the leaf of this number."""

    number: int

    def __new__(cls, number: int) -> Absent:
        """A masked node that says which one it is."""
        node = super().__new__(cls)
        node.number = number
        return node

    def tree_flatten(self) -> tuple[tuple[()], int]:
        """No children, and the number."""
        return (), self.number

    @classmethod
    def tree_unflatten(cls, number: int, children: Any) -> Absent:
        """The same again."""
        del children
        return cls(number)


def _is_absent(node: Any) -> bool:
    return isinstance(node, Absent)


def update(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    **extra: Any,
) -> tuple[optax.Updates, optax.OptState]:
    """``tx.update`` without the leaves that have no gradient.

    Extra arguments that are trees like the parameters lose these leaves too. A function
    among them, for a line search, gets all leaves.
    """
    tx = optax.with_extra_args_support(tx)
    updates = _unmasked(maps.without_float0(updates), params)
    missing = _missing(updates)
    if not missing:
        return tx.update(updates, state, params, **extra)
    # Sums of pushes count by themselves which pushes had a gradient for a leaf.
    part = None if gates(state, "row_counts") else _Part.of(tx, state, updates, params)
    if part is None:
        try:
            return tx.update(updates, state, params, **extra)
        except Exception as error:
            error.add_note(
                f"The gradients have None at {checks.place(missing[0])}, and this "
                "transformation does not keep its state leaf by leaf, or has an "
                "accumulator inside of it, so a leaf cannot be left out. Pass zeros "
                "there, or put the accumulator around the whole transformation."
            )
            raise
    if not part.leaves:  # Parameters are None there as well.
        return tx.update(updates, state, params, **extra)
    shown = {name: part.extra(value) for name, value in extra.items()}
    new_updates, new_state = tx.update(
        part.of_tree(updates),
        part.of_state(state),
        None if params is None else part.tree,
        **shown,
    )
    new_updates = jax.tree.map(
        lambda u: None if _is_absent(u) else u, new_updates, is_leaf=maps.is_leaf
    )
    return new_updates, part.whole_state(new_state, state)


def keep(
    tx: optax.GradientTransformation,
    acted: Any,
    new: optax.OptState,
    old: optax.OptState,
    like: optax.Params,
) -> optax.OptState:
    """The new state of ``tx``, with the old state of leaves that have not acted.

    The gates in it know which leaves have acted, so their states are the new ones.

    Args:
      tx: the transformation whose state it is.
      acted: for each leaf a bool[], or None if it has acted for sure.
      new: the state after a step.
      old: the state before it.
      like: the parameters, or a tree of their shapes and dtypes.
    """
    mark = jax.tree.map(lambda a: None if a is not None else True, acted, is_leaf=_none)
    part = _Part.of(tx, old, mark, like)
    if part is None or not part.leaves:
        return new
    flags = [a for a in jax.tree.leaves(acted, is_leaf=_none) if a is not None]

    def choose(mark: Any, new: Any, old: Any) -> Any:
        if not _is_absent(mark):
            return new
        has_acted = flags[mark.number]
        return jax.tree.map(lambda n, o: jnp.where(has_acted, n, o), new, old)

    kept: optax.OptState
    kept = jax.tree.map(
        choose, part.marks, new, old, is_leaf=lambda x: _is_absent(x) or _is_gate(x)
    )
    return kept


def gates(state: optax.OptState, field: str = "inner_state") -> bool:
    """Whether a state holds that of a gate, with this field."""

    def found(node: Any) -> bool:
        return _is_gate(node) and hasattr(node, field)

    return any(map(found, jax.tree.leaves(state, is_leaf=found)))


def _is_gate(node: Any) -> bool:
    """Whether it is the state of a gate of this subpackage."""
    fields = {*getattr(type(node), "_fields", ())}
    return "inner_state" in fields and not fields.isdisjoint(("global_step", "ring"))


def _unmasked(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """None for each leaf of the parameters that is masked in the updates alone."""

    def unmask(u: Any, p: Any) -> Any:
        is_masked = isinstance(u, optax.MaskedNode) and jax.tree.leaves(p)
        return jax.tree.map(lambda _: None, p) if is_masked else u

    try:
        return jax.tree.map(unmask, updates, params, is_leaf=maps.is_leaf)
    except ValueError:  # No parameters, or others: the transformation may say so.
        return updates


class _Part:
    """The leaves that have a gradient, and their part of a state.

    Attributes:
      leaves: the absent leaves, by number.
      tree: the parameters, or a tree like them, without the absent leaves.
      marks: the state that ``init`` makes from ``tree``.
    """

    def __init__(self, leaves: list[Any], tree: Any, marks: Any, whole: Any) -> None:
        self.leaves, self.tree, self.marks = leaves, tree, marks
        self._structure = jax.tree.structure(whole, is_leaf=maps.is_leaf)

    @classmethod
    def of(cls, tx: Any, state: Any, updates: Any, params: Any | None) -> _Part | None:
        """Finds them; None if ``init`` shows no state that is kept leaf by leaf."""
        like = jax.tree.map(_described, updates, is_leaf=maps.is_leaf)
        whole = like if params is None else params
        leaves: list[Any] = []

        def without(u: Any, p: Any) -> Any:
            if u is not None or (params is not None and not jax.tree.leaves(p)):
                return p
            leaves.append(p)
            return Absent(len(leaves) - 1)

        try:
            tree = jax.tree.map(without, updates, whole, is_leaf=maps.is_leaf)
            marks = jax.eval_shape(tx.init, tree) if leaves else state
            part = cls(leaves, tree, marks, whole)
            same = jax.tree.map(
                lambda mark, s: _is_absent(mark) or np.shape(mark) == np.shape(s),
                marks,
                state,
                is_leaf=_is_absent,
            )
        except Exception:  # This init does not accept such a node.
            return None
        return part if all(jax.tree.leaves(same)) else None

    def of_tree(self, tree: Any) -> Any:
        """The part of a tree like the parameters."""
        return maps.masked_like(self.tree, tree)

    def of_state(self, state: Any) -> Any:
        """The part of a state."""
        return jax.tree.map(
            lambda mark, s: mark if _is_absent(mark) else s,
            self.marks,
            state,
            is_leaf=_is_absent,
        )

    def whole_state(self, new: Any, old: Any) -> Any:
        """The state of all leaves again, with the old state of absent ones."""
        return jax.tree.map(
            lambda mark, n, o: o if _is_absent(mark) else n,
            self.marks,
            new,
            old,
            is_leaf=_is_absent,
        )

    def extra(self, value: Any) -> Any:
        """The part of an extra argument."""
        if callable(value):
            return lambda *args, **kwargs: value(*self._filled(args), **kwargs)
        structure: Any = jax.tree.structure(value, is_leaf=maps.is_leaf)
        is_like_params = structure == self._structure and structure.num_nodes > 1
        return self.of_tree(value) if is_like_params else value

    def _filled(self, tree: Any) -> Any:
        return jax.tree.map(
            lambda x: self.leaves[x.number] if _is_absent(x) else x,
            tree,
            is_leaf=_is_absent,
        )


def _none(node: Any) -> bool:
    return node is None


def _missing(updates: Any) -> list[Any]:
    """The paths without a gradient."""
    flat = jax.tree.leaves_with_path(updates, is_leaf=maps.is_leaf)
    return [path for path, u in flat if u is None]


def _described(u: Any) -> Any:
    """An update with the shape and type of its parameter."""
    if not isinstance(u, IndexedSlices):
        return u
    return jax.ShapeDtypeStruct(u.dense_shape, u.dtype)
