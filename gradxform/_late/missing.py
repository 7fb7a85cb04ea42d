"""Leaves without a gradient take no part in a step: they stay, and so does their state.

Usually the leaf itself says that the loss gave it no gradient. Where a step begins, it
is a ``None``, a ``float0``, or a masked node where parameters have a leaf. From there
on it is a ``None`` (:func:`normalized`). Transformations of this library know ``None``.
Others may not: optax's own fail on it, or forget the leaf's state. So :func:`update`
gives them a node without leaves instead of each such leaf, as ``optax.masked`` does.
Their ``init`` shows which parts of a state belong to a leaf: it gets such a node
instead of the leaf, and the node appears wherever the leaf's state would be.

A sum of pushes knows it only in its step: no push had a gradient for the leaf. It gives
zeros for such a leaf, and a flag that is False, in an extra argument that only this
module reads and writes. A transformation inside gets the zeros. Afterwards its result
for the leaf is left out (:func:`chosen`), and the leaf's state is the old one
(:func:`keep`).

A gate treats such a leaf by its own rules: some of its state is one vector for all
leaves, and some starts again although a leaf has no gradient. So a gate inside gets
``None`` as it is, and asks :func:`flags` which leaves have a gradient. A link whose one
number comes from the state of all leaves asks, too: ``measure_cosine``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late.counters import has_gate, is_gate
from gradxform._trees import checks, maps
from gradxform._trees.extra_args import with_extra_args_support
from gradxform._trees.placeholders import Placeholder, is_placeholder, owners
from gradxform._trees.types import Leaf, Path, PyTree, T

# The extra argument with the flags of leaves, by path. Leaves that say it themselves
# are not in it. A path finds its leaf also in a part of the tree, as in
# ``optax.partition``.
_NAME = "leaf_flags"


def normalized(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Updates with ``None`` for each parameter without a gradient.

    A masked node stays where parameters have no leaf, as inside of ``optax.masked``.
    """
    if all(map(maps.has_gradient, maps.leaves(updates))):
        return updates

    def none(g: Leaf, p: optax.Params) -> PyTree[Leaf]:
        if maps.has_gradient(g):
            return g
        if isinstance(g, optax.MaskedNode) and not jax.tree.leaves(p):
            return g
        return maps.map_leaves(lambda x: None if maps.has_gradient(x) else x, p)

    try:
        return maps.map_leaves(none, updates, params)
    except ValueError:  # No parameters, or others.
        return maps.without_float0(updates)


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
    tx = with_extra_args_support(tx)
    updates, missing = _marked(updates, params)
    if not missing:
        return tx.update(updates, state, params, **extra)
    tree = updates if params is None else maps.masked_like(updates, params)
    # Sums of pushes count by themselves which pushes had a gradient for a leaf.
    marks = None if has_gate(state, "row_counts") else _marks(tx, tree, state)
    if marks is None:
        try:
            return tx.update(_unmarked(updates, missing), state, params, **extra)
        except Exception as error:
            error.add_note(
                f"The gradients have None at {checks.path_name(missing[0])}, and "
                "this transformation does not keep its state leaf by leaf, or has an "
                "accumulator inside of it, so a leaf cannot be left out. Pass zeros "
                "there, or put the accumulator around the whole transformation."
            )
            raise
    whole = dict(maps.leaves_with_path(params))

    def filled(x: T) -> T:
        return whole[x.path] if isinstance(x, Placeholder) else x

    def shown(value: PyTree[T]) -> PyTree[T]:
        if callable(value):
            return lambda *args, **kwargs: value(
                *jax.tree.map(filled, args, is_leaf=is_placeholder), **kwargs
            )
        if not maps.is_like(value, updates):
            return value
        return maps.masked_like(updates, value)

    new_updates, new_state = tx.update(
        updates,
        _where_marked(lambda mark, _: mark, marks, state),
        None if params is None else tree,
        **{name: shown(value) for name, value in extra.items()},
    )
    new_state = _where_marked(lambda _, __, old: old, marks, new_state, state)
    return _unmarked(new_updates, missing), new_state


def keep(
    tx: optax.GradientTransformation,
    flags: PyTree[bool | jax.Array],
    new: optax.OptState,
    old: optax.OptState,
    like: optax.Params,
) -> optax.OptState:
    """The new state of ``tx``, with the old state of leaves whose flag is False.

    The gates in it know which leaves these are, so their states are the new ones.
    ``like`` is the parameters, or a tree of their shapes and dtypes.
    """
    tree = maps.map_with_path(
        lambda path, flag, p: p if isinstance(flag, bool) else Placeholder(path),
        flags,
        like,
    )
    marks = _marks(tx, tree, old)
    if marks is None:
        return new
    by_path = dict(maps.leaves_with_path(flags))

    def choose(
        mark: Placeholder, new: optax.OptState, old: optax.OptState
    ) -> optax.OptState:
        flag = by_path[mark.path]
        return jax.tree.map(lambda x, y: jnp.where(flag, x, y), new, old)

    return _where_marked(choose, marks, new, old, stop=is_gate)


def leaves_say_it(extra: Mapping[str, object]) -> bool:
    """Whether no sum around has flags of leaves."""
    return _NAME not in extra


def flags(
    updates: optax.Updates, extra: Mapping[str, object]
) -> PyTree[bool | jax.Array]:
    """Whether each leaf has a gradient: bool[] if only a sum around it knows."""
    if leaves_say_it(extra):
        return maps.map_leaves(maps.has_gradient, updates)
    known: Any = extra[_NAME]
    return maps.map_with_path(
        lambda path, g: (
            maps.has_gradient(g) and known.get(jax.tree_util.keystr(path), True)
        ),
        updates,
    )


def with_flags(
    extra: dict[str, object], flags: PyTree[bool | jax.Array] = None
) -> dict[str, object]:
    """The extra arguments with these flags in place of any others."""
    named = {
        jax.tree_util.keystr(path): flag
        for path, flag in jax.tree.leaves_with_path(flags)
        if not isinstance(flag, bool)
    }
    extra = {name: value for name, value in extra.items() if name != _NAME}
    return extra | {_NAME: named} if named else extra


def as_vector(
    flags: PyTree[bool | jax.Array],
) -> jax.Array | np.ndarray[tuple[int], np.dtype[np.bool]]:
    """bool[leaves]; in NumPy if the leaves say it."""
    leaves = jax.tree.leaves(flags)
    if all(isinstance(flag, bool) for flag in leaves):
        return np.array(leaves, bool)
    return jnp.stack([jnp.array(flag) for flag in leaves])


def where(
    flag: bool | jax.Array, new: jax.Array, old: jax.typing.ArrayLike
) -> jax.Array:
    """The new values if a leaf has a gradient."""
    return new if flag is True else jnp.where(flag, new, old)


def chosen(
    flags: PyTree[bool | jax.Array], new: PyTree[Leaf], old: PyTree[Leaf] = None
) -> PyTree[Leaf]:
    """The new leaves, but the old ones, or zeros, where only a flag says False."""

    def choose(
        flag: bool | jax.Array, new: Leaf, old: jax.typing.ArrayLike = 0
    ) -> Leaf:
        if isinstance(flag, bool) or not maps.has_gradient(new):
            return new
        return where(flag, new, old)

    return maps.map_leaves(choose, flags, new, *(() if old is None else (old,)))


def _marked(
    updates: optax.Updates, params: optax.Params | None
) -> tuple[optax.Updates, list[Path]]:
    """Updates with a placeholder, its path, for each parameter without a gradient."""
    if all(u is not None for u in maps.leaves(updates)):
        return updates, []
    missing: list[Path] = []

    def mark(path: Path, u: Leaf, p: Leaf) -> Leaf:
        if u is not None or p is None:
            return u
        missing.append(path)
        return Placeholder(path)

    try:
        return maps.map_with_path(mark, updates, params), missing
    except ValueError:  # No parameters, or others: the transformation may say so.
        missing.clear()
        return maps.map_with_path(lambda path, u: mark(path, u, 0), updates), missing


def _unmarked(updates: optax.Updates, missing: list[Path]) -> optax.Updates:
    """Updates with None for these placeholders."""
    return maps.map_leaves(
        lambda u: None if getattr(u, "path", None) in missing else u, updates
    )


def _marks(
    tx: optax.GradientTransformation, tree: optax.Params, state: optax.OptState
) -> optax.OptState | None:
    """The state with the placeholders of a tree; None if ``init`` shows none."""
    try:
        marks = owners(tx.init, maps.described(tree), state)
    except ValueError:
        return None

    def fits(mark: Any, s: jax.typing.ArrayLike) -> bool:
        return is_placeholder(mark) or np.shape(mark) == np.shape(s)

    same = jax.tree.map(fits, marks, state, is_leaf=is_placeholder)
    return marks if all(jax.tree.leaves(same)) else None


def _where_marked(
    choose: Callable[..., optax.OptState],
    marks: optax.OptState,
    *states: optax.OptState,
    stop: Callable[[object], bool] = is_placeholder,
) -> optax.OptState:
    """``choose(mark, *states)`` at each placeholder, and elsewhere the first state."""
    return jax.tree.map(
        lambda mark, *parts: choose(mark, *parts) if is_placeholder(mark) else parts[0],
        marks,
        *states,
        is_leaf=lambda node: is_placeholder(node) or stop(node),
    )
