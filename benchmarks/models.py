"""The parameter trees that are measured, as shapes."""

import jax
import jax.numpy as jnp


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
    """The mean square of what dense layers make of a batch ``[size, width]``."""
    for name in sorted(layers):
        x = jnp.tanh(x @ layers[name])
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


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
