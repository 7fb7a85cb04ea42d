"""Trains a recommender with tables of 10 million rows; no worker holds the tables.

``python -m benchmarks.recommender`` makes clicks of users on items. Both are drawn from
a long tail as in Criteo's logs (Zipf; seeded). It trains two towers on them: the row of
a user and the row of an item, each with its popularity, go through a dense layer each.
Their product gives the chance of a click. Four threads pull the rows that their batch
reads, compute, and push late to one ``ParameterServer``: clip, then row-wise Adagrad
for the tables and AdamW for the rest. With ``--tables adamw`` the tables have AdamW,
too: ``gx.lazy`` runs it on the rows of a push.
"""

import concurrent.futures
import itertools
import math
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from benchmarks.measure import arguments, report

WIDTH, HIDDEN, TASTES, BATCH = 16, 32, 4, 4096
TABLES = ("items", "users")
OF_TABLES = {
    "adagrad": gx.adagrad(0.1, 0.0, 1e-12, row_wise=True),
    "adamw": gx.lazy(optax.adamw(3e-3)),
}


def make_tx(max_staleness, tables="adagrad"):
    """The common recipe: an optimizer by the row for tables, AdamW for the rest."""

    def kind(path, _):
        return "table" if path[0].key in TABLES else "rest"

    optimizers = {
        "table": OF_TABLES[tables],
        "rest": optax.adamw(3e-3),
    }
    each = optax.partition(optimizers, lambda p: jax.tree.map_with_path(kind, p))
    return gx.drop_stale(optax.chain(gx.clip_by_global_norm(1.0), each), max_staleness)


def make_params(heights, seed=0):
    """Tables of small numbers, and the two dense layers."""
    rng = np.random.default_rng(seed)
    params = {
        name: 0.05 * rng.standard_normal((height, WIDTH), np.float32)
        for name, height in heights.items()
    }
    for name in TABLES:
        shape = (WIDTH, HIDDEN)
        params[f"{name}_layer"] = rng.standard_normal(shape, np.float32) / WIDTH**0.5
    return params | {"bias": np.float32(0.0)}


def loss_fn(params, batch):
    """Mean cross-entropy [nat] of the clicks."""
    towers = [
        jnp.tanh(gx.lookup(params[name], batch[name]) @ params[f"{name}_layer"])
        for name in TABLES
    ]
    logits = jnp.sum(towers[0] * towers[1], axis=1) + params["bias"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]))


by_rows = jax.jit(gx.value_and_grad(loss_fn, tables=TABLES))
by_tables = jax.jit(jax.value_and_grad(loss_fn))


def tail(rng, height, count):
    """Ids whose frequency falls as 1/rank, as Zipf's law has it."""
    ranks = np.exp(rng.uniform(0.0, math.log(height + 1), count)).astype(np.int64) - 1
    return np.minimum(ranks, height - 1).astype(np.int32)


def tastes(ids, salt):
    """The taste of a user or the kind of an item: a few signs that depend on the id."""
    bits = (ids.astype(np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    signs = (bits[:, None] >> np.arange(40, 40 + TASTES, dtype=np.uint64)) & np.uint64(
        1
    )
    return 2.0 * signs - 1.0


def chance(users, items):
    """The chance of a click, which grows with the number of tastes that agree."""
    agree = np.mean(tastes(users, 1) * tastes(items, 2), axis=1)
    return 1 / (1 + np.exp(2 - 4 * agree))


def entropy(p):
    """Mean entropy [nat] of clicks with these chances."""
    return float(-np.mean(p * np.log(p) + (1 - p) * np.log(1 - p)))


def batches(heights, seed):
    """Clicks without end."""
    rng = np.random.default_rng(seed)
    while True:
        users, items = (tail(rng, heights[name], BATCH) for name in ("users", "items"))
        clicks = rng.uniform(size=BATCH) < chance(users, items)
        yield {"users": users, "items": items, "clicks": clicks.astype(np.float32)}


def rows_of(batch):
    """The rows that a worker pulls for a batch."""
    return {name: batch[name] for name in TABLES}


def train(server, heights, workers, pushes):
    """Pushes from this many threads; returns the losses, in no order."""
    turns = itertools.count()

    def work(index):
        losses = []
        for batch in batches(heights, seed=100 + index):
            if next(turns) >= pushes:
                return losses
            params, seen = server.pull(rows=rows_of(batch))
            loss, grads = by_rows(params, batch)
            server.push(grads, seen)
            losses.append(float(loss))

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [loss for each in pool.map(work, range(workers)) for loss in each]


def evaluate(server, heights, count=20):
    """Losses [nat] on new clicks: of the model, of a constant, of the true chances."""
    some = list(itertools.islice(batches(heights, seed=1), count))
    losses = []
    for batch in some:
        params, _ = server.pull(rows=rows_of(batch))
        losses.append(float(by_rows(params, batch)[0]))
    rate = np.mean([batch["clicks"] for batch in some])
    truth = [entropy(chance(batch["users"], batch["items"])) for batch in some]
    return [
        round(float(x), 4) for x in (np.mean(losses), entropy(rate), np.mean(truth))
    ]


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--users", type=int, default=7_000_000)
    parser.add_argument("--items", type=int, default=3_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pushes", type=int, default=6000)
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--tables", choices=OF_TABLES, default="adagrad")
    options = parser.parse_args()
    heights = {"users": options.users, "items": options.items}
    tx = make_tx(options.max_staleness, options.tables)
    server = gx.ParameterServer(make_params(heights), tx)
    start = time.perf_counter()
    train(server, heights, options.workers, options.pushes)
    seconds = time.perf_counter() - start
    stats, losses = server.stats(), evaluate(server, heights)
    part, _ = server.pull(rows=rows_of(next(batches(heights, seed=1))))
    size = sum(4 * WIDTH * height for height in heights.values())
    row = {
        "name": f"{sum(heights.values()):,} rows, {options.workers} workers",
        **dict(zip(("loss", "of a constant", "of the truth"), losses, strict=True)),
        "dropped": stats.dropped,
        "mean staleness": round(
            sum(k * v for k, v in stats.staleness.items()) / options.pushes, 2
        ),
        "pushes/s": round(options.pushes / seconds, 1),
        "tables [MB]": round(size / 1e6),
        "pulled [MB]": round(sum(x.nbytes for x in jax.tree.leaves(part)) / 1e6, 2),
        "peak [MB]": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    report("two towers on simulated clicks", [row], options.json)


if __name__ == "__main__":
    main()
