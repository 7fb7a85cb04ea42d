"""Drawn states, schedules, optimizers of matrices, and losses with a ``jit`` inside.

Each family has been seen to fail with a fault that users had met.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from tests.draw import inits, jits, matrices, programs, schedules, steps

FAMILIES = inits.FAMILIES | schedules.FAMILIES | matrices.FAMILIES | jits.FAMILIES
# How many the quick part checks, and the slow one with another seed.
COUNTS = {"states": (30, 100), "schedules": (2, 60), "matrices": (2, 10)}
COUNTS["jits"] = 2, 10


def drawn(family, count, seed):
    return itertools.islice(programs.random_programs(FAMILIES[family], seed), count)


@pytest.mark.every
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_is_right(family):
    for p in drawn(family, COUNTS[family][0], seed=0):
        p.check()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_that_are_drawn_are_right(family):
    """Those that take seconds are chosen by their pairs of names."""
    stream, seen = drawn(family, 200, seed=1), set()
    if family in ("matrices", "jits"):
        stream = programs.telling(stream, seen)
    for p in itertools.islice(stream, COUNTS[family][1]):
        p.check()
        seen.update(getattr(p, "chosen", ()))


def evaluated(number, seed):
    """Losses that are drawn, by ``evaluate`` on the device and on the host."""
    family = steps.FAMILIES["losses"]
    for p in itertools.islice(programs.random_programs(family, seed), number):
        names = {}
        exec(steps.HEAD + p.text, names)
        training = names["training"]
        params = jax.tree.map(jnp.asarray, training.start(0))
        batch = [x[0] for x in training.batches(0)]
        wanted = jax.jit(training.loss_fn)(params, *batch)
        for there in (params, gx.on_host(params, min_size=64)):
            f = gx.evaluate(training.loss_fn, layers=training.layers)
            np.testing.assert_allclose(
                f(there, *batch), wanted, 1e-4, 1e-6, err_msg=p.text
            )


@pytest.mark.usefixtures("standard_promotion")
def test_evaluate_gives_the_loss():
    evaluated(1, seed=3)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_evaluate_gives_many_losses():
    evaluated(6, seed=4)
