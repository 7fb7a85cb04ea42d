"""The boundary between row-sparse gradients and formulas, which are of arrays.

A formula that is not linear in the gradient needs repeated rows summed first, and one
that also reads state or parameters needs the rows that the gradient touches. So a
transformation begins with rows that are summed (:func:`summed_rows`), and
:func:`map_step` shows a formula the touched rows of a leaf and of its state. Summed
rows stay summed: the next transformation finds nothing to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._numbers import arithmetic, constants
from gradxform._rows import indexed_slices, table_rows
from gradxform._rows.indexed_slices import is_sparse
from gradxform._rows.opaque import SHORT_HINT
from gradxform._rows.rows import take_rows, take_summed, write_summed
from gradxform._rows.stored_rows import RowSparseError, unchecked
from gradxform._rows.table_rows import TableRows, positions
from gradxform._trees import maps
from gradxform._trees.types import Gradient, Leaf, PyTree, SparseLeaf


def summed_rows(updates: optax.Updates) -> optax.Updates:
    """Gradients as a formula takes them: repeated rows summed, None for float0.

    A transformation that is linear in the gradients needs no summed rows.
    """
    return maps.map_leaves(
        lambda g: g.sum_duplicates() if is_sparse(g) else g,
        maps.without_float0(updates),
    )


def map_step(
    f: Callable[..., tuple[jax.Array, ...]],
    updates: optax.Updates,
    state: Sequence[PyTree[Leaf]],
    *rest: PyTree[object],
    reads: Sequence[PyTree[Leaf]] = (),
) -> list[Any]:  # Updates, and trees as in `state`.
    """New updates and new state: ``u, *s = f(g, *s, *reads, *rest)``, by the gradient.

    Of a table with a row-sparse gradient ``f`` gets the touched rows, from the gradient
    with repeated rows summed, from the state, and from trees that it only reads, such
    as parameters. Its results for them are written into the table. A state leaf
    keeps its dtype, and a tree of state its nodes, if it has a leaf for each gradient.
    A leaf without gradient keeps its state.
    """
    gradients, treedef = maps.flatten(summed_rows(updates))
    num_state, end = len(state), len(state) + len(reads)

    def step(g: Leaf, *others: Any) -> Sequence[Leaf]:
        old, rest = others[:num_state], others[end:]
        if not maps.has_gradient(g):
            return g, *old
        if not is_sparse(g):
            u, *new = f(*map(jnp.asarray, (g, *others[:end])), *rest)
            pairs = zip(old, new, strict=True)
            return u, *(x.astype(jnp.asarray(s).dtype) for s, x in pairs)
        seen = (gather_rows(g, x) for x in others[:end])
        u, *new = f(g.values, *seen, *rest)
        pairs = zip(old, new, strict=True)
        kept = (scatter_rows(g, s, x.astype(maps.gradient_dtype(s))) for s, x in pairs)
        return maps.with_values(g, u), *kept

    up_to = treedef.flatten_up_to  # type: ignore[attr-defined]
    columns = gradients, *map(maps.leaves, state), *map(up_to, (*reads, *rest))
    results = [step(*row) for row in zip(*columns, strict=True)]
    return [
        jax.tree.unflatten(maps.structure(tree), [result[i] for result in results])
        for i, tree in enumerate((updates, *state))
    ]


def gather_rows(g: Leaf, x: Gradient) -> jax.Array:
    """The rows of a leaf that a summed row-sparse gradient touches; else all of it.

    Padding reads zeros, and so do rows that a part of a table or a gradient lacks.
    """
    if not is_sparse(g):
        return jnp.asarray(x)
    if is_sparse(x):
        x = x.sum_duplicates()
        x = param_rows(x, x.values)
    if isinstance(x, TableRows):
        return take_rows(x.values, positions(x, g.indices))
    return take_summed(jnp.asarray(x), g.indices)


def param_rows(g: Leaf, rows: jax.Array) -> jax.Array | TableRows:
    """A parameter with only the rows that :func:`gather_rows` gave; else the leaf."""
    return (
        unchecked(TableRows, g.indices, rows, g.dense_shape) if is_sparse(g) else rows
    )


def scatter_rows(
    g: Leaf,
    table: jax.typing.ArrayLike,
    new: jax.Array,
    keeps: jax.Array | None = None,
) -> jax.Array:
    """A leaf with new rows at those that the gradient touches; else the new leaf.

    A donated table is written in place, and its other rows are not read or written. If
    ``keeps`` is given and False, they become zero.
    """
    if not is_sparse(g):
        return new
    table = jnp.asarray(table)

    def write(table: jax.Array) -> jax.Array:
        return write_summed(table, g.indices, new.astype(table.dtype))

    if keeps is None:
        return write(table)
    table_type = jax.typeof(table)
    return jax.lax.cond(
        keeps,
        lambda: write(table),
        lambda: write(constants.zeros_of_type(table_type)),
    )


def all_finite(g: Gradient) -> jax.Array:
    """bool[], whether a gradient holds neither NaN nor inf; padding does not count."""
    x, inside = jnp.asarray(maps.stored(g)), None
    if is_sparse(g):
        inside = arithmetic.expand(g.indices < g.dense_shape[0], x)
    elif x.dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        # x - floor(x) is in [0, 1], or NaN if x is not finite. On CPU this sum is one
        # pass that writes nothing to memory. So is the maximum, but there the compiler
        # drops NaN. For x - x it takes 0 with xla_cpu_enable_fast_math.
        return jnp.isfinite(jnp.sum(x - jnp.floor(x)))
    # For other dtypes, or with padding, it writes less if it writes only these bools.
    return jnp.all(jnp.isfinite(x), where=inside)


def check_dense(
    name: str,
    tree: PyTree[Leaf],
    needs: str = "changes every row at every step, so it takes dense gradients",
    hint: str = "Use gradxform.lazy(optax.adamw(...)) or adagrad for this leaf, or put "
    "gradxform.densify() in front, which costs work on the whole table.",
) -> None:
    """Raises ``RowSparseError`` for a row-sparse leaf; it says what is needed."""
    for path, leaf in maps.leaves_with_path(tree):
        if isinstance(leaf, SparseLeaf):
            got = f"{structures.describe(leaf)} at {structures.path_name(path)}"
            raise RowSparseError(f"{name} {needs}, got {got}. {hint}")


def raise_if_refused(error: Exception, message: str, params: optax.Params) -> None:
    """Raises ``RowSparseError`` if a transformation has refused row-sparse gradients.

    The message has a place for the names of the parts of tables in ``params``.
    """
    # JAX's own errors have the last one in them.
    hints = indexed_slices.HINT, table_rows.HINT, SHORT_HINT
    if any(hint in str(error) for hint in hints):
        found = maps.leaves_with_path(params)
        names = [
            structures.path_name(at) for at, p in found if isinstance(p, SparseLeaf)
        ]
        raise RowSparseError(message.format(", ".join(names))) from error


@contextlib.contextmanager
def explained(updates: optax.Updates) -> Iterator[None]:
    """Says that row-sparse updates may have made a transformation fail.

    Raises:
      RowSparseError: it has refused them. To any other error it adds a note.
    """
    try:
        yield
    except RowSparseError:
        raise
    except Exception as error:
        if any(map(is_sparse, maps.leaves(updates))):
            raise_if_refused(error, indexed_slices.HINT, ())
            error.add_note(f"This may be the reason: {indexed_slices.HINT}")
        raise
