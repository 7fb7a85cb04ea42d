"""Bad input: each guard names the argument, what is allowed and what was given."""

from collections import OrderedDict
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import gradxform as gx

PARAMS = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
ONE_ENTRY = BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 3))

SGD = {"inner": optax.sgd(0.1)}
RATE = {"learning_rate": 0.1}


# `test_contract.py` has the ends of the ranges of all numbers.
def test_a_number_in_an_array_is_in_its_range_too():
    with pytest.raises(ValueError, match=r"^max_norm must be in \[0, inf\], got -1"):
        gx.clip_by_global_norm(jnp.float32(-1))


@pytest.mark.every
@pytest.mark.parametrize("value", [None, "1", [1.0, 2.0], 1j])
def test_bad_numbers_are_errors(value):
    with pytest.raises(TypeError, match=r"^max_norm must be a real scalar"):
        gx.clip_by_global_norm(value)


@pytest.mark.every
@pytest.mark.parametrize("alias", [gx.adagrad, gx.novograd, gx.ftrl])
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


@pytest.mark.slow
def test_weight_decay_that_is_injected():
    make = optax.inject_hyperparams(gx.novograd)
    tx = make(0.1)
    with pytest.raises(ValueError, match=r"any number: if it stays 0 name it"):
        jax.jit(tx.update)(GRADS, tx.init(PARAMS))
    jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    tx = optax.inject_hyperparams(gx.novograd, static_args=["weight_decay"])(0.1)
    jax.jit(tx.update)(GRADS, tx.init(PARAMS))


@pytest.mark.every
@pytest.mark.parametrize("local_step", [-1, -(2**31), 2**31, np.int64(2**32)])
def test_local_step_that_is_no_count(local_step):
    for wrap in (gx.drop_stale, gx.conditional_accumulator):
        tx = wrap(optax.sgd(0.1), 1)
        with pytest.raises(ValueError, match=r"^local_step must be in \[0, 2"):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=local_step)


NO_INTEGER = [
    (gx.drop_stale, SGD, "max_staleness"),
    (gx.conditional_accumulator, SGD, "num_required"),
    (gx.conditional_accumulator, SGD | {"num_required": 2}, "max_staleness"),
    (gx.accumulate, SGD, "num_required"),
    (gx.worker_mean, SGD | {"method": "all"}, "num_workers"),
    (gx.contrib.delayed_nesterov, RATE, "num_delay"),
    (gx.contrib.clip_by_zscore, {}, "warmup"),
    (gx.skip_spikes, SGD, "window"),
    (gx.skip_spikes, SGD, "warmup"),
]


@pytest.mark.every
@pytest.mark.parametrize("value", [1.5, 1.0, np.float32(2), True, "2", np.ones(2, int)])
@pytest.mark.parametrize(
    ("factory", "kwargs", "name"), NO_INTEGER, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_count_that_is_no_integer(factory, kwargs, name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be an? (integer|real) scalar"):
        factory(**kwargs, **{name: value})


@pytest.mark.every
@pytest.mark.parametrize("inner", [lambda x: x, optax.sgd, None])
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("inner", lambda tx: gx.drop_stale(tx, 1)),
        ("inner", lambda tx: gx.conditional_accumulator(tx, 1)),
        ("inner", lambda tx: gx.accumulate(tx, 1)),
        ("inner", lambda tx: gx.worker_mean(tx, 1, method="all")),
        ("inner", lambda tx: gx.delayed(tx, 1)),
        ("inner", gx.skip_spikes),
        ("inner", gx.lazy),
        ("tx", lambda tx: gx.minimize(lambda p: p, tx)),
    ],
)
def test_bad_transformations_are_errors(name, wrap, inner):
    with pytest.raises(TypeError, match=f"^{name} must be an optax.GradientTransform"):
        wrap(inner)


@pytest.mark.every
@pytest.mark.parametrize("local_step", [0.0, jnp.float32(0), "0", np.zeros(2, int)])
def test_local_step_that_is_no_integer(local_step):
    tx = gx.drop_stale(optax.sgd(0.1), 1)
    with pytest.raises(TypeError, match=r"^local_step must be an integer scalar"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=local_step)


@pytest.mark.every
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
        (
            {
                "layer": {
                    "w": BCOO((jnp.ones(1), jnp.zeros((1, 2), int)), shape=(2, 3)),
                    "b": None,
                }
            },
            r"\['w'\]: grads has a node jax\.experimental\.\S+\.BCOO, no array, params",
        ),
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


def test_params_that_are_none_stay_none():
    params = {"a": None, "b": jnp.ones(2)}
    updates = {"a": jnp.ones(3), "b": jnp.ones(2)}
    expected = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(gx.apply_updates(params, updates), expected)


@pytest.mark.every
@pytest.mark.parametrize(
    ("param", "update", "expected"),
    [
        (np.uint32(123456789), np.uint32(0), 123456789),
        (np.uint32(4294967295), np.float32(0), 4294967295),
        (np.uint32(16777219), np.float32(-2), 16777217),
        (np.uint32(5), np.int32(-2), 3),
        (np.int32(-16777219), np.float32(1.5), -16777218),
        (np.int8(3), np.int32(4), 7),
    ],
)
def test_integers_are_added_as_integers(param, update, expected):
    new = jax.jit(gx.apply_updates)(jnp.asarray(param), jnp.asarray(update))
    assert new.dtype == param.dtype
    assert new.item() == expected


@pytest.mark.parametrize("tx", [gx.adagrad(0.1), gx.novograd(0.1, clipnorm=1.0)])
def test_keys_and_ids_without_gradient_keep_every_bit(tx):
    params = {"key": jax.random.key(7), "ids": jnp.uint32(16777217), "w": jnp.ones(2)}
    grads = {"key": None, "ids": None, "w": jnp.ones(2)}
    state = jax.jit(tx.init)(params)
    new, _ = jax.jit(gx.apply_gradients, static_argnums=0)(tx, grads, state, params)
    assert jax.random.key_data(new["key"]).tolist() == [0, 7]
    assert new["ids"] == 16777217
    assert jnp.all(new["w"] < 1)


class Pair(NamedTuple):
    a: Any
    b: Any


KINDS = {
    "tuple and list": ({"w": (1.0, 2.0)}, {"w": [1.0, 2.0]}, r"\['w'\].*tuple.*list"),
    "two kinds of dict": (
        [{"w": 1.0}],
        [OrderedDict(w=1.0)],
        r"\[0\].* dict.* collections.OrderedDict",
    ),
    "nothing in them": ({"a": (), "w": 1.0}, {"a": [], "w": 1.0}, r"\['a'\].*tuple"),
    "under a gradient": ((None, [1.0]), [None, [1.0]], r"root.*tuple.*list"),
    "keys": (
        OrderedDict(a=1.0, b=2.0),
        OrderedDict(b=2.0, a=1.0),
        r"root.*'a', 'b'.*'b', 'a'",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize(("grads", "params", "message"), KINDS.values(), ids=KINDS)
def test_trees_of_other_kinds(grads, params, message):
    def call(update):
        with pytest.raises(TypeError, match=f"differ at .*{message}"):
            update()

    call(lambda: gx.apply_updates(params, grads))
    call(lambda: gx.apply_gradients(optax.sgd(0.1), grads, None, params))
    for tx in (gx.scale_by_adagrad(), gx.scale_by_novograd()):
        call(lambda tx=tx: tx.update(grads, tx.init(params), params))


def test_trees_of_one_kind():
    params = Pair({"b": 1.0, "a": 2.0}, [3.0, None])
    grads = Pair({"a": 1.0, "b": None}, [1.0, None])
    assert gx.apply_updates(params, grads) == Pair({"b": 1.0, "a": 3.0}, [4.0, None])


def test_a_root_leaf_is_named():
    with pytest.raises(TypeError, match="differ at the root: updates has float32"):
        gx.apply_updates(jnp.ones(3), jnp.ones(4))


@pytest.mark.every
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


INNER = {"inner": optax.sgd(0.1)}
# Numbers that decide about shapes, which `optax.inject_hyperparams` would trace.
SHAPES = [
    (gx.novograd, {"learning_rate": 0.1}, {"stacked_axes": 1}),
    (gx.scale_by_novograd, {}, {"stacked_axes": 0}),
    (gx.measure_norms, {}, {"stacked_axes": 1}),
    (gx.contrib.scale_by_momentum_look_ahead, {}, {"stacked_axes": 1}),
    (gx.contrib.momentum_look_ahead, {"learning_rate": 0.1}, {"stacked_axes": 1}),
    (gx.delayed, INNER, {"num_steps": 1}),
    (gx.skip_spikes, INNER, {"window": 8}),
    (gx.worker_mean, INNER | {"method": "latest"}, {"num_workers": 2}),
    (
        gx.low_bit_state,
        INNER,
        {"bits": 8, "block_size": 128, "min_size": 4096, "block_axis": -2},
    ),
]


@pytest.mark.every
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("factory", "given", "static"), SHAPES)
def test_shapes_must_be_static_under_inject_hyperparams(factory, given, static, jitted):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2)}

    def step(**how):
        tx = optax.inject_hyperparams(factory, **how)(**given, **static)
        state = (jax.jit(tx.init) if jitted else tx.init)(params)
        return jax.jit(tx.update).eval_shape(params, state, params, worker=0)

    first, *_ = static
    with pytest.raises(TypeError, match=f"^{first} .* in static_args"):
        step()
    step(static_args=tuple(static))


REAL_DTYPES = [
    lambda dtype: gx.adagrad(0.1, accumulator_dtype=dtype),
    lambda dtype: gx.from_config(
        {"name": "scale_by_adagrad", "accumulator_dtype": dtype}
    ),
]
DTYPES = [
    lambda dtype: gx.novograd(0.1, mu_dtype=dtype),
    lambda dtype: gx.contrib.momentum_look_ahead(0.1, mu_dtype=dtype),
    lambda dtype: gx.contrib.delayed_nesterov(0.1, num_delay=2, mu_dtype=dtype),
    lambda dtype: gx.contrib.delayed_nesterov(
        0.1, num_delay=2, accumulator_dtype=dtype
    ),
    lambda dtype: gx.delayed(optax.sgd(0.1), 2, ring_dtype=dtype),
    lambda dtype: gx.conditional_accumulator(
        optax.sgd(0.1), 2, accumulator_dtype=dtype
    ),
]


@pytest.mark.every
@pytest.mark.parametrize("dtype", ["int32", "bool", "object", "float23", "U3", 3.0])
@pytest.mark.parametrize("make", REAL_DTYPES + DTYPES)
def test_dtypes_in_which_no_state_can_be_kept(make, dtype):
    with pytest.raises(TypeError, match=rf"_dtype.* must be a.* dtype, got {dtype!r}"):
        make(dtype)


@pytest.mark.every
@pytest.mark.parametrize("make", REAL_DTYPES)
def test_a_sum_of_squares_is_real(make):
    with pytest.raises(TypeError, match=r"a real floating dtype, got 'complex64'"):
        make("complex64")


@pytest.mark.every
@pytest.mark.parametrize("make", DTYPES)
def test_a_sum_is_of_the_kind_of_its_leaf(make):
    real, complex_ = {"w": jnp.ones(2)}, {"w": jnp.ones(2, "complex64")}
    make("complex64").init(complex_)
    make("bfloat16").init(real)
    with pytest.raises(TypeError, match=r"_dtype=complex64 does not fit \['w'\]"):
        make("complex64").init(real)
    with pytest.raises(TypeError, match=r"_dtype=bfloat16 does not fit \['w'\]"):
        make("bfloat16").init(complex_)


def test_a_dtype_that_inject_hyperparams_called():
    tx = optax.inject_hyperparams(gx.adagrad)(0.1, accumulator_dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"^accumulator_dtype .* in static_args"):
        tx.init(PARAMS)


@pytest.mark.every
@pytest.mark.parametrize(
    "mask",
    ["bias", 1, {"layer": {"w": True, "b": "x"}}, {"layer": None}, lambda p: 0.0],
    ids=["word", "number", "in a tree", "none", "function"],
)
def test_a_mask_that_holds_other_things_than_bools(mask):
    for name, call in {
        "mask": lambda: gx.novograd(0.1, mask=mask).init(PARAMS),
        "trainable": lambda: gx.minimize(
            lambda p: jnp.sum(p["layer"]["w"]), optax.sgd(0.1), trainable=mask
        )(PARAMS, ()),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} must hold a bool .*\['b'\]"):
            call()


def test_a_mask_may_hold_bools_of_numpy_and_jax():
    for mask in (True, np.False_, jnp.array(True), {"layer": {"w": True, "b": False}}):
        gx.novograd(0.1, mask=mask).init(PARAMS)


@pytest.mark.every
@pytest.mark.parametrize("norm", [jnp.ones(1), "1", 1j, jnp.array(True)])
def test_a_norm_that_is_no_real_scalar(norm):
    tx = gx.clip_by_global_norm(1.0)
    with pytest.raises(TypeError, match=r"^use_norm must be a real scalar"):
        tx.update(GRADS, tx.init(PARAMS), use_norm=norm)


def test_a_state_with_two_gates_side_by_side():
    tx = optax.chain(
        gx.drop_stale(optax.sgd(0.1), 1), gx.drop_stale(optax.identity(), 1)
    )
    with pytest.raises(ValueError, match="holds several global_step"):
        gx.global_step(tx.init(PARAMS))
