"""Divides conditionals of several parameters: each parameter gets its part of them.

A gate decides for all leaves at once, and so does an optimizer that computes all its
eigenbases every few steps. Each part has the same predicate, and of each branch the
equations that its results need. Numbers of several parameters, such as a norm of all
gradients in a branch, are computed before, if this branch runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, programs
from gradxform._jax.versions import Op
from gradxform._matrices import unplaced
from gradxform._matrices.owners import Nobody, Owner, Owners, is_number
from gradxform._slices.rules import shape_of

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var


def divided(closed: ClosedJaxpr, few: int) -> ClosedJaxpr:
    """The same program, whose conditionals are each of one parameter.

    An argument of fewer entries than ``few`` belongs to none.
    """
    from jax.extend import source_info_util

    if not any(map(_may_tie, jaxprs.all_equations(closed.jaxpr))):
        return closed
    owners = _owners(closed, few)

    def rule(name: str, inputs: list[Any], eqn: JaxprEqn) -> Sequence[Any] | None:
        if not _may_tie(eqn):
            return None
        large = {owners.of[x] for x in eqn.outvars if not is_number(x)}
        if len(large - {Nobody.FREE}) < 2:
            return None
        if name == Op.BARRIER:
            return _barriers(eqn, inputs, owners)
        if eqn.params.get("branches_platforms"):  # It is that of all platforms.
            branch = eqn.params["branches"][-1]
            return jaxprs.run(branch.jaxpr, [*branch.consts, *inputs[1:]])
        # What is refused later is named by the line of the user's conditional.
        with source_info_util.user_context(eqn.source_info.traceback):
            return _conditionals(eqn, inputs, owners, few)

    def run(*args: jax.Array) -> list[Any]:
        return jaxprs.run(closed.jaxpr, [*closed.consts, *args], rule)

    return jax.make_jaxpr(run)(*unplaced.bare_types(closed.jaxpr.invars))


def _may_tie(eqn: JaxprEqn) -> bool:
    return jaxprs.name_of(eqn) in (Op.COND, Op.BARRIER) and len(eqn.outvars) > 1


def _owners(closed: ClosedJaxpr, few: int) -> Owners:
    jaxpr = closed.jaxpr
    known = [x for x in jaxpr.invars if math.prod(shape_of(x)) < few]
    free = {*known, *jaxpr.constvars}
    for eqn in jaxprs.all_equations(jaxpr):
        read = filter(jaxprs.is_variable, eqn.invars)
        if free.issuperset(read) and not eqn.effects:
            free.update(eqn.outvars)
    return Owners(jaxpr, jaxprs.all_equations(jaxpr), free)


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


def _conditionals(
    eqn: JaxprEqn, inputs: list[Any], owners: Owners, few: int
) -> list[Any]:
    """The results of a conditional, by one for each owner of some of them."""
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

    groups = _by_owner(map(owner, itertools.count(), eqn.outvars))
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

    known = dict[Any, Any]()
    if types:
        variables = [x for found in shared for x in found]
        known = dict(zip(variables, each(numbers), strict=True))
    results: list[Any] = [None] * len(eqn.outvars)
    for members in groups:
        for k, x in zip(members, each(part, members, known), strict=True):
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
        closed = divided(programs.inlined(closed), few)
        self.jaxpr, self._outside = closed.jaxpr, outside
        self._owners = _owners(closed, few)
        self._env = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self._env |= zip(self.jaxpr.invars, operands, strict=True)
        # Whichever branch runs: a key of each parameter is then no part of its program.
        jaxprs.advance([*self._of_few(few)], self._env)

    def _of_few(self, few: int) -> Iterator[JaxprEqn]:
        """The equations that make few entries, for each result, of few entries."""
        computed = {x for x in self._env if math.prod(shape_of(x)) < few}
        limit = few * len(self.jaxpr.outvars)
        for eqn in jaxprs.all_equations(self.jaxpr):
            are_few = all(math.prod(shape_of(x)) < limit for x in eqn.outvars)
            is_simple = not eqn.effects and not [*jaxprs.inside(eqn)]
            read = filter(jaxprs.is_variable, eqn.invars)
            if are_few and is_simple and computed.issuperset(read):
                computed.update(eqn.outvars)
                yield eqn

    def read_by(self, k: int) -> set[Owner]:
        """The owners of operands that the equations of a result read."""
        of, result = self._owners.of, self.jaxpr.outvars[k]
        mine = of[result] if jaxprs.is_variable(result) else Nobody.FREE
        if isinstance(mine, Nobody):
            return set() if mine is Nobody.FREE else {mine}
        pairs = zip(self.jaxpr.invars, self._outside, strict=True)
        return {owner for x, owner in pairs if of[x] == mine}

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
        env = self._env | known
        eqns = [
            eqn
            for eqn in jaxprs.all_equations(self.jaxpr)
            if env.keys().isdisjoint(eqn.outvars)
        ]
        jaxprs.advance(jaxprs.needed(eqns, wanted), env)
        pairs = zip(wanted, jaxprs.read(env, wanted), strict=True)
        return [jaxprs.as_array(x, of) for of, x in pairs]
