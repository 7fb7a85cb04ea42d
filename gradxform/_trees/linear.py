"""Linear operations with another implementation on CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax.interpreters import ad, batching, mlir

from gradxform._trees import versions

# Unknown, if the cotangent is for it.
_Operand: TypeAlias = jax.Array | ad.UndefinedPrimal


def linear(
    name: str,
    f: Callable[..., jax.Array],
    *,
    cpu: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    """``f``, which is elementwise and linear; programs for CPU use ``cpu`` instead.

    Operands after the first do not change the result. They are computed before it.

    ``cpu`` may work on bits or use a barrier, which have no derivative, transpose or
    Taylor series. So it replaces ``f`` only when a program is lowered for a platform,
    after JAX has transformed it.
    """
    operation = versions.Primitive(f"gradxform_{name}")

    def type_of(
        x: jax.core.ShapedArray, *before: jax.core.ShapedArray
    ) -> jax.core.ShapedArray:
        return x.update(dtype=jax.eval_shape(f, x, *before).dtype, weak_type=False)

    def transposed(
        cotangent: jax.Array, *operands: _Operand
    ) -> list[jax.Array | ad.Zero | None]:
        def of(number: int, x: _Operand) -> jax.Array | ad.Zero | None:
            if not ad.is_undefined_primal(x):
                return None
            return ad.Zero(x.aval) if number else cotangent.astype(x.aval.dtype)

        return [of(number, x) for number, x in enumerate(operands)]

    def batched(
        operands: Sequence[jax.Array], axes: Sequence[int | None]
    ) -> tuple[jax.Array, int | None]:
        return operation.bind(*operands), axes[0]

    operation.def_impl(f)  # For calls without jit, as under `jax.disable_jit`.
    operation.def_abstract_eval(type_of)
    ad.deflinear2(operation, transposed)
    batching.primitive_batchers[operation] = batched
    for how, platform in ((f, None), (cpu, "cpu")):
        lowered = mlir.lower_fun(how, multiple_results=False)
        mlir.register_lowering(operation, lowered, platform=platform)

    once: Callable[..., jax.Array]
    once = jax.jit(operation.bind)  # Traced once for each shape, not for each leaf.

    def apply(*operands: jax.Array) -> jax.Array:
        # Only code that takes a Taylor series needs it, and has imported it.
        if jet := sys.modules.get("jax.experimental.jet"):
            jet.deflinear(operation)
        return once(*operands)

    return apply
