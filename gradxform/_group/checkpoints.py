"""Checkpoints that several processes write together.

Each process has a store. Only the first one opens the directory and chooses the newest
checkpoint. The others read its choice, and no process waits for another. All write
together, each its parts of the same snapshots. They wait for each other through JAX's
coordination service, never in a collective: it could come between those of a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from gradxform._group.sharded import ShardedParams
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.same_job import described
from gradxform._server.store import Store, manager_of

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


def store_of(checkpoint: Checkpoint, sharded: ShardedParams) -> Store:
    """One process's store; all processes must write the same snapshots.

    Args:
      checkpoint: where, the same in all processes.
      sharded: how the arrays lie over the processes.
    """
    return Store(checkpoint, described_by(sharded), GroupManagers())


def described_by(sharded: ShardedParams) -> Callable[[object], dict[str, str]]:
    """Describes the arrays as users see them: without padding, and whole."""

    def as_users_see(_: object) -> dict[str, str]:
        of_params, of_state = sharded.layouts
        return described({"params": of_params.types, "state": of_state.types})

    return as_users_see


class GroupManagers:
    """One manager for reading alone, and a new one for each checkpoint."""

    def __init__(self) -> None:
        self._turns = itertools.count()  # The same in all processes.

    def reader(self, checkpoint: Checkpoint) -> CheckpointManager:
        """One for this process alone."""
        here = jax.process_index()
        return _manager(checkpoint, here, {here}, clean=here == 0)

    @contextlib.contextmanager
    def writer(
        self, checkpoint: Checkpoint, current: Callable[[], CheckpointManager | None]
    ) -> Iterator[CheckpointManager]:
        """One for all processes."""
        turn = next(self._turns)  # Also if this process now raises an error.
        current()
        everybody = {*range(jax.process_count())}
        # A new name: the last one may have failed halfway.
        manager = _manager(checkpoint, 0, everybody, name=f"checkpoint {turn}")
        with contextlib.closing(manager):
            yield manager


def _manager(
    checkpoint: Checkpoint,
    first: int,
    processes: set[int],
    *,
    clean: bool = False,
    name: str | None = None,
) -> CheckpointManager:
    """A manager for some processes, which wait for each other under a name."""
    ocp = require("orbax.checkpoint", "checkpoint")
    return manager_of(
        checkpoint,
        create=False,
        cleanup_tmp_directories=clean,
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=first,
            active_processes=processes,
            barrier_sync_key_prefix=name,
        ),
    )
