"""Makes monai.json: traces of MONAI's Novograd on PyTorch.

With Python 3.11, from the repository's root:

    pip install "torch==2.13.0" "monai==1.6.1"
    python benchmarks/golden/make_monai.py
"""

import _format
import monai
import torch
from monai.optimizers import Novograd

STEPS = 6
NOVOGRAD = {
    "lr": 0.1,
    "betas": [0.95, 0.98],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_averaging": False,
    "amsgrad": False,
}


def novograd(name, variant, gamma=None, why_not=None, **changed):
    """One case; ``gamma`` multiplies the learning rate after each step."""
    settings = dict(NOVOGRAD, **changed)
    params = {
        key: torch.nn.Parameter(torch.tensor(value))
        for key, value in _format.params().items()
    }
    opt = Novograd(params.values(), **dict(settings, betas=tuple(settings["betas"])))
    steps = []
    for values in _format.gradients(variant, STEPS):
        for key, param in params.items():
            param.grad = torch.tensor(values[key])
        step = {"grads": values, "learning_rate": opt.param_groups[0]["lr"]}
        opt.step()
        step["params"] = {
            key: param.detach().numpy().copy() for key, param in params.items()
        }
        step["slots"] = {
            slot: {
                key: opt.state[param][slot].numpy().copy()
                for key, param in params.items()
            }
            for slot in ("exp_avg", "exp_avg_sq")
        }
        if gamma is not None:
            opt.param_groups[0]["lr"] *= gamma
        steps.append(step)
    ours = {
        "transformation": "novograd",
        "learning_rate": settings["lr"],
        "b1": settings["betas"][0],
        "b2": settings["betas"][1],
        "eps": settings["eps"],
        "weight_decay": settings["weight_decay"],
        "grad_averaging": settings["grad_averaging"],
        "eps_in_sqrt": False,
    }
    case = {
        "name": "novograd-" + name,
        "symbol": "monai.optimizers.Novograd",
        "settings": settings,
        "variant": variant,
        "ours": None if why_not else ours,
    }
    if gamma is not None:
        ours["learning_rate"] = [step["learning_rate"] for step in steps]
        case["note"] = f"the learning rate is multiplied by {gamma} a step"
    if why_not:
        case["why_not"] = why_not
    return dict(case, params=_format.params(), steps=steps)


def main():
    torch.set_num_threads(1)
    zero_start = "nu starts at a layer's first gradient that is not 0 there; ours: at 1"
    cases = [
        novograd("plain", "plain"),
        novograd("scales", "scales"),
        novograd("large-epsilon", "scales", eps=1e-3),
        novograd("weight-decay", "plain", weight_decay=0.01),
        novograd("grad-averaging", "plain", grad_averaging=True),
        novograd(
            "grad-averaging-weight-decay",
            "scales",
            grad_averaging=True,
            weight_decay=0.01,
            eps=1e-3,
        ),
        novograd("exponential-decay", "plain", gamma=0.7, lr=0.5),
        novograd("zero-start", "zero-start", why_not=zero_start),
        novograd(
            "zero-start-weight-decay",
            "zero-start",
            why_not=zero_start,
            weight_decay=0.01,
        ),
        novograd(
            "zero-epsilon",
            "zero-start",
            why_not="0 / sqrt(0) is NaN there; ours: a zero update",
            eps=0.0,
        ),
    ]
    _format.write(
        __file__, {"torch": torch.__version__, "monai": monai.__version__}, cases
    )


if __name__ == "__main__":
    main()
