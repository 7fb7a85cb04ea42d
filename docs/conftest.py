"""The pages run as JAX comes: optax's own Adam, for one, promotes dtypes."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    """The tests are strict, as tests/conftest.py sets it; a reader's JAX is not."""
    with jax.numpy_dtype_promotion("standard"):
        yield
