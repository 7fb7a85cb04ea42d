"""A barrier against sharing values that are cheaper to compute twice."""

from __future__ import annotations

import jax

from gradxform._trees.linear import linear


def apart(x: jax.Array) -> jax.Array:
    """``x``, whose results here the compiler does not share with other users.

    On CPU a sum of squares may share its widening of half precision with an update, or
    with its clip. Then it is no longer fused with it, and a copy goes to memory.
    Elsewhere there is no copy, and a barrier would make one if ``x`` itself is not
    computed yet.
    """
    return _apart(x)


def after(x: jax.Array, known: jax.Array) -> jax.Array:
    """``x``, with which the compiler for CPU does nothing before ``known`` is known.

    Two barriers around one array are one for the compiler, and their users share what
    they compute. These two are not.
    """
    return _after(x, known)


_apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)
_after = linear(
    "after",
    lambda x, known: x,
    cpu=lambda x, known: jax.lax.optimization_barrier((x, known))[0],
)
