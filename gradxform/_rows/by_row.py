"""Runs a function of whole tables on a few of their rows.

The function is traced with the tables' own shapes, so whatever looks at sizes sees the
truth: masks, labels, the number of entries in a mean. A second trace, with more rows,
shows which sizes count rows. Then each equation is evaluated for the rows that are
there. A sum over rows leaves out padding. Any other equation must be elementwise, or it
is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._rows.boundary import touched
from gradxform._rows.indexed_slices import IndexedSlices, filled, is_sparse
from gradxform._trees import dtypes, jaxprs, maps, norms, versions
from gradxform._trees.types import Leaf, Path, PyTree, Shape
from gradxform._trees.versions import Op

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var


class MixedRowsError(TypeError):
    """The function cannot run on a few rows; the message says what it does."""


class ByRow(NamedTuple):
    """The tables of a step.

    Attributes:
      gradients: the summed gradient of each table, by the table's path.
      heights: its number of rows in the second trace.
    """

    gradients: dict[Path, IndexedSlices]
    heights: dict[Path, int]

    @classmethod
    def of(cls, updates: optax.Updates) -> ByRow:
        """The tables that have a row-sparse gradient."""
        found = dict(maps.nodes(updates, is_sparse))
        # The highest first: so each grows by a larger share than those before it.
        paths = sorted(found, key=lambda path: -_height(found[path]))
        grown = {p: _height(found[p]) + more for more, p in enumerate(paths, 1)}
        return cls(found, grown)

    def higher(self, tree: PyTree[Leaf]) -> PyTree[Leaf]:
        """A tree like the updates, with descriptions of the tables as they grow."""

        def describe(path: Path, x: Any) -> Leaf:
            if path not in self.gradients:
                return x
            shape = self.heights[path], *np.shape(x)[1:]
            return jax.ShapeDtypeStruct(shape, dtypes.dtype_of(x))

        return maps.map_with_path(describe, tree)

    def find(self, shape: Shape, other: Shape) -> IndexedSlices | None:
        """The table whose rows an array has along its first axis, if any.

        ``other`` is its shape in the second trace.

        Raises:
          LookupError: the two shapes differ in another way.
        """
        if shape == other:
            return None
        if len(shape) == len(other) and shape[1:] == other[1:]:
            for path, g in self.gradients.items():
                each, rest = divmod(max(shape[0], 1), _height(g))  # Entries of a row.
                if not rest and other[0] == each * self.heights[path]:
                    return g
        raise LookupError

    def run(
        self, f: Callable[..., PyTree[Any]], args: PyTree[Any], higher: PyTree[Any]
    ) -> PyTree[Any]:
        """``f(*args)``, with an ``IndexedSlices`` for each result that has rows.

        ``higher`` are the arguments as the tables grow, or descriptions of them.

        Raises:
          MixedRowsError: a row of the results depends on other rows, but not by a sum.
        """
        leaves, treedef = maps.flatten(args)
        shapes = list(map(np.shape, maps.leaves(higher)))
        found = enumerate(map(self.find, map(np.shape, leaves), shapes))
        tables = {i: g for i, g in found if g is not None}
        rows: dict[int, Any] = {
            i: g.values if leaves[i] is g else touched(g, leaves[i])
            for i, g in tables.items()
        }

        def call(whole: dict[int, jax.Array]) -> PyTree[jax.Array]:
            filled = [whole.get(i, x) for i, x in enumerate(leaves)]
            with norms.one_by_one():  # Tables of one shape would be stacked.
                return f(*jax.tree.unflatten(treedef, filled))

        def trace(heights: dict[int, int]) -> tuple[ClosedJaxpr, Any]:
            types = {
                i: jax.typeof(x).update(shape=(heights[i], *x.shape[1:]))
                for i, x in rows.items()
            }
            return jax.make_jaxpr(call, return_shape=True)(types)

        program, results = trace({i: _height(g) for i, g in tables.items()})
        try:
            higher_program, _ = trace({i: shapes[i][0] for i in tables})
        except Exception as error:
            raise MixedRowsError("its update fails for a table of more rows") from error
        values = self.evaluate(program, higher_program, *rows.values())
        made = self.found(program.jaxpr.outvars, higher_program.jaxpr.outvars)
        pairs = zip(made, values, strict=True)
        values = [x if g is None else g.with_values(x) for g, x in pairs]
        return jax.tree.unflatten(jax.tree.structure(results), values)

    def found(
        self, variables: Sequence[Var | Literal], others: Sequence[Var | Literal]
    ) -> list[IndexedSlices | None]:
        """The tables of some variables of the first trace."""
        shapes = zip(map(_shape, variables), map(_shape, others), strict=True)
        return [self.find(*pair) for pair in shapes]

    def evaluate(
        self, program: ClosedJaxpr, higher: ClosedJaxpr, *args: jax.Array
    ) -> list[Any]:
        """The results of the first trace for these rows."""
        own, other = program.jaxpr, higher.jaxpr
        shapes, grown = (list(map(_shape, jaxprs.constants(x))) for x in (own, other))
        alike = jaxprs.operations(own) == jaxprs.operations(other)
        if not alike or len(shapes) != len(grown):
            raise MixedRowsError(
                "its update is another one for a table of more rows: a mask or labels "
                "may depend on sizes, so give them as a tree"
            )
        for shape, changed in zip(shapes, grown, strict=True):
            if shape != changed:
                raise MixedRowsError(
                    f"its update has a constant of shape {list(shape)}, which depends "
                    "on the number of rows: use jax.numpy, as in jnp.zeros"
                )
        return jaxprs.run(own, [*program.consts, *args], self.apply, other)

    def apply(
        self, name: str, inputs: list[Any], eqn: JaxprEqn, higher: JaxprEqn
    ) -> list[Any] | None:
        """The results of an equation; None if it has nothing to do with tables."""
        params = eqn.params
        try:
            tables = self.found(eqn.invars, higher.invars)
            made = self.found(eqn.outvars, higher.outvars)
        except LookupError:
            _refuse(eqn)
        if all(g is None for g in (*tables, *made)):
            return None
        if name == Op.JIT:
            return self.evaluate(params["jaxpr"], higher.params["jaxpr"], *inputs)
        if name == Op.CUSTOM_JVP:
            return self.with_rule(eqn, higher)(*inputs)
        if name == Op.COND:
            both = zip(params["branches"], higher.params["branches"], strict=True)
            sides = [functools.partial(self.evaluate, *pair) for pair in both]
            return jax.lax.switch(inputs[0], sides, *inputs[1:])
        if name in versions.OF_SHAPE:
            (g,), (height, *row) = made, _shape(eqn.outvars[0])
            if g is None:
                _refuse(eqn)
            shape = height // _height(g) * len(g.indices), *row
            eqn = eqn.replace(params=params | {versions.OF_SHAPE[name]: shape})
        elif name == Op.DOT:
            pairs = zip(tables, inputs, strict=True)
            inputs = [x if g is None else filled(g, x, 0) for g, x in pairs]
        elif name in versions.REDUCTIONS:
            if (g := tables[0]) is not None and 0 in params["axes"]:
                # Without rows it is the number that changes no result: 0 for a sum.
                (nothing,) = versions.evaluate(eqn, [inputs[0][:0]])
                nothing = jnp.expand_dims(nothing, params["axes"])
                inputs = [filled(g, inputs[0], nothing)]
        elif name not in versions.ELEMENTWISE:
            _refuse(eqn)
        return versions.evaluate(eqn, inputs)

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


def _height(g: IndexedSlices) -> int:
    """The number of rows; a table without rows is traced as if it had one."""
    return max(g.dense_shape[0], 1)


def _shape(x: Var | Literal) -> Shape:
    return getattr(x.aval, "shape", ())  # A token has none.


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


def _refuse(eqn: JaxprEqn) -> NoReturn:
    raise MixedRowsError(f"its update may mix rows, by {jaxprs.place(eqn)}")
