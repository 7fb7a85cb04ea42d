"""What a pull asks for, and the programs that read it.

A request is checked once, and is then one object. A reader compiles what reads the
arrays of this process: whole, by the row, in another dtype.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._checks import structures
from gradxform._rows.rows import rows_of, take_summed
from gradxform._server.placement import Placement, compiled
from gradxform._trees.types import Param, PyTree, RowsByPath

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
# How leaves arrive: the dtype of floating ones; None for the dtype that each has.
Form: TypeAlias = np.dtype[np.generic] | None
Program: TypeAlias = Callable[..., jax.Array]  # Of an array, or of ids and it.


class PullRequest(NamedTuple):
    """Rows of some tables, all other leaves whole, and their dtype.

    Attributes:
      rows: int32[n], the ids for each table, by the index of its leaf: each once,
        ascending; then padding, the table's height, up to as many as were asked for.
      form: of all leaves and rows.
    """

    rows: Mapping[int, Ids] = {}
    form: Form = None


class TablePaths:
    """The parameters that requests name, by their paths.

    Args:
      params: the parameters, or their descriptions, in the shapes that users see.
    """

    def __init__(self, params: PyTree[Param]) -> None:
        flat = jax.tree.leaves_with_path(params)
        self.shapes = [x.shape for _, x in flat]
        self._indices = {path: i for i, (path, x) in enumerate(flat) if x.shape}
        self._known = structures.by_name(self._indices)

    def request(
        self, rows: RowsByPath | None, dtype: jax.typing.DTypeLike | None
    ) -> PullRequest:
        """The arguments of a pull, checked.

        Raises:
          TypeError: ids are no integers; ``rows`` is no mapping; ``dtype`` is no dtype
            of floating numbers.
          ValueError: no table has the path, or an id lies outside of the table.
        """
        wanted = None if dtype is None else _floating(dtype)
        if rows is None:
            return PullRequest({}, wanted)
        if not isinstance(rows, Mapping):
            raise TypeError(f"rows must map paths of tables to ids, got {rows!r}.")
        checked: dict[int, Ids] = {}
        for name, ids in rows.items():
            path = structures.named("rows", name, "tables of params", self._known)
            index = self._indices[path]
            height = self.shapes[index][0]
            asked = rows_of(f"rows[{name!r}]", np.asarray(ids), height).ravel()
            checked[index] = padded_ids(np.unique(asked), len(asked), height)
        return PullRequest(checked, wanted)


def _floating(dtype: jax.typing.DTypeLike) -> np.dtype[np.generic]:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = np.dtype(bool)
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            "dtype must be one of floating numbers, such as jnp.bfloat16 or "
            f"jnp.float32, or None, got {dtype!r}."
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise TypeError(
            f"dtype: {found} needs jax.config.update('jax_enable_x64', True)."
        )
    return found


def size_for(length: int) -> int:
    """The next power of two: lengths up to n have only about log n sizes."""
    return 1 << max(length - 1, 0).bit_length()


def padded_ids(ids: Ids, size: int, height: int) -> Ids:
    """Ids, then padding up to that size."""
    given = np.full(size, height, np.int32)
    given[: len(ids)] = ids
    return given


class Reading(NamedTuple):
    """Arrays to read, by their numbers, ready for a turn."""

    programs: dict[int, Program]
    plain: list[int]  # These are read as they are.

    def run(
        self, leaves: Sequence[jax.Array] | Mapping[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """In a turn: what the programs make of the leaves; the others as they are."""
        read = {i: program(leaves[i]) for i, program in self.programs.items()}
        return read | {i: leaves[i] for i in self.plain}


class Reader:
    """Compiles a program for each array, number of rows, and dtype.

    Args:
      arrays: of this process, or of the devices that it controls.
    """

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self.placement = placement = Placement(arrays)
        self._types = [placement.abstract(x.aval, x.sharding) for x in arrays]
        self._programs: dict[tuple[int, int | None, Form], Program] = {}
        self._compiling = threading.RLock()  # A signal handler may pull, too.

    def prepare(self, wanted: Mapping[int, Ids | None], form: Form) -> Reading:
        """Compiles what a reading needs, before its turn.

        Args:
          wanted: the rows of each array, by its index, ascending and each once, with
            padding after them; None for the whole. Padding follows, up to one of few
            sizes.
          form: of the arrays that are read.
        """
        programs: dict[int, Program] = {}
        for index, ids in wanted.items():
            if ids is not None:
                size, height = size_for(len(ids)), self._types[index].shape[0]
                program = self.program(index, size, form)
                there = self.placement.put(padded_ids(ids, size, height))
                programs[index] = functools.partial(program, there)
            elif self._cast(index, form) is not None:
                programs[index] = self.program(index, None, form)
        return Reading(programs, [i for i in wanted if i not in programs])

    def program(self, index: int, size: int | None, form: Form) -> Program:
        """The program that reads an array whole, or ``size`` of its rows by their ids.

        Its arguments are ``(array)`` or ``(ids, array)``.
        """
        key = index, size, self._cast(index, form)
        if key not in self._programs:
            with self._compiling:  # Another thread may have compiled it meanwhile.
                if key not in self._programs:
                    self._programs[key] = self._compiled(*key)
        return self._programs[key]

    def _cast(self, index: int, form: Form) -> Form:
        """The dtype that an array is cast to; None if it stays as it is."""
        own = self._types[index].dtype
        stays = own == form or not jnp.issubdtype(own, jnp.floating)
        return None if stays else form

    def _compiled(self, index: int, size: int | None, form: Form) -> Program:
        placement, type_ = self.placement, self._types[index]

        def read(*args: jax.Array) -> jax.Array:
            *ids, table = args
            rows = take_summed(table, *ids) if ids else table
            return rows if form is None else rows.astype(form)

        ids, sharding = [], type_.sharding
        if size is not None:
            sharding = placement.everywhere if placement.committed else None
            of_ids = jax.typeof(np.empty(size, np.int32))
            ids = [placement.abstract(of_ids, placement.everywhere)]
        with placement.default_device():
            return compiled(read, *ids, type_, out_shardings=sharding)
