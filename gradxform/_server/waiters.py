"""The waiters of a server, found by the step that they wait for."""

from __future__ import annotations

import queue
from typing import Any


class Waiters:
    """The queues on which callers of ``wait`` wait for their answers.

    A push looks only at waiters whose step it passes, however many others wait.
    """

    def __init__(self) -> None:
        # By step. The value is the step again, as the caller gave it: it may know the
        # server's incarnation, which a key that is equal to it would lose.
        self._at: dict[int, dict[queue.SimpleQueue[Any], int]] = {}

    def add(self, step: int, woken: queue.SimpleQueue[Any]) -> None:
        """Adds one that waits until this step is passed."""
        self._at.setdefault(step, {})[woken] = step

    def remove(self, step: int, woken: queue.SimpleQueue[Any]) -> None:
        """Removes it, if it is still there."""
        waiting = self._at.get(step, {})
        waiting.pop(woken, None)
        if not waiting:
            self._at.pop(step, None)

    def wake_passed(self, old: int, new: int) -> None:
        """Sends ``new`` to those whose step lies in ``[old, new)``."""
        for step in range(old, new):
            for woken in self._at.pop(step, ()):
                woken.put(new)

    def take_all(self) -> list[tuple[int, queue.SimpleQueue[Any]]]:
        """Removes all waiters; returns them with their steps."""
        waiting, self._at = self._at, {}
        return [(step, woken) for at in waiting.values() for woken, step in at.items()]
