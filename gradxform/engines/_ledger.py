"""Accounts for the pushes, across the deaths of workers and of the server."""

from __future__ import annotations

from gradxform._server.records import ServerStatus, is_past
from gradxform.engines._job import Counts, Push


class Ledger:
    """Counts answers; knows the number of each worker's next push.

    A push is known by its worker and number. The server remembers the answered pushes,
    and saves them in its checkpoints. A server that dies goes back to the numbers in
    its last checkpoint. Later pushes are lost, and are pushed again. A push in the
    checkpoint counts as answered, even if its answer was still on its way. A push that
    never reached the server keeps its number.
    """

    def __init__(self, status: ServerStatus) -> None:
        self._status = status
        self._last = {worker: x.number for worker, x in status.answers.items()}
        self._accepted, self._dropped = status.accepted, status.dropped
        self._lost = self.worker_deaths = self.server_deaths = self.given_up = 0

    @property
    def stands(self) -> int:
        """How many answered pushes are in the parameters, or were dropped."""
        return self._accepted + self._dropped

    @property
    def counts(self) -> Counts:
        """The counts as :class:`Counts`."""
        return Counts(
            self.stands + self._lost,
            self._accepted,
            self._dropped,
            self._lost,
            self.worker_deaths,
            self.server_deaths,
            self.given_up,
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

    def add(self, push: Push) -> bool:
        """Counts an answer; returns whether it is of this incarnation of the server."""
        # On its way when the server died.
        if is_past(push.local_step, self.incarnation):
            saved = self._status.answers.get(push.worker)
            if saved is None or push.number > saved.number:
                self._lost += 1
            return False
        self._last[push.worker] = push.number
        self._accepted += push.result.applied
        self._dropped += not push.result.applied
        return True

    def settle(self, status: ServerStatus) -> None:
        """Takes over all answers of the server, received or not."""
        self._accepted, self._dropped = status.accepted, status.dropped
        for worker, answer in status.answers.items():
            self._last[worker] = answer.number

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
        self._status, self._last = status, saved
        self._accepted, self._dropped = status.accepted, status.dropped
        return lost
