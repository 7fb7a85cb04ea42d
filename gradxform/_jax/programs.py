"""Operations that run programs inside: one table of them, and how a reader goes in.

A reader of a jaxpr, such as the evaluator for slices, meets them everywhere: an inner
``jit`` is one. The default is to go in: :func:`run`. The page on the evaluator has a
column for each reader.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var


class Runs(enum.Enum):
    """How often an operation runs its programs."""

    ONCE = "once, on its operands"
    DERIVED = "once, and its derivative is another program"
    LOOP = "in each turn of a loop"
    BRANCH = "one of several"
    PARTS = "once on each device, on parts"
    NEVER = "it has none: each result is an operand"


OPERATIONS: dict[str, Runs] = {
    Op.BARRIER: Runs.NEVER,
    Op.CALL: Runs.ONCE,
    Op.CHECKPOINT: Runs.ONCE,
    Op.COND: Runs.BRANCH,
    Op.CUSTOM_JVP: Runs.DERIVED,
    Op.CUSTOM_VJP: Runs.DERIVED,
    Op.HIGH: Runs.DERIVED,
    Op.JIT: Runs.ONCE,
    Op.LINEAR_SOLVE: Runs.DERIVED,
    Op.SCAN: Runs.LOOP,
    Op.SHARD_MAP: Runs.PARTS,
    Op.WHILE: Runs.LOOP,
}


class InnerProgram(NamedTuple):
    """A program inside of an operation."""

    jaxpr: Jaxpr
    consts: Sequence[Any]  # Arrays, also of NumPy.

    @classmethod
    def of(cls, found: ClosedJaxpr | Jaxpr) -> InnerProgram:
        """The same of a jaxpr; that of a checkpoint has no constants."""
        jaxpr: Any = getattr(found, "jaxpr", found)
        return cls(jaxpr, getattr(found, "consts", ()))

    @classmethod
    def needed(cls, closed: ClosedJaxpr) -> InnerProgram:
        """A program without equations that nothing needs."""
        eqns = jaxprs.equations(closed.jaxpr)
        return cls(closed.jaxpr.replace(eqns=eqns), closed.consts)

    def run(
        self, inputs: Sequence[Any], rule: jaxprs.EquationRule | None = None
    ) -> list[Any]:
        """Its results, by a rule for its equations."""
        return jaxprs.run(self.jaxpr, [*self.consts, *inputs], rule)


def program(eqn: JaxprEqn) -> InnerProgram:
    """The program of an operation that runs it once, on its operands."""
    found: Any = eqn.params.get("jaxpr")
    if found is None:
        found = versions.opened(eqn)
    return InnerProgram.of(found)


def scope(eqn: JaxprEqn) -> contextlib.AbstractContextManager[object]:
    """For whoever goes into a ``jit``: a profiler then shows its name."""
    name = eqn.params.get("name")
    return jax.named_scope(name) if name else contextlib.nullcontext()


def run(
    eqn: JaxprEqn, inputs: Sequence[Any], rule: jaxprs.EquationRule | None = None
) -> list[Any]:
    """The results of an operation that runs its program once, by going in."""
    with scope(eqn):
        return program(eqn).run(inputs, rule)


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same, with the inside of each ``jit`` in its place. Nothing is traced."""
    from jax.extend import source_info_util

    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    names: dict[Var, Var | Literal] = {}
    eqns: list[JaxprEqn] = []

    def named(atoms: Sequence[Var | Literal]) -> list[Var | Literal]:
        return [names.get(x, x) if jaxprs.is_variable(x) else x for x in atoms]

    def enter(found: Sequence[JaxprEqn], scopes: Any, is_inside: bool) -> None:
        for eqn in found:
            where = eqn.source_info
            stack = scopes + where.name_stack
            if jaxprs.name_of(eqn) == Op.JIT:
                inner = program(eqn)
                for x, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    constants[x] = value
                names.update(zip(inner.jaxpr.invars, named(eqn.invars), strict=True))
                stack = stack.extend(eqn.params["name"])
                enter(jaxprs.all_equations(inner.jaxpr), stack, True)
                made = named(inner.jaxpr.outvars)
                names.update(zip(eqn.outvars, made, strict=True))
                continue
            operands, results = named(eqn.invars), eqn.outvars
            if is_inside:  # A program may be in several places.
                where = where.replace(name_stack=stack)
                results = [type(x)(x.aval) for x in eqn.outvars]
                names.update(zip(eqn.outvars, results, strict=True))
            eqns.append(
                eqn.replace(invars=operands, outvars=results, source_info=where)
            )

    jaxpr = closed.jaxpr
    enter(jaxprs.all_equations(jaxpr), source_info_util.new_name_stack(), False)
    jaxpr = jaxpr.replace(
        constvars=[*constants], outvars=named(jaxpr.outvars), eqns=eqns
    )
    return closed.replace(jaxpr=jaxpr, consts=[*constants.values()])


def first_use(jaxpr: Jaxpr, operand: int) -> tuple[int, ...]:
    """Where an input is used for the first time: in an equation, in one inside of it.

    What makes a variable of it by slices is no use.
    """
    values = jaxprs.derived_from(jaxpr, [operand])
    eqns = jaxprs.equations(jaxpr)
    for index, eqn in enumerate(eqns):
        found = jaxprs.among(eqn.invars, values)
        if not found or jaxprs.follows(eqn):
            continue
        if OPERATIONS.get(jaxprs.name_of(eqn)) is not Runs.ONCE:
            return (index,)
        return index, *first_use(program(eqn).jaxpr, min(found))
    return (len(eqns),)


def with_placements(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same, where shardings of an inner ``jit`` are equations of its program.

    So whoever goes in finds them there, as any other constraint of the user.
    """

    def with_equations(eqn: JaxprEqn) -> JaxprEqn:
        if not _has_shardings(eqn):
            return eqn
        inside: Callable[..., list[Any]] = program(eqn).run

        def f(*inputs: jax.Array) -> list[jax.Array]:
            results = inside(_put(inputs, eqn.params["in_shardings"]))
            return _put(results, eqn.params["out_shardings"])

        types = [x.aval for x in eqn.invars]
        return eqn.replace(params=eqn.params | {"jaxpr": jax.make_jaxpr(f)(*types)})

    if not any(map(_has_shardings, jaxprs.anywhere(closed.jaxpr, Op.JIT))):
        return closed
    return jaxprs.replaced(closed, with_equations)


def _has_shardings(eqn: JaxprEqn) -> bool:
    """Whether it is a ``jit`` that says where its arrays lie."""
    names = "in_shardings", "out_shardings"
    both = (x for name in names for x in eqn.params.get(name, ()))
    return any(isinstance(x, NamedSharding) for x in both)


def _put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Arrays where shardings say; some of these say nothing."""

    def put(x: Any, there: Any) -> Any:
        if not isinstance(there, NamedSharding):
            return x
        if there.mesh.explicit_axes:
            return jax.sharding.reshard(x, there)
        return jax.lax.with_sharding_constraint(x, there)

    return list(map(put, arrays, shardings))
