"""Which extra arguments a transformation takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection

import optax

from gradxform._trees import maps

# Extra arguments that a state inside needs, by a field of that state.
_NEEDED = {"weight": "num_accumulated", "last": "num_accumulated"}
_NEEDED |= {"local_step": "stale_count"}


def with_extra_args_support(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """As optax's, but an argument that a gate inside needs is not ignored."""
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return tx

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_ignored(tx, state, [k for k, x in extra.items() if x is not None])
        return tx.update(updates, state, params)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def accepted_kwargs(
    tx: optax.GradientTransformation,
    extra: dict[str, object],
    state: optax.OptState = (),
) -> dict[str, object]:
    """The extra arguments that ``tx.update`` takes.

    Most transformations ignore unknown ones; ``optax.contrib.sam`` does not.
    """
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return extra
    ignored = [k for k, x in extra.items() if x is not None and k not in parameters]
    _check_ignored(tx, state, ignored)
    return {name: value for name, value in extra.items() if name in parameters}


def _check_ignored(
    tx: optax.GradientTransformation, state: optax.OptState, names: Collection[str]
) -> None:
    """Raises ``TypeError`` if ``tx`` ignores an argument that is needed inside."""
    for name in names:
        field = _NEEDED.get(name)
        if field and maps.nodes(state, functools.partial(_has, field)):
            raise TypeError(
                f"{name} is for a wrapper inside of {tx.update.__qualname__}, which "
                "takes no extra arguments, so it would be lost. Put the wrapper around "
                "that transformation, or make that an "
                "optax.GradientTransformationExtraArgs which passes them on."
            )


def _has(field: str, node: object) -> bool:
    return not isinstance(getattr(node, field, ()), tuple)
