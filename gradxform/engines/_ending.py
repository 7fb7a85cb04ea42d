"""How a run ends: when it is done, by a signal, or by an exception.

A run in this process begins here, too, with its server.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.records import summary
from gradxform.engines._job import Job
from gradxform.engines._pool import JobServer, Terminated, WorkerPool

logger = logging.getLogger("gradxform")


@contextlib.contextmanager
def served(run: WorkerPool, job: Job, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Gives a run a server in this process, until the end of both."""
    with JobServer(job, checkpoint) as server:
        run.begin(server)
        with contextlib.closing(run), ending(run, checkpoint):
            yield


@contextlib.contextmanager
def ending(run: WorkerPool, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Saves a run at its end, also if an exception ends it.

    Two ends are not saved: Ctrl-C, as it ends the run at once, and a failed step of the
    server, as the server's state may be the cause.

    Args:
      run: the run; its server is saved.
      checkpoint: where to.
    """
    told = False

    def terminate() -> None:
        nonlocal told
        told = True
        run.end(Terminated())

    # A program that ignores Ctrl-C has no function here.
    is_heard = callable(signal.getsignal(signal.SIGINT))
    with (
        ended_by(signal.SIGTERM, terminate, ends_runs(signal.SIGTERM)),
        # Python drops a handler's exception if it interrupts a destructor.
        ended_by(signal.SIGINT, lambda: run.end(KeyboardInterrupt()), is_heard),
    ):
        try:
            yield
        except Terminated:
            told = True
        except KeyboardInterrupt as error:
            run.end(error)
            raise
        except BaseException as error:
            try:
                run.rest()
                step = run.save() if checkpoint else None
            except Exception as another:  # The user needs the first one.
                if checkpoint:
                    logger.error("no checkpoint was written: %s", summary(another))
            else:
                if step is not None:
                    error.add_note(f"{_outcome(step, checkpoint)}.")
            raise
        run.rest()
        try:
            step = run.save() if checkpoint else None
        except Exception as error:
            if not told:
                raise
            logger.error("terminated: no checkpoint was written: %s", summary(error))
            raise Terminated from error
        if told:
            terminated(step, checkpoint)


def terminated(step: int | None, checkpoint: Checkpoint | None) -> NoReturn:
    """Ends the process, and logs what is saved."""
    logger.warning("terminated: %s", _outcome(step, checkpoint))
    raise Terminated


def _outcome(step: int | None, checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "nothing is saved of a run without checkpoint"
    if step is None:
        return "nothing was done that could be saved"
    return f"step {step} is saved in {checkpoint.directory}; the same job goes on there"


class _Handler:
    """A run's handler of a signal, which goes on to the handler from before.

    So a signal ends all runs of the main thread, the newest one first. Runs may end in
    any sequence: the handler of one that is over may still lie below those of others.
    """

    def __init__(self, signum: int, end: Callable[[], None]) -> None:
        self._end, self.before, self.is_over = end, signal.getsignal(signum), False

    def __call__(self, *signalled: object) -> None:
        self._end()
        if callable(before := _without_ended(self.before)):
            before(*signalled)


# A handler is of any type that `signal.getsignal` returns.
def _without_ended(handler: Any) -> Any:
    """A handler, or the one below it of a run that is not over, or of the program."""
    while isinstance(handler, _Handler) and handler.is_over:
        handler = handler.before
    return handler


def ends_runs(signum: int) -> bool:
    """Whether a signal may end a run: a program may have a handler of its own."""
    handler = signal.getsignal(signum)
    return handler is signal.SIG_DFL or isinstance(handler, _Handler)


def give_back(signum: int, handler: Any) -> None:  # As above.
    """Gives a signal back to its handler from before."""
    signal.signal(signum, _without_ended(handler))


@contextlib.contextmanager
def ended_by(signum: int, end: Callable[[], None], wanted: bool) -> Iterator[None]:
    """Lets a signal end a run, and those around it, if wanted."""
    handler = _Handler(signum, end)
    try:
        with handled(signum, handler, wanted):
            yield
    finally:
        handler.is_over = True


@contextlib.contextmanager
def handled(
    signum: int, handler: Callable[..., object] | int, wanted: bool
) -> Iterator[None]:
    """Handles a signal, if wanted; only the main thread ever gets signals."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        if signal.getsignal(signum) is handler:  # Nobody has changed it meanwhile.
            give_back(signum, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the block has ended."""
    pending: list[int] = []
    try:
        with handled(signal.SIGINT, lambda *_: pending.append(1), True):
            yield
    finally:
        if pending:
            signal.raise_signal(signal.SIGINT)
