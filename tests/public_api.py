"""What is public: names, arguments, defaults, fields and methods, with their types.

``python -m tests.public_api > tests/public_api.txt`` writes down what is public now.
``test_public_api.py`` compares: a change of the surface is a line in a diff.
"""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import gradxform as gx
from gradxform._demo import listing  # What the demo lists is public.

WIDTH = 88
SPECIAL = ("__call__", "__enter__")  # Methods that have a syntax of their own.
# Defaults that print what they are.
PLAIN = (type(None), bool, int, float, str, tuple, dict)


def entries() -> list[str]:
    """Each public name with all that belongs to it, in alphabetical order."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from gradxform import keras  # It takes seconds, and most tests do without it.

    found = [*of_module(gx, "gradxform"), *of_module(gx.engines, "gradxform.engines")]
    found += of_module(keras, "gradxform.keras")
    # No signature has these, and an update has to be called with them.
    for row in listing.rows():
        if row.extra:
            name = f"gradxform.{row.name}(...).update"
            found.append(broken(name, ["...", "*", *row.extra]))
    return sorted(found, key=lambda entry: entry[entry.index("gradxform.") :].lower())


def of_module(module: Any, name: str) -> Iterator[str]:
    """The functions and classes that a module names."""
    for key in dir(module):
        value = getattr(module, key)
        if key.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value):
            yield from of_class(value, f"{name}.{key}")
        else:
            yield of_call(f"{name}.{key}", value)


def of_class(cls: type, name: str) -> Iterator[str]:
    """How it is made, what it is, and what it has."""
    own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == "gradxform"]
    known = tuple | BaseException | gx.GatedTransformation.__base__
    is_a = next((f" is a {c.__name__}" for c in cls.__mro__ if c not in own), "")
    yield of_making(f"class {name}", own) + is_a * issubclass(cls, known)
    told = {*getattr(cls, "_fields", ())}
    for c in own:
        types = inspect.get_annotations(c)
        for key, value in {**dict.fromkeys(types), **vars(c)}.items():
            if key in told or (key.startswith("_") and key not in SPECIAL):
                continue
            told.add(key)
            if isinstance(value, property):
                types[key] = inspect.get_annotations(value.fget)["return"]
            if key in types:
                yield f"{name}.{key}: {text(types[key], c)}"
            else:
                function = getattr(value, "__func__", value)
                yield of_call(f"{name}.{key}", function, bound=True)


def of_making(name: str, own: Iterable[type]) -> str:
    """A class with its arguments: they are its own, or those of its nearest base."""
    for c in own:
        if "_fields" in vars(c):
            types, defaults = inspect.get_annotations(c), vars(c)["_field_defaults"]
            return broken(
                name,
                [
                    f"{field}: {text(types[field], c)}"
                    + (f" = {default(defaults[field])}" if field in defaults else "")
                    for field in vars(c)["_fields"]
                ],
            )
        for key in ("__new__", "__init__"):
            if key in vars(c) and not getattr(c, "_is_protocol", False):
                return of_call(name, getattr(c, key), bound=True, made=True)
    return name


def of_call(name: str, function: Any, bound: bool = False, made: bool = False) -> str:
    """A function with its arguments; ``bound`` leaves out the first one."""
    inner = inspect.unwrap(function)
    if inner is not function and inspect.isgeneratorfunction(inner):
        name = f"with {name}"
    signature = inspect.signature(inner)
    arguments: list[str] = []
    named = False
    for p in [*signature.parameters.values()][bound:]:
        if p.kind is p.KEYWORD_ONLY and not named:
            arguments.append("*")
        named = named or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        what = "" if p.annotation is p.empty else f": {text(p.annotation, inner)}"
        without = "" if p.default is p.empty else f" = {default(p.default)}"
        arguments.append(f"{stars}{p.name}{what}{without}")
    gives = signature.return_annotation
    given = "" if made or gives is signature.empty else f" -> {text(gives, inner)}"
    return broken(name, arguments, given)


def broken(name: str, arguments: list[str], result: str = "") -> str:
    """A call in one line, or with a line for each argument where that is too long."""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {a}," for a in arguments), f"){result}"])


def text(annotation: Any, of: Any) -> str:
    """An annotation as the source has it, but with the words that a Literal allows."""
    if isinstance(annotation, typing.ForwardRef):  # As a NamedTuple keeps it.
        annotation = annotation.__forward_arg__
    names = inspect.getmodule(of).__dict__

    def spelled(match: re.Match[str]) -> str:
        value = names.get(match[0])
        is_words = typing.get_origin(value) is typing.Literal
        return f"Literal{[*typing.get_args(value)]}" if is_words else match[0]

    return re.sub(r"\w+", spelled, annotation)


def default(value: Any) -> str:
    """A default, if it can be written down."""
    return repr(value) if isinstance(value, PLAIN) else "..."


if __name__ == "__main__":
    print(*entries(), sep="\n")
