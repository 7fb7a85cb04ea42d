"""Translates configs that Keras and TensorFlow Addons wrote for their optimizers.

Each function below reads the config of one class. For an optimizer there are two: one
reads the optimizer's own keys, and one reads the keys that all optimizers of Keras 3
have, or all legacy ones. Their parameters are the keys that Keras writes. Keras always
writes the keys that have no default here. The result is the config for
:func:`gradxform.from_config` that computes the same. A parameter that the function does
not use is a key that changes no number.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import optax

from gradxform._config import schedules
from gradxform._trees import checks

Config = dict[str, Any]
Translator = Callable[..., Config]

# Keras's arguments for clips, and what they are as links of a chain.
CLIPS = {
    "clipnorm": ("clip_by_norm", "max_norm"),
    "clipvalue": ("optax.clip", "max_delta"),
    "global_clipnorm": ("clip_by_global_norm", "max_norm"),
}


def _adagrad(initial_accumulator_value: float, epsilon: float) -> Config:
    """``keras.optimizers.Adagrad``."""
    scaled = {"initial_accumulator_value": initial_accumulator_value, "eps": epsilon}
    return {"name": "adagrad", **scaled, "eps_in_sqrt": True}


def _legacy_adagrad(initial_accumulator_value: float, epsilon: float) -> Config:
    """``tf.keras.optimizers.Adagrad`` up to TensorFlow 2.10; then in ``legacy``."""
    return {**_adagrad(initial_accumulator_value, epsilon), "eps_in_sqrt": False}


def _ftrl(
    learning_rate_power: float,
    initial_accumulator_value: float,
    l1_regularization_strength: float,
    l2_regularization_strength: float,
    l2_shrinkage_regularization_strength: float,
    beta: float,
) -> Config:
    """``keras.optimizers.Ftrl``, and the one of before; all names are the same here."""
    return {"name": "ftrl", **locals()}


def _novograd(
    beta_1: float,
    beta_2: float,
    epsilon: float,
    weight_decay: float,
    grad_averaging: bool,
    amsgrad: bool = False,
) -> Config:
    """``tfa.optimizers.NovoGrad``, which is a legacy optimizer in every TensorFlow."""
    if amsgrad:
        raise ValueError("amsgrad=True is not offered: write amsgrad=False.")
    if grad_averaging:
        raise ValueError(
            "grad_averaging=True: TensorFlow Addons skips it at the first step. That "
            'is not offered. {"name": "novograd", "grad_averaging": true, …} averages '
            "from the first step on, as the paper does."
        )
    return {
        "name": "novograd",
        "b1": beta_1,
        "b2": beta_2,
        "eps": epsilon,
        "weight_decay": weight_decay,
        "eps_in_sqrt": False,
        "lr_in_momentum": True,
    }


def _keras3(
    config: Config,
    learning_rate: optax.ScalarOrSchedule,
    use_ema: bool,
    weight_decay: float | None = None,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    ema_momentum: float | None = None,
    ema_overwrite_frequency: float | None = None,
    loss_scale_factor: float | None = None,
    gradient_accumulation_steps: int | None = None,
    jit_compile: object = None,
    is_legacy_optimizer: object = None,
    name: object = None,
) -> Config:
    """What each optimizer of Keras 3 and of TensorFlow from 2.11 on has."""
    if weight_decay and config["name"] == "ftrl":
        raise ValueError(
            f"weight_decay={weight_decay!r}: Keras decays the weights before FTRL sets "
            "them anew. That is not offered. Write null, and "
            "l2_regularization_strength for smaller weights."
        )
    if use_ema:
        raise ValueError(
            "use_ema=True: the average is no part of a transformation. Write "
            "use_ema=False, and after each step averaged = optax.incremental_update("
            "params, averaged, step_size=1 - ema_momentum)."
        )
    if loss_scale_factor is not None:
        raise ValueError(
            f"loss_scale_factor={loss_scale_factor!r} is only half of loss scaling. "
            "Write null, and do not scale the loss: sums are float32 here for every "
            "dtype of the gradients."
        )
    rate: Any = learning_rate  # Also the config of a schedule.
    accumulated = {"num_required": gradient_accumulation_steps}
    if gradient_accumulation_steps and isinstance(rate, Mapping):
        # Keras's rates count micro-batches: a step takes the rate of its last one.
        rate = {"name": "at_last_push", "schedule": rate, **accumulated}
    limits = _clips(clipnorm, clipvalue, global_clipnorm)
    # In Keras 3 a limit of 0 means no clip.
    clips = {key: limit for key, limit in limits.items() if limit > 0}
    if weight_decay:
        # w ← w - learning_rate · (u + weight_decay · w): the decay is decoupled, but
        # the rate scales it.
        transforms = [
            *({"name": CLIPS[key][0], CLIPS[key][1]: clips[key]} for key in clips),
            {**config, "name": f"scale_by_{config['name']}"},
            {"name": "optax.add_decayed_weights", "weight_decay": weight_decay},
            {"name": "scale_by_learning_rate", "learning_rate": rate},
        ]
        config = {"name": "chain", "transforms": transforms}
    else:
        config = {**config, "learning_rate": rate, **clips}
    if not gradient_accumulation_steps:  # In Keras 0 means none, too.
        return config
    return {"name": "accumulate", "inner": config, **accumulated}


def _legacy(
    config: Config,
    learning_rate: optax.ScalarOrSchedule,
    decay: float = 0.0,
    clipnorm: float | None = None,
    clipvalue: float | None = None,
    global_clipnorm: float | None = None,
    is_legacy_optimizer: object = None,
    name: object = None,
) -> Config:
    """What each optimizer up to TensorFlow 2.10 has, and then those in ``legacy``."""
    rate: Any = learning_rate  # Also the config of a schedule.
    if decay and isinstance(rate, Mapping):
        raise ValueError(
            f"decay={decay!r} together with a schedule is not offered: write decay=0.0 "
            "and one schedule that does both."
        )
    if decay:
        decayed = {"init_value": rate, "transition_steps": 1, "decay_rate": decay}
        rate = {"name": "inverse_time_decay", **decayed}
    clips = _clips(clipnorm, clipvalue, global_clipnorm)
    return {**config, "learning_rate": rate, **clips}


def _clips(*limits: float | None) -> Config:
    clips = dict(zip(CLIPS, limits, strict=True))
    checks.at_most_one(**clips)
    return {key: limit for key, limit in clips.items() if limit is not None}


def _optimizer(generation: Translator, own: Translator) -> Translator:
    """Reads an optimizer's own keys, and those that all of its generation have."""
    mine = inspect.signature(own, eval_str=True).parameters
    _, rate, *common = inspect.signature(generation, eval_str=True).parameters.values()

    def translate(**values: Any) -> Config:
        given = {key: values.pop(key) for key in mine if key in values}
        return generation(own(**given), **values)

    return _signed(translate, [rate, *mine.values(), *common])


def _signed(
    translate: Translator, parameters: Iterable[inspect.Parameter]
) -> Translator:
    """Says which keywords a function takes, and their types."""
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
    translate.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return translate


# What Keras calls arguments of the schedules here; the others have the same name.
_KERAS_NAMES = {
    "init_value": "initial_learning_rate",
    "end_value": "end_learning_rate",
    "transition_steps": "decay_steps",
}


def _renamed(schedule: Callable[..., optax.Schedule]) -> Translator:
    """Reads the config of a schedule that differs from Keras's only in names."""
    parameters = inspect.signature(schedule, eval_str=True).parameters
    written = {
        _KERAS_NAMES.get(p.name, p.name): p.replace(default=p.empty)
        for p in parameters.values()
    }

    def translate(name: object = None, **values: object) -> Config:
        ours = {written[key].name: value for key, value in values.items()}
        return {"name": schedule.__name__, **ours}

    last = inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None)
    return _signed(translate, [*(p.replace(name=k) for k, p in written.items()), last])


def _exponential_decay(
    initial_learning_rate: float,
    decay_steps: float,
    decay_rate: float,
    staircase: bool,
    name: object = None,
) -> Config:
    if decay_rate == 0:  # Optax would not decay.
        raise ValueError("decay_rate=0 is not offered: the rate is 0 from step 1.")
    return {
        "name": "exponential_decay",
        "init_value": initial_learning_rate,
        "transition_steps": decay_steps,
        "decay_rate": decay_rate,
        "staircase": staircase,
    }


def _cosine_decay(
    initial_learning_rate: float,
    decay_steps: float,
    alpha: float,
    warmup_target: float | None = None,
    warmup_steps: float = 0,
    name: object = None,
) -> Config:
    peak = initial_learning_rate if warmup_target is None else warmup_target
    cosine = {
        "name": "cosine_decay_schedule",
        "init_value": peak,
        "decay_steps": decay_steps,
        "alpha": alpha,
    }
    if warmup_target is None:
        return cosine
    warmup = {
        "name": "linear_schedule",
        "init_value": initial_learning_rate,
        "end_value": warmup_target,
        "transition_steps": warmup_steps,
    }
    return _join([warmup, cosine], [warmup_steps])


def _piecewise_constant_decay(
    boundaries: list[float], values: list[float], name: object = None
) -> Config:
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            "values must have one entry more than boundaries, got "
            f"{len(values)} values and {len(boundaries)} boundaries."
        )
    constants = [{"name": "constant_schedule", "value": value} for value in values]
    # At a boundary Keras still takes the old value; optax takes the new one.
    return _join(constants, [int(boundary) + 1 for boundary in boundaries])


def _join(schedules: list[Config], boundaries: list[float]) -> Config:
    return {"name": "join_schedules", "schedules": schedules, "boundaries": boundaries}


# Of optimizers whose configs have a ``decay``, as only legacy ones write it.
_LEGACY: dict[str, Translator] = {
    "Adagrad": _optimizer(_legacy, _legacy_adagrad),
    # TensorFlow 1 has no beta.
    "Ftrl": _optimizer(_legacy, functools.partial(_ftrl, beta=0.0)),
}

_TRANSLATORS: dict[str, Translator] = {
    "Adagrad": _optimizer(_keras3, _adagrad),
    "Ftrl": _optimizer(_keras3, _ftrl),
    "NovoGrad": _optimizer(_legacy, _novograd),
    "ExponentialDecay": _exponential_decay,
    "InverseTimeDecay": _renamed(schedules.inverse_time_decay),
    "CosineDecay": _cosine_decay,
    "CosineDecayRestarts": _renamed(schedules.cosine_decay_restarts),
    "LinearCosineDecay": _renamed(schedules.linear_cosine_decay),
    "PiecewiseConstantDecay": _piecewise_constant_decay,
    "PolynomialDecay": _renamed(schedules.polynomial_decay),
}

# The keys around a config that Keras serialized, and the packages that are read.
_ENVELOPE = {"class_name", "config", "module", "registered_name", "build_config"}
_PACKAGES = ("keras", "tf_keras", "tensorflow_addons")


def find_translator(
    config: Mapping[str, object], where: str
) -> tuple[Translator, Mapping[str, object], str] | None:
    """The translator of a config of Keras; None for a config that Keras did not write.

    Args:
      config: a serialized object of Keras, ``{"class_name": …, "config": …}``, or the
        ``get_config()`` of an optimizer.
      where: its name in messages.

    Returns:
      The translator, the keywords to call it with, and their names in messages.
    """
    class_name = config.get("class_name")
    if not isinstance(class_name, str):
        return _translator_of_get_config(config, where)
    name = class_name.split(">")[-1]  # "Custom>Adagrad" of TF 2.11
    package = str(config.get("module", "keras")).split(".")[0]
    if name not in _TRANSLATORS or package not in _PACKAGES:
        raise ValueError(
            f"{where}: the class {class_name!r} of {config.get('module')} is "
            f"not read. These classes of Keras are: {', '.join(_TRANSLATORS)}."
        )
    unknown = ", ".join(repr(key) for key in config if key not in _ENVELOPE)
    given = config.get("config")
    if unknown or not isinstance(given, Mapping):
        raise ValueError(
            f"{where} must be serialized by Keras, a dict with 'class_name' "
            f"and a dict 'config'" + (f", and without {unknown}." if unknown else ".")
        )
    return _generation(name, given), given, f"{where}['config']"


def _translator_of_get_config(
    config: Mapping[str, object], where: str
) -> tuple[Translator, Mapping[str, object], str] | None:
    for name in ("Adagrad", "Ftrl", "NovoGrad"):
        translator = _generation(name, config)
        if _always_written(translator) <= config.keys():
            break
    else:
        if "use_ema" not in config:
            return None
        raise ValueError(
            f"{where} has the key 'use_ema', so Keras wrote it, but it is no whole "
            "config of Adagrad, Ftrl or NovoGrad. Only these are read."
        )
    if not re.fullmatch(rf"{name}(_\d+)?", str(config.get("name")), re.IGNORECASE):
        raise ValueError(
            f"{where} has the keys of {name} under the name {config.get('name')!r}, "
            "which does not tell its class: pass keras.optimizers.serialize(optimizer)."
        )
    return translator, config, where


def _generation(name: str, config: Mapping[str, object]) -> Translator:
    """The translator of a class: only legacy optimizers write a ``decay``."""
    return (_LEGACY if "decay" in config else {}).get(name, _TRANSLATORS[name])


def _always_written(translator: Translator) -> set[str]:
    parameters = inspect.signature(translator).parameters.values()
    return {p.name for p in parameters if p.default is p.empty}
