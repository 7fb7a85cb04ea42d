"""Inside optax's wrappers an optimizer takes the same steps as by hand.

``test_contract.py`` has most wrappers, around every row. Here are those that change
something as training goes on: the rate, or the parameters. Each function of the table
returns the trace of such a training, and the same trace written out with the bare
optimizer. Two of the pushes to ``drop_stale`` are late. By hand they are left out, so
an extra argument that a wrapper did not forward would show.
"""

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.descriptors import DESCRIPTORS

STEPS, LATE = 12, (5, 8)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((STEPS, 8, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32) + 1
START = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}


@jax.jit
def gradient(params, x, y):
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    bare: Callable  # learning rate -> optimizer
    gated: bool = False

    def make(self, rate):
        return gx.drop_stale(self.bare(rate), 0) if self.gated else self.bare(rate)

    def by_hand(self, rate, params):
        """The updates of the bare optimizer at step t, zero for a late push."""
        state, update = self.bare(rate).init(params), jax.jit(self.bare(rate).update)

        def step(t, grads, params):
            nonlocal state
            if self.gated and t in LATE:
                return jax.tree.map(np.zeros_like, grads)
            updates, state = update(grads, state, params)
            return updates

        return step


def novograd(rate):
    return gx.novograd(rate, b1=0.5, weight_decay=0.01)


ROWS = (
    Row("adagrad", lambda rate: gx.adagrad(rate, global_clipnorm=0.5)),
    Row("novograd", novograd),
    Row("drop_stale", novograd, gated=True),
)


def add(params, updates):
    return jax.tree.map(np.add, params, updates)


def train(tx, params=START, meanwhile=None, read=lambda params, state: params):
    """What is read after each step. ``meanwhile`` may change gradients and state."""
    tx = optax.with_extra_args_support(tx)
    state, update, trace = tx.init(params), jax.jit(tx.update), []
    for t in range(STEPS):
        grads = gradient(getattr(params, "fast", params), X[t], Y[t])
        if meanwhile:
            grads, state = meanwhile(t, grads, state)
        seen = 0 if t in LATE else t
        updates, state = update(grads, state, params, local_step=seen)
        params = gx.apply_updates(params, updates)
        trace.append(read(params, state))
    return trace


def write_out(step):
    """The same trace, from ``step(t, gradients, params) -> params``."""
    params, trace = START, []
    for t in range(STEPS):
        params = step(t, gradient(params, X[t], Y[t]), params)
        trace.append(params)
    return trace


def inject_hyperparams(row):
    """The rate is set anew midway."""

    def meanwhile(t, grads, state):
        if t == 6:
            state.hyperparams["rate"] = jnp.float32(0.02)
        return grads, state

    unit = row.by_hand(1.0, START)

    def step(t, grads, params):
        rate = 0.1 if t < 6 else 0.02
        return add(params, jax.tree.map(lambda u: rate * u, unit(t, grads, params)))

    tx = optax.inject_hyperparams(row.make)(rate=0.1)
    return train(tx, meanwhile=meanwhile), write_out(step)


def schedule_free(row):
    """The optimizer moves z; x averages z; gradients are taken between them, at y."""
    tx = optax.contrib.schedule_free(row.make(0.1), 0.1, b1=0.9)
    update, z, x, averages = row.by_hand(0.1, START), START, START, []

    def step(t, grads, y):
        nonlocal z, x
        z = add(z, update(t, grads, y))
        # A late push does not move z, but x goes on towards it.
        x = jax.tree.map(lambda x, z: x + (z - x) / (t + 1), x, z)
        averages.append(x)
        return jax.tree.map(lambda x, z: 0.9 * x + 0.1 * z, x, z)

    def read(y, state):
        return y, optax.contrib.schedule_free_eval_params(state, y)

    return train(tx, read=read), list(zip(write_out(step), averages, strict=True))


def lookahead(row):
    """Every third step the slow parameters go half the way; the fast ones join them."""
    tx = optax.lookahead(row.make(0.1), sync_period=3, slow_step_size=0.5)
    update, slow, slows = row.by_hand(0.1, START), START, []

    def step(t, grads, fast):
        nonlocal slow
        fast = add(fast, update(t, grads, fast))
        if t % 3 == 2:
            slow = fast = jax.tree.map(lambda s, f: s + 0.5 * (f - s), slow, fast)
        slows.append(slow)
        return fast

    got = train(tx, optax.LookaheadParams.init_synced(START))
    return [tuple(p) for p in got], list(zip(write_out(step), slows, strict=True))


WRAPPERS = inject_hyperparams, schedule_free, lookahead
CASES = {
    f"{wrapper.__name__}-{row.name}": (wrapper, row)
    for wrapper in WRAPPERS
    for row in ROWS
    if not (wrapper is lookahead and row.gated)  # See below.
}


# optax's own code multiplies floats by integers and booleans.
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", CASES)
def test_trains_as_written_out(case):
    wrapper, row = CASES[case]
    got, expected = wrapper(row)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6)


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


def test_wrappers_that_forward_no_extra_arguments_raise():
    late = gx.drop_stale(novograd(0.1), 0)
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        train(optax.MultiSteps(late, 3).gradient_transformation())
    # A gate cannot go around lookahead, either, and optax's own gates cannot: its
    # updates do not have the structure of the gradients.
    with pytest.raises(TypeError, match="drop_stale needs local_step"):
        lookahead(ROWS[-1])


@pytest.mark.slow
def test_a_gate_around_schedule_free_keeps_late_pushes_from_the_average():
    def at_late_pushes(tx):
        trace = train(tx)
        return [(trace[t - 1], trace[t]) for t in LATE]

    def averaged(optimizer):
        return optax.contrib.schedule_free(optimizer, 0.1)

    for before, after in at_late_pushes(gx.drop_stale(averaged(novograd(0.1)), 0)):
        chex.assert_trees_all_equal(before, after)
    for before, after in at_late_pushes(averaged(gx.drop_stale(novograd(0.1), 0))):
        assert jnp.all(before["w"] != after["w"])
