"""Names that JAX changes from one version to the next: only this module looks."""

from __future__ import annotations

import concurrent.futures
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax


class Op(enum.StrEnum):
    """Names of the primitives that have a rule of their own somewhere."""

    BARRIER = "optimization_barrier"
    BROADCAST = "broadcast_in_dim"
    CALL = "eval_jaxpr"  # From JAX 0.11 on.
    CAST = "convert_element_type"
    CHECKPOINT = "remat2"
    COND = "cond"
    CONVOLUTION = "conv_general_dilated"
    COPY = "copy"
    CUSTOM_JVP = "custom_jvp_call"
    CUSTOM_VJP = "custom_vjp_call"
    DEVICE_PUT = "device_put"
    DOT = "dot_general"
    DYNAMIC_SLICE = "dynamic_slice"
    DYNAMIC_UPDATE_SLICE = "dynamic_update_slice"
    FFT = "fft"
    GATHER = "gather"
    HIGH = "call_hi_primitive"  # From JAX 0.11 on.
    IOTA = "iota"
    JIT = "jit"
    LESS = "lt"
    LINEAR_SOLVE = "custom_linear_solve"
    NAME = "name"
    PAD = "pad"
    PIVOTS = "lu_pivots_to_permutation"
    RANDOM_BITS = "random_bits"
    RESHAPE = "reshape"
    RESHARD = "reshard"
    SCAN = "scan"
    SHARD_MAP = "shard_map"
    SLICE = "slice"
    STACK = "stack"
    STOP_GRADIENT = "stop_gradient"
    TILE = "tile"
    TRANSPOSE = "transpose"
    UNSTACK = "unstack"  # From JAX 0.12 on.
    WHILE = "while"


# These keep the values of an array, and make no copy by themselves.
SAME_VALUES = frozenset({"pvary", "pcast", "reshard", "sharding_constraint"})
# The sharding that some of them give is this parameter.
PLACEMENTS = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}
# Each entry of their result is made of the same entry of their only operand.
OF_ONE_ENTRY = frozenset({Op.CAST, Op.COPY, Op.NAME, Op.STOP_GRADIENT})
# These make entries that no operand has.
MAKES = frozenset({Op.BROADCAST, Op.IOTA, Op.RANDOM_BITS})
# The shape of their result is one of their parameters.
OF_SHAPE = dict.fromkeys(map(str, MAKES), "shape") | {
    "dynamic_slice": "slice_sizes",
    "gather": "slice_sizes",
    "reshape": "new_sizes",
    "scan": "length",
    "slice": "limit_indices",
}
# Operations for which each entry of a result depends on the same entry of each operand,
# or on one number for all. Each version lacks some of them.
_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy
    copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square
    or pcast polygamma polynomial population_count pow pvary real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# These have the parameter `axes`, and a result also if there are no entries.
_REDUCTIONS = "and max min or prod sum xor"
REDUCTIONS = frozenset(f"reduce_{name}" for name in _REDUCTIONS.split())
# These mix entries along some axes, which are this parameter. Some drop these axes.
_OWN_AXES = {
    "axes": "argmax argmin",
    "axis": "cumlogsumexp cummax cummin cumprod cumsum split top_k unstack",
    "dimension": "concatenate sort",
    "dimensions": "reduce rev squeeze",
    "reduction_dimension": "approx_top_k",
}
OWN_AXES = {op: key for key, ops in _OWN_AXES.items() for op in ops.split()}
# Operations on matrices, which are the last two axes; axes in front are a batch.
_OF_MATRICES = """
    cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd
    symmetric_product triangular_solve tridiagonal tridiagonal_solve
"""
OF_MATRICES = frozenset(_OF_MATRICES.split())
_SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub"
SCATTERS = frozenset(_SCATTERS.split())
# Windows of an array: a result has an entry for each, or adds up what each gives.
_WINDOWS = """
    reduce_window reduce_window_max reduce_window_min reduce_window_sum
    select_and_gather_add select_and_scatter_add
"""
WINDOWS = frozenset(_WINDOWS.split())


# These show numbers, and give none.
DEBUG = frozenset({"debug_callback", "debug_print"})
# These give each entry of all devices along mesh axes to the same entry.
OVER_MESH = frozenset({"pmax", "pmin", "ppermute", "psum", "psum_invariant"})
# Parameters that do not say where entries go, whatever the operation: they say what is
# computed, in which dtype, how, on which devices, or in which order along another axis.
_NO_PLACES = """
    aggregate_to_topk bit_width computation consts dtype fft_type fill_value index_dtype
    indices_are_sorted is_max_k is_stable jaxpr k mode num_keys out_sharding
    permutation_size precision preferred_element_type recall_target
    reduction_input_size_override reverse select_prim sharding sizes unique_indices
    unroll update_consts update_jaxpr
"""
# What `scan_lengths` reads, and parameters of `scan` that say nothing more.
SCAN_LENGTHS = frozenset({"ft_in", "num_carry", "num_consts"})
_OF_SCAN = frozenset({"_split_transpose", "ft_out", "linear"})
NO_PLACES = frozenset(_NO_PLACES.split()) | _OF_SCAN


def varying_axes(x_type: jax.core.ShapedArray) -> frozenset[str]:
    """The manual mesh axes over which an array of this type differs by device."""
    if hasattr(x_type, "manual_axis_type"):  # From JAX 0.10 on.
        return x_type.manual_axis_type.varying
    return getattr(x_type, "vma")  # noqa: B009


def mesh_axes(eqn: jax.extend.core.JaxprEqn) -> tuple[object, ...]:
    """The axes of an operation of ``OVER_MESH``: names, or those of arrays."""
    if "axes" in eqn.params:
        return tuple(eqn.params["axes"])
    return tuple(jax.tree.leaves(eqn.params["axis_name"]))  # That of `ppermute`.


def to_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """``x`` with a type that also varies over these axes."""
    if not (axes := tuple(axes)):
        return x
    if hasattr(jax.lax, "pcast"):  # From JAX 0.8.2 on.
        return jax.lax.pcast(x, axes, to="varying")
    return getattr(jax.lax, "pvary")(x, axes)  # noqa: B009


def varying_as(x: jax.Array, like: jax.core.ShapedArray) -> jax.Array:
    """``x`` with a type that varies over the axes of another one, too."""
    return to_varying(x, varying_axes(like) - varying_axes(jax.typeof(x)))


def unreduced_axes(x_type: jax.core.ShapedArray) -> frozenset[str]:
    """The explicit mesh axes over which an array of this type is not summed yet."""
    return frozenset(x_type.sharding.spec.unreduced or ())


def to_unreduced(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """``x`` with a type that is not summed over these axes, where they are explicit.

    Axes that cut it are left out. JAX before 0.10 gives no such gradients, so there it
    keeps its type.
    """
    sharding = jax.typeof(x).sharding
    axes = frozenset(axes) & frozenset(sharding.mesh.explicit_axes)
    if not hasattr(sharding.spec, "partitions"):
        return x
    cut = jax.tree.leaves(sharding.spec.partitions)
    axes = axes.difference(cut) | sharding.spec.unreduced
    if axes == sharding.spec.unreduced:
        return x
    return jax.sharding.reshard(
        x, sharding.update(spec=sharding.spec.update(unreduced=axes))
    )


def to_reduced(x: jax.Array) -> jax.Array:
    """``x``, summed over all axes over which it is not summed yet."""
    if not unreduced_axes(jax.typeof(x)):
        return x
    sharding = jax.typeof(x).sharding
    spec = jax.sharding.PartitionSpec(*sharding.spec.partitions)
    return jax.sharding.reshard(x, sharding.update(spec=spec))


def as_factor(number: jax.Array, x: jax.Array) -> jax.Array:
    """A scalar with a type by which ``x`` can be multiplied."""
    sharding = jax.typeof(x).sharding
    if not (axes := unreduced_axes(jax.typeof(x))):
        return number
    spec = jax.sharding.PartitionSpec(reduced=axes)
    return jax.sharding.reshard(number, sharding.update(spec=spec))


def check_memory_kinds(name: str) -> None:
    """Raises ``NotImplementedError`` if a step has no results in the host's memory.

    JAX for CPU has them from 0.10.2 on; before, they are always on devices.
    """
    if jax.__version_info__ < (0, 10, 2):
        raise NotImplementedError(
            f"{name} needs JAX 0.10.2 or later, which keeps results in the host's "
            f"memory, got {jax.__version__}."
        )


def jit_is_disabled() -> bool:
    """Whether functions are called as they are, for a debugger: ``jax.disable_jit``."""
    # JAX's types know this setting from 0.12 on.
    is_disabled: bool = getattr(jax.config, "jax_disable_jit")  # noqa: B009
    return is_disabled


def is_outside() -> bool:
    """Whether this thread is outside of all transformations of JAX."""
    return _trace_state() == _outside()


def _trace_state() -> object:
    # Not `jax.extend.core`: while another thread imports it, `jax` has no `extend`.
    from jax.extend import core

    name = "get_opaque_trace_state"  # JAX 0.7 has it elsewhere.
    return getattr(core if hasattr(core, name) else jax.core, name)()


@functools.cache
def _outside() -> object:
    # The first call may come from inside. A new thread is outside of everything.
    with concurrent.futures.ThreadPoolExecutor() as thread:
        return thread.submit(_trace_state).result()


def before_tracing() -> None:
    """Imports a module that gates and tables need, before anything is traced.

    The import takes a tenth of a second, so it happens only for their users. Since JAX
    0.12 it adds settings that every trace depends on: running traces would be repeated.
    """
    from jax.extend import core  # noqa: F401


def used_inputs(jaxpr: jax.extend.core.Jaxpr) -> list[bool]:
    """Which inputs of a jaxpr its results need, or an effect in it."""
    from jax.interpreters import partial_eval

    used: list[bool]
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return used


def scan_lengths(scan: jax.extend.core.JaxprEqn) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are its carry."""
    if "num_carry" in scan.params:  # Before JAX 0.12.
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry, _ = scan.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def are_drawn_alone(keys: Any) -> bool:
    """Whether a key in an array draws the same bits as alone; that of XLA does not."""
    return str(keys.aval.dtype) == "key<fry>"


def opened(eqn: jax.extend.core.JaxprEqn) -> jax.extend.core.ClosedJaxpr:
    """The program of an operation that has a derivative of its own."""
    from jax.extend.core import jaxpr_as_fun

    def solved(*args: jax.Array) -> list[jax.Array]:
        lengths, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
        start, stop = lengths.matvec + lengths.vecmat, sum(lengths)
        given = *args[start : start + lengths.solve], *args[stop:]
        return jaxpr_as_fun(solve)(*given)

    if "call_jaxpr" in eqn.params:
        return eqn.params["call_jaxpr"]
    f: Any = solved
    if eqn.primitive.name == Op.HIGH:
        primitive: Any = eqn.primitive
        f = functools.partial(primitive.to_lojax, **eqn.params)
    types: list[Any] = [x.aval for x in eqn.invars]
    with jax.disable_jit(False), eqn.ctx.manager:
        return jax.make_jaxpr(f)(*types)


def bind(eqn: jax.extend.core.JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluates one equation of a jaxpr, with its names and settings from the trace.

    ``jax.core.eval_jaxpr`` does the same, but takes only whole jaxprs.
    """
    from jax.extend import source_info_util

    where, params = eqn.source_info, eqn.primitive.get_bind_params(eqn.params)
    functions: Any = ()
    if isinstance(params, tuple):  # Before JAX 0.9.2.
        functions, params = params
    names = source_info_util.current_name_stack() + where.name_stack
    with (
        source_info_util.user_context(where.traceback, name_stack=names),
        eqn.ctx.manager,
    ):
        results = eqn.primitive.bind(*functions, *inputs, **params)
    return results if eqn.primitive.multiple_results else [results]
