"""A server of several processes gives the same numbers, and ends the same, as one."""

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform import engines
from gradxform._ray import process
from gradxform._ray.actors import layout_of, message
from gradxform._server.store import Store
from tests import ray_here
from tests.conftest import on_cluster
from tests.engines.jobs import SGD, ended, fails, list_all, make_job, worker
from tests.engines.test_ray import assert_counted, first_steps, kill, wait_until
from tests.server.test_parameter_server import ODD

ROWS, DIM, WIDE = 300, 4, 6


def make_params():
    rng = np.random.default_rng(0)
    shapes = {
        "item": (ROWS, DIM),
        "user": (66, DIM),
        "hidden": (DIM, WIDE),
        "out": (WIDE,),
    }
    return {
        name: 0.3 * rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def cut_tables(path, shape):
    """Cuts both tables by rows, and the layer between them by columns."""
    columns = P(None, ("server",))
    return {"item": P("server"), "user": P("server"), "hidden": columns}.get(path)


def loss(params, items, users, y):
    x = gx.lookup(params["item"], items) * gx.lookup(params["user"], users)
    return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"]) @ params["out"] - y))


dense = jax.jit(jax.value_and_grad(loss))
sparse = jax.jit(gx.value_and_grad(loss, tables=("item", "user")))


def batch(number):
    rng = np.random.default_rng(number)
    items = rng.integers(0, ROWS, 13).astype(np.int32)
    users = rng.integers(0, 66, 13).astype(np.int32)
    return items, users, rng.standard_normal(13).astype(np.float32)


def gradient(params, *data):
    rows = isinstance(params["item"], gx.TableRows)
    return (sparse if rows else dense)(params, *data)


def rows_of(items, users, y):
    """The rows to pull, in every second batch."""
    return {"item": items, "user": users} if items[0] % 2 else {}


def optimizer():
    labels = {"item": "table", "user": "table", "hidden": "rest", "out": "rest"}
    txs = {"table": gx.adagrad(0.1, row_wise=True), "rest": optax.adamw(0.01)}
    return optax.chain(gx.clip_by_global_norm(0.5), optax.partition(txs, labels))


GATES = {
    "drop_stale": lambda: gx.drop_stale(optimizer(), 2),
    "accumulator": lambda: gx.conditional_accumulator(
        optimizer(), 3, reduction="row_mean"
    ),
}


def train(server, pushes):
    """Some pushes are late. Returns what the server answered."""
    seen, results = [], []
    for number in range(pushes):
        data = batch(number)
        params, step = server.pull(rows_of(*data) or None)
        seen.append(step)
        _, grads = gradient(params, *data)
        late = seen[max(0, number - number % 5)]
        results.append(server.push(grads, late))
    return results


def close(got, expected, atol=1e-6):
    flat = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected)
    for (path, x), (other, y) in zip(*flat, strict=True):
        assert path == other
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=str(path))


def idle(tx, pushes=1, **options):
    given = worker(gradient, batch, rows=rows_of)
    return make_job([given], pushes, tx, params=make_params(), **options)


def on_group(function, run):
    """What ``function`` returns in each process, for its actor and its params."""

    def call(actor):
        core = actor.process.core
        return function(actor, core.version.leaves[: core.specs.num_params])

    actors = run.server.processes._actors
    asked = [actor.__ray_call__.remote(call) for actor in actors]
    return pytest.importorskip("ray").get(asked)


# Errors are told at once, before Ray starts.


def each(spec):
    """Cuts each leaf like this."""
    return lambda path, shape: spec


WHOLE = dict.fromkeys(make_params())


@pytest.mark.every
@pytest.mark.parametrize(
    ("processes", "shardings", "error", "says"),
    [
        (0, cut_tables, ValueError, "server_processes must be in .*got 0"),
        (2.5, cut_tables, TypeError, "server_processes must be an integer"),
        (65, cut_tables, ValueError, "into 65 equal parts"),
        (7, WHOLE | {"item": P("server")}, ValueError, r"\[300, 4\] into 7 equal"),
        (5, {"item": None}, ValueError, "server_shardings has no value for params at"),
        (5, WHOLE | {"out": "x"}, TypeError, r"at \['out'\]"),
        (5, P("data"), ValueError, "'data'.*have the name 'server'"),
        (5, P(None, "data"), ValueError, "'data'.*have the name 'server'"),
        (5, each(P("server", "server")), ValueError, r"\['hidden'\] cannot.*'server'"),
        (5, each(P(None, None, "server")), ValueError, r"\['hidden'\] cannot cut"),
        (5, each(P("server")), ValueError, r"cut shape \[4, 6\] into 5 equal parts"),
        (5, each("server"), TypeError, r"at \['hidden'\] is no"),
    ],
)
def test_bad_input_is_an_error_at_once(processes, shardings, error, says):
    ray = pytest.importorskip("ray")
    before = ray.is_initialized()
    options = {"server_processes": processes, "server_shardings": shardings}
    fails(engines.ray, idle(SGD), error, says, **options)
    assert ray.is_initialized() == before


def test_a_function_gets_the_path_and_the_shape_of_each_leaf():
    seen = {}

    def shardings(path, shape):
        seen[path] = shape
        return P("nowhere") if path == "w" else None

    params = {"emb": {"table": np.zeros((9, 3))}, "none": None, "w": np.zeros(2)}
    job = idle(SGD)._replace(params=params)
    options = {"server_processes": 2, "server_shardings": shardings}
    fails(engines.ray, job, ValueError, r"\['w'\]", **options)
    assert seen == {"emb/table": (9, 3), "w": (2,)}


def test_one_process_needs_no_layout():
    assert layout_of(pytest.fail, 1, None) is None  # Nor is the model traced for it.
    params = make_params()
    assert layout_of(params, 1, cut_tables) is None
    assert layout_of(lambda: params, 2, None).processes == 2


def small_params():
    shapes = {"cut": (4, 6), "rows": (8, 2), "whole": (3,)}
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 2
        for name, shape in shapes.items()
    }


def cut_small(path, shape):
    cuts = {"cut": P(None, "server"), "rows": P("server")}
    return cuts.get(path, P())


@contextlib.contextmanager
def small_group(pushes=50, **options):
    """A server of two processes that subtracts half of a gradient."""
    tx = gx.drop_stale(gx.scale_by_learning_rate(0.5), 1)
    job = make_job([worker()], pushes, tx, params=small_params())
    options |= {"server_processes": 2, "server_shardings": cut_small}
    with engines.ray(job, **options) as run:
        yield run


def answers_for_good(method):
    while True:
        method()


def same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in got.items():
        np.testing.assert_array_equal(x, expected[name])


def test_a_group_makes_the_steps_that_numpy_makes(either_ray):
    expected = small_params()
    # One call of the leader waits for good; there is room for others.
    options = {"max_concurrency": 1, "name": "the server"}
    with small_group(server_options=options) as run:
        params, start = run.server.pull()
        same(params, expected)
        assert all(isinstance(x, jax.Array) for x in params.values())
        rng = np.random.default_rng(0)
        grads = {
            name: rng.integers(0, 9, x.shape).astype(np.float32)
            for name, x in expected.items()
        }
        assert run.server.push(grads, start)[:3] == (True, 0, 1)
        expected = {name: x - grads[name] / 2 for name, x in expected.items()}
        same(run.server.pull()[0], expected)
        # Rows of both processes, and of none.
        given = gx.IndexedSlices([7, 0, 7], np.ones((3, 2), np.float32), (8, 2))
        given = {"cut": None, "rows": given, "whole": None}
        assert run.server.push(given, 1).global_step == 2
        np.subtract.at(expected["rows"], [7, 0, 7], 0.5)
        same(run.server.state()["params"], expected)
        for ids, stored in (([7, 2, 7], [2, 7, 8]), ([3], [3]), ([6, 4], [4, 6])):
            part, _ = run.server.pull({"rows": ids, "cut": [3, 1]}, np.float16)
            assert part["rows"].indices.tolist() == stored
            assert part["cut"].indices.tolist() == [1, 3]
            known = sorted({*ids})
            got = np.asarray(part["rows"].values)
            assert got.dtype == np.float16
            np.testing.assert_array_equal(
                got[: len(known)], expected["rows"][known].astype(np.float16)
            )
            assert not got[len(known) :].any()
            np.testing.assert_array_equal(
                part["cut"].values, expected["cut"][[1, 3]].astype(np.float16)
            )
        # What is too late, or refused, changes nothing.
        assert run.server.push(grads, start)[:2] == (False, 2)
        with pytest.raises(TypeError, match="nobody reads"):
            run.server.push(grads, 2, wieght=2.0)
        same(run.server.pull()[0], expected)
        assert run.server.stats()[:2] == (2, 1)
        shapes = on_group(
            lambda _, leaves: [x.addressable_data(0).shape for x in leaves], run
        )
        assert shapes == [[(4, 3), (4, 2), (3,)]] * 2
        _, follower = run.server.processes._actors
        kept = follower.__ray_call__.remote(lambda follower: len(follower._prepared))
        assert either_ray.get(kept) == 0
        assert len(list(run.pushes)) == 50


def test_a_group_saves_its_parts_and_goes_on_from_them(either_ray, tmp_path):
    checkpoint = engines.Checkpoint(tmp_path, every_steps=2, every_seconds=None)
    begin, steps = small_params(), 0
    for pushes in (5, 6):
        with small_group(pushes, checkpoint=checkpoint) as run:
            assert run.resumed == (steps or None)
            params, _ = run.server.pull()
            same(params, {name: x - steps / 2 for name, x in begin.items()})
            assert len(list(run.pushes)) == pushes - steps
            steps = pushes
            params = {name: x - steps / 2 for name, x in begin.items()}
            same(run.server.state()["params"], params)
            kept = on_group(lambda actor, _: len(getattr(actor, "_snapshots", ())), run)
            assert kept == [0, 0]
    assert {5, 6} <= numbered(tmp_path)
    if isinstance(either_ray, ray_here.Ray):
        assert len(either_ray.written) >= 2
        for snapshot in either_ray.written:
            expected = small_params()["whole"] - snapshot.pushes / 2
            np.testing.assert_array_equal(snapshot.state["params"]["whole"], expected)


def test_a_group_ends_when_one_of_it_has_died(ray_in_process):
    with small_group() as run:
        run.server.pull()
        _, follower = run.server.processes._actors
        kill(follower)
        with pytest.raises(ray_in_process.exceptions.RayActorError) as raised:
            answers_for_good(run.server.pull)
        said = "\n".join(raised.value.__notes__)
        assert "The server has ended: a process of the server has died" in said
        assert "give it a checkpoint" in said


def test_a_step_that_fails_in_all_processes_is_told(ray_in_process):
    def step(*_):
        raise MemoryError("there is no room")

    def sabotage(actor, _):
        core = actor.process.core
        prepare = core.prepare
        core.prepare = lambda *args: prepare(*args)._replace(step=step)

    with small_group() as run:
        on_group(sabotage, run)
        with pytest.raises(MemoryError, match="there is no room"):
            run.server.push(small_params(), 0)
        with pytest.raises(gx.ServerClosedError, match="there is no room"):
            run.server.pull()


def test_a_process_joins_the_others_before_it_looks_at_devices(monkeypatch):
    joined, settings = mock.Mock(), {"jax_cpu_collectives_implementation": "mpi"}
    if hasattr(jax.config, "jax_enable_preemption_service"):  # Since JAX 0.8.
        settings["jax_enable_preemption_service"] = True
    before = {name: getattr(jax.config, name) for name in settings}
    there = jax.local_devices()

    def devices(process_index):
        assert joined.initialize.called
        return there[2 * process_index :]

    monkeypatch.setattr(jax.distributed, "initialize", joined.initialize)
    monkeypatch.setattr(multihost_utils, "sync_global_devices", joined.sync)
    monkeypatch.setattr(jax, "local_devices", devices)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        mesh = process.enter("127.0.0.1:7", 1, 3)
        assert jax.config.jax_cpu_collectives_implementation == "gloo"
        assert not getattr(jax.config, "jax_enable_preemption_service", False)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert (mesh.axis_names, mesh.devices.tolist()) == (("server",), there[:6:2])
    (address, count, index), more = joined.initialize.call_args
    assert (address, count, index) == ("127.0.0.1:7", 3, 1)
    assert more["coordinator_bind_address"] == address  # No other machine reaches it.
    assert more["cluster_detection_method"] == "deactivate"
    assert more["initialization_timeout"] == 60 * 60
    joined.sync.assert_called_once()


@on_cluster
def test_processes_train_as_one_does(standard_promotion):
    make, count = GATES["accumulator"], 3
    alone = gx.ParameterServer(make_params(), make())
    expected = train(alone, 40)
    options = {"server_processes": count, "server_shardings": cut_tables}
    with engines.ray(idle(make()), **options) as run:
        got = train(run.server, 40)
        close(run.server.state(), alone.state())
        close(run.server.pull()[0], alone.pull()[0])
        assert run.server.stats()[:3] == alone.stats()[:3]
        assert run.server.stats().staleness == alone.stats().staleness
        assert [tuple(x) for x in got] == [tuple(x) for x in expected]
        shapes = on_group(
            lambda _, leaves: [x.addressable_data(0).shape for x in leaves], run
        )
    columns, items, users = (size // count for size in (WIDE, ROWS, 66))
    assert shapes == [[(DIM, columns), (items, DIM), (WIDE,), (users, DIM)]] * count


def odd_pushes():
    """Pushes that no server takes, each with other arguments, by what is odd."""
    ones = jax.tree.map(np.ones_like, make_params())
    cut, deleted = "item", jnp.ones(WIDE)
    deleted.delete()
    for kind, (leaf, _) in ODD.items():
        if kind != "object":  # Its text has an address.
            yield kind, ones | {cut: leaf}, {}
            yield kind, ones | {"out": leaf}, {}
            yield kind, ones, {"note": {"x": [leaf]}}
    shaped = np.ma.masked_array(ones[cut], ones[cut] > 0)
    yield "masked", ones | {cut: shaped}, {}
    yield "big-endian", ones | {cut: ones[cut].astype(">f4")}, {}
    yield "description", ones | {cut: jax.eval_shape(jnp.asarray, ones[cut])}, {}
    yield "nothing", dict.fromkeys(ones), {}
    yield "no numbers", ones | {"out": deleted}, {}
    yield "no numbers", ones, {"note": deleted}
    yield "structure", {cut: ones[cut]}, {}
    yield "dtype", ones | {cut: ones[cut].astype(np.float16)}, {}
    yield "worker", ones, {"worker": 2}
    yield "worker", ones, {"worker": None}
    yield "push_id", ones, {"push_id": 3}
    yield "push_id", ones, {"push_id": (7, -1)}
    yield "step", ones, {"local_step": 99}
    nan = ones[cut].copy()
    nan[-1, 0] = np.nan  # This row lies in the last process.
    yield "nan", ones | {cut: nan}, {}
    yield "tall", ones | {cut: np.ones((ROWS + 1, DIM), np.float32)}, {}


@on_cluster
def test_a_group_takes_and_refuses_the_same_pushes_as_one_process():
    """The answers of a server in this process are the right ones."""
    ray = pytest.importorskip("ray")
    tx = gx.drop_stale(gx.worker_mean(optax.sgd(0.1), 2, method="latest"), 9)
    alone = gx.ParameterServer(make_params(), tx, require_finite=True)
    ones = jax.tree.map(np.ones_like, make_params())

    def push(server, grads, **other):
        return server.push(grads, **{"local_step": 0, "worker": 0, **other})

    options = {"server_processes": 2, "server_shardings": cut_tables}
    with engines.ray(idle(tx, require_finite=True), **options) as run:
        both = alone, run.server
        for server in both:
            first = push(server, ones, push_id=(7, 0))
            assert push(server, ones, push_id=(7, 0)) == first
            # Repeated ids and padding; and most leaves have no gradient.
            params, _ = server.pull({"item": [299, 150, 0, 299, ROWS]})
            assert params["item"].indices.tolist() == [0, 150, 299, ROWS, ROWS]
            push(server, {**dict.fromkeys(ones), "out": ones["out"]}, worker=1)
            for rows, match in (
                ({"no table": [1]}, "rows must name tables"),
                ({"item": [ROWS + 1]}, r"must be in \[0, 300\]"),
            ):
                with pytest.raises(ValueError, match=match):
                    server.pull(rows)
        for kind, grads, other in odd_pushes():
            with pytest.raises((TypeError, ValueError, RuntimeError)) as expected:
                push(alone, grads, **other)
            with pytest.raises(type(expected.value)) as raised:
                push(run.server, grads, **other)
            assert str(expected.value) in str(raised.value), kind
            if not isinstance(raised.value, ray.exceptions.RayTaskError):
                assert str(expected.value) == str(raised.value), kind
        assert run.server.stats() == alone.stats()
        assert alone.stats()[:2] == (2, 0)
        close(run.server.state(), alone.state())
        # Whole and by the row, in another dtype too. The columns of "hidden" lie in
        # several processes.
        some = {"item": [299, 150, 0], "user": [], "hidden": [3, 1]}
        for asked, dtype in itertools.product((None, some), (None, jnp.bfloat16)):
            got, expected = (server.pull(asked, dtype)[0] for server in both)
            for pair in zip(got.values(), expected.values(), strict=True):
                x, y = (getattr(leaf, "values", leaf) for leaf in pair)
                assert (x.shape, x.dtype) == (y.shape, y.dtype)
                x, y = np.float32(x), np.float32(y)
                np.testing.assert_allclose(x, y, rtol=2**-7 if dtype else 1e-6)
        actor = run.server.actor
        assert ray.get(actor.wait.remote(1)) == 2
        with pytest.raises(TimeoutError):
            ray.get(actor.wait.remote(2, timeout=0.0))
        # The processes keep nothing that they prepared for a refused push.
        leader, follower = run.server.processes._actors
        kept = follower.__ray_call__.remote(lambda follower: len(follower._prepared))
        assert ray.get(kept) == 0
        # All are on one machine, so they listen where no other machine reaches them.
        at = leader.__ray_call__.remote(lambda leader: leader._coordinator)
        assert ray.get(at).startswith("127.0.0.1:")


@on_cluster
@pytest.mark.parametrize("processes", [1, 2])
def test_each_method_takes_its_arguments_by_keyword(processes, tmp_path):
    """On the driver, and on the actor that workers call."""
    ray = pytest.importorskip("ray")
    options = {"server_processes": processes, "server_shardings": cut_tables}
    job = idle(gx.drop_stale(optax.sgd(0.1), 9), pushes=2)
    with engines.ray(job, checkpoint=tmp_path, **options) as run:
        actor, layout = run.server.actor, run.server.processes.layout

        def called(name, **arguments):
            return ray.get(getattr(actor, name).remote(**arguments))

        def push(grads, local_step, push_id):
            grads, extra = message(layout, grads, {"push_id": push_id})
            return called("push", grads=grads, local_step=local_step, **extra)

        for number, (pull, pushed) in enumerate(
            [
                (run.server.pull, run.server.push),
                (functools.partial(called, "pull"), push),
            ]
        ):
            params, step = pull(rows={"item": [299, 3]}, dtype=jnp.bfloat16)
            assert params["item"].indices.tolist() == [3, 299]
            assert params["user"].dtype == params["item"].dtype == jnp.bfloat16
            assert pull(dtype=jnp.bfloat16)[0]["item"].shape == (ROWS, DIM)
            grads = jax.tree.map(np.ones_like, make_params())
            result = pushed(grads=grads, local_step=step, push_id=(7, number))
            assert result.global_step == number + 1
        assert called("wait", global_step=1, timeout=0.0) == 2
        assert called("global_step") == called("stats").global_step == 2
        tally = called("rest").tally
        assert run.server.stats()[:2] == (tally.accepted, tally.pushes - 2) == (2, 0)
        close(called("state"), run.server.state())
        assert called("begin").global_step == 0
        assert called("save") == run.server.save() == 2


# Deaths. The job is slow enough that they happen while it runs.


def slow(pushes, tx=None, workers=1):
    tx = tx or gx.drop_stale(SGD, 10)
    params = {"table": np.zeros((10, 3), np.float32), "rest": np.float32(0)}
    return make_job([worker(seconds=0.02)] * workers, pushes, tx, params=params)


def table_of(run):
    """The rows of the table if every step has subtracted 1 from them."""
    table = run.server.state()["params"]["table"]
    steps = run.server.stats().global_step
    np.testing.assert_array_equal(table, np.full((10, 3), -steps, np.float32))
    return table


def numbered(directory):
    """The names of checkpoints, and of nothing else: none is broken or half written."""
    names = {path.name for path in directory.iterdir() if path.is_dir()}
    assert all(map(str.isdigit, names))
    return {int(name) for name in names}


def pids(run):
    return on_group(lambda *_: os.getpid(), run)


def gone(pid):
    """Whether a process has ended, even if its parent has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def cut_table(path, shape):
    return P("server") if path == "table" else P()


OF_TWO = {"server_processes": 2, "server_shardings": cut_table}


@on_cluster
def test_a_death_of_any_process_restarts_the_group_at_its_checkpoint(tmp_path, caplog):
    """Each step needs both workers. Without a required number, the chaos kills all."""
    caplog.set_level(logging.WARNING, "gradxform")
    job = slow(150, gx.conditional_accumulator(SGD, 2), workers=2)
    job = job._replace(required=2)
    checkpoint = engines.Checkpoint(tmp_path, every_steps=10, max_to_keep=None)
    # Ray itself does neither: it would repeat a push, and count no death.
    again = {"max_restarts": -1, "max_task_retries": -1}
    options = {"server_options": again, "worker_options": again, "max_deaths": 3}
    pushes, killed = [], []
    with engines.ray(job, checkpoint=checkpoint, **options, **OF_TWO) as run:

        def kill(who, hang):
            leader_and_follower = pids(run)
            if hang:  # The other waits for it forever, in a collective.
                os.kill(leader_and_follower[who], signal.SIGSTOP)
                time.sleep(0.5)
            os.kill(leader_and_follower[who], signal.SIGKILL)
            killed.extend(leader_and_follower)

        # The other one dies alone in the test of a checkpoint below.
        deaths = {30: (0, False), 70: (1, True), 110: (0, True)}
        for push in run.pushes:
            pushes.append(push)
            counts = run.counts()
            if (death := deaths.pop(counts.pushed - counts.lost, None)) is not None:
                wait_until(lambda: any(x.name.isdigit() for x in tmp_path.iterdir()))
                kill(*death)
            if counts.pushed - counts.lost == 130 and not run.counts().worker_deaths:
                sys.modules["ray"].kill(run.workers[0])  # It is taken for dead.
        assert not deaths
        assert_counted(run, pushes, job)
        assert (run.counts().server_deaths, run.counts().worker_deaths) == (3, 1)
        # No step took one worker's gradient twice and another's never.
        assert run.counts().dropped == 0
        began, *again = first_steps(pushes)
        assert began == 0
        assert all(step > 0 and step % 10 == 0 for step in again)
        said = [m for m in caplog.messages if "the server died and goes on" in m]
        assert len(again) == len(said) == 3
        assert f"from step {again[0]};" in said[0]
        table = table_of(run)
        killed.extend(pids(run))
    wait_until(lambda: all(map(gone, killed)))
    # One process goes on from what several have saved, and the other way round.
    _, state, run = ended(engines.simulated, job, checkpoint=tmp_path)
    assert run.counts().pushed == 150
    np.testing.assert_array_equal(state["params"]["table"], table)


@on_cluster
def test_a_group_goes_on_where_one_process_was(tmp_path):
    ray, job = pytest.importorskip("ray"), slow(40)
    assert len(list_all(engines.simulated, job, checkpoint=tmp_path)) == 40

    def params():  # No process makes all of it.
        return {"table": jnp.zeros((10, 3)), "rest": jnp.zeros(())}

    job = job._replace(params=params, pushes=60)
    with engines.ray(job, checkpoint=tmp_path, **OF_TWO) as run:
        assert (run.resumed, run.counts().pushed) == (40, 40)
        params, _ = run.server.pull()
        np.testing.assert_array_equal(params["table"], np.full((10, 3), -40.0))
        assert len(list(run.pushes)) == 20
        assert run.server.stats().global_step == 60
        # Each process has its own part.
        own = on_group(lambda _, leaves: leaves[1].addressable_data(0).shape, run)
        assert own == [(5, 3)] * 2
    before = {actor["ActorID"] for actor in alive(ray)}
    other = job._replace(params={"table": np.zeros((12, 3), np.float32)})
    says = r"of another job.*float32\[12,3\]"
    fails(engines.ray, other, ValueError, says, checkpoint=tmp_path, **OF_TWO)
    wait_until(lambda: {actor["ActorID"] for actor in alive(ray)} <= before)


def alive(ray):
    """The actors that are alive."""
    found = ray._private.state.actors().values()
    return [actor for actor in found if actor["State"] == "ALIVE"]


@on_cluster
def test_a_death_while_a_checkpoint_is_written_costs_that_one(tmp_path):
    job = slow(100)
    checkpoint = engines.Checkpoint(tmp_path, every_steps=20, every_seconds=None)
    with engines.ray(job, checkpoint=checkpoint, **OF_TWO) as run:
        _, follower = pids(run)

        def hang(actor, _):
            if jax.process_index() != 0:
                actor._store._write = lambda snapshot: time.sleep(1000)

        for push in run.pushes:
            if push.result.global_step == 30:
                on_group(hang, run)  # The leader writes the next one, and waits for it.
            if push.result.global_step == 50:
                os.kill(follower, signal.SIGKILL)
                break
        rest = list(run.pushes)
        assert min(push.local_step for push in rest[20:]) >= 20
        counts = run.counts()
        assert counts.server_deaths == 1
        assert counts.accepted + counts.dropped == 100
        assert counts.pushed == 100 + counts.lost
        assert run.server.stats().global_step == 100
    assert 100 in numbered(tmp_path)


@on_cluster
def test_an_error_in_one_process_is_a_death_and_in_all_an_error(tmp_path):
    ray = pytest.importorskip("ray")

    def fail_in(which):
        def step(*_):
            raise MemoryError("there is no room")

        def sabotage(actor, _):
            if jax.process_index() in which:
                core = actor.process.core
                prepare = core.prepare
                core.prepare = lambda *args: prepare(*args)._replace(step=step)

        return sabotage

    with engines.ray(slow(10**6), checkpoint=tmp_path, **OF_TWO) as run:
        next(run.pushes)
        for number, which in enumerate([{1}, {0}], 1):
            on_group(fail_in(which), run)
            while run.counts().server_deaths < number:
                next(run.pushes)
        on_group(fail_in({0, 1}), run)
        # The worker whose step it was is told, or first another one that pushed later.
        told = MemoryError, gx.ServerClosedError
        with pytest.raises(told, match="there is no room") as raised:
            list(run.pushes)
        assert isinstance(raised.value, ray.exceptions.RayTaskError)
        assert run.counts().server_deaths == 2


@on_cluster
def test_the_cause_of_a_death_comes_along(tmp_path, caplog):
    ray = pytest.importorskip("ray")

    def fail(count):
        if count == 8:
            raise FloatingPointError("in the middle of a step")

    def update(grads, state, params=None):  # Only the leader runs the callback.
        jax.debug.callback(fail, state)
        return grads, state + 1

    tx = optax.GradientTransformation(lambda _: jnp.int32(0), update)
    checkpoint = engines.Checkpoint(tmp_path, 5, None)
    job = slow(40, gx.drop_stale(tx, 10))
    options = {"checkpoint": checkpoint, "max_deaths": 1, **OF_TWO}
    with (
        caplog.at_level(logging.WARNING, "gradxform"),
        engines.ray(job, **options) as run,
    ):
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            list(run.pushes)
        assert run.counts().server_deaths == 1
    cause = "in the middle of a step"
    assert any(cause in note for note in raised.value.__notes__)
    assert [cause in said for said in caplog.messages if "has ended" in said] == [True]
    assert numbered(tmp_path) == {5}


def fails_once(flag, how):
    """A transformation whose ``init`` makes one process fail once.

    The leader dies at once, or a follower dies or fails while it reads its parts.
    """
    sgd = optax.sgd(1.0)

    def fail():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            if how == "raises":
                raise MemoryError("there is no room")
            os.kill(os.getpid(), signal.SIGKILL)

    def init(params):
        if how == "dies at once":
            fail()
        read = Store.read

        def read_or_fail(store, pushes, like):
            if jax.process_index():
                fail()
            return read(store, pushes, like)

        Store.read = read_or_fail
        return sgd.init(params)

    return optax.GradientTransformation(init, sgd.update)


@on_cluster
@pytest.mark.parametrize("how", ["dies at once", "dies", "raises"])
def test_a_process_that_fails_while_the_group_starts(how, tmp_path):
    """A death is one of the server; an error is no fault of the checkpoint."""
    directory = tmp_path / "run"
    checkpoint = engines.Checkpoint(directory, every_steps=10, max_to_keep=None)
    list_all(engines.simulated, slow(20), checkpoint=checkpoint)
    job = slow(30, gx.drop_stale(fails_once(str(tmp_path / "flag"), how), 10))
    options = {"checkpoint": checkpoint, **OF_TWO}
    if how == "raises":
        fails(engines.ray, job, MemoryError, "there is no room", **options)
    else:
        pushes, _, run = ended(engines.ray, job, **options)
        assert (run.resumed, len(pushes)) == (20, 10)
        # Without a checkpoint it would end the run.
        assert run.counts().server_deaths == 1
    assert {10, 20} <= numbered(directory)


@on_cluster
def test_a_process_without_memory_for_a_snapshot_costs_one_checkpoint(tmp_path):
    checkpoint = engines.Checkpoint(tmp_path, 10, None, max_to_keep=None)

    def short_in(which, step):
        def sabotage(actor, _):
            core = actor.process.core
            state = core.state

            def short():
                if core.version.global_step == step:
                    raise MemoryError("there is no room")
                return state()

            if jax.process_index() == which:
                core.state = short

        return sabotage

    def left_over(actor, _):
        return len(getattr(actor, "_snapshots", ()))

    with engines.ray(slow(50), checkpoint=checkpoint, **OF_TWO) as run:
        on_group(short_in(1, 20), run)
        on_group(short_in(0, 30), run)
        assert len(list(run.pushes)) == 50
        assert run.counts()[:3] == (50, 50, 0)
        assert run.counts().server_deaths == 0
        assert on_group(left_over, run) == [0, 0]
    # One that is due while another is being written, as on a slow disk, is left out.
    assert {10, 50} <= numbered(tmp_path) <= {10, 40, 50}
    assert list_all(engines.simulated, slow(50), checkpoint=tmp_path) == []
