"""What all gates have in common. Each gate has tests of its own beside this module."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._trees import states
from tests import in_numpy
from tests.conftest import half

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
GRADS = {"w": jnp.full((2, 3), 2.0), "b": jnp.full(3, -1.0)}
LARGEST = np.iinfo(np.int32).max
# The gate, where n pushes make a step; what a push needs besides local_step.
GATES = {
    "drop_stale": (lambda tx, n: gx.drop_stale(tx, 0), {}),
    "conditional_accumulator": (gx.conditional_accumulator, {}),
    "worker_mean": (lambda tx, n: gx.worker_mean(tx, 1, method="all"), {"worker": 0}),
    "accumulate": (functools.partial(gx.accumulate, skip_nonfinite=True), {}),
}
REFUSE_LATE_PUSHES = [gate for gate in GATES if gate != "accumulate"]


@functools.cache
def pushes_to_poison(gate):
    """A state after three pushes, and ways to push to it."""
    make, extra = GATES[gate]
    tx = make(optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.1)), 2)
    apply = functools.partial(gx.apply_gradients, tx, **extra)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        seen = gx.global_step(state)
        params, state = apply(GRADS, state, params, local_step=seen)

    def batched(*args):
        """A conditional under vmap computes both sides and selects."""
        added = jax.tree.map(lambda x: x[None], args)
        late = functools.partial(apply, local_step=0)
        return jax.tree.map(lambda x: x[0], jax.vmap(late)(*added))

    hows = {
        "update": functools.partial(tx.update, local_step=0, **extra),
        "apply": functools.partial(apply, local_step=0),
        "vmap": batched,
    }
    return params, state, {how: in_numpy.jit(push) for how, push in hows.items()}


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, 1e38])
@pytest.mark.parametrize("how", ["update", "apply", "vmap"])
@pytest.mark.parametrize("gate", REFUSE_LATE_PUSHES)
def test_no_entry_of_a_late_gradient_reaches_anything(gate, how, poison):
    params, state, hows = pushes_to_poison(gate)
    bad = jax.tree.map(lambda g: np.full_like(g, poison), GRADS)
    got, after = hows[how](bad, state, params)
    unchanged = jax.tree.map(np.zeros_like, GRADS) if how == "update" else params
    chex.assert_trees_all_equal(got, unchanged)
    counted = {"staleness": state.global_step} if gate == "drop_stale" else {}
    expected = state._replace(stale_count=jnp.int32(1), **counted)
    chex.assert_trees_all_equal(after, expected)


@pytest.mark.parametrize("gate", GATES)
def test_counters_saturate(gate):
    make, extra = GATES[gate]
    tx, counts_late = make(optax.sgd(0.1), 1), gate in REFUSE_LATE_PUSHES
    counter = "stale_count" if counts_late else "nonfinite_count"
    state = tx.init(PARAMS)._replace(
        global_step=jnp.int32(LARGEST), **{counter: jnp.int32(LARGEST)}
    )
    bad = {**GRADS, "b": jnp.full(3, jnp.nan)}
    for grads, local_step in ((GRADS, LARGEST), (bad, 0)):
        _, after = tx.update(grads, state, PARAMS, local_step=local_step, **extra)
        assert (after.global_step, getattr(after, counter)) == (LARGEST, LARGEST)


@pytest.mark.every
@pytest.mark.parametrize("gate", GATES)
def test_inner_receives_every_extra_argument(gate):
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    make, extra = GATES[gate]
    probe = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = make(optax.chain(probe, optax.sgd(0.1)), 1)
    tx.update(GRADS, tx.init(PARAMS), PARAMS, local_step=0, value=3, **extra)
    staleness = {"staleness"} if gate == "drop_stale" else set()
    assert seen.keys() == {"local_step", "value", *extra} | staleness
    assert seen["value"] == 3
    # A gate takes some for itself, and knows which its inner one takes.

    def strict(updates, state, params=None, *, value=None):
        return updates, state

    strict = optax.GradientTransformationExtraArgs(optax.identity().init, strict)
    with pytest.raises(TypeError, match="valu"):
        gx.apply_gradients(strict, GRADS, strict.init(PARAMS), PARAMS, valu=1)
    gated = make(strict, 1)
    extra = extra | {"valu": 1} | ({} if gate == "accumulate" else {"local_step": 0})
    with pytest.raises(TypeError, match=r"keyword 'valu', .*Did you mean 'value'\?"):
        gx.apply_gradients(gated, GRADS, gated.init(PARAMS), PARAMS, **extra)


def test_the_staleness_fraction_is_of_dropped_pushes_to_steps():
    """Those of the outermost gate that counts late ones."""
    inner = gx.conditional_accumulator(optax.sgd(0.1), 2)
    counted = inner.init(PARAMS)._replace(
        global_step=jnp.int32(2), stale_count=jnp.int32(1)
    )
    assert gx.staleness_fraction(counted) == np.float32(1 / 3)
    for tx in (gx.accumulate(inner, 1), gx.skip_spikes(inner)):
        around = tx.init(PARAMS)._replace(global_step=jnp.int32(4), inner_state=counted)
        assert gx.staleness_fraction(around) == np.float32(1 / 3)
    for tx in (gx.accumulate(optax.sgd(0.1), 1), gx.skip_spikes(optax.sgd(0.1))):
        assert gx.global_step(tx.init(PARAMS)) == 0
        with pytest.raises(ValueError, match=r"no stale_count: wrap .* in drop_stale"):
            gx.staleness_fraction(tx.init(PARAMS))


HOLD = {  # Gates that hold gradients, the field that does, and the leaves.
    "delayed": (gx.delayed(gx.adagrad(0.1), {"a": 2, "b": 0}), "ring", "a"),
    **{
        method: (gx.worker_mean(optax.sgd(0.5), 2, method=method), "table", "ab")
        for method in ("all", "latest", "ringleader")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "compiled", "kind", "in_context"),
    [  # Each kind of mesh eager and compiled, in its context and not.
        (gate, i < 2, kind, i % 2 == 0)
        for number, gate in enumerate(HOLD)
        for kind, i in ((AxisType.Auto, number), (AxisType.Explicit, 3 - number))
    ],
)
def test_on_a_mesh_held_gradients_lie_as_their_parameters(
    gate, compiled, kind, in_context
):
    tx, field, leaves = HOLD[gate]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)

    def step(params, state, grads, worker):
        extra = {"worker": worker, "local_step": np.int32(LARGEST)}
        read = {k: x for k, x in extra.items() if k in states.words(state)}
        return gx.apply_gradients(tx, grads, state, params, **read)

    if compiled:
        step = jax.jit(step, donate_argnums=(0, 1))

    def play(place):
        params = {k: place(np.zeros((8, 4), np.float32)) for k in "ab"}
        state = (jax.jit(tx.init) if compiled else tx.init)(params)
        types = jax.tree.map(jax.typeof, state)
        for t, worker in enumerate((0, 1, 1, 0, 0, 1)):
            rng = np.random.default_rng(t)
            grads = {k: place(np.float32(rng.standard_normal((8, 4)))) for k in "ab"}
            params, state = step(params, state, grads, np.int32(worker))
        assert jax.tree.map(jax.typeof, state) == types
        return params, state

    expected, _ = play(jnp.asarray)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        lie = NamedSharding(mesh, P("x", "y"))
        params, state = play(functools.partial(jax.device_put, device=lie))
    rows = NamedSharding(mesh, P(None, "x", "y"))
    for k in leaves:
        assert getattr(state, field)[k].sharding.is_equivalent_to(rows, 3)
        assert np.any(expected[k] != 0)
    chex.assert_trees_all_close(
        *map(jax.device_get, (params, expected)), rtol=1e-5, atol=1e-6
    )


def test_a_step_is_traced_unless_jit_is_disabled():
    seen = []

    def update(updates, state, params=None):
        seen.append(isinstance(2 * updates, jax.core.Tracer))
        return updates, state

    tx = gx.drop_stale(optax.GradientTransformation(optax.identity().init, update), 1)
    g = jnp.ones(2)
    for context, wanted in ((contextlib.nullcontext, True), (jax.disable_jit, False)):
        with context():
            tx.update(g, tx.init(g), local_step=0)
        assert {*seen} == {wanted}
        seen.clear()


@pytest.mark.every
@pytest.mark.parametrize("gate", ["delayed", "all"])
def test_held_gradients_have_the_boxes_of_their_parameters(gate):
    """Those of the gate's state name one axis more."""
    tx, field, _ = HOLD[gate]
    params = {k: linen.Partitioned(jnp.zeros((8, 4)), ("x", "y")) for k in "ab"}
    state = tx.init(params)
    assert getattr(state, field)["a"].names == (None, "x", "y")
    extra = {"worker": 0, "local_step": 0}
    read = {k: x for k, x in extra.items() if k in states.words(state)}
    step = functools.partial(gx.apply_gradients, tx, **read)
    new = jax.eval_shape(step, params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure((params, state))


@pytest.mark.every
@pytest.mark.parametrize(
    ("tx", "decision"),
    [
        (gx.accumulate(optax.trace(0.9), 2), "clamp"),
        (gx.drop_stale(optax.trace(0.9), 1), "convert_element_type"),
        (gx.delayed(optax.sgd(0.1), 1), "convert_element_type"),
    ],
    ids=["state", "no room", "ordered"],
)
def test_a_gate_with_room_and_state_stays_a_conditional(tx, decision):
    """XLA for GPU decides by an integer only, and then passes on what is skipped.

    It would find the bool behind a conversion, but not behind a clamp.
    """
    params = jnp.ones(3)
    update = functools.partial(tx.update, local_step=jnp.int32(0))
    traced = jax.make_jaxpr(update)(params, tx.init(params), params)
    (number,) = (eqn.invars[0] for eqn in traced.eqns if eqn.primitive.name == "cond")
    (made,) = (eqn for eqn in traced.eqns if number in eqn.outvars)
    assert made.primitive.name == decision


RATE = optax.constant_schedule(0.1)
WITHOUT_ARRAYS = {
    "accumulate": gx.accumulate(optax.sgd(RATE), 2),
    "conditional_accumulator": gx.conditional_accumulator(optax.sgd(RATE), 2),
    "drop_stale": gx.drop_stale(optax.sgd(RATE), 0),
    "skip_spikes": gx.skip_spikes(optax.sgd(RATE)),
}


@pytest.mark.parametrize("name", WITHOUT_ARRAYS)
@pytest.mark.parametrize("write", ["update", "apply_gradients"])
def test_without_arrays_of_state_update_has_no_conditional_on_tpu(name, write):
    """Updates would come out of it, in arrays of their own."""
    tx, params = WITHOUT_ARRAYS[name], jnp.ones(3)

    def step(grads, state):
        read = states.words(state) & {"local_step"}
        extra = dict.fromkeys(read, jnp.int32(0))
        if write == "update":
            return tx.update(grads, state, params, **extra)
        return gx.apply_gradients(tx, grads, state, params, **extra)

    traced = jax.jit(step).trace(params, tx.init(params))
    cases = {}
    for platform in ("tpu", "cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        cases[platform] = text.count("stablehlo.case")
    assert cases["cpu"] == cases["cuda"] == cases["tpu"] + (write == "update")


def as_on_tpu(*args, default, tpu=None, **others):
    """``jax.lax.platform_dependent``, as if this were a TPU."""
    return (tpu or default)(*args)


def test_side_effects_of_a_step_stay_behind_the_gate(monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_tpu)
    seen = []

    def update_fn(updates, state, params=None):
        jax.debug.callback(lambda x: seen.append(float(x)), updates)
        return updates, state

    shown = optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)
    tx, params = gx.accumulate(shown, 2), jnp.array(0.0)
    state, update = tx.init(params), in_numpy.jit(tx.update)
    for g in (1.0, 3.0, 5.0, 9.0):
        _, state = update(jnp.array(g), state, params)
    jax.effects_barrier()
    assert seen == [2.0, 7.0]


@pytest.mark.parametrize(
    ("compiled", "bad"), [(False, np.inf), (True, np.nan)], ids=["eager", "jit"]
)
def test_a_choice_lets_nothing_of_a_skipped_gradient_through(
    compiled, bad, monkeypatch
):
    """The schedule's count stays too: its next rate is 0.5."""
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_tpu)
    tx = gx.drop_stale(optax.sgd(lambda count: 1 / (1 + jnp.float32(count))), 0)
    params = jnp.zeros(3)
    update = in_numpy.jit(tx.update) if compiled else tx.update
    state, found = tx.init(params), []
    for g, local_step in ((1.0, 0), (bad, 0), (4.0, 1)):
        updates, state = update(jnp.full(3, g), state, params, local_step=local_step)
        found.append(updates)
    expected = [np.full(3, x, np.float32) for x in (-1.0, 0.0, -2.0)]
    chex.assert_trees_all_equal(found, expected)
    assert optax.tree.get(state, "count") == 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_choice_gives_the_numbers_of_the_conditional(dtype, monkeypatch):
    inner = optax.chain(gx.clip_by_global_norm(0.5), optax.sgd(RATE))

    def play():
        tx, params = gx.accumulate(inner, 3), {"w": jnp.ones((4, 8), dtype)}
        state, found = tx.init(params), []
        step = in_numpy.jit(tx.update)
        for t in range(7):
            g = jax.random.normal(jax.random.key(t), (4, 8), dtype)
            updates, state = step({"w": g}, state, params)
            params = optax.apply_updates(params, updates)
            found.append((updates, params))
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(
            jax.typeof, tx.init(params)
        )
        return found, state.global_step

    decided = play()
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_tpu)
    chex.assert_trees_all_equal(play(), decided)
    # Only the third and the sixth push moved anything.
    moved = [bool(jnp.any(updates["w"] != 0)) for updates, _ in decided[0]]
    assert moved == [False, False, True] * 2 + [False]


def without_extra_args(tx):
    """As wrappers of the time before optax had extra arguments."""

    def update(updates, state, params=None):
        return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


AROUND = {
    "itself": without_extra_args,
    "gate": lambda tx: gx.skip_spikes(without_extra_args(tx)),
    "sam": lambda tx: gx.skip_spikes(optax.contrib.sam(tx, optax.sgd(0.1))),
    "delayed": lambda tx: gx.delayed(without_extra_args(tx), 1),
    "master_weights": lambda tx: gx.master_weights(without_extra_args(tx)),
    "low_bit_state": lambda tx: gx.low_bit_state(without_extra_args(tx)),
}


@pytest.mark.every
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("around", "name"), half(AROUND, ["weight", "last", "local_step"])
)
def test_an_argument_of_a_gate_inside_is_not_lost(around, name):
    """The wrapper between takes no extra arguments, and optax would drop it."""
    inner = gx.accumulate(optax.sgd(0.1), 2)
    if name == "local_step":
        inner = gx.drop_stale(optax.sgd(0.1), 1)
    tx, value = AROUND[around](inner), {"weight": 2.0, "last": True}.get(name, 0)
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match=f"(?s){name}.*(would be lost|around delayed)"):
        gx.apply_gradients(tx, GRADS, state, PARAMS, **{name: value})
    if name != "local_step":  # Without it all is as before.
        apply = functools.partial(gx.apply_gradients, tx, **{name: None})
        jax.eval_shape(apply, GRADS, state, PARAMS)


def sum_of(params, x):
    return jnp.sum(params["w"]) * x + jnp.sum(params["b"])


def minimized(tx, **extra):
    return gx.minimize(sum_of, tx, donate=False)(PARAMS, tx.init(PARAMS), 1.0, **extra)


def local(tx, **extra):
    steps = gx.local_steps(sum_of, tx, donate=False)
    return steps(PARAMS, tx.init(PARAMS), jnp.ones(2), **extra)


def served(tx, **extra):
    server = gx.ParameterServer(PARAMS, gx.drop_stale(tx, 1))
    assert server.push(GRADS, 0).applied
    return server.push(GRADS, 0, **extra)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("train", [minimized, local, served])
def test_no_way_to_train_loses_a_weight(train):
    tx = without_extra_args(gx.accumulate(optax.sgd(0.1), 2))
    with pytest.raises(
        TypeError, match="weight is for a wrapper inside of without_ext"
    ):
        train(tx, weight=2.0)


@pytest.mark.slow
def test_a_gate_stays_one_in_a_plain_pair_of_functions():
    """``update`` is the gate, so the step of a push that is skipped is not run."""
    tx = gx.skip_spikes(optax.sgd(0.5))
    pair = optax.GradientTransformation(tx.init, tx.update)
    around = gx.accumulate(pair, 1)
    new, state = gx.apply_gradients(
        around, PARAMS, around.init(PARAMS), PARAMS, value=np.nan
    )
    chex.assert_trees_all_equal(new, PARAMS)
    assert optax.tree.get(state, "skipped_count") == 1


@pytest.mark.quick_case("nullcontext-nan")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("wrap", "loss"), [(contextlib.nullcontext, np.nan), (jax.disable_jit, 1.0)]
)
def test_a_typed_key_in_a_state_goes_through_a_gate(wrap, loss):
    """Outside of ``jit`` it is an array that cannot be cast."""
    noise = optax.add_noise(0.1, 0.1, jax.random.key(0))
    tx = gx.skip_spikes(noise)
    state = tx.init(PARAMS)
    expected, after = noise.update(GRADS, noise.init(PARAMS))
    if np.isnan(loss):
        expected = jax.tree.map(np.zeros_like, GRADS)
        after = noise.init(PARAMS)
    with wrap():
        updates, state = tx.update(GRADS, state, PARAMS, value=loss)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    keys = (optax.tree.get(x, "rng_key") for x in (state, after))
    np.testing.assert_array_equal(*map(jax.random.key_data, keys))
