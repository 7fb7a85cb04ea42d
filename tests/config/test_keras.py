"""Keras 3 on its JAX backend, beside the transformations that its own configs build."""

import json

import chex
import jax
import numpy as np
import pytest

import gradxform as gx
from tests.config.test_config import KERAS3_SCHEDULES, PARAMS, gradients, through_json

pytestmark = [
    pytest.mark.slow,
    # Keras warns of this under NumPy 2.
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
]


@pytest.fixture
def keras(monkeypatch, standard_promotion):
    """Keras, on its JAX backend."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    import keras

    return keras


SETTINGS = {
    "plain": {},
    "accumulator": {"initial_accumulator_value": 0.5, "epsilon": 1e-2},
    "clipnorm": {"clipnorm": 0.5},
    "clipnorm-0": {"clipnorm": 0.0},
    "clipvalue": {"clipvalue": 0.2},
    "global-clipnorm": {"global_clipnorm": 0.5},
    "weight-decay": {"weight_decay": 0.1},
    "weight-decay-0": {"weight_decay": 0.0},
    "weight-decay-clipnorm": {"weight_decay": 0.1, "clipnorm": 0.5},
    "weight-decay-clipvalue": {"weight_decay": 0.1, "clipvalue": 0.2},
    "weight-decay-global-clipnorm": {"weight_decay": 0.1, "global_clipnorm": 0.5},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation-0": {"gradient_accumulation_steps": 0},
    "accumulation-weight-decay-clipnorm": {
        "gradient_accumulation_steps": 3,
        "weight_decay": 0.1,
        "clipnorm": 0.5,
    },
}


CASES = [("Adagrad", setting, None) for setting in SETTINGS]
CASES += [("Adagrad", "plain", name) for name in KERAS3_SCHEDULES]
CASES += [
    ("Adagrad", *case)
    for case in (
        *(("weight-decay", name) for name in ("exponential", "cosine-warmup")),
        # There the rates count pushes, not steps.
        *(("accumulation", name) for name in ("exponential", "piecewise-constant")),
        ("accumulation-weight-decay-clipnorm", "cosine-warmup"),
    )
]
CASES += [("Ftrl", k, "exponential") for k in SETTINGS if k != "accumulator"]
OF_FTRL = {
    "beta": 0.2,
    "l1_regularization_strength": 0.5,
    "l2_regularization_strength": 0.1,
}


@pytest.mark.parametrize(("name", "setting", "schedule"), CASES)
def test_trains_as_keras_does_step_for_step(keras, name, setting, schedule):
    rate = 0.3
    if schedule:
        config = KERAS3_SCHEDULES[schedule]["config"]
        rate = keras.optimizers.schedules.deserialize(config)
    more = OF_FTRL if name == "Ftrl" else {}
    optimizer = getattr(keras.optimizers, name)(rate, **SETTINGS[setting], **more)
    if name == "Ftrl" and SETTINGS[setting].get("weight_decay"):
        with pytest.raises(ValueError, match=r"weight_decay=0\.1 is not offered"):
            gx.from_config(optimizer.get_config())
    else:
        trains_alike(keras, optimizer)


def trains_alike(keras, optimizer):
    tx = gx.from_config(optimizer.get_config())
    config = gx.get_config(tx)
    serialized = through_json(keras.optimizers.serialize(optimizer))
    assert gx.get_config(gx.from_config(serialized)) == config
    assert gx.get_config(gx.from_config(through_json(config))) == config
    assert "class_name" not in json.dumps(config)  # It has our names.

    variables = {k: keras.Variable(p, name=k) for k, p in PARAMS.items()}
    optimizer.build(list(variables.values()))
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p))
    for grads in gradients(9):
        optimizer.apply([grads[k] for k in variables])
        params, state = step(grads, state, params)
        expected = {k: np.asarray(v.value) for k, v in variables.items()}
        chex.assert_trees_all_close(params, expected, rtol=1e-6, atol=1e-6)


def test_the_name_that_a_user_chose(keras):
    optimizer = keras.optimizers.Adagrad(0.5, name="mine")
    with pytest.raises(ValueError, match="unknown name 'mine'"):
        gx.from_config(optimizer.get_config())
    config = gx.get_config(gx.from_config(keras.optimizers.serialize(optimizer)))
    given = {"initial_accumulator_value": 0.1, "eps": 1e-7, "eps_in_sqrt": True}
    assert config == {"name": "adagrad", "learning_rate": 0.5, **given}
    numbered = keras.optimizers.Adagrad(0.5, name="adagrad_12").get_config()
    assert gx.get_config(gx.from_config(numbered)) == config
    # A class derived from Keras's is not taken for it.
    derived = type("Adagrad", (keras.optimizers.Adagrad,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match=r"class 'Adagrad' of None is not read"):
        gx.from_config(keras.optimizers.serialize(derived(0.1)))
