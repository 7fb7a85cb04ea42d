"""Delayed Nesterov: momentum for gradients that arrive one by one, and late."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._transforms import momentum
from gradxform._transforms.learning_rate import scale_by_learning_rate
from gradxform._trees import dtypes
from gradxform._trees.links import stateful

# The defaults of both functions.
B1 = 0.9
ACTIVATION = 0.0


class ScaleByDelayedNesterovState(NamedTuple):
    """State of :func:`scale_by_delayed_nesterov`.

    Attributes:
      count: int32[] for each leaf, how many gradients it has had since its momentum
        moved, in [0, num_delay).
      mu: the momentum, like params.
      accumulated: the sum of these gradients, like params, in at least float32 by
        default. When the momentum moves, ``count`` becomes 0 and the old sum stays. The
        next gradient replaces it.
    """

    count: optax.Updates  # A tuple's method of that name.
    mu: optax.Updates
    accumulated: optax.Updates


def scale_by_delayed_nesterov(
    b1: jax.typing.ArrayLike = B1,
    *,
    num_delay: jax.typing.ArrayLike,
    activation: jax.typing.ArrayLike = ACTIVATION,
    mu_dtype: jax.typing.DTypeLike | None = None,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Descends along each gradient at once, and moves the momentum with every N-th.

    .. math::

        \Delta_t &= \Delta_{t-1} + g_t \\
        \mu_t &= b_1\,\mu_{t-1} + \Delta_t / N, \quad
          u_t = (1 - c N + c)\,b_1\,\mu_t + g_t / N, \quad \Delta_t \leftarrow 0
          \quad\text{where } N \mid t \\
        \mu_t &= \mu_{t-1}, \quad u_t = c\,b_1\,\mu_t + g_t / N
          \quad\text{elsewhere}

    with N = ``num_delay`` and c = ``activation``. Gradients of workers that do not wait
    for each other point nearly the same way, because none of them has seen the others.
    If each of them moved the momentum, it would overshoot. Here it moves with the mean
    of N gradients, and over N steps its weights sum to 1. With ``num_delay=1`` this is
    Nesterov momentum, ``optax.trace(b1, nesterov=True)``.

    ``None`` for a leaf leaves its parameter and state as they were: only its own
    gradients count towards its N.

    Args:
      b1: decay of the momentum, in [0, 1). A schedule may end at 1.
      num_delay: how many gradients move the momentum once, in [1, 2³¹ - 1]; as a rule
        the number of workers.
      activation: the part of the momentum that acts with every gradient, in
        [0, 1/num_delay]. With 0, all of it acts when it moves; with ``1/num_delay``,
        the same part acts at each step.
      mu_dtype: dtype of ``mu``, by default that of the parameters, as in optax.
      accumulator_dtype: dtype of the sum, by default that of the parameters but at
        least float32: a sum in half precision loses small additions.

    Returns:
      A transformation with state :class:`ScaleByDelayedNesterovState`. Updates keep
      their shapes and dtypes; the arithmetic is done in at least float32.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: ``num_delay`` is not an integer; a dtype does not fit the parameters;
        updates do not have their structure or shapes, or are row-sparse.

    References:
      Liu et al., `Asynchronous local-SGD training for language modeling
      <https://arxiv.org/abs/2401.09135>`__, 2024, the delayed Nesterov update.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.contrib.scale_by_delayed_nesterov(0.5, num_delay=2)
    >>> grads = jnp.array([1.0])
    >>> state = tx.init(grads)
    >>> for _ in range(4):  # 1/2, and with every second 1/2, then 3/4 of the momentum
    ...     updates, state = tx.update(grads, state)
    ...     print(updates, state.mu)
    [0.5] [0.]
    [1.] [1.]
    [0.5] [1.]
    [1.25] [1.5]
    """
    b1 = arguments.in_range("b1", b1, "[0, 1)")
    arguments.in_range("num_delay", num_delay, arguments.COUNTS, integer=True)
    known = not isinstance(num_delay, jax.core.Tracer)
    most = 1 / int(num_delay) if known else 1.0  # type: ignore[arg-type]
    activation = arguments.in_range("activation", activation, f"[0, {most}]")
    structures.check_state_dtype("mu_dtype", mu_dtype)
    structures.check_state_dtype("accumulator_dtype", accumulator_dtype)

    def init_fn(params: optax.Params) -> ScaleByDelayedNesterovState:
        structures.check_same_kind("accumulator_dtype", accumulator_dtype, params)
        return ScaleByDelayedNesterovState(
            count=constants.zeros(params, jnp.int32, axes=0),
            mu=momentum.zeros(params, mu_dtype),
            accumulated=constants.zeros(params, accumulator_dtype, dtypes.wide_dtype),
        )

    def update_fn(
        updates: optax.Updates, state: ScaleByDelayedNesterovState
    ) -> tuple[optax.Updates, ScaleByDelayedNesterovState]:
        momentum.check_like_momentum("delayed_nesterov", updates, state.mu)

        @jax.jit  # Traced once for each shape, not for each leaf.
        def step(
            g: jax.Array, count: jax.Array, mu: jax.Array, total: jax.Array
        ) -> tuple[jax.Array, ...]:
            t = count + 1
            moves = t >= dtypes.saturated(num_delay)
            # Δ_t = Δ_{t-1} + g_t. The first gradient resets it to 0, not the last: so
            # the momentum reads only the new sum, which replaces the old one.
            total = jnp.where(count == 0, 0, total)
            total = arithmetic.wide_sum(g, total).astype(total.dtype)
            # mu_t = b1·mu_{t-1} + Δ_t/N where N | t, else mu_{t-1}
            delta = dtypes.widen(total)
            old = dtypes.widen(mu).astype(delta.dtype)
            moved = arithmetic.scale(old, b1) + arithmetic.scale(delta, 1 / num_delay)
            mu, moved = momentum.in_both_dtypes(g, mu, jnp.where(moves, moved, old))
            # u_t = (1 - cN + c)·b1·mu_t + g_t/N where N | t, else c·b1·mu_t + g_t/N
            numbers = (activation, num_delay, b1)
            c, n, decay = (jnp.asarray(x, dtypes.compute_dtype(g)) for x in numbers)
            share = jnp.where(moves, 1 - c * n + c, c)
            u = arithmetic.scale(moved, share * decay)
            u += arithmetic.scale(dtypes.widen(g), 1 / n)
            return u.astype(g.dtype), jnp.where(moves, 0, t), mu, total

        kept = state.count, state.mu, state.accumulated
        updates, *new = boundary.map_step(step, updates, kept)
        return updates, ScaleByDelayedNesterovState(*new)

    return stateful(init_fn, update_fn)


def delayed_nesterov(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = B1,
    *,
    num_delay: jax.typing.ArrayLike,
    activation: jax.typing.ArrayLike = ACTIVATION,
    mu_dtype: jax.typing.DTypeLike | None = None,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The outer optimizer for workers that are far apart and wait for nobody.

    .. math:: w \leftarrow w - learning\_rate \cdot u

    with ``u`` from :func:`scale_by_delayed_nesterov`. Each worker trains on its own for
    many steps and pushes how far it has come, as if that were a gradient: see
    :func:`~gradxform.local_steps`. ``drop_stale(delayed_nesterov(...), max_staleness)``
    drops pushes that come too late. With ``num_delay=1`` and ``activation=0`` it is
    ``optax.sgd(learning_rate, b1, nesterov=True)``, the outer optimizer of DiLoCo.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar``.
      b1: see :func:`scale_by_delayed_nesterov`, as for the rest.
      num_delay: how many gradients move the momentum once; as a rule the number of
        workers.
      activation: the part of the momentum that acts with every gradient.
      mu_dtype: dtype of the momentum.
      accumulator_dtype: dtype of the sum.

    Returns:
      A transformation. Its state holds :class:`ScaleByDelayedNesterovState`. Its
      updates are added to the parameters.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: as :func:`scale_by_delayed_nesterov`.

    References:
      Liu et al., `Asynchronous local-SGD training for language modeling
      <https://arxiv.org/abs/2401.09135>`__, 2024.
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`__, 2023
      (``num_delay=1``).

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> outer = gx.contrib.delayed_nesterov(0.2, 0.5, num_delay=4)
    >>> tx = gx.drop_stale(outer, max_staleness=3)
    >>> params = {"w": jnp.array([1.0, -2.0])}
    >>> state = tx.init(params)
    >>> pulled = [params] * 4  # by four workers in turn, each of them three steps late
    >>> step = jax.jit(lambda g, s, p, t: gx.apply_gradients(tx, g, s, p, local_step=t))
    >>> for push in range(100):
    ...     seen = pulled.pop(0)
    ...     params, state = step(seen, state, params, max(0, push - 3))
    ...     pulled.append(params)
    >>> assert jnp.allclose(params["w"], 0, atol=0.01)
    """
    return optax.chain(
        scale_by_delayed_nesterov(
            b1,
            num_delay=num_delay,
            activation=activation,
            mu_dtype=mu_dtype,
            accumulator_dtype=accumulator_dtype,
        ),
        scale_by_learning_rate(learning_rate),
    )
