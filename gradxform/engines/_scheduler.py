"""Which worker begins which gradient, and when."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator, Iterable, Mapping

from gradxform._server.records import Ahead
from gradxform.engines._job import Job, Worker
from gradxform.engines._ledger import Begun, Ledger
from gradxform.engines._pacing import Alike, Progress


class Scheduler:
    """Asks ``Job.pace``, and begins gradients.

    Args:
      job: has the rule.
      ledger: of the run, as it begins.
      members: the indices of its workers.
      ahead: what :attr:`ahead` was when the run was saved.

    Attributes:
      ahead: how far a worker's clock is ahead of its answers, if it is.
    """

    def __init__(
        self, job: Job, ledger: Ledger, members: Iterable[int], ahead: Ahead
    ) -> None:
        self._pace, self._ledger = job.pace, ledger
        self.ahead = dict(ahead)
        self._free_since = dict.fromkeys(members, 0.0)
        known = [index for index in members if ledger.next(index)]
        for index in members:
            if index not in known:
                self._catch_up(index, known)

    def survey(self, members: Mapping[int, Worker], now: float) -> None:
        """Looks who is there; the questions that follow are about this moment."""
        self._now = now
        begun = self._ledger.begun.values()
        self._local_steps = tuple(each.global_step for each in begun)
        for index in members:
            if index not in self._free_since:  # It has joined.
                self._free_since[index] = now
                self._catch_up(index, members)
        # A rule sees the mapping itself, and cannot change it.
        clocks = {index: self._clock(index) for index in members}
        self._clocks = types.MappingProxyType(clocks)
        self._refused: set[int] = set()  # Clocks of workers that may not begin.

    def _clock(self, index: int) -> int:
        return self._ledger.next(index) + self.ahead.get(index, 0)

    def _catch_up(self, index: int, others: Iterable[int]) -> None:
        """Lifts a worker's clock to the lowest of the others: they need not wait."""
        clocks = [self._clock(i) for i in others if i != index]
        behind = min(clocks, default=0) - self._clock(index)
        if behind > 0:
            self.ahead = {**self.ahead, index: self.ahead.get(index, 0) + behind}

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
            self._local_steps,
            ledger.global_step,
            ledger.accumulated,
            ledger.accepted + len(self._local_steps),
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

    def begin(self, index: int) -> int:
        """A worker begins its next gradient; returns the number of it."""
        ledger, waited = self._ledger, self._now - self._free_since[index]
        begun = Begun(ledger.next(index), ledger.global_step, self._now, waited)
        self._local_steps += (begun.global_step,)
        ledger.begin(index, begun)
        return begun.number

    def end(self, index: int, now: float) -> None:
        """A worker is free again."""
        self._free_since[index] = now
