"""A server of several processes: the same numbers, and the same end, as one."""

import contextlib
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform import engines
from tests.conftest import ON_RAY

ROWS, DIM = 301, 4  # Which neither 2 nor 4 divides.


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"item": (ROWS, DIM), "user": (64, DIM), "hidden": (DIM, 6), "out": (6,)}
    return {
        name: 0.3 * rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def cut_tables(path, shape):
    """Both tables, and the columns of what lies between."""
    return {"item": P("server"), "user": P("server"), "hidden": P(None, "server")}.get(
        path, P()
    )


def loss(params, items, users, y):
    x = gx.lookup(params["item"], items) * gx.lookup(params["user"], users)
    return jnp.mean(jnp.square(jnp.tanh(x @ params["hidden"]) @ params["out"] - y))


dense = jax.jit(jax.value_and_grad(loss))
sparse = jax.jit(gx.value_and_grad(loss, tables=("item", "user")))


def batch(number):
    rng = np.random.default_rng(number)
    items = rng.integers(0, ROWS, 13).astype(np.int32)
    users = rng.integers(0, 64, 13).astype(np.int32)
    return items, users, rng.standard_normal(13).astype(np.float32)


def gradient(params, *data):
    rows = isinstance(params["item"], gx.IndexedSlices)
    return (sparse if rows else dense)(params, *data)


def rows_of(items, users, y):
    """Of every second batch."""
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
    "accumulate": lambda: gx.accumulate(optimizer(), 2),
}


def train(server, pushes):
    """Late ones among them; what the server has answered."""
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


def idle(tx, count=1, pushes=1, **options):
    workers = [engines.Worker(gradient, batch, rows=rows_of)] * count
    return engines.Job(make_params(), tx, workers, pushes, **options)


def on_group(function, run):
    """What it gives of the server in each process, and of that's leaves of params."""

    def call(process):
        server = getattr(process, "_server", process)
        return function(
            server, server._programs.leaves_of_params(server._version.leaves)
        )

    actors = run.server._processes._actors
    asked = [actor.__ray_call__.remote(call) for actor in actors]
    return pytest.importorskip("ray").get(asked)


# What is wrong is said at once: before Ray is started.


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (ValueError, "server_processes must be in", {"server_processes": 0}),
        (TypeError, "server_processes must be an integer", {"server_processes": 2.5}),
        (
            ValueError,
            "names the axis 'data'",
            {"server_shardings": lambda path, shape: P("data")},
        ),
        (ValueError, "into 65 parts", {"server_processes": 65}),
        (TypeError, "PartitionSpec", {"server_shardings": {"item": "server"}}),
    ],
)
def test_bad_input_is_an_error_at_once(error, says, options):
    ray = pytest.importorskip("ray")
    before = ray.is_initialized()
    options = {"server_processes": 2, "server_shardings": cut_tables, **options}
    with pytest.raises(error, match=says), engines.ray(idle(optax.sgd(1.0)), **options):
        pass
    assert ray.is_initialized() == before


on_ray = [*ON_RAY]


def marked(test):
    for mark in on_ray:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize(
    ("gate", "count"),
    [("drop_stale", 2), ("accumulator", 2), ("accumulate", 2), ("drop_stale", 4)],
)
def test_processes_train_as_one_does(gate, count, standard_promotion):
    alone = gx.ParameterServer(make_params(), GATES[gate]())
    expected = train(alone, 200)
    job = idle(GATES[gate]())
    options = {"server_processes": count, "server_shardings": cut_tables}
    with engines.ray(job, **options) as run:
        got = train(run.server, 200)
        close(run.server.state(), alone.state())
        close(run.server.pull()[0], alone.pull()[0])
        assert run.server.stats()[:3] == alone.stats()[:3]
        assert [tuple(x) for x in got] == [tuple(x) for x in expected]
        shapes = on_group(
            lambda _, leaves: [x.addressable_data(0).shape for x in leaves], run
        )
    each = -(-ROWS // count)
    assert (
        shapes == [[(DIM, -(-6 // count)), (each, DIM), (6,), (64 // count, DIM)]] * count
    )
