"""What only the edge of an argument shows, or only the next step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import jaxprs

SGD = optax.sgd(0.1)


@pytest.mark.quick_case("0.25")
@pytest.mark.parametrize("l1", [0.0, 0.25, 1.0])
def test_proximal_adagrad_with_a_schedule(l1):
    tx = gx.proximal_adagrad(lambda count: 0.5 / (1 + count.astype("float32")), 0.1, l1)
    w, acc = np.array([1.5, -0.75, 0.05]), np.full(3, 0.1)
    params, rng = jnp.asarray(w, "float32"), np.random.default_rng(0)
    state = tx.init(params)
    for step in range(4):
        g = rng.standard_normal(3).astype("float32")
        params, state = gx.apply_gradients(tx, jnp.asarray(g), state, params)
        acc += np.float64(g) ** 2
        eta = 0.5 / (1 + step) / np.sqrt(acc)
        v = w - eta * g
        w = np.sign(v) * np.maximum(np.abs(v) - eta * l1, 0)
        np.testing.assert_allclose(params, w, rtol=2e-6, atol=1e-7)


@pytest.mark.every
@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_ftrl_with_another_power_starts_from_any_sum(start):
    tx = gx.ftrl(0.5, -0.7, start)
    w, g = np.array([1.5, -0.75]), np.array([2.0, -0.25])
    params = jnp.asarray(w, "float32")
    grads = jnp.asarray(g, "float32")
    new, _ = gx.apply_gradients(tx, grads, tx.init(params), params)
    n = start + g**2
    z = g - (n**0.7 - start**0.7) / 0.5 * w
    np.testing.assert_allclose(new, -z / (n**0.7 / 0.5), rtol=2e-6, atol=1e-6)


ALIGNED = gx.contrib.MomentumAlignment
# Made with all of their numbers, each given to a function.
NUMBERS = {
    "adagrad": lambda x: gx.adagrad(x(0.1), x(0.1), x(0.1), clipnorm=x(0.1)),
    "clip": lambda x: gx.clip_by_global_norm(x(0.1)),
    "clip_by_norm": lambda x: gx.clip_by_norm(x(0.1)),
    "clip_by_zscore": lambda x: gx.contrib.clip_by_zscore(
        threshold=x(2.0), decay=x(0.5)
    ),
    "compensate_delay": lambda x: gx.compensate_delay(x(0.1)),
    "delayed_nesterov": lambda x: gx.contrib.delayed_nesterov(
        x(0.1), x(0.5), num_delay=2, activation=x(0.1)
    ),
    "ftrl": lambda x: gx.ftrl(x(0.1), x(-0.7), *map(x, [0.1] * 5), clipvalue=x(0.1)),
    "heloco": lambda x: gx.contrib.momentum_look_ahead(
        x(0.1), x(0.5), alignment=ALIGNED(*map(x, ALIGNED()))
    ),
    "novograd": lambda x: gx.novograd(
        *map(x, [0.1] * 5), grad_averaging=True, nesterov=True, global_clipnorm=x(0.1)
    ),
    "novograd, rate inside": lambda x: gx.novograd(x(0.1), lr_in_momentum=True),
    "proximal_adagrad": lambda x: gx.proximal_adagrad(*map(x, [0.1] * 4)),
    "scale_by_staleness": lambda x: gx.scale_by_staleness(x(0.5)),
    "scale_by_staleness, weight": lambda x: gx.scale_by_staleness(
        weight=lambda s: x(0.5)
    ),
}


@pytest.mark.every
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_in_float64_keeps_the_dtypes_of_a_step_in_float32(name):
    params = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)}
    extra = {"worker_params": params} if name == "compensate_delay" else {}

    def step(number, params, extra):
        """The state before and after a step, and the updates."""
        tx = NUMBERS[name](lambda x: x + number)
        state = tx.init(params)
        more = {"staleness": 3} if "staleness" in name else extra
        return state, *tx.update(params, state, params, **more)

    with jax.enable_x64():
        number = jax.ShapeDtypeStruct((), jnp.float64)
        before, updates, after = jax.eval_shape(step, number, params, extra)
    assert updates == params
    assert after == before


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.every
def test_a_gradient_that_does_not_fit_its_sums_is_named(row_wise):
    tx = gx.scale_by_adagrad(row_wise=row_wise)
    sums = jax.eval_shape(tx.init, {"w": jnp.ones((3, 2))})
    for shape in ((2, 2), (2,), ()) if row_wise else ((3, 3), (3,), (3, 2, 1)):
        with pytest.raises(TypeError, match=r"^updates .* sum_of_squares .*\['w'\]"):
            jax.eval_shape(tx.update, {"w": jnp.ones(shape)}, sums)


def test_a_row_wise_sum_is_that_of_the_whole_row():
    values = np.float32([[1, 2], [3, -1], [1, 1]])
    grads = gx.IndexedSlices([1, 1, 3], values, (4, 2))
    tx = gx.scale_by_adagrad(0.5, eps=0.0, row_wise=True)

    @jax.jit
    def step(grads):
        updates, state = tx.update(grads, tx.init(jnp.ones((4, 2))))
        return updates.densify(), state.sum_of_squares

    updates, got = step(grads)
    dense = np.array([[0, 0], [4, 1], [0, 0], [1, 1]])
    sums = 0.5 + np.mean(dense**2, axis=1)
    np.testing.assert_allclose(got, sums, rtol=1e-6)
    np.testing.assert_allclose(updates, dense / np.sqrt(sums)[:, None], rtol=1e-6)


RATE = gx.scale_by_learning_rate(0.1)
AHEAD = gx.contrib.scale_by_momentum_look_ahead
LATE = functools.partial(gx.contrib.scale_by_delayed_nesterov, num_delay=2)
# The arrays that one step ties for the compiler for CPU. One is tied alone, so that
# nobody computes it again or shares a part of it, or it is tied behind another one, in
# whose place it is written.
TIED = {
    "master_weights": (gx.master_weights(RATE), "bfloat16", "1122"),
    "ftrl": (gx.ftrl(0.1), "float32", "112"),
    "proximal_adagrad": (gx.proximal_adagrad(0.1), "float32", "1"),
    "novograd": (gx.scale_by_novograd(), "float32", "12"),
    "adagrad": (gx.scale_by_adagrad(), "float32", ""),
    "rows": (gx.scale_by_adagrad(row_wise=True), "float32", "11"),
    "clip": (gx.clip_by_global_norm(1.0), "bfloat16", "1112"),
    "clip in float32": (gx.clip_by_global_norm(1.0), "float32", "11"),
    "norms": (gx.measure_norms(), "float32", "11"),
    "momentum": (AHEAD(mu_dtype="bfloat16"), "bfloat16", "1"),
    "momentum in float32": (AHEAD(), "float32", ""),
    "late momentum": (LATE(mu_dtype="bfloat16"), "bfloat16", "1"),
    "8 bits": (gx.low_bit_state(AHEAD(), min_size=8), "float32", "1"),
    "random": (gx.round_stochastically(0), "bfloat16", ""),
}


def tied(tx, params):
    state = jax.eval_shape(tx.init, params)
    program = jax.make_jaxpr(tx.update)(params, state, params)
    barriers = jaxprs.anywhere(program.jaxpr, "optimization_barrier")
    return "".join(sorted(str(len(eqn.invars)) for eqn in barriers))


@pytest.mark.every
@pytest.mark.parametrize("name", TIED)
def test_a_step_ties_what_would_be_computed_or_kept_twice(name):
    tx, dtype, wanted = TIED[name]
    assert tied(tx, {"w": jax.ShapeDtypeStruct((8, 128), dtype)}) == wanted


def test_a_second_parameter_waits_for_the_residual_of_the_first():
    """Each of them needs temporary memory."""
    w = jax.ShapeDtypeStruct((8, 128), "bfloat16")
    assert tied(gx.master_weights(RATE), {"a": w, "b": w}) == "11122222"


@pytest.mark.slow
def test_a_residual_is_the_nearest_whole_number():
    """float16 has steps of 2**-24 here, int16 divides them, and float32 is finer."""
    start, part = 2.0**-19, 2.0**-40
    wanted = start + np.random.default_rng(0).random(1000, "float32") * 2.0**-20
    params = jnp.full(1000, start, "float16")
    tx = gx.master_weights(optax.sgd(1.0))
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    params, state = step(start - wanted, tx.init(params), params)
    error = np.abs(np.float64(gx.get_master_weights(params, state)) - wanted)
    assert 0.4 * part < error.max() < 0.6 * part


def test_the_mean_of_a_leaf_without_a_gradient_waits_for_the_next_step():
    tx = gx.worker_mean(optax.sgd(1.0), 2, method="all")
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    state = tx.init(params)
    pushes = [(0, 0, 2.0), (1, 0, None), (0, 1, 4.0), (1, 1, 6.0)]
    for worker, step, b in pushes:
        grads = {"a": jnp.ones(()), "b": None if b is None else jnp.float32(b)}
        params, state = gx.apply_gradients(
            tx, grads, state, params, worker=worker, local_step=step
        )
    # The step of the second push leaves out b, so its mean waits: half of 2. That of
    # the next step is half of 4 and 6, and b moves by the mean of both means.
    assert jax.tree.map(float, params) == {"a": -2.0, "b": -3.0}


def test_ringleader_keeps_a_second_push_for_the_next_cycle():
    tx = gx.worker_mean(optax.sgd(1.0), 2, method="ringleader")
    params, seen = jnp.zeros(()), []
    state = tx.init(params)
    for worker, g in ((0, 2.0), (1, 4.0), (1, 10.0), (0, 6.0), (0, 2.0)):
        grads = jnp.float32(g)
        params, state = gx.apply_gradients(tx, grads, state, params, worker=worker)
        seen.append(float(params))
    # Means of 2 and 4; of (2 + 6) / 2 and 4; of 2 and the 10 that waited.
    assert seen == [0, -3, -3, -7, -13]


NO_GRADIENT = {
    "a branch": {"w": None, "ids": None},
    "masked": {"w": {"a": optax.MaskedNode(), "b": optax.MaskedNode()}, "ids": None},
    "float0": {"w": {"a": None, "b": None}, "ids": np.zeros(2, jax.dtypes.float0)},
}


@pytest.mark.every
@pytest.mark.parametrize("grads", NO_GRADIENT.values(), ids=NO_GRADIENT)
@pytest.mark.parametrize("wrap", [gx.delayed, gx.accumulate, gx.drop_stale])
def test_each_way_to_say_that_a_leaf_has_no_gradient(wrap, grads):
    params = {"w": {"a": jnp.ones(2), "b": jnp.ones(3)}, "ids": jnp.arange(2)}
    params, grads = params | {"c": jnp.ones(())}, grads | {"c": jnp.ones(())}
    tx = wrap(SGD, 1)
    state = tx.init(params)
    updates, _ = tx.update(grads, state, params, local_step=0)
    assert updates | {"c": 0} == {"w": {"a": None, "b": None}, "ids": None, "c": 0}


def test_a_dense_gradient_lies_where_its_table_does():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
    table = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("x", None)))
    grads = gx.IndexedSlices([1, 3], jnp.ones((2, 2)), (4, 2))
    tx = gx.densify()
    with jax.set_mesh(mesh):
        dense, _ = jax.jit(tx.update)(grads, tx.init(table), table)
    assert dense.sharding == table.sharding
    assert tx.update(grads, tx.init(table))[0].tolist() == dense.tolist()
