"""Evaluates a jaxpr of stacks that nothing changes, one layer of them at a time.

Each equation is evaluated as it is. A stack waits until an equation reads it: a scan
over its layers gets them one by one, wherever the scan is, and anything else gets the
whole stack.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax

from gradxform._devices import host
from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._layers import layer_loop
from gradxform._layers.stacks import Scan, StackVariable

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


class Stack(NamedTuple):
    """A stack that waits.

    Attributes:
      variable: the equations that make a variable of it.
      array: the stack, on the host or on the device.
    """

    variable: StackVariable
    array: jax.Array

    def whole(self) -> jax.Array:
        """All of the variable, on the device."""
        return jaxprs.evaluated(self.variable.equations, host.to_device(self.array))

    def axis(self, length: int) -> int | None:
        """The axis whose layers a scan can read one by one; None if it cannot."""
        axis = self.variable.axis(length) if length else None
        is_cut = axis is not None and jax.typeof(self.array).sharding.spec[axis]
        return None if is_cut else axis


Value: TypeAlias = jax.Array | Stack


@dataclasses.dataclass(frozen=True)
class Forward:
    """Evaluates jaxprs whose inputs may be stacks.

    Attributes:
      scanned: the indices of the stacks that came by layers so far.
    """

    scanned: set[int] = dataclasses.field(default_factory=set)

    def results(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[jax.Array]:
        """The results of a jaxpr, as arrays."""
        return list(map(_array, jaxprs.run(jaxpr, inputs, self._apply)))

    def _apply(
        self, name: str, inputs: list[Value], eqn: JaxprEqn
    ) -> Sequence[Value] | None:
        """The results of an equation that reads stacks; None for any other one."""
        if not any(isinstance(x, Stack) for x in inputs):
            return None
        if jaxprs.follows(eqn) and isinstance(x := inputs[0], Stack):
            return [Stack(x.variable.then(eqn), x.array)]
        if name in _CALLS:
            return _CALLS[name](self, eqn, inputs)
        return versions.bind(eqn, list(map(_array, inputs)))

    def _jit(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        inside = eqn.params["jaxpr"]
        return jaxprs.run(inside.jaxpr, [*inside.consts, *inputs], self._apply)

    def _checkpoint(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        return jaxprs.run(eqn.params["jaxpr"], inputs, self._apply)

    def _scan(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        """The results of a scan, which may go over stacks, and read others inside."""
        num_consts, num_carry = versions.scan_lengths(eqn)
        length, start = eqn.params["length"], num_consts + num_carry
        stacks: dict[int, StackVariable] = {}
        arrays: dict[int, jax.Array] = {}
        axes: dict[int, int] = {}
        for k, x in enumerate(inputs):
            if k < start or not isinstance(x, Stack):
                continue
            axis = x.axis(length)
            if axis is not None and axes.setdefault(x.variable.index, axis) == axis:
                stacks[k], arrays[x.variable.index] = x.variable, x.array
        self.scanned.update(arrays)
        scan, body = Scan(eqn, stacks, set(), False), eqn.params["jaxpr"]
        results, _, _ = layer_loop.over_layers(
            scan,
            _operands(
                eqn,
                [None if k in stacks else x for k, x in enumerate(inputs)],
                num_consts,
            ),
            {n: x.placed(arrays[n]) for n, x in scan.stacked.items()},
            lambda operands: self.results(body.jaxpr, [*body.consts, *operands]),
            keeps_carries=False,
        )
        return results

    def _while(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        num_ends = eqn.params["cond_nconsts"]
        start = num_ends + eqn.params["body_nconsts"]
        operands = _operands(eqn, inputs, start)

        def call(program: ClosedJaxpr, consts: Sequence[Value]) -> Callable[..., Any]:
            before = [*program.consts, *consts]
            return lambda carry: self.results(program.jaxpr, [*before, *carry])

        ends = call(eqn.params["cond_jaxpr"], operands[:num_ends])
        body = call(eqn.params["body_jaxpr"], operands[num_ends:start])
        return jax.lax.while_loop(lambda x: ends(x)[0], body, operands[start:])

    def _cond(self, eqn: JaxprEqn, inputs: list[Value]) -> list[jax.Array]:
        if eqn.params.get("branches_platforms"):
            return versions.bind(eqn, list(map(_array, inputs)))
        index, *operands = inputs

        def branch(program: ClosedJaxpr) -> list[jax.Array]:
            return self.results(program.jaxpr, [*program.consts, *operands])

        branches = eqn.params["branches"]
        sides = [functools.partial(branch, program) for program in branches]
        return jax.lax.switch(index, sides)


# These run programs inside.
_CALLS: dict[str, Callable[[Forward, JaxprEqn, list[Value]], Sequence[Value]]] = {
    Op.CHECKPOINT: Forward._checkpoint,
    Op.COND: Forward._cond,
    Op.JIT: Forward._jit,
    Op.SCAN: Forward._scan,
    Op.WHILE: Forward._while,
}


def _array(x: Value) -> jax.Array:
    return x.whole() if isinstance(x, Stack) else x


def _operands(eqn: JaxprEqn, inputs: Sequence[Any], num_consts: int) -> list[Any]:
    """Inputs of a loop, where stacks may be among the constants alone."""

    def operand(k: int, x: Any, of: Var | Literal) -> Any:
        if x is None or (k < num_consts and isinstance(x, Stack)):
            return x
        return jaxprs.as_array(_array(x), of)

    return list(map(operand, range(len(inputs)), inputs, eqn.invars))
