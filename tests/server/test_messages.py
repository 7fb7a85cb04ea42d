"""What travels between workers and the processes of a server: everything, and once."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._server import messages, wire
from gradxform._server.layout import Layout, Part
from gradxform._server.messages import Cut, Message, Payload, Pulled, Rows, packed

ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)
SPECS = {"table": P("server"), "wide": P(None, "server"), "small": P()}
PARAMS = {"table": ROWS, "wide": ROWS, "small": np.float32(7)}


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    """Everything here is small enough to travel in the message."""
    monkeypatch.setattr(wire, "register", lambda: None)


@pytest.fixture
def layout():
    return Layout.of(PARAMS, 2, SPECS)


def sent(x):
    return pickle.loads(pickle.dumps(x, 5))


def test_each_process_gets_its_parts_and_all_else(layout):
    slices = gx.IndexedSlices([4, 0], ROWS[:2], (5, 3))
    extra = {"like": PARAMS, "rows": {"table": slices}, "number": 2.5}
    message = Message.of(layout, PARAMS, extra)
    for process, (table, wide) in enumerate(
        [
            (ROWS[:3], ROWS[:, :2]),
            (np.r_[ROWS[3:], [[0] * 3]], np.c_[ROWS[:, 2:], [0] * 5]),
        ]
    ):
        grads, got = sent(message.of_process(process)).open()
        np.testing.assert_array_equal(grads["table"], table)
        np.testing.assert_array_equal(grads["wide"], wide)
        assert grads["small"] == 7
        assert isinstance(got["like"]["table"], Part)
        np.testing.assert_array_equal(got["like"]["table"].array, table)
        assert got["rows"]["table"].dense_shape == (5, 3)
        assert got["number"] == 2.5


def test_an_argument_that_looks_like_a_part_is_sent_whole(layout):
    like = {"table": np.zeros((3, 3), np.float32)}
    message = Message.of(layout, PARAMS, {"other": like})
    for process in range(2):
        _, extra = message.of_process(process).open()
        assert extra["other"]["table"] is like["table"]


def test_no_process_gets_the_part_of_another():
    large = {**PARAMS, "table": np.zeros((1000, 3), np.float32)}
    message = Message.of(Layout.of(large, 2, SPECS), large, {})
    assert len(pickle.dumps(message.of_process(0), 5)) < 0.55 * large["table"].nbytes


def test_a_misfit_is_an_error_before_it_is_sent(layout):
    with pytest.raises(TypeError, match="table"):
        Message.of(layout, {**PARAMS, "table": ROWS[1:]}, {})


def get(x):
    return x


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_rows_of_all_processes_are_put_together(dtype):
    table = ROWS.astype(dtype)
    indices = np.array([0, 2, 4, 5, 5], np.int32)  # Padding for two repeated ids.
    parts = [packed([table[[0, 2]]]), packed([table[[4]]])]
    got = sent(Rows(indices, (5, 3), 0, parts)).join(get)
    assert got.indices.tolist() == indices.tolist()
    assert got.values.dtype == dtype
    expected = np.r_[table[[0, 2, 4]], np.zeros((2, 3), dtype)]
    np.testing.assert_array_equal(np.asarray(got.values), expected)


def test_rows_of_a_table_cut_along_them_have_no_padding():
    ids = np.array([1, 3], np.int32)
    parts = [packed([ROWS[ids, :2]]), packed([np.c_[ROWS[ids, 2:], [9, 9]]])]
    got = sent(Rows(ids, (5, 3), 1, parts)).join(get)
    np.testing.assert_array_equal(np.asarray(got.values), ROWS[ids])


def test_a_tree_is_put_together_from_its_parts(layout):
    tree = {"a": Cut(0), "b": jnp.float32(3), "c": 0, "d": None}
    of_cut = Layout([layout.types["table"]], (0,), 2)
    padded = np.r_[ROWS[3:], np.full((1, 3), 9, np.float32)]
    parts = [Payload.of(packed([x])) for x in (ROWS[:3], padded)]
    rows = Rows(np.array([2], np.int32), (5, 3), 0, [packed([ROWS[[2]]])])
    got = sent(Pulled(Payload.of(tree), of_cut, parts, {0: rows})).join(get)
    assert isinstance(got["a"], jax.Array)
    np.testing.assert_array_equal(got["a"], ROWS)
    assert (got["b"], got["d"]) == (3, None)
    np.testing.assert_array_equal(got["c"].values, ROWS[[2]])


def test_large_messages_go_to_the_store_once(monkeypatch):
    put = []

    class Store:
        @staticmethod
        def put(x):
            put.append(x)
            return "a reference"

    monkeypatch.setitem(messages.sys.modules, "ray", Store)
    large = np.zeros(messages.SMALL, np.uint8)
    assert Payload.of([large], copy=pytest.fail) == ("a reference", None)
    assert Payload.of([large[1:]], copy=len) == (None, 1)
    rows = np.zeros((messages.SMALL, 1), np.float32)
    assert Payload.of(gx.IndexedSlices(np.arange(len(rows)), rows, rows.shape)).ref
    assert Payload.of(packed([large])).ref
    assert len(put) == 3


class Name(str):
    """A key of a dict that counts how often anybody looks it up."""

    looked_up = 0

    def __hash__(self):
        Name.looked_up += 1
        return super().__hash__()


def looked_up_to_pack(leaves):
    """How often a push with so many leaves looks up one of their paths."""
    params = {Name(i): np.ones((4, 1), np.float32) for i in range(leaves)}
    layout = Layout.of(params, 2, P("server"))
    Name.looked_up = 0
    Message.of(layout, params, {"like": params})
    return Name.looked_up


def test_the_work_to_pack_a_push_is_linear_in_the_number_of_leaves():
    assert 0 < looked_up_to_pack(200) < 3 * looked_up_to_pack(100)
