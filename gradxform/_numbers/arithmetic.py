"""Arithmetic on arrays of any dtype: in at least float32, and rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._jax import versions
from gradxform._jax.compilers import zeros_unless
from gradxform._trees.dtypes import compute_dtype, widen


@jax.jit
def scale(x: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """``factor · x`` for real ``factor``, in at least float32, in the dtype of ``x``.

    The parts of a complex ``x`` are multiplied one by one, so that a factor of 1
    gives back every bit and a NaN factor leaves no part untouched.
    """
    factor = versions.as_factor(jnp.asarray(factor, compute_dtype(x)), x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(x.real * factor, x.imag * factor)
    return (widen(x) * factor).astype(x.dtype)


def scale_leading(x: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """:func:`scale` with a factor for each entry along the first axes of ``x``."""
    return scale(x, expand(jnp.asarray(factor), x))


def wide_sum(
    x: jax.Array, total: jax.Array, factor: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """``total + x`` in at least float32, in the precision of ``total``, unrounded.

    With a real ``factor`` it is ``total + factor · x``. If the factor is 0, it is
    ``total``, even if ``x`` is not finite.
    """
    wide = widen(total)
    x = widen(x).astype(wide.dtype)
    if factor is None:
        return wide + x
    return wide + zeros_unless(jnp.asarray(factor) != 0, scale(x, factor))


def integer_sum(x: jax.Array, total: jax.Array) -> jax.Array:
    """``total + x`` of integers, exactly; any other ``x`` is truncated first.

    The result has the dtype of ``total``. An unsigned dtype has no negative numbers, so
    the absolute value of a negative ``x`` is subtracted.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return total + x.astype(total.dtype)
    size = jnp.abs(x).astype(total.dtype)
    return jnp.where(x < 0, total - size, total + size)


def rounded_sum(u: jax.Array, p: jax.Array) -> jax.Array:
    """``p + u`` in the dtype of ``p``, rounded once."""
    if jnp.issubdtype(p.dtype, jnp.integer):
        return integer_sum(u, p)
    if u.dtype == p.dtype:
        # A sum in half precision is rounded only once anyway. Compilers for TPU fuse
        # it, but they do not fuse a sum in float32.
        return p + u
    return wide_sum(u, p).astype(p.dtype)


def abs_sq(x: jax.Array) -> jax.Array:
    """``|x|²``, real, in at least float32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.square(x.real) + jax.lax.square(x.imag)
    return jax.lax.square(widen(x))


def safe_sqrt(x: jax.Array) -> jax.Array:
    """``sqrt(x)`` of ``x ≥ 0`` with a finite derivative at 0."""
    positive = x > 0
    root = jnp.sqrt(jnp.where(positive, x, 1))
    # A number that is not positive is 0 or NaN, and is its own root.
    return jnp.where(positive, root, x)


def inverse_sqrt(
    x: jax.Array, eps: jax.typing.ArrayLike, eps_in_sqrt: bool
) -> jax.Array:
    """``1/sqrt(x + eps)`` or ``1/(sqrt(x) + eps)`` of ``x ≥ 0``, but 1 for 1/0.

    A divisor too small for a normal number of its dtype counts as 0.

    The caller multiplies a gradient by it, and ``x`` contains the gradient's square. So
    where the divisor is 0, the gradient is 0, and the quotient should be 0 too.
    """
    # If eps is known and positive in this dtype, the divisor is positive, too.
    tiny = np.finfo(x.dtype).tiny
    may_be_0 = isinstance(eps, jax.core.Tracer) or np.asarray(eps, x.dtype) < tiny
    eps = jnp.asarray(eps, x.dtype)
    divisor = x + eps if eps_in_sqrt else safe_sqrt(x) + eps
    if may_be_0:
        # Not `divisor == 0`: a GPU compares smaller numbers, but divides by 0 instead.
        divisor = jnp.where(divisor < tiny, 1, divisor)
    return jax.lax.rsqrt(divisor) if eps_in_sqrt else 1 / divisor


def expand(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` with trailing axes of length 1, so that it lines up with ``like``."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))
