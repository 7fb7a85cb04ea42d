"""The accumulator: what is added, what is dropped, when inner acts and on what."""

import functools

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


@functools.cache
def step_of(num_required, reduction):
    tx = gx.conditional_accumulator(optax.sgd(0.5), num_required, reduction=reduction)
    return tx, jax.jit(functools.partial(gx.apply_gradients, tx))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    num_required=st.integers(1, 4),
    reduction=st.sampled_from(["mean", "sum"]),
    pushes=st.lists(
        st.tuples(st.floats(-2, 2, width=16), st.integers(-1, 4)), max_size=14
    ),
)
def test_equals_a_plain_loop(num_required, reduction, pushes):
    tx, step = step_of(num_required, reduction)
    param = jnp.float32(1.0)
    state = tx.init(param)
    named = [({"w": np.float64(grad)}, local_step) for grad, local_step in pushes]
    expected, wanted = oracles.sums(named, num_required, reduction), 1.0
    for (grad, local_step), played in zip(pushes, expected, strict=True):
        acts, *counts, held, stale = played
        param, state = step(
            jnp.float32(grad), state, param, local_step=jnp.int32(local_step)
        )
        wanted -= 0.5 * acts["w"] if acts else 0
        np.testing.assert_allclose(param, wanted, rtol=1e-5, atol=1e-5)
        assert state[:3] == (*counts, len(held), stale)
        total = sum(g["w"] for g in held)
        np.testing.assert_allclose(state.accumulated, total, rtol=1e-5, atol=1e-6)


def test_an_accepted_nan_spoils_its_own_round_alone():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    params = jnp.zeros(2)
    state, counts = tx.init(params), []
    for grad, local_step in ((jnp.nan, 0), (1.0, 0), (1.0, 1), (3.0, 1)):
        updates, state = tx.update(
            jnp.full(2, grad), state, params, local_step=local_step
        )
        counts.append(int(state.num_accumulated))
        assert np.isnan(updates).all() == (len(counts) == 2)
    assert counts == [1, 0, 1, 0]
    assert updates.tolist() == [-2.0, -2.0]
    assert state.accumulated.tolist() == [0.0, 0.0]


def test_a_sum_of_half_precision_gradients_is_kept_in_float32():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 1000)
    params = jnp.zeros(3, jnp.bfloat16)
    grad = jnp.full(3, 0.01, jnp.bfloat16)

    def body(state, _):
        updates, state = tx.update(grad, state, params, local_step=0)
        return state, updates

    state, updates = jax.lax.scan(body, tx.init(params), length=1000)
    assert state.accumulated.dtype == jnp.float32
    assert jnp.all(updates[:-1] == 0)
    np.testing.assert_array_equal(updates[-1], -grad)


def test_a_number_required_that_shrinks_takes_all_there_are():
    """As in TensorFlow, the mean is over the pushes held, not the number required."""

    @jax.jit
    def push(grad, state, param, required, local_step=0):
        tx = gx.conditional_accumulator(optax.sgd(1.0), required)
        return gx.apply_gradients(tx, grad, state, param, local_step=local_step)

    param = jnp.float32(0.0)
    state = gx.conditional_accumulator(optax.sgd(1.0), 9).init(param)
    for grad, required in ((1.0, 9), (2.0, 9)):
        param, state = push(jnp.float32(grad), state, param, jnp.int32(required))
    # A dropped push completes no step.
    param, state = push(jnp.float32(6.0), state, param, jnp.int32(2), jnp.int32(-1))
    assert (param, state.num_accumulated, state.stale_count) == (0.0, 2, 1)
    param, state = push(jnp.float32(6.0), state, param, jnp.int32(2))
    assert param == -3.0
    assert state.num_accumulated == 0


@pytest.mark.parametrize("how", ["update", "apply"])
def test_a_push_without_gradient_adds_nothing_and_loses_nothing(how):
    """It pushes 10, None, 100 and 100. By hand, the means are 5 and 100."""
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    params = {"w": jnp.float32(0), "b": jnp.float32(0), "ids": jnp.arange(3)}
    state, trace = tx.init(params), []
    for grad, local_step in ((10.0, 0), (None, 0), (100.0, 1), (100.0, 1)):
        w = None if grad is None else jnp.float32(grad)
        grads = {"w": w, "b": jnp.float32(1), "ids": None}
        if how == "apply":
            params, state = gx.apply_gradients(
                tx, grads, state, params, local_step=local_step
            )
        else:
            updates, state = tx.update(grads, state, params, local_step=local_step)
            params = gx.apply_updates(params, updates)
        trace.append((float(params["w"]), float(state.accumulated["w"])))
    assert trace == [(0, 10), (-5, 0), (-5, 100), (-105, 0)]
    np.testing.assert_array_equal(params["ids"], np.arange(3))


def test_frozen_leaves_stay_under_weight_decay(standard_promotion):
    tx = gx.conditional_accumulator(optax.adamw(0.1, weight_decay=0.5), 2)
    step = gx.minimize(
        lambda p: jnp.sum(p["w"] * p["frozen"]),
        tx,
        trainable={"w": True, "frozen": False},
    )
    params = {"w": jnp.ones(2), "frozen": jnp.full(2, 3.0)}
    state = tx.init(params)
    for local_step in (0, 0):
        params, state, _ = step(params, state, local_step=local_step)
    np.testing.assert_array_equal(params["frozen"], [3.0, 3.0])
    # Adam's first step is the rate; the decay adds 0.1·0.5.
    np.testing.assert_allclose(params["w"], 1 - 0.1 - 0.05, rtol=1e-5)


def test_a_mean_in_double_precision():
    with jax.enable_x64(True):
        tx = gx.conditional_accumulator(optax.sgd(1.0), 10)
        params = jnp.zeros((), "float64")
        state, update = tx.init(params), jax.jit(tx.update)
        for grad in range(10):
            updates, state = update(jnp.float64(grad), state, params, local_step=0)
        assert updates == -4.5
        late = gx.scale_by_staleness(power=1.0)
        updates, _ = late.update(jnp.float64(1), late.init(None), staleness=3)
        assert updates == np.float64(1) / 3


@pytest.mark.slow
def test_the_mean_equals_that_of_multi_steps(standard_promotion):
    """For every mix of dtypes the sum is the one that optax makes."""
    rng = np.random.default_rng(0)
    for param, grad in (("bfloat16", "float32"), ("float32", "float16")):
        params = jnp.asarray(rng.standard_normal(5), param)
        pushes = [jnp.asarray(rng.standard_normal(5), grad) for _ in range(6)]
        tx = gx.conditional_accumulator(optax.adam(0.1), 3)
        multi = optax.MultiSteps(optax.adam(0.1), 3)
        state, expected_state = tx.init(params), multi.init(params)
        update, expect = jax.jit(tx.update), jax.jit(multi.update)
        for push in pushes:
            updates, state = update(
                push, state, params, local_step=gx.global_step(state)
            )
            expected, expected_state = expect(push, expected_state, params)
            np.testing.assert_allclose(
                jnp.float32(updates), jnp.float32(expected), rtol=2e-2, atol=1e-4
            )


@pytest.mark.parametrize(("control", "distance"), [(0.0, 1.0), (0.04, 0.0)])
@pytest.mark.parametrize("grad", [1e20, -1e20, 1e20 + 1e20j])
def test_compensation_of_large_gradients_by_nothing_is_nothing(grad, control, distance):
    grad = jnp.asarray([grad], jnp.complex64 if isinstance(grad, complex) else None)
    tx = gx.compensate_delay(control)
    updates, _ = tx.update(
        grad, tx.init(None), jnp.ones(1), worker_params=jnp.ones(1) - distance
    )
    np.testing.assert_array_equal(updates, grad)


def test_compensation_is_newton_on_a_parabola():
    """Where g² is the curvature, the corrected gradient is that of today's params."""
    tx = gx.compensate_delay(1.0)
    today, then = jnp.array([3.0]), jnp.array([1.0])  # loss = w²/2: g = w, g² = 1 at 1
    updates, _ = tx.update(then, tx.init(today), today, worker_params=then)
    assert updates == today


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gx.conditional_accumulator(optax.sgd(1.0), 0), ValueError,
         r"num_required must be in \[1, 2147483647\], got 0"),
        (lambda: gx.conditional_accumulator(optax.sgd(1.0), 1.5), TypeError,
         "num_required must be an integer scalar, got 1.5"),
        (lambda: gx.conditional_accumulator(optax.sgd(1.0), 2, reduction="max"),
         ValueError, "reduction must be one of 'mean', 'sum', 'row_mean', got 'max'"),
        (lambda: gx.scale_by_staleness(-1.0), ValueError,
         r"power must be in \[0, inf\)"),
        (lambda: gx.compensate_delay(-0.1), ValueError,
         r"variance_control must be in \[0, inf\)"),
        (lambda: _update(gx.conditional_accumulator(optax.sgd(1.0), 2)), TypeError,
         r"conditional_accumulator needs local_step: pass update\("),
        (lambda: _update(gx.scale_by_staleness()), TypeError,
         "scale_by_staleness needs staleness: put it inside drop_stale"),
        (lambda: _update(gx.compensate_delay()), TypeError, "needs worker_params"),
        (lambda: gx.compensate_delay().update(GRADS, optax.EmptyState()), ValueError,
         "compensate_delay needs params"),
        (lambda: _update(gx.compensate_delay(), worker_params={"w": GRADS["w"]}),
         TypeError, r"updates and worker_params differ at \['b'\]"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def _update(tx, **extra):
    return tx.update(GRADS, tx.init(PARAMS), PARAMS, **extra)


def test_a_sum_of_negative_gradients_reaches_its_leaf_as_well():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    params = {"w": jnp.zeros(2), "b": jnp.zeros(2)}
    state, less = tx.init(params), jnp.full(2, -1.0)
    for grads in ({"w": less, "b": less}, {"w": less, "b": None}):
        params, state = gx.apply_gradients(tx, grads, state, params, local_step=0)
    assert (params["w"].tolist(), params["b"].tolist()) == ([1.0] * 2, [0.5] * 2)
