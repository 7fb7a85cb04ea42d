"""Makes openseq2seq.json: traces of OpenSeq2Seq's NovoGrad in TensorFlow 1, as it runs.

With Python 3.7, from the repository's root, and OpenSeq2Seq checked out elsewhere:

    git clone https://github.com/NVIDIA/OpenSeq2Seq ../OpenSeq2Seq  # at 8681d381
    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_openseq2seq.py ../OpenSeq2Seq
"""

import importlib.util
import os
import sys

import _format
import tensorflow as tf
from make_tf1 import STEPS, feed, placeholders, session, slot_variables, variables

NOVOGRAD = {
    "learning_rate": 0.1,
    "beta1": 0.95,
    "beta2": 0.98,
    "epsilon": 1e-8,
    "weight_decay": 0.0,
    "grad_averaging": False,
}


def load(checkout):
    """The class alone: its package imports all that speech models need."""
    path = os.path.join(checkout, "open_seq2seq", "optimizers", "novograd.py")
    spec = importlib.util.spec_from_file_location("novograd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NovoGrad


def novograd(make, name, variant, **changed):
    settings = dict(NOVOGRAD, **changed)
    steps = []
    with tf.Graph().as_default(), session() as sess:
        params = variables(tuple(_format.SHAPES), use_resource=False)
        grads = placeholders(tuple(_format.SHAPES))
        opt = make(**settings)
        train = opt.apply_gradients([(grads[key], params[key]) for key in params])
        slots = slot_variables(opt, params)
        with tf.compat.v1.variable_scope("", reuse=True):
            ema = {
                key: tf.compat.v1.get_variable("nvgrad2_ema" + str(i), [])
                for i, key in enumerate(params)
            }
        sess.run(tf.compat.v1.global_variables_initializer())
        for values in _format.gradients(variant, STEPS):
            sess.run(train, feed(grads, values))
            steps.append(
                {
                    "grads": values,
                    "nvgrad2_ema": sess.run(ema),
                    "params": sess.run(params),
                    "slots": sess.run(slots),
                }
            )
    return {
        "name": "novograd-" + name,
        "symbol": "open_seq2seq.optimizers.novograd.NovoGrad",
        "settings": settings,
        "variant": variant,
        "note": "its moving average is never stored: ours with b2=0",
        "ours": {
            "transformation": "novograd",
            "learning_rate": settings["learning_rate"],
            "b1": settings["beta1"],
            "b2": 0.0,
            "eps": settings["epsilon"],
            "weight_decay": settings["weight_decay"],
            "grad_averaging": settings["grad_averaging"],
        },
        "params": _format.params(),
        "steps": steps,
    }


def main():
    make = load(sys.argv[1])
    cases = [
        novograd(make, "plain", "plain"),
        novograd(make, "other-beta2", "plain", beta2=0.5),
        novograd(make, "scales", "scales"),
        novograd(make, "zero-start", "zero-start"),
        novograd(make, "large-epsilon", "scales", epsilon=1e-2),
        novograd(make, "weight-decay", "plain", weight_decay=0.1),
        novograd(make, "grad-averaging", "plain", grad_averaging=True),
    ]
    versions = {"tensorflow": tf.__version__, "OpenSeq2Seq": "8681d381"}
    _format.write(__file__, versions, cases)


if __name__ == "__main__":
    main()
