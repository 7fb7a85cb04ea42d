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
    return tx.update(grads, tx.init(params), params)[0]


def test_float16_gradients_of_norm_300_clip_to_a_tenth():
    theirs = first_update(optax.clip_by_global_norm(30.0), ONES)
    ours = first_update(gx.clip_by_global_norm(30.0), ONES)
    assert jnp.all(theirs["w"] == 0)
    np.testing.assert_allclose(ours["w"], 0.1, rtol=1e-3)


def test_novograd_normalizes_float16_gradients_of_norm_300():
    theirs = first_update(optax.novograd(1.0), ONES)
    ours = first_update(gx.novograd(1.0), ONES)
    assert jnp.all(theirs["w"] == 0)
    np.testing.assert_allclose(ours["w"], -1 / 300, rtol=1e-3)


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


@pytest.mark.filterwarnings("ignore:Casting from complex to real dtypes")
def test_the_imaginary_parts_of_micro_batches_are_added_up():
    def after_two(tx):
        state, grads = tx.init(jnp.zeros(1, complex)), jnp.array([1 + 1j])
        for _ in range(2):
            updates, state = tx.update(grads, state)
        return updates

    if optax.__version__ >= "0.2.8":  # Before, it did the same as ours.
        assert after_two(optax.MultiSteps(optax.sgd(1.0), 2)) == -1 - 0.5j
    assert after_two(gx.accumulate(optax.sgd(1.0), 2)) == -1 - 1j


def test_an_infinite_gradient_does_not_zero_the_others_in_silence():
    grads = jnp.array([jnp.inf, 1.0, 2.0])
    theirs = first_update(optax.clip_by_global_norm(1.0), grads)
    assert theirs[1:].tolist() == [0.0, 0.0]
    assert jnp.all(jnp.isnan(first_update(gx.clip_by_global_norm(1.0), grads)))


def test_the_derivative_of_the_clip_at_zero_gradients_is_finite():
    def through(tx):
        derivative = jax.grad(lambda g: jnp.sum(first_update(tx, g)))
        return jax.jit(derivative)(jnp.zeros(3))

    assert jnp.all(jnp.isnan(through(optax.clip_by_global_norm(1.0))))
    assert through(gx.clip_by_global_norm(1.0)).tolist() == [1.0, 1.0, 1.0]


def test_zero_gradients_clipped_to_zero_are_zero():
    assert jnp.all(
        jnp.isnan(first_update(optax.clip_by_global_norm(0.0), jnp.zeros(3)))
    )
    assert first_update(gx.clip_by_global_norm(0.0), jnp.zeros(3)).tolist() == [0.0] * 3


@pytest.mark.skipif(optax.__version__ < "0.2.8", reason="optax gives 0 as well")
def test_novograds_first_all_zero_float16_gradient_gives_zero():
    grads = jnp.zeros(3, jnp.float16)
    assert jnp.all(jnp.isnan(first_update(optax.novograd(0.1), grads)))
    assert first_update(gx.novograd(0.1), grads).tolist() == [0.0] * 3
