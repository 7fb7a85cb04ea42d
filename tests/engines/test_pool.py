"""Who gets which gradient, and what becomes of its outcome: without a server.

The pool is that of every engine. Here nobody computes: the test gives the outcomes.
"""

import contextlib
from unittest import mock

import pytest

import gradxform as gx
from gradxform import engines
from gradxform._server.records import GlobalStep, ServerStatus, Tally
from gradxform.engines import _pool, _threads, _work
from tests.engines.jobs import make_job, worker


class Pool(_pool.WorkerPool):
    """It notes which gradients it starts, and whom it lets go."""

    def __init__(self, job):
        super().__init__(job)
        self.now, self.workers, self.started, self.dismissed = 0.0, {}, [], []
        self.wakes = 0

    def _clock(self):
        return self.now

    def _start(self, index, worker, number):
        self.started.append((index, number))
        self.workers[index] = "a thread"
        return "under way"

    def _dismiss(self, index):
        self.dismissed.append(index)
        del self.workers[index]

    def _wake(self):
        self.wakes += 1

    def hand_out(self):
        """The gradients that it starts now."""
        self.started.clear()
        assert self._hand_out()
        return self.started


def begun(workers, pushes, **more):
    pool, server = Pool(make_job(workers, pushes, **more)), mock.Mock()
    server.begin.return_value = ServerStatus("now", 0, Tally())
    server.status.return_value = ServerStatus("now", 0, Tally())
    pool.begin(server)
    return pool, server


def push(index, number, step):
    result = gx.PushResult(True, 0, step + 1)
    return engines.Push(index, number, GlobalStep(step, "now"), 0.5, 1.0, result)


def test_gradients_that_take_far_too_long_are_made_by_others():
    pool, server = begun(3, 5)
    assert pool.hand_out() == [(0, 0), (1, 0), (2, 0)]
    assert pool.hand_out() == []
    for index, now in ((0, 2.0), (1, 3.0)):  # They have taken so long.
        pool.now = now
        taken = pool._take(index, push(index, 0, index))
        assert (taken.time, taken.started, taken.waited) == (now, 0.0, 0.0)
        assert pool.hand_out() == [(index, 1)]
    pool.now = 4.0
    assert pool._take(0, push(0, 1, 2)).started == 2.0
    assert pool.hand_out() == []  # Three pushes are there, and two are expected.
    pool.now = 6.5  # Twice the slowest, and half a second, after the beginning of 2.
    assert pool.hand_out() == [(0, 2)]
    assert pool._take(0, push(0, 2, 3)).waited == 2.5
    pool.now = 9.5  # The same is true of 1 now, which began at 3.
    assert pool.hand_out() == [(0, 3)]
    assert [*pool._busy] == [2, 1, 0]
    server.status.assert_not_called()
    server.note.assert_not_called()
    assert pool.counts().under_way == 3


def test_who_leaves_is_let_go_after_its_push():
    pool, _ = begun(2, 9)
    pool.hand_out()
    pool.remove(1)
    assert (pool.hand_out(), pool.dismissed) == ([], [])
    pool._take(1, push(1, 0, 0))
    assert (pool.hand_out(), pool.dismissed) == ([], [1])
    assert pool.add(worker()) == 2
    assert pool.hand_out() == [(2, 0)]
    with pytest.raises(ValueError, match=r"^index: there is no worker 1\."):
        pool.remove(1)
    pool.remove(0)
    with pytest.raises(ValueError, match="index: removing worker 2 would leave fewer"):
        pool.remove(2)


def test_a_clock_that_is_ahead_is_noted_once():
    pool, server = begun(1, 9)
    for step in range(2):
        assert pool.hand_out() == [(0, step)]
        pool._take(0, push(0, step, step))
    assert pool.add(worker()) == 1
    for _ in range(2):
        pool.hand_out()
    server.note.assert_called_once_with({1: 2})


def test_what_a_gradient_without_an_answer_leaves_behind():
    pool, server = begun(4, 9)
    pool.hand_out()
    assert pool._take(0, _work.GivenUpError()) is None
    assert pool._take(1, _work.StreamEndedError()) is None
    assert pool._take(2, _work.RefusedError(GlobalStep(0, "before"))) is None
    server.status.assert_not_called()
    assert pool._take(3, _work.ServerDiedError()) is None
    server.status.assert_called_once_with()
    counts = pool.counts()
    assert (counts.given_up, counts.unanswered, counts.under_way) == (1, 3, 0)
    assert sorted(pool.hand_out()) == [(0, 0), (2, 0), (3, 0)]  # 1 has no more.
    assert pool.dismissed == [1]
    pool._take(2, _work.RefusedError(GlobalStep(0, "now")))  # It takes no more.
    assert pool.hand_out() == []
    pool._take(0, push(0, 0, 0))
    server.status.assert_called_once_with()
    pool._take(3, push(3, 0, 1))  # Perhaps the first one has acted.
    assert server.status.call_count == 2


def test_what_changes_a_run_ends_its_wait():
    pool, _ = begun(2, 9)
    changes = [
        lambda: pool.add(worker()),
        lambda: pool.remove(0),
        pool.stop,
        pool.close,
    ]
    for wakes, change in enumerate(changes, 1):
        change()
        assert pool.wakes == wakes
    threads = _threads._Threads(make_job(), 1.0)
    threads.stop()
    assert threads._arrived.get_nowait() is None


@pytest.mark.every
@pytest.mark.parametrize(("limit", "drawn"), [(2, [0, 1, 0]), (None, [0, 0, 1, 0])])
def test_the_last_minibatch_is_kept_if_it_may_be_needed_again(limit, drawn):
    asked = []
    given = worker(batch=lambda number: asked.append(number) or ())
    pool, _ = begun([given], 9, max_staleness=limit)
    for number in (0, 0, 1, 0):
        assert pool._members[0].batch(number) == ()
    assert asked == drawn


@pytest.mark.every
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("x"), "x"),
        (StopIteration(), "a stream has ended, though not in batch"),
    ],
)
def test_an_error_of_a_worker_is_raised_with_its_number(error, says):
    pool, _ = begun(2, 9)
    pool.hand_out()
    kind = KeyError if isinstance(error, KeyError) else RuntimeError
    with pytest.raises(kind, match=says) as raised:
        pool._take(1, error)
    assert raised.value.__notes__ == ["Raised by worker 1, for its gradient 0."]
    assert (raised.value is error) == (kind is KeyError)
    assert pool.counts().unanswered == 1


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "ends"),
    [
        (lambda pool: pool._busy.update({0: "under way"}), None),
        (lambda pool: pool._members.clear(), _pool.Stopped),
        (lambda pool: pool._refused.add(0), _pool.Stopped),
        (lambda pool: pool._free.append(0), "^pace: it lets none of the 1 free"),
        (lambda pool: None, "^required=2: all 2 workers have pushed"),
    ],
)
def test_a_run_in_which_nobody_computes_ends(change, ends):
    pool, _ = begun(2, 9, required=2)
    change(pool)
    if isinstance(ends, str):
        expected = pytest.raises(ValueError, match=ends)
    else:
        expected = pytest.raises(ends) if ends else contextlib.nullcontext()
    with expected:
        pool._check_somebody_works()
