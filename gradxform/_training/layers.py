"""A step that applies the gradient of each layer within the backward pass.

The layers lie in stacks, which a ``scan`` of the loss goes over. The forward pass keeps
what each layer gets from the one before it. The backward pass is a loop, too: it takes
one layer of the parameters and of their state, computes the layer's gradient, applies
it, and writes both back. So there is no array of the gradients of all layers.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._slices.kinds import Whole
from gradxform._slices.slices import MixedSlicesError, Source
from gradxform._training import passes, stacks
from gradxform._training.by_layer import Numbered, Update
from gradxform._trees import dtypes, maps
from gradxform._trees.types import Path


def paths_of(layers: Collection[str], learning: optax.Params) -> set[Path]:
    """The paths of all leaves that ``layers`` names, also by a tree that they are in.

    Raises:
      ValueError: it names nothing, or nothing that is trainable.
    """
    leaves = [
        (p, structures.path_str(k), k) for k, p in maps.leaves_with_path(learning)
    ]
    found: set[Path] = set()
    for name in layers:
        inside = [x for x in leaves if f"{x[1]}/".startswith(f"{name}/")]
        if not inside:
            close = difflib.get_close_matches(name, [x[1] for x in leaves], 3, 0)
            known = ", ".join(map(repr, close))
            more = f", and {len(leaves) - len(close)} more" if leaves[3:] else ""
            raise ValueError(
                f"layers must name leaves of params, or trees of them, got {name!r}; "
                f"there are {known}{more}."
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
        if not jnp.issubdtype(dtypes.dtype_of(p), jnp.inexact):
            raise TypeError(
                f"{dtypes.dtype_of(p)} at {structures.path_name(names[n])} has no "
                "gradient: let trainable be False there."
            )

    def of_leaves(leaves: Numbered) -> tuple[jax.Array, Any]:
        given = [leaves.get(n) for n in range(len(flat))]
        return loss_fn(jax.tree.unflatten(structure, given))

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    named = {n: structures.path_str(names[n]) for n in leaves if names[n] in paths}
    loss = stacks.find_scan(closed, list(leaves), named)
    results, whole, backward = passes.forward(loss, leaves)
    source = Source(loss.length, 1, loss.length == 1)
    arrays = {
        names[n]: Whole(jnp.shape(leaves[n]), source, axis)
        for n, axis in loss.axes.items()
    }
    extra = extra_of(results[0])

    def updated(*, two_passes: bool) -> tuple[optax.Params, optax.OptState]:
        update = Update.of(tx, arrays, learning, params, state, extra)
        given, last_pass = whole, backward
        if two_passes:
            update, given, known = update.after_first_pass(backward.run, whole)
            last_pass = backward.after(known)
        wholes, grads, _ = last_pass.run(update.wholes | given, update.of_layer)
        return update.of_others(wholes, grads)

    try:
        new = updated(two_passes=two_passes)
    except MixedSlicesError as error:
        hint = (
            "Leave them out of layers, or take a transformation whose update of a "
            "layer reads only that layer and scalars."
        )
        if not two_passes and _is_taken(functools.partial(updated, two_passes=True)):
            hint = (
                "With two_passes=True a first backward pass computes what is missing."
            )
        more = f" and {len(arrays) - 1} more" if len(arrays) > 1 else ""
        raise TypeError(
            f"minimize(layers=...) cannot run this transformation: {error}. The layers "
            f"are those of {min(map(structures.path_str, arrays))!r}{more}. {hint}"
        ) from error.__cause__
    params, state = host.to_memory_of(new, (params, state))
    return jax.tree.unflatten(jax.tree.structure(shapes), results), params, state


def _is_taken(updated: Callable[[], object]) -> bool:
    """Whether an update can run in this way; nothing is computed."""
    try:
        jax.eval_shape(updated)
    except MixedSlicesError:
        return False
    return True
