"""A keyword of a step reaches its loss or its transformation, or is an error."""

import enum
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform._checks import keywords
from gradxform._trees import states

X = np.arange(12, dtype=np.float32).reshape(4, 3)
MASK = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
W = np.array([1.0, -0.5, 0.25], np.float32)


def loss_fn(params, x, mask=None, *, train=False, reduction="mean"):
    errors = (x @ params["w"] - 1) ** 2
    if mask is not None:
        return jnp.sum(errors * mask) / jnp.sum(mask)
    if train:
        errors = 2 * errors
    return jnp.sum(errors) if reduction == "sum" else jnp.mean(errors)


def errors(w=W):
    return (X.astype(np.float64) @ w - 1) ** 2


def masked(w=W):
    return (errors(w) @ MASK) / MASK.sum()


def start():
    return {"w": jnp.array(W)}


def stepped(step, tx, *batch, params=None, **words):
    params = start() if params is None else params
    return step(params, tx.init(params), *batch, **words)


SGD = optax.sgd(0.1)


# Where a keyword of the loss was lost.

OPTIMIZERS = {
    "optax.sgd": SGD,
    "a chain": optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
    "drop_stale": gx.drop_stale(SGD, 1),
    "accumulate": gx.accumulate(SGD, 2),
    "accumulate in a chain": optax.chain(gx.accumulate(SGD, 1), optax.scale(0.5)),
    "skip_spikes": gx.skip_spikes(SGD),
    "worker_mean": gx.worker_mean(SGD, 2, method="latest"),
    "delayed": gx.delayed(SGD, 1),
    "partition": optax.partition({"a": SGD}, {"w": "a"}),
    "inject": optax.inject_hyperparams(optax.sgd)(0.1),
    "plateau": optax.chain(SGD, optax.contrib.reduce_on_plateau()),
    "a plain pair": optax.GradientTransformation(
        lambda _: (), lambda updates, state, params=None: (updates, state)
    ),
}
OF_GATE = {"drop_stale": {"local_step": 0}, "worker_mean": {"worker": 0}}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_keyword_that_the_loss_names_goes_there(name):
    tx, words = OPTIMIZERS[name], OF_GATE.get(name, {})
    step = gx.minimize(loss_fn, tx, donate=False)
    loss = stepped(step, tx, X, mask=MASK, **words)[2]
    np.testing.assert_allclose(loss, masked(), rtol=1e-5)
    steps = gx.local_steps(loss_fn, tx, donate=False)
    losses = stepped(steps, tx, X[None], mask=MASK[None], **words)[2]
    np.testing.assert_allclose(losses, [masked()], rtol=1e-5)


class Model:
    def __call__(self, params, x, mask=None):
        return loss_fn(params, x, mask)

    def method(self, params, x, *, mask):
        return loss_fn(params, x, mask)


@functools.wraps(loss_fn)
def decorated(*args, **kwargs):
    return loss_fn(*args, **kwargs)


LOSSES = {
    "a function": loss_fn,
    "a partial": functools.partial(loss_fn, reduction="mean"),
    "a method": Model().method,
    "a module": Model(),
    "jitted": jax.jit(loss_fn, static_argnames=["train", "reduction"]),
    "decorated": decorated,
    "any keyword": lambda params, x, **kwargs: 1.0 * loss_fn(params, x, **kwargs),
    "a checkpoint": jax.checkpoint(
        lambda params, x, mask: 1.0 * loss_fn(params, x, mask)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_any_kind(name):
    tx = gx.accumulate(SGD, 1)
    step = gx.minimize(LOSSES[name], tx, donate=False)
    params, _, loss = stepped(step, tx, X, mask=MASK, weight=2.0)
    np.testing.assert_allclose(loss, masked(), rtol=1e-5)
    gradient = 2 * ((X @ W - 1) * MASK / MASK.sum()) @ X
    np.testing.assert_allclose(params["w"], W - 0.1 * gradient, rtol=1e-5)


def with_layers(params, x, *, factor, scale=1.0, skip=False):
    def layer(x, w):
        return x * w if skip else jnp.tanh(x * w), None

    x, _ = jax.lax.scan(layer, x * factor, params["layers"])
    return jnp.mean(
        scale * (x + gx.lookup(params["emb"], jnp.array([1, 1])).sum()) ** 2
    )


LAYERS = {"layers": jnp.array([0.5, 1.5]), "emb": jnp.ones((3, 2)), "b": jnp.ones(2)}
HOWS = {
    "plain": {},
    "layers": {"layers": ["layers"]},
    "two_passes": {"layers": ["layers"], "two_passes": True},
    "tables": {"tables": ["emb"]},
    "both": {"layers": ["layers"], "tables": ["emb"]},
    "trainable": {"trainable": {"layers": True, "emb": False, "b": True}},
    "has_aux": {"has_aux": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_each_kind_of_step(how):
    """Keyword-only, an array and a flag; the expected step is one without keywords."""
    x, factor = jnp.arange(3.0) / 3, jnp.array([2.0, 1.0, 0.5])
    tx = optax.chain(gx.densify(), optax.sgd(0.1))
    found = {}
    for skip in False, True:

        def with_aux(params, x, skip=skip, **kwargs):
            return with_layers(params, x, skip=skip, **kwargs), {"n": x.size}

        loss = with_aux if how == "has_aux" else with_layers
        step = gx.minimize(loss, tx, **HOWS[how], donate=False)
        params, _, value, *aux = stepped(
            step, tx, x, params=LAYERS, factor=factor, skip=skip
        )
        assert bool(aux) == (how == "has_aux")

        def bound(params, skip=skip):
            return with_layers(params, x, factor=factor, skip=skip)

        expected, grads = jax.jit(jax.value_and_grad(bound))(LAYERS)
        if how == "trainable":
            grads["emb"] = jnp.zeros_like(grads["emb"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, LAYERS, grads)
        chex.assert_trees_all_close((params, value), (new, expected), rtol=1e-5)
        found[skip] = value
    assert found[False] != found[True]


@pytest.mark.slow
def test_names_of_the_step_may_be_those_of_a_loss():
    """As of losses with the statistics of batches."""

    def loss(p, x, *, state, params, grads=0.0):
        return jnp.sum(p["w"] * x) * state["mean"] * params + grads

    for make, lead in (gx.minimize, ()), (gx.local_steps, (1,)):
        step = make(loss, SGD, donate=False)
        state = {"mean": jnp.full(lead, 2.0)}
        x = jnp.broadcast_to(jnp.arange(3.0), (*lead, 3))
        words = {"state": state, "params": jnp.full(lead, 3.0)}
        value = step(start(), SGD.init(start()), x, **words)[2]
        np.testing.assert_allclose(value, np.full(lead, 6 * (W @ np.arange(3.0))))
    assert gx.evaluate(loss)(start(), x[0], state=state, params=1.0).shape == (1,)


class Scaled:
    """A transformation as a user may write it: no named tuple of optax."""

    def init(self, params):
        return optax.EmptyState()

    def update(self, updates, state, params=None, *, factor):
        return optax.tree.scale(-factor, updates), state


def reads_factor():
    """A transformation that names an extra argument, and one that hides it."""

    def update(updates, state, params=None, *, factor, **_):
        return optax.tree.scale(-factor, updates), state

    def hidden(updates, state, params=None, **extra):
        return optax.tree.scale(-extra["factor"], updates), state

    init = optax.init_empty_state
    of = optax.GradientTransformationExtraArgs
    return of(init, update), of(init, hidden)


@pytest.mark.slow
def test_a_keyword_that_both_name_goes_to_both():
    def loss(params, factor):
        return factor * jnp.sum(params["w"])

    for around in lambda tx: tx, gx.skip_spikes, lambda tx: gx.accumulate(tx, 1):
        tx = around(reads_factor()[0])
        step = gx.minimize(loss, tx, donate=False)
        params, _, value = stepped(step, tx, factor=jnp.float32(3.0))
        np.testing.assert_allclose(value, 3 * W.sum())
        np.testing.assert_allclose(params["w"], W - 9)
    gate = gx.accumulate(SGD, 1)
    step = gx.minimize(lambda p, weight: jnp.sum(p["w"]) * weight, gate, donate=False)
    _, state, value = stepped(step, gate, weight=3.0)
    assert (value, state.total_weight) == (3 * W.sum(), 3)


def test_a_loss_with_any_keyword_takes_those_that_no_gate_names():
    seen = []

    def loss(params, x, **kwargs):
        seen.append(sorted(kwargs))
        return jnp.mean(x @ params["w"])

    inner = gx.drop_stale(gx.accumulate(SGD, 2), 4)
    tx = optax.chain(optax.identity(), inner)
    step = gx.minimize(loss, tx, donate=False)
    words = {"local_step": 0, "weight": 3.0, "last": True, "mask": MASK, "flag": True}
    _, state, _ = stepped(step, tx, X, **words)
    assert seen == [["flag", "mask"]]
    assert optax.tree.get(state, "total_weight") == 3
    assert gx.global_step(state) == 1
    # `last` is an array, so both of its values have one program.
    stepped(step, tx, X, **words | {"last": False})
    assert seen == [["flag", "mask"]]


@pytest.mark.slow
def test_local_steps_have_an_entry_of_each_keyword_and_the_same_flag():
    x, masks = np.stack([X, X, 2 * X]), np.stack([MASK, 1 - MASK, MASK])
    steps = gx.local_steps(loss_fn, SGD, donate=False)
    grads, _, losses = stepped(steps, SGD, x, mask=masks, train=True)
    params, expected = start(), []
    for each, mask in zip(x, masks, strict=True):
        loss, gradient = jax.value_and_grad(loss_fn)(params, each, mask)
        expected.append(loss)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], W - params["w"], rtol=1e-5)
    _, _, losses = stepped(steps, SGD, X[None], train=True)
    np.testing.assert_allclose(losses, [2 * errors().mean()], rtol=1e-5)
    # Keywords alone are a batch, too, and some of the steps.
    _, _, losses = stepped(steps, SGD, x=x, mask=masks, num_steps=1)
    np.testing.assert_allclose(losses, [expected[0], 0, 0], rtol=1e-5)
    with pytest.raises(ValueError, match=r"first axis of one length.*'mask': \(4,\)"):
        stepped(steps, SGD, x, mask=MASK)


# What is no array.


class Kind(enum.IntEnum):
    ONE = 1


@pytest.mark.slow
def test_no_array_is_static_and_has_one_program_for_each_value():
    traced = []

    def loss(params, x, *, flag=None, how=None, at=0):
        kinds = jax.tree.map(lambda x: isinstance(x, jax.core.Tracer), how)
        traced.append((flag, kinds, how if kinds is False else None))
        if callable(flag):
            x = flag(x)
        return jnp.sum(params["w"] * x) + at

    step = gx.minimize(loss, SGD, donate=False)

    def programs(**words):
        before = len(traced)
        value = stepped(step, SGD, jnp.ones(3), **words)[2]
        return len(traced) - before, float(value)

    total = float(W.sum())
    assert programs(flag=True) == (1, total)
    assert programs(flag=True) == (0, total)
    assert programs(flag=False) == (1, total)
    # Equal values of other types are others.
    assert programs(flag=Kind.ONE) == (1, total)
    assert traced[-1][0] is Kind.ONE
    assert programs(flag="a") == (1, total)
    assert programs(flag=None) == (1, total)
    assert programs() == (1, total)
    assert programs(flag=jnp.sin)[0] == 1
    assert programs(flag=jnp.sin)[1] == pytest.approx(total * np.sin(1), rel=1e-5)
    # Leaf by leaf. NumPy's bools and all numbers are arrays.
    how = {"a": [jnp.ones(2), "b"], "c": (True, np.bool(True), 3, np.float32(1), None)}
    assert programs(how=how)[0] == 1
    flags = traced[-1][1]
    assert flags == {"a": [True, False], "c": (False, True, True, True, None)}
    assert programs(how=how | {"a": [jnp.zeros(2), "b"]})[0] == 0
    assert programs(how=how | {"a": [jnp.zeros(2), "c"]})[0] == 1
    assert programs(how="b", flag="a")[0] == 1
    assert programs(flag="a", how="b")[0] == 0
    assert programs(at=2) == (1, total + 2)
    assert programs(at=3) == (0, total + 3)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["minimize", "donated", "local_steps", "evaluate"])
def test_flags_mean_what_they_say(make):
    makes = {
        "minimize": functools.partial(gx.minimize, loss_fn, SGD, donate=False),
        "donated": functools.partial(gx.minimize, loss_fn, SGD),
        "local_steps": functools.partial(gx.local_steps, loss_fn, SGD),
        "evaluate": functools.partial(gx.evaluate, loss_fn),
    }
    f, x = makes[make](), X[None] if make == "local_steps" else X

    def loss(**words):
        if make == "evaluate":
            return f(start(), x, **words)
        return stepped(f, SGD, x, **words)[2]

    np.testing.assert_allclose(loss(), errors().mean(), rtol=1e-5)
    np.testing.assert_allclose(loss(train=True), 2 * errors().mean(), rtol=1e-5)
    both = loss(train=True, reduction="sum")
    np.testing.assert_allclose(both, 2 * errors().sum(), rtol=1e-5)
    value, grads = gx.value_and_grad(loss_fn)(start(), X, train=True, reduction="sum")
    np.testing.assert_allclose(value, 2 * errors().sum(), rtol=1e-5)
    assert grads["w"].shape == (3,)


def test_what_is_static_must_have_a_hash():
    step = gx.minimize(lambda p, x, **kw: jnp.sum(p["w"] * x), SGD, donate=False)
    with pytest.raises(TypeError, match=r"keyword names\['a'\]\[0\] is a set"):
        stepped(step, SGD, jnp.ones(3), names={"a": [{1, 2}]})


def test_by_position_only_arrays_are_taken():
    steps = [gx.minimize(loss_fn, SGD), gx.local_steps(loss_fn, SGD)]
    for step, value in itertools.product(steps, (True, "sum", jnp.sin)):
        with pytest.raises(TypeError, match=r"batch has .* at \[1\].*by keyword"):
            stepped(step, SGD, X, value)
    with pytest.raises(TypeError, match=r"batch has True at \[0\]\['a'\]"):
        gx.evaluate(lambda p, x: p["w"])(start(), {"a": True})
    value = stepped(gx.minimize(loss_fn, SGD), SGD, X, None)[
        2
    ]  # A tree without leaves.
    np.testing.assert_allclose(value, errors().mean(), rtol=1e-5)


def test_an_error_names_the_number_whose_value_is_needed():
    def loss(params, x, *, other=1.0, n):
        return jnp.sum(params["w"] * x) * len(range(n)) * other

    for step in gx.minimize(loss, SGD), gx.evaluate(loss):
        args = (
            (start(),) if step.__name__ == "evaluated" else (start(), SGD.init(start()))
        )
        with pytest.raises(jax.errors.TracerIntegerConversionError) as caught:
            step(*args, jnp.ones(3), n=2)
        assert "an array here: 'n'. If" in caught.value.__notes__[0]
    step = gx.minimize(functools.partial(loss, n=2), SGD)
    np.testing.assert_allclose(stepped(step, SGD, jnp.ones(3))[2], 2 * W.sum())


@pytest.mark.slow
def test_the_step_has_all_that_a_jitted_function_has():
    for donate in False, True:
        step = gx.minimize(loss_fn, SGD, donate=donate)
        args = start(), SGD.init(start()), X
        compiled = step.lower(*args, mask=MASK, train=True).compile()
        np.testing.assert_allclose(compiled(*args, mask=MASK)[2], masked(), rtol=1e-5)
        assert step.eval_shape(*args, reduction="sum")[2].shape == ()
        assert step.trace(*args, reduction="sum").jaxpr.out_avals
        assert step.__name__ == "step"
        described = jax.ShapeDtypeStruct((4,), jnp.float32)
        text = step.lower(*args, mask=described).as_text()
        assert "jit_step" in text
        outer = jax.jit(lambda *args, step=step: step(*args, mask=MASK, train=True))
        args = start(), SGD.init(start()), X
        np.testing.assert_allclose(outer(*args)[2], masked(), rtol=1e-5)


# What nobody reads.


@pytest.mark.every
@pytest.mark.parametrize(
    ("word", "value", "meant"),
    [
        ("maks", MASK, "mask"),
        ("maks", None, "mask"),
        ("trian", True, "train"),
        ("attention_mask", MASK, ""),
        ("reductoin", "sum", "reduction"),
        ("local_stp", 0, "local_step"),
        ("weigth", 2.0, "weight"),
    ],
)
@pytest.mark.parametrize(
    "make", [gx.minimize, gx.local_steps, functools.partial(gx.minimize, layers=["w"])]
)
def test_a_keyword_that_nobody_reads_is_an_error(make, word, value, meant):
    def loss(params, x, mask=None, *, train=False, reduction="mean"):
        del mask, train, reduction
        return jax.lax.scan(lambda c, w: (c * w, None), jnp.sum(x), params["w"])[0]

    step = make(loss, SGD, donate=False)
    x = X[None] if make is gx.local_steps else X
    hint = rf"Did you mean '{meant}'\?.*" if meant else ""
    message = rf"'{word}'.*{hint}loss takes 'mask', 'reduction', 't"
    with pytest.raises(TypeError, match=message):
        stepped(step, SGD, x, **{word: value})


def test_a_loss_with_any_keyword_must_not_drop_a_slip():
    """A word that looks like one is taken if the loss reads it."""
    tx = gx.accumulate(SGD, 2)

    def drops(params, x, **_):
        return jnp.mean(x @ params["w"])

    def reads(params, x, *, train=False, **words):
        assert train
        return words["weigth"] * jnp.mean(x @ params["w"])

    step = gx.minimize(drops, tx, donate=False)
    steps = gx.local_steps(drops, tx, donate=False)
    message = r"reads the keyword 'weigth'.*Did you mean 'weight'\?"
    with pytest.raises(TypeError, match=message):
        stepped(step, tx, X, weigth=2.0)
    with pytest.raises(TypeError, match=message):
        stepped(steps, tx, X[None], weigth=np.ones(1))
    # It may drop any other one, as of a batch with many names.
    assert np.isfinite(stepped(step, tx, X, labels=MASK, name="train")[2])
    step = gx.minimize(reads, tx, donate=False)
    loss = stepped(step, tx, X, weigth=2.0, train=True)[2]
    np.testing.assert_allclose(loss, 2 * (X @ W).mean(), rtol=1e-5)


AROUND = {
    "itself": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "drop_stale": lambda tx: gx.drop_stale(tx, 4),
    "accumulate": lambda tx: gx.accumulate(tx, 1),
    "conditional_accumulator": lambda tx: gx.conditional_accumulator(tx, 1),
    "worker_mean": lambda tx: gx.worker_mean(tx, 1, method="ringleader"),
    "skip_spikes": gx.skip_spikes,
    "delayed": lambda tx: gx.delayed(tx, 0),
    "master_weights": gx.master_weights,
    "two gates": lambda tx: gx.accumulate(gx.drop_stale(tx, 4), 1),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "lazy": gx.lazy,
    "low_bit_state": gx.low_bit_state,
    "whole_matrices": gx.whole_matrices,
    "jitted": lambda tx: optax.GradientTransformationExtraArgs(
        tx.init, jax.jit(tx.update)
    ),
}


WORDS = dict.fromkeys(
    ("drop_stale", "conditional_accumulator", "two gates"), ("local_step",)
)
WORDS["worker_mean"] = ("local_step", "worker")


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", AROUND)
def test_what_a_transformation_hides_is_found_by_its_trace(name):
    """``factor`` is read, however deep it is; another one is not."""
    words = dict.fromkeys(WORDS.get(name, ()), 0)
    # Optax gives a class no extra arguments.
    drops = name in ("chain", "MultiSteps", "masked")
    for inner in reads_factor() if drops else (*reads_factor(), Scaled()):
        tx = AROUND[name](inner)
        step = gx.minimize(loss_fn, tx, donate=False)
        params, _, _ = stepped(step, tx, X, factor=jnp.float32(0.5), **words)
        gradient = jax.grad(loss_fn)(start(), X)["w"]
        np.testing.assert_allclose(params["w"], W - 0.5 * gradient, rtol=1e-5)
        grads = {"w": gradient}
        for apply in gx.apply_gradients, jax.jit(gx.apply_gradients, static_argnums=0):
            state = tx.init(start())
            new, _ = apply(tx, grads, state, start(), factor=0.5, **words)
            chex.assert_trees_all_close(new, params, rtol=1e-5)
            with pytest.raises(TypeError, match="'other'"):
                apply(tx, grads, state, start(), factor=0.5, other=1.0, **words)
        with pytest.raises(TypeError, match=r"nobody reads the keyword 'other'"):
            stepped(step, tx, X, factor=jnp.float32(0.5), other=1.0, **words)
        steps = gx.local_steps(loss_fn, tx, donate=False)
        change, _, _ = stepped(steps, tx, X[None], factor=np.float32(0.5), **words)
        np.testing.assert_allclose(change["w"], 0.5 * gradient, rtol=1e-5)
        server = gx.ParameterServer(start(), tx)
        given = {k: x for k, x in words.items() if k != "local_step"}
        server.push(grads, 0, factor=np.float32(0.5), **given)
        chex.assert_trees_all_close(server.pull()[0], params, rtol=1e-5)


@pytest.mark.slow
def test_conventional_words_need_no_reader():
    grads = start()
    for tx in SGD, gx.accumulate(SGD, 2):
        words = {"value": 1.0, "grad": grads, "value_fn": jnp.sum}
        gx.apply_gradients(tx, grads, tx.init(grads), start(), **words)
    step = gx.minimize(loss_fn, SGD)
    assert np.isfinite(stepped(step, SGD, X, value=1.0)[2])


WORKER = {"local_step": 0, "worker": 0}
WORKER = {"local_step": 0, "worker": 0}
SLIPS = {
    "weigth": (gx.accumulate(SGD, 2), {}, "weight"),
    "wieght": (gx.conditional_accumulator(SGD, 2), {"local_step": 0}, "weight"),
    "local_stp": (gx.drop_stale(SGD, 2), {"local_step": 0}, "local_step"),
    "lsat": (optax.chain(gx.accumulate(SGD, 2)), {}, "last"),
    "vlaue": (gx.skip_spikes(SGD), {}, "value"),
    "wroker": (gx.worker_mean(SGD, 2, method="all"), WORKER, "worker"),
}


@pytest.mark.parametrize("word", SLIPS)
def test_a_slip_in_a_call_of_update(word):
    tx, words, meant = SLIPS[word]
    grads = start()
    with pytest.raises(TypeError, match=rf"'{word}'.*Did you mean '{meant}'\?"):
        tx.update(grads, tx.init(grads), grads, **words, **{word: 1.0})
    with pytest.raises(TypeError, match=rf"'{word}'.*Did you mean '{meant}'\?"):
        gx.apply_gradients(tx, grads, tx.init(grads), grads, **words, **{word: 1.0})


@pytest.mark.slow
def test_a_gate_in_a_chain_takes_the_words_of_others():
    named, hidden = reads_factor()
    for other in named, hidden:
        tx = optax.chain(gx.accumulate(optax.identity(), 1), other)
        grads = start()
        updates, _ = tx.update(grads, tx.init(grads), grads, factor=2.0, weight=1.0)
        np.testing.assert_allclose(updates["w"], -2 * W)


def test_marks_name_the_extra_arguments_that_docstrings_have():
    grads = start()
    gates = {
        gx.drop_stale(SGD, 1): {"local_step"},
        gx.conditional_accumulator(SGD, 2): {"local_step", "weight", "last"},
        gx.accumulate(SGD, 2): {"weight", "last"},
        gx.worker_mean(SGD, 2, method="all"): {"worker", "local_step"},
        gx.skip_spikes(SGD): {"value"},
        gx.delayed(SGD, 1): set(),
    }
    found = set()
    for tx, words in gates.items():
        assert states.words(tx.init(grads)) == words
        found |= words
    assert found == states.KNOWN_WORDS
    inside = optax.chain(optax.identity(), gx.skip_spikes(gx.drop_stale(SGD, 1)))
    assert keywords.named_by(inside, inside.init(grads)) == {"value", "local_step"}
