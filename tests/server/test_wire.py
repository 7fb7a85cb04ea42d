"""What crosses between processes, tested in one: pickles, and a store."""

import pickle
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._server import actor, wire
from gradxform._server.records import Version


def sent(x):
    """The array that arrives, the bytes of its message, and the bytes beside it."""
    beside = []
    message = pickle.dumps(wire._leave(x), protocol=5, buffer_callback=beside.append)
    arrived = wire._arrive(pickle.loads(message, buffers=beside))
    return arrived, len(message), sum(buffer.raw().nbytes for buffer in beside)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1000,), (10, 20, 30)])
def test_an_array_of_any_dtype_travels_beside_the_message(shape, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype)
    arrived, message, beside = sent(x)
    assert message < 300
    assert beside == x.nbytes
    assert jax.typeof(arrived) == jax.typeof(x)
    np.testing.assert_array_equal(arrived, x)


def test_weakly_typed_and_sharded_arrays_arrive_unchanged():
    weak = jnp.asarray(2.0)
    arrived, _, _ = sent(weak)
    assert arrived.weak_type
    assert arrived == 2
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    arrived, _, beside = sent(jax.device_put(jnp.arange(16.0), over))
    assert beside == 64
    assert arrived.tolist() == list(range(16))


class Store:
    """As much of Ray as a server's actor uses."""

    def __init__(self):
        self.objects, self.registered = [], []
        register = lambda cls, **how: self.registered.append((cls, how))  # noqa: E731
        self.util = types.SimpleNamespace(register_serializer=register)

    def put(self, x):
        self.objects.append(
            jax.tree.map(lambda x: np.array(x) if _is_array(x) else x, x)
        )
        return len(self.objects) - 1

    def get(self, ref):
        return as_jax(self.objects[ref])


def _is_array(x):
    return isinstance(x, jax.Array | np.ndarray)


def as_jax(tree):
    return jax.tree.map(lambda x: jnp.asarray(x) if _is_array(x) else x, tree)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setitem(actor.sys.modules, "ray", store)
    wire.register.cache_clear()
    yield store
    wire.register.cache_clear()


def version(incarnation="a", global_step=0):
    return Version([], global_step, 0, incarnation)


def test_a_version_is_put_once_for_each_set_of_tables(store):
    publisher, none, some = actor.Publisher(), frozenset(), frozenset({1})
    assert [cls for cls, _ in store.registered] == [type(jnp.zeros(()))]
    assert publisher.find(version(), none) is None
    first = publisher.publish(version(), none, {"a": jnp.ones(2), "b": jnp.ones(3)})
    part = publisher.publish(version(), some, {"a": jnp.ones(2), "b": 1})
    assert first != part
    # A push that was dropped or added makes another version of the same parameters.
    for same in (version(), version()._replace(dropped=3)):
        assert publisher.publish(same, none, {}) == first
        assert publisher.publish(same, some, {}) == part
    assert len(store.objects) == 2
    for other in (version(global_step=1), version(incarnation="b")):
        assert publisher.find(other, none) is None
        assert publisher.publish(other, none, {"a": jnp.zeros(2)}) not in (first, part)
        assert publisher.find(version(), none) is None  # The old one may be forgotten.


def test_the_message_is_filled_with_the_parts(store):
    class Actor(gx.ParameterServer):
        __ray_actor_class__ = gx.ParameterServer  # Ray marks it so.

    store.get_runtime_context = lambda: types.SimpleNamespace(
        was_current_actor_reconstructed=False
    )
    params = {"n": {"t": jnp.arange(12.0).reshape(6, 2)}, "w": jnp.ones(3)}
    server = Actor(params, optax.sgd(1.0))
    near = gx.ParameterServer(params, optax.sgd(1.0))
    for rows in (None, {"n/t": [4, 1, 4]}, {"n/t": [5], "w": [0, 2]}):
        sent, seen = server.pull(rows=rows)
        function, args = sent.__reduce__()
        arrived, (wanted, _) = function(*args), near.pull(rows=rows)
        assert seen == 0
        assert jax.tree.structure(arrived) == jax.tree.structure(wanted)
        for got, want in zip(*map(leaves, (arrived, wanted)), strict=True):
            np.testing.assert_array_equal(got, want)
    assert len(store.objects) == 3
    grads = jax.tree.map(jnp.ones_like, params)
    assert server.push(grads, seen).global_step == 1
    sent, seen = server.pull()
    function, args = sent.__reduce__()
    assert seen == 1
    new = jax.tree.map(lambda p: p - 1, params)
    chex.assert_trees_all_equal(function(*args), new)
    chex.assert_trees_all_equal(server.state()["params"], new)
    assert len(store.objects) == 4
    server.close()
    with pytest.raises(gx.ServerClosedError):
        server.pull()


def test_a_wrapper_around_a_gate_acts_on_dropped_pushes(store):
    class Actor(gx.ParameterServer):
        __ray_actor_class__ = gx.ParameterServer

    store.get_runtime_context = lambda: types.SimpleNamespace(
        was_current_actor_reconstructed=False
    )
    grow = optax.add_decayed_weights(1.0)  # It adds the parameters to every update.
    tx = optax.chain(gx.drop_stale(optax.sgd(1.0), max_staleness=0), grow)
    server = Actor({"w": jnp.ones(2)}, tx)
    for applied, wanted in ((True, 1.0), (False, 2.0), (False, 4.0)):
        assert server.push({"w": jnp.ones(2)}, 0).applied == applied
        sent, seen = server.pull()
        function, args = sent.__reduce__()
        assert seen == 1
        assert function(*args)["w"].tolist() == [wanted] * 2


def leaves(params):
    """The leaves; rows of parts count as arrays."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: hasattr(x, "dense_shape")):
        yield from [leaf.indices, leaf.values] if hasattr(leaf, "indices") else [leaf]
