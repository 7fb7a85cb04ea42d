"""Draws what late gradients cost at each learning rate, and what is done about them.

``python -m benchmarks.race --out benchmarks/results/race`` trains a small net on
scikit-learn's digits with eight workers, the last of them five times as slow as the
others, on the virtual clock of :func:`gradxform.engines.simulated`. ``--workers`` and
``--optimizer`` change these:

- synchronous: a step takes the mean of all eight gradients, and waits for the slowest;
- asynchronous: each gradient acts as it arrives, on average seven steps late;
- ``drop_stale``: the same, but gradients more than one step late are dropped;
- ``scale_by_staleness``: all act, and a gradient that is s steps late acts by 1 / s.

Each method is trained at the same rates. The picture has the loss at the end over the
rate, and the loss over the time at the rate that is the best one for the synchronous
training. A second picture, for the README, has the loss over the time at that rate and
at each method's best one. A point is the median of five seeds; at a rate where a
training ends in NaN it is infinite.
Nothing depends on the machine's speed, so the same releases give the same pictures:
``race-light.svg``, ``race-dark.svg``, ``gate-light.svg`` and ``gate-dark.svg``.
"""

import argparse
import functools
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import optax

import gradxform as gx
from benchmarks.plot import WIDTH, save
from gradxform import engines

WORKERS, SLOW, SECONDS, SEEDS, LIMIT = 8, 5.0, 60, 5, 1
OPTIMIZERS = {  # And their rates.
    "adagrad": (
        lambda rate: gx.adagrad(rate, global_clipnorm=1.0),
        (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    ),
    "sgd": (optax.sgd, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)),
    "momentum": (
        lambda rate: optax.sgd(rate, momentum=0.9),
        (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
    ),
    "adamw": (optax.adamw, (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032)),
}
METHODS = {  # Its gate around an optimizer, for this many workers.
    "synchronous": gx.conditional_accumulator,
    "asynchronous": lambda tx, _: gx.drop_stale(tx, np.inf),  # It only counts.
    "drop_stale": lambda tx, _: gx.drop_stale(tx, LIMIT),
    "scale_by_staleness": lambda tx, _: gx.drop_stale(
        optax.chain(tx, gx.scale_by_staleness()), np.inf
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


def worker(index, seconds, seed, data):
    """Minibatches of 32, each in about so many seconds."""

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


def train(method, tx, workers, seed, data):
    """Trains until the time is over."""
    seconds = [1.0] * (workers - 1) + [SLOW]
    job = engines.Job(
        net(seed),
        METHODS[method](tx, workers),
        [worker(index, s, seed, data) for index, s in enumerate(seconds)],
        pushes=2 * workers * SECONDS,  # More than the time allows.
        required=workers if method == "synchronous" else None,
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
        np.mean([push.worker == workers - 1 for push in applied]),
        sum(push.waited for push in pushes) / (workers * SECONDS),
    )


class Curves(NamedTuple):
    """The loss of each method, [rates, seconds]."""

    rates: tuple[float, ...]
    losses: dict[str, np.ndarray]

    def best(self, method):
        """The place of a method's best rate."""
        return int(self.losses[method][:, -1].argmin())


def look(method, theme):
    """The line of a method."""
    color, line, _ = STYLES[method]
    return {"color": theme[color], "linestyle": line, "linewidth": 2}


def draw_time(ax, curves, theme, title, place):
    """The loss over the time, at the rate in the place that each method has."""
    ax.set_title(title, fontsize="medium")
    for method, losses in curves.losses.items():
        ax.plot(losses[place(method)], **look(method, theme), label=method)
    ax.set(xlabel="seconds", yscale="log")
    ax.set(xlim=(0, SECONDS), xticks=range(0, SECONDS + 1, 20))
    ticks = [0.2, 0.5, 1, 2]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def draw_shared(ax, curves, theme):
    """At the rate that is the best one for the synchronous training."""
    shared = curves.best("synchronous")
    title = f"all at the rate {curves.rates[shared]:g}"
    draw_time(ax, curves, theme, title, lambda _: shared)


def draw_best(ax, curves, theme):
    """At the best rate of each method."""
    draw_time(ax, curves, theme, "each at its best rate", curves.best)


def draw_rates(ax, curves, theme):
    """The loss at the end, over the rates."""
    for method, losses in curves.losses.items():
        style = {**look(method, theme), "marker": STYLES[method][-1], "markersize": 5}
        ax.plot(curves.rates, losses[:, -1], **style, label=method)
    ax.set(xlabel=f"learning rate; the loss after {SECONDS} seconds", xscale="log")
    ax.margins(x=0.05)
    ax.set_xticks(curves.rates, [f"{rate:g}" for rate in curves.rates])


def draw(curves, theme, panels, height):
    """The figure, with these panels one below the other, or beside each other."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), layout="constrained")
    shape = (len(panels), 1) if height > WIDTH else (1, len(panels))
    axes = figure.subplots(*shape, sharey=True, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=True):
        panel(ax, curves, theme)
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:: shape[1]]:
        ax.set_ylabel("loss")
    handles = axes[-1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def main():
    """Trains, prints the table and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="pictures, without suffix")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    options = parser.parse_args()
    make, rates = OPTIMIZERS[options.optimizer]
    data, curves = digits(), Curves(rates, {})
    print("loss at the end ", *(f"{rate:6g}" for rate in rates), end="")
    print("   late  dropped  slow share   idle")
    for method in METHODS:
        run = functools.partial(train, method, workers=options.workers, data=data)
        runs = [[run(make(rate), seed=s) for s in range(SEEDS)] for rate in rates]
        losses = [[run.losses for run in same] for same in runs]
        losses = np.nan_to_num(losses, nan=np.inf)
        curves.losses[method] = np.median(losses, axis=1)
        ends = " ".join(f"{end:6.3f}" for end in curves.losses[method][:, -1])
        rest = [run[1:] for same in runs for run in same]
        late, dropped, slow, idle = np.mean(rest, axis=0)
        print(f"{method:16} {ends} {late:6.1f} {dropped:8.0%}", end="")
        print(f" {slow:11.3f} {idle:6.0%}", flush=True)
    if options.out:
        both = [draw_rates, draw_shared]
        save(lambda theme: draw(curves, theme, both, 5.6), options.out)
        alone, out = [draw_shared, draw_best], options.out.with_name("gate")
        save(lambda theme: draw(curves, theme, alone, 2.9), out)


if __name__ == "__main__":
    main()
