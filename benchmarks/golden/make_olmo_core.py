"""Makes olmo_core.json: traces of OLMo-core's AdamW that skips steps.

With Python 3.13, from the repository's root:

    pip install "ai2-olmo-core==3.0.0" "torch==2.13.0" "numpy==2.5.5"
    python benchmarks/golden/make_olmo_core.py
"""

import _format
import numpy as np
import torch
from olmo_core.optim import SkipStepAdamW

ADAMW = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
OURS = {"learning_rate": 0.1, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.01}


def run(name, pairs, window, sigmas, why_not=None):
    """One case. Its trainer sets both numbers before each step."""
    start = np.float32([0.5, -0.25, 1.0])
    w = torch.nn.Parameter(torch.tensor(start))
    settings = {"rolling_interval_length": window, "sigma_factor": sigmas, **ADAMW}
    theirs = SkipStepAdamW([w], **settings)
    events = []
    for grads, loss in pairs:
        w.grad = torch.tensor(grads["w"])
        theirs.latest_loss = torch.tensor(np.float32(loss))
        theirs.latest_grad_norm = torch.linalg.vector_norm(w.grad)
        theirs.step()
        event = {"grads": grads, "value": np.float64(np.float32(loss))}
        event["applied"] = not float(theirs.step_skipped)
        events.append(dict(event, params={"w": w.detach().numpy().copy()}))
    case = {"name": name, "symbol": "olmo_core.optim.SkipStepAdamW"}
    ours = {"transformation": "skip_spikes", "window": window, "sigmas": sigmas}
    ours["warmup"] = max(2, window // 2) - 1
    ours["inner"] = dict(OURS, transformation="optax.adamw")
    case.update(settings=settings, **_format.compared(ours, why_not))
    return dict(case, params={"w": start}, events=events)


if __name__ == "__main__":
    nan = "ours skips the push and lets NaN into no history"
    cases = [
        run("six-sigmas", _format.spiky(1, 120), 32, 6),
        run("two-sigmas", _format.spiky(2, 120), 16, 2),
        run("short-window", _format.spiky(4, 60), 6, 3),
        run("two-numbers", _format.spiky(3, 12), 4, 6, "ours needs two numbers before"),
        run("nan-loss", _format.spoiled(12, "loss"), 8, 6, nan),
        run("nan-gradient", _format.spoiled(12, "grads"), 8, 6, nan),
    ]
    versions = {"ai2-olmo-core": "3.0.0", "torch": torch.__version__.partition("+")[0]}
    _format.write(__file__, versions, cases)
