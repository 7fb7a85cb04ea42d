"""Seconds to trace and to compile the donated step, by the number of leaves.

``python -m benchmarks.compile --leaves 100 1000 2000`` takes trees of leaves of 256
float32 numbers each. Every chain is traced (lowered too) and compiled anew in each
round, all in turn, with JAX's caches cleared before; minima over the rounds. The last
column is the step itself, minimum of 40. At this size it is not bound by memory: most
of it is the host handing buffers in and out, which the first row does alone.
"""

import functools
import random
import time

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.measure import arguments, draw, in_place, interleaved, report
from benchmarks.models import small_leaves
from benchmarks.step import (
    CLIP,
    OPTAX_ADAGRAD,
    OPTAX_NOVOGRAD,
    gx_step,
    optax_step,
)

STEPS = 40  # Timed steps of each chain.


def no_step(tx, params, state, grads):
    """Buffers in and out."""
    del tx, grads
    return params, state


NOVOGRAD = gx.novograd(0.1, global_clipnorm=1.0)
# How the step is written, the chain, and the name of what it is held against.
CHAINS = {
    "buffers in and out": (no_step, gx.adagrad(0.1), None),
    "optax clip + adagrad": (optax_step, OPTAX_ADAGRAD, None),
    "gx clip + adagrad": (
        gx_step,
        optax.chain(CLIP, gx.adagrad(0.1)),
        "optax clip + adagrad",
    ),
    "optax clip + novograd": (optax_step, OPTAX_NOVOGRAD, None),
    "gx clip + novograd": (
        gx_step,
        optax.chain(CLIP, gx.novograd(0.1)),
        "optax clip + novograd",
    ),
    "gx novograd(global_clipnorm)": (gx_step, NOVOGRAD, "optax clip + novograd"),
}


def compile_step(name, shapes):
    """The compiled step of a chain, and the seconds of tracing and of compiling."""
    step, tx, _ = CHAINS[name]
    step = functools.partial(step, tx)
    state = jax.eval_shape(tx.init, shapes)
    jax.clear_caches()
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state, shapes)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, traced - start, time.perf_counter() - traced


def measure(leaves, rounds):
    """The lines of the table for trees of so many leaves."""
    shapes = small_leaves(leaves)
    seconds = {name: [] for name in CHAINS}
    steps, order = {}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(CHAINS), len(CHAINS)):
            steps[name], *both = compile_step(name, shapes)
            seconds[name].append(both)
    grads = draw(shapes, 0)
    runs = {
        name: in_place(
            steps[name], (jax.tree.map(jnp.copy, grads), tx.init(grads)), grads
        )
        for name, (_, tx, _) in CHAINS.items()
    }
    stepped = interleaved(runs, STEPS)
    best = {
        name: (*map(min, zip(*seconds[name], strict=True)), min(stepped[name]))
        for name in CHAINS
    }
    for name, (_, _, against) in CHAINS.items():
        traced, compiled, step = best[name]
        line = {
            "name": f"{leaves:,} leaves: {name}",
            "trace s": round(traced, 2),
            "compile s": round(compiled, 2),
            "step ms": round(step * 1e3, 3),
        }
        if against:
            for word, ours, theirs in zip(
                ("trace", "compile", "step"), best[name], best[against], strict=True
            ):
                line[f"x {word}"] = round(theirs / ours, 2)
            line["against"] = against
        yield line


def main():
    """Prints the table."""
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 1000, 2000])
    options = parser.parse_args()
    lines = [line for n in options.leaves for line in measure(n, options.rounds)]
    report("tracing and compiling one step", lines, options.json)


if __name__ == "__main__":
    main()
