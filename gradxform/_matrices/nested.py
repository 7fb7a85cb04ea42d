"""Programs inside of an equation: which of their variables are which of outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from gradxform._jax import jaxprs, versions
from gradxform._jax.programs import OPERATIONS, Runs, program
from gradxform._jax.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


# Equations that a program is inside of, each by its `id` and the program's number.
Scope: TypeAlias = tuple[int, ...]


class Same(NamedTuple):
    """A variable inside is one outside, or another one inside.

    Attributes:
      inside: it.
      other: the other one.
      shift: how many axes more the other one has in front.
    """

    inside: Var | Literal
    other: Var | Literal
    shift: int = 0


class Inside(NamedTuple):
    """A program inside of an equation.

    Attributes:
      jaxpr: it.
      operands: inputs that are operands.
      results: results that are those of the equation.
      carried: results that are inputs of the next step of a loop.
    """

    jaxpr: Jaxpr
    operands: list[Same]
    results: list[Same]
    carried: list[Same]


def programs(eqn: JaxprEqn) -> list[Inside]:
    """The programs that an equation runs, and whose variables are known there."""
    name = jaxprs.name_of(eqn)
    if name in _KINDS:
        return [*_KINDS[name](eqn)]
    if OPERATIONS.get(name) in (Runs.ONCE, Runs.DERIVED):
        jaxpr = program(eqn).jaxpr
        operands = map(Same, jaxpr.invars, eqn.invars)
        results = map(Same, jaxpr.outvars, eqn.outvars)
        return [Inside(jaxpr, [*operands], [*results], [])]
    return []


def of_all_platforms(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The branch for all platforms, where the platform chooses one of several."""
    if not eqn.params.get("branches_platforms"):
        return None
    branch: ClosedJaxpr = eqn.params["branches"][-1]
    return branch


def _branches(eqn: JaxprEqn) -> Iterator[Inside]:
    """That for all platforms counts: one for a single platform may stack leaves."""
    of_all = of_all_platforms(eqn)
    for branch in [of_all] if of_all else eqn.params["branches"]:
        operands = map(Same, branch.jaxpr.invars, eqn.invars[1:])
        results = map(Same, branch.jaxpr.outvars, eqn.outvars)
        yield Inside(branch.jaxpr, [*operands], [*results], [])


def _scan(eqn: JaxprEqn) -> Iterator[Inside]:
    jaxpr = eqn.params["jaxpr"].jaxpr
    consts, carry = versions.scan_lengths(eqn)
    start = consts + carry
    shifts = [0] * start + [1] * (len(jaxpr.invars) - start)
    operands = [*map(Same, jaxpr.invars, eqn.invars, shifts)]
    shifts = [0] * carry + [1] * (len(jaxpr.outvars) - carry)
    results = [*map(Same, jaxpr.outvars, eqn.outvars, shifts)]
    pairs = zip(jaxpr.outvars[:carry], jaxpr.invars[consts:start], strict=True)
    yield Inside(jaxpr, operands, results, [Same(*pair) for pair in pairs])


def _while(eqn: JaxprEqn) -> Iterator[Inside]:
    ends, body = (eqn.params[f"{name}_jaxpr"].jaxpr for name in ("cond", "body"))
    before, after = (eqn.params[f"{name}_nconsts"] for name in ("cond", "body"))
    carry = eqn.invars[before + after :]
    first, then = eqn.invars[:before], eqn.invars[before : before + after]
    yield Inside(ends, [*map(Same, ends.invars, [*first, *carry])], [], [])
    operands = [*map(Same, body.invars, [*then, *carry])]
    results = [*map(Same, body.outvars, eqn.outvars)]
    carried = [*map(Same, body.outvars, body.invars[after:])]
    yield Inside(body, operands, results, carried)


_KINDS: dict[str, Callable[[JaxprEqn], Iterator[Inside]]] = {
    Op.COND: _branches,
    Op.SCAN: _scan,
    Op.WHILE: _while,
}
