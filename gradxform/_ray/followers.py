"""The other processes of a server, and how their leader calls them."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from gradxform._ray.layout import ServerLayout
from gradxform._ray.messages import PushMessage, packed_parts
from gradxform._ray.process import joined_process, part_of
from gradxform._ray.wire import Bytes
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.programs import Prepared
from gradxform._server.reader import Form, Ids
from gradxform._server.records import Snapshot, summary
from gradxform._server.store import Store

CALLS = "calls"  # The name of the followers' threads for calls.
PATIENCE = 5.0  # A step fails in all processes within these seconds, or only in one.


class Followers:
    """The followers; none if the server has one process.

    Calls and commands differ. A call may come at any time, and the leader waits for it.
    Commands are handled in the leader's sequence, and nobody waits for them. A follower
    has one thread for commands, on which Ray runs them in the sequence in which they
    were sent. It has several other threads for calls. All followers get the commands
    whose sequence matters in the same one, as the leader sends them in its turns.

    Args:
      actors: in the order of their processes.
      end: ends this process, and says why.
    """

    def __init__(
        self, actors: Sequence[Any], end: Callable[[str], None] = lambda why: None
    ) -> None:
        self._actors, self._end = actors, end
        self._ray = sys.modules["ray"]
        self._all_failed = threading.Barrier(len(actors) + 1)
        for actor in actors:
            threading.Thread(target=self._watch, args=(actor,), daemon=True).start()

    def __len__(self) -> int:
        return len(self._actors)

    def command(self, name: str, *args: object) -> list[Any]:
        """Commands all followers; returns references to their answers."""
        return [getattr(actor, name).remote(*args) for actor in self._actors]

    def read(self, each: Sequence[Mapping[int, Ids | None]], form: Form) -> list[Any]:
        """In a turn: commands each follower to send its share, if it has one."""
        pairs = zip(self._actors, each, strict=True)
        return [actor.read.remote(form, share) for actor, share in pairs if share]

    @contextlib.contextmanager
    def asked(self, name: str, each: Iterable[tuple[object, ...]]) -> Iterator[None]:
        """Calls a method of all followers while the body of the ``with`` runs.

        If the body raises no error, an error of theirs is raised.

        Args:
          name: of the method.
          each: its arguments for each of them.
        """
        asked = [
            getattr(actor, name).options(concurrency_group=CALLS).remote(*args)
            for actor, args in zip(self._actors, each, strict=True)
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
        """A process has failed: returns if all others do, or ends this process.

        A failure in every process kills none of them: the caller is told its cause.
        """
        try:
            self._all_failed.wait(PATIENCE)
        except threading.BrokenBarrierError:
            self._end(why)

    def _watch(self, actor: Any) -> None:
        """Ends this process when a follower has died, or alone has failed.

        Otherwise this one may wait for it in a collective, forever.
        """
        failure = actor.failure.options(concurrency_group=CALLS).remote()
        try:
            why = self._ray.get(failure)
        except self._ray.exceptions.RayActorError:
            self._end("a process of the server has died, and this one ends with it")
        else:
            self.failed(f"a process of the server has failed, {why}")


class Follower:
    """One of the processes, and the calls and commands that it handles.

    Args:
      index: of this process, from 1.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._prepared: dict[int, Prepared] = {}
        self._snapshots: dict[int, Snapshot | None] = {}
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()

    def join(
        self,
        coordinator: str,
        given: list[Any],
        layout: ServerLayout,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Becomes one of the processes; see :meth:`Leader.join`."""
        self.process = joined_process(coordinator, self._index, given, layout)
        if checkpoint is not None:
            self._store = Store(checkpoint, together=True)

    # The leader's calls: these may come in any sequence.

    def failure(self) -> str:
        """Waits until a step fails here; returns why."""
        return self._failures.get()

    def prepare(self, key: int, message: PushMessage) -> None:
        """Does what a push needs before its turn."""
        self._prepared[key] = self.process.core.prepare(*message.received())

    def compile(self, form: Form, share: Mapping[int, Ids | None]) -> None:
        """Compiles the programs of :meth:`read` before a turn."""
        self.process.reader.prepare(share, form)

    def resume(self, pushes: int) -> None:
        """Goes on from this process's part of a checkpoint."""
        snapshot = self._store.read(pushes, self.process.like())
        self.process.core.resume(self.process.placed(snapshot))

    # The leader's commands, handled in its sequence, on one thread.

    def push(self, key: int, local_step: int) -> None:
        """Runs the step of a push."""
        try:
            self.process.core.commit(self._prepared.pop(key), local_step)
        except BaseException as error:
            self._failures.put(summary(error))
            raise

    def forget(self, key: int) -> None:
        """Drops what was prepared, or copied, and is not needed."""
        self._prepared.pop(key, None)
        self._snapshots.pop(key, None)

    def read(self, form: Form, share: Mapping[int, Ids | None]) -> dict[int, Bytes]:
        """Its share of the arrays, which Ray copies before the next command begins."""
        reading = self.process.reader.prepare(share, form)
        leaves = self.process.core.version.leaves
        return packed_parts(reading.run({i: part_of(leaves[i]) for i in share}), share)

    def snapshot(self, key: int) -> None:
        """Copies its parts for a checkpoint."""
        self._snapshots[key] = snapshot = self.process.core.snapshot()
        jax.block_until_ready(snapshot and snapshot.state)

    def write(self, key: int) -> None:
        """Begins to write them."""
        snapshot = self._snapshots.pop(key)
        self._store.write_soon(lambda: snapshot)
