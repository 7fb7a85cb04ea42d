"""Norms for the log: of each leaf of the updates, or of each layer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, constants, norms
from gradxform._numbers.norms import StackedAxes
from gradxform._rows import boundary
from gradxform._trees import boxes, dtypes, maps
from gradxform._trees.links import stateful
from gradxform._trees.states import Mark
from gradxform._trees.types import Gradient, Leaf


@Mark(hints={"norms": "give measure_norms stacked_axes=1"})
class MeasureNormsState(NamedTuple):
    """State of :func:`measure_norms`.

    Attributes:
      norms: like params, float32[] for each leaf, or for each layer of a stacked one.
    """

    norms: optax.Updates


def measure_norms(
    *, axis_name: AxisName = None, stacked_axes: StackedAxes = None
) -> optax.GradientTransformationExtraArgs:
    r"""Measures the norm of each leaf of the updates, for a log.

    .. math:: norms_l = \lVert g_l \rVert = \sqrt{\textstyle\sum_i |g_{l,i}|^2}

    This link changes no update. It measures where it stands: in front of a clip the
    gradients, behind the optimizer its steps. Read the norms from the state:
    ``optax.tree.get(state, "norms")``; :func:`global_norm` of them is that of all. If
    a chain has several such links, ``optax.named_chain`` gives each of them a
    name, and ``optax.tree.get_all_with_path(state, "norms")`` finds all.

    In front of an optimizer it is one more pass over the gradients, and no copy of
    them. If a clip comes next, both take the same sums. Behind a clip or an optimizer
    a compiler may keep the updates that are measured: on CPU up to all of them.
    ``minimize(layers=...)`` takes it, without a second pass, if ``stacked_axes`` gives
    each layer a norm of its own. A norm of a whole stack needs ``two_passes``, and is
    refused behind a clip by the norm of all gradients.

    Args:
      axis_name: as in :func:`global_norm`.
      stacked_axes: how many leading axes of a leaf stack layers, as in
        :func:`scale_by_novograd`. Each slice then has a norm of its own.

    Returns:
      A transformation with state :class:`MeasureNormsState`. The squares are summed in
      at least float32; doubles have norms in float64. A leaf without a gradient keeps
      the norm that it had, at first 0. Repeated rows of a row-sparse gradient are
      summed before.

    Raises:
      TypeError: updates do not have the structure or shapes of the parameters;
        ``stacked_axes`` holds something other than ints.
      ValueError: a leaf has fewer axes than ``stacked_axes``.

    References:
      ``optax.tree.norm``, leaf by leaf.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.measure_norms(), gx.clip_by_global_norm(1.0))
    >>> grads = {"w": jnp.array([6.0, 8.0]), "b": jnp.zeros(3)}
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> optax.tree.get(state, "norms")
    {'b': Array(0., dtype=float32), 'w': Array(10., dtype=float32)}
    >>> tx = gx.measure_norms(stacked_axes={"w": 1, "b": 0})  # A stack of two layers.
    >>> tx.update(grads, tx.init(grads))[1].norms["w"]
    Array([6., 8.], dtype=float32)
    """

    def init_fn(params: optax.Params) -> MeasureNormsState:
        axes = norms.check_stacked(stacked_axes, params)

        def zeros(p: jax.Array, stacked: int) -> jax.Array:
            dtype = dtypes.compute_dtype(p)
            if not stacked:  # It may be all that the state has, so it says the devices.
                return constants.zero(p, dtype)
            return constants.full_like(p, 0, dtype, axes=stacked)

        params, axes = boxes.unboxed(params), boxes.unboxed(axes)
        return MeasureNormsState(maps.map_params(zeros, params, axes))

    def update_fn(
        updates: optax.Updates, state: MeasureNormsState
    ) -> tuple[optax.Updates, MeasureNormsState]:
        updates = boundary.summed_rows(updates)
        old = boxes.as_in(updates, state.norms)
        structures.check_shapes(
            "updates", updates, "norms", old, _fits, same_nodes=False
        )
        squares, _ = norms.squared_norms(
            norms.alone(updates), axis_name=axis_name, stacked_axes=stacked_axes
        )

        def norm(g: Leaf, square: jax.Array, old: jax.Array) -> Leaf:
            if not maps.has_gradient(g):
                return old
            new = arithmetic.safe_sqrt(square).astype(old.dtype)
            # The rows of a table are layers only if it is a stack of rows.
            return (
                boundary.scatter_rows(g, jnp.zeros_like(old), new) if old.ndim else new
            )

        trees = updates, squares, state.norms
        new = map(norm, *map(maps.leaves, trees))
        nodes = maps.structure(state.norms)
        return updates, MeasureNormsState(jax.tree.unflatten(nodes, new))

    return stateful(init_fn, update_fn)


def _fits(g: Gradient, norm: Leaf) -> bool:
    """Whether a gradient has the axes of its norms in front."""
    return maps.has_gradient(norm) and np.shape(g)[: np.ndim(norm)] == np.shape(norm)
