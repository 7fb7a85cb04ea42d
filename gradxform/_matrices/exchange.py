"""Equal matrices on a mesh: each device gets some of them whole, and gives them back.

One ``all_to_all`` for each dtype brings the parts of all arrays of the matrices
together, and one takes back what is made of them. An array of the state that lies where
its matrices are stays there.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradxform._matrices import placements
from gradxform._matrices.placements import AnyMesh, Names
from gradxform._trees.types import Shape

# For each axis of matrices, such as that of layers, the axis of an array; None if it
# has no such axis.
Axes: TypeAlias = tuple[int | None, ...]


class Batch(NamedTuple):
    """How devices share the matrices of one parameter.

    Attributes:
      sizes: how many there are along each of their axes.
      names: the mesh axes that cut these axes from the beginning.
      shared: those along which devices then share what they have, each with the axis
        that it cuts; None if they do not divide these axes.
    """

    sizes: tuple[int, ...]
    names: Names
    shared: tuple[tuple[str, int], ...] | None

    def cut(self, axis: int) -> tuple[str, ...]:
        """The mesh axes that cut an axis if each device has its matrices alone."""
        shared = self.shared or ()
        return *self.names[axis], *(name for name, a in shared if a == axis)


class Array(NamedTuple):
    """An array of the matrices of one parameter, or what is the same for all of them.

    Attributes:
      axes: those of its matrices.
      names: the mesh axes that cut each axis.
      is_there: whether each device has the matrices that it shares, and only those.
      due: the number of the condition under which it travels; None: always.
      kept: the position of the array that it is else, for what is made.
    """

    axes: Axes
    names: Names
    is_there: bool = False
    due: int | None = None
    kept: int | None = None

    @property
    def of_matrix(self) -> Names:
        """The mesh axes that cut each axis of a matrix."""
        return tuple(x for a, x in enumerate(self.names) if a not in self.axes)


class Core(NamedTuple):
    """The arrays of the matrices of one parameter.

    Attributes:
      batch: how devices share the matrices.
      reads: the arrays that are read; None for what is the same for all matrices of all
        parameters.
      makes: those that are made.
    """

    batch: Batch
    reads: tuple[Array | None, ...]
    makes: tuple[Array, ...]


def shares(
    sizes: tuple[int, ...], names: Names, among: Sequence[str], mesh: Mapping[str, int]
) -> Batch:
    """How devices along some mesh axes share matrices, if they divide them."""
    pairs = zip(sizes, names, strict=True)
    left = [n // math.prod(mesh[name] for name in of) for n, of in pairs]
    for axes in itertools.product(range(len(sizes)), repeat=len(among)):
        pairs_of_names = tuple(zip(among, axes, strict=True))
        count = [1] * len(sizes)
        for name, axis in pairs_of_names:
            count[axis] *= mesh[name]
        if not any(n % k for n, k in zip(left, count, strict=True)):
            return Batch(sizes, names, pairs_of_names)
    return Batch(sizes, names, None)


class Shares:
    """The exchange among devices that share equal matrices, within a ``shard_map``."""

    def __init__(self, names: Sequence[str], mesh: Mapping[str, int]) -> None:
        """Among all devices along these mesh axes."""
        self.names, self._mesh = tuple(names), mesh
        self._sizes = tuple(mesh[name] for name in names)
        self.count = math.prod(self._sizes)

    def gathered(
        self, parts: Sequence[jax.Array], names: Sequence[Names]
    ) -> list[jax.Array]:
        """Whole matrices, from the parts of as many for each device.

        Args:
          parts: arrays (devices, matrices, ...) of parts.
          names: the mesh axes that cut each axis of these matrices.
        """
        cutting = [{n for each in of for n in each} for of in names]
        used = [n for n in self.names if any(n in of for of in cutting)]
        sent, away = list[jax.Array](), list[int]()
        found: dict[int, jax.Array] = {}
        for k, (part, of) in enumerate(zip(parts, cutting, strict=True)):
            x = part.reshape(*self._sizes, *part.shape[1:])
            for axis, name in reversed([*enumerate(self.names)]):
                if name not in used or not of:  # Devices have the same arrays.
                    x = _at(x, name, axis)
            if not of:
                found[k] = x
                continue
            away.append(k)
            copies = [n for n in used if n not in of]
            sent.append(self._divided(x, used, copies))
        received = self._exchanged(sent, used)
        for k, x in zip(away, received, strict=True):
            found[k] = self._joined(x, used, names[k], parts[k].shape[1:])
        return [found[k] for k in range(len(parts))]

    def _divided(
        self, x: jax.Array, used: Sequence[str], copies: Sequence[str]
    ) -> jax.Array:
        """(devices, ...): of the copies of a part each device sends an equal share."""
        rest = x.shape[len(used) :]
        x = x.reshape(-1, *rest)
        if not copies:
            return x
        count = math.prod(self._mesh[n] for n in copies)
        x = x.reshape(len(x), -1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % count)))
        return _at(x.reshape(len(x), count, -1), tuple(copies), 1)

    def _joined(
        self, x: jax.Array, used: Sequence[str], names: Names, shape: Shape
    ) -> jax.Array:
        """The inverse of :meth:`_divided` after the exchange: whole matrices."""
        order = [n for of in names for n in of]
        copies = [n for n in used if n not in order]
        sizes = [self._mesh[n] for n in used]
        rest = (-1,) if copies else shape
        x = x.reshape(*sizes, *rest)
        first = [used.index(n) for n in (*order, *copies)]
        x = x.transpose(*first, *range(len(used), x.ndim))
        factors = [math.prod(self._mesh[n] for n in of) for of in names]
        if copies:
            x = x.reshape(math.prod(factors), -1)[:, : math.prod(shape)]
        x = x.reshape(*factors, *shape)
        count, axes = len(factors), [len(factors)]
        for axis in range(count):
            axes += [axis, count + 1 + axis]
        whole = (n * m for n, m in zip(factors, shape[1:], strict=True))
        return x.transpose(axes).reshape(shape[0], *whole)

    def given_back(
        self, arrays: Sequence[jax.Array], names: Sequence[Names]
    ) -> list[jax.Array]:
        """(devices, matrices, ...): parts of all, from whole ones of this device."""
        sent, shapes = [], []
        for whole, of in zip(arrays, names, strict=True):
            factors = [math.prod(self._mesh[n] for n in each) for each in of]
            split = [
                n
                for factor, size in zip(factors, whole.shape[1:], strict=True)
                for n in (factor, size // factor)
            ]
            x = whole.reshape(len(whole), *split)
            first = range(1, 2 * len(factors), 2)
            x = x.transpose(*first, 0, *(axis + 1 for axis in first))
            shape = x.shape[len(factors) :]
            order = [n for each in of for n in each]
            x = x.reshape(*(self._mesh[n] for n in order), *shape)
            inside = [n for n in self.names if n in order]
            axes = [order.index(n) for n in inside]
            x = x.transpose(*axes, *range(len(axes), x.ndim))
            others = [k for k, n in enumerate(self.names) if n not in order]
            x = jnp.broadcast_to(jnp.expand_dims(x, others), (*self._sizes, *shape))
            sent.append(x.reshape(-1, *shape))
            shapes.append(shape)
        received = self._exchanged(sent, self.names)
        pairs = zip(received, shapes, strict=True)
        return [x.reshape(self.count, *shape) for x, shape in pairs]

    def _exchanged(
        self, sent: Sequence[jax.Array], names: Sequence[str]
    ) -> list[jax.Array]:
        """What devices send each other; arrays of one dtype go together."""
        if not names:
            return [*sent]
        by_dtype: dict[object, list[int]] = {}
        for k, x in enumerate(sent):
            by_dtype.setdefault(x.dtype, []).append(k)
        received = [*sent]
        for members in by_dtype.values():
            arrays = [sent[k] for k in members]
            if len(arrays) == 1:  # XLA's CPU compiler needs less memory for one axis.
                (whole,) = arrays
                x = whole.reshape(-1, *whole.shape[2:])
            else:
                x = jnp.concatenate([x.reshape(len(x), -1) for x in arrays], 1)
            x = jax.lax.all_to_all(x, tuple(names), 0, 0, tiled=True)
            start = 0
            for k in members:
                if len(members) == 1:
                    received[k] = x.reshape(sent[k].shape)
                    continue
                size = math.prod(sent[k].shape[1:])
                received[k] = x[:, start : start + size]
                start += size
        return received


def _at(x: jax.Array, names: str | tuple[str, ...], axis: int) -> jax.Array:
    """What belongs to this device along mesh axes."""
    index = jax.lax.axis_index(names)
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


# (whether arrays are the same for all matrices, arrays) -> results for each matrix
OfWhole: TypeAlias = Callable[[Sequence[bool], Sequence[jax.Array]], list[jax.Array]]


@functools.lru_cache(maxsize=256)  # Without `jit` each step calls it again.
def on_whole(
    f: OfWhole, cores: tuple[Core, ...], names: tuple[str, ...], mesh: AnyMesh
) -> Callable[..., list[list[jax.Array]]]:
    """A function that applies ``f`` to the matrices of some cores, whole ones.

    It gets the arrays of each core, and what is the same for all matrices. It returns
    what each core makes. Devices along the mesh axes ``names`` share the matrices.
    """
    specs = [
        [placements.spec_of(x.names) for x in core.reads if x is not None]
        for core in cores
    ]
    ends = [[placements.spec_of(x.names) for x in core.makes] for core in cores]
    are_same = [x is None for x in cores[0].reads]

    def local(
        arrays: Sequence[Sequence[jax.Array]],
        same: Sequence[jax.Array],
        flags: Sequence[jax.Array],
    ) -> list[list[jax.Array]]:
        travel = _Travel(cores, Shares(names, mesh.shape), mesh.shape)
        columns = [*zip(*arrays, strict=True)]
        given, constants = iter(travel.there(columns, flags)), iter(same)
        made = f(are_same, [next(constants if x else given) for x in are_same])
        rows = travel.back(made, columns, flags)
        return [list(each) for each in zip(*rows, strict=True)]

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), PartitionSpec()),
            out_specs=ends,
            check_vma=False,
        )
    )


class _Travel:
    """What travels to the devices of matrices, and back; some of it if a flag says so.

    All devices have the same flags, so all take part in an exchange, or none.
    """

    def __init__(
        self, cores: Sequence[Core], shares: Shares, mesh: Mapping[str, int]
    ) -> None:
        self._shares, self._pack = shares, _Pack(cores, shares.names, mesh)
        reads = ([x for x in core.reads if x is not None] for core in cores)
        self._reads = [*zip(*reads, strict=True)]
        self._makes = [*zip(*(core.makes for core in cores), strict=True)]
        given = (k for k, x in enumerate(cores[0].reads) if x is not None)
        self._column = {k: n for n, k in enumerate(given)}

    def there(
        self, columns: Sequence[Sequence[jax.Array]], flags: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """(matrices, ...) of each array; zeros for what does not travel."""

        def gathered(
            members: Sequence[int], columns: Sequence[Sequence[jax.Array]]
        ) -> list[jax.Array]:
            kinds = [self._reads[n] for n in members]
            packed = list(map(self._pack.packed, columns, kinds))
            away = [k for k, (kind, *_) in enumerate(kinds) if not kind.is_there]
            of = [kinds[k][0].of_matrix for k in away]
            found = self._shares.gathered([packed[k] for k in away], of)
            for k, x in zip(away, found, strict=True):
                packed[k] = x
            return packed

        found = dict[int, jax.Array]()
        for condition, members in _by_condition(self._reads).items():
            of = [columns[n] for n in members]
            if condition is None:
                made = gathered(members, of)
            else:  # By `jit` the types and the conditional need one trace.
                fetch = jax.jit(functools.partial(gathered, members))
                zeros = functools.partial(_zeros_like, jax.eval_shape(fetch, of))
                flag = jnp.any(flags[condition])
                made = jax.lax.cond(flag, fetch, lambda _, zeros=zeros: zeros(), of)
            found.update(zip(members, made, strict=True))
        return [found[n] for n in range(len(columns))]

    def back(
        self,
        made: Sequence[jax.Array],
        columns: Sequence[Sequence[jax.Array]],
        flags: Sequence[jax.Array],
    ) -> list[list[jax.Array]]:
        """The arrays of each parameter; those that were there, for what stays."""

        def given_back(members: Sequence[int]) -> list[list[jax.Array]]:
            kinds = [self._makes[n] for n in members]
            away = [k for k, (kind, *_) in enumerate(kinds) if not kind.is_there]
            found = [made[n] for n in members]
            of = [kinds[k][0].of_matrix for k in away]
            sent = self._shares.given_back([found[k] for k in away], of)
            for k, x in zip(away, sent, strict=True):
                found[k] = x
            return list(map(self._pack.unpacked, found, kinds))

        def or_kept(
            members: Sequence[int], before: list[list[jax.Array]], flag: jax.Array
        ) -> list[list[jax.Array]]:
            new = given_back(members)
            if not flag.ndim:
                return new
            return jax.tree.map(
                lambda x, y, k: jnp.where(flag[k], x, y),
                *(new, before, [[*range(len(flag))]] * len(members)),
            )

        found = dict[int, list[jax.Array]]()
        for condition, members in _by_condition(self._makes).items():
            if condition is None:
                rows = given_back(members)
            else:
                flag = flags[condition]
                positions = [self._makes[n][0].kept for n in members]
                before = [
                    [*columns[self._column[k]]] for k in positions if k is not None
                ]
                rows = jax.lax.cond(
                    jnp.any(flag),
                    functools.partial(or_kept, members, before, flag),
                    lambda before=before: before,
                )
            found.update(zip(members, rows, strict=True))
        return [found[n] for n in range(len(made))]


def _by_condition(kinds: Sequence[Sequence[Array]]) -> dict[int | None, list[int]]:
    """The positions of arrays that travel under the same condition."""
    found: dict[int | None, list[int]] = {}
    for n, (kind, *_) in enumerate(kinds):
        found.setdefault(kind.due, []).append(n)
    return found


def _zeros_like(types: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [jnp.zeros(t.shape, t.dtype) for t in types]


class _Pack:
    """The matrices of several parameters one after another, for each device."""

    def __init__(
        self, cores: Sequence[Core], names: Sequence[str], mesh: Mapping[str, int]
    ) -> None:
        self._batches = [core.batch for core in cores]
        self._names, self._mesh = tuple(names), mesh
        self._sizes = tuple(mesh[name] for name in names)
        self._count = math.prod(self._sizes)

    def _local(self, batch: Batch) -> list[int]:
        """How many matrices a device has along each of their axes."""
        pairs = zip(batch.sizes, batch.names, strict=True)
        return [n // math.prod(self._mesh[x] for x in of) for n, of in pairs]

    def _split(self, batch: Batch) -> tuple[list[int], list[int]]:
        """The sizes of the axes of matrices, each with its devices in front of it.

        And the order of these axes in which devices come first.
        """
        shared, sizes = dict(batch.shared or ()), list[int]()
        at, rest = dict[str, int](), list[int]()
        for axis, count in enumerate(self._local(batch)):
            size = count
            for name in (n for n in self._names if shared.get(n) == axis):
                at[name] = len(sizes)
                sizes.append(self._mesh[name])
                size //= self._mesh[name]
            rest.append(len(sizes))
            sizes.append(size)
        return sizes, [*(at[name] for name in self._names), *rest]

    def packed(self, arrays: Sequence[jax.Array], kinds: Sequence[Array]) -> jax.Array:
        """(devices, matrices, ...), or (matrices, ...) if each device has its own."""
        even, uneven = list[jax.Array](), list[jax.Array]()
        for array, kind, batch in zip(arrays, kinds, self._batches, strict=True):
            if not (kind.axes or kind.is_there):  # Fewer operations to trace.
                uneven.append(jax.lax.expand_dims(array, (0,)))
                continue
            x = _in_front(array, kind.axes)
            count = len(kind.axes)
            if kind.is_there:
                sizes, order = self._split(batch)
                local = [sizes[k] for k in sorted(order[len(self._names) :])]
                x = jnp.broadcast_to(x, (*local, *x.shape[count:]))
                even.append(x.reshape(-1, *x.shape[count:]))
                continue
            shape = x.shape[count:]
            x = jnp.broadcast_to(x, (*self._local(batch), *shape))
            if batch.shared is None:
                uneven.append(x.reshape(-1, *shape))
                continue
            sizes, order = self._split(batch)
            x = x.reshape(*sizes, *shape)
            x = x.transpose(*order, *range(len(order), x.ndim))
            even.append(x.reshape(self._count, -1, *shape))
        if kinds[0].is_there:
            return jnp.concatenate(even)
        if uneven:
            x = jnp.concatenate(uneven)
            x = _padded(x, self._count)
            even.append(x.reshape(self._count, -1, *x.shape[1:]))
        return jnp.concatenate(even, 1)

    def unpacked(self, x: jax.Array, kinds: Sequence[Array]) -> list[jax.Array]:
        """The arrays of each parameter again."""
        found, start, rest = dict[int, jax.Array](), 0, list[int]()
        pairs = [*zip(kinds, self._batches, strict=True)]
        for n, (kind, batch) in enumerate(pairs):
            if batch.shared is None:
                rest.append(n)
                continue
            sizes, order = self._split(batch)
            devices = len(self._names)
            local = [sizes[k] for k in order[devices:]]
            size, axis = math.prod(local), 0 if kind.is_there else 1
            y = jax.lax.slice_in_dim(x, start, start + size, axis=axis)
            start += size
            shape = x.shape[axis + 1 :]
            if kind.is_there:
                y = y.reshape(*local, *shape)
            else:
                y = y.reshape(*(sizes[k] for k in order), *shape)
                back = [order.index(k) for k in range(len(order))]
                y = y.transpose(*back, *range(len(order), y.ndim))
                y = y.reshape(*self._local(batch), *shape)
            found[n] = _back(y, kind.axes)
        if rest:
            y = x[:, start:].reshape(-1, *x.shape[2:])
            sizes = [math.prod(self._local(pairs[n][1])) for n in rest]
            parts = jax.lax.split(
                y, [*sizes, len(y) - sum(sizes)]
            )  # The last is padding.
            for n, part in zip(rest, parts[:-1], strict=True):
                kind, batch = pairs[n]
                shape = *self._local(batch), *y.shape[1:]
                found[n] = _back(jax.lax.reshape(part, shape), kind.axes)
        return [found[n] for n in range(len(pairs))]


def _in_front(x: jax.Array, axes: Axes) -> jax.Array:
    """With the axes of matrices in front: one entry if it has no such axis."""
    there = [axis for axis in axes if axis is not None]
    x = jnp.moveaxis(x, there, range(len(there)))
    return jnp.expand_dims(x, [k for k, axis in enumerate(axes) if axis is None])


def _back(x: jax.Array, axes: Axes) -> jax.Array:
    there = [axis for axis in axes if axis is not None]
    assert len(there) == len(axes)
    return jnp.moveaxis(x, range(len(there)), there)


def _padded(x: jax.Array, count: int) -> jax.Array:
    """With copies of the first matrix, so that each device gets as many."""
    missing = -len(x) % count
    return jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])
