"""Half precision, bfloat16 or float16: which parameters have it, and rounding to it.

A compiler may keep more precision than ``x.astype(jnp.bfloat16)`` asks for, but not
more than ``lax.reduce_precision`` does. No function here looks at bits: from then on
the TPU compiler would no longer write several results in one pass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._trees import dtypes


def is_half(p: Any) -> bool:  # An array, a description, a number.
    """Whether a parameter is in half precision."""
    return dtypes.dtype_of(p) in (jnp.bfloat16, jnp.float16)


def check_precision(name: str, params: optax.Params) -> None:
    """Raises ``TypeError`` unless all parameters are in half precision or in more."""
    for path, p in jax.tree.leaves_with_path(params):
        dtype = dtypes.dtype_of(p)
        if is_half(p) or (jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4):
            continue
        raise TypeError(
            f"{name} takes parameters in bfloat16 and float16, and leaves those in "
            f"float32 as they are, got {dtype} at {structures.path_name(path)}. Put "
            "optax.masked around it, which leaves that parameter out."
        )


def as_float32(p: jax.Array) -> jax.Array:
    """A parameter in half precision as float32, without precision that it lacks."""
    return nearest(p.astype(jnp.float32), p.dtype)


def nearest(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """float32 as the nearest number of ``dtype``, or the even one of two."""
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, 8, 7)
    info = jnp.finfo(dtype)
    # Below its normal numbers float16 has whole multiples of its smallest one; above
    # its largest one is inf. Compilers fold a sum (x + c) - c into x.
    small, least = jnp.abs(x) < float(info.tiny), float(info.smallest_subnormal)
    multiple = jnp.round(x * (1 / least)) * least
    y = jnp.where(small, multiple, jax.lax.reduce_precision(x, 8, 10))
    return jnp.where(jnp.abs(y) > float(info.max), y * jnp.inf, y)


def neighbour(t: jax.Array, way: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The number of ``dtype`` next to ``t``: above it for a ``way`` > 0, else below."""
    info = jnp.finfo(dtype)
    # Between a half and one and a half of the distance, wherever ``t`` is.
    step = (0.6 * float(info.eps)) * jnp.maximum(jnp.abs(t), float(info.tiny))
    return nearest(t + jnp.sign(way) * step, dtype)


def even_threshold(count: jax.Array) -> jax.Array:
    """A threshold in [0, 1) of 16 bits, as float32: 1/2, then by the golden ratio.

    Any number of them in turn is spread evenly, and so is every second or third one.
    """
    ratio = np.uint32(0x9E3779B9)  # 2³² (√5 - 1) / 2, an odd number.
    x = count.astype(jnp.uint32) * ratio + np.uint32(2**31)
    return (x >> 16).astype(jnp.float32) * 2.0**-16


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """``new - old``, but 0 if both are the same infinity, so that it stays."""
    return jnp.where(new == old, 0, new - old)


def rounded_at(threshold: jax.Array, x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """One of the two numbers of ``dtype`` around ``x``, in float32.

    It is the farther one if ``x`` is more than the threshold of the way there. So it is
    ``x`` on average over thresholds that are spread evenly over [0, 1).
    """
    near = nearest(x, dtype)
    far, part = part_of_way(x, near, dtype)
    return jnp.where(threshold < part, far, near)


def part_of_way(
    x: jax.Array, near: jax.Array, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array]:
    """The number of ``dtype`` next to ``near``, towards ``x``, and the part of the way
    there that ``x`` has gone; it is 0 if that number is not finite.
    """
    rest = x - near
    far = neighbour(near, rest, dtype)
    gap = jnp.abs(far - near)
    has_gap = (gap > 0) & (gap < jnp.inf)
    return far, jnp.where(has_gap, jnp.abs(rest) / jnp.where(has_gap, gap, 1), 0)
