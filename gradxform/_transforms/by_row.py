"""Runs a function of whole tables on a few of their rows.

The function is traced with the tables' own shapes, so whatever looks at sizes sees the
truth: masks, labels, the number of entries in a mean. A second trace, with more rows,
shows which sizes count rows. Then each equation is evaluated for the rows that are
there. A sum over rows leaves out padding. An equation that mixes rows in another way is
refused.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from gradxform._trees import arithmetic, norms, versions
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.types import PyTree

if TYPE_CHECKING:
    from jax.extend.core import (  # type: ignore[attr-defined]  # Of ClosedJaxpr.
        ClosedJaxpr,
        JaxprEqn,
        Literal,
        Var,
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of an array that has as many as a table; to JAX it is one leaf.

    Attributes:
      table: the summed gradient of the table, with the same rows.
      values: the rows, zeros for padding.
    """

    table: IndexedSlices
    values: jax.Array


class MixedRowsError(Exception):
    """The function cannot run on a few rows; the message says what it does."""


# These make an array of a shape, which is one of their parameters.
_SHAPE = {"broadcast_in_dim": "shape", "random_bits": "shape", "reshape": "new_sizes"}
_CALLS = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}


def run(f: Callable[..., PyTree[Any]], *args: PyTree[Any]) -> PyTree[Any]:
    """``f(*args)``, where the arguments hold :class:`Rows` instead of whole arrays.

    Raises:
      MixedRowsError: a row of the results depends on other rows, but not by a sum.
    """
    leaves, treedef = jax.tree.flatten(args)
    tables = {id(x.table): x.table for x in leaves if isinstance(x, Rows)}
    heights = {i: max(g.dense_shape[0], 1) for i, g in tables.items()}
    # Table by table, the highest first, the heights grow by larger and larger shares.
    order = sorted(heights, key=heights.__getitem__, reverse=True)
    more = {i: heights[i] + d for d, i in enumerate(order, 1)}

    def trace(heights: dict[int, int]) -> tuple[ClosedJaxpr, Any]:
        def call(*whole: jax.Array) -> PyTree[jax.Array]:
            left = iter(whole)
            filled = [next(left) if isinstance(x, Rows) else x for x in leaves]
            with norms.one_by_one():  # Tables of one shape would be stacked.
                return f(*jax.tree.unflatten(treedef, filled))

        types = [
            jax.typeof(x.values).update(
                shape=(heights[id(x.table)], *x.values.shape[1:])
            )
            for x in leaves
            if isinstance(x, Rows)
        ]
        return jax.make_jaxpr(call, return_shape=True)(*types)

    program, shapes = trace(heights)
    try:
        twin, _ = trace(more)
    except Exception as error:
        raise MixedRowsError("its update fails for a table of more rows") from error
    by_share = {
        fractions.Fraction(more[i] - heights[i], heights[i]): g
        for i, g in tables.items()
    }
    results = _ByRow(by_share).run(
        program, twin, [x.values for x in leaves if isinstance(x, Rows)]
    )
    types, treedef = jax.tree.flatten(shapes)
    arrays = [_array(x, t) for x, t in zip(results, types, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


class _ByRow(NamedTuple):
    """Evaluates a jaxpr on rows.

    Attributes:
      tables: the gradient of each table, by the share by which its height grows from
        the first trace to the second.
    """

    tables: dict[fractions.Fraction, IndexedSlices]

    def run(
        self, program: ClosedJaxpr, twin: ClosedJaxpr, args: Sequence[Any]
    ) -> list[Any]:
        from jax.extend.core import Literal

        jaxpr, other = program.jaxpr, twin.jaxpr
        env = dict(zip(jaxpr.constvars, program.consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)

        def values(atoms: Sequence[Var | Literal]) -> list[Any]:
            return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

        if [*map(_kind, jaxpr.eqns)] != [*map(_kind, other.eqns)]:
            _refuse(
                "its update is another one for a table of more rows: a mask or labels "
                "may depend on sizes, so give them as a tree"
            )
        for eqn, twin_eqn in zip(jaxpr.eqns, other.eqns, strict=True):
            results = self.evaluate(eqn, twin_eqn, values(eqn.invars))
            env.update(zip(eqn.outvars, results, strict=True))
        return values(jaxpr.outvars)

    def evaluate(self, eqn: JaxprEqn, twin: JaxprEqn, inputs: list[Any]) -> list[Any]:
        """The results of an equation."""
        name, params = eqn.primitive.name, eqn.params
        tables = list(map(functools.partial(self.table, eqn), eqn.invars, twin.invars))
        made = list(map(functools.partial(self.table, eqn), eqn.outvars, twin.outvars))
        if all(g is None for g in (*tables, *made)):
            return versions.evaluate(eqn, inputs)
        if name in _CALLS:
            key = _CALLS[name]
            return self.run(params[key], twin.params[key], inputs)
        if name == "cond":
            index, *operands = inputs
            both = zip(params["branches"], twin.params["branches"], strict=True)
            branches = [functools.partial(self.branch, *pair) for pair in both]
            return list(jax.lax.switch(index, branches, *operands))
        if name in _SHAPE:
            (g,), (height, *row) = made, _shape(eqn.outvars[0])
            if g is None:
                _mixes(eqn)
            shape = height // max(g.dense_shape[0], 1) * len(g.indices), *row
            eqn = eqn.replace(params=params | {_SHAPE[name]: shape})
        elif name == "dot_general":
            pairs = zip(tables, inputs, strict=True)
            inputs = [x if g is None else _filled(g, x, 0) for g, x in pairs]
        elif name.startswith("reduce_") and "axes" in params:
            if (g := tables[0]) is not None and 0 in params["axes"]:
                # Without rows it is the number that changes no result: 0 for a sum.
                (nothing,) = versions.evaluate(eqn, [inputs[0][:0]])
                nothing = jnp.expand_dims(nothing, params["axes"])
                inputs = [_filled(g, inputs[0], nothing)]
        elif not _is_elementwise(eqn):
            _mixes(eqn)
        return versions.evaluate(eqn, inputs)

    def branch(
        self, program: ClosedJaxpr, twin: ClosedJaxpr, *args: jax.Array
    ) -> list[jax.Array]:
        """A side of a conditional."""
        results = self.run(program, twin, args)
        types = [x.aval for x in program.jaxpr.outvars]
        return [_array(x, t) for x, t in zip(results, types, strict=True)]

    def table(
        self, eqn: JaxprEqn, x: Var | Literal, y: Var | Literal
    ) -> IndexedSlices | None:
        """The table whose rows a variable has along its first axis, if any."""
        shape, other = _shape(x), _shape(y)
        if shape == other:
            return None
        if shape[1:] != other[1:] or not shape[0]:
            _mixes(eqn)
        share = fractions.Fraction(other[0] - shape[0], shape[0])
        return self.tables[share] if share in self.tables else _mixes(eqn)


def _shape(x: Var | Literal) -> tuple[int, ...]:
    return getattr(x.aval, "shape", ())  # A token has none.


def _array(x: Any, like: Any) -> jax.Array:
    """Constants come back as numbers."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x, like.dtype)


def _filled(g: IndexedSlices, x: jax.Array, fill: Any) -> jax.Array:
    """``x`` with another value for padding; it may have several entries for a row."""
    inside, length = g.indices < g.dense_shape[0], len(x)
    if length != len(inside):
        inside = jnp.repeat(inside, length // len(inside), total_repeat_length=length)
    return jnp.where(arithmetic.expand(inside, x), x, jnp.asarray(fill, x.dtype))


def _kind(eqn: JaxprEqn) -> tuple[str, int, int]:
    return eqn.primitive.name, len(eqn.invars), len(eqn.outvars)


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether each entry depends on one of each input: then it takes numbers, too."""
    numbers = [
        jax.ShapeDtypeStruct((), x.aval.dtype)  # type: ignore[attr-defined]
        for x in eqn.invars
    ]
    try:
        results = jax.eval_shape(lambda *x: versions.evaluate(eqn, x), *numbers)
    except Exception:
        return False
    return eqn.primitive.name != "sort" and all(x.shape == () for x in results)


def _mixes(eqn: JaxprEqn) -> NoReturn:
    from jax.extend import source_info_util

    where = source_info_util.summarize(eqn.source_info)
    _refuse(f"its update mixes rows, by {eqn.primitive.name!r} {where}".rstrip())


def _refuse(what: str) -> NoReturn:
    raise MixedRowsError(what)
