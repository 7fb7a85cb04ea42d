"""Row-sparse gradients as dense ones, for links that must change every row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gradxform._rows.indexed_slices import is_sparse
from gradxform._rows.rows import explicit_sharding
from gradxform._trees import maps
from gradxform._trees.links import stateless
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

    References:
      ``tf.convert_to_tensor(indexed_slices)``, which TensorFlow calls by itself.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.densify(), optax.sgd(1.0, momentum=0.5))
    >>> params = jnp.zeros((3, 1))
    >>> state = tx.init(params)
    >>> grads = gx.IndexedSlices([2, 2], jnp.ones((2, 1)), (3, 1))
    >>> updates, state = tx.update(grads, state, params)
    >>> no_rows = gx.IndexedSlices([], jnp.ones((0, 1)), (3, 1))
    >>> updates, state = tx.update(no_rows, state, params)
    >>> updates.ravel()  # The momentum goes on.
    Array([-0., -0., -1.], dtype=float32)
    """

    def dense(g: Leaf, p: jax.typing.ArrayLike | None = None) -> Leaf:
        if not is_sparse(g):
            return g
        sharding = None if p is None else explicit_sharding(jnp.asarray(p))
        return g.densify(out_sharding=sharding)

    def densified(
        updates: optax.Updates, *, params: optax.Params | None, **_: object
    ) -> optax.Updates:
        like = () if params is None else (params,)
        return maps.map_leaves(dense, maps.without_float0(updates), *like)

    return stateless(densified)
