"""Few bits: parameters in half precision, random rounding, and state in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own code promotes.
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, 0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "adagrad": lambda: gx.adagrad(0.1, global_clipnorm=1.0),
    "novograd": lambda: gx.novograd(0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)),
}


def draw(seed, dtype, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 24), "b": (7,)}
    return {
        k: jnp.asarray(scale * rng.normal(size=s), dtype) for k, s in shapes.items()
    }


def wide(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def bits(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float32).view(np.int32), tree)


def trained(tx, params, dtype, steps=6):
    """The parameters and the state after some steps on given gradients."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for t in range(steps):
        grads = draw(1 + t, jnp.bfloat16, 10.0 ** (t % 4 - 2))
        grads = jax.tree.map(lambda g: g.astype(dtype), grads)
        params, state = step(params, state, grads)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_is_that_of_float32_to_the_bit(name, dtype):
    start = draw(0, dtype)
    expected, _ = trained(OPTIMIZERS[name](), wide(start), jnp.float32)
    tx = gx.master_weights(OPTIMIZERS[name]())
    params, state = trained(tx, start, jnp.bfloat16)
    got = gx.get_master_weights(params, state)
    jax.tree.map(np.testing.assert_array_equal, bits(got), bits(expected))
    nearest = jax.tree.map(lambda x: x.astype(dtype), expected)
    jax.tree.map(np.testing.assert_array_equal, wide(params), wide(nearest))


def numbers(seed):
    """Of any size and sign, with many ties and powers of two."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 512, dtype=np.uint32)
    bits[::4] &= np.uint32(0xFF800000)  # Powers of two,
    bits[1::4] = bits[1::4] & np.uint32(0xFFFF0000) | np.uint32(0x8000)  # and ties.
    x = bits.view(np.float32)
    size = np.abs(x)
    return np.where(np.isfinite(x) & (size > 1e-30) & (size < 1e30), x, 1.0)


@pytest.mark.parametrize("residual_dtype", ["int16", "int8", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_update_gives_the_rounded_number_for_any_bits(residual_dtype, wrap):
    """Each update sets float32 to another number."""
    given = optax.GradientTransformationExtraArgs(
        lambda params: (),
        lambda updates, state, params: (updates - params, state),
    )
    tx = gx.master_weights(given, residual_dtype=residual_dtype)

    @wrap
    def step(params, state, target):
        before = gx.get_master_weights(params, state)
        updates, state = tx.update(target, state, params)
        return optax.apply_updates(params, updates), state, before + (target - before)

    part = {"int16": 2.0**-16, "int8": 1 / 250, "bfloat16": 2.0**-9}[residual_dtype]
    params = jnp.asarray(numbers(0)).astype(jnp.bfloat16)
    state = tx.init(params)
    for seed in range(1, 30):
        old = np.abs(np.float32(params))
        params, state, wanted = step(params, state, jnp.asarray(numbers(seed)))
        got, wanted = np.asarray(gx.get_master_weights(params, state)), np.array(wanted)
        # No float32 is the way to a number that is 2¹⁶ times smaller.
        usual = np.abs(wanted) >= old * 2.0**-14
        assert usual.sum() > 200
        if residual_dtype == "int16":
            np.testing.assert_array_equal(got[usual], wanted[usual])
        gap = np.abs(wanted) * 2.0**-7
        assert (np.abs(np.float32(params) - wanted) <= 0.51 * gap)[usual].all()
        error = np.abs(got - wanted)
        assert (error[usual] <= (part * gap)[usual]).all()
        assert (error <= part * gap + old * 2.0**-23).all()


@pytest.mark.parametrize(("dtype", "exponent"), [("bfloat16", 16), ("float16", 13)])
def test_a_parameter_may_become_so_much_smaller_and_is_not_missed(dtype, exponent):
    """All parameters in [1, 2), random residuals, and numbers that are that smaller."""
    rng = np.random.default_rng(0)
    every = np.arange(1, 2, float(jnp.finfo(dtype).eps))
    shape = (max(200_000 // len(every), 1), len(every))
    params = jnp.asarray(np.broadcast_to(every, shape)).astype(dtype)
    tx = gx.master_weights(optax.scale(1.0))
    state = tx.init(params)
    state = state._replace(
        residual=jnp.asarray(rng.integers(-(2**15), 2**15, shape), jnp.int16)
    )
    old = np.asarray(gx.get_master_weights(params, state))
    smaller = 2.0 ** rng.uniform(-exponent - 5, 0, shape) * rng.choice([-1, 1], shape)
    change = (np.float32(smaller) - old).astype(np.float32)
    wanted = (old + change).astype(np.float32)
    updates, after = tx.update(jnp.asarray(change), state, params)
    new = optax.apply_updates(params, updates)
    got, new = np.asarray(gx.get_master_weights(new, after)), np.float32(new)
    nearest = np.float32(jnp.asarray(wanted).astype(dtype))
    # In the middle between two numbers both are as near.
    missed = np.abs(new - wanted) != np.abs(nearest - wanted)
    times = np.abs(old / wanted)
    assert missed.any()
    assert 0.99 * 2.0**exponent < times[missed].min() < 1.5 * 2.0**exponent
    assert np.abs(got - wanted).max() <= 2.0**-24 * 1.01 * old.max()
    assert np.abs(new - nearest)[missed].max() <= 2.0**-24 * 1.01 * old.max()


@pytest.mark.parametrize(
    "direction", [optax.scale_by_adam(), optax.identity()], ids=["adam", "sgd"]
)
@pytest.mark.parametrize("residual_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_below_a_part_move_as_far_as_they_should(
    dtype, residual_dtype, direction
):
    """Each weight by itself: at 1, and at the numbers around it."""
    eps = float(jnp.finfo(dtype).eps)
    start = np.array([1, -1, 1 - eps, 1 + 3 * eps, 1.5])[:, None]
    rates, steps = np.array([3e-7, 3e-6, 1e-5]), 3000
    step = optax.chain(direction, optax.stateless(lambda u, _: -jnp.float32(rates) * u))
    tx = gx.master_weights(step, residual_dtype=residual_dtype)
    params = jnp.asarray(np.broadcast_to(start, (5, 3)), dtype)

    @jax.jit
    def train(params, state):
        def step(carry, _):
            grads = jnp.ones((5, 3))
            return gx.apply_gradients(tx, grads, carry[1], carry[0]), None

        return jax.lax.scan(step, (params, state), length=steps)[0]

    got = gx.get_master_weights(*train(params, tx.init(params)))
    in_float32 = np.float32(params)
    for _ in range(steps):
        in_float32 = in_float32 - np.float32(rates)
    # Below 1e-6 float32 rounds each step by up to a sixth of it.
    lost = np.abs(in_float32 - (start - steps * rates))
    error = np.abs(np.float64(got) - (start - steps * rates))
    assert (error <= lost + 0.01 * steps * rates + 3 * eps / 254).all()


def test_a_row_that_is_touched_now_and_then_moves_as_far_as_it_should():
    table = jnp.ones((6, 4), jnp.bfloat16)
    inner = gx.lazy(optax.sgd(1e-5))
    tx = gx.master_weights(inner, residual_dtype="int8")
    every = jnp.array([1, 2, 3, 5, 1000])  # Row i in each step of so many.

    @jax.jit
    def train(table, state):
        def step(carry, number):
            rows = jnp.where(number % every == 0, jnp.arange(5), 6)
            grads = gx.IndexedSlices(rows, jnp.ones((5, 4), jnp.bfloat16), (6, 4))
            return gx.apply_gradients(tx, grads, carry[1], carry[0]), None

        return jax.lax.scan(step, (table, state), jnp.arange(3000))[0]

    got = np.float64(gx.get_master_weights(*train(table, tx.init(table))))
    times = np.array([3000, 1500, 1000, 600, 3, 0])[:, None]
    expected = np.broadcast_to(1 - 1e-5 * times, got.shape)
    np.testing.assert_allclose(got, expected, atol=1e-4)  # Seven parts.


@pytest.mark.slow
@pytest.mark.parametrize("residual_dtype", ["int16", "int8", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_zero_update_changes_no_bit(dtype, residual_dtype):
    """Of each number in [1, 2) with many residuals, at many steps."""
    eps = float(jnp.finfo(dtype).eps)
    params = jnp.asarray(np.arange(1, 2, eps), dtype)[:, None]
    params = jnp.broadcast_to(params, (len(params), 254))
    tx = gx.master_weights(optax.scale(1.0), residual_dtype=residual_dtype)
    half_way = jnp.broadcast_to(eps / 2 * np.linspace(-0.49, 0.99, 254), params.shape)
    updates, state = tx.update(jnp.float32(half_way), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    _, state = tx.update(jnp.zeros(params.shape), state, params)
    before = np.asarray(state.residual)

    @jax.jit
    def still(params, state):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jnp.zeros(params.shape), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), length=300)[0]

    after, state = still(params, state)
    np.testing.assert_array_equal(wide(after), wide(params))
    np.testing.assert_array_equal(state.residual, before)
    assert len(np.unique(before)) > 100


def test_float16_is_rounded_as_by_numpy_where_it_has_fewer_bits():
    rng = np.random.default_rng(0)
    x = np.float32(2.0 ** rng.uniform(-28, 17, 4096) * rng.choice([-1, 1], 4096))
    x = np.concatenate([x, np.float32([0, np.inf, -np.inf, np.nan, 2**-25, 65520])])
    tx = gx.master_weights(optax.scale(1.0))
    params = jnp.zeros(len(x), jnp.float16)
    updates, _ = jax.jit(tx.update)(jnp.asarray(x), tx.init(params), params)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    # In the middle between two numbers it takes the upper one.
    finite = np.where(np.isfinite(expected), expected, 0)
    gap = np.float64(np.spacing(np.float16(np.abs(finite))))
    tie = np.abs(np.where(np.isfinite(x), x, 0) - np.float64(finite)) == gap / 2
    np.testing.assert_array_equal(np.asarray(updates)[~tie], expected[~tie])


@pytest.mark.slow
def test_small_steps_of_small_numbers_in_float16_are_not_lost():
    start, step = jnp.full(4096, 3e-6, jnp.float16), optax.sgd(-1e-8)

    def trained(tx):
        @jax.jit
        def train(params, state):
            def push(carry, _):
                return gx.apply_gradients(tx, jnp.ones(4096), carry[1], carry[0]), None

            return jax.lax.scan(push, (params, state), length=300)[0]

        return train(start, tx.init(start))

    begin = np.float64(start)
    for residual_dtype, tol in {"int16": 1e-4, "int8": 1e-2, "bfloat16": 1e-2}.items():
        tx = gx.master_weights(step, residual_dtype=residual_dtype)
        got = gx.get_master_weights(*trained(tx))
        np.testing.assert_allclose(np.float64(got) - begin, 3e-6, rtol=tol)
    # A step of 1e-8 is 0.17 of the way to the next number.
    got, _ = trained(optax.chain(step, gx.round_stochastically(0)))
    np.testing.assert_allclose(np.mean(np.float64(got) - begin), 3e-6, rtol=0.02)


def test_large_numbers_are_those_of_float32_to_the_bit():
    rng = np.random.default_rng(0)
    start = jnp.asarray(2.0 ** rng.uniform(118, 127.5, 512), jnp.bfloat16)
    full, plain = start.astype(jnp.float32), optax.sgd(1.0)
    txs = [gx.master_weights(plain, residual_dtype=d) for d in ("int16", "int8")]
    runs = [(start, tx.init(start)) for tx in txs]
    for _ in range(5):
        grads = np.float32(2.0**-9 * rng.normal(size=512)) * np.asarray(full)
        full = full - grads
        runs = [
            gx.apply_gradients(tx, jnp.asarray(grads), state, params)
            for tx, (params, state) in zip(txs, runs, strict=True)
        ]
    exact, near = (gx.get_master_weights(*run) for run in runs)
    np.testing.assert_array_equal(exact, full)
    np.testing.assert_allclose(near, full, rtol=5 * 2.0**-7 / 254)


ENDS = [np.inf, -np.inf, np.nan, 3.3e38, -3.3e38, 0.0, -0.0, 1e-38]


@pytest.mark.parametrize(
    ("wrap", "step"), [(lambda f: f, 0.0), (jax.jit, 0.25)], ids=["eager", "jit"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "tx",
    [
        gx.master_weights(optax.scale(1.0)),
        gx.master_weights(optax.scale(1.0), residual_dtype="int8"),
        gx.master_weights(optax.scale(1.0), residual_dtype="bfloat16"),
        gx.round_stochastically(0),
    ],
    ids=["int16", "int8", "bfloat16", "random"],
)
def test_infinities_and_nan_stay(tx, dtype, wrap, step):
    params = jnp.asarray(ENDS, jnp.float32).astype(dtype)
    start, state = np.float32(params), tx.init(params)
    for _ in range(3):
        updates, state = wrap(tx.update)(jnp.full(8, step), state, params)
        params = optax.apply_updates(params, updates)
    ended = ~np.isfinite(start) | (np.abs(start) > 1)
    np.testing.assert_array_equal(np.float32(params)[ended], start[ended])
    np.testing.assert_allclose(np.float32(params)[~ended], 3 * step, atol=1e-37)
    if hasattr(state, "residual"):
        assert np.isfinite(np.float32(state.residual)).all()
        master = np.asarray(gx.get_master_weights(params, state))
        np.testing.assert_array_equal(master[ended], start[ended])


@pytest.mark.parametrize("residual_dtype", ["int16", "int8", "bfloat16"])
def test_a_number_may_become_infinite(residual_dtype):
    params = jnp.full(2, 3.3e38, jnp.bfloat16)
    tx = gx.master_weights(optax.scale(1.0), residual_dtype=residual_dtype)
    state, grads = tx.init(params), jnp.array([1e37, 3e38])
    for _ in range(2):
        params, state = gx.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal(wide(params), np.inf)
    np.testing.assert_array_equal(gx.get_master_weights(params, state), np.inf)


def test_a_state_with_blocks_along_another_axis_goes_on():
    """A state knows its blocks, so other settings do not read it as another one."""
    params = {"w": jnp.ones((64, 96))}
    rng = np.random.default_rng(0)
    grads = {"w": jnp.asarray(rng.normal(size=(64, 96)), jnp.float32)}
    first = gx.low_bit_state(optax.trace(0.9))
    _, state = first.update(grads, first.init(params))
    expected, other = first.update(grads, state)
    second = gx.low_bit_state(optax.trace(0.9), block_axis=-1, block_size=16)
    updates, after = second.update(grads, state)
    np.testing.assert_array_equal(updates["w"], expected["w"])
    jax.tree.map(np.testing.assert_array_equal, after, other)


def test_bytes_of_a_parameter_with_its_gradient():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    tx = gx.master_weights(gx.low_bit_state(optax.adamw(1e-3)), residual_dtype="int8")
    state = jax.eval_shape(tx.init, params)
    held = jax.tree.leaves((params, params, state))  # Gradients are like parameters.
    total = sum(x.size * x.dtype.itemsize for x in held) / 2**20
    assert 7 <= total < 7.1


def test_leaves_in_float32_and_without_gradient_stay():
    params = {
        "half": jnp.ones(3, jnp.bfloat16),
        "full": jnp.ones(3),
        "frozen": jnp.ones(2, jnp.bfloat16),
    }
    tx = gx.master_weights(optax.adam(0.1))
    state = tx.init(params)
    assert state.residual["full"] == optax.MaskedNode()
    grads = {"half": jnp.ones(3, jnp.bfloat16), "full": jnp.ones(3), "frozen": None}
    params, after = gx.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal(wide(params["frozen"]), 1)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    np.testing.assert_allclose(params["full"], 0.9, rtol=1e-6)


def test_random_rounding_is_right_on_average_and_the_same_for_a_seed():
    tx = gx.round_stochastically(7)
    for dtype in (jnp.bfloat16, jnp.float16):
        eps = float(jnp.finfo(dtype).eps)
        params = jnp.asarray([[1.0], [-1.0]] * 1000, dtype) * jnp.ones(64, dtype)
        state, draws = tx.init(params), []
        for _ in range(3):
            updates = jnp.full(params.shape, 0.25 * eps)
            moved, new = tx.update(updates, state, params)
            again, _ = jax.jit(tx.update)(updates, state, params)
            np.testing.assert_array_equal(moved, again)
            draws.append(np.asarray(optax.apply_updates(params, moved), np.float64))
            state = new
        moved = (np.array(draws) - np.asarray(params, np.float64)) / eps
        assert set(np.unique(moved[:, ::2])) == {0, 1}  # Above 1 the distance is eps,
        assert set(np.unique(moved[:, 1::2])) == {0, 0.5}  # and below it the half.
        deviation = np.sqrt(0.25 * 0.75 / moved[:, ::2].size)
        assert abs(moved.mean() - 0.25) < 4 * deviation
        assert (
            abs(np.corrcoef(moved[0, ::2].ravel(), moved[1, ::2].ravel())[0, 1]) < 0.02
        )


@pytest.mark.parametrize(
    "setting",
    [lambda: jax.enable_custom_prng(True), lambda: jax.default_prng_impl("rbg")],
    ids=["custom", "rbg"],
)
def test_random_rounding_is_the_same_with_every_setting_of_keys(setting):
    tx, params = gx.round_stochastically(7), jnp.ones((64, 64), jnp.bfloat16)
    updates = jnp.full((64, 64), 2.0**-9)
    expected, usual = tx.update(updates, tx.init(params), params)
    with setting():
        state = tx.init(params)
        got, after = tx.update(updates, state, params)
    assert (state.key.shape, state.key.dtype) == ((2,), jnp.uint32)
    np.testing.assert_array_equal(state.key, usual.key)
    np.testing.assert_array_equal(got, expected)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("axis", [-1, -2])
def test_state_in_8_bits_is_near_and_no_second_moment_is_lost(axis):
    rng = np.random.default_rng(0)
    grads = jnp.asarray(
        rng.normal(size=(300, 70)) * 10.0 ** rng.uniform(-5, 0, (300, 70))
    )
    grads = grads.astype(jnp.float32)
    tx = gx.low_bit_state(optax.scale_by_adam(), block_axis=axis)
    _, state = tx.update(grads, tx.init(grads))
    updates, after = tx.update(jnp.zeros_like(grads), state)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    # A small first moment may become 4 times as large; a second one never becomes 0.
    assert np.abs(updates).max() < 3
    x = np.float64(grads) ** 2 * 1e-3
    assert state.inner_state.nu.dtype == jnp.int8
    _, of_nu = jax.tree.leaves(state.scales)
    assert (np.asarray(of_nu) < 0).all()
    tenth = np.sqrt(x) > 0.1 * np.sqrt(x.max())
    exact, _ = optax.scale_by_adam().update(grads, optax.scale_by_adam().init(grads))
    np.testing.assert_allclose(np.abs(exact)[tenth], 1, rtol=1e-2)


def test_kept_and_small_arrays_stay_as_they_are():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    tx = gx.low_bit_state(optax.scale_by_adam(), keep=["nu/w"])
    state = tx.init(params).inner_state
    assert state.mu["w"].dtype == jnp.int8
    assert state.nu["w"].dtype == state.mu["b"].dtype == jnp.float32
    with pytest.raises(ValueError, match="keep must name leaves of the state, got 'w'"):
        gx.low_bit_state(optax.scale_by_adam(), keep=["w"]).init(params)


@pytest.mark.slow
def test_lazy_takes_the_touched_rows_of_state_in_8_bits():
    table = jnp.zeros((512, 16))
    tx = gx.lazy(gx.low_bit_state(optax.adam(0.1), block_axis=-1, min_size=1))
    state = tx.init(table)
    grads = gx.IndexedSlices([3, 500], jnp.ones((2, 16)), (512, 16))
    updates, state = tx.update(grads, state, table)
    np.testing.assert_allclose(updates.values, -0.1, rtol=1e-2)
    codes = optax.tree.get(state, "mu")
    assert codes.dtype == jnp.int8
    assert np.flatnonzero(np.asarray(codes).any(1)).tolist() == [3, 500]


SGD, RANDOM = optax.sgd(0.1), gx.round_stochastically(0)
MASTER = gx.master_weights(SGD)
HALF, WHOLE = {"w": jnp.ones(2, jnp.bfloat16)}, {"n": jnp.arange(2)}
BAD_INPUT = {
    "residual_dtype must be one of 'int16'": lambda: gx.master_weights(
        SGD, residual_dtype="int4"
    ),
    "inner must be": lambda: gx.master_weights(None),
    "residual_dtype must be .* got <class": lambda: gx.master_weights(
        SGD, residual_dtype=jnp.int8
    ),
    r"bits must be in \[8, 8\], got 4": lambda: gx.low_bit_state(SGD, bits=4),
    "bits must be an integer": lambda: gx.low_bit_state(SGD, bits=8.0),
    r"block_size must be in \[8, .*\], got 0": lambda: gx.low_bit_state(
        SGD, block_size=0
    ),
    "block_size must be in .* got 65537": lambda: gx.low_bit_state(
        SGD, block_size=65537
    ),
    r"min_size must be in \[1": lambda: gx.low_bit_state(SGD, min_size=0),
    r"block_axis must be in \[-2, -1\]": lambda: gx.low_bit_state(SGD, block_axis=0),
    "seed must be an integer": lambda: gx.round_stochastically(0.5),
    r"master_weights takes .* int32 at \['n'\]": lambda: MASTER.init(WHOLE),
    r"round_stochastically takes .* int32 at \['n'\]": lambda: RANDOM.init(WHOLE),
    "master_weights needs params": lambda: MASTER.update(HALF, MASTER.init(HALF)),
    "round_stochastically needs params": lambda: RANDOM.update(HALF, RANDOM.init(HALF)),
    "state is not that of tx": lambda: MASTER.update(HALF, SGD.init(HALF), HALF),
    "at the root it has .*MasterWeightsState, .* has .*LowBitState": lambda: (
        gx.low_bit_state(SGD).update(HALF, MASTER.init(HALF), HALF)
    ),
    "root it has .*MasterWeightsState, .* has .*RoundStochasticallyState": lambda: (
        RANDOM.update(HALF, MASTER.init(HALF), HALF)
    ),
    "parameters in another precision": lambda: MASTER.update(
        HALF, MASTER.init(wide(HALF)), HALF
    ),
    "float32 at .* parameters in another": lambda: gx.get_master_weights(
        wide(HALF), MASTER.init(HALF)
    ),
    "state.residual is int16 .* residual_dtype is 'int8'": lambda: gx.master_weights(
        SGD, residual_dtype="int8"
    ).update(HALF, MASTER.init(HALF), HALF),
    "no MasterWeightsState": lambda: gx.get_master_weights(HALF, SGD.init(HALF)),
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_is_named(words):
    with pytest.raises((TypeError, ValueError), match=words):
        BAD_INPUT[words]()
