"""Reads the arrays of this process: whole, by the row, in another dtype."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._server.placement import Placement, compiled
from gradxform._server.requests import Form, Ids, filled
from gradxform._trees.rows import take_summed

Read: TypeAlias = Callable[[jax.Array], jax.Array]
Copy: TypeAlias = Callable[[dict[int, jax.Array]], dict[int, jax.Array]]


class RowIds(NamedTuple):
    """Rows of one array."""

    ids: Ids  # Ascending, each once; padding after them.
    size: int  # How many rows the program reads; at least as many as ids.


class Reading(NamedTuple):
    """Arrays to read, by their numbers, ready for a turn."""

    programs: dict[int, Read]
    plain: list[int]  # These are read as they are.

    @property
    def numbers(self) -> list[int]:
        """Of all arrays that it reads."""
        return [*self.programs, *self.plain]

    def run(
        self,
        leaves: Sequence[jax.Array] | Mapping[int, jax.Array],
        copy: Copy = lambda plain: plain,
    ) -> dict[int, jax.Array]:
        """In a turn: what the programs make of the leaves, and copies of the others."""
        read = copy({number: leaves[number] for number in self.plain})
        return read | {i: program(leaves[i]) for i, program in self.programs.items()}


class Reader:
    """Compiles a program for each array, number of rows, and dtype.

    Args:
      arrays: of this process, or of the devices that it controls.
    """

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self.placement = place = Placement(arrays)
        self._types = [place.abstract(x.aval, x.sharding) for x in arrays]
        self._programs: dict[
            tuple[int, int | None, Form], Callable[..., jax.Array]
        ] = {}
        self._compiling = threading.RLock()  # A signal handler may pull, too.

    def __len__(self) -> int:
        return len(self._programs)

    def prepare(self, wanted: Mapping[int, RowIds | None], form: Form) -> Reading:
        """Compiles what a reading needs, before its turn.

        Args:
          wanted: the rows of each array, by its number; None for the whole.
          form: of the arrays that are read.
        """
        programs: dict[int, Read] = {}
        for number, rows in wanted.items():
            if rows is not None:
                program = self.program(number, rows.size, form)
                height = self._types[number].shape[0]
                ids = self.placement.put(filled(rows.ids, rows.size, height))
                programs[number] = functools.partial(_at, program, ids)
            elif self._cast(number, form) is not None:
                programs[number] = self.program(number, None, form)
        return Reading(programs, [i for i in wanted if i not in programs])

    def has(self, number: int, size: int | None, form: Form) -> bool:
        """Whether the program is compiled, or none is needed."""
        key = number, size, self._cast(number, form)
        return key in self._programs or key[1:] == (None, None)

    def program(
        self, number: int, size: int | None, form: Form
    ) -> Callable[..., jax.Array]:
        """The program that reads an array whole, or ``size`` of its rows by their ids.

        Its arguments are ``(array)`` or ``(array, ids)``.
        """
        key = number, size, self._cast(number, form)
        if key not in self._programs:
            with self._compiling:  # Another thread may have compiled it meanwhile.
                if key not in self._programs:
                    self._programs[key] = self._compiled(*key)
        return self._programs[key]

    def dtype(self, number: int, form: Form) -> np.dtype[np.generic]:
        """The dtype in which an array is read."""
        return self._cast(number, form) or self._types[number].dtype

    def _cast(self, number: int, form: Form) -> Form:
        """The dtype that an array is cast to; None if it stays as it is."""
        own = self._types[number].dtype
        return form if jnp.issubdtype(own, jnp.floating) and form != own else None

    def _compiled(
        self, number: int, size: int | None, form: Form
    ) -> Callable[..., jax.Array]:
        place, type_ = self.placement, self._types[number]

        def read(table: jax.Array, *ids: jax.Array) -> jax.Array:
            rows = take_summed(table, *ids) if ids else table
            return rows if form is None else rows.astype(form)

        ids, sharding = [], type_.sharding
        if size is not None:
            sharding = place.everywhere if place.committed else None
            of_ids = jax.typeof(np.empty(size, np.int32))
            ids = [place.abstract(of_ids, place.everywhere)]
        with place.default_device():
            return compiled(read, type_, *ids, out_shardings=sharding)


def _at(
    program: Callable[..., jax.Array], ids: jax.Array, table: jax.Array
) -> jax.Array:
    return program(table, ids)
