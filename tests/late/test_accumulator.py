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
from gradxform._trees import states
from tests import in_numpy, oracles
from tests.conftest import half

RATE, MOMENTUM, DECAY, LONGEST, WORKERS = 0.1, 0.5, 0.25, 2.0, 2
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
        self.waiting = {}  # The weights of pushes before the last step.
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
            weights = {leaf: [w for w, *_ in held] for leaf, held in self.held.items()}
            self.waiting = {leaf: sum(w) for leaf, w in weights.items()}

    def mean(self, leaf, shape):
        total, by_row = np.zeros(shape), np.zeros(shape)
        for w, factor, g in self.held.pop(leaf, []):
            total += w * factor * np.ma.filled(g, 0) if w else 0
            by_row += w * ~np.ma.getmaskarray(g)
        weight = self.weight + self.waiting.get(leaf, 0)
        n = {"mean": weight, "sum": 1, "row_mean": by_row}[self.reduction]
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
        self.waiting = {}  # The means of former steps that a leaf has not acted on.

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
        now, alone = self.now, {leaf: self.mean(leaf) for leaf in "ab"}
        means = {
            leaf: np.mean([alone[leaf], *self.waiting.get(leaf, [])], axis=0)
            for leaf in "ab"
        }
        self.inner.push({k: means[k] for k in grads}, worker=worker, **extra)
        if self.method == "all":
            self.now = []
            for leaf in "ab":
                if leaf in grads:
                    self.waiting.pop(leaf, None)
                elif any(leaf in g for _, g in now):
                    self.waiting.setdefault(leaf, []).append(alone[leaf])
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
        return total / WORKERS


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
        if "late" in brings:
            extra["late"] = rng.choice([-1, 0, 0, 1, 2, 9])
            bad |= extra["late"] == 9  # Later than each bound.
        if "last" in brings:
            extra["last"] = rng.random() < (0.6 if bad else 0.2)
        if bad:  # It is left out, or weighs nothing. Not even NaN may get through.
            leaf = rng.choice([*grads])
            row = np.flatnonzero(~np.ma.getmaskarray(grads[leaf]).any(-1))[0]
            grads[leaf][row] = np.nan
        given = {"table": None, "b": None} | grads
        given = {k: None if g is None else jnp.float32(g) for k, g in given.items()}
        if kind == "rows":
            given["table"] = as_rows(grads["table"])
        yield grads, given, extra


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "reduction", "how"),
    [  # Two reductions of each weighted gate, one of them by `apply_gradients`.
        (gate, reduction, ["apply", "update"][(i + j) % 3 // 2 ^ i % 2])
        for i, gate in enumerate(GATES)
        for j, reduction in enumerate(("mean", "sum", "row_mean"))
        if (i + j) % 3 == 1 or ("weight" in GATES[gate][-1] and (i + j) % 3)
    ],
)
def test_a_sum_is_that_of_plain_python(gate, reduction, how):
    make, number, options, plain, brings = GATES[gate]
    tx = make(sgd(), number, reduction=reduction, **options)
    start = {"table": np.ones((ROWS, 2)), "b": np.full(2, -2.0)}
    innermost = Sgd(start)
    number = required if callable(number) else number
    oracle = Sum(innermost, number, reduction, **plain)
    step = in_numpy.jit(functools.partial(stepped, tx, how=how))
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
    "late/chain/all": both(LATE_MEAN, chained(ALL)),
    "mean/drop_stale/all": both(MEAN, stale(ALL)),
    "latest": LATEST,
    "mean/latest": both(MEAN, LATEST),
    "ringleader": RINGLEADER,
    "late/ringleader": both(LATE_MEAN, RINGLEADER),
    "mean/chain/ringleader": both(MEAN, chained(RINGLEADER)),
    "row_mean/chain/row_mean": both(BY_ROW, chained(BY_ROW)),
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

    @in_numpy.jit
    def step(params, state, grads, worker):
        extra = {"worker": worker, "local_step": jnp.int32(10**6)}
        read = {k: x for k, x in extra.items() if k in states.words(state)}
        return stepped(tx, grads, state, params, how, **read)

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
@pytest.mark.parametrize(("number", "method"), half([1, 4, 3], METHODS))
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


# Against optax.

PARAMS = {"w": jnp.ones((2, 3)), "none": None, "b": jnp.full(3, -1.0)}
INNER = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 9)),
    "adagrad": lambda: optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
    "novograd": lambda: gx.novograd(0.1, weight_decay=0.01),
}


def pushes(seed, number=12):
    """Pushes of a few steps, some not finite, and how many pushes each step needs."""
    rng = np.random.default_rng(seed)
    grads = {k: rng.standard_normal((number, *PARAMS[k].shape)) for k in ("w", "b")}
    bad = rng.random(number) < 0.2
    grads["b"][bad, rng.integers(3)] = rng.choice([np.nan, np.inf, -np.inf])
    each = rng.integers(1, 5, number)
    if seed % 2:  # Every step needs the same number.
        each[:] = each[0]
    grads = {k: jnp.float32(g) for k, g in grads.items()}
    return {**grads, "none": None}, jnp.int32(each), bad


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("inner", "skip"), half(INNER, [True, False]))
def test_equals_multi_steps(inner, skip):
    """A mean of finite pushes, or a sum of all."""

    @jax.jit
    def trained(grads, each):
        ours = gx.accumulate(
            INNER[inner](),
            lambda step: each[step],
            reduction="mean" if skip else "sum",
            skip_nonfinite=skip,
        )
        theirs = optax.MultiSteps(
            INNER[inner](),
            lambda step: each[step],
            use_grad_mean=skip,
            should_skip_update_fn=optax.skip_not_finite if skip else None,
        )

        def push(carry, grads):
            (p, s), (q, t) = carry
            p, s = gx.apply_gradients(ours, grads, s, p)
            updates, t = theirs.update(grads, t, q)
            return ((p, s), (optax.apply_updates(q, updates), t)), None

        start = (PARAMS, ours.init(PARAMS)), (PARAMS, theirs.init(PARAMS))
        return jax.lax.scan(push, start, grads)[0]

    close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)
    for seed in range(6):
        grads, each, bad = pushes(seed)
        if not skip:
            grads, bad = jax.tree.map(jnp.nan_to_num, grads), 0
            grads = jax.tree.map(lambda g: jnp.clip(g, -9, 9), grads)
        (params, state), (expected, multi) = trained(grads, each)
        close(params, expected)
        counts = state.global_step, state.num_accumulated, state.nonfinite_count
        assert counts == (multi.gradient_step, multi.mini_step, np.sum(bad))
        close(*map(jax.tree.leaves, (state.inner_state, multi.inner_opt_state)))


# Numbers at their ends.


def after(tx, params, *pushes, compiled=True):
    """Parameters and state after these pushes: a gradient, and extra arguments."""
    step = functools.partial(gx.apply_gradients, tx)
    step = jax.jit(step) if compiled else step
    state = jax.jit(tx.init)(params)
    for g, extra in pushes:
        params, state = step(g, state, params, **extra)
    return params, state


WHOLE = optax.sgd(1.0)
SIZES = [1, 3, 12]
# The dtype of gradients, and weights in the proportion of SIZES.
WEIGHTS = {
    "uint8": ("float32", np.array(SIZES, np.uint8)),
    "int64": ("float32", np.array(SIZES, np.int64) * 2**33),
    "huge": ("float32", [2**62, 3 * 2**62, 12 * 2**62]),
    "tiny": ("float32", np.float32(SIZES) * np.float32(2.0**-100)),
    "float64": ("float64", np.float64(SIZES) / 3),
    "float16": ("float16", np.float16(SIZES)),
    "bfloat16": ("bfloat16", SIZES),
    "complex64": ("complex64", SIZES),
    # 2²⁴ + 1 tokens are rounded to 2²⁴ in the sum of weights.
    "large": ("float32", [2**24, 3 * 2**24, 12 * 2**24 + 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_only_the_proportion_of_weights_matters(name):
    dtype, weights = WEIGHTS[name]
    grads = np.array([[1.5, -0.25], [2.0, 8.0], [0.1, 5.0]])
    grads = grads * (1 - 2j) if "c" in dtype else grads
    with jax.enable_x64(dtype == "float64"):
        grads = jnp.asarray(grads, dtype)
        each = [(g, {"weight": w}) for g, w in zip(grads, weights, strict=True)]
        # JAX takes no such whole numbers as arguments of a program.
        small = name not in ("int64", "huge")
        start = jnp.zeros(2, dtype)
        got, state = after(gx.accumulate(WHOLE, 3), start, *each, compiled=small)
        double = dtype == "float64"
        assert (got.dtype, state.total_weight.dtype == "float64") == (dtype, double)
        wide = np.asarray(grads).astype("complex128")
        wanted = -(np.array(SIZES) @ wide) / sum(SIZES)
        rtol = {"float64": 1e-15, "float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 2e-7)
        np.testing.assert_allclose(np.asarray(got).astype(complex), wanted, rtol=rtol)


@pytest.mark.slow
def test_a_weight_of_0_is_nothing_and_one_that_is_wrong_is_nan():
    tx = gx.accumulate(WHOLE, 2)
    push = jax.jit(functools.partial(gx.apply_gradients, tx))
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    for _ in range(2):  # A step of nothing.
        params, state = push(jnp.full(2, jnp.nan), state, params, weight=0.0)
    assert (state.global_step, state.num_accumulated, state.total_weight) == (1, 0, 0)
    np.testing.assert_array_equal(params, [0.0, 0.0])
    for wrong in (jnp.nan, -1.0):
        new, after = push(jnp.ones(2), state, params, weight=wrong)
        new, _ = push(jnp.ones(2), after, new, weight=1.0)
        assert np.isnan(new).all()


@pytest.mark.slow
def test_without_a_weight_a_push_weighs_1():
    pushes = (jnp.float32(6), {"weight": 2}), (jnp.float32(3), {})
    params, state = after(gx.accumulate(WHOLE, 2), jnp.zeros(()), *pushes)
    assert (params, state.total_weight) == (-5.0, 3.0)


@pytest.mark.slow
def test_a_sum_of_half_precision_gradients_is_kept_in_float32():
    tx = gx.conditional_accumulator(WHOLE, 1000)
    params, grad = jnp.zeros(3, jnp.bfloat16), jnp.full(3, 0.01, jnp.bfloat16)

    def body(state, _):
        updates, state = tx.update(grad, state, params, local_step=0)
        return state, updates

    state, updates = jax.lax.scan(body, tx.init(params), length=1000)
    assert state.accumulated.dtype == jnp.float32
    np.testing.assert_array_equal(updates[-1], -grad)
    # The weight is not rounded either.
    tx = gx.conditional_accumulator(
        optax.identity(), 3, max_staleness=4, weight=lambda s: 1 + s / 1024
    )
    state = tx.init(params)._replace(global_step=jnp.int32(4))
    for local_step in (3, 1):
        _, state = tx.update(jnp.ones_like(params), state, local_step=local_step)
    np.testing.assert_array_equal(state.accumulated, np.float32(2 + 4 / 1024))


@pytest.mark.parametrize("bad", [-np.inf, complex(1, np.inf), 3e38 + 3e38j])
def test_a_number_is_finite_in_both_of_its_parts(bad):
    """The absolute value of the last one is inf."""
    tx = gx.accumulate(WHOLE, 1, skip_nonfinite=True)
    params = jnp.zeros(3, jnp.complex64 if isinstance(bad, complex) else jnp.float32)
    _, state = after(tx, params, (params.at[1].set(bad), {}))
    assert state.nonfinite_count == int(not np.isfinite(bad))


def test_a_schedule_says_how_many_make_each_step():
    # optax's schedules give real numbers. Below 1 means 1 in a compiled program.
    schedules = {
        "below 1": (lambda step: jnp.array([0, -7, 2])[step], [0, 1, 3, 5]),
        "real": (optax.linear_schedule(1.5, 3.5, 2), [1, 4]),
        "huge": (lambda step: jnp.uint32(2**32 - 1), []),
    }
    for schedule, steps in schedules.values():
        tx = gx.accumulate(WHOLE, schedule)

        def push(state, grad, tx=tx):
            updates, state = tx.update(grad, state)
            return state, updates

        _, updates = jax.lax.scan(push, tx.init(jnp.zeros(())), jnp.ones(6))
        assert np.flatnonzero(updates).tolist() == steps
        assert set(updates[np.array(steps, int)].tolist()) <= {-1.0}


@pytest.mark.slow
def test_a_number_required_that_shrinks_takes_all_there_are():
    """As in TensorFlow, the mean is over the pushes held, not the number required."""

    @jax.jit
    def push(grad, state, param, number, local_step=0):
        tx = gx.conditional_accumulator(WHOLE, number)
        return gx.apply_gradients(tx, grad, state, param, local_step=local_step)

    param = jnp.float32(0.0)
    state = gx.conditional_accumulator(WHOLE, 9).init(param)
    # A dropped push completes no step.
    for grad, number, local_step in ((1.0, 9, 0), (2.0, 9, 0), (6.0, 2, -1)):
        given = jnp.float32(grad), state, param, jnp.int32(number)
        param, state = push(*given, jnp.int32(local_step))
    assert (param, state.num_accumulated, state.stale_count) == (0.0, 2, 1)
    param, state = push(jnp.float32(6.0), state, param, jnp.int32(2))
    assert (param, state.num_accumulated) == (-3.0, 0)


# What a sum keeps.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dtype", "sums"),
    [("apply", "bfloat16", None), ("update", "float32", "bfloat16")],
)
def test_nothing_of_the_sum_before_reaches_the_next(how, dtype, sums):
    """A NaN in one sum, and leaves that have a gradient, rows, or nothing in turn."""
    tx = gx.accumulate(optax.sgd(0.5), 2, accumulator_dtype=sums)
    rows = gx.IndexedSlices([1, 1], jnp.ones((2, 2), dtype), (3, 2))
    step = jax.jit(functools.partial(stepped, tx, how=how))
    params = {"w": jnp.zeros(4, dtype), "table": jnp.zeros((3, 2), dtype)}
    state = tx.init(params)
    ones = jax.tree.map(jnp.ones_like, params)
    pushed = [(np.nan, None), (1, 2), (None, rows), (None, 1), (4, rows), (None, rows)]
    for number, (w, table) in enumerate(pushed):
        grads = {"w": w if w is None else w * ones["w"], "table": table}
        if isinstance(table, int):
            grads["table"] = table * ones["table"]
        params, state = step(grads, state, params)
        if number == 1:  # The window of the NaN. It is taken out by hand.
            assert np.isnan(params["w"].astype("float32")).all()
            params = {**params, "w": jnp.zeros(4, dtype)}
    # The last sum of w waits. Those of the table are 2, 3 and 4 in its second row.
    got = {k: np.float32(x) for k, x in params.items()}
    np.testing.assert_array_equal(got["w"], np.zeros(4))
    np.testing.assert_array_equal(got["table"][:, 0], [-0.75, -2.25, -0.75])


def test_a_count_that_is_reset_begins_a_new_sum():
    """As in ``optax.MultiSteps``, whose running mean forgets the old one then, too."""
    tx, params = gx.accumulate(WHOLE, 2), jnp.zeros(2)
    _, state = tx.update(jnp.full(2, jnp.inf), tx.init(params), params)
    state = state._replace(num_accumulated=jnp.int32(0))
    for g in (1.0, 3.0):
        updates, state = tx.update(jnp.full(2, g), state, params)
    np.testing.assert_array_equal(updates, [-2.0, -2.0])


def test_an_update_that_the_sum_cannot_hold_is_not_rounded():
    """The sum is bfloat16, so updates in float32 come out in arrays of their own."""
    inner = optax.stateless(lambda u, _: jax.tree.map(lambda x: x + 2**-20, u))
    tx, params = gx.accumulate(inner, 1, accumulator_dtype="bfloat16"), jnp.zeros(2)
    updates, _ = tx.update(jnp.ones(2), tx.init(params), params)
    np.testing.assert_array_equal(updates, np.float32(1 + 2**-20))


@pytest.mark.slow
@pytest.mark.parametrize("old", [400.0, np.nan])
def test_a_norm_sees_nothing_of_the_sum_before(old):
    tx = gx.accumulate(optax.chain(gx.clip_by_global_norm(1.0), WHOLE), 1)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = after(tx, params, ({"a": jnp.array([old]), "b": jnp.ones(1)}, {}))
    grads = {"a": None, "b": jnp.full(1, 0.5)}
    new, _ = gx.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal([new["a"], new["b"]], [[0.0], [-0.5]])


@pytest.mark.slow
def test_on_gpu_the_gradient_of_a_matrix_waits_for_the_sum_before_it():
    """But not that of a table: it may be scattered into its sum."""
    tx = gx.accumulate(optax.sgd(0.1), 4)
    layers = {f"layer {i}": jnp.zeros((256, 256)) for i in range(3)}
    params = layers | {"table": jnp.zeros((2**14, 2)), "bias": jnp.zeros(256)}
    push = jax.jit(functools.partial(gx.apply_gradients, tx))
    traced = push.trace(params, tx.init(params), params)
    for platform, barriers in ("cuda", 2), ("rocm", 2), ("tpu", 0):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        # The zero of an empty sum has one, too.
        found = re.findall("optimization_barrier %.*: tensor<256x256xf32>", program)
        assert len(found) == barriers


# Whose arguments these are.


@pytest.mark.slow
def test_last_and_weight_stay_with_the_outermost_accumulator():
    """An accumulator inside of it counts each mean as one push."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(set(extra))
        return updates, state

    probe = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = gx.accumulate(gx.accumulate(probe, 2), 2)
    state = tx.init(jnp.zeros(()))
    for g, w in ((1.0, 1), (5.0, 3), (7.0, 9)):
        extra = {"weight": w, "last": g == 7, "value": 0.5}
        updates, state = tx.update(jnp.float32(g), state, **extra)
    assert {frozenset(names) for names in seen} == {frozenset({"value"})}
    assert (state.global_step, state.inner_state.num_accumulated) == (2, 0)
    assert updates == (4 + 7) / 2


@pytest.mark.slow
def test_a_gate_around_passes_them_on():
    tx = gx.drop_stale(gx.skip_spikes(gx.accumulate(WHOLE, 5)), 9)
    first = jnp.float32(1), {"weight": 1, "last": False, "local_step": 0}
    last = jnp.float32(5), {"weight": 3, "last": np.True_, "local_step": 0}
    assert after(tx, jnp.zeros(()), first, last)[0] == -4.0


@pytest.mark.slow
def test_delayed_gives_no_older_gradient_the_newest_weight():
    tx = gx.delayed(gx.accumulate(WHOLE, 2), 1)
    state = tx.init(jnp.zeros(()))
    tx.update(jnp.ones(()), state, last=True)
    with pytest.raises(TypeError, match="put the accumulator around delayed"):
        tx.update(jnp.ones(()), state, weight=2)
    around = gx.accumulate(gx.delayed(WHOLE, 1), 2)
    around.update(jnp.ones(()), around.init(jnp.zeros(())), weight=2)


# Bad input.


def update(tx, grads=None, **extra):
    params = jnp.zeros(2)
    state = tx.init(params)
    return tx.update(params if grads is None else grads, state, params, **extra)


def gives(number):
    return lambda: update(gx.accumulate(WHOLE, lambda step: number))


def mean(**extra):
    tx, given = gx.worker_mean(WHOLE, 2, method="all"), {"worker": 0, "local_step": 0}
    given = {k: x for k, x in (given | extra).items() if x is not None}
    return lambda: update(tx, **given)


IN_COUNTS = r"^num_required\(global_step\) must be in \[1, 2147483647\], got "
NO_NUMBER = r"^num_required\(global_step\) must be a real scalar, got "
SUM = functools.partial(gx.conditional_accumulator, WHOLE, 2)
ERRORS = [
    (gives(0), ValueError, IN_COUNTS + "0"),
    (gives(jnp.int32(-1)), ValueError, IN_COUNTS + "-1"),
    (gives(jnp.float32(jnp.nan)), ValueError, IN_COUNTS + "nan"),
    (gives(True), TypeError, NO_NUMBER + "True"),
    (gives(None), TypeError, NO_NUMBER + "None"),
    (lambda: SUM(reduction="max"), ValueError,
     "reduction must be one of 'mean', 'sum', 'row_mean', got 'max'"),
    (lambda: SUM(weight=0.5), TypeError,
     r"weight must be a function of the staleness.*, got 0\.5"),
    (lambda: update(SUM(weight=lambda s: -1), local_step=0), ValueError,
     r"weight\(staleness\) must be in \[0, inf\), got -1"),
    (lambda: update(SUM()), TypeError,
     r"conditional_accumulator needs local_step: pass update\("),
    (lambda: gx.accumulate(WHOLE, 4, axis_name={"w": "x"}), TypeError,
     "axis_name must be a mesh axis, or several"),
    (lambda: update(gx.accumulate(WHOLE, 4, axis_name="data")), ValueError,
     "'data' is neither an axis of a shard_map"),
    (lambda: gx.worker_mean(WHOLE, 2, method="mean"), ValueError,
     "^method must be one of 'all', 'latest', 'ringleader', got 'mean'"),
    (mean(worker=None), TypeError, "^worker_mean needs worker: pass"),
    (mean(local_step=None), TypeError, "^worker_mean needs local_step: pass"),
    (mean(worker=2), ValueError, r"^worker must be in \[0, 2\), got 2"),
    (mean(worker=0.5), TypeError, "^worker must be an integer scalar"),
    (mean(grads=jnp.ones(3)), TypeError,
     "^updates and a row of the table differ at the root"),
    (mean(grads=gx.IndexedSlices([0], jnp.ones(1), (2,))), TypeError,
     "^worker_mean changes every row"),
    (lambda: jax.jit(lambda n: gx.worker_mean(WHOLE, n, method="all"))(2), TypeError,
     "^num_workers is a shape.*static_args"),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.every
@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"weight": -1}, ValueError, r"weight must be in \[0, inf\), got -1"),
        ({"weight": jnp.float32(-0.5)}, ValueError, r"weight must be in .* got -0\.5"),
        ({"weight": np.nan}, ValueError, r"weight must be in \[0, inf\), got nan"),
        ({"weight": np.inf}, ValueError, r"weight must be in \[0, inf\), got inf"),
        ({"weight": 10**400}, ValueError, "weight must be .*, got 10000"),
        ({"weight": jnp.ones(3)}, TypeError, "weight must be a real scalar, got Array"),
        ({"weight": True}, TypeError, "weight must be a real scalar, got True"),
        ({"weight": 1j}, TypeError, "weight must be a real scalar, got 1j"),
        ({"weight": "3"}, TypeError, "weight must be a real scalar, got '3'"),
        ({"last": 1}, TypeError, "last must be a bool, or an array bool.., got 1"),
        ({"last": jnp.zeros(2, bool)}, TypeError, "last must be a bool"),
        ({"last": "yes"}, TypeError, "last must be a bool, .* got 'yes'"),
    ],
)
def test_what_is_no_weight_and_no_last(extra, error, message):
    for make in (gx.accumulate, gx.conditional_accumulator):
        for how in ("apply", "update"):
            tx, p = make(WHOLE, 2), jnp.zeros(3)
            with pytest.raises(error, match=message):
                stepped(tx, p, tx.init(p), p, how, local_step=0, **extra)


def test_a_vector_and_a_number_are_refused_while_tracing_too():
    step = gx.minimize(lambda w: w, gx.accumulate(WHOLE, 2), donate=False)
    params = jnp.zeros(())
    state = gx.accumulate(WHOLE, 2).init(params)
    with pytest.raises(TypeError, match="weight must be a real scalar"):
        step(params, state, weight=jnp.ones(2))
    with pytest.raises(TypeError, match="last must be a bool"):
        step(params, state, last=jnp.int32(1))


@pytest.mark.every
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "around",
    [
        lambda tx: gx.accumulate(tx, 2),
        lambda tx: gx.conditional_accumulator(tx, 2),
        lambda tx: gx.worker_mean(tx, 2, method="latest"),
        lambda tx: gx.delayed(tx, 1),
    ],
    ids=["accumulate", "conditional_accumulator", "worker_mean", "delayed"],
)
def test_lookahead_goes_around_gates_that_keep_gradients(around):
    """As it takes those of ``params.fast`` alone, there is no room for them."""
    pair = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
    with pytest.raises(TypeError, match="put it around this transformation"):
        around(optax.lookahead(optax.sgd(1.0), 2, 0.5)).init(pair)


@pytest.mark.usefixtures("standard_promotion")
def test_lookahead_around_micro_batches():
    tx = optax.lookahead(gx.accumulate(WHOLE, 2), 4, 0.5)
    pair = optax.LookaheadParams.init_synced(jnp.zeros(2))
    state = tx.init(pair)
    for _ in range(4):
        updates, state = tx.update(jnp.ones(2), state, pair)
        pair = gx.apply_updates(pair, updates)
    # Two steps of 1. The slow parameters go half of the way.
    assert pair.slow.tolist() == pair.fast.tolist() == [-1.0, -1.0]


def test_weights_of_leaves_have_no_8_bits():
    """A mean is divided by them; here there are as many as entries in a leaf."""
    tx = gx.low_bit_state(gx.accumulate(WHOLE, 2), min_size=64, block_size=64)
    params = [jnp.zeros(64)] * 64
    state = tx.init(params).inner_state
    assert state.accumulated[0].dtype == "int8"
    assert (state.leaf_weights.dtype, state.carried.dtype) == ("float32", "float32")
