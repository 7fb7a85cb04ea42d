"""Parcels: messages between a worker and a server of several processes, in parts.

Each process sends and receives only its own parts of the arrays that are cut. All else
is sent once: in Ray's object store if it is large, otherwise in the message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradxform._server import wire
from gradxform._server.layout import Layout, Part
from gradxform._trees import maps
from gradxform._trees.indexed_slices import IndexedSlices, ascending
from gradxform._trees.types import Leaf, T

SMALL = 1 << 15  # Bytes: anything smaller travels in the message itself.


class Cut:
    """Stands for a leaf that is cut, by its number among the cut leaves."""

    def __init__(self, number: int) -> None:
        self.number = number


class Payload(NamedTuple):
    """Something to send: a reference into the object store, or the value itself."""

    ref: object
    value: Any  # Of any type.

    @classmethod
    def of(cls, tree: T, copy: Callable[[T], T] = lambda tree: tree) -> Payload:
        """Puts a large tree into the store, and copies a small one."""
        leaves = jax.tree.leaves(tree, is_leaf=maps.is_leaf)
        size = sum(getattr(getattr(x, "values", x), "nbytes", 0) for x in leaves)
        if size < SMALL:
            return cls(None, copy(tree))
        return cls(sys.modules["ray"].put(tree), None)

    def take(self, get: Callable[[Any], Any] | None = None) -> Any:
        """The value."""
        if self.ref is None:
            return self.value
        return (get or sys.modules["ray"].get)(self.ref)


def packed(arrays: Iterable[np.ndarray[Any, Any]]) -> list[wire.Bytes]:
    """NumPy arrays ready to be sent, without a copy in the message."""
    return list(map(wire.Bytes, arrays))


class Message(NamedTuple):
    """Gradients and extra arguments on their way to the processes of a server.

    Attributes:
      whole: the tree of both, with a :class:`Cut` for each leaf that is cut.
      parts: for each process its parts of the cut leaves.
    """

    whole: Payload
    parts: list[Payload]

    @classmethod
    def of(cls, layout: Layout, grads: optax.Updates, extra: dict[str, Any]) -> Message:
        """Packs a worker's push.

        Raises:
          TypeError: ``grads`` does not fit; the error names the first path.
        """
        wire.register()
        grads = maps.without_float0(grads)
        layout.check(grads)
        arrays: list[np.ndarray[Any, Any]] = []
        cuts: list[int] = []
        cut_of = layout.cut_of()

        def take(path: tuple[Any, ...], x: Leaf) -> Leaf | Cut:
            # Each extra argument is a tree of its own, and may be like the gradients.
            cut = cut_of(path[1 if path[0].idx == 0 else 2 :], x)
            if cut is None:
                return x
            arrays.append(np.asarray(x))
            cuts.append(cut)
            return Cut(len(cuts) - 1)

        whole = jax.tree.map_with_path(take, (grads, extra), is_leaf=maps.is_leaf)
        cut = Layout(arrays, tuple(cuts), layout.processes)
        parts = [cut.part(arrays, process) for process in range(layout.processes)]
        return cls(Payload.of(whole), [Payload.of(packed(part)) for part in parts])

    def of_process(self, process: int) -> Message:
        """The share of one process."""
        return Message(self.whole, [self.parts[process]])

    def open(self) -> tuple[optax.Updates, dict[str, Any]]:
        """Gradients and extra arguments, with this process's part of each cut leaf."""
        (parts,) = (part.take() for part in self.parts)
        grads, extra = jax.tree.map_with_path(
            lambda path, x: (
                x
                if not isinstance(x, Cut)
                else parts[x.number]
                if path[0].idx == 0
                else Part(parts[x.number])
            ),
            self.whole.take(),
            is_leaf=maps.is_leaf,
        )
        return grads, extra


class Rows(NamedTuple):
    """Rows of a table on their way; each process sends those that it has.

    Attributes:
      indices: int32, as many as were asked for; each once, then padding.
      shape: of the table.
      axis: the axis along which the parts are joined.
      parts: for each process a list of one array, or a reference to it.
    """

    indices: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    axis: int
    parts: list[Any]

    def join(self, get: Callable[[Any], Any]) -> IndexedSlices:
        """Joins them to a part of the table."""
        (first, *rest) = [x for part in self.parts for x in get(part)]
        rows = np.concatenate([first, *rest], self.axis) if rest else first
        values = np.zeros((len(self.indices), *self.shape[1:]), rows.dtype)
        inside = tuple(map(slice, self.shape))[1:]  # Without padding.
        values[: len(rows)] = rows[(slice(None), *inside)]
        indices, values = jax.device_put((self.indices, values))
        return ascending(indices, values, self.shape)


class Pulled(NamedTuple):
    """A tree on its way from the processes of a server.

    Attributes:
      whole: the tree, with a :class:`Cut` for each leaf that is cut, and a number for
        each table with rows.
      layout: of the leaves that are cut.
      parts: for each process a :class:`Payload`, or a reference to one.
      rows: by the numbers in ``whole``.
    """

    whole: Payload
    layout: Layout
    parts: list[Any]
    rows: dict[int, Rows]

    def join(self, get: Callable[[Any], Any]) -> optax.Params:
        """The tree; ``get`` follows a reference, and returns all else as it is."""
        wire.register()
        joined = []
        if self.layout.cuts:
            parts = [get(part).take(get) for part in self.parts]
            joined = jax.device_put(self.layout.join(parts))
        rows = {number: rows.join(get) for number, rows in self.rows.items()}

        def leaf(x: jax.Array | Cut | int) -> jax.Array | IndexedSlices:
            if isinstance(x, Cut):
                return joined[x.number]
            return rows[x] if isinstance(x, int) else x

        return jax.tree.map(leaf, self.whole.take(get))
