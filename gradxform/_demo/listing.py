"""The public names as a table, read from the package itself: ``--list``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import gradxform as gx

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 60  # Enough for each name, and for words beside it.


class Row(NamedTuple):
    """One public name."""

    name: str
    what: str  # The first sentence of its docstring.
    state: tuple[str, ...]  # Fields of the states that the docstring's Returns name.
    extra: tuple[str, ...]  # Extra arguments of its update.


def rows() -> Iterator[Row]:
    """All public functions and classes by name; states have no row of their own."""
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
    """Prints all rows, as wide as the terminal is; names stay in one piece."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    for row in rows():
        lines = [row.what]
        for title, names in (("state", row.state), ("extra arguments", row.extra)):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        cells = row.name, "\n".join(lines)
        table.add_row(*map(escape, cells))  # Brackets in them are no markup.
    # A narrower terminal breaks the lines by itself.
    show(table, Console(width=max(Console().width, WIDTH)))


def show(table: Table, screen: Console) -> None:
    """Prints a table with ``print``, which raises Python's own errors."""
    with screen.capture() as text:
        screen.print(table)
    print(text.get(), end="")
