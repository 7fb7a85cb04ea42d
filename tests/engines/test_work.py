"""One gradient of a worker, with a server and a clock that only take notes."""

import contextlib
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from gradxform._server.records import TakesNoMoreError
from gradxform.engines import _work
from tests.engines.jobs import worker


class Server:
    """Its parameters are [1, 2], of step 5; it has made two steps since."""

    def __init__(self, error=None):
        self.pulls, self.pushes, self.asked, self.error = [], [], 0, error

    def pull(self, rows, dtype):
        self.pulls.append((rows, dtype))
        return np.float32([1.0, 2.0]), 5

    def global_step(self):
        self.asked += 1
        return np.int32(7)

    def push(self, grads, local_step, **extra):
        if self.error is not None:
            raise self.error
        self.pushes.append((grads.tolist(), local_step, extra))
        return gx.PushResult(True, 2, 8)


@pytest.fixture
def clock(monkeypatch):
    """Each gradient takes 1.5 seconds, by this clock."""
    clock = types.SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now

    def gradient(params, *batch):
        clock.now += 1.5
        return sum(batch, np.float32(0.25)), np.float32([3.0, 4.0])

    clock.gradient = gradient
    monkeypatch.setattr(_work, "time", clock)
    return clock


def of(worker, server, limit=None):
    return _work.WorkerGradient(3, 6, worker, server, limit)


@pytest.mark.every
@pytest.mark.parametrize(
    ("seconds", "rest"),
    [
        (None, 0.0),
        (1.0, 0.0),
        (4.0, 2.5),
        (np.inf, threading.TIMEOUT_MAX - 101.5),  # None can be longer.
    ],
)
def test_a_gradient_is_pushed_after_its_duration(seconds, rest, clock):
    server, naps = Server(), []

    def sleep(seconds):
        naps.append(seconds)
        clock.now += min(seconds, 1e3)
        assert not server.pushes

    push = of(worker(clock.gradient, seconds=seconds), server).work(sleep)
    assert naps == [rest]
    assert push.computing == 1.5 + min(rest, 1e3)
    assert push[:5] == (3, 6, 5, 0.25, 5.0)
    assert push.result == (True, 2, 8)
    assert [type(x) for x in push[3:5]] == [float, float]
    assert server.pulls == [({}, None)]
    extra = {"worker": 3, "value": 0.25, "push_id": (3, 6)}
    assert server.pushes == [([3.0, 4.0], 5, extra)]
    assert server.asked == 0  # It has no limit.


def test_what_a_worker_says_of_its_minibatch(clock):
    server = Server()
    given = worker(
        clock.gradient,
        batch=lambda number: [number, 2.0],
        rows=lambda *batch: {"emb": batch},
        extra=lambda params, *batch: {"value": params.tolist(), "weight": batch},
        pull_dtype="float16",
    )
    push = of(given, server).push()
    assert push.loss == 8.25
    assert server.pulls == [({"emb": (6, 2.0)}, "float16")]
    extra = {"worker": 3, "value": [1.0, 2.0], "weight": (6, 2.0), "push_id": (3, 6)}
    assert server.pushes == [([3.0, 4.0], 5, extra)]


@pytest.mark.every
@pytest.mark.parametrize("most", [1.0, 2.0])
def test_a_gradient_of_more_steps_than_the_limit_is_given_up(most, clock):
    server, asked, slept = Server(), [], []

    def limit(global_step):
        asked.append(global_step)
        return most

    gradient = of(worker(clock.gradient), server, limit)
    late = most < 2
    assert gradient.is_over() == late
    assert (asked, type(asked[0])) == ([7], int)
    with pytest.raises(_work.GivenUpError) if late else contextlib.nullcontext():
        gradient.push(lambda: slept.append(len(asked)))
    assert (slept, asked) == ([1], [7, 7])  # It is asked once more when it is ready.
    assert len(server.pushes) == 1 - late


def test_pieces_end_where_it_is_too_late():
    done, ends = [], []

    def pieces():
        try:
            for number in range(3):
                done.append(number)
                yield
            return "a result"
        finally:
            ends.append(len(done))

    assert _work.in_pieces(pieces(), lambda: False) == "a result"
    assert (done, ends) == ([0, 1, 2], [3])
    with pytest.raises(_work.GivenUpError):
        _work.in_pieces(pieces(), lambda: len(done) == 5)
    assert (done, ends) == ([0, 1, 2, 0, 1], [3, 5])
    assert _work.in_pieces("whole", pytest.fail) == "whole"


def test_a_limit_is_a_number_or_a_schedule_that_is_asked_once_a_step():
    assert _work.limit_of(None) is None
    assert [_work.limit_of(jnp.int32(3))(step) for step in (0, 9)] == [3.0, 3.0]
    assert type(_work.limit_of(3)(0)) is float
    asked = []

    def schedule(step):
        asked.append((int(step), step.dtype))
        return step / 2

    limit, most = _work.limit_of(schedule), np.iinfo(np.int32).max
    with jax.transfer_guard("disallow"):
        found = [limit(step) for step in (4, 4, 5, most + 5)]
    assert found == [2.0, 2.0, 2.5, np.float32(most / 2)]
    assert [type(x) for x in found] == [float] * 4
    assert asked == [(step, jnp.int32) for step in (4, 5, most)]
    for bad in (-1, lambda step: -1.0):
        with pytest.raises(ValueError, match=r"^max_staleness.* must be in \[0, inf\]"):
            _work.limit_of(bad)(0)


def test_how_a_gradient_may_end_without_an_answer(clock):
    ended = worker(clock.gradient, batch=lambda number: next(iter(())))
    with pytest.raises(_work.StreamEndedError):
        of(ended, Server())
    server = Server(TakesNoMoreError())
    with pytest.raises(_work.RefusedError) as raised:
        of(worker(clock.gradient), server).push()
    assert raised.value.args == (5,)


def test_a_worker_with_a_device_computes_there(clock):
    device, seen = jax.devices()[1], []

    def gradient(params, x, name):
        seen.extend([params.devices(), x.devices(), jnp.zeros(1).devices(), name])
        return clock.gradient(params)

    batch = (np.ones(2), "a name")
    of(worker(gradient, lambda _: batch, device=device), Server()).push()
    assert seen == [{device}] * 3 + ["a name"]


@pytest.mark.every
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_gradients_of_another_dtype_are_cast_back(pieces, made):
    params = {"w": jnp.ones(2), "n": jnp.ones(2, jnp.float16)}

    def gradient(given):
        return 0.5, {"w": given["w"] * 3, "n": None}

    def in_pieces(given):
        yield
        return gradient(given)

    own = worker(in_pieces if pieces else gradient, pull_dtype=jnp.bfloat16)
    back = _work.cast_back(own, (lambda: params) if made else params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    loss, grads = _work.in_pieces(back.gradient(half), lambda: False)
    assert (loss, grads["n"], grads["w"].dtype) == (0.5, None, jnp.float32)
    assert grads["w"].tolist() == [3.0, 3.0]
    with pytest.raises(TypeError, match=r"^grads.*'w'"):
        _work.in_pieces(back.gradient({"w": jnp.ones(3)}), lambda: False)
    plain = worker(gradient)
    assert _work.cast_back(plain, params) is plain
