"""The recommender: rows that are pulled late train as whole tables do."""

import itertools

import jax
import numpy as np
import pytest

import gradxform as gx
from benchmarks import recommender
from tests.conftest import promotion

HEIGHTS = {"users": 3000, "items": 500}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_clicks_have_a_long_tail_and_a_truth():
    batch = next(recommender.batches({"users": 10**6, "items": 10**6}, seed=0))
    for name in recommender.TABLES:
        ids = batch[name]
        assert 0 <= ids.min() < ids.max() < 10**6
        # By Zipf's law each decade of ranks is read equally often.
        decades = np.histogram(np.log10(ids + 1.0), bins=range(7))[0]
        np.testing.assert_allclose(decades, recommender.BATCH / 6, rtol=0.2)
    truth = recommender.chance(batch["users"], batch["items"])
    assert set(np.round(truth, 4)) == {0.0025, 0.018, 0.1192, 0.5, 0.8808}
    gap = np.mean(batch["clicks"]) - np.mean(truth)
    assert abs(gap) < 4 * 0.5 / recommender.BATCH**0.5


@pytest.mark.slow
def test_rows_train_as_tables_do():
    """Four workers take turns, so each is three steps late. Another server is dense."""
    params = recommender.make_params(HEIGHTS)
    servers = [gx.ParameterServer(params, recommender.make_tx(8)) for _ in range(2)]
    by_rows, by_tables = servers
    held = []
    for batch in itertools.islice(recommender.batches(HEIGHTS, seed=0), 40):
        part, seen = by_rows.pull(rows=recommender.rows_of(batch))
        held.append((batch, part, seen, *by_tables.pull()))
        if len(held) < 4:
            continue
        old, part, seen, whole, now = held.pop(0)
        loss, rows = recommender.by_rows(part, old)
        wanted, dense = recommender.by_tables(whole, old)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        assert by_rows.push(rows, seen) == by_tables.push(dense, now)
    assert by_rows.stats().staleness == {0: 1, 1: 1, 2: 1, 3: 34}
    for got, want in zip(*(jax.tree.leaves(s.pull()[0]) for s in servers), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        assert not np.array_equal(got, 0)
    table = by_rows.pull()[0]["users"]
    untouched = np.all(np.asarray(table) == params["users"], axis=1)
    assert 0 < np.mean(untouched) < 1


@pytest.mark.slow
@pytest.mark.parametrize("tables", recommender.OF_TABLES)
def test_four_threads_learn(tables):
    server = gx.ParameterServer(
        recommender.make_params(HEIGHTS), recommender.make_tx(8, tables)
    )
    with promotion():
        losses = recommender.train(server, HEIGHTS, workers=4, pushes=400)
    assert len(losses) == 400
    assert sum(server.stats().staleness.values()) == 400
    loss, constant, truth = recommender.evaluate(server, HEIGHTS, count=5)
    assert truth < loss < (constant + truth) / 2
