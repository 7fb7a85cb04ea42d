"""Copies of a server's arrays lie where the arrays lie, in memory of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._server import placement
from gradxform._server.programs import check_fits, checked


@pytest.mark.every
@pytest.mark.parametrize("copy", [placement.copy, placement._copy_of_shards])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_a_copy_has_memory_of_its_own(copy, spec):
    """The second function copies what other processes have a part of."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    x = jax.device_put(np.arange(16.0).reshape(4, 4), NamedSharding(mesh, spec))
    new = copy(x)
    assert new.sharding == x.sharding
    np.testing.assert_array_equal(new, x)
    places = [
        {part.data.unsafe_buffer_pointer() for part in each.addressable_shards}
        for each in (x, new)
    ]
    assert not places[0] & places[1]


def test_a_copy_keeps_its_numbers_if_an_array_of_numpy_changes():
    given = np.ones(3)
    new = placement.copy({"w": given})
    given[:] = 0
    assert new["w"].tolist() == [1, 1, 1]


@pytest.mark.every
@pytest.mark.parametrize("gated", [True, False])
def test_a_first_state_is_made_once_more_for_a_gate_of_its_own(gated):
    inits = []

    def init(params):
        inits.append(params)
        return jnp.zeros(2)

    tx = optax.GradientTransformation(init, lambda updates, state, _: (updates, state))
    given = gx.drop_stale(tx, 3) if gated else tx
    found, params, state = placement.initialize(given, np.ones(2))
    assert (found is given) == gated
    assert len(inits) == 2 - gated
    assert isinstance(state, gx.DropStaleState)
    assert not any(x is params for x in jax.tree.leaves(state))


@pytest.mark.every
@pytest.mark.parametrize("committed", [True, False])
def test_arrays_are_brought_where_one_is_bound(committed):
    device = jax.devices()[1]
    free, bound = jnp.ones(2), jax.device_put(jnp.ones(3), device)
    there = placement.Placement([free, bound] if committed else [free])
    assert there.committed == committed
    brought = there.put(np.ones(2))
    assert brought.committed == committed
    assert brought.devices() == ({device} if committed else free.devices())
    described = there.abstract(free.aval, bound.sharding)
    assert described.sharding == (bound.sharding if committed else None)
    assert (described.shape, described.dtype) == ((2,), jnp.float32)
    number = jnp.asarray(1.0)
    assert there.abstract(number.aval, bound.sharding).weak_type == number.weak_type


@pytest.mark.every
@pytest.mark.parametrize("committed", [True, False])
def test_a_state_that_is_put_back_is_bound_only_if_the_arrays_are(committed):
    device = jax.devices()[1] if committed else None
    params, state = jax.device_put((jnp.ones(2), jnp.zeros(3)), device)
    specs = placement.Specs(params, state)
    given = {"params": np.full(2, 5, np.float32), "state": np.full(3, 7, np.float32)}
    put = specs.put(given)
    for name, x in put.items():
        np.testing.assert_array_equal(x, given[name])
        assert (x.committed, x.devices()) == (committed, params.devices())
    with pytest.raises(TypeError, match=r"^state.* differ.*'params'"):
        specs.put(given | {"params": np.ones(3, np.float32)})
    with pytest.raises(TypeError, match="state"):
        specs.put({"params": given["params"]})


def test_what_lies_on_most_devices_says_where_all_have_room():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    x = jax.device_put(np.ones(4), NamedSharding(mesh, P("x")))
    there = placement.Placement([jax.device_put(1.0, jax.devices()[0]), x])
    assert there.everywhere == NamedSharding(mesh, P())


def test_gradients_have_the_shapes_and_dtypes_of_the_parameters():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(2, "bfloat16")}
    check_fits(params, jax.tree.map(jnp.zeros_like, params))
    with pytest.raises(TypeError, match=r"grads.*'?w'?"):
        check_fits(params, params | {"w": jnp.ones((3, 2))})
    with pytest.raises(TypeError, match=r"grads.*'?b'?"):
        check_fits(params, params | {"b": jnp.ones(2)})


def test_gradients_of_integers_are_left_out_before_they_are_sent_in_parts():
    params = {"w": jnp.ones(2), "n": jnp.ones(3, int)}
    nothing = np.zeros(3, jax.dtypes.float0)
    found = checked(params, {"w": params["w"], "n": nothing}, {})
    assert (found["w"] is params["w"], found["n"]) == (True, None)
    with pytest.raises(ValueError, match="grads"):
        checked(params, {"w": None, "n": nothing}, {})
    with pytest.raises(TypeError, match=r"grads.*'w'"):
        checked(params, {"w": jnp.ones(3), "n": None}, {})
    with pytest.raises(TypeError, match="extra"):
        checked(params, {"w": params["w"], "n": None}, {"x": "no array"})
