"""Cautious updates, against the authors' formula in float64 NumPy."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradxform as gx

# optax's own code multiplies floats by integers.
pytestmark = pytest.mark.usefixtures("standard_promotion")

cautious = gx.contrib.cautious


def draw(seed, shape, dtype="float32"):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x, dtype)


def masked(u, g, axes=None):
    """The authors' code, for an update that is added. The mean is over ``axes``."""
    u, g = np.float64(u), np.float64(g)
    mask = np.float64(-u * g > 0)
    return u * mask / np.maximum(mask.mean(axis=axes, keepdims=True), 1e-3)


def of(u):
    """An inner transformation whose update is ``u``."""
    return optax.stateless(lambda *_: u)


def updated(u, g, **how):
    tx = cautious(of(u), **how)
    return tx.update(g, tx.init(g))[0]


def test_adamw_of_the_authors():
    """Their loop: all weights decay, and the mask is that of the momentum."""
    rate, b1, b2, eps, decay = 0.01, 0.9, 0.99, 1e-8, 0.1
    tx = optax.chain(
        cautious(optax.adam(rate, b1, b2, eps)),
        optax.add_decayed_weights(-rate * decay),
    )
    w = draw(0, (5, 7))
    state, wanted = tx.init(w), np.float64(w)
    m = v = np.zeros((5, 7))
    step = jax.jit(lambda g, s, w: gx.apply_gradients(tx, g, s, w))
    for t in range(1, 21):
        g = draw(t, (5, 7))
        w, state = step(g, state, w)
        g = np.float64(g)
        wanted = wanted * (1 - rate * decay)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        mask = np.float64(m * g > 0)
        mask /= max(mask.mean(), 1e-3)
        assert 0.4 < np.mean(mask > 0) <= 1
        root = np.sqrt(v / (1 - b2**t)) + eps
        wanted = wanted - rate * (m * mask) / (1 - b1**t) / root
        np.testing.assert_allclose(w, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [999, 1000, 1001, 4000])
def test_the_mean_is_at_least_a_thousandth(size):
    """One entry of so many moves."""
    g = np.ones(size, np.float32)
    u = np.where(np.arange(size) == 7, -1, 1).astype(np.float32)
    got = updated(jnp.asarray(u), jnp.asarray(g))
    np.testing.assert_allclose(got, masked(u, g), rtol=1e-6)
    np.testing.assert_allclose(got[7], -min(size, 1000), rtol=1e-6)
    assert np.count_nonzero(got) == 1


@pytest.mark.slow
@pytest.mark.parametrize("u", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("g", [np.nan, np.inf, -np.inf, 1.0])
def test_what_is_not_finite_is_not_lost(u, g):
    got = updated(jnp.array([u, -1.0]), jnp.array([g, 1.0]))
    assert not np.isfinite(got[0])
    assert np.isfinite(got[1])
    for zero in (0.0, -0.0):  # What no gradient moves rests.
        assert not np.any(updated(jnp.full(4, 2.0), jnp.full(4, zero)))
    # The product of small numbers is not 0, though float32 ends at 1e-45.
    u, g = jnp.full(2, -1e-30), jnp.full(2, 1e-30)
    np.testing.assert_array_equal(updated(u, g), u)


def test_an_entry_that_does_not_move_rests():
    """Only those that move count for the mean, however small their gradient is."""
    u, g = np.float32([-1, 0, 0, 1, 2]), np.float32([1, 1, -1, -1, 0])
    low, small = np.float16([-1, 1]), np.float32([1e-30, -1e-30])
    got, moved = jax.jit(lambda *x: (updated(*x[:2]), updated(*x[2:])))(
        u, g, low, small
    )
    np.testing.assert_array_equal(got, masked(u, g))
    np.testing.assert_array_equal(moved, low)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16")])
def test_an_update_keeps_its_own_dtype(dtypes):
    u, g = draw(0, (8, 3), dtypes[0]), draw(1, (8, 3), dtypes[1])
    got = updated(u, g)
    assert got.dtype == dtypes[0]
    rtol = float(jnp.finfo(dtypes[0]).eps)
    np.testing.assert_allclose(np.float64(got), masked(u, g), rtol=rtol)


def test_both_parts_of_a_complex_entry_count():
    u = jax.lax.complex(draw(0, (6,)), draw(1, (6,)))
    g = jax.lax.complex(draw(2, (6,)), draw(3, (6,)))
    parts = [np.stack([x.real, x.imag]) for x in (u, g)]
    real, imag = masked(*parts)
    np.testing.assert_allclose(updated(u, g), real + 1j * imag, rtol=1e-6)


@pytest.mark.parametrize("stacked", [0, 1, 2, 3])
def test_each_layer_has_a_mean_of_its_own(stacked):
    u, g = draw(0, (2, 3, 4)), draw(1, (2, 3, 4))
    got = updated(u, g, stacked_axes=stacked)
    wanted = masked(u, g, tuple(range(stacked, 3)))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


# By layers.

LAYERS, WIDTH = 4, 8


def start():
    return {"blocks": 0.3 * draw(0, (LAYERS, WIDTH, WIDTH)), "head": draw(1, (WIDTH,))}


def loss_fn(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])
    return jnp.mean((x @ params["head"] - 1) ** 2)


def trained(tx, **how):
    step, params, losses = gx.minimize(loss_fn, tx, **how), start(), []
    state = tx.init(params)
    for t in range(6):
        params, state, loss = step(params, state, draw(2 + t, (3, WIDTH)))
        losses.append(loss)
    return params, state, losses


INNER = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": gx.adagrad(0.1),
    "masked": optax.masked(optax.adam(0.01), {"blocks": True, "head": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INNER)
def test_by_layers(name):
    tx = cautious(INNER[name], stacked_axes={"blocks": 1, "head": 0})
    whole = trained(tx)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
    close(trained(tx, layers=["blocks"]), whole)
    # The mask does something.
    plain = trained(INNER[name])[0]["blocks"]
    is_equal = np.allclose(whole[0]["blocks"], plain, rtol=1e-3)
    assert is_equal == (name == "adagrad")  # Its updates point as the gradients do.
    # A mean over all layers needs two passes.
    tx = cautious(INNER[name])
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    with pytest.raises(TypeError, match=r"(?s)cannot run this.*reduce_sum"):
        step.lower(start(), tx.init(start()), draw(2, (3, WIDTH)))
    if name == "momentum":
        close(trained(tx, layers=["blocks"], two_passes=True), trained(tx))


# Sharded.


def on_mesh(f, specs):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0]))


SPECS = {"cut": P("x", "y"), "rows": P("y"), "whole": P()}


def tree(seed):
    return {k: draw(seed + i, (8, 6)) for i, k in enumerate(SPECS)}


@pytest.mark.parametrize("names", [("x", "y"), SPECS], ids=["names", "specs"])
def test_the_mean_is_that_of_all_devices(names):
    def update(u, g):
        return updated(u, g, axis_name=names)

    u, g = tree(0), tree(9)
    got = on_mesh(update, (SPECS, SPECS))(u, g)
    chex.assert_trees_all_close(got, jax.tree.map(masked, u, g), rtol=1e-6)


@pytest.mark.parametrize("spec", [P(None, "x"), P("x"), P("x", "y"), P(("y", "x"))])
def test_layers_that_are_sharded_or_whose_entries_are(spec):
    def update(u, g):
        return updated(u, g, axis_name=spec, stacked_axes=1)

    u, g = draw(0, (8, 8)), draw(1, (8, 8))
    got = on_mesh(update, (spec, spec))(u, g)
    np.testing.assert_allclose(got, masked(u, g, (1,)), rtol=1e-6)


def rows():
    tx = gx.adagrad(0.1)
    grads = {"emb": gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))}
    table = {"emb": jnp.ones((4, 2))}
    return cautious(tx).update(grads, cautious(tx).init(table), table)


def two_copies():
    inner = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    params = optax.LookaheadParams.init_synced(jnp.ones(2))
    return cautious(inner).update(jnp.ones(2), inner.init(params), params)


def named_stack():
    def update(u, g):
        return updated(u, g, axis_name="x", stacked_axes=1)

    return on_mesh(update, (P("x"), P("x")))(draw(0, (8, 8)), draw(1, (8, 8)))


def unlike(u):
    return lambda: updated({"w": u}, {"w": jnp.ones(2)})


UPDATE = r"inner's update.* at \['w'\].*"
ERRORS = [
    (unlike(jnp.ones((2, 1))), TypeError,
     UPDATE + r"float32\[2,1\], the gradient has float32\[2\]"),
    (unlike(jnp.ones(2, complex)), TypeError,
     UPDATE + r"complex64\[2\], the gradient has float"),
    (unlike({"w": jnp.ones(2)}), TypeError,
     UPDATE + "a node dict, no array, the gradient has float32"),
    (rows, TypeError, r"cautious .*mean over all rows.*\['emb'\]"),
    (two_copies, TypeError, r"optax\.lookahead.* around"),
    (named_stack, ValueError, "stacks layers"),
    (lambda: cautious(0.1), TypeError, r"inner must be an optax\.Gradient"),
    (lambda: cautious(optax.sgd(0.1), stacked_axes=2).init({"b": jnp.ones(3)}),
     ValueError, r"stacked_axes must be in \[0, 1\] at \['b'\]"),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Together with others.


def test_a_checkpoint_of_the_inner_optimizer_goes_on():
    inner, params = optax.adam(0.1), {"w": draw(0, (4,))}
    _, state = inner.update(params, inner.init(params), params)
    tx = cautious(inner)
    chex.assert_trees_all_equal(tx.init(params), inner.init(params))
    _, after = tx.update(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_extra_arguments_come_to_the_inner_optimizer():
    """One that takes a loss, and one that takes a step."""
    params = {"w": jnp.ones(2)}
    tx = cautious(optax.contrib.reduce_on_plateau(patience=0))
    with pytest.raises(TypeError, match="value"):
        tx.update(params, tx.init(params), params)
    tx = cautious(gx.drop_stale(optax.sgd(0.1), 0))
    update = jax.jit(tx.update)
    moved, state = update(params, tx.init(params), params, local_step=0)
    assert np.all(moved["w"] < 0)
    moved, _ = update(params, state, params, local_step=0)
    assert not np.any(moved["w"])
