"""Micro-batches: the same numbers as optax's own, and what optax lacks."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.late.test_one_reduction import stepped

PARAMS = {"w": jnp.ones((2, 3)), "none": None, "b": jnp.full(3, -1.0)}
INNER = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 9)),
    "adagrad": lambda: optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
    "novograd": lambda: gx.novograd(0.1, weight_decay=0.01),
}
PUSHES = 12


def pushes(seed):
    """Pushes of a few steps, some not finite, and how many pushes each step needs."""
    rng = np.random.default_rng(seed)
    grads = {k: rng.standard_normal((PUSHES, *PARAMS[k].shape)) for k in ("w", "b")}
    bad = rng.random(PUSHES) < 0.2
    grads["b"][bad, rng.integers(3)] = rng.choice([np.nan, np.inf, -np.inf])
    required = rng.integers(1, 5, PUSHES)
    if seed % 2:  # Every step needs the same number.
        required[:] = required[0]
    grads = {k: jnp.float32(g) for k, g in grads.items()}
    return {**grads, "none": None}, jnp.int32(required), bad


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("skip", [True, False], ids=["skip", "sum"])
@pytest.mark.parametrize("inner", INNER)
def test_equals_multi_steps(inner, skip):
    """A mean of finite pushes, or a sum of all."""

    @jax.jit
    def trained(grads, required):
        ours = gx.accumulate(
            INNER[inner](),
            lambda step: required[step],
            reduction="mean" if skip else "sum",
            skip_nonfinite=skip,
        )
        theirs = optax.MultiSteps(
            INNER[inner](),
            lambda step: required[step],
            use_grad_mean=skip,
            should_skip_update_fn=optax.skip_not_finite if skip else None,
        )

        def push(carry, grads):
            (p, s), (q, t) = carry
            p, s = gx.apply_gradients(ours, grads, s, p)
            updates, t = theirs.update(grads, t, q)
            return ((p, s), (optax.apply_updates(q, updates), t)), None

        start = (PARAMS, ours.init(PARAMS)), (PARAMS, theirs.init(PARAMS))
        return jax.lax.scan(push, start, grads)[0]

    for seed in range(6):
        grads, required, bad = pushes(seed)
        if not skip:
            grads, bad = jax.tree.map(jnp.nan_to_num, grads), 0
            grads = jax.tree.map(lambda g: jnp.clip(g, -9, 9), grads)
        (params, state), (expected, multi) = trained(grads, required)
        chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-6)
        assert (state.global_step, state.num_accumulated, state.nonfinite_count) == (
            multi.gradient_step,
            multi.mini_step,
            np.sum(bad),
        )
        chex.assert_trees_all_close(
            jax.tree.leaves(state.inner_state),
            jax.tree.leaves(multi.inner_opt_state),
            rtol=1e-6,
            atol=1e-6,
        )


@pytest.mark.parametrize("bad", [np.nan, -np.inf, complex(1, np.inf), 3e38 + 3e38j])
@pytest.mark.parametrize("how", ["update", "apply"])
def test_a_skipped_push_reaches_nothing(bad, how):
    tx = gx.accumulate(optax.sgd(1.0, momentum=0.9), 2, skip_nonfinite=True)
    dtype = jnp.complex64 if isinstance(bad, complex) else jnp.float32
    params = {"w": jnp.ones(3, dtype), "v": jnp.ones((), dtype)}
    state = tx.init(params)
    good = {"w": jnp.full(3, 2, dtype), "v": None}
    params, state = gx.apply_gradients(tx, good, state, params)
    grads = {**good, "w": good["w"].at[1].set(bad)}
    after, new = stepped(tx, grads, state, params, how)
    if np.isfinite(bad):  # Its absolute value may still be inf.
        assert (new.global_step, new.nonfinite_count) == (1, 0)
        return
    chex.assert_trees_all_equal(after, params)
    assert new.nonfinite_count == 1
    chex.assert_trees_all_equal(
        new._replace(nonfinite_count=state.nonfinite_count), state
    )


def test_a_schedule_says_how_many_make_each_step():
    # optax's schedules give real numbers. Below 1 means 1 in a compiled program.
    schedules = {
        "whole": (lambda step: jnp.array([2, 1, 3])[step], [1, 2, 5]),
        "below 1": (lambda step: jnp.array([0, -7, 2])[step], [0, 1, 3, 5]),
        "real": (optax.linear_schedule(1.5, 3.5, 2), [1, 4]),
        "huge": (lambda step: jnp.uint32(2**32 - 1), []),
    }
    for schedule, steps in schedules.values():
        tx = gx.accumulate(optax.sgd(1.0), schedule)

        def push(state, grad, tx=tx):
            updates, state = tx.update(grad, state)
            return state, updates

        _, updates = jax.lax.scan(push, tx.init(jnp.zeros(())), jnp.ones(6))
        assert np.flatnonzero(updates).tolist() == steps
        assert set(updates[np.array(steps, int)].tolist()) <= {-1.0}


@pytest.mark.parametrize(
    ("gives", "error", "message"),
    [
        (0, ValueError, r"must be in \[1, 2147483647\], got 0"),
        (jnp.int32(-1), ValueError, r"must be in \[1, 2147483647\], got -1"),
        (jnp.float32(jnp.nan), ValueError, r"must be in \[1, 2147483647\], got nan"),
        (True, TypeError, "must be a real scalar, got True"),
        (None, TypeError, "must be a real scalar, got None"),
    ],
)
def test_a_schedule_that_gives_no_count(gives, error, message):
    tx = gx.accumulate(optax.sgd(1.0), lambda step: gives)
    state = tx.init(jnp.ones(3))
    with pytest.raises(error, match=r"^num_required\(global_step\) " + message):
        tx.update(jnp.ones(3), state)


@pytest.mark.parametrize("apart", [False, True])
def test_devices_leave_a_push_out_together(apart):
    """They do, unless each device counts its steps for itself."""
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    tx = gx.accumulate(optax.sgd(1.0), 1, skip_nonfinite=True)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P("x"))
    )
    def push(grads):
        params = {"sharded": jnp.zeros_like(grads), "whole": jnp.zeros(())}
        state = tx.init(params)
        own = jax.lax.axis_index("x")
        if apart:
            differing = (params, state)
            params, state = jax.tree.map(
                lambda x: x + (0 * own).astype(x.dtype), differing
            )
        grads = {"sharded": grads, "whole": params["whole"] + 1}
        params, state = gx.apply_gradients(tx, grads, state, params)
        return params["sharded"], (0 * own + state.nonfinite_count)[None]

    params, left_out = push(jnp.ones(8).at[5].set(jnp.nan))
    expected = np.arange(8) == 5 if apart else np.ones(8)
    assert left_out.tolist() == expected.tolist()
    assert params.tolist() == (expected - 1).tolist()


def test_a_server_counts_the_steps_and_not_the_pushes():
    params = {"w": jnp.zeros(2)}
    tx = optax.chain(gx.accumulate(optax.sgd(1.0), 2, skip_nonfinite=True))
    server = gx.ParameterServer(params, tx)
    one, bad = {"w": jnp.ones(2)}, {"w": jnp.full(2, jnp.nan)}
    with pytest.raises(TimeoutError):
        server.wait(0, timeout=0)
    # The pushes: one is added, one left out, one steps, and one is added although late.
    assert server.push(one, 0)[:3] == (True, 0, 0)
    assert server.push(bad, 0)[:3] == (False, 0, 0)
    kept = server.state()
    assert server.push({"w": 3 * one["w"]}, 0)[:3] == (True, 0, 1)
    assert server.wait(0) == 1
    assert server.push(one, 0)[:3] == (True, 1, 1)
    assert server.pull()[0]["w"].tolist() == [-2.0, -2.0]
    stats = server.stats()
    assert (stats.accepted, stats.dropped, stats.global_step) == (3, 1, 1)
    server.restore(kept)
    assert server.push(one, 0)[:3] == (True, 0, 1)
    assert server.pull()[0]["w"].tolist() == [-1.0, -1.0]


def test_the_outer_gate_counts_its_late_pushes():
    tx = gx.drop_stale(gx.accumulate(optax.sgd(1.0), 2), 0)
    state = tx.init(jnp.zeros(()))
    for _ in range(2):
        _, state = tx.update(jnp.ones(()), state, local_step=0)
    assert gx.global_step(state) == 1
    assert gx.staleness_fraction(state) == 0.5
    # This gate knows no lateness, and it does not hide the gate inside of it.
    inside = gx.accumulate(gx.drop_stale(optax.sgd(1.0), 0), 1)
    state = inside.init(jnp.zeros(()))
    for _ in range(2):
        _, state = inside.update(jnp.ones(()), state, local_step=0)
    assert gx.global_step(state) == 2
    assert gx.staleness_fraction(state) == 0.5
    alone = gx.accumulate(optax.sgd(1.0), 1).init(jnp.zeros(()))
    with pytest.raises(ValueError, match="the state holds no stale_count"):
        gx.staleness_fraction(alone)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "around",
    [
        lambda tx: gx.accumulate(tx, 2),
        lambda tx: gx.conditional_accumulator(tx, 2),
        lambda tx: gx.worker_mean(tx, 2, method="latest"),
        lambda tx: gx.delayed(tx, 1),
    ],
    ids=["accumulate", "conditional_accumulator", "worker_mean", "delayed"],
)
def test_lookahead_goes_around_gates_that_keep_gradients(around):
    """As it takes those of ``params.fast`` alone, there is no room for them."""
    pair = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
    with pytest.raises(TypeError, match="put it around this transformation"):
        around(optax.lookahead(optax.sgd(1.0), 2, 0.5)).init(pair)


@pytest.mark.usefixtures("standard_promotion")
def test_lookahead_around_micro_batches():
    tx = optax.lookahead(gx.accumulate(optax.sgd(1.0), 2), 4, 0.5)
    pair = optax.LookaheadParams.init_synced(jnp.zeros(2))
    state = tx.init(pair)
    for _ in range(4):
        updates, state = tx.update(jnp.ones(2), state, pair)
        pair = gx.apply_updates(pair, updates)
    # Two steps of 1. The slow parameters go half of the way.
    assert pair.slow.tolist() == pair.fast.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize(
    ("dtype", "sums"), [("float32", None), ("bfloat16", None), ("float32", "bfloat16")]
)
def test_nothing_of_the_sum_before_reaches_the_next(how, dtype, sums):
    """A NaN in one sum, and leaves that have a gradient, rows, or nothing in turn."""
    tx = gx.accumulate(optax.sgd(0.5), 2, accumulator_dtype=sums)
    dense = {"w": np.ones(4), "table": np.ones((3, 2))}
    rows = gx.IndexedSlices([1, 1], jnp.ones((2, 2), dtype), (3, 2))
    as_dense = np.array([[0, 0], [2, 2], [0, 0]])
    pushes = [(np.nan, None), (1, 2), (None, "rows"), (None, 1)]
    pushes += [(4, "rows"), (None, "rows"), (8, 2), (8, None)]

    step = jax.jit(functools.partial(stepped, tx, how=how))
    params = {k: jnp.zeros(x.shape, dtype) for k, x in dense.items()}
    state = tx.init(params)
    sums = {k: np.zeros(x.shape) for k, x in dense.items()}
    wanted = {k: np.zeros(x.shape) for k, x in dense.items()}
    for number, pushed in enumerate(pushes):
        grads = {}
        for (k, ones), g in zip(dense.items(), pushed, strict=True):
            of_rows = g == "rows"
            grads[k] = (
                g if g is None else rows if of_rows else jnp.asarray(g * ones, dtype)
            )
            sums[k] = sums[k] + (as_dense if of_rows else (g or 0) * ones)
        params, state = step(grads, state, params)
        if number == 1:  # The window of the NaN. It is taken out by hand.
            assert np.isnan(params["w"].astype("float32")).all()
            params = {**params, "w": jnp.zeros(4, dtype)}
            sums["w"] = np.zeros(4)
        if number % 2:
            for k in [k for k, g in grads.items() if g is not None]:
                wanted[k] = wanted[k] - 0.25 * sums[k]
                sums[k] = np.zeros_like(sums[k])
        for k, w in wanted.items():
            np.testing.assert_array_equal(params[k].astype("float32"), w)


def test_a_count_that_is_reset_begins_a_new_sum():
    """As in ``optax.MultiSteps``, whose running mean forgets the old one then, too."""
    tx = gx.accumulate(optax.sgd(1.0), 2)
    params = jnp.zeros(2)
    state = tx.init(params)
    _, state = tx.update(jnp.full(2, jnp.inf), state, params)
    state = state._replace(num_accumulated=jnp.int32(0))
    for g in (1.0, 3.0):
        updates, state = tx.update(jnp.full(2, g), state, params)
    np.testing.assert_array_equal(updates, [-2.0, -2.0])


def test_an_update_that_the_sum_cannot_hold_is_not_rounded():
    """The sum is bfloat16, so updates in float32 come out in arrays of their own."""
    inner = optax.stateless(lambda u, _: jax.tree.map(lambda x: x + 2**-20, u))
    tx = gx.accumulate(inner, 1, accumulator_dtype="bfloat16")
    params = jnp.zeros(2)
    updates, _ = tx.update(jnp.ones(2), tx.init(params), params)
    np.testing.assert_array_equal(updates, np.float32(1 + 2**-20))


@pytest.mark.parametrize("old", [400.0, np.nan])
def test_a_norm_sees_nothing_of_the_sum_before(old):
    inner = optax.chain(gx.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = gx.accumulate(inner, 1)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    _, state = gx.apply_gradients(
        tx, {"a": jnp.array([old]), "b": jnp.ones(1)}, tx.init(params), params
    )
    new, _ = gx.apply_gradients(tx, {"a": None, "b": jnp.full(1, 0.5)}, state, params)
    np.testing.assert_array_equal([new["a"], new["b"]], [[0.0], [-0.5]])


def test_on_gpu_the_gradient_of_a_matrix_waits_for_the_sum_before_it():
    """But not that of a table: it may be scattered into its sum."""
    tx = gx.accumulate(optax.sgd(0.1), 4)
    layers = {f"layer {i}": jnp.zeros((256, 256)) for i in range(3)}
    params = layers | {"table": jnp.zeros((2**14, 2)), "bias": jnp.zeros(256)}
    push = jax.jit(functools.partial(gx.apply_gradients, tx))
    traced = push.trace(params, tx.init(params), params)
    for platform, barriers in ("cuda", 2), ("rocm", 2), ("tpu", 0):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        # The zero of an empty sum has one, too.
        found = re.findall("optimization_barrier %.*: tensor<256x256xf32>", program)
        assert len(found) == barriers
