"""A thread that saves a run while workers go on."""

from __future__ import annotations

import logging
import queue
import threading
import time

from gradxform._server.checkpoints import Snapshot
from gradxform._server.records import summary
from gradxform._server.store import Store

logger = logging.getLogger("gradxform")


class Saver:
    """Writes snapshots to a store, on a thread of its own.

    Args:
      store: its ``checkpoint`` says how often.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._every_steps = store.checkpoint.every_steps
        self._every_seconds = store.checkpoint.every_seconds
        self._idle = threading.Event()
        self._idle.set()
        self._begun = time.monotonic()
        # What to write, and a queue for the error of whoever waits; None at the end.
        self._commands: queue.SimpleQueue[
            tuple[Snapshot, queue.SimpleQueue[BaseException | None] | None] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name="checkpoints", daemon=True
        )
        self._thread.start()

    def is_due(self, global_step: int) -> bool:
        """Whether the state after this step should be saved."""
        steps, seconds = self._every_steps, self._every_seconds
        if not self._idle.is_set():
            return False
        if steps is not None and global_step % steps == 0:
            return True
        return seconds is not None and time.monotonic() - self._begun >= seconds

    def rest(self) -> None:
        """No checkpoint is due from now on."""
        self._every_steps = self._every_seconds = None

    def start(self, snapshot: Snapshot) -> None:
        """Has it written; returns at once."""
        self._idle.clear()
        self._begun = time.monotonic()
        self._commands.put((snapshot, None))

    def write(self, snapshot: Snapshot) -> None:
        """Has it written, after what was begun before; returns when it is there."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._commands.put((snapshot, done))
        if (error := done.get()) is not None:
            raise error

    def wait(self) -> None:
        """Waits until nothing is being written."""
        self._idle.wait()

    def close(self) -> None:
        """Finishes the checkpoint that was begun, then ends."""
        self._commands.put(None)
        self._thread.join()

    def _serve(self) -> None:
        for snapshot, done in iter(self._commands.get, None):
            error = None
            try:
                self._store.write(snapshot)
            except Exception as raised:
                error = raised
                if done is None:  # The run goes on, and the next one may succeed.
                    logger.error("no checkpoint was written: %s", summary(error))
            self._idle.set()
            if done is not None:
                done.put(error)
