"""Runs a function of whole tables on a few of their rows.

The function is traced with the tables' own shapes, so whatever looks at sizes sees the
truth: masks, labels, the number of entries in a mean. A second trace, with more rows,
shows which sizes count rows. Then each equation is evaluated for the rows that are
there. A sum over rows leaves out padding. Any other equation must be elementwise, or it
is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._rows.boundary import touched
from gradxform._rows.indexed_slices import IndexedSlices, filled, is_sparse
from gradxform._trees import checks, dtypes, host, jaxprs, maps, norms, versions
from gradxform._trees.placeholders import Placeholder, is_placeholder, owners
from gradxform._trees.types import Leaf, Path, PyTree, Shape
from gradxform._trees.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# An equation, after those that it is inside of, each by its ``id``.
Place: TypeAlias = tuple[int, ...]
Total: TypeAlias = Callable[[jax.Array], jax.Array]


class MixedRowsError(TypeError):
    """The function cannot run on a few rows; the message says what it does."""


class Missing(NamedTuple):
    """A value that is not there, and why.

    Attributes:
      reason: why the rows that are there do not give it.
      is_given: whether it was given, and no operation has used it yet.
    """

    reason: str
    is_given: bool = False

    def used(self, eqn: JaxprEqn) -> Missing:
        """The result of an operation that needs it."""
        if not self.is_given:
            return self
        return Missing(f"{self.reason}, by {jaxprs.place(eqn)}")


class Table(NamedTuple):
    """A table of a step, or a stack of layers.

    Attributes:
      shape: that of the whole table.
      grown: its number of rows in the second trace.
      gradient: its summed gradient. None stands for a stack: one layer is there, and no
        operation may add up rows.
      axis: along which it has rows.
      group: how many rows a layer of a stack has.
    """

    shape: Shape
    grown: int
    gradient: IndexedSlices | None = None
    axis: int = 0
    group: int = 1

    @property
    def is_stack(self) -> bool:
        """Whether each row, a layer, must stand alone."""
        return self.gradient is None

    @property
    def height(self) -> int:
        """The number of rows; a table without rows is traced as if it had one."""
        return max(self.shape[self.axis], 1)

    @property
    def layers(self) -> int:
        """The number of layers of a stack."""
        return self.height // self.group

    @property
    def given(self) -> int:
        """The number of rows that are there."""
        return self.group if self.gradient is None else len(self.gradient.indices)


class Along(NamedTuple):
    """An array has the rows of this table along this axis."""

    table: Table
    axis: int

    def with_rows(self, shape: Shape, number: int) -> Shape:
        """A shape for another number of rows."""
        each = max(shape[self.axis], 1) // self.table.height  # Entries of a row.
        return *shape[: self.axis], each * number, *shape[self.axis + 1 :]


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a first pass over all layers finds out for a second one.

    Attributes:
      results: those of equations that reduce layers, or whose results are scalars.
      parts: for each reduction of layers, its function and the part of one layer. The
        function takes the parts of all layers, along a first axis.
    """

    results: dict[Place, list[jax.Array]] = dataclasses.field(default_factory=dict)
    parts: dict[Place, tuple[Total, jax.Array]] = dataclasses.field(
        default_factory=dict
    )

    def totals(self, parts: Mapping[Place, jax.Array]) -> Notes:
        """The results of the reductions, from the parts of all layers."""
        return Notes({at: [self.parts[at][0](x)] for at, x in parts.items()})


class Program(NamedTuple):
    """A function of whole tables, traced with their own heights and with others."""

    own: ClosedJaxpr
    higher: ClosedJaxpr
    structure: Any  # That of the results.


class ByRow(NamedTuple):
    """The tables of a step, by their paths.

    Attributes:
      tables: the tables, or stacks.
      row: what messages call a row.
      table: what they call a table.
      notes: what is known already, and is not computed again.
      takes_notes: whether results are noted.
      at: the place of the equation that this part of a program is inside of.
    """

    tables: dict[Path, Table]
    row: str = "row"
    table: str = "table"
    notes: Notes = Notes()
    takes_notes: bool = False
    at: Place = ()

    def depends_on_size(self, what: str) -> NoReturn:
        raise MixedRowsError(
            f"its {what} is another one for a {self.table} of more {self.row}s: a mask "
            "or labels may depend on sizes, so give them as a tree"
        )

    def mixes(self, eqn: JaxprEqn) -> NoReturn:
        place = jaxprs.place(eqn)
        raise MixedRowsError(f"its update may mix {self.row}s, by {place}")

    @classmethod
    def of(cls, updates: optax.Updates) -> ByRow:
        """The tables that have a row-sparse gradient."""
        found = dict(maps.nodes(updates, is_sparse))
        # The highest first: so each grows by a larger share than those before it.
        paths = sorted(found, key=lambda path: -max(found[path].shape[0], 1))
        return cls(
            {
                path: Table(g.shape, max(g.shape[0], 1) + more, g)
                for more, path in enumerate(paths, 1)
                for g in [found[path]]
            }
        )

    def higher(self, tree: PyTree[Leaf]) -> PyTree[Leaf]:
        """A tree like the updates, with descriptions of the tables as they grow.

        What has not the rows of its table, as a number for each leaf, stays.
        """

        def describe(path: Path, x: Any) -> Leaf:
            table, shape = self.tables.get(path), np.shape(x)
            if table is None or len(shape) != len(table.shape):
                return x
            if shape[table.axis] != table.shape[table.axis]:
                return x
            shape = Along(table, table.axis).with_rows(shape, table.grown)
            return jax.ShapeDtypeStruct(shape, dtypes.dtype_of(x))

        return maps.map_with_path(describe, tree)

    def higher_state(
        self,
        init: optax.TransformInitFn,
        state: optax.OptState,
        whole: optax.Params,
        refused: Mapping[str, str],
    ) -> optax.OptState:
        """The state as the tables grow, in descriptions.

        ``refused`` says of some kinds of states why their rows cannot act alone.

        Raises:
          MixedRowsError: the state of a table has no row for each of its rows.
          TypeError: it is not the state that ``init`` makes.
        """

        def mark(path: Path, p: Leaf) -> Leaf:
            return Placeholder(path) if path in self.tables else p

        try:
            marks = owners(init, maps.map_with_path(mark, whole), state)
        except ValueError as error:
            checks.own_state(state, jax.eval_shape(init, self.higher(whole)))
            raise MixedRowsError(
                f"its init and the given state show no state of that {self.table} alone"
            ) from error.__cause__
        higher = jax.eval_shape(init, self.higher(whole))
        paths = (path for path, _ in maps.leaves_with_path(state))
        fields = dict(zip(paths, maps.fields(state), strict=True))
        shapes = {path: np.shape(x) for path, x in jax.tree.leaves_with_path(higher)}

        def check(start: Path, mark: object, part: optax.OptState) -> None:
            for end, x in jax.tree.leaves_with_path(part):
                path, shape = (*start, *end), np.shape(x)
                other = shapes.get(path)
                fits = shape == other
                if isinstance(mark, Placeholder):
                    fits = self._fits(self.tables[mark.path], shape, other)
                elif fits:
                    continue
                kinds = [field.partition(".")[0] for field in fields[path]]
                kinds = [kind for kind in kinds if kind in refused] or kinds
                reason = refused.get("".join(kinds[:1]))
                if reason or not fits:
                    where = " of ".join([jax.tree_util.keystr(path), *kinds[-1:]])
                    row, table = self.row, self.table
                    reason = reason or f"has no {row} for each {row} of the {table}"
                    raise MixedRowsError(
                        f"the state {where}, of shape {list(shape)}, {reason}"
                    )

        jax.tree.map_with_path(check, marks, state, is_leaf=is_placeholder)
        if shapes.keys() != {path for path, _ in jax.tree.leaves_with_path(state)}:
            self.depends_on_size("state")
        return higher

    def find(self, shape: Shape, other: Shape) -> Along | None:
        """The table whose rows an array has, if any, and along which axis.

        ``other`` is its shape in the second trace.

        Raises:
          LookupError: the two shapes differ in another way.
        """
        if shape == other:
            return None
        if len(shape) == len(other):
            axis, *more = (i for i, n in enumerate(shape) if n != other[i])
            for table in () if more else self.tables.values():
                along = Along(table, axis)
                grown = along.with_rows(shape, table.grown)
                # Several entries of a row may follow each other along the first axis.
                whole = not shape[axis] % table.height and axis == 0
                alone = shape[axis] == table.height and table.is_stack
                if other == grown and (whole or alone):
                    return along
        raise LookupError

    def _fits(self, table: Table, shape: Shape, other: Shape | None) -> bool:
        """Whether a leaf of state has one row for each row of its table."""
        try:
            along = self.find(shape, shape if other is None else other)
        except LookupError:
            return False
        if along is None or other is None:
            return False
        lengths = shape[along.axis], other[along.axis]
        return lengths == (table.shape[table.axis], table.grown)

    def run(
        self, f: Callable[..., PyTree[Any]], args: PyTree[Any], higher: PyTree[Any]
    ) -> PyTree[Any]:
        """``f(*args)``, with an ``IndexedSlices`` for each result that has rows.

        ``higher`` are the arguments as the tables grow, or descriptions of them.

        Raises:
          MixedRowsError: a row of the results depends on other rows, but not by a sum.
        """
        leaves, others = maps.leaves(args), maps.leaves(higher)
        found = self.found(leaves, others)
        rows: dict[int, Any] = {
            i: g.values if leaves[i] is g else touched(g, leaves[i])
            for i, along in enumerate(found)
            if along and (g := along.table.gradient) is not None
        }
        program = self.trace(f, args, higher, rows)
        values = self.evaluate(program.own, program.higher, *rows.values())
        made = self.found(program.own.jaxpr.outvars, program.higher.jaxpr.outvars)
        pairs = zip(made, values, strict=True)
        sparse = [(along and along.table.gradient, x) for along, x in pairs]
        values = [x if g is None else g.with_values(x) for g, x in sparse]
        return jax.tree.unflatten(program.structure, values)

    def trace(
        self,
        f: Callable[..., PyTree[Any]],
        args: PyTree[Any],
        higher: PyTree[Any],
        given: dict[int, Any],
    ) -> Program:
        """The two jaxprs of ``f(*args)``, as a function of the leaves in ``given``.

        ``given`` has the leaves by their number, those with rows and others, or arrays
        of their types. Other leaves are constants.
        """
        leaves, treedef = maps.flatten(args)
        shapes = [np.shape(x) for x in maps.leaves(higher)]

        def call(whole: dict[int, jax.Array]) -> PyTree[jax.Array]:
            filled = [whole.get(i, x) for i, x in enumerate(leaves)]
            with norms.one_by_one():  # Tables of one shape would be stacked.
                return f(*jax.tree.unflatten(treedef, filled))

        def trace(shape_of: Callable[[int], Shape]) -> tuple[ClosedJaxpr, Any]:
            types = {
                i: jax.typeof(x).update(shape=shape_of(i), memory_space=host.DEVICE)
                for i, x in given.items()
            }
            return jax.make_jaxpr(call, return_shape=True)(types)

        def own(i: int) -> Shape:
            shape = np.shape(leaves[i])
            along = self.find(shape, shapes[i])
            return along.with_rows(shape, along.table.height) if along else shape

        program, results = trace(own)
        try:
            higher_program, _ = trace(shapes.__getitem__)
        except Exception as error:
            raise MixedRowsError(
                f"its update fails for a {self.table} of more {self.row}s"
            ) from error
        return Program(program, higher_program, jax.tree.structure(results))

    def found(self, arrays: Sequence[Any], others: Sequence[Any]) -> list[Along | None]:
        """Of arrays, or variables, and of those of the second trace, whose rows."""
        shapes = zip(map(_shape, arrays), map(_shape, others), strict=True)
        return [self.find(*pair) for pair in shapes]

    def evaluate(self, own: ClosedJaxpr, higher: ClosedJaxpr, *args: Any) -> list[Any]:
        """The results of the first trace for these rows.

        Raises:
          MixedRowsError: one of them is missing.
        """
        results = self.results(own, higher, *args)
        for x in _missing(results):
            raise MixedRowsError(x.reason)
        return results

    def results(self, own: ClosedJaxpr, higher: ClosedJaxpr, *args: Any) -> list[Any]:
        """As :func:`evaluate`, but some arguments and results may be missing."""
        shapes, grown = (
            list(map(_shape, jaxprs.constants(x.jaxpr))) for x in (own, higher)
        )
        alike = jaxprs.operations(own.jaxpr) == jaxprs.operations(higher.jaxpr)
        if not alike or len(shapes) != len(grown):
            self.depends_on_size("update")
        for shape, changed in zip(shapes, grown, strict=True):
            if shape != changed:
                raise MixedRowsError(
                    f"its update has a constant of shape {list(shape)}, which depends "
                    f"on the number of {self.row}s: use jax.numpy, as in jnp.zeros"
                )
        args = *own.consts, *args
        return jaxprs.run(own.jaxpr, args, self.apply, higher.jaxpr)

    def apply(
        self, name: str, inputs: list[Any], eqn: JaxprEqn, higher: JaxprEqn
    ) -> list[Any] | None:
        """The results of an equation; None if it has nothing to do with tables."""
        place = *self.at, id(eqn)
        if place in self.notes.results:
            return self.notes.results[place]
        results = self.attempt(name, inputs, eqn, higher)
        if self.takes_notes and eqn.outvars and not any(map(_shape, eqn.outvars)):
            results = versions.evaluate(eqn, inputs) if results is None else results
            if not _missing(results):
                self.notes.results[place] = results
        return results

    def attempt(
        self, name: str, inputs: list[Any], eqn: JaxprEqn, higher: JaxprEqn
    ) -> list[Any] | None:
        """As :func:`apply`, but takes nothing from the notes."""
        missing = _missing(inputs)
        if missing and name not in _IN_PARTS:
            # A sum over a mesh axis is an effect, too, but only its result counts.
            is_act = eqn.effects and (not eqn.outvars or jaxprs.calls_host(eqn))
            if is_act and not (missing[0].is_given or self.takes_notes):
                raise MixedRowsError(missing[0].reason)
            return [missing[0].used(eqn)] * len(eqn.outvars)
        try:
            return self.by_rule(name, inputs, eqn, higher)
        except MixedRowsError as error:  # Perhaps nobody needs its results.
            if eqn.effects or not eqn.outvars:
                raise
            return [Missing(str(error))] * len(eqn.outvars)

    def by_rule(
        self, name: str, inputs: list[Any], eqn: JaxprEqn, higher: JaxprEqn
    ) -> list[Any] | None:
        """As :func:`apply`; inputs may be missing for operations in parts."""
        params = eqn.params
        try:
            tables = self.found(eqn.invars, higher.invars)
            made = self.found(eqn.outvars, higher.outvars)
        except LookupError:
            self.mixes(eqn)
        if all(a is None for a in (*tables, *made)) and not _missing(inputs):
            return None
        if name == Op.JIT:
            programs = params["jaxpr"], higher.params["jaxpr"]
            return self.inside(eqn).results(*programs, *inputs)
        if name == Op.CUSTOM_JVP:
            inside = self.inside(eqn)
            programs = params["call_jaxpr"], higher.params["call_jaxpr"]
            if self.takes_notes:
                inside.results(*programs, *inputs)
                inside = inside.silent()
            if _missing(inputs):  # It has no derivative either.
                return inside.results(*programs, *inputs)
            return inside.with_rule(eqn, higher)(*inputs)
        if name == Op.COND:
            both = zip(params["branches"], higher.params["branches"], strict=True)
            return self.switch(eqn, inputs, list(both))
        if name in versions.OF_SHAPE:
            shape = _shape(eqn.outvars[0])
            (along,) = made
            if along is None or not _keeps_order(name, eqn, tables[0], along):
                self.mixes(eqn)
            shape = along.with_rows(shape, along.table.given)
            eqn = eqn.replace(params=params | {versions.OF_SHAPE[name]: shape})
        elif name == Op.DOT:
            contracted, _ = params["dimension_numbers"]
            add: Total = functools.partial(jnp.sum, axis=0)
            self.check_alone(eqn, tables, contracted, inputs, add)
            inputs = [_filled(*pair, 0) for pair in zip(tables, inputs, strict=True)]
        elif name in versions.REDUCTIONS:
            first = eqn.replace(params=params | {"axes": (0,)})
            self.check_alone(
                eqn,
                tables,
                [params["axes"]],
                inputs,
                lambda x: versions.evaluate(first, [x])[0],
            )
            if tables[0] is not None and 0 in params["axes"]:
                # Without rows it is the number that changes no result: 0 for a sum.
                (nothing,) = versions.evaluate(eqn, [inputs[0][:0]])
                nothing = jnp.expand_dims(nothing, params["axes"])
                inputs = [_filled(tables[0], inputs[0], nothing)]
        elif name not in versions.ELEMENTWISE | {Op.TRANSPOSE} and not (
            name in versions.SAME_VALUES and tables[0] and tables[0].table.is_stack
        ):
            self.mixes(eqn)
        return versions.evaluate(eqn, inputs)

    def inside(self, eqn: JaxprEqn, branch: int = 0) -> ByRow:
        """The same for a program inside of an equation."""
        return self._replace(at=(*self.at, id(eqn), branch))

    def silent(self) -> ByRow:
        """The same within another trace: values from there are of no use outside."""
        return self._replace(takes_notes=False)

    def check_alone(
        self,
        eqn: JaxprEqn,
        tables: list[Along | None],
        axes: Sequence[Sequence[int]],
        inputs: list[Any],
        total: Total,
    ) -> None:
        """Raises if an equation adds up layers; notes what this layer adds."""
        pairs = zip(tables, axes, strict=True)
        gone = [
            along.axis in axes if along and along.table.is_stack else False
            for along, axes in pairs
        ]
        if any(gone):
            if self.takes_notes and all(gone):
                part = versions.evaluate(eqn, inputs)
                self.notes.parts[(*self.at, id(eqn))] = total, part[0]
            self.mixes(eqn)

    def switch(
        self,
        eqn: JaxprEqn,
        inputs: list[Any],
        branches: list[tuple[ClosedJaxpr, ClosedJaxpr]],
    ) -> list[Any]:
        """The results of a conditional; one is missing if it is in any branch."""
        index, *operands = inputs
        platforms = eqn.params.get("branches_platforms") or ()
        if None in platforms and any(x.is_stack for x in self.tables.values()):
            # Forms for one platform are for whole arrays.
            number = platforms.index(None)
            return self.inside(eqn, number).results(*branches[number], *operands)
        if self.takes_notes:
            for number, programs in enumerate(branches):
                self.inside(eqn, number).results(*programs, *operands)
        if isinstance(index, Missing):
            return [index.used(eqn)] * len(eqn.outvars)
        known = {i: x for i, x in enumerate(operands) if not isinstance(x, Missing)}
        missing: dict[int, Missing] = {}

        def there(number: int, known: dict[int, jax.Array]) -> dict[int, jax.Array]:
            given = [known.get(i, x) for i, x in enumerate(operands)]
            inside = self.inside(eqn, number).silent()
            results = dict(enumerate(inside.results(*branches[number], *given)))
            missing.update((i, x) for i, x in results.items() if isinstance(x, Missing))
            return {i: x for i, x in results.items() if i not in missing}

        sides = [functools.partial(there, n) for n in range(len(branches))]
        for side in sides:  # So each knows what the others lack.
            jax.eval_shape(side, known)
        results = jax.lax.switch(index, sides, known)
        return [missing.get(i, results.get(i)) for i in range(len(eqn.outvars))]

    def with_rule(self, eqn: JaxprEqn, higher: JaxprEqn) -> Callable[..., list[Any]]:
        """The function of a ``custom_jvp`` for these rows, with its derivative."""
        programs = eqn.params["call_jaxpr"], higher.params["call_jaxpr"]
        f = jax.custom_jvp(functools.partial(self.evaluate, *programs))

        @f.defjvp
        def rule(
            primals: Sequence[Any], tangents: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            programs = _derivative(eqn), _derivative(higher)
            results = iter(self.evaluate(*programs, *primals, *tangents))
            values = [next(results) for _ in eqn.outvars]
            return values, [
                next(results) if _is_real(x) else np.zeros(x.shape, jax.dtypes.float0)
                for x in values
            ]

        return f


def _shape(x: Any) -> Shape:
    """The shape of an array or of a variable."""
    x = getattr(x, "aval", x)
    return x.shape if hasattr(x, "shape") else np.shape(x)


# Some of their results need only some of their inputs.
_IN_PARTS = {Op.JIT, Op.CUSTOM_JVP, Op.COND}


def _missing(values: Sequence[Any]) -> list[Missing]:
    return [x for x in values if isinstance(x, Missing)]


def _filled(along: Along | None, x: jax.Array, fill: Any) -> jax.Array:
    """``x`` with another value for padding, which a stack does not have."""
    g = along and along.table.gradient
    return x if g is None else filled(g, x, fill)


def _keeps_order(name: str, eqn: JaxprEqn, before: Along | None, after: Along) -> bool:
    """Whether the entries of each row are those of the same row before, in order."""
    if name == Op.RANDOM_BITS:  # Each layer would get the same bits.
        return not after.table.is_stack
    if name != Op.RESHAPE or before is None:
        return True
    shapes = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    in_front = [
        math.prod(shape[: along.axis])
        for shape, along in zip(shapes, (before, after), strict=True)
    ]
    return in_front[0] == in_front[1]


def _derivative(eqn: JaxprEqn) -> ClosedJaxpr:
    """The results of an equation and the tangents of the real ones, as JAX has them."""
    primals: list[Any] = [x.aval for x in eqn.invars]
    number = len(primals)

    def jvp(*args: jax.Array) -> list[jax.Array]:
        values, tangents = jax.jvp(
            lambda *x: versions.evaluate(eqn, x), args[:number], args[number:]
        )
        return [*values, *(t for t in tangents if _is_real(t))]

    return jax.make_jaxpr(jvp)(*primals, *(x.to_tangent_aval() for x in primals))


def _is_real(x: jax.Array) -> bool:
    """Whether it has a derivative: integers have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
