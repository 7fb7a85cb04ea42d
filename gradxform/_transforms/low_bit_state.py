"""The large arrays of any optimizer's state in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from gradxform._trees import checks, dtypes
from gradxform._trees.extra_args import accepted_kwargs

_SHORTEST = 8  # A scale takes as much as 4 codes.


class LowBitArray(NamedTuple):
    """An array of :class:`LowBitState`.

    Attributes:
      codes: int8, in the shape of the array.
      scales: like the array, but along the last axis one number for each block: its
        largest size, negative if no entry of the block is. Then the codes have no sign.
    """

    codes: jax.Array
    scales: jax.Array


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
    keep: Sequence[str] | Callable[[str], bool] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the large arrays of any optimizer's state in 8 bits.

    Each array is divided into blocks along its last axis. A block has one scale
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
    floating point with at least ``min_size`` entries, and at least 8 along the last
    axis. Everything else stays as it is. ``inner`` gets its state in its own dtypes.
    If the last axis is divided among devices, no block is on two of them. Under ``jit``
    that holds for explicit axes; for others the blocks have to fit.

    A NaN or an infinite entry makes all of its block NaN.

    For row-sparse gradients put :func:`lazy` around it: then the touched rows alone are
    read and written. Otherwise a step reads whole tables.

    Args:
      inner: any transformation.
      bits: 8, the only number so far.
      block_size: how many entries have one scale, in [8, 65536].
      min_size: how many entries an array must have, ≥ 1.
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
    >>> tx = gx.low_bit_state(optax.scale_by_adam())
    >>> grads = {"w": jnp.full((64, 128), 2.0), "b": jnp.ones(128)}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> mu = state.inner_state.mu
    >>> mu["w"].codes.dtype, mu["w"].scales.shape, mu["b"].dtype
    (dtype('int8'), (64, 1), dtype('float32'))
    >>> assert jnp.allclose(updates["w"], 1)
    """
    checks.transformation("inner", inner)
    if bits != 8:
        raise ValueError(f"bits must be 8, got {bits!r}.")
    block_size = checks.length("block_size", block_size, f"[{_SHORTEST}, 65536]")
    min_size = checks.length("min_size", min_size, checks.COUNTS)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> LowBitState:
        state = inner.init(params)
        flat, structure = jax.tree.flatten_with_path(state)
        names = [checks.path_str(path) for path, _ in flat]
        is_kept = keep if callable(keep) else _named(keep, names)

        def held(name: str, x: jax.Array) -> jax.Array | LowBitArray:
            small = np.size(x) < min_size or np.shape(x)[-1:] < (_SHORTEST,)
            if (
                small
                or is_kept(name)
                or not jnp.issubdtype(dtypes.dtype_of(x), jnp.floating)
            ):
                return x
            return _encoded(x, _blocks(x, block_size))

        leaves = [held(name, x) for name, (_, x) in zip(names, flat, strict=True)]
        return LowBitState(jax.tree.unflatten(structure, leaves))

    def update_fn(
        updates: optax.Updates,
        state: LowBitState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, LowBitState]:
        if not isinstance(state, LowBitState):
            raise TypeError(
                f"state must be that of gradxform.low_bit_state, got {type(state)}. "
                "Pass what its init or the last step returned."
            )
        held = state.inner_state
        wide = jax.tree.map(_decoded, held, is_leaf=_is_low)
        extra = accepted_kwargs(inner, extra)
        updates, new = inner.update(updates, wide, params, **extra)
        new = jax.tree.map(
            lambda old, x: _encoded(x, old.scales.shape[-1]) if _is_low(old) else x,
            held,
            new,
            is_leaf=_is_low,
        )
        return updates, LowBitState(new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_low(node: object) -> bool:
    return isinstance(node, LowBitArray)


def _named(keep: Sequence[str], names: list[str]) -> Callable[[str], bool]:
    for name in keep:
        if name not in names:
            raise ValueError(
                f"keep must name leaves of the state, got {name!r}; there are "
                f"{', '.join(map(repr, names))}."
            )
    return keep.__contains__


def _blocks(x: jax.Array, block_size: int) -> int:
    """The number of blocks along the last axis; each is on one device."""
    length, parts = x.shape[-1], _parts(x)
    own = length // parts
    fewest = -(-own // block_size)
    # Of one length, if that makes them at most half as long.
    counts = (n for n in range(fewest, 2 * fewest + 1) if own % n == 0)
    return parts * next(counts, fewest)


def _parts(x: jax.Array) -> int:
    """The number of parts into which devices divide the last axis."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    if not isinstance(sharding, NamedSharding):
        return 1
    return x.shape[-1] // sharding.shard_shape(x.shape)[-1]


def _in_blocks(x: jax.Array, n: int) -> jax.Array:
    """An array with one more axis: blocks of the last one, the last filled with 0."""
    *rest, length = x.shape
    size = -(-length // n)
    if n * size != length:
        x = jnp.pad(x, [(0, 0)] * len(rest) + [(0, n * size - length)])
    return x.reshape(*rest, n, size)


def _joined(x: jax.Array, length: int) -> jax.Array:
    *rest, n, size = x.shape
    return x.reshape(*rest, n * size)[..., :length]


def _encoded(x: jax.Array, n: int) -> LowBitArray:
    """8 bits for each entry, and a scale for each of ``n`` blocks."""
    length, dtype = x.shape[-1], x.dtype
    x = _in_blocks(dtypes.widen(x), n)
    size = jnp.abs(x)
    most = jnp.max(size, axis=-1, keepdims=True)
    unsigned = (jnp.min(x, axis=-1, keepdims=True) >= 0) & (most > 0)
    scale = most.astype(dtype)
    # |x| / max|x|
    part = jnp.minimum(size / jnp.where(most > 0, most, 1), 1)
    root = jnp.sqrt(part)
    # No positive number becomes 0.
    least = (x > 0).astype(x.dtype)
    above = jnp.maximum(jnp.round(255 * jnp.sqrt(root)), least) - 128
    signed = jnp.round(127 * root) * jnp.sign(x)
    codes = jnp.where(unsigned, above, signed).astype(jnp.int8)
    scale = jnp.where(unsigned, -scale, scale)
    return LowBitArray(_joined(codes, length), scale[..., 0])


def _decoded(node: jax.Array | LowBitArray) -> jax.Array:
    if not isinstance(node, LowBitArray):
        return node
    scale = node.scales[..., None]
    codes = _in_blocks(node.codes, node.scales.shape[-1]).astype(jnp.float32)
    root = (codes + 128) / 255
    signed = codes * jnp.abs(codes) / 127**2
    part = jnp.where(scale < 0, (root * root) * (root * root), signed)
    x = part * jnp.abs(scale).astype(jnp.float32)
    return _joined(x, node.codes.shape[-1]).astype(node.scales.dtype)
