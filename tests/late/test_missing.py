"""Leaves without a gradient, and transformations that have never heard of ``None``."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.descriptors import DESCRIPTORS
from tests.late.test_one_reduction import stepped

pytestmark = pytest.mark.usefixtures("standard_promotion")

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
    "conditional_accumulator": (
        lambda tx: gx.conditional_accumulator(tx, 2),
        {"local_step": 99},
    ),
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
        params, state = carry
        way = "apply" if how == "scan" else how
        return stepped(tx, g, state, params, way, **extra), None

    def train(params, grads_of):
        carry = params, tx.init(params)
        if how == "scan":
            stacked = jax.tree.map(lambda *g: jnp.stack(g), *map(grads_of, range(4)))
            return jax.lax.scan(push, carry, stacked)[0]
        for t in range(4):
            carry, _ = jax.jit(push)(carry, grads_of(t))
        return carry

    params, state = train(start(), grads)
    expected, expected_state = train(
        {"w": start()["w"]}, lambda t: {"w": grads(t)["w"]}
    )
    chex.assert_trees_all_equal(params["frozen"], start()["frozen"])
    chex.assert_trees_all_close(params["w"], expected["w"], rtol=1e-6)
    before, after = by_path(tx.init(start())), by_path(state)
    assert before.keys() == after.keys()
    # The sums of the frozen leaves, which are 0, go on after each step.
    carried = [after.pop(path) for path in before if path.endswith("carried")]
    assert carried == [True] * (gate not in ("none", "drop_stale"))
    wanted_state = by_path(expected_state)
    for path in [path for path in wanted_state if path.endswith("carried")]:
        del wanted_state[path]
    for path in [path for path in wanted_state if "accumulated[" in path]:
        del wanted_state[path], after[path]  # It means nothing here, and 0 there.
    for path, wanted in wanted_state.items():
        np.testing.assert_allclose(after.pop(path), wanted, rtol=1e-5, err_msg=path)
    chex.assert_trees_all_equal(after, {path: before[path] for path in after})


@pytest.mark.parametrize(
    ("pushes", "moves"),
    [([0.0, None], False), ([None, 0.0], True), ([0.0, 0.0], True),
     ([1.0, -1.0], True), ([None, None], False)],
)  # fmt: skip
@pytest.mark.parametrize("gate", ["accumulate", "conditional_accumulator", "both"])
def test_gradients_whose_sum_is_zero_are_gradients(gate, pushes, moves):
    """The momentum moves each leaf with a gradient in the push that makes the step.

    The decay takes it from 1 to 1/2.
    """
    around, extra = GATES[gate]
    tx = around(optax.sgd(1.0, momentum=0.5))
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    state = tx.init(params)
    step = jax.jit(functools.partial(gx.apply_gradients, tx, **extra))
    for g in [1.0, 1.0, *pushes]:
        w = None if g is None else jnp.full(2, g)
        params, state = step({"w": w, "b": jnp.zeros(())}, state, params)
    trace = optax.tree.get(state, "trace")["w"]
    assert trace.tolist() == [0.5 if moves else 1.0] * 2
    assert params["w"].tolist() == [-0.5 if moves else 0.0] * 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "row_mean"])
@pytest.mark.parametrize("how", ["apply", "update"])
def test_a_sum_waits_for_a_window_whose_last_push_has_a_gradient(how, reduction):
    """Weight decay, too, moves no leaf without a gradient in the last push."""
    tx = gx.accumulate(
        optax.chain(optax.add_decayed_weights(1.0), optax.sgd(1.0)),
        2,
        reduction=reduction,
    )
    one = jnp.ones(3)
    pushes = [(one, one), (None, 2 * one), (one, None), (3 * one, 4 * one), (None, one)]
    pushes += [(one, None)]
    expected = {"w": 1.0, "b": 1.0}
    held = {leaf: [] for leaf in expected}
    params = dict.fromkeys(expected, one)
    state = tx.init(params)
    for number, push in enumerate(pushes):
        grads = dict(zip(("w", "b"), push, strict=True))
        params, state = stepped(tx, grads, state, params, how)
        for leaf, g in grads.items():
            held[leaf] += [] if g is None else [float(g[0])]
        if number % 2:
            for leaf in [leaf for leaf, g in grads.items() if g is not None]:
                n = {"mean": 2, "sum": 1, "row_mean": len(held[leaf])}[reduction]
                expected[leaf] -= sum(held[leaf]) / n + expected[leaf]
                held[leaf] = []
        for leaf, value in expected.items():
            np.testing.assert_allclose(params[leaf], np.full(3, value), rtol=1e-6)
    assert state.carried  # The last push had no gradient for b.


def test_a_dropped_push_is_nobodys():
    tx = gx.conditional_accumulator(optax.sgd(1.0, momentum=0.5), 1)
    params = {"w": jnp.ones(2), "b": jnp.ones(())}
    state = tx.init(params)
    both = {"w": jnp.ones(2), "b": jnp.ones(())}
    for _ in range(2):  # The second one is late.
        params, state = gx.apply_gradients(tx, both, state, params, local_step=0)
    alone = {"w": None, "b": jnp.ones(())}
    after, state = gx.apply_gradients(tx, alone, state, params, local_step=1)
    assert after["w"].tolist() == params["w"].tolist()
    assert state.inner_state[0].trace["w"].tolist() == [1.0, 1.0]


@pytest.mark.slow
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

    frozen = {"v": start()["frozen"]["v"]}
    got = trained(
        {"w": start()["w"], "frozen": frozen}, loss_fn, {"frozen": {"v": None}}
    )
    expected = trained(
        {"w": start()["w"]}, lambda p: loss_fn({**p, "frozen": frozen}), {}
    )
    chex.assert_trees_all_equal(got["frozen"], frozen)
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-5)
    np.testing.assert_allclose(got["w"], [[4, 5], [4, 5]], rtol=1e-4)


def start_of_zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


@pytest.mark.slow
def test_an_accumulator_inside_a_chain_gets_none():
    tx = optax.chain(gx.clip_by_global_norm(1e9), gx.accumulate(optax.adam(0.1), 2))
    params = start()
    state = tx.init(params)
    for v in (None, jnp.ones(2)):
        g = grads(0, {"v": v, "whole": None})
        params, state = gx.apply_gradients(tx, g, state, params)
    np.testing.assert_allclose(params["frozen"]["v"], [3.9, 4.9], rtol=1e-5)

    def add(updates, state, params=None):
        return jax.tree.map(jnp.add, updates, state), state

    knows_no_none = optax.GradientTransformation(start_of_zeros, add)
    wrong = optax.chain(knows_no_none, gx.accumulate(optax.sgd(0.1), 2))
    with pytest.raises(ValueError, match="an accumulator or a delay inside of it"):
        gx.apply_gradients(wrong, grads(0), wrong.init(start()), start())


def test_inside_of_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = gx.drop_stale(optax.adam(0.1), 0)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P("x"))
    )
    def push(w):
        params = {"w": w, "frozen": 2 * w}
        params, _ = gx.apply_gradients(
            tx, {"w": w, "frozen": None}, tx.init(params), params, local_step=0
        )
        return params["w"], params["frozen"]

    w, frozen = push(jnp.arange(1.0, 9.0))
    np.testing.assert_allclose(w, np.arange(1, 9) - 0.1, rtol=1e-5)
    assert frozen.tolist() == list(range(2, 18, 2))


def test_init_is_not_called_if_every_leaf_has_a_gradient():
    adam = optax.adam(0.1)
    params = {"w": jnp.ones(2), "none": None}
    state = adam.init(params)

    def init(params):
        raise AssertionError("init was called")

    tx = optax.GradientTransformation(init, adam.update)
    g = {"w": jnp.ones(2), "none": None}
    got = gx.apply_gradients(tx, g, state, params)
    updates, expected_state = adam.update(g, state, params)
    chex.assert_trees_all_equal(
        got, (optax.apply_updates(params, updates), expected_state)
    )


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
def without(how, shape):
    return optax.MaskedNode() if how == "masked" else np.zeros(shape, jax.dtypes.float0)


def with_integers():
    return {"frozen": jnp.array([1, 2]), "w": jnp.array([[1.0, -2.0], [0.5, 3.0]])}


FLOATING = ("master_weights", "round_stochastically")  # They refuse integers.


@pytest.mark.parametrize(
    "row", [row for row in DESCRIPTORS if row.name not in FLOATING], ids=str
)
def test_a_gradient_of_integers_equals_none(row):
    params = with_integers()
    extra, tx = row.extra(params), row.make()

    def trained(nothing, how):
        p, state = params, tx.init(params)
        for t in range(2):
            g = {"w": jnp.cos(t + params["w"]), "frozen": nothing}
            p, state = stepped(tx, g, state, p, how, **extra)
        return p, state

    for how in ("apply", "update"):
        expected = trained(None, how)
        chex.assert_trees_all_equal(expected[0]["frozen"], params["frozen"])
        for nothing in ("float0", "masked"):
            got = trained(without(nothing, (2,)), how)
            chex.assert_trees_all_equal(got, expected)


def test_a_gradient_of_integers_alone_is_none_at_all():
    params = with_integers()
    tx = gx.adagrad(0.1)
    grads = {"frozen": without("float0", (2,)), "w": None}
    with pytest.raises(ValueError, match="grads has no gradient for any leaf"):
        gx.apply_gradients(tx, grads, tx.init(params), params)


@pytest.mark.parametrize("how", ["float0", "masked"])
def test_it_may_be_pushed(how):
    params = with_integers()
    server = gx.ParameterServer(
        params, gx.drop_stale(gx.adagrad(0.1), 1), require_finite=True
    )
    g = {"w": jnp.ones((2, 2)), "frozen": without(how, (2,))}
    assert server.push(g, 0).applied
    got, step = server.pull()
    assert step == 1
    chex.assert_trees_all_equal(got["frozen"], params["frozen"])
    tx = gx.adagrad(0.1)
    updates, _ = tx.update({"w": g["w"]}, tx.init({"w": params["w"]}))
    np.testing.assert_allclose(got["w"], params["w"] + updates["w"], rtol=1e-6)


MASK = {"w": True, "frozen": False}


@pytest.mark.parametrize("hidden", ["masked", "partition", "None"])
@pytest.mark.parametrize("gradient", [True, False], ids=["of all", "of one"])
def test_a_worker_may_send_all_of_its_parameters(hidden, gradient):
    """``optax.masked`` hides leaves of the gradients, and of no extra argument."""
    inner = optax.chain(gx.compensate_delay(0.5), optax.adam(0.1))
    labels = {"w": "outer", "frozen": "none"}
    tx = {
        "masked": lambda: optax.masked(inner, MASK),
        "partition": lambda: optax.partition(
            {"outer": inner, "none": optax.set_to_zero()}, labels
        ),
        "None": lambda: inner,
    }[hidden]()
    params = {"w": start()["w"], "frozen": {"v": jnp.ones(2)}}
    frozen = {"v": jnp.zeros(2) if gradient and hidden != "None" else None}
    worker = jax.tree.map(lambda p: p - 1, params)
    got, _ = gx.apply_gradients(
        tx,
        {"w": grads(0)["w"], "frozen": frozen},
        tx.init(params),
        params,
        worker_params=worker,
    )
    chex.assert_trees_all_equal(got["frozen"], params["frozen"])
    w, g = params["w"], grads(0)["w"]
    expected = adam(0.1, g + 0.5 * g**2)  # w - worker is 1.
    np.testing.assert_allclose(got["w"], w + expected, rtol=1e-5)


def adam(rate, g):
    """The first step of optax's, in float64."""
    g = np.asarray(g, np.float64)
    return -rate * g / (np.abs(g) + 1e-8)


@pytest.mark.slow
def test_a_part_of_a_table_beside_a_leaf_without_a_gradient():
    """The trees beside it hold rows there, and lose the leaf as well."""
    tx = optax.chain(gx.compensate_delay(0.5), gx.scale_by_learning_rate(1.0))
    params = {"table": jnp.ones((4, 1)), "frozen": jnp.ones(2)}
    part = gx.IndexedSlices([0, 2], jnp.zeros((2, 1)), (4, 1))
    rows = gx.IndexedSlices([2], jnp.ones((1, 1)), (4, 1))
    got, _ = gx.apply_gradients(
        tx,
        {"table": rows, "frozen": None},
        tx.init(params),
        params,
        worker_params={"table": part, "frozen": jnp.zeros(2)},
    )
    assert got["table"].ravel().tolist() == [1.0, 1.0, 1.0 - (1 + 0.5), 1.0]
    assert got["frozen"].tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("gate", [g for g in GATES if "accumul" in g or g == "both"])
def test_a_parameter_that_is_none_does_not_hide_that_another_has_acted(gate):
    """One leaf has no gradient in the last push of a window, so its sum waits."""
    around, extra = GATES[gate]
    tx = around(optax.sgd(1.0, momentum=0.5))

    def trained(nothing):
        params = {**nothing, "b": jnp.zeros(1), "z": jnp.zeros(1)}
        state = tx.init(params)
        for b in (jnp.ones(1), None, jnp.ones(1), jnp.ones(1)):
            g = {**nothing, "b": b, "z": jnp.ones(1)}
            params, state = gx.apply_gradients(tx, g, state, params, **extra)
        return params

    # b has one step of 3/2. z has two of 1, and the second one is half longer.
    for nothing in ({}, {"a": None}, {"a": optax.MaskedNode()}):
        got = trained(nothing)
        assert got["b"].tolist() == [-1.5]
        assert got["z"].tolist() == [-2.5]
