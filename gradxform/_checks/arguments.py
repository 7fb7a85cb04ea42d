"""Whether an argument is a number in its range, a flag, a function."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._jax import versions
from gradxform._trees import dtypes
from gradxform._trees.extra_args import with_any_extra_args
from gradxform._trees.types import T

COUNTS = f"[1, {np.iinfo(np.int32).max}]"  # For counts, which are int32 on devices.
_REAL = (jnp.floating, jnp.integer)
# How far a schedule may miss a number: the end of its range, or an integer. Compilers
# make n · (1 / n) of n / n, with an error of 2^-24. So a schedule through numbers up to
# 128 misses its end by at most this. Its own end may be 0, and says nothing about that.
ROUNDING = 2.0**-17


def check_scalar(
    name: str, value: Any, *, integer: bool = False
) -> None:  # Of any type.
    """Raises ``TypeError`` unless ``value`` is a real scalar, or an integer one.

    A traced value is checked, too.
    """
    if type(value) is int:  # Of any size: NumPy could not hold all of them.
        return
    dtype = dtypes.dtype_of(value)
    is_right = jnp.issubdtype(dtype, jnp.integer) if integer else is_real(value)
    if np.shape(value) or not is_right:
        kind = "an integer" if integer else "a real"
        raise TypeError(f"{name} must be {kind} scalar, got {value!r}.")


def in_range(
    name: str, value: Any, interval: str, *, integer: bool = False
) -> Any:  # Any kind of number.
    """A real scalar inside ``interval``, such as ``"[0, 1)"``; a traced value passes.

    A number in a JAX array may come from a schedule. So it may be the end of the range,
    and outside by a rounding it becomes that end, see :func:`to_end`. Any other number
    is what a person wrote. A complex number without an imaginary part is real, see
    :func:`real`. An int that no int32 holds comes back as a float, which JAX takes.
    With ``integer`` it has to be an integer, traced or not.

    Raises:
      TypeError: ``value`` is not a real scalar, or not an integer one.
      ValueError: ``value`` is outside the interval, or NaN; or the interval excludes
        inf, and JAX would round ``value`` to inf.
    """
    if integer:
        check_scalar(name, value, integer=True)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    has_low, has_high = interval.startswith("["), interval.endswith("]")
    value = real(value)
    if isinstance(value, jax.Array):
        value = to_end(value, low, high)
        has_low, has_high = has_low or low > -math.inf, has_high or high < math.inf
    if isinstance(value, jax.core.Tracer):
        return value
    given = value
    if type(value) is int and abs(value) > np.iinfo(np.int32).max:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    array = np.asarray(value)
    if array.shape or not is_real(array):
        raise TypeError(f"{name} must be a real scalar in {interval}, got {value!r}.")
    number = array.item()
    if jnp.issubdtype(array.dtype, jnp.floating):  # An end is rounded as the number is.
        with np.errstate(over="ignore"):
            low, high = (float(np.asarray(end, array.dtype)) for end in (low, high))
    above = low <= number if has_low else low < number
    below = number <= high if has_high else number < high
    if not (above and below):  # NaN compares false with everything and ends here.
        shown = given if type(given) is int else number
        raise ValueError(f"{name} must be in {interval}, got {shown!r}.")
    widest = jnp.finfo(jnp.result_type(float))  # float64 only with jax_enable_x64.
    if "inf]" not in interval and abs(number) > float(widest.max):
        raise ValueError(f"{name} must be finite in {widest.dtype}, got {number!r}.")
    return value


def to_end(value: Any, low: float, high: float) -> Any:  # As `in_range`.
    """The end of a range that a number misses by a rounding; any other as it is."""
    if not jnp.issubdtype(dtypes.dtype_of(value), jnp.floating):
        return value
    traced = isinstance(value, jax.core.Tracer)
    x, xp = (value, jnp) if traced else (np.asarray(value), np)
    eps = float(jnp.finfo(x.dtype).eps)  # An end such as 1/3 is rounded itself.
    below = (x < low) & (x >= low - ROUNDING - eps * abs(low))
    above = (x > high) & (x <= high + ROUNDING + eps * abs(high))
    if not (traced or np.any(below | above)):
        return value
    return xp.where(below, low, xp.where(above, high, x)).astype(x.dtype)


def is_real(value: object) -> bool:
    """Whether a value, traced or not, holds real numbers."""
    return any(jnp.issubdtype(dtypes.dtype_of(value), kind) for kind in _REAL)


def is_constant(value: jax.typing.ArrayLike, number: float) -> bool:
    """Whether a value is this number; a traced value may be any number.

    NumPy compares: while JAX traces, it would trace the comparison with an array, too.
    """
    return not isinstance(value, jax.core.Tracer) and bool(np.asarray(value) == number)


def scheduled(
    name: str, schedule: optax.Schedule, global_step: jax.Array, interval: str
) -> jax.typing.ArrayLike:
    """A schedule's number for a global step; raises like :func:`in_range`."""
    name = f"{name}(global_step)"
    value: jax.typing.ArrayLike = schedule(global_step)
    check_scalar(name, value)
    return whole(in_range(name, value, interval))


def whole(value: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """The nearest integer if a number for counts misses it by a rounding.

    Its own size counts, too: 1,000 may be missed by 1,000 times as much as 1.
    """
    if not jnp.issubdtype(dtypes.dtype_of(value), jnp.floating):
        return value
    traced = isinstance(value, jax.core.Tracer)
    x, xp = (value, jnp) if traced else (np.asarray(value), np)
    nearest = xp.round(x)
    most = ROUNDING * xp.maximum(1, abs(nearest))
    is_missed = (nearest + most >= x) & (x + most >= nearest)  # No inf - inf.
    return xp.where(is_missed, nearest, x)


def real(value: T) -> T:
    """The real part of a complex number that is traced or has no imaginary part.

    Any other value is returned as it is. ``optax.inject_hyperparams`` makes all numbers
    complex if parameters are complex.
    """
    if not is_complex(value):
        return value
    known = not isinstance(value, jax.core.Tracer)
    real_part: T = value.real  # type: ignore[attr-defined]  # Its dtype is complex.
    return value if known and np.any(np.asarray(value).imag != 0) else real_part


def check_at_most_one(**arguments: object) -> None:
    """Raises ``ValueError`` if more than one of the arguments is not None."""
    pairs = arguments.items()
    given = [f"{name}={value!r}" for name, value in pairs if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"at most one of {', '.join(arguments)} may be given, got "
            f"{', '.join(given)}."
        )


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of the allowed words."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {words}, got {value!r}.")


def extra_argument(
    transformation: str, name: str, value: jax.typing.ArrayLike | None, meaning: str
) -> jax.typing.ArrayLike:
    """An extra argument of ``update``; ``TypeError`` if it is missing."""
    if value is None:
        raise TypeError(
            f"{transformation} needs {name}: pass update(..., {name}={name}), "
            f"{meaning} these gradients."
        )
    return value


def local_step(transformation: str, value: jax.typing.ArrayLike | None) -> jax.Array:
    """The local step of a push as an int32 scalar; ``TypeError`` if it is not one."""
    meaning = "the global step that the worker saw before it computed"
    value = extra_argument(transformation, "local_step", value, meaning)
    check_scalar("local_step", value, integer=True)
    if not isinstance(value, jax.Array):  # To check an array may mean to wait for it.
        in_range("local_step", value, f"[0, {np.iinfo(np.int32).max}]")
    return dtypes.saturated(value)


def check_transformation(name: str, value: object) -> None:
    """Raises ``TypeError`` unless ``value`` has ``init`` and ``update``."""
    if not all(callable(getattr(value, f, None)) for f in ("init", "update")):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, with init and update, "
            f"got {value!r}."
        )


def transformation(
    name: str, value: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """A transformation, checked, which takes any extra argument."""
    check_transformation(name, value)
    return with_any_extra_args(value)


def check_flags(**arguments: bool) -> None:
    """Raises ``TypeError`` unless each argument is a bool, which is not traced."""
    for name, value in arguments.items():
        if not isinstance(value, bool | np.bool):
            raise TypeError(f"{name} must be True or False, not traced, got {value!r}.")


def flag(name: str, value: Any) -> jax.Array:  # Of any type.
    """A bool, which may be traced, as an array; ``TypeError`` if it is none."""
    if np.shape(value) or dtypes.dtype_of(value) != jnp.bool:
        raise TypeError(f"{name} must be a bool, or an array bool[], got {value!r}.")
    return jnp.asarray(value)


def non_negative(**arguments: jax.typing.ArrayLike) -> list[Any]:  # As `in_range`.
    """The arguments, each a finite scalar ≥ 0; raises like :func:`in_range`."""
    return [in_range(name, value, "[0, inf)") for name, value in arguments.items()]


def length(name: str, value: Any, interval: str) -> int:  # Any kind of number.
    """The length of an axis: an integer inside ``interval``, which is not traced."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a shape, so it cannot be traced; under "
            f"optax.inject_hyperparams name {name.split('[')[0]} in static_args."
        )
    return int(in_range(name, value, interval, integer=True))


def check_not_tracing(method: str) -> None:
    """Raises ``RuntimeError`` if JAX traces the caller, so that it would run once."""
    # Outside of all transformations nothing of JAX runs here: a signal's handler may
    # raise at any moment, and JAX gives its caches' users another error then.
    if versions.is_outside():
        return
    # Inside of jit JAX traces each operation, also one on an array that is known.
    with jax.transfer_guard("allow"):
        if not isinstance(jnp.zeros(()), jax.core.Tracer):
            return
    raise RuntimeError(
        f"{method} was called while JAX traces a function, as inside of jit or "
        "scan. There it would run once, and its result would be a constant of the "
        "program. Call it outside, and pass its result to the function."
    )


def is_complex(value: object) -> bool:
    return jnp.issubdtype(dtypes.dtype_of(value), jnp.complexfloating)
