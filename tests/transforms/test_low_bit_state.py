"""State in 8 bits where users put it: in trainers, on meshes, in checkpoints."""

import contextlib
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
from benchmarks.models import size
from gradxform._ray.layout import ServerLayout
from tests import test_optax_all

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own code promotes.

LOW = functools.partial(gx.low_bit_state, min_size=64)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


# In other people's programs.


@pytest.mark.slow
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
    saved = jax.device_get(saved)
    after = taken(optimizer, model, [update, nnx.jit(update), update])
    taken(exact, wanted, [update] * 3)
    np.testing.assert_allclose(model.kernel[...], wanted.kernel[...], atol=0.01)
    assert {x.dtype for x in after} >= {jnp.dtype(jnp.int8)}
    other, its_optimizer = nnx.merge(graph, jax.tree.map(jnp.asarray, saved))
    again = taken(its_optimizer, other, [update, nnx.jit(update), update])
    jax.tree.map(np.testing.assert_array_equal, again, after)
    nnx.update((model, optimizer), jax.tree.map(jnp.asarray, saved))
    again = taken(optimizer, model, [update, nnx.jit(update), update])
    jax.tree.map(np.testing.assert_array_equal, again, after)


ADAM = optax.adam(0.1)
AROUND = {
    "keep": LOW(ADAM, keep=["0/nu/w"]),
    "chain": optax.chain(optax.clip(1.0), LOW(ADAM)),
    "inject_hyperparams": optax.inject_hyperparams(lambda rate: LOW(optax.adam(rate)))(
        0.1
    ),
    "MultiSteps": optax.MultiSteps(LOW(ADAM), 2).gradient_transformation(),
    "inject_hyperparams inside": LOW(optax.inject_hyperparams(optax.adam)(0.1)),
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


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: gx.accumulate(tx, 2)])
def test_a_leaf_without_a_gradient_keeps_its_codes_and_scales(around):
    params = {"w": jnp.ones((16, 24)), "rests": jnp.ones((16, 24))}
    grads = jax.tree.map(lambda p: 0.5 * p, params)
    tx = around(LOW(optax.adam(0.1)))
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    given = [grads, grads, {**grads, "rests": None}, {**grads, "rests": None}]
    state, seen = tx.init(params), []
    for each in given:
        params, state = step(each, state, params)
        own = state if isinstance(state, gx.LowBitState) else state.inner_state
        (mu_rests, mu_w, *_) = jax.tree.leaves(own.scales)
        codes = optax.tree.get(own, "mu")
        seen.append([params["rests"], mu_rests, codes["rests"], mu_w])
    *before, moved = zip(seen[1], seen[3], strict=True)
    for old, new in before:
        np.testing.assert_array_equal(new, old)
    assert (moved[0] != moved[1]).any()


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


@pytest.mark.slow
def test_names_of_axes_are_of_codes_alone():
    """As lm1b does it: the state lies where Linen's boxes say.

    And as EasyLM does it: where the first rule says that is found in a path.
    """
    mesh, x = devices(8), jnp.ones((4, 128))
    tx = gx.low_bit_state(optax.adam(0.1))

    def begin():
        params = Model().init(jax.random.key(0), x)
        return tx.init(params)

    specs = nn.get_partition_spec(jax.eval_shape(begin))
    rules = [("embed", "x"), ("mlp", "y")]
    of_linen = nn.logical_to_mesh_sharding(specs, mesh, rules)

    def spec(path, x):
        is_kernel = re.search("kernel", jax.tree_util.keystr(path)) and x.ndim > 1
        return NamedSharding(mesh, P("x", "y") if is_kernel else P())

    by_path = jax.tree.map_with_path(spec, jax.eval_shape(lambda: nn.unbox(begin())))
    for places in (of_linen, by_path):
        state = jax.jit(lambda: nn.unbox(begin()), out_shardings=places)()
        codes = optax.tree.get(state, "mu")["params"]["Dense_0"]["kernel"]
        assert codes.dtype == jnp.int8
        assert codes.sharding.spec == P("x", "y")
        scales = jax.tree.leaves(state.scales)
        assert [s.shape for s in scales] == [(128, 2)] * 2
        assert all(s.sharding.is_fully_replicated for s in scales)


# Shapes and meshes.

# Of 128 at most: as many as suit most meshes, if they are longer than 64.
BLOCKS = {8: 1, 64: 1, 100: 1, 131: 2, 200: 2, 320: 4, 768: 8, 1000: 8, 1024: 8}
BLOCKS |= {1536: 16, 4096: 32, 5120: 64, 12288: 128, 32000: 256, 50257: 393}


def test_the_number_of_blocks_follows_from_the_length():
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1)

    def blocks(*shape):
        zeros = jax.ShapeDtypeStruct(shape, jnp.float32)
        (scales,) = jax.eval_shape(tx.init, zeros).scales
        return scales.shape

    for length, number in BLOCKS.items():
        assert (blocks(length, 2), blocks(length)) == ((number, 2), (number,))
    # Stacked vectors are not divided along their layers.
    for layers in (127, 128, 129, 511):
        for width, number in ((32, 1), (64, 1), (320, 4)):
            assert blocks(layers, width) == (layers, number)


SHAPES = {"a": (1024, 4), "b": (96, 16), "c": (64,), "d": (100, 8), "e": (768, 16)}
SPECS = {"a": P("x"), "b": P("x", "y"), "c": P("x"), "d": P("x"), "e": P(("x", "y"))}


def draw(seed, mesh=None, leaves="abcde"):
    rng = np.random.default_rng(seed)
    drawn = {k: rng.normal(size=SHAPES[k]).astype(np.float32) for k in leaves}
    if mesh is None:
        return drawn
    return jax.device_put(drawn, {k: NamedSharding(mesh, SPECS[k]) for k in leaves})


def make():
    """A sum without a sign, and a momentum; both lie where their parameters lie."""
    return LOW(
        optax.chain(gx.scale_by_adagrad(), gx.contrib.scale_by_momentum_look_ahead())
    )


def stepped(tx, state, seeds, mesh=None, leaves="abcde"):
    step = jax.jit(tx.update)
    for seed in seeds:
        updates, state = step(draw(seed, mesh, leaves), state)
    return jax.device_get((updates, state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "in_context", "number", "leaves"),
    [
        (AxisType.Auto, True, 8, "ad"),
        (AxisType.Auto, False, 4, "abcde"),
        (AxisType.Explicit, True, 4, "bce"),
        (AxisType.Explicit, False, 8, "abcde"),
    ],
)
def test_a_state_is_the_same_on_any_mesh(
    axis_type, in_context, number, leaves, tmp_path
):
    """A checkpoint of it goes on on another one."""
    tx = make()
    draw_some = functools.partial(draw, leaves=leaves)
    steps = functools.partial(stepped, tx, leaves=leaves)
    # Operations that are compiled one by one take seconds: each leaf is in one case.
    run = (lambda f: f) if in_context else jax.jit
    wanted = jax.eval_shape(tx.init, draw_some(0))
    alone = steps(jax.jit(tx.init)(draw_some(0)), (1, 2))

    def twice(state, grads):  # In a scan types have to be stable.
        return jax.lax.scan(lambda s, _: (tx.update(grads, s)[1], None), state, None, 2)

    mesh = devices(number, axis_type)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        params = draw_some(0, mesh)
        state = run(tx.init)(params)
        for made in (state, jax.jit(tx.init)(params)):
            assert types(made) == types(wanted)
        _, after = run(tx.update)(draw_some(1, mesh), state)
        typeof = jax.tree.map(jax.typeof, state)
        assert jax.tree.map(jax.typeof, after) == typeof
        assert jax.tree.map(jax.typeof, jax.jit(twice)(state, params)[0]) == typeof
        got = steps(state, (1, 2), mesh)
    assert_near(got, alone)
    if axis_type is AxisType.Auto:
        other = devices(12 - number)
        with ocp.StandardCheckpointer() as file:
            file.save(tmp_path / "state", got[1])
            file.wait_until_finished()
            like = jax.jit(tx.init)(draw_some(0, other))
            restored = file.restore(tmp_path / "state", like)
        jax.tree.map(np.testing.assert_array_equal, restored, got[1])
        codes = optax.tree.get(restored, "mu")["a"]
        assert (codes.dtype, codes.sharding.mesh.size) == ("int8", 12 - number)
        assert_near(steps(restored, (3,), other), steps(got[1], (3,)))


def assert_near(got, wanted):
    """Compilers round in other orders, so a code may be the next one."""
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(
            np.float64(x),
            np.float64(y),
            rtol=1e-5,
            atol=1 if x.dtype == "int8" else 1e-7,
        )


@pytest.mark.parametrize(
    ("axis_type", "manual"),
    [(AxisType.Auto, ("x", "y")), (AxisType.Explicit, ("x",))],
)
def test_in_shard_map_each_device_has_blocks_of_its_own(axis_type, manual):
    mesh = devices(4, axis_type)
    spec = P(*(name if name in manual else None for name in ("x", "y")))
    tx = LOW(optax.trace(0.9), block_size=16)
    given = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(np.float32)

    def steps(w, grads):
        state, seen = tx.init(w), []
        for g in grads:
            updates, state = tx.update(g, state, w)
            seen.append(updates)
        return seen, (state.scales, state.inner_state.trace)

    placed = [jax.device_put(g, NamedSharding(mesh, P("x", "y"))) for g in given]
    mapped = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        axis_names=set(manual),
    )
    got = jax.jit(mapped)(placed[0], placed)
    rows, columns = 2, len(manual)
    parts = [
        [jax.jit(steps)(own[0], list(own)) for own in np.split(half, columns, 2)]
        for half in np.split(given, rows, 1)
    ]
    whole = jax.tree.map(
        lambda *x: np.block([list(x[i : i + columns]) for i in (0, columns)]),
        *(x for row in parts for x in row),
    )
    assert whole[1][0][0].shape == (64, 4)  # One device alone would have (4, 64).
    assert_near(got, whole)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda init: init])
def test_a_state_on_explicit_axes_needs_no_context(jit):
    """Under ``jit`` optax's zeros alone would be on one device, or an error."""
    mesh = devices(8, AxisType.Explicit)
    w = jax.device_put(jnp.ones((1024, 8)), NamedSharding(mesh, P("x")))
    state = jit(LOW(optax.trace(0.9)).init)(w)
    for x in jax.tree.leaves(state):
        assert x.sharding.device_set == w.sharding.device_set


@pytest.mark.slow
@pytest.mark.parametrize("layers", [127, 129])
def test_a_step_takes_many_layers_one_after_the_other(layers):
    w = np.random.default_rng(0).normal(size=(layers, 32)).astype(np.float32)

    def loss_fn(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (x + w * jnp.sin(x), None), x, w)[0])

    tx, ends = gx.low_bit_state(optax.adam(1e-3), min_size=64), []
    for named in ((), [""]):
        params = jnp.asarray(0.01 * w)
        step, state = gx.minimize(loss_fn, tx, layers=named), tx.init(params)
        for _ in range(2):
            params, state, _ = step(params, state, jnp.ones(32))
        ends.append((params, state.scales))
    for x, y in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "dtype"),
    [
        (LOW(optax.adamw(0.1)), "float32"),
        (LOW(gx.novograd(0.1)), "float32"),
        (gx.master_weights(LOW(optax.adamw(0.1)), residual_dtype="int8"), "bfloat16"),
    ],
)
def test_a_state_is_made_one_array_after_the_other(tx, dtype):
    params = [jax.ShapeDtypeStruct((640 + 8 * i, 64), dtype) for i in range(32)]
    made = jax.jit(tx.init).lower(params).compile().memory_analysis()
    assert made.temp_size_in_bytes < 0.15 * size(params)  # All of them are 1 or 2.


def test_the_state_of_a_leaf_just_below_min_size_has_a_layout():
    """A server of several processes compares it with that of longer parameters."""
    params = {"w": jnp.zeros((1022, 4)), "v": jnp.zeros((1024, 4))}
    layout = ServerLayout.of(params, 2, {"w": P("server"), "v": P("server")})
    tx = gx.low_bit_state(optax.trace(0.9))
    state = layout.of_state(tx.init)
    assert types(state.types) == types(jax.eval_shape(tx.init, params))
    cuts = zip(jax.tree.leaves(state.types), state.cuts, strict=True)
    cut = {x.shape: axis for x, axis in cuts}
    assert cut[1022, 4] == cut[1024, 4] == 0


# State that would lose the training.

RNG = np.random.default_rng(0)
X = RNG.normal(size=(128, 64)).astype(np.float32)
Y = X @ RNG.normal(size=(64, 16)).astype(np.float32)
START = RNG.normal(size=(64, 16)).astype(np.float32) / 8
# Each comes below 0.01 without 8 bits, from 69. With all of its state in 8 bits it ends
# 3 to 100,000 times higher, or at NaN.
LOST = {
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.5),
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "cocob": optax.contrib.cocob,
    "ftrl": lambda: gx.ftrl(1.0),
    "mechanize": lambda: optax.contrib.mechanize(optax.adamw(1e-2)),
    "lbfgs": lambda: optax.lbfgs(0.2, linesearch=None),
    "rmsprop centered": lambda: optax.rmsprop(0.01, centered=True),
    "momo": lambda: optax.contrib.momo(0.5),
    "worker_mean": lambda: gx.worker_mean(optax.sgd(0.3), 4, method="latest"),
}
# These come as near with nearly all of their state in 8 bits.
KEPT_IN_8_BITS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(2e-3),
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "novograd": lambda: gx.novograd(0.02),
    "adagrad": lambda: gx.adagrad(0.5),
}


def end(tx):
    """The loss after a training."""

    def loss_fn(w):
        return jnp.mean((X @ w - Y) ** 2)

    tx = optax.with_extra_args_support(tx)

    def step(carry, number):
        w, state = carry
        value, grads = jax.value_and_grad(loss_fn)(w)
        extra = {"local_step": number, "worker": number % 4, "value": value}
        updates, state = tx.update(grads, state, w, **extra)
        return (optax.apply_updates(w, updates), state), None

    @jax.jit
    def train(carry):
        return jax.lax.scan(step, carry, jnp.arange(2000))[0]

    w, _ = train((jnp.asarray(START), tx.init(jnp.asarray(START))))
    return loss_fn(w)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST | KEPT_IN_8_BITS)
def test_iterates_and_sums_stay_whole_and_the_rest_trains_in_8_bits(name):
    if name == "madgrad" and not hasattr(optax.contrib, name):
        pytest.skip("this optax has no madgrad")
    make = (LOST | KEPT_IN_8_BITS)[name]
    exact, low = end(make()), end(LOW(make()))
    assert exact < 0.01
    assert low < 1.5 * exact + 2e-4
    if name in KEPT_IN_8_BITS:
        states = (jax.eval_shape(tx.init, START) for tx in (LOW(make()), make()))
        assert low != exact
        assert size(next(states)) < 0.3 * size(next(states))


@pytest.mark.parametrize("name", test_optax_all.NAMES)
def test_no_copy_of_the_parameters_is_in_8_bits(name):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}
    tx = test_optax_all.FOUND[name]
    state = tx.init(params)
    low = gx.low_bit_state(tx, min_size=1).init(params).inner_state
    for x, y in zip(*map(jax.tree.leaves, (state, low)), strict=True):
        if np.array_equal(x, params["w"]):
            assert y.dtype == jnp.float32


def test_residuals_stay_whole():
    """Kahan's sum has them in floating point."""
    inner = gx.master_weights(optax.sgd(2.0**-10), residual_dtype="bfloat16")
    tx = gx.low_bit_state(inner, min_size=1)
    params = [jnp.linspace(1, 2, 64, dtype=jnp.bfloat16)] * 2
    states = [inner.init(params[0]), jax.jit(tx.init)(params[0])]
    grads = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16)
    for i, each in enumerate((inner, tx)):
        step = jax.jit(functools.partial(gx.apply_gradients, each))
        for _ in range(20):
            params[i], states[i] = step(grads, states[i], params[i])
    np.testing.assert_array_equal(*params)
    assert states[1].inner_state.residual.dtype == jnp.bfloat16


@pytest.mark.slow
def test_types_of_a_state_stay():
    """Gradients in float32 of parameters in bfloat16; optax's Adam changes its own."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
    tx = gx.low_bit_state(optax.adam(0.1))
    state = jax.jit(tx.init)(params)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params)

    def step(state, _):
        return tx.update(grads, state, params)[1], None

    after, _ = jax.lax.scan(step, state, None, 2)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    (scales, *_) = jax.tree.leaves(after.scales)
    np.testing.assert_allclose(np.float32(abs(scales)), 0.5 * 0.19, rtol=0.01)
    with jax.enable_x64(True):
        grads = jnp.full((64, 64), 1e300, jnp.float64)
        tx = gx.low_bit_state(optax.trace(0.5))
        _, state = jax.jit(tx.update)(grads, jax.jit(tx.init)(grads))
        updates, after = jax.jit(tx.update)(grads, state)
        assert updates.dtype == jnp.float64
        np.testing.assert_allclose(updates, 1.5e300, rtol=1e-14)
        assert types(after) == types(state)


@pytest.mark.slow
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


def test_a_callback_of_init_runs_once():
    """Arrays are made one after another, and none of them makes the others' effects."""
    calls, adam = [], optax.adam(0.1)

    def init(params):
        jax.debug.callback(lambda: calls.append(1))
        return adam.init(params)

    inner = optax.GradientTransformation(init, adam.update)
    tx = gx.low_bit_state(inner, min_size=8)
    params = {"v": jnp.ones((3, 64, 64)), "w": jnp.ones((4, 64, 64))}
    jax.block_until_ready(jax.jit(tx.init)(params))
    jax.effects_barrier()
    assert calls == [1]
