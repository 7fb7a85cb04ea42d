"""What the runs of all engines share: who works, what was answered, the end."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

from gradxform._server.recoverable import Standing
from gradxform._trees import checks
from gradxform.engines._job import Counts, Job, Push, Run, Server, Worker
from gradxform.engines._ledger import Ledger


class Stopped(Exception):
    """Somebody has called ``stop``."""


class Terminated(SystemExit):
    """The process was told to end by ``SIGTERM``; its exit code is 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class SavedServer(Server, Protocol):
    """The server of every engine."""

    def save(self) -> int | None:
        """Writes a last checkpoint; the global step it is of, if anything has begun."""
        ...


class Crew(Run):
    """A run whose workers come and go."""

    server: SavedServer

    def __init__(self, job: Job) -> None:
        if job.required is not None:
            checks.integer_scalar("required", job.required)
            checks.in_range("required", job.required, "[1, inf)")
        checks.integer_scalar("pushes", job.pushes)
        checks.in_range("pushes", job.pushes, "[1, inf)")
        self._job = job
        self._at_least = 1 if job.required is None else job.required
        self._lock = threading.Lock()
        self._members = dict(enumerate(job.workers))
        if len(self._members) < self._at_least:
            raise ValueError(
                f"workers: a step needs {self._at_least}, got {len(self._members)}."
            )
        self._indices = itertools.count(len(self._members))
        self._last_word: BaseException | None = None
        self.failed = False  # By what a worker has raised, or a death too many.
        self.pushes = self._until_stopped()

    def _begin(self, standing: Standing) -> None:
        """Takes the run up where the server stands."""
        self._ledger = Ledger(standing)
        self.resumed = standing.global_step if standing.found else None

    def _until_stopped(self) -> Iterator[Push]:
        try:
            while self._ledger.stands < self._job.pushes:
                self.check()
                yield from self._next()
        except Stopped:
            return
        except Terminated:
            raise
        except BaseException:
            self.failed = True
            raise

    def _next(self) -> Iterator[Push]:
        """The next answer, or none yet."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises what shall end the run."""
        if self._last_word is not None:
            raise self._last_word

    def _wake(self) -> None:
        """Ends a wait for the next answer, where there is one."""

    def end(self, error: BaseException) -> None:
        """Makes ``pushes`` raise an error."""
        self._last_word = error
        self._wake()

    def stop(self) -> None:
        self.end(Stopped())

    def counts(self) -> Counts:
        return self._ledger.counts

    def add(self, worker: Worker) -> int:
        with self._lock:
            index = next(self._indices)
            self._members = {**self._members, index: worker}
        return index

    def remove(self, index: int) -> None:
        with self._lock:
            members = dict(self._members)
            if index not in members:
                raise ValueError(f"index: there is no worker {index!r}.")
            if len(members) == self._at_least:
                raise ValueError(
                    f"index: without worker {index} fewer than the {self._at_least} "
                    "that a step needs would be left."
                )
            del members[index]
            self._members = members


class Waits:
    """Who waits for which step to pass, where pushes add up to a step."""

    def __init__(self, job: Job, ledger: Ledger) -> None:
        self._job, self._ledger = job, ledger
        self.reset()

    def reset(self) -> None:
        """As it is where the server begins."""
        self._step, self._for = self._ledger.began_at, self._ledger.in_sum()

    def add(self, push: Push) -> None:
        """It is answered."""
        self._step = max(self._step, push.result.global_step)
        self._for[push.worker] = push.local_step

    def __contains__(self, worker: int) -> bool:
        needed = self._job.required is not None
        return needed and self._for.get(worker, -1) >= self._step
