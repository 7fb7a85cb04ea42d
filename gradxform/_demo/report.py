"""The demo's output: a progress bar, a table, and a plot."""

from __future__ import annotations

import collections
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import optax

import gradxform as gx
from gradxform import engines

if TYPE_CHECKING:
    from rich.table import Table


def track(run: engines.Run, total: int) -> Iterator[engines.Push]:
    """Passes pushes through, with a progress bar if someone can see it."""
    from rich import console, progress

    screen = console.Console(stderr=True)  # So that a pipe gets only the results.
    if not screen.is_terminal:
        yield from run.pushes
        return
    columns = (
        progress.BarColumn(20),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[text]}"),
    )
    late: collections.deque[int] = collections.deque(maxlen=100)
    with progress.Progress(*columns, console=screen) as bar:
        task = bar.add_task("pushes", total=total, text="")
        for push in run.pushes:
            counts = run.counts()
            late.append(push.result.staleness)
            text = f"step {push.result.global_step}, loss {push.loss:.3f}, "
            text += f"staleness {np.mean(late):.1f}"
            bar.update(task, completed=counts.accepted + counts.dropped, text=text)
            yield push


def print_report(
    title: str,
    run: engines.Run,
    pushes: Sequence[engines.Push],
    state: optax.OptState,
    seconds: float,
) -> None:
    """Prints a table of the pushes: accepted, dropped, late."""
    from rich import console, table

    counts = run.counts()
    report = table.Table(title=title, title_justify="left", show_header=False)
    before = "" if run.resumed is None else f"{run.resumed} of them before this run"
    report.add_row("steps", f"{int(gx.global_step(state))}", before)
    report.add_row("pushes accepted", f"{counts.accepted}")
    last = max((push.worker for push in pushes), default=0)
    late = sum(push.worker == last and not push.result.applied for push in pushes)
    report.add_row("pushes dropped", f"{counts.dropped}", f"{late} of the last worker")
    for name, who in (("worker", "workers"), ("server", "the server")):
        if deaths := getattr(counts, f"{name}_deaths"):
            report.add_row(f"deaths of {who}", f"{deaths}")
    if counts.lost:
        report.add_row("pushes lost", f"{counts.lost}", "and done again")
    fraction = f"{float(gx.staleness_fraction(state)):.3f}"
    report.add_row("staleness fraction", fraction, "dropped / (accepted + 1)")
    if pushes:
        report.add_section()
        add_bars(report, [push.result for push in pushes])
    report.add_section()
    norm = f"{float(optax.tree.get(state, 'global_norm')):.3f}"
    report.add_row("gradient norm", norm, "of the last step, before the clip")
    report.add_row("seconds", f"{seconds:.1f}", "of starting, compiling and training")
    screen = console.Console()
    with screen.capture() as text:
        screen.print(report)
    print(text.get(), end="")  # It raises Python's own errors.


def add_bars(report: Table, results: Sequence[gx.PushResult]) -> None:
    """Adds a bar for each staleness, or for each range: the number of such pushes."""
    from rich import progress_bar

    applied, staleness, *_ = map(np.array, zip(*results, strict=True))
    width = 1 + staleness.max() // 20  # At most 20 rows, even with many workers.
    counts = np.bincount(staleness // width).tolist()
    for row, count in enumerate(counts):
        low, high = row * width, (row + 1) * width - 1
        span = f"{low}" if low == high else f"{low} to {high}"
        dropped = np.sum(~applied & (low <= staleness) & (staleness <= high))
        many = "all" if dropped == count else f"{dropped}"
        text = f"{count}, {many} dropped" if dropped else f"{count}"
        color = "yellow" if dropped else "green"
        bar = progress_bar.ProgressBar(
            max(counts), count, 30, complete_style=color, finished_style=color
        )
        report.add_row(f"staleness {span}", text, bar)


def save_plot(
    path: str,
    title: str,
    pushes: Sequence[engines.Push],
    max_staleness: int,
    max_norm: float,
) -> None:
    """Draws loss, staleness and gradient norm, push by push, as a PNG.

    Each point of the norm belongs to one push, as its worker computed it.
    """
    from matplotlib.figure import Figure

    step = np.arange(1, len(pushes) + 1)
    loss, norms = [push.loss for push in pushes], [push.norm for push in pushes]
    kept = np.array([push.result.applied for push in pushes])
    staleness = np.array([push.result.staleness for push in pushes])

    figure = Figure(figsize=(7, 8), dpi=200, layout="constrained")
    figure.suptitle(title)
    above, middle, below = axes = figure.subplots(3, sharex=True)
    # Color-blind readers can tell them apart. In grey the markers differ.
    blue, orange = "#0072B2", "#D55E00"
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

    below.scatter(step, norms, **dots, label="one minibatch")
    below.axhline(max_norm, **limit, label=f"clip at {max_norm:g}")
    below.set(ylabel="gradient norm", yscale="log", xlabel="push")

    for ax in axes:
        ax.margins(x=0.01)
        ax.grid(alpha=0.25)
        # The legend lies above the axes, where it hides no point.
        spot = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3}
        legend = ax.legend(**spot, frameon=False, markerscale=2)
        for handle in legend.legend_handles:
            handle.set_alpha(1)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    with open(path, "wb") as file:  # All at once: an error before leaves no half file.
        file.write(png.getbuffer())
