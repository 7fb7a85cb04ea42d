"""Draws losses with a ``jit`` inside that says where arrays lie, or reads constants.

A batch of 16 rows lies on four devices. A product of the compiled step has as many rows
as in the ordinary step, and its numbers are equal.
"""

import dataclasses
import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.draw.operations import Draw

ROWS, WIDTH, LAYERS = 16, 8, 3
# The jit says where rows lie, and goes around one of these.
PLACED = {
    "the batch": "x = jax.jit(lambda x: x, out_shardings=rows)(x)\n",
    "a function of the batch": "x = jax.jit(jnp.sin, in_shardings=rows)(x)\n",
    "two jits": "x = jax.jit(jax.jit(jnp.sin, out_shardings=rows))(x)\n",
    "a constraint in a jit": "x = jax.jit(lambda x: "
    "lax.with_sharding_constraint(x, rows))(x)\n",
    "the stack": "scan = jax.jit(scan, in_shardings=(None, rows), "
    "out_shardings=rows)\n",
    "the stack, and a checkpoint": "scan = jax.jit(jax.checkpoint(scan), "
    "in_shardings=(None, rows), out_shardings=rows)\n",
    "each layer": "layer = jax.jit(layer, out_shardings=rows)\n",
    "the result": "after = jax.jit(jnp.sin, in_shardings=rows)\n",
}
# What a layer reads: an array of NumPy. Each loss has another one.
CONSTANTS = {
    "none": "",
    "in a jit": "layer = jax.jit(lambda x, w, f=layer: f(x, w) * table[None])\n",
    "by a cond": "layer = jax.jit(lambda x, w, f=layer: "
    "lax.cond(table[0] > 0, lambda v: f(v, w) * table[None], lambda v: v, x))\n",
    "by a loop": "layer = jax.jit(lambda x, w, f=layer: "
    "lax.fori_loop(0, 2, lambda i, v: f(v, w) * jnp.take(table, i), x))\n",
}
WAYS = "minimize", "evaluate"


@dataclasses.dataclass
class Jit:
    """A loss and how it is run.

    Attributes:
      text: the function ``loss_fn(p, x)``, which reads ``rows``, a sharding, and
        ``table``.
      way: see ``WAYS``.
      chosen: each two of the names that were drawn.
    """

    text: str
    way: str
    chosen: set[tuple[str, ...]]

    def __repr__(self):
        return f"\n{self.text}# by {self.way}"

    def check(self):
        """Raises if a product has more rows, or a number is another one."""
        mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
        rng = np.random.default_rng(0)
        weights = 0.3 * rng.standard_normal((LAYERS, WIDTH, WIDTH))
        where = NamedSharding(mesh, P())
        params = {"w": jax.device_put(np.float32(weights), where)}
        x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
        for number in (1, 2):  # Programs of two tables are alike but for the numbers.
            names = {"jax": jax, "jnp": jnp, "lax": lax}
            names["rows"] = NamedSharding(mesh, P("d"))
            names["table"] = np.linspace(0.5, number, WIDTH, dtype=np.float32)
            exec(self.text, names)
            (got, text), (wanted, ordinary) = (
                self.run(names["loss_fn"], layers, params, x) for layers in (["w"], [])
            )
            for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{self}")
            assert _rows(text) <= _rows(ordinary), self

    def run(self, loss_fn, layers, params, x):
        """The numbers, and the compiled program."""
        if self.way == "evaluate":
            program = gx.evaluate(loss_fn, layers=layers).lower(params, x)
            args = params, x
        else:
            tx = optax.sgd(0.1)
            step = gx.minimize(loss_fn, tx, layers=layers, donate=False)
            args = params, tx.init(params), x
            program = step.lower(*args)
        compiled = program.compile()
        return compiled(*args), compiled.as_text()


def _rows(text):
    """How many rows the products have that have a row for each example."""
    found = re.findall(rf"f32\[(\d+),{WIDTH}\]\S* dot\(", text)
    return {int(rows) for rows in found} & {ROWS, ROWS // 4}


class Jits:
    """Draws them."""

    def drawn(self, integer):
        d = Draw(integer)
        names = [d.one_of(PLACED), d.one_of(CONSTANTS), d.one_of(WAYS)]
        placed = PLACED[names[0]]
        lines = "def layer(x, w):\n    return jnp.tanh(x @ w)\n"
        lines += CONSTANTS[names[1]]
        lines += "after = jnp.cos\n"
        scan = "lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]"
        makes_scan = f"def scan(w, x):\n    return {scan}\n"
        lines += placed + makes_scan if "scan =" not in placed else makes_scan + placed
        lines += "return jnp.sum(after(scan(p['w'], x)) ** 2)\n"
        text = f"def loss_fn(p, x):\n{textwrap.indent(lines, '    ')}"
        return Jit(text, names[2], {*itertools.combinations(names, 2)})


FAMILIES = {"jits": Jits()}
