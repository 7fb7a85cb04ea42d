"""Gradients of several workers, added up until there are enough for one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import gate
from gradxform._late.gate import Act, GatedTransformation, Rest
from gradxform._trees import checks, maps


class ConditionalAccumulatorState(NamedTuple):
    """State of :func:`conditional_accumulator`.

    Attributes:
      global_step: int32[], times the inner transformation ran; saturates.
      num_accumulated: int32[], pushes in the sum.
      stale_count: int32[], pushes dropped so far; saturates.
      accumulated: the sum, like params, in at least float32 by default.
      row_counts: int32[rows] a leaf, pushes that held a row; for ``row_mean`` only.
      inner_state: of the transformation behind the gate.
    """

    global_step: jax.Array
    num_accumulated: jax.Array
    stale_count: jax.Array
    accumulated: optax.Updates
    row_counts: optax.Updates
    inner_state: optax.OptState


def conditional_accumulator(
    inner: optax.GradientTransformation,
    num_required: jax.typing.ArrayLike,
    *,
    reduction: Literal["mean", "sum", "row_mean"] = "mean",
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> GatedTransformation:
    r"""Adds up gradients, and lets ``inner`` act on them once there are enough.

    .. math::

        fresh &\iff local\_step \ge global\_step \\
        sum &\leftarrow sum + g, \quad n \leftarrow n + 1 \quad\text{where fresh} \\
        g_{inner} &= sum / n \quad\text{once } n \ge num\_required

    A push whose ``local_step`` is behind ``global_step`` is dropped, and
    ``stale_count`` grows by 1; any other is added, all-zero gradients too. With the
    last of ``num_required`` pushes ``inner`` runs once on their mean, ``global_step``
    grows by 1, and sum and count start again from 0. Until then the updates are zero
    and the inner state stays bit-identical. Whatever a dropped gradient holds, NaN or
    inf, reaches nothing. Updates and state have the types that :func:`drop_stale` says.

    A push with ``None`` for a leaf adds nothing to its sum, as zeros would; the mean
    that ``inner`` receives is that of all pushes, also of a leaf for which the last one
    has ``None``. A leaf for which none of them had anything keeps its parameter, as
    ``minimize(trainable=...)`` asks for: ``inner`` sees zeros there, and whatever it
    makes of them, weight decay for one, is left out. So updates of such a leaf are
    zeros here, and not ``None``.

    With as many workers as ``num_required`` this is synchronous training without a
    barrier in the program. More workers make the extra ones **backup workers**: a step
    waits for the fastest, and what the slowest push afterwards is dropped.

    Use :func:`apply_gradients`: a push that is only added then costs one pass over sum
    and gradient, no copy of the model is made, and a dropped one costs next to nothing.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      num_required: how many pushes make a step, in [1, 2³¹ - 1].
      reduction: what ``inner`` receives: ``"mean"``, ``"sum"``, or ``"row_mean"``: each
        row (index of the first axis) is divided by the number of pushes that held it,
        as TensorFlow does with row-sparse gradients. A dense gradient holds every row.
      accumulator_dtype: dtype of the sum, by default that of the parameters but at
        least float32: a sum in half precision loses what is small beside it.

    Extra arguments of update:
      local_step: as in :func:`drop_stale`; passed on to ``inner``.

    Returns:
      A transformation with state :class:`ConditionalAccumulatorState`.

    Raises:
      ValueError: ``num_required`` is out of range, or ``reduction`` is unknown; a
        ``local_step`` that is no array is not in [0, 2³¹ - 1].
      TypeError: ``inner`` is no transformation; ``num_required`` is no integer;
        ``update`` is called without ``local_step``, or it is no integer; updates do not
        have the structure or the shapes of the parameters.

    Source: ``tf.ConditionalAccumulator`` and ``tf.train.SyncReplicasOptimizer``; backup
    workers: Chen et al., 2016, "Revisiting distributed synchronous SGD",
    https://arxiv.org/abs/1604.00981.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.conditional_accumulator(optax.sgd(1.0), num_required=2)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for grad in (1.0, 3.0, 100.0):  # The third worker was too slow.
    ...     grad = jnp.array(grad)
    ...     params, state = gx.apply_gradients(tx, grad, state, params, local_step=0)
    >>> assert params == -2.0  # the mean of 1 and 3
    >>> assert state.global_step == 1 and state.num_accumulated == 0
    >>> assert state.stale_count == 1
    """
    checks.transformation("inner", inner)
    checks.integer_scalar("num_required", num_required)
    checks.in_range("num_required", num_required, f"[1, {np.iinfo(np.int32).max}]")
    checks.one_of("reduction", reduction, ("mean", "sum", "row_mean"))
    checks.state_dtype("accumulator_dtype", accumulator_dtype, complex_too=True)
    by_row = reduction == "row_mean"
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> ConditionalAccumulatorState:
        checks.of_same_kind("accumulator_dtype", accumulator_dtype, params)

        def no_rows(p: jax.Array) -> jax.Array:
            return maps.full_like(p, 0, jnp.int32, axes=1)

        def zero(p: jax.Array) -> jax.Array:
            dtype = accumulator_dtype
            return maps.full_like(p, 0, maps.wide_dtype(p) if dtype is None else dtype)

        # Three counters, not one three times: a buffer can be donated only once.
        return ConditionalAccumulatorState(
            global_step=maps.zero(params, jnp.int32),
            num_accumulated=maps.zero(params, jnp.int32),
            stale_count=maps.zero(params, jnp.int32),
            accumulated=maps.map_params(zero, params),
            row_counts=maps.map_params(no_rows, maps.bare(params)) if by_row else (),
            inner_state=inner.init(params),
        )

    def guard(
        act: Act,
        rest: Rest,
        updates: optax.Updates,
        state: ConditionalAccumulatorState,
        params: optax.Params | None,
        *,
        local_step: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[Any, ConditionalAccumulatorState]:
        local_step = checks.local_step("conditional_accumulator", local_step)
        checks.same_shapes("updates", updates, "accumulated", state.accumulated)
        fresh = local_step >= state.global_step
        count = state.num_accumulated + fresh.astype(jnp.int32)
        full = fresh & (count >= maps.saturated(num_required))

        def add() -> tuple[None, Any]:
            # sum + g and n + 1, of a table in the rows that the push holds
            pushed = maps.sum_duplicates(updates)
            row_counts = state.row_counts
            if by_row:
                row_counts = maps.as_in(updates, row_counts)
                counts = maps.map_state(
                    lambda _, n: n + 1, pushed, maps.rows(pushed, row_counts)
                )
                row_counts = maps.put_rows(pushed, row_counts, counts)
            sums = maps.map_state(
                maps.wide_sum, pushed, maps.rows(pushed, state.accumulated)
            )
            sums = maps.put_rows(pushed, state.accumulated, sums)
            if reduction != "sum":
                divisors = row_counts if by_row else maps.broadcast(count, sums)
                sums = jax.tree.map(
                    divide, pushed, sums, divisors, is_leaf=maps.is_leaf
                )
            return None, (sums, maps.as_in(state.row_counts, row_counts))

        def divide(g: Any, total: Any, n: Any) -> Any:
            # sum / n with the last push, in the sum's own buffer, where inner can read
            # it as often as it likes
            if total is None:
                return None

            def quotient() -> jax.Array:
                one = jnp.ones((), maps.compute_dtype(total))
                factor = jnp.where(full, one / jnp.maximum(n, 1).astype(one.dtype), one)
                return maps.scale(total, maps.expand(factor, total))

            if maps.is_leaf(g):  # Every row, but only with the last push.
                return jax.lax.cond(full, quotient, lambda: total)
            return quotient()

        _, (total, row_counts) = gate.either(
            fresh, add, lambda: (None, (state.accumulated, state.row_counts))
        )

        def step() -> tuple[Any, Any]:
            # From here on all is dense: inner gets every row that any push held.
            like = state.accumulated if params is None else params
            reduced = _map(_reduced, updates, total, like)
            passed_on = gate.taken(inner, {**extra, "local_step": local_step})
            outcome, inner_state = act(
                inner, reduced, state.inner_state, params, **passed_on
            )
            rested = rest(params)
            before = () if rested is None else (rested,)
            outcome = _map(_if_pushed, updates, total, outcome, *before)
            return outcome, (inner_state, jnp.array(True))

        def wait() -> tuple[Any, Any]:
            return rest(params), (state.inner_state, jnp.array(False))

        outcome, (inner_state, stepped) = gate.either(full, step, wait)
        # The sum starts again in its own buffer, once the step no more reads it: that
        # `stepped` comes out of the conditional tells the compiler when, and saves the
        # copy that it would make otherwise.
        (accumulated, row_counts), _ = gate.either(
            ~stepped, lambda: ((total, row_counts), ()), lambda: (None, ())
        )
        one_more = optax.safe_increment
        return outcome, ConditionalAccumulatorState(
            global_step=jnp.where(full, one_more(state.global_step), state.global_step),
            num_accumulated=jnp.where(full, 0, count),
            stale_count=jnp.where(
                fresh, state.stale_count, one_more(state.stale_count)
            ),
            accumulated=accumulated,
            row_counts=row_counts,
            inner_state=inner_state,
        )

    return gate.gate(init_fn, guard)


def _map(f: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(f, *trees, is_leaf=maps.is_leaf)


def _reduced(g: Any, total: Any, like: Any) -> Any:
    """What ``inner`` receives, in the dtype of the gradient, else of the parameter.

    None stays only where there is never a gradient, as for a parameter of integers.
    """
    if g is not None:
        return total.astype(maps.dtype_of(g))
    if total is None or not jnp.issubdtype(jnp.result_type(like), jnp.inexact):
        return None
    return total.astype(jnp.result_type(like))


def _if_pushed(g: Any, total: Any, new: Any, old: Any = 0) -> Any:
    """What was before, where this push has no gradient, and no other had one."""
    if g is not None or new is None:
        return new
    return jnp.where(jnp.any(total != 0), new, old)
