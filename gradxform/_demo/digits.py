"""The demo's model and data: a small convolutional net, handwritten digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
import optax

# From parameters, images and labels: the loss and its gradient.
GradientFunction: TypeAlias = Callable[..., tuple[jax.Array, optax.Updates]]


class Digits(NamedTuple):
    """Handwritten digits; the split is always the same, so that seeds compare."""

    images: np.ndarray  # float32[1437, 8, 8] in [0, 1]
    test_images: np.ndarray  # float32[360, 8, 8]
    labels: np.ndarray  # int32[1437]
    test_labels: np.ndarray  # int32[360]


def load_digits() -> Digits:
    """The 1,797 digits that scikit-learn bundles, in a stratified 80/20 split."""
    from sklearn import datasets, model_selection

    bunch = datasets.load_digits()
    images = np.asarray(bunch.images / 16, np.float32)
    labels = np.asarray(bunch.target, np.int32)
    split = model_selection.train_test_split
    return Digits(
        *split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    )


class Model(NamedTuple):
    """Pure functions of the parameters, each compiled once for all workers."""

    params: optax.Params
    gradient: GradientFunction
    logits: Callable[[optax.Params, np.ndarray], jax.Array]


def build_model(seed: int) -> Model:
    """A convolutional net of 38,000 parameters and its cross-entropy."""
    from flax import nnx

    rngs = nnx.Rngs(seed)
    net = nnx.Sequential(
        nnx.Conv(1, 16, (3, 3), rngs=rngs),
        nnx.leaky_relu,  # Not relu: a wild step could switch a unit off for good.
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
