"""Which part of each array lies in which process of a server.

A layout is only a description. It holds no array and no device, so it can be sent.

An array is cut along one axis into equal pieces, and process k has the k-th. So the
number of processes must divide the length of that axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from gradxform._checks import arguments, structures
from gradxform._devices.mesh import axes_of
from gradxform._slices.kinds import axes_that_differ
from gradxform._trees import maps
from gradxform._trees.types import Leaf, Param, Path, PyTree, T

AXIS = "server"  # The name of the mesh's axis.
LARGE = 1 << 20  # Bytes: a larger array is cut, unless the user says otherwise.

Type: TypeAlias = jax.ShapeDtypeStruct  # Shape and dtype of a leaf.
# How a user wants parameters to be cut; None for the default. See `ServerLayout.of`.
Shardings: TypeAlias = PyTree[P | None] | Callable[[str, tuple[int, ...]], P | None]


class ServerLayout(NamedTuple):
    """Where the leaves of a tree lie.

    Attributes:
      types: the tree as users see it, of ``jax.ShapeDtypeStruct``.
      cuts: for each leaf the axis along which it is cut, or None if each process has
        the whole leaf.
      processes: how many there are.
    """

    types: PyTree[Type]
    cuts: tuple[int | None, ...]
    processes: int

    @classmethod
    def of(
        cls, params: PyTree[Param], processes: int, shardings: Shardings = None
    ) -> ServerLayout:
        """The layout of parameters.

        Args:
          params: arrays, or their descriptions.
          processes: how many there are.
          shardings: a tree like ``params``, or a prefix of one, of ``PartitionSpec``
            over the axis ``"server"``; or a function ``(path, shape) ->
            PartitionSpec``, with paths such as ``"encoder/emb"``. The default, also for
            a leaf with ``None``: a leaf of more than a megabyte is cut along its first
            axis, unless it has fewer rows than there are processes. Any other leaf is
            whole in each process.

        Raises:
          TypeError: ``processes`` is no integer; ``shardings`` holds something else.
          ValueError: ``processes`` is below 1; ``shardings`` is no prefix of
            ``params``, or asks for an impossible cut, with the leaf's path; or the
            length of an axis to cut does not divide.
        """
        arguments.in_range(
            "server_processes", processes, arguments.COUNTS, integer=True
        )
        types = jax.eval_shape(lambda tree: tree, params)
        flat = jax.tree.leaves_with_path(types)
        if callable(shardings):
            specs = [shardings(structures.path_str(path), x.shape) for path, x in flat]
        else:
            try:
                specs = structures.prefix("server_shardings", shardings, types)
            except TypeError as error:
                raise ValueError(str(error)) from None
            structure: jax.tree_util.PyTreeDef = jax.tree.structure(types)
            specs = structure.flatten_up_to(specs)
        cuts = [
            _cut(path, x, spec, processes)
            for (path, x), spec in zip(flat, specs, strict=True)
        ]
        return cls(types, tuple(cuts), int(processes))

    def cut_of(self) -> Callable[[Path, Leaf], int | None]:
        """A function of a path and a leaf: the axis along which the leaf is cut.

        It is that of the parameter with this path. A leaf of another shape is not cut,
        nor are the rows of a table.
        """
        return maps.matching(self.types, self.cuts, None)

    def part(self, tree: T, process: int) -> T:
        """A process's share of a tree like this one: parts, or whole leaves.

        Parts are NumPy arrays, and views if possible. Row-sparse leaves stay as they
        are.

        Args:
          tree: arrays, row-sparse gradients and ``None``.
          process: from 0.
        """
        cut_of = self.cut_of()

        def take(path: Path, x: Leaf) -> Leaf:
            cut = cut_of(path, x)
            return x if cut is None else self.piece(np.asarray(x), cut, process)

        return jax.tree.map_with_path(take, tree, is_leaf=maps.is_leaf)

    def piece(
        self, x: np.ndarray[Any, Any], cut: int, process: int
    ) -> np.ndarray[Any, Any]:
        """A process's part of an array that is cut along this axis."""
        return np.ascontiguousarray(np.split(x, self.processes, cut)[process])

    def of_state(self, init: Callable[[optax.Params], optax.OptState]) -> ServerLayout:
        """The layout of the optimizer state: each leaf is cut like its parameter.

        To find the axis to cut, it calls ``init`` with longer parameters: the axis of
        the state that grows is the one. So the axis may have another number than in
        the parameter, and the leaf may have fewer axes.

        Args:
          init: that of a transformation.
        """

        def longer(x: Type, cut: int | None) -> Type:
            shape = [n + self.processes * (i == cut) for i, n in enumerate(x.shape)]
            return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)

        params = self.types, self.map(longer)
        types, grown = (jax.eval_shape(init, each) for each in params)
        after = {path: x.shape for path, x in jax.tree.leaves_with_path(grown)}

        def cut_of(path: Path, x: Type) -> int | None:
            # A leaf that is made in a more intricate way is whole in each process.
            axes = axes_that_differ(x.shape, after.get(path, ()))
            return axes[0] if axes and x.shape[axes[0]] % self.processes == 0 else None

        cuts = tuple(cut_of(path, x) for path, x in jax.tree.leaves_with_path(types))
        return ServerLayout(types, cuts, self.processes)

    def map(self, f: Callable[[Type, int | None], T]) -> PyTree[T]:
        """The tree of ``f(type, cut)`` of each leaf."""
        leaves, structure = jax.tree.flatten(self.types)
        return jax.tree.unflatten(structure, map(f, leaves, self.cuts))


def spec(cut: int | None) -> P:
    """The ``PartitionSpec`` of an array that is cut along this axis."""
    return P() if cut is None else P(*[None] * cut, AXIS)


def _cut(path: Path, x: Type, asked: object, processes: int) -> int | None:
    """The axis along which a leaf is cut, as its ``PartitionSpec`` or its size says."""
    if asked is None:
        large = x.size * np.dtype(x.dtype).itemsize > LARGE
        asked = spec(0 if large and x.shape[0] >= processes else None)
    where = f"server_shardings: {asked!r} at {structures.path_name(path)}"
    if not isinstance(asked, P):
        raise TypeError(f"{where} is no jax.sharding.PartitionSpec.")
    named = [(i, name) for i, entry in enumerate(asked) for name in axes_of([entry])]
    if not named and len(asked) <= x.ndim:
        return None
    axis, name = named[0] if len(named) == 1 else (0, None)
    if len(asked) > x.ndim or name != AXIS or x.shape[axis] % processes:
        raise ValueError(
            f"{where} cannot cut shape {list(x.shape)} into {processes} equal parts: "
            f"let one axis, whose length {processes} divides, have the name {AXIS!r}; "
            "or give P() to have the leaf whole in each process."
        )
    return axis if processes > 1 else None
