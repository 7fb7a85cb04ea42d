"""Makes tf1_optimizers.json: the optimizers of TensorFlow 1.15.5 that optax has.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_optimizers.py
"""

import _format
import tensorflow as tf
from make_tf1 import plain

RATE = {"learning_rate": 0.1}
DECAY = dict(RATE, weight_decay=0.01)
CENTERED = {"momentum": 0.5, "centered": True}

# Of each its settings, and optax's name and arguments for it, or why there are none.
CASES = {
    "train.AdadeltaOptimizer": (RATE, "adadelta", {"rho": 0.95, "eps": 1e-8}),
    "train.AdamOptimizer": (RATE, "adam", {}),
    "train.GradientDescentOptimizer": (RATE, "sgd", {}),
    "train.MomentumOptimizer": (dict(RATE, momentum=0.9), "sgd", {"momentum": 0.9}),
    "train.RMSPropOptimizer": (
        dict(RATE, **CENTERED),
        "rmsprop",
        dict(CENTERED, eps=1e-10, initial_scale=1.0),
    ),
    "contrib.opt.AdaMaxOptimizer": (RATE, "adamax", {}),
    "contrib.opt.AdamWOptimizer": (DECAY, "adamw", {"weight_decay": 0.1}),
    "contrib.opt.MomentumWOptimizer": (
        dict(DECAY, momentum=0.9),
        "a chain: see the page of TensorFlow",
        None,
    ),
    "contrib.opt.NadamOptimizer": (RATE, "corrects the bias otherwise", None),
    "contrib.opt.LARSOptimizer": (
        DECAY,
        "the factor of a layer stands behind the momentum there, before it in optax",
        None,
    ),
}


def case(symbol, settings, name_or_reason, arguments):
    module, _, name = symbol.rpartition(".")
    make = getattr({"train": tf.compat.v1.train}.get(module) or tf.contrib.opt, name)
    made = {
        "name": name,
        "symbol": "tf." + symbol,
        "settings": settings,
        "variant": "plain",
        "ours": None,
        "params": _format.params(),
        "steps": plain(make, "plain", settings),
    }
    for step in made["steps"]:
        del step["slots"]  # Their names and forms differ too much.
    if arguments is None:
        made["why_not"] = name_or_reason
    else:
        transformation = "optax." + name_or_reason
        made["ours"] = dict(RATE, transformation=transformation, **arguments)
    return made


def main():
    cases = [case(symbol, *rest) for symbol, rest in CASES.items()]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
