"""Whether arrays on the host change what a training gives, on the device at hand.

``python -m benchmarks.largest --check`` runs it. A step by layers reads stacks on the
host in a loop, and the backward pass reads them from the last layer to the first. Two
public reports, openxla/xla 46231 and 47218, say that XLA gave wrong numbers for such
loops on a GPU. So the same steps run again with all arrays on the device.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

import gradxform as gx
from benchmarks import trainings
from benchmarks.models import next_tokens

# Two programs round differently, and a first step of Adam makes much of small
# gradients. A layer that is read from a wrong place differs by all that it learned.
MOST = 0.2


class Trained(NamedTuple):
    """What some steps give.

    Attributes:
      losses: of each step, and after them by ``gx.evaluate``.
      before: the parameters before the first step, in float32.
      after: those after the last one.
    """

    losses: np.ndarray
    before: Any
    after: Any


def trained(training, params, tokens, steps):
    """Trains a model on the device at hand, and evaluates it."""

    def held(params):
        return jax.tree.map(lambda x: np.array(x, np.float32), jax.device_get(params))

    params = gx.on_host(params) if training.params_too else params
    state = trainings.state_of(training, params)
    step, before, losses = trainings.step_of(training), held(params), []
    for _ in range(steps):
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    evaluated = gx.evaluate(next_tokens, layers=training.layers)
    losses.append(float(evaluated(params, tokens)))
    return Trained(np.array(losses), before, held(params))


def differences(one, other, layers):
    """How far two trainings differ, by name: losses, and what each layer learned.

    For a layer it is |x - y| / |y - before|, by the norms of its entries.
    """

    def part(path, x, y, before):
        axes = tuple(range(path[0].key in layers, x.ndim))
        learned = np.sqrt(np.sum((y - before) ** 2, axes))
        apart = np.sqrt(np.sum((x - y) ** 2, axes))
        return np.divide(
            apart, learned, out=np.array(np.sign(apart)), where=learned > 0
        )

    found = jax.tree.map_with_path(part, one.after, other.after, one.before)
    parts = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        + f", layer {i}" * x.ndim: y
        for path, x in jax.tree.leaves_with_path(found)
        for i, y in enumerate(np.atleast_1d(x).tolist())
    }
    losses = float(np.max(np.abs(one.losses / other.losses - 1)))
    return {"the losses": losses} | parts


def check(training, layers, sequences, steps):
    """Compares a training that has arrays on the host with one that has none there."""
    on_device = training._replace(on_host=False, params_too=False)
    params, tokens = trainings.drawn_model(on_device, layers, sequences)
    copied = jax.tree.map(lambda x: x + 0, params)  # A step takes its memory.
    there = trained(training, copied, tokens, steps)
    here = trained(on_device, params, tokens, steps)
    found = differences(there, here, training.layers)
    # A NaN is the largest difference.
    place = max(found, key=lambda name: np.nan_to_num(found[name], nan=np.inf))
    most = found[place]
    return {
        "device": jax.devices()[0].device_kind,
        "losses": ", ".join(f"{x:.4f}" for x in there.losses),
        "on the device": ", ".join(f"{x:.4f}" for x in here.losses),
        "they": "are equal" if most == 0 else f"differ by {most:.2g} at {place}",
        "is": "right" if most <= MOST else "WRONG",
    }
