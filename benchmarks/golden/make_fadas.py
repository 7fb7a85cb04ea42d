"""Makes fadas.json: traces of the server in the code of FADAS's authors.

With Python 3.11, from the repository's root, at commit 8c4df236:

    pip install "torch==2.13.0" "numpy==2.4.6"
    git clone https://github.com/yujiaw98/FADAS ../FADAS
    python benchmarks/golden/make_fadas.py ../FADAS
"""

import sys
import types

import _format
import numpy as np
import torch

ORDER = [0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 0, 3, 1, 2, 0, 0, 1, 0]
"""The clients that push. Each pulls at the start, and again after each push."""

LEAVES = ("b", "s")
BUFFER = 3
ARGS = {"lr": 0.125, "beta1": 0.9, "beta2": 0.99, "eps": 1e-12, "optimizer": "fedams"}


def run(name, threshold=None, why_not=None):
    """One case, with the rate for late clients if there is a threshold."""
    start = _format.params(LEAVES)
    model = torch.nn.Module()
    for leaf, value in start.items():
        tensor = torch.tensor(value, dtype=torch.float64)
        model.register_parameter(leaf, torch.nn.Parameter(tensor))
    zeros = [[torch.zeros_like(p.data) for p in model.parameters()] for _ in range(4)]
    args = types.SimpleNamespace(**ARGS)
    seen, step, held, events = [0] * 4, 0, [], []
    # The first gradients are large: v falls after them, and its maximum does not.
    pushed = _format.gradients("plain", len(ORDER), LEAVES)
    for number, (client, drawn) in enumerate(zip(ORDER, pushed, strict=True)):
        factor = 1.0 if number < 6 else 0.125
        grads = {leaf: np.float64(value) * factor for leaf, value in drawn.items()}
        staleness = step - seen[client]
        event = {"worker": client, "local_step": seen[client], "staleness": staleness}
        event["grads"] = grads
        # A client sends how far it has come, which is minus a gradient.
        held.append(([torch.tensor(-g) for g in grads.values()], staleness))
        if len(held) == BUFFER:
            deltas, delay = zip(*held, strict=True)
            late = threshold is not None and max(delay) > threshold
            before = [p.data.detach().clone() for p in model.parameters()]
            update_model_inplace(
                model,
                before,
                average_parameter(deltas),
                args,
                step,
                *zeros,
                1 / max(delay) if late else 1,  # As in g_delay_adaptive.py.
            )
            held, step = [], step + 1
            event["params"] = {
                leaf: p.detach().numpy().copy() for leaf, p in model.named_parameters()
            }
        event["global_step"] = step
        seen[client] = step
        events.append(event)
    ours = {
        "transformation": "conditional_accumulator",
        "num_required": BUFFER,
        "max_staleness": np.inf,
        "inner": "fadas",
    }
    case = {"name": name, "symbol": "update.update_model_inplace"}
    case["settings"] = dict(ARGS, update_freq=BUFFER, tauc=threshold)
    case.update(dtype="float64", **_format.compared(ours, why_not))
    return dict(case, params=start, events=events)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    # Their module imports it, for pictures alone.
    pictures = types.ModuleType("torchvision")
    pictures.datasets = pictures.transforms = None
    sys.modules["torchvision"] = pictures
    from update import update_model_inplace
    from utils import average_parameter

    versions = {"fadas": "8c4df236", "torch": torch.__version__.partition("+")[0]}
    why_not = "the rate follows the largest staleness in the buffer, which no state has"
    cases = [run("fadas"), run("fadas-delay-adaptive", 1, why_not)]
    _format.write(__file__, versions, cases)
