"""Makes tf2_sparse.json: TensorFlow 2.11 on row-sparse gradients, run eagerly.

With Python 3.7, from the repository's root:

    pip install "tensorflow==2.11.0" "tensorflow-addons==0.19.0"
    python benchmarks/golden/make_tf2_sparse.py

The new Adagrad's ``jit_compile`` is left at its default, which is False where there is
no GPU.
"""

import _format
import _sparse
import tensorflow as tf
from make_tf2 import (
    ADAGRADS,
    FTRLS,
    accumulators,
    accumulators_and_linears,
    built,
)


def as_tensor(value):
    if isinstance(value, dict):
        return tf.IndexedSlices(
            tf.constant(value["values"]),
            tf.constant(value["indices"]),
            tf.constant(value["dense_shape"]),
        )
    return tf.constant(value)


def run(opt, sequence, read_slots, schedule=None):
    """Pushes gradients. Where TensorFlow refuses one, the step has its ``error``."""
    initial = _sparse.params(sequence[0])
    params = {name: tf.Variable(value, name=name) for name, value in initial.items()}
    steps = []
    for grads in sequence:
        step = {"grads": grads}
        if schedule is not None:
            step["learning_rate"] = schedule(opt.iterations).numpy()
        try:
            opt.apply_gradients([(as_tensor(grads[k]), params[k]) for k in params])
        except tf.errors.OpError as error:
            step["error"] = _sparse.error_of(error)
        step["iterations"] = opt.iterations.numpy()
        step["params"] = {name: var.numpy() for name, var in params.items()}
        step["slots"] = read_slots(opt, params)
        steps.append(step)
    return steps


def adagrad(which, name, variant, settings, table="w", as_dense=False):
    symbol, make = ADAGRADS[which]
    legacy = which == "legacy-adagrad"
    arguments, schedule = built(settings)
    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(make(**arguments), sequence, accumulators, schedule)
    case = {
        "name": which + "-" + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_adagrad(settings, steps, eps_in_sqrt=not legacy),
    }
    why_not = _sparse.why_not(settings, variant)
    if settings["epsilon"] == 0.0 and legacy:
        case["ours"]["eps"] = 1e-7  # the original takes 0 to mean its default
    if settings["epsilon"] == 0.0 and variant == "zero-rows" and not legacy:
        why_not = "0 / sqrt(0) is NaN there; ours: a zero update"
    if why_not:
        case["ours"] = None
        case["why_not"] = why_not
    return dict(case, params=_sparse.params(sequence[0]), steps=steps)


def ftrl(which, name, variant, settings, table="w", as_dense=False):
    symbol, make = FTRLS[which]
    arguments, schedule = built(settings)
    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(make(**arguments), sequence, accumulators_and_linears, schedule)
    case = {
        "name": which + "-" + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
    }
    why_not = _sparse.why_not(settings, variant)
    if why_not:
        case["ours"] = None
        case["why_not"] = why_not
    elif which == "ftrl" and not as_dense:
        case["ours"]["densify"] = True  # the original makes the gradient dense
    return dict(case, params=_sparse.params(sequence[0]), steps=steps)


def main():
    shared = _sparse.ADAGRAD + _sparse.GLOBAL_CLIPNORM + _sparse.EXTRA
    cases = [adagrad(which, *case) for which in ADAGRADS for case in shared]
    cases += [ftrl("legacy-ftrl", *case) for case in _sparse.KERAS_FTRL]
    dense = ("sorted", "apart", "shrinkage", "repeated-as-dense")
    cases += [ftrl("ftrl", *case) for case in _sparse.FTRL if case[0] in dense]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
