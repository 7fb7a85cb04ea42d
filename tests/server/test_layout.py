"""Which part of each array lies in which process; these tests need neither."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._server.layout import Layout

PARAMS = {
    "emb": {"table": np.arange(27, dtype=np.float32).reshape(9, 3)},
    "wide": np.arange(14.0, dtype=jnp.bfloat16).reshape(2, 7),
    "none": None,
    "bias": jnp.ones(4),
}
SHARDINGS = {"emb": P("server"), "wide": P(None, "server"), "none": None, "bias": None}
NAMES = "bias", "emb/table", "wide"  # In the order of the leaves.


def layout_of(processes=4):
    return Layout.of(PARAMS, processes, SHARDINGS)


def by_hand(x, axis, processes):
    """Equal pieces of an array, with zeros after its end."""
    each = -(-x.shape[axis] // processes)
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, each * processes - x.shape[axis]
    return np.split(np.pad(x, widths), processes, axis)


@pytest.mark.parametrize("processes", [1, 2, 4, 7])
def test_parts_are_equal_and_join_to_the_whole(processes):
    layout = Layout.of(PARAMS, processes, SHARDINGS)
    parts = [layout.part(PARAMS, k) for k in range(processes)]
    if processes > 1:
        for path, axis in ("emb", 0), ("wide", 1):
            x = PARAMS[path]["table"] if path == "emb" else PARAMS[path]
            for part, wanted in zip(parts, by_hand(x, axis, processes), strict=True):
                got = part[path]["table"] if path == "emb" else part[path]
                assert got.dtype == x.dtype
                np.testing.assert_array_equal(got, wanted)
    assert all(part["bias"] is PARAMS["bias"] for part in parts)
    whole = layout.join(parts)
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)
    for got, wanted in zip(*map(jax.tree.leaves, (whole, PARAMS)), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_a_part_along_the_first_axis_is_no_copy_and_the_whole_is_one():
    table = np.zeros((300, 5), np.float32)
    layout = Layout.of(table, 2, P("server"))
    parts = [layout.part(table, k) for k in range(2)]
    assert all(np.shares_memory(part, table) for part in parts)
    joined = layout.join(parts)
    assert joined.ctypes.data % 64 == 0
    assert not any(np.shares_memory(joined, part) for part in parts)


def test_spans_cover_only_real_rows():
    layout = layout_of()
    assert layout.cuts == (None, 0, 1)
    # 9 rows in pieces of 3, and 7 columns in pieces of 2.
    rows = [layout.span((9, 3), 0, k) for k in range(4)]
    assert rows == [(0, 3), (3, 6), (6, 9), (9, 9)]
    columns = [layout.span((2, 7), 1, k) for k in range(4)]
    assert columns == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_a_layout_goes_over_the_wire_and_holds_no_array():
    layout = layout_of()
    assert pickle.loads(pickle.dumps(layout)) == layout
    big = Layout.of({"w": jax.ShapeDtypeStruct((1 << 40, 64), jnp.float32)}, 64)
    assert len(pickle.dumps(big)) < 1000
    assert big.padded["w"].shape == (1 << 40, 64)


def test_large_leaves_are_cut_by_default():
    def cuts(processes, **shapes):
        types = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        return Layout.of(types, processes).cuts

    edge = 1 << 18  # So many numbers are a megabyte.
    assert cuts(2, a=(edge,), b=(edge + 1,), c=(3, edge)) == (None, 0, 0)
    assert cuts(4, c=(3, edge)) == (None,)  # It has no row for the fourth.
    assert cuts(1, b=(edge + 1,)) == (None,)


def test_a_function_says_where_leaves_lie():
    seen = {}

    def shardings(path, shape):
        seen[path] = shape
        return {"wide": P(None, ("server",)), "emb/table": P()}.get(path)

    assert Layout.of(PARAMS, 2, shardings).cuts == (None, None, 1)
    assert seen == {"bias": (4,), "emb/table": (9, 3), "wide": (2, 7)}


def test_shardings_are_those_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:4]), ("server",))
    shardings = layout_of().shardings(mesh)
    assert shardings["emb"]["table"].spec == P("server")
    assert shardings["wide"].spec == P(None, "server")
    assert shardings["bias"].spec == P()


def test_extra_arguments_like_the_parameters_are_taken_apart_as_they_are():
    layout = layout_of()
    rows = gx.IndexedSlices([1, 9], np.ones((2, 3), np.float32), (9, 3))
    extra = {
        "worker_params": {**PARAMS, "emb": {"table": rows}},
        "worker": 3,
        "emb": {"table": np.zeros((2, 2), np.float32)},
    }
    part = layout.part(extra, 3, depth=1)
    assert part["worker_params"]["wide"].shape == (2, 2)
    assert part["worker_params"]["emb"]["table"] is rows
    assert part["worker"] == 3
    assert part["emb"]["table"] is extra["emb"]["table"]


@pytest.mark.parametrize(
    ("tx", "wanted"),
    [
        (gx.adagrad(0.1, row_wise=True), {"sum_of_squares": {(9,): 0, (2,): None}}),
        (optax.adam(0.1), {"mu": {(9, 3): 0, (2, 7): 1}, "count": {(): None}}),
        # adafactor keeps sums over rows and over columns.
        (
            optax.adafactor(0.1, min_dim_size_to_factor=2),
            {"v_row": {(3,): None, (2,): None}, "v_col": {(9,): 0, (7,): 0}},
        ),
        (gx.worker_mean(optax.sgd(0.1), 5, method="latest"), {"table": {(5, 9, 3): 1}}),
        (optax.ema(0.9), {"ema": {(9, 3): 0, (2, 7): 1, (4,): None}}),
    ],
    ids=["row_wise", "adam", "adafactor", "worker_mean", "ema"],
)
def test_state_follows_the_parameters(tx, wanted):
    state = layout_of().of_state(tx.init)
    flat = jax.tree.leaves_with_path(state.types)
    types = jax.eval_shape(tx.init, layout_of().types)
    assert [x.shape for _, x in flat] == [x.shape for x in jax.tree.leaves(types)]
    found = {}
    for (path, x), cut in zip(flat, state.cuts, strict=True):
        for name in wanted:
            if name in jax.tree_util.keystr(path):
                found.setdefault(name, {})[x.shape] = cut
    for name, cuts in wanted.items():
        assert {k: v for k, v in found[name].items() if k in cuts} == cuts


def test_state_of_other_shapes_is_whole_in_each_process():
    def init(params):
        leaves = jax.tree.leaves(params)
        height = len(params["emb"]["table"])
        return {
            "flat": jnp.concatenate([x.ravel().astype(jnp.float32) for x in leaves]),
            "twice": jnp.zeros(2 * height),
            "square": jnp.zeros((height, height)),
        }

    state = layout_of().of_state(init)
    assert state.cuts == (None, None, None)
    assert state.types["flat"].shape == (4 + 27 + 14,)
    assert state.padded == state.types


BAD = [
    ({"processes": 0}, ValueError, r"server_processes must be in .*got 0"),
    ({"processes": 1.5}, TypeError, "server_processes must be an integer"),
    ({"shardings": {"emb": None}}, ValueError, "server_shardings must be a tree"),
    ({"shardings": P("data")}, ValueError, r"names the axis 'data'.*'server'"),
    ({"shardings": P(None, "data")}, ValueError, "'data'"),
    (
        {"shardings": lambda path, shape: P("server", "server")},
        ValueError,
        r"at \['bias'\] cuts along two axes",
    ),
    (
        {"shardings": lambda path, shape: P(None, "server")},
        ValueError,
        r"at \['bias'\] has more axes than the leaf, of shape \[4\]",
    ),
    (
        {"shardings": lambda path, shape: P("server")},
        ValueError,
        r"at \['bias'\] cuts axis 0 of shape \[4\] into 5 parts",
    ),
    ({"shardings": lambda path, shape: "server"}, TypeError, r"at \['bias'\] is no"),
    ({"shardings": {**SHARDINGS, "bias": "server"}}, TypeError, r"at \['bias'\]"),
]


@pytest.mark.parametrize(("given", "kind", "message"), BAD)
def test_bad_input_is_an_error(given, kind, message):
    with pytest.raises(kind, match=message):
        Layout.of(PARAMS, given.get("processes", 5), given.get("shardings"))


def test_gradients_are_checked_against_the_shapes_that_users_see():
    layout = layout_of()
    rows = gx.IndexedSlices([1, 9], np.ones((2, 3), np.float32), (9, 3))
    layout.check({**PARAMS, "emb": {"table": rows}, "wide": None})
    with pytest.raises(TypeError, match=r"grads.*\['emb'\]\['table'\]"):
        layout.check(layout.part(PARAMS, 0))
