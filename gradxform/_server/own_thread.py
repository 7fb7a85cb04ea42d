"""Calls that nothing interrupts once they have begun."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any


class OwnThread:
    """Runs calls one after the other, where no signal handler interrupts them.

    Python runs signal handlers on the main thread alone, between any two of its
    instructions, and raises their exceptions there. So the main thread hands its calls
    to a thread of their own: a call that has begun ends, and an interrupted caller only
    stops waiting for it. As the main thread holds no lock meanwhile, a handler may call
    :meth:`run` wherever it interrupts, in the middle of :meth:`run` as well.
    ``queue.SimpleQueue`` is made for that; a condition or an executor would wait for
    the very thread that it has interrupted. All other threads run their calls
    themselves, which saves the way there and back.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._turn = _Turn()
        # A daemon, or Python would wait for it before it comes to `_finish`. It knows
        # queue and turn alone, so that it does not keep alive what it works for.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls, self._turn), name=name, daemon=True
        )
        self._thread.start()
        self._process: int | None = os.getpid()
        weakref.finalize(self, self._calls.put, None).atexit = False
        _alive.add(self)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Waits for ``function(*args)``; returns its result or raises its error.

        Raises:
          RuntimeError: nobody would answer: the call comes from a call that still runs,
            from a forked process, or after the end of the interpreter.
        """
        if threading.current_thread() is not threading.main_thread():
            return self._turn.take(function, *args)
        result, error = self._hand_over(function, *args).get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # It holds this frame, and this frame it.

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Does not wait for a thread's turn longer than it must, nor for an answer."""
        if threading.current_thread() is not threading.main_thread():
            self._turn.take(function, *args)
        else:
            self._hand_over(function, *args)

    def _hand_over(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns the queue that will hold ``(result, error)``."""
        # Not `is_alive`: interrupted, it takes the thread for dead.
        if self._process != os.getpid():
            raise RuntimeError(
                f"the thread {self._thread.name} is gone: this process is a fork of "
                "the one that started it, or the interpreter is about to end."
            )
        answer: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._calls.put((answer, function, args))
        return answer


class _Turn:
    """One call at a time; never taken by the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def take(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._owner == threading.get_ident():
            raise RuntimeError(
                "a call from inside of another one, which waits for it: a callback of "
                "tx cannot ask the server that runs it."
            )
        with self._lock:
            self._owner = threading.get_ident()
            try:
                return function(*args)
            finally:
                self._owner = None


def _serve(calls: queue.SimpleQueue[Any], turn: _Turn) -> None:
    # Between two calls no variable here holds anything of the last one alive.
    while _answer(calls.get(), turn):
        pass


def _answer(call: Any, turn: _Turn) -> bool:
    if call is None:
        return False
    answer, function, args = call
    try:
        answer.put((turn.take(function, *args), None))
    except BaseException as error:
        answer.put((None, error))
    return True


_alive: weakref.WeakSet[OwnThread] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    # A daemon that comes back from compiled code when the interpreter is gone takes the
    # process down with it, so what has begun ends before.
    for own in list(_alive):
        own._process = None
        own._calls.put(None)
        own._thread.join()
