"""A gradient under way that has become too late is given up and begun anew."""

import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from gradxform import engines
from tests.engines.jobs import (
    SGD,
    assert_in_order,
    by_worker,
    ended,
    fails,
    make_job,
    ones,
    worker,
)

LATE = gx.drop_stale(SGD, np.inf)


def job(durations, pushes, max_staleness, tx=LATE, **more):
    workers = [worker(seconds=each) for each in durations]
    return make_job(workers, pushes, tx, max_staleness=max_staleness, **more)


def played(job, **options):
    pushes, _, run = ended(engines.simulated, job, **options)
    return pushes, run.counts()


def limit(step, before=0):
    """Until that step nothing may be later, and from then on anything may be."""
    return lambda k: jnp.where(k < step, before, jnp.inf)


@pytest.mark.every
@pytest.mark.parametrize(
    ("durations", "pushes", "max_staleness", "given_up", "second"),
    [
        # Only one step is allowed, so it is never done. At 10 s the run is over.
        ([1.0, 2.5], 10, 1, 4, []),
        ([1.0, 2.25], 12, 2, 0, [2.25, 4.5, 6.75]),  # Just in time.
        # It is begun anew for the last time at 4 s.
        ([1.0, 1.5], 9, limit(5), 4, [5.5, 7.0]),
        ([1.0, np.inf], 5, 0, 4, []),
    ],
)
def test_a_late_worker_begins_again_at_the_step(
    durations, pushes, max_staleness, given_up, second
):
    got, counts = played(job(durations, pushes, max_staleness))
    assert counts.given_up == given_up
    assert counts.accepted == counts.pushed == pushes == len(got)
    assert_in_order(got)
    assert [p.time for p in got if p.worker == 1] == second
    first = [p.time for p in got if p.worker == 0]
    assert first == [n + 1.0 for n in range(pushes - len(second))]


def test_a_minibatch_is_drawn_once():
    drawn = []
    slow = worker(batch=lambda number: drawn.append(number) or (), seconds=2.5)
    made = make_job([worker(seconds=1.0), slow], 9, LATE, max_staleness=limit(3, 1))
    pushes, counts = played(made)
    assert counts.given_up == 1
    assert drawn == list(range(len(drawn)))
    assert by_worker(pushes)[1] == 2
    assert_in_order(pushes)


def test_gradients_that_never_come():
    pushes, counts = played(job([np.inf, np.inf], 5, 0))
    assert (pushes, counts.pushed) == ([], 0)


def test_pushes_that_make_no_step_stop_nobody():
    pushes, counts = played(job([1.0, 2.5], 8, 0, gx.conditional_accumulator(SGD, 3)))
    # At 2.5 s the first has pushed twice and the second once. Each third push is a
    # step.
    assert [p.worker for p in pushes[:3]] == [0, 0, 1]
    assert counts.given_up >= 1
    assert counts.dropped == 0


def test_a_run_that_goes_on_from_a_checkpoint_gives_up_as_before(tmp_path):
    made = job([1.0, 2.5], 10, max_staleness=1)
    with engines.simulated(made, checkpoint=tmp_path) as run:
        list(itertools.islice(run.pushes, 4))
        run.stop()
    pushes, counts = played(made, checkpoint=tmp_path)
    assert [p.number for p in pushes] == list(range(4, 10))
    assert counts.pushed == counts.accepted == 10
    assert counts.given_up > 0  # It counts those of this run.


@pytest.mark.parametrize("in_pieces", [True, False])
def test_threads_give_up_between_pieces_and_before_the_push(in_pieces):
    """The slow one waits in its first piece until it is late; then it begins anew."""
    begun, late, anew = threading.Event(), threading.Event(), threading.Event()
    done, closed = [], []

    def wait():
        if begun.is_set():
            anew.set()
        begun.set()
        assert late.wait(60)

    def pieces(w):
        wait()
        try:
            yield
        finally:
            closed.append(float(w))
        done.append(float(w))
        return ones(w)

    def whole(w):
        wait()
        return ones(w)

    def quick(w):
        assert begun.wait(60)
        if w <= -5:  # The slow one began at 0.
            late.set()
            assert anew.wait(60)
        return ones(w)

    slow = worker(pieces if in_pieces else whole)
    made = make_job([worker(quick), slow], 30, LATE, max_staleness=2)
    pushes, _, run = ended(engines.threads, made)
    counts = run.counts()
    assert counts.given_up >= 1
    assert (1, 0) not in {(p.worker, p.local_step) for p in pushes}
    assert 0.0 not in done  # Those parameters were five steps old.
    assert closed[:1] == [0.0] * in_pieces
    assert counts.accepted == counts.pushed == len(pushes) == 30


def test_a_number_that_is_given_up_is_not_left_out():
    # The gate would drop a late push.
    made = job([0.0, 0.0, 0.0], 60, 0, gx.drop_stale(SGD, 0))
    pushes, _, run = ended(engines.threads, made)
    counts = run.counts()
    assert len(pushes) == counts.pushed == counts.accepted + counts.dropped == 60
    times = [p.time for p in pushes]
    assert times == sorted(times)
    assert times[0] >= 0
    assert_in_order(pushes)


@pytest.mark.every
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, r"max_staleness must be in \[0, inf\], got -1"),
        (np.nan, ValueError, r"max_staleness must be in \[0, inf\], got nan"),
        ("3", TypeError, "max_staleness must be a real scalar"),
        (lambda k: -1, ValueError, r"max_staleness\(global_step\) must be in"),
        (lambda k: jnp.ones(2), TypeError, r"max_staleness\(global_step\) must be a"),
    ],
)
def test_bad_thresholds_are_errors(value, error, message):
    fails(engines.simulated, job([1.0, 1.0], 4, value), error, "^" + message)
