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
    return {k: jax.ShapeDtypeStruct(s, dtype) for k, s in shapes.items()}


def size(tree):
    """Bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
