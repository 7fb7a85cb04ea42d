"""Costs of the first step and of later steps on the host, by the number of leaves.

``python -m benchmarks.compile --model gpt2_small 148 1000 2000 --dtype bfloat16`` takes
models by their names. A number stands for a tree of so many leaves with 256 numbers
each. It runs on the CPU, or on a GPU if there is one. In each round every chain makes
its first step again, all in turn, after JAX's caches were cleared. The figures are
minima over the rounds, in seconds of all cores together except for the last column:

- ``equations``: of the traced step. Those of an inner function count at each call.
- ``trace s``, ``compile s``: of the donated step; lowering counts as compiling.
- ``first s``: everything from ``tx.init`` to the end of the first step.
- ``step ms``: a step by the clock, the minimum of 40. On small leaves memory does not
  limit it: for most of the time the host hands buffers in and out. The first row does
  only that.

``x`` columns are the time of the reference chain divided by the chain's own.
"""

import functools
import random
import time

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.measure import arguments, draw, in_place, interleaved, report
from benchmarks.models import tree
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
# The way in which the step is written, the chain, and the name of its reference.
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


def equations(jaxpr):
    """The number of equations, with those of each inner jaxpr."""
    parameters = jax.tree.leaves([eqn.params for eqn in jaxpr.eqns])
    inner = [x for x in parameters if hasattr(x, "eqns")]
    return len(jaxpr.eqns) + sum(map(equations, inner))


def first_step(name, grads):
    """The compiled step of a chain, its equations, and the seconds of its first run."""
    write, tx, _ = CHAINS[name]
    step = jax.jit(functools.partial(write, tx), donate_argnums=(0, 1))
    params = jax.block_until_ready(jax.tree.map(jnp.copy, grads))
    jax.clear_caches()
    start = time.process_time()
    state = tx.init(params)
    made = time.process_time()
    traced = step.trace(params, state, grads)
    seen = time.process_time()
    compiled = traced.lower().compile()
    ready = time.process_time()
    jax.block_until_ready(compiled(params, state, grads))
    seconds = {
        "trace s": seen - made,
        "compile s": ready - seen,
        "first s": time.process_time() - start,
    }
    return compiled, equations(traced.jaxpr), seconds


def measure(model, shapes, rounds):
    """The lines of the table for one model."""
    grads = draw(shapes, 0)
    seconds = {name: [] for name in CHAINS}
    steps, counted, order = {}, {}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(CHAINS), len(CHAINS)):
            steps[name], counted[name], taken = first_step(name, grads)
            seconds[name].append(taken)
    runs = {
        name: in_place(
            steps[name], (jax.tree.map(jnp.copy, grads), tx.init(grads)), grads
        )
        for name, (_, tx, _) in CHAINS.items()
    }
    stepped = interleaved(runs, STEPS)
    best = {
        name: {key: min(each[key] for each in taken) for key in taken[0]}
        | {"step ms": min(stepped[name]) * 1e3}
        for name, taken in seconds.items()
    }
    for name, (_, _, against) in CHAINS.items():
        line = {"name": f"{model}: {name}", "equations": counted[name]}
        line |= {key: round(value, 3) for key, value in best[name].items()}
        if against:
            for key, ours in best[name].items():
                line[f"x {key.split()[0]}"] = round(best[against][key] / ours, 2)
            line["against"] = against
        yield line


def main():
    """Prints the table."""
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--model", nargs="+", default=["100", "1000", "2000"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    lines = [
        line
        for model in options.model
        for line in measure(model, tree(model, options.dtype), options.rounds)
    ]
    report(f"the first step and the others, {options.dtype}", lines, options.json)


if __name__ == "__main__":
    main()
