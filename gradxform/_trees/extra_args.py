"""Which keywords a function and a transformation take, by their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import optax

from gradxform._trees import states


class Words(NamedTuple):
    """The keywords that something takes.

    Attributes:
      names: those that it names.
      others: whether it takes any other one, too.
    """

    names: frozenset[str] = frozenset()
    others: bool = False

    @classmethod
    def of(cls, f: Callable[..., object], *, skipped: int) -> Words:
        """The keywords of a function beside its first arguments.

        A method is asked without its ``self``, and a decorated function is asked
        itself. A function that has no signature takes any keyword.
        """
        try:
            parameters = inspect.signature(f).parameters.values()
        except (TypeError, ValueError):  # It is written in C.
            return cls(others=True)
        names = frozenset(
            p.name
            for i, p in enumerate(parameters)
            if p.kind is p.KEYWORD_ONLY
            or (i >= skipped and p.kind is p.POSITIONAL_OR_KEYWORD)
        )
        return cls(names, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def then(self, inner: Words) -> Words:
        """Those of a wrapper that passes on what it does not name."""
        return Words(self.names | inner.names, inner.others)


def words_of(tx: optax.GradientTransformation) -> Words:
    """The extra arguments that a transformation reads; gates know those behind them."""
    words = getattr(tx.update, "words", None)
    return words if isinstance(words, Words) else _accepted(tx)


def _accepted(tx: optax.GradientTransformation) -> Words:
    """The keywords with which ``tx.update`` may be called.

    The first three arguments are updates, state and parameters.
    """
    return Words.of(tx.update, skipped=3)


def with_any_extra_args(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """``tx``, which now takes any extra argument. Its ``update`` gets those it takes.

    Optax asks the class of ``tx``. Here its ``update`` says it: that of an
    ``optax.MultiSteps`` takes all, that of ``optax.contrib.sam`` takes one. An
    argument that a gate inside needs is not ignored.
    """
    if _accepted(tx).others:
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
        given = (k for k, x in extra.items() if x is not None)
        _check_ignored(tx, state, [k for k in given if k not in accepted])
        return tx.update(updates, state, params, **accepted)

    vars(update)["words"] = words_of(tx)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def accepted_kwargs(
    tx: optax.GradientTransformation, extra: dict[str, Any]
) -> dict[str, Any]:
    """The extra arguments that ``tx.update`` takes."""
    words = _accepted(tx)
    return {k: x for k, x in extra.items() if words.others or k in words.names}


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
