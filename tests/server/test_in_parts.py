"""What the processes of a server send each other, and which parts each of them holds.

``engines/test_group`` has such servers, by way of the public API. These faults cost it
memory or bytes, or hang it now and then, so the tests here ask the modules themselves.
"""

import contextlib
import pickle
import socket
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._ray import wire
from gradxform._ray.layout import ServerLayout
from gradxform._ray.messages import PushMessage, join
from gradxform._ray.transport import RayTransport
from gradxform._ray.wire import Bytes, Payload
from gradxform._server.core import of_one_process
from gradxform._server.reader import PullRequest

# Which part lies where.

PARAMS = {
    "emb": {"table": np.arange(60, dtype=np.float32).reshape(20, 3)},
    "wide": np.arange(16.0, dtype=jnp.bfloat16).reshape(2, 8),
    "none": None,
    "bias": jnp.ones(4),
}
SHARDINGS = {"emb": P("server"), "wide": P(None, "server"), "none": None, "bias": None}


def layout_of(processes):
    return ServerLayout.of(PARAMS, processes, SHARDINGS)


@pytest.mark.every
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_parts_are_equal_and_join_to_the_whole(processes):
    layout = layout_of(processes)
    assert pickle.loads(pickle.dumps(layout)) == layout
    parts = [layout.part(PARAMS, k) for k in range(processes)]
    tables = np.split(PARAMS["emb"]["table"], processes)
    wides = np.split(PARAMS["wide"], processes, 1)
    for part, table, wide in zip(parts, tables, wides, strict=True):
        np.testing.assert_array_equal(part["emb"]["table"], table)
        np.testing.assert_array_equal(part["wide"], wide)
        assert part["wide"].dtype == jnp.bfloat16
        assert part["bias"] is PARAMS["bias"]
    for axis, *pieces, wanted in (
        (0, *(part["emb"]["table"] for part in parts), PARAMS["emb"]["table"]),
        (1, *(part["wide"] for part in parts), PARAMS["wide"]),
    ):
        got = join(pieces, axis)
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def test_a_part_along_the_first_axis_is_no_copy_and_the_whole_is_one():
    table = np.zeros((300, 5), np.float32)
    layout = ServerLayout.of(table, 2, P("server"))
    parts = [layout.part(table, k) for k in range(2)]
    assert all(np.shares_memory(part, table) for part in parts)
    joined = join(parts, 0)
    assert joined.ctypes.data % 64 == 0
    assert not any(np.shares_memory(joined, part) for part in parts)


def test_large_leaves_are_cut_by_default():
    def cuts(processes, **shapes):
        types = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
        layout = ServerLayout.of(types, processes)
        assert len(pickle.dumps(layout)) < 1000  # It holds no array.
        return layout.cuts

    edge = 1 << 18  # So many numbers are a megabyte.
    assert cuts(2, a=(edge,), b=(edge + 2,), c=(4, edge)) == (None, 0, 0)
    assert cuts(4, c=(3, edge)) == (None,)  # It has no row for the fourth.
    assert cuts(1, b=(edge + 1,)) == (None,)
    assert cuts(64, w=(1 << 40, 64)) == (0,)
    says = rf"\['b'\] cannot cut shape \[{edge + 1}\] into 4 equal parts"
    with pytest.raises(ValueError, match=says):
        cuts(4, b=(edge + 1,))


@pytest.mark.every
@pytest.mark.parametrize(
    ("tx", "wanted"),
    [
        (gx.adagrad(0.1, row_wise=True), {"sum_of_squares": {(20,): 0, (2,): None}}),
        (optax.adam(0.1), {"mu": {(20, 3): 0, (2, 8): 1}, "count": {(): None}}),
        # adafactor keeps sums over rows and over columns.
        (
            optax.adafactor(0.1, min_dim_size_to_factor=2),
            {"v_row": {(3,): None, (2,): None}, "v_col": {(20,): 0, (8,): 0}},
        ),
        (
            gx.worker_mean(optax.sgd(0.1), 5, method="latest"),
            {"table": {(5, 20, 3): 1}},
        ),
        (optax.ema(0.9), {"ema": {(20, 3): 0, (2, 8): 1, (4,): None}}),
    ],
    ids=["row_wise", "adam", "adafactor", "worker_mean", "ema"],
)
def test_state_follows_the_parameters(tx, wanted):
    layout = layout_of(4)
    state = layout.of_state(tx.init)
    flat = jax.tree.leaves_with_path(state.types)
    types = jax.eval_shape(tx.init, layout.types)
    assert [x.shape for _, x in flat] == [x.shape for x in jax.tree.leaves(types)]
    found = {}
    for (path, x), cut in zip(flat, state.cuts, strict=True):
        for name in wanted:
            if name in jax.tree_util.keystr(path):
                found.setdefault(name, {})[x.shape] = cut
    for name, cuts in wanted.items():
        assert {k: v for k, v in found[name].items() if k in cuts} == cuts


# What travels between workers and processes.


@pytest.fixture
def without_ray(monkeypatch):
    """Everything here is small enough to travel in the message."""
    monkeypatch.setattr(wire, "register", lambda: None)


@pytest.mark.usefixtures("without_ray")
def test_each_process_gets_its_parts_and_no_others():
    table = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    layout = ServerLayout.of(
        {"table": table, "small": np.float32(7)},
        2,
        {"table": P("server"), "small": None},
    )
    looks_like_a_part = np.zeros((500, 3), np.float32)
    extra = {"like": {"table": table}, "other": {"table": looks_like_a_part}}
    messages = PushMessage.of(layout, {"table": table, "small": np.float32(7)}, extra)
    for process, message in enumerate(messages):
        sent = pickle.dumps(message, 5)
        assert len(sent) < looks_like_a_part.nbytes + 1.1 * table.nbytes
        grads, got = pickle.loads(sent).received()
        part = table[500 * process : 500 * (process + 1)]
        np.testing.assert_array_equal(grads["table"].array, part)
        np.testing.assert_array_equal(got["like"]["table"].array, part)
        assert grads["small"] == 7
        # This one is no part, though it has the shape of one.
        assert isinstance(got["other"]["table"], np.ndarray)


def test_large_messages_go_to_the_store_once(monkeypatch):
    put = []

    class Store:
        @staticmethod
        def put(x):
            put.append(x)
            return "a reference"

    monkeypatch.setitem(sys.modules, "ray", Store)
    large = np.zeros(wire.SMALL, np.uint8)
    assert Payload.of([large], copy=pytest.fail) == ("a reference", None)
    assert Payload.of([large[1:]], copy=len) == (None, 1)
    rows = np.zeros((wire.SMALL, 1), np.float32)
    assert Payload.of(gx.IndexedSlices(np.arange(len(rows)), rows, rows.shape)).ref
    assert Payload.of([Bytes(large)]).ref
    assert len(put) == 3


@pytest.mark.usefixtures("without_ray")
def test_a_version_that_two_workers_pull_at_once_is_put_once(monkeypatch):
    """On Ray that is a race. A pull that comes later is in ``test_ray``."""
    put = []
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(put=put.append))
    params = {"w": jnp.ones(wire.SMALL)}
    server = RayTransport(of_one_process(params, optax.sgd(0.1)))
    run, before = server.turns.run, []

    def run_after_another(*call):  # It pulls, between a pull and its turn.
        if not before:
            before.append(None)
            server.pull(PullRequest())
        return run(*call)

    monkeypatch.setattr(server.turns, "run", run_after_another)
    server.pull(PullRequest())
    assert len(put) == 1


@pytest.mark.usefixtures("without_ray")
def test_a_pull_in_half_precision_puts_half_the_bytes(monkeypatch):
    put = []
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(put=put.append))
    params = {"w": jnp.ones((128, 128)), "count": jnp.int32(0)}
    server = RayTransport(of_one_process(params, optax.set_to_zero()))
    for dtype in (None, jnp.bfloat16, jnp.bfloat16, None):  # Each form is put once.
        server.pull(server.tables.request(None, dtype))
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in put]
    assert sizes == [4 * 128 * 128 + 4, 2 * 128 * 128 + 4]


class Asked:
    """Two followers that note what they are asked."""

    def __init__(self):
        self.calls, self.reads = [], []

    def __len__(self):
        return 2

    @contextlib.contextmanager
    def asked(self, name, each):
        self.calls.append((name, each))
        yield

    def read(self, each, form):
        if not any(each):
            return []
        self.reads.append((each, form))
        return [f"reference {len(self.reads)}"]


def lists(shares):
    """Shares of processes, with ids as lists."""
    return [
        {i: None if ids is None else ids.tolist() for i, ids in share.items()}
        for share in shares
    ]


@pytest.mark.usefixtures("without_ray")
def test_each_process_reads_its_rows_and_compiles_once(monkeypatch):
    """A table of 6 rows and a matrix lie in three processes, and a vector in each."""
    params = {
        "0": jnp.ones((6, 2)),
        "1": jnp.ones((2, 3)),
        "2": jnp.ones(4),
        "3": jnp.ones((6, 1)),
    }
    followers, turns = Asked(), []
    core = of_one_process(params, optax.set_to_zero())
    server = RayTransport(core, (0, 1, None, None), followers)
    run = server.turns.run
    monkeypatch.setattr(
        server.turns, "run", lambda *call: turns.append(1) or run(*call)
    )
    of_processes = [
        ([5, 0, 3, 1, 0], [[0, 1], [1], [1]]),
        ([4, 4], [[], [], [0]]),
        ([2, 3], [[], [0, 1], []]),
    ]
    for ids, rows in of_processes:
        request = server.tables.request({"0": ids}, jnp.bfloat16)
        own, *others = lists(server._share(request.rows, k) for k in range(3))
        assert own == {0: rows[0]}  # The leader always sends its part of rows.
        assert others == [{0: own} if own else {} for own in rows[1:]]
    # Each process has this leaf whole. The leader alone sends its rows.
    request = server.tables.request({"3": [5, 2]}, None)
    shares = lists(server._share(request.rows, k) for k in range(3))
    assert shares == [{3: [2, 5]}, {}, {}]
    whole = dict.fromkeys(range(4))
    shares = lists(server._share(whole, k) for k in range(3))
    assert shares == [whole, {0: None, 1: None}, {0: None, 1: None}]
    of_each = [{0: None, 1: None}] * 2
    for _ in range(2):  # The second time all is there, and needs no turn.
        response, step = server.pull(PullRequest())
        assert followers.calls == [("compile", [(None, share) for share in of_each])]
        assert len(turns) == 1
        assert followers.reads == [(of_each, None)]
        _, sent, *_ = response._parts
        assert (step, sent.parts) == (0, ["reference 1"])
        assert {i: (x.axis, x.ids) for i, x in sent.joined.items()} == {
            0: (0, None),
            1: (1, None),
        }
        whole, parts = sent.own.value
        assert ([*whole], [*parts]) == ([2, 3], [0, 1])
    for ids, calls in (([3, 4], 2), ([2, 5], 2), ([3], 2), ([4, 3, 2, 5], 3)):
        server.pull(server.tables.request({"0": ids}, None))
        assert len(followers.calls) == calls
    core.close()
    for rows in (None, {"0": [1]}):
        with pytest.raises(gx.ServerClosedError):
            server.pull(server.tables.request(rows, None))


@pytest.mark.usefixtures("without_ray")
def test_one_process_sends_the_whole_of_what_its_devices_share(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(get=list))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    params = jax.device_put(table, jax.sharding.NamedSharding(mesh, P("x")))
    server = RayTransport(of_one_process(params, optax.set_to_zero()))
    response, _ = server.pull(PullRequest())
    _, sent, *_ = response._parts
    np.testing.assert_array_equal(sent.received()[0], table)


class Name(str):
    """A key of a dict that counts how often anybody looks it up."""

    looked_up = 0

    def __hash__(self):
        Name.looked_up += 1
        return super().__hash__()


@pytest.mark.usefixtures("without_ray")
def test_the_work_to_pack_a_push_is_linear_in_the_number_of_leaves():
    def looked_up(leaves):
        params = {Name(i): np.ones((4, 1), np.float32) for i in range(leaves)}
        layout = ServerLayout.of(params, 2, P("server"))
        Name.looked_up = 0
        PushMessage.of(layout, params, {"like": params})
        return Name.looked_up

    assert 0 < looked_up(200) < 3 * looked_up(100)


# Addresses.


COORDINATOR = """
import sys
from gradxform._ray.process import enter
enter(sys.argv[1], 0, 1)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_coordinator_listens_only_at_its_own_address():
    """A stranger who registers there as one of the processes ends the server."""
    # The coordinator binds to this port too. Until then nobody else is given it.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    command = [sys.executable, "-c", COORDINATOR, f"127.0.0.1:{port}"]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with reserved, subprocess.Popen(command, **pipes, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            for elsewhere in ("127.0.0.2", "::1"):  # Also addresses of this machine.
                with pytest.raises(OSError):  # noqa: PT011
                    socket.create_connection((elsewhere, port), 30)
            process.communicate("", 30)
            assert process.returncode == 0
        finally:
            process.kill()
