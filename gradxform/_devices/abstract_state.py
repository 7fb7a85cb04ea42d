"""Where a new optimizer state lies, before it is made."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gradxform._checks import arguments, structures
from gradxform._devices import mesh
from gradxform._jax import jaxprs, programs, versions
from gradxform._trees.placeholders import Placeholder, owned, state_for
from gradxform._trees.types import Param, Path, PyTree, Shape

_Place: TypeAlias = NamedSharding | SingleDeviceSharding


def abstract_state(
    tx: optax.GradientTransformation, params: PyTree[Param]
) -> optax.OptState:
    """What ``tx.init(params)`` makes, described with shardings; no array is made.

    An axis of the state is cut as that axis of its parameter with which it grows:

    =============================================  ====================================
    an array of the state                          lies
    =============================================  ====================================
    like its parameter, or codes of 8 bits of one  as the parameter
    with fewer axes: factors, rows, norms of       as those axes of the parameter
    layers
    with one more in front: late gradients, a      as the parameter; the one in front is
    table of workers                               not cut
    with a number for each block: scales of 8      as the parameter; if the devices do
    bits                                           not divide the blocks, this axis is
                                                   not cut
    of no parameter: a count, a key                whole on each device
    =============================================  ====================================

    To find these axes, ``init`` is also traced with larger parameters. If a parameter
    has two axes of one length, the first counts as the shorter one, as in optax's
    Adafactor. A state that ``init`` does not make parameter by parameter, as that of
    ``optax.flatten``, is whole on each device.

    Its shardings are ``out_shardings`` of ``jax.jit(tx.init)`` and of a step. A
    checkpoint is restored into it, also on another mesh.
    ``gx.on_host(gx.abstract_state(tx, params))`` has the large arrays in the host's
    memory. Without :func:`on_host` the state is on the devices, wherever the parameters
    are.

    Args:
      tx: any transformation.
      params: arrays on their devices, or ``jax.ShapeDtypeStruct`` with shardings: all
        on one mesh, of automatic or explicit axes, or all on one device.

    Returns:
      The state as ``jax.eval_shape(tx.init, params)`` gives it, of
      ``jax.ShapeDtypeStruct``, each with a ``NamedSharding`` on the mesh, or with a
      ``SingleDeviceSharding``.

    Raises:
      ValueError: a parameter has no such sharding, or lies on another mesh or device
        than the first one, with its path; or there are no parameters.
      TypeError: ``tx`` is no transformation, or a parameter no array.

    References:
      JAX, `jax.ShapeDtypeStruct
      <https://docs.jax.dev/en/latest/_autosummary/jax.ShapeDtypeStruct.html>`__.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> devices = jax.make_mesh((jax.device_count(),), ("fsdp",))
    >>> rows = NamedSharding(devices, P("fsdp"))
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 256), "float32", sharding=rows)}
    >>> tx = gx.low_bit_state(optax.adam(0.1))
    >>> state = gx.abstract_state(tx, params)
    >>> mu = state.inner_state[0].mu["w"]
    >>> mu.dtype, mu.shape, mu.sharding.spec
    (dtype('int8'), (1024, 256), P('fsdp',))
    >>> there = jax.tree.map(lambda x: x.sharding, state)
    >>> made = jax.jit(tx.init, out_shardings=there)({"w": jnp.zeros((1024, 256))})
    >>> assert made.inner_state[0].mu["w"].sharding == rows
    """
    arguments.check_transformation("tx", tx)
    structures.check_arrays(params)
    whole = _whole(params)
    given = dict(jax.tree.leaves_with_path(params))
    described = jax.tree.map(_described, params)
    state = jax.eval_shape(tx.init, described)
    larger = jax.tree.map(_larger, described)
    lengths, sizes = (
        {path: x.shape for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (larger, state_for(tx.init, larger))
    )
    owners = _owners(tx.init, described, state, list(given))

    said = (
        _said(tx.init, params, whole.mesh) if isinstance(whole, NamedSharding) else {}
    )

    def place(path: Path, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding, owner = said.get(path, whole), owners.get(path)
        if path in said:
            return x.update(sharding=sharding)
        if owner is not None and isinstance(whole, NamedSharding):
            p, shapes = given[owner], (x.shape, sizes.get(path, ()))
            spec = _spec(shapes, (p.shape, lengths[owner]), p.sharding)
            sharding = NamedSharding(whole.mesh, spec)
        return x.update(sharding=sharding)

    return jax.tree.map_with_path(place, state)


def _said(
    init: optax.TransformInitFn,
    params: PyTree[Param],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> dict[Path, NamedSharding]:
    """Where ``init`` itself puts arrays, by their paths."""
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if mesh.explicit_axes:  # Types have shardings there.
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        params = jax.tree.map(
            lambda p: _described(p).update(sharding=p.sharding), params
        )
    else:
        params = jax.tree.map(_described, params)
    try:
        with context:
            closed, state = jax.make_jaxpr(init, return_shape=True)(params)
    except Exception:  # An ``init`` that knows no explicit axes may raise any.
        return {}
    jaxpr = programs.inlined(closed).jaxpr
    puts = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    found: dict[Path, NamedSharding] = {}
    paths = (path for path, _ in jax.tree.leaves_with_path(state))
    for path, x in zip(paths, jaxpr.outvars, strict=True):
        eqn = puts.get(x) if jaxprs.is_variable(x) else None
        if eqn is None or jaxprs.name_of(eqn) not in versions.SAME_VALUES:
            continue
        there = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        if isinstance(there, NamedSharding):
            found[path] = NamedSharding(mesh, there.spec)
    return found


def _whole(params: PyTree[Param]) -> _Place:
    """Where an array lies that is whole on each device of the parameters.

    Raises:
      ValueError: a parameter lies nowhere, or elsewhere than the first one.
    """
    flat = jax.tree.leaves_with_path(params)
    named = [(structures.path_name(path), p) for path, p in flat]
    (start, first), *others = [(name, _place(name, p)) for name, p in named]
    for name, place in others:
        if place != first:
            raise ValueError(
                f"params has two places: {_words(first)} at {start}, and "
                f"{_words(place)} at {name}. Put all parameters on one mesh, by "
                "jax.device_put. NamedSharding(mesh, PartitionSpec()) is for one that "
                "is whole on each device."
            )
    return first


def _place(name: str, p: Param) -> _Place:
    """Where an array lies that is whole on each device of this parameter."""
    sharding = getattr(p, "sharding", None)  # A traced array has none.
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P())
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(*sharding.device_set)
    raise ValueError(
        f"params has {structures.describe(p)} at {name}, and its sharding is "
        f"{sharding}: the place of its state is not known. Outside of jit, put it on "
        "its devices by jax.device_put(x, sharding), or give a jax.ShapeDtypeStruct("
        "shape, dtype, sharding=sharding), with a NamedSharding or a "
        "SingleDeviceSharding."
    )


def _words(place: _Place) -> str:
    if isinstance(place, NamedSharding):
        return str(place.mesh)
    (device,) = place.device_set
    return str(device)


def _described(p: Param) -> jax.ShapeDtypeStruct:
    """A parameter on the device, without a sharding: it gives the types of a state."""
    return jax.ShapeDtypeStruct(p.shape, p.dtype, weak_type=p.weak_type)


def _larger(p: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A parameter whose axes are longer, and no two have one length.

    An axis that is longer than another one stays so. Lengths can still be divided by
    what they could be divided by.
    """
    shape = list(p.shape)
    for rank, axis in enumerate(sorted(range(p.ndim), key=p.shape.__getitem__)):
        shape[axis] *= 2 + rank
    return p.update(shape=tuple(shape))


def _owners(
    init: optax.TransformInitFn,
    params: PyTree[jax.ShapeDtypeStruct],
    state: optax.OptState,
    asked: Sequence[Path],
) -> dict[Path, Path]:
    """Which of some parameters a leaf of a state belongs to, for those that do."""

    def mark(path: Path, p: jax.ShapeDtypeStruct) -> object:
        return Placeholder(path) if path in asked else p

    try:
        return owned(init, jax.tree.map_with_path(mark, params), state)
    except ValueError:  # Of one of them or more the state is not made alone.
        halves = asked[: len(asked) // 2], asked[len(asked) // 2 :]
        found = [_owners(init, params, state, half) for half in halves if all(halves)]
        return dict(item for each in found for item in each.items())


def _spec(
    shapes: tuple[Shape, Shape], of: tuple[Shape, Shape], sharding: NamedSharding
) -> P:
    """How an array of the state is cut.

    Args:
      shapes: its shape, and that for a larger parameter.
      of: the shapes of the parameter, and of the larger one.
      sharding: that of the parameter.
    """
    if len(shapes[0]) != len(shapes[1]):  # Another state: lengths alone say it.
        shapes, of = (shapes[0],) * 2, (of[0],) * 2
    spec = (*sharding.spec, *[None] * (len(of[0]) - len(sharding.spec)))
    left, names = list(zip(*of, spec, strict=True)), []
    for length, other in zip(*shapes, strict=True):
        # The axis with these lengths; or, for a number of blocks, the next one.
        fits = [axis for axis in left if axis[:2] == (length, other)]
        fits, name = fits or left[: length != other], None
        if fits:
            left.remove(fits[0])
            name = fits[0][2]
        devices = [sharding.mesh.shape[n] for n in mesh.axes_of([name])]
        names.append(None if length % math.prod(devices) else name)
    return sharding.spec if tuple(names) == spec else P(*names)
