"""Keywords one by one: which of their leaves are static, and who reads them."""

import enum
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradxform._checks import keywords
from gradxform._trees.extra_args import Words


class Mode(enum.IntEnum):
    TRAIN = 1


class Wrapped:
    def __jax_array__(self):
        return jnp.ones(2)


ARRAYS = [1, 1.0, 1j, np.float32(1), np.ones(2), jnp.ones(2), Wrapped()]
ARRAYS += [jax.ShapeDtypeStruct((), "int8"), jax.core.ShapedArray((), np.dtype("int8"))]
STATIC = [True, "train", Mode.TRAIN, len, None.__class__, frozenset({1})]


def test_what_is_an_array_or_a_number_is_not_static():
    assert not any(map(keywords.is_static, ARRAYS))
    assert all(map(keywords.is_static, STATIC))


def kind(x):
    """The static leaves of a value by their index, told apart also by their types."""
    leaves = enumerate(jax.tree.leaves(x))
    return [(i, type(leaf), leaf) for i, leaf in leaves if isinstance(leaf, bool | str)]


VALUES = [3, True, "a", {"k": (1, True, "b"), "z": [2.5]}, [False, 1, True], (), [None]]


@pytest.mark.every
@pytest.mark.parametrize("keeps", [False, True])
def test_keywords_are_divided_and_joined_again(keeps):
    """Every pair of values; bools are arrays in the keyword that keeps them."""
    for b, a in itertools.product(VALUES, VALUES):
        statics, arrays = keywords.divided(
            {"b": b, "a": a}, lambda name: keeps and name == "a"
        )
        found = {name: list(leaves) for name, _, leaves in statics}
        wanted = {"a": kind(a), "b": kind(b)}
        if keeps:
            wanted["a"] = [entry for entry in wanted["a"] if entry[1] is not bool]
        assert [*found] == [name for name, entries in wanted.items() if entries]
        assert found == {name: x for name, x in wanted.items() if x}
        hash(statics)
        joined = keywords.joined(statics, arrays)
        assert repr(joined["a"]) == repr(a)
        assert repr(joined["b"]) == repr(b)
        for name, value in (("a", a), ("b", b)):
            count = len(jax.tree.leaves(value)) - len(wanted[name])
            given = arrays.get(name)
            assert len(jax.tree.leaves(given)) == count
            assert (given is value) == (not wanted[name])
            assert (name in arrays) == bool(count or not wanted[name])


def test_numbers_and_flags_that_are_equal_are_other_static_leaves():
    of = [keywords.divided({"a": [x, "s"]})[0] for x in (True, 1, False)]
    assert len({*of}) == 3


def test_a_static_leaf_without_a_hash_is_named():
    class NoHash(types.SimpleNamespace):
        __hash__ = None

    words = r"^the keyword mode\['b'\]\[1\] is a NoHash, which is neither an array nor"
    with pytest.raises(TypeError, match=words):
        keywords.divided({"mode": {"a": "hash", "b": [1, NoHash()]}})


NAMES = "a", "b", "c"


def subsets(names):
    return [
        {*part}
        for n in range(len(names) + 1)
        for part in itertools.combinations(names, n)
    ]


def test_each_keyword_goes_to_those_who_name_it():
    given = dict.fromkeys(NAMES, 1)
    for loss, others, named in itertools.product(
        subsets(NAMES), (False, True), subsets(NAMES)
    ):
        of_loss, extra = keywords.routed(given, Words(frozenset(loss), others), named)
        wanted = loss | ({*NAMES} - named if others else set())
        assert {*of_loss} == wanted
        assert {*extra} == ({*NAMES} - wanted) | named


def test_a_slip_is_one_letter_away():
    known = {"local_step", "worker", "last"}
    for word, meant in (
        ("local_stp", "local_step"),
        ("local_steps", "local_step"),
        ("wroker", "worker"),
        ("lsat", "last"),
        ("vaule", "value"),
        ("gard", "grad"),
        ("local", None),
        ("work", None),
        ("worker_is", None),
        ("x", None),
    ):
        assert keywords.slip(word, known) == meant
    keywords.check_slips(["worker", "mask", "value", "weight"], known)
    keywords.check_slips([], known)
    words = r"^nobody reads the keyword 'wroker', .* Did you mean 'worker'\? The transf"
    with pytest.raises(TypeError, match=words):
        keywords.check_slips(["mask", "wroker"], known)


def transformation(update):
    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def reads_scale(updates, state, params=None, *, scale=1.0, **extra):
    return jax.tree.map(lambda g: g * scale, updates), state


def reads_hidden(updates, state, params=None, **extra):
    return jax.tree.map(lambda g: g * extra["hidden"], updates), state


def needs_a_number(updates, state, params=None, **extra):
    return (2 * updates if extra["hidden"] > 0 else updates), state


def check(update, extra, **options):
    """``check_read`` of a transformation with this update."""
    tx, g = transformation(update), jnp.ones(2)
    keywords.check_read(
        *(tx, tx.init(g), extra, lambda words: tx.update(g, (), None, **words)),
        **options,
    )


def lost(word):
    return pytest.raises(TypeError, match=f"^nobody reads the keyword '{word}', so it")


def test_a_keyword_that_no_equation_reads_is_an_error():
    check(reads_scale, {})
    check(reads_scale, {"scale": 2.0, "value": 1.0, "grad": 1.0})
    check(reads_scale, {"more": 2.0}, given=["more"])
    check(reads_hidden, {"hidden": 2.0})
    check(needs_a_number, {"hidden": 2.0})  # Who needs its value reads it.
    check(reads_scale, {"mode": "train"})  # Nobody can see who reads a string.
    with lost("other"):
        check(reads_hidden, {"hidden": 2.0, "other": 1.0})
    with lost("flag"):
        check(reads_scale, {"flag": True})
    with lost("pair"):
        check(reads_scale, {"pair": [1.0, "a"]})
    for loss in (Words(), Words(frozenset({"train"}))):
        with lost("mode"):
            check(reads_scale, {"mode": "train"}, loss=loss)
        check(reads_scale, {"mode": [()]}, loss=loss)
    with lost("sclae"):
        check(reads_scale, {"sclae": "a"})


def test_the_error_says_who_reads_which_keyword():
    words = (
        r"^nobody reads the keyword 'sclae', so it would be lost\. Did you mean "
        r"'scale'\? The transformation reads 'scale', and its update does not read "
        r"this one\.$"
    )
    with pytest.raises(TypeError, match=words):
        check(reads_scale, {"sclae": 2.0})
    words = (
        r" The loss takes 'train', 'zeta'\. The transformation names no keyword, and"
    )
    with pytest.raises(TypeError, match=words):
        check(
            reads_only_none, {"far_away": 2.0}, loss=Words(frozenset({"zeta", "train"}))
        )
    words = (
        r"so it would be lost\. The loss takes no keyword\. The transformation names "
    )
    with pytest.raises(TypeError, match=words + r"no keyword\.$"):
        check(
            lambda updates, state, params=None: (updates, state),
            *({"far_away": 2.0},),
            loss=Words(),
        )


def reads_only_none(updates, state, params=None, **extra):
    return updates, state


def needs_worker(updates, state, params=None, *, worker=None, **extra):
    if worker is None:
        raise TypeError("it needs worker")
    return updates, state


def test_a_word_that_a_gate_misses_is_the_slip():
    check(needs_worker, {"worker": 1})
    with lost("wroker"):
        check(needs_worker, {"far_away": 2, "wroker": 1})
    with pytest.raises(TypeError, match=r"^it needs worker"):
        check(needs_worker, {"far_away": 2})


def test_a_loss_with_any_keyword_must_read_a_slip():
    any_word = Words(frozenset({"x"}), True)
    run = functools.partial(
        keywords.check_loss_reads, loss=any_word, named={"local_step"}
    )
    run(lambda words: words["x"] * words["local_stp"], {"x": 1.0, "local_stp": 1.0})
    run(lambda words: words["x"], {"x": 1.0, "many": 1.0, "local_stp": "a"})
    run(lambda words: 1 / 0, {"x": 1.0, "many": 1.0})  # It is not traced.
    with lost("local_stp"):
        run(lambda words: words["x"], {"x": 1.0, "local_stp": 1.0})


def test_a_batch_has_arrays_alone():
    step = keywords.Jitted(lambda params, *batch: params, trees=1)
    words = r"^the batch has 'a' at \[1\]\['k'\], which is no array\. By position only"
    with pytest.raises(TypeError, match=words):
        step.eval_shape(1.0, 2.0, {"j": 1.0, "k": "a"})
    with pytest.raises(TypeError, match=rf"'{'x' * 199}\.\.\. at \[0\]"):
        step.eval_shape(1.0, "x" * 199)
    with pytest.raises(TypeError, match=rf"'{'x' * 198}' at \[0\]"):
        step.eval_shape(1.0, "x" * 198)
    with pytest.raises(AttributeError, match="_jitted"):
        _ = keywords.Jitted.__new__(keywords.Jitted).anything


def test_a_number_whose_value_is_needed_is_named():
    def step(params, batch, /, *, number, array, **more):
        return params * (2.0 if number > 0 else 1.0)

    jitted = keywords.Jitted(step, trees=1)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jitted.eval_shape(1.0, 2.0, number=3, array=jnp.ones(2), flag="on", last=2.5)
    (note,) = (x for x in error.value.__notes__ if "keyword" in x)
    assert "is an array here: 'last', 'number'." in note
    assert note.endswith("functools.partial(f, last=...).")
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jitted.eval_shape(1.0, 2.0, number=jnp.int32(3), array=jnp.ones(2))
    assert not any("keyword" in x for x in getattr(error.value, "__notes__", []))


def test_a_jitted_function_has_its_names_and_its_keywords():
    def step(params, batch, /, *, scale, shift=0.0, flags=()):
        """Doc."""
        assert flags == ("a",)
        return params * scale + batch + shift

    jitted = keywords.Jitted(step, trees=1, donate_argnums=(0,))
    assert (jitted.__name__, jitted.__doc__) == ("step", "Doc.")
    traced = jitted.trace(1.0, 2.0, scale=3.0, flags=("a",))
    assert [x.donated for x in jax.tree.leaves(traced.args_info[0][0])] == [True]
    assert [x.donated for x in jax.tree.leaves(traced.args_info[0][1])] == [False]
    assert "step" in jitted.lower(1.0, 2.0, scale=3.0, flags=("a",)).as_text()[:200]
    assert jitted.eval_shape(1.0, 2.0, scale=3.0, flags=("a",)).shape == ()
    kept = keywords.Jitted(
        lambda params, **words: words["last"],
        trees=1,
        keeps_bools=lambda name, args: (name, args) == ("last", (1.0,)),
    )
    assert kept.eval_shape(1.0, last=True).dtype == bool
    # By position only, a name leaves that of a keyword free.
    named = traced, keywords.Jitted(lambda x, /, y: x, trees=1).trace(1.0, 2.0)
    names = [x.jaxpr.jaxpr.debug_info.arg_names for x in named]
    assert names == [("params_", "batch_", "scale"), ("x_", "y")]
    with pytest.raises(TypeError, match="JAX type"):
        kept.eval_shape(2.0, last=object)


def test_a_keyword_may_have_the_name_of_an_argument_by_position():
    def step(params, /, **words):
        return params * words["params"]

    twice = keywords.Jitted(step, trees=1)
    assert twice.eval_shape(2.0, params=np.ones(3, "f4")).shape == (3,)
