"""Gradients of micro-batches, added up until they make one step."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._late import gate
from gradxform._late.counters import increment_if
from gradxform._late.gate import Decision, GatedTransformation
from gradxform._late.sums import Reduction, Sums
from gradxform._rows import boundary
from gradxform._trees import checks, constants, maps, versions


class AccumulateState(NamedTuple):
    """State of :func:`accumulate`.

    Attributes:
      global_step: int32[], how many times the inner transformation has run; saturates.
      num_accumulated: int32[], pushes in the sum.
      nonfinite_count: int32[], pushes left out so far; saturates.
      accumulated: the sum, like params, in at least float32 by default. It has no
        sum for a leaf that is not in ``pushed``, and none at all if
        ``num_accumulated`` is 0: the next push replaces whatever is there.
      pushed: bool[leaves], whether any push in the sum had a gradient for the leaf.
      row_counts: int32[rows] for each leaf, how many pushes in the sum held each row;
        only for ``row_mean``.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    num_accumulated: jax.Array
    nonfinite_count: jax.Array
    accumulated: optax.Updates
    pushed: jax.Array
    row_counts: optax.Updates
    inner_state: optax.OptState


def accumulate(
    inner: optax.GradientTransformation,
    num_required: jax.typing.ArrayLike | optax.Schedule,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
    skip_nonfinite: bool = False,
) -> GatedTransformation:
    r"""Adds up the gradients of micro-batches, and applies ``inner`` to their mean.

    .. math::

        sum &\leftarrow g \text{ if } n = 0 \text{, else } sum + g,
            \quad n \leftarrow n + 1 \\
        g_{inner} &= sum / n \quad\text{once } n \ge num\_required(global\_step)

    This is :func:`conditional_accumulator` for a single process. There no gradient
    comes late, so ``update`` takes no ``local_step``. When the last of ``num_required``
    pushes arrives, ``inner`` runs once on their mean, ``global_step`` grows by 1, and
    sum and count start again from 0. Until then the updates are zero, and the inner
    state stays bit-identical, with the count of every schedule in it. ``None`` leaves,
    row-sparse gradients and the types of updates and state follow the rules of
    :func:`conditional_accumulator`.

    If loss and gradients are computed in the same program, also in a ``scan``, each
    gradient is added as soon as it is known, and no copy of all gradients is kept. So
    the step needs little more memory than the loss. The gradients of scanned layers are
    known together, so they are kept. With ``skip_nonfinite`` all
    gradients must be known first, so they are kept: one model.

    Use :func:`apply_gradients` or ``minimize``. ``nnx.Optimizer`` and Flax's
    ``TrainState`` call ``update`` and apply its updates. Such loops get the same
    numbers and need no more memory: the updates of a step come in the arrays of the
    sum. But they add updates of zeros with every other push. If ``inner`` has no array
    in its state, as SGD, on TPU its updates are computed with each push, and only those
    of a step are not zero.

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
        push changes only ``nonfinite_count``. The check is one more pass over each
        gradient. Inside ``shard_map`` all devices that share a step leave the push out
        together. Under ``pmap`` or ``check_vma=False`` JAX does not track which values
        vary, so each device decides alone: sum the gradients first.

    Returns:
      A transformation with state :class:`AccumulateState`.

    Raises:
      ValueError: ``num_required`` is out of range, or ``reduction`` is unknown.
      TypeError: ``inner`` is no transformation; ``num_required`` is no integer, or its
        schedule gives no number; updates do not have the structure or the shapes of the
        parameters.

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
    """
    checks.flags(skip_nonfinite=skip_nonfinite)
    sums = Sums(inner, num_required, reduction, accumulator_dtype)

    def init_fn(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            nonfinite_count=constants.zero(params, jnp.int32), **sums.init(params)
        )

    def decide(
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None,
        **extra: Any,
    ) -> Decision:
        accepted: jax.Array | Literal[True] = True
        if skip_nonfinite:
            accepted = _all_finite(updates, state.global_step)
            number = increment_if(~accepted, state.nonfinite_count)
            state = state._replace(nonfinite_count=number)
        return sums.decide(updates, state, params, accepted, **extra)

    return gate.gate(init_fn, inner, decide)


def _all_finite(updates: optax.Updates, global_step: jax.Array) -> jax.Array:
    """Whether a push is finite, on all devices that count their steps together."""
    leaves = filter(maps.has_gradient, maps.leaves(updates))
    finite = map(boundary.all_finite, leaves)
    every = functools.reduce(jnp.logical_and, finite, jnp.array(True))
    varying = versions.varying_axes
    axes = varying(jax.typeof(every)) - varying(jax.typeof(global_step))
    if not axes:
        return every
    return jax.lax.pmin(every.astype(jnp.int32), tuple(sorted(axes))) > 0
