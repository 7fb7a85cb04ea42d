"""The forward and the backward pass of a loss that scans stacks of layers.

The loss is evaluated under ``jax.vjp``. Each scan over stacks is a ``jax.custom_vjp``
there. Its forward pass keeps the carry with which each layer begins. Its backward pass
goes from the last layer to the first, computes a layer's gradient, and applies it. JAX
does all else. It differentiates only what depends on trainable parameters, so a batch,
frozen leaves and what is computed from them may go through loops and callbacks that
have no derivative.

A stack may learn in several scans. The backward pass goes through them from the last to
the first one, and all but the first one add to an array of the stack's gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._jax import compilers, jaxprs
from gradxform._jax.programs import InnerProgram
from gradxform._jax.versions import Op
from gradxform._layers import layer_loop, tpu
from gradxform._layers.by_layer import Contributions, OfLayer
from gradxform._layers.forward import Forward, Operand, Use
from gradxform._layers.layer_loop import LayerIndices
from gradxform._layers.stacks import Scan, StackVariable
from gradxform._layers.step_leaves import Layer
from gradxform._numbers import constants
from gradxform._trees.types import ByIndex

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn


@dataclasses.dataclass(eq=False)
class ScanPass:
    """A scan over stacks, whose backward pass applies the gradients of its layers.

    It runs while JAX differentiates the loss, and keeps what it changes.

    Attributes:
      scan: the scan.
      learning: the indices of its stacks that may get a gradient from it.
      stacks: all stacks, for all scans.
      kept: the gradients of stacks, as far as scans after it have given them.
      each: int32[n], the indices of its layers.
      applied: those of ``learning`` whose gradient it applies: the first scan does.
      is_needed: whether the loss has a derivative by its results.
      wholes: whole arrays, which the backward pass replaces.
      apply: what it does with a layer; None: it only finds out ``is_needed``.
      contributions: what ``apply`` gave for each layer.
    """

    scan: Scan
    learning: set[int]
    stacks: ByIndex
    kept: ByIndex
    each: LayerIndices
    applied: set[int] = dataclasses.field(default_factory=set)
    is_needed: bool = True
    wholes: ByIndex = dataclasses.field(default_factory=dict)
    apply: OfLayer | None = None
    contributions: Contributions = dataclasses.field(default_factory=dict)

    def results(
        self, inputs: ByIndex, always: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """The results of the scan, from its inputs but stacks, and ``always``.

        The loss has a derivative by ``always``, so the backward pass runs whatever else
        learns.
        """
        active: list[int] = []
        learning_results: list[int] = []

        def forward(inputs: Any, always: Any) -> Any:
            perturbed = {k for k, x in inputs.items() if x.perturbed}
            active[:], learning_results[:] = self._depending_on(perturbed)
            values = {k: x.value for k, x in inputs.items()}
            results, read, carries = layer_loop.over_layers(
                self.scan,
                [values.get(k) for k in range(len(self.scan.eqn.invars))],
                {n: self.stacks[n] for n in self.scan.stacked},
                self.scan.layer_results,
                keeps_carries=True,
            )
            self.stacks.update(read)  # Whoever reads them later does so after it.
            return (results, always.value), (values, carries)

        def backward(kept: Any, cotangents: Any) -> Any:
            of_results, of_always = cotangents
            zero = jax.custom_derivatives.SymbolicZero
            self.is_needed = not all(
                isinstance(of_results[k], zero) for k in learning_results
            )
            of_results = {
                k: _array(of_results[k]) for k in learning_results if self.is_needed
            }
            inputs, carries = kept
            found = self._backward(
                inputs, carries, active if self.is_needed else (), of_results
            )
            return {k: found.get(k) for k in inputs}, _array(of_always)

        @jax.custom_vjp
        def f(inputs: Any, always: Any) -> Any:
            raise NotImplementedError  # The loss is always differentiated.

        f.defvjp(forward, backward, symbolic_zeros=True)
        results, always = f(inputs, always)
        # JAX takes each result for one that depends on parameters.
        stop = jax.lax.stop_gradient
        return [
            x if k in learning_results else stop(x) for k, x in enumerate(results)
        ], always

    def _backward(
        self,
        inputs: Mapping[int, jax.Array],
        carries: Sequence[jax.Array],
        active: Collection[int],
        of_results: ByIndex,
    ) -> ByIndex:
        """Calls ``apply`` with the gradients of each layer, from the last to the first.

        Returns the gradients by active inputs. A layer of parameters on the host comes
        while the one before it is computed.
        """
        scan, apply, (num_consts, num_carry) = self.scan, self.apply, self.scan.lengths
        if apply is None:
            return {k: jnp.zeros_like(inputs[k]) for k in active}
        if not (of_results or self.learning):
            return {}
        start = num_consts + num_carry  # Of the inputs that the scan goes over.
        read = functools.partial(layer_loop.read_layers, scan)
        operands = [inputs.get(k) for k in range(len(scan.eqn.invars))]
        known = {n: x for n, x in self.kept.items() if n in self.learning}

        def layer(carried: Any, x: Any) -> tuple[Any, Any]:
            wholes, ahead, others, kept, sums, of_carry = carried
            i, following, carry, scanned, of_ys = x
            of_others, others = layer_loop.read_on(scan, others, i)
            there, here = self._stacks(wholes)
            parts = read(here, i) | tpu.now(read, there, i, ahead)
            given = [*operands[:num_consts], *carry, *scanned]
            of_parts, of_inputs = self._gradients(
                parts | of_others, given, active, of_carry | of_ys
            )
            sums = {k: total + of_inputs[k] for k, total in sums.items()}
            of_carry = {k: of_inputs[num_consts + k] for k in of_carry}
            of_scanned = {k: g for k, g in of_inputs.items() if k >= start}
            before = read({n: kept.get(n, x) for n, x in known.items()}, i)
            of_parts |= {n: of_parts[n] + g for n, g in before.items()}
            kept = self._written(kept, of_parts, i)
            in_order = [n for n in tpu.backwards(scan) if n in parts]
            of_layer = {n: of_parts[n] for n in in_order}
            wholes, contributed = apply(Layer(i, parts, of_layer), wholes)
            ahead = tpu.ahead(read, self._stacks(wholes)[0], following)
            carried = wholes, ahead, others, kept, sums, of_carry
            return carried, (of_scanned, contributed)

        stacks = {n: self.stacks[n] for n in scan.stacked}
        others = {n: x for n, x in stacks.items() if n not in self.applied}
        wholes = self.wholes | {n: stacks[n] for n in self.applied}
        kept = {n: self._sum(n) for n in self.learning - self.applied}
        of_last = {k: g for k, g in of_results.items() if k < num_carry}
        of_ys = {k: g for k, g in of_results.items() if k >= num_carry}
        sums = {
            k: constants.zeros_of_type(jax.typeof(inputs[k]))
            for k in active
            if k < num_consts
        }
        first, following = layer_loop.one_ahead(self.each, reverse=not scan.is_reverse)
        ahead = tpu.ahead(read, self._stacks(wholes)[0], first)
        last, (of_scanned, self.contributions) = jax.lax.scan(
            layer,
            (wholes, ahead, others, kept, sums, of_last),
            (self.each, following, carries, operands[start:], of_ys),
            reverse=not scan.is_reverse,
        )
        self.wholes, _, others, kept, sums, of_first = last
        self.stacks.update(others)
        self.kept.update(kept)
        return sums | {num_consts + k: g for k, g in of_first.items()} | of_scanned

    def _stacks(self, wholes: ByIndex) -> tuple[ByIndex, ByIndex]:
        """The stacks whose gradients are applied: those on the host, and others."""
        stacks = {n: wholes[n] for n in self.scan.stacked if n in self.applied}
        there = {n: x for n, x in stacks.items() if host.is_on_host(x)}
        return there, {n: x for n, x in stacks.items() if n not in there}

    def _sum(self, n: int) -> jax.Array:
        """The gradient of a stack so far; zeros if this scan is the last one."""
        if n in self.kept:
            return self.kept[n]
        its: Any = jax.typeof(self.stacks[n]).update(memory_space=host.DEVICE)
        # Otherwise zeros of a first pass would be kept for the second one: 1 N.
        zero, _ = compilers.barrier((jnp.zeros((), its.dtype), self.each))
        return constants.zeros_of_type(its) + zero

    def _written(self, kept: ByIndex, of_parts: ByIndex, i: jax.Array) -> ByIndex:
        """Gradients of stacks, with those of layer ``i``."""
        at = self.scan.stacked
        return {n: at[n].write(x, of_parts[n], i) for n, x in kept.items()}

    def _gradients(
        self,
        parts: ByIndex,
        inputs: Sequence[jax.Array | None],
        active: Collection[int],
        of_results: ByIndex,
    ) -> tuple[ByIndex, ByIndex]:
        """The gradients of one layer, by its parts of stacks and by active inputs."""
        learning = {n: x for n, x in parts.items() if n in self.learning}

        def results(learning: ByIndex, active: ByIndex) -> ByIndex:
            filled = [active.get(k, x) for k, x in enumerate(inputs)]
            layer = self.scan.with_layers(filled, parts | learning)
            found = self.scan.layer_results(layer)
            return {k: found[k] for k in of_results}

        _, pull = jax.vjp(results, learning, {k: inputs[k] for k in active})
        of_parts, of_active = pull(of_results)
        return of_parts, of_active

    def _depending_on(self, active: set[int]) -> tuple[list[int], list[int]]:
        """The positions of inputs that depend on parameters, and of results.

        ``active`` has the positions of those that do. A carry depends on parameters if
        a layer makes it depend on them.
        """
        scan, (num_consts, num_carry) = self.scan, self.scan.lengths
        types = dict(enumerate(scan.eqn.params["jaxpr"].in_avals))
        layers = {
            k
            for k, stack in scan.stacks.items()
            if stack.index in self.learning and stack.has_derivative
        }

        def joined(moved: ByIndex, others: ByIndex) -> list[jax.Array]:
            return self.scan.layer_results([(moved | others)[k] for k in types])

        while True:
            moved = active | layers
            others = {k: t for k, t in types.items() if k not in moved}
            results = _with_derivative(
                joined, {k: types[k] for k in sorted(moved)}, others
            )
            carry = {num_consts + k for k in results if k < num_carry}
            if carry <= active:
                ys = [k for k in results if k >= num_carry]
                of_carry = [k for k in range(num_carry) if num_consts + k in active]
                return sorted(active), sorted([*of_carry, *ys])
            active = active | carry


def _array(cotangent: Any) -> jax.Array:
    """A cotangent as an array."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return constants.zeros_of_type(cotangent.aval)  # type: ignore[arg-type]  # No token.
    return cotangent


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


@dataclasses.dataclass(eq=False)
class LossReader:
    """Reads stacks while JAX differentiates the loss.

    Attributes:
      arrays: the stacks, as a loop has left them that reads them.
      frozen: the indices of stacks that get no gradient.
      always: goes through all that reads stacks; see :meth:`ScanPass.results`.
      passes: the scans over stacks, in their order.
      read_whole: the indices of stacks that something else reads.
      is_unsure: whether that may give the loss a derivative.
      kept: the gradients of stacks so far; see :class:`ScanPass`.
    """

    arrays: ByIndex
    frozen: Collection[int]
    always: jax.Array
    passes: list[ScanPass] = dataclasses.field(default_factory=list)
    read_whole: set[int] = dataclasses.field(default_factory=set)
    is_unsure: bool = False
    kept: ByIndex = dataclasses.field(default_factory=dict)

    def by_layer(self, stack: StackVariable, scan: JaxprEqn) -> bool:
        """Not with an io_callback: a backward pass would call it once more."""
        del stack
        return not jaxprs.calls_host(scan)

    def inside(self, forward: Forward, eqn: JaxprEqn, inputs: list[Operand]) -> None:
        """JAX differentiates loops, conditionals and custom derivatives as they are."""

    def scan(
        self, forward: Forward, scan: Scan, inputs: list[Operand]
    ) -> list[Operand] | None:
        """The results of a scan, which is one more pass."""
        if not scan.stacks:
            return None
        for n, stacked in scan.stacked.items():
            self.arrays[n] = stacked.readable(self.arrays[n])
        learning = {x.index for x in scan.stacks.values() if self._learns(x)}
        each = layer_loop.layer_indices(scan)
        own = ScanPass(scan, learning, self.arrays, self.kept, each)
        self.passes.append(own)
        others = {k: x for k, x in enumerate(inputs) if k not in scan.stacks}
        arrays = forward.arrays(scan.eqn, others)
        results, self.always = own.results(arrays, self.always)
        return [*results]

    def whole(self, stack: StackVariable, use: Use | None) -> jax.Array:
        """All of a variable, by which the loss must have no derivative.

        Raises:
          ValueError: the loss returns it. If it has a derivative, its backward pass
            raises the same error.
        """
        if use is None:
            stack.refuse("the loss returns it")
        self.read_whole.add(stack.index)
        array = stack.whole(self.arrays[stack.index])
        if not self._learns(stack):
            return array
        if use.is_scanned and jaxprs.calls_host(use.eqn):
            its = jaxprs.with_line(use.eqn)
            stack.refuse(f"{its} has an io_callback, which would be called twice")
        self.is_unsure = True

        @jax.custom_vjp
        def f(array: jax.Array, always: jax.Array) -> Any:
            return array, always

        def backward(_: None, cotangents: Any) -> Any:
            of_array, of_always = cotangents
            if not isinstance(of_array, jax.custom_derivatives.SymbolicZero):
                stack.refuse(_why(stack, use, self.arrays[stack.index]))
            return None, _array(of_always)

        f.defvjp(
            lambda array, always: ((array.value, always.value), None),
            backward,
            symbolic_zeros=True,
        )
        array, self.always = f(array, self.always)
        return array

    def _learns(self, stack: StackVariable) -> bool:
        return stack.index not in self.frozen and stack.has_derivative


def _why(stack: StackVariable, use: Use, array: jax.Array) -> str:
    """Why an equation cannot read a stack by layers, for messages."""
    eqn = use.eqn
    name, where = jaxprs.name_of(eqn), jaxprs.with_line(eqn)
    if use.is_scanned:
        if not (length := eqn.params["length"]):
            return "it has no layer"
        if (axis := stack.axis(length)) is None:
            names = [jaxprs.name_of(x) for x in stack.equations]
            where = jaxprs.with_line(stack.equations[names.index(Op.RESHAPE)])
            return f"it is used by {where}"
        if cut := jax.typeof(array).sharding.spec[axis]:
            return f"its layers are sharded over {cut!r}"
        return f"{where} goes over it along two axes"
    is_loop = name in (Op.SCAN, Op.WHILE)
    more = ", a loop that reads it in each turn" if is_loop else ""
    return f"it is used by {where}{more}"


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """The backward pass of a loss, from its forward pass.

    Attributes:
      reader: has read its stacks.
      pull: the gradients of leaves that are no stacks, by their indices.
    """

    reader: LossReader
    pull: Callable[[], ByIndex]

    @property
    def passes(self) -> list[ScanPass]:
        """The scans over stacks."""
        return self.reader.passes

    @property
    def stacks(self) -> list[ByIndex]:
        """The stacks of each scan, as they were before the loss."""
        arrays = self.reader.arrays
        return [{n: arrays[n] for n in own.scan.stacked} for own in self.passes]

    def after(self, scalars: list[jax.Array]) -> BackwardPass:
        """The same, but no layer begins before ``scalars`` are known.

        If nothing ordered two passes, the compiler for CPU would copy stacks and state
        for one of them: 1.1 N, or 3.3 N if the first pass reads the state.
        """
        each = [own.each for own in self.passes]
        each, _ = compilers.barrier_on_cpu((each, scalars))
        for own, indices in zip(self.passes, each, strict=True):
            own.each = indices
        return self

    def run(
        self, wholes: Sequence[ByIndex], applies: Sequence[OfLayer]
    ) -> tuple[list[ByIndex], ByIndex, Contributions]:
        """Goes through the loss, from its end to its beginning.

        There are whole arrays, and a function to call with gradients, for each scan.
        Returns the whole arrays, the gradients of all other leaves, and what the
        functions gave for each layer.
        """
        arrays, kept = self.reader.arrays, self.reader.kept
        kept.clear()
        triples = [*zip(self.passes, wholes, applies, strict=True)]
        for own, given, apply in reversed(triples):
            arrays.update({n: given[n] for n in own.scan.stacked})
            own.wholes = {n: x for n, x in given.items() if n not in own.scan.stacked}
            own.apply, own.contributions = apply, {}
        of_leaves = self.pull()
        of_layers: Contributions = {}
        for own in self.passes:
            of_layers |= own.contributions
        found = [
            {n: arrays[n] for n in own.scan.stacked} | own.wholes for own in self.passes
        ]
        return found, of_leaves, of_layers


def forward(
    closed: ClosedJaxpr,
    leaves: ByIndex,
    paths: Mapping[int, str],
    frozen: Collection[int],
) -> tuple[list[jax.Array], BackwardPass]:
    """The results of a loss, and its backward pass.

    ``leaves`` are the inputs of its jaxpr, by their indices. Those in ``paths`` are
    stacks, and those in ``frozen`` get no gradient.

    Raises:
      ValueError: a stack is read in another way than by scans over its layers.
    """
    stacks = {n: StackVariable(n, path) for n, path in paths.items()}
    dense = host.to_device({n: x for n, x in leaves.items() if n not in paths})
    always = jnp.zeros(())
    reader = LossReader({n: leaves[n] for n in stacks}, frozen, always)

    def loss(dense: ByIndex, inside: jax.Array) -> Any:
        reader.always = inside
        inputs = [stacks[n] if n in stacks else dense[n] for n in leaves]
        program = InnerProgram.needed(closed)
        results = Forward(reader).results(program, inputs)
        inside, reader.always = reader.always, always
        return (results[0], inside), results

    _, pull, results = jax.vjp(loss, dense, always, has_aux=True)
    one = jax.grad(lambda x: x)(results[0])  # It refuses what is no real scalar.
    # Otherwise the compiler might keep a copy of a stack that is read as a whole.
    for n in reader.read_whole:
        reader.arrays[n], _ = compilers.barrier((reader.arrays[n], results))
    backward = BackwardPass(reader, lambda: pull((one, always))[0])
    _share(backward, [x for n, x in stacks.items() if n not in frozen])
    return results, backward


def _share(backward: BackwardPass, stacks: Sequence[StackVariable]) -> None:
    """Says which scan applies the gradient of each stack: the first that has one.

    Raises:
      ValueError: there is none, or they do not go over the same layers, or something
        else gives the stack a gradient.
    """
    passes = backward.passes
    learning = [n for own in passes for n in own.learning]
    if backward.reader.is_unsure or len(learning) > len({*learning}):
        with jax.disable_jit(False):
            jax.eval_shape(backward.pull)  # Each pass finds out whether it is needed.
    for stack in stacks:
        n = stack.index
        readers = [own for own in passes if n in own.scan.stacked]
        learns = [own for own in readers if n in own.learning and own.is_needed]
        learns = learns or readers[-1:]  # Its gradient is zero.
        if not learns:
            stack.refuse("no scan goes over it")
        first, *others = learns
        for own in others:
            if own.scan.stacked[n] != first.scan.stacked[n]:
                its, before = (
                    jaxprs.with_line(own.scan.eqn),
                    jaxprs.with_line(first.scan.eqn),
                )
                stack.refuse(f"{its} goes over it along another axis than {before}")
        for own in readers:
            own.learning.discard(n)
        for own in learns:
            own.learning.add(n)
        first.applied.add(n)
