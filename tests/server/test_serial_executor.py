"""Calls of the main thread run on another thread, which ends before the interpreter."""

import os
import threading
import weakref

import pytest

from gradxform._server import serial_executor
from gradxform._server.serial_executor import SerialExecutor


def test_a_call_of_the_main_thread_runs_on_the_executor_s_thread():
    executor = SerialExecutor("calls")
    assert executor.run(threading.current_thread).name == "calls"
    with pytest.raises(ZeroDivisionError):
        executor.run(divmod, 1, 0)
    assert executor.run(divmod, 7, 2) == (3, 1)
    executor.finish()


def test_a_call_inside_of_a_call_is_refused():
    executor = SerialExecutor("calls")
    with pytest.raises(RuntimeError, match="this call comes from inside of another"):
        executor.run(executor.check)
    with pytest.raises(RuntimeError, match="this call comes from inside of another"):
        executor.run(executor.run, int)
    executor.check()
    assert executor.run(int) == 0
    executor.finish()


def test_what_has_begun_is_finished_at_the_end(monkeypatch):
    monkeypatch.setattr(serial_executor, "_alive", weakref.WeakSet())
    started, done = threading.Event(), []
    executor = SerialExecutor("calls")

    def slow():
        started.set()
        done.append(os.getpid())

    caller = threading.Thread(target=executor.run, args=(slow,))
    caller.start()
    started.wait()
    (thread,) = (x for x in threading.enumerate() if x.name == "calls")
    serial_executor._finish()
    caller.join()
    assert done == [os.getpid()]
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="the thread calls is gone"):
        executor.run(int)
