"""Makes tf1.json: traces of TensorFlow 1.15.5 in graph mode.

With Python 3.7, from the repository's root:

    pip install "tensorflow==1.15.5" "protobuf<3.21" "numpy<1.19"
    python benchmarks/golden/make_tf1.py
"""

import _format
import numpy as np
import tensorflow as tf

STEPS = 6
PUSHED = ("w", "b", "s")


def session():
    return tf.compat.v1.Session(
        config=tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
        )
    )


def variables(leaves, use_resource):
    return {
        name: tf.Variable(value, name=name, use_resource=use_resource)
        for name, value in _format.params(leaves).items()
    }


def placeholders(leaves):
    return {
        name: tf.compat.v1.placeholder(tf.float32, _format.SHAPES[name], "g_" + name)
        for name in leaves
    }


def linear_loss(params, grads):
    """A loss whose gradient at ``params`` is exactly what ``grads`` are fed."""
    return tf.add_n([tf.reduce_sum(params[name] * grads[name]) for name in params])


def feed(grads, values):
    return {grads[name]: values[name] for name in grads}


def slot_variables(opt, params):
    return {
        slot: {name: opt.get_slot(params[name], slot) for name in params}
        for slot in opt.get_slot_names()
    }


# --- DropStaleGradientOptimizer ------------------------------------------------------

INNERS = _format.inners(0.1)
POISONED = 9


def lag(push, staleness, global_step):
    """How far behind the global step the worker of this push is."""
    if push < 5:
        return (0, 0, 0, 0, staleness)[push]
    return {
        5: staleness + 1,  # one over: stale
        6: global_step,  # a local step of 0: very late, stale
        7: -2,  # ahead of the global step
        8: staleness,  # exactly at the threshold: fresh
        POISONED: staleness + 1,  # stale, and its gradients are NaN and inf
        10: 0,
        11: max(0, staleness - 1),
    }[push]


def drop_stale(inner, staleness):
    inner_symbol, inner_settings, inner_ours = INNERS[inner]
    steps = []
    with tf.Graph().as_default(), session() as sess:
        global_step = tf.compat.v1.train.get_or_create_global_step()
        params = variables(PUSHED, use_resource=False)
        grads = placeholders(PUSHED)
        make_inner = getattr(tf.compat.v1.train, inner_symbol.split(".")[-1])
        inner_opt = make_inner(**inner_settings)
        opt = tf.contrib.opt.DropStaleGradientOptimizer(inner_opt, staleness)
        pairs = opt.compute_gradients(linear_loss(params, grads), list(params.values()))
        push = opt.apply_gradients(pairs, global_step=global_step)
        with tf.compat.v1.variable_scope("", reuse=True):
            stale_counter = tf.compat.v1.get_variable("stale_counter", [])
        summary = tf.compat.v1.summary.merge_all()
        slots = slot_variables(inner_opt, params)
        sess.run(tf.compat.v1.global_variables_initializer())
        pushes = _format.gradients("plain", 12, PUSHED)
        pushes[POISONED]["w"] = np.full((4, 3), np.nan, np.float32)
        pushes[POISONED]["b"] = np.full((3,), np.inf, np.float32)
        for number, values in enumerate(pushes):
            before = sess.run(global_step)
            local_step = before - lag(number, staleness, before)
            fed = feed(grads, values)
            # The global step that compute_gradients recorded for this worker.
            fed[opt._local_step] = local_step
            sess.run(push, fed)
            percentage = tf.compat.v1.Summary.FromString(sess.run(summary)).value[0]
            steps.append(
                {
                    "local_step": local_step,
                    "grads": values,
                    "global_step": sess.run(global_step),
                    "stale_counter": sess.run(stale_counter),
                    "stale_percentage": percentage.simple_value,
                    "params": sess.run(params),
                    "slots": sess.run(slots) if slots else {},
                }
            )
    return {
        "name": f"drop-stale-{inner}-staleness-{staleness}",
        "symbol": "tf.contrib.opt.DropStaleGradientOptimizer",
        "settings": {
            "opt": inner_symbol,
            "opt_settings": inner_settings,
            "staleness": staleness,
        },
        "ours": {
            "transformation": "drop_stale",
            "max_staleness": staleness,
            "inner": inner_ours,
        },
        "note": f"push {POISONED}'s gradients are poisoned",
        "variant": "plain",
        "params": _format.params(PUSHED),
        "steps": steps,
    }


# --- Clipping ------------------------------------------------------------------------


def as_tensor(value, dtype):
    if value is None:
        return None
    if isinstance(value, dict) and "fill" in value:
        return tf.fill(value["shape"], tf.constant(value["fill"], dtype))
    if isinstance(value, dict):
        return tf.IndexedSlices(
            tf.constant(value["values"], dtype),
            tf.constant(value["indices"]),
            tf.constant(value["dense_shape"]),
        )
    return tf.constant(value, dtype)


def as_entry(value, clipped):
    """A clipped leaf, written in the same way as the leaf that was given."""
    if isinstance(value, dict) and "fill" in value:
        assert np.all(clipped == clipped[0]) or np.all(np.isnan(clipped))
        return {"shape": value["shape"], "fill": clipped[0]}
    if isinstance(value, dict):
        return dict(value, values=clipped.values)
    return clipped


def one_shot(symbol, name, grads, settings, why_not, dtype, run):
    given = {key: value for key, value in grads.items() if value is not None}
    with tf.Graph().as_default(), session() as sess:
        clipped, norm = run({k: as_tensor(v, dtype) for k, v in grads.items()})
        present = sess.run({key: clipped[key] for key in given})
        step = {
            "grads": grads,
            "clipped": {
                key: as_entry(value, present[key]) if key in given else None
                for key, value in grads.items()
            },
        }
        if norm is not None:
            step["global_norm"] = sess.run(norm)
    ours = {"transformation": symbol[len("tf.") :], "max_norm": settings["clip_norm"]}
    if "use_norm" in settings:
        ours["use_norm"] = settings["use_norm"]
    case = {"name": name, "symbol": symbol, "settings": settings, "dtype": dtype}
    case["ours"] = None if why_not else ours
    if why_not:
        case["why_not"] = why_not
    case["params"] = None
    case["steps"] = [step]
    return case


def clip_global(name, grads, clip_norm, why_not=None, dtype="float32", **settings):
    def run(tensors):
        use_norm = settings.get("use_norm")
        clipped, norm = tf.clip_by_global_norm(
            [tensors[key] for key in tensors],
            tf.constant(clip_norm, dtype),
            None if use_norm is None else tf.constant(use_norm, dtype),
        )
        return {key: clipped[i] for i, key in enumerate(tensors)}, norm

    settings = dict(settings, clip_norm=clip_norm)
    name, symbol = "clip-by-global-norm-" + name, "tf.clip_by_global_norm"
    return one_shot(symbol, name, grads, settings, why_not, dtype, run)


def clip_leaf(name, grads, clip_norm, why_not=None, dtype="float32"):
    def run(tensors):
        limit = tf.constant(clip_norm, dtype)
        return {key: tf.clip_by_norm(t, limit) for key, t in tensors.items()}, None

    settings = {"clip_norm": clip_norm}
    name, symbol = "clip-by-norm-" + name, "tf.clip_by_norm"
    return one_shot(symbol, name, grads, settings, why_not, dtype, run)


def clipping():
    some = _format.gradients("plain", 1, PUSHED)[0]
    zeros = {name: np.zeros_like(value) for name, value in some.items()}
    large = {name: np.float32(1e3) * value for name, value in some.items()}
    with_inf = dict(some, b=np.float32([1.0, np.inf, -2.0]))
    with_nan = dict(some, b=np.float32([1.0, np.nan, -2.0]))
    squares_overflow = dict(some, b=np.float32([1e30, 1.0, -2.0]))
    pythagoras = {"w": np.float32([3.0, 0.0]), "b": np.float32([4.0])}
    repeated = {
        "w": {
            "indices": [0, 2, 0],
            "values": [[3.0, 0.0], [0.0, 4.0], [3.0, 0.0]],
            "dense_shape": [4, 2],
        }
    }
    nan_for_zeros = "NaN there; ours keeps zero gradients zero"
    half_overflow = "the norm overflows float16 there; ours accumulates in float32"
    return [
        clip_global("inside", some, 4.0),
        clip_global("inside-41", some, 41.0),
        clip_global("outside", some, 0.5),
        clip_global("outside-far", large, 1.0),
        clip_global("exactly-on", pythagoras, 5.0),
        clip_global("zeros", zeros, 1.0),
        clip_global("zeros-limit-0", zeros, 0.0, nan_for_zeros),
        clip_global("limit-0", some, 0.0),
        clip_global(
            "limit-negative", some, -1.0, "no clipping there; ours: ValueError"
        ),
        clip_global("inf", with_inf, 1.0),
        clip_global("nan", with_nan, 1.0),
        clip_global("squares-overflow", squares_overflow, 1.0),
        clip_global("none", {"w": some["w"], "b": None, "s": some["s"]}, 0.5),
        clip_global("use-norm-smaller", some, 0.5, use_norm=1.0),
        clip_global("use-norm-larger", some, 0.5, use_norm=20.0),
        clip_global("use-norm-below-limit", some, 0.5, use_norm=0.25),
        clip_global("use-norm-0", some, 0.5, use_norm=0.0),
        clip_global("use-norm-inf", some, 0.5, use_norm=float("inf")),
        clip_global("use-norm-nan", some, 0.5, use_norm=float("nan")),
        clip_global(
            "repeated-rows",
            repeated,
            1.0,
            "each repeated row is counted alone there; ours sums them first",
        ),
        clip_global(
            "float16-norm-70",
            {"w": {"shape": [5000], "fill": 1.0}},
            1.0,
            dtype="float16",
        ),
        clip_global(
            "float16-norm-300",
            {"w": {"shape": [90000], "fill": 1.0}},
            1.0,
            half_overflow,
            dtype="float16",
        ),
        clip_global(
            "float16-one-entry-300", {"w": [300.0]}, 1.0, half_overflow, dtype="float16"
        ),
        clip_leaf("inside", some, 4.0),
        clip_leaf("inside-41", some, 41.0),
        clip_leaf("outside", some, 0.25),
        clip_leaf("outside-far", large, 1.0),
        clip_leaf("exactly-on", {"w": np.float32([3.0, 4.0])}, 5.0),
        clip_leaf("zeros", zeros, 1.0),
        clip_leaf("zeros-limit-0", zeros, 0.0, nan_for_zeros),
        clip_leaf("limit-0", some, 0.0),
        clip_leaf(
            "limit-negative", some, -1.0, "the sign flips there; ours: ValueError"
        ),
        clip_leaf(
            "inf",
            with_inf,
            1.0,
            "NaN for the inf and 0 for its leaf's rest there; ours: NaN for all of it",
        ),
        clip_leaf("nan", with_nan, 1.0),
        clip_leaf(
            "squares-overflow",
            squares_overflow,
            1.0,
            "0 for the leaf whose norm overflows there; ours: NaN",
        ),
    ]


# --- Adagrad and FTRL ----------------------------------------------------------------


def keras(make, variant, settings, through="minimize", schedules=None):
    """The steps of an optimizer of ``tf.keras``."""
    steps = []
    with tf.Graph().as_default(), session() as sess:
        params = variables(tuple(_format.SHAPES), use_resource=True)
        grads = placeholders(tuple(_format.SHAPES))
        opt = make(
            **_format.build(settings, schedules or tf.keras.optimizers.schedules)
        )
        if through == "minimize":
            train = opt.minimize(
                lambda: linear_loss(params, grads), list(params.values())
            )
        else:
            train = opt.apply_gradients([(grads[key], params[key]) for key in params])
        slots = slot_variables(opt, params)
        rate = opt._decayed_lr(tf.float32)
        sess.run(tf.compat.v1.global_variables_initializer())
        for values in _format.gradients(variant, STEPS):
            learning_rate = sess.run(rate)
            sess.run(train, feed(grads, values))
            steps.append(
                {
                    "grads": values,
                    "learning_rate": learning_rate,
                    "iterations": sess.run(opt.iterations),
                    "params": sess.run(params),
                    "slots": sess.run(slots),
                }
            )
    return steps


def adagrad(name, variant, settings, through="minimize", schedules=None):
    make = tf.keras.optimizers.Adagrad
    steps = keras(make, variant, settings, through, schedules)
    ours = _format.ours_adagrad(settings, steps, eps_in_sqrt=False)
    case = {
        "name": "keras-adagrad-" + name,
        "symbol": "tf.keras.optimizers.Adagrad",
        "settings": settings,
        "variant": variant,
        "ours": ours,
        "params": _format.params(),
        "steps": steps,
    }
    if settings["epsilon"] == 0.0:
        ours["eps"] = 1e-7  # the original takes 0 to mean its default
    if through == "apply_gradients":
        case["note"] = "driven by apply_gradients, which does not clip: none in ours"
        ours.pop("clipnorm")
    if "clipnorm" in settings and "clipvalue" in settings:
        case["ours"] = None
        case["why_not"] = "clips by norm, then by value there; ours: ValueError"
    return case


def ftrl(name, variant, settings):
    steps = keras(tf.keras.optimizers.Ftrl, variant, settings)
    return {
        "name": "keras-ftrl-" + name,
        "symbol": "tf.keras.optimizers.Ftrl",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
        "params": _format.params(),
        "steps": steps,
    }


def plain(make, variant, settings):
    """The steps of an optimizer of ``tf.train``."""
    steps = []
    with tf.Graph().as_default(), session() as sess:
        params = variables(tuple(_format.SHAPES), use_resource=True)
        grads = placeholders(tuple(_format.SHAPES))
        opt = make(**settings)
        train = opt.apply_gradients([(grads[key], params[key]) for key in params])
        slots = slot_variables(opt, params)
        sess.run(tf.compat.v1.global_variables_initializer())
        for values in _format.gradients(variant, STEPS):
            sess.run(train, feed(grads, values))
            steps.append(
                {
                    "grads": values,
                    "params": sess.run(params),
                    "slots": sess.run(slots),
                }
            )
    return steps


def plain_adagrad(name, variant, settings):
    return {
        "name": "adagrad-optimizer-" + name,
        "symbol": "tf.train.AdagradOptimizer",
        "settings": settings,
        "variant": variant,
        "ours": dict(settings, transformation="adagrad", eps=0.0),
        "params": _format.params(),
        "steps": plain(tf.compat.v1.train.AdagradOptimizer, variant, settings),
    }


def plain_ftrl(name, variant, settings):
    steps = plain(tf.compat.v1.train.FtrlOptimizer, variant, settings)
    return {
        "name": "ftrl-optimizer-" + name,
        "symbol": "tf.train.FtrlOptimizer",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
        "params": _format.params(),
        "steps": steps,
    }


def proximal_adagrad(name, variant, settings):
    make = tf.compat.v1.train.ProximalAdagradOptimizer
    return {
        "name": "proximal-adagrad-optimizer-" + name,
        "symbol": "tf.train.ProximalAdagradOptimizer",
        "settings": settings,
        "variant": variant,
        "ours": dict(settings, transformation="proximal_adagrad"),
        "params": _format.params(),
        "steps": plain(make, variant, settings),
    }


def main():
    cases = [drop_stale(inner, k) for inner in INNERS for k in (0, 1, 3)]
    cases += clipping()
    cases += [adagrad(*case) for case in _format.ADAGRAD]
    _, _, rate = _format.ADAGRAD[0]
    cases += [
        adagrad(
            *_format.scheduled(
                "inverse-time-decay",
                schedule="InverseTimeDecay",
                initial_learning_rate=0.5,
                decay_steps=2,
                decay_rate=0.5,
            )
        ),
        adagrad(
            *_format.scheduled(
                "piecewise-constant-decay",
                schedule="PiecewiseConstantDecay",
                boundaries=[1, 3],
                values=[0.5, 0.25, 0.05],
            )
        ),
        adagrad(
            *_format.scheduled(
                "polynomial-decay",
                schedule="PolynomialDecay",
                initial_learning_rate=0.5,
                decay_steps=4,
                end_learning_rate=0.01,
                power=2.0,
            )
        ),
        adagrad(
            *_format.scheduled(
                "cosine-decay-restarts",
                schedule="CosineDecayRestarts",
                initial_learning_rate=0.5,
                first_decay_steps=2,
                t_mul=2.0,
                m_mul=0.8,
                alpha=0.1,
            ),
            schedules=tf.keras.experimental,
        ),
        adagrad(
            *_format.scheduled(
                "linear-cosine-decay",
                schedule="LinearCosineDecay",
                initial_learning_rate=0.5,
                decay_steps=5,
                num_periods=1.5,
                alpha=0.1,
                beta=0.01,
            ),
            schedules=tf.keras.experimental,
        ),
        adagrad("decay", "plain", dict(rate, learning_rate=0.5, decay=0.25)),
        adagrad(*_format.TWO_CLIPS),
        adagrad(
            "unclipped", "scales", dict(rate, clipnorm=1.0), through="apply_gradients"
        ),
        plain_adagrad(
            "plain", "plain", {"learning_rate": 0.1, "initial_accumulator_value": 0.1}
        ),
        plain_adagrad(
            "scales",
            "scales",
            {"learning_rate": 0.5, "initial_accumulator_value": 1e-3},
        ),
    ]
    cases += [plain_ftrl(*case) for case in _format.FTRL]
    cases += [ftrl(*case) for case in _format.KERAS_FTRL]
    cases += [proximal_adagrad(*case) for case in _format.PROXIMAL_ADAGRAD]
    _format.write(__file__, {"tensorflow": tf.__version__}, cases)


if __name__ == "__main__":
    main()
