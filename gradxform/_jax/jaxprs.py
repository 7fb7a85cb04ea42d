"""Reads jaxprs: evaluates one by a rule, follows a leaf through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._jax import versions
from gradxform._jax.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# (name of the operation, inputs, equation) -> results, or None
EquationRule: TypeAlias = Callable[[str, list[Any], "JaxprEqn"], Sequence[Any] | None]

# What may be done with a leaf before something reads slices of it.
_FOLLOWS = versions.SAME_VALUES | versions.OF_ONE_ENTRY | {Op.RESHAPE, Op.TRANSPOSE}
# Results that are no arrays yet.
_CONSTANT = int, float, complex, np.generic, np.ndarray


def run(
    jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule | None = None
) -> list[Any]:
    """The results of a jaxpr.

    ``rule(name, inputs, eqn)`` gives those of an equation, by the name of its
    operation. If it returns None, the equation is evaluated as it is.

    ``args`` are constants and then inputs, of any kind that the rule takes.
    """
    from jax.extend.core import Literal

    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    advance(jaxpr.eqns, env, rule)
    pairs = [(x, x.val if isinstance(x, Literal) else env[x]) for x in jaxpr.outvars]
    return [as_array(x, t) for t, x in pairs]


def as_array(x: Any, of_type: Var | Literal) -> Any:
    """A number as an array of a variable's type; everything else as it is."""
    t: Any = of_type.aval
    if not isinstance(x, _CONSTANT):
        return x
    return jnp.asarray(x, None if t.weak_type else t.dtype)


def result(
    closed: ClosedJaxpr, index: int, args: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """A function that computes one result of a jaxpr, and those of ``args`` it takes.

    It has only the equations that this result needs, and no others' effects.
    """
    jaxpr = closed.jaxpr
    wanted = jaxpr.outvars[index]
    eqns = needed(jaxpr.eqns, [wanted], effects=False)
    variables = {*filter(is_variable, [wanted]), *variables_read(eqns)}
    taken = [*among(jaxpr.invars, variables)]

    def computed(used: Sequence[Any]) -> Any:
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= zip([jaxpr.invars[k] for k in taken], used, strict=True)
        advance(eqns, env)
        return read(env, [wanted])[0]

    return computed, [args[k] for k in taken]


def constant_off_cpu(jaxpr: Jaxpr, result: Var | Literal) -> float | None:
    """The number that each entry of a result is on all platforms but CPU.

    None if no operation says it.
    """
    from jax.extend.core import Literal

    for eqn in jaxpr.eqns:
        if result not in eqn.outvars:
            continue
        if eqn.primitive.name == Op.BROADCAST and isinstance(eqn.invars[0], Literal):
            return float(eqn.invars[0].val)
        # `compilers.on_cpu` has a form for CPU and one for the others.
        if eqn.params.get("branches_platforms") == (("cpu",), None):
            other = eqn.params["branches"][1].jaxpr
            return constant_off_cpu(other, other.outvars[eqn.outvars.index(result)])
    return None


def advance(
    eqns: Sequence[JaxprEqn], env: dict[Var, Any], rule: EquationRule | None = None
) -> None:
    """Adds the results of some equations to the values of variables."""
    from jax.extend.core import Literal

    for eqn in eqns:
        # As `read` does. A call for each equation would be many.
        inputs = [x.val if isinstance(x, Literal) else env[x] for x in eqn.invars]
        results = rule and rule(eqn.primitive.name, inputs, eqn)
        if results is None:
            results = versions.bind(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))


def read(env: Mapping[Var, Any], atoms: Sequence[Var | Literal]) -> list[Any]:
    """The values of variables and literals."""
    from jax.extend.core import Literal

    return [x.val if isinstance(x, Literal) else env[x] for x in atoms]


def calls_host(program: ClosedJaxpr | JaxprEqn) -> bool:
    """Whether an ``io_callback`` is in it: each run of it may give another result."""
    return not {"IO", "OrderedIO"}.isdisjoint(map(str, program.effects))


def with_line(eqn: JaxprEqn) -> str:
    """An equation's operation, and the line of the user's code, for messages."""
    from jax.extend import source_info_util

    line = source_info_util.summarize(eqn.source_info)  # "" in an interpreter.
    return f"{eqn.primitive.name!r} {line}".rstrip()


def replaced(
    closed: ClosedJaxpr,
    f: Callable[[JaxprEqn], JaxprEqn],
    atom: Callable[[Var | Literal], Var | Literal] | None = None,
) -> ClosedJaxpr:
    """The same jaxpr with ``f(eqn)`` for each equation of it and of those inside.

    With ``atom`` it has ``atom(x)`` for each variable and literal.
    """
    # To import these classes takes a tenth of a second. Since JAX 0.12 they are one.
    plain, _ = kinds = type(closed.jaxpr), type(closed)

    def mapped(x: Any) -> Any:  # A parameter of any type.
        if type(x) is tuple:
            return tuple(map(mapped, x))
        if isinstance(x, plain):
            return of_jaxpr(x)
        return x.replace(jaxpr=mapped(x.jaxpr)) if isinstance(x, kinds) else x

    def of_jaxpr(x: Any) -> Any:
        eqns = list(map(of_eqn, x.eqns))
        if atom is None:
            return x.replace(eqns=eqns)
        names = "constvars", "invars", "outvars"
        lists = {name: list(map(atom, getattr(x, name))) for name in names}
        if hasattr(x, "consts"):  # Since JAX 0.12.
            lists["consts"] = x.consts
        return x.replace(eqns=eqns, debug_info=x.debug_info, **lists)

    def of_eqn(eqn: JaxprEqn) -> JaxprEqn:
        params = {name: mapped(x) for name, x in eqn.params.items()}
        if atom is not None:
            atoms = list(map(atom, eqn.invars)), list(map(atom, eqn.outvars))
            eqn = eqn.replace(invars=atoms[0], outvars=cast(Any, atoms[1]))
        return f(eqn.replace(params=params))

    return mapped(closed)


def all_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of a program, also those that nothing needs."""
    return list(jaxpr.eqns)


def equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that its results need, and those with an effect."""
    return needed(jaxpr.eqns, jaxpr.outvars)


def needed(
    eqns: Sequence[JaxprEqn], results: Sequence[Var | Literal], *, effects: bool = True
) -> list[JaxprEqn]:
    """The equations that these results need; with ``effects`` also those with one."""
    kept: list[JaxprEqn] = []
    read = set(filter(is_variable, results))
    for eqn in reversed(eqns):
        if (effects and eqn.effects) or not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(filter(is_variable, eqn.invars))
    return kept[::-1]


def among(atoms: Sequence[Var | Literal], variables: Collection[Var]) -> dict[int, Var]:
    """Those of some variables that are among others and literals, by position."""
    found = enumerate(atoms)
    return {k: x for k, x in found if is_variable(x) and x in variables}


def name_of(eqn: JaxprEqn) -> str:
    """The name of an equation's operation."""
    return eqn.primitive.name


@dataclasses.dataclass(frozen=True)
class LeafVariable:
    """A variable that some equations make of a leaf: they cast it, or name it.

    They are evaluated again for a part of the leaf, if something reads only that part
    of the variable. So nothing needs all of it.

    Attributes:
      index: that of the leaf.
      path: its path.
      equations: they, one after another. Each has one operand beside numbers.
    """

    index: int
    path: str
    equations: tuple[JaxprEqn, ...] = ()

    @property
    def is_stopped(self) -> bool:
        """Whether it gives the leaf no gradient."""
        return any(name_of(eqn) == Op.STOP_GRADIENT for eqn in self.equations)

    def then(self, eqn: JaxprEqn) -> Self:
        """The variable that an equation makes of this one."""
        return dataclasses.replace(self, equations=(*self.equations, eqn))


def evaluated(eqns: Iterable[JaxprEqn], x: jax.Array) -> jax.Array:
    """The result of equations of one operand and numbers, one after another."""
    for eqn in eqns:
        (variable,) = filter(is_variable, eqn.invars)
        (x,) = versions.bind(eqn, read({variable: x}, eqn.invars))
    return x


def follows(eqn: JaxprEqn) -> bool:
    """Whether each slice of the result is made of one slice of the only array."""
    if name_of(eqn) in _FOLLOWS:
        return True
    return name_of(eqn) in versions.ELEMENTWISE and len(_arrays(eqn)) == 1


def operand(eqn: JaxprEqn) -> int:
    """The position of the only array among an equation's operands."""
    return _arrays(eqn)[0]


def _arrays(eqn: JaxprEqn) -> list[int]:
    """The positions of operands that are no numbers of the program."""
    return [k for k, x in enumerate(eqn.invars) if is_variable(x)]


def derived_from(jaxpr: Jaxpr, inputs: Collection[int]) -> set[Var]:
    """These inputs, and the variables that equations make of them by slices."""
    found = {jaxpr.invars[k] for k in inputs}
    for eqn in jaxpr.eqns:
        if follows(eqn) and among(eqn.invars, found):
            found.update(eqn.outvars)
    return found


def made_of(eqns: Iterable[JaxprEqn], given: Iterable[Var]) -> set[Var]:
    """Some variables, and those that equations make of such alone."""
    found = set(given)
    for eqn in eqns:
        read = filter(is_variable, eqn.invars)
        if found.issuperset(read) and not eqn.effects:
            found.update(eqn.outvars)
    return found


def descendants(eqns: Iterable[JaxprEqn], given: Iterable[Var]) -> set[Var]:
    """Some variables, and those that equations make of one of them."""
    found = set(given)
    for eqn in eqns:
        if among(eqn.invars, found):
            found.update(eqn.outvars)
    return found


def is_variable(x: Var | Literal) -> TypeGuard[Var]:
    return not hasattr(x, "val")


def variables_read(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read, each once."""
    read = (x for eqn in eqns for x in eqn.invars)
    return [*dict.fromkeys(filter(is_variable, read))]


def anywhere(jaxpr: Jaxpr, name: str) -> list[JaxprEqn]:
    """The equations with this operation, also those inside of others."""
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    programs = (x for eqn in jaxpr.eqns for x in inside(eqn))
    return found + [eqn for program in programs for eqn in anywhere(program, name)]


def inside(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that are parameters of an equation."""
    for x in jax.tree.leaves(list(eqn.params.values())):
        found: Any = getattr(x, "jaxpr", x)
        if hasattr(found, "eqns"):
            yield found
