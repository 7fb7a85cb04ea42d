"""Checks of single arguments, against exact comparisons of Python's own numbers."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradxform._checks import arguments

HUGE = 10**400  # No float holds it.
NUMBERS = [
    *(0, 1, -1, 2, 3, 128, 2**31 - 1, 2**31, -(2**31), 10**38, HUGE, -HUGE),
    *(0.0, 0.5, 1.0, -1e-9, 1 + 1e-9, 2.5, math.inf, -math.inf, math.nan, 1e39),
    *(np.float32(1), np.float32(0.1), np.float16(0.1), np.float64(0.1), np.int8(-1)),
    *(np.uint8(2), np.array(0.25), np.int64(2**40), 1 + 0j, np.complex64(0.5)),
]
INTERVALS = [
    *("[0, 1]", "[0, 1)", "(0, 1]", "(0, 1)", "[0.1, 128]", "[0, inf)", "[0, inf]"),
    *("(0, inf]", "[-inf, inf]", "(-inf, inf)", "[1, 2147483647]", "[-2, -1]"),
]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def ends_of(interval, dtype):
    """The ends of a range, rounded to a dtype of floating point."""
    ends = [float(end) for end in interval[1:-1].split(",")]
    if not np.issubdtype(dtype, np.floating):
        return ends
    with np.errstate(over="ignore"):
        return [float(np.asarray(end, dtype)) for end in ends]


def is_inside(number, interval, dtype):
    """Whether a number is in a range, by Python's comparisons, which are exact."""
    low, high = ends_of(interval, dtype)
    above = number > low or (interval[0] == "[" and number == low)
    return above and (number < high or (interval[-1] == "]" and number == high))


def test_numbers_are_in_a_range_or_an_error_shows_them():
    for given, interval in itertools.product(NUMBERS, INTERVALS):
        is_huge = type(given) is int and abs(given) == HUGE
        number = given if type(given) is int else np.asarray(given).real.item()
        if is_huge:  # The float that comes back is infinite.
            number = math.inf if given > 0 else -math.inf
        dtype = getattr(
            given, "dtype", np.float64 if isinstance(number, float) else int
        )
        too_large = "inf]" not in interval and abs(number) > FLOAT32_MAX
        if is_inside(number, interval, dtype) and not too_large:
            found = arguments.in_range("x", given, interval)
            assert found == float(number)
            if type(given) is int:  # JAX takes no int that int32 does not hold.
                assert type(found) is (int if abs(given) < 2**31 else float)
        else:
            shown = given if type(given) is int else number
            with pytest.raises(ValueError, match=r"^x must be (in|finite in)") as error:
                arguments.in_range("x", given, interval)
            if not too_large:
                assert str(error.value) == f"x must be in {interval}, got {shown!r}."


def test_float32_s_largest_number_is_finite():
    assert arguments.in_range("x", FLOAT32_MAX, "[0, inf)") == FLOAT32_MAX
    for interval in ("[0, inf)", "[-inf, inf)"):
        with pytest.raises(ValueError, match=r"x must be finite in float32, got"):
            arguments.in_range("x", np.nextafter(FLOAT32_MAX, np.inf), interval)
    with pytest.raises(ValueError, match=r"x must be finite in float32, got -1e\+39"):
        arguments.in_range("x", -1e39, "(-inf, inf)")
    with jax.enable_x64(True):
        assert arguments.in_range("x", 1e300, "[0, inf)") == 1e300


@pytest.mark.every
@pytest.mark.parametrize(
    "value", [[1.0], True, np.ones(2), "1", None, 1j, np.bool(True)]
)
def test_what_is_no_real_scalar(value):
    for check in (
        lambda: arguments.in_range("x", value, "[0, 2]"),
        lambda: arguments.check_scalar("x", value),
    ):
        with pytest.raises(TypeError, match=r"^x must be a real scalar"):
            check()


ENDS = [(0, 1, "float32"), (-1000, 1000, "float32"), (1, math.inf, "float32")]
ENDS += [(0, 1, "float16")]


def around(end, dtype):
    """Numbers on both sides of an end, and how far from it is a rounding."""
    most = arguments.ROUNDING + float(jnp.finfo(dtype).eps) * abs(end)
    near = np.array([-3, -1.1, -1, -0.9, 0, 0.9, 1, 1.1, 3])
    return (end + near * most).astype(dtype), most


def test_a_number_in_an_array_that_misses_an_end_becomes_it():
    cases = [
        (x, low, high, most)
        for low, high, dtype in ENDS
        for x, most in (around(end, dtype) for end in (low, high) if end < math.inf)
    ]
    run = jax.jit(
        lambda: [arguments.to_end(jnp.asarray(x), *ends) for x, *ends, _ in cases]
    )
    for traced, (x, low, high, most) in zip(run(), cases, strict=True):
        # The last number that is a rounding away is rounded, too.
        first, last = (np.asarray(end, x.dtype) for end in (low - most, high + most))
        wanted = np.where((first <= x) & (x <= last), np.clip(x, low, high), x)
        known = [arguments.to_end(jnp.asarray(each), low, high) for each in x]
        for found in (traced, np.array(known)):
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, wanted)


def test_an_array_inside_its_range_comes_back_itself():
    """No program is run for it; one of integers is never moved."""
    for x in (jnp.float32(0.5), jnp.int32(3)):
        assert arguments.to_end(x, 0, 1) is x
    for n in (3, jnp.int32(3)):
        assert arguments.whole(n) is n


def test_ends_that_are_excluded_are_allowed_in_arrays_alone():
    for interval in ("[0, 1)", "(0, 1]", "(0, 1)"):
        for end in (0.0, 1.0):
            assert arguments.in_range("x", jnp.float32(end), interval) == end
            beyond = jnp.float32(end + (2 * end - 1) * 1e-6)
            assert arguments.in_range("x", beyond, interval) == end
    for x, interval in ((np.inf, "[0, inf)"), (-np.inf, "(-inf, 0]")):
        with pytest.raises(ValueError, match=r"x must be in"):
            arguments.in_range("x", jnp.float32(x), interval)


@pytest.mark.every
@pytest.mark.parametrize("make", [np.float64, np.float32, jnp.float32])
def test_a_number_for_counts_is_the_integer_that_it_misses(make):
    """A number may be missed by 2^-17, and by that part of it if it is above 1."""
    for n in (0.0, 1.0, 2.0, 3.0, 1000.0, -7.0):
        for part in (0, 0.5, 0.9, 1, 1.1, 2, 1000):
            for sign in (1, -1):
                x = n + sign * part * arguments.ROUNDING * max(1, abs(n))
                wanted = n if part <= 1 else np.float64(make(x))
                assert np.float64(arguments.whole(make(x))) == wanted
    assert arguments.whole(make(math.inf)) == math.inf
    assert math.isnan(arguments.whole(make(math.nan)))


def test_traced_numbers_for_counts():
    x = jnp.float32([1.5, 2 + 1e-6, 3 - 1e-6, 1000.004, 1000.2])
    found = jax.jit(jax.vmap(arguments.whole))(x)
    np.testing.assert_array_equal(found, [1.5, 2, 3, 1000, x[4]])


def test_integers():
    for value in (3, HUGE, np.int8(3), np.array(3), jnp.int32(3)):
        arguments.check_scalar("x", value, integer=True)
        arguments.check_scalar("x", value)
    for value in (3.0, True, np.float32(3), [3], np.arange(2), None):
        with pytest.raises(TypeError, match=r"^x must be an integer scalar, got"):
            arguments.check_scalar("x", value, integer=True)
        with pytest.raises(TypeError, match=r"^x must be an integer scalar, got"):
            arguments.in_range("x", value, "[0, 9]", integer=True)
    arguments.check_scalar("x", 3.0)
    with pytest.raises(TypeError, match=r"^x must be an integer scalar, got 2\.5"):
        arguments.length("x", 2.5, "[0, 9]")
    assert arguments.length("x", np.int8(3), "[0, 9]") == 3
    assert type(arguments.length("x", np.int8(3), "[0, 9]")) is int


def test_traced_arguments():
    """Their kinds are known, their numbers are not."""

    def run(x, y, z):
        assert arguments.in_range("x", x, "[0, 1]").dtype == jnp.float32
        assert arguments.in_range("y", y, "[5, 6]", integer=True) is y
        assert not arguments.is_constant(y, 7)
        assert arguments.real(z).dtype == jnp.float32
        assert arguments.in_range("z", z, "[0, 1]").dtype == jnp.float32
        with pytest.raises(TypeError, match=r"n\[0\] is a shape.* name n in static"):
            arguments.length("n[0]", y, "[0, 9]")
        with pytest.raises(TypeError, match=r"x must be an integer scalar"):
            arguments.in_range("x", x, "[0, 1]", integer=True)
        with pytest.raises(TypeError, match=r"on must be True or False, not traced"):
            arguments.check_flags(on=x > 0)
        assert arguments.flag("on", x > 0).shape == ()
        for wrong in (jnp.stack([x, x]), z, x > 0):
            with pytest.raises(
                TypeError, match=r"^n\(global_step\) must be a real sca"
            ):
                arguments.scheduled("n", lambda _, wrong=wrong: wrong, y, "[1, 9]")
        with pytest.raises(RuntimeError, match=r"^pull was called while JAX traces"):
            arguments.check_not_tracing("pull")
        return x

    jax.make_jaxpr(run)(jnp.float32(0.5), jnp.int32(7), jnp.complex64(0.5))
    arguments.check_not_tracing("pull")


def test_outside_of_all_traces_nothing_of_jax_runs(monkeypatch):
    monkeypatch.setattr(jnp, "zeros", None)
    arguments.check_not_tracing("pull")


def test_real_numbers_and_constants():
    for value in (1, 1.0, np.int8(1), jnp.float32(1)):
        assert arguments.is_real(value)
        assert arguments.is_constant(value, 1) is True
        assert arguments.is_constant(value, 2) is False
        assert arguments.real(value) is value
    for value in (1j, True, "1", None):
        assert not arguments.is_real(value)
    assert arguments.real(2 + 0j) == 2.0
    assert not arguments.is_complex(arguments.real(2 + 0j))
    assert arguments.real(2 + 1j) == 2 + 1j
    assert arguments.is_complex(np.complex64(1))


def test_a_schedule_gives_a_number_or_an_error_with_its_name():
    step = jnp.int32(4)

    def number(value):
        return arguments.scheduled(
            "n", lambda count: value + 0 * int(count), step, "[1, 9]"
        )

    assert number(3) == 3
    assert number(np.float32(3 + 1e-6)) == 3
    assert number(2.5) == 2.5
    assert arguments.scheduled("n", lambda count: count, step, "[1, 9]") == 4
    for value, error in ((0, ValueError), (np.nan, ValueError), (1j, TypeError)):
        with pytest.raises(error, match=r"^n\(global_step\) must be"):
            number(value)


def test_at_most_one_and_one_of():
    arguments.check_at_most_one(a=None, b=0, c=None)
    arguments.check_at_most_one(a=None)
    with pytest.raises(
        ValueError, match=r"^at most one of a, b, c may be given, got a=1, c=0\.$"
    ):
        arguments.check_at_most_one(a=1, b=None, c=0)
    arguments.check_one_of("x", "mean", ("mean", "sum"))
    with pytest.raises(ValueError, match=r"^x must be one of 'mean', 'sum', got 'max'"):
        arguments.check_one_of("x", "max", ("mean", "sum"))


def test_local_steps():
    for value in (3, np.int64(3), jnp.int8(3), jnp.uint32(3)):
        step = arguments.local_step("tx", value)
        assert (step.dtype, int(step)) == (jnp.int32, 3)
    arguments.local_step("tx", 0), arguments.local_step("tx", 2**31 - 1)
    with pytest.raises(TypeError, match=r"tx needs local_step: pass update\("):
        arguments.local_step("tx", None)
    for value in (-1, 2**31, np.int32(-1)):
        with pytest.raises(ValueError, match=r"local_step must be in \[0, 21474"):
            arguments.local_step("tx", value)
    for value in (1.0, True, jnp.float32(1)):
        with pytest.raises(TypeError, match=r"local_step must be an integer scalar"):
            arguments.local_step("tx", value)
    # Nobody waits for an array that is being computed.
    assert arguments.local_step("tx", jnp.int32(-1)) == -1
    assert arguments.extra_argument("tx", "worker", 0, "the index of") == 0


def test_transformations():
    tx = optax.sgd(0.1)
    made = arguments.transformation("inner", tx)
    assert isinstance(made, optax.GradientTransformationExtraArgs)
    made.update(jnp.ones(2), made.init(jnp.ones(2)), None, unknown=1)

    class Half:
        init = staticmethod(tx.init)
        update = 3

    for value in (0.1, None, Half(), type("Other", (), {"update": tx.update})):
        with pytest.raises(TypeError, match=r"^inner must be an optax\.GradientTran"):
            arguments.transformation("inner", value)


def test_flags():
    arguments.check_flags(a=True, b=np.bool(False))
    for value in (1, "no", None, jnp.bool(True)):
        with pytest.raises(TypeError, match=r"^b must be True or False, not trac"):
            arguments.check_flags(a=True, b=value)
    for value in (True, np.bool(True), jnp.bool(True), np.array(True)):
        assert isinstance(arguments.flag("last", value), jax.Array)
        assert arguments.flag("last", value)
    for value in (1, "yes", None, [True], np.array([True])):
        with pytest.raises(TypeError, match=r"^last must be a bool, or an array bool"):
            arguments.flag("last", value)


def test_several_numbers_that_are_not_negative():
    assert arguments.non_negative(a=0, b=2.5) == [0, 2.5]
    for value in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^b must be in \[0, inf\), got"):
            arguments.non_negative(a=0, b=value)
