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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, programs
from gradxform._jax.versions import Op
from gradxform._matrices import nested, unplaced
from gradxform._matrices.cores import is_of_matrices
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
    from jax.extend import source_info_util

    eqns = [eqn for eqn in jaxprs.all_equations(closed.jaxpr) if _may_tie(eqn)]
    if not eqns:
        return closed
    owners = owners or _owners(closed, few)

    def is_tied(eqn: JaxprEqn) -> bool:
        atoms = [*eqn.outvars, *(eqn.invars if nested.of_all_platforms(eqn) else ())]
        variables = filter(jaxprs.is_variable, atoms)
        large = {owners.of[x] for x in variables if not is_number(x)}
        return len(large - {Nobody.FREE}) > 1

    tied = {id(eqn) for eqn in eqns if is_tied(eqn)}
    if not tied and not any(map(_is_nested_or_stacked, eqns)):
        return closed

    def rule(name: str, inputs: list[Any], eqn: JaxprEqn) -> Sequence[Any] | None:
        is_tied = id(eqn) in tied
        if branch := nested.of_all_platforms(eqn):
            return _gone_into(branch, inputs[1:], few) if is_tied else None
        if eqn.effects and name in _DIVIDED:  # Each part would have them again.
            return None
        if name == Op.COND and (is_tied or _is_nested_or_stacked(eqn)):
            # What is refused later is named by the line of the user's conditional.
            with source_info_util.user_context(eqn.source_info.traceback):
                return _conditionals(eqn, inputs, owners, few, is_tied)
        if not is_tied:
            return None
        if name == Op.BARRIER:
            return _barriers(eqn, inputs, owners)
        if name in _LOOPS:
            return _loops(eqn, inputs, owners, few)
        inside = jax.make_jaxpr(programs.program(eqn).run)
        return _gone_into(inside([x.aval for x in eqn.invars]), inputs, few)

    def run(*args: jax.Array) -> list[Any]:
        return jaxprs.run(closed.jaxpr, [*closed.consts, *args], rule)

    return jax.make_jaxpr(run)(*unplaced.bare_types(closed.jaxpr.invars))


_LOOPS = Op.SCAN, Op.WHILE
_DIVIDED = *_LOOPS, Op.COND


def _may_tie(eqn: JaxprEqn) -> bool:
    name = jaxprs.name_of(eqn)
    is_run = programs.OPERATIONS.get(name) is programs.Runs.ONCE
    return is_run or name in (*_DIVIDED, Op.BARRIER)


def _gone_into(closed: ClosedJaxpr, inputs: Sequence[Any], few: int) -> Sequence[Any]:
    inside = divided(programs.inlined(closed), few)
    return jaxprs.run(inside.jaxpr, [*inside.consts, *inputs])


def _is_nested_or_stacked(eqn: JaxprEqn) -> bool:
    """Whether a conditional has another one in a branch, or makes a stack."""
    if jaxprs.name_of(eqn) != Op.COND:
        return False
    if any(map(_is_stack, eqn.outvars)):
        return True
    return any(jaxprs.anywhere(x.jaxpr, Op.COND) for x in eqn.params["branches"])


def _is_stack(x: Var | Literal) -> bool:
    """Whether it may have several matrices."""
    return len(shape_of(x)) > 2


def _owners(closed: ClosedJaxpr, few: int, whose: Sequence[Owner] = ()) -> Owners:
    """``whose`` are the owners of arguments, if they are known."""
    jaxpr = closed.jaxpr
    together = [
        [jaxpr.invars[k] for k in members]
        for members in _by_owner(whose)
        if not isinstance(whose[members[0]], Nobody)
    ]
    known = [x for x in jaxpr.invars if math.prod(shape_of(x)) < few]
    eqns = jaxprs.all_equations(jaxpr)
    return Owners(
        jaxpr, eqns, jaxprs.made_of(eqns, [*known, *jaxpr.constvars]), together
    )


def _by_owner(whose: Iterable[Owner]) -> list[list[int]]:
    """The positions of each owner."""
    found: dict[Owner, list[int]] = {}
    for k, owner in enumerate(whose):
        found.setdefault(owner, []).append(k)
    return [*found.values()]


def _barriers(eqn: JaxprEqn, inputs: list[Any], owners: Owners) -> list[Any]:
    results: list[Any] = [None] * len(inputs)
    whose = (Nobody.SEVERAL if is_number(x) else owners.of[x] for x in eqn.outvars)
    for members in _by_owner(whose):
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
        of = {owners.of[y] for y in (*loop.operands([k]), x) if not is_number(y)}
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
    eqn: JaxprEqn, inputs: list[Any], owners: Owners, few: int, is_tied: bool
) -> list[Any] | None:
    """The results of a conditional, by one for each owner of some of them.

    None if it stays as it is.
    """
    index, *operands = inputs
    outside = [
        owners.of[x] if jaxprs.is_variable(x) else Nobody.FREE for x in eqn.invars[1:]
    ]
    branches = [
        _Branch(closed, operands, outside, few) for closed in eqn.params["branches"]
    ]

    def owner(k: int, x: Var) -> Owner:
        """A number of one parameter, such as the norm of its factor, is in its part."""
        if not is_number(x):
            return owners.of[x]
        found = set().union(*(branch.read_by(k) for branch in branches))
        return found.pop() if len(found) == 1 else Nobody.SEVERAL

    groups = [[*range(len(eqn.outvars))]]
    if is_tied:
        groups = _by_owner(owner(k, x) for k, x in enumerate(eqn.outvars))

    def each(f: Callable[..., list[Any]], *args: Sequence[int]) -> list[Any]:
        sides = [functools.partial(f, n, *args) for n in range(len(branches))]
        return list(jax.lax.switch(index, sides))

    def before(wanted: Sequence[Sequence[Var]]) -> dict[Any, Any]:
        """Variables of the branch that runs; those of the others are zeros."""
        types: list[Any] = [x.aval for found in wanted for x in found]

        def made(n: int) -> list[Any]:
            found = branches[n].results(wanted[n], known)
            zeros = [jnp.zeros(t.shape, t.dtype) for t in types]
            start = sum(map(len, wanted[:n]))
            return [*zeros[:start], *found, *zeros[start + len(found) :]]

        variables = [x for found in wanted for x in found]
        return dict(zip(variables, each(made), strict=True)) if types else {}

    def part(n: int, members: Sequence[int]) -> list[Any]:
        branch = branches[n]
        return branch.results([branch.jaxpr.outvars[k] for k in members], known)

    known: dict[Any, Any] = {}
    for branch in branches:
        known.update(branch.known())
    known.update(before([branch.drawn() for branch in branches]))
    numbers = [branch.numbers(are_several=len(groups) > 1) for branch in branches]
    known.update(before([first for first, _ in numbers]))
    for n, (_, others) in enumerate(numbers):
        for x in others:
            known.update(before([[x] if k == n else [] for k in range(len(branches))]))
    if not known and len(groups) == 1:
        return None
    results: list[Any] = [None] * len(eqn.outvars)
    for members in groups:
        for k, x in zip(members, each(part, members), strict=True):
            results[k] = x
    return results


class _Branch:
    """A branch of a conditional, with its operands and their owners."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Any],
        outside: Sequence[Owner],
        few: int,
    ) -> None:
        program = programs.inlined(closed)
        self._owners = _owners(program, few, outside)
        closed = divided(program, few, self._owners)
        if closed is not program:
            self._owners = _owners(closed, few, outside)
        self.jaxpr, self._outside = closed.jaxpr, outside
        self._env = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self._env |= zip(self.jaxpr.invars, operands, strict=True)
        self._few = few
        self._operands = {*self.jaxpr.invars, *self.jaxpr.constvars}
        self._makers: dict[Var, JaxprEqn] = {}
        eqns = jaxprs.all_equations(self.jaxpr)
        for eqn in eqns:
            self._makers |= dict.fromkeys(eqn.outvars, eqn)
        made = (x for eqn in eqns if is_of_matrices(eqn) for x in eqn.outvars)
        self._after_matrices = jaxprs.descendants(eqns, made)

    def read_by(self, k: int) -> set[Owner]:
        """The owners of operands that the equations of a result read."""
        of, result = self._owners.of, self.jaxpr.outvars[k]
        mine = of[result] if jaxprs.is_variable(result) else Nobody.FREE
        if isinstance(mine, Nobody):
            return set() if mine is Nobody.FREE else {mine}
        pairs = zip(self.jaxpr.invars, self._outside, strict=True)
        return {owner for x, owner in pairs if of[x] == mine}

    def known(self) -> dict[Var, Any]:
        """Few entries that depend on few alone, and that others read.

        They are computed before. So all devices know which branch of a conditional
        inside runs, and equal parameters have equal branches, each with its key.
        """
        read: dict[Var, None] = {}
        for eqn, owner in self._with_owners():
            makes_many = any(math.prod(shape_of(x)) >= self._few for x in eqn.outvars)
            if makes_many or owner is not Nobody.FREE:
                read.update((x, None) for x in self._made(eqn))
        found = [
            x
            for x in read
            if self._owners.of[x] is Nobody.FREE
            if math.prod(shape_of(x)) < self._few
        ]
        return dict(zip(found, self.results(found, {}), strict=True))

    def numbers(self, are_several: bool) -> tuple[list[Var], list[Var]]:
        """The numbers that parts of several owners read, or one of another owner.

        And those of a whole stack, such as its norm: they mix its matrices. Then those
        that need products of matrices, which come one after another.
        """
        found: dict[Var, None] = {}
        for eqn, owner in self._with_owners():
            of_stack = any(map(_is_stack, eqn.outvars))
            for x in filter(is_number, self._made(eqn)):
                of = self._owners.of[x]
                is_shared = are_several and of != owner
                is_whole = of_stack and x not in self._after_matrices
                if of is not Nobody.FREE and (is_shared or is_whole):
                    found |= dict.fromkeys(self._of_arrays(x) if is_shared else [x])
        after = [x for x in found if x in self._after_matrices]
        return [x for x in found if x not in self._after_matrices], after

    def _of_arrays(self, x: Var) -> list[Var]:
        """The numbers that this one is made of, each of arrays of one parameter.

        A sum of such numbers begins with one of them, and each is computed alike.
        """
        if x in self._operands or self._owners.of[x] is Nobody.FREE:
            return []
        read = [*filter(jaxprs.is_variable, self._makers[x].invars)]
        if self._owners.of[x] is Nobody.SEVERAL or not all(map(is_number, read)):
            return [x]
        return [y for of in read for y in self._of_arrays(of)]

    def drawn(self) -> list[Var]:
        """The random numbers of a whole stack: those of each matrix have no key."""
        found: dict[Var, None] = {}
        random: set[Var] = set()
        for eqn, owner in self._with_owners():
            read = [x for x in self._made(eqn) if x in random]
            if owner is not Nobody.FREE:
                found.update((x, None) for x in read if _is_stack(x))
            elif read or jaxprs.name_of(eqn) == Op.RANDOM_BITS:
                random.update(eqn.outvars)
        return [*found]

    def _with_owners(self) -> Iterator[tuple[JaxprEqn, Owner]]:
        eqns = jaxprs.all_equations(self.jaxpr)
        return zip(eqns, self._owners.equations, strict=True)

    def _made(self, eqn: JaxprEqn) -> Iterator[Var]:
        """The variables of this branch that an equation reads."""
        read = filter(jaxprs.is_variable, eqn.invars)
        return (x for x in read if x not in self._operands)

    def results(
        self, wanted: Sequence[Var | Literal], known: dict[Var, Any]
    ) -> list[Any]:
        """Some of its variables, if some are known."""
        env = self._env | known
        eqns = [
            eqn
            for eqn in jaxprs.all_equations(self.jaxpr)
            if env.keys().isdisjoint(eqn.outvars)
        ]
        jaxprs.advance(jaxprs.needed(eqns, wanted), env)
        return jaxprs.read(env, wanted)
