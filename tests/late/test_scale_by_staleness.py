"""Weights of late gradients: any function of the staleness."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

# For JAX, and in NumPy.
WEIGHTS = {
    "hinge": (
        lambda s: jnp.where(s <= 4, 1.0, 1 / (10 * (s - 4) + 1)),
        lambda s: 1.0 if s <= 4 else 1 / (10 * (s - 4) + 1),
    ),
    "polynomial": (lambda s: 1 / jnp.sqrt(1 + s), lambda s: (1 + s) ** -0.5),
    "none": (lambda s: 1, lambda s: 1),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_each_gradient_times_its_weight(name, dtype):
    weight, expected = WEIGHTS[name]
    with jax.enable_x64(dtype == "float64"):
        grads = {"w": jnp.asarray([1.5, -3.0], dtype), "b": None}
        tx = gx.scale_by_staleness(weight=weight)
        update = jax.jit(lambda staleness: tx.update(grads, (), staleness=staleness)[0])
        for staleness in (*range(12), 1000):
            got = update(jnp.int32(staleness))
            assert got["w"].dtype == dtype
            assert got["b"] is None
            wide = np.asarray(got["w"]).astype(np.complex128)
            wanted = expected(staleness) * np.array([1.5, -3.0])
            rtol = 4e-3 if dtype == "bfloat16" else 1e-6
            np.testing.assert_allclose(wide, wanted, rtol=rtol, atol=1e-6)


def test_a_gradient_ahead_of_its_time_is_not_late():
    seen = []
    tx = gx.scale_by_staleness(weight=lambda s: seen.append(s) or 0.5)
    updates, _ = tx.update(jnp.ones(2), (), staleness=-3)
    assert seen == [0]
    assert seen[0].dtype == jnp.int32
    assert updates.tolist() == [0.5, 0.5]


def test_inside_a_gate_it_weighs_by_how_late_the_push_is():
    link = gx.scale_by_staleness(weight=lambda s: jnp.exp2(-s.astype(jnp.float32)))
    tx = gx.drop_stale(optax.chain(link, optax.sgd(1.0)), 3)
    params, steps = jnp.float32(0), []
    state = tx.init(params)
    for _ in range(5):
        before = params
        params, state = gx.apply_gradients(
            tx, jnp.float32(1), state, params, local_step=0
        )
        steps.append(float(before - params))
    assert steps == [1.0, 0.5, 0.25, 0.125, 0.0]


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (0.5, TypeError, r"weight must be a function of the staleness.*got 0\.5"),
        (lambda s: "1", TypeError, r"weight\(staleness\) must be a real scalar"),
        (
            lambda s: jnp.ones(2),
            TypeError,
            r"weight\(staleness\) must be a real scalar",
        ),
        (lambda s: -1.0, ValueError, r"weight\(staleness\) must be in \[0, inf\)"),
        (lambda s: np.nan, ValueError, r"weight\(staleness\) must be in \[0, inf\)"),
    ],
)
def test_bad_weights_are_errors(weight, error, message):
    with pytest.raises(error, match="^" + message):
        gx.scale_by_staleness(weight=weight).update(jnp.ones(2), (), staleness=1)


def test_under_inject_hyperparams_the_cure_is_named():
    tx = optax.inject_hyperparams(gx.scale_by_staleness)(weight=lambda s: 1 / (1 + s))
    with pytest.raises(TypeError, match=r"inject_hyperparams name it in static_args"):
        tx.init(jnp.ones(2))


def test_a_staleness_that_is_no_number_of_steps():
    with pytest.raises(TypeError, match=r"^staleness must be an integer scalar"):
        gx.scale_by_staleness().update(jnp.ones(2), (), staleness=1.5)
