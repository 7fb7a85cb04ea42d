"""Norms of many layers, which are handled in groups, are those of each layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from tests import oracles

# More leaves of a shape than a group takes, one that is too large for any group, others
# of the same shape in another dtype, and between them a leaf without a gradient.
SHAPES = {f"{i:02}": (3, 2) for i in range(40)} | {"large": (100, 50), "only": (7,)}
HALF = {f"{i:02}": jnp.bfloat16 for i in range(0, 40, 7)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(rng.standard_normal(s) * rng.uniform(0.1, 9), HALF.get(k, "f4"))
        for k, s in SHAPES.items()
    }


def in_float64(tree):
    return {k: np.float64(g) for k, g in tree.items()}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_global_norm_of_many_leaves(wrap):
    grads = draw(0)
    norm = wrap(gx.global_norm)(grads | {"05": None, "none": None})
    del grads["05"]
    squares = [np.sum(g**2) for g in in_float64(grads).values()]
    np.testing.assert_allclose(norm, np.sqrt(sum(squares)), rtol=1e-6)


@pytest.mark.slow
def test_each_of_many_leaves_is_clipped_by_its_own_norm():
    grads = draw(1)
    updates, _ = jax.jit(gx.clip_by_norm(4.0).update)(grads, ())
    for k, g in in_float64(grads).items():
        expected = g * min(1, 4 / np.linalg.norm(g))
        rtol = 1e-2 if k in HALF else 1e-6
        np.testing.assert_allclose(np.float64(updates[k]), expected, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [{"global_clipnorm": 1.0}, {"clipnorm": 0.5}])
def test_novograd_of_many_layers(clip):
    steps = [{k: g.astype("f4") for k, g in draw(seed).items()} for seed in (2, 3, 4)]
    params = {k: g.astype("f4") for k, g in draw(5).items()}
    tx = gx.novograd(0.1, **clip)
    state = tx.init(params)
    expected = oracles.novograd(
        in_float64(params), map(in_float64, steps), learning_rate=0.1, **clip
    )
    step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p))
    for grads, (wanted, *_) in zip(steps, expected, strict=True):
        params, state = step(grads, state, params)
        for k, value in wanted.items():
            np.testing.assert_allclose(params[k], value, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_layer_without_gradient_keeps_its_norm_among_many():
    params = draw(6)
    tx = gx.scale_by_novograd()
    state = tx.init(params)
    _, state = jax.jit(tx.update)(draw(7), state)
    _, later = jax.jit(tx.update)(draw(8) | {"03": None}, state)
    nu, later = jax.device_get((state.nu, later.nu))
    assert {k for k in params if later[k] == nu[k]} == {"03"}
