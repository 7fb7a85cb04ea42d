"""Dtypes to calculate in, and numbers in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def dtype_of(x: Any) -> np.dtype[Any]:  # An array, a description, a number.
    """The dtype of anything that has one, or that NumPy finds, as for a string."""
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


def compute_dtype(x: jax.Array) -> np.dtype[Any]:
    """Real dtype for arithmetic on ``x``: float64 if ``x`` is double, else float32."""
    double = x.dtype in (jnp.float64, jnp.complex128)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def wide_dtype(x: jax.Array) -> np.dtype[Any]:
    """The dtype of ``x`` in at least single precision; complex stays complex."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.dtype
    return compute_dtype(x)


def inexact_dtype(x: jax.Array) -> np.dtype[Any]:
    """The dtype of ``x`` if it is inexact (for a momentum), or `compute_dtype`."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else compute_dtype(x)


def widen(x: jax.Array) -> jax.Array:
    """``x`` in at least single precision; complex stays complex."""
    return x.astype(wide_dtype(x))


def saturated(x: jax.typing.ArrayLike) -> jax.Array:
    """An integer, or inf, as int32; a number out of range becomes the nearest one."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if isinstance(x, jax.Array):
        info = jnp.iinfo(x.dtype)
        if info.bits >= 32:
            x = jnp.clip(x, max(info.min, low), min(info.max, high))
        return x.astype(jnp.int32)
    number: Any = x.item() if isinstance(x, np.ndarray | np.generic) else x
    return jnp.asarray(min(max(number, low), high), jnp.int32)
