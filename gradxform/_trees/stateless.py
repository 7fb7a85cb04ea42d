"""Transformations that keep no state."""

from __future__ import annotations

from collections.abc import Callable

import optax


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
