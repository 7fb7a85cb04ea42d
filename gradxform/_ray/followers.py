"""The other processes of a server, as their leader calls them."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradxform._server.reader import Form, RowIds

CALLS = "calls"  # The name of the followers' threads for calls.
PATIENCE = 5.0  # A step fails in all processes within these seconds, or only in one.


class Followers:
    """The followers; none if the server has one process.

    Calls and commands differ. A call may come at any time, and the leader waits for it.
    Commands are handled in the leader's sequence, and nobody waits for them. A follower
    has one thread for commands, on which Ray runs them in the sequence in which they
    were sent. It has several other threads for calls.

    Args:
      actors: in the order of their processes.
      end: ends this process, and says why.
    """

    def __init__(
        self, actors: Sequence[Any], end: Callable[[str], None] = lambda why: None
    ) -> None:
        self._actors, self._end = actors, end
        self._ray = sys.modules.get("ray")
        self._keys = itertools.count()
        self._lock = threading.Lock()  # All get the commands in the same sequence.
        self._failed = threading.Event()
        self._others_failed = threading.Semaphore(0)
        for actor in actors:
            threading.Thread(target=self._watch, args=(actor,), daemon=True).start()

    def __len__(self) -> int:
        return len(self._actors)

    def key(self) -> int:
        """A new number, for what belongs together."""
        return next(self._keys)

    def command(self, name: str, *args: object) -> list[Any]:
        """Commands all followers; returns references to their answers."""
        with self._lock:
            return [getattr(actor, name).remote(*args) for actor in self._actors]

    def read(
        self, each: Sequence[Mapping[int, RowIds | None]], form: Form
    ) -> list[Any]:
        """In a turn: commands each follower to send its share, if it has one."""
        with self._lock:
            pairs = zip(self._actors, each, strict=True)
            return [actor.read.remote(form, share) for actor, share in pairs if share]

    @contextlib.contextmanager
    def asked(
        self, name: str, *args: object, each: Sequence[object] | None = None
    ) -> Iterator[None]:
        """Calls a method of all followers while the body of the ``with`` runs.

        If the body raises no error, an error of theirs is raised.
        """
        own = [()] * len(self._actors) if each is None else [(x,) for x in each]
        asked = [
            getattr(actor, name).options(concurrency_group=CALLS).remote(*args, *more)
            for actor, more in zip(self._actors, own, strict=True)
        ]
        try:
            yield
        finally:  # No call of it may begin later.
            self._ray.wait(asked, num_returns=len(asked))
        self.answers(asked)

    def answers(self, asked: list[Any]) -> list[Any]:
        """The answers to calls or commands; raises an error of theirs."""
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def failed(self, why: str) -> None:
        """Returns if all followers have failed as well; otherwise ends this process.

        A failure in every process kills none of them: the caller is told its cause.
        """
        self._failed.set()
        deadline = time.monotonic() + PATIENCE
        for _ in self._actors:
            wait = max(0.0, deadline - time.monotonic())
            if not self._others_failed.acquire(timeout=wait):
                self._end(f"the leader of the server has failed, {why}")

    def _watch(self, actor: Any) -> None:
        """Ends this process when a follower has died, or alone has failed.

        Otherwise this one may wait for it in a collective, forever.
        """
        failure = actor.failure.options(concurrency_group=CALLS).remote()
        try:
            why = self._ray.get(failure)
        except self._ray.exceptions.RayActorError:
            self._end("a process of the server has died, and this one ends with it")
            return
        self._others_failed.release()
        if not self._failed.wait(PATIENCE):
            self._end(f"a process of the server has failed, {why}")
