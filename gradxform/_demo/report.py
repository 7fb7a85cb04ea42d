"""The demo's output: its progress, a table of the pushes, and a picture of them."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import optax

import gradxform as gx
from gradxform import engines
from gradxform._demo.command_line import WIDTH, Options, fail, say

SECONDS = 5.0  # Between two lines where there is no terminal.


def quiet_orbax() -> None:
    """Hides the lines that orbax prints if it cannot write a checkpoint.

    That is hundreds of lines, and threads that nobody waits for print some at the very
    end. Orbax also raises the error, and a run says it in one line.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[engines.Push, engines.Counts], None]]:
    """Shows on ``sys.stderr`` how far the training is: gives a function of each push.

    On a terminal it is a bar. Elsewhere it is a line for the first push, and another
    one every few seconds.
    """
    from rich import console, progress

    screen = console.Console(stderr=True, force_terminal=sys.stderr.isatty())
    screen.width = min(WIDTH, screen.width)
    drawn = screen.is_terminal and not screen.is_dumb_terminal
    columns = (
        progress.TaskProgressColumn(),
        progress.BarColumn(30, complete_style="green", finished_style="green"),
        "{task.description}",
        progress.TimeRemainingColumn(),
    )
    next_line = time.monotonic()
    with progress.Progress(
        *columns,
        console=screen,
        get_time=time.monotonic,
        disable=not drawn,
    ) as bar:
        # Without a total the bar moves to and fro.
        task = bar.add_task("compiling", total=None)

        def show(push: engines.Push, counts: engines.Counts) -> None:
            nonlocal next_line
            text = f"step {push.result.global_step}, loss {push.loss:.3f}"
            done = counts.accepted + counts.dropped
            bar.update(task, total=total, completed=done, description=text)
            if not drawn and time.monotonic() >= next_line:
                next_line = time.monotonic() + SECONDS
                left = bar.tasks[task].time_remaining
                rest = "" if left is None else f", {left:.0f} s left"
                say(f"{done / total:4.0%}, {text}{rest}\n", sys.stderr)

        yield show


def make_report(
    options: Options,
    run: engines.Run,
    pushes: Sequence[engines.Push],
    state: optax.OptState,
    seconds: float,
) -> str:
    """A table of the pushes: accepted, dropped, late."""
    counts = run.counts()
    before = "" if run.resumed is None else f"{run.resumed} before this run"
    last = counts.by_worker.get(options.workers - 1)
    late = f"{last.dropped if last else 0} of the last worker"
    meaning = "too late / (steps + 1)"
    norm = f"{optax.tree.get(state, 'global_norm'):.3f}"
    deaths = {
        "deaths of workers": counts.worker_deaths,
        "deaths of the server": counts.server_deaths,
        "pushes lost": counts.lost,
    }
    rows = [
        ("steps", f"{gx.global_step(state)}", before),
        ("pushes accepted", f"{counts.accepted}", ""),
        ("pushes dropped", f"{counts.dropped}", late),
        *((name, f"{count}", "") for name, count in deaths.items() if count),
        ("staleness fraction", f"{gx.staleness_fraction(state):.3f}", meaning),
        *bars(pushes),
        ("gradient norm", norm, "of the last step, not clipped"),
        ("seconds", f"{seconds:.1f}", "of starting and training"),
    ]
    return title_of(options) + "\n" + align(rows)


def title_of(options: Options) -> str:
    """What was trained, in a line."""
    title = f"{options.mode} on {options.engine}, {options.optimizer}, "
    return title + f"workers {options.workers}, seed {options.seed}"


def align(rows: Sequence[tuple[str, str, str]]) -> str:
    """Rows as lines of three columns."""
    names, values, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "".join(
        f"{name:{names}}  {value:{values}}  {more}".rstrip() + "\n"
        for name, value, more in rows
    )


def bars(pushes: Sequence[engines.Push]) -> Iterator[tuple[str, str, str]]:
    """A bar for each staleness, or for each range: the number of such pushes."""
    if not pushes:
        return
    applied, staleness = outcomes(pushes)
    width = 1 + staleness.max() // 20  # At most 20 rows, even with many workers.
    counts = np.bincount(staleness // width)
    late = np.bincount(staleness[~applied] // width, minlength=len(counts))
    for row, (count, dropped) in enumerate(zip(counts, late, strict=True)):
        low, high = row * width, (row + 1) * width - 1
        span = f"{low}" if low == high else f"{low} to {high}"
        text = f"{count}, {dropped} dropped" if dropped else f"{count}"
        yield f"staleness {span}", text, "#" * round(20 * count / max(counts))


def outcomes(pushes: Sequence[engines.Push]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each push was applied, and its staleness."""
    applied, staleness, *_ = zip(*(push.result for push in pushes), strict=True)
    return np.array(applied), np.array(staleness)


def save_plot(path: str, title: str, pushes: Sequence[engines.Push]) -> None:
    """Draws loss and staleness, push by push."""
    from matplotlib.figure import Figure

    number = np.arange(1, len(pushes) + 1)
    loss = [push.loss for push in pushes]
    applied, staleness = outcomes(pushes)
    window = 1 + min(49, len(loss) // 10)
    mean = np.convolve(loss, np.full(window, 1 / window), "valid")

    figure = Figure(figsize=(7, 5.5), dpi=150, layout="constrained")
    figure.suptitle(title)
    above, below = figure.subplots(2, sharex=True)
    # Color-blind readers can tell blue and orange apart. In grey the markers differ.
    points = {"linestyle": "", "markersize": 4}
    accepted = points | {"marker": ".", "color": "#0072B2", "alpha": 0.4}
    dropped = points | {"marker": "x", "color": "#D55E00"}
    above.semilogy(number, loss, **accepted, label="one minibatch")
    above.semilogy(number[window - 1 :], mean, "k", label=f"mean of {window} pushes")
    for label, which, style in (
        ("accepted", applied, accepted),
        ("dropped", ~applied, dropped),
    ):
        if which.any():
            below.plot(number[which], staleness[which], **style, label=label)
    above.set_ylabel("loss [nat]")
    below.set(ylabel="staleness [steps]", xlabel="push")
    below.yaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        # The legend lies above the axes, where it hides no point.
        spot = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2}
        axes.legend(**spot, frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:  # The disk may have filled up meanwhile.
        fail(f"argument --plot: {error}")
