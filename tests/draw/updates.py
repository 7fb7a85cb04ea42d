"""Draws updates, as users write them, and runs them by layers and by the row.

An update is a program of a gradient ``x`` and a state ``y`` of the same shape. Its last
two results are the update and the new state.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import gradxform as gx
from tests.draw import operations, programs
from tests.draw.programs import How, Program

STEPS = 2
HOW = How((*operations.KEEP, operations.transpose), alike=True, length=4)


@dataclasses.dataclass
class Update:
    """An update of one leaf."""

    program: Program
    by_rows: bool

    def __repr__(self):
        """A program that one can run."""
        return f"{self.program!r}\n# as {'gx.lazy' if self.by_rows else 'layers'}"

    _repr_pretty_ = Program._repr_pretty_

    def check(self):
        """Raises if it is wrong; why it was refused, or None."""
        with programs.wide():
            try:
                return (self.check_rows if self.by_rows else self.check_layers)()
            except (TypeError, ValueError, NotImplementedError) as error:
                return programs.refusal(error)

    def of(self, g, state):
        """The update and the new state."""
        results = self.program.f(g, state, jnp.asarray(self.program.args["w"]))
        alike = [x for x in results if x.shape == g.shape]
        return [*alike, state, g][:2] if len(alike) < 2 else alike[-2:]

    @property
    def tx(self):
        def update(updates, state, params=None):
            new, kept = self.of(updates["a"], state["a"])
            return {"a": -0.1 * new}, {"a": kept}

        return optax.GradientTransformation(
            lambda p: jax.tree.map(jnp.zeros_like, p), update
        )

    def check_layers(self):
        """The whole stack and each layer of it, in two steps."""
        axis, x = self.program.axes["x"], self.program.args["x"]
        grads = [x, self.program.args["y"]]

        def loss_fn(p, g):
            both = jnp.moveaxis(p["a"], axis, 0), jnp.moveaxis(g, axis, 0)
            return lax.scan(lambda c, v: (c + jnp.sum(v[0] * v[1]), None), 0.0, both)[0]

        whole = jax.jit(self.tx.update)
        params = wanted = {"a": jnp.ones_like(x)}
        state = known = self.tx.init(params)
        how = {"layers": ["a"], "two_passes": True, "donate": False}
        step = gx.minimize(loss_fn, self.tx, **how)
        for g in grads:
            updates, known = whole({"a": jnp.asarray(g)}, known, wanted)
            wanted = optax.apply_updates(wanted, updates)
            params, state, _ = step(params, state, g)
        self.close((params, state), (wanted, known))

    def close(self, got, wanted):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)
        message = functools.partial(close, err_msg=repr(self))
        jax.tree.map(message, got, wanted)

    def check_rows(self):
        """Rows that a batch touches, and others, which stay."""
        shape, rng = self.program.args["x"].shape, np.random.default_rng(0)
        ids = rng.integers(0, shape[0] + 1, 4)  # One of them may be padding.
        rows = sorted({*ids.tolist()} - {shape[0]})
        values = rng.standard_normal((4, *shape[1:]))
        dense, table = np.zeros((shape[0] + 1, *shape[1:])), self.program.args["x"]
        np.add.at(dense, ids, values)
        before = self.program.args["y"]
        grads = gx.IndexedSlices(jnp.asarray(ids), jnp.asarray(values), shape)
        tx, args = gx.lazy(self.tx), ({"a": jnp.asarray(before)}, {"a": table})
        updates, state = jax.jit(tx.update)({"a": grads}, *args)
        others = np.delete(np.arange(shape[0]), rows)
        np.testing.assert_array_equal(state["a"][others], before[others])
        g, run = dense[:-1], jax.jit(self.of)
        new, kept = (np.asarray(x)[rows] for x in run(g, before))
        g, before = g.copy(), before.copy()
        g[others], before[others] = rng.standard_normal((2, len(others), *shape[1:]))
        again = [np.asarray(x)[rows] for x in run(g, before)]
        if np.allclose([new, kept], again, equal_nan=True):  # It reads no other row.
            got = (
                np.asarray(updates["a"].densify())[rows],
                state["a"][np.array(rows, int)],
            )
            self.close(got, (-0.1 * new, kept))


@dataclasses.dataclass(frozen=True)
class Updates:
    by_rows: bool

    def drawn(self, integer):
        found = programs.program(integer, HOW)
        return Update(found, self.by_rows) if found else None


FAMILIES = {"updates of layers": Updates(False), "updates of rows": Updates(True)}
