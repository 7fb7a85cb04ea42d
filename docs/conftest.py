"""The pages run as JAX comes: it promotes dtypes and ranks."""

import jax
import pytest


@pytest.hookimpl(tryfirst=True)  # Before pytest leaves out what `-m` does not name.
def pytest_collection_modifyitems(items):
    """The blocks of a page take seconds, so they are slow tests."""
    for item in items:
        if item.nodeid.startswith("docs/"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def standard_promotion():
    """The tests are strict, as tests/conftest.py sets it; a reader's JAX is not."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
