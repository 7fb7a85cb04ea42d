"""Arrays in the host's memory, and how a step brings them to its device.

The type of an array says which memory it lies in. JAX does not compute with an array in
the host's memory. A step brings it to the device first, or one layer of it. Nothing
here changes an array that lies on the device.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._jax import compilers, versions
from gradxform._trees import dtypes, maps
from gradxform._trees.placeholders import Placeholder, is_placeholder, owners
from gradxform._trees.types import Leaf, Path, PyTree, SparseLeaf, T

DEVICE, _HOST = jax.memory.Space.Device, jax.memory.Space.Host


def on_host(tree: T, *, min_size: int = compilers.LARGE) -> T:
    r"""Puts the large arrays of parameters, or of a state, into the host's memory.

    :func:`minimize` with ``layers`` brings one layer of them at a time to the device,
    and writes it back. So a step needs room for about two layers of the state, and of
    the parameters if they are there, too. Without ``layers``, and in
    :func:`apply_gradients`, all of them come to the device. The numbers are those of
    arrays on the device. New parameters and state lie where the given ones lie. The
    page on the host's memory says how to make a state there that is larger than the
    device, what to do on a mesh, and which limits and flags XLA has.

    Args:
      tree: arrays, such as ``params`` or ``tx.init(params)``, also under ``jax.jit``;
        or ``jax.ShapeDtypeStruct`` with shardings, for a checkpoint.
      min_size: how many entries an array must have to be moved, ≥ 1. The entries on all
        devices count. Smaller arrays stay. So do typed keys of ``jax.random``, because
        JAX gives no new key there. An array in that memory is not copied.

    Returns:
      The same tree. Shapes, dtypes and shardings stay, but for the kind of memory. It
      is ``pinned_host``, which JAX has for CPU, too. Each of several processes keeps
      its part.

    Raises:
      NotImplementedError: JAX is older than 0.10.2.
      ValueError: ``min_size`` is below 1, or a ``jax.ShapeDtypeStruct`` has no
        sharding.

    References:
      Ren et al., `ZeRO-Offload <https://arxiv.org/abs/2101.06840>`__, 2021.
      JAX, `memory spaces <https://docs.jax.dev/en/latest/201/memory-spaces.html>`__.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> tx = optax.sgd(0.1, momentum=0.9)
    >>> params = {"layers": jnp.ones((4, 8, 8))}
    >>> state = jax.jit(lambda p: gx.on_host(tx.init(p), min_size=256))(params)
    >>> def loss_fn(params, x):
    ...     x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])
    ...     return jnp.mean(x**2)
    >>> step = gx.minimize(loss_fn, tx, layers=["layers"])
    >>> params, state, loss = step(params, state, jnp.ones((2, 8)))
    >>> assert params["layers"].sharding.memory_kind == "device"
    >>> state[0].trace["layers"].sharding.memory_kind
    'pinned_host'
    """
    arguments.length("min_size", min_size, arguments.COUNTS)
    versions.check_memory_kinds("on_host")
    last: Any = ()

    def move(path: Path, x: Any) -> Any:  # Any leaf.
        nonlocal last
        dtype = dtypes.dtype_of(x)
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        if np.size(x) < min_size or is_key or is_on_host(x):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            if x.sharding is None:
                raise ValueError(
                    f"on_host got {x} at {structures.path_name(path)}, which lies "
                    "nowhere: give it a sharding."
                )
            return x.update(sharding=x.sharding.with_memory_kind("pinned_host"))
        traced = isinstance(x, jax.core.Tracer)
        last = _moved_after(x, last) if traced else jax.device_put(x, _HOST)
        return last

    return jax.tree.map_with_path(move, tree)


def _moved_after(x: jax.Array, last: jax.Array | tuple[()]) -> jax.Array:
    """An array in the host's memory; it is moved after the last one.

    Otherwise the compiler would make all arrays before it moves one. In a loop over
    layers it makes zeros layer by layer. On CPU it needs no loop: it makes an array
    where it is to lie.
    """

    def whole(x: jax.Array, *last: jax.Array) -> jax.Array:
        return jax.device_put(compilers.barrier((x, last))[0], _HOST)

    def by_layer(x: jax.Array, *last: jax.Array) -> jax.Array:
        each, _ = compilers.barrier((jnp.arange(len(x)), last))
        row = functools.partial(jax.lax.dynamic_index_in_dim, x, keepdims=False)
        return jax.lax.map(lambda i: jax.device_put(row(i), _HOST), each)

    chosen = whole
    if can_slice(x, 0) and not jax.typeof(x).sharding.spec[0]:
        elsewhere = by_layer
        if moves_whole_on_tpu(x):
            elsewhere = compilers.on_tpu(whole, by_layer)
        chosen = compilers.on_cpu(whole, elsewhere)
    return chosen(x, *jax.tree.leaves(last))


def is_on_host(x: object) -> TypeGuard[jax.Array]:
    """Whether an array lies in the host's memory."""
    if not isinstance(x, jax.Array):
        return False
    return jax.typeof(x).memory_space == _HOST


def check_served(name: str, tree: PyTree[Leaf]) -> None:
    """Raises ``ValueError`` if a server would get an array in the host's memory."""
    for path, x in jax.tree.leaves_with_path(tree):
        if is_on_host(x):
            raise ValueError(
                "a server has all its arrays on its devices, but "
                f"{name} has {x.dtype}{list(x.shape)} in the host's memory at "
                f"{structures.path_name(path)}. Bring it to the device: "
                "jax.device_put(x, jax.memory.Space.Device). Or train with "
                "gradxform.minimize, which takes such arrays."
            )


def to_device(tree: PyTree[T]) -> PyTree[T]:
    """The same tree on the device."""
    if not any(map(is_on_host, jax.tree.leaves(tree))):
        return tree  # A sparse leaf has to stay the same one.

    def bring(x: Any) -> Any:  # Any leaf.
        return jax.device_put(x, DEVICE) if is_on_host(x) else x

    return jax.tree.map(bring, tree)


def undifferentiated(x: jax.Array, name: str) -> jax.Array:
    """``x``; if it is on the host, a derivative by it is a ``ValueError``.

    A gradient by layers would be added up on the device, and JAX's error says so only
    in its own words.
    """
    if not is_on_host(x):
        return x

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    @same.defjvp
    def derivative(*_: object) -> NoReturn:
        raise ValueError(
            f"evaluate computes no gradient by {name!r}, whose layers are in the "
            "host's memory. gradxform.minimize(loss, tx, layers=...) trains such "
            "parameters, a layer at a time. Or bring them to the device: "
            "jax.device_put(x, jax.memory.Space.Device)."
        )

    return same(x)


def moves_whole_on_tpu(x: jax.Array) -> bool:
    """Whether the compiler for TPU takes no layers of it from the host, or to it."""
    return x.dtype.itemsize == 1 and not compilers.slices_bytes()


def to_device_after(
    updates: optax.Updates, init: optax.TransformInitFn, state: optax.OptState
) -> optax.OptState:
    """A state on the device: that of each parameter comes after its gradient."""
    if not any(map(is_on_host, jax.tree.leaves(state))):
        return state
    grads = dict(maps.leaves_with_path(maps.stored(updates)))
    marks = maps.map_with_path(lambda path, _: Placeholder(path), updates)
    try:
        marks = owners(init, marks, state)
    except ValueError:
        return to_device(state)

    def bring(mark: object, part: PyTree[T]) -> PyTree[T]:
        if isinstance(mark, Placeholder):
            part, _ = compilers.barrier((part, grads[mark.path]))
        return to_device(part)

    return jax.tree.map(bring, marks, state, is_leaf=is_placeholder)


def to_memory_of(new: PyTree[T], old: PyTree[Leaf]) -> PyTree[T]:
    """``new``, each leaf in the memory of the ``old`` one."""
    if not any(map(is_on_host, jax.tree.leaves(old))):
        return new

    def put(old: Leaf, new: Any) -> Any:  # Any leaf.
        if isinstance(old, SparseLeaf):
            return maps.with_values(new, put(old.values, new.values))
        there = is_on_host(old) and not is_on_host(new)
        return jax.device_put(new, _HOST) if there else new

    return maps.map_leaves(put, old, new)


def can_slice(x: jax.Array, axis: int) -> bool:
    """Whether a compiler can take layers along ``axis`` from the host.

    That for TPU fails on layers that are no matrices. It copies the whole array twice
    if its numbers have 8 or 16 bits, and layers are along one of the last two axes.
    """
    layer = (*x.shape[:axis], *x.shape[axis + 1 :])
    is_matrix = sum(n >= 8 for n in layer) > 1
    return is_matrix and (x.dtype.itemsize >= 4 or axis < x.ndim - 2)
