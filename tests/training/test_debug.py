"""Without ``jit`` a step by layers runs layer by layer, and shows its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

LAYERS = 3
X = jnp.array([[1.0, -0.5], [0.25, 2.0]])


def start():
    layers = jnp.stack([i * jnp.eye(2) / 2 for i in range(1, LAYERS + 1)])
    return {"layers": layers, "out": jnp.ones((2, 1))}


def loss_fn(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def shown(seen):
    """A link that shows the gradients of layers as they pass."""

    def look(updates, params):
        del params
        jax.debug.callback(lambda g: seen.append(np.asarray(g)), updates["layers"])
        return updates

    return optax.stateless(look)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("two_passes", [False, True])
def test_each_layer_shows_its_numbers(two_passes):
    seen = []
    links = [gx.clip_by_global_norm(0.01)] * two_passes + [optax.adamw(0.1)]
    tx, params = optax.chain(shown(seen), *links), start()
    step = gx.minimize(
        loss_fn, tx, layers=["layers"], two_passes=two_passes, donate=False
    )
    with jax.disable_jit():
        new, _, loss = step(params, tx.init(params), X)
    value, grads = jax.value_and_grad(loss_fn)(params, X)
    tx = optax.chain(*links)
    updates, _ = tx.update(grads, tx.init(params), params)
    wanted = optax.apply_updates(params, updates)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for name, x in wanted.items():
        np.testing.assert_allclose(new[name], x, rtol=1e-5, atol=1e-6)
    backwards = [grads["layers"][i : i + 1] for i in reversed(range(LAYERS))]
    np.testing.assert_allclose(seen, backwards, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_with_jit_nothing_is_shown():
    """Whoever calls it would take one layer for all of them."""
    tx, params = shown([]), start()
    step = gx.minimize(loss_fn, tx, layers=["layers"])
    with pytest.raises(TypeError, match="may mix layers, by 'debug_callback'"):
        step(params, tx.init(params), X)


@pytest.mark.slow
def test_an_error_in_a_layer_names_the_line():
    def logarithm_of_a_loss(updates, params):
        del params
        return jax.tree.map(lambda g: jnp.log(-1 - g * g), updates)

    tx, params = optax.stateless(logarithm_of_a_loss), start()
    step = gx.minimize(loss_fn, tx, layers=["layers"], donate=False)
    raises = pytest.raises(FloatingPointError)
    with jax.disable_jit(), jax.debug_nans(True), raises as error:
        step(params, tx.init(params), X)
    causes, cause = [], error.value
    while cause is not None:
        causes.append(str(cause))
        frames = cause.__traceback__
        while frames is not None:
            causes.append(frames.tb_frame.f_code.co_name)
            frames = frames.tb_next
        cause = cause.__cause__
    assert "logarithm_of_a_loss" in " ".join(causes)
