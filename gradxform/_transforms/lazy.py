"""Any optimizer by the row: it acts on the rows of a table that a batch has touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._transforms import by_row
from gradxform._trees import arithmetic, checks, maps, versions
from gradxform._trees.extra_args import accepted_kwargs
from gradxform._trees.indexed_slices import IndexedSlices, RowSparseError, is_sparse
from gradxform._trees.placeholders import Placeholder, is_placeholder
from gradxform._trees.types import Leaf, Path, PyTree

# States with a row for each row of a table, which still cannot act by the row.
_SUM = "adds up several steps, and each touches other rows, so it belongs around lazy"
_NOT_BY_ROW = {
    "AccumulateState": _SUM,
    "ApplyEvery": _SUM,
    "ConditionalAccumulatorState": _SUM,
    "MultiStepsState": _SUM,
    "MeasureCosineState": "compares whole gradients",
    "MuonState": "mixes the rows of a matrix",
    "SAMState": "takes several steps on the same rows, and each touches others",
}


def lazy(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs any optimizer on the touched rows of tables alone.

    For each table :math:`W` with a row-sparse gradient :math:`G`, with the state
    :math:`S` that ``inner`` keeps for it, and with the rows :math:`r` that ``G`` has:

    .. math:: U_r, S_r \leftarrow inner(G_r, S_r, W_r)

    Repeated rows of ``G`` are summed first. The other rows of ``W`` and ``S`` stay as
    they are, to the bit. They are not read or written, so a step costs what its rows
    cost, however many rows the table has. State that ``inner`` keeps for all leaves
    together, such as Adam's count of steps, counts every step for every row. Dense
    gradients, also those of tables, are exactly ``inner``'s.

    A row that a batch does not touch is not decayed, and its momentum neither moves it
    nor fades. So for momentum, weight decay and the like this is another algorithm than
    ``inner`` on the dense gradient. If ``inner`` takes a norm of a leaf, as for a trust
    ratio, it is that of the touched rows; padding is in no sum. Sizes, as in masks,
    labels and means, are those of the table.

    An extra argument that is a tree like the parameters loses the other rows, too. If
    the table is all of the parameters, arrays like it stay whole: put the table into a
    dict to pass parameters, such as those of a worker.

    Args:
      inner: any transformation whose state has one row for each row of a table. `lazy`
        calls ``inner.init`` to find which state belongs to a table.

    Returns:
      A transformation with the state of ``inner``, so that checkpoints of one go on
      with the other. The updates of a table are an :class:`IndexedSlices`, with the
      touched rows in ascending order.

    Raises:
      TypeError: ``inner`` is no transformation. At an update: its state has no row for
        each row of a table, as that of ``optax.adafactor`` or :func:`novograd`; its
        rows cannot act alone, as those of ``optax.contrib.muon``; its update mixes rows
        but not by a sum, or is another one for a table of more rows; it calls a
        function of the parameters, as a line search does; or updates and parameters
        differ in structure or shape. The message names the table.

    References:
      ``tfa.optimizers.LazyAdam``, ``torch.optim.SparseAdam``.

    >>> import gradxform as gx, jax.numpy as jnp, optax
    >>> tx = gx.lazy(optax.sgd(1.0, momentum=0.5))
    >>> table = jnp.zeros((4, 1))
    >>> state = tx.init(table)  # That of optax.sgd.
    >>> for rows in [2, 0, 2], [0]:
    ...     grads = gx.IndexedSlices(rows, jnp.ones((len(rows), 1)), (4, 1))
    ...     updates, state = tx.update(grads, state, table)
    ...     table = gx.apply_updates(table, updates)
    >>> table.ravel()
    Array([-2.5,  0. , -2. ,  0. ], dtype=float32)
    >>> optax.tree.get(state, "trace").ravel()  # Row 2 rests in the second step.
    Array([1.5, 0. , 2. , 0. ], dtype=float32)
    """
    checks.transformation("inner", inner)
    versions.before_tracing()
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        return inner.init(maps.held(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        extra = accepted_kwargs(inner, extra)
        if not any(map(is_sparse, maps.leaves(updates))):
            return inner.update(updates, state, params, **extra)
        if params is not None:
            checks.same_shapes("updates", updates, "params", params)
        updates = maps.sum_duplicates(updates)
        tables = _tables(inner.init, updates, state, params)
        like = {name: x for name, x in extra.items() if _is_like(x, updates)}
        rest = {k: _refused(k, x) for k, x in extra.items() if k not in like}
        try:
            # U_r, S_r ← inner(G_r, S_r, W_r)
            new_updates, new_state = by_row.run(
                lambda g, s, p, like: inner.update(g, s, p, **like, **rest),
                maps.map_leaves(_values, updates),
                _rows(tables, state),
                None if params is None else _rows(updates, params),
                {name: _rows(updates, x) for name, x in like.items()},
            )
            before: Any = jax.tree.structure(state)
            if before != jax.tree.structure(new_state):
                raise by_row.MixedRowsError(
                    "its update returns a state of another structure, as that of "
                    "optax.monitor (use optax.snapshot)"
                )
        except by_row.MixedRowsError as error:
            paths = [path for path, _ in maps.nodes(updates, is_sparse)]
            names = ", ".join(map(checks.path_name, paths))
            raise RowSparseError(_refusal(names, str(error))) from error.__cause__
        new_updates = maps.map_leaves(_as_rows, updates, new_updates)
        return new_updates, maps.put_rows(tables, state, new_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _values(g: Leaf) -> Leaf | by_row.Rows:
    return by_row.Rows(g, g.values) if isinstance(g, IndexedSlices) else g


def _rows(tables: PyTree[IndexedSlices | None], tree: PyTree[Leaf]) -> PyTree[object]:
    """A tree with only the touched rows of each table."""
    return maps.map_leaves(
        lambda g, rows: by_row.Rows(g, rows) if is_sparse(g) else rows,
        tables,
        maps.rows(tables, tree),
    )


def _as_rows(g: Leaf, new: PyTree[Leaf]) -> PyTree[Leaf]:
    """New updates as those of a table's rows; zeros for padding."""
    if not isinstance(g, IndexedSlices):
        return new
    values = jnp.asarray(new)
    inside = arithmetic.expand(g.indices < g.dense_shape[0], values)
    return g.with_values(jnp.where(inside, values, 0))


def _is_like(value: object, updates: optax.Updates) -> bool:
    """Whether an extra argument is a tree like the parameters.

    An array that is like one that is all of the parameters may be anything else.
    """
    grads, structure = maps.flatten(updates)
    leaves, given = maps.flatten(value)
    is_same: bool = structure == given  # type: ignore[operator]
    return (
        is_same
        and structure.num_nodes > 1  # type: ignore[attr-defined]
        and all(
            np.shape(x) == g.dense_shape
            for x, g in zip(leaves, grads, strict=True)
            if isinstance(g, IndexedSlices)
        )
    )


def _refused(name: str, value: object) -> object:
    """Another extra argument. A function of the parameters must not get their rows."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise RowSparseError(
            f"inside of gradxform.lazy nothing can call {name}, a function of whole "
            "parameters: only rows of them are there."
        )

    return refused if callable(value) else value


def _tables(
    init: optax.TransformInitFn,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> PyTree[IndexedSlices | None]:
    """For each leaf of a state the gradient of its table; None if it has no table.

    Raises:
      TypeError: such a leaf has no row for each row of its table.
    """
    tables: dict[str, IndexedSlices] = {}

    def mark(path: Path, g: Leaf, p: optax.Params) -> optax.Params:
        if isinstance(g, IndexedSlices):
            tables[checks.path_name(path)] = g
            return Placeholder(checks.path_name(path))
        return g if isinstance(g, optax.MaskedNode) else p

    def resize(node: optax.Params) -> optax.Params:
        if (name := _table(node)) is None:
            return node
        g = tables[name]
        return jax.ShapeDtypeStruct((_other_height(g), *g.dense_shape[1:]), g.dtype)

    def check(path: Path, name: str | None, own: jax.Array, other: jax.Array) -> None:
        shape, other_shape = np.shape(own), np.shape(other)
        kinds, reason = [*_kinds(state, path)], ""
        if name is None:
            fits = shape == other_shape
        else:
            g, row = tables[name], shape[1:]
            heights = g.dense_shape[0], _other_height(g)
            fits = (shape, other_shape) == tuple((h, *row) for h in heights)
            kinds = [k for k in kinds if k in _NOT_BY_ROW] or kinds
            reason = _NOT_BY_ROW.get("".join(kinds[:1]), "")
        if reason or not fits:
            where = " of ".join([jax.tree_util.keystr(path), *kinds[-1:]])
            reason = reason or "has no row for each row of the table"
            what = f"the state {where}, of shape {list(shape)}, {reason}"
            raise RowSparseError(_refusal(name or ", ".join(tables), what))

    whole = updates if params is None else params
    marked = maps.map_with_path(mark, updates, whole)
    # A table of another height shows which state has a row for each of its rows.
    resized = jax.tree.map(resize, marked, is_leaf=is_placeholder)
    try:
        names = jax.tree.map(
            lambda node, own: jax.tree.map(lambda _: _table(node), own),
            jax.eval_shape(init, marked),
            state,
            is_leaf=is_placeholder,
        )
        other = jax.eval_shape(init, resized)
    except Exception as error:  # This init does not accept such nodes.
        what = "its init and the given state show no state of that table alone"
        raise RowSparseError(_refusal(", ".join(tables), what)) from error
    jax.tree.map_with_path(check, names, state, other, is_leaf=_none)
    return jax.tree.map(
        lambda name: None if name is None else tables[name],
        names,
        is_leaf=_none,
    )


def _refusal(table: str, what: str) -> str:
    return (
        "gradxform.lazy runs its inner transformation on rows of the table "
        f"{table}, but {what}. Give the table another optimizer, with "
        "optax.partition, or put gradxform.densify() in front."
    )


def _none(node: object) -> bool:
    return node is None


def _table(node: object) -> str | None:
    """The name of the table that this node replaces; None if it replaces none."""
    name = node.key if isinstance(node, Placeholder) else None
    return name if isinstance(name, str) else None


def _other_height(g: IndexedSlices) -> int:
    """The number of rows that are given, or one more if the table has as many."""
    n = len(g.indices)
    return n if n != g.dense_shape[0] else n + 1


def _kinds(node: Any, path: Path) -> Iterator[str]:
    """The classes of the ``NamedTuple``s on a path, which a state is made of."""
    for key in path:
        if hasattr(node, "_fields"):
            yield type(node).__name__
        if isinstance(key, jax.tree_util.GetAttrKey):
            node = getattr(node, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            node = node[key.key]
        else:  # A node of another kind, as in the parameters' own tree.
            return
