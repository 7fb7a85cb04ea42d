"""Zeros and other constants, on the devices of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._checks import structures
from gradxform._devices import host
from gradxform._jax import compilers, versions
from gradxform._trees import dtypes
from gradxform._trees.boxes import unboxed
from gradxform._trees.maps import map_params, param
from gradxform._trees.types import Param


def zeros_of_type(x_type: jax.core.ShapedArray) -> jax.Array:
    """Zeros of a type from ``jax.typeof``, with its sharding and its varying axes."""
    sharding = x_type.sharding if x_type.sharding.mesh.explicit_axes else None
    zeros = jnp.zeros(x_type.shape, x_type.dtype, out_sharding=sharding)
    return versions.to_varying(zeros, versions.varying_axes(x_type))


def full_like(
    p: Param,
    value: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike | None,
    *,
    axes: int | None = None,
) -> jax.Array:
    """``value`` in the shape and sharding of ``p``, or of its first ``axes`` axes.

    So state lies where its parameters lie, also when it is made under ``jit``. A ``p``
    on the host is not read.
    """
    if isinstance(p, jax.core.Tracer):
        return _traced_full_like(p, value, dtype, axes)
    sharding: jax.sharding.Sharding | None = None
    if isinstance(p.sharding, NamedSharding):
        sharding = p.sharding.update(spec=P(*p.sharding.spec[:axes]))
    if host.is_on_host(p):
        sharding = (sharding or p.sharding).with_memory_kind("device")
    return jnp.full_like(p, value, dtype=dtype, shape=p.shape[:axes], device=sharding)


def _traced_full_like(
    p: jax.Array,
    value: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike | None,
    axes: int | None,
) -> jax.Array:
    """:func:`full_like` under ``jit``.

    On automatic axes the compiler would put a constant on all devices, but it puts what
    is computed from ``p`` where ``p`` is. Elsewhere the type of ``p`` says where that
    is, and a constant takes no memory if its layers go to the host. What is computed
    from ``p`` is made whole before: 1.04 N for master weights on v5e.
    """
    if axes == 0:
        return jnp.full((), value, dtype)
    there = jax.typeof(p).sharding
    explicit = there.mesh.explicit_axes
    placed = there.update(spec=P(*there.spec[:axes])) if explicit else None

    def constant(p: jax.Array) -> jax.Array:
        if placed is None:
            return jnp.full(p.shape[:axes], value, dtype)
        number = jnp.full((), value, dtype)
        return jax.lax.broadcast(number, p.shape[:axes], out_sharding=placed)

    def computed(p: jax.Array) -> jax.Array:
        # Minus 0, as plus 0 would turn a -0.0 into a 0.0.
        return jnp.asarray(value, dtype) - _false(p, axes).astype(dtype)

    if host.is_on_host(p):
        return constant(p)
    is_divided = there.mesh.size > 1 and there.mesh.auto_axes
    if is_divided or there.mesh.manual_axes:  # The type of a constant varies over none.
        return computed(p)
    # `jit` would drop an argument that no form reads, and with it its device.
    return compilers.on_cpu(computed, constant)(p)


def full(
    value: jax.typing.ArrayLike,
    params: optax.Params,
    dtype: jax.typing.DTypeLike | None,
    default: Callable[[jax.Array], jax.typing.DTypeLike] | None = None,
    *,
    axes: int | None = None,
) -> optax.Updates:
    """``value`` in the shape of each parameter, or of its first ``axes`` axes.

    If ``dtype`` is None, it is ``default`` of the parameter.
    """
    structures.check_leaves(params)
    if axes is not None:
        params = unboxed(params)
    return map_params(
        lambda p: full_like(p, value, dtype or (default and default(p)), axes=axes),
        params,
    )


zeros = functools.partial(full, 0)


def stacked(x: jax.Array, n: int) -> jax.Array:
    """``n`` copies of ``x``, each with its sharding."""
    copies = jnp.broadcast_to(x, (n, *x.shape))
    if isinstance(x, jax.core.Tracer) or not x.ndim:
        return copies  # A number is whole on each device, and so are its copies.
    if isinstance(x.sharding, NamedSharding):
        spec = P(None, *x.sharding.spec)
        if not (any(spec) or x.sharding.mesh.explicit_axes):
            spec = P()  # JAX's own form for results on automatic axes.
        copies = jax.device_put(copies, x.sharding.update(spec=spec))
    return copies


def unstacked(x: jax.Array) -> list[jax.Array]:
    """The numbers of a vector, such as one for each leaf of a tree.

    The compiler does not know their indices. So all leaves of a shape have one kernel:
    600 leaves compile in 5 s of a CPU, and not in 21 s.
    """
    indices, x = compilers.barrier(([*map(jnp.uint32, range(len(x)))], x))
    return [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for i in indices]


def zero(params: optax.Params, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A scalar 0 on all devices of the parameters."""
    there = [p for p in jax.tree.leaves(params) if not host.is_on_host(p)]
    numbers = [p for p in there if jnp.issubdtype(dtypes.dtype_of(p), jnp.number)]
    if not numbers:
        return jnp.zeros((), dtype)
    p = param(min(numbers, key=np.size))
    if isinstance(p, jax.core.Tracer) and not jax.typeof(p).sharding.mesh.manual_axes:
        # jit drops an unused argument, and with it the devices that it was on.
        return _false(p, 0).astype(dtype)
    return full_like(p, 0, dtype, axes=0)


def never(x: jax.Array) -> jax.Array:
    """False for each entry of ``x``, but the compiler does not know that.

    A NaN differs from itself, so the compiler has to compute it from ``x``. If a result
    is chosen by it, the result lies where ``x`` lies, and is computed after ``x``.
    """
    return (x != x) & (x == x)


def _false(p: jax.Array, axes: int | None) -> jax.Array:
    """False for each entry along the first axes of ``p``, computed from ``p``."""
    false = never(p)
    return false if axes is None else jnp.any(false, axis=tuple(range(axes, p.ndim)))
