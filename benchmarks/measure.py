"""The common parts of benchmarks: interleaved timing, bandwidth, models, the report."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import random
import statistics
import time

import jax
import jax.numpy as jnp


def arguments(description, rounds=None):
    """The options of every benchmark, and ``--rounds`` for those that repeat."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if rounds is not None:
        how = "runs of each row"
        parser.add_argument("--rounds", type=int, default=rounds, help=how)
    parser.add_argument("--json", type=pathlib.Path, help="also write the table here")
    return parser


def interleaved(runs, rounds):
    """Seconds of each run in each round, after one round that does not count.

    Args:
      runs: functions without arguments that return when their work is done, by name.
      rounds: how often each of them runs.

    Each round runs all of them in a new order: the time of a run depends on what ran
    before it, and a noisy machine is equally noisy for all.
    """
    seconds = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def in_place(compiled, model, *rest, **extra):
    """A run of a compiled, donated ``step(*model, *rest) -> model`` on this model."""
    model = list(model)

    def run():
        model[:] = jax.block_until_ready(compiled(*model, *rest, **extra))

    return run


def bandwidth(nbytes):
    """A run that reads and writes an array of so many bytes in place.

    It goes into the same interleaved run as what is held against it; the bandwidth is
    ``2 * nbytes`` by its fastest round.
    """
    add_one = jax.jit(lambda x: [x + 1], donate_argnums=0)
    return in_place(add_one, [jnp.zeros(nbytes // 4, jnp.float32)])


def times(seconds, against=None):
    """Minimum and median in ms, and the ratios of a reference to them."""
    columns = {
        "min ms": round(min(seconds) * 1e3, 3),
        "median ms": round(statistics.median(seconds) * 1e3, 3),
    }
    if against is not None:
        columns["speed, min"] = round(min(against) / min(seconds), 2)
        medians = statistics.median(against), statistics.median(seconds)
        columns["speed, median"] = round(medians[0] / medians[1], 2)
    return columns


def versions():
    """The versions of the measured packages; None for those not installed."""
    found = {}
    for name in ("jax", "optax", "torch", "keras"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def report(title, rows, path=None, **facts):
    """Prints rows, dicts of columns with a "name" each, as a table; writes them.

    Facts that hold for all rows, such as the bandwidth, stand beside them in the JSON.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[str(row.get(key, "")) for key in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(title)
    for line in cells:
        first, *rest = zip(line, widths, strict=True)
        aligned = [first[0].ljust(first[1])] + [cell.rjust(w) for cell, w in rest]
        print("  ".join(aligned).rstrip())
    print()
    if path:
        measured = {
            "title": title,
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "cpus": os.cpu_count(),
            "versions": versions(),
            **facts,
            "rows": rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=1) + "\n")


def draw(shapes, seed):
    """Normal numbers in the given shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        k: jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
        for key, (k, x) in zip(keys, shapes.items(), strict=True)
    }
