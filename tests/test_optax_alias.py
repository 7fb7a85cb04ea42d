"""optax's own tests of its optimizers, with ours in the place of optax's.

They ship in its wheel: convergence on a parabola and on Rosenbrock's function, real and
complex; dtype, shape and sharding stability from float16 to complex128;
``inject_hyperparams``; extra arguments; ``MultiSteps``; no recompilation.
"""

import types
import unittest

import optax
import pytest
from optax._src import alias, alias_test

import gradxform as gx

OURS = {"adagrad": gx.adagrad, "novograd": gx.novograd}


def names(optimizer):
    """Test methods whose parameters name this optimizer."""
    for name in unittest.TestLoader().getTestCaseNames(alias_test.AliasTest):
        parameters = getattr(alias_test.AliasTest, name).__x_params_repr__
        if f"opt_name={optimizer!r}" in str(parameters):
            yield name


TESTS = [(optimizer, name) for optimizer in OURS for name in names(optimizer)]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("optimizer", "name"), TESTS)
def test_optax_alias(optimizer, name, monkeypatch):
    patched = types.SimpleNamespace(**vars(alias) | OURS)
    monkeypatch.setattr(alias_test, "alias", patched)
    result = unittest.TestResult()
    alias_test.AliasTest(name).run(result)
    problems = result.failures + result.errors
    assert not problems, problems[0][1]
    assert result.testsRun == 1
    assert not result.skipped


@pytest.mark.skipif(optax.__version__ < "0.2.8", reason="optax has fewer")
def test_all_of_them_are_found():
    # Each optimizer has 4 optimizations, 6 dtypes, 2 tests in 2 dtypes each, and 2
    # more.
    assert len(TESTS) == 2 * 16
