"""Where the arrays of a step lie, and which devices share which matrices."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from gradxform._jax import jaxprs, versions
from gradxform._matrices import cores, due, exchange
from gradxform._matrices.cores import Lying, Matrices, MatrixCore, TracedUpdate
from gradxform._matrices.exchange import Array, Axes, Batch
from gradxform._matrices.owners import is_integer
from gradxform._matrices.placements import Names
from gradxform._slices.rules import shape_of

if TYPE_CHECKING:
    from jax.extend.core import Var


class Group(NamedTuple):
    """Cores that do the same with equal matrices, which are cut alike.

    Attributes:
      matrices: the program for one of them.
      cores: they.
      layouts: where their arrays lie.
      names: the mesh axes along which devices share the matrices.
      conditions: when arrays travel that are not always needed. Their numbers are
        positions in the ``reads`` of a core.
    """

    matrices: Matrices
    cores: list[MatrixCore]
    layouts: list[exchange.Core]
    names: tuple[str, ...]
    conditions: tuple[due.Condition, ...]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a step, and where they lie.

    Attributes:
      names: the mesh axes that cut an argument, where something says it.
      likely: the same for others, as far as one can tell. It takes long.
      known: the arguments for which it is known.
      new: for variables of the state those that replace them.
      gradients: the variables of gradients.
      results: for a result the argument that it replaces.
    """

    names: Mapping[Var, Names]
    likely: Callable[[], Mapping[Var, Names]]
    known: Collection[Var]
    new: Mapping[Var, Var]
    gradients: tuple[Var, ...]
    results: Mapping[Var, Var]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a step lie on a mesh.

    Attributes:
      update: the step.
      sizes: those of mesh axes of several devices.
      names: the mesh axes that cut each variable, as far as they are known.
      wanted: those that should cut a variable.
      found: its cores.
      there: variables that lie where their matrices are.
    """

    update: TracedUpdate
    sizes: Mapping[str, int]
    names: Mapping[Var, Names]
    wanted: Mapping[Var, Names]
    found: Sequence[MatrixCore]
    there: Collection[Var]

    @classmethod
    def of(
        cls, update: TracedUpdate, arguments: Arguments, sizes: Mapping[str, int]
    ) -> Self:
        """That of a step with these arguments."""
        names = dict(arguments.names)
        there: dict[Var, Names] = {}

        def likely() -> dict[Var, Names]:
            return {**arguments.likely(), **names}

        def uncut() -> set[Var]:
            whole = [x for x, cuts in likely().items() if not any(cuts)]
            return jaxprs.made_of(update.equations, [*whole, *update.free])

        def lies(x: Var, axes: Axes, lead: Var, of_lead: Axes) -> bool | None:
            base = _base((names if lead in names else likely()).get(lead), of_lead)
            others = [n for n in sizes if not any(n in each for each in base)]
            lengths = tuple(shape_of(x)[a] for a in axes if a is not None)
            batch = exchange.shares(lengths, base, others, sizes)
            if batch.shared is None:
                return False
            there[x] = _names_there(x, axes, batch)
            if x in arguments.known:
                return None if names.get(x) == there[x] else False
            return True

        lying = Lying(arguments.new, arguments.gradients, uncut, names, lies)
        found, of_state = update.cores(lying)
        names.update((x, there[x]) for x in of_state)
        if any(shape_of(x) and x not in names for x in update.jaxpr.invars):
            names = likely()
        wanted = {y: names[x] for y, x in arguments.results.items() if x in names}
        for eqn in reversed(update.equations):
            if jaxprs.name_of(eqn) in versions.ELEMENTWISE | versions.SAME_VALUES:
                for x in filter(jaxprs.is_variable, eqn.invars):
                    (y,) = eqn.outvars
                    if y in wanted and shape_of(x) == shape_of(y):
                        wanted.setdefault(x, wanted[y])
        lying_there = {*of_state, *(arguments.new[x] for x in of_state)}
        all_names = update.names(names, sizes)
        return cls(update, sizes, all_names, wanted, found, lying_there)

    def groups(self) -> list[Group]:
        """Equal cores, and where their arrays lie."""
        keys: dict[Hashable, Hashable] = {}
        programs: dict[Hashable, Matrices] = {}
        groups: dict[Hashable, list[tuple[MatrixCore, Matrices, Names]]] = {}
        for core in self.found:
            if core.origin not in keys:
                keys[core.origin] = key = core.key()
                if key not in programs:
                    programs[key] = cores.matrices(core)
            of = programs[keys[core.origin]]
            base = self._base(core, of)
            arrays = (x for x in core.reads if core.is_array(x))
            alike = (
                *(core.level, of, base),
                *(self.names.get(x) for x in arrays),
                *(self.wanted.get(x) for x in core.makes),
                *(x in self.there for x in (*core.reads, *core.makes)),
            )
            groups.setdefault(alike, []).append((core, of, base))
        return [
            self._group([core for core, *_ in members], *members[0][1:])
            for members in groups.values()
        ]

    def _base(self, core: MatrixCore, of: Matrices) -> Names:
        """The mesh axes that cut the axes of matrices from the beginning.

        They are those of the largest array that has all of these axes.
        """
        pairs = [*zip(core.reads, of.reads, strict=True)]
        full = [(x, axes) for x, axes in pairs if None not in axes and axes]
        full = [pair for pair in full if pair[0] in self.names] or full
        full = [pair for pair in full if pair[0] not in self.there] or full
        if not full:
            return ((),) * len(of.reads[0])
        x, axes = max(full, key=lambda pair: cores.nbytes(pair[0]))
        return _base(self.names.get(x), axes)

    def _group(self, found: list[MatrixCore], of: Matrices, base: Names) -> Group:
        """The group of some cores."""
        first, sizes = found[0], self.sizes
        cut = {name for names in base for name in names}
        pairs = zip((*first.reads, *first.makes), (*of.reads, *of.makes), strict=True)
        variables = [*pairs]
        cutting = {
            name
            for x, axes in variables
            for a, names in enumerate(self._names(x))
            if a not in axes
            for name in names
        }
        if any(x in self.there for x, _ in variables):
            cutting.update(sizes)
        names = [n for n in sizes if n not in cut and n in cutting]
        lengths = [_lengths(core, of) for core in found]
        count = sum(map(math.prod, lengths)) // math.prod(sizes[n] for n in cut)
        devices = math.prod(sizes[n] for n in names)
        for name in (n for n in sizes if n not in cut and n not in cutting):
            # Matrices of a device, with this axis and without it.
            size = devices * sizes[name]
            if -(-count // size) < -(-count // devices):
                names, devices = [*names, name], size
        names = [n for n in sizes if n in names]
        batches = [exchange.shares(n, base, names, sizes) for n in lengths]
        is_even = all(batch.shared is not None for batch in batches)
        same = [
            not first.is_array(x) and len({core.reads[k] for core in found}) == 1
            for k, x in enumerate(first.reads)
        ]
        layouts = []
        for core, batch in zip(found, batches, strict=True):
            reads = tuple(
                None if is_same else self._read(core, x, axes, batch, is_even)
                for x, axes, is_same in zip(core.reads, of.reads, same, strict=True)
            )
            makes = zip(core.makes, of.makes, strict=True)
            layouts.append(
                exchange.Core(
                    batch,
                    reads,
                    tuple(self._made(core, *pair, batch, is_even) for pair in makes),
                )
            )
        conditions, layouts = _conditions(first, layouts)
        return Group(of, found, layouts, tuple(names), conditions)

    def _names(self, x: Var) -> Names:
        found = self.names.get(x) or self.wanted.get(x)
        return found or ((),) * len(shape_of(x))

    @functools.cached_property
    def _inside(self) -> set[int]:
        """The indices of all equations in cores."""
        return {n for core in self.found for n in core.indices}

    def _is_between(self, x: Var) -> bool:
        """Whether a core makes it, and cores alone read it."""
        read_by, made_by = self.update.read_by, self.update.made_by
        return made_by.get(x) in self._inside and self._inside.issuperset(
            read_by.get(x, ())
        )

    def _read(
        self, core: MatrixCore, x: Var, axes: Axes, batch: Batch, is_even: bool
    ) -> Array:
        """Where an array lies that is read."""
        names = self.names.get(x, self.wanted.get(x))
        if names is None and x not in self.update.free:  # As others of its shape.
            like = (y for y in core.reads if shape_of(y) == shape_of(x))
            names = next(filter(None, map(self.names.get, like)), None)
        names = _around(names, x, axes, batch)
        # Numbers that each device computes it computes for its own matrices.
        is_there = x in self.there or x in self.update.free or self._is_between(x)
        if is_even and is_there:
            return Array(axes, _names_there(x, axes, batch), is_there=True)
        return Array(axes, names)

    def _made(
        self, core: MatrixCore, x: Var, axes: Axes, batch: Batch, is_even: bool
    ) -> Array:
        """Where an array lies that is made."""
        is_small = math.prod(shape_of(x)) < cores.FEW * math.prod(batch.sizes)
        names = self.wanted.get(x)
        if names is None:
            like = (y for y in core.reads if shape_of(y) == shape_of(x))
            names = next(filter(None, map(self.names.get, like)), None)
        is_free = names is None and not is_small
        if is_even and (x in self.there or self._is_between(x) or is_free):
            return Array(axes, _names_there(x, axes, batch), is_there=True)
        return Array(axes, _around(names, x, axes, batch))


def _conditions(
    core: MatrixCore, layouts: Sequence[exchange.Core]
) -> tuple[tuple[due.Condition, ...], list[exchange.Core]]:
    """When arrays of equal cores travel, and their layouts with that."""
    eqns, like = core.equations, layouts[0]
    numbers = {x: k for k, x in enumerate(core.reads) if is_integer(x)}
    if all(due.number_of(eqn, numbers) is None for eqn in eqns):
        return (), [*layouts]
    position = {
        x: k
        for k, (x, of) in enumerate(zip(core.reads, like.reads, strict=True))
        if of is not None and not of.is_there
    }
    wanted = dict.fromkeys(core.makes, due.ALWAYS)
    operands: dict[Var, int] = {}
    for x, of in zip(core.makes, like.makes, strict=True):
        kept = due.kept(x, eqns, numbers, position)
        if kept.operand is not None and like.reads[position[kept.operand]] == of:
            wanted[x], operands[x] = kept.changed, position[kept.operand]
    needed = due.of_variables(eqns, wanted, numbers)
    found = [c for x in position if (c := needed.get(x, due.NEVER)) != due.ALWAYS]
    found += [wanted[x] for x in operands]
    conditions = [*dict.fromkeys(found)]

    def of_read(x: Var, of: Array | None) -> Array | None:
        condition = needed.get(x, due.NEVER)
        if of is None or x not in position or condition == due.ALWAYS:
            return of
        return of._replace(due=conditions.index(condition))

    def of_made(x: Var, of: Array) -> Array:
        if x not in operands:
            return of
        return of._replace(due=conditions.index(wanted[x]), kept=operands[x])

    return tuple(conditions), [
        layout._replace(
            reads=tuple(map(of_read, core.reads, layout.reads)),
            makes=tuple(map(of_made, core.makes, layout.makes)),
        )
        for layout in layouts
    ]


def _lengths(core: MatrixCore, of: Matrices) -> tuple[int, ...]:
    """How many matrices there are along each of their axes."""
    pairs = [*zip((*core.reads, *core.makes), (*of.reads, *of.makes), strict=True)]
    return tuple(
        next(shape_of(x)[axis] for x, axes in pairs if (axis := axes[n]) is not None)
        for n in range(len(of.reads[0]))
    )


def _base(names: Names | None, axes: Axes) -> Names:
    return tuple(names[a] if names and a is not None else () for a in axes)


def _names_there(x: Var, axes: Axes, batch: Batch) -> Names:
    """The mesh axes that cut an array if each device has its own matrices alone."""
    found: list[tuple[str, ...]] = [()] * len(shape_of(x))
    for n, a in enumerate(axes):
        if a is not None:
            found[a] = batch.cut(n)
    return tuple(found)


def _around(names: Names | None, x: Var, axes: Axes, batch: Batch) -> Names:
    """The mesh axes that cut an array if its matrices lie as others do."""
    used = {name for each in batch.names for name in each}
    found: list[tuple[str, ...]] = []
    for each in names or ((),) * len(shape_of(x)):
        found.append(tuple(name for name in each if name not in used))
        used.update(each)
    for n, a in enumerate(axes):
        if a is not None:
            found[a] = batch.names[n]
    return tuple(found)
