"""Makes tf1_sparse.json: TensorFlow 1.15.5 on row-sparse gradients.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1_sparse.py
"""

import _format
import _sparse
import numpy as np
import tensorflow as tf
from make_tf1 import clip_global, clip_leaf, session, slot_variables


class Input:
    """Placeholders for one leaf's gradient: a tensor or a ``tf.IndexedSlices``."""

    def __init__(self, name, param, sparse):
        shape = param.shape.as_list()
        self.param = param
        if sparse:
            self.gradient = tf.IndexedSlices(
                tf.compat.v1.placeholder(tf.float32, [None, *shape[1:]], "g_" + name),
                tf.compat.v1.placeholder(tf.int64, [None], "i_" + name),
                tf.constant(shape, tf.int64),
            )
        else:
            self.gradient = tf.compat.v1.placeholder(tf.float32, shape, "g_" + name)

    def loss(self):
        """A loss whose gradient is exactly what is fed."""
        if isinstance(self.gradient, tf.IndexedSlices):
            looked_up = tf.gather(self.param, self.gradient.indices)
            return tf.reduce_sum(looked_up * self.gradient.values)
        return tf.reduce_sum(self.param * self.gradient)

    def feed(self, value):
        if isinstance(value, dict):
            grad = self.gradient
            return {grad.indices: value["indices"], grad.values: value["values"]}
        return {self.gradient: value}


def feed(inputs, grads):
    fed = {}
    for name, value in grads.items():
        fed.update(inputs[name].feed(value))
    return fed


def run(make, sequence, through="apply_gradients", use_resource=True):
    """Pushes gradients. Where TensorFlow refuses one, the step has its ``error``."""
    steps = []
    with tf.Graph().as_default(), session() as sess:
        params = {
            name: tf.Variable(value, name=name, use_resource=use_resource)
            for name, value in _sparse.params(sequence[0]).items()
        }
        inputs = {
            name: Input(name, params[name], isinstance(grad, dict))
            for name, grad in sequence[0].items()
        }
        opt = make()
        if through == "minimize":
            train = opt.minimize(
                lambda: tf.add_n([it.loss() for it in inputs.values()]),
                list(params.values()),
            )
        else:
            train = opt.apply_gradients(
                [(it.gradient, it.param) for it in inputs.values()]
            )
        slots = slot_variables(opt, params)
        keras = isinstance(opt, tf.keras.optimizers.Optimizer)
        rate = opt._decayed_lr(tf.float32) if keras else None
        sess.run(tf.compat.v1.global_variables_initializer())
        for grads in sequence:
            step = {"grads": grads}
            if keras:
                step["learning_rate"] = sess.run(rate)
            try:
                sess.run(train, feed(inputs, grads))
            except tf.errors.OpError as error:
                step["error"] = _sparse.error_of(error)
            if keras:
                step["iterations"] = sess.run(opt.iterations)
            step["params"] = sess.run(params)
            step["slots"] = sess.run(slots)
            steps.append(step)
    return steps


# --- Adagrad -------------------------------------------------------------------------


def keras(name, variant, settings, table="w", as_dense=False):
    def make():
        arguments = _format.build(settings, tf.keras.optimizers.schedules)
        return tf.keras.optimizers.Adagrad(**arguments)

    # minimize clips, but there the lookup would refuse the row first.
    through = "apply_gradients" if variant == "out-of-range" else "minimize"
    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(make, sequence, through)
    case = {
        "name": "keras-adagrad-" + name,
        "symbol": "tf.keras.optimizers.Adagrad",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_adagrad(settings, steps, eps_in_sqrt=False),
    }
    if settings["epsilon"] == 0.0:
        case["ours"]["eps"] = 1e-7  # the original takes 0 to mean its default
    return finished(case, sequence, steps)


def plain(name, variant, table="w", as_dense=False, use_resource=True, **changed):
    settings = {"learning_rate": 0.1, "initial_accumulator_value": 0.1}
    settings.update(changed)

    def make():
        return tf.compat.v1.train.AdagradOptimizer(**settings)

    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(make, sequence, use_resource=use_resource)
    case = {
        "name": "adagrad-optimizer-" + name,
        "symbol": "tf.train.AdagradOptimizer",
        "settings": settings,
        "variant": variant,
        "ours": dict(settings, transformation="adagrad", eps=0.0),
    }
    return finished(case, sequence, steps)


def ftrl(symbol, name, variant, settings, table="w", as_dense=False):
    """Of ``tf.train`` if the symbol says so, otherwise of ``tf.keras``."""
    of_keras = symbol.startswith("tf.keras")

    def make():
        arguments = _format.build(settings, tf.keras.optimizers.schedules)
        if of_keras:
            return tf.keras.optimizers.Ftrl(**arguments)
        return tf.compat.v1.train.FtrlOptimizer(**arguments)

    sequence = _sparse.gradients(variant, table, as_dense)
    steps = run(make, sequence, "minimize" if of_keras else "apply_gradients")
    case = {
        "name": ("keras-ftrl-" if of_keras else "ftrl-optimizer-") + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
    }
    return finished(case, sequence, steps)


def proximal_adagrad(variant):
    settings = dict(_sparse.PROXIMAL_ADAGRAD)
    sequence = _sparse.gradients(variant)
    make = tf.compat.v1.train.ProximalAdagradOptimizer
    steps = run(lambda: make(**settings), sequence)
    case = {
        "name": "proximal-adagrad-optimizer-" + variant,
        "symbol": "tf.train.ProximalAdagradOptimizer",
        "settings": settings,
        "variant": variant,
        "ours": dict(settings, transformation="proximal_adagrad"),
    }
    return finished(case, sequence, steps)


def finished(case, sequence, steps):
    why_not = _sparse.why_not(case["settings"], case["variant"])
    if why_not:
        case["ours"] = None
        case["why_not"] = why_not
    return dict(case, params=_sparse.params(sequence[0]), steps=steps)


def adagrad():
    variants = ("sorted", "unsorted", "repeated", "cancelling", "zero-rows", "apart")
    cases = [plain(variant, variant) for variant in (*variants, "no-rows")]
    cases += [
        plain(
            "scales",
            "repeated-scales",
            learning_rate=0.5,
            initial_accumulator_value=1e-3,
        ),
        plain("rank-1", "repeated", "v"),
        plain("rank-3", "low", "t"),
        plain("repeated-as-dense", "repeated", as_dense=True),
        plain("repeated-ref-variable", "repeated", use_resource=False),
        plain("out-of-range", "out-of-range"),
    ]
    return cases + [keras(*case) for case in _sparse.ADAGRAD + _sparse.EXTRA]


# --- Clipping ------------------------------------------------------------------------


def clipping():
    shape = _sparse.SHAPES["w"]
    some = _sparse.gradients("sorted")[0]
    given = some["w"]["values"]

    def with_w(values, *indices):
        values = np.float32(values).reshape(-1, 3)
        return dict(some, w=_sparse.rows(indices, values, shape))

    unsorted = _sparse.gradients("unsorted")[0]
    repeated = _sparse.gradients("repeated")[0]
    cancelling = _sparse.gradients("cancelling")[0]
    zero_rows = with_w(given * [[0], [1], [0]], 0, 2, 5)
    only_zero_rows = with_w(0 * given, 0, 2, 5)
    no_rows = with_w([])
    zeros = dict(only_zero_rows, b=0 * some["b"])
    with_inf = with_w([*given[:2], [1.0, np.inf, -2.0]], 0, 2, 5)
    with_none = {"w": some["w"], "b": None, "s": np.float32(0.5)}
    one_by_one = "each repeated row is counted alone there; ours sums them first"
    named_alone = (
        "NaN in the rows that were given alone there; the dense gradient they stand "
        "for becomes NaN everywhere"
    )
    return [
        clip_global("sparse-inside", some, 4.0),
        clip_global("sparse-inside-41", some, 41.0),
        clip_global("sparse-outside", some, 0.5),
        clip_global("sparse-unsorted", unsorted, 0.5),
        clip_global("sparse-zero-rows", zero_rows, 0.5),
        clip_global("sparse-only-zero-rows", only_zero_rows, 0.5),
        clip_global("sparse-only-zero-rows-inside", only_zero_rows, 4.0),
        clip_global("sparse-no-rows", no_rows, 0.5),
        clip_global("sparse-zeros", zeros, 0.5),
        clip_global("sparse-none", with_none, 0.5),
        clip_global("sparse-none-inside", with_none, 4.0),
        clip_global("sparse-alone", {"w": some["w"]}, 0.5),
        clip_global("sparse-limit-0", some, 0.0),
        clip_global("sparse-use-norm", some, 0.5, use_norm=1.0),
        clip_global("sparse-inf", with_inf, 1.0, named_alone),
        clip_global("sparse-use-norm-nan", some, 0.5, named_alone, use_norm=np.nan),
        clip_global("sparse-repeated-rows", repeated, 0.5, one_by_one),
        clip_global("sparse-repeated-rows-inside", repeated, 4.0, one_by_one),
        clip_global("sparse-cancelling-rows", cancelling, 0.5, one_by_one),
        clip_leaf("sparse-inside", some, 4.0),
        clip_leaf("sparse-outside", some, 0.25),
        clip_leaf("sparse-unsorted", unsorted, 0.25),
        clip_leaf("sparse-zero-rows", zero_rows, 0.25),
        clip_leaf("sparse-only-zero-rows", only_zero_rows, 0.25),
        clip_leaf("sparse-no-rows", no_rows, 0.25),
        clip_leaf("sparse-limit-0", some, 0.0),
        clip_leaf(
            "sparse-inf",
            with_inf,
            1.0,
            "NaN for the inf and 0 for its leaf's rest there; ours: NaN for all of it",
        ),
        clip_leaf("sparse-repeated-rows", repeated, 0.25, one_by_one),
        clip_leaf("sparse-cancelling-rows", cancelling, 0.25, one_by_one),
    ]


def main():
    cases = adagrad() + clipping()
    variants = ("sorted", "repeated", "zero-rows", "no-rows")
    cases += [proximal_adagrad(variant) for variant in variants]
    cases += [ftrl("tf.train.FtrlOptimizer", *case) for case in _sparse.FTRL]
    cases += [ftrl("tf.keras.optimizers.Ftrl", *case) for case in _sparse.KERAS_FTRL]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
