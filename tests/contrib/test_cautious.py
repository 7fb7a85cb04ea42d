"""Cautious updates, against the authors' formula in float64 NumPy."""

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


@pytest.mark.parametrize("g", [0.0, -0.0, 1.0])
def test_what_no_gradient_moves_rests(g):
    u = jnp.full(4, 2.0)
    assert not np.any(updated(u, jnp.full(4, g)))


def test_the_product_of_small_numbers_is_not_0():
    """Float32 ends at 1e-45."""
    u, g = jnp.full(2, -1e-30), jnp.full(2, 1e-30)
    np.testing.assert_array_equal(updated(u, g), u)


@pytest.mark.parametrize("u", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("g", [np.nan, np.inf, -np.inf, 1.0])
def test_what_is_not_finite_is_not_lost(u, g):
    got = updated(jnp.array([u, -1.0]), jnp.array([g, 1.0]))
    assert not np.isfinite(got[0])
    assert np.isfinite(got[1])


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


def test_a_leaf_has_no_so_many_axes():
    with pytest.raises(
        ValueError, match=r"stacked_axes must be in \[0, 1\] at \['b'\]"
    ):
        cautious(optax.sgd(0.1), stacked_axes=2).init({"b": jnp.ones(3)})


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
    "adamw": optax.adamw(0.01),
    "adagrad": gx.adagrad(0.1),
    "masked": optax.masked(optax.adam(0.01), {"blocks": True, "head": False}),
}


@pytest.mark.parametrize("name", INNER)
def test_by_layers(name):
    tx = cautious(INNER[name], stacked_axes={"blocks": 1, "head": 0})
    chex.assert_trees_all_close(
        trained(tx, layers=["blocks"]), trained(tx), rtol=1e-5, atol=1e-6
    )
    # The mask does something.
    plain = trained(INNER[name])[0]["blocks"]
    is_equal = np.allclose(trained(tx)[0]["blocks"], plain, rtol=1e-3)
    assert is_equal == (name == "adagrad")  # Its updates point as the gradients do.


def test_a_mean_over_all_layers_is_refused_by_name():
    tx = cautious(optax.adam(0.1))
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    with pytest.raises(TypeError, match=r"(?s)cannot run this.*reduce_sum"):
        step.lower(start(), tx.init(start()), draw(2, (3, WIDTH)))


def test_with_two_passes_it_is_a_mean_over_all_layers():
    tx = cautious(INNER["momentum"])
    got = trained(tx, layers=["blocks"], two_passes=True)
    chex.assert_trees_all_close(got, trained(tx), rtol=1e-5, atol=1e-6)


# Sharded.


def on_mesh(f, specs):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs[0]))


SPECS = {"cut": P("x", "y"), "rows": P("y"), "whole": P()}
NAMES = {"names": ("x", "y"), "specs": SPECS}


def tree(seed):
    return {k: draw(seed + i, (8, 6)) for i, k in enumerate(SPECS)}


@pytest.mark.parametrize("how", NAMES)
def test_the_mean_is_that_of_all_devices(how):
    def update(u, g):
        return updated(u, g, axis_name=NAMES[how])

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


def test_names_do_not_say_what_of_a_stack_is_sharded():
    def update(u, g):
        return updated(u, g, axis_name="x", stacked_axes=1)

    with pytest.raises(ValueError, match="stacks layers"):
        on_mesh(update, (P("x"), P("x")))(draw(0, (8, 8)), draw(1, (8, 8)))


# Leaves.


@pytest.mark.parametrize("inner", [gx.adagrad(0.1), optax.sgd(0.1, momentum=0.9)])
def test_a_leaf_without_a_gradient_keeps_its_state(inner):
    """Also in a step around optax's own, which knows no None."""
    tx, params = cautious(inner), {"a": draw(0, (4,)), "b": draw(1, (3,))}
    grads = {"a": None, "b": draw(2, (3,))}
    state = tx.init(params)
    new, after = gx.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal(new["a"], params["a"])
    assert np.all(new["b"] != params["b"])
    alone, _ = gx.apply_gradients(
        inner, {"b": grads["b"]}, inner.init({"b": params["b"]}), {"b": params["b"]}
    )
    np.testing.assert_allclose(new["b"], alone["b"], rtol=1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_integers_have_no_gradient():
    params = {"n": jnp.arange(3), "w": draw(0, (3,))}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
    tx = cautious(gx.adagrad(0.1))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["n"] is None
    assert np.all(updates["w"] * grads["w"] < 0)


def test_a_gradient_of_rows_is_refused_by_name():
    table = jnp.ones((4, 2))
    grads = {"emb": gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))}
    tx = cautious(gx.adagrad(0.1))
    with pytest.raises(TypeError, match=r"cautious .*mean over all rows.*\['emb'\]"):
        tx.update(grads, tx.init({"emb": table}), {"emb": table})


BAD = {
    "another shape": (
        jnp.ones((2, 1)),
        r"float32\[2,1\], the gradient has float32\[2\]",
    ),
    "a complex one": (jnp.ones(2, complex), r"complex64\[2\], the gradient has float"),
    "a node": ({"w": jnp.ones(2)}, "a node dict, no array, the gradient has float32"),
}


@pytest.mark.parametrize(("u", "message"), BAD.values(), ids=BAD)
def test_an_update_that_is_not_like_the_gradient_is_named(u, message):
    g = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match=rf"inner's update.* at \['w'\].*{message}"):
        updated({"w": u}, g)


def test_two_copies_of_parameters_belong_around():
    inner = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    params = optax.LookaheadParams.init_synced(jnp.ones(2))
    with pytest.raises(TypeError, match=r"optax\.lookahead.* around"):
        cautious(inner).update(jnp.ones(2), inner.init(params), params)


def test_no_transformation():
    with pytest.raises(TypeError, match=r"inner must be an optax\.Gradient"):
        cautious(0.1)


# Together with others.


def test_a_checkpoint_of_the_inner_optimizer_goes_on():
    inner, params = optax.adam(0.1), {"w": draw(0, (4,))}
    _, state = inner.update(params, inner.init(params), params)
    tx = cautious(inner)
    chex.assert_trees_all_equal(tx.init(params), inner.init(params))
    _, after = tx.update(params, state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


AROUND = {
    "drop_stale": lambda tx: gx.drop_stale(tx, 9),
    "master_weights": gx.master_weights,
    "low_bit_state": gx.low_bit_state,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject": lambda tx: optax.chain(tx, optax.scale(1.0)),
}


@pytest.mark.parametrize("name", AROUND)
def test_inside_of_others(name):
    """For float32 parameters they change nothing here."""
    params, grads = (
        {"w": draw(0, (4, 3))},
        [{"w": draw(1 + t, (4, 3))} for t in range(4)],
    )

    def end(tx):
        p, state = params, tx.init(params)
        for g in grads:
            p, state = gx.apply_gradients(tx, g, state, p, local_step=0)
        return p

    inner = cautious(optax.sgd(0.1, momentum=0.9))
    chex.assert_trees_all_close(end(AROUND[name](inner)), end(inner), rtol=1e-6)


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


def test_by_a_config():
    config = {"name": "cautious", "inner": {"name": "adagrad", "learning_rate": 0.5}}
    tx, same = gx.from_config(config), cautious(gx.adagrad(0.5))
    g = {"w": draw(0, (4,))}
    got, wanted = (x.update(g, x.init(g), g)[0] for x in (tx, same))
    chex.assert_trees_all_close(got, wanted)
