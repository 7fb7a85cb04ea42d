"""Rounding to half precision by whoever reads the result, and not in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir

from gradxform._trees import versions


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``x.astype(dtype)``, of which the compiler makes no copy where it is read twice.

    XLA for CPU counts the conversion of float32 to bfloat16 among the operations too
    costly to be done again in each fusion that reads the result, and so writes it to
    memory. The same rounding out of integer operations is done again. To whatever
    transforms a program it stays one conversion, which is linear.
    """
    if x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16:
        rounded: jax.Array = _to_bfloat16.bind(x)
        return rounded
    return x.astype(dtype)


def _type(x: Any) -> Any:
    return x.update(dtype=jnp.dtype(jnp.bfloat16), weak_type=False)


def _transposed(cotangent: Any, x: Any) -> list[Any]:
    del x
    return [cotangent.astype(jnp.float32)]


def _converted(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _upper_half(x: jax.Array) -> jax.Array:
    # A NaN may differ from inf in the lower half alone.
    nan = jnp.full_like(x, jnp.nan)
    x = jax.lax.select(x != x, nan, jax.lax.reduce_precision(x, 8, 7))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


# Bits have neither a derivative nor a transpose, so they come in where a program is
# made for a platform, after all that JAX does with it.
_to_bfloat16 = versions.Primitive("gradxform_to_bfloat16")
_to_bfloat16.def_abstract_eval(_type)
_to_bfloat16.def_impl(jax.jit(_to_bfloat16.bind))
ad.deflinear2(_to_bfloat16, _transposed)
batching.defvectorized(_to_bfloat16)
jet.deflinear(_to_bfloat16)
for _how, _platform in ((_converted, None), (_upper_half, "cpu")):
    _lowered = mlir.lower_fun(_how, multiple_results=False)
    mlir.register_lowering(_to_bfloat16, _lowered, platform=_platform)
