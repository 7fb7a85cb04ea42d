"""Arithmetic, lateness and rows of workers, against NumPy and Python's own integers."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradxform._jax import jaxprs
from gradxform._numbers import arithmetic, constants, lateness, norms, workers
from gradxform._trees import dtypes

HALF, INT = 2**-8, np.iinfo(np.int32)


def test_dtypes_to_calculate_in():
    """The dtype for arithmetic, at least float32 of it, and that of a momentum."""
    table = {
        "bfloat16": ("float32", "float32", "bfloat16"),
        "float16": ("float32", "float32", "float16"),
        "float32": ("float32", "float32", "float32"),
        "float64": ("float64", "float64", "float64"),
        "complex64": ("float32", "complex64", "complex64"),
        "complex128": ("float64", "complex128", "complex128"),
        "int8": ("float32", "float32", "float32"),
    }
    with jax.enable_x64(True):
        for dtype, wanted in table.items():
            x = jax.ShapeDtypeStruct((1,), dtype)
            kinds = dtypes.compute_dtype, dtypes.wide_dtype, dtypes.inexact_dtype
            assert tuple(kind(x).name for kind in kinds) == wanted
            assert jax.eval_shape(dtypes.widen, x).dtype == wanted[1]
    assert dtypes.dtype_of("a").kind == "U"
    assert dtypes.dtype_of(jax.ShapeDtypeStruct((), "int8")) == np.int8


def test_integers_out_of_range_become_the_nearest_ones():
    numbers = [0, -1, 3, INT.max, INT.max + 1, INT.min, INT.min - 1, 2**70, -(2**70)]
    for n in (*numbers, math.inf, -math.inf):
        assert dtypes.saturated(n) == min(max(n, INT.min), INT.max)
        assert dtypes.saturated(n).dtype == jnp.int32
    with jax.enable_x64(True):
        for n in (2**40, -(2**40), 5):
            wanted = min(max(n, INT.min), INT.max)
            for x in (np.int64(n), np.array(n), jnp.int64(n)):
                assert dtypes.saturated(x) == wanted
    for x in (np.uint32(2**32 - 1), jnp.uint32(2**32 - 1)):
        assert dtypes.saturated(x) == INT.max
    for x in (jnp.int8(-7), jnp.int16(-7), jnp.int32(-7), np.int8(-7)):
        assert dtypes.saturated(x) == -7
    program = jax.make_jaxpr(dtypes.saturated)(jnp.int8(1))
    assert [eqn.primitive.name for eqn in program.eqns] == ["convert_element_type"]


def test_a_product_is_rounded_once():
    factor = 1 + 3 * HALF  # No bfloat16 has it.
    numbers, named = [1 + 2 * HALF, -3, 0, 7.5], ("bfloat16", "float16", "float32")
    z = complex(math.inf, 1)  # Each part alone: 0 · inf would be NaN.
    products, rows, parts = jax.jit(
        lambda given, z: (
            [arithmetic.scale(x, factor) for x in given],
            arithmetic.scale_leading(jnp.ones((2, 3)), np.float32([2, 3])),
            [arithmetic.scale(z, 1.0), arithmetic.scale(z, math.nan)],
        )
    )([np.array(numbers, jnp.dtype(dtype)) for dtype in named], np.complex64(z))
    for found, dtype in zip(products, named, strict=True):
        assert found.dtype == dtype
        wanted = (np.array(numbers) * factor).astype(found.dtype)
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(rows, [[2, 2, 2], [3, 3, 3]])
    assert parts[0] == z
    assert math.isnan(parts[1].real)
    assert math.isnan(parts[1].imag)


def test_a_wide_sum():
    x, total = jnp.bfloat16([1, 2]), jnp.bfloat16([HALF, HALF])
    factors = {None: [1, 2], 0.5: [0.5, 1], 0.0: [0, 0], 1: [1, 2]}
    bad = jnp.float32([math.nan, math.inf])
    sums, of_bad, mixed = jax.jit(
        lambda x, bad: (
            [arithmetic.wide_sum(x, total, factor) for factor in factors],
            arithmetic.wide_sum(bad, jnp.ones(2), 0.0),
            arithmetic.wide_sum(x, jnp.complex64([1j, 1]), 2),
        )
    )(x, bad)
    for found, wanted in zip(sums, factors.values(), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, np.array(wanted) + HALF)
    np.testing.assert_array_equal(of_bad, [1, 1])
    np.testing.assert_array_equal(mixed, [2 + 1j, 5])


def test_sums_of_integers_are_exact():
    """Numbers are truncated towards 0; an unsigned total takes negative ones, too."""
    starts = {"int32": -7, "uint8": 20, "int8": 3, "uint32": 2**31}
    x = [-2.75, -1.0, -0.5, 0.5, 1.0, 2.75]
    totals = {dtype: jnp.full(6, start, dtype) for dtype, start in starts.items()}
    # 2^24 + 1 is no float32.
    both = (jnp.int32([2**24 + 1]), jnp.int32([1])), (jnp.int8([-1]), jnp.int32([5]))

    @jax.jit
    def run(x):
        found = {k: arithmetic.integer_sum(x, total) for k, total in totals.items()}
        exact = [arithmetic.integer_sum(*pair) for pair in both]
        return found, arithmetic.rounded_sum(x, totals["uint8"]), exact

    found, rounded, exact = run(jnp.float32(x))
    for dtype, start in starts.items():
        assert found[dtype].dtype == dtype
        assert found[dtype].tolist() == [start + math.trunc(each) for each in x]
    assert rounded.tolist() == found["uint8"].tolist()
    assert [each.tolist() for each in exact] == [[2**24 + 2], [4]]


def test_a_sum_of_two_dtypes_is_rounded_once():
    p = jnp.bfloat16([1.0, 1.0])
    u = jnp.float32([HALF + 2**-20, HALF])  # Above the middle between two, and in it.
    found = arithmetic.rounded_sum(u, p)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(found), [1 + 2 * HALF, 1])
    program = jax.make_jaxpr(arithmetic.rounded_sum)(p, p)
    assert [eqn.primitive.name for eqn in program.eqns] == ["add"]


def test_squares_and_roots():
    halves = {
        dtype: jnp.asarray([300, -2, 0], dtype) for dtype in ("bfloat16", "float16")
    }
    numbers = jnp.float32([0, 4, math.inf, math.nan, 0.25])
    squares, of_complex, roots, slope = jax.jit(
        lambda halves, z, x: (
            *(jax.tree.map(arithmetic.abs_sq, halves), arithmetic.abs_sq(z)),
            *(arithmetic.safe_sqrt(x), jax.grad(arithmetic.safe_sqrt)(x[0])),
        )
    )(halves, jnp.complex64([3 + 4j]), numbers)
    for dtype in halves:
        np.testing.assert_array_equal(squares[dtype], [90_000, 4, 0])
    assert (of_complex.tolist(), of_complex.dtype) == ([25], jnp.float32)
    np.testing.assert_array_equal(roots, [0, 2, math.inf, math.nan, 0.5])
    assert slope == 1


def test_the_inverse_of_a_root():
    """1 where the divisor is 0, or is too small for a normal number."""
    tiny = float(np.finfo(np.float32).tiny)
    x = np.float32([0, 1, 4, 9])
    cases = [*itertools.product((0.0, 0.25, 7.0), (True, False))]

    @jax.jit
    def run(x, traced):
        small = arithmetic.inverse_sqrt(x * (tiny / 4), 0.0, True)
        of_traced = [
            arithmetic.inverse_sqrt(x, e, in_root)
            for e, (_, in_root) in zip(traced, cases, strict=True)
        ]
        known = [arithmetic.inverse_sqrt(x, *case) for case in cases]
        return small, known, of_traced

    small, *both = run(x, [eps for eps, _ in cases])
    np.testing.assert_array_equal(small[:2], [1, 1])
    for found in both:
        for inverse, (eps, in_root) in zip(found, cases, strict=True):
            divisor = np.sqrt(x + eps) if in_root else np.sqrt(x) + eps
            wanted = 1 / np.where(divisor == 0, 1, divisor)
            np.testing.assert_allclose(inverse, wanted, rtol=1e-6)

    def may_be_0(eps):
        f = lambda x: arithmetic.inverse_sqrt(x, eps, True)  # noqa: E731
        return "select_n" in str(jax.make_jaxpr(f)(jnp.float32(1)))

    assert [may_be_0(eps) for eps in (0.0, tiny / 4, tiny)] == [True, True, False]
    assert not may_be_0(jnp.bfloat16(0.25))


def test_axes_of_length_1():
    assert arithmetic.expand(jnp.ones(2), jnp.ones((2, 3, 4))).shape == (2, 1, 1)
    assert arithmetic.expand(jnp.ones((2, 3)), jnp.ones((2, 3))).shape == (2, 3)


LARGE = 2**24  # As float32 it is its successor, too.
STEPS = [0, 1, 5, LARGE + 1, INT.max - 1, INT.max]
EARLIER = [INT.min, -1, *STEPS]


def test_how_late_a_gradient_is():
    pairs = np.array([*itertools.product(STEPS, EARLIER)], np.int32)
    both = np.array([*itertools.product(STEPS, STEPS)], np.int32)
    bounds = [0, 1, 5, 2**40, math.inf, np.float32(1), jnp.int32(1), jnp.bfloat16(0.5)]
    bounds += [LARGE, jnp.int32(LARGE)]
    late, fresh_ones = jax.jit(
        lambda pairs, both: (
            lateness.staleness(*pairs),
            [lateness.is_fresh(*both, bound) for bound in bounds],
        )
    )(pairs.T, both.T)
    wanted = [min(int(now) - int(then), INT.max) for now, then in pairs]
    assert late.tolist() == wanted
    for bound, fresh in zip(bounds, fresh_ones, strict=True):
        assert fresh.tolist() == [int(now) - int(then) <= bound for now, then in both]
    by_step = lateness.is_fresh(jnp.int32(4), jnp.int32([2, 1, 0]), lambda k: k // 2)
    assert by_step.tolist() == [True, False, False]
    with pytest.raises(ValueError, match=r"max_staleness\(global_step\) must be in \["):
        lateness.is_fresh(jnp.int32(4), jnp.int32(0), lambda k: -1)


def test_bounds_of_staleness():
    schedule = len
    for bound in (0, 3, math.inf, np.int8(2), np.float32(math.inf), schedule):
        found = lateness.checked_bound(bound)
        assert found is schedule or found == bound
    for wrong in (-1, math.nan, -math.inf):
        with pytest.raises(ValueError, match=r"max_staleness must be in \[0, inf\]"):
            lateness.checked_bound(wrong)
    for wrong in (1.0, 0.5, np.float32(2)):
        with pytest.raises(TypeError, match="max_staleness must be an integer scalar"):
            lateness.checked_bound(wrong)
    assert " round" in str(jax.make_jaxpr(lateness.checked_bound)(1.5))


def test_factors_by_staleness():
    for right in (None, len):
        lateness.check_weight(right)
    with pytest.raises(TypeError, match=r"^weight must be a function of the staleness"):
        lateness.check_weight(0.5)
    step = jnp.int32(3)
    assert lateness.factor(lambda s: 1 / (1 + int(s)), step) == 0.25
    for wrong, error in ((-1, ValueError), (math.inf, ValueError), ([1.0], TypeError)):
        with pytest.raises(error, match=r"^weight\(staleness\) must be"):
            lateness.factor(lambda s, wrong=wrong: wrong, step)
    with pytest.raises(TypeError, match=r"^weight\(staleness\) must be a real scalar"):
        jax.make_jaxpr(lambda s: lateness.factor(lambda s: s + jnp.ones(2), s))(1.0)


def test_rows_of_workers():
    for worker in (0, 2, np.int64(1), jnp.int8(2)):
        is_one, row = workers.row_of("mean", worker, 3)
        assert (bool(is_one), int(row)) == (True, int(worker))
        assert row.dtype == jnp.int32
    for worker, row in ((-1, 0), (3, 2), (INT.max, 2)):
        is_one, found = workers.row_of("mean", jnp.int32(worker), 3)
        assert (bool(is_one), int(found)) == (False, row)
        with pytest.raises(ValueError, match=r"worker must be in \[0, 3\), got"):
            workers.row_of("mean", worker, 3)
    with pytest.raises(TypeError, match=r"^mean needs worker: pass update\("):
        workers.row_of("mean", None, 3)
    with pytest.raises(TypeError, match="worker must be an integer scalar"):
        workers.row_of("mean", 1.0, 3)


def test_norms_of_layers():
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(2, 3, 4)).astype("f4"), rng.normal(size=5).astype("f4")
    stacks = {
        (0, 1, 2): None,
        (1, 2): {"a": 1, "b": 0, "c": 0},
        (2,): {"a": 2, "b": 0, "c": 0},
    }
    z, y = np.complex64([1 + 2j, 3j]), np.complex64([2 - 1j, 1j])

    @jax.jit
    def run(w, v):
        tree = {"a": w, "b": None, "c": v}
        by_stack = [norms.squared_norms(tree, stacked_axes=x) for x in stacks.values()]
        squares, _ = by_stack[1]
        other, axes = {"a": 2 * w, "b": None, "c": jnp.ones(5)}, stacks[1, 2]
        return (
            by_stack,
            norms.squared_norms({"a": w**2}, squared=True)[0],
            norms.means(tree, stacked_axes=axes),
            norms.products(tree, other, squares, stacked_axes=axes),
            norms.products([z], [y], [jnp.float32(14)])[0],
            norms.squared_rows({**tree, "d": np.float32(2)}),
        )

    by_stack, squares, means, (each, total), of_complex, rows = run(w, v)
    for (layers, whole), axes in zip(by_stack, stacks, strict=True):
        np.testing.assert_allclose(layers["a"], (w**2).sum(axes), rtol=1e-6)
        np.testing.assert_allclose(layers["c"], (v**2).sum(), rtol=1e-6)
        np.testing.assert_allclose(whole, (w**2).sum() + (v**2).sum(), rtol=1e-6)
        assert layers["b"] is None
    np.testing.assert_allclose(squares["a"], (w**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(means["a"], w.mean((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(each["a"], 2 * (w**2).sum((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(each["c"], v.sum(), rtol=1e-5)
    np.testing.assert_allclose(total, 2 * (w**2).sum() + v.sum(), rtol=1e-6)
    assert of_complex == [np.vdot(z, y).real]
    np.testing.assert_allclose(rows["a"], (w**2).sum((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(rows["c"], v**2, rtol=1e-6)
    assert (rows["b"], rows["d"]) == (None, 4)


def test_small_arrays_of_one_type_are_summed_together():
    """Up to 32 in one kernel, each of at most 4,096 entries."""
    shapes = [(2, 2)] * 33 + [(4096,)] * 2 + [(4097,)] * 2 + [(4,)]
    leaves = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    leaves += [jax.ShapeDtypeStruct((4,), "complex64")]
    program = str(jax.make_jaxpr(norms.squared_norms)(leaves))
    # The two of 4,097 entries are alone. The others: 32 + 1, 2, 1 and 1 of them.
    assert program.count("platform_index") == 5


def test_what_the_compiler_for_cpu_may_not_share():
    """How many arrays each barrier has: one alone, or one with what comes before it."""
    kinds = {
        "bfloat16": ([2], [1], [], [1, 1]),
        "float16": ([1], [1], [], [1, 1]),
        "float32": ([], [], [1], [1, 1]),
    }
    for dtype, wanted in kinds.items():
        x = jax.ShapeDtypeStruct((2, 3), dtype)
        programs = (
            jax.make_jaxpr(norms._read_again)(x, 1.0),
            jax.make_jaxpr(lambda x: norms.squared_norms([x], stacked_axes=1))(x),
            jax.make_jaxpr(norms.alone)([x]),
            jax.make_jaxpr(norms.squared_rows)([x]),
        )
        for program, numbers in zip(programs, wanted, strict=True):
            barriers = jaxprs.anywhere(program.jaxpr, "optimization_barrier")
            assert [len(eqn.invars) for eqn in barriers] == numbers


def test_stacked_axes_are_ints_that_a_leaf_has():
    params = {"a": np.ones((2, 3)), "b": np.ones(())}
    assert norms.check_stacked(None, params) == {"a": 0, "b": 0}
    assert norms.check_stacked({"a": 2, "b": 0}, params) == {"a": 2, "b": 0}
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError, match=r"^stacked_axes must hold ints, got"):
            norms.check_stacked({"a": wrong, "b": 0}, params)
    for wrong in (-1, 3):
        words = (
            r"^stacked_axes must be in \[0, 2\] at \['a'\], a leaf of shape \[2, 3\]"
        )
        with pytest.raises(ValueError, match=words):
            norms.check_stacked({"a": wrong, "b": 0}, params)


def test_the_total_has_the_widest_dtype():
    assert norms.total([]).dtype == jnp.float32
    assert norms.total([]) == 0
    with jax.enable_x64(True):
        both = [jnp.float32([1, 2]), jnp.float64(4)]
        for terms in (both, both[::-1]):
            assert (norms.total(terms), norms.total(terms).dtype) == (7, jnp.float64)


def test_constants():
    params = {"a": np.ones((2, 3), np.int8), "b": jnp.ones(4, jnp.bfloat16)}
    full = constants.full(7, params, None, dtypes.inexact_dtype)
    assert jax.tree.map(lambda x: x.dtype.name, full) == {
        "a": "float32",
        "b": "bfloat16",
    }
    assert full["a"].tolist() == [[7] * 3] * 2
    rows = constants.zeros(params, jnp.int32, axes=1)
    assert jax.tree.map(jnp.shape, rows) == {"a": (2,), "b": (4,)}
    assert {x.dtype.name for x in jax.tree.leaves(rows)} == {"int32"}
    assert constants.zeros({"a": np.ones(2, np.int8)}, None)["a"].dtype == jnp.int8
    two = constants.stacked(jnp.float32([1, 2]), 2)
    assert two.tolist() == [[1, 2], [1, 2]]
    assert [float(x) for x in constants.unstacked(jnp.float32([3, 5]))] == [3, 5]
    assert constants.zero(params, jnp.int32).dtype == jnp.int32
    assert constants.zero({}, jnp.bool).dtype == jnp.bool
    assert constants.zero([True, "k"], jnp.int32).shape == ()
    never = constants.never(jnp.float32([1, math.nan, math.inf]))
    assert never.tolist() == [False] * 3


@pytest.mark.every
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_constants_lie_where_their_parameters_lie(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), (kind,) * 2)
    on = NamedSharding(mesh, P("x", "y"))
    p = jax.device_put(np.ones((2, 4), np.float32), on)
    assert constants.full_like(p, 3, None).sharding == on
    assert constants.full_like(p, 3, jnp.int8, axes=1).sharding.spec == P("x")
    assert constants.stacked(p, 3).sharding.spec == P(None, "x", "y")
    assert constants.stacked(p, 3).tolist() == [[[1] * 4] * 2] * 3
    whole = constants.stacked(jax.device_put(p, NamedSharding(mesh, P())), 3)
    assert whole.sharding.is_fully_replicated
    # JAX gives its own results on automatic axes the shortest spec.
    assert len(whole.sharding.spec) == (0 if kind == AxisType.Auto else 1)
    of_axes = functools.partial(constants.full_like, value=3, dtype=jnp.int8, axes=1)
    if kind == AxisType.Explicit:
        described = jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=on)
        assert jax.eval_shape(of_axes, described).sharding.spec == P("x")


def test_constants_of_a_program_come_from_an_argument():
    """Otherwise ``jit`` would drop the argument, and with it its devices."""
    for make in (
        lambda p: constants.zero({"a": p}, jnp.int32),
        lambda p: constants.full_like(p, 3.0, jnp.float32),
        lambda p: constants.full_like(p, 3.0, jnp.float32, axes=1),
    ):
        traced = jax.jit(make).trace(jnp.ones((2, 3), jnp.bfloat16))
        lowered = traced.lower(lowering_platforms=("cpu",))
        assert len(jax.tree.leaves(lowered.in_avals)) == 1
        assert "%arg0" in lowered.as_text().split("{", 2)[2].split("\n", 2)[2]
        found = jax.jit(make)(jnp.full((2, 3), math.nan, jnp.bfloat16))
        assert float(found.max()) in (0, 3)
    scalar = jax.make_jaxpr(lambda p: constants.full_like(p, 3, jnp.int32, axes=0))(1.0)
    assert not scalar.jaxpr.eqns or "broadcast" in str(scalar)
