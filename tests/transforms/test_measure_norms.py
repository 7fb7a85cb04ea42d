"""measure_norms, against NumPy in float64: leaves and layers of every kind."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradxform as gx
from benchmarks.compilers import lower_training, placed
from benchmarks.grid import devices
from benchmarks.models import dense_layers, size, squares
from tests.test_compiled import check, compile_step, leaves

RNG = np.random.default_rng(0)


def length(x, axes=0):
    """The norm over all axes but the first ones."""
    x = np.asarray(x).astype(np.complex128)
    return np.sqrt(np.sum(np.abs(x) ** 2, axis=tuple(range(axes, x.ndim))))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("axes", [0, 1, 2])
def test_of_each_leaf_or_layer(dtype, axes):
    """In float16 the squares overflow, and a plain sum of them stalls."""
    draw = 300 * RNG.standard_normal((3, 4, 500)) + (1j if "complex" in dtype else 0)
    grads = {"stack": jnp.asarray(draw, dtype), "leaf": jnp.ones((), dtype)}
    tx = gx.measure_norms(stacked_axes={"stack": axes, "leaf": 0})
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    chex.assert_trees_all_equal(updates, grads)
    assert state.norms["stack"].dtype == jnp.float32
    np.testing.assert_allclose(
        state.norms["stack"], length(grads["stack"], axes), rtol=1e-5
    )
    assert state.norms["leaf"] == 1


def test_doubles_are_measured_in_double_precision():
    with jax.enable_x64(True):
        grads = jnp.array([3e200, 4e-3]) / 1e60
        tx = gx.measure_norms()
        norm = tx.update(grads, tx.init(grads))[1].norms
        np.testing.assert_allclose(norm, length(grads), rtol=1e-14)


def test_a_leaf_without_a_gradient_keeps_its_place():
    params = {"w": jnp.ones(2), "b": jnp.ones(2), "none": None}
    tx = optax.chain(gx.measure_norms(), optax.sgd(0.0))
    state, nothing = tx.init(params), optax.MaskedNode()
    pushes = [(3.0, None), (None, 4.0), (jnp.nan, nothing), (nothing, 6.0)]
    expected = [(3.0, 0.0), (3.0, 4.0), (jnp.nan, 4.0), (jnp.nan, 6.0)]
    for push, (w, b) in zip(pushes, expected, strict=True):
        w_grad, b_grad = (
            g * jnp.array([0.6, 0.8]) if isinstance(g, float) else g for g in push
        )
        grads = {"w": w_grad, "b": b_grad, "none": None}
        _, state = tx.update(grads, state, params)
        chex.assert_trees_all_equal_structs(state, tx.init(params))
        wanted = {"w": w, "b": b, "none": None}
        chex.assert_trees_all_close(state[0].norms, wanted, rtol=1e-6)
    masked = optax.masked(gx.measure_norms(), {"w": True, "b": False, "none": None})
    grads = params | {"w": jnp.array([3.0, 4.0])}
    updates, state = masked.update(grads, masked.init(params), params)
    chex.assert_trees_all_equal(updates, grads)
    assert optax.tree.get(state, "norms")["w"] == 5
    assert gx.global_norm(optax.tree.get(state, "norms")) == 5


@pytest.mark.slow
@pytest.mark.parametrize("axes", [0, 1])
def test_repeated_rows_are_summed_before(axes):
    rows = RNG.standard_normal((4, 3)).astype(np.float32)
    grads = gx.IndexedSlices([2, 0, 2, 5], rows, (5, 3))  # The last is padding.
    tx = gx.measure_norms(stacked_axes=axes)
    state = tx.init(jnp.zeros((5, 3)))
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state)
        np.testing.assert_allclose(updates.densify(), grads.densify(), rtol=1e-6)
        wanted = length(grads.densify(), axes)
        np.testing.assert_allclose(state.norms, wanted, rtol=1e-6)
        grads = gx.IndexedSlices([1, 1], rows[:2], (5, 3))  # Others are zero now.


def test_the_norms_of_a_stack_in_a_box_of_linen_have_none():
    """Its names are those of all axes of the parameter."""
    params = {"w": nn.Partitioned(jnp.ones((2, 3)), ("x", "y"))}
    for axes, shape in ((None, ()), (1, (2,)), ({"w": 2}, (2, 3))):
        state = jax.eval_shape(gx.measure_norms(stacked_axes=axes).init, params)
        assert state.norms == {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}


def test_several_in_a_chain_have_their_own_and_each_is_found():
    grads = {"w": jnp.array([6.0, 8.0])}
    tx = optax.named_chain(
        ("gradient", gx.measure_norms()),
        ("clip", gx.clip_by_global_norm(5.0)),
        ("clipped", gx.measure_norms()),
    )
    _, state = tx.update(grads, tx.init(grads))
    found = optax.tree.get_all_with_path(state, "norms")
    assert [(path[0].key, norms["w"]) for path, norms in found] == [
        ("gradient", 10),
        ("clipped", 5),
    ]


def test_stacked_axes_and_shapes_are_checked():
    with pytest.raises(ValueError, match=r"stacked_axes .*\['b'\]"):
        gx.measure_norms(stacked_axes=1).init({"w": jnp.ones(2), "b": jnp.ones(())})
    tx = gx.measure_norms(stacked_axes=1)
    state = tx.init({"w": jnp.ones((2, 3))})
    with pytest.raises(TypeError, match=r"\['w'\].*float32\[3,3\]"):
        tx.update({"w": jnp.ones((3, 3))}, state)


@pytest.mark.figures
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("inner", [optax.adamw(0.1), gx.adagrad(0.1), optax.sgd(0.1)])
def test_it_is_one_pass_and_no_copy(inner):
    """An update that shares the squares would have them written: 1 N and 2 passes."""
    shapes, n = leaves(jnp.float32), size(leaves(jnp.float32))
    alone = compile_step(inner, shapes).cost_analysis()["bytes accessed"] / n
    tx = optax.chain(gx.measure_norms(), inner)
    check(compile_step(tx, shapes), n, 0, round(alone) + 1)


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.usefixtures("standard_promotion")
def test_a_clip_takes_the_same_sums():
    """With the loss inside, too: what a step keeps and moves is what the clip does."""
    params = placed(dense_layers(4, 512), devices("cpu"))
    batch = jax.ShapeDtypeStruct((4, 512), jnp.float32)
    links = gx.clip_by_global_norm(1.0), optax.adamw(0.1)
    with_norms, without = (
        lower_training(optax.chain(*more, *links), params, squares, batch).compile()
        for more in ((gx.measure_norms(),), ())
    )
    temps, moved = (
        (c.memory_analysis().temp_size_in_bytes, c.cost_analysis()["bytes accessed"])
        for c in (with_norms, without)
    )
    np.testing.assert_allclose(temps, moved, rtol=0.002)


def test_shards_have_the_norms_of_the_whole():
    mesh = jax.make_mesh((4, 2), ("x", "y"), (jax.sharding.AxisType.Auto,) * 2)
    specs = {"w": P(None, ("x", "y")), "b": P()}
    tx = gx.measure_norms(axis_name=specs, stacked_axes={"w": 1, "b": 0})
    grads = {"w": jnp.arange(48.0).reshape(3, 16), "b": jnp.array([3.0, 4.0])}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=P())
    def measured(grads):
        return tx.update(grads, tx.init(grads))[1].norms

    norms = jax.jit(measured)(grads)
    np.testing.assert_allclose(norms["w"], length(grads["w"], 1), rtol=1e-6)
    assert norms["b"] == 5  # On each device the same, and counted once.


def test_boxes_of_flax_are_taken_off():
    nn = pytest.importorskip("flax.linen")
    params = {"w": jnp.ones((2, 3, 4)), "b": jnp.ones(3)}
    boxed = {k: nn.Partitioned(x, names=(None,) * x.ndim) for k, x in params.items()}
    for axes in (0, {"w": 2, "b": 1}, lambda params: {"w": 1, "b": 0}):
        tx = gx.measure_norms(stacked_axes=axes)
        chex.assert_trees_all_equal(tx.init(boxed), tx.init(params))
