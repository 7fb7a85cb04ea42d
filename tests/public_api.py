"""What is public: names, arguments, defaults, fields and methods.

``python -m tests.public_api > tests/public_api.txt`` writes down what is public now.
``test_public_api.py`` compares: a change of the surface is a line in a diff.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import gradxform as gx
from tests import listing

SPECIAL = ("__call__", "__enter__")  # Methods that have a syntax of their own.
# Defaults that print what they are.
PLAIN = (type(None), bool, int, float, str, tuple, dict)


def entries() -> list[str]:
    """Each public name with all that belongs to it, in alphabetical order."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from gradxform import keras  # It takes seconds, and most tests do without it.

    found = []
    for module in (gx, gx.contrib, gx.engines, keras):
        found += of_module(module, module.__name__)
    # No signature has these, and an update has to be called with them.
    for row in listing.rows():
        if row.extra:
            arguments = ", ".join(["...", "*", *row.extra])
            found.append(f"gradxform.{row.name}(...).update({arguments})")
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
            yield name_of(value) + f"{name}.{key}" + arguments(value)


def of_class(cls: type, name: str) -> Iterator[str]:
    """How it is made, and what it has."""
    own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == "gradxform"]
    is_made = any({"__new__", "__init__"} & {*vars(c)} for c in own)
    fields = getattr(cls, "_fields", ())
    plain = fields or (is_made and not getattr(cls, "_is_protocol", False))
    yield f"class {name}{arguments(cls) if plain else ''}"
    told = {*fields}
    for c in own:
        for key in {**inspect.get_annotations(c), **vars(c)}:
            if key in told or (key.startswith("_") and key not in SPECIAL):
                continue
            told.add(key)
            value = inspect.getattr_static(c, key, None)
            function = getattr(value, "__func__", value)
            if not callable(function):
                yield f"{name}.{key}"
            else:
                bound = not isinstance(value, staticmethod)
                yield name_of(function) + f"{name}.{key}" + arguments(function, bound)


def name_of(function: Any) -> str:
    """What stands in front of the name of a context manager."""
    inner = inspect.unwrap(function)
    made_by_it = inner is not function and inspect.isgeneratorfunction(inner)
    return "with " if made_by_it else ""


def arguments(function: Any, bound: bool = False) -> str:
    """Its arguments with their defaults; ``bound`` leaves out the first one."""
    signature = inspect.signature(inspect.unwrap(function))
    parameters = [
        p.replace(annotation=p.empty, default=Text.of(p.default))
        for p in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters[bound:]))


class Text(str):
    """A default that prints as it is written."""

    __repr__ = str.__str__

    @classmethod
    def of(cls, value: Any) -> Any:
        """A default, if it can be written down."""
        if value is inspect.Parameter.empty:
            return value
        return cls(repr(value) if isinstance(value, PLAIN) else "...")


if __name__ == "__main__":
    print(*entries(), sep="\n")
