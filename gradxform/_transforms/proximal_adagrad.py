"""Proximal Adagrad: Adagrad's step, then L1 and L2 as a proximal step of its rate."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._jax import compilers
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._transforms.learning_rate import proximal_rate
from gradxform._trees import dtypes


class ProximalAdagradState(NamedTuple):
    """State of :func:`proximal_adagrad`.

    Attributes:
      count: int32[], the updates so far.
      sum_of_squares: ``acc``, like params, in at least float32.
    """

    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.
    sum_of_squares: optax.Updates


def proximal_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: jax.typing.ArrayLike = 0.1,
    l1_regularization_strength: jax.typing.ArrayLike = 0.0,
    l2_regularization_strength: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""The Adagrad of TensorFlow 1 with L1 and L2.

    .. math::

        acc' &= acc + \lvert g \rvert^2, \qquad
          \eta = learning\_rate / \sqrt{acc'}, \qquad v = w - \eta g \\
        w' &= \begin{cases}
          0 & \lvert v \rvert \le \eta \cdot l1 \\
          \dfrac{v - \eta \cdot l1 \cdot v / \lvert v \rvert}{1 + \eta \cdot l2}
            & \text{otherwise}
        \end{cases}

    The penalties act at each step, at the rate of each weight. In :func:`ftrl`, ``l1``
    is one threshold for the sum of all gradients.

    ``update`` needs ``params`` and returns :math:`w' - w`, so put it last in a chain,
    as :func:`ftrl`. A weight that becomes 0 is exactly 0 in every dtype. Where the
    gradient and the accumulator are 0, the weight stays. If the gradient of a table is
    :class:`IndexedSlices`, only the touched rows move.

    Args:
      learning_rate: a scalar ≥ 0, or a schedule ``count -> scalar``. Under ``jit`` a
        rate that is negative, infinite or NaN makes the weights NaN.
      initial_accumulator_value: what ``acc`` starts from, ≥ 0, in units of squared
        gradients.
      l1_regularization_strength: ``l1`` ≥ 0, in units of gradients.
      l2_regularization_strength: ``l2`` ≥ 0, in units of gradients by parameters.

    Returns:
      A transformation with state :class:`ProximalAdagradState`. Its updates are added
      to the parameters, and have the dtype of the gradients. If parameters have another
      dtype, the updates have that of the parameters in at least float32, which holds
      every weight exactly.

    Raises:
      ValueError: an argument is out of its range, or ``params`` is missing.
      TypeError: updates do not have the structure or the shapes of the parameters.

    References:
      Duchi and Singer, `Efficient online and batch learning using forward backward
      splitting <https://jmlr.org/papers/v10/duchi09a.html>`__, 2009.
      ``tf.train.ProximalAdagradOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.proximal_adagrad(1.0, 0.0, l1_regularization_strength=0.25)
    >>> w = jnp.array([3.0, 1.25])
    >>> grads = jnp.array([2.0, 0.5])  # Its rates are 1 / 2 and 1 / 0.5.
    >>> w, state = gx.apply_gradients(tx, grads, tx.init(w), w)
    >>> w  # 3 - 1 - 0.25 / 2, and 0 as 1.25 - 1 ≤ 0.25 / 0.5
    Array([1.875, 0.   ], dtype=float32)
    """
    if not callable(learning_rate):
        learning_rate = arguments.in_range("learning_rate", learning_rate, "[0, inf)")
    start, l1, l2 = arguments.non_negative(
        initial_accumulator_value=initial_accumulator_value,
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
    )

    def init_fn(params: optax.Params) -> ProximalAdagradState:
        return ProximalAdagradState(
            count=constants.zero(params, jnp.int32),
            sum_of_squares=constants.full(start, params, None, dtypes.compute_dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: ProximalAdagradState,
        params: optax.Params | None = None,
        **_: object,
    ) -> tuple[optax.Updates, ProximalAdagradState]:
        params = structures.params_like("proximal_adagrad", updates, params)
        rate = proximal_rate(learning_rate, state)

        @jax.jit  # Traced once for each shape, not for each leaf.
        def move(
            g: jax.Array, acc: jax.Array, w: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # acc' = acc + |g|²
            total = acc + arithmetic.abs_sq(g).astype(acc.dtype)
            acc = compilers.unshared(total)  # Not computed again.
            wide = dtypes.widen(w)
            # η = learning_rate / sqrt(acc'), but 0 where no gradient came yet
            is_normal = ~(acc < np.finfo(acc.dtype).tiny)
            eta = jax.lax.rsqrt(jnp.where(is_normal, acc, 1))
            eta = arithmetic.scale(jnp.where(is_normal, eta, 0), rate)
            # w' - w = -(η·g + η·l1·v/|v| + η·l2·w) / (1 + η·l2), with v = w - η·g
            step = arithmetic.scale(dtypes.widen(g).astype(wide.dtype), eta)
            decay, v = arithmetic.scale(eta, l2), wide - step
            step += arithmetic.scale(wide, decay)
            if not arguments.is_constant(l1, 0):
                size, least = jnp.abs(v), arithmetic.scale(eta, l1)
                is_zero = size <= least  # False for NaN, which stays.
                # At the border of 0 the quotient is 1 on either side, so nothing jumps
                # if a compiler computes `is_zero` twice, with two results.
                divisor = jnp.maximum(size, jnp.where(least > 0, least, 1))
                step += arithmetic.scale(v, least / divisor)
            else:
                is_zero = False
            # w' = 0 where |v| ≤ η·l1
            update = jnp.where(is_zero, -wide, arithmetic.scale(-step, 1 / (1 + decay)))
            return update.astype(g.dtype if g.dtype == w.dtype else wide.dtype), total

        sums = [state.sum_of_squares]
        structures.check_shapes(
            "updates", updates, "sum_of_squares", sums[0], structures.has_shape
        )
        updates, *sums = boundary.map_step(move, updates, sums, reads=[params])
        return updates, ProximalAdagradState(optax.safe_increment(state.count), *sums)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
