"""The main job: a digit classifier trained by workers whose gradients arrive late.

Workers of different speed pull the parameters of a small convolutional net, compute a
gradient each on a minibatch of its own, and push it to a server, which applies it with
``drop_stale(chain(clip_by_global_norm, novograd))`` or drops it as too old. The workers
are simulated, event by event, on one process.

From top to bottom: data, model, server, engine, report, plot, command line. Only the
server knows the optimizer, and only the engine knows how pushes come about.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import optax

import gradxform as gx

BATCH_SIZE = 64
MAX_NORM = 1.0
SLOWEST = 4.0  # How many times as long as the fastest worker the slowest one takes.
JITTER = 0.25  # Standard deviation of the logarithm of a duration.

# Peak learning rates. Late gradients act as momentum by themselves (Mitliagkas et al.
# 2016, https://arxiv.org/abs/1605.09774): novograd wants less of its own than usual.
OPTIMIZERS: dict[str, tuple[Callable[..., optax.GradientTransformation], float]] = {
    "novograd": (functools.partial(gx.novograd, b1=0.9), 0.015),
    "adagrad": (gx.adagrad, 0.2),
}

# What a worker computes from the parameters that it pulled: (loss, gradients).
Worker = Callable[[optax.Params], tuple[jax.Array, optax.Updates]]
# How long the next gradient of a worker takes, by the worker's index; in any unit.
Duration = Callable[[int], float]


class Digits(NamedTuple):
    """Handwritten digits; the split is always the same, so that seeds compare."""

    images: np.ndarray  # float32[1437, 8, 8] in [0, 1]
    test_images: np.ndarray  # float32[360, 8, 8]
    labels: np.ndarray  # int32[1437]
    test_labels: np.ndarray  # int32[360]


def load_digits() -> Digits:
    """The 1,797 digits that scikit-learn bundles, in a stratified 80/20 split."""
    from sklearn import datasets, model_selection

    bunch: Any = datasets.load_digits()
    images = np.asarray(bunch.images / 16, np.float32)
    labels = np.asarray(bunch.target, np.int32)
    split: Any = model_selection.train_test_split
    return Digits(
        *split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    )


class Model(NamedTuple):
    """Pure functions of the parameters, each compiled once for all workers."""

    params: optax.Params
    value_and_grad: Callable[..., tuple[jax.Array, optax.Updates]]  # Of the loss.
    logits: Callable[[optax.Params, np.ndarray], jax.Array]


def build_model(seed: int) -> Model:
    """A convolutional net of 38,000 parameters and its cross-entropy."""
    from flax import nnx

    rngs = nnx.Rngs(seed)
    net = nnx.Sequential(
        nnx.Conv(1, 16, (3, 3), rngs=rngs),
        nnx.leaky_relu,  # A unit that one wild step switches off can come back.
        nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs),
        nnx.leaky_relu,
        lambda x: x.reshape(len(x), -1),
        nnx.Linear(4 * 4 * 32, 64, rngs=rngs),
        nnx.leaky_relu,
        nnx.Linear(64, 10, rngs=rngs),
    )
    graph, params = nnx.split(net)

    def logits(params: optax.Params, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(images[..., None])

    def loss(params: optax.Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits(params, images), labels).mean()

    return Model(params, jax.jit(jax.value_and_grad(loss)), jax.jit(logits))


def make_worker(model: Model, digits: Digits, rng: np.random.Generator) -> Worker:
    """A worker that draws random digits, each shifted by at most one pixel."""
    # windows[digit, down, right] is one of nine shifted images; a view, no copies.
    padded = np.pad(digits.images, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))

    def work(params: optax.Params) -> tuple[jax.Array, optax.Updates]:
        rows = rng.integers(len(windows), size=BATCH_SIZE)
        down, right = rng.integers(3, size=(2, BATCH_SIZE))
        batch = windows[rows, down, right], digits.labels[rows]
        return model.value_and_grad(params, *batch)

    return work


def make_transformation(
    optimizer: str, max_staleness: int, steps: int
) -> optax.GradientTransformation:
    """The whole flow: drop what is too late, clip the rest, scale it."""
    scale, peak = OPTIMIZERS[optimizer]
    # With many workers the first gradients, large and late, would diverge at the peak.
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)
    inner = optax.chain(gx.clip_by_global_norm(MAX_NORM), scale(rate))
    return gx.drop_stale(inner, max_staleness)


class Result(NamedTuple):
    """What the server made of one push."""

    applied: bool
    staleness: int
    global_norm: float  # Before clipping, of the last push applied.


class Server:
    """Holds the newest parameters; every push is one compiled step."""

    def __init__(self, tx: optax.GradientTransformation, params: optax.Params):
        self.params = params
        self.state = tx.init(params)
        # The state alone is donated: workers still hold the parameters they pulled.
        apply = functools.partial(gx.apply_gradients, tx)
        self._step = jax.jit(apply, donate_argnums=1)

    def pull(self) -> tuple[optax.Params, int]:
        """The parameters, and the global step they belong to."""
        return self.params, int(gx.global_step(self.state))

    def push(self, grads: optax.Updates, local_step: int) -> Result:
        """Applies gradients of the parameters at ``local_step``, or drops them."""
        before = int(gx.global_step(self.state))
        self.params, self.state = self._step(
            grads, self.state, self.params, local_step=np.int32(local_step)
        )
        return Result(
            applied=int(gx.global_step(self.state)) > before,
            staleness=int(optax.tree.get(self.state, "staleness")),
            global_norm=float(optax.tree.get(self.state, "global_norm")),
        )


class Push(NamedTuple):
    """One push as it arrived."""

    worker: int
    local_step: int  # What the worker saw before it computed.
    loss: float  # Of the worker's minibatch, at the parameters it had pulled.
    result: Result


def simulate(
    server: Server, workers: Sequence[Worker], duration: Duration, pushes: int
) -> Iterator[Push]:
    """Runs workers against one clock, and yields their pushes as they arrive.

    Every worker pulls, works for ``duration(its index)``, pushes, and pulls again. Of
    pushes that arrive at once, that of the lower index goes first.

    Args:
      server: takes the pushes.
      workers: what each worker computes.
      duration: how long each gradient takes.
      pushes: how many to run, applied or not.
    """
    held = [server.pull() for _ in workers]
    arrivals = [(duration(index), index) for index in range(len(workers))]
    heapq.heapify(arrivals)
    for _ in range(pushes):
        now, index = arrivals[0]
        params, local_step = held[index]
        loss, grads = workers[index](params)
        yield Push(index, local_step, float(loss), server.push(grads, local_step))
        held[index] = server.pull()
        heapq.heapreplace(arrivals, (now + duration(index), index))


def random_durations(workers: int, rng: np.random.Generator) -> Duration:
    """Durations of workers from fast to slow, each with log-normal jitter."""
    means = np.linspace(1.0, SLOWEST, workers)
    return lambda index: float(means[index] * rng.lognormal(sigma=JITTER))


def track(pushes: Iterator[Push], total: int) -> Iterator[Push]:
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


def print_report(
    title: str, pushes: Sequence[Push], state: optax.OptState, seconds: float
) -> None:
    """Prints a table of what became of the pushes."""
    from rich import console, progress_bar, table

    *_, results = zip(*pushes, strict=True)
    applied, staleness, _ = map(np.array, zip(*results, strict=True))
    report = table.Table(title=title, title_justify="left", show_header=False)
    report.add_row("pushes accepted", f"{np.sum(applied)}")
    report.add_row("pushes dropped", f"{np.sum(~applied)}")
    fraction = f"{float(gx.staleness_fraction(state)):.3f}"
    report.add_row("staleness fraction", fraction, "dropped / (accepted + 1)")
    report.add_section()
    width = 1 + staleness.max() // 20  # Few rows, however many workers there are.
    counts = np.bincount(staleness // width)
    for row, count in enumerate(counts):
        low, high = row * width, (row + 1) * width - 1
        span = f"{low}" if low == high else f"{low} to {high}"
        dropped = np.sum(~applied & (low <= staleness) & (staleness <= high))
        part = "all" if dropped == count else f"{dropped}"
        text = f"{count}, {part} dropped" if dropped else f"{count}"
        color = "yellow" if dropped else "green"
        bar = progress_bar.ProgressBar(
            counts.max(), count, 30, complete_style=color, finished_style=color
        )
        report.add_row(f"staleness {span}", text, bar)
    report.add_section()
    norm = f"{float(optax.tree.get(state, 'global_norm')):.3f}"
    report.add_row("gradient norm", norm, "of the last one accepted")
    report.add_row("seconds", f"{seconds:.1f}", "of training and compiling")
    console.Console().print(report)


def save_plot(
    path: str, title: str, pushes: Sequence[Push], max_staleness: int
) -> None:
    """Draws loss, staleness and gradient norm, push by push, as a PNG."""
    from matplotlib.figure import Figure

    step = np.arange(1, len(pushes) + 1)
    _, _, loss, results = zip(*pushes, strict=True)
    kept, staleness, norm = map(np.array, zip(*results, strict=True))

    figure: Any = Figure(figsize=(7, 8), dpi=200, layout="constrained")
    figure.suptitle(title)
    above, middle, below = axes = figure.subplots(3, sharex=True)
    blue, orange = "#0072B2", "#D55E00"  # Apart to every eye; in grey, markers tell.
    dots = {"s": 6, "linewidths": 0, "alpha": 0.4, "color": blue}
    cross = {"s": 12, "marker": "x", "color": orange}
    limit = {"linestyle": "--", "color": orange}

    above.scatter(step, loss, **dots, label="one minibatch")
    window = 1 + min(49, len(loss) // 10)
    mean = np.convolve(loss, np.full(window, 1 / window), "valid")
    above.plot(step[window - 1 :], mean, "k", label=f"mean of {window} pushes")
    above.set(ylabel="loss [nat]", yscale="log")

    middle.scatter(step[kept], staleness[kept], **dots, label="accepted")
    if not kept.all():
        middle.scatter(step[~kept], staleness[~kept], **cross, label="dropped")
        middle.axhline(max_staleness + 0.5, **limit, label=f"limit {max_staleness}")
    middle.set(ylabel="staleness [steps]")
    middle.yaxis.get_major_locator().set_params(integer=True)

    below.scatter(step[kept], norm[kept], **dots, label="accepted, before the clip")
    below.axhline(MAX_NORM, **limit, label=f"clip at {MAX_NORM:g}")
    below.set(ylabel="gradient norm", yscale="log", xlabel="push")

    for ax in axes:
        ax.margins(x=0.01)
        ax.grid(alpha=0.25)
        # Above the axes, where it hides no point.
        spot = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
        legend = ax.legend(**spot, frameon=False, markerscale=2)
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    figure.savefig(path, format="png")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")

    def add_int(self, name: str, default: int, low: int, high: int, help: str) -> None:
        """Adds an option whose value is an integer in [low, high]."""

        def parse(text: str) -> int:
            with contextlib.suppress(ValueError):
                if low <= int(text) <= high:
                    return int(text)
            allowed = f"must be an integer in [{low}, {high}]"
            raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")

        help += " (default: %(default)s)"
        self.add_argument(name, type=parse, default=default, metavar="N", help=help)


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
    if not existed:
        os.remove(path)
    return path


def make_parser() -> Parser:
    """The command line, with every default and range."""
    parser = Parser(
        prog="python -m gradxform",
        description="Trains a digit classifier with workers whose gradients arrive "
        "late, and drops those that are too late. Prints what became of them, and the "
        "accuracy on test digits as its last line.",
        epilog="What lateness costs: try --workers 16 --max-staleness 30, then 6.",
        allow_abbrev=False,
    )
    steps = 2**31 - 1  # They are int32 on the device.
    how = "what scales the clipped gradients (default: %(default)s)"
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="novograd", help=how)
    how = f"how many push gradients, the last {SLOWEST:g} times slower than the first"
    parser.add_int("--workers", 4, 1, 1000, how)
    how = "drop a gradient whose worker pulled its parameters more than N steps ago"
    parser.add_int("--max-staleness", 6, 0, steps, how)
    how = "how many gradients are pushed, accepted and dropped ones together"
    parser.add_int("--steps", 3000, 1, steps, how)
    how = "of weights, minibatches and delays; repeats a run exactly on one machine"
    parser.add_int("--seed", 0, 0, 2**31 - 1, how)
    how = "write loss, staleness and gradient norm over the steps to FILE, a .png"
    parser.add_argument("--plot", type=writable_png, metavar="FILE", help=how)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line, ``sys.argv`` by default."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        for package in ("flax", "matplotlib", "rich", "sklearn"):
            importlib.import_module(package)
    except ImportError as error:
        parser.error(f"{error}: run python -m pip install 'gradxform[demo]'")

    model, digits = build_model(args.seed), load_digits()
    tx = make_transformation(args.optimizer, args.max_staleness, args.steps)
    server = Server(tx, model.params)
    # One stream of random numbers for each worker, and one for the delays.
    *own, delays = np.random.default_rng(args.seed).spawn(args.workers + 1)
    workers = [make_worker(model, digits, rng) for rng in own]
    duration = random_durations(args.workers, delays)

    start = time.perf_counter()
    arriving = simulate(server, workers, duration, args.steps)
    pushes = list(track(arriving, args.steps))
    seconds = time.perf_counter() - start

    title = f"{args.optimizer}, workers {args.workers}, seed {args.seed}"
    print_report(title, pushes, server.state, seconds)
    labels = np.argmax(model.logits(server.params, digits.test_images), axis=-1)
    print(f"test accuracy {np.mean(labels == digits.test_labels):.3f}", flush=True)
    if args.plot:
        try:
            save_plot(args.plot, title, pushes, args.max_staleness)
        except OSError as error:  # The disk may have filled up meanwhile.
            parser.error(f"argument --plot: {error}")


if __name__ == "__main__":
    main()
