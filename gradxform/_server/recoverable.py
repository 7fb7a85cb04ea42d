"""A server that recovers parameters, counts and answers as of one moment."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.parameter_server import ThreadServer
from gradxform._server.records import Ahead, ServerStatus, Snapshot
from gradxform._server.store import Store
from gradxform._server.transport import Transport

NO_RESTORE = (
    "restore: a state() does not say which minibatches of a run it holds. A run goes "
    "back by itself, to the newest of its checkpoints, which say it. To go back "
    "further, leave the engine's context, move later checkpoints elsewhere, and run "
    "the same job again."
)


class RecoverableServer(ThreadServer[Any]):
    """A server that saves itself, and starts from the newest checkpoint.

    Args:
      transport: to its workers, with its core.
      checkpoint: where it is saved, and how often; without one it is not.
      pushes: how many pushes with a ``push_id`` it takes.
      together: whether all processes of JAX write together.
    """

    def __init__(
        self,
        transport: Transport,
        checkpoint: Checkpoint | None = None,
        pushes: float = math.inf,
        *,
        together: bool = False,
    ) -> None:
        super().__init__(transport)
        self._core.takes, self._core.numbered = pushes, True
        self._store = None if checkpoint is None else Store(checkpoint, together)
        self._status: ServerStatus | None = None

    def begin(self, run: str | None = None) -> ServerStatus:
        """Goes on from the newest checkpoint, if there is one; returns where it stands.

        Only the first call does so. Later ones return where this incarnation began.

        Args:
          run: of the status of a server that has died, in whose place this one goes on.

        Raises:
          OSError: another run saves itself there, or the directory is not writable; or
            the checkpoints of the ``run`` are gone.
          ValueError: the checkpoint belongs to another job, or is not complete, or
            exists with ``resume=False``; or the directory holds something else; or
            orbax cannot save an array, or tell two of them apart.
        """
        if self._status is None:
            notes = None
            if self._store is not None:
                run = self._store.open(self._core.specs.types, run)
                notes = self._resume(self._store)
            status = self._turns.run(self._core.status)
            self._status = status._replace(notes=notes, run=run)
            self._core.after_step = self._save_if_due
        return self._status

    def _resume(self, store: Store) -> list[str] | None:
        """Goes on from the newest checkpoint; returns its notes, None without one."""
        newest = store.newest()
        if newest is None:
            return None
        if not store.checkpoint.resume:
            raise ValueError(
                f"checkpoint: {store.checkpoint.directory} holds a run of {newest} "
                "pushes: let resume be True, or give another directory."
            )
        snapshot, notes = self._transport.read_newest(store)
        self._turns.run(self._core.resume, snapshot)
        return notes

    def _save_if_due(self) -> None:
        """In a turn, right after a step: then no sum of pushes is half done."""
        if self._store and self._store.is_due(self.global_step()):
            self._store.write_soon(self._transport.snapshot)

    def global_step(self) -> int:
        """Steps taken so far; the call waits for nothing."""
        return self._core.version.global_step

    def status(self) -> ServerStatus:
        """Where it stands now."""
        return self._turns.run(self._core.status)

    def note(self, ahead: Ahead) -> None:
        """Keeps how far clocks are ahead of their workers' answers, to be saved."""
        self._core.ahead = ahead

    def rest(self) -> ServerStatus:
        """Takes no push with a ``push_id`` from now on; returns where it stands."""
        return self._turns.run(self._rest)

    def _rest(self) -> ServerStatus:
        self._core.takes = 0
        return self._core.status()

    def save(self) -> int | None:
        """Writes the last checkpoint now; returns its global step, or None without one.

        Later pushes are in no checkpoint. None is written before the first push, nor
        after a step that has failed: the parameters or the state may be the cause.
        """
        if self._store is None or self._status is None:  # Nothing has begun.
            return None
        self._core.after_step = None  # No checkpoint is due from now on.
        self._store.flush()
        status = self.status()
        if status.tally.pushes == self._store.saved:
            return status.global_step
        snapshot: Snapshot | None = self._turns.run(self._transport.snapshot)
        if snapshot is None:
            return None
        self._store.write(snapshot)
        return snapshot.counters["global_step"]

    def restore(self, state: dict[str, Any]) -> NoReturn:
        """Raises ``RuntimeError``: the counts of the run would be those of another."""
        raise RuntimeError(NO_RESTORE)

    def flush(self) -> None:
        """Waits until the checkpoint that is being written is done."""
        if self._store is not None:
            self._store.flush()

    def close(self) -> None:
        """As :meth:`ParameterServer.close`; finishes a checkpoint that was begun."""
        super().close()
        if self._store is not None:
            self._store.close()
            self._store = self._core.after_step = None
