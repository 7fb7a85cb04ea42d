"""Gradient transformations for JAX that begin where optax stops.

The flow, left to right::

    loss ─▶ gradients ─▶ clip ─▶ scale (adagrad │ novograd) ─▶ updates ─▶ params
                ▲                                                           │
                └─── wrappers decide whether this push is applied ◀─────────┘
                     drop_stale · conditional_accumulator · accumulate
                     (they carry the global step)

Each part of it is a pure ``optax.GradientTransformation`` and composes with optax:

>>> import gradxform as gx, jax, jax.numpy as jnp, optax
>>> tx = gx.drop_stale(
...     optax.chain(
...         gx.clip_by_global_norm(1.0),
...         gx.novograd(optax.linear_schedule(0.1, 0.0, 60)),
...     ),
...     max_staleness=2,
... )
>>> params = {"w": jnp.array([3.0, -2.0])}
>>> state = tx.init(params)
>>> @jax.jit
... def push(grads, state, params, local_step):
...     return gx.apply_gradients(tx, grads, state, params, local_step=local_step)
>>> for _ in range(60):
...     seen = gx.global_step(state)
...     grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(params)
...     params, state = push(grads, state, params, seen)
>>> assert jnp.linalg.norm(params["w"]) < 0.5
>>> assert gx.global_step(state) == 60 and gx.staleness_fraction(state) == 0.0

One class stands outside the flow and drives it: :class:`ParameterServer`. Workers on
many threads, or on many machines through Ray, pull parameters from it and push
gradients to it. :mod:`gradxform.engines` runs such workers. Methods of single papers
are in :mod:`gradxform.contrib`: their arguments may still change.
"""

import sys as _sys

__version__ = "0.1.0"

# Python imports this package before it runs ``python -m gradxform``. JAX takes seconds
# to import, so the command line answers first, and Ctrl-C is heard before that.
if _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)] in (
    "gradxform",
    "-mgradxform",
):
    from gradxform._demo import ctrl_c as _ctrl_c

    _ctrl_c.hear()
    from gradxform._demo import command_line as _command_line

    _command_line.begin()

import importlib as _importlib
import typing as _typing

from gradxform._config.config import from_config as from_config
from gradxform._config.config import get_config as get_config
from gradxform._devices.abstract_state import abstract_state as abstract_state
from gradxform._devices.host import on_host as on_host
from gradxform._gates.accumulate import accumulate as accumulate
from gradxform._gates.accumulator import (
    conditional_accumulator as conditional_accumulator,
)
from gradxform._gates.counters import global_step as global_step
from gradxform._gates.counters import staleness_fraction as staleness_fraction
from gradxform._gates.delayed import DelayedState as DelayedState
from gradxform._gates.delayed import delayed as delayed
from gradxform._gates.drop_stale import DropStaleState as DropStaleState
from gradxform._gates.drop_stale import drop_stale as drop_stale
from gradxform._gates.skip_spikes import SkipSpikesState as SkipSpikesState
from gradxform._gates.skip_spikes import skip_spikes as skip_spikes
from gradxform._gates.sums import (
    ConditionalAccumulatorState as ConditionalAccumulatorState,
)
from gradxform._gates.worker_mean import WorkerMeanState as WorkerMeanState
from gradxform._gates.worker_mean import worker_mean as worker_mean
from gradxform._layers.evaluate import evaluate as evaluate
from gradxform._matrices.whole_matrices import whole_matrices as whole_matrices
from gradxform._numbers.apply_updates import apply_updates as apply_updates
from gradxform._rows.densify import densify as densify
from gradxform._rows.indexed_slices import IndexedSlices as IndexedSlices
from gradxform._rows.lazy import lazy as lazy
from gradxform._rows.lookup import lookup as lookup
from gradxform._rows.lookup import value_and_grad as value_and_grad
from gradxform._rows.table_rows import TableRows as TableRows
from gradxform._steps.apply import apply_gradients as apply_gradients
from gradxform._steps.apply import minimize as minimize
from gradxform._steps.local_steps import local_steps as local_steps
from gradxform._transforms.adagrad import ScaleByAdagradState as ScaleByAdagradState
from gradxform._transforms.adagrad import adagrad as adagrad
from gradxform._transforms.adagrad import scale_by_adagrad as scale_by_adagrad
from gradxform._transforms.clipping import (
    ClipByGlobalNormState as ClipByGlobalNormState,
)
from gradxform._transforms.clipping import clip_by_global_norm as clip_by_global_norm
from gradxform._transforms.clipping import clip_by_norm as clip_by_norm
from gradxform._transforms.clipping import global_norm as global_norm
from gradxform._transforms.compensate_delay import compensate_delay as compensate_delay
from gradxform._transforms.ftrl import FtrlState as FtrlState
from gradxform._transforms.ftrl import ftrl as ftrl
from gradxform._transforms.learning_rate import (
    scale_by_learning_rate as scale_by_learning_rate,
)
from gradxform._transforms.low_bit_state import LowBitState as LowBitState
from gradxform._transforms.low_bit_state import low_bit_state as low_bit_state
from gradxform._transforms.master_weights import (
    MasterWeightsState as MasterWeightsState,
)
from gradxform._transforms.master_weights import (
    get_master_weights as get_master_weights,
)
from gradxform._transforms.master_weights import master_weights as master_weights
from gradxform._transforms.measure_norms import MeasureNormsState as MeasureNormsState
from gradxform._transforms.measure_norms import measure_norms as measure_norms
from gradxform._transforms.novograd import ScaleByNovogradState as ScaleByNovogradState
from gradxform._transforms.novograd import novograd as novograd
from gradxform._transforms.novograd import scale_by_novograd as scale_by_novograd
from gradxform._transforms.proximal_adagrad import (
    ProximalAdagradState as ProximalAdagradState,
)
from gradxform._transforms.proximal_adagrad import proximal_adagrad as proximal_adagrad
from gradxform._transforms.round_stochastically import (
    RoundStochasticallyState as RoundStochasticallyState,
)
from gradxform._transforms.round_stochastically import (
    round_stochastically as round_stochastically,
)
from gradxform._transforms.scale_by_staleness import (
    scale_by_staleness as scale_by_staleness,
)

# These are imported when one of their names is first used: most trainings need none of
# them.
if _typing.TYPE_CHECKING:
    from gradxform import contrib as contrib
    from gradxform import engines as engines
    from gradxform._ray.parameter_server import ParameterServer as ParameterServer
    from gradxform._server.records import PushResult as PushResult
    from gradxform._server.records import ServerClosedError as ServerClosedError
    from gradxform._server.records import ServerStats as ServerStats
else:  # Type checkers would take `__getattr__` to have every name.
    _LATER = {
        "contrib": "contrib",
        "engines": "engines",
        "ParameterServer": "_ray.parameter_server",
        "PushResult": "_server.records",
        "ServerClosedError": "_server.records",
        "ServerStats": "_server.records",
    }
    __all__ = [n for n in sorted({*globals(), *_LATER}) if n[0] != "_"]

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _importlib.import_module(f"gradxform.{_LATER[name]}")
        return module if name == _LATER[name] else getattr(module, name)

    def __dir__() -> list[str]:
        return __all__
