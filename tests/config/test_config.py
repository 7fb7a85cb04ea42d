"""Transformations from dicts and from Keras's configs, beside those they stand for.

Each system that is named here has written its literal config. Keras itself runs in
`test_keras.py`.
"""

import copy
import dataclasses
import inspect
import json
import pathlib
import random
import re
import traceback

import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
import yaml

import gradxform as gx
from gradxform._config import schedules
from gradxform._config.config import AS_THEY_ARE, makers
from tests import in_numpy, test_golden
from tests.descriptors import DESCRIPTORS, Descriptor
from tests.draw import schedules as drawn

# A config cannot hold a function. It holds a schedule by its name.
ROWS = [
    row
    for row in DESCRIPTORS
    if row.name != "from_config" and not any(map(callable, row.kwargs.values()))
]
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.3, -0.7])}
HALVED = {"init_value": 0.1, "transition_steps": 1, "decay_rate": 0.5}


def gradients(steps):
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    for _ in range(steps):
        yield jax.tree.map(lambda p: draw(p.shape).astype(np.float32), PARAMS)


def with_rate(row, rate):
    """The row with another learning rate, and so the rows inside it."""
    kwargs = {
        key: with_rate(value, rate) if isinstance(value, Descriptor) else value
        for key, value in row.kwargs.items()
    }
    if "learning_rate" in kwargs:
        kwargs["learning_rate"] = rate
    return dataclasses.replace(row, kwargs=kwargs)


def config_of(row):
    """The row as a config."""

    def plain(key, value):
        if isinstance(value, Descriptor):
            return config_of(value)
        if hasattr(value, "_asdict"):
            return value._asdict()
        return jnp.dtype(value).name if key.endswith("dtype") else value

    return {"name": row.name, **{k: plain(k, v) for k, v in row.kwargs.items()}}


def agree(tx, other, extra=None):
    """Both have the same class, the same first state and the same program."""
    assert type(tx) is type(other)
    state, (grads,) = tx.init(PARAMS), gradients(1)
    chex.assert_trees_all_equal(state, other.init(PARAMS))
    program, expected = (
        jax.jit(t.update).lower(grads, state, PARAMS, **extra or {}).as_text()
        for t in (tx, other)
    )
    assert program == expected


CONSTANT = [(row, row) for row in ROWS]
SCHEDULED = [
    (
        with_rate(row, {"name": "exponential_decay", **HALVED}),
        with_rate(row, optax.exponential_decay(**HALVED)),
    )
    for row in ROWS
    if "learning_rate" in str(row.kwargs)
]


@pytest.mark.parametrize(
    ("row", "direct"),
    CONSTANT + SCHEDULED,
    ids=[str(row) for row, _ in CONSTANT] + [f"{row}-rate" for row, _ in SCHEDULED],
)
def test_every_public_transformation_comes_back_through_json(row, direct):
    config = config_of(row)
    tx = gx.from_config(config)
    assert gx.get_config(tx) == config
    tx = gx.from_config(json.loads(json.dumps(gx.get_config(tx))))
    assert gx.get_config(tx) == config
    agree(tx, direct.make(), row.extra(PARAMS))


def test_numbers_of_a_record_are_a_dict():
    config = {"name": "momentum_look_ahead", "learning_rate": 0.1}
    numbers = {"aligned": 0.5, "eps": 1}
    tx = gx.from_config({**config, "alignment": numbers})
    assert gx.get_config(tx) == {**config, "alignment": numbers}
    align = gx.contrib.MomentumAlignment(**numbers)
    agree(tx, gx.contrib.momentum_look_ahead(0.1, alignment=align))
    where = r"config\['alignment'\]"
    for given, error, message in (
        ({"align": 1}, ValueError, where + ": unknown key 'align'"),
        ({"eps": "1"}, TypeError, where + r"\['eps'\] must be a number"),
        ({"eps": 0}, ValueError, r"config: alignment.eps must be in \(0, inf\)"),
        (True, TypeError, where + " cannot be true or false"),
    ):
        with pytest.raises(error, match=message):
            gx.from_config({**config, "alignment": given})


NESTED = {
    "name": "drop_stale",
    "max_staleness": 2,
    "inner": {
        "name": "chain",
        "transforms": [
            {"name": "clip_by_global_norm", "max_norm": 1.0},
            {
                "name": "novograd",
                "weight_decay": 0.01,
                "mask": {"w": True, "b": False},
                "stacked_axes": {"w": 1, "b": 0},
                "mu_dtype": "bfloat16",
                "learning_rate": {
                    "name": "join_schedules",
                    "boundaries": [2],
                    "schedules": [
                        {"name": "constant_schedule", "value": 0.5},
                        {
                            "name": "piecewise_constant_schedule",
                            "init_value": 0.5,
                            "boundaries_and_scales": {1: 0.5, 2: 0.25},
                        },
                    ],
                },
            },
        ],
    },
}


def nested():
    rate = optax.join_schedules(
        [
            optax.constant_schedule(0.5),
            optax.piecewise_constant_schedule(0.5, {1: 0.5, 2: 0.25}),
        ],
        [2],
    )
    novograd = gx.novograd(
        rate,
        weight_decay=0.01,
        mask={"w": True, "b": False},
        stacked_axes={"w": 1, "b": 0},
        mu_dtype="bfloat16",
    )
    return gx.drop_stale(optax.chain(gx.clip_by_global_norm(1.0), novograd), 2)


def through_json(config):
    return json.loads(json.dumps(config))


def inside_ml_collections(config):
    return {**config, "inner": ml_collections.ConfigDict(through_json(config["inner"]))}


THROUGH = [
    copy.deepcopy,
    through_json,
    lambda config: yaml.safe_load(yaml.safe_dump(config)),
    # A ConfigDict takes no keys but strings.
    lambda config: ml_collections.ConfigDict(through_json(config)),
    lambda config: ml_collections.FrozenConfigDict(through_json(config)),
    inside_ml_collections,
]


@pytest.mark.usefixtures("standard_promotion")  # Some schedules of optax need it.
@pytest.mark.parametrize("through", THROUGH)
def test_nested(through):
    if through is THROUGH[4]:  # It has tuples in the place of lists.
        config = {"name": "drop_stale", "inner": ADAGRAD, "max_staleness": 1}
        tx = gx.from_config(through(config))
        assert gx.get_config(tx) == config
        return
    config = through(NESTED)
    tx = gx.from_config(config)
    agree(tx, nested(), {"local_step": 0})
    # JSON has only strings as keys, so both sides go through it.
    assert through_json(gx.get_config(tx)) == through_json(NESTED)


def test_the_config_is_neither_changed_nor_shared():
    config = copy.deepcopy(NESTED)
    tx = gx.from_config(config)
    assert config == NESTED
    config["inner"]["transforms"].clear()
    gx.get_config(tx)["inner"]["transforms"].clear()
    assert gx.get_config(tx) == NESTED


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")  # optax's schedule needs it.
def test_a_schedule_of_how_many_make_a_step():
    required = {
        "name": "piecewise_constant_schedule",
        "init_value": 1,
        "boundaries_and_scales": {"1": 2},
    }
    config = {"name": "accumulate", "inner": ADAGRAD, "num_required": required}
    tx = gx.from_config(through_json(config))
    assert gx.get_config(tx) == config
    state, counts = tx.init(jnp.zeros(())), []
    for _ in range(5):
        _, state = tx.update(jnp.ones(()), state)
        counts.append((int(state.global_step), int(state.num_accumulated)))
    assert counts == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]


def chains(link, config, depth):
    """Chains in chains, in a key that has a config or a list of them."""
    for _ in range(depth):
        config = {"name": "chain", link: config if link == "inner" else [config]}
    return config


def endless(link, times):
    """A chain that holds itself."""
    config = {"name": "chain"}
    config[link] = config if link == "inner" else [config] * times
    return config


def laughs(levels, key):
    """As a YAML file of one line for each level; its aliases repeat the one before.

    Written out, no computer could visit the last.
    """
    value = {"x": 1.0}
    for _ in range(levels):
        value = [value] * 9
    return {"name": "novograd", "learning_rate": 0.1, key: value}


DEEP, MANY = "is nested more than 100 deep", "has more than 100,000 entries"
KEYS = "mask", "eps", "learning_rate", "inner", "nonsense"
HUGE = {
    "inner, deep": (lambda: chains("inner", ADAGRAD, 3000), DEEP),
    "transforms, deep": (lambda: chains("transforms", ADAGRAD, 3000), DEEP),
    "inner, endless": (lambda: endless("inner", 1), DEEP),
    "transforms, endless": (lambda: endless("transforms", 1), DEEP),
    "transforms, endless nine times": (lambda: endless("transforms", 9), DEEP),
    "a ConfigDict": (lambda: ml_collections.ConfigDict(laughs(5, "mask")), MANY),
    **{f"{x}, 9": (lambda x=x: laughs(9, x), MANY) for x in KEYS},
    **{f"{x}, 90": (lambda x=x: laughs(90, x), MANY) for x in KEYS},
}


@pytest.mark.every
@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("name", HUGE)
def test_a_config_without_end_is_refused_at_once(name):
    """It is no RecursionError, which a program may take for a fault of its own."""
    make, says = HUGE[name]
    with pytest.raises(ValueError, match=f"config {says}"):
        gx.from_config(make())


def test_a_hundred_levels_are_no_more_than_allowed():
    direct = gx.adagrad(0.1)
    for _ in range(49):  # Each link is a dict and a list.
        direct = optax.chain(direct)
    agree(gx.from_config(chains("transforms", ADAGRAD, 49)), direct)


@pytest.mark.parametrize(
    ("spare", "shared"), [(0, {"a": True}), (1, {"a": True}), (0, "x" * 99)]
)
def test_so_many_entries_and_no_more(spare, shared):
    """Each one counts, also one that aliases repeat; a long string for several."""
    config = {"name": "novograd", "learning_rate": 0.1, "mask": []}
    of_each = 3 if isinstance(shared, dict) else 1  # Itself, a key, a value.
    rest = 1 + 6  # The dict, its keys and values.
    count, more = divmod(100_000 - rest, of_each)
    config["mask"] += [shared] * count + [True] * more
    gx.from_config(config)
    if not spare:
        config["mask"][0] = True if of_each == 1 else {"a": [True]}
    config["mask"] += [True] * spare
    if of_each == 1:
        config["mask"][1] += "x"  # The hundredth character.
    with pytest.raises(ValueError, match="config has more than 100,000 entries"):
        gx.from_config(config)


def test_transformations_of_optax_are_built():
    sgd = {"name": "optax.sgd", "learning_rate": 0.1}
    agree(gx.from_config(sgd), optax.with_extra_args_support(optax.sgd(0.1)))
    rate = {"name": "optax.linear_schedule", "init_value": 1.0, "end_value": 0.0}
    config = {
        "name": "optax.partition",
        "transforms": {
            "a": {**sgd, "learning_rate": {**rate, "transition_steps": 2}},
            "b": {"name": "optax.masked", "inner": sgd, "mask": {"w": True, "b": True}},
        },
        "param_labels": {"w": "a", "b": "b"},
    }
    rate = optax.linear_schedule(1.0, 0.0, 2)
    masked = optax.masked(optax.sgd(0.1), {"w": True, "b": True})
    other = optax.partition({"a": optax.sgd(rate), "b": masked}, {"w": "a", "b": "b"})
    agree(gx.from_config(config), other)
    for name in ("nadam", "contrib.muon"):
        gx.from_config({"name": f"optax.{name}", "learning_rate": 0.1})


def functions_without_annotation():
    """Functions of optax whose source, not their annotation, names a transformation."""
    for module in optax, optax.contrib:
        for name, make in vars(module).items():
            if (
                inspect.isfunction(make)
                and inspect.signature(make).return_annotation is inspect.Signature.empty
                and "GradientTransformation" in inspect.getsource(make)
            ):
                yield f"{module.__name__}.{name}", make


@pytest.mark.every
@pytest.mark.parametrize(("name", "make"), [*functions_without_annotation()])
def test_a_config_builds_transformations_that_optax_does_not_annotate(name, make):
    given = {"learning_rate": 0.1, "measures": {}}
    keys = inspect.signature(make).parameters
    needed = {key: value for key, value in given.items() if key in keys}
    tx = gx.from_config({"name": name, **needed})
    assert callable(tx.init)
    assert callable(tx.update)


def test_trees_are_taken_as_they_are():
    """Labels like numbers and names, and parameters named like the keys of a config."""
    sgd = {"name": "optax.sgd", "learning_rate": 1.0}
    labels = {"name": "0", "class_name": {"config": "name", "use_ema": "nan"}}
    config = {
        "name": "optax.partition",
        "transforms": {"0": sgd, "name": {"name": "densify"}, "nan": sgd, "mask": sgd},
        "param_labels": labels,
    }
    tx = gx.from_config(through_json(config))
    grads = jax.tree.map(lambda _: 1.0, labels)
    updates, _ = tx.update(grads, tx.init(grads), grads)
    assert updates == {"name": -1.0, "class_name": {"config": 1.0, "use_ema": -1.0}}
    mask = {"name": True, "b": False}
    masked = {"name": "optax.masked", "inner": sgd, "mask": mask}
    decay = {**NOVOGRAD, "weight_decay": 0.1, "mask": mask}
    axes = {**NOVOGRAD, "stacked_axes": {"name": 0, "b": 0}}
    late = {"name": "delayed", "inner": sgd, "num_steps": {"name": 1, "b": 1}}
    frozen = {"name": "optax.freeze", "mask": mask}
    everywhere = {**decay, "mask": True}
    lars = {"name": "optax.lars", "learning_rate": 0.1, "trust_ratio_mask": mask}
    configs = masked, decay, axes, late, frozen, everywhere, lars
    for tx in map(gx.from_config, configs):
        tx.init({"name": 0.0, "b": 0.0})


@pytest.mark.parametrize("name", makers())
def test_trees_and_flags_are_known_as_such(name):
    """In optax, too: a new tree there needs an entry here, and a flag has a default."""
    for key, parameter in inspect.signature(makers()[name]).parameters.items():
        hint = str(parameter.annotation)
        is_tree = re.search("mask$|labels", key)
        if is_tree or re.search("PyTree|Prefix|StackedAxes|AxisName", hint):
            assert key in AS_THEY_ARE
        if hint in ("bool", "<class 'bool'>"):
            assert isinstance(parameter.default, bool)


def test_get_config_refuses_transformations_without_a_config():
    for tx in (gx.adagrad(0.1), optax.sgd(0.1), None):
        with pytest.raises(
            TypeError, match=r"knows the transformations that from_conf"
        ):
            gx.get_config(tx)


ADAGRAD = {"name": "adagrad", "learning_rate": 0.1}
NOVOGRAD = {"name": "novograd", "learning_rate": 0.1}
LINEAR = {"name": "linear_schedule", "init_value": 1.0, "end_value": 0.0}
STEPS = {"name": "piecewise_constant_schedule", "init_value": 1.0}
INVERSE = {
    "name": "inverse_time_decay",
    "init_value": 1,
    "transition_steps": 1,
    "decay_rate": 1,
}
RATE = "config['learning_rate']"


def rated(rate):
    return {**ADAGRAD, "learning_rate": rate}


WRONG = [
    # Keys.
    (dict(ADAGRAD, epsilon=1e-07),
     "config: unknown key 'epsilon', did you mean 'eps'?"),
    ({**ADAGRAD, 1: 1}, "config: unknown key 1. Allowed are"),
    ({"name": "densify", "x": 1}, "config: unknown key 'x'. Allowed are none."),
    ({"name": "adagrad"}, "config: missing 'learning_rate'."),
    ({"name": "drop_stale"}, "config: missing 'inner', 'max_staleness'."),
    ({"name": "optax.chain", "args": [ADAGRAD]},
     "config: unknown key 'args'. Allowed are transforms."),
    *(
        (NOVOGRAD | {key: 0.9}, f"{key!r}, did you mean 'b{key[-1]}'")
        for key in ("beta1", "beta_1", "beta2", "beta_2")
    ),
    # Names.
    ({"name": "adagradd"},
     "config['name']: unknown name 'adagradd', did you mean 'ada"),
    ({"name": "zzzz"}, "unknown name 'zzzz'. Allowed are accumulate, "),
    ({"name": "adamw"}, "unknown name 'adamw', did you mean 'optax.adamw'?"),
    ({"name": "optax.adamww"},
     "unknown name 'optax.adamww', did you mean 'optax.adamw'?"),
    ({"name": "optax.tree_utils.functools.partial"}, "unknown name 'optax.tree_uti"),
    ({"name": "optax.Schedule"}, "unknown name 'optax.Schedule'"),
    ({"name": "optax.MultiSteps", "opt": ADAGRAD, "every_k_schedule": 2},
     "unknown name 'optax.MultiSteps'"),
    ({"name": "ServerClosedError", "init": 1, "update": 1},
     "unknown name 'ServerClosedError'"),
    ({"name": "from_config", "config": ADAGRAD}, "unknown name 'from_config'"),
    (rated(dict(LINEAR, name="lineal_schedule")),
     f"{RATE}['name']: unknown name 'lineal_schedule', did you mean "
     "'linear_schedule'?"),
    # The place that is named.
    ({"name": "drop_stale", "max_staleness": 1,
      "inner": {"name": "chain", "transforms": [ADAGRAD, dict(ADAGRAD, b1=1)]}},
     "config['inner']['transforms'][1]: unknown key 'b1'"),
    (rated({"name": "join_schedules", "schedules": [dict(LINEAR, valu=1)]}),
     f"{RATE}['schedules'][0]: unknown key 'valu'"),
    ({"name": "optax.partition", "transforms": {"a": dict(ADAGRAD, epz=1)}},
     "config['transforms']['a']: unknown key 'epz', did you mean 'eps'?"),
    (dict(ADAGRAD, eps=-1), "config: eps must be in [0, inf), got -1."),
    *(
        (rated({"name": name, "init_value": 1.0, **words}),
         f"{RATE}: {key} must be in {interval}, got {words[key]}")
        for name, key, interval, words in [
            ("inverse_time_decay", "transition_steps", "(0, inf)",
             {"transition_steps": 0, "decay_rate": 1.0}),
            ("polynomial_decay", "transition_steps", "(0, inf)",
             {"transition_steps": -1, "end_value": 0.0, "power": 1.0}),
            ("linear_cosine_decay", "decay_steps", "(0, inf)", {"decay_steps": 0}),
            ("cosine_decay_restarts", "first_decay_steps", "(0, inf)",
             {"first_decay_steps": 0}),
            ("cosine_decay_restarts", "t_mul", "[1, inf)",
             {"first_decay_steps": 1, "t_mul": 0.5}),
        ]
    ),
    (rated({"name": "at_last_push", "schedule": LINEAR | {"transition_steps": 1},
            "num_required": 0}),
     f"{RATE}: num_required must be in [1, 2147483647], got 0"),
    (dict(ADAGRAD, clipnorm=1.0, clipvalue=1.0),
     "config: at most one of clipnorm, clipvalue, global_clipnorm may be given"),
    # What functions of optax would take for a number or a flag.
    (rated("1e-3"), f"{RATE} must be a number, or a schedule with its 'name', got "
     "'1e-3'. YAML reads 1e-3 as a string"),
    (rated(True), f"{RATE} cannot be true or false, got True."),
    (rated({"init_value": 1.0}), f"{RATE} must be a number, or a schedule with its "),
    ({"name": "optax.sgd", "learning_rate": [0.1]}, f"{RATE} must be a number"),
    (rated({"name": "densify"}), f"{RATE} must be a number, or a schedule with its "),
    ({"name": "optax.adamw", "learning_rate": 0.1, "weight_decay": True},
     "config['weight_decay'] cannot be true or false, got True."),
    ({"name": "optax.sgd", "learning_rate": 0.1, "nesterov": "false"},
     "config['nesterov'] must be true or false, got 'false'."),
    # What functions refuse themselves.
    (rated(jnp.float32(1)), f"{RATE} must be a JSON value"),
    (dict(ADAGRAD, accumulator_dtype="bfloat61"),
     "config: accumulator_dtype must be a real floating dtype, got 'bfloat61'"),
    ({"name": "scale_by_staleness", "weight": "hinge"},
     "config: weight must be a function of the"),
    (dict(ADAGRAD, eps="tiny"),
     "config: eps must be a real scalar in [0, inf), got 'tiny'."),
    # Transformations.
    (None, "config, by its 'name', must be an optax.GradientTransformation, with"),
    ({"learning_rate": 0.1}, "config, by its 'name', must be an optax.Grad"),
    (dict(LINEAR, transition_steps=1), "config, by its 'name', must be an optax.Grad"),
    ({"name": "drop_stale", "inner": None, "max_staleness": 1},
     "config: inner must be an optax.GradientTransformation, with init and update, g"),
    ({"name": "drop_stale", "inner": optax.sgd(0.1), "max_staleness": 1},
     "config['inner'][0] must be a JSON value"),
    ({"name": "chain", "transforms": ADAGRAD},
     "config: transforms[0] must be an optax.GradientTransformation"),
    (rated(dict(INVERSE, transition_steps=0)),
     f"{RATE}: transition_steps must be in (0, inf), got 0."),
    # Numbers.
    *(
        (rated(rate), f"{RATE} must be finite in float32, or an int32, got ")
        for rate in (float("nan"), float("inf"), -float("inf"), 1e39, 10**30)
    ),
    (dict(ADAGRAD, clipnorm=-float("inf")), "config['clipnorm'] must be finite in fl"),
    # Schedules.
    *(
        (rated(dict(STEPS, boundaries_and_scales=scales)), f"{RATE}{message}")
        for scales, message in (
            ({"a": 1.0}, "['boundaries_and_scales']: invalid literal for int()"),
            ({1.5: 1.0}, "['boundaries_and_scales']: invalid literal for int()"),
            ({1: -float("inf")}, "['boundaries_and_scales'][1] must be finite in"),
        )
    ),
    (rated({"name": "linear_onecycle_schedule", "transition_steps": 4, "peak_value": 1,
            "div_factor": 0}),
     "division by zero"),
]  # fmt: skip


# Schedules, beside those of Keras 3 and of papers.

GOLDEN = pathlib.Path(test_golden.__file__).parent / "golden/keras3_schedules.json"
KERAS3_SCHEDULES = {c["name"]: c for c in json.loads(GOLDEN.read_text())["cases"]}


def rates(configs, steps):
    """What each schedule gives at each step: one program for all of them."""

    @jax.jit
    def at(step):
        state = optax.ScaleByScheduleState(step)
        return {k: -tx.update(jnp.ones(()), state)[0] for k, tx in txs.items()}

    txs = {
        k: gx.from_config({"name": "scale_by_learning_rate", "learning_rate": config})
        for k, config in configs.items()
    }
    found = [at(jnp.int32(step)) for step in steps]
    return {k: jnp.stack([each[k] for each in found]) for k in txs}


@pytest.mark.usefixtures("standard_promotion")
def test_schedules_are_those_of_keras():
    counts = KERAS3_SCHEDULES["exponential"]["counts"]
    configs = {name: case["config"] for name, case in KERAS3_SCHEDULES.items()}
    for name, got in rates(configs, counts).items():
        expected = KERAS3_SCHEDULES[name]["rates"]
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-8, err_msg=name)


def sgdr(step, length, t_mul=2.0, m_mul=1.0, alpha=0.0):
    """Warm restarts as in their paper: one cosine after the other."""
    height = 1.0
    while step >= length:
        step, length, height = step - length, length * t_mul, height * m_mul
    return (1 - alpha) * height * (1 + np.cos(np.pi * step / length)) / 2 + alpha


@pytest.mark.every
@pytest.mark.parametrize("x64", [False, True])
def test_cosine_restarts_are_those_of_their_paper(x64):
    # As in Keras's own tests: the defaults, in float64, and each argument on its own.
    options = [{}, {"alpha": 0.1}, {"m_mul": 0.9}, {"t_mul": 1.0}, {"t_mul": 1.1}]
    common = {"name": "cosine_decay_restarts", "first_decay_steps": 1000}
    common["init_value"] = 1.0
    # Among them are each restart, the step before it and the step after it.
    steps = [*range(0, 1500, 250), 2099, 2100, 2101, 2999, 3000, 3001, 6999, 7000, 7001]
    rtol = 1e-12 if x64 else 3e-6
    with jax.enable_x64(x64):
        configs = {number: common | each for number, each in enumerate(options)}
        for number, got in rates(configs, steps).items():
            assert got.dtype == (jnp.float64 if x64 else jnp.float32)
            expected = [sgdr(step, 1000, **options[number]) for step in steps]
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol)


def inverse_time(step, length):
    return 1 / (1 + 0.5 * (step // length))


def cycles(step, length):
    ways = max(1, -(-step // length))
    return 0.1 + 0.9 * (1 - step / (ways * length)) ** 2


# Whole periods, at each multiple: compiled, a division may miss one by a rounding.
RESTARTS, INVERSE, POLYNOMIAL = (
    ("cosine_decay_restarts", "first_decay_steps"),
    ("inverse_time_decay", "transition_steps"),
    ("polynomial_decay", "transition_steps"),
)
PERIODIC = {
    "restarts": (sgdr, RESTARTS, {"m_mul": 0.5}),
    "restarts of one length": (sgdr, RESTARTS, {"t_mul": 1.0}),
    "restarts, longer by half": (sgdr, RESTARTS, {"t_mul": 1.5}),
    "staircase": (inverse_time, INVERSE, {"decay_rate": 0.5, "staircase": True}),
    "cycle": (cycles, POLYNOMIAL, {"end_value": 0.1, "power": 2.0, "cycle": True}),
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("length", [41, 1000, 10_000, 100_000, 1_000_000])
def test_long_schedules_begin_each_period_on_time(length, x64):
    near = {int(n * length) + k for n in (1, 2, 2.5, 3, 4, 7) for k in (-1, 0, 1)}
    steps = sorted({0, *near})
    with jax.enable_x64(x64):
        configs = {
            case: {"name": name, "init_value": 1.0, period: length, **options}
            for case, (_, (name, period), options) in PERIODIC.items()
        }
        found = rates(configs, steps)
    for case, (formula, _, options) in PERIODIC.items():
        extra = options if formula is sgdr else {}
        expected = [formula(step, length, **extra) for step in steps]
        np.testing.assert_allclose(found[case], expected, 5e-6, 1e-6, err_msg=case)


def test_a_rate_that_counts_pushes_does_not_overflow():
    """4,096 pushes a step: their number fits an int32 for 524,288 steps alone."""
    config = {"name": "inverse_time_decay", "init_value": 1.0, "decay_rate": 0.5}
    config |= {"transition_steps": 1_000_000}
    config = {"name": "at_last_push", "schedule": config, "num_required": 4096}
    steps = [100_000, 524_287, 1_000_000, 2**31 - 1]
    pushes = [min(4096 * (step + 1), 2**31) - 1 for step in steps]
    expected = [1 / (1 + 0.5 * push / 1e6) for push in pushes]
    found = rates({"pushes": config}, steps)["pushes"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_line_times_a_cosine_is_that_of_its_paper():
    numbers = {"decay_steps": 7, "num_periods": 1.5, "alpha": 0.25, "beta": 0.125}
    rate = {"name": "linear_cosine_decay", "init_value": 0.5, **numbers}
    tx = gx.from_config({"name": "scale_by_learning_rate", "learning_rate": rate})
    steps = np.arange(10)
    past = np.minimum(steps / 7, 1)
    cosine = (1 + np.cos(2 * np.pi * 1.5 * past)) / 2
    states = [optax.ScaleByScheduleState(jnp.int32(step)) for step in steps]
    updates = [tx.update(jnp.ones(()), state)[0] for state in states]
    expected = 0.5 * ((0.25 + 1 - past) * cosine + 0.125)
    np.testing.assert_allclose(-np.array(updates), expected, rtol=3e-6)


OURS = {
    "inverse_time_decay": {"transition_steps": 3, "decay_rate": 1},
    "polynomial_decay": {"end_value": 0, "power": 2, "transition_steps": 3},
    "cosine_decay_restarts": {"first_decay_steps": 2},
    "linear_cosine_decay": {"decay_steps": 3},
}
FLAGS = {"polynomial_decay": "cycle", "inverse_time_decay": "staircase"}


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "flags"),
    [*((name, {}) for name in OURS), *((k, {flag: True}) for k, flag in FLAGS.items())],
)
def test_our_schedules_need_no_promotion_of_dtypes(name, flags):
    rate = {"name": name, "init_value": 1, **OURS[name], **flags}
    tx = gx.from_config({"name": "scale_by_learning_rate", "learning_rate": rate})
    jax.jit(tx.update)(jnp.ones(()), tx.init(PARAMS))


# What all Keras's Adagrad wrote, and what those of Keras 3.15.1 and of TensorFlow
# 2.11.0 wrote besides.
ALL = {
    "name": "Adagrad",
    "learning_rate": 0.1,
    "initial_accumulator_value": 0.1,
    "epsilon": 1e-07,
}
NEW = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
}
KERAS3 = {**ALL, **NEW, "name": "adagrad", "learning_rate": 0.10000000149011612}
KERAS3 |= {"loss_scale_factor": None, "gradient_accumulation_steps": None}
TF2 = {**ALL, **NEW, "jit_compile": False, "is_legacy_optimizer": False}
# What tf.keras 1.14.0 and 1.15.5 wrote, and tf.keras.optimizers.legacy of TensorFlow
# 2.11.0.
LEGACY = {**ALL, "decay": 0.0}
# What tfa.optimizers.NovoGrad of TensorFlow Addons 0.19.0 wrote.
TFA = {
    "name": "NovoGrad",
    "learning_rate": 0.001,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-07,
    "weight_decay": 0.0,
    "grad_averaging": False,
}
# What Ftrl of the same systems wrote besides what Adagrad of each writes.
FTRL = {
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
}


def of_ftrl(config, **more):
    return {k: v for k, v in config.items() if k != "epsilon"} | FTRL | more


KERAS3_FTRL = of_ftrl(KERAS3, name="ftrl", beta=0.0)
TF2_FTRL = of_ftrl(TF2, name="Ftrl", beta=0.0)
LEGACY_FTRL = of_ftrl(LEGACY, name="Ftrl", beta=0.0)
TF1_FTRL = of_ftrl(LEGACY, name="Ftrl")
# What the schedules of TensorFlow 1.15.5 and 2.11.0 write besides their arguments.
UNNAMED = {"name": None}
UNSAID = {
    "ExponentialDecay": {"staircase": False},
    "InverseTimeDecay": {"staircase": False},
    "PolynomialDecay": {"cycle": False},
}

WRITERS = {
    "keras.optimizers.Adagrad": (KERAS3, "Adagrad"),
    "tf.keras.optimizers.Adagrad": (TF2, "Custom>Adagrad"),
    "tf.keras.optimizers.legacy.Adagrad": (LEGACY, "Adagrad"),
    "tfa.optimizers.NovoGrad": (TFA, "Addons>NovoGrad"),
    "keras.optimizers.Ftrl": (KERAS3_FTRL, "Ftrl"),
    "tf.keras.optimizers.Ftrl": (TF2_FTRL, "Custom>Ftrl"),
    "tf.keras.optimizers.legacy.Ftrl": (LEGACY_FTRL, "Ftrl"),
}
OF_TF1 = {"tf.keras.optimizers.Adagrad": LEGACY, "tf.keras.optimizers.Ftrl": TF1_FTRL}


def written(case):
    """The config that the optimizer of a golden trace writes, and its class name."""
    literal, class_name = WRITERS[case["symbol"]]
    if case["tf1"]:
        literal, class_name = OF_TF1[case["symbol"]], class_name.split(">")[-1]
    config = {**literal, **case["settings"]}
    if config.get("epsilon") == 0:  # Then the legacy ones write their default.
        config["epsilon"] = 1e-7
    if isinstance(config["learning_rate"], dict):
        arguments = dict(config["learning_rate"])
        schedule = arguments.pop("schedule")
        arguments = {**arguments, **UNSAID.get(schedule, {}), **UNNAMED}
        config["learning_rate"] = {"class_name": schedule, "config": arguments}
    return config, {"class_name": class_name, "config": config}


GOLDEN = {
    name: {**case, "tf1": name.startswith("tf1:")}
    for name, case in test_golden.OURS.items()
    if case["symbol"] in WRITERS
    and name.split(":")[0] in ("tf1", "tf2", "keras3")
    # There, `apply_gradients` ignores the clips of the config.
    and not name.endswith("-unclipped")
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces_follow_from_the_configs_of_their_optimizers(name):
    case = GOLDEN[name]
    config, serialized = map(through_json, written(case))
    tx = gx.from_config(config)
    assert gx.get_config(gx.from_config(serialized)) == gx.get_config(tx)
    params = test_golden.tree(case["params"])
    state = tx.init(params)
    step = jax.jit(lambda g, s, p: gx.apply_gradients(tx, g, s, p))
    for recorded in case["steps"]:
        params, state = step(test_golden.tree(recorded["grads"]), state, params)
        test_golden.agree(params, test_golden.tree(recorded["params"]), floor=1)


def test_golden_traces_of_every_writer_are_replayed():
    assert {case["symbol"] for case in GOLDEN.values()} == {*WRITERS}
    assert sum(case["tf1"] for case in GOLDEN.values()) >= 25
    assert len(GOLDEN) >= 104


def serialized(config, class_name="Adagrad", **envelope):
    return {"class_name": class_name, "config": config, **envelope}


def exponential(**changes):
    arguments = {"initial_learning_rate": 0.1, "decay_steps": 2, "decay_rate": 0.5}
    arguments |= {"staircase": False, "name": None}
    return serialized(arguments | changes, "ExponentialDecay")


EXPONENTIAL = exponential()


WRONG += [
    (dict(KERAS3, use_ema=True), "config: use_ema=True is not offered. Write false"),
    (dict(KERAS3, loss_scale_factor=2.0),
     "config: loss_scale_factor=2.0 is not offered. Write null"),
    (dict(KERAS3, gradient_accumulation_steps=-1),
     "config: num_required must be in [1, 2147483647], got -1."),
    (dict(TFA, grad_averaging=True),
     "config: grad_averaging=True is not offered. TensorFlow Addons skips it"),
    (dict(TFA, amsgrad=True), "config: amsgrad=True is not offered"),
    (dict(KERAS3_FTRL, weight_decay=0.1),
     "config: weight_decay=0.1 is not offered. Write null, and l2_regularization_str"),
    (dict(LEGACY_FTRL, learning_rate_power=0.5),
     "config: learning_rate_power must be in (-inf, 0], got 0.5."),
    (dict(LEGACY, weight_decay=0.1),
     "config: unknown keys ['weight_decay']: not those of Keras's Adagrad."),
    (dict(LEGACY_FTRL, weight_decay=0.1), "config: weight_decay=0.1 is not offered."),
    (dict(KERAS3, clip_norm=1.0), "config: unknown keys ['clip_norm']"),
    (dict(TF2, weight_decay=0.1, clipnorm=1.0, clipvalue=1.0),
     "config: at most one of clipnorm, clipvalue, global_clipnorm may be given"),
    (dict(LEGACY, decay=0.5, learning_rate=EXPONENTIAL),
     "config: decay=0.5 is not offered beside a schedule."),
    (serialized(dict(KERAS3, use_emma=True)), "config: unknown keys ['use_emma']"),
    (serialized({"learning_rate": 0.1}),
     "config: missing 'initial_accumulator_value', as Keras's Adagrad has."),
    # Neither a decay nor a use_ema says where its eps is.
    *(
        (
            serialized({k: LEGACY[k] for k in LEGACY if k != "decay"} | {**rate}),
            "config: missing 'decay', as Keras's Adagrad has.",
        )
        for rate in ({}, {"learning_rate": EXPONENTIAL})
    ),
    (serialized(KERAS3, clipnorm=1.0), "config: unknown keys ['clipnorm']"),
    (serialized(None), "config: 'NoneType' object has no attribute"),
    ({"class_name": "Adagrad"}, "config: missing 'config'"),
    (serialized(KERAS3, class_name="Adam"),
     "config: the class 'Adam' of None is not read. These classes of Keras are: "),
    (serialized(KERAS3, module="my.optimizers"),
     "config: the class 'Adagrad' of my.optimizers is not read. These classes"),
    (dict(KERAS3, learning_rate=dict(EXPONENTIAL, class_name="NoisyDecay")),
     f"{RATE}: the class 'NoisyDecay' of None is not read. These classes of Keras are"),
    (serialized(dict(TF2, learning_rate=exponential(staircas=True))),
     f"{RATE}: unknown keys ['staircas']: not those of Keras's ExponentialDecay."),
    (exponential(decay_rate=0.0),
     "config: decay_rate=0 is not offered"),
    (serialized({"boundaries": [1], "values": [1.0]}, "PiecewiseConstantDecay"),
     "config: values must have one entry more than boundaries."),
    (EXPONENTIAL, "config, by its 'name', must be an optax.Grad"),
    (dict(KERAS3, learning_rate=serialized(KERAS3)),
     "config['learning_rate'] must be a number, or a schedule with its 'name', got "),
    ({"name": "adam", "use_ema": False}, "config['name']: unknown name 'adam', did"),
    (dict(KERAS3, epsilon="small"),
     "config: eps must be a real scalar in [0, inf), got 'small'."),
    (dict(KERAS3, weight_decay=0.1, learning_rate="fast"),
     "config['transforms'][2]['learning_rate'] must be a number, or a schedule"),
    (serialized({"boundaries": [float("inf")], "values": []}, "PiecewiseConstantDecay"),
     "config['config']['boundaries'][0] must be finite in float32, or an int32, got"),
]  # fmt: skip


@pytest.mark.every
@pytest.mark.parametrize(("config", "message"), WRONG, ids=[m[:70] for _, m in WRONG])
def test_an_error_names_the_bad_entry(config, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        gx.from_config(config)
    assert message in str(raised.value)


LONG = "x" * 10**5


@pytest.mark.every
@pytest.mark.parametrize(
    ("config", "begins", "ends"),
    [
        ({"name": LONG}, "config['name']: unknown name 'xxx", ", chain."),
        ({LONG: 1, "name": "sgd"}, "config['name']: unknown name 'sgd'", ", chain."),
        ({LONG: 1, **ADAGRAD}, "config: unknown key 'xxx", "global_clipnorm."),
        ({**ADAGRAD, "eps": LONG}, "config: eps must be a real scalar", "xxx'."),
        ({**ADAGRAD, "eps": [0.5] * 10**4}, "config: eps must be a real", "0.5]."),
        ({**ADAGRAD, "eps": {LONG: np.nan}}, "config['eps']['xxx", "write 1e10."),
        ({"class_name": LONG}, "config: the class 'xxx", "PolynomialDecay."),
        ({**ADAGRAD, "clipnorm": "1" * 10**6}, "config['clipnorm'] must", "1.0e-3."),
        ({**ADAGRAD, "eps": 10**5000}, "config['eps'] must be finite", "write 1e10."),
        ({**ADAGRAD, 10**5000: 1}, "config[a int with a number", "write 1e10."),
        ({**ADAGRAD, "eps": object()}, "config['eps'] must be a JSON", "in Python."),
    ],
)
def test_an_error_about_a_long_value_is_short(config, begins, ends):
    """It keeps the place in the config, and what to do. Nor is a long one its cause."""
    with pytest.raises((TypeError, ValueError)) as raised:
        gx.from_config(config)
    text = str(raised.value)
    assert text.startswith(begins)
    assert text.endswith(ends)
    assert len("".join(traceback.format_exception(raised.value))) < 20_000


def test_an_error_that_is_made_short_keeps_its_kind():
    with pytest.raises(TypeError, match=r"^config: eps must be a real scalar"):
        gx.from_config({**ADAGRAD, "eps": LONG})
    with pytest.raises(ValueError, match=r"^config\['name'\]: unknown name"):
        gx.from_config({"name": LONG})


# Each with a length, and the counts of its ends: no step may be taken for the next one.
LONG_SCHEDULES = [
    ("inverse_time_decay", 7, {"decay_rate": 3.0}),
    ("inverse_time_decay", 41, {"decay_rate": 0.5, "staircase": True}),
    ("inverse_time_decay", 10**6, {"decay_rate": 0.5, "staircase": True}),
    ("polynomial_decay", 7, {"end_value": 0.25, "power": 2.0}),
    ("polynomial_decay", 41, {"end_value": 0.0, "power": 0.5}),
    ("polynomial_decay", 41, {"end_value": 0.25, "power": 1.0, "cycle": True}),
    ("cosine_decay_restarts", 7, {"t_mul": 1.0, "m_mul": 0.5, "alpha": 0.25}),
    ("cosine_decay_restarts", 7, {}),
    ("cosine_decay_restarts", 10**6, {"t_mul": 1.0, "m_mul": 0.5, "alpha": 0.0}),
    ("cosine_decay_restarts", 10**6, {"t_mul": 1.5, "m_mul": 0.5, "alpha": 0.25}),
    ("cosine_decay_restarts", 41, {"t_mul": 1.0001, "m_mul": 0.5, "alpha": 0.25}),
    ("linear_cosine_decay", 41, {"num_periods": 1.5, "alpha": 0.1, "beta": 0.1}),
    ("linear_cosine_decay", 7, {}),
]


@pytest.mark.every
@pytest.mark.parametrize(("name", "length", "numbers"), LONG_SCHEDULES)
def test_a_schedule_is_its_formula_up_to_the_ends_of_its_periods(name, length, numbers):
    formula, of_length, _ = drawn.SCHEDULES[name]
    doubled = {k: 2 * x if k == "end_value" else x for k, x in numbers.items()}
    rate = getattr(schedules, name)(2.0, **{of_length: length}, **doubled)
    ends = np.cumsum(length * numbers.get("t_mul", 1) ** np.arange(4))
    near = {int(end) + k for end in (0, *ends) for k in (-1, 0, 1, length // 3)}
    steps = np.array(sorted(k for k in near if k >= 0), np.int32)
    got = in_numpy.jit(rate)(steps)
    wanted = [2 * formula(int(k), length, **numbers) for k in steps]
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)


@pytest.mark.every
@pytest.mark.parametrize("pushes", [1, 2, 3, 4096, 2**31 - 1])
def test_the_last_push_of_a_step_fits_an_int32(pushes):
    """Later steps have the rate of the last one whose pushes can be counted."""
    rate = schedules.at_last_push(lambda count: count, pushes)
    most = 2**31 - 1
    last = most // pushes - 1
    steps = sorted({0, 1, last - 1, last, last + 1, most} - {-1, most + 1})
    steps = np.array(steps, np.int32)
    got = in_numpy.jit(rate)(steps)
    wanted = [pushes * (min(int(step), last) + 1) - 1 for step in steps]
    np.testing.assert_array_equal(got, wanted)


def test_keys_of_keras_that_change_no_number():
    plain = gx.get_config(gx.from_config(KERAS3))
    changed = {"ema_momentum": 0.5, "ema_overwrite_frequency": 3, "jit_compile": True}
    assert gx.get_config(gx.from_config({**KERAS3, **changed})) == plain
    for none in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay"):
        assert gx.get_config(gx.from_config({**KERAS3, none: 0.0})) == plain
    envelope = {"module": "keras.optimizers", "registered_name": None}
    build = {"build_config": {}}
    again = serialized(KERAS3, **envelope, **build)
    assert gx.get_config(gx.from_config(again)) == plain


# Spoiled at random.

CONFIGS = [
    *map(config_of, ROWS),
    *(config for config, _ in WRITERS.values()),
    NESTED,
    {**KERAS3, "weight_decay": 0.1, "learning_rate": EXPONENTIAL},
    {"name": "optax.adamw", "learning_rate": 0.1, "b1": 0.9, "mu_dtype": "bfloat16"},
    {"name": "optax.scale_by_schedule", "step_size_fn": INVERSE},
    {"name": "optax.contrib.prodigy", "betas": [0.9, 0.99]},
]
NAMES = [f"optax.{name}" for name in dir(optax)]
NAMES += [*OURS, "at_last_push", "linear_schedule", "join_schedules"]
VALUES = [
    *(None, True, 0, -1, 2, 0.5, 1e30, 10**30, 2**31, 1e39),
    *(float("nan"), float("inf"), "", "abc", "1e-3", "0", "float32", "int32"),
    *([], [1], ["a"], [[1]], {}, {"a": 1}, {"name": "a"}, {"name": 5}, {"1": 0.5}),
    *({"x": 0.5}, {1.5: 0.5}, {10**30: 0.5}, {"class_name": "ExponentialDecay"}),
    *({"class_name": "Adagrad", "config": None}, {"use_ema": True}),
    *(INVERSE, ADAGRAD),
]


def places(config):
    """(container, key) of every entry."""
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    for key, entry in list(entries):
        yield config, key
        if isinstance(entry, dict | list):
            yield from places(entry)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
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
