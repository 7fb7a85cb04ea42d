"""Where a new optimizer state lies, before it is made."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gradxform._checks import arguments, structures
from gradxform._devices import mesh
from gradxform._jax import jaxprs, programs, versions
from gradxform._trees.placeholders import Placeholder, owned, state_for
from gradxform._trees.types import Param, Path, PyTree, Shape

# How an array lies that is whole on each device of its parameters.
_Whole: TypeAlias = NamedSharding | SingleDeviceSharding
# Of mesh axes, in a PartitionSpec.
_Names: TypeAlias = str | tuple[str, ...] | None


def abstract_state(
    tx: optax.GradientTransformation, params: PyTree[Param]
) -> optax.OptState:
    """What ``tx.init(params)`` makes, described with shardings; no array is made.

    If ``init`` itself puts an array somewhere, as that of :func:`whole_matrices` does,
    it lies there. An axis of all others is cut as that axis of its parameter with which
    it grows:

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
    flattened                                      as the first of its axes
    of no parameter: a count, a key                whole on each device
    of several parameters: that of                 whole on each device
    ``optax.flatten``
    =============================================  ====================================

    Any other axis is not cut, and neither is the second one that grows with an axis. To
    find these axes, ``init`` is also traced with larger parameters, once for each axis.
    If a parameter has two axes of one length, the first counts as the shorter one, as
    in optax's Adafactor. If ``init`` takes no placeholder for a parameter, as with a
    comprehension over its items, it is traced a few times more, each time with half of
    the parameters larger: 10 times for 600 of them.

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
    if not isinstance(whole, NamedSharding):
        state = jax.eval_shape(tx.init, described)
        return jax.tree.map(lambda x: x.update(sharding=whole), state)
    state, said = _said(tx.init, params, whole.mesh)
    grown = [
        _shapes(tx.init, jax.tree.map(functools.partial(_larger, rank), described))
        for rank in range(max(p.ndim for p in given.values()))
    ]
    owners = _owners(tx.init, described, state, grown[0] if grown else {})

    def with_sharding(path: Path, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P()
        if path in owners:
            p = given[owners[path]]
            larger = [shapes.get(path, ()) for shapes in grown[: p.ndim]]
            axes = _axes(x.shape, larger, p.shape)
            spec = _spec(x.shape, axes, p.shape, p.sharding)
        sharding = NamedSharding(whole.mesh, spec)
        there = NamedSharding(whole.mesh, said.get(path, spec))
        is_same = there.is_equivalent_to(sharding, len(x.shape))
        return x.update(sharding=sharding if is_same else there)

    return jax.tree.map_with_path(with_sharding, state)


def _said(
    init: optax.TransformInitFn,
    params: PyTree[Param],
    devices: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> tuple[optax.OptState, dict[Path, P]]:
    """A state, and how arrays are cut that ``init`` itself puts somewhere."""
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if devices.explicit_axes:
        context = jax.sharding.use_abstract_mesh(devices.abstract_mesh)
    params = jax.tree.map(lambda p: _described(p).update(sharding=p.sharding), params)
    try:
        with context:
            closed, state = jax.make_jaxpr(init, return_shape=True)(params)
    except Exception:  # An ``init`` that knows no explicit axes may raise any.
        return jax.eval_shape(init, jax.tree.map(_described, params)), {}
    jaxpr = programs.inlined(closed).jaxpr
    puts = {x: eqn for eqn in jaxprs.all_equations(jaxpr) for x in eqn.outvars}
    found: dict[Path, P] = {}
    paths = (path for path, _ in jax.tree.leaves_with_path(state))
    for path, x in zip(paths, jaxpr.outvars, strict=True):
        eqn = puts.get(x) if jaxprs.is_variable(x) else None
        if eqn is None or jaxprs.name_of(eqn) not in versions.SAME_VALUES:
            continue
        there = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        if isinstance(there, NamedSharding):
            found[path] = there.spec
    return state, found


def _whole(params: PyTree[Param]) -> _Whole:
    """Where an array lies that is whole on each device of the parameters.

    Raises:
      ValueError: a parameter lies nowhere, or elsewhere than the first one.
    """
    flat = jax.tree.leaves_with_path(params)
    named = [(structures.path_name(path), p) for path, p in flat]
    (start, first), *others = [(name, _whole_of(name, p)) for name, p in named]
    for name, other in others:
        if other != first:
            raise ValueError(
                f"params lie apart: {_place(first)} at {start}, and "
                f"{_place(other)} at {name}. Put all parameters on one mesh, by "
                "jax.device_put. NamedSharding(mesh, PartitionSpec()) is for one that "
                "is whole on each device."
            )
    return first


def _whole_of(name: str, p: Param) -> _Whole:
    """Where an array lies that is whole on each device of this parameter."""
    sharding = getattr(p, "sharding", None)  # A traced array has none.
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, P())
    if isinstance(sharding, SingleDeviceSharding):
        return SingleDeviceSharding(*sharding.device_set)
    kind = (
        ", as it is an array of NumPy" if isinstance(p, np.ndarray | np.generic) else ""
    )
    raise ValueError(
        f"params has {structures.describe(p)} at {name}, and its sharding is "
        f"{sharding}{kind}. Nobody knows where its state lies. Outside of jit, put it "
        "on its devices by jax.device_put(x, sharding), or give a jax.ShapeDtypeStruct("
        "shape, dtype, sharding=sharding), with a NamedSharding or a "
        "SingleDeviceSharding."
    )


def _place(whole: _Whole) -> object:
    """The mesh, or the device."""
    if isinstance(whole, NamedSharding):
        return whole.mesh
    (device,) = whole.device_set
    return device


def _described(p: Param) -> jax.ShapeDtypeStruct:
    """A parameter on the device, without a sharding: it gives the types of a state."""
    return jax.ShapeDtypeStruct(p.shape, p.dtype, weak_type=p.weak_type)


def _order(shape: Shape) -> list[int]:
    """The axes by their lengths; of two with one length the first is first."""
    return sorted(range(len(shape)), key=shape.__getitem__)


def _larger(rank: int, p: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A parameter in which all axes but the ``rank`` shortest ones are twice as long.

    So the order of its axes by length stays, and lengths can still be divided by what
    they could be divided by.
    """
    shape = list(p.shape)
    for axis in _order(p.shape)[rank:]:
        shape[axis] *= 2
    return p.update(shape=shape)


def _shapes(
    init: optax.TransformInitFn, params: PyTree[jax.ShapeDtypeStruct]
) -> dict[Path, Shape]:
    """The shapes of the state of parameters of other sizes; none if there is none."""
    state = state_for(init, params)
    return {path: x.shape for path, x in jax.tree.leaves_with_path(state)}


def _owners(
    init: optax.TransformInitFn,
    params: PyTree[jax.ShapeDtypeStruct],
    state: optax.OptState,
    grown: Mapping[Path, Shape],
) -> dict[Path, Path]:
    """Which parameter a leaf of a state belongs to, for those that grow with one.

    ``init`` shows it with placeholders. A leaf that it does not show is found by its
    size: parameter number i is larger in the k-th trace if bit k of i is 1, so the
    traces in which the leaf is larger are the bits of its parameter's number.

    Args:
      init: that of the transformation.
      params: the parameters, described.
      state: their state.
      grown: the shapes of the state if all parameters are larger.
    """
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    try:
        marks = jax.tree.map_with_path(lambda path, _: Placeholder(path), params)
        found = owned(init, marks, state)
    except ValueError:
        found = {}
    flat = jax.tree.leaves_with_path(state)
    numbers = {
        path: 0
        for path, x in flat
        if path not in found and grown.get(path, x.shape) != x.shape
    }
    for bit in range((len(paths) - 1).bit_length() if numbers else 0):
        index = itertools.count()
        shapes = _shapes(
            init,
            jax.tree.map(
                lambda p, bit=bit, index=index: (
                    _larger(0, p) if next(index) >> bit & 1 else p
                ),
                params,
            ),
        )
        for path, x in flat:
            shape = shapes.get(path)
            if path in numbers and shape == grown[path]:
                numbers[path] |= 1 << bit
            elif shape != x.shape:  # It grows with several parameters.
                numbers.pop(path, None)
    return found | {path: paths[i] for path, i in numbers.items() if i < len(paths)}


def _axes(shape: Shape, larger: Sequence[Shape], of: Shape) -> list[list[int]]:
    """For each axis of an array of the state the axes with which it grows.

    Args:
      shape: its shape.
      larger: its shapes for parameters that are :func:`_larger`, for each rank.
      of: the shape of its parameter.
    """
    if any(len(x) != len(shape) for x in larger):
        # Larger parameters have another state, so lengths alone say it.
        if shape == of:
            return [[axis] for axis in range(len(of))]
        same = [[axis for axis, n in enumerate(of) if n == length] for length in shape]
        return [axes if len(axes) == 1 else [] for axes in same]
    order = _order(of)

    def grows_with(lengths: Sequence[int]) -> list[int]:
        # It grows with an axis if it grows less without that one.
        steps = itertools.pairwise(lengths)
        return [axis for axis, (n, m) in zip(order, steps, strict=True) if n != m]

    return [*map(grows_with, zip(*larger, shape, strict=True))]


def _spec(
    shape: Shape, axes: Sequence[Sequence[int]], of: Shape, sharding: NamedSharding
) -> P:
    """How an array of the state is cut.

    Args:
      shape: its shape.
      axes: for each of its axes those of the parameter with which it grows.
      of: the shape of the parameter.
      sharding: that of the parameter.
    """
    given = (*sharding.spec, *[None] * (len(of) - len(sharding.spec)))
    names: list[_Names] = []
    for length, found in zip(shape, axes, strict=True):
        name = given[min(found)] if found else None
        over = mesh.axes_of([name])
        is_free = not set(over) & set(mesh.axes_of(names))
        divides = length % math.prod(sharding.mesh.shape[n] for n in over) == 0
        names.append(name if is_free and divides else None)
    return sharding.spec if tuple(names) == given else P(*names)
