"""State and parameters on the host: the same numbers, and a layer on the device."""

import contextlib
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._devices import host
from gradxform._jax import compilers
from gradxform._layers import stacks, tpu
from gradxform._ray import layout, process
from gradxform._steps import apply
from tests.conftest import half, pairwise
from tests.training.losses import (
    LAYERS,
    LOSSES,
    OLD,
    ONE_PASS,
    WAYS,
    Loss,
    Way,
    check,
    kinds,
    pairs,
    placed,
    train,
)

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.skipif(OLD, reason="JAX keeps no result in the host's memory"),
]

WIDTH = 16
on_host = functools.partial(gx.on_host, min_size=LAYERS * WIDTH)


def start(dtype="float32"):
    """Two stacks, one of them of vectors, a head, and a leaf that stays small."""
    rng = np.random.default_rng(0)
    shapes = {"w": (LAYERS, WIDTH, WIDTH), "b": (LAYERS, WIDTH)}
    shapes |= {"head": (WIDTH, WIDTH), "gain": (WIDTH,)}
    drawn = {
        k: jnp.asarray(0.3 * rng.standard_normal(s), dtype) for k, s in shapes.items()
    }
    return {"blocks": {k: drawn.pop(k) for k in ("w", "b")}} | drawn


def loss_fn(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    x, _ = jax.lax.scan(layer, x.astype(p["gain"].dtype), p["blocks"])
    return jnp.mean((x @ p["head"] * p["gain"]).astype(jnp.float32) ** 2)


def batch(number):
    rng = np.random.default_rng(number)
    return jnp.asarray(rng.standard_normal((3, WIDTH)), jnp.float32)


def same(got, wanted):
    """To the bit, wherever they lie."""
    chex.assert_trees_all_equal(*jax.tree.map(np.asarray, (got, wanted)))


ONE = Loss(loss_fn, make=start, batch=(batch(0),))
PLACES = ["state", "both"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "way", "memory"),
    [("plain", "int16", "both"), ("teacher", "seven bytes", "both")]
    # The others are on the device in tests/training/test_layers.py.
    + [(*x, PLACES[k % 2]) for k, x in enumerate(pairs(LOSSES, ONE_PASS)[::2])],
)
def test_any_loss_and_any_optimizer(loss, way, memory):
    check(LOSSES[loss], WAYS[way], memory, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "way", "memory"),
    [
        ("tied", "clip_by_global_norm", "both"),
        ("encoder_and_decoder", "skip_spikes", "state"),
        ("partly_frozen", "a clip behind a sum", "both"),
    ],
)
def test_two_passes(loss, way, memory):
    check(LOSSES[loss], WAYS[way], memory, compiled=True)


@pytest.mark.every
@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "can"),
    [
        ("float32", (4, 8, 8), 0, True),
        ("float32", (8, 8, 4), 2, True),
        ("float32", (4, 7, 8), 0, False),
        ("float32", (4, 2, 8, 9), 0, True),
        ("bfloat16", (4, 8, 8), 0, True),
        ("bfloat16", (8, 4, 8), 1, False),
        ("bfloat16", (8, 8, 4), 2, False),
        ("complex64", (8, 8, 4), 2, True),
        ("int8", (2, 4, 8, 8), 1, True),
        ("int8", (2, 8, 4, 8), 2, False),
    ],
)
def test_which_layers_come_from_the_host_by_themselves(dtype, shape, axis, can):
    assert host.can_slice(jax.ShapeDtypeStruct(shape, dtype), axis) == can


@pytest.mark.every
@pytest.mark.parametrize("memory", ["device", "both"])
@pytest.mark.parametrize("word", [on_host, lambda tree: tree], ids=["host", "device"])
def test_an_extra_argument_lies_in_any_memory(word, memory):
    """Of the step by layers, and of the ordinary one."""
    tx = WAYS["compensate_delay"].tx
    way = Way(tx, lambda k, state, params: {"worker_params": word(params)})
    check(ONE, way, memory, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("memory", PLACES)
@pytest.mark.parametrize(
    "way",
    [
        *("adagrad", "partition", "stale sums"),
        pytest.param("seven bytes", marks=pytest.mark.slow),
    ],
)
def test_without_layers(way, memory):
    check(ONE, WAYS[way], memory, compiled=True, layers=(), rtol=2e-5)


@pytest.mark.slow
def test_master_weights_to_the_bit():
    way = Way(gx.master_weights(optax.adamw(1e-2)), dtype="bfloat16")
    wanted, got = (train(ONE, way, ["blocks"], x) for x in ("device", "state"))
    same(got, wanted)


def test_a_leaf_without_a_gradient():
    tx, grads = optax.adam(0.1), {"a": jnp.ones((9, 9)), "b": None}
    params = jax.tree.map(jnp.ones_like, {"a": jnp.ones((9, 9)), "b": jnp.ones(99)})
    state, step = (
        jax.jit(tx.init)(params),
        jax.jit(functools.partial(gx.apply_gradients, tx)),
    )
    wanted, got = (step(grads, s, params) for s in (state, on_host(state)))
    assert got[1][0].nu["b"].sharding.memory_kind == "pinned_host"
    same(got, wanted)


@pytest.mark.every
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_order_in_which_gradients_are_known(wrap):
    """The backward pass ends with what the layer uses first; a cast is no use."""

    def loss(a, b, c, x):
        @wrap
        def layer(x, w):
            a, b, c = (p.astype(jnp.float32) for p in w)
            return jnp.tanh(jnp.tanh(x @ b + x) @ c) @ a, None

        return jnp.sum(jax.lax.scan(layer, x, (a, b, c))[0])

    stack = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    closed = jax.make_jaxpr(loss)(stack, stack, stack, jnp.ones((3, WIDTH)))
    names = dict(enumerate("abc"))
    eqn = closed.jaxpr.eqns[0]
    found = {eqn.invars.index(x): n for n, x in enumerate(closed.jaxpr.invars[:3])}
    variables = {k: stacks.StackVariable(n, names[n]) for k, n in found.items()}
    scan = stacks.Scan(eqn, variables)
    assert [names[n] for n in tpu.backwards(scan)] == ["a", "c", "b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "way"),
    [
        ("backwards", "adagrad"),
        ("backwards", "adamw"),
        ("partly_frozen", "adamw"),
        ("tied", "clip_by_global_norm"),
    ],
)
def test_loops_for_tpu(loss, way, monkeypatch):
    """They carry the next layer, and write in the order of the gradients."""
    monkeypatch.setattr(compilers, "on_tpu", lambda special, _: special)
    check(LOSSES[loss], WAYS[way], "both", compiled=True)


def test_a_step_of_your_own():
    """Gradients on the device, parameters and state on the host."""
    tx, params, grads = gx.adagrad(0.1), start(), jax.tree.map(jnp.ones_like, start())
    step = jax.jit(functools.partial(gx.apply_gradients, tx))
    wanted, _ = step(grads, tx.init(params), params)
    there, state = placed(tx, params, "both")
    got, _ = step(grads, state, there)
    assert kinds(got) == kinds(there)
    same(got, wanted)


@pytest.mark.every
@pytest.mark.parametrize(
    ("tx", "arrays"),
    [(optax.adam(0.1), 2), (gx.delayed(optax.sgd(0.1, momentum=0.9), 2), 1)],
)
def test_a_state_comes_after_the_gradient(tx, arrays):
    """Otherwise the whole state would be on the device beside the activations."""
    params = start()
    step = functools.partial(gx.apply_gradients, tx)

    def barriers(state):
        program = jax.make_jaxpr(step)(params, state, params)
        return str(program).count("optimization_barrier")

    state = tx.init(params)
    owned = arrays * len(jax.tree.leaves(params))
    assert barriers(on_host(state)) == barriers(state) + owned


def test_what_is_made_from_parameters_there():
    """Pushes are on the device, and a worker begins where its parameters lie."""
    tx, params = optax.sgd(0.1), start()
    steps = gx.local_steps(loss_fn, tx, donate=False)
    batches = jnp.stack([batch(0)])
    traced = steps.trace(on_host(params), tx.init(params), batches)
    assert "host" not in str(traced.jaxpr.out_avals)
    own = gx.contrib.ScaleByMomentumLookAheadState(params)
    begin = jax.jit(gx.contrib.worker_start).trace(on_host(params), own, 0.3, 0.7)
    made, given = begin.jaxpr.out_avals, begin.jaxpr.in_avals
    assert str(made) == str(given[: len(made)])


def test_tables_beside_parameters_there_are_refused():
    w = jnp.ones(2)
    params = {"a": w, "b": gx.on_host(w, min_size=1)}
    learning = params | {"b": None}
    apply._check_tables((), learning, params, [])
    for tables in (["a"], lambda path: True):
        with pytest.raises(ValueError, match=r"no tables .* those at \['b'\]\. Leave"):
            apply._check_tables(tables, learning, params, [])


@pytest.mark.slow
def test_local_steps_from_parameters_there():
    """A state on the device is donated; parameters never are."""
    tx, batches = optax.adam(0.1), jnp.stack([batch(0), batch(1)])
    steps, there = gx.local_steps(loss_fn, tx), on_host(start())
    (wanted, _, _), (got, _, _) = (
        steps(params, tx.init(start()), batches) for params in (start(), there)
    )
    assert not any(x.is_deleted() for x in jax.tree.leaves(there))
    same(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "memory"), [("8 bits", "state"), ("adamw", "both"), ("adagrad", "state")]
)
def test_a_checkpoint(way, memory, tmp_path):
    trained = train(ONE, WAYS[way], ["blocks"], memory)[:2]
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trained
    )
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "both", trained)
        files.wait_until_finished()
        got = files.restore(tmp_path / "both", like)
    assert kinds(got) == kinds(trained)
    same(got, trained)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "without jit"])
def test_master_weights_of_parameters_there(wrap):
    """For export: each in the memory of its parameter."""
    tx = gx.master_weights(optax.sgd(0.1))
    params = start("bfloat16")
    state = jax.jit(tx.init)(params)
    params, state, _ = gx.minimize(loss_fn, tx)(params, state, batch(0))
    wanted = jax.jit(gx.get_master_weights)(params, state)
    for there in (params, on_host(params)):
        got = wrap(gx.get_master_weights)(there, on_host(state))
        assert kinds(got) == kinds(there)
        same(got, wanted)


# How much memory it takes, in N, the bytes of the parameters.


def model(dtype="float32", layers=16, width=128):
    """Stacks on one device, and a loss that scans them."""

    def loss_fn(p, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, p["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
    described = {
        k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype), sharding=place)
        for k, s in shapes.items()
    }
    return loss_fn, {"layers": described}, jax.ShapeDtypeStruct((1, width), dtype)


def is_there(x):
    return x.sharding.memory_kind == "pinned_host"


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


ROOM = {
    "adamw": (optax.adamw(1e-3), "float32"),
    "8 bits": (gx.low_bit_state(optax.adamw(1e-3)), "float32"),
    "8 bits of ours": (gx.low_bit_state(gx.adagrad(1e-3)), "float32"),
    "seven bytes": (
        gx.master_weights(gx.low_bit_state(optax.adamw(1e-3)), residual_dtype="int8"),
        "bfloat16",
    ),
}


@pytest.mark.figures
@pytest.mark.parametrize("name", ["adamw", "seven bytes", "8 bits"])
def test_a_step_needs_two_layers_of_room(name):
    tx, dtype = ROOM[name]
    loss_fn, params, x = model(dtype)
    place = jax.tree.leaves(params)[0].sharding
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: x.update(sharding=place), state)
    params, state = gx.on_host((params, state))
    small = [x for x in jax.tree.leaves(state) if not is_there(x)]
    assert size(small) < 0.15 * size(params)  # The scales of short blocks.
    step = gx.minimize(loss_fn, tx, layers=["layers"]).lower(params, state, x)
    found = step.compile().memory_analysis().temp_size_in_bytes
    assert found < (0.25 if dtype == "float32" else 0.6) * size(params)


@pytest.mark.figures
@pytest.mark.parametrize(("name", "params_too"), pairs(ROOM, [True, False]))
def test_a_new_state_needs_a_layer_of_room(name, params_too):
    tx, dtype = ROOM[name]
    _, params, _ = model(dtype)
    params = gx.on_host(params) if params_too else params
    make = jax.jit(lambda p: gx.on_host(tx.init(p)), keep_unused=True).lower(params)
    found = make.compile().memory_analysis().temp_size_in_bytes
    assert found <= 0.15 * size(params)


@pytest.mark.slow
def test_a_new_state_in_8_bits_is_that_of_whole_arrays():
    """Made layer by layer, and outside of jit an array at a time."""
    params = {"w": jnp.ones((3, 40, 128)), "v": jnp.ones((1024, 8)), "b": jnp.ones(9)}
    inner = optax.chain(optax.scale_by_adam(), optax.trace(0.9))
    weights = jnp.linspace(-2, 3, 3 * 40 * 128).reshape(3, 40, 128)

    def init(params):  # Of values, and of others in each layer.
        found = inner.init(params)
        return found[0]._replace(mu=params | {"w": params["w"] * weights}), found[1]

    own = optax.GradientTransformation(init, inner.update)
    tx = gx.low_bit_state(own, min_size=512, block_size=8)
    eager, jitted = tx.init(params), jax.jit(tx.init)(params)
    chex.assert_trees_all_equal(eager, jitted)
    scales = [x for x in jax.tree.leaves(eager.scales) if x.shape == (3, 8, 128)]
    blocks = np.abs(np.asarray(weights)).reshape(3, 8, 5, 128)
    np.testing.assert_array_equal(np.abs(scales[0]), blocks.max(2))


@pytest.mark.parametrize(
    ("value", "dtype"), pairs([0.0, 0.1, -0.3], ["float32", "bfloat16"])
)
def test_a_constant_in_8_bits_is_made_without_its_layers(value, dtype, monkeypatch):
    """As for TPU and GPU. The last block is not full."""

    def init(p):
        return optax.TraceState(jnp.full(p.shape, value, dtype))

    tx = gx.low_bit_state(
        optax.GradientTransformation(init, optax.identity().update),
        min_size=512,
        block_size=16,
    )
    w = jnp.ones((3, 41, 64))
    wanted = tx.init(w)
    monkeypatch.setattr(compilers, "on_cpu", lambda special, plain: plain)
    got = jax.jit(tx.init)
    assert "scan" not in str(got.trace(w).jaxpr)
    chex.assert_trees_all_equal(got(w), wanted)


@pytest.mark.slow
def test_a_new_state_in_8_bits_takes_few_programs():
    """Each took a fifth of a second on a GPU, for 134 of them in a transformer."""
    programs = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **kwargs: programs.append("backend_compile" in name)
    )
    params = {k: jnp.ones((2, 24 + k, 264)) for k in range(3)}
    jax.block_until_ready(optax.scale_by_adam().init(params))
    programs.clear()
    gx.low_bit_state(optax.scale_by_adam()).init(params)
    assert sum(programs) <= 3 + 2


# What is moved.


def moved(jaxpr, inside=()):
    """What is put on the device: its type, and the operations that it is inside of."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            x = eqn.outvars[0].aval
            if x.memory_space == jax.memory.Space.Device:
                yield x, inside
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns"):
                yield from moved(
                    getattr(part, "jaxpr", part), (*inside, eqn.primitive.name)
                )


SEVEN_BYTES = WAYS["seven bytes"].tx
FLAG = "--xla_tpu_impure_enable_large_2nd_minor_entry_layout=false"


def seven_bytes():
    """Parameters and a state of 7 bytes for each, all of it on the host."""
    return placed(SEVEN_BYTES, start("bfloat16"), "both")


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_codes_come_whole_on_tpu(monkeypatch, runs):
    """Three stacks, unless its compiler takes layers of them. The numbers are equal."""
    params, state = seven_bytes()
    codes = state.residual["blocks"]["w"], state.inner_state.inner_state[0].mu
    assert [x.dtype for x in (codes[0], codes[1]["blocks"]["w"])] == [jnp.int8] * 2
    assert is_there(codes[0])
    assert is_there(codes[1]["blocks"]["w"])

    def form():
        """How often codes come by layers, and whole; what two steps give."""
        step = gx.minimize(loss_fn, SEVEN_BYTES, layers=["blocks"], donate=False)
        jaxpr = step.trace(params, state, batch(0)).jaxpr.jaxpr
        codes = ["scan" in inside for x, inside in moved(jaxpr) if x.dtype == "int8"]
        if not runs:
            return sum(codes), codes.count(False), ()
        first = step(params, state, batch(0))[:2]
        return sum(codes), codes.count(False), step(*first, batch(1))

    in_both = form()
    monkeypatch.setattr(compilers, "on_tpu", lambda special, _: special)
    on_tpu = form()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--some_flag=1 {FLAG}")
    with_flag = form()
    by_layer, whole, wanted = with_flag
    assert on_tpu[:2] == (by_layer - 3, whole + 3)
    assert in_both[:2] == (by_layer + on_tpu[0], whole + on_tpu[1])
    for _, _, got in (in_both, on_tpu):
        assert kinds(got) == kinds(wanted)
        same(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["adamw", "seven bytes"])
def test_donated_arrays_are_written_in_place(way):
    params, state = placed(WAYS[way].tx, start(WAYS[way].dtype), "both")

    def places(tree):
        large = [x for x in jax.tree.leaves(tree) if x.ndim > 2]
        return sorted(x.unsafe_buffer_pointer() for x in large)

    step = gx.minimize(loss_fn, WAYS[way].tx, layers=["blocks"])
    before, old = places((params, state)), jax.tree.leaves(state)
    after = step(params, state, batch(0))[:2]
    assert all(x.is_deleted() for x in old if x.ndim)
    assert places(after) == before  # JAX pairs them by shape and memory.


def traced(tx, layers, **extra):
    """What a step with its state on the host moves, and what that is inside of."""
    step, params = gx.minimize(loss_fn, tx, layers=layers), start()
    program = step.trace(params, on_host(tx.init(params)), batch(0), **extra)
    return [(x.shape, inside) for x, inside in moved(program.jaxpr.jaxpr)]


def test_one_layer_is_on_the_device():
    """Vectors of all layers come together: compilers for TPU take no single one."""
    whole = [(LAYERS, WIDTH)] * 2 + [(WIDTH, WIDTH)] * 2
    found = traced(optax.adam(0.1), ("blocks",))
    assert sorted(shape for shape, inside in found if "scan" not in inside) == whole
    assert [x for x, inside in found if "scan" in inside] == [(1, WIDTH, WIDTH)] * 2


@pytest.mark.parametrize("two_passes", [False, True])
def test_a_gpu_copies_layers_beside_the_arithmetic(two_passes):
    """XLA for GPU copies a layer only if it knows its number before the loop runs.

    Otherwise a kernel reads the host's memory. And behind a barrier no new layer is
    written before all of them are computed.
    """
    tx, params = optax.adam(0.1), start()
    args = on_host(params), on_host(tx.init(params)), batch(0)
    step = gx.minimize(loss_fn, tx, layers=("blocks",), two_passes=two_passes)
    program = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "dynamic_update_slice" in program
    assert "stablehlo.iota" not in program
    assert "optimization_barrier" not in program


def test_a_skipped_push_moves_nothing():
    found = traced(gx.drop_stale(optax.adam(0.1), 0), (), local_step=0)
    assert len(found) == 6
    assert all("cond" in inside for _, inside in found)


@pytest.mark.parametrize("memory", PLACES)
def test_the_second_step_is_not_compiled_again(memory):
    tx, params = optax.adam(0.1), jax.device_put(start(), jax.devices()[0])
    step = gx.minimize(loss_fn, tx, layers=["blocks"])
    state = jax.jit(lambda p: on_host(tx.init(p)))(params)
    params = on_host(params) if memory == "both" else params
    for number in range(2):
        params, state, _ = step(params, state, batch(number))
    assert step._cache_size() == 1


@pytest.mark.slow
def test_what_stays():
    tree = {
        "large": jnp.ones((4, 16)),
        "small": jnp.ones((3, 16)),
        "ints": jnp.ones(64, jnp.int16),
        "bytes": jnp.ones((8, 64), jnp.int8),
        "key": jax.random.key(0),
        "number": 1.0,
        "none": None,
        "masked": optax.MaskedNode(),
        "rows": gx.IndexedSlices(jnp.arange(4), jnp.ones((4, 16)), (9, 16)),
        "numpy": np.ones((8, 8)),
    }
    got = on_host(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    moved = {"large", "ints", "bytes", "numpy"}
    for name in tree.keys() - {"number", "none", "masked", "rows", "numpy"}:
        wanted = "pinned_host" if name in moved else "device"
        assert got[name].sharding.memory_kind == wanted, name
    assert got["rows"].values.sharding.memory_kind == "pinned_host"
    assert got["rows"].indices.sharding.memory_kind == "device"
    assert isinstance(got["number"], float)
    assert jax.eval_shape(on_host, got["large"]).shape == (4, 16)


def test_what_lies_there_is_not_copied():
    once = on_host(optax.adam(0.1).init(start()))
    for x, y in zip(*map(jax.tree.leaves, (once, on_host(once))), strict=True):
        assert x.unsafe_buffer_pointer() == y.unsafe_buffer_pointer()


@pytest.mark.slow
def test_a_typed_key_stays_on_the_device():
    """In the host's memory, and donated, it would end the process."""
    tx, params = optax.add_noise(0.1, 0.5, jax.random.key(0)), {"w": jnp.ones((4, 16))}
    step = jax.jit(functools.partial(gx.apply_gradients, tx), donate_argnums=(1, 2))
    state = gx.on_host(tx.init(params), min_size=1)
    places = kinds(state)
    assert places.rng_key == "device"
    for _ in range(3):
        params, state = step(jax.tree.map(jnp.ones_like, params), state, params)
        assert kinds(state) == places


def test_bad_input(monkeypatch):
    with pytest.raises(ValueError, match=r"min_size must be in \[1, .* got 0"):
        gx.on_host({}, min_size=0)
    described = {"w": jax.ShapeDtypeStruct((999, 999), jnp.float32)}
    with pytest.raises(ValueError, match=r"lies nowhere: .* sharding"):
        gx.on_host(described)
    tx, params = optax.adam(0.1), start()
    with pytest.raises(ValueError, match="local_steps cannot donate a state in the"):
        gx.local_steps(loss_fn, tx)(params, on_host(tx.init(params)), batch(0)[None])
    step = gx.minimize(loss_fn, tx, tables=["gain"])
    some = params | {"head": on_host(params["head"])}
    with pytest.raises(
        ValueError, match=r"no tables beside parameters .* at \['head'\]"
    ):
        step(some, tx.init(params), batch(0))
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 1))
    with pytest.raises(NotImplementedError, match=r"on_host needs JAX 0\.10\.2"):
        gx.on_host(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "layers", "params_too"),
    [(False, ["blocks"], True), (False, ["blocks"], False), (True, (), True)],
)
def test_vmap_of_a_step_raises_before_it_donates(gate, layers, params_too):
    tx = gx.drop_stale(optax.adam(0.1), 1) if gate else optax.adam(0.1)
    extra = {"local_step": 0} if gate else {}
    step = gx.minimize(loss_fn, tx, layers=layers)
    params = jax.tree.map(lambda x: jnp.stack([x, x]), start())
    state = on_host(jax.vmap(tx.init)(params))
    params = on_host(params) if params_too else params
    batches = jnp.stack([batch(0), batch(1)])
    with pytest.raises(ValueError, match=r"memory_space .*<host>"):
        jax.vmap(lambda *args: step(*args, **extra))(params, state, batches)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_an_error_names_the_limit_of_a_gpu():
    """Of XLA's allocator for the host; other errors stay as they are."""

    def fail(text):
        def loss_fn(params):
            raise jax.errors.JaxRuntimeError(text)

        return gx.minimize(loss_fn, optax.sgd(0.1))

    with pytest.raises(jax.errors.JaxRuntimeError) as found:
        fail("RESOURCE_EXHAUSTED: Out of host memory, xla_gpu_host_bfc")(start(), ())
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in "".join(found.value.__notes__)
    with pytest.raises(jax.errors.JaxRuntimeError) as found:
        fail("INTERNAL")(start(), ())
    assert "MEMORY_LIMIT" not in "".join(getattr(found.value, "__notes__", []))


# Many devices, frameworks, checkpoints.


MESH_AXES = {"blocks": {"w": P(None, "data", "model"), "b": P(None, "model")}}


def on_mesh(params, mesh, head=None):
    return jax.tree.map(
        lambda x, s: jax.device_put(x, NamedSharding(mesh, s)),
        params,
        MESH_AXES | {"head": head or P(), "gain": P()},
    )


MADE = ["adamw", "adagrad", "8 bits", "int16", "seven bytes"]


@pytest.mark.parametrize(
    ("name", "kind", "params_too"),
    half(MADE, [AxisType.Auto, AxisType.Explicit], [True, False]),
)
def test_a_new_state_on_a_mesh(name, kind, params_too):
    """On explicit axes the mesh is set, on automatic ones ``out_shardings`` are given.

    Each array with an entry for each one of a parameter lies where that one does.
    """
    tx, dtype = WAYS[name].tx, WAYS[name].dtype
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    params = on_mesh(start(dtype), mesh, P("data"))
    params = on_host(params) if params_too else params
    there = None
    if kind is AxisType.Auto:
        described = optax.tree.map_params(
            tx,
            lambda x, p: x.update(sharding=p.sharding.with_memory_kind("device")),
            jax.eval_shape(tx.init, params),
            params,
            transform_non_params=lambda x: jax.tree.map(
                lambda x: x.update(sharding=NamedSharding(mesh, P())), x
            ),
        )
        there = jax.tree.map(lambda x: x.sharding, on_host(described))
    context = jax.set_mesh(mesh) if there is None else contextlib.nullcontext()
    with context:
        make = jax.jit(lambda p: on_host(tx.init(p)), out_shardings=there)
        state = make(params)

    def check(x, p):
        wanted = p.sharding.with_memory_kind(x.sharding.memory_kind)
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
        is_small = x.size < LAYERS * WIDTH
        assert x.sharding.memory_kind == ("device" if is_small else "pinned_host")

    optax.tree.map_params(tx, check, state, params)
    plain = jax.device_put(start(dtype), jax.devices()[0])
    values = (jax.tree.map(np.asarray, x) for x in (state, jax.jit(tx.init)(plain)))
    chex.assert_trees_all_equal(*values)


@pytest.mark.slow
def test_boxes():
    """Of Linen and of NNX."""
    state = {"w": nn.Partitioned(jnp.ones((8, 8)), names=(None, "x"))}
    assert on_host(state)["w"].value.sharding.memory_kind == "pinned_host"
    assert on_host(state)["w"].names == (None, "x")
    _, params = nnx.split(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Param)
    tx = optax.adam(0.1)
    state = on_host(tx.init(params))
    new, state = gx.apply_gradients(tx, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    assert set(jax.tree.leaves(kinds(state))) == {"device", "pinned_host"}


def small_on_host(tree):
    return gx.on_host(tree, min_size=1)


FUNCTIONS = {
    "global_norm": lambda params, updates: gx.global_norm(params),
    "apply_updates": gx.apply_updates,
    "worker_start": lambda params, updates: gx.contrib.worker_start(
        params, LOOKING_AHEAD._replace(mu=updates), 0.5, 0.5
    ),
    "apply_gradients": lambda params, updates: gx.apply_gradients(
        optax.sgd(0.5), updates, optax.sgd(0.5).init(params), params
    )[0],
}
LOOKING_AHEAD = gx.contrib.scale_by_momentum_look_ahead(0.5).init(jnp.ones(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "there", "jitted", "_"),
    pairwise(FUNCTIONS, ["params", "updates", "both"]),
)
def test_a_function_of_arrays_takes_them_from_the_host(name, there, jitted, _):
    """Small ones, those in half precision and large ones go other ways."""
    rng = np.random.default_rng(0)
    shapes = {"small": (3,), "other": (3,), "matrix": (70, 70), "half": (70, 70)}

    def draw():
        drawn = {
            k: jnp.asarray(rng.normal(size=s), "float32") for k, s in shapes.items()
        }
        return drawn | {"half": drawn["half"].astype("bfloat16")}

    params, updates = draw(), draw()
    on_device = FUNCTIONS[name](params, updates)
    given = [
        small_on_host(tree) if there in (who, "both") else tree
        for who, tree in (("params", params), ("updates", updates))
    ]
    before = kinds(given[0])
    got = (jax.jit if jitted else lambda f: f)(FUNCTIONS[name])(*given)
    assert kinds(given[0]) == before
    assert kinds(got) == ("device" if name == "global_norm" else before)
    got, wanted = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), x) for x in (got, on_device)
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-6)
    if name == "global_norm":
        flat = [np.asarray(x, np.float64).ravel() for x in params.values()]
        np.testing.assert_allclose(got, np.linalg.norm(np.concatenate(flat)), 1e-6)


@pytest.mark.slow
def test_what_gets_no_update_stays_on_the_host():
    params = small_on_host({"a": jnp.ones(3), "frozen": jnp.ones(3)})
    new = gx.apply_updates(params, {"a": jnp.ones(3), "frozen": None})
    assert new["frozen"] is params["frozen"]
    assert new["a"].sharding.memory_kind == "pinned_host"
    rows = gx.IndexedSlices(jnp.array([1]), jnp.ones((1, 2)), (3, 2))
    table = gx.apply_updates(small_on_host(jnp.ones((3, 2))), rows)
    np.testing.assert_array_equal(table, [[1, 1], [2, 2], [1, 1]])
    assert table.sharding.memory_kind == "pinned_host"


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_counters_are_read_from_the_host(jitted):
    tx = gx.drop_stale(optax.sgd(1.0), 0)
    state = small_on_host(tx.init(jnp.ones(3)))
    _, state = gx.apply_gradients(tx, jnp.ones(3), state, jnp.ones(3), local_step=0)
    for read, wanted in (gx.global_step, 1), (gx.staleness_fraction, 0):
        got = (jax.jit if jitted else lambda f: f)(read)(state)
        assert (got, got.sharding.memory_kind) == (wanted, "device")


IN_HOST = "{} has float32.* in the host's memory at .*w.*jax.device_put"


def test_a_server_refuses_arrays_on_the_host():
    params = {"w": jnp.ones((512, 256)), "b": jnp.ones(3)}
    refused = pytest.raises(ValueError, match=IN_HOST.format("params"))
    for tx in (optax.sgd(0.1), optax.adam(0.1)):
        with refused:
            gx.ParameterServer(gx.on_host(params), tx)
        with refused:
            gx.ParameterServer(lambda: gx.on_host(params), tx)
    trace = optax.trace(0.9)
    moved = trace._replace(init=lambda params: gx.on_host(trace.init(params)))
    named = IN_HOST.format(r"tx.init\(params\)")
    with pytest.raises(ValueError, match=named):
        gx.ParameterServer(params, moved)
    server = gx.ParameterServer(gx.on_host({"w": jnp.ones(3)}), trace)  # A small one.
    assert server.push(small_on_host({"w": jnp.ones(3)}), 0).applied
    state = server.state()
    server.restore(small_on_host(state))
    assert kinds(server.state()) == kinds(state)


@pytest.mark.every
@pytest.mark.parametrize("engine", ["threads", "simulated", "ray"])
def test_an_engine_refuses_parameters_on_the_host(engine):
    params = gx.on_host({"w": jnp.ones((512, 256))})
    worker = gx.engines.Worker(lambda params: (0.0, params))
    job = gx.engines.Job(params, optax.sgd(0.1), [worker], 2)
    with pytest.raises(ValueError, match=IN_HOST.format("params")):
        getattr(gx.engines, engine)(job).__enter__()


def test_so_does_a_server_of_several_processes():
    """Each of them compiles the function that makes parameters, or the first state."""
    params = {"w": jnp.ones((512, 256))}
    mesh = jax.make_mesh((1,), (layout.AXIS,))
    make = process.made(
        "params", lambda: gx.on_host(params), layout.ServerLayout.of(params, 1), mesh
    )
    with pytest.raises(ValueError, match=IN_HOST.format("params")):
        make()
    make = process.made(
        "params", lambda: params, layout.ServerLayout.of(params, 1), mesh
    )
    chex.assert_trees_all_equal(make(), params)
