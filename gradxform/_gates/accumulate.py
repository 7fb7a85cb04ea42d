"""Gradients of micro-batches, added up until they make one step.

This module says which pushes enter the sum; ``sums`` has the sum and the step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._devices import mesh
from gradxform._gates.sums import Accumulator, Reduction, Required
from gradxform._jax import versions
from gradxform._rows import boundary
from gradxform._trees import maps


def accumulate(
    inner: optax.GradientTransformation,
    num_required: Required,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    skip_nonfinite: bool = False,
    axis_name: str | Sequence[str] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adds up the gradients of micro-batches, and applies ``inner`` to their mean.

    .. math::

        sum &\leftarrow w g \text{ if } n = 0 \text{, else } sum + w g,
            \quad W \leftarrow w \text{ if } n = 0 \text{, else } W + w,
            \quad n \leftarrow n + 1 \\
        g_{inner} &= sum / W \quad\text{once } n \ge num\_required(global\_step)
            \text{ or } last

    Here w is the ``weight`` of a push, 1 if ``update`` gets none, and W is the sum of
    the weights since the last step. When the last of ``num_required`` pushes arrives,
    ``inner`` runs once on their mean, ``global_step`` grows by 1, and sum, W and n
    start again from 0. Until then the updates are zero, and the inner state stays
    bit-identical, with the count of every schedule in it. ``"sum"`` divides by nothing,
    and ``"row_mean"`` divides each row by the weights of the pushes that held it.

    A push with ``None`` for a leaf counts as zeros: its weight is in W. If it is the
    push that makes the step, the leaf is not stepped, and its sum waits for the next
    step. Then the mean divides by W of that step and by the weights of the pushes that
    were in the sum before. All else follows the rules of
    :func:`conditional_accumulator`, but no push comes late here, so ``update`` takes no
    ``local_step``.

    Use :func:`apply_gradients` or ``minimize``. Loops that call ``update`` get the same
    numbers. If ``minimize`` names scanned layers in ``layers``, no array holds all of
    their gradients.
    :doc:`The page on micro-batches </micro_batches>` has an example for each argument.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      num_required: how many pushes make a step, in [1, 2³¹ - 1]; or a schedule that
        gives this number for each ``global_step``. The numbers of a schedule cannot be
        checked under ``jit``; a number below 1 counts as 1.
      reduction: ``"mean"``, ``"sum"`` or ``"row_mean"``, as in
        :func:`conditional_accumulator`.
      accumulator_dtype: dtype of the sum, by default that of the parameters but at
        least float32.
      skip_nonfinite: whether to leave out a push with NaN or inf in any leaf. Such a
        push changes only ``nonfinite_count``. Inside ``shard_map`` all devices that
        share a step leave the push out together, which takes one all-reduce of one
        number. Under ``pmap`` or ``check_vma=False`` each device decides alone, unless
        ``axis_name`` is given. It must know all gradients before it adds any, so the
        ``layers`` of ``minimize`` need ``two_passes``.
      axis_name: one or several mesh axes over which gradients are not summed yet. Each
        device then has a sum of its own, and they are added up once, with the step.
        Inside ``shard_map``, ``pmap`` or ``vmap`` each device pushes the gradient of
        its own data: ``inner`` gets Σ w·g over pushes and devices, divided by Σ w over
        both; with ``"sum"`` the mean over devices of their sums. Parameters have to be
        equal on all of these devices. On explicit axes the gradients are ``unreduced``
        there: their sum over devices is the gradient, and ``weight`` is one number for
        all devices. A gradient that is equal on all devices, or not unreduced, stays as
        it is. ``total_weight``, ``leaf_weights``, ``carried``, ``accumulated`` and
        ``row_counts`` differ by device, so call ``init`` where ``update`` is called,
        and keep them there.

    Extra arguments of update:
      weight: as in :func:`conditional_accumulator`.
      last: as in :func:`conditional_accumulator`; equal on all these devices.

    Returns:
      A transformation with state :class:`ConditionalAccumulatorState`.

    Raises:
      ValueError: ``num_required`` is out of range, or ``reduction`` is unknown;
        ``weight`` is known, and negative, infinite or NaN; an axis in ``axis_name`` is
        none here, or parameters or ``last`` differ over it; a gradient is unreduced
        over another axis, or where ``skip_nonfinite`` must know it.
      TypeError: ``inner`` is no transformation; ``num_required`` is no integer, or its
        schedule gives no number; ``axis_name`` names no axes; ``weight`` is no real
        scalar, or ``last`` no bool; updates do not have the structure or the shapes of
        the parameters.

    References:
      ``optax.MultiSteps``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.accumulate(optax.sgd(1.0), num_required=2, skip_nonfinite=True)
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> for grad in (1.0, jnp.nan, 3.0):
    ...     params, state = gx.apply_gradients(tx, jnp.array(grad), state, params)
    >>> params  # minus the mean of 1 and 3
    Array(-2., dtype=float32)
    >>> state.global_step, state.num_accumulated, state.nonfinite_count
    (Array(1, dtype=int32), Array(0, dtype=int32), Array(1, dtype=int32))

    Of the last two pushes the second one has three times as many tokens:

    >>> tx = gx.accumulate(optax.sgd(1.0), num_required=8)
    >>> params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
    >>> for grad, tokens in ((1.0, 10), (5.0, 30)):
    ...     params, state = gx.apply_gradients(
    ...         tx, jnp.array(grad), state, params, weight=tokens, last=tokens == 30
    ...     )
    >>> params  # minus (10 · 1 + 30 · 5) / 40
    Array(-4., dtype=float32)
    """
    arguments.check_flags(skip_nonfinite=skip_nonfinite)
    names = mesh.names_of(axis_name)

    def enters(
        updates: optax.Updates, global_step: jax.Array, extra: dict[str, object]
    ) -> tuple[jax.Array | Literal[True], None]:
        del extra
        if not skip_nonfinite:
            return True, None
        hint = "skip_nonfinite must know each gradient, so it takes no part of a sum: "
        mesh.check_reduced("updates", updates, (), hint)
        return _all_finite(updates, global_step, names), None

    return Accumulator(
        inner,
        num_required,
        reduction,
        accumulator_dtype,
        enters=enters,
        left_out="nonfinite_count",
        names=names,
    ).gate()


def _all_finite(
    updates: optax.Updates, global_step: jax.Array, names: tuple[str, ...]
) -> jax.Array:
    """Whether a push is finite, on all devices that count their steps together."""
    leaves = filter(maps.has_gradient, maps.leaves(updates))
    finite = map(boundary.all_finite, leaves)
    every = functools.reduce(jnp.logical_and, finite, jnp.array(True))
    varying = versions.varying_axes
    axes = varying(jax.typeof(every)) - varying(jax.typeof(global_step))
    return mesh.every(every, axes.union(names))
