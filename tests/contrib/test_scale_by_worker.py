"""A factor for each worker: its numbers, what it refuses, and Rescaled ASGD."""

import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests import oracles
from tests.conftest import promotion

FACTORS = [0.25, 1.0, 3.0]


@pytest.mark.parametrize("worker", range(3))
def test_each_worker_has_its_own_factor(worker):
    tx = gx.contrib.scale_by_worker(FACTORS)
    grads = {"w": jnp.array([2.0, -8.0]), "none": None}
    for update in (tx.update, jax.jit(tx.update)):
        updates, _ = update(grads, tx.init(None), worker=worker)
        wanted = FACTORS[worker] * np.array([2.0, -8.0])
        np.testing.assert_array_equal(updates["w"], wanted)
        assert updates["none"] is None


@pytest.mark.parametrize("worker", [-1, 3, 2**31 - 1])
def test_a_traced_worker_without_a_factor_moves_nothing(worker):
    tx = gx.contrib.scale_by_worker(FACTORS)
    updates, _ = jax.jit(tx.update)(jnp.ones(2), tx.init(None), worker=worker)
    assert updates.tolist() == [0.0, 0.0]


def test_factors_may_be_traced():
    @jax.jit
    def scaled(factors):
        tx = gx.contrib.scale_by_worker(factors)
        return tx.update(jnp.ones(2), tx.init(None), worker=2)[0]

    assert scaled(jnp.array(FACTORS)).tolist() == [3.0, 3.0]
    tx = optax.inject_hyperparams(gx.contrib.scale_by_worker)(jnp.array(FACTORS))
    updates, _ = tx.update(jnp.ones(2), tx.init(None), worker=2)
    assert updates.tolist() == [3.0, 3.0]


def test_factors_of_doubles_are_doubles():
    with jax.enable_x64(True):
        tx = gx.contrib.scale_by_worker([1 / 3])
        updates, _ = tx.update(jnp.ones((), "float64"), tx.init(None), worker=0)
        assert updates == np.float64(1) / 3


def push(factors=FACTORS, **extra):
    tx = gx.contrib.scale_by_worker(factors)
    return tx.update(jnp.ones(2), tx.init(None), **extra)


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: push([1.0, -0.5]), ValueError,
         r"factors\[1\] must be in \[0, inf\), got -0\.5"),
        (lambda: push([np.nan]), ValueError, r"factors\[0\] must be in \[0, inf\)"),
        (lambda: push(2.0), ValueError, r"one number for each worker, .* shape \[\]"),
        (lambda: push([]), ValueError, r"one number for each worker, .* shape \[0\]"),
        (lambda: push(["1"]), TypeError, r"factors must hold real numbers, got \['1'"),
        (lambda: push([1j]), TypeError, "factors must hold real numbers"),
        (push, TypeError, r"scale_by_worker needs worker: pass update\("),
        (lambda: push(worker=3), ValueError, r"worker must be in \[0, 3\), got 3"),
        (lambda: push(worker=0.5), TypeError, "worker must be an integer scalar"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


SECONDS = [1.0, 2.0, 8.0]
TARGETS = [0.0, 1.0, 5.0]
RATE, PUSHES = 0.02, 600


def quadratic(w, target):
    return jnp.sum((w - target) ** 2) / 2, w - target


def crew():
    """Three workers; worker i has w = TARGETS[i] as its best parameter."""
    return [
        engines.Worker(quadratic, lambda _, t=target: (t,), lambda _, s=seconds: s)
        for target, seconds in zip(TARGETS, SECONDS, strict=True)
    ]


def row_of_the_page():
    """Rescaled ASGD, as the page of papers writes it."""
    page = pathlib.Path(__file__).parents[2] / "docs/coming_from/papers.md"
    (code,) = re.findall(r"^\| Rescaled ASGD .*\| `(gx.*?)` \|", page.read_text(), re.M)
    names = {"gx": gx, "optax": optax, "jnp": jnp}
    return eval(code, names | {"rate": RATE, "seconds": np.array(SECONDS)})


def parameters(tx):
    with promotion():
        job = engines.Job(jnp.float32(0), tx, crew(), PUSHES)
        with engines.simulated(job) as run:
            for _ in run.pushes:
                yield float(run.server.state()["params"])


@pytest.mark.slow
def test_rescaled_asgd_in_an_engine_equals_its_equations():
    """w = w - rate factors_i g_i, in the order in which the workers push."""
    factors = np.array(SECONDS) / np.mean(SECONDS)
    expected = oracles.asynchronous(
        lambda g, worker: RATE * factors[worker] * g,
        np.float64(0),
        lambda worker, number, w: w - TARGETS[worker],
        lambda worker, number: SECONDS[worker],
        len(SECONDS),
    )
    found = list(parameters(row_of_the_page()))
    wanted = [event["params"] for event in itertools.islice(expected, PUSHES)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    # The best parameter of all workers together is 2. The fast ones push more often: by
    # themselves they would move it to (0 + 1/2 + 5/8) / (1 + 1/2 + 1/8).
    assert abs(np.mean(found[-100:]) - np.mean(TARGETS)) < 0.05
    plain = list(parameters(gx.drop_stale(optax.sgd(RATE), jnp.inf)))
    assert abs(np.mean(plain[-100:]) - 1.125 / 1.625) < 0.05
