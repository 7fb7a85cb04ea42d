"""Linear operations that CPU programs do in another way."""

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
    """``f``, elementwise and linear, which a program for CPU does as ``cpu``.

    Bits and barriers have no derivative, or no transpose, or no Taylor series. So they
    come in when a program is made for a platform, after all of JAX's own work.
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
    once = jax.jit(operation.bind)  # Traced once a shape, not once a leaf.
    operation.def_impl(once)

    def apply(x: jax.Array) -> jax.Array:
        # Code that wants a Taylor series has imported this; nothing else needs it.
        if jet := sys.modules.get("jax.experimental.jet"):
            jet.deflinear(operation)
        return once(x)

    return apply
