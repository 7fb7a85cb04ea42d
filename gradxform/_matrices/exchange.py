"""Equal matrices on a mesh: each device gets some of them whole, and gives them back.

One ``all_to_all`` over all mesh axes that cut a matrix brings its parts together, and
one takes them back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradxform._matrices import placements
from gradxform._matrices.placements import AnyMesh, Names


class Cut(NamedTuple):
    """How a mesh cuts an array of matrices.

    Attributes:
      axes: those along which matrices follow each other.
      names: the mesh axes that cut each axis.
    """

    axes: tuple[int, ...]
    names: Names

    @property
    def of_matrix(self) -> Names:
        """The mesh axes that cut each axis of a matrix."""
        return tuple(x for a, x in enumerate(self.names) if a not in self.axes)

    @property
    def of_batch(self) -> frozenset[str]:
        """The mesh axes that cut axes of matrices: each device has some of them."""
        return frozenset(x for a in self.axes for x in self.names[a])


class Shares(NamedTuple):
    """How devices share equal matrices.

    Attributes:
      cutting: the mesh axes that cut a matrix, for each of its axes.
      copying: mesh axes along which devices have the same arrays, and share the work.
      sizes: of all mesh axes.
    """

    cutting: Names
    copying: tuple[str, ...]
    sizes: dict[str, int]

    def devices(self, names: Sequence[str]) -> int:
        """The number of devices along these mesh axes."""
        return math.prod(self.sizes[name] for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        """The mesh axes that cut a matrix, from its first axis on."""
        return tuple(name for names in self.cutting for name in names)

    @property
    def all(self) -> tuple[str, ...]:
        """The mesh axes along which devices share the work."""
        return *self.copying, *self.names

    def gathered(self, x: jax.Array) -> jax.Array:
        """Whole matrices, from the parts of as many that this device has."""
        if self.copying:
            copies = self.devices(self.copying)
            index = jax.lax.axis_index(self.copying)
            parts = x.reshape(copies, -1, *x.shape[1:])
            x = jax.lax.dynamic_index_in_dim(parts, index, keepdims=False)
        if not self.names:
            return x
        x = jax.lax.all_to_all(x, self.names, 0, 0, tiled=True)
        factors = list(map(self.devices, self.cutting))
        x = x.reshape(*factors, -1, *x.shape[1:])
        count, order = len(factors), [len(factors)]
        for axis in range(count):
            order += [axis, count + 1 + axis]
        x = x.transpose(order)
        pairs = zip(factors, x.shape[2::2], strict=True)
        return x.reshape(-1, *(factor * size for factor, size in pairs))

    def given_back(self, x: jax.Array) -> jax.Array:
        """Parts of all matrices, from the whole ones that this device has."""
        factors = list(map(self.devices, self.cutting))
        pairs = zip(factors, x.shape[1:], strict=True)
        split = [n for factor, size in pairs for n in (factor, size // factor)]
        x = x.reshape(len(x), *split)
        count = len(factors)
        first = range(1, 2 * count, 2)
        x = x.transpose(*first, 0, *(axis + 1 for axis in first))
        x = x.reshape(math.prod(factors), *x.shape[count:])
        copies = self.devices(self.copying)
        x = jnp.broadcast_to(x, (copies, *x.shape))
        x = x.reshape(-1, *x.shape[3:])
        return jax.lax.all_to_all(x, self.all, 0, 0, tiled=True) if self.all else x


# (matrices, *constants) -> results for each of them
OfWhole: TypeAlias = Callable[..., jax.Array]


@functools.lru_cache(maxsize=256)  # Without `jit` each step calls it again.
def on_whole(
    f: OfWhole, cuts: tuple[Cut, ...], mesh: AnyMesh
) -> Callable[..., list[jax.Array]]:
    """A function that applies ``f`` to the matrices of some arrays, whole ones.

    It gets the arrays and the constants. The results lie as the arrays do. The cuts
    give equal matrices, cut alike.
    """
    specs, sizes = [placements.spec_of(cut.names) for cut in cuts], dict(mesh.shape)

    def local(
        arrays: Sequence[jax.Array], constants: Sequence[jax.Array]
    ) -> list[jax.Array]:
        pairs = [*zip(arrays, cuts, strict=True)]
        batches = [jnp.moveaxis(x, cut.axes, range(len(cut.axes))) for x, cut in pairs]
        flat = [
            x.reshape(-1, *x.shape[len(cut.axes) :])
            for x, cut in zip(batches, cuts, strict=True)
        ]
        x = jnp.concatenate(flat)
        shares = _shares(cuts[0], len(x), sizes)
        whole = shares.gathered(_padded(x, shares.devices(shares.all)))
        parts = shares.given_back(f(whole, *constants))
        results, start = [], 0
        for x, y, cut in zip(batches, flat, cuts, strict=True):
            part = parts[start : start + len(y)].reshape(x.shape)
            results.append(jnp.moveaxis(part, range(len(cut.axes)), cut.axes))
            start += len(y)
        return results

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=specs,
            check_vma=False,
        )
    )


def _padded(x: jax.Array, count: int) -> jax.Array:
    """With copies of the first matrix, so that each device gets as many."""
    missing = -len(x) % count
    return jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])


def _shares(cut: Cut, count: int, sizes: dict[str, int]) -> Shares:
    """How devices share a number of matrices.

    A mesh axis of copies takes part if each device then has fewer of them.
    """
    cutting = tuple(tuple(n for n in x if sizes[n] > 1) for x in cut.of_matrix)
    shares = Shares(cutting, (), sizes)
    used = {*shares.names, *cut.of_batch}
    devices = shares.devices(shares.names)
    for name, size in sizes.items():
        # Matrices of a device, with this axis and without it.
        if name not in used and -(-count // (devices * size)) < -(-count // devices):
            shares = shares._replace(copying=(*shares.copying, name))
            devices *= size
    return shares
