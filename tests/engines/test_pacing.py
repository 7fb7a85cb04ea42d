"""Rules that let workers wait, against an event simulation in plain Python.

The simulation below shares no code with the package. Each rule is restated in it as its
source has it: Petuum's vector clock, AReaL's counts, and for the bound all answers that
may come before the oldest gradient are played through.
"""

import functools
import heapq
import itertools
import json
import math
import pathlib
import random
import threading
import time
import types
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from gradxform.engines import _pool, _threads
from gradxform.engines._ledger import Ledger
from gradxform.engines._pool import WorkerPool
from gradxform.engines._scheduler import Scheduler
from gradxform.engines._work import GivenUpError, ServerDiedError
from tests.engines.test_ledger import World

pytestmark = pytest.mark.usefixtures("bounded")

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


# The simulation.


class Gradient(NamedTuple):
    """A gradient under way; its owner is the worker that has this number."""

    owner: int
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

    def __init__(self, workers, seconds, rule, batch=1, deadline=math.inf):
        self.seconds, self.rule, self.batch = seconds, rule, batch
        self.deadline = deadline
        self.now, self.step, self.summed, self.accepted = 0.0, 0, 0, 0
        self.there = set(range(workers))
        self.ticks = dict.fromkeys(range(workers), 0)
        self.numbers = dict.fromkeys(range(workers), 0)
        self.free = dict.fromkeys(range(workers), 0.0)  # Since when.
        self.under_way = {}  # By the worker that computes it.
        self.late = {}  # The same, past the deadline.
        self.handed = []  # Owner and number, for somebody else.
        self.events = []
        self.begun = self.unanswered = 0

    def join(self, worker):
        """A new worker; its clock is the lowest."""
        self.ticks[worker] = min(self.clocks.values())
        self.there.add(worker)
        self.numbers[worker], self.free[worker] = 0, self.now

    def leave(self, worker):
        """Its gradient under way, if any, is its last."""
        self.there.remove(worker)
        self.free.pop(worker, None)

    @property
    def clocks(self):
        """Those who are gone, or past their deadline, have none."""
        return {w: self.ticks[w] for w in self.there - self.late.keys()}

    def pass_deadlines(self):
        """What is too late counts no longer, and is there for somebody else, once."""
        for worker, begun in sorted(
            self.under_way.items(), key=lambda each: (each[1].started, each[0])
        ):
            if self.now >= begun.started + self.deadline:
                self.late[worker] = self.under_way.pop(worker)
                if begun.owner == worker:
                    self.handed.append((worker, begun.number))

    def ask(self):
        """Those who have waited longest are first."""
        self.pass_deadlines()
        for worker in sorted(self.free, key=lambda w: (self.free[w], w)):
            if not self.rule(self, worker):
                continue
            owner, number = worker, self.numbers[worker]
            if self.handed:
                owner, number = self.handed.pop(0)
            waited = self.now - self.free.pop(worker)
            self.under_way[worker] = Gradient(
                owner, number, self.step, self.now, waited
            )
            self.begun += 1
            done = self.now + self.seconds(worker, number)
            heapq.heappush(self.events, (done, worker))

    def run(self, pushes):
        """Gives each answered push; the next ones are begun after it."""
        self.ask()
        while pushes:
            if not (self.under_way or self.late):
                raise Stalled
            passes = min(
                (begun.started for begun in self.under_way.values()), default=math.inf
            )
            if passes + self.deadline < self.events[0][0]:
                self.now = passes + self.deadline
                self.ask()
                continue
            self.now, worker = heapq.heappop(self.events)
            if self.now == math.inf:
                return
            self.pass_deadlines()
            for answered in self.answer(worker):
                pushes -= 1
                yield answered
            if pushes:
                self.ask()

    def answer(self, worker):
        if worker in self.late:  # It is back, and no slower than the slowest.
            lowest = min(self.clocks.values(), default=0)
            self.ticks[worker] = max(self.ticks[worker], lowest)
        gradient = self.under_way.pop(worker, None) or self.late.pop(worker)
        owner, number, local_step, started, waited = gradient
        if worker in self.there:
            self.free[worker] = self.now
        if number < self.numbers[owner]:  # Another was first.
            self.unanswered += 1
            return
        if (owner, number) in self.handed:
            self.handed.remove((owner, number))
        self.numbers[owner] += 1
        self.ticks[owner] += 1
        self.accepted += 1
        staleness = self.step - local_step
        self.summed += 1
        if self.summed == self.batch:
            self.summed, self.step = 0, self.step + 1
        yield Answered(
            *(owner, number, local_step, started, waited, self.now),
            *(staleness, self.step),
        )


class VectorClock:
    """Petuum's: it moves its least clock only when the last one of the least ticks."""

    def __init__(self, workers):
        self.clocks, self.least = dict.fromkeys(workers, 0), 0

    def tick(self, worker):
        alone = [w for w, c in self.clocks.items() if c == self.least] == [worker]
        self.clocks[worker] += 1
        self.least += alone


def stale_synchronous(slack):
    """A read at clock c needs all writes up to clock max(0, c - slack)."""

    def rule(simulation, worker):
        vector = VectorClock(simulation.clocks)
        for each, count in simulation.clocks.items():
            for _ in range(count):
                vector.tick(each)
        return vector.least >= max(0, simulation.clocks[worker] - slack)

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


def own(simulation, worker):
    """A rule that looks at everything."""
    running = simulation.under_way.values()
    mixed = worker + simulation.clocks[worker] + 2 * simulation.step
    mixed += simulation.summed + simulation.accepted + len(running)
    mixed += sum(g.local_step for g in running)
    return not running or mixed % 3 > 0


def own_of_a_user(progress):
    """The same for the package."""
    mixed = progress.worker + progress.clocks[progress.worker]
    mixed += 2 * progress.global_step + progress.accumulated + progress.started
    mixed += sum(progress.local_steps)
    return not progress.local_steps or mixed % 3 > 0


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
    yield own, own_of_a_user
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


def asks(rule):
    """A rule of the package, in the simulation."""
    return lambda simulation, worker: rule(view(simulation, worker))


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


def stepping(batch):
    """A transformation that makes a step of ``batch`` pushes, however late they are."""
    return optax.sgd(1.0) if batch == 1 else gx.accumulate(optax.sgd(1.0), batch)


def worker_of(index, seconds):
    return engines.Worker(gradient, duration=lambda n: seconds(index, n))


def make_job(workers, seconds, pushes, batch=1, pace=None, deadline=None, **more):
    members = [worker_of(index, seconds) for index in range(workers)]
    return engines.Job(
        jnp.zeros(()),
        stepping(batch),
        members,
        pushes,
        pace=pace,
        deadline=deadline,
        **more,
    )


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
    assert counts.started == (
        counts.under_way
        + counts.accepted
        + counts.dropped
        + counts.lost
        + counts.given_up
        + counts.unanswered
    ), counts
    assert counts.accepted + counts.dropped + counts.lost == counts.pushed
    assert min(counts[:7]) >= 0
    assert counts.under_way >= 0
    assert counts.unanswered >= 0
    for name in ("accepted", "dropped", "given_up"):
        shares = [getattr(each, name) for each in counts.by_worker.values()]
        assert sum(shares) == getattr(counts, name), (name, counts)
    return counts


def played(job, engine=engines.simulated):
    """All pushes of a run, with the ledger checked at each."""
    pushes, counts = played_on(job, None, engine)
    assert len(pushes) == counts.pushed
    return pushes, counts


def played_on(job, folder, engine=engines.simulated):
    """The same for a run that goes on from a checkpoint."""
    with engine(job, checkpoint=folder) as run:
        pushes = []
        for push in run.pushes:
            pushes.append(push)
            assert_closed(run)
        return pushes, assert_closed(run)


# The same pushes.


def compared(workers, seconds, batch, theirs, ours, pushes, deadline=None):
    """Runs both; compares each push, and each question to the rule."""
    asked, expected = [], []

    def recorded(progress):
        may = ours(progress)
        asked.append((plain(progress), bool(may)))
        return may

    def rule(simulation, worker):
        may = theirs(simulation, worker)
        expected.append((plain(view(simulation, worker)), may))
        return may

    simulation = Simulation(workers, seconds, rule, batch, deadline or math.inf)
    simulation.done = list(simulation.run(pushes))
    job = make_job(workers, seconds, pushes, batch, ours and recorded, deadline)
    got, counts = played(job)
    assert [answered(push) for push in got] == simulation.done
    assert asked == (expected if ours else [])
    assert counts.started == simulation.begun
    return simulation, counts


RULES = len(list(rules(1)))


@pytest.mark.every
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("number", range(RULES))
def test_simulated_runs_as_the_event_simulation(number, batch):
    theirs, ours = list(rules(batch))[number]
    seconds = one_slow(4) if (number + batch) % 2 else long_tasks(number)
    compared(4, seconds, batch, theirs, ours, 25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_simulated_runs_as_the_event_simulation_at_random(seed):
    rng = random.Random(seed)
    workers, batch = rng.randint(1, 12), rng.randint(1, 5)
    bound = rng.randint(0, 15)
    theirs, ours = rng.choice(
        [
            *rules(batch),
            (stale_synchronous(bound), engines.stale_synchronous(bound)),
            (bounded_staleness(bound), engines.bounded_staleness(bound, batch)),
            (admission(bound, 5), engines.admission(bound, 5, batch)),
        ]
    )
    choices = [one_slow(workers), long_tasks(seed), drawn(seed, workers)]
    compared(workers, rng.choice(choices), batch, theirs, ours, 120)


def test_workers_that_join_and_leave_are_asked_as_in_the_event_simulation():
    check_coming_and_going(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 40))
def test_workers_that_join_and_leave_at_random(seed):
    check_coming_and_going(seed, 150)


def check_coming_and_going(seed, pushes):
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


def test_a_worker_whose_stream_has_ended_has_no_clock():
    """Otherwise all others would wait for it, for good."""
    stream = iter([()] * 3)
    ends = engines.Worker(gradient, lambda _: next(stream), lambda _: 1.0)
    job = make_job(2, one_slow(9), 40, 1, engines.stale_synchronous(0))
    pushes, _ = played(job._replace(workers=[*job.workers, ends]))
    assert len(pushes) == 40
    assert [push.number for push in pushes if push.worker == 2] == [0, 1, 2]


# The bound is never broken, nothing stalls, and long tasks keep their share.


def check_bound(seed, pushes=150):
    """The package's rule in the plain simulation."""
    rng = random.Random(seed)
    workers, bound = rng.randint(1, 12), rng.randint(0, 15)
    batch = rng.randint(1, 5)
    rule = engines.bounded_staleness(bound, batch)
    seconds = rng.choice(
        [one_slow(workers), long_tasks(seed), drawn(seed, workers)],
    )
    simulation = Simulation(workers, seconds, asks(rule), batch)
    done = list(simulation.run(pushes))  # Stalled otherwise.
    assert len(done) == pushes
    latest = max(push.staleness for push in done)
    assert latest <= bound
    return latest == bound


def test_no_push_is_later_than_the_bound_and_nothing_stalls():
    reached = [check_bound(seed) for seed in range(60)]
    assert any(reached)  # A rule that never reached its bound would wait too much.


def test_a_slow_worker_keeps_its_share_and_nothing_is_dropped():
    """A threshold drops each push of the slow one; the rule lets the others wait."""
    job = make_job(8, one_slow(8), 200)
    late = job._replace(tx=gx.drop_stale(optax.sgd(1.0), 20))
    _, counts = played(late)
    assert counts.by_worker[7].accepted == 0
    assert counts.by_worker[7].dropped == counts.dropped > 0
    job = late._replace(pace=engines.bounded_staleness(20))
    pushes, counts = played(job)
    assert counts.dropped == counts.given_up == 0
    assert max(push.result.staleness for push in pushes) <= 20
    shares = {w: each.accepted / 200 for w, each in counts.by_worker.items()}
    # Of 8 workers, one 5.34 times as slow: 1 / (7 x 5.34 + 1) = 0.026 without waits.
    assert shares[7] > 0.025


# The originals.


def areal_cases():
    return json.loads((GOLDEN / "areal.json").read_text())["cases"]


def test_admission_decides_as_areal_does():
    """S: a start, A: accepted, R: rejected, V: the next version, 0-9: recovered."""
    decisions = 0
    for case in areal_cases():
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


# What went wrong elsewhere.


def stuck(worker, number, seconds=math.inf):
    """Durations in which one worker does not come back from one number."""
    return lambda w, n: seconds if (w, n) == (worker, number) else 1.0 + w / 64


def check_deadline(workers, seconds, batch, theirs, ours, deadline, pushes):
    simulation, counts = compared(
        *(workers, seconds, batch, theirs, ours, pushes, deadline)
    )
    assert counts.unanswered == simulation.unanswered
    # A gradient past its deadline is under way, though no rule counts it.
    assert counts.under_way == len(simulation.under_way) + len(simulation.late)
    return simulation.done, counts


def test_a_task_that_was_done_twice_counts_once():
    """A counter that took a finished task for one under way stopped verl (7938).

    Number 2 of worker 1 takes 10 seconds. After 3 another worker has it as well, and
    is done first. Later the owner is done with it, too.
    """
    concurrent, seconds = 3, stuck(1, 2, 10.0)
    pair = admission(0, concurrent), engines.admission(0, concurrent)
    pushes, counts = check_deadline(3, seconds, 1, *pair, 3 + 1 / 128, 60)
    assert [push.number for push in pushes if push.worker == 1][:5] == [*range(5)]
    assert len({(push.worker, push.number) for push in pushes}) == 60
    assert counts.accepted == 60
    assert counts.unanswered == 1
    twice = next(push for push in pushes if (push.worker, push.number) == (1, 2))
    assert twice.time - twice.started < 3


def test_the_owner_may_be_first_after_all():
    """Then what the other worker has computed changes nothing, however late it comes.

    Worker 0 takes over number 2 of worker 1 and is slow itself. Worker 1 has pushed
    numbers 2, 3, ... before worker 0 is done.
    """

    def seconds(worker, number):
        if number == 2:
            return {0: 30.0, 1: 6.0}[worker] if worker < 2 else 1.0
        return 1.0 + worker / 64

    pushes, counts = check_deadline(
        2, seconds, 1, lambda simulation, worker: True, None, 2 + 1 / 128, 60
    )
    numbers = [push.number for push in pushes if push.worker == 1]
    assert numbers == [*range(len(numbers))]
    assert counts.unanswered >= 1


@pytest.mark.parametrize("batch", [1, 3])
def test_a_deadline_runs_as_the_event_simulation(batch):
    for seed in range(2):
        check_random_deadline(seed, batch, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_a_deadline_runs_as_the_event_simulation_at_random(seed):
    check_random_deadline(seed, 1 + seed % 4, 150)


def check_random_deadline(seed, batch, pushes):
    """Long tasks are past the deadline of 4 s; some never come."""
    rng = random.Random(seed)
    workers, bound = rng.randint(3, 8), rng.randint(0, 8)
    never = {(rng.randrange(1, workers), rng.randrange(20)) for _ in range(2)}
    tasks = long_tasks(seed)

    def seconds(worker, number):
        taken = tasks(worker, number) + worker / 64
        return math.inf if (worker, number) in never else taken

    theirs, ours = rng.choice(
        [
            (stale_synchronous(bound), engines.stale_synchronous(bound)),
            (bounded_staleness(bound), engines.bounded_staleness(bound, batch)),
            (admission(bound, 4), engines.admission(bound, 4, batch)),
            (own, own_of_a_user),
        ]
    )
    check_deadline(workers, seconds, batch, theirs, ours, 4 + 1 / 128, pushes)


def test_a_number_from_before_a_death_of_the_server_is_not_handed_on():
    """The server goes back to number 0 of worker 1. Number 2 would skip 0 and 1."""
    world = World()
    ledger = Ledger(world.status)
    job = make_job(2, one_slow(2), 20, deadline=4.0)
    members = dict(enumerate(job.workers))
    scheduler = Scheduler(job, ledger, members, {})
    for number in range(3):
        scheduler.survey(members, float(number))
        assert scheduler.begin(1)[:2] == (1, number)
        if number < 2:
            push = world.push(1, number)
            scheduler.end(1, members, float(number))
            ledger.add(1, push)
    world.begin()
    assert ledger.go_back(world.status) == 2
    scheduler.survey(members, 100.0)
    assert scheduler.begin(0)[:2] == (0, 0)


@pytest.mark.parametrize("outcome", [GivenUpError(), ServerDiedError()])
def test_a_number_is_handed_on_again_if_a_helper_gives_it_back(outcome):
    run = Fleet(make_job(3, one_slow(3), 20, deadline=4.0))
    run.now = 5.0  # Then all three are late, and two are free again.
    for helper, expected in ((1, (0, 0)), (2, (2, 0)), (1, (0, 0))):
        list(run._take(helper, outcome))
        run._scheduler.survey(run._members, run.now)
        assert run._scheduler.begin(helper)[:2] == expected


class Fleet(WorkerPool):
    """A pool without an engine, in which everybody has begun."""

    def __init__(self, job):
        super().__init__(job)
        self.now, world = 0.0, World()
        begin, status = (lambda: world.status), world.status_now
        self.begin(types.SimpleNamespace(begin=begin, status=status))
        self._scheduler.survey(self._members, self.now)
        for index in self._members:
            self._scheduler.begin(index)

    def _clock(self):
        return self.now


RULES_OF_ALL = {
    "stale_synchronous": engines.stale_synchronous(0),
    "bounded_staleness": engines.bounded_staleness(1),
    "admission": engines.admission(0, 2),
    "own": lambda progress: not progress.local_steps,
}


@pytest.mark.every
@pytest.mark.parametrize("name", RULES_OF_ALL)
def test_a_worker_that_never_comes_back_stops_nobody(name):
    rule, seconds = RULES_OF_ALL[name], stuck(1, 3)
    # Without a deadline the others wait, and then there is nothing more to come.
    pushes, counts = played(make_job(3, seconds, 60, 1, rule))
    assert counts.pushed < 20
    pushes, counts = played(make_job(3, seconds, 60, 1, rule, 5.0))
    assert counts.accepted == 60
    handed = next(push for push in pushes if (push.worker, push.number) == (1, 3))
    assert handed.waited >= 0
    assert {push.worker for push in pushes[-5:]} <= {0, 2}
    assert counts.under_way >= 1  # The one that never comes.


@pytest.mark.parametrize(
    "name",
    [
        "stale_synchronous",
        pytest.param("bounded_staleness", marks=pytest.mark.slow),
        pytest.param("own", marks=pytest.mark.slow),
    ],
)
def test_a_task_that_nobody_ends_does_not_stop_a_run_after_each_resume(
    name, tmp_path, monkeypatch
):
    """A stuck task stopped NeMo-RL (3238) at the same step after every resume.

    Whoever computes number 3 of worker 1 does not come back. So each time two of the
    five workers are lost, and the others go on.
    """
    for module in _pool, _threads:
        monkeypatch.setattr(module, "LOOK", 0.05)
    over, stuck_now = threading.Event(), []

    def stuck_at_one(params, index, number):
        if (index, number) == (1, 3):
            stuck_now.append(True)
            over.wait(60)
        return gradient(params)

    def worker(index):
        return engines.Worker(stuck_at_one, lambda number: (index, number))

    job = make_job(0, None, 0, 1, RULES_OF_ALL[name], 0.1)
    job = job._replace(workers=[worker(index) for index in range(5)])
    try:
        for goal in (30, 60):
            stuck_now.clear()
            pushes, counts = played_on(
                job._replace(pushes=goal),
                tmp_path,
                functools.partial(engines.threads, join_timeout=0.0),
            )
            assert len(pushes) == 30
            assert counts.accepted == goal
            assert (1, 3) not in {(push.worker, push.number) for push in pushes}
            assert len(stuck_now) == 2
    finally:
        over.set()


def test_after_a_resume_no_more_begin_than_the_rule_allows(tmp_path):
    """In AReaL all of max_staleness batches were begun anew at once.

    There, too, what was accepted before counts: 7 pushes are 2 steps and one push in
    the sum, so with S = 1 and B = 3 at most (1 + 2 + 1) 3 - 7 = 5 may begin.
    """
    asked, rule = [], engines.admission(1, 100, 3)

    def recorded(progress):
        asked.append((progress, rule(progress)))
        return asked[-1][1]

    job = make_job(12, lambda w, n: 1.0 + w / 64, 7, 3, recorded)
    played_on(job, tmp_path)
    asked.clear()
    with engines.simulated(job._replace(pushes=40), checkpoint=tmp_path) as run:
        next(run.pushes)
        first, _ = asked[0]
        assert (first.global_step, first.accumulated, first.started) == (2, 1, 7)
        assert sum(may for _, may in asked) == 5
        assert_closed(run)
        list(run.pushes)
    most = max(
        progress.started + may - 3 * progress.global_step for progress, may in asked
    )
    assert most == 6


@pytest.mark.parametrize("batch", [1, 3])
def test_a_resumed_run_keeps_the_bound(batch, tmp_path):
    """It is stopped in the middle of a sum that holds late gradients."""
    rule = engines.bounded_staleness(2, batch)
    for goal in (7, 17, 30):
        job = make_job(6, long_tasks(goal), goal, batch, rule)
        pushes, counts = played_on(job, tmp_path)
        assert max(push.result.staleness for push in pushes) <= 2
        assert counts.accepted == goal
        shares = counts.by_worker
        assert sum(share.accepted for share in shares.values()) == goal


def test_after_a_resume_the_clocks_are_those_of_the_checkpoint(tmp_path):
    """A worker that was ahead before is ahead still, and waits."""
    job = make_job(2, one_slow(2), 12, 1, engines.stale_synchronous(3))
    pushes, _ = played_on(job, tmp_path)
    ahead = [push.worker for push in pushes].count(0)
    asked, rule = [], engines.stale_synchronous(3)

    def recorded(progress):
        asked.append(dict(progress.clocks))
        return rule(progress)

    with engines.simulated(
        job._replace(pace=recorded, pushes=13), checkpoint=tmp_path
    ) as run:
        assert [push.worker for push in run.pushes] == [1]
    assert asked[0] == {0: ahead, 1: 12 - ahead}


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


def napping(seed, index, most):
    """A gradient that sleeps a random while."""
    rng = random.Random(f"{seed} {index}")

    def nap(params, *batch):
        time.sleep(rng.random() * most * (6 if index == 0 else 1))
        return gradient(params)

    return engines.Worker(nap)


def threaded(seed, rule, batch=1, pushes=200, workers=6, most=0.004):
    members = [napping(seed, index, most) for index in range(workers)]
    return make_job(0, None, pushes, batch, rule)._replace(workers=members)


def test_threads_keep_the_bound():
    check_threads(0, 2, 1, 80)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "batch"), list(itertools.product((0, 1, 4, 9), (1, 3)))
)
def test_threads_keep_the_bound_with_random_sleeps(bound, batch):
    check_threads(bound + batch, bound, batch, 600)


def check_threads(seed, bound, batch, pushes):
    job = threaded(seed, engines.bounded_staleness(bound, batch), batch, pushes)
    got, counts = played(job, engines.threads)
    assert max(push.result.staleness for push in got) <= bound
    assert counts.accepted == pushes
    assert counts.dropped == counts.lost == counts.given_up == 0
    for index in range(6):
        numbers = [push.number for push in got if push.worker == index]
        assert numbers == [*range(len(numbers))]
    assert all(
        push.waited >= 0 and push.computing > 0 and push.started < push.time
        for push in got
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_threads_keep_the_bound_while_workers_join_and_leave(seed):
    rng, bound = random.Random(seed), 2
    job = threaded(seed, engines.bounded_staleness(bound), 1, 500)
    there = set(range(6))
    with engines.threads(job) as run:
        for push in run.pushes:
            assert push.result.staleness <= bound
            assert_closed(run)
            if rng.random() < 0.1 and len(there) > 1:
                index = rng.choice(sorted(there))
                run.remove(index)
                there.remove(index)
            elif rng.random() < 0.1:
                there.add(run.add(napping(seed, rng.random(), 0.004)))
        counts = assert_closed(run)
    assert counts.accepted == 500


def test_a_thread_that_blocks_stops_nobody_after_the_deadline():
    """Its number is given to another worker; when it is back, it changes nothing."""
    waits, back = threading.Event(), threading.Event()
    first = []

    def blocked(params, *batch):
        if not first:
            first.append(True)
            waits.wait(60)
            back.set()
        return gradient(params)

    members = [engines.Worker(blocked), engines.Worker(gradient)]
    job = make_job(0, None, 60, 1, engines.stale_synchronous(0), 0.1)
    with engines.threads(job._replace(workers=members)) as run:
        pushes = []
        for push in run.pushes:
            pushes.append(push)
            counts = assert_closed(run)
            if len(pushes) == 30:
                assert counts.unanswered == 0
                waits.set()
                assert back.wait(60)
            if len(pushes) > 30:
                time.sleep(0.01)
        counts = assert_closed(run)
    assert counts.accepted == 60
    assert counts.unanswered >= 1
    ours = [push.number for push in pushes if push.worker == 0]
    assert ours == [*range(len(ours))]
    assert len({(push.worker, push.number) for push in pushes}) == 60


# Errors.


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: engines.stale_synchronous(-1), ValueError, "slack"),
        (lambda: engines.stale_synchronous("1"), TypeError, "slack"),
        (lambda: engines.bounded_staleness(-1), ValueError, "max_staleness"),
        (lambda: engines.bounded_staleness("2"), TypeError, "max_staleness"),
        (lambda: engines.bounded_staleness(1, 0), ValueError, "num_required"),
        (lambda: engines.bounded_staleness(1, 1.5), TypeError, "num_required"),
        (lambda: engines.admission(-1, 1), ValueError, "max_staleness"),
        (lambda: engines.admission(0, 0), ValueError, "max_concurrent"),
        (lambda: engines.admission(0, "1"), TypeError, "max_concurrent"),
        (lambda: engines.admission(0, 1, 0), ValueError, "num_required"),
    ],
)
def test_bad_arguments_of_rules_are_errors(make, error, name):
    with pytest.raises(error, match=f"^{name} must be"):
        make()


@pytest.mark.every
@pytest.mark.parametrize(
    ("given", "error", "name"),
    [
        ({"pace": 3}, TypeError, "pace"),
        ({"pace": "bounded_staleness"}, TypeError, "pace"),
        ({"deadline": 0}, ValueError, "deadline"),
        ({"deadline": -1.0}, ValueError, "deadline"),
        ({"deadline": math.nan}, ValueError, "deadline"),
        ({"deadline": "3"}, TypeError, "deadline"),
    ],
)
@pytest.mark.parametrize("engine", [engines.simulated, engines.threads])
def test_bad_arguments_of_a_job_are_errors(given, error, name, engine):
    job = make_job(2, lambda w, n: 0.0, 4)._replace(**given)
    with pytest.raises(error, match=f"^{name}"), engine(job):
        pass


def last_saved(folder):
    """How many pushes the newest checkpoint holds."""
    return max(int(p.name) for p in folder.iterdir() if p.name.isdigit())


LOCAL = [engines.simulated, engines.threads]


@pytest.mark.parametrize("engine", LOCAL)
def test_a_rule_that_lets_nobody_begin_is_an_error(engine, tmp_path):
    job = make_job(2, lambda w, n: 0.0, 60, 1, lambda progress: False)
    with pytest.raises(ValueError, match=r"^pace"), engine(job) as run:
        next(run.pushes)
    # Later in a run, too; what was done is saved.
    job = job._replace(pace=lambda progress: progress.started < 7)
    with (
        pytest.raises(ValueError, match=r"^pace"),
        engine(job, checkpoint=tmp_path) as run,
    ):
        list(run.pushes)
    assert run.counts().accepted == last_saved(tmp_path) == 7
    assert_closed(run)


@pytest.mark.parametrize("engine", LOCAL)
def test_a_gradient_past_its_deadline_does_not_hide_that_nobody_may_begin(engine):
    """One worker never comes back; a rule that waits for it would wait for good."""
    over, endless, once = threading.Event(), engine is engines.simulated, []

    def stuck_here(params):
        if not (endless or once):
            once.append(True)
            over.wait(60)
        return gradient(params)

    seconds = math.inf if endless else 0.0
    stuck_worker = engines.Worker(stuck_here, duration=lambda n: seconds)
    job = make_job(1, lambda w, n: 0.0, 60, 1, lambda p: p.started < 7, 0.2)
    job = job._replace(workers=[*job.workers, stuck_worker])
    options = {} if endless else {"join_timeout": 0.0}
    with pytest.raises(ValueError, match=r"^pace"), engine(job, **options) as run:
        list(run.pushes)
    over.set()
    assert run.counts().accepted == 7
    assert_closed(run)


@pytest.mark.parametrize("engine", LOCAL)
def test_admission_with_another_batch_than_that_of_tx_is_an_error(engine):
    job = make_job(4, lambda w, n: 0.0, 60, 3, engines.admission(1, 8, 1))
    with pytest.raises(ValueError, match=r"^pace"), engine(job) as run:
        list(run.pushes)
    assert run.counts().accepted == 2


@pytest.mark.parametrize("engine", LOCAL)
def test_a_rule_that_raises_ends_the_run_with_its_error(engine, tmp_path):
    def rule(progress):
        if progress.started >= 5:
            raise ArithmeticError("the rule itself")
        return True

    job = make_job(2, lambda w, n: 0.0, 60, 1, rule)
    with (
        pytest.raises(ArithmeticError, match="the rule itself") as raised,
        engine(job, checkpoint=tmp_path) as run,
    ):
        list(run.pushes)
    assert any("pace" in note for note in raised.value.__notes__)
    assert last_saved(tmp_path) == run.counts().accepted >= 3
    assert_closed(run)
    job = job._replace(pace=None, pushes=10)
    with engine(job, checkpoint=tmp_path) as run:
        list(run.pushes)
    assert run.counts().accepted == 10
