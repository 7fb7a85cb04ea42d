"""Parameters in half precision, and in the state the rest of their float32 numbers."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import arguments, structures
from gradxform._devices import host
from gradxform._jax.compilers import barrier_after, narrow, unshared
from gradxform._numbers import arithmetic, constants
from gradxform._rows import boundary
from gradxform._transforms import half
from gradxform._trees import dtypes, maps
from gradxform._trees.states import Mark
from gradxform._trees.types import Leaf, Param, Params, Path

_TAKES_NO_ROWS = (
    "gradxform.master_weights gives its inner transformation the touched rows of {}, "
    "as gradients and as parameters, but that transformation takes only whole tables. "
    "Put gradxform.lazy around master_weights, and a sum, such as "
    "gradxform.accumulate, around both. optax.inject_hyperparams takes rows if you "
    "pass hyperparam_dtype=jnp.float32."
)
# Into how many parts the way to the next number in half precision is divided.
_PARTS = {jnp.dtype(jnp.int8): 254.0, jnp.dtype(jnp.int16): 2.0**16}


@Mark(kept=["residual"])  # What rounding took from parameters.
class MasterWeightsState(NamedTuple):
    """State of :func:`master_weights`.

    Attributes:
      residual: like params, of the dtype ``residual_dtype``: float32 less the rounded
        parameter. A masked node for a parameter that is not in half precision.
      inner_state: the state of ``inner``, for float32 parameters.
      count: int32[], the updates so far; how int8 and bfloat16 round depends on it.
    """

    residual: optax.Updates
    inner_state: optax.OptState
    count: jax.Array  # type: ignore[assignment]  # A tuple's method of that name.


def master_weights(
    inner: optax.GradientTransformation,
    *,
    residual_dtype: Literal["int16", "int8", "bfloat16"] = "int16",
) -> optax.GradientTransformationExtraArgs:
    r"""Trains parameters in half precision as if they were float32.

    The state holds the residual ``r``: what rounding took from the float32 parameter.

    .. math::

        x &= w + r, \qquad u, S \leftarrow inner(g, S, x), \qquad x' = x + u \\
        w' &= round(x'), \qquad r' = x' - w'

    ``inner`` sees float32 alone: its ``init`` and its ``update`` get the float32
    parameters ``x`` and gradients in float32. So its state, its weight decay and its
    norms are those of float32. Parameters are rounded to the nearest number.

    With ``residual_dtype="int16"`` the residual is the part of the way to the next
    number in half precision, in 1/65536. So a bfloat16 parameter and its residual are
    the float32 number, to the bit (from 10⁻³¹ on), and a training is that of float32
    parameters on the same gradients, for every ``inner``. In the middle between two
    numbers it takes the upper one: 16 bits have no room for another rule. ``"int8"``
    takes one byte, for parts of 1/127 of half the way. With ``"bfloat16"`` this is
    Kahan's summation: the residual is a bfloat16, whose 8 bits are finer near zero.

    A small step is less than a part, and rounding to the nearest would lose it each
    time. So these two are rounded up where the rest of a part is above ``1 - t``, with
    another threshold in each step:

    .. math:: t_k = (1/2 + k (\sqrt 5 - 1) / 2) \bmod 1

    Of equal steps as many are rounded up as should be, so their sum is right to a few
    parts. The limit is that of float32: a step that is below 2⁻²⁵ of its
    parameter is lost, and others are rounded to float32.

    float16 has 11 bits, but ends at 65,504 and has fewer bits below 6·10⁻⁵. With
    ``"int16"`` every float32 from 8·10⁻⁶ to 65,504 is held to the bit, and a smaller
    one up to 5·10⁻¹³.

    Parameters in float32, and in other dtypes with at least 32 bits, pass through. An
    infinite parameter stays infinite, and NaN stays NaN.

    The update is the difference of two rounded parameters, in float32. So
    ``optax.apply_updates`` and :func:`apply_updates` give exactly the new rounded
    parameter. One case is beyond float32: if a parameter becomes about 2¹⁶ times
    smaller, or in float16 2¹³ times, the sum may miss it by 2⁻²⁴ of the old one. Then
    ``x'`` is the number that is reached, so nothing drifts.

    Args:
      inner: any transformation whose updates are added to the parameters.
      residual_dtype: ``"int16"``, ``"int8"`` or ``"bfloat16"``.

    Returns:
      A transformation with state :class:`MasterWeightsState`. Its updates are float32
      for parameters in half precision. :func:`get_master_weights` gives the float32
      parameters. If the gradient of a table is :class:`IndexedSlices`, only the touched
      rows of it and of the residual are read and written, and ``inner`` gets these rows
      alone.

    Raises:
      ValueError: another ``residual_dtype``, or ``params`` is missing in an update.
      TypeError: ``inner`` is no transformation; a parameter has integers, or less than
        16 bits; the state is that of another transformation, of another
        ``residual_dtype`` or of parameters in other dtypes; updates and parameters
        differ in structure or shape; or ``inner`` gets rows of a table and takes only
        whole ones.

    References:
      Micikevicius et al., `Mixed precision training
      <https://arxiv.org/abs/1710.03740>`__, 2018.
      Zamirai et al., `Revisiting bfloat16 training
      <https://arxiv.org/abs/2010.06192>`__, 2020 (Kahan).
      Gonzalez Ortiz et al., `FlashOptim <https://arxiv.org/abs/2602.23349>`__, 2026
      (``"int8"``).

    >>> import gradxform as gx, jax.numpy as jnp
    >>> def train(tx, w):
    ...     state = tx.init(w)
    ...     for _ in range(100):
    ...         w, state = gx.apply_gradients(tx, jnp.ones_like(w), state, w)
    ...     return w, state
    >>> tx, start = gx.adagrad(1e-3), jnp.ones(1, jnp.bfloat16)
    >>> train(tx, start)[0]  # Each step is too small for bfloat16.
    Array([1], dtype=bfloat16)
    >>> w, state = train(gx.master_weights(tx), start)
    >>> w
    Array([0.980469], dtype=bfloat16)
    >>> full, _ = train(tx, jnp.ones(1))
    >>> assert gx.get_master_weights(w, state) == full
    """
    inner = arguments.transformation("inner", inner)
    arguments.check_one_of(
        "residual_dtype", residual_dtype, ("int16", "int8", "bfloat16")
    )

    def zeros(p: Param) -> jax.Array | optax.MaskedNode:
        if not half.is_half(p):
            return optax.MaskedNode()
        return constants.full_like(p, 0, residual_dtype)

    def init_fn(params: optax.Params) -> MasterWeightsState:
        half.check_precision("master_weights", params)
        return MasterWeightsState(
            maps.map_params(zeros, params),
            inner.init(maps.map_params(_widened, params)),
            constants.zero(params, jnp.int32),
        )

    def update_fn(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        params = structures.params_like("master_weights", updates, params)
        structures.check_own_kind(state, MasterWeightsState)
        _check(params, state.residual, residual_dtype)
        updates = maps.map_updates(
            lambda g, r: dtypes.widen(g) if maps.has_gradient(r) else g,
            updates,
            state.residual,
        )
        updates = boundary.summed_rows(updates)
        wide = maps.map_leaves(_held, updates, params, state.residual)
        try:
            with structures.own_state(state, init_fn, params):
                updates, inner_state = inner.update(
                    updates, state.inner_state, wide, **extra
                )
        except (TypeError, ValueError) as error:
            boundary.raise_if_refused(error, _TAKES_NO_ROWS, updates)
            raise
        is_fine = residual_dtype == "int16"
        threshold = None if is_fine else half.even_threshold(state.count)
        move = functools.partial(_move, threshold, [])
        halves = maps.map_leaves(
            lambda u, r: u if maps.has_gradient(r) else None, updates, state.residual
        )
        halves, residual = boundary.map_step(
            move, halves, [state.residual], reads=[params]
        )
        updates = maps.map_leaves(lambda u, n: u if n is None else n, updates, halves)
        count = optax.safe_increment(state.count)
        return updates, MasterWeightsState(residual, inner_state, count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _move(
    threshold: jax.Array | None,
    done: list[jax.Array],
    u: jax.Array,
    r: jax.Array,
    p: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The update of a parameter, and its residual, which takes the place of ``done``.

    On CPU it begins when those are computed: each leaf needs temporary memory.
    """
    # x' = x + u
    x = unshared(_joined(barrier_after(p, *done), r) + u)
    # What `apply_updates` gives, to the same operations, so that TPU makes both in one
    # pass. It may miss a number that is 2¹⁶ times smaller, or in float16 2¹³ times.
    u = half.difference(_rounded(x, p, r), half.as_float32(p))
    reached = half.as_float32(arithmetic.rounded_sum(u, p))
    residual = _residual(x, reached, p, r, threshold)
    done[:] = [residual]
    # w' - w, where the compiler for CPU writes w' once w is no longer needed.
    x, p = barrier_after(x, residual), barrier_after(p, residual)
    return half.difference(_rounded(x, p, r), half.as_float32(p)), residual


def get_master_weights(params: Params, state: optax.OptState) -> Params:
    """The float32 parameters of :func:`master_weights`, for evaluation and export.

    Args:
      params: the parameters in half precision.
      state: a state with that of :func:`master_weights` anywhere in it, as inside of a
        gate or of ``optax.partition``.

    Returns:
      The parameters; those in half precision in float32, in the memory where they lie.

    Raises:
      TypeError: the state has none of :func:`master_weights`, or is not that of these
        parameters.

    References:
      Those of :func:`master_weights`.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.drop_stale(gx.master_weights(optax.sgd(1.0)), max_staleness=0)
    >>> w = jnp.ones(1, jnp.bfloat16)
    >>> grads = jnp.full(1, 2**-12)
    >>> w, state = gx.apply_gradients(tx, grads, tx.init(w), w, local_step=0)
    >>> w, gx.get_master_weights(w, state)
    (Array([1], dtype=bfloat16), Array([0.99975586], dtype=float32))
    """
    found = maps.nodes(state, lambda node: isinstance(node, MasterWeightsState))
    if not found:
        raise TypeError(
            "state has no MasterWeightsState, got none in "
            f"{type(state).__name__}. Pass the state of gradxform.master_weights."
        )
    for _, own in found:
        _check(params, own.residual)
        params = maps.map_leaves(_master, own.residual, params)
    return params


def _master(r: Leaf, p: Leaf) -> Leaf:
    """The float32 of a parameter, in the memory where it lies."""
    return host.to_memory_of(_held(None, *host.to_device((p, r))), p)


def _widened(p: Param) -> Param:
    if not half.is_half(p):
        return p
    if isinstance(p, jax.ShapeDtypeStruct):
        return p.update(dtype=jnp.float32)
    return half.as_float32(host.to_device(p))


def _joined(p: jax.Array, r: jax.Array) -> jax.Array:
    """The float32 of a parameter and its residual."""
    near, rest = half.as_float32(p), r.astype(jnp.float32)
    if r.dtype not in _PARTS:
        return near + rest
    gap = jnp.abs(half.neighbour(near, rest, p.dtype) - near)
    # A part of the way first: the sum of all parts may be above the largest float32.
    return jnp.where(rest == 0, near, near + rest * (1 / _PARTS[r.dtype]) * gap)


def _rounded(x: jax.Array, p: jax.Array, r: jax.Array) -> jax.Array:
    """The nearest number in half precision, in float32."""
    near = half.nearest(x, p.dtype)
    if r.dtype != jnp.int16:
        return near
    # From the middle up: int16 holds -2¹⁵, but not 2¹⁵.
    far, part = half.part_of_way(x, near, p.dtype)
    return jnp.where(part == 0.5, jnp.maximum(near, far), near)


def _residual(
    x: jax.Array,
    near: jax.Array,
    p: jax.Array,
    r: jax.Array,
    threshold: jax.Array | None,
) -> jax.Array:
    """What ``near``, the new parameter, lacks of ``x``; 0 if it is not finite.

    With a threshold it is rounded up, not farther from 0, for thresholds above one
    number. So equal steps are rounded in turn when they pass 0 or the middle, too.
    """
    if threshold is not None and r.dtype not in _PARTS:
        rest = jnp.where(jnp.isfinite(near), x - near, 0)
        is_above = rest > half.nearest(rest, r.dtype)
        threshold = jnp.where(is_above, 1 - threshold, threshold)
        return narrow(half.rounded_at(threshold, rest, r.dtype), r.dtype)
    far, part = half.part_of_way(x, near, p.dtype)
    parts = jnp.where(part > 0, jnp.sign(far - near) * part * _PARTS[r.dtype], 0)
    if threshold is None:
        parts = jnp.round(parts)
    else:
        # float32 rounds the sum of a parameter and whole parts, by less than this.
        error = 128 * (jnp.finfo(jnp.float32).eps / jnp.finfo(p.dtype).eps)
        parts = jnp.floor(parts + jnp.clip(threshold, error, 1 - error))
    most = float(jnp.iinfo(r.dtype).max)
    return jnp.clip(parts, -most - 1, most).astype(r.dtype)


def _held(g: Leaf, p: Leaf, r: Leaf) -> Leaf:
    """What ``inner`` gets for a parameter: float32, of a table the touched rows."""
    if not (maps.has_gradient(p) and maps.has_gradient(r)):
        return p
    return boundary.param_rows(
        g, _joined(*(boundary.gather_rows(g, x) for x in (p, r)))
    )


def _check(
    params: optax.Params, residual: optax.Updates, residual_dtype: str = ""
) -> None:
    """Raises ``TypeError`` unless each parameter in half precision has a residual.

    Without a ``residual_dtype`` it may have any, and may lack parameters of another
    transformation.
    """
    structures.check_shapes("state.residual", residual, "params", params)

    def check(path: Path, p: Leaf, r: Leaf) -> None:
        if not (maps.has_gradient(p) and (residual_dtype or maps.has_gradient(r))):
            return
        if maps.has_gradient(r) and residual_dtype not in ("", r.dtype.name):
            raise TypeError(
                f"state.residual is {r.dtype} at {structures.path_name(path)}, but "
                f"residual_dtype is {residual_dtype!r}. Pass the residual_dtype with "
                "which the state was made."
            )
        if maps.has_gradient(r) != half.is_half(p):
            raise TypeError(
                f"params have {dtypes.dtype_of(p)} at {structures.path_name(path)}, "
                "and state.residual is that of parameters in another precision. Pass "
                "parameters in the dtypes that init has seen."
            )

    maps.map_with_path(check, params, residual)
