"""How a server differs when it is a Ray actor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax

from gradxform._server import wire
from gradxform._server.records import Version


class Publisher:
    """Puts parameters into Ray's object store, each version once for all its readers.

    A pull returns a reference. On the worker it turns into the parameters, without
    another call.
    """

    def __init__(self) -> None:
        wire.register()
        # The step that was published last, and its references, keyed by the tables
        # that they leave out. The pair is replaced as a whole, so readers need no lock.
        self._last: tuple[Any, dict[frozenset[int], Any]] = None, {}

    def find(self, version: Version, tables: frozenset[int]) -> Any:
        """The reference to its parameters without these tables; None if not there."""
        last, refs = self._last
        return refs.get(tables) if last == _step(version) else None

    def publish(self, version: Version, tables: frozenset[int], params: Any) -> Any:
        """The reference to ``params``, where numbers stand for these tables."""
        ref = self.find(version, tables)
        if ref is None:
            if self._last[0] != _step(version):
                self._last = _step(version), {}  # The old ones may go.
            ref = self._put(params)
            self._last = _step(version), {**self._last[1], tables: ref}
        return ref

    def _put(self, params: Any) -> Any:
        return sys.modules["ray"].put(params)

    def deliver(self, ref: Any, parts: dict[int, Any]) -> Any:
        """The answer to a worker: the stored leaves, and rows of the other tables."""
        return Published(ref, parts)

    def forget(self) -> None:
        """Drops the references: the parameters may have changed since."""
        self._last = None, {}


def _step(version: Version) -> tuple[str, int]:
    """Identifies its parameters: they change only where the global step does."""
    return version.life, version.global_step


class Published:
    """Parameters on their way to a worker. They arrive as their tree."""

    def __init__(self, ref: Any, parts: dict[int, Any]) -> None:
        self._ref, self._parts = ref, parts

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _fetch, (self._ref, self._parts)


def _fetch(ref: Any, parts: dict[int, Any]) -> Any:
    wire.register()  # This worker's pushes travel likewise.
    params = sys.modules["ray"].get(ref)
    return jax.tree.map(lambda x: parts[x] if isinstance(x, int) else x, params)


def is_actor(server: Any) -> bool:
    """Whether this object is the inside of a Ray actor."""
    return hasattr(type(server), "__ray_actor_class__")


def was_restarted(server: Any) -> bool:
    """Whether Ray has started this actor again after its process died."""
    if not is_actor(server):
        return False
    context = sys.modules["ray"].get_runtime_context()
    return bool(context.was_current_actor_reconstructed)
