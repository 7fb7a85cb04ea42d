"""The boundary: which gradients are finite, and a step on the touched rows.

The check is private: the public functions that use it do more, so its cost is unseen.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from benchmarks.models import size
from gradxform._jax import jaxprs
from gradxform._rows import boundary
from gradxform._trees import maps
from tests.conftest import half

SIZES = [1, 4095, 4096, 4097, 65_537, 1_000_003]
DTYPES = ["float32", "bfloat16", "float16", "complex64", "float64"]
FIGURES = [  # temporaries and bytes accessed, in gradients
    ("float32", 0, 1),
    ("bfloat16", 0, 1),
    ("float16", 0.5, 2),  # a bool for each entry, written and read
    ("complex64", 0.125, 1.25),
]


def all_finite(grads):
    return jax.jit(lambda g: list(map(boundary.all_finite, g)))(grads)


def spoiled(x, bad):
    """The array with one bad entry: at its front, in the middle, at its end."""
    return [x.at[place].set(bad) for place in (0, len(x) // 2, -1)]


@pytest.mark.parametrize(("n", "dtype"), half(SIZES, DTYPES))
def test_one_entry_that_is_not_finite_is_found(n, dtype):
    with jax.enable_x64(dtype == "float64"):
        largest = jnp.full(n, jnp.finfo(dtype).max, dtype)
        bad = [np.nan, np.inf, -np.inf, *[1j * np.inf] * (dtype == "complex64")]
        grads = [g for number in bad for g in spoiled(largest, number)]
        if dtype == "complex64":
            grads += spoiled(largest, complex(0, np.nan))
        assert all_finite([largest, -largest, largest[:0]]) == [True] * 3
        assert all_finite(grads) == [False] * len(grads)


@pytest.mark.slow
def test_nan_is_found_although_the_compiler_assumes_that_there_is_none():
    """Tests of numbers, in a process that compiles with fast math.

    Only there, the compiler takes x - x as 0. It also may compute a comparison twice,
    with two results: proximal Adagrad's weights near the border of L1 jumped.
    """
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    names = (
        "not_finite_is_found or padding or stack or real-proximal_adagrad-regularized"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-k", names]
    files = [__file__, "tests/test_large_leaves.py"]
    subprocess.run([*command, *files], env=os.environ | flags, check=True)


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_padding_may_hold_anything(dtype):
    rows = jnp.ones((128, 64), dtype)
    indices = jnp.arange(128).at[100:].set(1000)
    grads = gx.IndexedSlices(indices, rows, (1000, 64))
    padding, row = (
        maps.with_values(grads, rows.at[i, 3].set(jnp.nan)) for i in (100, 99)
    )
    assert all_finite([grads, padding, row]) == [True, True, False]


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_each_gradient_of_a_stack_is_judged_alone(dtype):
    grads = jnp.ones((3, 64, 64), dtype).at[1, 63, 63].set(jnp.nan)
    finite = jax.jit(jax.vmap(boundary.all_finite))(grads)
    assert finite.tolist() == [True, False, True]


@pytest.mark.every
@pytest.mark.figures
@pytest.mark.parametrize(("dtype", "temporaries", "passes"), FIGURES)
def test_the_check_is_one_pass_over_the_gradients(dtype, temporaries, passes):
    grads = [jax.ShapeDtypeStruct((512, 512), dtype)] * 3
    check = jax.jit(lambda g: jnp.stack(list(map(boundary.all_finite, g))))
    check = check.lower(grads).compile()
    n = size(grads)
    found = check.memory_analysis().temp_size_in_bytes / n
    assert temporaries <= found < temporaries + 0.01
    assert passes <= check.cost_analysis()["bytes accessed"] / n < passes + 0.01


def test_rows_are_written_into_an_array_of_numpy():
    """As that of a state which was read from a file."""
    new, table = jnp.ones((2, 3)), np.zeros((5, 3), np.float32)
    grads = gx.IndexedSlices([1, 4], new, (5, 3))
    for keeps in (None, True):
        written = jax.eval_shape(
            lambda keeps=keeps: boundary.scatter_rows(grads, table, new, keeps)
        )
        assert written.shape == table.shape


def test_the_compiler_knows_that_rows_ascend_and_are_unique():
    table, new = jnp.zeros((5, 3)), jnp.ones((2, 3))
    grads = gx.IndexedSlices([1, 4], new, (5, 3))
    for f, name in (
        (lambda: boundary.scatter_rows(grads, table, new), "scatter"),
        (lambda: boundary.gather_rows(grads, table), "gather"),
    ):
        (eqn,) = jaxprs.anywhere(jax.make_jaxpr(f)().jaxpr, name)
        assert eqn.params["indices_are_sorted"]
        assert eqn.params["unique_indices"]


@pytest.mark.parametrize("rate", [np.uint8(2), jnp.uint4(2), jnp.uint32(2), 2, 2.0])
def test_a_rate_without_a_sign_descends(rate):
    tx = gx.scale_by_learning_rate(rate)
    updates, _ = tx.update(jnp.array([1.0]), tx.init(None))
    assert updates.tolist() == [-2.0]


LINKS = gx.clip_by_global_norm(1.0), gx.clip_by_norm(1.0), gx.contrib.clip_by_zscore()
CHAIN = optax.chain(*LINKS, gx.adagrad(0.1, row_wise=True, clipnorm=1.0))


@pytest.mark.every
@pytest.mark.parametrize(
    ("tx", "extra"),
    [
        (CHAIN, {}),
        (gx.drop_stale(CHAIN, 1), {"local_step": 0}),
        (gx.skip_spikes(CHAIN), {}),
        (LINKS[1], {}),
    ],
    ids=["chain", "drop_stale", "skip_spikes", "link"],
)
def test_repeated_rows_are_summed_once_in_a_step(tx, extra):
    """A sum begins with a sort of the indices; a push that is dropped has none."""
    params = {"t": jnp.ones((5, 2))}
    grads = {"t": gx.IndexedSlices([3, 0, 3], jnp.ones((3, 2)), (5, 2))}

    def step(grads, state, params):
        return gx.apply_gradients(tx, grads, state, params, **extra)

    jaxpr = jax.make_jaxpr(step)(grads, tx.init(params), params)
    assert str(jaxpr).count(" sort[") == 1
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert ("sort" in outside) == ("local_step" not in extra)
