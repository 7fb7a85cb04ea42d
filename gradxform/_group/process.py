"""What every process of a server holds and does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from gradxform._group.messages import Message
from gradxform._group.sharded import ShardedParams
from gradxform._server.core import Core
from gradxform._server.programs import (
    Prepared,
    PushPrograms,
    check_finite,
)
from gradxform._server.reader import Reader, Reading, RowIds
from gradxform._server.records import Snapshot
from gradxform._server.specs import Specs, leaves_like, named
from gradxform._server.wire import Payload, packed

# The rows of each leaf, by its number; None for the whole.
Wanted: TypeAlias = Mapping[int, RowIds | None]


class Process:
    """The parts of the arrays in one process, their core, and their reader.

    All processes must make it together.

    Args:
      sharded: the parameters.
      tx: the transformation.
      donate: see :class:`ParameterServer`.
      require_finite: see :class:`ParameterServer`.
    """

    def __init__(
        self,
        sharded: ShardedParams,
        tx: optax.GradientTransformation,
        *,
        donate: bool = True,
        require_finite: bool = False,
    ) -> None:
        self.sharded, self._require_finite = sharded, require_finite
        tx, params, state = sharded.initialize(tx)
        specs = Specs(params, state)
        self._programs = PushPrograms(sharded.step(tx), specs, donate)
        self.core = Core(tx, params, state, specs, self._prepared)
        self.reader = Reader([part_of(x) for x in self.core.version.leaves])

    # Pushes.

    def prepare(self, message: Message) -> Prepared:
        """Makes this process's share of a push ready for its turn."""
        return self.core.prepare(*message.open())

    def _prepared(self, grads: optax.Updates, extra: dict[str, Any]) -> Prepared:
        if self._require_finite:  # Before `bring`: an array of the mesh asks everybody.
            check_finite(grads)
        pushed = self.sharded.bring(grads), self.sharded.bring(extra, depth=1)
        leaves, tree = jax.tree.flatten(pushed)
        with jax.disable_jit(False):  # No process runs a step by itself.
            step = self._programs.find(leaves, tree).step
        return Prepared(step, jax.block_until_ready(leaves))

    # Pulls.

    def read(self, reading: Reading) -> dict[int, jax.Array]:
        """In a turn: arrays of this process."""
        leaves = self.core.version.leaves
        return reading.run({i: part_of(leaves[i]) for i in reading.numbers})

    # Checkpoints.

    def like(self) -> dict[str, Any]:
        """Describes parameters and state, and deletes them, to make room for others."""
        for x in self.core.version.leaves:
            x.delete()
        return named(self.core.specs.types)

    def placed(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot whose arrays are where this process needs them."""
        own = named(self.core.specs.types)
        state = {
            name: self.sharded.own(snapshot.state[name], of=number)
            for number, name in enumerate(own)
        }
        leaves = leaves_like("state", state, "the server's state", own)
        return snapshot._replace(
            state=jax.block_until_ready(self.core.specs.state(leaves))
        )


def part_of(x: jax.Array) -> jax.Array:
    """The part of an array in this process."""
    return x.addressable_data(0)


def packed_parts(
    read: Mapping[int, jax.Array], wanted: Wanted, copies: bool = False
) -> Payload:
    """What a process sends of its arrays, in the sequence of ``wanted``.

    Args:
      read: the arrays.
      wanted: how many rows of them.
      copies: whether the next step may overwrite the arrays.
    """
    arrays = [
        np.asarray(read[i])[: None if rows is None else len(rows.ids)]
        for i, rows in wanted.items()
    ]
    copy = np.array if copies else np.asarray
    return Payload.of(packed(arrays), lambda _: packed(map(copy, arrays)))
