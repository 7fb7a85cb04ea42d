"""Half precision and states in 8 bits, with other transformations and in a server."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization, traverse_util

import gradxform as gx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own code promotes.

RATE = 2.0**-7  # optax.inject_hyperparams holds it in bfloat16.
LABELS = {"w": "w", "b": "b"}
# Each of `make`, which makes an optimizer of a rate.
WRAPS = {
    "partition": lambda make: optax.partition(
        {"w": make(RATE), "b": make(2 * RATE)}, LABELS
    ),
    "masked": lambda make: optax.masked(make(RATE), {"w": True, "b": False}),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(RATE),
    "MultiSteps": lambda make: optax.MultiSteps(
        make(RATE), 2
    ).gradient_transformation(),
    "drop_stale": lambda make: gx.drop_stale(make(RATE), 0),
    "skip_spikes": lambda make: gx.skip_spikes(make(RATE)),
    "accumulate": lambda make: gx.accumulate(make(RATE), 2, skip_nonfinite=True),
    "conditional_accumulator": lambda make: gx.conditional_accumulator(make(RATE), 2),
}
# Outside of master_weights optax wants updates in the dtype of the gradients.
INSIDE = WRAPS | {
    "apply_if_finite": lambda make: optax.apply_if_finite(make(RATE), 2),
}
LATE = "drop_stale", "conditional_accumulator"
WITH_NAN = "skip_spikes", "accumulate", "apply_if_finite"


def draw(seed, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 8), "b": (8,)}
    half = {k: jnp.asarray(rng.normal(size=s), jnp.bfloat16) for k, s in shapes.items()}
    return jax.tree.map(lambda x: x.astype(dtype), half)


def trained(tx, dtype, name=""):
    """After six pushes; the third one is late, or it is NaN."""

    @jax.jit
    def step(params, state, grads, extra):
        return gx.apply_gradients(tx, grads, state, params, **extra)

    params = draw(0, dtype)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    for t in range(6):
        grads, extra = draw(t + 1, dtype), {}
        if name in LATE:
            extra = {"local_step": jnp.int32(0 if t == 2 else 100)}
        elif name in WITH_NAN and t == 2:
            grads = jax.tree.map(lambda g: g * jnp.nan, grads)
        params, state = step(params, state, grads, extra)
    assert jax.tree.map(jax.typeof, state) == types
    return params, state


@functools.cache
def in_float32(name):
    params, _ = trained(INSIDE[name](optax.adamw), jnp.float32, name)
    assert np.abs(params["w"] - draw(0, jnp.float32)["w"]).max() > RATE
    return params


@pytest.mark.parametrize("name", WRAPS)
def test_wrappers_around_master_weights_see_no_difference(name):
    tx = WRAPS[name](lambda rate: gx.master_weights(optax.adamw(rate)))
    params, state = trained(tx, jnp.bfloat16, name)
    got = gx.get_master_weights(params, state)
    for k, expected in in_float32(name).items():
        if name == "masked" and k == "b":  # Not in it.
            assert got[k].dtype == jnp.bfloat16
            continue
        # A mean of gradients is in their dtype, bfloat16.
        tol = 1e-4 if "acc" in name or name == "MultiSteps" else 1e-5
        np.testing.assert_allclose(got[k], expected, rtol=1e-5, atol=tol)
        nearest = got[k].astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(params[k].astype(jnp.float32), nearest)
    sums = optax.tree.get(state, "accumulated", default={})
    assert {x.dtype for x in jax.tree.leaves(sums)} <= {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("name", INSIDE)
def test_wrappers_inside_master_weights_see_float32(name):
    tx = gx.master_weights(INSIDE[name](optax.adamw))
    got = gx.get_master_weights(*trained(tx, jnp.bfloat16, name))
    for k, expected in in_float32(name).items():
        np.testing.assert_allclose(got[k], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
@pytest.mark.parametrize("name", WRAPS)
def test_wrappers_and_a_state_in_8_bits(name, outside):
    low = functools.partial(gx.low_bit_state, min_size=1)
    tx = (
        WRAPS[name](lambda rate: low(optax.adamw(rate)))
        if outside
        else low(WRAPS[name](optax.adamw))
    )
    params, state = trained(tx, jnp.float32, name)
    codes = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int8]
    assert {x.shape for x in codes} >= {(16, 8)}
    for k, expected in in_float32(name).items():
        # Six steps of `RATE` at most, each with an error of a few percent.
        np.testing.assert_allclose(params[k], expected, atol=RATE)


LOW = functools.partial(gx.low_bit_state, block_axis=-1, min_size=1)
ADAMW, ADAGRAD, WITH_ROWS = optax.adamw(0.1), gx.adagrad(0.1), gx.lazy(optax.adamw(0.1))
# With the same optimizer in float32.
TABLES = {
    "adagrad inside": (gx.master_weights(ADAGRAD), ADAGRAD),
    "lazy inside": (gx.master_weights(WITH_ROWS), WITH_ROWS),
    "lazy around": (gx.lazy(gx.master_weights(ADAMW)), WITH_ROWS),
    "8 bits": (
        gx.lazy(gx.master_weights(LOW(ADAMW), residual_dtype="int8")),
        WITH_ROWS,
    ),
}
INJECT = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
# What the error below and the page say.
SAID = {
    "injected": (gx.master_weights(INJECT(gx.adagrad)(0.1)), ADAGRAD),
    "lazy injected": (
        gx.master_weights(INJECT(lambda rate: gx.lazy(optax.adamw(rate)))(0.1)),
        WITH_ROWS,
    ),
    "injected outside": (
        INJECT(lambda rate: gx.master_weights(gx.adagrad(rate)))(rate=0.1),
        ADAGRAD,
    ),
    "lazy around injected": (
        gx.lazy(gx.master_weights(INJECT(optax.adamw)(0.1))),
        WITH_ROWS,
    ),
    "sum around": (  # The mean is dense, so its decay would reach every row.
        gx.accumulate(gx.lazy(gx.master_weights(optax.adam(0.1))), 2),
        gx.accumulate(gx.lazy(optax.adam(0.1)), 2),
    ),
}


def step_of(tx):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, grads):
        return gx.apply_gradients(tx, grads, state, table)

    return step


def pushed(tx, table):
    """The table and the state after two pushes."""
    step = step_of(tx)
    table = jnp.copy(table)
    state = tx.init(table)
    for rows in ([7, 1, 7], [1, 4000, 1]):
        values = jnp.full((3, 8), 1, table.dtype).at[0].set(-0.25)
        grads = gx.IndexedSlices(rows, values, table.shape)
        table, state = step(table, state, grads)
    return table, state


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES | SAID)
def test_a_step_reads_and_writes_the_touched_rows_of_a_table(name):
    tx, plain = (TABLES | SAID)[name]
    start = jnp.ones((20000, 8), jnp.bfloat16)
    table, state = pushed(tx, start)
    expected, _ = pushed(plain, start.astype(jnp.float32))
    got = gx.get_master_weights(table, state)
    np.testing.assert_allclose(got, expected, atol=2e-2 if name == "8 bits" else 2e-6)
    moved = np.flatnonzero((np.asarray(got) != 1).any(1)).tolist()
    assert moved == [1, 7, 4000]
    assert np.abs(expected - 1).max() > 0.05
    residual = np.asarray(optax.tree.get(state, "residual"))
    assert set(np.flatnonzero(residual.any(1))) <= set(moved)


def test_random_rounding_of_a_table_goes_behind_lazy():
    table, random = jnp.ones((20000, 8), jnp.bfloat16), gx.round_stochastically(0)
    tx = optax.chain(gx.lazy(optax.adamw(0.1)), random)
    new, _ = pushed(tx, table)
    moved = (new != 1).any(1)
    assert np.flatnonzero(moved).tolist() == [1, 7, 4000]
    with pytest.raises(TypeError, match=r"_random.*Give the table another opt"):
        pushed(gx.lazy(optax.chain(optax.adamw(0.1), random)), table)


RANDOM = optax.chain(gx.lazy(optax.adamw(0.1)), gx.round_stochastically(0))


@pytest.mark.figures
@pytest.mark.parametrize(
    "tx", [*(tx for tx, *_ in TABLES.values()), RANDOM], ids=[*TABLES, "random"]
)
def test_a_step_of_some_rows_makes_no_table(tx):
    table = jax.ShapeDtypeStruct((20000, 8), jnp.bfloat16)
    grads = gx.IndexedSlices([1, 4000, 1], jnp.ones((3, 8), table.dtype), table.shape)
    compiled = step_of(tx).lower(table, jax.eval_shape(tx.init, table), grads).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * 20000 * 8 * 2


def test_an_inner_transformation_that_takes_no_rows_is_named():
    table = {"t": jnp.ones((6, 2), jnp.bfloat16)}
    grads = {"t": gx.IndexedSlices([4], jnp.ones((1, 2), jnp.bfloat16), (6, 2))}
    inners = [
        gx.accumulate(optax.adamw(0.1), 2),
        optax.chain(gx.densify(), optax.adamw(0.1)),
    ]
    if optax.__version__ != "0.2.6":  # It looks only at the first leaf's dtype.
        inners.append(optax.inject_hyperparams(gx.adagrad)(0.1))
    for inner in inners:
        tx = gx.master_weights(inner)
        state = tx.init(table)
        for step in (tx.update, jax.jit(tx.update)):
            with pytest.raises(TypeError, match=r"rows of \['t'\].* hyperparam_dtype"):
                step(grads, state, table)
        with pytest.raises(TypeError, match=r"rows of \['t'\].*Put gradxform.lazy"):
            gx.apply_gradients(tx, grads, tx.init(table), table)
    # A table in float32 has no residual, but it is named, too.
    wide = (
        {"t": gx.IndexedSlices([4], jnp.ones((1, 2)), (6, 2))},
        {"t": jnp.ones((6, 2))},
    )
    tx = gx.master_weights(optax.adam(0.1))
    with pytest.raises(TypeError, match=r"rows of \['t'\]"):
        tx.update(wide[0], tx.init(wide[1]), wide[1])
    # Any other error stays as it is.
    tx = gx.master_weights(gx.drop_stale(gx.adagrad(0.1), 1))
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        tx.update(grads, tx.init(table), table)


MIXED = {
    "half": jnp.ones((4, 2), jnp.bfloat16),
    "full": jnp.ones(2),
    "nothing": None,
}


@pytest.mark.parametrize("residual_dtype", ["int16", "int8"])
def test_a_state_of_parameters_in_two_precisions_is_saved_leaf_by_leaf(residual_dtype):
    """As EasyLM saves and reads it: flattened, each leaf as bytes."""
    tx = gx.master_weights(optax.adam(RATE), residual_dtype=residual_dtype)
    state = tx.init(MIXED)
    flat = traverse_util.flatten_dict(serialization.to_state_dict(state))
    saved = {path: serialization.to_bytes(x) for path, x in flat.items()}
    read = {path: serialization.from_bytes(None, x) for path, x in saved.items()}
    empty = traverse_util.flatten_dict(
        serialization.to_state_dict(tx.init(MIXED)), keep_empty_nodes=True
    )
    read |= {k: x for k, x in empty.items() if x is traverse_util.empty_node}
    again = serialization.from_state_dict(state, traverse_util.unflatten_dict(read))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_an_optimizer_of_nnx_trains_parameters_in_two_precisions():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    model.bias = nnx.Param(jnp.zeros(2))
    tx = gx.master_weights(optax.adam(0.01), residual_dtype="int8")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    kernel = np.float32(model.kernel[...])

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(3):
        step(model, optimizer, jnp.ones((4, 3)))
    assert (model.kernel[...].dtype, model.bias[...].dtype) == ("bfloat16", "float32")
    for after, before in ((model.kernel[...], kernel), (model.bias[...], 0)):
        np.testing.assert_allclose(np.abs(np.float32(after) - before), 0.03, rtol=0.1)


SERVED = {
    "master_weights": gx.master_weights(optax.adamw(RATE)),
    "8 bits": gx.master_weights(
        gx.low_bit_state(optax.adamw(RATE), min_size=1), residual_dtype="int8"
    ),
    "random": optax.chain(optax.adamw(RATE), gx.round_stochastically(0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_a_server_sends_half_precision_and_goes_on_from_its_state(name):
    tx, params = SERVED[name], draw(0)
    first, second = (gx.ParameterServer(params, tx) for _ in range(2))
    state = tx.init(params)
    for seed, server in ((1, first), (2, first), (3, first), (9, second)):
        if server is second:
            second.restore(first.state())
        pulled, step = server.pull()
        assert {p.dtype for p in pulled.values()} == {jnp.dtype(jnp.bfloat16)}
        assert server.push(draw(seed), step).applied
        # The same in a loop that has no server.
        params, state = gx.apply_gradients(tx, draw(seed), state, params)
    pulled, _ = second.pull()
    for k in params:
        np.testing.assert_allclose(
            np.float32(pulled[k]), np.float32(params[k]), rtol=2**-6, atol=2**-7
        )
