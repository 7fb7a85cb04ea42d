"""How a run ends: at its end, by a signal, or by an exception."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from gradxform._server.checkpoints import Checkpoint
from gradxform.engines._crew import Crew, Terminated

logger = logging.getLogger("gradxform")


@contextlib.contextmanager
def ending(run: Crew, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Saves a run that is through, that is stopped, or that ``SIGTERM`` ends.

    One that ends by any other exception is not saved: it may be what is wrong.

    Args:
      run: what ends; its server is saved.
      checkpoint: where to.
    """
    told = False

    def terminate(*_: object) -> None:
        nonlocal told
        told = True
        run.end(Terminated())

    def interrupt(before: Callable[..., object], *signalled: object) -> None:
        # Python drops what a handler raises while a destructor runs.
        run.end(KeyboardInterrupt())
        before(*signalled)

    with _sigterm(terminate), _sigint(interrupt):
        try:
            yield
        except Terminated:
            told = True
        run.rest()
        step = run.server.save() if checkpoint and not run.failed else None
        if told:
            terminated(step, checkpoint)


@contextlib.contextmanager
def starting(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Hears ``SIGTERM`` where there is no run yet that it could end.

    Args:
      checkpoint: where the run would have been saved.
    """
    with _sigterm(lambda *_: terminated(None, checkpoint)):
        yield


def terminated(step: int | None, checkpoint: Checkpoint | None) -> NoReturn:
    """Ends the process, and says what is saved."""
    logger.warning("terminated: %s", _outcome(step, checkpoint))
    raise Terminated


def _outcome(step: int | None, checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "nothing is saved of a run without checkpoint"
    if step is None:
        return "nothing was done that could be saved"
    return f"step {step} is saved in {checkpoint.directory}; the same job goes on there"


@contextlib.contextmanager
def _sigterm(handler: Callable[..., None]) -> Iterator[None]:
    """Takes it over, unless the program has a handler of its own."""
    before = signal.getsignal(signal.SIGTERM)
    rays = getattr(before, "__module__", "").startswith("ray.")  # It knows no better.
    with _handled(signal.SIGTERM, handler, before is signal.SIG_DFL or rays):
        yield


@contextlib.contextmanager
def _sigint(handler: Callable[..., None]) -> Iterator[None]:
    """Goes before whatever the program does then, if it does not ignore it."""
    before = signal.getsignal(signal.SIGINT)
    first = functools.partial(handler, before)
    with _handled(signal.SIGINT, first, callable(before)):
        yield


@contextlib.contextmanager
def _handled(number: int, handler: Callable[..., None], wanted: bool) -> Iterator[None]:
    """Another thread than the main one never gets a signal."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:  # Else it was changed meanwhile.
            signal.signal(number, before)


def uninterrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Puts Ctrl-C off until the function has done all that it does."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        pending: list[int] = []
        try:
            with _handled(signal.SIGINT, lambda *_: pending.append(1), True):
                return function(*args)
        finally:
            if pending:
                signal.raise_signal(signal.SIGINT)

    return call
