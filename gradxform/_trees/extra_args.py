"""Which extra arguments a transformation takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection

import optax

from gradxform._trees import states


def with_any_extra_args(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """``tx``, which now takes any extra argument. Its ``update`` gets those it takes.

    Optax asks the class of ``tx``. Here its ``update`` says it: that of an
    ``optax.MultiSteps`` takes all, that of ``optax.contrib.sam`` takes one. An
    argument that a gate inside needs is not ignored.
    """
    if _names(tx.update) is None:
        if isinstance(tx, optax.GradientTransformationExtraArgs):
            return tx
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        accepted = accepted_kwargs(tx, extra)
        ignored = extra.keys() - accepted.keys()
        _check_ignored(tx, state, [k for k in ignored if extra[k] is not None])
        return tx.update(updates, state, params, **accepted)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def accepted_kwargs(
    tx: optax.GradientTransformation, extra: dict[str, object]
) -> dict[str, object]:
    """The extra arguments that ``tx.update`` takes."""
    names = _names(tx.update)
    return {k: x for k, x in extra.items() if names is None or k in names}


def _names(update: Callable[..., object]) -> Collection[str] | None:
    """The names of the extra arguments that an ``update`` takes; None if it takes all.

    The first three arguments are updates, state and parameters.
    """
    parameters = inspect.signature(update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {
        p.name
        for i, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (i > 2 and p.kind is p.POSITIONAL_OR_KEYWORD)
    }


def _check_ignored(
    tx: optax.GradientTransformation, state: optax.OptState, names: Collection[str]
) -> None:
    """Raises ``TypeError`` if ``tx`` ignores an argument that is needed inside."""
    for name in names:
        if states.needs(state, name):
            around = getattr(tx.update, "__qualname__", type(tx).__name__)
            raise TypeError(
                f"{name} is for a wrapper inside of {around}, which "
                "takes no extra arguments, so it would be lost. Put the wrapper around "
                "that transformation, or make that an "
                "optax.GradientTransformationExtraArgs which passes them on."
            )
