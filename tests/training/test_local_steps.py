"""Local steps: plain steps one after the other, and their results."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx

H = 5
RATE = jnp.float32(0.1)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((H, 4, 3)).astype(np.float32)
Y = RNG.standard_normal((H, 4)).astype(np.float32)


def start(dtype="float32"):
    """Parameters: among them are integers, which nothing trains, and an empty node."""
    return {
        "w": jnp.asarray([0.5, -1.0, 2.0], dtype),
        "b": jnp.asarray(0.25, dtype),
        "sizes": jnp.array([3, 4]),
        "none": None,
    }


LEARNING = {"w": True, "b": True, "sizes": False, "none": None}


def loss_fn(params, x, y):
    x = x.astype(params["w"].dtype)
    error = x @ params["w"] + params["b"] - y.astype(x.dtype)
    return jnp.mean(error**2).astype(jnp.float32)


def masked(tx):
    return optax.masked(tx, LEARNING)


def by_hand(tx, params, state, steps):
    """A Python loop, as optax's documentation has it."""
    losses = []
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        loss, grads = jax.value_and_grad(loss_fn, allow_int=True)(params, x, y)
        grads["sizes"] = None
        updates, state = tx.update(grads, state, params)
        params = gx.apply_updates(params, updates)
        losses.append(loss)
    return params, state, losses


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("tx", "num_steps"),
    [
        (masked(optax.sgd(0.1, momentum=0.9)), None),
        (masked(optax.sgd(0.1, momentum=0.9)), 3),
        (masked(optax.adamw(0.1)), 0),
        (masked(optax.adamw(0.1)), H),
        (gx.adagrad(0.1), H + 1),
    ],
)
def test_equals_plain_steps(tx, num_steps):
    steps = gx.local_steps(loss_fn, tx, trainable=LEARNING)
    taken = H if num_steps is None else min(num_steps, H)
    pulled, state, expected_state = start(), tx.init(start()), tx.init(start())
    for _ in range(2):  # The second time goes on with its state.
        trained, expected_state, expected_losses = by_hand(
            tx, pulled, expected_state, taken
        )
        grads, state, losses = steps(pulled, state, X, Y, num_steps=num_steps)
        assert grads["sizes"] is None
        for k in ("w", "b"):
            np.testing.assert_allclose(
                grads[k], pulled[k] - trained[k], rtol=1e-5, atol=1e-6
            )
        chex.assert_trees_all_close(state, expected_state, rtol=1e-5, atol=1e-6)
        assert losses.shape == (H,)
        np.testing.assert_allclose(losses[:taken], expected_losses, rtol=1e-5)
        assert not losses[taken:].any()


def test_another_number_of_steps_is_no_other_program():
    traces = 0

    def counted(params, x, y):
        nonlocal traces
        traces += 1
        return loss_fn(params, x, y)

    tx = gx.adagrad(0.1)
    steps = gx.local_steps(counted, tx, trainable=LEARNING, donate=False)
    state = tx.init(start())
    steps(start(), state, X, Y, num_steps=1)
    once = traces
    moved = [steps(start(), state, X, Y, num_steps=n)[0]["b"] for n in range(H)]
    assert traces == once > 0
    assert len({float(b) for b in moved}) == H


@pytest.mark.parametrize(("num_steps", "unroll"), [(None, 1), (2, True)])
def test_aux_has_an_entry_for_each_step(num_steps, unroll):
    def with_aux(params, x):
        return params * x, {"x": x}

    tx = optax.sgd(1.0)
    steps = gx.local_steps(with_aux, tx, has_aux=True, unroll=unroll)
    w, x = jnp.float32(3), jnp.arange(1.0, 4.0)
    arguments = w, tx.init(w), x
    text = steps.lower(*arguments, num_steps=num_steps).as_text()
    assert ("stablehlo.while" in text) == (unroll is not True)
    grads, _, losses, aux = steps(*arguments, num_steps=num_steps)
    n = num_steps or 3
    assert grads == sum(range(1, n + 1))
    assert aux["x"].tolist() == [1.0, 2.0, 3.0][:n] + [0.0] * (3 - n)
    assert losses.tolist() == [3.0, 4.0, 0.0][:n] + [0.0] * (3 - n)


@pytest.mark.parametrize("donate", [True, False])
def test_pulled_arrays_stay_valid(donate):
    tx = gx.adagrad(0.1)
    params, state = start(), tx.init(start())
    steps = gx.local_steps(loss_fn, tx, trainable=LEARNING, donate=donate)
    steps(params, state, X, Y)
    chex.assert_trees_all_equal(params, start())
    assert {leaf.is_deleted() for leaf in jax.tree.leaves(state)} == {donate}


def test_what_is_pushed_from_parameters_on_the_host_is_on_the_device():
    tx, params = gx.adagrad(0.1), {"w": jnp.ones(3), "b": jnp.ones(())}
    steps = gx.local_steps(loss_fn, tx, donate=False)
    traced = steps.trace(gx.on_host(params, min_size=1), tx.init(params), X, Y)
    assert "host" not in str(traced.jaxpr.out_avals)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "make",
    [optax.contrib.prodigy, lambda: optax.inject_hyperparams(optax.sgd)(RATE)],
    ids=["prodigy", "injected"],
)
def test_workers_share_pulled_arrays_and_rates(make):
    """They share the pulled arrays, which a state may begin with, and one rate."""
    tx = masked(make())
    pulled = start()
    steps = gx.local_steps(loss_fn, tx, trainable=LEARNING)
    kept = gx.local_steps(loss_fn, tx, trainable=LEARNING, donate=False)
    states = [tx.init(pulled), tx.init(pulled)]
    expected = kept(pulled, states[0], X, Y)
    for state in states:
        got = steps(pulled, state, X, Y)
        chex.assert_trees_all_close(got, expected, rtol=1e-6)
        steps(pulled, got[1], X, Y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(got[1]))
    chex.assert_trees_all_equal(pulled, start())
    assert np.float32(0.1) == RATE


def test_half_precision_is_rounded_once():
    """A parameter does not move in a step that is too small for its precision."""
    tx, x = optax.sgd(1.0), np.float32([-3, -1, 2**-7])
    w = jnp.asarray(4, jnp.bfloat16)
    steps = gx.local_steps(lambda w, x: (w * x).astype(jnp.float32), tx)
    grads, *_ = steps(w, tx.init(w), jnp.asarray(x, jnp.bfloat16))
    assert grads.dtype == jnp.bfloat16
    assert grads == -4  # 8 - 2⁻⁷ is 8 again.


def test_extra_arguments_and_the_loss_reach_the_optimizer():
    def update(updates, state, params=None, *, value, factor, **_):
        return jax.tree.map(lambda g: -factor * g, updates), value

    tx = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    steps = gx.local_steps(lambda w, x: w * x, tx)
    grads, last, losses = steps(jnp.float32(3), jnp.float32(0), X[0, 0], factor=2.0)
    np.testing.assert_allclose(grads, 2 * X[0, 0].sum(), rtol=1e-6)
    assert last == losses[-1]


@pytest.mark.figures
def test_the_gradient_is_the_only_copy():
    """Besides it, the trained parameters become the pseudo-gradient in their place."""
    shapes = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    tx, n = gx.adagrad(0.1), 4 * 512**2
    steps = gx.local_steps(lambda p, x: jnp.sum((x @ p["w"]) ** 2), tx)
    x = jax.ShapeDtypeStruct((8, 4, 512), jnp.float32)
    compiled = steps.lower(shapes, jax.eval_shape(tx.init, shapes), x).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1.05 * n
    assert n <= memory.alias_size_in_bytes < 1.01 * n


ROWS = {"emb": gx.IndexedSlices([1], jnp.ones((1, 2)), (3, 2))}
BAD = {
    "none": ((), {}, ValueError, "got no batches"),
    "another length": (
        ({"x": X}, Y[:3]),
        *({}, ValueError, r"batches\[0\]\['x'\].: \(5, .*'batches\[1\]': \(3,"),
    ),
    "empty": ((X, Y[:0]), {}, ValueError, r"at least one: .*'batches\[1\]': \(0,"),
    "a number": ((X, 1.0), {}, ValueError, r"'batches\[1\]': \(\)"),
    "a float": ((X, Y), {"num_steps": 2.0}, TypeError, "num_steps must be an integer"),
}


@pytest.mark.every
@pytest.mark.parametrize("name", BAD)
def test_bad_batches_are_named(name):
    batches, more, error, message = BAD[name]
    tx = gx.adagrad(0.1)
    steps = gx.local_steps(loss_fn, tx, trainable=LEARNING)
    with pytest.raises(error, match=message):
        steps(start(), tx.init(start()), *batches, **more)


def test_other_bad_input():
    tx = gx.adagrad(0.1)
    with pytest.raises(TypeError, match="tx must be an optax"):
        gx.local_steps(loss_fn, None)
    with pytest.raises(ValueError, match="grads has no gradient for any leaf"):
        gx.local_steps(loss_fn, tx, trainable=False)(start(), tx.init(start()), X, Y)
    with pytest.raises(TypeError, match=r"IndexedSlices of .* at \['emb'\]"):
        gx.local_steps(loss_fn, tx)(ROWS, optax.EmptyState(), X, Y)
