"""An update of all parameters, divided into that of one layer and that of the rest.

A layer must stand alone: no operation may add up layers. A first pass over all of them
may find out such sums, and the second one then knows them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import optax

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from gradxform._gates import gate
from gradxform._jax import compilers, jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._rows import boundary
from gradxform._rows.lookup import Offsets
from gradxform._slices import slices
from gradxform._slices.kinds import States, Whole
from gradxform._slices.rules import shape_of
from gradxform._slices.slices import (
    Evaluator,
    Kind,
    Missing,
    MixedSlicesError,
    Notes,
    Place,
    Policy,
    Slices,
    Source,
    Value,
    WholeProgram,
)
from gradxform._training import tpu
from gradxform._trees import maps
from gradxform._trees.types import Path

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Arrays by the number of their leaf, or by their position.
Numbered: TypeAlias = dict[int, jax.Array]
# Parameters, state, gradients of leaves and of rows, and extra arguments.
Args: TypeAlias = tuple[
    optax.Params,
    optax.OptState,
    tuple[optax.Updates, Offsets],
    Mapping[str, object],
]
# What a layer gives to reductions of all layers.
LayerParts: TypeAlias = dict[Place, jax.Array]


class Layer(NamedTuple):
    """A layer of a scan in the backward pass.

    Attributes:
      i: its number.
      parts: of the stacks that learn, by the numbers of these.
      grads: their gradients, in the order in which they are known.
    """

    i: jax.Array
    parts: Numbered
    grads: Numbered


# What is done with a layer: (layer, whole arrays) -> whole arrays, and what it gives
OfLayer: TypeAlias = Callable[[Layer, Numbered], tuple[Numbered, LayerParts]]
# A backward pass: (whole arrays of each scan, what is done with its layers)
# -> whole arrays, gradients of other leaves, what all layers gave
Backward: TypeAlias = Callable[
    [Sequence[Numbered], Sequence[OfLayer]],
    tuple[list[Numbered], Numbered, LayerParts],
]

_LATER = (
    "its update of a layer reads gradients of other parameters, which are known only "
    "after the last layer"
)
_GONE = "its update of other leaves reads all layers"


@dataclasses.dataclass(frozen=True)
class Update:
    """A step that is traced: that of one layer, and that of all other leaves.

    Numbers count the leaves of parameters, state, gradients and extra arguments.

    Attributes:
      program: the step, as a function of the leaves that have a gradient or layers.
      leaves: all leaves.
      given: the numbers of the program's arguments.
      replaced: the numbers of its results, which are parameters and state.
      kinds: of the leaves that have layers.
      sources: those of each scan's layers; None for a scan in which no stack learns.
      lacking: the error of each leaf that has none, though it is the state of a stack.
      owners: the number of the stack to which a leaf of the state belongs.
      first: the number of the first gradient.
      results: those of equations that a first pass has found out.
    """

    program: WholeProgram
    leaves: list[Any]  # Arrays, numbers.
    given: list[int]
    replaced: list[int]
    kinds: dict[int, Kind]
    sources: list[Source | None]
    lacking: dict[int, MixedSlicesError]
    owners: dict[int, int]
    first: int
    results: Mapping[Place, list[jax.Array]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        arrays: Mapping[Path, Whole],
        sources: list[Source | None],
        args: Args,
        with_tables: Callable[..., optax.Updates],
    ) -> Update:
        """Traces the step of ``tx``.

        ``with_tables`` puts gradients of leaves and those of rows together. Parameters
        stand for the gradients, which have their types.
        """

        def whole(
            params: optax.Params,
            state: optax.OptState,
            grads: tuple[optax.Updates, Offsets],
            extra: dict[str, object],
        ) -> tuple[gate.Outcome, optax.OptState]:
            updates = with_tables(*grads)
            with boundary.explained(updates):
                return gate.step(tx, updates, state, params, extra, whole=True)

        leaves = maps.leaves(args)
        kinds, lacking, owners, grads = _kinds(tx, arrays, args)
        first = grads.start
        replaced = [n for n in range(first) if maps.has_gradient(leaves[n])]
        along = {n: kind for n, kind in enumerate(kinds) if kind}
        leaves = [
            _stacked(along[n]).placed(x) if n in along else host.to_device(x)
            for n, x in enumerate(leaves)
        ]
        given = [
            n
            for n, x in enumerate(leaves)
            if (n in along or n in grads) and maps.has_gradient(x)
        ]

        def traced(leaves: list[Any]) -> WholeProgram:
            new_args = jax.tree.unflatten(maps.structure(args), leaves)
            types = {n: leaves[n] for n in given}
            return slices.trace_whole(whole, new_args, kinds, types)

        program = traced(leaves)
        made = dict(zip(replaced, program.closed.out_avals, strict=False))
        is_alike = program.structure == jax.tree.structure(args[:2])
        if not is_alike or any(
            made[n].shape != shape_of(leaves[n]) for n in replaced if n in along
        ):
            raise MixedSlicesError("its update returns a state of another structure")
        placed = [
            _on_mesh(x, made[n]) if n in along and n in made else x
            for n, x in enumerate(leaves)
        ]
        if any(x is not y for x, y in zip(placed, leaves, strict=True)):
            program, leaves = traced(placed), placed
        if jaxprs.calls_host(program.closed):
            raise MixedSlicesError(
                "its update has an io_callback, one call for a layer"
            )
        found = along, sources, lacking, owners, first
        return cls(program, leaves, given, replaced, *found)

    @property
    def wholes(self) -> list[Numbered]:
        """Parameters and state that have layers, for each scan."""
        return [
            {n: self.leaves[n] for n in self.replaced if self._is_of(source, n)}
            for source in self.sources
        ]

    def _is_of(self, source: Source | None, n: int) -> bool:
        """Whether a leaf has layers of this source."""
        return source is not None and self._source(n) == source

    def _source(self, n: int) -> Source | None:
        return self.kinds[n].source if n in self.kinds else None

    def run(
        self, args: Numbered, reason: str, evaluator: Evaluator
    ) -> dict[int, Value]:
        """The results for some arguments; ``reason`` says why others are missing."""
        missing = Missing(reason, is_absent=True)
        values = [
            missing
            if n not in args
            else Slices(args[n], self.kinds[n])
            if n in self.kinds
            else args[n]
            for n in self.given
        ]
        results = evaluator.results(self.program.closed, values)
        return dict(zip(self.replaced, results, strict=True))

    def _evaluator(
        self, first: Mapping[Source, jax.Array], notes: Notes | None = None
    ) -> Evaluator:
        policy = _policy(is_second_pass=bool(self.results))
        return Evaluator(policy, self.results, notes, first=first)

    def new_leaves(
        self, args: Numbered, reason: str, first: Mapping[Source, jax.Array]
    ) -> Numbered:
        """New leaves that have layers, of one source; without it those that have none.

        ``first`` has the source, and the number of the layer.
        """
        evaluator, source = self._evaluator(first), next(iter(first), None)
        results = self.run(args, reason, evaluator)
        for n, error in self.lacking.items():
            if isinstance(results[n], (Missing, Slices)):
                raise error
        numbers = [n for n in results if self._source(n) == source]
        arrays = evaluator.arrays(
            [results[n] for n in numbers], [self.kinds.get(n) for n in numbers]
        )
        return dict(zip(numbers, arrays, strict=True))

    def of_one_layer(self, source: Source, layer: Layer, wholes: Numbered) -> Numbered:
        """The arguments of a layer."""
        args = {
            n: _stacked(kind).read(wholes.get(n, self.leaves[n]), layer.i)
            for n, kind in self.kinds.items()
            if kind.source == source and n not in layer.parts
        }
        return args | layer.parts | self.gradients(layer.grads)

    def gradients(self, grads: Numbered) -> Numbered:
        """As arguments."""
        return {self.first + n: g for n, g in grads.items()}

    def of_layer(
        self, source: Source, layer: Layer, wholes: Numbered
    ) -> tuple[Numbered, LayerParts]:
        """With the layer after its step."""
        args = self.of_one_layer(source, layer, wholes)
        new = self.new_leaves(args, _LATER, {source: layer.i})
        new = compilers.barrier_on_cpu(new)
        place = {n: k for k, n in enumerate(layer.grads)}

        def order(n: int) -> int:
            return place.get(self.owners.get(n, n), len(place))

        def write(wholes: Numbered) -> Numbered:
            return {
                n: _stacked(self.kinds[n]).write(x, new[n], layer.i)
                for n, x in wholes.items()
            }

        there = {n: x for n, x in wholes.items() if host.is_on_host(x)}
        here = {n: x for n, x in wholes.items() if n not in there}
        return write(here) | tpu.written_in_order(there, order, write), {}

    def run_through(
        self, backward: Backward, stacks: Sequence[Numbered], f: Callable[..., Any]
    ) -> tuple[list[Numbered], Numbered, LayerParts]:
        """A backward pass that calls ``f(source, ...)`` for the layers of each scan."""
        wholes = [x | y for x, y in zip(self.wholes, stacks, strict=True)]
        applies = [functools.partial(f, x) if x else _as_it_is for x in self.sources]
        return backward(wholes, applies)

    def after(
        self, backward: Backward, stacks: Sequence[Numbered]
    ) -> tuple[optax.Params, optax.OptState]:
        """New parameters and state, after the last backward pass."""
        wholes, grads, _ = self.run_through(backward, stacks, self.of_layer)
        new = self.new_leaves(self.gradients(grads), _GONE, {})
        for source, found in zip(self.sources, wholes, strict=True):
            # A scan in which a stack does not learn has the stack as it was before.
            new |= {n: x for n, x in found.items() if self._source(n) in (None, source)}
        leaves = [new[n] for n in self.replaced]
        return jax.tree.unflatten(self.program.structure, leaves)

    def after_first_pass(
        self, backward: Backward, stacks: Sequence[Numbered]
    ) -> tuple[Update, list[Numbered], list[jax.Array]]:
        """The same, with the results of the reductions of all gradients.

        Also returns the stacks, which are as before, and these results.
        """
        equations: dict[Place, JaxprEqn] = {}
        numbers = {n for found in stacks for n in found}

        def note(
            source: Source, layer: Layer, wholes: Numbered
        ) -> tuple[Numbered, LayerParts]:
            notes, i = Notes({}, {}), layer.i
            args = self.of_one_layer(source, layer, wholes)
            self.run(args, _LATER, self._evaluator({source: i}, notes))
            same = {
                n: _stacked(kind).read_on(wholes[n], i)[1]
                for n, kind in self.kinds.items()
                if n in wholes and n in numbers
            }
            equations.update((place, eqn) for place, (eqn, _) in notes.parts.items())
            parts = {place: part for place, (_, part) in notes.parts.items()}
            return wholes | same, parts

        wholes, grads, parts = self.run_through(backward, stacks, note)
        known = {place: _total(equations[place], x) for place, x in parts.items()}
        notes = Notes({}, {})
        update = dataclasses.replace(self, results=known)
        update.run(self.gradients(grads), _GONE, update._evaluator({}, notes))
        update = dataclasses.replace(self, results=known | notes.scalars)
        stacks = [{n: found[n] for n in found if n in numbers} for found in wholes]
        return update, stacks, jax.tree.leaves(update.results)


def _stacked(kind: Kind) -> Stacked:
    """Where an array with slices of this kind has layers."""
    return Stacked(kind.source.number, kind.along.axis)


def _as_it_is(layer: Layer, wholes: Numbered) -> tuple[Numbered, LayerParts]:
    """Does nothing with a layer."""
    del layer
    return wholes, {}


def _kinds(
    tx: optax.GradientTransformation, arrays: Mapping[Path, Whole], args: Args
) -> tuple[list[Kind | None], dict[int, MixedSlicesError], dict[int, int], range]:
    """The layers of the leaves of a step, errors, owners, and numbers of gradients.

    The state of a stack may have no layers: the error says why. An owner is the number
    of the stack to which a leaf of the state belongs. A state was made for all
    parameters, or for those that learn.
    """
    params, state, (learning, rows), extra = args
    made_for, own = params, jax.eval_shape(tx.init, params)
    structure: Any = jax.tree.structure(state)
    if structure != jax.tree.structure(own):
        made_for = learning
        own = jax.eval_shape(tx.init, learning)
    structures.own_state(state, own)
    structures.own_shapes(state, own)
    states = States(_policy(), arrays, tx.init, made_for)
    kinds, lacking = states.of_step(params, state, learning, extra)
    numbers = {path: n for n, (path, _) in enumerate(maps.leaves_with_path(params))}
    owned = states.owned(state)
    of_state = enumerate(maps.leaves_with_path(state), len(numbers))
    owners = {n: numbers[owned[path]] for n, (path, _) in of_state if path in owned}
    first = len(maps.leaves((params, state)))
    end = first + len(maps.leaves(learning))
    without = [None] * len(jax.tree.leaves(rows))  # Rows have no layers.
    kinds[end:end] = without
    return kinds, lacking, owners, range(first, end + len(without))


def _policy(*, is_second_pass: bool = False) -> Policy:
    """The policy for one layer of each stack, which must stand alone."""

    def add_up(
        eqn: JaxprEqn, kinds: list[Kind | None], inputs: list[Any]
    ) -> list[jax.Array] | None:
        """One layer is its sum; of more of them there is none."""
        if all(kind.source.is_whole for kind in kinds if kind):
            return versions.evaluate(eqn, inputs)
        if is_second_pass:  # The first pass lacked what it adds up.
            raise MixedSlicesError(
                f"its update needs a third pass, as {jaxprs.place(eqn)} depends on "
                "another sum over layers"
            )
        return None

    # Each layer would get the same bits.
    return Policy("layer", "stack", [Op.RANDOM_BITS], add_up, is_numbered=True)


def _total(eqn: JaxprEqn, parts: jax.Array) -> list[jax.Array]:
    """The results of a reduction, from parts of all layers along a first axis."""
    if "axes" not in eqn.params:  # A product.
        return [parts.sum(0)]
    return versions.evaluate(eqn.replace(params=eqn.params | {"axes": (0,)}), [parts])


def _on_mesh(x: jax.Array, new: Any) -> jax.Array:
    """An array as the update gives it back, if explicit axes say where it lies."""
    is_placed = jax.typeof(x).sharding == new.sharding
    if is_placed or not new.sharding.mesh.explicit_axes:
        return x
    return jax.sharding.reshard(x, new.sharding)
