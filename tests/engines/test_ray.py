"""The engine on Ray: processes that die, and come and go."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from gradxform import engines
from gradxform._ray import engine
from tests import ray_here
from tests.conftest import OF_RAY, on_cluster
from tests.engines import jobs
from tests.engines.jobs import SGD, fails, list_all, steps_in, stop_at, worker

ray = pytest.importorskip("ray")


def make_job(workers=2, pushes=60, tx=None, required=None, **more):
    """It subtracts gradients of 1, which take some milliseconds."""
    if isinstance(workers, int):
        workers = [worker(seconds=0.01)] * workers
    return jobs.make_job(workers, pushes, tx, required, **more)


def dying(params):
    sys.exit()


def kill(actor):
    """Kills the actor's process, busy or not."""
    if isinstance(actor, ray_here.Actor):
        return actor.die()
    with contextlib.suppress(ray.exceptions.RayActorError):
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), 9)


def answers_for_good(method):
    """Asks until it raises: a killed actor may answer for a moment."""
    while True:
        sys.modules["ray"].get(method.remote())


def wait_until(condition):
    while not condition():  # `bounded` ends it.
        time.sleep(0.05)


def assert_counted(run, pushes, job):
    """The run, the server, the optimizer and the pushes say the same."""
    counts, stats, state = run.counts(), run.server.stats(), run.server.state()["state"]
    assert counts.pushed == job.pushes + counts.lost
    assert counts.accepted + counts.dropped == job.pushes
    assert (stats.accepted, stats.dropped) == (counts.accepted, counts.dropped)
    assert state.stale_count == counts.dropped
    numbers = {(push.worker, push.number) for push in pushes}
    assert len(pushes) - len(numbers) == counts.lost
    # An answer may have died on its way.
    assert 0 <= job.pushes - len(numbers) <= counts.server_deaths * len(run.workers)


def first_steps(pushes):
    """The first step of each incarnation."""
    first = {}
    for push in pushes:
        step = push.local_step
        first[step.incarnation] = min(step, first.get(step.incarnation, step))
    return [*first.values()]


def test_a_word_of_a_worker_that_nobody_reads_ends_the_run(ray_in_process):
    given = worker(extra=lambda params: {"wieght": 2.0})
    job = make_job([given], 4, gx.accumulate(SGD, 2))
    match = r"nobody reads the keyword 'wieght'.*Did you mean 'weight'\?"
    fails(engines.ray, job, TypeError, match)


def test_late_gradients_are_given_up(either_ray, tmp_path):
    def in_pieces(params):
        (tmp_path / f"{time.monotonic_ns()}").touch()
        for _ in range(10_000):  # Until a step makes it too late.
            time.sleep(0.01)
            yield
        raise AssertionError("it goes on though it is too late")

    def patient(params):
        # Before the first step the slow one has begun, and before the next one again.
        while len([*tmp_path.iterdir()]) < min(1 - int(params), 2):
            time.sleep(0.01)  # `bounded` ends it.
        return 0.0, jnp.ones_like(params)

    # One step late is too late, and a step always comes before the slow one is done.
    both = [worker(patient), worker(in_pieces)]
    job = make_job(both, 40, gx.drop_stale(SGD, 10), max_staleness=0)
    with engines.ray(job, address="auto") as run:
        next(run.pushes)
        pushes = list(run.pushes)
    counts = run.counts()
    assert {push.worker for push in pushes} == {0}
    assert counts.given_up > 0
    assert counts.pushed == 40
    assert counts.accepted + counts.dropped == 40
    times = [push.time for push in pushes]
    assert times == sorted(times)


def test_sync_steps_once_for_every_worker(ray_in_process):
    with engines.ray(make_job(2, 29, required=2)) as run:
        pushes = list(run.pushes)  # The last one waits for a step that never comes.
        params, state = run.server.state().values()
    assert all(push.result[:2] == (True, 0) for push in pushes)
    assert int(params) == -int(state.global_step) == -14
    pairs = {(push.local_step, push.worker) for push in pushes if push.local_step < 14}
    assert pairs == {(step, worker) for step in range(14) for worker in range(2)}
    # The cluster was there before the run, so it stays.
    assert ray_in_process.is_initialized()
    with pytest.raises(ray.exceptions.RayActorError):
        answers_for_good(run.server.actor.pull)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(engines.threads, engines.ray), (engines.ray, engines.simulated)],
)
@on_cluster
def test_sigterm_ends_a_run_and_the_one_around_it(outer, inner, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "gradxform")

    def go():
        with outer(make_job(2, 10**6), checkpoint=tmp_path / "outer") as first:
            next(first.pushes)
            with inner(make_job(2, 3000), checkpoint=tmp_path / "inner") as second:
                for count, _ in enumerate(second.pushes):
                    if count == 5:
                        os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it goes on")

    # The tests' cluster has set a handler of its own.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as raised:
            go()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 143
    ends = [text for text in caplog.messages if text.startswith("terminated: ")]
    wheres = zip(ends, ("inner", "outer"), strict=True)
    assert all(f"is saved in {tmp_path / name};" in text for text, name in wheres)
    assert steps_in(tmp_path / "inner")
    assert steps_in(tmp_path / "outer")


# Deaths.


@on_cluster
def test_a_server_that_another_call_has_replaced_goes_on_from_its_checkpoint(tmp_path):
    """No worker is busy when it dies, so none notices; a call of the user does."""
    job = make_job(1, 20)
    checkpoint = engines.Checkpoint(tmp_path, every_steps=4, every_seconds=None)
    with engines.ray(job, checkpoint=checkpoint) as run:
        pushes = []
        for push in run.pushes:
            pushes.append(push)
            assert len(pushes) < 60
            if len(pushes) in (6, 10):  # A checkpoint that is late skips the next one.
                saved = tmp_path / f"{len(pushes) // 4 * 4}" / "checksums.json"
                wait_until(saved.exists)
            if len(pushes) == 10:
                with pytest.raises(RuntimeError, match="goes back by itself"):
                    run.server.restore(run.server.state())
                time.sleep(0.5)  # The worker has made its next push, and rests.
                kill(run.server.actor)
                assert int(run.server.state()["params"]) == -8
        assert_counted(run, pushes, job)
        assert run.counts().server_deaths == 1
        assert int(run.server.state()["params"]) == -20
    known = [push.number for push in pushes]
    assert known == [*range(11), *range(8, 20)]


def test_a_worker_that_always_dies_is_an_error(either_ray):
    job, died = make_job([worker(dying)]), ray.exceptions.ActorDiedError
    error, run = fails(engines.ray, job, died, None, max_deaths=1)
    assert not isinstance(error, ray.exceptions.RayTaskError)
    assert "more than max_deaths=1" in error.__notes__[0]
    assert run.counts().worker_deaths == 2


def test_a_server_begins_anew_without_a_checkpoint_and_does_not_die_twice(
    either_ray, tmp_path
):
    checkpoint = engines.Checkpoint(tmp_path, None, None, resume=False)
    job = make_job(1, 10**6)
    with engines.ray(job, checkpoint=checkpoint, max_deaths=1) as run:
        pushes = [next(run.pushes) for _ in range(10)]
        kill(run.server.actor)
        while not run.counts().server_deaths:
            pushes.append(next(run.pushes))
        # The first push of the second one has the first number, and the first step.
        again = pushes[-1]
        assert (again.number, again.local_step, again.result.global_step) == (0, 0, 1)
        # Perhaps the last answer had died on its way.
        assert run.counts().lost - (len(pushes) - 1) in {0, 1}
        kill(run.server.actor)
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            list(run.pushes)
        assert "more than max_deaths" in raised.value.__notes__[0]


@on_cluster
def test_a_server_that_dies_after_its_folder_does_not_begin_anew(tmp_path):
    directory = tmp_path / "run"
    checkpoint = engines.Checkpoint(directory, every_steps=5, every_seconds=None)

    def train():
        with engines.ray(make_job(2, 10**6), checkpoint=checkpoint) as run:
            for _ in run.pushes:
                if len(steps_in(directory)) > 1:
                    directory.rename(tmp_path / "moved")
                    kill(run.server.actor)
                    break
            try:
                list(run.pushes)
            finally:
                assert run.counts().server_deaths == 1

    with pytest.raises(OSError, match=f"{directory} was deleted or moved"):
        train()
    assert not directory.exists()


def test_notes_of_a_checkpoint_are_told_by_each_server(
    ray_in_process, tmp_path, caplog
):
    """And each learns how far the clock of a worker that has joined is ahead."""
    rare = {"every_steps": None, "every_seconds": None}
    first = engines.Checkpoint(tmp_path, settings={"seed": 0}, **rare)
    list_all(engines.ray, make_job(1, 3), checkpoint=first)
    other = first._replace(settings={"seed": 1})
    with engines.ray(make_job(1, 9), checkpoint=other) as run:
        index = run.add(worker(seconds=0.01))
        for ended in (False, True):
            next(run.pushes), next(run.pushes)
            ahead = run.server.status().ahead
            assert (ahead[index], run.counts().server_deaths) == (3, ended)
            kill(run.server.actor)
        list(run.pushes)
        assert run.counts().server_deaths == 2
    says = "3 has seed=0, and the run goes on with 1"
    assert sum(says in text for text in caplog.messages) == 3
    began = [text for text in caplog.messages if "server died" in text]
    assert [text.partition(";")[0] for text in began] == [
        "the server died and goes on from step 3"
    ] * 2


def test_without_a_checkpoint_a_server_that_dies_ends_the_run(ray_in_process):
    with engines.ray(make_job(1)) as run:
        next(run.pushes)
        kill(run.server.actor)
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            list(run.pushes)
        assert "give it a checkpoint" in raised.value.__notes__[0]


# The end.


@on_cluster
def test_a_server_that_dies_right_after_the_last_push_loses_nothing(tmp_path):
    job = make_job(2, 60)
    checkpoint = engines.Checkpoint(tmp_path, every_steps=28, every_seconds=None)
    with engines.ray(job, checkpoint=checkpoint) as run:
        pushes = []
        for push in run.pushes:
            pushes.append(push)
            if len(pushes) == 60:
                kill(run.server.actor)
        assert run.counts().server_deaths == 1
        assert int(run.server.state()["params"]) == -60
        kill(run.server.actor)  # The last pushes are saved by now.
        assert int(run.server.state()["params"]) == -60
    counts = run.counts()
    assert (counts.accepted, counts.pushed) == (60, len(pushes))
    assert counts.lost == len(pushes) - 60 > 0


@on_cluster
def test_answered_pushes_count_and_are_saved_before_they_are_given(tmp_path):
    job = make_job([worker()] * 2, 10**6)
    with (
        pytest.raises(ValueError, match="enough") as raised,
        engines.ray(job, checkpoint=tmp_path) as run,
    ):
        stop_at(run, ValueError("enough"), step=20, seconds=0.3)
    counts = run.counts()
    assert counts.accepted + counts.dropped == counts.pushed >= 20
    assert [*steps_in(tmp_path)] == [counts.pushed]
    assert f"is saved in {tmp_path}" in raised.value.__notes__[0]
    with pytest.raises(RuntimeError, match="inside of the engine's context"):
        next(run.pushes)
    job = job._replace(pushes=counts.pushed + 9)
    assert len(list_all(engines.simulated, job, checkpoint=tmp_path)) == 9


def test_a_stream_that_is_made_in_the_worker_ends_there(either_ray):
    def make_worker(length):
        stream = None

        def batch(number):
            nonlocal stream
            if stream is None:
                # A process that dies is replaced: the next one goes on.
                stream = iter([(np.float32(x),) for x in range(number, length)])
            return next(stream)

        return worker(lambda params, x: (x, jnp.ones_like(params)), batch)

    with engines.ray(make_job([make_worker(3), make_worker(5)])) as run:
        losses = {(push.worker, push.loss) for push in run.pushes}
        assert not run.workers
        counts = run.counts()
    assert counts.accepted == counts.pushed - counts.lost == 8
    assert losses == {*((0, x) for x in range(3)), *((1, x) for x in range(5))}


def test_a_stream_that_cannot_be_sent_to_a_worker_is_told(ray_in_process):
    stream = (() for _ in range(9))
    job = make_job([worker(), worker(batch=lambda _: next(stream))])
    error, _ = fails(engines.ray, job, TypeError, "cannot pickle 'generator'")
    note, whose = error.__notes__
    assert whose == "Raised by worker 1, for its gradient 0."
    assert note.startswith("Worker 1 is sent to a process of its own.")
    assert note.endswith("let batch make it when it is first called.")


@on_cluster
def test_ray_shutdown_in_the_loop_is_named(tmp_path):
    # A process of its own, as the cluster of these tests has to stay.
    code = """
import contextlib, ray, sys
from gradxform import engines
from tests.engines.test_ray import make_job

checkpoint = engines.Checkpoint(sys.argv[1], every_steps=5, every_seconds=None)
job = make_job(1, 10**6)
with contextlib.suppress(KeyError), engines.ray(job, checkpoint=checkpoint) as run:
    for push in run.pushes:
        if push.result.global_step == 8:
            ray.shutdown()
            for ask in (lambda: next(run.pushes), lambda: run.server.state()):
                try:
                    ask()
                except RuntimeError as error:
                    print(error)
            raise KeyError("another")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        check=False,
        env=os.environ | OF_RAY,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line[:23] for line in done.stdout.splitlines()] == [
        "the connection to Ray i"
    ] * 2
    assert done.stdout.count("ray.shutdown()") == 4
    assert done.stderr.count("no checkpoint was written: RuntimeError") == 1


# The cluster: these look at what Ray is told, so they need the stand-in.


@pytest.fixture
def not_connected(monkeypatch):
    """The stand-in, and what `connect` was asked; no test ends by `SIGTERM`."""
    asked = []
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setattr(engine, "connect", lambda *given: asked.append(given))
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with ray_here.stand_in(connected=False) as stand_in:
        yield stand_in, asked
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", [None, "there:6379"])
@pytest.mark.every
def test_a_run_connects_and_leaves_all_as_it_was(address, not_connected):
    ray, asked = not_connected
    options = {"address": address, "connect_timeout": 7.0}
    with engines.ray(make_job(2, 6), **options) as run:
        own = {"address": "local", "num_cpus": 3, "include_dashboard": False}
        expected = {"address": address} if address else own
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        assert ray.given == expected | quiet
        assert asked == ([(address, 7.0)] if address else [])
        assert signal.getsignal(signal.SIGTERM) is not ray_here.on_sigterm
        assert len(list(run.pushes)) == 6
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_program_keeps_its_own_handler_of_sigterm(not_connected):
    def own(*_):
        """That of the program."""

    signal.signal(signal.SIGTERM, own)
    with engines.ray(make_job(1, 3)) as run:
        assert signal.getsignal(signal.SIGTERM) is own  # And not that of Ray.
        list(run.pushes)
    assert signal.getsignal(signal.SIGTERM) is own


def test_sigterm_ends_a_run_and_its_cluster(not_connected):
    ray, _ = not_connected

    def go():
        with engines.ray(make_job(1, 10**6)) as run:
            for push in run.pushes:
                if push.number == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as raised:
        go()
    assert raised.value.code == 143
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_a_wait_for_a_cluster(not_connected, monkeypatch):
    ray, _ = not_connected

    def connect(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr(engine, "connect", connect)
    with (
        pytest.raises(SystemExit) as raised,
        engines.ray(make_job(), address="there:6379"),
    ):
        pass
    assert raised.value.code == 143
    assert not ray.given
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_connection_that_is_closed_in_the_loop_is_named(not_connected):
    ray, _ = not_connected
    closed = pytest.raises(RuntimeError, match="connection to Ray is closed")
    with closed, engines.ray(make_job(1, 10**6)) as run:
        next(run.pushes)
        ray.shutdown()
        for ask in (lambda: next(run.pushes), run.server.state):
            with pytest.raises(RuntimeError, match="connection to Ray is closed"):
                ask()


# Errors of workers, and jobs that are refused.


class TwoArguments(Exception):
    """Pickle makes it with one."""

    def __init__(self, code, text):
        super().__init__(f"{text}, {code}")


class WithDeletedArray(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.array = jnp.ones(2)
        self.array.delete()


def test_an_error_of_the_server_ends_the_run(ray_in_process):
    """An option of the job reaches it."""
    job = make_job([worker(lambda params: (0.0, params * jnp.nan))])
    with engines.ray(job._replace(require_finite=True)) as run:
        with pytest.raises(ValueError, match="grads must be finite") as raised:
            list(run.pushes)
        assert type(raised.value.cause) is ValueError
        assert run.server.state()["params"] == 0.0
        assert run.counts()[-4:-1] == (1, 0, 1)  # Started, under way, unanswered.
    assert raised.value.__notes__[0].startswith("Raised by worker")


@pytest.mark.parametrize("make", [lambda text: TwoArguments(7, text), WithDeletedArray])
def test_an_error_that_cannot_be_pickled_is_its_workers(either_ray, make):
    def failing(params):
        raise make("a bad batch")

    job, error = make_job([worker(failing)]), ray.exceptions.RayError
    error, run = fails(engines.ray, job, error, "a bad batch", max_deaths=0)
    assert error.__notes__ == ["Raised by worker 0, for its gradient 0."]
    assert run.counts()[-4:-1] == (1, 0, 1)


def test_a_checkpoint_of_another_job_is_refused_as_it_is_elsewhere(
    ray_in_process, tmp_path
):
    list_all(engines.simulated, make_job(2, 3), checkpoint=tmp_path)
    wider = make_job(2, 9, params=jnp.zeros(2))
    match = r"it has float32\[\], and this job float32\[2\]"
    fails(engines.ray, wider, ValueError, match, checkpoint=tmp_path)
    with engines.ray(make_job(2, 5), checkpoint=tmp_path) as run:
        pushes = list(run.pushes)
        assert run.counts().pushed == 5
    assert len(pushes) == 2
    for index, first in (0, 2), (1, 1):  # The simulated ones were 0, 1 and 0.
        numbers = [push.number for push in pushes if push.worker == index]
        assert numbers == [*range(first, first + len(numbers))]


def test_a_worker_has_no_device_of_another_process(either_ray):
    here = worker(device=jax.devices()[0])
    says = "worker 0 is a process of its own"
    fails(engines.ray, make_job([here]), ValueError, says)
    with (
        engines.ray(make_job()) as run,
        pytest.raises(ValueError, match="worker 2 is a process"),
    ):
        run.add(here)


# Workers that come and go.


def test_workers_come_and_go(ray_in_process, tmp_path):
    job, options = make_job(2, 10**6), {"num_cpus": 0}
    with engines.ray(job, checkpoint=tmp_path, worker_options=options) as run:
        pushes = [next(run.pushes) for _ in range(10)]
        assert run.add(job.workers[0]) == 2
        while pushes[-1].worker != 2:
            pushes.append(next(run.pushes))
        gone = run.workers[0]
        run.remove(0)
        while 0 in {push.worker for push in pushes[-20:]}:
            pushes.append(next(run.pushes))
        assert {push.worker for push in pushes[-20:]} == {1, 2}
        assert run.workers.keys() == {1, 2}
        with pytest.raises(ray.exceptions.RayActorError):
            answers_for_good(gone.__ray_ready__)
        run.stop()
        assert list(run.pushes) == []
        assert len(pushes) <= run.counts().pushed <= len(pushes) + 2
    # What was answered and not given before the stop is saved as well.
    assert run.counts().pushed in steps_in(tmp_path)
