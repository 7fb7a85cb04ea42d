"""Makes keras3_schedules.json: the learning rates of Keras 3's schedules.

With Python 3.11, from the repository's root:

    pip install "keras==3.15.1" "jax==0.10.2"
    python benchmarks/golden/make_keras3_schedules.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import _format
import jax
import keras
import numpy as np

SCHEDULES = {
    "exponential": ("ExponentialDecay", (0.5, 3, 0.7), {}),
    "exponential-staircase": ("ExponentialDecay", (0.5, 3, 0.7), {"staircase": True}),
    "inverse-time": ("InverseTimeDecay", (0.5, 3, 0.7), {}),
    "inverse-time-staircase": ("InverseTimeDecay", (0.5, 3, 0.7), {"staircase": True}),
    "cosine": ("CosineDecay", (0.5, 7), {"alpha": 0.1}),
    "cosine-warmup": (
        "CosineDecay",
        (0.1, 7),
        {"alpha": 0.1, "warmup_target": 0.5, "warmup_steps": 4},
    ),
    "cosine-no-warmup-steps": ("CosineDecay", (0.1, 7), {"warmup_target": 0.5}),
    "cosine-warmup-without-target": ("CosineDecay", (0.1, 7), {"warmup_steps": 4}),
    "piecewise-constant": (
        "PiecewiseConstantDecay",
        ([2, 5, 6], [0.5, 0.3, 0.0, 0.1]),
        {},
    ),
    "piecewise-constant-fractions": (
        "PiecewiseConstantDecay",
        ([2.5, 5.0], [0.5, 0.3, 1.0]),
        {},
    ),
    "cosine-restarts": ("CosineDecayRestarts", (0.5, 3, 1.5, 0.8), {"alpha": 0.1}),
    "polynomial": ("PolynomialDecay", (0.5, 6, 0.01), {}),
    "polynomial-root": ("PolynomialDecay", (0.5, 6, 0.01), {"power": 0.5}),
    "polynomial-cycle": (
        "PolynomialDecay",
        (0.5, 6, 0.01),
        {"power": 2.0, "cycle": True},
    ),
}
COUNTS = [*range(13), 20, 29]


def case(name, symbol, args, kwargs):
    schedule = getattr(keras.optimizers.schedules, symbol)(*args, **kwargs)
    return {
        "name": name,
        "symbol": "keras.optimizers.schedules." + symbol,
        "config": keras.optimizers.schedules.serialize(schedule),
        "counts": COUNTS,
        "rates": [np.asarray(schedule(jax.numpy.int32(count))) for count in COUNTS],
    }


def main():
    cases = [case(name, *args) for name, args in SCHEDULES.items()]
    versions = {"keras": keras.__version__, "backend": "jax", "jax": jax.__version__}
    _format.write(__file__, versions, cases)


if __name__ == "__main__":
    main()
