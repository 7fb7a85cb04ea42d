"""What all transformations with a momentum have in common."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from tests.contrib.test_delayed_nesterov import draw

ALIGN = gx.contrib.MomentumAlignment()
MAKERS = {
    "novograd": gx.scale_by_novograd,
    "delayed_nesterov": functools.partial(
        gx.contrib.scale_by_delayed_nesterov, num_delay=1
    ),
    "momentum_look_ahead": gx.contrib.scale_by_momentum_look_ahead,
    "heloco": functools.partial(
        gx.contrib.scale_by_momentum_look_ahead, alignment=ALIGN
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_dtypes_of_the_momentum(name):
    make = MAKERS[name]
    params = {
        "w": jnp.ones(2, jnp.bfloat16),
        "z": jnp.ones(2, jnp.complex64),
        "sizes": jnp.ones(2, jnp.int32),
    }
    dtypes = {"w": "bfloat16", "z": "complex64", "sizes": "float32"}
    assert jax.tree.map(lambda x: x.dtype.name, make().init(params).mu) == dtypes
    for given in (jnp.float32, "float16"):
        tx = make(mu_dtype=given)
        state = tx.init(params["w"])
        for _ in range(2):
            updates, state = tx.update(params["w"], state)
            assert (updates.dtype, state.mu.dtype) == (jnp.bfloat16, given)
    with pytest.raises(TypeError, match=r"mu_dtype=float32 does not fit \['z'\]"):
        make(mu_dtype="float32").init(params)


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "b1", "share", "mu_dtype"),
    [
        ("delayed_nesterov", 0.9, 1.0, "bfloat16"),
        ("momentum_look_ahead", 0.9, 0.1, "float16"),
        # The gradient itself would be rounded.
        ("momentum_look_ahead", 0.0, 1.0, "bfloat16"),
    ],
)
def test_only_the_state_is_rounded(name, b1, share, mu_dtype):
    """Each step of NumPy's begins with the rounded momentum, and acts before it is."""
    tx = MAKERS[name](b1, mu_dtype=mu_dtype)
    state, mu = tx.init(jnp.zeros(3)), np.zeros(3)
    for g in np.random.default_rng(0).standard_normal((4, 3)):
        updates, state = jax.jit(tx.update)(jnp.float32(g), state)
        mu = b1 * mu + share * g
        np.testing.assert_allclose(updates, g + b1 * mu, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(state.mu.astype("float32"), mu, rtol=1e-2)
        mu = np.asarray(state.mu.astype("float32"), float)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        gx.contrib.scale_by_delayed_nesterov(0.5, num_delay=3, activation=0.2),
        gx.contrib.scale_by_momentum_look_ahead(0.5, alignment=ALIGN),
        gx.scale_by_novograd(0.5),
    ],
    ids=["delayed_nesterov", "heloco", "novograd"],
)
def test_a_leaf_without_gradient_waits(tx):
    """A push may have none for it, even one that moves the other leaf."""
    grads, update = draw(12, 2), jax.jit(tx.update)
    both, alone = tx.init({"w": grads[0], "b": grads[0]}), tx.init({"b": grads[0]})

    def of_b(state):
        return [slot["b"] for slot in state if isinstance(slot, dict)]

    for t, g in enumerate(grads):
        b, before = None if t in (0, 2, 3, 7) else g, both
        updates, both = update({"w": -g, "b": b}, both)
        if b is None:
            assert updates["b"] is None
            chex.assert_trees_all_equal(of_b(both), of_b(before))
            continue
        expected, alone = update({"b": b}, alone)
        chex.assert_trees_all_close(updates["b"], expected["b"], rtol=1e-6)
