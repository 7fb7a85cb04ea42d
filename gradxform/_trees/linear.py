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
    f: Callable[..., jax.Array],
    *,
    cpu: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    """``f``, elementwise and linear, which a program for CPU does as ``cpu``.

    Operands after the first do not count for the result: they come before it.

    Bits and barriers have no derivative, or no transpose, or no Taylor series. So they
    come in when a program is made for a platform, after all of JAX's own work.
    """
    operation = versions.Primitive(f"gradxform_{name}")

    def type_of(x: Any, *before: Any) -> Any:
        return x.update(dtype=jax.eval_shape(f, x, *before).dtype, weak_type=False)

    def transposed(cotangent: Any, *operands: Any) -> list[Any]:
        def of(number: int, x: Any) -> Any:
            if not ad.is_undefined_primal(x):
                return None
            return ad.Zero(x.aval) if number else cotangent.astype(x.aval.dtype)

        return [of(number, x) for number, x in enumerate(operands)]

    def batched(operands: Any, axes: Any) -> tuple[Any, Any]:
        return operation.bind(*operands), axes[0]

    operation.def_abstract_eval(type_of)
    ad.deflinear2(operation, transposed)
    batching.primitive_batchers[operation] = batched
    for how, platform in ((f, None), (cpu, "cpu")):
        lowered = mlir.lower_fun(how, multiple_results=False)
        mlir.register_lowering(operation, lowered, platform=platform)

    once: Callable[..., jax.Array]
    once = jax.jit(operation.bind)  # Traced once a shape, not once a leaf.
    operation.def_impl(once)

    def apply(*operands: jax.Array) -> jax.Array:
        # Code that wants a Taylor series has imported this; nothing else needs it.
        if jet := sys.modules.get("jax.experimental.jet"):
            jet.deflinear(operation)
        return once(*operands)

    return apply
