"""The leader of a server's processes: it is the server for everybody else."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from gradxform._ray.followers import Followers
from gradxform._ray.layout import ServerLayout
from gradxform._ray.messages import PushMessage
from gradxform._ray.process import Process, joined_process
from gradxform._ray.transport import RayTransport
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.placement import Leaves
from gradxform._server.programs import Prepared, Stepped
from gradxform._server.reader import PullRequest
from gradxform._server.records import Snapshot, summary
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.store import Store
from gradxform._server.transport import Transport

LAST_WORD = 0.5  # Seconds in which the engine gets the cause of a death.


class GroupTransport(Transport):
    """All processes prepare a push or a pull; then one command in a turn runs it.

    Args:
      process: the leader's own parts.
      followers: the other processes.
    """

    def __init__(self, process: Process, followers: Followers) -> None:
        cuts = (cut for each in process.layouts for cut in each.cuts)
        self._sends = RayTransport(process.core, cuts, followers)
        super().__init__(process.core, self._sends.turns)
        self.reader = self._sends.reader = process.reader
        self._process, self._followers = process, followers
        self._keys = itertools.count()  # Each is for what belongs together.

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        return self._sends.pull(request)

    def state(self) -> Any:
        return self._sends.state()

    @contextlib.contextmanager
    def prepared(
        self, grads: list[PushMessage], extra: dict[str, Any]
    ) -> Iterator[Prepared]:
        """Each process prepares its message, which has the ``extra``."""
        followers, key, begun = self._followers, next(self._keys), False
        own, *others = grads

        def step(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            nonlocal begun
            begun = True
            followers.command("push", key, int(local_step))
            try:
                return jax.block_until_ready(prepared.step(leaves, pushed, local_step))
            except BaseException as error:
                # If it failed because another process died, this one ends here.
                why = summary(error)
                followers.failed(f"the leader of the server has failed, {why}")
                self.core.lose(f"a step failed, {why}")
                raise

        try:
            with followers.asked("prepare", [(key, each) for each in others]):
                prepared = self.core.prepare(*own.received())
            yield Prepared(step, prepared.leaves)
        finally:
            if not begun:
                followers.command("forget", key)

    def snapshot(self) -> Snapshot | None:
        """See :class:`Transport`. It is ready if each process has copied its parts."""
        taken = self.core.snapshot()
        if taken is None:
            return None
        key = next(self._keys)
        copied = self._followers.command("snapshot", key)

        def ready() -> None:
            """On the store's thread: the followers begin to write, if all have copies.

            If one of them would begin alone, it would wait for the others.
            """
            try:
                jax.block_until_ready(taken.state)
                self._followers.answers(copied)
            except BaseException:
                self._followers.command("forget", key)
                raise
            self._followers.command("write", key)

        return taken._replace(ready=ready)

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        like = self._process.like()

        def read(pushes: int) -> Snapshot:
            each = [(pushes,)] * len(self._followers)
            with self._followers.asked("resume", each):
                return store.read(pushes, like)

        snapshot, notes = store.read_newest(like, read)
        return self._process.placed(snapshot), notes


class Leader(RecoverableServer):
    """The actor that workers and engines call."""

    def __init__(self) -> None:
        self._cause: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen(self, host: str) -> str:
        """The address of JAX's coordinator, at this address of the machine."""
        # Holds the port until the coordinator binds to it, too.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((host, 0))
        self._coordinator = f"{host}:{self._reserved.getsockname()[1]}"
        return self._coordinator

    def cause(self) -> str:
        """Waits until this process has to end; returns why."""
        return self._cause.get()

    def _end(self, why: str) -> None:
        """Ends this process, whatever its threads are doing."""
        self._cause.put(why)
        time.sleep(LAST_WORD)
        print(f"gradxform: {why}", file=sys.stderr)
        os._exit(1)

    def join(
        self,
        followers: list[Any],
        given: list[Any],
        layout: ServerLayout,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Becomes one of the processes, and takes its part of the parameters.

        Args:
          followers: the actors.
          given: a reference to the job, with its part of the parameters.
          layout: of the parameters.
          checkpoint: where and how often the run is saved.
        """
        self.process = joined_process(self._coordinator, 0, given, layout)
        self._reserved.close()
        transport = GroupTransport(self.process, Followers(followers, self._end))
        pushes = self.process.pushes
        super().__init__(transport, checkpoint, pushes, together=True)
