"""A momentum: how it begins, which gradients it takes, and how a step reads it."""

from __future__ import annotations

import jax
import optax

from gradxform._trees import barrier, checks, constants, dtypes, maps


def zeros(params: optax.Params, mu_dtype: jax.typing.DTypeLike | None) -> optax.Updates:
    """No momentum yet, in this dtype, by default that of the parameters.

    Raises:
      TypeError: the dtype does not fit the parameters.
    """
    checks.of_same_kind("mu_dtype", mu_dtype, params)

    def zero(p: jax.Array) -> jax.Array:
        dtype = dtypes.inexact_dtype(p) if mu_dtype is None else mu_dtype
        return constants.full_like(p, 0, dtype)

    return maps.map_params(zero, params)


def check(transformation: str, updates: optax.Updates, mu: optax.Updates) -> None:
    """Raises ``TypeError`` unless updates are dense and of the momentum's shapes."""
    checks.dense(transformation, updates)
    checks.same_shapes("updates", updates, "mu", mu)


def for_step(mu: jax.Array, g: jax.Array) -> jax.Array:
    """A new momentum in the dtype of a wide gradient, for the step."""
    if mu.dtype.itemsize < 4:  # Or it would be computed again for the step.
        mu = barrier.apart(mu)
    return dtypes.widen(mu).astype(g.dtype)
