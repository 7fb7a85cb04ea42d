"""The sum of several pushes, and the one step that follows from it.

A gate around it says which pushes it takes; all else is the same for each gate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from gradxform._late import gate, missing
from gradxform._late.conditional import typed_cond
from gradxform._late.counters import increment_if
from gradxform._late.gate import Decision
from gradxform._late.missing import LeafFlags
from gradxform._rows.indexed_slices import IndexedSlices
from gradxform._trees import arithmetic, boxes, checks, constants, dtypes, maps
from gradxform._trees.compilers import LARGE, in_turn, narrow, where
from gradxform._trees.types import Leaf, PyTree

Reduction = Literal["mean", "sum", "row_mean"]


class Sums:
    """The sum of the accepted pushes, which is applied once there are enough.

    The arguments are those of :func:`conditional_accumulator`, checked here. The state
    is that of a gate around it, which may have more fields.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        num_required: jax.typing.ArrayLike | optax.Schedule,
        reduction: Reduction,
        accumulator_dtype: jax.typing.DTypeLike | None,
    ) -> None:
        checks.transformation("inner", inner)
        if not callable(num_required):
            checks.in_range("num_required", num_required, checks.COUNTS, integer=True)
        checks.one_of("reduction", reduction, ("mean", "sum", "row_mean"))
        checks.state_dtype("accumulator_dtype", accumulator_dtype, complex_too=True)
        self._inner = inner
        self._num_required = num_required
        self._reduction = reduction
        self._dtype = accumulator_dtype

    def init(self, params: optax.Params) -> dict[str, Any]:  # Of any kind.
        """The fields of a sum of no pushes."""
        checks.of_same_kind("accumulator_dtype", self._dtype, params)
        by_row = self._reduction == "row_mean"
        inner_state = gate.inner_state(self._inner, params)
        leaves = maps.leaves(params)
        # Two counters, not one twice: a buffer can be donated only once.
        return {
            "global_step": constants.zero(params, jnp.int32),
            "num_accumulated": constants.zero(params, jnp.int32),
            "accumulated": constants.zeros(params, self._dtype, dtypes.wide_dtype),
            # One array for all leaves: on GPU each array costs the start of a kernel.
            "pushed": constants.stacked(constants.zero(params, bool), len(leaves)),
            "row_counts": constants.zeros(params, jnp.int32, axes=1) if by_row else (),
            "inner_state": inner_state,
        }

    def decide(
        self,
        updates: optax.Updates,
        state: Any,  # It has the fields of `init`.
        params: optax.Params | None,
        accepted: jax.Array | Literal[True],
        *,
        factor: jax.typing.ArrayLike | None = None,
        leaf_flags: LeafFlags | None = None,
        **extra: object,
    ) -> Decision:
        """What happens with a push.

        An ``accepted`` push is added, times ``factor``, and makes the step if it is the
        last one needed; any other changes nothing. If it has to be decided, the
        addition is in a conditional, and takes all gradients at once. If all pushes are
        accepted, each gradient is added as soon as it is known.
        """
        checks.same_shapes("updates", updates, "accumulated", state.accumulated)
        count = increment_if(accepted, state.num_accumulated)
        full = accepted & self._is_enough(count, state.global_step)
        # The first push of a sum replaces what is there. So nothing else clears it.
        begun = state.pushed & (state.num_accumulated > 0)

        def added() -> tuple[optax.Updates, optax.Updates]:
            return self._sums_with(
                updates, factor, leaf_flags, state, begun, count, full
            )

        total, row_counts = (
            added()
            if accepted is True
            else typed_cond(
                accepted, added, lambda: (state.accumulated, state.row_counts)
            )
        )
        pushed = begun | (accepted & missing.holds(updates, leaf_flags))

        def reduced(total: optax.Updates) -> optax.Updates:
            # From here on all is dense: inner gets every row that any push held.
            like = state.accumulated if params is None else params
            return maps.map_leaves(_reduced, updates, total, like)

        new = state._replace(
            global_step=increment_if(full, state.global_step),
            num_accumulated=jnp.where(full, 0, count),
            pushed=pushed & ~full,
            row_counts=row_counts,
        )
        flags = _flags(updates, total, pushed, leaf_flags)
        return Decision(
            full,
            reduced,
            new,
            extra,
            flags,
            room=total,
            settle=lambda new, _, total: new._replace(accumulated=total),
        )

    def _is_enough(self, count: jax.Array, global_step: jax.Array) -> jax.Array:
        # n >= num_required
        if not callable(self._num_required):
            return count >= dtypes.saturated(self._num_required)
        required = checks.scheduled(
            "num_required", self._num_required, global_step, checks.COUNTS
        )
        if jnp.issubdtype(jnp.result_type(required), jnp.integer):
            return count >= dtypes.saturated(required)
        # Optax's schedules give real numbers.
        return count.astype(jnp.float32) >= jnp.asarray(required, jnp.float32)

    def _sums_with(
        self,
        updates: optax.Updates,
        factor: jax.typing.ArrayLike | None,
        leaf_flags: LeafFlags | None,
        state: Any,
        begun: jax.Array,
        count: jax.Array,
        full: jax.Array,
    ) -> tuple[optax.Updates, optax.Updates]:
        """Sums and row counts with this push; divides the sums if it is the last."""
        # sum + factor g and n + 1; in a table only for the rows that the push holds
        flags = missing.flags_of(updates, leaf_flags)
        pushed = maps.sum_duplicates(missing.chosen(flags, updates))
        has_begun = jax.tree.unflatten(maps.structure(updates), list(begun))
        row_counts = state.row_counts
        n = 1 if self._reduction == "sum" else count
        divisors = maps.broadcast(n, state.accumulated)
        if self._reduction == "row_mean":
            held = boxes.as_in(updates, row_counts)
            divisors = _moved(_counted, pushed, held, has_begun, flags)
            row_counts = boxes.as_in(row_counts, divisors)
        add = functools.partial(arithmetic.wide_sum, factor=factor)

        def added(
            g: Leaf, total: jax.Array, n: jax.typing.ArrayLike, begun: jax.Array
        ) -> jax.Array:
            return _finished(full, g, _moved(add, g, total, begun), n, begun, total)

        trees = state.accumulated, divisors, has_begun
        return _in_turn(added, pushed, *trees), row_counts


def _in_turn(
    f: Callable[..., jax.Array], pushed: optax.Updates, *rest: PyTree[Any]
) -> PyTree[jax.Array]:
    """``map_leaves``, the last leaf first, as a backward pass makes them.

    On GPU a large gradient waits for the sum before it. Otherwise the compiler adds all
    of them in one kernel, and so keeps them all. The largest do not wait: one may be
    scattered into its sum, without an array of its own.
    """
    leaves = zip(*map(maps.leaves, (pushed, *rest)), strict=True)
    most = sum(jnp.size(g) for g in jax.tree.leaves(pushed)) // 8
    results: list[jax.Array] = []
    last: tuple[jax.Array, ...] = ()
    for g, total, *leaf in reversed([*leaves]):
        large = isinstance(total, jax.Array) and total.size >= LARGE
        waits = large and isinstance(g, jax.Array) and g.size <= most
        result = f(in_turn(g, *last) if waits else g, total, *leaf)
        results.append(result)
        last = (result,) if waits else last
    return jax.tree.unflatten(maps.structure(pushed), results[::-1])


def _moved(
    f: Callable[..., jax.Array],
    pushed: optax.Updates,
    totals: PyTree[jax.Array],
    begun: PyTree[jax.Array],
    *rest: PyTree[jax.Array | None],
) -> PyTree[jax.Array]:
    """New sums ``f(g, sum, ...)``; the sum is 0 if it begins with this push.

    In a table ``f`` gets the rows of the push. The first one also clears all others.
    """

    def move(
        g: Leaf, total: jax.Array, begun: jax.Array, *others: jax.Array | None
    ) -> jax.Array:
        if not maps.has_gradient(g):
            return total
        held: Any = maps.rows(g, total)  # An array, like the sum.
        rows = f(maps.values(g), where(begun, held), *others)
        if not isinstance(g, IndexedSlices):
            return rows
        zeros = functools.partial(constants.zeros_of_type, jax.typeof(total))
        return jax.lax.cond(
            begun,
            lambda: maps.put_rows(g, total, rows),
            lambda: maps.put_rows(g, zeros(), rows),
        )

    return maps.map_leaves(move, pushed, totals, begun, *rest)


def _counted(_: jax.Array, n: jax.Array, flag: jax.Array | None) -> jax.Array:
    # n + 1, if the leaf has a gradient
    return n + (1 if flag is None else flag.astype(n.dtype))


def _finished(
    full: jax.Array,
    g: Leaf,
    total: jax.Array,
    n: jax.typing.ArrayLike,
    begun: jax.Array,
    old: jax.Array,
) -> jax.Array:
    # sum / n with the last push, in the sum's own buffer: inner may read it more than
    # once
    if not maps.has_gradient(total):
        return total

    def quotient() -> jax.Array:
        one = jnp.ones((), dtypes.compute_dtype(total))
        factor = jnp.where(full, one / jnp.maximum(n, 1).astype(one.dtype), one)
        held = total if maps.has_gradient(g) else where(begun, total)
        return narrow(arithmetic.scale_leading(held, factor), old.dtype)

    if maps.is_leaf(g):  # Every row, but only with the last push.
        return jax.lax.cond(full, quotient, lambda: total)
    return quotient()


def _reduced(g: Leaf, total: jax.Array, like: jax.typing.ArrayLike) -> Leaf:
    """The input of ``inner``, in the dtype of the gradient, or of the parameter.

    It is None only if there can never be a gradient, as for a parameter of integers.
    """
    if maps.has_gradient(g):
        return narrow(total, maps.dtype_of(g))
    if not maps.has_gradient(total):
        return total
    if not jnp.issubdtype(jnp.result_type(like), jnp.inexact):
        return None
    return narrow(total, jnp.result_type(like))


def _flags(
    updates: optax.Updates,
    total: optax.Updates,
    pushed: jax.Array,
    leaf_flags: LeafFlags | None,
) -> LeafFlags:
    """Which leaves are applied; no flag: for sure, or it is no parameter."""
    flags = {}
    totals = maps.leaves(total)
    flat = maps.leaves_with_path(updates)
    for i, (path, g) in enumerate(flat):
        name = jax.tree_util.keystr(path)
        is_sure = maps.has_gradient(g) and name not in (leaf_flags or {})
        if maps.has_gradient(totals[i]) and not is_sure:
            flags[name] = pushed[i]
    return flags
