"""The parameter server over Ray: whole models, and rows of a large table.

``python -m benchmarks.remote`` (extra ``ray``) pulls and pushes models of float32
numbers from one worker. Worker and server have a process each. ``ray.put`` and
``ray.get`` of the same arrays in NumPy run in turn with them. Then a worker reads 8,192
rows of a table with 64 numbers in a row: it pulls the rows, computes the gradient and
pushes, over Ray and to a server in its own process. Bytes are counted, in Ray's
messages and beside them. ``--server-processes 1 2 4`` does only the second part, with
servers of so many processes.
"""

import contextlib
import functools
import logging
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import gradxform as gx
from benchmarks.measure import arguments, interleaved, report, times
from gradxform import engines

LEAVES, WIDTH, ROWS = 10, 64, 8192
SGD = optax.sgd(0.1)


class Server(gx.ParameterServer):
    """A server that also says how much memory its process has for itself."""

    def memory(self):
        """Bytes of its own; Ray's object store does not count, even if it is mapped."""
        with open("/proc/self/status") as file:
            kb = re.search(r"^RssAnon:\s+(\d+) kB", file.read(), re.M)
        return 1024 * int(kb[1])


def start(params, tx):
    """The server as an actor, made from NumPy's arrays."""
    actor = ray.remote(Server).options(max_concurrency=4)
    return actor.remote(jax.device_get(params), tx)


def sent(tree):
    """Bytes in the message that carries a tree through Ray, and beside it."""
    beside = []
    pickled = ray.cloudpickle.dumps(tree, protocol=5, buffer_callback=beside.append)
    return len(pickled), sum(buffer.raw().nbytes for buffer in beside)


def models(numbers, rounds):
    """The rows of the report for a dense model of so many numbers."""
    shapes = {f"layer{i}": (numbers // LEAVES,) for i in range(LEAVES)}
    params = {k: np.ones(shape, np.float32) for k, shape in shapes.items()}
    idle = ray.get(start({"w": np.ones(1)}, SGD).memory.remote())
    server, near = start(params, SGD), gx.ParameterServer(params, SGD)
    pulled, _ = ray.get(server.pull.remote())  # From here on arrays travel as buffers.
    grads = jax.block_until_ready(jax.tree.map(lambda x: 1e-3 * x, pulled))
    in_message, _ = sent(grads)
    del pulled

    def pull():
        jax.block_until_ready(ray.get(server.pull.remote()))

    runs = {  # The order matters: the first pull gets a new version.
        "ray.put and ray.get": lambda: ray.get(ray.put(params)),
        "the step, in process": lambda: near.push(grads, 0),
        "push": lambda: ray.get(server.push.remote(grads, 0)),
        "pull": pull,
        "pull again": pull,
    }
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 3):
        for name, run in runs.items():
            start_of_run = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start_of_run)
    for name, measured in seconds.items():
        row = {"name": f"{numbers / 1e6:g}M: {name}", **times(measured[3:])}
        ours = times(seconds["ray.put and ray.get"][3:], measured[3:])
        yield row | {"of put and get": ours["speed, median"]}
    memory = ray.get(server.memory.remote()) - idle
    yield {
        "name": f"{numbers / 1e6:g}M: the server's own memory",
        "of the model": round(memory / (4 * numbers), 2),
        "bytes in a push": in_message,
    }
    ray.kill(server)


def loss_fn(params, ids):
    """The loss of looked-up rows, from a whole table or a part."""
    rows = gx.lookup(params["table"], ids)
    return jnp.mean((rows @ params["w"] - 1) ** 2)


gradients = jax.jit(gx.value_and_grad(loss_fn, tables=["table"]))


def step_on_rows(pull, push, rng, height):
    """One step of a worker: rows, their gradients, their push."""
    ids = rng.integers(0, height, ROWS)
    params, seen = pull(rows={"table": ids})
    _, grads = jax.block_until_ready(gradients(params, ids))
    push(grads, seen)
    return params, grads


def tables(heights, rounds):
    """The rows of the report for tables of these heights."""
    runs, servers, facts = {}, {}, {}
    tx = gx.drop_stale(gx.adagrad(0.1, row_wise=True), 10)
    for height in heights:
        params = {
            "table": np.zeros((height, WIDTH), np.float32),
            "w": np.ones(WIDTH, np.float32),
        }
        remote = servers[height] = start(params, tx)
        near = gx.ParameterServer(params, tx)
        del params
        methods = {
            "in process": (near.pull, near.push),
            "over Ray": (
                lambda server=remote, **rows: ray.get(server.pull.remote(**rows)),
                lambda *args, server=remote: ray.get(server.push.remote(*args)),
            ),
        }
        for name, (pull, push) in methods.items():
            rng = np.random.default_rng(0)
            run = functools.partial(step_on_rows, pull, push, rng, height)
            runs[f"{height:,} rows: {name}"] = run
            part, grads = run()
            nbytes = [sum(sent(tree)) for tree in (part, grads)]
            facts[f"{height:,} rows: {name}"] = [
                round(n / (4 * WIDTH * ROWS), 2) for n in nbytes
            ]
    seconds = interleaved(runs, rounds)
    for name, measured in seconds.items():
        pulled, pushed = facts[name]
        row = {"name": name, **times(measured)}
        yield row | {"pulled, of the rows": pulled, "pushed": pushed}
    for height, server in servers.items():
        own = ray.get(server.memory.remote()) / (4 * height * WIDTH)
        yield {"name": f"{height:,} rows: memory", "of the table": round(own, 2)}


def groups(processes, height, rounds):
    """The rows of the report for servers of so many processes."""
    params = {
        "table": np.zeros((height, WIDTH), np.float32),
        "w": np.ones(WIDTH, np.float32),
    }
    tx = gx.drop_stale(gx.adagrad(0.1, row_wise=True), 10)
    job = engines.Job(params, tx, [engines.Worker(gradients)], pushes=1)
    runs = {}
    with contextlib.ExitStack() as stack:
        for n in processes:
            run = stack.enter_context(engines.ray(job, server_processes=n))
            server = run.server  # This process is its worker.
            rng = np.random.default_rng(0)
            step = functools.partial(
                step_on_rows, server.pull, server.push, rng, height
            )
            step()
            runs[f"{height:,} rows: server of {n}"] = step
        seconds = interleaved(runs, rounds)
    first = next(iter(seconds.values()))
    for name, measured in seconds.items():
        ratio = times(first, measured)["speed, median"]
        yield {"name": name, **times(measured), "of the first": ratio}


def main():
    """Prints the tables."""
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--numbers", type=float, nargs="*", default=[1e6, 25e6, 100e6])
    parser.add_argument("--heights", type=int, nargs="*", default=[100_000, 10_000_000])
    parser.add_argument("--server-processes", type=int, nargs="*", default=[])
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"include_dashboard": False, "log_to_driver": False}
    ray.init(
        num_cpus=4 + 2 * sum(options.server_processes),
        logging_level=logging.ERROR,
        **quiet,
    )
    if options.server_processes:
        height, *_ = options.heights
        rows = list(groups(options.server_processes, height, options.rounds))
        report("a worker, and servers of several processes", rows, options.json)
        return
    rows = [row for n in options.numbers for row in models(int(n), options.rounds)]
    if options.heights:
        rows += tables(options.heights, options.rounds)
    report("a worker and a server in two processes", rows, options.json)


if __name__ == "__main__":
    main()
