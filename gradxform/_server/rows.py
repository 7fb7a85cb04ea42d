"""Rows of tables, pulled and pushed in a few sizes, so that few programs read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from gradxform._server.placement import Placement, compiled
from gradxform._trees import checks
from gradxform._trees.indexed_slices import IndexedSlices, ascending, padded
from gradxform._trees.rows import rows_of, take_summed
from gradxform._trees.types import Leaf, PyTree, Rows


def size_for(length: int) -> int:
    """The next power of two: lengths up to n have only about log n sizes."""
    return 1 << max(length - 1, 0).bit_length()


def in_sizes(leaf: Leaf) -> Leaf:
    """Pads a row-sparse gradient to such a size; returns every other leaf as it is."""
    if not isinstance(leaf, IndexedSlices) or leaf.values.ndim != leaf.ndim:
        return leaf
    length = len(leaf.values)
    local = getattr(leaf.values, "is_fully_addressable", True)
    if length == size_for(length) or not local:
        return leaf
    return padded(leaf, size_for(length))


def in_order(ids: np.ndarray[Any, Any], size: int, height: int) -> np.ndarray[Any, Any]:
    """Each id once, ascending, then padding up to that size."""
    once = np.unique(ids)
    given = np.full(size, height, np.int32)
    given[: len(once)] = once
    return given


class RowRequest(NamedTuple):
    """The rows of one table that a pull asks for."""

    indices: np.ndarray[Any, Any]  # As many as were asked for; each once, then padding.
    # Reads them from the table. A server of several processes gets references.
    read: Callable[[jax.Array], jax.Array | list[Any]]


class RowPrograms:
    """Reads rows of a server's tables, compiled once for each table and size.

    Args:
      params: descriptions of the parameters, for lowering.
      place: where they lie.
    """

    def __init__(self, params: PyTree[jax.ShapeDtypeStruct], place: Placement) -> None:
        flat = jax.tree.leaves_with_path(params)
        self._numbers = {checks.path_str(path): i for i, (path, _) in enumerate(flat)}
        self._types = [table for _, table in flat]
        self._placement = place
        self._programs: dict[tuple[int, int], Callable[..., jax.Array]] = {}
        self._compiling = threading.RLock()  # A signal handler may pull, too.

    def prepare(self, rows: Rows) -> dict[int, RowRequest]:
        """The rows to read from each table, by the number of its leaf.

        Raises:
          TypeError: ids are no integers, or ``rows`` is no mapping.
          ValueError: no table has the path, or an id lies outside of the table.
        """
        return {
            number: self._wanted(number, asked) for number, asked in self._asked(rows)
        }

    def _wanted(self, number: int, asked: np.ndarray[Any, Any]) -> RowRequest:
        size = size_for(len(asked))
        given = in_order(asked, size, self._types[number].shape[0])
        program, ids = self.program(number, size), self._placement.put(given)
        return RowRequest(given[: len(asked)], lambda table: program(table, ids))

    def _asked(self, rows: Rows) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """The tables and their ids, checked."""
        if not isinstance(rows, Mapping):
            raise TypeError(f"rows must map paths of tables to ids, got {rows!r}.")
        for path, ids in rows.items():
            number = self._numbers.get(path)
            if number is None or not self._types[number].shape:
                tables = [p for p, i in self._numbers.items() if self._types[i].shape]
                raise ValueError(
                    f"rows must name tables of params, got {path!r}; there are "
                    f"{', '.join(map(repr, tables))}."
                )
            height = self._types[number].shape[0]
            asked = rows_of(f"rows[{path!r}]", np.asarray(ids), height)
            yield number, asked.ravel()

    def part(self, number: int, wanted: RowRequest, rows: jax.Array) -> IndexedSlices:
        """The wanted rows as a part of the table; the program has read ``rows``."""
        length = len(wanted.indices)
        if length != len(rows):
            rows = self._placement.put(np.array(jax.device_get(rows)[:length]))
        indices = self._placement.put(wanted.indices)
        return ascending(indices, rows, self._types[number].shape)

    def program(self, number: int, size: int) -> Callable[..., jax.Array]:
        """The program that reads ``size`` rows of a table: ``(table, ids) -> rows``."""
        if (number, size) not in self._programs:
            with self._compiling:  # Another thread may have compiled it meanwhile.
                if (number, size) not in self._programs:
                    self._programs[number, size] = self._compiled(number, size)
        return self._programs[number, size]

    def _compiled(self, number: int, size: int) -> Callable[..., jax.Array]:
        place = self._placement
        indices = jax.typeof(np.empty(size, np.int32))
        with place.default_device():
            return compiled(
                take_summed,
                self._types[number],
                place.abstract(indices, place.everywhere),
                out_shardings=place.everywhere if place.committed else None,
            )
