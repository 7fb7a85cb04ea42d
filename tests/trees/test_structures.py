"""Checks of trees: each error says at which path, what was given, and what is right."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._checks import structures

ONES = np.ones
TREE = {"a": [ONES(2), ONES((3, 1))], "b": ONES(())}
SLICES = gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))


class Point(NamedTuple):
    x: object
    y: object


def refused(words, error=TypeError):
    return pytest.raises(error, match=words)


def test_parameters_are_needed():
    assert structures.params_given("tx", 3) == 3
    words = r"^tx needs params: call update\(updates, state, params\)\. Then\.$"
    with refused(words, ValueError):
        structures.params_given("tx", None, " Then.")
    assert structures.params_like("tx", TREE, TREE) is TREE
    with refused("tx needs params", ValueError):
        structures.params_like("tx", TREE, None)
    with refused(r"updates and params differ at \['a'\]\[0\]"):
        structures.params_like("tx", TREE, {**TREE, "a": [ONES(3), ONES((3, 1))]})


def test_two_copies_of_lookahead():
    pair = optax.LookaheadParams(fast=TREE, slow=TREE)
    state = optax.lookahead(optax.sgd(1.0), 2, 0.5).init(pair)
    structures.check_no_lookahead(TREE, optax.sgd(1.0).init(TREE))
    for params, of in ((pair, ()), (TREE, state), (TREE, (state,))):
        with refused(r"LookaheadParams.*params\.fast: call tx\.update"):
            structures.check_no_lookahead(params, of)
        with refused(r"params\.fast: do this"):
            structures.check_no_lookahead(params, of, "do this")


def test_the_only_one():
    path = (jax.tree_util.DictKey("a"),)
    assert structures.only("gate", [(path, 7)], "none") == 7
    with refused("^the state holds no gate: make one.$", ValueError):
        structures.only("gate", [], "make one")
    with refused(r"holds several gate, at \['a'\], the root: pass one", ValueError):
        structures.only("gate", [(path, 7), ((), 8)], "none")


def test_dtypes_of_state():
    for dtype in (None, "float32", jnp.bfloat16, np.float64, "complex64"):
        structures.check_state_dtype("mu_dtype", dtype)
    structures.check_state_dtype("mu_dtype", None, real_only=True)
    structures.check_state_dtype("mu_dtype", "bfloat16", real_only=True)
    for wrong in ("int8", jnp.bool, "no dtype", 3, jnp.ones(2), [1]):
        with refused("^mu_dtype must be a floating or complex dtype, got"):
            structures.check_state_dtype("mu_dtype", wrong)
    for wrong in ("int8", "complex64"):
        with refused("^mu_dtype must be a real floating dtype, got"):
            structures.check_state_dtype("mu_dtype", wrong, real_only=True)


def test_complex_leaves_need_a_complex_dtype():
    both = {"r": ONES(2), "c": ONES(2, np.complex64)}
    structures.check_same_kind("mu_dtype", None, both)
    structures.check_same_kind("mu_dtype", "float32", {"r": both["r"], "n": 1.0})
    structures.check_same_kind("mu_dtype", "complex64", {"c": both["c"]})
    for dtype, where in (
        ("complex64", r"\['r'\], which is float64"),
        ("float32", r"\['c'\]"),
    ):
        with refused(f"^mu_dtype={dtype} does not fit {where}"):
            structures.check_same_kind("mu_dtype", dtype, both)


def test_prefixes():
    assert structures.prefix("mask", True, {"a": None}) == {"a": None}
    for given in (
        True,
        {"a": True, "b": True},
        lambda tree: {"a": [True, True], "b": True},
    ):
        assert structures.prefix("mask", given, TREE) == {"a": [True, True], "b": True}
    with refused(
        r"^mask has no value for params at \['b'\]\. Pass one value, or a tree"
    ):
        structures.prefix("mask", {"a": True}, TREE)
    with refused(
        r"^mask has 7 at \['c'\], where updates has nothing\. Pass.*of updates"
    ):
        structures.prefix("mask", {"a": 1, "b": 2, "c": 7}, TREE, "updates")
    with refused(r"^mask has 7 at \['c'\], where params has nothing"):
        structures.prefix("mask", lambda _: {"a": 1, "b": 2, "c": 7}, TREE)
    # A value at a node that is masked may be there, and below it, too.
    masked = {"a": optax.MaskedNode(), "b": ONES(2)}
    wanted = {"a": optax.MaskedNode(), "b": 2}
    for given in ({"a": 1, "b": 2}, {"a": {"c": 1}, "b": 2}, {"b": 2}):
        assert structures.prefix("mask", given, masked) == wanted
    # A node of the tree is no end: a value there is for all below it.
    assert structures.prefix("mask", {"x": {"y": 5}}, {"x": {"y": {"z": 1}}}) == {
        "x": {"y": {"z": 5}}
    }


def test_bools_for_leaves():
    found = structures.bools("mask", {"a": np.True_, "b": False}, TREE)
    assert found == {"a": [True, True], "b": False}
    structures.bools("mask", {"a": True, "b": 1}, {**TREE, "b": optax.MaskedNode()})
    for wrong in (1, "no", ONES(2, bool), 0.0):
        with refused(
            r"^mask must hold a bool for each leaf, not traced, got .*\['b'\]"
        ):
            structures.bools("mask", {"a": True, "b": wrong}, TREE)

    def traced(x):
        with refused(r"mask must hold a bool for each leaf.*for the root"):
            structures.bools("mask", x > 0, ONES(2))
        return x

    jax.make_jaxpr(traced)(1.0)


def paths(tree):
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def test_names_of_leaves():
    all_paths = paths({"a/b": 1, "a": {"b": 1, "c": 1}, "d": [1]})
    assert [structures.path_str(path) for path in all_paths] == [
        "a/b",
        "a/c",
        "a/b",
        "d/0",
    ]
    assert structures.path_str(all_paths[-1], ".") == "d.0"
    assert structures.path_name(()) == "the root"
    assert structures.path_name(all_paths[-1]) == "['d'][0]"
    choices = structures.by_name(all_paths)
    assert structures.by_name(all_paths, ".").keys() == {"a.b", "a.c", "a/b", "d.0"}
    assert structures.named("keep", "d/0", "a leaf", choices) == all_paths[-1]
    with refused(
        r"^keep must name a leaf, got 'e'; there are 'a/b', 'a/c', 'd/0'\.$", ValueError
    ):
        structures.named("keep", "e", "a leaf", choices)
    with refused(
        r"keep must name one of a leaf, got 'a/b', which is .*'b'\] and ", ValueError
    ):
        structures.named("keep", "a/b", "a leaf", choices)
    is_kept = structures.names("keep", ["a/c"], "leaves", all_paths)
    assert (is_kept("a/c"), is_kept("d/0")) == (True, False)
    assert structures.names("keep", str.isalpha, "leaves", []) == str.isalpha
    with refused("keep must name leaves, got 'e'", ValueError):
        structures.names("keep", ["a/c", "e"], "leaves", all_paths)


def test_which_gradients_fit():
    real, imaginary = ONES(3, np.float32), ONES(3, np.complex64)
    for leaf, reference, fits in (
        (real, real, True),
        (real, imaginary, True),
        (imaginary, imaginary, True),
        (imaginary, real, False),
        (real, ONES(3, np.float64), True),
        (ONES((3, 1)), real, False),
        (imaginary, ONES(2, np.complex64), False),
        (ONES(()), 1.0, True),
        (1j, 1.0, False),
        (real, None, False),
        (SLICES, ONES((4, 2)), True),
        (SLICES, ONES((1, 2)), False),
    ):
        assert structures.fits(leaf, reference) == fits
        alike = reference is not None and np.shape(leaf) == np.shape(reference)
        assert structures.has_shape(leaf, reference) == alike


WRONG = [
    ({"a": TREE["a"]}, r"at \['b'\]: updates has no leaf, params has float64\[\]"),
    ({**TREE, "c": 1.0}, r"at \['c'\]: updates has float64\[\], params has no leaf"),
    (
        {**TREE, "b": 1j},
        r"at \['b'\]: updates has complex128\[\], params has float64\[\]",
    ),
    ({**TREE, "b": {}}, r"at \['b'\]: updates has a node dict, no array, params has"),
    (
        {**TREE, "a": TREE["a"][:1]},
        r"at \['a'\]\[1\]: updates has no leaf, params has float64\[3,1\]",
    ),
    (
        {**TREE, "a": tuple(TREE["a"])},
        r"at \['a'\]: updates has a node tuple, .* list\.",
    ),
    (
        {**TREE, "e": {}},
        r"at the root: updates has a node PyTreeDef.*params has a node Py",
    ),
    ([*TREE["a"]], r"at \['a'\]\[0\]: updates has no leaf"),
]


@pytest.mark.every
@pytest.mark.parametrize(("updates", "words"), WRONG, ids=range(len(WRONG)))
def test_trees_that_differ(updates, words):
    with refused(f"^updates and params differ {words}.*Pass updates with the struc"):
        structures.check_shapes("updates", updates, "params", TREE)


def test_trees_that_are_alike():
    check = functools.partial(structures.check_shapes, "updates")
    check(TREE, "params", TREE)
    check({**TREE, "b": None}, "params", TREE)
    check({"a": [None, optax.MaskedNode()], "b": 1.0}, "params", TREE)
    check({**TREE, "a": (*TREE["a"],)}, "params", TREE, same_nodes=False)
    check(SLICES, "params", ONES((4, 2)))
    check(TREE, "params", TREE, lambda g, p: p is g)
    with refused(r"differ at \['b'\]"):
        check(TREE, "params", TREE, lambda g, p: np.ndim(g) > 0)
    with refused(r"differ at \['b'\]: .*Slices of float32\[1,2\] for \[4, 2\]"):
        check({**TREE, "b": SLICES}, "params", TREE)
    with refused(r"None where there is none\.$"):
        check(ONES(2), "params", ONES(3))


def test_the_first_other_node_is_named():
    old, new = Point([1.0], 2.0), Point((1.0,), 2.0)
    with refused(r"differ at \.x: u has a node tuple, p has a node list\. Pass"):
        structures.check_shapes("u", new, "p", old, same_nodes=True)
    deep = {"k": [Point({"m": [0.0]}, 1.0), (3.0,)]}
    other = {"k": [Point({"m": [0.0]}, 1.0), [3.0]]}
    with refused(r"differ at \['k'\]\[1\]: u has a node list, p has a node tuple"):
        structures.check_shapes("u", other, "p", deep)
    state, expected = (optax.EmptyState(), {"w": ()}), (optax.EmptyState(), {"w": 1.0})
    with refused(
        r"^state is not that of tx: at \[1\]\['w'\] it has a node tuple, and tx\.init"
        r"\(params\) has float64\[\]\. Pass"
    ):
        structures.check_own_state(state, expected)
    with refused(r"at \[1\]\['w'\] it has a node tuple, .* has None"):
        structures.check_own_state(state, (optax.EmptyState(), {"w": None}))
    structures.check_own_state(state, state)
    with refused(r"at the root it has .*test_structures\.Point, .*optax.*EmptyState"):
        structures.check_own_state(Point(1, 2), optax.EmptyState())


def init(params):
    return optax.TraceState(jax.tree.map(jnp.zeros_like, params))


def failing_init(params):
    raise KeyError("sizes")


def test_a_state_of_other_sizes():
    state = init({"w": ONES(3)})
    structures.check_own(state, init, {"w": ONES(3)})
    structures.check_own(state, init, None)
    structures.check_own(state, failing_init, {"w": ONES(4)})
    structures.check_own_shapes(state, init({"v": ONES(4)}))
    words = r"at \.trace\['w'\] it has float\d+\[3\], .* has float\d+\[4\]"
    with refused(words):
        structures.check_own(state, init, {"w": ONES(4)})
    with refused(r"at the root it has a node tuple, .*TraceState"):
        structures.check_own((), init, {"w": ONES(4)})
    structures.check_own_kind(state, optax.TraceState)
    with refused(
        r"^state is not that of tx: at the root it has a node tuple, .*TraceS"
    ):
        structures.check_own_kind((), optax.TraceState)


@pytest.mark.every
@pytest.mark.parametrize("params", [None, {"w": ONES(3)}, {"w": ONES(4)}])
@pytest.mark.parametrize("make", [init, failing_init])
def test_a_step_that_fails_says_whether_its_state_is_why(params, make):
    """Any other error stays."""
    state = init({"w": ONES(3)})
    is_why = make is init and params is not None and len(params["w"]) == 4
    wanted = refused("state is not that of tx") if is_why else refused("mine", OSError)
    with wanted, structures.own_state(state, make, params):
        raise OSError("mine")
    with structures.own_state(state, make, params):
        pass


def test_same_shapes():
    assert structures.same_shapes(TREE, [*jax.tree.leaves(TREE)])
    assert not structures.same_shapes(TREE, TREE["a"])
    assert not structures.same_shapes(ONES(2), ONES(3))


def test_parameters_are_arrays_or_numbers():
    for right in (TREE, 1, 1.0, 1j, [ONES(2), None], jax.ShapeDtypeStruct((), "int8")):
        structures.check_arrays(right)
    for wrong in ({}, None, [None, ()]):
        with refused("^params has no array, got .*: pass a tree with", ValueError):
            structures.check_arrays(wrong)
        structures.check_leaves(wrong)
    for wrong in ("1", len, b""):
        with refused(r"^params has .* at \[1\], which is no array\. .*eqx\.partition"):
            structures.check_arrays([ONES(2), wrong])
    structures.check_learnable([1.0, None, ONES(2, np.complex64)])
    for wrong in (1, True, ONES(2, np.int8)):
        with refused(r"^params has .* at \[1\], which has no gradient.*eqx\.partition"):
            structures.check_learnable([1.0, wrong])
    structures.check_some_gradient("grads", [None, ONES(2)])
    for none in (
        [None],
        {"a": None},
        [],
        np.zeros(2, jax.dtypes.float0),
        optax.MaskedNode(),
    ):
        with refused("^grads has no gradient for any leaf of params", ValueError):
            structures.check_some_gradient("grads", none)


def deleted():
    x = jnp.ones(2)
    x.delete()
    return x


UNUSABLE = [
    (
        ONES(2, ">f4"),
        TypeError,
        r"a ndarray of dtype >f4 at \['b'\], which JAX does not",
    ),
    (
        np.ma.masked_array([1.0]),
        TypeError,
        r"a MaskedArray of dtype float64 at \['b'\], ",
    ),
    (np.array(["a"]), TypeError, r"a ndarray of dtype <U1 at \['b'\], which JAX"),
    (2**70, TypeError, r"an integer of 71 bits at \['b'\], which JAX does not take: "),
    (
        jax.ShapeDtypeStruct((), "int8"),
        TypeError,
        r"ShapeDtypeStruct.*which is no array",
    ),
    (len, TypeError, r"<built-in function len> at \['b'\], which is no array\.$"),
    (
        "x" * 199,
        TypeError,
        rf"'{'x' * 199}\.\.\. at \['b'\], which is no array\.$",
    ),
    ("y" * 198, TypeError, rf"'{'y' * 198}' at \['b'\], which is no array\.$"),
]


@pytest.mark.every
@pytest.mark.parametrize(("leaf", "error", "words"), UNUSABLE, ids=range(len(UNUSABLE)))
def test_leaves_without_numbers(leaf, error, words):
    assert not structures.is_usable(leaf)
    with refused(f"^grads has {words}", error):
        structures.check_usable(params=TREE, grads={**TREE, "b": leaf})


def test_of_numpy_s_arrays_jax_is_asked_once_for_each_dtype(monkeypatch):
    assert structures.is_usable(ONES(2))
    monkeypatch.setattr(structures, "_refusal", lambda leaf: "it is slow")
    assert structures.is_usable(ONES(3))
    assert not structures.is_usable(1.0)


def test_leaves_that_hold_numbers():
    leaves = [1, 1.0, 1j, True, np.float32(1), ONES(2), jnp.ones(2), SLICES]
    assert all(map(structures.is_usable, leaves))
    structures.check_usable(params=leaves[:-1], grads=TREE)
    gone = deleted()
    assert not structures.is_usable(gone)
    words = r"^params has a deleted array at the root, float32\[2\]: it was donated"
    with refused(words, RuntimeError):
        structures.check_usable(params=gone)
    lost = gx.IndexedSlices([1], jnp.ones((1, 2)), (4, 2))
    lost.values.delete()
    assert not structures.is_usable(lost)

    def traced(x):
        assert not structures.is_usable(x)
        with refused(r"^params has a traced array at the root, .* Call this outside"):
            structures.check_usable(params=x)
        return x

    jax.make_jaxpr(traced)(1.0)


def test_dtypes_that_differ():
    reference = {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
    check = functools.partial(structures.check_dtypes, "grads")
    check(reference, "params", reference)
    check({"a": None, "b": optax.MaskedNode()}, "params", reference)
    words = r"differ in dtype at \['b'\]: grads has float32\[2\], params has bfloat16"
    with refused(f"^grads and params {words}.*Cast it"):
        check({"a": reference["a"], "b": jnp.ones(2)}, "params", reference)


def test_what_messages_say_about_leaves():
    for leaf, words in (
        (None, "None"),
        (optax.MaskedNode(), "MaskedNode()"),
        (SLICES, "IndexedSlices of float32[1,2] for [4, 2]"),
        (ONES((2, 3)), "float64[2,3]"),
        (np.float16(1), "float16[]"),
        (1, "int64[]"),
        (1.0, "float64[]"),
        (1j, "complex128[]"),
        (jnp.ones(2, jnp.bfloat16), "bfloat16[2]"),
        (jax.ShapeDtypeStruct((2,), "int8"), "int8[2]"),
        (jax.core.ShapedArray((2,), np.dtype("int8")), "int8[2]"),
    ):
        assert structures.describe(leaf) == words
