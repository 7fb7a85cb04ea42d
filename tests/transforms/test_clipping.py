"""Clipping at its edges: bits inside the ball, infinities, halves, derivatives."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads

import gradxform as gx
from tests import oracles

DTYPES = ("float16", "bfloat16", "float32", "complex64")
BOTH = pytest.mark.parametrize("clip", [gx.clip_by_global_norm, gx.clip_by_norm])


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def clipped(clip, max_norm, grads):
    tx = clip(max_norm)
    return tx.update(grads, tx.init(grads))[0]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_inside_the_ball_every_bit_stays(clip, dtype):
    values = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-14, 5e-7, -3.3])
    if dtype == "complex64":  # A complex product would lose signs of zeros.
        values = np.stack([values, values[::-1]], axis=-1).view(complex)[:, 0]
    leaf = jnp.asarray(values, dtype)
    grads = {"a": leaf, "none": None, "b": jnp.float32(0.1)}
    assert bits(clipped(clip, 41.0, grads)) == bits(grads)
    assert bits(clipped(clip, jnp.inf, grads)) == bits(grads)


# Numbers whose squares float32 holds.
SIZES = st.floats(2.0**-50, 2.0**50, width=32)
NUMBERS = st.one_of(st.just(0.0), SIZES, SIZES.map(lambda x: -x))


@pytest.mark.slow
@BOTH
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    leaf=hnp.arrays(np.float32, 8, elements=NUMBERS),
    share=st.one_of(st.just(0.0), st.floats(0.5, 2), SIZES),  # Of the norm.
)
def test_the_result_is_the_nearest_point_of_the_ball(clip, leaf, share):
    grads = {"a": leaf, "b": 2 * leaf[:3]}
    wide = {k: np.float64(g) for k, g in grads.items()}
    max_norm = np.float32(share * oracles.global_norm(wide))
    updates = _clip(clip, grads, max_norm)
    for k, wanted in oracles.of(clip.__name__)(wide, max_norm).items():
        atol = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(updates[k], wanted, rtol=1e-5, atol=atol)


@functools.partial(jax.jit, static_argnums=0)
def _clip(clip, grads, max_norm):
    return clipped(clip, max_norm, grads)


@BOTH
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        ("float16", np.inf),
        ("bfloat16", -np.inf),
        ("float32", np.nan),
        ("complex64", np.inf),
    ],
)
def test_a_norm_that_is_not_finite_makes_everything_nan(clip, dtype, bad):
    grads = {"a": jnp.asarray([1.0, bad, 0.0], dtype), "b": jnp.ones(2)}
    updates = clipped(clip, 1.0, grads)
    a = np.asarray(updates["a"])
    assert np.all(np.isnan(a.real))
    if dtype == "complex64":
        assert np.all(np.isnan(a.imag))
    assert np.all(np.isnan(updates["b"])) == (clip is gx.clip_by_global_norm)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1e30, np.inf, np.nan])
def test_in_front_of_apply_if_finite_it_marks_every_step_to_skip(bad):
    rest = optax.apply_if_finite(gx.adagrad(0.1), max_consecutive_errors=5)
    tx = optax.chain(gx.clip_by_global_norm(1.0), rest)
    params = jnp.zeros(2)
    state = tx.init(params)
    for grads in (jnp.array([bad, 1.0]), jnp.array([3.0, 4.0])):
        params, state = gx.apply_gradients(tx, grads, state, params)
    assert optax.tree.get(state, "total_notfinite") == 1
    sums = optax.tree.get(state, "sum_of_squares")
    np.testing.assert_allclose(sums, [0.1 + 0.36, 0.1 + 0.64], rtol=1e-6)
    assert jnp.all(params < 0)


@pytest.mark.slow
def test_leaves_of_different_precision_share_one_norm():
    with jax.enable_x64(True):
        grads = {
            "half": jnp.full(90_000, 1.0, jnp.float16),
            "single": jnp.full(4, 200.0, jnp.float32),
            "double": jnp.full(1, 1e-3, jnp.float64),
        }
        norm = gx.global_norm(grads)
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, np.sqrt(300**2 + 400**2 + 1e-6), rtol=1e-12)
        updates = clipped(gx.clip_by_global_norm, 50.0, grads)
        assert {k: u.dtype for k, u in updates.items()} == {
            k: g.dtype for k, g in grads.items()
        }
        np.testing.assert_allclose(updates["double"], 1e-4, rtol=1e-7)
        np.testing.assert_allclose(updates["half"], 0.1, rtol=1e-3)


def test_a_long_sum_keeps_its_precision():
    """Added up one by one in float32, 2**25 ones would stop at 2**24."""
    leaf = jnp.ones((2**25,), jnp.bfloat16)
    np.testing.assert_allclose(jax.jit(gx.global_norm)(leaf), 2**12.5, rtol=1e-6)


@pytest.mark.every
@pytest.mark.parametrize(
    ("use_norm", "factor"), [(10.0, 0.1), (0.5, 1.0), (0.0, 1.0), (jnp.inf, jnp.nan)]
)
def test_use_norm(use_norm, factor):
    tx = gx.clip_by_global_norm(1.0)
    grads = jnp.array([3.0, 4.0])
    updates, state = tx.update(grads, tx.init(grads), use_norm=use_norm)
    np.testing.assert_allclose(updates, factor * grads, rtol=1e-6)
    assert state.global_norm == use_norm
    assert state.global_norm.dtype == jnp.float32


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_derivatives_are_right(clip, max_norm):
    grads = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
    check_grads(
        jax.jit(lambda g: clipped(clip, max_norm, g)),
        (grads,), order=2, modes=["fwd", "rev"],
        rtol=2e-2, atol=2e-3, eps=1e-2,
    )  # fmt: skip


@pytest.mark.slow
def test_at_zero_the_norm_has_a_derivative_of_0_and_clips_that_of_the_identity():
    assert jax.grad(gx.global_norm)(jnp.zeros(3)).tolist() == [0.0] * 3
    for clip in (gx.clip_by_global_norm, gx.clip_by_norm):
        jacobian = jax.jacobian(lambda g, clip=clip: clipped(clip, 1.0, g))
        jacobian = jax.jit(jacobian)(np.zeros(2, np.float32))
        assert jacobian.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    # Nothing has a norm of 0, and a limit of NaN shows.
    assert gx.global_norm({}) == gx.global_norm({"a": None}) == 0.0
    assert np.isnan(_clip(gx.clip_by_norm, jnp.ones(2), np.nan)).all()


@pytest.mark.parametrize(
    ("name", "rest"),
    [("adagrad", {}), ("adagrad", {"row_wise": True}), ("ftrl", {}), ("novograd", {})],
)
def test_the_norm_before_an_optimizers_clip_is_in_its_state(name, rest):
    rest = rest | {"learning_rate": 0.1, "global_clipnorm": 1.0}
    params = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    for inner in (gx.from_config({"name": name} | rest), getattr(gx, name)(**rest)):
        tx = gx.drop_stale(inner, 0)
        p, state = params, tx.init(params)
        assert optax.tree.get(state, "global_norm") == 0
        for t, factor in enumerate((1.0, 10.0)):
            grads = {"w": jnp.full((2, 2), 4 * factor), "b": jnp.full(2, 3 * factor)}
            p, state = gx.apply_gradients(tx, grads, state, p, local_step=t)
            norm = factor * np.sqrt(4 * 16.0 + 2 * 9.0)
            np.testing.assert_allclose(optax.tree.get(state, "global_norm"), norm, 1e-6)


@pytest.mark.every
@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm"])
def test_clips_of_novograd_are_those_of_keras(name):
    """Each gradient by its own norm, or all by theirs, as the first state shows."""
    grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])}
    tx = gx.novograd(1.0, b1=0.0, b2=0.5, eps=0.0, **{name: 1.0})
    _, state = tx.update(grads, tx.init(grads), grads)
    norms = {"a": 5.0, "b": 12.0}
    whole = norms if name == "clipnorm" else dict.fromkeys(norms, 13.0)
    nu = optax.tree.get(state, "nu")
    for leaf, norm in norms.items():
        np.testing.assert_allclose(nu[leaf], (norm / whole[leaf]) ** 2, rtol=1e-6)
