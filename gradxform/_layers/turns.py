"""Stacks inside of loops and conditionals that JAX does not differentiate.

A function that samples goes over the layers once in each turn of a loop. A stack waits
inside of the loop, too. A loop may also carry a stack, as a cache of keys and values: a
scan inside of it reads a layer, and gives back a new one. Then the layer is written
into the array, which stays in its memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from gradxform._jax import jaxprs, programs
from gradxform._jax.programs import InnerProgram, Runs
from gradxform._jax.versions import Op
from gradxform._layers import layer_loop
from gradxform._layers.forward import Forward, Operand, Use
from gradxform._layers.stacks import Scan, StackVariable
from gradxform._numbers import arithmetic
from gradxform._slices import rules
from gradxform._slices.rules import Along, shape_of
from gradxform._slices.slices import (
    Evaluator,
    Kind,
    MixedSlicesError,
    Policy,
    Slices,
    Source,
)
from gradxform._trees.types import ByIndex

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var


@dataclasses.dataclass(frozen=True)
class EvaluationReader:
    """Reads stacks, and writes those that a loop carries.

    Attributes:
      arrays: the stacks, by their indices. What is written gets an index of its own, so
        the old one stays as it was.
      indices: gives indices.
      caches: the indices of those that a loop carries, or has carried.
      chosen: bool[B], the examples of a batch that have not left a loop. They alone are
        written.
      scanned: the paths of stacks that came by layers so far.
      uses: the first operand for which a stack came whole, by its path.
    """

    arrays: ByIndex
    indices: Iterator[int]
    caches: set[int] = dataclasses.field(default_factory=set)
    chosen: jax.Array | None = None
    scanned: set[str] = dataclasses.field(default_factory=set)
    uses: dict[str, Use | None] = dataclasses.field(default_factory=dict)

    def by_layer(self, stack: StackVariable, scan: JaxprEqn) -> bool:
        """Always: nothing runs twice."""
        del stack, scan
        return True

    def whole(self, stack: StackVariable, use: Use | None) -> jax.Array:
        """All of a variable, on the device; a result that is a stack stays there."""
        array = self.arrays[stack.index]
        if use is None and stack.is_itself:
            return array
        self.uses.setdefault(stack.path, use)
        return stack.whole(array)

    def scan(
        self, forward: Forward, scan: Scan, inputs: list[Operand]
    ) -> list[Operand]:
        """The results of a scan over stacks, or of one that reads stacks inside."""
        eqn, (num_consts, num_carry) = scan.eqn, scan.lengths
        body = programs.program(eqn)
        first = dict(enumerate(inputs[: num_consts + num_carry]))
        waiting = {k: x for k, x in first.items() if isinstance(x, StackVariable)}
        carried = {k: x for k, x in waiting.items() if k >= num_consts}
        others = {
            k: x for k, x in enumerate(inputs) if k not in {*scan.stacks, *waiting}
        }
        arrays = forward.arrays(eqn, others) | self._to_carry(carried)

        def layer_results(operands: list[Any]) -> list[jax.Array]:
            carry = {k: operands[k] for k in carried}
            inside, caches = self._entered(carried, carry)
            given = [(waiting | caches).get(k, x) for k, x in enumerate(operands)]
            results = inside.run(body, given)
            old = {k - num_consts: x for k, x in carry.items()}
            return _left(inside, results, old)

        stacks = {n: x.readable(self.arrays[n]) for n, x in scan.stacked.items()}
        self.scanned.update(x.path for x in scan.stacks.values())
        given_back = self._given_back(scan)
        results, stacks, _ = layer_loop.over_layers(
            scan,
            [arrays.get(k) for k in range(len(inputs))],
            stacks,
            layer_results,
            given_back=given_back,
            chosen=self.chosen,
        )
        remaining = iter(results)
        return [
            self._cache(given_back[k], stacks[given_back[k].index])
            if k in given_back
            else self._cached(carried.get(k + num_consts), next(remaining))
            for k in range(len(eqn.outvars))
        ]

    def inside(
        self, forward: Forward, eqn: JaxprEqn, inputs: list[Operand]
    ) -> list[Operand] | None:
        """Those of other operations that run programs, or that change a cache."""
        name = jaxprs.name_of(eqn)
        if programs.OPERATIONS.get(name) is Runs.DERIVED:
            return forward.run(programs.program(eqn), inputs)
        if name == Op.WHILE:
            return self._while(forward, eqn, inputs)
        if name == Op.COND and not eqn.params.get("branches_platforms"):
            return [*self._cond(forward, eqn, inputs)]
        new = self._changed(eqn, inputs)
        return None if new is None else [new]

    def _while(
        self, forward: Forward, eqn: JaxprEqn, inputs: list[Operand]
    ) -> list[Operand]:
        num_ends = eqn.params["cond_nconsts"]
        start = num_ends + eqn.params["body_nconsts"]
        ends = InnerProgram.of(eqn.params["cond_jaxpr"])
        body = InnerProgram.of(eqn.params["body_jaxpr"])
        carry = dict(enumerate(inputs[start:], start))
        carried = {k: x for k, x in carry.items() if isinstance(x, StackVariable)}
        others = {k: x for k, x in carry.items() if k not in carried}
        first = forward.arrays(eqn, others) | self._to_carry(carried)
        is_batch = bool(shape_of(ends.jaxpr.outvars[0]))

        def goes_on(arrays: ByIndex) -> jax.Array:
            inside, caches = self._entered(carried, arrays)
            consts = inputs[:num_ends]
            return inside.results(ends, [*consts, *(arrays | caches).values()])[0]

        def turn(arrays: ByIndex) -> ByIndex:
            # Of a batch, each example that has left the loop stays as it is.
            chosen = goes_on(arrays) if is_batch else None
            inside, caches = self._entered(carried, arrays, chosen)
            consts = inputs[num_ends:start]
            results = inside.run(body, [*consts, *(arrays | caches).values()])
            old = {k - start: arrays[k] for k in carried}
            new = dict(enumerate(_left(inside, results, old), start))
            if chosen is not None:
                new |= {k: _where(chosen, new[k], arrays[k]) for k in others}
            return new

        last = jax.lax.while_loop(
            lambda x: jnp.any(goes_on(x)), turn, {k: first[k] for k in carry}
        )
        return [self._cached(carried.get(k), x) for k, x in last.items()]

    def _cond(
        self, forward: Forward, eqn: JaxprEqn, inputs: list[Operand]
    ) -> list[jax.Array]:
        index, *operands = inputs

        def branch(program: InnerProgram) -> list[jax.Array]:
            return Forward(self).results(program, operands)

        branches = map(InnerProgram.of, eqn.params["branches"])
        sides = [functools.partial(branch, program) for program in branches]
        (index,) = forward.arrays(eqn, {0: index}).values()
        return jax.lax.switch(index, sides)

    def _to_carry(self, stacks: Mapping[int, StackVariable]) -> ByIndex:
        """The arrays of stacks for a loop: where they lie, if they are as they came."""
        return {
            k: self.arrays[x.index] if x.is_itself else x.whole(self.arrays[x.index])
            for k, x in stacks.items()
        }

    def _entered(
        self,
        carried: Mapping[int, StackVariable],
        arrays: Mapping[int, jax.Array],
        chosen: jax.Array | None = None,
    ) -> tuple[Forward, dict[int, StackVariable]]:
        """What evaluates a turn of a loop, and the stacks that the loop carries."""
        new = {k: StackVariable(next(self.indices), x.path) for k, x in carried.items()}
        reader = dataclasses.replace(
            self,
            arrays=self.arrays | {x.index: arrays[k] for k, x in new.items()},
            caches=self.caches | {x.index for x in new.values()},
            chosen=self.chosen if chosen is None else chosen,
        )
        return Forward(reader), new

    def _cache(self, like: StackVariable, array: jax.Array) -> StackVariable:
        """A variable with the values of another array."""
        new = dataclasses.replace(like, index=next(self.indices))
        self.arrays[new.index] = array
        self.caches.add(new.index)
        return new

    def _cached(self, before: StackVariable | None, array: jax.Array) -> Operand:
        """A result of a loop: a stack again, if it was one before."""
        if before is None:
            return array
        return self._cache(StackVariable(before.index, before.path), array)

    def _given_back(self, scan: Scan) -> dict[int, StackVariable]:
        """The results of a scan that are written into caches it goes over."""
        body, (_, num_carry) = programs.program(scan.eqn).jaxpr, scan.lengths
        left = {
            k: x
            for k, x in scan.stacks.items()
            if x.index in self.caches and x.order is not None
        }
        found: dict[int, StackVariable] = {}
        for n, result in enumerate(body.outvars[num_carry:], num_carry):
            k = next((k for k in left if _are_alike(body.invars[k], result)), None)
            if k is not None:
                found[n] = left.pop(k)
        return found

    def _changed(self, eqn: JaxprEqn, inputs: list[Operand]) -> StackVariable | None:
        """A cache that an operation changes layer by layer, as one that reorders beams.

        None if it is none, or if the operation mixes its layers.
        """
        stacks = {k: x for k, x in enumerate(inputs) if isinstance(x, StackVariable)}
        if len(stacks) > 1 or len(eqn.outvars) != 1:
            return None
        ((k, x),) = stacks.items()
        is_cache = x.index in self.caches and x.order is not None
        if not (is_cache and _are_alike(eqn.invars[k], eqn.outvars[0])):
            return None
        array, shape = self.arrays[x.index], shape_of(eqn.invars[k])
        order = x.order or tuple(range(len(shape)))
        for axis, length in enumerate(shape):
            along = Along(axis)
            after = rules.after(jaxprs.name_of(eqn), eqn, k, along, length)
            if length < 2 or after != along or not host.can_slice(array, order[axis]):
                continue
            kind = Kind(Source(length, 1), along)
            with contextlib.suppress(MixedSlicesError):
                return self._cache(x, self._slice_by_slice(eqn, inputs, x, kind))
        return None

    def _slice_by_slice(
        self, eqn: JaxprEqn, inputs: list[Operand], x: StackVariable, kind: Kind
    ) -> jax.Array:
        """The array of a cache, after an operation on each of its slices."""
        array, name = self.arrays[x.index], jaxprs.name_of(eqn)
        order = x.order or tuple(range(array.ndim))
        at = Stacked(kind.source.length, order[kind.along.axis])
        back = [order.index(axis) for axis in range(array.ndim)]

        def change(i: jax.Array, array: jax.Array) -> jax.Array:
            old = at.read(array, i)
            evaluator = Evaluator(_POLICY, first={kind.source: i})
            part = Slices(old.transpose(order), kind)
            operands = [part if isinstance(y, StackVariable) else y for y in inputs]
            results = evaluator.apply(name, operands, eqn)
            (new,) = evaluator.arrays(results, [kind])
            new = new.transpose(back)
            new = new if self.chosen is None else _where(self.chosen, new, old)
            return at.write(array, new, i)

        return jax.lax.fori_loop(0, at.length, change, array)


# A layer knows its index, and no operation adds up layers.
_POLICY = Policy("layer", "stack", (), lambda *_: None, is_indexed=True)


def _left(
    inside: Forward, results: Sequence[Operand], old: Mapping[int, jax.Array]
) -> list[jax.Array]:
    """The results of a turn as arrays; stacks lie where the old ones do."""
    reader = inside.reader

    def array(k: int, x: Operand) -> jax.Array:
        if isinstance(x, StackVariable):
            there = reader.arrays[x.index]
            x = there if k in old and x.is_itself else x.whole(there)
        return host.to_memory_of(x, old[k]) if k in old else x

    return [array(k, x) for k, x in enumerate(results)]


def _where(chosen: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Of a batch, ``x`` for chosen examples, else ``y``."""
    return jnp.where(arithmetic.expand(chosen, x), x, y)


def _are_alike(x: Var | Literal, y: Var | Literal) -> bool:
    """Whether two variables have one shape and dtype."""
    ours: Any = x.aval
    theirs: Any = y.aval
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype
