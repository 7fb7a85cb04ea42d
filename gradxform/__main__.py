"""The demo: a digit classifier trained by workers that share a parameter server.

Each worker pulls the parameters of a small convolutional net, computes a gradient on a
minibatch of its own, and pushes it to a ``ParameterServer``. The server's
transformation ends in ``chain(clip_by_global_norm, novograd)``. In front of it,
``drop_stale`` drops gradients that come too late, or ``conditional_accumulator`` adds
up the gradients of several workers.

This file makes, from top to bottom: workers, transformation, job, and all of it
together. ``engines`` runs the workers. Options, data and model, and output have modules
of their own in ``_demo``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optax

import gradxform as gx
from gradxform import engines
from gradxform._demo import ctrl_c, report
from gradxform._demo.command_line import Options, fail, parse, say
from gradxform._demo.digits import (
    Digits,
    GradientFunction,
    Model,
    build_model,
    load_digits,
)
from gradxform._server.extras import require

BATCH_SIZE = 64
MAX_NORM = 1.0
# With peak learning rates. Late gradients act like momentum (Mitliagkas et al. 2016,
# https://arxiv.org/abs/1605.09774), so novograd needs less momentum than usual.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "novograd": (functools.partial(gx.novograd, b1=0.9), 0.015),
    "adagrad": (gx.adagrad, 0.2),
}
JITTER = 0.25  # Standard deviation of the logarithm of a duration.


def make_worker(
    gradient: GradientFunction,
    digits: Digits,
    mean_duration: float,
    seed: Sequence[int],
) -> engines.Worker:
    """A worker that draws minibatches of digits, each shifted by at most one pixel.

    Its durations are log-normal around ``mean_duration``, in seconds. Both are
    functions of the gradient's number and of the seed.
    """
    # windows[digit, down, right] is one of nine shifted images; a view, no copies.
    padded = np.pad(digits.images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    median = mean_duration / math.exp(JITTER**2 / 2)

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((*seed, number, 0))
        rows = rng.integers(len(windows), size=BATCH_SIZE)
        down, right = rng.integers(3, size=(2, BATCH_SIZE))
        return windows[rows, down, right], digits.labels[rows]

    def duration(number: int) -> float:
        rng = np.random.default_rng((*seed, number, 1))
        return median * rng.lognormal(sigma=JITTER)

    return engines.Worker(gradient, batch, duration)


def make_optimizer(
    optimizer: str, steps: int, batches: int
) -> optax.GradientTransformation:
    """A clip, and the optimizer that scales the gradients.

    Args:
      optimizer: a key of ``OPTIMIZERS``.
      steps: how many there will be; the learning rate falls to 0 with the last one.
      batches: how many minibatches make a step.
    """
    scale, peak = OPTIMIZERS[optimizer]
    # A mean of n gradients has 1/n of the variance, and there are n times fewer steps:
    # so a higher rate is better.
    peak *= batches**0.5
    # With many workers the first gradients are large and late: at the peak rate the
    # training would diverge.
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    return optax.chain(gx.clip_by_global_norm(MAX_NORM), scale(rate))


def make_job(options: Options, model: Model, digits: Digits) -> engines.Job:
    """The job that the options describe, for any engine."""
    workers = options.workers
    required = {"backup": workers - options.backups, "sync": workers}.get(options.mode)
    batches = required or 1
    steps = max(1, options.steps // batches)
    inner = make_optimizer(options.optimizer, steps, batches)
    if required is None:
        tx = gx.drop_stale(inner, options.max_staleness)
    else:
        tx = gx.conditional_accumulator(inner, required)
    durations = [options.work] * workers
    durations[-1] *= options.straggler
    made = [
        make_worker(model.gradient, digits, duration, (options.seed, index))
        for index, duration in enumerate(durations)
    ]
    return engines.Job(model.params, tx, made, options.steps, required)


def make_run(
    options: Options, job: engines.Job
) -> contextlib.AbstractContextManager[engines.Run]:
    """The engine that the options name, with its checkpoints."""
    more: dict[str, Any] = {}
    if options.checkpoint is not None:
        more["checkpoint"] = engines.Checkpoint(
            options.checkpoint,
            every_seconds=options.checkpoint_every,
            settings=options.settings(),
        )
    if options.engine == "ray":
        for name in ("address", "connect_timeout", "server_processes"):
            more[name] = getattr(options, name)
    return getattr(engines, options.engine)(job, **more)


def cause(error: Exception) -> str:
    """Its text. Ray puts a traceback into that of an error from another process."""
    return str(getattr(error, "cause", error))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, ``sys.argv`` by default."""
    options, pushes = parse(argv), list[engines.Push]()
    with contextlib.ExitStack() as stack:
        try:
            for _, package, extra in options.packages():
                require(package, extra)
            model, digits = build_model(options.seed), load_digits()
            start = time.perf_counter()
            job = make_job(options, model, digits)
            ctrl_c.loaded()
            run = stack.enter_context(make_run(options, job))
            if options.logdir is not None:
                board = stack.enter_context(engines.TensorBoard(options.logdir, run))
        except (ImportError, OSError, ValueError) as error:
            # A package is missing, there is no cluster or no folder, or the folder
            # holds another job.
            fail(cause(error))
        with report.progress(options.steps) as show:
            for push in run.pushes:
                pushes.append(push)
                show(push, run.counts())
                if options.logdir is not None:
                    board(push)
        seconds = time.perf_counter() - start
        params, state = run.server.state().values()

        labels = np.argmax(model.logits(params, digits.test_images), axis=-1)
        text = report.make_report(options, run, pushes, state, seconds)
        if not pushes:
            before = f"all {options.steps} pushes were made before"
            text += f"nothing is left to do: {before}; try more --steps\n"
        text += f"test accuracy {np.mean(labels == digits.test_labels):.3f}\n"
        try:
            say(text)
        finally:  # Also if the reader of the results has gone.
            if options.plot is not None and pushes:
                report.save_plot(options.plot, report.title_of(options), pushes)
        try:
            stack.close()
        except (OSError, ValueError) as error:  # Of orbax, if the disk is full.
            fail(f"argument --checkpoint: the end was not saved: {cause(error)}")


if __name__ == "__main__":
    report.quiet_orbax()
    try:
        main()
    except KeyboardInterrupt:
        ctrl_c.interrupt()
