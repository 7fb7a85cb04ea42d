"""Lookups and their row-sparse gradients: the dense ones, without a dense array."""

import functools
import typing

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._rows import rows
from tests.conftest import half
from tests.training.losses import pairs

HEIGHT = 6
TABLE = np.random.default_rng(0).standard_normal((HEIGHT, 3)).astype(np.float32)
PADDED = np.concatenate([TABLE, np.zeros((1, 3), np.float32)])  # The last row is zeros.
IDS = np.array([4, 0, 4, HEIGHT, 1])  # A repetition, and padding.
ROWS = IDS.tolist()


def one_hot_read(table, ids):
    """The rows, by a dense product. Padding has no 1 in it, so it reads 0."""
    one_hot = jax.nn.one_hot(jnp.asarray(ids), table.shape[0], dtype=table.dtype)
    return jnp.tensordot(one_hot, table, 1)


def draw(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.every
@pytest.mark.parametrize(
    ("ids", "dtype"),
    pairs(
        [2, HEIGHT, [1, 6, 1], [[6, 5]], np.array([[0, 5]])],
        [None, "int8", "uint32", "int32"],
    ),
)
def test_lookup_reads_rows_and_zeros_at_the_height(ids, dtype):
    given = ids if dtype is None else jnp.asarray(ids, dtype)
    rows = gx.lookup(jnp.asarray(TABLE), given)
    np.testing.assert_array_equal(rows, PADDED[np.asarray(ids)])


@pytest.mark.parametrize(
    ("dtype", "height"),
    [("int8", 127), ("int8", 128), ("uint8", 300), ("int16", 40_000)],
)
def test_a_table_higher_than_the_ids_can_count(dtype, height):
    last = min(height - 1, np.iinfo(dtype).max)
    rows = gx.lookup(jnp.arange(height), jnp.array([5, last], dtype))
    assert rows.tolist() == [5, last]


def test_int64_ids():
    with jax.enable_x64(True):
        ids = jnp.array([2**32 + 1, 1, 1 - 2**32])
        rows = jax.jit(gx.lookup)(jnp.arange(1, 4), ids)
    assert rows.tolist() == [0, 2, 0]


@pytest.mark.every
@pytest.mark.parametrize("outside", [-1, -HEIGHT, HEIGHT + 1, 2**31 - 1, -(2**31)])
def test_a_traced_id_outside_reads_zeros(outside):
    rows = jax.jit(gx.lookup)(jnp.asarray(TABLE), jnp.array([outside, 1]))
    np.testing.assert_array_equal(rows, [np.zeros(3), TABLE[1]])


@pytest.mark.every
@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 7], ValueError, r"^ids must be in \[0, 6\].* got 7 at position \[1\]"),
        (jnp.array([[0], [-1]]), ValueError, r"got -1 at position \[1, 0\]"),
        (-1, ValueError, r"got -1 at position \[\]"),
        (np.array([2**32 + 1]), ValueError, "got 4294967297 at position"),
        (1.0, TypeError, "^ids must be integers, got float"),
        ([True], TypeError, "^ids must be integers, got bool"),
    ],
)
def test_bad_ids(ids, error, message):
    with pytest.raises(error, match=message):
        gx.lookup(jnp.asarray(TABLE), ids)


def test_an_id_is_checked_under_jit_where_it_is_concrete():
    with pytest.raises(ValueError, match="got -1 at position"):
        jax.jit(lambda table: gx.lookup(table, [-1]))(TABLE)


@pytest.mark.parametrize("ids", [[], [0, 0]])
def test_a_table_without_rows(ids):
    assert gx.lookup(jnp.asarray(TABLE), []).shape == (0, 3)
    table, ids = jnp.ones((0, 3)), jnp.array(ids, jnp.int32)
    assert gx.lookup(table, ids).tolist() == [[0, 0, 0]] * len(ids)
    for tx in (gx.adagrad(0.1), gx.adagrad(0.1, row_wise=True)):
        step = gx.minimize(lambda t: jnp.sum(gx.lookup(t, ids)), tx, tables=[""])
        params, _, loss = step(jnp.ones((0, 3)), tx.init(table))
        assert (params.shape, loss) == ((0, 3), 0)


def names(*types):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=types)


TYPES = {
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "automatic": (AxisType.Auto, AxisType.Auto),
    "both": (AxisType.Auto, AxisType.Explicit),
}


@pytest.mark.parametrize(
    ("types", "spec", "batch", "in_context"),
    half(
        ["explicit", "both"],
        [P(None, ("x", "y")), P("x", "y"), P(("x", "y"))],
        [P("x"), P(("x", "y"))],
        [False, True],
    ),
    indirect=["in_context"],
    ids=str,
)
def test_ids_on_the_axis_that_cuts_the_table(types, spec, batch, in_context):
    mesh = names(*TYPES[types])
    with in_context(mesh):
        table = jax.device_put(draw(8, 8), NamedSharding(mesh, spec))
        ids = jax.device_put(jnp.arange(8)[::-1], NamedSharding(mesh, batch))
        rows = jax.jit(gx.lookup)(table, ids)
    np.testing.assert_array_equal(rows, draw(8, 8)[::-1])


def test_the_mesh_of_explicit_axes_is_set_unless_one_is():
    on = {
        name: jax.device_put(np.ones(8), NamedSharding(names(*TYPES[name]), P("x")))
        for name in ("automatic", "explicit")
    }
    empty, mesh = jax.sharding.get_abstract_mesh(), names(*TYPES["explicit"])

    def of_trace(x):
        with rows.mesh_context([x]):
            assert jax.sharding.get_abstract_mesh() == empty
        return x

    for arrays, wanted in (
        ([jnp.ones(2), on["automatic"]], empty),
        ([jnp.ones(2), on["explicit"]], mesh.abstract_mesh),
    ):
        with rows.mesh_context(arrays):
            assert jax.sharding.get_abstract_mesh() == wanted
    jax.make_jaxpr(of_trace)(on["automatic"])
    other = names(*TYPES["both"])
    with jax.set_mesh(other), rows.mesh_context([on["explicit"]]):
        assert jax.sharding.get_abstract_mesh() == other.abstract_mesh


def test_rows_lie_as_their_ids_and_a_row_where_these_leave_an_axis():
    mesh = names(*TYPES["explicit"])
    for spec, batch, wanted in (
        (P(None, ("x", "y")), P("x"), P("x", None)),
        (P("x", "y"), P("x"), P("x", "y")),
        (P("x", "y"), P(None), P(None, "y")),
        (P("x", "y"), P(("x", "y")), P(("x", "y"), None)),
    ):
        on_table, on_ids = NamedSharding(mesh, spec), NamedSharding(mesh, batch)
        table = jax.ShapeDtypeStruct((8, 8), "f4", sharding=on_table)
        ids = jax.ShapeDtypeStruct((16,), "i4", sharding=on_ids)
        assert jax.eval_shape(gx.lookup, table, ids).sharding.spec == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "specs", "compiled", "in_context"),
    [
        ("explicit", (P("x", None), P("x")), True, True),
        ("explicit", (P(), None), False, False),
        ("automatic", (P("x", None), None), True, False),
        ("automatic", (P(), P("x")), False, True),
        ("both", (P("x", None), P("x")), True, False),
        ("both", (P("x", None), None), False, True),
    ],
    indirect=["in_context"],
    ids=str,
)
def test_gradients_and_steps_on_a_mesh(types, specs, compiled, in_context):
    """As on one device, wherever ids and tables lie. Some ids are on no mesh."""
    mesh, (spec, batch) = names(*TYPES[types]), specs
    how = jax.jit if compiled else lambda f: f
    ids = np.array([4, 0, 4, 8, 1, 7, 7, 2], np.int32)

    def loss(params, ids):
        rows = gx.lookup(params["emb"], ids)
        return jnp.sum(jnp.log1p(rows**2) @ params["w"])

    values = np.asarray(draw(8, 3)), np.float32([1, 2, 3]), np.ones((4, 2), "float32")
    names_of = "emb", "w", "unused"
    table = np.concatenate([values[0], np.zeros((1, 3))])
    slopes = np.zeros((9, 3))
    rows = table[ids]
    np.add.at(slopes, ids, 2 * rows / (1 + rows**2) * values[1])
    slopes = slopes[:-1]
    with in_context(mesh):
        on = [NamedSharding(mesh, s) for s in (spec, P(), P())]
        params = dict(zip(names_of, map(jax.device_put, values, on), strict=True))
        ids = jnp.asarray(ids)
        if batch is not None:
            ids = jax.device_put(ids, NamedSharding(mesh, batch))
        value, grads = how(gx.value_and_grad(loss, tables=["emb"]))(params, ids)
        tx = gx.adagrad(0.1, global_clipnorm=1.0)

        @how
        def step(grads, params):
            return gx.apply_gradients(tx, grads, tx.init(params), params)

        after, _ = step(grads, params)
    wanted = np.sum(np.log1p(rows**2) @ values[1])
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(densify(grads["emb"]), slopes, rtol=1e-5, atol=1e-6)
    norm = np.sqrt(np.sum(slopes**2) + np.sum(np.asarray(grads["w"]) ** 2.0))
    clipped = slopes / max(1, norm)
    expected = values[0] - 0.1 * clipped / np.sqrt(0.1 + clipped**2 + 1e-7)
    np.testing.assert_allclose(after["emb"], expected, rtol=1e-5)
    assert after["emb"].sharding.is_equivalent_to(on[0], 2) or (
        types != "explicit" and compiled
    )


def is_sparse(x):
    return isinstance(x, gx.IndexedSlices)


def by_path(tree):
    flat, _ = jax.tree.flatten_with_path(tree, is_leaf=is_sparse)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in flat}


def densify(grads):
    """The dense gradients, by NumPy."""

    def dense(g):
        if not is_sparse(g):
            return g
        table = np.zeros((g.dense_shape[0] + 1, *g.dense_shape[1:]), np.float32)
        np.add.at(table, np.asarray(g.indices), np.float32(g.values))
        return table[:-1].astype(g.values.dtype)

    return jax.tree.map(dense, grads, is_leaf=is_sparse)


def read_at(*paths):
    """A loss that reads tables at these paths, one after another."""

    def loss(read, params, ids):
        total = jnp.float32(0)
        for n, path in enumerate(paths):
            rows = read(by_path(params)[path], ids).astype("float32")
            total += jnp.sum(jnp.sin(rows + n) * params["w"])
        return total

    return loss


def read_what_params_say(read, params, ids):
    ids = jnp.argsort(params["scores"])[:3] + ids[1]
    return jnp.sum(read(params["emb"], ids) ** 2 * params["w"])


class Layer(typing.NamedTuple):
    emb: jax.Array


PARAMS = {
    "w": jnp.float32(0.7),
    "scores": jnp.array([3.0, 1.0, 2.0, 0.0]),
    "emb": draw(6, 3),
    "other": draw(9, 2),
    "layers": [Layer(draw(6, 3, seed=2)), {"emb": draw(6, 3, seed=3)}],
    "half": draw(6, 3, dtype="bfloat16"),
}
NESTED = read_at("layers/1/emb", "emb", "layers/0/emb", "emb")
# How a loss reads tables, and the rows that each named table's gradient must hold.
CASES = {
    "one": (read_at("emb"), {"emb": ROWS}),
    "two": (NESTED, {"layers/1/emb": ROWS, "emb": ROWS * 2}),
    "attribute": (NESTED, {"layers/0/emb": ROWS}),
    "none": (NESTED, {}),
    "computed-ids": (read_what_params_say, {"emb": [3, 1, 2]}),
    "never-read": (NESTED, {"emb": ROWS * 2, "other": []}),
    "bfloat16": (read_at("half"), {"half": ROWS}),
}


@functools.cache
def dense_gradients(loss):
    loss = functools.partial(loss, one_hot_read)
    return jax.jit(jax.value_and_grad(loss))(PARAMS, IDS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), pairs(CASES, [jax.jit, lambda f: f]))
def test_equals_the_dense_gradient(name, how):
    loss, rows = CASES[name]
    sparse = functools.partial(loss, gx.lookup)
    value, grads = how(gx.value_and_grad(sparse, tables=list(rows)))(PARAMS, IDS)
    expected_value, expected = dense_gradients(loss)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    dense = densify(grads)
    chex.assert_trees_all_equal_shapes_and_dtypes(dense, PARAMS)
    tol = 1e-2 if name == "bfloat16" else 1e-6
    chex.assert_trees_all_close(dense, expected, rtol=tol, atol=tol)
    assert read_rows(grads) == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "pick",
    [
        lambda p: eqx.filter(p, eqx.is_inexact_array),
        lambda p: eqx.combine(*eqx.partition(p, eqx.is_array)),
        lambda p: {k: x for k, x in p.items() if isinstance(x, jax.Array)},
    ],
)
def test_a_loss_that_picks_arrays_out_of_its_parameters(pick):
    def loss(read, params, ids):
        picked = pick(params)
        rows = [read(t, ids) for t in picked.values() if t is not None and t.ndim == 2]
        return picked["w"] + sum(jnp.sum(r**2) for r in rows)

    sparse = gx.value_and_grad(functools.partial(loss, gx.lookup), tables=["emb"])
    value, grads = jax.jit(sparse)(EMB, IDS)
    dense = jax.value_and_grad(functools.partial(loss, one_hot_read))
    expected_value, expected = dense(EMB, IDS)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    chex.assert_trees_all_close(densify(grads), expected, rtol=1e-6)


@pytest.mark.slow
def test_no_tracer_of_the_loss_stays_behind():
    with jax.checking_leaks():
        value, _ = jax.jit(gx.value_and_grad(LOSS, tables=["emb"]))(EMB, IDS)
    np.testing.assert_allclose(value, DENSE_LOSS(EMB, IDS), rtol=1e-6)


def test_the_gradient_of_padding_is_zero_where_its_derivative_is_none():
    def loss(table):
        return jnp.sum(jnp.linalg.norm(gx.lookup(table, IDS), axis=1))

    grads = jax.jit(gx.value_and_grad(loss, tables=[""]))(TABLE)[1]
    rows = TABLE / np.linalg.norm(TABLE, axis=1, keepdims=True)
    expected = np.where(IDS[:, None] < HEIGHT, rows[np.minimum(IDS, HEIGHT - 1)], 0)
    np.testing.assert_allclose(grads.values, expected, rtol=1e-6)


def read_rows(grads):
    """The indices of each gradient that is row-sparse, by path."""
    return {k: g.indices.tolist() for k, g in by_path(grads).items() if is_sparse(g)}


@pytest.mark.slow
def test_tables_may_be_a_predicate_on_the_path():
    grads = gx.value_and_grad(
        functools.partial(NESTED, gx.lookup), tables=lambda path: "layers" in path
    )(PARAMS, IDS)[1]
    assert read_rows(grads) == {"layers/0/emb": ROWS, "layers/1/emb": ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_aux_and_keyword_arguments(how):
    traced = []

    def loss(params, ids, *, factor):
        traced.append(None)
        rows, words = gx.lookup(params["emb"], ids), {"name": "rows", "n": 3}
        aux = {"rows": rows} | ({} if how is jax.jit else words)
        return factor * jnp.sum(rows**2), aux

    value_and_grad = how(gx.value_and_grad(loss, tables=["emb"], has_aux=True))
    (value, aux), grads = value_and_grad({"emb": TABLE}, IDS, factor=jnp.float32(3))
    np.testing.assert_allclose(value, 3 * np.sum(PADDED[IDS] ** 2), rtol=1e-6)
    np.testing.assert_array_equal(aux["rows"], PADDED[IDS])
    np.testing.assert_allclose(grads["emb"].values, 6 * PADDED[IDS], rtol=1e-6)
    assert len(traced) == 1
    assert how is jax.jit or (aux["name"], aux["n"]) == ("rows", 3)


# The height of a table, the shape of its rows, and ids.
SHAPES = [
    (1, (), [1, 0, 0]),
    (1, (2, 3), 0),
    (2, (2,), []),
    (3, (2, 3), [[2, 0, 2], [3, 1, 2]]),
    (4, (), [[4, 4], [3, 3]]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("height", "row", "ids"), SHAPES)
def test_ids_and_rows_of_any_shape(height, row, ids):
    ids = jnp.array(ids, jnp.int32)
    table, weights = draw(height, *row), draw(*ids.shape, *row, seed=1)

    def loss(read, table):
        return jnp.sum(jnp.sin(read(table, ids)) * weights)

    sparse = gx.value_and_grad(functools.partial(loss, gx.lookup), tables=[""])
    _, grads = jax.jit(sparse)(table)
    expected = jax.grad(functools.partial(loss, one_hot_read))(table)
    np.testing.assert_array_equal(grads.indices, ids.ravel())
    np.testing.assert_allclose(grads.densify(), expected, rtol=1e-6, atol=1e-6)


LOSS = functools.partial(read_at("emb"), gx.lookup)
DENSE_LOSS = functools.partial(read_at("emb"), one_hot_read)
EMB = {"w": PARAMS["w"], "emb": PARAMS["emb"]}
SPARSE = gx.value_and_grad(LOSS, tables=["emb"])


@pytest.mark.slow
@pytest.mark.parametrize("forward", [True, False])
def test_under_cond(forward):
    def backward(params, ids):
        return SPARSE(params, ids[::-1])

    either = jax.jit(lambda *args: jax.lax.cond(args[0], SPARSE, backward, *args[1:]))
    _, grads = either(forward, EMB, jnp.array(IDS))
    assert grads["emb"].indices.tolist() == (ROWS if forward else ROWS[::-1])
    expected = jax.grad(DENSE_LOSS)(EMB, IDS)
    chex.assert_trees_all_close(densify(grads), expected, rtol=1e-6, atol=1e-6)


def memory(height, tables, loss=LOSS):
    shapes = EMB | {"emb": jax.ShapeDtypeStruct((height, 8), jnp.float32)}
    step = jax.jit(gx.value_and_grad(loss, tables=tables))
    stats = step.lower(shapes, IDS).compile().memory_analysis()
    return stats.temp_size_in_bytes, stats.output_size_in_bytes


@pytest.mark.slow
@pytest.mark.figures
def test_no_array_of_the_size_of_the_table():
    assert memory(1_000, ["emb"]) == memory(1_000_000, ["emb"])
    again = ["emb"], jax.checkpoint(LOSS)
    assert memory(1_000, *again) == memory(1_000_000, *again)
    assert memory(1_000_000, ())[1] > 1_000_000 * 8 * 4  # The dense gradient.


@pytest.mark.every
@pytest.mark.parametrize(
    ("tables", "params", "error", "message"),
    [
        (["nope"], EMB, ValueError, r"got 'nope'; there are 'emb', 'w'\.$"),
        (["emb"], {"emb": [TABLE]}, ValueError, r"got 'emb'; there are 'emb/0'\.$"),
        ("emb", EMB, TypeError, "must be a sequence of paths, got 'emb'"),
        (["n"], {"n": jnp.arange(3)}, ValueError, r"rows, but 'n' is int32\[3\]"),
        (["w"], EMB, ValueError, r"rows, but 'w' is float32\[\]"),
        (["w"], {"w": 0.5}, ValueError, r"rows, but 'w' is float32\[\]"),
        (lambda _: True, EMB, ValueError, r"rows, but 'w' is float32\[\]"),
    ],
)
def test_bad_tables(tables, params, error, message):
    with pytest.raises(error, match=message):
        gx.value_and_grad(LOSS, tables=tables)(params, IDS)


def test_two_leaves_of_one_path():
    params = {"a": {"b": jnp.float32(2)}, "a/b": jnp.float32(3)}
    _, grads = gx.value_and_grad(lambda p: p["a"]["b"] * p["a/b"])(params)
    assert grads == {"a": {"b": 3.0}, "a/b": 2.0}


ON_TWO = NamedSharding(jax.make_mesh((2,), ("x",), (AxisType.Auto,)), P("x"))
# i are ids, n is one of them, and some of o lie outside. A line is a program.
WAYS = """
t[i] | t[i, :] | t[-i] | t[n] | t[i[0]] | t[o] | t[np.array([2, 2])]
t[i.astype("int8")] | jnp.take(t, i, axis=0) | jnp.take(t, o, axis=0, mode="clip")
t[i][:, 1] | t[i].T
jnp.take(t, o, axis=0, fill_value=0) | t.at[o].get(mode="fill", fill_value=0)
t.at[o].get(mode="clip") | jnp.asarray(t)[(i,)] | jnp.array(t)[i] | gx.lookup(t, i)
jax.jit(lambda i: gx.lookup(t, i))(i) | jax.jit(lambda t: gx.lookup(t, i))(t)
jax.jit(lambda t: t)(t)[i] | jax.jit(jax.jit(lambda t, i: (t[i], t)))(t, i)[1][o[:2]]
eqx.filter_jit(lambda t: t[i])(t) | jax.vmap(lambda i: gx.lookup(t, i))(i)
jax.vmap(lambda n: t[n])(i) | jax.vmap(jax.vmap(lambda n: t[n]))(square)
jax.vmap(lambda i: t[i], in_axes=1)(square) | jax.vmap(lambda i: t[i], 0, 1)(square)
jax.vmap(lambda i: jnp.take(t, i, axis=0), 1)(square) | jax.vmap(lambda n: t[n])(o)
jax.grad(lambda s: jnp.sum(jnp.sin(s * gx.lookup(t, i))))(1.0) | t[i] * len(t)
jax.grad(jax.checkpoint(lambda s: jnp.sum(jnp.sin(s * gx.lookup(t, i)))))(1.0)
jax.lax.dynamic_slice(t, (n, 0), (1, 3)) | t.at[n].get(mode="clip") | (t[i], t[o])
jnp.linalg.norm(jax.grad(lambda r: jnp.sum(r**3))(t[i])) | t[i] + jnp.zeros_like(t)[i]
jax.lax.with_sharding_constraint(t, ON_TWO)[i]
t[0] | t[-1] | t[2, :] | t[:3] | t[1:-1] | t[::2] | t[-2:] | t[:0]
t[:3][None] | t.astype("bfloat16")[0] | (t[:2], t[1], t[i]) | jax.jit(lambda t: t[1])(t)
jax.vmap(lambda n: n * t[0])(t[i][:, 0]) | jax.lax.dynamic_slice(t, (n, 0), (2, 3))
jax.lax.dynamic_slice_in_dim(t, 5, 3) | jax.lax.dynamic_slice_in_dim(t, -9, 3)
jnp.take(t.astype("bfloat16"), o, axis=0, fill_value=0.3)
t.astype("float16").astype("float32").at[o].get(mode="fill", fill_value=-1e9) * 1e-9
jax.checkpoint(lambda i: t[i])(i) | jax.checkpoint(lambda t, i: (t[i], t))(t, i)[1][o]
eqx.filter_checkpoint(lambda t: jnp.sin(t[i]))(t) | jax.checkpoint(lambda t: t[1])(t)
jax.checkpoint(lambda t: (t[i], jax.jit(jax.checkpoint(lambda t: t[o]))(t), t[:2]))(t)
jax.vmap(jax.checkpoint(lambda n: t[n]))(i) | jax.checkpoint(lambda t: t.T[:, :1])(x)
jax.checkpoint(lambda t: t.astype("bfloat16"))(t)[i]
jax.lax.stop_gradient(t)[i] | (t[i], jax.lax.stop_gradient(t)[o])
jax.checkpoint(jax.lax.stop_gradient)(t)[i] | checkpoint_name(t, "t")[i]
[row * n for n, row in enumerate(t)] | list(t.astype("bfloat16")) | (t[i], *t)
"""


@pytest.mark.parametrize("line", WAYS.strip().splitlines(), ids=str)
def test_layers_and_functions_that_read_rows(line):
    def loss(params, ids):
        names = {"t": params["emb"], "i": ids, "n": ids[1], "o": ids * 5 - 7}
        names["square"], names["x"] = ids[:4].reshape(2, 2), jnp.ones((6, 3))
        read = [eval(x, globals() | names) for x in line.split(" | ")]
        return sum(
            jnp.sum(jnp.sin(k + rows.astype("float32")) * params["w"])
            for k, rows in enumerate(jax.tree.leaves(read))
        )

    args = EMB | {"emb": draw(6, 3) + 0.1}, jnp.array([4, 0, 4, 1, 3])
    sparse, dense = gx.value_and_grad(loss, tables=["emb"]), jax.value_and_grad(loss)
    # A part of a table, which has all of its rows, is read as the table is.
    part = gx.TableRows(
        [0, 1, 2, 3, 4, 5, 6], jnp.pad(args[0]["emb"], ((0, 1), (0, 0))), (6, 3)
    )

    @jax.jit
    def results(params, ids):
        of_part = sparse(params | {"emb": part}, ids)
        return dense(params, ids), sparse(params, ids), of_part

    (expected_value, expected), *found = results(*args)
    for value, grads in found:
        np.testing.assert_allclose(value, expected_value, rtol=1e-5)
        assert is_sparse(grads["emb"])
        chex.assert_trees_all_close(densify(grads), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_of_a_stopped_table_get_no_gradient():
    def loss(params, ids):
        stopped = jax.lax.stop_gradient(params["emb"])
        return jnp.sum(stopped[ids] * params["emb"][ids[:1]] * params["w"])

    value, grads = gx.value_and_grad(loss, tables=["emb"])(EMB, jnp.array([4, 0]))
    table = np.float64(EMB["emb"])
    np.testing.assert_allclose(value, 0.7 * (table[[4, 0]] * table[4]).sum(), rtol=1e-5)
    assert grads["emb"].indices.tolist() == [4]
    expected = 0.7 * table[[4, 0]].sum(0, keepdims=True)
    np.testing.assert_allclose(grads["emb"].values, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("saved", "prevent_cse"), pairs(["rows", "nothing"], [True, False])
)
def test_a_checkpoint_keeps_its_policy_and_the_names_of_its_tables(saved, prevent_cse):
    policy = jax.checkpoint_policies.save_only_these_names(saved)

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)
    def loss(table, ids):
        return jnp.sum(jnp.sin(checkpoint_name(table, "rows")[ids]))

    sparse = gx.value_and_grad(loss, tables=[""])
    eqns = jax.make_jaxpr(sparse)(EMB["emb"], jnp.array([4, 0])).jaxpr.eqns
    (again,) = (eqn for eqn in eqns if eqn.primitive.name == "remat2")
    assert again.params["prevent_cse"] is prevent_cse
    read_again = "gather" in str(again.params["jaxpr"])
    assert read_again == (saved == "nothing")


def test_a_checkpoint_that_prevents_cse_for_some_arguments():
    if jax.__version_info__ < (0, 10):
        pytest.skip("before JAX 0.10 it does so for all arguments or none")

    def loss(prevent_cse):
        f = jax.checkpoint(lambda t, ids: jnp.sum(t[ids] ** 2), prevent_cse=prevent_cse)
        return gx.value_and_grad(f, tables=[""])

    ids = jnp.array([4, 0])
    jaxpr = jax.make_jaxpr(loss((False, True)))(EMB["emb"], ids)
    (again,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "remat2")
    assert set(again.params["prevent_cse"]) == {True, False}
    _, grads = loss((False, True))(EMB["emb"], ids)
    np.testing.assert_array_equal(grads.values, 2 * EMB["emb"][ids])


@pytest.mark.parametrize("twice", [False, True])
def test_a_table_that_is_cast_is_not_cast_whole(twice):
    """Only its rows are cast: the numbers are the same, and sums are rounded less."""

    def loss(params, ids):
        table = params["emb"].astype("bfloat16")
        table = table.astype("float16") if twice else table
        return jnp.sum(table[ids].astype("float32") ** 2 * params["w"])

    sparse = gx.value_and_grad(loss, tables=["emb"])
    value, grads = jax.jit(sparse)(EMB, jnp.array([4, 0, 1]))
    expected_value, expected = jax.value_and_grad(loss)(EMB, jnp.array([4, 0, 1]))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert grads["emb"].dtype == jnp.float32
    chex.assert_trees_all_close(densify(grads), expected, rtol=1e-6)
    assert "f16[6,3]" not in str(jax.make_jaxpr(sparse)(EMB, jnp.array([4, 0, 1])))


@pytest.mark.slow
def test_ids_of_one_byte_and_a_clip_at_more_rows_than_they_count():
    def loss(table):
        ids = jnp.array([100, 120], "int8")
        return jnp.sum(jnp.take(table, ids, axis=0, mode="clip") ** 2)

    # JAX 0.10 is no oracle here: it clips at 299 modulo 256.
    grads = gx.value_and_grad(loss, tables=[""])(draw(300, 2))[1]
    assert grads.indices.tolist() == [100, 120]


def test_names_of_the_loss_are_those_of_the_program():
    def loss(params, ids):
        with jax.named_scope("tower"):
            return jnp.sum(jnp.sin(params["emb"][ids]))

    step = jax.jit(gx.value_and_grad(loss, tables=["emb"]))
    text = step.lower(EMB, jnp.array([1, 2])).compile().as_text()
    assert "tower/sin" in text or "tower)/sin" in text


# Equations that do not read rows, by name, and code that has them.
OTHER_WAYS = {
    "mul": "t * 2 | 2 * t | np.ones((6, 3), 'float32') * t | jax.lax.mul(t, x)",
    "add": "t + x | x + t",
    "sub": "t - x | x - t",
    "div": "t / x | x / t",
    "integer_pow|square": "t**3 | jnp.square(t) | jnp.sum(t**2)",
    "neg": "-t",
    "dot_general": "t @ x[0] | x[:, 0] @ t | jnp.dot(x[:, 0], t)",
    "transpose": "t.T | x @ t.T",
    "reduce_sum": "t.sum() | jnp.sum(t) | jnp.einsum('ij->i', t)",
    "slice": "t[:, 1] | t[i][:, :2] * t[:, :2] | t[1:3, :2] | t[2, 1]",
    "rev": "t[::-1]",
    # In the last one the second index may lie outside, and nothing is read there.
    "gather": "t[i, 1] | t[i, :2] | t[:, i] | jax.lax.gather(t, jnp.ones((2, 2), int), "
    "jax.lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (1, 3), mode='fill')",
    "select_n": "jnp.where(x > 0, t, x)",
    "eq": "t == 0",
    "abs": "abs(t)",
    "broadcast_in_dim": "jax.vmap(lambda t: t[i])(t[None])",
    "scatter": "t.at[i].set(0)",
    "scan": "jax.lax.scan(lambda c, i: (c, gx.lookup(t, i)), 0, i) | "
    "jax.lax.map(lambda i: t[i], i)",
    "cond": "jax.lax.cond(i[0] > 0, lambda: gx.lookup(t, i), lambda: x[:1]) | "
    "jax.lax.cond(True, lambda: t[i], lambda: t[i])",
    "mul|neg": "jax.checkpoint(lambda t: t * 2)(t) | jax.checkpoint(lambda: -t)()",
    "custom_jvp_call": "jax.nn.relu(t) | t[i][0, 0] * jax.nn.relu(t)",
    "": "t | t.astype(int) | jax.jit(lambda t: t)(t) | {'model': [t]}",
}


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "expression"),
    [(name, e) for name, es in OTHER_WAYS.items() for e in es.split(" | ")],
)
def test_a_named_table_is_read_in_no_other_way(name, expression):
    def loss(params):
        names = {"t": params["a"]["emb"], "x": jnp.ones((6, 3)), "i": jnp.array([1])}
        return params["w"], eval(expression, globals() | names)

    params = {"a": {"emb": TABLE}, "w": 1.0}
    how = f"used by '({name})'" if name else "returned"
    match = rf"(?s)'a/emb' is one of tables.*lookup\(.*{how}.*leave 'a/emb' out"
    with pytest.raises(TypeError, match=match):
        gx.value_and_grad(loss, tables=["a/emb"], has_aux=True)(params)


@pytest.mark.every
@pytest.mark.parametrize(
    ("use", "how"),
    [
        (lambda t, x: x[t.astype(int)], "used as indices, cast to int32, by 'lt'"),
        (lambda t, x: t.astype(int) * 2, "used cast to int32, by 'mul'"),
    ],
)
def test_a_table_of_indices_is_told_from_one_that_is_compared(use, how):
    def loss(params):
        total = jnp.sum(use(params["emb"], jnp.ones(6)))
        return total.astype("float32") * params["w"]

    with pytest.raises(TypeError, match=how + r" .*test_lookup.py"):
        gx.value_and_grad(loss, tables=["emb"])(EMB)


@pytest.mark.slow
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fill_value_has_the_dtype_of_the_read(dtype, part):
    """JAX has a value for such rows: the one that is given, or its default."""
    table = jnp.arange(1.0, 13.0).reshape(6, 2).astype(dtype)
    ids = jnp.array([4, 6, 0, 90])

    def loss(params):
        rows = {}
        for casts in ("float32", "float16 float32", "bfloat16", "int32", ""):
            read = params["emb"]
            for cast in casts.split():
                read = read.astype(cast)
            for fill in (None, 0.1, -1e9) if casts.endswith("float32") else (None, 7):
                got = read.at[ids].get(mode="fill", fill_value=fill)
                rows[casts, str(fill)] = got
        learned = rows["float32", "0.1"] ** 2, rows["float16 float32", str(-1e9)] * 1e-9
        return params["w"] * sum(map(jnp.sum, learned)), rows

    rows = gx.TableRows([0, 4], table[np.array([0, 4])], (6, 2))
    sparse = gx.value_and_grad(loss, tables=["emb"], has_aux=True)
    w = jnp.float32(1)
    (value, rows), grads = sparse({"w": w, "emb": rows if part else table})
    dense = jax.value_and_grad(loss, has_aux=True)
    (wanted_value, wanted), expected = dense({"w": w, "emb": table})
    for how, row in wanted.items():
        assert rows[how].dtype == row.dtype
        np.testing.assert_array_equal(np.float64(rows[how]), np.float64(row), str(how))
    assert value == wanted_value
    np.testing.assert_array_equal(densify(grads["emb"]), expected["emb"])


def test_the_line_that_uses_a_table_is_named():
    def loss(params, ids):
        return jnp.sum(params["emb"][ids] @ params["emb"].T)

    line = loss.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"'transpose' .*test_lookup.py:{line}"):
        gx.value_and_grad(loss, tables=["emb"])(EMB, jnp.array([1]))


def automatic(f):
    return jax.sharding.auto_axes(f, out_sharding=P())


def on_automatic_axes(casts, reads):
    """Casts a table and reads its rows, each on explicit mesh axes or on automatic."""

    def cast(table):
        return checkpoint_name(table.astype("bfloat16"), "table")

    def read(table, ids):
        return jnp.take(table, ids, axis=0, mode="fill", fill_value=0.5)

    cast, read = automatic(cast) if casts else cast, automatic(read) if reads else read
    return lambda table, ids: read(cast(table), ids)


def cast_on_axes(table, ids):
    """A cast that also cuts the axis of the columns, where rows have their second."""
    columns = NamedSharding(jax.typeof(table).sharding.mesh, P(None, "y"))
    return jax.sharding.reshard(table.astype("bfloat16", device=columns), P())[ids]


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        on_automatic_axes(casts=True, reads=False),
        on_automatic_axes(casts=False, reads=True),
        on_automatic_axes(casts=True, reads=True),
        cast_on_axes,
    ],
    ids=["cast", "read", "both", "columns"],
)
@pytest.mark.parametrize("in_context", [True], indirect=True)
def test_a_cast_on_other_mesh_axes_than_the_reading(read, is_part, in_context):
    mesh, ids = names(*TYPES["explicit"]), np.array([[4, 0, 4]])
    whole = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4)  # All are bfloat16s.

    def loss(table):
        return jnp.sum(read(table, ids).astype("float32") ** 2)

    with in_context(mesh):
        table = jax.device_put(whole, NamedSharding(mesh, P()))
        table = gx.TableRows(np.arange(8), table, (8, 4)) if is_part else table
        value, grads = jax.jit(gx.value_and_grad(loss, tables=[""]))(table)
        got = grads.densify()
    wanted = np.zeros((8, 4))
    np.add.at(wanted, ids, 2 * whole[ids])
    assert value == np.sum(wanted * whole) / 2
    np.testing.assert_array_equal(got, wanted)


def test_a_named_table_gives_its_shape_and_dtype():
    def loss(params):
        table = params["emb"]
        assert (table.shape, table.dtype, table.ndim) == ((6, 3), jnp.float32, 2)
        return params["w"]

    gx.value_and_grad(loss, tables=["emb"])(EMB)
