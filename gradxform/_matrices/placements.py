"""Where the leaves of a step lie on a mesh: types say it, arrays, or the user."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from gradxform._checks import structures
from gradxform._devices.abstract_state import abstract_state
from gradxform._trees.placeholders import Placeholder, owned
from gradxform._trees.types import Path, Prefix, PyTree

AnyMesh: TypeAlias = Mesh | AbstractMesh
# For each axis of an array the mesh axes of several devices that cut it.
Names: TypeAlias = tuple[tuple[str, ...], ...]
# Updates, parameters, state and extra arguments of a step.
Args: TypeAlias = tuple[
    optax.Updates, optax.Params | None, optax.OptState, dict[str, object]
]


class Placements(NamedTuple):
    """Where the leaves of a step lie.

    Attributes:
      mesh: on which devices; None if nothing says it.
      names: what cuts a leaf, by its index.
      likely: the same for leaves of the state if nothing says it. It traces ``init``.
      types: the shardings of leaves whose types say them.
      known: the leaves whose types say it, or arrays that are there.
      is_one_device: whether all leaves lie on one device, and no type says on which.
    """

    mesh: AnyMesh | None
    names: Mapping[int, Names]
    likely: Callable[[], Mapping[int, Names]]
    types: Mapping[int, NamedSharding]
    known: Collection[int] = ()
    is_one_device: bool = False


def found(
    init: optax.TransformInitFn,
    args: Args,
    shardings: Prefix[jax.sharding.Sharding] | None,
) -> Placements:
    """Where the leaves of a step lie.

    Where nobody says where a leaf of the state lies, it is as ``abstract_state`` says
    for ``init``.

    Raises:
      TypeError: ``shardings`` are not those of the parameters.
      ValueError: they do not fit the parameters, or are on several meshes.
    """
    updates, params, state, _ = args
    name, tree = ("updates", updates) if params is None else ("params", params)
    given = _given(name, tree, shardings)
    types: dict[int, NamedSharding] = {}
    places: dict[int, NamedSharding] = {}
    unsaid: dict[int, Path] = {}
    is_unknown, known = False, set[int]()
    for n, (path, x) in enumerate(jax.tree.leaves_with_path(args)):
        if not is_array(x):
            continue
        sharding: Any = jax.typeof(x).sharding
        if not isinstance(x, jax.core.Tracer) or sharding.mesh.explicit_axes:
            known.add(n)
        if sharding.mesh.explicit_axes:
            types[n] = sharding
        in_updates_or_params = path[0] in (jax.tree_util.SequenceKey(k) for k in (0, 1))
        if in_updates_or_params and path[1:] in given:
            sharding = given[path[1:]]
        elif n in types:
            others = set(sharding.mesh.axis_names).difference(
                sharding.mesh.explicit_axes
            )
            is_unknown |= any(sharding.mesh.shape[name] > 1 for name in others)
        elif isinstance(x, jax.core.Tracer):
            is_unknown |= in_updates_or_params
            unsaid[n] = path
            continue
        elif isinstance(x, jax.Array):
            sharding = x.sharding
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            places[n] = sharding
    meshes = [x.mesh for x in (*types.values(), *places.values())]
    if (is_unknown and not given) or not meshes:
        context = jax.sharding.get_abstract_mesh()
        count = jax.device_count() if context.empty else context.size
        is_one = count == 1 or not is_unknown or given != {}
        return Placements(None, {}, dict, types, is_one_device=is_one)
    sizes = meshes[0].shape
    ndims = [np.ndim(x) for x in jax.tree.leaves(args)]

    def names(found: Mapping[int, NamedSharding]) -> dict[int, Names]:
        on_mesh = {n: x for n, x in found.items() if x.mesh.shape == sizes}
        return {n: _names(x, ndims[n]) for n, x in on_mesh.items()}

    @functools.cache
    def likely() -> dict[int, Names]:
        found = _likely(init, tree, state, given)
        return names({n: found[path] for n, path in unsaid.items() if path in found})

    is_one = meshes[0].size == 1 and not types
    cuts = names(places)
    return Placements(meshes[0], cuts, likely, types, known, is_one)


def _given(
    name: str, tree: optax.Params, shardings: Prefix[jax.sharding.Sharding] | None
) -> dict[Path, jax.sharding.Sharding]:
    """The sharding of each parameter that the user gives, by its path."""
    placed = structures.prefix("shardings", shardings, tree, name)
    found = dict(jax.tree.leaves_with_path(placed))
    shapes = {path: np.shape(x) for path, x in jax.tree.leaves_with_path(tree)}
    first: NamedSharding | None = None
    for path, x in found.items():
        at = f"shardings at {structures.path_name(path)}"
        if isinstance(x, SingleDeviceSharding):
            continue
        if not isinstance(x, NamedSharding):
            raise TypeError(
                f"{at} must be a NamedSharding, got {x!r}: pass "
                "jax.tree.map(lambda p: p.sharding, params)."
            )
        first = first or x
        if x.mesh != first.mesh:
            raise ValueError(f"{at} are on another mesh than others: {x}, {first}.")
        shape = shapes.get(path, ())
        if len(x.spec) > len(shape):
            raise ValueError(f"{at} have more axes than its shape {list(shape)}: {x}.")
        try:
            x.shard_shape(shape)
        except ValueError as error:
            raise ValueError(f"{at} do not fit its shape: {error}") from error
    return found


def _likely(
    init: optax.TransformInitFn,
    tree: optax.Params,
    state: optax.OptState,
    given: Mapping[Path, jax.sharding.Sharding],
) -> dict[Path, NamedSharding]:
    """Where leaves of a state lie if those of parameters are given, by their paths.

    If it lies elsewhere, that costs traffic, and no number changes.
    """
    if not given or not all(isinstance(x, NamedSharding) for x in given.values()):
        return {}

    def described(path: Path, x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=given[path])

    tree = jax.tree.map_with_path(described, tree)
    tx = optax.GradientTransformation(init, optax.identity().update)

    def asked(
        params: PyTree[object], like: Mapping[Path, Path]
    ) -> dict[Path, jax.ShapeDtypeStruct]:
        """The description of each leaf of the state, or of the one that it is like."""
        known: dict[Path, jax.ShapeDtypeStruct]
        known = dict(jax.tree.leaves_with_path(abstract_state(tx, params)))
        flat = jax.tree.leaves_with_path(state)
        of = {path: like.get(path, path) for path, _ in flat}
        found = {path: known[one] for path, one in of.items() if one in known}
        shapes = [getattr(x, "shape", None) for x in found.values()]
        return found if shapes == [np.shape(x) for _, x in flat] else {}

    try:
        found = asked(*_of_each_kind(init, tree, state))
    except Exception:  # An ``init`` that takes no placeholder may raise any.
        found = {}
    found = found or asked(tree, {})
    start = (jax.tree_util.SequenceKey(2),)
    return {(*start, *path): x.sharding for path, x in found.items()}


def _of_each_kind(
    init: optax.TransformInitFn,
    params: PyTree[jax.ShapeDtypeStruct],
    state: optax.OptState,
) -> tuple[PyTree[object], dict[Path, Path]]:
    """One of equal parameters, and for leaves of the state those of this one.

    Equal ones lie alike, and have states of the same types in the same places. A trace
    of ``init`` for all of them would take as long as one of an update.

    Raises:
      ValueError: ``init`` does not show whose state a leaf is.
    """
    flat, leaves = jax.tree.leaves_with_path(params), jax.tree.leaves_with_path(state)
    marks = jax.tree.map_with_path(lambda path, _: Placeholder(path), params)
    owner = owned(init, marks, state)
    of: dict[Path, list[tuple[Path, jax.Array]]] = {path: [] for path, _ in flat}
    for path, x in leaves:
        if path in owner:
            of[owner[path]].append((path, x))
    first: dict[Hashable, Path] = {}
    like: dict[Path, Path] = {}
    for path, p in flat:
        states = tuple(
            (tuple(key for key in mine if key not in path), np.shape(x), x.dtype)
            for mine, x in of[path]
        )
        one = first.setdefault((p.shape, p.dtype, p.sharding, states), path)
        pairs = zip(of[path], of[one], strict=True)
        like.update((mine, other) for (mine, _), (other, _) in pairs)
    few = {*first.values()}
    return jax.tree.map_with_path(
        lambda path, p: p if path in few else Placeholder(path), params
    ), like


def _names(sharding: NamedSharding, ndim: int) -> Names:
    sizes = sharding.mesh.shape
    cuts = getattr(sharding.spec, "partitions", sharding.spec)  # JAX 0.7 has no such.
    entries = [*cuts, *[None] * ndim][:ndim]
    several = (x if isinstance(x, tuple) else (x,) for x in entries)
    return tuple(
        tuple(n for n in names if isinstance(n, str) and sizes[n] > 1)
        for names in several
    )


def spec_of(names: Sequence[Sequence[str]]) -> PartitionSpec:
    """The same for JAX."""
    return PartitionSpec(*(tuple(each) or None for each in names))


def is_array(x: object) -> bool:
    """Whether a leaf is traced; others are constants."""
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        return False
    return x.dtype != jax.dtypes.float0
