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


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        options = {"rngs": rngs, **BIAS}
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, **options) for _ in range(2))
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
        self.widen = nnx.Linear(WIDTH, 2 * WIDTH, **options)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, **options)

    def __call__(self, x):
        x = x + self.attend(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.narrow(nnx.gelu(self.widen(self.norm2(x))))


class NNXTransformer(nnx.Module):
    def __init__(self, length, scanned, rngs):
        self.length, self.scanned = length, scanned
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs, **BIAS)
        if scanned:
            self.blocks = nnx.split_rngs(splits=length)(nnx.vmap(NNXBlock))(rngs)
        else:
            for i in range(length):
                setattr(self, f"blocks_{i}", NNXBlock(rngs))

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.scanned:
            axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
            x = nnx.scan(lambda x, block: block(x), **axes)(x, self.blocks)
        else:
            for i in range(self.length):
                x = getattr(self, f"blocks_{i}")(x)
        return self.head(x)


nnx_gradients = nnx.jit(nnx.value_and_grad(loss_of))


def train_nnx(tx, lengths, initial=None):
    """As :func:`train_linen`."""
    create = functools.partial(NNXTransformer, *lengths, scanned=initial is None)
    model = nnx.eval_shape(lambda: create(rngs=nnx.Rngs(0)))
    if initial is None:
        initial = draw(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    nnx.update(model, initial)
    optimizer, losses = nnx.Optimizer(model, tx, wrt=nnx.Param), []
    step = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    for _ in range(5):
        loss, grads = nnx_gradients(model)
        step(optimizer, model, grads)
        losses.append(loss)
    mu, nu = (optax.tree.get(optimizer.opt_state, name) for name in ("mu", "nu"))
    params = nnx.state(model, nnx.Param)
    return losses, initial, [nnx.to_pure_dict(tree) for tree in (params, mu, nu)]


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
CASES = [
    (train_linen, (2, 2), BOTH),
    pytest.param(train_linen, (2, 2), {"weight_decay": 0.1}, marks=pytest.mark.slow),
    pytest.param(train_linen, (2, 2), {"global_clipnorm": 1.0}, marks=pytest.mark.slow),
    pytest.param(train_nnx, (2,), BOTH, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "lengths", "options"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_scanned_blocks_train_as_looped_ones(train, lengths, options):
    tx = gx.novograd(0.01, stacked_axes=stacked_axes(len(lengths)), **options)
    losses, initial, scanned = train(tx, lengths)
    tx, initial = gx.novograd(0.01, **options), unstack(initial, lengths)
    expected, _, looped = train(tx, lengths, initial)
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
