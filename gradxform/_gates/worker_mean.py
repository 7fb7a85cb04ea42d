"""The mean over workers whose data differ; some are fast and some are slow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._gates import gate
from gradxform._gates.conditional import typed_cond
from gradxform._gates.gate import Decision
from gradxform._jax.compilers import narrow
from gradxform._numbers import arithmetic, constants, workers
from gradxform._rows import boundary
from gradxform._rows.rows import explicit_sharding
from gradxform._trees import boxes, dtypes, maps, states
from gradxform._trees.types import Gradient, Leaf

Method = Literal["all", "latest", "ringleader"]


@states.Mark(
    gate=True,
    takes_none=True,
    needs={"local_step": "stale_count"},
    reads=["worker"],
    kept=["means", "table"],  # Sums over all steps, and what is subtracted from them.
)
class WorkerMeanState(NamedTuple):
    """State of :func:`worker_mean`, for n workers.

    Attributes:
      global_step: int32[], how many times the inner transformation has run; saturates.
      stale_count: int32[], pushes dropped so far; saturates.
      counts: int32[n], how many pushes of each worker are in the table.
      stepped: bool[n], which workers have stepped in this cycle of ``"ringleader"``.
      table: n rows for each leaf, like params: the mean of each worker's pushes; a row
        with the count 0 stands for zeros, whatever it holds.
      means: the mean over the workers' rows. Each leaf has 1 row; with ``"ringleader"``
        it has 2, for this cycle and the next, in turn.
      turn: int32[], the row of ``means`` that belongs to this cycle.
      present: bool[leaves], which leaves have had a gradient since the last step; only
        ``"all"`` writes it.
      carried: int32[leaves], how many means of former steps are still in that of a
        leaf, as the push that made the step had no gradient for it; only for ``"all"``.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    stale_count: jax.Array
    counts: jax.Array
    stepped: jax.Array
    table: optax.Updates
    means: optax.Updates
    turn: jax.Array
    present: jax.Array
    carried: jax.Array
    inner_state: optax.OptState


def worker_mean(
    inner: optax.GradientTransformation,
    num_workers: int,
    *,
    method: Method,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Applies ``inner`` to the mean of all workers' mean gradients.

    .. math::

        c_i \leftarrow c_i + 1, \quad m_i \leftarrow m_i + (g - m_i) / c_i, \quad
        g_{inner} = \tfrac{1}{n} \textstyle\sum_{i=1}^{n} m_i

    for a push of worker i. Without this, if the workers' data differ, the fastest
    worker would pull the parameters towards its own data. ``method`` says which pushes
    are in the mean, and which of them make a step:

    - ``"all"``, Malenia SGD: the pushes of this global step. Once each worker has
      pushed at least once, the step is made, and everything starts again from zero. A
      push whose ``local_step`` is behind ``global_step`` is dropped, and
      ``stale_count`` grows by 1.
    - ``"latest"``, incremental aggregated gradients: the newest push of each worker,
      however late (:math:`c_i = 1`). Once each worker has pushed, every further push
      makes a step.
    - ``"ringleader"``, Ringleader ASGD: in the first phase of a cycle, pushes are
      gathered until each worker has pushed. The push that completes them makes the
      first of n steps. In the second phase, a push is added and makes a step if its
      worker has not stepped yet in this cycle. Otherwise it goes to the next cycle.
      After n steps the next cycle begins, with the pushes that are already in it.

    NaN or inf in a dropped gradient reaches nothing. If a push makes no step, its
    updates are zero, and the inner state stays bit-identical. The types of updates and
    state are described in :func:`drop_stale`.

    The table is as large as n models. One mean comes on top, or two for
    ``"ringleader"``. The cost of a push does not grow with n: it reads and writes one
    row of the table and one mean. With ``"latest"`` each push moves the mean. It is
    never computed anew, so it carries the rounding errors of all pushes, and NaN or inf
    in one push stays in it. ``ParameterServer(require_finite=True)`` refuses such a
    push. The difference of two pushes of one worker must be finite too: after 3e38, a
    push of -3e38 in float32 makes the mean infinite, and then NaN for ever.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      num_workers: n, the number of workers, in [1, 2³¹ - 1]; it is a shape, so it
        cannot be traced. Under ``optax.inject_hyperparams`` name it in ``static_args``.
      method: ``"all"``, ``"latest"`` or ``"ringleader"``.
      accumulator_dtype: dtype of table and means, by default that of the parameters but
        at least float32.

    Extra arguments of update:
      worker: the worker that computed the gradient, an integer in [0, n). If a traced
        one is outside of that, the push is dropped and counts as stale.
      local_step: as in :func:`drop_stale`; ``"all"`` needs it; the other two only pass
        it on to ``inner``.

    Returns:
      A transformation with state :class:`WorkerMeanState`. ``None`` for a leaf counts
      as zeros. If such a push makes a step, ``inner`` sees ``None`` there, so the leaf
      rests. With ``"all"`` its mean then waits, and ``inner`` gets the mean of it and
      that of the next step.

    Raises:
      ValueError: ``num_workers`` is out of range, or ``method`` is unknown; a
        ``worker`` or ``local_step`` that is no array is out of range.
      TypeError: ``inner`` is no transformation; ``num_workers`` is no integer, or
        traced; ``update`` is called without ``worker`` or a ``local_step`` that is
        needed; updates do not have the structure or the shapes of the parameters, or
        are row-sparse.

    References:
      Tyurin and Richtárik, `Optimal time complexities of parallel stochastic
      optimization methods <https://arxiv.org/abs/2305.12387>`__, 2023 (Malenia).
      Maranjyan and Richtárik, `Ringleader ASGD <https://arxiv.org/abs/2509.22860>`__,
      2025, and its authors' code.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.worker_mean(optax.sgd(1.0), num_workers=2, method="all")
    >>> params = jnp.zeros(())
    >>> state = tx.init(params)
    >>> for worker, grad in ((0, 1.0), (0, 3.0), (1, 8.0)):  # The first one is faster.
    ...     params, state = gx.apply_gradients(
    ...         tx, jnp.array(grad), state, params, worker=worker, local_step=0
    ...     )
    >>> params  # minus the mean of 2 and 8
    Array(-5., dtype=float32)
    >>> assert state.global_step == 1 and state.counts.tolist() == [0, 0]
    """
    n = arguments.length("num_workers", num_workers, arguments.COUNTS)
    arguments.check_one_of("method", method, get_args(Method))
    structures.check_state_dtype("accumulator_dtype", accumulator_dtype)

    def decide(
        updates: optax.Updates,
        state: WorkerMeanState,
        *,
        worker: jax.typing.ArrayLike | None = None,
        local_step: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> Decision:
        _check(updates, boxes.as_in(updates, state.table))
        accepted, i = workers.row_of("worker_mean", worker, n)
        extra["worker"] = i
        if local_step is not None or method == "all":
            extra["local_step"] = arguments.local_step("worker_mean", local_step)
        if method == "all":
            # fresh iff local_step >= global_step
            accepted &= extra["local_step"] >= state.global_step
        # The push of a worker that has stepped belongs to the next cycle.
        ahead = state.stepped[i]
        row = jnp.where(ahead, 1 - state.turn, state.turn)
        latest = method == "latest"
        before, kept = state.counts, {name: getattr(state, name) for name in _WRITTEN}
        new = typed_cond(
            accepted,
            lambda: _with_push(updates, state, i, row, newest_only=latest),
            lambda: kept,
        )
        state = state._replace(**new)
        # Of the newest pushes, every one after the first of each worker makes a step.
        complete = jnp.all((before if latest else state.counts) > 0)
        # The first phase of a cycle ends with the push that completes the table, which
        # makes the first step. In the second phase each worker makes one.
        full = accepted & (complete | jnp.any(state.stepped)) & ~ahead
        means = _means(updates, state, row, waits=method == "all")

        def settle(
            state: WorkerMeanState, applied: jax.Array, _: object
        ) -> WorkerMeanState:
            if latest:
                return state
            if method == "all":  # Everything starts again from zero.
                state = _with_waiting(updates, state, accepted, full, before)
                return _cleared(applied, _restarted(full, state), row, updates)
            return _next_in_cycle(state, i, row, full, ahead, applied)

        return Decision(
            *(full, accepted, means, state, extra), settle=settle, ordered=True
        )

    init = functools.partial(_init, inner, n, method, accumulator_dtype)
    return gate.gate(init, inner, decide)


def _init(
    inner: optax.GradientTransformation,
    n: int,
    method: Method,
    accumulator_dtype: jax.typing.DTypeLike | None,
    params: optax.Params,
) -> WorkerMeanState:
    structures.check_same_kind("accumulator_dtype", accumulator_dtype, params)
    inner_state = gate.inner_state(inner, params)
    row = constants.zeros(boxes.unboxed(params), accumulator_dtype, dtypes.wide_dtype)

    def stacked(length: int) -> optax.Updates:
        rows = jax.tree.map(lambda x: constants.stacked(x, length), row)
        return boxes.boxed(params, rows)

    def for_each_leaf(dtype: jax.typing.DTypeLike) -> jax.Array:
        return constants.stacked(constants.zero(params, dtype), len(maps.leaves(row)))

    return WorkerMeanState(
        global_step=constants.zero(params, jnp.int32),
        stale_count=constants.zero(params, jnp.int32),
        counts=constants.stacked(constants.zero(params, jnp.int32), n),
        stepped=constants.stacked(constants.zero(params, jnp.bool), n),
        table=stacked(n),
        means=stacked(2 if method == "ringleader" else 1),
        turn=constants.zero(params, jnp.int32),
        present=for_each_leaf(jnp.bool),
        carried=for_each_leaf(jnp.int32),
        inner_state=inner_state,
    )


def _check(updates: optax.Updates, table: optax.Updates) -> None:
    """Raises ``TypeError`` if a push does not fit into a row of the table."""
    boundary.check_dense("worker_mean", updates)
    row = jax.tree.map(lambda x: jax.core.ShapedArray(x.shape[1:], x.dtype), table)
    structures.check_shapes("updates", updates, "a row of the table", row)


def _next_in_cycle(
    state: WorkerMeanState,
    i: jax.Array,
    row: jax.Array,
    full: jax.Array,
    ahead: jax.Array,
    applied: jax.Array,
) -> WorkerMeanState:
    """The state of ``"ringleader"`` after a push of worker ``i``."""
    # The row of a worker that has stepped is empty for the next cycle.
    own = jnp.arange(state.counts.size, dtype=jnp.int32) == i
    state = _restarted(full & own, state)
    stepped = state.stepped.at[i].set(full | ahead)
    # After n steps the next cycle begins.
    over = applied & jnp.all(stepped)
    state = _cleared(over, state, row)
    turn = jnp.where(over, 1 - state.turn, state.turn)
    return state._replace(stepped=stepped & ~over, turn=turn)


def num_workers_of(state: optax.OptState) -> int | None:
    """How many workers have a row in each table of a state; None without a table."""
    found = maps.nodes(state, lambda node: isinstance(node, WorkerMeanState))
    return min((own.counts.shape[0] for _, own in found), default=None)


def _row(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


# The fields of the state that a push changes.
_WRITTEN = "counts", "table", "means"


def _with_push(
    updates: optax.Updates,
    state: WorkerMeanState,
    i: jax.Array,
    row: jax.Array,
    newest_only: bool,
) -> dict[str, optax.Updates]:
    """These fields with a push in row ``i`` of the table, and in this row of means."""
    before = state.counts[i]
    # c_i + 1, or 1 for the newest push only
    count = jnp.ones_like(before) if newest_only else before + 1

    def as_zeros(g: Leaf, table: jax.Array) -> Leaf:
        if maps.has_gradient(g) or not isinstance(table, jax.Array):
            return g
        return jnp.zeros_like(_row(table, i))

    def change(
        g: jax.Array, table: jax.Array, means: jax.Array
    ) -> tuple[jax.Array, ...]:
        stored = dtypes.widen(_row(table, i))
        old = jnp.where(before == 0, 0, stored)
        # (g - m_i) / c_i
        g = g.astype(stored.dtype)
        delta = arithmetic.scale(g - old, 1 / count.astype(dtypes.compute_dtype(g)))
        share = arithmetic.scale(delta, 1 / table.shape[0])
        share, sharding = narrow(share, means.dtype), explicit_sharding(means)
        means = means.at[row].add(share, out_sharding=sharding)
        # The mean is computed first. So the row that it reads need not be copied.
        new = jnp.where(constants.never(_row(means, row)), 0, old + delta)
        new, sharding = narrow(new, table.dtype), explicit_sharding(table)
        table = table.at[i].set(new, out_sharding=sharding)
        return g, table, means

    updates = maps.map_leaves(as_zeros, updates, boxes.as_in(updates, state.table))
    _, *changed = boundary.map_step(change, updates, (state.table, state.means))
    counts = state.counts.at[i].set(count)
    return dict(zip(_WRITTEN, (counts, *changed), strict=True))


def _with_waiting(
    updates: optax.Updates,
    state: WorkerMeanState,
    accepted: jax.Array,
    full: jax.Array,
    before: jax.Array,
) -> WorkerMeanState:
    """The state after a push; ``before`` are the counts of workers before it.

    The mean of a leaf without a gradient in the push that makes a step is carried on.
    """
    acts = jnp.array([*map(maps.has_gradient, maps.leaves(updates))], bool)
    present = acts | (state.present & jnp.any(before > 0))
    present = jnp.where(accepted, present, state.present)
    carried = jnp.where(acts, 0, state.carried + present.astype(jnp.int32))
    carried = jnp.where(full, carried, state.carried)
    return state._replace(present=present, carried=carried)


def _means(
    updates: optax.Updates, state: WorkerMeanState, row: jax.Array, *, waits: bool
) -> Callable[[object], optax.Updates]:
    """What ``inner`` gets: a row of the means, divided by how many steps are in it."""
    means = boxes.as_in(updates, state.means)
    numbers = constants.unstacked(state.carried + 1)
    number = jax.tree.unflatten(maps.structure(updates), numbers)

    def of_row(g: Gradient, means: jax.Array, number: jax.Array) -> jax.Array:
        mean = _row(means, row)
        if waits:
            share = 1 / number.astype(dtypes.compute_dtype(means))
            mean = arithmetic.scale(mean, share)
        return narrow(mean, maps.gradient_dtype(g))

    return lambda _: maps.map_updates(of_row, updates, means, number)


def _restarted(begins: jax.Array, state: WorkerMeanState) -> WorkerMeanState:
    """The rows of these workers start again from zero."""
    return state._replace(counts=jnp.where(begins, 0, state.counts))


def _cleared(
    over: jax.Array,
    state: WorkerMeanState,
    row: jax.Array,
    updates: optax.Updates | None = None,
) -> WorkerMeanState:
    """One row of the means starts again from zero if ``over``.

    That of a leaf without a gradient in ``updates`` waits.
    """
    means, treedef = maps.flatten(state.means)
    grads = means if updates is None else maps.leaves(updates)

    def zeros() -> list[Leaf]:
        return [
            x.at[row].set(0, out_sharding=explicit_sharding(x))
            if maps.has_gradient(g) and isinstance(x, jax.Array)
            else x
            for g, x in zip(grads, means, strict=True)
        ]

    means = jax.lax.cond(over, zeros, lambda: means)
    return state._replace(means=jax.tree.unflatten(treedef, means))
