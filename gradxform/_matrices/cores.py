"""Cores of an update: the parts of its jaxpr that need whole matrices.

A core reads some arrays and makes some, for each matrix: its gradient, momenta,
factors, eigenbases. In it are the operations on the matrices of one parameter:
products, decompositions. Where it begins and ends the fewest bytes pass. Arrays of the
state may lie where the matrices are: then they do not pass at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._matrices import due, equality, unplaced
from gradxform._matrices.axes import Followed, MixedError
from gradxform._matrices.boundary import NEVER, Graph
from gradxform._matrices.exchange import Axes
from gradxform._matrices.owners import (
    Nobody,
    Owner,
    Owners,
    Sets,
    is_integer,
    is_number,
)
from gradxform._matrices.placements import Names
from gradxform._slices import rules
from gradxform._slices.rules import Along, shape_of
from gradxform._slices.slices import (
    Evaluator,
    Kind,
    MixedSlicesError,
    Policy,
    Slices,
    Source,
)

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Each device may read fewer entries as a whole, and compute with them.
FEW = 64
_SHOWN = 4  # Operands in a message.


class MatrixCore(NamedTuple):
    """Equations that make arrays of others, for each matrix of one parameter.

    Attributes:
      equations: they.
      reads: what they read and do not make. Numbers and few entries are the same for
        each matrix of a parameter.
      makes: what they make and others read.
      axes: those of the matrices, for each variable that it reads or makes.
      level: how often numbers of several parameters are needed before it.
      indices: those of its equations in the program.
      origin: its part, and which equations of it. Cores of one origin are equal.
    """

    equations: tuple[JaxprEqn, ...]
    reads: tuple[Var, ...]
    makes: tuple[Var, ...]
    axes: Mapping[Var, Axes]
    level: int
    indices: set[int]
    origin: Hashable

    def key(self) -> Hashable:
        """What is equal for equal cores."""
        axes = (self.axes[x] for x in (*self.reads, *self.makes))
        program = equality.of_equations(self.reads, self.equations, self.makes)
        return self.level, tuple(axes), program

    def is_array(self, x: Var) -> bool:
        """Whether what it reads may be another one for each matrix."""
        axes = self.axes[x]
        return any(a is not None for a in axes) or (
            not axes and math.prod(shape_of(x)) >= FEW
        )


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The program of equal cores, for one matrix.

    Attributes:
      program: the core. Axes of matrices have one entry.
      reads: the axes of each array that it reads.
      makes: and of each that it makes.
      key: what is equal for equal programs.
      undivided: the core with all entries along its axis of matrices, if it has one.
    """

    program: ClosedJaxpr = dataclasses.field(compare=False)
    reads: tuple[Axes, ...]
    makes: tuple[Axes, ...]
    key: Hashable
    undivided: ClosedJaxpr | None = dataclasses.field(compare=False)

    def results(
        self, are_same: Sequence[bool], arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The results for some matrices, which follow each other in front.

        ``are_same`` says which arrays are the same for all of them.
        """

        def one(*arrays: jax.Array) -> list[jax.Array]:
            pairs = zip(arrays, self.reads, strict=True)
            args = [jnp.expand_dims(x, _there(axes)) for x, axes in pairs]
            found = jaxprs.run(self.program.jaxpr, [*self.program.consts, *args])
            pairs = zip(found, self.makes, strict=True)
            return [jnp.squeeze(x, _there(axes)) for x, axes in pairs]

        pairs = [*zip(arrays, are_same, strict=True)]
        (count,) = {len(x) for x, is_same in pairs if not is_same}
        if count == 1:
            found = one(*(x if is_same else x[0] for x, is_same in pairs))
            return [x[None] for x in found]
        if several := self._several(are_same, count):
            return several(*arrays)
        of_all = jax.vmap(one, [None if is_same else 0 for is_same in are_same])
        if not jaxprs.anywhere(self.program.jaxpr, Op.COND):
            return of_all(*arrays)
        traced = jax.make_jaxpr(of_all)(*arrays)
        programs = traced.jaxpr, self.program.jaxpr
        of_several, of_one = (len(jaxprs.anywhere(x, Op.COND)) for x in programs)
        if of_several < of_one:
            # Predicates differ: under `vmap` each matrix would run all branches.
            return self._one_by_one(one, pairs)
        return jaxprs.run(traced.jaxpr, [*traced.consts, *arrays])

    def _several(
        self, are_same: Sequence[bool], count: int
    ) -> Callable[..., list[jax.Array]] | None:
        """The core for some matrices along its own axis, if that is possible.

        In a batch around it this axis would be another one, of one entry. XLA's CPU
        compiler does not see through it: Muon's groups had 0.93 N of temporaries, and
        have 0.25 N.
        """
        if self.undivided is None:
            return None
        before, after = ([axis for (axis,) in of] for of in (self.reads, self.makes))
        if [axis is None for axis in before] != [*are_same]:
            return None
        try:
            program = _for_entries(self.undivided, before, after, count)
        except MixedSlicesError:  # Of one entry each is the same.
            return None

        def run(*arrays: jax.Array) -> list[jax.Array]:
            pairs = zip(arrays, before, strict=True)
            args = [x if a is None else jnp.moveaxis(x, 0, a) for x, a in pairs]
            found = jaxprs.run(program.jaxpr, [*program.consts, *args])
            pairs = zip(found, after, strict=True)
            return [x if a is None else jnp.moveaxis(x, a, 0) for x, a in pairs]

        return run

    @staticmethod
    def _one_by_one(
        one: Callable[..., list[jax.Array]], pairs: Sequence[tuple[jax.Array, bool]]
    ) -> list[jax.Array]:
        def of(each: list[jax.Array]) -> list[jax.Array]:
            given = iter(each)
            return one(*(x if is_same else next(given) for x, is_same in pairs))

        return jax.lax.map(of, [x for x, is_same in pairs if not is_same])


def _there(axes: Axes) -> tuple[int, ...]:
    return tuple(axis for axis in axes if axis is not None)


def is_of_matrices(eqn: JaxprEqn) -> bool:
    """Whether an operation, or one inside of it, needs whole matrices.

    A product of a matrix and a vector does not: it adds up parts.
    """
    name = jaxprs.name_of(eqn)
    if name == Op.DOT:
        contracted, batch = eqn.params["dimension_numbers"]
        pairs = zip(eqn.invars, contracted, batch, strict=True)
        free = [len(shape_of(x)) - len(c) - len(b) for x, c, b in pairs]
        return bool(contracted[0]) and all(free)
    return name in versions.OF_MATRICES or any(map(has_matrices, jaxprs.inside(eqn)))


def has_matrices(jaxpr: Jaxpr) -> bool:
    """Whether there are operations that need whole matrices."""
    return any(map(is_of_matrices, jaxprs.equations(jaxpr)))


class Lying(NamedTuple):
    """What may lie where its matrices are.

    Attributes:
      new: for variables of the state those that replace them.
      gradients: variables of gradients: those of one core are of one parameter.
      uncut: finds the variables that are whole on each device.
      names: the mesh axes that cut an argument, where something says it.
      lies: (variable, its axes of matrices, gradient, its axes) -> whether it may lie
        where they are; None: it does already.
    """

    new: Mapping[Var, Var]
    gradients: Collection[Var]
    uncut: Callable[[], set[Var]]
    names: Mapping[Var, Names]
    lies: Callable[[Var, Axes, Var, Axes], bool | None]


class TracedUpdate:
    """A traced update, and where its operations on matrices are.

    Attributes:
      closed: it, with the equations that its results need.
      jaxpr: the same without constants.
      equations: those of it.
      read_by: the indices of equations that read each variable; -1 for results.
      made_by: the index of the equation that makes each variable.
      free: variables that depend on no large array, such as a count of steps or
        coefficients.
      owners: to whom variables and equations belong.
      levels: for each equation how many cores come before it, one after another.
    """

    levels: list[int]

    def __init__(self, closed: ClosedJaxpr) -> None:
        """Finds to whom its equations belong."""
        self.jaxpr, self.equations = closed.jaxpr, jaxprs.equations(closed.jaxpr)
        few = [x for x in self.jaxpr.invars if math.prod(shape_of(x)) < FEW]
        self.free = jaxprs.made_of(self.equations, [*few, *self.jaxpr.constvars])
        self._merge(closed.consts)
        self.jaxpr = closed.jaxpr.replace(eqns=self.equations)
        self.closed = closed.replace(jaxpr=self.jaxpr, consts=closed.consts)
        self.made_by: dict[Var, int] = {}
        self.read_by: dict[Var, list[int]] = {}
        for index, eqn in enumerate(self.equations):
            self.made_by.update(dict.fromkeys(eqn.outvars, index))
            for x in filter(jaxprs.is_variable, eqn.invars):
                self.read_by.setdefault(x, []).append(index)
        for x in filter(jaxprs.is_variable, self.jaxpr.outvars):
            self.read_by.setdefault(x, []).append(-1)
        self.owners = Owners(self.jaxpr, self.equations, self.free)

    def _merge(self, consts: Sequence[Any]) -> None:
        """Of equal free variables, and of equal integers, equations read one."""
        found: dict[Var, Var] = {}
        known: dict[Hashable, Var] = {}
        for x, value in zip(self.jaxpr.constvars, consts, strict=True):
            found[x] = known.setdefault(equality.of_value(value), x)
        for n, before in enumerate(self.equations):
            eqn = self.equations[n] = _renamed(before, found)
            is_free = self.free.issuperset(eqn.outvars)
            if is_free or (not eqn.effects and all(map(is_integer, eqn.outvars))):
                key = equality.of_equation(eqn, lambda x: x)
                for k, x in enumerate(eqn.outvars):
                    found[x] = known.setdefault((key, k), x)

    @functools.cached_property
    def of_matrices(self) -> dict[Owner, list[int]]:
        """The indices of equations of each owner that has some on matrices."""
        found: dict[Owner, list[int]] = {}
        for index, owner in enumerate(self.owners.equations):
            if owner is not Nobody.FREE:
                found.setdefault(owner, []).append(index)
        return {
            owner: indices
            for owner, indices in found.items()
            if any(is_of_matrices(self.equations[n]) for n in indices)
        }

    def names(
        self, names: Mapping[Var, Names], sizes: Mapping[str, int]
    ) -> dict[Var, Names]:
        """The mesh axes that cut each variable, as far as they are known.

        Args:
          names: those that cut arguments.
          sizes: those of the mesh axes.
        """
        known = dict(names)
        for eqn in self.equations:
            known.update(_names_after(eqn, known, sizes))
        return known

    def cores(self, lying: Lying) -> tuple[list[MatrixCore], list[Var]]:
        """The cores, and the variables of the state that lie where they are."""
        parts, plans = list[tuple[_Part, _Plan]](), dict[Hashable, _Plan]()
        for owner, indices in self.of_matrices.items():
            try:
                self._check(owner, indices, lying)
            except NoCoreError:
                read = jaxprs.variables_read(self.equations[n] for n in indices)
                if not lying.uncut().issuperset(read):
                    raise
                continue
            part = _Part.of(self, owner, indices, lying)
            key = part.key
            if key not in plans:
                plans[key] = part.plan(len(plans))
            parts.append((part, plans[key].of(part)))
        self.levels = levels = self._levels(parts)
        found = [core for pair in parts for core in self._cores(*pair, levels)]
        for part, plan in parts:  # Of equal parts one alone was asked.
            none: Axes = (None,) * plan.number
            for x in plan.there:
                of_lead = plan.axes.get(part.lead, none)
                lying.lies(x, plan.axes.get(x, none), part.lead, of_lead)
        return found, [x for _, plan in parts for x in plan.there]

    def _levels(self, parts: Iterable[tuple[_Part, _Plan]]) -> list[int]:
        """For each equation how many cores come before it, one after another."""
        part_of = {
            part.indices[k]: n
            for n, (part, plan) in enumerate(parts)
            for k in plan.inside
            if k >= part.num_free
        }
        levels = list[int]()
        after: dict[Var, tuple[int, int | None]] = {}
        for index, eqn in enumerate(self.equations):
            n, level = part_of.get(index), 0
            for x in filter(after.__contains__, filter(jaxprs.is_variable, eqn.invars)):
                known, maker = after[x]
                level = max(level, known + (maker is not None and maker != n))
            levels.append(level)
            after.update(dict.fromkeys(eqn.outvars, (level, n)))
        return levels

    def _cores(
        self, part: _Part, plan: _Plan, levels: Sequence[int]
    ) -> Iterator[MatrixCore]:
        """The cores of a part, one for each level."""
        own = [k for k in sorted(plan.inside) if k >= part.num_free]
        by_level: dict[int, list[int]] = {}
        for k in own:
            by_level.setdefault(levels[part.indices[k]], []).append(k)
        for level, members in by_level.items():
            indices = {part.indices[k] for k in members}
            made = [x for k in members for x in part.equations[k].outvars]
            makes = [x for x in made if not indices.issuperset(self.read_by.get(x, ()))]
            chosen = [k for k in plan.inside if k < part.num_free] + members
            eqns = jaxprs.needed([part.equations[k] for k in sorted(chosen)], makes)
            made_here = {x for eqn in eqns for x in eqn.outvars}
            reads = [x for x in jaxprs.variables_read(eqns) if x not in made_here]
            none: Axes = (None,) * plan.number
            axes = {x: plan.axes.get(x, none) for x in (*reads, *makes)}
            if makes:
                yield MatrixCore(
                    *(tuple(eqns), tuple(reads), tuple(makes)),
                    *(axes, level, indices),
                    (plan.part, level, tuple(chosen)),
                )

    def _read(self, indices: Sequence[int]) -> dict[Var, None]:
        """The arguments that equations read."""
        eqns = [self.equations[n] for n in indices]
        variables = jaxprs.variables_read(eqns)
        return {x: None for x in variables if x not in self.made_by}

    def _check(self, owner: Owner, indices: Sequence[int], lying: Lying) -> None:
        """Raises ``NoCoreError`` for what mixes parameters, or has effects."""
        eqns = [self.equations[n] for n in indices]
        for eqn in filter(is_of_matrices, eqns):
            if eqn.effects:
                _refuse(eqn, "has effects")
            if owner is Nobody.SEVERAL:
                _refuse(eqn, "reads matrices of several parameters")
        read = self._read(indices)
        gradients = [x for x in lying.gradients if x in read and x not in self.free]
        if len(gradients) < 2:
            return
        sets = Sets()
        for eqn in eqns:
            large = (x for x in (*eqn.invars, *eqn.outvars) if jaxprs.is_variable(x))
            tied = [x for x in large if x not in self.free and not is_number(x)]
            before = len(set(map(sets.find, gradients)))
            sets.join(tied or [None])
            if len(set(map(sets.find, gradients))) < before:
                _refuse(eqn, "reads matrices of several parameters")
        _refuse(eqns[0], "reads matrices of several parameters")


class NoCoreError(TypeError):
    """Operations on matrices that are no core."""


def _refuse(eqn: JaxprEqn, why: str) -> NoReturn:
    shapes = [_described(x) for x in eqn.invars if jaxprs.is_variable(x)]
    shapes = shapes[:_SHOWN] + ["…"] * (len(shapes) > _SHOWN)
    hint = "Keep it outside of whole_matrices"
    if jaxprs.name_of(eqn) == Op.COND:
        hint = "Put gates, and all that decides, around whole_matrices"
    raise NoCoreError(
        "whole_matrices takes an update that treats the matrices of each parameter by "
        f"themselves, but {jaxprs.with_line(eqn)} {why}, with {', '.join(shapes)}. "
        f"{hint}, or have the arrays whole on each device."
    )


class _Plan(NamedTuple):
    """What of a part is in its cores.

    Attributes:
      part: the number of the first part that is equal to it.
      variables: of the part for which it was made.
      inside: the positions of equations.
      axes: those of matrices, for each variable that has some.
      number: how many axes of matrices there are.
      there: the variables of the state that lie where the matrices are.
    """

    part: int
    variables: list[Var]
    inside: set[int]
    axes: dict[Var, Axes]
    number: int
    there: list[Var]

    def of(self, part: _Part) -> _Plan:
        """The plan of an equal part."""
        to = dict(zip(self.variables, part.variables, strict=True))
        axes = {to[x]: axes for x, axes in self.axes.items()}
        return self._replace(
            variables=part.variables, axes=axes, there=[to[x] for x in self.there]
        )


@dataclasses.dataclass(frozen=True)
class _Part:
    """The equations of one parameter.

    Attributes:
      equations: they. First come those of free variables, which others compute, too.
      indices: the index of each in the program.
      num_free: how many the first ones are.
      readers: for each variable the positions of equations that read it; -1 for all
        others.
      new: for variables of its state those that replace them.
      lead: the gradient, or else the largest array that it reads.
      lying: what may lie where matrices are.
    """

    equations: list[JaxprEqn]
    indices: list[int]
    num_free: int
    readers: dict[Var, list[int]]
    new: dict[Var, Var]
    lead: Var
    lying: Lying

    @classmethod
    def of(
        cls, update: TracedUpdate, owner: Owner, indices: Sequence[int], lying: Lying
    ) -> _Part:
        """The part with these equations."""
        own = [update.equations[n] for n in indices]
        pulled = set[int]()
        waiting = jaxprs.variables_read(own)
        while waiting:
            x = waiting.pop()
            n = update.made_by.get(x, -1)
            is_large = math.prod(shape_of(x)) >= FEW
            if n >= 0 and n not in pulled and x in update.free and is_large:
                pulled.add(n)
                waiting += filter(jaxprs.is_variable, update.equations[n].invars)
        order = [*sorted(pulled), *indices]
        eqns = [update.equations[n] for n in order]
        position = {n: k for k, n in enumerate(order)}
        made = {x: None for eqn in eqns for x in eqn.outvars}
        read = [x for x in jaxprs.variables_read(eqns) if x not in made]
        new = {
            x: y
            for x in read
            if (y := lying.new.get(x)) is not None
            and (y is x or (y in made and update.owners.of[y] == owner))
        }
        readers = {
            x: [position.get(n, -1) for n in update.read_by.get(x, ())]
            for x in (*read, *made)
        }
        for x in new.values():  # The state itself is no reader elsewhere.
            readers[x].remove(-1)
        for k, eqn in enumerate(eqns):
            for x in filter(jaxprs.is_variable, eqn.invars):
                if k not in readers[x]:
                    readers[x].append(k)
        own_read = [x for x in read if x not in update.free] or read
        leads = [x for x in own_read if x in lying.gradients] or own_read
        lead = max(leads, key=nbytes)
        return cls(eqns, order, len(pulled), readers, new, lead, lying)

    @functools.cached_property
    def variables(self) -> list[Var]:
        """All of its variables, in the same order for equal parts."""
        atoms = (x for eqn in self.equations for x in (*eqn.invars, *eqn.outvars))
        return [*dict.fromkeys(filter(jaxprs.is_variable, atoms))]

    @functools.cached_property
    def key(self) -> Hashable:
        """What is equal for equal parts."""
        number = {x: k for k, x in enumerate(self.variables)}
        roles = tuple(
            (
                *(x.aval, tuple(sorted(set(self.readers[x])))),
                self.lying.names.get(x),
                number.get(self.new.get(x, x)),
            )
            for x in self.variables
        )
        program = equality.of_equations((), self.equations, ())
        return program, roles, self.num_free, number[self.lead]

    def plan(self, number: int) -> _Plan:
        """Its cores are as many equations as possible, at the least cost.

        Of parts that are not equal it has this number.
        """
        needed = self._between()
        labels: list[dict[Var, Along]] = []
        mixing = {k for k, eqn in enumerate(self.equations) if eqn.effects}
        first = self.equations[min(self._of_matrices)]
        for axis, size in enumerate(shape_of(self.lead)):
            if size < 2:
                continue
            followed = Followed(self.lead, axis)
            with contextlib.suppress(MixedError):
                followed.follow(self.equations, needed)
                along = followed.along()
                if jaxprs.among(first.invars, along):
                    labels.append(along)
                    mixing |= followed.mixing
        axes: dict[Var, Axes] = {}
        for x in {x: None for of in labels for x in of}:
            found = (of.get(x) for of in labels)
            axes[x] = tuple(None if one is None else one.axis for one in found)
        merged = {x for of in labels for x, along in of.items() if along.entries > 1}
        inside, there = self._cut(axes, merged, mixing, len(labels))
        return _Plan(number, self.variables, inside, axes, len(labels), there)

    @functools.cached_property
    def _own(self) -> range:
        return range(self.num_free, len(self.equations))

    @functools.cached_property
    def _of_matrices(self) -> set[int]:
        return {k for k in self._own if is_of_matrices(self.equations[k])}

    def _seldom(self) -> tuple[set[tuple[Var, int]], set[Var]]:
        """Variables that pass in some branches of a conditional alone.

        Those that it reads, with its position, and those that it makes.
        """
        made = {x for k in self._own for x in self.equations[k].outvars}
        arguments = [x for x in self.variables if x not in made]
        numbers = {x: k for k, x in enumerate(arguments) if is_number(x)}
        read: set[tuple[Var, int]] = set()
        kept: set[Var] = set()
        for k in self._own:
            eqn = self.equations[k]
            if due.number_of(eqn, numbers) is None:
                continue
            changed = list[due.Condition]()
            for x in eqn.outvars:
                of = due.kept(x, [eqn], numbers, arguments)
                changed.append(due.ALWAYS if of.operand is None else of.changed)
                kept.update([x] if of.operand is not None else ())
            conditions = due.of_operands(eqn, changed, numbers)
            for operand, condition in zip(eqn.invars, conditions, strict=True):
                if jaxprs.is_variable(operand) and condition != due.ALWAYS:
                    read.add((operand, k))
        return read, kept

    def _after_matrices(self) -> set[int]:
        """The positions of operations on matrices, and of those that need one."""
        of_matrices = (x for k in self._of_matrices for x in self.equations[k].outvars)
        made = jaxprs.descendants(self.equations[self.num_free :], of_matrices)
        return {k for k in self._own if not made.isdisjoint(self.equations[k].outvars)}

    def _between(self) -> set[int]:
        """The positions of equations between operations on matrices."""
        before = set(self._of_matrices)
        read = {
            x for k in before for x in self.equations[k].invars if jaxprs.is_variable(x)
        }
        for k in reversed(self._own):
            if not read.isdisjoint(self.equations[k].outvars):
                read.update(filter(jaxprs.is_variable, self.equations[k].invars))
                before.add(k)
        return self._after_matrices() & before

    def _cut(
        self, axes: Mapping[Var, Axes], merged: set[Var], mixing: set[int], count: int
    ) -> tuple[set[int], list[Var]]:
        """The positions of equations inside, and the state that lies there."""
        graph, none, after = Graph(), (None,) * count, self._after_matrices()
        made = {x: k for k, eqn in enumerate(self.equations) for x in eqn.outvars}
        state: dict[Var, Hashable] = {}
        for k, eqn in enumerate(self.equations):
            if k in mixing:
                graph.edge(k, graph.outside, NEVER)
            elif k in self._of_matrices:
                graph.edge(graph.inside, k, NEVER)
            elif k in after and all(map(is_number, (*eqn.invars, *eqn.outvars))):
                graph.edge(k, graph.outside, 1)  # A sum begins with the first leaf.
        for x, new in self.new.items():
            of_x = axes.get(x, none)
            may = of_x == axes.get(new, none) and not {x, new} & merged
            lies = may and None not in of_x and _types_alike(x, new)
            answer = lies and self.lying.lies(
                x, of_x, self.lead, axes.get(self.lead, none)
            )
            if answer is False:
                continue
            state[x] = node = ("state", x)
            graph.edge(node, graph.outside, 1)  # Of equal costs it is elsewhere.
            if answer is None:
                graph.edge(graph.inside, node, NEVER)
        new_of = {new: state[x] for x, new in self.new.items() if x in state}
        latency = _SHARE * min(1 << 14, nbytes(self.lead) // 4)
        for k in after:
            if jaxprs.name_of(self.equations[k]) in versions.REDUCTIONS:
                # Of parts it needs a collective of its own.
                size = sum(map(nbytes, self.equations[k].outvars))
                graph.edge(graph.inside, k, 2 * _SHARE * size + latency)
        seldom, kept = self._seldom()
        for x in self.variables:
            maker = state.get(x, made.get(x, graph.outside))
            cost = NEVER if x in merged else _SHARE * nbytes(x)
            readers: dict[Hashable, int] = {
                graph.outside if k < 0 else k: cost // (1 + ((x, k) in seldom))
                for k in self.readers[x]
            }
            if x in self.new.values():
                readers[new_of.get(x, graph.outside)] = cost
            out = cost // (1 + (x in kept)) if None not in axes.get(x, none) else NEVER
            if maker in range(self.num_free):  # Others compute it, too.
                out = 0
            graph.value(x, maker, readers, out)
        cut = graph.cut()
        inside = {k for k in range(len(self.equations)) if k in cut}
        return inside, [x for x, node in state.items() if node in cut]


# Of equal costs something else decides.
_SHARE = 1 << 12


def _renamed(eqn: JaxprEqn, names: Mapping[Var, Var]) -> JaxprEqn:
    """The same equation of other variables."""
    if not jaxprs.among(eqn.invars, names):
        return eqn
    atoms: list[Var | Literal] = [
        names.get(x, x) if jaxprs.is_variable(x) else x for x in eqn.invars
    ]
    return eqn.replace(invars=atoms)


def _types_alike(x: Var, y: Var) -> bool:
    a: Any = x.aval
    b: Any = y.aval
    return (shape_of(x), a.dtype) == (shape_of(y), b.dtype)


def matrices(core: MatrixCore) -> Matrices:
    """The program of a core for one matrix."""

    def run(*args: jax.Array) -> list[jax.Array]:
        env = dict(zip(core.reads, args, strict=True))
        jaxprs.advance(core.equations, env, unplaced.left_out)
        return [env[x] for x in core.makes]

    program = whole = _traced(run, *unplaced.bare_types(core.reads))
    reads = [list[int | None]() for _ in core.reads]
    makes = [list[int | None]() for _ in core.makes]
    count = len(next(iter(core.axes.values()), ()))
    are_arrays = list(map(core.is_array, core.reads))

    def divide(before: Sequence[int | None], after: Sequence[int | None]) -> bool:
        nonlocal program
        try:
            program = _for_entries(program, before, after, 1)
        except MixedSlicesError:
            return False
        for axes, axis in zip((*reads, *makes), (*before, *after), strict=True):
            axes.append(axis)
        return True

    for n in range(count):
        divide(
            [core.axes[x][n] for x in core.reads], [core.axes[x][n] for x in core.makes]
        )
    while any(divide(*found) for found in _further(program, are_arrays)):
        pass
    key = equality.of_program(program)
    undivided = whole if len(makes[0]) == 1 else None
    return Matrices(
        *(program, tuple(map(tuple, reads)), tuple(map(tuple, makes)), key, undivided)
    )


def _further(
    program: ClosedJaxpr, are_arrays: Sequence[bool]
) -> Iterator[tuple[list[int | None], list[int | None]]]:
    """Axes of matrices that are seen when others have one entry.

    What is the same for all matrices has none: each device has the whole of it.
    """
    jaxpr = program.jaxpr
    lead = max(itertools.compress(jaxpr.invars, are_arrays), key=nbytes)
    for axis, size in enumerate(shape_of(lead)):
        if size < 2:
            continue
        followed = Followed(lead, axis)
        try:
            followed.follow(
                jaxprs.all_equations(jaxpr), range(len(jaxprs.all_equations(jaxpr)))
            )
        except MixedError:
            continue
        along = followed.along()
        both = *jaxpr.invars, *jaxpr.outvars
        found = [along.get(x) if jaxprs.is_variable(x) else None for x in both]
        made = found[len(jaxpr.invars) :]
        is_same = (not x for x in are_arrays)
        if any(itertools.compress(found, is_same)):
            continue
        if all(made) and all(one is None or one.entries == 1 for one in found):
            axes = [None if one is None else one.axis for one in found]
            yield axes[: len(jaxpr.invars)], axes[len(jaxpr.invars) :]


def _for_entries(
    program: ClosedJaxpr,
    before: Sequence[int | None],
    after: Sequence[int | None],
    count: int,
) -> ClosedJaxpr:
    """The program for some entries along an axis of its arguments.

    Raises:
      MixedSlicesError: it mixes entries, or its results do not have that axis.
    """
    types = list(program.in_avals)
    lengths = {types[k].shape[a] for k, a in enumerate(before) if a is not None}
    if len(lengths) != 1 or None in after:
        raise MixedSlicesError("there is no such axis")
    source = Source(lengths.pop(), count)
    kinds = [None if a is None else Kind(source, Along(a)) for a in before]
    ends = [Kind(source, Along(a)) for a in after if a is not None]

    def one(*arrays: jax.Array) -> list[jax.Array]:
        pairs = zip(arrays, kinds, strict=True)
        given = [x if kind is None else Slices(x, kind) for x, kind in pairs]
        found = Evaluator(_POLICY).results(program, given)
        if any(
            getattr(y, "kind", None) != end for y, end in zip(found, ends, strict=True)
        ):
            raise MixedSlicesError("its results have no such matrices")
        return [y.array for y in found]

    for k, a in enumerate(before):
        if a is not None:
            shape = types[k].shape
            types[k] = types[k].update(shape=(*shape[:a], count, *shape[a + 1 :]))
    return _traced(one, *types)


def _traced(f: Callable[..., list[jax.Array]], *types: Any) -> ClosedJaxpr:
    with unplaced.tracing():
        return jax.make_jaxpr(f)(*types)


def _mixed(*_: object) -> None:
    return None


# A matrix may have a key of its own. Of one key for all it would get other bits.
_POLICY = Policy("matrix", "array", [], _mixed, is_indexed=True)


def _names_after(
    eqn: JaxprEqn, names: Mapping[Var, Names], sizes: Mapping[str, int]
) -> dict[Var, Names]:
    """The mesh axes that cut the results of an equation, as far as they are known."""
    found = {x: list[tuple[str, ...]]([()] * len(shape_of(x))) for x in eqn.outvars}
    for k, x in jaxprs.among(eqn.invars, names).items():
        for axis, cutting in enumerate(names[x]):
            if not cutting:
                continue
            length = math.prod(sizes[name] for name in cutting)
            along = Along(axis, shape_of(x)[axis] // length)
            after = rules.after(jaxprs.name_of(eqn), eqn, k, along, length)
            if after is None or after.axis < 0:
                continue
            for cuts in found.values():
                used = set(itertools.chain.from_iterable(cuts))
                if after.axis < len(cuts) and used.isdisjoint(cutting):
                    cuts[after.axis] = cutting
    return {x: tuple(y) for x, y in found.items() if any(y)}


def nbytes(x: Var | Literal) -> int:
    """The bytes of an array."""
    aval: Any = x.aval
    return math.prod(shape_of(x)) * aval.dtype.itemsize


def _described(x: Var) -> str:
    aval: Any = x.aval
    return f"{aval.dtype}{list(aval.shape)}"
