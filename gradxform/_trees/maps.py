"""Maps over trees that know every kind of leaf a gradient tree may hold.

A leaf of a gradient tree is an array, an ``IndexedSlices``, or says that there is no
gradient: ``None``, an ``optax.MaskedNode``, or the ``float0`` that JAX gives for
integers. The maps here show a function only the values of an ``IndexedSlices``. Where
there is no gradient, the leaf stays in updates, a ``float0`` as ``None``, its state
stays as it was, and whatever other trees hold there is not looked at.

A function that is not linear in the gradient needs repeated rows summed first. A
function that also reads state or parameters needs the rows that the gradient touches.
:func:`map_step` does both, so a formula is one function of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._rows.indexed_slices import IndexedSlices, add_rows, is_sparse
from gradxform._rows.rows import take_rows, take_summed, write_summed
from gradxform._rows.table_rows import TableRows
from gradxform._trees import arithmetic
from gradxform._trees.types import Gradient, Leaf, Param, Path, Prefix, PyTree, T


def is_leaf(node: object) -> bool:
    """Whether the maps here stop at this node, although it is no array."""
    return node is None or isinstance(node, IndexedSlices | optax.MaskedNode)


# The functions of `jax.tree`, which stop at these nodes.
flatten = functools.partial(jax.tree.flatten, is_leaf=is_leaf)
leaves = functools.partial(jax.tree.leaves, is_leaf=is_leaf)
leaves_with_path = functools.partial(jax.tree.leaves_with_path, is_leaf=is_leaf)
map_leaves = functools.partial(jax.tree.map, is_leaf=is_leaf)
map_with_path = functools.partial(jax.tree.map_with_path, is_leaf=is_leaf)
structure = functools.partial(jax.tree.structure, is_leaf=is_leaf)


def nodes(
    tree: PyTree[object], is_one: Callable[[object], bool]
) -> list[tuple[Path, Any]]:  # Of any kind.
    """The outermost such nodes of a tree, from left to right, with their paths."""
    found = jax.tree.leaves_with_path(tree, is_leaf=is_one)
    return [(path, node) for path, node in found if is_one(node)]


def has_gradient(g: T | None) -> TypeGuard[T]:
    """Whether a leaf holds a gradient."""
    if g is None or isinstance(g, optax.MaskedNode):
        return False
    return getattr(g, "dtype", None) != jax.dtypes.float0


def without_float0(updates: optax.Updates) -> optax.Updates:
    """The same updates, with ``None`` for each ``float0``, which JAX gives integers."""
    return map_leaves(_without_float0, updates)


def _without_float0(g: Leaf) -> Leaf:
    return None if getattr(g, "dtype", None) == jax.dtypes.float0 else g


def masked_like(updates: optax.Updates, tree: PyTree[T]) -> PyTree[T]:
    """The tree, masked where the updates are; ``optax.masked`` does not do that.

    A tree of another structure comes back as it is.
    """

    def mask(g: Leaf, x: T) -> T | optax.MaskedNode:
        return g if isinstance(g, optax.MaskedNode) else x

    try:
        return map_leaves(mask, updates, tree)
    except ValueError:
        return tree


def is_like(value: object, updates: optax.Updates) -> bool:
    """Whether an extra argument is a tree like the parameters.

    An array that is like one that is all of the parameters may be anything else.
    """
    wanted: Any = structure(updates)
    return (
        wanted.num_nodes > 1
        and wanted == structure(value)
        and all(
            np.shape(x) == g.dense_shape
            for x, g in zip(leaves(value), leaves(updates), strict=True)
            if isinstance(g, IndexedSlices)
        )
    )


def values(g: Gradient) -> jax.Array:
    """The stored entries of a gradient, as an array."""
    return jnp.asarray(g.values if isinstance(g, IndexedSlices) else g)


def dtype_of(g: Gradient) -> np.dtype[np.generic]:
    """The dtype of a gradient's entries, for any kind of leaf."""
    return values(g).dtype


def all_finite(g: Gradient) -> jax.Array:
    """bool[], whether a gradient holds neither NaN nor inf; padding does not count."""
    x, held = values(g), None
    if isinstance(g, IndexedSlices):
        held = arithmetic.expand(g.indices < g.dense_shape[0], x)
    elif x.dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        # x - floor(x) is in [0, 1], or NaN if x is not finite. On CPU this sum is one
        # pass that writes nothing to memory. So is the maximum, but there the compiler
        # drops NaN. For x - x it takes 0 with xla_cpu_enable_fast_math.
        return jnp.isfinite(jnp.sum(x - jnp.floor(x)))
    # For other dtypes, or with `held`, it writes less if it writes only these bools.
    return jnp.all(jnp.isfinite(x), where=held)


def map_updates(
    f: Callable[..., PyTree[jax.Array]], updates: optax.Updates, *rest: PyTree[object]
) -> optax.Updates:
    """``f`` of each gradient, or of its values if it is row-sparse.

    For rows ``f`` returns as many rows, and the result is an ``IndexedSlices`` of them
    with the indices of the gradient.
    """

    def update(g: Leaf, *r: object) -> PyTree[Leaf]:
        if not has_gradient(g):
            return _without_float0(g)
        new: Any = f(values(g), *r)  # For rows it is an array.
        return g.with_values(new) if isinstance(g, IndexedSlices) else new

    return map_leaves(update, updates, *rest)


def map_state(
    f: Callable[..., jax.Array],
    updates: optax.Updates,
    state: PyTree[Leaf],
    *rest: PyTree[Leaf],
) -> PyTree[Leaf]:
    """New state leaves ``f(g, s, ...)``; a leaf without gradient keeps its state.

    For rows ``f`` gets their values and the leaf of ``state`` as it is: the same rows
    if :func:`rows` has taken them. The result is what ``f`` returns, an array of these
    rows, until :func:`put_rows` writes them into the table.
    """
    return map_leaves(
        lambda g, s, *r: f(values(g), jnp.asarray(s), *r) if has_gradient(g) else s,
        updates,
        state,
        *rest,
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
    gradients, treedef = flatten(sum_duplicates(updates))
    number, end = len(state), len(state) + len(reads)

    def step(g: Leaf, *others: Any) -> Sequence[Leaf]:
        old, given = others[:number], others[end:]
        if not has_gradient(g):
            return _without_float0(g), *old
        touched = (jnp.asarray(rows(g, x)) for x in others[:end])
        u, *new = f(values(g), *touched, *given)
        pairs = zip(old, new, strict=True)
        kept = (put_rows(g, s, x.astype(dtype_of(s))) for s, x in pairs)
        return g.with_values(u) if isinstance(g, IndexedSlices) else u, *kept

    up_to = treedef.flatten_up_to  # type: ignore[attr-defined]
    columns = gradients, *map(leaves, state), *map(up_to, (*reads, *rest))
    results = [step(*row) for row in zip(*columns, strict=True)]
    return [
        jax.tree.unflatten(structure(tree), [result[i] for result in results])
        for i, tree in enumerate((updates, *state))
    ]


def sum_duplicates(updates: optax.Updates) -> optax.Updates:
    """The same updates, with repeated rows summed."""
    return map_leaves(lambda g: g.sum_duplicates() if is_sparse(g) else g, updates)


def rows(updates: optax.Updates, state: PyTree[Leaf]) -> PyTree[Leaf]:
    """State, with only those rows of tables that summed row-sparse updates touch.

    Padding reads zeros, and so do rows that a part of a table lacks.
    """

    def touched(g: Leaf, table: Gradient) -> Leaf:
        if not isinstance(g, IndexedSlices):
            return table
        if not isinstance(table, IndexedSlices):
            return take_summed(jnp.asarray(table), g.indices)
        part = TableRows.of(table)
        return take_rows(part.values, part.positions(g.indices))

    return map_leaves(touched, updates, state)


def put_rows(
    updates: optax.Updates, state: PyTree[Leaf], new: PyTree[Leaf]
) -> PyTree[Leaf]:
    """Writes the rows in ``new`` into their tables; other leaves are those of ``new``.

    A donated table is written in place, and its other rows are not read or written.
    """

    def written(g: Leaf, table: jax.typing.ArrayLike, rows: jax.Array) -> jax.Array:
        if not isinstance(g, IndexedSlices):
            return rows
        table = jnp.asarray(table)
        return write_summed(table, g.indices, rows.astype(table.dtype))

    return map_leaves(written, updates, state, new)


def add_update(u: Gradient, p: jax.Array) -> jax.Array:
    """``p + u`` in the dtype of ``p``, rounded once."""
    if isinstance(u, IndexedSlices):
        return add_rows(p, u)
    return arithmetic.rounded_sum(jnp.asarray(u), p)


def map_params(
    f: Callable[..., T], params: optax.Params, *rest: PyTree[object]
) -> PyTree[T]:
    """``jax.tree.map`` over parameters, which may be Python or NumPy numbers.

    They may also be descriptions, as in ``jax.eval_shape``: then ``f`` sees a
    ``jax.ShapeDtypeStruct``. From a part of a table it sees the rows.
    """
    return jax.tree.map(lambda p, *r: f(param(p), *r), held(params), *rest)


def held(params: optax.Params) -> optax.Params:
    """The same parameters, where a part of a table is a table of its rows."""
    return map_leaves(lambda p: TableRows.of(p).values if is_sparse(p) else p, params)


def param(p: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> Param:
    """A parameter as an array; a description stays as it is."""
    return p if isinstance(p, jax.ShapeDtypeStruct) else jnp.asarray(p)


def broadcast(prefix: Prefix[T], tree: PyTree[Leaf]) -> PyTree[T]:
    """One value of the prefix tree for each leaf of ``tree``; ``None`` stays.

    The prefix may be a function of ``tree``. A tree without leaves comes back
    unchanged: in ``optax.tree.map_params`` one such node stands for all parameters.
    """
    if not jax.tree.leaves(tree):
        return tree

    def fill(value: T, branch: PyTree[Leaf]) -> PyTree[T]:
        return jax.tree.map(
            lambda x: value if has_gradient(x) else None, branch, is_leaf=is_sparse
        )

    return map_leaves(fill, prefix_of(prefix, tree), tree)


def prefix_of(prefix: Prefix[T], tree: PyTree[Leaf]) -> PyTree[T]:
    """The prefix tree; if a function was given, what it returns for ``tree``."""
    return prefix(tree) if _is_function(prefix) else prefix


def _is_function(
    prefix: Prefix[T],
) -> TypeGuard[Callable[[optax.Params], PyTree[T]]]:
    """Whether to call it. An Equinox module is callable too, but it is a tree."""
    is_partial = isinstance(prefix, functools.partial)  # jax.tree_util's is a node too.
    return callable(prefix) and (is_partial or jax.tree_util.all_leaves([prefix]))


def cast_like(tree: optax.Updates, reference: PyTree[Gradient]) -> optax.Updates:
    """Each leaf in the dtype of its reference; ``None`` stays."""
    return map_updates(lambda x, r: x.astype(dtype_of(r)), tree, reference)
