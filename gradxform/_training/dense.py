"""Dense parts of a loss: equations that follow each other between its scans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from gradxform._jax import jaxprs

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Literal, Var


class Dense(NamedTuple):
    """A dense part.

    Attributes:
      eqns: its equations.
      reads: the variables that they read and do not compute.
      makes: the variables that they compute, and that others read.
    """

    eqns: list[JaxprEqn]
    reads: list[Var]
    makes: list[Var]

    @classmethod
    def of(cls, eqns: list[JaxprEqn], others: Iterable[Var]) -> Dense:
        """The part with these equations; ``others`` are what others read."""
        computed = dict.fromkeys(x for eqn in eqns for x in eqn.outvars)
        reads = [x for x in variables_read(eqns) if x not in computed]
        others = set(others)
        return cls(eqns, reads, [x for x in computed if x in others])

    def results(self, values: Sequence[Any]) -> list[jax.Array]:
        """The values of what it makes, from those of what it reads."""
        env = dict(zip(self.reads, values, strict=True))
        jaxprs.advance(self.eqns, env)
        return jaxprs.read(env, self.makes)


def divided(
    eqns: Sequence[JaxprEqn],
    results: Sequence[Var | Literal],
    is_alone: Callable[[JaxprEqn], bool],
) -> list[Dense | JaxprEqn]:
    """Some equations alone, and those between them as dense parts.

    ``results`` are what others read after all of them.
    """
    parts: list[Dense | JaxprEqn] = []
    later = set(filter(jaxprs.is_variable, results))
    for alone, backwards in itertools.groupby(reversed(eqns), is_alone):
        group = list(backwards)
        parts += group if alone else [Dense.of(group[::-1], later)]
        later.update(variables_read(group))
    return parts[::-1]


def variables_read(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read, each once."""
    read = (x for eqn in eqns for x in eqn.invars)
    return [*dict.fromkeys(filter(jaxprs.is_variable, read))]
