"""Cautious updates: what points against the new gradient rests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, norms
from gradxform._numbers.norms import StackedAxes
from gradxform._rows import boundary
from gradxform._trees import dtypes, maps
from gradxform._trees.types import Gradient, Leaf

# The smallest mean that divides an update.
_LEAST = 1e-3

_NEEDS = "changes every row by a mean over all rows, so it takes dense gradients"


def cautious(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Drops those entries of an optimizer's update that point up the new gradient.

    With the update :math:`u` that ``inner`` would add to the parameters, for each layer

    .. math::

        \varphi &= [\,u \cdot g < 0\,] \quad\text{entry by entry} \\
        u &\leftarrow \frac{\varphi}{\max(mean(\varphi),\, 10^{-3})} \; u

    A momentum may still point where the new gradient no longer does. Such entries rest
    in this step, and the others take longer steps: twice as long if half of them rest.
    An entry whose gradient is 0 rests, too. The state of ``inner`` moves as always.

    A layer is a leaf, as in the authors' code. If a leaf stacks layers, name its axes
    in ``stacked_axes``: each layer then has a mean of its own, and
    ``minimize(layers=...)`` runs by layers. A mean over all layers needs
    ``two_passes=True`` there.

    Weight decay inside of ``inner`` is a part of ``u``. In the authors' AdamW it rests
    nowhere: ``optax.chain(cautious(optax.adam(rate)), optax.add_decayed_weights(-rate *
    weight_decay))``. A gate belongs around this wrapper: a sum of pushes inside of it
    would be compared with the last push alone.

    The gradient of a large table is 0 in most rows. So the mean is small there, and the
    other rows take up to 1,000 times longer steps, as in the authors' code. Give such a
    table another optimizer with ``optax.partition``.

    Args:
      inner: an optimizer, whose updates are added to the parameters, as ``optax.adam``.
        A link such as ``optax.scale_by_adam`` has updates of the other sign.
      axis_name: mesh axes over which layers may be sharded, inside ``jax.shard_map``,
        or a prefix tree of ``PartitionSpec``; see :func:`~gradxform.global_norm`.
      stacked_axes: how many leading axes of a leaf stack layers; see
        :func:`~gradxform.scale_by_novograd`.

    Returns:
      A transformation with the state of ``inner``, so that checkpoints of one go on
      with the other. Updates have the shapes and dtypes of the updates of ``inner``;
      the arithmetic is done in at least float32. Both parts of a complex entry count as
      entries. What ``inner`` returns for a leaf without a gradient stays as it is. NaN
      stays NaN, and an infinite update stays infinite or becomes NaN.

    Raises:
      ValueError: a leaf has fewer axes than ``stacked_axes``.
      TypeError: ``inner`` is no transformation; ``axis_name`` or ``stacked_axes`` does
        not fit the parameters; gradients are row-sparse; or the updates of ``inner`` do
        not have the structure or shapes of the gradients, as those of
        ``optax.lookahead``, which belongs around.

    References:
      Liang et al., `Cautious optimizers: improving training with one line of code
      <https://arxiv.org/abs/2411.16085>`__, 2024, and its authors' ``C-Optim``. The
      paper's divisor is a mean with 1 more entry; their AdamW has this one.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.contrib.cautious(optax.sgd(0.5, momentum=0.5))
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([4.0, 4.0]), state, params)
    >>> updates  # The first momentum is the gradient.
    Array([-2., -2.], dtype=float32)
    >>> updates, state = tx.update(jnp.array([4.0, -1.0]), state, params)
    >>> updates  # The momentum is 6 and 1. One of two rests, so the other doubles.
    Array([-6., -0.], dtype=float32)
    """
    inner = arguments.transformation("inner", inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        norms.check_stacked(stacked_axes, params)
        return inner.init(params)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        boundary.check_dense("cautious", updates, _NEEDS)
        structures.check_no_lookahead(params, state, "put lookahead around cautious.")
        gradients = maps.without_float0(updates)
        moved, state = inner.update(updates, state, params, **extra)
        structures.check_shapes(
            "inner's update", moved, "the gradient", gradients, _fit
        )
        shares = maps.map_leaves(
            lambda g, u: _share(g, u) if _are_there(g, u) else None, gradients, moved
        )
        means = norms.means(shares, axis_name=axis_name, stacked_axes=stacked_axes)
        # u ← φ / max(mean(φ), 1e-3) · u
        updates = maps.map_leaves(
            lambda g, u, mean: _rescaled(g, u, mean) if _are_there(g, u) else u,
            gradients,
            moved,
            means,
        )
        return updates, state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _fit(u: Gradient, g: Leaf) -> bool:
    """Whether an update has a gradient to be compared with, or none."""
    if not maps.has_gradient(g):
        return True
    same_kind = arguments.is_complex(u) == arguments.is_complex(g)
    return same_kind and structures.fits(u, g)


def _are_there(g: Leaf, u: Leaf) -> bool:
    return maps.has_gradient(g) and maps.has_gradient(u)


def _parts(x: jax.typing.ArrayLike) -> tuple[jax.Array, ...]:
    x = jnp.asarray(x)
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


def _masks(g: jax.typing.ArrayLike, u: jax.typing.ArrayLike) -> list[jax.Array]:
    """φ of each part of the entries."""
    # φ = [u·g < 0]. The product of two small numbers would be 0; that of signs is not.
    pairs = zip(_parts(g), _parts(u), strict=True)
    return [jnp.sign(a).astype(b.dtype) * jnp.sign(b) < 0 for a, b in pairs]


@jax.jit  # Traced once for each shape, not for each leaf.
def _share(g: jax.typing.ArrayLike, u: jax.typing.ArrayLike) -> jax.Array:
    """How much of each entry moves."""
    dtype = dtypes.compute_dtype(jnp.asarray(u))
    masks = [mask.astype(dtype) for mask in _masks(g, u)]
    return functools.reduce(jnp.add, masks) / len(masks)


@jax.jit
def _rescaled(
    g: jax.typing.ArrayLike, u: jax.typing.ArrayLike, mean: jax.Array
) -> jax.Array:
    factor = 1 / jnp.maximum(mean, _LEAST)

    def part(x: jax.Array, mask: jax.Array) -> jax.Array:
        # A product, not a choice: NaN stays NaN.
        return arithmetic.scale(
            x, mask.astype(mean.dtype) * arithmetic.expand(factor, x)
        )

    parts = map(part, _parts(u), _masks(g, u))
    return jax.lax.complex(*parts) if jnp.iscomplexobj(u) else next(parts)
