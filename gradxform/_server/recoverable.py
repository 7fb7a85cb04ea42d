"""A server that recovers parameters, counts and answers as of one moment."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import optax

from gradxform._server.actor import is_actor
from gradxform._server.checkpoints import Checkpoint, Snapshot
from gradxform._server.parameter_server import ParameterServer
from gradxform._server.programs import Leaves, Step, Stepped
from gradxform._server.records import Counters, PushResult, Version
from gradxform._server.saver import Saver
from gradxform._server.store import Store

logger = logging.getLogger("gradxform")


class TakesNoMoreError(RuntimeError):
    """The workers have made all pushes that the server takes."""


class Answer(NamedTuple):
    """The last answer to a worker."""

    number: int  # Of its push.
    local_step: int  # Of its push.
    result: PushResult


class ServerStatus(NamedTuple):
    """A server's counts at the beginning or the end of an incarnation."""

    incarnation: str
    global_step: int
    accepted: int
    dropped: int
    answers: dict[int, Answer]  # By worker.
    found: bool  # Whether it goes on from a checkpoint.
    notes: tuple[str, ...] = ()  # For the user, about that checkpoint.
    num_workers: int | None = None  # Those that have a row in a `worker_mean`.


def tell(status: ServerStatus) -> None:
    """Logs the notes about the checkpoint from which an incarnation begins."""
    for note in status.notes:
        logger.warning("%s", note)


class RecoverableServer(ParameterServer[Any]):
    """A server that saves itself, and starts from the newest checkpoint.

    Args:
      params: the initial parameters, which are copied, or a function that gives them.
      tx: any transformation.
      checkpoint: where and how often, or a store; without it nothing is saved.
      pushes: how many pushes with a ``push_id`` it takes.
      options: those of :class:`ParameterServer`.
    """

    def __init__(
        self,
        params: optax.Params,
        tx: optax.GradientTransformation,
        checkpoint: Checkpoint | Store | None = None,
        pushes: float = math.inf,
        **options: bool,
    ) -> None:
        super().__init__(params, tx, **options)
        self._takes = pushes  # How many more it takes.
        self._local_steps: dict[Hashable, int] = {}  # Last answered, by worker.
        store = Store(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint
        self._store = store
        self._saver = None if store is None else Saver(store)
        self._status: ServerStatus | None = None
        self._failed: Version | None = None  # Where a step has raised an error.

    def begin(self) -> ServerStatus:
        """Goes on from the newest checkpoint, if there is one; returns where it stands.

        Only the first call does so. Later ones return where this incarnation began.

        Raises:
          OSError: another run saves itself there, or the directory is not writable.
          ValueError: the checkpoint belongs to another job, or is not complete, or
            exists with ``resume=False``; or the directory holds something else.
        """
        if self._status is None:
            taken = None if self._store is None else self._take_up(self._store)
            found, notes = taken is not None, tuple(taken or ())
            self._status = self._thread.run(self._stand, found, notes)
            if not is_actor(self):  # An actor's engine does it, where the user sees it.
                tell(self._status)
        return self._status

    def _take_up(self, store: Store) -> list[str] | None:
        """Goes on from the newest checkpoint; returns its notes, None without one."""
        store.open()
        newest = store.newest()
        if newest is None:
            return None
        if not store.checkpoint.resume:
            raise ValueError(
                f"checkpoint: {store.checkpoint.directory} holds a run of {newest} "
                "pushes: let resume be True, or give another directory."
            )
        like = self._programs.like(self._version.leaves)
        snapshot, notes = store.read_newest(
            like, lambda pushes: self._read(store, pushes, like)
        )
        version = Version.of(*self._programs.place(snapshot.state))
        self._thread.run(self._resume, version, snapshot.counters)
        return notes

    def _read(self, store: Store, pushes: int, like: dict[str, Any]) -> Snapshot:
        return store.read(pushes, like)

    def _resume(self, version: Version, counters: dict[str, Any]) -> None:
        self._restore(version)
        for worker, number, local_step, result in counters["answers"]:
            self._answered[worker] = number, PushResult(*result)
            self._local_steps[worker] = local_step
            self._takes -= number + 1
        staleness = {int(steps): n for steps, n in counters["staleness"].items()}
        self._counters = Counters(counters["accepted"], staleness)

    def _stand(self, found: bool, notes: tuple[str, ...] = ()) -> ServerStatus:
        stats, version = self._stats(), self._version
        answers = {
            worker: Answer(number, self._local_steps[worker], result)
            for worker, (number, result) in self._answered.items()
        }
        return ServerStatus(
            version.incarnation,
            version.global_step,
            stats.accepted,
            stats.dropped,
            answers,  # type: ignore[arg-type]  # Engines name workers by integers.
            found,
            notes,
            self._programs.num_workers,
        )

    def _push(
        self,
        step: Step,
        pushed: Leaves,
        local_step: int,
        push_id: tuple[Hashable, int] | None,
    ) -> PushResult:
        before = self._version
        if push_id is not None and self._takes <= 0 and not self._knows(*push_id):
            raise TakesNoMoreError("the server takes no more pushes of workers.")

        def watched(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            self._failed = before  # Until the step is done.
            return step(leaves, pushed, local_step)

        result = super()._push(watched, pushed, local_step, push_id)
        if self._version is before:  # A repeated push: it got its first answer.
            return result
        self._failed = None
        if push_id is not None:
            self._local_steps[push_id[0]] = int(local_step)
            self._takes -= 1
        # Right after a step no sum of pushes is half done.
        stepped = result.global_step > before.global_step
        saver = self._saver if self._status is not None else None
        if stepped and saver and saver.is_due(result.global_step):
            saver.start(self._snapshot())
        return result

    def _knows(self, worker: Hashable, number: int) -> bool:
        """Whether this push was answered before."""
        return worker in self._answered and number <= self._answered[worker][0]

    def global_step(self) -> int:
        """Steps taken so far; the call waits for nothing."""
        return self._version.global_step

    def rest(self) -> ServerStatus:
        """Takes no push with a ``push_id`` from now on; returns where it stands."""
        return self._thread.run(self._rest)

    def _rest(self) -> ServerStatus:
        self._takes = 0
        return self._stand(found=False)

    def _snapshot(self) -> Snapshot:
        stats = self._stats()
        answers = [
            [worker, number, self._local_steps[worker], list(result)]
            for worker, (number, result) in self._answered.items()
        ]
        counters = {
            "global_step": stats.global_step,
            "accepted": stats.accepted,
            "staleness": {str(steps): n for steps, n in stats.staleness.items()},
            "answers": answers,
        }
        return Snapshot(stats.accepted + stats.dropped, self._copies(), counters)

    def save(self) -> int | None:
        """Writes the last checkpoint now; returns its global step, or None without one.

        Later pushes are in no checkpoint. None is written before the first push, nor
        after a step that has failed: the parameters or the state may be the cause.
        """
        if self._saver is None or self._status is None:  # Nothing has begun.
            return None
        self._saver.rest()
        snapshot = self._thread.run(self._last_snapshot)
        if snapshot is None:
            return None
        self._saver.write(snapshot)
        return snapshot.counters["global_step"]

    def _last_snapshot(self) -> Snapshot | None:
        stats = self._stats()
        if self._failed is self._version or not stats.accepted + stats.dropped:
            return None
        return self._snapshot()

    def flush(self) -> None:
        """Waits until the checkpoint that is being written is done."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """As :meth:`ParameterServer.close`; finishes a checkpoint that was begun."""
        super().close()
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        if self._store is not None:
            self._store.close()
            self._store = None
