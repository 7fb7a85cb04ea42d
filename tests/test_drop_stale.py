"""The gate: what gets through, what reaches nothing, and the global step."""

import copy
import pickle

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

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
GRADS = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, -1.0)}
INNER = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.1))


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    max_staleness=st.integers(0, 4),
    # How late each push is, or how far ahead; the oracle makes local steps of it.
    pushes=st.lists(
        st.tuples(st.floats(-2, 2, width=32), st.integers(-2, 8)), max_size=12
    ),
)
def test_equals_a_plain_loop(max_staleness, pushes):
    tx = gx.drop_stale(optax.sgd(0.5), max_staleness)
    step = _jitted_step(max_staleness)
    params = jnp.float32(1.0)
    state = tx.init(params)
    expected = oracles.drop_stale(
        1.0, pushes, max_staleness, lambda p, g: np.float32(p - np.float32(0.5) * g)
    )
    for (grad, local_step), (p, global_step, stale) in zip(
        pushes, expected, strict=True
    ):
        params, state = step(
            jnp.float32(grad), state, params, local_step=jnp.int32(local_step)
        )
        np.testing.assert_allclose(params, p, rtol=1e-6, atol=1e-6)
        assert (state.global_step, state.stale_count) == (global_step, stale)


_steps = {}


def _jitted_step(max_staleness):
    """One compilation for all examples with this threshold."""
    if max_staleness not in _steps:
        tx = gx.drop_stale(optax.sgd(0.5), max_staleness)
        _steps[max_staleness] = jax.jit(
            lambda g, s, p, local_step: gx.apply_gradients(
                tx, g, s, p, local_step=local_step
            )
        )
    return _steps[max_staleness]


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, 1e38])
@pytest.mark.parametrize("how", ["update", "apply", "vmap"])
def test_whatever_a_stale_gradient_holds_reaches_nothing(poison, how):
    tx = gx.drop_stale(INNER, 0)
    state = tx.init(PARAMS)
    params, state = gx.apply_gradients(tx, GRADS, state, PARAMS, local_step=0)
    bad = jax.tree.map(lambda g: jnp.full_like(g, poison), GRADS)
    if how == "update":
        updates, after = tx.update(bad, state, params, local_step=0)
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, GRADS))
    elif how == "apply":
        unchanged, after = gx.apply_gradients(tx, bad, state, params, local_step=0)
        chex.assert_trees_all_equal(unchanged, params)
    else:  # A conditional under vmap computes both sides and selects.
        batched = jax.vmap(
            lambda g, s, p: gx.apply_gradients(tx, g, s, p, local_step=0)
        )

        def add(tree):
            return jax.tree.map(lambda x: x[None], tree)

        unchanged, after = jax.tree.map(
            lambda x: x[0], batched(add(bad), add(state), add(params))
        )
        chex.assert_trees_all_equal(unchanged, params)
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)
    assert (after.global_step, after.stale_count, after.staleness) == (1, 1, 1)


def test_a_local_step_ahead_is_fresh():
    tx = gx.drop_stale(optax.sgd(1.0), 0)
    state = tx.init(PARAMS)
    params, state = gx.apply_gradients(tx, GRADS, state, PARAMS, local_step=7)
    assert (state.global_step, state.staleness) == (1, -7)
    chex.assert_trees_all_equal(params["w"], PARAMS["w"] - GRADS["w"])


def test_the_step_equals_update_and_apply():
    tx = gx.drop_stale(INNER, 1)
    state = other_state = tx.init(PARAMS)
    params = other_params = PARAMS
    for local_step in (0, 0, 0, 1, 2, 0):
        params, state = gx.apply_gradients(
            tx, GRADS, state, params, local_step=local_step
        )
        updates, other_state = tx.update(
            GRADS, other_state, other_params, local_step=local_step
        )
        other_params = gx.apply_updates(other_params, updates)
    chex.assert_trees_all_close((params, state), (other_params, other_state), rtol=1e-6)
    assert state.stale_count == 2


def test_inner_receives_staleness_and_every_other_extra_argument():
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    probe = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = gx.drop_stale(optax.chain(probe, optax.sgd(0.1)), 1)
    tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=-1, value=3)
    assert seen.keys() == {"staleness", "local_step", "value"}
    assert seen["value"] == 3


def test_updates_keep_the_gradient_dtype_whatever_inner_makes_of_it():
    widen = optax.stateless(lambda u, _: jax.tree.map(lambda g: g.astype(float), u))
    tx = gx.drop_stale(widen, 0)
    updates, _ = tx.update(jnp.ones(2, jnp.float16), tx.init(None), local_step=0)
    assert updates.dtype == jnp.float16


def test_counters_saturate():
    largest = jnp.int32(np.iinfo(np.int32).max)
    tx = gx.drop_stale(optax.sgd(0.1), 0)
    state = tx.init(PARAMS)._replace(global_step=largest, stale_count=largest)
    _, fresh = tx.update(GRADS, state, PARAMS, local_step=largest)
    assert fresh.global_step == largest
    _, stale = tx.update(GRADS, state, PARAMS, local_step=0)
    assert stale.stale_count == largest


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.identity(), optax.chain(tx)),
        lambda tx: optax.masked(tx, {"w": True, "b": False}),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.named_chain(("gate", tx)),
        lambda tx: gx.drop_stale(tx, 2),
        lambda tx: optax.inject_hyperparams(lambda lr: optax.chain(tx, optax.sgd(lr)))(
            lr=0.1
        ),
    ],
)
def test_global_step_and_fraction_are_found_at_any_depth(wrap, standard_promotion):
    tx = wrap(gx.drop_stale(optax.sgd(0.1), 0))
    state = tx.init(PARAMS)
    for local_step in (0, 0, 1, 0):
        _, state = tx.update(GRADS, state, PARAMS, local_step=local_step)
    # Every wrapper sees the same pushes; a second gate around it lets one more through.
    outer = isinstance(state, gx.DropStaleState) and isinstance(
        state.inner_state, gx.DropStaleState
    )
    steps, stale = (3, 1) if outer else (2, 2)
    assert gx.global_step(state) == steps
    np.testing.assert_allclose(gx.staleness_fraction(state), stale / (steps + 1))


def test_the_global_step_outlives_the_donated_state():
    tx = gx.drop_stale(optax.sgd(0.1), 0)
    step = jax.jit(
        lambda g, s, p, seen: gx.apply_gradients(tx, g, s, p, local_step=seen),
        donate_argnums=(1, 2),
    )
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    seen = gx.global_step(state)
    params, state = step(GRADS, state, params, seen)
    assert seen == 0
    assert state.global_step == 1


def test_a_gate_is_a_transformation_to_optax():
    tx = gx.drop_stale(optax.sgd(0.1), 0)
    init, update = tx
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert (init, update) == (tx.init, tx.update)
    assert copy.copy(tx).guard is tx.guard


def test_a_gate_survives_pickling_where_its_functions_do():
    tx = gx.GatedTransformation(_init, _update, _guard)
    again = pickle.loads(pickle.dumps(tx))
    assert again.guard is _guard
    assert again.update is _update


def _init(params):
    return ()


def _update(updates, state, params=None, **extra):
    return updates, state


def _guard(act, rest, updates, state, params, **extra):
    return rest(updates, params), state
