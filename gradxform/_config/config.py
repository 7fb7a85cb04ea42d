"""Transformations as plain dicts: ``from_config`` and ``get_config``.

A dict with a ``"name"`` stands for a call of the function with that name. The other
entries are its arguments. Dicts with a name among them are made first. A config that
Keras wrote is translated before.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import optax

from gradxform._checks import arguments, nested
from gradxform._config import keras, schedules

_KEPT = "_gradxform_config"  # The attribute that keeps the config.

_ENDS = 1_500  # So many characters are kept at each end of a long error.

# Limits may be infinite: then they never act. All other numbers must be finite.
_LIMITS = {*keras.CLIPS, "max_delta", "max_norm", "max_staleness", "sigmas"}

# Arguments that are names, or trees: no dict in them stands for a call.
AS_THEY_ARE = {"axis_name", "freeze_mask", "mask", "num_steps", "param_labels"}
AS_THEY_ARE |= {"shardings", "stacked_axes", "trust_ratio_mask", "weight_decay_mask"}

# Optax's transformations whose annotations do not say that they are transformations.
_UNANNOTATED = (
    *("contrib.dog", "contrib.dowg", "contrib.hutchinson_estimator_diag_hessian"),
    *("optax.monitor", "optax.scale_by_factored_rms"),
)


def from_config(config: Any) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation from a plain dict, or from a config that Keras wrote.

    ``{"name": …}`` with the arguments as the other entries, nested as needed:

    - a transformation of gradxform: ``{"name": "adagrad", "learning_rate": 0.1}``;
      one of ``gx.contrib`` has the same name here as there;
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
      ValueError: a key or a name is unknown, or a key is missing; a number is NaN,
        larger than float32 or int32 holds, or infinite without being a limit; dicts and
        lists are nested more than 100 deep; there are more than 100,000 entries, where
        one that aliases of YAML repeat counts each time; a config of Keras has an
        option that is not
        offered here (``use_ema=True``); the function that is called refuses an
        argument, such as a negative ``eps``.
      TypeError: a value is none of JSON; a flag is not true or false, or another
        argument is; a number is in quotes, as YAML reads ``1e-3``; the function that is
        called refuses the type of an argument. Some functions of optax do that only
        when they are used.

    A message begins with the place in the config. In a config of Keras it is the place
    in what :func:`get_config` would return.

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
        nested.check_small("config", config)
        plain = _plain(config, "config")  # `_make` translates Keras's configs in it.
        tx = arguments.transformation("config, by its 'name',", _make(plain, "config"))
    except (TypeError, ValueError) as error:
        if len(text := str(error)) <= 2 * _ENDS:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        # Its causes have the long text, too.
        raise kind(f"{text[:_ENDS]} ... {text[-_ENDS:]}") from None
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
            "get_config knows the transformations that from_config built, with their "
            f"wrappers and chains, got a {type(tx).__name__} made otherwise."
        )
    return copy.deepcopy(config)


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python refuses to write so many digits.
        return f"a {type(value).__name__} with a number of thousands of digits"


def _plain(value: object, where: str, key: object = None) -> Any:
    """A copy, checked to hold only values of JSON and finite numbers."""
    if hasattr(value, "to_dict"):  # ml_collections' ConfigDict is no Mapping.
        value = value.to_dict()
    if isinstance(value, Mapping):
        places = {k: f"{where}[{_shown(k)}]" for k in value}
        # JSON's keys are strings, but YAML's may be numbers.
        return {_plain(k, at): _plain(value[k], at, k) for k, at in places.items()}
    if isinstance(value, list | tuple):
        entries = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"{where} must be a JSON value, got {value!r}. Write a dtype as a string, "
            "'bfloat16', and a scalar array as its float(). If it is a Python "
            "function, build this transformation in Python."
        )
    largest = float(np.finfo(np.float32).max) if isinstance(value, float) else 2**31 - 1
    is_limit = key in _LIMITS and value == np.inf
    if isinstance(value, int | float) and not (abs(value) <= largest or is_limit):
        raise ValueError(
            f"{where} must be finite in float32, or an int32, got {_shown(value)}. For "
            "a larger integer, write 1e10."
        )
    return value


def _make(value: Any, where: str, key: object = None) -> Any:  # Of any type.
    """Makes what a dict with a name stands for, and first all such dicts inside.

    It translates a config of Keras in place.
    """
    if isinstance(value, list | tuple):
        return type(value)(_make(v, f"{where}[{i}]") for i, v in enumerate(value))
    if not isinstance(value, dict):
        return value
    _run(keras.translate, where, config=value)
    is_call = isinstance(value.get("name"), str)
    made = {
        k: v if is_call and k in AS_THEY_ARE else _make(v, f"{where}[{_shown(k)}]", k)
        for k, v in value.items()
    }
    if is_call:
        name = made.pop("name")
        if name not in makers():
            raise _unknown("name", name, makers(), f"{where}['name']")
        return _call(makers()[name], made, where)
    if key == "alignment":
        import gradxform as gx  # See `makers`.

        return _call(gx.contrib.MomentumAlignment, made, where)
    if key == "boundaries_and_scales":  # JSON's keys are strings.
        return _run(lambda: {int(str(k)): v for k, v in made.items()}, where)
    return made


def _call(make: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    """Calls a function with the entries of a config as its arguments."""
    parameters = inspect.signature(make).parameters
    for key, value in arguments.items():
        if key not in parameters:
            raise _unknown("key", key, parameters, where)
        if key in AS_THEY_ARE:
            continue
        is_flag = isinstance(parameters[key].default, bool)
        if isinstance(value, bool) != is_flag:
            words = "must be" if is_flag else "cannot be"
            raise TypeError(f"{where}[{key!r}] {words} true or false, got {value!r}.")
        # Most functions of optax take these. A transformation is a tuple.
        wrong = key == "learning_rate" and isinstance(value, str | dict | list | tuple)
        if wrong or (isinstance(value, str) and re.fullmatch(r"[-+.\deE]*\d", value)):
            raise TypeError(
                f"{where}[{key!r}] must be a number, or a schedule with its 'name', "
                f"got {value!r}. YAML reads 1e-3 as a string: write 1.0e-3."
            )
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    if missing := [key for key in needed if key not in arguments]:
        raise ValueError(f"{where}: missing {', '.join(map(repr, missing))}.")
    return _run(make, where, **arguments)


def _run(function: Callable[..., Any], where: str, /, **arguments: Any) -> Any:
    """Calls a function, and puts the place in the config in front of its errors."""
    try:
        return function(**arguments)
    except Exception as error:  # Optax divides by zero, and asserts.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}: {error}") from error


def _chain(transforms: list[Any]) -> optax.GradientTransformationExtraArgs:
    for i, transform in enumerate(transforms):
        arguments.check_transformation(f"transforms[{i}]", transform)
    return optax.chain(*transforms)


@functools.cache
def makers() -> dict[str, Callable[..., Any]]:
    """What a config may name: public functions that make transformations or schedules.

    Nothing else is called.
    """
    import gradxform as gx  # It imports this module.

    modules = optax.contrib, optax.transforms, optax.schedules, optax
    public = {f"{m.__name__}.{k}": v for m in modules for k, v in vars(m).items()}
    public |= vars(gx) | vars(gx.contrib) | vars(schedules) | vars(optax.schedules)
    public |= {"chain": _chain, "optax.chain": _chain, "from_config": None}
    return {k: v for k, v in public.items() if "._" not in k and _makes(k, v)}


def _makes(name: str, value: Any) -> bool:  # Any object.
    """Whether it is a function that makes a transformation or a schedule."""
    function = getattr(value, "func", value)  # `optax.nadam` is a partial.
    made = str(getattr(function, "__annotations__", {}).get("return"))
    kinds = ("Transformation", "ExtraArgs", "Schedule", str(optax.Schedule))
    return made.removesuffix("'>").endswith(kinds) or name.endswith(_UNANNOTATED)


def _unknown(what: str, word: object, known: Iterable[str], where: str) -> ValueError:
    """The error for an unknown key or name."""
    spelt = re.sub(r"^beta_?(?=\d$)", "b", str(word))  # Other libraries say beta_1.
    last = {name.split(".")[-1]: name for name in known}  # "optax.adamw" by "adamw"
    close = difflib.get_close_matches(spelt.split(".")[-1], last, n=1)
    meant = f", did you mean {last[close[0]]!r}?" if close else "."
    allowed = ", ".join(k for k in known if not k.startswith("optax.")) or "none"
    return ValueError(f"{where}: unknown {what} {word!r}{meant} Allowed are {allowed}.")
