"""Rounding to bfloat16 by integer operations is the rounding that NumPy knows.

The functions are private: no public one shows each of their bits.
"""

import functools
import pickle
import subprocess
import sys

import chex
import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import compilers, jaxprs
from gradxform._jax.compilers import narrow

# Each sign, exponent and upper half of a mantissa; below, at and above the middle.
UPPER = np.arange(2**16, dtype=np.uint32)[:, None] << 16
LOWER = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
NUMBERS = (UPPER | LOWER).view(np.float32)


@pytest.mark.every
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

    np.testing.assert_allclose(jax.jit(jax.grad(squares))(2.0), 4 * (1 + 2.5**2))


@pytest.mark.figures
def test_two_readers_make_no_copy():
    def read_twice(x):
        half = narrow(x, "bfloat16").astype(jnp.float32)
        return half + 1, half * 2

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    step = jax.jit(read_twice).lower(x).compile()
    assert step.memory_analysis().temp_size_in_bytes < 0.01 * 2 * 512 * 512


def taken_through(f, x):
    """A linear function, transformed in all the ways that JAX has."""
    y = jax.eval_shape(f, x)
    ones = jnp.ones(y.shape, y.dtype)
    pulled_back = jax.vjp(f, x)[1]
    return {
        "many": jax.vmap(pulled_back)(jnp.stack([ones, 2 * ones])),
        "vjp": pulled_back(ones),
        "linearize": jax.linearize(f, x)[1](x),
        "vmap": jax.vmap(f)(jnp.stack([x, 2 * x])),
        "export": jax.export.export(jax.jit(f), platforms=("cpu", "tpu"))(x).call(x),
    }


@pytest.mark.slow
def test_rounding_works_under_every_jax_transformation():
    x = jnp.array([1.0, 1 / 3, -2.7])
    got = taken_through(lambda x: narrow(2 * x, "bfloat16"), x)
    expected = taken_through(lambda x: (2 * x).astype("bfloat16"), x)
    chex.assert_trees_all_equal(got, expected)
    chex.assert_trees_all_equal_dtypes(got, expected)
    tx = gx.scale_by_learning_rate(0.5)
    half = x.astype(jnp.bfloat16)
    got = taken_through(lambda g: tx.update(g, tx.init(g))[0], half)
    chex.assert_trees_all_equal(got, taken_through(lambda g: g * -0.5, half))


DTYPES = "float32", "bfloat16", "float16"
LINKS = {
    "rate": (gx.scale_by_learning_rate(0.5), {}, -0.5),
    "half": (gx.scale_by_learning_rate(0.5), {}, -0.5),
    "schedule": (gx.scale_by_learning_rate(lambda count: 0.5), {}, -0.5),
    "staleness": (gx.scale_by_staleness(), {"staleness": 2}, 0.5),
    "worker": (gx.contrib.scale_by_worker([1.0, 0.5]), {"worker": 1}, 0.5),
    "gate": (gx.drop_stale(gx.scale_by_learning_rate(0.5), 1), {"local_step": 0}, -0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DTYPES[n % 3]) for n, name in enumerate(LINKS)],
)
def test_a_linear_link_is_its_own_transpose(name, dtype):
    tx, extra, factor = LINKS[name]
    g = jnp.array([1.0, 1 / 3, -2.7], dtype)
    state = tx.init(g)

    def link(g):
        return tx.update(g, state, g, **extra)[0]

    back = jax.linear_transpose(link, g)
    got = [link(g), *back(g), *jax.jit(back)(g), *jax.vmap(back)(g[None])[0]]
    if name != "gate":  # No conditional has a Taylor series.
        got.append(jet.jet(link, (g,), ((g,),))[1][0])
    for x in got:
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, g * factor)


@pytest.mark.slow
def test_ordered_sums_work_under_every_jax_transformation():
    x = jnp.array([1.0, 1 / 3, -2.7], jnp.bfloat16)
    got = taken_through(lambda x: compilers.barrier_after(2 * x, jnp.sum(x)), x)
    expected = taken_through(lambda x: 2 * x, x)
    chex.assert_trees_all_equal(got, expected)
    chex.assert_trees_all_equal_dtypes(got, expected)
    got = taken_through(lambda x: compilers.in_hbm(2 * x), x)
    chex.assert_trees_all_equal(got, expected)
    # A value that only has to be computed earlier gives no derivative.
    known = jnp.ones(())
    for how in (jax.grad, jax.jacfwd):
        assert how(lambda known: jnp.sum(compilers.barrier_after(x, known)))(known) == 0
    batched = jax.vmap(lambda known: compilers.barrier_after(x, known), out_axes=None)
    np.testing.assert_array_equal(batched(jnp.ones(2)), x)


@pytest.mark.slow
@pytest.mark.parametrize("tx", [
    gx.contrib.scale_by_momentum_look_ahead(alignment=gx.contrib.MomentumAlignment()),
    gx.contrib.measure_cosine(),
], ids=["heloco", "cosine"])  # fmt: skip
def test_derivatives_of_ordered_sums(tx):
    """In half precision, where they are ordered, nearly those of single precision."""

    def measured(scale, dtype):
        grads = {"w": jnp.array([[1.0, 3.0], [-2.0, 0.5]], dtype)}
        _, state = tx.update(grads, tx.init(grads))
        second = {"w": (scale * jnp.array([[1.0, -2.5], [1.0, 1.0]])).astype(dtype)}
        second["w"] += jnp.array([[0.5, 0.5], [0.5, -1.0]], dtype)
        updates, state = tx.update(second, state)
        sums = [jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(updates)]
        return sum(sums) + getattr(state, "cosine", 0)

    @jax.jit
    def derivatives(scale):
        at = [functools.partial(measured, dtype=dtype) for dtype in DTYPES[:2]]
        return [[how(f)(scale) for f in at] for how in (jax.grad, jax.jacfwd)]

    for wide, half in derivatives(1.0):
        assert wide != 0
        np.testing.assert_allclose(half, wide, rtol=0.05)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_arrays_stay_sharded(axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x = jax.device_put(jnp.arange(16.0) / 3, NamedSharding(mesh, P("x")))

    def doubled(x):
        return 2 * narrow(x, "bfloat16")

    parts = jax.shard_map(doubled, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    for f in (jax.jit(doubled), jax.jit(parts), doubled):
        assert f(x).sharding.spec == P("x")
        np.testing.assert_array_equal(f(x), 2 * x.astype(jnp.bfloat16))


OPERATIONS = ["unshared", "barrier_after", "barrier_on_gpu", "in_hbm"]


@pytest.mark.every
@pytest.mark.parametrize("name", OPERATIONS)
def test_ray_gets_an_operation_by_its_name(name):
    """In another process a copy of it would have no rule for a compiler."""
    operation = getattr(compilers, name)
    assert pickle.loads(pickle.dumps(operation)) is operation


def read_layer(dtype):
    return lambda x: compilers.read_layer(x.astype(dtype), jnp.int32(1), 3, 0)


BARRIER = "optimization_barrier"
# What a program does on one platform alone.
ALONE = {
    "unshared": (compilers.unshared, "cpu", BARRIER),
    "after": (lambda x: compilers.barrier_after(x, x[0]), "cpu", BARRIER),
    "on cpu": (compilers.barrier_on_cpu, "cpu", BARRIER),
    "on gpu": (lambda x: compilers.barrier_on_gpu(x, x), "cuda", BARRIER),
    "laid out": (compilers.laid_out, "tpu", "LayoutConstraint"),
    "a layer": (read_layer("float32"), "tpu", "dynamic_update_slice"),
    "a short layer": (read_layer("bfloat16"), None, "dynamic_update_slice"),
}


@pytest.mark.every
@pytest.mark.parametrize("name", ALONE)
def test_one_compiler_alone_gets_another_program(name):
    f, alone, operation = ALONE[name]
    step = jax.jit(f).trace(jnp.ones((6, 2)))
    for platform in ("cpu", "cuda", "tpu"):
        text = step.lower(lowering_platforms=(platform,)).as_text()
        assert (operation in text) == (platform == alone), platform


def test_a_number_that_is_the_same_off_cpu_is_known():
    """On CPU a state is computed, so that it is no second copy in the program."""

    def f(x, number):
        return compilers.on_cpu(
            lambda x: (x, x + number), lambda x: (jnp.full_like(x, 3), x)
        )(x)

    jaxpr = jax.make_jaxpr(f)(jnp.ones(2), 1.0).jaxpr
    first, second = jaxpr.outvars
    assert jaxprs.constant_off_cpu(jaxpr, first) == 3
    assert jaxprs.constant_off_cpu(jaxpr, second) is None
    assert jaxprs.constant_off_cpu(jaxpr, jaxpr.invars[0]) is None


@pytest.mark.parametrize(
    ("platform", "hidden"), [("cuda", True), ("cpu", False), ("tpu", False)]
)
def test_only_the_compiler_for_gpu_does_not_know_a_zero(platform, hidden):
    """It would share an array of zeros with the loss, and keep it for both."""
    step = jax.jit(compilers.zeros_unless).trace(jnp.array(True), jnp.ones(3))
    text = step.lower(lowering_platforms=(platform,)).as_text()
    assert (BARRIER in text) == hidden
    x = jnp.array([np.nan, np.inf, -1.0])
    for keeps, wanted in ((False, np.zeros(3)), (True, x)):
        got = compilers.zeros_unless(jnp.array(keeps), x)
        np.testing.assert_array_equal(got, wanted)


EMPTY = """
import sys, types
import jax
for name in ("ad", "batching", "mlir", "partial_eval", "pxla", "xla"):
    empty = types.ModuleType(f"jax.interpreters.{name}")
    sys.modules[empty.__name__] = empty
    if hasattr(jax, "interpreters"):
        setattr(jax.interpreters, name, empty)
"""
STEP = """
import jax, jax.numpy as jnp, optax
import gradxform as gx

tx = optax.chain(gx.clip_by_global_norm(1.0), gx.novograd(0.1, weight_decay=0.01))
tx = gx.accumulate(tx, 2)
params = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4, jnp.bfloat16)}
state = tx.init(params)
step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p))
for _ in range(4):
    grads = jax.tree.map(lambda w: w / 3 + 1, params)
    params, state = step(grads, state, params)
print([x.tolist() for x in jax.tree.leaves((params, state))])
"""


@pytest.mark.slow
def test_modules_of_jax_that_are_not_public_may_be_empty():
    """The import and a step need JAX's public API alone."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for code in (STEP, EMPTY + STEP)
    ]
    assert len(printed[0]) > 100
    assert printed[0] == printed[1]
