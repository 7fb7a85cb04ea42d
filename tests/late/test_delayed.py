"""A fixed delay, against lists of the gradients of so many steps."""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import gradxform as gx
from tests import oracles
from tests.descriptors import DESCRIPTORS


def draw(seed, *, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = {"w": (2, 3, 2), "b": (), "nothing": None}
    return {
        k: None if s is None else jnp.asarray(rng.standard_normal(s), dtype)
        for k, s in shapes.items()
    }


def played(txs, grads, params, extra):
    """All parameters and states of loops, by ``scan`` in one donated program."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(now, grads):
        def body(now, g):
            now = {
                key: gx.apply_gradients(tx, g, now[key][1], now[key][0], **extra)
                for key, tx in txs.items()
            }
            return now, now

        return jax.lax.scan(body, now, grads)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
    start = {
        key: (jax.tree.map(jnp.copy, params), tx.init(params))
        for key, tx in txs.items()
    }
    return run(start, stacked)[1]


def looped(tx, grads, params, extra, delays):
    """The same of ``tx`` alone, from lists of the gradients of so many steps."""
    step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p, **extra))
    for delay in delays:
        now, trace = (params, tx.init(params)), []
        for acts in oracles.delayed(grads, delay):
            if acts is not None:
                now = step(acts, *reversed(now))
            trace.append(now)
        yield delay, trace


@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_every_row_a_fixed_number_of_steps_late(row):
    tx, params = row.make(), draw(0)
    grads, extra = [draw(1 + t) for t in range(5)], row.extra(params)
    txs = {delay: gx.delayed(tx, delay) for delay in (1, 2)}
    got = played(txs, grads, params, extra)
    for delay, expected in looped(tx, grads, params, extra, txs):
        found, state = got[delay]
        for t, now in enumerate(expected):
            here = jax.tree.map(lambda x, t=t: x[t], (found, state.inner_state))
            if t < delay:  # As long as it rests there is what there was before.
                chex.assert_trees_all_equal(here, now)
            chex.assert_trees_all_close(here, now, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_without_a_delay_it_is_the_inner_one(row):
    tx = row.make()
    for nothing in (0, np.int64(0), {"w": 0, "b": 0}):
        same = gx.delayed(tx, nothing)
        assert (same.init, same.update) == (tx.init, tx.update)


def test_without_a_delay_extra_arguments_may_be_passed_too():
    tx = gx.delayed(optax.GradientTransformation(*optax.sgd(1.0)), 0)
    assert tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=3)[0].sum() == -2


TREE = {"stages": [{"w": (2, 2)}, {"w": (3,), "b": ()}], "head": (2,)}
leaves_of = functools.partial(jax.tree.leaves, is_leaf=lambda x: isinstance(x, tuple))
map_shapes = functools.partial(jax.tree.map, is_leaf=lambda x: isinstance(x, tuple))


@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    first=st.integers(0, 4), second=st.integers(0, 3), head=st.integers(0, 2)
)
def test_a_tree_of_delays_is_a_list_a_leaf(first, second, head):
    hypothesis.assume(first + second + head)
    tx = gx.delayed(optax.sgd(0.5), {"stages": [first, second], "head": head})
    params = map_shapes(jnp.zeros, TREE)
    rng = np.random.default_rng(0)
    grads = [
        map_shapes(lambda s: jnp.float32(rng.standard_normal(s)), TREE)
        for _ in range(8)
    ]
    got, _ = played({0: tx}, grads, params, {})[0]
    longest = max(first, second, head)
    each = [head, first, second, second]  # As their keys are sorted.
    for leaf, delay, *column in zip(
        jax.tree.leaves(got), each, *map(jax.tree.leaves, grads), strict=True
    ):
        w, kept = np.zeros(leaf.shape[1:]), []
        for t, g in enumerate(column):
            kept.append(np.float64(g))
            late = kept[t - delay] if t >= delay else None
            if t >= longest:
                w = w - 0.5 * late
            np.testing.assert_allclose(leaf[t], w, rtol=1e-5, atol=1e-6)
