"""The waiters of a server, found by the step that they wait for."""

from __future__ import annotations

import queue
from typing import Any


class Waiters:
    """Queues for the answers that their owners wait for.

    A push looks only at waiters whose step it passes, however many others wait.
    """

    def __init__(self) -> None:
        # By step; the steps once more, as some know their server's life.
        self._at: dict[int, dict[queue.SimpleQueue[Any], int]] = {}

    def add(self, step: int, woken: queue.SimpleQueue[Any]) -> None:
        """Waits for this step to be passed."""
        self._at.setdefault(step, {})[woken] = step

    def remove(self, step: int, woken: queue.SimpleQueue[Any]) -> None:
        """Waits no longer, if it still did."""
        waiting = self._at.get(step, {})
        waiting.pop(woken, None)
        if not waiting:
            self._at.pop(step, None)

    def wake_passed(self, old: int, new: int) -> None:
        """Tells ``new`` to those whose step is passed between the two."""
        for step in range(old, new):
            for woken in self._at.pop(step, ()):
                woken.put(new)

    def take_all(self) -> list[tuple[int, queue.SimpleQueue[Any]]]:
        """All who wait, with their steps; they wait no longer."""
        waiting, self._at = self._at, {}
        return [(step, woken) for at in waiting.values() for woken, step in at.items()]
