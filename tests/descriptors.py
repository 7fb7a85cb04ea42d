"""Everything under test in one table: a row for each public transformation.

Each contract test in ``test_contract.py`` runs over every row. A row is a public
factory with arguments. A factory may have several rows, and ``test_checklist.py`` asks
for at least one. Over its rows each number that it takes must matter.
"""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from gradxform._gates.gate import gate_of
from gradxform._jax.compilers import LARGE
from gradxform._numbers.norms import _SMALL


def factory(name: str) -> Callable[..., Any]:
    """A public function or class of gx, or of gx.contrib."""
    return getattr(gx if hasattr(gx, name) else gx.contrib, name)


# Types of arguments that are numbers, or trees and rows of numbers; no functions.
NUMBER = re.compile(
    r"(?!Callable).*?(ArrayLike|ScalarOrSchedule|Required|\b(float|int)\b)"
)


@dataclasses.dataclass(frozen=True, eq=False)  # It is hashed as it stands.
class Descriptor:
    name: str  # of the public factory
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = ""
    local_step: int | None = None  # an extra argument of update
    staleness: int | None = None
    worker: int | None = None
    value: float | None = None  # the loss of each push
    worker_params: bool = False
    real_only: bool = False
    # Row-sparse gradients give the updates of dense ones, or those of the touched rows
    # alone, or an error that names densify.
    rows: Literal["same", "touched", "refused"] = "same"
    reads_params: bool = False
    # Its updates are float32 where gradients have another dtype than half-precision or
    # float32 parameters, so that they hold minus each parameter exactly.
    sets_params: bool = False
    # Its updates are float32 for parameters in half precision.
    wide_updates: bool = False
    # The share of a large leaf's entries that may differ from the formula. It is 0,
    # unless the update jumps with the state: rounding then turns some entries' signs.
    jumps: float = 0.0
    # Its updates are piecewise constant in the gradients, as signs are. So their
    # derivative by the gradients is 0.
    piecewise_constant: bool = False
    # It divides a leaf by how many of its entries it keeps. So an entry that jumps, or
    # is not finite, moves all entries of its leaf by its share of them.
    rescales: bool = False
    # Of a donated float32 step: temporary arrays, and passes over memory, in models.
    # First with gradients as arguments, then with loss and gradients inside. Optional.
    figures: tuple[tuple[float, float], tuple[float, float]] | None = None

    def extra(self, params: Any) -> dict[str, Any]:
        """The extra arguments of update, for these parameters."""
        arguments = {
            "local_step": self.local_step,
            "staleness": self.staleness,
            "worker": self.worker,
            "value": self.value,
            "worker_params": None,
        }
        if self.worker_params:
            arguments["worker_params"] = jax.tree.map(lambda p: p - 1, params)
        return {k: v for k, v in arguments.items() if v is not None}

    def arguments(self, **more: Any) -> dict[str, Any]:
        """The factory's arguments, with those of ``more`` that it takes."""
        known = self.parameters().keys()
        if self.name == "accumulate":  # Its own axes are those of the data.
            known -= {"axis_name"}
        return {
            k: v.make(**more) if isinstance(v, Descriptor) else v
            for k, v in self.kwargs.items()
        } | {k: v for k, v in more.items() if k in known}

    def factories(self) -> list[str]:
        """Its factory and those inside, from outside to inside."""
        inner = self.kwargs.get("inner")
        return [self.name, *(inner.factories() if inner else [])]

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The factory's parameters by their names."""
        return inspect.signature(factory(self.name)).parameters

    def like_updates(self, grads: Any, params: Any) -> Any:
        """The gradients in the dtypes that its updates have."""

        def cast(g: jax.Array, p: jax.Array) -> jax.Array:
            if self.wide_updates:
                return g.astype(jnp.float32) if p.dtype.itemsize == 2 else g
            return g if g.dtype == p.dtype else g.astype(jnp.float32)

        casts = self.sets_params or self.wide_updates
        return jax.tree.map(cast, grads, params) if casts else grads

    def kept(self, dtype: str = "float32") -> dict[str, np.dtype]:
        """The fields of its state, and of the one inside, with dtypes: see ``KEPT``."""
        own = jnp.dtype(dtype)
        wide = np.promote_types(own, np.float32)
        kinds = {"own": own, "wide": wide, "real": jnp.finfo(wide).dtype}

        def dtype_of(field: str, kind: str) -> np.dtype:
            argument = "mu_dtype" if field == "mu" else "accumulator_dtype"
            return jnp.dtype(self.kwargs.get(argument) or kinds[kind])

        fields = KEPT.get(self.name.removeprefix("scale_by_"), {})
        own = {field: dtype_of(field, kind) for field, kind in fields.items()}
        inner = self.kwargs.get("inner")
        return own | inner.kept(dtype) if inner else own

    def numbers(self) -> list[str]:
        """The factory's parameters that are numbers, or may be."""
        return [k for k, p in self.parameters().items() if NUMBER.match(p.annotation)]

    def state(self, params: optax.Params) -> list[jax.ShapeDtypeStruct]:
        """The arrays of its state. Some rows keep none."""
        return jax.tree.leaves(jax.eval_shape(self.make().init, params))

    def range_of(self, number: str) -> str | None:
        """The range of a number, such as ``"[0, 1)"``; ``KeyError`` without one."""
        text = range_text(self.name, number)
        if text is None:
            return None
        values = {k: p.default for k, p in self.parameters().items()} | self.kwargs
        words, bracket, ends = re.split(r"([\[(])", text, maxsplit=1)
        ends = (str(eval(x, {"inf": math.inf}, values)) for x in ends[:-1].split(","))
        return f"{words}{bracket}{', '.join(ends)}{text[-1]}"

    def apart_from(self, number: str) -> dict[str, Any]:
        """Defaults of the numbers that this one forbids, or whose ranges it decides."""
        defaults = {k: p.default for k, p in self.parameters().items()}
        decided = {
            k for k in self.numbers() if number in (range_text(self.name, k) or "")
        }
        clips = CLIPS.keys() & defaults if number in CLIPS else set()
        return {k: defaults[k] for k in decided | clips - {number}}

    def says(self, *fields: str) -> str:
        """What its row says in these fields, for the message of a failing test."""
        said = ", ".join(f"{field}={getattr(self, field)!r}" for field in fields)
        return f"The row {self} of tests/descriptors.py says {said}"

    def make(self, **more: Any) -> optax.GradientTransformationExtraArgs:
        return factory(self.name)(**self.arguments(**more))

    def __str__(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


FIELDS = {field.name for field in dataclasses.fields(Descriptor)}


def D(name: str, variant: str = "", **more: Any) -> Descriptor:
    """A row, as the factory is called; fields of a row may stand beside arguments."""
    kwargs = {k: v for k, v in more.items() if k not in FIELDS}
    fields = {k: v for k, v in more.items() if k in FIELDS}
    return Descriptor(name, kwargs, variant, **fields)


# Its update changes every row, so it refuses row-sparse gradients.
Dense = functools.partial(D, rows="refused")
Narrow = functools.partial(Dense, variant="bf16", real_only=True)

# It computes weights, of the touched rows alone, and returns how they differ.
Weights = functools.partial(D, rows="touched", reads_params=True, sets_params=True)

# The fields of a state that the formula in oracles.py yields too, in its order. Their
# dtype is the parameters' "own", that in at least float32, "wide", or the "real" of it.
KEPT = {
    "adagrad": {"sum_of_squares": "real"},
    "ftrl": {"sum_of_squares": "real", "linear": "wide"},
    "proximal_adagrad": {"sum_of_squares": "real"},
    "novograd": {"mu": "own", "nu": "real"},
    "delayed_nesterov": {"mu": "own", "accumulated": "wide"},
    "momentum_look_ahead": {"mu": "own"},
    "measure_norms": {"norms": "real"},
}

RATE = {"learning_rate": 0.1}
BF16 = jnp.bfloat16
ADAGRAD = D("adagrad", **RATE)
NOVOGRAD = Dense("novograd", **RATE, global_clipnorm=0.5)
LOOK_AHEAD = Dense("momentum_look_ahead", **RATE)
# Keras's clips, each a row of an optimizer that takes them.
CLIPS = {"clipnorm": 0.5, "clipvalue": 0.125, "global_clipnorm": 0.5}


def with_each_clip(make: Callable[..., Descriptor], name: str) -> list[Descriptor]:
    """Three rows. Clipping by value is for real gradients."""
    return [
        make(name, clip, **RATE, **{clip: value}, real_only=clip == "clipvalue")
        for clip, value in CLIPS.items()
    ]


# Arguments that several rows have.
START = {"initial_accumulator_value": 0.2}
HELOCO = gx.contrib.MomentumAlignment()
REGULARIZED = {"l1_regularization_strength": 0.5, "l2_regularization_strength": 0.3}
Summing = functools.partial(D, inner=ADAGRAD, num_required=2, local_step=0)
Rounding = functools.partial(D, reads_params=True, wide_updates=True)


def of_one_worker(name: str, method: str, **more: Any) -> Descriptor:
    return Dense(name, method, num_workers=1, method=method, worker=0, **more)


def one_over(s: jax.Array) -> jax.Array:
    return 1 / (1 + s)


TWO_PASSES = ((0, 7), (0.75, 11.33))
AT_ONCE = ((0, 3), (0.26, 7.33))

DESCRIPTORS = (
    D("clip_by_global_norm", max_norm=1.0, figures=((0, 4), (1, 6.83))),
    D("clip_by_norm", max_norm=0.5, figures=((0, 4), (0.75, 8.33))),
    D("densify", figures=AT_ONCE),
    D("scale_by_learning_rate", **RATE, figures=AT_ONCE),
    D("scale_by_adagrad", figures=TWO_PASSES),
    D("adagrad", **RATE, figures=TWO_PASSES),
    D("adagrad", "tf1", **RATE, **START, eps=0.3, eps_in_sqrt=False),
    D("adagrad", "row_wise", **RATE, row_wise=True),
    D("adagrad", "bf16", **RATE, accumulator_dtype=BF16),
    *with_each_clip(D, "adagrad"),
    Weights("ftrl", **RATE, figures=((0, 12), (0.75, 16.33))),
    Weights(
        "ftrl",
        "regularized",
        learning_rate=0.5,
        learning_rate_power=-0.7,
        **START,
        **REGULARIZED,
        l2_shrinkage_regularization_strength=0.1,
        beta=0.4,
        figures=((0, 12), (0.75, 16.33)),
    ),
    Weights(
        "ftrl",
        "multiplied",
        learning_rate=0.5,
        l1_regularization_strength=0.5,
        multiply_linear_by_learning_rate=True,
    ),
    *with_each_clip(Weights, "ftrl"),
    Weights("proximal_adagrad", **RATE, figures=TWO_PASSES),
    Weights(
        "proximal_adagrad",
        "regularized",
        learning_rate=0.3,
        **START,
        **REGULARIZED,
        figures=TWO_PASSES,
    ),
    Dense("scale_by_novograd", figures=((0, 7), (1, 11.33))),
    Dense("novograd", **RATE, figures=((0, 7), (1, 11.33))),
    Dense("novograd", "weight_decay", **RATE, weight_decay=0.01, reads_params=True),
    Dense("novograd", "grad_averaging", **RATE, grad_averaging=True),
    Dense("novograd", "nesterov", **RATE, nesterov=True),
    Dense(
        "novograd", "eps_outside", **RATE, b1=0.9, b2=0.5, eps=0.3, eps_in_sqrt=False
    ),
    Dense("novograd", "lr_in_momentum", **RATE, lr_in_momentum=True),
    Narrow("novograd", **RATE, mu_dtype=BF16),
    *with_each_clip(Dense, "novograd"),
    Dense("scale_by_delayed_nesterov", num_delay=2, figures=((0, 10), (0.75, 14.33))),
    Dense(
        "delayed_nesterov",
        **RATE,
        num_delay=2,
        activation=0.25,
        figures=((0, 10), (0.75, 14.33)),
    ),
    Narrow("delayed_nesterov", **RATE, num_delay=2, mu_dtype=BF16),
    Dense("delayed_nesterov", "b1", **RATE, num_delay=2, b1=0.5),
    Dense("scale_by_momentum_look_ahead", figures=TWO_PASSES),
    Dense("momentum_look_ahead", **RATE, figures=TWO_PASSES),
    Narrow("momentum_look_ahead", **RATE, mu_dtype=BF16),
    Dense("momentum_look_ahead", "heloco", **RATE, b1=0.5, alignment=HELOCO),
    D("measure_norms", figures=((0, 4), (0.76, 8.33))),
    Dense("measure_cosine", figures=((0, 8), (1, 12.33))),
    D("lazy", inner=ADAGRAD, figures=TWO_PASSES),
    D("whole_matrices", inner=ADAGRAD, figures=TWO_PASSES),
    D("lazy", "mu", inner=LOOK_AHEAD, rows="touched"),
    # Its momentum loses nothing to rounding, so the mask is that of the formula.
    Dense(
        "cautious", inner=Dense("momentum_look_ahead", **RATE, b1=0.5), rescales=True
    ),
    # Here rounding turns the sign of some entries.
    Dense("cautious", "novograd", inner=NOVOGRAD, jumps=1e-3, rescales=True),
    # The first two pushes with local_step 0 are fresh, the third is stale.
    Dense(
        "drop_stale",
        inner=NOVOGRAD,
        max_staleness=1,
        local_step=0,
        figures=((0, 7), (1, 9.83)),
    ),
    D(
        "drop_stale",
        "nested",
        inner=D("drop_stale", inner=ADAGRAD, max_staleness=0),
        max_staleness=1,
        local_step=0,
    ),
    D(
        "conditional_accumulator",
        inner=NOVOGRAD,
        num_required=1,
        local_step=1,
        figures=((0, 10), (1, 12.83)),
    ),
    # The second of three pushes acts, and the third is stale.
    Summing("conditional_accumulator", "waiting", reduction="sum"),
    Summing("conditional_accumulator", "bf16", accumulator_dtype=BF16, real_only=True),
    # Every push acts. The second is one step late, and the third two.
    D(
        "conditional_accumulator",
        "late",
        inner=ADAGRAD,
        num_required=1,
        max_staleness=float("inf"),
        weight=one_over,
        local_step=0,
        figures=((0, 10), (1, 12.83)),
    ),
    D(
        "drop_stale",
        "accumulator",
        inner=D("conditional_accumulator", inner=ADAGRAD, num_required=2),
        max_staleness=1,
        local_step=0,
    ),
    D("accumulate", inner=NOVOGRAD, num_required=1, figures=((0, 10), (0.26, 12.83))),
    # With one worker each push is a step; the third is stale.
    of_one_worker(
        "worker_mean",
        "all",
        inner=NOVOGRAD,
        local_step=1,
        figures=((1, 21), (2, 23.84)),
    ),
    # The first push fills the table.
    of_one_worker("worker_mean", "latest", inner=ADAGRAD),
    of_one_worker("worker_mean", "ringleader", inner=ADAGRAD),
    # The first of three pushes acts with the second; in the other row, with the third.
    Dense("delayed", inner=NOVOGRAD, num_steps=1, figures=((0, 9), (1, 13.83))),
    Dense("delayed", "two", inner=ADAGRAD, num_steps=2),
    # The second of three pushes acts, and the third is added.
    D("accumulate", "waiting", inner=ADAGRAD, num_required=2, skip_nonfinite=True),
    D("drop_stale", "schedule", inner=ADAGRAD, max_staleness=jnp.sqrt, local_step=0),
    D("scale_by_staleness", power=0.5, staleness=3, figures=AT_ONCE),
    D("scale_by_staleness", "weight", weight=one_over, staleness=3),
    D("scale_by_worker", factors=[0.5, 2.0], worker=1, figures=AT_ONCE),
    D(
        "compensate_delay",
        variance_control=0.5,
        worker_params=True,
        reads_params=True,
        figures=((0, 4), (0.26, 8.33)),
    ),
    D("clip_by_zscore", figures=((0, 4), (1, 6.83))),
    # The third of three pushes is clipped; in the other row the second one, too.
    D("clip_by_zscore", "two", warmup=2),
    D("clip_by_zscore", "one", threshold=0.2, decay=0.5, warmup=1),
    # The third of three pushes is a spike.
    Dense(
        "skip_spikes",
        inner=NOVOGRAD,
        warmup=2,
        sigmas=0.5,
        figures=((0, 8), (1, 10.84)),
    ),
    D("skip_spikes", "window", inner=ADAGRAD, window=4, sigmas=0.5, value=2.0),
    # Parameters in float32 pass through.
    Rounding("master_weights", inner=ADAGRAD, figures=TWO_PASSES),
    Rounding("master_weights", "int8", inner=ADAGRAD, residual_dtype="int8"),
    Rounding("round_stochastically", seed=0, figures=AT_ONCE),
    # Its arrays are too small for 8 bits, but not where figures are taken.
    D("low_bit_state", inner=ADAGRAD, figures=((1.01, 9.36), (1.07, 13.7))),
)
# The rows that act at once. A gate's conditional has tests of its own.
UNGATED = [row for row in DESCRIPTORS if gate_of(row.make()) is None]

# All that is public. from_config makes one of the others.
TRANSFORMATIONS = [
    name
    for name in (*gx.__all__, *dir(gx.contrib))
    if inspect.isfunction(make := factory(name))
    and "Transformation" in make.__annotations__["return"]
    and name != "from_config"
]

_COUNT, _FROM_0 = "integers in [1, 2**31 - 1]", "[0, inf)"
# The range of each number that a factory takes, as its docstring says it. A range may
# depend on the other arguments. None is any real number. The number of one factory
# alone has its name before it.
RANGES = {
    "activation": "[0, 1 / num_delay]",
    "b1": "[0, 1)",
    "b2": "[0, 1)",
    "beta": _FROM_0,
    "bits": "integers in [8, 8]",
    "block_size": "integers in [8, 65536]",
    "clipnorm": "[0, inf]",
    "clipvalue": "[0, inf]",
    "decay": "[0, 1]",
    "eps": _FROM_0,
    "factors": _FROM_0,
    "ftrl.learning_rate": _FROM_0,
    "global_clipnorm": "[0, inf]",
    "initial_accumulator_value": _FROM_0,
    "l1_regularization_strength": _FROM_0,
    "l2_regularization_strength": _FROM_0,
    "l2_shrinkage_regularization_strength": _FROM_0,
    "learning_rate": None,
    "learning_rate_power": "(-inf, 0]",
    "max_norm": "[0, inf]",
    "max_staleness": "integers in [0, inf]",
    "min_size": _COUNT,
    "num_delay": _COUNT,
    "num_required": _COUNT,
    "num_steps": "integers in [0, 2**30 - 1]",
    "num_workers": _COUNT,
    "power": _FROM_0,
    "proximal_adagrad.learning_rate": _FROM_0,
    "seed": None,
    "sigmas": "[0, inf]",
    "skip_spikes.warmup": "integers in [2, window]",
    "threshold": "[0, inf]",
    "variance_control": _FROM_0,
    "warmup": _COUNT,
    "weight_decay": _FROM_0,
    "window": "integers in [2, 2**31 - 1]",
}


def range_text(factory: str, number: str) -> str | None:
    """What ``RANGES`` says of a factory's number."""
    return RANGES.get(f"{factory}.{number}", RANGES[number])


# These have no row in a migration table, and need none.
NO_ORIGINAL = {
    "cautious": "its authors' code is a line in their copies of optimizers",
    "clip_by_zscore": "ZClip: the page on spikes says how its code differs",
    "compensate_delay": "DC-ASGD is a paper; no system that people come from has it",
    "delayed": "it stands for what a pipeline does, and no library has it as a part",
    "delayed_nesterov": "a paper; its authors published no optimizer",
    "low_bit_state": "the page on half precision compares it with torchao's and "
    "FlashOptim's, which belong to their own optimizers",
    "master_weights": "the page on half precision compares it with torch-optimi's and "
    "FlashOptim's, which belong to their own optimizers",
    "measure_cosine": "a measurement of its own",
    "measure_norms": "a log's norms; loops of others compute them beside the step",
    "round_stochastically": "the page on half precision compares it with torchao's",
    "skip_spikes": "the page on spikes compares it with OLMo-core and MaxText",
    "whole_matrices": "torch has it in Megatron, torchtitan and Dion, for an optimizer "
    "each; the page on sharding says how to wrap optax's",
}


def thresholds() -> list[int]:
    """Numbers of entries at which the package decides otherwise."""
    defaults = inspect.signature(gx.low_bit_state).parameters
    names = ("block_size", "min_size")
    return sorted({LARGE, _SMALL, *(defaults[name].default for name in names)})


def widths(length: int) -> list[int]:
    """Widths of vectors: so many of them are just below, at and above a threshold.

    One vector more, or less, lies on its other side.
    """
    middles = [n // length for n in thresholds()]
    return sorted({n + d for n in middles for d in (-1, 0, 1) if n + d > 0})
