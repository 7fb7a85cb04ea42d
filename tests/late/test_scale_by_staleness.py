"""Links for late gradients: any weight by staleness, and compensate_delay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

# For JAX, and in NumPy.
WEIGHTS = {
    "hinge": (
        lambda s: jnp.where(s <= 4, 1.0, 1 / (10 * (s - 4) + 1)),
        lambda s: 1.0 if s <= 4 else 1 / (10 * (s - 4) + 1),
    ),
    "polynomial": (lambda s: 1 / jnp.sqrt(1 + s), lambda s: (1 + s) ** -0.5),
    "none": (lambda s: 1, lambda s: 1),
}


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("hinge", "float32"),
        ("hinge", "complex64"),
        ("polynomial", "float64"),
        ("polynomial", "bfloat16"),
        ("none", "float32"),
    ],
)
def test_each_gradient_times_its_weight(name, dtype):
    weight, expected = WEIGHTS[name]
    with jax.enable_x64(dtype == "float64"):
        grads = {"w": jnp.asarray([1.5, -3.0], dtype), "b": None}
        tx = gx.scale_by_staleness(weight=weight)
        update = jax.jit(lambda staleness: tx.update(grads, (), staleness=staleness)[0])
        for staleness in (*range(8), 1000):
            got = update(jnp.int32(staleness))
            assert got["w"].dtype == dtype
            assert got["b"] is None
            wide = np.asarray(got["w"]).astype(np.complex128)
            wanted = expected(staleness) * np.array([1.5, -3.0])
            rtol = 4e-3 if dtype == "bfloat16" else 1e-6
            np.testing.assert_allclose(wide, wanted, rtol=rtol, atol=1e-15)


def test_a_power_in_double_precision():
    with jax.enable_x64(True):
        tx = gx.scale_by_staleness(power=1.0)
        updates, _ = tx.update(jnp.float64(1), tx.init(None), staleness=3)
        assert updates == np.float64(1) / 3


def test_a_gradient_ahead_of_its_time_is_not_late():
    seen = []
    tx = gx.scale_by_staleness(weight=lambda s: seen.append(s) or 0.5)
    updates, _ = tx.update(jnp.ones(2), (), staleness=-3)
    assert seen == [0]
    assert seen[0].dtype == jnp.int32
    assert updates.tolist() == [0.5, 0.5]


def test_inside_a_gate_it_weighs_by_how_late_the_push_is():
    link = gx.scale_by_staleness(weight=lambda s: jnp.exp2(-s.astype(jnp.float32)))
    tx = gx.drop_stale(optax.chain(link, optax.sgd(1.0)), 3)
    params, steps = jnp.float32(0), []
    state = tx.init(params)
    for _ in range(5):
        before = params
        params, state = gx.apply_gradients(
            tx, jnp.float32(1), state, params, local_step=0
        )
        steps.append(float(before - params))
    assert steps == [1.0, 0.5, 0.25, 0.125, 0.0]


def scale(weight, staleness=1):
    tx = gx.scale_by_staleness(weight=weight)
    return tx.update(jnp.ones(2), (), staleness=staleness)


TREE = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def compensate(params=TREE, **extra):
    return gx.compensate_delay().update(TREE, optax.EmptyState(), params, **extra)


ERRORS = [
    (lambda: scale(0.5), TypeError,
     r"^weight must be a function of the staleness.*got 0\.5"),
    (lambda: scale(lambda s: "1"), TypeError,
     r"^weight\(staleness\) must be a real scalar"),
    (lambda: scale(lambda s: jnp.ones(2)), TypeError,
     r"^weight\(staleness\) must be a real scalar"),
    (lambda: scale(lambda s: -1.0), ValueError,
     r"^weight\(staleness\) must be in \[0, inf\)"),
    (lambda: scale(lambda s: np.nan), ValueError,
     r"^weight\(staleness\) must be in \[0, inf\)"),
    (lambda: scale(None, 1.5), TypeError, "^staleness must be an integer scalar"),
    (lambda: scale(None, None), TypeError,
     "scale_by_staleness needs staleness: put it inside drop_stale"),
    (lambda: optax.inject_hyperparams(gx.scale_by_staleness)(
        weight=lambda s: 1 / (1 + s)).init(jnp.ones(2)), TypeError,
     "inject_hyperparams name it in static_args"),
    (compensate, TypeError, "needs worker_params"),
    (lambda: compensate(None), ValueError, "compensate_delay needs params"),
    (lambda: compensate(worker_params={"w": TREE["w"]}), TypeError,
     r"updates and worker_params differ at \['b'\]"),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(("control", "distance"), [(0.0, 1.0), (0.04, 0.0)])
@pytest.mark.parametrize("grad", [-1e20, 1e20 + 1e20j])
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
