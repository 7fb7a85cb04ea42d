"""How pulls and pushes get from a server's methods to its core, and back."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import jax
import numpy as np
import optax

from gradxform._server.core import Core
from gradxform._server.placement import copy
from gradxform._server.programs import Prepared
from gradxform._server.reader import Reader, Reading, RowIds
from gradxform._server.records import GlobalStep, Snapshot
from gradxform._server.requests import Ids, Key, PullRequest, Tables, size_for
from gradxform._server.serial_executor import SerialExecutor
from gradxform._server.specs import named
from gradxform._server.store import Store
from gradxform._trees.indexed_slices import IndexedSlices, ascending


class Transport(Protocol):
    """What lies between a server's methods and its core, for as long as it lives.

    Attributes:
      core: of the server, in this process.
      tables: the parameters that requests name.
      turns: runs what happens "in a turn", one call after the other.
    """

    core: Core
    tables: Tables
    turns: SerialExecutor

    def prepared(
        self, grads: optax.Updates, extra: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Makes a push ready for its turn, which comes within the context."""
        ...

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        """See :meth:`ParameterServer.pull`; the answer may arrive as the tree."""
        ...

    def state(self) -> Any:
        """In a turn: parameters and state; the answer may arrive as the tree."""
        ...

    def snapshot(self) -> Snapshot | None:
        """In a turn: what this process saves; see :meth:`Core.snapshot`."""
        ...

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        """The newest checkpoint, its arrays at their places; and notes for the user."""
        ...


class Local:
    """Workers are in this process: each gets a copy of its own. See `Transport`."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.reader = Reader(core.specs.params_of(core.version.leaves))
        self.tables = Tables(core.specs.types[0])
        self._whole: dict[Key, Reading] = {}
        self.turns = SerialExecutor("parameter-server")

    def prepared(
        self, grads: optax.Updates, extra: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Prepared]:
        return contextlib.nullcontext(self.core.prepare(grads, extra))

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        others, wanted = self.whole(request.key), self.rows(request)
        read, seen = self.turns.run(self._read, others, wanted)
        read |= {i: self.part(i, ids, read[i]) for i, ids in request.rows.items()}
        return self.core.specs.params([read[i] for i in range(len(read))]), seen

    def _read(
        self, others: Reading, wanted: Reading
    ) -> tuple[dict[int, Any], GlobalStep]:
        self.core.check_usable()
        version = self.core.version
        return (
            wanted.run(version.leaves) | others.run(version.leaves, copy),
            version.step(),
        )

    def whole(self, key: Key) -> Reading:
        """Reads the leaves that a request wants whole."""
        if key not in self._whole:
            tables, form = key
            wanted = set(range(self.core.specs.num_params)) - tables
            self._whole[key] = self.reader.prepare(dict.fromkeys(wanted), form)
        return self._whole[key]

    def rows(self, request: PullRequest) -> Reading:
        """Reads the rows that a request wants."""
        wanted = {i: RowIds(x, size_for(len(x))) for i, x in request.rows.items()}
        return self.reader.prepare(wanted, request.form)

    def part(self, number: int, ids: Ids, rows: jax.Array) -> IndexedSlices:
        """Rows that were read, as the part of their table that was asked for."""
        put = self.reader.placement.put
        if len(ids) != len(rows):
            rows = put(np.array(jax.device_get(rows)[: len(ids)]))
        return ascending(put(ids), rows, self.tables.shapes[number])

    def state(self) -> dict[str, Any]:
        return self.core.state()

    def snapshot(self) -> Snapshot | None:
        return self.core.snapshot()

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        specs = self.core.specs
        snapshot, notes = store.read_newest(specs.state(self.core.version.leaves))
        return snapshot._replace(state=named(specs.place(snapshot.state))), notes
