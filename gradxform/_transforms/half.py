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

from gradxform._trees import checks, dtypes


def is_half(p: Any) -> bool:  # An array, a description, a number.
    """Whether a parameter is in half precision."""
    return dtypes.dtype_of(p) in (jnp.bfloat16, jnp.float16)


def check(name: str, params: optax.Params) -> None:
    """Raises ``TypeError`` unless all parameters are in half precision or in more."""
    for path, p in jax.tree.leaves_with_path(params):
        dtype = dtypes.dtype_of(p)
        if is_half(p) or (jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4):
            continue
        raise TypeError(
            f"{name} takes parameters in bfloat16 and float16, and leaves those in "
            f"float32 as they are, got {dtype} at {checks.path_name(path)}. Put "
            "optax.masked around it, which leaves that parameter out."
        )


def widen(p: jax.Array) -> jax.Array:
    """A parameter in half precision as float32, without precision that it lacks."""
    return nearest(p.astype(jnp.float32), p.dtype)


def nearest(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """float32 as the nearest number of ``dtype``, or the even one of two."""
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, 8, 7)
    info = jnp.finfo(dtype)
    # Below its normal numbers float16 has those of float32 between 0.5 and 1, minus
    # them; above its largest one is inf.
    small = jnp.abs(x) < float(info.tiny)
    y = jnp.where(small, (x + 0.75) - 0.75, jax.lax.reduce_precision(x, 8, 10))
    return jnp.where(jnp.abs(y) > float(info.max), jnp.sign(y) * jnp.inf, y)


def neighbour(t: jax.Array, way: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The number of ``dtype`` next to ``t``: above it for a ``way`` > 0, else below."""
    info = jnp.finfo(dtype)
    # Between a half and one and a half of the distance, wherever ``t`` is.
    step = (0.6 * float(info.eps)) * jnp.maximum(jnp.abs(t), float(info.tiny))
    return nearest(t + jnp.sign(way) * step, dtype)


def part_of_way(
    x: jax.Array, near: jax.Array, dtype: np.dtype[Any]
) -> tuple[jax.Array, jax.Array]:
    """The number of ``dtype`` next to ``near``, towards ``x``, and the part of the way
    there that ``x`` has gone; it is 0 if that number is not finite.
    """
    rest = x - near
    far = neighbour(near, rest, dtype)
    gap = jnp.abs(far - near)
    known = (gap > 0) & (gap < jnp.inf)
    return far, jnp.where(known, jnp.abs(rest) / jnp.where(known, gap, 1), 0)
