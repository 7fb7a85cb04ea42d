"""Rows of a table among the parameters, where the rest of the table is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._rows import stored_rows
from gradxform._rows.indexed_slices import IndexedSlices, is_sparse
from gradxform._rows.rows import has_values, read_rows, searchsorted
from gradxform._rows.stored_rows import node
from gradxform._trees import maps
from gradxform._trees.types import Leaf, Path, SparseLeaf

HINT = (
    "a part of a table (gradxform.TableRows) is no array. Read its rows with "
    "gradxform.lookup, or inside of a loss for gradxform.value_and_grad, where it is a "
    "table."
)


@node
class TableRows(SparseLeaf):
    r"""A part of a table: some of its rows, where the rest of it is elsewhere.

    ``ParameterServer.pull(rows=...)`` gives it instead of the table. A loss reads its
    rows as it reads those of a table, through :func:`lookup`. Inside of
    :func:`value_and_grad` and :func:`minimize` the loss sees a table. It can read only
    these rows. A step changes these rows; the part is a table of its own there.

    An :class:`IndexedSlices` says that all other rows are zero. This says nothing
    about them. Like it, this is a pytree node, and JAX refuses to calculate with its
    indices.

    Args:
      indices: integers of shape [n], in any order, each once. An index equal to
        ``dense_shape[0]`` is padding.
      values: the rows, of shape [n, \*dense_shape[1:]] and of the table's dtype.
      dense_shape: the shape of the whole table.

    Attributes:
      indices: int32[n], ascending, with padding at the end.
      values: the rows in this order; those of padding are zero.
      dense_shape: as given.

    Raises:
      TypeError: ``indices`` are not integers.
      ValueError: shapes do not fit; an index lies outside of [0, dense_shape[0]] or
        occurs twice. Traced indices cannot be checked.

    References:
      A pull of some keys from a parameter server: Li et al., `Scaling distributed
      machine learning with the parameter server
      <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`__,
      2014.

    >>> import gradxform as gx, jax, jax.numpy as jnp
    >>> part = gx.TableRows([7, 2], jnp.array([[70.0], [20.0]]), (1_000_000, 1))
    >>> part.indices, part.values.ravel()
    (Array([2, 7], dtype=int32), Array([20., 70.], dtype=float32))
    >>> gx.lookup(part, [[7, 2]]).ravel()
    Array([70., 20.], dtype=float32)
    >>> loss = lambda table, ids: jnp.sum(gx.lookup(table, ids) ** 2)
    >>> _, grads = gx.value_and_grad(loss)(part, jnp.array([7, 7]))
    >>> tx = gx.scale_by_learning_rate(0.25)
    >>> part, _ = gx.apply_gradients(tx, grads, tx.init(part), part)
    >>> part.values.ravel()  # 70 - 0.25 · (140 + 140)
    Array([20.,  0.], dtype=float32)
    """

    _indices: Any  # See `stored_rows`.
    _summed: bool
    _hint = HINT

    def __init__(
        self,
        indices: jax.typing.ArrayLike | Sequence[int],
        values: jax.typing.ArrayLike,
        dense_shape: Sequence[int],
    ) -> None:
        given = IndexedSlices(indices, values, dense_shape)
        own, shape = given.indices, given.dense_shape
        if has_values(own):
            known, counts = np.unique(np.asarray(own), return_counts=True)
            repeated = known[(counts > 1) & (known < shape[0])]
            if repeated.size:
                raise ValueError(
                    f"indices must name each row once, got {repeated[0]} several times."
                )
        order = jnp.argsort(own)
        self._indices, self.values = own[order], given.values[order]
        self.dense_shape, self._summed = shape, True

    __reduce__ = stored_rows.reduced
    __repr__ = stored_rows.shown

    @property
    def indices(self) -> jax.Array:
        """The rows of the table, int32[n]."""
        return stored_rows.plain(self)


def positions(part: TableRows, ids: jax.Array) -> jax.Array:
    """The position of each row in a part; the part's length if it is not there."""
    own, length = part.indices, len(part.indices)
    if not length:
        return jnp.zeros_like(ids)
    position = searchsorted(ids, own)
    found = own.at[position].get(mode="clip")
    return jnp.where(found == ids, position, length)


def read_part(part: TableRows, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of a part and their ids: padding for rows that are not there.

    Raises:
      ValueError: a row is not there, and its id is known now.
    """
    at, height = positions(part, ids), part.shape[0]
    missing = at == len(part.indices)
    if has_values(missing):
        absent = np.argwhere(missing & (ids < height))
        if len(absent):
            first = tuple(absent[0].tolist())
            raise ValueError(
                "ids must be among the rows that this part of the table holds, got "
                f"{ids[first]} at position {list(first)}. Pull that row, too."
            )
    return read_rows(part.values, at), jnp.where(missing, height, ids)


def check_no_gradients(name: str, params: optax.Params) -> None:
    """Raises ``TypeError`` if parameters hold a row-sparse gradient."""
    for path, p in maps.leaves_with_path(params):
        if is_sparse(p):
            raise TypeError(
                f"{name} has an IndexedSlices at {structures.path_name(path)}, which "
                "is a gradient. Among parameters, rows of a table are "
                "gradxform.TableRows."
            )


def as_arrays(
    grads: optax.Updates, params: optax.Params
) -> tuple[optax.Updates, optax.Params]:
    """Gradients and parameters, with an array for each part of a table.

    The gradients count its rows from 0.

    Raises:
      TypeError: parameters hold a row-sparse gradient, or a part has a dense one.
    """
    if not any(isinstance(p, SparseLeaf) for p in maps.leaves(params)):
        return grads, params
    check_no_gradients("params", params)

    def renumbered(path: Path, p: Leaf, g: Leaf) -> Leaf:
        if not isinstance(p, TableRows) or not maps.has_gradient(g):
            return g
        if not is_sparse(g):
            raise TypeError(
                f"grads must be row-sparse at {structures.path_name(path)}, where "
                "params hold only a part of a table, got "
                f"{structures.describe(g)}."
            )
        return IndexedSlices(positions(p, g.indices), g.values, p.values.shape)

    return maps.map_with_path(renumbered, params, grads), maps.stored(params)


def with_rows(params: optax.Params, new: optax.Params) -> optax.Params:
    """Parameters with new arrays, where parts of tables have new rows."""
    return maps.map_leaves(
        lambda p, x: maps.with_values(p, x) if isinstance(p, TableRows) else x,
        params,
        new,
    )
