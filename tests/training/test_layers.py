"""``minimize(layers=...)`` is the ordinary step, and keeps no gradients of layers."""

import functools
import itertools
import operator
import pathlib
import re

import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from benchmarks.compilers import placed
from benchmarks.grid import devices
from benchmarks.models import next_tokens, size, transformer
from gradxform._jax.compilers import LARGE
from tests.descriptors import DESCRIPTORS, thresholds, widths

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, WIDTH, WORDS = 4, 8, 5
IDS = jnp.array([0, 3, 2])
Y = jnp.asarray(np.random.default_rng(1).standard_normal((3, WORDS)), jnp.float32)


def start(dtype="float32"):
    """A table, two stacks, a further stack that is no layer, and a head."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), dtype)

    return {
        "emb": draw(WORDS, WIDTH),
        "blocks": {"w": draw(LAYERS, WIDTH, WIDTH), "b": draw(LAYERS, WIDTH)},
        "bias": draw(LAYERS, WIDTH),
        "head": draw(WIDTH, WORDS),
        "gain": draw(WIDTH),
    }


def error(x, p, y):
    return jnp.mean((x.astype(jnp.float32) @ p["head"].astype(jnp.float32) - y) ** 2)


def layer(p, x, w):
    """Its gain is a parameter outside of the scan, and so are its mask and noise."""
    return x + jnp.tanh(x @ w["w"] + w["b"]) * p["gain"]


def plain(p, ids, y):
    x, _ = jax.lax.scan(lambda x, w: (layer(p, x, w), None), p["emb"][ids], p["blocks"])
    return error(x, p, y)


def tied(p, ids, y):
    """Carries of a tree, further inputs, and two results. One is in the loss."""

    @jax.checkpoint
    def body(carry, each):
        (x, i), (w, bias, key) = carry, each
        x = layer(p, x, w) + bias * jax.random.uniform(key, bias.shape)
        return (x, i + 1), {"sum": x.sum(), "step": i}

    keys = jax.random.split(jax.random.key(0), LAYERS)
    first = p["emb"][ids], 0
    (x, steps), seen = jax.lax.scan(body, first, (p["blocks"], p["bias"], keys))
    again = jnp.sum(x @ p["emb"].T) / (1 + steps)
    return error(x, p, y) + 0.01 * again + 0.01 * seen["sum"].sum()


def reverse(p, ids, y):
    def body(x, w):
        return layer(p, x, w), x.mean()

    blocks = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), p)
    x, means = jax.lax.scan(body, p["emb"][ids], blocks["blocks"], reverse=True)
    return error(x, p, y) + means[0] * p["gain"].sum()


@jax.jit
def nested(p, ids, y):
    """The scan is inside of ``jit``, and has another one inside."""

    def body(x, w):
        return jax.lax.scan(lambda x, _: (layer(p, x, w), None), x, None, 2)[0], None

    return error(
        jax.jit(jax.lax.scan, static_argnums=0)(body, p["emb"][ids], p["blocks"])[0],
        p,
        y,
    )


def grouped(p, ids, y):
    """A scan over groups of two layers, and inside of it a scan over layers."""
    w = {"w": p["blocks"]["w"].reshape(2, -1), "b": p["blocks"]["b"]}
    w["b"] = w["b"].T.astype(jnp.bfloat16).T.reshape(2, -1, WIDTH)

    @jax.checkpoint
    def outer(x, w):
        w = {"w": w["w"].reshape(-1, WIDTH, WIDTH), "b": w["b"].astype(jnp.float32)}
        return jax.lax.scan(lambda x, w: (layer(p, x, w), None), x, w)[0], None

    return error(jax.lax.scan(outer, p["emb"][ids], w)[0], p, y)


def unrolled(p, ids, y):
    w = p["blocks"] | {"twice": p["blocks"]["w"].astype(jnp.float32)}

    def body(x, w):
        return layer(p, x, w) + x @ w["twice"], None

    return error(jax.lax.scan(body, p["emb"][ids], w, unroll=2)[0], p, y)


LOSSES = [plain, tied, reverse, nested, grouped, unrolled]


def train(loss_fn, tx, params, *batch, steps=4, extra=None, **how):
    step = gx.minimize(loss_fn, tx, **how)
    state = tx.init(params)
    losses = []
    for _ in range(steps):
        params, state, *loss = step(params, state, *batch, **(extra or {}))
        losses.append(loss)
    return params, state, losses


def numbers(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64)


def check(loss_fn, tx, make=start, *batch, layers=("blocks",), rtol=2e-6, **how):
    """The steps with layers and without give the same, to the type."""
    batch = how.pop("batch", batch or (IDS, Y))
    wanted, got = (
        train(loss_fn, tx, make(), *batch, layers=names, **how)
        for names in ((), layers)
    )
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    types, expected = ([*map(jax.typeof, jax.tree.leaves(x))] for x in (got, wanted))
    assert types == expected
    got, wanted = jax.tree.map(numbers, (got, wanted))
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=rtol / 4)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_in_any_form(loss_fn):
    check(loss_fn, optax.adamw(1e-2))


SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 5)


def decayed(params):
    """By the number of axes, as the whole parameters have it."""
    return jax.tree.map(lambda p: p.ndim > 2, params)


def stacked(params):
    return {name: int(name in ("blocks", "bias")) for name in params}


LABELS = {
    "emb": "adam",
    "blocks": {"w": "adagrad", "b": "adam"},
    "bias": "none",
    "head": "adagrad",
    "gain": "adam",
}
OPTIMIZERS = {
    "sgd": optax.sgd(SCHEDULE),
    "norms": optax.chain(
        gx.measure_norms(stacked_axes=stacked),
        optax.adamw(SCHEDULE),
        gx.measure_norms(stacked_axes=stacked),
    ),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(SCHEDULE),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.1, mask=decayed),
    "lion": optax.lion(SCHEDULE, weight_decay=0.1),
    "adagrad": gx.adagrad(SCHEDULE),
    "row-wise adagrad": gx.adagrad(0.1, row_wise=True, clipvalue=0.01),
    "ftrl": gx.ftrl(0.1, l1_regularization_strength=0.001),
    "novograd": gx.novograd(SCHEDULE, weight_decay=0.1, stacked_axes=stacked),
    "chain": optax.chain(
        optax.clip(0.01),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, decayed),
        optax.scale_by_learning_rate(SCHEDULE),
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(SCHEDULE),
    "partition": optax.partition(
        {
            "adam": optax.adam(1e-2),
            "adagrad": gx.adagrad(0.1),
            "none": optax.set_to_zero(),
        },
        LABELS,
    ),
    "masked": optax.masked(optax.adam(1e-2), decayed),
    "low_bit_state": gx.low_bit_state(optax.adam(1e-2), min_size=8, block_size=8),
    "schedule_free": optax.contrib.schedule_free(optax.adam(1e-2), 1e-2),
    "lazy": gx.lazy(optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name):
    check(tied, OPTIMIZERS[name])


@pytest.mark.parametrize("residual_dtype", ["int16", "int8", "bfloat16"])
def test_master_weights(residual_dtype):
    tx = gx.master_weights(optax.adamw(SCHEDULE), residual_dtype=residual_dtype)
    make = functools.partial(start, "bfloat16")
    wanted, got = (
        train(plain, tx, make(), IDS, Y, layers=names) for names in ((), ("blocks",))
    )
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, wanted)
    got, wanted = (gx.get_master_weights(p, state) for p, state, _ in (got, wanted))
    chex.assert_trees_all_close(got, wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        gx.accumulate(optax.adamw(SCHEDULE), 2),
        gx.accumulate(gx.adagrad(0.1), 3, reduction="sum"),
        optax.MultiSteps(optax.adamw(SCHEDULE), 2),
        optax.chain(optax.clip(0.01), gx.accumulate(optax.sgd(0.1), 2)),
    ],
)
def test_micro_batches(tx):
    """The sum of a layer is added to in place, and the last push applies it."""
    check(tied, tx, steps=5)


@pytest.mark.parametrize(("layers", "width"), [(3, 128), (4, 128), (15, 64), (16, 64)])
@pytest.mark.parametrize("around", [lambda tx: tx, optax.chain])
def test_micro_batches_of_stacks_with_about_65536_entries(layers, width, around):
    """One more layer takes such a stack to another size of kernels."""

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean(x**2)

    def make():
        return {"w": jnp.full((layers, width, width), 1 / width, jnp.float32)}

    tx = around(gx.accumulate(optax.sgd(0.1), 2))
    check(loss_fn, tx, make, jnp.ones((2, width)), layers=("w",), steps=2)


@pytest.mark.slow
def test_micro_batches_with_weights_and_a_last_one():
    tx = gx.accumulate(optax.adamw(SCHEDULE), 3)
    steps = [gx.minimize(tied, tx, layers=names) for names in ((), ("blocks",))]
    left = []
    for step in steps:
        params, state = start(), tx.init(start())
        for number, weight in enumerate([1.0, 3.0, 12.0, 0.0, 2.0]):
            y, last = Y * (number + 1), number == 4
            params, state, _ = step(params, state, IDS, y, weight=weight, last=last)
        assert state.global_step == 2
        left.append((params, state.inner_state))
    chex.assert_trees_all_close(*left, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gate",
    [gx.drop_stale, functools.partial(gx.conditional_accumulator, num_required=2)],
)
def test_a_stale_push_changes_nothing(gate):
    tx = gate(optax.adamw(SCHEDULE), max_staleness=1)
    check(tied, tx, extra={"local_step": 0}, steps=6)  # The last pushes are stale.


def test_a_state_keeps_its_weak_type():
    def update(updates, state, params=None):
        return updates, jnp.asarray(0.5)  # It is in the jaxpr as a number.

    rate = optax.GradientTransformation(lambda params: jnp.asarray(0.5), update)
    check(plain, optax.chain(rate, optax.sgd(0.1)))


def test_an_update_gets_the_loss_and_extra_arguments():
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    check(plain, tx)
    tx = gx.compensate_delay(0.1)
    check(plain, optax.chain(tx, optax.sgd(0.1)), extra={"worker_params": start()})


@pytest.mark.parametrize("shape", [(), (1,), (WIDTH,)])
def test_an_extra_argument_has_other_shapes(shape):
    """It is a tree like the parameters, but without layers."""

    def update(updates, state, params=None, *, factors):
        return jax.tree.map(lambda g, f: -g * f, updates, factors), state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    factors = {name: jnp.array(0.1) for name in ("emb", "bias", "head", "gain")}
    factors |= {"blocks": {"w": jnp.full(shape, 0.1), "b": jnp.full(shape, 0.2)}}
    check(plain, tx, extra={"factors": factors})


@pytest.mark.slow
def test_aux_comes_last():
    def with_aux(params, ids, y):
        return tied(params, ids, y), {"n": ids.sum(), "x": params["emb"][ids]}

    check(with_aux, optax.adam(1e-2), has_aux=True)


@pytest.mark.parametrize("frozen", ["emb blocks/b", "emb bias head gain"])
def test_frozen_leaves_stay(frozen):
    """Also one inside of the layers, where it is a further input of the scan."""

    def learns(params):
        return jax.tree.map_with_path(
            lambda path, _: (
                not {"/".join(k.key for k in path[:n]) for n in (1, 2)}
                & {*frozen.split()}
            ),
            params,
        )

    check(tied, optax.adamw(1e-2), trainable=learns)


def test_a_masked_node_stays():
    """It is no parameter, also inside of the layers."""

    def make():
        params = start() | {"n": optax.MaskedNode()}
        return params | {"blocks": params["blocks"] | {"n": optax.MaskedNode()}}

    def loss_fn(p, ids, y):
        assert isinstance(p["n"], optax.MaskedNode)
        return plain(p, ids, y)

    check(loss_fn, optax.adamw(1e-2), make)


@pytest.mark.parametrize(
    "layers", [("blocks/w",), ("blocks/w", "bias"), ("blocks", "bias")]
)
def test_some_stacks_are_layers(layers):
    check(tied, optax.adamw(1e-2), layers=layers)


# Only what depends on trainable parameters is differentiated, as in the plain step.


def halved(x):
    """A loop without a known number of steps has no derivative in reverse mode."""
    return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)


def sine(x):
    """Neither has a call to the host."""
    return jax.pure_callback(np.sin, x, x)


def over_data(p, ids, y):
    """In front of the scan, in it over a carry and what it goes over, and behind it."""
    weights = halved(y + 3)

    def body(carry, each):
        (x, noise, late), (w, bias) = carry, each
        noise = sine(halved(noise))
        x = layer(p, x, w) + 0.1 * sine(jax.lax.stop_gradient(bias)) + noise.mean()
        late = late * 0.5 + x.mean()  # It depends on parameters after one layer.
        return (x, noise, late), (late, noise)

    first = p["emb"][ids], y, jnp.zeros(())
    scanned = p["blocks"], jax.lax.stop_gradient(p["bias"])
    (x, noise, late), (_, noises) = jax.lax.scan(body, first, scanned)
    factor = halved(noise + noises.mean(0)) + sine(weights)
    return error(x, p, y * factor) + late


@pytest.mark.parametrize("learns", ["all", "blocks", "blocks head"])
def test_loops_and_callbacks_over_data(learns):
    trainable = {name: learns == "all" or name in learns for name in start()}
    check(over_data, optax.adamw(1e-2), trainable=trainable)


def test_a_loop_over_parameters_has_no_derivative():
    def loss_fn(p, ids, y):
        return plain(p, ids, y) * halved(p["gain"]).sum()

    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["blocks"])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        step(start(), optax.sgd(0.1).init(start()), IDS, Y)


@pytest.mark.parametrize(
    ("shape", "shapes"),
    [
        ((LAYERS * WIDTH, WIDTH), [(LAYERS, WIDTH, WIDTH), (2, -1, WIDTH, WIDTH)]),
        ((LAYERS, WIDTH**2), [(LAYERS, WIDTH, WIDTH), (2, -1, WIDTH, WIDTH)]),
        ((2, 2, WIDTH**2), [(LAYERS, -1), (2, -1, 2, WIDTH), (2, -1, WIDTH, WIDTH)]),
    ],
)
@pytest.mark.parametrize("is_cast", [False, True])
def test_a_stack_is_reshaped_more_than_once(shape, shapes, is_cast):
    """Groups of two layers come last."""

    def loss_fn(p, x):
        w = p["w"]
        for k, new in enumerate(shapes):
            w = w.reshape(new)
            if is_cast:
                w = w.astype([jnp.bfloat16, jnp.float32][k % 2])
        w = w.astype(jnp.float32)

        def body(x, group):
            for w in group:
                x = jnp.tanh(x @ w)
            return x, None

        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    def make():
        draw = np.random.default_rng(0).standard_normal(shape)
        return {"w": jnp.asarray(0.2 * draw, jnp.float32)}

    x = jnp.ones((2, WIDTH))
    check(loss_fn, optax.adamw(1e-2), make, x, layers=["w"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_few_layers_are_reshaped(number):
    """One layer could lie along any axis: it is the first one."""

    def loss_fn(p, x):
        w = p["w"].reshape(-1, WIDTH, WIDTH)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.sum(x**2)

    def make():
        return {"w": jnp.linspace(-0.3, 0.3, number * WIDTH**2).reshape(number, -1)}

    x = jnp.ones((2, WIDTH))
    for tx in [
        gx.novograd(0.1, stacked_axes=1),
        gx.low_bit_state(optax.adam(1e-2), min_size=8, block_size=8),
    ]:
        check(loss_fn, tx, make, x, layers=["w"], rtol=1e-4)


# A norm of all gradients first.


def measured():
    """A norm for the log, which no update needs."""

    def update(updates, state, params=None):
        return updates, optax.ScaleByScheduleState(count=optax.tree.norm(updates))

    def init(params):
        return optax.ScaleByScheduleState(count=jnp.zeros(()))

    return optax.GradientTransformation(init, update)


CLIPPED = optax.chain(gx.clip_by_global_norm(0.1), optax.adamw(SCHEDULE))
REDUCING = {
    "clip_by_global_norm": CLIPPED,
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "optax.clip_by_global_norm": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2)
    ),
    "global_clipnorm": gx.adagrad(0.1, global_clipnorm=0.1),
    "clip_by_zscore": optax.chain(gx.contrib.clip_by_zscore(0.5), optax.adam(1e-2)),
    "skip_spikes": gx.skip_spikes(optax.adamw(1e-2), sigmas=0.5, warmup=2),
    "skip_nonfinite": gx.accumulate(optax.adamw(1e-2), 2, skip_nonfinite=True),
    "apply_if_finite": optax.apply_if_finite(CLIPPED, 2),
    "accumulate": gx.accumulate(CLIPPED, 2),
    "gates": gx.conditional_accumulator(gx.skip_spikes(CLIPPED), 2, max_staleness=1),
    "inject_hyperparams": optax.chain(
        optax.inject_hyperparams(gx.clip_by_global_norm)(0.1), optax.sgd(0.1)
    ),
    "norm": optax.chain(measured(), optax.adamw(SCHEDULE)),
    "norm of updates": optax.chain(optax.adamw(SCHEDULE), measured()),
    "maximum": optax.stateless(
        lambda u, _: optax.tree.scale(-1 / optax.tree.max(jax.tree.map(abs, u)), u)
    ),
    "dot": optax.stateless(
        lambda u, p: optax.tree.add_scale(u, -optax.tree.vdot(u, p), p)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCING)
def test_two_passes(name):
    """A first pass finds out the norm, also of the leaves that are no layers."""
    extra = {"local_step": 0} if name == "gates" else None
    check(tied, REDUCING[name], two_passes=True, extra=extra, steps=6)
    if name in ("clip_by_global_norm", "accumulate"):
        learns = {name: name == "blocks" for name in start()}
        check(tied, REDUCING[name], two_passes=True, trainable=learns)


def test_a_push_with_nan_is_skipped():
    tx = gx.accumulate(optax.adamw(1e-2), 1, skip_nonfinite=True)
    step = gx.minimize(plain, tx, layers=["blocks"], two_passes=True, donate=False)
    params, state = start(), tx.init(start())
    for name in ("emb", "head"):  # Of the forward pass, of the backward pass.
        bad = params | {name: params[name].at[0].set(jnp.nan)}
        new, after, _ = step(bad, state, IDS, Y)
        chex.assert_trees_all_equal(new, bad)
        assert (after.global_step, after.nonfinite_count) == (0, 1)
    new, after, _ = step(params, state, IDS, Y)
    assert after.global_step == 1


@pytest.mark.parametrize(
    "tx", [optax.lamb(0.1), optax.chain(CLIPPED, optax.clip_by_global_norm(0.1))]
)
def test_a_norm_that_depends_on_another_is_refused(tx):
    step = gx.minimize(plain, tx, layers=["blocks"], two_passes=True)
    with pytest.raises(TypeError, match="a third pass, as 'reduce_sum'"):
        step(start(), tx.init(start()), IDS, Y)


# Models of frameworks.

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, WIDTH)), jnp.float32)


def linen(axis):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            start = nn.initializers.lecun_normal()
            named = nn.with_logical_partitioning(start, (None, "model"))
            return x + nn.Dense(WIDTH, kernel_init=named)(nn.gelu(x)), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(
                nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable),
                variable_axes={"params": axis},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = scanned(name="blocks")(nn.Dense(WIDTH)(x), None)
            return nn.Dense(1)(x)

    model = Model()
    return model.apply, model.init(jax.random.key(0), X), "params/blocks"


def through_nnx():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return x + self.drop(nnx.gelu(self.linear(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))
            self.blocks = make(rngs)
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            @nnx.remat
            def forward(layer, x):
                return layer(x)

            return self.head(forward(self.blocks, x))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x)

    return apply, params, "blocks"


def equinox():
    """Its stack has an array that does not learn, and functions."""
    a, b = jax.random.split(jax.random.key(0))

    @eqx.filter_vmap
    def make(key, number):
        mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, activation=jax.nn.gelu, key=key)
        return {"mlp": mlp, "number": number}

    blocks = make(jax.random.split(a, LAYERS), jnp.arange(LAYERS))
    model = {"blocks": blocks, "head": eqx.nn.Linear(WIDTH, 1, key=b)}
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, x):
        model = eqx.combine(params, rest)
        arrays, functions = eqx.partition(model["blocks"], eqx.is_array)

        @eqx.filter_checkpoint
        def body(x, arrays):
            block = eqx.combine(arrays, functions)
            return x + block["mlp"](x) / (1 + block["number"]), None

        def one(x):
            return model["head"](jax.lax.scan(body, x, arrays)[0])

        return jax.vmap(one)(x)

    return apply, params, "blocks"


def haiku():
    def layer(x):
        return x + jnp.tanh(hk.Linear(WIDTH)(hk.LayerNorm(-1, True, True)(x)))

    def model(x):
        x = hk.experimental.layer_stack(LAYERS, name="blocks")(hk.remat(layer))(x)
        return hk.Linear(1)(x)

    pure = hk.without_apply_rng(hk.transform(model))
    params = pure.init(jax.random.key(0), X)
    return pure.apply, params, "blocks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (functools.partial(linen, 0), "low_bit_state"),
        (functools.partial(linen, 1), "adamw"),
        (functools.partial(linen, 1), "low_bit_state"),
        (through_nnx, "adamw"),
        (equinox, "adamw"),
        (haiku, "adagrad"),
    ],
)
def test_a_model_of_a_framework(make, name):
    apply, params, layers = make()

    def loss_fn(params, x):
        return jnp.mean((apply(params, x) - 1) ** 2)

    def copied():
        return jax.tree.map(jnp.array, params)

    check(loss_fn, OPTIMIZERS[name], copied, X, layers=[layers])


# Many devices.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "name", ["adamw", "adagrad", "low_bit_state", "clip_by_global_norm"]
)
def test_sharded_parameters(name, kind, in_context):
    """The width of the layers lies on two axes, the batch on one of them."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)

    def make():
        params = start()
        specs = {"w": P(None, "data", "model"), "b": P(None, "model")}
        specs = {name: P() for name in params} | {"blocks": specs}
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs
        )

    def loss_fn(p, x, y):
        def body(x, w):
            w, b = (
                jax.sharding.reshard(v, NamedSharding(mesh, P()))
                if kind is AxisType.Explicit
                else v
                for v in (w["w"], w["b"])
            )
            return x + jnp.tanh(x @ w + b), None

        return error(jax.lax.scan(body, x, p["blocks"])[0], p, y)

    rng = np.random.default_rng(0)
    batch = (
        jnp.asarray(rng.standard_normal((4, n)), jnp.float32) for n in (WIDTH, WORDS)
    )
    batch = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in batch]
    with in_context(mesh):
        tx, two_passes = (OPTIMIZERS | REDUCING)[name], name in REDUCING
        check(loss_fn, tx, make, *batch, rtol=1e-5, two_passes=two_passes)


# What is whole on each device cannot become a part of it in place.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", ["adamw", "low_bit_state"])
def test_state_that_no_explicit_axis_knows(name):
    """It comes from ``jax.jit(tx.init)`` outside of ``jax.set_mesh``."""
    if name == "adamw" and jax.__version_info__ < (0, 12):
        pytest.skip("There jit makes no zeros like an array on a mesh.")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    tx = OPTIMIZERS[name]
    tx = optax.GradientTransformation(jax.jit(tx.init), tx.update)

    def make():
        specs = {"w": P(None, "a", "b"), "b": P(None, "b")}
        blocks = start()["blocks"]
        return {
            k: jax.device_put(x, NamedSharding(mesh, specs[k]))
            for k, x in blocks.items()
        }

    def loss_fn(p):
        def body(x, w):
            return x + jnp.sum(jnp.sin(w["w"])) * jnp.sum(jnp.cos(w["b"])), None

        return jax.lax.scan(body, 0.0, p)[0]

    check(loss_fn, tx, make, layers=["w", "b"], batch=(), rtol=1e-5, steps=2)


def test_sharded_layers(in_context):
    """On explicit axes no device can take one of them."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    bias = jax.device_put(start()["bias"], NamedSharding(mesh, P("data")))

    def loss_fn(p):
        bias = jax.sharding.reshard(p["bias"], NamedSharding(mesh, P()))
        return jax.lax.scan(lambda c, w: (c + w.sum(), None), 0.0, bias)[0]

    params = {"bias": bias}
    with in_context(mesh):
        step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["bias"])
        message = "'bias' is one of .* its layers are sharded over 'data'"
        with pytest.raises(ValueError, match=message):
            step(params, optax.sgd(0.1).init(params))


@pytest.mark.slow
def test_in_shard_map():
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,))
    tx = CLIPPED

    def trained(layers):
        step = gx.minimize(
            lambda p, *batch: jax.lax.pmean(tied(p, *batch), "data"),
            tx,
            layers=layers,
            two_passes=True,
            donate=False,
        )

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), P(), P("data"), P("data")),
            out_specs=P(),
        )
        def run(params, state, ids, y):
            return step(params, state, ids, y)

        params, state = start(), tx.init(start())
        for _ in range(3):
            params, state, loss = run(params, state, IDS, Y)
        return params, state, loss

    chex.assert_trees_all_close(trained(("blocks",)), trained(()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("layers", [(), ("blocks",)])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("names", [("x",), ("x", "y")])
def test_8_bits_in_shard_map(names, axis_type, layers):
    """State that is made and stepped on each device is that of one device."""
    shape = (2,) * len(names)
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))
    tx = gx.low_bit_state(optax.adam(0.1), block_size=8, min_size=64)

    def trained(loss_fn, params, *batch):
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
        state, loss = tx.init(params), 0
        for _ in range(3):
            params, state, loss = step(params, state, *batch)
        return params, loss

    def mean(params, *batch):
        return jax.lax.pmean(tied(params, *batch), names)

    batch = [jnp.repeat(x[:1], mesh.size, 0) for x in (IDS, Y)]
    on_mesh = jax.shard_map(
        functools.partial(trained, mean),
        mesh=mesh,
        in_specs=(P(), *[P(names)] * len(batch)),
        out_specs=P(),
    )
    placed = jax.device_put(batch, NamedSharding(mesh, P(names)))
    got = jax.jit(on_mesh)(start(), *placed)
    wanted = trained(tied, start(), *[x[:1] for x in batch])
    chex.assert_trees_all_close(*jax.device_get((got, wanted)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_clip_over_a_mesh_axis():
    """Each device has a part of each layer, so the norm is a sum over devices, too."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    parts = {"blocks": {"w": P(None, None, "model"), "b": P(None, "model")}}
    params = {"blocks": start()["blocks"]}
    clip = gx.clip_by_global_norm(0.05, axis_name="model")
    tx = optax.chain(clip, optax.sgd(0.5))

    def loss_fn(params):
        def body(x, w):
            part = jnp.sum(jnp.sin(w["w"]) @ jnp.cos(w["b"]))
            return x + jax.lax.psum(part, "model"), None

        return jax.lax.scan(body, 0.0, params["blocks"])[0] ** 2

    def trained(layers):
        step = gx.minimize(loss_fn, tx, layers=layers, two_passes=True, donate=False)
        run = functools.partial(jax.shard_map, mesh=mesh, in_specs=(parts,))
        run = jax.jit(run(lambda p: step(p, tx.init(p))[0], out_specs=parts))
        return run(run(params))

    chex.assert_trees_all_close(trained(("blocks",)), trained(()), rtol=2e-6, atol=1e-6)
    got, wanted = trained(("blocks",)), params
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, got, wanted))
    assert 0.02 < moved < 0.0501  # Two clipped steps of 0.5 · 0.05.


# Errors.


def loss_of(use):
    def loss_fn(p, ids, y):
        return tied(p, ids, y) + use(p)

    return loss_fn


def from_host():
    """Another number at each call."""
    numbers = itertools.count(1.0)
    get = functools.partial(next, numbers)
    return io_callback(lambda: np.float32(get()), jax.ShapeDtypeStruct((), "float32"))


@pytest.mark.parametrize(
    ("loss_fn", "layers", "message"),
    [
        (
            tied,
            ("block",),
            "layers must name .* got 'block'; there are 'blocks/w', .*and 3 more",
        ),
        (tied, ("gain",), "'gain' is one of layers, but it is used by 'scan'"),
        (tied, ("head",), "'head' is one of layers, but it is used by .*'dot_gen"),
        (
            loss_of(lambda p: (p["blocks"]["w"] ** 2).sum()),
            ("blocks",),
            r"'blocks/w' is one of layers, but it is used by .*test_layers.py",
        ),
        (
            loss_of(
                lambda p: jax.lax.scan(
                    lambda c, w: (c + w.sum(), None), 0.0, p["blocks"]["b"]
                )[0]
            ),
            ("blocks",),
            "'blocks/b' is one of layers, but a second scan goes over it, 'scan'",
        ),
        (
            loss_of(
                lambda p: jax.lax.scan(lambda c, w: (c + w.sum(), None), 0.0, p["emb"])[
                    0
                ]
            ),
            ("blocks/w", "bias", "emb"),
            "'emb' is one of layers",
        ),
        (
            lambda p, ids, y: error(p["emb"][ids], p, y),
            ("blocks",),
            "'blocks/b' is one of layers, but no scan goes over it",
        ),
        (
            lambda p, ids, y: jax.lax.scan(
                lambda c, w: (c + w.sum(), None),
                0.0,
                p["blocks"]["w"].reshape(-1, WIDTH),
            )[0],
            ("blocks/w",),
            "'blocks/w' is one of layers, but it is used by 'reshape'",
        ),
        (loss_of(lambda p: 0.0), ("blocks", "head"), "'head' is one of layers"),
        (
            lambda p, ids, y: jax.lax.scan(
                lambda c, w: (c + from_host() * w.sum(), None), 0.0, p["bias"]
            )[0],
            ("bias",),
            r"'bias' is one of layers, but 'scan' .*test_layers.py.* has an io_call",
        ),
    ],
)
def test_a_stack_that_is_read_in_another_way(loss_fn, layers, message):
    tx = optax.sgd(0.1)
    step = gx.minimize(loss_fn, tx, layers=layers)
    params = start()
    state = tx.init(params)
    with pytest.raises(ValueError, match=message):
        step(params, state, IDS, Y)
    jax.block_until_ready(params)  # Nothing is lost.


@pytest.mark.slow
def test_a_debugger_gets_the_ordinary_step():
    with jax.disable_jit():
        check(plain, optax.sgd(0.1))


def test_a_state_of_another_transformation():
    step = gx.minimize(plain, optax.adam(0.1), layers=["blocks"])
    with pytest.raises(TypeError, match=r"state is not that of tx: at .*AdamState"):
        step(start(), optax.sgd(0.1).init(start()), IDS, Y)


def test_one_scan_goes_over_two_axes_of_a_stack():
    def loss_fn(p):
        both = p["w"], p["w"].transpose(1, 0, 2)
        return jax.lax.scan(lambda x, w: (x + (w[0] * w[1]).sum(), None), 0.0, both)[0]

    params = {"w": jnp.ones((3, 3, 2))}
    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["w"])
    with pytest.raises(ValueError, match=r"'w' is one of layers, but a second scan"):
        step(params, optax.sgd(0.1).init(params))


def test_integers():
    params = start() | {"n": jnp.ones(LAYERS, jnp.int32)}
    step = gx.minimize(tied, optax.sgd(0.1), layers=["blocks"])
    with pytest.raises(TypeError, match=r"int32 at \['n'\] has no gradient"):
        step(params, optax.sgd(0.1).init(params), IDS, Y)


def test_layers_is_no_sequence():
    for layers in ("blocks", None, (x for x in ["blocks"])):
        with pytest.raises(TypeError, match=r"layers must be a sequence of paths, got"):
            gx.minimize(tied, optax.sgd(0.1), layers=layers)


def test_no_layer():
    params = jax.tree.map(lambda x: x[:0], start()) | {"head": start()["head"]}
    params |= {"emb": start()["emb"], "gain": start()["gain"]}
    step = gx.minimize(plain, optax.sgd(0.1), layers=["blocks"])
    with pytest.raises(ValueError, match=r"'blocks/b' is one of .* it has no layer"):
        step(params, optax.sgd(0.1).init(params), IDS, Y)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.lamb(0.1), "its update may mix layers, by 'reduce_sum'"),
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            "its update may mix layers, by 'reduce_sum'.*two_passes",
        ),
        (optax.adafactor(0.1, min_dim_size_to_factor=4), r"v_row\['blocks'\]\['b'\]"),
        (optax.stateless(lambda u, _: optax.tree.scale(from_host(), u)), "io_callback"),
        (optax.noisy_sgd(0.1, key=jax.random.key(0)), "'random_bits'"),
        (gx.novograd(0.1), r"nu\['blocks'\]\['b'\] .* has no layer for each"),
        (optax.flatten(optax.adam(0.1)), r"\[0\].mu of ScaleByAdamState"),
        (optax.apply_if_finite(optax.sgd(0.1), 2), "by 'reduce_and'.*two_passes"),
        (
            optax.stateless(
                lambda u, _: (
                    u | {"blocks": optax.tree.scale(u["gain"].sum(), u["blocks"])}
                )
            ),
            "reads gradients of other parameters, .* after the last layer, by ",
        ),
    ],
)
def test_what_mixes_layers_is_refused(tx, message):
    params = jax.tree.map(lambda x: jnp.concatenate([x] * 2), start())
    params |= {name: start()[name] for name in ("emb", "head", "gain")}
    step = gx.minimize(plain, tx, layers=["blocks"])
    state = tx.init(params)
    with pytest.raises(
        TypeError, match=f"run this transformation: .*{message}"
    ) as error:
        step(params, state, IDS, Y)
    assert "those of 'blocks/b' and 1 more." in str(error.value)
    helps = any(x in message for x in ("after the last layer", "two_passes", "nu"))
    assert ("With two_passes=True" in str(error.value)) == helps
    jax.block_until_ready((params, state))


# Sizes between two thresholds.


def vectors(length, *shapes):
    """Stacks of these shapes, and a function that makes them anew."""

    def make():
        rng = np.random.default_rng(0)
        blocks = [
            jnp.asarray(0.3 * rng.standard_normal((length, *shape)), "float32")
            for shape in shapes
        ]
        return {"blocks": blocks, "head": jnp.ones(3)}

    return make


def of_vectors(p):
    def body(x, w):
        return x + sum(jnp.mean(jnp.sin(x + v)) for v in w) / len(w), None

    return jax.lax.scan(body, p["head"].mean(), p["blocks"])[0]


def by_comparison(length, width=128):
    """An optimizer of a user, which decides by the size of a leaf."""
    state = optax.trace(0.9)

    def update(updates, trace, params=None):
        updates, trace = state.update(updates, trace)
        return jax.tree.map(
            lambda u: -u if u.size == length * width else -2 * jnp.sign(u), updates
        ), trace

    return optax.GradientTransformation(state.init, update)


def by_size(params):
    limit = 15 * 256
    return jax.tree.map(lambda p: "m" if p.size > limit else "n", params)


@pytest.mark.parametrize(
    ("length", "shapes", "tx"),
    [
        (3, [(128, 128), (147, 149)], gx.accumulate(optax.adam(0.1), 2)),
        (15, [(64, 64), (66, 67)], gx.accumulate(optax.adam(0.1), 2)),
        (15, [(256,), (274,)], gx.low_bit_state(optax.adam(0.1))),
        (1, [(4095,), (4096,), (64, 64)], gx.low_bit_state(optax.adam(0.1))),
        (1, [(7,), (8, 8)], gx.novograd(0.1, stacked_axes={"blocks": 1, "head": 0})),
        (1, [(7,), (8, 8)], optax.lamb(0.1)),
        (1, [(7,), (8, 8)], optax.noisy_sgd(0.1, key=jax.random.key(0))),
        (127, [(256,)], gx.low_bit_state(optax.adam(0.1))),
        (128, [(256,)], gx.low_bit_state(optax.adam(0.1), block_axis=-1)),
        (129, [(256,), (8, 8)], gx.low_bit_state(optax.adam(0.1), block_axis=-1)),
        (2, [(127,), (128,), (129,)], by_comparison(2)),
        *(
            (
                length,
                [(256,), (255,)],
                optax.partition({"m": optax.adam(0.1), "n": optax.sgd(0.1)}, by_size),
            )
            for length in (15, 16)
        ),
    ],
)
def test_a_threshold_lies_near_the_size_of_a_stack(length, shapes, tx):
    """Another number of layers would be another program, or another state."""
    check(
        of_vectors, tx, vectors(length, *shapes), layers=["blocks"], batch=(), rtol=2e-5
    )


@pytest.mark.slow
@hypothesis.given(
    length=st.sampled_from([1, 2, 3, 127, 128, 129]),
    near=st.lists(st.tuples(st.sampled_from(thresholds()), st.integers(-1, 1))),
    names=st.lists(st.sampled_from(["adam", "momentum", "sum", "8 bits"]), max_size=2),
)
@hypothesis.settings(max_examples=12, deadline=None)
def test_any_number_of_layers_is_the_ordinary_step(length, near, names):
    """Also if so many layers of vectors have as many entries as a threshold."""
    tx = optax.sgd(0.1)
    for name in names:
        tx = {
            "adam": lambda tx: optax.chain(optax.scale_by_adam(), tx),
            "momentum": lambda tx: optax.chain(optax.trace(0.9), tx),
            "sum": lambda tx: gx.accumulate(tx, 2),
            "8 bits": functools.partial(gx.low_bit_state, block_axis=-1),
        }[name](tx)
    tx = optax.chain(by_comparison(length, LARGE // length), tx)
    shapes = [(max(n // length + more, 1),) for n, more in near[:2]]
    shapes = [(LARGE // length + 1,), *shapes]
    make = vectors(length, *shapes)
    check(of_vectors, tx, make, layers=["blocks"], batch=(), rtol=2e-5)


@pytest.mark.parametrize("length", [511, 512, 513])
def test_blocks_across_layers_are_refused(length):
    """A matrix of 512 rows is divided along them, and so are so many vectors."""
    tx, make = gx.low_bit_state(optax.adam(0.1)), vectors(length, (256,))
    step = gx.minimize(of_vectors, tx, layers=["blocks"])
    if length < 512:
        step.lower(make(), tx.init(make()))
        return
    message = r"scales\[1\] of LowBitState, of shape \[[49], 256\], has no layer for"
    with pytest.raises(TypeError, match=rf"{message} each .* block_axis=-1"):
        step.lower(make(), tx.init(make()))


@pytest.mark.slow
@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_a_row_of_the_contract_at_each_threshold(row):
    """It is the ordinary step, or refused, as it is far from them."""
    tx, near = row.make(), vectors(16, *((n,) for n in widths(16)))

    def lower(make):
        step = gx.minimize(of_vectors, tx, layers=["blocks"])
        step.lower(make(), tx.init(make()), **row.extra(make()))

    try:
        lower(vectors(4, (8,), (8, 8)))
    except TypeError:
        with pytest.raises(TypeError, match="cannot run this transformation"):
            lower(near)
    else:
        how = {"layers": ["blocks"], "extra": row.extra(near()), "steps": 2}
        rtol = 1e-2 if "bf16" in str(row) else 2e-5
        check(of_vectors, tx, near, batch=(), rtol=rtol, **how)


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "larger_model.md"
ROW = re.compile(r"^\| (?:by layers|with `two_passes`|not: ).*$", re.M)
VERDICTS = [
    (name, row.split("|")[1].strip())
    for row in ROW.findall(PAGE.read_text())
    for name in re.findall(r"`((?:gx|optax)\.[\w.]+)`", row)
]
ADAM = optax.adam(0.1)
# Arguments beside the learning rate; a link stands before an optimizer.
ARGUMENTS = {
    "gx.accumulate": {"inner": ADAM, "num_required": 2},
    "gx.contrib.clip_by_zscore": {},
    "gx.contrib.delayed_nesterov": {"learning_rate": 0.1, "num_delay": 2},
    "gx.delayed": {"inner": ADAM, "num_steps": 1},
    "gx.low_bit_state": {"inner": ADAM, "min_size": 8},
    "gx.master_weights": {"inner": ADAM},
    "gx.novograd": {"learning_rate": 0.1, "stacked_axes": stacked},
    "gx.skip_spikes": {"inner": ADAM},
    "optax.MultiSteps": {"opt": ADAM, "every_k_schedule": 2},
    "optax.add_noise": {"eta": 0.1, "gamma": 0.1, "key": 0},
    "optax.apply_if_finite": {"inner": ADAM, "max_consecutive_errors": 2},
    "optax.contrib.mechanize": {"base_optimizer": ADAM},
    "optax.contrib.muon": {
        "learning_rate": 0.1,
        "muon_weight_dimension_numbers": jax.tree.map(
            lambda x: (
                optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
                if x.ndim == 3
                else None
            ),
            jax.eval_shape(start),
        ),
    },
    "optax.contrib.prodigy": {},
    "optax.noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "optax.polyak_sgd": {},
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "verdict"), VERDICTS)
def test_which_optimizers_run_by_layers(name, verdict):
    """As the page says."""
    module, _, path = name.partition(".")
    make = operator.attrgetter(path)({"gx": gx, "optax": optax}[module])
    arguments = ARGUMENTS.get(name)
    tx = make(0.1) if arguments is None else make(**arguments)
    if name == "gx.accumulate" and "two_passes" in verdict:
        tx = make(**arguments, skip_nonfinite=True)
    dtype = "bfloat16" if name == "gx.master_weights" else "float32"
    params = start(dtype)
    state = jax.eval_shape(tx.init, params)

    refusals = []

    def runs(**how):
        try:
            gx.minimize(plain, tx, **how).lower(params, state, IDS, Y)
        except TypeError as error:
            refusals.append(str(error))
            return False
        return True

    assert runs()
    assert runs(layers=["blocks"]) == (verdict == "by layers")
    two = runs(layers=["blocks"], two_passes=True)
    assert two == (not verdict.startswith("not"))
    assert all("cannot run this transformation: " in x for x in refusals)
    assert all(len(x.partition("\n")[0]) <= 500 for x in refusals)


# Memory.


def compiled(tx, mesh, **how):
    params = placed(transformer(layers=16, width=256, vocabulary=256), mesh)
    state = placed(jax.eval_shape(tx.init, params), mesh)
    tokens = placed(jax.ShapeDtypeStruct((1, 16), jnp.int32), mesh)
    step = gx.minimize(next_tokens, tx, **how)
    program = step.lower(params, state, tokens).compile()
    return program.memory_analysis().temp_size_in_bytes / size(params)


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("sgd", 0.25),
        ("adamw", 0.25),
        ("adagrad", 0.25),
        ("clip_by_global_norm", 0.25),
        ("norm", 0.25),
        ("norm of updates", 0.4),  # Of two more parts of a layer.
    ],
)
def test_no_gradients_of_all_layers_are_kept(name, bound):
    tx, two_passes = (OPTIMIZERS | REDUCING)[name], name in REDUCING
    how = {"layers": ("layers",), "two_passes": two_passes}
    assert compiled(tx, devices("cpu")) > 1
    assert compiled(tx, devices("cpu"), **how) < bound


@pytest.mark.slow
@pytest.mark.figures
def test_norms_of_layers_for_a_log_cost_nothing():
    """And there is none for a whole stack: it says what to do."""
    how, adamw = {"layers": ("layers",)}, optax.adamw(1e-2)
    axes = {"embed": 0, "layers": 1, "norm": 0}
    tx = optax.chain(gx.measure_norms(stacked_axes=axes), adamw)
    least = compiled(adamw, devices("cpu"), **how)
    assert compiled(tx, devices("cpu"), **how) < least + 0.02  # One matrix of a layer.
    of_stacks = optax.chain(gx.measure_norms(), adamw)
    with pytest.raises(TypeError, match="MeasureNormsState"):
        compiled(of_stacks, devices("cpu"), **how)


def test_a_callback_with_a_layer_is_refused():
    def update(updates, state, params=None):
        for g in jax.tree.leaves(updates):
            jax.debug.callback(lambda _: None, g)
        return updates, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    step, params = gx.minimize(plain, tx, layers=["blocks"]), start()
    with pytest.raises(TypeError, match="debug_callback"):
        step(params, tx.init(params), IDS, Y)
