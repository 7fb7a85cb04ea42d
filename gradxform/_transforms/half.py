"""Half precision, bfloat16 or float16: parameters in it, their spacing, rounding to it.

A compiler may keep more precision than ``x.astype(jnp.bfloat16)`` asks for. So numbers
are rounded here by their bits, or by steps whose size is a power of two.
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


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of float32 as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def of_bits(bits: jax.Array) -> jax.Array:
    """The float32 with these bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def widen(p: jax.Array) -> jax.Array:
    """A parameter in half precision as float32, without precision that it lacks."""
    if p.dtype == jnp.bfloat16:
        bits = jax.lax.bitcast_convert_type(p, jnp.int16).astype(jnp.int32)
        return of_bits(bits << 16)
    return nearest(p.astype(jnp.float32), p.dtype)


def spacing(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """The distance of numbers of ``dtype`` near ``x``, in float32; 2⁻¹⁰⁷ or more."""
    info = jnp.finfo(dtype)
    # Without its fraction a number is a power of two.
    power = of_bits(bits_of(x) & 0x7F800000)
    least = max(float(info.tiny), 2.0**-100)
    return jnp.clip(power, least, 2.0**127) * jnp.float32(info.eps)


def nearest(x: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """float32 as the nearest number of ``dtype``, or the even one of two."""
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, 8, 7)
    step = spacing(x, dtype)
    return jnp.round(x / step) * step
