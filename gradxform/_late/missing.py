"""Leaves without a gradient take no part in a step: they stay, and so does their state.

Usually the leaf itself says that the loss gave it no gradient. It is ``None``, or a
``float0``, or a masked node where parameters have a leaf. Transformations of this
library know ``None``. Others may not: optax's own fail on it, or forget the leaf's
state. So :func:`update` gives them a node without leaves instead of each such
leaf, as ``optax.masked`` does. Their ``init`` shows which parts of a state belong to a
leaf: it gets such a node instead of the leaf, and the node appears wherever the leaf's
state would be.

A sum of pushes knows it only in its step: no push had a gradient for the leaf. It gives
zeros for such a leaf, and a flag that is False (:data:`LeafFlags`). A transformation
inside gets the zeros. Afterwards its result for the leaf is left out (:func:`chosen`),
and the leaf's state is the old one (:func:`keep`).

A gate treats such a leaf by its own rules: some of its state is one vector for all
leaves, and some starts again although a leaf has no gradient. So a gate inside gets
``None`` as it is, and the flags as an extra argument, ``leaf_flags``.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late.counters import has_gate, is_gate
from gradxform._trees import checks, maps
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.placeholders import Placeholder, is_placeholder
from gradxform._trees.types import Leaf, Path, PyTree, T

# Whether a leaf has a gradient, by its path. Leaves that say it themselves are not in
# it. A path finds its leaf also in a part of the tree, as in ``optax.partition``.
LeafFlags: TypeAlias = dict[str, jax.Array]


def update(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    **extra: object,
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
    part = None
    if not has_gate(state, "row_counts"):
        part = _Part.of(tx, state, updates, params)
    if part is None:
        try:
            return tx.update(updates, state, params, **extra)
        except Exception as error:
            error.add_note(
                f"The gradients have None at {checks.path_name(missing[0])}, and this "
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
        lambda u: None if is_placeholder(u) else u, new_updates, is_leaf=maps.is_leaf
    )
    return new_updates, part.whole_state(new_state, state)


def keep(
    tx: optax.GradientTransformation,
    acted: PyTree[jax.Array | None],
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
    given = (a for a in jax.tree.leaves(acted, is_leaf=_none) if a is not None)
    flags: dict[Hashable, jax.Array] = dict(enumerate(given))

    def choose(
        mark: object, new: optax.OptState, old: optax.OptState
    ) -> optax.OptState:
        if not isinstance(mark, Placeholder):
            return new
        has_acted = flags[mark.key]
        return jax.tree.map(lambda n, o: jnp.where(has_acted, n, o), new, old)

    return jax.tree.map(
        choose, part.marks, new, old, is_leaf=lambda x: is_placeholder(x) or is_gate(x)
    )


def flags_of(
    updates: optax.Updates, leaf_flags: LeafFlags | None
) -> PyTree[jax.Array | None]:
    """A tree with the flag of each leaf; None if the leaf itself says it."""
    return jax.tree.map_with_path(
        lambda path, _: (leaf_flags or {}).get(jax.tree_util.keystr(path)),
        updates,
        is_leaf=maps.is_leaf,
    )


def holds(
    updates: optax.Updates, leaf_flags: LeafFlags | None
) -> jax.Array | np.ndarray[tuple[int], np.dtype[np.bool]]:
    """bool[leaves], which leaves have a gradient; in NumPy if the leaves say it."""
    leaves = jax.tree.leaves(updates, is_leaf=maps.is_leaf)
    holds = np.array(list(map(maps.has_gradient, leaves)), bool)
    if not leaf_flags:
        return holds
    flags = jax.tree.leaves(flags_of(updates, leaf_flags), is_leaf=maps.is_leaf)
    return holds & jnp.stack([jnp.array(True) if f is None else f for f in flags])


def chosen(
    flags: PyTree[jax.Array | None],
    new: PyTree[Leaf],
    old: PyTree[Leaf] = None,
) -> PyTree[Leaf]:
    """The new leaves, but the old ones, or zeros, where a flag is False."""

    def choose(
        flag: jax.Array | None, new: Leaf, old: jax.typing.ArrayLike = 0
    ) -> Leaf:
        if flag is None or not maps.has_gradient(new):
            return new
        return jnp.where(flag, new, old)

    trees = (flags, new) if old is None else (flags, new, old)
    return jax.tree.map(choose, *trees, is_leaf=maps.is_leaf)


def _unmasked(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """None for each leaf of the parameters that is masked in the updates alone."""

    def unmask(u: PyTree[Leaf], p: optax.Params) -> PyTree[Leaf]:
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

    def __init__(
        self,
        leaves: dict[Hashable, optax.Params],
        tree: optax.Params,
        marks: optax.OptState,
        whole: optax.Params,
    ) -> None:
        self.leaves, self.tree, self.marks = leaves, tree, marks
        self._structure = jax.tree.structure(whole, is_leaf=maps.is_leaf)

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        state: optax.OptState,
        updates: optax.Updates,
        params: optax.Params | None,
    ) -> _Part | None:
        """Finds them; None if ``init`` shows no state that is kept leaf by leaf."""
        like = jax.tree.map(_described, updates, is_leaf=maps.is_leaf)
        whole = like if params is None else params
        leaves: dict[Hashable, optax.Params] = {}

        def without(u: Leaf, p: optax.Params) -> optax.Params:
            if u is not None or (params is not None and not jax.tree.leaves(p)):
                return p
            number = len(leaves)
            leaves[number] = p
            return Placeholder(number)

        try:
            tree = jax.tree.map(without, updates, whole, is_leaf=maps.is_leaf)
            marks = jax.eval_shape(tx.init, tree) if leaves else state
            part = cls(leaves, tree, marks, whole)
            same = jax.tree.map(
                lambda mark, s: is_placeholder(mark) or np.shape(mark) == np.shape(s),
                marks,
                state,
                is_leaf=is_placeholder,
            )
        except Exception:  # This init does not accept such a node.
            return None
        return part if all(jax.tree.leaves(same)) else None

    def of_tree(self, tree: PyTree[T]) -> PyTree[T]:
        """The part of a tree like the parameters."""
        return maps.masked_like(self.tree, tree)

    def of_state(self, state: optax.OptState) -> optax.OptState:
        """The part of a state."""
        return jax.tree.map(
            lambda mark, s: mark if is_placeholder(mark) else s,
            self.marks,
            state,
            is_leaf=is_placeholder,
        )

    def whole_state(self, new: optax.OptState, old: optax.OptState) -> optax.OptState:
        """The state of all leaves again, with the old state of absent ones."""
        return jax.tree.map(
            lambda mark, n, o: o if is_placeholder(mark) else n,
            self.marks,
            new,
            old,
            is_leaf=is_placeholder,
        )

    def extra(self, value: PyTree[T]) -> PyTree[T]:
        """The part of an extra argument."""
        if callable(value):
            return lambda *args, **kwargs: value(*self._filled(args), **kwargs)
        structure: Any = jax.tree.structure(value, is_leaf=maps.is_leaf)
        is_like_params = structure == self._structure and structure.num_nodes > 1
        return self.of_tree(value) if is_like_params else value

    def _filled(self, tree: PyTree[T]) -> PyTree[T]:
        return jax.tree.map(
            lambda x: self.leaves[x.key] if is_placeholder(x) else x,
            tree,
            is_leaf=is_placeholder,
        )


def _none(node: object) -> bool:
    return node is None


def _missing(updates: optax.Updates) -> list[Path]:
    """The paths without a gradient."""
    flat = jax.tree.leaves_with_path(updates, is_leaf=maps.is_leaf)
    return [path for path, u in flat if u is None]


def _described(u: Leaf) -> Leaf | jax.ShapeDtypeStruct:
    """An update with the shape and type of its parameter."""
    if not isinstance(u, IndexedSlices):
        return u
    return jax.ShapeDtypeStruct(u.dense_shape, u.dtype)
