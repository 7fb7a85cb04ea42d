"""Sums of pushes, alone and with other gates, against the same gates in plain Python.

The classes here know a gradient as a dict of masked arrays: without a key for a leaf
that has none, and masked in the rows of a table that it does not hold. In a sum, a ring
or a table a missing leaf counts as zero, and it is not stepped: what the sum or the
ring holds for it waits.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests import oracles
from tests.conftest import half

RATE, MOMENTUM, DECAY, LONGEST, WORKERS = 0.1, 0.5, 0.25, 0.5, 2
PUSHES = 40


def sgd():
    return optax.chain(
        gx.clip_by_global_norm(LONGEST),
        optax.add_decayed_weights(DECAY),
        optax.sgd(lambda n: RATE / (1 + jnp.float32(n)), momentum=MOMENTUM),
    )


def stepped(tx, grads, state, params, how, **extra):
    """New parameters and state, by one call or by two."""
    if how == "apply":
        return gx.apply_gradients(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return gx.apply_updates(params, updates), state


class Sgd:
    """The optimizer inside of everything, and its parameters."""

    def __init__(self, params):
        self.params, self.count = dict(params), 0
        self.trace = {leaf: 0.0 * p for leaf, p in params.items()}

    def push(self, grads, **_):
        norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
        scale = LONGEST / max(norm, LONGEST)
        for leaf, g in grads.items():
            decayed = g * scale + DECAY * self.params[leaf]
            self.trace[leaf] = MOMENTUM * self.trace[leaf] + decayed
            step = RATE / (1 + self.count) * self.trace[leaf]
            self.params[leaf] = self.params[leaf] - step
        self.count += 1


class Sum:
    """``bound`` is that of staleness, ``factor`` its weight, and ``skips`` NaN."""

    def __init__(
        self, inner, number, reduction="mean", *, bound=np.inf, factor=None, skips=False
    ):
        self.inner, self.number, self.reduction = inner, number, reduction
        self.bound, self.factor, self.skips = bound, factor or (lambda s: 1), skips
        self.held, self.count, self.weight = {}, 0, 0.0
        self.steps = self.left_out = 0

    def enters(self, grads, late):
        if self.skips:
            return all(np.isfinite(np.ma.filled(g, 0)).all() for g in grads.values())
        return late <= (self.bound(self.steps) if callable(self.bound) else self.bound)

    def push(self, grads, *, weight=1, last=False, late=0, **extra):
        enters = self.enters(grads, late)
        self.left_out += not enters
        if enters:
            self.count, self.weight = self.count + 1, self.weight + weight
            for leaf, g in grads.items():
                pushed = weight, self.factor(max(0, late)), g
                self.held.setdefault(leaf, []).append(pushed)
        number = self.number(self.steps) if callable(self.number) else self.number
        if (enters and self.count >= number) or (last and self.count):
            means = {leaf: self.mean(leaf, g.shape) for leaf, g in grads.items()}
            self.inner.push(means, **extra)
            self.count, self.weight, self.steps = 0, 0.0, self.steps + 1

    def mean(self, leaf, shape):
        total, by_row = np.zeros(shape), np.zeros(shape)
        for w, factor, g in self.held.pop(leaf, []):
            total += w * factor * np.ma.filled(g, 0) if w else 0
            by_row += w * ~np.ma.getmaskarray(g)
        n = {"mean": self.weight, "sum": 1, "row_mean": by_row}[self.reduction]
        return total / np.where(n == 0, 1, n)


class Delayed:
    def __init__(self, inner, delays):
        self.inner, self.delays, self.count = inner, delays, 0
        self.rings = {leaf: [np.zeros(2)] * d for leaf, d in delays.items()}

    def push(self, grads, **extra):
        due = dict(grads)
        for leaf, g in grads.items():
            if d := self.delays[leaf]:
                at = self.count % d
                due[leaf], self.rings[leaf][at] = self.rings[leaf][at], g
        if self.count >= max(self.delays.values()):
            self.inner.push(due, **extra)
        self.count += 1


class WorkerMean:
    def __init__(self, inner, method):
        self.inner, self.method = inner, method
        self.now, self.later, self.stepped = [], [], set()  # (worker, grads)
        self.waiting = {}

    def push(self, grads, *, worker, **extra):
        if self.method == "latest":
            is_full = len({i for i, _ in self.now}) == WORKERS
            self.now.append((worker, grads))
        elif worker in self.stepped:
            self.later.append((worker, grads))
            return
        else:
            self.now.append((worker, grads))
            is_full = bool(self.stepped) or len({i for i, _ in self.now}) == WORKERS
        if not is_full:
            return
        means = {leaf: self.mean(leaf) for leaf in "ab"}
        self.inner.push({k: means[k] for k in grads}, worker=worker, **extra)
        if self.method == "all":
            self.now = []
            self.waiting = {k: x for k, x in means.items() if k not in grads}
        if self.method == "ringleader":
            self.stepped.add(worker)
            if len(self.stepped) == WORKERS:
                self.now, self.later, self.stepped = self.later, [], set()

    def mean(self, leaf):
        total = np.zeros(2)
        for worker in range(WORKERS):
            own = [g.get(leaf, np.zeros(2)) for i, g in self.now if i == worker]
            if own:
                total += own[-1] if self.method == "latest" else np.mean(own, axis=0)
        return total / WORKERS + self.waiting.get(leaf, 0.0)


# One sum: tables, missing leaves, weights, last pushes, late ones and NaN.

ROWS = 4
LATE = functools.partial(gx.conditional_accumulator, max_staleness=1)


def required(step):
    return np.array([2, 1, 3])[step % 3]


def traced(step):
    return jnp.array([2, 1, 3])[step % 3]


# The gate, the same in plain Python, and what its pushes bring.
GATES = {
    "accumulate": (gx.accumulate, 3, {}, {}, ""),
    "weights": (gx.accumulate, 2, {}, {}, "weight"),
    "last": (gx.accumulate, 9, {}, {}, "last"),
    "schedule": (gx.accumulate, traced, {}, {}, "weight last"),
    "finite": (gx.accumulate, 3, {"skip_nonfinite": True}, {"skips": True}, "nan"),
    "finite to the last": (
        *(gx.accumulate, 3, {"skip_nonfinite": True}, {"skips": True}),
        "nan weight last",
    ),
    "fresh": (gx.conditional_accumulator, 2, {}, {"bound": 0}, "late"),
    "late to the last": (LATE, 3, {}, {"bound": 1}, "late weight last"),
    "scheduled bound": (
        *(gx.conditional_accumulator, 2),
        *({"max_staleness": jnp.sqrt}, {"bound": np.sqrt}, "late"),
    ),
    "fedbuff": (
        *(gx.conditional_accumulator, 3),
        {"max_staleness": 8, "weight": lambda s: 1 / jnp.sqrt(1 + s)},
        *({"bound": 8, "factor": lambda s: (1 + s) ** -0.5}, "late weight"),
    ),
    # It is below 0 for a push that is dropped.
    "linear": (
        *(gx.conditional_accumulator, 2),
        {"max_staleness": 2, "weight": lambda s: 1 - s / 3},
        *({"bound": 2, "factor": lambda s: 1 - s / 3}, "late"),
    ),
}


def drawn(rng, kind):
    """A gradient of the table: masked in the rows that it does not hold."""
    g = rng.choice([-1, -0.5, 0, 0.5, 1], (ROWS, 2))  # Many sums are exactly 0.
    held = np.full(ROWS, kind == "dense")
    held[rng.choice(ROWS, 2, replace=False)] = True
    return np.ma.array(g, mask=np.repeat(~held[:, None], 2, axis=1))


def as_rows(g):
    """The same for JAX: one of its rows in two parts, and NaN in its padding."""
    first, second = np.flatnonzero(~g.mask[:, 0])
    values = [g[first] - 8, g[second], np.full(2, 8), np.full(2, np.nan)]
    rows = jnp.array([first, second, first, ROWS])
    return gx.IndexedSlices(rows, jnp.float32(np.ma.filled(values)), (ROWS, 2))


def stream(seed, brings):
    """Pushes: the gradients, those for JAX, and what they bring besides."""
    rng = np.random.default_rng(seed)
    kinds = ("dense", "b"), ("rows", "b"), (None, "b"), ("rows", None)
    for _ in range(PUSHES):
        kind, b = kinds[rng.integers(4)]
        grads = {} if kind is None else {"table": drawn(rng, kind)}
        grads |= {"b": rng.choice([-1, 0, 1.0], 2)} if b else {}
        extra, bad = {}, "nan" in brings and rng.random() < 0.3
        if "weight" in brings:
            extra["weight"] = rng.choice([0, 0.5, 1, 3])
            bad |= not extra["weight"]
        if "last" in brings:
            extra["last"] = rng.random() < 0.25
        if "late" in brings:
            extra["late"] = rng.choice([-1, 0, 0, 1, 2, 9])
            bad |= extra["late"] == 9  # Later than each bound.
        if bad:  # It is left out, or weighs nothing. Not even NaN may get through.
            leaf = rng.choice([*grads])
            row = np.flatnonzero(~np.ma.getmaskarray(grads[leaf]).any(-1))[0]
            grads[leaf][row] = np.nan
        given = {"table": None, "b": None} | grads
        given = {k: None if g is None else jnp.float32(g) for k, g in given.items()}
        if kind == "rows":
            given["table"] = as_rows(grads["table"])
        yield grads, given, extra


QUICK = "last", "finite to the last", "late to the last", "fedbuff"


@pytest.mark.parametrize(
    ("gate", "reduction", "how"),
    [  # Two reductions of each gate, one of them by `apply_gradients`.
        pytest.param(
            *(gate, reduction, ["apply", "update"][(i + j) % 3 - 1]),
            marks=[pytest.mark.every] * (gate in QUICK),
        )
        for i, gate in enumerate(GATES)
        for j, reduction in enumerate(("mean", "sum", "row_mean"))
        if (i + j) % 3
    ],
)
def test_a_sum_is_that_of_plain_python(gate, reduction, how):
    make, number, options, plain, brings = GATES[gate]
    tx = make(sgd(), number, reduction=reduction, **options)
    start = {"table": np.ones((ROWS, 2)), "b": np.full(2, -2.0)}
    innermost = Sgd(start)
    number = required if callable(number) else number
    oracle = Sum(innermost, number, reduction, **plain)
    step = jax.jit(functools.partial(stepped, tx, how=how))
    params = jax.tree.map(jnp.float32, start)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for grads, given, extra in stream(len(gate), brings):
        told = {k: x for k, x in extra.items() if k != "late"}
        if "late" in brings:
            told["local_step"] = jnp.int32(oracle.steps - extra["late"])
        oracle.push(grads, **extra)
        params, state = step(given, state, params, **jax.tree.map(jnp.asarray, told))
        for leaf, expected in innermost.params.items():
            np.testing.assert_allclose(params[leaf], expected, rtol=1e-5, atol=1e-5)
        left_out = state.stale_count if "late" in brings else state.nonfinite_count
        counts = state.global_step, state.num_accumulated, left_out
        assert counts == (oracle.steps, oracle.count, oracle.left_out)
        if oracle.count:
            assert state.total_weight == np.float32(oracle.weight)
    assert jax.tree.map(jax.typeof, state) == types
    assert 4 < innermost.count < PUSHES


# Gates in gates.


def chained(gate):
    """Inside of a chain, whose other link changes nothing."""
    return lambda tx: optax.chain(optax.clip(1e6), gate[0](tx)), gate[1]


def stale(gate):
    return lambda tx: gx.drop_stale(gate[0](tx), 10**6), gate[1]


def both(around, inside):
    return (
        lambda tx: around[0](inside[0](tx)),
        lambda inner: around[1](inside[1](inner)),
    )


def delayed(a, b):
    delays = {"a": a, "b": b}
    return lambda tx: gx.delayed(tx, delays), lambda inner: Delayed(inner, delays)


ALONE = lambda tx: tx, lambda inner: inner
MEAN = lambda tx: gx.accumulate(tx, 2), lambda inner: Sum(inner, 2)
BY_ROW = (
    lambda tx: gx.accumulate(tx, 2, reduction="row_mean"),
    lambda inner: Sum(inner, 2, "row_mean"),
)
LATE_MEAN = lambda tx: gx.conditional_accumulator(tx, 2), MEAN[1]
ALL, LATEST, RINGLEADER = (
    (
        functools.partial(gx.worker_mean, num_workers=WORKERS, method=method),
        functools.partial(WorkerMean, method=method),
    )
    for method in ("all", "latest", "ringleader")
)
# From outside to inside. Each gate is alone, in a sum and in a chain in a sum.
NESTED = {
    "delayed": delayed(2, 2),
    "delayed-3-0": delayed(3, 0),
    "mean/delayed-1-2": both(MEAN, delayed(1, 2)),
    "row_mean/chain/delayed": both(BY_ROW, chained(delayed(2, 1))),
    "drop_stale/delayed": stale(delayed(1, 2)),
    "all": ALL,
    "row_mean/all": both(BY_ROW, ALL),
    "late/chain/all": both(LATE_MEAN, chained(ALL)),
    "mean/drop_stale/all": both(MEAN, stale(ALL)),
    "latest": LATEST,
    "mean/latest": both(MEAN, LATEST),
    "ringleader": RINGLEADER,
    "late/ringleader": both(LATE_MEAN, RINGLEADER),
    "mean/chain/ringleader": both(MEAN, chained(RINGLEADER)),
    "mean/mean": both(MEAN, MEAN),
    "row_mean/chain/row_mean": both(BY_ROW, chained(BY_ROW)),
    "drop_stale/chain/mean": stale(chained(MEAN)),
    "mean/skip_spikes": both(
        MEAN, (lambda tx: gx.skip_spikes(tx, sigmas=1e6), ALONE[1])
    ),
    "row_mean/masked/delayed": both(
        BY_ROW,
        (
            lambda tx: optax.masked(gx.delayed(tx, 1), {"a": True, "b": True}),
            delayed(1, 1)[1],
        ),
    ),
    "delayed/all": both(delayed(1, 1), ALL),
    "mean/all/delayed": both(MEAN, both(ALL, delayed(1, 2))),
    "row_mean/mean/ringleader": both(BY_ROW, both(MEAN, RINGLEADER)),
    "late/delayed/row_mean": both(LATE_MEAN, both(delayed(1, 1), BY_ROW)),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", NESTED)
def test_a_leaf_without_gradients_in_gates_in_gates(name):
    make, plain = NESTED[name]
    how = ["apply", "update"][[*NESTED].index(name) % 2]
    tx = optax.with_extra_args_support(make(sgd()))
    start = {"a": np.array([1.0, 2.0]), "b": np.array([-2.0, 0.5])}
    innermost = Sgd(start)
    oracle = plain(innermost)

    @jax.jit
    def step(params, state, grads, worker):
        extra = {"worker": worker, "local_step": jnp.int32(10**6)}
        return stepped(tx, grads, state, params, how, **extra)

    params = jax.tree.map(jnp.float32, start)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    rng = np.random.default_rng(len(name))
    for _ in range(PUSHES):
        leaves, worker = ["a", "b", "ab", "a"][rng.integers(4)], rng.integers(WORKERS)
        grads = {leaf: rng.standard_normal(2) for leaf in leaves}
        oracle.push(grads, worker=worker)
        given = {k: jnp.float32(grads[k]) if k in grads else None for k in start}
        params, state = step(params, state, given, np.int32(worker))
        for leaf, expected in innermost.params.items():
            np.testing.assert_allclose(params[leaf], expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.map(jax.typeof, state) == types
    assert innermost.count > 2


METHODS = ["all", "latest", "ringleader"]


def worker_step(number, method):
    tx = gx.worker_mean(optax.sgd(0.5), number, method=method)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, worker, local_step):
        extra = {"worker": worker, "local_step": local_step}
        return gx.apply_gradients(tx, grads, state, params, **extra)

    return tx, step


@pytest.mark.every
@pytest.mark.parametrize(("number", "method"), half([1, 2, 4], METHODS))
def test_the_mean_over_workers_is_that_of_lists_of_all_pushes(number, method):
    tx, step = worker_step(number, method)
    params, rng = jnp.zeros(2), np.random.default_rng(number)
    state, expected, before, history = tx.init(params), np.zeros(2), 0, []
    for _ in range(30):
        # How late each push is, counted from the oracle's step before it.
        worker, seen = rng.integers(number), max(0, before - rng.integers(3))
        history.append((rng.standard_normal(2), worker, seen))
        played = oracles.worker_mean(history, number, method)
        *_, (acts, before, stale) = played
        grad = jnp.float32(history[-1][0])
        params, state = step(params, state, grad, np.int32(worker), np.int32(seen))
        expected = expected if acts is None else expected - 0.5 * acts
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-5)
        assert (state.global_step, state.stale_count) == (before, stale)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_does_not_exist_reaches_nothing(method):
    tx, step = worker_step(2, method)
    params = jnp.ones(3)
    params, state = step(params, tx.init(params), jnp.ones(3), np.int32(0), np.int32(0))
    kept = jax.tree.map(np.array, (params, state))
    for worker, poison in ((2, np.nan), (-1, np.inf)):
        bad = jnp.full(3, poison)
        params, state = step(params, state, bad, np.int32(worker), np.int32(0))
    assert state.stale_count == 2
    chex.assert_trees_all_equal((params, state._replace(stale_count=0)), kept)


@pytest.mark.every
@pytest.mark.parametrize("method", METHODS)
def test_a_row_forgets_its_old_gradient_unless_it_is_a_part_of_the_mean(method):
    """Not even inf stays. The mean of the newest is never computed anew."""
    tx, step = worker_step(2, method)
    state = tx.init(jnp.zeros(3))
    first, second = {
        "all": ((0, 1), (0, 1)),
        "latest": ((0, 1), (0, 1, 0)),
        "ringleader": ((0, 1, 0), (0, 1)),
    }[method]
    for number, workers in ((jnp.inf, first), (1.0, second)):
        params, grads = jnp.zeros(3), jnp.full(3, number)
        for worker in workers:
            seen = state.global_step + 0  # The step donates the state.
            params, state = step(params, state, grads, np.int32(worker), seen)
    wanted = np.nan if method == "latest" else -0.5
    np.testing.assert_array_equal(params, np.full(3, wanted))
