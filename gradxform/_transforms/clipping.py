"""Gradient clipping: by the global norm, and by the norm of each leaf."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments
from gradxform._devices import host
from gradxform._devices.mesh import AxisName
from gradxform._jax.compilers import barrier_after, narrow
from gradxform._numbers import arithmetic, constants, norms
from gradxform._numbers.norms import Layers, StackedAxes
from gradxform._rows import boundary
from gradxform._trees import dtypes, maps
from gradxform._trees.extra_args import with_any_extra_args
from gradxform._trees.links import stateless
from gradxform._trees.types import Leaf, PyTree


def global_norm(tree: PyTree[Leaf], *, axis_name: AxisName = None) -> jax.Array:
    r"""The Euclidean norm of all entries of a tree.

    .. math:: \lVert t \rVert = \sqrt{\textstyle\sum_i \lvert t_i \rvert^2}

    Args:
      tree: arrays of any shape and of any floating or complex dtype; ``None`` counts as
        nothing.
      axis_name: mesh axes over which leaves may be sharded, inside ``jax.shard_map``;
        elsewhere pass nothing. A leaf that does not vary over an axis is replicated
        there and counts once. In two cases pass a prefix tree of ``PartitionSpec``, as
        for ``shard_map``, to say over which axes each leaf is sharded: if JAX does not
        track the axes (``check_vma=False``, ``pmap``), or if stacked layers are
        sharded.

    Returns:
      A scalar, float32 (float64 if the tree holds doubles). The squares are summed in
      that precision for any dtype of the leaves. In float32, the squares of entries
      above 1e19 overflow, and entries below 1e-19 count as 0. The derivative at an
      all-zero tree is 0.

    Raises:
      ValueError: ``axis_name`` leaves open which leaves are sharded, or contradicts
        their types.

    References:
      ``tf.linalg.global_norm``, ``optax.global_norm``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> gx.global_norm({"w": jnp.ones((300, 300), jnp.float16), "b": None})
    Array(300., dtype=float32)
    """
    with jax.transfer_guard_host_to_device("allow"):
        tree = norms.alone(boundary.summed_rows(host.to_device(tree)))
        _, total = norms.squared_norms(tree, axis_name=axis_name)
        return arithmetic.safe_sqrt(total)


class ClipByGlobalNormState(NamedTuple):
    """State of :func:`clip_by_global_norm`.

    Attributes:
      global_norm: float32[], the last update's norm before clipping.
    """

    global_norm: jax.Array


def clip_by_global_norm(
    max_norm: jax.typing.ArrayLike, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Scales all updates by one factor so that their global norm is at most max_norm.

    .. math::

        g \leftarrow g \cdot \begin{cases}
          \text{max\_norm} / \lVert g \rVert & \lVert g \rVert > \text{max\_norm} \\
          1 & \text{otherwise}
        \end{cases}

    An update inside the ball comes out bit-identical (except subnormal float32, which
    XLA flushes to 0 in any arithmetic on CPU and TPU). The derivative through the clip
    is finite everywhere, at zero gradients too.

    A norm that is not finite makes every entry NaN, as in TensorFlow. Finite entries
    have an infinite norm, too, if the square of one overflows; in float32 it does above
    1e19. ``optax.apply_if_finite`` looks at its input and not at its output, so the
    clip belongs in front: ``optax.chain(clip_by_global_norm(c),
    optax.apply_if_finite(rest, n))`` skips every such step.

    The norm before clipping stays in the state: ``optax.tree.get(state,
    "global_norm")``. If a chain clips twice, ask the state of one link,
    ``optax.tree.get(state[0], "global_norm")``; the state of ``optax.named_chain`` is a
    dict.

    One pass reads the gradients for the norm. The scaling is one multiplication by a
    scalar, which the compiler fuses into the elementwise work that comes next, such as
    :func:`adagrad` or ``optax.adamw``: no clipped copy of the gradients is made (except
    in float16 on CPU, where rounding keeps it from being fused). The norm needs all
    gradients. So a program that computes them as well holds all of them at once, and
    nothing beside them. A transformation with norms of its own reads the gradients once
    more. For :func:`novograd` and row-wise :func:`adagrad` use their argument
    ``global_clipnorm`` instead: it saves that pass, and on CPU the copy that XLA makes
    for the second norm.

    Args:
      max_norm: the largest norm let through, ≥ 0, in the units of the gradients.
      axis_name: as in :func:`global_norm`.

    Extra arguments of update:
      use_norm: a norm computed elsewhere, which replaces that of the updates; optional.

    Returns:
      A transformation with state :class:`ClipByGlobalNormState`. Updates keep their
      shapes and dtypes.

    Raises:
      ValueError: ``max_norm`` is negative or NaN.
      TypeError: ``use_norm`` is not a real scalar.

    References:
      Pascanu et al., `On the difficulty of training recurrent neural networks
      <https://arxiv.org/abs/1211.5063>`__, 2013.
      ``tf.clip_by_global_norm``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.clip_by_global_norm(2.5)
    >>> grads = {"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> updates
    {'b': Array([2.], dtype=float32), 'w': Array([1.5, 0. ], dtype=float32)}
    >>> state
    ClipByGlobalNormState(global_norm=Array(5., dtype=float32))
    >>> twice = gx.adagrad(0.1, global_clipnorm=0.5)  # clips what is clipped to 2.5
    >>> tx = optax.named_chain(("all", tx), ("again", twice))
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> optax.tree.get(state["again"], "global_norm")
    Array(2.5, dtype=float32)
    """
    max_norm = arguments.in_range("max_norm", max_norm, "[0, inf]")

    def init_fn(params: optax.Params) -> ClipByGlobalNormState:
        return _no_norm(params)

    def update_fn(
        updates: optax.Updates,
        state: ClipByGlobalNormState,
        params: optax.Params | None = None,
        *,
        use_norm: jax.typing.ArrayLike | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, ClipByGlobalNormState]:
        del state, params, extra
        updates = boundary.summed_rows(updates)
        if use_norm is not None:
            arguments.check_scalar("use_norm", use_norm)
        else:
            use_norm = global_norm(updates, axis_name=axis_name)
        factor = factor_to(use_norm, max_norm)
        updates = maps.map_updates(lambda g: clipped(g, factor), updates)
        return updates, _state(use_norm)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def clip_by_norm(
    max_norm: jax.typing.ArrayLike, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each leaf on its own so that its norm is at most max_norm.

    .. math:: g_l \leftarrow g_l \cdot \min(1, \text{max\_norm} / \lVert g_l \rVert)

    This is :func:`clip_by_global_norm` leaf by leaf: a leaf inside the ball comes out
    bit-identical, a leaf whose norm is not finite becomes NaN, and a zero leaf stays
    zero.

    Args:
      max_norm: the largest norm of a leaf let through, ≥ 0.
      axis_name: as in :func:`global_norm`.

    Returns:
      A transformation without state. Updates keep their shapes and dtypes.

    Raises:
      ValueError: ``max_norm`` is negative or NaN.

    References:
      ``tf.clip_by_norm``; the argument ``clipnorm`` of Keras optimizers.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.clip_by_norm(2.5)
    >>> grads = {"w": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'b': Array([0.5], dtype=float32), 'w': Array([1.5, 2. ], dtype=float32)}
    """
    max_norm = arguments.in_range("max_norm", max_norm, "[0, inf]")

    def each_clipped(updates: optax.Updates, **_: object) -> optax.Updates:
        updates = boundary.summed_rows(updates)
        squares = norms.squared_norms(updates, axis_name=axis_name)[0]
        return maps.map_updates(clipped, updates, _factors(squares, max_norm))

    return stateless(each_clipped)


def keras_clip(
    inner: optax.GradientTransformation,
    *,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
    sums_of: Literal["layers", "rows"] | None = None,
    **limits: jax.typing.ArrayLike | None,
) -> optax.GradientTransformation:
    """Keras's clip arguments in front of ``inner``; without a clip it stands alone.

    Keras's ``clipnorm``, ``clipvalue`` and ``global_clipnorm`` are the ``limits``.

    An ``inner`` that needs sums of squares itself, ``sums_of`` layers or of rows, need
    not read the gradients again. Where the clip has them, it receives those of the
    clipped gradients as ``clip_sums``, an extra argument: 7 N instead of 10 N for
    NovoGrad, and 4 N instead of 7 N for row-wise Adagrad.
    """
    arguments.check_at_most_one(**limits)
    for name, limit in limits.items():
        if limit is None:
            continue
        most = arguments.in_range(name, limit, "[0, inf]")
        if name == "clipvalue":
            return optax.chain(_clip_by_value(most), inner)
        if sums_of is not None:
            return _clip_with_sums(
                inner,
                most,
                by_layer=name == "clipnorm",
                row_wise=sums_of == "rows",
                axis_name=axis_name,
                stacked_axes=stacked_axes,
            )
        clip = clip_by_norm if name == "clipnorm" else clip_by_global_norm
        return optax.chain(clip(most, axis_name=axis_name), inner)
    return inner


def _clip_by_value(most: jax.typing.ArrayLike) -> optax.GradientTransformationExtraArgs:
    def clamped(g: jax.Array) -> jax.Array:
        limit = dtypes.widen(jnp.asarray(most, g.dtype))
        return narrow(jnp.clip(dtypes.widen(g), -limit, limit), g.dtype)

    def each_clamped(updates: optax.Updates, **_: object) -> optax.Updates:
        return maps.map_updates(clamped, boundary.summed_rows(updates))

    return stateless(each_clamped)


# The state of the clip, and the state of the transformation after it.
_States: TypeAlias = tuple[ClipByGlobalNormState | optax.EmptyState, optax.OptState]


def _clip_with_sums(
    inner: optax.GradientTransformation,
    max_norm: jax.typing.ArrayLike,
    *,
    by_layer: bool,
    row_wise: bool,
    axis_name: AxisName,
    stacked_axes: StackedAxes,
) -> optax.GradientTransformationExtraArgs:
    inner = with_any_extra_args(inner)

    def init_fn(params: optax.Params) -> _States:
        clip_state = optax.EmptyState() if by_layer else _no_norm(params)
        return clip_state, inner.init(params)

    def update_fn(
        updates: optax.Updates,
        state: _States,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, _States]:
        clip_state, inner_state = state
        given = boundary.summed_rows(updates)
        sums = norms.squared_rows(given) if row_wise else given
        squares, total = norms.squared_norms(
            sums, axis_name=axis_name, stacked_axes=stacked_axes, squared=row_wise
        )
        if by_layer:
            factors = _factors(squares, max_norm)
        else:
            norm = arithmetic.safe_sqrt(total)
            clip_state, factor = _state(norm), factor_to(norm, max_norm)
            factors = maps.map_updates(lambda _: factor, squares)
        # Half precision stays wide on its way to inner. If two kernels need rounded
        # values, these go to memory; unrounded ones are computed in both kernels.
        updates = _scale_layers(maps.map_updates(dtypes.widen, given), factors)
        # Scaled twice, as the square of a factor could underflow.
        sums = _scale_layers(sums if row_wise else squares, factors)
        clip_sums = _scale_layers(sums, factors)
        updates, inner_state = inner.update(
            updates, inner_state, params, clip_sums=clip_sums, **extra
        )
        return maps.cast_like(updates, given), (clip_state, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def factor_to(norm: jax.typing.ArrayLike, max_norm: jax.typing.ArrayLike) -> jax.Array:
    """The factor for gradients of this norm, elementwise over norms."""
    norm = dtypes.widen(jnp.asarray(norm))
    max_norm = jnp.asarray(max_norm, norm.dtype)
    outside = ~(norm <= max_norm)  # Also for a limit of NaN, so that it shows.
    # max_norm / norm outside the ball, else 1 / 1, which is exactly 1. The quotient
    # comes last: compilers share a quotient among the kernels that need it, and repeat
    # cheaper operations in each of them.
    numerator = jnp.where(jnp.isfinite(norm), jnp.where(outside, max_norm, 1), jnp.nan)
    return numerator / jnp.where(outside, norm, 1)


def clipped(g: jax.Array, factor: jax.Array) -> jax.Array:
    """A gradient times the factor of its clip, which two kernels may read.

    On CPU no kernel begins such an update in half precision before the norm is known.
    It would copy what it reads: 0.7 N and 2 N moved for bfloat16, the loss inside.
    """
    g = barrier_after(g, factor) if g.dtype.itemsize == 2 else g
    return narrow(arithmetic.scale(dtypes.widen(g), factor), g.dtype)


def _factors(squares: Layers, max_norm: jax.typing.ArrayLike) -> Layers:
    """The factor of each layer with this sum of squares."""
    return maps.map_updates(
        lambda square: factor_to(arithmetic.safe_sqrt(square), max_norm), squares
    )


def _scale_layers(updates: optax.Updates, factors: Layers) -> optax.Updates:
    return maps.map_updates(arithmetic.scale_leading, updates, factors)


def _no_norm(params: optax.Params) -> ClipByGlobalNormState:
    return ClipByGlobalNormState(constants.zero(params, jnp.float32))


def _state(norm: jax.typing.ArrayLike) -> ClipByGlobalNormState:
    return ClipByGlobalNormState(jnp.asarray(norm, jnp.float32))
