"""Which extra arguments a transformation takes."""

from __future__ import annotations

import inspect

import optax


def accepted_kwargs(
    tx: optax.GradientTransformation, extra: dict[str, object]
) -> dict[str, object]:
    """The extra arguments that ``tx.update`` takes.

    Most transformations ignore unknown ones; ``optax.contrib.sam`` does not.
    """
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}
