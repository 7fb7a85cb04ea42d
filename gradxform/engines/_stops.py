"""When a gradient under way is cancelled because it has become too late."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._trees import checks


class GivenUpError(Exception):
    """The gradient became too late while it was computed, and was not pushed."""


class Stops:
    """How late a gradient under way may become: ``Job.max_staleness``."""

    def __init__(
        self, max_staleness: jax.typing.ArrayLike | optax.Schedule | None
    ) -> None:
        if max_staleness is not None and not callable(max_staleness):
            checks.in_range("max_staleness", max_staleness, "[0, inf]")
        self._max_staleness = max_staleness
        # As in `drop_stale`, the schedule calculates with JAX. All workers ask for the
        # same step, so its limit is kept.
        self._at = functools.lru_cache(maxsize=1)(self._limit)

    def __reduce__(self) -> tuple[type[Stops], tuple[object]]:
        return Stops, (self._max_staleness,)

    @property
    def ends(self) -> bool:
        """Whether any gradient is ever cancelled."""
        return self._max_staleness is not None

    def is_over(self, global_step: int, local_step: int) -> bool:
        """Whether a gradient with this local step is too late at this global step."""
        return self.ends and global_step - local_step > self._at(int(global_step))

    def _limit(self, global_step: int) -> float:
        limit: Any = self._max_staleness  # Checked to be a number, or a schedule.
        with jax.transfer_guard("allow"):
            if callable(limit):
                step = jnp.asarray(min(global_step, np.iinfo(np.int32).max), jnp.int32)
                limit = checks.scheduled("max_staleness", limit, step, "[0, inf]")
            number = float(limit)
        return number if math.isinf(number) else math.floor(number)


def in_pieces(given: object, is_over: Callable[[], bool]) -> object:
    """The result of a gradient function; a generator is run piece by piece.

    Raises:
      GivenUpError: after one of the pieces, ``is_over`` said so.
    """
    if not isinstance(given, types.GeneratorType):
        return given
    try:
        while True:
            next(given)
            if is_over():
                raise GivenUpError
    except StopIteration as end:
        return end.value
    finally:
        given.close()
