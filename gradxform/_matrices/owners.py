"""Which equations of an update belong to one parameter, with its state.

What an operation makes of large arrays belongs to them. Numbers tie nothing: a norm of
all gradients belongs to no parameter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs
from gradxform._jax.versions import Op
from gradxform._matrices import nested
from gradxform._matrices.nested import Scope
from gradxform._slices.rules import shape_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


class Nobody(enum.Enum):
    """Owners that are no parameter: few entries, or several parameters."""

    FREE = enum.auto()
    SEVERAL = enum.auto()


Owner: TypeAlias = Hashable


class Sets:
    """Disjoint sets: each element is in one of them."""

    def __init__(self) -> None:
        self._of: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        """The element that stands for the set of another one."""
        of = self._of
        while (y := of.setdefault(x, x)) != x:
            of[x] = of[y]
            x = y
        return x

    def join(self, elements: Iterable[Hashable]) -> None:
        """Joins the sets of some elements."""
        first, *others = map(self.find, elements)
        for other in others:
            self._of[self.find(other)] = self.find(first)


def is_number(x: Var | Literal) -> bool:
    """Whether it has one entry."""
    return math.prod(shape_of(x)) <= 1


def is_integer(x: Var | Literal) -> bool:
    """Whether it is a number that is no measure, but may decide what is computed."""
    aval: Any = x.aval
    return not shape_of(x) and not (
        jnp.issubdtype(aval.dtype, jnp.inexact)
        or jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        or jnp.issubdtype(aval.dtype, jnp.unsignedinteger)
    )


class Owners:
    """The owner of each variable of a program, and of each equation.

    Attributes:
      of: the owner of a variable.
      equations: the owner of each equation.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        eqns: Sequence[JaxprEqn],
        free: Collection[Var],
        together: Iterable[Sequence[Var]] = (),
    ) -> None:
        """Finds them.

        Args:
          jaxpr: the program.
          eqns: those of its equations that count.
          free: variables that depend on few entries alone.
          together: variables of one owner, as somebody knows.
        """
        self._sets = Sets()
        self._free: set[tuple[Scope, Var | Literal]] = {((), x) for x in free}
        self._joining: list[tuple[Scope, JaxprEqn]] = []
        for variables in together:
            self._join_all(variables, ())
        self._join(eqns, ())
        for scope, eqn in self._joining:
            parts = self._large(eqn.invars, scope)
            if len(set(map(self._sets.find, parts))) == 1:
                self._sets.join([*parts, *self._large(eqn.outvars, scope)])
        arguments = [*jaxpr.invars, *jaxpr.constvars]
        self._of_arguments = set(map(self._alone, arguments))
        self.of: dict[Var, Owner] = {x: self._alone(x) for x in arguments}
        self.equations = [self._owner(eqn) for eqn in eqns]

    def _large(self, atoms: Iterable[Var | Literal], scope: Scope) -> list[Hashable]:
        named = ((scope, x) for x in filter(jaxprs.is_variable, atoms))
        return [x for x in named if x not in self._free and not is_number(x[1])]

    def _join(self, eqns: Sequence[JaxprEqn], scope: Scope) -> None:
        for eqn in eqns:
            name, programs = jaxprs.name_of(eqn), nested.programs(eqn)
            for n, program in enumerate(programs):
                self._join_inside(program, scope, (*scope, id(eqn), n))
            if name == Op.BARRIER:
                for pair in zip(eqn.invars, eqn.outvars, strict=True):
                    self._join_all(pair, scope)
            elif name == "concatenate":
                self._joining.append((scope, eqn))
            elif not programs:
                self._join_all([*eqn.invars, *eqn.outvars], scope)

    def _join_inside(self, program: nested.Inside, scope: Scope, inside: Scope) -> None:
        changed = {same.other for same in program.carried}
        for same in program.operands:
            x, known = same.other, same.inside not in changed
            if known and (not jaxprs.is_variable(x) or (scope, x) in self._free):
                self._free.add((inside, same.inside))
        self._free.update((inside, x) for x in program.jaxpr.constvars)
        for eqn in jaxprs.all_equations(program.jaxpr):
            read = ((inside, x) for x in filter(jaxprs.is_variable, eqn.invars))
            if self._free.issuperset(read) and not eqn.effects:
                self._free.update((inside, x) for x in eqn.outvars)
        for same in (*program.operands, *program.results):
            self._sets.join(
                [
                    *(self._large([same.inside], inside)),
                    *(self._large([same.other], scope)),
                ]
                or [None]
            )
        for same in program.carried:
            self._join_all([same.inside, same.other], inside)
        self._join(jaxprs.all_equations(program.jaxpr), inside)

    def _join_all(self, atoms: Iterable[Var | Literal], scope: Scope) -> None:
        if found := self._large(atoms, scope):
            self._sets.join(found)

    def _alone(self, x: Var) -> Owner:
        return Nobody.FREE if ((), x) in self._free else self._sets.find(((), x))

    def _of_large(self, atoms: Iterable[Var | Literal]) -> set[Owner]:
        variables = filter(jaxprs.is_variable, atoms)
        found = {self._alone(x) for x in variables if not is_number(x)}
        return found - {Nobody.FREE}

    def _owner(self, eqn: JaxprEqn) -> Owner:
        """The owner of an equation, after those before it."""
        read = {self.of[x] for x in filter(jaxprs.is_variable, eqn.invars)}
        read.discard(Nobody.FREE)
        large = self._of_large(eqn.outvars)
        others = read - large
        is_new = large.isdisjoint(self._of_arguments)
        if len(others) == 1 and is_new and Nobody.SEVERAL not in others:
            # It is made of numbers of one parameter, such as a norm of each factor.
            self._sets.join([*others, *large])
            large = others
        found = large or self._of_large(eqn.invars) or read or {Nobody.FREE}
        owner = next(iter(found)) if len(found) == 1 else Nobody.SEVERAL
        for x in eqn.outvars:
            is_large = not is_number(x) and ((), x) not in self._free
            self.of[x] = self._alone(x) if is_large else owner
        return owner
