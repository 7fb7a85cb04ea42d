"""Bad input: each guard names the argument, what is allowed and what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

PARAMS = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)

OUT_OF_RANGE = [
    (gx.clip_by_global_norm, {"max_norm": -1.0}),
    (gx.clip_by_global_norm, {"max_norm": float("nan")}),
    (gx.clip_by_global_norm, {"max_norm": np.float32(-1)}),
    (gx.clip_by_global_norm, {"max_norm": jnp.float32(-1)}),
    (gx.clip_by_norm, {"max_norm": -1.0}),
    (gx.clip_by_norm, {"max_norm": float("nan")}),
    (gx.scale_by_adagrad, {"initial_accumulator_value": -0.1}),
    (gx.scale_by_adagrad, {"initial_accumulator_value": float("inf")}),
    (gx.scale_by_adagrad, {"eps": -1e-7}),
    (gx.adagrad, {"learning_rate": 0.1, "initial_accumulator_value": -0.1}),
    (gx.adagrad, {"learning_rate": 0.1, "eps": float("nan")}),
    (gx.adagrad, {"learning_rate": 0.1, "clipnorm": -1.0}),
    (gx.adagrad, {"learning_rate": 0.1, "clipvalue": -1.0}),
    (gx.adagrad, {"learning_rate": 0.1, "global_clipnorm": float("nan")}),
    (gx.scale_by_novograd, {"b1": 1.0}),
    (gx.scale_by_novograd, {"b1": -0.1}),
    (gx.scale_by_novograd, {"b2": 1.0}),
    (gx.scale_by_novograd, {"b2": float("nan")}),
    (gx.scale_by_novograd, {"eps": -1e-8}),
    (gx.scale_by_novograd, {"weight_decay": -0.1}),
    (gx.novograd, {"learning_rate": 0.1, "b1": 1.5}),
    (gx.novograd, {"learning_rate": 0.1, "b2": -0.1}),
    (gx.novograd, {"learning_rate": 0.1, "clipnorm": -1.0}),
    (gx.novograd, {"learning_rate": 0.1, "clipvalue": -1.0}),
    (gx.novograd, {"learning_rate": 0.1, "global_clipnorm": -1.0}),
    (gx.drop_stale, {"inner": optax.sgd(0.1), "max_staleness": -1}),
    (gx.drop_stale, {"inner": optax.sgd(0.1), "max_staleness": float("nan")}),
]


@pytest.mark.parametrize(
    ("factory", "kwargs"),
    OUT_OF_RANGE,
    ids=[f"{f.__name__}-{list(k.items())[-1]}" for f, k in OUT_OF_RANGE],
)
def test_out_of_range(factory, kwargs):
    name, value = list(kwargs.items())[-1]
    with pytest.raises(ValueError, match=rf"^{name} must be in [\[(].*, got {value}"):
        factory(**kwargs)


@pytest.mark.parametrize("value", [None, "1", [1.0, 2.0], 1j])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^max_norm must be a real scalar"):
        gx.clip_by_global_norm(value)


def test_the_ends_of_the_ranges_are_allowed():
    gx.clip_by_global_norm(0.0)
    gx.clip_by_global_norm(float("inf"))
    gx.scale_by_adagrad(0.0, 0.0)
    gx.scale_by_novograd(0.0, 0.0, 0.0, weight_decay=0.0)
    gx.drop_stale(optax.sgd(0.1), 0)


@pytest.mark.parametrize("alias", [gx.adagrad, gx.novograd])
@pytest.mark.parametrize(
    "clips",
    [
        {"clipnorm": 1.0, "clipvalue": 1.0},
        {"clipnorm": 1.0, "global_clipnorm": 1.0},
        {"clipvalue": 0.0, "global_clipnorm": 0.0},
    ],
)
def test_two_clips(alias, clips):
    first, second = clips
    with pytest.raises(ValueError, match=rf"at most one of .*{first}=.*{second}="):
        alias(0.1, **clips)


@pytest.mark.parametrize("weight_decay", [0.1, jnp.float32(0.1)])
def test_weight_decay_without_params(weight_decay):
    tx = gx.novograd(0.1, weight_decay=weight_decay)
    with pytest.raises(ValueError, match=r"weight_decay=.*0\.1.* needs params"):
        tx.update(GRADS, tx.init(PARAMS))


def test_no_weight_decay_needs_no_params():
    tx = gx.novograd(0.1)
    updates, _ = tx.update(GRADS, tx.init(PARAMS))
    assert jnp.all(updates["layer"]["b"] < 0)


def test_missing_local_step():
    tx = gx.drop_stale(optax.sgd(0.1), 1)
    with pytest.raises(TypeError, match=r"drop_stale needs local_step: pass update\("):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("local_step", [0.0, jnp.float32(0), "0", np.zeros(2, int)])
def test_local_step_that_is_no_integer(local_step):
    tx = gx.drop_stale(optax.sgd(0.1), 1)
    with pytest.raises(TypeError, match=r"^local_step must be an integer scalar"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=local_step)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"layer": {"w": jnp.ones((2, 3))}}, r"\['layer'\]\['b'\].*grads has no leaf"),
        (
            {"layer": {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}},
            r"\['layer'\]\['w'\]: grads has float32\[3,2\], params has float32\[2,3\]",
        ),
        (
            {"layer": {"w": None, "b": jnp.ones(3), "c": jnp.ones(1)}},
            r"\['layer'\]\['c'\].*params has no leaf",
        ),
        (jnp.ones(3), r"grads and params differ at \['layer'\]"),
    ],
)
def test_gradients_that_do_not_fit_the_params(bad, message):
    tx = optax.sgd(0.1)
    with pytest.raises(TypeError, match=message):
        gx.apply_gradients(tx, bad, tx.init(PARAMS), PARAMS)


def test_updates_that_do_not_fit_the_params():
    bad = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.ones((1, 3))}}
    with pytest.raises(TypeError, match=r"updates and params differ at \['layer'\]"):
        gx.apply_updates(PARAMS, bad)


def test_a_root_leaf_is_named():
    with pytest.raises(TypeError, match="differ at the root: updates has float32"):
        gx.apply_updates(jnp.ones(3), jnp.ones(4))


def test_no_gradient_at_all():
    tx = optax.sgd(0.1)
    nothing = jax.tree.map(lambda _: None, PARAMS)
    with pytest.raises(ValueError, match="grads has no gradient for any leaf"):
        gx.apply_gradients(tx, nothing, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    ("stacked_axes", "error", "message"),
    [
        (
            2,
            ValueError,
            r"stacked_axes must be in \[0, 1\] at \['layer'\]\['b'\].*got 2",
        ),
        (-1, ValueError, r"stacked_axes must be in \[0, 1\].*got -1"),
        (1.0, TypeError, r"stacked_axes must hold ints, got 1.0"),
        (True, TypeError, r"stacked_axes must hold ints, got True"),
    ],
)
def test_stacked_axes(stacked_axes, error, message):
    with pytest.raises(error, match=message):
        gx.novograd(0.1, stacked_axes=stacked_axes).init(PARAMS)


def test_stacked_axes_must_be_static_under_inject_hyperparams():
    tx = optax.inject_hyperparams(gx.novograd)(0.1, stacked_axes=1)
    with pytest.raises(TypeError, match="name it in static_args"):
        tx.init(PARAMS)


@pytest.mark.parametrize("find", [gx.global_step, gx.staleness_fraction])
def test_a_state_without_a_gate(find):
    with pytest.raises(ValueError, match="wrap the transformation in drop_stale"):
        find(optax.adam(0.1).init(PARAMS))


def test_a_state_with_two_gates_side_by_side():
    tx = optax.chain(
        gx.drop_stale(optax.sgd(0.1), 1), gx.drop_stale(optax.identity(), 1)
    )
    with pytest.raises(ValueError, match="holds several global_step"):
        gx.global_step(tx.init(PARAMS))


def test_traced_values_pass():
    @jax.jit
    def clip(max_norm):
        tx = gx.clip_by_global_norm(max_norm)
        return tx.update(jnp.ones(4), tx.init(None))[0]

    assert clip(1.0).tolist() == [0.5] * 4
