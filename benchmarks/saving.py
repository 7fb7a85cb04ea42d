"""The cost of checkpoints and TensorBoard: pushes a second with and without them.

``python -m benchmarks.saving`` (extras ``demo``, ``checkpoint`` and ``tensorboard``)
runs the workers of the demo on threads at full speed. One run saves every five
seconds and logs every second, the next does neither, in turns. ``--numbers N`` adds so
many float32 numbers to the server's model; the workers do not use them.
"""

import argparse
import contextlib
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from gradxform import __main__ as main_job
from gradxform import engines

EVERY = 5.0


def rate(job, seconds, folder):
    """Pushes a second from the first one on; with a folder, saves and logs there."""
    checkpoint = folder and engines.Checkpoint(f"{folder}/run", every_seconds=EVERY)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(engines.threads(job, checkpoint=checkpoint))
        board = None
        if folder:
            board = stack.enter_context(engines.TensorBoard(f"{folder}/logs", run))
        start = None
        for count, push in enumerate(run.pushes):
            if board:
                board(push)
            now = time.perf_counter()
            start = start or now
            if now - start >= seconds:
                return count / (now - start)


def main():
    """Prints the rates, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a run")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--numbers", type=int, default=0, help="added to the model")
    options = parser.parse_args()
    model, digits = main_job.build_model(0), main_job.load_digits()
    args = main_job.parse(["--work", "0.001"])
    job = main_job.make_job(args, model, digits)
    if options.numbers:
        job = enlarge(job, options.numbers)
    job = job._replace(pushes=10**9)
    rate(job, 1.0, None)  # Compiles it.
    rates = {"without": [], "with": []}
    for _ in range(options.rounds):
        for name, measured in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                kept = folder if name == "with" else None
                measured.append(rate(job, options.seconds, kept))
    for name, measured in rates.items():
        shown = " ".join(f"{each:.0f}" for each in measured)
        print(f"{name:8}{statistics.median(measured):7.0f} pushes a second  ({shown})")
    ratio = statistics.median(
        after / before
        for before, after in zip(rates["without"], rates["with"], strict=True)
    )
    print(f"with / without: {ratio:.3f} (median of pairs)")


def enlarge(job, numbers):
    """The same job beside parameters that get no gradients."""

    def beside(gradient):
        def call(params, *batch):
            loss, grads = gradient(params["model"], *batch)
            return loss, {"model": grads, "more": None}

        return call

    workers = [each._replace(gradient=beside(each.gradient)) for each in job.workers]
    params = {"model": job.params, "more": jnp.ones(numbers)}
    return job._replace(params=jax.block_until_ready(params), workers=workers)


if __name__ == "__main__":
    main()
