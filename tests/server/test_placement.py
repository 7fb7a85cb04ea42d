"""Copies of a server's arrays lie where the arrays lie, in memory of their own."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._server import placement


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
