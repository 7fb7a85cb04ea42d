"""Operations that keep compilers from slower programs.

``linear`` makes them. ``apart`` and ``after`` are barriers: values that are cheaper to
compute twice are not shared. ``narrow`` rounds to half precision at each reader, so no
rounded copy goes to memory. ``in_hbm`` says where a value is on TPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from gradxform._trees import versions

if TYPE_CHECKING:
    from jax.extend.mlir import ir

# Unknown, if the cotangent is for it.
_Operand: TypeAlias = jax.Array | ad.UndefinedPrimal


def linear(
    name: str,
    f: Callable[..., jax.Array],
    tpu: mlir.LoweringRule | None = None,
    **platforms: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
    """``f``, which is elementwise and linear; some platforms have another form of it.

    Operands after the first do not change the result. They are computed before it.

    That form may work on bits or use a barrier, which have no derivative, transpose or
    Taylor series. So it replaces ``f`` only when a program is lowered for a platform,
    after JAX has transformed it. That of TPU is a lowering rule itself.
    """
    operation = versions.Primitive(f"gradxform_{name}")

    def type_of(
        x: jax.core.ShapedArray, *before: jax.core.ShapedArray
    ) -> jax.core.ShapedArray:
        return x.update(dtype=jax.eval_shape(f, x, *before).dtype, weak_type=False)

    def transposed(
        cotangent: jax.Array, *operands: _Operand
    ) -> list[jax.Array | ad.Zero | None]:
        def result(number: int, x: _Operand) -> jax.Array | ad.Zero | None:
            if not ad.is_undefined_primal(x):
                return None
            return ad.Zero(x.aval) if number else cotangent.astype(x.aval.dtype)

        return [result(number, x) for number, x in enumerate(operands)]

    def batched(
        operands: Sequence[jax.Array], axes: Sequence[int | None]
    ) -> tuple[jax.Array, int | None]:
        return operation.bind(*operands), axes[0]

    operation.def_impl(f)  # For calls without jit, as under `jax.disable_jit`.
    operation.def_abstract_eval(type_of)
    ad.deflinear2(operation, transposed)
    batching.primitive_batchers[operation] = batched
    for platform, how in ((None, f), *platforms.items()):
        lowered = mlir.lower_fun(how, multiple_results=False)
        mlir.register_lowering(operation, lowered, platform=platform)
    if tpu:
        mlir.register_lowering(operation, tpu, platform="tpu")

    once: Callable[..., jax.Array]
    once = jax.jit(operation.bind)  # Traced once for each shape, not for each leaf.

    def apply(*operands: jax.Array) -> jax.Array:
        # Only code that takes a Taylor series needs it, and has imported it.
        if jet := sys.modules.get("jax.experimental.jet"):
            jet.deflinear(operation)
        return once(*operands)

    # Ray pickles what has another name by value, and the other process has no rule for
    # a copy of the operation.
    apply.__name__ = apply.__qualname__ = name
    return apply


# apart(x) is x, but the compiler does not share results of it with other users. On CPU
# a sum of squares may share the cast of x to float32 with an update, or with its clip.
# Then the cast is no longer fused, and its result goes to memory. Other platforms make
# no such copy; there a barrier would make one if x itself is not computed yet.
apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)


def _last_known(x: jax.Array, *known: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((x, *known))[0]


# after(x, *known) is x, with which the compiler for CPU does nothing before `known` are
# known. Two barriers around one array are one for the compiler, and their users share
# what they compute. These two are not.
after = linear("after", lambda x, *known: x, cpu=_last_known)
# The same for GPU alone.
in_turn = linear("in_turn", lambda x, *known: x, cuda=_last_known, rocm=_last_known)


def _pinned(_: mlir.LoweringRuleContext, x: ir.Value[Any]) -> Sequence[ir.Value[Any]]:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    # JAX says in the same way that an array is to be in the host's memory.
    call = stablehlo.CustomCallOp([x.type], [x], "annotate_device_placement")
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"_xla_buffer_placement": ir.StringAttr.get("pinned_device")}
    )
    return call.results


# in_hbm(x) is x. The compiler for TPU keeps it in HBM. If it were in VMEM, a branch of
# a conditional might first move it to another array in HBM.
in_hbm = linear("in_hbm", lambda x: x, _pinned)


def where(pred: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` if ``pred``, else zeros.

    The compiler for GPU makes one array of all zeros of a shape. If a loss begins a sum
    with it, as for the gradients of scanned layers, it is written and kept for both. It
    does not know this zero.
    """
    return jnp.where(pred, x, in_turn(jnp.zeros((), x.dtype)))


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``x.astype(dtype)``, without a copy if the result is read twice.

    XLA for CPU considers a conversion from float32 to bfloat16 too costly to repeat in
    each fusion that reads its result, so it writes the result to memory. It does repeat
    integer operations that round the same way.
    """
    if x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16:
        return to_bfloat16(x)
    return x.astype(dtype)


def _upper_half(x: jax.Array) -> jax.Array:
    # Without its lower half a NaN may look like inf.
    nan = jnp.full_like(x, jnp.nan)
    x = jax.lax.select(x != x, nan, jax.lax.reduce_precision(x, 8, 7))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


to_bfloat16 = linear("to_bfloat16", lambda x: x.astype(jnp.bfloat16), cpu=_upper_half)
