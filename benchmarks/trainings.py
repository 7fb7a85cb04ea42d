"""Trainings of a large transformer: the machines, the transformations, the step.

``benchmarks.largest`` asks compilers how large they may be, ``benchmarks.fits`` asks
arithmetic, ``benchmarks.host_check`` whether they give the right numbers, and
``benchmarks.schedule`` plays their schedule.
"""

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.compilers import placed
from benchmarks.models import next_tokens, transformer
from gradxform._jax.compilers import SMALL_TILES

LENGTH, MODEL = 1024, {"width": 2048, "vocabulary": 8192}


class Machine(NamedTuple):
    """A machine with one chip.

    Attributes:
      title: of the table.
      target: for ``benchmarks.compilers``.
      memory: what a program may use of the chip's memory, in GiB.
      peak: of the chip in bfloat16, operations a second.
      host: the host's memory, in GiB.
    """

    title: str
    target: str
    memory: float
    peak: float
    host: float


# Host memory of Google Cloud's machines `ct5lp-hightpu-1t`, `ct5lp-hightpu-4t`,
# `ct6e-standard-1t` and `a3-highgpu-1g`, as `tools/machinetypes.csv` lists them in
# https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator.
MACHINES = {
    "v5e": Machine(
        "TPU v5e with 16 GB, host with 48 GB", "v5e:2x2", 15.75, 197e12, 48e9 / 2**30
    ),
    "v5e-4": Machine(
        "TPU v5e with 16 GB, host with 192 GB", "v5e:2x2", 15.75, 197e12, 192e9 / 2**30
    ),
    "v6e": Machine(
        "TPU v6e with 32 GB, host with 176 GB", "v6e:2x2", 31.25, 918e12, 176e9 / 2**30
    ),
    "h100": Machine(
        "NVIDIA H100 with 80 GB, host with 234 GB",
        "h100",
        80e9 / 2**30,
        989e12,
        234e9 / 2**30,
    ),
}
HOST_SHARE = 0.9  # The rest is for the system.


class Training(NamedTuple):
    """A transformation, the dtype of the parameters, and how the step is made.

    ``small_tiles``: it needs the flag of libtpu for arrays of 8 bits on the host.
    """

    tx: optax.GradientTransformation
    dtype: str = "float32"
    layers: tuple[str, ...] = ()
    two_passes: bool = False
    on_host: bool = False
    params_too: bool = False
    small_tiles: bool = False


LAYERS = ("layers",)
CLIP = gx.clip_by_global_norm(1.0)
ADAMW = optax.adamw(1e-3)
MASTER = gx.master_weights(ADAMW)
# With more than 512 layers, a block of their vectors would go over layers.
EIGHT_BITS = gx.low_bit_state(ADAMW, keep=lambda path: "norm" in path)
SEVEN_BYTES = gx.master_weights(EIGHT_BITS, residual_dtype="int8")
TRAININGS = {
    "optax.adamw": Training(ADAMW),
    "layers": Training(ADAMW, layers=LAYERS),
    "layers, a clip in two passes": Training(
        optax.chain(CLIP, ADAMW), layers=LAYERS, two_passes=True
    ),
    "layers, state on the host": Training(ADAMW, layers=LAYERS, on_host=True),
    "layers, all of it on the host": Training(
        ADAMW, layers=LAYERS, on_host=True, params_too=True
    ),
    "optax.adamw, small steps lost": Training(ADAMW, "bfloat16"),
    "layers, small steps lost": Training(ADAMW, "bfloat16", LAYERS),
    "8 bits of state": Training(SEVEN_BYTES, "bfloat16"),
    "8 bits of state, layers": Training(SEVEN_BYTES, "bfloat16", LAYERS),
    "master weights, layers, state on the host": Training(
        MASTER, "bfloat16", LAYERS, on_host=True
    ),
    "master weights, layers, all of it on the host": Training(
        MASTER, "bfloat16", LAYERS, on_host=True, params_too=True
    ),
    "8 bits of state, layers, all of it on the host": Training(
        SEVEN_BYTES,
        "bfloat16",
        LAYERS,
        on_host=True,
        params_too=True,
        small_tiles=True,
    ),
}


def set_small_tiles():
    """Lets a TPU take layers of arrays of 8 bits from the host."""
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} {SMALL_TILES}"


def shapes(training, layers, chip):
    """Parameters and state of a training with so many layers, on a chip."""
    params = transformer(layers, **MODEL, dtype=jnp.dtype(training.dtype))
    params = placed(params, chip)
    state = placed(jax.eval_shape(training.tx.init, params), chip)
    return (
        gx.on_host(params) if training.params_too else params,
        gx.on_host(state) if training.on_host else state,
    )


def step_of(training):
    """The step of a training."""
    how = {"layers": training.layers, "two_passes": training.two_passes}
    return gx.minimize(next_tokens, training.tx, **how)


def largest(need: Callable[[int], float], memory, first):
    """The largest number for which ``need`` is at most ``memory``.

    ``need`` is nearly a line, so the search is along the line through two points. It
    begins with ``first`` and more. There a refusal comes within seconds, and a program
    that fits takes a minute.
    """
    seen = {n: need(n) for n in (first, first + first // 8 + 1)}
    while True:
        fits = [n for n in seen if seen[n] <= memory]
        others = [n for n in seen if seen[n] > memory]
        low, high = max(fits, default=0), min(others, default=math.inf)
        if low + 1 == high:
            return low
        a, b = sorted(seen, key=lambda n: abs(seen[n] - memory))[:2]
        slope = (seen[b] - seen[a]) / (b - a)
        guess = a + math.floor((memory - seen[a]) / slope)
        # Where both neighbours are not known yet, the larger one is refused sooner.
        guess += guess == low
        n = max(low + 1, min(guess, high - 1))
        seen[n] = need(n)


def drawn(x, key):
    """Random parameters, a layer at a time where they are to lie on the host."""

    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape)).astype(x.dtype)

    if x.sharding is None or x.sharding.memory_kind != "pinned_host":
        return normal(key, x.shape)
    host = jax.memory.Space.Host
    each = jax.random.split(key, x.shape[0]) if x.ndim > 2 else None
    if each is None:
        return jax.device_put(normal(key, x.shape), host)
    return jax.lax.map(lambda k: jax.device_put(normal(k, x.shape[1:]), host), each)


def numbered(tree):
    """A number for each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))


def drawn_model(training, layers, sequences):
    """Parameters and tokens of a training, on the device that is there."""
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    model = transformer(layers, **MODEL, dtype=jnp.dtype(training.dtype))
    model = jax.tree.map(lambda x: x.update(sharding=place), model)
    model = gx.on_host(model) if training.params_too else model
    keys = jax.tree.map(jax.random.key, numbered(model))
    params = jax.jit(lambda keys: jax.tree.map(drawn, model, keys))(keys)
    params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, model))
    tokens = jax.random.randint(
        jax.random.key(1), (sequences, LENGTH), 0, MODEL["vocabulary"]
    )
    return params, jax.device_put(tokens, device)


def state_of(training, params):
    """The state of a training, on the host or on the device."""
    init = training.tx.init
    make = (lambda p: gx.on_host(init(p))) if training.on_host else init
    return jax.block_until_ready(jax.jit(make)(params))
