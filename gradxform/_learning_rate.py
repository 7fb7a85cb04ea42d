"""The last link of every alias: updates times minus the learning rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform import _tree


def scale_by_learning_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """``u ← -learning_rate · u``, as ``optax.scale_by_learning_rate`` and its states.

    Unlike optax's it multiplies in at least float32 and keeps the dtype of each leaf
    where the rate is a traced float32 scalar and the leaf is half precision.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar`` of the 0-based count
        of updates so far.
    """
    if not callable(learning_rate):
        return optax.GradientTransformation(
            lambda _: optax.EmptyState(),
            lambda updates, state, params=None: (
                _descend(updates, learning_rate),
                state,
            ),
        )

    def init_fn(params: optax.Params) -> optax.ScaleByScheduleState:
        del params
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: optax.ScaleByScheduleState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        del params
        updates = _descend(updates, learning_rate(state.count))
        count = optax.safe_increment(state.count)
        return updates, optax.ScaleByScheduleState(count=count)

    return optax.GradientTransformation(init_fn, update_fn)


def _descend(updates: Any, learning_rate: jax.typing.ArrayLike) -> Any:
    descent = -jnp.asarray(learning_rate)
    return _tree.map_updates(lambda u: _tree.scale(u, descent), updates)
