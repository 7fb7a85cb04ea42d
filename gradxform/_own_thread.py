"""A thread on which nothing interrupts what has begun."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any


class OwnThread:
    """Runs calls one after the other, on a thread that nobody else has.

    Python runs signal handlers on the main thread, between any two of its instructions,
    and raises there what they raise. Here no handler runs: a call that has begun ends,
    and who is interrupted only stops waiting for it. As those who wait hold no lock, a
    handler may call :meth:`run` wherever it interrupts the main thread, in the middle
    of :meth:`run` as well. ``queue.SimpleQueue`` is made for that; a lock, a condition
    or an executor would wait for the thread that it has interrupted.

    Args:
      name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon, or Python would wait for it before it comes to `_finish`. It knows
        # the queue alone, so that it does not keep alive what it works for.
        self._thread = threading.Thread(
            target=_serve, args=(self._calls,), name=name, daemon=True
        )
        self._thread.start()
        self._process: int | None = os.getpid()
        weakref.finalize(self, self._calls.put, None).atexit = False
        _alive.add(self)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Waits for ``function(*args)``; returns or raises what that does.

        Raises:
          RuntimeError: nobody would answer: the call comes from a call that still runs,
            from a forked process, or after the end of the interpreter.
        """
        result, error = self.start(function, *args).get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # It holds this frame, and this frame it.

    def start(self, function: Callable[..., Any], *args: Any) -> Any:
        """Does not wait; the queue that it returns will hold ``(result, error)``."""
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a call from inside of another one, which waits for it: a callback of "
                "tx cannot ask the server that runs it."
            )
        # Not `is_alive`, which takes a thread for dead when it is interrupted itself.
        if self._process != os.getpid():
            raise RuntimeError(
                f"the thread {self._thread.name} is gone: this process is a fork of "
                "the one that started it, or the interpreter is about to end."
            )
        answer: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._calls.put((answer, function, args))
        return answer


def _serve(calls: queue.SimpleQueue[Any]) -> None:
    # Between two calls no variable here holds anything of the last one alive.
    while _answer(calls.get()):
        pass


def _answer(call: Any) -> bool:
    if call is None:
        return False
    answer, function, args = call
    try:
        answer.put((function(*args), None))
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
