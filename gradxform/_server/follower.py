"""A process of a server: it does what its leader tells it."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import jax
import numpy as np

from gradxform._group.checkpoints import store_of
from gradxform._server.channel import Followed
from gradxform._server.checkpoints import Checkpoint, Snapshot
from gradxform._server.group import LocalRows, enter, parts_of
from gradxform._server.layout import Layout
from gradxform._server.messages import Message
from gradxform._server.placement import copy
from gradxform._server.programs import Leaves, PushPrograms, Step
from gradxform._server.records import summary
from gradxform._server.saver import Saver
from gradxform._server.sharded import ShardedParams


class Follower:
    """One process's parts of the arrays, and the commands that it handles.

    Args:
      number: of this process, from 1.
      key: the secret of the server's processes.
      processes: how many there are.
    """

    def __init__(self, number: int, key: bytes, processes: int) -> None:
        self._number, self._key, self._processes = number, key, processes
        self._prepared: dict[int, tuple[Step, Leaves]] = {}
        # The result of each order, in a queue: its taker may come before it is there.
        self._done: dict[int, queue.SimpleQueue[Any]] = {}

    def join(
        self,
        where: tuple[str, tuple[str, int]],
        given: list[Any],
        layout: Layout,
        checkpoint: Checkpoint | None = None,
        *,
        donate: bool,
        require_finite: bool,
        **_: object,  # The leader counts the pushes.
    ) -> None:
        """Becomes one of the processes; see :meth:`Leader.join`."""
        coordinator, address = where
        followed = Followed(address, self._key, self._number)
        mesh = enter(coordinator, self._number, self._processes)
        params, tx = sys.modules["ray"].get(given)
        sharded = ShardedParams(params, layout, mesh)
        tx, params, state = sharded.initialize(tx)
        self._programs = PushPrograms(
            tx, params, state, donate, require_finite, sharded
        )
        self._leaves: Leaves = jax.tree.leaves((params, state))
        self._rows = LocalRows(params)
        self._store = None if checkpoint is None else store_of(checkpoint, sharded)
        self._saver = None if self._store is None else Saver(self._store)
        threading.Thread(
            target=followed.serve,
            args=(self._handle, summary),
            name="commands",
            daemon=True,
        ).start()

    # Ray's calls: these may come in any sequence.

    def prepare(self, key: int, message: Message) -> None:
        """Does what a push needs before its turn."""
        self._prepared[key] = self._programs.prepare(*message.open())

    def ready(self, number: int, size: int) -> None:
        """Compiles the program that reads ``size`` rows of a leaf."""
        self._rows.ready(number, size)

    def resume(self, pushes: int) -> None:
        """Goes on from this process's part of a checkpoint."""
        assert self._store is not None
        snapshot = self._store.read(pushes, self._programs.like(self._leaves))
        self._leaves = jax.tree.leaves(self._programs.place(snapshot.state))

    def take(self, key: int) -> object:
        """The result of an order, to be asked for once."""
        done = self._box(key).get()
        del self._done[key]
        return done() if callable(done) else done

    def _box(self, key: int) -> queue.SimpleQueue[Any]:
        return self._done.setdefault(key, queue.SimpleQueue())

    # The leader's commands, handled in its sequence, on one thread.

    def _handle(self, name: str, *args: object) -> None:
        getattr(self, f"_{name}")(*args)

    def _push(self, key: int, local_step: int) -> None:
        step, pushed = self._prepared.pop(key)
        leaves, _ = step(self._leaves, pushed, np.int32(local_step))
        self._leaves = jax.block_until_ready(leaves)

    def _forget(self, key: int) -> None:
        self._prepared.pop(key, None)

    def _publish(self, key: int, at: list[int]) -> None:
        self._box(key).put(parts_of(self._leaves, at))

    def _read(
        self, key: int, number: int, size: int, ids: np.ndarray[Any, Any]
    ) -> None:
        table = self._programs.leaves_of_params(self._leaves)[number]
        self._box(key).put(self._rows.read(table, number, size, ids))

    def _snapshot(self, pushes: int, counters: dict[str, Any]) -> None:
        assert self._saver is not None
        state = copy(self._programs.state(self._leaves))
        self._saver.start(Snapshot(pushes, state, counters))
