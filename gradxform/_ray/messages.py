"""Messages between a worker and a server of several processes, in parts.

Each process sends and receives only its own parts of the arrays that are cut. All else
is sent once: in Ray's object store if it is large, otherwise in the message.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gradxform._ray import wire
from gradxform._ray.layout import ServerLayout
from gradxform._ray.wire import Bytes, Payload
from gradxform._rows.stored_rows import unchecked
from gradxform._rows.table_rows import TableRows
from gradxform._server.programs import checked
from gradxform._server.reader import Ids
from gradxform._trees import maps
from gradxform._trees.types import Leaf


class Part:
    """Stands for a leaf that is cut: the part of it that one process has.

    The array is of NumPy; None where it travels beside the tree.
    """

    def __init__(self, array: Any, axis: int) -> None:
        self.array, self.axis = array, axis


class PushMessage(NamedTuple):
    """Gradients and extra arguments on their way to one process of a server.

    Attributes:
      whole: the tree of both, with a :class:`Part` for each leaf that is cut.
      parts: the arrays of these parts, in the order of the tree.
    """

    whole: Payload
    parts: Payload

    @classmethod
    def of(
        cls, layout: ServerLayout, grads: optax.Updates, extra: dict[str, Any]
    ) -> list[PushMessage]:
        """Packs a worker's push, for each process.

        Raises:
          TypeError: ``grads`` does not fit, or a leaf is no array; the error names the
            first path.
          ValueError: no leaf has a gradient.
          RuntimeError: an array is deleted.
        """
        wire.register()
        grads = checked(layout.types, grads, extra)
        cuts: list[tuple[np.ndarray[Any, Any], int]] = []  # The leaves, and axes.
        cut_of = layout.cut_of()

        def take(path: tuple[Any, ...], x: Leaf) -> Leaf | Part:
            # Each extra argument is a tree of its own, and may be like the gradients.
            cut = cut_of(path[1 if path[0].idx == 0 else 2 :], x)
            if cut is None:
                return x
            cuts.append((np.asarray(x), cut))
            return Part(None, cut)

        tree = jax.tree.map_with_path(take, (grads, extra), is_leaf=maps.is_leaf)
        whole = Payload.of(tree)
        return [
            cls(whole, Payload.of([Bytes(layout.piece(*cut, k)) for cut in cuts]))
            for k in range(layout.processes)
        ]

    def received(self) -> tuple[optax.Updates, dict[str, Any]]:
        """Gradients and extra arguments, with a :class:`Part` for each cut leaf."""
        parts = iter(self.parts.received())

        def filled(x: Leaf | Part) -> Leaf | Part:
            return Part(next(parts), x.axis) if isinstance(x, Part) else x

        grads, extra = maps.map_leaves(filled, self.whole.received())
        return grads, extra


class Joined(NamedTuple):
    """What is known of a leaf, or of rows of it, before its parts arrive."""

    axis: int  # Along which the parts are joined.
    shape: tuple[int, ...]  # Of the leaf.
    ids: Ids | None  # As many as were asked for; each once, then padding.

    def leaf(self, parts: list[np.ndarray[Any, Any]]) -> Leaf:
        """The leaf, or its rows in its place."""
        if self.ids is None:
            return jax.device_put(join(parts, self.axis))
        rows = np.concatenate(parts, self.axis)
        values = np.zeros((len(self.ids), *self.shape[1:]), rows.dtype)
        values[: len(rows)] = rows
        ids, values = jax.device_put((self.ids, values))
        return unchecked(TableRows, ids, values, self.shape)


class Gathered(NamedTuple):
    """Leaves on their way from the processes, by their numbers.

    Attributes:
      own: what the leader sends: leaves as they are, and its parts of others.
      joined: the leaves that arrive in parts.
      parts: references to the parts of the followers.
    """

    own: Payload
    joined: dict[int, Joined]
    parts: list[Any]

    def received(self) -> dict[int, Leaf]:
        """The leaves."""
        whole, own = self.own.received()
        sent = [own, *sys.modules["ray"].get(self.parts)]
        joined = {
            i: leaf.leaf([parts[i] for parts in sent if i in parts])
            for i, leaf in self.joined.items()
        }
        return {**whole, **joined}


def join(parts: list[np.ndarray[Any, Any]], axis: int) -> np.ndarray[Any, Any]:
    """The whole of a leaf, in a new array, from its equal parts.

    The array is aligned to 64 bytes, so JAX on CPU takes it over without a copy.
    """
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    size = sum(x.nbytes for x in parts)
    room = np.empty(size + 63, np.uint8)
    begin = -room.ctypes.data % 64
    whole = room[begin : begin + size].view(parts[0].dtype).reshape(shape)
    return np.concatenate(parts, axis, out=whole)


def packed_parts(
    read: Mapping[int, jax.Array], wanted: Mapping[int, Ids | None]
) -> dict[int, Bytes]:
    """The parts that a process sends: those of its arrays that are wanted.

    Of rows it sends as many as there are ids.
    """
    return {
        i: Bytes(np.asarray(read[i])[: None if ids is None else len(ids)])
        for i, ids in wanted.items()
    }
