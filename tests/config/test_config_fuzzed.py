"""Configs spoiled at random: each is refused with its place named, or it is built."""

import copy
import json
import random

import optax
import pytest

import gradxform as gx
from tests.config import test_config as examples

CONFIGS = [
    *map(examples.config_of, examples.ROWS),
    *(config for config, _ in examples.WRITERS.values()),
    examples.NESTED,
    {**examples.KERAS3, "weight_decay": 0.1, "learning_rate": examples.EXPONENTIAL},
    {"name": "optax.adamw", "learning_rate": 0.1, "b1": 0.9, "mu_dtype": "bfloat16"},
    {"name": "optax.scale_by_schedule", "step_size_fn": examples.INVERSE},
    {"name": "optax.contrib.prodigy", "betas": [0.9, 0.99]},
]
NAMES = [f"optax.{name}" for name in dir(optax)]
NAMES += [*examples.OURS, "at_last_push", "linear_schedule", "join_schedules"]
VALUES = [
    *(None, True, 0, -1, 2, 0.5, 1e30, 10**30, 2**31, 1e39),
    *(float("nan"), float("inf"), "", "abc", "1e-3", "0", "float32", "int32"),
    *([], [1], ["a"], [[1]], {}, {"a": 1}, {"name": "a"}, {"name": 5}, {"1": 0.5}),
    *({"x": 0.5}, {1.5: 0.5}, {10**30: 0.5}, {"class_name": "ExponentialDecay"}),
    *({"class_name": "Adagrad", "config": None}, {"use_ema": True}),
    *(examples.INVERSE, examples.ADAGRAD),
]


def places(config):
    """(container, key) of every entry."""
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    for key, entry in list(entries):
        yield config, key
        if isinstance(entry, dict | list):
            yield from places(entry)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_spoiled_configs_are_refused_or_built(seed):
    rng, refused = random.Random(seed), []
    for _ in range(200):
        config = copy.deepcopy(rng.choice(CONFIGS))
        for _ in range(rng.choice([1, 1, 2, 3])):
            container, key = rng.choice([*places(config), (config, "name")])
            spoil = rng.random()
            if spoil < 0.1 and isinstance(container, dict):
                container.pop(key, None)
            else:
                drawn = rng.choice(NAMES if key == "name" else VALUES)
                container[key] = copy.deepcopy(drawn)
        before = repr(config)
        try:
            tx = gx.from_config(config)
        except (TypeError, ValueError) as error:
            refused.append(str(error))
        else:
            gx.from_config(json.loads(json.dumps(gx.get_config(tx))))
        assert repr(config) == before
    assert all(message.startswith("config") for message in refused)
    assert 100 < len(refused) < 200
