"""How a server differs when it is a Ray actor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradxform._server import wire
from gradxform._server.core import Core
from gradxform._server.reader import Reading
from gradxform._server.records import GlobalStep, Version
from gradxform._server.requests import Key, PullRequest
from gradxform._server.transport import Local
from gradxform._server.wire import Payload, Sent


class Answer:
    """Parameters on their way to a worker. They arrive as their tree.

    Args:
      others: the tree, with a number for each table that is left out.
      rows: the rows of these tables, by their numbers.
    """

    def __init__(self, others: Sent, rows: Sent | None = None) -> None:
        self._others, self._rows = others, rows

    def __reduce__(self) -> tuple[Callable[..., optax.Params], tuple[object, ...]]:
        return _assembled, (self._others, self._rows)


def _assembled(others: Sent, rows: Sent | None) -> optax.Params:
    wire.register()  # This worker's pushes travel likewise.
    tree = others.take()
    if rows is None:
        return tree
    parts = rows.take()
    return jax.tree.map(lambda x: parts[x] if isinstance(x, int) else x, tree)


class Cache:
    """What was sent of the newest parameters, for the next who asks for the same."""

    def __init__(self) -> None:
        # The pair is replaced as a whole, so readers need no lock.
        self._last: tuple[tuple[str, int] | None, dict[Key, Sent]] = None, {}

    def find(self, version: Version, key: Key) -> Sent | None:
        """What was sent of this version for such a request."""
        last, sent = self._last
        return sent.get(key) if last == version.of_params() else None

    def add(self, version: Version, key: Key, sent: Sent) -> None:
        """In a turn: adds what was sent; that of older versions may go."""
        last, others = self._last
        own = others if last == version.of_params() else {}
        self._last = version.of_params(), {**own, key: sent}


class Published(Local):
    """Workers are in other processes: each version is sent once for all of them.

    A pull returns a reference into Ray's store. On the worker it turns into the
    parameters, without another call. See `Transport`.
    """

    def __init__(self, core: Core) -> None:
        wire.register()
        super().__init__(core)
        self._cache = Cache()

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        if not request.rows:  # What is published needs no turn.
            self.core.check_usable()
            version = self.core.version
            if (found := self._cache.find(version, request.key)) is not None:
                return Answer(found), version.step()
        others, wanted = self.whole(request.key), self.rows(request)
        sent, read, seen = self.turns.run(self._send, request.key, others, wanted)
        if not request.rows:
            return Answer(sent), seen
        parts = {i: self.part(i, ids, read[i]) for i, ids in request.rows.items()}
        return Answer(sent, Payload(None, parts)), seen

    def _send(
        self, key: Key, others: Reading, wanted: Reading
    ) -> tuple[Sent, dict[int, jax.Array], GlobalStep]:
        self.core.check_usable()
        version = self.core.version
        sent = self._cache.find(version, key)
        if sent is None:
            read: dict[int, Any] = others.run(version.leaves)
            leaves = [read.get(i, i) for i in range(self.core.specs.num_params)]
            params = self.core.specs.params(leaves)
            sent = Payload(sys.modules["ray"].put(params), None)
            self._cache.add(version, key, sent)
        return sent, wanted.run(version.leaves), version.step()


def is_actor(server: object) -> bool:
    """Whether this object is the inside of a Ray actor."""
    return hasattr(type(server), "__ray_actor_class__")


def was_restarted(server: object) -> bool:
    """Whether Ray has started this actor again after its process died."""
    if not is_actor(server):
        return False
    context = sys.modules["ray"].get_runtime_context()
    return bool(context.was_current_actor_reconstructed)
