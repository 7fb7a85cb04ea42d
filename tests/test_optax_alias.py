"""optax's own tests of its optimizers, with ours in the place of optax's.

They ship in its wheel: convergence on a parabola and on Rosenbrock's function, real and
complex; dtype, shape and sharding stability from float16 to complex128;
``inject_hyperparams``; extra arguments; ``MultiSteps``; no recompilation.
"""

import types
import unittest

import optax
import pytest
from optax._src import alias

import gradxform as gx

OURS = {"adagrad": gx.adagrad, "novograd": gx.novograd}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("optimizer", OURS)
def test_optax_alias(optimizer, monkeypatch):
    from optax._src import alias_test  # It takes a second.

    patched = types.SimpleNamespace(**vars(alias) | OURS)
    monkeypatch.setattr(alias_test, "alias", patched)
    suite = unittest.TestSuite()
    for name in unittest.TestLoader().getTestCaseNames(alias_test.AliasTest):
        parameters = getattr(alias_test.AliasTest, name).__x_params_repr__
        if f"opt_name={optimizer!r}" in str(parameters):
            suite.addTest(alias_test.AliasTest(name))
    result = unittest.TestResult()
    suite.run(result)
    problems = result.failures + result.errors
    assert not problems, problems[0][1]
    assert not result.skipped
    # 4 optimizations, 6 dtypes, 2 tests in 2 dtypes each, and 2 more; optax had fewer.
    assert result.testsRun == 16 or optax.__version__ < "0.2.8"
