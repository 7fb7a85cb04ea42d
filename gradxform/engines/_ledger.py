"""Accounts for the gradients, across the deaths of workers and of the server."""

from __future__ import annotations

import collections
from typing import NamedTuple

from gradxform._server.records import ServerStatus, is_past
from gradxform.engines._job import Counts, Push, WorkerCounts


class Begun(NamedTuple):
    """A gradient that was begun."""

    number: int  # Which of its worker's gradients it is.
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
      begun: the gradients under way, by the index of the worker.
      tally: of the answers that were counted: how many are in the parameters, or were
        dropped.
      incarnation: the present one of the server; only its answers count.
      global_step: the latest step that the server has told.
      accumulated: how many pushes were accepted since that step.
    """

    def __init__(self, status: ServerStatus) -> None:
        self.begun: dict[int, Begun] = {}
        self._counted: set[int] = set()  # Of `begun`: the server has answered these.
        # Workers and numbers that had no answer: the server may have answered them.
        self._retried: set[tuple[int, int]] = set()
        self._lost = self._unanswered = self.worker_deaths = 0
        self._given_up: collections.Counter[int] = collections.Counter()  # By worker.
        self._begin_at(status)

    def _begin_at(self, status: ServerStatus) -> None:
        """An incarnation of the server begins."""
        self.incarnation, self._saved = status.incarnation, status.tally
        self.settle(status)

    def hear(self, status: ServerStatus) -> None:
        """Learns what the server has done, also by pushes whose answers have not come.

        If a worker dies after its push has acted, its answer never comes. The push is
        made again, and then the answer does not say when the first one has acted.
        """
        self._heard = status.tally
        self.global_step, self.accumulated = status.global_step, status.accumulated

    @property
    def counts(self) -> Counts:
        """The counts as :class:`Counts`."""
        pushed, given_up = self.tally.pushes + self._lost, self._given_up.total()
        workers = sorted({*self.tally.answers, *self._given_up})
        under_way = len(self.begun) - len(self._counted)
        return Counts(
            pushed,
            self.tally.accepted,
            self.tally.pushes - self.tally.accepted,
            self._lost,
            self.worker_deaths,
            given_up=given_up,
            started=pushed + given_up + self._unanswered + under_way,
            under_way=under_way,
            unanswered=self._unanswered,
            by_worker={worker: self._counts_of(worker) for worker in workers},
        )

    def _counts_of(self, worker: int) -> WorkerCounts:
        last = self.tally.last(worker)
        dropped = last.number + 1 - last.accepted
        return WorkerCounts(last.accepted, dropped, self._given_up[worker])

    def next(self, worker: int) -> int:
        """The number of the worker's next push."""
        return self.tally.last(worker).number + 1

    def waits(self, worker: int) -> bool:
        """Whether the step has not been made for which the worker has pushed."""
        return self.tally.last(worker).local_step >= self.global_step

    # How a gradient begins and ends.

    def _end(self, worker: int) -> bool:
        """Forgets a gradient; returns whether it is still to be counted."""
        self.begun.pop(worker, None)
        counted = worker in self._counted
        self._counted.discard(worker)
        return not counted

    def leave_unanswered(self, worker: int) -> None:
        """Counts a gradient that ends without an answer."""
        self._retried.add((worker, self.begun[worker].number))
        self._unanswered += self._end(worker)

    def give_up(self, worker: int) -> None:
        """Counts a gradient that is cancelled."""
        self._given_up[worker] += self._end(worker)

    def is_repeated(self, push: Push) -> bool:
        """Whether the answer may be that of an earlier push with the same number."""
        return (push.worker, push.number) in self._retried

    def add(self, push: Push) -> None:
        """Counts an answer."""
        worker, number, local_step, *_ = push
        uncounted = self._end(worker)
        result = push.result
        self._retried.discard((worker, number))
        # On its way when the server died.
        if is_past(local_step, self.incarnation):
            if number > self._saved.last(worker).number:
                self._lost += 1
            else:
                self._unanswered += uncounted
            return
        heard = self._heard.last(worker)
        if number <= heard.number:
            local_step = heard.local_step  # Of the push that has acted.
        else:
            if result.global_step > self.global_step:
                self.global_step, self.accumulated = result.global_step, 0
            # Another answer may arrive before that of the push that made the step.
            stepped = result.global_step > local_step + result.staleness
            if result.global_step == self.global_step and not stepped:
                self.accumulated += result.applied
        self.tally.count(result, (worker, number), local_step)

    def settle(self, status: ServerStatus) -> None:
        """Takes over all answers of the server, received or not."""
        for worker, begun in self.begun.items():
            last = status.tally.last(worker).number
            if begun.number == last >= self.next(worker):
                self._counted.add(worker)
        self.tally = status.tally.copy()
        self.hear(status)

    def go_back(self, status: ServerStatus) -> int | None:
        """Goes back to where an incarnation began; returns how many answers were lost.

        None if that incarnation has begun already.
        """
        if status.incarnation == self.incarnation:
            return None
        lost = sum(
            max(0, last.number - status.tally.last(worker).number)
            for worker, last in self.tally.answers.items()
        )
        self._lost += lost
        self._begin_at(status)
        return lost
