"""The leaves of a step by layers: which of them have layers, and whose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from gradxform._layers import tpu
from gradxform._rows.lookup import Offsets
from gradxform._slices.kinds import States, Whole
from gradxform._slices.slices import Kind, MixedSlicesError, Policy, Source
from gradxform._trees import maps
from gradxform._trees.types import ByIndex, Path

# Parameters, state, gradients of leaves and of rows, and extra arguments.
StepArgs: TypeAlias = tuple[
    optax.Params,
    optax.OptState,
    tuple[optax.Updates, Offsets],
    Mapping[str, object],
]


class Layer(NamedTuple):
    """A layer of a scan in the backward pass.

    Attributes:
      i: its index.
      parts: of the stacks that learn, by the indices of these.
      grads: their gradients, in the order in which they are known.
    """

    i: jax.Array
    parts: ByIndex
    grads: ByIndex


@dataclasses.dataclass(frozen=True)
class StepLeaves:
    """The leaves of a step.

    One numbering is for all: indices count the leaves of parameters, of the state, of
    gradients, of gradients of rows, and of extra arguments, in this order. A leaf that
    is None counts, too. So parameter ``n`` and stack ``n`` are the same leaf. With two
    parameters, ``optax.sgd`` and a loss: 0 and 1 are parameters, 2 and 3 gradients.

    Attributes:
      values: all leaves. Parameters stand for the gradients, which have their types.
      kinds: of those that have layers.
      sources: those of each scan's layers; None for a scan in which no stack learns.
      lacking: the error of each leaf that has none, though it is the state of a stack.
      owners: the index of the stack to which a leaf of the state belongs.
      gradients: the indices of the gradients.
    """

    values: list[Any]  # Arrays, numbers.
    kinds: dict[int, Kind]
    sources: list[Source | None]
    lacking: dict[int, MixedSlicesError]
    owners: dict[int, int]
    gradients: range

    @classmethod
    def of_step(
        cls,
        tx: optax.GradientTransformation,
        arrays: Mapping[Path, Whole],
        sources: list[Source | None],
        args: StepArgs,
        policy: Policy,
    ) -> StepLeaves:
        """The leaves of ``args``, with those that have layers where these can be read.

        A state was made for all parameters, or for those that learn.
        """
        params, state, (learning, rows), extra = args
        owner, expected = params, jax.eval_shape(tx.init, params)
        structure: Any = jax.tree.structure(state)
        if structure != jax.tree.structure(expected):
            owner = learning
            expected = jax.eval_shape(tx.init, learning)
        structures.check_own_state(state, expected)
        structures.check_own_shapes(state, expected)
        states = States(policy, arrays, tx.init, owner)
        found, lacking = states.of_step(params, state, learning, extra)
        positions = {
            path: n for n, (path, _) in enumerate(maps.leaves_with_path(params))
        }
        owned = states.owned(state)
        of_state = enumerate(maps.leaves_with_path(state), len(positions))
        owners = {
            n: positions[owned[path]] for n, (path, _) in of_state if path in owned
        }
        first = len(maps.leaves((params, state)))
        end = first + len(maps.leaves(learning))
        without = [None] * len(jax.tree.leaves(rows))  # Rows have no layers.
        found[end:end] = without
        kinds = {n: kind for n, kind in enumerate(found) if kind}
        values = [
            _stacked(kinds[n]).readable(x) if n in kinds else host.to_device(x)
            for n, x in enumerate(maps.leaves(args))
        ]
        gradients = range(first, end + len(without))
        return cls(values, kinds, sources, lacking, owners, gradients)

    @functools.cached_property
    def replaced(self) -> list[int]:
        """The indices of parameters and state, which the step replaces."""
        before = range(self.gradients.start)
        return [n for n in before if maps.has_gradient(self.values[n])]

    @functools.cached_property
    def inputs(self) -> list[int]:
        """The indices of leaves that have layers, and of gradients."""
        return [
            n
            for n, x in enumerate(self.values)
            if (n in self.kinds or n in self.gradients) and maps.has_gradient(x)
        ]

    @property
    def wholes(self) -> list[ByIndex]:
        """Parameters and state that have layers, for each scan."""
        return [
            {n: self.values[n] for n in self.of(source, self.replaced) if source}
            for source in self.sources
        ]

    def of(self, source: Source | None, indices: Iterable[int]) -> list[int]:
        """Those leaves that have layers of this source; for None those without any."""
        kinds = {n: self.kinds.get(n) for n in indices}
        return [n for n, kind in kinds.items() if (kind and kind.source) == source]

    def as_args(self, grads: ByIndex) -> ByIndex:
        """Gradients, counted among themselves, with their indices."""
        return {self.gradients.start + n: g for n, g in grads.items()}

    def of_layer(self, source: Source, layer: Layer, wholes: ByIndex) -> ByIndex:
        """The leaves of a layer, with its gradients."""
        args = {
            n: _stacked(kind).read(wholes.get(n, self.values[n]), layer.i)
            for n, kind in self.kinds.items()
            if kind.source == source and n not in layer.parts
        }
        return args | layer.parts | self.as_args(layer.grads)

    def read_on(self, wholes: ByIndex, i: jax.Array) -> ByIndex:
        """Whole arrays for the next turn of a loop that only reads them."""
        return {n: _stacked(self.kinds[n]).read_on(x, i)[1] for n, x in wholes.items()}

    def written(self, new: ByIndex, layer: Layer, wholes: ByIndex) -> ByIndex:
        """Whole arrays with a new layer."""
        order = {n: k for k, n in enumerate(layer.grads)}

        def known(n: int) -> int:
            return order.get(self.owners.get(n, n), len(order))

        def write(wholes: ByIndex) -> ByIndex:
            return {
                n: _stacked(self.kinds[n]).write(x, new[n], layer.i)
                for n, x in wholes.items()
            }

        there = {n: x for n, x in wholes.items() if host.is_on_host(x)}
        here = {n: x for n, x in wholes.items() if n not in there}
        return write(here) | tpu.written_in_order(there, known, write)


def _stacked(kind: Kind) -> Stacked:
    """Where an array with slices of this kind has layers."""
    return Stacked(kind.source.length, kind.along.axis)
