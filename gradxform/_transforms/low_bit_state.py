"""The large arrays of any optimizer's state in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from gradxform._trees import checks, dtypes
from gradxform._trees.compilers import apart
from gradxform._trees.extra_args import accepted_kwargs
from gradxform._trees.types import Path

_SHORTEST = 8  # A scale takes as much as 4 codes.


class LowBitArray(NamedTuple):
    """An array of :class:`LowBitState`.

    Attributes:
      codes: int8, in the shape of the array.
      scales: like the array, but along one axis a number for each block: its largest
        size, negative if no entry of the block is. Then the codes have no sign.
    """

    codes: jax.Array
    scales: jax.Array


_Held: TypeAlias = jax.Array | LowBitArray


class LowBitState(NamedTuple):
    """State of :func:`low_bit_state`.

    Attributes:
      inner_state: the state of ``inner``, with a :class:`LowBitArray` for each large
        array.
    """

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
    r"""Keeps the large arrays of any optimizer's state in 8 bits.

    Each array is divided into blocks along its last axis but one, or, if
    ``block_axis=-1`` or if it has only one, along the last. A block has one scale
    :math:`m = \max \lvert s \rvert`, and for each entry ``s`` a code of 8 bits:

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
    Everything else stays as it is. ``inner`` gets its state in its own dtypes.
    If that axis is divided among devices, no block is on two of them. Under ``jit``
    that holds for explicit axes; for others the blocks have to fit.

    A NaN or an infinite entry makes all of its block NaN or infinite.

    For row-sparse gradients put :func:`lazy` around it, with ``block_axis=-1`` and
    ``min_size=1``: then the touched rows alone are read and written. Otherwise a step
    reads whole tables.

    Args:
      inner: any transformation.
      bits: 8, the only number so far.
      block_size: how many entries have one scale, in [8, 65536].
      min_size: how many entries an array must have, ≥ 1.
      block_axis: -2 or -1. On TPU blocks along the last axis cost copies.
      keep: arrays that stay as they are: their paths in the state of ``inner``, such as
        ``"0/nu/embedding"``, or a function that takes a path and says whether.

    Returns:
      A transformation with state :class:`LowBitState`. An array takes a quarter of
      float32's bytes, and 4 bytes for each block.

    Raises:
      ValueError: an argument is out of its range; ``keep`` names no array of the state.
      TypeError: ``inner`` is no transformation, a number is no integer, or the state is
        that of another transformation.

    References:
      Dettmers et al., `8-bit optimizers via block-wise quantization
      <https://arxiv.org/abs/2110.02861>`__, 2022.
      Gonzalez Ortiz et al., `FlashOptim <https://arxiv.org/abs/2602.23349>`__, 2026.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros((64, 128)), "b": jnp.zeros(128)}
    >>> tx = gx.low_bit_state(optax.trace(0.9))
    >>> grads = {"w": jnp.full((64, 128), 2.0), "b": jnp.ones(128)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> trace = state.inner_state.trace
    >>> trace["w"].codes.dtype, trace["w"].scales.shape, trace["b"].dtype
    (dtype('int8'), (1, 128), dtype('float32'))
    >>> assert jnp.allclose(tx.update(grads, state)[0]["w"], 2 + 0.9 * 2)
    """
    checks.transformation("inner", inner)
    checks.length("bits", bits, "[8, 8]")
    block_size = checks.length("block_size", block_size, f"[{_SHORTEST}, 65536]")
    min_size = checks.length("min_size", min_size, checks.COUNTS)
    checks.length("block_axis", block_axis, "[-2, -1]")
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> LowBitState:
        state = inner.init(params)
        paths = [path for path, _ in jax.tree.leaves_with_path(state)]
        is_kept = checks.names("keep", keep, "leaves of the state", paths)

        def held(path: Path, x: jax.Array) -> _Held:
            axis = max(np.ndim(x) + block_axis, 0)
            small = np.size(x) < min_size or np.shape(x)[axis:] < (_SHORTEST,)
            is_real = jnp.issubdtype(dtypes.dtype_of(x), jnp.floating)
            if small or not is_real or is_kept(checks.path_str(path)):
                return x
            return _encoded(x, axis, _blocks(x, axis, block_size))

        return LowBitState(jax.tree.map_with_path(held, state))

    def update_fn(
        updates: optax.Updates,
        state: LowBitState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, LowBitState]:
        checks.own_kind(state, LowBitState)

        def decode(x: _Held) -> jax.Array:
            return _decoded(x, _axis(x)) if isinstance(x, LowBitArray) else x

        def encode(old: _Held, x: jax.Array) -> _Held:
            if not isinstance(old, LowBitArray):
                return x
            return _encoded(x, _axis(old), old.scales.shape[_axis(old)])

        wide = jax.tree.map(decode, state.inner_state, is_leaf=_is_low)
        extra = accepted_kwargs(inner, extra)
        updates, new = inner.update(updates, wide, params, **extra)
        new = jax.tree.map(encode, state.inner_state, new, is_leaf=_is_low)
        return updates, LowBitState(new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_low(node: object) -> bool:
    return isinstance(node, LowBitArray)


def _axis(x: LowBitArray) -> int:
    """The axis along which an array has blocks, of 8 entries or more."""
    return int(np.argmin(np.equal(x.codes.shape, x.scales.shape)))


def _blocks(x: jax.Array, axis: int, block_size: int) -> int:
    """The number of blocks along an axis; each is on one device."""
    length, parts = x.shape[axis], _parts(x, axis)
    own = length // parts
    fewest = -(-own // block_size)
    # Of one length, if that makes them at most half as long.
    counts = (n for n in range(fewest, 2 * fewest + 1) if own % n == 0)
    return parts * next(counts, fewest)


def _parts(x: jax.Array, axis: int) -> int:
    """The number of parts into which devices divide an axis."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    if not isinstance(sharding, NamedSharding):
        return 1
    return x.shape[axis] // sharding.shard_shape(x.shape)[axis]


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


def _encoded(x: jax.Array, axis: int, n: int) -> LowBitArray:
    """8 bits for each entry, and a scale for each of ``n`` blocks."""
    length, dtype = x.shape[axis], x.dtype
    x = dtypes.widen(x)
    # A maximum may drop NaN on CPU, but not inf. On CPU it needs an array in memory.
    x = apart(_in_blocks(jnp.where(x != x, jnp.inf, x), axis, n))
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
    return LowBitArray(_joined(codes, axis, length), _joined(scales, axis, n))


def _decoded(node: LowBitArray, axis: int) -> jax.Array:
    scale = jnp.expand_dims(node.scales, axis + 1)
    codes = _in_blocks(node.codes, axis, node.scales.shape[axis]).astype(jnp.float32)
    root = (codes + 128) / 255
    signed = codes * jnp.abs(codes) / 127**2
    part = jnp.where(scale < 0, (root * root) * (root * root), signed)
    x = part * jnp.abs(scale).astype(jnp.float32)
    return _joined(x, axis, node.codes.shape[axis]).astype(node.scales.dtype)
