"""``minimize(layers=...)`` is the ordinary step, and keeps no gradients of layers."""

import functools
import itertools
import operator
import pathlib
import re

import chex
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from benchmarks.compilers import placed
from benchmarks.grid import devices
from benchmarks.models import next_tokens, size, transformer
from tests.conftest import half
from tests.descriptors import DESCRIPTORS, widths
from tests.in_numpy import Program as Traced
from tests.training.losses import (
    CLIPPED,
    HALF,
    IDS,
    LAYERS,
    LOSSES,
    OF_ROWS,
    OLD,
    ONE_PASS,
    ROWS,
    SCHEDULE,
    TWO_PASSES,
    WAYS,
    WIDTH,
    Loss,
    Way,
    Y,
    adapted,
    check,
    encode,
    error,
    halved,
    numbered,
    on_host,
    pairs,
    plain,
    read_rows,
    stacked,
    start,
    tied,
    train,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Losses and ways to step. tests/training/test_on_host.py has them with a state there,
# and compiles two passes.


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "way"), pairs(LOSSES, ONE_PASS))
def test_any_loss_and_any_optimizer(loss, way):
    check(LOSSES[loss], WAYS[way], compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "loss"), pairs(HALF, ["plain", "nested", "teacher"]))
def test_half_precision(way, loss):
    check(LOSSES[loss], WAYS[way], compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "loss"),
    [
        ("clip_by_global_norm", "encoder_and_decoder"),  # Of 4 layers and of 2.
        *pairs(TWO_PASSES, [*LOSSES][1:15]),
    ],
)
def test_two_passes(way, loss):
    """A first pass finds out the sums, also of the leaves that are no layers."""
    check(LOSSES[loss], WAYS[way])


TRACED = {
    "plain": "sums inside",
    "backwards": "clip_by_block_rms",
    "grouped": "accumulate",
    "unrolled": "a clip, then a sum",
    "over_data": "weak type",
    "partly_frozen": "norm of updates",
    "encoder_and_decoder": "clip_by_global_norm",
    "adapted": "partition",
    "two_teachers": "plateau",
    "teacher_first": "compensate_delay",
    "both_at_once": "maximum",
    "with_reads": "dot",
    "constant": "schedule_free",
    "looped_core": "adamw",
}


@pytest.mark.every
@pytest.mark.parametrize(
    ("loss", "memory"), pairs(TRACED, ["device"] if OLD else ["both", "device"])
)
def test_a_traced_step_is_the_ordinary_one(loss, memory):
    """Both run in NumPy, and nothing is compiled; with parameters on the host for TPU.

    There a loop carries a layer that comes ahead.
    """
    one, way = LOSSES[loss], WAYS[TRACED[loss]]
    params = one.make()
    state = way.tx.init(params)

    def stepped(layers, args, **how):
        step = gx.minimize(one.f, way.tx, layers=layers, donate=False, **one.how, **how)
        extra = way.extra(0, state, params)
        program = jax.make_jaxpr(lambda *args: step(*args, *one.batch, **extra))(*args)
        return Traced(program, platform)(params, state)

    platform, there = "cpu", (params, state)
    if memory == "both":
        platform, there = "tpu", on_host(there)
    got = stepped(one.layers, there, two_passes=way.two_passes)
    wanted = stepped((), (params, state))
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "layers"),
    [
        ("tied", ["blocks/w"]),
        ("tied", ["blocks/w", "bias"]),
        ("encoder_and_decoder", ["blocks"]),
        ("encoder_and_decoder", ["decoder"]),
        ("adapted", ["lora"]),
        ("adapted", ["base"]),
        ("chosen_and_rejected", ["blocks"]),
    ],
)
def test_some_stacks_are_layers(loss, layers):
    check(LOSSES[loss], optax.sgd(0.1), layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "layers"), pairs(OF_ROWS, [("blocks", "decoder"), ("decoder",)])
)
def test_tables_beside_layers(way, layers):
    one = Loss(read_rows, layers, functools.partial(start, "decoder"), how=ROWS)
    check(one, WAYS[way], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "layers"),
    [
        (optax.adamw(0.01), []),
        (optax.adamw(0.01), ["base", "lora"]),
        (gx.accumulate(optax.adam(0.01), 2), ["lora"]),
    ],
)
def test_a_state_for_the_trainable_part(tx, layers):
    """It is smaller, and the numbers are those of a state for all."""
    one = LOSSES[adapted.__name__]
    step = gx.minimize(one.f, tx, layers=layers, **one.how)
    params, wanted = one.make(), train(one, Way(tx))
    learns = one.how["trainable"]
    state = tx.init(
        {
            k: p if learns[k] else jax.tree.map(lambda _: None, p)
            for k, p in params.items()
        }
    )
    size = len(jax.tree.leaves(state))
    for (loss,) in wanted[2]:
        params, state, got = step(params, state, *one.batch)
        np.testing.assert_allclose(got, loss, rtol=2e-5)
    assert len(jax.tree.leaves(state)) == size < len(jax.tree.leaves(wanted[1]))
    chex.assert_trees_all_close(params, wanted[0], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_masked_node_stays():
    """It is no parameter, also inside of the layers."""

    def make():
        params = start() | {"n": optax.MaskedNode()}
        return params | {"blocks": params["blocks"] | {"n": optax.MaskedNode()}}

    def loss_fn(p, ids, y):
        assert isinstance(p["n"], optax.MaskedNode)
        return plain(p, ids, y)

    check(Loss(loss_fn, make=make), optax.sgd(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (WIDTH,)])
def test_an_extra_argument_has_other_shapes(shape):
    """It is a tree like the parameters, but without layers."""

    def update(updates, state, params=None, *, factors):
        return jax.tree.map(lambda g, f: -g * f, updates, factors), state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    factors = {name: jnp.array(0.1) for name in ("emb", "bias", "head", "gain")}
    factors |= {"blocks": {"w": jnp.full(shape, 0.1), "b": jnp.full(shape, 0.2)}}
    check(plain, Way(tx, lambda *_: {"factors": factors}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "shapes", "is_cast"),
    half(
        [
            (LAYERS * WIDTH, WIDTH),
            (LAYERS, WIDTH**2),
            (2, 2, WIDTH**2),
        ],
        [
            [(LAYERS, WIDTH, WIDTH), (2, -1, WIDTH, WIDTH)],
            [(LAYERS, -1), (2, -1, 2, WIDTH), (2, -1, WIDTH, WIDTH)],
        ],
        [False, True],
    ),
)
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

    one = Loss(loss_fn, ("w",), make, (jnp.ones((2, WIDTH)),), rtol=1e-5)
    check(one, optax.adamw(1e-2))


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

    one = Loss(loss_fn, ("w",), make, (jnp.ones((2, WIDTH)),))
    for tx in (gx.novograd(0.1, stacked_axes=1), WAYS["8 bits"].tx):
        check(one, tx, rtol=1e-4)


@pytest.mark.slow
def test_a_loss_reads_the_axis_of_a_vmap_by_its_name():
    """A model for each entry."""
    tx = gx.accumulate(optax.adam(0.01), 1)

    def loss_fn(*args):
        value = tied(*args)
        return value + jax.lax.pmean(value, "i") ** 2

    def run(layers):
        step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
        given = jax.tree.map(lambda x: jnp.stack([x, x]), (start(), tx.init(start())))
        both = jax.vmap(step, (0, 0, None, 0), axis_name="i")
        return both(*given, IDS, jnp.stack([Y, 2 * Y]))

    chex.assert_trees_all_close(run(["blocks"]), run(()), rtol=2e-6, atol=1e-6)


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        make = functools.partial(start, dtype="float64")
        one = Loss(lambda p, ids, y: jnp.mean(encode(p, p["emb"][ids]) ** 2), make=make)
        check(one, WAYS["weights"], rtol=1e-12)


@pytest.mark.slow
def test_a_debugger_gets_the_ordinary_step():
    with jax.disable_jit():
        check(plain, optax.sgd(0.1))


@pytest.mark.slow
def test_a_push_with_nan_is_skipped():
    tx = gx.accumulate(optax.sgd(0.1), 1, skip_nonfinite=True)
    step = gx.minimize(plain, tx, layers=["blocks"], two_passes=True, donate=False)
    params, state = start(), tx.init(start())
    for name in ("emb", "head"):  # Of the forward pass, of the backward pass.
        bad = params | {name: params[name].at[0].set(jnp.nan)}
        new, after, _ = step(bad, state, IDS, Y)
        chex.assert_trees_all_equal(new, bad)
        assert (after.global_step, after.nonfinite_count) == (0, 1)
    new, after, _ = step(params, state, IDS, Y)
    assert after.global_step == 1


# Micro-batches, by their formula.

BATCHES = np.random.default_rng(0).standard_normal((4, 3, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weighted_micro_batches_equal_float64(reduction):
    """L = mean(x) · Π w, so ∂L/∂w_i = mean(x) · Π w / w_i."""
    w, weights = np.linspace(0.5, 1.5, LAYERS), np.array([1.0, 3.0, 0.0, 12.0])

    def product(params, x):
        last, _ = jax.lax.scan(lambda h, w: (h * w, None), x, params["layers"])
        return jnp.mean(last)

    tx = gx.accumulate(optax.sgd(0.01), 4, reduction=reduction)
    step = gx.minimize(product, tx, layers=["layers"])
    params = {"layers": jnp.asarray(w, jnp.float32)}
    state, total = tx.init(params), 0.0
    for x, weight in zip(BATCHES, weights, strict=True):
        bad = x if weight else np.full_like(x, np.nan)  # Of no weight.
        params, state, _ = step(params, state, bad, weight=weight)
        total += np.mean(x, dtype=np.float64) * np.prod(w) / w * weight
    total = total / weights.sum() if reduction == "mean" else total
    np.testing.assert_allclose(params["layers"], w - 0.01 * total, rtol=1e-6)
    assert state.global_step == 1


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@pytest.mark.slow
@pytest.mark.parametrize("is_half", [False, True])
def test_a_weight_does_not_enter_the_backward_pass(is_half):
    """A rule clips its gradients, or float16 would overflow."""

    def loss_fn(p, ids, y):
        def body(x, w):
            if is_half:
                w = jax.tree.map(lambda x: x.astype(jnp.float16), w)
                return jnp.tanh(x.astype(jnp.float16) @ w["w"]).astype(x.dtype), None
            return clipped(x @ w["w"]), None

        return error(p, jax.lax.scan(body, p["emb"][ids], p["blocks"])[0], y)

    heavy = [1e6, 1e5, 3e6, 12e6]
    tx = gx.accumulate(optax.sgd(0.1), 4)
    check(Loss(loss_fn), Way(tx, lambda k, *_: {"weight": heavy[k]}))


@pytest.mark.every
@pytest.mark.parametrize("weight", [jnp.ones(2), "2", 1j])
def test_a_weight_that_is_none_is_an_error(weight):
    tx = gx.accumulate(optax.sgd(0.1), 2)
    step = gx.minimize(plain, tx, layers=["blocks"])
    with pytest.raises(TypeError, match="weight"):
        step(start(), tx.init(start()), IDS, Y, weight=weight)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [["blocks"], ()])
def test_a_weight_below_0_makes_a_compiled_step_nan(layers):
    tx = gx.accumulate(optax.sgd(0.1), 1)
    step = gx.minimize(tied, tx, layers=layers)
    new, *_ = step(start(), tx.init(start()), IDS, Y, weight=-1.0)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(new))


# Models of frameworks.

X = jnp.asarray(np.random.default_rng(0).standard_normal((3, WIDTH)), jnp.float32)


def linen():
    """Its layers lie along the second axis, in boxes."""

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
                variable_axes={"params": 1},
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
    [(linen, "8 bits"), (through_nnx, "accumulate"), (haiku, "adagrad")],
)
def test_a_model_of_a_framework(make, name):
    apply, params, layers = make()

    def loss_fn(params, x):
        return jnp.mean((apply(params, x) - 1) ** 2)

    check(Loss(loss_fn, (layers,), lambda: params, (X,)), WAYS[name])


# Many devices.


# What is whole on each device cannot become a part of it in place.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", ["adamw", "8 bits"])
def test_state_that_no_explicit_axis_knows(name):
    """It comes from ``jax.jit(tx.init)`` outside of ``jax.set_mesh``."""
    if name == "adamw" and jax.__version_info__ < (0, 12):
        pytest.skip("There jit makes no zeros like an array on a mesh.")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    tx = WAYS[name].tx
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

    check(Loss(loss_fn, ("w", "b"), make, ()), tx, steps=2, rtol=1e-5)


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
    return lambda p, ids, y: tied(p, ids, y) + use(p)


def from_host():
    """Another number at each call."""
    numbers = itertools.count(1.0)
    get = functools.partial(next, numbers)
    return io_callback(lambda: np.float32(get()), jax.ShapeDtypeStruct((), "float32"))


def scanned(w, of=jnp.sum):
    """Goes over a stack; its derivative is by that alone."""
    return jax.lax.scan(lambda c, w: (c + of(w), None), 0.0, w)[0]


def in_turns(loop):
    """As over steps in time, or of a core that is applied several times."""

    def loss_fn(p, ids, y):
        def turn(x, _=None):
            return encode(p, x), None

        x = p["emb"][ids]
        if loop == "scan":
            return error(p, jax.lax.scan(turn, x, None, length=2)[0], y)
        return error(p, jax.lax.fori_loop(0, 2, lambda _, x: turn(x)[0], x), y)

    return loss_fn


IN_TURNS = "'blocks/[bw]' .* used by 'scan' .*, a loop that reads it in each turn"
HERE = ".*test_layers.py.*"
# A loss, its layers, and the error.
REFUSED = {
    "no such name": (
        tied,
        ["block"],
        "layers must name .* got 'block'; there are 'blocks/w', .*and 3 more",
    ),
    "a constant of the scan": (
        tied,
        ["gain"],
        "'gain' is one of layers, but it is used by 'scan'",
    ),
    "a product": (
        tied,
        ["head"],
        "'head' is one of layers, but it is used by .*'dot_gen",
    ),
    "beside the scan": (
        loss_of(lambda p: (p["blocks"]["w"] ** 2).sum()),
        ["blocks"],
        "'blocks/w' is one of layers, but it is used by"
        + HERE
        + "Read each layer inside of the scan",
    ),
    "a second scan": (
        loss_of(lambda p: scanned(p["blocks"]["w"].transpose(1, 0, 2))),
        ["blocks"],
        "'blocks/w' is one of layers, but 'scan' .* goes over it along another axis "
        "than 'scan' .*losses.py",
    ),
    "a table": (
        loss_of(lambda p: scanned(p["emb"])),
        ["blocks/w", "bias", "emb"],
        "'emb' is one of layers",
    ),
    "no scan": (
        lambda p, ids, y: error(p, p["emb"][ids], y),
        ["blocks"],
        "'blocks/b' is one of layers, but no scan goes over it",
    ),
    "a reshape": (
        lambda p, ids, y: scanned(p["blocks"]["w"].reshape(-1, WIDTH)),
        ["blocks/w"],
        "'blocks/w' is one of layers, but it is used by 'reshape'",
    ),
    "unused": (plain, ["blocks", "bias"], "'bias' is one of layers"),
    "of the host": (
        lambda p, ids, y: scanned(p["bias"], lambda w: from_host() * w.sum()),
        ["bias"],
        f"'bias' is one of layers, but 'scan' {HERE} has an io_call",
    ),
    "in a scan": (in_turns("scan"), ["blocks"], IN_TURNS),
    "in a loop": (in_turns("fori_loop"), ["blocks"], IN_TURNS),
    "a loop without a derivative": (
        lambda p, ids, y: plain(p, ids, y) * halved(p["gain"]).sum(),
        ["blocks"],
        "Reverse-mode differentiation does not work",
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", REFUSED)
def test_a_stack_that_is_read_in_another_way(name):
    loss_fn, layers, message = REFUSED[name]
    tx, params = optax.sgd(0.1), start()
    step = gx.minimize(loss_fn, tx, layers=layers)
    with pytest.raises(ValueError, match=message):
        step(params, tx.init(params), IDS, Y)
    jax.block_until_ready(params)  # Nothing is lost.


def test_one_scan_goes_over_two_axes_of_a_stack():
    def loss_fn(p):
        return scanned((p["w"], p["w"].T), lambda w: (w[0] * w[1]).sum())

    params = {"w": jnp.ones((3, 3))}
    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["w"])
    with pytest.raises(ValueError, match=r"'w' .* goes over it along two axes"):
        step(params, optax.sgd(0.1).init(params))


def test_bad_arguments():
    sgd, params = optax.sgd(0.1), start()
    for layers in ("blocks", None, (x for x in ["blocks"])):
        with pytest.raises(TypeError, match=r"layers must be a sequence of paths, got"):
            gx.minimize(tied, sgd, layers=layers)
    step = gx.minimize(plain, optax.adam(0.1), layers=["blocks"])
    with pytest.raises(TypeError, match=r"state is not that of tx: at .*AdamState"):
        step(params, sgd.init(params), IDS, Y)
    step = gx.minimize(plain, sgd, layers=["blocks"])
    integers = params | {"n": jnp.ones(LAYERS, jnp.int32)}
    with pytest.raises(TypeError, match=r"int32.* at \['n'\], which has no grad"):
        step(integers, sgd.init(integers), IDS, Y)
    none = params | {"blocks": jax.tree.map(lambda x: x[:0], params["blocks"])}
    with pytest.raises(ValueError, match=r"'blocks/[bw]' is one of .* it has no layer"):
        step(none, sgd.init(none), IDS, Y)
    adam, rows = optax.adam(0.1), functools.partial(start, "decoder")
    step = gx.minimize(read_rows, adam, layers=["blocks"], **ROWS)
    with pytest.raises(TypeError, match=r"gradxform\.lazy"):
        step(rows(), adam.init(rows()), IDS, Y)


def by_gain(u, p):
    """Layers by what is known after the last one."""
    return u | {"blocks": optax.tree.scale(u["gain"].sum(), u["blocks"])}


def shown(u, p):
    for g in jax.tree.leaves(u):
        jax.debug.callback(lambda _: None, g)
    return u


# With what each one's refusal says.
MIXING = {
    "lamb": (optax.lamb(0.1), "its update may mix layers, by 'reduce_sum'"),
    "clip": (CLIPPED, "its update may mix layers, by 'reduce_sum'.*two_passes"),
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=4),
        r"v_row\['blocks'\]\['b'\]",
    ),
    "the host": (
        optax.stateless(lambda u, _: optax.tree.scale(from_host(), u)),
        "io_callback",
    ),
    "noise": (optax.noisy_sgd(0.1, key=jax.random.key(0)), "'random_bits'"),
    "nu": (gx.novograd(0.1), r"nu\['blocks'\]\['b'\] .* has no layer for each"),
    "flatten": (optax.flatten(optax.adam(0.1)), r"\[0\].mu of ScaleByAdamState"),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 2), "by 'reduce_and'.*two_passes"),
    "later": (
        optax.stateless(by_gain),
        "reads gradients of other parameters, .* after the last layer, by ",
    ),
    "a callback": (optax.stateless(shown), "debug_callback"),
}


@pytest.mark.every
@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_layers_is_refused(name):
    tx, message = MIXING[name]
    params = start()
    params["blocks"] = jax.tree.map(lambda x: jnp.repeat(x, 2, 0), params["blocks"])
    step = gx.minimize(plain, tx, layers=["blocks"])
    state = tx.init(params)
    message = f"run this transformation: .*{message}"
    with pytest.raises(TypeError, match=message) as error:
        step(params, state, IDS, Y)
    assert "those of 'blocks/b' and 1 more." in str(error.value)
    helps = name in ("clip", "nu", "finite", "later")
    assert ("With two_passes=True" in str(error.value)) == helps
    jax.block_until_ready((params, state))


@pytest.mark.parametrize(
    "tx", [optax.lamb(0.1), optax.chain(CLIPPED, optax.clip_by_global_norm(0.1))]
)
def test_a_norm_that_depends_on_another_is_refused(tx):
    step = gx.minimize(plain, tx, layers=["blocks"], two_passes=True)
    with pytest.raises(TypeError, match="a third pass, as 'reduce_sum'"):
        step(start(), tx.init(start()), IDS, Y)


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


ADAM = optax.adam(0.1)
# The number of layers, their shapes, and what decides by sizes.
NEAR = [
    (3, [(128, 128), (147, 149)], gx.accumulate(ADAM, 2)),
    (4, [(128, 128)], optax.chain(gx.accumulate(ADAM, 2))),
    (15, [(64, 64), (66, 67)], optax.chain(gx.accumulate(ADAM, 2))),
    (16, [(64, 64)], gx.accumulate(ADAM, 2)),
    (15, [(256,), (274,)], gx.low_bit_state(ADAM)),
    (1, [(4095,), (4096,), (64, 64)], gx.low_bit_state(ADAM)),
    (1, [(7,), (8, 8)], gx.novograd(0.1, stacked_axes={"blocks": 1, "head": 0})),
    (1, [(7,), (8, 8)], optax.lamb(0.1)),
    (1, [(7,), (8, 8)], optax.noisy_sgd(0.1, key=jax.random.key(0))),
    (127, [(256,)], gx.low_bit_state(ADAM)),
    (128, [(256,)], gx.low_bit_state(ADAM, block_axis=-1)),
    (129, [(256,), (8, 8)], gx.low_bit_state(ADAM, block_axis=-1)),
    (2, [(127,), (128,), (129,)], by_comparison(2)),
]
NEAR += [
    (n, [(256,), (255,)], optax.partition({"m": ADAM, "n": optax.sgd(0.1)}, by_size))
    for n in (15, 16)
]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "shapes", "tx"), NEAR)
def test_a_threshold_lies_near_the_size_of_a_stack(length, shapes, tx):
    """Another number of layers would be another program, or another state."""
    check(Loss(of_vectors, make=vectors(length, *shapes), batch=()), tx, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_one_layer_is_its_own_sum_and_two_are_not(length):
    tx, make = optax.lamb(0.1), vectors(length, (7,))
    step = gx.minimize(of_vectors, tx, layers=["blocks"])
    if length == 1:
        step.trace(make(), tx.init(make()))
        return
    with pytest.raises(TypeError, match="may mix layers, by 'reduce_sum'"):
        step.trace(make(), tx.init(make()))


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
@pytest.mark.parametrize(
    "row", {row.name: row for row in DESCRIPTORS[::-1]}.values(), ids=str
)
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
        way = Way(tx, lambda *_: row.extra(near()))
        rtol = 1e-2 if "bf16" in str(row) else 2e-5
        check(Loss(of_vectors, make=near, batch=()), way, steps=2, rtol=rtol)


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "by_layers.md"
ROW = re.compile(r"^\| (?:by layers|with `two_passes`|not: ).*$", re.M)
VERDICTS = [
    (name, row.split("|")[1].strip())
    for row in ROW.findall(PAGE.read_text())
    for name in re.findall(r"`((?:gx|optax)\.[\w.]+)`", row)
]
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
        "muon_weight_dimension_numbers": numbered(jax.eval_shape(start)),
    },
    "optax.contrib.prodigy": {},
    "optax.noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "optax.polyak_sgd": {},
}


@pytest.mark.slow
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
    params = start(dtype=dtype)
    state, refusals = jax.eval_shape(tx.init, params), []

    def runs(two_passes):
        how = {"layers": ["blocks"], "two_passes": two_passes}
        try:
            gx.minimize(plain, tx, **how).trace(params, state, IDS, Y)
        except TypeError as error:
            refusals.append(str(error))
            return False
        return True

    assert runs(False) == (verdict == "by layers")
    assert runs(True) == (not verdict.startswith("not"))
    assert all("cannot run this transformation: " in x for x in refusals)
    assert all(len(x.partition("\n")[0]) <= 500 for x in refusals)


# Memory.


def compiled(tx, **how):
    """Temporaries of a step of a transformer, in N."""
    params = placed(transformer(layers=16, width=256, vocabulary=256), devices("cpu"))
    state = placed(jax.eval_shape(tx.init, params), devices("cpu"))
    tokens = placed(jax.ShapeDtypeStruct((1, 16), jnp.int32), devices("cpu"))
    step = gx.minimize(next_tokens, tx, **how)
    program = step.lower(params, state, tokens).compile()
    return program.memory_analysis().temp_size_in_bytes / size(params)


def for_muon(params):
    axes = optax.contrib.MuonDimensionNumbers
    layers = dict.fromkeys(["down", "projection", "up"], axes(1, 2))
    layers |= {"attention": axes(1, (2, 3, 4)), "norm1": None, "norm2": None}
    return {"embed": None, "layers": layers, "norm": None}


MEASURED = optax.chain(
    gx.measure_norms(stacked_axes={"embed": 0, "layers": 1, "norm": 0}),
    optax.adamw(1e-2),
)


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(
    ("tx", "bound", "two_passes"),
    [
        (MEASURED, 0.25, False),  # The norms cost nothing.
        (CLIPPED, 0.25, True),
        (TWO_PASSES["norm of updates"], 0.4, True),  # Of two more parts of a layer.
        # Muon's products are those of a layer.
        (optax.contrib.muon(0.02, muon_weight_dimension_numbers=for_muon), 0.55, False),
        (
            optax.adafactor(
                0.1, multiply_by_parameter_scale=False, clipping_threshold=None
            ),
            0.2,
            False,
        ),
    ],
    ids=["adamw", "clip", "norm", "muon", "adafactor"],
)
def test_no_gradients_of_all_layers_are_kept(tx, bound, two_passes):
    how = {"layers": ("layers",), "two_passes": two_passes}
    assert compiled(tx, **how) < bound


@pytest.mark.slow
@pytest.mark.figures
def test_the_ordinary_step_keeps_them_and_norms_of_stacks_are_refused():
    assert compiled(optax.sgd(SCHEDULE)) > 1
    of_stacks = optax.chain(gx.measure_norms(), optax.adamw(1e-2))
    with pytest.raises(TypeError, match="MeasureNormsState"):
        compiled(of_stacks, layers=("layers",))


def large(p, x):
    """Scans over two stacks, with another form of reading a whole stack each."""

    def body(x, w):
        return x + jnp.tanh(x @ w), None

    seen, _ = jax.lax.scan(jax.checkpoint(body), x, p["blocks"])
    return jnp.mean(jax.lax.scan(jax.checkpoint(body), seen, p["decoder"])[0] ** 2)


def kept_by(loss_fn, params, layers=("blocks", "decoder"), tx=None, **how):
    """Temporaries of a step, in bytes of the stacks."""
    tx = tx or optax.adamw(0.1)
    step = gx.minimize(loss_fn, tx, layers=layers, **how)
    width = params["blocks"].shape[-1]
    x = jax.ShapeDtypeStruct((2, width), "float32")
    lowered = step.lower(params, jax.eval_shape(tx.init, params), x)
    memory = lowered.compile().memory_analysis()
    stacks = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 2)
    return memory.temp_size_in_bytes / (4 * stacks)


@pytest.mark.figures
def test_no_gradients_of_two_stacks_are_kept():
    shape = jax.ShapeDtypeStruct((8, 256, 256), "float32")
    params = {"blocks": shape, "decoder": shape}
    assert kept_by(jax.checkpoint(large), params) <= 0.45

    def read(p, x):
        return large(p, x), optax.tree.norm(p)

    assert kept_by(read, params, has_aux=True) <= 0.45  # Reads copy nothing.


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(("is_first", "low", "high"), [(False, 0, 0.4), (True, 1, 1.5)])
def test_a_teacher_needs_no_copy_of_the_stack(is_first, low, high):
    """Its scan comes in front of the backward pass, which writes into the stack.

    If it learns, its own backward pass needs the old layers after that.
    """

    def forward(w, x):
        body = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        return jax.lax.scan(body, x, w)[0]

    def loss_fn(p, x):
        w, x = p["blocks"], x @ p["emb"]
        fixed = jax.lax.stop_gradient(w)
        if not is_first:
            return jnp.mean((forward(w, x) - forward(fixed, stop_of(x))) ** 2)
        wanted = jax.checkpoint(forward)(fixed, jnp.cos(x))
        return jnp.mean((forward(w, x + wanted) - wanted) ** 2)

    def stop_of(x):
        return jax.lax.stop_gradient(2 * x)

    shapes = {"emb": (128, 128), "blocks": (16, 128, 128)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    found = kept_by(loss_fn, params, ["blocks"], optax.sgd(0.1))
    assert low <= found < high


def test_a_checkpoint_keeps_its_policy():
    """Beside the scan it computes again what the policy does not save."""

    def loss_fn(p, ids, y):
        x = p["emb"][ids]
        for _ in range(3):
            x = jnp.sin(x @ p["emb"])
        return error(p, encode(p, x), y)

    tx, products = optax.sgd(0.1), {}
    for name in ("nothing_saveable", "dots_saveable"):
        policy = getattr(jax.checkpoint_policies, name)
        saving = jax.checkpoint(loss_fn, policy=policy)
        step = gx.minimize(saving, tx, layers=["blocks"])
        text = step.lower(start(), tx.init(start()), IDS, Y).as_text()
        products[name] = text.count("stablehlo.dot_general")
    assert products["nothing_saveable"] >= products["dots_saveable"] + 3


@pytest.mark.figures
@pytest.mark.parametrize("scans", [2, 3])
@pytest.mark.parametrize("tx", ["adamw", "a clip", "a sum", "behind a gate"])
def test_a_stack_that_learns_in_several_scans_keeps_one_gradient(tx, scans):
    adamw = optax.adamw(0.1)
    how = {"two_passes": tx == "a clip"}
    chosen = {
        "adamw": adamw,
        "a clip": optax.chain(gx.clip_by_global_norm(0.1), adamw),
        "a sum": gx.accumulate(adamw, 4),
        "behind a gate": gx.skip_spikes(adamw),
    }[tx]
    how["two_passes"] |= tx == "behind a gate"

    def loss_of(scans):
        def loss_fn(p, x):
            for _ in range(scans):
                x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["blocks"])[
                    0
                ]
            return jnp.mean(x**2)

        return loss_fn

    params = {"blocks": jax.ShapeDtypeStruct((32, 128, 128), "float32")}
    one, several = (
        kept_by(loss_of(n), params, ["blocks"], chosen, **how) for n in (1, scans)
    )
    assert several < one + 1.01
    assert several < 1.2 + 0.06 * (tx == "behind a gate")
