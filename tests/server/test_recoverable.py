"""When a server of a run reads and writes its checkpoints: the store only takes notes.

What a store does is in ``test_store``, and whole runs are in ``tests/engines``.
"""

from unittest import mock

import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._server.core import of_one_process
from gradxform._server.records import TakesNoMoreError
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.transport import Transport

PAIRS = gx.conditional_accumulator(optax.sgd(0.5), 2)


def made(tx=PAIRS, pushes=9, newest=None, resume=True):
    """A server, and its store."""
    core = of_one_process({"w": np.ones(2, np.float32)}, tx)
    server = RecoverableServer(Transport(core), None, pushes)
    server._store = store = mock.Mock(saved=None)
    store.open.return_value = "the run"
    store.newest.return_value = newest
    store.is_due.return_value = False
    store.checkpoint.resume, store.checkpoint.directory = resume, "runs/7"
    return server, store


def push(server, number=None):
    params, step = server.pull()
    more = {} if number is None else {"push_id": (0, number)}
    return server.push(params, step, **more)


def test_a_server_begins_once():
    server, store = made()
    status = server.begin("before")
    assert (status.notes, status.run, status.global_step) == (None, "the run", 0)
    push(server)
    assert server.begin() is status
    store.open.assert_called_once_with(server._core.specs.types, "before")
    assert server.status().tally.pushes == 1
    server.close()
    store.close.assert_called_once_with()
    assert server.begin() is status
    server.flush()  # It has no store now.
    store.flush.assert_not_called()
    alone, _ = made()
    alone._store = None
    assert alone.begin("before").run == "before"
    assert alone.save() is None
    alone.close()


def test_a_server_goes_on_from_the_newest_checkpoint():
    other, _ = made()
    other.begin()
    for number in range(3):
        push(other, number)
    snapshot = other._transport.snapshot()
    server, _ = made(newest=3)
    server._transport.read_newest = mock.Mock(return_value=(snapshot, ["a note"]))
    status = server.begin()
    server._transport.read_newest.assert_called_once_with(server._store)
    assert (status.notes, status.global_step, status.accumulated) == (["a note"], 1, 1)
    np.testing.assert_array_equal(server.state()["params"]["w"], [0.5, 0.5])
    assert push(server, 3).global_step == 2
    refused, _ = made(newest=3, resume=False)
    refused._transport.read_newest = pytest.fail
    says = "^checkpoint: runs/7 holds a run of 3 pushes: let resume be True, or give"
    with pytest.raises(ValueError, match=says):
        refused.begin()


def test_a_step_is_saved_if_it_is_due():
    server, store = made()
    server.begin()
    for due, steps in ((False, [1]), (True, [1, 2])):
        store.is_due.return_value = due
        push(server)
        push(server)
        assert [call.args[0] for call in store.is_due.call_args_list] == steps
        assert store.write_soon.call_count == due
    store.write_soon.assert_called_once_with(server._transport.snapshot)


def test_the_last_checkpoint_is_written_unless_it_is_there():
    server, store = made()
    assert server.save() is None  # It has not begun.
    server.begin()
    assert server.save() is None  # Nothing was pushed.
    store.write.assert_not_called()
    push(server)
    assert server.save() == 0
    (snapshot,) = store.write.call_args.args
    assert (snapshot.pushes, snapshot.counters["accumulated"]) == (1, 1)
    push(server)
    store.is_due.assert_not_called()  # No other one is due after the last.
    store.saved = 2
    assert server.save() == 1
    store.write.assert_called_once()
    assert store.flush.call_count == 3
    server.flush()
    assert store.flush.call_count == 4


def test_a_server_at_rest_takes_no_push_of_workers():
    server, _ = made(optax.sgd(0.5), pushes=2)
    server.begin()
    push(server, 0)
    server.note({0: 4})
    status = server.rest()
    assert (status.global_step, status.tally.pushes, status.ahead) == (1, 1, {0: 4})
    with pytest.raises(TakesNoMoreError):
        push(server, 1)
    assert push(server).global_step == 2
    assert server.global_step() == 2
    with pytest.raises(RuntimeError, match="restore: a state"):
        server.restore(server.state())
