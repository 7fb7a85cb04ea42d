"""FTRL and proximal Adagrad: exact zeros, rows, rates, and what NaN does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

HELD = {"l1_regularization_strength": 1.0}
DTYPES = ("float16", "bfloat16", "float32")


def gradients(rng, shape):
    """The first half of the entries adds up to something, the rest stays small."""
    g = 0.1 * rng.standard_normal(shape)
    g[: len(g) // 2] -= 1.0
    return g


HOLDING = {
    "ftrl": gx.ftrl(0.3, **HELD),
    "clipvalue": gx.ftrl(0.3, **HELD, clipvalue=2.0),
    "global_clipnorm": gx.ftrl(0.3, **HELD, global_clipnorm=9.0),
    "gated": gx.drop_stale(gx.ftrl(0.3, **HELD), max_staleness=0),
    "proximal_adagrad": gx.proximal_adagrad(0.3, **HELD),
}


@pytest.mark.parametrize(
    ("of_params", "of_gradients", "name"),
    [  # Any two meet.
        (DTYPES[i], DTYPES[j], name)
        for n, name in enumerate(HOLDING)
        for i in range(3)
        for j in range(3)
        if (i + j + n) % 3 == 0
    ],
)
def test_l1_holds_weights_at_exactly_zero(of_params, of_gradients, name):
    rng, is_ftrl = np.random.default_rng(0), name != "proximal_adagrad"
    w = jnp.asarray(0.3 * rng.standard_normal(64), of_params)
    state = HOLDING[name].init(w)
    step = jax.jit(functools.partial(gx.apply_gradients, HOLDING[name]))
    for t in range(5):
        g = jnp.asarray(gradients(rng, 64), of_gradients) * (1 if is_ftrl else 3)
        w, state = step(g, state, w, **{"local_step": t} if name == "gated" else {})
        assert w.dtype == of_params
        if is_ftrl:  # From the first step on, also if gradients have less precision.
            assert np.all(np.asarray(w[32:]) == 0)
    assert np.all(np.asarray(w[32:]) == 0)
    assert np.all(np.asarray(w[:32], np.float32) > 0)


@pytest.mark.every
@pytest.mark.parametrize(
    "tx",
    [
        gx.ftrl(0.3, **HELD),
        gx.proximal_adagrad(0.3, l1_regularization_strength=2.0),
    ],
    ids=["ftrl", "proximal_adagrad"],
)
def test_updates_of_weights_of_another_dtype_hold_the_weights_exactly(tx):
    w, g = jnp.full(4, 1 + 2**-20), jnp.full(4, 0.01, jnp.bfloat16)
    updates, _ = tx.update(g, tx.init(w), w)
    assert updates.dtype == jnp.float32
    np.testing.assert_array_equal(updates, -w)
    np.testing.assert_array_equal(optax.apply_updates(w, updates), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        gx.ftrl(0.5, l1_regularization_strength=1.5, beta=0.1),
        gx.proximal_adagrad(0.5, l1_regularization_strength=0.8),
    ],
    ids=["ftrl", "proximal_adagrad"],
)
def test_complex_weights_shrink_towards_zero_in_the_direction_of_their_own(tx):
    """Turned weights with turned gradients move as the real ones do, but turned."""
    rng = np.random.default_rng(0)
    turn = np.exp(1j * rng.uniform(0, 2 * np.pi, 16))
    w = jnp.asarray(rng.standard_normal(16), jnp.float32)
    z = jnp.asarray(np.asarray(w) * turn, jnp.complex64)
    state, turned = tx.init(w), tx.init(z)
    assert turned.sum_of_squares.dtype == jnp.float32
    for _ in range(5):
        g = rng.standard_normal(16).astype(np.float32)
        w, state = gx.apply_gradients(tx, g, state, w)
        g = jnp.asarray(g * turn, jnp.complex64)
        z, turned = gx.apply_gradients(tx, g, turned, z)
        np.testing.assert_allclose(z, np.asarray(w) * turn, atol=1e-5)
        np.testing.assert_array_equal(z == 0, w == 0)
    assert 0 < np.sum(w == 0) < 16


@pytest.mark.parametrize("power", [-0.5, -0.7])
@pytest.mark.parametrize("l1", [0.0, 1.0])
def test_a_zero_gradient_on_a_zero_accumulator_sets_the_weight_to_zero(power, l1):
    tx = gx.ftrl(
        0.5, power, initial_accumulator_value=0.0, l1_regularization_strength=l1
    )
    w = jnp.array([1.0, 1.0, 1.0])
    # The square of the second underflows. Its quotient would be infinite.
    g = jnp.array([0.0, 1e-30, 2.0])
    new, state = gx.apply_gradients(tx, g, tx.init(w), w)
    np.testing.assert_array_equal(new[:2], 0)
    assert np.isfinite(new[2])
    assert new[2] != 0
    assert np.all(np.isfinite(state.linear))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("make", [gx.ftrl, gx.proximal_adagrad])
def test_a_gradient_that_is_not_finite_is_not_hidden_by_l1(make, bad):
    """TensorFlow sets the weight to 0 then, and nothing shows the fault."""
    tx = make(0.5, **HELD)
    w = jnp.ones(2)
    updates, _ = tx.update(jnp.array([bad, 0.1]), tx.init(w), w)
    np.testing.assert_array_equal(np.isnan(updates), [True, False])


@pytest.mark.slow
@pytest.mark.parametrize("multiplied", [False, True])
def test_a_rate_of_zero_changes_nothing(multiplied):
    """A warm-up may begin with it, and a decay may end with it."""
    rates = jnp.array([0.0, 0.5, 0.0, 0.25])
    make = functools.partial(
        gx.ftrl, **HELD, multiply_linear_by_learning_rate=multiplied
    )
    tx, without = make(lambda t: rates[t]), make(lambda t: rates[2 * t + 1])
    g, w = jnp.array([3.0, 0.1]), jnp.array([1.0, -2.0])
    trained, expected = (w, tx.init(w)), (w, without.init(w))
    for t in range(4):
        before, trained = trained, gx.apply_gradients(tx, g, *trained[::-1])
        if t % 2 == 0:
            kept = ((w, s.sum_of_squares, s.linear) for w, s in (before, trained))
            jax.tree.map(np.testing.assert_array_equal, *kept)
        else:
            expected = gx.apply_gradients(without, g, *expected[::-1])
            np.testing.assert_allclose(trained[0], expected[0], rtol=1e-6)
    assert trained[1].count == 4


@pytest.mark.slow
def test_a_falling_rate_shrinks_weights_unless_linear_is_multiplied_by_it():
    def falling(count):
        return jnp.where(count < 20, 0.5, 0.01)

    ends = {}
    for multiplied in (False, True):
        tx = gx.ftrl(falling, multiply_linear_by_learning_rate=multiplied)
        w = jnp.zeros(1)
        state = tx.init(w)
        for _ in range(20):
            w, state = gx.apply_gradients(tx, jnp.ones(1), state, w)
        before = w
        w, _ = gx.apply_gradients(tx, jnp.zeros(1), state, w)
        ends[multiplied] = float(w[0] / before[0])
    np.testing.assert_allclose(ends[False], 0.01 / 0.5, rtol=1e-5)
    np.testing.assert_allclose(ends[True], 1, rtol=1e-5)


@pytest.mark.slow
def test_weights_stay_right_after_the_squares_stall():
    """A float32 sum of a million does not grow by small squares any more."""
    start, rate = 1e6, 0.5
    tx = gx.ftrl(rate, initial_accumulator_value=start)
    w = jnp.full(1, 0.1)
    state = tx.init(w)._replace(linear=-w * np.sqrt(start) / rate)

    @jax.jit
    def steps(w, state):
        def body(carry, _):
            w, state = carry
            return gx.apply_gradients(tx, jnp.full(1, 0.05), state, w), None

        return jax.lax.scan(body, (w, state), length=2000)[0]

    w, state = steps(w, state)
    assert state.sum_of_squares == start  # It has stalled.
    # In exact numbers: w - rate / sqrt(n) · g for each step, up to parts in a million.
    np.testing.assert_allclose(w, 0.1 - 2000 * rate / 1e3 * 0.05, rtol=1e-3)


@pytest.mark.parametrize("power", [-0.5, -0.7, 0.0])
def test_a_traced_power_gives_the_numbers_of_a_known_one(power):
    w, g = jnp.array([1.0, -2.0, 0.0]), jnp.array([0.5, 3.0, 0.0])

    @jax.jit
    def update(power):
        tx = gx.ftrl(0.5, power, initial_accumulator_value=0.0)
        return tx.update(g, tx.init(w), w)

    tx = gx.ftrl(0.5, power, initial_accumulator_value=0.0)
    known = jax.tree.leaves(tx.update(g, tx.init(w), w))
    for a, b in zip(jax.tree.leaves(update(power)), known, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Proximal Adagrad is the other transformation that computes weights.


def test_proximal_adagrad_leaves_weights_that_no_gradient_has_reached():
    """TensorFlow makes them NaN."""
    tx = gx.proximal_adagrad(0.5, 0.0, 0.2, 0.2)
    w = jnp.array([1.0, 2.0])
    new, _ = gx.apply_gradients(tx, jnp.array([0.0, 1.0]), tx.init(w), w)
    assert new[0] == 1
    np.testing.assert_allclose(new[1], (2 - 0.5 - 0.5 * 0.2) / (1 + 0.5 * 0.2))


RATES = {
    "ftrl": gx.ftrl,
    "ftrl, multiplied": functools.partial(
        gx.ftrl, multiply_linear_by_learning_rate=True
    ),
    "proximal_adagrad": gx.proximal_adagrad,
}


@pytest.mark.parametrize("make", RATES.values(), ids=RATES)
def test_a_rate_that_has_no_meaning_is_never_silent(make):
    w, g = jnp.array([0.5, 0.0]), jnp.array([0.25, 0.0])

    def update(rate):
        tx = make(lambda _: rate, l1_regularization_strength=0.1)
        return tx.update(g, tx.init(w), w)[0]

    for rate in (np.nan, -0.1, np.inf):
        assert np.isnan(jax.jit(update)(rate)).all()
        with pytest.raises(ValueError, match=r"learning_rate must be in \[0, inf\)"):
            update(rate)
    with pytest.raises(ValueError, match=r"learning_rate must be in \[0, inf\)"):
        jax.eval_shape(lambda: update(-1))  # An integer, known while JAX traces.
    assert np.isfinite(update(2)).all()
    np.testing.assert_array_equal(jax.jit(update)(2), jax.jit(update)(2.0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [gx.adagrad, gx.ftrl, gx.proximal_adagrad])
def test_a_schedule_that_gives_no_number_is_named(make):
    w = jnp.ones(1)
    for rate in (None, "0.1", 1j, [1j]):
        tx = make(lambda _, rate=rate: rate)
        with pytest.raises(TypeError, match="learning_rate must be real, got"):
            tx.update(w, tx.init(w), w)
