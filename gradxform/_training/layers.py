"""A step that applies the gradient of each layer within the backward pass.

The layers lie in stacks, which a ``scan`` of the loss goes over. The forward pass keeps
what each layer gets from the one before it. The backward pass is a loop, too: it takes
one layer of the parameters and of their state, computes the layer's gradient, applies
it, and writes both back. So there is no array of the gradients of all layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._late import gate
from gradxform._rows.by_row import Along, ByRow, Missing, MixedRowsError, Program, Table
from gradxform._training import stacks
from gradxform._trees import checks, compilers, constants, dtypes, maps
from gradxform._trees.types import Path

# Arrays by the number of their leaf, or by their position.
Numbered = dict[int, jax.Array]

_LATER = (
    "its update of a layer reads gradients of other parameters, which are known only "
    "after the last layer"
)
_GONE = "its update of other leaves reads all layers"


def paths_of(layers: Collection[str], learning: optax.Params) -> set[Path]:
    """The paths of all leaves that ``layers`` names, also by a tree that they are in.

    Raises:
      TypeError: it is a string.
      ValueError: it names nothing, or nothing that is trainable.
    """
    if isinstance(layers, str):
        raise TypeError(f"layers must be a sequence of paths, got {layers!r}.")
    leaves = maps.leaves_with_path(learning)
    found: set[Path] = set()
    for name in layers:
        inside = {
            path: p
            for path, p in leaves
            if f"{checks.path_str(path)}/".startswith(f"{name}/")
        }
        if not inside:
            known = ", ".join(repr(checks.path_str(path)) for path, _ in leaves)
            raise ValueError(
                f"layers must name leaves of params, or trees of them, got {name!r}; "
                f"there are {known}."
            )
        named = {path for path, p in inside.items() if p is not None}
        if not named:
            raise ValueError(
                f"layers names {name!r}, which is not trainable, so it gets no "
                "gradient. Leave it out of layers, or let trainable be True there."
            )
        found |= named
    return found


def step(
    loss_fn: Callable[[optax.Params], tuple[jax.Array, Any]],
    tx: optax.GradientTransformation,
    paths: Collection[Path],
    learning: optax.Params,
    params: optax.Params,
    state: optax.OptState,
    extra_of: Callable[[jax.Array], dict[str, object]],
) -> tuple[Any, optax.Params, optax.OptState]:
    """The step of :func:`minimize` with the stacks at these paths.

    ``loss_fn(learning)`` returns a loss and its aux, and ``extra_of(loss)`` the extra
    arguments. Returns both results of the loss, new parameters and new state.
    """
    flat, structure = jax.tree.flatten_with_path(learning)
    for path, p in flat:
        if not jnp.issubdtype(dtypes.dtype_of(p), jnp.inexact):
            raise TypeError(
                f"{dtypes.dtype_of(p)} at {checks.path_name(path)} has no gradient: "
                "let trainable be False there."
            )
    closed, shapes = jax.make_jaxpr(
        lambda *leaves: loss_fn(jax.tree.unflatten(structure, leaves)),
        return_shape=True,
    )(*(p for _, p in flat))
    names = {
        i: checks.path_str(path) for i, (path, _) in enumerate(flat) if path in paths
    }
    loss = stacks.split(closed, names)
    passes = _Passes.forward(loss, {i: p for i, (_, p) in enumerate(flat)})
    results = jax.tree.unflatten(jax.tree.structure(shapes), passes.results)

    axes = loss.axes
    grown = loss.length + 1
    tables = {
        path: Table(jnp.shape(p), grown, None, axes[i])
        for i, (path, p) in enumerate(flat)
        if i in axes
    }
    update = _Update.of(
        tx, ByRow(tables), learning, params, state, extra_of(results[0])
    )
    # The numbers of leaves of `learning` in the whole parameters.
    where = [n for n, p in enumerate(maps.leaves(learning)) if p is not None]

    def apply(i: jax.Array, wholes: Numbered, grads: Numbered) -> Numbered:
        return update.of_layer(i, wholes, {where[k]: g for k, g in grads.items()})

    def rows(i: jax.Array, wholes: Numbered) -> Numbered:
        return {k: _row(wholes[where[k]], i, axis) for k, axis in axes.items()}

    wholes = update.wholes | {where[k]: x for k, x in passes.wholes.items()}
    wholes, grads = passes.backward(rows, apply, wholes)
    params, state = update.of_others({where[k]: g for k, g in grads.items()}, wholes)
    return results, params, state


class _Passes(NamedTuple):
    """The forward pass of a loss, and what its backward pass needs.

    Positions count the inputs of the scan, or the results of a layer.

    Attributes:
      loss: the loss in its parts.
      results: those of the loss.
      wholes: the stacks after the forward pass, which does not change them.
      inputs: those of the scan; None for stacks.
      carries: what each layer got from the one before it.
      moving: the positions of inputs that have a gradient.
      of_results: the gradients of the scan's results, by position.
      pull: gives the gradients of the arrays before the scan, from those of the scan's
        inputs by position, and knows those of what is read after it.
    """

    loss: stacks.Parts
    results: list[jax.Array]
    wholes: Numbered
    inputs: list[jax.Array | None]
    carries: list[jax.Array]
    moving: list[int]
    of_results: Numbered
    pull: Callable[[Numbered], Numbered]

    @classmethod
    def forward(cls, loss: stacks.Parts, leaves: Numbered) -> _Passes:
        """Runs the forward pass, and the backward pass of what is after the scan."""
        needed, varying = loss.needed, loss.varying
        moving = [x for x in needed if x in varying]
        fixed = [x for x in needed if x not in varying]
        axes = loss.axes

        def before(dense: Numbered) -> tuple[list[jax.Array], list[jax.Array]]:
            env = loss.before(dense)
            return [env[x] for x in moving], [env[x] for x in fixed]

        dense = {i: p for i, p in leaves.items() if i not in axes}
        values, pull_before, others = jax.vjp(before, dense, has_aux=True)
        known = dict(zip(fixed, others, strict=True))
        inputs = loss.inputs({**known, **dict(zip(moving, values, strict=True))})
        consts, init, xs = loss.divided(inputs)

        def layer(held: Any, x: Any) -> tuple[Any, Any]:
            carry, wholes = held
            i, rest = x
            both = {n: compilers.layer(wholes[n], i, axis) for n, axis in axes.items()}
            rows = {n: row for n, (row, _) in both.items()}
            results = loss.layer(rows, [*consts, *carry, *rest])
            wholes = {n: whole for n, (_, whole) in both.items()}
            return (results[: len(init)], wholes), (carry, results[len(init) :])

        each = jnp.arange(loss.length), xs
        first = init, {n: leaves[n] for n in axes}
        (last, wholes), (carries, ys) = jax.lax.scan(
            layer, first, each, reverse=loss.is_reverse
        )
        made = dict(enumerate([*last, *ys]))
        real = {k: x for k, x in made.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

        def after(
            real: Numbered, values: list[jax.Array]
        ) -> tuple[jax.Array, list[jax.Array]]:
            env = {**known, **dict(zip(moving, values, strict=True))}
            results = loss.after(env, list({**made, **real}.values()))
            return results[0], results

        differentiated = jax.value_and_grad(after, (0, 1), has_aux=True)
        (_, results), (of_results, of_values) = differentiated(real, values)

        variables = dict(enumerate(loss.scan.invars))
        which = {
            k: n for k, x in variables.items() for n, y in enumerate(moving) if x is y
        }

        def pull(of_inputs: Numbered) -> Numbered:
            sums = list(of_values)
            for k, n in which.items():
                sums[n] += of_inputs[k]
            (grads,) = pull_before(sums)
            return grads

        carried = {len(consts) + k for k in real if k < len(init)}
        positions = sorted({*which, *carried})
        return cls(loss, results, wholes, inputs, carries, positions, of_results, pull)

    def backward(
        self,
        rows: Callable[[jax.Array, Any], Numbered],
        apply: Callable[[jax.Array, Any, Numbered], Any],
        wholes: Any,
    ) -> tuple[Any, Numbered]:
        """``wholes`` after all layers, and the gradients of all that is no stack.

        ``apply(i, wholes, grads)`` gets the gradients of a layer.
        """
        loss = self.loss
        consts, init, _ = map(len, loss.divided(self.inputs))

        def layer(held: Any, x: Any) -> tuple[Any, Any]:
            wholes, sums, of_carry = held
            i, carry, rest, of_ys = x
            inputs = [*self.inputs[:consts], *carry, *rest]

            def f(rows: Numbered, moving: Numbered) -> Numbered:
                given = [moving.get(k, x) for k, x in enumerate(inputs)]
                results = loss.layer(rows, given)
                return {k: results[k] for k in self.of_results}

            moving = {k: inputs[k] for k in self.moving}
            _, pull = jax.vjp(f, rows(i, wholes), moving)
            of_rows, of_inputs = pull({**of_carry, **of_ys})
            wholes = apply(i, wholes, of_rows)
            sums = {k: total + of_inputs[k] for k, total in sums.items()}
            of_carry = {k: of_inputs[consts + k] for k in of_carry}
            return (wholes, sums, of_carry), {
                k: g for k, g in of_inputs.items() if k >= consts + init
            }

        zeros = constants.zeros_of_type
        first = (
            wholes,
            {k: zeros(jax.typeof(self.inputs[k])) for k in self.moving if k < consts},
            {k: g for k, g in self.of_results.items() if k < init},
        )
        each = (
            jnp.arange(loss.length),
            self.carries,
            self.inputs[consts + init :],
            {k: g for k, g in self.of_results.items() if k >= init},
        )
        (wholes, sums, of_carry), of_xs = jax.lax.scan(
            layer, first, each, reverse=not loss.is_reverse
        )
        of_init = {consts + k: g for k, g in of_carry.items()}
        return wholes, self.pull({**sums, **of_init, **of_xs})


class _Update(NamedTuple):
    """The step of a transformation, for one layer and for all other leaves.

    Numbers count the leaves of parameters, state, gradients and extra arguments.

    Attributes:
      by: the stacks.
      program: the step, traced for whole stacks.
      leaves: all leaves; those of the parameters stand for the gradients.
      rows: those that have layers, and along which axis.
      gradients: the numbers of the gradients, by those of their parameters.
      results: the number of the leaf that each result replaces.
      structure: that of parameters and state.
    """

    by: ByRow
    program: Program
    leaves: list[Any]
    rows: dict[int, Along]
    gradients: dict[int, int]
    results: list[int]
    structure: Any

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
        """Traces the step."""
        args = params, state, learning, extra

        def whole(
            params: optax.Params,
            state: optax.OptState,
            grads: optax.Updates,
            extra: dict[str, object],
        ) -> tuple[Any, optax.OptState]:
            return gate.step(tx, grads, state, params, extra, whole=True)

        with _explained(by):
            higher = (
                by.higher(params),
                by.higher_state(tx.init, state, params, {}),
                by.higher(learning),
                {
                    name: by.higher(x) if maps.is_like(x, params) else x
                    for name, x in extra.items()
                },
            )
            leaves, others = maps.leaves(args), maps.leaves(higher)
            found = by.found(leaves, others)
            first = len(maps.leaves((params, state)))
            gradients = {
                n: first + n
                for n, g in enumerate(maps.leaves(learning))
                if maps.has_gradient(g)
            }
            rows = {n: along for n, along in enumerate(found) if along}
            given = {n: leaves[n] for n in sorted({*rows, *gradients.values()})}
            program = by.trace(whole, args, higher, given)
            structure: Any = jax.tree.structure((params, state))
            if program.structure != structure:
                raise MixedRowsError("its update returns a state of another structure")
            results = [n for n in range(first) if maps.has_gradient(leaves[n])]
            made = by.found(program.own.jaxpr.outvars, program.higher.jaxpr.outvars)
            if {n: x for n, x in zip(results, made, strict=True) if x} != {
                n: along for n, along in rows.items() if n < first
            }:
                raise MixedRowsError("its update changes which state has layers")
        return cls(by, program, leaves, rows, gradients, results, structure)

    @property
    def wholes(self) -> Numbered:
        """The stacks of parameters and state."""
        return {n: self.leaves[n] for n in self.results if n in self.rows}

    def of_layer(self, i: jax.Array, wholes: Numbered, grads: Numbered) -> Numbered:
        """The stacks after the step of layer ``i``; gradients by their parameters."""
        args: dict[int, Any] = {
            n: _row(wholes.get(n, self.leaves[n]), i, along.axis)
            for n, along in self.rows.items()
        }
        args |= {
            number: grads.get(n, Missing(_LATER, is_given=True))
            for n, number in self.gradients.items()
        }
        new = self._results(args, wholes)
        new = compilers.together(new)
        return {
            n: jax.lax.dynamic_update_slice_in_dim(x, new[n], i, self.rows[n].axis)
            for n, x in wholes.items()
        }

    def of_others(
        self, grads: Numbered, wholes: Numbered
    ) -> tuple[optax.Params, optax.OptState]:
        """Parameters and state; gradients by their parameters."""
        args: dict[int, Any] = dict.fromkeys(self.rows, Missing(_GONE, is_given=True))
        args |= {number: grads[n] for n, number in self.gradients.items() if n in grads}
        new = self._results(args, [n for n in self.results if n not in self.rows])
        return jax.tree.unflatten(
            self.structure, [(wholes | new)[n] for n in self.results]
        )

    def _results(self, args: dict[int, Any], wanted: Collection[int]) -> Numbered:
        own, higher, _ = self.program
        with _explained(self.by):
            results = self.by.results(own, higher, *(args[n] for n in sorted(args)))
            found = dict(zip(self.results, results, strict=True))
            for n in wanted:
                if isinstance(found[n], Missing):
                    raise MixedRowsError(found[n].reason)
        return {n: found[n] for n in wanted}


@contextlib.contextmanager
def _explained(by: ByRow) -> Iterator[None]:
    """Says of an update that layers cannot do alone what it does."""
    try:
        yield
    except MixedRowsError as error:
        names = ", ".join(map(checks.path_str, by.tables))
        raise TypeError(
            f"minimize(layers=...) runs the transformation layer by layer on {names}, "
            f"as on the rows of tables, but {error}. Leave them out of layers, or give "
            "them a transformation whose update of a layer reads only that layer and "
            "scalars."
        ) from error.__cause__


def _row(x: jax.Array, i: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i, 1, axis)
