"""Gradients that JAX's backward pass adds to a sum by itself.

The backward pass of a ``scan`` puts the gradients of all layers into one array, 1 N. If
it gets the sum of a gate, it adds each layer's gradient there as soon as it is known,
and that array does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._late.gate import gate_of
from gradxform._late.sums import as_weight
from gradxform._trees import constants, jaxprs, maps, versions
from gradxform._trees.compilers import where
from gradxform._trees.types import PyTree


def value_and_sums(
    loss_fn: Callable[..., Any],
    params: optax.Params,
    batch: tuple[object, ...],
    tx: optax.GradientTransformation,
    state: optax.OptState,
    weight: jax.typing.ArrayLike | None,
    *,
    has_aux: bool,
) -> tuple[Any, optax.Updates, PyTree[bool]] | None:
    """The loss and its gradients. Some are in the sum of a gate already.

    The first two are as from ``jax.value_and_grad``, but all gradients are times
    ``weight``. Where the third is True, the gradient is the sum of the gate ``tx`` with
    the gradient in it. None if nothing can be added: by this version of JAX, to this
    gate, for these parameters.
    """
    gate = gate_of(tx)
    if gate is None or gate.sums is None or not versions.adds_in_backward_pass():
        return None
    leaves = jax.tree.leaves(params)
    structure: Any = jax.tree.structure(params)
    found = gate.sums(state)
    if found is None or not all(map(_is_dense, leaves)):
        return None
    sums, begun = maps.leaves(found[0]), found[1]
    if len(sums) != len(maps.leaves(params)):  # A later check names the difference.
        return None

    def loss(*leaves: jax.Array) -> Any:  # As `loss_fn`.
        return loss_fn(structure.unflatten(leaves), *batch)

    linearize: Any = jax.vjp  # Its types know no `has_aux` that is a variable.
    value, backward, *aux = linearize(loss, *leaves, has_aux=has_aux)
    if not _is_dense(value):  # Whoever computes the gradients says why not.
        return None
    if not hasattr(backward, "jaxpr"):  # It is not in JAX's public API.
        return None
    # The numbers of these leaves among those of the gate.
    places = [i for i, p in enumerate(maps.leaves(params)) if p is not None]
    scanned = jaxprs.scanned(backward.jaxpr)[-len(leaves) :]
    adds = [
        once and p.size > 0 and jax.typeof(sums[i]) == jax.typeof(p)
        for once, p, i in zip(scanned, leaves, places, strict=True)
    ]
    if not any(adds) or not all(map(_is_on_device, jax.tree.leaves(backward))):
        return None
    # A weight would be rounded to the dtype of the loss, or change a rule of
    # `custom_vjp` that is not linear.
    if weight is not None and not (
        value.dtype.itemsize >= 4 and jaxprs.is_proportional(backward.jaxpr)
    ):
        return None
    totals = [
        where(begun[i], sums[i]) if add else constants.zeros_of_type(jax.typeof(p))
        for add, p, i in zip(adds, leaves, places, strict=True)
    ]
    one = jax.grad(lambda x: x)(value)  # Of the type that the backward pass takes.
    add = _adding(adds)
    if weight is None:
        grads = add(backward, one, totals)
    else:
        # A push of weight 0 adds nothing, also if its gradients are not finite.
        w = as_weight(weight, one.dtype)
        grads = jax.lax.cond(
            w != 0, add, lambda *args: args[-1], backward, w * one, totals
        )
    trees = map(structure.unflatten, (grads, adds))
    return (value, *aux) if has_aux else value, *trees


def _is_dense(p: object) -> bool:
    return isinstance(p, jax.Array) and jnp.issubdtype(p.dtype, jnp.inexact)


def _is_on_device(x: jax.Array) -> bool:
    # `run_state` takes no array that a policy of `jax.checkpoint` moved to the host.
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def _adding(adds: Sequence[bool]) -> Callable[..., list[jax.Array]]:
    """``(backward, one, sums) -> gradients``, or sums with them where ``adds`` is True.

    ``backward`` is the function of :func:`jax.vjp`, a pytree.
    """
    from jax.experimental.pallas import run_state

    def plain(backward: Any, one: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        grads = zip(adds, backward(one), sums, strict=True)
        return [total + g if add else g for add, g, total in grads]

    def in_place(
        backward: Any, one: jax.Array, sums: list[jax.Array]
    ) -> list[jax.Array]:
        @run_state
        def run(refs: list[Any]) -> None:
            given = [ref if add else 0 for add, ref in zip(adds, refs, strict=True)]
            grads = backward.with_refs(*given)(one)
            for add, ref, g in zip(adds, refs, grads, strict=True):
                if not add:
                    ref[...] = g

        return run(sums)

    # A scan cannot go over a batch of references.
    batched = jax.custom_batching.custom_vmap(in_place)

    @batched.def_vmap
    def _(axis_size: int, is_batched: list[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda b: 0 if b else None, is_batched)
        grads = jax.vmap(plain, tuple(axes), axis_size=axis_size)(*args)
        return grads, [True] * len(grads)

    added = jax.custom_jvp(batched)

    @added.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        return jax.jvp(plain, primals, tangents)

    return added
