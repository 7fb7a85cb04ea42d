"""Reads the counters of gates, at any place in a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._trees import states

# The fields that count the pushes that a gate has left out, each for a reason.
_LEFT_OUT = "stale_count", "nonfinite_count", "skipped_count"


def global_step(state: optax.OptState) -> jax.Array:
    """The number of steps that a gate has made, found at any depth of a state.

    Args:
      state: a state that holds the state of :func:`drop_stale`,
        :func:`conditional_accumulator`, :func:`worker_mean`, :func:`accumulate` or
        :func:`skip_spikes`, also inside ``optax.chain``, ``optax.inject_hyperparams``
        or other wrappers. If gates are nested, the outermost one counts.

    Returns:
      An int32 scalar. It is a copy, so it stays valid when the state is donated to the
      next step.

    Raises:
      ValueError: the state holds no global step, or several side by side.

    References:
      The argument ``global_step`` of ``tf.train.Optimizer.apply_gradients``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.drop_stale(optax.adam(0.1), 2), optax.scale(0.5))
    >>> gx.global_step(tx.init(jnp.zeros(3)))
    Array(0, dtype=int32)
    """
    return jnp.array(outermost(state, "global_step"), copy=True)


def staleness_fraction(state: optax.OptState) -> jax.Array:
    r"""TensorFlow's measure of how many gradients arrived too late.

    .. math:: stale\_count / (global\_step + 1)

    It compares dropped pushes with steps. It is not a share of all pushes, so it may
    exceed 1. For :func:`conditional_accumulator` and :func:`worker_mean` several pushes
    make a step.

    Args:
      state: a state that holds the state of :func:`drop_stale`,
        :func:`conditional_accumulator` or :func:`worker_mean`, at any depth. If such
        gates are nested, the outermost one counts, with its own steps. The other gates
        count no late gradients.

    Returns:
      A float32 scalar.

    Raises:
      ValueError: the state holds no such gate, or several side by side.

    References:
      The summary "Gradient staleness percentage" of
      ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> state = tx.init(jnp.zeros(3))
    >>> for local_step in (0, 0, 0, 0):  # one step, and three dropped pushes
    ...     _, state = tx.update(jnp.ones(3), state, local_step=local_step)
    >>> gx.staleness_fraction(state)
    Array(1.5, dtype=float32)
    """
    outermost = _outermost(state, "stale_count")
    stale, steps = host.to_device((outermost.stale_count, outermost.global_step))
    with jax.transfer_guard_host_to_device("allow"):
        return stale.astype(jnp.float32) / (steps.astype(jnp.float32) + 1)


def outermost(state: optax.OptState, field: str) -> jax.Array:
    """A field of the outermost gate whose state has this field."""
    value: jax.Array = host.to_device(getattr(_outermost(state, field), field))
    return value


def dropped(state: optax.OptState) -> jax.Array:
    """How many pushes the gates in a state have left out, for any reason."""
    return sum(_left_out(state), jnp.int32(0))


def _left_out(state: optax.OptState) -> Iterator[jax.Array]:
    for _, gate in states.gates(state):
        names = (name for name in _LEFT_OUT if states.has_field(gate, name))
        yield from (getattr(gate, name) for name in names)
        yield from _left_out(gate.inner_state)


def increment_if(pred: jax.Array | bool, count: jax.Array) -> jax.Array:
    """The counter, 1 higher if ``pred``; it saturates."""
    return jnp.where(pred, optax.safe_increment(count), count)


def counted(
    state: Any, applies: jax.Array, accepted: jax.Array | Literal[True]
) -> optax.OptState:
    """The state of a gate that counts one more step, or one more push left out."""
    counts = {"global_step": applies}
    if accepted is not True:
        counts |= dict.fromkeys(_LEFT_OUT, ~accepted)
    own = {name: pred for name, pred in counts.items() if states.has_field(state, name)}
    return state._replace(
        **{name: increment_if(pred, getattr(state, name)) for name, pred in own.items()}
    )


def _outermost(state: optax.OptState, field: str) -> optax.OptState:
    gates = "drop_stale, conditional_accumulator or worker_mean"
    if field == "global_step":
        gates = f"accumulate, skip_spikes, {gates}"
    hint = f"wrap the transformation in {gates}"
    return structures.only(field, states.gates(state, field), hint)
