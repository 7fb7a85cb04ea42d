"""The parameter server as a Ray actor, on a local cluster."""

import contextlib
import itertools
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._ray import wire
from tests import ray_here
from tests.conftest import on_cluster

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def server():
    """One actor for all tests that leave it in order. It may be at any step."""
    return make_server()


def make_server():
    """An actor whose parameters and optimizer state have several dtypes and shapes."""
    inner = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.1))
    params = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]]), "b": jnp.bfloat16(0.25)}
    make = ray.remote(gx.ParameterServer).options(max_concurrency=4).remote
    return make(params, gx.drop_stale(inner, max_staleness=1))


def push_some(server, count):
    """Pushes the gradients of half the sum of squares; returns the last result."""
    for _ in range(count):
        params, seen = ray.get(server.pull.remote())
        result = ray.get(server.push.remote(params, seen))
    return result


def assert_identical(tree, other):
    """The same structure, types and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    assert jax.tree.map(jax.typeof, tree) == jax.tree.map(jax.typeof, other)
    for x, y in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# The server.


@pytest.mark.parametrize("where", ["actor", "here"])
@pytest.mark.quick_case("here-actor")
def test_each_method_takes_its_arguments_by_keyword(either_ray, where):
    given = {"params": {"w": jnp.ones((4, 2))}, "tx": optax.sgd(1.0), "donate": True}
    if where == "here":
        server = gx.ParameterServer(**given, require_finite=True)
        called = lambda name, **kw: getattr(server, name)(**kw)  # noqa: E731
    else:
        server = either_ray.remote(gx.ParameterServer).remote(
            **given, require_finite=True
        )
        called = lambda name, **kw: either_ray.get(getattr(server, name).remote(**kw))  # noqa: E731
    part, step = called("pull", rows={"w": [3, 1]}, dtype=jnp.bfloat16)
    assert part["w"].indices.tolist() == [1, 3]
    assert part["w"].dtype == jnp.bfloat16
    grads = {"w": np.ones((4, 2), np.float32)}
    first = called("push", grads=grads, local_step=step, push_id=("a", 0))
    assert first == called("push", grads=grads, local_step=step, push_id=("a", 0))
    assert called("wait", global_step=0, timeout=0.0) == 1
    assert called("stats").accepted == 1
    called("restore", state=called("state"))
    np.testing.assert_array_equal(called("pull", dtype=None)[0]["w"], np.zeros((4, 2)))
    called("close")
    state = called("state")  # It still answers.
    np.testing.assert_array_equal(state["params"]["w"], np.zeros((4, 2)))


@on_cluster
def test_a_bad_push_raises_at_the_caller_and_changes_nothing(server):
    seen = push_some(server, 3).global_step
    before = ray.get(server.state.remote())
    params = before["params"]
    bad = [
        (TypeError, r"differ at \['w'\]", params | {"w": jnp.ones(4)}, seen),
        (ValueError, "local_step must be in", params, seen + 1),
    ]
    for error, match, grads, local_step in bad:
        with pytest.raises(error, match=match) as raised:
            ray.get(server.push.remote(grads, local_step))
        assert isinstance(raised.value, ray.exceptions.RayTaskError)
        assert type(raised.value.cause) is error
    assert_identical(ray.get(server.state.remote()), before)
    assert push_some(server, 1)[:3] == (True, 0, seen + 1)


@on_cluster
def test_a_restarted_actor_counts_its_lost_pushes():
    make = ray.remote(gx.ParameterServer).options(max_concurrency=4, max_restarts=1)
    server = make.remote({"w": jnp.ones(2)}, gx.drop_stale(optax.sgd(0.5), 4))
    params, seen = ray.get(server.pull.remote())
    push_some(server, 2)
    saved = ray.get(server.state.remote())
    _, old = ray.get(server.pull.remote())
    ray.kill(server, no_restart=False)

    def ask(method, *args):
        """The answer, if need be of the actor that replaces one that died."""
        while True:
            with contextlib.suppress(ray.exceptions.ActorUnavailableError):
                return ray.get(getattr(server, method).remote(*args))

    def lost():
        try:
            ask("pull")
        except gx.ServerClosedError as error:
            return str(error)

    while not (message := lost()):  # A killed actor may answer for a moment.
        pass
    assert "its Ray actor has died" in message
    assert "restore(state)" in message
    for method, args in (("state", ()), ("push", (params, seen)), ("wait", (0, 1))):
        with pytest.raises(gx.ServerClosedError, match="has lost its parameters"):
            ask(method, *args)
    assert "Ray actor" in ask("stats").lost
    ask("restore", saved)
    assert_identical(ask("state"), saved)
    with pytest.raises(ValueError, match="pull again"):
        ask("push", params, old)
    assert push_some(server, 1)[:3] == (True, 0, 3)


@on_cluster
def test_waiting_calls_leave_module_for_a_push(server):
    _, seen = ray.get(server.pull.remote())
    waiting = [server.wait.remote(seen) for _ in range(3)]
    assert not ray.wait(waiting, timeout=0.2)[0]
    push_some(server, 1)
    assert ray.get(waiting) == [seen + 1] * 3
    with pytest.raises(TimeoutError, match=f"has not passed global_step={seen + 1}"):
        ray.get(server.wait.remote(seen + 1, timeout=0.1))


# What crosses between processes.


def plain(params):
    """The same params, with the rows of tables as arrays."""
    return {
        name: (x.indices, x.values, x.dense_shape)
        if isinstance(x, gx.IndexedSlices | gx.TableRows)
        else x
        for name, x in params.items()
    }


def in_band(tree):
    """How many bytes a message itself holds, and how many travel beside it."""
    beside = []
    pickled = ray.cloudpickle.dumps(tree, protocol=5, buffer_callback=beside.append)
    return len(pickled), sum(buffer.raw().nbytes for buffer in beside)


@on_cluster
def test_arrays_travel_beside_the_message():
    params = {
        "half": jnp.arange(1000.0).astype(jnp.bfloat16),
        "scalar": jnp.float32(3.0),
        "weak": jnp.asarray(2.0),
        "flags": jnp.array([True, False]),
        "layers": [jnp.full((64, 1024), number, jnp.float32) for number in range(16)],
        "table": jnp.arange(40.0).reshape(10, 4),
    }
    server = ray.remote(gx.ParameterServer).remote(params, optax.identity())
    pulled, seen = ray.get(server.pull.remote())
    assert_identical(pulled, params)
    rows = jax.jit(lambda g: g)(gx.IndexedSlices([3, 1], jnp.ones((2, 4)), (10, 4)))
    grads = {**jax.tree.map(jnp.ones_like, params), "table": rows}
    size = sum(x.nbytes for x in jax.tree.leaves({**grads, "table": rows.values}))
    message, beside = in_band(grads)
    assert message < 8_000
    assert size - 8 <= beside < size + 100  # All but the weak scalar.
    arrived = ray.get(ray.put(grads))
    assert_identical(*map(plain, (arrived, grads)))
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    over = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, P("x")))
    assert in_band(over)[1] == over.nbytes
    assert ray.get(ray.put(over)).tolist() == over.tolist()
    assert ray.get(server.push.remote(grads, seen)).applied
    later, _ = ray.get(server.pull.remote())
    dense = {**grads, "table": rows.densify()}
    wanted = jax.tree.map(lambda p, g: np.asarray(p) + np.asarray(g), params, dense)
    chex.assert_trees_all_close(later, wanted)


def test_arrays_arrive_as_they_were_sent(either_ray):
    wire.register()
    half = jnp.arange(1000.0).astype(jnp.bfloat16)
    for x in half, half.reshape(10, 5, 20), jnp.zeros((0, 3)), jnp.array([True, False]):
        assert_identical(either_ray.get(either_ray.put(x)), x)
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert_identical(either_ray.get(either_ray.put(weak)), weak)
    if isinstance(either_ray, ray_here.Ray):
        message, (beside,) = ray_here.packed(half)
        assert (len(message) < 500, beside.nbytes) == (True, half.nbytes)
    else:
        message, beside = in_band(half)
        assert (message < 500, beside) == (True, half.nbytes)


DTYPES = "float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"


@on_cluster
def test_arrays_of_any_dtype_travel_beside_the_message(server):
    ray.get(server.pull.remote())  # From then on this process sends them so.
    rng = np.random.default_rng(0)
    for dtype, shape in itertools.product(DTYPES, [(), (0, 3), (1000,), (10, 20, 30)]):
        x = jnp.asarray(rng.integers(0, 2, shape), dtype)
        message, beside = in_band(x)
        assert message < 500
        assert beside == x.nbytes
        assert_identical(ray.get(ray.put(x)), x)


def memory_of(params):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)]


def test_a_version_is_published_once(either_ray):
    params = {"w": jnp.ones(100_000), "t": jnp.ones((1000, 50))}
    tx = gx.conditional_accumulator(optax.sgd(0.5), 2)
    server = either_ray.remote(gx.ParameterServer).options(max_concurrency=4)
    server = server.remote(params, tx)

    def pull(rows=None):
        return either_ray.get(server.pull.remote(rows))

    (first, seen), (again, _) = pull(), pull()
    assert memory_of(first) == memory_of(again)  # Both look at Ray's store.
    (part, _), (other, _) = pull({"t": [1]}), pull({"t": [7, 5]})
    assert memory_of(part["w"]) == memory_of(other["w"])
    assert memory_of(part["w"]) != memory_of(first["w"])
    ones = jax.tree.map(jnp.ones_like, params)
    either_ray.get(server.push.remote(ones, seen))  # It is added, and changes nothing.
    third, _ = pull()
    assert memory_of(third) == memory_of(first)
    kept = jax.tree.map(np.array, first)
    jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), donate_argnums=0)(again)
    either_ray.get(server.push.remote(ones, seen))
    new, later = pull()
    assert later == seen + 1
    assert not {*memory_of(new)} & {*memory_of(first)}
    chex.assert_trees_all_equal(first, kept)  # Donation leaves pulled arrays alone.
    chex.assert_trees_all_close(new, jax.tree.map(lambda x: x - 0.5, kept))
    state = either_ray.get(server.state.remote())
    either_ray.get(server.restore.remote(state | {"params": kept}))
    assert pull()[1] == later  # Other parameters at the same step.
    chex.assert_trees_all_equal(pull()[0], kept)
    either_ray.get(server.close.remote())
    with pytest.raises(gx.ServerClosedError):
        pull()


@on_cluster
def test_rows_of_a_table_are_pulled_and_pushed_through_ray():
    table = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)
    params = {"table": jnp.asarray(table), "w": jnp.ones(3)}
    server = ray.remote(gx.ParameterServer).remote(params, gx.adagrad(0.1))
    near = gx.ParameterServer(params, gx.adagrad(0.1))
    for ids in ([5, 3, 5], [7], [999, 0, 1, 2, 3]):
        pulled, seen = ray.get(server.pull.remote(rows={"table": ids}))
        wanted, local = near.pull(rows={"table": ids})
        assert_identical(*map(plain, (pulled, wanted)))
        _, grads = gx.value_and_grad(lambda p, i: jnp.sum(gx.lookup(p["table"], i)))(
            pulled, jnp.array(ids)
        )
        ray.get(server.push.remote({**grads, "w": None}, seen))
        near.push({**grads, "w": None}, local)
    assert_identical(ray.get(server.state.remote()), near.state())
    several = {"table": [5], "w": [0, 2]}
    pulled, _ = ray.get(server.pull.remote(rows=several))
    assert_identical(*map(plain, (pulled, near.pull(rows=several)[0])))
    with pytest.raises(ValueError, match="got 1001 at"):
        ray.get(server.pull.remote(rows={"table": [1001]}))


@on_cluster
def test_a_version_is_pulled_while_a_step_runs(tmp_path):
    go_on, running = tmp_path / "go_on", tmp_path / "running"

    def wait():
        running.touch()
        while not go_on.exists():
            time.sleep(0.01)

    def slow(updates, _):
        jax.debug.callback(wait)
        return updates

    server = ray.remote(gx.ParameterServer).options(max_concurrency=4)
    server = server.remote({"w": jnp.ones(8)}, optax.stateless(slow))
    go_on.touch()
    ray.get(server.push.remote({"w": jnp.ones(8)}, 0))
    _, seen = ray.get(server.pull.remote())
    go_on.unlink()
    running.unlink()
    push = server.push.remote({"w": jnp.ones(8)}, seen)
    while not running.exists():
        time.sleep(0.01)
    params, again = ray.get(server.pull.remote())
    assert again == seen
    assert params["w"].tolist() == [2.0] * 8
    assert not ray.wait([push], timeout=0)[0]
    go_on.touch()
    assert ray.get(push).global_step == seen + 1
