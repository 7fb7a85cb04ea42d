"""The public names as a table, read from the package itself: ``--list``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import gradxform as gx


class Row(NamedTuple):
    """One public name."""

    name: str
    what: str  # The first sentence of its docstring.
    state: tuple[str, ...]  # Fields of the states that the docstring's Returns name.
    extra: tuple[str, ...]  # Extra arguments of its update.


def rows() -> Iterator[Row]:
    """All public functions and classes by name; a state belongs to what makes it."""
    for name in sorted(vars(gx)):
        value = getattr(gx, name)
        if name.startswith("_") or name.endswith("State") or not callable(value):
            continue
        doc = inspect.getdoc(value) or ""
        states = re.findall(r":class:`(\w+State)`", _section(doc, "Returns"))
        yield Row(
            name,
            doc.split("\n")[0].replace("``", ""),
            tuple(field for state in states for field in getattr(gx, state)._fields),
            tuple(re.findall(r"^(\w+):", _section(doc, "Extra arguments"), re.M)),
        )


def _section(doc: str, title: str) -> str:
    """The indented text under a heading of a docstring."""
    found = re.search(rf"^{title}[^\n]*:\n((?: .*\n?|\n)*)", doc, re.M)
    return textwrap.dedent(found[1]) if found else ""


def print_table() -> None:
    """Prints all rows, as wide as the terminal allows."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "what it does", "state", "extra arguments", show_lines=True)
    for row in rows():
        cells = row.name, row.what, ", ".join(row.state), ", ".join(row.extra)
        table.add_row(*map(escape, cells))  # Brackets are no markup.
    Console().print(table)
