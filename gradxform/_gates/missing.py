"""Leaves without a gradient take no part in a step: they stay, and so does their state.

The leaf itself says, when a step is traced, that the loss gave it no gradient. Where a
step begins, it is a ``None``, a ``float0``, or a masked node where parameters have a
leaf. From there on it is a ``None`` (:func:`normalized`). Transformations of this
library know ``None``. Others may not: optax's own fail on it, or forget the leaf's
state. So :func:`update` gives them a node without leaves instead of each such leaf, as
``optax.masked`` does. Their ``init`` shows which parts of a state belong to a leaf: it
gets such a node instead of the leaf, and the node appears wherever the leaf's state
would be.

A gate treats such a leaf by its own rules: in a sum of pushes it counts as zeros. So a
gate inside gets ``None`` as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._trees import maps
from gradxform._trees.extra_args import with_any_extra_args
from gradxform._trees.placeholders import Placeholder, is_placeholder, owners
from gradxform._trees.states import takes_none
from gradxform._trees.types import Leaf, Path, PyTree, T


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
    if not isinstance(tx, optax.GradientTransformationExtraArgs):
        tx = with_any_extra_args(tx)
    updates, missing = _marked(updates, params)
    if not missing:
        return tx.update(updates, state, params, **extra)
    tree = updates if params is None else maps.masked_like(updates, params)
    # Sums, tables and rings of pushes have rules of their own for None.
    marks = None if takes_none(state) else _marks(tx, tree, state)
    if marks is None:
        try:
            return tx.update(_unmarked(updates, missing), state, params, **extra)
        except Exception as error:
            error.add_note(
                f"The gradients have None at {structures.path_name(missing[0])}, and "
                "this transformation does not keep its state leaf by leaf, or has an "
                "accumulator or a delay inside of it, so a leaf cannot be left out. "
                "Pass zeros there, or put that gate around the whole transformation."
            )
            raise
    whole = dict(maps.leaves_with_path(params))

    def filled(x: T) -> T:
        return whole[x.path] if isinstance(x, Placeholder) else x

    def shown(value: PyTree[T]) -> PyTree[T]:
        if callable(value):

            @functools.wraps(value)  # A line search asks for its signature.
            def of_filled(*args: PyTree[Any], **kwargs: object) -> Any:
                args = jax.tree.map(filled, args, is_leaf=is_placeholder)
                return value(*args, **kwargs)

            return of_filled
        if not maps.is_like(value, updates):
            return value
        return maps.masked_like(updates, value)

    marked = _where_marked(lambda mark, _: mark, marks, state)
    given = None if params is None else tree
    extra = {name: shown(value) for name, value in extra.items()}
    new_updates, new_state = tx.update(updates, marked, given, **extra)
    new_state = _where_marked(lambda _, __, old: old, marks, new_state, state)
    return _unmarked(new_updates, missing), new_state


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
) -> optax.OptState:
    """``choose(mark, *states)`` at each placeholder, and elsewhere the first state."""
    return jax.tree.map(
        lambda mark, *parts: choose(mark, *parts) if is_placeholder(mark) else parts[0],
        marks,
        *states,
        is_leaf=is_placeholder,
    )
