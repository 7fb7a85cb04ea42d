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


# How late a push may be, and its weight: for JAX, and in NumPy.
LATE = {
    "fresh": ({}, {}),
    "one": ({"max_staleness": 1}, {"max_staleness": 1}),
    "inf": ({"max_staleness": jnp.inf}, {"max_staleness": np.inf}),
    "schedule": ({"max_staleness": jnp.sqrt}, {"max_staleness": np.sqrt}),
    "fedbuff": (
        {"max_staleness": jnp.inf, "weight": lambda s: 1 / jnp.sqrt(1 + s)},
        {"max_staleness": np.inf, "weight": lambda s: (1 + s) ** -0.5},
    ),
    "linear": (  # It is below 0 for a push that is dropped.
        {"max_staleness": 2, "weight": lambda s: 1 - s / 3},
        {"max_staleness": 2, "weight": lambda s: 1 - s / 3},
    ),
}


@functools.cache
def step_of(num_required, reduction, late):
    tx = gx.conditional_accumulator(
        optax.sgd(0.5), num_required, reduction=reduction, **LATE[late][0]
    )
    return tx, jax.jit(functools.partial(gx.apply_gradients, tx))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    num_required=st.integers(1, 4),
    reduction=st.sampled_from(["mean", "sum"]),
    late=st.sampled_from([*LATE]),
    pushes=st.lists(
        st.tuples(st.floats(-2, 2, width=16), st.integers(-1, 4)), max_size=14
    ),
)
def test_equals_a_plain_loop(num_required, reduction, late, pushes):
    tx, step = step_of(num_required, reduction, late)
    param = jnp.float32(1.0)
    state = tx.init(param)
    named = [({"w": np.float64(grad)}, local_step) for grad, local_step in pushes]
    expected = oracles.sums(named, num_required, reduction, **LATE[late][1])
    wanted = 1.0
    for (grad, local_step), played in zip(pushes, expected, strict=True):
        acts, *counts, held, stale = played
        param, state = step(
            jnp.float32(grad), state, param, local_step=jnp.int32(local_step)
        )
        wanted -= 0.5 * acts["w"] if acts else 0
        np.testing.assert_allclose(param, wanted, rtol=1e-5, atol=1e-5)
        assert state[:3] == (*counts, len(held), stale)
        if held:  # After a step, nothing clears the sum before the next push.
            total = sum(g["w"] for g in held)
            np.testing.assert_allclose(state.accumulated, total, rtol=1e-5, atol=1e-6)


def pushed(tx, pushes, params, *, jit=True):
    """The state and the parameters after these pushes, ``(grads, local_step)``."""
    step = functools.partial(gx.apply_gradients, tx)
    step = jax.jit(step) if jit else step
    state = tx.init(params)
    for grads, local_step in pushes:
        params, state = step(grads, state, params, local_step=jnp.int32(local_step))
    return params, state


@pytest.mark.parametrize("jit", [True, False])
def test_a_push_that_is_too_late_asks_for_no_weight_and_reaches_nothing(jit):
    tx = gx.conditional_accumulator(
        optax.sgd(1.0), 1, max_staleness=1, weight=lambda s: 1 / (2 - s)
    )
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    fresh = [(jax.tree.map(jnp.ones_like, params), k) for k in range(2)]
    params_before, before = pushed(tx, fresh, params, jit=jit)
    wild = {"w": jnp.array([jnp.nan, 1.0, jnp.inf]), "b": jnp.float32(1)}
    after = pushed(tx, [*fresh, (wild, 0)], params, jit=jit)
    assert after[1].stale_count == before.stale_count + 1 == 1
    expected = params_before, before._replace(stale_count=after[1].stale_count)
    jax.tree.map(np.testing.assert_array_equal, after, expected)


def test_the_weight_is_not_rounded_to_half_precision():
    """The sum takes weight times gradient in its own precision, float32."""
    tx = gx.conditional_accumulator(
        optax.identity(), 3, max_staleness=4, weight=lambda s: 1 + s / 1024
    )
    params, grad = jnp.zeros(2, jnp.bfloat16), jnp.full(2, 1.0, jnp.bfloat16)
    state = tx.init(params)._replace(global_step=jnp.int32(4))
    for local_step in (3, 1):
        _, state = tx.update(grad, state, params, local_step=local_step)
    np.testing.assert_array_equal(state.accumulated, np.float32(2 + 4 / 1024))


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


@pytest.mark.parametrize(("control", "distance"), [(0.0, 1.0), (0.04, 0.0)])
@pytest.mark.parametrize("grad", [1e20, -1e20, 1e20 + 1e20j])
def test_compensation_of_large_gradients_by_nothing_is_nothing(grad, control, distance):
    grad = jnp.asarray([grad], jnp.complex64 if isinstance(grad, complex) else None)
    tx, params = gx.compensate_delay(control), jnp.ones_like(grad)
    updates, _ = tx.update(grad, tx.init(None), params, worker_params=params - distance)
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
        (lambda: gx.conditional_accumulator(optax.sgd(1.0), 2, reduction="max"),
         ValueError, "reduction must be one of 'mean', 'sum', 'row_mean', got 'max'"),
        (lambda: gx.conditional_accumulator(optax.sgd(1.0), 2, weight=0.5),
         TypeError, r"weight must be a function of the staleness.*, got 0\.5"),
        (lambda: _update(gx.conditional_accumulator(
            optax.sgd(1.0), 2, weight=lambda s: -1), local_step=0),
         ValueError, r"weight\(staleness\) must be in \[0, inf\), got -1"),
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
