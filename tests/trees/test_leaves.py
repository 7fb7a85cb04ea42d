"""Maps over trees, one kind of leaf at a time; what a state and a signature say."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import meta

import gradxform as gx
from gradxform._checks import nested
from gradxform._trees import boxes, extra_args, maps, placeholders, states
from gradxform._trees.extra_args import Words

MASKED = optax.MaskedNode()
FLOAT0 = np.zeros(2, jax.dtypes.float0)
SLICES = gx.IndexedSlices([1], jnp.full((1, 2), 3.0), (4, 2))
TREE = {"a": np.ones(2), "b": None, "c": MASKED, "d": SLICES, "e": FLOAT0, "f": 2.0}


class Point(NamedTuple):
    x: object
    y: object


def test_where_maps_stop():
    assert [maps.is_leaf(x) for x in (None, MASKED, SLICES)] == [True] * 3
    assert not any(map(maps.is_leaf, (1, np.ones(2), [], {}, FLOAT0)))
    assert len(maps.leaves(TREE)) == 6
    assert maps.structure({"a": None}) != maps.structure({"a": {}})


def test_which_leaves_have_a_gradient():
    found = {k: maps.has_gradient(x) for k, x in TREE.items()}
    assert found == {"a": 1, "b": 0, "c": 0, "d": 1, "e": 0, "f": 1}
    assert [maps.nothing(x) for x in (None, MASKED, FLOAT0)] == [None, MASKED, None]
    without = maps.without_float0(TREE)
    assert without["e"] is None
    assert all(without[k] is TREE[k] for k in TREE if k != "e")
    full = {"a": np.ones(2)}
    assert maps.without_float0(full) is full


def test_the_outermost_nodes_of_a_kind():
    tree = {"a": [Point(Point(1, 2), 3)], "b": Point(4, 5), "c": 6}
    found = maps.nodes(tree, lambda node: isinstance(node, Point))
    assert [jax.tree_util.keystr(path) for path, _ in found] == ["['a'][0]", "['b']"]
    assert [node for _, node in found] == [tree["a"][0], tree["b"]]
    assert maps.nodes(tree, lambda node: node == 7) == []


def test_the_fields_around_each_leaf():
    tree = {"a": [Point(1, Point(None, [2, MASKED]))], "b": 3}
    x, y = (Point, "x"), (Point, "y")
    assert [*maps.fields(tree)] == [(x,), (y, x), (y, y), (y, y), ()]
    assert [*maps.fields(SLICES)] == [()]


def test_a_mask_is_put_on_a_tree():
    masked = maps.masked_like(
        {"a": MASKED, "b": 1, "c": None}, {"a": 5, "b": 6, "c": 7}
    )
    assert masked == {"a": MASKED, "b": 6, "c": 7}
    other = {"b": 6}
    assert maps.masked_like({"a": MASKED}, other) is other


def test_an_argument_like_the_parameters():
    updates = {"a": np.ones(2), "d": SLICES}
    whole = {"a": np.ones(3), "d": np.ones((4, 2))}
    assert maps.is_like(whole, updates)
    assert not maps.is_like({**whole, "d": np.ones((1, 2))}, updates)
    assert not maps.is_like([*whole.values()], updates)
    assert not maps.is_like(np.ones(2), np.ones(2))  # It may be anything else.
    assert maps.is_like([np.ones(2)], [np.ones(2)])


def test_what_is_stored_and_what_is_described():
    stored = maps.stored(TREE)
    assert stored["d"] is SLICES.values
    assert all(stored[k] is TREE[k] for k in TREE if k != "d")
    whole = maps.described(TREE)["d"]
    assert (whole.shape, whole.dtype) == ((4, 2), jnp.float32)
    assert maps.gradient_dtype(SLICES) == jnp.float32
    assert maps.gradient_dtype(2.0) == jnp.float32
    new = maps.with_values(SLICES, jnp.full((1, 2), 7.0))
    assert (new.indices is SLICES.indices, new.shape) == (True, (4, 2))
    assert SLICES.values[0, 0] == 3


def test_a_function_of_each_gradient():
    rest = dict.fromkeys(TREE, 10.0)
    new = maps.map_updates(lambda g, r: g * r, TREE, rest)
    assert (new["b"], new["c"], new["e"]) == (None, MASKED, None)
    assert isinstance(new["d"], gx.IndexedSlices)
    np.testing.assert_array_equal(new["d"].values, [[30, 30]])
    np.testing.assert_array_equal(new["a"], [10, 10])
    assert isinstance(new["f"], jax.Array)
    cast = maps.cast_like({"a": jnp.ones(2), "b": None}, {"a": jnp.bfloat16(1), "b": 1})
    assert (cast["a"].dtype, cast["b"]) == (jnp.bfloat16, None)


def test_parameters_are_arrays_or_descriptions():
    like = jax.ShapeDtypeStruct((2,), "int8")
    assert maps.param(like) is like
    assert isinstance(maps.param(2.0), jax.Array)
    found = maps.map_params(lambda p, n: (p.shape, n), [like, 2.0, SLICES], [1, 2, 3])
    assert found == [((2,), 1), ((), 2), ((1, 2), 3)]


class Box(NamedTuple):
    value: object


def test_a_prefix_has_a_value_for_each_leaf():
    tree = {"a": [1.0, 2.0], "b": None, "c": MASKED, "d": {"e": 3.0}}
    assert maps.broadcast(7, tree) == {
        "a": [7, 7],
        "b": None,
        "c": MASKED,
        "d": {"e": 7},
    }
    prefix = {"a": [1, 2], "d": 3}
    wanted = {"a": [1, 2], "b": None, "c": MASKED, "d": {"e": 3}}
    for given in (prefix, lambda x: prefix, functools.partial(lambda x: prefix)):
        assert maps.broadcast(given, tree) == wanted
    assert maps.broadcast(None, {"a": 1.0}) == {"a": None}
    empty = {"a": None}
    assert maps.broadcast(prefix, empty) is empty
    with pytest.raises(LookupError) as error:
        maps.broadcast({"a": 1}, tree)
    assert jax.tree_util.keystr(*error.value.args) == "['d']['e']"
    # A box with one value stands for the value.
    assert maps.broadcast({"a": Box(5)}, {"a": 1.0}) == {"a": 5}
    assert maps.broadcast({"a": Box(Box(5))}, {"a": 1.0}) == {"a": 5}
    for several in ({"a": Point(5, 6)}, {"a": [5]}, {"a": {"x": 5}}, {"a": Box([5])}):
        with pytest.raises(LookupError):
            maps.broadcast(several, {"a": 1.0})


def test_the_value_of_the_parameter_with_this_path_and_shape():
    params = {"a": np.ones(2), "b": np.ones(3)}
    find = maps.matching(params, ["first", "second"], "none")
    state = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(3)}
    found = maps.map_with_path(find, state)
    assert found == {"a": "first", "b": "none", "c": "none"}
    path = (jax.tree_util.DictKey("a"),)
    for leaf in (None, MASKED, SLICES):
        assert find(path, leaf) == "none"
    # Nor if it has the shape of the parameter.
    for leaf, shape in ((None, ()), (MASKED, ()), (SLICES, (4, 2))):
        find = maps.matching({"a": np.ones(shape)}, [1], 0)
        assert (find(path, leaf), find(path, np.ones(shape))) == (0, 1)


def test_the_keywords_of_a_function():
    def update(updates, state, params=None, extra=1, /, named=2, *args, word, **others):
        pass

    assert Words.of(update, skipped=3) == Words(frozenset({"named", "word"}), True)
    assert Words.of(update, skipped=5) == Words(frozenset({"word"}), True)
    assert Words.of(lambda a, b, c: 0, skipped=2) == Words(frozenset({"c"}), False)
    assert Words.of(dict.__class__, skipped=0).others
    one, two = Words(frozenset({"a"}), True), Words(frozenset({"b"}), False)
    assert one.then(two) == Words(frozenset({"a", "b"}), False)
    assert two.then(one) == Words(frozenset({"a", "b"}), True)


def test_a_transformation_gets_the_keywords_that_it_takes():
    def update(updates, state, params=None, *, scale=1.0):
        return updates * scale, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    any_word = extra_args.with_any_extra_args(tx)
    assert extra_args.words_of(any_word) == Words(frozenset({"scale"}), False)
    assert any_word.update(2.0, (), None, scale=3.0, other=1)[0] == 6
    assert extra_args.with_any_extra_args(any_word) is any_word
    assert extra_args.accepted_kwargs(tx, {"scale": 1, "x": 2}) == {"scale": 1}
    takes_all = optax.GradientTransformation(tx.init, lambda *args, **words: words)
    made = extra_args.with_any_extra_args(takes_all)
    assert isinstance(made, optax.GradientTransformationExtraArgs)
    assert made.update is takes_all.update
    assert extra_args.accepted_kwargs(made, {"x": 2}) == {"x": 2}
    gate = gx.drop_stale(optax.sgd(1.0), 1)
    around = optax.GradientTransformation(gate.init, lambda g, s, p=None: (g, s))
    around = extra_args.with_any_extra_args(around)
    state = gate.init(jnp.ones(2))
    around.update(1.0, state, None, local_step=None, other=1)
    with pytest.raises(
        TypeError, match=r"^local_step is for a wrapper inside of test_"
    ):
        around.update(1.0, state, None, local_step=0)


def test_whose_state_a_leaf_is():
    paths = [(jax.tree_util.DictKey(k),) for k in "ab"]
    params = {k: placeholders.Placeholder(p) for k, p in zip("ab", paths, strict=True)}
    state = optax.trace(0.9).init({"a": jnp.ones(2), "b": [jnp.ones(2), jnp.ones(3)]})
    owned = placeholders.owned(optax.trace(0.9).init, params, state)
    named = {jax.tree_util.keystr(k): jax.tree_util.keystr(v) for k, v in owned.items()}
    assert named == {
        ".trace['a']": "['a']",
        ".trace['b'][0]": "['b']",
        ".trace['b'][1]": "['b']",
    }
    marks = placeholders.owners(optax.trace(0.9).init, params, state)
    assert placeholders.is_placeholder(marks.trace["a"])
    assert jax.tree.structure(marks) == jax.tree.structure(optax.TraceState(params))
    with pytest.raises(ValueError, match="show no state of these leaves"):
        placeholders.owners(optax.trace(0.9).init, params, optax.EmptyState())
    described = placeholders.state_for(optax.trace(0.9).init, jnp.ones(2))
    assert described.trace.shape == (2,)
    assert placeholders.state_for(len, 3) is None


class Marked(NamedTuple):
    count: object
    inner_state: object


class Reader(NamedTuple):
    count: object


def test_marks_of_states(monkeypatch):
    monkeypatch.setattr(states, "KNOWN_WORDS", set())
    mark = states.Mark(
        gate=True, needs={"step": "count"}, reads=["read"], takes_none=True
    )
    assert mark(Marked) is Marked
    inner, empty = Marked(jnp.ones(()), ()), Marked((), Marked(jnp.ones(()), ()))
    assert {"step", "read"} == states.KNOWN_WORDS
    assert states.mark_of(Marked).gate
    assert states.mark_of(Point) == states.Mark()
    assert not states.mark_of(optax.EmptyState).gate
    assert states.mark_of(optax.MultiStepsState).not_by_row == states.ADDS_STEPS
    for state, has_count in ((inner, True), (empty, False)):
        tree = [optax.EmptyState(), {"k": state}]
        assert [node for _, node in states.gates(tree)] == [state]
        # The gate inside counts for words alone, but for a field that the outer lacks.
        assert states.needs(tree, "step") == has_count
        assert not states.needs(tree, "read")
        assert states.words(tree) == {"step", "read"}
        assert states.takes_none(tree)
        assert states.has_gate(tree)
    assert states.has_field(inner, "count")
    assert not states.has_field(empty, "count")
    assert not states.has_field(inner, "other")
    assert [node for _, node in states.gates(empty, "count")] == [inner]
    assert states.words(Marked((), ())) == {"read"}
    assert states.words([states.Mark(reads=["other"])(Reader)(1)]) == {"other"}
    assert not states.has_gate([Point(1, 2), Reader(1)])
    assert not states.takes_none(Point(1, 2))


def test_boxes_that_name_the_axes_of_an_array():
    box = meta.Partitioned(jnp.ones((2, 3)), names=("x", "y"))
    params = {"a": box, "b": jnp.ones(4)}
    plain = boxes.unboxed(params)
    assert plain["a"] is box.value
    assert plain["b"] is params["b"]
    stacked = {"a": jnp.ones((5, 2, 3)), "b": jnp.ones((5, 4))}
    boxed = boxes.boxed(params, stacked)
    assert boxed["a"].names == (None, "x", "y")
    assert boxed["a"].value is stacked["a"]
    assert boxed["b"] is stacked["b"]
    # State with as many axes needs no other names, and has no box.
    same = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    assert boxes.boxed(params, same) == same
    found = boxes.as_in(params, same)
    assert isinstance(found["a"], meta.Partitioned)
    assert found["a"].value is same["a"]
    assert boxes.as_in(same, params)["a"] is box.value
    for tree in (params, {"a": same["a"]}):  # The same nodes, or others.
        assert boxes.as_in(params, tree) is tree


def nest(depth):
    value = 1
    for n in range(depth):
        value = [value] if n % 2 else {"a": value}
    return value


def entries(value):
    """How many a value has, if each alias is written out."""
    if isinstance(value, str):
        return 1 + len(value) // 100
    if isinstance(value, dict):
        value = [x for pair in value.items() for x in pair]
    return 1 + sum(map(entries, value)) if isinstance(value, list | tuple) else 1


class Config:
    """As that of ml_collections, which is no Mapping."""

    def __init__(self, **values):
        self.to_dict = lambda: values


def test_nested_values_have_an_end():
    nested.check_small("config", nest(100))
    with pytest.raises(ValueError, match=r"^config is nested more than 100 deep\.$"):
        nested.check_small("config", nest(101))


def test_a_value_of_many_entries_is_refused():
    refused = functools.partial(
        pytest.raises, ValueError, match=r"^config has more than 100,000 entries, if ea"
    )
    row = [2.0] * 300
    for few in (99, 100):
        rest = "x" * few
        for rows in ([row] * 330, [{"k": row, rest: 1}] * 310, (tuple(row),) * 330):
            value = [*rows, rest, "y" * 100]
            filled = [*value, *[1] * (100_000 - entries(value))]
            nested.check_small("config", filled)
            with refused():
                nested.check_small("config", [*filled, 1])
            with refused():
                nested.check_small("config", Config(a=filled))
    nested.check_small("config", Config(a=[row] * 300))


def test_a_repeated_value_is_looked_at_once():
    class Row(list):
        count = 0

        def __iter__(self):
            self.count += 1
            return super().__iter__()

    row = Row([1, 2])
    nested.check_small("config", [row] * 50)
    assert row.count == 1
