"""Adagrad: per-parameter rates from the sum of all squared gradients so far."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, constants, norms
from gradxform._rows import boundary
from gradxform._transforms import clipping
from gradxform._transforms.learning_rate import scale_by_learning_rate
from gradxform._trees import boxes, dtypes, maps
from gradxform._trees.types import Gradient, Leaf

# The defaults of both functions.
INITIAL_ACCUMULATOR_VALUE = 0.1
EPS = 1e-7


class ScaleByAdagradState(NamedTuple):
    """State of :func:`scale_by_adagrad`.

    Attributes:
      sum_of_squares: ``acc``, like params, in at least float32 by default; with
        ``row_wise`` one number for each row.
    """

    sum_of_squares: optax.Updates


def scale_by_adagrad(
    initial_accumulator_value: jax.typing.ArrayLike = INITIAL_ACCUMULATOR_VALUE,
    eps: jax.typing.ArrayLike = EPS,
    *,
    eps_in_sqrt: bool = True,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    row_wise: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides updates by the root of the sum of all squared gradients so far.

    .. math::

        acc &\leftarrow acc + \lvert g \rvert^2 \\
        u &= g / \sqrt{acc + eps}
          \quad\text{or, with eps\_in\_sqrt=False,}\quad g / (\sqrt{acc} + eps)

    A zero gradient on a zero accumulator gives a zero update, for ``eps=0`` too. If the
    gradient of a table is :class:`IndexedSlices`, only the touched rows and their
    accumulators are read and written, and the updates are :class:`IndexedSlices`.

    Args:
      initial_accumulator_value: what ``acc`` starts from, ≥ 0, in units of squared
        gradients.
      eps: keeps the divisor from 0, ≥ 0; added in at least float32, so that it never
        underflows.
      eps_in_sqrt: True as in Keras 3, TensorFlow ≥ 2.11 and optax; False as in
        TensorFlow 1.x and ``tf.keras`` ≤ 2.10.
      accumulator_dtype: real dtype of ``acc``. By default float32, and float64 for
        double parameters: a sum that only grows soon stalls in half precision. If it is
        narrower, ``u`` is computed from the rounded ``acc``, which the state holds.
      row_wise: whether to keep one accumulator for each row, for the mean of the
        squares over all axes but the first. That saves nearly all state of an embedding
        table. Dense gradients are read twice: for the mean and for the division. Inside
        ``jax.shard_map`` a row has to be whole on its device.

    Returns:
      A transformation with state :class:`ScaleByAdagradState`. Updates keep their
      shapes and dtypes; the arithmetic is done in at least float32.

    Raises:
      ValueError: ``initial_accumulator_value`` or ``eps`` is negative or NaN.
      TypeError: ``accumulator_dtype`` is not a real floating dtype; updates do not have
        the structure or the shapes of the parameters.

    References:
      Duchi et al., `Adaptive subgradient methods for online learning and stochastic
      optimization <https://jmlr.org/papers/v12/duchi11a.html>`__, 2011.
      ``tf.keras.optimizers.Adagrad``; row-wise fbgemm's ``EXACT_ROWWISE_ADAGRAD``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.scale_by_adagrad(initial_accumulator_value=7.0, eps=0.0)
    >>> grads = jnp.array([3.0, 0.0])
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> state.sum_of_squares  # 7 + 3²
    Array([16.,  7.], dtype=float32)
    >>> updates  # 3 / √16
    Array([0.75, 0.  ], dtype=float32)
    """
    initial_accumulator_value, eps = arguments.non_negative(
        initial_accumulator_value=initial_accumulator_value, eps=eps
    )
    arguments.check_flags(eps_in_sqrt=eps_in_sqrt, row_wise=row_wise)
    structures.check_state_dtype("accumulator_dtype", accumulator_dtype, real_only=True)

    axes = 1 if row_wise else None  # How many axes of a leaf an accumulator has.

    def init_fn(params: optax.Params) -> ScaleByAdagradState:
        start, dtype = initial_accumulator_value, dtypes.compute_dtype
        return ScaleByAdagradState(
            constants.full(start, params, accumulator_dtype, dtype, axes=axes)
        )

    def fits(g: Gradient, acc: Leaf) -> bool:  # A sum of |g|² is real.
        return maps.has_gradient(acc) and np.shape(g)[:axes] == np.shape(acc)

    @jax.jit  # Traced once for each shape, not for each leaf.
    def divide(
        g: jax.Array, acc: jax.Array, row: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        if row is None:
            square = arithmetic.abs_sq(g)
        else:  # The mean of a row without entries is 0, not 0 / 0.
            square = row / max(1, math.prod(g.shape[1:]))
        # acc ← acc + |g|², a row's mean of squares if row_wise
        total = (dtypes.widen(acc).astype(square.dtype) + square).astype(acc.dtype)
        # u = g / sqrt(acc + eps), or g / (sqrt(acc) + eps). An unrounded acc would need
        # a pass of its own.
        factor = arithmetic.inverse_sqrt(dtypes.widen(total), eps, eps_in_sqrt)
        return arithmetic.scale_leading(g, factor), total

    def update_fn(
        updates: optax.Updates,
        state: ScaleByAdagradState,
        params: optax.Params | None = None,
        *,
        clip_sums: optax.Updates | None = None,
        **_: object,
    ) -> tuple[optax.Updates, ScaleByAdagradState]:
        updates = boundary.summed_rows(updates)
        if row_wise and params is not None:  # The accumulators know only the rows.
            structures.check_shapes("updates", updates, "params", params)
        like = boxes.as_in(updates, state.sum_of_squares)
        structures.check_shapes("updates", updates, "sum_of_squares", like, fits)
        squares = []
        if row_wise:
            squares = [norms.squared_rows(updates) if clip_sums is None else clip_sums]
        kept = [state.sum_of_squares]
        updates, *new = boundary.map_step(divide, updates, kept, *squares)
        return updates, ScaleByAdagradState(*new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: jax.typing.ArrayLike = INITIAL_ACCUMULATOR_VALUE,
    eps: jax.typing.ArrayLike = EPS,
    *,
    eps_in_sqrt: bool = True,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    row_wise: bool = False,
    axis_name: AxisName = None,
    clipnorm: jax.typing.ArrayLike | None = None,
    clipvalue: jax.typing.ArrayLike | None = None,
    global_clipnorm: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The Adagrad optimizer of TensorFlow and Keras.

    .. math::

        acc &\leftarrow acc + \lvert g \rvert^2 \\
        w &\leftarrow w - learning\_rate \cdot g / \sqrt{acc + eps}

    At most one clip with Keras's meaning, then :func:`scale_by_adagrad`, then the
    learning rate.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar``.
      initial_accumulator_value: what ``acc`` starts from; see
        :func:`scale_by_adagrad` for this and the next ones.
      eps: keeps the divisor from 0.
      eps_in_sqrt: False for TensorFlow 1.x's formula.
      accumulator_dtype: real dtype of ``acc``.
      row_wise: whether to keep one accumulator for each row.
      axis_name: mesh axes over which leaves may be sharded, inside ``jax.shard_map``,
        for the norms of the clips; see :func:`global_norm`.
      clipnorm: the norm of each leaf is clipped to this, ≥ 0.
      clipvalue: each entry is clipped to ± this, ≥ 0.
      global_clipnorm: the norm of all leaves together is clipped to this, ≥ 0; the norm
        before clipping is ``optax.tree.get(state, "global_norm")``. If that norm is not
        finite, all updates become NaN: see :func:`clip_by_global_norm`.

    Returns:
      A transformation. Its state holds :class:`ScaleByAdagradState`, and with
      ``global_clipnorm`` also :class:`ClipByGlobalNormState`. Its updates are added to
      the parameters.

    Raises:
      ValueError: more than one clip argument, or an argument out of its range.
      TypeError: updates do not have the structure or the shapes of the parameters.

    References:
      ``tf.keras.optimizers.Adagrad``, ``tf.train.AdagradOptimizer``.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> params = {"w": jnp.array([1.0, -2.0])}
    >>> tx = gx.adagrad(0.5)
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...     grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
    ...     params, state = gx.apply_gradients(tx, grads, state, params)
    >>> assert jnp.allclose(params["w"], 0, atol=1e-3)
    """
    scaled = scale_by_adagrad(
        initial_accumulator_value,
        eps,
        eps_in_sqrt=eps_in_sqrt,
        accumulator_dtype=accumulator_dtype,
        row_wise=row_wise,
    )
    clipped = clipping.keras_clip(
        scaled,
        clipnorm=clipnorm,
        clipvalue=clipvalue,
        global_clipnorm=global_clipnorm,
        axis_name=axis_name,
        sums_of="rows" if row_wise else None,
    )
    return optax.chain(clipped, scale_by_learning_rate(learning_rate))
