"""State in 8 bits where users put it: in trainers, on meshes, in checkpoints."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._group.layout import Layout
from tests import test_optax_all

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own code promotes.

LOW = functools.partial(gx.low_bit_state, min_size=64)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


# In other people's programs.


def test_an_optimizer_of_nnx_goes_on():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)

    def loss_fn(model):
        return jnp.mean((model(x) - 1) ** 2)

    def taken(optimizer, model, steps):
        for step in steps:
            step(optimizer, model)
        return jax.tree.leaves(nnx.state((model, optimizer)))

    def update(optimizer, model):
        optimizer.update(model, nnx.grad(loss_fn)(model))

    model = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, LOW(optax.adam(0.1)), wrt=nnx.Param)
    wanted = nnx.clone(model)
    exact = nnx.Optimizer(wanted, optax.adam(0.1), wrt=nnx.Param)
    graph, saved = nnx.split((model, optimizer))
    saved = jax.tree.map(jnp.copy, saved)
    after = taken(optimizer, model, [update, nnx.jit(update), update])
    taken(exact, wanted, [update] * 3)
    np.testing.assert_allclose(model.kernel[...], wanted.kernel[...], atol=0.01)
    assert {x.dtype for x in after} >= {jnp.dtype(jnp.int8)}
    other, its_optimizer = nnx.merge(graph, saved)
    again = taken(its_optimizer, other, [update, nnx.jit(update), update])
    jax.tree.map(np.testing.assert_array_equal, again, after)
    nnx.update((model, optimizer), saved)
    again = taken(optimizer, model, [update, nnx.jit(update), update])
    jax.tree.map(np.testing.assert_array_equal, again, after)


ADAM = optax.adam(0.1)
AROUND = {
    "alone": LOW(ADAM),
    "keep": LOW(ADAM, keep=["0/nu/w"]),
    "chain": optax.chain(optax.clip(1.0), LOW(ADAM)),
    "inject_hyperparams": optax.inject_hyperparams(lambda rate: LOW(optax.adam(rate)))(
        0.1
    ),
    "MultiSteps": optax.MultiSteps(LOW(ADAM), 2).gradient_transformation(),
    "masked": optax.masked(LOW(ADAM), {"w": True, "b": True}),
    "inject_hyperparams inside": LOW(optax.inject_hyperparams(optax.adam)(0.1)),
    "MultiSteps inside": LOW(optax.MultiSteps(ADAM, 2).gradient_transformation()),
    "masked inside": LOW(optax.masked(ADAM, {"w": True, "b": True})),
}


@pytest.mark.parametrize("name", AROUND)
def test_optax_maps_codes_as_parameters_and_leaves_scales_alone(name):
    tx = AROUND[name]
    params = {"w": jnp.ones((16, 24)), "b": jnp.ones(7)}
    state = tx.init(params)
    same = optax.tree.map_params(tx, lambda x, p: x, state, params)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    specs = optax.tree.map_params(
        tx,
        lambda x, spec: spec,
        state,
        {"w": P("x"), "b": P()},
        transform_non_params=lambda _: P(),
    )
    found = jax.tree.broadcast(specs, state, is_leaf=lambda x: isinstance(x, P))
    for x, spec in zip(*map(jax.tree.leaves, (state, found)), strict=True):
        assert spec == (P("x") if x.shape == (16, 24) else P())
    assert {x.dtype for x in jax.tree.leaves(state)} >= {jnp.dtype(jnp.int8)}


def test_parameters_without_leaves_have_a_state():
    tx = LOW(optax.adam(0.1))
    state = tx.init({})
    updates, after = jax.jit(tx.update)({}, state, {})
    assert updates == {}
    assert types(after) == types(state)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "mlp")
        )
        return nn.Dense(256, kernel_init=kernel)(x)


def devices(number, axis_type=AxisType.Auto):
    own = jax.devices()[:number]
    shape = number // 2, 2
    return jax.make_mesh(shape, ("x", "y"), axis_types=(axis_type,) * 2, devices=own)


def test_names_of_axes_are_of_codes_alone():
    """As lm1b does it: the state lies where Linen's boxes say."""
    mesh, x = devices(8), jnp.ones((4, 128))
    tx = gx.low_bit_state(optax.adam(0.1))

    def begin():
        params = Model().init(jax.random.key(0), x)
        return tx.init(params)

    specs = nn.get_partition_spec(jax.eval_shape(begin))
    rules = [("embed", "x"), ("mlp", "y")]
    places = nn.logical_to_mesh_sharding(specs, mesh, rules)
    state = jax.jit(lambda: nn.unbox(begin()), out_shardings=places)()
    codes = optax.tree.get(state, "mu")["params"]["Dense_0"]["kernel"]
    assert codes.dtype == jnp.int8
    assert codes.sharding.spec == P("x", "y")
    scales = jax.tree.leaves(state.scales)
    assert [s.shape for s in scales] == [(1, 256)] * 2
    assert all(s.sharding.is_fully_replicated for s in scales)


def test_rules_by_path_ask_that_no_scales_are_cut():
    """As EasyLM does it: the first rule that is found in a path."""
    rules = [("kernel", P("x", "y")), (".*", P(None))]
    mesh = devices(8)

    def spec(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if x.size == 1:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, next(s for r, s in rules if re.search(r, name)))

    params = {"dense": {"kernel": jnp.ones((128, 256)), "bias": jnp.ones(256)}}
    tx = gx.low_bit_state(optax.adam(0.1))
    places = jax.tree.map_with_path(spec, jax.eval_shape(tx.init, params))
    state = jax.jit(tx.init, out_shardings=places)(params)
    codes = optax.tree.get(state, "mu")["dense"]["kernel"]
    assert codes.dtype == jnp.int8
    assert codes.sharding.spec == P("x", "y")


# Shapes and meshes.

# Of 128 at most: as many as suit most meshes, if they are longer than 64.
BLOCKS = {8: 1, 64: 1, 100: 1, 131: 2, 200: 2, 320: 4, 768: 8, 1000: 8, 1024: 8}
BLOCKS |= {1536: 16, 4096: 32, 5120: 64, 12288: 128, 32000: 256, 50257: 393}


def test_the_number_of_blocks_follows_from_the_length():
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1)
    for length, number in BLOCKS.items():
        for shape, wanted in (((length, 2), (number, 2)), ((length,), (number,))):
            (scales,) = jax.eval_shape(tx.init, jnp.zeros(shape)).scales
            assert scales.shape == wanted


SHAPES = {"a": (1024, 4), "b": (96, 16), "c": (64,), "d": (100, 8), "e": (768, 16)}
SPECS = {"a": P("x"), "b": P("x", "y"), "c": P("x"), "d": P("x"), "e": P(("x", "y"))}


def draw(seed, mesh=None):
    rng = np.random.default_rng(seed)
    drawn = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    if mesh is None:
        return drawn
    return jax.device_put(drawn, {k: NamedSharding(mesh, SPECS[k]) for k in SHAPES})


def stepped(tx, state, seeds, mesh=None):
    step = jax.jit(tx.update)
    for seed in seeds:
        updates, state = step(draw(seed, mesh), state)
    return jax.device_get((updates, state))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_state_is_the_same_on_any_mesh(axis_type, in_context):
    tx = LOW(optax.scale_by_adam())
    wanted = jax.eval_shape(tx.init, draw(0))
    alone = stepped(tx, tx.init(draw(0)), (1, 2))
    for number in (8, 4):
        mesh = devices(number, axis_type)
        with in_context(mesh):
            params = draw(0, mesh)
            for init in (tx.init, jax.jit(tx.init)):
                assert types(init(params)) == types(wanted)
            state = tx.init(params)
            places = jax.tree.map(jax.typeof, state)
            _, after = tx.update(draw(1, mesh), state)
            assert jax.tree.map(jax.typeof, after) == places
            # In a scan types have to be stable.
            jax.lax.scan(lambda s, _: (tx.update(params, s)[1], None), state, None, 2)
            got = stepped(tx, state, (1, 2), mesh)
        assert_near(got, alone)


def assert_near(got, wanted):
    """Compilers round in other orders, so a code may be the next one."""
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(
            np.float64(x), np.float64(y), rtol=1e-5, atol=1 if x.dtype == "int8" else 0
        )


def test_a_checkpoint_of_eight_devices_goes_on_on_four(tmp_path):
    tx = LOW(optax.scale_by_adam())
    eight, four = devices(8), devices(4)
    _, state = stepped(tx, tx.init(draw(0, eight)), (1, 2), eight)
    with ocp.StandardCheckpointer() as file:
        file.save(tmp_path / "state", state)
        file.wait_until_finished()
        like = tx.init(draw(0, four))
        restored = file.restore(tmp_path / "state", like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored.inner_state.mu["a"].sharding.mesh.size == 4
    assert_near(stepped(tx, restored, (3,), four), stepped(tx, state, (3,)))


def test_the_state_of_a_leaf_just_below_min_size_has_a_layout():
    """A server of several processes compares it with that of longer parameters."""
    params = {"w": jnp.zeros((1020, 4)), "v": jnp.zeros((1024, 4))}
    layout = Layout.of(params, 2, {"w": P("server"), "v": P("server")})
    tx = gx.low_bit_state(optax.trace(0.9))
    state = layout.of_state(tx.init)
    assert types(state.types) == types(jax.eval_shape(tx.init, params))
    cuts = zip(jax.tree.leaves(state.types), state.cuts, strict=True)
    cut = {x.shape: axis for x, axis in cuts}
    assert cut[1020, 4] == cut[1024, 4] == 0


# Types.


def test_types_of_a_state_stay():
    """Gradients in float32 of parameters in bfloat16; optax's Adam changes its own."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
    tx = gx.low_bit_state(optax.adam(0.1))
    state = tx.init(params)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)

    def step(state, _):
        return tx.update(grads, state, params)[1], None

    after, _ = jax.lax.scan(step, state, None, 2)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    (scales, *_) = jax.tree.leaves(after.scales)
    np.testing.assert_allclose(np.float32(abs(scales)), 0.5 * 0.19, rtol=0.01)


def test_double_precision_stays():
    with jax.enable_x64(True):
        grads = jnp.full((64, 64), 1e300, jnp.float64)
        tx = gx.low_bit_state(optax.trace(0.5))
        state = tx.init(grads)
        _, state = tx.update(grads, state)
        updates, after = tx.update(grads, state)
        assert updates.dtype == jnp.float64
        np.testing.assert_allclose(updates, 1.5e300, rtol=1e-14)
        assert types(after) == types(state)


def test_the_first_step_of_a_late_layer_is_as_long_as_without_8_bits():
    params = {"w": jnp.ones((16, 4, 4)), "late": jnp.ones((16, 4, 4))}
    exact = gx.novograd(0.1, stacked_axes=1)
    low = gx.low_bit_state(exact, min_size=1)
    grads = jax.tree.map(lambda p: 0.5 * p, params)
    states = [exact.init(params), low.init(params)]
    for number in range(3):
        given = grads if number == 2 else {**grads, "late": None}
        results = [
            tx.update(given, state, params)
            for tx, state in zip((exact, low), states, strict=True)
        ]
        states = [state for _, state in results]
    wanted, got = (updates["late"] for updates, _ in results)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
