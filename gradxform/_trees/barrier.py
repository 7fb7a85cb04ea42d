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


_apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)
