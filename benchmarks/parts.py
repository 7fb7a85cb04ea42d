"""The memory of each process around a server that holds a large table in parts.

``python -m benchmarks.parts`` (extra ``ray``) trains on rows of a table of 64 float32
numbers a row, with row-wise Adagrad, behind a server of several processes. A function
makes the table, so no process ever has all of it. It prints the memory that each
process has for itself at the end, and the most that it had, beside those of an empty
server. ``--limit`` bounds the data of each process to so many gigabytes
(``RLIMIT_DATA``). With a limit below the table's size, ``--server-processes 1`` fails.
"""

import argparse
import logging
import os
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import ray

import gradxform as gx
from gradxform import engines

WIDTH, ROWS = 64, 8192


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


def job_of(height, pushes, limit):
    """A worker that reads rows of a table of this height."""

    def params():
        if limit:  # It is called in each process of the server, before anything else.
            bounded(limit)
        table = jnp.zeros((height, WIDTH))
        return {"table": table, "w": jnp.ones(WIDTH)}

    def loss_fn(params, ids):
        rows = gx.lookup(params["table"], ids)
        return jnp.mean((rows @ params["w"] - 1) ** 2)

    def batch(number):
        return (np.random.default_rng(number).integers(0, height, ROWS),)

    worker = engines.Worker(
        jax.jit(gx.value_and_grad(loss_fn, tables=["table"])),
        batch,
        rows=lambda ids: {"table": ids},
    )
    tx = gx.drop_stale(gx.adagrad(0.1, row_wise=True), 10)
    return engines.Job(params, tx, [worker], pushes)


def measured(height, pushes, processes, limit=None):
    """Losses, and the memory of the server's processes, the worker and this one."""
    job = job_of(height, pushes, limit)
    with engines.ray(job, server_processes=processes) as run:
        losses = [push.loss for push in run.pushes]
        server = getattr(run.server._processes, "_actors", None) or [run.server.actor]
        actors = [*server, *run.workers.values()]
        calls = [each.__ray_call__.remote(lambda _: memory()) for each in actors]
        return losses, ray.get(calls)[: len(server)], memory()


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--height", type=int, default=16_000_000)
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--limit", type=float, help="gigabytes for each process")
    parser.add_argument("--server-processes", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(
        num_cpus=options.server_processes + 1,
        object_store_memory=200 << 20,
        logging_level=logging.ERROR,
        **quiet,
    )
    n = options.server_processes
    # Just large enough to be cut.
    _, empty, _ = measured(5000 * n, options.pushes, n)
    losses, server, driver = measured(options.height, options.pushes, n, options.limit)
    part = options.height * WIDTH * 4 / n / (1 << 20)
    idle = max(now for now, _ in empty)
    print(f"table {part * n:,.0f} MB, part {part:,.0f} MB; empty {idle:,.0f} MB")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    for number, (now, most) in enumerate(server):
        ratio = (now - idle) / part
        print(
            f"process {number}: {now:,.0f} MB, {ratio:.2f} parts; at most {most:,.0f}"
        )
    print(f"driver: {driver[0]:,.0f} MB")


if __name__ == "__main__":
    main()
