"""A step size for each worker, for workers that push at different rates."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._numbers import arithmetic, workers
from gradxform._trees import dtypes, maps
from gradxform._trees.links import stateless


def scale_by_worker(
    factors: jax.typing.ArrayLike | Sequence[float],
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies what a worker pushes by the worker's own factor.

    .. math:: g \leftarrow factors_i \cdot g \quad\text{for a push of worker } i

    A worker that pushes twice as often moves the parameters twice as much. If the
    workers' data differ, training drifts towards the data of the fast ones. **Rescaled
    ASGD** evens this out: each worker's factor is proportional to the seconds that one
    of its gradients takes. No worker waits, and nothing is dropped. Divide the seconds
    by their mean, so that the learning rate keeps its meaning.

    As the last link of a chain it scales the step. As the first link it scales the
    gradients, and normalizing transformations such as ``optax.adam`` partly undo that.

    Args:
      factors: one real number ≥ 0 for each worker, [n].

    Extra arguments of update:
      worker: the worker that computed the gradient, an integer in [0, n). An
        :doc:`engine </engines>` passes it. If a traced one is outside of that,
        the factor is 0.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: a factor is negative, NaN, or not finite in float32; ``factors`` is
        not one row of numbers; a ``worker`` that is no array is not in [0, n).
      TypeError: ``factors`` holds no real numbers; ``update`` is called without
        ``worker``, or it is no integer.

    References:
      Mahran et al., `Rescaled asynchronous SGD <https://arxiv.org/abs/2605.13434>`__,
      2026.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.5), gx.contrib.scale_by_worker([0.5, 1.5]))
    >>> state = tx.init(None)
    >>> for worker in (0, 1):  # Worker 1 takes three times as long.
    ...     print(tx.update(jnp.array([4.0]), state, worker=worker)[0])
    [-1.]
    [-3.]
    """
    rates = _checked(factors)
    n = rates.shape[0]

    def scaled(
        updates: optax.Updates,
        *,
        worker: jax.typing.ArrayLike | None = None,
        **_: object,
    ) -> optax.Updates:
        is_member, row = workers.row_of("scale_by_worker", worker, n)

        # factors_i g
        def scale(g: jax.Array) -> jax.Array:
            factor = jnp.asarray(rates, dtypes.compute_dtype(g))[row]
            return arithmetic.scale(g, jnp.where(is_member, factor, 0))

        return maps.map_updates(scale, updates)

    return stateless(scaled)


def _checked(
    factors: jax.typing.ArrayLike | Sequence[float],
) -> jax.Array | np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The factors as an array; the numbers of a traced one are not known."""
    array = factors if isinstance(factors, jax.Array) else np.asarray(factors)
    if not arguments.is_real(array):
        raise TypeError(f"factors must hold real numbers, got {factors!r}.")
    if array.ndim != 1 or not array.size:
        raise ValueError(
            "factors must have one number for each worker, [n], got the shape "
            f"{list(array.shape)}."
        )
    if not isinstance(array, jax.core.Tracer):
        for i, factor in enumerate(array):
            arguments.in_range(f"factors[{i}]", factor, "[0, inf)")
    return arguments.to_end(array, 0.0, np.inf)
