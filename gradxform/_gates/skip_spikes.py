"""The gate that skips a gradient if its norm or its loss jumps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._devices import mesh
from gradxform._devices.mesh import AxisName
from gradxform._gates import gate
from gradxform._gates.gate import Decision
from gradxform._numbers import arithmetic, constants, norms
from gradxform._rows import boundary
from gradxform._trees import dtypes, states


@states.Mark(gate=True, reads=["value"])
class SkipSpikesState(NamedTuple):
    """State of :func:`skip_spikes`.

    Attributes:
      global_step: int32[], pushes accepted so far; saturates.
      skipped_count: int32[], pushes skipped so far; saturates.
      norm: float32[], the global norm of the last push, accepted or not.
      history: float32[2, window], the last norms in one row and the last values in the
        other; a row is filled from its end, and the newest number is the last.
      num_held: int32[2], how many numbers each row of ``history`` holds.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    skipped_count: jax.Array
    norm: jax.Array
    history: jax.Array
    num_held: jax.Array
    inner_state: optax.OptState


def skip_spikes(
    inner: optax.GradientTransformation,
    *,
    window: int = 128,
    sigmas: jax.typing.ArrayLike = 6.0,
    warmup: jax.typing.ArrayLike | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a push if its gradient norm or its loss is far above the last ones.

    .. math::

        spike(x) \iff x - mean(h) > sigmas \cdot std(h)

    Here x is the global norm of the push, or the loss that ``update`` got as ``value``,
    and h are the last ``window`` such numbers before it. The standard deviation is that
    of a sample: it divides by n - 1. While h has fewer than ``warmup`` numbers, no
    number is a spike.

    If one of the two is a spike, the push is skipped: the updates are zero, the inner
    state comes back bit-identical, and ``skipped_count`` grows by 1. The numbers of the
    push enter their histories all the same. So a new level of the loss is accepted
    after a while, when it has widened the deviation.

    If one of the two is not finite, the push is skipped, too, also before there is any
    history. Then neither of them enters a history. A norm is NaN or infinite if any
    entry is, or if the square of an entry overflows: in float32 above 1e19.

    The state has room for both histories, also if ``update`` gets no ``value``, or gets
    one only in some calls. ``minimize`` passes the loss by itself. ``state.norm`` is
    the norm of the last push, for a log. Like any gate, it counts accepted pushes in
    ``global_step``, and keeps the types of its state.

    Around :func:`accumulate` it judges each micro-batch, and inside of it the mean.
    There ``value`` is that of the last micro-batch. Put it inside of
    :func:`drop_stale`: then a stale push enters no history.

    Use :func:`apply_gradients` or ``minimize``, as for :func:`drop_stale`: one
    conditional guards the whole step, and nothing is copied. The norm is one more pass
    over the gradients.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      window: how many numbers of each kind the history holds, in [2, 2³¹ - 1]; it is a
        shape, so it cannot be traced. Under ``optax.inject_hyperparams`` name it in
        ``static_args``.
      sigmas: how many standard deviations above the mean are still no spike, ≥ 0. With
        inf only pushes that are not finite are skipped.
      warmup: how many numbers a history needs before it is used, in [2, window]; by
        default half a window, but at least 2.
      axis_name: as in :func:`global_norm`. All devices of these axes decide alike, by
        the norm of all their gradients and by the mean of their ``value``. So NaN on
        one device makes all of them skip the push. Specs name the axes over which
        leaves are sharded; reduce ``value`` yourself over any other axis.

    Extra arguments of update:
      value: the loss of the push, a real scalar; optional. ``inner`` gets it, too, as
        it was passed.

    Returns:
      A transformation with state :class:`SkipSpikesState`.

    Raises:
      ValueError: ``window`` is below 2, ``sigmas`` is negative or NaN, or ``warmup`` is
        not in [2, window].
      TypeError: ``inner`` is no transformation; ``window`` is no integer, or traced;
        ``warmup`` is no integer; ``sigmas`` or ``value`` is no real scalar.

    References:
      ``SkipStepOptimizer`` of OLMo-core, and ``skip_step_on_spikes`` of MaxText. Their
      ``warmup`` is ``max(2, window // 2) - 1``. There NaN enters the history.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.skip_spikes(optax.sgd(1.0), window=4)
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> for grad in (1.0, 2.0, jnp.nan, 50.0, 3.0):
    ...     params, state = gx.apply_gradients(tx, jnp.array(grad), state, params)
    >>> params  # minus 1, 2 and 3
    Array(-6., dtype=float32)
    >>> state.global_step, state.skipped_count, state.norm
    (Array(3, dtype=int32), Array(2, dtype=int32), Array(3., dtype=float32))
    >>> state.history[0]  # of the norms
    Array([ 1.,  2., 50.,  3.], dtype=float32)
    """
    window = arguments.length("window", window, f"[2, {2**31 - 1}]")
    sigmas = arguments.in_range("sigmas", sigmas, "[0, inf]")
    warmup = max(2, window // 2) if warmup is None else warmup
    arguments.in_range("warmup", warmup, f"[2, {window}]", integer=True)

    def init_fn(params: optax.Params) -> SkipSpikesState:
        norm = constants.zero(params, jnp.float32)
        return SkipSpikesState(
            global_step=constants.zero(params, jnp.int32),
            skipped_count=constants.zero(params, jnp.int32),
            norm=norm,
            history=constants.stacked(constants.stacked(norm, window), 2),
            num_held=constants.stacked(constants.zero(params, jnp.int32), 2),
            inner_state=inner.init(params),
        )

    def decide(
        updates: optax.Updates,
        state: SkipSpikesState,
        *,
        value: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> Decision:
        updates = boundary.summed_rows(updates)  # Also for all behind the gate.
        square = norms.squared_norms(updates, axis_name=axis_name)[1]
        given = jnp.array([True, value is not None])
        loss = jnp.zeros((), jnp.float32)
        if value is not None:
            arguments.check_scalar("value", value)
            extra["value"] = value
            loss = mesh.mean(jnp.asarray(value, jnp.float32), axis_name, updates)
        x = jnp.stack([arithmetic.safe_sqrt(square).astype(jnp.float32), loss])
        history, num_held = state.history, state.num_held
        finite = jnp.all(jnp.isfinite(x))
        spikes = _are_spikes(x, history, num_held, sigmas)
        spikes &= given & (num_held >= dtypes.saturated(warmup))
        accepted = finite & ~jnp.any(spikes)
        enters = finite & given
        later = jnp.concatenate([history[:, 1:], x[:, None]], axis=1)
        state = state._replace(
            norm=x[0],
            history=jnp.where(enters[:, None], later, history),
            num_held=jnp.where(enters, jnp.minimum(num_held + 1, window), num_held),
        )
        return Decision(accepted, accepted, lambda _: updates, state, extra)

    return gate.gate(init_fn, inner, decide)


@functools.partial(jax.vmap, in_axes=(0, 0, 0, None))
def _are_spikes(
    x: jax.Array, h: jax.Array, num_held: jax.Array, sigmas: jax.typing.ArrayLike
) -> jax.Array:
    """Which numbers are far above the last ``num_held`` of their histories h."""
    # Distances from the newest number lose no digits: if all are equal, they are 0.
    # In units of the longest one no square overflows, and none becomes 0.
    filled = jnp.arange(h.size, 0, -1, jnp.int32) <= num_held
    away = jnp.where(filled, h - h[-1], 0)
    unit = jnp.maximum(jnp.max(jnp.abs(away)), jnp.finfo(x.dtype).tiny)
    n = jnp.maximum(num_held, 2).astype(x.dtype)
    mean = jnp.sum(away / unit) / n
    squares = jax.lax.square(away / unit - mean)
    std = jnp.sqrt(jnp.sum(squares, where=filled) / (n - 1))
    # x - mean(h) > sigmas · std(h)
    return (x - h[-1]) / unit - mean > jnp.asarray(sigmas, x.dtype) * std
