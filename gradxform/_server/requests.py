"""What a pull asks for, in one object that is checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._trees import checks
from gradxform._trees.rows import rows_of
from gradxform._trees.types import Param, PyTree, Rows

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
# How leaves arrive: the dtype of floating ones; None for the dtype that each has.
Form: TypeAlias = np.dtype[np.generic] | None
# The tables that a request leaves out of the whole leaves, and the form of these.
Key: TypeAlias = tuple[frozenset[int], Form]


class PullRequest(NamedTuple):
    """Rows of some tables, all other leaves whole, and their dtype.

    Attributes:
      rows: int32[n], the ids for each table, by the number of its leaf: each once,
        ascending; then padding, the table's height, up to as many as were asked for.
      form: of all leaves and rows.
    """

    rows: Mapping[int, Ids] = {}
    form: Form = None

    @property
    def key(self) -> Key:
        """All but the ids: what an answer about the whole leaves depends on."""
        return frozenset(self.rows), self.form


class Tables:
    """The parameters that requests name, by their paths.

    Args:
      params: the parameters, or their descriptions, in the shapes that users see.
    """

    def __init__(self, params: PyTree[Param]) -> None:
        flat = jax.tree.leaves_with_path(params)
        self.shapes = [x.shape for _, x in flat]
        self._numbers = {
            checks.path_str(path): i for i, (path, x) in enumerate(flat) if x.shape
        }

    def request(
        self, rows: Rows | None, dtype: jax.typing.DTypeLike | None
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
        checked = [self._row_ids(path, ids) for path, ids in rows.items()]
        return PullRequest(dict(checked), wanted)

    def _row_ids(self, path: str, ids: jax.typing.ArrayLike) -> tuple[int, Ids]:
        number = self._numbers.get(path)
        if number is None:
            tables = ", ".join(map(repr, self._numbers))
            raise ValueError(
                f"rows must name tables of params, got {path!r}; there are {tables}."
            )
        height = self.shapes[number][0]
        asked = rows_of(f"rows[{path!r}]", np.asarray(ids), height).ravel()
        return number, filled(np.unique(asked), len(asked), height)


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


def filled(ids: Ids, size: int, height: int) -> Ids:
    """Ids, then padding up to that size."""
    given = np.full(size, height, np.int32)
    given[: len(ids)] = ids
    return given
