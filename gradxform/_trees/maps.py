"""Maps and casts that know every kind of leaf a gradient tree may hold.

A leaf of a gradient tree is an array; an ``IndexedSlices``, of which the maps here show
a function the values alone; or ``None`` where the loss gave no gradient: ``None`` stays
``None`` in updates, and the state that belongs to it stays as it was.
``optax.MaskedNode`` is a node without leaves and passes through by itself.

A function that is not linear in the gradient needs repeated rows summed first, and one
that reads state or parameters beside them the rows that they touch::

    updates = sum_duplicates(updates)
    new = map_state(f, updates, rows(updates, state))
    state = put_rows(updates, state, new)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._trees import versions
from gradxform._trees.boxes import bare as bare
from gradxform._trees.boxes import boxed as boxed
from gradxform._trees.indexed_slices import IndexedSlices, is_sparse
from gradxform._trees.linear import linear
from gradxform._trees.rounding import narrow
from gradxform._trees.rows import (
    places,
    summed,
    take_rows,
    take_summed,
    write_summed,
)


def is_leaf(node: Any) -> bool:
    """What the maps here stop at, beside arrays."""
    return node is None or isinstance(node, IndexedSlices)


def values(g: Any) -> jax.Array:
    """The entries of a gradient that there are, as an array."""
    return jnp.asarray(g.values if isinstance(g, IndexedSlices) else g)


def dtype_of(g: Any) -> np.dtype[Any]:
    """The dtype of a gradient's entries, whatever kind of leaf it is."""
    return values(g).dtype


def all_finite(g: Any) -> jax.Array:
    """bool[], whether a gradient holds neither NaN nor inf; padding does not count."""
    x, held = values(g), None
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.array(True)
    if isinstance(g, IndexedSlices):
        held = expand(g.indices < g.dense_shape[0], x)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    # Of a largest number, which NaN spoils as inf does: that is one pass, where the
    # compiler for CPU writes down what `isfinite` gives for each entry.
    largest = [jnp.max(jnp.abs(part), initial=0, where=held) for part in parts]
    return jnp.all(jnp.isfinite(jnp.stack(largest)))


def map_updates(f: Callable[..., Any], updates: Any, *rest: Any) -> Any:
    """``f`` of each gradient, of its values where it is row-sparse; ``None`` stays."""

    def update(g: Any, *r: Any) -> Any:
        if g is None:
            return None
        new = f(values(g), *r)
        return g.with_values(new) if isinstance(g, IndexedSlices) else new

    return jax.tree.map(update, updates, *rest, is_leaf=is_leaf)


def map_state(f: Callable[..., Any], updates: Any, state: Any, *rest: Any) -> Any:
    """New state leaves ``f(g, s, ...)``; a leaf without gradient keeps its state."""
    return jax.tree.map(
        lambda g, s, *r: s if g is None else f(values(g), jnp.asarray(s), *r),
        updates,
        state,
        *rest,
        is_leaf=is_leaf,
    )


def sum_duplicates(updates: Any) -> Any:
    """The same updates, no row of a row-sparse one given twice."""
    return jax.tree.map(
        lambda g: g.sum_duplicates() if isinstance(g, IndexedSlices) else g,
        updates,
        is_leaf=is_leaf,
    )


def rows(updates: Any, state: Any) -> Any:
    """State, of tables the rows alone that summed row-sparse updates touch.

    Padding reads zeros, and so does what a part of a table does not hold.
    """

    def take(g: Any, table: Any) -> Any:
        if not isinstance(g, IndexedSlices):
            return table
        if not isinstance(table, IndexedSlices):
            return take_summed(jnp.asarray(table), g.indices)
        part = table.sum_duplicates()
        return take_rows(part.values, places(g.indices, part.indices))

    return jax.tree.map(take, updates, state, is_leaf=is_leaf)


def put_rows(updates: Any, state: Any, new: Any) -> Any:
    """``state`` with the rows that summed updates touch from ``new``, else ``new``.

    A donated table is written in place, and no other row of it is read or written.
    """

    def put(g: Any, table: Any, rows: Any) -> Any:
        if not isinstance(g, IndexedSlices):
            return rows
        table = jnp.asarray(table)
        return write_summed(table, g.indices, rows.astype(table.dtype))

    return jax.tree.map(put, updates, state, new, is_leaf=is_leaf)


def added(update: Any, p: jax.Array) -> jax.Array:
    """A parameter with its update added, in its dtype, and rounded once."""
    u = sum_duplicates(update)
    if isinstance(u, IndexedSlices) and widen(p).dtype == p.dtype:
        # The sum needs no rounding, so one pass, which is in place.
        return p.at[u.indices].add(u.values.astype(p.dtype), **summed(p))
    return put_rows(u, p, map_state(_add, u, rows(u, p)))


def _add(u: jax.Array, p: jax.Array) -> jax.Array:
    if jnp.issubdtype(p.dtype, jnp.integer):
        return integer_sum(u, p)
    if u.dtype == p.dtype:
        # The sum of two numbers in half precision is rounded once as it is, and
        # compilers for TPU fuse it where they do not fuse a sum in float32.
        return p + u
    return wide_sum(u, p).astype(p.dtype)


def map_params(f: Callable[..., Any], params: Any, *rest: Any) -> Any:
    """``jax.tree.map`` over parameters, which may be Python or NumPy numbers.

    Or no more than described, as ``jax.eval_shape`` does it: ``f`` then sees a
    ``jax.ShapeDtypeStruct``. Of a part of a table it sees the rows.
    """
    return jax.tree.map(lambda p, *r: f(_param(p), *r), held(params), *rest)


def held(params: Any) -> Any:
    """The same, of parts of tables the rows that they hold, as tables of their own."""
    return jax.tree.map(
        lambda p: p.sum_duplicates().values if isinstance(p, IndexedSlices) else p,
        params,
        is_leaf=is_leaf,
    )


def as_in(like: Any, tree: Any) -> Any:
    """The leaves of a tree in the nodes of ``like``, from which boxes alone tell it."""

    def nodes(tree: Any) -> Any:
        return jax.tree.structure(tree, is_leaf=is_leaf)

    # Without boxes, as nearly always, there is nothing to take apart and compare.
    wanted = nodes(like)
    if nodes(tree) == wanted or nodes(bare(tree)) != nodes(bare(like)):
        return tree
    return jax.tree.unflatten(wanted, jax.tree.leaves(tree, is_leaf=is_leaf))


def _param(p: Any) -> Any:
    return p if isinstance(p, jax.ShapeDtypeStruct) else jnp.asarray(p)


def wide_dtype(x: jax.Array) -> np.dtype[Any]:
    """That of ``x`` in at least single precision; complex stays complex."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.dtype
    return compute_dtype(x)


def inexact_dtype(x: jax.Array) -> np.dtype[Any]:
    """That of ``x``, where it can hold a momentum; integers and keys are left alone."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else compute_dtype(x)


def saturated(x: Any) -> jax.Array:
    """An integer, or inf, as int32; what does not fit becomes what is nearest."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if isinstance(x, jax.Array):
        own = np.iinfo(x.dtype)
        return jnp.clip(x, max(own.min, low), min(own.max, high)).astype(jnp.int32)
    return jnp.asarray(min(max(x, low), high), jnp.int32)


def compute_dtype(x: jax.Array) -> np.dtype[Any]:
    """Real dtype for arithmetic on ``x``: float32, float64 where ``x`` is double."""
    double = x.dtype in (jnp.float64, jnp.complex128)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def widen(x: jax.Array) -> jax.Array:
    """``x`` in at least single precision; complex stays complex."""
    return x.astype(wide_dtype(x))


@jax.jit
def scale(x: jax.Array, factor: jax.typing.ArrayLike) -> jax.Array:
    """``factor · x`` for real ``factor``, in at least float32, in the dtype of ``x``.

    The parts of a complex ``x`` are multiplied one by one, so that a factor of 1
    gives back every bit and a NaN factor leaves no part untouched.
    """
    factor = jnp.asarray(factor, compute_dtype(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(x.real * factor, x.imag * factor)
    return narrow(widen(x) * factor, x.dtype)


def wide_sum(x: jax.Array, total: jax.Array) -> jax.Array:
    """``total + x`` in at least float32, in the precision of ``total``, unrounded."""
    wide = widen(total)
    return wide + widen(x).astype(wide.dtype)


def integer_sum(x: jax.Array, total: jax.Array) -> jax.Array:
    """``total + x`` of integers, exactly; of any other ``x`` the part before the point.

    In the dtype of ``total``, in which a negative ``x`` is none if it is unsigned.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return total + x.astype(total.dtype)
    size = jnp.abs(x).astype(total.dtype)
    return jnp.where(x < 0, total - size, total + size)


def abs_sq(x: jax.Array) -> jax.Array:
    """``|x|²``, real, in at least float32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.square(x.real) + jax.lax.square(x.imag)
    return jax.lax.square(widen(x))


def apart(x: jax.Array) -> jax.Array:
    """``x``, such that what is computed from it here is not shared with other users.

    On CPU a sum of squares that shares its widening of half precision with an update,
    or its clip, is no longer fused with it: a copy goes to memory. Elsewhere there is
    no copy, and this would make one where ``x`` itself is still to be computed.
    """
    return _apart(x)


_apart = linear("apart", lambda x: x, cpu=jax.lax.optimization_barrier)


def safe_sqrt(x: jax.Array) -> jax.Array:
    """``sqrt(x)`` of ``x ≥ 0`` with a finite derivative at 0."""
    positive = x > 0
    root = jnp.sqrt(jnp.where(positive, x, 1))
    # What is not positive is 0 or NaN, and is its own root.
    return jnp.where(positive, root, x)


def zeros_of_type(x_type: Any) -> jax.Array:
    """Zeros of a type that ``jax.typeof`` gave: sharded, and varying, as that says."""
    sharding = x_type.sharding if x_type.sharding.mesh.explicit_axes else None
    zeros = jnp.zeros(x_type.shape, x_type.dtype, out_sharding=sharding)
    return versions.to_varying(zeros, versions.varying_axes(x_type))


def full_like(
    p: jax.Array,
    value: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike,
    *,
    axes: int | None = None,
) -> jax.Array:
    """``value`` in the shape of ``p``, or of its first ``axes`` axes, sharded as these.

    So state lies where its parameters lie, also when it is made under ``jit``: there
    the compiler puts a constant on all devices, and what is computed from ``p`` where
    ``p`` is.
    """
    if isinstance(p, jax.core.Tracer):
        if axes == 0:
            return jnp.full((), value, dtype)
        # Less 0, and not plus 0, which would turn a -0.0 into a 0.0.
        return jnp.asarray(value, dtype) - _false(p, axes).astype(dtype)
    sharding = None
    if isinstance(p.sharding, NamedSharding):
        sharding = p.sharding.update(spec=P(*p.sharding.spec[:axes]))
    return jnp.full_like(p, value, dtype=dtype, shape=p.shape[:axes], device=sharding)


def stacked(x: jax.Array, n: int) -> jax.Array:
    """``n`` times the same, each lying as ``x`` does."""
    copies = jnp.broadcast_to(x, (n, *x.shape))
    if not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding):
        spec = P(None, *x.sharding.spec)
        copies = jax.device_put(copies, x.sharding.update(spec=spec))
    return copies


def zero(params: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A scalar 0 on all devices of the parameters."""
    numbers = list(filter(_is_number, jax.tree.leaves(params)))
    if not numbers:
        return jnp.zeros((), dtype)
    p = _param(min(numbers, key=np.size))
    if isinstance(p, jax.core.Tracer) and not jax.typeof(p).sharding.mesh.manual_axes:
        # jit forgets an argument that is not used, and on which devices it was.
        return _false(p, 0).astype(dtype)
    return full_like(p, 0, dtype, axes=0)


def _false(p: jax.Array, axes: int | None) -> jax.Array:
    """False for each entry along the first axes of ``p``, computed from ``p``."""
    never = (p != p) & (p == p)
    return never if axes is None else jnp.any(never, axis=tuple(range(axes, p.ndim)))


def _is_number(p: Any) -> bool:
    dtype = p.dtype if hasattr(p, "dtype") else np.result_type(p)
    return bool(jnp.issubdtype(dtype, jnp.number))


def expand(x: jax.Array, like: jax.Array) -> jax.Array:
    """``x`` with trailing axes of length 1, so that it lines up with ``like``."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def broadcast(prefix: Any, tree: Any) -> Any:
    """One value of the prefix tree for each leaf of ``tree``; ``None`` stays.

    The prefix may be a function of ``tree``. A tree without leaves comes back as it is:
    in ``optax.tree.map_params`` one such node stands for all parameters.
    """
    if not jax.tree.leaves(tree):
        return tree

    def fill(value: Any, part: Any) -> Any:
        return jax.tree.map(lambda _: value, part, is_leaf=is_sparse)

    prefix = prefix(tree) if _is_function(prefix) else prefix
    return jax.tree.map(fill, prefix, tree, is_leaf=is_leaf)


def _is_function(prefix: Any) -> bool:
    """To be called, and not a tree whose root can be called, as an Equinox module."""
    is_partial = isinstance(prefix, functools.partial)  # jax.tree_util's is a node too.
    return callable(prefix) and (is_partial or jax.tree_util.all_leaves([prefix]))


def inverse_sqrt(
    x: jax.Array, eps: jax.typing.ArrayLike, eps_in_sqrt: bool
) -> jax.Array:
    """``1/sqrt(x + eps)`` or ``1/(sqrt(x) + eps)`` of ``x ≥ 0``, but 1 for 1/0.

    The caller multiplies a gradient by it whose square is part of ``x``: where the
    divisor is 0 so is the gradient, and so shall be their quotient.
    """
    # Where eps is known to be above 0 as a number of this dtype, so is the divisor.
    may_be_0 = isinstance(eps, jax.core.Tracer) or (
        np.asarray(eps, x.dtype) < np.finfo(x.dtype).tiny
    )
    eps = jnp.asarray(eps, x.dtype)
    divisor = x + eps if eps_in_sqrt else safe_sqrt(x) + eps
    if may_be_0:
        divisor = jnp.where(divisor == 0, 1, divisor)
    return jax.lax.rsqrt(divisor) if eps_in_sqrt else 1 / divisor


def cast_like(tree: Any, reference: Any) -> Any:
    """Each leaf in the dtype of its reference; ``None`` stays."""
    return map_updates(lambda x, r: x.astype(dtype_of(r)), tree, reference)
