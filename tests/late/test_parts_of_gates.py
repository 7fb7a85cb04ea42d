"""What gates are made of: counters, missing leaves, arrays for updates, donations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._gates import counters, gate, missing, worker_mean
from gradxform._steps import donation

LARGEST = np.iinfo(np.int32).max
MASKED = optax.MaskedNode()
SGD = optax.sgd(1.0)
W = jnp.ones(2)


def test_counters_of_a_gate():
    """They saturate. Only those that the state has are counted."""
    assert counters.increment_if(True, jnp.int32(3)) == 4
    assert counters.increment_if(jnp.bool(False), jnp.int32(3)) == 3
    assert counters.increment_if(True, jnp.int32(LARGEST)) == LARGEST
    late, sums = gx.drop_stale(SGD, 1).init(W), gx.accumulate(SGD, 1).init(W)
    finite = gx.accumulate(SGD, 1, skip_nonfinite=True).init(W)
    for applies, accepted in ((1, 1), (0, 1), (0, 0)):
        flags = jnp.bool(applies), jnp.bool(accepted)
        new = counters.counted(late, *flags)
        assert (new.global_step, new.stale_count) == (applies, 1 - accepted)
        new = counters.counted(finite, *flags)
        assert (new.global_step, new.nonfinite_count) == (applies, 1 - accepted)
        assert new.stale_count == ()
        new = counters.counted(sums, flags[0], True)
        assert (new.global_step, new.stale_count) == (applies, ())
    new = counters.counted(late, jnp.bool(True), True)
    assert (new.global_step, new.stale_count) == (1, 0)


def test_pushes_that_gates_left_out_are_added_up():
    inner = gx.accumulate(gx.drop_stale(SGD, 1), 1, skip_nonfinite=True).init(W)
    late = inner.inner_state._replace(stale_count=jnp.int32(3))
    inner = inner._replace(nonfinite_count=jnp.int32(5), inner_state=late)
    assert counters.dropped([optax.EmptyState(), inner]) == 8
    none = counters.dropped(optax.EmptyState())
    assert (none, none.dtype) == (0, jnp.int32)


def test_updates_take_the_arrays_that_hold_them_exactly():
    full = {k: jnp.zeros(2, "float32") for k in "abcde"}
    updates = {
        "a": jnp.float32([1, 2]),
        "b": jnp.bfloat16([3, 4]),
        "c": jnp.complex64([1j, 2]),  # No float32 holds it.
        "d": jnp.ones((2, 1)),
        "e": None,
    }
    rest, filled = gate._put_into(full, updates)
    assert {k: x.shape for k, x in rest.items() if x is not None} == {
        **{"a": (0,), "b": (0,), "c": (2,), "d": (2, 1)}
    }
    np.testing.assert_array_equal(filled["a"], [1, 2])
    np.testing.assert_array_equal(filled["b"], [3, 4])
    assert filled["b"].dtype == jnp.float32
    assert all(filled[k] is full[k] for k in "cde")
    taken = gate._taken_from(filled, rest, jnp.bool(True))
    for k, update in updates.items():
        assert (taken[k] is None) == (update is None)
        if update is not None:
            assert taken[k].dtype == update.dtype
            np.testing.assert_array_equal(taken[k], update)
    zeros = gate._taken_from({"a": filled["a"]}, {"a": rest["a"]}, jnp.bool(False))
    np.testing.assert_array_equal(zeros["a"], [0, 0])
    assert gate._put_into(None, updates) == (updates, ())
    empty = {"a": jnp.zeros(0)}
    rest, filled = gate._put_into(empty, empty)
    assert rest["a"] is filled["a"] is empty["a"]
    assert gate._taken_from(empty, empty, jnp.bool(True))["a"] is empty["a"]


def test_a_new_state_has_the_dtypes_of_the_old_one():
    old = {
        **{"a": jnp.bfloat16([1]), "b": jnp.int8([1]), "c": jnp.ones(1), "d": W},
        **{"e": jnp.complex64([1]), "f": 1.0, "g": jnp.int32([1])},
    }
    new = {
        **{"a": jnp.ones(1), "b": jnp.int32([2]), "c": jnp.complex64([1j]), "d": None},
        **{"e": jnp.complex64([2]), "f": jnp.ones(1), "g": jnp.ones(1)},
    }
    found = gate._as_before(new, old)
    assert (found["a"].dtype, found["b"].dtype) == (jnp.bfloat16, jnp.int8)
    assert found["d"] is W
    assert all(found[k] is new[k] for k in "cefg")
    other = [jnp.ones(1)]
    assert gate._as_before(other, old) is other
    # A number of Python has no dtype, and stays.
    half = jnp.bfloat16(0.5)
    for number, before in (
        (3, jnp.int8(1)),
        (jnp.float32(0.5), 2),
        (3, 2),
        (half, 2.0),
    ):
        assert gate._as_before([number], [before])[0] is number


@pytest.mark.every
@pytest.mark.parametrize(
    ("newest_only", "dtype", "kept"),
    [(False, "float32", "float32"), (True, "float16", "bfloat16")],
)
def test_a_push_enters_the_row_of_its_worker_and_a_mean(newest_only, dtype, kept):
    """A leaf without a gradient counts as zeros, unless there is no table of it."""
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "c": None, "d": MASKED}
    tx = gx.worker_mean(SGD, 3, method="ringleader", accumulator_dtype=kept)
    pushes = [(1, [1, 2], [3, 4]), (1, [3, -1], None), (0, None, [7, 5])]

    def run(state):
        for i, a, b in pushes:
            grads = {"a": a and jnp.asarray(a, dtype), "b": b and jnp.asarray(b, dtype)}
            grads |= {"c": None, "d": MASKED}
            where, which = jnp.int32(i), jnp.int32(1)
            new = worker_mean._with_push(grads, state, where, which, newest_only)
            state = state._replace(**new)
        return state.counts, state.table, state.means

    counts, table, means = jax.jit(run)(tx.init(params))
    assert counts.tolist() == [1, 1 if newest_only else 2, 0]
    of = {"a": [[0, 0], [2, 0.5], [0, 0]], "b": [[7, 5], [1.5, 2], [0, 0]]}
    if newest_only:
        of["a"][1], of["b"][1] = [3, -1], [0, 0]
    for k, rows in of.items():
        assert {table[k].dtype, means[k].dtype} == {jnp.dtype(kept)}
        np.testing.assert_array_equal(np.float32(table[k]), rows)
        mean, rtol = np.mean(rows, axis=0), 3 * float(jnp.finfo(kept).eps)
        np.testing.assert_allclose(np.float32(means[k]), [[0, 0], mean], rtol, rtol)
    assert (table["c"], table["d"]) == (None, MASKED)


def test_means_that_wait_for_a_gradient_of_their_leaf():
    """The second leaf has one now; the first had one in this sum, or had none."""
    state = gx.worker_mean(SGD, 2, method="all").init({"a": W, "b": W})
    state = state._replace(present=np.array([True, False]), carried=np.int32([2, 5]))
    grads = {"a": None, "b": W}
    for before, accepted, full, present, carried in (
        ([0, 0], True, False, [False, True], [2, 5]),
        ([1, 0], True, False, [True, True], [2, 5]),
        ([0, 3], True, True, [True, True], [3, 0]),
        ([0, 0], True, True, [False, True], [2, 0]),
        ([1, 0], False, False, [True, False], [2, 5]),
    ):
        flags = jnp.bool(accepted), jnp.bool(full), np.int32(before)
        new = worker_mean._with_waiting(grads, state, *flags)
        assert (new.present.tolist(), new.carried.tolist()) == (present, carried)


def test_each_leaf_without_a_gradient_is_none():
    params = {"a": W, "b": {"c": W, "d": MASKED}, "e": MASKED}
    float0 = np.zeros(2, jax.dtypes.float0)
    for none in (None, MASKED):
        grads = {"a": float0, "b": none, "e": none}
        found = missing.normalized(grads, params)
        assert found["a"] is None
        assert found["b"] == {"c": None, "d": MASKED}
    whole = {"a": W, "b": {"c": W, "d": MASKED}, "e": MASKED}
    assert jax.tree.structure(missing.normalized(whole, params)) == (
        jax.tree.structure(whole)
    )
    assert missing.normalized({"a": float0}, None) == {"a": None}


def test_a_gate_takes_a_float0_for_no_gradient():
    params = {"a": jnp.int32([1, 2]), "b": W}
    grads = {"a": np.zeros(2, jax.dtypes.float0), "b": W}
    tx = gx.drop_stale(SGD, 1)
    state = tx.init(params)
    updates = jax.eval_shape(lambda: tx.update(grads, state, params, local_step=0)[0])
    assert updates["a"] is None
    assert updates["b"].shape == (2,)


def test_a_transformation_that_needs_all_leaves_says_what_to_pass():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: g + updates["b"], updates), state

    whole = optax.GradientTransformation(lambda params: jnp.zeros(7), update)
    grads = {"a": W, "b": None}
    with pytest.raises(TypeError) as error:
        missing.update(whole, grads, jnp.zeros(3), {"a": W, "b": W})
    (note,) = (x for x in error.value.__notes__ if "gradients have" in x)
    assert note.startswith("The gradients have None at ['b'], and this transformation")


def test_a_state_of_a_missing_leaf_stays():
    """Trees like the parameters lose that leaf, and a function gets all of them."""
    seen = {}

    def update(updates, state, params=None, *, like, number, f, **extra):
        seen.update(params=params, like=like, number=number, value=f(params))
        return jax.tree.map(lambda g: 2 * g, updates), jax.tree.map(
            jnp.add, state, updates
        )

    tx = optax.GradientTransformationExtraArgs(
        lambda params: jax.tree.map(jnp.zeros_like, params), update
    )
    params = {"a": W, "b": 5 * W}
    state = {"a": 3 * W, "b": 4 * W}
    new, after = missing.update(
        *(tx, {"a": W, "b": None}, state, params),
        like={"a": 7 * W, "b": W},
        number=W,
        f=lambda given: given["b"],
    )
    np.testing.assert_array_equal(new["a"], 2 * W)
    np.testing.assert_array_equal(after["a"], 4 * W)
    assert (new["b"], after["b"] is state["b"]) == (None, True)
    assert [*jax.tree.leaves(seen["params"])] == [W]
    (like,) = jax.tree.leaves(seen["like"])
    np.testing.assert_array_equal(like, 7 * W)
    assert seen["number"] is W
    assert seen["value"] is params["b"]


class Step(NamedTuple):
    """A step that shows its arguments; the rest of a jitted function."""

    lower: object = None
    trace: object = None
    eval_shape: object = None
    name: str = "step"

    def __call__(self, params, state, *batch, **words):
        return params, state, batch, words


def donating(tx=SGD, *, params_too=True):
    step = donation.Donating.__new__(donation.Donating)
    vars(step).update(_step=Step(), _tx=tx, _params_too=params_too, _captured=None)
    return step


def is_copy(new, old):
    return new is not old and new.tolist() == old.tolist()


def test_arrays_that_somebody_else_has_are_copied_before_they_are_donated():
    x, y, z = (jnp.ones(2) + n for n in range(3))
    params, state, batch, words = donating()({"w": x}, [y], z, last=z)
    assert (params["w"] is x, state[0] is y, batch[0] is z, words["last"] is z) == (
        1,
    ) * 4
    # One array twice: the second one is copied.
    params, state, *_ = donating()({"w": x}, [x, y])
    assert params["w"] is x
    assert is_copy(state[0], x)
    assert state[1] is y
    # The batch or a keyword has it.
    params, state, *_ = donating()({"w": x}, [y], x, last=y)
    assert is_copy(params["w"], x)
    assert is_copy(state[0], y)
    # Parameters are not donated: those in the state are copied.
    params, state, *_ = donating(params_too=False)({"w": x}, [x, y])
    assert params["w"] is x
    assert is_copy(state[0], x)
    assert state[1] is y
    # A number has no memory.
    assert donating()({"w": x}, [1.5], 1.5)[1] == [1.5]


def test_arrays_that_a_transformation_begins_with_are_copied():
    start = jnp.full(2, 7.0)
    tx = optax.GradientTransformation(lambda params: {"start": start}, SGD.update)
    step = donating(tx)
    params, state, *_ = step({"w": W}, {"start": start})
    assert params["w"] is W
    assert is_copy(state["start"], start)
    assert [x is start for x in step._captured] == [True]
    with pytest.raises(ValueError, match="params has no array"):
        donating()({}, ())

    def reads(params):
        return {"start": start if float(params["w"][0]) > 0 else None, "own": 2 * W}

    (found,) = donation._captured(optax.GradientTransformation(reads, None), {"w": W})
    assert found is start
    rows = gx.TableRows([1], jnp.ones((1, 2)), (3, 2))  # Its state is that of the rows.
    assert donation._captured(gx.novograd(0.1), {"table": rows}) == []


def test_an_error_of_a_gpu_s_host_memory_has_a_note():
    class Failing(Step):
        def __call__(self, *args, **words):
            raise jax.errors.JaxRuntimeError(self.name)

    for name, has_note in (("gpu_host_bfc is full", True), ("full", False)):
        step = donating()
        step._step = Failing(name=name)
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            step({"w": W}, ())
        assert hasattr(error.value, "__notes__") == has_note
    assert donating().name == "step"
