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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_update_and_the_whole_step_are_the_same(method):
    tx, step = step_of(3, method)
    params = other = jnp.zeros((2, 3))
    state, other_state = tx.init(params), tx.init(params)
    for t, worker in enumerate((0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 1)):
        grad, seen = jnp.float32(value(t)), gx.global_step(other_state)
        updates, other_state = tx.update(
            grad, other_state, other, worker=worker, local_step=seen
        )
        other = optax.apply_updates(other, updates)
        params, state = step(params, state, grad, np.int32(worker), seen)
    chex.assert_trees_all_close((params, state), (other, other_state), rtol=1e-6)
    assert state.global_step > 2


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


@pytest.mark.parametrize("method", ["all", "ringleader"])
def test_a_row_forgets_its_old_gradient(method):
    """Not even if it was not finite."""
    tx, step = step_of(2, method)
    params = jnp.zeros((2, 3))
    state = tx.init(params)
    bad, good = jnp.full((2, 3), jnp.inf), jnp.ones((2, 3))
    order = {"all": "01", "ringleader": "010"}[method]
    for worker in order[:-1]:
        params, state = step(
            params, state, bad, np.int32(int(worker)), state.global_step + 0
        )
    params = jnp.zeros((2, 3))
    params, state = step(
        params, state, bad, np.int32(int(order[-1])), state.global_step + 0
    )
    params = jnp.zeros((2, 3))
    for worker in (0, 1):
        params, state = step(
            params, state, good, np.int32(worker), state.global_step + 0
        )
    np.testing.assert_array_equal(params, -0.5 * np.ones((2, 3)))


def test_the_mean_of_the_newest_pushes_keeps_nan_and_inf():
    """Each push moves it, and it is never computed anew."""
    tx, step = step_of(2, "latest")
    params = jnp.zeros((2, 3))
    state = tx.init(params)
    for worker in (0, 1):
        grads = jnp.full((2, 3), jnp.inf)
        params, state = step(params, state, grads, np.int32(worker), np.int32(0))
    assert not params.any()  # No step yet.
    for worker in (0, 1, 0):
        grads = jnp.ones((2, 3))
        params, state = step(params, state, grads, np.int32(worker), np.int32(0))
        assert np.isnan(params).all()
    assert state.global_step == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("named", [False, True], ids=["bare", "set_mesh"])
def test_on_a_mesh_each_row_lies_as_its_parameter(method, kind, named):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    lay = NamedSharding(mesh, P("x"))
    tx, step = step_of(2, method)
    params = jax.device_put(jnp.zeros((8, 3)), lay)
    if named:
        with jax.set_mesh(mesh):
            played(tx, step, params, lay)
    else:
        played(tx, step, params, lay)


def played(tx, step, params, lay):
    state = tx.init(params)
    plain, plain_state = jnp.zeros((8, 3)), None
    plain_state = tx.init(plain)
    for t, worker in enumerate((0, 1, 1, 0, 0, 1)):
        grad = np.random.default_rng(t).standard_normal((8, 3)).astype("float32")
        at = np.int32(worker), np.int32(plain_state.global_step)
        plain, plain_state = step(plain, plain_state, jnp.asarray(grad), *at)
        params, state = step(params, state, jax.device_put(grad, lay), *at)
        rows = NamedSharding(lay.mesh, P(None, "x"))
        assert state.table.sharding.is_equivalent_to(rows, 3)
    np.testing.assert_allclose(params, plain, rtol=1e-6, atol=1e-7)
    assert plain_state.global_step > 0


@pytest.mark.slow
def test_a_leaf_without_gradient_adds_nothing_to_its_row():
    tx = gx.worker_mean(optax.sgd(1.0), 2, method="all")
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    state, one = tx.init(params), jnp.ones(2)
    for worker, grads in (
        (0, {"a": one, "b": 4 * one}),
        (0, {"a": one, "b": None}),
        (1, {"a": one, "b": one}),
    ):
        params, state = gx.apply_gradients(
            tx, grads, state, params, worker=worker, local_step=0
        )
    np.testing.assert_array_equal(params["a"], -np.ones(2))
    np.testing.assert_array_equal(params["b"], -np.full(2, (4 + 1) / 2))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gx.worker_mean(INNER, 0, method="all"), ValueError,
         r"num_workers must be in \[1, 2147483647\], got 0"),
        (lambda: gx.worker_mean(INNER, 1.5, method="all"), TypeError,
         "num_workers must be an integer scalar, got 1.5"),
        (lambda: gx.worker_mean(INNER, 2, method="mean"), ValueError,
         "method must be one of 'all', 'latest', 'ringleader', got 'mean'"),
        (lambda: gx.worker_mean(2, 2, method="all"), TypeError,
         "inner must be an optax.GradientTransformation"),
        (lambda: pushed(local_step=0), TypeError, "worker_mean needs worker: pass"),
        (lambda: pushed(worker=0), TypeError, "worker_mean needs local_step: pass"),
        (lambda: pushed(worker=2, local_step=0), ValueError,
         r"worker must be in \[0, 2\), got 2"),
        (lambda: pushed(worker=0.5, local_step=0), TypeError,
         "worker must be an integer scalar"),
        (lambda: pushed(jnp.ones(3), worker=0, local_step=0), TypeError,
         "updates and table differ at the root"),
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


@pytest.mark.parametrize("method", METHODS)
def test_through_a_server(method):
    tx = gx.worker_mean(optax.sgd(1.0), 2, method=method)
    server = gx.ParameterServer(jnp.zeros(2), tx)
    steps = []
    for worker in (0, 1, 0, 1):
        _, seen = server.pull()
        result = server.push(jnp.ones(2), seen, worker=worker)
        assert result.applied
        steps.append(result.global_step)
    assert steps == {
        "all": [0, 1, 1, 2], "latest": [0, 0, 1, 2], "ringleader": [0, 1, 2, 2]
    }[method]  # fmt: skip
    with pytest.raises(ValueError, match=r"worker must be in \[0, 2\), got 7"):
        server.push(jnp.ones(2), server.pull()[1], worker=7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["latest", "ringleader"])
def test_behind_drop_stale_a_late_push_reaches_no_table(method):
    """The oracle sees only the pushes that are not too late."""
    tx = gx.drop_stale(gx.worker_mean(INNER, 2, method=method), max_staleness=1)
    params, expected = jnp.zeros((2, 3)), np.zeros((2, 3))
    state, kept, accepted = tx.init(params), [], 0
    for t, (worker, late) in enumerate(
        [(0, 0), (1, 1), (0, 2), (1, 0), (0, 3), (0, 0)]
    ):
        grad = value(t) if late < 2 else np.full((2, 3), np.nan)
        step = max(0, accepted - late)
        too_late = accepted - step > 1
        if not too_late:
            kept.append((grad, worker, 0))
            accepted += 1
            *_, (acts, steps, _) = oracles.worker_mean(kept, 2, method)
            expected = expected - (0 if acts is None else 0.5 * acts)
        params, state = gx.apply_gradients(
            tx, jnp.float32(grad), state, params, worker=worker, local_step=step
        )
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
        assert state.global_step == accepted
        assert state.inner_state.global_step == steps
    assert state.stale_count == 2


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
