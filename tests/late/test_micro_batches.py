"""Micro-batches of different sizes, the last window, and one sum over devices a step.

The expected numbers are those of the whole batch, in float64 NumPy.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import engines
from tests.late.test_one_reduction import stepped

SIZES = 1, 3, 12  # Tokens of each micro-batch.
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((16, 5)), RNG.standard_normal((16, 2))
PARAMS = {"w": jnp.ones((5, 2)), "none": None, "b": jnp.zeros(2)}


def whole_batch():
    """The gradient of the mean of squares over all 16 rows, in float64."""
    residual = 2 * (X @ np.ones((5, 2)) - Y) / (2 * len(X))
    return {"w": X.T @ residual, "none": None, "b": residual.sum(0)}


def padded():
    """The micro-batches with rows of zeros up to the largest size, and their sizes."""
    ends = np.cumsum(SIZES)
    parts = [(X[e - n : e], Y[e - n : e]) for n, e in zip(SIZES, ends, strict=True)]
    x, y = (
        np.stack([np.resize(p[i], (12, p[i].shape[1])) for p in parts]) for i in (0, 1)
    )
    mask = np.arange(12) < np.array(SIZES)[:, None]
    return jnp.float32(x), jnp.float32(y), jnp.asarray(mask)


def loss_fn(params, x, y, mask):
    """The mean over the rows of a micro-batch."""
    squares = jnp.square(x @ params["w"] + params["b"][None] - y).mean(1)
    return jnp.sum(jnp.where(mask, squares, 0)) / jnp.sum(mask, dtype="float32")


def gradients():
    return [jax.grad(loss_fn)(PARAMS, *batch) for batch in zip(*padded(), strict=True)]


def after(updates):
    """Parameters after a step of sgd(1)."""
    return jax.tree.map(lambda p, u: p - u, PARAMS, updates)


# Ways to push: each trains PARAMS with tx on these gradients and weights.


def loop(tx, grads, weights):
    params, state = PARAMS, tx.init(PARAMS)
    for g, w in zip(grads, weights, strict=True):
        params, state = gx.apply_gradients(tx, g, state, params, weight=w)
    return params


def mapped(tx, grads, weights):
    """Under vmap, beside a run with other weights."""
    both = jnp.stack([jnp.ones(len(weights), int), jnp.asarray(weights)])
    return jax.tree.map(lambda x: x[1], jax.vmap(lambda w: loop(tx, grads, w))(both))


def minimized(tx, grads, weights):
    del grads
    step = gx.minimize(loss_fn, tx, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for batch, w in zip(zip(*padded(), strict=True), weights, strict=True):
        params, state, _ = step(params, state, *batch, weight=w)
    return params


def server(tx, grads, weights):
    held = gx.ParameterServer(PARAMS, tx)
    for g, w in zip(grads, weights, strict=True):
        held.push(g, 0, weight=w)
    return held.pull()[0]


# The contract has optax's wrappers, which pass on any extra argument.
WAYS = {f.__name__: f for f in (loop, mapped, minimized, server)}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("way", WAYS)
def test_weights_give_the_gradient_of_the_whole_batch(way):
    tx = gx.accumulate(optax.sgd(1.0), 3)
    grads, expected = gradients(), after(whole_batch())
    got = WAYS[way](tx, grads, SIZES)
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-6)
    if way == "loop":  # The mean of means is another number.
        other = loop(tx, grads, (1, 1, 1))
        assert max(np.abs(other[k] - expected[k]).max() for k in "wb") > 0.2


@pytest.mark.parametrize("way", [loop, server])
@pytest.mark.parametrize(
    "weights",
    [
        np.array(SIZES, np.uint8),
        np.array(SIZES, np.int64) * 2**33,
        [2**62, 3 * 2**62, 12 * 2**62],
        np.float32(SIZES) * np.float32(2.0**-100),
        np.float64(SIZES) * 1e-3,
        np.float16(SIZES),
    ],
    ids=["uint8", "int64", "huge", "tiny", "float64", "float16"],
)
def test_only_the_proportion_of_weights_matters(way, weights):
    got = way(gx.accumulate(optax.sgd(1.0), 3), gradients(), weights)
    expected = after(whole_batch())
    chex.assert_trees_all_close(got, expected, rtol=1e-7, atol=1e-6)


def pushed(tx, *pushes):
    """The number to which these gradients, with extra arguments, train 0; the state."""
    params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
    for g, extra in pushes:
        params, state = gx.apply_gradients(tx, jnp.float32(g), state, params, **extra)
    return params, state


def test_weights_above_the_integers_of_float32():
    """2²⁴ + 1 tokens are rounded to 2²⁴ in the sum of weights: 6e-8 of it."""
    pushes = (1, {"weight": 2**24}), (3, {"weight": 1})
    params, _ = pushed(gx.accumulate(optax.sgd(1.0), 2), *pushes)
    np.testing.assert_allclose(params, -(2**24 + 3) / (2**24 + 1), rtol=2e-7)


def test_weights_in_double_precision():
    with jax.enable_x64(True):
        tx = gx.accumulate(optax.sgd(1.0), 3)
        params = jnp.zeros((), "float64")
        state = tx.init(params)
        types = jax.tree.map(jax.typeof, state)
        for g, w in ((1.0, 0.1), (2.0, 2**40 + 1), (5.0, 1 / 3)):
            updates, state = tx.update(jnp.float64(g), state, params, weight=w)
            assert jax.tree.map(jax.typeof, state) == types
        wanted = (0.1 + 2 * (2**40 + 1) + 5 / 3) / (0.1 + 2**40 + 1 + 1 / 3)
        np.testing.assert_allclose(updates, -wanted, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_a_weight_scales_each_kind_of_number(dtype):
    tx = gx.accumulate(optax.identity(), 2)
    grads = np.array([[1.5, -0.25], [2.0, 8.0]], np.complex64 if "c" in dtype else "f")
    grads = grads * (1 - 2j) if "c" in dtype else grads
    state = tx.init(jnp.zeros(2, dtype))
    for g, w in zip(jnp.asarray(grads, dtype), (3, 5), strict=True):
        updates, state = tx.update(g, state, weight=w)
    wanted = (3 * grads[0] + 5 * grads[1]) / 8
    assert updates.dtype == dtype
    if dtype == "bfloat16":
        updates = updates.astype("float32")
    np.testing.assert_allclose(updates, wanted, rtol=5e-3)


@pytest.mark.parametrize("reduction", ["mean", "sum", "row_mean"])
@pytest.mark.parametrize(
    ("inner", "skip"), [("sgd", False), ("lazy", False), ("sgd", True)]
)
def test_rows_equal_the_formula(reduction, inner, skip):
    """Rows of a table, a dense gradient and None in turn; two steps.

    With ``skip`` two pushes are left out: one row of each is not finite.
    """
    rates = {"sgd": optax.sgd(1.0), "lazy": gx.lazy(optax.sgd(1.0))}
    tx = gx.accumulate(rates[inner], 3, reduction=reduction, skip_nonfinite=skip)
    push = jax.jit(functools.partial(gx.apply_gradients, tx))
    rng, weights = np.random.default_rng(1), [2.0, 0.5, 4.0, 1.0, 8.0, 3.0]
    params = {"table": jnp.zeros((4, 2)), "b": jnp.zeros(2)}
    state, expected = tx.init(params), {"table": np.zeros((4, 2)), "b": np.zeros(2)}
    total, of_rows = np.zeros((5, 2)), np.zeros((5, 1))
    b, of_b = np.zeros(2), 0.0
    for number, w in enumerate(weights):
        ids, values = rng.integers(0, 5, 3), rng.standard_normal((3, 2))
        values[ids == 4] = np.nan  # 4 is padding.
        g = {"table": gx.IndexedSlices(ids, np.float32(values), (4, 2)), "b": None}
        if skip and number in (1, 5):
            bad = gx.IndexedSlices([2, 0, 2], np.float32([[1, np.inf]] * 3), (4, 2))
            params, state = push(g | {"table": bad}, state, params, weight=w)
        np.add.at(total, ids, w * values)
        of_rows[np.unique(ids)] += w
        if number % 2:
            dense = rng.standard_normal(2)
            g["b"] = jnp.float32(dense)
            b, of_b = b + w * dense, of_b + w
        params, state = push(g, state, params, weight=w)
        if number % 3 == 2:
            n = sum(weights[number - 2 : number + 1])
            by = {
                "mean": (n, n),
                "sum": (1, 1),
                "row_mean": (np.where(of_rows, of_rows, 1)[:4], of_b),
            }[reduction]
            expected["table"] -= total[:4] / by[0]
            total, of_rows = np.zeros((5, 2)), np.zeros((5, 1))
            if g["b"] is not None:  # Else its sum waits for the next window.
                expected["b"] -= b / by[1]
                b, of_b = np.zeros(2), 0.0
        chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    assert (state.global_step, state.nonfinite_count) == (2, 2 if skip else 0)


def test_a_push_of_weight_0_adds_nothing():
    """Not even if it holds NaN, as the mean over no tokens does."""
    tx = gx.accumulate(optax.sgd(1.0), 2)
    push = jax.jit(functools.partial(gx.apply_gradients, tx))
    params, state = jnp.zeros(2), tx.init(jnp.zeros(2))
    wild = jnp.array([jnp.nan, jnp.inf])
    for g, w in ((wild, 0), (jnp.array([1.0, 2.0]), 3)):
        params, state = push(g, state, params, weight=w)
    np.testing.assert_array_equal(params, [-1.0, -2.0])
    for _ in range(2):  # A step of nothing.
        params, state = push(wild, state, params, weight=0.0)
    np.testing.assert_array_equal(params, [-1.0, -2.0])
    assert (state.global_step, state.num_accumulated, state.total_weight) == (2, 0, 0)
    # A weight that is NaN hides nothing.
    for w in (jnp.nan, 1.0):
        params, state = push(jnp.ones(2), state, params, weight=w)
    assert np.isnan(params).all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "row_mean"])
def test_a_weight_beside_that_of_staleness(reduction):
    """Late pushes count less, and the mean divides by the weights of the pushes."""
    tx = gx.conditional_accumulator(
        optax.sgd(1.0),
        2,
        max_staleness=2,
        weight=lambda s: 1 / (1 + s),
        reduction=reduction,
    )

    def rows(indices, numbers):
        return gx.IndexedSlices(jnp.array(indices), jnp.outer(numbers, sizes), (5, 2))

    sizes = jnp.array([1.0, -2.0])
    params = {"b": jnp.zeros(2), "table": jnp.zeros((5, 2))}
    state = tx.init(params)._replace(global_step=jnp.int32(3))
    first, late = [1, 3, 3, 5], [4, 3, 1, 5]  # 5 is padding.
    for b, slices, step, w in (
        (1.0, rows(first, jnp.array([1.0, 2.0, 4.0, 9.0])), 3, 3),
        (9.0, rows(first, jnp.array([9.0, 9.0, 9.0, 9.0])), 0, 7),  # It is dropped.
        (4.0, rows(late, jnp.array([8.0, 16.0, 0.0, 9.0])), 1, 5),
    ):
        grads = {"b": b * sizes, "table": slices}
        params, state = gx.apply_gradients(
            tx, grads, state, params, local_step=step, weight=w
        )
    of_rows = 3 * np.array([0, 1, 0, 6, 0]) + 5 / 3 * np.array([0, 0, 0, 16, 8])
    number = 1 if reduction == "sum" else 3 + 5
    held = np.array([1, 8, 1, 8, 5]) if reduction == "row_mean" else number
    expected = {"b": (3 + 5 * 4 / 3) / number * sizes}
    expected["table"] = np.outer(of_rows / held, sizes)
    for name, got in params.items():
        np.testing.assert_allclose(got, -expected[name], rtol=1e-6)
    assert state.stale_count == 1


def test_without_a_weight_a_push_weighs_1():
    tx = gx.accumulate(optax.sgd(1.0), 2)
    params, state = pushed(tx, (6, {"weight": 2}), (3, {}))
    assert (params, state.total_weight) == (-5.0, 3.0)


# The last push of a window.


@pytest.mark.parametrize("reduction", ["mean", "sum", "row_mean"])
@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_last_push_makes_the_step_with_those_there_are(reduction, how, weighted):
    tx = gx.accumulate(optax.sgd(1.0), 3, reduction=reduction)
    rng = np.random.default_rng(2)
    g = rng.standard_normal((9, 4)).astype("float32")
    lasts = np.arange(9) % 5 == 4  # Windows of 3, 2, 3; one push is left.
    weights = rng.integers(1, 5, 9) if weighted else np.ones(9, int)

    @jax.jit
    def trained(g, weights, lasts):
        def push(carry, pushed):
            params, state = carry
            g, w, last = pushed
            extra = {"last": last} | ({"weight": w} if weighted else {})
            return stepped(tx, g, state, params, how, **extra), None

        params = jnp.zeros(4)
        return jax.lax.scan(push, (params, tx.init(params)), (g, weights, lasts))[0]

    params, state = trained(g, jnp.asarray(weights), lasts)
    assert (state.global_step, state.num_accumulated) == (3, 1)
    expected = np.zeros(4)
    for window in (slice(0, 3), slice(3, 5), slice(5, 8)):
        w = np.float64(weights[window])
        expected -= w @ g[window] / (1 if reduction == "sum" else w.sum())
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize("gate", ["nonfinite", "stale"])
def test_a_last_push_that_is_left_out_ends_the_window_all_the_same(gate, how, jit):
    """Of three leaves one had rows, one had a gradient, and one had none."""
    inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0, momentum=0.5))
    tx = {
        "nonfinite": gx.accumulate(inner, 9, skip_nonfinite=True),
        "stale": gx.conditional_accumulator(inner, 9),
    }[gate]

    def step(params, state, grads, late=False):
        extra = {"last": late} | (
            {"local_step": jnp.where(late, -1, 0)} if gate == "stale" else {}
        )
        return stepped(tx, grads, state, params, how, **extra)

    step = jax.jit(step) if jit else step
    params = {"table": jnp.ones((3, 2)), "w": jnp.ones(2), "v": jnp.ones(2)}
    start = state = tx.init(params)
    wild = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params) | {"v": None}
    # With nothing in the sum there is no step.
    same, state = step(params, state, wild, True)
    chex.assert_trees_all_equal(same, params)
    left_out = "stale_count" if gate == "stale" else "nonfinite_count"
    assert (state.global_step, getattr(state, left_out)) == (0, 1)
    rows = gx.IndexedSlices(jnp.array([2, 0]), jnp.ones((2, 2)), (3, 2))
    for g in (2.0, 4.0):
        grads = {"table": rows, "w": jnp.full(2, g), "v": None}
        params, state = step(params, state, grads, False)
    params, state = step(params, state, wild, True)
    expected = {
        "table": 1 - np.array([[1.0], [0.0], [1.0]]) * [1, 1] - 0.5,
        "w": np.full(2, 1 - 3 - 0.5),
        "v": np.ones(2),  # No decay either: no push had a gradient for it.
    }
    chex.assert_trees_all_close(params, expected, rtol=1e-6)
    assert (state.global_step, state.num_accumulated, getattr(state, left_out)) == (
        1,
        0,
        2,
    )
    trace = optax.tree.get(state, "trace")
    np.testing.assert_allclose(trace["w"], 3.5)
    np.testing.assert_array_equal(trace["v"], 0)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


def test_last_and_weight_stay_with_the_outermost_accumulator():
    """An accumulator inside of it counts each mean as one push."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(set(extra))
        return updates, state

    probe = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = gx.accumulate(gx.accumulate(probe, 2), 2)
    state = tx.init(jnp.zeros(()))
    for g, w in ((1.0, 1), (5.0, 3), (7.0, 9)):
        updates, state = tx.update(
            jnp.float32(g), state, weight=w, last=g == 7, value=0.5
        )
    assert {frozenset(names) for names in seen} == {frozenset({"value"})}
    assert (state.global_step, state.inner_state.num_accumulated) == (2, 0)
    assert updates == (4 + 7) / 2


def test_a_gate_around_passes_them_on():
    tx = gx.drop_stale(gx.skip_spikes(gx.accumulate(optax.sgd(1.0), 5)), 9)
    first, last = {"weight": 1, "last": False}, {"weight": 3, "last": np.True_}
    pushes = ((g, each | {"local_step": 0}) for g, each in ((1, first), (5, last)))
    assert pushed(tx, *pushes)[0] == -4.0


# Servers and engines.


@pytest.mark.parametrize("engine", [engines.simulated, engines.threads])
def test_workers_say_weight_and_last(engine):
    """One worker, so the windows are known: tokens 1, 2, 3, and then 4, 5."""
    worker = engines.Worker(
        lambda w, n: (0.0 * w, jnp.float32(1) * n),
        lambda number: (np.float32(number + 1),),
        duration=(lambda number: 1.0) if engine is engines.simulated else None,
        extra=lambda w, n: {"weight": n, "last": np.bool(n == 5)},
    )
    tx = gx.conditional_accumulator(optax.sgd(1.0), 3, max_staleness=jnp.inf)
    with engine(engines.Job(jnp.zeros(()), tx, [worker], pushes=5)) as run:
        results = [push.result for push in run.pushes]
        params = run.server.state()["params"]
    assert [r.global_step for r in results] == [0, 0, 1, 1, 2]
    assert run.counts().accepted == 5
    wanted = -(1 + 4 + 9) / 6 - (16 + 25) / 9
    np.testing.assert_allclose(params, wanted, rtol=1e-6)


def test_a_server_refuses_what_is_no_weight():
    server = gx.ParameterServer(jnp.zeros(()), gx.accumulate(optax.sgd(1.0), 2))
    for weight in (-1, np.float32(np.nan), jnp.float32(-2)):
        with pytest.raises(ValueError, match=r"weight must be in \[0, inf\), got"):
            server.push(jnp.ones(()), 0, weight=weight)
    with pytest.raises(TypeError, match="weight must be a real scalar"):
        server.push(jnp.ones(()), 0, weight=jnp.ones(2))
    with pytest.raises(TypeError, match="last must be a bool"):
        server.push(jnp.ones(()), 0, last=1)
    assert server.stats().accepted == 0
    answer = server.push(jnp.ones(()), 0, weight=2, last=True)
    assert (answer.applied, answer.global_step) == (True, 1)
    # A late push ends the window of another one: it is dropped, and the step is made.
    tx = gx.conditional_accumulator(optax.sgd(1.0), 3)
    server = gx.ParameterServer(jnp.zeros(()), tx)
    server.push(jnp.ones(()), 0, last=True)
    server.push(jnp.float32(5), 1)
    answer = server.push(jnp.float32(7), 0, last=True)
    assert (answer.applied, answer.staleness, answer.global_step) == (False, 1, 2)
    assert server.pull()[0] == -6.0


# Bad input.


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"weight": -1}, ValueError, r"weight must be in \[0, inf\), got -1"),
        ({"weight": jnp.float32(-0.5)}, ValueError, r"weight must be in .* got -0\.5"),
        ({"weight": np.nan}, ValueError, r"weight must be in \[0, inf\), got nan"),
        ({"weight": np.inf}, ValueError, r"weight must be in \[0, inf\), got inf"),
        ({"weight": 10**400}, ValueError, "weight must be .*, got 10000"),
        ({"weight": jnp.ones(3)}, TypeError, "weight must be a real scalar, got Array"),
        ({"weight": True}, TypeError, "weight must be a real scalar, got True"),
        ({"weight": 1j}, TypeError, "weight must be a real scalar, got 1j"),
        ({"weight": "3"}, TypeError, "weight must be a real scalar, got '3'"),
        ({"last": 1}, TypeError, "last must be a bool, or an array bool.., got 1"),
        ({"last": jnp.zeros(2, bool)}, TypeError, "last must be a bool"),
        ({"last": "yes"}, TypeError, "last must be a bool, .* got 'yes'"),
    ],
)
@pytest.mark.parametrize("name", ["accumulate", "conditional_accumulator"])
def test_bad_input(name, extra, error, message):
    tx = getattr(gx, name)(optax.sgd(1.0), 2)
    params = jnp.zeros(3)
    state = tx.init(params)
    for step in (tx.update, lambda g, s, p, **e: gx.apply_gradients(tx, g, s, p, **e)):
        with pytest.raises(error, match=message):
            step(params, state, params, local_step=0, **extra)


def test_a_vector_and_a_number_are_refused_while_tracing_too():
    tx = gx.accumulate(optax.sgd(1.0), 2)
    step = gx.minimize(lambda w: w, tx, donate=False)
    params = jnp.zeros(())
    with pytest.raises(TypeError, match="weight must be a real scalar"):
        step(params, tx.init(params), weight=jnp.ones(2))
    with pytest.raises(TypeError, match="last must be a bool"):
        step(params, tx.init(params), last=jnp.int32(1))


def test_delayed_gives_no_older_gradient_the_newest_weight():
    tx = gx.delayed(gx.accumulate(optax.sgd(1.0), 2), 1)
    state = tx.init(jnp.zeros(()))
    tx.update(jnp.ones(()), state, last=True)
    with pytest.raises(TypeError, match="put the accumulator around delayed"):
        tx.update(jnp.ones(()), state, weight=2)
    around = gx.accumulate(gx.delayed(optax.sgd(1.0), 1), 2)
    around.update(jnp.ones(()), around.init(jnp.zeros(())), weight=2)
