"""Rules that let workers wait, over Ray's processes."""

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


def make_job(batch, pushes, workers, **more):
    tx = optax.sgd(1.0) if batch == 1 else gx.accumulate(optax.sgd(1.0), batch)
    return engines.Job(jnp.float32(0.0), tx, workers, pushes, **more)


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
