"""Strict JAX for every test and doctest: no silent promotion, broadcast or warning."""

import contextlib
import gc
import signal

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)


# The garbage collector need not look at all that was imported again and again.
gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """What a module has compiled is of no use to the next one, and slows it down."""
    yield
    jax.clear_caches()


@pytest.fixture
def standard_promotion():
    """Lets optax's own code promote dtypes and ranks, where a test runs it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


@pytest.fixture
def bounded():
    """A test that hangs fails."""

    def fail(*_):
        raise TimeoutError("the test hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(180)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
