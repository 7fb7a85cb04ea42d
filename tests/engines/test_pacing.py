"""Rules that let workers wait, against an event simulation in plain Python.

The simulation below shares no code with the package. Each rule is restated in it as its
source has it: Petuum's vector clock, AReaL's counts, and for the bound all answers that
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


def make_job(workers, seconds, pushes, batch=1, pace=None, **more):
    members = [worker_of(index, seconds) for index in range(workers)]
    return engines.Job(
        jnp.zeros(()), stepping(batch), members, pushes, pace=pace, **more
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
    ended = counts.pushed + counts.given_up + counts.unanswered
    assert counts.started == counts.under_way + ended, counts
    assert counts.accepted + counts.dropped + counts.lost == counts.pushed
    assert min(*counts[:7], counts.under_way, counts.unanswered) >= 0
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


def compared(workers, seconds, batch, theirs, ours, pushes):
    """The pushes of both, if each push and each question to the rule is the same."""
    asked, expected = [], []

    def recorded(progress):
        may = ours(progress)
        asked.append((plain(progress), bool(may)))
        return may

    def rule(simulation, worker):
        may = theirs(simulation, worker)
        expected.append((plain(view(simulation, worker)), may))
        return may

    simulation = Simulation(workers, seconds, rule, batch)
    done = list(simulation.run(pushes))
    got, counts = played(make_job(workers, seconds, pushes, batch, ours and recorded))
    assert [answered(push) for push in got] == done
    assert asked == (expected if ours else [])
    assert counts.started == simulation.begun
    return done


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
    pushes = compared(workers, rng.choice(choices), batch, theirs, ours, 120)
    if (theirs, ours) == of_bound:
        assert max(push.staleness for push in pushes) <= bound


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


# Errors.


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: engines.stale_synchronous(-1), ValueError, "slack"),
        (lambda: engines.bounded_staleness(-1), ValueError, "max_staleness"),
        (lambda: engines.bounded_staleness(1, 0), ValueError, "num_required"),
        (lambda: engines.admission(-1, 1), ValueError, "max_staleness"),
        (lambda: engines.admission(0, 0), ValueError, "max_concurrent"),
        (lambda: engines.admission(0, 1, 0), ValueError, "num_required"),
    ],
)
def test_bad_arguments_of_rules_are_errors(make, error, name):
    with pytest.raises(error, match=f"^{name} must be"):
        make()


def last_saved(folder):
    """How many pushes the newest checkpoint holds."""
    return max(int(p.name) for p in folder.iterdir() if p.name.isdigit())


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
