"""Axes along which matrices stand alone, such as layers, experts and heads.

The rules of the evaluator say along which axis of a result slices lie. Here they are
followed both ways, from one axis of one variable on. Whether each operation keeps these
slices apart, the evaluator proves.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._matrices import nested
from gradxform._matrices.nested import Scope
from gradxform._slices import rules
from gradxform._slices.rules import Along, shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var


class MixedError(Exception):
    """An equation does not keep slices apart."""


class Followed:
    """Along which axes variables have the slices of one axis.

    Attributes:
      mixing: the indices of equations that do not keep them apart.
    """

    def __init__(self, x: Var, axis: int) -> None:
        """Begins with an axis of a variable."""
        self._length = shape_of(x)[axis]
        self._known: dict[tuple[Scope, Var], Along] = {((), x): Along(axis)}
        self.mixing: set[int] = set()

    def along(self) -> dict[Var, Along]:
        """The variables of the program that have such slices."""
        return {x: along for (scope, x), along in self._known.items() if not scope}

    def follow(self, eqns: Sequence[JaxprEqn], needed: Collection[int]) -> None:
        """Goes through equations until nothing new is found.

        Args:
          eqns: they.
          needed: the indices of those that have to keep the slices apart.

        Raises:
          MixedError: one of these does not.
        """
        order = [*needed, *(k for k in range(len(eqns)) if k not in needed)]
        count = 0
        while count != len(self._known) + len(self.mixing):
            count = len(self._known) + len(self.mixing)
            for k in order:
                if k in self.mixing:
                    continue
                before = dict(self._known)
                try:
                    self._through(eqns[k], ())
                except MixedError:
                    if k in needed:
                        raise
                    self._known = before
                    self.mixing.add(k)

    def _of(self, x: Var | Literal, scope: Scope) -> Along | None:
        return self._known.get((scope, x)) if jaxprs.is_variable(x) else None

    def _set(self, x: Var, scope: Scope, along: Along) -> None:
        if self._known.setdefault((scope, x), along) != along:
            raise MixedError

    def _through(self, eqn: JaxprEqn, scope: Scope) -> None:
        """Both ways through an equation."""
        programs = nested.programs(eqn)
        if programs and not self._is_over_slices(eqn, scope):
            for n, program in enumerate(programs):
                self._inside(program, scope, (*scope, id(eqn), n))
            return
        if jaxprs.name_of(eqn) == Op.BARRIER:
            for pair in zip(eqn.invars, eqn.outvars, strict=True):
                self._tie(pair, (scope, scope), 0)
            return
        made = {self._of(x, scope) for x in eqn.outvars} - {None}
        read = [self._of(x, scope) for x in eqn.invars]
        if not made and not any(read):
            return
        for k, along in enumerate(read):
            if along is not None:
                made.add(self._after(eqn, k, along))
        if len(made) != 1 or None in made:
            raise MixedError
        (along,) = made
        assert along is not None
        if along.axis < 0:
            raise MixedError
        for result in eqn.outvars:
            self._set(result, scope, along)
        for k, x in enumerate(eqn.invars):
            if read[k] is None and jaxprs.is_variable(x):
                read[k] = before = self._before(eqn, k, along)
                if before is not None:
                    self._set(x, scope, before)
        name = jaxprs.name_of(eqn)
        is_made = rules.is_made(name, eqn, along) and name != Op.RANDOM_BITS
        if not any(read) and not is_made:
            raise MixedError

    def _is_over_slices(self, eqn: JaxprEqn, scope: Scope) -> bool:
        """Whether it is a scan from slice to slice."""
        if jaxprs.name_of(eqn) != Op.SCAN:
            return False
        constants, carry = versions.scan_lengths(eqn)
        over = *eqn.invars[constants + carry :], *eqn.outvars[carry:]
        found = [self._of(x, scope) for x in over]
        return any(along is not None and along.axis == 0 for along in found)

    def _after(self, eqn: JaxprEqn, operand: int, along: Along) -> Along | None:
        return rules.after(jaxprs.name_of(eqn), eqn, operand, along, self._length)

    def _before(self, eqn: JaxprEqn, operand: int, along: Along) -> Along | None:
        """The slices of an operand that give those of the result, if it has any."""
        for axis, size in enumerate(shape_of(eqn.invars[operand])):
            if size and not size % self._length:
                before = Along(axis, size // self._length)
                if self._after(eqn, operand, before) == along:
                    return before
        return None

    def _inside(self, program: nested.Inside, scope: Scope, inside: Scope) -> None:
        """Both ways through a program inside of an equation."""
        count = 0
        while count != len(self._known):
            count = len(self._known)
            for same in (*program.operands, *program.results):
                self._tie((same.inside, same.other), (inside, scope), same.shift)
            for same in program.carried:
                self._tie((same.inside, same.other), (inside, inside), 0)
            for eqn in jaxprs.all_equations(program.jaxpr):
                self._through(eqn, inside)

    def _tie(
        self,
        pair: Sequence[Var | Literal],
        scopes: tuple[Scope, Scope],
        shift: int,
    ) -> None:
        """The second has as many axes more in front."""
        one, other = (self._of(x, scope) for x, scope in zip(pair, scopes, strict=True))
        if one is not None and other is None:
            other = one._replace(axis=one.axis + shift)
            if jaxprs.is_variable(pair[1]):
                self._set(pair[1], scopes[1], other)
        elif other is not None:
            if other.axis < shift:
                raise MixedError
            before = other._replace(axis=other.axis - shift)
            if jaxprs.is_variable(pair[0]):
                self._set(pair[0], scopes[0], before)
