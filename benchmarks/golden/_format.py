"""Shared by the makers: the inputs that they feed, and how a trace is written.

Runs on Python 3.7 and later with NumPy alone. The inputs come from
``RandomState.random_sample``, whose stream is fixed across NumPy versions, so the
same variant name means bit-identical gradients in every file.
"""

import json
import os
import platform
import sys

import numpy as np

SHAPES = {"w": (4, 3), "b": (3,), "s": (), "k": (2, 1, 3)}
"""The leaves, in the order in which their values are drawn."""

VARIANTS = {"plain": 1, "scales": 2, "zero-start": 3}
"""The gradient sequences and their seeds.

plain       uniform in (-1, 1).
scales      the same, times 1e-3, 1, 1e3, 1e-3, ... step by step.
zero-start  the first two steps are zero everywhere, "b" at every step; some of
            these zeros are -0.0.
"""


def params(leaves=tuple(SHAPES)):
    """The initial parameters: multiples of 1/128 in (-1, 1), leaf by leaf."""
    rng = np.random.RandomState(0)
    drawn = {name: rng.random_sample(shape) for name, shape in SHAPES.items()}
    return {
        name: np.float32(np.round(256 * drawn[name] - 128) / 128) for name in leaves
    }


def gradients(variant, steps, leaves=tuple(SHAPES)):
    """``steps`` dicts of float32 gradients; a longer sequence extends a shorter one."""
    rng = np.random.RandomState(VARIANTS[variant])
    sequence = []
    for step in range(steps):
        drawn = {name: 2 * rng.random_sample(s) - 1 for name, s in SHAPES.items()}
        if variant == "scales":
            drawn = {name: g * (1e-3, 1.0, 1e3)[step % 3] for name, g in drawn.items()}
        if variant == "zero-start":
            drawn = {name: g * (step > 1 and name != "b") for name, g in drawn.items()}
        sequence.append({name: np.float32(drawn[name]) for name in leaves})
    return sequence


def spiky(seed, steps):
    """Pairs of float32 gradients and losses: with spikes in one of the two, in both,
    and with a new level of both after two thirds of the steps."""
    rng = np.random.RandomState(seed)
    pairs = []
    for step in range(steps):
        g, (size, loss) = 2 * rng.random_sample(3) - 1, 2 * rng.random_sample(2) - 1
        size, loss = 1 + 0.1 * size, 3 - step / 200 + 0.1 * loss
        if step % 17 == 13:
            size *= (3, 1, 40)[step // 17 % 3]
            loss *= (1, 2, 5)[step // 17 % 3]
        if step > 2 * steps / 3:
            size, loss = 1.6 * size, 1.3 * loss
        pairs.append(({"w": np.float32(size * g / np.linalg.norm(g))}, loss))
    return pairs


_RATE = {"learning_rate": 0.1, "initial_accumulator_value": 0.1, "epsilon": 1e-7}
_BARE = {"learning_rate": 0.1, "initial_accumulator_value": 0.0, "epsilon": 1e-7}
EXPONENTIAL = {
    "schedule": "ExponentialDecay",
    "initial_learning_rate": 0.5,
    "decay_steps": 2,
    "decay_rate": 0.7,
}

ADAGRAD = [
    ("plain", "plain", dict(_RATE)),
    ("scales", "scales", dict(_RATE)),
    ("zero-start", "zero-start", dict(_BARE)),
    ("large-epsilon", "scales", dict(_BARE, learning_rate=0.5, epsilon=1e-3)),
    ("zero-epsilon", "zero-start", dict(_BARE, epsilon=0.0)),
    ("clipnorm", "scales", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-0", "scales", dict(_RATE, clipnorm=0.0)),
    ("clipvalue", "scales", dict(_RATE, clipvalue=0.5)),
    ("exponential-decay", "plain", dict(_RATE, learning_rate=EXPONENTIAL)),
]
"""What every Keras-like Adagrad is run with: (name, variant, its arguments)."""

GLOBAL_CLIPNORM = ("global-clipnorm", "scales", dict(_RATE, global_clipnorm=1.0))
TWO_CLIPS = ("two-clips", "scales", dict(_RATE, clipnorm=1.0, clipvalue=0.25))


_FTRL = {
    "learning_rate": 0.5,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
}
_REGULARIZED = dict(
    _FTRL, l1_regularization_strength=0.6, l2_regularization_strength=0.3
)

FTRL = [
    ("plain", "plain", dict(_FTRL)),
    ("scales", "scales", dict(_FTRL)),
    ("zero-start", "zero-start", dict(_FTRL)),
    ("zero-start-bare", "zero-start", dict(_FTRL, initial_accumulator_value=0.0)),
    ("regularized", "plain", dict(_REGULARIZED)),
    ("regularized-scales", "scales", dict(_REGULARIZED)),
    ("power", "plain", dict(_REGULARIZED, learning_rate_power=-0.7)),
    ("fixed-rate", "plain", dict(_REGULARIZED, learning_rate_power=0.0)),
    (
        "shrinkage",
        "plain",
        dict(_REGULARIZED, l2_shrinkage_regularization_strength=0.1),
    ),
]
"""What every FTRL is run with: (name, variant, its arguments)."""

KERAS_FTRL = [
    *FTRL,
    ("clipnorm", "scales", dict(_REGULARIZED, clipnorm=1.0)),
    ("clipvalue", "scales", dict(_REGULARIZED, clipvalue=0.5)),
    ("exponential-decay", "plain", dict(_REGULARIZED, learning_rate=EXPONENTIAL)),
]
"""What every FTRL of Keras is run with."""

MULTIPLIED_FTRL = [
    ("plain", "plain", dict(_REGULARIZED, learning_rate=EXPONENTIAL)),
    (
        "shrinkage",
        "plain",
        dict(
            _REGULARIZED,
            learning_rate=EXPONENTIAL,
            l2_shrinkage_regularization_strength=0.1,
        ),
    ),
]
BETA = ("beta", "plain", dict(_REGULARIZED, beta=0.5))
FTRL_GLOBAL_CLIPNORM = (
    "global-clipnorm",
    "scales",
    dict(_REGULARIZED, global_clipnorm=1.0),
)


_PROXIMAL = {
    "learning_rate": 0.3,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.4,
    "l2_regularization_strength": 0.2,
}
PROXIMAL_ADAGRAD = [
    ("plain", "plain", dict(_PROXIMAL)),
    ("scales", "scales", dict(_PROXIMAL)),
    ("zero-start", "zero-start", dict(_PROXIMAL)),
    ("l1", "plain", dict(_PROXIMAL, l2_regularization_strength=0.0)),
    ("l2", "plain", dict(_PROXIMAL, l1_regularization_strength=0.0)),
]
"""What ``tf.train.ProximalAdagradOptimizer`` is run with."""


def spoiled(step, key):
    """A short sequence with one NaN."""
    pairs = spiky(3, 24)
    grads, loss = pairs[step]
    nan = np.float32("nan")
    pairs[step] = (grads, nan) if key == "loss" else ({"w": grads["w"] * nan}, loss)
    return pairs


def coarse(seed, steps, size=8, parts=128):
    """Gradients "w" that bfloat16 holds: multiples of 1/parts in (-1, 1)."""
    rng = np.random.RandomState(seed)
    drawn = np.round(parts * (2 * rng.random_sample((steps, size)) - 1)) / parts
    return [{"w": np.float32(g)} for g in drawn]


def wide(seed, size):
    """Numbers of both signs over four orders of magnitude, none of them a tie."""
    rng = np.random.RandomState(seed)
    mantissas = 1 + np.floor(2**23 * rng.random_sample(size)) / 2**23
    sizes = 2.0 ** -np.floor(14 * rng.random_sample(size))
    signs = np.where(rng.random_sample(size) < 0.5, -1, 1)
    return np.float32(signs * mantissas * sizes)


class Bowl:
    """4,096 numbers that noisy gradients pull to their targets.

    The curvatures are powers of two from 1 to 1/64. A mean of squares is the loss.
    """

    def __init__(self, seed=7, size=4096):
        self.rng, shape = np.random.RandomState(seed), (size // 64, 64)
        draw = self.rng.random_sample
        self.start = np.float32(np.round(256 * draw(shape) - 128) / 128)
        away = np.round(2**16 * draw(shape)) / 2**18 - 1 / 8
        self.target = self.start + np.float32(away)
        self.curvature = np.float32(2.0 ** -np.floor(7 * draw(shape)))

    def gradient(self, w):
        """The next gradient at w, in float32."""
        noise = np.float32(self.rng.random_sample(w.shape) - 0.5)
        return self.curvature * (np.float32(w) - self.target) + noise / 16

    def loss(self, w):
        """The loss at w, in float64."""
        return np.mean(self.curvature * np.square(np.float64(w) - self.target)) / 2


def scheduled(adagrad_case_name, **schedule):
    """One more case like ADAGRAD's: a schedule, by its class name and arguments."""
    return (adagrad_case_name, "plain", dict(_RATE, learning_rate=schedule))


COSINE = scheduled(
    "cosine-decay",
    schedule="CosineDecay",
    initial_learning_rate=0.5,
    decay_steps=5,
    alpha=0.1,
)


def inners(rate):
    """By name, the optimizers inside of others: symbol, arguments, and ours."""
    sgd = {"transformation": "sgd", "learning_rate": rate}
    adagrad = {"learning_rate": rate, "initial_accumulator_value": 0.1}
    momentum = {"learning_rate": rate, "momentum": 0.9}
    return {
        "sgd": ("tf.train.GradientDescentOptimizer", {"learning_rate": rate}, sgd),
        "adagrad": (
            "tf.train.AdagradOptimizer",
            adagrad,
            dict({"transformation": "adagrad"}, **dict(adagrad, eps=0.0)),
        ),
        "momentum": (
            "tf.train.MomentumOptimizer",
            momentum,
            dict(sgd, momentum=0.9),
        ),
        "nesterov": (
            "tf.train.MomentumOptimizer",
            dict(momentum, use_nesterov=True),
            dict(sgd, momentum=0.9, nesterov=True),
        ),
    }


def build(settings, schedules):
    """The constructor's arguments; a rate that names a schedule becomes one."""
    settings = dict(settings)
    if isinstance(settings.get("learning_rate"), dict):
        schedule = dict(settings["learning_rate"])
        make = getattr(schedules, schedule.pop("schedule"))
        settings["learning_rate"] = make(**schedule)
    return settings


def rates(settings, steps):
    """The learning rate for "ours": a number, or one a step where it changes."""
    if isinstance(settings["learning_rate"], dict) or "decay" in settings:
        return [step["learning_rate"] for step in steps]
    return settings["learning_rate"]


def ours_adagrad(settings, steps, eps_in_sqrt):
    """gradxform's arguments for a Keras-like Adagrad."""
    ours = {
        "transformation": "adagrad",
        "learning_rate": rates(settings, steps),
        "initial_accumulator_value": settings["initial_accumulator_value"],
        "eps": settings["epsilon"],
        "eps_in_sqrt": eps_in_sqrt,
    }
    for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
        if clip in settings:
            ours[clip] = settings[clip]
    return ours


def ours_ftrl(settings, steps):
    """gradxform's arguments for FTRL: the same names."""
    return dict(settings, transformation="ftrl", learning_rate=rates(settings, steps))


def compared(ours, why_not=None):
    """What a case says of our side: ours, or why there is none."""
    return {"ours": None, "why_not": why_not} if why_not else {"ours": ours}


def write(maker, versions, cases):
    """Writes the cases of ``make_x.py`` to ``tests/golden/x.json``, a step a line."""
    names = [case["name"] for case in cases]
    assert len(set(names)) == len(names), "two cases of one name"
    made_with = {"python": platform.python_version(), "numpy": np.__version__}
    made_with.update(versions)
    blocks = []
    for case in cases:
        lines = []
        for key, value in case.items():
            if key in ("steps", "events"):
                rows = ",\n".join("    " + _dump(row) for row in value)
                lines.append('   "' + key + '": [\n' + rows + "\n   ]")
            else:
                lines.append("   " + json.dumps(key) + ": " + _dump(value))
        blocks.append("  {\n" + ",\n".join(lines) + "\n  }")
    text = '{\n "made_with": ' + _dump(made_with)
    text += ',\n "cases": [\n' + ",\n".join(blocks) + "\n ]\n}\n"
    name = os.path.basename(maker)[len("make_") : -len(".py")] + ".json"
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(here, "..", "..", "tests", "golden", name)
    with open(path, "w") as file:
        file.write(text)
    sys.stdout.write(
        f"{os.path.basename(path)}: {len(cases)} cases, {len(text)} bytes\n"
    )


def _dump(value):
    return json.dumps(_plain(value))


def _plain(value):
    """Arrays to nested lists, so that each float prints as the repr of its float64."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value
