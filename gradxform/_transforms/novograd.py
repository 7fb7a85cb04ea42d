"""NovoGrad: gradients normalized layer by layer, then momentum."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._devices.mesh import AxisName
from gradxform._jax.compilers import barrier_after, in_hbm
from gradxform._numbers import arithmetic, constants, norms
from gradxform._numbers.norms import StackedAxes
from gradxform._rows import boundary
from gradxform._transforms import clipping, momentum
from gradxform._transforms.learning_rate import (
    check_given,
    rate_at,
    scale_by_learning_rate,
)
from gradxform._trees import boxes, dtypes, maps
from gradxform._trees.states import Mark
from gradxform._trees.types import Prefix, PyTree

# The defaults of both functions.
B1 = 0.95
B2 = 0.98
EPS = 1e-8
WEIGHT_DECAY = 0.0

_MAY_BE_0 = (
    " A traced weight_decay may be any number: if it stays 0 name it in "
    "inject_hyperparams(static_args=…)."
)


# 8 bits have no -0.0.
@Mark(kept=["nu"], hints={"nu": "give novograd stacked_axes=1"})
class ScaleByNovogradState(NamedTuple):
    """State of :func:`scale_by_novograd`.

    Attributes:
      count: int32[], updates so far; saturates.
      mu: the momentum, like params.
      nu: float32[] for each layer, the moving average of its squared norm; -0.0 until
        the layer has had a gradient.
    """

    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.
    mu: optax.Updates
    nu: optax.Updates


def scale_by_novograd(
    b1: jax.typing.ArrayLike = B1,
    b2: jax.typing.ArrayLike = B2,
    eps: jax.typing.ArrayLike = EPS,
    *,
    weight_decay: jax.typing.ArrayLike = WEIGHT_DECAY,
    mask: Prefix[bool] | None = None,
    grad_averaging: bool = False,
    nesterov: bool = False,
    eps_in_sqrt: bool = True,
    mu_dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Normalizes each layer's gradient by its running norm, then adds momentum.

    .. math::

        \nu_1 &= \lVert g_1 \rVert^2, \qquad
        \nu_t = b_2\,\nu_{t-1} + (1 - b_2) \lVert g_t \rVert^2 \\
        \hat g_t &= g_t / \sqrt{\nu_t + eps}
          \quad\text{or, with eps\_in\_sqrt=False,}\quad g_t / (\sqrt{\nu_t} + eps) \\
        d_t &= c\,(\hat g_t + weight\_decay \cdot w), \qquad
          c = 1 - b_1 \text{ with grad\_averaging, else } 1 \\
        \mu_t &= b_1\,\mu_{t-1} + d_t \\
        u_t &= \mu_t \quad\text{or, with nesterov,}\quad d_t + b_1\,\mu_t

    A layer is a leaf, and its ``g_1`` is the first gradient that it gets. ``None``
    leaves its parameter and state as they were. A zero gradient counts as well, so
    ``nu`` does not start again because it is 0. A layer whose gradient has been zero
    from the start gets a zero normalized gradient, never NaN. The state is half of
    Adam's: one array like the parameters, and one scalar for each layer.

    Args:
      b1: decay of the momentum, in [0, 1). A schedule may end at 1.
      b2: decay of the squared norms, in [0, 1). A schedule may end at 1.
      eps: keeps the divisor from 0, ≥ 0; added in at least float32.
      weight_decay: the weight decay, ≥ 0. It is added to the normalized gradient, so
        the norms do not contain it. If it is not 0, ``update`` needs ``params``.
      mask: which parameters decay: a tree of bools, a prefix of the parameters' tree,
        or a function ``params -> tree``; by default all. Under
        ``optax.inject_hyperparams`` name a function in ``static_args``. Otherwise optax
        takes it for a schedule.
      grad_averaging: whether to multiply by ``1 - b1`` before the momentum.
      nesterov: Nesterov momentum as in TensorFlow's ``MomentumOptimizer``.
      eps_in_sqrt: whether ``eps`` is inside the root; False as in TensorFlow Addons and
        MONAI.
      mu_dtype: dtype of ``mu``, by default that of the parameters, as in optax. Half
        precision loses additions that are small beside ``mu``: with a constant gradient
        and ``b1=0.95``, ``mu`` should reach 20, but stalls at 18.75 in bfloat16.
        ``"float32"`` avoids that, for 2 bytes more a parameter.
      axis_name: mesh axes over which layers may be sharded, inside ``jax.shard_map``,
        or a prefix tree of ``PartitionSpec``; see :func:`global_norm`.
      stacked_axes: how many leading axes of a leaf stack layers, as in models with
        ``flax.linen.scan`` or ``flax.nnx.scan``: an int, a prefix tree of ints, or a
        function ``params -> tree``, which is called with updates too. Each slice is
        then a layer, and ``nu`` has those leading axes.

    Returns:
      A transformation with state :class:`ScaleByNovogradState`. Updates keep their
      shapes and dtypes; the arithmetic is done in at least float32.

    Raises:
      ValueError: an argument is out of its range; ``params`` is missing with weight
        decay; a leaf has fewer axes than ``stacked_axes``.
      TypeError: ``mask`` holds something other than bools; a prefix tree or
        ``mu_dtype`` does not fit the parameters; updates do not have their structure
        or shapes.

    References:
      Ginsburg et al., `Stochastic gradient methods with layer-wise adaptive moments for
      training of deep networks <https://arxiv.org/abs/1905.11286>`__, 2019.
      OpenSeq2Seq's ``NovoGrad``, whose defaults these are.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.scale_by_novograd(b1=0.5, b2=0.5, eps=0.0)
    >>> grads = {"w": jnp.full(4, -2.0), "b": jnp.zeros(1)}
    >>> updates, state = tx.update(grads, tx.init(grads))
    >>> state.nu["w"], updates["w"]  # ‖g‖², and a vector of length 1
    (Array(16., dtype=float32), Array([-0.5, -0.5, -0.5, -0.5], dtype=float32))
    >>> updates, state = tx.update(grads, state)
    >>> updates["w"], updates["b"]  # b1 · -0.5 - 0.5, and 0
    (Array([-0.75, -0.75, -0.75, -0.75], dtype=float32), Array([0.], dtype=float32))
    """
    b1 = arguments.in_range("b1", b1, "[0, 1)")
    b2 = arguments.in_range("b2", b2, "[0, 1)")
    eps, weight_decay = arguments.non_negative(eps=eps, weight_decay=weight_decay)
    arguments.check_flags(
        grad_averaging=grad_averaging, nesterov=nesterov, eps_in_sqrt=eps_in_sqrt
    )
    structures.check_state_dtype("mu_dtype", mu_dtype)
    decays = not arguments.is_constant(weight_decay, 0)
    formula = _Formula(b1, b2, eps, weight_decay, grad_averaging, nesterov, eps_in_sqrt)

    def decayed(params: optax.Params) -> PyTree[bool]:
        return structures.bools("mask", True if mask is None else mask, params)

    def init_fn(params: optax.Params) -> ScaleByNovogradState:
        axes = norms.check_stacked(stacked_axes, params)
        decayed(params)

        def zero_norms(p: jax.Array, stacked: int) -> jax.Array:
            return constants.full_like(p, -0.0, dtypes.compute_dtype(p), axes=stacked)

        return ScaleByNovogradState(
            count=constants.zero(params, jnp.int32),
            mu=momentum.zeros(params, mu_dtype),
            nu=maps.map_params(zero_norms, boxes.unboxed(params), boxes.unboxed(axes)),
        )

    def update_fn(
        updates: optax.Updates,
        state: ScaleByNovogradState,
        params: optax.Params | None = None,
        *,
        clip_sums: norms.Layers | None = None,
        step_size_in_momentum: jax.typing.ArrayLike | None = None,
        **_: object,
    ) -> tuple[optax.Updates, ScaleByNovogradState]:
        momentum.check_like_momentum("novograd", updates, state.mu)
        if clip_sums is None:
            clip_sums = norms.squared_norms(
                updates, axis_name=axis_name, stacked_axes=stacked_axes
            )[0]
            # On CPU a clip in front of it writes scaled gradients for these sums. Then
            # the momentum reads these, too, and they may take the gradients' memory.
            updates = maps.map_updates(barrier_after, updates, clip_sums)
        rest: tuple[PyTree[object], ...] = (clip_sums,)
        if decays:
            name = f"weight_decay={weight_decay!r}"
            params = structures.params_given(name, params, _MAY_BE_0)
            rest = *rest, params, decayed(params)
        step = functools.partial(formula.step, state.count, step_size_in_momentum)
        updates, mu, nu = boundary.map_step(step, updates, [state.mu, state.nu], *rest)
        count = optax.safe_increment(state.count)
        return updates, ScaleByNovogradState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Formula(NamedTuple):
    """The step of a layer; its numbers may be traced."""

    b1: jax.typing.ArrayLike
    b2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    weight_decay: jax.typing.ArrayLike
    grad_averaging: bool
    nesterov: bool
    eps_in_sqrt: bool

    def step(
        self,
        count: jax.Array,
        step_size: jax.typing.ArrayLike | None,
        g: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
        square: jax.Array,
        w: jax.typing.ArrayLike = 0,
        decays: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        nu = _average(nu, square, count, self.b2, 1 - self.b2)
        # ĝ = g / sqrt(nu + eps), or g / (sqrt(nu) + eps)
        inverse = arithmetic.inverse_sqrt(nu, self.eps, self.eps_in_sqrt)
        d = arithmetic.scale_leading(dtypes.widen(g), inverse)
        if decays:  # ĝ + weight_decay·w
            w = dtypes.widen(jnp.asarray(w)).astype(d.dtype)
            d += arithmetic.scale(w, self.weight_decay)
        if self.grad_averaging:  # d = (1-b1)·(ĝ + weight_decay·w)
            d = arithmetic.scale(d, 1 - self.b1)
        if step_size is not None:
            d = arithmetic.scale(d, step_size)
        # mu = b1·mu + d
        stored = mu.dtype
        mu = arithmetic.scale(dtypes.widen(mu).astype(d.dtype), self.b1) + d
        # u = mu, or d + b1·mu
        u = arithmetic.scale(mu, self.b1) + d if self.nesterov else mu
        mu = mu.astype(stored)
        # In VMEM a bfloat16 momentum would be copied to HBM later. With the loss inside
        # and `global_clipnorm`, v5e keeps 1.06 N instead of 1.28 N. Its count is 21.7 N
        # instead of 25.1 N. Float32 gains nothing there, and v6e would keep more.
        mu = in_hbm(mu) if stored.itemsize == 2 else mu
        return u.astype(g.dtype), mu, nu


@jax.jit  # Traced once for each shape, not for each layer.
def _average(
    nu: jax.Array,
    square: jax.Array,
    count: jax.Array,
    b2: jax.typing.ArrayLike,
    rest: jax.typing.ArrayLike,
) -> jax.Array:
    """The squared norm of a layer; ``rest`` is ``1 - b2`` before it is rounded."""
    # nu_1 = ‖g_1‖², nu_t = b2·nu_{t-1} + (1-b2)·‖g_t‖²
    square = square.astype(nu.dtype)
    averaged = arithmetic.scale(nu, b2) + arithmetic.scale(square, rest)
    # A layer's first gradient may come late, after some None. Until then nu is -0.0,
    # and the sign tells it from a norm of 0. Optax's states begin with 0.0.
    first = (count == 0) | ((nu == 0) & jnp.signbit(nu))
    return jnp.where(first, square, averaged)


def novograd(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = B1,
    b2: jax.typing.ArrayLike = B2,
    eps: jax.typing.ArrayLike = EPS,
    weight_decay: jax.typing.ArrayLike = WEIGHT_DECAY,
    *,
    mask: Prefix[bool] | None = None,
    grad_averaging: bool = False,
    nesterov: bool = False,
    eps_in_sqrt: bool = True,
    lr_in_momentum: bool = False,
    mu_dtype: jax.typing.DTypeLike | None = None,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
    clipnorm: jax.typing.ArrayLike | None = None,
    clipvalue: jax.typing.ArrayLike | None = None,
    global_clipnorm: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The NovoGrad optimizer of OpenSeq2Seq, Clara and MONAI.

    .. math:: w \leftarrow w - learning\_rate \cdot u

    with ``u`` from :func:`scale_by_novograd`. At most one clip with Keras's meaning
    comes before it. The clip and the layers share one pass over the gradients for their
    norms. ``optax.chain(clip_by_global_norm(c), novograd(lr))`` computes the same with
    two passes.

    Args:
      learning_rate: a scalar, or a schedule ``count -> scalar``.
      b1: see :func:`scale_by_novograd` for this and for details of the rest.
      b2: decay of the squared norms.
      eps: keeps the divisor from 0.
      weight_decay: decoupled weight decay.
      mask: which parameters decay.
      grad_averaging: whether to multiply by ``1 - b1`` before the momentum.
      nesterov: Nesterov momentum.
      eps_in_sqrt: whether ``eps`` is inside the root.
      lr_in_momentum: whether to put the learning rate inside the momentum, as in
        TensorFlow Addons: ``mu = b1·mu + learning_rate·(…)``, ``w -= mu``. The numbers
        differ only while a schedule moves the rate.
      mu_dtype: dtype of the momentum.
      axis_name: mesh axes over which layers may be sharded.
      stacked_axes: how many leading axes stack layers; ``clipnorm`` clips each slice.
      clipnorm: the norm of each layer is clipped to this; see :func:`adagrad`.
      clipvalue: each entry is clipped to ± this.
      global_clipnorm: the norm of all layers together is clipped to this.

    Returns:
      A transformation. Its state holds :class:`ScaleByNovogradState`, and with
      ``global_clipnorm`` also :class:`ClipByGlobalNormState`. Its updates are added to
      the parameters.

    Raises:
      ValueError: more than one clip argument, an argument out of its range, or no
        ``params`` with weight decay.
      TypeError: updates do not have the structure or the shapes of the parameters.

    References:
      OpenSeq2Seq's and ai4med's ``NovoGrad``, ``monai.optimizers.Novograd``,
      ``tfa.optimizers.NovoGrad``.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> params = {"w": jnp.array([1.0, -2.0])}
    >>> rate = optax.linear_schedule(0.1, 0.0, 100)
    >>> tx = gx.novograd(rate, b1=0.9, global_clipnorm=1.0)
    >>> state = tx.init(params)
    >>> step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p))
    >>> for _ in range(100):
    ...     grads = jax.tree.map(lambda w: 2 * w, params)
    ...     params, state = step(grads, state, params)
    >>> assert jnp.linalg.norm(params["w"]) < 0.01
    >>> assert optax.tree.get(state, "global_norm") < 0.02
    """
    scaled = scale_by_novograd(
        b1,
        b2,
        eps,
        weight_decay=weight_decay,
        mask=mask,
        grad_averaging=grad_averaging,
        nesterov=nesterov,
        eps_in_sqrt=eps_in_sqrt,
        mu_dtype=mu_dtype,
        axis_name=axis_name,
        stacked_axes=stacked_axes,
    )
    arguments.check_flags(lr_in_momentum=lr_in_momentum)
    if lr_in_momentum:
        scaled, learning_rate = _inside_momentum(scaled, learning_rate), 1.0
    return optax.chain(
        clipping.keras_clip(
            scaled,
            clipnorm=clipnorm,
            clipvalue=clipvalue,
            global_clipnorm=global_clipnorm,
            axis_name=axis_name,
            stacked_axes=stacked_axes,
            sums_of="layers",
        ),
        scale_by_learning_rate(learning_rate),
    )


def _inside_momentum(
    inner: optax.GradientTransformationExtraArgs, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """``inner`` with the learning rate inside its momentum."""
    check_given(learning_rate)

    def update_fn(
        updates: optax.Updates,
        state: ScaleByNovogradState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, ScaleByNovogradState]:
        rate = rate_at(learning_rate, state)
        return inner.update(updates, state, params, step_size_in_momentum=rate, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
