"""A momentum: how it begins, which gradients it takes, and how a step reads it."""

from __future__ import annotations

import jax
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._jax import compilers
from gradxform._numbers import constants
from gradxform._rows import boundary
from gradxform._trees import dtypes


def zeros(params: optax.Params, mu_dtype: jax.typing.DTypeLike | None) -> optax.Updates:
    """No momentum yet, in this dtype, by default that of the parameters.

    Raises:
      TypeError: the dtype does not fit the parameters.
    """
    structures.check_same_kind("mu_dtype", mu_dtype, params)
    return constants.zeros(params, mu_dtype, dtypes.inexact_dtype)


def check_like_momentum(
    transformation: str, updates: optax.Updates, mu: optax.Updates
) -> None:
    """Raises ``TypeError`` unless updates are dense and of the momentum's shapes."""
    boundary.check_dense(transformation, updates)
    structures.check_shapes("updates", updates, "mu", mu)


def in_both_dtypes(
    g: jax.Array, mu: jax.Array, moved: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The new momentum in the dtype of the old one, ``mu``, and that for the step.

    If that dtype holds every number of the gradient's, the step reads the momentum from
    the state. Then the state can be written in place of the old one, which the step
    need not read.
    """
    new = moved.astype(mu.dtype)
    if not np.can_cast(g.dtype, mu.dtype):
        return new, moved
    # Or it would be computed again for the step.
    unshared = compilers.unshared(new) if mu.dtype.itemsize < 4 else new
    return new, dtypes.widen(unshared).astype(moved.dtype)
