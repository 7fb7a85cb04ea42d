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
from typing import Any, NamedTuple, TypeAlias

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
    split = None
    if not has_gate(state, "row_counts"):
        split = _split(tx, state, updates, params)
    if split is None:
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
    if not split.leaves:  # Parameters are None there as well.
        return tx.update(updates, state, params, **extra)
    shown = {name: split.shown(value) for name, value in extra.items()}
    new_updates, new_state = tx.update(
        maps.masked_like(split.tree, updates),
        _if_missing(split.marks, split.marks, state),
        None if params is None else split.tree,
        **shown,
    )
    new_updates = maps.map_leaves(
        lambda u: None if is_placeholder(u) else u, new_updates
    )
    return new_updates, _if_missing(split.marks, state, new_state)


def keep(
    tx: optax.GradientTransformation,
    applied: PyTree[jax.Array | None],
    new: optax.OptState,
    old: optax.OptState,
    like: optax.Params,
) -> optax.OptState:
    """The new state of ``tx``, with the old state of leaves that were skipped.

    The gates in it know which leaves these are, so their states are the new ones.
    ``applied`` has for each leaf a bool[], or None if it was not skipped for sure;
    ``like`` is the parameters, or a tree of their shapes and dtypes.
    """
    mark = jax.tree.map(
        lambda a: True if a is None else None, applied, is_leaf=lambda a: a is None
    )
    split = _split(tx, old, mark, like)
    if split is None or not split.leaves:
        return new
    flags: dict[Hashable, jax.Array] = dict(enumerate(jax.tree.leaves(applied)))

    def choose(
        mark: object, new: optax.OptState, old: optax.OptState
    ) -> optax.OptState:
        if not isinstance(mark, Placeholder):
            return new
        flag = flags[mark.key]
        return jax.tree.map(lambda n, o: jnp.where(flag, n, o), new, old)

    return jax.tree.map(
        choose, split.marks, new, old, is_leaf=lambda x: is_placeholder(x) or is_gate(x)
    )


def flags_of(
    updates: optax.Updates, leaf_flags: LeafFlags | None
) -> PyTree[jax.Array | None]:
    """A tree with the flag of each leaf; None if the leaf itself says it."""
    return maps.map_with_path(
        lambda path, _: (leaf_flags or {}).get(jax.tree_util.keystr(path)), updates
    )


def holds(
    updates: optax.Updates, leaf_flags: LeafFlags | None
) -> jax.Array | np.ndarray[tuple[int], np.dtype[np.bool]]:
    """bool[leaves], which leaves have a gradient; in NumPy if the leaves say it."""
    leaves = maps.leaves(updates)
    holds = np.array(list(map(maps.has_gradient, leaves)), bool)
    if not leaf_flags:
        return holds
    flags = maps.leaves(flags_of(updates, leaf_flags))
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
    return maps.map_leaves(choose, *trees)


def _unmasked(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """None for each leaf of the parameters that is masked in the updates alone."""

    def unmask(u: PyTree[Leaf], p: optax.Params) -> PyTree[Leaf]:
        is_masked = isinstance(u, optax.MaskedNode) and jax.tree.leaves(p)
        return jax.tree.map(lambda _: None, p) if is_masked else u

    try:
        return maps.map_leaves(unmask, updates, params)
    except ValueError:  # No parameters, or others: the transformation may say so.
        return updates


class _Split(NamedTuple):
    """A tree without the leaves that have no gradient, and its part of a state.

    Attributes:
      leaves: the missing leaves, by the keys of their placeholders.
      whole: the parameters, or a tree like them.
      tree: the same without the missing leaves.
      marks: the state that ``init`` makes from ``tree``.
    """

    leaves: dict[Hashable, optax.Params]
    whole: optax.Params
    tree: optax.Params
    marks: optax.OptState

    def shown(self, value: PyTree[T]) -> PyTree[T]:
        """An extra argument without the missing leaves, if it is like the parameters.

        A function gets all leaves.
        """

        def fill(x: T) -> T:
            return self.leaves[x.key] if isinstance(x, Placeholder) else x

        if callable(value):
            return lambda *args, **kwargs: value(
                *jax.tree.map(fill, args, is_leaf=is_placeholder), **kwargs
            )
        structure: Any = maps.structure(value)
        is_like_params = structure == maps.structure(self.whole)
        if not is_like_params or structure.num_nodes <= 1:
            return value
        return maps.masked_like(self.tree, value)


def _split(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    updates: optax.Updates,
    params: optax.Params | None,
) -> _Split | None:
    """Splits the trees; None if ``init`` shows no state that is kept leaf by leaf."""
    whole = maps.map_leaves(_described, updates) if params is None else params
    leaves: dict[Hashable, optax.Params] = {}

    def without(u: Leaf, p: optax.Params) -> optax.Params:
        if u is not None or (params is not None and not jax.tree.leaves(p)):
            return p
        number = len(leaves)
        leaves[number] = p
        return Placeholder(number)

    try:
        tree = maps.map_leaves(without, updates, whole)
        marks = jax.eval_shape(tx.init, tree) if leaves else state
        same = jax.tree.map(
            lambda mark, s: is_placeholder(mark) or np.shape(mark) == np.shape(s),
            marks,
            state,
            is_leaf=is_placeholder,
        )
    except Exception:  # This init does not accept such a node.
        return None
    return _Split(leaves, whole, tree, marks) if all(jax.tree.leaves(same)) else None


def _if_missing(
    marks: optax.OptState, missing: optax.OptState, held: optax.OptState
) -> optax.OptState:
    """``missing`` for the state that ``marks`` mark, and ``held`` for all other."""
    return jax.tree.map(
        lambda mark, m, h: m if is_placeholder(mark) else h,
        marks,
        missing,
        held,
        is_leaf=is_placeholder,
    )


def _missing(updates: optax.Updates) -> list[Path]:
    """The paths without a gradient."""
    flat = maps.leaves_with_path(updates)
    return [path for path, u in flat if u is None]


def _described(u: Leaf) -> Leaf | jax.ShapeDtypeStruct:
    """An update with the shape and type of its parameter."""
    if not isinstance(u, IndexedSlices):
        return u
    return jax.ShapeDtypeStruct(u.dense_shape, u.dtype)
