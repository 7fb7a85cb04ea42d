"""Draws optimizers of matrices that read tables of NumPy where a program is inside.

``whole_matrices`` runs them on a mesh. On one device, without it, numbers are equal.
"""

import dataclasses
import itertools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.draw.operations import Draw

# What an iteration does with a matrix ``x`` and two numbers of the table.
STEPS = {
    "newton-schulz": "a * x + b * x @ x.T @ x",
    "of a normed one": "a * x / (1 + jnp.linalg.norm(x)) + b * x",
    "with factors": "b * jnp.linalg.qr(x.T @ x + a * jnp.eye(x.shape[1]))[0] @ x.T",
}
STEPS["with factors"] = f"({STEPS['with factors']}).T"
# How it is called, with the number of the iteration.
LOOPS = {
    "fori_loop": "lax.fori_loop(0, {n}, once, x)",
    "while_loop": "lax.while_loop(lambda c: c[0] < {n}, "
    "lambda c: (c[0] + 1, once(c[0], c[1])), (0, x))[1]",
    "scan": "lax.scan(lambda c, i: (once(i, c), None), x, jnp.arange({n}))[0]",
    "cond": "lax.cond(x[0, 0] > 0, lambda v: once(0, v), "
    "lambda v: once({n} - 1, v), x)",
    "once": "once({n} - 1, x)",
}
# How the update of a tree ``u`` is made of that of an array.
TREES = {
    "leaf by leaf": "jax.tree.map(of, u)",
    "a loop": "lax.fori_loop(0, {n}, lambda _, t: jax.tree.map(of, t), u)",
    "a scan": "lax.scan(lambda t, _: (jax.tree.map(of, t),) * 2, u, length={n})[0]",
    "a conditional": "lax.cond(optax.tree.norm(u) > {n}, "
    "lambda t: jax.tree.map(of, t), lambda t: t, u)",
    "a number of all": "lax.cond({n} > 1, lambda t: jax.tree.map("
    "lambda x: of(x / optax.tree.norm(jax.tree.map(of, t))), t), lambda t: t, u)",
}
# What the iteration is inside of.
INSIDE = {
    "nothing": "",
    "jit": "@jax.jit\n",
    "two jits": "@jax.jit\n@jax.jit\n",
    "checkpoint": "@jax.checkpoint\n",
    "a derivative of its own": "@jax.custom_jvp\n",
    "one pulled back": "@jax.custom_vjp\n",
}


@dataclasses.dataclass
class Matrices:
    """Optimizers of one process, which differ in their tables alone.

    Attributes:
      text: a function that makes one of a table.
      tables: of each of them.
      shapes: of the matrices, or of stacks of them.
      kind: of the mesh axis.
      chosen: each two of the names that were drawn.
    """

    text: str
    tables: list[list[list[float]]]
    shapes: dict[str, tuple[int, ...]]
    kind: AxisType
    chosen: set[tuple[str, ...]]

    def __repr__(self):
        return f"\n{self.text}# {self.tables} {self.shapes} {self.kind}"

    def check(self):
        """Raises if one of them has other numbers on a mesh."""
        names = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
        exec(self.text, names)
        mesh = jax.make_mesh((4,), ("x",), (self.kind,), devices=jax.devices()[:4])
        rng = np.random.default_rng(0)
        grads = {
            k: 0.2 * rng.standard_normal(s).astype(np.float32)
            for k, s in self.shapes.items()
        }
        there = {
            k: jax.device_put(g, NamedSharding(mesh, P("x"))) for k, g in grads.items()
        }
        at = jax.tree.map(lambda g: g.sharding, there)
        for table in self.tables:
            tx = names["optimizer"](np.array(table, np.float32))
            whole = gx.whole_matrices(tx, at)

            def update(tx, g):
                return tx.update(g, tx.init(g), g)[0]

            got = jax.jit(update, static_argnums=0)(whole, there)
            wanted = jax.jit(update, static_argnums=0)(tx, grads)
            for k in grads:
                close = {"rtol": 1e-4, "atol": 1e-4 * np.abs(wanted[k]).max()}
                np.testing.assert_allclose(
                    got[k], wanted[k], **close, err_msg=f"{self}"
                )


class Draws:
    """Draws them."""

    def drawn(self, integer):
        d, n = Draw(integer), integer(1, 3)
        chosen = [d.one_of(names) for names in (STEPS, INSIDE, LOOPS, TREES)]
        step, around, loop, tree = chosen
        lines = "a, b = jnp.take(table, i, axis=0)\n"
        lines += f"return {STEPS[step]}\n"
        inside = INSIDE[around]
        text = f"{inside}def once(i, x):\n{textwrap.indent(lines, '    ')}"
        if "jvp" in inside:
            text += "once.defjvp(lambda p, t: (once(*p), t[1]))\n"
        if "vjp" in inside:
            text += "def back(_, t):\n    return None, t\n"
            text += "once.defvjp(lambda i, x: (once(i, x), None), back)\n"
        text += f"def each(x):\n    return {LOOPS[loop].format(n=n)}\n"
        text += "def of(x):\n    return jax.vmap(of)(x) if x.ndim > 2 else each(x)\n"
        text += f"return optax.stateless(lambda u, _: {TREES[tree].format(n=n)})\n"
        text = f"import optax\ndef optimizer(table):\n{textwrap.indent(text, '    ')}"
        tables = [
            [[integer(1, 9) / 4, -integer(1, 9) / 8] for _ in range(n)]
            for _ in range(2)
        ]
        shapes = {
            name: d.one_of([(8, 4), (16, 8), (4, 8, 4), (8, 4, 4)])
            for name in "ab"[: integer(1, 2)]
        }
        kind = AxisType.Explicit if d.chance() else AxisType.Auto
        pairs = {*itertools.combinations([*chosen, kind.name], 2)}
        return Matrices(text, tables, shapes, kind, pairs)


FAMILIES = {"matrices": Draws()}
