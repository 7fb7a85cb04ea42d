"""Deaths, hangs and ends at the wrong moment: a run goes on as if they had not been."""

import threading
import time

import pytest

from gradxform import engines
from gradxform.engines import _pacing, _simulated
from gradxform.engines._work import ServerDiedError
from tests.engines import test_pacing
from tests.engines.test_pacing import gradient


def make_job(durations, pushes, batch=1, **more):
    """One worker for each duration; a step takes ``batch`` pushes."""
    workers = len(durations)
    seconds = lambda worker, number: durations[worker]  # noqa: E731
    return test_pacing.make_job(workers, seconds, pushes, batch, **more)


def dies_after_its_push(monkeypatch, when):
    """The process of a worker dies once, between its push and the answer."""
    push, dead = _simulated.Gradient.push, []

    def push_and_die(self):
        done = push(self)
        if (done.worker, done.number) == when and not dead:
            dead.append(done)
            raise ServerDiedError
        return done

    monkeypatch.setattr(_simulated.Gradient, "push", push_and_die)
    return dead


@pytest.mark.parametrize("worker", range(3))
def test_a_repeated_push_waits_for_the_step_of_the_first_one(worker, monkeypatch):
    """Worker 2 makes the step. If it dies then, its push comes again one step later."""
    dead = dies_after_its_push(monkeypatch, (worker, 1))
    job = make_job([1.0, 1.25, 1.5], 12, 3, required=3)
    with engines.simulated(job) as run:
        pushes = [(push.worker, push.number) for push in run.pushes]
        assert run.server.stats().global_step == 4
    assert dead
    assert sorted(pushes) == [(w, n) for w in range(3) for n in range(4)]


@pytest.mark.parametrize("when", [(w, n) for w in range(2) for n in range(4)])
def test_a_push_whose_worker_died_counts_in_the_sum(when, monkeypatch):
    """Others may not begin as if the server had not got it."""
    dead = dies_after_its_push(monkeypatch, when)
    rule, server = engines.bounded_staleness(1, 2), []

    def exact(progress):
        if server:  # Nothing is on its way on a virtual clock.
            status = server[0].status()
            assert progress.global_step == status.global_step
            assert progress.accumulated == status.accumulated
        return rule(progress)

    durations = [1.0, 1.0, 1.0, 1.0, 7.0]
    with engines.simulated(make_job(durations, 40, 2, pace=exact)) as run:
        server.append(run.server)
        pushes = list(run.pushes)
    assert dead
    assert len({(push.worker, push.number) for push in pushes}) == 40
    assert max(push.result.staleness for push in pushes) <= 1


def test_an_ended_stream_is_not_in_the_way_in_the_same_round():
    """The others are asked again at once, without its clock and its gradient."""
    stream = iter([(), ()])
    job = make_job([1.0, 1.0], 20, pace=engines.stale_synchronous(0))
    ends = engines.Worker(gradient, lambda _: next(stream), lambda _: 2.0)
    with engines.simulated(job._replace(workers=[ends, *job.workers])) as run:
        assert len(list(run.pushes)) == 20
    # All may have a stream, and all may end in one round: that is no error either.
    streams = [iter([()] * n) for n in (2, 3, 3)]
    workers = [
        engines.Worker(gradient, lambda _, each=each: next(each)) for each in streams
    ]
    job = job._replace(workers=workers, pace=lambda p: not p.local_steps)
    with engines.simulated(job) as run:
        assert len(list(run.pushes)) == 8


def test_a_resume_keeps_the_clock_of_a_worker_that_joined(tmp_path):
    """Otherwise all others wait until it has caught up."""
    job = make_job([1.0] * 3, 60, pace=engines.stale_synchronous(0))
    joins = engines.Worker(gradient, duration=lambda number: 1.0)
    with engines.simulated(job, checkpoint=tmp_path) as run:
        for done, _ in enumerate(run.pushes, 1):
            if done == 30:
                assert run.add(joins) == 3
    job = job._replace(pushes=100, workers=[*job.workers, joins])
    with engines.simulated(job, checkpoint=tmp_path) as run:
        pushes = list(run.pushes)
    assert [sum(p.worker == i for p in pushes) for i in range(4)] == [10] * 4


# Rules.


def test_workers_with_equal_clocks_are_asked_about_once():
    """A push would cost a question for each of thousands that wait."""
    asked = []

    def counted(progress):
        asked.append(progress.worker)
        return progress.clocks[progress.worker] <= min(progress.clocks.values())

    job = make_job([1.0] * 50 + [100.0], 101, pace=_pacing.Alike(counted))
    with engines.simulated(job) as run:
        assert len(list(run.pushes)) == 101
    assert len(asked) < 250  # More than a thousand if each that waits is asked.
    for rule in (
        engines.stale_synchronous(0),
        engines.bounded_staleness(0),
        engines.admission(0, 1),
    ):
        assert isinstance(rule, _pacing.Alike)


def test_a_wrong_num_required_is_named():
    job = make_job([1.0] * 4, 60, 4, pace=engines.admission(0, 8))
    with (
        pytest.raises(ValueError, match=r"(?s)^pace.*num_required"),
        engines.simulated(job) as run,
    ):
        list(run.pushes)


def yields(progress):
    yield True


async def waits(progress):
    return True


def says_nothing(progress):
    pass


@pytest.mark.parametrize("rule", [yields, waits, says_nothing])
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_a_rule_that_gives_no_bool_is_refused(rule, engine):
    job = make_job([0.0], 9, pace=rule)
    with (
        pytest.raises(TypeError, match=r"^pace must return True or False, got a"),
        engine(job) as run,
    ):
        list(run.pushes)


def test_a_rule_that_raises_stop_iteration_is_named(engine):
    job = make_job([0.0], 9, pace=lambda progress: next(iter(())))
    with (
        pytest.raises(RuntimeError, match=r"^pace has raised StopIteration") as raised,
        engine(job) as run,
    ):
        list(run.pushes)
    assert "Raised by pace, for Progress(" in raised.value.__notes__[0]


def test_ctrl_c_does_not_wait_for_a_worker_that_is_stuck():
    begun, over = threading.Event(), threading.Event()

    def stuck(params):
        begun.set()
        over.wait(120)
        return gradient(params)

    job = make_job([], 9)._replace(workers=[engines.Worker(stuck)])
    before = time.monotonic()

    def interrupt():
        with engines.threads(job, join_timeout=60.0) as run:
            run._hand_out()
            assert begun.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    took = time.monotonic() - before
    over.set()
    assert took < 50
