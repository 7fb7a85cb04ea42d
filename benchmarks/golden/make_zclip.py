"""Makes zclip.json: traces of ZClip, the class of its authors.

With Python 3.13, from the repository's root, with a checkout of their code elsewhere:

    git clone https://github.com/bluorion-com/ZClip ../ZClip  # at 584ce4f5
    pip install "torch==2.13.0" "numpy==2.5.5"
    python benchmarks/golden/make_zclip.py ../ZClip
"""

import sys

import _format
import numpy as np
import torch

sys.path.insert(0, sys.argv[1])
from zclip import ZClip


def run(name, pairs, threshold, decay, warmup, scale=1.0, why_not=None):
    """One case: adaptive scaling, without the clip at a fixed norm."""
    settings = {"alpha": decay, "z_thresh": threshold, "warmup_steps": warmup}
    settings["max_grad_norm"] = None
    theirs, model = ZClip(**settings), torch.nn.Linear(3, 1, bias=False)
    events = []
    for grads, _ in pairs:
        g = grads["w"] * np.float32(scale)
        model.weight.grad = torch.tensor(g[None])
        norm = theirs.step(model)
        clipped = {"w": model.weight.grad.numpy()[0].copy()}
        events.append({"grads": {"w": g}, "clipped": clipped, "global_norm": norm})
    case = {"name": name, "symbol": "zclip.ZClip", "settings": settings}
    ours = {"transformation": "clip_by_zscore", "threshold": threshold}
    ours.update(decay=decay, warmup=warmup)
    case["ours"] = None if why_not else ours
    if why_not:
        case["why_not"] = why_not
    return dict(case, events=events)


if __name__ == "__main__":
    nan = _format.spiky(2, 24)
    nan[8] = ({"w": np.float32([np.nan, 1.0, 2.0])}, 0.0)
    why_not = "ours lets NaN into no average"
    cases = [
        run("defaults", _format.spiky(1, 120), 2.5, 0.97, 25),
        run("other-numbers", _format.spiky(2, 120), 1.5, 0.8, 4),
        run("from-the-first", _format.spiky(3, 60), 3.0, 0.9, 1),
        run("small", _format.spiky(4, 120), 2.5, 0.97, 25, scale=1e-5),
        run("nan", nan, 2.5, 0.97, 4, why_not=why_not),
    ]
    versions = {"zclip": "584ce4f5", "torch": torch.__version__.partition("+")[0]}
    _format.write(__file__, versions, cases)
