"""A program that others wrote, ten steps of it, with gradxform in optax's place.

Where both compute the same, their losses agree: a clip, Adagrad, a gate that never
drops a push, the mean of two micro-batches. If the extra ``programs`` is not installed,
the tests are skipped.
"""

import doctest
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS = 10


@functools.cache
def page_never_late():
    """Programs give no ``local_step``: the wrapper on the page does."""
    page = pathlib.Path(__file__).parents[1] / "docs/trainers.md"
    _, _, rest = page.read_text().partition("\n## Gates\n")
    named = {}
    with jax.numpy_dtype_promotion("standard"):
        for example in doctest.DocTestParser().get_examples(rest.partition("\n## ")[0]):
            exec(example.source, named)
    return named["never_late"]


def theirs(rate):
    return optax.adagrad(rate, initial_accumulator_value=0.1, eps=1e-7)


# Ours and theirs, by the part that is ours.
PAIRS = {
    "adagrad": (lambda: gx.adagrad(0.1), lambda: theirs(0.1)),
    "clip": (
        lambda: gx.adagrad(0.1, global_clipnorm=0.5),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), theirs(0.1)),
    ),
    "gate": (
        lambda: page_never_late()(gx.drop_stale(optax.adam(0.02), max_staleness=0)),
        lambda: optax.adam(0.02),
    ),
    "micro": (
        lambda: gx.accumulate(optax.adam(0.02), 2),
        lambda: optax.MultiSteps(optax.adam(0.02), 2).gradient_transformation(),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_numpyros_svi(pair):
    numpyro = pytest.importorskip("numpyro", reason="extra programs")
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    x = jnp.linspace(-1, 1, 20)
    y = 2 * x + 0.5

    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(slope * x + shift, 0.1), obs=y)

    def losses(tx):
        svi = SVI(model, AutoNormal(model), tx, Trace_ELBO())
        result = svi.run(jax.random.key(0), STEPS, x, y, progress_bar=False)
        return result.losses

    ours, expected = (np.asarray(losses(make())) for make in PAIRS[pair])
    assert np.isfinite(expected).all()
    assert len(set(expected.tolist())) > STEPS / 3  # It does learn.
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6)
