"""Which worker begins which gradient, and when."""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator

from gradxform._server.records import Ahead
from gradxform.engines._job import Job
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
        self, job: Job, ledger: Ledger, members: Collection[int], ahead: Ahead
    ) -> None:
        self._pace, self._ledger = job.pace, ledger
        self.ahead = ahead
        self._free_since = {i: 0.0 for i in members if ledger.next(i)}
        self.join(members, 0.0)

    def join(self, members: Collection[int], now: float) -> None:
        """Takes in new members. Their clocks are the lowest: nobody waits for them."""
        known = [self._clock(i) for i in members if i in self._free_since]
        for index in members:
            if index not in self._free_since:
                self._free_since[index] = now
                behind = min(known, default=0) - self._clock(index)
                if behind > 0:
                    ahead = self.ahead.get(index, 0) + behind
                    self.ahead = {**self.ahead, index: ahead}

    def _clock(self, index: int) -> int:
        return self._ledger.next(index) + self.ahead.get(index, 0)

    def begin(
        self, members: Collection[int], free: Collection[int], now: float
    ) -> Iterator[tuple[int, int]]:
        """Begins gradients of free workers; gives each one's worker and number.

        Those who have waited longest come first, then the lower index. Each is asked
        about when its turn comes, so the caller may end this early.
        """
        ledger = self._ledger
        # A rule sees the mapping itself, and cannot change it.
        clocks = types.MappingProxyType({i: self._clock(i) for i in members})
        step, accumulated = ledger.global_step, ledger.accumulated
        refused: set[int] = set()  # Clocks of workers that may not begin.
        local_steps = tuple(each.global_step for each in ledger.begun.values())
        for index in sorted(free, key=lambda i: (self._free_since[i], i)):
            if self._pace is not None:
                started = ledger.tally.accepted + len(local_steps)
                progress = Progress(
                    index, clocks, local_steps, step, accumulated, started
                )
                if clocks[index] in refused:
                    continue
                if not _lets(self._pace, progress):
                    if isinstance(self._pace, Alike):
                        refused.add(clocks[index])
                    continue
            waited = now - self._free_since[index]
            begun = Begun(ledger.next(index), step, now, waited)
            local_steps += (step,)
            ledger.begun[index] = begun
            yield index, begun.number

    def end(self, index: int, now: float) -> None:
        """A worker is free again."""
        self._free_since[index] = now


def _lets(pace: Callable[[Progress], bool], progress: Progress) -> bool:
    """Whether a rule lets this worker begin."""
    try:
        may: object = pace(progress)
        if may is None or isinstance(may, Generator | Awaitable):
            raise TypeError(
                f"pace must return True or False, got a {type(may).__name__}."
            )
        return bool(may)
    except Exception as error:
        if isinstance(error, StopIteration):  # A generator cannot pass it on.
            error = RuntimeError("pace has raised StopIteration.")
        error.add_note(f"Raised by pace, for {progress}.")
        raise error
