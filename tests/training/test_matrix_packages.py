"""A package as its authors wrote it, under whole matrices: PSGD Kron of psgdax."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.training.test_matrix_optimizers import close
from tests.training.test_whole_matrices import (
    collectives,
    draw,
    mesh,
    placed_state,
    places,
    step_of,
)

psgdax = pytest.importorskip("psgdax", reason="pip install -e '.[programs]'")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]

MODELS = {
    "leaves": (dict.fromkeys("abcdefgh", (16, 24)), P("x", "y"), False),
    "scanned": ({"w": (8, 16, 24)}, P(None, "x", "y"), True),
}
TYPES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize("axes", TYPES)
@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_of_one_device(model, axes):
    shapes, spec, is_scanned = MODELS[model]
    scanned = dict.fromkeys(shapes, is_scanned)
    tx = psgdax.kron(0.1, scanned_layers=scanned)
    on = mesh((4, 2), TYPES[axes])
    where = places(dict.fromkeys(shapes, spec), on)
    ours = gx.whole_matrices(tx, where if axes == "automatic" else None)
    plain, alone = jax.device_get(draw(shapes)), jax.jit(step_of(tx))
    with jax.set_mesh(on):
        params = jax.device_put(plain, where)
        state = placed_state(ours, params, tx.init(plain))
        here = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step_of(ours), out_shardings=here)
        kinds, _ = collectives(step.lower(params, state, params).compile())
        assert kinds["all-to-all"] <= 4
        now, expected = (params, state), (plain, tx.init(plain))
        for seed in range(1, 6):
            grads = draw(shapes, seed)
            now = step(*now, jax.device_put(grads, where))
            expected = alone(*expected, grads)
    close(jax.device_get(now), jax.device_get(expected), 1e-5)
