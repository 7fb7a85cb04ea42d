"""Codes of 8 bits and their blocks, against the words of the docstring in NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._transforms import low_bit_state

LARGEST = 65536


def blocks(length, size):
    """Equal ones, less than twice as many as needed; the most factors of two."""
    fewest = -(-length // size)
    equal = [n for n in range(fewest, 2 * fewest) if length % n == 0]
    return max(equal, key=lambda n: (n & -n, -n), default=fewest)


def test_the_number_of_blocks():
    for size in (8, 10, 128):
        for length in range(1, 1200, 1 if size < 128 else 7):
            assert low_bit_state._blocks(length, size) == blocks(length, size)


AXES = [  # shape, dtype, block size, smallest size, axis for blocks, the axis
    ((4096,), "float32", 128, 4096, -2, 0),
    ((4096,), "float32", 128, 4096, -1, 0),
    ((4095,), "float32", 128, 4096, -2, None),
    ((), "float32", 128, 1, -2, None),
    ((7,), "float32", 8, 1, -2, None),
    ((8,), "float32", 8, 1, -2, 0),
    ((512, 32), "float32", 128, 1, -2, 0),
    ((511, 32), "float32", 128, 1, -2, 1),
    ((511, 31), "float32", 128, 1, -2, 0),
    ((511, 31), "float32", 128, 1, -1, 1),
    ((7, 31), "float32", 8, 1, -2, None),
    ((31, 32), "float32", 8, 1, -2, 1),
    ((32, 32), "float32", 8, 1, -2, 0),
    ((9, 7), "float32", 8, 1, -1, None),
    ((9, 8), "float32", 8, 1, -1, 1),
    ((2, 16, 64), "float32", 128, 1, -2, 1),
    ((2, 16, 64), "float32", 128, 1, -1, 2),
    ((2, 7, 64), "float32", 128, 1, -2, None),
    ((4096,), "bfloat16", 128, 1, -2, 0),
    ((4096,), "int32", 128, 1, -2, None),
    ((4096,), "complex64", 128, 1, -2, None),
]


def test_the_axis_that_is_divided():
    for shape, dtype, *numbers, wanted in AXES:
        x = jax.ShapeDtypeStruct(shape, dtype)
        assert low_bit_state._axis_for(x, *numbers) == wanted, (shape, numbers)


def split(x, axis, n):
    size = -(-x.shape[axis] // n)
    return [
        np.take(x, range(k, min(k + size, x.shape[axis])), axis)
        for k in range(0, x.shape[axis], size)
    ]


def codes(x):
    """The scale and the codes of one block along the first axis, in float64."""
    m = np.max(np.abs(x))
    part = np.abs(x) / (m or 1)
    if (x >= 0).all() and m:
        code = np.maximum(np.round(255 * part ** (1 / 4)), x > 0) - 128
        return -m, code, m * ((code + 128) / 255) ** 4
    code = np.sign(x) * np.round(127 * np.sqrt(part))
    return m, code, np.sign(code) * m * (code / 127) ** 2


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype("f4")
    x[:7] = np.abs(x[:7])  # A block without a negative entry,
    x[2, 0] = x[3, 1] = 1e-30  # with one that is nearly 0,
    x[5, 0] = 0
    x[:, 2] = 0  # and one with nothing else.
    return {
        "first": (x, 0, 3),
        "middle": (np.stack([x, 2 * x]), 1, 4),
    }


def test_codes_are_those_of_the_docstring():
    cases = arrays()
    settings = {k: case[1:] for k, case in cases.items()} | {"bad": (1, 2)}

    @jax.jit
    def run(given):
        encoded = {
            k: low_bit_state._encode(x, axis=axis, n=n, dtype=jnp.float32)
            for x, (k, (axis, n)) in zip(given, settings.items(), strict=True)
        }
        decoded = {
            k: low_bit_state._decode(*pair, axis=settings[k][0])
            for k, pair in encoded.items()
        }
        return encoded, decoded

    bad = np.ones((2, 16), np.float32)
    bad[0, 3], bad[1, 9] = np.nan, -np.inf
    encoded, decoded = run([*(x for x, *_ in cases.values()), bad])
    is_bad = ~np.isfinite(decoded.pop("bad")).reshape(2, 2, 8)
    assert is_bad.any(-1).tolist() == [[True, False], [False, True]]
    for k, (x, axis, n) in cases.items():
        scales, found = encoded[k]
        assert (found.dtype, found.shape) == (jnp.int8, x.shape)
        assert scales.shape == (*x.shape[:axis], n, *x.shape[axis + 1 :])
        moved = np.moveaxis(np.float64(x), axis, 0).reshape(x.shape[axis], -1)
        for i, block in enumerate(split(moved, 0, n)):
            size = -(-len(moved) // n)
            at = slice(i * size, i * size + len(block))
            for column in range(moved.shape[1]):
                scale, code, value = codes(block[:, column])
                lane = [
                    np.moveaxis(np.float64(y), axis, 0).reshape(y.shape[axis], -1)
                    for y in (scales, found, decoded[k])
                ]
                np.testing.assert_allclose(lane[0][i, column], scale, rtol=1e-6)
                np.testing.assert_allclose(lane[1][at, column], code, atol=1)
                wrong = np.sum(lane[1][at, column] != code)
                assert wrong <= 1  # Between two codes float32 may take the other one.
                if not wrong:
                    np.testing.assert_allclose(lane[2][at, column], value, rtol=1e-5)


def test_a_constant_has_the_codes_of_its_number():
    """Each entry is the largest of its block: no entry has to be encoded."""
    x = jnp.ones((2, 20, 3), jnp.bfloat16)
    for value, scale, code in ((0.0, 0, 0), (3.5, -3.5, 127), (-2.0, 2, -127)):
        scales, found = low_bit_state._encoded_number(value, x, 1, 4, x)
        assert (scales.dtype, scales.shape) == (x.dtype, (2, 4, 3))
        assert (found.dtype, found.shape) == (jnp.int8, x.shape)
        assert {*np.float32(scales).flat} == {scale}
        assert {*np.array(found).flat} == {code}
    plain = [0, 1e-29, -1e-29, 1e29]
    assert [low_bit_state._is_plain(x) for x in plain] == [True] * 4
    far = [1e-31, -1e-31, 1e31, np.inf, np.nan]
    assert [low_bit_state._is_plain(x) for x in far] == [False] * 5


def test_arguments():
    for wrong in (
        *({"bits": 4}, {"bits": 9}, {"block_size": 7}, {"block_size": LARGEST + 1}),
        *({"min_size": 0}, {"min_size": 2**31}, {"block_axis": 0}, {"block_axis": -3}),
    ):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=rf"^{name} must be in .*, got {value}"):
            gx.low_bit_state(optax.trace(0.9), **wrong)
    gx.low_bit_state(optax.trace(0.9), block_size=LARGEST, min_size=2**31 - 1)
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1, keep=["trace/b"])
    params = {"a": jnp.zeros(64), "b": jnp.zeros(64)}
    state = tx.init(params)
    named = {k: x.dtype.name for k, x in state.inner_state.trace.items()}
    assert named == {"a": "int8", "b": "float32"}
    assert jax.tree.map(jnp.shape, state.scales) == ((1,), optax.MaskedNode())
    masked = {"a": params["a"], "b": optax.MaskedNode()}
    kept = tx.init(masked | {"b": params["b"]}).scales
    assert isinstance(kept[1], optax.MaskedNode)
    with pytest.raises(ValueError, match="keep must name leaves of the state"):
        gx.low_bit_state(optax.trace(0.9), keep=["trace/c"]).init(params)
    with pytest.raises(TypeError, match=r"state is not that of tx: .*LowBitState"):
        tx.update(params, state.inner_state)


def test_without_parameters_there_is_one_scale():
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1)
    state = tx.init({})
    assert jnp.shape(state.scales) == ()
    updates, after = tx.update({}, state, {})
    assert updates == {}
    assert after.scales is state.scales


def test_scales_lie_where_their_blocks_do_if_the_devices_divide_these():
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=axes)
    tx = gx.low_bit_state(optax.trace(0.9), min_size=1)
    rows = P("x", None)
    for length, spec, blocks, wanted in (
        (1024, rows, 8, rows),
        (200, rows, 2, P(None, None)),
        (200, P("y", "x"), 2, P("y", "x")),
        (1024, P(("x", "y"), None), 8, P(("x", "y"), None)),
    ):
        there = NamedSharding(mesh, spec)
        w = jax.ShapeDtypeStruct((length, 8), jnp.float32, sharding=there)
        with jax.set_mesh(mesh):
            scales, codes = jax.make_jaxpr(tx.init)(w).out_avals
        assert (scales.shape, scales.sharding.spec) == ((blocks, 8), wanted)
        assert (codes.shape, codes.sharding.spec) == ((length, 8), spec)
    # Each device makes its own layers of a stack, or a part of each layer.
    for spec, scans in ((P("x", None, None), 0), (P(None, "x", None), 1)):
        there = NamedSharding(mesh, spec)
        w = jax.ShapeDtypeStruct((4, 512, 8), jnp.float32, sharding=there)
        with jax.set_mesh(mesh):
            program = jax.make_jaxpr(tx.init)(w)
        assert str(program).count("= scan[") == scans


def test_a_new_state_of_one_number_is_not_encoded_but_on_cpu():
    """Unless platforms round it differently."""

    def init(value):
        made = optax.GradientTransformation(
            lambda params: jax.tree.map(lambda p: jnp.full_like(p, value), params),
            optax.identity().update,
        )
        return gx.low_bit_state(made, min_size=8).init

    for shape in ((64, 8), (3, 64), (3, 64, 8)):
        w = jax.ShapeDtypeStruct(shape, jnp.float32)
        for value, number in ((0.0, 1), (0.1, 1), (1e-35, 0)):
            program = str(jax.make_jaxpr(init(value))(w))
            constants = re.findall(r":i8\[[\d,]*\] = broadcast_in_dim", program)
            assert len(constants) == number
            # A stack is made layer by layer.
            assert program.count("= scan[") == (len(shape) == 3)


def test_a_leaf_that_inner_makes_wider_keeps_its_dtype():
    masked = optax.MaskedNode()
    kept = low_bit_state._again(masked, jnp.ones(2, jnp.bfloat16), jnp.ones(2))
    assert (kept[0], kept[1].dtype) == (masked, jnp.bfloat16)
    for old, new in ((1.5, jnp.int32(2)), (None, jnp.ones(2)), (jnp.ones(2), None)):
        assert low_bit_state._again(masked, old, new)[1] is new
