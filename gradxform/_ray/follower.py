"""A follower among the processes of a server: it does what the leader tells it."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax

from gradxform._ray.channel import Followed
from gradxform._ray.group_checkpoints import GroupStore
from gradxform._ray.layout import Layout
from gradxform._ray.mesh import enter
from gradxform._ray.messages import PushMessage
from gradxform._ray.process import Process, Wanted, packed_parts
from gradxform._ray.wire import Payload
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.programs import Prepared
from gradxform._server.reader import Form
from gradxform._server.records import Snapshot, summary
from gradxform._server.saver import NO_MEMORY, Saver


class Follower:
    """One of the processes, and the calls and commands that it handles.

    Args:
      number: of this process, from 1.
      key: the secret of the server's processes.
      processes: how many there are.
    """

    def __init__(self, number: int, key: bytes, processes: int) -> None:
        self._number, self._key, self._processes = number, key, processes
        self._prepared: dict[int, Prepared] = {}
        self._snapshots: dict[int, Future[Snapshot | None]] = {}
        # The answers of commands, each in a queue. The call that takes one may come
        # before it is there.
        self._answers: dict[int, queue.SimpleQueue[Callable[[], Payload | None]]] = {}

    def join(
        self,
        where: tuple[str, tuple[str, int]],
        given: list[Any],
        layout: Layout,
        checkpoint: Checkpoint | None = None,
        *,
        pushes: float,  # The leader counts them.
        **options: bool,
    ) -> None:
        """Becomes one of the processes; see :meth:`Leader.join`."""
        coordinator, address = where
        followed = Followed(address, self._key, self._number)
        mesh = enter(coordinator, self._number, self._processes)
        params, tx = sys.modules["ray"].get(given)
        self.process = Process(params, layout, mesh, tx, **options)
        if checkpoint is not None:
            self._saver = Saver(GroupStore(checkpoint))
        threading.Thread(
            target=followed.serve,
            args=(self._handle, summary),
            name="commands",
            daemon=True,
        ).start()

    # The leader's calls: these may come in any sequence.

    def prepare(self, key: int, message: PushMessage) -> None:
        """Does what a push needs before its turn."""
        self._prepared[key] = self.process.prepare(message)

    def compile(self, sizes: Mapping[int, int | None], form: Form) -> None:
        """Compiles programs to read arrays, so that no turn has to."""
        for number, size in sizes.items():
            self.process.reader.program(number, size, form)

    def collect(self, key: int) -> Payload | None:
        """The answer to a command, to be asked for once."""
        answer = self._box(key).get()
        del self._answers[key]
        return answer()

    def _box(self, key: int) -> queue.SimpleQueue[Callable[[], Payload | None]]:
        return self._answers.setdefault(key, queue.SimpleQueue())

    def resume(self, pushes: int) -> None:
        """Goes on from this process's part of a checkpoint."""
        snapshot = self._saver.store.read(pushes, self.process.like())
        self.process.core.resume(self.process.placed(snapshot))

    # The leader's commands, handled in its sequence, on one thread.

    def _handle(self, name: str, *args: Any) -> None:
        getattr(self, f"_handle_{name}")(*args)

    def _handle_push(self, key: int, local_step: int) -> None:
        self.process.core.commit(self._prepared.pop(key), local_step)

    def _handle_forget(self, key: int) -> None:
        self._prepared.pop(key, None)
        self._snapshots.pop(key, None)

    def _handle_read(self, key: int, form: Form, wanted: Wanted) -> None:
        reading = self.process.reader.prepare(wanted, form)
        arrays = self.process.read(reading)
        if reading.plain:  # The next step may overwrite them.
            payload = packed_parts(arrays, wanted, copies=True)
            self._box(key).put(lambda: payload)
        else:
            self._box(key).put(lambda: packed_parts(arrays, wanted))

    def _handle_snapshot(self, key: int) -> None:
        self._snapshots[key] = copied = Future[Snapshot | None]()
        try:
            copied.set_result(self.process.core.snapshot())
        except NO_MEMORY as error:  # The run goes on without this checkpoint.
            copied.set_exception(error)

        def answer() -> None:
            jax.block_until_ready(copied.result())

        self._box(key).put(answer)

    def _handle_write(self, key: int) -> None:
        self._saver.write_soon(self._snapshots.pop(key).result)
