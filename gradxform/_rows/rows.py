"""Rows of tables: their indices, and how to read and write them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._trees import compilers, versions

Array: TypeAlias = jax.Array | np.ndarray[Any, Any]
A = TypeVar("A", bound=Array)


def rows_of(name: str, indices: A, height: int) -> A:
    """Indices as int32 in [0, height]; ``height`` stands for those outside (padding).

    NumPy arrays stay NumPy arrays: JAX would compile a program for each length.

    Raises:
      TypeError: they are not integers.
      ValueError: one lies outside of [0, height]. Traced indices, which have no value
        yet, and indices in other processes are not checked.
    """
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        if indices.size:
            raise TypeError(f"{name} must be integers, got {indices.dtype}.")
        # An empty list is a list of floats.
        indices = indices.astype(np.int32)  # type: ignore[assignment]
    if is_known(indices) and indices.size:
        known = np.asarray(indices)
        outside = (known < 0) | (known > height)
        if outside.any():
            first = tuple(np.argwhere(outside)[0].tolist())
            raise ValueError(
                f"{name} must be in [0, {height}], where {height} is padding, got "
                f"{known[first]} at position {list(first)}."
            )
    return inside_or_padding(indices, height)


def inside_or_padding(indices: A, height: int) -> A:
    """Integers as int32 in [0, height]; ``height`` stands for those outside."""
    # Compare before narrowing: a large uint32 would become negative. Compare after
    # widening: the height may be more than an int8 can count.
    if indices.dtype.itemsize < 4:
        indices = indices.astype(np.int32)  # type: ignore[assignment]
    inside = indices < height
    if jnp.issubdtype(indices.dtype, jnp.signedinteger):
        inside &= indices >= 0
    where: Any = np.where if isinstance(indices, np.ndarray) else jnp.where
    return where(inside, indices.astype(np.int32), np.int32(height))


def is_known(indices: Array) -> bool:
    """Whether all values are known in this process."""
    return isinstance(indices, np.ndarray) or (
        not isinstance(indices, jax.core.Tracer) and indices.is_fully_addressable
    )


def take_rows(table: jax.Array, indices: jax.Array, **how: Any) -> jax.Array:
    """The rows of a table with these indices; padding reads zeros."""
    if not table.shape[0]:  # JAX cannot gather from an empty table, even padding.
        shape = indices.shape + table.shape[1:]
        return jnp.zeros(shape, table.dtype, out_sharding=how.get("out_sharding"))
    return table.at[indices].get(mode="fill", fill_value=0, **how)


def take_summed(table: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows with these ascending, unique indices; padding reads zeros."""
    explicit = explicit_sharding(table)
    return take_rows(
        table,
        indices,
        indices_are_sorted=True,
        unique_indices=True,
        out_sharding=explicit and NamedSharding(explicit.mesh, P()),
    )


def summed(table: jax.Array) -> dict[str, Any]:
    """Arguments to write rows with ascending, unique indices; padding is dropped."""
    return {
        "mode": "drop",
        "indices_are_sorted": True,
        "unique_indices": True,
        "out_sharding": explicit_sharding(table),
    }


def write_summed(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The table with new rows at unique indices; in place if it is donated."""
    narrow = versions.scatter_copies(table.dtype)
    return (_write_narrow if narrow else _scatter)(table, indices, rows)


def _scatter(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[indices].set(rows, **summed(table))


def _choose(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The result of ``_scatter``, in one pass over the table and without a copy of it.

    A compiler that cannot scatter into such a dtype makes a wider copy of the table,
    scatters into that, and narrows it again. With a float8 table Adagrad would keep
    2.0 N and move 23 N instead of 15 N.
    """
    how, n = summed(table), len(indices)
    if not n:
        return table
    of_table, bits = how["out_sharding"], f"uint{8 * table.dtype.itemsize}"
    of_height = of_table and NamedSharding(of_table.mesh, P(*of_table.spec[:1]))
    each = jnp.arange(n, dtype=jnp.uint16 if n < 1 << 16 else jnp.uint32)
    # Bits need no conversion on processors without such numbers.
    old, new = (jax.lax.bitcast_convert_type(x, bits) for x in (table, rows))
    # The new rows must be in memory first, and only a scatter surely puts them there.
    # The compiler could compute them in the loop that writes the table. They would read
    # overwritten memory, so it would make a copy.
    new = jnp.zeros_like(new).at[each].set(new, unique_indices=True)
    # For each row of the table the position of its new row, or n if it has none.
    position = jnp.zeros(table.shape[0], each.dtype, out_sharding=of_height)
    position += np.asarray(n, each.dtype)
    position = position.at[indices].set(each, **how | {"out_sharding": of_height})
    new = new.at[position].get(mode="clip", out_sharding=of_table)
    is_old = jnp.expand_dims(position == n, tuple(range(1, table.ndim)))
    return jax.lax.bitcast_convert_type(jnp.where(is_old, old, new), table.dtype)


_write_narrow = compilers.linear(compilers.on_cpu(_choose, _scatter), _scatter)


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a table for ids of any shape; on explicit axes sharded like ids."""
    explicit = explicit_sharding(table)
    if explicit is not None:
        of_ids = jax.typeof(ids).sharding.spec
        taken = _mesh_axes(*of_ids)
        of_row = (None if _mesh_axes(i) & taken else i for i in explicit.spec[1:])
        explicit = NamedSharding(explicit.mesh, P(*of_ids, *of_row))
    return take_rows(table, ids, out_sharding=explicit)


def _mesh_axes(*spec: str | tuple[str, ...] | None) -> set[str]:
    """The mesh axes in these entries of a spec; an entry may have several."""
    return {a for i in spec for a in (i if isinstance(i, tuple) else (i,)) if a}


def searchsorted(x: jax.Array, ascending: jax.Array) -> jax.Array:
    """The first position of each of ``x`` in an array that holds them all.

    Unlike ``jnp.searchsorted`` it takes arrays on mesh axes of two kinds.
    """
    # All entries before `position` are less than x.
    position = jnp.zeros_like(x)
    for bit in reversed(range((len(ascending) - 1).bit_length())):
        later = position + (1 << bit)
        less = ascending.at[later - 1].get(mode="clip") < x
        position = jnp.where(less, later, position)
    return position


def as_array(x: object) -> Array:
    """Arrays as they are; other values as NumPy arrays, which keep every integer."""
    return x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x)


def to_jax(x: Array) -> jax.Array:
    """A NumPy array as a new JAX array; a JAX array as it is.

    It makes a copy: since JAX 0.10 ``jnp.asarray`` compiles a program for each shape.
    """
    return jax.device_put(np.array(x)) if isinstance(x, np.ndarray) else x


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding of ``x`` if its mesh has explicit axes; otherwise None."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def replicated(
    x: jax.Array, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
) -> jax.Array:
    """``x`` whole on each device of a mesh, by default of its own.

    An array on no mesh stays as it is. By default, so does an array without explicit
    axes.
    """
    there = jax.typeof(x).sharding.mesh
    if there.empty or (mesh is None and not there.explicit_axes):
        return x
    # A bare spec would need `jax.set_mesh`.
    return jax.sharding.reshard(x, NamedSharding(mesh or there, P()))


def mesh_context(arrays: Iterable[jax.Array]) -> contextlib.AbstractContextManager[Any]:
    """A context with the mesh of arrays on explicit axes, if none is set.

    Without it JAX cannot differentiate such arrays eagerly: it starts from a 1, whose
    devices it takes from the context.
    """
    if jax.sharding.get_abstract_mesh().empty:
        for x in arrays:
            on: Any = None if isinstance(x, jax.core.Tracer) else x.sharding
            if on is not None and explicit_sharding(x) is not None:
                with contextlib.suppress(ValueError):  # JAX allows it outside of `jit`.
                    return jax.set_mesh(on.mesh)
    return contextlib.nullcontext()
