"""Rules that let workers wait, over Ray's processes."""

import random
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests.conftest import ON_RAY

ray = pytest.importorskip("ray")
pytestmark = ON_RAY


def assert_closed(run):
    """Every gradient that was begun is somewhere, once."""
    counts = run.counts()
    ended = counts.pushed + counts.given_up + counts.unanswered
    assert counts.started == counts.under_way + ended
    return counts


def napping(index):
    """A gradient that sleeps a random while; the first worker is slow."""

    def nap(params):
        time.sleep(random.random() * (0.06 if index == 0 else 0.01))
        return 0.0, jnp.ones_like(params)

    return engines.Worker(nap)


def make_job(batch, pushes, workers, **more):
    tx = optax.sgd(1.0) if batch == 1 else gx.accumulate(optax.sgd(1.0), batch)
    return engines.Job(jnp.float32(0.0), tx, workers, pushes, **more)


@pytest.mark.parametrize(("bound", "batch"), [(0, 1), (2, 3)])
def test_no_push_is_later_than_the_bound(bound, batch):
    begun, rule = [], engines.bounded_staleness(bound, batch)

    def recorded(progress):
        may = rule(progress)
        begun.append(may)
        return may

    job = make_job(batch, 120, [napping(i) for i in range(4)], pace=recorded)
    with engines.ray(job) as run:
        for push in run.pushes:
            assert push.result.staleness <= bound
            assert push.waited >= 0
            assert 0 < push.computing < push.time - push.started
            assert_closed(run)
        counts = assert_closed(run)
    assert counts.accepted == 120
    assert counts.started == sum(begun)


def test_no_push_is_later_than_the_bound_while_workers_come_and_go():
    rng = random.Random(0)
    rule = engines.bounded_staleness(1)
    job = make_job(1, 150, [napping(i) for i in range(3)], pace=rule)
    there = set(range(3))
    with engines.ray(job) as run:
        for done, push in enumerate(run.pushes, 1):
            assert push.result.staleness <= 1
            assert_closed(run)
            if done % 40 == 0:
                index = rng.choice(sorted(there))
                run.remove(index)
                there.remove(index)
                there.add(run.add(napping(index)))
        counts = assert_closed(run)
    assert counts.accepted == 150
    assert len(counts.by_worker) > 3


def test_a_process_that_hangs_is_killed_and_taken_for_dead(tmp_path):
    """All others wait for its gradient; another process computes it."""
    mark = tmp_path / "hangs"

    def hangs(params, index, number):
        if (index, number) == (0, 2) and not mark.exists():
            mark.touch()
            time.sleep(600)
        return 0.0, jnp.ones_like(params)

    def worker(index):
        return engines.Worker(hangs, lambda number: (index, np.int32(number)))

    def kill():
        while not mark.exists():
            time.sleep(0.1)
        ray.kill(run.workers[0])

    workers = [worker(index) for index in range(3)]
    job = make_job(1, 30, workers, pace=engines.stale_synchronous(0))
    with engines.ray(job) as run:
        killer = threading.Thread(target=kill)
        killer.start()
        pushes = [(push.worker, push.number) for push in run.pushes]
        killer.join()
        counts = assert_closed(run)
    assert sorted(pushes) == [(w, n) for w in range(3) for n in range(10)]
    assert counts.worker_deaths == 1
