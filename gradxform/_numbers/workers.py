"""Which worker has pushed: the extra argument ``worker`` of ``update``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from gradxform._checks import arguments
from gradxform._trees import dtypes


def row_of(
    name: str, worker: jax.typing.ArrayLike | None, n: int
) -> tuple[jax.Array, jax.Array]:
    """Whether a worker is one of the ``n``, and its row among them.

    Raises:
      TypeError: ``worker`` is missing, or no integer.
      ValueError: it is no array, and not in [0, n).
    """
    meaning = "the index of the worker that computed"
    worker = arguments.extra_argument(name, "worker", worker, meaning)
    arguments.check_scalar("worker", worker, integer=True)
    if not isinstance(worker, jax.Array):
        arguments.in_range("worker", worker, f"[0, {n})")
    i = dtypes.saturated(worker)
    return (i >= 0) & (i < n), jnp.clip(i, 0, n - 1)
