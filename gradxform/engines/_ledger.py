"""What became of the pushes, across the deaths of workers and of the server."""

from __future__ import annotations

from gradxform._server.recoverable import Standing
from gradxform.engines._job import Counts, Push


class Ledger:
    """Counts answers; knows who pushes what next.

    A push is known by its worker and number. What is answered stands in the server's
    memory, and so in its checkpoints: a server that dies goes back to the numbers of
    its last one, and those behind them are lost, to be pushed again. A push that was
    never answered has its number still; where it had acted all the same, the server
    gives the answer that it gave, and acts once.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._last = {worker: x.number for worker, x in standing.answers.items()}
        self._accepted, self._dropped = standing.accepted, standing.dropped
        self._pushed = self._accepted + self._dropped
        self._lost = self.worker_deaths = self.server_deaths = 0

    @property
    def stands(self) -> int:
        """How many answered pushes are in the parameters, or were dropped."""
        return self._accepted + self._dropped

    @property
    def counts(self) -> Counts:
        """The numbers, for whoever asks."""
        return Counts(
            self._pushed,
            self._accepted,
            self._dropped,
            self._lost,
            self.worker_deaths,
            self.server_deaths,
        )

    def next(self, worker: int) -> int:
        """The number of the worker's next push."""
        return self._last.get(worker, -1) + 1

    @property
    def life(self) -> str:
        """That of the server, in which answers count."""
        return self._standing.life

    @property
    def began_at(self) -> int:
        """The global step at which this life of the server began."""
        return self._standing.global_step

    def in_sum(self) -> dict[int, int]:
        """The step for which each worker had pushed when this life began.

        Where that is the step at which it began, the push is in a sum that is still to
        become a step.
        """
        return {w: answer.local_step for w, answer in self._standing.answers.items()}

    def add(self, push: Push) -> bool:
        """One more answer; whether it stands."""
        self._pushed += 1
        life = getattr(push.local_step, "life", self._standing.life)
        if life != self._standing.life:  # It was given before the server's death,
            answer = self._standing.answers.get(push.worker)
            if answer is None or push.number > answer.number:
                self._lost += 1  # and does not stand in the checkpoint.
                return False
        self._last[push.worker] = push.number
        self._accepted += push.result.applied
        self._dropped += not push.result.applied
        return True

    def go_back(self, standing: Standing) -> int | None:
        """How many answers died with the server's last life; None if it still lives."""
        if standing.life == self._standing.life:
            return None
        self.server_deaths += 1
        before = self.stands
        self._standing = standing
        self._accepted, self._dropped = standing.accepted, standing.dropped
        for worker, answer in standing.answers.items():
            if self._last.get(worker, -1) < answer.number:  # It is to be heard yet.
                self._accepted -= answer.result.applied
                self._dropped -= not answer.result.applied
        self._last = {
            worker: min(last, standing.answers[worker].number)
            for worker, last in self._last.items()
            if worker in standing.answers
        }
        self._lost += before - self.stands
        return before - self.stands
