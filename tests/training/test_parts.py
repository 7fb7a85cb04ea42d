"""Parts of tables: a loss that reads them trains as if it had the whole table."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._trees import maps, states

HEIGHT, WIDTH = 50, 3
IDS = np.array([[7, 3], [7, 9], [HEIGHT, 3]])  # Repetitions, and padding.
HELD = [3, 7, 9]
TABLE = np.random.default_rng(0).standard_normal((HEIGHT, WIDTH)).astype(np.float32)


def part(indices=(3, 7, 9, HEIGHT, HEIGHT, HEIGHT), dtype="float32"):
    """A part as a server gives it for six ids."""
    padded = np.concatenate([TABLE, np.zeros((1, WIDTH), np.float32)])
    rows = jnp.asarray(padded[list(indices)], dtype)
    return gx.TableRows(list(indices), rows, TABLE.shape)


def model(table):
    return {"table": table, "w": jnp.arange(1.0, 4.0)}


def loss_fn(params, ids):
    rows = gx.lookup(params["table"], ids)
    weight = jnp.arange(1.0, ids.size + 1).reshape(*ids.shape, 1)
    again = gx.lookup(params["table"], ids[0])
    both = jnp.sum(weight * rows.astype("float32") ** 2), jnp.sum(again)
    return both[0] * jnp.sum(params["w"]) + both[1].astype("float32")


def dense_rows(params, ids):
    """The same loss, by NumPy's indexing of a padded table."""
    padded = jnp.concatenate([params["table"], jnp.zeros((1, WIDTH))])
    return loss_fn({**params, "table": padded}, ids)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "indices",
    [
        (3, 7, 9, HEIGHT, HEIGHT, HEIGHT),
        (9, 3, HEIGHT, 7),  # A server gives them sorted.
        (0, 3, 7, 8, 9, 49),  # More rows than are read.
    ],
)
def test_rows_of_a_part_are_those_of_the_table(indices, compiled):
    lookup = jax.jit(gx.lookup) if compiled else gx.lookup
    np.testing.assert_array_equal(
        lookup(part(indices), IDS), lookup(jnp.asarray(TABLE), IDS)
    )


def test_a_part_has_each_row_once():
    with pytest.raises(ValueError, match="each row once, got 4"):
        gx.TableRows([4, 2, 4], jnp.ones((3, WIDTH)), TABLE.shape)


def test_a_part_goes_through_jit_and_pickle_as_it_is():
    for make in (jax.jit(lambda p: p), lambda p: pickle.loads(pickle.dumps(p))):
        again = make(part((9, 3, HEIGHT, 7)))
        assert type(again) is gx.TableRows
        assert again.dense_shape == TABLE.shape
        assert again.indices.tolist() == [3, 7, 9, HEIGHT]
        np.testing.assert_array_equal(again.values[:3], TABLE[HELD])


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        lambda p: 2 * p,
        lambda p: p + p,
        lambda p: p[0],
        np.asarray,
        lambda p: jnp.ones(TABLE.shape) - p,
        lambda p: jax.tree.map(lambda x: 2 * x, p),
    ],
)
def test_a_part_is_no_array(use):
    with pytest.raises(TypeError, match=r"gradxform\.TableRows|row-sparse gradient"):
        use(part())


def test_a_gradient_among_parameters_is_refused():
    """It would be a table of zeros but for these rows, and its rows may repeat."""
    rows = gx.IndexedSlices([3, 7, 9], TABLE[HELD], TABLE.shape)
    tx, params = gx.adagrad(0.1), model(rows)
    match = r"params has an IndexedSlices at \['table'\].*gradxform.TableRows"
    with pytest.raises(TypeError, match=match):
        gx.value_and_grad(loss_fn)(params, IDS)
    with pytest.raises(TypeError, match=match):
        gx.apply_gradients(tx, params, tx.init(model(TABLE)), params)
    with pytest.raises(TypeError, match="table has an IndexedSlices at the root"):
        gx.lookup(rows, [3])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tables", [["table"], ()])  # A part needs no name.
def test_the_gradient_is_that_of_the_whole_table(tables, compiled):
    value_and_grad = gx.value_and_grad(loss_fn, tables=tables)
    if compiled:
        value_and_grad = jax.jit(value_and_grad)
    value, grads = value_and_grad(model(part()), IDS)
    plain = jax.jit(jax.value_and_grad(dense_rows))
    wanted, dense = plain(model(jnp.asarray(TABLE)), IDS)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert grads["table"].dense_shape == TABLE.shape
    np.testing.assert_allclose(grads["table"].densify(), dense["table"], rtol=1e-6)
    np.testing.assert_allclose(grads["w"], dense["w"], rtol=1e-6)


ON_FOUR = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
WHOLE = NamedSharding(ON_FOUR, P())


def get_whole(table, ids):
    return table.at[ids].get(out_sharding=WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "batch", "compiled", "in_context"),
    [
        (gx.lookup, P("d"), False, True),
        (gx.lookup, P(), True, False),
        (get_whole, P("d"), True, True),
        (get_whole, P(), False, False),
        (jax.checkpoint(gx.lookup), P("d"), True, False),
    ],
    indirect=["in_context"],
)
def test_a_part_on_explicit_mesh_axes(read, batch, compiled, in_context):
    mesh = ON_FOUR
    weight = np.array([1.0, 2.0, 3.0, 4.0], np.float32)

    def loss(params, ids):
        rows = jax.sharding.reshard(read(params["table"], ids), WHOLE)
        return jnp.sum(weight * (rows**2 @ params["w"]))

    value_and_grad = gx.value_and_grad(loss, tables=["table"])
    if compiled:
        value_and_grad = jax.jit(value_and_grad)
    ids = np.array([7, 3, 9, 7])
    with in_context(mesh):
        params = jax.device_put(model(part()), NamedSharding(mesh, P()))
        on_mesh = jax.device_put(jnp.asarray(ids), NamedSharding(mesh, batch))
        value, grads = value_and_grad(params, on_mesh)
        got = grads["table"].densify()
    wide = TABLE.astype(np.float64)
    wanted = np.zeros_like(wide)
    np.add.at(wanted, ids, 2 * weight[:, None] * wide[ids] * [1, 2, 3])
    np.testing.assert_allclose(value, np.sum(wanted * wide) / 2, rtol=1e-5)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_part_that_differs_by_device_where_the_ids_do_not():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def loss(table, scale):
        rows = jnp.take(table, jnp.array([7, 3]), axis=0)
        return scale[0] * jnp.sum(rows**2)

    def grad(table, scale):
        nothing = 0 * jax.lax.axis_index("d").astype(table.dtype)
        table = maps.with_values(table, table.values + nothing)
        value, grads = gx.value_and_grad(loss)(table, scale)
        return jax.lax.psum(value, "d"), jax.lax.psum(grads.densify(), "d")

    mapped = jax.shard_map(
        grad, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P())
    )
    value, got = jax.jit(mapped)(part(), jnp.arange(1.0, 5.0))
    wanted = np.zeros((HEIGHT, WIDTH))
    wanted[[3, 7]] = 20 * TABLE[[3, 7]].astype(np.float64)  # 2 (1 + 2 + 3 + 4)
    np.testing.assert_allclose(value, np.sum(wanted * TABLE) / 2, rtol=1e-5)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.every
@pytest.mark.parametrize(
    ("read", "compiled"),
    [
        (lambda t, ids: t[ids], True),
        (lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"), True),
        (lambda t, ids: t.at[ids].get(mode="promise_in_bounds"), False),
        (lambda t, ids: t[49], True),
        (lambda t, ids: t[-1:], False),
        (lambda t, ids: jax.lax.dynamic_slice_in_dim(t, ids[1], 1), False),
        (lambda t, ids: jax.lax.dynamic_slice_in_dim(t, ids[0] - 3, 1), True),
    ],
    ids=["index", "clip", "promise", "static", "slice", "dynamic", "first"],
)
def test_ids_at_the_ends_of_the_table_and_beyond(read, compiled):
    """They read the last row. A part gets a gradient of it only where a table does."""
    ids = jnp.array([3, HEIGHT + 5])

    def loss(params):
        rows = read(params["table"], ids)
        return jnp.sum(rows**2 @ params["w"]), rows

    how = jax.jit if compiled else lambda f: f
    value_and_grad = how(gx.value_and_grad(loss, tables=["table"], has_aux=True))
    (value, rows), grads = value_and_grad(model(part((0, 3, 49, HEIGHT))))
    dense = how(jax.value_and_grad(loss, has_aux=True))
    (wanted, wanted_rows), table = dense(model(jnp.asarray(TABLE)))
    np.testing.assert_array_equal(rows, wanted_rows)
    assert value == wanted
    np.testing.assert_array_equal(grads["table"].densify(), table["table"])
    np.testing.assert_array_equal(grads["w"], table["w"])


@pytest.mark.parametrize(
    ("read", "where"),
    [
        (lambda t: t[jnp.array([3, HEIGHT + 5])], r"got 49 at position \[1\]"),
        (lambda t: t[7:10], r"got 8 at position \[1\]"),
        (lambda t: t[-1], r"got 49 at position \[0\]"),
    ],
)
def test_a_row_that_is_read_and_not_there_is_an_error(read, where):
    with pytest.raises(ValueError, match=f"ids must be among .* {where}"):
        gx.value_and_grad(lambda p: jnp.sum(read(p["table"])))(model(part()))


@pytest.mark.slow
def test_half_precision_stays():
    half = part(dtype="bfloat16")
    _, grads = gx.value_and_grad(loss_fn)(model(half), IDS)
    assert gx.lookup(half, IDS).dtype == grads["table"].dtype == "bfloat16"


def test_an_id_that_is_not_there_is_an_error_where_it_can_be_seen():
    with pytest.raises(ValueError, match=r"ids must be among .* got 4 at .*\[1\]"):
        gx.lookup(part(), [3, 4])
    with pytest.raises(ValueError, match=r"got 4 at .*\[0, 1\]"):
        gx.value_and_grad(loss_fn)(model(part()), np.array([[3, 4]]))


@pytest.mark.slow
def test_a_traced_id_that_is_not_there_is_padding():
    rows = jax.jit(gx.lookup)(part(), jnp.array([3, 4, 8, 49, 0]))
    np.testing.assert_array_equal(rows, [TABLE[3], *np.zeros((4, WIDTH))])
    ids = jnp.array([[3, 4]])
    _, grads = jax.jit(gx.value_and_grad(loss_fn))(model(part()), ids)
    assert set(grads["table"].indices.tolist()) == {3, HEIGHT}
    assert not np.any(grads["table"].densify()[4])


def test_a_part_may_be_made_of_traced_arrays():
    indices, values = jnp.array([4, 2]), jnp.ones((2, WIDTH))
    part = jax.eval_shape(lambda i, x: gx.TableRows(i, x, TABLE.shape), indices, values)
    assert part.values.shape == (2, WIDTH)


def test_an_empty_part_reads_padding():
    empty = gx.TableRows([], jnp.zeros((0, WIDTH)), TABLE.shape)
    assert not np.any(jax.jit(gx.lookup)(empty, IDS))
    with pytest.raises(ValueError, match="got 7"):
        gx.lookup(empty, IDS)


def test_a_part_of_integers_has_no_gradient():
    integers = gx.TableRows([3], jnp.ones((1, WIDTH), int), TABLE.shape)
    assert gx.lookup(integers, [3]).tolist() == [[1] * WIDTH]
    with pytest.raises(ValueError, match=r"'table' is int32\[50, 3\]"):
        gx.value_and_grad(loss_fn)(model(integers), IDS)


CLIPPED = optax.chain(gx.clip_by_global_norm(0.1), gx.adagrad(0.1))


STEPS = {
    "clip": CLIPPED,
    "row_wise": gx.adagrad(0.1, row_wise=True),
    "lazy": gx.lazy(optax.adam(0.1)),
    "drop_stale": gx.drop_stale(CLIPPED, 4),
    "accumulate": gx.accumulate(gx.adagrad(0.1), 2),
    "row_mean": gx.conditional_accumulator(gx.adagrad(0.1), 2, reduction="row_mean"),
    "partition": optax.partition(
        {"rows": gx.adagrad(0.1), "rest": optax.sgd(0.01, 0.9)},
        {"table": "rows", "w": "rest"},
    ),
}


@pytest.mark.quick_case("row_wise")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("standard_promotion")
def test_minimize_steps_on_a_part_as_on_the_table(name):
    tx = STEPS[name]
    step = gx.minimize(loss_fn, tx, tables=["table"])
    whole, some = model(jnp.array(TABLE)), model(part())
    whole_state, some_state = tx.init(whole), tx.init(some)
    gated = "local_step" in states.words(whole_state)
    for _ in range(4):
        extra = {"local_step": gx.global_step(whole_state)} if gated else {}
        whole, whole_state, wanted = step(whole, whole_state, IDS, **extra)
        some, some_state, loss = step(some, some_state, IDS, **extra)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert some["table"].indices.tolist() == [*HELD, HEIGHT, HEIGHT, HEIGHT]
    rows = some["table"].values[: len(HELD)]
    assert np.all(rows != TABLE[HELD])
    np.testing.assert_allclose(rows, whole["table"][jnp.array(HELD)], rtol=1e-6)
    np.testing.assert_allclose(some["w"], whole["w"], rtol=1e-6)


def test_a_dense_gradient_of_a_part_is_refused():
    tx = gx.adagrad(0.1)
    params = model(part())
    grads = model(jnp.asarray(TABLE))
    with pytest.raises(TypeError, match=r"row-sparse at \['table'\].*float32\[50,3\]"):
        gx.apply_gradients(tx, grads, tx.init(params), params)


def test_a_part_without_a_gradient_stays():
    tx = gx.adagrad(0.1)
    params = model(part())
    grads = {"table": None, "w": jnp.ones(3)}
    new, _ = gx.apply_gradients(tx, grads, tx.init(params), params)
    assert new["table"].indices.tolist() == params["table"].indices.tolist()
    np.testing.assert_array_equal(new["table"].values, params["table"].values)


@pytest.mark.slow
def test_compensation_reads_the_part_that_the_worker_had():
    tx = gx.compensate_delay(variance_control=0.5)
    today = model(jnp.asarray(TABLE) + 1)
    _, grads = gx.value_and_grad(loss_fn)(model(part()), IDS)
    by_part, _ = tx.update(grads, (), today, worker_params=model(part()))
    whole = model(jnp.asarray(TABLE))
    by_whole, _ = tx.update(grads, (), today, worker_params=whole)
    summed = grads["table"].sum_duplicates()
    held = np.asarray(summed.indices)[:3]
    g = np.asarray(summed.values, np.float64)[:3]
    wanted = g + 0.5 * g * g * (TABLE[held] + 1.0 - TABLE[held])
    np.testing.assert_allclose(by_part["table"].values[:3], wanted, rtol=1e-5)
    np.testing.assert_array_equal(by_part["table"].values, by_whole["table"].values)
