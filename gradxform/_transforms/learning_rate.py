"""The last link of every alias: updates times minus the learning rate."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._numbers import arithmetic, constants
from gradxform._trees import maps
from gradxform._trees.links import stateful

_State: TypeAlias = optax.ScaleByScheduleState | optax.EmptyState


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies updates by minus the learning rate: the last link of a chain.

    .. math:: u \leftarrow -learning\_rate \cdot u

    It has the states of ``optax.scale_by_learning_rate``, and differs from it in two
    ways. It takes :class:`IndexedSlices`, so alone it is gradient descent on the
    touched rows. It multiplies in at least float32 and keeps the dtype of each leaf,
    even if the rate is a traced float32 scalar and the leaf has half precision.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar`` of the 0-based count
        of updates so far. An array is multiplied by NumPy's rules, as in optax: so
        several runs, stacked on the first axes of each leaf, have rates of their own.

    Returns:
      A transformation, without state for a scalar; ``optax.ScaleByScheduleState`` for a
      schedule. Updates keep their shapes and dtypes.

    Raises:
      TypeError: the rate is no number, array or function, or has an imaginary part.

    References:
      ``optax.scale_by_learning_rate``; ``tf.train.GradientDescentOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.scale_by_learning_rate(0.5)
    >>> rows = gx.IndexedSlices([2], jnp.array([[4.0]]), (3, 1))
    >>> updates, _ = tx.update(rows, tx.init(None))
    >>> updates.densify().ravel()
    Array([ 0.,  0., -2.], dtype=float32)
    """
    check_given(learning_rate)

    def init_fn(params: optax.Params) -> _State:
        if callable(learning_rate):
            return optax.ScaleByScheduleState(count=constants.zero(params, jnp.int32))
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates, state: _State
    ) -> tuple[optax.Updates, _State]:
        descent = -jnp.asarray(rate_at(learning_rate, state))
        updates = maps.map_updates(lambda u: arithmetic.scale(u, descent), updates)
        if not callable(learning_rate):
            return updates, state
        count = optax.safe_increment(state.count)
        return updates, optax.ScaleByScheduleState(count=count)

    return stateful(init_fn, update_fn)


def rate_at(
    learning_rate: optax.ScalarOrSchedule, state: optax.OptState
) -> jax.typing.ArrayLike:
    """The learning rate of a step; a schedule gives it for the ``count`` of a state.

    Raises:
      TypeError: it is not real.
    """
    is_schedule = callable(learning_rate)
    return checked_rate(learning_rate(state.count) if is_schedule else learning_rate)


def check_given(learning_rate: optax.ScalarOrSchedule) -> None:
    """Raises ``TypeError`` if it is no schedule and no real number."""
    if not callable(learning_rate):
        checked_rate(learning_rate)


def checked_rate(rate: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """The learning rate of a step; ``TypeError`` unless it is real."""
    is_number = hasattr(rate, "dtype") or isinstance(rate, complex | float | int)
    rate = arguments.real(rate) if is_number else rate
    if not (is_number and arguments.is_real(rate)):
        raise TypeError(
            f"learning_rate must be real, got {rate!r}. Pass a number, an array, or a "
            "schedule, a function of the count of updates."
        )
    if type(rate) is int:
        return float(rate)
    # Minus an unsigned number would be a large one.
    if jnp.issubdtype(jnp.result_type(rate), jnp.integer):
        return jnp.asarray(rate, jnp.float32)
    return rate


def proximal_rate(
    learning_rate: optax.ScalarOrSchedule, state: optax.OptState
) -> jax.Array:
    """The learning rate of a step that has no meaning for a negative one.

    A traced rate outside of [0, inf) becomes NaN, and so does the step.

    Raises:
      ValueError: a rate that is known is outside of [0, inf).
      TypeError: it is not real.
    """
    rate = rate_at(learning_rate, state)
    rate = arguments.in_range("learning_rate", rate, "[0, inf)")
    return jnp.where((rate >= 0) & (rate < jnp.inf), rate, jnp.nan)
