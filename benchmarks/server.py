"""The cost of the parameter server: pushes per second against the bare jitted step.

``python -m benchmarks.server`` pushes the same gradients of a model of 1M parameters,
with clip and Adagrad behind ``drop_stale``. It does so in a loop over the compiled
step, through a server, and through a server with a pull before every push. Then it
measures what others cost a worker: another worker whose gradients take 0.3 s, and many
that wait for a step.
"""

import concurrent.futures
import contextlib
import functools
import statistics
import threading
import time

import jax
import jax.numpy as jnp

import gradxform as gx
from benchmarks.measure import arguments, report

SHAPES = {f"layer{i}": (256, 256) for i in range(15)} | {"bias": (16960,)}
TX = gx.drop_stale(gx.adagrad(0.1, global_clipnorm=1.0), max_staleness=2)
WAITING = (16, 256, 1000)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def bare_step(params, state, grads, local_step):
    """The step that the server runs, without the server."""
    return gx.apply_gradients(TX, grads, state, params, local_step=local_step)


def bare(params, grads, pushes):
    """Pushes in a loop; waits only for the last one."""
    params = jax.tree.map(jnp.copy, params)
    state = TX.init(params)
    start = time.perf_counter()
    for number in range(pushes):
        params, state = bare_step(params, state, grads, number)
    jax.block_until_ready(params)
    return pushes / (time.perf_counter() - start)


def served(params, grads, pushes, pull):
    """Pushes to a server; each push returns a result."""
    server = gx.ParameterServer(params, TX)
    start = None
    for number in range(pushes + 1):
        if pull:
            server.pull()
        server.push(grads, number)
        start = start or time.perf_counter()  # The first push compiles.
    return pushes / (time.perf_counter() - start)


def on_a_thread(way):
    """Pushes from a thread, as workers do; the main thread would hand them over."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(way).result()


@functools.partial(jax.jit, static_argnums=1)
def slow_gradient(grads, loops):
    """The same gradients, after a computation that keeps one core busy."""
    work = jnp.ones((100, 100)) * grads["bias"][0]
    work = jax.lax.fori_loop(0, loops, lambda _, x: jnp.tanh(x @ x), work)
    return jax.tree.map(lambda g: g + 0 * work[0, 0], grads)


def loops_of(grads, seconds):
    """The number of loops with which the slow gradient takes about this long."""
    trial = 2000
    jax.block_until_ready(slow_gradient(grads, trial))
    start = time.perf_counter()
    jax.block_until_ready(slow_gradient(grads, trial))
    return max(1, round(trial * seconds / (time.perf_counter() - start)))


def beside_straggler(params, grads, seconds, loops, wait_first):
    """Pushes a second of a fast worker beside a slow one, which may wait or not."""
    server = gx.ParameterServer(params, gx.adagrad(0.1))  # No gate: nothing is late.
    server.push(jax.block_until_ready(slow_gradient(grads, loops)), 0)
    stop = threading.Event()

    def straggle():
        while not stop.is_set():
            _, seen = server.pull()
            slow = slow_gradient(grads, loops)
            server.push(jax.block_until_ready(slow) if wait_first else slow, seen)

    straggler = threading.Thread(target=straggle)
    straggler.start()
    pushes, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        server.push(grads, 0)
        pushes += 1
    rate = pushes / (time.perf_counter() - start)
    stop.set()
    straggler.join()
    return rate


def beside_waiting(params, grads, pushes, waiting):
    """Pushes a second while others wait for a step that does not come."""
    server = gx.ParameterServer(params, TX)

    def wait():
        with contextlib.suppress(gx.ServerClosedError):
            server.wait(10**9)

    threads = [threading.Thread(target=wait) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    server.push(grads, 0)
    start = time.perf_counter()
    for number in range(1, pushes + 1):
        server.push(grads, number)
    rate = pushes / (time.perf_counter() - start)
    server.close()
    for thread in threads:
        thread.join()
    return rate


def measure(ways, rounds):
    """The lines of the table; all ways run in turn, and the first is the reference."""
    rates = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            rates[name].append(way())
    first = next(iter(rates.values()))
    for name, measured in rates.items():
        best, median = max(measured), statistics.median(measured)
        yield {
            "name": name,
            "best": round(best),
            "median": round(median),
            "of the first: best": round(best / max(first), 2),
            "of the first: median": round(median / statistics.median(first), 2),
        }


def main():
    """Prints the tables."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--pushes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a slow worker")
    options = parser.parse_args()
    params = {k: jnp.ones(s) for k, s in SHAPES.items()}
    grads = {k: jnp.full(s, 1e-3) for k, s in SHAPES.items()}
    bare(params, grads, 1)  # Compiles.
    args = params, grads, options.pushes
    ways = {
        "bare": functools.partial(bare, *args),
        "server": functools.partial(
            on_a_thread, functools.partial(served, *args, pull=False)
        ),
        "server, pulled each time": functools.partial(
            on_a_thread, functools.partial(served, *args, pull=True)
        ),
        "server, from the main thread": functools.partial(served, *args, pull=False),
    }
    served_by = list(measure(ways, options.rounds))
    report("1M parameters, pushes a second", served_by, options.json)

    loops = loops_of(grads, 0.3)
    args = params, grads, options.seconds, loops
    ways = {
        "waited for by itself": functools.partial(
            beside_straggler, *args, wait_first=True
        ),
        "pushed at once": functools.partial(beside_straggler, *args, wait_first=False),
    }
    report("beside gradients of 0.3 s", list(measure(ways, options.rounds)))

    small = {"w": jnp.ones(100)}
    ways = {
        f"{waiting} waiting": functools.partial(
            beside_waiting, small, small, options.pushes, waiting
        )
        for waiting in (0, *WAITING)
    }
    report("100 parameters", list(measure(ways, options.rounds)))


if __name__ == "__main__":
    main()
