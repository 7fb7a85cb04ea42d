"""The mean over workers, against lists of everything that each worker has pushed."""

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

METHODS = ["all", "latest", "ringleader"]
INNER = optax.sgd(0.5)


def value(number):
    return np.random.default_rng(number).standard_normal((2, 3))


@functools.cache
def step_of(n, method):
    tx = gx.worker_mean(INNER, n, method=method)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads, worker, local_step):
        return gx.apply_gradients(
            tx, grads, state, params, worker=worker, local_step=local_step
        )

    return tx, step


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    n=st.integers(1, 4),
    method=st.sampled_from(METHODS),
    pushes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30),
)
def test_equals_lists_of_all_pushes(n, method, pushes):
    tx, step = step_of(n, method)
    params = jnp.zeros((2, 3))
    state, expected, before = tx.init(params), np.zeros((2, 3)), 0
    # How late each push is, counted from the oracle's step before it.
    history = [(value(t), worker % n, 0) for t, (worker, _) in enumerate(pushes)]
    for t, (_, late) in enumerate(pushes):
        history[t] = (*history[t][:2], max(0, before - late))
        *_, (acts, global_step, stale) = oracles.worker_mean(
            history[: t + 1], n, method
        )
        before = global_step
        grad, worker, local_step = history[t]
        params, state = step(
            params, state, jnp.float32(grad), np.int32(worker), np.int32(local_step)
        )
        if acts is not None:
            expected = expected - 0.5 * acts
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-5)
        assert (state.global_step, state.stale_count) == (global_step, stale)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_worker_that_does_not_exist_reaches_nothing(method, poison):
    tx, step = step_of(2, method)
    params = jnp.ones((2, 3))
    state = tx.init(params)
    params, state = step(params, state, jnp.ones((2, 3)), np.int32(0), np.int32(0))
    kept = jax.tree.map(np.array, (params, state))
    for worker in (2, -1):
        bad = jnp.full((2, 3), poison)
        params, state = step(params, state, bad, np.int32(worker), np.int32(0))
    assert state.stale_count == 2
    chex.assert_trees_all_equal((params, state._replace(stale_count=0)), kept)


def played(step, state, number, workers):
    """These workers push this number, none of them late; parameters begin at 0."""
    params, grads = jnp.zeros((2, 3)), jnp.full((2, 3), number)
    for worker in workers:
        seen = state.global_step + 0  # The step donates the state.
        params, state = step(params, state, grads, np.int32(worker), seen)
    return params, state


@pytest.mark.parametrize("method", ["all", "ringleader"])
def test_a_row_forgets_its_old_gradient(method):
    """Not even if it was not finite."""
    tx, step = step_of(2, method)
    order = {"all": (0, 1), "ringleader": (0, 1, 0)}[method]
    _, state = played(step, tx.init(jnp.zeros((2, 3))), jnp.inf, order)
    params, _ = played(step, state, 1.0, (0, 1))
    np.testing.assert_array_equal(params, -0.5 * np.ones((2, 3)))


def test_the_mean_of_the_newest_pushes_keeps_nan_and_inf():
    """Each push moves it, and it is never computed anew."""
    tx, step = step_of(2, "latest")
    params, state = played(step, tx.init(jnp.zeros((2, 3))), jnp.inf, (0, 1))
    assert not params.any()  # No step yet.
    for worker in (0, 1, 0):
        params, state = played(step, state, 1.0, (worker,))
        assert np.isnan(params).all()
    assert state.global_step == 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gx.worker_mean(INNER, 2, method="mean"), ValueError,
         "method must be one of 'all', 'latest', 'ringleader', got 'mean'"),
        (lambda: pushed(local_step=0), TypeError, "worker_mean needs worker: pass"),
        (lambda: pushed(worker=0), TypeError, "worker_mean needs local_step: pass"),
        (lambda: pushed(worker=2, local_step=0), ValueError,
         r"worker must be in \[0, 2\), got 2"),
        (lambda: pushed(worker=0.5, local_step=0), TypeError,
         "worker must be an integer scalar"),
        (lambda: pushed(jnp.ones(3), worker=0, local_step=0), TypeError,
         "updates and a row of the table differ at the root"),
        (lambda: pushed(gx.IndexedSlices([0], jnp.ones(1), (2,)), worker=0,
                        local_step=0), TypeError, "worker_mean changes every row"),
        (lambda: jax.jit(lambda n: gx.worker_mean(INNER, n, method="all"))(2),
         TypeError, "num_workers is a shape.*static_args"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match="^" + message):
        make()


def pushed(grads=None, **extra):
    tx = gx.worker_mean(INNER, 2, method="all")
    params = jnp.zeros(2)
    return tx.update(params if grads is None else grads, tx.init(params), **extra)


def test_a_mean_in_double_precision():
    """In float32 a third would be 1e-8 off."""
    with jax.enable_x64(True):
        tx = gx.worker_mean(optax.sgd(1.0), 2, method="all")
        params = jnp.zeros(())
        state = tx.init(params)
        for worker, grad in ((0, 0.1), (0, 0.2), (0, 0.4), (1, 0.0)):
            params, state = gx.apply_gradients(
                tx, jnp.array(grad), state, params, worker=worker, local_step=0
            )
        np.testing.assert_allclose(params, -(0.1 + 0.2 + 0.4) / 3 / 2, rtol=1e-15)
