"""Late gradients, made smaller."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._numbers import arithmetic, lateness
from gradxform._trees import dtypes, maps
from gradxform._trees.links import stateless


def scale_by_staleness(
    power: jax.typing.ArrayLike = 1.0,
    *,
    weight: Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes late gradients smaller.

    .. math::

        g \leftarrow g \cdot weight(s), \quad s = \max(0, staleness),
        \quad weight(s) = \max(1, s)^{-power} \text{ by default}

    Put it inside :func:`drop_stale`, which hands ``staleness`` to it. As the last link
    of a chain it scales the step. As the first link it scales the gradients, and
    normalizing transformations such as :func:`novograd` partly undo that.

    Args:
      power: how fast the weight falls with staleness, ≥ 0; 0 changes nothing.
      weight: a function that takes the staleness, a traced int32 scalar, and returns
        the factor, a real scalar ≥ 0. If it is given, ``power`` is not read. A gradient
        ahead of its time has staleness 0 here. :ref:`The page on late gradients
        <weights>` has the published weights.

    Extra arguments of update:
      staleness: how many steps late these gradients are.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: ``power`` is negative or NaN, or ``weight`` gives such a number.
      TypeError: ``weight`` is not a function, or gives no real scalar; ``update`` is
        called without ``staleness``.

    References:
      Zhang et al., `Staleness-aware async-SGD for distributed deep learning
      <https://arxiv.org/abs/1511.05950>`__, 2016.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.scale_by_staleness()
    >>> tx.update(jnp.array([4.0]), tx.init(None), staleness=4)[0]  # 4 / 4
    Array([1.], dtype=float32)
    >>> tx = gx.scale_by_staleness(weight=lambda s: 1 / jnp.sqrt(1 + s))  # FedBuff's
    >>> tx.update(jnp.array([4.0]), tx.init(None), staleness=3)[0]  # 4 / √4
    Array([2.], dtype=float32)
    """
    power = arguments.in_range("power", power, "[0, inf)")
    lateness.check_weight(weight)

    def scaled(
        updates: optax.Updates,
        *,
        staleness: jax.typing.ArrayLike | None = None,
        **_: object,
    ) -> optax.Updates:
        if staleness is None:
            raise TypeError(
                "scale_by_staleness needs staleness: put it inside drop_stale, or pass "
                "update(..., staleness=s)."
            )
        arguments.check_scalar("staleness", staleness, integer=True)
        # s = max(0, staleness)
        s = jnp.maximum(0, dtypes.saturated(staleness))
        factor = None if weight is None else lateness.factor(weight, s)

        # g · weight(s), or g / max(1, s)^power
        def weigh(g: jax.Array) -> jax.Array:
            if factor is not None:
                return arithmetic.scale(g, factor)
            dtype = dtypes.compute_dtype(g)
            late = jnp.maximum(1, s.astype(dtype))
            return arithmetic.scale(g, late ** -jnp.asarray(power, dtype))

        return maps.map_updates(weigh, updates)

    return stateless(scaled)
