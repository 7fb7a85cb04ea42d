"""Updates of parameters in half precision, rounded up or down at random."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._numbers import constants
from gradxform._rows import boundary
from gradxform._transforms import half
from gradxform._trees import maps

_KEYS = "threefry2x32"  # Whatever JAX's default is: the same seed, the same numbers.


class RoundStochasticallyState(NamedTuple):
    """State of :func:`round_stochastically`.

    Attributes:
      key: uint32[2], made from the seed, with each ``jax_default_prng_impl`` the same.
      count: int32[], the updates so far.
    """

    key: jax.Array
    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.


def round_stochastically(
    seed: jax.typing.ArrayLike,
) -> optax.GradientTransformationExtraArgs:
    r"""Rounds new parameters in half precision up or down at random; the last link.

    Between two neighbours ``a < b`` in half precision, with :math:`x = w + u` in
    float32:

    .. math:: w' = \begin{cases}
          b & \text{with probability } (x - a) / (b - a) \\
          a & \text{otherwise}
        \end{cases}

    So ``w'`` is ``x`` on average, and small updates are not lost as in rounding to the
    nearest. The state has no array of the model's size. Put it last in a chain.
    The new update is :math:`w' - w` in float32, with which ``optax.apply_updates`` and
    :func:`apply_updates` give exactly ``w'``.

    The random numbers depend on the seed, on the number of the step, on the number of
    the leaf and on the place in it. They are the same on every sharding. A number of
    half precision, inf and NaN stay as they are. A finite number becomes inf only if
    the nearest number is inf. Each random number has 16 bits, of a hash of its place.
    So it cannot be inside of :func:`lazy`, which shows it no place: put it behind.

    Args:
      seed: an integer.

    Returns:
      A transformation with state :class:`RoundStochasticallyState`. Updates of
      parameters in float32 stay as they are. If the gradient of a table is
      :class:`IndexedSlices`, only the touched rows are rounded.

    Raises:
      ValueError: ``params`` is missing in an update.
      TypeError: ``seed`` is no integer; a parameter has integers, or less than 16 bits;
        the state is that of another transformation; or updates and parameters differ in
        structure or shape.

    References:
      Zamirai et al., `Revisiting bfloat16 training
      <https://arxiv.org/abs/2010.06192>`__, 2020.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(2**-10), gx.round_stochastically(seed=0))
    >>> w = jnp.ones(1000, jnp.bfloat16)  # The next number below 1 is 1 - 2⁻⁸.
    >>> new, state = gx.apply_gradients(tx, jnp.ones_like(w), tx.init(w), w)
    >>> moved = jnp.mean(new == 1 - 2**-8)
    >>> assert abs(moved - 0.25) < 0.05 and jnp.all((new == 1) | (new == 1 - 2**-8))
    """
    arguments.check_scalar("seed", seed, integer=True)

    def init_fn(params: optax.Params) -> RoundStochasticallyState:
        half.check_precision("round_stochastically", params)
        key = jax.random.key_data(jax.random.key(seed, impl=_KEYS))
        key += constants.zero(params, jnp.uint32)  # On the devices of the parameters.
        return RoundStochasticallyState(key, constants.zero(params, jnp.int32))

    def update_fn(
        updates: optax.Updates,
        state: RoundStochasticallyState,
        params: optax.Params | None = None,
        **_: object,
    ) -> tuple[optax.Updates, RoundStochasticallyState]:
        params = structures.params_like("round_stochastically", updates, params)
        structures.check_own_kind(state, RoundStochasticallyState)
        step_key = jax.random.wrap_key_data(state.key, impl=_KEYS)
        step_key = jax.random.fold_in(step_key, state.count)
        leaves, structure = maps.flatten(updates)
        indices = jax.tree.unflatten(structure, range(len(leaves)))

        def rounded(u: jax.Array, p: jax.Array, index: int) -> tuple[jax.Array]:
            if not half.is_half(p):
                return (u,)
            key = jax.random.fold_in(step_key, index)
            before = half.as_float32(p)
            x = before + u.astype(jnp.float32)
            threshold = _random(jax.random.key_data(key), p.shape)
            return (half.difference(half.rounded_at(threshold, x, p.dtype), before),)

        (updates,) = boundary.map_step(rounded, updates, [], indices, reads=[params])
        count = optax.safe_increment(state.count)
        return updates, RoundStochasticallyState(state.key, count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _random(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers of 16 bits in [0, 1), as float32, made from a key and the place of each.

    ``jax.random.bits`` is a loop for the CPU compiler, which writes each of its parts
    to memory. This is a part of every pass that reads it.
    """
    x = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        x = x * np.uint32(length % 2**32) + place
    for word in key.astype(jnp.uint32):
        # Two rounds of multiply and shift. If one bit differs, each round turns half of
        # all bits.
        x = x ^ word
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> shift)) * np.uint32(factor)
        x = x ^ (x >> 16)
    return (x >> 16).astype(jnp.float32) * 2.0**-16
