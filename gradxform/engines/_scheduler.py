"""Which worker begins which gradient, and when."""

from __future__ import annotations

import math
import types
from collections.abc import Awaitable, Generator, Iterable, Mapping

from gradxform._server.records import Ahead
from gradxform.engines._job import Job, Worker
from gradxform.engines._ledger import Begun, Ledger
from gradxform.engines._pacing import Alike, Progress


class Scheduler:
    """Asks ``Job.pace``; hands on the numbers of gradients past ``Job.deadline``.

    Args:
      job: has the rule and the deadline.
      ledger: of the run, as it begins.
      members: the indices of its workers.
      ahead: what :attr:`ahead` was when the run was saved.

    Attributes:
      late: the workers whose gradients were past their deadline at the last survey.
      local_steps: of the gradients under way, but for these.
    """

    def __init__(
        self, job: Job, ledger: Ledger, members: Iterable[int], ahead: Ahead
    ) -> None:
        self._pace, self._ledger = job.pace, ledger
        self._deadline = math.inf if job.deadline is None else float(job.deadline)
        # Numbers that nobody gets a third time, each with its worker.
        self._handed_on: set[tuple[int, int]] = set()
        self._ahead = {index: lift or 0 for index, lift in ahead.items()}
        self._free_since = dict.fromkeys(members, 0.0)
        known = [i for i in members if ledger.next(i) and ahead.get(i, 0) is not None]
        for index in members:
            if index not in known:
                self._catch_up(index, known)

    def survey(self, members: Mapping[int, Worker], now: float) -> None:
        """Looks who is there; the questions that follow are about this moment."""
        self._now, self._members = now, members
        begun = self._ledger.begun
        self.late = {index for index, x in begun.items() if self._is_late(x, now)}
        self._there = [index for index in members if index not in self.late]
        self.local_steps = tuple(
            x.global_step for index, x in begun.items() if index not in self.late
        )
        for index in self._there:
            if index not in self._free_since:  # It has joined.
                self._free_since[index] = now
                self._catch_up(index, self._there)
        # A rule sees the mapping itself, and cannot change it.
        clocks = {index: self._clock(index) for index in self._there}
        self._clocks = types.MappingProxyType(clocks)
        self._refused: set[int] = set()  # Clocks of workers that may not begin.

    @property
    def ahead(self) -> Ahead:
        """How far a clock is ahead of the worker's answers; None if it has none now."""
        lifted = {index: lift for index, lift in self._ahead.items() if lift}
        return {**lifted, **dict.fromkeys(self.late)}

    def _is_late(self, begun: Begun, now: float) -> bool:
        return now >= begun.at + self._deadline

    def _clock(self, index: int) -> int:
        return self._ledger.next(index) + self._ahead.get(index, 0)

    def _catch_up(self, index: int, others: Iterable[int]) -> None:
        """Lifts a worker's clock to the lowest of the others: they need not wait."""
        clocks = [self._clock(i) for i in others if i != index]
        behind = min(clocks, default=0) - self._clock(index)
        self._ahead[index] = self._ahead.get(index, 0) + max(0, behind)

    def in_order(self, free: Iterable[int]) -> list[int]:
        """Those who have waited longest come first, then the lower index."""
        return sorted(free, key=lambda index: (self._free_since[index], index))

    def may_begin(self, index: int) -> bool:
        """Whether the rule lets a free worker begin now."""
        if self._pace is None:
            return True
        ledger, clock = self._ledger, self._clocks[index]
        if clock in self._refused:
            return False
        progress = Progress(
            index,
            self._clocks,
            self.local_steps,
            ledger.global_step,
            ledger.accumulated,
            ledger.accepted + len(self.local_steps),
        )
        try:
            may: object = self._pace(progress)
            if may is None or isinstance(may, Generator | Awaitable):
                raise TypeError(
                    f"pace must return True or False, got a {type(may).__name__}."
                )
            if not may and isinstance(self._pace, Alike):
                self._refused.add(clock)
            return bool(may)
        except Exception as error:
            if isinstance(error, StopIteration):  # A generator cannot pass it on.
                error = RuntimeError("pace has raised StopIteration.")
            error.add_note(f"Raised by pace, for {progress}.")
            raise error

    def begin(self, index: int, stuck: bool = False) -> Begun:
        """A worker begins its next gradient, or one that is due."""
        due = self.due(stuck)
        if due is not None and due in self._under_way():
            self._handed_on.add(due)
        worker, number = due or (index, self._ledger.next(index))
        waited = self._now - self._free_since[index]
        begun = Begun(worker, number, self._ledger.global_step, self._now, waited)
        self.local_steps += (begun.global_step,)
        self._ledger.begin(index, begun)
        return begun

    def due(self, stuck: bool) -> tuple[int, int] | None:
        """Worker and number of a gradient past its deadline that nobody else has.

        It is the one that was begun first, or of several the one with the lower index.
        If all others wait (``stuck``), the next number of a worker is due, too, while
        that one is past its deadline.
        """
        begun, next_of = self._ledger.begun, self._ledger.next
        for each in sorted(self.late, key=lambda i: (begun[i].at, i)):
            worker, number, *_ = begun[each]
            # The number was answered, or the server has gone back to an earlier one.
            known = worker not in self._members or number != next_of(worker)
            if not (known or (worker, number) in self._handed_on):
                return worker, number
            own = each, next_of(each)
            if stuck and each in self._members and own not in self._under_way():
                return own
        return None

    def _under_way(self) -> set[tuple[int, int]]:
        return {x[:2] for x in self._ledger.begun.values()}

    def end(self, index: int, members: Mapping[int, Worker], now: float) -> None:
        """A worker is free again. Called before the ledger forgets its gradient."""
        begun = self._ledger.begun[index]
        if self._is_late(begun, now):
            self.survey(members, now)
            self._catch_up(index, self._there)
        if begun.worker == index:
            self.take_back(begun)
        self._free_since[index] = now

    def take_back(self, begun: Begun) -> None:
        """Lets somebody else have a number, if the one who got it has no answer."""
        self._handed_on.discard(begun[:2])

    def next_deadline(self, now: float) -> float:
        """When the next gradient passes its deadline; inf if none will."""
        ends = (begun.at + self._deadline for begun in self._ledger.begun.values())
        return min((end for end in ends if end > now), default=math.inf)
