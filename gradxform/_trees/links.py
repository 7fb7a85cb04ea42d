"""Links of a chain: transformations that need no parameters, or no state."""

from __future__ import annotations

from collections.abc import Callable

import optax

from gradxform._trees.types import State


def stateless(
    update: Callable[..., optax.Updates],
) -> optax.GradientTransformationExtraArgs:
    """A transformation whose updates are ``update(updates, params=params, **extra)``.

    ``optax.stateless`` passes on no extra arguments.
    """

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        return update(updates, params=params, **extra), state

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), update_fn
    )


def stateful(
    init: Callable[[optax.Params], State],
    update: Callable[[optax.Updates, State], tuple[optax.Updates, State]],
) -> optax.GradientTransformationExtraArgs:
    """A transformation whose ``update`` reads only the updates and its own state."""
    return optax.GradientTransformationExtraArgs(
        init, lambda updates, state, params=None, **extra: update(updates, state)
    )
