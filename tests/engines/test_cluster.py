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
from unittest import mock

import pytest
import ray

from gradxform import engines
from gradxform._ray import actors, servers, wire
from gradxform._ray.servers import RayServer, ServerDiedError, WorkersServer
from gradxform._server.records import ServerStatus, Tally
from tests.engines.jobs import fails, make_job


class Notes:
    """Notes what ``engines.ray`` calls in Ray, and in which order."""

    class exceptions:
        RayError = RayTaskError = RayActorError = type("E", (Exception,), {})
        ActorUnavailableError = GetTimeoutError = RayActorError

    unpicklable, interrupt = None, False

    def __init__(self):
        self.calls, self.options = [], []

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

    def get(self, asked, timeout=None):
        if timeout is not None:  # Whether a killed process is still there.
            raise self.exceptions.RayActorError
        return asked

    def wait(self, asked, **_):
        return asked, []

    def kill(self, actor):
        self.calls.append(f"kill {actor.name}")

    def remote(self, cls=None, **groups):
        if cls is None:
            return self.remote
        kinds = {"Server": "server", "Worker": "worker"}
        found = (kinds[part] for part in kinds if part in cls.__name__)
        kind = next(found, "process")  # One of several, of one server.

        def start(*given, **options):
            self.calls.append(kind)
            if self.calls.count(kind) == 2 or kind == self.unpicklable:
                raise TypeError("Could not serialize the argument")
            begin = None
            if kind == "server":
                begin = types.SimpleNamespace(remote=cls(*given, **options).begin)
            other = types.SimpleNamespace(remote=lambda *_: object())
            ready = {"__ray_ready__": other}
            return types.SimpleNamespace(
                name=kind, begin=begin, rest=begin, work=other, cause=other, **ready
            )

        actor = types.SimpleNamespace(remote=start)

        def options(**given):
            self.options.append(given)
            return actor

        actor.options = options
        return actor


@pytest.fixture
def notes(monkeypatch):
    """The Ray of this process. Nothing is sent, so it needs no way for arrays."""
    monkeypatch.setattr(wire, "register", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", Notes())
    return sys.modules["ray"]


@pytest.mark.every
@pytest.mark.parametrize(
    ("unpicklable", "calls"),
    [
        ("server", "init, server, shutdown"),
        (
            "the second worker",
            "init, server, worker, worker, kill worker, kill server, shutdown",
        ),
    ],
)
def test_a_job_that_cannot_be_pickled_leaves_no_process(unpicklable, calls, notes):
    notes.unpicklable = unpicklable
    fails(engines.ray, make_job(2), TypeError, "Could not serialize")
    assert ", ".join(notes.calls) == calls


def test_a_cluster_is_started_whole_before_an_interrupt_ends_it(notes):
    notes.interrupt = True
    before = signal.getsignal(signal.SIGINT)
    fails(engines.ray, make_job(), KeyboardInterrupt, None)
    assert notes.calls == ["init", "shutdown"]
    assert signal.getsignal(signal.SIGINT) is before


def test_options_reach_ray(notes, near_ray):
    near_ray("def init(address, **_): assert address == 'auto'")
    with engines.ray(
        make_job(3),
        address="auto",
        worker_options={"num_gpus": 1},
        server_options={"num_cpus": 2, "max_concurrency": 99},
    ):
        pass
    workers, cluster, server = notes.options
    ours = {"max_restarts": 0, "max_task_retries": 0}
    assert workers == {"num_gpus": 1} | ours
    assert cluster["address"] == "auto"
    assert "num_cpus" not in cluster  # A running cluster has its own.
    assert server == {"num_cpus": 2, "max_concurrency": 99} | ours


@pytest.mark.every
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"worker_options": {"name": "x"}}, "worker_options: .* name: leave it out"),
        ({"server_options": {"lifetime": "detached"}}, "server_options: .* lifetime"),
        ({"worker_options": {"get_if_exists": True}}, "get_if_exists"),
        ({"server_options": {"max_pending_calls": 1}}, "max_pending_calls"),
        ({"server_options": {"concurrency_groups": {"a": 1}}}, "concurrency_groups"),
        ({"server_options": {"max_concurrency": 0}}, "max_concurrency must be in"),
        *(
            ({"address": "a", "connect_timeout": x}, "connect_timeout must be in")
            for x in (0.0, -1.0, math.nan)
        ),
    ],
)
def test_options_with_which_a_run_would_not_work_are_refused(options, says, notes):
    fails(engines.ray, make_job(), ValueError, says, **options)
    assert not notes.calls


def test_what_is_no_worker_is_named_here_too(notes):
    job = make_job()._replace(workers=[lambda number: ()])
    fails(engines.ray, job, TypeError, "worker 0 must be an engines.Worker")


def test_processes_of_before_are_ended_before_others_start(notes):
    processes = actors.Processes(None, make_job(), {})
    processes.start(None, pytest.fail)
    with pytest.raises(TypeError, match="Could not serialize"):
        processes.start(None, pytest.fail)
    assert notes.calls == ["server", "kill server", "server"]


@pytest.mark.every
@pytest.mark.parametrize("dies_after", [0.0, 3.0, math.inf])
def test_all_that_is_killed_has_ten_seconds_to_end(dies_after, notes, monkeypatch):
    """Each second one that is still there answers; later calls raise an error."""
    now, asked, killed = 100.0, [], []

    def get(ref, timeout):
        nonlocal now
        asked.append((ref, timeout))
        if now - 100.0 >= dies_after:
            raise notes.exceptions.RayActorError
        now += 0.5

    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(actors, "time", clock)
    monkeypatch.setattr(notes, "get", get)
    monkeypatch.setattr(notes, "kill", killed.append)
    processes = actors.Processes(None, make_job(), {})
    each = [types.SimpleNamespace(name=name) for name in "ab"]
    for actor in each:
        ready = mock.Mock(return_value=actor.name)
        actor.__ray_ready__ = types.SimpleNamespace(remote=ready)
    processes._actors = list(each)
    processes.kill()
    assert killed == each
    lived = min(dies_after, 10.0)
    waits = [("a", 10.0 - k / 2) for k in range(int(2 * lived))]
    if dies_after < 10.0:
        waits += [("a", 10.0 - lived), ("b", 10.0 - lived)]
    assert asked == waits
    processes.kill()  # They are gone.
    assert killed == each


# Where there is no cluster.

RAISES = "def init(address, **_): raise RuntimeError(f'not\\n{address}')"


@pytest.fixture
def near_ray(tmp_path, monkeypatch):
    """Gives processes that this one starts another Ray: a module with this code."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "ray.py").write_text


@pytest.fixture
def nobody(notes):
    """The address of a port where something listens that is not a Ray cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    assert not notes.calls


def connecting(error, match, address, timeout):
    options = {"address": address, "connect_timeout": timeout}
    return fails(engines.ray, make_job(), error, match, **options)[0]


def test_a_run_waits_for_a_silent_cluster_until_its_timeout(nobody):
    text = f"address: no Ray cluster has answered at '{nobody}' within connect_timeout"
    text = f"^{re.escape(text)}=0.5 seconds"
    connecting(ConnectionError, text, nobody, 0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_while_a_cluster_is_waited_for(number, nobody, caplog):
    before = signal.getsignal(signal.SIGTERM)
    # Not before the cluster is waited for: the signal would end these tests.
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    end = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    timer.start()
    raised = connecting(end, None, nobody, 3600.0)
    timer.join()
    if number == signal.SIGTERM:
        assert raised.code == 143
        assert "terminated: nothing is saved" in caplog.messages[-1]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("code", "timeout", "match"),
    [
        (RAISES, 600.0, r"at 'here'\. RuntimeError: not here$"),
        ("import os; os._exit(7)", math.inf, "the exit code was 7"),
    ],
)
def test_an_error_of_ray_about_an_address_is_passed_on(
    code, timeout, match, nobody, near_ray
):
    near_ray(code)
    connecting(ConnectionError, match, "here", timeout)


def test_the_death_of_any_process_is_the_death_of_the_server():
    """The leader may live long enough to tell that another process has died.

    In a real group that is a matter of luck, so this test asks the worker's side alone.
    """
    exceptions = ray.exceptions

    def in_a_task(cause):
        return exceptions.RayTaskError("push", "", cause).as_instanceof_cause()

    def raised(error):
        def get(_):
            raise error

        push = types.SimpleNamespace(remote=lambda *_, **__: None)
        server = WorkersServer(types.SimpleNamespace(push=push), None)
        server._ray = types.SimpleNamespace(exceptions=exceptions, get=get)
        with pytest.raises(Exception) as raised:  # noqa: PT011
            server.push(None, 0)
        return raised.type

    assert raised(in_a_task(exceptions.ActorDiedError())) is ServerDiedError
    assert issubclass(raised(in_a_task(ValueError("not finite"))), ValueError)
    # An answer has arrived, and what it refers to has died with the server.
    lost = exceptions.OwnerDiedError("00", None, "server")
    assert raised(exceptions.RaySystemError(lost, "")) is ServerDiedError
    other = exceptions.RaySystemError(MemoryError(), "")
    assert raised(other) is exceptions.RaySystemError


# A server that dies, as the driver sees it.

DIED = ray.exceptions.ActorDiedError
STATUS = ServerStatus("first", 0, Tally(), run="the run")
SAVED = engines.Checkpoint("runs", resume=False)


class Scripted:
    """The processes of a server: the outcomes of all calls are given."""

    layout, said = None, None

    def __init__(self, *outcomes):
        self.outcomes, self.begun, self.asked = [*outcomes], [], []

    def start(self, checkpoint, check):
        self.begun.append(checkpoint)
        number = len(self.begun)

        def method(name):
            return types.SimpleNamespace(remote=lambda *given: (number, name, *given))

        names = ("begin", "pull", "note")
        return types.SimpleNamespace(**{name: method(name) for name in names})

    def answers(self, asked, check):
        self.asked += asked
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return [outcome]

    def cause(self):
        return self.said

    def kill(self):
        self.begun.append("killed")


@pytest.fixture
def scripted(monkeypatch):
    """A server that has begun, what its processes note, and its naps."""

    def scripted(*outcomes, checkpoint=SAVED, max_deaths=1):
        naps, connection = [], mock.Mock(lost=False)
        monkeypatch.setattr(servers, "time", types.SimpleNamespace(sleep=naps.append))
        given = Scripted(STATUS, STATUS, *outcomes)
        how = checkpoint, max_deaths, connection, lambda: None
        server = RayServer(given, *how)
        assert server.begin() == STATUS
        assert given.asked == [(1, "begin", None), (1, "begin")]
        given.asked.clear()
        return server, given, naps

    return scripted


def test_a_server_that_may_live_is_asked_again(scripted):
    away = ray.exceptions.ActorUnavailableError("it may live", b"0" * 16)
    lost = ray.exceptions.OwnerDiedError("00", None, "server")
    server, given, naps = scripted(away, lost, "an answer")
    assert server.pull("rows", "float16") == "an answer"
    assert given.asked == [(1, "pull", "rows", "float16")] * 3
    assert (naps, server.deaths, given.begun) == ([0.1, 0.1], 0, [SAVED])
    server.kill()
    server.connection.lost = True  # Its processes have ended.
    server.kill()
    assert given.begun == [SAVED, "killed"]


def test_a_server_that_has_died_is_replaced_by_one_of_the_same_run(scripted, caplog):
    server, given, naps = scripted(DIED(), STATUS, "an answer")
    given.said = "no room"
    assert server.pull() == "an answer"
    assert given.asked == [(1, "pull"), (2, "begin", "the run"), (2, "pull")]
    assert given.begun == [SAVED, SAVED._replace(resume=True)]
    assert (naps, server.deaths) == ([], 1)
    assert caplog.messages == ["the server has ended: no room"]


def test_a_server_that_dies_too_often_also_while_it_starts_ends_the_run(scripted):
    last = DIED()
    server, given, _ = scripted(DIED(), DIED(), last, max_deaths=2)
    with pytest.raises(DIED) as raised:
        server.pull()
    assert raised.value is last
    assert last.__notes__ == ["The server has died more than max_deaths times."]
    assert (server.deaths, len(given.begun)) == (2, 3)
    error = DIED()
    server, given, _ = scripted(error, checkpoint=None)
    given.said = "no room"
    with pytest.raises(DIED):
        server.pull()
    assert error.__notes__ == [
        "The server has ended: no room.",
        "The run was not saved: give it a checkpoint.",
    ]
    assert (server.deaths, len(given.begun)) == (0, 1)


def test_a_server_that_cannot_begin_again_is_not_tried_twice(scripted):
    def in_a_task(cause):
        return ray.exceptions.RayTaskError("begin", "", cause).as_instanceof_cause()

    server, given, _ = scripted(in_a_task(KeyError("w")), DIED(), in_a_task(OSError()))
    with pytest.raises(KeyError):  # It lives, and has raised.
        server.pull()
    assert (server.deaths, len(given.begun)) == (0, 1)
    for _ in range(2):
        with pytest.raises(OSError) as raised:  # noqa: PT011
            server.pull()
        given.outcomes.append(DIED())
    assert isinstance(raised.value, ray.exceptions.RayTaskError)
    assert (server.deaths, len(given.begun)) == (1, 2)
