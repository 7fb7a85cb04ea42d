"""Rounding to half precision at each reader, instead of a rounded copy in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradxform._trees.linear import linear


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``x.astype(dtype)``, without a copy if the result is read twice.

    XLA for CPU considers a conversion from float32 to bfloat16 too costly to repeat in
    each fusion that reads its result, so it writes the result to memory. It does repeat
    integer operations that round the same way.
    """
    if x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16:
        return _to_bfloat16(x)
    return x.astype(dtype)


def _converted(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _upper_half(x: jax.Array) -> jax.Array:
    # Without its lower half a NaN may look like inf.
    nan = jnp.full_like(x, jnp.nan)
    x = jax.lax.select(x != x, nan, jax.lax.reduce_precision(x, 8, 7))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


_to_bfloat16 = linear("to_bfloat16", _converted, cpu=_upper_half)
