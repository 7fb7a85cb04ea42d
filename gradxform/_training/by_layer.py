"""An update of all parameters, divided into that of one layer and that of the rest.

A layer must stand alone: no operation may add up layers. A first pass over all of them
may find out such sums, and the second one then knows them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import optax

from gradxform._late import gate
from gradxform._trees import (
    compilers,
    host,
    jaxprs,
    maps,
    slice_kinds,
    slice_rules,
    slices,
    versions,
)
from gradxform._trees.slices import (
    Evaluator,
    Kind,
    Missing,
    MixedSlicesError,
    Place,
    Program,
    Slices,
    Value,
)
from gradxform._trees.types import Path
from gradxform._trees.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn

# Arrays by the number of their leaf, or by their position.
Numbered: TypeAlias = dict[int, jax.Array]
# What a layer gives to reductions of all layers.
LayerParts: TypeAlias = dict[Place, jax.Array]
# (parts of all layers, along a first axis) -> results of the reduction
_Total: TypeAlias = Callable[[jax.Array], list[jax.Array]]
# What is done with a layer:
# (number of the layer, whole arrays, gradients) -> whole arrays, and what it gives
OfLayer: TypeAlias = Callable[
    [jax.Array, Numbered, Numbered], tuple[Numbered, LayerParts]
]

_LATER = (
    "its update of a layer reads gradients of other parameters, which are known only "
    "after the last layer"
)
_GONE = "its update of other leaves reads all layers"
# States that may have no layer for each layer, and with which argument they have.
_HINTS = {"LowBitState": ": give low_bit_state block_axis=-1"}


@dataclasses.dataclass(frozen=True)
class Layers:
    """The policy for one layer of each stack, which must stand alone.

    Attributes:
      results: those of some equations, which a first pass has found out.
    """

    results: Mapping[Place, list[jax.Array]] = dataclasses.field(default_factory=dict)
    slice: ClassVar[str] = "layer"
    whole: ClassVar[str] = "stack"
    refused: ClassVar[Collection[str]] = (
        Op.RANDOM_BITS,
    )  # Each layer would get the same bits.

    def known(self, place: Place) -> list[jax.Array] | None:
        """What the first pass has found out."""
        return self.results.get(place)

    def done(self, place: Place, eqn: JaxprEqn, results: list[Value]) -> None:
        """Nothing is noted."""

    def added_up(
        self,
        place: Place,
        eqn: JaxprEqn,
        kinds: list[Kind | None],
        inputs: list[Any],
    ) -> list[jax.Array] | None:
        """One layer is its sum; of more of them there is none."""
        is_one = all(kind.source.is_whole for kind in kinds if kind)
        if self.results and not is_one:  # The first pass lacked what it adds up.
            raise MixedSlicesError(
                f"its update needs a third pass, as {jaxprs.place(eqn)} depends on "
                "another sum over layers"
            )
        return versions.evaluate(eqn, inputs) if is_one else None

    def branch(self, eqn: JaxprEqn) -> int | None:
        """Forms for one platform are for whole arrays."""
        platforms = eqn.params.get("branches_platforms") or ()
        return platforms.index(None) if None in platforms else None

    def skip(self, missing: Missing) -> None:
        """An effect may belong to another part of the update."""
        if not missing.is_given:
            raise MixedSlicesError(missing.reason)

    def look(self, inside: Callable[[], object]) -> None:
        """Nothing is needed of what is not taken."""

    def inside(self) -> Layers:
        """What is known is known everywhere."""
        return Layers(self.results)


@dataclasses.dataclass(frozen=True)
class FirstPass(Layers):
    """The policy for a pass that finds out what the next one has to know.

    Attributes:
      found: the results of equations that have scalars.
      parts: for each reduction of layers its function, and the part of one layer.
    """

    found: dict[Place, list[jax.Array]] = dataclasses.field(default_factory=dict)
    parts: dict[Place, tuple[_Total, jax.Array]] = dataclasses.field(
        default_factory=dict
    )

    def done(self, place: Place, eqn: JaxprEqn, results: list[Value]) -> None:
        """Notes scalars that are there."""
        is_scalar = not any(map(slice_rules.shape_of, eqn.outvars))
        if is_scalar and not any(isinstance(x, Missing) for x in results):
            self.found[place] = results

    def added_up(
        self,
        place: Place,
        eqn: JaxprEqn,
        kinds: list[Kind | None],
        inputs: list[Any],
    ) -> list[jax.Array] | None:
        """Notes what this layer adds."""
        (part,) = versions.evaluate(eqn, inputs)
        first = eqn.replace(params=eqn.params | {"axes": (0,)})

        def total(parts: jax.Array) -> list[jax.Array]:
            is_product = "axes" not in eqn.params
            return [parts.sum(0)] if is_product else versions.evaluate(first, [parts])

        self.parts[place] = total, part
        return super().added_up(place, eqn, kinds, inputs)

    def skip(self, missing: Missing) -> None:
        """Effects wait for the second pass."""

    def look(self, inside: Callable[[], object]) -> None:
        """A reduction may be inside."""
        inside()


@dataclasses.dataclass(frozen=True)
class Update:
    """A step that is traced: that of one layer, and that of all other leaves.

    Numbers count the leaves of parameters, state, gradients and extra arguments.

    Attributes:
      paths: those of the stacks.
      program: the step, as a function of the leaves that have a gradient or layers.
      leaves: all leaves.
      given: the numbers of the program's arguments.
      replaced: the numbers of its results, which are parameters and state.
      kinds: of the leaves that have layers.
      first: the number of the first gradient.
      results: those of equations that a first pass has found out.
    """

    paths: list[Path]
    program: Program
    leaves: list[Any]  # Arrays, numbers.
    given: list[int]
    replaced: list[int]
    kinds: dict[int, Kind]
    first: int
    results: Mapping[Place, list[jax.Array]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tx: optax.GradientTransformation,
        arrays: Mapping[Path, slice_kinds.Whole],
        learning: optax.Params,
        params: optax.Params,
        state: optax.OptState,
        extra: dict[str, object],
    ) -> Update:
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
        states = slice_kinds.States(Layers(), arrays, tx.init, params, hints=_HINTS)
        kinds = states.of_step(params, state, learning, extra)
        along = {n: kind for n, kind in enumerate(kinds) if kind}
        leaves = [
            x
            if n in along and host.has_layers(x, along[n].along.axis)
            else host.brought(x)
            for n, x in enumerate(leaves)
        ]
        grads = range(first, first + len(maps.leaves(learning)))
        given = [
            n
            for n, x in enumerate(leaves)
            if (n in along or n in grads) and maps.has_gradient(x)
        ]

        def traced(leaves: list[Any]) -> Program:
            new_args = jax.tree.unflatten(maps.structure(args), leaves)
            types = {n: leaves[n] for n in given}
            return slices.trace(whole, new_args, kinds, types)

        program = traced(leaves)
        made = dict(zip(replaced, program.closed.out_avals, strict=False))
        is_alike = program.structure == jax.tree.structure((params, state))
        if not is_alike or any(
            made[n].shape != slice_rules.shape_of(leaves[n])
            for n in replaced
            if n in along
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
        return cls([*arrays], program, leaves, given, replaced, along, first)

    @property
    def wholes(self) -> Numbered:
        """Parameters and state that have layers."""
        return {n: self.leaves[n] for n in self.replaced if n in self.kinds}

    def run(
        self, policy: Layers, args: Numbered, reason: str
    ) -> dict[int, jax.Array | Missing]:
        """The results for some arguments; ``reason`` says why others are missing."""
        missing = Missing(reason, is_given=True)
        values = [
            missing
            if n not in args
            else Slices(args[n], self.kinds[n])
            if n in self.kinds
            else args[n]
            for n in self.given
        ]
        evaluator = Evaluator(policy)
        results = evaluator.results(self.program.closed, values)
        return {
            n: evaluator.array(x, self.kinds.get(n))
            for n, x in zip(self.replaced, results, strict=True)
        }

    def there(self, args: Numbered, reason: str, *, has_layers: bool) -> Numbered:
        """New leaves that have layers, or those that have none."""
        new = self.run(Layers(self.results), args, reason)
        there: Numbered = {}
        for n, x in new.items():
            if (n in self.kinds) == has_layers:
                if isinstance(x, Missing):
                    raise MixedSlicesError(x.reason)
                there[n] = x
        return there

    def rows(self, i: jax.Array, wholes: Numbered, grads: Numbered) -> Numbered:
        """The arguments of layer ``i``."""
        args = {
            n: host.layer(wholes.get(n, self.leaves[n]), i, source.number, along.axis)
            for n, (source, along) in self.kinds.items()
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
        new = compilers.barrier_in_place(self.there(args, _LATER, has_layers=True))
        wholes = {
            n: host.with_layer(x, new[n], i, self.kinds[n].along.axis)
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
        self,
        backward: Callable[[Numbered, OfLayer], tuple[Numbered, Numbered, LayerParts]],
        stacks: Numbered,
    ) -> tuple[Update, Numbered, list[jax.Array]]:
        """The same, with the results of the reductions of all gradients.

        Also returns the stacks, which are as before, and these results.
        """
        totals: dict[Place, _Total] = {}

        def note(
            i: jax.Array, wholes: Numbered, grads: Numbered
        ) -> tuple[Numbered, LayerParts]:
            policy = FirstPass()
            self.run(policy, self.rows(i, wholes, grads), _LATER)
            same = {
                n: compilers.layer(wholes[n], i, source.number, along.axis)[1]
                for n, (source, along) in self.kinds.items()
                if n in stacks
            }
            totals.update((place, total) for place, (total, _) in policy.parts.items())
            parts = {place: part for place, (_, part) in policy.parts.items()}
            return wholes | same, parts

        wholes, grads, parts = backward(self.wholes | stacks, note)
        known = {place: totals[place](x) for place, x in parts.items()}
        policy = FirstPass(known)
        self.run(policy, self.gradients(grads), _GONE)
        stacks = {n: wholes[n] for n in stacks}
        update = dataclasses.replace(self, results=known | policy.found)
        return update, stacks, jax.tree.leaves(update.results)


def _on_mesh(x: jax.Array, new: Any) -> jax.Array:
    """An array of state that no explicit axis knows, as the update gives it back."""
    before, after = jax.typeof(x).sharding.mesh, new.sharding.mesh
    is_placed = before.empty and not after.empty
    return jax.sharding.reshard(x, new.sharding) if is_placed else x
