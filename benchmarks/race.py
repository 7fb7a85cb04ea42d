"""Draws what late gradients cost at each learning rate, and what is done about them.

``python -m benchmarks.race --out benchmarks/results/race`` trains a small net on
scikit-learn's digits with eight workers, the last of them five times as slow as the
others, on the virtual clock of :func:`gradxform.engines.simulated`:

- synchronous: a step takes the mean of all eight gradients, and waits for the slowest;
- asynchronous: each gradient acts as it arrives, on average seven steps late;
- ``drop_stale``: the same, but gradients more than one step late are dropped;
- ``scale_by_staleness``: all act, and a gradient that is s steps late acts by 1 / s.

Each method is trained at the same rates. The picture has the loss at the end over the
rate, and the loss over the time at the rate that is the best one for the synchronous
training. A second picture, for the README, has the time alone. A point is the median of
five seeds.
Nothing depends on the machine's speed, so the same releases give the same pictures:
``race-light.svg``, ``race-dark.svg``, ``gate-light.svg`` and ``gate-dark.svg``.
"""

import argparse
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import optax

import gradxform as gx
from benchmarks.plot import WIDTH, save
from gradxform import engines

WORKERS, SLOW, SECONDS, SEEDS, LIMIT = 8, 5.0, 60, 5, 1
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
METHODS = {  # Its gate around an optimizer, and fields of its job.
    "synchronous": (
        lambda tx: gx.conditional_accumulator(tx, WORKERS),
        {"required": WORKERS},
    ),
    "asynchronous": (lambda tx: gx.drop_stale(tx, np.inf), {}),  # It only counts.
    "drop_stale": (lambda tx: gx.drop_stale(tx, LIMIT), {}),
    "scale_by_staleness": (
        lambda tx: gx.drop_stale(optax.chain(tx, gx.scale_by_staleness()), np.inf),
        {},
    ),
}
STYLES = {
    "synchronous": ("keras", "--", "s"),
    "asynchronous": ("torch", ":", "o"),
    "drop_stale": ("gx", "-", "v"),
    "scale_by_staleness": ("text", "-.", "D"),
}


def rng(*seeds):
    """Numbers that are the same in each run."""
    return np.random.default_rng(seeds)


def digits():
    """All 1,797 images and their labels."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.float32(bunch.data / 16), np.int32(bunch.target)


def net(seed):
    """Parameters of two layers."""
    draw = rng(seed).standard_normal
    return [
        (np.float32(draw((n, m)) * scale), np.zeros((1, m), np.float32))
        for n, m, scale in ((64, 64, 0.18), (64, 10, 0.12))
    ]


def loss(params, images, labels):
    """The mean cross-entropy."""
    (w, b), (v, c) = params
    logits = jax.nn.relu(images @ w + b) @ v + c
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


GRADIENT, LOSS = jax.jit(jax.value_and_grad(loss)), jax.jit(loss)


def worker(index, seed, data):
    """Minibatches of 32, each in about a second; the last worker takes about five."""
    seconds = SLOW if index == WORKERS - 1 else 1.0

    def batch(number):
        places = rng(seed, index, number).integers(len(data[0]), size=32)
        return tuple(array[places] for array in data)

    def duration(number):
        return seconds * rng(number, index, seed).uniform(0.8, 1.2)

    return engines.Worker(GRADIENT, batch, duration)


class Trained(NamedTuple):
    """One run."""

    losses: list[float]  # On all images, at each second.
    late: float  # The mean staleness of the gradients that were applied.
    dropped: float  # The share of the pushes.
    slow: float  # The slow worker's share of the gradients that were applied.
    idle: float  # The share of their time that the workers waited.


def train(method, rate, seed, data):
    """Trains until the time is over."""
    gate, fields = METHODS[method]
    job = engines.Job(
        net(seed),
        gate(gx.adagrad(rate, global_clipnorm=1.0)),
        [worker(index, seed, data) for index in range(WORKERS)],
        pushes=2 * WORKERS * SECONDS,  # More than the time allows.
        **fields,
    )
    losses, pushes = [], []
    with engines.simulated(job) as run:
        params = net(seed)
        for push in run.pushes:
            while len(losses) <= SECONDS and push.time > len(losses):
                losses.append(float(LOSS(params, *data)))
            if len(losses) > SECONDS:
                break
            params, _ = run.server.pull()
            pushes.append(push)
    applied = [push for push in pushes if push.result.applied]
    return Trained(
        losses,
        np.mean([push.result.staleness for push in applied]),
        1 - len(applied) / len(pushes),
        np.mean([push.worker == WORKERS - 1 for push in applied]),
        sum(push.waited for push in pushes) / (WORKERS * SECONDS),
    )


def shared_rate(curves):
    """The place of the rate that is the best one for the synchronous training."""
    return int(curves["synchronous"][:, -1].argmin())


def look(method, theme):
    """The line of a method."""
    color, line, _ = STYLES[method]
    return {"color": theme[color], "linestyle": line, "linewidth": 2}


def draw_time(ax, curves, theme):
    """The loss over the time, at the rate that all share."""
    shared = shared_rate(curves)
    for method, losses in curves.items():
        ax.plot(losses[shared], **look(method, theme), label=method)
    ax.set(xlabel=f"seconds, at the learning rate {RATES[shared]:g}", yscale="log")
    ax.set(xlim=(0, SECONDS), xticks=range(0, SECONDS + 1, 20))
    ticks = [0.2, 0.5, 1, 2]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def draw_rates(ax, curves, theme):
    """The loss at the end, over the rates."""
    for method, losses in curves.items():
        marker = STYLES[method][-1]
        ax.plot(
            RATES, losses[:, -1], **look(method, theme), marker=marker, markersize=5
        )
    ax.set(xlabel=f"learning rate; the loss after {SECONDS} seconds", xscale="log")
    ax.margins(x=0.05)
    ax.set_xticks(RATES, [f"{rate:g}" for rate in RATES])


def draw(curves, theme, panels, height):
    """The figure, with these panels one below the other."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharey=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, curves, theme)
        ax.set_ylabel("loss")
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def main():
    """Trains, prints the table and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="pictures, without suffix")
    options = parser.parse_args()
    data, curves = digits(), {}
    print("loss at the end ", *(f"{rate:6g}" for rate in RATES), end="")
    print("   late  dropped  slow share   idle")
    for method in METHODS:
        runs = [[train(method, rate, s, data) for s in range(SEEDS)] for rate in RATES]
        losses = [[run.losses for run in same] for same in runs]
        curves[method] = np.median(losses, axis=1)  # [rates, seconds]
        ends = " ".join(f"{end:6.3f}" for end in curves[method][:, -1])
        rest = [run[1:] for same in runs for run in same]
        late, dropped, slow, idle = np.mean(rest, axis=0)
        print(f"{method:16} {ends} {late:6.1f} {dropped:8.0%}", end="")
        print(f" {slow:11.3f} {idle:6.0%}", flush=True)
    if options.out:
        both = [draw_rates, draw_time]
        save(lambda theme: draw(curves, theme, both, 5.6), options.out)
        alone, out = [draw_time], options.out.with_name("gate")
        save(lambda theme: draw(curves, theme, alone, 3.2), out)


if __name__ == "__main__":
    main()
