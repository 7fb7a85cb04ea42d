"""How many steps late a gradient is, whether that is too late, and what it counts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._trees import dtypes


def staleness(global_step: jax.Array, local_step: jax.Array) -> jax.Array:
    """How many steps late a gradient is; below 0 if it is ahead of its time."""
    # staleness = global_step - local_step, at most the largest int32
    earliest = global_step - np.iinfo(np.int32).max
    return global_step - jnp.maximum(local_step, earliest)


def checked_bound(
    max_staleness: jax.typing.ArrayLike | optax.Schedule,
) -> jax.typing.ArrayLike | optax.Schedule:
    """A bound on the staleness: an integer ≥ 0, inf, or a schedule.

    Raises:
      ValueError: it is negative or NaN.
      TypeError: it is neither an integer nor inf.
    """
    if callable(max_staleness):
        return max_staleness
    bound = arguments.whole(
        arguments.in_range("max_staleness", max_staleness, "[0, inf]")
    )
    if not isinstance(bound, jax.core.Tracer) and not np.isinf(np.asarray(bound)):
        arguments.check_scalar("max_staleness", max_staleness, integer=True)
    return bound


def is_fresh(
    global_step: jax.Array,
    local_step: jax.Array,
    max_staleness: jax.typing.ArrayLike | optax.Schedule,
) -> jax.Array:
    """Whether the staleness is at most a bound that :func:`checked_bound` has passed.

    It raises for the number of a schedule like :func:`checked_bound`, but that number
    may be a fraction.
    """
    bound = max_staleness
    if callable(bound):
        bound = arguments.scheduled("max_staleness", bound, global_step, "[0, inf]")
    # fresh iff global_step - local_step <= max_staleness(global_step)
    if isinstance(bound, int) or jnp.issubdtype(jnp.result_type(bound), jnp.integer):
        return local_step >= global_step - dtypes.saturated(bound)
    late = staleness(global_step, local_step).astype(jnp.float32)
    return late <= jnp.asarray(bound, jnp.float32)  # inf, too


def check_weight(weight: object) -> None:
    """Raises ``TypeError`` unless ``weight`` is None or a function."""
    if weight is not None and not callable(weight):
        raise TypeError(
            "weight must be a function of the staleness, such as lambda s: 1 / (1 + "
            f"s), got {weight!r}; under optax.inject_hyperparams name it in "
            "static_args."
        )


def factor(
    weight: Callable[[jax.Array], jax.typing.ArrayLike], staleness: jax.Array
) -> jax.typing.ArrayLike:
    """The factor of a gradient for its staleness ≥ 0, a real scalar.

    Raises:
      ValueError: it is known, and negative, infinite or NaN.
      TypeError: it is no real scalar.
    """
    value: jax.typing.ArrayLike = weight(staleness)
    arguments.check_scalar("weight(staleness)", value)
    value = arguments.in_range("weight(staleness)", value, "[0, inf)")
    return value
