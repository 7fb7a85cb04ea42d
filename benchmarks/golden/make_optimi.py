"""Makes optimi.json: traces of torch-optimi, whose optimizers sum as Kahan did.

With Python 3.11, from the repository's root:

    pip install "torch-optimi==0.3.3" "torch==2.13.0" "numpy==2.4.6" packaging
    python benchmarks/golden/make_optimi.py
"""

import _format
import optimi
import torch

START = _format.coarse(11, 1)[0]["w"]


def run(name, kind, grads, settings, ours, why_not=None):
    """One case: parameters and gradients in bfloat16."""
    w = torch.nn.Parameter(torch.tensor(START, dtype=torch.bfloat16))
    theirs = getattr(optimi, kind)([w], foreach=False, triton=False, **settings)
    events = []
    for each in grads:
        w.grad = torch.tensor(each["w"], dtype=torch.bfloat16)
        theirs.step()
        event = {"grads": each, "params": {"w": w.detach().float().numpy().copy()}}
        if settings["kahan_sum"]:
            kept = theirs.state[w]["kahan_comp"].float().numpy().copy()
            event["compensation"] = {"w": kept}
        events.append(event)
    case = {"name": name, "symbol": "optimi." + kind, "settings": settings}
    case["ours"] = None if why_not else ours
    if why_not:
        case["why_not"] = why_not
    return dict(case, params={"w": START}, events=events)


if __name__ == "__main__":
    fine, coarse = _format.coarse(12, 60), _format.coarse(13, 60, parts=8)

    def sgd(rate):
        return {"transformation": "sgd", "learning_rate": rate}

    kahan = {"kahan_sum": True}
    adamw = {"lr": 3e-4, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0}
    options = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.99, "weight_decay": 0.0}
    adamw_here = dict(options, transformation="optax.adamw", eps=1e-6)
    lost = "the decay is smaller than half a unit in the last place, and is lost"
    cases = [
        run("sgd-exact", "SGD", coarse, dict(kahan, lr=2**-9), sgd(2**-9)),
        run("sgd", "SGD", fine, dict(kahan, lr=1e-3), sgd(1e-3)),
        run("sgd-plain", "SGD", fine, {"kahan_sum": False, "lr": 1e-3}, sgd(1e-3)),
        run("adamw", "AdamW", fine, dict(kahan, **adamw), adamw_here),
        run(
            "adamw-decay",
            "AdamW",
            fine,
            dict(kahan, **dict(adamw, weight_decay=0.1)),
            None,
            lost,
        ),
    ]
    versions = {"torch-optimi": "0.3.3", "torch": torch.__version__.partition("+")[0]}
    _format.write(__file__, versions, cases)
