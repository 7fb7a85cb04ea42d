"""Draws a training with planted spikes under each guard.

``python -m benchmarks.spikes --out benchmarks/results/spikes`` trains a small net on
scikit-learn's digits with Adam. Four batches have a gradient and a loss 1,000 times as
large, one has a NaN, and the last third has twice the loss. It takes seconds. Nothing
depends on the machine's speed. It writes ``spikes-light.svg`` and ``spikes-dark.svg``.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from benchmarks.plot import WIDTH, save
from benchmarks.race import digits, loss, net, rng

STEPS, SPIKES, NAN, LEVEL = 300, (60, 100, 140, 180), 160, 200
RATE = 3e-3
GUARDS = {
    "no guard": optax.adam(RATE),
    "clip": optax.chain(gx.clip_by_global_norm(1.0), optax.adam(RATE)),
    "clip by z-score": optax.chain(gx.contrib.clip_by_zscore(), optax.adam(RATE)),
    "skip": gx.skip_spikes(optax.adam(RATE), window=32),
    "skip_nonfinite": gx.accumulate(optax.adam(RATE), 1, skip_nonfinite=True),
    "apply_if_finite": optax.apply_if_finite(optax.adam(RATE), 5),
}


def train(tx, images, labels):
    """The loss on all images after each step, and the last state."""
    params, images, labels = jax.tree.map(jnp.asarray, (net(0), images, labels))

    def scaled(params, batch, factor):
        return factor * loss(params, images[batch], labels[batch])

    def body(carry, pushed):
        params, state = carry
        value, grads = jax.value_and_grad(scaled)(params, *pushed)
        params, state = gx.apply_gradients(tx, grads, state, params, value=value)
        return (params, state), loss(params, images, labels)

    factors = np.ones(STEPS, np.float32)
    factors[LEVEL:] = 2
    factors[list(SPIKES)], factors[NAN] = 1000, np.nan
    batches = rng(0).integers(len(images), size=(STEPS, 64))
    (_, state), losses = jax.jit(
        lambda carry: jax.lax.scan(body, carry, (batches, factors))
    )((params, tx.init(params)))
    return np.asarray(losses), state


def draw(curves, theme):
    """The figure: a panel for each guard."""
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, 5.4), layout="constrained")
    axes = figure.subplots(3, 2, sharex=True, sharey=True)
    for ax, (name, losses) in zip(axes.flat, curves.items(), strict=True):
        ax.plot(losses, color=theme["gx"], linewidth=2)
        for step in SPIKES:
            ax.axvline(step, color=theme["keras"], linewidth=1, linestyle=":")
        ax.axvline(NAN, color=theme["torch"], linewidth=1, linestyle="--")
        ax.axvline(LEVEL, color=theme["text"], linewidth=0.8)
        if np.isnan(losses[-1]):
            ax.annotate("NaN", (NAN + 8, 1.2), color=theme["torch"])
        ax.set_title(name, fontsize=11)
        ax.set(yscale="log", xlim=(0, STEPS), xticks=(0, 100, 200, 300))
        ax.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("loss")
    figure.supxlabel("step; dotted: a spike, dashed: NaN, line: the new level", size=11)
    return figure


def main():
    """Trains, prints the losses and writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="pictures, without suffix")
    options = parser.parse_args()
    curves = {}
    for name, tx in GUARDS.items():
        curves[name], state = train(tx, *digits())
        skipped = optax.tree.get(state, "skipped_count", "-")
        worst = np.nanmax(curves[name][SPIKES[0] :])
        print(f"{name:16} {worst:8.3f} {curves[name][-1]:8.3f} {skipped}", flush=True)
    if options.out:
        save(lambda theme: draw(curves, theme), options.out)


if __name__ == "__main__":
    main()
