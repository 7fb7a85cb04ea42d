"""clip_by_zscore, against runs of its authors' class and the formula in float64."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from tests import oracles
from tests.test_golden import build

TRACES = pathlib.Path(__file__).parents[1] / "golden/zclip.json"
CASES = {case["name"]: case for case in json.loads(TRACES.read_text())["cases"]}


@pytest.mark.parametrize("name", [k for k, case in CASES.items() if case["ours"]])
def test_it_clips_as_its_authors_class(name):
    case = CASES[name]
    tx = build(case["ours"])
    state, update = tx.init({"w": jnp.zeros(3)}), jax.jit(tx.update)
    pushes = [{"w": np.float64(e["grads"]["w"])} for e in case["events"]]
    options = {k: v for k, v in case["ours"].items() if k != "transformation"}
    start = {"w": np.zeros(3)}
    formula = oracles.clip_by_zscore(start, pushes, -1.0, **options)
    before, clipped = start["w"], 0
    for event, (summed, *_) in zip(case["events"], formula, strict=True):
        wanted = event["clipped"]["w"]
        grads = {"w": jnp.float32(event["grads"]["w"])}
        updates, state = update(grads, state)
        np.testing.assert_allclose(updates["w"], wanted, rtol=1e-4)
        np.testing.assert_allclose(state.global_norm, event["global_norm"], rtol=1e-6)
        np.testing.assert_allclose(summed["w"] - before, wanted, rtol=1e-4, atol=1e-12)
        before = summed["w"]
        clipped += event["clipped"] != event["grads"]
    assert clipped > (0 if name == "small" else 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e25])
@pytest.mark.parametrize("at", [1, 4], ids=["at first", "later"])
def test_a_norm_that_is_not_finite_enters_no_average(bad, at):
    tx = gx.contrib.clip_by_zscore(warmup=3)
    state, update = tx.init(jnp.zeros(2)), jax.jit(tx.update)
    for t, norm in enumerate((1.0, 1.2, 1.1, 1.0, 5.0, 1.0)):
        if t == at:
            updates, new = update(jnp.array([1.0, bad]), state)
            assert np.isnan(updates).all()
            assert not np.isfinite(new.global_norm)
            assert new._replace(global_norm=state.global_norm) == state
            state = new
        updates, state = update(jnp.array([norm, 0.0]), state)
        if norm == 5.0:
            assert 1 < updates[0] < 1.3
        else:
            assert updates[0] == np.float32(norm)  # To the bit.
