"""The parameter trees that are measured, as shapes, and losses for some of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

HEAD = 128  # The width of an attention head.


def gpt2_small(dtype=jnp.float32):
    """GPT-2-small: 148 leaves, 124M parameters."""
    width, blocks = 768, 12
    shapes = {"wte": (50257, width), "wpe": (1024, width)}
    for i in range(blocks):
        for layer, (rows, columns) in {
            "attention": (width, 3 * width),
            "projection": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }.items():
            shapes[f"{i}/{layer}/kernel"] = (rows, columns)
            shapes[f"{i}/{layer}/bias"] = (columns,)
        for norm in ("norm1", "norm2"):
            shapes[f"{i}/{norm}/scale"] = shapes[f"{i}/{norm}/bias"] = (width,)
    shapes["norm/scale"] = shapes["norm/bias"] = (width,)
    return _leaves(shapes, dtype)


def gpt2_short(dtype=jnp.float32, blocks=2):
    """GPT-2-small with fewer than its twelve blocks: every kind of leaf, but fewer."""
    kept = {"wte", "wpe", "norm", *map(str, range(blocks))}
    leaves = gpt2_small(dtype)
    return {name: x for name, x in leaves.items() if name.split("/")[0] in kept}


def resnet50(dtype=jnp.float32):
    """ResNet-50: 161 leaves, 25.6M parameters."""
    shapes = {}

    def convolution(name, size, inputs, outputs):
        shapes[f"{name}/kernel"] = (size, size, inputs, outputs)
        shapes[f"{name}/norm/scale"] = shapes[f"{name}/norm/bias"] = (outputs,)

    convolution("stem", 7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            name = f"{stage}/{block}"
            convolution(f"{name}/reduce", 1, inputs, width)
            convolution(f"{name}/spatial", 3, width, width)
            convolution(f"{name}/expand", 1, width, 4 * width)
            if block == 0:
                convolution(f"{name}/shortcut", 1, inputs, 4 * width)
            inputs = 4 * width
    shapes |= {"dense/kernel": (inputs, 1000), "dense/bias": (1000,)}
    return _leaves(shapes, dtype)


def small_leaves(n=2000, size=256, dtype=jnp.float32):
    """Many small leaves: they show what a step costs beside moving memory."""
    return _leaves({f"{i}": (size,) for i in range(n)}, dtype)


def dense_layers(number=12, width=1024, dtype=jnp.float32):
    """Square layers, one after the other; :func:`squares` is a loss for them."""
    return _leaves({f"{i:03}": (width, width) for i in range(number)}, dtype)


def squares(layers, x):
    """The mean square of the dense layers' output for a batch ``[size, width]``."""
    for name in sorted(layers):
        x = jnp.tanh(x @ layers[name])
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def transformer(layers=8, width=1024, vocabulary=4096, dtype=jnp.float32):
    """A decoder whose layers are stacked; :func:`next_tokens` scans them."""
    layer = {
        "norm1": (width,),
        "attention": (width, 3, width // HEAD, HEAD),
        "projection": (width, width),
        "norm2": (width,),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    stacked = {name: (layers, *shape) for name, shape in layer.items()}
    return {
        "embed": jax.ShapeDtypeStruct((vocabulary, width), dtype),
        "layers": _leaves(stacked, dtype),
        "norm": jax.ShapeDtypeStruct((width,), dtype),
    }


def normalized(x, scale):
    """Root-mean-square normalization."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale[None, None]


def decoder_layer(x, w):
    """One layer of a transformer, in the form of a scan's body."""
    h = normalized(x, w["norm1"])
    q, k, v = jnp.einsum("btd,dchk->cbthk", h, w["attention"])
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x += attended.reshape(x.shape) @ w["projection"]
    h = normalized(x, w["norm2"])
    return x + jax.nn.gelu(h @ w["up"]) @ w["down"], None


def cross_entropy(x, norm, embed, tokens):
    """The mean over all next tokens, from what the last layer gives."""
    logits = normalized(x, norm) @ embed.T
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
        )
    )


def next_tokens(params, tokens):
    """The loss of a :func:`transformer`; its layers are rematerialized."""
    body = jax.checkpoint(decoder_layer)
    x, _ = jax.lax.scan(body, params["embed"][tokens], params["layers"])
    return cross_entropy(x, params["norm"], params["embed"], tokens)


def embedding(rows=800_000, width=128, dtype=jnp.float32):
    """A table, and two layers over four of its rows; see :func:`scores`."""
    inputs = 4 * width
    shapes = {"table": (rows, width), "up": (inputs, inputs), "out": (inputs,)}
    return _leaves(shapes, dtype)


def scores(params, words, labels):
    """The loss of an :func:`embedding` for four words of each example."""
    x = params["table"][words].reshape(len(words), -1)
    errors = jnp.tanh(x @ params["up"]) @ params["out"] - labels
    return jnp.mean(jnp.square(errors.astype(jnp.float32)))


class Training(NamedTuple):
    """What a whole step needs, as shapes, and the loss."""

    params: Any
    batch: tuple[jax.ShapeDtypeStruct, ...]
    loss_fn: Callable[..., jax.Array]


def training(name, dtype=jnp.float32, small=False):
    """One of the ``TRAININGS``: the batch is small beside the parameters.

    A ``small`` one has 13 to 15 million parameters. The others are so large that their
    temporaries stand out from what a compiler keeps beside arrays.
    """
    dtype = jnp.dtype(dtype)
    if name == "dense":
        width = 1024 if small else 3072
        batch = jax.ShapeDtypeStruct((64, width), dtype)
        return Training(dense_layers(width=width, dtype=dtype), (batch,), squares)
    if name == "transformer":
        tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32)
        params = transformer(4 if small else 16, width=512, dtype=dtype)
        return Training(params, (tokens,), next_tokens)
    words = jax.ShapeDtypeStruct((256, 4), jnp.int32)
    labels = jax.ShapeDtypeStruct((256,), dtype)
    params = embedding(100_000 if small else 800_000, dtype=dtype)
    return Training(params, (words, labels), scores)


TRAININGS = "dense", "transformer", "embedding"
MODELS = {
    "gpt2_small": gpt2_small,
    "resnet50": resnet50,
    "small_leaves": small_leaves,
}


def tree(name, dtype=jnp.float32):
    """The model of this name; a number stands for so many small leaves."""
    if name in MODELS:
        return MODELS[name](dtype=dtype)
    return small_leaves(int(name), dtype=dtype)


def size(tree):
    """Bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _leaves(shapes, dtype):
    return {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}
