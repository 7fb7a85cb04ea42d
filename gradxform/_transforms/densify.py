"""Row-sparse gradients as dense ones, for links that must change every row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gradxform._trees import maps
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.rows import explicit_sharding
from gradxform._trees.types import Leaf


def densify() -> optax.GradientTransformationExtraArgs:
    r"""Turns row-sparse gradients into the dense ones they stand for.

    .. math:: G_r = \sum_{i:\ indices_i = r} values_i

    Put it in front of momentum, weight decay, :func:`novograd` and every other
    transformation that has to change each row at each step, touched or not. From there
    on the cost of a step depends on the table, not on the touched rows. :func:`lazy`
    runs such a transformation on the touched rows alone.

    Returns:
      A transformation without state. Dense gradients pass through.

    Source: ``tf.convert_to_tensor(indexed_slices)``, which TensorFlow calls by itself.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.densify(), optax.sgd(1.0, momentum=0.5))
    >>> params = jnp.zeros((3, 1))
    >>> state = tx.init(params)
    >>> grads = gx.IndexedSlices([2, 2], jnp.ones((2, 1)), (3, 1))
    >>> updates, state = tx.update(grads, state, params)
    >>> no_rows = gx.IndexedSlices([], jnp.ones((0, 1)), (3, 1))
    >>> updates, state = tx.update(no_rows, state, params)
    >>> assert updates.ravel().tolist() == [0.0, 0.0, -1.0]  # momentum goes on
    """

    def dense(g: Leaf, p: jax.typing.ArrayLike | None = None) -> Leaf:
        if not isinstance(g, IndexedSlices):
            return g
        known = p is not None
        return g.densify(
            out_sharding=explicit_sharding(jnp.asarray(p)) if known else None
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra
        like = () if params is None else (params,)
        updates = maps.without_float0(updates)
        return jax.tree.map(dense, updates, *like, is_leaf=maps.is_leaf), state

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), update_fn
    )
