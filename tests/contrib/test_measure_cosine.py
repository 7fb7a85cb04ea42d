"""The cosine of consecutive gradients, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.in_numpy import Program


def draw(t, dtype="float32"):
    rng = np.random.default_rng(t)

    def leaf(*shape):
        x = rng.standard_normal(shape) + 0.5
        if np.issubdtype(jnp.dtype(dtype), np.complexfloating):
            x = x + 1j * rng.standard_normal(shape)
        return np.asarray(x, jnp.dtype(dtype))

    return {"w": leaf(16, 4), "b": leaf(4)}


def flat(tree):
    wide = [np.asarray(x).astype(np.complex128).ravel() for x in jax.tree.leaves(tree)]
    return np.concatenate(wide)


def cosine(g, h):
    g, h = flat(g), flat(h)
    return np.vdot(g, h).real / (np.linalg.norm(g) * np.linalg.norm(h))


@pytest.mark.every
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "complex64"])
def test_is_that_of_each_gradient_with_the_one_before(dtype):
    with jax.enable_x64(dtype == "float64"):
        tx = gx.contrib.measure_cosine()
        grads = [draw(t, dtype) for t in range(4)]
        state, update = tx.init(grads[0]), jax.jit(tx.update)
        expected = [0.0, *map(cosine, grads[1:], grads)]
        for g, wanted in zip(grads, expected, strict=True):
            updates, state = update(g, state)
            assert state.cosine.dtype == jnp.float32
            np.testing.assert_allclose(state.cosine, wanted, atol=1e-6)
            np.testing.assert_array_equal(flat(updates), flat(g))
        np.testing.assert_array_equal(flat(state.previous), flat(grads[-1]))
        # The gradients may be in another precision than the parameters.
        params = jax.tree.map(lambda x: x.astype("bfloat16"), draw(0))
        if dtype == "float64":
            _, state = update(grads[0], tx.init(params), params)
            _, state = update(grads[1], state, params)
            np.testing.assert_allclose(state.cosine, expected[1], rtol=1e-2)


def test_gradients_of_one_direction_and_of_the_opposite():
    tx = gx.contrib.measure_cosine()
    g = draw(0)
    state, update = tx.init(g), jax.jit(tx.update)
    for factor, wanted in ((1, 0), (3, 1), (-2, -1), (0, 0), (1, 0)):
        _, state = update(jax.tree.map(lambda x, f=factor: f * x, g), state)
        np.testing.assert_allclose(state.cosine, wanted, atol=1e-6)
        assert -1 <= state.cosine <= 1


@pytest.mark.slow
def test_a_leaf_without_gradient_counts_for_nothing_and_keeps_its_own():
    tx = gx.contrib.measure_cosine()
    a, b, c = draw(0), draw(1), draw(2)
    state = tx.init(a)
    for g in (a, {**b, "w": None}, c):
        _, state = tx.update(g, state)
        if g["w"] is None:
            np.testing.assert_allclose(state.cosine, cosine(b["b"], a["b"]), atol=1e-6)
            np.testing.assert_array_equal(state.previous["w"], a["w"])
    before = {"w": a["w"], "b": b["b"]}
    np.testing.assert_allclose(state.cosine, cosine(c, before), atol=1e-6)


def test_a_nan_shows_in_two_cosines_and_is_forgotten():
    tx = gx.contrib.measure_cosine()
    a, b, c = draw(0), draw(1), draw(2)
    state = tx.init(a)
    found = []
    for g in (a, {**b, "b": b["b"] * np.nan}, b, c):
        _, state = tx.update(g, state)
        found.append(float(state.cosine))
    assert np.isnan(found[1:3]).all()
    np.testing.assert_allclose(found[3], cosine(c, b), atol=1e-6)


@pytest.mark.parametrize(
    ("length", "cosine"),
    [(1e-20, 0.0), (1e-18, 0.8), (1.0, 0.8), (1e18, 0.8), (1e20, np.nan)],
)
def test_squares_end_where_the_docstring_says(length, cosine):
    tx = gx.contrib.measure_cosine()
    state = tx.init(jnp.zeros(2))
    for grads in ([3.0, 0.0], [4.0, 3.0]):
        _, state = tx.update(jnp.array(grads) * np.float32(length), state)
    np.testing.assert_allclose(state.cosine, cosine, rtol=1e-5)


AROUND = {
    "conditional": lambda tx: gx.conditional_accumulator(tx, 2),
    "gate inside": lambda tx: gx.accumulate(gx.drop_stale(tx, 9), 2),
    "masked": lambda tx: gx.accumulate(optax.masked(tx, {"w": True, "b": True}), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("around", AROUND)
def test_in_a_sum_it_is_that_of_the_means(around, frozen):
    """A push without a gradient adds zeros; a leaf that never has one is in none."""
    tx = AROUND[around](optax.chain(gx.contrib.measure_cosine(), optax.sgd(0.0)))
    a, b, c, d = (draw(t) for t in range(4))
    pairs = (a, a), ({**b, "w": None}, c), (c, d)
    mixed = {"w": c["w"] / 2, "b": (b["b"] + c["b"]) / 2}
    means = [a, mixed, jax.tree.map(lambda x, y: (x + y) / 2, c, d)]
    if frozen:
        pairs = [[{**g, "w": None} for g in pair] for pair in pairs]
        means = [{"b": mean["b"]} for mean in means]
    words = {} if around == "masked" else {"local_step": 99}
    step = jax.jit(functools.partial(gx.apply_gradients, tx, **words))
    state, found = tx.init(a), []
    for pair in pairs:
        for g in pair:
            _, state = step(g, state, a)
        found.append(optax.tree.get(state, "cosine"))
    wanted = [0, *map(cosine, means[1:], means)]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_server_has_it_in_its_state():
    tx = gx.drop_stale(optax.chain(gx.contrib.measure_cosine(), optax.sgd(0.1)), 1)
    a, b, c = (draw(t) for t in range(3))
    with gx.ParameterServer(a, tx) as server:
        for g, local_step in ((a, 0), (b, 1), (c, 0)):
            result = server.push(g, local_step)
        found = optax.tree.get(server.state(), "cosine")
    assert not result.applied  # It came too late.
    np.testing.assert_allclose(found, cosine(b, a), atol=1e-6)


def test_a_cosine_is_at_most_1():
    """The product of two roots may be below the square by a rounding."""
    tx = gx.contrib.measure_cosine()
    draws = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)

    def cosine(g, previous, square):
        state = gx.contrib.MeasureCosineState(square, previous, square)
        return tx.update(g, state)[1].cosine

    squares = np.sum(draws**2, axis=1)
    program = Program(jax.make_jaxpr(cosine)(draws[0], draws[0], squares[0]))
    found = [program(g, g, s)[0] for g, s in zip(draws, squares, strict=True)]
    np.testing.assert_allclose(found, 1, rtol=1e-6)
    assert max(found) == 1
