"""Late gradients, corrected for how the parameters have moved meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._numbers import arithmetic
from gradxform._rows import boundary
from gradxform._trees import dtypes, maps
from gradxform._trees.links import stateless


def compensate_delay(
    variance_control: jax.typing.ArrayLike = 0.04,
) -> optax.GradientTransformationExtraArgs:
    r"""Corrects a late gradient for how the parameters have moved meanwhile.

    .. math:: g \leftarrow g + \lambda \, g \odot g \odot (w - w_{worker})

    This is DC-ASGD: a first-order Taylor step from the worker's parameters to the
    current ones, with :math:`g \odot g` instead of the Hessian. ``update`` needs
    the current ``params``.

    Args:
      variance_control: :math:`\lambda` ≥ 0; 0 changes nothing. The default is the
        paper's. Its effect grows with the square of the gradients: if they are small,
        as for a mean over a minibatch, only a far larger number has an effect.

    Extra arguments of update:
      worker_params: the parameters at which the worker computed the gradient. Where
        there is no gradient they are not looked at.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: ``variance_control`` is negative or NaN, or ``params`` is missing.
      TypeError: ``worker_params`` is missing, or a tree has another structure or shape.

    References:
      Zheng et al., `Asynchronous stochastic gradient descent with delay compensation
      <https://arxiv.org/abs/1609.08326>`__, 2017, equation 10 (DC-ASGD-c).

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.compensate_delay(variance_control=0.5)
    >>> grad, today, worker = jnp.array([2.0]), jnp.array([3.0]), jnp.array([2.0])
    >>> updates, _ = tx.update(grad, tx.init(today), today, worker_params=worker)
    >>> updates  # 2 + 0.5 · 2² · (3 - 2)
    Array([4.], dtype=float32)
    """
    variance_control = arguments.in_range(
        "variance_control", variance_control, "[0, inf)"
    )

    def corrected(
        updates: optax.Updates,
        *,
        params: optax.Params | None,
        worker_params: optax.Params | None = None,
        **_: object,
    ) -> optax.Updates:
        params = structures.params_given("compensate_delay", params)
        meaning = "the parameters at which the worker computed"
        worker_params = arguments.extra_argument(
            "compensate_delay", "worker_params", worker_params, meaning
        )
        structures.check_shapes("updates", updates, "params", params)
        worker_params = maps.masked_like(updates, worker_params)
        structures.check_shapes("updates", updates, "worker_params", worker_params)

        def compensate(
            g: jax.Array, w: jax.Array, w_worker: jax.Array
        ) -> tuple[jax.Array]:
            # g + λ·g⊙g⊙(w - w_worker)
            wide = dtypes.widen(g)
            now, then = (dtypes.widen(x).astype(wide.dtype) for x in (w, w_worker))
            # λ and the distance are multiplied first: if one of them is 0, the product
            # is 0, although g⊙g may overflow.
            correction = arithmetic.scale(now - then, variance_control)
            for _ in range(2):
                correction = arithmetic.scale(correction, jnp.abs(wide))
            return ((wide + correction).astype(g.dtype),)

        reads = params, worker_params
        (updates,) = boundary.map_step(compensate, updates, [], reads=reads)
        return updates

    return stateless(corrected)
