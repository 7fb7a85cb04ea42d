"""Makes the traces of Keras before its OptimizerV2: Adagrad, run the same way.

Standalone Keras 2 and the ``tf.keras`` of TensorFlow 1.12 and 1.13, in graph mode on
TensorFlow. Runs on Python 3.6 and later, with the packages that README.md names for
each file. From the repository's root:

    python benchmarks/golden/make_keras2.py keras2_2
"""

import sys

import _format
import tensorflow as tf

# By file: the class, and our argument that means the same as its ``clipnorm``.
MADE = {
    "keras2_2": ("keras.optimizers.Adagrad", "global_clipnorm"),
    "keras2_3": ("keras.optimizers.Adagrad", "global_clipnorm"),
    "tf1_12": ("tf.keras.optimizers.Adagrad", "clipnorm"),
    "tf1_13": ("tf.keras.optimizers.Adagrad", "clipnorm"),
}

STEPS = 6

_RATE = {"lr": 0.1, "epsilon": 1e-7}
CASES = [
    ("defaults", "plain", {}),
    ("plain", "plain", dict(_RATE)),
    ("scales", "scales", dict(_RATE)),
    ("zero-start", "zero-start", dict(_RATE)),
    ("large-epsilon", "scales", dict(_RATE, lr=0.5, epsilon=1e-3)),
    ("zero-epsilon", "zero-start", dict(_RATE, epsilon=0.0)),
    ("clipnorm", "scales", dict(_RATE, clipnorm=1.0)),
    ("clipnorm-0", "scales", dict(_RATE, clipnorm=0.0)),
    ("clipvalue", "scales", dict(_RATE, clipvalue=0.5)),
    ("two-clips", "scales", dict(_RATE, clipnorm=1.0, clipvalue=0.25)),
]
"""What every one of them is run with: (name, variant, its arguments).

Not with ``decay``: whether a rate is that of the count before the step or after it is a
race there, and no two runs need agree.
"""


def adagrad(keras, symbol, clipnorm, name, variant, settings):
    backend = keras.backend
    with tf.Graph().as_default():
        config = tf.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
        )
        with tf.Session(config=config) as session:
            backend.set_session(session)
            params = {
                key: backend.variable(value, name=key)
                for key, value in _format.params().items()
            }
            grads = {
                key: tf.placeholder(tf.float32, _format.SHAPES[key], "g_" + key)
                for key in params
            }
            # A loss whose gradient is exactly what is fed.
            loss = tf.add_n([tf.reduce_sum(params[key] * grads[key]) for key in params])
            opt = keras.optimizers.Adagrad(**settings)
            updates = opt.get_updates(loss, list(params.values()))
            train = backend.function(list(grads.values()), [loss], updates)
            steps = [
                step(backend, opt, train, params, values)
                for values in _format.gradients(variant, STEPS)
            ]
    case = {
        "name": "adagrad-" + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": ours(settings, clipnorm),
    }
    if settings.get("epsilon") == 0.0:
        case["ours"] = None
        case["why_not"] = "0 / sqrt(0) is NaN there; ours: a zero update"
    if settings.get("clipnorm") == 0.0 and clipnorm == "global_clipnorm":
        case["note"] = "0 means no clipping there: none in ours"
        case["ours"].pop(clipnorm)
    if "clipnorm" in settings and "clipvalue" in settings:
        case["ours"] = None
        case["why_not"] = "clips by norm, then by value there; ours: ValueError"
    return dict(case, params=_format.params(), steps=steps)


def step(backend, opt, train, params, values):
    train([values[key] for key in params])
    # Sums of squares in the order of the parameters, behind the count in Keras 2.3.
    sums = opt.weights[-len(params) :]
    return {
        "grads": values,
        "iterations": backend.get_value(opt.iterations),
        "params": {key: backend.get_value(var) for key, var in params.items()},
        "slots": {
            "accumulator": {
                key: backend.get_value(sums[i]) for i, key in enumerate(params)
            }
        },
    }


def ours(settings, clipnorm):
    """gradxform's arguments for it."""
    made = {
        "transformation": "adagrad",
        "learning_rate": settings.get("lr", 0.01),
        "initial_accumulator_value": 0.0,
        "eps": settings.get("epsilon", 1e-7),
        "eps_in_sqrt": False,
    }
    if "clipnorm" in settings:
        made[clipnorm] = settings["clipnorm"]
    if "clipvalue" in settings:
        made["clipvalue"] = settings["clipvalue"]
    return made


def main(name):
    symbol, clipnorm = MADE[name]
    versions = {"tensorflow": tf.__version__}
    if symbol.startswith("tf."):
        keras = tf.keras
    else:
        import keras

        versions["keras"] = keras.__version__
    cases = [adagrad(keras, symbol, clipnorm, *case) for case in CASES]
    _format.write("make_" + name + ".py", versions, cases)


if __name__ == "__main__":
    main(sys.argv[1])
