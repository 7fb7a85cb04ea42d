"""Gradient clipping at a norm that follows the norms so far."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._transforms.clipping import clipped, factor_to, global_norm
from gradxform._trees import dtypes, maps
from gradxform._trees.links import stateful

_EPS = 1e-6  # Of the authors' code.


class ClipByZscoreState(NamedTuple):
    """State of :func:`clip_by_zscore`.

    Attributes:
      num_held: int32[], finite norms so far, at most ``warmup``.
      global_norm: float32[], the last update's norm before clipping.
      mean: float32[], the average of the clipped norms.
      variance: float32[], their average squared distance from it.
    """

    num_held: jax.Array
    global_norm: jax.Array
    mean: jax.Array
    variance: jax.Array


def clip_by_zscore(
    threshold: jax.typing.ArrayLike = 2.5,
    *,
    decay: jax.typing.ArrayLike = 0.97,
    warmup: jax.typing.ArrayLike = 25,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales all updates by one factor if their norm is far above the norms so far.

    .. math::

        z &= (\lVert g \rVert - mean) / std \\
        c &= \begin{cases}
          mean + threshold \cdot std \cdot threshold / z & z > threshold \\
          \lVert g \rVert & \text{otherwise}
        \end{cases} \\
        g &\leftarrow g \cdot c / \lVert g \rVert \\
        mean &\leftarrow decay \cdot mean + (1 - decay) \cdot c \\
        std^2 &\leftarrow decay \cdot std^2 + (1 - decay) \cdot (c - mean)^2

    This is ZClip with its adaptive scaling: a spike is scaled to a norm below the
    threshold, and the higher the spike, the nearer the norm is to the mean. The first
    ``warmup`` updates are not clipped. Mean and variance of their norms (it divides by
    their number) are where the two averages begin. Any other update enters them with
    its norm after the clip.

    An update that is not clipped comes out bit-identical. If its norm is not finite,
    every entry becomes NaN, as in :func:`~gradxform.clip_by_global_norm`, and the
    averages stay as they are. In the authors' code NaN stays in both for ever. As
    there, 1e-6 is added to the two divisors, std and the norm. The authors also clip at
    a fixed norm, by default 1: put :func:`~gradxform.clip_by_global_norm` behind this
    link for it.

    It costs what :func:`~gradxform.clip_by_global_norm` costs: one pass reads the
    gradients for the norm, and no clipped copy is made.

    Args:
      threshold: how many standard deviations above the mean are still no spike, ≥ 0.
      decay: how much of the averages each update keeps, in [0, 1].
      warmup: how many finite norms the averages begin with, in [1, 2³¹ - 1].
      axis_name: as in :func:`~gradxform.global_norm`.

    Returns:
      A transformation with state :class:`ClipByZscoreState`. Updates keep their shapes
      and dtypes.

    Raises:
      ValueError: an argument is out of its range, or NaN.
      TypeError: ``warmup`` is no integer; another argument is no real scalar.

    References:
      Kumar et al., `ZClip: adaptive spike mitigation for LLM pre-training
      <https://arxiv.org/abs/2504.02507>`__, 2025, and its authors' code.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.contrib.clip_by_zscore(warmup=2)
    >>> state = tx.init(jnp.zeros(2))
    >>> for length in (1.0, 3.0, 12.0):  # The third is 10 deviations of 1 above 2.
    ...     updates, state = tx.update(jnp.array([0.0, length]), state)
    >>> assert abs(updates[1] - (2 + 2.5 * 2.5 / 10)) < 1e-4
    >>> state.global_norm
    Array(12., dtype=float32)
    """
    threshold = arguments.in_range("threshold", threshold, "[0, inf]")
    decay = arguments.in_range("decay", decay, "[0, 1]")
    arguments.in_range("warmup", warmup, arguments.COUNTS, integer=True)

    def init_fn(params: optax.Params) -> ClipByZscoreState:
        # Three arrays, not one three times: a buffer can be donated only once.
        return ClipByZscoreState(
            num_held=constants.zero(params, jnp.int32),
            global_norm=constants.zero(params, jnp.float32),
            mean=constants.zero(params, jnp.float32),
            variance=constants.zero(params, jnp.float32),
        )

    def update_fn(
        updates: optax.Updates, state: ClipByZscoreState
    ) -> tuple[optax.Updates, ClipByZscoreState]:
        updates = boundary.summed_rows(updates)
        norm = global_norm(updates, axis_name=axis_name).astype(jnp.float32)
        last = dtypes.saturated(warmup)
        most, keep = (jnp.asarray(x, jnp.float32) for x in (threshold, decay))
        mean, variance, collects = state.mean, state.variance, state.num_held < last
        std = arithmetic.safe_sqrt(variance)
        # z = (‖g‖ - mean) / std
        z = (norm - mean) / (std + _EPS)
        clips = ~collects & (z > most)
        # c = mean + threshold · std · threshold / z, or no limit
        c = mean + most * std * most / jnp.where(clips, z, 1)
        c = jnp.where(clips, c, jnp.inf)
        factor = factor_to(norm + _EPS, c)
        updates = maps.map_updates(lambda g: clipped(g, factor), updates)

        c, n = jnp.minimum(norm, c), jnp.minimum(state.num_held + 1, last)
        weight = jnp.where(collects, 1 / n.astype(jnp.float32), 1 - keep)
        # mean ← decay · mean + (1 - decay) · c, and at first the mean of all
        new = mean + weight * (c - mean)
        # std² ← decay · std² + (1 - decay) · (c - mean)², and at first Welford's
        away = c - jnp.where(collects, mean, new)
        spread = variance + weight * (away * (c - new) - variance)
        finite = jnp.isfinite(norm)
        return updates, ClipByZscoreState(
            num_held=jnp.where(finite, n, state.num_held),
            global_norm=norm,
            mean=jnp.where(finite, new, mean),
            variance=jnp.where(finite, spread, variance),
        )

    return stateful(init_fn, update_fn)
