"""Rows of a table on their way to a worker, and back as its gradients."""

import concurrent.futures
import threading
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._rows.stored_rows import unchecked
from gradxform._server.programs import in_sizes
from gradxform._server.reader import Reader, size_for

HEIGHT, WIDTH = 40, 4
TABLE = np.random.default_rng(0).standard_normal((HEIGHT, WIDTH)).astype(np.float32)
PADDED = np.concatenate([TABLE, np.zeros((1, WIDTH), np.float32)])
PARAMS = {"emb": {"table": jnp.asarray(TABLE)}, "w": jnp.ones(WIDTH)}
PATH = "emb/table"


def loss_fn(params, ids):
    rows = gx.lookup(params["emb"]["table"], ids)
    return jnp.mean((rows @ params["w"] - 1) ** 2)


gradients = jax.jit(gx.value_and_grad(loss_fn, tables=[PATH]))


def server_of(tx=None, params=PARAMS, **options):
    return gx.ParameterServer(params, tx or gx.adagrad(0.1), **options)


def rows_of(server, ids):
    params, _ = server.pull(rows={PATH: ids})
    return params["emb"]["table"]


CLIPPED = optax.chain(gx.clip_by_global_norm(0.5), gx.adagrad(0.1, row_wise=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "by_params"),
    [
        (lambda: gx.drop_stale(CLIPPED, 1), False),
        (
            lambda: gx.drop_stale(optax.chain(gx.compensate_delay(1.0), CLIPPED), 9),
            True,
        ),
        (lambda: gx.conditional_accumulator(CLIPPED, 2, reduction="row_mean"), False),
    ],
    ids=["drop_stale", "compensate_delay", "row_mean"],
)
def test_pulled_rows_train_as_pulled_tables(make, by_params):
    by_rows, by_tables = server_of(make()), server_of(make())
    rng = np.random.default_rng(1)
    held = []  # Three workers, each two pushes late.
    for _ in range(12):
        ids = rng.integers(0, HEIGHT, rng.choice([1, 8]))
        held.append((ids, *by_rows.pull(rows={PATH: ids}), *by_tables.pull()))
        if len(held) < 3:
            continue
        ids, part, seen, whole, _ = held.pop(0)
        results = []
        for server, params in ((by_rows, part), (by_tables, whole)):
            loss, grads = gradients(params, ids)
            extra = {"worker_params": params} if by_params else {}
            result = server.push(grads, int(seen), **extra)
            results.append((float(loss), result))
        assert results[0] == results[1]
    chex.assert_trees_all_equal(by_rows.state(), by_tables.state())
    assert by_rows.stats().global_step > 0
    assert not np.array_equal(by_rows.pull()[0]["emb"]["table"], TABLE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    "ids", [[7], [3, 1, 3], [[0, 39], [40, 5]], [], np.arange(40, dtype=np.uint8)]
)
def test_a_part_holds_each_row_once_in_order_and_then_padding(ids, dtype):
    server = server_of(params={"emb": {"table": jnp.asarray(10 * TABLE, dtype)}})
    part = rows_of(server, ids)
    asked = np.ravel(ids).astype(int)
    once = sorted({*asked.tolist()} - {HEIGHT})
    wanted = once + [HEIGHT] * (len(asked) - len(once))
    assert part.indices.tolist() == wanted
    assert part.dense_shape == TABLE.shape
    assert part.dtype == dtype
    scaled = jnp.asarray(10 * PADDED, dtype)
    np.testing.assert_array_equal(part.values, np.asarray(scaled)[wanted])


@pytest.mark.slow
def test_unnamed_tables_come_whole_and_callers_own_all_arrays():
    server = server_of()
    params, seen = server.pull(rows={PATH: [1, 2, 5]})
    assert jax.tree.structure(params["w"]) == jax.tree.structure(PARAMS["w"])
    np.testing.assert_array_equal(params["w"], PARAMS["w"])
    _, grads = gradients(params, np.array([1, 2]))
    jax.jit(lambda x: x, donate_argnums=0)(params)
    assert server.push(grads, seen).applied
    later, _ = server.pull(rows={PATH: [1, 2, 5]})
    whole, _ = server.pull()
    held = jnp.array([1, 2, 5])
    np.testing.assert_array_equal(
        later["emb"]["table"].values, whole["emb"]["table"][held]
    )
    np.testing.assert_array_equal(whole["emb"]["table"][5], TABLE[5])


@pytest.mark.parametrize(
    ("rows", "kind", "words"),
    [
        ({"emb": [1]}, ValueError, r"got 'emb'; there are 'emb/table', 'w'\."),
        ({"step": [1]}, ValueError, "got 'step'; there are 'emb/table', 'w'"),
        ({PATH: [1, 41]}, ValueError, r"rows\['emb/table'\] .*\[0, 40\].* got 41 at"),
        ({PATH: [-1]}, ValueError, "got -1 at position"),
        ({PATH: [0.5]}, TypeError, r"rows\['emb/table'\] must be integers, got float"),
        ([PATH], TypeError, "rows must map paths of tables to ids"),
        ({}, None, None),
    ],
)
def test_rows_that_there_are_not(rows, kind, words):
    server = server_of(params={**PARAMS, "step": jnp.array(0)})
    if kind is None:
        assert isinstance(server.pull(rows=rows)[0]["emb"]["table"], jax.Array)
        return
    with pytest.raises(kind, match=words):
        server.pull(rows=rows)
    server.close()
    with pytest.raises(gx.ServerClosedError):
        server.pull(rows={PATH: [1]})


def compiled(caplog, f):
    """How many programs are compiled while ``f`` runs."""
    caplog.clear()
    with jax.log_compiles():
        f()
    return sum("Finished XLA compilation" in r.getMessage() for r in caplog.records)


def test_rows_of_a_push_are_padded_to_few_sizes():
    for length, size in enumerate([1, 1, 2, *[4] * 2, *[8] * 4, 16]):
        assert size_for(length) == size
        values = np.arange(2.0 * length, dtype=np.float32).reshape(length, 2)
        rows = gx.IndexedSlices(np.arange(length), values, (20, 2))
        found, padding = in_sizes(rows), size - length
        assert (found is rows) == (padding == 0)
        assert found.dense_shape == (20, 2)
        assert found.indices.tolist() == [*range(length)] + [20] * padding
        assert found.values.tolist() == [*values.tolist()] + [[0.0, 0.0]] * padding


def test_what_has_no_rows_here_is_not_padded():
    dense = np.ones((3, 2), np.float32)
    assert in_sizes(dense) is dense
    elsewhere = mock.MagicMock(ndim=2, is_fully_addressable=False)
    elsewhere.__len__.return_value = 3
    rows = unchecked(gx.IndexedSlices, np.arange(3), elsewhere, (20, 2))
    assert in_sizes(rows) is rows


def test_a_reader_compiles_once_for_each_size_and_dtype(monkeypatch):
    arrays = [jnp.ones((6, 2)), jnp.ones(3), jnp.ones(4, int)]
    reader, made = Reader(arrays), []

    def compiled(*key):
        made.append(key)
        return lambda *args: (key, *args)

    monkeypatch.setattr(reader, "_compiled", compiled)
    half = np.dtype(jnp.bfloat16)
    wanted = {0: np.int32([1, 3, 4]), 1: None, 2: None}
    for _ in range(2):  # The second time all is there.
        reading = reader.prepare(wanted, half)
        assert made == [(0, 4, half), (1, None, half)]
        assert reading.plain == [2]
        read = reading.run("abc")
        key, ids, table = read.pop(0)
        assert (key, ids.tolist(), table) == (made[0], [1, 3, 4, 6], "a")
        assert read == {1: (made[1], "b"), 2: "c"}
    for form in (None, np.dtype(np.float32)):  # Each has its own dtype.
        assert reader.prepare(wanted, form).plain == [1, 2]
        assert made[2:] == [(0, 4, None)]


@pytest.mark.slow
def test_a_hundred_numbers_of_rows_take_few_programs(caplog):
    """Sizes are powers of two, for pulls and for pushes; nothing else is compiled."""
    server = server_of()
    lengths = np.random.default_rng(0).permutation(np.arange(1, 101))

    def serve():
        for length in lengths.tolist():
            ids = np.arange(length) % HEIGHT
            part = rows_of(server, ids)
            values = np.ones((length, WIDTH), np.float32)
            rows = gx.IndexedSlices(ids, values, TABLE.shape)
            server.push({"emb": {"table": rows}, "w": None}, 0)
            assert len(part.values) == length

    sizes = 8  # 1, 2, 4, ..., 128
    assert compiled(caplog, serve) <= 3 * sizes  # To read, to step, to take rows apart.
    assert compiled(caplog, serve) == 0
    # Rows that a program made need none, either. The one is a step in which "w" moves.
    made = [jax.jit(lambda g: g)(gradients(PARAMS, np.arange(n))[1]) for n in (5, 7)]
    assert compiled(caplog, lambda: [server.push(g, 0) for g in made]) == 1


@pytest.mark.slow
def test_padding_of_a_push_counts_for_nothing():
    """Compared with the same rows as one dense gradient."""
    tx = optax.chain(gx.clip_by_global_norm(0.1), gx.adagrad(0.1))
    rng = np.random.default_rng(2)
    by_rows, by_tables = server_of(tx), server_of(tx)
    for length in (1, 3, 5, 11):
        ids = rng.integers(0, HEIGHT + 1, length)
        values = rng.standard_normal((length, WIDTH)).astype(np.float32)
        whole = np.zeros_like(PADDED)
        np.add.at(whole, ids, values)
        rows = gx.IndexedSlices(ids, values, TABLE.shape)
        by_rows.push({"emb": {"table": rows}, "w": None}, 0)
        by_tables.push({"emb": {"table": whole[:-1]}, "w": None}, 0)
    chex.assert_trees_all_close(by_rows.state(), by_tables.state(), rtol=1e-6)


def test_compiling_holds_up_no_other_call(monkeypatch):
    """A pull and a push of new sizes compile; those of known sizes go on meanwhile."""
    server = server_of()
    known = gx.IndexedSlices([1], np.ones((1, WIDTH), np.float32), TABLE.shape)
    new = gx.IndexedSlices([1, 2], np.ones((2, WIDTH), np.float32), TABLE.shape)

    def push(rows):
        return server.push({"emb": {"table": rows}, "w": None}, 0)

    push(known)
    rows_of(server, [1])
    compiling, go_on = threading.Semaphore(0), threading.Event()
    lowered = jax.stages.Lowered.compile

    def slowly(*args, **kwargs):
        compiling.release()
        assert go_on.wait(60)
        return lowered(*args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slowly)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        late = [pool.submit(push, new), pool.submit(rows_of, server, [1, 2])]
        for _ in late:
            assert compiling.acquire(timeout=60)
        assert push(known).global_step == 2
        assert rows_of(server, [1]).indices.tolist() == [1]
        assert not any(future.done() for future in late)
        go_on.set()
        assert late[0].result().global_step == 3
        assert late[1].result().indices.tolist() == [1, 2]


@pytest.mark.slow
def test_parts_come_from_tables_on_any_devices():
    device = jax.devices()[3]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    places = {
        "uncommitted": PARAMS,
        "one": jax.device_put(PARAMS, device),
        "eight": jax.device_put(PARAMS, {"emb": {"table": over}, "w": whole}),
    }
    for name, params in places.items():
        server = server_of(params=params)
        for ids in ([3, 5, 7], [3, 5, 7, 11]):  # With and without padding.
            (pulled, seen), wanted = server.pull(rows={PATH: ids}), TABLE[ids]
            part = pulled["emb"]["table"]
            np.testing.assert_array_equal(part.values, wanted)
            assert part.values.committed == part.indices.committed
            assert part.values.committed == (name != "uncommitted")
            if name == "eight":
                assert part.values.sharding.is_equivalent_to(whole, 2)
            else:
                there = {device} if name == "one" else {jax.devices()[0]}
                assert part.values.devices() == part.indices.devices() == there
            _, grads = gradients(pulled, np.array(ids))
            assert server.push(grads, seen).applied
            server.restore({**server.state(), "params": PARAMS})
        table = server.pull()[0]["emb"]["table"]
        assert table.sharding == params["emb"]["table"].sharding


@pytest.mark.slow
def test_readers_of_rows_and_pushers_of_rows_meet():
    """Eight threads. Each adds one to rows of its own, and reads some of them."""
    server = server_of(optax.identity(), {"t": jnp.zeros((64, 2))})

    def work(index):
        own = np.arange(8 * index, 8 * index + 8)
        for number in range(1, 41):
            count = 1 + number % 8
            part, seen = server.pull(rows={"t": own[:count]})
            # A worker sees each of its own pushes as a whole.
            assert part["t"].indices.tolist() == own[:count].tolist()
            assert {*part["t"].values.ravel().tolist()} == {number - 1}
            ones = np.ones((8, 2), np.float32)
            server.push({"t": gx.IndexedSlices(own, ones, (64, 2))}, seen)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert np.all(np.asarray(server.pull()[0]["t"]) == 40)


def test_programs_for_rows_are_of_a_table_and_a_size(caplog):
    server = server_of(params={"a": jnp.ones((9, 2)), "b": jnp.ones((9, 2))})

    def pull():
        server.pull(rows={"a": [1, 2, 3, 4]})
        server.pull(rows={"a": [4, 3, 2, 1], "b": [1]})

    assert compiled(caplog, pull) == 2
    assert compiled(caplog, pull) == 0


def aligned(x):
    """A copy that lies where JAX could use the memory of NumPy's array."""
    room = np.empty(x.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    there = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    there[...] = x
    return there


def test_parameters_given_as_numpys_are_copied():
    given = {"emb": {"table": aligned(TABLE)}, "w": aligned(np.ones(WIDTH, "f"))}
    server = server_of(params=given)
    saved = jax.tree.map(lambda x: aligned(np.asarray(x)), server.state())
    given["emb"]["table"][:] = 7
    np.testing.assert_array_equal(server.pull()[0]["emb"]["table"], TABLE)
    for params in (given, jax.device_put(given, jax.devices()[0])):
        server = server_of(params=params)
        server.restore(saved)
        saved["params"]["emb"]["table"][:] = 7
        np.testing.assert_array_equal(server.pull()[0]["emb"]["table"], TABLE)
        saved["params"]["emb"]["table"][:] = TABLE


@pytest.mark.slow
def test_callers_still_own_restored_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    server = server_of(params=jax.device_put(PARAMS, whole))
    state = server.state()["state"]
    for where in (jax.devices()[0], whole):
        params = jax.device_put(PARAMS, where, may_alias=False)
        server.restore({"params": params, "state": state})
        assert server.push(jax.tree.map(jnp.ones_like, PARAMS), 0).applied
        chex.assert_trees_all_equal(params, PARAMS)  # The step has not donated them.
