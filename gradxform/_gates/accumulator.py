"""Gradients of several workers, added up until there are enough for one step.

This module says which pushes enter the sum; ``sums`` has the sum and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._gates.sums import Accumulator, Reduction, Required
from gradxform._numbers import lateness


def conditional_accumulator(
    inner: optax.GradientTransformation,
    num_required: Required,
    *,
    max_staleness: jax.typing.ArrayLike | optax.Schedule = 0,
    weight: Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
    reduction: Reduction = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds up gradients, and applies ``inner`` to them once there are enough.

    .. math::

        s &= global\_step - local\_step \\
        accepted &\iff s \le max\_staleness(global\_step) \\
        sum &\leftarrow sum + w \cdot weight(\max(0, s)) \cdot g,
            \quad W \leftarrow W + w, \quad n \leftarrow n + 1
            \quad\text{where accepted} \\
        g_{inner} &= sum / W \quad\text{once } n \ge num\_required \text{ or } last

    A push that is more than ``max_staleness`` steps late is dropped, and
    ``stale_count`` grows by 1. By default each late push is dropped. Every other push
    is added, even one of zeros. When the last of ``num_required`` pushes arrives,
    ``inner`` runs once on their mean, ``global_step`` grows by 1, and sum and count
    start again from 0. Until then the updates are zero, and the inner state stays
    bit-identical. NaN or inf in a dropped gradient reaches nothing. The types of
    updates and state are described in :func:`drop_stale`.

    Each push weighs w = 1, unless ``update`` gets a ``weight``. The mean divides by the
    sum of these, not of the weights by staleness. So late pushes make the step smaller.
    With ``max_staleness=jnp.inf`` and
    ``weight=lambda s: 1 / jnp.sqrt(1 + s)`` this is FedBuff, whose workers push the
    result of :func:`local_steps`. Other systems divide by something else: the page on
    papers says by what.

    ``None`` for a leaf adds nothing to its sum, just as zeros would. With ``"mean"``
    the push counts all the same: two pushes of half a tree each give half of each
    gradient. With ``"row_mean"`` each leaf is divided by the number of pushes that held
    it, as by TensorFlow's accumulator, which is one for each variable. A leaf that is
    ``None`` in the push that makes the step is not stepped: ``inner`` gets ``None``
    there, and the sum of the leaf waits for a window whose last push has a gradient for
    it. The mean then divides by the weights of that window, and by those of the earlier
    pushes that are in the sum. If no push has one, its parameter and its state stay as
    they are, also under weight decay, which ``minimize(trainable=...)`` needs.

    If there are ``num_required`` workers, this is synchronous training without a
    barrier in the program. If there are more, the extra ones are **backup workers**: a
    step waits for the fastest, and the later pushes of the slowest are dropped.

    Use :func:`apply_gradients`. Then a push that is only added costs one pass over sum
    and gradient, a dropped push costs next to nothing, and no copy of the model is
    made.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      num_required: how many pushes make a step, in [1, 2³¹ - 1]; or a schedule that
        gives this number for each ``global_step``.
      max_staleness: how many steps late a gradient may be, as in :func:`drop_stale`: an
        integer ≥ 0, inf, or a schedule that gives this number for each
        ``global_step``.
      weight: a function that takes the staleness of an accepted push, an int32 scalar,
        and returns its factor, a real scalar ≥ 0; None is a factor of 1. A gradient
        ahead of its time has staleness 0 here. The product is not rounded to the
        gradient's dtype. :ref:`The page on late gradients <weights>` has the published
        weights.
      reduction: what ``inner`` receives: ``"mean"``, ``"sum"`` or ``"row_mean"``. With
        the last one each row (index of the first axis) is divided by the number of
        pushes that held it, as TensorFlow does with row-sparse gradients. A dense
        gradient holds every row, ``None`` holds none.
      accumulator_dtype: dtype of the sum, by default that of the parameters but at
        least float32: a sum in half precision loses small additions.

    Extra arguments of update:
      local_step: as in :func:`drop_stale`; ``inner`` receives it, too.
      weight: w, how much the push weighs, such as its number of tokens: a real scalar
        ≥ 0, also an integer, also traced; by default 1. The mean is Σ w·g / Σ w,
        ``"sum"`` is Σ w·g, and ``"row_mean"`` divides each row by the weights of the
        pushes that held it. A push of weight 0 counts in n, but adds nothing, not even
        NaN. If all weights are 0, ``inner`` gets zeros. The sum of weights is float32:
        above 2²⁴ each addition rounds it, by at most 6e-8 of it. With float16 sums take
        weights near 1, so that w·g does not overflow.
      last: a bool, also traced: whether this push makes the step, whatever n is. A push
        that is left out makes the step of those before it, if there are any. It still
        says which leaves are stepped: those that it has a gradient for. If those before
        it have none for such a leaf, ``inner`` gets zeros there.

    ``inner`` receives neither of the two. So an accumulator inside counts each mean as
    one push. If a traced weight is negative or NaN, the step is NaN.

    Returns:
      A transformation with state :class:`ConditionalAccumulatorState`.

    Raises:
      ValueError: ``num_required`` is out of range; ``max_staleness`` is negative or
        NaN; a weight is known here, and negative, infinite or NaN; ``reduction`` is
        unknown; a ``local_step`` that is no array is not in [0, 2³¹ - 1].
      TypeError: ``inner`` is no transformation; ``num_required`` is no integer;
        ``max_staleness`` is neither an integer nor inf; a schedule gives no number;
        ``weight`` is not a function, or a weight is no real scalar; ``last`` is no
        bool; ``update`` is called without ``local_step``, or it is no integer; updates
        do not have the structure or the shapes of the parameters.

    References:
      ``tf.ConditionalAccumulator``, ``tf.train.SyncReplicasOptimizer``.
      Chen et al., `Revisiting distributed synchronous SGD
      <https://arxiv.org/abs/1604.00981>`__, 2016 (backup workers).
      Nguyen et al., `Federated learning with buffered asynchronous aggregation
      <https://arxiv.org/abs/2106.06639>`__, 2022 (FedBuff).

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.conditional_accumulator(optax.sgd(1.0), num_required=2)
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> for grad in (1.0, 3.0, 100.0):  # The third worker was too slow.
    ...     grad = jnp.array(grad)
    ...     params, state = gx.apply_gradients(tx, grad, state, params, local_step=0)
    >>> params  # minus the mean of 1 and 3
    Array(-2., dtype=float32)
    >>> state.global_step, state.num_accumulated, state.stale_count
    (Array(1, dtype=int32), Array(0, dtype=int32), Array(1, dtype=int32))

    With FedBuff's weight, the push of the third worker counts half:

    >>> tx = gx.conditional_accumulator(
    ...     optax.sgd(1.0),
    ...     num_required=1,
    ...     max_staleness=jnp.inf,
    ...     weight=lambda s: 1 / jnp.sqrt(1 + s),
    ... )
    >>> state = tx.init(params)._replace(global_step=jnp.int32(3))
    >>> tx.update(jnp.array(100.0), state, local_step=0)[0]  # -100 / √4
    Array(-50., dtype=float32)
    """
    max_staleness = lateness.checked_bound(max_staleness)
    lateness.check_weight(weight)

    def enters(
        updates: optax.Updates, global_step: jax.Array, extra: dict[str, Any]
    ) -> tuple[jax.Array, jax.typing.ArrayLike | None]:
        del updates
        local_step = extra.get("local_step")
        local_step = arguments.local_step("conditional_accumulator", local_step)
        extra["local_step"] = local_step
        # accepted iff s <= max_staleness(global_step)
        accepted = lateness.is_fresh(global_step, local_step, max_staleness)
        if weight is None:
            return accepted, None
        # weight(max(0, s)); for a dropped push weight(0), which nothing reads
        s = jnp.maximum(0, lateness.staleness(global_step, local_step))
        return accepted, lateness.factor(weight, jnp.where(accepted, s, 0))

    return Accumulator(
        inner,
        num_required,
        reduction,
        accumulator_dtype,
        enters=enters,
        left_out="stale_count",
    ).gate()
