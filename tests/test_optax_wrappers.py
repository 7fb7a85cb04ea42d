"""Inside optax's wrappers an optimizer takes the same steps as optax's own.

``test_contract.py`` has most wrappers, around every row. Here are those that change
something as training goes on: the rate, or the parameters.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.descriptors import DESCRIPTORS

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
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_optaxs_own(name, wrapper):
    ours, theirs = (
        [params for params, _ in train(WRAPPERS[wrapper](make))]
        for make in OPTIMIZERS[name]
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "stacked_axes", [1, {"w": 1, "b": 0}, lambda p: {"w": p["w"].ndim - 1, "b": 0}]
)
def test_map_params_finds_the_state_of_stacked_layers(stacked_axes):
    tx = gx.novograd(0.1, stacked_axes=stacked_axes)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    names = optax.tree.map_params(
        tx, lambda _, name: name, tx.init(params), {"w": "w", "b": "b"},
        transform_non_params=lambda _: None,
    )  # fmt: skip
    assert optax.tree.get(names, "mu") == optax.tree.get(names, "nu")
    assert optax.tree.get(names, "nu") == {"w": "w", "b": "b"}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("row", DESCRIPTORS, ids=str)
def test_map_params_takes_the_state_of_parameters_in_two_precisions(row):
    params = {"full": jnp.ones((4, 2)), "half": jnp.ones((4, 2), jnp.bfloat16)}
    tx, names = row.make(), {"full": "full", "half": "half"}
    found = optax.tree.map_params(
        tx,
        lambda _, name: name,
        tx.init(params),
        names,
        transform_non_params=lambda _: "none",
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    assert set(jax.tree.leaves(found)) <= {"full", "half", "none"}
    if row.name == "master_weights":
        assert found.residual == names


def test_wrappers_that_forward_no_extra_arguments_raise():
    late = gx.drop_stale(novograd(0.1), 0)
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        train(optax.MultiSteps(late, 3).gradient_transformation())
    # A gate cannot go around lookahead, either, and optax's own gates cannot: its
    # updates do not have the structure of the gradients.
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        train(lookahead(late))


@pytest.mark.slow
def test_a_gate_around_schedule_free_keeps_late_pushes_from_the_average():
    def at_late_pushes(tx):
        trace = [params for params, _ in train(tx)]
        return [(trace[t - 1], trace[t]) for t in LATE]

    for before, after in at_late_pushes(gx.drop_stale(averaged(novograd(0.1)), 0)):
        chex.assert_trees_all_equal(before, after)
    for before, after in at_late_pushes(averaged(gx.drop_stale(novograd(0.1), 0))):
        assert jnp.all(before["w"] != after["w"])
