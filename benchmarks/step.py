"""The donated step on GPT-2-small (124M float32 parameters): ours against optax's.

``python -m benchmarks.step`` interleaves all chains in one run and prints, for each,
what the compiler says (temporaries and bytes accessed, in units of the parameters' size
N; exact) and what the clock says (minimum and median; on a shared machine only the
ratios count). A gate is timed on fresh and on stale pushes.
"""

import argparse
import random
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.models import gpt2_small, size

FRESH, STALE = 2**30, -(2**30)  # Local steps ahead of all, and behind all.


class Row(NamedTuple):
    """One line of the table."""

    name: str
    tx: optax.GradientTransformation
    against: str | None = None  # The row whose time is divided by this one's.
    local_step: int = FRESH


OPTAX_CLIP = optax.clip_by_global_norm(1.0)
CLIP = gx.clip_by_global_norm(1.0)
ADAGRAD = gx.adagrad(0.1, global_clipnorm=1.0)
NOVOGRAD = gx.novograd(0.1, global_clipnorm=1.0)
ROWS = [
    Row("optax clip + adagrad", optax.chain(OPTAX_CLIP, optax.adagrad(0.1))),
    Row("clip + adagrad", optax.chain(CLIP, gx.adagrad(0.1)), "optax clip + adagrad"),
    Row("adagrad(global_clipnorm)", ADAGRAD, "optax clip + adagrad"),
    Row("drop_stale, fresh", gx.drop_stale(ADAGRAD, 1), "adagrad(global_clipnorm)"),
    Row(
        "drop_stale, stale",
        gx.drop_stale(ADAGRAD, 1),
        "adagrad(global_clipnorm)",
        STALE,
    ),
    Row("optax clip + novograd", optax.chain(OPTAX_CLIP, optax.novograd(0.1))),
    Row(
        "clip + novograd", optax.chain(CLIP, gx.novograd(0.1)), "optax clip + novograd"
    ),
    Row("novograd(global_clipnorm)", NOVOGRAD, "optax clip + novograd"),
    # Sums that are never full, and one that always is.
    Row(
        "MultiSteps, adding",
        optax.MultiSteps(
            optax.chain(OPTAX_CLIP, optax.adagrad(0.1)), 2**20
        ).gradient_transformation(),
    ),
    Row(
        "accumulator, adding",
        gx.conditional_accumulator(ADAGRAD, 2**20),
        "MultiSteps, adding",
    ),
    Row(
        "accumulator, acting",
        gx.conditional_accumulator(ADAGRAD, 1),
        "adagrad(global_clipnorm)",
    ),
]


def compile_step(tx, params):
    """The whole step, compiled from shapes, with parameters and state donated."""

    def step(params, state, grads, local_step):
        gated = isinstance(tx, gx.GatedTransformation)
        extra = {"local_step": local_step} if gated else {}
        return gx.apply_gradients(tx, grads, state, params, **extra)

    step = jax.jit(step, donate_argnums=(0, 1))
    state = jax.eval_shape(tx.init, params)
    return step.lower(params, state, params, jnp.int32(0)).compile()


def draw(shapes, seed):
    """Normal numbers in the given shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        k: jax.random.normal(key, x.shape, x.dtype)
        for key, (k, x) in zip(keys, shapes.items(), strict=True)
    }


def measure(rows, rounds):
    """Compiled steps and lists of seconds by row, all rows in turn in each round."""
    shapes = gpt2_small()
    grads = draw(shapes, 0)
    steps = {row.name: compile_step(row.tx, shapes) for row in rows}
    models, seconds = {}, {row.name: [] for row in rows}
    for row in rows:
        params = draw(shapes, 1)
        models[row.name] = params, row.tx.init(params)
    order = random.Random(0)
    for _ in range(rounds):
        # Shuffled: a row's time depends on what ran before it.
        for row in order.sample(rows, len(rows)):
            local_step = jnp.int32(row.local_step)
            start = time.perf_counter()
            models[row.name] = jax.block_until_ready(
                steps[row.name](*models[row.name], grads, local_step)
            )
            seconds[row.name].append(time.perf_counter() - start)
    return steps, seconds


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="runs of each row")
    parser.add_argument("--only", default="", help="rows whose names hold this word")
    options = parser.parse_args()
    names = {row.name for row in ROWS if options.only in row.name}
    names |= {row.against for row in ROWS if row.name in names}
    rows = [row for row in ROWS if row.name in names]
    steps, seconds = measure(rows, options.rounds)
    n = size(gpt2_small())
    print(f"{jax.devices()[0].device_kind}, N = {n / 1e6:.0f} MB")
    print(f"{'':26}{'temp/N':>8}{'bytes/N':>9}{'min ms':>8}{'median':>8}{'speed':>7}")
    for row in rows:
        temporary = steps[row.name].memory_analysis().temp_size_in_bytes / n
        accessed = steps[row.name].cost_analysis()["bytes accessed"] / n
        fastest = min(seconds[row.name])
        median = statistics.median(seconds[row.name])
        line = f"{row.name:26}{temporary:8.3f}{accessed:9.2f}"
        line += f"{fastest * 1e3:8.1f}{median * 1e3:8.1f}"
        if row.against:
            line += f"{min(seconds[row.against]) / fastest:7.2f} x {row.against}"
        print(line)


if __name__ == "__main__":
    main()
