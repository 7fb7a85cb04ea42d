"""Gates: wrappers that decide, push by push, whether a gradient is applied at all.

A gate is a function that decides and runs nothing: it looks at a push and returns a
:class:`Decision`. Only this module runs one, in one conditional between "apply" and
"skip". In ``update`` apply gives updates, and skip gives none. In ``apply_gradients``
apply gives new parameters, and skip gives the old ones. So the whole step, update and
apply, lies inside one conditional. A skipped push reads and writes no array of the
model's size, as the conditional passes the buffers through. If updates had to come out
of it, it would copy them. So in ``update``, a step whose state has no arrays, as SGD's,
is computed with each push on TPU, and then chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, keywords, structures
from gradxform._devices import host
from gradxform._gates import missing
from gradxform._gates.conditional import By, typed_cond
from gradxform._gates.counters import counted
from gradxform._jax import versions
from gradxform._jax.compilers import in_hbm, narrow, zeros_unless
from gradxform._numbers.apply_updates import apply_updates
from gradxform._trees import maps, states
from gradxform._trees.extra_args import Words, words_of
from gradxform._trees.types import Leaf, PyTree

# What a push produces: updates or new parameters, None for the updates of a skip.
Outcome: TypeAlias = optax.Updates | optax.Params | None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a gate decides about a push.

    Attributes:
      applies: bool[], whether the transformation behind the gate runs.
      accepted: bool[], whether the push is not left out; also pushes that only enter a
        sum are accepted.
      updates: ``updates(buffers)`` returns what it then gets; called inside the
        conditional.
      state: the new state of the gate, but with the old ``inner_state`` and counters.
      extra: the extra arguments for the transformation behind the gate.
      buffers: like the updates; nobody needs their values after the step. So updates
        come out of the conditional in these arrays, where they fit, and need no others.
      settle: ``settle(state, applied, buffers)`` returns the state that is new after
        the step. ``applied`` is ``applies`` as it comes out of the conditional, and
        ``buffers`` come out of it, too.
      ordered: whether the step runs only if it is applied, as devices wait for each
        other in it, or ``settle`` writes into arrays that it reads. The compiler
        does not know that ``applies`` and ``applied`` are equal, so it computes with
        ``applied`` only after the step. By then the step has read its gradients, and
        their memory can be written in place.
    """

    applies: jax.Array
    accepted: jax.Array | Literal[True]
    updates: Callable[[optax.Updates | None], optax.Updates]
    state: optax.OptState
    extra: dict[str, object]
    buffers: optax.Updates | None = None
    settle: Callable[..., optax.OptState] = lambda state, applied, buffers: state
    ordered: bool = False


# (updates, state, **extra) -> decision
Decide: TypeAlias = Callable[..., Decision]


@dataclasses.dataclass(frozen=True)
class Gate:
    """The ``update`` of a gate, which says how it decides and what is behind it.

    A transformation is a pair of functions. So the gate survives if somebody takes the
    pair apart and makes it again, by ``jax.tree.unflatten`` or as a field of a module.

    Attributes:
      decide: what the gate does with a push.
      inner: the transformation behind the gate.
    """

    decide: Decide
    inner: optax.GradientTransformationExtraArgs

    def __post_init__(self) -> None:
        # Profilers, `jax.named_call` and other tools ask a function for these.
        scope, _, _ = self.decide.__qualname__.partition(".")
        vars(self).update(
            __name__="update_fn",
            __qualname__=f"{scope}.<locals>.update_fn",
            __module__=self.decide.__module__,
        )

    @property
    def words(self) -> Words:
        """The keywords that ``inner`` reads. The state of the gate says its own."""
        return words_of(self.inner)

    def update_fn(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        """As the ``update`` of any transformation."""
        keywords.check_slips(extra, self.words.names | states.words(state))
        updates = missing.normalized(updates, params)
        return _guarded(self, updates, state, params, extra, applies=False)

    __call__ = update_fn


def gate_of(tx: optax.GradientTransformation) -> Gate | None:
    """The gate of a transformation, if it is one."""
    return tx.update if isinstance(tx.update, Gate) else None


def gate(
    init: optax.TransformInitFn, inner: optax.GradientTransformation, decide: Decide
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation from what a gate decides about a push."""
    inner = arguments.transformation("inner", inner)
    versions.before_tracing()

    def init_fn(params: optax.Params) -> optax.OptState:  # As `Gate`.
        structures.check_leaves(params)
        return init(params)

    return optax.GradientTransformationExtraArgs(init_fn, Gate(decide, inner))


def step(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra: dict[str, object],
    *,
    applies: bool,
) -> tuple[Outcome, optax.OptState]:
    """What ``tx`` makes of normalized updates, and its new state.

    These are its updates, or the new parameters if ``applies``; then gates within gates
    guard the whole step, too. Leaves without a gradient stay.

    Raises:
      TypeError: the state is not one that ``init`` makes of these parameters. To find
        out, ``init`` is traced if the step fails, or gives a state of other shapes.
    """
    with structures.own_state(state, tx.init, params):
        if gate := gate_of(tx):
            return _guarded(gate, updates, state, params, extra, applies=applies)
        given, state = state, host.to_device_after(updates, tx.init, state)
        outcome, new = missing.update(tx, updates, state, params, **extra)
    if not structures.same_shapes(new, state):
        structures.check_own(state, tx.init, params)
    if applies:
        outcome, new = apply_updates(params, outcome), _as_before(new, state)
    return outcome, host.to_memory_of(new, given)


def inner_state(
    inner: optax.GradientTransformation, params: optax.Params
) -> optax.OptState:
    """The first state of ``inner``, for a gate that keeps one gradient a parameter.

    Raises:
      TypeError: ``optax.lookahead`` is inside, which takes gradients of half of them.
    """
    state = inner.init(params)
    structures.check_no_lookahead(
        params,
        state,
        "put it around this transformation, optax.lookahead(gradxform.accumulate(...), "
        "...). It passes on no extra arguments, so what needs one cannot be inside.",
    )
    return state


def _guarded(
    gate: Gate,
    updates: optax.Updates,
    state: Any,  # A named tuple with an `inner_state`.
    params: optax.Params | None,
    extra: dict[str, object],
    *,
    applies: bool,
) -> tuple[Outcome, optax.OptState]:
    """The step of a gate: one conditional, and the new state.

    The conditional is decided in one of three ways (:data:`By`):

    - "select": ``update`` of a state without arrays, as SGD's. On TPU the step is
      computed with each push, and its updates are chosen or not.
    - "number": ``update`` with ``buffers``, as of a sum. The updates come out of the
      conditional in these arrays, which a GPU would copy if a bool decided.
    - "bool": all else, so each ``apply_gradients``. The parameters come out in their
      own arrays.
    """
    # The step brings the state behind it.
    given, inner = state, state.inner_state
    state = host.to_device(state._replace(inner_state=()))._replace(inner_state=inner)
    decision = gate.decide(updates, state, **extra)
    before = decision.state.inner_state
    by: By = "bool"
    buffers = decision.buffers
    if not (applies or decision.ordered or any(map(jnp.ndim, jax.tree.leaves(before)))):
        by = "select"
    elif buffers is not None:
        by = "bool" if applies else "number"
        buffers = maps.map_leaves(_in_hbm, buffers)
    # New parameters take the arrays of the old ones, so they need no others.
    free = None if applies else buffers
    unchanged = params if applies else None

    def applied() -> tuple[Outcome, optax.Updates, optax.OptState, jax.Array]:
        given, extra = decision.updates(buffers), decision.extra
        outcome, new = step(gate.inner, given, before, params, extra, applies=applies)
        return *_put_into(free, outcome), new, jnp.array(True)

    def skipped() -> tuple[Outcome, optax.Updates, optax.OptState, jax.Array]:
        return unchanged, () if free is None else free, before, jnp.array(False)

    outcome, filled, new, done = typed_cond(decision.applies, applied, skipped, by)
    if free is not None:
        outcome, buffers = _taken_from(filled, outcome, done), filled
    state = counted(decision.state, decision.applies, decision.accepted)
    settled = decision.settle(state._replace(inner_state=new), done, buffers)
    return outcome, host.to_memory_of(settled, given)


def _in_hbm(x: Leaf) -> Leaf:
    """A sum that stays in HBM on TPU.

    By the count of v5e's compiler, with new parameters out of the conditional 0.03 N
    are kept then, and not 0.27 N, for a clip and AdamW in 12 dense layers. With
    ``skip_nonfinite`` around Adam it is 0.80 N instead of 1.05 N, but 9.0 N are moved
    instead of 7.5 N.
    """
    return in_hbm(x) if isinstance(x, jax.Array) else x


def _put_into(
    buffers: optax.Updates | None, updates: Outcome
) -> tuple[Outcome, optax.Updates]:
    """Moves updates into arrays that hold them exactly; an empty one marks each.

    Otherwise 1.00 N are kept instead of 0.11 N, by the count of the compiler for CPU,
    for SGD and Adam in 12 dense layers.
    """
    if buffers is None:
        return updates, ()  # None would be a leaf of a type that is not known yet.

    def moved(r: Leaf, u: Leaf) -> tuple[Leaf, Leaf]:
        if not (isinstance(r, jax.Array) and isinstance(u, jax.Array) and u.size):
            return u, r
        if u.shape != r.shape or not np.can_cast(u.dtype, r.dtype):
            return u, r
        return jnp.zeros(0, u.dtype), u.astype(r.dtype)

    return (
        maps.map_leaves(lambda r, u: moved(r, u)[0], buffers, updates),
        maps.map_leaves(lambda r, u: moved(r, u)[1], buffers, updates),
    )


def _taken_from(
    buffers: PyTree[jax.Array], rest: Outcome, applied: jax.Array
) -> optax.Updates:
    """The updates that :func:`_put_into` got; zeros if they were not applied."""

    def update(r: jax.Array, u: Leaf) -> Leaf:
        if not isinstance(u, jax.Array) or u.shape != (0,) or not r.size:
            return u
        return narrow(zeros_unless(applied, r), u.dtype)

    return maps.map_leaves(update, buffers, rest)


def _as_before(new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """A new state in the dtypes of the old one; a leaf that is None stays the old one.

    A leaf that has become complex keeps its dtype, and so does a tree of other nodes.
    """

    def cast(x: jax.Array | None, before: jax.Array | None) -> jax.Array | None:
        if x is None:
            return before
        was, now = (getattr(leaf, "dtype", None) for leaf in (before, x))
        if was == now or was is None or now is None:
            return x
        kinds = jnp.floating, jnp.complexfloating, jnp.integer
        alike = any(all(jnp.issubdtype(d, kind) for d in (was, now)) for kind in kinds)
        return narrow(x, was) if alike else x

    try:
        return maps.map_leaves(cast, new, old)
    except ValueError:
        return new
