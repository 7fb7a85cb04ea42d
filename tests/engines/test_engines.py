"""The engines, on a problem small enough to count by hand.

Every gradient is 1 and every step subtracts it, so the parameters at a global step are
minus that step. On threads the tests assert counts, and nothing about time.
"""

import collections
import dataclasses
import threading
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform.engines import _work


def gradient(params):
    return params, jnp.ones_like(params)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """A model as some libraries define theirs."""

    w: jax.Array

    def __call__(self):
        raise AssertionError("this is no function that gives parameters")


def make_job(mode, durations, pushes=40, max_staleness=2, gradient=gradient):
    """A job whose workers take constant durations; ``backup`` has one backup worker."""
    count = len(durations)
    required = {"async": None, "sync": count, "backup": count - 1}[mode]
    if required is None:
        tx = gx.drop_stale(optax.sgd(1.0), max_staleness)
    else:
        tx = gx.conditional_accumulator(optax.sgd(1.0), required)
    workers = [engines.Worker(gradient, duration=lambda _, d=d: d) for d in durations]
    return engines.Job(jnp.float32(0.0), tx, workers, pushes, required)


def run(engine, job):
    """The pushes and the final parameters and optimizer state."""
    with engine(job) as running:
        return list(running.pushes), *running.server.state().values()


def by_step(pushes):
    """The workers that pushed, by the step they had pulled."""
    workers = collections.defaultdict(list)
    for push in pushes:
        workers[push.local_step].append(push.worker)
    return workers


# What holds for every engine.


@pytest.mark.parametrize("mode", ["async", "sync", "backup"])
def test_every_push_is_accepted_or_dropped(engine, mode):
    pushes, params, state = run(engine, make_job(mode, [1e-3, 1e-3, 10e-3]))
    accepted = sum(push.result.applied for push in pushes)
    if mode == "async":
        assert all(p.result.applied == (p.result.staleness <= 2) for p in pushes)
        assert 0 < accepted < 40
    if mode == "sync":  # Everyone pushes once for each step; the last is not reached.
        everyone = {step: [0, 1, 2] for step in range(13)}
        found = {step: sorted(workers) for step, workers in by_step(pushes).items()}
        assert {step: found[step] for step in everyone} == everyone
    assert len(pushes) == 40
    assert 40 - accepted == state.stale_count
    assert accepted // {"async": 1, "sync": 3, "backup": 2}[mode] == state.global_step
    assert int(params) == -int(state.global_step) < 0
    # Each gradient is of the parameters that were pulled.
    assert all(push.loss == -push.local_step for push in pushes)
    assert {push.norm for push in pushes} == {1.0}


def test_a_function_may_give_the_parameters(engine):
    called = []

    def params():
        called.append(threading.current_thread())
        return jnp.float32(3.0)

    job = make_job("async", [1e-3], max_staleness=0)
    pushes, last, _ = run(engine, job._replace(params=params))
    assert pushes[0].loss == 3.0
    assert last == 3.0 - 40  # A worker that is alone is never late.
    assert len(called) == 1


def test_parameters_that_can_be_called_are_no_function(engine):
    job = make_job("async", [1e-3], gradient=lambda m: (m.w, Module(jnp.float32(1.0))))
    _, last, _ = run(engine, job._replace(params=Module(jnp.float32(3.0))))
    assert last.w == 3.0 - 40


def test_sync_makes_all_wait_for_the_straggler_and_backup_does_not(engine):
    steps = {}
    for mode in ("sync", "backup"):
        pushes, _, state = run(engine, make_job(mode, [4e-3, 4e-3, 4e-3, 40e-3], 80))
        # Worker 3 is always busy, so this is a step's time, in units of its gradients.
        share = sum(push.worker == 3 for push in pushes)
        steps[mode] = int(state.global_step) / share
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
    for pushes in range(1, 18):
        assert len(run(engine, make_job(mode, [0.0] * 4, pushes))[0]) == pushes


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_error_of_a_worker_ends_the_run(engine, mode):
    seen = []

    def failing(params):
        if params <= -3:  # Perhaps no worker sees 3 itself.
            raise ValueError("a bad batch")
        seen.append(params)
        return gradient(params)

    job = make_job(mode, [1e-3] * 3, 10**6, gradient=failing)
    with engine(job) as running, pytest.raises(ValueError, match="a bad batch"):
        list(running.pushes)
    assert seen
    with pytest.raises(RuntimeError, match="closed"):
        running.server.pull()


# Threads.


def test_threads_do_not_start_before_pushes_are_wanted():
    with engines.threads(make_job("async", [1e-3] * 3)) as running:
        assert not any(thread.is_alive() for thread in running.workers.values())


def test_threads_run_at_the_same_time():
    together = threading.Barrier(3, timeout=30)  # Only all three can pass it.

    def meeting(params):
        together.wait()
        return gradient(params)

    pushes, *_ = run(engines.threads, make_job("sync", [0.0] * 3, 6, gradient=meeting))
    assert len(pushes) == 6


def test_a_worker_sleeps_for_the_rest_of_its_duration(monkeypatch):
    # Through `engines.threads`, the test would have to assert times.
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(_work, "time", clock)

    def slow(params):
        now[0] += 0.125
        return gradient(params)

    job = make_job("async", [0.5, 0.0], gradient=slow)
    rests = []
    with gx.ParameterServer(job.params, job.tx) as server:
        for index, worker in enumerate(job.workers):
            work = _work.Gradient(index, 7, worker, server, None).work
            push = work(rests.append)
            result = gx.PushResult(True, 0, index + 1)
            assert push[:6] == (index, 7, index, -index, 1.0, result)
    assert rests == [0.375, 0.0]


# Simulated.


def test_workers_that_wait_go_on_with_the_step():
    pushes, *_ = run(engines.simulated, make_job("backup", [2.0, 3.0, 7.0], 9))
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
