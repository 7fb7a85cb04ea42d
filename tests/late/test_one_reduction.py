"""Devices add up their gradients once a step, and not with every micro-batch."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import versions

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


def loss_fn(params, x, y, held):
    squares = jnp.square(x @ params["w"] + params["b"][None] - y).sum(1)
    total = jnp.sum(jnp.where(held, squares, 0))
    return total / jnp.maximum(jnp.sum(held, dtype="float32"), 1)


def whole_batch(held=HELD):
    """The gradient over all tokens of all devices and micro-batches, in float64."""
    x, y = (a[held].astype("float64") for a in (X, Y))
    residual = 2 * (x @ np.ones((5, 2)) - y) / len(x)
    return {"w": x.T @ residual, "b": residual.sum(0)}


def own(tree, axis="data"):
    """The tree as varying over the axis. So ``jax.grad`` adds nothing up."""
    return jax.tree.map(lambda x: versions.to_varying(x, [axis]), tree)


def on_devices(f, check=True, axis_types=(AxisType.Auto,), **kwargs):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types)
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=check, **kwargs))


def stepped(tx, grads, state, params, how, **extra):
    """New parameters and state, by one call or by two."""
    if how == "apply":
        return gx.apply_gradients(tx, grads, state, params, **extra)
    updates, state = tx.update(grads, state, params, **extra)
    return gx.apply_updates(params, updates), state


def train(tx, params, batches, *, check=True, before=own, how="apply", last=9, **extra):
    """A step inside of ``shard_map``: all its micro-batches, in a ``scan``."""
    state = tx.init(params)

    def push(carry, pushed):
        (params, state), (batch, number) = carry, pushed
        seen = before(params) if check else params
        grads = jax.grad(loss_fn)(seen, *batch)
        given = {name: f(*batch) for name, f in extra.items()}
        given |= {"last": number == last} if last < BATCHES else {}
        return stepped(tx, grads, state, params, how, **given), None

    pushed = batches, jnp.arange(BATCHES)
    (params, state), _ = jax.lax.scan(push, (params, state), pushed)
    return params, state.inner_state, state.global_step, state.nonfinite_count


SPECS = {"in_specs": (P(), P(None, "data")), "out_specs": P()}


def tokens(x, y, held):
    return jnp.sum(held)


def agrees(params, expected, rate=0.5):
    for name, g in expected.items():
        np.testing.assert_allclose(params[name], PARAMS[name] - rate * g, atol=1e-6)


@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize("skip", [False, True])
def test_the_mean_over_devices_is_that_of_the_whole_batch(check, how, skip):
    tx = gx.accumulate(
        optax.sgd(0.5, momentum=0.9), 4, axis_name="data", skip_nonfinite=skip
    )
    step = on_devices(
        functools.partial(train, tx, check=check, how=how, weight=tokens),
        check,
        **SPECS,
    )
    params, inner, steps, left_out = step(PARAMS, (X, Y, HELD))
    agrees(params, whole_batch())
    np.testing.assert_allclose(inner[0].trace["b"], whole_batch()["b"], atol=1e-6)
    assert (steps, left_out) == (1, 0)


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
    x = X.copy()
    x[2, 0] = np.nan  # Of the first device.
    tx = gx.accumulate(optax.sgd(0.5), 9, axis_name="data", skip_nonfinite=True)
    held = HELD.copy()
    step = functools.partial(train, tx, check=check, weight=tokens, last=BATCHES - 1)
    step = on_devices(step, check, **SPECS)
    params, _, steps, left_out = step(PARAMS, (x, Y, held))
    held[2] = False
    agrees(params, whole_batch(held))
    assert (steps, left_out) == (1, 1)


@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "row_mean"])
def test_rows_of_tables_on_devices(reduction, check):
    """Each device has rows of its own, and weights of its own; row 4 is nobody's."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 4, (2, DEVICES, 3)).astype("int32")
    values = rng.standard_normal((2, DEVICES, 3, 2)).astype("float32")
    weights = rng.integers(0, 4, (2, DEVICES)).astype("int32")
    tx = gx.accumulate(optax.sgd(1.0), 2, axis_name="data", reduction=reduction)

    def step(table, ids, values, weights):
        state = tx.init(table)

        def push(carry, pushed):
            table, state = carry
            ids, values, weight = (x[0] for x in pushed)
            rows = gx.IndexedSlices(ids, values, (5, 2))
            return gx.apply_gradients(tx, rows, state, table, weight=weight), None

        return jax.lax.scan(push, (table, state), (ids, values, weights))[0][0]

    step = on_devices(
        step, check, in_specs=(P(), *[P(None, "data")] * 3), out_specs=P()
    )
    table = step(jnp.zeros((5, 2)), ids, values, weights)
    total, of_rows = np.zeros((5, 2)), np.zeros((5, 1))
    for i, v, w in zip(
        *(a.reshape(-1, *a.shape[2:]) for a in (ids, values, weights)), strict=True
    ):
        np.add.at(total, i, w * v.astype("float64"))
        of_rows[np.unique(i)] += w
    divisor = {
        "mean": weights.sum(),
        "sum": DEVICES,  # A sum of means over devices.
        "row_mean": np.where(of_rows, of_rows, 1),
    }[reduction]
    np.testing.assert_allclose(table, -total / divisor, rtol=1e-5, atol=1e-6)


def test_devices_that_vmap_makes():
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")

    def step(*batches):
        return train(tx, PARAMS, batches, check=False, weight=tokens)[0]

    split = [
        np.moveaxis(a.reshape(BATCHES, DEVICES, ROWS, *a.shape[2:]), 1, 0)
        for a in (X, Y, HELD)
    ]
    params = jax.vmap(step, axis_name="data")(*split)
    for device in range(DEVICES):
        agrees(jax.tree.map(lambda p: p[device], params), whole_batch())  # noqa: B023


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_types_do_not_change(dtype):
    """Those of the sum say that each device has its own."""
    tx = gx.accumulate(gx.adagrad(0.1), 3, axis_name="data", reduction="row_mean")

    def type_of(x):  # Before JAX 0.8 a constant is of another mesh, or of none.
        x = jax.typeof(x)
        return x.shape, x.dtype, x.weak_type, versions.varying_axes(x)

    def step(params, grads):
        state = tx.init(params)
        types = jax.tree.map(type_of, (params, state))
        for given in (
            grads,
            {**grads, "v": None},
            jax.tree.map(jnp.zeros_like, params),
        ):
            for push in (gx.apply_gradients, lambda tx, *args: tx.update(*args)):
                new, after = push(tx, given, state, params)
                assert jax.tree.map(type_of, after) == types[1]
                if push is gx.apply_gradients:
                    assert jax.tree.map(type_of, new) == types[0]
        varying = versions.varying_axes
        assert varying(jax.typeof(state.accumulated["w"])) == {"data"}
        assert not varying(jax.typeof(state.num_accumulated))
        return state.global_step

    params = {"w": jnp.ones(4, dtype), "v": jnp.ones((), dtype)}
    grads = {"w": jnp.ones(8 * 4, dtype), "v": jnp.ones((8,), dtype)}

    def inside(params, grads):
        return step(params, {"w": grads["w"], "v": grads["v"][0]})

    on_devices(inside, in_specs=(P(), P("data")), out_specs=P())(params, grads)


# Explicit axes, where the type of a gradient says that it is not summed yet.


def explicit_step(tx, how="apply", names=("w",), **extra):
    """A step whose gradients of ``names`` are not summed over "data"."""

    def push(carry, batch):
        params, state = carry
        seen = {
            k: reshard(p, P(reduced={"data"})) if k in names else p
            for k, p in params.items()
        }
        grads = jax.grad(loss_fn)(seen, *batch)
        given = {name: f(*batch) for name, f in extra.items()}
        return stepped(tx, grads, state, params, how, **given), None

    return jax.jit(lambda p, s, batches: jax.lax.scan(push, (p, s), batches)[0])


def explicitly(params, batches):
    return jax.device_put(params, P()), jax.device_put(batches, P(None, "data"))


@unreduced
@pytest.mark.parametrize("sums", [None, "bfloat16"])
@pytest.mark.parametrize("how", ["apply", "update"])
@pytest.mark.parametrize("init", ["eager", "jit"])
def test_unreduced_gradients_are_added_as_they_are(how, sums, init):
    tx = gx.accumulate(
        optax.sgd(0.5, momentum=0.9), 4, axis_name="data", accumulator_dtype=sums
    )
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params, batches = explicitly(PARAMS, (X, Y, HELD))
        state = (jax.jit(tx.init) if init == "jit" else tx.init)(params)
        types = jax.tree.map(jax.typeof, (params, state))
        assert versions.unreduced_axes(types[1].accumulated["w"]) == {"data"}
        step = explicit_step(tx, how, weight=tokens)
        params, state = step(params, state, batches)
        assert jax.tree.map(jax.typeof, (params, state)) == types
        expected = whole_batch()
        if sums is None:
            agrees(params, expected)
            agrees(step(params, state, batches)[0], {})
        for name, g in expected.items():
            wanted = PARAMS[name] - 0.5 * g
            np.testing.assert_allclose(params[name], wanted, atol=2e-2)


@unreduced
def test_unreduced_gradients_without_axis_name_and_skip_nonfinite():
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params, batches = explicitly(PARAMS, (X, Y, HELD))
        tx = gx.accumulate(optax.sgd(0.5), 4)
        with pytest.raises(
            ValueError, match=r"not summed over data yet at \['w'\].*axis_name"
        ):
            explicit_step(tx)(params, tx.init(params), batches)
        tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data", skip_nonfinite=True)
        with pytest.raises(ValueError, match="skip_nonfinite"):
            explicit_step(tx)(params, tx.init(params), batches)


# What is compiled.


def all_reduces(compiled):
    """How many there are in the bodies of loops, and elsewhere."""
    text = compiled.as_text()
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    counts = {True: 0, False: 0}
    for part in text.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+)", part)
        number = sum(part.count(f" all-reduce{end}(") for end in ("", "-start"))
        counts[name is not None and name[1] in bodies] += number
    return counts[True], counts[False]


@pytest.mark.figures
@pytest.mark.parametrize("check", [True, False], ids=["vma", "no vma"])
def test_no_loop_adds_up_gradients(check):
    """Weights are counted by each device, so nothing is known of the others' yet."""
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")
    step = functools.partial(train, tx, check=check, weight=tokens)
    step = on_devices(step, check, **SPECS)
    assert all_reduces(step.lower(PARAMS, (X, Y, HELD)).compile()) == (0, 1)
    if check:  # As it is if gradients are summed before.
        step = functools.partial(train, tx, before=lambda params: params)
        step = on_devices(step, **SPECS)
        within, _ = all_reduces(step.lower(PARAMS, (X, Y, HELD)).compile())
        assert within > 0


@unreduced
@pytest.mark.figures
def test_no_loop_adds_up_unreduced_gradients():
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")
    mesh = jax.make_mesh((DEVICES,), ("data",), (AxisType.Explicit,))

    def loss(params, x, y):
        return jnp.sum(jnp.square(x @ params["w"] - y))

    def push(carry, batch):
        params, state = carry
        grads = jax.grad(loss)(reshard(params, P(reduced={"data"})), *batch)
        return gx.apply_gradients(tx, grads, state, params, weight=3), None

    with jax.set_mesh(mesh):
        params, batches = explicitly({"w": PARAMS["w"]}, (X, Y))
        step = jax.jit(lambda p, s, b: jax.lax.scan(push, (p, s), b)[0])
        lowered = step.lower(params, tx.init(params), batches)
        assert all_reduces(lowered.compile()) == (0, 1)


# Bad input.


def test_axis_name_is_one_of_a_mesh():
    for name in (1, [2], {"w": P("data")}, P("data")):
        with pytest.raises(
            TypeError, match="axis_name must be a mesh axis, or several"
        ):
            gx.accumulate(optax.sgd(0.5), 4, axis_name=name)
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match="'data' is neither an axis of a shard_map"):
        tx.update(PARAMS, state, PARAMS)


def test_what_differs_between_devices():
    tx = gx.accumulate(optax.sgd(0.5), 4, axis_name="data")

    def last(params, batches):
        del batches
        state, device = tx.init(params), jax.lax.axis_index("data")
        return gx.apply_gradients(tx, params, state, params, last=device == 0)

    with pytest.raises(ValueError, match="last must be equal on all devices"):
        on_devices(last, **SPECS)(PARAMS, (X, Y, HELD))

    def sharded(params, batches):
        del batches
        return tx.init(own(params)).global_step

    with pytest.raises(
        ValueError, match=r"params must be equal .* over data at \['b'\]"
    ):
        on_devices(sharded, **SPECS)(PARAMS, (X, Y, HELD))
