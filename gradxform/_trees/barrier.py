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


_apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)
