"""How runs end: what still counts, who is waited for, and who has nothing to do."""

import collections
import itertools
import json
import logging
import os
import pathlib
import queue
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform.engines import _pool


def ones(params, *batch):
    return jnp.sum(params), jnp.ones_like(params)


def make_job(workers, pushes=20, tx=None, required=None):
    tx = gx.drop_stale(optax.sgd(1.0), 10**6) if tx is None else tx
    return engines.Job(jnp.float32(0.0), tx, workers, pushes, required)


def list_all(engine, job, **options):
    with engine(job, **options) as run:
        return list(run.pushes)


def saved(folder):
    """The numbers of all pushes in the newest checkpoint, by worker."""
    found = (path for path in pathlib.Path(folder).iterdir() if path.name.isdigit())
    newest = max(found, key=lambda path: int(path.name))
    counters = json.loads((newest / "counters" / "metadata").read_text())
    answered = {worker: number + 1 for worker, number, *_ in counters["answers"]}
    assert sum(answered.values()) == int(newest.name)
    return answered


def threads_of(run):
    return [x for x in run.workers.values() if isinstance(x, threading.Thread)]


def assert_nothing_moves(run):
    """For a while no push arrives, so nobody computes."""
    before = run.server.stats()
    time.sleep(0.2)
    assert run.server.stats() == before


# A push that was answered but not given counts, and is saved.


def test_stop_ends_the_training(engine, tmp_path):
    with engine(
        make_job([engines.Worker(ones)] * 3, 10**6), checkpoint=tmp_path
    ) as run:
        for _ in itertools.islice(run.pushes, 50):
            pass
        threads = threads_of(run)
        assert len({*threads}) == (3 if engine is engines.threads else 0)
        assert all(thread.is_alive() for thread in threads)
        run.stop()
        assert list(run.pushes) == []
        counts, stats = run.counts(), run.server.stats()
        assert (stats.accepted, stats.dropped) == (counts.accepted, counts.dropped)
        assert_nothing_moves(run)
        assert run.counts() == counts
        assert run.server.state()["params"] == -counts.accepted
    assert not any(thread.is_alive() for thread in threads)
    assert counts.pushed <= 50 + 3  # Each worker finishes its gradient.
    assert 50 <= counts.pushed == counts.accepted == sum(saved(tmp_path).values())
    with engine(make_job([engines.Worker(ones)] * 3, 60), checkpoint=tmp_path) as run:
        assert len(list(run.pushes)) == 60 - counts.pushed


def test_a_loop_that_is_left_leaves_the_training(engine, tmp_path):
    workers = [engines.Worker(ones)] * 3
    with engine(make_job(workers, 10**6), checkpoint=tmp_path) as run:
        for push in run.pushes:
            if push.result.global_step == 50:
                break
        threads = threads_of(run)
        time.sleep(0.1)  # Each worker finishes its gradient.
        assert_nothing_moves(run)
        given = run.counts().pushed
        assert given <= run.server.stats().accepted <= given + len(workers)
        for _ in itertools.islice(run.pushes, 50):  # And the run goes on.
            pass
    assert not any(thread.is_alive() for thread in threads)
    counts = run.counts()
    assert counts.accepted == counts.pushed == sum(saved(tmp_path).values())
    assert run.server.stats().accepted == counts.accepted


def test_workers_do_not_run_ahead_of_a_slow_loop():
    begun = []

    def batch(number):
        begun.append(number)
        return ()

    with engines.threads(make_job([engines.Worker(ones, batch)], 10**6)) as run:
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

    with engines.threads(
        make_job([engines.Worker(slow)], 5), checkpoint=tmp_path
    ) as run:
        next(run.pushes)
        assert computing.wait(60)
        run.stop()
        assert list(run.pushes) == []
        stopped.set()
    assert saved(tmp_path) == {0: 1}
    assert run.counts()[:7] == (1, 1, 0, 0, 0, 0, 0)
    with engines.threads(
        make_job([engines.Worker(ones)], 5), checkpoint=tmp_path
    ) as run:
        assert [push.number for push in run.pushes] == [1, 2, 3, 4]


# After the context.


@pytest.mark.parametrize("given", [0, 3, 20])
def test_pushes_after_the_context_are_an_error(engine, given):
    with engine(make_job([engines.Worker(ones)] * 2)) as run:
        for _ in itertools.islice(run.pushes, given):
            pass
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"inside of the engine's context"):
            next(run.pushes)
    assert run.counts().pushed >= given


def test_the_end_of_the_context_wakes_callers_that_wait():
    heard, waits = [], threading.Event()

    def blocked(params):
        waits.set()
        return released.wait() and ones(params)

    def iterate(run):
        with pytest.raises(RuntimeError, match="inside of the engine's context"):
            next(run.pushes)
        heard.append(True)

    released = threading.Event()
    with engines.threads(make_job([engines.Worker(blocked)]), join_timeout=0.0) as run:
        thread = threading.Thread(target=iterate, args=(run,))
        thread.start()
        assert waits.wait(60)
    thread.join(60)
    released.set()
    assert heard == [True]


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


def blocking_job(blocked, pushes=10**6):
    return make_job([engines.Worker(ones), engines.Worker(blocked)], pushes)


@pytest.mark.parametrize("leave", ["stop", "break", "error", "sigterm"])
def test_a_worker_that_blocks_is_named_and_left_behind(
    leave, blocked, caplog, tmp_path
):
    def go():
        with engines.threads(
            blocking_job(blocked), checkpoint=tmp_path, join_timeout=0.2
        ) as run:
            for push in run.pushes:
                if push.result.global_step >= 20 and blocked.blocks.is_set():
                    if leave == "error":
                        raise ValueError("enough")
                    if leave == "sigterm":
                        os.kill(os.getpid(), signal.SIGTERM)
                    if leave == "break":
                        break
                    run.stop()

    with caplog.at_level(logging.WARNING, "gradxform"):
        if leave == "error":
            with pytest.raises(ValueError, match="enough"):
                go()
        elif leave == "sigterm":
            with pytest.raises(SystemExit, match="143"):
                go()
            assert caplog.messages[0].startswith("terminated: step ")
        else:
            go()
            assert sum(saved(tmp_path).values()) >= 20
    said = caplog.messages[-1]
    assert len(caplog.messages) == (2 if leave == "sigterm" else 1)
    assert said.startswith("worker 1: still busy after join_timeout=0.2 seconds")


def test_a_worker_that_blocks_does_not_keep_the_last_push(blocked):
    blocked.at_once = True
    with engines.threads(blocking_job(blocked, 5), join_timeout=0.0) as run:
        pushes = list(run.pushes)
    assert [push.worker for push in pushes] == [0] * 5
    assert run.counts()[:7] == (5, 5, 0, 0, 0, 0, 0)


def test_a_gradient_computed_twice_is_pushed_once():
    """The second is so slow that the first takes its place. Then both are done."""
    both = threading.Barrier(2, timeout=60)

    def slow(params):
        both.wait()
        return ones(params)

    job = make_job([engines.Worker(slow), engines.Worker(slow)], 1)
    with engines.threads(job) as run:
        assert len(list(run.pushes)) == 1
        assert run.counts()[:7] == (1, 1, 0, 0, 0, 0, 0)
    assert run.server.stats().accepted == 1


def test_no_worker_computes_for_a_quick_one(monkeypatch):
    # No gradient takes that long, not even on a busy machine.
    monkeypatch.setattr(_pool, "LOOK", 1000.0)
    begun = []

    def batch(number):
        begun.append(number)
        return ()

    workers = [engines.Worker(ones, batch) for _ in range(4)]
    assert len(list_all(engines.threads, make_job(workers, 6))) == len(begun) == 6


def test_a_server_takes_so_many_pushes_of_workers_and_no_more(tmp_path):
    job = make_job([engines.Worker(ones)], 4, optax.sgd(1.0))

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


@pytest.mark.parametrize(
    ("push_id", "error", "says"),
    [
        (("me", 0), TypeError, "worker must be an integer, got 'me'"),
        (((1, 2), 0), TypeError, r"worker must be an integer, got \(1, 2\)"),
        (((1, (2, 3)), 0), TypeError, "worker must be an integer"),
        ((None, 0), TypeError, "worker must be an integer, got None"),
        ((True, 0), TypeError, "worker must be an integer, got True"),
        ((1.0, 0), TypeError, "worker must be an integer, got 1.0"),
        ((-1, 0), ValueError, r"worker in push_id must be in \[0, inf\)"),
        ((7, 1), ValueError, "next push of worker 7 has the number 0"),
        ((7, -1), ValueError, "next push of worker 7 has the number 0"),
    ],
)
def test_a_push_that_a_run_could_not_count_is_refused(
    engine, push_id, error, says, tmp_path
):
    job = make_job([engines.Worker(ones)], 4, optax.sgd(1.0))
    with engine(job, checkpoint=tmp_path) as run:
        grads, seen = run.server.pull()
        with pytest.raises(error, match=says):
            run.server.push(jnp.ones_like(grads), seen, push_id=push_id)
        assert run.server.stats()[:2] == (0, 0)
        assert len(list(run.pushes)) == 4
    assert run.counts()[:3] == (4, 4, 0)
    assert saved(tmp_path) == {0: 4}
    # Any other server takes any name, and leaves out numbers.
    server = gx.ParameterServer(job.params, job.tx)
    if error is TypeError or push_id == (7, 1):
        assert server.push(jnp.ones_like(grads), 0, push_id=push_id).applied


@pytest.mark.parametrize(
    "push_ids",
    [
        [(7, 0), (7, 1)],
        [(np.int64(7), np.int32(0)), (np.uint8(7), np.int64(1))],
        [(7, jnp.int32(0)), (7, np.array(1))],
    ],
)
def test_the_pushes_of_a_caller_are_counted_and_saved(engine, push_ids, tmp_path):
    job = make_job([engines.Worker(ones)], 6, optax.sgd(1.0))
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
    assert run.counts().by_worker == {
        0: engines.WorkerCounts(4),
        7: engines.WorkerCounts(2),
    }
    assert saved(tmp_path) == {0: 4, 7: 2}


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_join_timeout_that_cannot_be_is_refused(value):
    with (
        pytest.raises(ValueError, match=r"^join_timeout must be"),
        engines.threads(make_job([engines.Worker(ones)]), join_timeout=value),
    ):
        pass


@pytest.mark.parametrize("value", [0, np.float32(60.0), float("inf")])
def test_any_other_join_timeout_will_do(value):
    with engines.threads(make_job([engines.Worker(ones)]), join_timeout=value) as run:
        assert len(list(run.pushes)) == 20


# Streams.


def stream_worker(*items):
    stream = iter([(np.float32(item),) for item in items])
    return engines.Worker(lambda p, x: (x, jnp.ones_like(p)), lambda _: next(stream))


def test_a_worker_whose_stream_ends_leaves(engine):
    workers = [stream_worker(1, 2), stream_worker(*range(10, 15)), stream_worker()]
    workers = [each._replace(duration=lambda _: 1e-3) for each in workers]
    with engine(make_job(workers, 100)) as run:
        pushes = list(itertools.islice(run.pushes, 6))
        assert 2 not in run.workers
        pushes += run.pushes
        assert not run.workers
    losses = {
        index: [push.loss for push in pushes if push.worker == index]
        for index in range(3)
    }
    assert losses == {0: [1, 2], 1: [*range(10, 15)], 2: []}
    assert run.counts()[:7] == (7, 7, 0, 0, 0, 0, 0)


def by_worker(pushes):
    """How many pushes each worker has made."""
    return collections.Counter(push.worker for push in pushes)


def test_too_few_streams_for_a_step_end_the_run(engine):
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    workers = [stream_worker(1, 2, 3), stream_worker(1)]
    with engine(make_job(workers, 30, tx, 2)) as run:
        pushes = list(run.pushes)
        assert run.server.state()["state"].global_step == 1
    # The other worker still pushes the gradient it had begun. Its step is never made.
    assert by_worker(pushes) == {0: 2, 1: 1}


def test_a_run_whose_streams_have_ended_goes_on_with_new_ones(engine, tmp_path):
    first = list_all(engine, make_job([stream_worker(1, 2)], 5), checkpoint=tmp_path)
    job = make_job([stream_worker(*range(3, 9))], 5)
    second = list_all(engine, job, checkpoint=tmp_path)
    assert [(p.number, p.loss) for p in first + second] == [
        *((number, number + 1) for number in range(5)),
    ]


def test_a_stream_may_end_only_in_batch(engine):
    stream = iter([1.0])
    worker = engines.Worker(lambda params: (next(stream), jnp.ones_like(params)))
    with pytest.raises(RuntimeError, match="a stream has ended, though not in batch"):
        list_all(engine, make_job([worker]))


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
    workers = [
        engines.Worker(ones, lambda _: next(stream)),
        engines.Worker(ones, second),
    ]
    with pytest.raises(ValueError, match="generator already executing") as raised:
        list_all(engines.threads, make_job(workers))
    (whose,) = raised.value.__notes__
    assert whose == "Raised by worker 1, for its gradient 0."


def test_a_lock_lets_workers_share_a_stream(engine):
    stream, lock = ((np.float32(x),) for x in range(30)), threading.Lock()

    def draw():
        with lock:
            return next(stream)

    make = lambda: engines.Worker(  # noqa: E731
        lambda params, x: (x, jnp.ones_like(params)), lambda _: draw()
    )
    pushes = list_all(engine, make_job([make(), make()], 100))
    assert sorted(push.loss for push in pushes) == [*range(30)]


# Nobody computes and everybody waits.


def test_a_step_that_needs_more_pushes_than_required_is_an_error(engine):
    tx = gx.conditional_accumulator(optax.sgd(1.0), 3)
    job = make_job([engines.Worker(ones)] * 2, 20, tx, 2)
    match = "^required=2: all 2 workers have pushed .* num_required"
    with engine(job) as run:
        assert [next(run.pushes).worker for _ in range(2)] in ([0, 1], [1, 0])
        with pytest.raises(ValueError, match=match):
            next(run.pushes)
    # With a third worker there are enough.
    job = job._replace(workers=[engines.Worker(ones)] * 3)
    assert len(list_all(engine, job)) == 20


# What the server is told.


def test_require_finite_ends_a_run_before_nan_has_done_anything(engine, tmp_path):
    def spoiled(params):
        loss, grads = ones(params)
        return loss, grads * jnp.where(params <= -3, jnp.nan, 1.0)

    job = make_job([engines.Worker(ones), engines.Worker(spoiled)], 100)
    with (
        pytest.raises(ValueError, match="grads must be finite") as raised,
        engine(job._replace(require_finite=True), checkpoint=tmp_path) as run,
    ):
        list(run.pushes)
    assert raised.value.__notes__[0].startswith("Raised by worker 1, for its gradient")
    with engine(job, checkpoint=tmp_path) as run:
        assert run.resumed == -run.server.state()["params"] >= 3
        list(run.pushes)
        assert np.isnan(run.server.state()["params"])


def test_apply_if_finite_lets_the_others_go_on(engine):
    spoiled = engines.Worker(lambda params: (0.0, params * jnp.nan))
    tx = gx.drop_stale(optax.apply_if_finite(optax.sgd(1.0), 10**6), 10**6)
    with engine(make_job([engines.Worker(ones), spoiled], 100, tx)) as run:
        pushes = list(run.pushes)
        params = run.server.state()["params"]
    assert params == -by_worker(pushes)[0] < 0
