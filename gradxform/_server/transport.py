"""How pulls and pushes get from a server's methods to its core, and back."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np

from gradxform._rows.stored_rows import unchecked
from gradxform._rows.table_rows import TableRows
from gradxform._server.core import ServerCore
from gradxform._server.placement import copy
from gradxform._server.programs import Prepared
from gradxform._server.reader import Ids, PullRequest, Reader, Reading, TablePaths
from gradxform._server.records import GlobalStep, Snapshot
from gradxform._server.serial_executor import SerialExecutor
from gradxform._server.store import Store


class Transport:
    """What lies between a server's methods and its core, for workers on threads.

    Args:
      core: of the server.
      turns: of the server; by default new ones.

    Attributes:
      core: as given.
      reader: of its arrays.
      tables: the parameters that requests name.
      turns: runs what happens "in a turn", one call after the other.
    """

    def __init__(self, core: ServerCore, turns: SerialExecutor | None = None) -> None:
        self.core = core
        self.reader = Reader(core.version.leaves)
        self.tables = TablePaths(core.specs.types["params"])
        self.turns = turns or SerialExecutor("parameter-server")

    def pull(self, request: PullRequest) -> tuple[Any, int]:
        """See :meth:`ParameterServer.pull`."""
        whole = dict.fromkeys(range(self.core.specs.num_params))
        wanted = {**whole, **request.rows}
        reading = self.reader.prepare(wanted, request.form)
        read, seen = self.turns.run(self._read, reading)
        read |= {i: self._part(i, x, read[i]) for i, x in request.rows.items()}
        return self.core.specs.params([read[i] for i in wanted]), seen

    def _read(self, reading: Reading) -> tuple[dict[int, Any], GlobalStep]:
        self.core.check_usable()
        version = self.core.version
        read = reading.run(version.leaves)
        return read | copy({i: read[i] for i in reading.plain}), version.step()

    def _part(self, index: int, ids: Ids, rows: jax.Array) -> TableRows:
        """Rows that were read, as the part of their table that was asked for."""
        put = self.reader.placement.put
        if len(ids) != len(rows):
            rows = put(np.array(jax.device_get(rows)[: len(ids)]))
        return unchecked(TableRows, put(ids), rows, self.tables.shapes[index])

    def prepared(
        self, grads: Any, extra: dict[str, Any]
    ) -> contextlib.AbstractContextManager[Prepared]:
        """Makes a push ready for its turn, which comes within the context."""
        return contextlib.nullcontext(self.core.prepare(grads, extra))

    def state(self) -> Any:
        """In a turn: parameters and state."""
        return self.core.state()

    def snapshot(self) -> Snapshot | None:
        """In a turn: what this process saves; see :meth:`ServerCore.snapshot`."""
        return self.core.snapshot()

    def read_newest(self, store: Store) -> tuple[Snapshot, list[str]]:
        """The newest checkpoint, its arrays at their places; and notes for the user."""
        specs = self.core.specs
        snapshot, notes = store.read_newest(specs.arrays(self.core.version.leaves))
        return snapshot._replace(state=specs.put(snapshot.state)), notes
