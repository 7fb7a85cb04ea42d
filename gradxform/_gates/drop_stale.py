"""The gate that drops gradients computed too many steps ago."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._gates import gate
from gradxform._gates.gate import Decision
from gradxform._numbers import constants, lateness
from gradxform._trees import states


@states.Mark(gate=True, needs={"local_step": "stale_count"})
class DropStaleState(NamedTuple):
    """State of :func:`drop_stale`.

    Attributes:
      global_step: int32[], updates accepted so far; saturates.
      stale_count: int32[], updates dropped so far; saturates.
      staleness: int32[], that of the last update, accepted or not.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    stale_count: jax.Array
    staleness: jax.Array
    inner_state: optax.OptState


def drop_stale(
    inner: optax.GradientTransformation,
    max_staleness: jax.typing.ArrayLike | optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
    r"""Drops gradients that were computed too many steps ago.

    .. math::

        staleness &= global\_step - local\_step \\
        fresh &\iff staleness \le max\_staleness(global\_step)

    If a gradient is fresh, ``inner`` runs and ``global_step`` grows by 1. If it is
    stale, the updates are zero, the inner state comes back bit-identical, and
    ``stale_count`` grows by 1. NaN or inf in a stale gradient reaches nothing. A
    gradient with a ``local_step`` ahead of ``global_step`` is fresh.

    For a fresh gradient the updates are those of ``inner``, in its dtypes. The state
    keeps the types that ``init`` gave it, so one conditional, or one ``scan``, can hold
    every push. For example, ``optax.adam`` of bfloat16 parameters keeps bfloat16
    moments. Without the gate, float32 gradients would make them float32: ask for
    ``mu_dtype="float32"`` if you want that.

    ``inner`` receives ``local_step`` and ``staleness`` as extra arguments. After a
    push, ``state.staleness`` says how late it was. The state of ``inner``, such as a
    schedule's count or the norm before a clip, still belongs to the last accepted push.

    Use :func:`apply_gradients` rather than ``update`` and ``apply_updates`` one by one.
    Then one conditional guards the whole step, a stale push costs next to nothing, and
    nothing is copied. ``update`` alone must bring updates and state out of the
    conditional, which copies them.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      max_staleness: how many steps late a gradient may be: an integer ≥ 0; or inf, so
        that none is too late; or a schedule that gives this number for each
        ``global_step``, also as a fraction. Under ``optax.inject_hyperparams`` name a
        schedule in ``static_args``. Otherwise optax evaluates it for each push.

    Extra arguments of update:
      local_step: the global step that the worker saw **before** it computed these
        gradients, read together with the parameters: ``gx.global_step(state)``.

    Returns:
      A transformation with state :class:`DropStaleState`.

    Raises:
      ValueError: ``max_staleness`` is negative or NaN; a ``local_step`` that is no
        array is not in [0, 2³¹ - 1].
      TypeError: ``inner`` is no transformation; ``max_staleness`` is neither an integer
        nor inf, or its schedule gives no real number; ``update`` is called without
        ``local_step``, or it is no integer.

    With ``optax.sgd`` inside it is Ringmaster ASGD, whose delay threshold R is
    ``max_staleness=R - 1``. Ringmaster LMO has a threshold that needs no tuning,
    :math:`R_k = \lfloor\sqrt k\rfloor` at step k; its authors' code takes that of the
    step before: ``max_staleness=lambda k: jnp.sqrt(jnp.maximum(k - 1, 1)) - 1``.

    References:
      ``tf.contrib.opt.DropStaleGradientOptimizer``.
      Maranjyan et al., `Ringmaster ASGD <https://arxiv.org/abs/2501.16168>`__, 2025.
      `Ringmaster LMO <https://arxiv.org/abs/2605.18174>`__, 2026.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=1)
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> for local_step in (0, 0, 0):  # 0, 1 and 2 steps late
    ...     updates, state = tx.update(params + 1, state, params, local_step=local_step)
    ...     params = gx.apply_updates(params, updates)
    >>> params  # -1, then 0 for the gradient at -1, then dropped
    Array(-1., dtype=float32)
    >>> state.global_step, state.stale_count, state.staleness
    (Array(2, dtype=int32), Array(1, dtype=int32), Array(2, dtype=int32))
    """
    max_staleness = lateness.checked_bound(max_staleness)

    def init_fn(params: optax.Params) -> DropStaleState:
        # Three arrays, not one three times: a buffer can be donated only once.
        return DropStaleState(
            global_step=constants.zero(params, jnp.int32),
            stale_count=constants.zero(params, jnp.int32),
            staleness=constants.zero(params, jnp.int32),
            inner_state=inner.init(params),
        )

    def decide(
        updates: optax.Updates,
        state: DropStaleState,
        *,
        local_step: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> Decision:
        local_step = arguments.local_step("drop_stale", local_step)
        # staleness = global_step - local_step
        staleness = lateness.staleness(state.global_step, local_step)
        # fresh iff staleness <= max_staleness(global_step)
        fresh = lateness.is_fresh(state.global_step, local_step, max_staleness)
        # A gate inside this one needs the same local_step.
        extra |= {"local_step": local_step, "staleness": staleness}
        state = state._replace(staleness=staleness)
        return Decision(fresh, fresh, lambda _: updates, state, extra)

    return gate.gate(init_fn, inner, decide)
