"""Checkpoints that several processes write together.

Each process has a store. Only the first one opens the directory and chooses the newest
checkpoint. The others read its choice, and no process waits for another. When each has
copied its parts of the same snapshot, all write together. They wait for each other
through JAX's coordination service, never in a collective: it could come between those
of a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.store import Store, manager_of

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


class GroupStore(Store):
    """One process's store; all processes must write the same snapshots.

    It has one manager for reading alone, and makes a new one for each checkpoint.

    Args:
      checkpoint: where, the same in all processes.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._attempts = itertools.count()  # The same in all processes.

    def _reader(self) -> CheckpointManager:
        here = jax.process_index()
        return self._made(here, {here}, clean=self._in_bucket and here == 0)

    @contextlib.contextmanager
    def _writer(self) -> Iterator[CheckpointManager]:
        attempt = next(self._attempts)  # Also if this process now raises an error.
        self._retake()
        everybody = {*range(jax.process_count())}
        # A new name: the last one may have failed halfway.
        manager = self._made(0, everybody, clean=False, name=f"checkpoint {attempt}")
        with contextlib.closing(manager):
            yield manager

    def _made(
        self, first: int, processes: set[int], *, clean: bool, name: str | None = None
    ) -> CheckpointManager:
        """A manager for some processes, which wait for each other under a name."""
        return manager_of(
            self.checkpoint,
            create=False,
            cleanup_tmp_directories=clean,
            multiprocessing_options=self._orbax.options.MultiprocessingOptions(
                primary_host=first,
                active_processes=processes,
                barrier_sync_key_prefix=name,
            ),
        )
