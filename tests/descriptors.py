"""Everything under test in one table: a row for each public transformation.

Each contract test in ``test_contract.py`` runs over every row. A row is a public
factory with arguments; a factory may have several rows, and ``test_contract.py``
asserts that every public factory has one.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from gradxform._late import gate


@dataclasses.dataclass(frozen=True)
class Descriptor:
    name: str  # of the public factory
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = ""
    local_step: int | None = None  # an extra argument of update
    staleness: int | None = None
    worker: int | None = None
    worker_params: bool = False
    real_only: bool = False

    def extra(self, params: Any) -> dict[str, Any]:
        """The extra arguments of update, for these parameters."""
        arguments = {
            "local_step": self.local_step,
            "staleness": self.staleness,
            "worker": self.worker,
            "worker_params": None,
        }
        if self.worker_params:
            arguments["worker_params"] = jax.tree.map(lambda p: p - 1, params)
        return {k: v for k, v in arguments.items() if v is not None}

    def arguments(self, **more: Any) -> dict[str, Any]:
        """The factory's arguments, with those of ``more`` that it takes."""
        known = inspect.signature(getattr(gx, self.name)).parameters
        return {
            k: v.make(**more) if isinstance(v, Descriptor) else v
            for k, v in self.kwargs.items()
        } | {k: v for k, v in more.items() if k in known}

    def make(self, **more: Any) -> optax.GradientTransformationExtraArgs:
        return getattr(gx, self.name)(**self.arguments(**more))

    def __str__(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


D = Descriptor

ADAGRAD = D("adagrad", {"learning_rate": 0.1})
NOVOGRAD = D("novograd", {"learning_rate": 0.1, "global_clipnorm": 0.5})

DESCRIPTORS = (
    D("clip_by_global_norm", {"max_norm": 1.0}),
    D("clip_by_norm", {"max_norm": 0.5}),
    D("densify"),
    D("scale_by_learning_rate", {"learning_rate": 0.1}),
    D("scale_by_adagrad"),
    D("adagrad", {"learning_rate": 0.1}),
    D("adagrad", {"learning_rate": 0.1, "eps_in_sqrt": False}, "tf1"),
    D("adagrad", {"learning_rate": 0.1, "row_wise": True}, "row_wise"),
    D("adagrad", {"learning_rate": 0.1, "accumulator_dtype": jnp.bfloat16}, "bf16"),
    D("adagrad", {"learning_rate": 0.1, "clipnorm": 0.5}, "clipnorm"),
    D("adagrad", {"learning_rate": 0.1, "clipvalue": 0.1}, "clipvalue", real_only=True),
    D("adagrad", {"learning_rate": 0.1, "global_clipnorm": 0.5}, "global_clipnorm"),
    D("scale_by_novograd"),
    D("novograd", {"learning_rate": 0.1}),
    D("novograd", {"learning_rate": 0.1, "weight_decay": 0.01}, "weight_decay"),
    D("novograd", {"learning_rate": 0.1, "grad_averaging": True}, "grad_averaging"),
    D("novograd", {"learning_rate": 0.1, "nesterov": True}, "nesterov"),
    D("novograd", {"learning_rate": 0.1, "eps_in_sqrt": False}, "eps_outside"),
    D("novograd", {"learning_rate": 0.1, "lr_in_momentum": True}, "lr_in_momentum"),
    D(
        "novograd",
        {"learning_rate": 0.1, "mu_dtype": jnp.bfloat16},
        "bf16",
        real_only=True,
    ),
    D("novograd", {"learning_rate": 0.1, "clipnorm": 0.5}, "clipnorm"),
    D(
        "novograd",
        {"learning_rate": 0.1, "clipvalue": 0.1},
        "clipvalue",
        real_only=True,
    ),
    D("novograd", {"learning_rate": 0.1, "global_clipnorm": 0.5}, "global_clipnorm"),
    D("scale_by_delayed_nesterov", {"num_delay": 2}),
    D(
        "delayed_nesterov",
        {"learning_rate": 0.1, "num_delay": 2, "activation": 0.25},
    ),
    D(
        "delayed_nesterov",
        {"learning_rate": 0.1, "num_delay": 2, "mu_dtype": jnp.bfloat16},
        "bf16",
        real_only=True,
    ),
    D("scale_by_momentum_look_ahead"),
    D("momentum_look_ahead", {"learning_rate": 0.1}),
    D(
        "momentum_look_ahead",
        {"learning_rate": 0.1, "mu_dtype": jnp.bfloat16},
        "bf16",
        real_only=True,
    ),
    D(
        "momentum_look_ahead",
        {"learning_rate": 0.1, "alignment": gx.MomentumAlignment()},
        "heloco",
    ),
    D("measure_cosine"),
    # The first two pushes with local_step 0 are fresh, the third is stale.
    D(
        "drop_stale",
        {"inner": NOVOGRAD, "max_staleness": 1},
        local_step=0,
    ),
    D(
        "drop_stale",
        {
            "inner": D("drop_stale", {"inner": ADAGRAD, "max_staleness": 0}),
            "max_staleness": 1,
        },
        "nested",
        local_step=0,
    ),
    D(
        "conditional_accumulator",
        {"inner": NOVOGRAD, "num_required": 1},
        local_step=1,
    ),
    # The second of three pushes acts, and the third is stale.
    D(
        "conditional_accumulator",
        {"inner": ADAGRAD, "num_required": 2, "reduction": "sum"},
        "waiting",
        local_step=0,
    ),
    D(
        "conditional_accumulator",
        {
            "inner": ADAGRAD,
            "num_required": 2,
            "accumulator_dtype": jnp.bfloat16,
        },
        "bf16",
        local_step=0,
        real_only=True,
    ),
    D(
        "drop_stale",
        {
            "inner": D(
                "conditional_accumulator", {"inner": ADAGRAD, "num_required": 2}
            ),
            "max_staleness": 1,
        },
        "accumulator",
        local_step=0,
    ),
    D("accumulate", {"inner": NOVOGRAD, "num_required": 1}),
    # With one worker each push is a step; the third is stale.
    D(
        "worker_mean",
        {"inner": NOVOGRAD, "num_workers": 1, "method": "all"},
        "all",
        local_step=1,
        worker=0,
    ),
    # The first push fills the table.
    D(
        "worker_mean",
        {"inner": ADAGRAD, "num_workers": 1, "method": "latest"},
        "latest",
        worker=0,
    ),
    D(
        "worker_mean",
        {"inner": ADAGRAD, "num_workers": 1, "method": "ringleader"},
        "ringleader",
        worker=0,
    ),
    # The first of three pushes acts with the second; in the other row, with the third.
    D("delayed", {"inner": NOVOGRAD, "num_steps": 1}),
    D("delayed", {"inner": ADAGRAD, "num_steps": 2}, "two"),
    # The second of three pushes acts, and the third is added.
    D(
        "accumulate",
        {"inner": ADAGRAD, "num_required": 2, "skip_nonfinite": True},
        "waiting",
    ),
    D(
        "drop_stale",
        {"inner": ADAGRAD, "max_staleness": jnp.sqrt},
        "schedule",
        local_step=0,
    ),
    D("scale_by_staleness", {"power": 0.5}, staleness=3),
    D("scale_by_staleness", {"weight": lambda s: 1 / (1 + s)}, "weight", staleness=3),
    D("compensate_delay", {"variance_control": 0.5}, worker_params=True),
)

# The rows that act at once. A gate's conditional has tests of its own.
UNGATED = [row for row in DESCRIPTORS if gate.guard_of(row.make()) is None]
