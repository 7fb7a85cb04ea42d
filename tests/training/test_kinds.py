"""Which leaves of a state have slices: each of the outcomes, without a step."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradxform._slices.kinds import States, Whole, of_leaves
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
    whole = Whole((5, 6), Source(3, 1), axis=1)
    assert whole.sizes() == [8, 4, 12, 18, 2]
    assert whole.kind == Kind(Source(3, 1), Along(1, 2))
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
    extra = {"alike": PARAMS, "other": {"w": PARAMS["w"]}, "number": 1.0}
    kinds, lacking = one.of_step(tree, tree, tree, extra)
    assert kinds == [None, ROWS] * 4 + [None, None]
    assert lacking == {}
    assert of_leaves(one.arrays, {"w": jnp.ones(4), "b": 1}) == [None, None]
    assert of_leaves(one.arrays, {"w": jnp.ones((5, 3))}) == [None]
