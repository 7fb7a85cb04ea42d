"""The ledger knows what became of each push, in any order of answers and deaths.

The test plays through a world: a server that applies pushes, saves itself, dies while
answers are on their way, and goes back. The test knows what it holds in the end. It
asks the ledger itself: with real processes, 200 such stories would take an hour.
"""

import dataclasses

import numpy as np
import pytest

from gradxform import PushResult
from gradxform._server.records import Answer, GlobalStep, ServerStatus, Tally
from gradxform.engines import Push
from gradxform.engines._ledger import Begun, Ledger


class World:
    """A server without arrays; every third push is too late."""

    def __init__(self):
        self.incarnations, self.done, self.answers = 0, 0, {}
        self.acts = 0  # How many pushes it computes, repeated ones as well.
        self.save()
        self.begin()

    def push(self, worker, number):
        """The answer; from memory if the push comes again."""
        last = self.answers.get(worker)
        if last is not None and last.number == number:
            result = last.result
        else:
            assert number == (0 if last is None else last.number + 1)
            self.done += 1
            self.acts += 1
            applied = self.done % 3 > 0
            result = PushResult(applied, 0, self.done)
            accepted = applied + (0 if last is None else last.accepted)
            self.answers[worker] = Answer(number, self.done - 1, result, accepted)
        seen = GlobalStep(self.done - 1, str(self.incarnations))
        return Push(worker, number, seen, 0.0, 0.0, result)

    def save(self):
        self.saved = self.done, dict(self.answers)

    def begin(self):
        self.incarnations += 1
        self.done, self.answers = self.saved[0], dict(self.saved[1])
        self.status = self.status_now()

    def status_now(self):
        applied = self.done - self.done // 3
        return ServerStatus(
            str(self.incarnations),
            self.done,
            Tally(self.done, applied, dict(self.answers)),
        )


@pytest.mark.parametrize("seed", range(200))
def test_every_push_is_accounted_for(seed):
    rng = np.random.default_rng(seed)
    world = World()
    ledger = Ledger(world.status)
    workers, goal, answered = 4, 60, 0
    on_the_way = {}  # By worker: answers that have left the server and not arrived.
    asked = {}  # Pushes that have not reached it yet.
    unheard = []
    starts = 0
    while ledger.tally.pushes < goal:
        for worker in range(workers):
            if worker in asked or worker in on_the_way:
                continue
            if ledger.tally.pushes + len(asked) + len(on_the_way) < goal:
                number = ledger.next(worker)
                asked[worker] = number, str(world.incarnations)
                ledger.begun[worker] = Begun(number, 0, 0.0, 0.0)
                starts += 1
        event = rng.choice(["arrive", "arrive", "answer", "answer", "save", "die"])
        if event == "save":
            world.save()
        elif event == "arrive" and asked:
            worker = int(rng.choice([*asked]))
            number, incarnation = asked.pop(worker)
            if incarnation == str(world.incarnations):  # Otherwise its server is gone.
                on_the_way[worker] = world.push(worker, number)
            else:
                ledger.leave_unanswered(worker)
        elif event == "answer" and on_the_way:
            worker = int(rng.choice([*on_the_way]))
            answered += 1
            ledger.add(on_the_way.pop(worker))
        elif event == "die" and rng.random() < 0.3:
            world.begin()
            silent = []
            for worker in [*on_the_way]:
                if rng.random() < 0.5:  # Its answer is lost; the others arrive late.
                    silent.append(worker)
                    unheard.append(on_the_way.pop(worker))
            before = ledger.counts.lost
            lost = ledger.go_back(world.status)
            assert lost == ledger.counts.lost - before
            assert ledger.go_back(world.status) is None
            for worker in silent:
                ledger.leave_unanswered(worker)
        assert_closed(ledger, starts, len(asked) + len(on_the_way))
    assert_accounts(ledger, world, goal)
    assert 0 <= ledger.counts.pushed - answered <= len(unheard) + len(on_the_way)
    # At the end of a run it takes over the server's counts, which are the same.
    counts = ledger.counts
    ledger.settle(world.status_now())
    assert ledger.counts == counts
    # From then on, answers that nobody has heard count, too.
    before = world.done
    heard = world.push(0, ledger.next(0))
    world.push(1, ledger.next(1))
    ledger.add(heard)
    ledger.settle(world.status_now())
    assert_accounts(ledger, world, before + 2)
    assert ledger.next(1) == world.answers[1].number + 1


def assert_closed(ledger, starts, under_way):
    counts = ledger.counts
    assert counts.started == starts
    assert counts.under_way <= under_way  # A checkpoint may have counted some.
    by_worker = counts.by_worker.values()
    assert sum(each.accepted for each in by_worker) == counts.accepted
    assert sum(each.dropped for each in by_worker) == counts.dropped
    ended = counts.pushed + counts.given_up + counts.unanswered
    assert counts.started == counts.under_way + ended


def assert_accounts(ledger, world, goal):
    counts = ledger.counts
    assert counts.accepted + counts.dropped == goal == world.done
    assert counts.accepted == world.done - world.done // 3
    assert counts.pushed == goal + counts.lost
    assert sum(a.number + 1 for a in world.answers.values()) == goal


def test_the_checkpoint_names_waiting_workers():
    world = World()
    world.push(2, 0)
    world.save()
    world.begin()
    ledger = Ledger(world.status)
    assert not ledger.waits(2)  # Its push has made a step.
    ledger.hear(world.status._replace(global_step=0))
    assert ledger.waits(2)
    assert not ledger.waits(0)
    assert (ledger.tally.pushes, ledger.next(2), ledger.next(0)) == (1, 1, 0)


def test_a_push_that_had_acted_is_that_of_its_first_step():
    world = World()
    ledger = Ledger(world.status)
    ledger.begun[0] = Begun(0, 0, 0.0, 0.0)
    first = world.push(0, 0)  # The answer is lost.
    assert not ledger.is_repeated(first)
    ledger.leave_unanswered(0)
    ledger.hear(world.status_now())
    later = GlobalStep(7, first.local_step.incarnation)
    again = world.push(0, 0)._replace(local_step=later)
    assert ledger.is_repeated(again)
    ledger.add(again)
    assert not ledger.is_repeated(again)
    assert ledger.tally.last(0) == world.answers[0]
    assert (ledger.tally.last(0).local_step, ledger.accumulated) == (0, 0)
    ledger.add(world.push(0, 1))
    assert (ledger.global_step, ledger.tally.pushes) == (2, 2)


def test_pushes_of_nobody_in_a_checkpoint_are_accounted_for():
    """A push without ``push_id`` is counted by the server, and has no number."""
    world = World()
    ledger = Ledger(world.status)
    for number in range(4):
        ledger.add(world.push(0, number))
    world.save()
    world.begin()
    # Meanwhile three pushes without a name were applied, and saved with the others.
    tally = world.status.tally.copy()
    tally = dataclasses.replace(
        tally, pushes=tally.pushes + 3, accepted=tally.accepted + 3
    )
    ledger.go_back(world.status._replace(tally=tally))
    counts = ledger.counts
    assert counts.accepted + counts.dropped + counts.lost == counts.pushed == 7
    ledger.add(world.push(0, 4))
    counts = ledger.counts
    assert counts.accepted + counts.dropped + counts.lost == counts.pushed == 8
