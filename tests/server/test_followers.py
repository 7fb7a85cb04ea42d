"""How the leader of a server calls the other processes, and how it ends: without Ray.

``engines/test_group`` has whole servers. Here the answers of all calls are given.
"""

import contextlib
import queue
import socket
import sys
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._ray import followers as module
from gradxform._ray import leader, wire
from gradxform._ray.followers import Followers
from gradxform._ray.messages import PushMessage
from gradxform._ray.wire import Payload
from gradxform._server.core import of_one_process
from gradxform._server.reader import Reader

exceptions = pytest.importorskip("ray").exceptions


class Method:
    def __init__(self, actor, name, group=None):
        self._call = actor, name, group

    def options(self, concurrency_group):
        return Method(*self._call[:2], concurrency_group)

    def remote(self, *args):
        return *self._call, *args


class Actor:
    """It has all methods; a reference to an answer is the call itself."""

    def __init__(self, index):
        self._index = index

    def __getattr__(self, name):
        return Method(self._index, name)


class Ray:
    """It notes for which calls somebody waits, and raises what it is given."""

    exceptions = exceptions

    def __init__(self):
        self.waits, self.asked, self.error = [], [], None
        self.failures = [queue.SimpleQueue(), queue.SimpleQueue()]

    def wait(self, refs, num_returns):
        assert num_returns == len(refs)
        self.waits.append(refs)

    def get(self, refs):
        if isinstance(refs, tuple):  # A watcher asks each follower for its failure.
            index, *call = refs
            assert call == ["failure", "calls"]
            outcome = self.failures[index].get()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        self.asked.append(refs)
        if self.error is not None:
            raise self.error
        return [f"answer of {index}" for index, *_ in refs]


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def made(end=pytest.fail):
    return Followers([Actor(0), Actor(1)], end)


def test_commands_go_to_all_and_readings_to_those_with_a_share(ray):
    followers = made()
    assert len(followers) == 2
    calls = followers.command("push", 7, 3)
    assert calls == [(0, "push", None, 7, 3), (1, "push", None, 7, 3)]
    assert followers.answers(calls) == ["answer of 0", "answer of 1"]
    assert followers.read([{}, {4: None}], "form") == [
        (1, "read", None, "form", {4: None})
    ]


def test_calls_are_waited_for_and_their_errors_are_raised(ray):
    followers, calls = made(), [(0, "name", "calls", "a"), (1, "name", "calls", "b")]
    with followers.asked("name", [("a",), ("b",)]):
        assert (ray.waits, ray.asked) == ([], [])
    assert (ray.waits, ray.asked) == ([calls], [calls])
    with pytest.raises(KeyError), followers.asked("name", [("a",), ("b",)]):
        raise KeyError
    assert (ray.waits, ray.asked) == ([calls] * 2, [calls])
    cause = OSError("it is full")
    where = {"proctitle": "an actor", "pid": 1, "ip": "10.0.0.7"}
    ray.error = exceptions.RayTaskError("name", "", cause, **where)
    with pytest.raises(OSError, match="it is full") as raised:  # noqa: SIM117
        with followers.asked("name", [("a",), ("b",)]):
            pass
    assert raised.value is cause


def test_a_death_or_the_failure_of_one_ends_the_leader(ray, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    for outcome, says in (
        (exceptions.ActorDiedError(), "died, and this one ends with it"),
        ("OSError: it is full", "failed, OSError: it is full"),
    ):
        ended = queue.SimpleQueue()
        made(ended.put)
        ray.failures[1].put(outcome)
        assert ended.get(timeout=60) == f"a process of the server has {says}"


def test_a_failure_of_all_ends_nobody(ray, monkeypatch):
    ended = []
    followers = made(ended.append)
    monkeypatch.setattr(module, "PATIENCE", 60.0)
    for failures in ray.failures:
        failures.put("OSError: it is full")
    followers.failed("the leader, too")
    assert not ended
    alone = Followers([], ended.append)
    alone.failed("there is no other")
    assert not ended


# The leader.


def test_a_leader_tells_its_cause_before_it_ends(monkeypatch, capfd):
    exits, naps = [], []
    monkeypatch.setattr(leader, "os", types.SimpleNamespace(_exit=exits.append))
    monkeypatch.setattr(leader, "time", types.SimpleNamespace(sleep=naps.append))
    it = leader.Leader()
    it._end("no room")
    assert it.cause() == "no room"
    assert capfd.readouterr().err == "gradxform: no room\n"
    assert (exits, naps) == ([1], [0.5])


def test_a_leader_keeps_a_port_that_the_coordinator_may_share():
    it = leader.Leader()
    host, _, port = it.listen("127.0.0.1").partition(":")
    with contextlib.closing(it._reserved), socket.socket() as another:
        with pytest.raises(OSError, match="in use"):
            another.bind((host, int(port)))
        with socket.socket() as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, int(port)))


@pytest.fixture
def group(monkeypatch):
    """The transport of a leader, with followers that note their calls."""
    monkeypatch.setattr(wire, "register", lambda: None)
    core = of_one_process({"w": jnp.ones(2)}, gx.drop_stale(optax.sgd(1.0), 0))
    layouts = [types.SimpleNamespace(cuts=(None,) * len(core.version.leaves))]
    reader = Reader(core.version.leaves)
    process = types.SimpleNamespace(core=core, layouts=layouts, reader=reader)
    followers = mock.MagicMock()
    followers.__len__.return_value = 2
    return leader.GroupTransport(process, followers), followers


def messages():
    own = PushMessage(
        Payload(None, ({"w": np.ones(2, np.float32)}, {})), Payload(None, [])
    )
    return [own, "of 1", "of 2"]


def push(transport):
    with transport.prepared(messages(), {}) as prepared:
        return transport.core.commit(prepared, transport.core.version.global_step)


def test_a_push_is_prepared_by_all_and_then_one_command_runs_it(group):
    transport, followers = group
    for key in range(2):
        assert push(transport).global_step == key + 1
        assert followers.asked.call_args.args == (
            "prepare",
            [(key, "of 1"), (key, "of 2")],
        )
        assert followers.command.call_args.args == ("push", key, key)
        step = followers.command.call_args.args[2]
        assert type(step) is int  # Not an array of NumPy.
    followers.command.reset_mock()
    followers.asked.return_value.__exit__.side_effect = KeyError("not prepared")
    with pytest.raises(KeyError):
        push(transport)
    followers.command.assert_called_once_with("forget", 2)
    np.testing.assert_array_equal(transport.core.state()["params"]["w"], [-1, -1])


def test_a_step_that_fails_is_told_and_loses_the_parameters(group):
    transport, followers = group
    broken = mock.Mock(side_effect=MemoryError("no room"))
    prepare = transport.core.prepare
    transport.core.prepare = lambda *args: prepare(*args)._replace(step=broken)
    with pytest.raises(MemoryError):
        push(transport)
    told = "the leader of the server has failed, MemoryError: no room"
    followers.failed.assert_called_once_with(told)
    followers.command.assert_called_once_with("push", 0, 0)
    assert transport.core.stats().lost == "a step failed, MemoryError: no room"


def test_a_snapshot_is_written_if_each_process_has_its_copy(group):
    transport, followers = group
    assert transport.snapshot() is None
    followers.command.assert_not_called()
    push(transport)
    followers.command.return_value = "copied"
    for error in (None, MemoryError("no room")):
        followers.reset_mock()
        followers.answers.side_effect = error
        snapshot = transport.snapshot()
        assert snapshot.pushes == 1
        ((_, key), _) = followers.command.call_args
        with pytest.raises(MemoryError) if error else contextlib.nullcontext():
            snapshot.ready()
        followers.answers.assert_called_once_with("copied")
        assert followers.command.call_args_list == [
            mock.call("snapshot", key),
            mock.call("forget" if error else "write", key),
        ]
