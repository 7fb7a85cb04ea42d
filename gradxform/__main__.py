"""The main job: a digit classifier trained by workers that share a parameter server.

Workers pull the parameters of a small convolutional net, compute a gradient each on a
minibatch of its own, and push it to a ``ParameterServer``, whose transformation ends in
``chain(clip_by_global_norm, novograd)``. In front of it, ``drop_stale`` drops gradients
that come too late, or ``conditional_accumulator`` adds up those of several workers. In
mode ``local`` that chain is each worker's own, for ``local_steps``, and what they push
after those is for ``delayed_nesterov``.

From top to bottom: workers, transformation, command line, Ctrl-C. What they train is
the business of ``_digits``, how they run that of ``_server.engines``, and what is shown
of them that of ``_report``.
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
from typing import Any, NoReturn

import jax
import numpy as np
import optax

import gradxform as gx
from gradxform import _listing
from gradxform._digits import Digits, Model, build_model, load_digits
from gradxform._report import print_report, save_plot
from gradxform._server import engines

BATCH_SIZE = 64
MAX_NORM = 1.0
JITTER = 0.25  # Standard deviation of the logarithm of a duration.

# Peak learning rates. Late gradients act as momentum by themselves (Mitliagkas et al.
# 2016, https://arxiv.org/abs/1605.09774): novograd wants less of its own than usual.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "novograd": (functools.partial(gx.novograd, b1=0.9), 0.015),
    "adagrad": (gx.adagrad, 0.2),
}

# Of mode local: rate and decay of the outer optimizer. Here, too, lateness acts as
# momentum. And how many local steps are compiled one by one: a convolution in a loop is
# slow on CPU, and compiling many of them as well.
OUTER = 1.0, 0.5
UNROLLED = 20

MODES = ("async", "backup", "local", "sync")
GRADIENTS = 3000  # Of all workers together, by default.


def make_worker(
    model: Model,
    digits: Digits,
    mean_duration: float,
    rng: np.random.Generator,
    *batches: int,
) -> engines.Worker:
    """A worker that draws random digits, each shifted by at most one pixel.

    A minibatch of them, or an array of minibatches of the shape ``batches``. Its
    durations scatter around ``mean_duration``, in seconds, log-normally.
    """
    # windows[digit, down, right] is one of nine shifted images; a view, no copies.
    padded = np.pad(digits.images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    median = mean_duration / np.exp(JITTER**2 / 2)
    size = *batches, BATCH_SIZE

    def gradient(
        params: optax.Params,
    ) -> tuple[jax.Array, jax.Array, optax.Updates]:
        rows = rng.integers(len(windows), size=size)
        down, right = rng.integers(3, size=(2, *size))
        batch = windows[rows, down, right], digits.labels[rows]
        return model.gradient(params, *batch)

    return engines.Worker(gradient, lambda: median * rng.lognormal(sigma=JITTER))


def make_local(
    model: Model, tx: optax.GradientTransformation, *, unroll: bool
) -> Callable[[], Model]:
    """Makes models, of which each trains by itself and has an optimizer of its own.

    Their gradient is that of an array of minibatches: what training on them makes of
    the parameters. Their loss is that of the first one.
    """
    steps = gx.local_steps(model.loss, tx, unroll=unroll)

    @functools.partial(jax.jit, donate_argnums=1)
    def train(params: optax.Params, state: optax.OptState, *batches: jax.Array) -> Any:
        grads, state, losses = steps(params, state, *batches)
        return (losses[0], gx.global_norm(grads), grads), state

    def own() -> Model:
        state = None

        def gradient(params: optax.Params, *batches: jax.Array) -> Any:
            nonlocal state
            if state is None:  # In the worker's own process, where it stays.
                state = tx.init(params)
            result, state = train(params, state, *batches)
            return result

        return model._replace(gradient=gradient)

    return own


def make_optimizer(
    optimizer: str, steps: int, batches: int
) -> optax.GradientTransformation:
    """A clip, and what scales the gradients.

    Args:
      optimizer: one of ``OPTIMIZERS``.
      steps: how many there will be; the learning rate falls to 0 with the last one.
      batches: how many minibatches have a part in a step.
    """
    scale, peak = OPTIMIZERS[optimizer]
    # A mean of n has 1/n of the variance and n times fewer steps: a higher rate pays.
    peak *= batches**0.5
    # With many workers the first gradients, large and late, would diverge at the peak.
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    return optax.chain(gx.clip_by_global_norm(MAX_NORM), scale(rate))


def make_job(args: argparse.Namespace, model: Model, digits: Digits) -> engines.Job:
    """What the options say, for any engine."""
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
    # One stream of random numbers for each worker.
    streams = np.random.default_rng(args.seed).spawn(workers)
    return engines.Job(
        model.params,
        tx,
        [
            make_worker(each, digits, duration, rng, *length)
            for each, duration, rng in zip(models, durations, streams, strict=True)
        ],
        args.steps,
        required,
    )


def track(pushes: Iterator[engines.Push], total: int) -> Iterator[engines.Push]:
    """Passes pushes through, under a progress bar where someone can see it."""
    from rich import console, progress

    screen = console.Console(stderr=True)  # So that a pipe gets the results alone.
    columns = progress.Progress.get_default_columns()
    loss = progress.TextColumn("{task.fields[loss]}")
    hidden = not screen.is_terminal
    with progress.Progress(*columns, loss, console=screen, disable=hidden) as bar:
        task = bar.add_task("pushes", total=total, loss="")
        for push in pushes:
            bar.update(task, advance=1, loss=f"loss {push.loss:.3f}")
            yield push


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """The options, of which some depend on others."""
        parsed = super().parse_args(args, namespace)
        mode, workers, backups = parsed.mode, parsed.workers, parsed.backups
        if mode == "backup" and backups >= workers:
            self.error(f"argument --backups: must be below --workers, got {backups}")
        if parsed.steps is None:
            each = parsed.local_steps if mode == "local" else 1
            parsed.steps = max(1, GRADIENTS // each)
        return parsed

    def add_number(
        self,
        name: str,
        default: float | None,
        low: float,
        high: float,
        help: str,
        shown: str = "%(default)s",
    ) -> None:
        """Adds an option with a value in [low, high]: an integer if its default is.

        Or if it has none, because the default depends on other options.
        """
        kind = int if default is None else type(default)

        def parse(text: str) -> float:
            with contextlib.suppress(ValueError):
                if low <= kind(text) <= high:
                    return kind(text)
            word = "an integer" if kind is int else "a number"
            allowed = f"must be {word} in [{low:.10g}, {high:.10g}]"
            raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")

        help += f" (default: {shown})"
        metavar = "N" if kind is int else "X"
        self.add_argument(name, type=parse, default=default, metavar=metavar, help=help)


def writable_png(path: str) -> str:
    """Makes sure that a PNG can be written, before the training that it is to show."""
    if not path.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"must end in .png, got {path!r}")
    existed = os.path.lexists(path)
    try:
        open(path, "ab").close()  # Only trying tells, and appending spoils nothing.
    except OSError as error:
        message = f"must be a file that can be written, got {path!r}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    finally:
        if not existed and os.path.lexists(path):
            os.remove(path)
    return path


def make_parser() -> Parser:
    """The command line, with every default and range."""
    parser = Parser(
        prog="python -m gradxform",
        description="Trains a digit classifier with workers that pull parameters from "
        "a server and push gradients to it. Prints what became of the pushes, and the "
        "accuracy on test digits as its last line.",
        epilog="What lateness costs: --workers 16 --max-staleness 30, then 6. What a "
        "slow worker costs: --straggler 5 --mode sync, then backup.",
        allow_abbrev=False,
    )
    many = 2**31 - 1  # They are int32 on the device.
    how = "async makes a step of each gradient that is not too late; in sync a step "
    how += "waits for a gradient of every worker and takes their mean; backup is sync "
    how += "without waiting for the slowest; in local workers train on their own and "
    how += "push how far they have come, as in async (default: %(default)s)"
    parser.add_argument("--mode", choices=MODES, default="async", help=how)
    how = "where workers run: threads of this process, processes of a local Ray "
    how += "cluster, or simulated, on a virtual clock (default: %(default)s)"
    parser.add_argument(
        "--engine", choices=engines.ENGINES, default="threads", help=how
    )
    how = "what scales the clipped gradients (default: %(default)s)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="novograd", help=how)
    how = "how many push gradients"
    parser.add_number("--workers", 4, 1, 1000, how)
    how = "in mode backup, how many of the workers a step does not wait for"
    parser.add_number("--backups", 1, 1, 999, how)
    how = "in mode local, how many gradients make a push"
    parser.add_number("--local-steps", 10, 1, 1000, how)
    how = "in modes async and local, drop what a worker pushes that pulled more than "
    how += "N steps ago"
    parser.add_number("--max-staleness", 4, 0, many, how)
    how = "in every mode, how many pushes reach the server, accepted and dropped ones "
    how += "together"
    shown = f"{GRADIENTS}, in mode local {GRADIENTS} / --local-steps"
    parser.add_number("--steps", None, 1, many, how, shown)
    how = (
        "how many seconds a gradient takes, on average: a worker sleeps for the rest, "
    )
    how += "in place of a heavier model"
    parser.add_number("--work", 0.01, 0.001, 60.0, how)
    how = "how many times as long the last worker takes"
    parser.add_number("--straggler", 1.0, 1.0, 1000.0, how)
    how = (
        "of weights, minibatches and durations; repeats a run exactly with simulated, "
    )
    how += "not with threads and ray, whose order is the machine's"
    parser.add_number("--seed", 0, 0, 2**31 - 1, how)
    how = "write loss, staleness and gradient norm over the pushes to FILE, a .png"
    parser.add_argument("--plot", type=writable_png, metavar="FILE", help=how)
    how = "print what the package has: names, what they do, state, extra arguments"
    parser.add_argument("--list", action="store_true", help=how)
    return parser


def end(*_: object) -> NoReturn:
    """Ends the process as Ctrl-C does: in one line, with exit code 130.

    At once, whatever it is at: an exception would be lost in an import or a destructor,
    and the interpreter's own end crashes where XLA is still at work.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(sys.stderr.fileno(), b"python -m gradxform: interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets contexts inside end what they started, before Ctrl-C ends the process.

    A second Ctrl-C does not wait for them.
    """

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGINT, end)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not end:  # The process is another program's.
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is end:
            end()
        signal.signal(signal.SIGINT, end)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, ``sys.argv`` by default."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        needed = ("rich",) if args.list else ("flax", "matplotlib", "rich", "sklearn")
        for package in needed:
            engines.require(package, "demo")
        if args.engine == "ray":
            engines.require("ray", "ray")
    except ImportError as error:
        parser.error(str(error))
    if args.list:
        _listing.print_table()
        return

    model, digits = build_model(args.seed), load_digits()
    start = time.perf_counter()
    engine, job = engines.ENGINES[args.engine], make_job(args, model, digits)
    with interruptible(), engine(job) as run:
        pushes = list(track(run.pushes, args.steps))
        seconds = time.perf_counter() - start
        params, state = run.server.state().values()

    title = f"{args.mode} on {args.engine}, {args.optimizer}, workers {args.workers}, "
    title += f"seed {args.seed}"
    print_report(title, pushes, state, seconds)
    labels = np.argmax(model.logits(params, digits.test_images), axis=-1)
    print(f"test accuracy {np.mean(labels == digits.test_labels):.3f}", flush=True)
    if args.plot:
        limit = args.max_staleness if job.required is None else 0
        try:
            save_plot(args.plot, title, pushes, limit, MAX_NORM)
        except OSError as error:  # The disk may have filled up meanwhile.
            parser.error(f"argument --plot: {error}")


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Not nohup's.
        signal.signal(signal.SIGINT, end)
    main()
