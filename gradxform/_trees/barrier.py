"""A barrier against a compiler that shares what is cheaper to compute twice."""

from __future__ import annotations

import jax

from gradxform._trees.linear import linear


def apart(x: jax.Array) -> jax.Array:
    """``x``, such that what is computed from it here is not shared with other users.

    On CPU a sum of squares that shares its widening of half precision with an update,
    or its clip, is no longer fused with it: a copy goes to memory. Elsewhere there is
    no copy, and this would make one where ``x`` itself is still to be computed.
    """
    return _apart(x)


_apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)
