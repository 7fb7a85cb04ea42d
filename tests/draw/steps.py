"""Draws training steps: a loss, an optimizer, where things lie, and how it is run.

Some steps are Python: a loss, a transformation, and a :class:`runs.Training`, which
trains with the drawn steps, and with the ordinary ones of optax on one device.
"""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from typing import Any

import numpy as np

from tests.draw import programs
from tests.draw.operations import Draw
from tests.draw.runs import MEMORIES, MESHES, ROWS, RUNS, WIDTH

HEAD = """\
import gradxform as gx, jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
from numpy import nan
from tests.draw import runs
"""

# What a layer computes from ``x``, and its arrays by name and shape. Results stay
# small, so that a rounding stays small, too.
W, V = {"w": (WIDTH, WIDTH)}, {"v": (WIDTH, WIDTH)}
LAYERS = {
    "dense": ('x + jnp.tanh(x @ w["w"] + w["b"])', W | {"b": (WIDTH,)}),
    "cross": ('x + jnp.tanh(x @ w["w"] + seen @ w["v"])', W | V),
    "tied": ('x + jnp.tanh(jnp.tanh(x @ w["w"]) @ p["head"] @ w["w"].T)', W),
    "experts": (
        'x + jnp.tanh(jnp.einsum("be,bd,edf->bf", part, x, w["w"]))',
        {"w": (2, WIDTH, WIDTH), "gate": (WIDTH, 2)},
    ),
}
# What a scan goes over beside the layers, and what a layer does with it.
BESIDE = {
    "nothing": ("None", "x"),
    "numbers": ("jnp.arange({n})", "x * (0.5 + 0.1 * each)"),
    "keys": (
        "jax.random.split(jax.random.key(3), {n})",
        "x * (0.5 + jax.random.uniform(each, x.shape))",
    ),
    "earlier": ("ys", "x + 0.3 * each"),
}
DOTS = "policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable"
REMATS = {
    "none": "layer",
    "jit": "jax.jit(layer)",
    "checkpoint": "jax.checkpoint(layer)",
    "policy": f"jax.checkpoint(layer, {DOTS})",
    "around": "layer",
    "around, with a policy": "layer",
}

# The transformation, and one that should do the same if it is another one.
RATES = {"a number": "0.1", "a schedule": "optax.linear_schedule(0.2, 0.01, 3)"}
OPTIMIZERS = {
    "sgd": ("optax.sgd({rate})",),
    "momentum": ("optax.sgd({rate}, momentum=0.9, nesterov=True)",),
    "adam": ("optax.adam({rate}, eps=1e-3)",),
    "adamw": ("optax.adamw({rate}, eps=1e-3, weight_decay=0.1)",),
    "inject": ("optax.inject_hyperparams(optax.adamw)({rate}, eps=1e-3)",),
    "adagrad": ("gx.adagrad({rate})", "optax.adagrad({rate}, 0.1, 1e-7)"),
    "row-wise adagrad": (
        "gx.adagrad({rate}, row_wise=True)",
        "optax.chain(runs.ROW_WISE, optax.scale_by_learning_rate({rate}))",
    ),
    "novograd": ("gx.novograd({rate}, stacked_axes={stacked})",),
    "lamb": ("optax.lamb({rate}, eps=1e-3)",),
    "trust ratio": (
        "optax.chain(optax.scale_by_adam(eps=1e-3), optax.scale_by_trust_ratio(), "
        "optax.scale_by_learning_rate({rate}))",
    ),
}
LINKS = {
    "no link": ("optax.identity()",),
    "clip_by_global_norm": (
        "gx.clip_by_global_norm(0.05)",
        "optax.clip_by_global_norm(0.05)",
    ),
    "measure_norms": ("gx.measure_norms()", "runs.NORMS"),
    "clip": ("optax.clip(0.01)",),
    "add_decayed_weights": ("optax.add_decayed_weights(0.1)",),
}
PARTS = {
    "all of it": ("{tx}",),
    "masked": ("optax.masked({tx}, lambda p: jax.tree.map(lambda x: x.ndim > 2, p))",),
    "partition": (
        'optax.partition({{"a": {tx}, "b": optax.sgd(0.2)}}, lambda p: '
        'jax.tree.map(lambda x: "a" if x.ndim > 2 else "b", p))',
    ),
    "low_bit_state": (
        "gx.low_bit_state({tx}, min_size=16, block_size=8, block_axis=-1)",
        "{tx}",
    ),
}
# Around the others: with tables, and with parameters in half precision.
LAZY = "gx.lazy({tx})", "runs.by_touched_rows({tx})"
DENSE = "optax.chain(gx.densify(), {tx})", "{tx}"
MASTER = "gx.master_weights({tx})", "{tx}"
GATES = {
    "no gate": ("{tx}",),
    "skip_spikes": (
        "gx.skip_spikes({tx}, window=3, warmup=2)",
        "runs.without_spikes({tx})",
    ),
    "drop_stale": ("gx.drop_stale({tx}, max_staleness=1)", "runs.fresh({tx}, 1)"),
    "accumulate": ("gx.accumulate({tx}, 2)", "optax.MultiSteps({tx}, 2)"),
    "MultiSteps": ("optax.MultiSteps({tx}, 2)",),
    "apply_if_finite": ("optax.apply_if_finite({tx}, 3)",),
}
# These add up gradients of all layers.
SUMS = "clip_by_global_norm", "skip_spikes", "apply_if_finite", "trust_ratio"
SUMS += "measure_norms", "optax.lamb("


@dataclasses.dataclass
class Step:
    """Some steps, as Python that makes a :class:`Training`."""

    text: str
    chosen: set[tuple[str, str]]
    may_be_refused: bool

    def __repr__(self):
        """A program that one can run."""
        devices = 'jax.config.update("jax_num_cpu_devices", 8)\n'
        return f"\n{HEAD}{devices}{self.text}training.check()\n# {sorted(self.chosen)}"

    _repr_pretty_ = programs.Program._repr_pretty_

    def check(self):
        """Raises if it is wrong; why it was refused, or None."""
        names: dict[str, Any] = {}
        exec(HEAD + self.text, names)
        try:
            names["training"].check()
        except (TypeError, ValueError, NotImplementedError) as error:
            why = programs.refusal(error)
            assert self.may_be_refused, f"refused: {why}"
            return why
        return None


class StepDraw(Draw):
    """Draws what is of some kinds. Of all others it takes the first.

    Attributes:
      kinds: these kinds.
      chosen: the names that were drawn, each with its kind.
    """

    def __init__(self, integer, kinds):
        super().__init__(integer)
        self.kinds, self.chosen = kinds, set()

    def pick(self, kind, table):
        name = self.one_of(table) if kind in self.kinds else next(iter(table))
        self.chosen.add((kind, name))
        return name

    def rarely(self, kind, name):
        """Whether this is chosen, which is so one time in four."""
        is_chosen = kind in self.kinds and self.integer(0, 3) == 3
        if is_chosen:
            self.chosen.add((kind, name))
        return is_chosen

    def pair(self, kind, table):
        """A transformation, and what does the same."""
        texts = table[self.pick(kind, table)]
        return texts[0], texts[-1]


def around(outer, inner):
    """Both texts of a wrapper around those of a transformation."""
    return tuple(
        o.format(tx=i) for o, i in zip((outer[0], outer[-1]), inner, strict=True)
    )


def stack(d, name, shapes, before):
    """The lines of a scan over a stack; ``before`` is the length of the one before."""
    expression, arrays = LAYERS[d.pick("layer", LAYERS)]
    n = d.integer(1, 4)
    beside = d.pick("beside", BESIDE) if before in (None, n) else "nothing"
    if before is None and beside == "earlier":
        beside = "numbers"
    given, mixed = BESIDE[beside]
    shapes[name], leaves = {}, []
    for leaf, shape in arrays.items():
        axis = d.integer(0, len(shape)) if d.rarely("loss", "axis of layers") else 0
        shapes[name][leaf] = (*shape[:axis], n, *shape[axis:])
        x = f'p["{name}"]["{leaf}"]'
        leaves.append(
            f'"{leaf}": jnp.moveaxis({x}, {axis}, 0)' if axis else f'"{leaf}": {x}'
        )
    lines = "(x, total), (w, each) = carry, given\n"
    if "part" in expression:
        lines += 'part = jax.nn.softmax(x @ w["gate"])\n'
        lines += "total = total + 0.1 * jnp.sum(part.mean(0) ** 2)\n"
    lines += f"x = {mixed}\nx = {expression}\nreturn (x, total), 0.5 * x\n"
    text = f"def layer(carry, given):\n{textwrap.indent(lines, '    ')}"
    text += f"given = {{{', '.join(leaves)}}}, {given.format(n=n)}\n"
    remat = d.pick("remat", REMATS)
    body, rest = REMATS[remat], ""
    if n % 2 == 0 and d.rarely("loss", "groups of layers"):
        text += f"def group(carry, given):\n    return lax.scan({body}, carry, given)\n"
        divided = "lambda v: v.reshape(-1, 2, *v.shape[1:])"
        text += f"given = jax.tree.map({divided}, given)\n"
        body, rest = "group", "ys = ys.reshape(-1, *ys.shape[2:])\n"
    options = f"reverse={d.chance()}, unroll={d.integer(1, 2)}"
    run = f"lambda *carry: lax.scan({body}, carry, given, {options})"
    if remat.startswith("around"):
        run = f"jax.checkpoint({run}{f', {DOTS}' if 'policy' in remat else ''})"
    text += f"(x, total), ys = ({run})(x, total)\n{rest}seen = jnp.cos(x)\n"
    for words, again in (
        ("a second scan, without a derivative", "lax.stop_gradient(given)"),
        ("a second scan that learns", "given"),
    ):
        if d.rarely("loss", words):
            run = f"lax.scan({body}, (x, total), {again}, {options})"
            text += f"total = total + 0.1 * jnp.mean({run}[0][0] * x)\n"
    return text, n


def loss_of(d, *, half):
    """A loss, and the shapes of its parameters."""
    shapes = {"emb": (ROWS, WIDTH), "first": (WIDTH, WIDTH), "head": (WIDTH, WIDTH)}
    text = "p = jax.tree.map(lambda v: v.astype(jnp.float32), p)\n" if half else ""
    text += 'x = x @ p["first"] + gx.lookup(p["emb"], ids)\n'
    text += "seen, total = jnp.sin(x), jnp.sum(0 * x)\n"
    before = None
    for name in "abc"[: d.pick("stacks", (1, 1, 2, 3))]:
        lines, before = stack(d, name, shapes, before)
        text += lines
    text += 'y = jnp.mean((jnp.sin(x @ p["head"]) - 0.5) ** 2)\n'
    text += "return (y + 0.1 * total + 0.1 * jnp.mean(ys)) * factor\n"
    head = "def loss_fn(p, x, ids, factor):\n"
    if d.rarely("loss", "a checkpoint around all"):
        head = "@jax.checkpoint\n" + head
    return head + textwrap.indent(text, "    "), shapes


def transformation(d, how, shapes, *, half):
    """The texts of a transformation, and of one that does the same."""
    stacks = {k: v for k, v in shapes.items() if isinstance(v, dict)}
    rate = RATES[d.pick("rate", RATES)]
    stacked = {k: 1 if k in stacks else 0 for k in shapes}
    found = d.pair("optimizer", OPTIMIZERS)
    found = tuple(x.format(rate=rate, stacked=stacked) for x in found)
    if d.rarely("frozen", "some parts"):
        parts = ["emb", "first", *stacks, *(f"{k}/w" for k in stacks)]
        how["frozen"] = [d.one_of(parts) for _ in range(d.integer(1, 2))]
        how["whole_state"] = d.chance()
    # Devices have rows of their own in `shard_map`. Minimize takes none from the host.
    is_dense = how["run"] == "shard_map" or how["memory"] == MEMORIES[2]
    if (
        not is_dense
        and "emb" not in how.get("frozen", ())
        and d.rarely("around", "tables")
    ):
        how["tables"] = ["emb"]
    is_lazy = "tables" in how and not half and d.rarely("around", "lazy")
    how["by_rows"] = is_lazy
    found = around(LAZY if is_lazy else d.pair("part", PARTS), found)
    links = dict(itertools.islice(LINKS.items(), 3)) if is_lazy else LINKS
    gates = dict(itertools.islice(GATES.items(), 3 if is_lazy else 4 if half else None))
    found = chained(d.pair("link", links), found)
    found = around(MASTER, found) if half else found
    for _ in range(d.integer(1, 2)):
        found = around(d.pair("gate", gates), found)
    if d.rarely("around", "an outer link"):
        found = chained(d.pair("link", links), found)
    return around(DENSE, found) if "tables" in how and not is_lazy else found


def chained(link, inner):
    return around([f"optax.chain({x}, {{tx}})" for x in link], inner)


LOSS = {"stacks", "layer", "beside", "remat", "loss", "layers", "frozen"}
UPDATE = {"rate", "optimizer", "part", "link", "gate", "around", "frozen"}
PLACES = {"run", "memory", "mesh"}


@dataclasses.dataclass(frozen=True)
class Steps:
    """Draws what is of these kinds."""

    kinds: set[str]

    def drawn(self, integer):
        return drawn(integer, self.kinds)


FAMILIES = {
    "losses": Steps(LOSS),
    "optimizers": Steps(UPDATE),
    "places": Steps(PLACES | {"layer", "optimizer"}),
    "all steps": Steps(LOSS | UPDATE | PLACES),
}


def drawn(integer, kinds):
    """Some runs."""
    d, how = StepDraw(integer, kinds), {}
    half = d.rarely("around", "half precision")
    loss, shapes = loss_of(d, half=half)
    how["run"] = run = d.pick("run", RUNS)
    are_many = run in ("vmap", "shard_map")  # Neither knows the host's memory.
    how["memory"] = d.pick("memory", MEMORIES[:1] if are_many else MEMORIES)
    meshes = list(MESHES)[:1] if run == "vmap" else list(MESHES)[run == "shard_map" :]
    how["mesh"] = d.pick("mesh", meshes)
    tx, plain = transformation(d, how, shapes, half=half)
    if run != "apply_gradients, donated":
        stacks = [k for k in shapes if len(k) == 1]
        how["layers"] = [
            f"{k}/w" if d.rarely("layers", "a leaf") else k for k in stacks
        ]
        if d.rarely("layers", "some stacks"):
            how["layers"] = d.some_of(how["layers"])
        needs = any(name in tx for name in SUMS)
        how["two_passes"] = needs != (d.integer(0, 15) == 15)
    if "MultiSteps" in tx:  # It takes no None beside a state for it.
        how["whole_state"] = False
    if "drop_stale" in tx:
        how["extra"] = {"local_step": 0}
    if ("skip_spikes" in tx or "apply_if_finite" in tx) and d.chance():
        how["factors"] = d.one_of([(1.0, 1.0, 1e4), (1.0, np.nan, 1.0)])
    if half or "low_bit" in tx:
        how |= {"half": half, "loose": 0.3 if "low_bit" in tx else 0.03}
    same = "tx" if plain == tx else plain
    text = f"{loss}tx = {tx}\nplain = {same}\nshapes = {shapes}\n"
    call = "".join(f", {name}={x!r}" for name, x in how.items())
    text += f"training = runs.Training(loss_fn, tx, plain, shapes{call})\n"
    return Step(text, d.chosen, may_be_refused(d.chosen, tx, how))


def may_be_refused(chosen, tx, how):
    """Whether sums depend on sums, or a layer has no state of its own."""
    names = {name for _, name in chosen}
    sums = sum(tx.count(name) for name in SUMS)
    few = sums and not how.get("two_passes", True)
    of_axes = {"novograd", "row-wise adagrad", "low_bit_state"}
    is_elsewhere = "axis of layers" in names and names & of_axes
    depends = names & {"lamb", "trust ratio", "lazy"}
    # MultiSteps asks for the types of a step without what drop_stale needs.
    is_inside = "MultiSteps" in tx.partition("drop_stale")[0] and "drop_stale" in tx
    return bool(few or sums > 1 or is_elsewhere or depends or is_inside)
