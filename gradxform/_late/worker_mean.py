"""The mean over workers whose data differ; some are fast and some are slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import gate
from gradxform._late.gate import Act, GatedTransformation, LeafFlags, Rest
from gradxform._trees import arithmetic, boxes, checks, constants, dtypes, maps
from gradxform._trees.compilers import narrow
from gradxform._trees.rows import explicit_sharding

Method = Literal["all", "latest", "ringleader"]


class WorkerMeanState(NamedTuple):
    """State of :func:`worker_mean`, for n workers.

    Attributes:
      global_step: int32[], how many times the inner transformation has run; saturates.
      stale_count: int32[], pushes dropped so far; saturates.
      counts: int32[n], how many pushes of each worker are in the table.
      stepped: bool[n], which workers have stepped in this cycle of ``"ringleader"``.
      table: n rows for each leaf, like params: the mean of each worker's pushes.
      row_counts: int32[n] for each leaf, how many of these pushes had a gradient for
        it; a row with the count 0 stands for zeros, whatever it holds.
      means: the mean over the workers' rows. Each leaf has 1 row; with ``"ringleader"``
        it has 2, for this cycle and the next, in turn.
      turn: int32[], the row of ``means`` that belongs to this cycle.
      inner_state: the state of the transformation behind the gate.
    """

    global_step: jax.Array
    stale_count: jax.Array
    counts: jax.Array
    stepped: jax.Array
    table: optax.Updates
    row_counts: optax.Updates
    means: optax.Updates
    turn: jax.Array
    inner_state: optax.OptState


def worker_mean(
    inner: optax.GradientTransformation,
    num_workers: int,
    *,
    method: Method,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> GatedTransformation:
    r"""Lets ``inner`` act on the mean of all workers' mean gradients.

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
      A transformation with state :class:`WorkerMeanState`. ``None`` for a leaf leaves
      its row as it was. If such a push makes a step, ``inner`` sees ``None`` there. A
      worker without a gradient for a leaf counts as a worker with zeros there.

    Raises:
      ValueError: ``num_workers`` is out of range, or ``method`` is unknown; a
        ``worker`` or ``local_step`` that is no array is out of range.
      TypeError: ``inner`` is no transformation; ``num_workers`` is no integer, or
        traced; ``update`` is called without ``worker`` or a ``local_step`` that is
        needed; updates do not have the structure or the shapes of the parameters, or
        are row-sparse.

    Source: Tyurin and Richtárik, 2023, "Optimal time complexities of parallel
    stochastic optimization methods", https://arxiv.org/abs/2305.12387 (Malenia);
    Maranjyan and Richtárik, 2025, "Ringleader ASGD", https://arxiv.org/abs/2509.22860,
    and its authors' code. With ``"latest"`` the first step is that of the push after
    the one that completes the table.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.worker_mean(optax.sgd(1.0), num_workers=2, method="all")
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for worker, grad in ((0, 1.0), (0, 3.0), (1, 8.0)):  # The first one is faster.
    ...     params, state = gx.apply_gradients(
    ...         tx, jnp.array(grad), state, params, worker=worker, local_step=0
    ...     )
    >>> assert params == -5.0  # the mean of 2 and 8
    >>> assert state.global_step == 1 and state.counts.tolist() == [0, 0]
    """
    checks.transformation("inner", inner)
    if isinstance(num_workers, jax.core.Tracer):
        raise TypeError(
            "num_workers is a shape, so it cannot be traced; under "
            "optax.inject_hyperparams name it in static_args."
        )
    checks.integer_scalar("num_workers", num_workers)
    checks.in_range("num_workers", num_workers, checks.COUNTS)
    checks.one_of("method", method, get_args(Method))
    checks.state_dtype("accumulator_dtype", accumulator_dtype, complex_too=True)
    n, inner = int(num_workers), optax.with_extra_args_support(inner)
    ringleader = method == "ringleader"

    def one_more(count: jax.Array) -> jax.Array:
        # c_i + 1; with "latest" only the newest push counts
        return jnp.ones_like(count) if method == "latest" else count + 1

    def init_fn(params: optax.Params) -> WorkerMeanState:
        checks.of_same_kind("accumulator_dtype", accumulator_dtype, params)
        inner_state = gate.inner_state(inner, params)

        def rows(number: int) -> Any:
            def zeros(p: jax.Array) -> jax.Array:
                dtype = accumulator_dtype or dtypes.wide_dtype(p)
                return constants.stacked(constants.full_like(p, 0, dtype), number)

            return boxes.boxed(params, maps.map_params(zeros, boxes.bare(params)))

        def none(p: jax.Array) -> jax.Array:
            return constants.stacked(constants.full_like(p, 0, jnp.int32, axes=0), n)

        return WorkerMeanState(
            global_step=constants.zero(params, jnp.int32),
            stale_count=constants.zero(params, jnp.int32),
            counts=constants.stacked(constants.zero(params, jnp.int32), n),
            stepped=constants.stacked(constants.zero(params, jnp.bool), n),
            table=rows(n),
            row_counts=maps.map_params(none, boxes.bare(params)),
            means=rows(2 if ringleader else 1),
            turn=constants.zero(params, jnp.int32),
            inner_state=inner_state,
        )

    def guard(
        act: Act,
        rest: Rest,
        updates: optax.Updates,
        state: WorkerMeanState,
        params: optax.Params | None,
        *,
        worker: jax.typing.ArrayLike | None = None,
        local_step: jax.typing.ArrayLike | None = None,
        leaf_flags: LeafFlags | None = None,
        **extra: Any,
    ) -> tuple[Any, WorkerMeanState]:
        checks.dense("worker_mean", updates)
        checks.same_shapes(
            "updates",
            updates,
            "table",
            boxes.as_in(updates, state.table),
            lambda g: (n, *np.shape(g)),
        )
        taken, i = _worker(worker, n)
        extra["worker"] = i
        if local_step is not None or method == "all":
            extra["local_step"] = checks.local_step("worker_mean", local_step)
        if method == "all":
            # fresh iff local_step >= global_step
            taken &= extra["local_step"] >= state.global_step

        counts = state.counts.at[i].set(one_more(state.counts[i]))
        complete = jnp.all(counts > 0) | jnp.any(state.stepped)
        ahead = state.stepped[i]  # It has stepped: the push belongs to the next cycle.
        row = jnp.where(ahead, 1 - state.turn, state.turn)
        if method == "latest":
            complete = jnp.all(state.counts > 0)
        full = taken & complete & ~ahead

        def added() -> tuple[Any, Any]:
            flags = gate.flags_of(updates, leaf_flags)
            return None, _added(flags, updates, state, i, row, one_more)

        before = state.table, state.row_counts, state.means
        _, (table, row_counts, means) = gate.either(
            taken, added, lambda: (None, before)
        )

        def step() -> tuple[Any, Any]:
            mean = maps.map_updates(
                lambda g, m: narrow(_row(m, row), maps.dtype_of(g)),
                updates,
                boxes.as_in(updates, means),
            )
            outcome, inner_state = gate.acted(
                act, rest, inner, mean, state.inner_state, params, leaf_flags, **extra
            )
            return outcome, (inner_state, jnp.array(True))

        def wait() -> tuple[Any, Any]:
            return rest(params), (state.inner_state, jnp.array(False))

        # As `acted` comes out of the conditional, the compiler knows when the mean is
        # no longer read. That saves a copy.
        outcome, (inner_state, acted) = gate.either(full, step, wait)

        stepped, turn, over = state.stepped, state.turn, acted
        if method != "latest":
            # A row belongs to the next cycle once its worker has stepped in this one.
            begins = (jnp.arange(n, dtype=jnp.int32) == i) if ringleader else True
            counts, row_counts = jax.tree.map(
                lambda c: jnp.where(full & begins, 0, c), (counts, row_counts)
            )
        if ringleader:
            stepped = stepped.at[i].set(full | ahead)
            over = acted & jnp.all(stepped)
            stepped, turn = stepped & ~over, jnp.where(over, 1 - turn, turn)
        if method != "latest":  # A mean begins with zeros.
            means, _ = gate.either(
                over, lambda: (_cleared(means, row), ()), lambda: (means, ())
            )
        increment = optax.safe_increment
        return outcome, WorkerMeanState(
            global_step=jnp.where(
                full, increment(state.global_step), state.global_step
            ),
            stale_count=jnp.where(
                taken, state.stale_count, increment(state.stale_count)
            ),
            counts=jnp.where(taken, counts, state.counts),
            stepped=jnp.where(taken, stepped, state.stepped),
            table=table,
            row_counts=row_counts,
            means=means,
            turn=jnp.where(taken, turn, state.turn),
            inner_state=inner_state,
        )

    return gate.gate(init_fn, guard)


def _worker(worker: Any, n: int) -> tuple[jax.Array, jax.Array]:
    """Whether this worker exists, and its row."""
    if worker is None:
        raise TypeError(
            "worker_mean needs worker: pass update(..., worker=i), the index of the "
            "worker that computed these gradients."
        )
    checks.integer_scalar("worker", worker)
    if not isinstance(worker, jax.Array):
        checks.in_range("worker", worker, f"[0, {n})")
    i = dtypes.saturated(worker)
    return (i >= 0) & (i < n), jnp.clip(i, 0, n - 1)


def num_workers_of(state: optax.OptState) -> int | None:
    """How many workers have a row in each table of a state; None without a table."""

    def has_table(node: Any) -> bool:
        return isinstance(node, WorkerMeanState)

    found = filter(has_table, jax.tree.leaves(state, is_leaf=has_table))
    return min((own.counts.shape[0] for own in found), default=None)


def _row(x: jax.Array, i: jax.Array) -> jax.Array:
    row: jax.Array = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return row


def _added(
    flags: Any,
    updates: optax.Updates,
    state: WorkerMeanState,
    i: jax.Array,
    row: jax.Array,
    one_more: Callable[[jax.Array], jax.Array],
) -> tuple[Any, Any, Any]:
    """Table, its counts and the means with this push in row ``i`` and mean ``row``."""

    def change(
        flag: Any, g: Any, table: Any, counts: Any, means: Any
    ) -> tuple[Any, Any, Any]:
        if not maps.has_gradient(g):
            return table, counts, means
        held, count = dtypes.widen(_row(table, i)), one_more(counts[i])
        old = jnp.where(counts[i] == 0, 0, held)
        # (g - m_i) / c_i
        g = jnp.asarray(g).astype(held.dtype)
        delta = arithmetic.scale(g - old, 1 / count.astype(dtypes.compute_dtype(g)))
        if flag is not None:
            delta = jnp.where(flag, delta, 0)
            count = jnp.where(flag, count, counts[i])
        share = arithmetic.scale(delta, 1 / table.shape[0])
        means = means.at[row].add(
            narrow(share, means.dtype), out_sharding=explicit_sharding(means)
        )
        # `known` is always false, but the compiler does not know that. So it computes
        # the mean first, and need not copy the row that the mean reads.
        known = _row(means, row)
        known = (known != known) & (known == known)
        new = jnp.where(known, 0, old + delta)
        table = table.at[i].set(
            narrow(new, table.dtype), out_sharding=explicit_sharding(table)
        )
        return table, counts.at[i].set(count), means

    trees = state.table, state.row_counts, state.means
    leaves = [
        jax.tree.leaves(tree, is_leaf=maps.is_leaf) for tree in (flags, updates, *trees)
    ]
    changed = list(map(change, *leaves))
    table, counts, means = (
        jax.tree.unflatten(
            jax.tree.structure(tree, is_leaf=maps.is_leaf),
            [each[k] for each in changed],
        )
        for k, tree in enumerate(trees)
    )
    return table, counts, means


def _cleared(means: Any, row: jax.Array) -> Any:
    return jax.tree.map(
        lambda x: x.at[row].set(0, out_sharding=explicit_sharding(x)), means
    )
