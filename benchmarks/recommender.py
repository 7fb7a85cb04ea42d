"""Trains a recommender with tables of 10 million rows; no worker holds the tables.

``python -m benchmarks.recommender`` makes clicks of users on items. Both are drawn from
a long tail as in Criteo's logs (Zipf; seeded). It trains two towers on them: the row of
a user and the row of an item, each with its popularity, go through a dense layer each.
Their product gives the chance of a click. Four threads pull the rows that their batch
reads, compute, and push late to one ``ParameterServer``: clip, then row-wise Adagrad
for the tables and AdamW for the rest. With ``--tables adamw`` the tables have AdamW,
too: ``gx.lazy`` runs it on the rows of a push.

``--server-processes 4`` (extra ``ray``) takes rows of 64 numbers, and a server of four
processes. A function makes the tables column by column, so no process ever has all of
them, and none needs much more than its part. The table has the memory that each process
has for itself at the end, and the most that it had. ``--limit`` bounds the data of each
process of the server to so many gigabytes (``RLIMIT_DATA``). With a limit below the
size of the tables, one process fails, and the program exits with 1.
"""

import argparse
import concurrent.futures
import functools
import itertools
import logging
import math
import os
import re
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from benchmarks.measure import arguments, report
from gradxform import engines

WIDTH, WIDE, HIDDEN, TASTES, BATCH = 16, 64, 32, 4, 4096
TABLES = ("items", "users")
OF_TABLES = {
    "adagrad": gx.adagrad(0.1, 0.0, 1e-12, row_wise=True),
    "adamw": gx.lazy(optax.adamw(3e-3)),
}


def make_tx(max_staleness, tables="adagrad"):
    """The common recipe: an optimizer by the row for tables, AdamW for the rest."""
    optimizers = {
        "table": OF_TABLES[tables],
        "rest": optax.adamw(3e-3),
    }
    labels = dict.fromkeys((*map("{}_layer".format, TABLES), "bias"), "rest")
    each = optax.partition(optimizers, labels | dict.fromkeys(TABLES, "table"))
    return gx.drop_stale(optax.chain(gx.clip_by_global_norm(1.0), each), max_staleness)


def table(seed, height, width):
    """Small numbers, by columns: made at once, they need four times the memory."""

    def column(number, made):
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = 0.05 * jax.random.normal(key, (height, 1))
        return jax.lax.dynamic_update_slice(made, drawn, (0, number))

    return jax.lax.fori_loop(0, width, column, jnp.zeros((height, width)))


def make_params(heights, width=WIDTH):
    """The tables, and the two dense layers."""
    params = {
        name: jax.jit(functools.partial(table, seed, height, width))()
        for seed, (name, height) in enumerate(heights.items())
    }
    layer = np.random.default_rng(0).standard_normal
    for name in TABLES:
        drawn = layer((width, HIDDEN), np.float32)
        params[f"{name}_layer"] = jnp.asarray(drawn / width**0.5)
    return params | {"bias": jnp.float32(0.0)}


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


# A server of several processes.


def memory():
    """Megabytes that this process has for itself now, and its largest total so far."""
    with open("/proc/self/status") as file:
        text = file.read()
    return [
        int(re.search(rf"^{name}:\s+(\d+) kB", text, re.M)[1]) / 1024
        for name in ("RssAnon", "VmHWM")
    ]


def job_of(heights, options):
    """Workers that read rows of these tables."""
    import ray

    def params():
        # In an actor, and so not in the driver.
        if options.limit and ray.get_runtime_context().get_actor_id():
            limit = int(options.limit * (1 << 30))
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return make_params(heights, WIDE)

    worker = engines.Worker(
        by_rows, lambda number: (next(batches(heights, number)),), rows=rows_of
    )
    tx = make_tx(options.max_staleness)
    return engines.Job(params, tx, [worker] * options.workers, options.pushes)


def in_processes(heights, options):
    """Losses, and the memory of the server's processes, the workers and this one."""
    import ray

    count = options.server_processes
    with engines.ray(job_of(heights, options), server_processes=count) as run:
        losses = [push.loss for push in run.pushes]
        # A server of several processes has no public name for them.
        server = getattr(run.server._processes, "_actors", None) or [run.server.actor]
        actors = [*server, *run.workers.values()]
        each = ray.get([x.__ray_call__.remote(lambda _: memory()) for x in actors])
        return losses, each[: len(server)], [*each[len(server) :], memory()]


def rows_in_processes(heights, options):
    """The lines of the table: the memory of each process."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    count = options.server_processes
    ray.init(
        num_cpus=count + options.workers,
        object_store_memory=200 << 20,
        logging_level=logging.ERROR,
        include_dashboard=False,
        log_to_driver=False,
    )
    # These tables are just large enough to be cut.
    small = dict.fromkeys(heights, 10000 * count)
    quick = argparse.Namespace(**{**vars(options), "pushes": 20, "limit": None})
    _, empty, _ = in_processes(small, quick)
    idle = max(now for now, _ in empty)
    start = time.perf_counter()
    try:
        losses, server, rest = in_processes(heights, options)
    except (ray.exceptions.RayError, RuntimeError, MemoryError) as error:
        seconds = time.perf_counter() - start
        print(f"failed after {seconds:.0f} s: {type(error).__name__}", error, sep="\n")
        sys.exit(1)
    first, *_, last = (float(np.mean(part)) for part in np.array_split(losses, 10))
    part = sum(heights.values()) * WIDE * 4 / (1 << 20) / count
    yield {
        "name": f"a part of {part:,.0f} MB",
        "first loss": f"{first:.4f}",
        "last": f"{last:.4f}",
        "now [MB]": round(idle),
    }
    names = [f"process {n}" for n in range(count)]
    for name, (now, most) in zip(names, server, strict=True):
        parts = round((now - idle) / part, 2)
        yield {
            "name": name,
            "now [MB]": round(now),
            "parts": parts,
            "peak [MB]": round(most),
        }
    names = [*["worker"] * options.workers, "driver"]
    for name, (now, most) in zip(names, rest, strict=True):
        yield {"name": name, "now [MB]": round(now), "peak [MB]": round(most)}


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--users", type=int, default=7_000_000)
    parser.add_argument("--items", type=int, default=3_000_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pushes", type=int, default=6000)
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--tables", choices=OF_TABLES, default="adagrad")
    parser.add_argument("--server-processes", type=int, default=0)
    parser.add_argument("--limit", type=float, help="gigabytes for each of them")
    options = parser.parse_args()
    heights = {"users": options.users, "items": options.items}
    if options.server_processes:
        rows = list(rows_in_processes(heights, options))
        report("two towers, and memory of each process", rows, options.json)
        return
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
