"""On eight devices everything is as on one, and every array stays where it is."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import compilers
from tests.conftest import half, pairwise
from tests.descriptors import DESCRIPTORS, UNGATED

SPECS = {"rows": P("x"), "both": P("y", "x"), "columns": P(None, "y"), "all": P()}
# Inside shard_map a row has to be whole on its device if it shares an accumulator.
ROWS = {"rows": P("x"), "both": P(("y", "x")), "columns": P(), "all": P()}


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = {"rows": (8, 3), "both": (8, 4), "columns": (3, 4), "all": (5,)}
    return {k: jnp.float32(rng.standard_normal(s)) for k, s in shapes.items()}


def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


def put(tree, specs, axis_type=AxisType.Auto):
    on = functools.partial(NamedSharding, mesh(axis_type))
    return jax.device_put(tree, {k: on(specs[k]) for k in tree})


def sharded(f, in_specs, out_specs, **kwargs):
    return jax.jit(
        jax.shard_map(f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, **kwargs)
    )


def make(row, mode):
    """The transformation, the specs of its parameters, and its parameters."""
    manual = mode == "shard_map"
    specs = ROWS if manual and row.variant == "row_wise" else SPECS
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    place = functools.partial(put, specs=specs, axis_type=axis_type)
    return row.make(axis_name=("x", "y") if manual else None), specs, place


# The rows of a public factory share one program, of dicts by row.
FACTORIES = {
    factory: {str(row): row for row in DESCRIPTORS if row.name == factory}
    for factory in dict.fromkeys(row.name for row in DESCRIPTORS)
}


def of_described(init):
    def describe(p):
        return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding)

    return lambda params: init(jax.tree.map(describe, params))


INITS = {"eager": lambda f: f, "jit": jax.jit, "described": of_described}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "mode", "init"), half(FACTORIES, ["automatic", "explicit"], INITS)
)
def test_state_lies_where_parameters_lie(factory, mode, init):
    rows = FACTORIES[factory]
    txs = {name: make(row, mode)[0] for name, row in rows.items()}
    first, *_ = rows.values()
    _, specs, place = make(first, mode)  # They are the same for all.

    @INITS[init]
    def begin(params):
        return {name: tx.init(params) for name, tx in txs.items()}

    def check(x, spec, p):
        if x.shape != p.shape[: x.ndim]:  # It stacks several of them.
            spec = None, *spec
        # State with fewer axes than its parameter has the parameter's first axes.
        expected = NamedSharding(x.sharding.mesh, P(*spec[: x.ndim]))
        assert x.sharding.mesh.size == 8
        assert x.sharding.is_equivalent_to(expected, x.ndim)

    def alone(tree):  # Of `low_bit_state` it is a tuple.
        jax.tree.map(lambda x: check(x, P(), x), tree)

    params = draw(0)
    if factory == "master_weights":  # For others it has no state.
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    for name, state in begin(place(params)).items():
        optax.tree.map_params(
            txs[name], check, state, specs, draw(0), transform_non_params=alone
        )


@pytest.mark.parametrize("devices", [None, 1, 2])
def test_new_state_is_a_constant_where_its_place_is_known(devices, monkeypatch):
    """On several devices of automatic axes it is computed from its parameter."""
    monkeypatch.setattr(compilers, "on_cpu", lambda special, plain: plain)
    init, w = gx.scale_by_adagrad().init, jnp.ones((8, 3))
    if devices:
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
        w = jax.device_put(w, NamedSharding(mesh, P("x")))
    make = jax.jit(init)
    assert (" sub " in str(make.trace(w).jaxpr)) == (devices == 2)
    state = make(w)
    assert state.sum_of_squares.sharding.is_equivalent_to(w.sharding, 2)
    chex.assert_trees_all_equal(state, init(w))


def test_state_is_made_inside_shard_map_over_one_device():
    """Its type varies over the axis, as that of its parameter does."""
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    init, w = gx.scale_by_adagrad().init, jnp.ones((8, 3))
    made = jax.jit(jax.shard_map(init, mesh=one, in_specs=P("x"), out_specs=P("x")))
    chex.assert_trees_all_equal(made(w), init(w))


@pytest.mark.parametrize(
    ("row", "in_context"),
    [(row, i % 2 == 0) for i, row in enumerate(UNGATED)],
    indirect=["in_context"],
    ids=str,
)
def test_explicit_types_are_those_of_init_eager_as_under_jit(row, in_context):
    """optax's own tests of sharding have these two properties."""
    tx = row.make()
    on_x = NamedSharding(mesh(AxisType.Explicit), P(None, "x"))
    with in_context(on_x.mesh):
        params = jax.device_put(np.ones((2, 8, 4), np.float16), on_x)
        grads = params

        def update(grads, state, params):
            return tx.update(grads, state, params, **row.extra(params))

        def told(types):
            """Types with their shardings, without the mesh: eager scalars have none."""
            return [(str(t), t.weak_type) for t in types]

        def types(tree):
            return told(map(jax.typeof, jax.tree.leaves(tree)))

        def under_jit(f, *args):  # Nothing is compiled for types.
            return told(jax.make_jaxpr(jax.jit(f))(*args).out_avals)

        state = tx.init(params)
        assert under_jit(tx.init, params) == types(state)
        updates = grads.astype(jnp.float32) if row.wide_updates else grads
        expected = types((updates, state))
        assert types(update(grads, state, params)) == expected
        assert under_jit(update, grads, state, params) == expected


def draw_three(seed):
    """Sharded on one axis, on both and on none."""
    return {k: x for k, x in draw(seed).items() if k != "columns"}


def step_of(rows, txs):
    def step(params, state, grads):
        new_params, new_state = {}, {}
        for name, tx in txs.items():
            p = params[name]
            updates, new_state[name] = tx.update(
                grads[name], state[name], p, **rows[name].extra(p)
            )
            new_params[name] = gx.apply_updates(p, updates)
        return new_params, new_state

    return step


@functools.cache
def on_one_device(factory):
    """Parameters and states after three steps."""
    rows = FACTORIES[factory]
    txs = {name: row.make() for name, row in rows.items()}
    params = dict.fromkeys(rows, draw_three(0))
    state = {name: tx.init(params[name]) for name, tx in txs.items()}
    step = jax.jit(step_of(rows, txs))
    for seed in (1, 2, 3):
        params, state = step(params, state, dict.fromkeys(rows, draw_three(seed)))
    return jax.device_get((params, state))


# Every second factory has automatic axes, and the others explicit ones. The compiler
# cuts both alike, and the test of explicit types traces each row.
MODES = [
    (factory, mode)
    for i, factory in enumerate(FACTORIES)
    for mode in (("automatic", "explicit")[i % 2], "shard_map")
]
# These differ from another row of their factory in the arithmetic of each entry alone,
# or in when a gate acts, which no device asks another one. So they take turns: each has
# one of the modes. ``test_gates.py`` has worker_mean's methods on each kind of mesh.
TURNS = ["tf1", "clipvalue", "bf16", "schedule", "weight_decay", "grad_averaging"]
TURNS += ["nesterov", "eps_outside", "lr_in_momentum", "nested", "waiting", "two"]
TURNS += ["all", "latest", "ringleader"]


def rows_in(mode, factory):
    def has(row):
        if row.variant not in TURNS:
            return True
        return (mode == "shard_map") == (TURNS.index(row.variant) % 2 == 0)

    return {name: row for name, row in FACTORIES[factory].items() if has(row)}


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "mode"), MODES)
def test_every_row_agrees_with_one_device(factory, mode):
    rows = rows_in(mode, factory)
    made = {name: make(row, mode) for name, row in rows.items()}
    txs = {name: tx for name, (tx, *_) in made.items()}
    step = step_of(rows, txs)

    def place(seed):
        return {name: place(draw_three(seed)) for name, (*_, place) in made.items()}

    params, grads = place(0), place(1)
    state = {name: tx.init(params[name]) for name, tx in txs.items()}
    many = jax.jit(step, donate_argnums=(0, 1))
    if mode == "shard_map":
        places = jax.tree.map(lambda x: x.sharding.spec, (params, state))
        many = sharded(step, (*places, places[0]), places)
    # From here on it takes only arrays that lie as these do.
    many = many.lower(params, state, grads).compile()
    for seed in (1, 2, 3):
        params, state = many(params, state, place(seed))
    alone = [{name: tree[name] for name in rows} for tree in on_one_device(factory)]
    chex.assert_trees_all_close(
        jax.device_get([params, state]), alone, rtol=1e-6, atol=1e-6
    )
    # Devices tell one another nothing but sums over the mesh.
    text = many.as_text()
    for moved in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert moved not in text


AXES = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Auto, AxisType.Explicit),
}
WRAPPED = {
    "drop_stale": lambda tx: gx.drop_stale(tx, 0),
    "accumulator": lambda tx: gx.conditional_accumulator(tx, 1),
    "both": lambda tx: gx.drop_stale(gx.conditional_accumulator(tx, 1), 0),
}


@pytest.mark.quick_case("explicit-P('x', 'y')-True-False")
@pytest.mark.parametrize(
    ("axes", "spec", "compiled", "in_context"),
    pairwise(AXES, [P("x", "y"), P("x"), P()]),
    indirect=["in_context"],
    ids=str,
)
def test_gates_keep_the_placement_that_init_gave(axes, spec, compiled, in_context):
    """As optax tests its own gates, and in half precision, too."""
    on = jax.make_mesh((4, 2), ("x", "y"), axis_types=AXES[axes])
    txs = {gate: wrap(gx.adagrad(0.1)) for gate, wrap in WRAPPED.items()}
    maybe = jax.jit if compiled else lambda f: f

    def types(tree):
        return jax.tree.map(lambda x: (jax.typeof(x), x.sharding.spec), tree)

    @maybe
    def init(params):
        return {gate: tx.init(params) for gate, tx in txs.items()}

    @maybe
    def update(grads, state, params, local_step):
        updates, after = {}, {}
        for gate, tx in txs.items():
            updates[gate], after[gate] = tx.update(
                grads, state[gate], params, local_step=local_step
            )
        return updates, after

    with in_context(on):
        ones = np.ones((8, 4), "float16")
        params = jax.device_put(ones, NamedSharding(on, P("x", "y")))
        grads = jax.device_put(ones, NamedSharding(on, spec))
        state = init(params)
        # One push acts, and one comes too late.
        for step in (0, -1):
            updates, after = update(grads, state, params, jnp.int32(step))
            for u in updates.values():
                assert u.dtype == jnp.float16
                assert np.any(u) == (step == 0)
            if axes != "automatic" or not compiled:  # There the compiler decides.
                assert types(after) == types(state)


def test_global_norm():
    grads = draw(0)
    norm = sharded(
        functools.partial(gx.global_norm, axis_name=("x", "y")), (SPECS,), P()
    )
    expected = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads.values()))
    np.testing.assert_allclose(norm(grads), expected, rtol=1e-6)


@pytest.mark.figures
def test_a_clip_costs_one_collective_a_set_of_axes():
    tx = gx.clip_by_global_norm(1.0, axis_name="x")
    specs = {k: P("x") for k in "abc"}
    grads = {k: jnp.ones(8) for k in "abc"}
    update = sharded(lambda g: tx.update(g, tx.init(g))[0], (specs,), specs)
    text = update.lower(grads).compile().as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1


# Layers are stacked on the first axis, and each device has a part of some axis.
STACKED = {"layers": P("x", "y"), "entries": P(None, ("y", "x")), "plain": P("y")}
DEPTHS = {"layers": 1, "entries": 1, "plain": 0}


def draw_stacked(seed):
    rng = np.random.default_rng(seed)
    shapes = {"layers": (4, 6), "entries": (2, 8), "plain": (4,)}
    return {k: jnp.float32(rng.standard_normal(s)) for k, s in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "check_vma"),
    [({}, True), ({"clipnorm": 0.5}, False), ({"global_clipnorm": 0.5}, True)],
)
def test_specs_say_whether_layers_or_their_entries_are_sharded(clip, check_vma):
    one = gx.novograd(0.1, stacked_axes=DEPTHS, **clip)
    many = gx.novograd(0.1, stacked_axes=DEPTHS, axis_name=STACKED, **clip)
    state = one.init(draw_stacked(0))
    other = jax.jit(many.init)(put(draw_stacked(0), STACKED))
    places = jax.tree.map(lambda x: x.sharding.spec, other)
    assert optax.tree.get(places, "nu") == {
        "layers": P("x"),
        "entries": P(),
        "plain": P(),
    }
    update = sharded(
        many.update, (STACKED, places), (STACKED, places), check_vma=check_vma
    )
    alone = jax.jit(one.update)
    for seed in (1, 2):
        updates, state = alone(draw_stacked(seed), state)
        got, other = update(draw_stacked(seed), other)
        chex.assert_trees_all_close(
            jax.device_get((got, other)), (updates, state), rtol=1e-6, atol=1e-7
        )


@pytest.mark.slow
def test_pmap():
    """pmap does not track what varies, so the specs say it."""
    grads = {"sharded": draw(0)["rows"], "everywhere": draw(0)["all"]}
    tx = gx.clip_by_global_norm(0.5, axis_name={"sharded": P("i"), "everywhere": P()})
    axes = {"sharded": 0, "everywhere": None}
    clip = jax.pmap(
        lambda g: tx.update(g, tx.init(g))[0], "i", in_axes=(axes,), out_axes=axes
    )
    expected, _ = gx.clip_by_global_norm(0.5).update(grads, None)
    chex.assert_trees_all_close(clip(grads), expected, rtol=1e-6)


@pytest.mark.parametrize("trace", ["pmap", "check_vma=False"])
def test_axes_that_are_not_tracked_need_specs(trace):
    norm = functools.partial(gx.global_norm, axis_name="x")
    norm = (
        jax.pmap(norm, "x")
        if trace == "pmap"
        else sharded(norm, (P("x"),), P(), check_vma=False)
    )
    with pytest.raises(ValueError, match=r"axis 'x' does not track .*PartitionSpec"):
        norm(jnp.ones(8))


def test_stacked_layers_need_specs():
    tx = gx.scale_by_novograd(stacked_axes=1, axis_name="x")
    grads = {"w": jnp.ones((8, 2))}
    update = sharded(lambda g: tx.update(g, tx.init(g))[0], (P("x"),), P("x"))
    with pytest.raises(ValueError, match=r"\['w'\] stacks layers, and over x"):
        update(grads)


def test_specs_that_contradict_the_types():
    norm = functools.partial(gx.global_norm, axis_name={"w": P("x")})
    with pytest.raises(ValueError, match=r"\('x',?\) at \['w'\], which does not vary"):
        sharded(norm, (P(),), P())({"w": jnp.ones(8)})


@pytest.mark.every
@pytest.mark.parametrize("given", [3, None])
def test_axis_name_of_another_type(given):
    norm = functools.partial(gx.global_norm, axis_name={"a": given, "w": P("x")})
    with pytest.raises(TypeError, match=rf"PartitionSpec, got {given} for \['a'\]"):
        sharded(norm, (P("x"),), P())({"a": jnp.ones(8), "w": jnp.ones(8)})


def test_specs_from_a_function_of_the_updates():
    def specs(tree):
        return jax.tree.map(lambda x: P("x") if x.shape[0] == 2 else P(), tree)

    norm = functools.partial(gx.global_norm, axis_name=specs)
    norm = sharded(norm, ({"all": P(), "cut": P("x")},), P(), check_vma=False)
    tree = {"all": jnp.ones(5), "cut": jnp.ones((8, 3))}
    assert norm(tree) ** 2 == pytest.approx(5 + 8 * 3)
