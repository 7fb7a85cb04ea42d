"""Makes heloco.json: traces of the outer optimizers of HeLoCo's authors.

With Python 3.11, from the repository's root, with the authors' notebook saved
elsewhere. Two of its classes are read and run, and nothing else in it:

    git clone https://github.com/aaasif-isu/panofabric-engine \\
        ../panofabric-engine  # at 0953c64d
    pip install "torch==2.13.0" "numpy==2.4.6"
    python benchmarks/golden/make_heloco.py ../panofabric-engine/heloco_stable_v2.ipynb
"""

import ast
import json
import sys

import _format
import numpy as np
import torch

STEPS = 50

# Near the thresholds: 0 and 0.2, the defaults, and those of the other cases below.
COSINES = (
    *(1.0, 0.9, 0.5, 0.21, 0.2001, 0.1999, 0.15, 0.1, 0.05, 0.0001),
    *(-0.0001, -0.05, -0.1, -0.21, -0.5, -0.9, -1.0, 0.3001, 0.2999, 0.02),
)
LENGTHS = (0.97, 0.053, 3.1, 0.47, 5.3, 0.0013, 1.9)

OTHERS = {
    "k_dir": 3.0,
    "cos_ok": 0.3,
    "cos_bad": -0.5,
    "conf_c": 0.5,
    "k_shrink": 2.0,
    "beta_max": 0.75,
    "eps": 0.01,
}
NAMES = {
    "cos_ok": "aligned",
    "cos_bad": "opposed",
    "conf_c": "confidence",
    "k_dir": "rotation",
    "k_shrink": "shrinkage",
    "beta_max": "max_shrinkage",
    "eps": "eps",
}
"""The authors' arguments, and what gradxform's MomentumAlignment calls them."""


def load(notebook):
    """The two classes in the notebook; no other line of it is run."""
    with open(notebook) as file:
        cells = json.load(file)["cells"]
    found = {"torch": torch, "np": np, "Optimizer": torch.optim.Optimizer}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "(Optimizer)" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                exec(ast.unparse(node), found)
    return found["MomentumLookAhead"], found["SmartDCMLA_v2"]


def drawn(rng, momentum, shape, step, leaf):
    """A gradient of a chosen length, at a chosen angle to the momentum."""
    noise = rng.standard_normal(shape)
    if step in (17, 18) and leaf == 0:
        return np.zeros(shape)
    if momentum is not None and np.any(momentum):
        unit = momentum / np.linalg.norm(momentum)
        c = COSINES[(step + 3 * leaf) % len(COSINES)]
        across = noise - np.sum(noise * unit) * unit
        length = np.linalg.norm(across)
        if noise.size > 1:
            noise = c * unit + np.sqrt(1 - c * c) * across / length
        else:
            noise = np.sign(c) * unit
        noise = noise * np.linalg.norm(momentum)
    # float32 holds these, so single precision starts from the same numbers.
    return np.float64(np.float32(noise * LENGTHS[step % len(LENGTHS)]))


def run(name, optimizer, settings, ours):
    """One case, in float64."""
    start = {k: np.float64(v) for k, v in _format.params(("w", "b", "s")).items()}
    tensors = {k: torch.tensor(v, requires_grad=True) for k, v in start.items()}
    theirs = optimizer(list(tensors.values()), **settings)
    slot = "m" if optimizer.__name__ == "MomentumLookAhead" else "momentum_buffer"
    rng = np.random.RandomState(4)
    steps = []
    for step in range(STEPS):
        grads = {}
        for leaf, (key, tensor) in enumerate(tensors.items()):
            held = theirs.state[tensor].get(slot) if step else None
            momentum = None if held is None else held.numpy()
            g = np.asarray(drawn(rng, momentum, start[key].shape, step, leaf))
            grads[key], tensor.grad = g, torch.tensor(g)
        theirs.step()
        slots = {k: theirs.state[t][slot].numpy().copy() for k, t in tensors.items()}
        params = {k: t.detach().numpy().copy() for k, t in tensors.items()}
        slots = {"momentum_buffer": slots}
        steps.append({"grads": grads, "params": params, "slots": slots})
    return {
        "name": name,
        "symbol": "heloco_stable_v2." + optimizer.__name__,
        "settings": settings,
        "dtype": "float64",
        "ours": ours,
        "params": start,
        "steps": steps,
    }


def case(name, optimizer, **settings):
    """One case; without a dict of corrections it has the authors' defaults."""
    ours = {
        "transformation": "momentum_look_ahead",
        "learning_rate": settings["lr"],
        "b1": settings["momentum"],
    }
    if optimizer.__name__ == "SmartDCMLA_v2":
        defaults = optimizer([torch.zeros(1)]).defaults
        ours["alignment"] = {
            NAMES[key]: settings.get(key, defaults[key]) for key in NAMES
        }
    return run(name, optimizer, settings, ours)


if __name__ == "__main__":
    plain, aligned = load(sys.argv[1])
    cases = [
        case("look-ahead", plain, lr=0.1, momentum=0.9),
        case("look-ahead-without-momentum", plain, lr=0.1, momentum=0.0),
        case("alignment", aligned, lr=0.1, momentum=0.9),
        case("alignment-half", aligned, lr=0.7, momentum=0.5),
        case("alignment-other-numbers", aligned, lr=0.1, momentum=0.9, **OTHERS),
    ]
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions["panofabric-engine"] = "0953c64d"
    _format.write(__file__, versions, cases)
