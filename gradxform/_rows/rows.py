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

from gradxform._devices.mesh import axes_of

AnyArray: TypeAlias = jax.Array | np.ndarray[Any, Any]
A = TypeVar("A", bound=AnyArray)


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
    if has_values(indices) and indices.size:
        values = np.asarray(indices)
        outside = (values < 0) | (values > height)
        if outside.any():
            first = tuple(np.argwhere(outside)[0].tolist())
            raise ValueError(
                f"{name} must be in [0, {height}], where {height} is padding, got "
                f"{values[first]} at position {list(first)}."
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


def has_values(indices: AnyArray) -> bool:
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


def write_options(table: jax.Array) -> dict[str, Any]:
    """Arguments to write rows with ascending, unique indices; padding is dropped."""
    return {
        "mode": "drop",
        "indices_are_sorted": True,
        "unique_indices": True,
        "out_sharding": explicit_sharding(table),
    }


def write_summed(table: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The table with new rows at unique indices; in place if it is donated."""
    return table.at[indices].set(rows, **write_options(table))


def read_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows of a table for ids of any shape; on explicit axes sharded like ids."""
    explicit = explicit_sharding(table)
    if explicit is not None:
        of_ids = jax.typeof(ids).sharding.spec
        taken = set(axes_of(of_ids))
        of_row = (None if taken & {*axes_of([i])} else i for i in explicit.spec[1:])
        explicit = NamedSharding(explicit.mesh, P(*of_ids, *of_row))
    return take_rows(table, ids, out_sharding=explicit)


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


def as_array(x: object) -> AnyArray:
    """Arrays as they are; other values as NumPy arrays, which keep every integer."""
    return x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x)


def to_jax(x: AnyArray) -> jax.Array:
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
