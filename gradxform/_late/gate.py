"""Gates: wrappers that decide, push by push, whether a gradient is applied at all.

A gate is written once, as a function of a push. It says when ``inner`` runs, and
:class:`ApplyIf` is the one conditional between "apply" and "skip". The caller
decides what each branch returns. In `update` apply gives updates, and skip gives none;
in `apply_gradients` apply gives new parameters, and skip gives the old ones. So the
whole step, update and apply, lies inside one conditional. A skipped push reads and
writes no array of the model's size, as the conditional passes the buffers through. If
updates had to come out of it, it would copy them. So in `update`, a step whose state
has no arrays, as SGD's, is computed with each push on TPU, and then chosen or not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import missing
from gradxform._late.conditional import Decision, typed_cond
from gradxform._late.counters import has_gate
from gradxform._late.missing import LeafFlags
from gradxform._trees import checks, maps, versions
from gradxform._trees.compilers import narrow, where
from gradxform._trees.extra_args import accepted_kwargs
from gradxform._trees.types import Leaf, PyTree

# What a push produces: updates or new parameters, None for the updates of a skip.
Outcome: TypeAlias = optax.Updates | optax.Params | None
# params -> outcome
Skip: TypeAlias = Callable[[optax.Params | None], Outcome]
# (inner, updates, inner_state, params, **extra) -> (outcome, inner_state)
Apply: TypeAlias = Callable[..., tuple[Outcome, optax.OptState]]
# (apply_if, updates, state, params, **extra) -> (outcome, state)
Push: TypeAlias = Callable[..., tuple[Outcome, optax.OptState]]
# A whole step behind a gate; the outcome is that of `apply` or of `skip`:
# (apply, skip, updates, state, params, **extra) -> (outcome, state)
Guard: TypeAlias = Callable[..., tuple[Outcome, optax.OptState]]
# outcome, room, inner_state, whether it was applied
_Applied: TypeAlias = tuple[Outcome, optax.Updates | None, optax.OptState, jax.Array]


@dataclasses.dataclass(frozen=True)
class ApplyIf:
    """The conditional of a gate: applies updates through ``inner`` if ``pred``.

    Attributes:
      apply: what a push does that is applied, and ``skip`` what another one does.
      inner: the transformation behind the gate.
      params: the parameters, or None.
      ordered: see :func:`gate`.
    """

    apply: Apply
    skip: Skip
    inner: optax.GradientTransformation
    params: optax.Params | None
    ordered: bool

    def selects(self, inner_state: optax.OptState) -> bool:
        """Whether updates are computed in any case on TPU, and then chosen or not.

        Updates that come out of a conditional need arrays of their own, and are added
        in a kernel of their own. But it is a conditional that skips arrays of state.
        """
        has_arrays = any(map(jnp.ndim, jax.tree.leaves(inner_state)))
        return self.skip(self.params) is None and not has_arrays and not self.ordered

    def __call__(
        self,
        pred: jax.Array,
        updates: Callable[[], optax.Updates],
        inner_state: optax.OptState,
        leaf_flags: LeafFlags | None,
        room: optax.Updates | None = None,
        /,
        **extra: object,
    ) -> tuple[Outcome, optax.OptState, jax.Array, optax.Updates | None]:
        """Returns ``(outcome, inner_state, applied, room)``.

        ``updates`` is called inside the conditional. ``applied`` is ``pred`` as it
        comes out of it. The compiler does not know that they are equal, so it computes
        with ``applied`` only after the step. By then the step has read its gradients,
        and their memory can be written in place. This needs an ``ordered`` gate.

        ``room`` is like the updates; nobody needs its values after the step. So updates
        come out of the conditional in its arrays, where they fit, and need no others.
        """
        apply, skip, inner, params = self.apply, self.skip, self.inner, self.params
        # New parameters take the arrays of the old ones, so they need no room.
        free = room if skip(params) is None else None

        def applied() -> _Applied:
            outcome, new_state = _apply(
                *(apply, skip, inner, updates(), inner_state, params, leaf_flags),
                **extra,
            )
            return *_put_into(free, outcome), new_state, jnp.array(True)

        def skipped() -> _Applied:
            unused = () if free is None else free
            return skip(params), unused, inner_state, jnp.array(False)

        by: Decision = "bool" if free is None else "number"
        if self.selects(inner_state):
            by = "select"
        rest, filled, state, done = typed_cond(pred, applied, skipped, by)
        if free is None:
            return rest, state, done, room
        return _taken_from(filled, rest, done), state, done, filled


@dataclasses.dataclass(unsafe_hash=True)
class _GatedUpdate:
    """An ``update`` that carries its gate, also into another transformation."""

    update: optax.TransformUpdateExtraArgsFn
    guard: Guard

    def __post_init__(self) -> None:
        # Profilers and `jax.named_call` ask a function for its name.
        functools.update_wrapper(self, self.update)

    def __call__(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        return self.update(updates, state, params, **extra)


class GatedTransformation(optax.GradientTransformationExtraArgs):
    """A ``GradientTransformation`` that can also run its whole step behind its gate.

    Like any transformation it is a pair of functions, and ``update`` carries the gate.
    So the gate survives if the pair is rebuilt from them, by ``jax.tree.unflatten`` or
    as a field of a module.

    Attributes:
      init: as in any ``GradientTransformation``.
      update: as in any ``GradientTransformationExtraArgs``.
      guard: the gate, for :func:`apply_gradients`; None if ``update`` has none.
    """

    def __new__(
        cls,
        init: optax.TransformInitFn,
        update: optax.TransformUpdateExtraArgsFn,
        guard: Guard | None = None,
    ) -> GatedTransformation:
        """A pair of ``init`` and ``update``; attaches ``guard`` if it is given."""
        if guard is not None:
            update = _GatedUpdate(update, guard)
        return super().__new__(cls, init, update)

    @property
    def guard(self) -> Guard | None:
        """The gate that came with ``update``."""
        return guard_of(self)


def guard_of(tx: optax.GradientTransformation) -> Guard | None:
    """The gate of a transformation, if it is one."""
    return tx.update.guard if isinstance(tx.update, _GatedUpdate) else None


def gate(
    init: optax.TransformInitFn,
    inner: optax.GradientTransformation,
    push: Push,
    *,
    ordered: bool = False,
) -> GatedTransformation:
    """Makes a transformation from what a gate does with a push.

    Args:
      init: as in any ``GradientTransformation``.
      inner: the transformation behind the gate.
      push: ``push(apply_if, updates, state, params, **extra)`` returns the outcome and
        the new state. It calls ``apply_if``, see :class:`ApplyIf`, which gives both the
        outcome and the new state of ``inner``. Inside of a sum it also gets
        ``leaf_flags``, see ``missing``.
      ordered: whether ``push`` writes into arrays that the step reads, and so needs the
        order of ``applied``, see :class:`ApplyIf`.
    """
    versions.before_tracing()
    inner = optax.with_extra_args_support(inner)

    def guard(
        apply: Apply,
        skip: Skip,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        /,
        **extra: object,
    ) -> tuple[Outcome, optax.OptState]:
        apply_if = ApplyIf(apply, skip, inner, params, ordered)
        return push(apply_if, updates, state, params, **extra)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        return guard(_update, lambda _: None, updates, state, params, **extra)

    return GatedTransformation(init, update_fn, guard)


def _update(
    inner: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    **extra: object,
) -> tuple[optax.Updates, optax.OptState]:
    if guard_of(inner) is not None:  # A gate knows leaves without a gradient.
        return inner.update(updates, state, params, **extra)
    return missing.update(inner, updates, state, params, **extra)


def inner_state(
    inner: optax.GradientTransformation, params: optax.Params
) -> optax.OptState:
    """The first state of ``inner``, for a gate with room for one gradient a parameter.

    Raises:
      TypeError: ``optax.lookahead`` is inside, which takes gradients of half of them.
    """
    state = inner.init(params)
    checks.no_lookahead(
        params,
        state,
        "put it around this transformation, optax.lookahead(gradxform.accumulate(...), "
        "...). It passes on no extra arguments, so what needs one cannot be inside.",
    )
    return state


def _apply(
    apply: Apply,
    skip: Skip,
    inner: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    leaf_flags: LeafFlags | None,
    /,
    **extra: object,
) -> tuple[Outcome, optax.OptState]:
    """``apply``, but skips leaves without a gradient, as ``leaf_flags`` says it."""
    extra = accepted_kwargs(inner, extra)
    if not leaf_flags:
        return apply(inner, updates, state, params, **extra)
    if has_gate(state):
        extra["leaf_flags"] = leaf_flags
    outcome, new_state = apply(inner, updates, state, params, **extra)
    if guard_of(inner) is not None:
        return outcome, new_state
    flags = missing.flags_of(updates, leaf_flags)
    if not has_gate(state, "pushed"):  # The gradients of a sum may be older ones.
        outcome = missing.chosen(flags, outcome, skip(params))
    like = updates if params is None else params
    return outcome, missing.keep(inner, flags, new_state, state, like)


def _put_into(
    room: optax.Updates | None, updates: Outcome
) -> tuple[Outcome, optax.Updates | None]:
    """Moves updates into arrays that hold them exactly; an empty one marks each."""
    if room is None:
        return updates, ()  # None would be a leaf of a type that is not known yet.

    def moved(r: Leaf, u: Leaf) -> tuple[Leaf, Leaf]:
        if not (isinstance(r, jax.Array) and isinstance(u, jax.Array) and u.size):
            return u, r
        if u.shape != r.shape or not np.can_cast(u.dtype, r.dtype):
            return u, r
        return jnp.zeros(0, u.dtype), u.astype(r.dtype)

    return (
        maps.map_leaves(lambda r, u: moved(r, u)[0], room, updates),
        maps.map_leaves(lambda r, u: moved(r, u)[1], room, updates),
    )


def _taken_from(
    room: PyTree[jax.Array], rest: Outcome, applied: jax.Array
) -> optax.Updates:
    """The updates that :func:`_put_into` got; zeros if they were not applied."""

    def update(r: jax.Array, u: Leaf) -> Leaf:
        if not isinstance(u, jax.Array) or u.shape != (0,) or not r.size:
            return u
        return narrow(where(applied, r), u.dtype)

    return maps.map_leaves(update, room, rest)
