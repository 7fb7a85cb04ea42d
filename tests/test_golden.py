"""The traces that the originals left, replayed by the library.

``tests/golden/README.md`` says how they were made, what a case holds and which quirks
of the originals are not ours.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from tests.descriptors import factory

CASES = {
    f"{path.stem}:{case['name']}": case
    for path in sorted((pathlib.Path(__file__).parent / "golden").glob("*.json"))
    for case in json.loads(path.read_text())["cases"]
    if "steps" in case  # Runs of workers: see test_late_papers.py.
}
OURS = {name: case for name, case in CASES.items() if case["ours"]}

# The originals' names of slots, and ours.
SLOTS = {
    "accumulator": "sum_of_squares",
    "accum": "sum_of_squares",
    "linear": "linear",
    "momentum": "trace",
    "m": "mu",
    "v": "nu",
    "momentum_buffer": "mu",
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
}
# FTRL's is a difference of roots, with their rounding.
FLOORS = {"linear": 0.1}
OF_OPENSEQ2SEQ = "open_seq2seq.optimizers.novograd.NovoGrad"


def slots_of(case, recorded):
    """For each slot of a step, our name, and the numbers in our sign."""
    names = SLOTS | {"momentum": "mu"} if case["symbol"] == OF_OPENSEQ2SEQ else SLOTS
    for slot, leaves in recorded.get("slots", {}).items():
        sign = -1 if slot == "m" else 1  # TensorFlow Addons keeps its momentum negated.
        yield names[slot], {k: sign * x for k, x in tree(leaves).items()}


def array(value, dtype):
    """A leaf as the traces write it; see their README."""
    if value is None:
        return None
    if isinstance(value, dict) and "indices" in value:
        row = value["dense_shape"][1:]
        rows = np.array(value["values"], dtype).reshape(-1, *row)
        return gx.IndexedSlices(value["indices"], rows, value["dense_shape"])
    if isinstance(value, dict) and "fill" in value:
        return jnp.asarray(np.full(value["shape"], value["fill"], dtype))
    return jnp.asarray(np.array(value, dtype))


def tree(leaves, dtype="float32"):
    return {k: array(v, dtype) for k, v in leaves.items()}


def build(ours):
    """The transformation that ``ours`` describes."""
    options = dict(ours)
    name = options.pop("transformation")
    if "inner" in options:
        options["inner"] = build(options["inner"])
    if "alignment" in options:
        options["alignment"] = gx.contrib.MomentumAlignment(**options["alignment"])
    rate = options.get("learning_rate")
    if isinstance(rate, np.ndarray | jax.Array) and rate.ndim:
        options["learning_rate"] = lambda count: jnp.asarray(rate)[count]
    densify = options.pop("densify", False)
    of_optax = name == "sgd" or name.startswith("optax.")
    make = getattr(optax, name.split(".")[-1]) if of_optax else factory(name)
    tx = make(**options)
    return optax.chain(gx.densify(), tx) if densify else tx


def options_of(name):
    """The arguments of ``build`` for a case, and its numbers apart, except zeros."""
    leaves, treedef = jax.tree.flatten(OURS[name]["ours"], is_leaf=is_list)
    leaves = [np.float32(x) if is_list(x) else x for x in leaves]
    numbers = [np.asarray(x, kind_of(x)) if is_number(x) else None for x in leaves]
    words = tuple(None if is_number(x) else x for x in leaves)
    return jax.tree.unflatten(treedef, leaves), numbers, (words, treedef)


def is_list(x):
    return isinstance(x, list)


def is_number(x):
    return isinstance(x, np.ndarray) or (type(x) in (int, float) and x != 0)


def kind_of(x):
    return np.int32 if isinstance(x, int) else np.float32


@functools.cache
def compiled(words, treedef):
    """One program for all traces that differ only in numbers and shapes."""

    @jax.jit
    def step(numbers, *args, **extra):
        pairs = zip(numbers, words, strict=True)
        leaves = [word if number is None else number for number, word in pairs]
        tx = build(jax.tree.unflatten(treedef, leaves))
        return gx.apply_gradients(tx, *args, **extra)

    return step


def dense(leaf):
    """In NumPy: it compiles nothing for each number of rows."""
    if not isinstance(leaf, gx.IndexedSlices):
        return np.asarray(leaf)
    total = np.zeros(leaf.dense_shape)
    rows = np.asarray(leaf.indices)
    held = rows < len(total)  # The others are padding.
    np.add.at(total, rows[held], np.asarray(leaf.values)[held])
    return total


def agree(got, expected, floor, rtol=2e-5):
    for k, leaf in expected.items():
        if leaf is None:
            assert got[k] is None
            continue
        value = np.asarray(dense(leaf), np.float64)
        finite = np.abs(value[np.isfinite(value)])
        atol = rtol / 20 * max(finite.max(initial=0), floor)
        np.testing.assert_allclose(
            dense(got[k]), value, rtol=rtol, atol=atol, err_msg=k
        )


CLIPS = [n for n, c in OURS.items() if "clip_by" in c["ours"]["transformation"]]
# Traces of one program stand side by side, so that one process runs them.
OPTIMIZERS = sorted(OURS.keys() - CLIPS, key=lambda n: (str(options_of(n)[2]), n))


def is_of_optax(name):
    return OURS[name]["ours"]["transformation"].startswith("optax.")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    of_optax = is_of_optax(name)
    around = OURS[name]["ours"]["transformation"] == "lazy"  # One of optax.
    with jax.numpy_dtype_promotion("standard" if of_optax or around else "strict"):
        # Optax's powers of Adam's decays are less exact.
        check_optimizer(name, rtol=1e-4 if of_optax else 2e-5)


def check_optimizer(name, rtol):
    case = OURS[name]
    options, numbers, how = options_of(name)
    tx, step = build(options), functools.partial(compiled(*how), numbers)
    params = tree(case["params"])
    state = tx.init(params)
    stale_count = 0
    for recorded in case["steps"]:
        gated = "local_step" in recorded
        extra = {"local_step": recorded["local_step"]} if gated else {}
        if "last" in recorded:
            extra["last"] = recorded["last"]
        params, state = step(tree(recorded["grads"]), state, params, **extra)
        agree(params, tree(recorded["params"]), floor=1, rtol=rtol)
        for slot, expected in slots_of(case, recorded):
            agree(optax.tree.get(state, slot), expected, FLOORS.get(slot, 0))
        if gated:
            assert gx.global_step(state) == recorded["global_step"]
        if "stale_counter" in recorded:
            assert int(state.stale_count) == recorded["stale_counter"]
            np.testing.assert_allclose(
                gx.staleness_fraction(state), recorded["stale_percentage"], rtol=1e-6
            )
        if "accepted" in recorded:
            stale_count += not recorded["accepted"]
            assert state.stale_count == stale_count
            assert state.num_accumulated == recorded["num_accumulated"]


@pytest.mark.parametrize("name", CLIPS)
def test_clipping(name):
    case = OURS[name]
    options = dict(case["ours"])
    extra = {"use_norm": options.pop("use_norm")} if "use_norm" in options else {}
    dtype = case.get("dtype", "float32")
    tx = build(options)
    (recorded,) = case["steps"]
    grads = tree(recorded["grads"], dtype)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), **extra)
    rtol = 1e-3 if dtype == "float16" else 2e-6  # TensorFlow's norm is a float16 there.
    agree(updates, tree(recorded["clipped"], dtype), floor=0, rtol=rtol)
    if "global_norm" in recorded:
        np.testing.assert_allclose(
            state.global_norm, recorded["global_norm"], rtol=rtol
        )


def test_cases_that_are_not_ours_give_a_reason():
    assert all(CASES[n].get("why_not") for n in CASES.keys() - OURS.keys())
    assert len(OPTIMIZERS) >= 382
    assert len(CLIPS) >= 47
