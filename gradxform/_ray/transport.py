"""How parameters get from a server to workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import optax

from gradxform._ray import wire
from gradxform._ray.followers import Followers
from gradxform._ray.messages import Gathered, Joined, packed_parts
from gradxform._ray.process import part_of
from gradxform._ray.wire import Bytes, Payload
from gradxform._server.core import ServerCore
from gradxform._server.placement import copy
from gradxform._server.reader import Form, Ids, PullRequest, size_for
from gradxform._server.records import GlobalStep
from gradxform._server.transport import Transport
from gradxform._trees.types import PyTree

# The rows of each leaf, by its index; None for the whole.
Wanted: TypeAlias = Mapping[int, Ids | None]
# The tables that a request leaves out of the whole leaves, and the form of these.
Key: TypeAlias = tuple[frozenset[int], Form]
# Leaves, and parts of others.
Sent: TypeAlias = tuple[dict[int, jax.Array], dict[int, Bytes]]
# Is called in a turn; its result is called anywhere, if only rows are read.
Read: TypeAlias = Callable[[], Callable[[], Gathered]]


class Response:
    """Arrays on their way to a worker. They arrive as their tree.

    Args:
      tree: the tree, of the indices of its leaves.
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
        core: ServerCore,
        cuts: Iterable[int | None] = (),
        followers: Followers | None = None,
    ) -> None:
        super().__init__(core)
        wire.register()
        self._tree = core.specs.params([*range(core.specs.num_params)])
        self._types = jax.tree.leaves(core.specs.types)
        self._cuts = [*cuts] or [None] * len(self._types)
        self._followers = followers or Followers([])
        # What the followers have compiled: process, leaf, number of rows, and form.
        self._compiled: set[tuple[int, int, int | None, Form]] = set()
        # What was sent of the newest parameters, for the next who asks for the same.
        # The dict is replaced as a whole, so readers need no lock.
        self._sent: dict[tuple[tuple[str, int], Key], Gathered] = {}

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        # All but the ids: the whole leaves depend on it.
        key = frozenset(request.rows), request.form
        if not request.rows:  # What was sent before needs no turn.
            self.core.check_usable()
            version = self.core.version
            if (sent := self._sent.get((version.of_params(), key))) is not None:
                return Response(self._tree, sent), version.step()
        indices = set(range(self.core.specs.num_params)) - request.rows.keys()
        whole = self._reading(dict.fromkeys(indices), request.form)
        rows = self._reading(request.rows, request.form)

        def publish() -> tuple[Gathered, Callable[[], Gathered], GlobalStep]:
            self.core.check_usable()
            version = self.core.version
            newest = version.of_params()
            if (sent := self._sent.get((newest, key))) is None:
                sent = whole()()
                others = {k: x for k, x in self._sent.items() if k[0] == newest}
                self._sent = {**others, (newest, key): sent}
            return sent, rows(), version.step()

        sent, finish, seen = self.turns.run(publish)
        return Response(self._tree, sent, finish()), seen

    def state(self) -> Response:
        self.core.check_usable(if_closed=False)
        indices = [*range(len(self._types))]
        sent = self._reading(dict.fromkeys(indices), None)()()
        return Response(self.core.specs.arrays(indices), sent)

    def _reading(self, wanted: Wanted, form: Form) -> Read:
        """Divides a reading among the processes, which compile what they lack."""
        own, *others = (self._share(wanted, k) for k in range(len(self._followers) + 1))
        needed = {
            (k, i, None if ids is None else size_for(len(ids)), form)
            for k, share in enumerate(others)
            for i, ids in share.items()
        }
        if not needed <= self._compiled:
            with self._followers.asked("compile", [(form, share) for share in others]):
                pass
            self._compiled |= needed
        reading = self.reader.prepare(own, form)
        joined = {
            i: Joined(self._cuts[i] or 0, self._types[i].shape, ids)
            for i, ids in wanted.items()
            if ids is not None or self._cuts[i] is not None
        }

        def run() -> Callable[[], Gathered]:
            """In a turn: own arrays, and references to what the followers send."""
            parts = self._followers.read(others, form)
            leaves = self.core.version.leaves
            part = part_of if others else lambda x: x
            read = reading.run({i: part(leaves[i]) for i in own})

            def finish() -> Gathered:
                whole = {i: x for i, x in read.items() if i not in joined}
                sent = whole, packed_parts(read, {i: own[i] for i in joined})
                return Gathered(Payload.of(sent, _copied), joined, parts)

            return finish

        return run

    def _share(self, wanted: Wanted, process: int) -> dict[int, Ids | None]:
        """What one process reads: its own parts; leaves without parts the leader."""
        share: dict[int, Ids | None] = {}
        for index, ids in wanted.items():
            cut, shape = self._cuts[index], self._types[index].shape
            if cut is None and process:
                continue
            if ids is None:
                share[index] = None
                continue
            own = ids[ids < shape[0]]  # Without padding.
            if cut == 0:
                height = shape[0] // (len(self._followers) + 1)
                own = own[own // height == process] % height
            if len(own) or not process:
                share[index] = own
        return share


def _copied(sent: Sent) -> Sent:
    """In memory of its own, as the next step may overwrite the server's arrays."""
    whole, parts = sent
    return copy(whole), {i: Bytes(x.array.copy()) for i, x in parts.items()}
