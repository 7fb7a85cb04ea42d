"""Programs that others wrote, ten steps each, with gradxform in optax's place.

Where both compute the same, their losses agree: a clip, Adagrad, a gate that never
drops a push, the mean of two micro-batches. If the extra ``programs`` is not installed,
the tests that need it are skipped.
"""

import doctest
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


def examples(heading):
    """The names that the examples under a heading of the page on frameworks define."""
    page = pathlib.Path(__file__).parents[1] / "docs/frameworks.md"
    _, _, rest = page.read_text().partition(f"\n## {heading}\n")
    named = {}
    for example in doctest.DocTestParser().get_examples(rest.partition("\n## ")[0]):
        with jax.numpy_dtype_promotion("standard"):  # As users have it.
            exec(example.source, named)
    return named


# Programs give no ``local_step``: the page's wrapper does.
never_late = examples("Trainers of others")["never_late"]


def theirs(rate):
    return optax.adagrad(rate, initial_accumulator_value=0.1, eps=1e-7)


def optax_micro(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


# Ours and theirs, by the part that is ours.
PAIRS = {
    "adagrad": (lambda: gx.adagrad(0.1), lambda: theirs(0.1)),
    "clip": (
        lambda: gx.adagrad(0.1, global_clipnorm=0.5),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), theirs(0.1)),
    ),
    "gate": (
        lambda: never_late(gx.drop_stale(optax.adam(0.02), max_staleness=0)),
        lambda: optax.adam(0.02),
    ),
    "micro": (
        lambda: gx.accumulate(optax.adam(0.02), 2),
        lambda: optax_micro(optax.adam(0.02)),
    ),
}


def agree(pair, losses, rtol=2e-5):
    """Both train, and their losses agree."""
    ours, expected = (np.asarray(losses(make())) for make in PAIRS[pair])
    assert np.isfinite(expected).all()
    assert len(set(expected.tolist())) > STEPS / 3  # It does learn.
    np.testing.assert_allclose(ours, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("pair", ["adagrad", "gate"])
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

    agree(pair, losses)


@pytest.mark.parametrize("pair", ["clip", "micro"])
def test_diffraxs_neural_ode(pair):
    diffrax = pytest.importorskip("diffrax", reason="extra programs")
    import equinox as eqx

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t, y, args):
            return self.mlp(y)

    times = jnp.linspace(0, 1, 5)
    wanted = jnp.stack([jnp.cos(times), jnp.sin(times)], axis=1)

    def loss(field):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=0.25,
            y0=wanted[0],
            saveat=diffrax.SaveAt(ts=times),
        )
        return jnp.mean((solution.ys - wanted) ** 2)

    def losses(tx):
        field = Field(eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0)))
        state = tx.init(eqx.filter(field, eqx.is_inexact_array))

        @eqx.filter_jit
        def step(field, state):
            value, grads = eqx.filter_value_and_grad(loss)(field)
            params = eqx.filter(field, eqx.is_inexact_array)
            updates, state = tx.update(grads, state, params)
            return eqx.apply_updates(field, updates), state, value

        values = []
        for _ in range(STEPS):
            field, state, value = step(field, state)
            values.append(float(value))
        return values

    agree(pair, losses)
