"""Makes tf2_lazy.json: TensorFlow Addons' LazyAdam on row-sparse gradients, eager.

With Python 3.7, from the repository's root:

    pip install "tensorflow==2.11.0" "tensorflow-addons==0.19.0"
    python benchmarks/golden/make_tf2_lazy.py

Its slots ``m`` and ``v`` have PyTorch's names here, ``exp_avg`` and ``exp_avg_sq``.
"""

import _format
import _sparse
import tensorflow as tf
import tensorflow_addons as tfa
from make_tf2 import built
from make_tf2_sparse import as_tensor

SLOTS = {"exp_avg": "m", "exp_avg_sq": "v"}


def run(opt, sequence, schedule):
    initial = _sparse.params(sequence[0])
    params = {name: tf.Variable(value, name=name) for name, value in initial.items()}
    steps = []
    for grads in sequence:
        step = {"grads": grads}
        if schedule is not None:
            step["learning_rate"] = schedule(opt.iterations).numpy()
        opt.apply_gradients([(as_tensor(grads[k]), params[k]) for k in params])
        step["iterations"] = opt.iterations.numpy()
        step["params"] = {name: var.numpy() for name, var in params.items()}
        step["slots"] = {
            name: {k: opt.get_slot(var, slot).numpy() for k, var in params.items()}
            for name, slot in SLOTS.items()
        }
        steps.append(step)
    return steps


def lazy_adam(name, variant, settings, table="w", as_dense=False):
    arguments, schedule = built(settings)
    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(tfa.optimizers.LazyAdam(**arguments), sequence, schedule)
    return {
        "name": "lazy-adam-" + name,
        "symbol": "tfa.optimizers.LazyAdam",
        "settings": settings,
        "variant": variant,
        **_sparse.ours_lazy_adam(
            _format.rates(settings, steps),
            settings["beta_1"],
            settings["beta_2"],
            settings["epsilon"],
        ),
        "params": _sparse.params(sequence[0]),
        "steps": steps,
    }


def main():
    cases = []
    for name, variant, (rate, b1, b2, epsilon), *more in _sparse.LAZY_ADAM:
        settings = {"learning_rate": rate, "beta_1": b1, "beta_2": b2}
        settings["epsilon"] = epsilon
        cases.append(lazy_adam(name, variant, settings, *more))
    decay = dict(settings, learning_rate=_format.EXPONENTIAL)
    cases.append(lazy_adam("exponential-decay", "repeated", decay))
    _format.write(
        __file__, {"tensorflow": tf.__version__, "tfa": tfa.__version__}, cases
    )


if __name__ == "__main__":
    main()
