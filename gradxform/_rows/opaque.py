"""Row indices as leaves of a pytree, in a dtype that JAX refuses to calculate with.

JAX can still move, gather and select such leaves. It would add and multiply plain
numbers as it does gradients, and the result would be the index of another row. It also
makes zeros of such a dtype, as in ``jnp.zeros_like``. They stand for padding: the bits
count the rows from the end of the table.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._rows.rows import A

SHORT_HINT = (  # Is in JAX's errors, as a part of names.
    "a row-sparse gradient: wrap this in gradxform.lazy, or put gradxform.densify() in "
    "front of it"
)


@functools.cache
def _opaque() -> object:
    from jax.extend import random  # Takes 60 ms, so it is imported only here.

    return random.define_prng_impl(
        key_shape=(1,),
        seed=_no_generator,
        split=_no_generator,
        random_bits=_no_generator,
        fold_in=_no_generator,
        name="gradxform.IndexedSlices",
        tag=f"indices of {SHORT_HINT}",
    )


def _no_generator(*_: object) -> NoReturn:
    raise TypeError("Row indices make no random numbers.")


@functools.partial(jax.jit, inline=True, static_argnames="height")
def to_leaf(indices: jax.Array, height: int) -> jax.Array:
    """Indices of a table, int32 in [0, height], as an array of the opaque dtype."""
    bits = jax.lax.bitcast_convert_type(height - indices, jnp.uint32)
    return jax.random.wrap_key_data(bits[..., None], impl=_opaque())


@functools.partial(jax.jit, inline=True, static_argnames="height")
def from_leaf(leaf: jax.Array, height: int) -> jax.Array:
    """The indices again, int32."""
    return from_bits(jax.random.key_data(leaf), height)


def from_bits(bits: A, height: int) -> A:
    """The indices from the opaque array's bits, uint32[..., 1]."""
    return height - bits.squeeze(-1).view(np.int32)  # type: ignore[return-value]


def is_opaque(dtype: jax.typing.DTypeLike) -> bool:
    """Whether it is the opaque dtype, or a random key's."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
