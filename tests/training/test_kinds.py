"""Which leaves of a state have slices: each of the outcomes, without a step."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradxform._slices.kinds import States, Whole, axes_that_differ, of_leaves
from gradxform._slices.rules import Along
from gradxform._slices.slices import Kind, MixedSlicesError, Policy, Source
from gradxform._trees.states import ADDS_STEPS
from tests.draw import programs

W = (jax.tree_util.DictKey("w"),)
SOURCE = Source(4, 1)
PARAMS = {"b": jnp.ones(3), "w": jnp.ones((4, 3))}
ROWS = Kind(SOURCE, Along(0))


def states(init, *, is_indexed=False, **how):
    policy = Policy("slice", "array", (), programs.own_sum, is_indexed=is_indexed)
    return States(policy, {W: Whole((4, 3), SOURCE)}, init, PARAMS, **how)


def found(init, **how):
    return states(init, **how).of(init(PARAMS))


def of_each(f):
    """A state of each parameter."""
    return lambda params: jax.tree.map(f, params)


def test_other_sizes_have_whole_slices():
    whole = Whole((5, 8), Source(4, 1), axis=1)
    assert whole.sizes() == [10, 6, 16, 24, 4]
    assert whole.kind == Kind(Source(4, 1), Along(1, 2))
    assert Whole((0, 5), Source(1, 0)).kind.along == Along(0, 1)


def test_what_grows_with_an_array_has_its_slices():
    turned = Kind(SOURCE, Along(1))
    assert found(of_each(jnp.zeros_like)) == [None, ROWS]
    assert found(of_each(lambda p: jnp.zeros(p.shape[::-1]))) == [None, turned]
    assert found(lambda p: (jnp.zeros(()), jnp.zeros((4, 3)))) == [None, None]


def test_a_leaf_of_an_array_without_slices_is_an_error_for_who_reads_some():
    none, error = found(of_each(lambda p: jnp.zeros(p.shape[1:])))
    assert none is None
    assert isinstance(error, MixedSlicesError)
    assert str(error) == (
        "the state ['w'], of shape [3], has no slice for each slice of the array"
    )


@pytest.mark.every
@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (lambda n: (n, n), "[4, 4]"),
        (lambda n: (4,), "[4]"),
        (lambda n: (n + 1,), "[5]"),
    ],
)
def test_what_may_have_slices_and_shows_none_is_refused(shape, why):
    with pytest.raises(MixedSlicesError) as error:
        found(of_each(lambda p: jnp.zeros(shape(len(p))) if p.ndim > 1 else p))
    assert str(error.value).startswith(f"the state ['w'], of shape {why}, has no slice")
    assert "jax.tree.map" not in str(error.value)


def test_a_leaf_of_no_array_may_be_read_at_an_index():
    def init(params):
        return jnp.zeros(sum(len(x) for x in jax.tree.leaves(params)))

    with pytest.raises(
        MixedSlicesError,
        match=r"of shape \[7\], has no slice for each "
        r"slice of the array: make it from the parameter in init, by",
    ):
        found(init)
    (error,) = found(init, is_indexed=True)
    assert isinstance(error, MixedSlicesError)


def test_a_class_that_refuses_rows_says_why():
    init = optax.apply_every(2).init
    assert found(init)[1:] == [None, ROWS]
    with pytest.raises(MixedSlicesError) as error:
        found(init, are_rows=True)
    where = "the state .grad_acc['w'] of ApplyEvery, of shape [4, 3]"
    assert str(error.value) == f"{where}, {ADDS_STEPS}"


def test_extra_arguments_have_slices_if_they_are_like_the_parameters():
    one, tree = states(of_each(jnp.zeros_like)), PARAMS
    extra = {"other": {"w": PARAMS["w"]}, "number": 1.0, "alike": PARAMS, "a": 1.0}
    kinds, lacking = one.of_step(tree, tree, tree, extra)
    assert kinds == [*([None, ROWS] * 3), None, None, ROWS, None, None]
    assert lacking == {}
    assert of_leaves(one.arrays, {"w": jnp.ones(4), "b": 1}) == [None, None]
    assert of_leaves(one.arrays, {"w": jnp.ones((5, 3))}) == [None]


def test_a_state_for_this_size_alone_is_like_its_array():
    """Nothing else shows its slices."""

    def of(f):
        def init(params):
            assert set(map(jnp.shape, jax.tree.leaves(params))) <= {(3,), (4, 3)}
            return jax.tree.map(f, params)

        return init

    assert found(of(jnp.zeros_like)) == [None, ROWS]
    with pytest.raises(MixedSlicesError, match="another one for a array of any other"):
        found(of(lambda p: jnp.zeros(p.shape[::-1])))


def test_a_state_of_another_kind_says_nothing():
    """There is a threshold between 4 and 5 slices, so fewer slices show the axis."""

    def one(p):
        return jnp.zeros(p.shape if len(p) < 5 else p.size)

    assert found(of_each(one)) == [None, ROWS]


def test_one_slice_may_have_any_shape():
    whole, params = (
        Whole((1, 3), Source(1, 1)),
        {"b": jnp.ones(3), "w": jnp.ones((1, 3))},
    )
    init = of_each(lambda p: jnp.zeros(1))
    one = States(states(init).policy, {W: whole}, init, params)
    none, error = one.of(init(params))
    assert (none, type(error)) == (None, MixedSlicesError)


def test_an_axis_may_be_fixed():
    init = of_each(lambda p: jnp.zeros(p.shape[::-1]))
    fixed = {W: Whole((4, 3), SOURCE, is_fixed=True)}
    one = States(states(init).policy, fixed, init, PARAMS)
    with pytest.raises(MixedSlicesError, match=r"of shape \[3, 4\], has no slice"):
        one.of(init(PARAMS))
    init = of_each(jnp.zeros_like)
    assert States(one.policy, fixed, init, PARAMS).of(PARAMS) == [None, ROWS]


def test_an_error_names_the_innermost_class():
    def init(params):
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape[1:]), params)
        return optax.MaskedState(optax.TraceState(sums))

    _, error = found(init)
    assert str(error).startswith("the state .inner_state.trace['w'] of TraceState, of ")


def test_the_state_of_another_transformation():
    with pytest.raises(TypeError, match="state is not that of tx"):
        states(optax.trace(0.9).init).of(optax.adam(0.1).init(PARAMS))


def test_which_axes_of_a_leaf_differ():
    """None do if it has another number of axes."""
    cases = [((4, 2), (4, 3), [1]), ((4, 2), (2, 4), [0, 1]), ((4, 2), (4, 2), [])]
    cases += [((4, 2), (2,), []), ((4,), (2, 4), [])]
    for shape, other, differ in cases:
        assert axes_that_differ(shape, other) == differ
