"""A traced program without its mesh, so that any one will do.

A user's optimizer may say where an array lies, or ask for the mesh: so it is traced on
the mesh that is set. A core has its arrays whole, so there placements are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from gradxform._jax import jaxprs, programs
from gradxform._jax.versions import Op
from gradxform._trees.types import PyTree

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

_CONSTRAINT = "sharding_constraint"
_PLACES = frozenset({Op.RESHARD, _CONSTRAINT})


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Traces know of no mesh, so that any one will do, and unroll no loop."""
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.disable_jit(False), jax.sharding.use_abstract_mesh(no_mesh):
        yield


def traced(
    trace: Callable[..., tuple[ClosedJaxpr, PyTree[Any]]], types: Sequence[Any]
) -> tuple[ClosedJaxpr, PyTree[Any]]:
    """A program without ``jit`` in it, and what it returns.

    It is traced on the mesh that is set, with all arrays whole. So what asks for the
    mesh gets it, and so does what says where an array lies.
    """
    with jax.disable_jit(False):
        closed, results = trace(types)
    closed = programs.inlined(closed)
    if jax.sharding.get_abstract_mesh().empty and not any(
        any(jaxprs.anywhere(closed.jaxpr, name)) for name in _PLACES
    ):
        return closed, results
    return without_mesh(closed), results


def without_mesh(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program. It keeps constraints that are in no other equation.

    On explicit axes results have the types of what they replace, so it keeps none.
    """
    from jax.extend.core import primitives

    known: dict[int, JaxprEqn] = {}

    def plain(eqn: JaxprEqn) -> JaxprEqn:
        """A ``jit`` with the same settings, but for the mesh."""
        if id(eqn.ctx) not in known:
            with eqn.ctx.manager, tracing():
                one = jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0)
            (known[id(eqn.ctx)],) = jaxprs.all_equations(one.jaxpr)
        return known[id(eqn.ctx)]

    def bare(eqn: JaxprEqn) -> JaxprEqn:
        of, copy = plain(eqn), cast(Any, primitives.copy_p)
        if jaxprs.name_of(eqn) in _PLACES:
            return eqn.replace(primitive=copy, params={}, ctx=of.ctx)
        params = {
            name: None if isinstance(x, NamedSharding) else x
            for name, x in eqn.params.items()
        }
        if jaxprs.name_of(eqn) == Op.JIT:
            params["ctx_mesh"] = of.params["ctx_mesh"]
            for name, x in ("in_shardings", eqn.invars), ("out_shardings", eqn.outvars):
                params[name] = of.params[name] * len(x)
        return eqn.replace(params=params, ctx=of.ctx)

    variables: dict[Var, Var] = {}

    def atom(x: Var | Literal) -> Var | Literal:
        if not jaxprs.is_variable(x):
            return _anew(x)
        if x not in variables:
            variables[x] = type(x)(_bare_type(x.aval))
        return variables[x]

    found = jaxprs.replaced(closed, bare, atom)
    pairs = zip(
        jaxprs.all_equations(closed.jaxpr),
        jaxprs.all_equations(found.jaxpr),
        strict=True,
    )
    eqns = [
        a.replace(invars=b.invars, outvars=b.outvars, ctx=b.ctx)
        if jaxprs.name_of(a) == _CONSTRAINT
        else b
        for a, b in pairs
    ]
    return found.replace(jaxpr=found.jaxpr.replace(eqns=eqns), consts=found.consts)


def _anew(x: Var | Literal) -> Var | Literal:
    """A literal whose type has no mesh; since JAX 0.12 it keeps that of its trace."""
    value: Any = getattr(x, "val", None)
    if not (isinstance(value, np.ndarray) and hasattr(value, "aval")):
        return x
    literal: Any = type(x)
    made: Var | Literal = literal(value.view(), value.view().aval)
    return made


def _bare_type(t: Any) -> Any:  # Of an array, a reference or a token.
    if not hasattr(t, "sharding") or t.sharding.mesh.empty:
        return t
    nowhere = jax.sharding.AbstractMesh((), ())
    whole = jax.sharding.PartitionSpec(*[None] * t.ndim)
    return t.update(sharding=NamedSharding(nowhere, whole))


def bare_types(variables: Iterable[Var | Literal]) -> list[jax.ShapeDtypeStruct]:
    """The types of variables, as if no array was on a mesh."""
    avals: list[Any] = [x.aval for x in variables]
    return [
        jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in avals
    ]


def left_out(name: str, inputs: list[Any], eqn: JaxprEqn) -> Sequence[Any] | None:
    """A rule for what has its arrays whole: placements are left out."""
    del eqn
    return inputs if name in _PLACES else None
