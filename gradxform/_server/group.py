"""One server in several processes: a leader, and followers that do as it does.

All processes share one mesh. Each holds its part of the arrays, and all run the same
compiled steps in the same sequence. The leader is the server: it answers workers,
remembers its answers, and decides. A turn is the time in which it changes or reads the
arrays, one call after the other. In each turn it first tells the followers, so all
processes have the same sequence of turns. Turns are short: all processes prepare a push
before its turn, each its own part.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import socket
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._group.checkpoints import store_of
from gradxform._server.actor import Publisher
from gradxform._server.channel import CommandChannel, end_process
from gradxform._server.checkpoints import Checkpoint, Snapshot
from gradxform._server.layout import AXIS, Layout
from gradxform._server.messages import Cut, Message, Payload, Pulled, Rows, packed
from gradxform._server.placement import Placement, copy
from gradxform._server.programs import Leaves, Step, Stepped
from gradxform._server.records import PushResult, summary
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.rows import RowPrograms, RowRequest, in_order, size_for
from gradxform._server.sharded import ShardedParams
from gradxform._server.store import Store
from gradxform._trees.types import PyTree, T

HOUR = 3600
LAST_WORD = 0.5  # Seconds in which the engine gets the cause of a death.


def host() -> str:
    """The address of this machine in the cluster."""
    return sys.modules["ray"].util.get_node_ip_address()


def enter(coordinator: str, process: int, processes: int) -> Mesh:
    """Makes this process one of several; returns the mesh of one device of each.

    It must come before anything touches JAX's devices in this process.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with contextlib.suppress(AttributeError):  # JAX has this option since 0.8.
        # The service would take SIGTERM away from Ray.
        jax.config.update("jax_enable_preemption_service", False)
    if process:
        await_answer(coordinator)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method="deactivate",  # This is no job of Slurm's.
        initialization_timeout=HOUR,  # The engine notices before when one has died.
    )
    devices = [jax.local_devices(process_index=k)[0] for k in range(processes)]
    mesh = Mesh(np.array(devices), (AXIS,))
    # The first collective waits only half a minute for all processes: do it now, while
    # all are here.
    everywhere = NamedSharding(mesh, P())
    meet = jax.jit(jnp.sum, out_shardings=everywhere)
    meet(
        jax.make_array_from_callback(
            (processes,), NamedSharding(mesh, P(AXIS)), lambda _: np.ones(1, np.float32)
        )
    ).block_until_ready()
    return mesh


def await_answer(address: str) -> None:
    """Returns when somebody listens there: JAX would try again only after a second."""
    host, _, port = address.rpartition(":")
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, int(port)), HOUR),
        ):
            return
        time.sleep(0.02)


class Leader(RecoverableServer):
    """The server, as workers and engines see it.

    It is made in two steps, as its followers must know its address first.

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
        **options: Any,
    ) -> None:
        """Becomes one of the processes, and takes its part of the parameters.

        Args:
          followers: the actors.
          given: references to its parameters and to the transformation.
          layout: of the parameters.
          checkpoint: where and how often the run is saved.
          options: the other arguments of :class:`RecoverableServer`.
        """
        self._commands.accept(len(followers))
        mesh = enter(self.where()[0], 0, self._processes)
        self._reserved.close()
        self._followers = followers
        self._ray = sys.modules["ray"]
        params, tx = self._ray.get(given)
        sharded = ShardedParams(params, layout, mesh)
        store = None if checkpoint is None else store_of(checkpoint, sharded)
        super().__init__(sharded, tx, store, **options)
        self._keys = itertools.count()
        self._prepared: set[int] = set()  # Pushes whose turn has not come yet.
        self._publisher = Publisher(
            self.gather, lambda pulled, rows: pulled._replace(rows=rows)
        )
        params = self._programs.leaves_of_params(self._version.leaves)
        self._programs.rows = _Rows(self, params, layout)

    # Pushes.

    def push(
        self,
        grads: Message,
        local_step: int,
        *,
        push_id: tuple[Hashable, int] | None = None,
        **extra: object,
    ) -> PushResult:
        """See :class:`ParameterServer`; the extra arguments come in the message."""
        key = next(self._keys)
        try:
            return super().push((key, grads), local_step, push_id=push_id)
        finally:
            if key in self._prepared:
                self._prepared.discard(key)
                self._commands.send("forget", key)

    def _prepare(
        self, grads: tuple[int, Message], extra: dict[str, Any]
    ) -> tuple[Step, Leaves]:
        key, message = grads
        self._prepared.add(key)
        each = [message.of_process(k) for k in range(self._processes)]
        with self.asked("prepare", key, each=each[1:]):
            step, pushed = self._programs.prepare(*each[0].open())

        def ordered(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            self._prepared.discard(key)
            self._commands.send("push", key, int(local_step))
            try:
                return jax.block_until_ready(step(leaves, pushed, local_step))
            except BaseException as error:
                # If it failed because another process died, this one ends here.
                self._commands.failed(summary(error))
                self._lost = f"a step failed, {summary(error)}"
                self._wake()
                raise

        return ordered, pushed

    # Pulls.

    def _state(self) -> Any:  # A message, where one process gives the tree itself.
        if self._lost is not None:
            self._check_usable()
        return self.gather(self._programs.state(self._version.leaves))

    def gather(self, tree: PyTree[jax.Array | int]) -> Pulled:
        """In a turn: collects a tree from the parts that all processes hold.

        Args:
          tree: its leaves are the first leaves of the current version, in their
            sequence, or a number instead of each one that is not wanted.
        """
        leaves, structure = jax.tree.flatten(tree)
        sharded = self._programs.sharded
        assert sharded is not None
        layouts = sharded.layouts
        types = [x for each in layouts for x in jax.tree.leaves(each.types)]
        cuts = [cut for each in layouts for cut in each.cuts]
        at: list[int] = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, int):
                leaves[number] = leaf.addressable_data(0)
                if cuts[number] is not None:
                    leaves[number] = Cut(len(at))
                    at.append(number)
        cut = Layout(
            [types[i] for i in at], tuple(cuts[i] for i in at), self._processes
        )
        parts: list[Any] = []
        if at:
            others = self.order("publish", at)
            parts = [parts_of(self._version.leaves, at), *others]
        whole = jax.tree.unflatten(structure, leaves)
        return Pulled(Payload.of(whole, _copied), cut, parts, {})

    def order(
        self, name: str, *args: object, each: Sequence[object] | None = None
    ) -> list[Any]:
        """In a turn: gives followers an order; returns references to their results.

        Args:
          name: of the order.
          args: for all of them.
          each: one more argument for each follower; where it is None, that follower
            gets no order.
        """
        key = next(self._keys)
        self._commands.send(name, key, *args, each=each)
        told = self._followers if each is None else each
        return [
            follower.take.remote(key)
            for follower, own in zip(self._followers, told, strict=True)
            if own is not None
        ]

    @contextlib.contextmanager
    def asked(
        self, name: str, *args: object, each: Sequence[object] | None = None
    ) -> Iterator[None]:
        """Calls a method of all followers while the body of the ``with`` runs.

        It needs no turn. If the body raises no error, an error of theirs is raised.
        """
        own = [()] * len(self._followers) if each is None else [(x,) for x in each]
        asked = [
            getattr(follower, name).remote(*args, *more)
            for follower, more in zip(self._followers, own, strict=True)
        ]
        try:
            yield
        finally:  # No call of it may begin later.
            self._ray.wait(asked, num_returns=len(asked))
        try:
            self._ray.get(asked)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    # Checkpoints.

    def restore(self, state: dict[str, Any]) -> NoReturn:
        """Not supported: no process holds a whole state."""
        raise NotImplementedError(
            "a server of several processes can only go back to a checkpoint: give the "
            "engine one."
        )

    def _snapshot(self) -> Snapshot:
        taken = super()._snapshot()
        self._commands.send("snapshot", taken.pushes, taken.counters)
        return taken

    def _read(self, store: Store, pushes: int, like: dict[str, Any]) -> Snapshot:
        with self.asked("resume", pushes):
            return store.read(pushes, like)


def parts_of(leaves: Leaves, at: list[int]) -> Payload:
    """The parts of some leaves in this process, ready to be sent."""
    parts = [np.asarray(leaves[i].addressable_data(0)) for i in at]
    return Payload.of(packed(parts), copy=lambda _: packed(map(np.array, parts)))


def _copied(tree: T) -> T:
    return jax.tree.map(lambda x: copy(x) if isinstance(x, jax.Array) else x, tree)


class _Rows(RowPrograms):
    """Lets all processes read the rows that they hold, of the same version."""

    def __init__(self, leader: Leader, params: optax.Params, layout: Layout) -> None:
        super().__init__(layout.types, Placement(params))
        self._leader, self._layout = leader, layout
        self._local = LocalRows(params)
        self._ready: set[tuple[int, int]] = set()  # In all processes.

    def _wanted(self, number: int, asked: np.ndarray[Any, Any]) -> RowRequest:
        shape, cut = self._types[number].shape, self._layout.cuts[number]
        height = shape[0]
        each: list[Any]  # Ids for each process, or None.
        given = in_order(asked, len(asked), height)
        ids = given[given < height]
        processes = self._layout.processes
        if cut is None:
            each = [ids, *[None] * (processes - 1)]
        elif cut == 0:
            spans = [self._layout.span(shape, 0, k) for k in range(processes)]
            each = [ids[(a <= ids) & (ids < b)] - a for a, b in spans]
            each[1:] = [own if len(own) else None for own in each[1:]]
        else:
            each = [ids] * processes
        size = size_for(max(len(own) for own in each if own is not None))
        if (number, size) not in self._ready:
            with self._leader.asked("ready", number, size):
                self._local.ready(number, size)
            self._ready.add((number, size))
        return RowRequest(given, functools.partial(self._read, number, size, each))

    def _read(
        self, number: int, size: int, each: list[Any], table: jax.Array
    ) -> list[Any]:
        """In a turn: the rows of each process, as a function or references."""
        parts = self._leader.order("read", number, size, each=each[1:])
        own = self._local.read(table, number, size, each[0])
        return [own, *parts]

    def part(self, number: int, wanted: RowRequest, rows: Any) -> Any:  # A message.
        own, *parts = rows
        shape, cut = self._types[number].shape, self._layout.cuts[number]
        return Rows(wanted.indices, shape, cut or 0, [own(), *parts])


class LocalRows:
    """Reads rows of a process's parts of tables."""

    def __init__(self, params: optax.Params) -> None:
        parts = [x.addressable_data(0) for x in jax.tree.leaves(params)]
        place = Placement(parts)
        types = [place.abstract(x.aval, x.sharding) for x in parts]
        self._heights = [x.shape[0] if x.shape else 0 for x in parts]
        self._programs = RowPrograms(types, place)

    def ready(self, number: int, size: int) -> None:
        """Compiles the program that reads ``size`` rows of a leaf."""
        self._programs.program(number, size)

    def read(
        self, table: jax.Array, number: int, size: int, ids: np.ndarray[Any, Any]
    ) -> Callable[[], list[Any]]:
        """Begins to read rows; returns a function that gives them as a list of one.

        Args:
          table: the leaf, an array of the mesh.
          number: of the leaf.
          size: how many rows the compiled program reads; at least as many as ids.
          ids: ascending, each once, counted from the start of this part of the table.
        """
        part = table.addressable_data(0)
        given = in_order(ids, size, self._heights[number])
        rows = self._programs.program(number, size)(
            part, jax.device_put(given, part.sharding)
        )
        return lambda: packed([np.asarray(rows)[: len(ids)]])
