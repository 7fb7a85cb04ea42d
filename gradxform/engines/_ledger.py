"""Accounts for the gradients, across the deaths of workers and of the server."""

from __future__ import annotations

import collections
from typing import NamedTuple

from gradxform._server.records import ServerStatus, is_past
from gradxform.engines._job import Counts, Push, WorkerCounts


class Begun(NamedTuple):
    """A gradient that was begun."""

    worker: int  # Whose number it is.
    number: int
    global_step: int  # The ledger's, when it began.
    at: float  # Seconds since the run began.
    waited: float


class Ledger:
    """Counts gradients and answers; knows the number of each worker's next push.

    A push is known by its worker and number. The server remembers the answered pushes,
    and saves them in its checkpoints. A server that dies goes back to the numbers in
    its last checkpoint. Later pushes are lost, and are pushed again. A push in the
    checkpoint counts as answered, even if its answer was still on its way. A push that
    never reached the server keeps its number.

    Attributes:
      begun: the gradients under way, by the index of the worker that computes them.
      global_step: the latest step that an answer has told.
      accumulated: how many pushes were accepted since that step.
    """

    def __init__(self, status: ServerStatus) -> None:
        self.begun: dict[int, Begun] = {}
        self._counted: set[int] = set()  # Of `begun`: the server has answered these.
        self._lost = self._unanswered = self.worker_deaths = self.server_deaths = 0
        self._given_up: collections.Counter[int] = collections.Counter()  # By worker.
        self._go_to(status)
        self._started = self.stands

    def _go_to(self, status: ServerStatus) -> None:
        self._status = status
        self._last = {worker: x.number for worker, x in status.answers.items()}
        self._by = {w: (x.accepted, x.dropped) for w, x in status.answers.items()}
        self.accepted, self._dropped = status.accepted, status.dropped
        self.global_step, self.accumulated = status.global_step, status.accumulated

    @property
    def stands(self) -> int:
        """How many answered pushes are in the parameters, or were dropped."""
        return self.accepted + self._dropped

    @property
    def counts(self) -> Counts:
        """The counts as :class:`Counts`."""
        return Counts(
            self.stands + self._lost,
            self.accepted,
            self._dropped,
            self._lost,
            self.worker_deaths,
            self.server_deaths,
            self._given_up.total(),
            self._started,
            len(self.begun) - len(self._counted),
            self._unanswered,
            {
                worker: WorkerCounts(
                    *self._by.get(worker, (0, 0)), self._given_up[worker]
                )
                for worker in sorted({*self._by, *self._given_up})
            },
        )

    def next(self, worker: int) -> int:
        """The number of the worker's next push."""
        return self._last.get(worker, -1) + 1

    @property
    def incarnation(self) -> str:
        """The present incarnation of the server; only its answers count."""
        return self._status.incarnation

    @property
    def began_at(self) -> int:
        """The global step at which this incarnation of the server began."""
        return self._status.global_step

    def in_sum(self) -> dict[int, int]:
        """The local step of each worker's last push before this incarnation began.

        If it equals the step at which this incarnation began, that push is in a sum
        that has not become a step yet.
        """
        return {w: answer.local_step for w, answer in self._status.answers.items()}

    # How a gradient begins and ends. `index` is the worker that computes it.

    def begin(self, index: int, begun: Begun) -> None:
        """Counts a gradient that begins."""
        self.begun[index] = begun
        self._started += 1

    def _end(self, index: int) -> bool:
        """Forgets a gradient; returns whether it is still to be counted."""
        self.begun.pop(index, None)
        counted = index in self._counted
        self._counted.discard(index)
        return not counted

    def leave_unanswered(self, index: int) -> None:
        """Counts a gradient that ends without an answer."""
        self._unanswered += self._end(index)

    def give_up(self, index: int) -> None:
        """Counts a gradient that is cancelled."""
        worker = self.begun[index].worker
        self._given_up[worker] += self._end(index)

    def knows(self, push: Push) -> bool:
        """Whether that number was answered before, in this incarnation."""
        past = is_past(push.local_step, self.incarnation)
        return not past and push.number < self.next(push.worker)

    def add(self, index: int, push: Push) -> bool:
        """Counts an answer; returns whether it is of this incarnation of the server."""
        uncounted = self._end(index)
        worker, result = push.worker, push.result
        # On its way when the server died.
        if is_past(push.local_step, self.incarnation):
            saved = self._status.answers.get(worker)
            if saved is None or push.number > saved.number:
                self._lost += 1
            else:
                self._unanswered += uncounted
            return False
        self._last[worker] = push.number
        self.accepted += result.applied
        self._dropped += not result.applied
        accepted, dropped = self._by.get(worker, (0, 0))
        self._by[worker] = accepted + result.applied, dropped + (not result.applied)
        if result.global_step > self.global_step:
            self.global_step, self.accumulated = result.global_step, 0
        # Another answer may arrive before that of the push that made the step.
        stepped = result.global_step > push.local_step + result.staleness
        if result.global_step == self.global_step and not stepped:
            self.accumulated += result.applied
        return True

    def settle(self, status: ServerStatus) -> None:
        """Takes over all answers of the server, received or not."""
        began = self._status
        self._take_over(status, self.stands)
        self._status = began

    def go_back(self, status: ServerStatus) -> int | None:
        """Goes back to where an incarnation began; returns how many answers were lost.

        None if that incarnation has begun already.
        """
        if status.incarnation == self.incarnation:
            return None
        saved = {worker: x.number for worker, x in status.answers.items()}
        lost = sum(
            max(0, number - saved.get(worker, -1))
            for worker, number in self._last.items()
        )
        self._lost += lost
        self.server_deaths += 1
        self._take_over(status, self.stands - lost)
        return lost

    def _take_over(self, status: ServerStatus, seen: int) -> None:
        """Counts what the server has answered, beyond the answers that were seen."""
        unseen = {
            (worker, answer.number)
            for worker, answer in status.answers.items()
            if answer.number >= self.next(worker)
        }
        for index, begun in self.begun.items():
            if (key := (begun.worker, begun.number)) in unseen:
                unseen.remove(key)  # Another worker may compute it, too.
                self._counted.add(index)
                seen += 1
        self._go_to(status)
        self._started += self.stands - seen  # No worker has made these pushes.
