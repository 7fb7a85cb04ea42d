"""Keras's schedules that optax lacks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments


def inverse_time_decay(
    init_value: float,
    transition_steps: float,
    decay_rate: float,
    staircase: bool = False,
) -> optax.Schedule:
    r"""A rate that falls like one over the time: Keras's ``InverseTimeDecay``.

    .. math:: init\_value / (1 + decay\_rate \cdot count / transition\_steps)

    With ``staircase`` only whole units of time count.

    >>> rate = inverse_time_decay(0.3, transition_steps=4, decay_rate=2.0)
    >>> assert rate(0) == 0.3 and abs(rate(4) - 0.1) < 1e-7
    """
    arguments.in_range("transition_steps", transition_steps, "(0, inf)")

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, float)
        whole = _whole_periods(count, transition_steps)
        time = whole if staircase else count / transition_steps
        return init_value / (1 + decay_rate * time)

    return schedule


def polynomial_decay(
    init_value: float,
    end_value: float,
    power: float,
    transition_steps: float,
    cycle: bool = False,
) -> optax.Schedule:
    r"""A rate that falls like a power of the time left: Keras's ``PolynomialDecay``.

    ``optax.polynomial_schedule`` cannot start again. Compiled, it may be NaN at the end
    for a ``power`` such as 0.5: 1 - 6 · (1/6) is negative.

    .. math::

        rate = (init\_value - end\_value) (1 - count / transition\_steps)^{power}
          + end\_value

    With ``cycle`` it starts again after every multiple of ``transition_steps``.

    >>> rate = polynomial_decay(1.0, 0.0, power=1.0, transition_steps=4, cycle=True)
    >>> assert [float(rate(count)) for count in (0, 2, 4, 6, 8)] == [1, 0.5, 0, 0.25, 0]
    """
    arguments.in_range("transition_steps", transition_steps, "(0, inf)")

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, float)
        begun = -_whole_periods(-count, transition_steps)
        end = (jnp.maximum(1.0, begun) if cycle else 1.0) * transition_steps
        left = jnp.maximum(0.0, end - count) / end
        return (init_value - end_value) * left**power + end_value

    return schedule


def cosine_decay_restarts(
    init_value: float,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> optax.Schedule:
    r"""Cosines one after the other: Keras's ``CosineDecayRestarts``.

    Each cosine takes ``t_mul`` times as long as the one before, and starts ``m_mul``
    times as high. If n is the last one that has started:

    .. math::

        start_n &= first\_decay\_steps (1 + t\_mul + \ldots + t\_mul^{n - 1}) \\
        fraction &= (count - start_n) / (first\_decay\_steps \cdot t\_mul^n) \\
        rate &= init\_value \left((1 - alpha) \, m\_mul^n
          (1 + \cos(\pi fraction)) / 2 + alpha\right)

    References:
      Loshchilov and Hutter, `SGDR <https://arxiv.org/abs/1608.03983>`__, 2017.

    >>> rate = cosine_decay_restarts(1.0, first_decay_steps=2, m_mul=0.5)
    >>> rates = jnp.array([rate(count) for count in range(7)])
    >>> assert jnp.allclose(rates[:3], jnp.array([1.0, 0.5, 0.5]))  # at 2 anew
    >>> assert jnp.allclose(rates[3:], jnp.array([0.4267767, 0.25, 0.0732233, 0.25]))
    """
    arguments.in_range("first_decay_steps", first_decay_steps, "(0, inf)")
    arguments.in_range("t_mul", t_mul, "[1, inf)")

    def start(n: jax.Array) -> jax.Array:
        if t_mul == 1:
            return n * first_decay_steps
        # `expm1` is exact where the power is near 1, and the power where it is large.
        log = n * math.log(t_mul)
        grown = jnp.where(log < 0.5, jnp.expm1(log), t_mul**n - 1)
        return first_decay_steps * grown / (t_mul - 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count, float)
        time = count / first_decay_steps
        n = time if t_mul == 1 else jnp.log1p(time * (t_mul - 1)) / math.log(t_mul)
        nearest = jnp.round(n)
        # Rounding must not mistake the first step of a cosine for the end of the one
        # before, nor its last step for the first of the next.
        rounding = jnp.minimum(1e-6 * start(nearest), 0.5)
        n = jnp.where(count < start(nearest) - rounding, nearest - 1, nearest)
        fraction = (count - start(n)) / (first_decay_steps * t_mul**n)
        cosine = m_mul**n * (1 + jnp.cos(jnp.pi * fraction)) / 2
        return init_value * ((1 - alpha) * cosine + alpha)

    return schedule


def linear_cosine_decay(
    init_value: float,
    decay_steps: float,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
) -> optax.Schedule:
    r"""A line times a cosine: ``LinearCosineDecay`` of ``tf.keras.experimental``.

    .. math::

        left &= 1 - \min(count / decay\_steps, 1) \\
        rate &= init\_value \left((alpha + left)
          (1 + \cos(2 \pi \, num\_periods (1 - left))) / 2 + beta\right)

    References:
      Bello et al., `Neural optimizer search <https://arxiv.org/abs/1709.07417>`__,
      2017.

    >>> rate = linear_cosine_decay(1.0, decay_steps=4, beta=0.25)
    >>> rates = jnp.array([rate(count) for count in (0, 2, 4, 5)])
    >>> assert jnp.allclose(rates, jnp.array([1.25, 0.5, 0.25, 0.25]))
    """
    arguments.in_range("decay_steps", decay_steps, "(0, inf)")

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        left = 1 - jnp.minimum(1.0, jnp.asarray(count, float) / decay_steps)
        cosine = (1 + jnp.cos(2 * jnp.pi * num_periods * (1 - left))) / 2
        return init_value * ((alpha + left) * cosine + beta)

    return schedule


def at_last_push(schedule: optax.Schedule, num_required: int) -> optax.Schedule:
    r"""A rate that counts pushes, when ``num_required`` of them make a step.

    .. math:: schedule(num\_required \cdot (count + 1) - 1)

    Keras's own schedules count this way with ``gradient_accumulation_steps``.

    >>> rate = at_last_push(inverse_time_decay(1.0, 1, 1.0), num_required=2)
    >>> assert (rate(0), rate(1)) == (1 / 2, 1 / 4)
    """
    arguments.in_range("num_required", num_required, arguments.COUNTS)
    last = jnp.iinfo(jnp.int32).max // num_required - 1  # Its pushes fit an int32.
    return lambda count: schedule(num_required * (jnp.minimum(count, last) + 1) - 1)


def _whole_periods(count: jax.Array, period: float) -> jax.Array:
    """The floor of ``count / period``.

    XLA may multiply by ``1 / period``, and so miss a whole number by a rounding.
    """
    whole = jnp.round(count / period)
    return jnp.where(count < whole * period, whole - 1, whole)
