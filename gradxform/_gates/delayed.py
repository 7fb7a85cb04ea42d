"""Gradients that are applied a fixed number of steps late, in an ordinary loop."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._gates import gate
from gradxform._gates.gate import Decision
from gradxform._jax.compilers import narrow
from gradxform._numbers import constants
from gradxform._rows import boundary
from gradxform._trees import boxes, dtypes, maps, states
from gradxform._trees.types import Gradient, Leaf, PyTree

_DELAYS = f"[0, {2**30 - 1}]"  # Counters go up to twice a delay, and are int32.


@states.Mark(gate=True, takes_none=True)
class DelayedState(NamedTuple):
    """State of :func:`delayed`.

    Attributes:
      count: int32[leaves], how many pushes the ring buffer of each leaf has had;
        after d = ``num_steps`` of them it goes round in [d, 2d).
      ring: a ring buffer of the last d gradients of each leaf, like params with an axis
        of length d in front; the next one goes to ``count mod d``. For a leaf with d =
        0 it is a single 0.
      inner_state: the state of the transformation that gets the gradients.
    """

    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.
    ring: optax.Updates
    inner_state: optax.OptState


def delayed(
    inner: optax.GradientTransformation,
    num_steps: PyTree[int],
    *,
    ring_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Applies ``inner`` to the gradients of ``num_steps`` steps ago.

    .. math::

        g_{inner} = g_{t - d} \quad\text{at step } t \ge d

    with d = ``num_steps``. This puts a delay into an ordinary loop of one process. It
    is the delay of a pipeline that does not wait for its bubbles, or of a worker whose
    gradients are always d steps late. Until there are gradients from d steps ago,
    ``inner`` is skipped: updates are zero, and its state stays bit-identical, with the
    count of every schedule in it. With d = 0 the result is ``inner`` itself.

    With a tree of numbers each leaf has its own delay, like the stages of a pipeline.
    Then ``inner`` is skipped until the longest delay is over. It sees the current
    parameters and extra arguments.

    Every push counts and is applied, only later. So this state has no ``global_step``,
    and :func:`global_step` finds that of a gate inside or around it. Inside
    :func:`accumulate` the delay counts steps; around :func:`accumulate` it counts
    micro-batches. Inside :func:`drop_stale` a dropped gradient never gets into the ring
    buffer.

    The ring buffer is as large as d models, and is placed like the parameters. A step
    reads one gradient from it, and writes one. Use :func:`apply_gradients` or
    ``minimize``: ``update`` alone must bring updates and state out of a conditional,
    which copies them.

    Args:
      inner: the transformation that gets the gradients, a whole optimizer as a rule.
      num_steps: d, an int in [0, 2³⁰ - 1], or a prefix tree of such ints; it is a
        shape, so it cannot be traced. Under ``optax.inject_hyperparams`` name it in
        ``static_args``.
      ring_dtype: dtype of the ring buffer, by default that of the parameters. Gradients
        of another dtype are rounded to it, and come out in the dtype of the current
        gradient.

    Returns:
      A transformation with state :class:`DelayedState`; ``inner`` itself if no number
      is above 0. ``None`` for a leaf counts as zeros in its ring buffer. ``inner`` sees
      ``None`` there, so the leaf rests, and its gradient of d steps ago waits in its
      place for another d steps.

    Raises:
      ValueError: a number is out of its range.
      TypeError: ``inner`` is no transformation; ``num_steps`` holds something other
        than ints, or does not fit the parameters; ``ring_dtype`` does not fit them;
        updates do not have their structure or shapes; a gradient with a delay is
        row-sparse.

    References:
      Narayanan et al., `Memory-efficient pipeline-parallel DNN training
      <https://arxiv.org/abs/2006.09503>`__, 2021: PipeDream-2BW is ``num_steps=1``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.delayed(optax.sgd(1.0), num_steps={"first": 2, "last": 0})
    >>> params = {"first": jnp.zeros(()), "last": jnp.zeros(())}
    >>> state = tx.init(params)
    >>> for g in (1.0, 2.0, 4.0, 8.0):
    ...     grads = {"first": jnp.array(g), "last": jnp.array(g)}
    ...     params, state = gx.apply_gradients(tx, grads, state, params)
    >>> params  # -(1 + 2), and -(4 + 8): the last stage waited for the first
    {'first': Array(-3., dtype=float32), 'last': Array(-12., dtype=float32)}
    >>> state.ring["first"]
    Array([4., 8.], dtype=float32)
    """
    inner = arguments.transformation("inner", inner)
    _check_numbers(num_steps)
    structures.check_state_dtype("ring_dtype", ring_dtype)
    if not any(jax.tree.leaves(num_steps)):
        return inner

    def decide(updates: optax.Updates, state: DelayedState, **extra: Any) -> Decision:
        adds_up = states.has_gate(state, "num_accumulated")
        if adds_up and extra.get("weight") is not None:
            raise TypeError(
                "weight is that of the newest gradient, but delayed gives an older one "
                "to the accumulator inside of it: put the accumulator around delayed."
            )
        _check_updates(updates, ring := boxes.as_in(updates, state.ring))
        leaves, treedef = maps.flatten(updates)
        rings = maps.leaves(ring)
        delays = np.array(list(map(_delay, rings)), np.int32)
        count = state.count
        # count mod d
        slots = constants.unstacked(jnp.where(count < delays, count, count - delays))

        def late(_: object) -> optax.Updates:
            # g_{t - d}
            return jax.tree.unflatten(treedef, map(_oldest, leaves, rings, slots))

        def settle(state: DelayedState, applied: jax.Array, _: object) -> DelayedState:
            # The new gradient is written after the step has read the old one. So the
            # ring buffer needs no copy.
            never = constants.never(applied.astype(jnp.float32))
            newest = functools.partial(_with_newest, never)
            new = jax.tree.unflatten(treedef, map(newest, leaves, rings, slots))
            return state._replace(ring=boxes.as_in(state.ring, new))

        full = jnp.all(count >= delays)  # Each leaf has an old one to apply.
        one_more = jnp.where(count + 1 < 2 * delays, count + 1, delays)
        state = state._replace(count=jnp.where(delays > 0, one_more, count))
        return Decision(full, True, late, state, extra, settle=settle, ordered=True)

    init = functools.partial(_init, inner, num_steps, ring_dtype)
    return gate.gate(init, inner, decide)


def _init(
    inner: optax.GradientTransformation,
    num_steps: PyTree[int],
    ring_dtype: jax.typing.DTypeLike | None,
    params: optax.Params,
) -> DelayedState:
    structures.check_same_kind("ring_dtype", ring_dtype, params)
    params = maps.stored(params)
    inner_state = gate.inner_state(inner, params)
    leaves = boxes.unboxed(params)

    def zeros(p: jax.Array, delay: int) -> jax.Array:
        dtype = dtypes.inexact_dtype(p) if ring_dtype is None else ring_dtype
        zero = constants.full_like(p, 0, dtype, axes=None if delay else 0)
        return constants.stacked(zero, delay) if delay else zero

    delays = structures.prefix("num_steps", num_steps, leaves)
    ring = maps.map_params(zeros, leaves, delays)
    num_leaves = len(maps.leaves(leaves))
    return DelayedState(
        # One array for all leaves: on GPU each array costs the start of a kernel.
        count=constants.stacked(constants.zero(params, jnp.int32), num_leaves),
        ring=boxes.boxed(params, ring),
        inner_state=inner_state,
    )


def _delay(ring: Leaf) -> int:
    """The delay of a leaf: the length of its ring buffer."""
    return ring.shape[0] if maps.has_gradient(ring) and ring.ndim else 0


def _oldest(g: Leaf, ring: jax.Array, slot: jax.Array) -> PyTree[jax.Array]:
    """The oldest gradient, which the new one will replace; the new one if d = 0."""
    if not maps.has_gradient(g) or not _delay(ring):
        return g
    old = jax.lax.dynamic_index_in_dim(ring, slot, keepdims=False)
    return narrow(old, maps.gradient_dtype(g))


def _with_newest(
    never: jax.Array, g: Leaf, ring: jax.Array, slot: jax.Array
) -> jax.Array:
    """The ring buffer with the new gradient; ``never`` is False, known after a step."""
    if not maps.has_gradient(g) or not (delay := _delay(ring)):
        return ring
    new = jnp.where(never, 0, narrow(jnp.asarray(g), ring.dtype))[None]
    if delay == 1:
        return new
    return jax.lax.dynamic_update_slice_in_dim(ring, new, slot, 0)


def _check_numbers(num_steps: PyTree[int]) -> None:
    numbers = jax.tree.leaves_with_path(num_steps)
    if not numbers:
        raise TypeError(
            f"num_steps must be an int, or a tree with an int for each leaf or branch "
            f"of params, got {num_steps!r}."
        )
    for path, number in numbers:
        arguments.length(f"num_steps{jax.tree_util.keystr(path)}", number, _DELAYS)


def _check_updates(updates: optax.Updates, ring: optax.Updates) -> None:
    """Raises ``TypeError`` if a gradient does not fit into its ring buffer."""

    def slot(r: jax.Array) -> jax.core.ShapedArray | None:
        return jax.core.ShapedArray(r.shape[1:], r.dtype) if _delay(r) else None

    def fits(g: Gradient, slot: Leaf) -> bool:
        return slot is None or structures.fits(g, slot)

    structures.check_shapes("updates", updates, "ring", jax.tree.map(slot, ring), fits)
    boundary.check_dense(
        "delayed",
        maps.map_leaves(lambda g, r: g if _delay(r) else None, updates, ring),
        "makes room for gradients in init, which knows no number of rows, so it takes "
        "dense gradients",
        "Put gradxform.densify() in front of it, which needs room for whole tables, or "
        "give this leaf a delay of 0.",
    )
