"""Every slot that TensorFlow's optimizers had is found in the state, at any depth."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

RATE = optax.constant_schedule(0.1)  # It keeps a count of its own.
PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}
GRADS = {"w": jnp.array([3.0, 4.0]), "b": jnp.array(-2.0)}

WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(
        gx.clip_by_global_norm(1e3), optax.chain(optax.identity(), tx)
    ),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e3)), ("tx", tx)),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "partition": lambda tx: optax.partition(
        {"all": tx, "none": optax.set_to_zero()}, {"w": "all", "b": "all"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "drop_stale": lambda tx: gx.drop_stale(tx, 5),
    "accumulator": lambda tx: gx.conditional_accumulator(tx, 1),
    "accumulate": lambda tx: gx.accumulate(tx, 1),
    "nested": lambda tx: optax.chain(
        optax.masked(gx.drop_stale(optax.chain(optax.identity(), tx), 5), True)
    ),
}


OPTIMIZERS = {
    "adagrad": gx.adagrad(RATE),
    "novograd": gx.novograd(RATE),
    "novograd at a constant rate": gx.novograd(0.1),
    "adagrad behind a clip": gx.adagrad(RATE, global_clipnorm=1e3),
}


@functools.cache
def after_two_steps(optimizer, wrapper):
    tx = WRAPPERS[wrapper](OPTIMIZERS[optimizer])
    state = tx.init(PARAMS)
    update = jax.jit(optax.with_extra_args_support(tx).update)
    for step in range(2):
        _, state = update(GRADS, state, PARAMS, local_step=step)
    return state


SQUARES = {k: np.sum(np.square(g)) for k, g in GRADS.items()}
SLOTS = {
    "accumulator": (
        "adagrad",
        "sum_of_squares",
        {k: 0.1 + 2 * np.square(g) for k, g in GRADS.items()},
    ),
    # With b1 = 0.95: a normalized gradient, and the first one decayed.
    "momentum, m": (
        "novograd",
        "mu",
        {k: 1.95 * g / np.sqrt(SQUARES[k]) for k, g in GRADS.items()},
    ),
    "v": ("novograd", "nu", SQUARES),
    "norm": (
        "adagrad behind a clip",
        "global_norm",
        np.sqrt(sum(SQUARES.values())),
    ),
}


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_slot(wrapper, slot):
    optimizer, name, wanted = SLOTS[slot]
    state = after_two_steps(optimizer, wrapper)
    clips = 1 + (wrapper == "chain") if name == "global_norm" else 1
    found = optax.tree.get_all_with_path(state, name)
    assert len(found) == clips
    for _, got in found:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, wanted
        )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_iterations(optimizer, wrapper):
    state = after_two_steps(optimizer, wrapper)
    # A schedule and NovoGrad each keep one; they agree.
    counts = {int(count) for _, count in optax.tree.get_all_with_path(state, "count")}
    assert counts == {2}


@pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w != "accumulator"])
def test_stale_counter(wrapper):
    tx = WRAPPERS[wrapper](gx.drop_stale(gx.adagrad(0.1), 0))
    update = jax.jit(optax.with_extra_args_support(tx).update)
    state = tx.init(PARAMS)
    for local_step in (0, 0, 0):
        _, state = update(GRADS, state, PARAMS, local_step=local_step)
    *_, (_, innermost) = optax.tree.get_all_with_path(state, "stale_count")
    assert innermost == 2
