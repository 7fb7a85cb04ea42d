"""Rounding to half precision against NumPy's, and residuals of float32 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._transforms import half, master_weights, round_stochastically

BF16 = jnp.dtype(jnp.bfloat16)
DTYPES = BF16, np.dtype(np.float16)


def numbers(dtype):
    """Ends and middles between neighbours of ``dtype``, in float32, and random ones."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, 400).astype(np.uint16)
    near = np.float32(bits.view(dtype))
    near = near[np.isfinite(near) & (abs(near) < 1e38)]
    near = near[(near == 0) | (abs(near) > 1e-30)]
    with np.errstate(over="ignore"):
        middle = np.float32(
            (np.float64(near) + np.float32(next_above(near, dtype))) / 2
        )
    beside = [np.nextafter(middle, np.float32(s)) for s in (-np.inf, np.inf)]
    ends = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan])
    return np.concatenate([ends, near, middle, *beside])


def next_above(x, dtype):
    """The number of ``dtype`` above one of its numbers, by its bits."""
    bits = np.asarray(x, dtype).view(np.int16).astype(np.int32)
    key = np.where(bits < 0, -32768 - bits, bits) + 1  # Whose order is the numbers'.
    bits = np.where(key < 0, -32768 - key, key)
    return bits.astype(np.int16).view(dtype)


def test_the_nearest_number():
    given = {str(dtype): numbers(dtype) for dtype in DTYPES}
    found = jax.jit(
        lambda given: {k: half.nearest(x, np.dtype(k)) for k, x in given.items()}
    )(given)
    for k, x in given.items():
        with np.errstate(over="ignore"):
            wanted = np.float32(x.astype(k))
        np.testing.assert_array_equal(found[k], wanted)


def test_the_number_next_to_another_and_the_part_of_the_way_there():
    for dtype in DTYPES:
        near = np.float32([0, 1, -1, 1.5, 2, -2, 7.0, -1024])
        above = np.float32(next_above(near, dtype))
        below = -np.float32(next_above(-near, dtype))
        quarter, beyond = near + (above - near) / 4, near - (near - below) / 4
        found = jax.jit(
            lambda near, *given, dtype=dtype: (
                half.neighbour(near, jnp.ones(8), dtype),
                half.neighbour(near, -jnp.ones(8), dtype),
                [half.part_of_way(x, near, dtype) for x in given],
                [half.rounded_at(t, given[0], dtype) for t in (0.0, 0.24, 0.26)],
            )
        )(near, quarter, beyond, near)
        if dtype == BF16:  # The numbers next to 0 are below all normal ones.
            near, above, below = near[1:], above[1:], below[1:]
            found = jax.tree.map(lambda x: x[1:], found)
        np.testing.assert_array_equal(found[0], above)
        np.testing.assert_array_equal(found[1], below)
        for (far, part), wanted, way in zip(
            found[2], (above, below, near), (0.25, 0.25, 0), strict=True
        ):
            np.testing.assert_array_equal(part, np.full(len(near), way))
            if way:
                np.testing.assert_array_equal(far, wanted)
        for rounded, wanted in zip(found[3], (above, above, near), strict=True):
            np.testing.assert_array_equal(rounded, wanted)


def test_thresholds_are_spread_evenly():
    counts = np.arange(64)
    found = jax.jit(half.even_threshold)(counts.astype(np.int32))
    golden = (np.sqrt(5) - 1) / 2
    np.testing.assert_allclose(found, (0.5 + counts * golden) % 1, atol=2e-5)
    ends = np.float32([[np.inf, 3, 2], [np.inf, 1, 2]])
    infinite = jax.jit(half.difference)(*ends)
    assert infinite.tolist() == [0, 2, 0]


def test_a_parameter_and_its_residual_are_the_float32_number():
    x = numbers(BF16)
    x = x[np.isfinite(x) & ((abs(x) > 1e-30) | (x == 0)) & (abs(x) < 1e37)]

    @jax.jit
    def run(x):
        p = half.nearest(x, BF16).astype(BF16)
        old = jnp.zeros(x.shape, "int16")
        near = master_weights._rounded(x, p, old)
        residual = master_weights._residual(x, near, p, old, None)
        return near, residual, master_weights._joined(near.astype(BF16), residual)

    near, residual, joined = run(x)
    assert residual.dtype == "int16"
    np.testing.assert_array_equal(joined, x)
    # The nearest number; in the middle between two the larger one.
    wanted = np.float32(x.astype(BF16))
    is_middle = np.float64(x) * 2 == np.float64(next_above(wanted, BF16)) + wanted
    far = np.where(is_middle, np.float32(next_above(wanted, BF16)), wanted)
    np.testing.assert_array_equal(near, far)


THRESHOLDS = 0.0, 0.2, 0.3, 0.7, 0.8, 1 - 2.0**-16


def rounded_up(rest, threshold):
    """Whether a part of the way up counts as all of it."""
    return rest > 0 and rest > 1 - threshold


def test_the_rest_of_a_part_is_rounded_up_above_one_threshold():
    """Whole parts stay for any threshold, although float32 rounds the parameter."""
    wholes = np.array([-300, -128, -127, -3, -1, 0, 1, 64, 126, 127, 300])
    rests = np.array([0, 0.25, 0.75])
    near = {dtype.name: np.full((11, 3), 1.5, "f4") for dtype in DTYPES}
    gaps = {dtype.name: np.float64(next_above(1.5, dtype)) - 1.5 for dtype in DTYPES}
    parts = (wholes[:, None] + rests) / 254
    x = {k: np.float32(near[k] + parts * gaps[k]) for k in near}

    @jax.jit
    def run(x, threshold):
        old = jnp.zeros((11, 3), "int8")
        return {
            k: master_weights._residual(x[k], near[k], x[k].astype(k), old, threshold)
            for k in x
        }

    for threshold in THRESHOLDS:
        wanted = [
            [np.clip(n + rounded_up(rest, threshold), -128, 127) for rest in rests]
            for n in wholes
        ]
        for got in run(x, np.float32(threshold)).values():
            assert got.dtype == "int8"
            np.testing.assert_array_equal(got, wanted)


def test_a_bfloat16_residual_is_rounded_up_above_one_threshold():
    low = np.float32([2**-10, 2**-9, 129 * 2**-17, -(2**-10), -(2**-9)])
    high = np.float32(next_above(low, BF16))
    near, rests = np.float32(1.5), [0, 0.25, 0.75]
    x = np.float32([near + low + rest * (high - low) for rest in rests])
    ends = np.float32([[np.inf, -np.inf, 3.4e38, np.nan, 1.5]])
    after = np.float32([[np.inf, -np.inf, np.inf, np.nan, 1.5]])
    given = np.concatenate([x, ends]), np.concatenate([np.full((3, 5), near), after])

    @jax.jit
    def run(x, near, threshold):
        old = jnp.zeros(x.shape, BF16)
        return master_weights._residual(x, near, x.astype(BF16), old, threshold)

    for threshold in THRESHOLDS:
        got = run(*given, np.float32(threshold))
        assert got.dtype == BF16
        wanted = [high if rounded_up(rest, threshold) else low for rest in rests]
        np.testing.assert_array_equal(np.float32(got), [*wanted, np.zeros(5)])


def test_a_residual_is_the_nearest_part():
    """Below its normal numbers float16 has 24 bits less than float32."""
    near, dtype = np.float32(2.0**-19), np.dtype(np.float16)
    x = near + np.float32([7.25, 7.75, -7.25, -7.75]) * 2**-40
    ends = np.array([1, 3.39e38], BF16)  # Above the largest number there is none.
    middle, one = np.float32([1 + 2**-8]), np.array([1], BF16)

    @jax.jit
    def run(x, ends, middle, one):
        joined, rounded = master_weights._joined, master_weights._rounded
        return (
            master_weights._residual(x, near, x.astype(dtype), x.astype("int16"), None),
            joined(ends, np.array([1, 0], "int16")),
            joined(one, np.array([-(2.0**-9)], BF16)),
            rounded(middle, one, np.zeros(1, "int8")),
            rounded(middle, one, np.zeros(1, "int16")),
        )

    residual, parts, sums, even, upper = run(x, ends, middle, one)
    assert residual.tolist() == [7, 8, -7, -8]
    assert parts.tolist() == [1 + 2.0**-23, np.float32(ends[1])]
    assert (sums, even, upper) == (1 - 2**-9, 1, 1 + 2**-7)


def hashed(x):
    """The hash lowbias32, in Python's integers."""
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


def test_a_random_number_is_a_hash_of_its_key_and_its_place():
    key = [0x12345678, 0x9ABCDEF0]
    places = np.arange(24).reshape(2, 3, 4)
    wanted = [hashed(hashed(n ^ key[0]) ^ key[1]) >> 16 for n in range(24)]
    random = jax.jit(round_stochastically._random, static_argnums=1)
    got = random(jnp.asarray(key, "uint32"), places.shape)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got.ravel(), np.array(wanted) / 2**16)


def test_which_parameters_are_in_half_precision():
    assert half.is_half(jnp.ones(1, "bfloat16"))
    assert half.is_half(np.float16(1))
    assert not half.is_half(1.0)
    half.check_precision("it", [np.float16(1), np.float32(1), np.complex128(1), 1.0])
    for wrong in (np.int32(1), True, jnp.ones(1, "float8_e5m2")):
        with pytest.raises(
            TypeError, match=r"^it takes parameters in .* at \[1\]\. Put"
        ):
            half.check_precision("it", [1.0, wrong])


def test_residuals_are_those_of_their_parameters():
    masked = optax.MaskedNode()
    params = {"a": jnp.ones(2, BF16), "b": jnp.ones(2)}
    right = {"a": jnp.zeros(2, "int16"), "b": masked}
    check = master_weights._check
    check(params, right, "int16")
    check(params, right)
    check({"a": None, "b": params["b"]}, {"a": None, "b": masked}, "int16")
    with pytest.raises(
        TypeError, match=r"residual is int16 at \['a'\], but residual_dt"
    ):
        check(params, right, "int8")
    with pytest.raises(TypeError, match=r"params have float32 at \['a'\], and state"):
        check({**params, "a": jnp.ones(2)}, right, "int16")
    # Parameters of another transformation have none, but where the state is its own.
    check(params, {"a": masked, "b": masked})
    with pytest.raises(TypeError, match=r"params have bfloat16 at \['a'\], and state"):
        check(params, {"a": masked, "b": masked}, "int16")
    with pytest.raises(TypeError, match="state has no MasterWeightsState, got none in"):
        gx.get_master_weights(params, optax.EmptyState())
    tx = gx.master_weights(optax.sgd(1.0))
    state = jax.eval_shape(tx.init, params)
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    inner = gx.master_weights(optax.trace(0.9)).init(described).inner_state
    assert jax.tree.map(lambda x: x.dtype.name, inner.trace) == {
        "a": "float32",
        "b": "float32",
    }
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype.name), state.residual)
    assert kinds == {"a": ((2,), "int16"), "b": masked}
    with pytest.raises(
        TypeError, match=r"^state is not that of tx.*MasterWeightsState"
    ):
        tx.update(params, state.inner_state, params)
    with pytest.raises(ValueError, match="master_weights needs params"):
        tx.update(params, state)
