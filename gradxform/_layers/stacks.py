"""Finds the scans that go over stacks of layers, in the jaxpr of a loss.

A stack is an input of the jaxpr, and every use of it is an equation. It may be cast,
transposed or divided into groups of layers, and then one ``scan`` goes over it. These
equations are evaluated again for each layer. So no other part of the loss needs the
whole stack. If a ``scan`` goes over groups, and another one inside of it over layers, a
group is a layer.

A stack gets its gradient from one scan. Other scans may read its layers if the loss has
no derivative by the stack through them: the stack is frozen, or behind
``stop_gradient``, or the loss does not depend on their results. What is no scan may
read the whole stack in the same case.

So a loss is a sequence of dense parts and of scans over stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from gradxform._jax import jaxprs, versions
from gradxform._jax.jaxprs import LeafVariable, Part, follows
from gradxform._jax.versions import Op
from gradxform._slices.rules import Along, after, resized, shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

_REFUSED = (
    "{0!r} is one of layers, but {1}. One jax.lax.scan of the loss must go over it, "
    "and nothing else that has a derivative may read it. Read each layer inside of the "
    "scan, or leave {0!r} out of layers."
)


@dataclasses.dataclass(frozen=True)
class StackVariable(LeafVariable):
    """A variable that has the values of a stack."""

    @property
    def variables(self) -> list[Var]:
        """The variables that the equations make."""
        return [eqn.outvars[0] for eqn in self.equations]

    def layers(self, length: int) -> list[Along] | None:
        """Where the layers lie in the stack, then in each equation's result.

        In the last result, the variable, they lie along the first axis. ``length`` is
        the number of layers. None: a reshape mixes them.
        """
        shape = shape_of(self.equations[0].invars[0]) if self.equations else (length,)
        for axis, size in enumerate(shape):
            found = [Along(axis, size // length)]
            for eqn in self.equations if not size % length else ():
                along = after(jaxprs.name_of(eqn), eqn, 0, found[-1], length)
                if along is None:
                    break
                found.append(along)
            if len(found) > len(self.equations) and not found[-1].axis:
                return found
        return None

    def axis(self, length: int) -> int | None:
        """The axis of the stack along which its layers lie; None if there is none."""
        layers = self.layers(length)
        return layers[0].axis if layers else None

    def layer(self, part: jax.Array, length: int) -> jax.Array:
        """A layer of the variable, from the layer's part of the stack."""
        layers = self.layers(length) or []
        pairs = zip(self.equations, layers[1:], strict=True)
        of_layer = (resized(jaxprs.name_of(eqn), eqn, x, 1) for eqn, x in pairs)
        return jnp.squeeze(jaxprs.evaluated(of_layer, part), 0)

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(_REFUSED.format(self.path, reason))


class Scan(NamedTuple):
    """A scan over stacks.

    Attributes:
      eqn: it.
      stacks: those among its inputs, by the position of the input.
      frozen: the indices of its stacks that get no gradient from it.
      is_needed: whether the loss may have a derivative by its results.
    """

    eqn: JaxprEqn
    stacks: dict[int, StackVariable]
    frozen: set[int]
    is_needed: bool

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.eqn.params["length"]

    @property
    def lengths(self) -> tuple[int, int]:
        """How many of its inputs are constants, and how many are its carry."""
        return versions.scan_lengths(self.eqn)

    @property
    def is_reverse(self) -> bool:
        """Whether the last layer is the first."""
        return self.eqn.params["reverse"]

    @property
    def stacked(self) -> dict[int, Stacked]:
        """Where each stack has layers, by its index."""
        stacks, length = self.stacks.values(), self.length
        pairs = ((stack.index, stack.axis(length)) for stack in stacks)
        return {n: Stacked(length, axis) for n, axis in pairs if axis is not None}

    @property
    def learning(self) -> dict[int, Stacked]:
        """Those of the stacks that get their gradient from it."""
        return {n: x for n, x in self.stacked.items() if n not in self.frozen}

    def inputs(self, env: Mapping[Var, Any]) -> list[jax.Array | None]:
        """The inputs of the scan, from values of variables; None for stacks."""

        def value(k: int, x: Var | Literal) -> jax.Array | None:
            if k in self.stacks:
                return None
            aval: Any = x.aval
            return jnp.asarray(host.to_device(jaxprs.read(env, [x])[0]), aval.dtype)

        return [value(k, x) for k, x in enumerate(self.eqn.invars)]

    def with_layers(
        self, inputs: Sequence[Any], parts: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Inputs of the scan's body, with a layer of each stack.

        ``parts`` has each stack's part for this layer, by the index of the stack.
        """
        layers = {
            k: stack.layer(parts[stack.index], self.length)
            for k, stack in self.stacks.items()
        }
        return [layers.get(k, x) for k, x in enumerate(inputs)]

    def layer_results(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the scan's body: the carry, and what it gives further."""
        body = self.eqn.params["jaxpr"]
        return jaxprs.run(body.jaxpr, [*body.consts, *inputs])


class StackedLoss(NamedTuple):
    """The jaxpr of a loss, divided into parts.

    Attributes:
      closed: the jaxpr, of stacks and of other leaves.
      leaves: its inputs, by the indices of leaves.
      parts: dense parts and scans over stacks, one after another.
    """

    closed: ClosedJaxpr
    leaves: dict[int, Var]
    parts: list[Part | Scan]

    @property
    def scans(self) -> list[Scan]:
        return [part for part in self.parts if isinstance(part, Scan)]


def find_scans(
    closed: ClosedJaxpr,
    indices: Sequence[int],
    paths: Mapping[int, str],
    frozen: Collection[int],
) -> StackedLoss:
    """The scans of a loss over its stacks.

    ``indices`` are those of the leaves that are its inputs, and ``paths`` has a path
    for the index of each stack. Those in ``frozen`` get no gradient.

    Raises:
      ValueError: a stack is read in another way than by one scan.
    """
    closed = _opened(closed, [k for k, n in enumerate(indices) if n in paths])
    jaxpr = closed.jaxpr
    eqns = jaxprs.equations(jaxpr)
    leaves = dict(zip(indices, jaxpr.invars, strict=True))
    stacks = {leaves[n]: StackVariable(n, path) for n, path in paths.items()}
    differentiated = jaxprs.differentiated(jaxpr.outvars[0], eqns)
    readings, read_whole = _readings(eqns, stacks, frozen, differentiated)
    for x in jaxprs.among(jaxpr.outvars, stacks).values():
        stacks[x].refuse("the loss returns it")
    scans: dict[int, Scan] = {}
    for n in paths:
        stack, sharding, found = stacks[leaves[n]], _sharding(leaves[n]), readings[n]
        learns = None if n in frozen else _learning(stack, found, sharding)
        are_by_layer = _are_by_layer(found, learns, sharding)
        for reading, is_by_layer in zip(found, are_by_layer, strict=True):
            if not is_by_layer:
                read_whole.update(reading.stack.variables)
                continue
            scan = Scan(reading.eqn, {}, set(), reading.is_needed)
            scan = scans.setdefault(id(reading.eqn), scan)
            scan.stacks[reading.operand] = reading.stack
            if learns is None or learns.eqn is not reading.eqn:
                scan.frozen.add(n)
    dropped = stacks.keys() - read_whole
    eqns = [eqn for eqn in eqns if dropped.isdisjoint(eqn.outvars)]
    parts = jaxprs.divided(eqns, jaxpr.outvars, lambda eqn: id(eqn) in scans)
    return StackedLoss(
        closed, leaves, [x if isinstance(x, Part) else scans[id(x)] for x in parts]
    )


class _Reading(NamedTuple):
    """A scan goes over a stack.

    Attributes:
      eqn: the scan.
      operand: the position of the input.
      stack: the variable there.
      axis: the axis of the stack's layers; None if a reshape mixes them.
      is_needed: whether the loss may have a derivative by the scan's results.
      is_active: whether it may have one by the stack through them.
    """

    eqn: JaxprEqn
    operand: int
    stack: StackVariable
    axis: int | None
    is_needed: bool
    is_active: bool


def _readings(
    eqns: Sequence[JaxprEqn],
    stacks: dict[Var, StackVariable],
    frozen: Collection[int],
    differentiated: Collection[Var],
) -> tuple[dict[int, list[_Reading]], set[Var]]:
    """The scans over each stack, by its index; variables that others read whole.

    Adds the variables that equations make of stacks to ``stacks``.

    Raises:
      ValueError: what is no scan reads a stack, and the loss has a derivative by that.
    """
    found: dict[int, list[_Reading]] = {x.index: [] for x in stacks.values()}
    read_whole: set[Var] = set()
    for eqn in eqns:
        is_needed = bool(jaxprs.among(eqn.outvars, differentiated))
        for k, x in jaxprs.among(eqn.invars, stacks).items():
            stack = stacks[x]
            is_active = is_needed and not (stack.is_stopped or stack.index in frozen)
            if follows(eqn):
                stacks[eqn.outvars[0]] = stack.then(eqn)
            elif _goes_over(eqn, k):
                if not eqn.params["length"]:
                    stack.refuse("it has no layer")
                axis = stack.axis(eqn.params["length"])
                reading = _Reading(eqn, k, stack, axis, is_needed, is_active)
                found[stack.index].append(reading)
            elif is_active:
                stack.refuse(_used_by(eqn))
            else:
                read_whole.update(stack.variables)
    return found, read_whole


def _learning(
    stack: StackVariable, readings: Sequence[_Reading], sharding: Sequence[object]
) -> _Reading:
    """The reading that gives a stack its gradient, which may be zero.

    Raises:
      ValueError: there is none, or there are two, or it reads no layers.
    """
    active = [reading for reading in readings if reading.is_active]
    active = active or [r for r in readings if r.axis is not None] or [*readings]
    if not active:
        stack.refuse("no scan goes over it")
    last = active[-1]
    its, axis = jaxprs.place(last.eqn), last.axis
    for other in active if last.is_active else ():
        if other.eqn is not last.eqn or other.axis != axis:
            before = jaxprs.place(other.eqn)
            stack.refuse(f"a second scan goes over it, {its}, after {before}")
    if axis is None:
        names = [jaxprs.name_of(eqn) for eqn in last.stack.equations]
        stack.refuse(_used_by(last.stack.equations[names.index(Op.RESHAPE)]))
    if sharding[axis]:
        stack.refuse(f"its layers are sharded over {sharding[axis]!r}")
    if jaxprs.calls_host(last.eqn):
        # The backward pass would get another result than the forward pass.
        stack.refuse(f"{its} has an io_callback, which would be called twice")
    return last


def _are_by_layer(
    readings: Sequence[_Reading], learns: _Reading | None, sharding: Sequence[object]
) -> list[bool]:
    """Whether each reads one layer at a time. The others read the whole stack.

    A scan reads the layers of a stack along one axis.
    """
    axes = {id(learns.eqn): learns.axis} if learns else {}

    def is_by_layer(reading: _Reading) -> bool:
        scan, axis = reading.eqn, reading.axis
        if axis is None or sharding[axis] or jaxprs.calls_host(scan):
            return False
        return axes.setdefault(id(scan), axis) == axis

    return list(map(is_by_layer, readings))


def _used_by(eqn: JaxprEqn) -> str:
    is_loop = jaxprs.name_of(eqn) in (Op.SCAN, Op.WHILE)
    more = ", a loop that reads it in each turn" if is_loop else ""
    return f"it is used by {jaxprs.place(eqn)}{more}"


def _sharding(stack: Var) -> Sequence[object]:
    """The mesh axes along each axis of a stack, where they are explicit."""
    aval: Any = stack.aval
    return aval.sharding.spec


def _goes_over(eqn: JaxprEqn, operand: int) -> bool:
    """Whether an equation is a scan over this operand."""
    is_scan = jaxprs.name_of(eqn) == Op.SCAN
    return is_scan and operand >= sum(versions.scan_lengths(eqn))


def _opened(closed: ClosedJaxpr, stacks: Collection[int]) -> ClosedJaxpr:
    """The same, without ``jit`` and without a ``jax.checkpoint`` that reads a stack.

    ``stacks`` are the positions of its inputs that are stacks. What is beside the scans
    of such a checkpoint gets a checkpoint of its own, with the same policy. The scans
    need none: each layer is computed again anyway.
    """
    closed = jaxprs.inlined(closed)
    of_stacks = jaxprs.derived_from(closed.jaxpr, stacks)

    def is_opened(eqn: JaxprEqn) -> bool:
        is_checkpoint = jaxprs.name_of(eqn) == Op.CHECKPOINT
        return is_checkpoint and bool(jaxprs.among(eqn.invars, of_stacks))

    def rule(name: str, inputs: Sequence[Any], eqn: JaxprEqn) -> list[Any] | None:
        del name
        if not is_opened(eqn):
            return None
        return _outside(eqn, jaxprs.among(eqn.invars, of_stacks), inputs)

    if not any(map(is_opened, jaxprs.equations(closed.jaxpr))):
        return closed
    flat = jax.make_jaxpr(
        lambda *x: jaxprs.run(closed.jaxpr, [*closed.consts, *x], rule)
    )(*closed.in_avals)
    return _opened(flat, stacks)


def _outside(
    checkpoint: JaxprEqn, stacks: Collection[int], inputs: Sequence[Any]
) -> list[Any]:
    """The results of a checkpoint, with what reads stacks outside of checkpoints."""
    inside, types = checkpoint.params["jaxpr"], [x.aval for x in checkpoint.invars]
    closed = _opened(jax.make_jaxpr(lambda *x: jaxprs.run(inside, x))(*types), stacks)
    jaxpr, of_stacks = closed.jaxpr, jaxprs.derived_from(closed.jaxpr, stacks)
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, inputs, strict=True)
    # What is made of stacks alone comes first, so it divides nothing.
    eqns = sorted(
        jaxprs.equations(jaxpr), key=lambda eqn: of_stacks.isdisjoint(eqn.outvars)
    )
    for part in jaxprs.divided(
        eqns,
        jaxpr.outvars,
        lambda eqn: bool(jaxprs.among(eqn.invars, of_stacks)),
    ):
        if not isinstance(part, Part):
            jaxprs.advance([part], env)
            continue
        options = {name: checkpoint.params[name] for name in ("policy", "prevent_cse")}
        outputs = jax.checkpoint(part.results, **options)(jaxprs.read(env, part.reads))
        env.update(zip(part.makes, outputs, strict=True))
    return jaxprs.read(env, jaxpr.outvars)
