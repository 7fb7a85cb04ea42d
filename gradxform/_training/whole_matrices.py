"""Whole matrices on a mesh: each device does a part of what an update does with them.

The update is traced once, uncut. Its cores run on whole matrices, equal ones together.
Everything else is evaluated as it is, where it lies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gradxform._checks import arguments, structures
from gradxform._jax import compilers, jaxprs, versions
from gradxform._slices import rules
from gradxform._slices.rules import Along, shape_of
from gradxform._training import cores, exchange
from gradxform._training.cores import Core, Matrices, NoCoreError
from gradxform._training.exchange import Cut, Names
from gradxform._trees.extra_args import with_any_extra_args
from gradxform._trees.types import Path, Prefix, PyTree

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Var

AnyMesh: TypeAlias = Mesh | AbstractMesh

_UNKNOWN = (
    "whole_matrices needs shardings here: where arrays are traced, automatic axes do "
    "not say where they lie. Pass whole_matrices(inner, shardings) with those of the "
    "parameters: jax.tree.map(lambda p: p.sharding, params)."
)


class Layout(NamedTuple):
    """Where the leaves of a step lie.

    Attributes:
      mesh: on which devices.
      names: the mesh axes that cut each axis of a leaf, by the number of the leaf.
      types: the shardings of leaves whose types say them.
    """

    mesh: AnyMesh
    names: Mapping[int, Names]
    types: Mapping[int, NamedSharding]


def whole_matrices(
    inner: optax.GradientTransformation,
    shardings: Prefix[jax.sharding.Sharding] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """X."""
    arguments.check_transformation("inner", inner)
    versions.before_tracing()
    inner = with_any_extra_args(inner)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        args = updates, params, state, extra
        layout = _layout(args, shardings)
        if layout is not None and layout.mesh.size == 1:
            return inner.update(updates, state, params, **extra)
        step = Step.of(inner, args)
        if not step.update.parts:
            return inner.update(updates, state, params, **extra)
        if layout is None:
            raise ValueError(_UNKNOWN)
        return step.on(layout)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


class Group(NamedTuple):
    """Cores that do the same with equal matrices, which are cut alike."""

    matrices: Matrices
    cores: list[Core]
    cuts: list[Cut]


@dataclasses.dataclass(frozen=True)
class Step:
    """An update that is traced.

    Attributes:
      leaves: the leaves of its arguments.
      given: the numbers of those that are arrays; others are constants.
      closed: the update, as a function of these arrays.
      structure: that of the results.
      replaces: for each result the number of the leaf that it replaces, or -1.
    """

    leaves: Sequence[Any]
    given: Sequence[int]
    closed: ClosedJaxpr
    update: cores.Update
    structure: Any
    replaces: Sequence[int]

    @classmethod
    def of(cls, inner: optax.GradientTransformationExtraArgs, args: Any) -> Step:
        """Traces ``inner``, as if no array was cut."""
        leaves, treedef = jax.tree.flatten(args)
        given = [n for n, x in enumerate(leaves) if _is_array(x)]

        def call(arrays: Sequence[jax.Array]) -> Any:
            filled = [*leaves]
            for n, x in zip(given, arrays, strict=True):
                filled[n] = x
            updates, params, state, extra = jax.tree.unflatten(treedef, filled)
            return inner.update(updates, state, params, **extra)

        types = [_uncut(leaves[n]) for n in given]
        with jax.disable_jit(False):  # Otherwise it would unroll loops.
            closed, results = jax.make_jaxpr(call, return_shape=True)(types)
            closed = jaxprs.inlined(closed)
        structure = jax.tree.structure(results)
        updates, params, state, _ = args
        start, end = (len(jax.tree.leaves(x)) for x in (updates, (updates, params)))
        replaces = [*range(start), *range(end, end + len(jax.tree.leaves(state)))]
        if structure != jax.tree.structure((updates, state)):
            replaces = [-1] * structure.num_leaves
        update = cores.Update(closed.jaxpr)
        return cls(leaves, given, closed, update, structure, replaces)

    def on(self, layout: Layout) -> tuple[optax.Updates, optax.OptState]:
        """The results of the step on a mesh."""
        arrays = [self.leaves[n] for n in self.given]
        found = [self.update.core(part) for part in self.update.parts]
        names = self._names(found, layout)
        groups = _groups(found, names)
        if layout.types:
            results = self._typed(arrays, groups, names, layout)
        else:
            results = self.run(arrays, groups, layout.mesh)
        return jax.tree.unflatten(self.structure, results)

    def _names(self, found: Sequence[Core], layout: Layout) -> dict[Var, Names]:
        """The mesh axes that cut each variable, as far as they are known."""
        jaxpr, made = self.closed.jaxpr, {core.makes: core.reads[0] for core in found}
        pairs = zip(jaxpr.invars, self.given, strict=True)
        names = {x: layout.names[n] for x, n in pairs if n in layout.names}
        for eqn in jaxpr.eqns:
            names.update(_names_after(eqn, names, layout.mesh))
            for x in made.keys() & {*eqn.outvars}:
                names[x] = names.get(made[x], ())
        return names

    def _typed(
        self,
        arrays: Sequence[jax.Array],
        groups: Sequence[Group],
        names: Mapping[Var, Names],
        layout: Layout,
    ) -> list[jax.Array]:
        """The results on explicit axes, which are automatic inside.

        A result has the type of the argument that it replaces. What depends on no array
        of the mesh stays outside.
        """
        jaxpr, mesh = self.closed.jaxpr, layout.mesh
        pairs = [*zip(jaxpr.invars, self.given, arrays, strict=True)]
        typed = {x for x, n, _ in pairs if n in layout.types}
        for eqn in jaxpr.eqns:
            if jaxprs.among(eqn.invars, typed):
                typed.update(eqn.outvars)
        outside = [eqn for eqn in jaxpr.eqns if typed.isdisjoint(eqn.outvars)]
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env |= {x: y for x, _, y in pairs}
        jaxprs.advance(jaxprs.needed(outside, jaxpr.outvars), env)
        inside = [k for k, x in enumerate(jaxpr.outvars) if x in typed]

        def run(*arrays: jax.Array) -> list[jax.Array]:
            results = self.run(arrays, groups, jax.sharding.get_abstract_mesh())
            return [results[k] for k in inside]

        shardings = []
        for k in inside:
            x, like = jaxpr.outvars[k], layout.types.get(self.replaces[k])
            if like is None or self.leaves[self.replaces[k]].shape != shape_of(x):
                like = NamedSharding(mesh, Cut((), names.get(x, ())).spec)
            shardings.append(like)
        placed = jax.sharding.auto_axes(
            run, axes=mesh.explicit_axes, out_sharding=shardings
        )(*arrays)
        results = dict(zip(inside, placed, strict=True))
        return [
            results[k] if k in results else jaxprs.read(env, [x])[0]
            for k, x in enumerate(jaxpr.outvars)
        ]

    def run(
        self, arrays: Sequence[jax.Array], groups: Sequence[Group], mesh: AnyMesh
    ) -> list[jax.Array]:
        """The results, with groups one after another."""
        jaxpr = self.closed.jaxpr
        env = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        env |= zip(jaxpr.invars, arrays, strict=True)
        made = {core.makes for group in groups for core in group.cores}
        reads = [x for group in groups for core in group.cores for x in core.reads]
        others = [eqn for eqn in jaxpr.eqns if made.isdisjoint(eqn.outvars)]
        eqns = jaxprs.needed(others, [*jaxpr.outvars, *reads])
        later = set(made)
        for eqn in eqns:
            if jaxprs.among(eqn.invars, later):
                later.update(eqn.outvars)
        jaxprs.advance([eqn for eqn in eqns if later.isdisjoint(eqn.outvars)], env)
        last: list[jax.Array] = []
        for group in groups:
            last = _run_group(group, env, last, mesh)
        jaxprs.advance([eqn for eqn in eqns if not later.isdisjoint(eqn.outvars)], env)
        return jaxprs.read(env, jaxpr.outvars)


def _run_group(
    group: Group, env: dict[Var, Any], last: list[jax.Array], mesh: AnyMesh
) -> list[jax.Array]:
    """Adds the results of some cores to the values; they wait for the last ones."""
    arrays = [env[core.reads[0]] for core in group.cores]
    constants = [env[x] for x in group.cores[0].reads[1:]]
    arrays, _ = compilers.barrier((arrays, last))
    on_whole = exchange.on_whole(group.matrices.results, tuple(group.cuts), mesh)
    results = on_whole(arrays, constants)
    env.update((core.makes, y) for core, y in zip(group.cores, results, strict=True))
    return results


def _groups(found: Sequence[Core], names: Mapping[Var, Names]) -> list[Group]:
    """Equal cores."""
    groups: dict[object, Group] = {}
    for core in found:
        of_core = cores.matrices(core)
        x, *constants = core.reads
        cut = Cut(of_core.axes, names.get(x) or ((),) * len(shape_of(x)))
        program = cores.text(of_core.program)
        key = program, of_core.axes, cut.of_matrix, cut.of_batch, *constants
        group = groups.setdefault(key, Group(of_core, [], []))
        group.cores.append(core)
        group.cuts.append(cut)
    return [*groups.values()]


def _names_after(eqn: Any, names: Mapping[Var, Names], mesh: AnyMesh) -> dict[Var, Names]:
    """The mesh axes that cut the results of an equation, as far as they are known."""
    found = {x: [()] * len(shape_of(x)) for x in eqn.outvars}
    for k, x in jaxprs.among(eqn.invars, names).items():
        for axis, cutting in enumerate(names[x]):
            if not cutting:
                continue
            number = int(np.prod([mesh.shape[name] for name in cutting]))
            along = Along(axis, shape_of(x)[axis] // number)
            after = rules.after(jaxprs.name_of(eqn), eqn, k, along, number)
            if after is None or after.axis < 0:
                continue
            for of_result in found.values():
                used = {name for each in of_result for name in each}
                if after.axis < len(of_result) and used.isdisjoint(cutting):
                    of_result[after.axis] = cutting
    return {x: tuple(y) for x, y in found.items() if any(y)}


def _layout(args: Any, shardings: Any) -> Layout | None:
    """Where the leaves of a step lie; None if nothing says it."""
    given = _given(args, shardings) if shardings is not None else {}
    leaves = jax.tree.leaves_with_path(args)
    found: dict[int, NamedSharding] = {}
    types: dict[int, NamedSharding] = {}
    is_alone = True
    for n, (path, x) in enumerate(leaves):
        if not _is_array(x):
            continue
        sharding = jax.typeof(x).sharding
        if sharding.mesh.explicit_axes:
            types[n] = found[n] = sharding
        elif path[1:] in given and path[0].idx < 2:
            found[n] = given[path[1:]]
        elif isinstance(x, jax.core.Tracer):
            is_alone = False
        elif isinstance(x, jax.Array):
            found[n] = x.sharding
    meshes = [x.mesh for x in found.values() if isinstance(x, NamedSharding)]
    if not meshes:
        if is_alone or jax.device_count() == 1 or found:
            return Layout(Mesh(np.array(jax.devices()[:1]), "x"), {}, {})
        return None
    mesh = meshes[0]
    names = {
        n: _names(x, np.ndim(leaves[n][1]), mesh)
        for n, x in found.items()
        if isinstance(x, NamedSharding)
    }
    return Layout(mesh, names, types)


def _given(args: Any, shardings: Any) -> dict[Path, jax.sharding.Sharding]:
    updates, params, *_ = args
    tree, name = (updates, "updates") if params is None else (params, "params")
    placed = structures.prefix("shardings", shardings, tree, name)
    return dict(jax.tree.leaves_with_path(placed))


def _names(sharding: NamedSharding, ndim: int, mesh: AnyMesh) -> Names:
    """The mesh axes of more than one device that cut each axis."""
    entries = [*sharding.spec, *[None] * ndim][:ndim]
    return tuple(
        tuple(
            name
            for name in (x if isinstance(x, tuple) else (x,))
            if isinstance(name, str) and mesh.shape[name] > 1
        )
        for x in entries
    )


def _is_array(x: object) -> bool:
    """Whether a leaf is traced; others are constants."""
    is_one = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_one and x.dtype != jax.dtypes.float0


def _uncut(x: Any) -> jax.ShapeDtypeStruct:
    t = jax.typeof(x)
    return jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type)
