"""Makes fedasync.json: traces of the FedAsync and FedBuff servers of APPFL.

With Python 3.11, from the repository's root:

    pip install "appfl==1.12.0" "torch==2.13.0"
    python benchmarks/golden/make_fedasync.py
"""

import _format
import appfl
import numpy as np
import torch
from appfl.algorithm.aggregator import FedAsyncAggregator, FedBuffAggregator
from omegaconf import OmegaConf

ORDER = [0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0, 3, 1, 2]
"""The clients that push. Each pulls at the start, and again after each push."""

LEAVES = ("b", "s")
HINGE = {"staleness_fn": "hinge", "staleness_fn_kwargs": {"a": 10, "b": 4}}
POLYNOMIAL = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}


class Model(torch.nn.Module):
    """The parameters alone, in float64."""

    def __init__(self):
        super().__init__()
        for name, value in _format.params(LEAVES).items():
            tensor = torch.tensor(value, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(tensor))


def arrays(state):
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


def run(name, aggregator, settings, weight, why_not=None):
    """One case; a push is a gradient or a local model, as is APPFL's default.

    A buffer of K pushes is an accumulator that adds them.
    """
    configs = OmegaConf.create(dict({"alpha": 0.25}, **settings))
    server = aggregator(Model(), configs)
    for client in range(4):
        start = arrays(server.get_parameters(client))
    kind = "grads" if settings.get("gradient_based") else "local_model"
    events = []
    pushed = _format.gradients("plain", len(ORDER), LEAVES)
    for client, drawn in zip(ORDER, pushed, strict=True):
        values = {leaf: np.float64(value) for leaf, value in drawn.items()}
        local_step = server.client_step[client]
        staleness = server.global_step - local_step
        # A copy: with its defaults the server overwrites what it is given.
        tensors = {leaf: torch.tensor(value) for leaf, value in values.items()}
        before = server.global_step
        after = arrays(server.aggregate(client, tensors))
        event = {"worker": client, "local_step": local_step, "staleness": staleness}
        event.update({kind: values, "global_step": server.global_step})
        if server.global_step > before:
            event["params"] = after
        events.append(event)
    sgd = {"transformation": "sgd", "learning_rate": 0.25}
    ours = {
        "transformation": "drop_stale",
        "max_staleness": np.inf,
        "inner": [{"transformation": "scale_by_staleness", "weight": weight}, sgd],
    }
    if "K" in settings:
        ours = {
            "transformation": "conditional_accumulator",
            "num_required": settings["K"],
            "max_staleness": np.inf,
            "weight": weight,
            "reduction": "sum",
            "inner": sgd,
        }
    symbol = aggregator.__module__ + "." + aggregator.__name__
    case = {"name": name, "symbol": symbol, "settings": OmegaConf.to_object(configs)}
    case.update(dtype="float64", **_format.compared(ours, why_not))
    return dict(case, params=start, events=events)


def cases():
    gradient = {"gradient_based": True}
    mixed = "a local model is mixed in: its gradient is of the server's parameters"
    hinge, polynomial = "1 if s <= 4 else 1 / (10 (s - 4) + 1)", "(s + 1)^-0.5"
    return [
        run("fedasync-constant", FedAsyncAggregator, gradient, "1"),
        run("fedasync-hinge", FedAsyncAggregator, dict(gradient, **HINGE), hinge),
        run(
            "fedasync-polynomial",
            FedAsyncAggregator,
            dict(gradient, **POLYNOMIAL),
            polynomial,
        ),
        run("fedasync-local-model", FedAsyncAggregator, POLYNOMIAL, polynomial, mixed),
        run(
            "fedbuff-polynomial",
            FedBuffAggregator,
            dict(gradient, K=3, **POLYNOMIAL),
            polynomial,
        ),
        run(
            "fedbuff-local-model",
            FedBuffAggregator,
            dict(K=3, **POLYNOMIAL),
            polynomial,
            mixed,
        ),
    ]


if __name__ == "__main__":
    versions = {
        "appfl": appfl.__version__,
        "torch": torch.__version__.partition("+")[0],
    }
    _format.write(__file__, versions, cases())
