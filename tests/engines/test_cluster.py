"""Ray's cluster, with a Ray that only takes notes. test_ray.py has the real one."""

import math
import os
import re
import signal
import socket
import sys
import threading
import time
import types

import jax.numpy as jnp
import optax
import pytest
import ray

from gradxform import engines
from gradxform._server.recoverable import ServerStatus
from gradxform.engines import _connect, _ray
from gradxform.engines._servers import ServerDiedError, WorkersServer

pytestmark = pytest.mark.usefixtures("bounded")


class Notes:
    """Notes what ``engines.ray`` calls in Ray, and in which order."""

    class exceptions:
        RayTaskError = RayActorError = ActorUnavailableError = type(
            "E", (Exception,), {}
        )

    def __init__(self, unpicklable=None, interrupt=False):
        self.calls = []
        self.options = []
        self.unpicklable = unpicklable
        self.interrupt = interrupt

    def is_initialized(self):
        return False

    def init(self, **options):
        if self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # The signal would strike here.
        self.calls.append("init")
        self.options.append(options)

    def shutdown(self):
        self.calls.append("shutdown")

    def put(self, value):
        return value

    def get(self, asked):
        return asked

    def wait(self, asked, **_):
        return asked, []

    def kill(self, actor):
        self.calls.append(f"kill {actor.name}")

    def remote(self, cls):
        def start(*_, **__):
            self.calls.append(cls.__name__)
            if self.calls.count(cls.__name__) == 2 or cls.__name__ == self.unpicklable:
                raise TypeError("Could not serialize the argument")
            status = ServerStatus("life", 0, 0, 0, {}, False)
            begin = types.SimpleNamespace(remote=lambda: status)
            work = types.SimpleNamespace(remote=lambda *_: object())
            return types.SimpleNamespace(
                name=cls.__name__, begin=begin, work=work, rest=begin
            )

        actor = types.SimpleNamespace(remote=start)

        def options(**given):
            self.options.append(given)
            return actor

        actor.options = options
        return actor


def make_job(count=1):
    workers = [engines.Worker(lambda params: (params, params))] * count
    return engines.Job(jnp.float32(0.0), optax.sgd(1.0), workers, 40)


@pytest.mark.parametrize(
    ("unpicklable", "calls"),
    [
        ("RecoverableServer", ["init", "RecoverableServer", "shutdown"]),
        (
            "the second worker",
            [
                *("init", "RecoverableServer", "_RayWorker", "_RayWorker"),
                *("kill _RayWorker", "kill RecoverableServer", "shutdown"),
            ],
        ),
    ],
)
def test_a_job_that_cannot_be_pickled_leaves_no_process(
    unpicklable, calls, monkeypatch
):
    notes = Notes(unpicklable)
    monkeypatch.setitem(sys.modules, "ray", notes)
    with (
        pytest.raises(TypeError, match="Could not serialize"),
        engines.ray(make_job(2)) as run,
    ):
        next(run.pushes)
    assert notes.calls == calls


def test_a_cluster_is_started_whole_before_an_interrupt_ends_it(monkeypatch):
    notes = Notes(interrupt=True)
    monkeypatch.setitem(sys.modules, "ray", notes)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), engines.ray(make_job()):
        pass
    assert notes.calls == ["init", "shutdown"]
    assert signal.getsignal(signal.SIGINT) is before


def test_options_reach_ray(monkeypatch):
    notes = Notes()
    monkeypatch.setitem(sys.modules, "ray", notes)
    monkeypatch.setattr(_ray, "connect", lambda *given: notes.calls.append(given))
    with engines.ray(
        make_job(3),
        address="auto",
        worker_options={"num_gpus": 1},
        server_options={"num_cpus": 2, "max_concurrency": 99},
    ):
        pass
    workers, cluster, server = notes.options
    assert workers == {"num_gpus": 1}
    assert notes.calls[0] == ("auto", 30.0)
    assert cluster["address"] == "auto"
    assert "num_cpus" not in cluster  # A running cluster has its own.
    assert server == {"num_cpus": 2, "max_concurrency": 99}


def test_without_ray_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ImportError, match=r"pip install 'gradxform\[ray\]'"),
        engines.ray(make_job()),
    ):
        pass


# Where there is no cluster.


@pytest.fixture
def nobody(monkeypatch):
    """The address of a port where something listens that is not a Ray cluster."""
    notes = Notes()
    monkeypatch.setitem(sys.modules, "ray", notes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    assert not notes.calls


def connect(address, timeout):
    with engines.ray(make_job(), address=address, connect_timeout=timeout):
        pytest.fail("there is none")


def test_a_run_waits_for_a_silent_cluster_until_its_timeout(nobody):
    text = f"address: no Ray cluster has answered at '{nobody}' within connect_timeout"
    with pytest.raises(ConnectionError, match=f"^{re.escape(text)}=0.5 seconds"):
        connect(nobody, 0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_while_a_cluster_is_waited_for(number, nobody, caplog):
    before = signal.getsignal(signal.SIGTERM)
    # Not before the cluster is waited for: the signal would end these tests.
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    end = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    timer.start()
    with pytest.raises(end) as raised:
        connect(nobody, 3600.0)
    timer.join()
    if number == signal.SIGTERM:
        assert raised.value.code == 143
        assert "terminated: nothing is saved" in caplog.messages[-1]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_ray_about_an_address_is_passed_on(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text(
        "def init(address, **_):\n    raise RuntimeError(f'not\\n{address}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConnectionError, match=r"at 'here'\. RuntimeError: not here$"):
        _connect.connect("here", 600.0)
    (tmp_path / "ray.py").write_text("def init(address, **_): pass\n")
    _connect.connect("here", 600.0)
    (tmp_path / "ray.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConnectionError, match="the exit code was 7"):
        _connect.connect("here", math.inf)


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.nan])
def test_the_timeout_is_checked(timeout, nobody):
    with pytest.raises(ValueError, match="connect_timeout must be in"):
        connect(nobody, timeout)


def test_the_death_of_any_process_is_the_death_of_the_server():
    """The leader may live long enough to tell that another process has died."""
    exceptions = ray.exceptions

    def raised(cause):
        def get(_):
            raise exceptions.RayTaskError("push", "", cause).as_instanceof_cause()

        push = types.SimpleNamespace(remote=lambda *_, **__: None)
        server = WorkersServer(types.SimpleNamespace(push=push), None)
        server._ray = types.SimpleNamespace(exceptions=exceptions, get=get)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            server.push(None, 0)
        return raised.type

    assert raised(exceptions.ActorDiedError()) is ServerDiedError
    assert issubclass(raised(ValueError("not finite")), ValueError)
