"""Gates: wrappers that decide, push by push, whether a gradient may act at all.

A gate is written once, as a `guard`: one conditional around "act" and "rest", without
saying what those two produce. `update` fills in updates and zeros; `apply_gradients`
fills in new parameters and the old ones. So the whole step, update and apply, lies
inside one conditional: a push that may not act reads and writes nothing of the model's
size, and the conditional hands buffers through instead of copying them, which it would
if updates had to come out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
import optax

from gradxform import _tree

# (inner, updates, inner_state, params, **extra) -> (outcome, inner_state)
Act = Callable[..., tuple[Any, Any]]
# (updates, params) -> outcome
Rest = Callable[[Any, Any], Any]


class Guard(Protocol):
    """The body of a gate; see :func:`gate`."""

    def __call__(
        self, act: Act, rest: Rest, updates: Any, state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Returns ``(outcome, state)``, the outcome from ``act`` or from ``rest``."""
        ...


class GatedTransformation(optax.GradientTransformationExtraArgs):
    """A ``GradientTransformation`` that can also run its whole step behind its gate."""

    guard: Guard

    def __new__(cls, init: Any, update: Any, guard: Guard) -> GatedTransformation:
        """An ordinary pair of functions to optax, with ``guard`` as an attribute."""
        self = super().__new__(cls, init, update)
        self.guard = guard
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.init, self.update, self.guard)


def gate(init: optax.TransformInitFn, guard: Guard) -> GatedTransformation:
    """Makes a transformation from the body of a gate.

    Args:
      init: as in any ``GradientTransformation``.
      guard: ``guard(act, rest, updates, state, params, **extra)`` returns the outcome
        and the new state. Where the push may act it calls ``act(inner, updates,
        inner_state, params, **extra)`` for both, else ``rest(updates, params)`` for
        the outcome alone.
    """

    def act(
        inner: Any, updates: Any, inner_state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        stepped, inner_state = inner.update(updates, inner_state, params, **extra)
        # Both sides of a conditional must agree in dtype.
        return _tree.cast_like(stepped, updates), inner_state

    def rest(updates: Any, params: Any) -> Any:
        del params
        return _tree.map_updates(jnp.zeros_like, updates)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return guard(act, rest, updates, state, params, **extra)

    return GatedTransformation(init, update_fn, guard)
