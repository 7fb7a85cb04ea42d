"""Draws training steps: a loss, an optimizer, where things lie, and how it is run.

A step is Python: a loss, a transformation, and a call of :func:`compare`. That trains
with the drawn step, and with the ordinary one of optax on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.draw import programs
from tests.draw.operations import Draw

BATCH, WIDTH, ROWS, STEPS = 8, 4, 6, 3
HEAD = """\
import gradxform as gx, jax, jax.numpy as jnp, numpy as np, optax
from jax import lax
from numpy import nan
from tests.draw import steps
"""

# What a layer computes from ``x``, and its arrays by name and shape.
W, V = {"w": (WIDTH, WIDTH)}, {"v": (WIDTH, WIDTH)}
LAYERS = {
    "dense": ('x + jnp.tanh(x @ w["w"] + w["b"])', W | {"b": (WIDTH,)}),
    "cross": ('x + jnp.tanh(x @ w["w"] + seen @ w["v"])', W | V),
    "tied": ('x + jnp.tanh(x @ w["w"]) @ p["head"] @ w["w"].T', W),
    "experts": (
        'x + jnp.tanh(jnp.einsum("be,bd,edf->bf", part, x, w["w"]))',
        {"w": (2, WIDTH, WIDTH), "gate": (WIDTH, 2)},
    ),
}
# What a scan goes over beside the layers, and what a layer does with it.
BESIDE = {
    "nothing": ("None", "x"),
    "numbers": ("jnp.arange({n})", "x * (1 + 0.2 * each)"),
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
        "optax.chain(steps.ROW_WISE, optax.scale_by_learning_rate({rate}))",
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
        "gx.clip_by_global_norm(0.2)",
        "optax.clip_by_global_norm(0.2)",
    ),
    "measure_norms": ("gx.measure_norms()", "steps.NORMS"),
    "clip": ("optax.clip(0.03)",),
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
LAZY = "gx.lazy({tx})", "steps.by_touched_rows({tx})"
DENSE = "optax.chain(gx.densify(), {tx})", "{tx}"
MASTER = "gx.master_weights({tx})", "{tx}"
GATES = {
    "no gate": ("{tx}",),
    "skip_spikes": (
        "gx.skip_spikes({tx}, window=3, warmup=2)",
        "steps.without_spikes({tx})",
    ),
    "drop_stale": ("gx.drop_stale({tx}, max_staleness=1)", "steps.fresh({tx}, 1)"),
    "accumulate": ("gx.accumulate({tx}, 2)", "optax.MultiSteps({tx}, 2)"),
    "MultiSteps": ("optax.MultiSteps({tx}, 2)",),
    "apply_if_finite": ("optax.apply_if_finite({tx}, 3)",),
}
# These add up gradients of all layers.
SUMS = "clip_by_global_norm", "skip_spikes", "apply_if_finite", "trust_ratio"
SUMS += "measure_norms", "lamb"
RUNS = "donated", "kept", "scan", "vmap", "shard_map", "apply_gradients, donated"
MEMORIES = "device", "state on the host", "both on the host"
MESHES = {
    "no mesh": None,
    "one axis, automatic": ("x", AxisType.Auto),
    "one axis, explicit": ("x", AxisType.Explicit),
    "two axes, automatic": ("xy", AxisType.Auto),
    "two axes, explicit": ("xy", AxisType.Explicit),
}


# The same by their definitions.


class Own(NamedTuple):
    """A state; ``known`` has fields that the other one has, too."""

    known: dict[str, Any]
    inner: Any = ()
    more: Any = ()


def by_rows(acc, g):
    return acc + jnp.mean(g**2, axis=tuple(range(1, g.ndim)))


def _row_wise(g, acc, params=None):
    acc = jax.tree.map(by_rows, acc, g)
    divide = jax.vmap(lambda g, a: g / jnp.sqrt(a + 1e-7))
    return jax.tree.map(divide, g, acc), acc


ROW_WISE = optax.GradientTransformation(
    lambda p: jax.tree.map(lambda x: jnp.full(len(x), 0.1), p), _row_wise
)
NORMS = optax.GradientTransformation(
    lambda p: Own({"norms": jax.tree.map(lambda x: 0.0, p)}),
    lambda g, _, params=None: (g, Own({"norms": jax.tree.map(jnp.linalg.norm, g)})),
)


def gated(inner, start, decide):
    """Runs ``inner`` if ``decide(more, count, updates, extra)`` says so."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return Own({"global_step": jnp.int32(0)}, inner.init(params), start)

    def update(updates, state, params=None, **extra):
        count = state.known["global_step"]
        is_used, more = decide(state.more, count, updates, extra)
        new = inner.update(updates, state.inner, params, **extra)
        old = jax.tree.map(jnp.zeros_like, new[0]), state.inner
        made, kept = jax.tree.map(lambda *x: jnp.where(is_used, *x), new, old)
        return made, Own({"global_step": count + is_used}, kept, more)

    return optax.GradientTransformationExtraArgs(init, update)


def fresh(inner, limit):
    def decide(more, count, updates, extra):
        return count - extra["local_step"] <= limit, more

    return gated(inner, (), decide)


def without_spikes(inner, sigmas=6.0):
    """With a history of all pushes that were finite; NaN where there are no more."""

    def decide(history, count, updates, extra):
        new = jnp.stack([optax.tree.norm(updates), extra["value"]])
        is_finite = jnp.all(jnp.isfinite(new))
        held = jnp.sum(~jnp.isnan(history), axis=0)
        limit = jnp.nanmean(history, 0) + sigmas * jnp.nanstd(history, 0, ddof=1)
        is_spike = jnp.any((held >= 2) & (new > limit))
        longer = jnp.concatenate([history[1:], new[None]])
        return is_finite & ~is_spike, jnp.where(is_finite, longer, history)

    return gated(inner, jnp.full((STEPS, 2), jnp.nan), decide)


def by_touched_rows(inner):
    """What lies in rows of the table without a gradient stays as it is."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params, **extra):
        touched = jnp.any(updates["emb"] != 0, axis=1)
        old = jax.tree.map(jnp.zeros_like, updates), state
        new = inner.update(updates, state, params, **extra)

        def chosen(new, old):
            if jnp.shape(new)[:1] != (ROWS,):
                return new
            return jax.vmap(jnp.where)(touched, new, old)

        return jax.tree.map(chosen, new, old)

    return optax.GradientTransformationExtraArgs(inner.init, update)


# Training.


def path_of(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


@dataclasses.dataclass
class Training:
    """Some steps, the drawn ones and the ordinary ones.

    Attributes:
      tx: the transformation.
      plain: what does the same.
      shapes: the parameters.
      factors: what each step multiplies its loss by.
      half: whether parameters are in bfloat16; ``plain`` gets them in float32.
      loose: how far from those of ``plain`` parameters may be, as a part of their way.
      whole_state: whether there is state for what is frozen.
      run: one of ``RUNS``, and so on.
    """

    loss_fn: Any
    tx: Any
    plain: Any
    shapes: dict[str, Any]
    factors: tuple[float, ...] = (1.0, 1.0, 1.0)
    half: bool = False
    loose: float = 1e-3
    frozen: tuple[str, ...] = ()
    whole_state: bool = True
    extra: dict[str, int] = dataclasses.field(default_factory=dict)
    layers: tuple[str, ...] = ()
    two_passes: bool = False
    tables: tuple[str, ...] = ()
    run: str = "donated"
    memory: str = "device"
    mesh: str = "no mesh"

    def start(self, seed):
        rng = np.random.default_rng(seed)
        dtype = jnp.bfloat16 if self.half else jnp.float32

        def draw(shape):
            return np.asarray(0.5 * rng.standard_normal(shape), dtype)

        return jax.tree.map(draw, self.shapes, is_leaf=lambda x: isinstance(x, tuple))

    def batches(self, seed):
        """Of all steps. An id repeats, and row 1 is read by none."""
        rng = np.random.default_rng(seed + 10)
        x = rng.standard_normal((STEPS, BATCH, WIDTH)).astype("float32")
        ids = rng.choice([0, 2, 3, 4, 5], (STEPS, BATCH)).astype("int32")
        return x, ids, np.array(self.factors, "float32")

    def learning(self, tree):
        """None for what is frozen."""

        def leaf(path, x):
            name = f"{path_of(path)}/"
            return None if any(name.startswith(f"{f}/") for f in self.frozen) else x

        return jax.tree.map_with_path(leaf, tree)

    def joined(self, learns, params):
        """With what is frozen."""
        return jax.tree.map(
            lambda new, p: p if new is None else new.astype(p.dtype),
            *(learns, params),
            is_leaf=lambda x: x is None,
        )

    def loss(self, learns, params, *batch):
        return self.loss_fn(self.joined(learns, params), *batch)

    # The ordinary steps.

    def ordinary(self, seed):
        """What learns, its state and the losses, after steps of optax on one device.

        One after the other, with ``tx`` and with ``plain``.
        """
        params, many = self.start(seed), []
        loss_fn = self.mean_of_shards if self.run == "shard_map" else self.loss
        for tx, dtype in self.transformations():
            learns = jax.tree.map(lambda x: x.astype(dtype), self.learning(params))
            many.append((learns, jax.jit(tx.init)(learns)))

        gradient = jax.jit(jax.value_and_grad(loss_fn))  # Traced once for both.

        @jax.jit
        def step(many, *batch):
            new = []
            for (tx, _), (learns, state) in zip(
                self.transformations(), many, strict=True
            ):
                value, grads = gradient(learns, params, *batch)
                more = {"value": value} | self.extra
                tx = optax.with_extra_args_support(tx)
                updates, state = tx.update(grads, state, learns, **more)
                new.append((optax.apply_updates(learns, updates), state, value))
            return new

        losses = []
        for batch in zip(*self.batches(seed), strict=True):
            new = step(jax.device_get(many), *batch)
            many = [x[:2] for x in new]
            losses.append([x[2] for x in new])
        losses = np.transpose(jax.device_get(losses))
        return [(*x, y) for x, y in zip(jax.device_get(many), losses, strict=True)]

    def transformations(self):
        """They, and the dtype of their parameters."""
        yield self.tx, jnp.bfloat16 if self.half else jnp.float32
        if self.plain is not self.tx:
            yield self.plain, jnp.float32

    def mean_of_shards(self, learns, params, x, ids, factor):
        """Each of four devices has a part of the batch."""
        x, ids = (v.reshape(4, -1, *v.shape[1:]) for v in (x, ids))
        loss = functools.partial(self.loss, learns, params)
        return jnp.mean(jax.vmap(lambda x, ids: loss(x, ids, factor))(x, ids))

    # The drawn ones.

    def step(self, names):
        """(params, state, *batch) -> the same, and the loss."""

        def applied(params, state, *batch):
            gradient = gx.value_and_grad(self.loss, tables=self.tables)
            here = jax.device_put(params, jax.memory.Space.Device)
            value, grads = gradient(self.learning(here), here, *batch)
            tx = optax.with_extra_args_support(self.tx)
            extra = {"value": value} | self.extra
            return *gx.apply_gradients(tx, grads, state, params, **extra), value

        def loss(*args):
            value = self.loss_fn(*args)
            return lax.pmean(value, names) if self.run == "shard_map" else value

        if self.run == "apply_gradients, donated":
            return jax.jit(applied, donate_argnums=(0, 1))
        mask = self.learning(jax.tree.map(lambda _: True, self.start(0)))
        learns = jax.tree.map(bool, mask, is_leaf=lambda x: x is None)
        how = {"donate": self.run == "donated", "trainable": learns}
        how |= {
            name: getattr(self, name) for name in ("layers", "two_passes", "tables")
        }
        return functools.partial(gx.minimize(loss, self.tx, **how), **self.extra)

    def begin(self, names, mesh):
        """Parameters, state and batches where they lie."""
        params, batch, init = self.start(0), self.batches(0), self.tx.init
        if self.run == "vmap":  # Two models, each with its batches.
            init = jax.vmap(init)
            params = jax.tree.map(lambda *x: np.stack(x), params, self.start(1))
            batch = [np.stack(x, 1) for x in zip(batch, self.batches(1), strict=True)]
        if mesh:
            is_auto = AxisType.Auto in mesh.axis_types and self.run != "shard_map"

            def put(x, spec):
                return jax.device_put(x, NamedSharding(mesh, spec))

            def divided(x):
                """The last axis that devices can divide, if the compiler may do it."""
                size = mesh.shape[names[-1]]
                axes = [a for a, n in enumerate(x.shape) if is_auto and not n % size]
                return P(*[None] * axes[-1], names[-1]) if axes else P()

            params = jax.tree.map(lambda x: put(x, divided(x)), params)
            batch = [put(x, P(None, names) if x.ndim > 1 else P()) for x in batch]
            state = init(params if self.whole_state else self.learning(params))
            state = jax.tree.map(
                lambda x: put(x, P()) if len(x.devices()) < 2 else x, state
            )
        else:
            params, batch = jax.tree.map(jnp.array, (params, batch))
            given = params if self.whole_state else self.learning(params)
            state = jax.jit(init)(given)
        if self.memory != "device":
            state = gx.on_host(state, min_size=8)
        if self.memory == "both on the host":
            params = gx.on_host(params, min_size=8)
        return params, state, batch

    def trained(self):
        """The start, and parameters, state and losses after all steps."""
        names, mesh, context = meshed(self.mesh)
        with context:
            params, state, batch = self.begin(names, mesh)
            # Copies: the memory of an array that NumPy holds cannot be donated.
            given, values = params, jax.tree.map(np.array, (params, state))
            where = jax.tree.map(_types, (params, state))
            step = self.step(names)
            if self.run == "vmap":
                step = jax.vmap(step)
            if self.run == "shard_map":
                specs = P(), P(), P(names), P(names), P()
                step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P())
                step = jax.jit(step)
            if self.run == "scan":

                def turn(carry, batch):
                    *carry, loss = step(*carry, *batch)
                    return tuple(carry), loss

                run = jax.jit(lambda *args: lax.scan(turn, args[:2], args[2]))
                (params, state), losses = run(params, state, batch)
            else:
                losses = []
                for k in range(STEPS):
                    params, state, loss = step(params, state, *[x[k] for x in batch])
                    losses.append(loss)
        assert jax.tree.map(_types, (params, state)) == where
        if self.mesh == "no mesh" or "explicit" in self.mesh:
            pairs = zip(*map(jax.tree.leaves, (given, params)), strict=True)
            assert all(
                x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs
            )
        are_gone = [x.is_deleted() for x in jax.tree.leaves(given)]
        assert all(are_gone) if "donate" in self.run else not any(are_gone)
        if self.run == "kept":
            jax.tree.map(np.testing.assert_array_equal, given, values[0])
        return values, jax.device_get((params, state, np.stack(jax.device_get(losses))))

    # Both.

    def check(self):
        """Raises if the drawn steps are not the ordinary ones."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            values, new = self.trained()
            for seed in (0, 1) if self.run == "vmap" else (0,):
                old, got = values, new
                if self.run == "vmap":
                    old = jax.tree.map(lambda x: x[seed], values)
                    got = *jax.tree.map(lambda x: x[seed], new[:2]), new[2][:, seed]
                for number, wanted in enumerate(self.ordinary(seed)):
                    self.compare(old, got, wanted, is_plain=number == 1)

    def compare(self, old, got, wanted, *, is_plain):
        """Parameters and losses, and the state or what is known of it."""
        loose = self.loose if is_plain else max(1e-3, min(self.loose, 0.03))
        close = functools.partial(np.testing.assert_allclose, equal_nan=True)
        flat = {}
        for name, tree in (("old", old[0]), ("new", got[0]), ("wanted", wanted[0])):
            leaves = jax.tree.leaves_with_path(tree)
            flat[name] = {path_of(k): np.asarray(x, np.float64) for k, x in leaves}
        way = {k: np.abs(x - flat["old"][k]) for k, x in flat["wanted"].items()}
        way = max(np.nanmax(x, initial=0) for x in way.values())
        for name, new in flat["new"].items():
            if name in flat["wanted"]:
                rtol = 2**-7 if self.half else 0
                how = {"rtol": rtol, "atol": loose * way + 2e-6, "err_msg": name}
                close(new, flat["wanted"][name], **how)
            else:  # It is frozen.
                np.testing.assert_array_equal(new, flat["old"][name])
        close(got[2], wanted[2], rtol=max(loose, 1e-4), atol=1e-5)
        if is_plain:
            pairs = known(got[1]), known(wanted[1])
            jax.tree.map(functools.partial(close, rtol=loose, atol=1e-6), *pairs)
        else:
            same_state(got[1], wanted[1], old[1], loose)


def _types(x):
    return jnp.shape(x), x.dtype, x.sharding.memory_kind


def meshed(mesh):
    """The names of its axes, the mesh, and its context."""
    if MESHES[mesh] is None:
        return (), None, contextlib.nullcontext()
    names, kind = MESHES[mesh]
    sizes = (4,) if len(names) == 1 else (2, 2)
    kinds = (kind,) * len(names)
    made = jax.make_mesh(sizes, tuple(names), kinds, devices=jax.devices()[:4])
    is_auto = kind == AxisType.Auto
    return (
        tuple(names),
        made,
        contextlib.nullcontext() if is_auto else jax.set_mesh(made),
    )


def settled(state):
    """A state without the numbers of sums in which nothing is."""

    def is_sum(x):
        return hasattr(x, "num_accumulated")

    def of_sum(x):
        if not is_sum(x):
            return x
        total = jax.tree.map(lambda v: v * (x.num_accumulated > 0), x.accumulated)
        return x._replace(accumulated=total, inner_state=settled(x.inner_state))

    return jax.tree.map(of_sum, state, is_leaf=is_sum)


def same_state(got, wanted, old, loose):
    """Of what is frozen it is as it was."""
    leaves = jax.tree.leaves_with_path(settled(wanted))
    wanted = {path_of(k): x for k, x in leaves}
    leaves = jax.tree.leaves_with_path(settled(got))
    for (path, x), start in zip(leaves, jax.tree.leaves(old), strict=True):
        y = wanted.pop(path_of(path), start)
        if x.dtype == np.int8:  # A code, which may be rounded the other way.
            assert np.max(np.abs(x.astype(int) - y.astype(int)), initial=0) <= 1
        elif jnp.issubdtype(x.dtype, jnp.floating):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            atol = loose * np.nanmax(np.abs(y), initial=0) + 1e-9
            np.testing.assert_allclose(x, y, loose, atol, err_msg=path_of(path))
        elif loose <= 1e-3:
            np.testing.assert_array_equal(x, y, err_msg=path_of(path))
    assert not wanted


def known(state):
    """The counts of steps and the norms in a state, whatever else it has."""
    found = {"steps": [], "norms": []}
    for path, x in jax.tree.leaves_with_path(state):
        names = {getattr(k, "name", getattr(k, "key", None)) for k in path}
        if names & {"global_step", "gradient_step"}:
            found["steps"].append(x)
        elif "norms" in names:
            found["norms"].append(x)
    return found | {"steps": sorted(found["steps"])}


# Drawing.


@dataclasses.dataclass
class Step:
    """Some steps, as Python that makes a :class:`Training`."""

    text: str
    chosen: set[tuple[str, str]]

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
            return programs.refusal(error)
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
    if d.rarely("loss", "a second scan, without a derivative"):
        run = f"lax.scan({body}, (x, total), lax.stop_gradient(given))"
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
    text += 'y = jnp.mean((x @ p["head"] - 1) ** 2) + 0.1 * total + jnp.mean(ys)\n'
    text += "return y * factor\n"
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
    if d.rarely("around", "frozen parts"):
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
    if is_lazy:
        found = around(LAZY, found)
    else:
        found = around(d.pair("part", PARTS), found)
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


LOSS, UPDATE = {"stacks", "layer", "beside", "remat", "loss", "layers"}, {"rate"}
UPDATE |= {"optimizer", "part", "link", "gate", "around"}
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
    """Some steps."""
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
    if "drop_stale" in tx:
        how["extra"] = {"local_step": 0}
    if ("skip_spikes" in tx or "apply_if_finite" in tx) and d.chance():
        how["factors"] = d.one_of([(1.0, 1.0, 1e4), (1.0, np.nan, 1.0)])
    if half or "low_bit" in tx:
        how |= {"half": half, "loose": 0.3 if "low_bit" in tx else 0.03}
    same = "tx" if plain == tx else plain
    text = f"{loss}tx = {tx}\nplain = {same}\nshapes = {shapes}\n"
    call = "".join(f", {name}={x!r}" for name, x in how.items())
    text += f"training = steps.Training(loss_fn, tx, plain, shapes{call})\n"
    return Step(text, d.chosen)
