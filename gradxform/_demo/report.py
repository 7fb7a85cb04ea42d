"""The demo's output: a progress bar, a table, and a plot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import optax

import gradxform as gx
from gradxform import engines
from gradxform._demo.command_line import Options, fail

if TYPE_CHECKING:
    from rich.table import Table


def track(run: engines.Run, total: int) -> Iterator[engines.Push]:
    """Passes pushes through, with a progress bar if someone can see it."""
    from rich import console, progress

    screen = console.Console(stderr=True)  # So that a pipe gets only the results.
    with progress.Progress(console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for push in run.pushes:
            counts = run.counts()
            text = f"step {push.result.global_step}, loss {push.loss:.3f}"
            done = counts.accepted + counts.dropped
            bar.update(task, completed=done, description=text)
            yield push


def title_of(options: Options) -> str:
    """What was trained, in a line."""
    title = f"{options.mode} on {options.engine}, {options.optimizer}, "
    return title + f"workers {options.workers}, seed {options.seed}"


def make_report(
    options: Options,
    run: engines.Run,
    pushes: Sequence[engines.Push],
    state: optax.OptState,
    seconds: float,
) -> str:
    """A table of the pushes as ``rich`` would print it: accepted, dropped, late."""
    from rich import console, table

    counts = run.counts()
    before = "" if run.resumed is None else f"{run.resumed} of them before this run"
    last = counts.by_worker.get(options.workers - 1)
    late = f"{last.dropped if last else 0} of the last worker"
    norm = f"{optax.tree.get(state, 'global_norm'):.3f}"
    report = table.Table(
        title=title_of(options), title_justify="left", show_header=False
    )
    report.add_row("steps", f"{gx.global_step(state)}", before)
    report.add_row("pushes accepted", f"{counts.accepted}")
    report.add_row("pushes dropped", f"{counts.dropped}", late)
    for name, count in (
        ("deaths of workers", counts.worker_deaths),
        ("deaths of the server", counts.server_deaths),
        ("pushes lost", counts.lost),
    ):
        if count:
            report.add_row(name, f"{count}")
    meaning = "pushes dropped as too late, for each step: dropped / (steps + 1)"
    report.add_row("staleness fraction", f"{gx.staleness_fraction(state):.3f}", meaning)
    report.add_section()
    if pushes:
        add_bars(report, pushes)
    report.add_section()
    report.add_row("gradient norm", norm, "of the last step, before the clip")
    report.add_row("seconds", f"{seconds:.1f}", "of starting, compiling and training")
    screen = console.Console()
    with screen.capture() as text:
        screen.print(report)
    return text.get()


def add_bars(report: Table, pushes: Sequence[engines.Push]) -> None:
    """Adds a bar for each staleness, or for each range: the number of such pushes."""
    from rich import progress_bar

    applied, staleness = outcomes(pushes)
    width = 1 + staleness.max() // 20  # At most 20 rows, even with many workers.
    counts = np.bincount(staleness // width).tolist()
    late = np.bincount(staleness[~applied] // width, minlength=len(counts)).tolist()
    for row, (count, dropped) in enumerate(zip(counts, late, strict=True)):
        low, high = row * width, (row + 1) * width - 1
        span = f"{low}" if low == high else f"{low} to {high}"
        text = f"{count}, {dropped} dropped" if dropped else f"{count}"
        color = "yellow" if dropped else "green"
        bar = progress_bar.ProgressBar(max(counts), count, 30, complete_style=color)
        report.add_row(f"staleness {span}", text, bar)


def outcomes(pushes: Sequence[engines.Push]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each push was applied, and its staleness."""
    applied, staleness, *_ = zip(*(push.result for push in pushes), strict=True)
    return np.array(applied), np.array(staleness)


def show(text: str) -> None:
    """Prints; if that fails, it ends the process with one line.

    If the reader has gone, as with ``head``, it ends without a line and with exit code
    141, as other programs do.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python flushes again as it ends, and would print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(141) from None
        fail(f"the results cannot be printed: {error.strerror}")


def save_plot(options: Options, pushes: Sequence[engines.Push], clip: float) -> None:
    """Draws loss, staleness and gradient norm, push by push, if there is a ``--plot``.

    Each point of the norm belongs to one push, as its worker computed it.
    """
    from matplotlib.figure import Figure

    if not (options.plot and pushes):
        return
    applied, staleness = outcomes(pushes)
    curves = {
        "loss [nat]": [push.loss for push in pushes],
        "staleness [steps]": staleness,
        "gradient norm": [push.norm for push in pushes],
    }
    # Color-blind readers can tell blue and orange apart.
    colors = np.where(applied, "#0072B2", "#D55E00")
    figure = Figure(figsize=(7, 8), dpi=200, layout="constrained")
    figure.suptitle(f"{title_of(options)}\norange: dropped; line: clip at {clip:g}")
    axes = figure.subplots(3, sharex=True)
    for ax, (label, numbers) in zip(axes, curves.items(), strict=True):
        ax.scatter(range(1, len(pushes) + 1), numbers, s=4, c=colors, alpha=0.5)
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
    above, _, below = axes
    above.set_yscale("log")
    below.set_yscale("log")
    below.axhline(clip, linestyle="--", color="black")
    below.set_xlabel("push")
    try:
        figure.savefig(options.plot)
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: matplotlib knows no such format.
        fail(f"argument --plot: {error}")
