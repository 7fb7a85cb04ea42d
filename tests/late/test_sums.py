"""The parts of a sum of pushes, one by one, against NumPy; and programs of gates."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._gates import sums
from gradxform._jax import jaxprs

INNER = optax.sgd(1.0)
PARAMS = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}


def accumulator(number=2, reduction="mean", dtype=None):
    return sums.Accumulator(
        *(INNER, number, reduction, dtype),
        enters=lambda updates, step, extra: (True, None),
        left_out="stale_count",
    )


def test_what_a_push_does_to_weights_and_counts():
    """All pushes at once: accepted or not, first of its sum or not, of any weight."""
    accepted = [True, False]
    before = [0, 1, 5]  # How many are in the sum.
    carried = [[0.0, 0.0], [0.0, 2.5], [1.0, 0.0]]
    leaf_weights = [[0.0, 0.0], [1.5, 0.0], [1.5, 2.0]]
    weight = [0.0, 1.0, 3.0]
    cases = [*itertools.product(accepted, before, carried, leaf_weights, weight)]
    columns = [np.array(column) for column in zip(*cases, strict=True)]
    acts = [True, False]
    acc = accumulator()
    empty = acc.init(PARAMS)

    def push(accepted, before, carried, leaf_weights, weight, factor=None):
        state = empty._replace(
            num_accumulated=before,
            total_weight=jnp.float32(7.0),
            carried=jnp.float32(carried),
            leaf_weights=jnp.float32(leaf_weights),
        )
        return acc._push(state, accepted, weight, factor, accepted, acts)

    found = jax.jit(jax.vmap(push))(*columns)
    for i, (enters, n, waits, of_leaves, w) in enumerate(cases):
        total, leaves = 7.0, np.array(of_leaves)
        if enters:
            total, leaves = (total, leaves) if n else (0.0, 0 * leaves)
            total, leaves = total + w, leaves + np.array([w, 0.0])
        assert found.total_weight[i] == total
        np.testing.assert_array_equal(found.leaf_weights[i], leaves)
        begun = (np.array(of_leaves) != 0) & (n > 0) | (np.array(waits) != 0)
        np.testing.assert_array_equal(found.begun[i], begun)
        np.testing.assert_array_equal(found.n[i], total + np.array(waits))
        assert found.w[i] == found.factor[i] == w


def test_the_weight_of_a_push_and_the_factor_of_its_staleness():
    acc = accumulator()
    state = acc.init(PARAMS)

    def push(weight, factor):
        return acc._push(state, True, weight, factor, jnp.bool(False), [True, True])

    assert push(None, None).factor is None
    assert push(None, None).w == 1
    assert push(None, 0.5).factor == 0.5
    for factor in (0.5, jnp.bfloat16(0.5)):
        assert (push(3, factor).factor, push(3, factor).w) == (1.5, 3)


def test_weights():
    for weight in (0, 2, 0.5, np.float32(3), jnp.int32(2)):
        assert sums.as_weight(weight) == np.float64(weight)
        assert sums.as_weight(weight).dtype == jnp.float32
    assert sums.as_weight(1, jnp.bfloat16).dtype == jnp.bfloat16
    traced = jax.jit(sums.as_weight)
    assert [float(traced(w)) for w in (0.0, 2.0)] == [0, 2]
    assert math.isnan(traced(-1.0))


def test_a_sum_is_full_from_the_number_on():
    counts = np.arange(6, dtype=np.int32)
    step = jnp.int32(4)
    for number in (1, 2, 3, 2**31 - 1, jnp.int32(3)):
        found = accumulator(number)._is_enough(counts, step)
        np.testing.assert_array_equal(found, counts >= int(number))
    for number in (3, 2.5, jnp.float32(2 + 1e-6), np.float64(3 - 1e-6), 2**31 - 1):
        schedule = lambda count, number=number: number + 0 * int(count)  # noqa: E731
        wanted = round(float(number)) if abs(float(number) % 1) < 0.1 else float(number)
        found = accumulator(schedule)._is_enough(counts, step)
        np.testing.assert_array_equal(found, counts >= wanted)
    by_step = accumulator(lambda count: count)
    np.testing.assert_array_equal(by_step._is_enough(counts, step), counts >= 4)


def test_the_divisor_of_a_mean_is_1_where_all_weights_are_0():
    n = np.float32([0, 0.5, 1, 4])
    total = jnp.ones(2, jnp.bfloat16)
    np.testing.assert_array_equal(sums._inverse(n, total), [1, 2, 1, 0.25])
    assert sums._inverse(n, total).dtype == jnp.float32


def test_a_first_sum_replaces_what_was_there():
    total = jnp.float32([np.nan, 2.0])

    def moved(begun):
        return sums._moved(lambda g, x: g + x, begun, jnp.float32([1, 1]), total)

    np.testing.assert_array_equal(moved(jnp.bool(True)), [np.nan, 3])
    np.testing.assert_array_equal(moved(jnp.bool(False)), [1, 1])


def test_a_sum_is_divided_with_the_last_push_alone():
    """Without a gradient it is the sum of pushes before, if there were any."""
    total, flags = jnp.float32([2.0, 4.0]), [True, False]
    for full, begun, g in itertools.product(flags, flags, (None, total)):
        found = sums._divided_if(
            *(jnp.bool(full), g, total, jnp.float32(4), jnp.float32), jnp.bool(begun)
        )
        wanted = np.array([2.0, 4.0])
        if full or g is not None:
            wanted = wanted / (4 if full else 1) * begun
        np.testing.assert_array_equal(found, wanted)
    whole = sums._divided_if(jnp.bool(True), total, total, jnp.float32(4), "bfloat16")
    np.testing.assert_array_equal(whole, jnp.bfloat16([0.5, 1.0]))


def test_the_widest_of_sums():
    with jax.enable_x64(True):
        of = [jnp.ones(1, d) for d in ("bfloat16", "float32", "float64", "complex128")]
        widest = [
            sums._widest(part) for part in (of[:0], of[:1], of[:2], of[:3], of[3:])
        ]
    assert widest == [np.float32] * 3 + [np.float64] * 2


def test_on_gpu_only_matrices_wait_each_for_the_one_behind_it(monkeypatch):
    """Not tables, of 2^14 rows or more, nor vectors, nor leaves without an array."""
    seen = []

    def barrier(g, *last):
        seen.append((g.shape, [x.shape for x in last]))
        return g

    monkeypatch.setattr(sums, "barrier_on_gpu", barrier)
    rows = sums._TABLE
    shapes = [(2, 2), (3,), (rows, 1), (rows - 1, 1), (rows, 1, 1), (), (4, 4), (5, 1)]
    order = []

    def run(*leaves):
        tree = [*leaves[:6], None, *leaves[6:]]

        def f(g, number):
            order.append(number)
            return None if number == 7 else g  # The sum of this one is no array.

        new = sums._map_backwards(f, tree, [*range(9)])
        assert [x if x is None else x.shape for x in new] == [
            *(shapes[:6]),
            None,
            None,
            (5, 1),
        ]
        return 0

    jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    assert order == [*range(8, -1, -1)]
    assert seen == [
        ((5, 1), []),
        ((4, 4), [(5, 1)]),
        ((rows, 1, 1), [(5, 1)]),
        ((rows - 1, 1), [(rows, 1, 1)]),
        ((2, 2), [(rows - 1, 1)]),
    ]


def test_the_first_state_of_a_sum():
    acc = accumulator(reduction="row_mean")
    state = acc.init({"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, "f4")})
    assert jax.tree.map(jnp.shape, state.row_counts) == {"a": (2,), "b": (3,)}
    assert state.leaf_weights.tolist() == state.carried.tolist() == [0, 0]
    assert (state.nonfinite_count, state.stale_count.dtype) == ((), jnp.int32)
    assert accumulator().init(PARAMS).row_counts == ()
    low = accumulator(dtype="bfloat16").init(PARAMS)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(low.accumulated))
    assert low.total_weight.dtype == jnp.float32


# Whether a push to a gate without momentum computes the step in each case on TPU. It
# does not where the step comes before something else is written.
GATES = {
    "drop_stale": (lambda: gx.drop_stale(INNER, 1), {"local_step": 0}, True),
    "accumulate": (lambda: gx.accumulate(INNER, 2), {}, True),
    "a momentum": (
        lambda: gx.drop_stale(optax.trace(0.9), 1),
        {"local_step": 0},
        False,
    ),
    "delayed": (lambda: gx.delayed(INNER, 2), {}, False),
    "worker_mean": (
        lambda: gx.worker_mean(INNER, 2, method="latest"),
        {"worker": 0},
        False,
    ),
    "on a mesh": (lambda: gx.accumulate(INNER, 2, axis_name="x"), {}, False),
}


@pytest.mark.every
@pytest.mark.parametrize("name", GATES)
def test_a_step_that_is_selected_on_tpu(name):
    make, extra, is_selected = GATES[name]
    tx, g = make(), jnp.ones(2)

    def update(g):
        return tx.update(g, tx.init(g), g, **extra)[0]

    if name == "on a mesh":
        mesh = jax.make_mesh((2,), ("x",))
        update = jax.shard_map(update, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    found = jaxprs.anywhere(jax.make_jaxpr(update)(g).jaxpr, "platform_index")
    of_tpu = [eqn for eqn in found if "tpu" in str(eqn.params["platforms"])]
    assert len(of_tpu) == is_selected
