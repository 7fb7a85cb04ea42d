"""In which branches of conditionals a core needs an array: only then it travels.

An eigenbasis is computed every few steps, by a conditional whose predicate all devices
know. What its branch alone reads need not come if it does not run. A result that is an
operand in the other branches need not go back: it lies there already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs
from gradxform._jax.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var

# Branches that run together: the number that chooses one, and that of the branch.
Chosen: TypeAlias = frozenset[tuple[int, int]]
# When something is needed: if all chosen branches of one of these run.
Condition: TypeAlias = frozenset[Chosen]
ALWAYS: Condition = frozenset([frozenset()])
NEVER: Condition = frozenset()


class Kept(NamedTuple):
    """A result of conditionals that is one of their operands in other branches.

    Attributes:
      operand: it; None if there is no such.
      changed: when it is something else.
    """

    operand: Var | None
    changed: Condition


def of_variables(
    eqns: Sequence[JaxprEqn],
    wanted: Mapping[Var, Condition],
    numbers: Mapping[Var, int],
) -> dict[Var, Condition]:
    """When variables are needed.

    Args:
      eqns: what reads and makes them.
      wanted: when some of them are.
      numbers: for numbers that are known before what stands for each.
    """
    found = dict(wanted)
    for eqn in reversed(eqns):
        made = [found.get(x, NEVER) for x in eqn.outvars]
        conditions = of_operands(eqn, made, numbers)
        for x, condition in zip(eqn.invars, conditions, strict=True):
            if jaxprs.is_variable(x):
                found[x] = _any([found.get(x, NEVER), condition])
    return found


def of_operands(
    eqn: JaxprEqn, made: Sequence[Condition], numbers: Mapping[Var, int]
) -> list[Condition]:
    """When the operands of an equation are needed, if its results are."""
    if (number := number_of(eqn, numbers)) is None:
        return [_any(made)] * len(eqn.invars)
    branches = []
    for n, branch in enumerate(eqn.params["branches"]):
        jaxpr, wanted = branch.jaxpr, dict[Any, Condition]()
        for x, condition in zip(jaxpr.outvars, made, strict=True):
            if jaxprs.is_variable(x):
                before = wanted.get(x, NEVER)
                wanted[x] = _any([before, _within(condition, number, n)])
        known = _inside(eqn, n, numbers)
        found = of_variables(jaxprs.all_equations(jaxpr), wanted, known)
        branches.append([found.get(x, NEVER) for x in jaxpr.invars])
    return [_any(made), *(_of(number, each) for each in zip(*branches, strict=True))]


def kept(
    x: Var | Literal,
    eqns: Sequence[JaxprEqn],
    numbers: Mapping[Var, int],
    operands: Collection[Var],
) -> Kept:
    """The operand that a result is in branches that do not change it."""
    if not jaxprs.is_variable(x) or x in operands:
        return Kept(x, NEVER) if jaxprs.is_variable(x) else Kept(None, ALWAYS)
    makers = [eqn for eqn in eqns if x in eqn.outvars]
    if makers and jaxprs.name_of(makers[0]) == Op.COPY:  # A placement that is left out.
        return kept(makers[0].invars[0], eqns, numbers, operands)
    number = number_of(makers[0], numbers) if makers else None
    if number is None:
        return Kept(None, ALWAYS)
    (eqn,) = makers
    found = list[Kept]()
    for n, branch in enumerate(eqn.params["branches"]):
        result = branch.jaxpr.outvars[eqn.outvars.index(x)]
        outer = dict(zip(branch.jaxpr.invars, eqn.invars[1:], strict=True))
        pairs = [(y, of) for y, of in outer.items() if jaxprs.is_variable(of)]
        there = [y for y, of in pairs if of in operands]
        known = _inside(eqn, n, numbers)
        each = kept(result, jaxprs.all_equations(branch.jaxpr), known, there)
        operand: Any = each.operand and outer[each.operand]
        found.append(Kept(operand, each.changed))
    of = {each.operand for each in found} - {None}
    if len(of) != 1:
        return Kept(None, ALWAYS)
    return Kept(of.pop(), _of(number, [each.changed for each in found]))


def number_of(eqn: JaxprEqn, numbers: Mapping[Var, int]) -> int | None:
    """The number that chooses the branch of a conditional, if it is known."""
    if jaxprs.name_of(eqn) != Op.COND or not jaxprs.is_variable(eqn.invars[0]):
        return None
    return numbers.get(eqn.invars[0])


def _inside(eqn: JaxprEqn, branch: int, numbers: Mapping[Var, int]) -> dict[Var, int]:
    """The numbers that are known in a branch."""
    inside = eqn.params["branches"][branch].jaxpr.invars
    pairs = zip(inside, eqn.invars[1:], strict=True)
    return {x: numbers[y] for x, y in pairs if jaxprs.is_variable(y) and y in numbers}


def _any(conditions: Iterable[Condition]) -> Condition:
    """When one of them holds."""
    found = NEVER.union(*conditions)
    return ALWAYS if frozenset() in found else found


def _within(condition: Condition, number: int, branch: int) -> Condition:
    """When it holds inside of a branch."""
    paths = (dict(path) for path in condition)
    inside = (path for path in paths if path.get(number, branch) == branch)
    return frozenset(
        frozenset((k, n) for k, n in path.items() if k != number) for path in inside
    )


def _of(number: int, branches: Sequence[Condition]) -> Condition:
    """When the condition of the branch holds that runs."""
    if len({*branches}) == 1:
        return branches[0]
    return _any(
        [
            frozenset(path | {(number, n)} for path in condition)
            for n, condition in enumerate(branches)
        ]
    )


def holds(condition: Condition, numbers: Mapping[int, jax.Array]) -> jax.Array:
    """Whether a condition holds, where numbers have these values."""
    if condition == NEVER:  # A result that no branch changes.
        return jnp.zeros((), bool)
    paths = [
        jnp.stack([numbers[k].astype("int32") == n for k, n in sorted(path)])
        for path in condition
    ]
    return jnp.any(jnp.stack([jnp.all(path) for path in paths]))
