"""Whether a value of dicts and lists is small, also if aliases of YAML repeat parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 100  # A level takes up to five calls of Python's stack of 1,000.
# Whoever walks through so many entries, or prints them, needs a fraction of a second.
MAX_ENTRIES = 100_000


def check_small(name: str, value: object) -> None:
    """Raises ``ValueError`` if a value is too deep, or too large if written out.

    Aliases of YAML refer to one object. So a few lines of them stand for billions of
    entries: each entry counts as often as it is repeated, and a string of n characters
    as 1 + n / 100 entries.
    """
    if _size(name, value, 0, {}) > MAX_ENTRIES:
        raise ValueError(
            f"{name} has more than {MAX_ENTRIES:,} entries, if each alias of YAML is "
            "written out. Leave out what is not needed."
        )


def _size(
    name: str, value: object, depth: int, seen: dict[tuple[int, int], Any]
) -> int:
    """The number of entries; each object is looked at once for each of its depths.

    Args:
      name: of the argument.
      value: a part of it.
      depth: the part's depth.
      seen: the sizes so far, by the identities and depths of the parts. It also holds
        the parts themselves, so that no other one gets their identity.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{name} is nested more than {MAX_DEPTH} deep.")
    if isinstance(value, str):
        return 1 + len(value) // 100
    key = id(value), depth
    if key not in seen:
        # ml_collections' ConfigDict is no Mapping.
        read = value.to_dict() if hasattr(value, "to_dict") else value
        entries: Iterable[object] = read if isinstance(read, list | tuple) else ()
        if isinstance(read, Mapping):
            entries = (x for pair in read.items() for x in pair)
        sizes = (_size(name, entry, depth + 1, seen) for entry in entries)
        seen[key] = 1 + sum(sizes), value, read
    size: int = seen[key][0]
    return size
