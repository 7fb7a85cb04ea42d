"""A recommender on tables that one process may not hold, and memory of each process.

``python -m benchmarks.parts`` (extra ``ray``) trains the two towers of
``benchmarks.recommender`` with rows of 64 float32 numbers, behind a server of several
processes. A function makes the tables column by column, so no process ever has all of
them, and none needs much more than its part. It prints the losses, the memory that each
process has for itself at the end, and the most that it had, beside those of a small
table. ``--limit`` bounds the data of each process of the server to so many gigabytes
(``RLIMIT_DATA``). With a limit below the size of the tables, ``--server-processes 1``
fails, and the program exits with 1.
"""

import argparse
import functools
import logging
import os
import re
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import ray

from benchmarks import recommender
from gradxform import engines

WIDTH = 64


def memory():
    """Megabytes that this process has for itself now, and its largest total so far."""
    with open("/proc/self/status") as file:
        text = file.read()
    return [
        int(re.search(rf"^{name}:\s+(\d+) kB", text, re.M)[1]) / 1024
        for name in ("RssAnon", "VmHWM")
    ]


def bounded(gigabytes):
    """Called in a process of the server, which may have no more than this."""
    limit = int(gigabytes * (1 << 30))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def table(seed, height):
    """Small numbers, by columns: made at once, they need four times the memory."""

    def column(number, made):
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = 0.05 * jax.random.normal(key, (height, 1))
        return jax.lax.dynamic_update_slice(made, drawn, (0, number))

    return jax.lax.fori_loop(0, WIDTH, column, jnp.zeros((height, WIDTH)))


def job_of(height, pushes, limit):
    """Workers that read rows of tables of this height together."""
    heights = {"users": 7 * height // 10, "items": height - 7 * height // 10}

    def params():
        if limit and ray.get_runtime_context().get_actor_id():  # Not the driver.
            bounded(limit)
        made = {
            name: jax.jit(functools.partial(table, seed, rows))()
            for seed, (name, rows) in enumerate(heights.items())
        }
        layer = np.random.default_rng(0).standard_normal
        for name in heights:
            shape = WIDTH, recommender.HIDDEN
            made[f"{name}_layer"] = jnp.asarray(layer(shape, np.float32) / WIDTH**0.5)
        return made | {"bias": jnp.float32(0.0)}

    def batch(number):
        return (next(recommender.batches(heights, number)),)

    worker = engines.Worker(recommender.by_rows, batch, rows=recommender.rows_of)
    return engines.Job(params, recommender.make_tx(8), [worker] * 2, pushes)


def measured(height, pushes, processes, limit=None):
    """Losses, and the memory of the server's processes, the workers and this one."""
    job = job_of(height, pushes, limit)
    with engines.ray(job, server_processes=processes) as run:
        losses = [push.loss for push in run.pushes]
        server = getattr(run.server._processes, "_actors", None) or [run.server.actor]
        actors = [*server, *run.workers.values()]
        each = ray.get([x.__ray_call__.remote(lambda _: memory()) for x in actors])
        return losses, each[: len(server)], [*each[len(server) :], memory()]


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--height", type=int, default=16_000_000)
    parser.add_argument("--pushes", type=int, default=300)
    parser.add_argument("--limit", type=float, help="gigabytes for each process")
    parser.add_argument("--server-processes", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(
        num_cpus=options.server_processes + 2,
        object_store_memory=200 << 20,
        logging_level=logging.ERROR,
        **quiet,
    )
    n = options.server_processes
    # Just large enough to be cut.
    _, empty, _ = measured(20_000 * n, 20, n)
    size = options.height * WIDTH * 4 / (1 << 20)
    idle = max(now for now, _ in empty)
    print(f"tables {size:,.0f} MB, part {size / n:,.0f} MB; empty {idle:,.0f} MB")
    start = time.perf_counter()
    try:
        losses, server, rest = measured(
            options.height, options.pushes, n, options.limit
        )
    except (ray.exceptions.RayError, RuntimeError, MemoryError) as error:
        said = str(error).strip().splitlines()
        seconds = time.perf_counter() - start
        print(f"failed after {seconds:.0f} s: {type(error).__name__}", *said, sep="\n")
        sys.exit(1)
    first, *_, last = np.array_split(losses, 10)
    print(f"loss {np.mean(first):.4f} -> {np.mean(last):.4f}, {len(losses)} pushes")
    for number, (now, most) in enumerate(server):
        ratio = (now - idle) / (size / n)
        print(
            f"process {number}: {now:,.0f} MB, {ratio:.2f} parts; at most {most:,.0f}"
        )
    for name, (now, most) in zip(("worker", "worker", "driver"), rest, strict=True):
        print(f"{name}: {now:,.0f} MB; at most {most:,.0f}")


if __name__ == "__main__":
    main()
