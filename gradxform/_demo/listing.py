"""The public names and what they do, from their docstrings: ``--list``."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import gradxform as gx

PACKAGES = ("gradxform", "gradxform.engines", "gradxform.keras")


class Row(NamedTuple):
    """One public name."""

    name: str
    what: str  # The first sentence of its docstring.
    state: tuple[str, ...]  # Fields of the states that the docstring's Returns name.
    extra: tuple[str, ...]  # Extra arguments of its update.


def rows(module: ModuleType) -> Iterator[Row]:
    """The public functions and classes by name; states have no row of their own."""
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or name.endswith("State") or inspect.ismodule(value):
            continue
        doc = inspect.getdoc(value) or ""
        states = re.findall(r":class:`(\w+State)`", _section(doc, "Returns"))
        yield Row(
            f"{module.__name__}.{name}".removeprefix("gradxform."),
            re.sub(r":\w+:`~[\w.]*\.|:\w+:|`", "", doc.partition("\n")[0]),
            tuple(field for state in states for field in getattr(gx, state)._fields),
            tuple(entries(doc, "Extra arguments")),
        )


def _section(doc: str, title: str) -> str:
    """The indented text under a heading of a docstring."""
    found = re.search(rf"^{title}[^\n]*:\n((?: .*\n?|\n)*)", doc, re.M)
    return textwrap.dedent(found[1]) if found else ""


def entries(doc: str, title: str) -> dict[str, str]:
    """The names in a section of a docstring, each with what is said about it."""
    found = re.findall(r"^(\w+): (.*(?:\n .*)*)", _section(doc, title), re.M)
    return {name: " ".join(said.split()) for name, said in found}


def text() -> str:
    """All rows, as wide as the terminal is; an error for a package without Keras."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # It must be set before the import.
    columns = shutil.get_terminal_size().columns
    said = textwrap.TextWrapper(
        columns, initial_indent=" " * 4, subsequent_indent=" " * 8
    )
    lines = []
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            lines += [package, said.fill(str(error))]
            continue
        for row in rows(module):
            lines += [row.name, said.fill(row.what)]
            if row.state:
                lines.append(said.fill(f"state: {', '.join(row.state)}"))
            if row.extra:
                lines.append(said.fill(f"extra arguments: {', '.join(row.extra)}"))
    return "\n".join(lines) + "\n"
