"""Delayed Nesterov: cases that the paper does not have; see ``test_formulas.py``."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

PUSHES = 12
RATES = 0.1 * 0.8 ** np.arange(PUSHES, dtype=np.float32)


def schedule(count):
    return jnp.asarray(RATES)[count]


def draw(*shape, dtype="float32", seed=0):
    """Random numbers that the dtype holds, as an array of it."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.asarray(rng.standard_normal(shape), jnp.dtype(dtype)))


@pytest.mark.slow
def test_with_one_worker_it_is_nesterov_momentum(standard_promotion):
    """It equals optax's to the bit."""
    params, grads = {"w": draw(2, 3)}, draw(PUSHES, 2, 3, seed=1)
    ours = gx.contrib.delayed_nesterov(schedule, 0.9, num_delay=1)
    theirs = optax.sgd(schedule, momentum=0.9, nesterov=True)
    states = [tx.init(params) for tx in (ours, theirs)]
    for g in grads:
        got, states[0] = ours.update({"w": g}, states[0], params)
        expected, states[1] = theirs.update({"w": g}, states[1], params)
        chex.assert_trees_all_equal(got, expected)


def test_a_period_forgets_the_one_before():
    """While the momentum has not moved yet, a NaN has not reached it either."""
    tx = gx.contrib.scale_by_delayed_nesterov(num_delay=3, accumulator_dtype="bfloat16")
    grads = jnp.ones(2)
    state = tx.init(grads)
    assert (state.accumulated.dtype, state.mu.dtype) == ("bfloat16", "float32")
    update = jax.jit(tx.update)
    for _ in range(4):
        _, state = update(grads, state)
    _, poisoned = update(grads.at[0].set(np.nan), state)
    chex.assert_trees_all_equal(poisoned.mu, state.mu)
    _, poisoned = update(grads, poisoned)
    assert np.isnan(poisoned.mu).tolist() == [True, False]
    _, poisoned = update(grads, poisoned)
    assert poisoned.accumulated.tolist() == [1.0, 1.0]


@pytest.mark.every
@pytest.mark.parametrize(
    ("dtype", "num_delay"),
    [("float16", 3), ("bfloat16", 7), ("float32", 3), ("float32", 49), ("float64", 10)],
)
def test_the_largest_activation_in_any_precision(dtype, num_delay):
    """In single precision 1/3 is rounded up and allowed; the next number is not."""
    largest = np.asarray(1 / num_delay, jnp.dtype(dtype))
    gx.contrib.delayed_nesterov(0.1, num_delay=num_delay, activation=largest)
    above = np.nextafter(largest, np.ones_like(largest))
    with pytest.raises(ValueError, match="activation must be in"):
        gx.contrib.delayed_nesterov(0.1, num_delay=num_delay, activation=above)


@pytest.mark.slow
def test_the_largest_activation_under_inject_hyperparams():
    injected = optax.inject_hyperparams(gx.contrib.delayed_nesterov)
    for dtype in ("float32", "bfloat16"):
        grads = jnp.array([1.0, -2.0], dtype)
        tx = injected(0.5, 0.5, num_delay=3, activation=1 / 3)
        state, total = tx.init(grads), 0
        for _ in range(3):
            updates, state = tx.update(grads, state)
            total += updates
        # By hand: the gradients are 1/3 each. mu is 0 at first, and the third push
        # moves it to 1. Each step takes a third of half the momentum.
        expected = -0.5 * (1 + 1 / 3 * 0.5)
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(
            np.float32(total), expected * np.array([1, -2]), rtol=tolerance
        )
