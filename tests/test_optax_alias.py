"""Optax's own tests run with our aliases, and its wrappers hold our optimizers.

Its tests ship in its wheel: convergence on a parabola and on Rosenbrock's function,
real and complex; dtype, shape and sharding stability from float16 to complex128;
``inject_hyperparams``; extra arguments; ``MultiSteps``; no recompilation.

``test_contract.py`` has most wrappers, around every row. Here are those that change
something as training goes on: the rate, or the parameters.
"""

import functools
import types
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
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


# Inside of wrappers.

STEPS, LATE = 12, (5, 8)  # The second are late pushes to a gate.
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS, 8, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32) + 1
START = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}


@jax.jit
def gradient(params, x, y):
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)


def train(tx):
    """Parameters and state after each step. An injected rate is set anew midway."""
    tx, params = optax.with_extra_args_support(tx), START
    state = tx.init(params)
    if isinstance(state, optax.LookaheadState):
        params = optax.LookaheadParams.init_synced(START)
    update, trace = jax.jit(tx.update), []
    for t in range(STEPS):
        if t == 6 and hasattr(state, "hyperparams"):
            state.hyperparams["learning_rate"] = jnp.float32(0.02)
        grads = gradient(getattr(params, "fast", params), X[t], Y[t])
        seen = 0 if t in LATE else t
        updates, state = update(grads, state, params, local_step=seen)
        params = gx.apply_updates(params, updates)
        trace.append((params, state))
    return trace


def lookahead(tx):
    return optax.lookahead(tx, sync_period=3, slow_step_size=0.5)


def averaged(tx):
    return optax.contrib.schedule_free(tx, 0.1)


WRAPPERS = {
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(0.1),
    "schedule_free": lambda make: averaged(make(0.1)),
    "lookahead": lambda make: lookahead(make(0.1)),
}
novograd = functools.partial(gx.novograd, b1=0.5, weight_decay=0.01)
# Ours, and optax's with the same numbers.
OPTIMIZERS = {
    "adagrad": (gx.adagrad, optax.adagrad),
    "novograd": (
        functools.partial(novograd, b2=0.25, eps=1e-6, eps_in_sqrt=False),
        functools.partial(optax.novograd, b1=0.5, weight_decay=0.01),
    ),
}


# optax's own code multiplies floats by integers and booleans.
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_optaxs_own(name, wrapper):
    ours, theirs = (
        [params for params, _ in train(WRAPPERS[wrapper](make))]
        for make in OPTIMIZERS[name]
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_gate_around_schedule_free_keeps_late_pushes_from_the_average():
    def at_late_pushes(tx):
        trace = [params for params, _ in train(tx)]
        return [(trace[t - 1], trace[t]) for t in LATE]

    for before, after in at_late_pushes(gx.drop_stale(averaged(novograd(0.1)), 0)):
        chex.assert_trees_all_equal(before, after)
    for before, after in at_late_pushes(averaged(gx.drop_stale(novograd(0.1), 0))):
        assert jnp.all(before["w"] != after["w"])
