"""A momentum: how it begins, which gradients it takes, and how a step reads it."""

from __future__ import annotations

import jax
import numpy as np
import optax

from gradxform._trees import checks, compilers, constants, dtypes, maps


def zeros(params: optax.Params, mu_dtype: jax.typing.DTypeLike | None) -> optax.Updates:
    """No momentum yet, in this dtype, by default that of the parameters.

    Raises:
      TypeError: the dtype does not fit the parameters.
    """
    checks.of_same_kind("mu_dtype", mu_dtype, params)
    return constants.zeros(params, mu_dtype, dtypes.inexact_dtype)


def check(transformation: str, updates: optax.Updates, mu: optax.Updates) -> None:
    """Raises ``TypeError`` unless updates are dense and of the momentum's shapes."""
    checks.dense(transformation, updates)
    checks.same_shapes("updates", updates, "mu", mu)


def for_step(g: jax.Array, mu: jax.Array, moved: jax.Array) -> jax.Array:
    """The new momentum for the step: ``moved``, or ``mu``, as the state holds it.

    If the dtype of the state holds every number of the gradient's, it is read from
    there. Then the state can be written in place of the old one, which the step need
    not read.
    """
    if not np.can_cast(g.dtype, mu.dtype):
        return moved
    if mu.dtype.itemsize < 4:  # Or it would be computed again for the step.
        mu = compilers.apart(mu)
    return dtypes.widen(mu).astype(moved.dtype)


def stored(
    updates: optax.Updates, moved: optax.Updates, mu: optax.Updates
) -> optax.Updates:
    """New momenta in the dtypes of the old ones; no gradient leaves the old one."""
    return maps.map_state(lambda _, old, new: new.astype(old.dtype), updates, mu, moved)
