"""IndexedSlices: what it accepts, what it stands for, and whom it refuses."""

import functools
import pickle

import chex
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from gradxform._jax import jaxprs
from gradxform._trees import maps
from tests.conftest import half


def slices(indices, height=5, width=2, seed=0, dtype="float32"):
    values = np.random.default_rng(seed).standard_normal((len(indices), width))
    return gx.IndexedSlices(
        np.asarray(indices, np.int32), jnp.asarray(values, dtype), (height, width)
    )


def added_up(indices, values, height):
    """The dense gradient, by NumPy in float64."""
    dense = np.zeros((height + 1, *np.shape(values)[1:]))
    np.add.at(dense, np.asarray(indices), np.asarray(values, np.float64))
    return dense[:height]  # without the padding


@pytest.mark.slow
@pytest.mark.parametrize("indices", [[0], [4, 0, 5, 4], [5] * 4, [1] * 4])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_it_stands_for_the_sum_of_its_rows(indices, wrap):
    grads = slices(indices)
    expected = added_up(indices, grads.values, 5)
    np.testing.assert_allclose(wrap(lambda g: g.densify())(grads), expected, rtol=1e-6)
    summed = wrap(lambda g: g.sum_duplicates())(grads)
    np.testing.assert_allclose(summed.densify(), expected, rtol=1e-6)
    inside = np.unique([i for i in indices if i < 5])
    padding = [5] * (len(indices) - len(inside))
    assert summed.indices.tolist() == [*inside, *padding]
    assert not np.any(summed.values[len(inside) :])


@pytest.mark.slow
def test_it_has_shape_and_dtype_of_the_dense_gradient_and_sums_in_float32():
    grads = maps.with_values(slices([1] * 4096), jnp.ones((4096, 2), jnp.bfloat16))
    assert (grads.shape, grads.ndim, grads.dtype) == ((5, 2), 2, jnp.bfloat16)
    assert "dense_shape=(5, 2)" in repr(grads)
    for dense in (grads.densify(), grads.sum_duplicates().densify()):
        assert dense.dtype == jnp.bfloat16
        assert dense[1].tolist() == [4096.0, 4096.0]  # a bfloat16 sum stays at 256


@pytest.mark.every
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [("bfloat16", "float32"), ("complex64", "complex64"), ("int8", "int8")],
)
def test_repeated_rows_are_added_up_in_at_least_float32(dtype, wide):
    grads = maps.with_values(slices([1, 1]), jnp.ones((2, 2), dtype))
    for f in (grads.densify, lambda: grads.sum_duplicates().values):
        program = jax.make_jaxpr(f)()
        (added,) = jaxprs.anywhere(program.jaxpr, "scatter-add")
        assert added.outvars[0].aval.dtype == wide
        assert program.out_avals[0].dtype == dtype


def test_rows_of_explicit_axes_are_whole_on_each_device():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    kinds = [((8,), "i4"), ((8, 2), "f4")]
    on = NamedSharding(mesh, P("x"))
    given = [jax.ShapeDtypeStruct(*kind, sharding=on) for kind in kinds]

    def fields(indices, rows):
        grads = gx.IndexedSlices(indices, rows, (5, 2))
        return grads.indices, grads.values

    for found in jax.eval_shape(fields, *given):
        assert not any(found.sharding.spec)


# Each length takes a compilation.
@pytest.mark.slow
@hypothesis.given(
    st.sampled_from([0, 1, 3, 16]).flatmap(
        lambda n: st.lists(st.integers(0, 7), min_size=n, max_size=n)
    ),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_summed_and_dense_agree_to_the_bit(indices, seed):
    grads = slices(indices, height=7, seed=seed)
    np.testing.assert_array_equal(grads.sum_duplicates().densify(), grads.densify())


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_any_integer_makes_an_index(dtype):
    with jax.enable_x64(True):
        indices = jnp.asarray([4, 0, 5], dtype)
        assert indices.dtype == dtype
        for make in (gx.IndexedSlices, jax.jit(gx.IndexedSlices, static_argnums=2)):
            grads = make(indices, jnp.ones((3, 2), jnp.float32), (5, 2))
            assert grads.indices.dtype == jnp.int32
            assert grads.indices.tolist() == [4, 0, 5]
    # Leaf by leaf, and back, rows keep their numbers.
    for height in (0, 5, 2**31 - 1):
        rows = sorted({0, height // 2, height})
        g = gx.IndexedSlices(rows, np.zeros((len(rows), 2), np.float32), (height, 2))
        for again in (jax.tree.map(lambda x: x, g), pickle.loads(pickle.dumps(g))):
            assert again.indices.tolist() == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "outside"),
    [("int32", -1), ("int32", 6), ("uint32", 2**32 - 1), ("int64", 2**32 + 1)],
)
def test_a_traced_index_outside_is_dropped_and_never_wrapped(dtype, outside):
    with jax.enable_x64(True):
        grads = jax.jit(gx.IndexedSlices, static_argnums=2)(
            jnp.asarray([outside, 1], dtype), jnp.ones((2, 2), jnp.float32), (5, 2)
        )
        assert grads.densify().sum(axis=1).tolist() == [0, 2, 0, 0, 0]
        assert grads.indices.tolist() == [5, 1]


ONES = np.ones((2, 3), np.float32)


@pytest.mark.every
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 9], ONES, (4, 3)), ValueError,
         r"indices must be in \[0, 4\].* got 9 at position \[1\]"),
        (([-1, 0], ONES, (4, 3)), ValueError, "got -1 at position"),
        (([0.0, 1.0], ONES, (4, 3)), TypeError, "indices must be integers, got float"),
        (([True, False], ONES, (4, 3)), TypeError, "must be integers, got bool"),
        (([[0, 1]], ONES, (4, 3)), ValueError, r"shapes \[n\] and .* got \[1, 2\]"),
        (([0, 1, 2], ONES, (4, 3)), ValueError, r"got \[3\] and \[2, 3\]"),
        (([0, 1], ONES, (4, 2)), ValueError, r"\[2, 3\] for dense_shape \(4, 2\)"),
        (([0, 1], ONES, ()), ValueError, "dense_shape must be that of a table"),
        (([0, 1], ONES, (2**31, 3)), ValueError, r"2\*\*31 - 1 rows"),
    ],
)  # fmt: skip
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        gx.IndexedSlices(*arguments)


# What JAX does with a pytree.


@pytest.mark.slow
def test_other_rows_do_not_count_as_summed():
    summed = slices([1, 3]).sum_duplicates()
    _, ones = jax.tree.leaves(slices([1, 1]))
    repeated = jax.tree.unflatten(jax.tree.structure(summed), [jnp.ones((2, 2)), ones])
    assert repeated.sum_duplicates().indices.tolist() == [1, 5]
    rows = summed.values
    again = maps.with_values(slices([1, 1]), rows).sum_duplicates()
    assert again.indices.tolist() == [1, 5]
    jitted = jax.jit(lambda g: g.sum_duplicates().values[0, 0])
    assert summed.sum_duplicates() is summed
    again = maps.with_values(summed, summed.values).sum_duplicates()
    assert again.indices is summed.indices
    assert jitted(summed) == summed.values[0, 0]
    assert jitted(repeated) == 2.0  # the same treedef, so the same compiled function


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "spec", "wrap"),
    half([AxisType.Explicit, AxisType.Auto], [P(), P("x")], [lambda f: f, jax.jit]),
)
def test_rows_that_lie_on_a_mesh(axis_type, spec, wrap, in_context):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    indices, rows = np.array([0, 3, 5, 3]), np.arange(8, dtype=np.float32)
    rows = rows.reshape(4, 2) * (indices < 5)[:, None]
    expected = added_up(indices, rows, 5)

    def use(table, indices, rows):
        grads = gx.IndexedSlices(indices, rows, (5, 2))
        once = grads.sum_duplicates()
        applied = gx.apply_updates(table, grads)
        norm = gx.global_norm(grads)
        return grads.densify(), once.densify(), applied - 1, norm, once.indices

    with in_context(mesh):
        on = NamedSharding(mesh, spec)
        given = jax.device_put((indices, rows), on)
        table = jax.device_put(np.ones((5, 2), np.float32), NamedSharding(mesh, P()))
        *tables, norm, once = wrap(use)(table, *given)
    for got in tables:
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(norm, np.sqrt(np.sum(expected**2)), rtol=1e-6)
    assert once.tolist() == [0, 3, 5, 5]


@pytest.mark.slow
def test_rows_of_each_device_inside_shard_map_over_some_of_the_axes():
    types = (AxisType.Auto, AxisType.Auto)
    step = jax.shard_map(
        lambda t, i, v: gx.apply_updates(t, gx.IndexedSlices(i, v, t.shape)),
        mesh=jax.make_mesh((4, 2), ("x", "y"), axis_types=types),
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
    )
    params = jax.jit(step)(jnp.ones((8, 1)), jnp.array([1, 1] * 4), jnp.ones((8, 1)))
    assert params.ravel().tolist() == [1, 3] * 4


@pytest.mark.slow
def test_all_gather_puts_the_rows_of_all_devices_together():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows = jnp.arange(16.0).reshape(8, 2)
    indices = jnp.array([0, 1, 2, 3, 4, 0, 1, 2])

    def gather(indices, rows):
        grads = gx.IndexedSlices(indices, rows, (5, 2))
        return jax.lax.all_gather(grads, "x", tiled=True).densify()[None]

    dense = jax.jit(
        jax.shard_map(gather, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    )(indices, rows)
    for device in dense:
        np.testing.assert_array_equal(device, added_up(indices, rows, 5))


# Whom it refuses.

GRADS = {"table": slices([4, 0, 4]), "w": jnp.ones(3)}
PARAMS = {"table": jnp.ones((5, 2)), "w": jnp.ones(3)}


@pytest.mark.every
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "tx",
    [
        optax.scale(0.5),
        optax.scale(-1),  # An index times -1 is an integer as well,
        optax.scale_by_learning_rate(0.1),
        optax.scale_by_learning_rate(lambda count: 0.1),  # and times int32(0.1).
        optax.add_decayed_weights(0.1),
        optax.clip_by_global_norm(1.0),
        optax.clip(1.0),
        optax.trace(0.9),
        optax.adam(0.1),
        optax.sgd(0.1),
        optax.MultiSteps(
            optax.chain(gx.densify(), optax.sgd(0.1)), 2
        ).gradient_transformation(),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_transformation_that_would_change_the_indices_is_refused(tx, wrap):
    state = tx.init(PARAMS)
    # optax's own errors name the hint too, except for norms of eager arrays.
    hints = r"gradxform.lazy, .*densify\(\)"
    if wrap is not jax.jit:
        hints += "|Cannot call abstract method (real|conj)"
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=hints):
        wrap(tx.update)(GRADS, state, PARAMS)
    hints = r"row-sparse.*indices.*gradxform.lazy.*densify\(\) in front"
    with pytest.raises((TypeError, NotImplementedError), match=hints):
        wrap(functools.partial(gx.apply_gradients, tx))(GRADS, state, PARAMS)


def raising(error):
    """A transformation that raises an error."""

    def update(updates, state, params=None):
        raise error

    return optax.GradientTransformation(optax.identity().init, update)


@pytest.mark.every
@pytest.mark.parametrize("grads", [GRADS, PARAMS], ids=["rows", "dense"])
def test_an_error_of_anything_else_stays_and_says_that_rows_may_cause_it(grads):
    error = KeyError("mu")
    tx = raising(error)
    with pytest.raises(KeyError) as caught:
        gx.apply_gradients(tx, grads, tx.init(PARAMS), PARAMS)
    assert caught.value is error
    notes = getattr(error, "__notes__", [])
    assert ["densify() in front" in note for note in notes] == [True] * (grads is GRADS)


@pytest.mark.parametrize(
    ("tx", "words"),
    [
        (gx.novograd(0.1), "novograd changes every row"),
        (optax.chain(gx.delayed(optax.sgd(0.1), 1)), "delayed makes room"),
        (gx.lazy(optax.adafactor(0.1)), "lazy runs its inner transformation on rows"),
    ],
)
def test_a_refusal_that_names_the_leaf_stays(tx, words):
    with pytest.raises(TypeError, match=rf"{words}.*\['table'\].*densify\(\)"):
        gx.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS)


@pytest.mark.every
@pytest.mark.parametrize(
    "use",
    [
        lambda: jax.tree.map(lambda g: 2 * g, GRADS),
        lambda: jax.tree.map_with_path(lambda _, g: g / 2, GRADS),
        lambda: jax.tree.map(lambda g: jnp.full(g.shape, 3), GRADS),
        lambda: [-g for g in jax.tree.leaves(GRADS)],
        lambda: jax.tree.reduce(lambda a, b: a + b, GRADS, jnp.ones(())),
        lambda: jax.jit(functools.partial(jax.tree.map, jnp.negative))(GRADS),
        lambda: optax.tree.scale(2, GRADS),
        lambda: 2 * GRADS["table"],
        lambda: GRADS["table"] / 2,
        lambda: GRADS["table"] + PARAMS["table"],
        lambda: PARAMS["table"] - GRADS["table"],
        lambda: PARAMS["table"][:1] + GRADS["table"],
        lambda: 1 + GRADS["table"],
        lambda: -GRADS["table"],
        lambda: GRADS["table"][0],
        lambda: np.asarray(GRADS["table"]),
    ],
)
def test_arithmetic_is_refused(use):
    with pytest.raises(TypeError, match="row-sparse gradient"):
        use()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optax_applies_updates_that_are_rows(wrap, dtype):
    table = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2)), dtype)
    rows = gx.IndexedSlices([3, 1, 3, 5], jnp.arange(8.0).reshape(4, 2), (5, 2))
    applied = wrap(optax.apply_updates)({"table": table}, {"table": rows})["table"]
    expected = np.array(table, np.float64)
    np.add.at(expected, [3, 1, 3], [[0, 1], [2, 3], [4, 5]])
    assert applied.dtype == table.dtype
    np.testing.assert_array_equal(applied, jnp.asarray(expected, dtype))


def over_two_devices(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def over_two_numbers(f):
    return lambda g: jax.vmap(lambda _: f(g), axis_name="i")(ONES)


@pytest.mark.slow
def test_rows_of_half_precision_are_rounded_once():
    table = jnp.ones((3, 1), jnp.bfloat16)
    step = gx.IndexedSlices([1], jnp.full((1, 1), 2**-8 + 2**-20), (3, 1))
    assert gx.apply_updates(table, step).tolist() == [[1.0], [1 + 2**-7], [1.0]]


@pytest.mark.every
@pytest.mark.parametrize(
    ("f", "over", "wrap"),
    half(
        [
            functools.partial(jax.lax.psum, axis_name="i"),
            functools.partial(jax.lax.pmean, axis_name="i"),
            functools.partial(jax.lax.psum_scatter, axis_name="i", tiled=True),
            functools.partial(jax.tree.map, functools.partial(jnp.multiply, 2)),
        ],
        [over_two_devices, over_two_numbers],
        [lambda f: f, jax.jit],
    ),
)
def test_sums_over_devices_are_refused(over, wrap, f):
    # Two devices have the rows 1 and 2 of a table. The sums of their indices would be
    # the rows 2 and 4.
    with pytest.raises(TypeError, match="row-sparse gradient"):
        wrap(over(f))(slices([1, 2, 1, 2]))


def test_functions_that_move_or_inspect_rows_are_allowed():
    for moved in (
        jax.device_get(GRADS),
        jax.device_put(GRADS),
        jax.block_until_ready(GRADS),
        jax.tree.unflatten(jax.tree.structure(GRADS), jax.tree.leaves(GRADS)),
        jax.tree.map(lambda g: g, GRADS, is_leaf=lambda g: g is GRADS["table"]),
        optax.identity().update(GRADS, optax.EmptyState())[0],
    ):
        chex.assert_trees_all_equal(moved, GRADS)
    for zeros in (
        optax.tree.zeros_like(GRADS),
        optax.set_to_zero().update(GRADS, optax.EmptyState())[0],
        optax.freeze(True).update(GRADS, optax.freeze(True).init(PARAMS))[0],
    ):
        assert not zeros["table"].densify().any()
        assert zeros["table"].shape == (5, 2)


def test_host_callbacks_equinox_and_pickle_get_it_whole():
    seen = []
    jax.jit(lambda g: jax.debug.callback(seen.append, g))(GRADS["table"])
    jax.effects_barrier()
    restored = pickle.loads(pickle.dumps(jax.tree.leaves(GRADS["table"])))
    for got in (
        *seen,
        eqx.filter_jit(lambda g: g)(GRADS["table"]),
        eqx.combine(*eqx.partition(GRADS["table"], eqx.is_inexact_array)),
        jax.tree.unflatten(jax.tree.structure(GRADS["table"]), restored),
        pickle.loads(pickle.dumps(jax.device_get(GRADS["table"]))),
    ):
        assert got.indices.tolist() == [4, 0, 4]
        np.testing.assert_array_equal(got.values, GRADS["table"].values)
    indices = jax.eval_shape(lambda: GRADS["table"]).indices
    assert (indices.shape, indices.dtype) == ((3,), np.dtype("int32"))
    assert isinstance(indices.dtype, np.dtype)
    # A callback under `vmap` gets the bits of a stack.
    bits = np.uint32([[[1], [5], [0]], [[1], [1], [1]]])
    stack = jax.tree.unflatten(jax.tree.structure(GRADS["table"]), [ONES, bits])
    assert stack.indices.tolist() == [[4, 0, 5], [4, 4, 4]]


def chosen(grads, keep):
    """Two lines as users write them, with either tree first."""
    mask = jax.tree.map(lambda x: x.ndim in keep, grads)
    first = jax.tree.map(lambda g, keep: g if keep else None, grads, mask)
    second = jax.tree.map(lambda keep, g: g if keep else None, mask, grads)
    return mask, first, second


@pytest.mark.every
@pytest.mark.parametrize(("keep", "number"), [((1, 2), 3), ((2,), 1), ((), 0)])
def test_a_mask_keeps_the_structure_wherever_it_is_made(keep, number):
    found = [chosen(GRADS, keep)]

    def update(updates, _):
        found.append(chosen(updates, keep))
        return updates

    tx = optax.chain(optax.stateless(update), optax.identity())
    tx.update(GRADS, tx.init(PARAMS))
    for mask, *kept in found:
        assert jax.tree.structure(mask) == jax.tree.structure(GRADS)
        for tree in kept:
            assert len(jax.tree.leaves(tree)) == number
            assert isinstance(tree["table"], gx.IndexedSlices)


STEPS = {
    "lazy": gx.lazy(optax.sgd(0.1, momentum=0.9)),
    "adagrad": gx.adagrad(0.1, initial_accumulator_value=0.0, eps=0.0),
    "row_wise": gx.adagrad(0.1, row_wise=True, global_clipnorm=1.0),
    "ftrl": gx.ftrl(0.1, l1_regularization_strength=0.1),
    "clip": optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
    "row_mean": gx.accumulate(gx.adagrad(0.1), 3, reduction="row_mean"),
    "late": gx.conditional_accumulator(gx.adagrad(0.1), 3, reduction="row_mean"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "wrap"),
    [(name, [lambda f: f, jax.jit][n % 2]) for n, name in enumerate(STEPS)],
)
def test_a_gradient_that_is_left_out_has_no_rows(name, wrap):
    """``where`` with zeros, leaf by leaf. The zero of an index is not row 0."""
    tx, extra = STEPS[name], {"local_step": 0} if name == "late" else {}

    def step(params, state, ok, g):
        g = jax.tree.map(lambda x: jnp.where(ok, x, jnp.zeros_like(x)), g)
        updates, state = tx.update({"t": g}, state, params, **extra)
        return gx.apply_updates(params, updates), state, g

    params = {"t": jnp.ones((5, 2))}
    both = params, tx.init(params)
    for t, ok in enumerate((True, False, True)):
        before = both[0]
        *both, g = wrap(step)(*both, ok, slices([0, 2, 0], seed=t))
        assert g.indices.tolist() == ([0, 2, 0] if ok else [5, 5, 5])
        if not ok:
            chex.assert_trees_all_equal(both[0], before)
    # The same steps, of pushes without rows in the second's place.
    expected = params, tx.init(params)
    for t, rows in enumerate(([0, 2, 0], [5, 5, 5], [0, 2, 0])):
        *expected, _ = step(*expected, True, slices(rows, seed=t))
    chex.assert_trees_all_close(both, expected, rtol=1e-6)
    assert jnp.any(both[0]["t"] != 1, axis=1).tolist() == [1, 0, 1, 0, 0]


def by_key(params):
    return jax.tree.map_with_path(
        lambda path, _: "table" if path[0].key == "table" else "rest", params
    )


def of_each_kind(label):
    """An optimizer for the table and one for the rest, and both of them together."""
    tables, rest = gx.adagrad(0.1, row_wise=True), optax.adamw(0.1)

    def mask(name):
        if callable(label):
            return lambda p: jax.tree.map(lambda x: x == name, label(p))
        return jax.tree.map(lambda x: x == name, label)

    together = (
        optax.partition({"table": tables, "rest": rest}, label),
        optax.chain(
            optax.masked(tables, mask("table")), optax.masked(rest, mask("rest"))
        ),
    )
    return tables, rest, together


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_labels_and_masks_of_the_parameters():
    tables, rest, together = of_each_kind(by_key(PARAMS))
    for tx in together:
        params, state = PARAMS, tx.init(PARAMS)
        for _ in range(2):
            params, state = gx.apply_gradients(tx, GRADS, state, params)
        for name, alone in (("table", tables), ("w", rest)):
            expected, state = PARAMS[name], alone.init(PARAMS[name])
            grads = GRADS["table"].densify() if name == "table" else GRADS[name]
            for _ in range(2):
                updates, state = alone.update(grads, state, expected)
                expected += updates
            np.testing.assert_allclose(params[name], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_function_that_labels_or_masks_belongs_inside_of_lazy():
    """Optax maps its result, which has the structure of gradients, over parameters."""
    for tx in of_each_kind(by_key)[2]:
        state = tx.init(PARAMS)
        with pytest.raises(ValueError, match=r"IndexedSlices': a row-sparse gradient"):
            tx.update(GRADS, state, PARAMS)
        with pytest.raises(TypeError, match=r"call it once, on the parameters"):
            gx.apply_gradients(tx, GRADS, state, PARAMS)
        params, _ = gx.apply_gradients(gx.lazy(tx), GRADS, state, PARAMS)
        assert jnp.any(params["table"] != 1, axis=1).tolist() == [1, 0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_padding_that_is_not_finite_fails_no_test_for_finite_numbers(wrap):
    tx = optax.apply_if_finite(gx.adagrad(0.1), max_consecutive_errors=3)
    make = wrap(lambda rows: gx.IndexedSlices([5, 1], rows, (5, 2)))
    grads = PARAMS | {"table": make(jnp.array([[jnp.nan, jnp.inf], [1.0, 2.0]]))}
    assert grads["table"].values.tolist() == [[0, 0], [1, 2]]
    params, state = gx.apply_gradients(tx, grads, tx.init(PARAMS), PARAMS)
    assert state.total_notfinite == 0
    assert jnp.any(params["table"] != 1, axis=1).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.slow
def test_a_stack_is_taken_one_by_one():
    stack = jax.vmap(lambda i: gx.IndexedSlices(i, ONES, (4, 3)))(jnp.array([[1, 2]]))
    for use in (
        stack.densify,
        stack.sum_duplicates,
        lambda: gx.global_norm(stack),
        lambda: gx.apply_updates(jnp.ones((4, 3)), stack),
    ):
        with pytest.raises(
            ValueError, match=r"a stack .* shape \[1, 2, 3\] .*jax.vmap"
        ):
            use()
    dense = jax.vmap(lambda g: g.densify())(stack)
    np.testing.assert_array_equal(dense[0].sum(axis=1), [0, 3, 3, 0])
