"""The verbs: add updates to parameters, and the whole step from gradients on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from gradxform import _checks, _tree
from gradxform._gate import GatedTransformation


def apply_updates(params: optax.Params, updates: optax.Updates) -> optax.Params:
    r"""Adds updates to parameters.

    .. math:: w \leftarrow w + u

    Args:
      params: arrays of any shapes and dtypes.
      updates: a tree of the same structure and shapes; ``None`` leaves a parameter as
        it is, and :class:`IndexedSlices` change the rows that they hold.

    Returns:
      The new parameters, in the dtypes of ``params``; the sum is rounded once, from at
      least float32.

    Raises:
      TypeError: naming the first path at which structures or shapes differ, where
        ``optax.apply_updates`` would broadcast.

    Source: ``optax.apply_updates``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> params = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.array(3)}
    >>> params = gx.apply_updates(params, {"w": jnp.array([0.5, -2.0]), "frozen": None})
    >>> assert params["w"].tolist() == [1.5, 0.0] and params["frozen"] == 3
    """
    _checks.same_shapes("updates", updates, "params", params)

    def add(u: jax.Array, p: jax.Array) -> jax.Array:
        wide = _tree.widen(p)
        return (wide + _tree.widen(u).astype(wide.dtype)).astype(p.dtype)

    updates = _tree.sum_duplicates(updates)
    new = _tree.map_state(add, updates, _tree.rows(updates, params))
    return _tree.put_rows(updates, params, new)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra: Any,
) -> tuple[optax.Params, optax.OptState]:
    """The whole step: gradients through ``tx``, its updates onto the parameters.

    Equal to ``tx.update`` followed by :func:`apply_updates`. Where ``tx`` is a gate,
    such as :func:`drop_stale`, one conditional guards both together: a push that may
    not act costs next to nothing, and no copy of the model is made.

    Jit it and donate ``params`` and ``state``, in this order, to update them in place:
    JAX pairs donated buffers with results by shape and order, and the other order gives
    each the other's buffer, at the price of a copy of the model. Where a worker may
    still hold ``params``, do not donate them.

    Args:
      tx: any ``optax.GradientTransformation``.
      grads: gradients of the structure and shapes of ``params``; ``None`` leaves a
        parameter and its state as they are.
      state: the state of ``tx``.
      params: the parameters.
      **extra: extra arguments of ``tx``, such as ``local_step``.

    Returns:
      ``(params, state)``, dtypes and shapes as given.

    Raises:
      TypeError: naming the first path at which ``grads`` and ``params`` differ in
        structure or shape.
      ValueError: no leaf has a gradient.

    Source: ``tf.train.Optimizer.apply_gradients``.

    >>> import functools, gradxform as gx, jax, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(optax.sgd(0.1), max_staleness=0)
    >>> @functools.partial(jax.jit, donate_argnums=(0, 1))
    ... def push(params, state, grads, local_step):
    ...     return gx.apply_gradients(tx, grads, state, params, local_step=local_step)
    >>> params = {"w": jnp.array([1.0])}
    >>> state = tx.init(params)
    >>> grads = {"w": jnp.array([2.0])}
    >>> params, state = push(params, state, grads, 0)  # fresh
    >>> params, state = push(params, state, grads, 0)  # one step late
    >>> assert abs(params["w"][0] - 0.8) < 1e-6
    >>> assert gx.global_step(state) == 1 and state.stale_count == 1
    """
    _checks.same_shapes("grads", grads, "params", params)
    if not jax.tree.leaves(grads):
        raise ValueError(
            "grads has no gradient for any leaf of params; differentiate a loss that "
            "depends on at least one of them."
        )
    return _step(tx, grads, state, params, **extra)


def _step(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    **extra: Any,
) -> tuple[optax.Params, optax.OptState]:
    if isinstance(tx, GatedTransformation):  # Gates within gates guard one another.
        return tx.guard(_step, _rest, updates, state, params, **extra)
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(updates, state, params, **extra)
    return apply_updates(params, updates), state


def _rest(
    updates: optax.Updates, params: optax.Params, acted: Callable[[], Any]
) -> optax.Params:
    del updates, acted
    return params
