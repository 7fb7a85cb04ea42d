"""What the tests of engines share: no test hangs, and the engines of this machine."""

import pytest

from gradxform import engines


@pytest.fixture(autouse=True)
def none_hangs(bounded):
    """Every test of an engine has a limit."""


@pytest.fixture(params=[engines.simulated, engines.threads])
def engine(request):
    """The engines that need no cluster, one after the other."""
    return request.param
