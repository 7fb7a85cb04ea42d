"""Rows of a table among the parameters, where the rest of the table is elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._rows.indexed_slices import IndexedSlices
from gradxform._rows.rows import is_known, read_rows, searchsorted


@jax.tree_util.register_pytree_with_keys_class
class TableRows(IndexedSlices):
    """Some rows of a table: ascending, each once, then padding.

    Users hold an ``IndexedSlices`` of either kind. Among gradients it is a gradient.
    Among parameters it is rows of a table, and becomes this type before it is read.
    """

    @classmethod
    def of(cls, rows: IndexedSlices) -> TableRows:
        """The rows that a user gave among the parameters."""
        rows = rows.sum_duplicates()
        return cls._make(rows.indices, rows.values, rows.dense_shape, summed=True)

    def positions(self, ids: jax.Array) -> jax.Array:
        """The position of each row among these; their number if it is not here."""
        held, length = self.indices, len(self.indices)
        if not length:
            return jnp.zeros_like(ids)
        position = searchsorted(ids, held)
        found = held.at[position].get(mode="clip")
        return jnp.where(found == ids, position, length)

    def read(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of the table and their ids: padding for rows that are not here.

        Raises:
          ValueError: a row is not here, and its id is known now.
        """
        at, height = self.positions(ids), self.shape[0]
        missing = at == len(self.indices)
        if is_known(missing):
            absent = np.argwhere(missing & (ids < height))
            if len(absent):
                first = tuple(absent[0].tolist())
                raise ValueError(
                    "ids must be among the rows that this part of the table holds, got "
                    f"{ids[first]} at position {list(first)}. Pull that row, too."
                )
        return read_rows(self.values, at), jnp.where(missing, height, ids)
