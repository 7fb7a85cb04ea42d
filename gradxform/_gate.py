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

import jax
import jax.numpy as jnp
import optax

from gradxform import _tree
from gradxform._indexed_slices import IndexedSlices

# (inner, updates, inner_state, params, **extra) -> (outcome, inner_state)
Act = Callable[..., tuple[Any, Any]]
# (updates, params, what would come out otherwise) -> outcome
Rest = Callable[[Any, Any, Callable[[], Any]], Any]


class Guard(Protocol):
    """The body of a gate; see :func:`gate`."""

    def __call__(
        self, act: Act, rest: Rest, updates: Any, state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Returns ``(outcome, state)``, the outcome from ``act`` or from ``rest``."""
        ...


class GatedTransformation(optax.GradientTransformationExtraArgs):
    """A ``GradientTransformation`` that can also run its whole step behind its gate.

    Attributes:
      init: as in any ``GradientTransformation``.
      update: as in any ``GradientTransformationExtraArgs``.
      guard: the gate, for :func:`apply_gradients`.
    """

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
        inner_state, params, **extra)`` for both, else ``rest(updates, params,
        acted)`` for the outcome alone, ``acted`` being the other side of the
        conditional, whose outcome it must resemble.
    """

    def act(
        inner: Any, updates: Any, inner_state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        stepped, inner_state = inner.update(updates, inner_state, params, **extra)
        # Both sides of a conditional must agree in dtype.
        return _tree.cast_like(stepped, updates), inner_state

    def rest(updates: Any, params: Any, acted: Callable[[], Any]) -> Any:
        del params
        zeros = _tree.map_updates(jnp.zeros_like, updates)
        leaves = jax.tree.leaves(zeros, is_leaf=_tree.is_leaf)
        if not any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            return zeros
        # What is row-sparse may come out dense, where inner densifies it.
        outcome, _ = jax.eval_shape(acted)
        return jax.tree.map(_dense_where, zeros, outcome, is_leaf=_tree.is_leaf)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return guard(act, rest, updates, state, params, **extra)

    return GatedTransformation(init, update_fn, guard)


def _dense_where(zero: Any, other: Any) -> Any:
    if isinstance(zero, IndexedSlices) and not isinstance(other, IndexedSlices):
        return zero.densify()
    return zero
