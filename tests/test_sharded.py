"""Norms inside ``shard_map``: sharded leaves are summed, replicated ones count once."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradxform as gx

MESH = ((4, 2), ("x", "y"))
SPECS = {"rows": P("x"), "both": P("y", "x"), "columns": P(None, "y"), "all": P()}


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = {"rows": (8, 3), "both": (4, 8), "columns": (3, 4), "all": (5,)}
    return {k: jnp.float32(rng.standard_normal(s)) for k, s in shapes.items()}


def sharded(f, in_specs, out_specs):
    mesh = jax.make_mesh(*MESH, axis_types=(AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def test_global_norm():
    grads = draw(0)
    norm = sharded(
        functools.partial(gx.global_norm, axis_name=("x", "y")), (SPECS,), P()
    )
    expected = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
    np.testing.assert_allclose(norm(grads), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "factory",
    [
        gx.clip_by_global_norm,
        gx.clip_by_norm,
        lambda c, **k: gx.novograd(0.1, global_clipnorm=c, **k),
        lambda c, **k: gx.novograd(0.1, clipnorm=c, **k),
        lambda c, **k: gx.novograd(0.1, **k),
    ],
    ids=["global", "layers", "novograd-global", "novograd-layers", "novograd"],
)
def test_shard_map_agrees_with_one_device(factory):
    one, many = factory(1.0), factory(1.0, axis_name=("x", "y"))
    state = other = one.init(draw(0))
    # Arrays like params are sharded like them, scalars are replicated.
    state_specs = optax.tree.map_params(
        one,
        lambda x, spec: spec if x.ndim else P(),
        state,
        SPECS,
        transform_non_params=lambda _: P(),
    )
    update = sharded(many.update, (SPECS, state_specs), (SPECS, state_specs))
    for seed in (1, 2):
        updates, state = one.update(draw(seed), state)
        got, other = update(draw(seed), other)
        chex.assert_trees_all_close(
            (got, other), (updates, state), rtol=1e-6, atol=1e-7
        )


def test_a_clip_costs_one_collective_a_set_of_axes():
    tx = gx.clip_by_global_norm(1.0, axis_name="x")
    specs = {k: P("x") for k in "abc"}
    grads = {k: jnp.ones(8) for k in "abc"}
    update = sharded(lambda g: tx.update(g, tx.init(g))[0], (specs,), specs)
    text = update.lower(grads).compile().as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
