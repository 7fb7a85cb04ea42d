"""A row-sparse gradient gives what the dense one gives, at the price of its rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.descriptors import DESCRIPTORS


def is_sparse(leaf):
    return isinstance(leaf, gx.IndexedSlices)


@jax.jit
def densified(tree):
    return jax.tree.map(
        lambda g: g.densify() if is_sparse(g) else g, tree, is_leaf=is_sparse
    )


def draw(seed, indices, shape, dtype="float32"):
    """A table's gradient with these indices, beside a dense leaf and an empty one."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((len(indices), *shape[1:]))
    values = jnp.asarray(values.astype(jnp.dtype(dtype)))
    return {
        "table": gx.IndexedSlices(np.asarray(indices, np.int32), values, shape),
        "b": jnp.asarray(rng.standard_normal(3), dtype),
        "nothing": None,
    }


def params_like(seed, shape, dtype="float32"):
    rng = np.random.default_rng(seed)
    return {
        "table": jnp.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype))),
        "b": jnp.asarray(rng.standard_normal(3), dtype),
        "nothing": None,
    }


# Every transformation.


@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_sparse_updates_are_the_dense_ones(row):
    """On the touched rows alone, or behind densify, where the row says so."""
    # A row that one push touches, the next one may leave. No push touches row 2.
    rows = [3, 0, 3, 4], [1, 0, 1, 4], [3, 3, 1, 4]
    pushes = [draw(t, indices, (4, 3)) for t, indices in enumerate(rows)]
    grads, params = pushes[0], params_like(1, (4, 3))
    tx = row.make()
    if row.rows == "refused":
        every = r"changes every row.*\['table'\].*gradxform.lazy\("
        said = rf"({every}|makes room for.*\['table'\]).*gradxform.densify\(\)"
        with pytest.raises(TypeError, match=said):
            pytest.fail(
                f"{row.says('rows')}, but row-sparse gradients make "
                f"{tx.update(grads, tx.init(params), params, **row.extra(params))}."
            )
        if row.variant:  # Behind densify one row stands for all.
            return
        tx = optax.chain(gx.densify(), tx)

    @jax.jit
    def both(grads, state, dense_state):
        extra = row.extra(params)
        updates, state = tx.update(grads, state, params, **extra)
        dense, after = tx.update(densified(grads), dense_state, params, **extra)
        return (densified(updates), state), (dense, after)

    def where_touched(grads, new, old):
        touched = np.isin(range(4), grads["table"].indices)[:, None]
        return jax.tree.map(
            lambda x, y: np.where(touched, x, y) if x.shape == (4, 3) else x, new, old
        )

    state, dense_state = tx.init(params), tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for grads in pushes:
        got, expected = both(grads, state, dense_state)
        if row.rows == "touched":
            none = jax.tree.map(jnp.zeros_like, expected[0])
            expected = where_touched(grads, expected, (none, dense_state))
        (_, state), (_, dense_state) = got, expected
        chex.assert_trees_all_close(
            got, expected, rtol=1e-6, custom_message=row.says("rows")
        )
        assert jax.tree.map(jax.typeof, state) == types


@pytest.mark.parametrize(
    "row", [row for row in DESCRIPTORS if row.rows == "touched"], ids=str
)
def test_a_gradient_without_rows_changes_no_row(row):
    grads, params = draw(0, [], (4, 3)), params_like(1, (4, 3))
    tx = row.make()
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    assert updates["table"].values.shape == (0, 3)
    dense, _ = tx.update(densified(grads), state, params)
    chex.assert_trees_all_close(updates["b"], dense["b"], rtol=1e-6)
    for new, old in zip(*map(jax.tree.leaves, (after, state)), strict=True):
        assert new.shape != (4, 3) or np.array_equal(new, old)


def test_a_table_of_another_height_is_named():
    params = params_like(0, (4, 3))
    grads = draw(0, [1], (5, 3))
    tx = gx.adagrad(0.1)
    for step in (
        lambda: tx.update(grads, tx.init(params), params),
        lambda: gx.apply_updates(params, grads),
        lambda: gx.apply_gradients(tx, grads, tx.init(params), params),
    ):
        with pytest.raises(
            TypeError, match=r"\['table'\].*float32\[1,3\] for \[5, 3\]"
        ):
            step()


# Many tables: rows that are touched, and rows that are not.

CHAINS = {
    "tf1": gx.adagrad(0.1, 0.0, eps_in_sqrt=False),
    "row_wise": gx.adagrad(0.1, row_wise=True),
    "row_wise_clipnorm": gx.adagrad(0.1, row_wise=True, clipnorm=0.3),
    "row_wise_clipvalue": gx.adagrad(0.1, row_wise=True, clipvalue=0.3),
    "clip": optax.chain(gx.clip_by_global_norm(0.5), gx.adagrad(0.1)),
    "clips": optax.chain(gx.clip_by_norm(0.7), gx.adagrad(0.1, global_clipnorm=0.5)),
    "clipvalue": gx.drop_stale(gx.adagrad(0.1, clipvalue=0.3), 9),
    "row_wise_global": gx.adagrad(0.1, row_wise=True, global_clipnorm=0.5),
}
# Each table's shape and dtype, and the rows of three gradients. The height is padding.
TABLES = {
    "one_row": ((1, 3), "float32", [[0, 0, 1], [1, 1, 1], [0, 1, 0]]),
    "no_rows": ((6, 3), "float32", [[], [], []]),
    "half": ((6, 3), "bfloat16", [[5], [6], [0]]),
    "many": ((8, 2, 2), "float32", [[7, 7, 0, 3, 7], [8, 7, 8, 1, 1], [2, 2, 2, 2, 2]]),
    "many_halves": ((5,), "bfloat16", [[4, 5, 4, 0], [1, 1, 3, 3], [4, 0, 4, 0]]),
}


def beside(tables):
    """The tables, with a dense leaf and an empty one."""
    return tables | {"b": draw(0, [], (0,))["b"], "nothing": None}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_sparse_equals_dense_and_leaves_the_other_rows_alone(chain):
    tx, extra = CHAINS[chain], {"local_step": 0} if chain == "clipvalue" else {}
    step = jax.jit(functools.partial(gx.apply_gradients, tx, **extra))
    params = beside(
        {k: params_like(1, s, dtype)["table"] for k, (s, dtype, _) in TABLES.items()}
    )
    dense_params = params
    state, dense_state = tx.init(params), tx.init(params)
    for t in range(3):
        grads = beside(
            {
                name: draw(t, rows[t], shape, dtype)["table"]
                for name, (shape, dtype, rows) in TABLES.items()
            }
        )
        before = params, optax.tree.get(state, "sum_of_squares")
        params, state = step(grads, state, params)
        dense_params, dense_state = step(densified(grads), dense_state, dense_params)
        after = params, optax.tree.get(state, "sum_of_squares")
        expected = dense_params, optax.tree.get(dense_state, "sum_of_squares")
        for name, (shape, dtype, rows) in TABLES.items():
            # The factors of both clips may differ in the last place.
            tol = 1e-6 if dtype == "float32" else 1e-2
            others = np.setdiff1d(np.arange(shape[0]), rows[t])
            for trees in zip(before, after, expected, strict=True):
                old, new, wanted = (np.float32(tree[name]) for tree in trees)
                np.testing.assert_allclose(new, wanted, tol, tol, err_msg=name)
                np.testing.assert_array_equal(new[others], old[others], name)
        # The dense leaf, and the rest of the state.
        chex.assert_trees_all_close(params["b"], dense_params["b"], rtol=1e-6)
        rest = [optax.tree.set(s, sum_of_squares=None) for s in (state, dense_state)]
        chex.assert_trees_all_close(*rest, rtol=1e-6)


def test_repeated_rows_are_summed_before_the_norm_and_the_square():
    rows = np.float32([[3, 0], [0, 4], [3, 0], [1, 1], [-1, -1]])
    grads = gx.IndexedSlices([0, 2, 0, 1, 1], rows, (4, 2))
    assert jax.jit(gx.global_norm)(grads) == np.float32(np.hypot(6, 4))
    tx = gx.adagrad(1.0, 0.0, 0.0)
    params = np.zeros((4, 2), np.float32)
    params, state = jax.jit(functools.partial(gx.apply_gradients, tx))(
        grads, tx.init(params), params
    )
    acc = optax.tree.get(state, "sum_of_squares")
    assert acc.tolist() == [[36, 0], [0, 0], [0, 16], [0, 0]]
    assert params.tolist() == [[-1, 0], [0, 0], [0, -1], [0, 0]]


def test_padding_reads_no_row():
    tx = gx.scale_by_adagrad()
    state = tx.init(np.zeros(4, np.float32))
    state = state._replace(sum_of_squares=np.float32([0.1, 0.1, 0.1, np.nan]))
    update = jax.jit(tx.update)
    updates, _ = update(gx.IndexedSlices([1, 4], np.ones(2, np.float32), (4,)), state)
    assert np.all(np.isfinite(updates.values))


# The accumulator.


def test_a_leaf_may_come_dense_and_sparse():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2, reduction="row_mean")
    params = jnp.zeros((3, 1))
    state = tx.init(params)
    sparse = gx.IndexedSlices([1], jnp.array([[4.0]]), (3, 1))
    for grads in (sparse, jnp.ones((3, 1))):
        params, state = gx.apply_gradients(tx, grads, state, params, local_step=0)
    np.testing.assert_allclose(params[:, 0], [-1, -2.5, -1])


@pytest.mark.slow
def test_a_stale_push_of_rows_reaches_nothing():
    params = jnp.ones((4, 2))
    bad = gx.IndexedSlices([1, 1], jnp.full((2, 2), jnp.nan), (4, 2))
    late = {"local_step": jnp.array(-1)}  # A step that no worker can have seen.
    for tx in (
        gx.drop_stale(gx.adagrad(0.1), 0),
        gx.drop_stale(optax.chain(gx.densify(), gx.novograd(0.1)), 0),
        gx.conditional_accumulator(gx.adagrad(0.1), 2, reduction="row_mean"),
        gx.drop_stale(gx.conditional_accumulator(gx.adagrad(0.1), 1), 0),
    ):
        state = tx.init(params)
        updates, new = jax.jit(tx.update)(bad, state, params, **late)
        assert not np.any(densified(updates))
        step = jax.jit(functools.partial(gx.apply_gradients, tx))
        after, newer = step(bad, state, params, **late)
        chex.assert_trees_all_equal(after, params)
        for got in (new, newer):
            assert got.stale_count == 1
            counted = {"stale_count": state.stale_count}
            if "staleness" in got._fields:
                counted["staleness"] = state.staleness
            chex.assert_trees_all_equal(got._replace(**counted), state)


# The server.


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (gx.IndexedSlices([1], jnp.ones((1, 2)), (6, 2)), TypeError,
         r"differ at \['t'\]"),
        (gx.IndexedSlices([1], jnp.ones((1, 2), jnp.float16), (5, 2)), TypeError,
         r"differ in dtype at \['t'\]: .*float16\[1,2\]"),
        (gx.IndexedSlices([1], jnp.full((1, 2), jnp.inf), (5, 2)), ValueError,
         r"must be finite.*\['t'\]"),
    ],
)  # fmt: skip
def test_a_server_refuses_rows_that_do_not_fit(table, error, message):
    params = {"t": jnp.zeros((5, 2))}
    server = gx.ParameterServer(params, gx.adagrad(0.1), require_finite=True)
    with pytest.raises(error, match=message):
        server.push({"t": table}, 0)
    pulled, global_step = server.pull()
    assert global_step == 0
    chex.assert_trees_all_equal(pulled, params)


# What the compiler says.


def compile_step(tx, height, dtype="float32", rows=256, width=16, **extra):
    def step(params, state, indices, values):
        grads = {"t": gx.IndexedSlices(indices, values, (height, width))}
        return gx.apply_gradients(tx, grads, state, params, **extra)

    params = {"t": jax.ShapeDtypeStruct((height, width), dtype)}
    indices = jax.ShapeDtypeStruct((rows,), jnp.int32)
    of_rows = "float32" if dtype == "int8" else dtype
    values = jax.ShapeDtypeStruct((rows, width), of_rows)
    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, indices, values)
    return lowered.compile().memory_analysis()


NARROW = gx.adagrad(0.1, accumulator_dtype="bfloat16")


@pytest.mark.figures
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "extra"),
    [
        (CHAINS["clips"], {}),
        (CHAINS["row_wise"], {}),
        (gx.ftrl(0.1, l1_regularization_strength=1.0), {}),
        (gx.drop_stale(CHAINS["clip"], 1), {"local_step": 0}),
        (gx.adagrad(0.1), {"dtype": "float16"}),
        (NARROW, {"dtype": "int8"}),
    ],
)
def test_temporaries_do_not_grow_with_the_table(tx, extra):
    low, high = (compile_step(tx, h, **extra) for h in (10_000, 1_000_000))
    assert high.temp_size_in_bytes <= 1.01 * low.temp_size_in_bytes
    assert low.temp_size_in_bytes < 1_000_000  # The tables: 640,000 and 64 million.
    # Table and state are updated in place.
    assert high.alias_size_in_bytes > 0.99 * high.argument_size_in_bytes


def test_rows_of_each_device_inside_shard_map_over_some_of_the_axes():
    types = (AxisType.Auto, AxisType.Auto)
    step = jax.shard_map(
        lambda t, i, v: gx.apply_updates(t, gx.IndexedSlices(i, v, t.shape)),
        mesh=jax.make_mesh((4, 2), ("x", "y"), axis_types=types),
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
    )
    params = jax.jit(step)(jnp.ones((8, 1)), jnp.array([1, 1] * 4), jnp.ones((8, 1)))
    assert params.ravel().tolist() == [1, 3] * 4


@pytest.mark.figures
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_densify_makes_a_share_of_the_table_on_each_device(axis_type, in_context):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    on_rows = NamedSharding(mesh, P("x", None))
    tx = optax.chain(gx.densify(), optax.trace(0.9))

    def step(trace, params, indices, values):
        grads = gx.IndexedSlices(indices, values, params.shape)
        state = (optax.EmptyState(), optax.TraceState(trace))
        params, state = gx.apply_gradients(tx, grads, state, params)
        return state[1].trace, params

    table = jax.ShapeDtypeStruct((80_000, 16), jnp.float32, sharding=on_rows)
    with in_context(mesh):
        compiled = (
            jax.jit(step, donate_argnums=(0, 1))
            .lower(table, table, np.zeros(8, np.int32), np.zeros((8, 16), np.float32))
            .compile()
        )
    share = 80_000 * 16 * 4 // 8
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * share


@pytest.mark.figures
@pytest.mark.parametrize("reduction", ["sum", "row_mean"])
def test_an_accumulator_keeps_no_second_table(reduction):
    tx = gx.conditional_accumulator(gx.adagrad(0.1), 8, reduction=reduction)
    height, width = 1_000_000, 16
    memory = compile_step(tx, height, width=width, local_step=0)
    vectors = 2 if reduction == "row_mean" else 0  # of one number a row
    assert memory.temp_size_in_bytes < (0.02 * width + vectors) * height * 4


def test_only_the_first_push_clears_and_the_last_divides_the_whole_table():
    tx = gx.conditional_accumulator(optax.sgd(1.0), 2)
    params = jnp.ones((4, 2))
    step = functools.partial(gx.apply_gradients, tx, local_step=0)

    def conditionals(grads):
        program = str(jax.make_jaxpr(step)(grads, tx.init(params), params))
        return program.count("cond[") - program.count("branches_platforms=")

    rows = gx.IndexedSlices([1], params[:1], (4, 2))
    assert conditionals(rows) == conditionals(params) + 2


def test_rows_of_half_precision_are_rounded_once():
    table = jnp.ones((3, 1), jnp.bfloat16)
    step = gx.IndexedSlices([1], jnp.full((1, 1), 2**-8 + 2**-20), (3, 1))
    assert gx.apply_updates(table, step).tolist() == [[1.0], [1 + 2**-7], [1.0]]
