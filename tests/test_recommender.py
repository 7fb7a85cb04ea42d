"""The recommender: rows that are pulled late train as whole tables do."""

import itertools

import jax
import numpy as np
import pytest

import gradxform as gx
from benchmarks import recommender

HEIGHTS = {"users": 3000, "items": 500}

pytestmark = pytest.mark.usefixtures("standard_promotion")


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
