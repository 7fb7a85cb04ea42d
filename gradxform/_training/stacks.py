"""Finds the scans that go over stacks of layers, in the jaxpr of a loss.

A stack is an input of the jaxpr, and every use of it is an equation. It may be cast,
transposed or divided into groups of layers, and then one ``scan`` goes over it. These
equations are evaluated again for each layer. So no other part of the loss needs the
whole stack. If a ``scan`` goes over groups, and another one inside of it over layers, a
group is a layer. What gives the loss no derivative may read the whole stack.

So a loss is a sequence of dense parts and of scans over stacks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._jax import jaxprs, versions
from gradxform._jax.jaxprs import Part
from gradxform._jax.versions import Op
from gradxform._slices.rules import RULES, Along, resized, shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

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
    "and nothing else that has a derivative may read it. Read each layer inside of the "
    "scan, or leave {0!r} out of layers."
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
                along = RULES[jaxprs.name_of(eqn)](eqn, 0, found[-1], length)
                if along is None:
                    break
                found.append(along)
            if len(found) > len(self.equations) and not found[-1].axis:
                return found
        names = [jaxprs.name_of(eqn) for eqn in self.equations]
        reshape = self.equations[names.index(Op.RESHAPE)]
        self.refuse(f"it is used by {jaxprs.place(reshape)}")

    def layer(self, part: jax.Array, length: int) -> jax.Array:
        """A layer of the variable, from the layer's part of the stack."""
        for eqn, along in zip(self.equations, self.layers(length)[1:], strict=True):
            of_layer = resized(jaxprs.name_of(eqn), eqn, along, 1)
            (part,) = versions.evaluate(of_layer, [part])
        return jnp.squeeze(part, 0)

    def refuse(self, reason: str) -> NoReturn:
        raise ValueError(_REFUSED.format(self.path, reason))


class Scan(NamedTuple):
    """A scan over stacks.

    Attributes:
      eqn: it.
      stacks: the stack of each input; None for an input that is no stack.
    """

    eqn: JaxprEqn
    stacks: list[StackVariable | None]

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
    def axes(self) -> dict[int, int]:
        """The axis of the layers of each stack, by its number."""
        stacks = filter(None, self.stacks)
        return {stack.number: stack.layers(self.length)[0].axis for stack in stacks}

    @property
    def backwards(self) -> list[int]:
        """The numbers of its stacks, in the order in which gradients are known.

        The body has used a stack for the first time when its gradient is complete.
        """
        body = self.eqn.params["jaxpr"].jaxpr
        uses = [
            (_first_use(body, k), stack.number)
            for k, stack in enumerate(self.stacks)
            if stack
        ]
        # A stack may be several inputs. Its first use counts.
        return [*dict.fromkeys(n for _, n in sorted(uses))][::-1]

    def inputs(self, env: Mapping[Var, Any]) -> list[jax.Array | None]:
        """The inputs of the scan, from values of variables; None for stacks."""

        def value(stack: StackVariable | None, x: Var | Literal) -> jax.Array | None:
            if stack is not None:
                return None
            aval: Any = x.aval
            return jnp.asarray(host.to_device(jaxprs.read(env, [x])[0]), aval.dtype)

        return list(map(value, self.stacks, self.eqn.invars))

    def with_layers(
        self, inputs: Sequence[Any], parts: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Inputs of the scan's body; each None is replaced by a layer.

        ``parts`` has each stack's part for this layer, by the number of the stack.
        """
        return [
            x if stack is None else stack.layer(parts[stack.number], self.length)
            for stack, x in zip(self.stacks, inputs, strict=True)
        ]

    def layer_results(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the scan's body: the carry, and what it gives further."""
        body = self.eqn.params["jaxpr"]
        return jaxprs.run(body.jaxpr, [*body.consts, *inputs])


class StackedLoss(NamedTuple):
    """The jaxpr of a loss, divided into parts.

    Attributes:
      closed: the jaxpr, of stacks and of other leaves.
      leaves: its inputs, by the numbers of leaves.
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
    numbers: Sequence[int],
    paths: Mapping[int, str],
    frozen: Collection[int],
) -> StackedLoss:
    """The scans of a loss over its stacks.

    ``numbers`` are those of the leaves that are its inputs, and ``paths`` has a path
    for the number of each stack. Those in ``frozen`` get no gradient.

    Raises:
      ValueError: a stack is read in another way than by one scan.
    """
    closed = _opened(closed, [k for k, n in enumerate(numbers) if n in paths])
    jaxpr = closed.jaxpr
    eqns = jaxprs.needed(jaxpr.eqns, jaxpr.outvars)
    leaves = dict(zip(numbers, jaxpr.invars, strict=True))
    stacks = {leaves[n]: StackVariable(n, path) for n, path in paths.items()}
    scans, whole = _uses(jaxpr, eqns, stacks, frozen)
    for n in paths:
        stack, is_scanned = stacks[leaves[n]], n in scans
        aval: Any = leaves[n].aval
        over = aval.sharding.spec[scans[n][1]] if is_scanned else None
        if n in frozen and (over or not is_scanned):  # Then it is no stack.
            scans.pop(n, None)
            stacks = {x: s for x, s in stacks.items() if s.number != n}
        elif not is_scanned:
            stack.refuse("no scan goes over it")
        elif over:
            stack.refuse(f"its layers are sharded over {over!r}")
        elif jaxprs.calls_host(scans[n][0]):
            # The backward pass would get another result than the forward pass.
            its = jaxprs.place(scans[n][0])
            stack.refuse(f"{its} has an io_callback, which would be called twice")
    by_layer = stacks.keys() - whole
    eqns = [eqn for eqn in eqns if by_layer.isdisjoint(eqn.outvars)]

    def scan(eqn: JaxprEqn) -> Scan:
        read = jaxprs.among(eqn.invars, stacks).items()
        over = {k: stacks[x] for k, x in read if _goes_over(eqn, k)}
        return Scan(eqn, [over.get(k) for k in range(len(eqn.invars))])

    over_stacks = {id(eqn) for eqn, _ in scans.values()}
    parts = jaxprs.divided(eqns, jaxpr.outvars, lambda eqn: id(eqn) in over_stacks)
    return StackedLoss(
        closed, leaves, [x if isinstance(x, Part) else scan(x) for x in parts]
    )


def _uses(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    stacks: dict[Var, StackVariable],
    frozen: Collection[int],
) -> tuple[dict[int, tuple[JaxprEqn, int]], set[Var]]:
    """The scan over each stack and its axis, by number; variables that are read whole.

    Adds the variables that equations make of stacks to ``stacks``.
    """
    differentiated = jaxprs.differentiated(jaxpr.outvars[0], eqns)
    scans: dict[int, tuple[JaxprEqn, int]] = {}
    # Scans by which the loss has no derivative, and variables of the stack.
    idle: dict[int, tuple[tuple[JaxprEqn, int], list[Var]]] = {}
    whole: set[Var] = set()
    for eqn in eqns:
        is_active = not differentiated.isdisjoint(eqn.outvars)
        for k, x in jaxprs.among(eqn.invars, stacks).items():
            stack = stacks[x]
            made = [one.outvars[0] for one in stack.equations]
            if jaxprs.name_of(eqn) in _BY_LAYER:
                equations = *stack.equations, eqn
                stacks[eqn.outvars[0]] = stack._replace(equations=equations)
            elif _goes_over(eqn, k) and (is_active or stack.number not in idle):
                if not eqn.params["length"]:
                    stack.refuse("it has no layer")
                over = eqn, stack.layers(eqn.params["length"])[0].axis
                if not is_active:
                    idle[stack.number] = over, made
                elif scans.setdefault(stack.number, over) != over:
                    its, other = jaxprs.place(eqn), jaxprs.place(scans[stack.number][0])
                    stack.refuse(f"a second scan goes over it, {its}, after {other}")
            elif is_active and stack.number not in frozen:
                stack.refuse(f"it is used by {jaxprs.place(eqn)}")
            else:
                whole.update(made)
    for x in jaxprs.among(jaxpr.outvars, stacks).values():
        stacks[x].refuse("the loss returns it")
    for n, (over, made) in idle.items():
        if scans.setdefault(n, over) != over:
            whole.update(made)
    return scans, whole


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
    of_stacks = _made_of(closed.jaxpr, stacks)

    def is_opened(eqn: JaxprEqn) -> bool:
        is_checkpoint = jaxprs.name_of(eqn) == Op.CHECKPOINT
        return is_checkpoint and bool(jaxprs.among(eqn.invars, of_stacks))

    def rule(name: str, inputs: Sequence[Any], eqn: JaxprEqn) -> list[Any] | None:
        del name
        if not is_opened(eqn):
            return None
        return _outside(eqn, jaxprs.among(eqn.invars, of_stacks), inputs)

    if not any(map(is_opened, closed.jaxpr.eqns)):
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
    jaxpr, of_stacks = closed.jaxpr, _made_of(closed.jaxpr, stacks)
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env |= zip(jaxpr.invars, inputs, strict=True)
    # What is made of stacks alone comes first, so it divides nothing.
    eqns = sorted(jaxpr.eqns, key=lambda eqn: of_stacks.isdisjoint(eqn.outvars))
    for part in jaxprs.divided(
        eqns,
        jaxpr.outvars,
        lambda eqn: bool(jaxprs.among(eqn.invars, of_stacks)),
    ):
        if not isinstance(part, Part):
            jaxprs.advance([part], env)
            continue
        options = {name: checkpoint.params[name] for name in ("policy", "prevent_cse")}
        made = jax.checkpoint(part.results, **options)(jaxprs.read(env, part.reads))
        env.update(zip(part.makes, made, strict=True))
    return jaxprs.read(env, jaxpr.outvars)


def _first_use(jaxpr: Jaxpr, operand: int) -> tuple[int, ...]:
    """Where an input is used for the first time: in an equation, in one inside of it.

    A cast or a transposition alone is no use.
    """
    values = _made_of(jaxpr, [operand])
    for number, eqn in enumerate(jaxpr.eqns):
        found = jaxprs.among(eqn.invars, values)
        if not found or jaxprs.name_of(eqn) in _BY_LAYER:
            continue
        if jaxprs.name_of(eqn) not in (Op.CHECKPOINT, Op.JIT):
            return (number,)
        inside = eqn.params["jaxpr"]  # That of a checkpoint has no constants.
        return number, *_first_use(getattr(inside, "jaxpr", inside), min(found))
    return (len(jaxpr.eqns),)


def _made_of(jaxpr: Jaxpr, stacks: Collection[int]) -> set[Var]:
    """The variables that have the values of these inputs."""
    found = {jaxpr.invars[k] for k in stacks}
    for eqn in jaxpr.eqns:
        if jaxprs.name_of(eqn) in _BY_LAYER and jaxprs.among(eqn.invars, found):
            found.update(eqn.outvars)
    return found
