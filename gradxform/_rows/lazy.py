"""Any optimizer by the row: it acts on the rows of a table that a batch has touched."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import optax

from gradxform._checks import arguments, structures
from gradxform._jax import versions
from gradxform._rows import boundary
from gradxform._rows.by_row import Rows
from gradxform._rows.indexed_slices import IndexedSlices, filled, is_sparse
from gradxform._rows.stored_rows import RowSparseError
from gradxform._slices.kinds import States
from gradxform._slices.slices import MixedSlicesError
from gradxform._trees import maps
from gradxform._trees.extra_args import with_any_extra_args
from gradxform._trees.types import Leaf


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
        rows cannot act alone, as those of ``optax.contrib.muon``; its update mixes
        rows in another way than by sums and the like over all of them, as a sort or a
        ``cumsum`` over rows does, or by an operation that is not known; it has a NumPy
        array with a row for each of the table's; it calls a function of the parameters,
        as a line search does; or updates and parameters differ in structure or shape.
        The message names the table, and the operation. A derivative of the update may
        raise it, too: rules of ``jax.custom_jvp`` stay, and must act by the row as
        well; those of ``jax.custom_vjp`` are refused.

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
    arguments.check_transformation("inner", inner)
    versions.before_tracing()
    inner = with_any_extra_args(inner)

    def init_fn(params: optax.Params) -> optax.OptState:
        structures.check_leaves(params)
        return inner.init(maps.stored(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        if not any(map(is_sparse, maps.leaves(updates))):
            return inner.update(updates, state, params, **extra)
        if params is not None:
            structures.check_shapes("updates", updates, "params", params)
        updates = boundary.summed_rows(updates)
        rows = Rows.of(updates)
        like = [name for name, x in extra.items() if maps.is_like(x, updates)]
        extra = {k: x if k in like else _refused(k, x) for k, x in extra.items()}
        whole = maps.masked_like(updates, updates if params is None else params)
        states = States(rows.policy, rows.arrays(), inner.init, whole, are_rows=True)
        try:
            kinds, lacking = states.of_step(updates, state, params, extra)
            for error in lacking.values():
                raise error
            # U_r, S_r ← inner(G_r, S_r, W_r)
            new_updates, new_state = rows.run(
                lambda g, s, p, extra: inner.update(g, s, p, **extra),
                (updates, state, params, extra),
                kinds,
            )
            before: Any = maps.structure(state)
            if before != maps.structure(new_state):
                raise MixedSlicesError(
                    "its update returns a state of another structure, as that of "
                    "optax.monitor (use optax.snapshot)"
                )
        except MixedSlicesError as error:
            structures.check_own_shapes(state, jax.eval_shape(inner.init, whole))
            names = ", ".join(map(structures.path_name, rows.tables))
            raise RowSparseError(
                "gradxform.lazy runs its inner transformation on rows of the table "
                f"{names}, but {error}. Give the table another optimizer, with "
                "optax.partition, or put gradxform.densify() in front."
            ) from error.__cause__
        new_updates = maps.map_leaves(_without_padding, new_updates)
        return new_updates, maps.map_leaves(_written, new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _without_padding(u: Leaf) -> Leaf:
    """New updates of rows; zeros for padding."""
    if not isinstance(u, IndexedSlices):
        return u
    return maps.with_values(u, filled(u, u.values, 0))


def _written(new: Leaf, old: jax.typing.ArrayLike) -> Leaf:
    """A leaf of the new state, which may be rows of the old one."""
    return boundary.scatter_rows(new, old, new.values) if is_sparse(new) else new


def _refused(name: str, value: object) -> object:
    """Another extra argument. A function of the parameters must not get their rows."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise RowSparseError(
            f"inside of gradxform.lazy nothing can call {name}, a function of whole "
            "parameters: only rows of them are there."
        )

    return refused if callable(value) else value
