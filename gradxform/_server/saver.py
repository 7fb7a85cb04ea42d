"""A thread that saves a run while workers go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from gradxform._server.records import Snapshot, summary
from gradxform._server.store import Store

logger = logging.getLogger("gradxform")

# The errors of a copy for which there is no memory.
NO_MEMORY = MemoryError, jax.errors.JaxRuntimeError


class Saver:
    """Writes snapshots to a store, on a thread of its own.

    Args:
      store: its ``checkpoint`` says how often.

    Attributes:
      store: as given.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._thread.submit(time.monotonic)  # Starts it: memory may be short later.
        self._begun = time.monotonic()
        self._last: Future[None] | None = None  # That nobody waits for.

    def is_due(self, global_step: int) -> bool:
        """Whether the state after this step should be saved."""
        if self._last is not None and not self._last.done():
            return False
        every = self.store.checkpoint
        steps, seconds = every.every_steps, every.every_seconds
        if steps is not None and global_step % steps == 0:
            return True
        return seconds is not None and time.monotonic() - self._begun >= seconds

    def write_soon(self, take: Callable[[], Snapshot | None]) -> None:
        """Takes a snapshot after a step, and has it written; returns before it is.

        Without memory for the snapshot nothing is written, and the run goes on.
        """
        self._begun = time.monotonic()
        try:
            snapshot = take()
        except NO_MEMORY as error:
            _tell(error)
        else:
            assert snapshot is not None  # The step has just succeeded.
            self._last = self._thread.submit(self._write_or_tell, snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """Has it written, after what was begun before; returns when it is there."""
        self._thread.submit(self._write, snapshot).result()

    def flush(self) -> None:
        """Waits until what was begun is written."""
        wait([] if self._last is None else [self._last])

    def close(self) -> None:
        """Finishes the checkpoint that was begun, then closes the store."""
        self._thread.shutdown()
        self.store.close()

    def _write(self, snapshot: Snapshot) -> None:
        snapshot.ready()
        self.store.write(snapshot)

    def _write_or_tell(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except Exception as error:
            _tell(error)


def _tell(error: Exception) -> None:
    """The run goes on, and the next checkpoint may succeed."""
    logger.error("no checkpoint was written: %s", summary(error))
