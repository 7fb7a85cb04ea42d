"""Parameters and state that lie over all processes of a server.

The processes form a mesh with the one axis ``"server"``, and all run the same programs
on it. Each process receives its own parts from outside. Here they become arrays of the
mesh, and no process needs another for that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from gradxform._group.layout import Layout, Part, Type, spec
from gradxform._server.placement import Arrays, is_function, with_gate
from gradxform._server.programs import TrainingStep, in_sizes, training_step
from gradxform._trees import maps
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.types import Leaf, Path, PyTree, T


class ShardedParams:
    """Stands for the parameters when a server starts in one of its processes.

    Args:
      params: this process's part of the parameters, as :meth:`Layout.part` gives it; or
        a function without arguments that gives all of them. The function is compiled,
        so no process ever holds the whole.
      layout: of the parameters.
      mesh: of one device of each process, along ``"server"``.

    Attributes:
      layouts: of parameters and state, once they are there.
      mesh: as given.
    """

    def __init__(self, params: optax.Params, layout: Layout, mesh: Mesh) -> None:
        self._params, self.mesh = params, mesh
        self.layouts: tuple[Layout, ...] = (layout,)
        self._here = [d for d in mesh.devices.flat if d in mesh.local_devices]

    def initialize(
        self, tx: optax.GradientTransformation
    ) -> tuple[optax.GradientTransformation, optax.Params, optax.OptState]:
        """A transformation with a gate, and parameters and state where they will stay.

        All processes must call it together.
        """
        (layout,) = self.layouts
        state = jax.eval_shape(tx.init, layout.types)
        tx = with_gate(tx, layout.types, state)
        self.layouts = layout, layout.of_state(tx.init)
        given, self._params = self._params, None
        init = self._made(
            lambda params: tx.init(_fitted(params, layout.types)), self.layouts[1]
        )
        with jax.disable_jit(False):  # The compiler puts the parts where they belong.
            if is_function(given):
                params = self._made(given, layout)()
            else:
                params = jax.block_until_ready(self.own(given))
            return tx, params, init(params)

    def _made(self, make: Callable[..., T], layout: Layout) -> Callable[..., T]:
        """Compiles ``make``, so that each process gets only its parts of the result."""
        return jax.jit(
            lambda *args: _fitted(make(*args), layout.padded),
            out_shardings=layout.shardings(self.mesh),
        )

    def own(self, tree: T, of: int = 0) -> T:
        """As :meth:`bring`, in memory that a step may donate."""
        tree = jax.tree.map(lambda x: x if self._lies_here(x) else np.array(x), tree)
        return self.bring(tree, of=of)

    def bring(self, tree: T, depth: int = 0, of: int = 0) -> T:
        """Makes arrays of the mesh: from parts, or from whole leaves for each process.

        Row-sparse gradients get one of few sizes. Arrays of the mesh stay as they are.

        Args:
          tree: a result of :meth:`Layout.part`. Among the extra arguments of a push
            only a :class:`Part` is a part, as other leaves may have the same shape.
          depth: as in :meth:`Layout.part`.
          of: 0 for a tree like the parameters, 1 for one like the state.
        """
        layout = self.layouts[of]
        flat = jax.tree.leaves_with_path(layout.padded)
        pairs = zip(flat, layout.cuts, strict=True)
        lie = {path: (x.shape, cut) for (path, x), cut in pairs}

        def bring(path: Path, x: Leaf | Part) -> Leaf:
            if not maps.has_gradient(x):
                return x
            if isinstance(x, IndexedSlices):
                return jax.tree.map(self._array, in_sizes(x))
            shape, cut = lie.get(path[depth:], (None, None))
            if isinstance(x, Part):
                return self._array(x.array, cut)
            if cut is None or depth:
                return self._array(x)
            part = list(shape)
            part[cut] = shape[cut] // self.mesh.size * len(self._here)
            return self._array(x, cut if np.shape(x) == tuple(part) else None)

        return jax.tree.map_with_path(bring, tree, is_leaf=maps.is_leaf)

    def _array(self, x: jax.typing.ArrayLike, cut: int | None = None) -> jax.Array:
        """An array of the mesh, from a part along the cut axis or from a whole leaf."""
        if self._lies_here(x):
            return x
        here, shape = self._here, list(np.shape(x))
        pieces = [x] * len(here)
        if cut is not None:
            pieces = [*np.split(x, len(here), cut)] if len(here) > 1 else pieces
            shape[cut] *= self.mesh.size // len(here)
        return jax.make_array_from_single_device_arrays(
            tuple(shape),
            NamedSharding(self.mesh, spec(cut)),
            list(map(jax.device_put, pieces, here)),
        )

    def _lies_here(self, x: object) -> TypeGuard[jax.Array]:
        there = getattr(x, "sharding", None)
        return isinstance(there, NamedSharding) and there.mesh == self.mesh

    def step(self, tx: optax.GradientTransformation) -> TrainingStep:
        """The step of a server, which sees arrays without their padding."""

        def step(
            arrays: Arrays,
            grads: optax.Updates,
            extra: dict[str, Any],
            local_step: np.int32,
        ) -> tuple[Arrays, jax.Array]:
            arrays, grads, extra = self._entered(tx.init, arrays, grads, extra)
            arrays, counters = training_step(tx, arrays, grads, extra, local_step)
            return self._left(arrays), counters

        return step

    def _entered(
        self,
        init: Callable[[optax.Params], optax.OptState],
        arrays: Arrays,
        grads: optax.Updates,
        extra: dict[str, Any],
    ) -> tuple[Arrays, optax.Updates, dict[str, Any]]:
        """Within a step's program: removes the padding from the step's arguments.

        The transformation may look at the number of rows, and must see the right one.
        The compiler turns the removal into masks. A table with a row-sparse gradient,
        or with none, keeps its padding: a mask would be the only pass over the whole
        table. Its gradient then counts the padding among the table's rows.
        """
        layout, of_state = self.layouts
        if layout.types == layout.padded and of_state.types == of_state.padded:
            return arrays, grads, extra
        given = dict(jax.tree.leaves_with_path(grads, is_leaf=maps.is_leaf))
        rows = {path for path, g in given.items() if maps.is_leaf(g)}
        seen = jax.tree.map_with_path(
            lambda path, x, padded: padded if path in rows else x,
            layout.types,
            layout.padded,
        )
        state = jax.eval_shape(init, seen)
        if not _can_be(state, of_state.padded):
            seen, state = layout.types, of_state.types
        arrays = _fitted(arrays, (seen, state))
        return arrays, self._like(seen, grads, 0), self._like(seen, extra, 1)

    def _left(self, arrays: Arrays) -> Arrays:
        """New parameters and state with their padding, as the processes hold them."""
        return _fitted(arrays, tuple(layout.padded for layout in self.layouts))

    def _like(self, seen: PyTree[Type], tree: T, depth: int) -> T:
        """Gives the leaves that are like parameters the shapes in ``seen``."""
        layout = self.layouts[0]
        trees = layout.types, layout.padded, seen
        flat = [dict(jax.tree.leaves_with_path(each)) for each in trees]

        def as_seen(path: Path, x: Leaf) -> Leaf:
            if not maps.has_gradient(x) or (path := path[depth:]) not in flat[0]:
                return x
            users, lies, shape = (each[path].shape for each in flat)
            if isinstance(x, IndexedSlices):
                return _taller(x, shape) if x.dense_shape == users else x
            return _fitted_array(x, shape) if np.shape(x) == lies else x

        return jax.tree.map_with_path(as_seen, tree, is_leaf=maps.is_leaf)


def _fitted(tree: T, like: PyTree[Type]) -> T:
    return jax.tree.map(lambda x, to: _fitted_array(x, to.shape), tree, like)


def _fitted_array(x: jax.typing.ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Removes padding or adds it."""
    x = jnp.asarray(x)
    if x.shape == shape:
        return x
    x = x[tuple(map(slice, shape))]
    return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, shape, strict=True)])


def _can_be(types: PyTree[Type], padded: PyTree[Type]) -> bool:
    """Whether padding alone makes the leaves of ``padded`` from those of ``types``."""
    pairs = zip(jax.tree.leaves(types), jax.tree.leaves(padded), strict=True)
    return all(
        x.ndim == lies.ndim and all(map(operator.le, x.shape, lies.shape))
        for x, lies in pairs
    )


def _taller(g: IndexedSlices, shape: tuple[int, ...]) -> IndexedSlices:
    """The same rows of a table with padding."""
    indices = jnp.where(g.indices < g.dense_shape[0], g.indices, shape[0])
    values = _fitted_array(g.values, (len(g.values), *shape[1:]))
    return IndexedSlices(indices, values, shape)
