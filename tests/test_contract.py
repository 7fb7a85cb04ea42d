"""What every transformation promises, for every row of the descriptor table."""

import contextlib
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.descriptors import DESCRIPTORS, UNGATED

REAL = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
WIDE = ("float64", "complex128")

every_row = pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
every_row_and_dtype = pytest.mark.parametrize(
    ("row", "dtype"),
    [
        pytest.param(row, dtype, id=f"{row}-{dtype}")
        for row in DESCRIPTORS
        for dtype in REAL + (() if row.real_only else COMPLEX)
    ],
)


def precision(dtype):
    return jax.enable_x64(True) if dtype in WIDE else contextlib.nullcontext()


def draw(seed, dtype="float32"):
    """A tree with a matrix, a tensor, a vector, a scalar and an empty node."""
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        x = rng.standard_normal(shape)
        if dtype in COMPLEX:
            x = x + 1j * rng.standard_normal(shape)
        return jnp.asarray(x, dtype)

    return {
        "w": leaf(4, 3),
        "nested": [leaf(2, 3, 2), {"b": leaf(3)}],
        "s": leaf(),
        "nothing": None,
    }


def types(tree):
    return jax.tree.map(jax.typeof, tree)


def run(row, grads, params, update=None, steps=3):
    tx = row.make()
    update = update or tx.update
    state = tx.init(params)
    trace = []
    for _ in range(steps):
        updates, state = update(grads, state, params, **row.extra(params))
        trace.append((updates, state))
    return trace


def test_every_public_transformation_has_a_row():
    public = {
        name
        for name, f in vars(gx).items()
        if inspect.isfunction(f) and "Transformation" in f.__annotations__["return"]
    }
    public.remove("from_config")  # What it makes is one of the others.
    assert public == {row.name for row in DESCRIPTORS}


@every_row_and_dtype
def test_types_are_stable_and_eager_equals_jit(row, dtype):
    with precision(dtype):
        params, grads = draw(0, dtype), draw(1, dtype)
        tx = row.make()
        eager = run(row, grads, params)
        jitted = run(row, grads, params, jax.jit(tx.update))
        for updates, state in eager + jitted:
            assert types(updates) == types(grads)
            assert types(state) == types(tx.init(params))
        # XLA keeps more precision inside a fusion than half-precision arrays hold.
        rtol = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 2e-6)
        if row.variant == "bf16":
            rtol = 2e-2
        chex.assert_trees_all_close(eager, jitted, rtol=rtol, atol=rtol / 10)


@every_row
def test_state_is_strongly_typed_whatever_the_params(row):
    weak = {"w": jnp.asarray(2.0)}
    assert jax.typeof(weak["w"]).weak_type
    tx = row.make()
    state = tx.init(weak)
    _, new_state = tx.update({"w": jnp.ones(())}, state, weak, **row.extra(weak))
    assert types(state) == types(new_state)


@every_row
def test_params_may_be_no_more_than_described(row):
    params = draw(0)
    described = jax.eval_shape(lambda: params)
    state = row.make().init(described)
    expected = row.make().init(params)
    assert types(state) == types(expected)
    chex.assert_trees_all_equal(state, expected)


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("row", UNGATED, ids=str)
def test_gradients_may_be_of_another_precision(row, dtype, gradient_dtype):
    params, grads = draw(0, dtype), draw(1, gradient_dtype)
    tx = row.make()
    state = tx.init(params)
    updates, new_state = jax.jit(tx.update)(grads, state, params, **row.extra(params))
    assert types(updates) == types(grads)
    assert types(new_state) == types(state)
    assert types(gx.apply_updates(params, updates)) == types(params)
    # The same numbers, all in float32.
    params, grads = (jax.tree.map(jnp.float32, tree) for tree in (params, grads))
    expected, _ = tx.update(grads, tx.init(params), params, **row.extra(params))
    updates = jax.tree.map(jnp.float32, updates)
    chex.assert_trees_all_close(updates, expected, rtol=1e-2, atol=1e-4)


@every_row
def test_second_call_does_not_retrace(row):
    params, grads = draw(0), draw(1)
    traces = 0
    tx = row.make()

    @jax.jit
    def update(grads, state, params, **extra):
        nonlocal traces
        traces += 1
        return tx.update(grads, state, params, **extra)

    run(row, grads, params, update)
    assert traces == 1


@every_row
def test_state_and_params_can_be_donated(row):
    tx = row.make()
    params = draw(0)
    state = tx.init(params)
    step = jax.jit(
        lambda g, s, p: gx.apply_gradients(tx, g, s, p, **row.extra(p)),
        donate_argnums=(1, 2),
    )
    for _ in range(3):
        before = jax.tree.leaves(params)
        params, state = step(draw(1), state, params)
    assert all(leaf.is_deleted() for leaf in before)


@every_row
def test_unknown_extra_arguments_are_ignored(row):
    params, grads = draw(0), draw(1)
    tx = row.make()
    plain, _ = tx.update(grads, tx.init(params), params, **row.extra(params))
    extra, _ = tx.update(grads, tx.init(params), params, value=1.0, **row.extra(params))
    chex.assert_trees_all_equal(plain, extra)


@every_row
def test_chain_and_named_chain(row):
    params, grads = draw(0), draw(1)
    alone = run(row, grads, params)
    for chained in (
        optax.chain(optax.identity(), row.make(), optax.identity()),
        optax.named_chain(("before", optax.identity()), ("it", row.make())),
    ):
        state = chained.init(params)
        for updates, _ in alone:
            got, state = jax.jit(chained.update)(
                grads, state, params, **row.extra(params)
            )
            chex.assert_trees_all_close(got, updates, rtol=2e-6)


@every_row
def test_inject_hyperparams(row, standard_promotion):
    params, grads = draw(0), draw(1)
    static = [k for k in ("accumulator_dtype", "mu_dtype") if k in row.kwargs]
    tx = optax.inject_hyperparams(getattr(gx, row.name), static_args=static)(
        **row.arguments()
    )
    state = tx.init(params)
    update = jax.jit(tx.update)  # Inside, every number is a traced array.
    for updates, inner in run(row, grads, params):
        got, state = update(grads, state, params, **row.extra(params))
        chex.assert_trees_all_close(got, updates, rtol=1e-5)
        chex.assert_trees_all_close(state.inner_state, inner, rtol=1e-5)


@every_row
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_traced_float32_hyperparameters_keep_the_gradient_dtype(row, dtype):
    params, grads = draw(0, dtype), draw(1, dtype)
    numbers = {k: v for k, v in row.arguments().items() if type(v) is float}

    @jax.jit
    def update(numbers, state):
        tx = getattr(gx, row.name)(**row.arguments() | numbers)
        return tx.update(grads, state, params, **row.extra(params))

    updates, _ = update(jax.tree.map(jnp.float32, numbers), row.make().init(params))
    assert types(updates) == types(grads)
    expected, _ = row.make().update(
        grads, row.make().init(params), params, **row.extra(params)
    )
    chex.assert_trees_all_close(updates, expected, rtol=2e-3)


@every_row
def test_masked_leaves_pass_through(row):
    params, grads = draw(0), draw(1)
    mask = {"w": True, "nested": [False, {"b": True}], "s": False, "nothing": False}
    tx = optax.masked(row.make(), mask, mask_compatible_extra_args=True)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, **row.extra(params))
    chex.assert_trees_all_equal(updates["nested"][0], grads["nested"][0])
    chex.assert_trees_all_equal(updates["s"], grads["s"])
    kept = {"w": grads["w"], "nested": [{"b": grads["nested"][1]["b"]}]}
    kept_params = {"w": params["w"], "nested": [{"b": params["nested"][1]["b"]}]}
    alone, _ = row.make().update(
        kept, row.make().init(kept_params), kept_params, **row.extra(kept_params)
    )
    chex.assert_trees_all_close(updates["w"], alone["w"], rtol=2e-6)


@every_row
def test_partition_runs_each_part_on_its_own(row):
    params, grads = draw(0), draw(1)
    labels = {"w": "a", "nested": "b", "s": "b", "nothing": "b"}
    tx = optax.partition(
        {"a": row.make(), "b": optax.sgd(1.0)}, labels, mask_compatible_extra_args=True
    )
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params, **row.extra(params))
    w_only = {"w": params["w"]}
    alone, _ = row.make().update(
        {"w": grads["w"]}, row.make().init(w_only), w_only, **row.extra(w_only)
    )
    chex.assert_trees_all_close(updates["w"], alone["w"], rtol=2e-6)
    chex.assert_trees_all_equal(updates["s"], -grads["s"])


@every_row
def test_multi_steps_acts_once_on_the_mean(row, standard_promotion):
    params, grads = draw(0), draw(1)
    multi = optax.MultiSteps(row.make(), every_k_schedule=2)
    state = multi.init(params)
    update = jax.jit(multi.update)
    first, state = update(grads, state, params, **row.extra(params))
    second, state = update(grads, state, params, **row.extra(params))
    chex.assert_trees_all_equal(first, jax.tree.map(jnp.zeros_like, grads))
    expected, _ = run(row, grads, params, steps=1)[0]
    chex.assert_trees_all_close(second, expected, rtol=1e-5)


@every_row
def test_apply_if_finite_refuses_nan_and_inf(row):
    if row.kwargs.get("clipvalue"):
        pytest.skip("clipping by value makes an infinite gradient finite, as in Keras")
    params = draw(0)
    tx = optax.apply_if_finite(row.make(), max_consecutive_errors=5)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for bad in (jnp.nan, jnp.inf):
        grads = draw(1) | {"s": jnp.float32(bad)}
        updates, state = update(grads, state, params, **row.extra(params))
        chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, grads))
    assert state.total_notfinite == 2
    chex.assert_trees_all_equal(state.inner_state, row.make().init(params))


@every_row
def test_scan_equals_a_loop(row):
    params, grads = draw(0), draw(1)
    tx = row.make()

    def body(state, _):
        updates, state = tx.update(grads, state, params, **row.extra(params))
        return state, updates

    state, stacked = jax.lax.scan(body, tx.init(params), length=3)
    trace = run(row, grads, params)
    chex.assert_trees_all_close(state, trace[-1][1], rtol=2e-6)
    last = jax.tree.map(lambda x: x[-1], stacked)
    chex.assert_trees_all_close(last, trace[-1][0], rtol=2e-6, atol=1e-7)


@every_row
def test_vmap_equals_one_by_one(row):
    batch = [(draw(i), draw(10 + i)) for i in range(3)]

    def stack(*trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    params, grads = stack(*(p for p, _ in batch)), stack(*(g for _, g in batch))
    tx = row.make()
    state = jax.vmap(tx.init)(params)
    update = jax.vmap(lambda g, s, p: tx.update(g, s, p, **row.extra(p)))
    for _ in range(3):
        updates, state = update(grads, state, params)
    expected = stack(*(run(row, g, p)[-1] for p, g in batch))
    chex.assert_trees_all_close((updates, state), expected, rtol=1e-5, atol=1e-7)


@every_row
@pytest.mark.parametrize("at", ["zero", "random"])
def test_derivatives_through_the_update_are_finite(row, at):
    params, grads = draw(0), draw(1)
    if at == "zero":
        grads = jax.tree.map(jnp.zeros_like, grads)
    tx = row.make()

    def loss(grads, params):
        updates, _ = tx.update(grads, tx.init(params), params, **row.extra(params))
        return sum(jnp.sum(u**2) + jnp.sum(u) for u in jax.tree.leaves(updates))

    value, derivatives = jax.value_and_grad(loss, argnums=(0, 1))(grads, params)
    chex.assert_tree_all_finite(derivatives)
    if value != 0:  # A derivative that is finite because it was cut is no use.
        assert any(jnp.any(d != 0) for d in jax.tree.leaves(derivatives[0]))


@every_row
def test_a_leaf_without_gradient_keeps_its_state(row):
    params, grads = draw(0), draw(1) | {"w": None}
    tx = row.make()
    for updates, state in run(row, grads, params, steps=2):
        # The mean of several pushes is dense; here it is of nothing.
        assert updates["w"] is None or not jnp.any(updates["w"])
        assert types(state) == types(tx.init(params))
    for field in ("sum_of_squares", "mu", "nu"):
        for path, value in optax.tree.get_all_with_path(state, field):
            initial = dict(optax.tree.get_all_with_path(tx.init(params), field))[path]
            chex.assert_trees_all_equal(value["w"], initial["w"])
            assert jnp.any(value["s"] != initial["s"])


@every_row
def test_a_tree_without_leaves(row):
    tx = row.make()
    updates, _ = tx.update({}, tx.init({}), {}, **row.extra({}))
    assert updates == {}


@every_row
def test_a_gradient_of_another_shape_is_named(row):
    if row.name.startswith(("clip", "densify", "scale_by_learning", "scale_by_stale")):
        pytest.skip("it looks at nothing but the gradients")
    params = draw(0)
    tx = row.make()
    state = tx.init(params)
    grads = draw(1)
    grads["nested"][1]["b"] = jnp.ones((3, 1))
    with pytest.raises(TypeError, match=r"\['nested'\]\[1\]\['b'\].*float32\[3,1\]"):
        tx.update(grads, state, params, **row.extra(params))
    missing = draw(1)
    del missing["w"]
    with pytest.raises(TypeError, match=r"\['w'\].*no leaf"):
        tx.update(missing, state, params, **row.extra(params))


@every_row
def test_params_and_gradients_may_be_plain_numbers(row):
    def update(grad, param):
        return tx.update(grad, tx.init(param), param, **row.extra(param))

    tx = row.make()
    plain, plain_state = update({"s": -2.0}, {"s": 1.0})
    arrays, state = update({"s": jnp.float32(-2)}, {"s": jnp.float32(1)})
    chex.assert_trees_all_close(plain, arrays, rtol=1e-6)
    assert types(plain_state) == types(state)
