"""What a user gives to an engine, and what a run makes of it.

As a rule every gradient is 1 and every step subtracts it, so the parameters at a global
step are minus that step. On threads the tests assert counts, and nothing about time.
"""

import collections
import dataclasses
import itertools
import threading
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform.engines import _work
from tests.engines.jobs import (
    SGD,
    assert_in_order,
    by_worker,
    ended,
    fails,
    list_all,
    make_job,
    ones,
    threads_of,
    worker,
)

# Asynchronous, synchronous, and with one backup worker.


def job_of(mode, durations, pushes=40, max_staleness=2):
    """Workers that take constant durations."""
    required = {"async": None, "sync": 0, "backup": -1}[mode]
    tx = gx.drop_stale(SGD, max_staleness)
    if required is not None:
        tx, required = None, len(durations) + required
    return make_job([worker(seconds=d) for d in durations], pushes, tx, required)


def by_step(pushes):
    """The workers that pushed, by the step they had pulled."""
    workers = collections.defaultdict(list)
    for push in pushes:
        workers[push.local_step].append(push.worker)
    return workers


@pytest.mark.parametrize("mode", ["async", "sync", "backup"])
def test_every_push_is_accepted_or_dropped(engine, mode):
    pushes, state, _ = ended(engine, job_of(mode, [1e-3, 1e-3, 10e-3]))
    params, state = state.values()
    accepted = sum(push.result.applied for push in pushes)
    if mode == "async":
        assert all(p.result.applied == (p.result.staleness <= 2) for p in pushes)
        assert 0 < accepted < 40
    if mode == "sync":  # Everyone pushes once for each step; the last is not reached.
        found = {step: sorted(workers) for step, workers in by_step(pushes).items()}
        assert [found[step] for step in range(13)] == [[0, 1, 2]] * 13
    assert len(pushes) == 40
    assert 40 - accepted == state.stale_count
    assert accepted // {"async": 1, "sync": 3, "backup": 2}[mode] == state.global_step
    assert int(params) == -int(state.global_step) < 0
    # Each gradient is of the parameters that were pulled.
    assert all(push.loss == -push.local_step for push in pushes)
    assert {push.norm for push in pushes} == {1.0}


@pytest.mark.slow
@pytest.mark.quick_case("simulated")
def test_sync_makes_all_wait_for_the_straggler_and_backup_does_not(engine):
    steps = {}
    for mode in ("sync", "backup"):
        pushes, state, _ = ended(engine, job_of(mode, [4e-3, 4e-3, 4e-3, 40e-3], 80))
        # Worker 3 is always busy, so this is a step's time, in units of its gradients.
        steps[mode] = int(state["state"].global_step) / by_worker(pushes)[3]
    assert steps["sync"] == 1
    assert steps["backup"] > 2  # It is 10 on a quiet machine.
    # With a backup worker, what the slow one pushes late is dropped.
    dropped = [push.worker for push in pushes if not push.result.applied]
    accepted = [push.worker for push in pushes if push.result.applied]
    assert dropped.count(3) > len(dropped) / 2
    assert accepted.count(3) < len(accepted) / 10
    # Nobody pushes twice for one step.
    assert all(len(set(ws)) == len(ws) for ws in by_step(pushes).values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "backup"])
def test_a_step_that_is_never_completed_does_not_hang(engine, mode):
    for pushes in range(1, 10):
        assert len(list_all(engine, job_of(mode, [0.0] * 4, pushes))) == pushes


def test_workers_that_wait_go_on_with_the_step():
    pushes = list_all(engines.simulated, job_of("backup", [2.0, 3.0, 7.0], 9))
    assert [(p.worker, p.local_step, *p.result[:3]) for p in pushes] == [
        (0, 0, True, 0, 0),  # At 2; waits.
        (1, 0, True, 0, 1),  # At 3, completes the step: both pull.
        (0, 1, True, 0, 1),  # At 5.
        (1, 1, True, 0, 2),  # At 6.
        (2, 0, False, 2, 2),  # At 7; has nothing to wait for.
        (0, 2, True, 0, 2),  # At 8.
        (1, 2, True, 0, 3),  # At 9.
        (0, 3, True, 0, 3),  # At 11.
        (1, 3, True, 0, 4),  # At 12, before the next of worker 2 at 14.
    ]


def test_threads_run_at_the_same_time_and_not_before_pushes_are_wanted():
    together = threading.Barrier(3, timeout=30)  # Only all three can pass it.
    meeting = worker(lambda params: (together.wait(), ones(params))[1])
    with engines.threads(make_job([meeting] * 3, 6, required=3)) as run:
        assert not any(thread.is_alive() for thread in threads_of(run))
        assert len(list(run.pushes)) == 6


def test_a_worker_sleeps_for_the_rest_of_its_duration(monkeypatch):
    # Through `engines.threads`, the test would have to assert times.
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(_work, "time", clock)

    def slow(params):
        now[0] += 0.125
        return ones(params)

    rests = []
    with gx.ParameterServer(jnp.float32(0), gx.drop_stale(SGD, 2)) as server:
        for index, seconds in enumerate((0.5, 0.0)):
            work = _work.WorkerGradient(
                index, 7, worker(slow, None, seconds), server, None
            )
            push = work.work(rests.append)
            result = gx.PushResult(True, 0, index + 1)
            assert push[:6] == (index, 7, index, -index, 1.0, result)
    assert rests == [0.375, 0.0]


# Parameters.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A model as some libraries define theirs."""

    w: jax.Array

    def __call__(self):
        raise AssertionError("this is no function that gives parameters")


def test_a_function_may_give_the_parameters(engine):
    called = []
    job = make_job(1, 40, gx.drop_stale(SGD, 0))
    pushes, state, _ = ended(
        engine, job._replace(params=lambda: called.append(0) or jnp.float32(3.0))
    )
    assert pushes[0].loss == 3.0
    assert state["params"] == 3.0 - 40  # A worker that is alone is never late.
    assert called == [0]
    # What can be called is no function if it is a tree.
    job = job._replace(params=Module(jnp.float32(3.0)))
    assert ended(engine, job)[1]["params"].w == 3.0 - 40


@pytest.mark.slow
def test_any_optimizer_and_any_tree_will_do(engine, standard_promotion):
    params = {"w": jnp.ones((3, 2)), "half": jnp.ones(2, jnp.bfloat16), "none": None}

    @jax.jit
    @jax.value_and_grad
    def gradient(p, x):
        return jnp.sum((x @ p["w"]) ** 2) + jnp.sum(p["half"].astype(float) ** 2)

    workers = [worker(gradient, lambda _: (jnp.eye(3),))]
    job = make_job(workers, 5, optax.sgd(0.1, momentum=0.5), params=params)
    pushes, _, run = ended(engine, job)
    losses = [push.loss for push in pushes]
    assert run.counts()[:7] == (5, 5, 0, 0, 0, 0, 0)
    assert run.server.stats().accepted == 5
    assert len({*losses}) == 5
    assert losses == sorted(losses, reverse=True)


# Minibatches, rows, extra arguments.


def test_each_number_is_drawn_once_and_in_order(engine):
    drawn = collections.defaultdict(list)

    def make_worker(index):
        def batch(number):
            drawn[index].append(number)
            return (np.float32(100 * index + number),)

        return worker(lambda params, x: (x, jnp.ones_like(params)), batch)

    pushes = list_all(engine, make_job([make_worker(index) for index in range(3)]))
    assert len(pushes) == 20
    assert all(push.loss == 100 * push.worker + push.number for push in pushes)
    assert_in_order(pushes)
    for index, count in by_worker(pushes).items():
        assert drawn[index][:count] == [*range(count)]


@pytest.mark.slow
def test_rows_of_a_table_are_trained_as_the_whole_table_is(engine):
    table = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    target = np.float32([1.0, -1.0, 2.0, 0.5])

    def loss(params, ids):
        return jnp.mean((gx.lookup(params["table"], ids) @ target - params["b"]) ** 2)

    def batch(number):
        return (np.random.default_rng(number).integers(50, size=8),)

    sparse, seen = jax.jit(gx.value_and_grad(loss, tables=("table",))), set()

    def watched(params, ids):
        seen.add(type(params["table"]))
        return sparse(params, ids)

    params = {"table": jnp.asarray(table), "b": jnp.zeros(())}
    ends = []
    for each in (
        worker(watched, batch, rows=lambda ids: {"table": ids}),
        worker(jax.jit(jax.value_and_grad(loss)), batch),
    ):
        job = make_job([each], 25, gx.adagrad(0.1), params=params)
        pushes, state, _ = ended(engine, job)
        ends.append((state["params"], [push.norm for push in pushes]))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-6)
    assert seen == {gx.TableRows}
    assert not np.array_equal(ends[0][0]["table"], table)


@pytest.mark.slow
def test_a_transformation_gets_its_extra_arguments(engine):
    tx = gx.drop_stale(optax.chain(gx.compensate_delay(1.0), optax.sgd(0.1)), 10)
    extra = lambda params, x: {"worker_params": params}  # noqa: E731
    gradient = jax.jit(jax.value_and_grad(lambda w, x: (w - x) ** 2))
    given = worker(gradient, lambda _: (jnp.float32(1.0),), extra=extra)
    pushes, state, run = ended(engine, make_job([given] * 2, 10, tx))
    assert len(pushes) == run.counts().accepted == 10
    assert 0.2 < state["params"] < 1.0
    job = make_job([given._replace(extra=None)], 10, tx)
    fails(engine, job, TypeError, "worker_params")


def test_a_word_of_a_worker_that_nobody_reads_ends_the_run(engine):
    given = worker(extra=lambda params: {"wieght": 2.0})
    job = make_job([given], 4, gx.accumulate(SGD, 2))
    match = r"nobody reads the keyword 'wieght'.*Did you mean 'weight'\?"
    error, _ = fails(engine, job, TypeError, match)
    assert error.__notes__[-1] == "Raised by worker 0, for its gradient 0."


@pytest.mark.every
@pytest.mark.parametrize("own", [False, True])
def test_a_gate_gets_the_loss_of_each_push(own):
    """The tenth loss is a spike, though its gradient is like the others."""

    def gradient(params, n):
        return 100.0 if n == 9 else 1.0 + 0.01 * (n % 3), jnp.ones_like(params)

    extra = (lambda params, number: {"value": jnp.float32(1.0)}) if own else None
    given = worker(gradient, lambda number: (number,), extra=extra)
    tx = gx.skip_spikes(SGD, window=8)
    pushes = list_all(engines.simulated, make_job([given], 12, tx))
    assert [p.number for p in pushes if not p.result.applied] == [9] * (not own)


def test_an_extra_argument_of_a_worker_is_not_lost():
    """The wrapper between the gates passes none on."""
    gate = gx.accumulate(optax.sgd(0.1), 2)

    def update(updates, state, params=None):
        return gate.update(updates, state, params)

    inner = optax.GradientTransformation(gate.init, update)
    given = worker(extra=lambda params: {"weight": 2.0})
    job = make_job([given], 4, gx.drop_stale(inner, 1))
    match = "weight is for a wrapper inside of test_an"
    fails(engines.simulated, job, TypeError, match)


@pytest.mark.slow
def test_a_transformation_without_extra_arguments_is_compiled_once(standard_promotion):
    """Each push has another loss, and a push by hand has none."""
    traced = []

    def update(updates, state, params=None):
        traced.append(updates)
        return updates, state

    given = worker(lambda w, n: (float(n), -jnp.ones_like(w)), lambda n: (n,))
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with engines.simulated(make_job([given], 9, tx)) as run:
        next(run.pushes)
        first = len(traced)
        pushes = [*run.pushes]
        assert len(traced) == first
        params, step = run.server.pull()
        assert run.server.push(jnp.ones_like(params), step).applied
        np.testing.assert_allclose(run.server.pull()[0], params + 1)
    assert [push.loss for push in pushes] == [*range(1, 9)]


@pytest.mark.slow
def test_the_norm_is_that_of_the_gradients_before_a_clip(engine):
    grads = {"a": np.float32([3.0, 4.0]), "b": np.float32([12.0])}
    params = jax.tree.map(jnp.zeros_like, grads)
    given = worker(lambda params: (0.0, jax.tree.map(jnp.asarray, grads)))
    tx = optax.chain(gx.clip_by_global_norm(1.0), SGD)
    pushes, state, _ = ended(engine, make_job([given], 3, tx, params=params))
    assert [push.norm for push in pushes] == [13.0] * 3
    assert np.allclose(state["params"]["b"], -3 * 12 / 13)


# What cannot be.


def deleted(params):
    _, grads = ones(params)
    grads.delete()
    return 1.0, grads


def in_pieces(params):
    yield


GIVE = r"^gradient: it must give .*"
OF_GRAD = r"a function from jax\.grad"
WITH_AUX = jax.value_and_grad(lambda w: (w**2, w), has_aux=True)
RESULTS = [
    (lambda p: None, TypeError, rf"{GIVE}got a NoneType: {OF_GRAD}"),
    (lambda p: p, TypeError, rf"{GIVE}got float32\[\]: {OF_GRAD}"),
    (lambda p: (0.0, None, p), TypeError, rf"{GIVE}got a tuple of 3: {OF_GRAD}"),
    (lambda p: {"a": 0.0, "b": p}, TypeError, rf"{GIVE}got a dict of 2: {OF_GRAD}"),
    # As jax.grad gives it, of two parameters.
    (
        lambda p: (jnp.ones(3), p),
        TypeError,
        rf"{GIVE}got float32\[3\] as the loss: take its mean, .*A{OF_GRAD[1:]}",
    ),
    (lambda p: (np.ones(1), p), TypeError, rf"{GIVE}got float64\[1\] as the loss"),
    (lambda p: (jnp.complex64(1j), p), TypeError, rf"{GIVE}got complex64\[\] as the"),
    (lambda p: ([1.0], p), TypeError, rf"{GIVE}got a list of 1 as the loss: take its"),
    (WITH_AUX, TypeError, "leave has_aux out"),
    (in_pieces, TypeError, rf"{GIVE}\(loss, grads\)"),
    (deleted, RuntimeError, "grads has a deleted array at the root"),
    (lambda p: (1.0, "x"), TypeError, "grads has 'x' at the root, which is no arr"),
]


@pytest.mark.every
@pytest.mark.parametrize(("gradient", "error", "match"), RESULTS)
def test_a_result_without_loss_and_gradients_is_an_error(gradient, error, match):
    fails(engines.simulated, make_job([worker(gradient)]), error, match)


def test_each_engine_checks_what_it_is_given(engine):
    for gradient, error, match in RESULTS[4::6]:
        fails(engine, make_job([worker(gradient)]), error, match)
    bare = make_job([worker(batch=lambda number: jnp.ones(1))])
    fails(engine, bare, TypeError, r"batch: it must give a tuple, .*: return")
    for change in ({"pushes": 0}, {"pushes": 2.5}, {"required": 0}, {"pace": 3}):
        (name,) = change
        job = make_job()._replace(**change)
        fails(engine, job, (TypeError, ValueError), f"^{name} must be")
    for workers, required in ((1, 2), (0, None)):
        match = rf"workers: a step needs {required or 1}, got {workers}"
        fails(engine, make_job(workers, required=required), ValueError, match)
    no_worker = (
        r"workers: worker {} must be an engines\.Worker, got .*engines\.Worker\("
    )
    for workers, match in (
        ([ones], no_worker.format(0)),
        ([worker(), ones], no_worker.format(1)),
        (worker(), no_worker.format(0)),
        (3, "workers must be a sequence of engines"),
        (ones, "workers must be a sequence of engines"),
    ):
        fails(engine, make_job()._replace(workers=workers), TypeError, match)
    with engine(make_job()) as run:
        with pytest.raises(TypeError, match=no_worker.format(1)):
            run.add(ones)
        assert by_worker(run.pushes) == {0: 20}


@pytest.mark.every
@pytest.mark.parametrize("loss", [1.5, np.float32(1.5), np.float64(1.5), 2, True])
def test_any_number_is_a_loss(loss):
    given = worker(lambda params: [loss, jnp.ones_like(params)])
    pushes = list_all(engines.simulated, make_job([given], 2))
    assert [push.loss for push in pushes] == [loss] * 2


def test_a_worker_without_a_row_ends_the_run(engine):
    tx = gx.worker_mean(SGD, 2, method="latest")
    match = r"^worker must be in \[0, 2\), got 2"
    error, _ = fails(engine, make_job(3, tx=tx), ValueError, match)
    assert error.__notes__ == ["Raised by worker 2, for its gradient 0."]
    shares = worker(extra=lambda params: {"worker": 1})
    with engine(make_job([worker(), worker(), shares], tx=tx)) as run:
        assert run.add(shares) == 3
        assert all(push.result.applied for push in run.pushes)


# Durations.


@pytest.mark.parametrize(
    ("given", "error"),
    [
        *((x, ValueError) for x in (-5, float("nan"), jnp.float32(-0.5))),
        *((x, TypeError) for x in ("2", None, np.ones(2), 1j)),
    ],
)
def test_an_impossible_duration_is_an_error(engine, given, error):
    late = worker(duration=lambda n: 1e-3 if n < 3 else given)
    match = r"^duration\(3\) of worker 1, .* must be .*\[0, inf\], got "
    job = make_job([worker(seconds=1e-3), late], 50)
    raised, _ = fails(engine, job, error, match)
    assert raised.__notes__ == ["Raised by worker 1, for its gradient 3."]


@pytest.mark.parametrize("kind", [int, np.float32, jnp.float32, jnp.bfloat16, np.array])
def test_a_duration_may_be_any_real_number(kind):
    given = worker(duration=lambda n: kind(n % 2))
    pushes = list_all(engines.simulated, make_job([given], 4))
    assert {type(push.time) for push in pushes} == {float}
    assert [push.time for push in pushes] == [0.0, 1.0, 1.0, 2.0]
    given = worker(duration=lambda n: kind(0))
    assert len(list_all(engines.threads, make_job([given], 2))) == 2


def test_a_gradient_of_endless_duration_is_waited_for_and_never_comes():
    job = make_job([worker(), worker(seconds=float("inf"))], 10**6)
    with engines.threads(job) as run:
        assert by_worker(itertools.islice(run.pushes, 20)) == {0: 20}
        time.sleep(0.1)  # Perhaps the other one has begun only now.
        assert by_worker(itertools.islice(run.pushes, 20)) == {0: 20}


# Devices.


@pytest.mark.slow
def test_every_device_computes_and_the_parameters_stay(engine):
    devices = jax.local_devices()
    assert len(devices) == 8
    ran, pushed, home = collections.defaultdict(set), set(), devices[5]
    on_threads = engine is engines.threads
    together = threading.Barrier(8 if on_threads else 1, timeout=300)

    @jax.jit
    def value_and_grad(w, x):
        return jax.value_and_grad(lambda w: jnp.sum((w - x) ** 2))(w)

    def make_worker(index):
        def gradient(params, x):
            together.wait()  # All at once, if they can.
            loss, grads = value_and_grad(params, x)
            made = jnp.zeros(())  # An array of its own, on no given device.
            ran[index] |= {*params.devices(), *x.devices(), *made.devices()}
            pushed.update(grads.devices())
            return loss, grads

        batch = lambda _: (np.ones(3, np.float32),)  # noqa: E731
        return worker(gradient, batch, device=devices[index])

    workers, tx, required = [make_worker(index) for index in range(8)], None, None
    if on_threads:  # No worker may be done before the others reach the barrier.
        tx, required = gx.conditional_accumulator(gx.adagrad(0.1), 8), 8
    params = jax.device_put(jnp.zeros(3), home)
    tx = tx or gx.drop_stale(gx.adagrad(0.1), 100)
    job = make_job(workers, 64, tx, required, params=params)
    pushes, state, _ = ended(engine, job)
    assert {push.worker for push in pushes} == {*range(8)}
    assert dict(ran) == {index: {devices[index]} for index in range(8)}
    assert pushed == {*devices}
    assert {d for x in jax.tree.leaves(state) for d in x.devices()} == {home}
    assert jnp.linalg.norm(state["params"] - 1.0) < jnp.linalg.norm(params - 1.0)


def test_rows_of_a_table_are_computed_on_the_worker_s_device(engine):
    home, there = jax.local_devices()[:2]
    seen = set()
    grad = jax.jit(
        gx.value_and_grad(lambda t, ids: gx.lookup(t, ids).sum(), tables=lambda _: True)
    )

    def gradient(table, ids):
        loss, grads = grad(table, ids)
        seen.update(table.values.devices() | grads.values.devices())
        return loss, grads

    batch = lambda number: (np.array([3, 1, 3]),)  # noqa: E731
    given = worker(gradient, batch, rows=lambda ids: {"": ids}, device=there)
    table = jax.device_put(jnp.zeros((5, 2)), home)
    tx = optax.chain(gx.densify(), SGD)
    pushes, state, _ = ended(engine, make_job([given], 2, tx, params=table))
    assert [push.loss for push in pushes] == [0.0, -2.0 * (2 + 1 + 2)]
    assert seen == {there}
    assert state["params"].devices() == {home}
    expected = [[0, 0], [-2, -2], [0, 0], [-4, -4], [0, 0]]
    assert state["params"].tolist() == expected


# Workers that come and go.


def test_workers_come_and_go(engine):
    each = worker(seconds=1e-3)
    with engine(make_job([each] * 2, 10**6)) as run:
        pushes = [next(run.pushes) for _ in range(10)]
        assert {push.worker for push in pushes} <= {0, 1}
        threads = threads_of(run)
        assert run.add(each) == 2
        while pushes[-1].worker != 2:
            pushes.append(next(run.pushes))
        assert pushes[-1].number == 0
        run.remove(0)
        while 0 in run.workers or 0 in {push.worker for push in pushes[-20:]}:
            pushes.append(next(run.pushes))
        assert {push.worker for push in pushes[-20:]} == run.workers.keys() == {1, 2}
        for _ in range(5):  # Some leave before they have begun.
            run.remove(run.add(each))
        assert run.add(each) == 8
        while pushes[-1].worker != 8 or run.workers.keys() != {1, 2, 8}:
            pushes.append(next(run.pushes))
        assert run.counts().pushed == len(pushes)
        if threads:
            threads[0].join(60)
        assert [thread.is_alive() for thread in threads] in ([], [False, True])


def test_no_more_workers_leave_than_a_step_can_miss(engine):
    with engine(make_job(2, required=2)) as run:
        next(run.pushes)
        with pytest.raises(ValueError, match="fewer than the 2 that a step needs"):
            run.remove(1)
        with pytest.raises(ValueError, match="no worker 7"):
            run.remove(7)
        run.add(worker())
        run.remove(1)
        with pytest.raises(ValueError, match="no worker 1"):
            run.remove(1)
        pushes = by_worker(run.pushes)
        # The gradient that it was computing may still come.
        assert pushes.pop(1, 0) <= 1
        assert pushes.keys() == {0, 2}


SEQUENCES = {
    "list": ([(1.0,)], "a list"),
    "generator": (((1.0,) for _ in range(3)), "a generator"),
    "iterator": (iter([(1.0,)]), "a list_iterator"),
    "array": (np.ones(3), "a ndarray"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_batch_that_is_no_function_is_refused_where_the_worker_is_made(name):
    batch, kind = SEQUENCES[name]
    words = (
        rf"batch of an engines\.Worker must be a function, got {kind}\..*next\(stream\)"
    )
    with pytest.raises(TypeError, match=words):
        engines.Worker(lambda params, x: (0.0, params), batch=batch)
    worker = engines.Worker(lambda params, x: (0.0, params))._replace(batch=batch)
    job = engines.Job(jnp.ones(()), optax.sgd(0.1), [worker], 1)
    with pytest.raises(TypeError, match=words), engines.simulated(job) as run:
        next(run.pushes)
    with pytest.raises(TypeError, match=r"duration of an engines\.Worker must be a fu"):
        engines.Worker(lambda params, x: (0.0, params), duration=1.0)
