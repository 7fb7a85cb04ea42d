"""How parameters get from a server to workers in other processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from gradxform._ray import wire
from gradxform._ray.followers import Followers
from gradxform._ray.layout import span
from gradxform._ray.messages import Gathered, Joined, packed_parts
from gradxform._ray.wire import Payload
from gradxform._server.core import Core
from gradxform._server.placement import copy
from gradxform._server.reader import (
    Form,
    Ids,
    Key,
    PullRequest,
    Reading,
    RowIds,
    size_for,
)
from gradxform._server.records import GlobalStep, Version
from gradxform._server.transport import Transport
from gradxform._trees.types import PyTree, T

# The rows of each leaf, by its number; None for the whole.
Wanted: TypeAlias = Mapping[int, Ids | None]
# Is called in a turn; its result is called anywhere, if only rows are read.
Read: TypeAlias = Callable[[], Callable[[], Gathered]]


class Response:
    """Arrays on their way to a worker. They arrive as their tree.

    Args:
      tree: the tree, of the numbers of its leaves.
      sent: the leaves.
    """

    def __init__(self, tree: PyTree[int], *sent: Gathered) -> None:
        self._parts = tree, *sent

    def __reduce__(self) -> tuple[Callable[..., optax.Params], tuple[object, ...]]:
        return _arrived, self._parts


def _arrived(tree: PyTree[int], *sent: Gathered) -> optax.Params:
    wire.register()  # This worker's pushes travel likewise.
    leaves = {i: x for each in sent for i, x in each.received().items()}
    return jax.tree.map(leaves.__getitem__, tree)


class RayTransport(Transport):
    """The transport of a server that is a Ray actor, for workers in other processes.

    Each version is sent once for all of them. A pull answers with references into Ray's
    store, which turn into the parameters on the worker, without another call.

    Args:
      core: of the server, in this process.
      cuts: for each leaf the axis along which it lies in parts in several processes;
        by default none does.
      followers: the other processes.
    """

    def __init__(
        self,
        core: Core,
        cuts: Iterable[int | None] = (),
        followers: Followers | None = None,
    ) -> None:
        super().__init__(core)
        wire.register()
        self._tree = core.specs.params([*range(core.specs.num_params)])
        self._types = jax.tree.leaves(core.specs.types)
        self._cuts = [*cuts] or [None] * len(self._types)
        self._followers = followers or Followers([])
        self._reads: dict[Key, Read] = {}
        # What was sent of the newest parameters, for the next who asks for the same.
        # The pair is replaced as a whole, so readers need no lock.
        self._sent: tuple[tuple[str, int] | None, dict[Key, Gathered]] = None, {}

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        key = request.key
        if not request.rows:  # What was sent before needs no turn.
            self.core.check_usable()
            version = self.core.version
            if (sent := self._find(version, key)) is not None:
                return Response(self._tree, sent), version.step()
        if key not in self._reads:
            numbers = set(range(self.core.specs.num_params)) - request.rows.keys()
            self._reads[key] = self._reading(dict.fromkeys(numbers), request.form)
        whole, rows = self._reads[key], self._reading(request.rows, request.form)
        sent, finish, seen = self.turns.run(self._publish, key, whole, rows)
        return Response(self._tree, sent, finish()), seen

    def _publish(
        self, key: Key, whole: Read, rows: Read
    ) -> tuple[Gathered, Callable[[], Gathered], GlobalStep]:
        self.core.check_usable()
        version = self.core.version
        if (sent := self._find(version, key)) is None:
            sent = whole()()
            last, before = self._sent
            before = before if last == version.of_params() else {}
            self._sent = version.of_params(), {**before, key: sent}
        return sent, rows(), version.step()

    def _find(self, version: Version, key: Key) -> Gathered | None:
        """What was sent of this version for such a request."""
        last, sent = self._sent
        return sent.get(key) if last == version.of_params() else None

    def state(self) -> Response:
        self.core.check_usable(if_closed=False)
        numbers = [*range(len(self._types))]
        sent = self._reading(dict.fromkeys(numbers), None)()()
        return Response(self.core.specs.arrays(numbers), sent)

    def _reading(self, wanted: Wanted, form: Form) -> Read:
        """Divides a reading among the processes, which compile what they lack."""
        shares = [self._share(wanted, k) for k in range(len(self._followers) + 1)]
        sizes = {i: _size([own[i] for own in shares if i in own]) for i in wanted}
        lacks = {i: n for i, n in sizes.items() if not self.reader.has(i, n, form)}
        cut = {i: n for i, n in lacks.items() if self._cuts[i] is not None}
        if cut:  # The followers first: what the leader has, all have.
            with self._followers.asked("compile", cut, form):
                pass
        each = [
            {
                i: None if ids is None else RowIds(ids, sizes[i] or 0)
                for i, ids in own.items()
            }
            for own in shares
        ]
        reading = self.reader.prepare(each[0], form)
        return functools.partial(self._run, wanted, each, reading, form)

    def _share(self, wanted: Wanted, process: int) -> dict[int, Ids | None]:
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
                begin, end = span(shape[0], len(self._followers) + 1, process)
                own = own[(begin <= own) & (own < end)] - begin
            if len(own) or not process:
                share[number] = own
        return share

    def _run(
        self,
        wanted: Wanted,
        each: list[dict[int, RowIds | None]],
        reading: Reading,
        form: Form,
    ) -> Callable[[], Gathered]:
        """In a turn: own arrays, and references to what the followers send."""
        parts = self._followers.read(each[1:], form)
        leaves = self.core.version.leaves
        read = reading.run({i: self._own(leaves[i]) for i in reading.numbers})
        joined = {
            i: Joined(self._cuts[i] or 0, self._types[i].shape, ids)
            for i, ids in wanted.items()
            if ids is not None or self._cuts[i] is not None
        }
        own = {i: rows for i, rows in each[0].items() if i in joined}
        whole = {i: x for i, x in read.items() if i not in joined}

        def finish() -> Gathered:
            return Gathered(
                Payload.of(whole, _copied),
                joined,
                [[*own], *[[*share] for share in each[1:] if share]],
                [packed_parts(read, own, copies=bool(reading.plain)), *parts],
            )

        return finish

    def _own(self, x: jax.Array) -> jax.Array:
        """The array that this process reads of a leaf."""
        return x


def _size(shares: list[Ids | None]) -> int | None:
    """How many rows of a leaf each process reads; None for all of them."""
    lengths = [len(ids) for ids in shares if ids is not None]
    return size_for(max(lengths)) if lengths else None


def _copied(tree: T) -> T:
    return jax.tree.map(lambda x: copy(x) if isinstance(x, jax.Array) else x, tree)
