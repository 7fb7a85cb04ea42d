"""Translates configs that Keras and TensorFlow Addons wrote for their optimizers.

One function reads the config of one class. It takes out each key that it reads, and
each that changes no number. It refuses one that changes the numbers and is not offered.
A key that is left over is unknown. The result is the config for
:func:`gradxform.from_config` that computes the same.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import optax

from gradxform._checks import arguments
from gradxform._config import schedules

Config = dict[str, Any]

# Arguments whose names are others in Keras.
_KERAS_NAMES = {
    "eps": "epsilon",
    "b1": "beta_1",
    "b2": "beta_2",
    "init_value": "initial_learning_rate",
    "end_value": "end_learning_rate",
    "transition_steps": "decay_steps",
}

# Keras's arguments for clips, and what they are as links of a chain.
CLIPS = {
    "clipnorm": ("clip_by_norm", "max_norm"),
    "clipvalue": ("optax.clip", "max_delta"),
    "global_clipnorm": ("clip_by_global_norm", "max_norm"),
}


def _refuse(keys: Config, key: str, hint: str) -> None:
    """Takes out a key that is not offered; raises if it would change the numbers."""
    if value := keys.pop(key, None):
        raise ValueError(f"{key}={value!r} is not offered. {hint}")


def _read(keys: Config, name: str, *arguments: str) -> Config:
    """A config with this name; takes its arguments out of Keras's keys."""
    given = {ours: keys.pop(_KERAS_NAMES.get(ours, ours)) for ours in arguments}
    return {"name": name, **given}


def _adagrad(keys: Config) -> Config:
    """``keras.optimizers.Adagrad``; a legacy one adds eps outside of the root."""
    config = _read(keys, "adagrad", "initial_accumulator_value", "eps")
    return _optimizer(config | {"eps_in_sqrt": "use_ema" in keys}, keys)


def _ftrl(keys: Config) -> Config:
    """``keras.optimizers.Ftrl``, and the one of before; all names are the same here."""
    keys.setdefault("beta", 0.0)  # TensorFlow 1 has none.
    # Keras decays the weights before FTRL sets them anew.
    _refuse(keys, "weight_decay", "Write null, and l2_regularization_strength.")
    config = _read(
        *(keys, "ftrl", "learning_rate_power", "initial_accumulator_value", "beta"),
        *(f"{each}_regularization_strength" for each in ("l1", "l2", "l2_shrinkage")),
    )
    return _optimizer(config, keys)


def _novograd(keys: Config) -> Config:
    """``tfa.optimizers.NovoGrad``, which is a legacy optimizer in every TensorFlow."""
    keys.setdefault("decay", 0.0)
    _refuse(keys, "amsgrad", "Write false.")
    # {"name": "novograd", "grad_averaging": true, …} does not skip the first step.
    _refuse(keys, "grad_averaging", "TensorFlow Addons skips it at the first step.")
    config = _read(keys, "novograd", "b1", "b2", "eps", "weight_decay")
    return _optimizer(config | {"eps_in_sqrt": False, "lr_in_momentum": True}, keys)


def _optimizer(config: Config, keys: Config) -> Config:
    """Adds what all optimizers of a generation have.

    Those up to TensorFlow 2.10 have a ``decay``, also in ``legacy``. All since then
    have a ``use_ema``.
    """
    rate = keys.pop("learning_rate")
    clips = {key: keys.pop(key, None) for key in CLIPS}
    arguments.check_at_most_one(**clips)
    clips = {key: limit for key, limit in clips.items() if limit is not None}
    if "use_ema" not in keys:
        if decay := keys.pop("decay"):
            if isinstance(rate, dict):
                raise ValueError(f"decay={decay!r} is not offered beside a schedule.")
            decayed = {"init_value": rate, "transition_steps": 1, "decay_rate": decay}
            rate = {"name": "inverse_time_decay", **decayed}
        return {**config, "learning_rate": rate, **clips}
    _refuse(keys, "use_ema", "Write false, and take optax.incremental_update.")
    _refuse(keys, "loss_scale_factor", "Write null: sums are float32 for all dtypes.")
    required = keys.pop("gradient_accumulation_steps", None)  # 0 means none, too.
    if required and isinstance(rate, dict):
        # Keras's rates count micro-batches: a step takes the rate of its last one.
        rate = {"name": "at_last_push", "schedule": rate, "num_required": required}
    # In Keras 3 a limit of 0 means no clip.
    clips = {key: limit for key, limit in clips.items() if limit > 0}
    if weight_decay := keys.pop("weight_decay", None):
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
    outer = {"name": "accumulate", "inner": config, "num_required": required}
    return outer if required else config


def _exponential_decay(keys: Config) -> Config:
    if keys["decay_rate"] == 0:  # Optax would not decay.
        raise ValueError("decay_rate=0 is not offered: the rate is 0 from step 1.")
    arguments = ("init_value", "transition_steps", "decay_rate", "staircase")
    return _read(keys, "exponential_decay", *arguments)


def _cosine_decay(keys: Config) -> Config:
    target, steps = keys.pop("warmup_target", None), keys.pop("warmup_steps", 0)
    config = _read(keys, "cosine_decay_schedule", "init_value", "decay_steps", "alpha")
    if target is None:
        return config
    warmup = {"name": "linear_schedule", "init_value": config["init_value"]}
    warmup |= {"end_value": target, "transition_steps": steps}
    return _join([warmup, {**config, "init_value": target}], [steps])


def _piecewise_constant_decay(keys: Config) -> Config:
    constants = [{"name": "constant_schedule", "value": v} for v in keys.pop("values")]
    # At a boundary Keras still takes the old value; optax takes the new one.
    return _join(constants, [int(boundary) + 1 for boundary in keys.pop("boundaries")])


def _join(schedules: list[Config], boundaries: list[float]) -> Config:
    if len(schedules) != len(boundaries) + 1:  # Optax would ignore the rest.
        raise ValueError("values must have one entry more than boundaries.")
    return {"name": "join_schedules", "schedules": schedules, "boundaries": boundaries}


def _same(schedule: Callable[..., optax.Schedule]) -> Callable[[Config], Config]:
    """Reads a schedule that differs from Keras's only in names."""
    arguments = inspect.signature(schedule).parameters
    return lambda keys: _read(keys, schedule.__name__, *arguments)


_OPTIMIZERS = {"Adagrad": _adagrad, "Ftrl": _ftrl, "NovoGrad": _novograd}
# By the names that optimizers have if nobody chose another.
_BY_NAME = {class_name.lower(): class_name for class_name in _OPTIMIZERS}
_READERS = _OPTIMIZERS | {
    "ExponentialDecay": _exponential_decay,
    "InverseTimeDecay": _same(schedules.inverse_time_decay),
    "CosineDecay": _cosine_decay,
    "CosineDecayRestarts": _same(schedules.cosine_decay_restarts),
    "LinearCosineDecay": _same(schedules.linear_cosine_decay),
    "PiecewiseConstantDecay": _piecewise_constant_decay,
    "PolynomialDecay": _same(schedules.polynomial_decay),
}

# Keys that change no number.
_NO_EFFECT = {"ema_momentum", "ema_overwrite_frequency", "is_legacy_optimizer"}
_NO_EFFECT |= {"jit_compile", "name"}

# The keys around a config that Keras serialized, and the packages that are read.
_ENVELOPE = {"class_name", "config", "module", "registered_name", "build_config"}
_PACKAGES = ("keras", "tf_keras", "tensorflow_addons")


def translate(config: Config) -> None:
    """Writes a config of Keras in the names of this library, in place.

    One that Keras did not write stays as it is. A schedule inside of it is a config of
    its own, and stays as it is, too.

    Args:
      config: a serialized object of Keras, ``{"class_name": …, "config": …}``, or the
        ``get_config()`` of an optimizer.
    """
    serialized = config
    if not isinstance(config.get("class_name"), str):
        name = re.sub(r"_\d+$", "", str(config.get("name"))).lower()
        of_addons = {"beta_1", "beta_2", "epsilon"} <= config.keys()
        written = of_addons or {"decay", "use_ema"} & config.keys()
        if name not in _BY_NAME or not written:
            return
        serialized = {"class_name": _BY_NAME[name], "config": config}
    class_name = serialized["class_name"].split(">")[-1]  # "Custom>Adagrad" of TF 2.11
    package = str(serialized.get("module", "keras")).split(".")[0]
    if class_name not in _READERS or package not in _PACKAGES:
        raise ValueError(
            f"the class {config['class_name']!r} of {config.get('module')} is not read."
            f" These classes of Keras are: {', '.join(_READERS)}."
        )
    try:
        keys = {k: v for k, v in serialized["config"].items() if k not in _NO_EFFECT}
        ours = _READERS[class_name](keys)
    except KeyError as error:
        raise ValueError(f"missing {error}, as Keras's {class_name} has.") from None
    if unknown := [*keys, *(serialized.keys() - _ENVELOPE)]:
        raise ValueError(f"unknown keys {unknown}: not those of Keras's {class_name}.")
    config.clear()
    config.update(ours)
