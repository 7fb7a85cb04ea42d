"""What the parameter server costs: pushes per second against the bare jitted step.

``python -m benchmarks.server`` pushes the same gradients of a model of 1M parameters,
clip and Adagrad behind ``drop_stale``: in a loop over the compiled step, through a
server, and through a server that is pulled from before every push.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

import gradxform as gx

SHAPES = {f"layer{i}": (256, 256) for i in range(15)} | {"bias": (16960,)}
TX = gx.drop_stale(gx.adagrad(0.1, global_clipnorm=1.0), max_staleness=2)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def bare_step(params, state, grads, local_step):
    """The step that the server runs, without the server."""
    return gx.apply_gradients(TX, grads, state, params, local_step=local_step)


def bare(params, grads, pushes):
    """Pushes in a loop; waits for the last one alone."""
    params = jax.tree.map(jnp.copy, params)
    state = TX.init(params)
    start = time.perf_counter()
    for number in range(pushes):
        params, state = bare_step(params, state, grads, number)
    jax.block_until_ready(params)
    return pushes / (time.perf_counter() - start)


def served(params, grads, pushes, pull):
    """Pushes to a server, each with a result that says what became of it."""
    server = gx.ParameterServer(params, TX)
    start = None
    for number in range(pushes + 1):
        if pull:
            server.pull()
        server.push(grads, number)
        start = start or time.perf_counter()  # The first push compiles.
    return pushes / (time.perf_counter() - start)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=1000)
    options = parser.parse_args()
    params = {k: jnp.ones(s) for k, s in SHAPES.items()}
    grads = {k: jnp.full(s, 1e-3) for k, s in SHAPES.items()}
    ways = {
        "bare step in a loop": bare,
        "server": functools.partial(served, pull=False),
        "server, pulled each time": functools.partial(served, pull=True),
    }
    bare(params, grads, 1)  # Compiles.
    rates = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            rates[name].append(way(params, grads, options.pushes))
    print(
        f"{'pushes a second':26}{'best':>8}{'median':>8}{'of bare: best, median':>24}"
    )
    reference = rates["bare step in a loop"]
    for name, measured in rates.items():
        best, median = max(measured), statistics.median(measured)
        print(
            f"{name:26}{best:8.0f}{median:8.0f}{best / max(reference):16.2f}"
            f"{median / statistics.median(reference):8.2f}"
        )


if __name__ == "__main__":
    main()
