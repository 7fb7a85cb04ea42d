"""Where a state lies: before it is made, after steps, and restored on another mesh."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from tests.conftest import half
from tests.descriptors import DESCRIPTORS
from tests.training.losses import OLD

pytestmark = pytest.mark.usefixtures("standard_promotion")

AXES = [AxisType.Auto, AxisType.Explicit]
SHAPES = {"w": (16, 8), "stack": (4, 8, 16), "b": (8,), "s": ()}
SPECS = {"w": P("x", "y"), "stack": P(None, "y", "x"), "b": P(("x", "y")), "s": P()}
OTHER = {"w": P("y"), "stack": P("x", "y"), "b": P(), "s": P()}


def described(mesh, shapes=SHAPES, specs=SPECS, dtype="float32"):
    return {
        k: jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, specs[k]))
        for k, s in shapes.items()
    }


def on(axis_type=AxisType.Auto, shape=(4, 2)):
    return jax.make_mesh(shape, ("x", "y"), (axis_type,) * 2)


def draw(like, seed=0):
    """Arrays that lie as the descriptions say."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jax.device_put(
            jnp.asarray(rng.standard_normal(x.shape), x.dtype), x.sharding
        ),
        like,
    )


def places(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def types(tree):
    flat, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in flat]


def same(got, wanted):
    """To the bit, wherever they lie."""
    assert types(got) == types(wanted)
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def check_places(tree, like):
    """Each array lies where it was said, on all devices of the mesh."""
    wanted = dict(jax.tree.leaves_with_path(like))
    for path, x in jax.tree.leaves_with_path(tree):
        place = wanted[path].sharding
        assert x.sharding.is_equivalent_to(place, x.ndim), (path, x.sharding, place)
        assert x.sharding.device_set == place.device_set


def check(
    txs, axis_type, folder, extra=lambda name, params: {}, dtype="float32", steps=2
):
    """All that is promised of the states of some transformations, by their names."""
    there = described(on(axis_type), dtype=dtype)
    params = draw(there)
    state = {name: gx.abstract_state(tx, there) for name, tx in txs.items()}
    of_arrays = {name: gx.abstract_state(tx, params) for name, tx in txs.items()}
    assert places(of_arrays) == places(state)

    def init(params):
        return {name: tx.init(params) for name, tx in txs.items()}

    def step(grads, state, params):
        results = {
            name: gx.apply_gradients(
                tx, grads, state[name], params, **extra(name, params)
            )
            for name, tx in txs.items()
        }
        return {name: new for name, (_, new) in results.items()}

    assert types(state) == types(jax.eval_shape(init, params))
    made = jax.jit(init, out_shardings=places(state))(params)
    check_places(made, state)
    same(made, jax.jit(init)(jax.device_get(params)))
    # On explicit axes the types alone say where results lie.
    is_automatic = axis_type == AxisType.Auto
    step = jax.jit(step, out_shardings=places(state) if is_automatic else None)
    for seed in range(1, 1 + steps):
        made = step(draw(there, seed), made, params)
        check_places(made, state)

    mesh = on(AXES[is_automatic], shape=(2, 4))
    there = described(mesh, specs=OTHER, dtype=dtype)
    target = there, {name: gx.abstract_state(tx, there) for name, tx in txs.items()}
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder / "0", (params, made))
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(folder / "0", target)
    same(restored, (params, made))
    assert places(restored) == places(target)


# The rows of a public factory share one program.
FACTORIES = {
    factory: {str(row): row for row in DESCRIPTORS if row.name == factory}
    for factory in dict.fromkeys(row.name for row in DESCRIPTORS)
}


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "axis_type"), half(FACTORIES, AXES))
def test_each_transformation_here(factory, axis_type, tmp_path):
    rows = FACTORIES[factory]
    dtype = "bfloat16" if factory == "master_weights" else "float32"
    check(
        {name: row.make() for name, row in rows.items()},
        axis_type,
        tmp_path,
        lambda name, params: rows[name].extra(params),
        dtype,
    )


LABELS = {"w": "a", "stack": "b", "b": "a", "s": "b"}
FACTORS = optax.adafactor(0.1, min_dim_size_to_factor=8)
EIGHT_BITS = {"block_size": 8, "min_size": 1}
OTHERS = {
    "adafactor": FACTORS,
    "partition": optax.partition({"a": optax.adam(0.1), "b": FACTORS}, LABELS),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.adam(0.1), {k: k != "w" for k in SHAPES}),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "lbfgs": optax.scale_by_lbfgs(4),
    "inject": optax.inject_hyperparams(optax.adamw)(0.1),
    "ema": optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.lion(0.1)),
    "8 bits": gx.low_bit_state(optax.adam(0.1), **EIGHT_BITS),
    "rows of blocks": gx.low_bit_state(optax.adam(0.1), block_axis=-1, **EIGHT_BITS),
    "seven bytes": gx.master_weights(
        gx.low_bit_state(optax.adam(0.1), **EIGHT_BITS), residual_dtype="int8"
    ),
    "norms": optax.chain(
        gx.measure_norms(stacked_axes={"w": 0, "stack": 1, "b": 0, "s": 0})
    ),
    "rows": gx.accumulate(optax.adam(0.1), 2, reduction="row_mean"),
    "ring": gx.delayed(optax.adam(0.1), 4),
}


# On explicit axes their own products of arrays raise JAX's error.
AUTOMATIC = {"muon", "lbfgs"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis_type"), half(OTHERS, AXES))
def test_others(name, axis_type, tmp_path):
    dtype = "bfloat16" if name == "seven bytes" else "float32"
    steps = 0 if name in AUTOMATIC and axis_type == AxisType.Explicit else 2
    check({name: OTHERS[name]}, axis_type, tmp_path, dtype=dtype, steps=steps)


# A parameter's shape and spec, and for each field of the state what is expected.
def one(shape, spec, tx, **expected):
    return shape, P(*spec), tx, {k: P(*names) for k, names in expected.items()}


LATE, ROWS = gx.delayed(optax.trace(0.9), 4), gx.adagrad(0.1, row_wise=True)
TABLE = gx.worker_mean(optax.trace(0.9), 4, method="latest")
BLOCKS = functools.partial(gx.low_bit_state, optax.trace(0.9), block_size=8, min_size=1)
WHERE = {
    "like": one((8, 4), ["x"], optax.trace(0.9), trace=["x"]),
    # Factors: of a wide, a high, a square and a stacked parameter.
    "wide": one((8, 16), ["x", "y"], FACTORS, v_row=["x"], v_col=["y"], v=[None]),
    "high": one((16, 8), ["x", "y"], FACTORS, v_row=["y"], v_col=["x"], v=[None]),
    "a little higher": one((16, 12), ["x", "y"], FACTORS, v_row=["y"], v_col=["x"]),
    "square": one((8, 8), ["x", "y"], FACTORS, v_row=["x"], v_col=["y"], v=[None]),
    "layers": one(
        (2, 8, 8), ["y", None, "x"], FACTORS, v_row=["y", None], v_col=["y", "x"]
    ),
    "vector": one((8,), [("x", "y")], FACTORS, v=[("x", "y")], v_row=[None]),
    # It has no factors, and larger ones have.
    "short": one((4, 4), ["x", "y"], FACTORS, v=["x", "y"], v_row=[None]),
    "rows": one((8, 8), ["x", "y"], ROWS, sum_of_squares=["x"]),
    "layers' norms": one(
        (4, 4, 8), ["x", "y"], gx.measure_norms(stacked_axes=2), norms=["x", "y"]
    ),
    "a norm": one((8, 8), ["x", "y"], gx.measure_norms(), norms=[]),
    # As long as the parameter's first axis.
    "ring": one((4, 4), ["x", "y"], LATE, ring=[None, "x", "y"], trace=["x", "y"]),
    # As long as that axis in a larger parameter.
    "long ring": one(
        (4, 8), ["x", "y"], gx.delayed(optax.trace(0.9), 8), ring=[None, "x", "y"]
    ),
    "table": one(
        (4, 4),
        ["x"],
        TABLE,
        table=[None, "x", None],
        means=[None, "x", None],
        trace=["x"],
    ),
    "codes": one((64, 8), ["x", "y"], BLOCKS(), trace=["x", "y"], scales=["x", "y"]),
    # Two blocks on four devices.
    "few blocks": one((16, 8), ["x", "y"], BLOCKS(), scales=[None, "y"]),
    "blocks of rows": one(
        (8, 64), ["x", "y"], BLOCKS(block_axis=-1), scales=["x", "y"]
    ),
    "a vector's blocks": one((64,), [("x", "y")], BLOCKS(), scales=[("x", "y")]),
}


@pytest.mark.every
@pytest.mark.parametrize("case", WHERE)
def test_each_axis_is_cut_as_its_parameters_axis(case):
    shape, spec, tx, expected = WHERE[case]
    params = described(on(), {"p": shape}, {"p": spec})
    state = gx.abstract_state(tx, params)
    for field, wanted in expected.items():
        (found,) = jax.tree.leaves(optax.tree.get(state, field))
        assert found.sharding.is_equivalent_to(NamedSharding(on(), wanted), found.ndim)


def test_what_is_like_a_parameter_has_its_spec():
    """Also with names that are left out: shardings are compared by their words."""
    for spec in P("x"), P("x", None), P():
        params = described(on(), {"p": (8, 8)}, {"p": spec})
        assert (
            gx.abstract_state(optax.trace(0.9), params).trace["p"].sharding.spec == spec
        )


def test_lookahead():
    """Parameters come in two copies, and may lie differently."""
    first, second = (described(on(), specs=specs) for specs in (SPECS, OTHER))
    params = optax.LookaheadParams(first, second)
    tx = optax.lookahead(optax.adam(0.1), 5, 0.5)
    state = gx.abstract_state(tx, params)
    assert places(state.fast_state[0].mu) == places(first)
    assert state.steps_since_sync.sharding == NamedSharding(on(), P())


@pytest.mark.parametrize("name", ["adam", "8 bits", "adafactor", "ring"])
def test_a_device_gets_little_more_than_an_even_cut(name):
    """Bytes that lie on each of eight devices, of arrays that are large."""
    txs = {
        "adam": optax.adam(0.1),
        "8 bits": gx.low_bit_state(optax.adam(0.1)),
        **OTHERS,
    }
    mesh, shapes = jax.make_mesh((8,), ("x",)), {"w": (4, 1024, 256), "b": (4, 256)}
    specs = {"w": P(None, "x"), "b": P(None, "x")}
    state = gx.abstract_state(txs[name], described(mesh, shapes, specs))
    cut = even = 0
    for x in jax.tree.leaves(state):
        if x.size >= 4096:
            cut += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            even += x.size * x.dtype.itemsize / 8
    assert 0 < even <= cut <= 1.2 * even


def test_one_device():
    place = SingleDeviceSharding(jax.devices()[3])
    params = jax.device_put({"w": jnp.ones((64, 8)), "n": jnp.zeros(())}, place)
    state = gx.abstract_state(OTHERS["8 bits"], params)
    assert set(jax.tree.leaves(places(state))) == {place}
    there = jax.jit(OTHERS["8 bits"].init, out_shardings=places(state))(params)
    same(there, jax.jit(OTHERS["8 bits"].init)(params))
    if not OLD:
        state = gx.abstract_state(optax.trace(0.9), gx.on_host(params, min_size=1))
        assert set(jax.tree.leaves(places(state))) == {place}


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="JAX keeps no result in the host's memory")
@pytest.mark.parametrize("axis_type", AXES)
def test_the_hosts_memory(axis_type):
    """The state is on the device, also for parameters on the host, unless asked for."""
    tx, params = OTHERS["8 bits"], draw(described(on(axis_type)))
    on_host = functools.partial(gx.on_host, min_size=64)
    state = gx.abstract_state(tx, params)
    for there in on_host(params), on_host(described(on(axis_type))):
        assert places(gx.abstract_state(tx, there)) == places(state)
    moved = on_host(state)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(moved)} == {
        "pinned_host",
        jax.devices()[0].default_memory().kind,
    }
    init = jax.jit(lambda p: on_host(tx.init(p)), out_shardings=places(moved))
    made = init(params)
    check_places(made, moved)
    same(made, jax.jit(tx.init)(jax.device_get(params)))


def test_an_init_for_lengths_that_can_be_divided():
    """Blocks of four rows."""

    def init(params):
        return jax.tree.map(lambda p: p.reshape(-1, 4, p.shape[1]).max(1), params)

    params = described(on(), {"p": (16, 8)}, {"p": P("x", "y")})
    tx = optax.GradientTransformation(init, optax.identity().update)
    assert gx.abstract_state(tx, params)["p"].sharding.spec == P("x", "y")


def test_an_init_for_one_size_alone():
    """Lengths alone say which axis is which."""
    scales = jnp.ones((8, 4))

    def init(params):
        return jax.tree.map(lambda p: (p * scales, jnp.sum(p * scales, 0)), params)

    params = described(on(), {"p": (8, 4)}, {"p": P("x", "y")})
    tx = optax.GradientTransformation(init, optax.identity().update)
    like, factor = gx.abstract_state(tx, params)["p"]
    assert (like.sharding.spec, factor.sharding.spec) == (P("x", "y"), P("y"))
    scales = jnp.ones((8, 8))  # Now its length says nothing.
    params = described(on(), {"p": (8, 8)}, {"p": P("x", "y")})
    like, factor = gx.abstract_state(tx, params)["p"]
    assert like.sharding.spec == P("x", "y")
    assert factor.sharding.is_fully_replicated


def test_a_state_that_is_not_made_parameter_by_parameter():
    """Its vector is whole on each device. The rest lies as the parameters do."""
    params, flat = described(on()), optax.flatten(optax.adam(0.1))
    state = gx.abstract_state(flat, params)
    assert set(jax.tree.leaves(places(state))) == {NamedSharding(on(), P())}
    state = gx.abstract_state(
        optax.partition({"a": flat, "b": FACTORS}, LABELS), params
    )
    check_reduced = optax.tree.get(state, "v_row")["stack"], optax.tree.get(state, "mu")
    assert [x.sharding.spec for x in check_reduced] == [P(None, "y"), P()]


@pytest.mark.every
@pytest.mark.parametrize("name", SHAPES)
def test_an_init_that_reads_a_parameters_shape(name):
    """It takes no placeholder there, but the state grows with this parameter."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), jnp.zeros(params[name].shape)

    params = described(on())
    like, another = gx.abstract_state(
        optax.GradientTransformation(init, optax.identity().update), params
    )
    assert (places(like), another.sharding) == (places(params), params[name].sharding)


FLAGS = {"w": True, "stack": False, "b": True, "s": False}


INITS = {
    "items": lambda p: {k: {"mu": jnp.zeros_like(x)} for k, x in p.items()},
    "shapes": lambda p: {k: jnp.zeros(x.shape) for k, x in p.items()},
    "leaves": lambda p: [jnp.zeros_like(x) for x in jax.tree.leaves(p)],
    "flags": lambda p: jax.tree.map(lambda x, _: jnp.zeros_like(x), p, FLAGS),
    "zip": lambda p: [
        (jnp.zeros_like(x), flag)
        for x, flag in zip(jax.tree.leaves(p), jax.tree.leaves(FLAGS), strict=True)
    ],
}


@pytest.mark.every
@pytest.mark.parametrize("name", INITS)
def test_whose_a_leaf_is_shows_whatever_the_tree_looks_like(name):
    """Also beside a sum over all parameters, and beside all of them in one vector."""

    def init(params):
        flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(params)])
        return INITS[name](params), jnp.sum(flat), flat

    params, update = described(on()), optax.identity().update
    state = gx.abstract_state(optax.GradientTransformation(init, update), params)
    specs = [x.sharding.spec for x in jax.tree.leaves(state) if x.shape]
    of_shape = {x.shape: x.sharding.spec for x in params.values()}
    *alone, flat = [x for x in jax.tree.leaves(state) if x.shape]
    assert specs == [*(of_shape[x.shape] for x in alone), P()]
    assert flat.shape == (649,)


@pytest.mark.quick_case("6-3")
@pytest.mark.parametrize(("number", "bits"), [(6, 3), (600, 10)])
def test_many_parameters_take_few_traces(number, bits):
    """Without placeholders one more for each bit of their number."""
    calls = []

    def traces(init):
        calls.clear()
        tx = optax.GradientTransformation(
            lambda p: calls.append(1) or init(p), optax.identity().update
        )
        params = {f"{i}": HERE for i in range(number)}
        state = gx.abstract_state(tx, params)
        assert {x.sharding.spec for x in jax.tree.leaves(state)} == {P("x")}
        return len(calls)

    assert traces(functools.partial(jax.tree.map, jnp.zeros_like)) <= 4
    assert traces(INITS["leaves"]) <= 4 + bits


@pytest.mark.every
@pytest.mark.parametrize("axis_type", AXES)
def test_an_init_says_where_an_array_lies(axis_type):
    """Also inside of ``jit``; what it does not say lies as the parameters do."""
    mesh = on(axis_type)

    @jax.jit
    def put(x):
        explicit = axis_type == AxisType.Explicit
        put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
        return put(x, NamedSharding(mesh, P("y", "x")))

    def init(params):
        return put(jnp.zeros((8, 8))), jnp.zeros_like(params["w"]), jnp.zeros((8, 8))

    tx = optax.GradientTransformation(init, optax.identity().update)
    found = places(gx.abstract_state(tx, described(mesh)))
    specs = P("y", "x"), P("x", "y"), P()
    assert found == tuple(NamedSharding(mesh, spec) for spec in specs)


def test_an_init_that_knows_no_explicit_axes():
    """It multiplies arrays, and JAX asks where the product lies."""
    params = described(on(AxisType.Explicit))
    tx = optax.GradientTransformation(
        lambda p: (p["w"].T @ p["w"], jnp.zeros_like(p["w"])), optax.identity().update
    )
    product, like = gx.abstract_state(tx, params)
    assert (product.shape, product.dtype) == ((8, 8), "float32")
    assert like.sharding == params["w"].sharding


def test_an_axis_of_several_parameters_or_of_the_same_one_twice_is_not_cut():
    params = dict.fromkeys("abc", HERE)
    both = HERE.update(sharding=NamedSharding(on(), P(("x", "y"))))

    def init(p):
        longest = max(x.shape[0] for x in p.values())
        return jnp.zeros(longest), {k: jnp.outer(x, x) for k, x in p.items()}

    tx = optax.GradientTransformation(init, optax.identity().update)
    of_all, _ = gx.abstract_state(tx, params)
    assert of_all.sharding.is_fully_replicated
    _, squares = gx.abstract_state(tx, params | {"b": both})
    wanted = NamedSharding(on(), P(("x", "y"), None))
    assert squares["b"].sharding.is_equivalent_to(wanted, 2)


def matrices(w):
    """Factors of the last two axes, a projector, and all entries in one row."""
    *layers, m, n = w.shape
    return {
        "left": jnp.zeros((*layers, m, m)),
        "right": jnp.zeros((*layers, n, n)),
        "projector": jnp.zeros((*layers, m, 4)),
        "flat": jnp.zeros((*layers, m * n)),
        "blocks": jnp.zeros((*layers, m // 4, n)),
    }


@pytest.mark.every
@pytest.mark.parametrize("cut", [("x", None), (None, "x"), ("x", "y"), ("y", "x")])
@pytest.mark.parametrize("shape", [(8, 8), (8, 16), (16, 8), (3, 8, 8), (3, 16, 8)])
def test_an_axis_is_cut_as_the_one_with_which_it_grows(shape, cut):
    """A factor of rows as the rows, its second axis not, and none of the columns."""
    layers = (None,) * (len(shape) - 2)
    rows, columns = cut
    params = described(on(), {"w": shape}, {"w": P(*layers, *cut)})
    tx = optax.GradientTransformation(
        lambda p: jax.tree.map(matrices, p), optax.identity().update
    )
    m = shape[-2]
    divides = m // 4 % {"x": 4, "y": 2, None: 1}[rows] == 0
    wanted = {
        "left": (rows, None),
        "right": (columns, None),
        "projector": (rows, None),
        "flat": (rows,),
        "blocks": (rows if divides else None, columns),
    }
    for name, x in gx.abstract_state(tx, params)["w"].items():
        expected = NamedSharding(on(), P(*layers, *wanted[name]))
        assert x.sharding.is_equivalent_to(expected, x.ndim), name


def test_weak_types():
    params = {"w": jax.device_put(1.0, NamedSharding(on(), P()))}
    tx = optax.trace(0.9)
    assert params["w"].weak_type
    assert types(gx.abstract_state(tx, params)) == types(
        jax.eval_shape(tx.init, params)
    )


def test_leaves_without_a_parameter_stay():
    params = {**described(on()), "frozen": None, "masked": optax.MaskedNode()}
    state = gx.abstract_state(optax.trace(0.9), params)
    assert state.trace["frozen"] is None
    assert state.trace["masked"] == optax.MaskedNode()


HERE = jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(on(), P("x")))
NOWHERE = jax.ShapeDtypeStruct((8,), "float32")
EXPLICIT = NamedSharding(on(AxisType.Explicit), P("x"))


@pytest.mark.every
@pytest.mark.parametrize(
    ("params", "kind", "words"),
    [
        ({}, ValueError, "params has no array"),
        ({"a": HERE, "b": {"c": "no"}}, TypeError, r"['b']['c']"),
        (
            {"a": HERE, "b": {"c": NOWHERE}},
            ValueError,
            "float32[8] at ['b']['c'], and its sharding is None",
        ),
        (
            {"a": np.ones(8, "float32")},
            ValueError,
            "float32[8] at ['a'], and its sharding is None, as it is an array of NumPy",
        ),
        ({"a": 1.0}, ValueError, "at ['a'], and its sharding is None"),
        ({"a": HERE, "b": jnp.ones(8)}, ValueError, "cpu:0 at ['b']."),
        ({"a": HERE, "b": HERE.update(sharding=EXPLICIT)}, ValueError, "Explicit"),
        (
            {"a": jnp.ones(8), "b": jax.device_put(jnp.ones(8), jax.devices()[1])},
            ValueError,
            "cpu:0 at ['a'], and cpu:1 at ['b']",
        ),
    ],
)
def test_errors(params, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        gx.abstract_state(optax.adam(0.1), params)


@pytest.mark.parametrize("axis_type", AXES)
def test_traced_parameters_lie_nowhere(axis_type):
    with pytest.raises(ValueError, match=r"at \['b'\].*Outside of jit"):
        jax.jit(lambda p: gx.abstract_state(optax.adam(0.1), p))(
            draw(described(on(axis_type)))
        )


def test_no_transformation():
    with pytest.raises(TypeError, match="tx must be an optax"):
        gx.abstract_state(optax.adam, described(on()))
