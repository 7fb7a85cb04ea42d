"""Gates inside of sums, against plain Python: a leaf may lack its gradient at any push.

The classes here know a gradient as a dict of numbers, without a key for a leaf that has
none. In a sum, a ring or a table it counts as zero, and it is not stepped: what the sum
or the ring holds for it waits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.conftest import half
from tests.late.test_one_reduction import stepped

RATE, MOMENTUM, DECAY, LONGEST, WORKERS = 0.1, 0.5, 0.25, 0.5, 2


def sgd():
    return optax.chain(
        gx.clip_by_global_norm(LONGEST),
        optax.add_decayed_weights(DECAY),
        optax.sgd(lambda count: RATE / (1 + count), momentum=MOMENTUM),
    )


class Sgd:
    """The optimizer inside of everything, and its parameters."""

    def __init__(self, params):
        self.params, self.count = dict(params), 0
        self.trace = dict.fromkeys(params, 0.0)

    def push(self, grads, worker):
        del worker
        norm = np.sqrt(sum(g**2 for g in grads.values()))
        scale = LONGEST / max(norm, LONGEST)
        for leaf, g in grads.items():
            decayed = g * scale + DECAY * self.params[leaf]
            self.trace[leaf] = MOMENTUM * self.trace[leaf] + decayed
            self.params[leaf] -= RATE / (1 + self.count) * self.trace[leaf]
        self.count += 1


class Delayed:
    def __init__(self, inner, delays):
        self.inner, self.delays, self.count = inner, delays, 0
        self.rings = {leaf: [0.0] * d for leaf, d in delays.items()}

    def push(self, grads, worker):
        due = dict(grads)
        for leaf, g in grads.items():
            if d := self.delays[leaf]:
                at = self.count % d
                due[leaf], self.rings[leaf][at] = self.rings[leaf][at], g
        if self.count >= max(self.delays.values()):
            self.inner.push(due, worker)
        self.count += 1


class Sum:
    def __init__(self, inner, number, by_row=False):
        self.inner, self.number, self.by_row = inner, number, by_row
        self.held, self.count = {}, 0

    def push(self, grads, worker):
        self.count += 1
        for leaf, g in grads.items():
            self.held.setdefault(leaf, []).append(g)
        if self.count < self.number:
            return
        lists = {leaf: self.held.pop(leaf) for leaf in grads}
        divisors = {k: len(v) if self.by_row else self.number for k, v in lists.items()}
        self.inner.push({k: sum(v) / divisors[k] for k, v in lists.items()}, worker)
        self.count = 0


class WorkerMean:
    def __init__(self, inner, method):
        self.inner, self.method = inner, method
        self.now, self.later, self.stepped = [], [], set()  # (worker, grads)
        self.waiting = {}

    def push(self, grads, worker):
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
        self.inner.push({leaf: means[leaf] for leaf in grads}, worker)
        if self.method == "all":
            self.now = []
            self.waiting = {k: x for k, x in means.items() if k not in grads}
        if self.method == "ringleader":
            self.stepped.add(worker)
            if len(self.stepped) == WORKERS:
                self.now, self.later, self.stepped = self.later, [], set()

    def mean(self, leaf):
        total = 0
        for worker in range(WORKERS):
            own = [g.get(leaf, 0.0) for i, g in self.now if i == worker]
            if own:
                total += own[-1] if self.method == "latest" else sum(own) / len(own)
        return total / WORKERS + self.waiting.get(leaf, 0.0)


def worker_mean(method):
    return (
        lambda tx: gx.worker_mean(tx, WORKERS, method=method),
        lambda inner: WorkerMean(inner, method),
    )


def delayed(a, b):
    delays = {"a": a, "b": b}
    return lambda tx: gx.delayed(tx, delays), lambda inner: Delayed(inner, delays)


def chained(gate):
    """Inside of a chain, whose other link changes nothing."""
    return lambda tx: optax.chain(optax.clip(1e6), gate[0](tx)), gate[1]


def stale(gate):
    return lambda tx: gx.drop_stale(gate[0](tx), 10**6), gate[1]


def masked(gate):
    return lambda tx: optax.masked(gate[0](tx), {"a": True, "b": True}), gate[1]


def both(around, inside):
    return lambda tx: around[0](inside[0](tx)), lambda inner: around[1](
        inside[1](inner)
    )


MEAN = lambda tx: gx.accumulate(tx, 2), lambda inner: Sum(inner, 2)
BY_ROW = (
    lambda tx: gx.accumulate(tx, 2, reduction="row_mean"),
    lambda inner: Sum(inner, 2, by_row=True),
)
INSIDE = {
    "delayed-1": delayed(1, 1),
    "delayed-2": delayed(2, 2),
    "delayed-3-0": delayed(3, 0),
    "delayed-1-2": delayed(1, 2),
    "all": worker_mean("all"),
    "latest": worker_mean("latest"),
    "ringleader": worker_mean("ringleader"),
    "mean": MEAN,
    "row_mean": BY_ROW,
    "skip_spikes": (lambda tx: gx.skip_spikes(tx, sigmas=1e6), lambda inner: inner),
    "chain-delayed": chained(delayed(2, 1)),
    "chain-all": chained(worker_mean("all")),
    "chain-ringleader": chained(worker_mean("ringleader")),
    "chain-mean": chained(MEAN),
    "chain-row_mean": chained(BY_ROW),
    "masked-delayed": masked(delayed(2, 1)),
    "drop_stale-delayed": stale(delayed(1, 2)),
    "drop_stale-all": stale(worker_mean("all")),
    "drop_stale-chain-mean": stale(chained(MEAN)),
    "delayed-all": both(delayed(1, 1), worker_mean("all")),
    "all-delayed": both(worker_mean("all"), delayed(1, 2)),
    "mean-ringleader": both(MEAN, worker_mean("ringleader")),
    "delayed-mean": both(delayed(1, 1), BY_ROW),
}
AROUND = {
    "alone": (lambda tx: tx, lambda inner: inner),
    "drop_stale": (lambda tx: gx.drop_stale(tx, 10**6), lambda inner: inner),
    "accumulate": MEAN,
    "row_mean": BY_ROW,
    "conditional": (
        lambda tx: gx.conditional_accumulator(tx, 2),
        lambda inner: Sum(inner, 2),
    ),
}
PUSHES = 40


def draw(seed):
    """Pushes of two workers; each has a gradient for one leaf at least."""
    rng = np.random.default_rng(seed)
    for _ in range(PUSHES):
        leaves = ["a", "b", "ab", "a"][rng.integers(4)]
        yield {leaf: rng.standard_normal() for leaf in leaves}, rng.integers(WORKERS)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("inside", "around", "how"),
    [
        (inside, around, ["apply", "update"][number % 2])
        for number, (inside, around) in enumerate(half(list(INSIDE), list(AROUND)))
    ],
)
def test_a_leaf_without_gradients_in_a_gate_in_a_sum(inside, around, how):
    tx = optax.with_extra_args_support(AROUND[around][0](INSIDE[inside][0](sgd())))
    start = {"a": 1.0, "b": -2.0}
    innermost = Sgd(start)
    oracle = AROUND[around][1](INSIDE[inside][1](innermost))

    @jax.jit
    def step(params, state, grads, worker):
        extra = {"worker": worker, "local_step": jnp.int32(10**6)}
        return stepped(tx, grads, state, params, how, **extra)

    params = jax.tree.map(jnp.float32, start)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for grads, worker in draw(seed=len(inside)):
        oracle.push(grads, worker)
        given = {
            leaf: jnp.float32(grads[leaf]) if leaf in grads else None for leaf in start
        }
        params, state = step(params, state, given, np.int32(worker))
        for leaf, expected in innermost.params.items():
            np.testing.assert_allclose(params[leaf], expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.map(jax.typeof, state) == types
    assert innermost.count > 2
