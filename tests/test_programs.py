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


@pytest.mark.parametrize("pair", ["clip", "gate"])
def test_a_policy_as_purejaxrl_trains_it(pair):
    """Proximal policy optimization, rollouts and updates in one ``lax.scan``.

    Restated from Schulman et al., 2017, https://arxiv.org/abs/1707.06347: gymnax, the
    environments of purejaxrl, asks for JAX < 0.12.
    """

    def act(params, seen):
        hidden = jnp.tanh(seen @ params["in"])
        return hidden @ params["policy"], (hidden @ params["value"])[..., 0]

    def play(params, key):  # Walk to where the sum of the position is 0.
        def move(position, key):
            logits, value = act(params, position)
            action = jax.random.categorical(key, logits)
            log_prob = jax.nn.log_softmax(logits)[action]
            after = position + 0.1 * (2 * action - 1)
            reward = -jnp.abs(after).sum()
            return after, (position, action, log_prob, value, reward)

        return jax.lax.scan(move, jnp.ones(2), jax.random.split(key, 16))[1]

    def loss(params, played):
        seen, action, before, value_before, reward = played
        to_go = jnp.cumsum(reward[::-1])[::-1] / len(reward)
        gain = to_go - value_before
        logits, value = act(params, seen)
        log_prob = jnp.take_along_axis(
            jax.nn.log_softmax(logits), action[:, None], axis=1
        )[:, 0]
        ratio = jnp.exp(log_prob - before)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy = -jnp.minimum(ratio * gain, clipped * gain).mean()
        return policy + 0.5 * jnp.mean((value - to_go) ** 2)

    def losses(tx):
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "in": jax.random.normal(keys[0], (2, 8)),
            "policy": 0.1 * jax.random.normal(keys[1], (8, 2)),
            "value": 0.1 * jax.random.normal(keys[2], (8, 1)),
        }

        def step(carry, key):
            params, state = carry
            played = play(params, jax.random.key(7))  # Each time the same chances.
            value, grads = jax.value_and_grad(loss)(params, played)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, STEPS)[1])
        return run((params, tx.init(params)))

    agree(pair, losses, rtol=1e-3)  # It samples: a rounding may change a choice.


def ising(width, field=1.0):
    """All configurations of a chain of spins, and the energy as a matrix."""
    spins = 1 - 2 * ((np.arange(2**width)[:, None] >> np.arange(width)) & 1)
    energy = np.diag(-(spins * np.roll(spins, 1, axis=1)).sum(1)).astype(np.float64)
    for site in range(width):
        energy[np.arange(2**width), np.arange(2**width) ^ (1 << site)] -= field
    return spins, energy


@pytest.mark.parametrize("steps_of_numpy", [False, True], ids=["lower", "numpy"])
def test_a_complex_boltzmann_machine(steps_of_numpy):
    """The ground state of a quantum chain, as in NetKet, over all configurations.

    Restated from Carleo and Troyer, 2017, https://arxiv.org/abs/1606.02318, so that
    NumPy can check each step in float64.
    """
    spins, energy = ising(4)
    lowest = np.linalg.eigvalsh(energy)[0]
    hamiltonian, spins = jnp.asarray(energy, jnp.float32), jnp.asarray(spins, "float32")

    def loss(params):
        angles = spins @ params["w"] + params["hidden"]
        log_psi = spins @ params["visible"] + jnp.log(jnp.cosh(angles)).sum(axis=1)
        psi = jnp.exp(log_psi)
        weight = jnp.sum(jnp.abs(psi) ** 2)
        return jnp.real(psi.conj() @ (hamiltonian @ psi)) / weight

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: 0.1 * jax.random.normal(key, shape, jnp.complex64)
        for name, key, shape in zip(
            ("w", "visible", "hidden"), keys, ((4, 4), (4,), (4,)), strict=True
        )
    }
    tx = gx.adagrad(0.1, global_clipnorm=2.0)
    state, values = tx.init(params), []
    sums = {k: np.full(p.shape, 0.1) for k, p in params.items()}
    for _ in range(STEPS):
        value, grads = jax.jit(jax.value_and_grad(loss))(params)
        grads = jax.tree.map(jnp.conj, grads)  # JAX gives the conjugate.
        before = params
        params, state = gx.apply_gradients(tx, grads, state, params)
        values.append(float(value))
        if steps_of_numpy:
            g = {k: np.asarray(x, np.complex128) for k, x in grads.items()}
            norm = np.sqrt(sum((np.abs(x) ** 2).sum() for x in g.values()))
            for k in g:
                clipped = g[k] * min(1, 2.0 / norm)
                sums[k] += np.abs(clipped) ** 2
                expected = before[k] - 0.1 * clipped / np.sqrt(sums[k] + 1e-7)
                np.testing.assert_allclose(params[k], expected, rtol=2e-5, atol=1e-6)
    if not steps_of_numpy:
        assert lowest <= values[-1] < values[0] - 0.5


@pytest.mark.parametrize("pair", ["adagrad", "micro"])
def test_a_language_model_as_flaxs_lm1b_trains_it(pair):
    """Its loop: ``TrainState``, weighted cross entropy with padding, donation."""
    from flax import linen as nn
    from flax.training import train_state

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            table = nn.Embed(16, 8)
            x = table(tokens)
            mask = nn.make_causal_mask(tokens)
            y = nn.SelfAttention(num_heads=2, qkv_features=8)(nn.LayerNorm()(x), mask)
            x = x + y
            x = x + nn.Dense(8)(nn.relu(nn.Dense(16)(nn.LayerNorm()(x))))
            return table.attend(nn.LayerNorm()(x))

    model = Decoder()
    rng = np.random.default_rng(0)
    batches = jnp.asarray(rng.integers(0, 16, (STEPS, 4, 6)))  # 0 is padding.

    def losses(tx):
        params = model.init(jax.random.key(0), batches[0])["params"]
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=tx
        )

        def step(state, tokens):
            def loss(params):
                shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
                logits = state.apply_fn({"params": params}, shifted)
                weights = jnp.where(tokens > 0, 1.0, 0.0)
                each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
                return jnp.sum(each * weights) / weights.sum()

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        step = jax.jit(step, donate_argnums=0)
        values = []
        for tokens in batches:
            state, value = step(state, tokens)
            values.append(float(value))
        return values

    agree(pair, losses)
