"""Row indices as leaves of a pytree, in a dtype that JAX refuses to calculate with.

JAX can still move, gather and select such leaves. It would add and multiply plain
numbers as it does gradients, and the result would be the index of another row.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import jax
import jax.numpy as jnp

TAG = (  # The name of the dtype in JAX's errors.
    "indices of a row-sparse gradient: wrap this in gradxform.lazy, or put "
    "gradxform.densify() in front"
)


@functools.cache
def _opaque() -> object:
    import jax.extend.random  # Takes 60 ms, so it is imported only here.

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=_no_generator,
        split=_no_generator,
        random_bits=_no_generator,
        fold_in=_no_generator,
        name="gradxform.IndexedSlices",
        tag=TAG,
    )


def _no_generator(*_: object) -> NoReturn:
    raise TypeError("Row indices make no random numbers.")


@functools.partial(jax.jit, inline=True)
def to_leaf(indices: jax.Array) -> jax.Array:
    """Indices, int32, as an array of the opaque dtype."""
    bits = jax.lax.bitcast_convert_type(indices, jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_opaque())


@functools.partial(jax.jit, inline=True)
def from_leaf(leaf: jax.Array) -> jax.Array:
    """The indices again, int32."""
    bits = jax.random.key_data(leaf).squeeze(-1)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def is_opaque(dtype: jax.typing.DTypeLike) -> bool:
    """Whether it is the opaque dtype, or a random key's."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
