"""Draws how a step is called: keywords and flags, words of gates, boxes of frameworks.

A call is Python: a loss, a transformation, and a :class:`Calling`, which calls a verb
with the drawn keywords. Some calls have a slip in a keyword, and must be refused. All
others must be the ordinary step, of a loss that has its keywords bound.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gradxform as gx
from tests.conftest import promotion
from tests.draw import programs
from tests.draw.operations import Draw

HEAD = """\
import functools, gradxform as gx, jax, jax.numpy as jnp, numpy as np, optax
from tests.draw import calls
from tests.draw.calls import How, Module
"""
RATE, STEPS, LENGTH = 0.1, 2, 2  # Local steps take batches of this length.


class How(enum.IntEnum):
    MEAN = 0
    SUM = 1


# The parameters: arrays in the containers of frameworks, and how a loss reads them.


class Pair(NamedTuple):
    w: Any
    b: Any


class Linear(eqx.Module):
    w: jax.Array
    b: jax.Array


def as_state(w, b):
    return nnx.State({"w": nnx.Param(w), "b": nnx.Param(b)})


def boxed(w, b):
    return {"w": nn.Partitioned(w, (None,)), "b": nn.Partitioned(b, ())}


BOXES = {
    "a dict": lambda w, b: {"w": w, "b": b},
    "a named tuple": Pair,
    "an NNX state": as_state,
    "boxes of Linen": boxed,
    "an Equinox module": Linear,
}


def loss_fn(params, x, target=0.5, *, mask=None, train=False, how=How.MEAN, tree=None):
    """Flags are asked by Python, so a traced one would be an error."""
    b, w = sorted(jax.tree.leaves(params), key=jnp.ndim)
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x * w + b), None), x, w)
    errors = (x - target) ** 2
    if mask is not None:
        errors = errors * mask
    if train:
        errors = 2.0 * errors
    if tree is not None and tree["on"]:
        errors = tree["f"](errors * tree["factors"][0])
    return jnp.sum(errors) if how is How.SUM or how == "sum" else jnp.mean(errors)


class Module:
    def __call__(self, params, x, target=0.5, **kwargs):
        return loss_fn(params, x, target, **kwargs)

    def method(self, params, x, target=0.5, *, mask=None, train=False, **kwargs):
        return loss_fn(params, x, target, mask=mask, train=train, **kwargs)


LOSSES = {
    "a function": "calls.loss_fn",
    "a partial": "functools.partial(calls.loss_fn, target=0.25)",
    "a module": "Module()",
    "a method": "Module().method",
    "any keyword": "lambda params, *args, **kw: calls.loss_fn(params, *args, **kw)",
    "jitted": "jax.jit(calls.loss_fn, static_argnames=['train', 'how'])",
    "a checkpoint": "functools.wraps(calls.loss_fn)(lambda p, *a, **kw: "
    "jax.checkpoint(lambda p: calls.loss_fn(p, *a, **kw))(p))",
}
KEYWORDS = {
    "target": ["0.75", "np.float32(0.1)", "jnp.full(3, 0.2)"],
    "mask": ["jnp.array([1.0, 0.0, 1.0])", "np.ones(3, np.float32)", "None"],
    "train": ["True", "False"],
    "how": ["'sum'", "How.SUM", "'mean'"],
    "tree": [
        "{'on': True, 'f': jnp.sin, 'factors': [jnp.arange(3.0), None]}",
        "{'on': False, 'f': jnp.sin, 'factors': (np.float32(2), 'no')}",
    ],
}
# Each lets all through here, as no push is late; and the words that it reads.
GATES = {
    "no gate": ("{tx}", {}),
    "drop_stale": ("gx.drop_stale({tx}, 9)", {"local_step": "0"}),
    "skip_spikes": ("gx.skip_spikes({tx})", {"value": "1.5"}),
    "accumulate": ("gx.accumulate({tx}, 1)", {"weight": "2.0"}),
    "the last push": ("gx.accumulate({tx}, 5)", {"last": "True"}),
    "conditional_accumulator": (
        "gx.conditional_accumulator({tx}, 1, max_staleness=9)",
        {"local_step": "0", "weight": "3"},
    ),
    "worker_mean": ("gx.worker_mean({tx}, 1, method='ringleader')", {"worker": "0"}),
    "a chain": ("optax.chain(optax.identity(), {tx})", {}),
    "apply_if_finite": ("optax.apply_if_finite({tx}, 3)", {}),
}
ALIKE = [name for name, (text, _) in GATES.items() if "accumul" not in text]


def minimized(c, **options):
    step = gx.minimize(c.loss, c.tx, **options)
    params, state = c.start(), c.tx.init(c.start())
    for x in c.batches:
        args, words = c.of(x)
        params, state, loss, *_ = step(params, state, *args, **words, **c.words)
    return params, loss


def with_aux(c):
    @functools.wraps(c.loss)
    def loss(*args, **kwargs):
        return c.loss(*args, **kwargs), {"n": 1}

    return minimized(dataclasses.replace(c, loss=loss), has_aux=True)


def by_hand(c):
    """Not compiled: the gradient and the step one after the other."""
    gradient = gx.value_and_grad(c.loss)
    params, state = c.start(), c.tx.init(c.start())
    for x in c.batches:
        args, words = c.of(x)
        loss, grads = gradient(params, *args, **words)
        params, state = gx.apply_gradients(c.tx, grads, state, params, **c.words)
    return params, loss


def pushed(c):
    words = {k: x for k, x in c.words.items() if k != "local_step"}
    with gx.ParameterServer(c.start(), c.tx) as server:
        for x in c.batches:
            args, of_loss = c.of(x)
            params, step = server.pull()
            loss, grads = gx.value_and_grad(c.loss)(params, *args, **of_loss)
            server.push(grads, step, **words)
        return server.pull()[0], loss


def local(c):
    """All its steps see the same keywords."""

    def each(x):
        is_array = isinstance(x, float | np.generic | np.ndarray | jax.Array)
        return jnp.stack([jnp.asarray(x)] * len(c.batches)) if is_array else x

    args, words = c.of(jnp.stack(c.batches))
    x = words.pop("x", None)
    args, words = jax.tree.map(each, (args[1:], words))
    args = args if x is not None else (jnp.stack(c.batches), *args)
    words |= {} if x is None else {"x": x}
    steps = gx.local_steps(c.loss, c.tx)
    state = c.tx.init(c.start())
    grads, _, losses = steps(c.start(), state, *args, **words, **c.words)
    return jax.tree.map(jnp.subtract, c.start(), grads), losses[-1]


VERBS = {
    "minimize": minimized,
    "not donated": functools.partial(minimized, donate=False),
    "has_aux": with_aux,
    "trainable": functools.partial(minimized, trainable=True),
    "layers": functools.partial(minimized, layers=["w"], two_passes=True),
    "local_steps": local,
    "by hand": by_hand,
    "server": pushed,
}


@dataclasses.dataclass
class Calling:
    """Some calls of a verb.

    Attributes:
      verb: its name.
      loss: the loss.
      tx: the transformation.
      box: the name of the parameters' container.
      keywords: those of the loss.
      words: those of the transformation.
      by_name: whether ``x`` is given by keyword, too.
      slip: a keyword with a slip, or "".
    """

    verb: str
    loss: Any
    tx: Any
    box: str
    keywords: dict[str, Any]
    words: dict[str, Any]
    by_name: bool = False
    slip: str = ""

    @property
    def batches(self):
        return [jnp.array([1.0, -0.5, 2.0]) * (k + 1) for k in range(STEPS)]

    def start(self):
        return BOXES[self.box](jnp.array([0.5, 1.25]), jnp.array(0.1))

    def of(self, x):
        return ((), {"x": x} | self.keywords) if self.by_name else ((x,), self.keywords)

    def expected(self):
        """By JAX and optax alone, with the keywords bound."""
        params = self.start()
        for x in self.batches:
            args, words = self.of(x)
            bound = functools.partial(self.loss, **words)
            loss, grads = jax.value_and_grad(bound)(params, *args)
            params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        return params, loss

    def check(self):
        """Raises if it is wrong; why it was refused, or None."""
        with promotion():
            if self.slip:
                with pytest.raises(TypeError, match=repr(self.slip)) as caught:
                    VERBS[self.verb](self)
                return str(caught.value)
            got, want = VERBS[self.verb](self), self.expected()
        pairs = zip(*map(jax.tree.leaves, (got, want)), strict=True)
        for x, y in pairs:
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        return None


@dataclasses.dataclass
class Call:
    """A call, as Python that makes a :class:`Calling`."""

    text: str
    chosen: set[tuple[str, str]]

    def __repr__(self):
        """A program that one can run."""
        return f"\n{HEAD}{self.text}print(calling.check())\n# {sorted(self.chosen)}"

    _repr_pretty_ = programs.Program._repr_pretty_

    def check(self):
        names: dict[str, Any] = {}
        exec(HEAD + self.text, names)
        return names["calling"].check()


class Calls:
    """Draws calls."""

    def drawn(self, integer):
        d, chosen = Draw(integer), set()

        def pick(kind, table):
            name = d.one_of(table)
            chosen.add((kind, name))
            return name

        verb, loss = pick("verb", VERBS), pick("loss", LOSSES)
        boxes = list(BOXES)[:1] if verb == "layers" else BOXES
        box = pick("box", boxes)
        keywords = {k: d.one_of(KEYWORDS[k]) for k in d.some_of(KEYWORDS)}
        if loss == "jitted":  # A function is no argument of `jax.jit`.
            keywords.pop("tree", None)
        if verb == "local_steps" and keywords.get("target") == "0.75":
            keywords["target"] = "jnp.full(3, 0.2)"
        chosen |= {("keyword", k) for k in keywords}
        tx, words = f"optax.sgd({RATE})", {}
        for _ in range(d.integer(1, 2)):
            # An accumulator inside of another one gets no words.
            inner = GATES if "accumul" not in tx else ALIKE
            around, reads = GATES[pick("gate", inner)]
            tx, words = around.format(tx=tx), words | reads
        if verb == "server":
            words.pop("local_step", None)
        by_name, slip = d.integer(0, 3) == 3 and loss != "any keyword", ""
        tables = {"keywords": keywords, "words": words}
        given = [(where, k) for where, table in tables.items() for k in table]
        # Where a loss takes any keyword, it takes such a one, and raises by itself.
        if given and d.integer(0, 3) == 3:
            where, word = d.one_of(given)
            k = d.integer(1, len(word) - 2)
            slip = word[:k] + word[k + 1] + word[k] + word[k + 2 :]
            slip = "" if slip == word else slip
        if slip:
            tables[where][slip] = tables[where].pop(word)
            chosen.add(("slip", where))
        text = "".join(
            f"{name} = dict({', '.join(f'{k}={x}' for k, x in table.items())})\n"
            for name, table in tables.items()
        )
        call = f"{verb!r}, loss, tx, {box!r}, keywords, words, {by_name}, {slip!r}"
        text = f"loss = {LOSSES[loss]}\ntx = {tx}\n{text}"
        return Call(f"{text}calling = calls.Calling({call})\n", chosen)


FAMILIES = {"calls": Calls()}
