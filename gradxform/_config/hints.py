"""The values that a config may hold for an argument, by its type annotation."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

Alternative = tuple[str, Callable[[object], bool]]  # Its words, and a test of a value.

_NUMBERS = (float, complex, jax.Array, np.ndarray, np.number)


def alternatives(hint: object, whole: bool = True) -> list[Alternative]:
    """The alternatives that an annotation allows.

    Args:
      hint: the annotation, not a string.
      whole: whether an ``int`` must be an integer, or may be any number. A dict's keys
        must always be integers.
    """
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if any(arg in _NUMBERS for arg in args):
            # An ``ArrayLike`` may also be a bool; in a config it is a number.
            args = tuple(arg for arg in args if arg not in (int, bool, np.bool))
        return [each for arg in args for each in alternatives(arg, whole)]
    if hint in (None, type(None)):
        return [("null", lambda value: value is None)]
    if hint is bool:
        return [("true or false", lambda value: isinstance(value, bool))]
    if hint is str:
        return [("a string", lambda value: isinstance(value, str))]
    if hint in _NUMBERS or (hint is int and not whole):
        return [("a number", lambda value: _is(value, int | float))]
    if hint is int:
        return [("an integer", lambda value: _is(value, int))]
    if hint == optax.Schedule:
        return [("a schedule, a dict with its 'name'", callable)]
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        fields = ", ".join(hint._fields)
        return [(f"a dict of {fields}", lambda value: isinstance(value, hint))]
    if origin is typing.Literal:
        words = ", ".join(map(repr, args))
        return [(f"one of {words}", lambda value: value in args)]
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return [("a Python function", lambda _: False)]
    if origin is dict:
        return [_dict(alternatives(args[0]), alternatives(args[1], whole))]
    if origin is tuple and args[-1] is not ...:
        return [_tuple([alternatives(arg, whole) for arg in args])]
    if origin in (list, tuple, Sequence, Iterable) and args:
        return [_list(alternatives(args[0], whole))]
    return [("anything", lambda _: True)]


def record(hint: object) -> type[tuple[object, ...]] | None:
    """The named tuple that the annotation allows, or None. In a config it is a dict."""
    kinds = typing.get_args(hint) or (hint,)
    return next((kind for kind in kinds if hasattr(kind, "_fields")), None)


def holds_schedules(hint: object) -> bool:
    """Whether the annotation allows a schedule, or a list of schedules."""
    return any("schedule" in words for words, _ in alternatives(hint))


def dtype() -> Alternative:
    """The name of a dtype that an optimizer can compute in, or null."""

    def fits(value: object) -> bool:
        if not isinstance(value, str):
            return value is None
        try:
            return jnp.issubdtype(jnp.dtype(value), jnp.inexact)
        except (TypeError, ValueError):
            return False

    return "a floating dtype", fits


def _is(value: object, kinds: type | types.UnionType) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _any(allowed: list[Alternative], value: object) -> bool:
    return any(fits(value) for _, fits in allowed)


def words(allowed: list[Alternative]) -> str:
    """All alternatives in words, for a message."""
    return ", or ".join(dict.fromkeys(words for words, _ in allowed))


def _list(each: list[Alternative]) -> Alternative:
    def fits(value: object) -> bool:
        # A list of numbers may be empty; any other empty list would do nothing.
        return (
            isinstance(value, list | tuple)
            and all(_any(each, entry) for entry in value)
            and (len(value) > 0 or _any(each, 0))
        )

    return f"a list, each {words(each)}", fits


def _tuple(each: list[list[Alternative]]) -> Alternative:
    def fits(value: object) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(each)
            and all(map(_any, each, value))
        )

    return f"a list of {len(each)}: {'; '.join(map(words, each))}", fits


def _dict(keys: list[Alternative], values: list[Alternative]) -> Alternative:
    def fits(value: object) -> bool:
        return isinstance(value, dict) and all(
            _any(keys, key) and _any(values, entry) for key, entry in value.items()
        )

    return f"a dict from {words(keys)} to {words(values)}", fits
