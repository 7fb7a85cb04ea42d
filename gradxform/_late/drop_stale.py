"""Gradients that arrive late: drop them, make them smaller, or correct them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._late import gate
from gradxform._late.gate import Act, GatedTransformation, Rest
from gradxform._trees import checks, maps


class DropStaleState(NamedTuple):
    """State of :func:`drop_stale`.

    Attributes:
      global_step: int32[], updates accepted so far; saturates.
      stale_count: int32[], updates dropped so far; saturates.
      staleness: int32[], of the last update, accepted or not.
      inner_state: of the transformation behind the gate.
    """

    global_step: jax.Array
    stale_count: jax.Array
    staleness: jax.Array
    inner_state: optax.OptState


def drop_stale(
    inner: optax.GradientTransformation, max_staleness: jax.typing.ArrayLike
) -> GatedTransformation:
    r"""Drops gradients that were computed too many steps ago.

    .. math::

        staleness &= global\_step - local\_step \\
        fresh &\iff staleness \le max\_staleness

    Fresh: ``inner`` runs and ``global_step`` grows by 1. Stale: the updates are zero,
    the inner state comes back bit-identical, and ``stale_count`` grows by 1; whatever a
    stale gradient holds, NaN or inf, reaches nothing. A ``local_step`` ahead of
    ``global_step`` is fresh.

    Of a fresh gradient the updates are those of ``inner``, in the dtypes that it gives
    them. Its state keeps the types that ``init`` gave it, so that one conditional, or
    one ``scan``, holds every push: ``optax.adam`` of bfloat16 parameters keeps its
    bfloat16 moments, though float32 gradients alone would make them float32. Ask for
    ``mu_dtype="float32"`` where they shall be.

    ``inner`` receives ``local_step`` and ``staleness`` as extra arguments. After a
    push, ``state.staleness`` says how late it was; whatever ``inner`` keeps, a
    schedule's count or the norm before a clip, is still that of the last accepted one.

    Use :func:`apply_gradients` rather than ``update`` and ``apply_updates`` one by one:
    there one conditional guards the whole step, a stale push costs next to nothing and
    nothing is copied, while ``update`` alone must bring updates and state out of the
    conditional, which copies them.

    Args:
      inner: the transformation behind the gate, a whole optimizer as a rule.
      max_staleness: how many steps late a gradient may be, an integer ≥ 0, or inf:
        none is too late.

    Extra arguments of update:
      local_step: the global step that the worker saw **before** it computed these
        gradients, read together with the parameters: ``gx.global_step(state)``.

    Returns:
      A transformation with state :class:`DropStaleState`.

    Raises:
      ValueError: ``max_staleness`` is negative or NaN; a ``local_step`` that is no
        array is not in [0, 2³¹ - 1].
      TypeError: ``inner`` is no transformation; ``max_staleness`` is neither an integer
        nor inf; ``update`` is called without ``local_step``, or it is no integer.

    Source: ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=1)
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for local_step in (0, 0, 0):  # 0, 1 and 2 steps late
    ...     updates, state = tx.update(params + 1, state, params, local_step=local_step)
    ...     params = gx.apply_updates(params, updates)
    >>> assert params == -1.0  # -1, then 0 for the gradient at -1, then dropped
    >>> assert (state.global_step, state.stale_count, state.staleness) == (2, 1, 2)
    """
    checks.transformation("inner", inner)
    max_staleness = checks.in_range("max_staleness", max_staleness, "[0, inf]")
    if not isinstance(max_staleness, jax.core.Tracer) and max_staleness != np.inf:
        checks.integer_scalar("max_staleness", max_staleness)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> DropStaleState:
        # Three arrays, not one three times: a buffer can be donated only once.
        return DropStaleState(
            global_step=maps.zero(params, jnp.int32),
            stale_count=maps.zero(params, jnp.int32),
            staleness=maps.zero(params, jnp.int32),
            inner_state=inner.init(params),
        )

    def guard(
        act: Act,
        rest: Rest,
        updates: optax.Updates,
        state: DropStaleState,
        params: optax.Params | None,
        *,
        local_step: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[Any, DropStaleState]:
        local_step = checks.local_step("drop_stale", local_step)
        # staleness = global_step - local_step, of which the largest is int32's
        earliest = state.global_step - np.iinfo(np.int32).max
        staleness = state.global_step - jnp.maximum(local_step, earliest)

        def fresh() -> tuple[Any, DropStaleState]:
            # A gate inside this one judges by the same local_step.
            passed_on = {**extra, "local_step": local_step, "staleness": staleness}
            passed_on = gate.taken(inner, passed_on)
            outcome, inner_state = act(
                inner, updates, state.inner_state, params, **passed_on
            )
            global_step = optax.safe_increment(state.global_step)
            return outcome, state._replace(
                global_step=global_step, staleness=staleness, inner_state=inner_state
            )

        def stale() -> tuple[Any, DropStaleState]:
            stale_count = optax.safe_increment(state.stale_count)
            return rest(params), state._replace(
                stale_count=stale_count, staleness=staleness
            )

        # fresh iff staleness <= max_staleness
        return gate.either(_at_most(staleness, max_staleness), fresh, stale)

    return gate.gate(init_fn, guard)


def _at_most(staleness: jax.Array, limit: jax.typing.ArrayLike) -> jax.Array:
    if isinstance(limit, jax.Array) and jnp.issubdtype(limit.dtype, jnp.floating):
        return staleness.astype(jnp.float32) <= limit.astype(jnp.float32)  # inf
    return staleness <= maps.saturated(limit)


def scale_by_staleness(
    power: jax.typing.ArrayLike = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes late gradients smaller.

    .. math:: g \leftarrow g / \max(1, staleness)^{power}

    For the inside of :func:`drop_stale`, which hands ``staleness`` to it: as the last
    link of a chain it scales the step, as the first one the gradients, which
    normalizing transformations such as :func:`novograd` partly undo.

    Args:
      power: how fast the weight falls with staleness, ≥ 0; 0 changes nothing.

    Extra arguments of update:
      staleness: how many steps late these gradients are.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: ``power`` is negative or NaN.
      TypeError: ``update`` is called without ``staleness``.

    Source: Zhang et al., 2016, "Staleness-aware async-SGD for distributed deep
    learning", https://arxiv.org/abs/1511.05950.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.scale_by_staleness()
    >>> updates, _ = tx.update(jnp.array([4.0]), tx.init(None), staleness=4)
    >>> assert updates == 1.0
    """
    power = checks.in_range("power", power, "[0, inf)")

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        staleness: jax.typing.ArrayLike | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra
        if staleness is None:
            raise TypeError(
                "scale_by_staleness needs staleness: put it inside drop_stale, or pass "
                "update(..., staleness=s)."
            )

        # 1 / max(1, staleness)^power
        def weigh(g: jax.Array) -> jax.Array:
            dtype = maps.compute_dtype(g)
            lateness = jnp.maximum(1, jnp.asarray(staleness, dtype))
            return maps.scale(g, lateness ** -jnp.asarray(power, dtype))

        return maps.map_updates(weigh, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), update_fn
    )


def compensate_delay(
    variance_control: jax.typing.ArrayLike = 0.04,
) -> optax.GradientTransformationExtraArgs:
    r"""Corrects a late gradient for the way the parameters have gone meanwhile.

    .. math:: g \leftarrow g + \lambda \, g \odot g \odot (w - w_{worker})

    A first-order Taylor step from the worker's parameters to today's, with
    :math:`g \odot g` for the Hessian: DC-ASGD. ``update`` takes today's ``params``.

    Args:
      variance_control: :math:`\lambda` ≥ 0; 0 changes nothing. The default is the
        paper's. What it does goes with the square of the gradients: where they are
        small, as those of a mean over a minibatch, it takes far more to matter.

    Extra arguments of update:
      worker_params: the parameters at which the worker computed the gradient.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: ``variance_control`` is negative or NaN, or ``params`` is missing.
      TypeError: ``worker_params`` is missing, or a tree has another structure or shape.

    Source: Zheng et al., 2017, "Asynchronous stochastic gradient descent with delay
    compensation", https://arxiv.org/abs/1609.08326, equation 10 (DC-ASGD-c).

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.compensate_delay(variance_control=0.5)
    >>> grad, today, worker = jnp.array([2.0]), jnp.array([3.0]), jnp.array([2.0])
    >>> updates, _ = tx.update(grad, tx.init(today), today, worker_params=worker)
    >>> assert updates == 2.0 + 0.5 * 4.0 * 1.0
    """
    variance_control = checks.in_range("variance_control", variance_control, "[0, inf)")

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        worker_params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra
        if params is None:
            raise ValueError(
                "compensate_delay needs params: call update(updates, state, params)."
            )
        if worker_params is None:
            raise TypeError(
                "compensate_delay needs worker_params: pass update(..., "
                "worker_params=p), the parameters at which the worker computed these "
                "gradients."
            )
        checks.same_shapes("updates", updates, "params", params)
        checks.same_shapes("updates", updates, "worker_params", worker_params)

        def compensate(g: jax.Array, w: jax.Array, w_worker: jax.Array) -> jax.Array:
            # g + λ·g⊙g⊙(w - w_worker)
            wide = maps.widen(g)
            now, then = (
                maps.widen(jnp.asarray(x)).astype(wide.dtype) for x in (w, w_worker)
            )
            # λ and the distance come first: where either is 0, so is the product,
            # though g⊙g may overflow.
            correction = maps.scale(now - then, variance_control)
            for _ in range(2):
                correction = maps.scale(correction, jnp.abs(wide))
            return (wide + correction).astype(g.dtype)

        updates = maps.sum_duplicates(updates)
        now, then = (maps.rows(updates, tree) for tree in (params, worker_params))
        return maps.map_updates(compensate, updates, now, then), state

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), update_fn
    )


def global_step(state: optax.OptState) -> jax.Array:
    """The number of updates accepted so far, from a state at any depth.

    Args:
      state: a state that holds one of :func:`drop_stale`,
        :func:`conditional_accumulator` or :func:`accumulate`, inside ``optax.chain``,
        ``optax.inject_hyperparams`` or other wrappers as well. Of nested gates the
        outermost counts.

    Returns:
      int32 scalar, a copy, which stays valid when the state is donated to the next
      step.

    Raises:
      ValueError: the state holds no global step, or several side by side.

    Source: the argument ``global_step`` of ``tf.train.Optimizer.apply_gradients``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = optax.chain(gx.drop_stale(optax.adam(0.1), 2), optax.scale(0.5))
    >>> assert gx.global_step(tx.init(jnp.zeros(3))) == 0
    """
    return jnp.array(outermost(state, "global_step"), copy=True)


def staleness_fraction(state: optax.OptState) -> jax.Array:
    r"""TensorFlow's measure of how much arrived too late.

    .. math:: stale\_count / (global\_step + 1)

    Dropped updates against accepted ones, so it is no share of all and may exceed 1.

    Args:
      state: as for :func:`global_step`; to :func:`accumulate` alone nothing is late.

    Returns:
      float32 scalar.

    Raises:
      ValueError: as :func:`global_step`.

    Source: the summary "Gradient staleness percentage" of
    ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(1.0), max_staleness=0)
    >>> state = tx.init(jnp.zeros(3))
    >>> for local_step in (0, 0, 0, 1):
    ...     _, state = tx.update(jnp.ones(3), state, local_step=local_step)
    >>> assert abs(gx.staleness_fraction(state) - 2 / 3) < 1e-6
    """
    own = _outermost(state, "stale_count")
    return own.stale_count.astype(jnp.float32) / (
        own.global_step.astype(jnp.float32) + 1
    )


def outermost(state: optax.OptState, field: str) -> jax.Array:
    """A field of the gate's state that lies inside no other gate's with that field."""
    value: jax.Array = getattr(_outermost(state, field), field)
    return value


def dropped(state: optax.OptState) -> jax.Array:
    """How many pushes the outermost gate has left out, for whatever reason."""
    own = _outermost(state, "global_step")
    count: jax.Array
    count = own.stale_count if hasattr(own, "stale_count") else own.nonfinite_count
    return count


def _outermost(state: optax.OptState, field: str) -> Any:
    found = gate.states(state, field)
    if not found:
        raise ValueError(
            f"the state holds no {field}: wrap the transformation in drop_stale or "
            "conditional_accumulator."
        )
    if len(found) > 1:
        paths = ", ".join(f"{jax.tree_util.keystr(path)}.{field}" for path, _ in found)
        raise ValueError(f"the state holds several {field}, at {paths}: pass one part.")
    return found[0][1]
