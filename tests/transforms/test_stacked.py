"""A transformer that scans its stacked blocks trains as one that loops over them.

``novograd(stacked_axes=...)`` gives each slice of a scanned leaf its own norm, moving
average and clip. A block that is a leaf of its own has the same.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import gradxform as gx

# Without biases. The bias of the keys has no gradient but rounding errors. An optimizer
# that normalizes makes steps of them, and no two programs share these steps.
WIDTH, HEADS, VOCABULARY, BIAS = 16, 2, 11, {"use_bias": False}


def loss_of(model):
    """Cross entropy of the next token in sequences x, 3x, 9x, ..."""
    tokens = jnp.arange(8)[:, None] * 3 ** jnp.arange(7)[None] % VOCABULARY
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens[:, :-1]), tokens[:, 1:]
    )
    return losses.mean()


def draw(shapes):
    """Initial parameters, without the seconds it takes to compile initializers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.25 * rng.standard_normal(x.shape), x.dtype), shapes
    )


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        attend = linen.MultiHeadDotProductAttention(HEADS, **BIAS)
        widen, narrow = (linen.Dense(n * WIDTH, **BIAS) for n in (2, 1))
        causal = linen.make_causal_mask(x[..., 0])
        x = x + attend(linen.LayerNorm(**BIAS)(x), mask=causal)
        return x + narrow(linen.gelu(widen(linen.LayerNorm(**BIAS)(x)))), None


class LinenTransformer(linen.Module):
    lengths: tuple[int, ...]  # Of the scans, outer first.
    scanned: bool

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        if self.scanned:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            blocks = LinenBlock
            for length in reversed(self.lengths):
                blocks = linen.scan(blocks, **split, length=length)
            x, _ = blocks(name="blocks")(x, None)
        else:
            for i in range(math.prod(self.lengths)):
                x, _ = LinenBlock(name=f"blocks_{i}")(x, None)
        return linen.Dense(VOCABULARY, name="head", **BIAS)(x)


@functools.partial(jax.jit, static_argnums=0)
def linen_gradients(model, params):
    return jax.value_and_grad(
        lambda params: loss_of(functools.partial(model.apply, {"params": params}))
    )(params)


def train_linen(tx, lengths, initial=None):
    """Losses, initial parameters; final parameters, ``mu`` and ``nu``."""
    model = LinenTransformer(lengths, scanned=initial is None)
    if initial is None:
        tokens = jnp.zeros((1, 1), int)
        initial = draw(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])
    params, state, losses = initial, tx.init(initial), []
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    for _ in range(5):
        loss, grads = linen_gradients(model, params)
        params, state = step(grads, state, params)
        losses.append(loss)
    mu, nu = (optax.tree.get(state, name) for name in ("mu", "nu"))
    return losses, initial, [params, mu, nu]


def stacked_axes(depth):
    """How many axes stack layers, for a tree of any kind of nodes."""

    def axes(tree):
        return jax.tree.map_with_path(
            lambda path, _: depth if path[0].key == "blocks" else 0, tree
        )

    return axes


def unstack(tree, lengths):
    """Parameters, ``mu`` or ``nu`` of the scanned model, as the looped one has them."""
    rest = {name: part for name, part in tree.items() if name != "blocks"}
    return rest | {
        f"blocks_{i}": jax.tree.map(lambda x, at=at: x[at], tree["blocks"])
        for i, at in enumerate(np.ndindex(lengths))
    }


def agree(got, expected):
    """Scanned and looped blocks are two programs: their gradients round differently.

    In these steps they differ by 3e-7 of a layer's largest entry. A small entry among
    large ones is only as precise as those.
    """

    def close(path, x, y):
        where, atol = jax.tree_util.keystr(path), 1e-5 * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol, err_msg=where)

    jax.tree.map_with_path(close, got, expected)


BOTH = {"weight_decay": 0.1, "clipnorm": 0.2}  # This clips some layers and not others.
CASES = [BOTH, {"weight_decay": 0.1}, {"global_clipnorm": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES, ids=str)
def test_scanned_blocks_train_as_looped_ones(options):
    lengths = 2, 2
    tx = gx.novograd(0.01, stacked_axes=stacked_axes(len(lengths)), **options)
    losses, initial, scanned = train_linen(tx, lengths)
    tx, initial = gx.novograd(0.01, **options), unstack(initial, lengths)
    expected, _, looped = train_linen(tx, lengths, initial)
    assert losses[-1] < 0.9 * losses[0]
    agree(losses, expected)
    for got, wanted in zip(scanned, looped, strict=True):
        agree(unstack(got, lengths), wanted)


@pytest.mark.slow
def test_scanned_blocks_under_one_norm_train_otherwise():
    tx = gx.novograd(0.01, stacked_axes={"embed": 0, "blocks": 2, "head": 0})
    _, initial, (apart, *_) = train_linen(tx, (2, 2))
    _, _, (together, *_) = train_linen(gx.novograd(0.01), (2, 2))

    def differ(x, y, start):
        # The steps of four layers under one norm are shorter by 2 or so.
        assert jnp.linalg.norm(x - y) > 0.3 * jnp.linalg.norm(x - start)

    jax.tree.map(differ, *(tree["blocks"] for tree in (apart, together, initial)))


@pytest.mark.parametrize("init", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nu_of_stacked_layers_starts_with_their_first_gradient(init):
    tx = gx.scale_by_novograd(stacked_axes=1)
    grads = {"w": jnp.ones((2, 3))}
    state = init(tx.init)(grads)
    for each in ({"w": None}, grads):
        _, state = tx.update(each, state)
    assert state.nu["w"].tolist() == [3.0, 3.0]


@pytest.mark.slow
def test_layers_that_nnx_has_stacked():
    """Its optimizer gives trees of variables. Each layer is normalized for itself."""
    stack = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(4, 2, rngs=rngs)))
    model = nnx.Dict(blocks=stack(nnx.Rngs(0)), head=nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tx = gx.novograd(0.1, stacked_axes=stacked_axes(1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    after, g = nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(grads)
    for part, layers in (("blocks", 3), ("head", 1)):
        for name in ("kernel", "bias"):
            wide = np.float64(g[part][name]).reshape(layers, -1)
            norms = np.linalg.norm(wide, axis=1, keepdims=True)
            moved = np.reshape(after[part][name] - before[part][name], (layers, -1))
            np.testing.assert_allclose(moved, -0.1 * wide / norms, rtol=1e-4, atol=1e-6)
