"""Every transformation that optax has, in our verbs: frozen leaves, donated memory.

The tests find every one that can be made from a learning rate and the like, so a new
one of optax is tested at once. The others are named, with the reason.
"""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import gradxform as gx

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Arguments without a default, or with one that ends this little training at once.
ARGUMENTS = {
    "learning_rate": 0.1,
    "weight_decay": 0.01,
    "step_size": 0.1,
    "step_size_fn": optax.constant_schedule(0.1),
    "decay": 0.9,
    "clipping": 0.1,
    "max_norm": 1.0,
    "max_delta": 1.0,
    "threshold": 5.0,  # Below 4 RAdam takes the root of a negative number.
    "eta": 0.1,
    "gamma": 0.5,
    "key": 0,
    "optimism": 0.5,
    "max_consecutive_errors": 3,
    "inner": optax.adam(0.1),
    "fast_optimizer": optax.adam(0.1),
    "base_optimizer": optax.adam(0.1),
    "optimizer": optax.adam(0.1),
    "adv_optimizer": optax.sgd(0.1),
    "linesearch": None,
}
NEEDS = {
    "optax.lookahead": "parameters in two copies: test_minimize.py",
    "optax.masked": "a mask: test_contract.py",
    "optax.partition": "labels: test_contract.py",
    "optax.scale_by_zoom_linesearch": "the loss as a function: below",
    "optax.scale_by_backtracking_linesearch": "the loss as a function: below",
    "optax.contrib.hutchinson_estimator_diag_hessian": "the loss as a function",
    "optax.contrib.sophia": "the loss as a function",
    "optax.contrib.differentially_private_aggregate": "a gradient for each example",
    "optax.contrib.dpsgd": "a gradient for each example",
    "optax.contrib.scale_by_muon": "matrices alone; muon itself is tested",
}
# Its update takes no other arguments.
WITHOUT_VALUE = {"optax.contrib.sam"}
# Its state is one vector of all leaves.
NOT_BY_LEAF = {"optax.flatten"}
# They draw a key for each leaf, and without the frozen ones there are fewer leaves.
KEYS_BY_LEAF = {"optax.add_noise", "optax.noisy_sgd"}


def found():
    """The transformations, by name."""
    transformations = {}
    for module in optax, optax.contrib:
        for name, make in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(make):
                continue
            parameters = inspect.signature(make).parameters
            arguments = {k: v for k, v in ARGUMENTS.items() if k in parameters}
            try:
                tx = make(**arguments)
            except Exception:  # A loss, a schedule, or a wrapper that needs more.
                continue
            if isinstance(tx, optax.GradientTransformation):
                transformations[f"{module.__name__}.{name}"] = tx
    return {k: tx for k, tx in transformations.items() if k not in NEEDS}


FOUND = found()
QUICK = {f"optax.{x}" for x in ("adam", "sgd", "lamb", "contrib.prodigy", "flatten")}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in FOUND
]
X = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)


def start():
    """New arrays each time: they are donated."""
    return {
        "w": jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3) / 10,
        "frozen": {"w": jnp.ones((4, 2)), "v": jnp.zeros(3)},
        "b": jnp.array([0.3, -0.2, 0.1]),
    }


def loss_fn(params, x):
    error = x @ params["w"] + params["b"][None] - jnp.sum(params["frozen"]["w"]) / 8
    return jnp.mean(error**2)


@jax.jit
@jax.value_and_grad
def loss_alone(params, x):
    return loss_fn({**params, "frozen": start()["frozen"]}, x)


def by_hand(name):
    """A step as optax's pages show it. Its operations are compiled one by one."""
    tx = FOUND[name]
    update = optax.with_extra_args_support(tx).update

    def step(params, state, x):
        loss, grads = loss_alone(params, x)
        with jax.disable_jit():
            extra = {} if name in WITHOUT_VALUE else {"value": loss}
            updates, state = update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state, loss

    return step


def trained(step, params, state):
    for _ in range(3):
        params, state, _ = step(params, state, X)
    return params, state


@pytest.mark.parametrize("name", NAMES)
def test_frozen_leaves_act_as_if_they_were_absent(name):
    """The step donates the memory of everything, whoever held it at first."""
    tx, params = FOUND[name], start()
    step = gx.minimize(loss_fn, tx, trainable={"w": True, "b": True, "frozen": False})
    state = tx.init(params)
    if name in NOT_BY_LEAF:
        with pytest.raises(TypeError, match="does not keep its state leaf by leaf"):
            step(params, state, X)
        return
    before = jax.device_get(tx.init(params))
    params, state = trained(step, params, state)
    chex.assert_trees_all_equal(params["frozen"], start()["frozen"])
    alone = {k: x for k, x in start().items() if k != "frozen"}
    expected, expected_state = trained(by_hand(name), alone, tx.init(alone))
    if name not in KEYS_BY_LEAF:
        learned = {k: params[k] for k in alone}
        chex.assert_tree_all_finite(learned)  # NaN would equal NaN.
        chex.assert_trees_all_close(learned, expected, rtol=1e-5, atol=1e-5)
    before, after, without = map(by_path, (before, state, expected_state))
    assert after.keys() == before.keys()
    for path in before.keys() - without.keys():
        np.testing.assert_array_equal(after[path], before[path], err_msg=path)


def by_path(tree):
    return {
        jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)
    }
