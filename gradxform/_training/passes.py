"""The forward and the backward pass of a loss that scans stacks of layers.

The forward pass keeps the carry with which each layer begins. The backward pass is a
loop, too: it computes the gradient of one layer, and applies it. It differentiates only
what depends on trainable parameters, as JAX does. So a batch, frozen leaves and what is
computed from them may go through loops and callbacks that have no derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._jax import compilers, versions
from gradxform._numbers import constants
from gradxform._training.by_layer import LayerParts, Numbered, OfLayer
from gradxform._training.stacks import ScannedLoss, is_variable


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The backward pass of a loss, from its forward pass.

    Attributes:
      loss: the loss.
      inputs: the inputs of its scan; None for stacks.
      carries: the carry with which each layer began.
      active: the positions of the scan's inputs that depend on trainable parameters.
      of_results: gradients by the scan's results, by their positions.
      of_values: gradients by values before the scan, through equations after it.
      pull_before: gradients by leaves, from all gradients by values before the scan.
      each: int32[n], the numbers of the layers.
    """

    loss: ScannedLoss
    inputs: list[jax.Array | None]
    carries: list[jax.Array]
    active: frozenset[int]
    of_results: Numbered
    of_values: Numbered
    pull_before: Callable[[Numbered], tuple[Numbered]]
    each: jax.Array

    def after(self, known: list[jax.Array]) -> BackwardPass:
        """The same, but no layer begins before ``known`` are known.

        If nothing ordered two passes, the compiler for CPU would copy stacks and state
        for one of them: 1.1 N, or 3.3 N if the first pass reads the state.
        """
        each, _ = compilers.barrier((self.each, known))
        return dataclasses.replace(self, each=each)

    def run(
        self, wholes: Numbered, apply: OfLayer
    ) -> tuple[Numbered, Numbered, LayerParts]:
        """Calls ``apply`` with the gradients of each layer, from the last to the first.

        Returns the whole arrays, the gradients of all other leaves, and what ``apply``
        gave for each layer.
        """
        loss = self.loss
        num_consts, num_carry = versions.scan_lengths(loss.scan)
        start = num_consts + num_carry  # Of the inputs that the scan goes over.

        def layer(carried: Any, x: Any) -> tuple[Any, Any]:
            (wholes, sums, of_carry), (i, carry, scanned, of_ys) = carried, x
            parts = {
                n: host.read_layer(wholes[n], i, loss.length, axis)
                for n, axis in loss.axes.items()
            }
            inputs = [*self.inputs[:num_consts], *carry, *scanned]
            of_parts, of_inputs = self._gradients(parts, inputs, of_carry | of_ys)
            sums = {k: total + of_inputs[k] for k, total in sums.items()}
            of_carry = {k: of_inputs[num_consts + k] for k in of_carry}
            of_scanned = {k: g for k, g in of_inputs.items() if k >= start}
            wholes, given = apply(i, wholes, of_parts)
            return (wholes, sums, of_carry), (of_scanned, given)

        sums = {
            k: constants.zeros_of_type(jax.typeof(self.inputs[k]))
            for k in self.active
            if k < num_consts
        }
        of_last = {k: g for k, g in self.of_results.items() if k < num_carry}
        of_ys = {k: g for k, g in self.of_results.items() if k >= num_carry}
        (wholes, sums, of_first), (of_scanned, given) = jax.lax.scan(
            layer,
            (wholes, sums, of_last),
            (self.each, self.carries, self.inputs[start:], of_ys),
            reverse=not loss.is_reverse,
        )
        of_first = {num_consts + k: g for k, g in of_first.items()}
        return wholes, self._of_leaves(sums | of_first | of_scanned), given

    def _gradients(
        self, parts: Numbered, inputs: Sequence[jax.Array | None], of_results: Numbered
    ) -> tuple[Numbered, Numbered]:
        """The gradients of one layer, by its parts of stacks and by active inputs."""

        def results(parts: Numbered, active: Numbered) -> Numbered:
            given = [active.get(k, x) for k, x in enumerate(inputs)]
            made = self.loss.layer_results(self.loss.with_layers(given, parts))
            return _divided(made, of_results)[0]

        active, _ = _divided(inputs, self.active)
        _, pull = jax.vjp(results, parts, active)
        of_parts, of_active = pull(of_results)
        return of_parts, of_active

    def _of_leaves(self, of_inputs: Numbered) -> Numbered:
        """The gradients of leaves that are no stacks, with those by scan inputs."""
        positions = {x: k for k, x in enumerate(self.loss.read_later)}
        total = dict(self.of_values)
        for k, g in of_inputs.items():
            x = self.loss.scan.invars[k]
            if is_variable(x) and positions[x] in total:
                total[positions[x]] += g
        return self.pull_before(total)[0]


def forward(
    loss: ScannedLoss, leaves: Numbered
) -> tuple[list[jax.Array], Numbered, BackwardPass]:
    """The results of a loss, its stacks, which are as before, and its backward pass."""
    others = {n: p for n, p in leaves.items() if n not in loss.axes}
    learns_before = _with_derivative(loss.values_before, others)

    def before(others: Numbered) -> tuple[Numbered, Numbered]:
        return _divided(loss.values_before(others), learns_before)

    values, pull_before, fixed = jax.vjp(before, others, has_aux=True)
    inputs = loss.scan_inputs(_joined(values, fixed))
    active, active_results = _depending_on(loss, learns_before)
    stacks, carries, scan_results = _scan(loss, inputs, leaves)
    made, fixed_made = _divided(scan_results, active_results)

    def after(made: Numbered, values: Numbered) -> tuple[jax.Array, list[jax.Array]]:
        given = _joined(values, fixed), _joined(made, fixed_made)
        results = loss.loss_results(*given)
        return results[0], results

    differentiated = jax.value_and_grad(after, (0, 1), has_aux=True)
    (_, results), (of_made, of_values) = differentiated(made, values)
    each = jnp.arange(loss.length)
    backward = BackwardPass(
        loss, inputs, carries, active, of_made, of_values, pull_before, each
    )
    return results, stacks, backward


def _scan(
    loss: ScannedLoss, inputs: list[jax.Array | None], leaves: Numbered
) -> tuple[Numbered, list[jax.Array], list[jax.Array]]:
    """The stacks, the carry with which each layer begins, and the scan's results."""
    num_consts, num_carry = versions.scan_lengths(loss.scan)
    start = num_consts + num_carry  # Of the inputs that the scan goes over.

    def layer(carried: Any, x: Any) -> tuple[Any, Any]:
        (carry, stacks), (i, scanned) = carried, x
        read = {
            n: compilers.read_layer(stacks[n], i, loss.length, axis)
            for n, axis in loss.axes.items()
        }
        parts = {n: part for n, (part, _) in read.items()}
        given = loss.with_layers([*inputs[:num_consts], *carry, *scanned], parts)
        results = loss.layer_results(given)
        stacks = {n: stack for n, (_, stack) in read.items()}
        return (results[:num_carry], stacks), (carry, results[num_carry:])

    (last, stacks), (carries, ys) = jax.lax.scan(
        layer,
        (inputs[num_consts:start], {n: leaves[n] for n in loss.axes}),
        (jnp.arange(loss.length), inputs[start:]),
        reverse=loss.is_reverse,
    )
    return stacks, carries, [*last, *ys]


def _depending_on(
    loss: ScannedLoss, before: Collection[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The positions of the scan's inputs that depend on parameters, and of its results.

    ``before`` has the positions of the values before the scan that do. A carry depends
    on parameters if a layer makes it depend on them.
    """
    num_consts, num_carry = versions.scan_lengths(loss.scan)
    learning = [loss.read_later[k] for k in before]
    body = loss.scan.params["jaxpr"]
    types = dict(enumerate(body.in_avals))
    layers = {
        k
        for k, stack in enumerate(loss.scanned_stacks)
        if stack and jnp.issubdtype(types[k].dtype, jnp.inexact)
    }
    active = {k for k, x in enumerate(loss.scan.invars) if x in learning}
    while True:
        given, others = _divided(types.values(), active | layers)
        results = _with_derivative(
            lambda given, others: loss.layer_results(_joined(given, others)),
            given,
            others,
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

    def differentiated(arguments: Numbered, *others: Any) -> Any:
        return jax.vjp(lambda x: seen(f(x, *others)), arguments)[0]

    jax.make_jaxpr(differentiated)(arguments, *others)
    return found


def _divided(
    values: Collection[Any], positions: Collection[int]
) -> tuple[Numbered, Numbered]:
    """Values by position: those at these positions, and others."""
    chosen = {k: x for k, x in enumerate(values) if k in positions}
    return chosen, {k: x for k, x in enumerate(values) if k not in positions}


def _joined(values: Numbered, others: Numbered) -> list[jax.Array]:
    """All values, in the order of their positions."""
    return [x for _, x in sorted((values | others).items())]
