"""The schedules that a config can name: optax's, and those of Keras that it lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform import _checks


def inverse_time_decay(
    init_value: float,
    transition_steps: float,
    decay_rate: float,
    staircase: bool = False,
) -> optax.Schedule:
    r"""A rate that falls as one over the time: Keras's ``InverseTimeDecay``.

    .. math:: init\_value / (1 + decay\_rate \cdot count / transition\_steps)

    Args:
      init_value: the rate at count 0.
      transition_steps: the unit of time, > 0.
      decay_rate: how much one unit of time adds to the divisor.
      staircase: only whole units of time count.

    >>> rate = inverse_time_decay(0.3, transition_steps=4, decay_rate=2.0)
    >>> assert rate(0) == 0.3 and abs(rate(4) - 0.1) < 1e-7
    """
    _checks.in_range("transition_steps", transition_steps, "(0, inf)")

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        time = jnp.asarray(count) / transition_steps
        if staircase:
            time = jnp.floor(time)
        return init_value / (1 + decay_rate * time)

    return schedule


def polynomial_decay(
    init_value: float,
    end_value: float,
    power: float,
    transition_steps: float,
    cycle: bool = False,
) -> optax.Schedule:
    r"""A rate that falls as a power of the time left: Keras's ``PolynomialDecay``.

    ``optax.polynomial_schedule`` cannot start anew, and for a ``power`` such as 0.5 it
    may be NaN at the end once it is compiled: 1 - 6 · (1/6) is negative.

    .. math::

        rate = (init\_value - end\_value) (1 - count / transition\_steps)^{power}
          + end\_value

    Args:
      init_value: the rate at count 0.
      end_value: the rate from ``transition_steps`` on.
      power: the power of the polynomial.
      transition_steps: how long it takes, > 0.
      cycle: whether it starts anew after that, and after every multiple of
        ``transition_steps`` that it then falls towards.

    >>> rate = polynomial_decay(1.0, 0.0, power=1.0, transition_steps=4, cycle=True)
    >>> assert [float(rate(count)) for count in (0, 2, 4, 6, 8)] == [1, 0.5, 0, 0.25, 0]
    """
    _checks.in_range("transition_steps", transition_steps, "(0, inf)")

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        ways = jnp.maximum(1.0, jnp.ceil(count / transition_steps)) if cycle else 1.0
        left = jnp.maximum(0.0, 1 - count / (ways * transition_steps))
        return (init_value - end_value) * left**power + end_value

    return schedule


def makers() -> dict[str, Callable[..., Any]]:
    """What makes schedules, by name: optax's functions, and those above."""
    return {
        name: value
        for names in (vars(optax.schedules), globals())
        for name, value in names.items()
        if inspect.isfunction(value)
        and value.__annotations__.get("return") in (optax.Schedule, "optax.Schedule")
    }
