"""Evaluates a jaxpr whose inputs may be stacks of layers.

Each equation is evaluated as it is. A stack waits until an equation reads it: a scan
over its layers gets them one by one, and anything else gets the whole stack. A reader
says how: that of a step differentiates the loss, that of ``evaluate`` does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import jax

from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.programs import InnerProgram, Runs
from gradxform._jax.versions import Op
from gradxform._layers.stacks import Scan, StackVariable
from gradxform._trees.types import ByIndex

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var

# An array, or a stack that waits.
Operand: TypeAlias = "jax.Array | StackVariable"


class Use(NamedTuple):
    """An operand of an equation, by its position."""

    eqn: JaxprEqn
    operand: int

    @property
    def is_scanned(self) -> bool:
        """Whether a scan goes over it."""
        is_scan = jaxprs.name_of(self.eqn) == Op.SCAN
        return is_scan and self.operand >= sum(versions.scan_lengths(self.eqn))


class StackReader(Protocol):
    """How stacks are read."""

    @property
    def arrays(self) -> ByIndex:
        """The stacks, by their indices."""

    def by_layer(self, stack: StackVariable, scan: JaxprEqn) -> bool:
        """Whether a scan may read layers of a stack, whose axis is known."""

    def scan(
        self, forward: Forward, scan: Scan, inputs: list[Operand]
    ) -> list[Operand] | None:
        """The results of a scan that reads stacks; None: it gets whole ones."""

    def inside(
        self, forward: Forward, eqn: JaxprEqn, inputs: list[Operand]
    ) -> list[Operand] | None:
        """Those of another operation that runs programs; None: it gets whole ones."""

    def whole(self, stack: StackVariable, use: Use | None) -> jax.Array:
        """All of a variable, for an operand; None: for the results."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """Evaluates jaxprs whose inputs may be stacks.

    Attributes:
      reader: how it reads them.
      checkpoints: the options of each ``jax.checkpoint`` that it is inside of.
    """

    reader: StackReader
    checkpoints: tuple[Mapping[str, Any], ...] = ()  # Also policies of users.

    def results(
        self, program: InnerProgram, inputs: Sequence[Operand]
    ) -> list[jax.Array]:
        """The results of a program, as arrays."""
        return [self._array(x, None) for x in self.run(program, inputs)]

    def run(self, program: InnerProgram, inputs: Sequence[Operand]) -> list[Operand]:
        """The results of a program; some may be stacks."""
        if not self.checkpoints:
            return program.run(inputs, self._apply)
        return self._run_apart(program, inputs)

    def _run_apart(
        self, program: InnerProgram, inputs: Sequence[Operand]
    ) -> list[Operand]:
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
        self, name: str, inputs: list[Operand], eqn: JaxprEqn
    ) -> Sequence[Operand] | None:
        """The results of an equation that reads stacks; None for any other one."""
        if not any(isinstance(x, StackVariable) for x in inputs):
            return None
        if jaxprs.follows(eqn):
            (stack,) = (x for x in inputs if isinstance(x, StackVariable))
            return [stack.then(eqn)]
        runs = programs.OPERATIONS.get(name)
        if runs is Runs.NEVER:
            return self._beside(eqn, inputs)
        if runs is Runs.ONCE:
            with programs.scope(eqn):
                return self._inside(eqn).run(programs.program(eqn), inputs)
        if name == Op.SCAN:
            found = self.reader.scan(self, self._scan(eqn, inputs), inputs)
        else:
            found = self.reader.inside(self, eqn, inputs)
        return self._whole(eqn, inputs) if found is None else found

    def _inside(self, eqn: JaxprEqn) -> Forward:
        """The same inside of an equation, which may be a checkpoint."""
        if jaxprs.name_of(eqn) != Op.CHECKPOINT:
            return self
        options = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
        return dataclasses.replace(self, checkpoints=(options, *self.checkpoints))

    def _whole(self, eqn: JaxprEqn, inputs: list[Operand]) -> list[jax.Array]:
        uses = (Use(eqn, k) for k in range(len(inputs)))
        return versions.bind(eqn, list(map(self._array, inputs, uses)))

    def _array(self, x: Operand, use: Use | None) -> jax.Array:
        return self.reader.whole(x, use) if isinstance(x, StackVariable) else x

    def arrays(self, eqn: JaxprEqn, inputs: Mapping[int, Operand]) -> ByIndex:
        """Operands of a loop by their positions, as arrays of their types."""
        return {
            k: jaxprs.as_array(self._array(x, Use(eqn, k)), eqn.invars[k])
            for k, x in inputs.items()
        }

    def _beside(self, eqn: JaxprEqn, inputs: list[Operand]) -> list[Operand]:
        """The results of a barrier: stacks go past it."""
        others = [x for x in inputs if not isinstance(x, StackVariable)]
        new = iter(versions.bind(eqn, others) if others else others)
        return [x if isinstance(x, StackVariable) else next(new) for x in inputs]

    def _scan(self, eqn: JaxprEqn, inputs: list[Operand]) -> Scan:
        """A scan with the stacks whose layers it can read one by one."""
        stacks: dict[int, StackVariable] = {}
        axes: dict[int, int] = {}
        for k, x in enumerate(inputs):
            if not (isinstance(x, StackVariable) and Use(eqn, k).is_scanned):
                continue
            axis, array = x.axis(eqn.params["length"]), self.reader.arrays[x.index]
            if axis is None or jax.typeof(array).sharding.spec[axis]:
                continue
            is_same = axes.setdefault(x.index, axis) == axis
            if is_same and self.reader.by_layer(x, eqn):
                stacks[k] = x
        return Scan(eqn, stacks)
