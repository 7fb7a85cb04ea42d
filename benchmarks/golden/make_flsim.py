"""Makes flsim.json: traces of FLSim's aggregators for FedBuff, by FedBuff's authors.

With Python 3.10, from the repository's root:

    pip install "flsim==0.1.0" "torch==2.2.2" "numpy==1.26.4" "hydra-core==1.2.0" \
        "opacus==1.4.0"
    python benchmarks/golden/make_flsim.py
"""

import dataclasses
import types

import _format
import hydra
import numpy as np
import torch
from flsim.optimizers import async_aggregators as aggregators
from flsim.reducers.base_round_reducer import (
    ReductionPrecision,
    ReductionType,
    RoundReducerConfig,
)
from flsim.trainers.async_trainer import AsyncTrainer
from flsim.utils.async_trainer import async_staleness_weights as weights
from hydra.utils import instantiate
from omegaconf import OmegaConf

ORDER = [0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0, 3, 1, 2, 0, 0, 1, 0]
"""The clients that push. Each pulls at the start, and again after each push."""

LEAVES = ("b", "s")
RATE, BUFFER = 0.25, 3
SGD = (
    aggregators.FedAvgWithLRFedBuffAggregatorConfig,
    {"lr": RATE},
    {"transformation": "sgd", "learning_rate": RATE},
)
ADAM = (
    aggregators.FedAdamFedBuffAggregatorConfig,
    {"lr": RATE, "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8},
    {"transformation": "adam", "learning_rate": RATE, "b1": 0.8, "b2": 0.9},
)


class Model(torch.nn.Module):
    """Parameters alone, in float64; FLSim asks for the module by a method."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            tensor = torch.tensor(value, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def fl_get_module(self):
        return self


def arrays(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def made(config, **more):
    """What a config describes, as FLSim's trainer makes it."""
    return instantiate(OmegaConf.structured(config), _recursive_=False, **more)


def run(name, optimizer, reduction, weight, ours, max_staleness=None, why_not=None):
    config, settings, inner = optimizer
    reducer = RoundReducerConfig(
        reduction_type=ReductionType[reduction],
        precision=ReductionPrecision.DOUBLE,  # The sum of the weights, too.
    )
    model = Model(_format.params(LEAVES))
    server = made(
        config(buffer_size=BUFFER, reducer=reducer, **settings), global_model=model
    )
    weigh = made(weight).weight
    bound = float("inf") if max_staleness is None else max_staleness
    trainer = types.SimpleNamespace(cfg=types.SimpleNamespace(max_staleness=bound))
    start, seen, events = arrays(model), [0] * 4, []
    pushed = _format.gradients("plain", len(ORDER), LEAVES)
    for client, drawn in zip(ORDER, pushed, strict=True):
        grads = {leaf: np.float64(value) for leaf, value in drawn.items()}
        server.zero_grad()
        staleness = server.model_staleness(seen[client])
        event = {"worker": client, "local_step": seen[client], "staleness": staleness}
        accepted = AsyncTrainer._can_participate(trainer, staleness)
        stepped = accepted and server.on_client_training_end(
            Model(grads), model, weigh(staleness)
        )
        event.update(grads=grads, accepted=accepted, global_step=server.global_seqnum)
        if stepped:
            event["params"] = arrays(model)
        seen[client] = server.global_seqnum
        events.append(event)
    ours = {
        "transformation": "conditional_accumulator",
        "num_required": BUFFER,
        "max_staleness": bound,
        **ours,
        "inner": inner,
    }
    settings = dict(
        settings,
        buffer_size=BUFFER,
        reduction_type=reduction,
        staleness_weight=dict(dataclasses.asdict(weight)),
        max_staleness=bound,
    )
    symbol = type(server).__module__ + "." + type(server).__name__
    case = {"name": name, "symbol": symbol, "settings": settings, "dtype": "float64"}
    case.update(_format.compared(ours, why_not))
    return dict(case, params=start, events=events)


def cases():
    sum_, mean = {"reduction": "sum"}, {"reduction": "mean"}
    root = weights.PolynomialStalenessWeightConfig(exponent=0.5, avg_staleness=0)
    average = weights.PolynomialStalenessWeightConfig(exponent=0.5)
    cutoff = weights.ThresholdStalenessWeightConfig(
        cutoff=1, value_after_cutoff=0.25, avg_staleness=0
    )
    by_weights = "the sum is divided by the sum of the weights"
    ours = dict(sum_, weight="(s + 1)^-0.5")
    return [
        run("flsim-polynomial", SGD, "WEIGHTED_SUM", root, ours),
        run("flsim-polynomial-adam", ADAM, "WEIGHTED_SUM", root, ours),
        run("flsim-dropped", SGD, "WEIGHTED_SUM", root, ours, max_staleness=1),
        run(
            "flsim-average-staleness",
            SGD,
            "WEIGHTED_SUM",
            average,
            dict(sum_, weight="(2 / (s + 1))^0.5"),
        ),
        run(
            "flsim-cutoff",
            SGD,
            "WEIGHTED_SUM",
            cutoff,
            dict(sum_, weight="1 if s <= 1 else 0.25"),
        ),
        run("flsim-average", SGD, "AVERAGE", root, mean),
        run(
            "flsim-weighted-average",
            SGD,
            "WEIGHTED_AVERAGE",
            root,
            {},
            why_not=by_weights,
        ),
    ]


if __name__ == "__main__":
    versions = {
        "flsim": "0.1.0",
        "torch": torch.__version__.partition("+")[0],
        "hydra": hydra.__version__,
    }
    _format.write(__file__, versions, cases())
