"""Losses with layers, optimizers, and the ordinary step, with which tests compare.

A loss and a way to step make a case. :func:`check` trains by layers, wherever the
parameters and the state lie, and by the ordinary step on the device. These are what
tests/draw/steps.py does not draw.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from tests import in_numpy

# Before JAX 0.10.2 no result of a program stays in the host's memory.
OLD = jax.__version_info__ < (0, 10, 2)

LAYERS, WIDTH, HEAD = 4, 8, 5
IDS = jnp.array([0, 3, 2])
Y = jnp.asarray(np.random.default_rng(1).standard_normal((3, HEAD)), jnp.float32)
STACKS = ("blocks", "bias", "decoder", "base", "lora", "reference")
stop = jax.lax.stop_gradient


def start(*more, dtype="float32"):
    """A table, two stacks, and dense leaves; ``more`` are names of further stacks."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), dtype)

    square = WIDTH, WIDTH
    params = {
        "emb": draw(*square),
        "blocks": {"w": draw(LAYERS, *square), "b": draw(LAYERS, WIDTH)},
        "bias": draw(LAYERS, WIDTH),
        "head": draw(WIDTH, HEAD),
        "gain": draw(WIDTH),
    }
    further = {
        "decoder": {"w": draw(2, *square), "cross": draw(2, *square)},
        "base": {"w": draw(LAYERS, *square), "gain": draw(LAYERS, WIDTH)},
        "lora": {"a": draw(LAYERS, WIDTH, 2), "b": draw(LAYERS, 2, WIDTH)},
        "reference": {"w": draw(LAYERS, *square), "b": draw(LAYERS, WIDTH)},
    }
    return params | {name: further[name] for name in more}


@dataclasses.dataclass(eq=False)
class Loss:
    """A loss, and how it is trained.

    Attributes:
      f: the function.
      layers: the names of its stacks.
      make: makes its parameters.
      batch: its other arguments.
      how: arguments of ``minimize``.
      rtol: how much the steps may differ.
    """

    f: Callable[..., Any]
    layers: tuple[str, ...] = ("blocks",)
    make: Callable[..., Any] = start
    batch: tuple[Any, ...] = (IDS, Y)
    how: dict[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float = 2e-6


LOSSES: dict[str, Loss] = {}


def loss(*layers, rtol=2e-6, **how):
    """Puts a function into the table."""

    def add(f):
        given = layers or ("blocks",)
        names = {path.partition("/")[0] for path in given}
        further = [x for x in STACKS[2:] if x in names]
        make = functools.partial(start, *further)
        LOSSES[f.__name__] = Loss(f, given, make, how=how, rtol=rtol)
        return f

    return add


def error(p, x, y):
    return jnp.mean((x.astype(jnp.float32) @ p["head"].astype(jnp.float32) - y) ** 2)


def layer(p, x, w):
    """Its gain is a parameter outside of the scan."""
    return x + jnp.tanh(x @ w["w"] + w["b"]) * p["gain"]


def encode(p, x, name="blocks"):
    return jax.lax.scan(lambda x, w: (layer(p, x, w), None), x, p[name])[0]


def decode(p, x, seen):
    """Each layer reads what other layers gave."""

    def body(x, w):
        return x + jnp.tanh(x @ w["w"] + seen @ w["cross"]), None

    return jax.lax.scan(body, x, p["decoder"])[0]


# One scan.


@loss()
def plain(p, ids, y):
    return error(p, encode(p, p["emb"][ids]), y)


@loss("blocks", "bias")
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
    return error(p, x, y) + 0.01 * again + 0.01 * seen["sum"].sum()


@loss(rtol=2e-5)
def backwards(p, ids, y):
    def body(x, w):
        return layer(p, x, w), x.mean()

    blocks = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), p)
    x, means = jax.lax.scan(body, p["emb"][ids], blocks["blocks"], reverse=True)
    return error(p, x, y) + means[0] * p["gain"].sum()


@loss()
@jax.jit
def nested(p, ids, y):
    """The scan is inside of ``jit``, and has another one inside."""

    def body(x, w):
        return jax.lax.scan(lambda x, _: (layer(p, x, w), None), x, None, 2)[0], None

    scan = jax.jit(jax.lax.scan, static_argnums=0)
    return error(p, scan(body, p["emb"][ids], p["blocks"])[0], y)


@loss(rtol=2e-5)
def grouped(p, ids, y):
    """A scan over groups of two layers, and inside of it a scan over layers."""
    w = {"w": p["blocks"]["w"].reshape(2, -1), "b": p["blocks"]["b"]}
    w["b"] = w["b"].T.astype(jnp.bfloat16).T.reshape(2, -1, WIDTH)

    @jax.checkpoint
    def outer(x, w):
        w = {"w": w["w"].reshape(-1, WIDTH, WIDTH), "b": w["b"].astype(jnp.float32)}
        return encode(p | {"blocks": w}, x), None

    return error(p, jax.lax.scan(outer, p["emb"][ids], w)[0], y)


@loss("blocks/w")
def unrolled(p, ids, y):
    """Two variables of one stack; the other stack is a dense part."""
    w = p["blocks"] | {"twice": p["blocks"]["w"].astype(jnp.float32)}

    def body(x, w):
        return layer(p, x, w) + x @ w["twice"], None

    return error(p, jax.lax.scan(body, p["emb"][ids], w, unroll=3)[0], y)


@jax.custom_vjp
def product(x, w):
    return jnp.tanh(x @ w)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda saved, g: (g @ saved[1].T, 2 * saved[0].T @ g),
)


@loss()
def of_parts(p, ids, y):
    """A key in the carry, a derivative of its own, and layers that come in parts."""

    def body(carry, w):
        x, key = carry
        key, used = jax.random.split(key)
        kept = jax.random.bernoulli(used, 0.9, x.shape)
        first, second = w["w"][:, : WIDTH // 2], w["w"][:, WIDTH // 2 :]
        row = w["w"][0] * w["w"][jnp.int32(x[0, 0] > 0)]
        parts = jnp.concatenate([product(x, first), jnp.sin(x @ second)], 1)
        return (jnp.where(kept, x + parts + row[None], 0), key), None

    first = p["emb"][ids], jax.random.key(3)
    (x, _), _ = jax.lax.scan(jax.checkpoint(body), first, p["blocks"])
    return error(p, x, y)


@loss(rtol=2e-2)
def in_half(p, ids, y):
    """Each step may round once more."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return error(p, encode(half, half["emb"][ids]), y)


def halved(x):
    """A loop without a known number of steps has no derivative in reverse mode."""
    return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)


def sine(x):
    """Neither has a call to the host."""
    return jax.pure_callback(np.sin, x, x)


@loss()
def over_data(p, ids, y):
    """Only what depends on trainable parameters is differentiated.

    What is not: in front of the scan, in it over a carry and what it goes over, and
    behind it.
    """
    weights = halved(y + 3)

    def body(carry, each):
        (x, noise, late), (w, bias) = carry, each
        noise = sine(halved(noise))
        x = layer(p, x, w) + 0.1 * sine(stop(bias)) + noise.mean()
        late = late * 0.5 + x.mean()  # It depends on parameters after one layer.
        return (x, noise, late), (late, noise)

    first = p["emb"][ids], y, jnp.zeros(())
    scanned = p["blocks"], stop(p["bias"])
    (x, noise, late), (_, noises) = jax.lax.scan(body, first, scanned)
    factor = halved(noise + noises.mean(0)) + sine(weights)
    return error(p, x, y * factor) + late


FROZEN = {"emb": False, "bias": False, "head": False, "gain": False}


@loss("blocks", trainable=FROZEN | {"blocks": {"w": True, "b": False}})
def partly_frozen(p, ids, y):
    """In the layers, too, and so is what the loops and callbacks are of."""
    return over_data(p, ids, y)


# Several scans.


@loss("blocks", "decoder")
def encoder_and_decoder(p, ids, y):
    seen = encode(p, p["emb"][ids]) * p["gain"]
    return error(p, decode(p, jnp.cos(p["emb"][ids]), seen), y)


BASE = FROZEN | {"blocks": False, "base": False, "lora": True}


@loss("base/w", "lora", trainable=BASE)
def adapted(p, ids, y):
    """A frozen base in half precision, with two small matrices for each layer."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p["base"])

    def body(x, each):
        w, lora = each
        seen = x @ w["w"].astype(x.dtype) + (x @ lora["a"]) @ lora["b"]
        return x + jnp.tanh(seen) * w["gain"].astype(x.dtype), None

    return error(p, jax.lax.scan(body, p["emb"][ids], (half, p["lora"]))[0], y)


# Several scans over a stack: the loss has a derivative by it through one of them. What
# is no scan may read what is stopped, too.


def norm(tree):
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def difference(x, y):
    return jnp.mean((x - y) ** 2)


@loss()
def teacher(p, ids, y):
    x = p["emb"][ids]
    seen = encode(p, x) * norm(stop(p["blocks"]["w"]))
    return error(p, seen, y) + difference(seen, encode(stop(p), 2 * x))


@loss()
def teacher_first(p, ids, y):
    """The teacher learns by what it reads, and its backward pass is the last one."""
    x = p["emb"][ids]
    wanted = jax.checkpoint(encode)(p | {"blocks": stop(p["blocks"])}, jnp.cos(x))
    return difference(encode(p, x + wanted), wanted)


@loss(rtol=2e-5)
def two_teachers(p, ids, y):
    """The second one goes over all but the scales along another axis."""

    def turned(x, w):
        return x + jnp.tanh(x @ w.T @ w), None

    w = stop(p["blocks"]["w"]).transpose(1, 0, 2)
    seen, _ = jax.lax.scan(turned, p["emb"][ids], w)
    return teacher(p, ids, y + jnp.sin(seen.sum()))


@loss()
def both_at_once(p, ids, y):
    """One scan goes over the stack and over what is stopped of it."""

    def body(x, each):
        w, fixed = each
        return layer(p, x, w) - jnp.tanh(x @ fixed["w"]), None

    both = p["blocks"], stop(p["blocks"])
    return error(p, jax.lax.scan(body, p["emb"][ids], both)[0], y)


@loss("blocks", "decoder")
def one_is_stopped(p, ids, y):
    """Its stack gets zeros, as in the ordinary step, and weight decay."""
    seen = encode(p | {"blocks": stop(p["blocks"])}, p["emb"][ids])
    return error(p, decode(p, jnp.cos(seen), stop(seen)), y)


@loss("blocks", "decoder/w", has_aux=True, rtol=2e-5)
def with_reads(p, ids, y):
    """What has no derivative: in the aux, behind stop_gradient, as integers, dead."""
    jnp.take(p["blocks"]["w"], 0, axis=0)  # As haliax asks for shapes.
    is_finite = jnp.isfinite(p["blocks"]["b"]).all()
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    value = encoder_and_decoder(p, ids, y) / stop(norm(p["decoder"]))
    largest, _ = jax.lax.scan(
        lambda m, w: (jnp.maximum(m, jnp.abs(w).max()), None), 0.0, p["blocks"]["w"]
    )
    again = encode(p, 2 * p["emb"][ids]).sum(), encode(p, 3 * p["emb"][ids]).sum()
    aux = {"norm": norm(half["blocks"]), "after": value * norm(p["decoder"]["w"])}
    aux |= {"largest": largest, "again": again, "n": ids.sum()}
    return jnp.where(is_finite, value, jnp.nan), aux


@loss(has_aux=True)
def constant(p, ids, y):
    """The number of the loss is no variable of its program."""
    return 2.0, encode(p, p["emb"][ids])


@loss("blocks", "reference", trainable=FROZEN | {"blocks": True, "reference": False})
def chosen_and_rejected(p, ids, y):
    """Direct preference optimization: two scans over a frozen reference."""
    x = p["emb"][ids]
    pair = jnp.stack([x, jnp.cos(x)])
    scores = jax.vmap(lambda x: encode(p, x).mean())(pair)
    base = [encode(p, x, "reference").mean() for x in pair]
    return -jax.nn.log_sigmoid(scores[0] - scores[1] - base[0] + base[1])


# A stack learns in several scans.


@loss()
def real_and_fake(p, ids, y):
    """A discriminator sees two batches; the second one depends on the first."""
    x = p["emb"][ids]
    real = encode(p, x)
    fake = encode(p, jnp.cos(x) + 0.1 * real.mean())
    return error(p, real, y) - jnp.mean(jax.nn.log_sigmoid(-fake @ p["head"]))


@loss("blocks", "decoder", rtol=1e-5)
def looped_core(p, ids, y):
    """Applied three times, backwards and in checkpoints too, with others between."""
    x = p["emb"][ids]
    x = encode(p, x) * p["gain"]
    x = jax.checkpoint(encode)(p, decode(p, x, jnp.sin(x)))
    blocks = jax.tree.map(lambda w: w.astype(jnp.float32), p["blocks"])
    seen = encode(p | {"blocks": stop(blocks)}, x)

    def body(x, w):
        return layer(p, x, w), x.mean()

    x, means = jax.lax.scan(body, x + seen, blocks, reverse=True)
    return error(p, decode(p, x, x), y) + means[1]


@loss("blocks", has_aux=True)
def two_views(p, ids, y):
    """Chosen and rejected in one loss; a third scan gives the aux alone."""
    x = p["emb"][ids]
    views = encode(p, x), jax.checkpoint(encode)(p, x[::-1])
    again = encode(p, 2 * x)
    return difference(*views) + error(p, views[0], y), again.sum()


# Rows are read in front of the scans and behind them.
ROWS = {"tables": ["emb"], "has_aux": True}


def read_rows(p, ids, y):
    ids = jnp.concatenate([ids, ids[:1], jnp.full(1, WIDTH)])  # One twice, padding.
    x = decode(p, encode(p, gx.lookup(p["emb"], ids)), p["gain"])
    again = gx.lookup(p["emb"], ids[1]).sum()
    return error(p, x, jnp.concatenate([y, y[:2]])) + again, ids


# Ways to step.

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 5)


def is_matrix(params):
    """By the number of axes, as the whole parameters have it."""
    return jax.tree.map(lambda p: p.ndim > 2, params)


def stacked(params):
    return {
        k: jax.tree.map(lambda _, k=k: int(k in STACKS), v) for k, v in params.items()
    }


def labels(params):
    names = {"bias": "none", "head": "adagrad", "decoder": "adagrad"}
    return {
        k: jax.tree.map(lambda x, k=k: names.get(k, ("adam", "sgd")[x.ndim == 2]), v)
        for k, v in params.items()
    }


def numbered(params):
    """The axes of each matrix of a layer, for Muon."""
    return jax.tree.map(
        lambda x: (
            optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
            if x.ndim == 3
            else None
        ),
        params,
    )


def weak_rate():
    """Its state is a number in the jaxpr of its update."""
    return optax.GradientTransformation(
        lambda params: jnp.asarray(0.5), lambda u, s, p=None: (u, jnp.asarray(0.5))
    )


def measured():
    """A norm for the log, which no update needs."""

    def update(updates, state, params=None):
        return updates, optax.ScaleByScheduleState(count=optax.tree.norm(updates))

    def init(params):
        return optax.ScaleByScheduleState(count=jnp.zeros(()))

    return optax.GradientTransformation(init, update)


@jax.custom_jvp
def total(tree):
    """A sum of squares, in a function with a derivative of its own."""
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))


total.defjvp(lambda primals, tangents: (total(*primals), total(*tangents)))


def of_sums_inside(u, params):
    """Sums in branches, in ``jit``, in a checkpoint, and in what a sum chooses."""

    def scaled(by):
        return lambda u: optax.tree.scale(by(u), u)

    whole, of_layers = jax.checkpoint(total)(u), total(u["blocks"])
    u = jax.lax.cond(
        params["head"][0, 0] > 0,
        scaled(lambda u: 1 / (1 + jax.jit(total)(u))),
        scaled(lambda u: total(u) + u["gain"][0]),
        u,
    )
    u = jax.lax.cond(whole > 1e-3, scaled(lambda _: 0.5), lambda u: u, u)
    return optax.tree.scale(1 / (1 + of_layers), u)


@dataclasses.dataclass(eq=False)
class Way:
    """A transformation, and how its steps are called.

    Attributes:
      tx: it.
      extra: (number of the step, state, first parameters) -> extra arguments.
      two_passes: whether a first backward pass finds out its sums.
      dtype: that of the parameters.
      read: (parameters, state) -> what is compared.
      rtol: how much the steps may differ.
    """

    tx: optax.GradientTransformation
    extra: Callable[..., dict[str, Any]] = lambda k, state, params: {}
    two_passes: bool = False
    dtype: str = "float32"
    read: Callable[..., Any] = lambda params, state: (params, state)
    rtol: float = 2e-6


def stale(k, state, params):
    """The last pushes are stale."""
    return {"local_step": 0}


def weights(k, state, params):
    return {"weight": [1.0, 3.0, 12.0, 0.0, 2.0][k], "last": k == 4}


def worker(k, state, params):
    return {"worker": [0, 1, 1, 0, 0, 1][k], "local_step": state.global_step}


def delay(k, state, params):
    return {"worker_params": params}


def half(tx, residual_dtype):
    tx = gx.master_weights(tx, residual_dtype=residual_dtype)
    return Way(tx, dtype="bfloat16", read=gx.get_master_weights)


ADAMW = optax.adamw(SCHEDULE, weight_decay=0.1, mask=is_matrix)
BITS = gx.low_bit_state(optax.adam(1e-2), min_size=8, block_size=8)
# In each gradient of rows these read the touched rows.
OF_ROWS = {
    "adagrad": Way(gx.adagrad(SCHEDULE)),
    "row-wise": Way(gx.adagrad(0.1, row_wise=True, clipvalue=0.01)),
    "ftrl": Way(gx.ftrl(0.1, l1_regularization_strength=0.001)),
    "lazy": Way(gx.lazy(optax.adam(1e-2))),
    "sum": Way(gx.accumulate(gx.adagrad(0.1, row_wise=True), 3, reduction="sum")),
}
ONE_PASS = OF_ROWS | {
    "norms": Way(
        optax.chain(
            gx.measure_norms(stacked_axes=stacked),
            optax.adamw(SCHEDULE),
            gx.measure_norms(stacked_axes=stacked),
        )
    ),
    "adamw": Way(ADAMW),
    "lion": Way(optax.lion(SCHEDULE, weight_decay=0.1)),
    "partition": Way(
        optax.partition(
            {
                "adam": optax.adam(1e-2),
                "adagrad": gx.adagrad(0.1),
                "sgd": optax.sgd(0.1),
                "none": optax.set_to_zero(),
            },
            labels,
        )
    ),
    "8 bits": Way(BITS),
    "schedule_free": Way(optax.contrib.schedule_free(optax.adam(1e-2), 1e-2)),
    "muon": Way(
        optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbered), rtol=2e-3
    ),
    "accumulate": Way(gx.accumulate(ADAMW, 2)),
    "a clip, then a sum": Way(
        optax.chain(
            optax.clip(0.01),
            gx.accumulate(optax.sgd(0.1), 2),
            optax.add_decayed_weights(0.1, is_matrix),
        )
    ),
    "weights": Way(gx.accumulate(ADAMW, 3), weights),
    "stale sums": Way(gx.conditional_accumulator(ADAMW, 2, max_staleness=1), stale),
    "weak type": Way(optax.chain(weak_rate(), optax.sgd(0.1))),
    "plateau": Way(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    ),
    "compensate_delay": Way(
        optax.chain(gx.compensate_delay(0.1), optax.sgd(0.1)), delay
    ),
    "delayed": Way(gx.delayed(optax.adam(0.01), 2)),
    "delayed_nesterov": Way(gx.contrib.delayed_nesterov(0.1, num_delay=2)),
    "worker_mean": Way(
        gx.worker_mean(optax.adam(0.01), 2, method="ringleader"), worker
    ),
}
# Parameters in bfloat16; not every loss takes these.
HALF = {
    "int16": half(ADAMW, "int16"),
    "bfloat16": half(ADAMW, "bfloat16"),
    "seven bytes": half(
        gx.low_bit_state(optax.adamw(1e-2), min_size=8, block_size=8), "int8"
    ),
}
CLIPPED = optax.chain(gx.clip_by_global_norm(0.1), optax.adamw(SCHEDULE))
TWO_PASSES = {
    "clip_by_global_norm": CLIPPED,
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "global_clipnorm": gx.adagrad(0.1, global_clipnorm=0.1),
    "clip_by_zscore": optax.chain(gx.contrib.clip_by_zscore(0.5), optax.adam(1e-2)),
    "skip_spikes": gx.skip_spikes(optax.adamw(1e-2), sigmas=0.5, warmup=2),
    "skip_nonfinite": gx.accumulate(optax.adamw(1e-2), 2, skip_nonfinite=True),
    "apply_if_finite": optax.apply_if_finite(CLIPPED, 2),
    "a clip behind a sum": gx.accumulate(CLIPPED, 2),
    "gates": gx.conditional_accumulator(gx.skip_spikes(CLIPPED), 2, max_staleness=1),
    "an injected clip": optax.chain(
        optax.inject_hyperparams(gx.clip_by_global_norm)(0.1), optax.sgd(0.1)
    ),
    "norm": optax.chain(measured(), optax.adamw(SCHEDULE)),
    "norm of updates": optax.chain(optax.adamw(SCHEDULE), measured()),
    "sums inside": optax.stateless(of_sums_inside),
    "maximum": optax.stateless(
        lambda u, _: optax.tree.scale(-1 / optax.tree.max(jax.tree.map(abs, u)), u)
    ),
    "dot": optax.stateless(
        lambda u, p: optax.tree.add_scale(u, -optax.tree.vdot(u, p), p)
    ),
}
WAYS = ONE_PASS | HALF | {k: Way(tx, two_passes=True) for k, tx in TWO_PASSES.items()}
WAYS["gates"].extra = stale


def pairs(first, second):
    """Each value of both, with one of the other or with some."""
    number = max(len(first), len(second))
    cycles = (itertools.islice(itertools.cycle(x), number) for x in (first, second))
    return [*zip(*cycles, strict=True)]


def on_host(tree):
    return gx.on_host(tree, min_size=LAYERS * WIDTH)


def kinds(tree):
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).weak_type), tree)


def placed(tx, params, memory):
    """Parameters and state on the device, or the state, or both on the host."""
    if memory == "device":
        return params, tx.init(params)
    if memory == "state":
        return params, on_host(tx.init(params))
    params = on_host(params)
    return params, jax.jit(lambda p: on_host(tx.init(p)))(params)


def train(one, way, layers=(), memory="device", steps=4, compiled=True, **how):
    """Trains; each step leaves the types, and each array in its memory."""
    first = one.make(dtype=way.dtype) if way.dtype != "float32" else one.make()
    params, state = placed(way.tx, jax.tree.map(jnp.array, first), memory)
    if layers and way.two_passes:
        how["two_passes"] = True
    step = gx.minimize(one.f, way.tx, layers=layers, **one.how | how)
    if not compiled:
        step = in_numpy.jit(step)
    before, results = types((params, state)), []
    places = None if memory == "device" else kinds((params, state))
    for k in range(steps):
        extra = way.extra(k, state, first)
        params, state, *result = step(params, state, *one.batch, **extra)
        assert types((params, state)) == before
        if compiled:
            assert places is None or kinds((params, state)) == places
        results.append(result)
    return params, state, results


def numbers(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64)


def compared(trained, way):
    params, state, results = trained
    return jax.tree.map(numbers, (way.read(params, state), results))


@functools.lru_cache
def ordinary(one, way, steps, compiled):
    """What the ordinary step gives on the device, and its types."""
    trained = train(one, way, steps=steps, compiled=compiled)
    return compared(trained, way), jax.tree.map(jax.typeof, trained)


def check(
    one, way, memory="device", *, compiled=False, layers=None, steps=None, rtol=None
):
    """The steps by layers and the ordinary ones give the same, to the type.

    In NumPy they take a fifth of the time. If they are compiled, each array also stays
    in its memory.
    """
    one = one if isinstance(one, Loss) else LOSSES[one.__name__]
    way = way if isinstance(way, Way) else Way(way)
    steps = steps or (5 if way.extra in (weights, worker) else 4)
    layers = one.layers if layers is None else layers
    trained = train(one, way, layers, memory, steps, compiled)
    wanted, wanted_types = ordinary(one, way, steps, compiled)
    if memory == "device":
        assert jax.tree.map(jax.typeof, trained) == wanted_types
    rtol = rtol or max(one.rtol, way.rtol)
    chex.assert_trees_all_close(
        compared(trained, way), wanted, rtol=rtol, atol=rtol / 4
    )
