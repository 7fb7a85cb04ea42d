"""The demo: a digit classifier trained by workers that share a parameter server.

Each worker pulls the parameters of a small convolutional net, computes a gradient on a
minibatch of its own, and pushes it to a ``ParameterServer``. The server's
transformation ends in ``chain(clip_by_global_norm, novograd)``. In front of it,
``drop_stale`` drops gradients that come too late, or ``conditional_accumulator`` adds
up the gradients of several workers. In mode ``local`` each worker has such a chain for
its ``local_steps``, and ``delayed_nesterov`` takes their pushes.

This file makes, from top to bottom: workers, transformation, job, Ctrl-C, and all of it
together. ``engines`` runs the workers. Options, data and model, and output have modules
of their own in ``_demo``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

import gradxform as gx
from gradxform import engines
from gradxform._demo import listing
from gradxform._demo.command_line import ENGINES, OPTIMIZERS, make_parser, settings_of
from gradxform._demo.digits import Digits, Model, build_model, load_digits
from gradxform._demo.report import print_report, save_plot, track
from gradxform._server.extras import require

LossAndGrads: TypeAlias = tuple[jax.Array, optax.Updates]

BATCH_SIZE = 64
MAX_NORM = 1.0
JITTER = 0.25  # Standard deviation of the logarithm of a duration.

# For mode local: rate and decay of the outer optimizer; here, too, lateness acts like
# momentum. UNROLLED is how many local steps are compiled without a loop: a convolution
# in a loop is slow on CPU, and to compile many of them is slow, too.
OUTER = 1.0, 0.5
UNROLLED = 20


def make_worker(
    model: Model,
    digits: Digits,
    mean_duration: float,
    seed: Sequence[int],
    *batches: int,
) -> engines.Worker:
    """A worker that draws random digits, each shifted by at most one pixel.

    It draws a minibatch, or an array of minibatches with the shape ``batches``. Its
    durations are log-normal around ``mean_duration``, in seconds. Both are functions of
    the gradient's number and of the seed.
    """
    # windows[digit, down, right] is one of nine shifted images; a view, no copies.
    padded = np.pad(digits.images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    median = mean_duration / np.exp(JITTER**2 / 2)
    size = *batches, BATCH_SIZE

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((*seed, number, 0))
        rows = rng.integers(len(windows), size=size)
        down, right = rng.integers(3, size=(2, *size))
        return windows[rows, down, right], digits.labels[rows]

    def duration(number: int) -> float:
        rng = np.random.default_rng((*seed, number, 1))
        return float(median * rng.lognormal(sigma=JITTER))

    return engines.Worker(model.gradient, batch, duration)


def make_local(
    model: Model, tx: optax.GradientTransformation, *, unroll: bool
) -> Callable[[], Model]:
    """Makes models that train by themselves, each with an optimizer of its own.

    A model's gradient takes an array of minibatches. It is how far training on them
    moves the parameters. Its loss is that of the first minibatch.
    """
    steps = gx.local_steps(model.loss, tx, unroll=unroll)

    @functools.partial(jax.jit, donate_argnums=1)
    def train(
        params: optax.Params, state: optax.OptState, *batches: jax.Array
    ) -> tuple[LossAndGrads, optax.OptState]:
        grads, state, losses = steps(params, state, *batches)
        return (losses[0], grads), state

    def own() -> Model:
        state = None

        def gradient(params: optax.Params, *batches: jax.Array) -> LossAndGrads:
            nonlocal state
            if state is None:  # Made here, in the worker's own process.
                state = tx.init(params)
            result, state = train(params, state, *batches)
            return result

        return model._replace(gradient=gradient)

    return own


def make_optimizer(
    optimizer: str, steps: int, batches: int
) -> optax.GradientTransformation:
    """A clip, and the optimizer that scales the gradients.

    Args:
      optimizer: one of ``OPTIMIZERS``.
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


def make_job(args: argparse.Namespace, model: Model, digits: Digits) -> engines.Job:
    """The job that the options describe, for any engine."""
    workers, local = args.workers, args.mode == "local"
    required = {"backup": workers - args.backups, "sync": workers}.get(args.mode)
    length = (args.local_steps,) if local else ()
    batches = workers if local else required or 1
    steps = max(1, args.steps * math.prod(length) // batches)
    inner = make_optimizer(args.optimizer, steps, batches)
    models = [model] * workers
    if local:
        own = make_local(model, inner, unroll=args.local_steps <= UNROLLED)
        models = [own() for _ in models]
        outer = gx.delayed_nesterov(*OUTER, num_delay=workers)
        inner = optax.chain(gx.clip_by_global_norm(MAX_NORM), outer)
    if required is None:
        tx = gx.drop_stale(inner, args.max_staleness)
    else:
        tx = gx.conditional_accumulator(inner, required)
    durations = np.full(workers, args.work * math.prod(length))
    durations[-1] *= args.straggler
    return engines.Job(
        model.params,
        tx,
        [
            make_worker(each, digits, duration, (args.seed, index), *length)
            for index, (each, duration) in enumerate(
                zip(models, durations, strict=True)
            )
        ],
        args.steps,
        required,
    )


def end(*_: object) -> NoReturn:
    """Ends the process at once, as Ctrl-C does: with one line and exit code 130.

    An exception could be lost in an import or a destructor. The interpreter's own end
    crashes while XLA is still at work.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(sys.stderr.fileno(), b"python -m gradxform: interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Lets contexts inside end what they started, before Ctrl-C ends the process.

    A second Ctrl-C does not wait for them. The context gives a function that raises the
    first one again: Python drops a handler's exception in a destructor, or while JAX
    collects garbage.
    """
    interrupted = False

    def interrupt(*_: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, end)
        raise KeyboardInterrupt

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not end:  # Another program's process.
        yield check
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield check
    finally:
        if signal.getsignal(signal.SIGINT) is end:
            end()
        signal.signal(signal.SIGINT, end)


def make_run(
    args: argparse.Namespace, job: engines.Job
) -> contextlib.AbstractContextManager[engines.Run]:
    """The engine that the options name, with its checkpoints."""
    options: dict[str, Any] = {}
    if args.checkpoint:
        options["checkpoint"] = engines.Checkpoint(
            args.checkpoint,
            every_seconds=args.checkpoint_every,
            settings=settings_of(args),
        )
    if args.engine == "ray":
        options["address"] = args.address
        options["connect_timeout"] = args.connect_timeout
        options["server_processes"] = args.server_processes
        options["server_shardings"] = functools.partial(cut, args.server_processes)
    return ENGINES[args.engine](job, **options)


def cut(processes: int, path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Cuts each leaf that can be cut, although the model is small."""
    can_be_cut = shape and shape[0] % processes == 0
    return PartitionSpec("server") if can_be_cut else PartitionSpec()


@contextlib.contextmanager
def printing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the process with one line if the results cannot be printed.

    If the reader has gone, as with ``head``, it prints no line and gives exit code 141,
    as other programs do.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # A shell may have closed it.
                sys.stdout.flush()
    except OSError as error:
        # Python flushes again as it ends, and would print another error.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        parser.error(f"the results cannot be printed: {error.strerror}")


def find_packages(args: argparse.Namespace) -> None:
    """Raises ``ImportError`` if a package is missing that the options need."""
    extras = dict.fromkeys(("flax", "matplotlib", "rich", "sklearn"), "demo")
    if args.engine == "ray":
        extras["ray"] = "ray"
    if args.checkpoint:
        extras["orbax.checkpoint"] = "checkpoint"
    if args.logdir:
        extras["tensorboardX"] = "tensorboard"
    for package, extra in extras.items():
        require(package, extra)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, ``sys.argv`` by default."""
    parser = make_parser()
    with printing(parser):  # `--help` prints, too.
        args = parser.parse_args(argv)
    if args.list:
        with printing(parser):
            listing.print_names()
        return
    try:
        find_packages(args)
    except ImportError as error:
        parser.error(str(error))

    model, digits = build_model(args.seed), load_digits()
    start = time.perf_counter()
    job = make_job(args, model, digits)
    with interruptible() as check, contextlib.ExitStack() as stack:
        board = None
        try:
            run = stack.enter_context(make_run(args, job))
            if args.logdir:
                board = stack.enter_context(engines.TensorBoard(args.logdir, run))
        except (OSError, ValueError) as error:
            # There is no cluster or no folder, or the folder holds another job. Ray
            # puts a traceback into the text of an error from another process: print its
            # cause.
            parser.error(str(getattr(error, "cause", error)))
        check()  # From here on the run itself raises a missed Ctrl-C.
        pushes = []
        for push in track(run, args.steps):
            pushes.append(push)
            if board is not None:
                board(push)
        seconds = time.perf_counter() - start
        params, state = run.server.state().values()

    title = f"{args.mode} on {args.engine}, {args.optimizer}, workers {args.workers}, "
    title += f"seed {args.seed}"
    # The plot comes first, as the reader of the results may be gone before their end.
    untold = None
    if args.plot and pushes:
        limit = args.max_staleness if job.required is None else 0
        try:
            save_plot(args.plot, title, pushes, limit, MAX_NORM)
        except OSError as error:  # The disk may have filled up meanwhile.
            untold = error
    labels = np.argmax(model.logits(params, digits.test_images), axis=-1)
    with printing(parser):
        print_report(title, run, pushes, state, seconds)
        print(f"test accuracy {np.mean(labels == digits.test_labels):.3f}")
    if untold is not None:
        parser.error(f"argument --plot: {untold}")
    if args.plot and not pushes:
        print(
            "argument --plot: the run had ended before, so there is nothing to draw",
            file=sys.stderr,
        )


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Not nohup's.
        signal.signal(signal.SIGINT, end)
    main()
