"""The sum of several pushes, and the one step that follows from it.

:func:`accumulate` and :func:`conditional_accumulator` say which pushes enter it; all
else is the same for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import gate, missing
from gradxform._late.conditional import typed_cond
from gradxform._late.counters import increment_if
from gradxform._late.gate import Decision, GatedTransformation
from gradxform._rows import boundary
from gradxform._trees import arithmetic, boxes, checks, constants, dtypes, maps, mesh
from gradxform._trees.compilers import LARGE, in_turn, narrow, where
from gradxform._trees.types import Leaf, PyTree

# The extra argument that says which leaves are sums already; only this module reads it.
_IN_SUM = "leaves_in_sum"

Reduction = Literal["mean", "sum", "row_mean"]
Required: TypeAlias = jax.typing.ArrayLike | optax.Schedule

# (updates, global_step, extra) -> whether a push is added, and times which number. It
# may complete the extra arguments for what is inside.
Enters: TypeAlias = Callable[
    [optax.Updates, jax.Array, dict[str, object]],
    tuple[jax.Array | Literal[True], jax.typing.ArrayLike | None],
]


def summed(
    inner: optax.GradientTransformation,
    num_required: Required,
    reduction: Reduction,
    accumulator_dtype: jax.typing.DTypeLike | None,
    *,
    state_type: type[Any],  # The class of the state, a NamedTuple.
    left_out: str,
    enters: Enters,
    all_enter: bool = False,
    names: tuple[str, ...] = (),
) -> GatedTransformation:
    """Applies ``inner`` to the sum of the pushes that enter it.

    A push that enters makes the step if it is the last one needed; any other changes
    only the counter ``left_out``, a field of the state. If it has to be decided, the
    addition is in a conditional, and takes all gradients at once. If ``all_enter``,
    each gradient is added as soon as it is known, also before the gate (:data:`Sums`).
    A push of weight w adds w·g.

    On the mesh axes ``names`` each device has a sum of its own. They are added, and
    divided, where the step is made.
    """
    checks.transformation("inner", inner)
    if not callable(num_required):
        checks.in_range("num_required", num_required, checks.COUNTS, integer=True)
    checks.one_of("reduction", reduction, ("mean", "sum", "row_mean"))
    checks.state_dtype("accumulator_dtype", accumulator_dtype, complex_too=True)
    by_row = reduction == "row_mean"
    as_own = functools.partial(mesh.as_own, names=names)
    as_part = functools.partial(mesh.as_part, names=names)

    def init_fn(params: optax.Params) -> Any:  # As `state_type`.
        checks.of_same_kind("accumulator_dtype", accumulator_dtype, params)
        inner_state = gate.inner_state(inner, params)
        number = len(maps.leaves(params))
        # Counters are arrays of their own: a buffer can be donated only once.
        counts = {
            name: constants.zero(params, jnp.int32)
            for name in ("global_step", "num_accumulated", left_out)
        }
        sums = constants.zeros(params, accumulator_dtype, dtypes.wide_dtype)
        mesh.check_whole("params", sums, names)
        rows: optax.Updates = ()
        if by_row:
            rows = constants.zeros(params, None, dtypes.compute_dtype, axes=1)
        return state_type(
            **counts,
            total_weight=as_own(constants.zero(params, _widest(sums))),
            accumulated=jax.tree.map(as_part, sums),
            # One array for all leaves: on GPU each array costs the start of a kernel.
            pushed=constants.stacked(constants.zero(params, bool), number),
            row_counts=jax.tree.map(as_own, rows),
            inner_state=inner_state,
        )

    def begun_of(state: Any) -> jax.Array:  # As `state_type`.
        # The first push of a sum replaces what is there. So nothing else clears it.
        return state.pushed & (state.num_accumulated > 0)

    def sums(state: Any) -> tuple[PyTree[jax.Array], jax.Array] | None:
        if not isinstance(state, state_type):
            return None
        return state.accumulated, begun_of(state)

    def decide(
        updates: optax.Updates,
        state: Any,  # As `state_type`.
        params: optax.Params | None,
        *,
        weight: jax.typing.ArrayLike | None = None,
        last: bool | jax.Array | None = None,
        **extra: object,
    ) -> Decision:
        accepted, factor = enters(updates, state.global_step, extra)
        checks.same_shapes("updates", updates, "accumulated", state.accumulated)
        mesh.check_parts("updates", updates, names)
        if names:
            mesh.check_axes(names, state.accumulated)
            updates = maps.map_leaves(
                lambda g: as_part(g) if isinstance(g, jax.Array) else g, updates
            )
            state = state._replace(
                total_weight=as_own(state.total_weight),
                accumulated=jax.tree.map(as_part, state.accumulated),
                row_counts=jax.tree.map(as_own, state.row_counts),
            )
        # A push of weight w adds w g to the sum, and w to what the mean divides by.
        w = jnp.ones((), state.total_weight.dtype)
        if weight is not None:
            w = as_weight(weight, w.dtype)
            factor = w if factor is None else w * jnp.asarray(factor, w.dtype)
        if _IN_SUM in extra:  # The gradients come with the weight in them.
            factor = None
        count = increment_if(accepted, state.num_accumulated)
        full = accepted & _is_enough(count, num_required, state.global_step)
        if last is not None:
            last = checks.flag("last", last)
            mesh.check_whole("last", last, names)
            full |= last & (count > 0)
        begun = begun_of(state)
        before = jnp.where(state.num_accumulated > 0, state.total_weight, 0)
        total_weight = jnp.where(accepted, before + w, state.total_weight)
        flags = missing.flags(updates, extra)
        in_sum, extra = _in_sum(updates, extra)

        def added(updates: optax.Updates) -> tuple[optax.Updates, optax.Updates]:
            # sum + w g and n + w; in a table only for the rows that the push holds
            pushed = boundary.entered(updates)
            has_begun = jax.tree.unflatten(maps.structure(updates), list(begun))
            row_counts = state.row_counts
            n = 1 if reduction == "sum" else total_weight
            divisors = maps.broadcast(n, state.accumulated)
            if by_row:
                before = boxes.as_in(updates, row_counts)
                counted = functools.partial(_counted, w)
                divisors = _moved(counted, pushed, before, has_begun, flags)
                row_counts = boxes.as_in(row_counts, divisors)
            add = functools.partial(arithmetic.wide_sum, factor=factor)

            def sum_of(
                g: Any,  # Any kind of leaf; an array if it is added.
                total: jax.Array,
                n: jax.typing.ArrayLike,
                begun: jax.Array,
                added: bool,
            ) -> jax.Array:
                new = g if added else _moved(add, g, total, begun)
                if names:  # The sum of one device.
                    return narrow(new, total.dtype) if maps.has_gradient(new) else new
                return _finished(full, g, new, n, begun, total, added)

            trees = state.accumulated, divisors, has_begun, in_sum
            return _in_turn(sum_of, pushed, *trees), row_counts

        def kept() -> tuple[optax.Updates, optax.Updates]:
            if last is None:
                return state.accumulated, state.row_counts
            # The step may be made without this push, of those before it.
            return added(maps.map_leaves(maps.nothing, updates))

        def entered() -> tuple[optax.Updates, optax.Updates]:
            return added(missing.chosen(flags, updates))

        if accepted is True:
            total, row_counts = entered()
        else:
            total, row_counts = typed_cond(accepted, entered, kept)
        pushed = begun | (accepted & missing.as_vector(flags))
        if last is not None and accepted is not True:
            # The step may be made without what this push has a gradient for.
            flags = jax.tree.map(lambda flag: flag & accepted, flags)

        def reduced(total: optax.Updates) -> optax.Updates:
            # From here on all is dense: inner gets every row that any push held.
            if names:
                n = 1 if reduction == "sum" else total_weight
                n = boxes.as_in(updates, row_counts) if by_row else n
                total = _over_devices(names, total, n, flags, pushed)
            like = state.accumulated if params is None else params
            return maps.map_leaves(_reduced, updates, total, like)

        new = state._replace(
            num_accumulated=jnp.where(full, 0, count),
            total_weight=total_weight,
            pushed=pushed & ~full,
            row_counts=row_counts,
        )
        extra = missing.with_flags(extra, _applied(flags, total, pushed))
        if names:  # Updates are equal on all devices, so no sum can hold them.
            new, mean = new._replace(accumulated=total), lambda _: reduced(total)
            return Decision(full, accepted, mean, new, extra, ordered=True)
        return Decision(
            full,
            accepted,
            reduced,
            new,
            extra,
            buffers=total,
            settle=lambda new, _, total: new._replace(accumulated=total),
        )

    return gate.gate(init_fn, inner, decide, sums if all_enter else None)


def as_weight(
    weight: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """The weight of a push, checked; if it is traced and below 0, NaN as the step."""
    checks.scalar("weight", weight)
    w = jnp.asarray(checks.in_range("weight", weight, "[0, inf)"), dtype)
    return jnp.where(w >= 0, w, jnp.nan)


def with_sums(extra: dict[str, object], in_sum: PyTree[bool]) -> dict[str, object]:
    """The extra arguments of a push, some of whose leaves are sums: see :data:`Sums`.

    Such a leaf is the sum of the gate with w·g in it, if the push has the gradient g
    and the weight w. All others are w·g.
    """
    return {**extra, _IN_SUM: in_sum}


def _in_sum(
    updates: optax.Updates, extra: dict[str, object]
) -> tuple[PyTree[bool], dict[str, object]]:
    """Which leaves are sums, and the other extra arguments."""
    none = maps.map_leaves(lambda g: False, updates)
    rest = {name: value for name, value in extra.items() if name != _IN_SUM}
    return extra.get(_IN_SUM, none), rest


def _is_enough(
    count: jax.Array, num_required: Required, global_step: jax.Array
) -> jax.Array:
    # n >= num_required
    if not callable(num_required):
        return count >= dtypes.saturated(num_required)
    required = checks.scheduled(
        "num_required", num_required, global_step, checks.COUNTS
    )
    if jnp.issubdtype(jnp.result_type(required), jnp.integer):
        return count >= dtypes.saturated(required)
    # Optax's schedules give real numbers.
    return count.astype(jnp.float32) >= jnp.asarray(required, jnp.float32)


def _in_turn(
    f: Callable[..., jax.Array], pushed: optax.Updates, *rest: PyTree[Any]
) -> PyTree[jax.Array]:
    """``map_leaves``, the last leaf first, as a backward pass makes them.

    On GPU a large gradient waits for the sum before it. Otherwise the compiler adds all
    of them in one kernel, and so keeps them all. The largest do not wait: one may be
    scattered into its sum, without an array of its own. The last of ``rest`` says which
    are in their sums already; these do not wait either.
    """
    leaves = zip(*map(maps.leaves, (pushed, *rest)), strict=True)
    most = sum(jnp.size(g) for g in jax.tree.leaves(pushed)) // 8
    results: list[jax.Array] = []
    last: tuple[jax.Array, ...] = ()
    for g, total, *leaf in reversed([*leaves]):
        large = isinstance(total, jax.Array) and total.size >= LARGE
        waits = large and isinstance(g, jax.Array) and g.size <= most and not leaf[-1]
        result = f(in_turn(g, *last) if waits else g, total, *leaf)
        results.append(result)
        last = (result,) if waits else last
    return jax.tree.unflatten(maps.structure(pushed), results[::-1])


def _moved(
    f: Callable[..., jax.Array],
    pushed: optax.Updates,
    totals: PyTree[jax.Array],
    begun: PyTree[jax.Array],
    *rest: PyTree[bool | jax.Array],
) -> PyTree[jax.Array]:
    """New sums ``f(g, sum, ...)``; the sum is 0 if it begins with this push.

    In a table ``f`` gets the rows of the push. The first one also clears all others.
    """

    def move(
        g: Leaf, total: jax.Array, begun: jax.Array, *others: bool | jax.Array
    ) -> jax.Array:
        if not maps.has_gradient(g):
            return total
        before = where(begun, boundary.touched(g, total))
        new = f(jnp.asarray(maps.stored(g)), before, *others)
        return boundary.written(g, total, new, keeps=begun)

    return maps.map_leaves(move, pushed, totals, begun, *rest)


def _widest(sums: optax.Updates) -> np.dtype[Any]:
    """float32, or float64 if a sum is in double precision."""
    found = map(dtypes.compute_dtype, jax.tree.leaves(sums))
    return max(found, key=lambda d: d.itemsize, default=np.dtype(np.float32))


def _counted(
    w: jax.Array, _: jax.Array, n: jax.Array, flag: bool | jax.Array
) -> jax.Array:
    # n + w, if the leaf has a gradient
    return missing.where(flag, n + w.astype(n.dtype), n)


def _inverse(n: jax.typing.ArrayLike, total: jax.Array) -> jax.Array:
    # 1 / n; 1 if all weights are 0, as the sum is 0 then, too
    n = jnp.asarray(n, dtypes.compute_dtype(total))
    return 1 / jnp.where(n == 0, 1, n)


def _finished(
    full: jax.Array,
    g: Leaf,
    total: jax.Array,
    n: jax.typing.ArrayLike,
    begun: jax.Array,
    old: jax.Array,
    added: bool,
) -> jax.Array:
    # sum / n with the last push, in the sum's own buffer: inner may read it more than
    # once
    if not maps.has_gradient(total):
        return total

    def quotient() -> jax.Array:
        factor = jnp.where(full, _inverse(n, total), 1)
        known = total if maps.has_gradient(g) else where(begun, total)
        return narrow(arithmetic.scale_leading(known, factor), old.dtype)

    if added or maps.is_leaf(g):  # All of it, but only with the last push.
        return jax.lax.cond(full, quotient, lambda: total)
    return quotient()


def _over_devices(
    names: tuple[str, ...],
    total: optax.Updates,
    n: PyTree[jax.typing.ArrayLike],
    flags: PyTree[bool | jax.Array],
    pushed: jax.Array,
) -> optax.Updates:
    # the sum over devices of their sums / that of their n

    def known(x: jax.Array, flag: bool | jax.Array, pushed: jax.Array) -> jax.Array:
        if not maps.has_gradient(x):
            return x
        x = dtypes.widen(x)
        return x if flag is True else where(pushed, x)

    def quotient(x: jax.Array, n: jax.typing.ArrayLike, old: jax.Array) -> jax.Array:
        if not maps.has_gradient(x):
            return x
        return narrow(arithmetic.scale_leading(x, _inverse(n, x)), old.dtype)

    each = jax.tree.unflatten(maps.structure(flags), list(pushed))
    sums = maps.map_leaves(known, total, flags, each)
    sums, n = mesh.sum_of_parts((sums, n), names)
    return maps.map_leaves(quotient, sums, maps.broadcast(n, sums), total)


def _reduced(g: Leaf, total: jax.Array, like: jax.typing.ArrayLike) -> Leaf:
    """The input of ``inner``, in the dtype of the gradient, or of the parameter.

    It is None only if there can never be a gradient, as for a parameter of integers.
    """
    if maps.has_gradient(g):
        return narrow(total, maps.gradient_dtype(g))
    if not maps.has_gradient(total):
        return total
    if not jnp.issubdtype(jnp.result_type(like), jnp.inexact):
        return None
    return narrow(total, jnp.result_type(like))


def _applied(
    flags: PyTree[bool | jax.Array], total: optax.Updates, pushed: jax.Array
) -> PyTree[bool | jax.Array]:
    """Which leaves are applied: True for sure, or if it is no parameter."""
    trees = map(maps.leaves, (flags, total))
    applied = [
        flag is True or not maps.has_gradient(x) or pushed[i]
        for i, (flag, x) in enumerate(zip(*trees, strict=True))
    ]
    return jax.tree.unflatten(maps.structure(flags), applied)
