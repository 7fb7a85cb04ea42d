"""The large arrays of an optimizer's state in 8 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._checks import arguments, structures
from gradxform._devices import mesh
from gradxform._jax import compilers, jaxprs
from gradxform._numbers import constants
from gradxform._trees import dtypes, maps
from gradxform._trees.maps import Field
from gradxform._trees.states import Mark, mark_of
from gradxform._trees.types import Leaf, PyTree, T

_SHORTEST = 8  # A scale takes as much as 4 codes.

# Those of an array in 8 bits; a masked node for a leaf that is not.
_Scales: TypeAlias = jax.Array | optax.MaskedNode
_Encoded: TypeAlias = tuple[jax.Array, jax.Array]  # Scales and codes.


@Mark(hints={"scales": "give low_bit_state block_axis=-1, or name it in keep"})
class LowBitState(NamedTuple):
    """State of :func:`low_bit_state`.

    Attributes:
      scales: a tuple with an entry for each leaf of ``inner_state``. For an array in 8
        bits it is like the array, but along one axis a number for each block: its
        largest size, negative if no entry of the block is. Then the codes have no sign.
        For any other leaf it is a masked node.
      inner_state: the state of ``inner``, with codes, int8, for each array in 8 bits.
    """

    scales: tuple[jax.Array | optax.MaskedNode, ...] | jax.Array
    inner_state: optax.OptState


def low_bit_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    block_size: int = 128,
    min_size: int = 4096,
    block_axis: Literal[-1, -2] = -2,
    keep: Sequence[str] | Callable[[str], bool] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the large arrays of an optimizer's state in 8 bits.

    Each array is divided into blocks along its last axis but one, or, if
    ``block_axis=-1`` or if it has only one, along the last. An array of two axes is
    divided along the last one, too, if the first one has fewer than 4 times
    ``block_size`` entries, and the last one at least 32. Vectors of stacked layers
    are such an array. If there are more layers, :func:`minimize` with ``layers`` needs
    ``block_axis=-1``. A block has one scale :math:`m = \max \lvert s \rvert`, and for
    each entry ``s`` a code of 8 bits:

    .. math:: c = \begin{cases}
          round(255 \cdot (s / m)^{1/4}) & \text{if no entry of the block is negative}
            \\
          sign(s) \cdot round(127 \cdot (\lvert s \rvert / m)^{1/2})
            & \text{otherwise}
        \end{cases}

    The roots give small entries more of the codes. A second moment keeps the root, so
    an Adam's step has an error of 0.4 % where the moment is the largest of its block,
    and of 4 % where it is 10⁻⁴ of that. A positive entry in a block without a negative
    one never becomes 0, so no step is divided by a second moment that was lost.

    Which arrays are large is found in the state that ``inner.init`` makes: those of
    floating point with at least ``min_size`` entries, and at least 8 along that axis.
    Everything else stays as it is. ``inner`` gets its state in the dtypes that it had
    after ``init``, and it keeps them.

    8 bits suit averages of gradients and of their squares. They do not suit a copy of
    the parameters, or a sum of all gradients: there they round a step away. Such state
    of optax and of this library stays as it is: that of ``schedule_free``, the weights
    and sums of ``madgrad``, ``cocob``, ``prodigy`` and of others, the linear term of
    :func:`ftrl`. Name that of your own transformations in ``keep``.

    The number of blocks follows from the length of the axis alone. Blocks are equal
    if that takes fewer than twice the number that ``block_size`` needs. Of such numbers
    it is the one with the most factors of two. So a state has the same shapes on every
    mesh and under ``jit``, and its checkpoint fits any number of devices. Codes lie
    where the array would lie. If the number of blocks can be divided among the devices
    along that axis, each has its own scales, else all of them. In ``jax.shard_map``
    each device has blocks of its own: call ``init`` there, too. Under ``jax.jit`` the
    arrays of a new state are encoded one after another, so there is room for one of
    them in floating point, not for all.

    A NaN or an infinite entry makes all of its block NaN or infinite.

    For row-sparse gradients put :func:`lazy` around it, with ``block_axis=-1`` and
    ``min_size=1``: then the touched rows alone are read and written. Otherwise a step
    reads whole tables.

    Args:
      inner: any transformation.
      bits: 8, the only number so far.
      block_size: how many entries have one scale, in [8, 65536].
      min_size: how many entries an array must have, in [1, 2³¹ - 1].
      block_axis: -2 or -1. On TPU blocks along the last axis cost copies.
      keep: arrays that stay as they are: their paths in the state of ``inner``, such as
        ``"0/nu/embedding"``, or a function that takes a path and says whether.

    Returns:
      A transformation with state :class:`LowBitState`. An array takes a quarter of
      float32's bytes, and 4 bytes for each block. ``optax.tree.map_params`` takes codes
      for parameters. It calls ``transform_non_params`` once, for all scales together.

    Raises:
      ValueError: an argument is out of its range; ``keep`` names no array of the state.
      TypeError: ``inner`` is no transformation, a number is no integer, or the state is
        that of another transformation.

    References:
      Dettmers et al., `8-bit optimizers via block-wise quantization
      <https://arxiv.org/abs/2110.02861>`__, 2022.
      Gonzalez Ortiz et al., `FlashOptim <https://arxiv.org/abs/2602.23349>`__, 2026.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros((512, 128)), "b": jnp.zeros(128)}
    >>> tx = gx.low_bit_state(optax.trace(0.9))
    >>> grads = {"w": jnp.full((512, 128), 2.0), "b": jnp.ones(128)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> trace = state.inner_state.trace
    >>> trace["w"].dtype, trace["b"].dtype
    (dtype('int8'), dtype('float32'))
    >>> [scales.shape for scales in jax.tree.leaves(state.scales)]
    [(4, 128)]
    >>> assert jnp.allclose(tx.update(grads, state)[0]["w"], 2 + 0.9 * 2)
    """
    inner = arguments.transformation("inner", inner)
    arguments.length("bits", bits, "[8, 8]")
    block_size = arguments.length("block_size", block_size, f"[{_SHORTEST}, 65536]")
    min_size = arguments.length("min_size", min_size, arguments.COUNTS)
    arguments.length("block_axis", block_axis, "[-2, -1]")

    def init_fn(params: optax.Params) -> LowBitState:
        structures.check_leaves(params)
        state = inner.init(params)
        if not maps.leaves(params):
            # In `optax.tree.map_params` one node without leaves is all parameters, and
            # the state has it where it is like them. Scales are not: one leaf is all.
            return LowBitState(jnp.zeros(()), state)
        paths = [path for path, _ in maps.leaves_with_path(state)]
        is_kept = structures.names("keep", keep, "leaves of the state", paths)
        names = map(structures.path_str, paths)

        def axis_for(name: str, x: Any, fields: tuple[Field, ...]) -> int | None:
            if any(name in mark_of(kind).kept for kind, name in fields):
                return None
            if isinstance(x, optax.MaskedNode) or is_kept(name):
                return None
            return _axis_for(x, block_size, min_size, block_axis)

        entries = zip(names, maps.leaves(state), maps.fields(state), strict=True)
        axes = [axis_for(*entry) for entry in entries]
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
            return _traced_state(inner.init, params, state, axes, block_size)
        encoded = [
            _encoded_at_once(x, axis, _blocks(np.shape(x)[axis], block_size))
            if axis is not None
            else _as_is(x)
            for x, axis in zip(maps.leaves(state), axes, strict=True)
        ]
        return _state(maps.structure(state), encoded)

    def update_fn(
        updates: optax.Updates,
        state: LowBitState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, LowBitState]:
        structures.check_own_kind(state, LowBitState)
        if hasattr(state.scales, "dtype"):  # There are no parameters.
            updates, new = inner.update(updates, state.inner_state, params, **extra)
            return updates, LowBitState(state.scales, new)
        old, structure = maps.flatten(state.inner_state)
        pairs = zip(state.scales, old, strict=True)
        with structures.own_state(state, init_fn, params):
            wide = jax.tree.unflatten(structure, [_decoded(*pair) for pair in pairs])
            updates, new = inner.update(updates, wide, params, **extra)
        up_to = structure.flatten_up_to  # type: ignore[attr-defined]
        entries = zip(state.scales, old, up_to(new), strict=True)
        return updates, _state(structure, [_again(*entry) for entry in entries])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _state(structure: Any, entries: list[tuple[_Scales, Leaf]]) -> LowBitState:
    scales, leaves = (tuple(entry[i] for entry in entries) for i in range(2))
    return LowBitState(scales, jax.tree.unflatten(structure, leaves))


def _as_is(x: Leaf) -> tuple[optax.MaskedNode, Leaf]:
    """A leaf without scales. A masked node may say which leaf it replaces."""
    return (x if isinstance(x, optax.MaskedNode) else optax.MaskedNode()), x


def _traced_state(
    init: optax.TransformInitFn,
    params: optax.Params,
    state: optax.OptState,
    axes: list[int | None],
    block_size: int,
) -> LowBitState:
    """The first state, whose arrays are made and encoded one after another.

    Arrays with layers are made and encoded layer by layer. Otherwise the compiler for
    CPU would make all of them in floating point before it encodes one: 1 N. On TPU and
    GPU the codes of a constant are one, too: they take no memory if their layers go to
    the host, on v5e 0.3 N with an Adam's state.
    """
    program = jax.make_jaxpr(init)(params)
    # With an argument in it, `jit` knows the devices.
    last, end = constants.zero(params, jnp.float32), 0
    entries: list[tuple[_Scales, Leaf]] = []
    for x, axis in zip(maps.leaves(state), axes, strict=True):
        end += len(jax.tree.leaves(x))
        if axis is None:
            entries.append(_as_is(x))
            continue
        n, there = _blocks(x.shape[axis], block_size), jax.typeof(x).sharding
        result = program.jaxpr.outvars[end - 1]
        value = jaxprs.constant_off_cpu(program.jaxpr, result)
        encode: Callable[[jax.Array], _Encoded]
        if not axis or x.ndim < 3 or there.spec[0]:
            encode = functools.partial(_encoded_after, x, axis, n)
        else:
            make, used = jaxprs.result(program, end - 1, jax.tree.leaves(params))
            encode = functools.partial(
                _encoded_by_layer, make, used, len(x), axis - 1, n
            )
        if there.mesh.manual_axes:  # Axes may differ.
            entry = _encoded(x, axis, n, x.dtype)
        elif value is None or not _is_plain(value) or there.mesh.explicit_axes:
            entry = encode(last)
        else:
            constant = functools.partial(_encoded_number, value, x, axis, n)
            entry = compilers.on_cpu(encode, constant)(last)
        last = entry[0]
        entries.append(entry)
    return _state(maps.structure(state), entries)


def _encoded_after(x: jax.Array, axis: int, n: int, last: jax.Array) -> _Encoded:
    """:func:`_encoded`, once ``last`` is known."""
    after = jnp.where(constants.never(jnp.sum(last)), 1, x)
    return _encoded(after, axis, n, x.dtype)


def _encoded_by_layer(
    make: Callable[..., jax.Array],
    used: list[Any],
    length: int,
    axis: int,
    n: int,
    last: jax.Array,
) -> _Encoded:
    """:func:`_encoded` for each layer of ``make(used)``, once ``last`` is known.

    After the first barrier in the loop the compiler does not make all layers in front
    of it. After the second one it does not compute the codes of a constant entry by
    entry: minutes for layers of 16 million entries.
    """

    def layer(i: jax.Array) -> _Encoded:
        at, args = compilers.barrier((i, used))
        x = jax.lax.dynamic_index_in_dim(make(args), at, keepdims=False)
        x = compilers.barrier(x)
        return _encoded(x, axis, n, x.dtype)

    each, _ = compilers.barrier((jnp.arange(length), last))
    return jax.lax.map(layer, each)


def _is_plain(value: float) -> bool:
    """Whether each platform encodes this number in the same way."""
    return value == 0 or 1e-30 < abs(value) < 1e30


def _encoded_number(
    value: float, x: jax.Array, axis: int, n: int, _: jax.Array
) -> _Encoded:
    """:func:`_encoded` for ``x``, whose entries are all ``value``.

    Each one is the largest of its block.
    """
    scales = jnp.full((*x.shape[:axis], n, *x.shape[axis + 1 :]), 0 - value, x.dtype)
    return scales, jnp.full(x.shape, 127 * np.sign(value), jnp.int8)


def _axis_for(x: Any, block_size: int, min_size: int, block_axis: int) -> int | None:
    """The axis for the blocks of an array, of any leaf; None if it stays as it is."""
    shape = np.shape(x)
    axis = max(len(shape) + block_axis, 0)
    if len(shape) == 2 and shape[0] < 4 * block_size and shape[1] >= 4 * _SHORTEST:
        axis = 1  # A row, perhaps a layer, has blocks of its own, a scale for 32 codes.
    small = np.size(x) < min_size or not shape or shape[axis] < _SHORTEST
    is_real = not small and jnp.issubdtype(dtypes.dtype_of(x), jnp.floating)
    return axis if is_real else None


def _blocks(length: int, block_size: int) -> int:
    """The number of blocks along an axis, which follows from its length alone.

    They are of one length, if that takes fewer than twice as many as needed. Of such
    numbers the one with the most factors of two suits most meshes.
    """
    fewest = -(-length // block_size)
    counts = np.arange(fewest, 2 * fewest)
    counts = counts[length % counts == 0]
    return int(max(counts, key=lambda n: n & -n, default=fewest))


def _axis(codes: jax.Array, scales: jax.Array) -> int:
    """The axis along which an array has blocks, of 2 entries or more."""
    return int(np.argmin(np.equal(codes.shape, scales.shape)))


def _again(scales: _Scales, old: Any, x: Any) -> tuple[_Scales, Leaf]:  # Any leaves.
    """The new array in the types of the old one."""
    if not isinstance(scales, optax.MaskedNode):
        axis = _axis(old, scales)
        return _encoded(x, axis, scales.shape[axis], scales.dtype)
    if maps.has_gradient(old) and maps.has_gradient(x):
        before, now = map(dtypes.dtype_of, (old, x))
        if before != now and jnp.issubdtype(now, jnp.floating):
            x = jnp.asarray(x, before)
    return scales, x


@functools.partial(jax.jit, static_argnums=(1, 2))
def _encoded_at_once(x: jax.Array, axis: int, n: int) -> _Encoded:
    """:func:`_encoded` in one program, not one for each of its operations."""
    return _encoded(x, axis, n, x.dtype)


def _encoded(x: jax.Array, axis: int, n: int, dtype: Any) -> _Encoded:
    """A scale for each of ``n`` blocks, in a dtype, and 8 bits for each entry."""
    encode = functools.partial(_encode, axis=axis, n=n, dtype=dtype)
    there = jax.typeof(x).sharding
    spec = [*there.spec, *[None] * (x.ndim - len(there.spec))]
    if n % math.prod(there.mesh.shape[name] for name in mesh.axes_of([spec[axis]])):
        spec[axis] = None  # A block is on several devices.
    return _placed(encode, (there.update(spec=P(*spec)), there))(x)


def _decoded(scales: _Scales, codes: Any) -> Any:  # Any leaf.
    if isinstance(scales, optax.MaskedNode):
        return codes
    decode = functools.partial(_decode, axis=_axis(codes, scales))
    return _placed(decode, jax.typeof(codes).sharding)(scales, codes)


def _placed(f: Callable[..., T], places: PyTree[NamedSharding]) -> Callable[..., T]:
    """``f``, with its results there. On explicit axes blocks may not fit the devices.

    Then JAX has no type for an array in blocks. The compiler needs none.
    """
    axes = jax.tree.leaves(places)[0].mesh.explicit_axes
    return jax.sharding.auto_axes(f, axes=axes, out_sharding=places) if axes else f


def _in_blocks(x: jax.Array, axis: int, n: int) -> jax.Array:
    """An array with one more axis: ``n`` blocks, the last one filled with 0."""
    size = -(-x.shape[axis] // n)
    missing = n * size - x.shape[axis]
    if missing:
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
    return x.reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :])


def _joined(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Blocks as one axis again."""
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    if x.shape[axis] != length:
        x = jax.lax.slice_in_dim(x, 0, length, axis=axis)
    return x


def _encode(x: jax.Array, *, axis: int, n: int, dtype: Any) -> _Encoded:
    length, x = x.shape[axis], dtypes.widen(x)
    # A maximum may drop NaN on CPU, but not inf. On CPU it needs an array in memory.
    x = compilers.unshared(_in_blocks(jnp.where(x != x, jnp.inf, x), axis, n))
    low, high = (f(x, axis=axis + 1, keepdims=True) for f in (jnp.min, jnp.max))
    most = jnp.maximum(high, -low)
    unsigned = (low >= 0) & (most > 0)
    # |x| / max|x|
    part = jnp.minimum(jnp.abs(x) / jnp.where(most > 0, most, 1), 1)
    root = jnp.sqrt(part)
    # No positive number becomes 0.
    above = jnp.maximum(jnp.round(255 * jnp.sqrt(root)), jnp.where(x > 0, 1, 0.0)) - 128
    signed = jnp.round(127 * root) * jnp.sign(x)
    codes = jnp.where(unsigned, above, signed).astype(jnp.int8)
    scales = jnp.where(unsigned, -most, most).astype(dtype)
    return _joined(scales, axis, n), _joined(codes, axis, length)


def _decode(scales: jax.Array, codes: jax.Array, *, axis: int) -> jax.Array:
    length, n = codes.shape[axis], scales.shape[axis]
    scale = dtypes.widen(jnp.expand_dims(scales, axis + 1))
    codes = _in_blocks(codes, axis, n).astype(scale.dtype)
    root = (codes + 128) / 255
    signed = codes * jnp.abs(codes) / 127**2
    part = jnp.where(scale < 0, (root * root) * (root * root), signed)
    return _joined(part * jnp.abs(scale), axis, length).astype(scales.dtype)
