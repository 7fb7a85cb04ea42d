"""Momentum look-ahead: an outer optimizer for workers that are far apart."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._devices import host
from gradxform._devices.mesh import AxisName
from gradxform._numbers import arithmetic, norms
from gradxform._numbers.arithmetic import scale_leading
from gradxform._numbers.norms import StackedAxes
from gradxform._rows import boundary
from gradxform._transforms import momentum
from gradxform._transforms.learning_rate import checked_rate, scale_by_learning_rate
from gradxform._trees import boxes, dtypes, maps
from gradxform._trees.links import stateful
from gradxform._trees.types import Leaf, Params
from gradxform.contrib._alignment import (
    MomentumAlignment,
    Shares,
    aligned,
    checked_alignment,
)

B1 = 0.9  # The default of both functions.


class ScaleByMomentumLookAheadState(NamedTuple):
    """State of :func:`scale_by_momentum_look_ahead`.

    Attributes:
      mu: the momentum, like params.
    """

    mu: optax.Updates


def scale_by_momentum_look_ahead(
    b1: jax.typing.ArrayLike = B1,
    *,
    alignment: MomentumAlignment | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Descends along each gradient, and along the next step of the momentum.

    .. math::

        m_t &= b_1\,m_{t-1} + (1 - b_1)\,g_t \\
        u_t &= g_t + b_1\,m_t

    With ``alignment`` this is HeLoCo: before the momentum moves, the gradient of each
    layer is corrected by its cosine with the momentum. With :math:`\hat g` and
    :math:`\hat m` of length 1, :math:`c = \hat g \cdot \hat m` and :math:`\kappa =
    \lVert g \rVert / (\lVert g \rVert + confidence\,\lVert m \rVert)`,

    .. math::

        g &\leftarrow g - \beta\,(g \cdot \hat m)\,\hat m, \quad
          \beta = \min(shrinkage \cdot (-c)\,\kappa,\; max\_shrinkage)
          \quad\text{where } c < 0 \\
        g &\leftarrow \lVert g \rVert \,
          \frac{(1 - \lambda)\,\hat g + \lambda\,\hat m}
          {\lVert (1 - \lambda)\,\hat g + \lambda\,\hat m \rVert}, \quad
          \lambda = \min\left(rotation \cdot
          \frac{aligned - c}{aligned - opposed}\,\kappa,\; 1\right)
          \quad\text{where } 0 \le c < aligned

    So a late gradient that points against the others' steps loses a part of that
    component. A gradient that is nearly perpendicular to these steps turns toward them,
    and one that agrees with them stays as it is. Without a momentum, or without a
    gradient, nothing is corrected.

    A layer is a leaf. ``None`` for it leaves its momentum as it was. If the squares of
    a layer are not finite, the layer is not corrected.

    λ is that of the authors' code: it goes to 0 as c approaches ``aligned``. Their
    paper has ``rotation·(1 - c)·κ``, which jumps at ``aligned``; the code says that the
    paper will be changed.

    Args:
      b1: decay of the momentum, in [0, 1). A schedule may end at 1.
      alignment: a :class:`MomentumAlignment`, for HeLoCo; by default nothing is
        corrected.
      mu_dtype: dtype of ``mu``, by default that of the parameters, as in optax. If it
        is narrower than that of the gradients, ``u`` is computed from the momentum
        before it is rounded. Then a step copies the momentum once.
      axis_name: for ``alignment``: mesh axes over which layers may be sharded, inside
        ``jax.shard_map``, or a prefix tree of ``PartitionSpec``; see
        :func:`~gradxform.global_norm`.
      stacked_axes: for ``alignment``: how many leading axes of a leaf stack layers; see
        :func:`~gradxform.scale_by_novograd`.

    Returns:
      A transformation with state :class:`ScaleByMomentumLookAheadState`. Updates keep
      their shapes and dtypes; the arithmetic is done in at least float32.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: ``alignment`` is not a :class:`MomentumAlignment`; ``mu_dtype`` does
        not fit the parameters; updates do not have their structure or shapes, or are
        row-sparse.

    References:
      `Momentum look-ahead for asynchronous distributed low-communication training
      <https://openreview.net/forum?id=4O8nzTkHPI>`__, 2025.
      Al Asif et al., `HeLoCo <https://arxiv.org/abs/2606.00271>`__, 2026, and its
      authors' ``MomentumLookAhead`` and ``SmartDCMLA_v2``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.contrib.scale_by_momentum_look_ahead(0.5)
    >>> grads = jnp.array([4.0, 0.0])
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> updates, state.mu  # 4 + 2 / 2, and 4 / 2
    (Array([5., 0.], dtype=float32), Array([2., 0.], dtype=float32))
    >>> align = gx.contrib.MomentumAlignment()
    >>> tx = gx.contrib.scale_by_momentum_look_ahead(0.5, alignment=align)
    >>> updates, _ = tx.update(-grads, state)  # 4 / (4 + 3 · 2) / 2 off, so 0.8 of it
    >>> assert jnp.allclose(updates, jnp.array([-3.2 + (1.0 - 1.6) / 2, 0.0]))
    """
    b1 = arguments.in_range("b1", b1, "[0, 1)")
    structures.check_state_dtype("mu_dtype", mu_dtype)
    alignment = None if alignment is None else checked_alignment(alignment)

    def init_fn(params: optax.Params) -> ScaleByMomentumLookAheadState:
        norms.check_stacked(stacked_axes, params)
        return ScaleByMomentumLookAheadState(mu=momentum.zeros(params, mu_dtype))

    def update_fn(
        updates: optax.Updates, state: ScaleByMomentumLookAheadState
    ) -> tuple[optax.Updates, ScaleByMomentumLookAheadState]:
        momentum.check_like_momentum("momentum_look_ahead", updates, state.mu)

        @jax.jit  # Traced once for each shape, not for each leaf.
        def step(
            g: jax.Array, mu: jax.Array, shares: Shares
        ) -> tuple[jax.Array, jax.Array]:
            numbers = b1, 1 - b1, *shares
            decay, fresh, a, b = (
                jnp.asarray(x, dtypes.compute_dtype(g)) for x in numbers
            )
            # m_t = b1·m_{t-1} + (1-b1)·(a·g + b·m_{t-1})
            wide, kept = dtypes.widen(g), decay + fresh * b
            moved = scale_leading(dtypes.widen(mu).astype(wide.dtype), kept)
            moved += scale_leading(wide, fresh * a)
            mu, moved = momentum.in_both_dtypes(g, mu, moved)
            # u_t = a·g + b·m_{t-1} + b1·m_t. It computes m_{t-1} back from m_t, so m_t
            # can replace m_{t-1}: nothing reads that any longer.
            none = kept == 0  # Then b1 and b are 0, and u_t is m_t.
            kept = jnp.where(none, 1, kept)
            back = jnp.where(none, 1, b / kept)
            u = scale_leading(wide, a * (decay / kept))
            return (u + scale_leading(moved, back + decay)).astype(g.dtype), mu

        if alignment is None:
            shares = maps.map_updates(lambda _: (1.0, 0.0), updates)
        else:
            shares = aligned(updates, state.mu, alignment, axis_name, stacked_axes)
        updates, *mu = boundary.map_step(step, updates, [state.mu], shares)
        return updates, ScaleByMomentumLookAheadState(*mu)

    return stateful(init_fn, update_fn)


def momentum_look_ahead(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = B1,
    *,
    alignment: MomentumAlignment | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""An outer optimizer for workers that are far apart; with ``alignment``, HeLoCo.

    .. math:: w \leftarrow w - learning\_rate \cdot u

    with ``u`` from :func:`scale_by_momentum_look_ahead`. Each worker trains on its own
    for many steps and pushes how far it has come, as if that were a gradient: see
    :func:`~gradxform.local_steps`. In HeLoCo a worker begins where :func:`worker_start`
    says.

    Weight decay is another link: ``optax.chain(optax.add_decayed_weights(1e-4),
    momentum_look_ahead(...))`` puts it into the gradients.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar``.
      b1: see :func:`scale_by_momentum_look_ahead`, as for the rest.
      alignment: for HeLoCo, ``MomentumAlignment()``.
      mu_dtype: dtype of the momentum.
      axis_name: mesh axes over which layers may be sharded.
      stacked_axes: how many leading axes stack layers.

    Returns:
      A transformation. Its state holds :class:`ScaleByMomentumLookAheadState`. Its
      updates are added to the parameters.

    Raises:
      ValueError: an argument is out of its range.
      TypeError: as :func:`scale_by_momentum_look_ahead`.

    References:
      Al Asif et al., `HeLoCo <https://arxiv.org/abs/2606.00271>`__, 2026; in its
      authors' code the rate is 0.1 by default.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> align = gx.contrib.MomentumAlignment()
    >>> outer = gx.contrib.momentum_look_ahead(0.2, 0.5, alignment=align)
    >>> tx = gx.drop_stale(outer, max_staleness=3)
    >>> params = {"w": jnp.array([1.0, -2.0])}
    >>> state = tx.init(params)
    >>> pulled = [params] * 4  # by four workers in turn, each of them three steps late
    >>> step = jax.jit(lambda g, s, p, t: gx.apply_gradients(tx, g, s, p, local_step=t))
    >>> for push in range(100):
    ...     seen = pulled.pop(0)
    ...     params, state = step(seen, state, params, max(0, push - 3))
    ...     pulled.append(gx.contrib.worker_start(params, state, 0.2, 0.5))
    >>> assert jnp.allclose(params["w"], 0, atol=0.01)
    """
    return optax.chain(
        scale_by_momentum_look_ahead(
            b1,
            alignment=alignment,
            mu_dtype=mu_dtype,
            axis_name=axis_name,
            stacked_axes=stacked_axes,
        ),
        scale_by_learning_rate(learning_rate),
    )


def worker_start(
    params: Params,
    state: optax.OptState,
    learning_rate: jax.typing.ArrayLike,
    b1: jax.typing.ArrayLike,
) -> Params:
    r"""The start of a worker that looks ahead: one step along the momentum.

    .. math:: w - learning\_rate \cdot b_1\,m

    This is HeLoCo's look-ahead dispatch. A worker trains from this start, and pushes
    how far it has come from it. ``state()`` of a :class:`~gradxform.ParameterServer`
    has both parameters and state:
    ``worker_start(**server.state(), learning_rate=0.7, b1=0.9)``.

    Args:
      params: the server's parameters.
      state: the server's state, which holds the state of
        :func:`scale_by_momentum_look_ahead` at any depth. Parameters that are masked
        there stay as they are.
      learning_rate: that of the optimizer; with a schedule its value for this step,
        ``schedule(gx.global_step(state))``.
      b1: that of the optimizer.

    Returns:
      The start, with the shapes and dtypes of ``params``, which stay valid. The
      arithmetic is done in at least float32.

    Raises:
      ValueError: the state holds no momentum, or several side by side; ``b1`` is out of
        its range.
      TypeError: ``learning_rate`` is not a real number; ``params`` do not have the
        structure or shapes of the momentum.

    References:
      Al Asif et al., `HeLoCo <https://arxiv.org/abs/2606.00271>`__, 2026, equation 5.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.drop_stale(gx.contrib.momentum_look_ahead(0.5, 0.5), max_staleness=2)
    >>> server = gx.ParameterServer({"w": jnp.array([1.0, 0.0])}, tx)
    >>> result = server.push({"w": jnp.array([4.0, 0.0])}, 0)  # m is 2, u is 4 + 1
    >>> start = gx.contrib.worker_start(**server.state(), learning_rate=0.5, b1=0.5)
    >>> start  # 1 - 0.5 · 5 - 0.5 · 0.5 · 2
    {'w': Array([-2.,  0.], dtype=float32)}
    """
    b1 = arguments.in_range("b1", b1, "[0, 1)")
    learning_rate = checked_rate(learning_rate)
    arguments.check_scalar("learning_rate", learning_rate)

    kind = ScaleByMomentumLookAheadState
    found = maps.nodes(state, lambda node: isinstance(node, kind))
    hint = "pass that of a transformation with scale_by_momentum_look_ahead in it"
    own = structures.only(kind.__name__, found, hint)
    mu = boxes.as_in(params, own.mu)  # Flax has other boxes around state.
    boundary.check_dense("worker_start", params)
    structures.check_shapes("the momentum", mu, "params", maps.masked_like(mu, params))

    def start(m: Leaf, w: Leaf) -> Leaf:
        # w - learning_rate·b1·m
        if not maps.has_gradient(m):
            return jax.tree.map(jnp.asarray, w)
        step = arithmetic.scale(dtypes.widen(host.to_device(m)), ahead)
        moved = arithmetic.rounded_sum(step, host.to_device(jnp.asarray(w)))
        return host.to_memory_of(moved, w)

    with jax.transfer_guard_host_to_device("allow"):
        ahead = -jnp.asarray(learning_rate) * b1
        return maps.map_leaves(start, mu, params)
