"""A step that applies the gradient of each layer within the backward pass.

The layers lie in stacks, which a ``scan`` of the loss goes over. The forward pass keeps
what each layer gets from the one before it. The backward pass is a loop, too: it takes
one layer of the parameters and of their state, computes the layer's gradient, applies
it, and writes both back. So there is no array of the gradients of all layers.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._jax import programs
from gradxform._layers import passes
from gradxform._layers.by_layer import Update
from gradxform._rows.lookup import LossOfRows, Offsets, Tables
from gradxform._slices.kinds import Whole
from gradxform._slices.slices import MixedSlicesError, Source
from gradxform._trees import maps
from gradxform._trees.types import ByIndex, Path


def check_paths(layers: Collection[str]) -> None:
    """Raises ``TypeError`` unless it is a sequence of paths."""
    if isinstance(layers, str) or not isinstance(layers, Collection):
        raise TypeError(f"layers must be a sequence of paths, got {layers!r}.")


def paths_of(layers: Collection[str], params: optax.Params) -> set[Path]:
    """The paths of all leaves that ``layers`` names, also by a tree that they are in.

    Raises:
      ValueError: it names nothing.
    """
    leaves = [(p, structures.path_str(k), k) for k, p in maps.leaves_with_path(params)]
    found: set[Path] = set()
    for name in layers:
        inside = [x for x in leaves if f"{x[1]}/".startswith(f"{name}/")]
        if not inside:
            close = difflib.get_close_matches(name, [x[1] for x in leaves], 3, 0)
            names = ", ".join(map(repr, close))
            more = f", and {len(leaves) - len(close)} more" if leaves[3:] else ""
            raise ValueError(
                f"layers must name leaves of params, or trees of them, got {name!r}; "
                f"there are {names}{more}."
            )
        found.update(path for p, _, path in inside if maps.has_gradient(p))
    return found


def step(
    loss_fn: Callable[[optax.Params], tuple[jax.Array, *tuple[Any, ...]]],
    tx: optax.GradientTransformation,
    paths: Collection[Path],
    tables: Tables,
    extra_of: Callable[[jax.Array], dict[str, object]],
    learning: optax.Params,
    params: optax.Params,
    state: optax.OptState,
    *,
    two_passes: bool,
) -> tuple[Any, optax.Params, optax.OptState]:
    """The step of :func:`minimize` with the stacks at these paths.

    ``loss_fn(learning)`` returns a loss and its aux, and ``extra_of(loss)`` the extra
    arguments. With ``two_passes`` a first backward pass computes the sums over all
    gradients. Returns both results of the loss, new parameters and new state.
    """
    names = [path for path, _ in maps.leaves_with_path(params)]
    strings, tree = list(map(structures.path_str, names)), maps.structure(learning)
    leaves, frozen = _leaves(names, paths, learning, params)

    def of_leaves(leaves: ByIndex) -> tuple[jax.Array, list[Any]]:
        filled = [leaves.get(n) for n in range(len(names))]
        value, *aux = loss_fn(jax.tree.unflatten(tree, filled))
        return value, aux

    is_table = structures.names("tables", tables, "leaves of params", names)
    by_rows = LossOfRows.of(of_leaves, leaves, is_table, strings)
    dense = {n: p for n, p in leaves.items() if n not in by_rows.tables}
    types = {
        n: jax.typeof(p).update(memory_space=host.DEVICE) for n, p in dense.items()
    }
    traced = jax.make_jaxpr(by_rows.loss, return_shape=True)
    with jax.disable_jit(False):  # Otherwise it would unroll each scan.
        closed, shapes = traced(types, by_rows.offsets)
    offsets = dict(enumerate(jax.tree.leaves(by_rows.offsets), len(names)))
    named = {n: strings[n] for n in dense if names[n] in paths}
    results, backward = passes.forward(
        programs.with_placements(closed), dense | offsets, named, frozen
    )
    value, (aux, ids) = jax.tree.unflatten(jax.tree.structure(shapes), results)
    sources = [
        Source(own.scan.length, 1, own.scan.length == 1, names[min(own.applied)])
        if own.applied
        else None
        for own in backward.passes
    ]
    arrays = {
        names[n]: Whole(jnp.shape(leaves[n]), source, own.scan.stacked[n].axis)
        for own, source in zip(backward.passes, sources, strict=True)
        for n in own.applied
        if source
    }

    def with_tables(grads: optax.Updates, rows: Offsets) -> optax.Updates:
        found = by_rows.gradients(ids, rows)
        flat = [found.get(n, g) for n, g in enumerate(maps.leaves(grads))]
        return jax.tree.unflatten(tree, flat)

    args = params, state, (learning, by_rows.offsets), extra_of(value)

    def updated(*, two_passes: bool) -> tuple[optax.Params, optax.OptState]:
        update = Update.of(tx, arrays, sources, args, with_tables)
        if not two_passes:
            return update.after(backward.run, backward.stacks)
        update, same, scalars = update.after_first_pass(backward.run, backward.stacks)
        return update.after(backward.after(scalars).run, same)

    return (value, *aux), *_tried(updated, arrays, two_passes=two_passes)


def _leaves(
    names: Sequence[Path],
    paths: Collection[Path],
    learning: optax.Params,
    params: optax.Params,
) -> tuple[ByIndex, Collection[int]]:
    """The leaves that learn and all stacks, by index; indices of frozen stacks."""
    flat = dict(enumerate(maps.leaves(learning)))
    learns = {n: p for n, p in flat.items() if maps.has_gradient(p)}
    all_leaves = enumerate(maps.leaves(params))
    frozen = {n: p for n, p in all_leaves if names[n] in paths and n not in learns}
    return dict(sorted((learns | frozen).items())), frozen  # As JAX orders them.


def _tried(
    updated: Callable[..., tuple[optax.Params, optax.OptState]],
    arrays: Collection[Path],
    *,
    two_passes: bool,
) -> tuple[optax.Params, optax.OptState]:
    """``updated()``; if it mixes layers, an error that says what to do."""
    try:
        return updated(two_passes=two_passes)
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


def _is_taken(updated: Callable[[], object]) -> bool:
    """Whether an update can run in this way; nothing is computed."""
    try:
        jax.eval_shape(updated)
    except MixedSlicesError:
        return False
    return True
