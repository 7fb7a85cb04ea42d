"""Finds the scan that goes over stacks of layers, in the jaxpr of a loss.

A stack is an input of the jaxpr, and every use of it is an equation. It may be cast,
transposed or divided into groups of layers, and then one ``scan`` goes over it. These
equations are evaluated again for each layer. So no other part of the loss needs the
whole stack. If a ``scan`` goes over groups, and another one inside of it over layers, a
group is a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._slices.rules import RULES, Along, resized, shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

# What may be done with a stack before a scan goes over it.
_BY_LAYER = versions.SAME_VALUES | {
    Op.CAST,
    Op.COPY,
    Op.NAME,
    Op.RESHAPE,
    Op.STOP_GRADIENT,
    Op.TRANSPOSE,
}

_REFUSED = (
    "{0!r} is one of layers, but {1}. One jax.lax.scan of the loss must go over it, "
    "and nothing else may read it. Read each layer inside of the scan, or leave {0!r} "
    "out of layers."
)


class StackVariable(NamedTuple):
    """A variable that has the values of a stack.

    Attributes:
      number: that of the stack among the leaves.
      path: the path of the stack.
      equations: they make the variable of the stack, one after another.
    """

    number: int
    path: str
    equations: tuple[JaxprEqn, ...] = ()

    def layers(self, length: int) -> list[Along]:
        """Where the layers lie in the stack, then in each equation's result.

        In the last result, the variable, they lie along the first axis. ``length`` is
        the number of layers.
        """
        shape = shape_of(self.equations[0].invars[0]) if self.equations else (length,)
        for axis, size in enumerate(shape):
            found = [Along(axis, size // length)]
            for eqn in self.equations if not size % length else ():
                along = RULES[eqn.primitive.name](eqn, 0, found[-1], length)
                if along is None:
                    break
                found.append(along)
            if len(found) > len(self.equations) and not found[-1].axis:
                return found
        names = [eqn.primitive.name for eqn in self.equations]
        reshape = self.equations[names.index(Op.RESHAPE)]
        self.refuse(f"it is used by {jaxprs.place(reshape)}")

    def layer(self, part: jax.Array, length: int) -> jax.Array:
        """A layer of the variable, from the layer's part of the stack."""
        for eqn, along in zip(self.equations, self.layers(length)[1:], strict=True):
            of_layer = resized(eqn.primitive.name, eqn, along, 1)
            (part,) = versions.evaluate(of_layer, [part])
        return jnp.squeeze(part, 0)

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(_REFUSED.format(self.path, reason))


class ScannedLoss(NamedTuple):
    """The jaxpr of a loss, whose equations stand before, in and after a scan.

    Attributes:
      closed: the jaxpr, of stacks and of other leaves.
      numbers: the number of the leaf that each of its inputs is.
      stacks: the variables that have the values of stacks.
      position: that of the scan among the equations.
    """

    closed: ClosedJaxpr
    numbers: list[int]
    stacks: dict[Var, StackVariable]
    position: int

    @property
    def scan(self) -> JaxprEqn:
        return self.closed.jaxpr.eqns[self.position]

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.scan.params["length"]

    @property
    def is_reverse(self) -> bool:
        """Whether the last layer is the first."""
        return self.scan.params["reverse"]

    @property
    def scanned_stacks(self) -> list[StackVariable | None]:
        """The stack of each input of the scan; None for an input that is no stack."""
        atoms = self.scan.invars
        return [self.stacks.get(x) if is_variable(x) else None for x in atoms]

    @property
    def axes(self) -> dict[int, int]:
        """The axis of the layers of each stack, by its number."""
        stacks = filter(None, self.scanned_stacks)
        return {stack.number: stack.layers(self.length)[0].axis for stack in stacks}

    @property
    def read_later(self) -> list[Var]:
        """The variables before the scan that it or a later equation reads.

        Those of stacks are left out.
        """
        jaxpr = self.closed.jaxpr
        later = jaxpr.eqns[self.position :]
        read = [x for eqn in later for x in eqn.invars] + [*jaxpr.outvars]
        computed_later = {x for eqn in later for x in eqn.outvars}
        return [
            x
            for x in dict.fromkeys(filter(is_variable, read))
            if x not in computed_later and x not in self.stacks
        ]

    def values_before(self, leaves: Mapping[int, jax.Array]) -> list[jax.Array]:
        """The values of the variables in :attr:`read_later`."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        inputs = zip(self.numbers, jaxpr.invars, strict=True)
        env |= {x: leaves[n] for n, x in inputs if n in leaves}
        self._evaluate(env, jaxpr.eqns[: self.position])
        return [env[x] for x in self.read_later]

    def scan_inputs(self, before: Sequence[jax.Array]) -> list[jax.Array | None]:
        """The inputs of the scan, from the values before it; None for stacks."""
        env = dict(zip(self.read_later, before, strict=True))
        values = jaxprs.read({**dict.fromkeys(self.stacks), **env}, self.scan.invars)
        types: list[Any] = [x.aval for x in self.scan.invars]
        return [
            x if x is None else jnp.asarray(x, t.dtype)
            for x, t in zip(values, types, strict=True)
        ]

    def with_layers(
        self, inputs: Sequence[Any], parts: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Inputs of the scan's body; each None is replaced by a layer.

        ``parts`` has each stack's part for this layer, by the number of the stack.
        """
        return [
            x if stack is None else stack.layer(parts[stack.number], self.length)
            for stack, x in zip(self.scanned_stacks, inputs, strict=True)
        ]

    def layer_results(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the scan's body: the carry, and what it gives further."""
        body = self.scan.params["jaxpr"]
        return jaxprs.run(body.jaxpr, [*body.consts, *inputs])

    def loss_results(
        self, before: Sequence[jax.Array], results: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The results of the loss, from values before the scan and its results."""
        env = dict(zip(self.read_later, before, strict=True))
        env |= zip(self.scan.outvars, results, strict=True)
        self._evaluate(env, self.closed.jaxpr.eqns[self.position + 1 :])
        return jaxprs.read(env, self.closed.jaxpr.outvars)

    def _evaluate(self, env: dict[Var, jax.Array], eqns: Sequence[JaxprEqn]) -> None:
        """Adds the results of equations, but of those that only give whole stacks."""
        eqns = [x for x in eqns if self.stacks.keys().isdisjoint(x.outvars)]
        jaxprs.advance(eqns, env)


def find_scan(
    closed: ClosedJaxpr, numbers: list[int], paths: Mapping[int, str]
) -> ScannedLoss:
    """The scan of a loss over its stacks.

    ``numbers`` are those of the leaves that are its inputs, and ``paths`` has a path
    for the number of each stack.

    Raises:
      ValueError: a stack is read in another way than by one scan, the same for all.
    """
    closed = jaxprs.inlined(closed)
    jaxpr = closed.jaxpr
    inputs = zip(numbers, jaxpr.invars, strict=True)
    stacks = {x: StackVariable(n, paths[n]) for n, x in inputs if n in paths}
    # For each stack, the position of its scan, and which axis it goes over.
    scans: dict[int, tuple[int, int]] = {}
    for position, eqn in enumerate(jaxpr.eqns):
        read = dict.fromkeys(filter(is_variable, eqn.invars))
        for x in filter(stacks.__contains__, read):
            stack = stacks[x]
            if eqn.primitive.name in _BY_LAYER:
                equations = *stack.equations, eqn
                stacks[eqn.outvars[0]] = stack._replace(equations=equations)
                continue
            is_scan = eqn.primitive.name == Op.SCAN
            if not is_scan or x in eqn.invars[: sum(versions.scan_lengths(eqn))]:
                stack.refuse(f"it is used by {jaxprs.place(eqn)}")
            if not eqn.params["length"]:
                stack.refuse("it has no layer")
            over = position, stack.layers(eqn.params["length"])[0].axis
            if scans.setdefault(stack.number, over) != over:
                stack.refuse(f"a second scan goes over it, {jaxprs.place(eqn)}")
    for x in filter(is_variable, jaxpr.outvars):
        if x in stacks:
            stacks[x].refuse("the loss returns it")
    for n, path in paths.items():
        if n not in scans:
            StackVariable(n, path).refuse("no scan goes over it")
    first = StackVariable(*next(iter(paths.items())))
    position, _ = scans[first.number]
    for n, path in paths.items():
        if scans[n][0] != position:
            its, other = (jaxprs.place(jaxpr.eqns[k]) for k in (scans[n][0], position))
            how = f"{its} goes over it, and {other} over {first.path!r}, so one call"
            StackVariable(n, path).refuse(f"{how} cannot have both as layers")
    for n, x in zip(numbers, jaxpr.invars, strict=True):
        aval: Any = x.aval
        if n in paths and (over := aval.sharding.spec[scans[n][1]]):
            StackVariable(n, paths[n]).refuse(f"its layers are sharded over {over!r}")
    scan = jaxpr.eqns[position]
    if jaxprs.calls_host(scan):
        # The backward pass would get another result than the forward pass.
        its = jaxprs.place(scan)
        first.refuse(f"{its} has an io_callback, which would be called twice")
    return ScannedLoss(closed, numbers, stacks, position)


def is_variable(x: Var | Literal) -> TypeGuard[Var]:
    return not hasattr(x, "val")
