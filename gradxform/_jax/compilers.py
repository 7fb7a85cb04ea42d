"""Special forms of an operation, where a compiler would make a slower program of it.

JAX chooses the form when it lowers a program for a platform, after all transformations:
:func:`on_cpu`, :func:`on_gpu`, :func:`on_tpu`. A form may have a barrier, or work on
bits, so :func:`linear` gives it the derivative of the plain one. Only JAX's public API
is used here.

The sixteen forms, and what each saves with JAX 0.12, in N, the bytes of the parameters.
Compilers have counted it for CPU, v5e and H100, where nothing is said of a clock. No
form for TPU has run.

================  ========  =======================  =================================
form              platform  caller                   saves
================  ========  =======================  =================================
unshared          CPU       norms, half precision    2 N in half precision (CPU)
barrier_after     CPU       clips, NovoGrad          1 N (CPU)
barrier           all       layers, the host         2.6 → 0.2 N (CPU)
barrier_on_cpu    CPU       layers                   as barrier; on other platforms it
                                                     would cost 0.05 instead of 0.003 N
                                                     (v5e), 2.07 instead of 1.80 (H100)
laid_out          TPU       stacked                  0.25 N (v5e)
read_layer        TPU       stacked                  0.5 N (v5e)
barrier_on_gpu    GPU       sums                     1.00 → 0.10 N (H100)
zeros_unless      GPU       sums, arithmetic         2.08 → 1.12 N (H100)
slices_bytes      TPU       host                     512 → 32 MiB (v5e)
in_hbm            TPU       gate, NovoGrad           1.19 → 0.07 N (v5e)
narrow            CPU       clips, sums              1 N (CPU); 52 → 32 ms, by a clock
norms (groups)    CPU, GPU  squared_norms            6.0 → 4.6 s of compiling, by a
                                                     CPU's clock
conditional       TPU       gate                     7.2 → 5.0 N moved (v5e)
constants         CPU       init, on automatic axes  1.04 → 0.10 N elsewhere (v5e)
host              CPU, TPU  on_host, under jit       all arrays at once (v5e)
low_bit_state     CPU       init                     minutes of compiling for v5e, by
                                                     a CPU's clock
================  ========  =======================  =================================

The last five are in the modules of these names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from gradxform._jax import versions
from gradxform._trees.types import T

R = TypeVar("R")

LARGE = 2**16  # Entries of an array that has a kernel of its own.


def _on(
    platforms: Sequence[str], special: Callable[..., R], plain: Callable[..., R]
) -> Callable[..., R]:
    """``special`` in programs for these platforms, ``plain`` in all others."""
    forms = dict.fromkeys(platforms, special)

    def chosen(*operands: jax.Array) -> R:
        return jax.lax.platform_dependent(*operands, default=plain, **forms)

    return chosen


on_cpu = functools.partial(_on, ["cpu"])
on_gpu = functools.partial(_on, ["cuda", "rocm"])
on_tpu = functools.partial(_on, ["tpu"])
off_tpu = functools.partial(_on, ["cpu", "cuda", "rocm"])


def linear(
    chosen: Callable[..., jax.Array], plain: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """``chosen`` with the derivative of ``plain``, which is linear in real operands."""
    f = jax.custom_jvp(chosen)

    @f.defjvp
    def derivative(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        return f(*primals), jax.jvp(plain, primals, tangents)[1]

    traced_once: Callable[..., jax.Array] = jax.jit(f)  # For each shape.
    return traced_once


def _first(x: jax.Array, *_: jax.Array) -> jax.Array:
    return x


def _last_known(x: jax.Array, *known: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier((x, *known))[0]


_on_cpu = linear(on_cpu(_last_known, _first), _first)
_on_gpu = linear(on_gpu(_last_known, _first), _first)


# Ray pickles functions by their names, and other callables by value.
def unshared(x: jax.Array) -> jax.Array:
    """``x``, but the compiler for CPU does not share results of it with other users.

    A sum of squares may share the cast of ``x`` to float32 with an update, or with its
    clip. Then the cast is no longer fused, and its result goes to memory: 2 N in half
    precision. Other platforms make no such copy; there a barrier would make one if
    ``x`` itself is not computed yet.
    """
    return _on_cpu(x)


def barrier_after(x: jax.Array, *known: jax.Array) -> jax.Array:
    """``x``, with which the compiler for CPU does nothing before ``known`` are known.

    So what is written in place of ``x`` needs no copy of it: 1 N of NovoGrad behind a
    clip, 2 N less moved by a clip in bfloat16. Two barriers around one array are one
    for the compiler, and their users share what they compute. These two are not.
    """
    return _on_cpu(x, *known)


def barrier(arrays: T) -> T:
    """The same arrays, and nobody reads one before all are computed.

    A layer that is written into the array that it was read from has to be known first.
    Otherwise the compiler for CPU computes it within the loop that writes, from a copy
    of the whole array: 2.6 N instead of 0.2 N.
    """
    return jax.lax.optimization_barrier(arrays)


def barrier_on_cpu(arrays: T) -> T:
    """:func:`barrier` for what is written in place, for CPU alone.

    The compilers for TPU and GPU write each array of a layer as soon as it is known. So
    they keep fewer of them: 0.003 N instead of 0.05 N for float32 AdamW on v5e, and on
    an H100, activations included, 1.80 N instead of 2.07 N (8 layers of width 2,048,
    8,192 tokens). A GPU then moves most of it to the host beside the arithmetic.
    """
    return on_cpu(barrier, lambda x: x)(arrays)


def part(x: jax.Array, i: jax.Array, length: int, axis: int) -> jax.Array:
    """Part ``i`` of ``length`` equal ones along an axis."""
    size = x.shape[axis] // length
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def with_part(x: jax.Array, part: jax.Array, i: jax.Array, axis: int) -> jax.Array:
    """``x`` with another part ``i``."""
    at = i * part.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(x, part, at, axis)


def _row_by_row(x: jax.Array) -> jax.Array:
    from jax.experimental import layout

    order = layout.Layout(tuple(range(x.ndim)))
    return layout.with_layout_constraint(x, order)


_laid_out = linear(on_tpu(_row_by_row, _first), _first)


def laid_out(x: jax.Array) -> jax.Array:
    """``x``, which the compiler for TPU keeps in the order of its axes.

    If it were free to choose a layer's layout, it would give the stack the same one, by
    a copy in front of the loop: 0.25 N for attention weights of four axes.
    """
    return _laid_out(x)


def read_layer(
    x: jax.Array, i: jax.Array, length: int, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Layer ``i`` of a stack, and the stack for the next layers, for a loop that reads.

    For TPU a layer in float32 is written back as it is. If a loop left the stack alone,
    the compiler would cast all of it to bfloat16 in front of the loop: 0.5 N.
    """

    def read(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return laid_out(part(x, i, length, axis)), x

    def written_back(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = jax.lax.optimization_barrier(read(x, i)[0])
        return row, with_part(x, row, i, axis)

    return (on_tpu(written_back, read) if x.dtype == jnp.float32 else read)(x, i)


def barrier_on_gpu(x: jax.Array, *known: jax.Array) -> jax.Array:
    """:func:`barrier_after` for GPU alone.

    Otherwise one kernel adds all gradients to their sums, and so 1 N of them is kept.
    """
    return _on_gpu(x, *known)


def zeros_unless(pred: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` if ``pred``, else zeros.

    The compiler for GPU makes one array of all zeros of a shape. If a loss begins a sum
    with it, as for the gradients of scanned layers, it is written and kept for both:
    1 N. It does not know this zero.
    """
    if versions.unreduced_axes(jax.typeof(x)):  # `jnp.where` does not take it.
        return jax.lax.select(pred, x, jnp.zeros_like(x))
    return jnp.where(pred, x, barrier_on_gpu(jnp.zeros((), x.dtype)))


# In LIBTPU_INIT_ARGS: an array of 8 bits has tiles of 8 rows in memory, not of 32.
SMALL_TILES = "--xla_tpu_impure_enable_large_2nd_minor_entry_layout=false"


def slices_bytes() -> bool:
    """Whether programs for TPU take layers of arrays of 8 bits from the host's memory.

    A loop reads them in tiles of 8 rows. From tiles of 32 rows it would copy the whole
    array for each layer: 512 MiB of the chip instead of 32 MiB for 16 layers of 16 MiB.
    libtpu reads the flag when it is loaded.
    """
    return SMALL_TILES in os.environ.get("LIBTPU_INIT_ARGS", "").split()


def _pinned(x: jax.Array) -> jax.Array:
    from jax.experimental.xla_metadata import set_xla_metadata

    # JAX says in the same way that an array is to be in the host's memory.
    annotate = jax.ffi.ffi_call(
        "annotate_device_placement",
        x,
        custom_call_api_version=1,
        vmap_method="broadcast_all",
    )
    with set_xla_metadata(_xla_buffer_placement="pinned_device"):
        pinned = annotate(x)
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes:  # JAX 0.7 gives the result another one.
        pinned = jax.sharding.reshard(pinned, sharding)
    return pinned


_in_hbm = linear(on_tpu(_pinned, _first), _first)


def in_hbm(x: jax.Array) -> jax.Array:
    """``x``, which the compiler for TPU keeps in HBM.

    If it were in VMEM, a branch of a conditional might first move it to another array
    in HBM: for the sums of ``gx.accumulate`` with ``optax.apply_updates`` on v5e, 1.19
    N instead of 0.07 N (Adam, 12 layers of width 1,024).
    """
    return _in_hbm(x)


def narrow(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """``x.astype(dtype)``, without a copy if the result is read twice.

    XLA for CPU considers a conversion from float32 to bfloat16 too costly to repeat in
    each fusion that reads its result, so it writes the result to memory: 1 N, and 52 ms
    instead of 32 ms for clip and Adagrad. It does repeat integer operations that round
    the same way.
    """
    is_reduced = not versions.unreduced_axes(jax.typeof(x))  # Else no bit is known.
    if x.dtype == jnp.float32 and jnp.dtype(dtype) == jnp.bfloat16 and is_reduced:
        return _to_bfloat16(x)
    return x.astype(dtype)


def _cast(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _upper_half(x: jax.Array) -> jax.Array:
    # Without its lower half a NaN may look like inf.
    nan = jnp.full_like(x, jnp.nan)
    x = jax.lax.select(x != x, nan, jax.lax.reduce_precision(x, 8, 7))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


_to_bfloat16 = linear(on_cpu(_upper_half, _cast), _cast)
