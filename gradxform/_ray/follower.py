"""A follower among the processes of a server: it does what the leader tells it."""

from __future__ import annotations

import queue
import sys
from collections.abc import Mapping
from typing import Any

import jax

from gradxform._ray.group_checkpoints import GroupStore
from gradxform._ray.layout import Layout
from gradxform._ray.mesh import enter
from gradxform._ray.messages import PushMessage, packed_parts
from gradxform._ray.process import Process, part_of
from gradxform._ray.wire import Payload
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.programs import Prepared
from gradxform._server.reader import Form, RowIds
from gradxform._server.records import Snapshot, summary
from gradxform._server.saver import Saver


class Follower:
    """One of the processes, and the calls and commands that it handles.

    Args:
      number: of this process, from 1.
      processes: how many there are.
    """

    def __init__(self, number: int, processes: int) -> None:
        self._number, self._processes = number, processes
        self._prepared: dict[int, Prepared] = {}
        self._snapshots: dict[int, Snapshot | None] = {}
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()

    def join(
        self,
        coordinator: str,
        given: list[Any],
        layout: Layout,
        checkpoint: Checkpoint | None = None,
        *,
        pushes: float,  # The leader counts them.
        **options: bool,
    ) -> None:
        """Becomes one of the processes; see :meth:`Leader.join`."""
        mesh = enter(coordinator, self._number, self._processes)
        params, tx = sys.modules["ray"].get(given)
        self.process = Process(params, layout, mesh, tx, **options)
        if checkpoint is not None:
            self._saver = Saver(GroupStore(checkpoint))

    # The leader's calls: these may come in any sequence.

    def failure(self) -> str:
        """Waits until a step fails here; returns why."""
        return self._failures.get()

    def prepare(self, key: int, message: PushMessage) -> None:
        """Does what a push needs before its turn."""
        self._prepared[key] = self.process.prepare(message)

    def compile(self, sizes: Mapping[int, int | None], form: Form) -> None:
        """Compiles programs to read arrays, so that no turn has to."""
        for number, size in sizes.items():
            self.process.reader.program(number, size, form)

    def resume(self, pushes: int) -> None:
        """Goes on from this process's part of a checkpoint."""
        snapshot = self._saver.store.read(pushes, self.process.like())
        self.process.core.resume(self.process.placed(snapshot))

    # The leader's commands, handled in its sequence, on one thread.

    def push(self, key: int, local_step: int) -> None:
        """Runs the step of a push."""
        try:
            self.process.core.commit(self._prepared.pop(key), local_step)
        except BaseException as error:
            self._failures.put(summary(error))
            raise

    def forget(self, key: int) -> None:
        """Drops what was prepared, or copied, and is not needed."""
        self._prepared.pop(key, None)
        self._snapshots.pop(key, None)

    def read(self, form: Form, share: Mapping[int, RowIds | None]) -> Payload:
        """Sends its share of the arrays."""
        reading = self.process.reader.prepare(share, form)
        leaves = self.process.core.version.leaves
        read = reading.run({i: part_of(leaves[i]) for i in share})
        # The next step may overwrite those that are read as they are.
        return packed_parts(read, share, copies=bool(reading.plain))

    def snapshot(self, key: int) -> None:
        """Copies its parts for a checkpoint."""
        self._snapshots[key] = snapshot = self.process.core.snapshot()
        jax.block_until_ready(snapshot and snapshot.state)

    def write(self, key: int) -> None:
        """Begins to write them."""
        snapshot = self._snapshots.pop(key)
        self._saver.write_soon(lambda: snapshot)
