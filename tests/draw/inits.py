"""Draws states, by the ways in which people write ``init``, and says where they lie."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.draw.operations import Draw

LENGTHS = 8, 16, 24, 32  # Devices divide them. The axes of a parameter differ.
# How a state is made of parameters ``p``, flags ``f`` and a function ``of`` of a leaf.
WAYS = {
    "tree.map": "jax.tree.map(of, p)",
    "items": "{k: {'mu': of(x)} for k, x in p.items()}",
    "leaves": "[of(x) for x in jax.tree.leaves(p)]",
    "in another order": "tuple(of(x) for x in jax.tree.leaves(p)[::-1])",
    "beside flags": "jax.tree.map(lambda x, b: of(x), p, f)",
    "zipped": "[of(x) for x, _ in zip(p.values(), f.values(), strict=True)]",
    "of some": "{k: of(x) for k, x in p.items() if f[k]}",
    "beside a count": "(jax.tree.map(of, p), jnp.zeros((), int))",
    "twice": "[[of(x), of(x)] for x in p.values()]",
}
# What it keeps of a parameter ``x``, and where that lies, by the axes ``s``.
LEAVES = {
    "like it": ("jnp.zeros_like(x)", "s"),
    "of its shape": ("jnp.zeros(x.shape)", "s"),
    "without the last axis": ("jnp.zeros(x.shape[:-1])", "s[:-1]"),
    "without the first axis": ("jnp.zeros(x.shape[1:])", "s[1:]"),
    "a ring": ("jnp.zeros((3, *x.shape))", "(None, *s)"),
    "a number": ("jnp.zeros(())", "()"),
}
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


@dataclasses.dataclass
class Init:
    """An ``init``, and parameters on a mesh.

    Attributes:
      way: how it goes through the parameters: see ``WAYS``.
      leaf: what it keeps of each: see ``LEAVES``.
      shapes: of the parameters.
      specs: the mesh axis of each axis of theirs, or None.
      flags: a bool for each parameter.
      kind: of the mesh axes: see ``KINDS``.
    """

    way: str
    leaf: str
    shapes: dict
    specs: dict
    flags: dict
    kind: str

    def state(self, params, leaf):
        """The state, with this function of a parameter's name and itself."""
        named = {id(x): k for k, x in params.items()}
        names = {"jax": jax, "jnp": jnp, "p": params, "f": self.flags}
        return eval(WAYS[self.way], names | {"of": lambda x: leaf(named[id(x)], x)})

    def check(self):
        """Raises if its state does not lie as it should."""
        make, where = LEAVES[self.leaf]
        kinds = (KINDS[self.kind],) * 2
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)

        def init(params):
            return self.state(params, lambda _, x: eval(make, {"jnp": jnp, "x": x}))

        def described(shape, spec):
            on = NamedSharding(mesh, P(*spec))
            return jax.ShapeDtypeStruct(shape, "float32", sharding=on)

        params = {k: described(x, self.specs[k]) for k, x in self.shapes.items()}
        tx = optax.GradientTransformation(init, optax.identity().update)
        got = [x.sharding.spec for x in jax.tree.leaves(gx.abstract_state(tx, params))]

        def wanted(name, _):
            found = eval(where, {"s": self.specs[name]})
            return types.SimpleNamespace(axes=found)  # A leaf.

        lies = jax.tree.leaves(self.state(params, wanted))
        axes = [getattr(x, "axes", ()) for x in lies]
        assert [_shortest(x) for x in got] == [_shortest(x) for x in axes], self


def _shortest(axes):
    return tuple(itertools.dropwhile(lambda a: a is None, tuple(axes)[::-1]))[::-1]


class Inits:
    """Draws them."""

    def drawn(self, integer):
        d, shapes, specs, flags = Draw(integer), {}, {}, {}
        leaf = d.one_of(LEAVES)
        for name in "abc"[: d.integer(1, 3)]:
            rank = d.integer(1, 3)
            shapes[name] = tuple(_some(d, LENGTHS, rank))
            cut = _some(d, ["x", "y", None, None, None], rank)
            specs[name], flags[name] = tuple(cut), d.chance()
        flags["a"] = True
        return Init(d.one_of(WAYS), leaf, shapes, specs, flags, d.one_of(KINDS))


def _some(d, choices, number):
    """So many of them, each once, in any order."""
    choices = list(choices)
    return [choices.pop(d.integer(0, len(choices) - 1)) for _ in range(number)]


FAMILIES = {"states": Inits()}
