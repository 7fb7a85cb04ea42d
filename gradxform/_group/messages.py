"""Messages between a worker and a server of several processes, in parts.

Each process sends and receives only its own parts of the arrays that are cut. All else
is sent once: in Ray's object store if it is large, otherwise in the message.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradxform._group.layout import Layout, Part
from gradxform._server import wire
from gradxform._server.requests import Ids
from gradxform._server.wire import Payload, packed
from gradxform._trees import maps
from gradxform._trees.indexed_slices import IndexedSlices, ascending
from gradxform._trees.types import Leaf


class Cut:
    """Stands for a leaf that is cut, by its number among the cut leaves."""

    def __init__(self, number: int) -> None:
        self.number = number


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


class Gathered(NamedTuple):
    """A tree on its way from the processes; see :class:`~wire.Sent`.

    Attributes:
      whole: the tree, with a :class:`Cut` for each leaf that is cut.
      layout: of the leaves that are cut.
      parts: for each process a :class:`Payload`, or a reference to one.
    """

    whole: Payload
    layout: Layout
    parts: list[Any]

    def take(self) -> optax.Params:
        """The tree, its parts joined."""
        joined: list[jax.Array] = []
        if self.parts:
            joined = jax.device_put(self.layout.join([*map(taken, self.parts)]))
        return jax.tree.map(
            lambda x: joined[x.number] if isinstance(x, Cut) else x, self.whole.take()
        )


class Table(NamedTuple):
    """What is known of a table before its rows arrive."""

    ids: Ids  # As many as were asked for; each once, then padding.
    shape: tuple[int, ...]
    axis: int  # Along which its parts are joined.


class GatheredRows(NamedTuple):
    """Rows of tables on their way; each process sends those that it has.

    Attributes:
      tables: by the numbers of their leaves.
      sent: for each process, the numbers of the tables that it has rows of.
      parts: for each process a :class:`Payload`, or a reference to one.
    """

    tables: dict[int, Table]
    sent: list[list[int]]
    parts: list[Any]

    def take(self) -> dict[int, IndexedSlices]:
        """The rows of each table, in its place."""
        parts: dict[int, list[np.ndarray[Any, Any]]] = {i: [] for i in self.tables}
        for numbers, each in zip(self.sent, map(taken, self.parts), strict=True):
            for number, rows in zip(numbers, each, strict=True):
                parts[number].append(rows)
        return {i: _joined(x, parts[i]) for i, x in self.tables.items()}


def _joined(table: Table, parts: list[np.ndarray[Any, Any]]) -> IndexedSlices:
    rows = np.concatenate(parts, table.axis)
    values = np.zeros((len(table.ids), *table.shape[1:]), rows.dtype)
    inside = tuple(map(slice, table.shape))[1:]  # Without padding.
    values[: len(rows)] = rows[(slice(None), *inside)]
    ids, values = jax.device_put((table.ids, values))
    return ascending(ids, values, table.shape)


def taken(part: Any) -> Any:  # A payload, or a reference to one; of any type.
    """What a process has sent."""
    ray = sys.modules["ray"]
    return (ray.get(part) if isinstance(part, ray.ObjectRef) else part).take()
