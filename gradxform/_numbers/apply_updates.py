"""Adds updates to parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._numbers import arithmetic
from gradxform._trees import maps
from gradxform._trees.types import Gradient, Leaf, Params, PyTree, SparseLeaf


def apply_updates(params: Params, updates: PyTree[Leaf]) -> Params:
    r"""Adds updates to parameters.

    .. math:: w \leftarrow w + u

    Args:
      params: arrays of any shapes and dtypes; ``None`` stays ``None``.
      updates: a tree of the same structure and shapes; ``None`` leaves a parameter as
        it is, and :class:`IndexedSlices` change the rows that they hold.

    Returns:
      The new parameters, in the dtypes of ``params``, and in the memory where each of
      them lies, if that is the host's; the sum is rounded once, from at
      least float32. Integer updates of integers are added as integers; other updates of
      integers are truncated first.

    Raises:
      TypeError: structures or shapes differ. The message names the first such path.
        (``optax.apply_updates`` would broadcast.)

    References:
      ``optax.apply_updates``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> params = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.array(3)}
    >>> gx.apply_updates(params, {"w": jnp.array([0.5, -2.0]), "frozen": None})["w"]
    Array([1.5, 0. ], dtype=float32)
    """

    def fits(u: Gradient, p: Leaf) -> bool:  # Without a parameter there is no sum.
        return p is None or structures.fits(u, p)

    structures.check_shapes("updates", updates, "params", params, fits)

    def add(u: Gradient, p: jax.typing.ArrayLike | None) -> Leaf:
        if p is None or not maps.has_gradient(u):
            return p
        u, w = host.to_device((u, jnp.asarray(p)))
        is_sparse = isinstance(u, SparseLeaf)  # It adds itself to the table.
        new = w + u if is_sparse else arithmetic.rounded_sum(jnp.asarray(u), w)
        return host.to_memory_of(new, p)

    new: Params = maps.map_leaves(add, updates, params)
    return new
