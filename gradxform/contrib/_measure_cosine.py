"""The cosine of each gradient with the one before it: a first sign of divergence."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, constants, norms
from gradxform._rows import boundary
from gradxform._trees import boxes, dtypes, maps
from gradxform._trees.links import stateful


class MeasureCosineState(NamedTuple):
    """State of :func:`measure_cosine`.

    Attributes:
      cosine: float32[], that of the last gradient with the one before it, in [-1, 1].
      previous: the last gradient, like params.
      squares: float32[] for each leaf, the squared norm of ``previous``.
    """

    cosine: jax.Array
    previous: optax.Updates
    squares: optax.Updates


def measure_cosine(
    *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Measures the cosine of each gradient with the one before it.

    .. math::

        cosine_t = \frac{\langle g_t, g_{t-1} \rangle}
          {\lVert g_t \rVert \, \lVert g_{t-1} \rVert}

    This link changes no gradient. If gradients are not late, the cosine is small and
    has both signs. If it stays near 1, successive gradients are computed at about the
    same parameters: none sees the steps of the others, and their steps add up. With
    late gradients this shows before the loss diverges. Read the cosine from the state:
    ``optax.tree.get(state, "cosine")``; that of a server is in ``server.state()``.

    It needs memory for one gradient, which is written once and read once. If the
    compiler does not take all sums at once, it also costs one more pass over the
    gradients. Behind a gate it measures the applied pushes, not the dropped ones.

    Args:
      axis_name: as in :func:`~gradxform.global_norm`.

    Returns:
      A transformation with state :class:`MeasureCosineState`. The cosine of the first
      gradient, and of an all-zero one, is 0; if an entry is not finite it is NaN.
      Squares in float32 end at lengths of about 1e-19 and 1e19: the cosine of a shorter
      gradient is 0, and that of a longer one NaN. Scale such gradients before.
      ``None`` for a leaf leaves its state as it was, and counts for nothing. The
      arithmetic is done in at least float32. The cosine is right to about 1e-6. The
      number of devices changes the order of the sums, and so the last digits. If the
      cosine is near 0, they may be a large part of it.

    Raises:
      TypeError: updates do not have the structure or shapes of the parameters, or are
        row-sparse.

    References:
      `GAC: stabilizing asynchronous RL training for LLMs via gradient alignment control
      <https://arxiv.org/abs/2603.01501>`__, 2026.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.chain(gx.contrib.measure_cosine(), optax.sgd(0.1)), 4)
    >>> params = jnp.zeros(4)
    >>> state = tx.init(params)
    >>> for grad in ([1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 0.0, 0.0]):
    ...     params, state = gx.apply_gradients(
    ...         tx, jnp.array(grad), state, params, local_step=0
    ...     )
    >>> optax.tree.get(state, "cosine")  # 2 / (2 · 2)
    Array(0.5, dtype=float32)
    """

    def init_fn(params: optax.Params) -> MeasureCosineState:
        return MeasureCosineState(
            cosine=constants.zero(params, jnp.float32),
            previous=constants.zeros(params, None, dtypes.inexact_dtype),
            squares=constants.zeros(params, None, dtypes.compute_dtype, axes=0),
        )

    def update_fn(
        updates: optax.Updates, state: MeasureCosineState
    ) -> tuple[optax.Updates, MeasureCosineState]:
        boundary.check_dense("measure_cosine", updates)
        structures.check_shapes("updates", updates, "previous", state.previous)
        before = boxes.as_in(updates, state.squares)
        squares, square = norms.squared_norms(updates, axis_name=axis_name)
        _, dot = norms.products(updates, state.previous, squares, axis_name=axis_name)
        last = maps.map_updates(lambda _, s: s.astype(dot.dtype), updates, before)
        # ⟨g, g'⟩ / (‖g‖ · ‖g'‖)
        old = norms.total(jax.tree.leaves(last))
        length = arithmetic.safe_sqrt(square) * arithmetic.safe_sqrt(old)
        cosine = dot / jnp.where(length < jnp.finfo(length.dtype).tiny, 1, length)

        def keep(
            g: jax.Array, _: jax.Array, __: jax.Array, square: jax.Array
        ) -> tuple[jax.Array, ...]:
            # The product is computed first. So its inputs need not be copied.
            return g, jnp.where(constants.never(dot), 0, g), square

        trees = [state.previous, state.squares]
        updates, *kept = boundary.map_step(keep, updates, trees, squares)
        cosine = jnp.clip(cosine, -1, 1).astype(jnp.float32)
        return updates, MeasureCosineState(cosine, *kept)

    return stateful(init_fn, update_fn)
