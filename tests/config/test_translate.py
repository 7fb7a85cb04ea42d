"""Configs of Keras in the names of this library, written by hand from Keras's docs."""

import copy

import pytest

from gradxform._config import keras
from tests.config.test_config import (
    KERAS3,
    KERAS3_FTRL,
    LEGACY,
    LEGACY_FTRL,
    TF1_FTRL,
    TF2,
    TFA,
)

COMMON = {"initial_accumulator_value": 0.1, "eps": 1e-07, "eps_in_sqrt": True}
OURS = {"name": "adagrad", "learning_rate": KERAS3["learning_rate"], **COMMON}
OF_LEGACY = {**OURS, "learning_rate": 0.1, "eps_in_sqrt": False}
SCALED = {"name": "scale_by_adagrad", **COMMON}
FTRL = {
    "name": "ftrl",
    "initial_accumulator_value": 0.1,
    "beta": 0.0,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
}
NOVOGRAD = {
    "name": "novograd",
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-07,
    "weight_decay": 0.0,
    "eps_in_sqrt": False,
    "lr_in_momentum": True,
    "learning_rate": 0.001,
}
SCHEDULE = {"class_name": "CosineDecay", "config": {"initial_learning_rate": 0.1}}


def chain(*links):
    rate = {"name": "scale_by_learning_rate", "learning_rate": OURS["learning_rate"]}
    return {"name": "chain", "transforms": [*links, rate]}


def decayed(weight_decay):
    return {"name": "optax.add_decayed_weights", "weight_decay": weight_decay}


def serialized(class_name, config, **around):
    return {"class_name": class_name, "config": config, **around}


def accumulated(number, inner):
    return {"name": "accumulate", "inner": inner, "num_required": number}


def schedule(class_name, **config):
    return serialized(class_name, config, module="keras.optimizers.schedules")


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


RIGHT = [
    # Optimizers: by the name alone, or serialized.
    (KERAS3, OURS),
    (TF2, {**OURS, "learning_rate": 0.1}),
    (LEGACY, OF_LEGACY),
    ({**KERAS3, "name": "adagrad_12"}, OURS),
    (serialized("Adagrad", KERAS3, module="keras.optimizers", build_config={}), OURS),
    (
        serialized("Custom>Adagrad", {**TF2, "name": "mine"}),
        {**OURS, "learning_rate": 0.1},
    ),
    (serialized("Adagrad", KERAS3, module="tf_keras.x", registered_name=None), OURS),
    (KERAS3_FTRL, {**FTRL, "learning_rate": OURS["learning_rate"]}),
    (LEGACY_FTRL, {**FTRL, "learning_rate": 0.1}),
    (TF1_FTRL, {**FTRL, "learning_rate": 0.1}),
    ({**LEGACY_FTRL, "beta": 0.5}, {**FTRL, "learning_rate": 0.1, "beta": 0.5}),
    (TFA, NOVOGRAD),
    (serialized("Addons>NovoGrad", {**TFA, "amsgrad": False}), NOVOGRAD),
    # Clips; in Keras 3 a limit of 0 is none.
    ({**KERAS3, "clipnorm": 0.5}, {**OURS, "clipnorm": 0.5}),
    ({**KERAS3, "clipvalue": 0.0}, OURS),
    ({**LEGACY, "clipvalue": 0.0}, {**OF_LEGACY, "clipvalue": 0.0}),
    ({**LEGACY, "global_clipnorm": 3.0}, {**OF_LEGACY, "global_clipnorm": 3.0}),
    # Decays.
    (
        {**LEGACY, "decay": 0.5},
        {
            **OF_LEGACY,
            "learning_rate": {
                "name": "inverse_time_decay",
                "init_value": 0.1,
                "transition_steps": 1,
                "decay_rate": 0.5,
            },
        },
    ),
    ({**KERAS3, "weight_decay": 0.0}, OURS),
    ({**KERAS3, "weight_decay": 0.2}, chain(SCALED, decayed(0.2))),
    *(
        (
            {**KERAS3, "weight_decay": 0.2, key: 2.0},
            chain({"name": name, limit: 2.0}, SCALED, decayed(0.2)),
        )
        for key, name, limit in (
            ("clipnorm", "clip_by_norm", "max_norm"),
            ("clipvalue", "optax.clip", "max_delta"),
            ("global_clipnorm", "clip_by_global_norm", "max_norm"),
        )
    ),
    # Micro-batches, which Keras's schedules count.
    ({**KERAS3, "gradient_accumulation_steps": 0}, OURS),
    ({**KERAS3, "gradient_accumulation_steps": 3}, accumulated(3, OURS)),
    (
        {**KERAS3, "gradient_accumulation_steps": 3, "weight_decay": 0.2},
        accumulated(3, chain(SCALED, decayed(0.2))),
    ),
    ({**KERAS3, "learning_rate": SCHEDULE}, {**OURS, "learning_rate": SCHEDULE}),
    (
        {**KERAS3, "learning_rate": SCHEDULE, "gradient_accumulation_steps": 3},
        accumulated(
            3,
            {
                **OURS,
                "learning_rate": {
                    "name": "at_last_push",
                    "schedule": SCHEDULE,
                    "num_required": 3,
                },
            },
        ),
    ),
    # Schedules.
    (
        schedule(
            "ExponentialDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            decay_rate=0.5,
            staircase=True,
            name=None,
        ),
        {
            "name": "exponential_decay",
            "init_value": 0.1,
            "transition_steps": 4,
            "decay_rate": 0.5,
            "staircase": True,
        },
    ),
    (
        schedule(
            "InverseTimeDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            decay_rate=0.5,
            staircase=False,
        ),
        {
            "name": "inverse_time_decay",
            "init_value": 0.1,
            "transition_steps": 4,
            "decay_rate": 0.5,
            "staircase": False,
        },
    ),
    (
        schedule(
            "PolynomialDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            end_learning_rate=0.01,
            power=2.0,
            cycle=True,
        ),
        {
            "name": "polynomial_decay",
            "init_value": 0.1,
            "transition_steps": 4,
            "end_value": 0.01,
            "power": 2.0,
            "cycle": True,
        },
    ),
    (
        schedule(
            "CosineDecayRestarts",
            initial_learning_rate=0.1,
            first_decay_steps=4,
            t_mul=3.0,
            m_mul=0.5,
            alpha=0.01,
        ),
        {
            "name": "cosine_decay_restarts",
            "init_value": 0.1,
            "first_decay_steps": 4,
            "t_mul": 3.0,
            "m_mul": 0.5,
            "alpha": 0.01,
        },
    ),
    (
        schedule(
            "LinearCosineDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            num_periods=1.5,
            alpha=0.01,
            beta=0.02,
        ),
        {
            "name": "linear_cosine_decay",
            "init_value": 0.1,
            "decay_steps": 4,
            "num_periods": 1.5,
            "alpha": 0.01,
            "beta": 0.02,
        },
    ),
    (
        schedule("CosineDecay", initial_learning_rate=0.1, decay_steps=4, alpha=0.01),
        {
            "name": "cosine_decay_schedule",
            "init_value": 0.1,
            "decay_steps": 4,
            "alpha": 0.01,
        },
    ),
    (
        schedule(
            "CosineDecay",
            initial_learning_rate=0.1,
            decay_steps=4,
            alpha=0.01,
            warmup_target=0.5,
            warmup_steps=2,
        ),
        {
            "name": "join_schedules",
            "schedules": [
                {
                    "name": "linear_schedule",
                    "init_value": 0.1,
                    "end_value": 0.5,
                    "transition_steps": 2,
                },
                {
                    "name": "cosine_decay_schedule",
                    "init_value": 0.5,
                    "decay_steps": 4,
                    "alpha": 0.01,
                },
            ],
            "boundaries": [2],
        },
    ),
    (
        # At a boundary Keras still takes the old value; optax takes the new one.
        schedule("PiecewiseConstantDecay", boundaries=[3, 5.0], values=[1, 2, 3]),
        {
            "name": "join_schedules",
            "schedules": [
                {"name": "constant_schedule", "value": value} for value in (1, 2, 3)
            ],
            "boundaries": [4, 6],
        },
    ),
    # Not of Keras.
    *(
        (config, config)
        for config in (
            {},
            {"name": "adagrad", "learning_rate": 0.1},
            {"name": "adagrad", "beta_1": 0.9},
            {"name": "lion", "use_ema": False},
            {"name": "lion", "beta_1": 1, "beta_2": 1, "epsilon": 1},
            {"class_name": 3, "config": {}},
            {"name": 3, "use_ema": False},
        )
    ),
]


@pytest.mark.every
@pytest.mark.parametrize(("config", "ours"), RIGHT, ids=range(len(RIGHT)))
def test_a_config_of_keras(config, ours):
    given = copy.deepcopy(config)
    keras.translate(given)
    assert given == ours


WRONG = [
    ({**KERAS3, "use_ema": True}, r"^use_ema=True is not offered\. Write false, and"),
    ({**KERAS3, "loss_scale_factor": 2.0}, r"^loss_scale_factor=2\.0 is not offered"),
    ({**KERAS3_FTRL, "weight_decay": 0.1}, r"^weight_decay=0\.1 is not offered"),
    ({**TFA, "amsgrad": True}, r"^amsgrad=True is not offered\. Write false"),
    ({**TFA, "grad_averaging": True}, r"^grad_averaging=True is not offered\. Tens"),
    ({**KERAS3, "clipnorm": 1, "clipvalue": 2}, "^at most one of clipnorm, clipvalue"),
    (
        {**LEGACY, "decay": 1, "learning_rate": SCHEDULE},
        "decay=1 is not offered beside",
    ),
    (without(KERAS3, "epsilon"), "^missing 'epsilon', as Keras's Adagrad has"),
    (without(KERAS3, "learning_rate"), "^missing 'learning_rate', as Keras's Adagrad"),
    ({**KERAS3, "rho": 1}, r"^unknown keys \['rho'\]: not those of Keras's Adagrad"),
    (serialized("Adagrad", KERAS3, more=1), r"^unknown keys \['more'\]: not those of"),
    (
        serialized("Adam", {}),
        r"^the class 'Adam' of None is not read\. .*: Adagrad, Ftrl",
    ),
    (
        serialized("Adagrad", KERAS3, module="mine.keras"),
        "'Adagrad' of mine.keras is not",
    ),
    (serialized("Adagrad", KERAS3, module=None), "the class 'Adagrad' of None is not"),
    (serialized("Mine>Adam", {}), r"^the class 'Mine>Adam' of None is not read\."),
    (
        schedule("ExponentialDecay", decay_rate=0, initial_learning_rate=1),
        "^decay_rate=0 is not offered: the rate is 0 from step 1",
    ),
    (
        schedule("PiecewiseConstantDecay", boundaries=[3], values=[1, 2, 3]),
        "^values must have one entry more than boundaries",
    ),
]


@pytest.mark.every
@pytest.mark.parametrize(("config", "words"), WRONG, ids=range(len(WRONG)))
def test_a_config_of_keras_that_is_refused(config, words):
    with pytest.raises(ValueError, match=words):
        keras.translate(copy.deepcopy(config))
