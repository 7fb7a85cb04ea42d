"""Runs that are saved, that end, and that go on: on this machine."""

import contextlib
import logging
import os
import pathlib
import re
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import gradxform as gx
from gradxform import engines
from gradxform.engines._pool import JobServer
from tests.engines.jobs import (
    assert_in_order,
    bits,
    counters,
    ended,
    fails,
    list_all,
    steps_in,
    stop_at,
    training,
)

WHOLE = (30, 30, 0, 0, 0, 0, 0)


# Where a run goes on.


@pytest.mark.slow
@pytest.mark.parametrize("stop", [12, 13, 14, 29])
def test_a_run_that_went_on_is_the_run_that_never_stopped(stop, tmp_path):
    """It stops at a step, in a half-done sum, or before its last push."""
    job = training(30, required=3)
    pushes, state, _ = ended(engines.simulated, job)
    with engines.simulated(job, checkpoint=tmp_path) as run:
        first = [next(run.pushes) for _ in range(stop)]
        assert run.resumed is None
    rest, after, run = ended(engines.simulated, job, checkpoint=tmp_path)
    assert run.resumed == stop // 3
    assert bits(after) == bits(state)
    both = [sorted((p.worker, p.number) for p in x) for x in (first + rest, pushes)]
    assert both[0] == both[1]
    assert [p.result.applied for p in rest] == [True] * (30 - stop)
    assert run.counts()[:7] == WHOLE


@pytest.mark.slow
def test_threads_wait_for_a_step_that_their_gradients_are_part_of(tmp_path):
    """The first worker, by far the fastest, has pushed alone for the next step."""
    job = training(30, required=3)
    workers = [each._replace(duration=lambda _: 0.05) for each in job.workers]
    workers[0] = workers[0]._replace(duration=lambda _: 0.0)
    job = job._replace(workers=workers)
    with engines.simulated(job, checkpoint=tmp_path) as run:
        assert [next(run.pushes) for _ in range(13)][-1].worker == 0
    _, state, run = ended(engines.threads, job, checkpoint=tmp_path)
    assert run.counts()[:7] == WHOLE
    assert state["state"].global_step == 10


@pytest.mark.slow
def test_a_run_that_is_through_stays_as_it_is(engine, tmp_path):
    pushes, state, first = ended(engine, training(20), checkpoint=tmp_path)
    before = steps_in(tmp_path)
    none, again, run = ended(engine, training(20), checkpoint=str(tmp_path))
    assert (len(pushes), none) == (20, [])
    assert bits(again) == bits(state)
    assert run.resumed == state["state"].global_step
    assert run.counts()[:3] == first.counts()[:3]
    assert run.counts().dropped == state["state"].stale_count
    assert steps_in(tmp_path) == before
    assert run.server.stats().staleness == {
        late: sum(push.result.staleness == late for push in pushes)
        for late in {push.result.staleness for push in pushes}
    }
    more = list_all(engine, training(26), checkpoint=tmp_path)
    assert len(more) == 6
    assert_in_order(pushes + more)


@pytest.mark.slow
def test_orbax_alone_can_read_it(tmp_path):
    _, state, _ = ended(engines.simulated, training(20), checkpoint=tmp_path)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 20
        args = ocp.args.Composite(state=ocp.args.StandardRestore(state))
        assert bits(manager.restore(20, args=args)["state"]) == bits(state)


def test_an_answer_from_memory_changes_nothing_that_is_saved(tmp_path):
    with engines.simulated(training(9), checkpoint=tmp_path) as run:
        first, _ = run.server.pull()
        for worker in range(3):
            grads, seen = run.server.pull()
            run.server.push(grads, seen, push_id=(worker, 0))
            again = run.server.push(first, seen, push_id=(0, 0))
        assert again.global_step == 1
    assert steps_in(tmp_path) == {3: 3}
    answers = [answer[:3] for answer in counters(tmp_path)[3]["answers"]]
    assert answers == [[worker, 0, worker] for worker in range(3)]


@pytest.mark.slow
def test_no_checkpoint_follows_the_last_save(tmp_path):
    # Engines close their server right after it, so the test asks the server itself.
    job = training(9)
    checkpoint = engines.Checkpoint(str(tmp_path), every_steps=1, max_to_keep=None)
    with JobServer(job, checkpoint) as server:
        server.begin()
        for number in range(3):
            grads, seen = server.pull()
            server.push(grads, seen, push_id=(0, number))
            server.flush()
        assert server.save() == 3
        server.push(grads, seen + 1, push_id=(0, 3))
    assert max(steps_in(tmp_path)) == 3


# When a run is saved.


@pytest.mark.slow
def test_it_is_saved_at_multiples_of_a_step_and_the_newest_are_kept(tmp_path):
    checkpoint = engines.Checkpoint(
        tmp_path, every_steps=4, every_seconds=None, max_to_keep=None
    )
    ended(engines.simulated, training(30, required=3), checkpoint=checkpoint)
    assert steps_in(tmp_path) == {12: 4, 24: 8, 30: 10}
    few = checkpoint._replace(directory=tmp_path / "few", max_to_keep=2)
    ended(engines.simulated, training(30), checkpoint=few)
    assert len(steps_in(tmp_path / "few")) == 2


@pytest.mark.slow
def test_it_is_saved_as_time_goes_by_while_workers_go_on(tmp_path):
    checkpoint = engines.Checkpoint(tmp_path, every_seconds=0.0, max_to_keep=None)
    with engines.threads(training(10**6), checkpoint=checkpoint) as run:
        deadline = time.monotonic() + 300
        while len(steps_in(tmp_path)) < 3 and time.monotonic() < deadline:
            next(run.pushes)
    assert len(steps_in(tmp_path)) >= 3
    # Each shows one moment: the optimizer's count is the server's.
    with ocp.CheckpointManager(tmp_path) as manager:
        target = run.server.state()
        for pushes, accepted in steps_in(tmp_path).items():
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(target), counters=ocp.args.JsonRestore()
            )
            found = manager.restore(pushes, args=args)
            state, counters = found["state"]["state"], found["counters"]
            assert (state.global_step, state.stale_count) == (
                accepted,
                pushes - accepted,
            )
            answered = sum(number + 1 for _, number, *_ in counters["answers"])
            assert answered == pushes == sum(counters["staleness"].values())


def test_ctrl_c_ends_a_run_and_saves_nothing(engine, tmp_path):
    checkpoint = engines.Checkpoint(tmp_path, 5, None, None)
    with (
        pytest.raises(KeyboardInterrupt),
        engine(training(40), checkpoint=checkpoint) as run,
    ):
        stop_at(run, KeyboardInterrupt)
    assert run.counts().accepted == run.server.stats().accepted
    steps = steps_in(tmp_path)
    assert max(steps) <= run.counts().pushed
    assert all(step % 5 == 0 for step in steps.values())


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_a_run_that_an_exception_ends_is_saved(engine, error, tmp_path):
    job = training(40)
    with pytest.raises(error) as raised, engine(job, checkpoint=tmp_path) as run:
        stop_at(run, error)
    ((pushes, step),) = steps_in(tmp_path).items()
    counts, stats = run.counts(), run.server.stats()
    assert counts.pushed == stats.accepted + stats.dropped == pushes
    assert counts.accepted == stats.accepted == step >= 8
    (note,) = raised.value.__notes__
    assert note == f"step {step} is saved in {tmp_path}; the same job goes on there."
    rest, _, run = ended(engine, job, checkpoint=tmp_path)
    assert run.resumed == step
    assert len(rest) == 40 - pushes


@pytest.mark.slow
@pytest.mark.parametrize("caught", [False, True])
def test_a_run_that_a_worker_s_error_ends_is_saved(engine, caught, tmp_path):
    job = training(40, count=2)
    bad = job.workers[1]

    def batch(number):
        if number == 5:
            raise ValueError("a bad batch")
        return bad.batch(number)

    broken = job._replace(workers=[job.workers[0], bad._replace(batch=batch)])
    with contextlib.ExitStack() as stack:
        if not caught:
            raised = stack.enter_context(pytest.raises(ValueError, match="a bad batch"))
        run = stack.enter_context(engine(broken, checkpoint=tmp_path))
        if caught:
            raised = stack.enter_context(pytest.raises(ValueError, match="a bad batch"))
        list(run.pushes)
    assert raised.value.__notes__[0] == "Raised by worker 1, for its gradient 5."
    (pushes,) = steps_in(tmp_path)
    with engine(job, checkpoint=tmp_path) as run:  # The user has mended it.
        rest = list(run.pushes)
        assert run.counts().pushed == 40 == pushes + len(rest)
    assert [p.number for p in rest if p.worker == 1][:1] == [5]


@pytest.mark.parametrize("donate", [True, False])
def test_a_failed_step_of_the_server_is_not_saved(engine, donate, tmp_path):
    def check(count):
        if count == 8:
            raise FloatingPointError("in the middle of a step")

    def update(grads, state, params=None):
        jax.debug.callback(check, state)
        return grads, state + 1

    tx = optax.GradientTransformation(lambda _: jnp.int32(0), update)
    job = training(40)._replace(tx=gx.drop_stale(tx, 100), donate=donate)
    checkpoint = engines.Checkpoint(tmp_path, 5, None, None)
    match = "in the middle of a step"
    _, run = fails(engine, job, Exception, match, checkpoint=checkpoint)
    assert [*steps_in(tmp_path).values()] == [5]
    assert (run.server.stats().lost is None) is not donate


def test_before_the_first_push_there_is_nothing_to_save(engine, tmp_path):
    checkpoint = engines.Checkpoint(tmp_path, resume=False)
    for _ in range(2):  # The second one finds no run that it could overwrite.
        with (
            pytest.raises(ValueError, match="a typo"),
            engine(training(9), checkpoint=checkpoint),
        ):
            raise ValueError("a typo")
    assert not steps_in(tmp_path)


@pytest.fixture
def full(monkeypatch):
    """Each of these errors makes one save fail."""
    save, left = ocp.CheckpointManager.save, []

    def fail(*args, **options):
        if left:
            raise left.pop()
        return save(*args, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    return left


def test_an_error_while_saving_does_not_hide_the_one_before(
    engine, tmp_path, full, caplog
):
    full += [OSError(28, "No space left on device")] * 99
    with (
        caplog.at_level(logging.ERROR, "gradxform"),
        pytest.raises(ValueError, match=r"^enough$") as raised,
        engine(training(40), checkpoint=tmp_path) as run,
    ):
        stop_at(run, ValueError("enough"))
    assert not hasattr(raised.value, "__notes__")
    (said,) = caplog.messages
    assert said.startswith("no checkpoint was written: OSError: ")


def test_a_terminated_run_that_cannot_be_saved_ends_with_one_line(
    tmp_path, full, caplog
):
    full += [OSError(28, "No space left on device")] * 99

    def go():
        with engines.simulated(training(40), checkpoint=tmp_path) as run:
            for _ in run.pushes:
                os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.WARNING, "gradxform")
    with pytest.raises(SystemExit, match="143"):
        go()
    (said,) = caplog.messages
    assert said.startswith("terminated: no checkpoint was written: OSError: [Errno 28]")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_told_and_the_run_goes_on(
    engine, tmp_path, full, caplog
):
    full.append(ValueError("No space left on device"))
    checkpoint = engines.Checkpoint(tmp_path, every_steps=1)
    with caplog.at_level(logging.ERROR, "gradxform"):
        assert len(list_all(engine, training(30), checkpoint=checkpoint)) == 30
    (said,) = caplog.messages
    assert "no checkpoint was written: ValueError: No space" in said
    assert max(steps_in(tmp_path)) == 30
    full.append(OSError(28, "No space left on device"))
    last = checkpoint._replace(every_steps=10**6)  # It cannot write the last one.
    fails(engine, training(40), OSError, "No space left", checkpoint=last)


# What is refused.


@pytest.mark.slow
def test_what_cannot_go_on_is_refused(engine, tmp_path):
    fresh = engines.Checkpoint(tmp_path, resume=False)
    ended(engine, training(6), checkpoint=fresh)
    other = training(9)
    wider = {**other.params, "w": jnp.zeros(9)}
    more = {**other.params, "more": jnp.zeros(1)}
    for changes, match in (
        (
            {"params": wider},
            r"\['params'\]\['w'\] it has float32\[8\], and this job float32\[9\]",
        ),
        (
            {"params": more},
            r"\['params'\]\['more'\] it has nothing, and this job float32\[1\]",
        ),
        ({"tx": optax.sgd(0.1)}, r"this job nothing"),
    ):
        job = other._replace(**changes)
        fails(engine, job, ValueError, match, checkpoint=tmp_path)
    match = r"holds a run of 6 pushes: let resume be"
    fails(engine, other, ValueError, match, checkpoint=fresh)
    for name, value in (
        *(("every_steps", x) for x in (0, 1.5)),
        *(("every_seconds", x) for x in (-1.0, float("nan"))),
        ("max_to_keep", 0),
    ):
        wrong = engines.Checkpoint(tmp_path / "new", **{name: value})
        errors = TypeError, ValueError
        fails(engine, other, errors, f"^{name} must be", checkpoint=wrong)
        assert not (tmp_path / "new").exists()
    assert len(list_all(engine, other, checkpoint=tmp_path)) == 3


# Signals.


def terminate_at(run, moment):
    """Takes pushes, and sends the process ``SIGTERM`` after so many."""
    for count, _ in enumerate(run.pushes, 1):
        if count == moment:
            os.kill(os.getpid(), signal.SIGTERM)


def ends(go):
    """What it does is ended by ``SIGTERM``, and the handler of before is back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        go()
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_sigterm_saves_a_run_and_ends_it(engine, tmp_path, caplog):
    runs = []

    def go():
        with engine(training(10**6), checkpoint=tmp_path) as run:
            runs.append(run)
            terminate_at(run, 20)
            pytest.fail("it goes on")

    caplog.set_level(logging.WARNING)
    ends(go)
    ((pushes, step),) = steps_in(tmp_path).items()
    assert runs[0].counts().pushed == pushes >= 20
    assert f"terminated: step {step} is saved in {tmp_path}" in caplog.messages[-1]
    with engine(training(10**6), checkpoint=tmp_path) as run:
        assert run.resumed == step
        assert next(run.pushes).result.global_step >= step
        run.stop()


def test_sigterm_ends_a_run_that_waits_is_through_or_is_not_saved(tmp_path, caplog):
    def waits():
        job = training(9, seconds=3600.0)
        with engines.threads(job, checkpoint=tmp_path / "waits") as run:
            # Not before the run: the signal would end these tests.
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            list(run.pushes)

    def is_through():
        with engines.threads(training(9), checkpoint=tmp_path / "through") as run:
            list(run.pushes)
            os.kill(os.getpid(), signal.SIGTERM)

    def is_not_saved():
        with engines.simulated(training(50)) as run:
            terminate_at(run, 3)

    caplog.set_level(logging.WARNING)
    for go in (waits, is_through, is_not_saved):
        ends(go)
    assert [*steps_in(tmp_path / "through")] == [9]
    assert "nothing is saved" in caplog.messages[-1]


@pytest.mark.slow
def test_a_program_keeps_its_own_handler(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    try:
        with engines.simulated(training(30), checkpoint=tmp_path) as run:
            terminate_at(run, 3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [True]
    assert [*steps_in(tmp_path)] == [30]


@pytest.fixture
def events(caplog):
    """The folders of runs that a signal has ended, in the sequence of their ends."""
    caplog.set_level(logging.WARNING, "gradxform")

    def ended_in():
        found = (re.search(r"saved in (\S+);", text) for text in caplog.messages)
        return [pathlib.Path(each[1]).name for each in found if each]

    return ended_in


@pytest.mark.parametrize(
    ("inner", "reads", "depth"),
    [
        (engines.simulated, 0, 2),
        (engines.simulated, -1, 3),
        (engines.threads, 0, 3),
        (engines.threads, -1, 2),
    ],
)
def test_sigterm_ends_all_runs_the_inner_first(
    engine, inner, reads, depth, tmp_path, events
):
    """Whichever of them the program reads."""
    runs = []

    def go():
        with contextlib.ExitStack() as stack:
            for i, kind in enumerate([engine, *[inner] * (depth - 1)]):
                job = training(1000)
                run = stack.enter_context(kind(job, checkpoint=tmp_path / f"{i}"))
                runs.append(run)
                next(run.pushes)
                next(run.pushes)
            terminate_at(runs[reads], 5)
            pytest.fail("it goes on")

    ends(go)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert events() == [str(i) for i in reversed(range(depth))]
    for i, run in enumerate(runs):
        assert [*steps_in(tmp_path / f"{i}")] == [run.counts().pushed]
        assert run.counts().pushed >= 2


@pytest.mark.parametrize("inner_is_over", [True, False])
def test_the_signal_of_an_inner_run_reaches_the_outer(
    engine, inner_is_over, tmp_path, events
):
    """Also if the program survives the end of the inner one, or that one is over."""

    def go():
        with engine(training(1000), checkpoint=tmp_path / "outer") as outer:
            next(outer.pushes)
            mine = signal.getsignal(signal.SIGTERM)
            job = training(9 if inner_is_over else 1000)
            with (
                contextlib.suppress(SystemExit),
                engine(job, checkpoint=tmp_path / "inner") as inner,
            ):
                assert signal.getsignal(signal.SIGTERM) is not mine
                terminate_at(inner, 20 if inner_is_over else 5)
            assert signal.getsignal(signal.SIGTERM) is mine
            terminate_at(outer, 5 if inner_is_over else 10**6)
            pytest.fail("it goes on")

    ends(go)
    assert events() == ["inner"] * (not inner_is_over) + ["outer"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_runs_end_in_any_sequence(engine, number, tmp_path, events):
    """The first one is over before the second, which begins inside of it."""
    end = SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    before = signal.getsignal(number)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    one = first.enter_context(engine(training(9), checkpoint=tmp_path / "one"))
    other = second.enter_context(engine(training(1000), checkpoint=tmp_path / "other"))
    assert len(list(one.pushes)) == 9
    first.close()
    assert signal.getsignal(number) is not before

    def go():
        with second:
            for count, _ in enumerate(other.pushes):
                if count == 5:
                    os.kill(os.getpid(), number)
                assert count < 1000

    with pytest.raises(end):
        go()
    assert signal.getsignal(number) is before
    assert events() == ["other"] * (end is SystemExit)
    with pytest.raises(RuntimeError, match="the run is over"):
        _ = one.pushes  # The signal has told it nothing.


def test_a_thread_s_run_gets_no_signal(engine, tmp_path, events):
    """Only the main thread does; the other run goes on to its end."""
    pushes, begun, told = [], threading.Event(), threading.Event()

    def go_on():
        with engine(training(30), checkpoint=tmp_path / "thread") as run:
            begun.set()
            told.wait()
            pushes.extend(run.pushes)

    def go():
        with engine(training(1000), checkpoint=tmp_path / "main") as run:
            thread.start()
            begun.wait()
            terminate_at(run, 5)

    thread = threading.Thread(target=go_on)
    ends(go)
    told.set()
    thread.join()
    assert len(pushes) == 30
    assert events() == ["main"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_ends_a_run_all_the_same(engine, tmp_path):
    class Dropping:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # The interrupt is raised here, in a destructor.

    def go():
        with engine(training(10**6), checkpoint=tmp_path) as run:
            for count, _ in enumerate(run.pushes):
                if count == 3:
                    Dropping()
                assert count < 1000

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        go()
    assert signal.getsignal(signal.SIGINT) is before
    assert not steps_in(tmp_path)


@pytest.mark.parametrize("count", [1, 3])
def test_the_server_of_a_run_cannot_be_restored(engine, count):
    """The run would wait for pushes that the server takes for others, without end."""
    with engine(training(20, count=count)) as run:
        for done, _ in enumerate(run.pushes, 1):
            if done == 5:
                state = run.server.state()
            if done == 10:
                before = run.server.state()
                with pytest.raises(RuntimeError, match="goes back by itself"):
                    run.server.restore(state)
                if engine is engines.simulated:
                    chex.assert_trees_all_equal(run.server.state(), before)
    counts, stats = run.counts(), run.server.stats()
    assert done == 20 == counts.accepted + counts.dropped
    assert (stats.accepted, stats.dropped) == (counts.accepted, counts.dropped)
