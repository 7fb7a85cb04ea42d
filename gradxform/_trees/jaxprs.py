"""Evaluates jaxprs, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

# Results that are no arrays yet.
_CONSTANT = int, float, complex, np.generic, np.ndarray


def run(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    rule: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """The results of a jaxpr; ``rule(eqn, inputs)`` gives those of each equation.

    ``args`` are its constants and then its inputs, of any kind that the rule takes.
    """
    from jax.extend.core import Literal

    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def values(atoms: Sequence[Var | Literal]) -> list[Any]:
        return [x.val if isinstance(x, Literal) else env[x] for x in atoms]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, rule(eqn, values(eqn.invars)), strict=True))
    types: list[Any] = [x.aval for x in jaxpr.outvars]
    return [
        jnp.asarray(x, t.dtype) if isinstance(x, _CONSTANT) else x
        for x, t in zip(values(jaxpr.outvars), types, strict=True)
    ]
