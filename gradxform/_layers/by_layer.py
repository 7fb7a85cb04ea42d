"""An update of all parameters, divided into that of one layer and that of the rest.

A layer must stand alone: no operation may add up layers. A first pass over all of them
may find out such sums, and the second one then knows them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import optax

from gradxform._gates import gate
from gradxform._jax import compilers, jaxprs, versions
from gradxform._layers.step_leaves import Layer, StepArgs, StepLeaves
from gradxform._rows import boundary
from gradxform._rows.lookup import Offsets
from gradxform._slices import slices
from gradxform._slices.kinds import Whole
from gradxform._slices.rules import shape_of
from gradxform._slices.slices import (
    EquationPath,
    Evaluator,
    Kind,
    Missing,
    MixedSlicesError,
    Notes,
    Policy,
    Slices,
    Source,
    Value,
    WholeProgram,
)
from gradxform._trees import maps
from gradxform._trees.types import ByIndex, Path

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# What a layer gives to reductions of all layers.
Contributions: TypeAlias = dict[EquationPath, jax.Array]
# What is done with a layer: (layer, whole arrays) -> whole arrays, and what it gives
OfLayer: TypeAlias = Callable[[Layer, ByIndex], tuple[ByIndex, Contributions]]
# A backward pass: (whole arrays of each scan, what is done with its layers)
# -> whole arrays, gradients of other leaves, what all layers gave
Backward: TypeAlias = Callable[
    [Sequence[ByIndex], Sequence[OfLayer]],
    tuple[list[ByIndex], ByIndex, Contributions],
]

_LATER = (
    "its update of a layer reads gradients of other parameters, which are known only "
    "after the last layer"
)
_GONE = "its update of other leaves reads all layers"


@dataclasses.dataclass(frozen=True)
class Update:
    """A step that is traced: that of one layer, and that of all other leaves.

    Attributes:
      leaves: those of the step.
      program: the step, as a function of the leaves that are given.
      results: those of equations that a first pass has found out.
    """

    leaves: StepLeaves
    program: WholeProgram
    results: Mapping[EquationPath, list[jax.Array]] = dataclasses.field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        arrays: Mapping[Path, Whole],
        sources: list[Source | None],
        args: StepArgs,
        with_tables: Callable[..., optax.Updates],
    ) -> Update:
        """Traces the step of ``tx``.

        ``with_tables`` puts gradients of leaves and those of rows together.
        """

        def step(
            params: optax.Params,
            state: optax.OptState,
            grads: tuple[optax.Updates, Offsets],
            extra: dict[str, object],
        ) -> tuple[gate.Outcome, optax.OptState]:
            updates = with_tables(*grads)
            with boundary.explained(updates):
                return gate.step(tx, updates, state, params, extra, applies=True)

        leaves = StepLeaves.of_step(tx, arrays, sources, args, _policy())

        def traced(leaves: StepLeaves) -> WholeProgram:
            new_args = jax.tree.unflatten(maps.structure(args), leaves.values)
            types = {n: leaves.values[n] for n in leaves.inputs}
            return slices.trace_whole(step, new_args, leaves.kinds, types)

        program = traced(leaves)
        after = dict(zip(leaves.replaced, program.closed.out_avals, strict=False))
        stacked = [n for n in leaves.replaced if n in leaves.kinds]
        is_alike = program.structure == jax.tree.structure(args[:2])
        if not is_alike or any(
            after[n].shape != shape_of(leaves.values[n]) for n in stacked
        ):
            raise MixedSlicesError("its update returns a state of another structure")
        placed = [
            _on_mesh(x, after[n]) if n in stacked else x
            for n, x in enumerate(leaves.values)
        ]
        if any(x is not y for x, y in zip(placed, leaves.values, strict=True)):
            leaves = dataclasses.replace(leaves, values=placed)
            program = traced(leaves)
        if jaxprs.calls_host(program.closed):
            raise MixedSlicesError(
                "its update has an io_callback, one call for a layer"
            )
        return cls(leaves, program)

    def run(self, args: ByIndex, reason: str, evaluator: Evaluator) -> dict[int, Value]:
        """The results for some arguments; ``reason`` says why others are missing."""
        missing, kinds = Missing(reason, is_absent=True), self.leaves.kinds
        values = [
            missing
            if n not in args
            else Slices(args[n], kinds[n])
            if n in kinds
            else args[n]
            for n in self.leaves.inputs
        ]
        results = evaluator.results(self.program.closed, values)
        return dict(zip(self.leaves.replaced, results, strict=True))

    def _evaluator(
        self, first: Mapping[Source, jax.Array], notes: Notes | None = None
    ) -> Evaluator:
        policy = _policy(is_second_pass=bool(self.results))
        return Evaluator(policy, self.results, notes, first=first)

    def new_leaves(
        self, args: ByIndex, reason: str, first: Mapping[Source, jax.Array]
    ) -> ByIndex:
        """New leaves that have layers, of one source; without it those that have none.

        ``first`` has the source, and the index of the layer.
        """
        evaluator, source = self._evaluator(first), next(iter(first), None)
        results = self.run(args, reason, evaluator)
        for n, error in self.leaves.lacking.items():
            if isinstance(results[n], (Missing, Slices)):
                raise error
        indices = self.leaves.of(source, results)
        arrays = evaluator.arrays(
            [results[n] for n in indices], [self.leaves.kinds.get(n) for n in indices]
        )
        return dict(zip(indices, arrays, strict=True))

    def of_layer(
        self, source: Source, layer: Layer, wholes: ByIndex
    ) -> tuple[ByIndex, Contributions]:
        """With the layer after its step."""
        args = self.leaves.of_layer(source, layer, wholes)
        new = self.new_leaves(args, _LATER, {source: layer.i})
        new = compilers.barrier_on_cpu(new)
        return self.leaves.written(new, layer, wholes), {}

    def run_through(
        self, backward: Backward, stacks: Sequence[ByIndex], f: Callable[..., Any]
    ) -> tuple[list[ByIndex], ByIndex, Contributions]:
        """A backward pass that calls ``f(source, ...)`` for the layers of each scan."""
        wholes = [x | y for x, y in zip(self.leaves.wholes, stacks, strict=True)]
        sources = self.leaves.sources
        applies = [functools.partial(f, x) if x else _as_it_is for x in sources]
        return backward(wholes, applies)

    def after(
        self, backward: Backward, stacks: Sequence[ByIndex]
    ) -> tuple[optax.Params, optax.OptState]:
        """New parameters and state, after the last backward pass."""
        wholes, grads, _ = self.run_through(backward, stacks, self.of_layer)
        new = self.new_leaves(self.leaves.as_args(grads), _GONE, {})
        for source, found in zip(self.leaves.sources, wholes, strict=True):
            # A scan in which a stack does not learn has the stack as it was before.
            same = self.leaves.of(None, found)
            new |= {n: found[n] for n in [*same, *self.leaves.of(source, found)]}
        leaves = [new[n] for n in self.leaves.replaced]
        return jax.tree.unflatten(self.program.structure, leaves)

    def after_first_pass(
        self, backward: Backward, stacks: Sequence[ByIndex]
    ) -> tuple[Update, list[ByIndex], list[jax.Array]]:
        """The same, with the results of the reductions of all gradients.

        Also returns the stacks, which are as before, and these results.
        """
        equations: dict[EquationPath, JaxprEqn] = {}
        indices = {n for found in stacks for n in found}

        def note(
            source: Source, layer: Layer, wholes: ByIndex
        ) -> tuple[ByIndex, Contributions]:
            notes, i = Notes({}, {}), layer.i
            args = self.leaves.of_layer(source, layer, wholes)
            self.run(args, _LATER, self._evaluator({source: i}, notes))
            only_read = {n: x for n, x in wholes.items() if n in indices}
            same = self.leaves.read_on(only_read, i)
            equations.update(
                (path, eqn) for path, (eqn, _) in notes.contributions.items()
            )
            found = {path: x for path, (_, x) in notes.contributions.items()}
            return wholes | same, found

        wholes, grads, found = self.run_through(backward, stacks, note)
        noted = {path: _total(equations[path], x) for path, x in found.items()}
        notes = Notes({}, {})
        update = dataclasses.replace(self, results=noted)
        update.run(self.leaves.as_args(grads), _GONE, update._evaluator({}, notes))
        update = dataclasses.replace(self, results=noted | notes.scalars)
        stacks = [{n: found[n] for n in found if n in indices} for found in wholes]
        return update, stacks, jax.tree.leaves(update.results)


def _as_it_is(layer: Layer, wholes: ByIndex) -> tuple[ByIndex, Contributions]:
    """Does nothing with a layer."""
    del layer
    return wholes, {}


def _policy(*, is_second_pass: bool = False) -> Policy:
    """The policy for one layer of each stack, which must stand alone."""

    def add_up(
        eqn: JaxprEqn, kinds: list[Kind | None], inputs: list[Any]
    ) -> list[jax.Array] | None:
        """One layer is its sum; of more of them there is none."""
        if all(kind.source.is_complete for kind in kinds if kind):
            return versions.bind(eqn, inputs)
        if is_second_pass:  # The first pass lacked what it adds up.
            raise MixedSlicesError(
                f"its update needs a third pass, as {jaxprs.with_line(eqn)} depends on "
                "another sum over layers"
            )
        return None

    return Policy("layer", "stack", (), add_up, is_indexed=True)


def _total(eqn: JaxprEqn, parts: jax.Array) -> list[jax.Array]:
    """The results of a reduction, from parts of all layers along a first axis."""
    if "axes" not in eqn.params:  # A product.
        return [parts.sum(0)]
    return versions.bind(eqn.replace(params=eqn.params | {"axes": (0,)}), [parts])


def _on_mesh(x: jax.Array, new: Any) -> jax.Array:
    """An array as the update gives it back, if explicit axes say where it lies."""
    is_placed = jax.typeof(x).sharding == new.sharding
    if is_placed or not new.sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, new.sharding)
