"""The gate: what gets through, what reaches nothing, and the global step."""

import copy
import functools
import pickle
from typing import NamedTuple

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import gradxform as gx
from gradxform._gates.gate import Decision, Gate, gate_of
from tests import oracles

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
GRADS = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, -1.0)}
INNER = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.1))


def fractional(step):
    return 0.4 * step


def never_then_all(step):
    return np.inf if step > 2 else 0


# Each schedule, written for JAX.
SCHEDULES = {
    np.sqrt: jnp.sqrt,
    fractional: lambda step: 0.4 * step.astype(jnp.float32),
    never_then_all: lambda step: jnp.where(step > 2, jnp.inf, 0),
}


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    max_staleness=st.integers(0, 4) | st.sampled_from(list(SCHEDULES)),
    # How late each push is, or how far ahead. The oracle turns it into local steps.
    pushes=st.lists(
        st.tuples(st.floats(-2, 2, width=32), st.integers(-2, 8)), max_size=12
    ),
)
def test_equals_a_plain_loop(max_staleness, pushes):
    step = _jitted_step(max_staleness)
    params = jnp.float32(1.0)
    state = gx.drop_stale(optax.sgd(0.5), 0).init(params)
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


@functools.cache
def _jitted_step(max_staleness):
    """One compilation for all examples with this threshold."""
    tx = gx.drop_stale(optax.sgd(0.5), SCHEDULES.get(max_staleness, max_staleness))
    return jax.jit(functools.partial(gx.apply_gradients, tx))


GATES = {
    "drop_stale": lambda tx: gx.drop_stale(tx, 1),
    "accumulator": lambda tx: gx.conditional_accumulator(tx, 1),
}


@pytest.mark.usefixtures("standard_promotion")  # optax multiplies mixed dtypes.
@pytest.mark.parametrize(
    ("param", "grad"),
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
@pytest.mark.parametrize("gate", GATES)
def test_a_fresh_push_is_that_of_inner_in_every_mix_of_dtypes(gate, param, grad):
    """Alone, the moments of inner would take another dtype."""
    inner = optax.adamw(0.1)
    tx = GATES[gate](inner)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2)
    params, grads = jnp.array([1.0, -2.0], param), jnp.array([0.3, 0.7], grad)
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(grads, state, params, local_step=0)
    expected, _ = inner.update(grads, inner.init(params), params)
    assert jax.typeof(updates) == jax.typeof(expected)
    close(updates, expected)
    new, whole = gx.apply_gradients(tx, grads, state, params, local_step=0)
    close(new, gx.apply_updates(params, expected))
    for found in (after, whole):
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_an_update_that_is_wider_than_the_gradient_is_not_rounded(gate, param):
    third = optax.stateless(
        lambda u, _: jax.tree.map(lambda g: g.astype(jnp.float32) / 3, u)
    )
    tx = GATES[gate](third)
    params, grads = jnp.zeros(2, param), jnp.ones(2, jnp.float16)
    updates, _ = tx.update(grads, tx.init(params), params, local_step=0)
    np.testing.assert_array_equal(updates, np.full(2, np.float32(1) / np.float32(3)))
    params, _ = gx.apply_gradients(tx, grads, tx.init(params), params, local_step=0)
    np.testing.assert_array_equal(params, updates.astype(param))


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
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for local_step in (0, 0, 1, 0):
        _, state = update(GRADS, state, PARAMS, local_step=local_step)
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


REBUILT = {
    "copy": copy.copy,
    "replace": lambda tx: tx._replace(init=tx.init),
    "unflatten": lambda tx: jax.tree.unflatten(
        jax.tree.structure(tx), jax.tree.leaves(tx)
    ),
    "pair": lambda tx: optax.GradientTransformationExtraArgs(*tx),
    "pickle": lambda tx: pickle.loads(pickle.dumps(tx)),
}


@pytest.mark.parametrize("how", REBUILT)
def test_a_gate_made_anew_of_its_parts_is_gated(how):
    tx = optax.GradientTransformationExtraArgs(_init, GATE)
    again = REBUILT[how](tx)
    assert again == tx
    assert gate_of(again) == GATE
    # The gate of this one skips every push.
    state = again.init(PARAMS)
    params, state = gx.apply_gradients(again, GRADS, state, PARAMS)
    assert state == _State(1, optax.EmptyState())
    chex.assert_trees_all_equal(params, PARAMS)


def test_the_class_of_a_gate_is_sent_by_its_name():
    """By value it would be another class in the other process, and no gate there."""
    assert pickle.loads(pickle.dumps(Gate)) is Gate


def test_an_update_in_the_place_of_a_gates_is_not_gated():
    tx = optax.GradientTransformationExtraArgs(_init, GATE)

    @functools.wraps(tx.update)
    def update(*args, **extra):
        return tx.update(*args, **extra)

    logged = tx._replace(update=update)
    assert gate_of(tx) is GATE
    assert gate_of(logged) is None


class _State(NamedTuple):
    decided: int
    inner_state: optax.OptState


def _init(params):
    return _State(0, optax.EmptyState())


def _decide(updates, state, **extra):
    never = jnp.array(False)
    return Decision(never, never, lambda _: updates, state._replace(decided=1), extra)


def _update(updates, state, params=None, **extra):
    return updates, state


GATE = Gate(_decide, optax.GradientTransformationExtraArgs(_init, _update))


@pytest.mark.parametrize("global_step", [0, 2**31 - 1])
@pytest.mark.parametrize("local_step", [-(2**31), -1, 2**31 - 1])
@pytest.mark.parametrize("max_staleness", [0, 2**31 - 2])
def test_no_step_count_wraps(global_step, local_step, max_staleness):
    state = gx.drop_stale(optax.identity(), 0).init(1.0)
    state = state._replace(global_step=jnp.int32(global_step))
    lateness = global_step - local_step
    after = pushed(state, jnp.int32(local_step), max_staleness)
    assert after.staleness == min(lateness, 2**31 - 1)
    assert after.stale_count == int(min(lateness, 2**31 - 1) > max_staleness)


@functools.partial(jax.jit, static_argnums=2)
def pushed(state, local_step, max_staleness):
    tx = gx.drop_stale(optax.identity(), max_staleness)
    return tx.update(1.0, state, local_step=local_step)[1]


def test_an_injected_limit_may_be_infinite():
    tx = optax.inject_hyperparams(gx.drop_stale)(optax.sgd(0.1), float("inf"))
    state = tx.init(PARAMS)
    assert state.hyperparams["max_staleness"].dtype == jnp.float32
    _, state = jax.jit(tx.update)(GRADS, state, PARAMS, local_step=0)
    assert gx.global_step(state) == 1


def test_wide_counts_saturate():
    with jax.enable_x64(True):
        state = gx.drop_stale(optax.identity(), 0).init(1.0)
        ahead = pushed(state, jnp.int64(2**32), 0)
        assert (ahead.staleness, ahead.stale_count) == (-(2**31) + 1, 0)
        late = pushed(state, jnp.int64(-(2**32)), 0)
        assert (late.staleness, late.stale_count) == (2**31 - 1, 1)


def test_a_parameter_called_global_step_is_no_counter():
    params = {"global_step": jnp.float32(5), "stale_count": jnp.float32(7)}
    state = gx.drop_stale(optax.adam(0.1), 0).init(params)
    assert gx.global_step(state) == 0
    assert gx.global_step(state).dtype == jnp.int32
    for find in (gx.global_step, gx.staleness_fraction):
        with pytest.raises(
            ValueError, match=r"wrap the transformation in .*drop_stale"
        ):
            find(optax.adam(0.1).init(params))


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        (lambda step: "3", TypeError, "must be a real scalar, got '3'"),
        (lambda step: -1, ValueError, r"must be in \[0, inf\], got -1"),
        (lambda step: np.nan, ValueError, r"must be in \[0, inf\], got nan"),
        (lambda step: 1 + 0j, TypeError, r"must be a real scalar, got \(1\+0j\)"),
    ],
)
def test_a_schedule_that_gives_no_threshold(schedule, error, message):
    tx = gx.drop_stale(optax.sgd(0.1), schedule)
    with pytest.raises(error, match=r"^max_staleness\(global_step\) " + message):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=0)


def test_a_traced_nan_threshold_drops_every_late_push():
    tx = gx.drop_stale(optax.sgd(0.1), lambda step: jnp.nan * jnp.sqrt(step))
    state = tx.init(PARAMS)._replace(global_step=jnp.int32(1))
    _, state = jax.jit(tx.update)(GRADS, state, PARAMS, local_step=0)
    assert (state.global_step, state.stale_count) == (1, 1)


def test_integers_of_a_schedule_are_compared_exactly():
    """In float32 both would be 2²⁴."""
    tx = gx.drop_stale(optax.identity(), lambda step: jnp.int32(2**24))
    state = tx.init(PARAMS)._replace(global_step=jnp.int32(2**24 + 1))
    for local_step, stale in ((1, 0), (0, 1)):
        _, after = jax.jit(tx.update)(GRADS, state, PARAMS, local_step=local_step)
        assert after.stale_count == stale


def test_a_schedule_sees_accepted_updates_alone():
    seen = []

    def schedule(step):
        jax.debug.callback(lambda k: seen.append(int(k)), step)
        return 0

    tx = gx.drop_stale(optax.sgd(0.1), schedule)
    state = tx.init(PARAMS)
    for local_step in (0, 0, 1, 0):  # accepted, dropped, accepted, dropped
        _, state = tx.update(GRADS, state, PARAMS, local_step=local_step)
    jax.effects_barrier()
    assert seen == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "limit",
    [
        2**100,
        10**400,
        2**31,
        np.uint64(2**63),
        np.float32(np.inf),
        jnp.int4(7),
        jnp.uint4(7),
    ],
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_threshold_of_any_size_and_width(limit, scheduled):
    tx = gx.drop_stale(optax.sgd(1.0), (lambda _: limit) if scheduled else limit)
    state = tx.init(PARAMS)._replace(global_step=jnp.int32(7))
    for step in (tx.update, jax.jit(tx.update)):
        for local_step in (0, jnp.int4(0)):
            _, after = step(GRADS, state, PARAMS, local_step=local_step)
            assert (after.global_step, after.stale_count) == (8, 0)
    if isinstance(limit, jax.Array):
        late = state._replace(global_step=jnp.int32(8))
        _, after = tx.update(GRADS, late, PARAMS, local_step=0)
        assert after.stale_count == 1


@pytest.mark.parametrize(("published", "wanted"), [("global_step", 6), ("own", 1)])
def test_a_trainers_own_counter_is_no_local_step(published, wanted):
    """It counts dropped pushes, too. Each gradient comes two pushes late."""
    tx = gx.drop_stale(optax.sgd(0.1), max_staleness=1)
    params, seen, local_steps = jnp.ones(3), [0, 0, 0], []
    state = tx.init(params)
    for update in range(20):
        local_steps.append(seen.pop(0))
        _, state = tx.update(params, state, params, local_step=local_steps[-1])
        known = int(gx.global_step(state))
        seen.append(known if published == "global_step" else update + 1)
    # The rule itself, with numbers of Python.
    global_step = dropped = 0
    for local_step in local_steps:
        late = global_step - local_step > 1
        dropped, global_step = dropped + late, global_step + (not late)
    assert (state.global_step, state.stale_count) == (global_step, dropped)
    assert dropped == wanted
