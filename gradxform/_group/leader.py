"""The leader of a server's processes: it is the server for everybody else."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import sys
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gradxform._group.channel import CommandChannel, end_process
from gradxform._group.checkpoints import store_of
from gradxform._group.layout import Layout, Type
from gradxform._group.mesh import enter, host
from gradxform._group.messages import Cut, Gathered, GatheredRows, Message, Table
from gradxform._group.process import Process, Wanted, packed_parts
from gradxform._group.sharded import ShardedParams
from gradxform._server.actor import Answer, Cache
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.placement import copy
from gradxform._server.programs import Prepared, Stepped
from gradxform._server.reader import Reading, RowIds
from gradxform._server.records import (
    GlobalStep,
    PushResult,
    ServerStats,
    ServerStatus,
    Snapshot,
    summary,
)
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.requests import (
    Form,
    Ids,
    Key,
    PullRequest,
    Tables,
    size_for,
)
from gradxform._server.serial_executor import SerialExecutor
from gradxform._server.specs import Leaves
from gradxform._server.store import Store
from gradxform._server.wire import Payload, Sent, register
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
            actor.take.remote(key)
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


class GroupTransport:
    """All processes prepare a push or a pull; then one command in a turn runs it.

    See :class:`~gradxform._server.transport.Transport`.

    Args:
      process: the leader's own parts.
      followers: the other processes.
    """

    def __init__(self, process: Process, followers: Followers) -> None:
        register()
        self._process, self._followers = process, followers
        self.core, layouts = process.core, process.sharded.layouts
        self._types = [x for each in layouts for x in jax.tree.leaves(each.types)]
        self._cuts = [cut for each in layouts for cut in each.cuts]
        self._layout = layouts[0]
        self.tables = Tables(self._layout.types)
        self._cache = Cache()
        self._wholes: dict[Key, Order] = {}
        self.turns = SerialExecutor("parameter-server")

    # Pushes.

    @contextlib.contextmanager
    def prepared(self, grads: Message, extra: dict[str, Any]) -> Iterator[Prepared]:
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

    def pull(self, request: PullRequest) -> tuple[Answer, int]:
        if not request.rows:  # What is cached needs no turn.
            self.core.check_usable()
            version = self.core.version
            if (found := self._cache.find(version, request.key)) is not None:
                return Answer(found), version.step()
        others = self._whole(request.key)
        wanted = self._order(request.rows, request.form)
        sent, read, parts, seen = self.turns.run(self._send, request, others, wanted)
        if not request.rows:
            return Answer(sent), seen
        own = packed_parts(read, wanted.each[0])
        return Answer(sent, self._gathered_rows(request, wanted, [own, *parts])), seen

    def _send(
        self, request: PullRequest, others: Order, wanted: Order
    ) -> tuple[Sent, dict[int, jax.Array], list[Any], GlobalStep]:
        self.core.check_usable()
        version, specs = self.core.version, self.core.specs
        sent = self._cache.find(version, request.key)
        if sent is None:
            numbers = specs.params([*range(specs.num_params)])
            sent = self._gathered(numbers, others)
            self._cache.add(version, request.key, sent)
        return sent, *self._read(wanted), version.step()

    def state(self) -> Answer:
        self.core.check_there()
        numbers = [*range(len(self.core.version.leaves))]
        every = self._order(dict.fromkeys(numbers), None)
        return Answer(self._gathered(self.core.specs.state(numbers), every))

    def _whole(self, key: Key) -> Order:
        """Reads the leaves that a request wants whole."""
        if key not in self._wholes:
            tables, form = key
            wanted = set(range(self.core.specs.num_params)) - tables
            self._wholes[key] = self._order(dict.fromkeys(wanted), form)
        return self._wholes[key]

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

    def _read(self, order: Order) -> tuple[dict[int, jax.Array], list[Any]]:
        """In a turn: own arrays, and references to what the followers send."""
        others = [share or None for share in order.each[1:]]
        parts = self._followers.order("read", others, order.form)
        return self._process.read(order.reading), parts

    def _gathered(self, numbers: PyTree[int], order: Order) -> Gathered:
        """In a turn: a tree, from the numbers of its leaves."""
        own, parts = self._read(order)
        cut = [i for i in order.each[0] if self._cuts[i] is not None]
        at = {number: Cut(i) for i, number in enumerate(cut)}
        layout = Layout(
            [self._type(i, order.form) for i in cut],
            tuple(self._cuts[i] for i in cut),
            self._layout.processes,
        )
        whole = jax.tree.map(lambda i: at[i] if i in at else own.get(i, i), numbers)
        if cut:
            parts = [packed_parts(own, dict.fromkeys(cut), copies=True), *parts]
        return Gathered(Payload.of(whole, _copied), layout, parts)

    def _type(self, number: int, form: Form) -> Type:
        dtype = self._process.reader.dtype(number, form)
        return jax.ShapeDtypeStruct(self._types[number].shape, dtype)

    def _gathered_rows(
        self, request: PullRequest, order: Order, parts: list[Any]
    ) -> GatheredRows:
        tables = {
            i: Table(ids, self._types[i].shape, self._cuts[i] or 0)
            for i, ids in request.rows.items()
        }
        return GatheredRows(tables, [[*share] for share in order.each if share], parts)

    # Checkpoints.

    def snapshot(self) -> Snapshot | None:
        taken = self.core.snapshot()
        if taken is not None:
            self._followers.send("snapshot")
        return taken

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

    It begins in two steps, as its followers must know its address first.

    Args:
      key: the secret of the server's processes.
      processes: how many there are.
    """

    def __init__(self, key: bytes, processes: int) -> None:
        self._cause: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._commands = CommandChannel(host(), key, self._end)
        # Holds the port until the coordinator binds to it, too.
        self._reserved = socket.socket()
        if hasattr(socket, "SO_REUSEPORT"):
            self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((host(), 0))
        self._processes = processes

    def where(self) -> tuple[str, tuple[str, int]]:
        """The addresses of JAX's coordinator and of the channel."""
        address, port, *_ = self._reserved.getsockname()
        return f"{address}:{port}", self._commands.address

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
        mesh = enter(self.where()[0], 0, self._processes)
        self._reserved.close()
        params, tx = sys.modules["ray"].get(given)
        sharded = ShardedParams(params, layout, mesh)
        self.process = Process(sharded, tx, **options)
        others = Followers(self._commands, followers)
        transport = GroupTransport(self.process, others)
        store = None if checkpoint is None else store_of(checkpoint, sharded)
        self._server = RecoverableServer.of(transport, store, pushes)

    # The server, for engines and workers.

    def begin(self) -> ServerStatus:
        return self._server.begin()

    def pull(self, *request: Any) -> tuple[Any, int]:  # As ParameterServer.pull.
        return self._server.pull(*request)

    def push(
        self,
        grads: Message,
        local_step: int,
        *,
        push_id: tuple[Hashable, int] | None = None,
    ) -> PushResult:
        return self._server.push(grads, local_step, push_id=push_id)

    def wait(self, global_step: int, timeout: float | None = None) -> int:
        return self._server.wait(global_step, timeout)

    def global_step(self) -> int:
        return self._server.global_step()

    def state(self) -> Any:  # An answer, which arrives as the tree.
        return self._server.state()

    def stats(self) -> ServerStats:
        return self._server.stats()

    def status(self) -> ServerStatus:
        return self._server.status()

    def note(self, ahead: dict[int, int | None]) -> None:
        self._server.note(ahead)

    def rest(self) -> ServerStatus:
        return self._server.rest()

    def save(self) -> int | None:
        return self._server.save()
