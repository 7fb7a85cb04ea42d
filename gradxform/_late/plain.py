"""One whole step of a transformation that is no gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gradxform._late import missing
from gradxform._rows import boundary
from gradxform._trees import maps
from gradxform._trees.apply_updates import apply_updates
from gradxform._trees.compilers import narrow


def step(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra: object,
) -> tuple[optax.Params, optax.OptState]:
    """``(params, state)``, in the dtypes of before.

    Raises:
      RowSparseError: ``tx`` fails on row-sparse gradients, and not on dense ones.
    """

    def run(updates: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
        return missing.update(tx, updates, state, params, **extra)

    try:
        changes, after = run(updates)
    except Exception as error:
        boundary.raise_if_only_rows_fail(error, run, updates)
        raise
    return apply_updates(params, changes), _as_before(after, state)


def _as_before(new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """A new state in the dtypes of the old one; a leaf that is None stays the old one.

    A leaf that has become complex keeps its dtype, and so does a tree of other nodes.
    """

    def cast(x: jax.Array | None, before: jax.Array | None) -> jax.Array | None:
        if x is None:
            return before
        was, now = (getattr(leaf, "dtype", None) for leaf in (before, x))
        if was == now or was is None or now is None:
            return x
        kinds = jnp.floating, jnp.complexfloating, jnp.integer
        alike = any(all(jnp.issubdtype(d, kind) for d in (was, now)) for kind in kinds)
        return narrow(x, was) if alike else x

    try:
        return maps.map_leaves(cast, new, old)
    except ValueError:
        return new
