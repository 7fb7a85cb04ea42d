"""Runs a function of whole tables on the rows that row-sparse gradients touch.

A sum over rows leaves out padding. Rows of two tables do not belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from gradxform._jax import versions
from gradxform._rows.boundary import gather_rows
from gradxform._rows.indexed_slices import IndexedSlices, is_sparse
from gradxform._slices import slices
from gradxform._slices.kinds import Whole
from gradxform._slices.slices import Kind, Policy, Slices, Source
from gradxform._trees import maps
from gradxform._trees.types import Path, PyTree

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


@dataclasses.dataclass(frozen=True)
class Rows:
    """The touched rows of tables.

    Attributes:
      tables: the summed gradients, by the paths of their tables.
    """

    tables: Mapping[Path, IndexedSlices]

    @classmethod
    def of(cls, updates: optax.Updates) -> Rows:
        """The tables that have a row-sparse gradient."""
        return cls(dict(maps.nodes(updates, is_sparse)))

    @property
    def policy(self) -> Policy:
        """A sum leaves out padding."""
        # Devices may have other rows, and other numbers of them.
        refused = versions.OVER_MESH | versions.SAME_VALUES - versions.ELEMENTWISE
        return Policy("row", "table", refused, self._add_up)

    def _add_up(
        self, eqn: JaxprEqn, kinds: list[Kind | None], inputs: list[Any]
    ) -> list[jax.Array]:
        pairs = zip(kinds, inputs, strict=True)
        return versions.bind(
            eqn, [x if k is None else self._filled(eqn, k, x) for k, x in pairs]
        )

    def _filled(self, eqn: JaxprEqn, kind: Kind, x: jax.Array) -> jax.Array:
        """``x`` with the number for padding that changes no result, as 0 for a sum."""
        (axis, entries), g = kind.along, self.tables[kind.source.path]
        nothing = jnp.zeros((), x.dtype)
        if "axes" in eqn.params:  # A reduction of nothing has it as its result.
            (nothing,) = versions.bind(eqn, [jax.lax.slice_in_dim(x, 0, 0, axis=axis)])
            nothing = jnp.expand_dims(nothing, eqn.params["axes"])
        inside = jnp.repeat(
            g.indices < g.shape[0],
            entries,
            total_repeat_length=entries * len(g.indices),
        )
        inside = jnp.expand_dims(inside, [a for a in range(x.ndim) if a != axis])
        return jnp.where(inside, x, nothing)

    def run(
        self,
        f: Callable[..., PyTree[Any]],
        args: tuple[PyTree[Any], ...],
        kinds: Sequence[Kind | None],
    ) -> PyTree[Any]:
        """``f(*args)``, with an ``IndexedSlices`` for each result that has rows.

        ``kinds`` says it of each leaf of the arguments. A result at the path of an
        argument is of its kind.

        Raises:
          MixedSlicesError: a row of the results depends on other rows, but not by a
            sum.
        """
        leaves = maps.leaves_with_path(args)
        found = {i: kind for i, kind in enumerate(kinds) if kind}
        rows: dict[int, jax.Array] = {}
        for i, kind in found.items():
            g, x = self.tables[kind.source.path], leaves[i][1]
            rows[i] = g.values if x is g else gather_rows(g, x)
        program = slices.trace_whole(f, args, found, rows)
        inputs = [Slices(x, found[i]) for i, x in rows.items()]
        evaluator = slices.Evaluator(self.policy)
        results = evaluator.results(program.closed, inputs)
        by_path = {path: kind for (path, _), kind in zip(leaves, kinds, strict=True)}
        positions = jax.tree.unflatten(program.structure, list(range(len(results))))
        found_kinds = [
            by_path.get(path, getattr(x, "kind", None))
            for (path, _), x in zip(
                jax.tree.leaves_with_path(positions), results, strict=True
            )
        ]
        pairs = zip(evaluator.arrays(results, found_kinds), found_kinds, strict=True)
        return jax.tree.unflatten(
            program.structure,
            [
                x
                if kind is None
                else maps.with_values(self.tables[kind.source.path], x)
                for x, kind in pairs
            ],
        )

    def arrays(self) -> dict[Path, Whole]:
        """The tables, as arrays that have rows."""
        return {
            path: Whole(g.shape, source, is_fixed=True)
            for path, g in self.tables.items()
            for source in [Source(max(g.shape[0], 1), len(g.indices), path=path)]
        }
