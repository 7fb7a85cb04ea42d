"""Draws the loss over time of synchronous, asynchronous and late-dropping training.

``python -m benchmarks.race --out benchmarks/results/race`` trains a small net on
scikit-learn's digits with eight workers, the last of them five times as slow as the
others, on the virtual clock of :func:`gradxform.engines.simulated`:

- synchronous: a step takes the mean of all eight gradients, and waits for the slowest;
- asynchronous: each gradient acts as it arrives, on average seven steps late;
- ``drop_stale``: the same, but gradients more than one step late are dropped.

All three have the same rate, at which late gradients do harm. The table also has a
smaller one. A curve is the median of five seeds. Nothing depends on the machine's
speed, so the same releases give the same pictures: ``race-light.svg`` and
``race-dark.svg``.
"""

import argparse
import pathlib

import jax
import numpy as np
import optax

import gradxform as gx
from benchmarks.plot import WIDTH, save
from gradxform import engines

WORKERS, SLOW, SECONDS, SEEDS, RATE, LIMIT = 8, 5.0, 60, 5, 0.3, 1
METHODS = {
    "synchronous": lambda tx: gx.conditional_accumulator(tx, WORKERS),
    "asynchronous": lambda tx: gx.drop_stale(tx, np.inf),  # It only counts.
    "drop_stale": lambda tx: gx.drop_stale(tx, LIMIT),
}
STYLES = [("keras", "--"), ("torch", ":"), ("gx", "-")]


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


def curve(method, rate, seed, data):
    """The loss on all images at each second, and the share of pushes dropped."""
    job = engines.Job(
        net(seed),
        METHODS[method](gx.adagrad(rate, global_clipnorm=1.0)),
        [worker(index, seed, data) for index in range(WORKERS)],
        pushes=2 * WORKERS * SECONDS,  # More than the time allows.
        required=WORKERS if method == "synchronous" else None,
    )
    losses, late, pushes = [], 0, 0
    with engines.simulated(job) as run:
        params = net(seed)
        for push in run.pushes:
            while len(losses) <= SECONDS and push.time > len(losses):
                losses.append(float(LOSS(params, *data)))
            if len(losses) > SECONDS:
                break
            params, _ = run.server.pull()
            late, pushes = late + (not push.result.applied), pushes + 1
    return losses, late / pushes


def draw(curves, theme):
    """The figure: a line for each method, named at its end."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, 3.2), layout="constrained")
    ax = figure.subplots()
    for (method, losses), (shade, line) in zip(curves.items(), STYLES, strict=True):
        ax.plot(losses, color=theme[shade], linestyle=line, linewidth=2.2)
        end = (SECONDS, losses[-1])
        words = {"color": theme[shade], "va": "center", "annotation_clip": False}
        ax.annotate(f" {method}", end, **words)
    ax.set(xlabel="seconds of the virtual clock", ylabel="loss", yscale="log")
    ax.set(xlim=(0, SECONDS), xticks=range(0, SECONDS + 1, 10))
    ticks = [0.2, 0.5, 1, 2, 5]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def main():
    """Trains, prints the table and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="pictures, without suffix")
    options = parser.parse_args()
    data, curves, shown = digits(), {}, range(10, SECONDS + 1, 10)
    print("the loss after s", *(f"{second:5}" for second in shown), "  dropped")
    for rate in (RATE / 3, RATE):
        for method in METHODS:
            runs = [curve(method, rate, seed, data) for seed in range(SEEDS)]
            median = np.median([losses for losses, _ in runs], axis=0)
            reached = " ".join(f"{median[second]:5.2f}" for second in shown)
            dropped = np.mean([share for _, share in runs])
            print(f"{rate:g} {method:13}{reached} {dropped:9.0%}", flush=True)
            curves[method] = median
    if options.out:
        save(lambda theme: draw(curves, theme), options.out)


if __name__ == "__main__":
    main()
