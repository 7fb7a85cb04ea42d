"""How pulls and pushes get from a server's methods to its core, and back."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from gradxform._ray import wire
from gradxform._ray.wire import Payload, Sent
from gradxform._rows.table_rows import TableRows, ascending
from gradxform._server.core import Core
from gradxform._server.placement import copy
from gradxform._server.programs import Prepared
from gradxform._server.reader import (
    Form,
    Ids,
    Key,
    PullRequest,
    Reader,
    Reading,
    RowIds,
    Tables,
    size_for,
)
from gradxform._server.records import GlobalStep, Snapshot, Version
from gradxform._server.serial_executor import SerialExecutor
from gradxform._server.specs import named
from gradxform._server.store import Store

# What a pull does in a turn: it reads whole leaves, and rows. Rows are finished later.
Whole: TypeAlias = Callable[[], Sent]
SomeRows: TypeAlias = Callable[[], Callable[[], Sent]]


class Response:
    """Parameters on their way to a worker. They arrive as their tree.

    Args:
      others: the tree, with a number for each table that is left out.
      rows: the rows of these tables, by their numbers.
    """

    def __init__(self, others: Sent, rows: Sent | None = None) -> None:
        self._parts = others, rows

    def __reduce__(self) -> tuple[Callable[..., optax.Params], tuple[object, ...]]:
        return _arrived, self._parts


def _arrived(others: Sent, rows: Sent | None) -> optax.Params:
    wire.register()  # This worker's pushes travel likewise.
    return _assembled(others, rows)


def _assembled(others: Sent, rows: Sent | None) -> optax.Params:
    tree = others.received()
    if rows is None:
        return tree
    parts = rows.received()
    return jax.tree.map(lambda x: parts[x] if isinstance(x, int) else x, tree)


class Transport:
    """What lies between a server's methods and its core, for as long as it lives.

    A pull is a template. How the leaves are read differs: see :meth:`whole` and
    :meth:`rows`. All else here is that of a server of one process.

    Args:
      core: of the server, in this process.
      publishes: whether workers are in other processes. Then each version is sent once
        for all of them, and a pull answers with references into Ray's store. On the
        worker they turn into the parameters, without another call.

    Attributes:
      core: as given.
      publishes: as given.
      tables: the parameters that requests name.
      turns: runs what happens "in a turn", one call after the other.
    """

    def __init__(self, core: Core, publishes: bool) -> None:
        if publishes:
            wire.register()
        self.core, self.publishes = core, publishes
        self.tables = Tables(core.specs.types[0])
        self.turns = SerialExecutor("parameter-server")
        self._wholes: dict[Key, Whole] = {}
        # What was sent of the newest parameters, for the next who asks for the same.
        # The pair is replaced as a whole, so readers need no lock.
        self._sent: tuple[tuple[str, int] | None, dict[Key, Sent]] = None, {}

    # Pulls.

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        """See :meth:`ParameterServer.pull`; the answer may arrive as the tree."""
        key, respond = request.key, Response if self.publishes else _assembled
        if not request.rows:  # What was sent before needs no turn.
            self.core.check_usable()
            version = self.core.version
            if (sent := self._find(version, key)) is not None:
                return respond(sent, None), version.step()
        if key not in self._wholes:
            numbers = set(range(self.core.specs.num_params)) - request.rows.keys()
            self._wholes[key] = self.whole(numbers, request.form)
        whole, rows = self._wholes[key], self.rows(request)
        sent, finish, seen = self.turns.run(self._read, key, whole, rows)
        return respond(sent, finish() if request.rows else None), seen

    def _read(
        self, key: Key, whole: Whole, rows: SomeRows
    ) -> tuple[Sent, Callable[[], Sent], GlobalStep]:
        self.core.check_usable()
        version = self.core.version
        if (sent := self._find(version, key)) is None:
            sent = whole()
            if self.publishes:
                last, before = self._sent
                before = before if last == version.of_params() else {}
                self._sent = version.of_params(), {**before, key: sent}
        return sent, rows(), version.step()

    def _find(self, version: Version, key: Key) -> Sent | None:
        """What was sent of this version for such a request."""
        last, sent = self._sent
        return sent.get(key) if last == version.of_params() else None

    def whole(self, numbers: Iterable[int], form: Form) -> Whole:
        """Compiles what reads the parameters with these numbers.

        A table that is left out is a number in the tree.
        """
        raise NotImplementedError

    def rows(self, request: PullRequest) -> SomeRows:
        """Compiles the program that reads a request's rows."""
        raise NotImplementedError

    # Pushes.

    def prepared(
        self, grads: Any, extra: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Makes a push ready for its turn, which comes within the context."""
        return contextlib.nullcontext(self.core.prepare(grads, extra))

    # State.

    def state(self) -> Any:
        """In a turn: parameters and state; the answer may arrive as the tree."""
        return self.core.state()

    def snapshot(self) -> Snapshot | None:
        """In a turn: what this process saves; see :meth:`Core.snapshot`."""
        return self.core.snapshot()

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        """The newest checkpoint, its arrays at their places; and notes for the user."""
        specs = self.core.specs
        snapshot, notes = store.read_newest(specs.state(self.core.version.leaves))
        return snapshot._replace(state=named(specs.place(snapshot.state))), notes


class Local(Transport):
    """All arrays are in this process. See `Transport`."""

    def __init__(self, core: Core, publishes: bool = False) -> None:
        super().__init__(core, publishes)
        self.reader = Reader(core.specs.params_of(core.version.leaves))

    def whole(self, numbers: Iterable[int], form: Form) -> Whole:
        reading = self.reader.prepare(dict.fromkeys(numbers), form)
        return functools.partial(self._whole, reading)

    def _whole(self, reading: Reading) -> Payload:
        """In a turn: a copy for one worker, or a reference for all."""
        leaves, specs = self.core.version.leaves, self.core.specs
        read: dict[int, Any]
        read = reading.run(leaves) if self.publishes else reading.run(leaves, copy)
        tree = specs.params([read.get(i, i) for i in range(specs.num_params)])
        if self.publishes:
            return Payload(sys.modules["ray"].put(tree), None)
        return Payload(None, tree)

    def rows(self, request: PullRequest) -> SomeRows:
        wanted = {i: RowIds(x, size_for(len(x))) for i, x in request.rows.items()}
        reading = self.reader.prepare(wanted, request.form)
        return functools.partial(self._rows, request, reading)

    def _rows(self, request: PullRequest, reading: Reading) -> Callable[[], Payload]:
        read = reading.run(self.core.version.leaves)
        return lambda: Payload(
            None, {i: self._part(i, x, read[i]) for i, x in request.rows.items()}
        )

    def _part(self, number: int, ids: Ids, rows: jax.Array) -> TableRows:
        """Rows that were read, as the part of their table that was asked for."""
        put = self.reader.placement.put
        if len(ids) != len(rows):
            rows = put(np.array(jax.device_get(rows)[: len(ids)]))
        return ascending(put(ids), rows, self.tables.shapes[number])
