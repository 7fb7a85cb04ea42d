"""Each framework trains as its page shows, and passes on what our gates need.

The tests run the page's own code: the block under each framework's name.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import re
import textwrap
import types
from typing import Any

import chex
import equinox as eqx
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import gradxform as gx
from gradxform.__main__ import load_digits  # The data of the demo.
from gradxform._trees import states
from tests import oracles
from tests.conftest import promotion
from tests.descriptors import DESCRIPTORS, RATE, TRANSFORMATIONS, Descriptor

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "frameworks.md").read_text()
KERAS = (DOCS / "keras.md").read_text()
TRAINERS = (DOCS / "trainers.md").read_text()
LOOP = (DOCS / "coming_from/tensorflow.md").read_text()
BLOCK = r"```python\n(?!>>> )(.*?)```"

# What the blocks of a page share, and the block under each heading.
SHARED, *_ = re.findall(BLOCK, PAGE, re.DOTALL)
BLOCKS = {
    name: block
    for page in (PAGE, KERAS)
    for name, block in re.findall(r"\n## (.+?)\n.*?" + BLOCK, page, re.DOTALL)
}


def linens_logits(left, x):
    kept = {"params": left["params"], "batch_stats": left["averages"]}
    return left["model"].apply(kept, x, False)


# The logits of the model that a block leaves.
MODELS = {
    "Flax NNX": lambda left, x: left["model"](x),
    "Flax Linen": lambda left, x: left["model"].apply(
        {"params": left["state"].params}, x
    ),
    "FP8 layers of Flax": lambda left, x: left["model"].apply(left["params"], x),
    "Haiku": lambda left, x: left["model"].apply(left["params"], x),
    "Equinox": lambda left, x: jax.vmap(left["model"])(x),
    "BatchNorm and Dropout": linens_logits,
    "Keras 3 on JAX": lambda left, x: left["model"](x),
    "Keras's fit": lambda left, x: left["model"](x),
    "Keras's models, asynchronously": lambda left, x: left["model"](x),
}


def run(name, batches, wrapped=""):
    """What the page's code leaves; ``wrapped`` may change its ``tx`` before it runs."""
    left = {"batches": batches}
    exec(SHARED + wrapped + BLOCKS[name], left)
    return left


def minibatches(images, labels, epochs):
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        for chosen in rng.permutation(len(images))[: 22 * 64].reshape(22, 64):
            yield images[chosen], labels[chosen]


def test_every_block_has_a_test():
    assert list(BLOCKS) == list(MODELS)
    assert SHARED in KERAS


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_trains_on_digits(name, request, monkeypatch):
    if name.startswith("Keras"):
        monkeypatch.setenv("KERAS_BACKEND", "jax")  # The block sets it for good.
        request.getfixturevalue("standard_promotion")  # Their layers need it.
    digits = load_digits()
    images, test_images = (
        x.reshape(-1, 64) for x in (digits.images, digits.test_images)
    )
    threads = name == "Keras's models, asynchronously"
    with promotion() if threads else contextlib.nullcontext():
        epochs = 20 if threads else 6
        left = run(name, minibatches(images, digits.labels, epochs))
        logits = MODELS[name](left, test_images)
    accuracy = np.mean(np.argmax(logits, axis=-1) == digits.test_labels)
    assert accuracy >= (0.94 if threads else 0.9)
    if threads:
        assert len(left["history"]) == 4
        assert left["history"][-1]["accuracy"] > 0.9
        assert left["run"].counts().accepted > 220


@pytest.mark.slow
def test_the_state_of_layers_is_carried():
    rng = np.random.default_rng(0)
    images = rng.standard_normal((2, 16, 64)).astype(np.float32)
    batches = list(zip(images, rng.integers(0, 10, (2, 16)), strict=True))
    start, *trained = (run("BatchNorm and Dropout", batches[:n]) for n in range(3))
    layer = jax.tree.map(np.float64, start["params"]["Dense_0"])
    mean = (images[0] @ layer["kernel"] + layer["bias"]).mean(axis=0)
    # Without the weight of its zero at the start.
    once, twice = (x["averages"]["BatchNorm_0"]["mean"] / 0.01 for x in trained)
    np.testing.assert_allclose(once, mean, rtol=1e-4, atol=1e-5)
    assert np.abs(twice - once).max() > 1e-3
    # Another key drops other units: the same batch and parameters, another loss.
    args = (start["params"], start["averages"])
    loss_fn = jax.jit(start["loss_fn"])
    losses = [
        loss_fn(*args, jax.random.key(seed), *batches[0])[0] for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_keras_carries_the_seed_of_its_dropout(standard_promotion, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    left = run("Keras 3 on JAX", [])
    x, labels = np.ones((8, 64), np.float32), np.zeros(8, int)
    params, averages = ([v.value for v in left[k]] for k in ("learning", "rest"))
    first, after = left["loss_fn"](params, averages, x, labels)
    assert left["loss_fn"](params, averages, x, labels)[0] == first
    assert left["loss_fn"](params, after, x, labels)[0] != first


@pytest.mark.slow
def test_nnxs_own_gradients_carry_the_state_of_layers():
    """As the page says. JAX's own gradient of the whole model does not carry it."""

    class Net(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jnp.sum(self.norm(x) ** 3)

    x = jnp.arange(6.0).reshape(2, 3)
    for value_and_grad, mean in (
        (nnx.value_and_grad, [0.015, 0.025, 0.035]),
        (gx.value_and_grad, [0, 0, 0]),
    ):
        net = Net()
        value_and_grad(lambda net: net(x))(net)
        np.testing.assert_allclose(net.norm.mean[...], mean, rtol=1e-6)


X = jnp.ones((4, 64))


def late():
    return gx.drop_stale(gx.novograd(0.1), max_staleness=0)


@pytest.mark.slow
def test_a_schedule_around_micro_batches_is_as_long_as_its_steps():
    """With the page's line, the last batch meets the last rate."""
    (line,) = re.findall(r"`(rate = .*?)`", PAGE)
    plain = re.search(r"^rate = .*$", SHARED, re.M)[0]
    ends = {}
    for name, code in (("micro", line), ("plain", plain)):
        named = {"optax": optax}
        exec(code, named)
        ends[name] = next(n for n in range(1000) if named["rate"](n) == 0)
    assert ends == {"micro": 110, "plain": 440}
    # accumulate's inner counts steps, not pushes.
    tx = gx.accumulate(gx.adagrad(optax.linear_schedule(1.0, 0.0, 2)), 4)
    params = {"w": jnp.ones(1)}
    state = tx.init(params)
    for _ in range(12):
        last, state = tx.update(params, state, params)
    assert last["w"] == 0
    assert optax.tree.get(state, "count") == 3


@dataclasses.dataclass
class NamedArray:
    """As haliax's: an array with names of its axes, which are static."""

    array: object
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})


jax.tree_util.register_dataclass(
    NamedArray, data_fields=["array"], meta_fields=["axes"]
)
BOXES = {
    "nnx": nnx.Param,
    "linen": lambda x: linen.Partitioned(x, ("x",) * np.ndim(x)),
    "haliax": lambda x: NamedArray(x, ("x",) * np.ndim(x)),
}
PREFIXES = {  # A transformation, and what stands in its prefix.
    "mask": (
        lambda axes: gx.novograd(0.1, weight_decay=0.1, mask=axes),
        lambda x: x.ndim > 1,
    ),
    "stacked_axes": (
        lambda axes: gx.novograd(0.1, stacked_axes=axes),
        lambda x: x.ndim - 1,
    ),
    "measure_norms": (
        lambda axes: optax.chain(gx.measure_norms(stacked_axes=axes), optax.sgd(0.1)),
        lambda x: x.ndim - 1,
    ),
    "num_steps": (lambda delays: gx.delayed(optax.sgd(0.1), delays), lambda x: x.ndim),
}


@pytest.mark.every
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_may_have_boxes_that_the_gradients_have_not(name, box):
    """As a mask from ``nnx.State`` has, while ``nnx.Optimizer`` takes them off."""
    make, value = PREFIXES[name]
    params = {"w": jnp.ones((3, 2)), "part": [jnp.ones(2)]}
    values = jax.tree.map(value, params)
    boxed = jax.tree.map(
        lambda x, v: jax.tree.map(lambda _: v, BOXES[box](x)), params, values
    )
    got, wanted = (make(prefix) for prefix in (boxed, values))
    state = got.init(params), wanted.init(params)
    for _ in range(3):
        results = [
            gx.apply_gradients(tx, params, s, params)
            for tx, s in zip((got, wanted), state, strict=True)
        ]
        state = [s for _, s in results]
        chex.assert_trees_all_equal(*results)
    assert not np.array_equal(results[0][0]["w"], params["w"])


@pytest.mark.slow
def test_what_learns_may_have_boxes():
    params = nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param)
    learns = jax.tree.map(lambda x: x.ndim > 1, params)
    pure = nnx.to_pure_dict(params)
    tx = optax.sgd(0.1)
    step = gx.minimize(
        lambda p: jnp.sum(p["kernel"]) + jnp.sum(p["bias"]), tx, trainable=learns
    )
    new, _, _ = step(jax.tree.map(jnp.copy, pure), tx.init(pure))
    np.testing.assert_allclose(new["kernel"], pure["kernel"] - 0.1, rtol=1e-6)
    np.testing.assert_array_equal(new["bias"], pure["bias"])


def test_two_values_of_a_prefix_for_one_leaf_are_refused():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    pair = optax.TraceState((True, False))
    for wrong in ({"w": {"x": True}, "b": True}, {"w": pair, "b": True}):
        tx = gx.novograd(0.1, weight_decay=0.1, mask=wrong)
        with pytest.raises(TypeError, match=r"mask has no value for params at \['w'\]"):
            tx.init(params)


@pytest.mark.slow
def test_nnx_forwards_extra_arguments():
    model = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, late(), wrt=nnx.Param)

    @nnx.jit
    def push(model, optimizer, local_step):
        grads = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
        optimizer.update(model, grads, local_step=local_step)

    start = jnp.copy(model.kernel[...])
    push(model, optimizer, 0)
    once = jnp.copy(model.kernel[...])
    push(model, optimizer, 0)  # One step late.
    assert jnp.all(once != start)
    assert jnp.all(model.kernel[...] == once)
    assert gx.global_step(optimizer.opt_state) == 1
    assert gx.staleness_fraction(optimizer.opt_state) == 0.5
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        optimizer.update(model, nnx.state(model, nnx.Param))


# State with fewer axes than its parameters, so the names of their axes do not fit it.
SHORT = {
    "nu": gx.novograd(0.1),
    "count": gx.contrib.delayed_nesterov(0.1, num_delay=2),
    "sum_of_squares": gx.adagrad(0.1, row_wise=True),
    "row_counts": gx.conditional_accumulator(gx.adagrad(0.1), 1, reduction="row_mean"),
}


def arrays(variables):
    """The arrays in a tree of variables."""
    return jax.tree.map(
        lambda variable: variable[...],
        variables,
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


@pytest.mark.slow
@pytest.mark.parametrize("field", SHORT)
def test_nnx_under_sharding_metadata(field):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
    with jax.set_mesh(jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))):
        model = nnx.Linear(64, 10, kernel_init=init, rngs=nnx.Rngs(0))
        tx = gx.drop_stale(SHORT[field], max_staleness=0)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        start, before = jnp.copy(model.kernel[...]), model.kernel[...].sharding
        grads = nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)
        optimizer.update(model, grads, local_step=0)
        # The same with trees of variables, and with trees of arrays.
        params = nnx.state(model)
        updated = [
            jax.tree.leaves(tx.update(g, tx.init(p), p, local_step=0))
            for g, p in ((grads, params), map(arrays, (grads, params)))
        ]
    chex.assert_trees_all_equal(*updated)
    assert jnp.all(model.kernel[...] != start)
    assert before.spec == jax.sharding.PartitionSpec("x", None)
    assert model.kernel[...].sharding.is_equivalent_to(before, 2)
    short = optax.tree.get(optimizer.opt_state, field)["kernel"]
    assert short[...].ndim < 2
    assert "out_sharding" not in short.get_metadata()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "error"),
    [(optax.novograd(0.1), "valid for values of rank"), (gx.novograd(0.1), None)],
    ids=["optax", "ours"],
)
def test_novograd_where_parameters_name_mesh_axes(tx, error):
    """As Flax's gemma and lm1b make their state: jitted, with the shardings named."""
    init = linen.with_logical_partitioning(linen.initializers.ones, ("embed", "mlp"))
    model, rules = linen.Dense(8, kernel_init=init), (("embed", None), ("mlp", "x"))
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))

    def create(key):
        params = model.init(key, X)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params):
        return jnp.mean(model.apply({"params": params}, X) ** 2)

    key = jax.random.key(0)
    specs = linen.get_partition_spec(jax.eval_shape(create, key))
    shardings = linen.logical_to_mesh_sharding(specs, mesh, rules)
    created = jax.jit(create, out_shardings=shardings)
    if error:  # The page on optax says so.
        with pytest.raises(ValueError, match=error):
            created(key)
        return
    state = created(key)
    after = state.apply_gradients(grads=jax.grad(loss_fn)(state.params))
    kernel = linen.unbox(after.params)["kernel"]
    # All entries of the gradient are equal: each becomes one over the root of their
    # number.
    np.testing.assert_allclose(kernel, 1 - 0.1 / np.sqrt(64 * 8), rtol=1e-5)


ROWS = {
    "ring": gx.delayed(gx.adagrad(0.1), {"kernel": 2, "bias": 0}),
    "table": gx.worker_mean(gx.adagrad(0.1), 1, method="all"),
}


@pytest.mark.slow
@pytest.mark.parametrize("field", [*SHORT, *ROWS])
def test_linen_under_partitioning_metadata(field):
    """Rings and tables name the mesh axes of their parameter, behind their own."""
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("x", None))
    model, tx = linen.Dense(10, kernel_init=init), (SHORT | ROWS)[field]
    boxed = model.init(jax.random.key(0), X)["params"]
    specs = optax.tree.get(linen.get_partition_spec(tx.init(boxed)), field)
    axes = (None, "x", None) if field in ROWS else ()
    assert specs["kernel"] == jax.sharding.PartitionSpec(*axes)
    assert "bias" not in specs or specs["bias"] == jax.sharding.PartitionSpec()

    def trained(params):
        state = tx.init(params)
        types, words = jax.tree.map(jax.typeof, state), states.words(state)
        for local_step in range(4):
            extra = {"worker": 0, "local_step": local_step}
            extra = {name: x for name, x in extra.items() if name in words}
            params, state = gx.apply_gradients(tx, params, state, params, **extra)
            assert jax.tree.map(jax.typeof, state) == types
        return jax.tree.leaves((params, state))

    plain = linen.unbox(boxed)
    chex.assert_trees_all_close(trained(boxed), trained(plain), rtol=1e-6)
    assert not np.allclose(trained(plain)[1], plain["kernel"])


def test_linens_own_train_state_forwards_nothing():
    params = {"w": jnp.ones(3)}

    def create(tx):
        return train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        create(late()).apply_gradients(grads=params, local_step=0)
    # If tx does not need the argument, Flax takes it for an unknown field.
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_norm'"):
        create(gx.clip_by_global_norm(1.0)).apply_gradients(grads=params, use_norm=2.0)


@pytest.mark.slow
def test_linens_subclass_forwards_and_skips_the_whole_step():
    own = run("Flax Linen", [])["TrainState"]
    params = {"w": jnp.ones(3)}
    state = own.create(apply_fn=None, params=params, tx=late())
    state = state.apply_gradients(grads=params, local_step=0)
    wild = {"w": jnp.full(3, jnp.nan)}
    after = state.apply_gradients(grads=wild, local_step=0)  # One step late.
    assert jnp.all(state.params["w"] < 1)
    chex.assert_trees_all_equal(after.params, state.params)
    chex.assert_trees_all_equal(
        after.opt_state.inner_state, state.opt_state.inner_state
    )
    assert (after.step, gx.global_step(after.opt_state)) == (2, 1)


def fp8_model():
    """Flax's own layer, its loss, and a batch."""
    fp8 = {"dot_general_cls": linen.fp8_ops.Fp8DirectDotGeneralOp}
    model = linen.Dense(3, **fp8)
    x = jax.random.normal(jax.random.key(1), (8, 4))

    def loss_fn(params, x):
        return jnp.mean(model.apply(params, x) ** 2)

    return model, model.init(jax.random.key(0), x), loss_fn, x


@pytest.mark.slow
def test_linens_subclass_replaces_the_numbers_of_fp8_layers_as_flax_does():
    model, params, loss_fn, x = fp8_model()
    own = run("Flax Linen", [])["TrainState"]
    states = [
        kind.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
        for kind in (own, train_state.TrainState)
    ]
    for factor in (1.0, 3.0):
        grads = [jax.grad(loss_fn)(s.params, factor * x) for s in states]
        pairs = zip(states, grads, strict=True)
        states = [s.apply_gradients(grads=g) for s, g in pairs]
    chex.assert_trees_all_equal(states[0].params, states[1].params)
    numbers = jax.tree.leaves(states[0].params["_overwrite_with_gradient"])
    assert max(map(np.max, numbers)) == np.max(np.abs(x)) * 3


@pytest.mark.slow
def test_micro_batches_give_fp8_layers_the_largest_numbers():
    _, params, loss_fn, x = fp8_model()
    left = run("FP8 layers of Flax", [], "tx = optax.sgd(0.1)\n")
    tx, states = left["both"], [left["both"].init(params)]
    for factor in (1.0, 3.0):  # Two steps of two micro-batches, the first the larger.
        grads = [jax.grad(loss_fn)(params, factor * part) for part in (x, x / 2)]
        most, mean = (
            jax.tree.map(how, *grads) for how in (np.maximum, lambda g, h: (g + h) / 2)
        )
        expected = most | {
            "params": jax.tree.map(
                lambda p, g: np.float64(p) - 0.1 * np.float64(g),
                *(tree["params"] for tree in (params, mean)),
            )
        }
        between = params
        for g in grads:
            chex.assert_trees_all_equal(between, params)
            between, state = gx.apply_gradients(tx, g, states[-1], between)
            states.append(state)
        chex.assert_trees_all_close(between, expected, rtol=1e-5)
        params = between


@pytest.mark.slow
def test_equinoxs_leaves_without_gradient_are_none():
    model = eqx.nn.MLP(64, 10, width_size=8, depth=1, key=jax.random.key(0))
    # Here the first layer is frozen as well, behind a gate and under weight decay.
    learns = jax.tree.map(eqx.is_inexact_array, model)
    learns = eqx.tree_at(lambda tree: tree.layers[0], learns, replace=False)
    params, static = eqx.partition(model, learns)
    tx = gx.drop_stale(gx.novograd(0.1, weight_decay=0.01), max_staleness=0)
    state = tx.init(params)

    @eqx.filter_jit
    def push(params, state, local_step):
        grads = eqx.filter_grad(
            lambda params: jnp.mean(jax.vmap(eqx.combine(params, static))(X) ** 2)
        )(params)
        assert grads.activation is grads.layers[0].weight is None
        return gx.apply_gradients(tx, grads, state, params, local_step=local_step)

    once, state = push(params, state, 0)
    twice, state = push(once, state, 0)  # One step late.
    assert jnp.all(once.layers[1].weight != model.layers[1].weight)
    assert eqx.tree_equal(once, twice)
    assert state.stale_count == 1


def test_a_gate_is_an_argument_of_filter_jit():
    grads = params = {"w": jnp.ones(3)}

    @eqx.filter_jit
    def push(tx, params, local_step):
        state = tx.init(params)._replace(global_step=jnp.int32(1))
        return gx.apply_gradients(tx, grads, state, params, local_step=local_step)

    after, state = push(gx.drop_stale(optax.sgd(0.1), 0), params, jnp.int32(0))
    assert state.stale_count == 1
    chex.assert_trees_all_equal(after, params)


class Affine(eqx.Module):
    """A model that can be called, and so can the masks made of it."""

    w: Any
    b: Any

    def __call__(self, x):
        return self.w @ x + self.b


@pytest.mark.slow
def test_trees_that_can_be_called_are_read():
    model = Affine(jnp.ones((2, 3)), jnp.ones(2))
    zeros = jax.tree.map(jnp.zeros_like, model)
    tx = gx.novograd(1.0, weight_decay=0.5, mask=Affine(True, False))
    updates, _ = tx.update(zeros, tx.init(model), model)
    assert jnp.all(updates.w == -0.5)
    assert jnp.all(updates.b == 0)
    # A function that is a tree is called.
    for depth in (Affine(1, 0), jax.tree_util.Partial(lambda n, p: Affine(n, 0), 1)):
        tx = gx.novograd(0.1, stacked_axes=depth)
        nu = optax.tree.get(tx.init(model), "nu")
        assert (nu.w.shape, nu.b.shape) == ((2,), ())
    step = gx.minimize(
        lambda model, x: jnp.sum(model(x)),
        optax.sgd(1.0),
        trainable=Affine(False, True),
        donate=False,
    )
    new, *_ = step(model, optax.sgd(1.0).init(model), jnp.ones(3))
    assert jnp.all(new.w == 1)
    assert jnp.all(new.b == 0)


@pytest.mark.slow
def test_the_loop_leaves_the_parameters_of_tensorflow():
    _, theirs, ours, _, gated, *_ = re.findall(BLOCK, LOOP, re.DOTALL)
    assert "compute_gradients" in theirs
    link = "tx = optax.chain(clip, tx)"
    assert f"`{link}`" in LOOP
    unprocessed = """
step, state = gx.minimize(loss_fn, tx), tx.init(params)
for batch in batches:
    params, state, loss = step(params, state, *batch)"""
    x = np.sin(np.arange(60.0, dtype=np.float32)).reshape(5, 4, 3)
    y = 10 * np.cos(np.arange(20.0, dtype=np.float32)).reshape(5, 4)
    start = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}

    # TensorFlow 1.15.5 computed these with the code of the left sides.
    clipped = {"w": np.array([0.009013183, 0.08587768, 0.08078636]), "b": 0.11789924}
    as_it_is = {"w": np.array([-0.01362059, 0.08299472, 0.07433566]), "b": 0.16171496}
    left = {}
    for code, expected in (
        (ours, clipped),
        (unprocessed, as_it_is),
        (f"{link}\n{unprocessed}", clipped),
        (gated, clipped),
    ):
        left |= {"params": start, "batches": zip(x, y, strict=True)}
        exec(code, left)
        chex.assert_trees_all_close(left["params"], expected, rtol=1e-5)
    # A push that is three steps late does nothing.
    late = left["apply_gradients"](left["params"], left["state"], left["grads"], 2)
    chex.assert_trees_all_equal(late[0], left["params"])
    assert late[1].stale_count == 1


@pytest.mark.slow
def test_jaspers_config_trains_by_its_formulas():
    page = (DOCS / "coming_from/novograd.md").read_text()
    (code,) = re.findall(BLOCK, page, re.DOTALL)
    left = {}
    exec(code.replace("steps = 100_000", "steps = 4"), left)
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 2)), "b": np.zeros(2)}
    expected, mu = params, jax.tree.map(np.zeros_like, params)
    params = jax.tree.map(np.float32, params)
    state = left["tx"].init(params)
    for step in range(6):
        grads = {k: 3 * rng.standard_normal(w.shape) for k, w in expected.items()}
        pushed = jax.tree.map(np.float32, grads)
        updates, state = left["tx"].update(pushed, state, params)
        params = gx.apply_updates(params, updates)
        rate = (0.02 - 1e-5) * max(0, 1 - step / 4) ** 2 + 1e-5
        for k, g in grads.items():
            w, norm = expected[k], np.linalg.norm(g)
            limit = 0.001 * np.linalg.norm(w) / (rate * (norm + 1e-7))
            scaled = min(max(limit, 1e-7), 1) * g
            normalized = scaled / np.sqrt(np.sum(scaled**2) + 1e-8)
            mu[k] = 0.95 * mu[k] + normalized + 0.001 * w
            expected[k] = w - rate * mu[k]
        chex.assert_trees_all_close(params, expected, rtol=1e-4, atol=1e-6)


def t5():
    """As T5X: encoder and decoder of Linen, the layers along axis 1."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, seen):
            y = linen.Dense(16)(x) + linen.Dense(16, use_bias=False)(seen)
            return x + jnp.tanh(y), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.scan(
                linen.remat(Layer, prevent_cse=False),
                variable_axes={"params": 1},
                split_rngs={"params": True},
                in_axes=linen.broadcast,
                length=3,
            )
            seen, _ = stack(name="encoder")(x, x)
            return linen.Dense(1)(stack(name="decoder")(jnp.cos(x), seen)[0])

    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    return params, lambda params, x: model.apply({"params": params}, x)


def vit():
    """As big_vision's ViT: the activations of each layer come out of the scan."""

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = x + linen.Dense(16)(linen.gelu(linen.Dense(64)(linen.LayerNorm()(x))))
            return y, {"+mlp": y}

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.scan(
                linen.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, out = stack(name="encoderblock")(x)
            parts = [jax.tree.map(lambda o, n=n: o[n], out) for n in range(3)]
            return linen.Dense(1)(x) + 0.1 * parts[1]["+mlp"].sum(-1, keepdims=True)

    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    return params, lambda params, x: model.apply({"params": params}, x)


BATCHES = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float32)


def norm(tree):
    """Over all entries, in double precision."""
    return oracles.global_norm(dict(enumerate(map(np.float64, jax.tree.leaves(tree)))))


def indented(after):
    """The indented lines of the page that follow these words."""
    lines = TRAINERS.split(after, 1)[1].lstrip("\n").splitlines()
    taken = itertools.takewhile(lambda line: not line or line[:4] == "    ", lines)
    return textwrap.dedent("\n".join(taken))


@pytest.mark.slow
def test_the_lines_for_big_vision_log_the_norms_of_its_own(standard_promotion):
    params, apply = vit()
    params, x = {"Transformer": params}, BATCHES[0]

    def loss_fn(params):
        return jnp.mean((apply(params["Transformer"], x) - 1) ** 2)

    names = {"gx": gx, "jax": jax, "optax": optax, "loss_fn": loss_fn}
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    names |= {"tx": clipped, "params": params, "opt": clipped.init(params)}
    before, after = names | {"measurements": {}}, names | {"measurements": {}}
    exec(indented("In big_vision these lines of `update_fn`"), before)
    exec(indented("This goes behind `bv_optax.make`:"), after)
    after["opt"] = after["tx"].init(params)
    exec(indented("become these:"), after)
    exec(indented("In `update_fn` the state has them:"), after)
    chex.assert_trees_all_close(after["params"], before["params"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=2e-6)
    logged = after["measurements"]
    for name, tree in ("l2_grads", before["grads"]), ("l2_updates", before["updates"]):
        np.testing.assert_allclose(logged[name], norm(tree), rtol=1e-5)


class T5XsState(flax.struct.PyTreeNode):
    """As T5X's ``OptimizerState``."""

    step: Any
    param_states: Any


class T5XsOptimizer(flax.struct.PyTreeNode):
    """As T5X's ``Optimizer``, with its wrapper of a transformation of optax."""

    optimizer_def: Any = flax.struct.field(pytree_node=False)
    state: Any
    target: Any

    def apply_gradient(self, grads):
        tx = self.optimizer_def.optax_optimizer
        updates, kept = tx.update(grads, self.state.param_states, self.target)
        target = optax.apply_updates(self.target, updates)
        return self.replace(target=target, state=T5XsState(self.state.step + 1, kept))


class T5XsTrainState(flax.struct.PyTreeNode):
    """As T5X's ``FlaxOptimTrainState``."""

    _optimizer: T5XsOptimizer

    @property
    def params(self):
        return self._optimizer.target


@pytest.mark.slow
def test_the_lines_for_t5x_leave_its_own_train_state(standard_promotion):
    params, apply = t5()
    tx = optax.chain(optax.clip(0.1), optax.adamw(1e-2))

    def loss_fn(params, batch, dropout_rng):
        del dropout_rng
        loss = jnp.mean((apply(params, batch["inputs"]) - 1) ** 2)
        return loss, {"loss": loss, "examples": len(batch["inputs"])}

    wrapper = types.SimpleNamespace(optax_optimizer=tx)
    state = T5XsState(jnp.int32(0), tx.init(params))
    begun = T5XsTrainState(T5XsOptimizer(wrapper, state, params))
    names = {"gx": gx, "model": types.SimpleNamespace(loss_fn=loss_fn)}
    names["layers"] = ["encoder", "decoder"]
    lines = indented("take the place of `accumulate_grads_microbatched`:")

    @functools.partial(jax.jit, donate_argnums=0)  # As its partitioner does it.
    def theirs(train_state, batch, dropout_rng):
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (_, metrics), grads = gradient(train_state.params, batch, dropout_rng)
        optimizer = train_state._optimizer.apply_gradient(grads)
        return train_state.replace(_optimizer=optimizer), metrics

    @functools.partial(jax.jit, donate_argnums=0)
    def ours(train_state, batch, dropout_rng):
        left = names | {"train_state": train_state, "batch": batch}
        left["dropout_rng"] = dropout_rng
        exec(lines, left)
        return left["new_train_state"], left["metrics"]

    kept = [jax.tree.map(jnp.copy, begun) for _ in range(2)]
    for x in BATCHES:
        batch, key = {"inputs": x}, jax.random.key(0)
        kept, metrics = zip(
            *(f(k, batch, key) for f, k in zip((theirs, ours), kept, strict=True)),
            strict=True,
        )
        chex.assert_trees_all_close(*metrics, rtol=2e-6)
    assert jax.tree.structure(kept[1]) == jax.tree.structure(begun)
    assert kept[1]._optimizer.state.step == 3
    chex.assert_trees_all_close(*kept, rtol=2e-5, atol=2e-5)


class MaxTextsModel(nnx.Module):
    """As MaxText's in NNX: scanned layers, and a count beside the parameters."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs))
        layers = nnx.split_rngs(splits=3)(make)(rngs)
        self.decoder = nnx.Dict(layers=layers, norm=nnx.Linear(16, 1, rngs=rngs))
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return x + nnx.tanh(layer(x))

        self.seen[...] += 1
        return self.decoder.norm(forward(self.decoder.layers, x))


@pytest.mark.slow
def test_the_lines_for_maxtext_log_its_norms(standard_promotion):
    def loss_fn(model, config, data, dropout_rng, params, is_train):
        del config, dropout_rng, params, is_train
        loss = jnp.mean((model(data) - 1) ** 2)
        return loss, {"total_weights": data.size}

    def make():
        model = MaxTextsModel(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        return types.SimpleNamespace(model=model, optimizer=optimizer)

    threshold = 0.1
    config = types.SimpleNamespace(gradient_clipping_threshold=threshold)
    names = {"gx": gx, "nnx": nnx, "optax": optax, "jnp": jnp, "config": config}
    names |= {"loss_fn": loss_fn, "layers": ["decoder/layers"]}
    lines = indented("`state.apply_gradients`:")
    logged = indented("first:")
    theirs, ours = make(), make()
    for x in BATCHES:
        gradient = nnx.value_and_grad(loss_fn, has_aux=True)
        given = (theirs.model, config, x, None, None)
        (loss, aux), raw = gradient(*given, is_train=True)
        grads, _ = optax.clip_by_global_norm(threshold).update(raw, optax.EmptyState())
        theirs.optimizer.update(theirs.model, grads)
        left = names | {"state": ours, "data": x, "scalar_metrics": {}}
        exec(lines, left)
        exec(logged, left)
        assert left["aux"] == aux
        np.testing.assert_allclose(left["loss"], loss, rtol=2e-6)
        for name, tree in ("grad_norm", grads), ("raw_grad_norm", raw):
            got = left["scalar_metrics"][f"learning/{name}"]
            np.testing.assert_allclose(got, norm(tree), rtol=1e-5)
    # As its step returns them.
    for part in ("model", "optimizer"):
        pair = (getattr(state, part) for state in (left["new_state"], theirs))
        new, wanted = (nnx.as_pure(nnx.state(node)) for node in pair)
        chex.assert_trees_all_close(new, wanted, rtol=2e-5, atol=2e-5)
    assert ours.model.seen[...] == ours.optimizer.step[...] == 3


class LevantersState(eqx.Module):
    """As levanter's ``TrainerState``."""

    step: Any
    model: Any
    optimizer: Any = eqx.field(static=True)
    opt_state: Any
    training_key: Any


@pytest.mark.slow
def test_the_lines_for_levanter_leave_its_own_trainer_state(standard_promotion):
    made = jax.vmap(lambda key: eqx.nn.Linear(16, 16, key=key))
    layers = made(jax.random.split(jax.random.key(0), 4))
    model = {"transformer": {"layers": layers}, "name": "levanter's"}
    tx = optax.adamw(1e-2)

    def loss_fn(model, x, key):
        arrays, rest = eqx.partition(model["transformer"]["layers"], eqx.is_array)
        # Haliax's Stacked reads the first layer for its shapes, and drops it.
        jax.tree.map(lambda w: jnp.take(w, 0, axis=0), arrays)

        def layer(x, part):
            return x + jnp.tanh(jax.vmap(eqx.combine(part, rest))(x)), None

        y, _ = jax.lax.scan(eqx.filter_checkpoint(layer), x, arrays)
        return jnp.mean((y - jax.random.normal(key, y.shape)) ** 2)

    begun = tx.init(eqx.filter(model, eqx.is_inexact_array))
    start = LevantersState(jnp.int32(0), model, tx, begun, jax.random.key(1))
    names = {"gx": gx, "eqx": eqx, "dataclasses": dataclasses, "batch_kwargs": {}}
    names["self"] = types.SimpleNamespace(loss_fn=loss_fn)
    lines = indented("`_compute_gradients_microbatched` and of `take_step`:")

    @eqx.filter_jit
    def ours(state, *batch):
        key, new_key = jax.random.split(state.training_key)
        left = names | {"state": state, "model": state.model, "batch": batch}
        left["key"] = key
        exec(lines, left)
        new = dataclasses.replace(left["new_state"], training_key=new_key)
        return left["loss"], new

    @eqx.filter_jit
    def theirs(state, *batch):
        key, new_key = jax.random.split(state.training_key)
        loss, grads = eqx.filter_value_and_grad(loss_fn)(state.model, *batch, key=key)
        arrays = eqx.filter(state.model, eqx.is_inexact_array)
        updates, kept = tx.update(grads, state.opt_state, params=arrays)
        new = eqx.apply_updates(state.model, updates)
        return loss, LevantersState(state.step + 1, new, tx, kept, new_key)

    kept = [start, start]
    for x in BATCHES:
        (loss, first), (wanted, second) = ours(kept[0], x), theirs(kept[1], x)
        np.testing.assert_allclose(loss, wanted, rtol=2e-6)
        kept = [first, second]
    arrays = [eqx.filter(state, eqx.is_inexact_array) for state in kept]
    chex.assert_trees_all_close(*arrays, rtol=2e-5, atol=2e-5)
    assert kept[0].step == 3
    assert eqx.tree_equal(kept[0].training_key, kept[1].training_key)
    assert jax.tree.structure(kept[0]) == jax.tree.structure(kept[1])


def rules_of_t5x():
    """The rules of the page, in a module that has T5X's name for their table."""
    rules = {optax.EmptyState: lambda state, axes: state}
    table = types.SimpleNamespace(_RULES=rules)
    module = types.SimpleNamespace(OptaxStatePartitionRules=table)
    names = {"gx": gx, "jax": jax, "t5x": types.SimpleNamespace(optimizers=module)}
    exec(indented("which of its fields are like the parameters:"), names)
    return rules


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx", [gx.adagrad(0.1, global_clipnorm=1.0), gx.novograd(0.1, global_clipnorm=1.0)]
)
def test_the_rules_for_t5x_shard_a_state_like_its_parameters(tx):
    rules, params = rules_of_t5x(), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    axes = {"w": "axes of w", "b": "axes of b"}
    state = tx.init(params)
    parts = jax.tree.leaves(state, is_leaf=lambda node: type(node) in rules)
    assert all(type(part) in rules for part in parts)
    for part in parts:
        derived = rules[type(part)](part, axes)
        assert type(derived) is type(part)
        # T5X writes the axes into a dict of the state, and reads them from it.
        read = flax.serialization.to_state_dict(derived)
        assert flax.serialization.from_state_dict(part, read) == derived
        for name, field in zip(part._fields, part, strict=True):
            like = jax.tree.map(jnp.shape, field) == jax.tree.map(jnp.shape, params)
            none = jax.tree.map(lambda _: None, field)
            assert getattr(derived, name) == (axes if like else none)


def needing_params():
    """The names of the page's table, by when they need parameters."""
    _, table = TRAINERS.split("| needs `params` | when |\n", 1)
    lines = table.splitlines()[1:]
    rows = itertools.takewhile(lambda line: line.startswith("| "), lines)
    return {
        name: when
        for names, when in (row.strip("| ").split(" | ") for row in rows)
        for name in re.findall(r"`(\w+)`", names)
    }


def without_params(row, **more):
    """Calls the update of a row as brax does, or returns its error."""
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}
    tx = row.make(**more)
    try:
        tx.update(params, tx.init(params), **row.extra(params))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_the_page_says_who_needs_params(name):
    assert {*needing_params()} <= {*TRANSFORMATIONS}
    rows = [row for row in DESCRIPTORS if row.name == name]
    plain, when = rows[0], needing_params().get(name, "never")
    known = plain.parameters()
    assert ("needs params" in without_params(plain)) == when.startswith("always")
    decays = "weight_decay" in known
    assert decays == (when == "if `weight_decay` is not 0")
    if decays:
        assert "needs params" in without_params(plain, weight_decay=0.1)
    if "inner" in known and when == "never":
        wrapped = dataclasses.replace(
            plain, kwargs=plain.kwargs | {"inner": Descriptor("ftrl", RATE)}
        )
        assert "needs params" in without_params(wrapped)


@pytest.mark.slow
def test_brax_reads_and_sets_the_rate_and_gives_no_params(standard_promotion):
    """As its ``gradient_update_fn`` and its schedule by the divergence do."""
    code = re.search(r">>> def optimizer\(.*?\n(?=>>> tx)", TRAINERS, re.DOTALL)[0]
    names = {"gx": gx, "optax": optax}
    exec(re.sub(r"^(>>>|\.\.\.) ", "", code, flags=re.M), names)

    def trained(make):
        tx, params = optax.inject_hyperparams(make)(learning_rate=1e-3), jnp.ones(3)
        state = tx.init(params)
        for factor in (1.0, 1.5, 1.5):
            grads = jax.grad(lambda p: jnp.sum(p**2))(params)
            rate = state.hyperparams["learning_rate"]
            state.hyperparams["learning_rate"] = rate * factor
            updates, state = tx.update(grads, state)
            params = optax.apply_updates(params, updates)
        return params, state.hyperparams["learning_rate"]

    ours, wanted = trained(names["optimizer"]), trained(optax.adam)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-6)
