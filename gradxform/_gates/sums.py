"""The sum of several pushes, and the one step that follows from it.

:func:`accumulate` and :func:`conditional_accumulator` say which pushes enter it; all
else is the same for both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._devices import mesh
from gradxform._gates import gate
from gradxform._gates.conditional import typed_cond
from gradxform._gates.counters import increment_if
from gradxform._gates.gate import Decision
from gradxform._jax.compilers import barrier_on_gpu, narrow, zeros_unless
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._trees import dtypes, maps, states
from gradxform._trees.types import Gradient, Leaf, PyTree

_TABLE = 2**14  # Rows; a matrix with as many is a table.

Reduction = Literal["mean", "sum", "row_mean"]
Required: TypeAlias = jax.typing.ArrayLike | optax.Schedule

# (updates, global_step, extra) -> whether a push is added, and times which number. It
# may complete the extra arguments for what is inside.
Enters: TypeAlias = Callable[
    [optax.Updates, jax.Array, dict[str, object]],
    tuple[jax.Array | Literal[True], jax.typing.ArrayLike | None],
]


@states.Mark(
    gate=True,
    takes_none=True,
    needs={
        "weight": "num_accumulated",
        "last": "num_accumulated",
        "local_step": "stale_count",
    },
    kept=["leaf_weights", "carried"],
    not_by_row=states.ADDS_STEPS,
)
class ConditionalAccumulatorState(NamedTuple):
    """State of :func:`conditional_accumulator` and of :func:`accumulate`.

    Attributes:
      global_step: int32[], how many times the inner transformation has run; saturates.
      num_accumulated: int32[], pushes in the sum.
      stale_count: int32[], pushes dropped so far; saturates. Empty in ``accumulate``.
      nonfinite_count: int32[], pushes left out by ``skip_nonfinite`` so far; saturates.
        Empty in ``conditional_accumulator``.
      total_weight: float32[], the sum of the weights of these pushes; float64 if any
        parameter is. A push without ``weight`` weighs 1.
      accumulated: the sum, like params, in at least float32 by default. A leaf without
        pushes in its sum means nothing, and may differ between ``update`` and
        :func:`apply_gradients`: the next push replaces it.
      leaf_weights: like ``total_weight``, one number for each leaf: the sum of the
        weights of those of these pushes that had a gradient for the leaf.
      carried: the same of pushes before the last step, which are still in the sum of a
        leaf, as the push that made the step had no gradient for it; else 0.
      row_counts: float32[rows] for each leaf, the weights of the pushes in the sum that
        held each row; only for ``row_mean``.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    num_accumulated: jax.Array
    stale_count: jax.Array | tuple[()]
    nonfinite_count: jax.Array | tuple[()]
    total_weight: jax.Array
    accumulated: optax.Updates
    leaf_weights: jax.Array
    carried: jax.Array
    row_counts: optax.Updates
    inner_state: optax.OptState


class _Push(NamedTuple):
    """What a push does to the sum.

    Attributes:
      begun: bool[leaves], whether the sum of a leaf holds anything before it.
      w: what the mean's divisor gets.
      factor: what the gradients are multiplied by; None is 1.
      total_weight: the weights since the last step, with this push.
      leaf_weights: the same for each leaf, of pushes with a gradient for it.
      n: for each leaf what its mean is divided by.
      full: bool[], whether it makes the step.
    """

    begun: jax.Array
    w: jax.Array
    factor: jax.typing.ArrayLike | None
    total_weight: jax.Array
    leaf_weights: jax.Array
    n: jax.Array
    full: jax.Array

    def counted(self, g: Leaf, begun: jax.Array, n: jax.Array) -> jax.Array:
        """The weights of a row's pushes with this one."""
        if not (maps.has_gradient(g) and maps.has_gradient(n)):
            return zeros_unless(begun, n) if maps.has_gradient(n) else n
        return _moved(lambda _, n: n + self.w.astype(n.dtype), begun, g, n)


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Applies ``inner`` to the sum of the pushes that enter it.

    A push that enters makes the step if it is the last one needed; any other changes
    only a counter of the state. If it has to be decided, the addition is in a
    conditional, and takes all gradients at once. If every push enters, each gradient is
    added as soon as it is known. A push of weight w adds w·g. A leaf without a gradient
    in the push that makes the step is not stepped: its sum stays.

    On the mesh axes ``names`` each device has a sum of its own. They are added, and
    divided, where the step is made.
    """

    inner: optax.GradientTransformation
    num_required: Required
    reduction: Reduction
    dtype: jax.typing.DTypeLike | None
    enters: Enters
    left_out: Literal["stale_count", "nonfinite_count"]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.num_required):
            arguments.in_range(
                "num_required", self.num_required, arguments.COUNTS, integer=True
            )
        arguments.check_one_of("reduction", self.reduction, ("mean", "sum", "row_mean"))
        structures.check_state_dtype("accumulator_dtype", self.dtype)

    def gate(self) -> optax.GradientTransformationExtraArgs:
        """The transformation."""
        return gate.gate(self.init, self.inner, self.decide)

    def init(self, params: optax.Params) -> ConditionalAccumulatorState:
        """The state before the first push."""
        structures.check_same_kind("accumulator_dtype", self.dtype, params)
        inner_state = gate.inner_state(self.inner, params)
        sums = constants.zeros(params, self.dtype, dtypes.wide_dtype)
        mesh.check_whole("params", sums, self.names)
        rows: optax.Updates = ()
        if self.reduction == "row_mean":
            rows = constants.zeros(params, None, dtypes.compute_dtype, axes=1)
        # Counters are arrays of their own: a buffer can be donated only once.
        counters: dict[str, jax.Array | tuple[()]]
        counters = {"stale_count": (), "nonfinite_count": ()}
        counters[self.left_out] = constants.zero(params, jnp.int32)
        state = ConditionalAccumulatorState(
            global_step=constants.zero(params, jnp.int32),
            num_accumulated=constants.zero(params, jnp.int32),
            **counters,
            total_weight=constants.zero(params, _widest(sums)),
            accumulated=sums,
            leaf_weights=_for_each_leaf(params, sums),
            carried=_for_each_leaf(params, sums),
            row_counts=rows,
            inner_state=inner_state,
        )
        return self._of_device(state)

    def decide(
        self,
        updates: optax.Updates,
        state: ConditionalAccumulatorState,
        *,
        weight: jax.typing.ArrayLike | None = None,
        last: bool | jax.Array | None = None,
        **extra: object,
    ) -> Decision:
        """What becomes of a push."""
        accepted, factor = self.enters(updates, state.global_step, extra)
        structures.check_shapes("updates", updates, "accumulated", state.accumulated)
        mesh.check_reduced("updates", updates, self.names)
        if self.names:
            mesh.check_axes(self.names, state.accumulated)
            updates, state = self._unreduced(updates), self._of_device(state)
        count = increment_if(accepted, state.num_accumulated)
        full = accepted & self._is_enough(count, state.global_step)
        if last is not None:
            last = arguments.flag("last", last)
            mesh.check_whole("last", last, self.names)
            full |= last & (count > 0)
        # Which leaves the step of this push may change.
        acts = [*map(maps.has_gradient, maps.leaves(updates))]
        push = self._push(state, accepted, weight, factor, full, acts)

        def skipped() -> tuple[optax.Updates, optax.Updates]:
            if last is None:
                return state.accumulated, state.row_counts
            # The step may be made without this push, of those before it.
            return self._add(maps.map_leaves(maps.nothing, updates), acts, state, push)

        def added() -> tuple[optax.Updates, optax.Updates]:
            return self._add(updates, acts, state, push)

        if accepted is True:
            total, row_counts = added()
        else:
            total, row_counts = typed_cond(accepted, added, skipped)
        # The sum of a leaf that is not stepped waits, with the weights in it.
        waits = jnp.where(np.array(acts), 0, state.carried + push.leaf_weights)
        new = state._replace(
            num_accumulated=jnp.where(full, 0, count),
            total_weight=push.total_weight,
            leaf_weights=push.leaf_weights,
            carried=jnp.where(full, waits, state.carried),
            row_counts=row_counts,
        )

        def mean(total: optax.Updates | None) -> optax.Updates:
            return self._mean(updates, total, push, row_counts)

        def settle(
            new: ConditionalAccumulatorState,
            applied: jax.Array,
            buffers: optax.Updates | None,
        ) -> ConditionalAccumulatorState:
            del applied
            return new._replace(accumulated=total if buffers is None else buffers)

        if self.names:  # Updates are equal on all devices, so no sum can hold them.
            whole = total
            return Decision(
                *(full, accepted, lambda _: mean(whole), new, extra),
                settle=settle,
                ordered=True,
            )
        return Decision(full, accepted, mean, new, extra, buffers=total, settle=settle)

    def _push(
        self,
        state: ConditionalAccumulatorState,
        accepted: jax.Array | Literal[True],
        weight: jax.typing.ArrayLike | None,
        factor: jax.typing.ArrayLike | None,
        full: jax.Array,
        acts: Sequence[bool],
    ) -> _Push:
        # A push of weight w adds w g to the sum, and w to what the mean divides by.
        w = jnp.ones((), state.total_weight.dtype)
        if weight is not None:
            w = as_weight(weight, w.dtype)
            factor = w if factor is None else w * jnp.asarray(factor, w.dtype)
        # The first push of a sum replaces what is there. So nothing else clears it.
        others = state.num_accumulated > 0

        def added(total: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.where(accepted, jnp.where(others, total, 0) + w, total)

        total_weight = added(state.total_weight, w)
        of_leaves = added(state.leaf_weights, jnp.where(np.array(acts), w, 0))
        begun = (others & (state.leaf_weights != 0)) | (state.carried != 0)
        n = total_weight + state.carried
        return _Push(begun, w, factor, total_weight, of_leaves, n, full)

    def _is_enough(self, count: jax.Array, global_step: jax.Array) -> jax.Array:
        # n >= num_required
        if not callable(self.num_required):
            return count >= dtypes.saturated(self.num_required)
        required = arguments.scheduled(
            "num_required", self.num_required, global_step, arguments.COUNTS
        )
        if jnp.issubdtype(jnp.result_type(required), jnp.integer):
            return count >= dtypes.saturated(required)
        # Optax's schedules give real numbers.
        return count.astype(jnp.float32) >= jnp.asarray(required, jnp.float32)

    def _add(
        self,
        updates: optax.Updates,
        acts: Sequence[bool],
        state: ConditionalAccumulatorState,
        push: _Push,
    ) -> tuple[optax.Updates, optax.Updates]:
        """The sums and the counts of rows with a push: sum + w g, and n + w.

        If the push makes the step, sums that act are divided by n. In a table only the
        rows that the push holds are added.
        """
        updates = boundary.summed_rows(updates)
        row_counts, begun = state.row_counts, constants.unstacked(push.begun)
        divisors: PyTree[jax.typing.ArrayLike] = [1] * len(begun)
        if self.reduction == "mean":
            divisors = constants.unstacked(push.n)
        if self.reduction == "row_mean":
            before = maps.leaves(row_counts)
            divisors = [*map(push.counted, maps.leaves(updates), begun, before)]
            row_counts = jax.tree.unflatten(maps.structure(row_counts), divisors)
        add = functools.partial(arithmetic.wide_sum, factor=push.factor)

        def one(
            g: Leaf,
            total: Leaf,
            begun: jax.Array,
            n: jax.typing.ArrayLike,
            acts: bool,
        ) -> Leaf:
            if not isinstance(total, jax.Array) or not (maps.has_gradient(g) or acts):
                return total
            if not maps.has_gradient(g):  # The step is made of the pushes before.
                return _divided_if(push.full, None, total, n, total.dtype, begun)
            new = _moved(add, begun, g, total)
            if self.names or not acts:
                return narrow(new, total.dtype)
            return _divided_if(push.full, g, new, n, total.dtype)

        new = _map_backwards(one, updates, state.accumulated, begun, divisors, acts)
        return new, row_counts

    def _mean(
        self,
        updates: optax.Updates,
        total: optax.Updates | None,
        push: _Push,
        row_counts: optax.Updates,
    ) -> optax.Updates:
        """What ``inner`` gets, in the dtypes of the gradients: dense arrays or None."""

        def if_present(g: Leaf, x: PyTree[Leaf]) -> PyTree[Leaf]:
            return x if maps.has_gradient(g) or not maps.has_gradient(x) else None

        total = maps.map_leaves(if_present, updates, total)
        if self.names:
            n: PyTree[jax.Array] = push.n
            if self.reduction == "sum":
                n = jnp.ones_like(push.n)
            if self.reduction == "row_mean":
                n = [*map(if_present, maps.leaves(updates), maps.leaves(row_counts))]
            total = _over_devices(self.names, total, n)
        # From here on all is dense: inner gets every row that any push held.
        return maps.map_updates(
            lambda x, g: narrow(x, maps.gradient_dtype(g)), total, updates
        )

    def _unreduced(self, updates: optax.Updates) -> optax.Updates:
        as_unreduced = functools.partial(mesh.as_unreduced, names=self.names)
        return maps.map_leaves(
            lambda g: as_unreduced(g) if isinstance(g, jax.Array) else g, updates
        )

    def _of_device(
        self, state: ConditionalAccumulatorState
    ) -> ConditionalAccumulatorState:
        """The same state; sums, weights and counts of rows have types of one device."""
        as_own = functools.partial(mesh.as_own, names=self.names)
        as_unreduced = functools.partial(mesh.as_unreduced, names=self.names)
        return state._replace(
            total_weight=as_own(state.total_weight),
            leaf_weights=as_own(state.leaf_weights),
            carried=as_own(state.carried),
            accumulated=jax.tree.map(as_unreduced, state.accumulated),
            row_counts=jax.tree.map(as_own, state.row_counts),
        )


def as_weight(
    weight: jax.typing.ArrayLike, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """The weight of a push, checked; if it is traced and below 0, NaN as the step."""
    arguments.check_scalar("weight", weight)
    w = jnp.asarray(arguments.in_range("weight", weight, "[0, inf)"), dtype)
    return jnp.where(w >= 0, w, jnp.nan)


def _for_each_leaf(params: optax.Params, sums: optax.Updates) -> jax.Array:
    """A weight of 0 for each leaf, in one array: on GPU each one starts a kernel."""
    zero = constants.zero(params, _widest(sums))
    return constants.stacked(zero, len(maps.leaves(sums)))


def _map_backwards(
    f: Callable[..., Leaf], updates: optax.Updates, *rest: PyTree[Any]
) -> PyTree[Leaf]:
    """``map_leaves``, the last leaf first, as a backward pass makes them.

    On GPU the gradient of a matrix waits for the sum before it. Otherwise the compiler
    adds all of them in one kernel, and so keeps them all: 1.00 N instead of 0.10 N of
    12 dense layers, by its count for an H100. A table does not wait: its gradient may
    be scattered into its sum, without an array of its own.
    """
    leaves = zip(*map(maps.leaves, (updates, *rest)), strict=True)
    results: list[Leaf] = []
    last: tuple[jax.Array, ...] = ()
    for g, *leaf in reversed([*leaves]):
        is_table = isinstance(g, jax.Array) and g.ndim == 2 and len(g) >= _TABLE
        waits = isinstance(g, jax.Array) and g.ndim > 1 and not is_table
        result = f(barrier_on_gpu(g, *last) if waits else g, *leaf)
        results.append(result)
        last = (result,) if waits and isinstance(result, jax.Array) else last
    return jax.tree.unflatten(maps.structure(updates), results[::-1])


def _moved(
    f: Callable[..., jax.Array], begun: jax.Array, g: Gradient, total: jax.Array
) -> jax.Array:
    """The new sum ``f(g, sum)``; the sum is 0 if it begins with this push.

    In a table ``f`` gets the rows of the push. The first one also clears all others.
    """
    before = zeros_unless(begun, boundary.gather_rows(g, total))
    new = f(jnp.asarray(maps.stored(g)), before)
    return boundary.scatter_rows(g, total, new, keeps=begun)


def _widest(sums: optax.Updates) -> np.dtype[Any]:
    """float32, or float64 if a sum is in double precision."""
    found = map(dtypes.compute_dtype, jax.tree.leaves(sums))
    return max(found, key=lambda d: d.itemsize, default=np.dtype(np.float32))


def _inverse(n: jax.typing.ArrayLike, total: jax.Array) -> jax.Array:
    # 1 / n; 1 if all weights are 0, as the sum is 0 then, too
    n = jnp.asarray(n, dtypes.compute_dtype(total))
    return 1 / jnp.where(n == 0, 1, n)


def _divided_if(
    full: jax.Array,
    g: Leaf,
    total: jax.Array,
    n: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike,
    begun: jax.Array | Literal[True] = True,
) -> jax.Array:
    # sum / n with the last push, in the sum's own buffer: inner may read it more than
    # once

    def quotient() -> jax.Array:
        x = total if begun is True else zeros_unless(begun, total)
        factor = jnp.where(full, _inverse(n, total), 1)
        return narrow(arithmetic.scale_leading(x, factor), dtype)

    if maps.is_leaf(g):  # All of it, but only with the last push.
        return jax.lax.cond(full, quotient, lambda: total)
    return quotient()


def _over_devices(
    names: tuple[str, ...], total: optax.Updates, n: PyTree[jax.Array]
) -> optax.Updates:
    """The sum over devices of their sums, divided by that of their ``n``.

    ``n`` is one array with a number for each leaf, or a list with an array for each.
    """
    wide = jax.tree.map(dtypes.widen, total)
    sums, n = mesh.summed_over((wide, n), names)
    divisors = n if isinstance(n, list) else constants.unstacked(n)

    def quotient(x: Leaf, n: jax.typing.ArrayLike, old: Leaf) -> Leaf:
        if not (isinstance(x, jax.Array) and isinstance(old, jax.Array)):
            return x
        return narrow(arithmetic.scale_leading(x, _inverse(n, x)), old.dtype)

    leaves, treedef = maps.flatten(sums)
    new = map(quotient, leaves, divisors, maps.leaves(total))
    return jax.tree.unflatten(treedef, new)
