"""Maps over trees that know every kind of leaf a gradient tree may hold.

A leaf of a gradient tree is an array; an ``IndexedSlices``, of which the maps here show
a function the values alone; or ``None`` where the loss gave no gradient: ``None`` stays
``None`` in updates, and the state that belongs to it stays as it was.
``optax.MaskedNode`` is a node without leaves and passes through by itself.

A function that is not linear in the gradient needs repeated rows summed first, and one
that reads state or parameters beside them the rows that they touch::

    updates = sum_duplicates(updates)
    new = map_state(f, updates, rows(updates, state))
    state = put_rows(updates, state, new)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._trees import arithmetic
from gradxform._trees.indexed_slices import IndexedSlices, add_rows, is_sparse
from gradxform._trees.rows import places, take_rows, take_summed, write_summed


def is_leaf(node: Any) -> bool:
    """What the maps here stop at, beside arrays."""
    return node is None or isinstance(node, IndexedSlices)


def values(g: Any) -> jax.Array:
    """The entries of a gradient that there are, as an array."""
    return jnp.asarray(g.values if isinstance(g, IndexedSlices) else g)


def dtype_of(g: Any) -> np.dtype[Any]:
    """The dtype of a gradient's entries, whatever kind of leaf it is."""
    return values(g).dtype


def all_finite(g: Any) -> jax.Array:
    """bool[], whether a gradient holds neither NaN nor inf; padding does not count."""
    x, held = values(g), None
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.array(True)
    if isinstance(g, IndexedSlices):
        held = arithmetic.expand(g.indices < g.dense_shape[0], x)
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    # Of a largest number, which NaN spoils as inf does: that is one pass, where the
    # compiler for CPU writes down what `isfinite` gives for each entry.
    largest = [jnp.max(jnp.abs(part), initial=0, where=held) for part in parts]
    return jnp.all(jnp.isfinite(jnp.stack(largest)))


def map_updates(f: Callable[..., Any], updates: Any, *rest: Any) -> Any:
    """``f`` of each gradient, of its values where it is row-sparse; ``None`` stays."""

    def update(g: Any, *r: Any) -> Any:
        if g is None:
            return None
        new = f(values(g), *r)
        return g.with_values(new) if isinstance(g, IndexedSlices) else new

    return jax.tree.map(update, updates, *rest, is_leaf=is_leaf)


def map_state(f: Callable[..., Any], updates: Any, state: Any, *rest: Any) -> Any:
    """New state leaves ``f(g, s, ...)``; a leaf without gradient keeps its state."""
    return jax.tree.map(
        lambda g, s, *r: s if g is None else f(values(g), jnp.asarray(s), *r),
        updates,
        state,
        *rest,
        is_leaf=is_leaf,
    )


def sum_duplicates(updates: Any) -> Any:
    """The same updates, no row of a row-sparse one given twice."""
    return jax.tree.map(
        lambda g: g.sum_duplicates() if isinstance(g, IndexedSlices) else g,
        updates,
        is_leaf=is_leaf,
    )


def rows(updates: Any, state: Any) -> Any:
    """State, of tables the rows alone that summed row-sparse updates touch.

    Padding reads zeros, and so does what a part of a table does not hold.
    """

    def take(g: Any, table: Any) -> Any:
        if not isinstance(g, IndexedSlices):
            return table
        if not isinstance(table, IndexedSlices):
            return take_summed(jnp.asarray(table), g.indices)
        part = table.sum_duplicates()
        return take_rows(part.values, places(g.indices, part.indices))

    return jax.tree.map(take, updates, state, is_leaf=is_leaf)


def put_rows(updates: Any, state: Any, new: Any) -> Any:
    """``state`` with the rows that summed updates touch from ``new``, else ``new``.

    A donated table is written in place, and no other row of it is read or written.
    """

    def put(g: Any, table: Any, rows: Any) -> Any:
        if not isinstance(g, IndexedSlices):
            return rows
        table = jnp.asarray(table)
        return write_summed(table, g.indices, rows.astype(table.dtype))

    return jax.tree.map(put, updates, state, new, is_leaf=is_leaf)


def added(update: Any, p: jax.Array) -> jax.Array:
    """A parameter with its update added, in its dtype, and rounded once."""
    if isinstance(update, IndexedSlices):
        return add_rows(p, update)
    return arithmetic.added(jnp.asarray(update), p)


def map_params(f: Callable[..., Any], params: Any, *rest: Any) -> Any:
    """``jax.tree.map`` over parameters, which may be Python or NumPy numbers.

    Or no more than described, as ``jax.eval_shape`` does it: ``f`` then sees a
    ``jax.ShapeDtypeStruct``. Of a part of a table it sees the rows.
    """
    return jax.tree.map(lambda p, *r: f(param(p), *r), held(params), *rest)


def held(params: Any) -> Any:
    """The same, of parts of tables the rows that they hold, as tables of their own."""
    return jax.tree.map(
        lambda p: p.sum_duplicates().values if isinstance(p, IndexedSlices) else p,
        params,
        is_leaf=is_leaf,
    )


def param(p: Any) -> Any:
    """A parameter as an array, or no more than described."""
    return p if isinstance(p, jax.ShapeDtypeStruct) else jnp.asarray(p)


def broadcast(prefix: Any, tree: Any) -> Any:
    """One value of the prefix tree for each leaf of ``tree``; ``None`` stays.

    The prefix may be a function of ``tree``. A tree without leaves comes back as it is:
    in ``optax.tree.map_params`` one such node stands for all parameters.
    """
    if not jax.tree.leaves(tree):
        return tree

    def fill(value: Any, part: Any) -> Any:
        return jax.tree.map(lambda _: value, part, is_leaf=is_sparse)

    prefix = prefix(tree) if _is_function(prefix) else prefix
    return jax.tree.map(fill, prefix, tree, is_leaf=is_leaf)


def _is_function(prefix: Any) -> bool:
    """To be called, and not a tree whose root can be called, as an Equinox module."""
    is_partial = isinstance(prefix, functools.partial)  # jax.tree_util's is a node too.
    return callable(prefix) and (is_partial or jax.tree_util.all_leaves([prefix]))


def cast_like(tree: Any, reference: Any) -> Any:
    """Each leaf in the dtype of its reference; ``None`` stays."""
    return map_updates(lambda x, r: x.astype(dtype_of(r)), tree, reference)
