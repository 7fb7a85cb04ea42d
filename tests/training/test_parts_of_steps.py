"""Parts of steps: who learns, what a line search gets, which words are bools."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._steps import apply

W = jnp.ones(2)
PARAMS = {"a": W, "b": {"c": 2 * W, "d": jnp.int32(3)}}


def test_the_parameters_that_learn():
    with pytest.raises(
        TypeError, match=r"params has int32\[\] at \['b'\]\['d'\], which"
    ):
        apply.learning_leaves(None, PARAMS)
    some = {"a": False, "b": {"c": True, "d": False}}
    for trainable in (some, lambda params: some):
        learning = apply.learning_leaves(trainable, PARAMS)
        assert learning == {"a": None, "b": {"c": PARAMS["b"]["c"], "d": None}}
    floats = {"a": W, "b": 2 * W}
    assert apply.learning_leaves(None, floats) == floats
    assert apply.learning_leaves({"a": True, "b": False}, floats)["b"] is None
    with pytest.raises(TypeError, match="trainable must hold a bool for each leaf"):
        apply.learning_leaves({"a": 1, "b": False}, floats)


def test_which_tables_may_have_rows():
    learning = {"a": W, "b": None}
    both = {"a": W, "b": W}
    apply._check_tables(["a"], learning, both, ["value"])
    apply._check_tables((), learning, both, ["grad"])
    apply._check_tables(lambda path: True, learning, both, [])
    there = {"a": W, "b": gx.on_host(W, min_size=1)}
    apply._check_tables((), learning, there, [])
    for tables in (["a"], lambda path: True):
        with pytest.raises(ValueError, match=r"no tables .* those at \['b'\]\. Leave"):
            apply._check_tables(tables, learning, there, [])
    with pytest.raises(TypeError, match="tables get row-sparse gradients, and this"):
        apply._check_tables(["a"], learning, both, ["grad"])
    with pytest.raises(ValueError, match="tables names 'b', which is not trainable"):
        apply._check_tables(["a", "b"], learning, both, [])


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.every
def test_the_loss_as_a_function_of_the_parameters(has_aux):
    """Its signature has the words that a line search may be given, but optax's own."""

    def loss(params):
        return (jnp.sum(params), "aux") if has_aux else jnp.sum(params)

    words = ["zeta", "value", "local_step", "grad"]
    value_fn = apply._value_fn(loss, W, words, has_aux=has_aux)
    assert value_fn(3 * W, zeta=1, unknown=2) == 6
    parameters = inspect.signature(value_fn.func).parameters.values()
    assert [(p.name, p.kind) for p in parameters] == [
        ("new", inspect.Parameter.POSITIONAL_ONLY),
        *(
            (name, inspect.Parameter.KEYWORD_ONLY)
            for name in ("local_step", "staleness", "zeta")
        ),
    ]
    assert jax.tree.leaves(value_fn) == []


def test_bools_of_a_gate_are_arrays_and_those_of_a_loss_are_static():
    gate = gx.accumulate(optax.sgd(1.0), 2)
    state = gate.init(W)

    def names(params, x, *, train):
        return params

    def takes_all(params, x, **words):
        return params

    def statics(loss_fn, **words):
        step = apply.compiled(lambda params, state, x, **words: 0, loss_fn, gate, ())
        found, _ = step._checked((W, state, 1.0), words)
        return [name for name, *_ in found]

    words = {"last": True, "train": True, "more": False}
    assert statics(names, **words) == ["train"]
    assert statics(takes_all, **words) == ["more", "train"]


def test_what_a_step_refuses_before_it_computes():
    tx = optax.sgd(1.0)
    pair = optax.LookaheadParams(W, W)
    around = optax.lookahead(tx, 2, 0.5)
    with pytest.raises(TypeError, match=r"LookaheadParams.*params\.fast"):
        gx.apply_gradients(around, W, around.init(pair), pair)
    with pytest.raises(TypeError, match="grads and params differ at the root"):
        gx.apply_gradients(tx, jnp.ones(3), tx.init(W), W)
    with pytest.raises(ValueError, match="grads has no gradient for any leaf"):
        gx.apply_gradients(tx, {"a": None}, tx.init({"a": W}), {"a": W})
    with pytest.raises(TypeError, match="nobody reads the keyword 'weight'"):
        gx.apply_gradients(tx, W, tx.init(W), W, weight=1.0)
    for name in ("donate", "two_passes"):
        with pytest.raises(TypeError, match=f"^{name} must be True or False"):
            gx.minimize(np.sum, tx, **{name: 1})
    with pytest.raises(TypeError, match=r"^tx must be an optax\.GradientTransf"):
        gx.minimize(np.sum, 0.1)


def test_a_line_search_needs_all_layers():
    def update(updates, state, params=None, *, grad=None):
        return updates, state

    reads = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    sgd, takes = optax.sgd(1.0), apply.Words()
    args = W, sgd.init(W), W
    with pytest.raises(TypeError, match=r"cannot give this transformation grad: it"):
        apply._check_by_layers(reads, *args, {}, takes)
    with pytest.raises(TypeError, match=r"cannot give this transformation value_fn"):
        apply._check_by_layers(sgd, *args, {"value_fn": 1}, takes)
    apply._check_by_layers(sgd, *args, {}, takes)
    with pytest.raises(TypeError, match="nobody reads the keyword 'weight'"):
        apply._check_by_layers(sgd, *args, {"weight": 1.0}, takes)
