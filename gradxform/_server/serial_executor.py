"""Calls that nothing interrupts once they have begun."""

from __future__ import annotations

import atexit
import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
# The queue for (result, error), the function and its arguments.
Call: TypeAlias = tuple[queue.SimpleQueue[Any], Callable[..., Any], tuple[Any, ...]]


class SerialExecutor:
    """Runs calls one after the other, where no signal handler interrupts them.

    Python runs signal handlers only on the main thread, between any two of its
    instructions, and raises their exceptions there. So the main thread hands its calls
    to another thread. A call that has begun runs to its end; an interrupted caller only
    stops waiting for it. Meanwhile the main thread holds no lock, so a handler may call
    :meth:`run` anywhere, even while it interrupts :meth:`run`. ``queue.SimpleQueue``
    allows this; a condition or an executor would wait for the thread that the handler
    has interrupted. All other threads run their calls themselves, which is faster.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        # None ends the thread.
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        # A daemon: Python would wait for any other thread before it calls `_finish`. It
        # knows only queue and turn, so it keeps no server alive.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, self._turn), name=name, daemon=True
        )
        self._thread.start()
        self._process: int | None = os.getpid()
        weakref.finalize(self, self._calls.put, None).atexit = False
        _alive.add(self)

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Waits for ``function(*args)``; returns its result or raises its error.

        Raises:
          RuntimeError: it would wait forever, as the caller is a call that still runs
            here, or a forked process, or the interpreter is about to end.
        """
        if threading.current_thread() is not threading.main_thread():
            return _take(self._turn, function, *args)
        # Not `is_alive`: it may call the thread dead after an interrupt.
        if self._process != os.getpid():
            raise RuntimeError(
                f"the thread {self._thread.name} is gone: this process is a fork of "
                "the one that started it, or the interpreter is about to end."
            )
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((answer, function, args))
        result: T
        result, error = answer.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # The error and this frame refer to each other.

    def check(self) -> None:
        """Raises ``RuntimeError`` if the caller is a call that still runs here."""
        _check(self._turn)

    def finish(self) -> None:
        """Ends the thread after the calls that have begun, and waits for its end."""
        self._process = None
        self._calls.put(None)
        self._thread.join()


# The locks that the present call has. Callbacks have those of the call they serve.
_taken: contextvars.ContextVar[tuple[threading.Lock, ...]]
_taken = contextvars.ContextVar("taken", default=())


def _check(turn: threading.Lock) -> None:
    if turn in _taken.get():
        raise RuntimeError(
            "this call comes from inside of another one, which waits for it: a "
            "callback of tx cannot ask the server that runs it."
        )


def _take(turn: threading.Lock, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """One call at a time; never on the main thread."""
    _check(turn)
    with turn:
        token = _taken.set((*_taken.get(), turn))
        try:
            return function(*args)
        finally:
            _taken.reset(token)


def _serve(calls: queue.SimpleQueue[Call | None], turn: threading.Lock) -> None:
    while (call := calls.get()) is not None:
        answer, function, args = call
        try:
            answer.put((_take(turn, function, *args), None))
        except BaseException as error:
            answer.put((None, error))
        del call, answer, function, args  # They may keep a server alive.


_alive: weakref.WeakSet[SerialExecutor] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    # A daemon crashes the process if it returns from compiled code after the end of the
    # interpreter. So calls that have begun are finished before.
    for own in list(_alive):
        own.finish()
