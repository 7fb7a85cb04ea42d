"""Transformations as plain dicts: ``from_config`` and ``get_config``.

A dict with a ``"name"`` stands for a call of the function with that name; the other
entries are its arguments. A config that Keras wrote is translated first. The function's
own signature says which keys are allowed, which are needed and which values they take.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import optax

import gradxform as gx
from gradxform._config import hints, keras, schedules
from gradxform._config.keras import Config
from gradxform._trees.types import T

# It makes a transformation, a schedule, a record, or the config of one.
Maker: TypeAlias = Callable[..., Any]

_KEPT = "_gradxform_config"  # The attribute that keeps the config.

# Limits may be infinite: then they never act. All other numbers must be finite.
_LIMITS = (*keras.CLIPS, "max_delta", "max_norm", "max_staleness", "sigmas")

_LARGEST = float(np.finfo(np.float32).max)

# Optax's transformations whose annotations do not say that they are transformations.
_UNANNOTATED = {
    *("dog", "dowg", "hutchinson_estimator_diag_hessian"),
    *("monitor", "scale_by_factored_rms"),
}


def from_config(config: Any) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation from a plain dict, or from a config that Keras wrote.

    ``{"name": …}`` with the arguments as the other entries, nested as needed:

    - a transformation of gradxform: ``{"name": "adagrad", "learning_rate": 0.1}``;
    - ``{"name": "chain", "transforms": [{…}, {…}]}``;
    - a transformation of optax: ``{"name": "optax.adamw", "learning_rate": 1e-3}``;
    - as an argument, a schedule of optax: ``{"name": "cosine_decay_schedule", …}``;
      optax lacks five of Keras's, which are here too: ``"inverse_time_decay"``,
      ``"polynomial_decay"`` with its ``cycle``, ``"cosine_decay_restarts"``,
      ``"linear_cosine_decay"`` and ``"at_last_push"``, a rate that counts
      micro-batches.

    Write dtypes as strings. Arguments that are trees (``mask``, ``stacked_axes``) go
    into the dict as they are. Any mapping works, also ml_collections' ``ConfigDict``.

    It reads the results of ``optimizer.get_config()`` and
    ``keras.optimizers.serialize`` from Keras 3 and from TensorFlow 1.14 to 2.x:
    ``Adagrad``, ``Ftrl``, TensorFlow Addons' ``NovoGrad``, and the schedules
    ``ExponentialDecay``, ``InverseTimeDecay``, ``CosineDecay``,
    ``CosineDecayRestarts``, ``LinearCosineDecay``, ``PiecewiseConstantDecay`` and
    ``PolynomialDecay``.

    Args:
      config: a mapping that JSON can hold; it is not changed.

    Returns:
      The transformation; :func:`get_config` gives its config back.

    Raises:
      ValueError: a key or a name is unknown, or a key is missing; an argument is out of
        its range, NaN, or infinite without being a limit; a config of Keras has an
        option that is not offered here (``use_ema=True``). The message names the place
        in the config, and says what to do instead.
      TypeError: an argument has the wrong type: YAML, for example, reads ``1e-3`` as a
        string.

    References:
      ``tf.keras.optimizers.deserialize``.

    >>> import gradxform as gx, jax.numpy as jnp
    >>> tx = gx.from_config({
    ...     "name": "drop_stale",
    ...     "inner": {
    ...         "name": "adagrad",
    ...         "learning_rate": {
    ...             "name": "linear_schedule",
    ...             "init_value": 0.5,
    ...             "end_value": 0.0,
    ...             "transition_steps": 2,
    ...         },
    ...         "initial_accumulator_value": 0.0,
    ...         "clipnorm": 1.0,
    ...     },
    ...     "max_staleness": 1,
    ... })
    >>> grads = jnp.array([3.0, -4.0])
    >>> state = tx.init(grads)
    >>> for rate in (0.5, 0.25 / 2**0.5, 0.0):
    ...     seen = gx.global_step(state)
    ...     updates, state = tx.update(grads, state, grads, local_step=seen)
    ...     assert jnp.allclose(updates, rate * jnp.array([-1.0, 1.0]))
    >>> gx.global_step(state)
    Array(3, dtype=int32)
    >>> gx.from_config({"name": "adagrad", "learning_rte": 0.5})
    Traceback (most recent call last):
    ValueError: config: unknown key 'learning_rte', did you mean 'learning_rate'? ...
    """
    try:
        plain = _plain(config, "config")
        tx = _made(plain, "config", "transformation")  # Translates Keras's configs.
    except RecursionError:
        raise ValueError(
            "config is nested too deeply: Python allows "
            f"{sys.getrecursionlimit()} calls inside of each other, and each level "
            "needs a few."
        ) from None
    tx = optax.with_extra_args_support(tx)
    setattr(tx, _KEPT, plain)
    return tx


def get_config(tx: optax.GradientTransformation) -> dict[str, Any]:
    """The config of a transformation that :func:`from_config` built.

    Args:
      tx: a transformation that :func:`from_config` returned.

    Returns:
      A new dict that JSON can hold. :func:`from_config` builds the same transformation
      from it. A config of Keras comes back translated to the names of this library.

    Raises:
      TypeError: ``tx`` was not built by :func:`from_config`.

    References:
      ``keras.optimizers.Optimizer.get_config``.

    >>> import gradxform as gx, json
    >>> config = {"name": "adagrad", "learning_rate": 0.01, "clipnorm": 1.0}
    >>> tx = gx.from_config(json.loads(json.dumps(config)))
    >>> gx.get_config(tx)
    {'name': 'adagrad', 'learning_rate': 0.01, 'clipnorm': 1.0}
    """
    config = getattr(tx, _KEPT, None)
    if config is None:
        raise TypeError(
            "get_config knows the transformations that from_config built, got a "
            f"{type(tx).__name__} made otherwise: its arguments cannot be read back. "
            "Build it by from_config, with its wrappers and chains."
        )
    return copy.deepcopy(config)


def _plain(value: object, where: str) -> Any:  # A copy of the value.
    """A copy, checked to hold only values of JSON and finite numbers."""
    if hasattr(value, "to_dict"):  # ml_collections' ConfigDict is no Mapping.
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {
            key: entry
            if key in _LIMITS and isinstance(entry, float) and entry == math.inf
            else _plain(entry, f"{where}[{key!r}]")
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        sequence = tuple if isinstance(value, tuple) else list
        return sequence(_plain(entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{where} must be a JSON value, got {value!r}. Write a dtype as a string, "
            "'bfloat16', and a scalar array as its float(). If it is a Python "
            "function, build this transformation in Python."
        )
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        raise ValueError(f"{where} must be finite in float32, got {value!r}.")
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise ValueError(
            f"{where} must be an int32, got {value!r}. Write 1e10 for a larger number."
        )
    return value


def _made(config: object, where: str, kind: str) -> Any:  # By its kind.
    """Makes a ``"transformation"`` or a ``"schedule"`` from a dict with a name.

    It translates a config of Keras in place.
    """
    if isinstance(config, dict):
        _translate(config, where)
    if not (isinstance(config, dict) and isinstance(config.get("name"), str)):
        raise TypeError(
            f"{where} must be a {kind}, a dict with its 'name', got {config!r}."
        )
    given = dict(config)
    name = given.pop("name")
    make = _function(name, f"{where}['name']", kind)
    if _kind(make) != kind:  # Checked before anything is called.
        raise TypeError(f"{where} must be a {kind}, which {name!r} does not make.")
    return _call(make, _arguments(make, given, where), where)


def _translate(config: Config, where: str) -> None:
    written = keras.find_translator(config, where)
    if written is not None:
        translator, given, where = written
        # Also translates the dicts in it, in place.
        _arguments(translator, given, where)
        words = _call(translator, given, where)
        config.clear()
        config.update(words)


def _signature(make: Maker) -> inspect.Signature:
    signature = inspect.signature(make, eval_str=True)
    if not hasattr(make, "_fields"):
        return signature
    known = typing.get_type_hints(make)  # A named tuple's annotations are strings.
    fields = signature.parameters.values()
    return signature.replace(
        parameters=[field.replace(annotation=known[field.name]) for field in fields]
    )


def _kind(make: Maker) -> str | None:
    """The kind of object that a function makes, by its annotation."""
    if inspect.isclass(make):
        return None
    made = _signature(make).return_annotation
    if inspect.isclass(made) and issubclass(made, optax.GradientTransformation):
        return "transformation"
    if make.__module__.startswith("optax.") and make.__name__ in _UNANNOTATED:
        return "transformation"
    return "schedule" if made == optax.Schedule else None


def _arguments(make: Maker, given: Mapping[str, object], where: str) -> Config:
    """The arguments of a function, from the entries of a config."""
    parameters = _signature(make).parameters
    _check_keys(parameters, given, where)
    # Schedules divide by numbers of steps, so these need not be integers.
    whole = _kind(make) == "transformation"
    return {
        key: _argument(value, f"{where}[{key!r}]", parameters[key], whole)
        for key, value in given.items()
    }


def _check_keys(
    parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object], where: str
) -> None:
    """Raises unless the function can be called with these keys as its arguments."""
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise ValueError(
            f"{where}: a dict cannot hold arguments that have no names. Write a chain "
            "as {'name': 'chain', 'transforms': [...]}."
        )
    allowed = f"Allowed are {', '.join(parameters) or 'none'}."
    for key in given:
        if key not in parameters:
            meant = _did_you_mean(key, parameters)
            raise ValueError(f"{where}: unknown key {key!r}{meant} {allowed}")
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    missing = ", ".join(repr(key) for key in needed if key not in given)
    if missing:
        raise ValueError(f"{where}: missing {missing}. {allowed}")


def _call(make: Callable[..., T], arguments: Mapping[str, object], where: str) -> T:
    """Calls a function; adds the place in the config to its errors."""
    try:
        return make(**arguments)
    except RecursionError:
        raise
    except Exception as error:  # Optax divides by zero, and asserts.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def _argument(
    value: object, where: str, parameter: inspect.Parameter, whole: bool
) -> object:
    """Makes one argument of a function from an entry of a config."""
    hint = parameter.annotation
    if hint is parameter.empty and isinstance(parameter.default, int | float):
        hint = type(parameter.default)
    if "GradientTransformation" in str(hint) and value != parameter.default:
        return _transformations(value, where, str(hint))
    if hints.holds_schedules(hint):
        value = _with_schedules(value, where)
    record = hints.record(hint)
    if record is not None and isinstance(value, dict):
        return _call(record, _arguments(record, value, where), where)
    if "dict[int" in str(hint) and isinstance(value, dict):  # JSON's keys are strings.
        value = {_integer(key): entry for key, entry in value.items()}
    allowed = hints.alternatives(hint, whole)
    if "dtype" in parameter.name and "Literal" not in str(hint):
        allowed = [hints.dtype()]
    if any(fits(value) for _, fits in allowed):
        return value
    words = hints.words(allowed)
    if words.startswith("a number") and isinstance(value, str) and _is_number(value):
        raise TypeError(
            f"{where} must be a number, got the string {value!r}. YAML reads 1e-3 as a "
            "string: write 1.0e-3 with a point."
        )
    hint = ""
    if "a Python function" in words:
        hint = " No config can hold a function: build this transformation in Python."
    raise TypeError(f"{where} must be {words}, got {value!r}.{hint}")


def _is_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return False


def _integer(key: object) -> object:
    return int(key) if isinstance(key, str) and re.fullmatch(r"\d{1,9}", key) else key


def _transformations(value: object, where: str, annotation: str) -> object:
    """One transformation, or a list or dict of them, as the annotation says."""
    kind = re.search("list|dict|Mapping", annotation)
    if kind is None:
        return _made(value, where, "transformation")
    if isinstance(value, list | tuple) and kind[0] == "list":
        entries: Iterable[tuple[Any, object]] = enumerate(value)  # A key of any kind.
    elif isinstance(value, dict) and kind[0] != "list":
        entries = value.items()
    else:
        what = f"a {kind[0]} of transformations"
        raise TypeError(f"{where} must be {what}, got {value!r}.")
    made = {k: _made(v, f"{where}[{k!r}]", "transformation") for k, v in entries}
    return made if isinstance(value, dict) else list(made.values())


def _with_schedules(value: object, where: str) -> object:
    """The value, or the list of values, with schedules made from dicts."""
    if isinstance(value, list | tuple):
        return [_with_schedules(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict) and {"name", "class_name"} & value.keys():
        return _made(value, where, "schedule")
    return value


def _chain(
    transforms: list[optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    return optax.chain(*transforms)


def _transformation_makers() -> dict[str, Maker]:
    """The public functions that make transformations, and the chain."""
    public = {k: v for k, v in vars(gx).items() if inspect.isfunction(v)}
    del public["from_config"]
    makers = {k: v for k, v in public.items() if _kind(v) == "transformation"}
    return makers | {"chain": _chain}


def _function(name: str, where: str, kind: str) -> Maker:
    """The function with this name, whether it makes ``kind`` or not."""
    makers = {
        "transformation": _transformation_makers(),
        "schedule": schedules.makers(),
    }
    for known in makers.values():
        if name in known:
            return known[name]
    of_optax = _of_optax(name.removeprefix("optax."))
    if of_optax is not None and name.startswith("optax."):
        return of_optax
    if of_optax is not None:
        meant = f", did you mean 'optax.{name}'?"
    else:
        of_optax_too = (f"optax.{entry}" for entry in dir(optax))
        meant = _did_you_mean(name, [*makers[kind], *of_optax_too])
    raise ValueError(
        f"{where}: unknown name {name!r}{meant} A {kind} is one of "
        f"{', '.join(sorted(makers[kind]))}, or one of optax's, such as 'optax.adamw'."
    )


def _of_optax(path: str) -> Maker | None:
    """A public function of optax, such as ``adamw`` or ``contrib.muon``."""
    value: object = optax
    for name in path.split("."):
        value = None if name.startswith("_") else getattr(value, name, None)
    function = getattr(value, "func", value)  # `nadam` is a functools.partial.
    is_optax = str(getattr(function, "__module__", "")).startswith("optax.")
    return value if callable(value) and is_optax else None


def _did_you_mean(word: object, known: Iterable[str]) -> str:
    spelt = re.sub(r"^beta_?(?=\d$)", "b", str(word))  # Other libraries say beta_1.
    close = difflib.get_close_matches(spelt, known, n=1)
    return f", did you mean {close[0]!r}?" if close else "."
