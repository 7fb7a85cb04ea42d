"""Divides operations of several parameters: each parameter gets its part of them.

A gate decides for all leaves at once, and so does an optimizer that computes all its
eigenbases every few steps. Each part has the same predicate, and of each branch the
equations that its results need. Numbers of several parameters, such as a norm of all
gradients in a branch, are computed before, if this branch runs. So is a number of few
entries that decides in a branch: then all know which arrays travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, programs
from gradxform._jax.versions import Op
from gradxform._matrices import nested, unplaced
from gradxform._matrices.loops import Loop
from gradxform._matrices.owners import Nobody, Owner, Owners, is_number
from gradxform._slices.rules import shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var


def divided(closed: ClosedJaxpr, few: int, owners: Owners | None = None) -> ClosedJaxpr:
    """The same program, whose conditionals and loops are each of one parameter.

    An argument of fewer entries than ``few`` belongs to none. ``owners`` are those of
    the program, if they are known.
    """
    eqns = [eqn for eqn in jaxprs.all_equations(closed.jaxpr) if _may_tie(eqn)]
    if not eqns:
        return closed
    owners = owners or _owners(closed, few)

    def is_tied(eqn: JaxprEqn) -> bool:
        atoms = [*eqn.outvars, *(eqn.invars if _of_all_platforms(eqn) else ())]
        variables = filter(jaxprs.is_variable, atoms)
        large = {owners.of[x] for x in variables if not is_number(x)}
        return len(large - {Nobody.FREE}) > 1

    tied = {id(eqn) for eqn in eqns if is_tied(eqn)}
    if not tied and not any(map(_decides_inside, eqns)):
        return closed

    def rule(name: str, inputs: list[Any], eqn: JaxprEqn) -> Sequence[Any] | None:
        is_tied = id(eqn) in tied
        if branch := _of_all_platforms(eqn):
            return _gone_into(branch, inputs[1:], few) if is_tied else None
        if name == Op.COND and (is_tied or _decides_inside(eqn)):
            groups = _by_owner(eqn.outvars, owners) if is_tied else None
            return _conditionals(eqn, inputs, groups, few)
        if not is_tied:
            return None
        if name == Op.BARRIER:
            return _barriers(eqn, inputs, owners)
        if name in _LOOPS:
            return None if eqn.effects else _loops(eqn, inputs, owners, few)
        inside = jax.make_jaxpr(programs.program(eqn).run)
        return _gone_into(inside([x.aval for x in eqn.invars]), inputs, few)

    def run(*args: jax.Array) -> list[Any]:
        return jaxprs.run(closed.jaxpr, [*closed.consts, *args], rule)

    return jax.make_jaxpr(run)(*unplaced.bare_types(closed.jaxpr.invars))


_LOOPS = frozenset({Op.SCAN, Op.WHILE})


def _of_all_platforms(eqn: JaxprEqn) -> ClosedJaxpr | None:
    return nested.of_all_platforms(eqn) if jaxprs.name_of(eqn) == Op.COND else None


def _may_tie(eqn: JaxprEqn) -> bool:
    name = jaxprs.name_of(eqn)
    if name == Op.COND:
        is_one = len(eqn.outvars) == 1 and _of_all_platforms(eqn) is None
        return not is_one or _decides_inside(eqn)
    if name in _LOOPS or programs.OPERATIONS.get(name) is programs.Runs.ONCE:
        return len(eqn.outvars) > 1
    return name == Op.BARRIER and len(eqn.outvars) > 1


def _gone_into(closed: ClosedJaxpr, inputs: Sequence[Any], few: int) -> Sequence[Any]:
    inside = divided(programs.inlined(closed), few)
    return jaxprs.run(inside.jaxpr, [*inside.consts, *inputs])


def _decides_inside(eqn: JaxprEqn) -> bool:
    """Whether a conditional has another one in a branch."""
    if jaxprs.name_of(eqn) != Op.COND:
        return False
    return any(jaxprs.anywhere(x.jaxpr, Op.COND) for x in eqn.params["branches"])


def _owners(closed: ClosedJaxpr, few: int) -> Owners:
    jaxpr = closed.jaxpr
    known = [x for x in jaxpr.invars if math.prod(shape_of(x)) < few]
    free = {*known, *jaxpr.constvars}
    for eqn in jaxprs.all_equations(jaxpr):
        read = filter(jaxprs.is_variable, eqn.invars)
        if free.issuperset(read) and not eqn.effects:
            free.update(eqn.outvars)
    return Owners(jaxpr, jaxprs.all_equations(jaxpr), free)


def _by_owner(variables: Iterable[Var], owners: Owners) -> list[list[int]]:
    """The positions of variables of each owner; numbers are by themselves."""
    found: dict[Owner, list[int]] = {}
    for k, x in enumerate(variables):
        owner = Nobody.SEVERAL if is_number(x) else owners.of[x]
        found.setdefault(owner, []).append(k)
    return [*found.values()]


def _barriers(eqn: JaxprEqn, inputs: list[Any], owners: Owners) -> list[Any]:
    results: list[Any] = [None] * len(inputs)
    for members in _by_owner(eqn.outvars, owners):
        made = jax.lax.optimization_barrier([inputs[k] for k in members])
        for k, x in zip(members, made, strict=True):
            results[k] = x
    return results


def _loops(
    eqn: JaxprEqn, inputs: list[Any], owners: Owners, few: int
) -> list[Any] | None:
    """The results of a loop, by one for each owner; None if it has several."""
    name = "jaxpr" if jaxprs.name_of(eqn) == Op.SCAN else "body_jaxpr"
    body = divided(programs.inlined(eqn.params[name]), few)
    loop, groups = Loop(eqn, inputs, body), dict[Owner, list[int]]()
    for k, x in enumerate(eqn.outvars):
        operands = filter(lambda y: not is_number(y), loop.operands([k]))
        of = {owners.of[y] for y in (*operands, *([] if is_number(x) else [x]))}
        of.discard(Nobody.FREE)
        if len(of) > 1:
            return None
        groups.setdefault(of.pop() if of else Nobody.FREE, []).append(k)
    results: list[Any] = [None] * len(eqn.outvars)
    for members in groups.values():
        for k, x in zip(members, loop.results(members), strict=True):
            results[k] = x
    return results


def _conditionals(
    eqn: JaxprEqn, inputs: list[Any], groups: list[list[int]] | None, few: int
) -> list[Any]:
    """The results of a conditional, by one for each group of some of them."""
    index, *operands = inputs
    branches = [_Branch(closed, operands, few) for closed in eqn.params["branches"]]
    groups = groups or [[*range(len(eqn.outvars))]]
    shared = [branch.shared(groups) for branch in branches]
    types: list[Any] = [x.aval for found in shared for x in found]

    def numbers(n: int) -> list[Any]:
        made = branches[n].results(shared[n], {})
        zeros = [jnp.zeros(t.shape, t.dtype) for t in types]
        start = sum(map(len, shared[:n]))
        return [*zeros[:start], *made, *zeros[start + len(made) :]]

    def part(n: int, members: Sequence[int], known: dict[Var, Any]) -> list[Any]:
        branch = branches[n]
        return branch.results([branch.jaxpr.outvars[k] for k in members], known)

    def each(f: Any, *args: Any) -> list[Any]:
        sides = [functools.partial(f, n, *args) for n in range(len(branches))]
        return list(jax.lax.switch(index, sides))

    known: dict[Any, Any] = {}
    for branch in branches:
        known |= branch.known()
    if types:
        variables = [x for found in shared for x in found]
        known |= zip(variables, each(numbers), strict=True)
    results: list[Any] = [None] * len(eqn.outvars)
    for members in groups:
        for k, x in zip(members, each(part, members, known), strict=True):
            results[k] = x
    return results


class _Branch:
    """A branch of a conditional, with its operands."""

    def __init__(self, closed: ClosedJaxpr, operands: Sequence[Any], few: int) -> None:
        closed = divided(programs.inlined(closed), few)
        self.jaxpr, self._consts, self._operands = closed.jaxpr, closed.consts, operands
        self._owners, self._few = _owners(closed, few), few

    def known(self) -> dict[Var, Any]:
        """Few entries that depend on few alone, and that others read.

        They are computed before. So all devices know which branch of a conditional
        inside runs, and equal parameters have equal branches, each with its key.
        """
        inside = {*self.jaxpr.invars, *self.jaxpr.constvars}
        pairs = zip(
            jaxprs.all_equations(self.jaxpr), self._owners.equations, strict=True
        )
        read = jaxprs.variables_read(eqn for eqn, of in pairs if of is not Nobody.FREE)
        decide = [
            eqn.invars[0]
            for eqn in jaxprs.all_equations(self.jaxpr)
            if jaxprs.name_of(eqn) == Op.COND
        ]
        found = [
            x
            for x in dict.fromkeys((*read, *filter(jaxprs.is_variable, decide)))
            if self._owners.of[x] is Nobody.FREE and x not in inside
            if math.prod(shape_of(x)) < self._few
        ]
        return dict(zip(found, self.results(found, {}), strict=True))

    def shared(self, groups: Sequence[Sequence[int]]) -> list[Var]:
        """The numbers that parts of several owners read, or one of another owner."""
        found: dict[Var, None] = {}
        for eqn, owner in zip(
            jaxprs.all_equations(self.jaxpr), self._owners.equations, strict=True
        ):
            for x in filter(jaxprs.is_variable, eqn.invars):
                of = self._owners.of[x]
                is_made = x not in self.jaxpr.invars
                if is_number(x) and of not in (owner, Nobody.FREE) and is_made:
                    found[x] = None
        return [x for x in found if len(groups) > 1]

    def results(
        self, wanted: Sequence[Var | Literal], known: dict[Var, Any]
    ) -> list[Any]:
        """Some of its variables, if some are known."""
        eqns = [
            eqn
            for eqn in jaxprs.all_equations(self.jaxpr)
            if not known.keys() & {*eqn.outvars}
        ]
        env = dict(zip(self.jaxpr.constvars, self._consts, strict=True)) | known
        env |= zip(self.jaxpr.invars, self._operands, strict=True)
        jaxprs.advance(jaxprs.needed(eqns, wanted), env)
        pairs = zip(wanted, jaxprs.read(env, wanted), strict=True)
        return [jaxprs.as_array(x, of) for of, x in pairs]
