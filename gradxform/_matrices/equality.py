"""Equal programs: what they compute is the same, and so are their constants.

Their text does not say it: it names a constant of an inner jaxpr without its values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._jax import jaxprs, versions

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_SHORT = 32  # Longer values have a digest.
# Functions of a derivative: each call makes new ones.
_RULES = frozenset(
    ["bwd", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "out_trees"]
)


class _Itself:
    """Equal to nothing else: nobody knows the values of the object."""

    def __init__(self, x: object) -> None:
        self.x = x  # Kept, or else another object might have its `id`.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


class _Value(NamedTuple):
    """A constant by its values."""

    shape: tuple[int, ...]
    dtype: str
    digest: bytes


def of_program(closed: ClosedJaxpr) -> Hashable:
    """What is equal for equal programs with equal derivatives, and for no others."""
    return _Described(with_rules=True).jaxpr(closed.jaxpr, closed.consts)


def of_value(x: object) -> Hashable:
    """What is equal for equal constants, and for no others."""
    if isinstance(x, jax.core.Tracer):
        return _Itself(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return str(x.dtype), of_value(jax.random.key_data(x))
    array = np.asarray(x)
    digest = array.tobytes()
    if len(digest) > _SHORT:
        digest = hashlib.sha256(digest).digest()
    return _Value(array.shape, str(array.dtype), digest)


def of_equations(
    reads: Sequence[Var], eqns: Sequence[JaxprEqn], makes: Sequence[Var | Literal]
) -> Hashable:
    """A key of equations. It is equal if equal reads give equal results."""
    return _Described(with_rules=True).equations(reads, eqns, makes)


def of_equation(eqn: JaxprEqn, variable: Callable[[Var], Hashable]) -> Hashable:
    """A key of equations. It is equal if the same variables give equal results."""
    described = _Described(with_rules=True)
    operands = tuple(
        variable(x) if jaxprs.is_variable(x) else described.literal(x)
        for x in eqn.invars
    )
    return jaxprs.name_of(eqn), described.params(eqn), operands


class _Described(NamedTuple):
    """Describes programs.

    Attributes:
      with_rules: whether a rule for a derivative counts: by what it computes. That of a
        ``custom_jvp`` may call the function again, so there it does not.
    """

    with_rules: bool

    def equations(
        self,
        reads: Sequence[Var],
        eqns: Sequence[JaxprEqn],
        makes: Sequence[Var | Literal],
    ) -> Hashable:
        """Equations, where a number stands for each variable."""
        numbers: dict[Var, int] = {}

        def atom(x: Var | Literal) -> Hashable:
            if jaxprs.is_variable(x):
                return numbers.setdefault(x, len(numbers))
            return self.literal(x)

        found: list[Hashable] = [(atom(x), x.aval) for x in reads]
        for eqn in eqns:
            operands = tuple(map(atom, eqn.invars))
            results = tuple((atom(x), x.aval) for x in eqn.outvars)
            found.append((jaxprs.name_of(eqn), self.params(eqn), operands, results))
        return (*found, tuple(map(atom, makes)))

    def literal(self, x: Var | Literal) -> Hashable:
        """A literal, by its value."""
        return x.aval, of_value(getattr(x, "val", None))

    def jaxpr(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Hashable:
        """A program, and the values of its constants."""
        variables = [*jaxpr.constvars, *jaxpr.invars]
        program = self.equations(variables, jaxprs.all_equations(jaxpr), jaxpr.outvars)
        return (*map(of_value, consts), program)

    def params(self, eqn: JaxprEqn) -> Hashable:
        """The parameters of an equation, and settings under which it was traced."""
        context: Any = eqn.ctx
        metadata: Any = context.xla_metadata
        if isinstance(metadata, dict):
            metadata = tuple(sorted(metadata.items()))
        settings = context.compute_type, context.threefry_partitionable, metadata
        params = {k: x for k, x in eqn.params.items() if k not in _RULES}
        derivative: Hashable = None
        if len(params) < len(eqn.params) and self.with_rules:
            derivative = _derivative(eqn)
        return settings, derivative, self.param(params)

    def param(self, x: Any) -> Hashable:  # Any object may be a parameter.
        """A parameter."""
        if hasattr(x, "eqns") and not hasattr(x, "consts"):  # Before JAX 0.12.
            return self.jaxpr(x, ())
        if hasattr(x, "eqns"):
            return self.jaxpr(x.jaxpr, x.consts)
        if isinstance(x, np.ndarray | jax.Array):
            return of_value(x)
        if isinstance(x, Mapping):
            return tuple((k, self.param(x[k])) for k in sorted(x, key=str))
        if isinstance(x, list | tuple):
            return type(x), tuple(map(self.param, x))
        return (type(x), x) if isinstance(x, Hashable) else _Itself(x)


def _derivative(eqn: JaxprEqn) -> Hashable:
    """A key of the results of an equation, and of its derivative pulled back.

    A rule that has none by some operand is equal to itself alone: ``custom_vjp`` raises
    for what the function closes over, and a trace does not keep which operands that is.
    """

    def pulled(inputs: list[jax.Array]) -> object:
        results, pull = jax.vjp(lambda *x: versions.bind(eqn, x), *inputs)
        return results, pull(results)

    try:
        with jax.disable_jit(False):
            closed = jax.make_jaxpr(pulled)([x.aval for x in eqn.invars])
    except Exception:  # A rule of the user may raise any.
        return tuple(_Itself(x) for k, x in eqn.params.items() if k in _RULES)
    return _Described(with_rules=False).jaxpr(closed.jaxpr, closed.consts)
