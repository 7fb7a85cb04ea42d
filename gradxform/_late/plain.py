"""One whole step of a transformation that is no gate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradxform._late import missing
from gradxform._rows.indexed_slices import RowSparseError, is_sparse
from gradxform._trees import maps
from gradxform._trees.apply_updates import apply_updates
from gradxform._trees.compilers import narrow
from gradxform._trees.types import Leaf


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

    def traced(kind: Callable[[Leaf], Leaf]) -> bool:
        given = maps.map_leaves(kind, updates)
        try:
            return bool(
                jax.eval_shape(
                    lambda: missing.update(tx, given, state, params, **extra)
                )
            )
        except Exception:
            return False

    try:
        changes, after = missing.update(tx, updates, state, params, **extra)
    except Exception as error:
        if isinstance(error, RowSparseError) or not any(
            map(is_sparse, maps.leaves(updates))
        ):
            raise
        # A trace computes no values, and tells whether row-sparse gradients alone
        # make it fail.
        if not traced(lambda g: g) and traced(
            lambda g: g.densify() if is_sparse(g) else g
        ):
            raise RowSparseError from error
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
