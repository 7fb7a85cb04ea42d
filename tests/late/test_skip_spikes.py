"""skip_spikes: its decisions, against the rule in float64 and the code of others."""

import functools
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests import in_numpy, oracles
from tests.test_golden import build

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = {
    f"{path.stem}:{case['name']}": case
    for path in (GOLDEN / "olmo_core.json", GOLDEN / "maxtext.json")
    for case in json.loads(path.read_text())["cases"]
}
STEPS, NAN, INF = 400, np.nan, np.inf
W = np.float32(0)
applied = jax.jit(gx.apply_gradients, static_argnums=0)


def push(tx, number, state, params, **extra):
    """The push of a gradient whose norm is this number."""
    grads = jax.tree.map(lambda p: jnp.full(p.shape, number, p.dtype), params)
    return applied(tx, grads, state, params, **extra)


def stream(seed):
    """400 norms and losses with spikes, a new level, and NaN and inf."""
    rng = np.random.default_rng(seed)
    norms = np.exp(0.1 * rng.standard_normal(STEPS))
    losses = 4 / (1 + np.arange(STEPS) / 50) + 0.05 * rng.standard_normal(STEPS)
    for numbers, size in ((norms, 10), (losses, 3)):
        numbers[rng.integers(STEPS, size=12)] *= size
        numbers[rng.integers(STEPS, size=4)] = [NAN, INF, NAN, INF]
        numbers[250:] *= 1.5
    if seed % 3 == 1:
        norms[0] = losses[1] = NAN  # Before there is a history.
    if seed % 3 == 2:
        norms[100:220] = norms[100]  # The deviation is 0.
        losses -= 1000  # Its mean is far larger than its deviation.
    return np.float32(norms), np.float32(losses)


@functools.cache
def played(window, warmup, with_loss):
    """One program for all streams of these arguments."""

    @jax.jit
    def play(norms, losses, sigmas):
        tx = gx.skip_spikes(
            optax.sgd(0.1, 0.9), window=window, sigmas=sigmas, warmup=warmup
        )

        def body(carry, pushed):
            params, state = carry
            extra = {"value": pushed[1]} if with_loss else {}
            carry = gx.apply_gradients(tx, pushed[0], state, params, **extra)
            return carry, (carry[0], carry[1].skipped_count)

        params = jnp.float32(1.0)
        carry = params, tx.init(params)
        return jax.lax.scan(body, carry, (norms, losses))[1]

    return play


KINDS = [(128, None, True), (16, 5, True), (32, 32, False), (2, None, True)]


@pytest.mark.parametrize("seed", range(0, 13, 2))
def test_a_stream_is_that_of_the_rule(seed):
    """And so are streams of losses that are far larger or smaller."""
    window, warmup, with_loss = KINDS[seed // 2 % len(KINDS)]
    sigmas = (6.0, 3.0, 2.0, 10.0)[seed // 2 % 4]
    norms, losses = stream(seed)
    play = played(window, warmup, with_loss)
    params, counts = play(norms, losses, sigmas)
    pairs = [
        (np.float64(n), np.float64(x) if with_loss else None)
        for n, x in zip(norms, losses, strict=True)
    ]
    applied = [*oracles.skip_spikes(pairs, window, sigmas, warmup)]
    np.testing.assert_array_equal(counts, np.cumsum(np.logical_not(applied)))
    p, m, wanted = 1.0, 0.0, []
    for (norm, _), acts in zip(pairs, applied, strict=True):
        if acts:
            m = 0.9 * m + norm
            p -= 0.1 * m
        wanted.append(p)
    np.testing.assert_allclose(params, wanted, rtol=2e-5)
    assert 4 < int(counts[-1]) < STEPS // 2
    if seed % 3 != 2:  # Those lose digits.
        for scale in np.float32([1e-30, 1e-12, 1e30]):
            np.testing.assert_array_equal(
                play(norms, losses * scale, sigmas)[1], counts
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", [k for k, case in CASES.items() if case["ours"]])
def test_the_decisions_are_those_of_the_original(name):
    case = CASES[name]
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        tx = build(case["ours"])
        step = jax.jit(functools.partial(gx.apply_gradients, tx))
        params = {"w": jnp.float32(case["params"]["w"])}
        state = tx.init(params)
        for event in case["events"]:
            grads, before = {"w": jnp.float32(event["grads"]["w"])}, state.global_step
            params, state = step(grads, state, params, value=event["value"])
            assert (state.global_step > before) == event["applied"]
            np.testing.assert_allclose(params["w"], event["params"]["w"], atol=2e-5)
    assert state.skipped_count > 3


def test_by_default_half_a_window_has_to_be_full():
    for window, warmup in ((2, 2), (9, 4)):
        tx = gx.skip_spikes(optax.sgd(1.0), window=window)
        update, state = functools.partial(tx.update, params=None), tx.init(W)
        program = in_numpy.Program(jax.make_jaxpr(update)(W, state))
        for held in range(window + 1):
            before = state._replace(num_held=np.int32([held, 0]))
            with np.errstate(over="ignore"):
                _, *results = program(np.float32(9), before)
            after = jax.tree.unflatten(jax.tree.structure(state), results)
            assert after.skipped_count == (held >= warmup)
            assert after.num_held.tolist() == [min(held + 1, window), 0]


@pytest.mark.slow
def test_equal_numbers_are_no_spike_and_any_larger_one_is():
    tx = gx.skip_spikes(optax.sgd(1.0), window=100)
    params = jnp.zeros(())
    state, step = tx.init(params), jax.jit(functools.partial(push, tx))
    for _ in range(150):  # The mean of 0.1 in float32 is not 0.1.
        params, state = step(0.1, state, params)
    assert state.skipped_count == 0
    for number, skipped in ((np.nextafter(np.float32(0.1), 1), 1), (0.05, 1), (0.2, 2)):
        params, state = step(number, state, params)
        assert state.skipped_count == skipped


@pytest.mark.slow
def test_a_skipped_push_changes_counts_and_history_alone():
    tx = gx.skip_spikes(optax.adam(0.1), window=4)
    params = {"w": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16), "none": None}
    state = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(functools.partial(push, tx))
        for number in (1.0, 1.1, 1.2):
            params, state = step(number, state, params)
        for number, numbers in ((NAN, 3), (INF, 3), (1e25, 3), (100.0, 4)):
            after, new = step(number, state, params)
            old = params, state.inner_state
            chex.assert_trees_all_equal((after, new.inner_state), old)
            assert new.skipped_count == state.skipped_count + 1
            assert new.global_step == 3
            assert new.num_held.tolist() == [numbers, 0]
            state = new
    assert state.norm == state.history[0, -1] > 100


def test_a_loss_may_come_or_not_and_inner_gets_it():
    def update(updates, state, params=None, *, value, **extra):
        return updates, value

    inner = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    tx = gx.skip_spikes(inner, window=4)
    params = jnp.zeros(())
    state, kinds = tx.init(params), jax.tree.map(jax.typeof, tx.init(params))
    for t, value in enumerate((1.0, 1.1, 1.2, 9.0, NAN)):
        with jax.disable_jit():  # Its conditional runs one branch.
            _, state = push(tx, 1.0, state, params, value=jnp.float32(value))
        assert jax.tree.map(jax.typeof, state) == kinds
        assert state.skipped_count == max(0, t - 2)
    assert state.inner_state == jnp.float32(1.2)
    assert state.num_held.tolist() == [4, 4]
    tx = gx.skip_spikes(optax.sgd(1.0), window=4, warmup=np.uint8(2))
    state = tx.init(params)
    for extra in ({}, {"value": 2}, {}, {"value": -3.0}):
        # Also with a single number, which has no deviation, nothing is NaN.
        with jax.disable_jit(), jax.debug_nans(True):
            _, state = push(tx, 1.0, state, params, **extra)
    assert state.num_held.tolist() == [4, 2]
    assert state.skipped_count == 0


@pytest.mark.slow
def test_in_accumulators_it_judges_the_mean_and_around_them_each_micro_batch():
    sgd = optax.sgd(1.0)
    inside = gx.accumulate(gx.skip_spikes(sgd, window=4), 2)
    around = gx.skip_spikes(gx.accumulate(sgd, 2), window=4)
    numbers = (1.0, 1.2, 1.1, 1.1, 1.2, 50.0, 1.0)
    for tx, applied in ((inside, (1.1, 1.1)), (around, (1.1, 1.1, 1.1))):
        params = jnp.zeros(())
        state, step = tx.init(params), jax.jit(functools.partial(push, tx))
        for number in numbers:
            params, state = step(number, state, params)
        np.testing.assert_allclose(params, -sum(applied), rtol=1e-6)
        (_, skipped), *_ = optax.tree.get_all_with_path(state, "skipped_count")
        assert skipped == 1


@pytest.mark.slow
def test_rows_are_summed_once_and_untouched_rows_stay():
    tx = gx.skip_spikes(gx.lazy(optax.adam(0.1)), window=2)
    table = jnp.ones((4, 2))
    with jax.numpy_dtype_promotion("standard"):
        state = tx.init(table)
        step = jax.jit(functools.partial(gx.apply_gradients, tx))
        for t, scale in enumerate((1.0, 2.0, 90.0, NAN)):
            rows = scale * jnp.array([[3.0, 0.0], [4.0, 0.0], [NAN, 9.0]])
            grads = gx.IndexedSlices([1, 1, 4], rows, (4, 2))
            table, state = step(grads, state, table)
            assert state.skipped_count == max(0, t - 1)
            if t == 1:
                kept = table
    assert state.history[0].tolist() == [14.0, 630.0]  # of 3 + 4
    np.testing.assert_array_equal(table, kept)
    np.testing.assert_array_equal(table[jnp.array([0, 2, 3])], 1.0)


@pytest.mark.parametrize("make", [gx.skip_spikes, gx.contrib.clip_by_zscore])
def test_devices_that_share_a_gradient_decide_alike(make):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(params, pushes, **where):
        if make is gx.skip_spikes:
            tx = make(optax.sgd(0.1), window=4, **where)
        else:
            tx = make(warmup=2, **where)

        def body(carry, grads):
            params, state = carry
            return gx.apply_gradients(tx, grads, state, params), ()

        return jax.lax.scan(body, (params, tx.init(params)), pushes)[0]

    spec = {"w": P("x"), "b": P()}
    params = {"w": jnp.zeros(16), "b": jnp.zeros(2)}
    one, far = np.ones((5, 16), np.float32), np.zeros((5, 16), np.float32)
    far[:, 0] = [0, 0, 0, 900, NAN]  # On one device alone.
    pushes = {"w": one * np.float32([[1], [1.1], [1], [1], [1]]) + far}
    pushes["b"] = np.ones((5, 2), np.float32)
    sharded = jax.shard_map(
        functools.partial(run, axis_name="x"),
        mesh=mesh,
        in_specs=(spec, {"w": P(None, "x"), "b": P()}),
        out_specs=(spec, P()),
    )
    got, wanted = jax.jit(sharded)(params, pushes), jax.jit(run)(params, pushes)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5)
    if make is gx.skip_spikes:
        assert got[1].skipped_count == 2


@pytest.mark.parametrize("how", ["tracked", "two axes", "untracked", "vmap"])
def test_devices_with_losses_of_their_own_decide_alike(how):
    # Gradients are ones. On device 0 one loss is high, and another is NaN.
    losses = np.ones((6, 8), np.float32) * np.float32([[1], [2], [1], [2], [1], [2]])
    losses[3, 0], losses[4, 0] = 900, NAN
    specs = how in ("untracked", "vmap")
    where = {"w": P("x"), "b": P()} if specs else "x"
    if how == "two axes":  # Losses differ over one of them, gradients over the other.
        where = "y", "x"
    tx = gx.skip_spikes(optax.sgd(0.1), window=4, axis_name=where)
    start = {"w": jnp.zeros(16), "b": jnp.zeros(2)}

    def run(params, losses):
        def body(carry, loss):
            params, state = carry
            grads = jax.tree.map(jnp.ones_like, params)
            return gx.apply_gradients(
                tx, grads, state, params, value=loss.reshape(())
            ), ()

        (params, state), _ = jax.lax.scan(body, (params, tx.init(params)), losses)
        count = state.skipped_count.astype(jnp.float32)
        return params, jnp.concatenate([count[None], state.history[1]])[None]

    axis = "y" if how == "two axes" else "x"
    if how == "vmap":
        parts = {"w": start["w"].reshape(8, 2), "b": start["b"]}
        axes = {"w": 0, "b": None}
        vmapped = jax.vmap(run, (axes, 1), axis_name="x")
        params, told = jax.jit(vmapped)(parts, losses)
        params["b"] = params["b"][0]
    else:
        shape = {"x": 1, "y": 8} if how == "two axes" else {"x": 8}
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
        spec = {"w": P("x"), "b": P()}
        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(spec, P(None, axis)),
            # Where JAX tracks it, it is equal on all devices. Elsewhere each tells it.
            out_specs=(spec, P("x") if how == "untracked" else P()),
            check_vma=not specs,
        )
        params, told = jax.jit(mapped)(start, losses)
    means = np.float32([1, 2, 1, (900 + 7 * 2) / 8, 2])  # Without NaN.
    for device in told.reshape(-1, 5):
        np.testing.assert_allclose(device, [2, *means[1:]], rtol=1e-6)
    for leaf in jax.tree.leaves(params):
        np.testing.assert_allclose(leaf, -0.4, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: gx.drop_stale(tx, 9)])
def test_a_server_says_that_a_push_was_not_applied(around):
    tx = around(gx.skip_spikes(optax.sgd(1.0), window=2))
    server = gx.ParameterServer(jnp.zeros(2), tx)
    for grad in (1.0, 1.1, NAN):
        _, step = server.pull()
        result = server.push(jnp.full(2, grad), step, value=1.0)
        assert result.applied == (grad < 2)
    stats = server.stats()
    assert (stats.accepted, stats.dropped) == (2, 1)
    np.testing.assert_allclose(server.pull()[0], -2.1, rtol=1e-6)
    params = jnp.zeros(2)
    for value in (np.ones(1), "high", 1j, True, {}):
        told = {"value": value, "local_step": 0}
        with pytest.raises(TypeError, match="value must be a real scalar"):
            gx.apply_gradients(tx, params, tx.init(params), params, **told)
