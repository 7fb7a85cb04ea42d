"""``minimize(layers=...)`` of losses with several scans, checkpoints, frozen stacks."""

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
from tests.training.test_layers import check, train
from tests.training.test_on_host import OLD

pytestmark = pytest.mark.usefixtures("standard_promotion")

WIDTH = 8
X = jnp.asarray(np.random.default_rng(1).standard_normal((3, WIDTH)), jnp.float32)


def start(dtype="float32"):
    """Two stacks of other lengths, a stack of experts, and dense leaves around them."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(0.3 * rng.standard_normal(shape), dtype)

    return {
        "emb": draw(WIDTH, WIDTH),
        "encoder": {"w": draw(3, WIDTH, WIDTH), "b": draw(3, WIDTH)},
        "between": draw(WIDTH),
        "decoder": {"w": draw(2, WIDTH, WIDTH), "cross": draw(2, WIDTH, WIDTH)},
        "up": {"w": draw(3, WIDTH, WIDTH), "skip": draw(3, WIDTH, WIDTH)},
        "experts": {"w": draw(2, 4, WIDTH, WIDTH), "gate": draw(2, WIDTH, 4)},
        "head": draw(WIDTH, WIDTH),
    }


def error(p, x):
    return jnp.mean((x.astype(jnp.float32) @ p["head"] - 1) ** 2)


def encode(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    return jax.lax.scan(layer, x @ p["emb"], p["encoder"])[0]


def decode(p, x, seen):
    """Each layer reads what the encoder gave."""

    def layer(x, w):
        return x + jnp.tanh(x @ w["w"] + seen @ w["cross"]), None

    return jax.lax.scan(layer, x, p["decoder"])[0]


def encoder_and_decoder(p, x):
    seen = encode(p, x) * p["between"]
    return error(p, decode(p, jnp.cos(x) @ p["emb"], seen))


def one_after_another(p, x):
    return error(p, decode(p, encode(p, x), p["between"]))


def with_experts(p, x):
    """Dense layers, then experts, whose balance is in the loss."""

    def layer(carry, w):
        x, balance = carry
        part = jax.nn.softmax(x @ w["gate"])
        y = jnp.einsum("be,bd,edf->bf", part, x, w["w"])
        return (x + jnp.tanh(y), balance + jnp.sum(part.mean(0) ** 2)), part

    (x, balance), parts = jax.lax.scan(layer, (encode(p, x), 0.0), p["experts"])
    return error(p, x) + 0.1 * balance + 0.01 * jnp.sum(parts[-1] ** 3)


def down_and_up(p, x):
    """The second scan goes backwards, and reads what each layer of the first gave."""

    def down(x, w):
        x = x + jnp.tanh(x @ w["w"] + w["b"])
        return x, x * p["between"]

    def up(x, each):
        w, skipped = each
        return jnp.tanh(x @ w["w"].T) + skipped @ w["skip"], x.mean()

    x, skipped = jax.lax.scan(down, x @ p["emb"], p["encoder"])
    x, means = jax.lax.scan(up, x, (p["up"], skipped), reverse=True)
    return error(p, x) + means.sum()


def checkpointed(p, x):
    """One checkpoint around everything, and others inside and between."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    @functools.partial(jax.checkpoint, policy=policy)
    def between(x):
        return jnp.tanh(jnp.sin(x) @ p["emb"]) * p["between"]

    @jax.checkpoint
    def both(p, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), p)
        seen = between(jax.checkpoint(encode)(half, x))
        return decode(half, jnp.cos(seen), seen)

    return jax.checkpoint(lambda p, x: error(p, both(p, x)), policy=policy)(p, x)


def one_under_a_checkpoint(p, x):
    seen = jax.checkpoint(jax.jit(encode))(p, x)
    return error(p, decode(p, x, jax.checkpoint(jnp.sin)(seen)))


def three(p, x):
    @jax.jit
    def up(x, w):
        return jnp.tanh(x @ w["w"] + x @ w["skip"]), None

    x = jax.checkpoint(encode)(p, x)
    x, _ = jax.lax.scan(up, decode(p, x, x), p["up"], unroll=3)
    return error(p, x)


LAYERS = {
    encoder_and_decoder: ["encoder", "decoder"],
    one_after_another: ["encoder", "decoder"],
    with_experts: ["encoder", "experts"],
    down_and_up: ["encoder", "up"],
    checkpointed: ["encoder", "decoder"],
    one_under_a_checkpoint: ["encoder", "decoder"],
    three: ["encoder", "decoder", "up"],
}


def check_loss(loss_fn, tx, layers=None, make=start, **how):
    how = {"layers": layers or LAYERS[loss_fn], "batch": [X]} | how
    check(loss_fn, tx, make, rtol=2e-5, **how)


@pytest.mark.parametrize("loss_fn", LAYERS, ids=lambda f: f.__name__)
def test_several_scans(loss_fn):
    check_loss(loss_fn, optax.adamw(0.01))


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", LAYERS, ids=lambda f: f.__name__)
def test_each_scan_by_itself(loss_fn):
    """The other scan is a dense part."""
    for name in LAYERS[loss_fn]:
        check_loss(loss_fn, optax.sgd(0.1), [name])


def stacked(params):
    names = {"encoder", "decoder", "up", "experts"}
    return {
        k: jax.tree.map(lambda _, k=k: int(k in names), v) for k, v in params.items()
    }


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adagrad": gx.adagrad(0.1),
    "novograd": gx.novograd(0.1, stacked_axes=stacked),
    "accumulate": gx.accumulate(optax.adamw(0.01), num_required=2),
    "drop_stale": gx.drop_stale(optax.adamw(0.01), max_staleness=4),
    "measure_norms": optax.chain(
        gx.measure_norms(stacked_axes=stacked), optax.sgd(0.1)
    ),
    "partition": optax.partition(
        {"a": optax.adam(0.01), "b": optax.sgd(0.1)},
        lambda p: {k: "a" if k == "decoder" else "b" for k in p},
    ),
}
TWO_PASSES = {
    "clip_by_global_norm": gx.clip_by_global_norm(0.1),
    "skip_spikes": gx.skip_spikes(optax.adam(0.01)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.01), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loss_fn", [encoder_and_decoder, down_and_up])
def test_any_optimizer(loss_fn, name):
    extra = {"local_step": 0} if name == "drop_stale" else {}
    check_loss(loss_fn, OPTIMIZERS[name], extra=extra)


@pytest.mark.parametrize("name", TWO_PASSES)
@pytest.mark.parametrize("loss_fn", [with_experts, checkpointed])
def test_two_passes(loss_fn, name):
    """A sum goes over the layers of both."""
    tx = TWO_PASSES[name]
    if name.startswith("clip"):
        tx = optax.chain(tx, optax.adam(0.01))
    check_loss(loss_fn, tx, two_passes=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [encoder_and_decoder, three])
def test_master_weights(loss_fn):
    tx = gx.master_weights(optax.adamw(0.01))
    names = LAYERS[loss_fn]
    make = functools.partial(start, "bfloat16")
    wanted, got = (train(loss_fn, tx, make(), X, layers=x) for x in ((), names))
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, wanted)
    got, wanted = (gx.get_master_weights(p, state) for p, state, _ in (got, wanted))
    chex.assert_trees_all_close(got, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("is_explicit", [False, True])
@pytest.mark.parametrize("loss_fn", [encoder_and_decoder, checkpointed])
def test_on_a_mesh(loss_fn, is_explicit):
    """The batch is divided, and so are the parameters on automatic axes."""
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    x = jnp.concatenate([X, X, X[:2]])

    def make():
        def put(p):
            spec = P() if is_explicit else P(*[None] * (p.ndim - 1), "x")
            return jax.device_put(p, NamedSharding(mesh, spec))

        return jax.tree.map(put, start())

    with jax.set_mesh(mesh):
        batch = [jax.device_put(x, NamedSharding(mesh, P("x")))]
        check_loss(loss_fn, optax.adamw(0.01), make=make, batch=batch)


@pytest.mark.skipif(OLD, reason="JAX keeps no result in the host's memory")
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("loss_fn", [encoder_and_decoder, down_and_up])
def test_state_on_the_host(loss_fn, kind):
    """With parameters on the device, and there, too."""
    tx, names = optax.adamw(0.01), LAYERS[loss_fn]
    step = gx.minimize(loss_fn, tx, layers=names)
    params, state = start(), gx.on_host(tx.init(start()), min_size=16)
    if kind != "device":
        params = gx.on_host(params, min_size=16)
    for _ in range(4):
        params, state, _ = step(params, state, X)
    for name in names:
        found = {p.sharding.memory_kind for p in jax.tree.leaves(params[name])}
        assert found == {kind}
    wanted, *_ = train(loss_fn, tx, start(), X)
    chex.assert_trees_all_close(
        jax.device_get(params), jax.device_get(wanted), rtol=2e-5, atol=2e-6
    )


# Frozen parts.


def adapted(p, x):
    """The base is frozen, and each of its layers has two small matrices that learn."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p["base"])

    def layer(x, each):
        w, lora = each
        y = x @ w["w"].astype(x.dtype) + (x @ lora["a"]) @ lora["b"]
        return x + jnp.tanh(y) * w["gain"].astype(x.dtype), None

    x, _ = jax.lax.scan(layer, x, (half, p["lora"]))
    return error(p, x)


def with_base():
    params = start()
    return {
        "base": {"w": params["encoder"]["w"], "gain": params["encoder"]["b"]},
        "lora": {"a": params["encoder"]["w"][..., :2], "b": params["up"]["w"][:, :2]},
        "head": params["head"],
    }


BASE = {"base": False, "lora": True, "head": True}


@pytest.mark.parametrize(
    "layers", [["lora"], ["base"], ["base/w", "lora"], ["base", "lora"]]
)
def test_a_frozen_base(layers):
    check_loss(adapted, optax.adamw(0.01), layers, with_base, trainable=BASE)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["encoder", "decoder"])
def test_a_frozen_stack_of_two(frozen):
    trainable = {name: name != frozen for name in start()}
    check_loss(encoder_and_decoder, optax.adamw(0.01), trainable=trainable)


@pytest.mark.parametrize(
    "layers", [[], ["lora"], pytest.param(["base", "lora"], marks=pytest.mark.every)]
)
@pytest.mark.parametrize("tx", [optax.adamw(0.01), gx.accumulate(optax.adam(0.01), 2)])
def test_a_state_for_the_trainable_part(tx, layers):
    """It is smaller, and the numbers are those of a state for all."""
    step = gx.minimize(adapted, tx, trainable=BASE, layers=layers)
    params, all_of_it = with_base(), train(adapted, tx, with_base(), X, trainable=BASE)
    state = tx.init(with_base() | {"base": {"w": None, "gain": None}})
    size = len(jax.tree.leaves(state))
    for loss in all_of_it[2]:
        params, state, got = step(params, state, X)
        np.testing.assert_allclose(got, loss[0], rtol=2e-5)
    assert len(jax.tree.leaves(state)) == size < len(jax.tree.leaves(all_of_it[1]))
    chex.assert_trees_all_close(params, all_of_it[0], rtol=2e-5, atol=2e-6)


# Tables.


def read_rows(p, x):
    """Rows are read in front of the scans and behind them."""
    ids = (10 * jnp.abs(x)).astype(jnp.int32) % WIDTH
    x = encode(p | {"emb": jnp.eye(WIDTH)}, gx.lookup(p["emb"], ids).mean(1))
    return error(p, decode(p, x, p["between"])) + gx.lookup(p["emb"], ids[0]).sum(), ids


@pytest.mark.parametrize(
    "tx",
    [
        gx.adagrad(0.1),
        gx.lazy(optax.adam(0.01)),
        gx.accumulate(gx.adagrad(0.1, row_wise=True), 2),
        gx.ftrl(0.1),
    ],
)
@pytest.mark.parametrize("layers", [["encoder", "decoder"], ["decoder"]])
def test_tables_beside_layers(tx, layers):
    check_loss(read_rows, tx, layers, tables=["emb"], has_aux=True)


@pytest.mark.slow
def test_tables_beside_layers_in_two_passes():
    tx = optax.chain(gx.clip_by_global_norm(0.1), gx.adagrad(0.1))
    check_loss(
        read_rows, tx, ["encoder"], tables=["emb"], has_aux=True, two_passes=True
    )


def test_an_optimizer_that_takes_no_rows():
    step = gx.minimize(
        read_rows, optax.adam(0.1), has_aux=True, tables=["emb"], layers=["encoder"]
    )
    with pytest.raises(TypeError, match=r"gradxform\.lazy"):
        step(start(), optax.adam(0.1).init(start()), X)


# Reads of whole stacks.


def norm(tree):
    return jnp.sqrt(
        sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree))
    )


def with_reads(p, x):
    """What has no derivative: in the aux, behind stop_gradient, as integers, dead."""
    jnp.take(p["encoder"]["w"], 0, axis=0)  # As haliax asks for shapes.
    is_finite = jnp.isfinite(p["encoder"]["b"]).all()
    scale = jax.lax.stop_gradient(norm(p["decoder"]))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    loss = encoder_and_decoder(p, x) / scale
    largest, _ = jax.lax.scan(
        lambda m, w: (jnp.maximum(m, jnp.abs(w).max()), None), 0.0, p["encoder"]["w"]
    )
    aux = {"norm": norm(half["encoder"]), "after": loss * norm(p["decoder"]["w"])}
    return jnp.where(is_finite, loss, jnp.nan), aux | {"largest": largest}


@pytest.mark.parametrize("names", [["encoder", "decoder"], ["encoder"], ["decoder/w"]])
def test_reads_without_a_derivative(names):
    check_loss(with_reads, optax.adamw(0.01), names, has_aux=True)


@pytest.mark.parametrize("names", [["encoder", "decoder"], ["decoder"]])
def test_a_scan_without_a_derivative(names):
    """Its stack gets zeros, as in the ordinary step, and weight decay."""

    def loss_fn(p, x):
        seen = jax.lax.stop_gradient(encode(p, x))
        return error(p, decode(p, jnp.cos(x), seen))

    check_loss(loss_fn, optax.adamw(0.01, weight_decay=0.1), names)


def test_a_constant_loss_beside_an_aux():
    """The number of the loss is no variable of its program."""

    def loss_fn(p, x):
        return 2.0, encode(p, x)

    check_loss(loss_fn, optax.adamw(0.01), ["encoder"], has_aux=True)


def test_a_read_with_a_derivative():
    def loss_fn(p, x):
        return encoder_and_decoder(p, x) + 0.1 * norm(p["decoder"]["w"])

    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["encoder", "decoder"])
    params = start()
    with pytest.raises(
        ValueError,
        match=r"'decoder/w' is one of layers, but it is used by .*test_stacks.py.*"
        "Read each layer inside of the scan",
    ):
        step(params, optax.sgd(0.1).init(params), X)
    jax.block_until_ready(params)  # Nothing is lost.


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_two_scans_over_one_stack(is_checkpointed):
    twice = jax.checkpoint(encode) if is_checkpointed else encode

    def loss_fn(p, x):
        return error(p, twice(p, twice(p, x)))

    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["encoder"])
    with pytest.raises(
        ValueError,
        match=r"'encoder/b' is one of .* a second scan goes over it, 'scan' .*"
        r"test_stacks.py.*, after 'scan' .*test_stacks.py",
    ):
        step(start(), optax.sgd(0.1).init(start()), X)


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_a_loop_around_the_scan(loop):
    """As over steps in time, or of a core that is applied several times."""

    def loss_fn(p, x):
        def turn(x, _=None):
            return encode(p, x), None

        if loop == "scan":
            return error(p, jax.lax.scan(turn, x, None, length=2)[0])
        return error(p, jax.lax.fori_loop(0, 2, lambda _, x: turn(x)[0], x))

    step = gx.minimize(loss_fn, optax.sgd(0.1), layers=["encoder"])
    message = r"'encoder/b' .* used by 'scan' .*, a loop that reads it in each turn"
    with pytest.raises(ValueError, match=message):
        step(start(), optax.sgd(0.1).init(start()), X)


# Several scans over a stack: the loss has a derivative by it through one of them.

stop = jax.lax.stop_gradient


def difference(x, y):
    return jnp.mean((x - y) ** 2)


def teacher(p, x):
    y = encode(p, x)
    return error(p, y) + difference(y, encode(stop(p), 2 * x))


def teacher_first(p, x):
    """The teacher learns by what it reads, and its backward pass is the last one."""
    frozen = p | {"encoder": stop(p["encoder"])}
    wanted = jax.checkpoint(encode)(frozen, jnp.cos(x))
    return difference(encode(p, x + wanted), wanted)


def two_teachers(p, x):
    """The second one goes over all but the scales along another axis."""

    def turned(x, w):
        return x + jnp.tanh(x @ w.T @ w), None

    y, _ = jax.lax.scan(turned, x, stop(p["encoder"]["w"]).transpose(1, 0, 2))
    return teacher(p, x + jnp.sin(y.sum()))


def both_at_once(p, x):
    """One scan goes over the stack and over what is stopped of it."""

    def layer(x, each):
        w, fixed = each
        return x + jnp.tanh(x @ w["w"] + w["b"]) - jnp.tanh(x @ fixed["w"]), None

    x, _ = jax.lax.scan(layer, x, (p["encoder"], stop(p["encoder"])))
    return error(p, x)


def all_stopped(p, x):
    return error(p, encode(p | {"encoder": stop(p["encoder"])}, x))


def stopped_penalty(p, x):
    """What is no scan may read what is stopped, too."""
    return error(p, encode(p, x)) * norm(stop(p["encoder"]["w"]))


def metrics(p, x):
    """The loss does not depend on the second scan, nor on the third."""
    seen, again = encode(p, 2 * x), encode(p, 3 * x)
    return error(p, encode(p, x)) + 0.0 * stop(seen).sum(), seen.sum() + again.sum()


TEACHERS = [teacher, teacher_first, two_teachers, both_at_once, all_stopped]
TEACHERS += [stopped_penalty]


@pytest.mark.parametrize("loss_fn", TEACHERS)
def test_what_is_stopped_may_be_read_again(loss_fn):
    check_loss(loss_fn, optax.adamw(0.01), ["encoder"])


@pytest.mark.parametrize("loss_fn", TEACHERS)
def test_what_is_stopped_in_two_passes(loss_fn):
    tx = optax.chain(gx.clip_by_global_norm(0.1), gx.adagrad(0.1))
    check_loss(loss_fn, tx, ["encoder"], two_passes=True)


def test_an_aux_may_read_a_stack_again():
    check_loss(metrics, optax.adamw(0.01), ["encoder"], has_aux=True)


def chosen_and_rejected(p, x):
    """Direct preference optimization: two scans over a frozen reference."""

    def score(name, x):
        return encode(p | {"encoder": p[name]}, x).mean()

    def both(x, w):
        return x + jnp.tanh(x @ w["w"] + w["b"]), None

    pair = jnp.stack([x @ p["emb"], jnp.cos(x) @ p["emb"]])
    scores = jax.lax.scan(both, pair, p["encoder"])[0].mean((1, 2))
    base = score("reference", x), score("reference", jnp.cos(x))
    return -jax.nn.log_sigmoid(scores[0] - scores[1] - base[0] + base[1])


def with_reference():
    params = start()
    reference = jax.tree.map(lambda x: 0.5 * x, params["encoder"])
    return params | {"reference": reference}


@pytest.mark.parametrize("layers", [["encoder"], ["encoder", "reference"]])
def test_a_frozen_stack_may_be_read_twice(layers):
    trainable = {name: name != "reference" for name in with_reference()}
    how = {"make": with_reference, "trainable": trainable}
    check_loss(chosen_and_rejected, optax.adamw(0.01), layers, **how)


@pytest.mark.skipif(OLD, reason="JAX keeps no result in the host's memory")
@pytest.mark.parametrize("name", ["teacher", "teacher_first", "chosen_and_rejected"])
def test_what_is_read_again_may_lie_on_the_host(name):
    loss_fn, learns = globals()[name], name != "chosen_and_rejected"
    make = start if learns else with_reference
    layers = ["encoder"] if learns else ["encoder", "reference"]
    how = {"trainable": {name: name != "reference" for name in make()}}
    tx = optax.adamw(0.01)
    params = gx.on_host(make(), min_size=16)
    state = gx.on_host(tx.init(make()), min_size=16)
    step = gx.minimize(loss_fn, tx, layers=layers, **how)
    wanted, *_ = train(loss_fn, tx, make(), X, **how)
    for _ in range(4):
        params, state, _ = step(params, state, X)
    for name in layers:
        found = {p.sharding.memory_kind for p in jax.tree.leaves(params[name])}
        assert found == {"pinned_host"}
    chex.assert_trees_all_close(*jax.device_get((params, wanted)), rtol=2e-5, atol=2e-6)


@pytest.mark.figures
def test_a_teacher_needs_no_copy_of_the_stack():
    """Its scan comes in front of the backward pass, which writes into the stack."""

    def temporaries(loss_fn, **how):
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wide_encoder()
        )
        tx = optax.sgd(0.1)
        state = jax.eval_shape(tx.init, params)
        x = jax.ShapeDtypeStruct((2, 128), "float32")
        step = gx.minimize(loss_fn, tx, layers=["encoder"], **how)
        memory = step.lower(params, state, x).compile().memory_analysis()
        return memory.temp_size_in_bytes / (16 * 128 * 128 * 4)

    assert temporaries(teacher) < 0.4
    # Its backward pass needs the old layers after the other one has written new ones.
    assert 1 < temporaries(teacher_first) < 1.5


def wide_encoder():
    shapes = {"emb": (128, 128), "head": (128, 128)}
    blocks = {"w": jnp.zeros((16, 128, 128)), "b": jnp.zeros((16, 128))}
    return {k: jnp.zeros(s) for k, s in shapes.items()} | {"encoder": blocks}


# What is kept.


def test_a_checkpoint_keeps_its_policy():
    """Beside the scan it computes again what the policy does not save."""

    def loss_fn(p, x):
        for _ in range(3):
            x = jnp.sin(x @ p["emb"])
        return error(p, encode(p, x))

    tx, products = optax.sgd(0.1), {}
    for name in ("nothing_saveable", "dots_saveable"):
        policy = getattr(jax.checkpoint_policies, name)
        saving = jax.checkpoint(loss_fn, policy=policy)
        step = gx.minimize(saving, tx, layers=["encoder"])
        text = step.lower(start(), tx.init(start()), X).as_text()
        products[name] = text.count("stablehlo.dot_general")
    assert products["nothing_saveable"] >= products["dots_saveable"] + 3


@pytest.mark.figures
def test_reads_of_whole_stacks_copy_none():
    def loss_fn(p, x):
        return large(p, x), norm(p)

    assert kept_by(loss_fn, ("encoder", "decoder"), has_aux=True) <= 0.45


def large(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    seen, _ = jax.lax.scan(jax.checkpoint(layer), x, p["encoder"])
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), seen, p["decoder"])[0] ** 2)


def kept_by(loss_fn, layers, **how):
    """Temporaries of a step, in N."""
    shape = jax.ShapeDtypeStruct((8, 256, 256), "float32")
    params, tx = {"encoder": shape, "decoder": shape}, optax.adamw(0.1)
    step = gx.minimize(loss_fn, tx, layers=layers, **how)
    x = jax.ShapeDtypeStruct((2, 256), "float32")
    lowered = step.lower(params, jax.eval_shape(tx.init, params), x)
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes / (2 * shape.size * 4)


@pytest.mark.figures
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_no_gradients_of_two_stacks_are_kept(around):
    assert kept_by(around(large), ()) > 1
    assert kept_by(around(large), ("encoder", "decoder")) <= 0.45
