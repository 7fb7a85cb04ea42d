"""Cores of an update: the parts of its jaxpr that need whole matrices.

A core is what lies between operations on matrices: products, decompositions. It begins
where the update reads the fewest bytes for it, so what travels to a whole matrix is one
array, such as a momentum; norms, transpositions and casts are inside. It ends with an
array of the same shape. The rules of the evaluator say along which axes a core has
matrices that stand alone, such as layers, experts or heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from gradxform._jax import jaxprs, versions
from gradxform._jax.versions import Op
from gradxform._matrices import equality
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
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# The indices of equations.
Indices: TypeAlias = frozenset[int]

# Each device may read fewer entries as a whole, and compute with them.
_FEW = 64
# On its way to one array a core reads at most so many, and so many times its bytes.
_MOST = 8


@dataclasses.dataclass(frozen=True)
class MatrixCore:
    """Equations that make one array of another one, and of constants.

    Attributes:
      reads: the array, and then the constants.
      makes: the result, of the shape of the array.
      program: the function from one to the other.
    """

    reads: Sequence[Var]
    makes: Var
    program: ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A core whose matrices stand alone.

    Attributes:
      axes: those of the array along which they follow each other.
      program: the core for one of them: these axes have one entry.
      longest: the same, but one axis, the last one that was found, is whole.
      last: this axis; None if there is only one matrix.
    """

    axes: tuple[int, ...]
    program: ClosedJaxpr
    longest: ClosedJaxpr
    last: int | None = None

    def results(self, x: jax.Array, *constants: jax.Array) -> jax.Array:
        """The results of the core for some matrices, which follow each other in front.

        In a batch that ``vmap`` makes, the compiler for CPU would copy each matrix once
        more to transpose it.
        """
        others = [axis for axis in self.axes if axis != self.last]
        if self.last is not None:
            at = self.last - sum(axis < self.last for axis in others)
            y = jnp.expand_dims(jnp.moveaxis(x, 0, at), others)
            y = _results(self.longest, self.last, y, *constants)
            return jnp.moveaxis(jnp.squeeze(y, others), at, 0)
        one = functools.partial(_run, self.program)
        if len(x) == 1:
            return one(x[0], *constants)[None]
        return jax.vmap(one, (0, *[None] * len(constants)))(x, *constants)


class NoCoreError(TypeError):
    """Operations on matrices that are no core.

    Attributes:
      reads: the arrays that they read.
    """

    def __init__(self, message: str, reads: Collection[Var]) -> None:
        """An error with these arrays."""
        super().__init__(message)
        self.reads = reads


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


class _Parts:
    """Operations on matrices that belong together, by their indices."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}  # One of a part stands for all of it.

    def part(self, index: int) -> int:
        """The one that stands for the part of an operation."""
        while self.of[index] != index:
            index = self.of[index]
        return index

    def joined(self, index: int, others: Indices) -> Indices:
        """Joins the parts of others to a new operation, which now stands for them."""
        self.of[index] = index
        for other in others:
            self.of[self.part(other)] = index
        return frozenset([index])


class TracedUpdate:
    """A traced update, and where its operations on matrices are.

    Attributes:
      jaxpr: it.
      equations: those that its results need.
      made_by: the index of the equation that makes each variable.
      read_by: the indices of equations that read each variable; -1 for results.
      parts: the equations of each core, by their indices.
      free: variables that depend on no large array, such as a count of steps or
        coefficients. Each core computes those that it needs.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        """Finds the equations between operations on matrices."""
        self.jaxpr, self.equations = jaxpr, jaxprs.equations(jaxpr)
        self.made_by: dict[Var, int] = {}
        self.read_by: dict[Var, list[int]] = {}
        for index, eqn in enumerate(self.equations):
            self.made_by.update(dict.fromkeys(eqn.outvars, index))
            for x in filter(jaxprs.is_variable, eqn.invars):
                self.read_by.setdefault(x, []).append(index)
        for x in filter(jaxprs.is_variable, jaxpr.outvars):
            self.read_by.setdefault(x, []).append(-1)
        self.parts = list(self._parts())
        self.free = self._free()

    def _parts(self) -> Iterator[Indices]:
        """For each core the equations between its operations on matrices."""
        parts = _Parts()
        # The operations on matrices that make a variable, and those that need it.
        before: dict[Var, Indices] = {}
        after: dict[Var, Indices] = {}
        for index, eqn in enumerate(self.equations):
            found = _union(before, jaxprs.among(eqn.invars, before).values())
            if is_of_matrices(eqn):
                found = parts.joined(index, found)
            before.update(dict.fromkeys(eqn.outvars if found else (), found))
        members: dict[int, set[int]] = {}
        for index, eqn in reversed([*enumerate(self.equations)]):
            later = _union(after, jaxprs.among(eqn.outvars, after).values())
            if index in parts.of:
                later = frozenset([index])
                members.setdefault(parts.part(index), set()).add(index)
            elif later:
                made = jaxprs.among(eqn.outvars, before).values()
                earlier = set(map(parts.part, _union(before, made)))
                for part in earlier.intersection(map(parts.part, later)):
                    members.setdefault(part, set()).add(index)
            for x in filter(jaxprs.is_variable, eqn.invars if later else ()):
                known = after.get(x, later)
                after[x] = known if known is later else known | later
        yield from map(frozenset, reversed(members.values()))

    def _free(self) -> set[Var]:
        few = [x for x in self.jaxpr.invars if math.prod(shape_of(x)) < _FEW]
        return self.made_of([*few, *self.jaxpr.constvars])

    def made_of(self, given: Iterable[Var]) -> set[Var]:
        """Some variables, and those that are made of such alone."""
        found = set(given)
        for eqn in self.equations:
            read = filter(jaxprs.is_variable, eqn.invars)
            if found.issuperset(read) and not eqn.effects:
                found.update(eqn.outvars)
        return found

    def descendants(self, given: Iterable[Var]) -> set[Var]:
        """Some variables, and those that are made of one of them."""
        found = set(given)
        for eqn in self.equations:
            if jaxprs.among(eqn.invars, found):
                found.update(eqn.outvars)
        return found

    def around(
        self, given: Iterable[Var], reads: Iterable[Var]
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """The equations before some variables are known, and those after it.

        They give the results, and what is read in between.
        """
        given = set(given)
        others = [x for x in self.equations if given.isdisjoint(x.outvars)]
        eqns = jaxprs.needed(others, [*self.jaxpr.outvars, *reads])
        later = self.descendants(given)
        before = [eqn for eqn in eqns if later.isdisjoint(eqn.outvars)]
        return before, [eqn for eqn in eqns if not later.isdisjoint(eqn.outvars)]

    def names(
        self,
        names: Mapping[Var, Names],
        found: Sequence[MatrixCore],
        sizes: Mapping[str, int],
    ) -> dict[Var, Names]:
        """The mesh axes that cut each variable, as far as they are known.

        Args:
          names: those that cut arguments.
          found: the cores; a result lies like the array.
          sizes: those of the mesh axes.
        """
        known, made = dict(names), {core.makes: core.reads[0] for core in found}
        for eqn in self.equations:
            known.update(_names_after(eqn, known, sizes))
            for x in eqn.outvars:
                if x in made and made[x] in known:
                    known[x] = known[made[x]]
        return known

    def core(self, part: Indices) -> MatrixCore:
        """The core with these equations.

        Raises:
          NoCoreError: it reads several arrays, or makes several, or one of another
            shape.
        """
        grown = part
        while len(results := self._results(grown)) > 1:
            index = self._joining(grown, results)
            if index is None:
                self._refuse(part, f"makes {len(results)} arrays that others read")
            grown |= {index}
        if any(self.equations[index].effects for index in grown):
            self._refuse(part, "has effects")
        for others, makes in self._forward(grown, results[0]):
            found = self._ending(others, makes)
            if found:
                return found
        shapes = ", ".join(map(_described, self._reads(part)))
        self._refuse(part, f"makes {_described(results[0])} of {shapes or 'none'}")

    def _ending(self, part: Indices, makes: Var) -> MatrixCore | None:
        """The core that ends with this result: where it reads least, of most matrices.

        Of equal ones it is the largest.
        """
        best: list[tuple[int, MatrixCore]] = []
        for x, others in self._backward(part):
            if shape_of(x) == shape_of(makes):
                core = self._between(x, makes, others)
                length = math.prod(shape_of(x)[axis] for axis in matrices(core).axes)
                if best and _nbytes(x) < _nbytes(best[0][1].reads[0]):
                    best = []
                best.append((length, core))
        most = max((length for length, _ in best), default=0)
        return next((x for length, x in reversed(best) if length == most), None)

    def _refuse(self, part: Indices, why: str) -> NoReturn:
        eqn = self.equations[min(part)]
        hint = "Keep it outside of whole_matrices"
        if jaxprs.name_of(eqn) == Op.COND:
            hint = "Put gates, and all that decides, around whole_matrices"
        raise NoCoreError(
            "whole_matrices takes an update that makes one array of one other of its "
            f"shape, as Muon does, but {jaxprs.place(eqn)} {why}. {hint}, or have the "
            "arrays whole on each device.",
            self._reads(part),
        )

    def _reads(self, part: Collection[int]) -> dict[Var, None]:
        """The variables that these equations read and do not make, but for numbers."""
        eqns = [self.equations[index] for index in sorted(part)]
        read = [x for x in jaxprs.variables_read(eqns) if x not in self.free]
        return {x: None for x in read if self.made_by.get(x) not in part}

    def _results(self, part: Indices) -> list[Var]:
        """The variables that these equations make and others read."""
        made = (x for n in sorted(part) for x in self.equations[n].outvars)
        return [x for x in made if not part.issuperset(self.read_by.get(x, ()))]

    def _joining(self, part: Indices, results: Sequence[Var]) -> int | None:
        """The next equation that reads results, and nothing that is not there."""
        there = self.free.union(results, self._reads(part))
        size = max(math.prod(shape_of(x)) for x in results)
        for index in sorted({n for x in results for n in self.read_by[x]} - part):
            eqn = self.equations[index]
            read = set(filter(jaxprs.is_variable, eqn.invars))
            sizes = {math.prod(shape_of(x)) for x in eqn.outvars}
            if index >= 0 and read <= there and sizes <= {size} and not eqn.effects:
                return index
        return None

    def _forward(self, part: Indices, x: Var) -> list[tuple[Indices, Var]]:
        """With operations after the result that keep its size, and read nothing else.

        First where the result has the fewest bytes, as late as possible.
        """
        grown, found = part, [(part, x)]
        while len(readers := self.read_by.get(x, [])) == 1 and readers[0] >= 0:
            eqn = self.equations[readers[0]]
            operands = [*filter(jaxprs.is_variable, eqn.invars)]
            is_alone = len(operands) == len(eqn.outvars) == 1 and not eqn.effects
            if not is_alone or jaxprs.name_of(eqn) not in rules.RULES:
                break
            (new,) = eqn.outvars
            if math.prod(shape_of(new)) != math.prod(shape_of(x)):
                break
            grown, x = grown | {readers[0]}, new
            found = [(grown, x), *found]
        return sorted(found, key=lambda end: _nbytes(end[1]))

    def _backward(self, part: Indices) -> Iterator[tuple[Var, Indices]]:
        """One array that gives the result, with equations; then ones before it."""
        grown, reads = set(part), self._reads(part)
        total = least = sum(map(_nbytes, reads))
        while 0 < len(reads) <= _MOST and total <= _MOST * least:
            if len(reads) == 1 and total <= least:
                least = total
                yield next(iter(reads)), frozenset(grown)
            index = max(self.made_by.get(x, -1) for x in reads)
            if index < 0 or self.equations[index].effects:
                return
            grown.add(index)
            reads = {x: None for x in reads if self.made_by.get(x) != index}
            read = filter(jaxprs.is_variable, self.equations[index].invars)
            others = (x for x in read if self.made_by.get(x) not in grown)
            reads.update((x, None) for x in others if x not in self.free)
            total = sum(map(_nbytes, reads))

    def _between(self, x: Var, makes: Var, part: Indices) -> MatrixCore:
        """The core from an array to a result.

        It computes the numbers that it needs from arguments. So the programs of cores
        that do the same are the same.
        """
        eqns, chosen = self.equations, set(part)
        waiting = [*jaxprs.variables_read(eqns[n] for n in chosen)]
        while waiting:
            index = self.made_by.get(y := waiting.pop(), -1)
            if y in self.free and index not in {-1, *chosen}:
                chosen.add(index)
                waiting += filter(jaxprs.is_variable, eqns[index].invars)
        of_core = jaxprs.needed([eqns[n] for n in sorted(chosen)], [makes])
        made = {x}.union(*(eqn.outvars for eqn in of_core))
        reads = [x, *(y for y in jaxprs.variables_read(of_core) if y not in made)]

        def run(*args: jax.Array) -> jax.Array:
            env = dict(zip(reads, args, strict=True))
            jaxprs.advance(of_core, env)
            return env[makes]

        return MatrixCore(reads, makes, _traced(run, *(y.aval for y in reads)))


def matrices(core: MatrixCore) -> Matrices:
    """The axes along which a core has matrices, and its program for one of them."""
    return _matrices(_Program(core.program))


class _Program:
    """A program, as a key: it is equal to equal ones."""

    def __init__(self, program: ClosedJaxpr) -> None:
        self.program, self.key = program, equality.of_program(program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=256)
def _matrices(of: _Program) -> Matrices:
    program = longest = of.program
    axes: list[int] = []
    shape = shape_of(program.in_avals[0])
    while True:
        found = len(axes)
        for axis, size in enumerate(shape):
            if axis in axes or size < 2:
                continue
            one = _for_one(program, axis)
            if one is not None:
                longest, program, axes = program, one, [*axes, axis]
        if len(axes) == found:
            last = axes[-1] if axes else None
            return Matrices(tuple(sorted(axes)), program, longest, last)


def _for_one(program: ClosedJaxpr, axis: int) -> ClosedJaxpr | None:
    """The program for one entry along an axis; None if it mixes entries."""
    array, *constants = program.in_avals
    shape = shape_of(array)
    one = array.update(shape=(*shape[:axis], 1, *shape[axis + 1 :]))
    try:
        return _traced(functools.partial(_results, program, axis), one, *constants)
    except MixedSlicesError:
        return None


def _results(
    program: ClosedJaxpr, axis: int, x: jax.Array, *constants: jax.Array
) -> jax.Array:
    """The result of a program for some entries along an axis."""
    source = Source(shape_of(program.in_avals[0])[axis], x.shape[axis])
    kind = Kind(source, Along(axis))
    (y,) = Evaluator(_POLICY).results(program, [Slices(x, kind), *constants])
    if not isinstance(y, Slices) or y.kind != kind:
        raise MixedSlicesError("its result has no such matrices")
    return y.array


def _run(program: ClosedJaxpr, *args: jax.Array) -> jax.Array:
    (y,) = jaxprs.run(program.jaxpr, [*program.consts, *args])
    return y


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Traces know of no mesh, so that any one will do, and unroll no loop."""
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.disable_jit(False), jax.sharding.use_abstract_mesh(no_mesh):
        yield


def _traced(f: Callable[..., jax.Array], *types: Any) -> ClosedJaxpr:
    with tracing():
        return jax.make_jaxpr(f)(*types)


def _mixed(*_: object) -> None:
    return None


_POLICY = Policy("matrix", "array", [Op.RANDOM_BITS], _mixed)


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


def _union(known: Mapping[Var, Indices], variables: Collection[Var]) -> Indices:
    """The union of some sets; of equal ones it is one of them."""
    found: Indices = frozenset()
    for x in variables:
        if known[x] is not found:
            found = found | known[x] if found else known[x]
    return found


def _nbytes(x: Var) -> int:
    aval: Any = x.aval
    return math.prod(shape_of(x)) * aval.dtype.itemsize


def _described(x: Var) -> str:
    aval: Any = x.aval
    return f"{aval.dtype}{list(aval.shape)}"
