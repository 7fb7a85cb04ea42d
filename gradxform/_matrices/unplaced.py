"""A traced program without its mesh, so that any one will do.

A user's optimizer may say where an array lies, or ask for the mesh: so it is traced on
the mesh that is set. A core has its arrays whole, so there placements are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
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
    """A program, and what it returns.

    It is traced on the mesh that is set if it says where an array lies.
    """
    try:
        with tracing():
            closed, results = trace(types)
        if not any(any(jaxprs.anywhere(closed.jaxpr, name)) for name in _PLACES):
            return closed, results
    except Exception:  # Without a mesh JAX refuses such a program, by any error.
        pass
    with jax.disable_jit(False):
        closed, results = trace(types)
        closed = programs.inlined(closed)
    with tracing():
        return without_mesh(closed), results


def without_mesh(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program. It keeps constraints that are in no other equation.

    On explicit axes results have the types of what they replace, so it keeps none.
    """
    from jax.extend.core import primitives

    (plain,) = jaxprs.all_equations(jax.make_jaxpr(jnp.negative)(1.0).jaxpr)

    def bare(eqn: JaxprEqn) -> JaxprEqn:
        if jaxprs.name_of(eqn) in _PLACES:
            copy: Any = primitives.copy_p
            return eqn.replace(primitive=copy, params={}, ctx=plain.ctx)
        params = {
            name: None if isinstance(x, NamedSharding) else x
            for name, x in eqn.params.items()
        }
        is_marked = eqn.ctx.xla_metadata or eqn.ctx.compute_type
        return eqn.replace(
            invars=[*map(_anew, eqn.invars)],
            params=params,
            ctx=eqn.ctx if is_marked else plain.ctx,
        )

    found: Any = jaxprs.replaced(closed, bare)  # One of two classes, by JAX's version.
    pairs = zip(
        jaxprs.all_equations(closed.jaxpr),
        jaxprs.all_equations(found.jaxpr),
        strict=True,
    )
    eqns = [
        a.replace(ctx=plain.ctx) if jaxprs.name_of(a) == _CONSTRAINT else b
        for a, b in pairs
    ]
    if type(found.jaxpr) is type(found):  # Since JAX 0.12 they are one.
        return found.replace(eqns=eqns)
    return found.replace(jaxpr=found.jaxpr.replace(eqns=eqns))


def _anew(x: Var | Literal) -> Var | Literal:
    """A literal whose type has no mesh; since JAX 0.12 it keeps that of its trace."""
    value: Any = getattr(x, "val", None)
    if not (isinstance(value, np.ndarray) and hasattr(value, "aval")):
        return x
    literal: Any = type(x)
    made: Var | Literal = literal(value.view(), value.view().aval)
    return made


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
