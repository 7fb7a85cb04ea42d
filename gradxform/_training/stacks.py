"""The jaxpr of a loss in three parts: before, in and after the scan over its layers.

A stack is an input of the jaxpr, and every use of it is an equation. It may be cast,
transposed or divided into groups of layers, and then one ``scan`` goes over it. A cast
is repeated for each layer. So no other part of the loss needs the whole stack. If a
``scan`` goes over groups, and another one inside of it over layers, a group is a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp

from gradxform._trees import jaxprs, versions
from gradxform._trees.versions import Op

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

_HOW = (
    "{0!r} is one of layers, so one jax.lax.scan of the loss must go over it, and "
    "nothing else may read it, but {1}. Read each layer inside of the scan, or leave "
    "{0!r} out of layers."
)


class Stack(NamedTuple):
    """A variable that has the values of a stack.

    Attributes:
      number: that of the stack.
      path: its path.
      made_by: the equations that made the variable of it, one after another.
    """

    number: int
    path: str
    made_by: tuple[JaxprEqn, ...] = ()

    def axes(self) -> list[int]:
        """The axis of the layers in the stack, then in each equation's result.

        In the last result, the variable, it is the first axis.
        """
        axes = [0]
        for eqn in reversed(self.made_by):
            axis: int | None = axes[0]
            if eqn.primitive.name == Op.TRANSPOSE:
                axis = eqn.params["permutation"][axis]
            elif eqn.primitive.name == Op.RESHAPE:
                axis = _divided(eqn, axes[0])
            if axis is None:
                self.refuse(f"it is used by {jaxprs.place(eqn)}")
            axes.insert(0, axis)
        return axes

    def layer(self, rows: jax.Array) -> jax.Array:
        """A layer of the variable, from its rows of the stack."""
        for eqn, axis in zip(self.made_by, self.axes()[1:], strict=True):
            params = eqn.params
            if eqn.primitive.name == Op.RESHAPE:
                sizes = params["new_sizes"]
                params = params | {"new_sizes": (*sizes[:axis], 1, *sizes[axis + 1 :])}
            (rows,) = versions.evaluate(eqn.replace(params=params), [rows])
        return jnp.squeeze(rows, 0)

    def refuse(self, how: str) -> NoReturn:
        raise ValueError(_HOW.format(self.path, how))


class Parts(NamedTuple):
    """The parts of a loss. A list of values has those of a list of variables.

    Attributes:
      closed: the jaxpr, of stacks and of other arrays.
      numbers: those of its inputs.
      stacks: the variables that have the values of stacks.
      at: the position of the scan among its equations.
    """

    closed: ClosedJaxpr
    numbers: list[int]
    stacks: dict[Var, Stack]
    at: int

    @property
    def scan(self) -> JaxprEqn:
        return self.closed.jaxpr.eqns[self.at]

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.scan.params["length"]

    @property
    def is_reverse(self) -> bool:
        """Whether the last layer is the first."""
        return self.scan.params["reverse"]

    @property
    def scanned(self) -> list[Stack | None]:
        """The stack of each input of the scan; None for an input that is no stack."""
        atoms = self.scan.invars
        return [self.stacks.get(x) if _is_variable(x) else None for x in atoms]

    @property
    def axes(self) -> dict[int, int]:
        """The axis of the layers of each stack, by its number."""
        return {stack.number: stack.axes()[0] for stack in self.scanned if stack}

    def inputs(self, env: Mapping[Var, jax.Array]) -> list[jax.Array | None]:
        """The inputs of the scan; None for stacks."""
        values = jaxprs.read({**dict.fromkeys(self.stacks), **env}, self.scan.invars)
        types: list[Any] = [x.aval for x in self.scan.invars]
        return [
            x if x is None else jnp.asarray(x, t.dtype)
            for x, t in zip(values, types, strict=True)
        ]

    @property
    def needed(self) -> list[Var]:
        """What the scan and later equations need of the variables before them."""
        jaxpr = self.closed.jaxpr
        later = jaxpr.eqns[self.at :]
        read = [x for eqn in later for x in eqn.invars] + [*jaxpr.outvars]
        made = {x for eqn in later for x in eqn.outvars}
        return [
            x
            for x in dict.fromkeys(filter(_is_variable, read))
            if x not in made and x not in self.stacks
        ]

    def before(self, arrays: Mapping[int, jax.Array]) -> dict[Var, jax.Array]:
        """The values of variables before the scan; ``arrays`` are those by number."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        inputs = zip(self.numbers, jaxpr.invars, strict=True)
        env |= {x: arrays[n] for n, x in inputs if n in arrays}
        return self._advanced(env, jaxpr.eqns[: self.at])

    def after(
        self, env: Mapping[Var, jax.Array], results: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """The results of the loss, from those of the scan and variables before it."""
        env = {**env, **{self.scan.outvars[k]: x for k, x in results.items()}}
        env = self._advanced(env, self.closed.jaxpr.eqns[self.at + 1 :])
        return jaxprs.read(env, self.closed.jaxpr.outvars)

    def _advanced(
        self, env: dict[Var, jax.Array], eqns: Sequence[JaxprEqn]
    ) -> dict[Var, jax.Array]:
        """With the results of equations, but of those that only give whole stacks."""
        eqns = [x for x in eqns if self.stacks.keys().isdisjoint(x.outvars)]
        jaxprs.advance(eqns, env)
        return env

    def layer(
        self, rows: Mapping[int, jax.Array], inputs: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """The results of one layer: its carry, and what it gives further.

        ``inputs`` are those of the scan's body, and None for layers of stacks.
        """
        body = self.scan.params["jaxpr"]
        inputs = [
            x if stack is None else stack.layer(rows[stack.number])
            for stack, x in zip(self.scanned, inputs, strict=True)
        ]
        return jaxprs.run(body.jaxpr, [*body.consts, *inputs])


def split(closed: ClosedJaxpr, numbers: list[int], paths: Mapping[int, str]) -> Parts:
    """The parts of a loss of inputs with these numbers; ``paths`` are of its stacks.

    Raises:
      ValueError: a stack is read in another way than by one scan, the same for all.
    """
    closed = jaxprs.inlined(closed)
    jaxpr = closed.jaxpr
    inputs = zip(numbers, jaxpr.invars, strict=True)
    stacks = {x: Stack(n, paths[n]) for n, x in inputs if n in paths}
    # For each stack, the position of its scan, and which axis it goes over.
    scans: dict[int, tuple[int, int]] = {}
    for at, eqn in enumerate(jaxpr.eqns):
        read = dict.fromkeys(filter(_is_variable, eqn.invars))
        for x in filter(stacks.__contains__, read):
            stack = stacks[x]
            if eqn.primitive.name in _BY_LAYER:
                made_by = *stack.made_by, eqn
                stacks[eqn.outvars[0]] = stack._replace(made_by=made_by)
                continue
            is_scan = eqn.primitive.name == Op.SCAN
            if not is_scan or x in eqn.invars[: sum(versions.scan_lengths(eqn))]:
                stack.refuse(f"it is used by {jaxprs.place(eqn)}")
            place = at, stack.axes()[0]
            if scans.setdefault(stack.number, place) != place:
                stack.refuse(f"a second one does, {jaxprs.place(eqn)}")
    for x in filter(_is_variable, jaxpr.outvars):
        if x in stacks:
            stacks[x].refuse("the loss returns it")
    for i, path in paths.items():
        if i not in scans:
            Stack(i, path).refuse("none does")
    first, *_ = paths.items()
    at, _ = scans[first[0]]
    for i, path in paths.items():
        if scans[i][0] != at:
            its, other = (jaxprs.place(jaxpr.eqns[n]) for n in (scans[i][0], at))
            how = f"{its} goes over it, and {other} over {first[1]!r}, so one call"
            Stack(i, path).refuse(f"{how} cannot have both as layers")
    for n, x in zip(numbers, jaxpr.invars, strict=True):
        aval: Any = x.aval
        if n in paths and (over := aval.sharding.spec[scans[n][1]]):
            Stack(n, paths[n]).refuse(f"its layers are sharded over {over!r}")
    if not jaxpr.eqns[at].params["length"]:
        Stack(*first).refuse("it has no layer")
    if jaxprs.calls_host(jaxpr.eqns[at]):
        # The backward pass would get another result than the forward pass.
        its = jaxprs.place(jaxpr.eqns[at])
        Stack(*first).refuse(f"{its} has an io_callback, which would be called twice")
    return Parts(closed, numbers, stacks, at)


def _divided(eqn: JaxprEqn, axis: int) -> int | None:
    """The axis of the input whose equal parts lie along an axis of a ``reshape``."""
    types: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    shape, made = (x.shape for x in types)
    in_front = math.prod(made[:axis])
    for before in reversed(range(len(shape))):
        if math.prod(shape[:before]) == in_front and not shape[before] % max(
            made[axis], 1
        ):
            return before
    return None


def _is_variable(x: Var | Literal) -> TypeGuard[Var]:
    return not hasattr(x, "val")
