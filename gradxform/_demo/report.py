"""The demo's output: its progress, and a table of the pushes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import optax

import gradxform as gx
from gradxform import engines
from gradxform._demo.command_line import Options, fail


def track(run: engines.Run, total: int) -> Iterator[engines.Push]:
    """Passes pushes through, with the progress in a line if someone can see it."""
    for push in run.pushes:
        if sys.stderr.isatty():
            counts = run.counts()
            done = (counts.accepted + counts.dropped) / total
            text = f"step {push.result.global_step}, loss {push.loss:.3f}"
            print(f"\r{done:4.0%}, {text} ", end="", file=sys.stderr, flush=True)
        yield push
    if sys.stderr.isatty():
        print(file=sys.stderr)


def make_report(
    options: Options,
    run: engines.Run,
    pushes: Sequence[engines.Push],
    state: optax.OptState,
    seconds: float,
) -> str:
    """A table of the pushes: accepted, dropped, late."""
    counts = run.counts()
    before = "" if run.resumed is None else f"{run.resumed} of them before this run"
    last = counts.by_worker.get(options.workers - 1)
    late = f"{last.dropped if last else 0} of the last worker"
    meaning = "pushes dropped as too late, for each step: dropped / (steps + 1)"
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
        ("gradient norm", norm, "of the last step, before the clip"),
        ("seconds", f"{seconds:.1f}", "of starting, compiling and training"),
    ]
    title = f"{options.mode} on {options.engine}, {options.optimizer}, "
    title += f"workers {options.workers}, seed {options.seed}\n"
    return title + "".join(
        f"{name:20} {value:18} {more}".rstrip() + "\n" for name, value, more in rows
    )


def bars(pushes: Sequence[engines.Push]) -> Iterator[tuple[str, str, str]]:
    """A bar for each staleness, or for each range: the number of such pushes."""
    if not pushes:
        return
    applied, staleness, *_ = map(
        np.array, zip(*(p.result for p in pushes), strict=True)
    )
    width = 1 + staleness.max() // 20  # At most 20 rows, even with many workers.
    counts = np.bincount(staleness // width).tolist()
    late = np.bincount(staleness[~applied] // width, minlength=len(counts)).tolist()
    for row, (count, dropped) in enumerate(zip(counts, late, strict=True)):
        low, high = row * width, (row + 1) * width - 1
        span = f"{low}" if low == high else f"{low} to {high}"
        text = f"{count}, {dropped} dropped" if dropped else f"{count}"
        yield f"staleness {span}", text, "#" * round(30 * count / max(counts))


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
