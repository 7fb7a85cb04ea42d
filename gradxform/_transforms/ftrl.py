"""FTRL-Proximal: follow the regularized leader, with weights that L1 holds at zero."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._devices.mesh import AxisName
from gradxform._jax import compilers
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._transforms import clipping
from gradxform._transforms.learning_rate import proximal_rate
from gradxform._trees import dtypes
from gradxform._trees.states import Mark


@Mark(kept=["linear"])  # A sum over all steps, which parameters are computed from.
class FtrlState(NamedTuple):
    """State of :func:`ftrl`.

    Attributes:
      count: int32[], the updates so far.
      sum_of_squares: ``n``, like params, in at least float32.
      linear: ``z``, like params, in at least float32; complex for complex ones.
    """

    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.
    sum_of_squares: optax.Updates
    linear: optax.Updates


def ftrl(
    learning_rate: optax.ScalarOrSchedule,
    learning_rate_power: jax.typing.ArrayLike = -0.5,
    initial_accumulator_value: jax.typing.ArrayLike = 0.1,
    l1_regularization_strength: jax.typing.ArrayLike = 0.0,
    l2_regularization_strength: jax.typing.ArrayLike = 0.0,
    l2_shrinkage_regularization_strength: jax.typing.ArrayLike = 0.0,
    beta: jax.typing.ArrayLike = 0.0,
    *,
    multiply_linear_by_learning_rate: bool = False,
    axis_name: AxisName = None,
    clipnorm: jax.typing.ArrayLike | None = None,
    clipvalue: jax.typing.ArrayLike | None = None,
    global_clipnorm: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The FTRL-Proximal optimizer of TensorFlow and Keras.

    .. math::

        n' &= n + \lvert g \rvert^2 \\
        z' &= z + g + 2 \, l2\_shrinkage \cdot w - \sigma w, \qquad
          \sigma = (n'^{-power} - n^{-power}) / learning\_rate \\
        w' &= \begin{cases}
          0 & \lvert z' \rvert \le l1 \\
          -\dfrac{z' - l1 \cdot z' / \lvert z' \rvert}
            {(beta + n'^{-power}) / learning\_rate + 2 \, l2} & \text{otherwise}
        \end{cases}

    It is for linear models with many features, when each example has only a few of
    them: click prediction, wide-and-deep models. If the gradient of a table is
    :class:`IndexedSlices`, only the touched rows and their state are read and written.

    FTRL computes weights and not steps, so ``update`` needs ``params``, and returns
    :math:`w' - w`. If :math:`w'` is 0, the update is exactly :math:`-w`, and the new
    weight is exactly 0 in every dtype. So put it last in a chain: a link behind it that
    changes the updates, such as weight decay, takes the weights away from their zeros.
    The initial weights count only through :math:`\sigma w`. A dense zero gradient sets
    a weight that had no other gradient before to 0.

    Args:
      learning_rate: a scalar ≥ 0, or a schedule ``count -> scalar``. If it is 0 at some
        step, weights and state stay as they are; under ``jit`` a rate that is negative,
        infinite or NaN makes them NaN. As it falls, ``z`` counts for less and
        the weights shrink with it: see ``multiply_linear_by_learning_rate``.
      learning_rate_power: how the rates fall as squares add up, ≤ 0; 0 for a fixed
        rate.
      initial_accumulator_value: what ``n`` starts from, ≥ 0, in units of squared
        gradients.
      l1_regularization_strength: ``l1`` ≥ 0, in units of gradients.
      l2_regularization_strength: ``l2`` ≥ 0; the 2 before it is TensorFlow's.
      l2_shrinkage_regularization_strength: ≥ 0, a penalty on the size of the weights,
        which acts like a gradient but does not enter ``n``.
      beta: ≥ 0; makes the first steps smaller.
      multiply_linear_by_learning_rate: whether the state holds ``z`` times the rate of
        each step: ``z' = z + learning_rate·(g + …) - (n'^-power - n^-power)·w``, and
        the weight's fraction is expanded by the rate. With a constant rate the weights
        are the same. A rate that falls then makes smaller steps and shrinks nothing.
      axis_name: mesh axes over which leaves may be sharded, inside ``jax.shard_map``,
        for the norms of the clips; see :func:`global_norm`.
      clipnorm: the norm of each leaf is clipped to this.
      clipvalue: each entry is clipped to ± this.
      global_clipnorm: the norm of all leaves together is clipped to this; the norm
        before clipping is ``optax.tree.get(state, "global_norm")``. If that norm is not
        finite, all updates become NaN: see :func:`clip_by_global_norm`.

    Returns:
      A transformation. Its state holds :class:`FtrlState`, and with ``global_clipnorm``
      also :class:`ClipByGlobalNormState`. Its updates are added to the parameters, and
      have the dtype of the gradients. If parameters have another dtype, the updates
      have that of ``linear``, which holds every weight exactly.

    Raises:
      ValueError: more than one clip argument, an argument out of its range, or
        ``params`` is missing.
      TypeError: updates do not have the structure or the shapes of the parameters.

    References:
      McMahan et al., `Ad click prediction: a view from the trenches
      <https://research.google.com/pubs/archive/41159.pdf>`__, 2013, algorithm 1.
      ``tf.train.FtrlOptimizer``, ``tf.keras.optimizers.Ftrl``; for
      ``multiply_linear_by_learning_rate`` ``tf.tpu.experimental.embedding.FTRL``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.ftrl(1.0, initial_accumulator_value=0.0, l1_regularization_strength=1.0)
    >>> w, grads = jnp.array([0.25, 0.25]), jnp.array([4.0, 0.5])
    >>> w, state = gx.apply_gradients(tx, grads, tx.init(w), w)
    >>> state.linear  # 4 - 4 · 0.25, and 0.5 - 0.5 · 0.25
    Array([3.   , 0.375], dtype=float32)
    >>> w  # -(3 - 1) / 4, and 0 as 0.375 ≤ l1
    Array([-0.5,  0. ], dtype=float32)
    """
    if not callable(learning_rate):
        learning_rate = arguments.in_range("learning_rate", learning_rate, "[0, inf)")
    arguments.check_flags(
        multiply_linear_by_learning_rate=multiply_linear_by_learning_rate
    )
    power = arguments.in_range("learning_rate_power", learning_rate_power, "(-inf, 0]")
    start, *strengths = arguments.non_negative(
        initial_accumulator_value=initial_accumulator_value,
        l1_regularization_strength=l1_regularization_strength,
        l2_regularization_strength=l2_regularization_strength,
        l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
        beta=beta,
    )
    numbers = _Numbers(power, *strengths)

    def init_fn(params: optax.Params) -> FtrlState:
        return FtrlState(
            count=constants.zero(params, jnp.int32),
            sum_of_squares=constants.full(start, params, None, dtypes.compute_dtype),
            linear=constants.zeros(params, None, dtypes.wide_dtype),
        )

    def update_fn(
        updates: optax.Updates,
        state: FtrlState,
        params: optax.Params | None = None,
        **_: object,
    ) -> tuple[optax.Updates, FtrlState]:
        params = structures.params_like("ftrl", updates, params)
        rate = proximal_rate(learning_rate, state)
        # All of z is multiplied, and the weight's fraction is expanded, or neither.
        unit, inverse = jnp.ones_like(rate), 1 / jnp.where(rate != 0, rate, 1)
        scales = (rate, unit) if multiply_linear_by_learning_rate else (unit, inverse)
        # Traced once for each shape, not for each leaf.
        follow = jax.jit(functools.partial(_follow, numbers, rate != 0, *scales))
        kept = [state.sum_of_squares, state.linear]
        structures.check_shapes("updates", updates, "linear", state.linear)
        updates, *new = boundary.map_step(follow, updates, kept, reads=[params])
        return updates, FtrlState(optax.safe_increment(state.count), *new)

    return clipping.keras_clip(
        optax.GradientTransformationExtraArgs(init_fn, update_fn),
        clipnorm=clipnorm,
        clipvalue=clipvalue,
        global_clipnorm=global_clipnorm,
        axis_name=axis_name,
    )


class _Numbers(NamedTuple):
    """The arguments of the formula; each may be traced."""

    power: jax.typing.ArrayLike
    l1: jax.typing.ArrayLike
    l2: jax.typing.ArrayLike
    l2_shrinkage: jax.typing.ArrayLike
    beta: jax.typing.ArrayLike


def _follow(
    numbers: _Numbers,
    moves: jax.Array,
    of_gradients: jax.Array,
    of_weights: jax.Array,
    g: jax.Array,
    n: jax.Array,
    z: jax.Array,
    w: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The update of an array, and its new state; no change unless it ``moves``."""
    power, l1, l2, l2_shrinkage, beta = numbers
    dtype = g.dtype if g.dtype == w.dtype else z.dtype
    # n' = n + |g|²
    square = arithmetic.abs_sq(g).astype(n.dtype)
    # z' = z + g + 2·l2_shrinkage·w - (n'^-power - n^-power)/learning_rate·w
    # A difference of roots, so that all of them add up to the divisor below.
    sigma = _root(n + square, power) - _root(n, power)
    g, w = (dtypes.widen(x).astype(z.dtype) for x in (g, w))
    pull = _scaled(g + _scaled(w, 2, l2_shrinkage), of_gradients)
    new_z = jnp.where(moves, z + pull - _scaled(w, sigma, of_weights), z)
    # Once z' is known, nobody needs n, and n' can be written in its place.
    n = compilers.barrier_after(n, new_z)
    new_n = jnp.where(moves, n + square, n)
    # w' = -(z' - l1·z'/|z'|) / ((beta + n'^-power)/learning_rate + 2·l2)
    z, n = map(compilers.unshared, (new_z, new_n))  # Or they are computed again.
    divisor = _scaled(jnp.asarray(beta, n.dtype) + _root(n, power), of_weights)
    divisor += _scaled(jnp.asarray(l2, n.dtype), 2, of_gradients)
    is_zero = divisor < np.finfo(n.dtype).tiny
    if not arguments.is_constant(l1, 0):
        size, least = jnp.abs(z), _scaled(jnp.asarray(l1, n.dtype), of_gradients)
        is_zero |= size <= least  # False for NaN, which stays.
        size = jnp.where(is_zero, 1, size)
        z = _scaled(z, (size - least) / size)
    new = _scaled(z, -1 / jnp.where(is_zero, 1, divisor))
    new = jnp.where(is_zero, 0, new)
    # w' - w
    return jnp.where(moves, new - w, 0).astype(dtype), new_n, new_z


def _scaled(x: jax.Array, *factors: jax.typing.ArrayLike) -> jax.Array:
    return functools.reduce(arithmetic.scale, factors, x)


def _root(n: jax.Array, power: jax.typing.ArrayLike) -> jax.Array:
    """``n^-power`` with a finite derivative at 0."""
    if arguments.is_constant(power, -0.5):
        return arithmetic.safe_sqrt(n)
    exponent = -jnp.asarray(power, n.dtype)
    is_zero = n == 0
    root = jnp.where(is_zero, 1, n) ** exponent
    return jnp.where(is_zero, jnp.zeros_like(exponent) ** exponent, root)
