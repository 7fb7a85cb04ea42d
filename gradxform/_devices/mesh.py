"""Sums over the mesh axes on which arrays are sharded, inside ``shard_map``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from gradxform._checks import structures
from gradxform._jax import versions
from gradxform._trees import maps
from gradxform._trees.types import Leaf, Path, Prefix, PyTree, T

# One axis, several, or a prefix tree of PartitionSpecs; None outside of shard_map.
AxisName: TypeAlias = str | Sequence[str] | Prefix[PartitionSpec] | None

# The mesh axes over which a leaf's stacked layers are sharded, and over which each
# layer's entries are.
_Axes: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
_Named: TypeAlias = tuple[Path, jax.Array]  # A leaf and the path to it.


def sums(
    layers: PyTree[jax.Array], axis_name: AxisName, stacked: list[int]
) -> tuple[PyTree[jax.Array], list[jax.Array]]:
    """The sum of each layer over all devices, and the sum of each leaf's layers.

    ``layers`` has for each leaf the sums of its layers over the entries on this device,
    and ``stacked`` how many of its axes stack layers.
    """
    flat, axes, treedef = _layers_of(layers, axis_name, stacked)
    whole = _over(jax.lax.psum, flat, [within for _, within in axes])
    across = [across for across, _ in axes]
    together = _over(jax.lax.psum, map(jnp.sum, whole), across)
    return jax.tree.unflatten(treedef, whole), together


def layer_means(
    layers: PyTree[jax.Array], axis_name: AxisName, stacked: list[int]
) -> PyTree[jax.Array]:
    """The mean of each layer over all devices; as :func:`sums`, with means."""
    flat, axes, treedef = _layers_of(layers, axis_name, stacked)
    whole = _over(jax.lax.pmean, flat, [within for _, within in axes])
    return jax.tree.unflatten(treedef, whole)


def _layers_of(
    layers: PyTree[jax.Array], axis_name: AxisName, stacked: list[int]
) -> tuple[list[jax.Array], list[_Axes], jax.tree_util.PyTreeDef]:
    """The leaves, the mesh axes over which each is sharded, and their structure."""
    flat, treedef = jax.tree.flatten_with_path(layers)
    # A leaf is sharded over those of the names over which it varies, or a prefix tree
    # of `PartitionSpec` says it.
    if (names := _given_names(axis_name)) is not None:
        axes = _varying_axes(flat, names, stacked)
    else:
        given: Any = structures.prefix("axis_name", axis_name, layers, "updates")
        specs = treedef.flatten_up_to(given)  # type: ignore[attr-defined]
        axes = _sharded_axes(flat, specs, stacked)
    return [x for _, x in flat], axes, treedef


def mean(x: jax.Array, axis_name: AxisName, tree: PyTree[Leaf]) -> jax.Array:
    """The mean of a number over the devices of these axes: equal on all of them.

    Specs in ``axis_name`` are a prefix of ``tree``; their axes are all that they name.
    """
    if (names := _given_names(axis_name)) is None:
        specs = jax.tree.leaves(maps.prefix_of(axis_name, tree))
        names = axes_of(itertools.chain.from_iterable(specs))
    # Over an axis over which it does not vary, it is equal already.
    differs = (n for n in names if n in _varying(x) or not _is_tracked(n))
    axes = tuple(dict.fromkeys(differs))
    return jax.lax.pmean(x, axes) if axes else x


def names_of(axis_name: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes that are given by their names; none if it is None.

    Raises:
      TypeError: it is something else.
    """
    names = () if axis_name is None else _given_names(axis_name)
    if names is None:
        raise TypeError(
            f"axis_name must be a mesh axis, or several, got {axis_name!r}."
        )
    return names


def check_axes(names: tuple[str, ...], tree: PyTree[jax.Array]) -> None:
    """Raises ``ValueError`` unless each name is an axis that a part can be of."""
    explicit = {
        name
        for x in jax.tree.leaves(tree)
        for name in jax.typeof(x).sharding.mesh.explicit_axes
    }
    for name in names:
        if name not in explicit and not _is_bound(name):
            raise ValueError(
                f"axis_name={names!r}: {name!r} is neither an axis of a shard_map "
                "around this call, nor an explicit axis of the parameters' mesh. On "
                "automatic axes the compiler adds up the gradients: leave it out."
            )


def check_whole(name: str, tree: PyTree[jax.Array], names: tuple[str, ...]) -> None:
    """Raises ``ValueError`` if arrays differ by device over one of these axes."""
    for path, x in jax.tree.leaves_with_path(tree):
        if differs := _varying(x).intersection(names):
            at = f" at {structures.path_name(path)}" if path else ""
            raise ValueError(
                f"axis_name={names!r}: {name} must be equal on all devices of these "
                f"axes, got one that varies over {', '.join(sorted(differs))}{at}."
            )


def is_equal(x: jax.Array, names: Iterable[str]) -> bool:
    """Whether the type of an array says that it is equal on all devices of axes."""
    return all(n not in _varying(x) and _is_tracked(n) for n in names)


def check_reduced(
    name: str, tree: PyTree[Leaf], names: tuple[str, ...], why: str = ""
) -> None:
    """Raises ``ValueError`` if a leaf is not summed over an axis that is not named."""
    for path, x in jax.tree.leaves_with_path(tree):
        if not isinstance(x, jax.Array):
            continue
        if axes := versions.unreduced_axes(jax.typeof(x)).difference(names):
            raise ValueError(
                f"{why}{name} is not summed over {', '.join(sorted(axes))} yet at "
                f"{structures.path_name(path)}, got {structures.describe(x)}. Sum it "
                "with jax.sharding.reshard, or pass axis_name to gradxform.accumulate, "
                "without skip_nonfinite."
            )


def as_own(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """``x`` with the type of an array that may differ on each device of these axes.

    Only ``shard_map`` has such a type; elsewhere it keeps its own.
    """
    tracked = (n for n in names if _is_bound(n) and _is_tracked(n))
    return versions.to_varying(x, [n for n in tracked if n not in _varying(x)])


def as_unreduced(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """:func:`as_own` of an array that is yet to be summed: unreduced, where typed."""
    return versions.to_unreduced(as_own(x, names), names)


def summed_over(tree: PyTree[T], names: tuple[str, ...]) -> PyTree[T]:
    """The sum over the devices of these axes, with one collective; of numbers, too."""
    tree = jax.tree.map(
        lambda x: versions.to_reduced(x) if isinstance(x, jax.Array) else x, tree
    )
    bound = tuple(filter(_is_bound, names))
    summed: PyTree[T] = jax.lax.psum(tree, bound) if bound else tree
    return summed


def every(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """Whether a bool is true on all devices of these axes: the same on all of them."""
    axes = sorted(n for n in names if n in _varying(x) or not _is_tracked(n))
    return jax.lax.pmin(x.astype(jnp.int32), axes) > 0 if axes else x


def _given_names(axis_name: AxisName) -> tuple[str, ...] | None:
    """The axes, if they are given by their names; None if specs say them."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if isinstance(names, tuple | list) and all(isinstance(n, str) for n in names):
        return tuple(names)
    return None


def _varying_axes(
    flat: list[_Named], names: tuple[str, ...], stacked: list[int]
) -> list[_Axes]:
    for name in names:
        if not _is_tracked(name):
            raise ValueError(
                f"axis_name={names!r}: axis {name!r} does not track which arrays vary "
                "over it, so a sharded leaf cannot be told from a replicated one. Use "
                "jax.shard_map with check_vma=True (its default), or give the sharding "
                f"of each leaf: axis_name={{'w': PartitionSpec({name!r}), …}}."
            )
    axes: list[_Axes] = []
    for (path, x), depth in zip(flat, stacked, strict=True):
        varying = tuple(name for name in names if name in _varying(x))
        if depth and varying:
            raise ValueError(
                f"axis_name={names!r}: {structures.path_name(path)} stacks layers, and "
                f"over {', '.join(varying)} the layers or their entries are sharded. "
                "Say which of them: axis_name={'w': PartitionSpec(None, 'x'), …}."
            )
        axes.append(((), varying))
    return axes


def _sharded_axes(
    flat: list[_Named], specs: list[object], stacked: list[int]
) -> list[_Axes]:
    axes: list[_Axes] = []
    for (path, x), spec, depth in zip(flat, specs, stacked, strict=True):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                "axis_name must be a mesh axis, several, or a prefix tree of "
                f"PartitionSpec, got {spec!r} for {structures.path_name(path)}."
            )
        for name in axes_of(spec):
            if _is_tracked(name) and name not in _varying(x):
                raise ValueError(
                    f"axis_name says {spec} at {structures.path_name(path)}, which "
                    f"does not vary over {name!r}: pass the specs that shard it."
                )
        axes.append((axes_of(spec[:depth]), axes_of(spec[depth:])))
    return axes


def axes_of(entries: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The mesh axes in a part of a PartitionSpec."""
    several = (e if isinstance(e, tuple) else (e,) for e in entries)
    return tuple(name for names in several for name in names if name is not None)


def _over(
    reduction: Callable[..., list[jax.Array]],
    leaves: Iterable[jax.Array],
    axes: list[tuple[str, ...]],
) -> list[jax.Array]:
    """Each leaf reduced over its mesh axes, by one collective for each set of axes."""
    reduced = [*leaves]
    # Not a `set`: its order may differ between processes, which must run one program.
    for names in dict.fromkeys(filter(None, axes)):
        members = [i for i, given in enumerate(axes) if given == names]
        totals = reduction([reduced[i] for i in members], names)
        for i, total in zip(members, totals, strict=True):
            reduced[i] = total
    return reduced


def _is_bound(name: str) -> bool:
    """Whether a ``shard_map``, ``pmap`` or ``vmap`` around has this axis."""
    try:
        jax.lax.axis_index(name)
    except NameError:
        return False
    return True


def _is_tracked(name: str) -> bool:
    """Whether types tell if an array varies over this axis."""
    return name in _varying(jax.lax.axis_index(name))


def _varying(x: jax.Array) -> frozenset[str]:
    return versions.varying_axes(jax.typeof(x))
