"""Rounding to bfloat16 by integer operations is the rounding that NumPy knows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradxform as gx
from gradxform._trees.rounding import narrow

# Each sign, exponent and upper half of a mantissa; below, at and above the middle.
UPPER = np.arange(2**16, dtype=np.uint32)[:, None] << 16
LOWER = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
NUMBERS = (UPPER | LOWER).view(np.float32)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_every_bit_is_numpys(wrap):
    rounded = np.asarray(wrap(lambda x: narrow(x, "bfloat16"))(NUMBERS))
    with np.errstate(all="ignore"):
        expected = NUMBERS.astype(ml_dtypes.bfloat16)
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.isnan(rounded), np.isnan(NUMBERS))
    numbers = ~np.isnan(NUMBERS)
    np.testing.assert_array_equal(
        rounded.view(np.uint16)[numbers], expected.view(np.uint16)[numbers]
    )


def test_the_derivative_is_that_of_a_cast():
    x, dx = jnp.array([1.0, 2.5]), jnp.array([3.0, 1 / 3])
    _, tangent = jax.jvp(lambda x: narrow(x, "bfloat16"), (x,), (dx,))
    assert tangent.dtype == jnp.bfloat16
    np.testing.assert_array_equal(tangent, dx.astype(jnp.bfloat16))

    def squares(scale):  # Through a clip that does nothing, as when rates are learned.
        grads = {"w": (scale * x).astype(jnp.bfloat16)}
        clipped, _ = gx.clip_by_global_norm(100.0).update(grads, ())
        return jnp.sum(clipped["w"].astype(jnp.float32) ** 2)

    np.testing.assert_allclose(jax.grad(squares)(2.0), 4 * (1 + 2.5**2))


def test_two_readers_make_no_copy():
    def read_twice(x):
        half = narrow(x, "bfloat16").astype(jnp.float32)
        return half + 1, half * 2

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    step = jax.jit(read_twice).lower(x).compile()
    assert step.memory_analysis().temp_size_in_bytes < 0.01 * 2 * 512 * 512
