"""Sums of pushes on devices, in servers, and around transformations without ``None``.

The gradient of the whole batch is that of float64 NumPy.
"""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform import engines
from gradxform._jax import versions
from tests.conftest import half
from tests.descriptors import DESCRIPTORS
from tests.late.test_accumulator import stepped

DEVICES, BATCHES, ROWS = 8, 4, 3
RNG = np.random.default_rng(0)
X = RNG.standard_normal((BATCHES, DEVICES * ROWS, 5)).astype("float32")
Y = RNG.standard_normal((BATCHES, DEVICES * ROWS, 2)).astype("float32")
HELD = RNG.random((BATCHES, DEVICES * ROWS)) < 0.6  # Unequal numbers of tokens.
HELD[1, :ROWS] = False  # One device has none in one micro-batch.
PARAMS = {"w": jnp.ones((5, 2)), "b": jnp.zeros(2)}
unreduced = pytest.mark.skipif(
    not hasattr(P(), "to_ct_spec"), reason="JAX has unreduced gradients since 0.10"
)
promoting = pytest.mark.usefixtures("standard_promotion")  # optax's own code promotes.


def loss_fn(params, x, y, held):
    squares = jnp.square(x @ params["w"] + params["b"][None] - y).sum(1)
    total = jnp.sum(jnp.where(held, squares, 0))
    return total / jnp.maximum(jnp.sum(held, dtype="float32"), 1)


def whole_batch(held=HELD):
    """The gradient over all tokens of all devices and micro-batches, in float64."""
    x, y = (a[held].astype("float64") for a in (X, Y))
    residual = 2 * (x @ np.ones((5, 2)) - y) / len(x)
    return {"w": x.T @ residual, "b": residual.sum(0)}


def agrees(params, expected, rate=0.5):
    for name, g in expected.items():
        np.testing.assert_allclose(params[name], PARAMS[name] - rate * g, atol=1e-6)


def own(tree, axis="data"):
    """The tree as varying over the axis. So ``jax.grad`` adds nothing up."""
    return jax.tree.map(lambda x: versions.to_varying(x, [axis]), tree)


def tokens(x, y, held):
    return jnp.sum(held)


def train(tx, params, batches, *, before=own, how="apply", last=9, **extra):
    """A step inside of ``shard_map``: all its micro-batches, in a ``scan``."""

    def push(carry, pushed):
        (params, state), (batch, number) = carry, pushed
        grads = jax.grad(loss_fn)(before(params), *batch)
        given = {name: f(*batch) for name, f in extra.items()}
        given |= {"last": number == last} if last < BATCHES else {}
        return stepped(tx, grads, state, params, how, **given), None

    pushed = batches, jnp.arange(BATCHES)
    (params, state), _ = jax.lax.scan(push, (params, tx.init(params)), pushed)
    return params, state.inner_state, state.global_step, state.nonfinite_count


def on_devices(f, check=True, axis_types=(AxisType.Auto,), **kwargs):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types)
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=check, **kwargs))


def same(params):
    return params


SPECS = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
BATCH = X, Y, HELD


def micro_batches():
    return zip(*map(jnp.asarray, BATCH), strict=True)


# Ways to push: each trains PARAMS on all micro-batches, with their numbers of tokens.


def loop(tx, how):
    params, state = PARAMS, tx.init(PARAMS)
    for batch in micro_batches():
        grads = jax.grad(loss_fn)(params, *batch)
        params, state = stepped(tx, grads, state, params, how, weight=tokens(*batch))
    return params


def beside_another(tx, how):
    """Under vmap, beside a run that sees no token."""
    both = np.stack([np.zeros_like(HELD), HELD])
    run = functools.partial(train, tx, PARAMS, before=same, how=how, weight=tokens)
    return jax.tree.map(lambda x: x[1], jax.vmap(lambda h: run((X, Y, h))[0])(both))


def minimized(tx, how):
    step = gx.minimize(loss_fn, tx, donate=False)
    params, state = PARAMS, tx.init(PARAMS)
    for batch in micro_batches():
        params, state, _ = step(params, state, *batch, weight=tokens(*batch))
    return params


def server(tx, how):
    held = gx.ParameterServer(PARAMS, tx)
    for batch in micro_batches():
        held.push(jax.grad(loss_fn)(PARAMS, *batch), 0, weight=tokens(*batch))
    return held.pull()[0]


def sharded(tx, how, check=True):
    before = own if check else same
    f = functools.partial(train, tx, before=before, how=how, weight=tokens)
    return on_devices(f, check, **SPECS)(PARAMS, BATCH)[0]


def by_vmap(tx, how):
    def step(*batches):
        return train(tx, PARAMS, batches, before=same, how=how, weight=tokens)[0]

    parts = [a.reshape(BATCHES, DEVICES, ROWS, *a.shape[2:]) for a in BATCH]
    params = jax.vmap(step, 1, axis_name="data")(*parts)
    jax.tree.map(lambda p: np.testing.assert_array_equal(p, p[:1].repeat(8, 0)), params)
    return jax.tree.map(lambda p: p[0], params)


ALONE = loop, beside_another, minimized, server
WAYS = [*ALONE, sharded, functools.partial(sharded, check=False), by_vmap]


@promoting
@pytest.mark.parametrize("number", range(2 * len(WAYS)))
def test_weights_give_the_gradient_of_the_whole_batch(number):
    """The mean of means is another number."""
    way, how = WAYS[number // 2], ["apply", "update"][number % 2]
    tx = gx.accumulate(
        optax.sgd(0.5, momentum=0.9),
        4,
        axis_name=None if way in ALONE else "data",
        skip_nonfinite=(number // 2 + number) % 2 == 0,
    )
    agrees(way(tx, how), whole_batch())


def reduced_before(params):
    """``jax.grad`` adds the gradients up by itself: they are equal on all devices."""
    return {"w": own(params["w"]), "b": params["b"]}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_that_are_summed_already_stay_right(reduction):
    """The gradient of ``b`` is added up over the devices."""
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name=("data",), reduction=reduction)
    held = np.ones_like(HELD)
    step = on_devices(functools.partial(train, tx, before=reduced_before), **SPECS)
    params, *_ = step(PARAMS, (X, Y, held))
    expected = whole_batch(held)
    expected["b"] = expected["b"] * DEVICES
    factor = BATCHES if reduction == "sum" else 1
    agrees(params, {name: factor * g for name, g in expected.items()})


@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
def test_the_last_push_and_a_push_that_one_device_cannot_take(check):
    """One device has NaN: all leave the push out. The last one makes the step."""
    x, held = X.copy(), HELD.copy()
    x[2, 0] = np.nan  # Of the first device.
    tx = gx.accumulate(optax.sgd(0.5), 9, axis_name="data", skip_nonfinite=True)
    before = own if check else same
    step = functools.partial(train, tx, before=before, weight=tokens, last=BATCHES - 1)
    params, _, steps, left_out = on_devices(step, check, **SPECS)(PARAMS, (x, Y, HELD))
    held[2] = False
    agrees(params, whole_batch(held))
    assert (steps, left_out) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_devices_leave_a_push_out_together(apart):
    """They do, unless each device counts its steps for itself."""
    tx = gx.accumulate(optax.sgd(1.0), 1, skip_nonfinite=True)

    def push(grads):
        given = {"sharded": jnp.zeros_like(grads), "whole": jnp.zeros(())}
        given = given, tx.init(given)
        own = jax.lax.axis_index("data")
        if apart:
            given = jax.tree.map(lambda x: x + (0 * own).astype(x.dtype), given)
        grads = {"sharded": grads, "whole": given[0]["whole"] + 1}
        params, state = gx.apply_gradients(tx, grads, *given[::-1])
        return params["sharded"], (0 * own + state.nonfinite_count)[None]

    push = on_devices(push, in_specs=P("data"), out_specs=P("data"))
    params, left_out = push(jnp.ones(8).at[5].set(jnp.nan))
    expected = np.arange(8) == 5 if apart else np.ones(8)
    assert left_out.tolist() == expected.tolist()
    assert params.tolist() == (expected - 1).tolist()


@pytest.mark.parametrize(
    ("reduction", "check"), half(["mean", "sum", "row_mean"], [True, False])
)
def test_rows_of_tables_on_devices(reduction, check):
    """Each device has rows of its own, and weights of its own; row 4 is nobody's."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 4, (2, DEVICES, 3)).astype("int32")
    values = rng.standard_normal((2, DEVICES, 3, 2)).astype("float32")
    weights = rng.integers(0, 4, (2, DEVICES)).astype("int32")
    tx = gx.accumulate(optax.sgd(1.0), 2, axis_name="data", reduction=reduction)

    def step(table, *batches):
        def push(carry, pushed):
            ids, values, weight = (x[0] for x in pushed)
            rows = gx.IndexedSlices(ids, values, (5, 2))
            return gx.apply_gradients(tx, rows, *carry[::-1], weight=weight), None

        return jax.lax.scan(push, (table, tx.init(table)), batches)[0][0]

    specs = {"in_specs": (P(), *[P(None, "data")] * 3), "out_specs": P()}
    table = on_devices(step, check, **specs)(jnp.zeros((5, 2)), ids, values, weights)
    total, of_rows = np.zeros((5, 2)), np.zeros((5, 1))
    flat = (a.reshape(-1, *a.shape[2:]) for a in (ids, values, weights))
    for i, v, w in zip(*flat, strict=True):
        np.add.at(total, i, w * v.astype("float64"))
        of_rows[np.unique(i)] += w
    divisor = {
        "mean": weights.sum(),
        "sum": DEVICES,  # A sum of means over devices.
        "row_mean": np.where(of_rows, of_rows, 1),
    }[reduction]
    np.testing.assert_allclose(table, -total / divisor, rtol=1e-5, atol=1e-6)


def test_types_do_not_change():
    """Those of the sum say that each device has its own."""
    tx = gx.accumulate(gx.adagrad(0.1), 3, axis_name="data", reduction="row_mean")

    def types(tree):  # Before JAX 0.8 a constant is of another mesh, or of none.
        kinds = map(jax.typeof, jax.tree.leaves(tree))
        return [
            (x.shape, x.dtype, x.weak_type, versions.varying_axes(x)) for x in kinds
        ]

    def step(params, grads):
        state = tx.init(params)
        for given in (
            grads,
            {**grads, "v": None},
            jax.tree.map(jnp.zeros_like, params),
        ):
            for how in ("apply", "update"):
                new, after = stepped(tx, given, state, params, how)
                assert types(after) == types(state)
                assert types(new) == types(params) or how == "update"
        varying = versions.varying_axes
        assert varying(jax.typeof(state.accumulated["w"])) == {"data"}
        assert not varying(jax.typeof(state.num_accumulated))
        return state.global_step

    def inside(params, grads):
        return step(params, {"w": grads["w"], "v": grads["v"][0]})

    params = {"w": jnp.ones(4, "bfloat16"), "v": jnp.ones((), "bfloat16")}
    grads = {"w": jnp.ones(8 * 4, "bfloat16"), "v": jnp.ones((8,), "bfloat16")}
    on_devices(inside, in_specs=(P(), P("data")), out_specs=P())(params, grads)


# Explicit axes, where the type of a gradient says that it is not summed yet.


def explicit():
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Explicit,))
    return jax.set_mesh(mesh)


def explicit_step(tx, how="apply", loss_fn=loss_fn, **extra):
    """A step whose gradients of ``w`` are not summed over "data"."""

    def push(carry, batch):
        params, state = carry
        seen = {
            k: reshard(p, P(reduced={"data"})) if k == "w" else p
            for k, p in params.items()
        }
        grads = jax.grad(loss_fn)(seen, *batch)
        given = {name: f(*batch) for name, f in extra.items()}
        return stepped(tx, grads, state, params, how, **given), None

    return jax.jit(lambda p, s, batches: jax.lax.scan(push, (p, s), batches)[0])


def explicitly(params, batches):
    return jax.device_put(params, P()), jax.device_put(batches, P(None, "data"))


@unreduced
@pytest.mark.parametrize(
    ("init", "how", "sums"),
    half(["eager", "jit"], ["apply", "update"], [None, "bfloat16"]),
)
def test_unreduced_gradients_are_added_as_they_are(how, sums, init):
    inner = optax.sgd(0.5, momentum=0.9)
    tx = gx.accumulate(inner, 4, axis_name="data", accumulator_dtype=sums)
    with explicit():
        params, batches = explicitly(PARAMS, BATCH)
        state = (jax.jit(tx.init) if init == "jit" else tx.init)(params)
        types = jax.tree.map(jax.typeof, (params, state))
        assert versions.unreduced_axes(types[1].accumulated["w"]) == {"data"}
        step = explicit_step(tx, how, weight=tokens)
        params, state = step(params, state, batches)
        assert jax.tree.map(jax.typeof, (params, state)) == types
        for name, g in whole_batch().items():
            wanted = PARAMS[name] - 0.5 * g
            atol = 2e-2 if sums else 1e-6
            np.testing.assert_allclose(params[name], wanted, atol=atol)


@unreduced
def test_unreduced_gradients_without_axis_name_and_skip_nonfinite():
    with explicit():
        params, batches = explicitly(PARAMS, BATCH)
        for options, message in (
            ({}, r"not summed over data yet at \['w'\].*axis_name"),
            ({"axis_name": "data", "skip_nonfinite": True}, "skip_nonfinite"),
        ):
            tx = gx.accumulate(optax.sgd(0.5), 4, **options)
            with pytest.raises(ValueError, match=message):
                explicit_step(tx)(params, tx.init(params), batches)


def all_reduces(step, *args):
    """How many there are in the bodies of loops, and elsewhere."""
    text = step.lower(*args).compile().as_text()
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    counts = {True: 0, False: 0}
    for part in text.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+)", part)
        number = sum(part.count(f" all-reduce{end}(") for end in ("", "-start"))
        counts[name is not None and name[1] in bodies] += number
    return counts[True], counts[False]


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
def test_no_loop_adds_up_gradients(check):
    """Weights are counted by each device, so nothing is known of the others' yet."""
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")
    f = functools.partial(train, tx, before=own if check else same, weight=tokens)
    assert all_reduces(on_devices(f, check, **SPECS), PARAMS, BATCH) == (0, 1)
    if check:  # As it is if gradients are summed before.
        step = on_devices(functools.partial(train, tx, before=same), **SPECS)
        within, _ = all_reduces(step, PARAMS, BATCH)
        assert within > 0


@unreduced
@pytest.mark.figures
def test_no_loop_adds_up_unreduced_gradients():
    def loss(params, x, y):
        return jnp.sum(jnp.square(x @ params["w"] - y))

    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")
    with explicit():
        params, batches = explicitly({"w": PARAMS["w"]}, (X, Y))
        step = explicit_step(tx, loss_fn=loss, weight=lambda *_: 3)
        assert all_reduces(step, params, tx.init(params), batches) == (0, 1)


def test_what_differs_between_devices():
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")

    def last(params, batches):
        state, device = tx.init(params), jax.lax.axis_index("data")
        return gx.apply_gradients(tx, params, state, params, last=device == 0)

    def apart(params, batches):
        return tx.init(own(params)).global_step

    for f, message in (
        (last, "last must be equal on all devices"),
        (apart, r"params must be equal .* over data at \['b'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            on_devices(f, **SPECS)(PARAMS, BATCH)


# Servers and engines.


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
    wanted = -(1 + 4 + 9) / 6 - (16 + 25) / 9
    np.testing.assert_allclose(params, wanted, rtol=1e-6)


def test_a_server_refuses_what_is_no_weight():
    server = gx.ParameterServer(jnp.zeros(()), gx.accumulate(optax.sgd(1.0), 2))
    for extra, error, message in (
        ({"weight": -1}, ValueError, r"weight must be in \[0, inf\), got"),
        ({"weight": jnp.float32(-2)}, ValueError, r"weight must be in \[0, inf\), got"),
        ({"weight": jnp.ones(2)}, TypeError, "weight must be a real scalar"),
        ({"last": 1}, TypeError, "last must be a bool"),
    ):
        with pytest.raises(error, match=message):
            server.push(jnp.ones(()), 0, **extra)
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


# Leaves without a gradient, and transformations that have never heard of `None`.

INNER = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.5),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.1),
    "chain": lambda: optax.chain(
        gx.clip_by_global_norm(1.0), optax.lion(0.1), gx.scale_by_learning_rate(0.5)
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
}
GATES = {
    "none": (lambda tx: tx, {}),
    "drop_stale": (lambda tx: gx.drop_stale(tx, 0), {"local_step": 99}),
    "accumulate": (lambda tx: gx.accumulate(tx, 2), {}),
    "both": (lambda tx: gx.drop_stale(gx.accumulate(tx, 2), 0), {"local_step": 99}),
}


def start():
    return {
        "w": jnp.array([[1.0, -2.0], [0.5, 3.0]]),
        # The integers are not first: an old inject_hyperparams takes its dtype from
        # there.
        "frozen": {"v": jnp.array([4.0, 5.0]), "whole": jnp.array([1, 2])},
    }


def grads(t, frozen=None):
    nothing = {"v": None, "whole": None}
    return {"w": jnp.cos(t + start()["w"]), "frozen": frozen or nothing}


def by_path(tree):
    flat = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


@promoting
@pytest.mark.parametrize(
    ("inner", "gate", "how"),
    [
        *((inner, "none", "apply") for inner in INNER),
        *(("adamw", gate, "update") for gate in GATES if gate != "none"),
        *(("sgd", gate, "scan") for gate in GATES),
    ],
)
def test_it_stays_and_the_others_do_not_notice(inner, gate, how):
    around, extra = GATES[gate]
    tx = around(INNER[inner]())

    def push(carry, g):
        way = "update" if how == "update" else "apply"
        return stepped(tx, g, *carry[::-1], way, **extra), None

    def train(params, grads_of):
        carry = params, tx.init(params)
        if how == "scan":
            stacked = jax.tree.map(lambda *g: jnp.stack(g), *map(grads_of, range(4)))
            return jax.lax.scan(push, carry, stacked)[0]
        for t in range(4):
            carry, _ = jax.jit(push)(carry, grads_of(t))
        return carry

    params, state = train(start(), grads)
    of_w = {"w": start()["w"]}
    expected, expected_state = train(of_w, lambda t: {"w": grads(t)["w"]})
    chex.assert_trees_all_equal(params["frozen"], start()["frozen"])
    chex.assert_trees_all_close(params["w"], expected["w"], rtol=1e-6)
    before, after = by_path(tx.init(start())), by_path(state)
    assert before.keys() == after.keys()
    for path, wanted in by_path(expected_state).items():
        if "accumulated[" in path:  # It means nothing after a step.
            del after[path]
        elif path.endswith(("carried", "leaf_weights")):  # One number for each leaf.
            assert after.pop(path).tolist() == [0, 0, *wanted]
        else:
            np.testing.assert_allclose(after.pop(path), wanted, rtol=1e-5, err_msg=path)
    chex.assert_trees_all_equal(after, {path: before[path] for path in after})


@pytest.mark.slow
@promoting
def test_a_line_search_sees_all_parameters():
    def loss_fn(params):
        return jnp.sum((params["w"] - params["frozen"]["v"]) ** 2)

    def trained(params, loss_fn, missing):
        tx = optax.lbfgs()
        state = tx.init(params)
        for _ in range(3):
            value, g = jax.value_and_grad(loss_fn, allow_int=True)(params)
            g = {"w": g["w"], **missing}
            params, state = gx.apply_gradients(
                tx, g, state, params, value=value, grad=g, value_fn=loss_fn
            )
        return params

    frozen, w = {"v": start()["frozen"]["v"]}, {"w": start()["w"]}
    got = trained({**w, "frozen": frozen}, loss_fn, {"frozen": {"v": None}})
    expected = trained(w, lambda p: loss_fn({**p, "frozen": frozen}), {})
    chex.assert_trees_all_equal(got["frozen"], frozen)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5)
    np.testing.assert_allclose(got["w"], [[4, 5], [4, 5]], rtol=1e-4)


@pytest.mark.slow
@promoting
def test_an_accumulator_inside_a_chain_gets_none():
    tx = optax.chain(gx.clip_by_global_norm(1e9), gx.accumulate(optax.adam(0.1), 2))
    params, step = start(), jax.jit(functools.partial(gx.apply_gradients, tx))
    state = jax.jit(tx.init)(params)
    for v in (None, jnp.ones(2)):
        g = grads(0, {"v": v, "whole": None})
        params, state = step(g, state, params)
    np.testing.assert_allclose(params["frozen"]["v"], [3.9, 4.9], rtol=1e-5)

    def add(updates, state, params=None):
        return jax.tree.map(jnp.add, updates, state), state

    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    knows_no_none = optax.GradientTransformation(zeros, add)
    wrong = optax.chain(knows_no_none, gx.accumulate(optax.sgd(0.1), 2))
    with pytest.raises(ValueError, match="an accumulator or a delay inside of it"):
        gx.apply_gradients(wrong, grads(0), wrong.init(start()), start())


@promoting
def test_inside_of_shard_map():
    tx = gx.drop_stale(optax.adam(0.1), 0)

    def push(w):
        params = {"w": w, "frozen": 2 * w}
        g, state = {"w": w, "frozen": None}, tx.init(params)
        params, _ = gx.apply_gradients(tx, g, state, params, local_step=0)
        return params["w"], params["frozen"]

    push = on_devices(push, in_specs=P("data"), out_specs=P("data"))
    w, frozen = push(jnp.arange(1.0, 9.0))
    np.testing.assert_allclose(w, np.arange(1, 9) - 0.1, rtol=1e-5)
    assert frozen.tolist() == list(range(2, 18, 2))


@promoting
def test_init_is_not_called_if_every_leaf_has_a_gradient():
    adam = optax.adam(0.1)
    params = {"w": jnp.ones(2), "none": None}
    state = adam.init(params)

    def init(params):
        raise AssertionError("init was called")

    tx = optax.GradientTransformation(init, adam.update)
    got = gx.apply_gradients(tx, params, state, params)
    updates, expected_state = adam.update(params, state, params)
    expected = optax.apply_updates(params, updates), expected_state
    chex.assert_trees_all_equal(got, expected)


def test_transformations_that_handle_none_are_called_unchanged():
    """Its ``init`` reads the parameters by their names, so it takes no other tree."""

    def init(params):
        return params["w"].shape[0] * params["frozen"]["v"]

    def update(updates, state, params=None):
        assert updates["frozen"]["v"] is None
        return jax.tree.map(lambda g: -g, updates), state + 1

    tx = optax.GradientTransformation(init, update)
    params, state = gx.apply_gradients(tx, grads(0), init(start()), start())
    assert state.tolist() == [9.0, 11.0]
    np.testing.assert_allclose(params["w"], start()["w"] - grads(0)["w"], rtol=1e-6)


# There are other signs for no gradient: JAX gives a `float0` for integers, which no
# operation takes, and optax masks with a node.
SIGNS = {"float0": np.zeros(2, jax.dtypes.float0), "masked": optax.MaskedNode()}
FLOATING = ("master_weights", "round_stochastically")  # They refuse integers.
INTEGERS = {"frozen": jnp.array([1, 2]), "w": jnp.array([[1.0, -2.0], [0.5, 3.0]])}


@pytest.mark.parametrize(
    "row", [row for row in DESCRIPTORS if row.name not in FLOATING], ids=str
)
def test_a_gradient_of_integers_equals_none(row):
    tx, how = row.make(), ["apply", "update"][DESCRIPTORS.index(row) % 2]
    extra = row.extra(INTEGERS)

    def trained(nothing):
        p, state = INTEGERS, tx.init(INTEGERS)
        for t in range(2):
            g = {"w": jnp.cos(t + INTEGERS["w"]), "frozen": nothing}
            p, state = stepped(tx, g, state, p, how, **extra)
        return p, state

    expected = trained(None)
    chex.assert_trees_all_equal(expected[0]["frozen"], INTEGERS["frozen"])
    for nothing in SIGNS.values():
        chex.assert_trees_all_equal(trained(nothing), expected)


@pytest.mark.parametrize("sign", SIGNS)
def test_it_may_be_pushed_unless_it_is_all(sign):
    tx, nothing = gx.adagrad(0.1), SIGNS[sign]
    server = gx.ParameterServer(INTEGERS, gx.drop_stale(tx, 1), require_finite=True)
    g = {"w": jnp.ones((2, 2)), "frozen": nothing}
    assert server.push(g, 0).applied
    got, step = server.pull()
    assert step == 1
    chex.assert_trees_all_equal(got["frozen"], INTEGERS["frozen"])
    wanted = np.float64(INTEGERS["w"]) - 0.1 / np.sqrt(1.1)
    np.testing.assert_allclose(got["w"], wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="grads has no gradient for any leaf"):
        gx.apply_gradients(tx, {**g, "w": None}, tx.init(INTEGERS), INTEGERS)


@pytest.mark.slow
@promoting
@pytest.mark.parametrize(
    ("hidden", "gradient"),
    [("masked", True), ("partition", True), ("partition", False), ("None", False)],
)
def test_a_worker_may_send_all_of_its_parameters(hidden, gradient):
    """``optax.masked`` hides leaves of the gradients, and of no extra argument."""
    inner = optax.chain(gx.compensate_delay(0.5), optax.adam(0.1))
    parts = {"outer": inner, "none": optax.set_to_zero()}
    tx = {
        "masked": optax.masked(inner, {"w": True, "frozen": False}),
        "partition": optax.partition(parts, {"w": "outer", "frozen": "none"}),
        "None": inner,
    }[hidden]
    params = {"w": start()["w"], "frozen": {"v": jnp.ones(2)}}
    g = {"w": grads(0)["w"], "frozen": {"v": jnp.zeros(2) if gradient else None}}
    worker = jax.tree.map(lambda p: p - 1, params)
    state = tx.init(params)
    got, _ = gx.apply_gradients(tx, g, state, params, worker_params=worker)
    chex.assert_trees_all_equal(got["frozen"], params["frozen"])
    # The first step of optax's Adam, in float64; w - worker is 1.
    wide = np.asarray(g["w"], np.float64)
    wide = wide + 0.5 * wide**2
    wanted = params["w"] - 0.1 * wide / (np.abs(wide) + 1e-8)
    np.testing.assert_allclose(got["w"], wanted, rtol=1e-5)


def test_a_part_of_a_table_beside_a_leaf_without_a_gradient():
    """The trees beside it hold rows there, and lose the leaf as well."""
    tx = optax.chain(gx.compensate_delay(0.5), gx.scale_by_learning_rate(1.0))
    params = {"table": jnp.ones((4, 1)), "frozen": jnp.ones(2)}
    part = gx.IndexedSlices([0, 2], jnp.zeros((2, 1)), (4, 1))
    rows = gx.IndexedSlices([2], jnp.ones((1, 1)), (4, 1))
    g, worker = {"table": rows, "frozen": None}, {"table": part, "frozen": jnp.zeros(2)}
    state = tx.init(params)
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    got, _ = step(g, state, params, worker_params=worker)
    assert got["table"].ravel().tolist() == [1.0, 1.0, 1.0 - (1 + 0.5), 1.0]
    assert got["frozen"].tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("nothing", [{"a": None}, {"a": optax.MaskedNode()}])
def test_a_parameter_that_is_none_does_not_hide_that_another_has_acted(nothing):
    """One leaf has no gradient in the last push of a window, so its sum waits."""
    tx = gx.accumulate(optax.sgd(1.0, momentum=0.5), 2)
    params = {**nothing, "b": jnp.zeros(1), "z": jnp.zeros(1)}
    state = tx.init(params)
    for b in (jnp.ones(1), None, jnp.ones(1), jnp.ones(1)):
        g = {**nothing, "b": b, "z": jnp.ones(1)}
        params, state = gx.apply_gradients(tx, g, state, params)
    # b has one step of 3/3. z has two of 1, and the second one is half longer.
    assert (params["b"], params["z"]) == (-1.0, -2.5)
