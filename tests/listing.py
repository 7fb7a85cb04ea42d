"""The public names, read from the package's own source."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import gradxform as gx

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef

PACKAGES = ("", "contrib", "engines", "keras")
ROOT = pathlib.Path(gx.__file__).parent


class Row(NamedTuple):
    """One public name."""

    name: str
    what: str  # The first sentence of its docstring.
    state: tuple[str, ...]  # Fields of the states that the docstring's Returns name.
    extra: tuple[str, ...]  # Extra arguments of its update.


def rows() -> Iterator[Row]:
    """All public functions and classes by name; states have no row of their own.

    Keras and Ray need not be installed, since nothing is imported.
    """
    for package in PACKAGES:
        public = dict(_definitions(ROOT / package))
        for name in sorted(public):
            if name.endswith("State"):
                continue
            doc = ast.get_docstring(public[name]) or ""
            states = re.findall(r":class:`(\w+State)`", _section(doc, "Returns"))
            parts = [part for state in states for part in public[state].body]
            fields = [
                ast.unparse(x.target) for x in parts if isinstance(x, ast.AnnAssign)
            ]
            yield Row(
                f"{package}.{name}".removeprefix("."),
                re.sub(r":\w+:`~[\w.]*\.|:\w+:|`", "", doc.partition("\n")[0]),
                tuple(fields),
                tuple(entries(doc, "Extra arguments")),
            )


def _definitions(folder: pathlib.Path) -> Iterator[tuple[str, Definition]]:
    """What a package imports as ``x as x``, and where that is defined."""
    for node in ast.walk(_tree(folder / "__init__.py")):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        module = ROOT.parent / node.module.replace(".", "/")
        names = {alias.asname for alias in node.names}
        if module.with_suffix(".py").exists():  # A package has rows of its own.
            for defined in _tree(module.with_suffix(".py")).body:
                if isinstance(defined, Definition) and defined.name in names:
                    yield defined.name, defined


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _section(doc: str, title: str) -> str:
    """The indented text under a heading of a docstring."""
    found = re.search(rf"^{title}[^\n]*:\n((?: .*\n?|\n)*)", doc, re.M)
    return textwrap.dedent(found[1]) if found else ""


def entries(doc: str, title: str) -> dict[str, str]:
    """The names in a section of a docstring, each with what is said about it."""
    found = re.findall(r"^(\w+): (.*(?:\n .*)*)", _section(doc, title), re.M)
    return {name: " ".join(said.split()) for name, said in found}
