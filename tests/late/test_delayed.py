"""A fixed delay: what it holds, in which dtypes, and what it refuses.

Its numbers are those of a list in test_contract.py, and of rings in plain Python in
test_accumulator.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx


def test_without_a_delay_it_is_the_inner_one():
    tx = gx.adagrad(0.1)
    for nothing in (0, np.int64(0), {"w": 0, "b": 0}):
        same = gx.delayed(tx, nothing)
        assert (same.init, same.update) == (tx.init, tx.update)
    # Extra arguments may be passed all the same.
    tx = gx.delayed(optax.GradientTransformation(*optax.sgd(1.0)), 0)
    assert tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value=3)[0].sum() == -2


@pytest.mark.every
@pytest.mark.parametrize(
    ("param", "grad", "given", "ring"),
    [
        ("float32", "float32", None, "float32"),
        ("bfloat16", "float32", None, "bfloat16"),
        ("bfloat16", "float32", "float32", "float32"),
        ("float32", "float32", "float16", "float16"),
        ("complex64", "complex64", None, "complex64"),
        ("int32", "float32", None, "float32"),
    ],
)
def test_a_gradient_is_rounded_to_the_ring_and_no_more(param, grad, given, ring):
    tx = gx.delayed(optax.identity(), 2, ring_dtype=given)
    params = jnp.zeros(3, param)
    state, update = tx.init(params), jax.jit(tx.update)
    types = jax.tree.map(jax.typeof, state)
    assert state.ring.dtype == ring
    grads = [jnp.asarray([1 / 3, -0.0, 1000.1]) * (1 + t) for t in range(6)]
    grads = [g.astype(grad) for g in grads]
    for t, g in enumerate(grads):
        updates, state = update(g, state, params)
        assert jax.tree.map(jax.typeof, state) == types
        assert updates.dtype == grad
        late = grads[t - 2].astype(ring).astype(grad) if t > 1 else jnp.zeros(3, grad)
        assert np.asarray(updates).tobytes() == np.asarray(late).tobytes()


def test_inner_sees_the_parameters_and_the_extra_arguments_of_today():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append((float(params), float(extra["value"])))
        return updates, state + 1

    probe = optax.GradientTransformationExtraArgs(lambda _: jnp.int32(0), update)
    tx = gx.delayed(probe, 2)
    state = tx.init(jnp.zeros(()))
    with jax.disable_jit():
        for t in range(4):
            x = float(t)  # A number of Python, too.
            updates, state = tx.update(x + 10, state, x, value=x + 20)
    assert (float(updates), int(state.inner_state)) == (11, 2)
    assert seen[-1] == (3, 23)


@pytest.mark.slow
def test_a_gradient_that_is_held_is_dense():
    params = {"table": jnp.zeros((4, 2)), "tail": jnp.zeros((4, 2))}
    rows = gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))
    tx = gx.delayed(gx.adagrad(0.1), {"table": 1, "tail": 0})
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"at \['table'\].* gradxform.densify\(\)"):
        tx.update({"table": rows, "tail": rows}, state, params)
    # A leaf without a delay is not held, so it may be row-sparse.
    grads = {"table": jnp.ones((4, 2)), "tail": rows}
    for _ in range(2):
        params, state = gx.apply_gradients(tx, grads, state, params)
    assert jnp.any(params["tail"][1] != 0)
    assert not jnp.any(params["tail"][0])
    dense = optax.chain(gx.densify(), gx.delayed(gx.adagrad(0.1), 1))
    state = dense.init(params)
    gx.apply_gradients(dense, {"table": rows, "tail": rows}, state, params)


@pytest.mark.every
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (jnp.ones((4, 1)), r"updates and ring differ at \['table'\].* f\w+32\[4,2\]"),
        (jnp.ones((4, 2), complex), r"updates and ring differ at \['table'\]"),
        (gx.IndexedSlices([1], np.ones((1, 2), "f4"), (4, 2)), "give this leaf a dela"),
        ({}, r"updates and ring differ at \['table'\]"),
    ],
)
def test_a_gradient_that_does_not_fit_its_ring(table, message):
    with pytest.raises(TypeError, match=message):
        PARTLY.update({"table": table, "tail": TAIL}, PARTLY.init(BOTH), BOTH)


PARTLY = gx.delayed(gx.scale_by_learning_rate(0.1), {"table": 1, "tail": 0})
BOTH = {"table": jnp.zeros((4, 2)), "tail": jnp.zeros(1)}
TAIL = gx.IndexedSlices([0], np.ones(1, "f4"), (1,))


def test_a_gradient_without_a_ring_may_be_of_any_kind():
    for tail in (TAIL, BOTH["table"]):
        grads = BOTH | {"tail": tail}
        updates, _ = jax.eval_shape(PARTLY.update, grads, PARTLY.init(BOTH))
        assert updates["tail"].shape == tail.shape


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.every
def test_the_ring_is_written_after_the_step_that_reads_it(delay):
    """Otherwise it would be copied. That a bool is itself, every compiler knows."""
    tx, w = gx.delayed(optax.trace(0.9), delay), jnp.ones(3)
    push = functools.partial(gx.apply_gradients, tx)
    eqns = jax.make_jaxpr(push)(w, tx.init(w), w).eqns
    names = [eqn.primitive.name for eqn in eqns]
    after = set()
    for eqn in eqns[names.index("cond") :]:
        read = {x for x in eqn.invars if not hasattr(x, "val")}
        if eqn.primitive.name == "cond" or not after.isdisjoint(read):
            after.update(eqn.outvars)
    (unequal,) = (eqn for eqn in eqns if eqn.primitive.name == "ne")
    assert {x.aval.dtype for x in unequal.invars} == {np.dtype("float32")}
    assert after.issuperset(unequal.invars)
    (new,) = (x for eqn in eqns for x in eqn.outvars if x.aval.shape == (delay, 3))
    assert new in after


def test_a_number_may_stand_for_a_branch():
    state = made({"a": 1, "b": 2})
    assert jax.tree.map(jnp.shape, state.ring) == {"a": (1, 2), "b": {"c": (2, 3)}}
    assert not any(map(jnp.any, jax.tree.leaves(state.ring)))
    assert made({"a": 2, "b": 0}).ring["b"]["c"].shape == ()
    part = {"a": gx.TableRows([3], PARAMS["a"][None], (4, 2)), "b": PARAMS["b"]}
    assert made({"a": 1, "b": 0}, part).ring["a"].shape == (1, 1, 2)
    # Twice the largest delay is an int32.
    state = jax.eval_shape(lambda: made({"a": 2**30 - 1, "b": 0}))
    assert 2 * len(state.ring["a"]) <= jnp.iinfo(state.count.dtype).max


PARAMS = {"a": jnp.zeros(2), "b": {"c": jnp.zeros(3)}}


def made(num_steps, params=PARAMS, **options):
    return gx.delayed(optax.sgd(1.0), num_steps, **options).init(params)


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: made(-1), ValueError,
         r"num_steps must be in \[0, 1073741823\], got -1."),
        (lambda: made({"a": 0, "b": -2}), ValueError,
         r"num_steps\['b'\] must be in \[0, 1073741823\], got -2"),
        (lambda: made({"a": 1, "b": {"c": 0.5}}), TypeError,
         r"num_steps\['b'\]\['c'\] must be an integer scalar, got 0.5"),
        (lambda: made({}), TypeError, "num_steps must be an int, or a tree .* got {}"),
        (lambda: made({"a": 1}), TypeError,
         r"num_steps has no value for params at \['b'\]\['c'\]. Pass one value, or"),
        (lambda: made({"a": 1, "b": 2, "d": 3}), TypeError,
         r"num_steps has 3 at \['d'\], where params has nothing. Pass one value"),
        (lambda: made(0, ring_dtype="int8"), TypeError,
         "ring_dtype must be a floating or complex dtype"),
        (lambda: made(1, ring_dtype="complex64"), TypeError,
         r"ring_dtype=complex64 does not fit \['a'\]"),
        (lambda: jax.jit(made)({"a": 1, "b": 2}), TypeError,
         r"num_steps\['a'\] is a shape, so it cannot be traced.* in static_args"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match="^" + message):
        make()


@pytest.mark.slow
def test_a_part_that_somebody_else_trains_needs_no_number_and_may_have_one():
    tx = gx.delayed(optax.sgd(1.0), {"a": 1, "b": {"c": 2}})
    parts = optax.partition(
        {"it": tx, "other": optax.sgd(1.0)}, {"a": "it", "b": "other"}
    )
    state = parts.init(PARAMS)
    updates, _ = parts.update(jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS)
    assert not jnp.any(updates["a"])
    assert jnp.all(updates["b"]["c"] == -1)
