"""Linear operations with another implementation on CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from gradxform._trees import versions


def linear(
    name: str,
    f: Callable[[jax.Array], jax.Array],
    *,
    cpu: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """``f``, which is elementwise and linear; programs for CPU use ``cpu`` instead.

    ``cpu`` may work on bits or use a barrier, which have no derivative, transpose or
    Taylor series. So it replaces ``f`` only when a program is lowered for a platform,
    after JAX has transformed it.
    """
    operation = versions.Primitive(f"gradxform_{name}")

    def type_of(x: Any) -> Any:
        return x.update(dtype=jax.eval_shape(f, x).dtype, weak_type=False)

    def transposed(cotangent: Any, x: Any) -> list[Any]:
        return [cotangent.astype(x.aval.dtype)]

    operation.def_abstract_eval(type_of)
    ad.deflinear2(operation, transposed)
    batching.defvectorized(operation)
    for how, platform in ((f, None), (cpu, "cpu")):
        lowered = mlir.lower_fun(how, multiple_results=False)
        mlir.register_lowering(operation, lowered, platform=platform)

    once: Callable[[jax.Array], jax.Array]
    once = jax.jit(operation.bind)  # Traced once for each shape, not for each leaf.
    operation.def_impl(once)

    def apply(x: jax.Array) -> jax.Array:
        # Only code that takes a Taylor series needs it, and has imported it.
        if jet := sys.modules.get("jax.experimental.jet"):
            jet.deflinear(operation)
        return once(x)

    return apply
