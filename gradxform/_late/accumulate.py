"""Gradients of micro-batches, added up until they make one step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._late import gate
from gradxform._late.gate import Act, GatedTransformation, Rest
from gradxform._late.sums import Reduction, Sums
from gradxform._trees import maps, versions


class AccumulateState(NamedTuple):
    """State of :func:`accumulate`.

    Attributes:
      global_step: int32[], times the inner transformation ran; saturates.
      num_accumulated: int32[], pushes in the sum.
      nonfinite_count: int32[], pushes left out so far; saturates.
      accumulated: the sum, like params, in at least float32 by default.
      row_counts: int32[rows] a leaf, pushes that held a row; for ``row_mean`` only.
      inner_state: of the transformation behind the gate.
    """

    global_step: jax.Array
    num_accumulated: jax.Array
    nonfinite_count: jax.Array
    accumulated: optax.Updates
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
    sums = Sums(inner, num_required, reduction, accumulator_dtype)

    def init_fn(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            nonfinite_count=maps.zero(params, jnp.int32), **sums.init(params)
        )

    def guard(
        act: Act,
        rest: Rest,
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None,
        **extra: Any,
    ) -> tuple[Any, AccumulateState]:
        count = state.nonfinite_count
        taken = jnp.array(True)
        if skip_nonfinite:
            taken = _all_finite(updates, state.global_step)
            count = jnp.where(taken, count, optax.safe_increment(count))
        outcome, changed = sums.push(act, rest, updates, state, params, taken, **extra)
        return outcome, state._replace(nonfinite_count=count, **changed)

    return gate.gate(init_fn, guard)


def _all_finite(updates: optax.Updates, global_step: jax.Array) -> jax.Array:
    """Whether a push is finite, on all devices that count their steps together."""
    leaves = jax.tree.leaves(updates, is_leaf=maps.is_leaf)
    finite = [maps.all_finite(g) for g in leaves if g is not None]
    every = functools.reduce(jnp.logical_and, finite, jnp.array(True))
    varying = versions.varying_axes
    axes = varying(jax.typeof(every)) - varying(jax.typeof(global_step))
    if not axes:
        return every
    return jax.lax.pmin(every.astype(jnp.int32), tuple(sorted(axes))) > 0
