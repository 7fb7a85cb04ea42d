"""Makes anyprecision.json: traces of torchdistx's AnyPrecisionAdamW.

With Python 3.11, from the repository's root, with a checkout of torchdistx elsewhere.
One file of it is run, and nothing is built:

    git clone https://github.com/pytorch/torchdistx ../torchdistx  # at 9c1b9f5c
    pip install "torch==2.13.0" "numpy==2.4.6"
    python benchmarks/golden/make_anyprecision.py ../torchdistx
"""

import os
import sys

import _format
import torch

folder = os.path.join("src", "python", "torchdistx", "optimizers")
sys.path.insert(0, os.path.join(sys.argv[1], folder))
from anyprecision_optimizer import AnyPrecisionAdamW  # noqa: E402

START = _format.coarse(11, 1)[0]["w"]
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.99), "eps": 1e-6, "use_kahan_summation": True}
OURS = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.99, "eps": 1e-6, "weight_decay": 0.0}


def run(name, momentum, variance, compensation, weight_decay=0.0, why_not=None):
    """One case: parameters and gradients in bfloat16, state in these dtypes."""
    dtypes = {"momentum_dtype": momentum, "variance_dtype": variance}
    dtypes["compensation_buffer_dtype"] = compensation
    w = torch.nn.Parameter(torch.tensor(START, dtype=torch.bfloat16))
    made = {key: getattr(torch, dtype) for key, dtype in dtypes.items()}
    theirs = AnyPrecisionAdamW([w], weight_decay=weight_decay, **ADAMW, **made)
    events = []
    for each in _format.coarse(12, 60):
        w.grad = torch.tensor(each["w"], dtype=torch.bfloat16)
        theirs.step()
        kept = theirs.state[w]["compensation"].float().numpy().copy()
        event = {"grads": each, "params": {"w": w.detach().float().numpy().copy()}}
        events.append(dict(event, compensation={"w": kept}))
    case = {"name": name, "symbol": "torchdistx.optimizers.AnyPrecisionAdamW"}
    case["settings"] = dict(ADAMW, weight_decay=weight_decay, **dtypes)
    ours = dict(OURS, transformation="optax.adamw")
    case.update(_format.compared(ours, why_not))
    return dict(case, params={"w": START}, events=events)


if __name__ == "__main__":
    lost = "the decay is smaller than half a unit in the last place, and is lost"
    cases = [
        run("float32", "float32", "float32", "float32"),
        run("kahan", "float32", "float32", "bfloat16"),
        run("defaults", "float32", "bfloat16", "bfloat16"),
        run("decay", "float32", "float32", "float32", 0.1, lost),
    ]
    versions = {"torchdistx": "9c1b9f5c", "torch": torch.__version__.partition("+")[0]}
    _format.write(__file__, versions, cases)
