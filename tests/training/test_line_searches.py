"""Optimizers that evaluate the loss: L-BFGS, line searches, Polyak's step."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests import in_numpy

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 3)).astype(np.float32)
Y = RNG.standard_normal(12).astype(np.float32)
MASK = (np.arange(12) < 7).astype(np.float32)
STEPS = 3


def loss_fn(params, x, y, *, mask=None, power=2):
    errors = jnp.abs(jnp.tanh(x @ params["w"]) + params["b"] - y) ** power
    return jnp.mean(errors) if mask is None else jnp.sum(errors * mask) / jnp.sum(mask)


def start():
    return {"w": jnp.full(3, 0.3), "b": jnp.array(0.1)}


SEARCHES = {
    "lbfgs": optax.lbfgs(memory_size=2),
    "lbfgs, backtracking": optax.lbfgs(
        memory_size=2,
        linesearch=optax.scale_by_backtracking_linesearch(5, store_grad=True),
    ),
    "backtracking": optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
    ),
    "polyak_sgd": optax.polyak_sgd(),
    "plateau": optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0)
    ),
}
AROUND = {
    "itself": (lambda tx: tx, {}),
    "drop_stale": (lambda tx: gx.drop_stale(tx, 2), {"local_step": 0}),
    "skip_spikes": (gx.skip_spikes, {}),
    "accumulate": (lambda tx: gx.accumulate(tx, 1), {"weight": 1.0}),
    "worker_mean": (
        lambda tx: gx.worker_mean(tx, 1, method="ringleader"),
        {"worker": 0},
    ),
    "gates in a chain": (
        lambda tx: optax.chain(gx.skip_spikes(gx.drop_stale(tx, 9)), optax.identity()),
        {"local_step": 0},
    ),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 2), {}),
    "master_weights": (gx.master_weights, {}),
    "low_bit_state": (gx.low_bit_state, {}),
    "lazy": (gx.lazy, {}),
    "whole_matrices": (gx.whole_matrices, {}),
    "a jitted update": (
        lambda tx: optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update)),
        {},
    ),
}


def expected(tx, loss, params):
    """Parameters and losses by optax's own loop."""
    state, losses = tx.init(params), []
    for _ in range(STEPS):
        value, grad = jax.value_and_grad(loss)(params)
        words = {"value": value, "grad": grad, "value_fn": loss}
        updates, state = tx.update(grad, state, params, **words)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return params, losses


def trained(step, tx, *batch, **words):
    params, state, losses = start(), tx.init(start()), []
    for _ in range(STEPS):
        params, state, loss, *_ = step(params, state, *batch, **words)
        losses.append(loss)
    return params, losses


CASES = [("itself", name) for name in SEARCHES]
CASES += [(around, "backtracking") for around in AROUND if around != "itself"]
CASES += [("drop_stale", "lbfgs"), ("gates in a chain", "lbfgs")]


@pytest.mark.slow
@pytest.mark.parametrize(("around", "name"), CASES)
def test_they_get_what_optax_asks_for(around, name):
    wrap, words = AROUND[around]
    tx = wrap(SEARCHES[name])
    want = expected(SEARCHES[name], lambda p: loss_fn(p, X, Y), start())
    step = in_numpy.jit(gx.minimize(loss_fn, tx))
    got = trained(step, tx, X, Y, **words)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)
    assert want[1][-1] < want[1][0]


BACKTRACKING = SEARCHES["backtracking"]


@pytest.mark.slow
def test_the_loss_that_they_evaluate_has_its_keywords():
    """Arrays and flags, also beside words of a gate, and with an aux."""

    def with_aux(params, x, y, **kwargs):
        return loss_fn(params, x, y, **kwargs), {"n": len(x)}

    def bound(params):
        return loss_fn(params, X, Y, mask=MASK, power=4)

    want = expected(BACKTRACKING, bound, start())
    tx = gx.drop_stale(BACKTRACKING, 2)
    words = {"mask": MASK, "power": 4, "local_step": 0}
    for step in (
        gx.minimize(loss_fn, tx, donate=False),
        gx.minimize(with_aux, tx, has_aux=True),
    ):
        chex.assert_trees_all_close(trained(step, tx, X, Y, **words), want, rtol=1e-4)


def test_frozen_parameters_are_there_when_the_loss_is_evaluated():
    mask = {"w": True, "b": False}
    step = gx.minimize(loss_fn, BACKTRACKING, trainable=mask)

    def of_w(params):
        return loss_fn(start() | params, X, Y)

    params, losses = expected(BACKTRACKING, of_w, {"w": start()["w"]})
    got = trained(step, BACKTRACKING, X, Y)
    chex.assert_trees_all_close(got, (start() | params, losses), rtol=1e-4)


@pytest.mark.slow
def test_local_steps_search_too():
    steps = gx.local_steps(loss_fn, BACKTRACKING)
    x, y = jnp.stack([X] * STEPS), jnp.stack([Y] * STEPS)
    state = BACKTRACKING.init(start())
    grads, _, losses = steps(start(), state, x, y, power=jnp.full(STEPS, 2))
    params, want = expected(BACKTRACKING, lambda p: loss_fn(p, X, Y), start())
    new = jax.tree.map(jnp.subtract, start(), grads)
    chex.assert_trees_all_close((new, losses), (params, jnp.stack(want)), rtol=1e-4)


@pytest.mark.slow
def test_a_part_of_a_table_is_a_part_when_the_loss_is_evaluated():
    """Otherwise the ids of its rows would be read as their positions."""
    table = jnp.arange(20.0).reshape(10, 2) / 10
    part = gx.TableRows(jnp.array([4, 7]), table[jnp.array([4, 7])], table.shape)

    def of_rows(params, ids):
        return jnp.sum((gx.lookup(params["emb"], ids) - 1) ** 2)

    tx = optax.chain(gx.densify(), optax.sgd(0.3), evaluated())
    params = {"emb": part}
    step = gx.minimize(of_rows, tx, donate=False)
    _, state, loss = step(params, tx.init(params), jnp.array([7, 4, 7]))
    want = of_rows({"emb": table}, jnp.array([7, 4, 7]))
    np.testing.assert_allclose([loss, state[-1]], [want, want], rtol=1e-6)


def evaluated():
    """A link whose state is the loss at the parameters, as it evaluates it."""

    def update(updates, state, params=None, *, value_fn, **_):
        return updates, value_fn(params)

    return optax.GradientTransformationExtraArgs(lambda _: jnp.zeros(()), update)


@pytest.mark.parametrize("name", ["lbfgs", "backtracking", "named"])
def test_by_layers_they_are_refused_by_name(name):
    tx = SEARCHES.get(name) or evaluated()

    def loss(params, x):
        return jax.lax.scan(lambda c, w: (c * w, None), x, params["w"])[0]

    step = gx.minimize(loss, tx, layers=["w"], donate=False)
    with pytest.raises(
        TypeError, match=r"layers=.*(grad|value_fn): it reads .* search"
    ):
        step(start(), tx.init(start()), 2.0)
    sgd = optax.sgd(0.1)
    step = gx.minimize(loss, sgd, layers=["w"], donate=False)
    with pytest.raises(TypeError, match=r"cannot give this transformation value_fn"):
        step(start(), sgd.init(start()), 2.0, value_fn=jnp.sum)


def test_beside_tables_they_are_refused():
    def of_rows(params, ids):
        return jnp.sum((gx.lookup(params["emb"], ids) - 1) ** 2)

    tx, params = optax.chain(gx.densify(), BACKTRACKING), {"emb": jnp.ones((4, 2))}
    step = gx.minimize(of_rows, tx, tables=["emb"], donate=False)
    with pytest.raises(TypeError, match=r"tables get .* grad, as a line search does"):
        step(params, tx.init(params), jnp.array([1, 1]))


@pytest.mark.parametrize("around", ["itself", "skip_spikes", "accumulate"])
def test_what_nobody_reads_changes_no_program(around):
    """That of a step by hand, which has the value alone."""
    tx = AROUND[around][0](optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, state, x, y):
        value, grads = gx.value_and_grad(loss_fn)(params, x, y)
        new = gx.apply_gradients(tx, grads, state, params, value=value)
        return *new, value

    args = start(), tx.init(start()), X, Y
    ours = gx.minimize(loss_fn, tx, donate=False).lower(*args)
    assert ours.as_text() == step.lower(*args).as_text()


@pytest.mark.slow
def test_a_value_of_the_user_comes_before_that_of_the_step():
    tx = optax.polyak_sgd(max_learning_rate=100.0)
    step = gx.minimize(loss_fn, tx, donate=False)
    params, state = start(), tx.init(start())
    new = step(params, state, X, Y, value=jnp.float32(0.0))[0]
    chex.assert_trees_all_equal(new, params)
    mine = functools.partial(loss_fn, x=X, y=Y)
    step = gx.minimize(loss_fn, BACKTRACKING, donate=False)
    state = BACKTRACKING.init(params)
    same = step(params, state, X, Y, value_fn=lambda p, **_: mine(p))[0]
    chex.assert_trees_all_close(same, step(params, state, X, Y)[0])
