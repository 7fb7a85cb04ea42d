"""The forward and the backward pass of a loss that scans stacks of layers.

The forward pass keeps the carry with which each layer begins, and what dense parts
need. The backward pass goes through the parts the other way round. For a scan it is a
loop, too: it computes the gradient of one layer, and applies it. It differentiates only
what depends on trainable parameters, as JAX does. So a batch, frozen leaves and what is
computed from them may go through loops and callbacks that have no derivative.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._jax import compilers, jaxprs
from gradxform._jax.jaxprs import Part
from gradxform._layers import layer_loop, tpu
from gradxform._layers.by_layer import LayerParts, OfLayer
from gradxform._layers.layer_loop import LayerIndices
from gradxform._layers.stacks import Scan, StackedLoss
from gradxform._layers.step_leaves import ByIndex, Layer
from gradxform._numbers import constants

if TYPE_CHECKING:
    from jax.extend.core import Var

# Values, or gradients, by the variables of a loss.
Values: TypeAlias = "dict[Var, Any]"


@dataclasses.dataclass(frozen=True)
class DensePass:
    """The backward pass of a dense part.

    Attributes:
      part: the part.
      learning: the positions of its results that depend on trainable parameters.
      pull: gradients by what it reads, from those by these results.
    """

    part: Part
    learning: Collection[int]
    pull: Callable[[ByIndex], tuple[ByIndex]]

    def run(self, gradients: Values) -> None:
        """Replaces gradients by its results with those by what it reads."""
        cotangents = {k: _taken(gradients, self.part.makes[k]) for k in self.learning}
        (read,) = self.pull(cotangents)
        _add(gradients, ((self.part.reads[k], g) for k, g in read.items()))


@dataclasses.dataclass(frozen=True)
class ScanPass:
    """The backward pass of a scan over stacks.

    Attributes:
      scan: the scan.
      inputs: its inputs; None for stacks.
      carries: the carry with which each layer began.
      active: the positions of its inputs that depend on trainable parameters.
      active_results: those of its results.
    """

    scan: Scan
    inputs: Sequence[jax.Array | None]
    carries: Sequence[jax.Array]
    active: Collection[int]
    active_results: Collection[int]

    def run(
        self, gradients: Values, wholes: ByIndex, each: LayerIndices, apply: OfLayer
    ) -> tuple[ByIndex, LayerParts]:
        """Calls ``apply`` with the gradients of each layer, from the last to the first.

        Replaces gradients by results of the scan with those by its inputs. ``wholes``
        are whole arrays, and ``each`` has the indices of the layers. Returns the whole
        arrays, and what ``apply`` gave for each layer. A layer of parameters on the
        host comes while the one before it is computed.
        """
        if not (self.active_results or self.scan.learning):
            return wholes, {}
        eqn, (num_consts, num_carry) = self.scan.eqn, self.scan.lengths
        start = num_consts + num_carry  # Of the inputs that the scan goes over.
        read = functools.partial(layer_loop.read_layers, self.scan)

        def layer(carried: Any, x: Any) -> tuple[Any, Any]:
            wholes, ahead, stacks, sums, of_carry = carried
            i, following, carry, scanned, of_ys = x
            frozen, stacks = layer_loop.read_on(self.scan, stacks, i)
            there, here = self._stacks(wholes)
            parts = read(here, i) | tpu.now(read, there, i, ahead)
            inputs = [*self.inputs[:num_consts], *carry, *scanned]
            of_results = of_carry | of_ys
            of_parts, of_inputs = self._gradients(parts, frozen, inputs, of_results)
            sums = {k: total + of_inputs[k] for k, total in sums.items()}
            of_carry = {k: of_inputs[num_consts + k] for k in of_carry}
            of_scanned = {k: g for k, g in of_inputs.items() if k >= start}
            of_parts = {
                n: of_parts[n] for n in tpu.backwards(self.scan) if n in of_parts
            }
            wholes, parts_of_layer = apply(Layer(i, parts, of_parts), wholes)
            ahead = tpu.ahead(read, self._stacks(wholes)[0], following)
            return (wholes, ahead, stacks, sums, of_carry), (of_scanned, parts_of_layer)

        stacks = {n: wholes[n] for n in self.scan.stacked if n in self.scan.frozen}
        wholes = {n: x for n, x in wholes.items() if n not in stacks}
        results = {k: _taken(gradients, eqn.outvars[k]) for k in self.active_results}
        of_last = {k: g for k, g in results.items() if k < num_carry}
        of_ys = {k: g for k, g in results.items() if k >= num_carry}
        sums = {
            k: constants.zeros_of_type(jax.typeof(self.inputs[k]))
            for k in self.active
            if k < num_consts
        }
        first, following = layer_loop.one_ahead(each, reverse=not self.scan.is_reverse)
        ahead = tpu.ahead(read, self._stacks(wholes)[0], first)
        (wholes, _, stacks, sums, of_first), (of_scanned, parts_of_layers) = (
            jax.lax.scan(
                layer,
                (wholes, ahead, stacks, sums, of_last),
                (each, following, self.carries, self.inputs[start:], of_ys),
                reverse=not self.scan.is_reverse,
            )
        )
        of_first = {num_consts + k: g for k, g in of_first.items()}
        of_inputs = sums | of_first | of_scanned
        pairs = ((eqn.invars[k], g) for k, g in of_inputs.items())
        _add(gradients, ((x, g) for x, g in pairs if jaxprs.is_variable(x)))
        return wholes | stacks, parts_of_layers

    def _stacks(self, wholes: ByIndex) -> tuple[ByIndex, ByIndex]:
        """The stacks that learn: those on the host, and others."""
        stacks = {n: wholes[n] for n in self.scan.stacked if n in wholes}
        there = {n: x for n, x in stacks.items() if host.is_on_host(x)}
        return there, {n: x for n, x in stacks.items() if n not in there}

    def _gradients(
        self,
        parts: ByIndex,
        frozen: ByIndex,
        inputs: Sequence[jax.Array | None],
        of_results: ByIndex,
    ) -> tuple[ByIndex, ByIndex]:
        """The gradients of one layer, by its parts of stacks and by active inputs."""

        def results(parts: ByIndex, active: ByIndex) -> ByIndex:
            filled = [active.get(k, x) for k, x in enumerate(inputs)]
            layer = self.scan.with_layers(filled, parts | frozen)
            return _divided(self.scan.layer_results(layer), of_results)[0]

        active, _ = _divided(inputs, self.active)
        _, pull = jax.vjp(results, parts, active)
        of_parts, of_active = pull(of_results)
        return of_parts, of_active


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The backward pass of a loss, from its forward pass.

    Attributes:
      passes: those of its parts.
      of_loss: the gradient by the loss.
      leaves: the variables of leaves that are no stacks, by the indices of the leaves.
      each: for each scan, int32[n], the indices of its layers.
    """

    passes: Sequence[DensePass | ScanPass]
    of_loss: Values
    leaves: Mapping[int, Var]
    each: Sequence[LayerIndices]

    def after(self, scalars: list[jax.Array]) -> BackwardPass:
        """The same, but no layer begins before ``scalars`` are known.

        If nothing ordered two passes, the compiler for CPU would copy stacks and state
        for one of them: 1.1 N, or 3.3 N if the first pass reads the state.
        """
        each, _ = compilers.barrier_on_cpu((self.each, scalars))
        return dataclasses.replace(self, each=each)

    def run(
        self, wholes: Sequence[ByIndex], applies: Sequence[OfLayer]
    ) -> tuple[list[ByIndex], ByIndex, LayerParts]:
        """Goes through all parts, from the last to the first.

        There are whole arrays, and a function to call with gradients, for each scan.
        Returns the whole arrays, the gradients of all other leaves, and what the
        functions gave for each layer.
        """
        gradients, wholes = dict(self.of_loss), [*wholes]
        of_layers: LayerParts = {}
        k = len(wholes)
        for part in reversed(self.passes):
            if isinstance(part, DensePass):
                part.run(gradients)
                continue
            k -= 1
            wholes[k], parts = part.run(gradients, wholes[k], self.each[k], applies[k])
            of_layers |= parts
        of_leaves = {n: _taken(gradients, x) for n, x in self.leaves.items()}
        return wholes, of_leaves, of_layers


def forward(
    loss: StackedLoss, leaves: ByIndex, frozen: Collection[int]
) -> tuple[list[jax.Array], list[ByIndex], BackwardPass]:
    """The results of a loss, the stacks of each scan, and its backward pass.

    The stacks are as before. ``frozen`` are the indices of leaves without a gradient.
    """
    jaxpr = loss.closed.jaxpr
    stacked = {n: x for scan in loss.scans for n, x in scan.stacked.items()}
    placed = {n: x.placed(leaves[n]) for n, x in stacked.items()}
    leaves = {**leaves, **placed}
    values: Values = dict(zip(jaxpr.constvars, loss.closed.consts, strict=True))
    values |= {x: leaves[n] for n, x in loss.leaves.items()}
    stacks = {loss.leaves[n] for n in stacked}
    others = {n: x for n, x in loss.leaves.items() if n not in stacked}
    dense = {n: x for n, x in others.items() if n not in frozen}
    active = set(dense.values())
    passes = [
        _dense(part, values, active, stacks)
        if isinstance(part, Part)
        else _scanned(part, values, active, loss.leaves)
        for part in loss.parts
    ]
    results = jaxprs.read(values, jaxpr.outvars)
    one = jax.grad(lambda x: x)(results[0])  # It refuses what is no real scalar.
    of_loss = dict.fromkeys(jaxprs.among(jaxpr.outvars[:1], active).values(), one)
    each = [layer_loop.layer_indices(scan) for scan in loss.scans]
    same = [{n: values[loss.leaves[n]] for n in scan.stacked} for scan in loss.scans]
    return results, same, BackwardPass(passes, of_loss, dense, each)


def _dense(part: Part, values: Values, active: set[Var], stacks: set[Var]) -> DensePass:
    """Adds the results of a dense part to ``values``, what learns to ``active``."""
    read = host.to_device([values[x] for x in part.reads])
    learns, others = _divided(read, jaxprs.among(part.reads, active))
    learning = _with_derivative(lambda *x: part.results(_joined(*x)), learns, others)

    def results(learns: ByIndex) -> tuple[ByIndex, ByIndex]:
        return _divided(part.results(_joined(learns, others)), learning)

    outputs, pull, fixed = jax.vjp(results, learns, has_aux=True)
    values.update(zip(part.makes, _joined(outputs, fixed), strict=True))
    active.update(part.makes[k] for k in learning)
    # Otherwise the compiler might keep a copy of a stack that is read as a whole.
    for x in stacks.intersection(part.reads):
        values[x], _ = compilers.barrier((values[x], (outputs, fixed)))
    return DensePass(part, learning, pull)


def _scanned(
    scan: Scan,
    values: Values,
    active: set[Var],
    leaves: Mapping[int, Var],
) -> ScanPass:
    """Adds the results of a scan to ``values``, what learns to ``active``."""
    inputs = scan.inputs(values)
    results, stacks, carries = layer_loop.over_layers(
        scan,
        inputs,
        {n: values[leaves[n]] for n in scan.stacked},
        scan.layer_results,
        keeps_carries=True,
    )
    values.update(zip(scan.eqn.outvars, results, strict=True))
    values.update((leaves[n], stack) for n, stack in stacks.items())
    depending = jaxprs.among(scan.eqn.invars, active)
    learning, learning_results = _depending_on(scan, depending)
    active.update(scan.eqn.outvars[k] for k in learning_results)
    return ScanPass(scan, inputs, carries, learning, learning_results)


def _depending_on(
    scan: Scan, inputs: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The positions of a scan's inputs that depend on parameters, and of its results.

    ``inputs`` has the positions of those that do. A carry depends on parameters if a
    layer makes it depend on them.
    """
    if not scan.is_needed:
        return frozenset(), frozenset()
    num_consts, num_carry = scan.lengths
    types = scan.eqn.params["jaxpr"].in_avals
    layers = {
        k
        for k, stack in scan.stacks.items()
        if stack.index not in scan.frozen
        and not stack.is_stopped
        and jnp.issubdtype(types[k].dtype, jnp.inexact)
    }
    active = set(inputs)
    while True:
        results = _with_derivative(
            lambda *x: scan.layer_results(_joined(*x)),
            *_divided(types, active | layers),
        )
        carry = {num_consts + k for k in results if k < num_carry}
        if carry <= active:
            ys = {k for k in results if k >= num_carry}
            carry = {k for k in range(num_carry) if num_consts + k in active}
            return frozenset(active), frozenset(carry | ys)
        active |= carry


def _with_derivative(
    f: Callable[..., list[jax.Array]], arguments: Mapping[int, Any], *others: Any
) -> set[int]:
    """The positions of results of ``f`` that JAX differentiates by its arguments.

    ``others`` are further arguments; all may be types.
    """
    found: set[int] = set()

    @jax.custom_jvp
    def seen(results: list[jax.Array]) -> list[jax.Array]:
        return results

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        zero = jax.custom_derivatives.SymbolicZero
        found.update(k for k, t in enumerate(tangents[0]) if not isinstance(t, zero))
        return *primals, *tangents

    seen.defjvp(rule, symbolic_zeros=True)

    def differentiated(arguments: ByIndex, *others: Any) -> Any:
        return jax.vjp(lambda x: seen(f(x, *others)), arguments)[0]

    jax.make_jaxpr(differentiated)(arguments, *others)
    return found


def _divided(
    values: Collection[Any], positions: Collection[int]
) -> tuple[ByIndex, ByIndex]:
    """Values by position: those at these positions, and others."""
    chosen = {k: x for k, x in enumerate(values) if k in positions}
    return chosen, {k: x for k, x in enumerate(values) if k not in positions}


def _joined(values: ByIndex, others: ByIndex) -> list[jax.Array]:
    """All values, in the order of their positions."""
    return [x for _, x in sorted((values | others).items())]


def _taken(gradients: Values, x: Var) -> jax.Array:
    """The gradient by a variable, which is read no more; zeros if there is none."""
    aval: Any = x.aval
    return gradients.pop(x) if x in gradients else constants.zeros_of_type(aval)


def _add(gradients: Values, more: Iterable[tuple[Var, jax.Array]]) -> None:
    for x, g in more:
        gradients[x] = gradients[x] + g if x in gradients else g
