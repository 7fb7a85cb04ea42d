"""The worker pool: the common part of the runs of all engines."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import signal
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from gradxform._checks import arguments
from gradxform._devices import host
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.core import of_one_process
from gradxform._server.placement import is_function
from gradxform._server.records import Ahead, ServerStatus, is_past
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.transport import Transport
from gradxform.engines import _work
from gradxform.engines._job import Counts, Job, Push, Server, Worker, check_worker
from gradxform.engines._ledger import Ledger
from gradxform.engines._scheduler import Scheduler

logger = logging.getLogger("gradxform")

LOOK = 0.5  # Seconds after which a wait for an answer checks the workers again.


OVER = "the run is over: iterate pushes inside of the engine's context."


class Stopped(Exception):
    """The run ends early, without an error: ``stop``, or nobody has more to do."""


class Terminated(SystemExit):
    """The process was told to end by ``SIGTERM``; its exit code is 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class JobServer(RecoverableServer):
    """The server of a job, if it is one process; also as an actor of Ray."""

    def __init__(
        self, job: Job, checkpoint: Checkpoint | None, kind: type[Transport] = Transport
    ) -> None:
        how = {"donate": job.donate, "require_finite": job.require_finite}
        core = of_one_process(job.params, job.tx, **how)
        super().__init__(kind(core), checkpoint, job.pushes)


class RunServer(Server, Protocol):
    """A server as a run uses it: see :class:`RecoverableServer`."""

    def begin(self) -> ServerStatus: ...
    def status(self) -> ServerStatus: ...
    def note(self, ahead: Ahead) -> None: ...
    def rest(self) -> ServerStatus: ...
    def save(self) -> int | None: ...


class WorkerPool:
    """The :class:`Run` of an engine: its workers come and go.

    The iteration over ``pushes`` tells each worker to compute, one gradient at a time.
    While nobody iterates, the workers finish their present gradients, and rest.
    """

    server: RunServer
    workers: Mapping[int, Any]  # By engine: threads, or handles of Ray.

    def __init__(self, job: Job) -> None:
        if job.required is not None:
            arguments.in_range("required", job.required, "[1, inf)", integer=True)
        arguments.in_range("pushes", job.pushes, "[1, inf)", integer=True)
        if not is_function(job.params):  # An actor would get copies on its device.
            host.check_served("params", job.params)
        self._job = job
        if job.pace is not None and not callable(job.pace):
            raise TypeError(
                "pace must be a function of Progress, such as "
                f"engines.bounded_staleness(4), or None, got {job.pace!r}."
            )
        self._limit = _work.limit_of(job.max_staleness)
        self._at_least = 1 if job.required is None else job.required
        self._lock = threading.Lock()  # Of two threads that remove workers.
        if not isinstance(job.workers, Iterable):
            raise TypeError(
                f"workers must be a sequence of engines.Worker, got {job.workers!r}."
            )
        self._members = {i: self._joining(i, w) for i, w in enumerate(job.workers)}
        if len(self._members) < self._at_least:
            raise ValueError(
                f"workers: a step needs {self._at_least}, got {len(self._members)}."
            )
        self._indices = itertools.count(len(self._members))
        self._busy: dict[int, Any] = {}  # Workers that compute, with `_start`'s result.
        self._longest = 0.0  # Seconds of the slowest gradient so far.
        self._refused: set[int] = set()  # Workers whose pushes the server refused.
        self._last_word: BaseException | None = None
        self._free: list[int] = []  # About these workers `pace` was asked last.
        self._begun = False
        self._pushes = self._until_stopped()

    @property
    def pushes(self) -> Iterator[Push]:
        if isinstance(self._last_word, RuntimeError):  # Its context has ended.
            raise self._last_word
        if inspect.getgeneratorstate(self._pushes) == inspect.GEN_RUNNING:
            raise RuntimeError(
                "pushes: another thread or a signal handler waits for the next push. "
                "Read it in one place, and hand the pushes on, for example through a "
                "queue.Queue."
            )
        return self._pushes

    def _joining(self, index: int, worker: Worker) -> Worker:
        """A worker whose gradient can be computed again, on the same minibatch."""
        if not isinstance(worker, Worker):
            raise TypeError(
                f"workers: worker {index} must be an engines.Worker, got {worker!r}. "
                "Give a sequence of engines.Worker(gradient, batch)."
            )
        check_worker(worker)  # `_replace` makes one, too.
        if self._limit is not None:
            batch = functools.lru_cache(maxsize=1)(worker.batch)
            worker = worker._replace(batch=batch)
        return _work.cast_back(worker, self._job.params)

    def begin(self, server: RunServer) -> None:
        """Starts the run where the server stands."""
        self.server = server
        status = server.begin()
        self._go_on(status)
        self._ledger = Ledger(status)
        start = self._job, self._ledger, self._members, status.ahead
        self._scheduler = Scheduler(*start)
        self.resumed = None if status.notes is None else status.global_step
        self._began_at = time.monotonic()
        self._begun = True

    def _go_on(self, status: ServerStatus) -> None:
        """Takes note of where an incarnation of the server begins."""
        self._noted = status.ahead
        for note in status.notes or ():  # About its checkpoint.
            logger.warning("%s", note)

    def _clock(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began_at

    def _until_stopped(self) -> Generator[Push, None, None]:
        try:
            while not self._is_done():
                self.check()
                if self._hand_out():
                    self._check_somebody_works()
                    yield from self._next()
        except Stopped:
            pass
        self.rest()

    def _is_done(self) -> bool:
        """Whether the parameters hold all pushes, also if the server dies now."""
        return self._ledger.tally.pushes >= self._job.pushes

    def _next(self) -> Iterator[Push]:
        """The next answer, or none yet."""
        raise NotImplementedError

    # The workers that compute.

    def _start(self, index: int, worker: Worker, number: int) -> object:
        """Tells a worker to compute a gradient; returns the engine's handle of it."""
        raise NotImplementedError

    def _dismiss(self, index: int) -> None:
        """Lets a worker go that is not busy, and no longer a member."""

    def _hand_out(self) -> bool:
        """Gives a gradient to each worker that has nothing to wait for.

        It returns False as soon as one has left: the others must be asked again.
        """
        for index in [*self.workers]:
            if not (index in self._members or index in self._busy):
                self._dismiss(index)
        members, now = dict(self._members), self._clock()  # Other threads change it.
        scheduler, ledger = self._scheduler, self._ledger
        scheduler.join(members, now)
        if (ahead := scheduler.ahead) != self._noted:
            self._noted = ahead
            self.server.note(ahead)
        idle = [i for i in members if not (i in self._busy or i in self._refused)]
        free = [i for i in idle if not (self._job.required and ledger.waits(i))]
        self._free, begun = free, scheduler.begin(members, free, now)
        while ledger.tally.pushes + self._awaited() < self._job.pushes:
            if (each := next(begun, None)) is None:
                break
            index, number = each
            try:
                self._busy[index] = self._start(index, members[index], number)
            except Exception as outcome:  # Its stream has ended, or it is raised again.
                self._take(index, outcome)
                return False
        return True

    def _awaited(self) -> int:
        """How many busy workers are expected to push.

        A worker that takes far longer than any gradient so far is left out, as it may
        never come back. Another may push in its place, and the server takes the first.
        """
        if self._ledger.tally.pushes + len(self._busy) < self._job.pushes:
            return len(self._busy)  # The job needs them all.
        limit = self._clock() - LOOK - 2 * self._longest
        return sum(self._ledger.begun[index].at > limit for index in self._busy)

    def _check_somebody_works(self) -> None:
        """Ends the run if nobody computes: it would wait forever."""
        if self._busy:
            return
        if len(self._members) < self._at_least or self._refused:
            raise Stopped  # Their streams have ended, or the server takes no more.
        if self._free:
            raise ValueError(
                f"pace: it lets none of the {len(self._free)} free workers begin, and "
                "no gradient is under way, so nothing would ever change. Let it return "
                "True if local_steps is empty; bounded_staleness and admission need "
                "the num_required of tx."
            )
        raise ValueError(
            f"required={self._job.required}: all {len(self._members)} workers have "
            "pushed for a step and wait for it, but tx needs more pushes to make it. "
            "Let required be the num_required of the accumulator, and have at least as "
            "many workers."
        )

    def _take(self, index: int, outcome: Push | BaseException) -> Push | None:
        """Takes note of a worker's outcome; returns its push, if it is one."""
        self._busy.pop(index, None)
        ledger, now = self._ledger, self._clock()
        begun = ledger.begun[index]
        self._scheduler.end(index, now)
        if isinstance(outcome, Push):
            self._longest = max(self._longest, now - begun.at)
            if ledger.is_repeated(outcome):
                self._hear()
            push = outcome._replace(time=now, started=begun.at, waited=begun.waited)
            ledger.add(push)
            return push
        if isinstance(outcome, _work.GivenUpError):
            ledger.give_up(index)  # `_hand_out` starts this number again.
            return None
        ledger.leave_unanswered(index)
        if not isinstance(outcome, _work.UnansweredError):
            self._raise(index, begun.number, outcome)
        if isinstance(outcome, _work.StreamEndedError):
            self._members.pop(index, None)
        if isinstance(outcome, _work.ServerDiedError):  # Or its own process.
            self._hear()
        if isinstance(outcome, _work.RefusedError):
            (local_step,) = outcome.args
            if not is_past(local_step, ledger.incarnation):
                self._refused.add(index)
        return None

    def _hear(self) -> None:
        """Asks the server what it has done."""
        self._ledger.hear(self.server.status())

    def _raise(self, worker: int, number: int, error: BaseException) -> NoReturn:
        """Raises the error of a worker."""
        if isinstance(error, StopIteration):  # A generator cannot pass it on.
            error = RuntimeError(
                "a stream has ended, though not in batch. Only there an end means that "
                "the worker has nothing left to do."
            ).with_traceback(error.__traceback__)
        error.add_note(f"Raised by worker {worker}, for its gradient {number}.")
        raise error

    # The end.

    def rest(self) -> None:
        """Ends all pushing; counts the answers that ``pushes`` has not given, too."""
        if self._begun:
            self._ledger.settle(self.server.rest())

    def save(self) -> int | None:
        """Writes a last checkpoint; returns its global step, None without one."""
        return self.server.save() if self._begun else None

    def close(self) -> None:
        """Marks the run as over, at the end of its context."""
        self.end(RuntimeError(OVER))

    def check(self) -> None:
        """Raises the error that should end the run, if there is one."""
        if self._last_word is not None:
            raise self._last_word

    def _wake(self) -> None:
        """Ends a wait for the next answer, if one is going on."""

    def end(self, error: BaseException) -> None:
        """Makes ``pushes`` raise an error."""
        self._last_word = error
        self._wake()

    def stop(self) -> None:
        self.end(Stopped())

    def counts(self) -> Counts:
        return self._ledger.counts

    def add(self, worker: Worker) -> int:
        index = next(self._indices)
        self._members[index] = self._joining(index, worker)
        self._wake()
        return index

    def remove(self, index: int) -> None:
        with self._lock:
            if index not in self._members:
                raise ValueError(f"index: there is no worker {index!r}.")
            if len(self._members) == self._at_least:
                raise ValueError(
                    f"index: removing worker {index} would leave fewer than the "
                    f"{self._at_least} that a step needs."
                )
            self._members.pop(index, None)  # Its stream may have ended meanwhile.
        self._wake()  # `pace` may let the others begin now.
