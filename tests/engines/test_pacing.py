"""Rules that let workers wait, against an event simulation in plain Python.

The simulation below shares no code with the package. Each rule is restated in it as its
source has it: Petuum's clocks, AReaL's counts, and for the bound all answers that
may come before the oldest gradient are played through.
"""

import heapq
import itertools
import json
import math
import pathlib
import random
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform._server.records import Answer, ServerStatus, Tally
from gradxform.engines import _pacing, _simulated
from gradxform.engines._ledger import Ledger
from gradxform.engines._scheduler import Scheduler
from gradxform.engines._work import ServerDiedError
from tests.engines.jobs import (
    SGD,
    assert_in_order,
    by_worker,
    ended,
    fails,
    list_all,
    steps_in,
)
from tests.engines.jobs import worker as make_worker

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


# The simulation.


class Gradient(NamedTuple):
    """A gradient under way."""

    number: int
    local_step: int
    started: float
    waited: float


class Answered(NamedTuple):
    """What became of a push."""

    worker: int
    number: int
    local_step: int
    started: float
    waited: float
    time: float
    staleness: int
    global_step: int


class Stalled(Exception):
    """Nothing is under way, and nobody may begin."""


class Simulation:
    """Workers, a server that steps at each ``batch``-th push, and a clock.

    ``rule(simulation, worker)`` says whether a worker may begin.
    """

    def __init__(self, workers, seconds, rule, batch=1):
        self.seconds, self.rule, self.batch = seconds, rule, batch
        self.now, self.step, self.summed, self.accepted = 0.0, 0, 0, 0
        self.there = set(range(workers))
        self.ticks = dict.fromkeys(range(workers), 0)
        self.numbers = dict.fromkeys(range(workers), 0)
        self.free = dict.fromkeys(range(workers), 0.0)  # Since when.
        self.under_way = {}  # By worker.
        self.events = []
        self.begun = 0

    def join(self, worker):
        """A new worker; its clock is the lowest."""
        self.ticks[worker] = min(self.clocks.values())
        self.there.add(worker)
        self.numbers[worker], self.free[worker] = 0, self.now

    def leave(self, worker):
        """Its gradient under way, if any, is its last."""
        self.there.remove(worker)
        self.free.pop(worker, None)

    def resume(self):
        """Gradients under way are begun anew, and the clock starts again."""
        self.now, self.begun = 0.0, self.accepted
        self.under_way, self.events = {}, []
        self.free = dict.fromkeys(self.there, 0.0)
        known = [self.ticks[w] for w in self.there if self.numbers[w]]
        for each in self.there:
            if not self.numbers[each]:  # As if it joined.
                self.ticks[each] = min(known)

    @property
    def clocks(self):
        """Those who are gone have none."""
        return {worker: self.ticks[worker] for worker in self.there}

    def ask(self):
        """Those who have waited longest are first."""
        for worker in sorted(self.free, key=lambda w: (self.free[w], w)):
            if not self.rule(self, worker):
                continue
            number = self.numbers[worker]
            waited = self.now - self.free.pop(worker)
            self.under_way[worker] = Gradient(number, self.step, self.now, waited)
            self.begun += 1
            done = self.now + self.seconds(worker, number)
            heapq.heappush(self.events, (done, worker))

    def run(self, pushes):
        """Gives each answered push; the next ones are begun after it."""
        self.ask()
        while pushes:
            if not self.under_way:
                raise Stalled
            self.now, worker = heapq.heappop(self.events)
            if self.now == math.inf:
                return
            pushes -= 1
            yield self.answer(worker)
            if pushes:
                self.ask()

    def answer(self, worker):
        number, local_step, started, waited = self.under_way.pop(worker)
        if worker in self.there:
            self.free[worker] = self.now
        self.numbers[worker] += 1
        self.ticks[worker] += 1
        self.accepted += 1
        staleness = self.step - local_step
        self.summed += 1
        if self.summed == self.batch:
            self.summed, self.step = 0, self.step + 1
        return Answered(
            *(worker, number, local_step, started, waited, self.now),
            *(staleness, self.step),
        )


def stale_synchronous(slack):
    """A read at clock c needs all writes of all workers up to clock c - slack."""

    def rule(simulation, worker):
        needed = range(simulation.clocks[worker] - slack)
        return all(simulation.clocks[w] > n for w in simulation.there for n in needed)

    return rule


def bounded_staleness(bound):
    """Each gradient, also the new one, may be the last that is answered."""

    def rule(simulation, worker):
        begun = [g.local_step for g in simulation.under_way.values()]
        begun.append(simulation.step)
        for last in range(len(begun)):
            step, summed = simulation.step, simulation.summed
            for _ in begun[:last] + begun[last + 1 :]:
                summed += 1
                if summed == simulation.batch:
                    step, summed = step + 1, 0
            if len(begun) > 1 and step - begun[last] > bound:
                return False
        return True

    return rule


def admission(bound, concurrent):
    """AReaL's: the capacity is the lesser of two."""

    def rule(simulation, worker):
        running = len(simulation.under_way)
        samples = simulation.accepted + running
        capacity = (bound + simulation.step + 1) * simulation.batch - samples
        return min(concurrent - running, capacity) > 0

    return rule


def rules(batch):
    """Pairs: the simulation's rule, and the package's."""
    for slack in (0, 1, 4):
        yield stale_synchronous(slack), engines.stale_synchronous(slack)
    for bound in (0, 1, 5):
        yield bounded_staleness(bound), engines.bounded_staleness(bound, batch)
    for bound, concurrent in ((0, 100), (1, 4), (3, 2)):
        yield (
            admission(bound, concurrent),
            engines.admission(bound, concurrent, batch),
        )
    yield (lambda simulation, worker: True), None


def view(simulation, worker):
    """What the package's rules see."""
    running = tuple(g.local_step for g in simulation.under_way.values())
    return engines.Progress(
        worker,
        dict(simulation.clocks),
        running,
        simulation.step,
        simulation.summed,
        simulation.accepted + len(running),
    )


def plain(progress):
    """A progress that can be compared: the order of the local steps does not matter."""
    return (
        int(progress.worker),
        dict(sorted(progress.clocks.items())),
        sorted(map(int, progress.local_steps)),
        *map(int, progress[3:]),
    )


# Seconds of the gradients: multiples of 1/64, so that sums are exact in any order.


def one_slow(workers):
    """The last is 5.35 times as slow, nearly."""
    return lambda worker, number: 342 / 64 if worker == workers - 1 else 1.0


def long_tasks(seed):
    """One task in five takes eight times as long."""

    def seconds(worker, number):
        return 8.0 if random.Random(f"{seed} {worker} {number}").random() < 0.2 else 1.0

    return seconds


def drawn(seed, workers):
    """Any durations, many of them equal."""
    table = np.random.default_rng(seed).integers(1, 40, (workers, 17)) / 16
    return lambda worker, number: float(table[worker % workers, number % 17])


# The package.


def gradient(params, *batch):
    return np.float32(0), np.ones((), np.float32)


def worker_of(index, seconds):
    return engines.Worker(gradient, duration=lambda n: seconds(index, n))


def make_job(workers, seconds, pushes, batch=1, pace=None, **more):
    """Each step takes ``batch`` pushes, however late they are."""
    if not callable(seconds):  # One number for each worker.
        workers, seconds = len(seconds), lambda index, number, each=seconds: each[index]
    members = [worker_of(index, seconds) for index in range(workers)]
    tx = SGD if batch == 1 else gx.accumulate(SGD, batch)
    return engines.Job(jnp.zeros(()), tx, members, pushes, pace=pace, **more)


def answered(push):
    """A push of the package as the simulation writes it."""
    assert push.result.applied
    assert push.computing == push.time - push.started
    return Answered(
        *(push.worker, push.number, push.local_step),
        *(push.started, push.waited, push.time),
        *(push.result.staleness, push.result.global_step),
    )


def assert_closed(run):
    """Every gradient that was begun is somewhere, once; shares add up."""
    counts = run.counts()
    ended = counts.pushed + counts.given_up + counts.unanswered
    assert counts.started == counts.under_way + ended, counts
    assert counts.accepted + counts.dropped + counts.lost == counts.pushed
    assert min(*counts[:7], counts.under_way, counts.unanswered) >= 0
    for name in ("accepted", "dropped", "given_up"):
        shares = [getattr(each, name) for each in counts.by_worker.values()]
        assert sum(shares) == getattr(counts, name), (name, counts)
    return counts


def played(job, folder=None, engine=engines.simulated):
    """All pushes of a run, with the ledger checked at each, and the last counts."""
    with engine(job, checkpoint=folder) as run:
        pushes = []
        for push in run.pushes:
            pushes.append(push)
            assert_closed(run)
        return pushes, assert_closed(run)


# The same pushes.


# The same pushes.


class Compared:
    """A simulation and a job of the package, whose rules write down what they see."""

    def __init__(self, workers, seconds, batch, theirs, ours):
        self.asked, self.expected = [], []

        def recorded(progress):
            may = ours(progress)
            self.asked.append((plain(progress), bool(may)))
            return may

        def rule(simulation, index):
            may = theirs(simulation, index)
            self.expected.append((plain(view(simulation, index)), may))
            return may

        self.simulation = Simulation(workers, seconds, rule, batch)
        self.job = make_job(workers, seconds, 1, batch, ours and recorded)

    def run(self, pushes, folder=None):
        """So many pushes of both, if each push and each question is the same."""
        done = list(self.simulation.run(pushes))
        goal = self.simulation.accepted
        got, counts = played(self.job._replace(pushes=goal), folder)
        assert [answered(push) for push in got] == done
        assert self.asked == (self.expected if self.job.pace else [])
        assert counts.accepted == goal
        assert counts.started == self.simulation.begun
        return done


RULES = len(list(rules(1)))


@pytest.mark.every
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("number", range(RULES))
def test_simulated_runs_as_the_event_simulation(number, batch):
    theirs, ours = list(rules(batch))[number]
    seconds = one_slow(4) if (number + batch) % 2 else long_tasks(number)
    Compared(4, seconds, batch, theirs, ours).run(25)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("number", [1, 4, 7])  # One of each kind.
def test_a_resumed_run_goes_on_as_the_event_simulation(number, batch, tmp_path):
    """It is stopped in the middle of a sum that holds late gradients.

    In AReaL all of max_staleness batches were begun anew at once.
    """
    both = Compared(4, long_tasks(number), batch, *list(rules(batch))[number])
    for pushes in (7, 23):
        both.run(pushes, tmp_path)
        both.simulation.resume()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_simulated_runs_as_the_event_simulation_at_random(seed):
    rng = random.Random(seed)
    workers, batch = rng.randint(1, 12), rng.randint(1, 5)
    bound = rng.randint(0, 15)
    of_bound = bounded_staleness(bound), engines.bounded_staleness(bound, batch)
    theirs, ours = rng.choice(
        [
            *rules(batch),
            (stale_synchronous(bound), engines.stale_synchronous(bound)),
            (admission(bound, 5), engines.admission(bound, 5, batch)),
            *[of_bound] * 5,
        ]
    )
    choices = [one_slow(workers), long_tasks(seed), drawn(seed, workers)]
    both = Compared(workers, rng.choice(choices), batch, theirs, ours)
    pushes = both.run(120)
    if (theirs, ours) == of_bound:
        assert max(push.staleness for push in pushes) <= bound


@pytest.mark.parametrize(
    ("seed", "pushes"),
    [(0, 60), *(pytest.param(s, 150, marks=pytest.mark.slow) for s in range(1, 16))],
)
def test_workers_that_join_and_leave_are_asked_as_in_the_event_simulation(seed, pushes):
    for theirs, ours in itertools.islice(rules(1), 0, RULES - 1, 1 + (seed == 0) * 2):
        rng = random.Random(seed)
        seconds = drawn(seed, 7)
        simulation = Simulation(3, seconds, theirs)
        with engines.simulated(make_job(3, seconds, pushes, 1, ours)) as run:
            for expected in simulation.run(pushes):
                assert answered(next(run.pushes)) == expected
                assert_closed(run)
                there = list(simulation.clocks)
                if rng.random() < 0.15 and len(there) < 7:
                    index = max(simulation.numbers) + 1
                    simulation.join(index)
                    assert run.add(worker_of(index, seconds)) == index
                elif rng.random() < 0.15 and len(there) > 1:
                    index = rng.choice(there)
                    simulation.leave(index)
                    run.remove(index)


# The originals.


def test_admission_decides_as_areal_does():
    """S: a start, A: accepted, R: rejected, V: the next version, 0-9: recovered."""
    decisions = 0
    for case in json.loads((GOLDEN / "areal.json").read_text())["cases"]:
        settings = case["settings"]
        batch = settings["consumer_batch_size"]
        rule = engines.admission(
            settings["max_staleness"], settings["max_concurrent_rollouts"], batch
        )
        running = accepted = version = 0
        for event, may in zip(case["sequence"], case["may_begin"], strict=True):
            running += {"S": 1, "A": -1, "R": -1}.get(event, 0)
            accepted += event == "A"
            version += event == "V"
            if event.isdigit():  # A resumed run begins with what was accepted.
                running, version = 0, int(event)
                accepted = version * batch
            progress = engines.Progress(
                worker=0,
                clocks={0: 0},
                local_steps=(version,) * running,
                global_step=version,
                accumulated=max(0, accepted - version * batch),
                started=accepted + running,
            )
            assert rule(progress) == (may == "1"), (case["name"], progress)
            decisions += 1
    assert decisions >= 20_000


@pytest.mark.slow
def test_gradients_that_are_given_up_leave_what_was_started():
    """Otherwise ``admission`` would run dry."""
    started = []

    def recorded(progress):
        started.append(progress.started - len(progress.local_steps))
        return engines.admission(3, 4)(progress)

    job = make_job(4, drawn(3, 4), 60, 1, recorded, max_staleness=0)
    _, counts = played(job)
    assert counts.given_up > 5
    assert counts.accepted == 60
    assert max(started) < 60
    late = gx.drop_stale(optax.sgd(1.0), 0)
    _, counts = played(make_job(4, drawn(3, 4), 60, 1, recorded)._replace(tx=late))
    assert counts.dropped > 5
    assert counts.accepted + counts.dropped == 60


# Threads.


def napping(seed, index):
    """A gradient that sleeps a random while."""
    rng = random.Random(f"{seed} {index}")

    def nap(params, *batch):
        time.sleep(rng.random() * 0.004 * (6 if index == 0 else 1))
        return gradient(params)

    return engines.Worker(nap)


@pytest.mark.parametrize(
    ("bound", "batch", "pushes", "come_and_go"),
    [
        (2, 1, 80, 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, 3, 300, 0.0), (4, 1, 300, 0.0), (2, 1, 500, 0.1))
        ),
    ],
)
def test_threads_keep_the_bound(bound, batch, pushes, come_and_go):
    """Also while workers come and go."""
    rng, there = random.Random(bound), set(range(6))
    job = make_job(0, [], pushes, batch, engines.bounded_staleness(bound, batch))
    job = job._replace(workers=[napping(bound, index) for index in range(6)])
    got = []
    with engines.threads(job) as run:
        for push in run.pushes:
            got.append(push)
            assert push.result.staleness <= bound
            assert push.waited >= 0
            assert push.computing > 0
            assert push.started < push.time
            assert_closed(run)
            if rng.random() < come_and_go and len(there) > 1:
                run.remove(there.pop())
            elif rng.random() < come_and_go:
                there.add(run.add(napping(bound, rng.random())))
        counts = assert_closed(run)
    assert counts.accepted == pushes == len(got)
    assert counts.dropped == counts.lost == counts.given_up == 0
    assert_in_order(got)


# Workers that die and streams that end at the wrong moment.


def dies_after_its_push(monkeypatch, when):
    """The process of a worker dies once, between its push and the answer."""
    push, dead = _simulated.WorkerGradient.push, []

    def push_and_die(self):
        done = push(self)
        if (done.worker, done.number) == when and not dead:
            dead.append(done)
            raise ServerDiedError
        return done

    monkeypatch.setattr(_simulated.WorkerGradient, "push", push_and_die)
    return dead


@pytest.mark.parametrize("number", range(3))
def test_a_repeated_push_waits_for_the_step_of_the_first_one(number, monkeypatch):
    """Worker 2 makes the step. If it dies then, its push comes again one step later."""
    dead = dies_after_its_push(monkeypatch, (number, 1))
    job = make_job(0, [1.0, 1.25, 1.5], 12, 3, required=3)
    pushes, _, run = ended(engines.simulated, job)
    assert run.server.stats().global_step == 4
    assert dead
    assert by_worker(pushes) == dict.fromkeys(range(3), 4)
    assert {push.number for push in pushes} == {*range(4)}


@pytest.mark.parametrize("when", [(0, 1), (1, 0), (1, 2), (0, 3)])
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

    job = make_job(0, [1.0, 1.0, 1.0, 1.0, 7.0], 40, 2, exact)
    with engines.simulated(job) as run:
        server.append(run.server)
        pushes = list(run.pushes)
    assert dead
    assert len({(push.worker, push.number) for push in pushes}) == 40
    assert max(push.result.staleness for push in pushes) <= 1


def test_an_ended_stream_is_not_in_the_way_in_the_same_round():
    """The others are asked again at once, without its clock and its gradient."""

    def stream_worker(length):
        stream = iter([()] * length)
        return make_worker(gradient, lambda _: next(stream), 1.0)

    job = make_job(0, [1.0, 1.0], 20, pace=engines.stale_synchronous(0))
    ends = stream_worker(2)._replace(duration=lambda _: 2.0)
    pushes = list_all(engines.simulated, job._replace(workers=[ends, *job.workers]))
    assert len(pushes) == 20
    # All may have a stream, and all may end in one round: that is no error either.
    workers = [stream_worker(length) for length in (2, 3, 3)]
    job = job._replace(workers=workers, pace=lambda p: not p.local_steps)
    assert len(list_all(engines.simulated, job)) == 8


def test_a_resume_keeps_the_clock_of_a_worker_that_joined(tmp_path):
    """Otherwise all others wait until it has caught up."""
    job = make_job(0, [1.0] * 3, 60, pace=engines.stale_synchronous(0))
    joins = make_worker(gradient, None, 1.0)
    with engines.simulated(job, checkpoint=tmp_path) as run:
        for done, _ in enumerate(run.pushes, 1):
            if done == 30:
                assert run.add(joins) == 3
    job = job._replace(pushes=100, workers=[*job.workers, joins])
    pushes = list_all(engines.simulated, job, checkpoint=tmp_path)
    assert by_worker(pushes) == dict.fromkeys(range(4), 10)


def resumed(pace=None, ahead=None):
    """A scheduler of workers 0, 1 and 2 at step 3, and its ledger.

    In the checkpoint workers 0 and 2 have made two pushes each, and 1 has made none.
    """
    answer = Answer(1, 2, gx.PushResult(True, 0, 3), 2)
    status = ServerStatus("now", 3, Tally(4, 4, {0: answer, 2: answer}), 1)
    ledger, job = Ledger(status), make_job(0, [], 9, pace=pace)
    return Scheduler(job, ledger, [0, 1, 2], ahead or {}), ledger


def test_who_has_waited_longest_begins_first():
    scheduler, ledger = resumed()
    assert scheduler.ahead == {1: 2}  # Nobody waits for a worker that joins.
    began = [*scheduler.begin([0, 1, 2], [2, 1, 0], 5.0)]
    assert began == [(0, 2), (1, 0), (2, 2)]
    assert ledger.begun[1] == (0, 3, 5.0, 5.0)
    scheduler.end(1, 6.0)
    scheduler.end(0, 7.0)
    scheduler.join([0, 1, 2, 9], 6.5)
    assert scheduler.ahead == {1: 2, 9: 2}
    assert [*scheduler.begin([0, 1, 9], [0, 1, 9], 8.0)] == [(1, 0), (9, 0), (0, 2)]
    assert [ledger.begun[i].waited for i in (1, 9, 0)] == [2.0, 1.5, 1.0]
    known = {0: 7}
    assert resumed(ahead=known)[0].ahead == {
        0: 7,
        1: 2,
    }  # The lowest clock is that of 2.
    assert known == {0: 7}


def test_a_rule_sees_what_has_begun_just_now():
    asked = []

    def pace(progress):
        asked.append(progress)
        with pytest.raises(TypeError):
            progress.clocks[0] = 9
        return progress.worker != 1

    for rule, workers in ((pace, [0, 1, 2]), (_pacing.Alike(pace), [0, 1])):
        scheduler, _ = resumed(rule)
        asked.clear()
        # All clocks are 2: what is no for one of them is no for the others.
        began = [i for i, _ in scheduler.begin([0, 1, 2], [0, 1, 2], 5.0)]
        assert began == [i for i in workers if i != 1]
        assert [each.worker for each in asked] == workers
        for each, local_steps in zip(asked, [(), (3,), (3,)], strict=False):
            assert each.clocks == {0: 2, 1: 2, 2: 2}
            assert each.local_steps == local_steps
            assert each.started == 4 + len(local_steps)
            assert (each.global_step, each.accumulated) == (3, 1)


def test_workers_with_equal_clocks_are_asked_about_once():
    """A push would cost a question for each of thousands that wait."""
    asked = []

    def counted(progress):
        asked.append(progress.worker)
        return progress.clocks[progress.worker] <= min(progress.clocks.values())

    job = make_job(0, [1.0] * 50 + [100.0], 101, pace=_pacing.Alike(counted))
    assert len(list_all(engines.simulated, job)) == 101
    assert len(asked) < 250  # More than a thousand if each that waits is asked.
    rules = (engines.stale_synchronous(0), engines.bounded_staleness(0))
    for rule in (*rules, engines.admission(0, 1)):
        assert isinstance(rule, _pacing.Alike)


# Errors.


@pytest.mark.every
@pytest.mark.parametrize(
    ("rule", "arguments", "name"),
    [
        (engines.stale_synchronous, (-1,), "slack"),
        (engines.bounded_staleness, (-1,), "max_staleness"),
        (engines.bounded_staleness, (1, 0), "num_required"),
        (engines.admission, (-1, 1), "max_staleness"),
        (engines.admission, (0, 0), "max_concurrent"),
        (engines.admission, (0, 1, 0), "num_required"),
    ],
)
def test_bad_arguments_of_rules_are_errors(rule, arguments, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        rule(*arguments)


@pytest.mark.every
@pytest.mark.parametrize("kind", [int, np.float32, jnp.float32])
def test_a_rule_answers_with_a_bool_of_python(kind):
    """A number of JAX would be compared on its device, for each question."""
    rules = [
        engines.stale_synchronous(kind(0)),
        engines.bounded_staleness(kind(1)),
        engines.admission(kind(2), kind(2)),
    ]
    progress = engines.Progress(0, {0: 3, 1: 3}, (3,), 3, 0, 4)
    late = progress._replace(clocks={0: 4, 1: 3}, local_steps=(1, 2), started=6)
    for rule in rules:
        assert rule(progress) is True
        assert rule(late) is False


def yields(progress):
    yield True


def says_nothing(progress):
    pass


def ends_a_stream(progress):
    next(iter(()))


def raises(progress):
    raise ArithmeticError("the rule itself")


NO_BOOL = r"^pace must return True or False, got a"


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [
        (yields, TypeError, NO_BOOL),
        (says_nothing, TypeError, NO_BOOL),
        (ends_a_stream, RuntimeError, r"^pace has raised StopIteration"),
        (raises, ArithmeticError, "the rule itself"),
        (lambda progress: False, ValueError, r"^pace"),
    ],
)
def test_a_rule_without_an_answer_ends_the_run(
    rule, error, match, after, engine, tmp_path
):
    """At once or later; what was done is saved."""

    def late(progress):
        return progress.started < after or rule(progress)

    job = make_job(0, [0.0, 0.0], 60, pace=late if after else rule)
    raised, run = fails(engine, job, error, match, checkpoint=tmp_path)
    if rule in (raises, ends_a_stream):
        assert "Raised by pace, for Progress(" in raised.__notes__[0]
    counts = assert_closed(run)
    if not after:
        assert not steps_in(tmp_path)
        return
    # Gradients that were under way are not waited for if the rule itself is at fault.
    assert counts.accepted == max(steps_in(tmp_path)) >= 5
    assert counts.accepted == 7 or error is not ValueError
    list_all(engine, job._replace(pace=None, pushes=10), checkpoint=tmp_path)
    assert max(steps_in(tmp_path)) == 10


def test_a_wrong_num_required_is_named():
    job = make_job(0, [1.0] * 4, 60, 4, engines.admission(0, 8))
    fails(engines.simulated, job, ValueError, r"(?s)^pace.*num_required")
