"""How runs end: what still counts, who is waited for, and who has nothing to do."""

import itertools
import logging
import os
import queue
import signal
import threading
import time
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform._server.records import TakesNoMoreError
from gradxform.engines import _ending, _pool, _threads
from tests.engines.jobs import (
    SGD,
    by_worker,
    ended,
    fails,
    list_all,
    make_job,
    ones,
    saved,
    threads_of,
    worker,
)

OVER = "inside of the engine's context"


def assert_nothing_moves(run):
    """For a while no push arrives, so nobody computes."""
    before = run.server.stats()
    time.sleep(0.2)
    assert run.server.stats() == before


# A push that was answered but not given counts, and is saved.


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["stop", "break"])
def test_a_training_that_is_stopped_or_left_computes_no_more(engine, leave, tmp_path):
    with engine(make_job(3, 10**6), checkpoint=tmp_path) as run:
        for _ in itertools.islice(run.pushes, 50):
            pass
        threads = threads_of(run)
        assert len({*threads}) == (3 if engine is engines.threads else 0)
        assert all(thread.is_alive() for thread in threads)
        if leave == "stop":
            run.stop()
            assert list(run.pushes) == []
        else:
            time.sleep(0.1)  # Each worker finishes its gradient.
        assert_nothing_moves(run)
        counts, stats = run.counts(), run.server.stats()
        assert counts.pushed <= stats.accepted <= counts.pushed + 3 * (leave == "break")
        if leave == "break":  # The run goes on.
            assert len([*itertools.islice(run.pushes, 50)]) == 50
    counts, stats = run.counts(), run.server.stats()
    assert (stats.accepted, stats.dropped) == (counts.accepted, counts.dropped)
    assert not any(thread.is_alive() for thread in threads)
    given = 50 if leave == "stop" else 100
    assert given <= counts.pushed == counts.accepted == sum(saved(tmp_path).values())
    assert counts.pushed <= given + 3  # Each worker finishes its gradient.
    with engine(make_job(3, 120), checkpoint=tmp_path) as run:
        assert run.server.state()["params"] == -counts.accepted
        assert len(list(run.pushes)) == 120 - counts.pushed


@pytest.mark.every
def test_a_stopped_run_takes_no_more_pushes_of_workers(engine):
    with engine(make_job(2, 10**6)) as run:
        next(run.pushes)
        run.stop()
        assert [*itertools.islice(run.pushes, 50)] == []
        counts, (params, step) = run.counts(), run.server.pull()
        assert 1 <= counts.pushed <= 3
        with pytest.raises(TakesNoMoreError):
            run.server.push(params, step, push_id=(9, 0))
        run.server.push(params, step)  # From outside of the run.
        assert run.counts() == counts
        assert run.server.stats().accepted == counts.accepted + 1


def test_ctrl_c_ends_a_run_though_a_handler_raises_nothing():
    """Python drops the exception of a handler that interrupts a destructor."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        with engines.simulated(make_job(1, 50)) as outer:
            with engines.simulated(make_job(1, 50)) as inner:
                for run in (outer, inner):
                    next(run.pushes)
                signal.raise_signal(signal.SIGINT)
                with pytest.raises(KeyboardInterrupt):
                    list(inner.pushes)
            with pytest.raises(KeyboardInterrupt):
                list(outer.pushes)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def of_the_program(*_):
    """A program's own handler of a signal."""


@pytest.mark.every
@pytest.mark.parametrize(
    ("number", "handler", "replaced"),
    [
        (signal.SIGTERM, signal.SIG_DFL, True),
        (signal.SIGTERM, signal.SIG_IGN, False),
        (signal.SIGTERM, of_the_program, False),
        (signal.SIGINT, of_the_program, True),
        (signal.SIGINT, signal.SIG_IGN, False),
        (signal.SIGINT, signal.SIG_DFL, False),
    ],
)
def test_a_run_takes_a_signal_unless_the_program_wants_it(number, handler, replaced):
    before = signal.signal(number, handler)
    try:
        for changed in (False, True):
            run = mock.Mock()
            with _ending.ending(run, None):
                own = signal.getsignal(number)
                assert (own is handler) != replaced
                if changed:
                    signal.signal(number, print)
            assert signal.getsignal(number) is (print if changed else handler)
            run.rest.assert_called_once_with()
            run.save.assert_not_called()
    finally:
        signal.signal(number, before)


def test_workers_do_not_run_ahead_of_a_slow_loop():
    begun = []
    batch = lambda number: begun.append(number) or ()  # noqa: E731
    with engines.threads(make_job([worker(batch=batch)], 10**6)) as run:
        for given, _ in enumerate(itertools.islice(run.pushes, 5), 1):
            time.sleep(0.05)
            assert len(begun) <= given + 1


def test_a_gradient_under_way_is_not_pushed_after_stop(tmp_path):
    """It is computed again, under its own number, when the run goes on."""
    stopped, computing = threading.Event(), threading.Event()

    def slow(params):
        if params <= -1:
            computing.set()
            stopped.wait()
        return ones(params)

    with engines.threads(make_job([worker(slow)], 5), checkpoint=tmp_path) as run:
        next(run.pushes)
        assert computing.wait(60)
        run.stop()
        assert list(run.pushes) == []
        stopped.set()
    assert saved(tmp_path) == {0: 1}
    assert run.counts()[:7] == (1, 1, 0, 0, 0, 0, 0)
    rest = list_all(engines.threads, make_job(1, 5), checkpoint=tmp_path)
    assert [push.number for push in rest] == [1, 2, 3, 4]


# After the context.


@pytest.mark.parametrize("given", [0, 3, 20])
def test_pushes_after_the_context_are_an_error(engine, given):
    with engine(make_job(2)) as run:
        for _ in itertools.islice(run.pushes, given):
            pass
    for _ in range(2):
        with pytest.raises(RuntimeError, match=OVER):
            next(run.pushes)
    assert run.counts().pushed >= given


def test_the_end_of_the_context_wakes_callers_that_wait():
    heard, waits, released = [], threading.Event(), threading.Event()

    def blocked(params):
        waits.set()
        return released.wait() and ones(params)

    def iterate(run):
        with pytest.raises(RuntimeError, match=OVER):
            next(run.pushes)
        heard.append(True)

    with engines.threads(make_job([worker(blocked)]), join_timeout=0.0) as run:
        thread = threading.Thread(target=iterate, args=(run,))
        thread.start()
        assert waits.wait(60)
    thread.join(60)
    released.set()
    assert heard == [True]


def test_one_thread_alone_reads_the_pushes():
    begun, going, done = threading.Event(), threading.Event(), []

    def gradient(params):
        begun.set()
        going.wait()
        return ones(params)

    with engines.threads(make_job([worker(gradient)])) as run:
        reader = threading.Thread(target=lambda: done.extend(run.pushes))
        reader.start()
        begun.wait()
        with pytest.raises(RuntimeError, match="pushes: another thread or a signal"):
            next(run.pushes)
        going.set()
        reader.join()
        assert len(done) == 20
        assert list(run.pushes) == []


def test_a_run_that_waits_for_a_push_can_be_stopped_by_another_thread():
    with engines.threads(make_job([worker(seconds=3600.0)])) as run:
        threading.Timer(0.1, run.stop).start()
        assert list(run.pushes) == []


# Workers that block.


@pytest.fixture
def blocked():
    """A gradient that does not come before the test is over."""
    waits = queue.SimpleQueue()

    def gradient(params):
        if params <= -3 or gradient.at_once:
            gradient.blocks.set()
            waits.get()
        return ones(params)

    gradient.at_once, gradient.blocks = False, threading.Event()
    yield gradient
    for _ in range(10):
        waits.put(None)
    for thread in threading.enumerate():
        if thread.name.startswith("worker-"):
            thread.join()


def enough():
    raise ValueError("enough")


LEAVES = {  # What ends the run, and with which error.
    "stop": (lambda run: run.stop(), None),
    "break": (None, None),
    "error": (lambda run: enough(), "enough"),
    "sigterm": (lambda run: os.kill(os.getpid(), signal.SIGTERM), "143"),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_a_worker_that_blocks_is_named_and_left_behind(
    leave, blocked, caplog, tmp_path
):
    act, error = LEAVES[leave]
    job = make_job([worker(), worker(blocked)], 10**6)
    caplog.set_level(logging.WARNING, "gradxform")

    def go():
        with engines.threads(job, checkpoint=tmp_path, join_timeout=0.2) as run:
            for push in run.pushes:
                if push.result.global_step >= 20 and blocked.blocks.is_set():
                    if act is None:
                        break
                    act(run)

    if error:
        with pytest.raises((ValueError, SystemExit), match=error):
            go()
    else:
        go()
    assert sum(saved(tmp_path).values()) >= 20
    *before, said = caplog.messages
    assert [x.startswith("terminated: step ") for x in before] == [True] * (
        leave == "sigterm"
    )
    assert said.startswith("worker 1: still busy after join_timeout=0.2 seconds")


class Thread:
    """It ends after so many seconds, by a clock that only ``join`` moves."""

    def __init__(self, clock, ends, ident=1):
        self._clock, self._ends, self.ident, self.waits = clock, ends, ident, []

    def join(self, timeout):
        self.waits.append(timeout)
        self._clock.now = max(
            self._clock.now, min(self._ends, self._clock.now + timeout)
        )

    def is_alive(self):
        return self._ends > self._clock.now


@pytest.mark.every
@pytest.mark.parametrize(
    ("join_timeout", "error", "waits", "left"),
    [
        (10, None, (10, 7, 0), "after join_timeout=10 seconds"),
        (2.5, None, (2.5, 0, 0), "after join_timeout=2.5 seconds"),
        (10, KeyboardInterrupt(), (0.5, 0, 0), "0.5 seconds after Ctrl-C"),
        (0.25, KeyboardInterrupt(), (0.25, 0, 0), "after join_timeout=0.25 seconds"),
        (np.inf, None, (threading.TIMEOUT_MAX / 2,), None),
    ],
)
def test_all_threads_have_the_join_timeout_together(
    join_timeout, error, waits, left, monkeypatch, caplog
):
    clock = types.SimpleNamespace(now=1024.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(_threads, "time", clock)
    run = _threads._Threads(make_job(), join_timeout)
    run.server, commands = mock.Mock(), queue.SimpleQueue()
    run._commands[0], run._last_word = commands, error
    ends = [1027.0, 1e5, 1e5][: len(waits)]
    threads = [Thread(clock, each) for each in ends]
    never = Thread(clock, -1.0, ident=None)  # An interrupt came before its start.
    run.workers = dict(enumerate([*threads, never]))
    run.close()
    assert [thread.waits for thread in threads] == [[wait] for wait in waits]
    assert not never.waits
    assert commands.get_nowait() is None
    assert run._halt.is_set()
    run.server.close.assert_called_once_with()
    with pytest.raises(RuntimeError, match=OVER):
        _ = run.pushes
    names = "1, 2" if join_timeout == 10 and not error else "0, 1, 2"
    told = f"worker {names}: still busy {left}, so left behind"
    assert caplog.messages == [told] * (left is not None)


def test_a_worker_that_blocks_does_not_keep_the_last_push(blocked):
    blocked.at_once = True
    job = make_job([worker(), worker(blocked)], 5)
    pushes, _, run = ended(engines.threads, job, join_timeout=0.0)
    assert by_worker(pushes) == {0: 5}
    assert run.counts()[:7] == (5, 5, 0, 0, 0, 0, 0)


def test_ctrl_c_does_not_wait_for_a_worker_that_is_stuck(blocked, caplog):
    blocked.at_once = True
    before = time.monotonic()

    def interrupt():
        job = make_job([worker(blocked)], 9)
        with engines.threads(job, join_timeout=60.0) as run:
            run._hand_out()
            assert blocked.blocks.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert time.monotonic() - before < 50
    (said,) = caplog.messages
    assert said.startswith("worker 0: still busy 0.5 seconds after Ctrl-C")


def test_a_gradient_computed_twice_is_pushed_once():
    """The second is so slow that the first takes its place. Then both are done."""
    both = threading.Barrier(2, timeout=60)
    slow = worker(lambda params: (both.wait(), ones(params))[1])
    pushes, _, run = ended(engines.threads, make_job([slow, slow], 1))
    assert len(pushes) == 1
    assert run.counts()[:7] == (1, 1, 0, 0, 0, 0, 0)
    assert run.server.stats().accepted == 1


def test_no_worker_computes_for_a_quick_one(monkeypatch):
    # No gradient takes that long, not even on a busy machine.
    monkeypatch.setattr(_pool, "LOOK", 1000.0)
    begun = []
    workers = [worker(batch=lambda n: begun.append(n) or ()) for _ in range(4)]
    assert len(list_all(engines.threads, make_job(workers, 6))) == len(begun) == 6


# Pushes of a caller.


@pytest.mark.slow
def test_a_server_takes_so_many_pushes_of_workers_and_no_more(tmp_path):
    job = make_job(1, 4, SGD)

    def push(run, *push_id):
        grads, seen = run.server.pull()
        return run.server.push(jnp.ones_like(grads), seen, push_id=push_id).global_step

    with engines.simulated(job, checkpoint=tmp_path) as run:
        assert [push(run, 0, 0), push(run, 1, 0), push(run, 0, 1)] == [1, 2, 3]
    with engines.simulated(job, checkpoint=tmp_path) as run:
        assert [push(run, 1, 0), push(run, 1, 1)] == [2, 4]  # 2 from memory.
        with pytest.raises(RuntimeError, match="takes no more pushes"):
            push(run, 0, 2)
        assert push(run, 1, 1) == 4
    assert run.counts()[:7] == (4, 4, 0, 0, 0, 0, 0)
    assert saved(tmp_path) == {0: 2, 1: 2}


NO_INTEGER, NEXT = "worker must be an integer", "next push of worker 7 has the number 0"


@pytest.mark.every
def test_a_push_that_a_run_could_not_count_is_refused(engine, tmp_path):
    job = make_job(1, 4, SGD)
    with engine(job, checkpoint=tmp_path) as run:
        grads, seen = run.server.pull()
        for push_id, error, says in (
            (("me", 0), TypeError, f"{NO_INTEGER}, got 'me'"),
            (((1, 2), 0), TypeError, rf"{NO_INTEGER}, got \(1, 2\)"),
            (((1, (2, 3)), 0), TypeError, NO_INTEGER),
            ((None, 0), TypeError, f"{NO_INTEGER}, got None"),
            ((True, 0), TypeError, f"{NO_INTEGER}, got True"),
            ((1.0, 0), TypeError, f"{NO_INTEGER}, got 1.0"),
            ((-1, 0), ValueError, r"worker in push_id must be in \[0, inf\)"),
            ((7, 1), ValueError, NEXT),
            ((7, -1), ValueError, NEXT),
        ):
            with pytest.raises(error, match=says):
                run.server.push(jnp.ones_like(grads), seen, push_id=push_id)
            # Any other server takes any name, and leaves out numbers.
            if error is TypeError or push_id == (7, 1):
                server = gx.ParameterServer(job.params, job.tx)
                assert server.push(jnp.ones_like(grads), 0, push_id=push_id).applied
        assert run.server.stats()[:2] == (0, 0)
        assert len(list(run.pushes)) == 4
    assert run.counts()[:3] == (4, 4, 0)
    assert saved(tmp_path) == {0: 4}


@pytest.mark.parametrize(
    "push_ids",
    [
        [(7, 0), (7, 1)],
        [(np.int64(7), np.int32(0)), (np.uint8(7), np.int64(1))],
        [(7, jnp.int32(0)), (7, np.array(1))],
    ],
)
def test_the_pushes_of_a_caller_are_counted_and_saved(engine, push_ids, tmp_path):
    job = make_job(1, 6, SGD)
    with engine(job, checkpoint=tmp_path) as run:
        for push_id in push_ids:
            grads, seen = run.server.pull()
            first = run.server.push(jnp.ones_like(grads), seen, push_id=push_id)
            again = run.server.push(jnp.ones_like(grads), seen, push_id=push_id)
            assert again == first
    assert saved(tmp_path) == {7: 2}
    with engine(job, checkpoint=tmp_path) as run:
        assert run.resumed == 2
        with pytest.raises(ValueError, match="next push of worker 7 has the number 2"):
            run.server.push(jnp.ones_like(grads), 2, push_id=(7, 3))
        assert len(list(run.pushes)) == 4
    assert run.counts()[:3] == (6, 6, 0)
    shares = {0: engines.WorkerCounts(4), 7: engines.WorkerCounts(2)}
    assert run.counts().by_worker == shares
    assert saved(tmp_path) == {0: 4, 7: 2}


@pytest.mark.every
@pytest.mark.parametrize("value", [-1.0, float("nan"), 0, np.float32(60), float("inf")])
def test_a_join_timeout_is_no_negative_number(value):
    if value >= 0:
        pushes = list_all(engines.threads, make_job(), join_timeout=value)
        assert len(pushes) == 20
    else:
        match = r"^join_timeout must be"
        fails(engines.threads, make_job(), ValueError, match, join_timeout=value)


# Streams.


def stream_worker(*items):
    stream = iter([(np.float32(item),) for item in items])
    return drawing(lambda: next(stream))


def drawing(draw):
    """A worker whose losses are what it draws."""
    return worker(lambda p, x: (x, jnp.ones_like(p)), lambda _: draw(), 1e-3)


def test_a_worker_whose_stream_ends_leaves(engine):
    workers = [stream_worker(1, 2), stream_worker(*range(10, 15)), stream_worker()]
    with engine(make_job(workers, 100)) as run:
        pushes = list(itertools.islice(run.pushes, 6))
        assert 2 not in run.workers
        pushes += run.pushes
        assert not run.workers
    losses = {i: [push.loss for push in pushes if push.worker == i] for i in range(3)}
    assert losses == {0: [1, 2], 1: [*range(10, 15)], 2: []}
    assert run.counts()[:7] == (7, 7, 0, 0, 0, 0, 0)


def test_too_few_streams_for_a_step_end_the_run(engine):
    workers = [stream_worker(1, 2, 3), stream_worker(1)]
    pushes, state, _ = ended(engine, make_job(workers, 30, required=2))
    assert state["state"].global_step == 1
    # The other worker still pushes the gradient it had begun. Its step is never made.
    assert by_worker(pushes) == {0: 2, 1: 1}


def test_a_run_whose_streams_have_ended_goes_on_with_new_ones(engine, tmp_path):
    pushes = []
    for items in ((1, 2), range(3, 9)):
        job = make_job([stream_worker(*items)], 5)
        pushes += list_all(engine, job, checkpoint=tmp_path)
    assert [(p.number, p.loss) for p in pushes] == [(n, n + 1) for n in range(5)]


def test_a_stream_may_end_only_in_batch(engine):
    stream = iter([1.0])
    job = make_job([worker(lambda params: (next(stream), jnp.ones_like(params)))])
    fails(engine, job, RuntimeError, "a stream has ended, though not in batch")


def test_two_workers_that_draw_from_one_generator_at_once_are_told():
    inside, tried = threading.Event(), threading.Event()

    def draw():
        inside.set()
        assert tried.wait(60)
        yield ()

    def second(number):
        assert inside.wait(60)
        try:
            return next(stream)
        finally:
            tried.set()

    stream = draw()
    job = make_job([worker(batch=lambda _: next(stream)), worker(batch=second)])
    error, _ = fails(engines.threads, job, ValueError, "generator already executing")
    assert error.__notes__ == ["Raised by worker 1, for its gradient 0."]


def test_a_lock_lets_workers_share_a_stream(engine):
    stream, lock = ((np.float32(x),) for x in range(30)), threading.Lock()

    def draw():
        with lock:
            return next(stream)

    pushes = list_all(engine, make_job([drawing(draw), drawing(draw)], 100))
    assert sorted(push.loss for push in pushes) == [*range(30)]


# Nobody computes and everybody waits.


@pytest.mark.slow
def test_a_step_that_needs_more_pushes_than_required_is_an_error(engine):
    job = make_job(2, 20, gx.conditional_accumulator(SGD, 3), 2)
    match = "^required=2: all 2 workers have pushed .* num_required"
    with engine(job) as run:
        assert [next(run.pushes).worker for _ in range(2)] in ([0, 1], [1, 0])
        with pytest.raises(ValueError, match=match):
            next(run.pushes)
    # With a third worker there are enough.
    assert len(list_all(engine, job._replace(workers=[worker()] * 3))) == 20


# What the server is told.


def test_require_finite_ends_a_run_before_nan_has_done_anything(engine, tmp_path):
    def spoiled(params):
        loss, grads = ones(params)
        return loss, grads * jnp.where(params <= -3, jnp.nan, 1.0)

    job = make_job([worker(), worker(spoiled)], 100)
    finite, match = job._replace(require_finite=True), "grads must be finite"
    error, _ = fails(engine, finite, ValueError, match, checkpoint=tmp_path)
    assert error.__notes__[0].startswith("Raised by worker 1, for its gradient")
    with engine(job, checkpoint=tmp_path) as run:
        assert run.resumed == -run.server.state()["params"] >= 3
        list(run.pushes)
        assert np.isnan(run.server.state()["params"])


@pytest.mark.slow
def test_apply_if_finite_lets_the_others_go_on(engine):
    spoiled = worker(lambda params: (0.0, params * jnp.nan))
    tx = gx.drop_stale(optax.apply_if_finite(SGD, 10**6), 10**6)
    pushes, state, _ = ended(engine, make_job([worker(), spoiled], 100, tx))
    assert state["params"] == -by_worker(pushes)[0] < 0
