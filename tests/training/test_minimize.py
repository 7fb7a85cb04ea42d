"""The whole training step: what learns, what it costs, and on many devices."""

import copy
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

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 3)).astype(np.float32)
Y = RNG.standard_normal(20).astype(np.float32)
IDS = jnp.array([4, 0, 4, 6, 1])  # A repetition, and padding.


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def start():
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def model():
    """A table, two vectors and integers; each call makes new arrays."""
    layer = {"w": jnp.array([0.5, -0.2]), "b": jnp.array([0.1, 0.3])}
    table = jnp.arange(12, dtype=jnp.float32).reshape(6, 2) / 10
    return {"emb": table, "layer": layer, "sizes": jnp.array([3, 4])}


def model_loss(params, ids):
    rows = gx.lookup(params["emb"], ids) * params["layer"]["w"][None]
    return jnp.sum((rows + params["layer"]["b"][None] - 1) ** 2)


def chain(axis_name=None, **kwargs):
    clip = gx.clip_by_global_norm(0.5, axis_name=axis_name)
    return optax.chain(clip, gx.adagrad(0.1, **kwargs))


def test_reaches_the_least_squares():
    tx = gx.adagrad(0.5)
    step = gx.minimize(loss_fn, tx)
    params, state = start(), tx.init(start())
    losses = []
    for _ in range(300):
        params, state, loss = step(params, state, X, Y)
        losses.append(loss)
    design = np.column_stack([X, np.ones(20)])
    best, residual, *_ = np.linalg.lstsq(design, Y, rcond=None)
    np.testing.assert_allclose([*params["w"], params["b"]], best, atol=1e-3)
    np.testing.assert_allclose(losses[0], np.mean(Y**2), rtol=1e-6)
    np.testing.assert_allclose(losses[-1], residual[0] / 20, rtol=1e-4)


def test_aux_comes_last():
    def with_aux(params, x, y):
        return loss_fn(params, x, y), {"n": len(x)}

    tx = optax.sgd(0.1)
    step = gx.minimize(with_aux, tx, has_aux=True)
    _, _, loss, aux = step(start(), tx.init(start()), X, Y)
    np.testing.assert_allclose(loss, np.mean(Y**2), rtol=1e-6)
    assert aux == {"n": 20}


@pytest.mark.slow
@pytest.mark.parametrize("tables", [(), ["emb"]])
def test_equals_the_step_by_hand(tables):
    tx = chain(row_wise=bool(tables))
    step = gx.minimize(model_loss, tx, trainable=learning(True), tables=tables)
    params, state = model(), tx.init(model())
    expected, expected_state = model(), tx.init(model())
    by_hand = jax.jit(jax.value_and_grad(model_loss, allow_int=True))
    apply = jax.jit(functools.partial(gx.apply_gradients, tx))
    for _ in range(3):
        params, state, loss = step(params, state, IDS)
        value, grads = by_hand(expected, IDS)
        expected, expected_state = apply(
            grads | {"sizes": None}, expected_state, expected
        )
        np.testing.assert_allclose(loss, value, rtol=1e-6)
    chex.assert_trees_all_close(
        (params, state), (expected, expected_state), rtol=1e-6, atol=1e-7
    )


def learning(emb, layer=True):
    return {"emb": emb, "layer": layer, "sizes": False}


TREE = learning(False, {"w": False, "b": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainable", "learned"),
    [
        (TREE, {"layer/b"}),
        (lambda params: TREE, {"layer/b"}),
        (learning(False), {"layer/w", "layer/b"}),
        (lambda params: learning(params["emb"].ndim == 2, False), {"emb"}),
    ],
    ids=["tree", "function", "prefix", "function-to-prefix"],
)
def test_only_trainable_leaves_change(trainable, learned):
    tx = gx.adagrad(0.1)
    step = gx.minimize(model_loss, tx, trainable=trainable)
    params, state, _ = step(model(), tx.init(model()), IDS)
    sums, before = (
        optax.tree.get(s, "sum_of_squares") for s in (state, tx.init(model()))
    )
    assert changed(params, model()) == learned
    assert changed(sums, before) == learned
    chex.assert_trees_all_equal_dtypes(params, model())


def changed(tree, before):
    """The paths at which a bit differs."""
    flat = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, x), y in zip(flat, jax.tree.leaves(before), strict=True)
        if np.asarray(x).tobytes() != np.asarray(y).tobytes()
    }


def test_a_trainable_table_beside_frozen_layers():
    tx = gx.adagrad(0.1)
    step = gx.minimize(
        model_loss, tx, trainable=learning(True, False), tables=["emb"], donate=False
    )
    params, _, _ = step(model(), tx.init(model()), IDS)
    assert changed(params, model()) == {"emb"}
    moved = jnp.any(params["emb"] != model()["emb"], axis=1)
    assert moved.tolist() == [True, True, False, False, True, False]


@pytest.mark.every
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"trainable": False}, ValueError, "grads has no gradient for any leaf"),
        ({"trainable": lambda p: False}, ValueError, "grads has no gradient"),
        (
            {"trainable": learning(False), "tables": ["emb"]},
            ValueError,
            "tables names 'emb', which is not trainable",
        ),
        (
            {"trainable": learning(True), "tables": ["sizes"]},
            ValueError,
            "tables names 'sizes', which is not trainable",
        ),
        ({"tables": "emb"}, TypeError, "must be a sequence of paths"),
        ({"tx": gx.drop_stale(chain(), 0)}, TypeError, "drop_stale needs local_step"),
    ],
)
def test_bad_input(kwargs, error, message):
    tx = kwargs.pop("tx", gx.adagrad(0.1))
    kwargs = {"trainable": learning(True)} | kwargs
    with pytest.raises(error, match=message):
        gx.minimize(model_loss, tx, **kwargs)(model(), tx.init(model()), IDS)


@pytest.mark.parametrize("donate", [True, False])
def test_donation(donate):
    tx = gx.adagrad(0.1)
    params, state = start(), tx.init(start())
    gx.minimize(loss_fn, tx, donate=donate)(params, state, X, Y)
    deleted = {leaf.is_deleted() for leaf in jax.tree.leaves((params, state))}
    assert deleted == {donate}


def reading_values(rate):
    """Its ``init`` cannot be traced."""

    def init(params):
        assert not np.isnan(params["w"]).any()
        return rate

    return optax.GradientTransformation(
        init, lambda u, s, p=None: (jax.tree.map(lambda g: -s * g, u), s)
    )


SHARED = {
    "reading values": reading_values,
    "prodigy": lambda rate: optax.contrib.prodigy(),
    "sam": lambda rate: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)),
    "mechanize": lambda rate: optax.contrib.mechanize(optax.sgd(0.1)),
    "injected": optax.inject_hyperparams(optax.sgd),
    "ours": lambda rate: gx.drop_stale(
        optax.chain(optax.inject_hyperparams(gx.adagrad)(rate), optax.identity()), 9
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", SHARED)
def test_shared_arrays_are_not_donated(name):
    """Two states share the caller's rate; a state holds the parameters' own arrays."""
    rate = jnp.float32(0.1)
    tx = SHARED[name](rate)
    extra = {"local_step": 0} if name == "ours" else {}
    kept = gx.minimize(loss_fn, tx, donate=False)
    step, states = gx.minimize(loss_fn, tx), [tx.init(start()), tx.init(start())]
    for fresh in states:
        params, state = start(), fresh
        if name == "prodigy":  # Made of params, as users do.
            state = tx.init(params)
        expected, expected_state = start(), tx.init(start())
        for _ in range(2):
            before = jax.tree.leaves((params, state))
            params, state, _ = step(params, state, X, Y, **extra)
            expected, expected_state, _ = kept(expected, expected_state, X, Y, **extra)
        chex.assert_trees_all_close(params, expected, rtol=1e-6)
        chex.assert_trees_all_close(state, expected_state, rtol=1e-6)
        # Everything that is read: jit leaves out what nobody needs, such as the last
        # staleness.
        assert all(leaf.is_deleted() for leaf in before if leaf.ndim)
    assert rate == np.float32(0.1)
    assert step._cache_size() == 1


def test_the_same_array_in_several_places():
    """Twice among the parameters, and once more in the batch."""
    both, frozen = jnp.ones(3), jnp.ones(3)
    params = {"a": both, "b": both, "frozen": frozen}
    tx = optax.sgd(0.5)

    def loss_fn(params, target):
        return jnp.sum(params["a"] * target["frozen"] + 2 * params["b"])

    target = params
    step = gx.minimize(loss_fn, tx, trainable={"a": True, "b": True, "frozen": False})
    params, _, loss = step(params, tx.init(params), target)
    assert loss == 9
    assert (params["a"].tolist(), params["b"].tolist()) == ([0.5] * 3, [0.0] * 3)
    assert target["frozen"].tolist() == [1.0] * 3


def test_a_donated_step_is_a_jitted_function_still():
    tx = optax.sgd(0.1)
    step = gx.minimize(loss_fn, tx)
    arguments = start(), tx.init(start()), X, Y
    assert step.__name__ == "step"
    assert isinstance(step, jax.stages.Wrapped)
    assert "stablehlo" in step.lower(*arguments).as_text()
    params, *_ = jax.jit(step)(*arguments)
    chex.assert_trees_all_equal(params, jax.jit(step.__wrapped__)(*arguments)[0])
    with pytest.raises(AttributeError, match="no_such"):
        step.no_such  # noqa: B018


@pytest.mark.usefixtures("standard_promotion")
def test_a_state_keeps_its_dtypes():
    """A float32 decay would turn a bfloat16 momentum into a float32 one."""
    tx = optax.sgd(0.5, momentum=jnp.float32(0.5))
    params, ones = jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(2):
        params, state = gx.apply_gradients(tx, ones, state, params)
    assert state[0].trace.dtype == params.dtype == jnp.bfloat16
    assert state[0].trace.tolist() == [1.5] * 3
    assert params.tolist() == [-0.25] * 3


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("synced", [True, False])
def test_the_error_for_lookahead_names_the_cure(synced):
    tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    pair = optax.LookaheadParams.init_synced(start())
    params, state = (pair if synced else start()), tx.init(pair)
    for call in (
        lambda: gx.minimize(loss_fn, tx)(params, state, X, Y),
        lambda: gx.apply_gradients(tx, start(), state, params),
        lambda: gx.local_steps(loss_fn, tx)(params, state, X[None], Y[None]),
    ):
        with pytest.raises(TypeError, match="lookahead keeps two copies of the param"):
            call()
    updates, _ = tx.update(start(), state, pair)  # As the error says.
    chex.assert_trees_all_equal(gx.apply_updates(pair, updates).fast, start())


@pytest.mark.parametrize(
    ("extra", "expected"), [({}, np.mean(Y**2)), ({"value": 7.0}, 7.0)]
)
def test_tx_receives_the_value_of_the_loss_unless_it_is_given(extra, expected):
    def update(updates, state, params=None, *, value, **_):
        return updates, jnp.asarray(value, jnp.float32)

    tx = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    _, state, _ = gx.minimize(loss_fn, tx)(start(), tx.init(start()), X, Y, **extra)
    np.testing.assert_allclose(state, expected, rtol=1e-6)


# Eight devices hold eight rows each, and a batch has repetitions and padding.
TALL = {"emb": jnp.float32(RNG.standard_normal((64, 4))), "w": jnp.ones(4)}
SPECS = {"emb": P("x", None), "w": P()}
BATCHES = np.array([[3, 60, 3, 63, 0, 64, 9, 8], [8, 7, 15, 16, 8, 8, 64, 1]] * 2)


def loss_of(rows, params):
    return jnp.sum((jnp.einsum("nd,d->n", rows, params["w"]) - 1) ** 2)


def tall_loss(params, ids):
    return loss_of(gx.lookup(params["emb"], ids), params)


def dense_loss(params, ids):
    return loss_of(jnp.dot(jax.nn.one_hot(ids, 64), params["emb"]), params)


def check_training(step, params, state, put=jnp.asarray):
    """Trains, compares with dense gradients on one device, returns the parameters."""
    for ids in BATCHES:
        params, state, *_ = step(params, state, put(ids))
    got = jax.device_get((params, state))
    chex.assert_trees_all_close(got, trained_densely(), rtol=1e-6, atol=1e-6)
    return params


@functools.cache
def trained_densely():
    @jax.jit
    def step(params, state, ids):
        grads = jax.grad(dense_loss)(params, ids)
        return gx.apply_gradients(chain(), grads, state, params)

    params, state = TALL, chain().init(TALL)
    for ids in BATCHES:
        params, state = step(params, state, ids)
    return jax.device_get((params, state))


def mesh(axis_type):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


@pytest.mark.slow
def test_shard_map_over_rows():
    def loss(params, ids):
        # Each device brings the rows that it has. All others are padding to it: zeros.
        # The sum is the same everywhere, and so is its cotangent. shard_map keeps track
        # of that, so the transpose of psum hands the cotangent to every device as it
        # is, and the gradient is exact. With check_vma=False it would add up the eight
        # equal cotangents, and the gradient would be eight times too large.
        offset = jax.lax.axis_index("x") * params["emb"].shape[0]
        rows = jax.lax.psum(gx.lookup(params["emb"], ids - offset), "x")
        return loss_of(rows, params)

    def step(params, state, ids):
        _, grads = gx.value_and_grad(loss, tables=["emb"])(params, ids)
        return gx.apply_gradients(tx, grads, state, params)

    tx = chain(axis_name="x")
    state = tx.init(TALL)
    specs = optax.tree.map_params(
        tx, lambda _, s: s, state, SPECS, transform_non_params=lambda _: P()
    )
    step = jax.shard_map(
        step,
        mesh=mesh(AxisType.Auto),
        in_specs=(SPECS, specs, P()),
        out_specs=(SPECS, specs),
    )
    check_training(jax.jit(step), TALL, state)


if jax.__version_info__ >= (0, 8, 2):
    all_gather = functools.partial(jax.lax.all_gather, to="invarying")
else:
    all_gather = jax.lax.all_gather_invariant


@pytest.mark.parametrize("manual", [{"x"}, {"x", "y"}], ids=["some axes", "all axes"])
def test_shard_map_over_the_batch(manual):
    def step(params, state, ids):
        _, grads = gx.value_and_grad(tall_loss, tables=["emb"])(params, ids)
        # "w" is the same everywhere, so JAX has summed its gradient already.
        grads["emb"] = all_gather(grads["emb"], "x", tiled=True)
        return gx.apply_gradients(chain(), grads, state, params)

    types = (AxisType.Auto,) * 2
    step = jax.shard_map(
        step,
        mesh=jax.make_mesh((4, 2), ("x", "y"), axis_types=types),
        in_specs=(P(), P(), P("x")),
        out_specs=(P(), P()),
        axis_names=manual,
    )
    check_training(jax.jit(step), TALL, chain().init(TALL))


SPARSE_STEP = gx.minimize(tall_loss, chain(), tables=["emb"], donate=False)


@pytest.mark.slow
def test_a_table_sharded_by_rows_is_not_gathered():
    on = functools.partial(NamedSharding, mesh(AxisType.Auto))
    params = jax.device_put(TALL, jax.tree.map(on, SPECS))
    lowered = SPARSE_STEP.lower(params, chain().init(params), BATCHES[0, :5])
    text = lowered.compile().as_text()
    assert "f32[8,4]" in text  # A device's share of it,
    assert "f32[64,4]" not in text  # and the whole nowhere.


@pytest.mark.slow
def test_an_optimizer_that_takes_no_value(standard_promotion):
    """``minimize`` offers it the loss, a gate the local step. It asked for neither."""
    sam = optax.contrib.sam(optax.sgd(0.5), optax.sgd(0.1), sync_period=2)
    expected, state = start(), sam.init(start())
    for _ in range(2):
        grads = jax.grad(loss_fn)(expected, X, Y)
        updates, state = sam.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
    late = gx.drop_stale(sam, 0)
    for tx, extra in (
        (sam, lambda t: {}),
        (gx.lazy(sam), lambda t: {}),
        (late, lambda t: {"local_step": t}),
    ):
        step = gx.minimize(loss_fn, tx)
        params, state = start(), tx.init(start())
        for t in range(2):
            params, state, _ = step(params, state, X, Y, **extra(t))
        chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["minimize", "local_steps"])
def test_a_step_goes_to_other_processes(kind):
    """As Ray sends it to a worker."""
    cloudpickle = pytest.importorskip("cloudpickle")

    def loss_fn(params, x):
        return jnp.sum((params - x) ** 2)

    tx = optax.sgd(0.5)
    step, x = gx.minimize(loss_fn, tx), jnp.zeros(2)
    if kind == "local_steps":
        step, x = gx.local_steps(loss_fn, tx), jnp.zeros((1, 2))
    sent = cloudpickle.loads(cloudpickle.dumps(step))
    copied = copy.copy(step)
    for each in (step, sent, copied):
        params = jnp.ones(2)
        first, *_ = each(params, tx.init(params), x)
        # The parameters are trained to 0; the pseudo-gradient is the way from 1 to 0.
        np.testing.assert_array_equal(first, jnp.full(2, float(kind == "local_steps")))


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("is_local", [False, True])
def test_a_masked_node_among_parameters_of_micro_batches(is_local):
    """It is no parameter: the step is that of ``apply_gradients``."""

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean(x**2)

    tx = gx.accumulate(optax.sgd(0.5), 2)
    masked = {"a": optax.MaskedNode(), "n": None}
    params = {"w": jnp.linspace(-1, 1, 18).reshape(2, 3, 3), **masked}
    x = jnp.asarray(X[:4])
    wanted, state = params, tx.init(params)

    @jax.jit
    def by_hand(params, state):
        grads = {"w": jax.grad(loss_fn)({"w": params["w"]}, x)["w"], **masked}
        return gx.apply_gradients(tx, grads, state, params)

    for _ in range(2):
        wanted, state = by_hand(wanted, state)
    if is_local:
        steps = gx.local_steps(loss_fn, tx)
        change, _, _ = steps(params, tx.init(params), jnp.stack([x, x]))
        got = params["w"] - change["w"]
    else:
        step, state = gx.minimize(loss_fn, tx, donate=False), tx.init(params)
        got, state, _ = step(*step(params, state, x)[:2], x)
        assert jax.tree.structure(got) == jax.tree.structure(params)
        got = got["w"]
    np.testing.assert_allclose(got, wanted["w"], rtol=1e-6)
