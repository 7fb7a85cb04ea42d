"""A gradient under way that has become too late is given up and begun anew."""

import itertools
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines


def gradient(w, number):
    return jnp.float32(0), jnp.full_like(w, number)


def worker(duration):
    return engines.Worker(
        gradient, lambda number: (jnp.float32(number),), lambda number: duration
    )


def job(durations, pushes, max_staleness, tx=None, **more):
    workers = [worker(duration) for duration in durations]
    tx = gx.drop_stale(optax.sgd(1.0), np.inf) if tx is None else tx
    return engines.Job(
        jnp.zeros(2), tx, workers, pushes, max_staleness=max_staleness, **more
    )


def played(job):
    with engines.simulated(job) as run:
        return list(run.pushes), run.counts()


def test_a_late_worker_begins_again_at_the_step():
    """The second takes 2.5 seconds. Only one step is allowed, so it is never done."""
    pushes, counts = played(job([1.0, 2.5], 10, max_staleness=1))
    assert [(p.worker, p.number, p.time) for p in pushes] == [
        (0, n, n + 1.0) for n in range(10)
    ]
    # At 2 s, 4 s, 6 s, 8 s; at 10 s the run is over.
    assert counts.given_up == 4
    assert counts.accepted == counts.pushed == 10


def test_a_gradient_just_in_time_is_pushed():
    pushes, counts = played(job([1.0, 2.25], 12, max_staleness=2))
    late = [p for p in pushes if p.worker == 1]
    assert [(p.number, p.local_step, p.time) for p in late] == [
        (n, p.local_step, 2.25 * (n + 1)) for n, p in enumerate(late)
    ]
    assert len(late) == 3
    assert counts.given_up == 0


def test_a_schedule_of_the_global_step():
    """Before step 5 nothing may be late; from then on anything may be."""

    def limit(k):
        return jnp.where(k < 5, 0, jnp.inf)

    pushes, counts = played(job([1.0, 1.5], 9, limit))
    assert [p.worker for p in pushes[:5]] == [0] * 5
    assert counts.given_up == 4
    # It is begun anew for the last time at 4 s, so it is done at 5.5 s.
    assert next((p.number, p.time) for p in pushes if p.worker == 1) == (0, 5.5)


def test_a_minibatch_is_drawn_once():
    drawn = []
    stream = iter(range(100))

    def draw(number):
        drawn.append(number)
        return (jnp.float32(next(stream)),)

    fast, slow = worker(1.0), engines.Worker(gradient, draw, lambda number: 2.5)
    tx = gx.drop_stale(optax.sgd(1.0), np.inf)

    def limit(k):
        return jnp.where(k < 3, 1, jnp.inf)

    made = engines.Job(jnp.zeros(2), tx, [fast, slow], 9, max_staleness=limit)
    pushes, counts = played(made)
    assert counts.given_up == 1
    assert drawn == list(range(len(drawn)))
    assert [p.number for p in pushes if p.worker == 1] == [0, 1]


def test_gradients_that_never_come():
    pushes, counts = played(job([1.0, np.inf], 5, max_staleness=0))
    assert [p.worker for p in pushes] == [0] * 5
    assert counts.given_up == 4
    pushes, counts = played(job([np.inf, np.inf], 5, max_staleness=0))
    assert (pushes, counts.pushed) == ([], 0)


def test_pushes_that_make_no_step_stop_nobody():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 3)
    pushes, counts = played(job([1.0, 2.5], 8, 0, tx))
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
    with engines.simulated(made, checkpoint=tmp_path) as run:
        pushes = list(run.pushes)
    assert [p.number for p in pushes] == list(range(4, 10))
    counts = run.counts()
    assert counts.pushed == counts.accepted == 10
    assert counts.given_up > 0  # It counts those of this run.


def test_threads_give_up_between_pieces():
    """The first gradient reaches its first piece, and waits there until it is late."""
    begun, late, done, closed = threading.Event(), threading.Event(), [], []

    def slow(w, number):
        begun.set()
        assert late.wait(60)
        try:
            yield
        finally:
            closed.append(float(w[0]))
        done.append(float(w[0]))
        return jnp.float32(0), jnp.ones_like(w)

    def quick(w):
        assert begun.wait(60)
        return jnp.float32(0), jnp.ones_like(w)

    made = engines.Job(
        jnp.zeros(2),
        gx.drop_stale(optax.sgd(1.0), np.inf),
        [engines.Worker(quick), engines.Worker(slow, lambda number: (number,))],
        pushes=30,
        max_staleness=2,
    )
    with engines.threads(made) as run:
        first = [next(run.pushes) for _ in range(5)]
        late.set()
        rest = list(run.pushes)
    counts = run.counts()
    assert {push.worker for push in first} == {0}
    assert counts.given_up >= 1
    assert 0.0 not in done  # Those parameters were five steps old.
    assert closed[0] == 0.0
    assert counts.accepted == counts.pushed == len(first + rest) == 30


def test_late_gradients_are_not_pushed():
    """This gradient has no pieces; the engine looks before the push."""
    begun, late, anew = threading.Event(), threading.Event(), threading.Event()

    def slow(w):
        if begun.is_set():
            anew.set()
        begun.set()
        assert late.wait(60)
        return jnp.float32(0), jnp.ones_like(w)

    def quick(w):
        assert begun.wait(60)
        if w[0] <= -5:  # The slow one began at 0.
            late.set()
            assert anew.wait(60)
        return jnp.float32(0), jnp.ones_like(w)

    made = engines.Job(
        jnp.zeros(2),
        gx.drop_stale(optax.sgd(1.0), np.inf),
        [engines.Worker(quick), engines.Worker(slow)],
        pushes=30,
        max_staleness=2,
    )
    with engines.threads(made) as run:
        pushes = list(run.pushes)
    counts = run.counts()
    assert counts.given_up >= 1
    assert (1, 0) not in {(p.worker, p.local_step) for p in pushes}
    assert counts.accepted == counts.pushed == len(pushes) == 30


def test_a_number_that_is_given_up_is_not_left_out():
    tx = gx.drop_stale(optax.sgd(1.0), 0)  # It would drop a late push.
    made = job([0.0, 0.0, 0.0], 60, max_staleness=0, tx=tx)
    with engines.threads(made) as run:
        pushes = list(run.pushes)
    counts = run.counts()
    assert len(pushes) == counts.pushed == 60
    assert counts.accepted + counts.dropped == 60
    times = [p.time for p in pushes]
    assert times == sorted(times)
    assert times[0] >= 0
    for index in {p.worker for p in pushes}:
        numbers = [p.number for p in pushes if p.worker == index]
        assert numbers == list(range(len(numbers)))


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
    with pytest.raises(error, match="^" + message):
        played(job([1.0, 1.0], 4, value))


def test_a_generator_that_gives_no_pair():
    def nothing(w, number):
        yield

    made = job([1.0], 2, None)
    made = made._replace(workers=[made.workers[0]._replace(gradient=nothing)])
    with pytest.raises(TypeError, match=r"^gradient: it must give \(loss, grads\)"):
        played(made)
