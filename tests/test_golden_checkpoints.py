"""Runs of an earlier version go on from its checkpoints, to the same numbers."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gradxform as gx
from tests.golden import make_checkpoints as golden

KEPT = golden.kept()
# Steps of these rows read the momentum before it is rounded to bfloat16. When the
# checkpoints were made, they read it after that. The rate is 0.1.
UNROUNDED = {"delayed_nesterov-bf16", "momentum_look_ahead-bf16"}
OF_ROUNDING = 0.1 * float(jnp.finfo(jnp.bfloat16).eps)
# When its checkpoint was made, it counted no steps, and rounded parts to the nearest.
UNCOUNTED = "master_weights-int8"
NAMES = sorted({p.stem for p in golden.FOLDER.glob("*.zip")} - {golden.ENGINE})


def unpacked(name, folder):
    """Unpacks a checkpoint into the folder; returns what is expected of it."""
    with zipfile.ZipFile(golden.FOLDER / f"{name}.zip") as file:
        file.extractall(folder)
    expected = folder / "expected.json"
    text = expected.read_text()
    expected.unlink()  # In a run's folder there is nothing else.
    return json.loads(text)


def assert_numbers(tree, expected, least=0.0, parts=0):
    """Within a few units in the last place: each compiler rounds in its own order."""
    found = golden.numbers(tree)
    assert found.keys() == expected.keys()
    flat, _ = jax.tree.flatten_with_path(tree)
    for path, x in flat:
        name = jax.tree_util.keystr(path)
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        near = max(8 * float(jnp.finfo(x.dtype).eps), least) if inexact else parts
        np.testing.assert_allclose(
            found[name], expected[name], rtol=near, atol=near, err_msg=name
        )


def cleared(tree):
    """Sums without a push were cleared when the checkpoints were made."""

    def is_sum(node):
        return hasattr(node, "num_accumulated")

    def clear(node):
        if not is_sum(node) or node.num_accumulated:
            return node
        fields = "accumulated", "row_counts"
        zeros = {k: jax.tree.map(jnp.zeros_like, getattr(node, k)) for k in fields}
        return node._replace(**zeros)

    return jax.tree.map(clear, tree, is_leaf=is_sum)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on(name, tmp_path):
    row = KEPT[name]  # Its row in tests/descriptors.py stays as it was.
    expected = unpacked(name, tmp_path)
    like = golden.begin(row)
    if name == UNCOUNTED:
        like = like[0], gx.MasterWeightsState(*like[1][:2])
    assert golden.arrays(like) == expected["arrays"]  # Or orbax would cast them.
    with ocp.CheckpointManager(tmp_path) as manager:
        step = manager.latest_step()
        saved = manager.restore(step, args=ocp.args.StandardRestore(like))
    assert step == golden.SAVED
    if name == UNCOUNTED:
        saved = saved[0], gx.CountedMasterWeightsState(*saved[1], count=jnp.int32(0))
    after = golden.pushed(row, *saved, step, golden.PUSHES)
    if name == UNCOUNTED:
        after = after[0], gx.MasterWeightsState(*after[1][:2])
    least, parts = OF_ROUNDING * (name in UNROUNDED), int(name == UNCOUNTED)
    assert_numbers(cleared(after), expected["after"], least, parts)


def test_the_run_of_an_engine_goes_on(tmp_path):
    expected = unpacked(golden.ENGINE, tmp_path)
    resumed, made, counts, state = golden.ran(3 * golden.SAVED, tmp_path)
    assert (resumed, made) == (expected["resumed"], 2 * golden.SAVED)
    # Later versions count more.
    assert counts._asdict() | expected["counts"] == counts._asdict()
    assert_numbers(state, expected["after"])
