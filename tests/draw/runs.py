"""Runs steps, as they were drawn and as the ordinary ones of optax on one device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests import in_numpy

# From the host come layers of matrices of at least 8 rows and columns; others whole.
BATCH, WIDTH, ROWS, STEPS = 8, 8, 6, 3
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
        return count - extra.get("local_step", 0) <= limit, more

    return gated(inner, (), decide)


def without_spikes(inner, sigmas=6.0):
    """With a history of all pushes that were finite; NaN where there are no more."""

    def decide(history, count, updates, extra):
        loss = extra.get("value", jnp.float32(0))  # MultiSteps asks for types alone.
        new = jnp.stack([optax.tree.norm(updates), loss])
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
      by_rows: whether ``tx`` leaves rows that are not read, and dense it would not.
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
    by_rows: bool = False
    run: str = "donated"
    memory: str = "device"
    mesh: str = "no mesh"

    def start(self, seed):
        rng = np.random.default_rng(seed)
        dtype = jnp.bfloat16 if self.half else jnp.float32

        def draw(shape):
            return np.asarray(0.3 * rng.standard_normal(shape), dtype)

        return jax.tree.map(draw, self.shapes, is_leaf=lambda x: isinstance(x, tuple))

    def batches(self, seed):
        """Of all runs. An id repeats, and row 1 is read by none."""
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

    # The ordinary runs.

    def ordinary(self, seed):
        """What learns, its state and the losses, after steps of optax on one device.

        One after the other, with ``tx`` and with ``plain``.
        """
        params, many = self.start(seed), []
        loss_fn = self.mean_of_shards if self.run == "shard_map" else self.loss
        for tx, dtype in self.transformations():
            learns = optax.tree.cast(self.learning(params), dtype)
            many.append((learns, in_numpy.jit(tx.init)(learns)))
        gradient = jax.jit(jax.value_and_grad(loss_fn))  # Traced once for both.

        @in_numpy.jit
        def step(many, *batch):
            new = []
            pairs = zip(self.transformations(), many, strict=True)
            for (tx, _), (learns, state) in pairs:
                value, grads = gradient(learns, params, *batch)
                update = optax.with_extra_args_support(tx).update
                more = {"value": value} | self.extra
                updates, after = update(grads, state, learns, **more)
                new.append(((optax.apply_updates(learns, updates), after), value))
            return new

        losses = []
        for batch in zip(*self.batches(seed), strict=True):
            # Their types in NumPy are those of the first step.
            many, values = zip(*step(jax.device_get(many), *batch), strict=True)
            losses.append(values)
        losses = np.transpose(jax.device_get(losses))
        return [(*x, y) for x, y in zip(jax.device_get(many), losses, strict=True)]

    def transformations(self):
        """They, and the dtype of their parameters."""
        if not self.by_rows:
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
            state = gx.on_host(state, min_size=64)
        if self.memory == "both on the host":
            params = gx.on_host(params, min_size=64)
        return params, state, batch

    def trained(self):
        """The start, and parameters, state and losses after all runs."""
        names, mesh, context = meshed(self.mesh)
        with context:
            params, state, batch = self.begin(names, mesh)
            # Copies: the memory of an array that NumPy holds cannot be donated.
            given, values = params, jax.tree.map(np.array, (params, state))
            where = jax.tree.map(_types, (params, state))
            step = self.step(names)
            is_evaluated = self.run == "kept" and self.memory == "both on the host"
            if is_evaluated:
                first = gx.evaluate(self.loss_fn, layers=self.layers)
                evaluated = first(params, *[x[0] for x in batch])
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
        if is_evaluated:
            np.testing.assert_allclose(evaluated, losses[0], rtol=1e-4, atol=1e-5)
        return values, jax.device_get((params, state, np.stack(jax.device_get(losses))))

    # Both.

    def check(self):
        """Raises if the drawn steps are not the ordinary ones."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            values, new = self.trained()
            if self.run == "vmap":
                new = *new[:2], new[2].T
                pairs = [
                    jax.tree.map(operator.itemgetter(k), (values, new)) for k in (0, 1)
                ]
            else:
                pairs = [(values, new)]
            for seed, (old, got) in enumerate(pairs):
                for number, wanted in enumerate(self.ordinary(seed)):
                    is_plain = self.by_rows or number == 1
                    self.compare(old, got, wanted, is_plain=is_plain)

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
            norms = pairs[0]["norms"]  # It has frozen leaves, too.
            pairs[0]["norms"] = {k: norms[k] for k in pairs[1]["norms"]}
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
    context = contextlib.nullcontext() if is_auto else jax.set_mesh(made)
    return tuple(names), made, context


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
            new, want = np.float64(x), np.float64(y)
            atol = loose * np.max(np.abs(want), initial=0, where=~np.isnan(want)) + 1e-9
            np.testing.assert_allclose(new, want, loose, atol, err_msg=path_of(path))
        elif loose <= 1e-3:
            np.testing.assert_array_equal(x, y, err_msg=path_of(path))
    assert not wanted


def known(state):
    """The counts of steps and the norms in a state, whatever else it has."""
    found = {"steps": [], "norms": {}}
    for path, x in jax.tree.leaves_with_path(state):
        names = [str(getattr(k, "name", getattr(k, "key", ""))) for k in path]
        if {*names} & {"global_step", "gradient_step"}:
            found["steps"].append(x)
        elif "norms" in names:
            leaf = "/".join(names[names.index("norms") :])
            found["norms"].setdefault(leaf, []).append(x)
    return found | {"steps": sorted(found["steps"])}
