"""A process of a server: it does what its leader tells it."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

from gradxform._server.channel import Followed
from gradxform._server.checkpoints import Snapshot
from gradxform._server.group import LocalRows, enter, parts_of
from gradxform._server.layout import Layout
from gradxform._server.parcels import Parcel
from gradxform._server.placed import Spread
from gradxform._server.records import Version, summary
from gradxform._server.recoverable import RecoverableServer


class Follower:
    """One process's parts of the arrays, and the orders that it obeys.

    Args:
      number: of this process, from 1.
      key: the secret of the server's processes.
      processes: how many there are.
    """

    def __init__(self, number: int, key: bytes, processes: int) -> None:
        self._number, self._key, self._processes = number, key, processes
        self._prepared: dict[int, tuple[Any, list[Any]]] = {}
        # The result of each order, in a queue: its taker may come before it is there.
        self._done: dict[int, queue.SimpleQueue[Any]] = {}

    def join(
        self,
        where: tuple[str, tuple[str, int]],
        given: list[Any],
        layout: Layout,
        *checkpoint: Any,
        **options: Any,
    ) -> None:
        """Becomes one of the processes; see :meth:`Leader.join`."""
        coordinator, address = where
        followed = Followed(address, self._key, self._number)
        mesh = enter(coordinator, self._number, self._processes)
        params, tx = sys.modules["ray"].get(given)
        # Nobody calls its `begin`: the leader says when to read or write a checkpoint.
        self._server = RecoverableServer(
            Spread(params, layout, mesh), tx, *checkpoint, **options
        )
        self._programs = self._server._programs
        self._rows = LocalRows(self._params())
        threading.Thread(
            target=followed.serve,
            args=(self._obey, summary),
            name="orders",
            daemon=True,
        ).start()

    def _params(self) -> list[Any]:
        return self._programs.leaves_of_params(self._server._version.leaves)

    # Ray's calls: these may come in any sequence.

    def prepare(self, key: int, parcel: Parcel) -> None:
        """Does what a push needs before its turn."""
        self._prepared[key] = self._programs.prepare(*parcel.open())

    def ready(self, number: int, size: int) -> None:
        """Compiles the program that reads ``size`` rows of a leaf."""
        self._rows.ready(number, size)

    def resume(self, pushes: int) -> None:
        """Goes on from this process's part of a checkpoint."""
        server = self._server
        assert server._saver is not None
        like = self._programs.like(server._version.leaves)
        snapshot = server._saver.read(pushes, like)
        version = Version.of(*self._programs.place(snapshot.state))
        server._thread.run(server._resume, version, snapshot.counters)

    def take(self, key: int) -> Any:
        """The result of an order, to be asked for once."""
        done = self._box(key).get()
        del self._done[key]
        return done() if callable(done) else done

    def _box(self, key: int) -> queue.SimpleQueue[Any]:
        return self._done.setdefault(key, queue.SimpleQueue())

    # The leader's orders, obeyed in its sequence.

    def _obey(self, name: str, *args: Any) -> None:
        self._server._thread.run(getattr(self, f"_{name}"), *args)

    def _push(self, key: int, local_step: int) -> None:
        self._server._push(*self._prepared.pop(key), local_step, None)

    def _forget(self, key: int) -> None:
        self._prepared.pop(key, None)

    def _publish(self, key: int, at: list[int]) -> None:
        self._box(key).put(parts_of(self._server._version, at))

    def _read(self, key: int, number: int, size: int, ids: Any) -> None:
        read = self._rows.read(self._params()[number], number, size, ids)
        self._box(key).put(read)

    def _snapshot(self, pushes: int, counters: dict[str, Any]) -> None:
        saver = self._server._saver
        assert saver is not None
        saver.start(Snapshot(pushes, self._server._copies(), counters))
