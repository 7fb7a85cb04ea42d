"""Small jobs for the tests of engines, and what they ask of runs and of folders."""

import collections
import contextlib
import json
import pathlib
import resource
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines

SGD = optax.sgd(1.0)


def ones(params, *batch):
    """Gradients of 1, so the parameters after k steps are -k."""
    loss = jnp.sum(jax.tree.leaves(params)[0])
    return loss, jax.tree.map(jnp.ones_like, params)


def worker(gradient=ones, batch=None, seconds=None, **more):
    """A worker whose gradients take so many seconds each, or no time at all."""
    more |= {} if seconds is None else {"duration": lambda _: seconds}
    more |= {} if batch is None else {"batch": batch}
    return engines.Worker(gradient, **more)


def make_job(workers=1, pushes=20, tx=None, required=None, **more):
    """So many workers, or these; whatever is late counts, or a step needs several."""
    if isinstance(workers, int):
        workers = [worker()] * workers
    if tx is None and required is None:
        tx = gx.drop_stale(SGD, 10**6)
    tx = gx.conditional_accumulator(SGD, required) if tx is None else tx
    params = more.pop("params", jnp.float32(0.0))
    return engines.Job(params, tx, workers, pushes, required, **more)


def ended(engine, job, **options):
    """All pushes, the state after the last, and the run."""
    with engine(job, **options) as run:
        return list(run.pushes), run.server.state(), run


def list_all(engine, job, **options):
    return ended(engine, job, **options)[0]


@contextlib.contextmanager
def full_disk(size):
    """No file grows over so many bytes, which stands for a disk that is full.

    Python and JAX then keep no compiled file. Python 3.13.0 would keep the
    first bytes of a module, and all that import it later would fail. JAX would keep the
    first bytes of a program, and warn whenever it is loaded.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    least = "jax_persistent_cache_min_compile_time_secs"
    kept = getattr(jax.config, least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        jax.config.update(least, np.inf)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            jax.config.update(least, kept)


def fails(engine, job, error, match, **options):
    """The error with which a run ends, and the run; None if it does not begin."""
    runs = []

    def go():
        with engine(job, **options) as run:
            runs.append(run)
            list(run.pushes)

    with pytest.raises(error, match=match) as raised:
        go()
    return raised.value, (runs or [None])[0]


def stop_at(run, error, step=8, seconds=0.0):
    """Raises the error after so many seconds, in which workers make further pushes."""
    for push in run.pushes:
        if push.result.global_step >= step:
            time.sleep(seconds)
            raise error


def by_worker(pushes):
    """How many pushes each worker has made."""
    return collections.Counter(push.worker for push in pushes)


def assert_in_order(pushes):
    """Each worker has pushed its numbers, from the first one on."""
    for index, count in by_worker(pushes).items():
        assert [p.number for p in pushes if p.worker == index] == [*range(count)]


def bits(state):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def threads_of(run):
    return [x for x in run.workers.values() if isinstance(x, threading.Thread)]


def counters(folder):
    """The counters of each checkpoint, by its name."""
    return {
        int(path.parts[-3]): json.loads(path.read_text())
        for path in pathlib.Path(folder).glob("*/counters/metadata")
        if path.parts[-3].isdigit()  # It is no longer being written.
    }


def steps_in(folder):
    """The global step of each checkpoint, by the checkpoint's name."""
    return {name: each["global_step"] for name, each in counters(folder).items()}


def saved(folder):
    """The numbers of all pushes in the newest checkpoint, by worker."""
    newest, found = max(counters(folder).items())
    answered = {index: number + 1 for index, number, *_ in found["answers"]}
    assert sum(answered.values()) == newest
    return answered


def told(caplog):
    """What the library has logged; orbax logs, too."""
    return [x.getMessage() for x in caplog.records if x.name == "gradxform"]


# A job with everything that a checkpoint has to keep.


@jax.jit
@jax.value_and_grad
def distance(params, x):
    return jnp.sum((params["w"] - x) ** 2) * params["s"].astype(jnp.float32) ** 2


def training_worker(index, seconds=1e-3):
    """Minibatches and durations that are functions of worker and number."""

    def batch(number):
        rng = np.random.default_rng((index, number))
        return (rng.standard_normal(8).astype(np.float32),)

    def duration(number):
        return seconds * np.random.default_rng((index, number, 1)).exponential()

    return engines.Worker(distance, batch, duration)


def training(pushes, required=None, count=3, seconds=1e-3):
    novograd = gx.novograd(0.05, weight_decay=0.1)
    inner = optax.chain(gx.clip_by_global_norm(1.0), novograd)
    tx = gx.drop_stale(inner, 1)
    if required is not None:
        tx = gx.conditional_accumulator(inner, required)
    workers = [training_worker(index, seconds) for index in range(count)]
    params = {"w": jnp.zeros(8), "s": jnp.bfloat16(1.5)}
    return engines.Job(params, tx, workers, pushes, required)
