"""An ``update`` gets each extra argument that it takes, whatever its class."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.conftest import half
from tests.late.test_accumulator import stepped

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
SGD = optax.sgd(0.5)


class Scaled:
    """SGD times an extra argument, as a user may write it: no named tuple of optax."""

    def init(self, params):
        return optax.trace(0.5).init(params)

    def update(self, updates, state, params=None, **extra):
        updates, state = optax.trace(0.5).update(updates, state)
        return optax.tree.scale(-extra["factor"], updates), state


class Named(Scaled):
    """The same, with this argument alone."""

    def update(self, updates, state, params=None, *, factor=0.0):
        return super().update(updates, state, params, factor=factor)


INSIDE = {
    "skip_spikes": optax.MultiSteps(gx.skip_spikes(SGD), 1),
    "drop_stale": optax.MultiSteps(gx.drop_stale(SGD, 0), 1),
    "reduce_on_plateau": optax.MultiSteps(
        optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=1, cooldown=0)), 1
    ),
    "pair": optax.MultiSteps(gx.skip_spikes(SGD), 1).gradient_transformation(),
    "class": Scaled(),
    "named": Named(),
}
# Which of them each reads, and each of those around it.
READS = {
    "skip_spikes": {"value"},
    "drop_stale": {"local_step"},
    "reduce_on_plateau": {"value"},
    "pair": {"value"},
    "class": {"factor"},
    "named": {"factor"},
}
AROUND_READS = {
    "drop_stale": {"local_step"},
    "skip_spikes": {"value"},
    "conditional_accumulator": {"local_step"},
    "worker_mean": {"worker"},
    "two gates": {"local_step"},
}
# Before which global step of `drop_stale` each of five gradients was computed.
SEEN = [0, 0, 1, 0, 2]


def pushes(name, around=""):
    """Five gradients, and the extra arguments of each that are read."""
    read = READS[name] | AROUND_READS.get(around, set())
    spikes = name in ("skip_spikes", "pair")
    values = [1.0, np.nan, 2.0, np.nan, 3.0] if spikes else [1.0, 2.0, 3.0, 4.0, 5.0]
    for t, (value, seen) in enumerate(zip(values, SEEN, strict=True)):
        grads = jax.tree.map(lambda p, t=t: jnp.full_like(p, t + 1.0), PARAMS)
        extra = {"value": jnp.float32(value), "local_step": jnp.int32(seen)}
        extra |= {"factor": jnp.float32(0.25 * (t + 1)), "worker": jnp.int32(0)}
        yield grads, {k: x for k, x in extra.items() if k in read}


@functools.cache
def by_optax(name, delay):
    """The parameters after each push, by the transformation's own ``update``."""
    tx, given = INSIDE[name], [grads for grads, _ in pushes(name)]
    params, state, trace = PARAMS, tx.init(PARAMS), []
    update = jax.jit(tx.update)
    for t, (_, extra) in enumerate(pushes(name)):
        if t >= delay:
            updates, state = update(given[t - delay], state, params, **extra)
            params = optax.apply_updates(params, updates)
        trace.append(params)
    return trace


def trained(around, how, tx, name):
    tx = AROUND[around](tx) if around else tx
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(functools.partial(stepped, tx, how=how))
    for grads, extra in pushes(name, around):
        params, state = step(grads, state, params, **extra)
        yield params


def product(params, grads):
    """A loss with these gradients."""
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, grads)
    return sum(jax.tree.leaves(parts))


def minimized(tx, name):
    step = gx.minimize(product, tx, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for grads, extra in pushes(name):
        params, state, _ = step(params, state, grads, **extra)
        yield params


def by_layers(tx, name):
    def loss_fn(params, grads):
        def body(carry, pair):
            return carry + jnp.sum(pair[0] * pair[1]), None

        rows = params["w"], grads["w"]
        return jax.lax.scan(body, jnp.sum(params["b"] * grads["b"]), rows)[0]

    step = gx.minimize(loss_fn, tx, layers=["w"], two_passes=True, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for grads, extra in pushes(name):
        params, state, _ = step(params, state, grads, **extra)
        yield params


def local(tx, name):
    steps = gx.local_steps(product, tx, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for grads, extra in pushes(name):
        batch = jax.tree.map(lambda g: g[None], grads)
        change, state, _ = steps(params, state, batch, **extra)
        params = jax.tree.map(jnp.subtract, params, change)
        yield params


def served(tx, name):
    server = gx.ParameterServer(PARAMS, tx)
    for grads, extra in pushes(name):
        server.push(grads, int(extra.pop("local_step", 0)), **extra)
        yield server.pull()[0]


ANY = np.inf
AROUND = {
    "drop_stale": lambda tx: gx.drop_stale(tx, ANY),
    "skip_spikes": gx.skip_spikes,
    "accumulate": lambda tx: gx.accumulate(tx, 1),
    "conditional_accumulator": lambda tx: gx.conditional_accumulator(
        tx, 1, max_staleness=ANY
    ),
    "worker_mean": lambda tx: gx.worker_mean(tx, 1, method="ringleader"),
    "delayed": lambda tx: gx.delayed(tx, 1),
    "lazy": gx.lazy,
    "low_bit_state": gx.low_bit_state,
    "master_weights": gx.master_weights,
    "two gates": lambda tx: gx.accumulate(gx.drop_stale(tx, ANY), 1),
}
DIRECTLY = {
    "apply_gradients": functools.partial(trained, "", "apply"),
    "minimize": minimized,
    "by layers": by_layers,
    "local_steps": local,
    "server": served,
}
HOWS = DIRECTLY | {
    f"{name}, {how}": functools.partial(trained, name, how)
    for name in AROUND
    for how in ("apply", "update")
}

CASES = half([*INSIDE], [*HOWS])


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "how"), CASES)
def test_an_update_gets_the_extra_arguments_that_it_takes(name, how):
    want = by_optax(name, int(how.startswith("delayed")))
    for got, expected in zip(HOWS[how](INSIDE[name], name), want, strict=True):
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
    assert not all(jnp.all(p["w"] == want[0]["w"]) for p in want)


@pytest.mark.parametrize("tx", [Scaled(), Named()], ids=["class", "named"])
def test_lazy_passes_them_on_by_the_row(tx):
    tx, table = gx.lazy(tx), jnp.zeros((4, 2))
    state = tx.init(table)
    want, trace = np.zeros((4, 2)), np.zeros((4, 2))
    for rows, factor in ([2, 0, 2], 0.5), ([0, 3, 3], 2.0):
        grads = gx.IndexedSlices(jnp.array(rows), jnp.ones((3, 2)), (4, 2))
        table, state = gx.apply_gradients(
            tx, grads, state, table, factor=jnp.float32(factor), value_fn=lambda _: None
        )
        touched = [*set(rows)]
        trace[touched] = 0.5 * trace[touched] + np.bincount(rows)[touched][:, None]
        want[touched] -= factor * trace[touched]
    np.testing.assert_allclose(table, want)


def test_an_argument_that_nothing_takes_is_an_error():
    """What optax's own would pass on to all, and they would drop it."""
    for inner in (Named(), optax.GradientTransformation(Named().init, Named().update)):
        tx = gx.skip_spikes(inner)
        args = tx, PARAMS, tx.init(PARAMS), PARAMS
        params, _ = gx.apply_gradients(*args, factor=0.5, grad=PARAMS, value_fn=sum)
        np.testing.assert_array_equal(params["w"], np.full((2, 3), 0.5))
        with pytest.raises(TypeError, match=r"'other'.*reads 'factor', 'value'"):
            gx.apply_gradients(*args, factor=0.5, other="a string")


def test_a_gate_stays_one_in_a_plain_pair_of_functions():
    """``update`` is the gate, so the step of a push that is skipped is not run."""
    tx = gx.skip_spikes(Scaled())
    pair = optax.GradientTransformation(tx.init, tx.update)
    around = gx.accumulate(pair, 1)
    new, state = gx.apply_gradients(
        around, PARAMS, around.init(PARAMS), PARAMS, value=np.nan, factor=1.0
    )
    chex.assert_trees_all_equal(new, PARAMS)
    assert optax.tree.get(state, "skipped_count") == 1
