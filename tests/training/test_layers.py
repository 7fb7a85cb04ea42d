"""``minimize(layers=...)`` is the ordinary step, and keeps no gradients of layers."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from benchmarks.compilers import placed
from benchmarks.grid import devices
from benchmarks.models import next_tokens, size, transformer

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
    x, _ = jax.lax.scan(
        lambda x, w: (layer(p, x, w), None), p["emb"][ids], p["blocks"]
    )
    return error(x, p, y)


def tied(p, ids, y):
    """Carries of a tree, further inputs and results, one of which is in the loss."""

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

    return error(jax.jit(jax.lax.scan, static_argnums=0)(body, p["emb"][ids], p["blocks"])[0], p, y)


def unrolled(p, ids, y):
    w = p["blocks"] | {"twice": p["blocks"]["w"].astype(jnp.float32)}

    def body(x, w):
        return layer(p, x, w) + x @ w["twice"], None

    return error(jax.lax.scan(body, p["emb"][ids], w, unroll=2)[0], p, y)


LOSSES = [plain, tied, reverse, nested, unrolled]


def train(loss_fn, tx, params, *batch, steps=4, extra=None, **how):
    step = gx.minimize(loss_fn, tx, **how)
    state = tx.init(params)
    losses = []
    for _ in range(steps):
        params, state, *loss = step(params, state, *batch, **(extra or {}))
        losses.append(loss)
    return params, state, losses


def check(loss_fn, tx, make=start, *batch, layers=("blocks",), rtol=2e-6, **how):
    """The steps with layers and without give the same, to the type."""
    wanted, got = (
        train(loss_fn, tx, make(), *(batch or (IDS, Y)), layers=names, **how)
        for names in ((), layers)
    )
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, wanted)
    got, wanted = jax.tree.map(
        lambda x: np.asarray(x, np.float64), (got, wanted)
    )
    chex.assert_trees_all_close(got, wanted, rtol=rtol, atol=rtol / 4)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_in_any_form(loss_fn):
    check(loss_fn, optax.adamw(1e-2))
