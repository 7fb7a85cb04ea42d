"""Gates: wrappers that decide, push by push, whether a gradient may act at all.

A gate is written once, as a `guard`: one conditional around "act" and "rest". The guard
leaves open what these two produce. In `update` acting gives updates, and resting gives
none; in `apply_gradients` acting gives new parameters, and resting gives the old ones.
So the whole step, update and apply, lies inside one conditional. A push that may not
act reads and writes no array of the model's size, as the conditional passes the buffers
through. If updates had to come out of it, it would copy them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import absent
from gradxform._trees import checks, constants, maps, versions
from gradxform._trees.indexed_slices import IndexedSlices

# (inner, updates, inner_state, params, **extra) -> (outcome, inner_state)
Act = Callable[..., tuple[Any, Any]]
# params -> outcome, None where there is none
Rest = Callable[[Any], Any]
# For leaves by their paths, whether they have a gradient, where only the step knows it.
LeafFlags = dict[str, jax.Array]


class Guard(Protocol):
    """The body of a gate; see :func:`gate`."""

    def __call__(
        self, act: Act, rest: Rest, updates: Any, state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        """Returns ``(outcome, state)``, the outcome from ``act`` or from ``rest``."""
        ...


@dataclasses.dataclass(unsafe_hash=True)
class _GatedUpdate:
    """An ``update`` that carries its gate, also into another transformation."""

    update: Callable[..., tuple[Any, Any]]
    guard: Guard

    def __post_init__(self) -> None:
        # Profilers and `jax.named_call` ask a function for its name.
        functools.update_wrapper(self, self.update)

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
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
        cls, init: Any, update: Any, guard: Guard | None = None
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
    update: Any = tx.update
    return update.guard if isinstance(update, _GatedUpdate) else None


def gate(init: optax.TransformInitFn, guard: Guard) -> GatedTransformation:
    """Makes a transformation from the body of a gate.

    Args:
      init: as in any ``GradientTransformation``.
      guard: ``guard(act, rest, updates, state, params, **extra)`` returns the outcome
        and the new state. If the push may act, it calls ``act(inner, updates,
        inner_state, params, **extra)``, which gives both. Otherwise it calls
        ``rest(params)``, which gives the outcome alone. :func:`either` is the
        conditional between the two. Inside of a sum it also gets ``leaf_flags``, see
        :func:`acted`.
    """
    versions.before_tracing()

    def act(
        inner: Any, updates: Any, inner_state: Any, params: Any, **extra: Any
    ) -> tuple[Any, Any]:
        if guard_of(inner) is not None:  # A gate knows leaves without a gradient.
            return inner.update(updates, inner_state, params, **extra)
        return absent.update(inner, updates, inner_state, params, **extra)

    def rest(params: Any) -> None:
        del params

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        return guard(act, rest, updates, state, params, **extra)

    return GatedTransformation(init, update_fn, guard)


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


def acted(
    act: Act,
    rest: Rest,
    inner: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    leaf_flags: LeafFlags | None,
    **extra: Any,
) -> tuple[Any, Any]:
    """``act``, where a leaf stays as it is if ``leaf_flags`` says it has no gradient.

    A sum knows only in its step which leaves have had a gradient, so it gives ``inner``
    zeros for the others. A gate inside gets ``leaf_flags``, and treats such a leaf like
    ``None``. From the result of any other transformation the leaf is left out.
    """
    extra = taken(inner, extra)
    if not leaf_flags:
        return act(inner, updates, state, params, **extra)
    if absent.gates(state):
        extra["leaf_flags"] = leaf_flags
    outcome, new_state = act(inner, updates, state, params, **extra)
    if guard_of(inner) is not None:
        return outcome, new_state
    flags = flags_of(updates, leaf_flags)
    if not absent.gates(state, "pushed"):  # The gradients of a sum may be older ones.
        outcome = chosen(flags, outcome, rest(params))
    like = updates if params is None else params
    return outcome, absent.keep(inner, flags, new_state, state, like)


def flags_of(updates: optax.Updates, leaf_flags: LeafFlags | None) -> Any:
    """A tree with what is known of each leaf; None if the leaf itself says it."""
    return jax.tree.map_with_path(
        lambda path, _: (leaf_flags or {}).get(jax.tree_util.keystr(path)),
        updates,
        is_leaf=maps.is_leaf,
    )


def holds(updates: optax.Updates, leaf_flags: LeafFlags | None) -> Any:
    """bool[leaves], which leaves have a gradient; in NumPy if the leaves say it."""
    leaves = jax.tree.leaves(updates, is_leaf=maps.is_leaf)
    holds = np.array(list(map(maps.has_gradient, leaves)), bool)
    if not leaf_flags:
        return holds
    flags = jax.tree.leaves(flags_of(updates, leaf_flags), is_leaf=maps.is_leaf)
    return holds & jnp.stack([jnp.array(True) if f is None else f for f in flags])


def chosen(flags: Any, new: Any, old: Any = None) -> Any:
    """The new leaves, but the old ones, or zeros, where a flag is False."""

    def choose(flag: Any, new: Any, *old: Any) -> Any:
        if flag is None or not maps.has_gradient(new):
            return new
        return jnp.where(flag, new, *old or (0,))

    trees = (flags, new) if old is None else (flags, new, old)
    return jax.tree.map(choose, *trees, is_leaf=maps.is_leaf)


def either(
    pred: jax.Array,
    acts: Callable[[], tuple[Any, Any]],
    rests: Callable[[], tuple[Any, Any]],
) -> tuple[Any, Any]:
    """``lax.cond(pred, acts, rests)`` with two sides that may differ in type.

    Both return ``(outcome, state)``. Resting returns the old values and so sets the
    types: parameters and state keep their dtypes and devices for gradients of any type.
    If resting gives None, as for updates, acting sets the type, and resting gives zeros
    of that type.
    """
    rested, before = _traced(rests)

    def acts_like() -> Any:
        return jax.tree.map(
            lambda old, new: _as_type(new, old) if maps.has_gradient(old) else new,
            before,
            acts(),
            is_leaf=maps.is_leaf,
        )

    if jax.config.jax_disable_jit and not isinstance(pred, jax.core.Tracer):
        # Nothing is traced, so whoever debugs `inner` sees its numbers.
        if pred:
            return acts_like()
        if before[0] is not None:
            return rests()
    acted, after = _traced(acts_like)

    def rests_like() -> Any:
        return jax.tree.map(
            lambda old, new: (
                _as_type(old, new) if maps.has_gradient(old) else _zeros(new)
            ),
            rested(),
            after,
            is_leaf=maps.is_leaf,
        )

    outcome: tuple[Any, Any] = jax.lax.cond(pred, acted, rests_like)
    return outcome


def _traced(f: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """Traces a function; returns a function that runs the trace, and the result types.

    ``jax.eval_shape`` knows neither shardings nor the axes over which arrays vary.
    """
    import jax.extend.core

    jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)()
    treedef, types = jax.tree.structure(shapes), jaxpr.out_avals

    def run() -> Any:
        leaves = jax.extend.core.jaxpr_as_fun(jaxpr)()
        # Constants come back as Python numbers.
        arrays = [
            jnp.asarray(x, t.dtype) if np.isscalar(x) else x
            for x, t in zip(leaves, types, strict=True)
        ]
        return jax.tree.unflatten(treedef, arrays)

    return run, jax.tree.unflatten(treedef, types)


def _as_type(x: jax.Array, like: Any) -> jax.Array:
    """``x`` with the dtype, the explicit sharding and the varying axes of a type."""
    if x.dtype != like.dtype:
        x = x.astype(like.dtype)
    if like.sharding.mesh.explicit_axes and jax.typeof(x).sharding != like.sharding:
        x = jax.sharding.reshard(x, like.sharding)
    varying = versions.varying_axes
    return versions.to_varying(x, varying(like) - varying(jax.typeof(x)))


def _zeros(types: Any) -> Any:
    """Updates of these types that change nothing."""

    def nothing(leaf: Any) -> Any:
        if not maps.has_gradient(leaf):
            return leaf
        if not isinstance(leaf, IndexedSlices):
            return constants.zeros_of_type(leaf)
        indices: Any = leaf.indices  # It is a type, and so are the values.
        values: Any = leaf.values
        padding = constants.zeros_of_type(indices) + np.int32(leaf.dense_shape[0])
        values = constants.zeros_of_type(values)
        return IndexedSlices(padding, values, leaf.dense_shape)

    return jax.tree.map(nothing, types, is_leaf=maps.is_leaf)


def taken(tx: optax.GradientTransformation, extra: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that ``tx.update`` takes.

    Most transformations ignore unknown ones; ``optax.contrib.sam`` does not.
    """
    parameters = inspect.signature(tx.update).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}


def states(state: optax.OptState, *fields: str) -> list[tuple[Any, Any]]:
    """The states of the outermost gates with these fields, and the paths to them."""
    wanted = {"global_step", "inner_state", *fields}

    def of_gate(node: Any) -> bool:
        return wanted <= {*getattr(type(node), "_fields", ())}

    leaves = jax.tree.leaves_with_path(state, is_leaf=of_gate)
    return [(path, node) for path, node in leaves if of_gate(node)]
