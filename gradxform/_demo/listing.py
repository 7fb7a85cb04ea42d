"""The public names, read from the package's own source: ``--list``."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

Definition: TypeAlias = ast.ClassDef | ast.FunctionDef

PACKAGES = ("", "engines", "keras")
ROOT = pathlib.Path(__file__).parents[1]


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
            yield Row(
                f"{package}.{name}".removeprefix("."),
                re.sub(r":\w+:`~[\w.]*\.|:\w+:|`", "", doc.partition("\n")[0]),
                tuple(field for state in states for field in _fields(public[state])),
                tuple(re.findall(r"^(\w+):", _section(doc, "Extra arguments"), re.M)),
            )


def _definitions(folder: pathlib.Path) -> Iterator[tuple[str, Definition]]:
    """What a package imports as ``x as x``, and where that is defined."""
    for node in _body(folder / "__init__.py"):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        module = ROOT.parent / node.module.replace(".", "/")
        if module == ROOT:  # A package in it, which has rows of its own.
            continue
        names = {alias.asname for alias in node.names}
        for defined in _body(module.with_suffix(".py")):
            if isinstance(defined, Definition) and defined.name in names:
                yield defined.name, defined


@functools.cache
def _body(path: pathlib.Path) -> list[ast.stmt]:
    return ast.parse(path.read_text("utf-8")).body


def _section(doc: str, title: str) -> str:
    """The indented text under a heading of a docstring."""
    found = re.search(rf"^{title}[^\n]*:\n((?: .*\n?|\n)*)", doc, re.M)
    return textwrap.dedent(found[1]) if found else ""


def _fields(state: Definition) -> Iterator[str]:
    for node in state.body:
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)


def print_names() -> None:
    """Prints all rows, as wide as the terminal is."""
    width, lines = shutil.get_terminal_size().columns, []
    for row in rows():
        lines.append(row.name)
        texts = [row.what]
        for title, names in (("state", row.state), ("extra arguments", row.extra)):
            if names:
                texts.append(f"{title}: {', '.join(names)}")
        for text in texts:
            wrapped = textwrap.wrap(text, width - 4, subsequent_indent=" " * 4)
            lines += [f"    {line}" for line in wrapped]
    print("\n".join(lines))
