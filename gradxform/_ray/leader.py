"""The leader of a server's processes: it is the server for everybody else."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradxform._ray.channel import CommandChannel, end_process
from gradxform._ray.group_checkpoints import GroupStore
from gradxform._ray.layout import Layout
from gradxform._ray.mesh import enter
from gradxform._ray.messages import Cut, Gathered, GatheredRows, PushMessage, Table
from gradxform._ray.process import Process, Wanted, packed_parts
from gradxform._ray.wire import Payload
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.placement import copy
from gradxform._server.programs import Prepared, Stepped
from gradxform._server.reader import Form, Ids, PullRequest, Reading, RowIds, size_for
from gradxform._server.records import Snapshot, summary
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.specs import Leaves
from gradxform._server.store import Store
from gradxform._server.transport import Response, SomeRows, Transport, Whole
from gradxform._trees.types import PyTree, T

LAST_WORD = 0.5  # Seconds in which the engine gets the cause of a death.


class Followers:
    """The other processes, as the leader calls them.

    Calls and commands differ. A call may come at any time, and the leader waits for
    it. Commands are handled in the leader's sequence, and nobody waits for them.

    Args:
      channel: for the commands.
      actors: for the calls.
    """

    def __init__(self, channel: CommandChannel, actors: Sequence[Any]) -> None:
        self._channel, self._actors = channel, actors
        self._ray = sys.modules["ray"]
        self._keys = itertools.count()
        self.send, self.failed = channel.send, channel.failed

    def key(self) -> int:
        """A new number, for what belongs together."""
        return next(self._keys)

    def order(self, name: str, each: Sequence[object], *args: object) -> list[Any]:
        """In a turn: commands followers; returns references to their results.

        Args:
          name: of the command.
          each: the last argument for each follower; where it is None, that follower
            gets no command.
          args: for all of them.
        """
        key = self.key()
        self.send(name, key, *args, each=each)
        return [
            actor.collect.remote(key)
            for actor, own in zip(self._actors, each, strict=True)
            if own is not None
        ]

    @contextlib.contextmanager
    def asked(
        self, name: str, *args: object, each: Sequence[object] | None = None
    ) -> Iterator[None]:
        """Calls a method of all followers while the body of the ``with`` runs.

        If the body raises no error, an error of theirs is raised.
        """
        own = [()] * len(self._actors) if each is None else [(x,) for x in each]
        asked = [
            getattr(actor, name).remote(*args, *more)
            for actor, more in zip(self._actors, own, strict=True)
        ]
        try:
            yield
        finally:  # No call of it may begin later.
            self._ray.wait(asked, num_returns=len(asked))
        try:
            self._ray.get(asked)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


class Order(NamedTuple):
    """One reading of all processes."""

    each: list[Wanted]  # What each of them reads.
    reading: Reading  # The leader's own.
    form: Form


class GroupTransport(Transport):
    """All processes prepare a push or a pull; then one command in a turn runs it.

    See :class:`~gradxform._server.transport.Transport`.

    Args:
      process: the leader's own parts.
      followers: the other processes.
    """

    def __init__(self, process: Process, followers: Followers) -> None:
        super().__init__(process.core, publishes=True)
        self._process, self._followers = process, followers
        self._types = jax.tree.leaves(self.core.specs.types)
        self._cuts = [cut for each in process.layouts for cut in each.cuts]
        self._layout = process.layouts[0]

    # Pushes.

    @contextlib.contextmanager
    def prepared(self, grads: PushMessage, extra: dict[str, Any]) -> Iterator[Prepared]:
        """Each process prepares its share of the message, which has the ``extra``."""
        followers, key, begun = self._followers, self._followers.key(), False
        own, *others = map(grads.of_process, range(self._layout.processes))

        def step(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            nonlocal begun
            begun = True
            followers.send("push", key, int(local_step))
            try:
                return jax.block_until_ready(prepared.step(leaves, pushed, local_step))
            except BaseException as error:
                # If it failed because another process died, this one ends here.
                followers.failed(summary(error))
                self.core.lose(f"a step failed, {summary(error)}")
                raise

        try:
            with followers.asked("prepare", key, each=others):
                prepared = self._process.prepare(own)
            yield Prepared(step, prepared.leaves)
        finally:
            if not begun:
                followers.send("forget", key)

    # Pulls.

    def whole(self, numbers: Iterable[int], form: Form) -> Whole:
        """See :class:`Transport`."""
        order, specs = self._order(dict.fromkeys(numbers), form), self.core.specs
        tree = specs.params([*range(specs.num_params)])
        return functools.partial(self._gathered, tree, order)

    def rows(self, request: PullRequest) -> SomeRows:
        """See :class:`Transport`."""
        order = self._order(request.rows, request.form)
        return functools.partial(self._rows, request, order)

    def _rows(self, request: PullRequest, order: Order) -> Callable[[], GatheredRows]:
        own, parts = self._read_all(order)
        tables = {
            i: Table(ids, self._types[i].shape, self._cuts[i] or 0)
            for i, ids in request.rows.items()
        }
        sent = [[*share] for share in order.each if share]
        return lambda: GatheredRows(
            tables, sent, [packed_parts(own, order.each[0]), *parts]
        )

    def state(self) -> Response:
        """See :class:`Transport`."""
        self.core.check_there()
        numbers = [*range(len(self.core.version.leaves))]
        every = self._order(dict.fromkeys(numbers), None)
        return Response(self._gathered(self.core.specs.state(numbers), every))

    def _order(self, wanted: Mapping[int, Ids | None], form: Form) -> Order:
        """Divides a reading among the processes, which compile what they lack."""
        shares = [self._share(wanted, k) for k in range(self._layout.processes)]
        sizes = {i: _size([own[i] for own in shares if i in own]) for i in wanted}
        reader = self._process.reader
        lacks = {i: n for i, n in sizes.items() if not reader.has(i, n, form)}
        if lacks:
            # The followers first: what the leader has, all have.
            cut = {i: n for i, n in lacks.items() if self._cuts[i] is not None}
            with self._followers.asked("compile", cut, form):
                pass
            for number, size in lacks.items():
                reader.program(number, size, form)
        each: list[Wanted] = [
            {
                i: None if ids is None else RowIds(ids, sizes[i] or 0)
                for i, ids in own.items()
            }
            for own in shares
        ]
        return Order(each, reader.prepare(each[0], form), form)

    def _share(
        self, wanted: Mapping[int, Ids | None], process: int
    ) -> dict[int, Ids | None]:
        """What one process reads: its own parts; leaves without parts the leader."""
        share: dict[int, Ids | None] = {}
        for number, ids in wanted.items():
            cut, shape = self._cuts[number], self._types[number].shape
            if cut is None and process:
                continue
            if ids is None:
                share[number] = None
                continue
            own = ids[ids < shape[0]]  # Without padding.
            if cut == 0:
                begin, end = self._layout.span(shape, 0, process)
                own = own[(begin <= own) & (own < end)] - begin
            if len(own) or not process:
                share[number] = own
        return share

    def _read_all(self, order: Order) -> tuple[dict[int, jax.Array], list[Any]]:
        """In a turn: own arrays, and references to what the followers send."""
        others = [share or None for share in order.each[1:]]
        parts = self._followers.order("read", others, order.form)
        return self._process.read(order.reading), parts

    def _gathered(self, numbers: PyTree[int], order: Order) -> Gathered:
        """In a turn: a tree, from the numbers of its leaves."""
        own, parts = self._read_all(order)
        cut = {i: axis for i in order.each[0] if (axis := self._cuts[i]) is not None}
        at = {i: Cut(place, axis) for place, (i, axis) in enumerate(cut.items())}
        whole = jax.tree.map(lambda i: at[i] if i in at else own.get(i, i), numbers)
        if cut:
            parts = [packed_parts(own, dict.fromkeys(cut), copies=True), *parts]
        return Gathered(Payload.of(whole, _copied), parts)

    # Checkpoints.

    def snapshot(self) -> Snapshot | None:
        """See :class:`Transport`. It is ready if each process has copied its parts."""
        taken = self.core.snapshot()
        if taken is None:
            return None
        key = self._followers.key()
        self._followers.send("snapshot", key)
        return taken._replace(ready=functools.partial(self._ready, key, taken.state))

    def _ready(self, key: int, state: dict[str, Any]) -> None:
        """On the saver's thread: the followers begin to write theirs, if all have one.

        If one of them would begin alone, it would wait for the others.
        """
        try:
            with self._followers.asked("collect", key):
                jax.block_until_ready(state)
        except BaseException:
            self._followers.send("forget", key)
            raise
        self._followers.send("write", key)

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        like = self._process.like()

        def read(pushes: int) -> Snapshot:
            with self._followers.asked("resume", pushes):
                return store.read(pushes, like)

        snapshot, notes = store.read_newest(like, read)
        return self._process.placed(snapshot), notes


def _size(shares: list[Ids | None]) -> int | None:
    """How many rows of a leaf each process reads; None for all of them."""
    lengths = [len(ids) for ids in shares if ids is not None]
    return size_for(max(lengths)) if lengths else None


def _copied(tree: T) -> T:
    return jax.tree.map(lambda x: copy(x) if isinstance(x, jax.Array) else x, tree)


class Leader:
    """The actor that workers and engines call.

    It begins in steps: all must know where the others are, and then its ports.

    Args:
      key: the secret of the server's processes.
      processes: how many there are.
    """

    def __init__(self, key: bytes, processes: int) -> None:
        self._cause: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._key, self._processes = key, processes

    def listen(self, host: str) -> tuple[str, tuple[str, int]]:
        """Opens its ports at an address of this machine.

        Returns:
          The addresses of JAX's coordinator and of the channel.
        """
        self._commands = CommandChannel(host, self._key, self._end)
        # Holds the port until the coordinator binds to it, too.
        self._reserved = socket.socket()
        if hasattr(socket, "SO_REUSEPORT"):
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((host, 0))
        self._coordinator = f"{host}:{self._reserved.getsockname()[1]}"
        return self._coordinator, self._commands.address

    def cause(self) -> str:
        """Waits until this process has to end; returns why."""
        return self._cause.get()

    def _end(self, why: str) -> None:
        self._cause.put(why)
        time.sleep(LAST_WORD)
        end_process(why)

    def join(
        self,
        followers: list[Any],
        given: list[Any],
        layout: Layout,
        checkpoint: Checkpoint | None = None,
        *,
        pushes: float,
        **options: bool,
    ) -> None:
        """Becomes one of the processes, and takes its part of the parameters.

        Args:
          followers: the actors.
          given: references to its parameters and to the transformation.
          layout: of the parameters.
          checkpoint: where and how often the run is saved.
          pushes: how many pushes with a ``push_id`` it takes.
          options: those of :class:`Process`.
        """
        self._commands.accept(len(followers))
        mesh = enter(self._coordinator, 0, self._processes)
        self._reserved.close()
        params, tx = sys.modules["ray"].get(given)
        self.process = Process(params, layout, mesh, tx, **options)
        others = Followers(self._commands, followers)
        transport = GroupTransport(self.process, others)
        store = None if checkpoint is None else GroupStore(checkpoint)
        self.server = RecoverableServer.of(transport, store, pushes)


def _forwarded(name: str) -> Callable[..., Any]:  # Of any type, as what it calls.
    method = getattr(RecoverableServer, name)

    @functools.wraps(method)  # So Ray knows the arguments.
    def forward(self: Leader, *args: object, **options: object) -> Any:
        return method(self.server, *args, **options)

    return forward


FOR_WORKERS = "pull", "push", "wait", "global_step"  # They push a `PushMessage`.
FOR_ENGINES = "begin", "note", "rest", "save", "state", "stats", "status"
for _name in (*FOR_WORKERS, *FOR_ENGINES):
    setattr(Leader, _name, _forwarded(_name))
