"""How a server differs when it is a Ray actor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradxform._server import wire
from gradxform._server.records import Version
from gradxform._trees.indexed_slices import IndexedSlices
from gradxform._trees.types import PyTree


def _put(params: PyTree[jax.Array | int]) -> object:
    return sys.modules["ray"].put(params)


class Published:
    """Parameters on their way to a worker. They arrive as their tree.

    Args:
      ref: a reference to the parameters, with a number for each table that is left out.
      rows: rows of these tables, by their numbers.
    """

    def __init__(self, ref: object, rows: dict[int, IndexedSlices]) -> None:
        self._ref, self._rows = ref, rows

    def __reduce__(self) -> tuple[Callable[..., optax.Params], tuple[object, ...]]:
        return _fetch, (self._ref, self._rows)


def _fetch(ref: object, rows: dict[int, IndexedSlices]) -> optax.Params:
    wire.register()  # This worker's pushes travel likewise.
    params = sys.modules["ray"].get(ref)
    return jax.tree.map(lambda x: rows[x] if isinstance(x, int) else x, params)


class Publisher:
    """Publishes parameters, each version once for all its readers.

    A pull returns a reference. On the worker it turns into the parameters, without
    another call.

    Args:
      put: publishes parameters, with a number for each table that is left out; returns
        a reference to them.
      answer: the answer to a worker, from such a reference and, by their numbers, the
        rows of the tables that are left out.
    """

    def __init__(
        self,
        put: Callable[[PyTree[jax.Array | int]], object] = _put,
        answer: Callable[[Any, dict[int, Any]], object] = Published,
    ) -> None:
        wire.register()
        self._put, self.answer = put, answer
        # The step that was published last, and its references, keyed by the tables
        # that they leave out. The pair is replaced as a whole, so readers need no lock.
        self._last: tuple[tuple[str, int] | None, dict[frozenset[int], object]]
        self._last = None, {}

    def find(self, version: Version, tables: frozenset[int]) -> object:
        """The reference to its parameters without these tables; None if not there."""
        last, refs = self._last
        return refs.get(tables) if last == _step(version) else None

    def publish(
        self, version: Version, tables: frozenset[int], params: PyTree[jax.Array | int]
    ) -> object:
        """The reference to ``params``, where numbers stand for these tables."""
        ref = self.find(version, tables)
        if ref is None:
            if self._last[0] != _step(version):
                self._last = _step(version), {}  # The old ones may go.
            ref = self._put(params)
            self._last = _step(version), {**self._last[1], tables: ref}
        return ref

    def forget(self) -> None:
        """Drops the references: the parameters may have changed since."""
        self._last = None, {}


def _step(version: Version) -> tuple[str, int]:
    """Identifies its parameters: they change only where the global step does."""
    return version.incarnation, version.global_step


def is_actor(server: object) -> bool:
    """Whether this object is the inside of a Ray actor."""
    return hasattr(type(server), "__ray_actor_class__")


def was_restarted(server: object) -> bool:
    """Whether Ray has started this actor again after its process died."""
    if not is_actor(server):
        return False
    context = sys.modules["ray"].get_runtime_context()
    return bool(context.was_current_actor_reconstructed)
