"""Numbers that optax 0.2.8 gets wrong and that are right here, one test a row.

Each test first shows optax's number, so a row says when its reason is gone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

pytestmark = pytest.mark.usefixtures("standard_promotion")

ONES = {"w": jnp.ones(90_000, jnp.float16)}  # norm 300


def first_update(tx, grads, params=None):
    params = grads if params is None else params
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params)


HALF_ZEROS = jnp.zeros(3, jnp.float16)
INFINITE = jnp.array([jnp.inf, 1.0, 2.0])
# Theirs and ours, the gradients, and all entries of the first updates of both.
FIRST = {
    "a norm of 300 in half precision is clipped": (
        *(optax.clip_by_global_norm(30.0), gx.clip_by_global_norm(30.0)),
        *(ONES, 0, 0.1),
    ),
    "NovoGrad normalizes it": (
        optax.novograd(1.0),
        gx.novograd(1.0),
        ONES,
        0,
        -1 / 300,
    ),
    "an infinite gradient does not zero the others in silence": (
        *(optax.clip_by_global_norm(1.0), gx.clip_by_global_norm(1.0)),
        *(INFINITE, [np.nan, 0, 0], np.nan),
    ),
    "zeros clipped to zero are zero": (
        *(optax.clip_by_global_norm(0.0), gx.clip_by_global_norm(0.0)),
        *(jnp.zeros(3), np.nan, 0),
    ),
    "NovoGrad's first gradient of zeros in half precision gives zero": (
        *(optax.novograd(0.1), gx.novograd(0.1)),
        *(HALF_ZEROS, np.nan if optax.__version__ >= "0.2.8" else 0, 0),
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", FIRST)
def test_the_first_updates_are_right(name):
    theirs, ours, grads, wrong, right = FIRST[name]
    for tx, wanted in (theirs, wrong), (ours, right):
        (got,) = jax.tree.leaves(first_update(tx, grads))
        wanted_each = np.broadcast_to(np.float32(wanted), got.shape)
        np.testing.assert_allclose(np.float32(got), wanted_each, rtol=1e-3)


@pytest.mark.slow
def test_adagrads_sum_goes_on_growing_under_bfloat16_params():
    params = jnp.zeros(3, jnp.bfloat16)
    grads = jnp.full(3, 0.01, jnp.bfloat16)

    def total(tx):
        def body(state, _):
            return tx.update(grads, state, params)[1], None

        state, _ = jax.lax.scan(body, tx.init(params), length=10_000)
        return optax.tree.get(state, "sum_of_squares")

    np.testing.assert_allclose(total(optax.adagrad(0.1)).astype(float), 0.1, rtol=2e-3)
    # 0.1 + 10,000 · 0.01², where bfloat16 has 0.010009765625 for 0.01.
    np.testing.assert_allclose(
        total(gx.adagrad(0.1)), 0.1 + 1e4 * 0.010009765625**2, rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Casting from complex to real dtypes")
def test_the_imaginary_parts_of_micro_batches_are_added_up():
    def after_two(tx):
        state, grads = tx.init(jnp.zeros(1, complex)), jnp.array([1 + 1j])
        for _ in range(2):
            updates, state = jax.jit(tx.update)(grads, state)
        return updates

    if optax.__version__ >= "0.2.8":  # Before, it did the same as ours.
        assert after_two(optax.MultiSteps(optax.sgd(1.0), 2)) == -1 - 0.5j
    assert after_two(gx.accumulate(optax.sgd(1.0), 2)) == -1 - 1j


@pytest.mark.slow
def test_the_derivative_of_the_clip_at_zero_gradients_is_finite():
    def through(tx):
        derivative = jax.grad(lambda g: jnp.sum(first_update(tx, g)))
        return jax.jit(derivative)(jnp.zeros(3))

    assert jnp.all(jnp.isnan(through(optax.clip_by_global_norm(1.0))))
    assert through(gx.clip_by_global_norm(1.0)).tolist() == [1.0, 1.0, 1.0]
