"""A step that applies the gradient of each layer within the backward pass.

The layers lie in stacks, which a ``scan`` of the loss goes over. The forward pass keeps
what each layer gets from the one before it. The backward pass is a loop, too: it takes
one layer of the parameters and of their state, computes the layer's gradient, applies
it, and writes both back. So there is no array of the gradients of all layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._late import gate
from gradxform._rows.by_row import (
    Along,
    ByRow,
    Missing,
    MixedRowsError,
    Notes,
    Program,
    Table,
)
from gradxform._training import passes, stacks
from gradxform._training.passes import LayerParts, Numbered
from gradxform._trees import (
    checks,
    compilers,
    dtypes,
    host,
    jaxprs,
    maps,
)
from gradxform._trees.types import Path

_LATER = (
    "its update of a layer reads gradients of other parameters, which are known only "
    "after the last layer"
)
_GONE = "its update of other leaves reads all layers"


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
        if not jnp.issubdtype(dtypes.dtype_of(p), jnp.inexact):
            raise TypeError(
                f"{dtypes.dtype_of(p)} at {checks.path_name(names[n])} has no "
                "gradient: let trainable be False there."
            )

    def of_leaves(leaves: Numbered) -> tuple[jax.Array, Any]:
        given = [leaves.get(n) for n in range(len(flat))]
        return loss_fn(jax.tree.unflatten(structure, given))

    closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    named = {n: checks.path_str(names[n]) for n in leaves if names[n] in paths}
    loss = stacks.find_scan(closed, list(leaves), named)
    results, whole, backward = passes.forward(loss, leaves)
    tables = {
        names[n]: Table(shape, rows + 1, None, axis, rows // loss.length)
        for n, axis in loss.axes.items()
        for shape in [jnp.shape(leaves[n])]
        for rows in [shape[axis]]
    }
    by = ByRow(tables, "layer", "stack")
    update = _Update.of(tx, by, learning, params, state, extra_of(results[0]))
    if two_passes:
        update, whole, known = update.after_first_pass(backward, whole)
        backward = backward.after(known)
    wholes, grads, _ = backward.run(update.wholes | whole, update.of_layer)
    params, state = host.put_back(update.of_others(wholes, grads), (params, state))
    return jax.tree.unflatten(jax.tree.structure(shapes), results), params, state


@dataclasses.dataclass(frozen=True)
class _Update:
    """A step that is traced: that of one layer, and that of all other leaves.

    Numbers count the leaves of parameters, state, gradients and extra arguments.

    Attributes:
      by: the stacks.
      program: the step, as a function of the leaves that have a gradient or layers.
      leaves: all leaves.
      given: the numbers of the program's arguments.
      replaced: the numbers of its results, which are parameters and state.
      along: the leaves that have layers.
      first: the number of the first gradient.
    """

    by: ByRow
    program: Program
    leaves: list[Any]  # Arrays, numbers.
    given: list[int]
    replaced: list[int]
    along: dict[int, Along]
    first: int

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        by: ByRow,
        learning: optax.Params,
        params: optax.Params,
        state: optax.OptState,
        extra: dict[str, object],
    ) -> _Update:
        """Traces the step of ``tx``."""

        def whole(
            params: optax.Params,
            state: optax.OptState,
            grads: optax.Updates,
            extra: dict[str, object],
        ) -> tuple[gate.Outcome, optax.OptState]:
            return gate.step(tx, grads, state, params, extra, whole=True)

        # Parameters stand for the gradients, which have their types.
        args = params, state, learning, extra
        leaves, first = maps.leaves(args), len(maps.leaves((params, state)))
        replaced = [n for n in range(first) if maps.has_gradient(leaves[n])]
        with _explained(by):
            like = {
                k: by.higher(x) for k, x in extra.items() if maps.is_like(x, params)
            }
            higher = (
                by.higher(params),
                by.higher_state(tx.init, state, params, {}),
                by.higher(learning),
                extra | like,
            )
            found = by.found(leaves, maps.leaves(higher))
            along = {n: x for n, x in enumerate(found) if x}
            leaves = [
                x
                if n in along and host.has_layers(x, along[n].axis)
                else host.brought(x)
                for n, x in enumerate(leaves)
            ]
            args = jax.tree.unflatten(maps.structure(args), leaves)
            grads = range(first, first + len(maps.leaves(learning)))
            given = {n: x for n, x in enumerate(leaves) if n in along or n in grads}
            given = {n: x for n, x in given.items() if maps.has_gradient(x)}
            program = by.trace(whole, args, higher, given)
            made = by.found(program.own.jaxpr.outvars, program.higher.jaxpr.outvars)
            is_alike = program.structure == jax.tree.structure((params, state))
            if not is_alike or made != [found[n] for n in replaced]:
                raise MixedRowsError("its update returns a state of another structure")
            if jaxprs.calls_host(program.own):
                raise MixedRowsError(
                    "its update has an io_callback, one call for a layer"
                )
        return cls(by, program, leaves, list(given), replaced, along, first)

    @property
    def wholes(self) -> Numbered:
        """Parameters and state that have layers."""
        return {n: self.leaves[n] for n in self.replaced if n in self.along}

    def run(
        self, by: ByRow, args: Numbered, reason: str
    ) -> dict[int, jax.Array | Missing]:
        """The results for some arguments; ``reason`` says why others are missing."""
        missing = Missing(reason, is_given=True)
        values = [args.get(n, missing) for n in self.given]
        own, higher, _ = self.program
        return dict(zip(self.replaced, by.results(own, higher, *values), strict=True))

    def there(self, args: Numbered, reason: str, *, has_layers: bool) -> Numbered:
        """New leaves that have layers, or those that have none."""
        with _explained(self.by):
            new = self.run(self.by, args, reason)
            there: Numbered = {}
            for n, x in new.items():
                if (n in self.along) == has_layers:
                    if isinstance(x, Missing):
                        raise MixedRowsError(x.reason)
                    there[n] = x
        return there

    def rows(self, i: jax.Array, wholes: Numbered, grads: Numbered) -> Numbered:
        """The arguments of layer ``i``."""
        args = {
            n: host.layer(wholes.get(n, self.leaves[n]), i, x.table.layers, x.axis)
            for n, x in self.along.items()
        }
        return args | self.gradients(grads)

    def gradients(self, grads: Numbered) -> Numbered:
        """As arguments."""
        return {self.first + n: g for n, g in grads.items()}

    def of_layer(
        self, i: jax.Array, wholes: Numbered, grads: Numbered
    ) -> tuple[Numbered, LayerParts]:
        """With layer ``i`` after its step."""
        args = self.rows(i, wholes, grads)
        new = compilers.written(self.there(args, _LATER, has_layers=True))
        wholes = {
            n: host.with_layer(x, new[n], i, self.along[n].axis)
            for n, x in wholes.items()
        }
        return wholes, {}

    def of_others(
        self, wholes: Numbered, grads: Numbered
    ) -> tuple[optax.Params, optax.OptState]:
        """New parameters and state, after all layers."""
        new = self.there(self.gradients(grads), _GONE, has_layers=False) | wholes
        leaves = [new[n] for n in self.replaced]
        return jax.tree.unflatten(self.program.structure, leaves)

    def after_first_pass(
        self, backward: passes.BackwardPass, stacks: Numbered
    ) -> tuple[_Update, Numbered, list[jax.Array]]:
        """The same, with the results of the reductions of all gradients.

        Also returns the stacks, which are as before, and these results.
        """
        notes = Notes()

        def note(
            i: jax.Array, wholes: Numbered, grads: Numbered
        ) -> tuple[Numbered, LayerParts]:
            nonlocal notes  # Another trace has other values.
            notes = Notes()
            by = self.by._replace(notes=notes, takes_notes=True)
            self.run(by, self.rows(i, wholes, grads), _LATER)
            same = {
                n: compilers.layer(wholes[n], i, x.table.layers, x.axis)[1]
                for n, x in self.along.items()
                if n in stacks
            }
            parts = {place: part for place, (_, part) in notes.parts.items()}
            return wholes | same, parts

        with _explained(self.by):
            wholes, grads, parts = backward.run(self.wholes | stacks, note)
            known = self.by._replace(notes=notes.totals(parts))
            noting = known._replace(takes_notes=True)
            self.run(noting, self.gradients(grads), _GONE)
        results = jax.tree.leaves(known.notes.results)
        stacks = {n: wholes[n] for n in stacks}
        return dataclasses.replace(self, by=known), stacks, results


@contextlib.contextmanager
def _explained(by: ByRow) -> Iterator[None]:
    """Says of an update that layers cannot do alone what it does."""
    try:
        yield
    except MixedRowsError as error:
        names = ", ".join(map(checks.path_str, by.tables))
        raise TypeError(
            f"minimize(layers=...) runs the transformation layer by layer on {names}, "
            f"but {error}. Leave them out of layers, or give them a transformation "
            "whose update of a layer reads only that layer and scalars. With "
            "two_passes=True it may also read a norm of all gradients."
        ) from error.__cause__
