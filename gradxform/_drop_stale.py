"""Gradients that arrive late: drop those computed too many steps ago."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform import _checks
from gradxform._gate import Act, GatedTransformation, Rest, gate


class DropStaleState(NamedTuple):
    """State of :func:`drop_stale`."""

    global_step: jax.Array  # int32[], updates accepted so far; saturates.
    stale_count: jax.Array  # int32[], updates dropped so far; saturates.
    staleness: jax.Array  # int32[], of the last update, accepted or not.
    inner_state: optax.OptState


def drop_stale(
    inner: optax.GradientTransformation, max_staleness: jax.typing.ArrayLike
) -> GatedTransformation:
    r"""Drops gradients that were computed too many steps ago.

    .. math::

        staleness &= global\_step - local\_step \\
        fresh &\iff staleness \le max\_staleness

    Fresh: ``inner`` runs and ``global_step`` grows by 1. Stale: the updates are zero,
    the inner state comes back bit-identical, and ``stale_count`` grows by 1; whatever a
    stale gradient holds, NaN or inf, reaches nothing. A ``local_step`` ahead of
    ``global_step`` is fresh.

    ``update(updates, state, params, *, local_step)`` takes the global step that the
    worker saw **before** it computed these gradients, read from the state together
    with the parameters: ``gx.global_step(state)``. ``inner`` receives ``local_step``
    and ``staleness`` as extra arguments. After a push, ``state.staleness`` says how
    late it was; whatever ``inner`` keeps, a schedule's count or the norm before a clip,
    is still that of the last accepted one.

    Use :func:`apply_gradients` rather than ``update`` and ``apply_updates`` one by one:
    there one conditional guards the whole step, a stale push costs next to nothing and
    nothing is copied, while ``update`` alone must bring updates and state out of the
    conditional, which copies them.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      max_staleness: how many steps late a gradient may be, ≥ 0.

    Returns:
      A transformation with state :class:`DropStaleState`.

    Raises:
      ValueError: ``max_staleness`` is negative or NaN.
      TypeError: ``update`` is called without ``local_step``, or it is no integer.

    Source: ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=1)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for local_step in (0, 0, 0):  # 0, 1 and 2 steps late
    ...     updates, state = tx.update(params + 1, state, params, local_step=local_step)
    ...     params = gx.apply_updates(params, updates)
    >>> assert params == -1.0  # -1, then 0 for the gradient at -1, then dropped
    >>> assert (state.global_step, state.stale_count, state.staleness) == (2, 1, 2)
    """
    _checks.in_range("max_staleness", max_staleness, "[0, inf]")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> DropStaleState:
        # Three arrays, not one three times: a buffer can be donated only once.
        return DropStaleState(
            global_step=jnp.zeros((), jnp.int32),
            stale_count=jnp.zeros((), jnp.int32),
            staleness=jnp.zeros((), jnp.int32),
            inner_state=inner.init(params),
        )

    def guard(
        act: Act,
        rest: Rest,
        updates: optax.Updates,
        state: DropStaleState,
        params: optax.Params | None,
        *,
        local_step: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[Any, DropStaleState]:
        if local_step is None:
            raise TypeError(
                "drop_stale needs local_step: pass update(..., local_step=s), the "
                "global step that the worker saw before it computed these gradients."
            )
        _checks.integer_scalar("local_step", local_step)
        # staleness = global_step - local_step
        staleness = state.global_step - jnp.asarray(local_step, jnp.int32)

        def fresh() -> tuple[Any, DropStaleState]:
            # A gate inside this one judges by the same local_step.
            passed_on = {**extra, "local_step": local_step, "staleness": staleness}
            outcome, inner_state = act(
                inner, updates, state.inner_state, params, **passed_on
            )
            global_step = optax.safe_increment(state.global_step)
            return outcome, state._replace(
                global_step=global_step, staleness=staleness, inner_state=inner_state
            )

        def stale() -> tuple[Any, DropStaleState]:
            stale_count = optax.safe_increment(state.stale_count)
            return rest(updates, params), state._replace(
                stale_count=stale_count, staleness=staleness
            )

        # fresh iff staleness <= max_staleness
        return jax.lax.cond(staleness <= max_staleness, fresh, stale)

    return gate(init_fn, guard)


def global_step(state: optax.OptState) -> jax.Array:
    """The number of updates accepted so far, from a state at any depth.

    Args:
      state: a state that holds one of :func:`drop_stale`, inside ``optax.chain``,
        ``optax.inject_hyperparams`` or other wrappers as well. Of nested gates the
        outermost counts.

    Returns:
      int32 scalar, a copy: it stays valid when the state is donated to the next step.

    Raises:
      ValueError: the state holds no global step, or several side by side.

    Source: the argument ``global_step`` of ``tf.train.Optimizer.apply_gradients``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.drop_stale(optax.adam(0.1), 2), optax.scale(0.5))
    >>> assert gx.global_step(tx.init(jnp.zeros(3))) == 0
    """
    return jnp.array(_outermost(state, "global_step"), copy=True)


def staleness_fraction(state: optax.OptState) -> jax.Array:
    r"""TensorFlow's measure of how much arrived too late.

    .. math:: stale\_count / (global\_step + 1)

    Dropped updates against accepted ones, so it is no share of all and may exceed 1.

    Args:
      state: as for :func:`global_step`.

    Returns:
      float32 scalar.

    Raises:
      ValueError: as :func:`global_step`.

    Source: the summary "Gradient staleness percentage" of
    ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> state = tx.init(jnp.zeros(3))
    >>> for local_step in (0, 0, 0, 1):
    ...     _, state = tx.update(jnp.ones(3), state, local_step=local_step)
    >>> assert abs(gx.staleness_fraction(state) - 2 / 3) < 1e-6
    """
    stale_count = _outermost(state, "stale_count").astype(jnp.float32)
    return stale_count / (_outermost(state, "global_step").astype(jnp.float32) + 1)


def _outermost(state: optax.OptState, field: str) -> jax.Array:
    found = optax.tree.get_all_with_path(state, field)
    if not found:
        raise ValueError(
            f"the state holds no {field}: wrap the transformation in drop_stale."
        )
    depth = min(len(path) for path, _ in found)
    outermost = [(path, value) for path, value in found if len(path) == depth]
    if len(outermost) > 1:
        paths = ", ".join(jax.tree_util.keystr(path) for path, _ in outermost)
        raise ValueError(f"the state holds several {field}, at {paths}: pass one part.")
    return outermost[0][1]
