"""The gate: what gets through, what reaches nothing, and the global step."""

import copy
import functools
import pickle
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._gates.gate import Decision, Gate, gate_of
from tests import in_numpy, oracles

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
GRADS = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, -1.0)}


# Each schedule in NumPy, and for JAX.
LIMITS = {
    "one": (1, 1),
    "sqrt": (np.sqrt, jnp.sqrt),
    "fractional": (lambda step: 0.4 * step, lambda step: 0.4 * jnp.float32(step)),
    "never, then all": (
        lambda step: np.inf if step > 2 else 0,
        lambda step: jnp.where(step > 2, jnp.inf, 0),
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", LIMITS)
def test_equals_a_plain_loop(name):
    limit, traced = LIMITS[name]
    tx = gx.drop_stale(optax.sgd(0.5), traced)
    step = in_numpy.jit(functools.partial(gx.apply_gradients, tx))
    rng, params = np.random.default_rng(0), jnp.float32(1.0)
    state = tx.init(params)
    steps = np.sort(rng.integers(-2, 12, 40)) + rng.integers(-3, 3, 40)
    pushes = [*zip(np.float32(rng.standard_normal(40)), steps, strict=True)]
    expected = oracles.drop_stale(1.0, pushes, limit, lambda p, g: p - 0.5 * g)
    for (grad, local_step), played in zip(pushes, expected, strict=True):
        extra = {"local_step": jnp.int32(local_step)}
        params, state = step(jnp.float32(grad), state, params, **extra)
        np.testing.assert_allclose(params, played[0], rtol=1e-5, atol=1e-6)
        assert (state.global_step, state.stale_count) == played[1:]


GATES = {
    "drop_stale": lambda tx: gx.drop_stale(tx, 1),
    "accumulator": lambda tx: gx.conditional_accumulator(tx, 1),
}


@pytest.mark.usefixtures("standard_promotion")  # optax multiplies mixed dtypes.
@pytest.mark.parametrize(
    ("gate", "param", "grad"),
    [
        ("drop_stale", "bfloat16", "float32"),
        ("accumulator", "float32", "bfloat16"),
        ("drop_stale", "bfloat16", "float16"),
        ("accumulator", "bfloat16", "float16"),
    ],
)
def test_a_fresh_push_is_that_of_inner_in_every_mix_of_dtypes(gate, param, grad):
    """Alone, the moments of inner would take another dtype."""
    inner = optax.adamw(0.1)
    tx = GATES[gate](inner)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2)
    params, grads = jnp.array([1.0, -2.0], param), jnp.array([0.3, 0.7], grad)
    state = tx.init(params)
    updates, after = in_numpy.jit(tx.update)(grads, state, params, local_step=0)
    expected, _ = inner.update(grads, inner.init(params), params)
    assert jax.typeof(updates) == jax.typeof(expected)
    close(updates, expected)
    new, whole = gx.apply_gradients(tx, grads, state, params, local_step=0)
    close(new, gx.apply_updates(params, expected))
    for found in (after, whole):
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, state)
    # An update that is wider than the gradient is not rounded.
    third = optax.stateless(
        lambda u, _: jax.tree.map(lambda g: g.astype(jnp.float32) / 3, u)
    )
    tx, grads = GATES[gate](third), jnp.ones(2, jnp.float16)
    updates, _ = tx.update(grads, tx.init(params), params, local_step=0)
    np.testing.assert_array_equal(updates, np.full(2, np.float32(1) / np.float32(3)))
    new, _ = gx.apply_gradients(tx, grads, tx.init(params), params, local_step=0)
    np.testing.assert_array_equal(new, gx.apply_updates(params, updates))


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
    state, update = tx.init(PARAMS), in_numpy.jit(tx.update)
    for local_step in (0, 0, 1, 0):
        _, state = update(GRADS, state, PARAMS, local_step=local_step)
    # Every wrapper sees the same pushes; a second gate around it lets one more through.
    outer = isinstance(state, gx.DropStaleState) and isinstance(
        state.inner_state, gx.DropStaleState
    )
    steps, stale = (3, 1) if outer else (2, 2)
    assert gx.global_step(state) == steps
    np.testing.assert_allclose(gx.staleness_fraction(state), stale / (steps + 1))


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
@pytest.mark.parametrize("local_step", [-(2**32), -(2**31), -1, 2**31 - 1, 2**32])
@pytest.mark.parametrize("max_staleness", [0, 2**31 - 2])
def test_no_step_count_wraps(global_step, local_step, max_staleness):
    state = gx.drop_stale(optax.identity(), 0).init(1.0)
    state = state._replace(global_step=jnp.int32(global_step))
    largest = 2**31 - 1
    late = min(global_step - max(min(local_step, largest), -(2**31)), largest)
    with jax.enable_x64(abs(local_step) == 2**32):
        after = pushed(state, jnp.asarray(local_step, int), max_staleness)
        assert after.staleness == late
        assert after.stale_count == int(late > max_staleness)


@functools.partial(jax.jit, static_argnums=2)
def pushed(state, local_step, max_staleness):
    tx = gx.drop_stale(optax.identity(), max_staleness)
    return tx.update(1.0, state, local_step=local_step)[1]


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


@pytest.mark.every
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


@pytest.mark.parametrize(
    ("schedule", "at", "stale"),
    [
        (lambda step: jnp.nan * jnp.sqrt(step), 1, 1),
        (lambda step: jnp.int32(2**24), 2**24, 0),
        (lambda step: jnp.int32(2**24), 2**24 + 1, 1),  # The same in float32.
    ],
)
def test_a_traced_threshold_at_its_ends(schedule, at, stale):
    """One that is NaN drops each late push."""
    tx = gx.drop_stale(optax.identity(), schedule)
    state = tx.init(PARAMS)._replace(global_step=jnp.int32(at))
    _, state = in_numpy.jit(tx.update)(GRADS, state, PARAMS, local_step=0)
    assert state.stale_count == stale


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
    for step in (tx.update, in_numpy.jit(tx.update)):
        for local_step in (0, jnp.int4(0)):
            _, after = step(GRADS, state, PARAMS, local_step=local_step)
            assert (after.global_step, after.stale_count) == (8, 0)
    if isinstance(limit, jax.Array):
        late = state._replace(global_step=jnp.int32(8))
        _, after = tx.update(GRADS, late, PARAMS, local_step=0)
        assert after.stale_count == 1
