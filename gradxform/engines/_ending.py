"""How a run ends: when it is done, by a signal, or by an exception."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.records import summary
from gradxform.engines._pool import Terminated, WorkerPool

logger = logging.getLogger("gradxform")


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

    def terminate(*_: object) -> None:
        nonlocal told
        told = True
        run.end(Terminated())

    def interrupt(*signalled: object) -> None:
        # Python drops a handler's exception if it interrupts a destructor.
        run.end(KeyboardInterrupt())
        before(*signalled)

    # A program that ignores Ctrl-C has no function here.
    before: Any = signal.getsignal(signal.SIGINT)
    # A program may have a handler of its own.
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with (
        handled(signal.SIGTERM, terminate, is_free),
        handled(signal.SIGINT, interrupt, callable(before)),
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
        step = run.save() if checkpoint else None
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


@contextlib.contextmanager
def handled(
    number: int, handler: Callable[..., None] | signal.Handlers, wanted: bool
) -> Iterator[None]:
    """Handles a signal, if wanted; only the main thread ever gets signals."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:  # Nobody has changed it meanwhile.
            signal.signal(number, before)


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
