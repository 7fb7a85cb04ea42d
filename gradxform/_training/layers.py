"""A step that applies the gradient of each layer within the backward pass.

The layers lie in stacks, which a ``scan`` of the loss goes over. The forward pass keeps
what each layer gets from the one before it. The backward pass is a loop, too: it takes
one layer of the parameters and of their state, computes the layer's gradient, applies
it, and writes both back. So there is no array of the gradients of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from gradxform._training import stacks
from gradxform._training.by_layer import LayerParts, Numbered, OfLayer, Update
from gradxform._trees import (
    checks,
    compilers,
    constants,
    dtypes,
    host,
    maps,
    versions,
)
from gradxform._trees.slice_kinds import Whole
from gradxform._trees.slices import Source
from gradxform._trees.types import Path

if TYPE_CHECKING:
    from jax.extend.core import Var


def paths_of(layers: Collection[str], learning: optax.Params) -> set[Path]:
    """The paths of all leaves that ``layers`` names, also by a tree that they are in.

    Raises:
      ValueError: it names nothing, or nothing that is trainable.
    """
    leaves = [(p, checks.path_str(k), k) for k, p in maps.leaves_with_path(learning)]
    found: set[Path] = set()
    for name in layers:
        inside = [x for x in leaves if f"{x[1]}/".startswith(f"{name}/")]
        if not inside:
            known = ", ".join(repr(name) for _, name, _ in leaves)
            raise ValueError(
                f"layers must name leaves of params, or trees of them, got {name!r}; "
                f"there are {known}."
            )
        if not any(maps.has_gradient(p) for p, *_ in inside):
            raise ValueError(
                f"layers names {name!r}, which is not trainable, so it gets no "
                "gradient. Leave it out of layers, or let trainable be True there."
            )
        found.update(path for p, _, path in inside if maps.has_gradient(p))
    return found


def step(
    loss_fn: Callable[[optax.Params], tuple[jax.Array, Any]],
    tx: optax.GradientTransformation,
    paths: Collection[Path],
    learning: optax.Params,
    params: optax.Params,
    state: optax.OptState,
    extra_of: Callable[[jax.Array], dict[str, object]],
    *,
    two_passes: bool,
) -> tuple[Any, optax.Params, optax.OptState]:
    """The step of :func:`minimize` with the stacks at these paths.

    ``loss_fn(learning)`` returns a loss and its aux, and ``extra_of(loss)`` the extra
    arguments. With ``two_passes`` a first backward pass computes the sums over all
    gradients. Returns both results of the loss, new parameters and new state.
    """
    flat, structure = maps.flatten(learning)
    leaves = {n: p for n, p in enumerate(flat) if maps.has_gradient(p)}
    names = [path for path, _ in maps.leaves_with_path(learning)]
    for n, p in leaves.items():
        if not _is_real(p):
            raise TypeError(
                f"{dtypes.dtype_of(p)} at {checks.path_name(names[n])} has no "
                "gradient: let trainable be False there."
            )

    def of_leaves(leaves: Numbered) -> tuple[jax.Array, Any]:
        given = [leaves.get(n) for n in range(len(flat))]
        return loss_fn(jax.tree.unflatten(structure, given))

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    named = {n: checks.path_str(names[n]) for n in leaves if names[n] in paths}
    loss = stacks.split(closed, list(leaves), named)
    results, after, backward = _forward(loss, leaves)
    source = Source(loss.length, 1, loss.length == 1)
    arrays = {
        names[n]: Whole(jnp.shape(leaves[n]), source, axis)
        for n, axis in loss.axes.items()
    }
    update = Update.of(tx, arrays, learning, params, state, extra_of(results[0]))
    if two_passes:
        update, after = update.after_first_pass(backward, after)
    wholes, grads, _ = backward(update.wholes | after, update.of_layer)
    params, state = host.put_back(update.of_others(wholes, grads), (params, state))
    return jax.tree.unflatten(jax.tree.structure(shapes), results), params, state


# The backward pass:
# (whole arrays, OfLayer) -> whole arrays, gradients of all other leaves, what it gave
_Backward = Callable[[Numbered, OfLayer], tuple[Numbered, Numbered, LayerParts]]


def _forward(
    loss: stacks.Parts, leaves: Numbered
) -> tuple[list[jax.Array], Numbered, _Backward]:
    """The results of a loss, its stacks, which are as before, and its backward pass."""
    axes, needed = loss.axes, loss.needed
    num_consts, num_carry = versions.scan_lengths(loss.scan)
    start = num_consts + num_carry  # Of the scanned inputs.

    def before(dense: Numbered) -> tuple[Numbered, Numbered]:
        env = loss.before(dense)
        return _divided([env[x] for x in needed])

    def env(values: Numbered) -> dict[Var, jax.Array]:
        return {needed[k]: x for k, x in (fixed | values).items()}

    dense = {n: p for n, p in leaves.items() if n not in axes}
    values, pull_before, fixed = jax.vjp(before, dense, has_aux=True)
    inputs = loss.inputs(env(values))

    def layer(held: Any, x: Any) -> tuple[Any, Any]:
        (carry, wholes), (i, scanned) = held, x
        both = {
            n: compilers.layer(wholes[n], i, loss.length, axis)
            for n, axis in axes.items()
        }
        rows = {n: row for n, (row, _) in both.items()}
        results = loss.layer(rows, [*inputs[:num_consts], *carry, *scanned])
        wholes = {n: whole for n, (_, whole) in both.items()}
        return (results[:num_carry], wholes), (carry, results[num_carry:])

    each = jnp.arange(loss.length)
    first = inputs[num_consts:start], {n: leaves[n] for n in axes}
    (last, wholes), (carries, ys) = jax.lax.scan(
        layer, first, (each, inputs[start:]), reverse=loss.is_reverse
    )
    made, whole_numbers = _divided([*last, *ys])

    def after(made: Numbered, values: Numbered) -> tuple[jax.Array, list[jax.Array]]:
        results = loss.after(env(values), whole_numbers | made)
        return results[0], results

    differentiated = jax.value_and_grad(after, (0, 1), has_aux=True)
    (_, results), (of_made, of_values) = differentiated(made, values)

    def backward(
        wholes: Numbered, apply: OfLayer
    ) -> tuple[Numbered, Numbered, LayerParts]:
        real, _ = _divided(inputs)

        def layer(held: Any, x: Any) -> tuple[Any, Any]:
            (wholes, sums, of_carry), (i, carry, scanned, of_ys) = held, x
            given = [*inputs[:num_consts], *carry, *scanned]

            def f(rows: Numbered, real: Numbered) -> Numbered:
                merged = [real.get(k, x) for k, x in enumerate(given)]
                return _divided(loss.layer(rows, merged))[0]

            rows = {
                n: host.layer(wholes[n], i, loss.length, axis)
                for n, axis in axes.items()
            }
            _, pull = jax.vjp(f, rows, {k: given[k] for k in real})
            of_rows, of_given = pull(of_carry | of_ys)
            sums = {k: total + of_given[k] for k, total in sums.items()}
            of_carry = {k: of_given[num_consts + k] for k in of_carry}
            of_scanned = {k: g for k, g in of_given.items() if k >= start}
            wholes, given_by = apply(i, wholes, of_rows)
            return (wholes, sums, of_carry), (of_scanned, given_by)

        sums = {
            k: constants.zeros_of_type(jax.typeof(x))
            for k, x in real.items()
            if k < num_consts
        }
        of_last = {k: g for k, g in of_made.items() if k < num_carry}
        of_ys = {k: g for k, g in of_made.items() if k >= num_carry}
        (wholes, sums, of_first), (of_scanned, given_by) = jax.lax.scan(
            layer,
            (wholes, sums, of_last),
            (each, carries, inputs[start:], of_ys),
            reverse=not loss.is_reverse,
        )
        of_first = {num_consts + k: g for k, g in of_first.items()}
        total = dict(of_values)
        for k, g in (sums | of_first | of_scanned).items():
            if (x := loss.scan.invars[k]) in needed:
                total[needed.index(x)] += g
        return wholes, pull_before(total)[0], given_by

    return results, wholes, backward


def _divided(values: Sequence[Any]) -> tuple[Numbered, Numbered]:
    """Arrays that have a derivative, and others, by position; without None."""
    there = {k: x for k, x in enumerate(values) if x is not None}
    real = {k: x for k, x in there.items() if _is_real(x)}
    return real, {k: x for k, x in there.items() if k not in real}


def _is_real(x: Any) -> bool:  # An array, a number.
    """Whether it has a derivative: integers have none."""
    return jnp.issubdtype(dtypes.dtype_of(x), jnp.inexact)
