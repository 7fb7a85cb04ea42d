"""Functions of parameters that come a layer at a time, against ``jax.jit`` of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.conftest import NEWEST_JAX
from tests.in_numpy import Program as Traced
from tests.training import losses

DEPTH, WIDTH, INNER, STEPS = 5, 16, 24, 3
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, WIDTH)), jnp.float32)
CACHE = jnp.zeros((DEPTH, STEPS, WIDTH))
MEMORIES = ["device"] if losses.OLD else ["device", "host"]


def start(depth=DEPTH, width=WIDTH, inner=INNER):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)

    return {
        "decoder": {"out": draw(depth, inner, width), "up": draw(depth, width, inner)},
        "encoder": {"w": draw(3, width, width), "bias": draw(3, 1, width)},
        "scale": draw(1, width),
        "square": draw(8, 8, width),
    }


def put(params, memory):
    return params if memory == "device" else gx.on_host(params, min_size=2)


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"]) @ layer["out"]


def decode(params, x):
    return jax.lax.scan(
        lambda x, layer: (block(x, layer), x.sum()), x, params["decoder"]
    )


def encode(params, x):
    def body(x, layer):
        return jnp.tanh(x @ layer["w"] + layer["bias"]), None

    return jax.lax.scan(body, x * params["scale"], params["encoder"])[0]


# Each takes parameters and x.
PROGRAMS = {}


def program(f):
    PROGRAMS[f.__name__] = f
    return f


@program
def one_stack(params, x):
    return decode(params, x)


@program
def two_stacks(params, x):
    return {"logits": decode(params, encode(params, x))[0], "mean": x.mean()}


@program
def read_twice(params, x):
    y, _ = decode(params, x)
    down = jax.lax.scan(
        lambda x, layer: (block(x, layer), x), y, params["decoder"], reverse=True
    )
    return y, down


@program
def cast_and_turned(params, x):
    stack = jnp.swapaxes(params["decoder"]["up"].astype(jnp.float16), 1, 2)

    def body(x, w):
        return x + x.astype(jnp.float16).dot(w.T).mean().astype(jnp.float32), w[0]

    return jax.lax.scan(body, x, stack), encode(params, x), decode(params, x)


@jax.custom_jvp
def with_a_derivative(params, x):
    return decode(params, x)[0]


@with_a_derivative.defjvp
def _(primals, tangents):
    raise NotImplementedError  # An evaluation has no derivative.


@jax.custom_vjp
def pulled(stack, x):
    return decode({"decoder": stack}, x)


pulled.defvjp(lambda *_: None, lambda *_: None)


@program
def hidden(params, x):
    """Behind a barrier, times numbers, and in functions with their own derivatives."""
    late = jax.lax.optimization_barrier((params["decoder"], x + 1))
    half = jax.tree.map(lambda w: 2.0 - w * 0.5, late[0])
    clipped = jax.tree.map(lambda w: jnp.maximum(jnp.abs(w), 0.1), params["decoder"])
    return (
        decode({"decoder": half}, late[1]),
        pulled(clipped, x),
        with_a_derivative(params, x),
    )


@program
def until_each_ends(params, x):
    """Of a batch, each example leaves the loop by itself."""

    def one(x):
        return jax.lax.while_loop(
            lambda c: (c[1] < 6) & (jnp.sum(c[0] ** 2) < 30),
            lambda c: (decode(params, c[0])[0] + 0.5, c[1] + 1),
            (x, 0),
        )

    return jax.vmap(one)(jnp.stack([x, 2 * x, x / 4]))


@program
def gradients_by_inputs(params, x):
    """Nothing is differentiated by the layers, so a layer at a time comes, too."""
    return jax.grad(lambda x: jnp.sum(decode(params, x)[0] ** 2))(x)


@program
def in_groups(params, x):
    groups = jax.tree.map(lambda w: w.reshape(5, 1, *w.shape[1:]), params["decoder"])
    return jax.lax.scan(lambda x, group: decode({"decoder": group}, x), x, groups)


@program
def checkpointed(params, x):
    return jax.checkpoint(lambda x: jax.jit(decode)(params, x))(x)


@program
def in_a_conditional(params, x):
    return jax.lax.cond(
        x[0, 0] > 0, decode, lambda p, x: (x, x[:, 0].sum() + CACHE[:, 0, 0]), params, x
    )


@program
def chosen_among_three(params, x):
    sides = [lambda p, x: x, encode, lambda p, x: decode(p, x)[0]]
    return [jax.lax.switch(k, sides, params, x) for k in range(3)]


@program
def inside_another(params, x):
    """Each layer of the decoder runs the encoder."""

    def body(x, layer):
        return block(encode(params, x), layer), None

    return jax.lax.scan(body, x, params["decoder"])[0]


@program
def along_two_axes(params, x):
    """One scan reads the rows of a stack, and its columns."""
    stack = params["square"]

    def body(x, both):
        row, column = both
        return x + row.sum(0, keepdims=True) * column[0].mean(), None

    return jax.lax.scan(body, x, (stack, jnp.swapaxes(stack, 0, 1)))[0]


@program
def read_whole_too(params, x):
    return decode(params, x), sum(jnp.sum(w**2) for w in params["decoder"].values())


def layers_with_cache(params, x, cache, i):
    def body(x, both):
        layer, cache = both
        cache = cache.at[i].set(x[0])
        return jnp.tanh(block(x, layer) + cache.sum(0, keepdims=True)), cache

    return jax.lax.scan(body, x, (params["decoder"], cache))


@program
def one_token(params, x):
    return layers_with_cache(params, x, CACHE, 1)


@program
def sampled(params, x):
    """A loop that ends by itself, as samplers have it."""

    def body(carry):
        i, x, cache, out = carry
        x, cache = layers_with_cache(params, x, cache, i)
        return i + 1, x, cache, out.at[i].set(x[0])

    init = 0, x, CACHE, jnp.zeros((STEPS, WIDTH))
    return jax.lax.while_loop(lambda carry: carry[0] < STEPS, body, init)


@program
def sampled_in_a_scan(params, x):
    def token(carry, i):
        x, cache = layers_with_cache(params, *carry, i)
        return (x, cache), x[0]

    return jax.lax.scan(token, (x, CACHE), jnp.arange(STEPS))


@program
def ends_by_its_layers(params, x):
    def goes_on(x):
        return jnp.abs(decode(params, x)[0]).max() < 15

    return jax.lax.while_loop(goes_on, lambda x: 2 * encode(params, x) + x, x)


# Programs that read one of the two stacks.
ONE = {
    "hidden": ["decoder"],
    "until_each_ends": ["decoder"],
    "gradients_by_inputs": ["decoder"],
    "one_stack": ["decoder"],
    "read_twice": ["decoder"],
    "in_groups": ["decoder"],
    "checkpointed": ["decoder"],
    "in_a_conditional": ["decoder"],
    "along_two_axes": ["square"],
    "read_whole_too": ["decoder"],
    "one_token": ["decoder"],
    "sampled": ["decoder"],
    "sampled_in_a_scan": ["decoder"],
}
BOTH = ["decoder", "encoder"]
READ_WHOLE = {"along_two_axes", "read_whole_too"}


def check(new, old):
    assert jax.tree.structure(new) == jax.tree.structure(old)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert jax.typeof(x) == jax.typeof(y)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.quick_case("hidden-host")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_those_of_the_function(name, memory):
    f, params = PROGRAMS[name], start()
    evaluated = gx.evaluate(f, layers=ONE.get(name, BOTH))
    check(evaluated(put(params, memory), X), jax.jit(f)(params, X))


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_are_those_of_a_step(name, memory):
    one = losses.LOSSES[name]
    params = one.make()
    evaluated = gx.evaluate(one.f, layers=one.layers)
    found = evaluated(put(params, memory), *one.batch)
    check(found, jax.jit(one.f)(params, *one.batch))


@pytest.mark.every
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_traced_program_has_the_same_results(name):
    """In NumPy. Nothing moves a whole stack to the device, unless it is read as one."""
    f, params, memory = PROGRAMS[name], start(), MEMORIES[-1]
    evaluated = gx.evaluate(f, layers=ONE.get(name, BOTH))
    program = jax.make_jaxpr(evaluated)(put(params, memory), X)
    wanted = Traced(jax.make_jaxpr(f)(params, X))(params, X)
    for x, y in zip(Traced(program)(params, X), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    if memory == "device" or name in READ_WHOLE:
        return
    moved = {
        line.split("=")[0].split(":")[-1].strip()
        for line in str(program).splitlines()
        if "= device_put" in line
    }
    assert {"f32[1,16,24]", "f32[1,24,16]"} <= moved
    assert moved.isdisjoint({"f32[5,16,24]", "f32[5,24,16]"})


LARGE = functools.partial(start, 16, 128, 512)


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST_JAX, reason="figures of the newest compilers")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["one_stack", "read_twice", "sampled"])
def test_about_two_layers_need_room(name, memory):
    params = jax.eval_shape(LARGE)
    x = jax.ShapeDtypeStruct((2, 128), jnp.float32)
    size = sum(x.size * 4 for x in jax.tree.leaves(params))
    if memory == "host":
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params = jax.tree.map(lambda x: x.update(sharding=place), params)
        params = gx.on_host(params)

    def f(params, x):
        if name != "sampled":
            return PROGRAMS[name](params, x)
        cache = jnp.zeros((16, STEPS, 128))
        step = functools.partial(layers_with_cache, params)
        return jax.lax.scan(
            lambda carry, i: (step(*carry, i), None), (x, cache), jnp.arange(STEPS)
        )

    compiled = gx.evaluate(f, layers=["decoder"]).lower(params, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.15 * size


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("memory", MEMORIES)
def test_on_a_mesh(kind, memory):
    mesh = jax.make_mesh((4, 2), ("x", "y"), (kind, kind))
    params, batch = start(), jnp.tile(X, (4, 1))
    wanted = jax.jit(two_stacks)(params, batch)

    def place(x):
        return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "y"))

    put_there = jax.tree.map(lambda p: jax.device_put(p, place(p)), params)

    def f(params, x):
        if kind is AxisType.Explicit:  # A layer is whole while it computes.
            params = params | {"scale": jax.reshard(params["scale"], P())}

            def use(w):
                return jax.reshard(w, P(*[None] * w.ndim))

            def block(x, layer):
                layer = jax.tree.map(use, layer)
                return x + jnp.tanh(x @ layer["up"]) @ layer["out"]

            def body(x, layer):
                layer = jax.tree.map(use, layer)
                return jnp.tanh(x @ layer["w"] + layer["bias"]), None

            y = jax.lax.scan(body, x * params["scale"], params["encoder"])[0]
            y = jax.lax.scan(lambda x, w: (block(x, w), None), y, params["decoder"])[0]
            return {"logits": y, "mean": x.mean()}
        return two_stacks(params, x)

    with jax.set_mesh(mesh):
        x = jax.device_put(batch, NamedSharding(mesh, P("x", None)))
        found = gx.evaluate(f, layers=BOTH)(put(put_there, memory), x)
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-6)
    assert found["logits"].sharding.spec[0] == "x"


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_without_jit_the_layers_run_one_by_one(memory):
    params = start()
    evaluated = gx.evaluate(two_stacks, layers=BOTH)
    with jax.disable_jit():
        check(evaluated(put(params, memory), X), two_stacks(params, X))


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
def test_inside_of_other_transformations(memory):
    params, batch = start(), jnp.stack([X, 2 * X, -X])
    there = put(params, memory)
    f, cached = two_stacks, layers_with_cache
    evaluated = gx.evaluate(f, layers=BOTH)
    mapped = jax.jit(jax.vmap(f, (None, 0)))(params, batch)
    check(jax.vmap(evaluated, (None, 0))(there, batch), mapped)
    check(
        jax.jit(lambda p, x: evaluated(p, 2 * x))(there, X), jax.jit(f)(params, 2 * X)
    )
    looped = jax.jit(lambda p, b: jax.lax.map(functools.partial(evaluated, p), b))
    check(looped(there, batch), jax.jit(jax.vmap(f, (None, 0)))(params, batch))
    shapes = jax.tree.map(lambda x: x.shape, f(params, X))
    assert jax.tree.map(lambda x: x.shape, evaluated.eval_shape(there, X)) == shapes
    donating = jax.jit(gx.evaluate(cached, layers=["decoder"]), donate_argnums=2)
    wanted = jax.jit(cached)(params, X, CACHE, 1)
    cache = CACHE + 0
    check(donating(there, X, cache, 1), wanted)
    assert cache.is_deleted()
    assert not jax.tree.leaves(there)[0].is_deleted()


def test_a_second_call_compiles_nothing():
    evaluated, params = gx.evaluate(one_stack, layers=["decoder"]), start()
    for k in range(3):
        evaluated(params, k * X)
    assert evaluated._cache_size() == 1


@pytest.mark.slow
def test_each_layer_calls_the_host_once():
    seen = []

    def f(params, x):
        def body(x, layer):
            x = block(x, layer)
            jax.experimental.io_callback(seen.append, None, x.sum())
            return x, None

        return jax.lax.scan(body, x, params["decoder"])[0]

    params = start()
    found = gx.evaluate(f, layers=["decoder"])(put(params, MEMORIES[-1]), X)
    jax.effects_barrier()
    stacks = params["decoder"]
    wanted = []
    x = X
    for up, out in zip(stacks["up"], stacks["out"], strict=True):
        x = block(x, {"up": up, "out": out})
        wanted.append(x.sum())
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    np.testing.assert_allclose(found, x, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(losses.OLD, reason="JAX keeps no result in the host's memory")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_gradient_by_layers_on_the_host_is_refused(wrap):
    """Not one by inputs, and none by the same parameters on the device."""
    params = gx.on_host(start(), min_size=1)
    loss = gx.evaluate(lambda p, x: jnp.sum(decode(p, x)[0]), layers=["decoder"])
    words = (
        r"gradient by 'decoder/\w+'.*host's memory.*minimize\(loss, tx, layers=...\)"
    )
    with pytest.raises(ValueError, match=words):
        wrap(jax.grad(loss))(params, X)
    plain = jax.grad(lambda x: jnp.sum(decode(start(), x)[0]))(X)
    check(wrap(jax.grad(loss, argnums=1))(params, X), plain)


@pytest.mark.slow
def test_arguments_by_keyword_and_no_layers():
    def f(params, x, *, scale):
        return decode(params, x)[0] * scale

    params = start()
    wanted = jax.jit(f)(params, X, scale=2.0)
    for layers in ([], ["decoder/up", "decoder/out"]):
        found = gx.evaluate(f, layers=layers)(put(params, MEMORIES[-1]), X, scale=2.0)
        check(found, wanted)


@pytest.mark.slow
def test_a_parameter_that_is_no_array_stays():
    params = start() | {"none": None, "rate": 0.5}

    def f(params, x):
        assert params["none"] is None
        return decode(params, x)[0] * params["rate"]

    check(gx.evaluate(f, layers=["decoder"])(params, X), jax.jit(f)(params, X))


def test_a_stack_whose_layers_are_cut_comes_whole():
    """Each device has some of the layers: explicit axes let none of them be read."""
    mesh = jax.make_mesh((5,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:5])
    there = jax.device_put(start()["decoder"]["up"], NamedSharding(mesh, P("x")))

    def f(params, x):
        stack = jax.reshard(params["w"], P())
        y = jax.lax.scan(lambda x, w: (x + (x @ w).sum(), None), x, stack)[0]
        return y, jax.reshard(params["w"], P()).sum()

    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"'w' is one of layers, but no jax.lax.scan"),
    ):
        gx.evaluate(f, layers=["w"])({"w": there}, X)


def mesh_of_two():
    return jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])


def on_devices(stacks, x):
    """Each device has one row of the batch."""
    return jax.shard_map(
        lambda w, x: decode({"decoder": w}, x)[0],
        mesh=mesh_of_two(),
        in_specs=(P(), P("x")),
        out_specs=P("x"),
        check_vma=False,
    )(stacks, x)


@pytest.mark.slow
def test_an_evaluation_inside_of_shard_map():
    """It is the way out that the message names."""
    params = {"decoder": start()["decoder"]}
    evaluated = gx.evaluate(lambda p, x: decode(p, x)[0], layers=["decoder"])
    got = jax.shard_map(
        evaluated,
        mesh=mesh_of_two(),
        in_specs=(P(), P("x")),
        out_specs=P("x"),
        check_vma=False,
    )(params, X)
    np.testing.assert_allclose(got, decode(params, X)[0], rtol=1e-5, atol=1e-6)


ERRORS = {
    "no path": (decode, ["decode"], ValueError, "got 'decode'; there are 'decoder/"),
    "no scan": (
        encode,
        BOTH,
        ValueError,
        "'decoder/out' is one of layers, but no jax.lax.scan of f goes over its layers."
        " Leave 'decoder/out' out of layers: then it comes whole.",
    ),
    "a product": (
        lambda p, x: x @ p["decoder"]["up"][0],
        ["decoder/up"],
        ValueError,
        r"its layers: '\w+' .*test_evaluate.py.* takes the whole stack. Leave",
    ),
    "a shard_map": (
        lambda p, x: on_devices(p["decoder"], x),
        ["decoder"],
        ValueError,
        "'shard_map' .*test_evaluate.py.* takes the whole stack. Put jax.shard_map "
        "around gx.evaluate. Or leave 'decoder/out' out of layers",
    ),
    "a string": (decode, "decoder", TypeError, "layers must be a sequence of paths"),
    "nothing": (lambda p, x: None, [], TypeError, "f must return arrays, got None."),
    "nothing of layers": (
        lambda p, x: (decode(p, x), ())[1],
        ["decoder"],
        TypeError,
        r"f must return arrays, got \(\)",
    ),
    "no array": (lambda p, x: "x", ["decoder"], TypeError, "not a valid JAX type"),
    "no layer": (
        lambda p, x: decode(jax.tree.map(lambda w: w[:0], p), x),
        ["decoder"],
        ValueError,
        "goes over its layers",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_evaluated(name):
    f, layers, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        gx.evaluate(f, layers=layers)(start(), X)
