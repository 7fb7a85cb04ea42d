"""Evaluates a jaxpr whose inputs may be stacks of layers.

Each equation is evaluated as it is. A stack waits until an equation reads it: a scan
over its layers gets them one by one, and anything else gets the whole stack. A reader
says how: that of a step differentiates the loss, that of ``evaluate`` does not.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.programs import Program, Runs
from gradxform._jax.versions import Op
from gradxform._layers.stacks import Scan, StackVariable
from gradxform._layers.step_leaves import ByIndex
from gradxform._numbers import arithmetic
from gradxform._slices.rules import shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var

# An array, or a stack that waits.
Value: TypeAlias = "jax.Array | StackVariable"
# Operands of a scan's body -> its results
LayerResults: TypeAlias = Callable[[list[Any]], list[jax.Array]]


class Use(NamedTuple):
    """An operand of an equation, by its position."""

    eqn: JaxprEqn
    operand: int

    @property
    def is_scanned(self) -> bool:
        """Whether a scan goes over it."""
        is_scan = jaxprs.name_of(self.eqn) == Op.SCAN
        return is_scan and self.operand >= sum(versions.scan_lengths(self.eqn))


class Reader(Protocol):
    """How stacks are read.

    Attributes:
      arrays: the stacks, by their indices.
      is_differentiated: whether JAX differentiates all this. Then a stack comes whole
        into loops, conditionals, and functions with a derivative of their own.
    """

    arrays: ByIndex
    is_differentiated: bool

    def scan(
        self, scan: Scan, inputs: list[Any], layer_results: LayerResults
    ) -> list[jax.Array]:
        """The results of a scan over stacks; ``inputs`` has None for these."""

    def whole(self, stack: StackVariable, use: Use | None) -> jax.Array:
        """All of a variable, for an operand; None: for the results."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """Evaluates jaxprs whose inputs may be stacks.

    Attributes:
      reader: how it reads them.
      checkpoints: the options of each ``jax.checkpoint`` that it is inside of.
    """

    reader: Reader
    checkpoints: tuple[Mapping[str, Any], ...] = ()  # Also policies of users.

    def results(self, program: Program, inputs: Sequence[Value]) -> list[jax.Array]:
        """The results of a program, as arrays."""
        return [self._array(x, None) for x in self._run(program, inputs)]

    def _run(self, program: Program, inputs: Sequence[Value]) -> list[Value]:
        if not self.checkpoints:
            return program.run(inputs, self._apply)
        return self._run_apart(program, inputs)

    def _run_apart(self, program: Program, inputs: Sequence[Value]) -> list[Value]:
        """With a checkpoint for each group of equations between those that read stacks.

        A scan over stacks needs none: each of its layers is computed again anyway.
        """
        jaxpr = program.jaxpr
        env = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env |= zip(jaxpr.invars, inputs, strict=True)
        eqns = jaxprs.equations(jaxpr)
        group: list[JaxprEqn] = []
        for index, eqn in enumerate(eqns):
            read = [env.get(x) for x in eqn.invars if jaxprs.is_variable(x)]
            if not any(isinstance(x, StackVariable) for x in read):
                group.append(eqn)
                continue
            if not jaxprs.follows(eqn):  # What is made of stacks alone divides nothing.
                later = {*jaxprs.variables_read(eqns[index:]), *jaxpr.outvars}
                self._run_group(group, later, env)
                group = []
            jaxprs.advance([eqn], env, self._apply)
        self._run_group(group, set(jaxpr.outvars), env)
        return jaxprs.read(env, jaxpr.outvars)

    def _run_group(
        self,
        eqns: list[JaxprEqn],
        later: set[Var | Literal],
        env: dict[Var, Any],
    ) -> None:
        """Adds the results of some equations that later ones read, by a checkpoint."""
        made = [x for eqn in eqns for x in eqn.outvars]
        reads = [x for x in jaxprs.variables_read(eqns) if x not in {*made}]
        makes = [x for x in made if x in later]

        def f(inputs: list[Any]) -> list[Any]:
            inside = dict(zip(reads, inputs, strict=True))
            jaxprs.advance(eqns, inside)
            return jaxprs.read(inside, makes)

        for options in self.checkpoints:
            f = jax.checkpoint(f, **options)
        if eqns:
            env.update(zip(makes, f(jaxprs.read(env, reads)), strict=True))

    def _apply(
        self, name: str, inputs: list[Value], eqn: JaxprEqn
    ) -> Sequence[Value] | None:
        """The results of an equation that reads stacks; None for any other one."""
        if not any(isinstance(x, StackVariable) for x in inputs):
            return None
        if jaxprs.follows(eqn) and isinstance(x := inputs[0], StackVariable):
            return [x.then(eqn)]
        runs = programs.OPERATIONS.get(name)
        is_plain = not self.reader.is_differentiated
        if runs is Runs.NEVER:
            return self._beside(eqn, inputs)
        if runs is Runs.ONCE or (runs is Runs.DERIVED and is_plain):
            return self._inside(eqn)._run(programs.program(eqn), inputs)
        if name == Op.SCAN:
            return self._scan(eqn, inputs)
        if name in _CALLS and is_plain and "branches_platforms" not in eqn.params:
            return _CALLS[name](self, eqn, inputs)
        return self._whole(eqn, inputs)

    def _inside(self, eqn: JaxprEqn) -> Forward:
        """The same inside of an equation, which may be a checkpoint."""
        if jaxprs.name_of(eqn) != Op.CHECKPOINT:
            return self
        options = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
        return dataclasses.replace(self, checkpoints=(options, *self.checkpoints))

    def _whole(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        uses = (Use(eqn, k) for k in range(len(inputs)))
        return versions.bind(eqn, list(map(self._array, inputs, uses)))

    def _array(self, x: Value, use: Use | None) -> jax.Array:
        return self.reader.whole(x, use) if isinstance(x, StackVariable) else x

    def _beside(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of a barrier: stacks go past it."""
        others = [x for x in inputs if not isinstance(x, StackVariable)]
        new = iter(versions.bind(eqn, others) if others else others)
        return [x if isinstance(x, StackVariable) else next(new) for x in inputs]

    def _scan(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        """The results of a scan, which may go over stacks, and read others inside."""
        num_consts, _ = versions.scan_lengths(eqn)
        stacks: dict[int, StackVariable] = {}
        axes: dict[int, int] = {}
        for k, x in enumerate(inputs):
            if not (isinstance(x, StackVariable) and Use(eqn, k).is_scanned):
                continue
            axis = self._axis(x, eqn)
            if axis is not None and axes.setdefault(x.index, axis) == axis:
                stacks[k] = x
        is_plain = not self.reader.is_differentiated
        if not (stacks or is_plain):
            return self._whole(eqn, inputs)
        operands = self._operands(
            eqn,
            [None if k in stacks else x for k, x in enumerate(inputs)],
            num_consts if is_plain else 0,
        )
        body = programs.program(eqn)
        return self.reader.scan(
            Scan(eqn, stacks),
            operands,
            lambda operands: self._of_loop().results(body, operands),
        )

    def _axis(self, stack: StackVariable, scan: JaxprEqn) -> int | None:
        """The axis whose layers a scan reads one by one; None if it cannot."""
        axis, array = stack.axis(scan.params["length"]), self.reader.arrays[stack.index]
        if axis is None or jax.typeof(array).sharding.spec[axis]:
            return None
        # A backward pass would call it once more, and get another result.
        is_called_twice = self.reader.is_differentiated and jaxprs.calls_host(scan)
        return None if is_called_twice else axis

    def _of_loop(self) -> Forward:
        """The same within a loop or a conditional, which need no checkpoint."""
        return dataclasses.replace(self, checkpoints=())

    def _while(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        num_ends = eqn.params["cond_nconsts"]
        start = num_ends + eqn.params["body_nconsts"]
        operands = self._operands(eqn, inputs, start)
        ends, body = (
            Program(x.jaxpr, x.consts)
            for x in (eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"])
        )
        inside = self._of_loop()

        def goes_on(carry: list[jax.Array]) -> jax.Array:
            return inside.results(ends, [*operands[:num_ends], *carry])[0]

        def turn(carry: list[jax.Array]) -> list[jax.Array]:
            new = inside.results(body, [*operands[num_ends:start], *carry])
            if not shape_of(ends.jaxpr.outvars[0]):
                return new
            # Of a batch, each example that has left the loop stays as it is.
            pred = goes_on(carry)
            return [
                jnp.where(arithmetic.expand(pred, x), x, y)
                for x, y in zip(new, carry, strict=True)
            ]

        return jax.lax.while_loop(lambda x: jnp.any(goes_on(x)), turn, operands[start:])

    def _cond(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        index, *operands = inputs
        inside = self._of_loop()

        def branch(program: Program) -> list[jax.Array]:
            return inside.results(program, operands)

        branches = [Program(x.jaxpr, x.consts) for x in eqn.params["branches"]]
        sides = [functools.partial(branch, program) for program in branches]
        return jax.lax.switch(self._array(index, Use(eqn, 0)), sides)

    def _operands(
        self, eqn: JaxprEqn, inputs: Sequence[Value | None], num_consts: int
    ) -> list[Any]:
        """Inputs of a loop, where stacks may be among the first constants alone."""

        def operand(k: int, x: Value | None, of: Var | Literal) -> Any:
            if x is None or (k < num_consts and isinstance(x, StackVariable)):
                return x
            return jaxprs.as_array(self._array(x, Use(eqn, k)), of)

        return list(map(operand, range(len(inputs)), inputs, eqn.invars))


# These run programs in turns, or one of several. A scan is the third.
_CALLS: dict[str, Callable[[Forward, JaxprEqn, list[Value]], list[jax.Array]]] = {
    Op.COND: Forward._cond,
    Op.WHILE: Forward._while,
}
