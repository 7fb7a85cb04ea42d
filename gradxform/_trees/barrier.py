"""A barrier against sharing values that are cheaper to compute twice."""

from __future__ import annotations

import jax

from gradxform._trees.linear import linear


def apart(x: jax.Array) -> jax.Array:
    """``x``, so that the compiler does not share results of it with other users.

    On CPU a sum of squares may share the cast of ``x`` to float32 with an update, or
    with its clip. Then the cast is no longer fused, and its result goes to memory.
    Other platforms make no such copy; there a barrier would make one if ``x`` itself is
    not computed yet.
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
