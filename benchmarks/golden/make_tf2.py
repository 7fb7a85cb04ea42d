"""Makes tf2.json: traces of TensorFlow 2.11 and TensorFlow Addons 0.19, run eagerly.

With Python 3.7, from the repository's root:

    pip install "tensorflow==2.11.0" "tensorflow-addons==0.19.0"
    python benchmarks/golden/make_tf2.py
"""

import _format
import tensorflow as tf
import tensorflow_addons as tfa

STEPS = 6
ADAGRADS = {
    "adagrad": ("tf.keras.optimizers.Adagrad", tf.keras.optimizers.Adagrad),
    "legacy-adagrad": (
        "tf.keras.optimizers.legacy.Adagrad",
        tf.keras.optimizers.legacy.Adagrad,
    ),
}

FTRLS = {
    "ftrl": ("tf.keras.optimizers.Ftrl", tf.keras.optimizers.Ftrl),
    "legacy-ftrl": (
        "tf.keras.optimizers.legacy.Ftrl",
        tf.keras.optimizers.legacy.Ftrl,
    ),
}


def run(opt, variant, read_slots, schedule=None):
    """Pushes a variant's gradients through ``opt.apply_gradients``."""
    params = {
        name: tf.Variable(value, name=name) for name, value in _format.params().items()
    }
    steps = []
    for values in _format.gradients(variant, STEPS):
        step = {"grads": values}
        if schedule is not None:
            step["learning_rate"] = schedule(opt.iterations).numpy()
        opt.apply_gradients([(tf.constant(values[k]), params[k]) for k in params])
        step["iterations"] = opt.iterations.numpy()
        step["params"] = {name: var.numpy() for name, var in params.items()}
        step["slots"] = read_slots(opt, params)
        steps.append(step)
    return steps


def built(settings):
    """The constructor's arguments, and the schedule among them or None."""
    arguments = _format.build(settings, tf.keras.optimizers.schedules)
    rate = arguments["learning_rate"]
    return arguments, rate if callable(rate) else None


def accumulators(opt, params, slots=("accumulator",)):
    def read(slot):
        if isinstance(opt, tf.keras.optimizers.legacy.Optimizer):
            return {k: opt.get_slot(var, slot) for k, var in params.items()}
        kept = getattr(opt, "_" + slot + "s")
        return {k: kept[i] for i, k in enumerate(params)}

    return {slot: {k: var.numpy() for k, var in read(slot).items()} for slot in slots}


def accumulators_and_linears(opt, params):
    return accumulators(opt, params, ("accumulator", "linear"))


def adagrad(which, name, variant, settings):
    symbol, make = ADAGRADS[which]
    arguments, schedule = built(settings)
    steps = run(make(**arguments), variant, accumulators, schedule)
    legacy = which == "legacy-adagrad"
    ours = _format.ours_adagrad(settings, steps, eps_in_sqrt=not legacy)
    case = {
        "name": which + "-" + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": ours,
    }
    if settings.get("clipnorm") == 0.0 and not legacy:
        case["note"] = "0 means no clipping there: none in ours"
        ours.pop("clipnorm")
    if settings["epsilon"] == 0.0 and legacy:
        ours["eps"] = 1e-7  # the original takes 0 to mean its default
    if settings["epsilon"] == 0.0 and not legacy:
        case["ours"] = None
        case["why_not"] = "0 / sqrt(0) is NaN there; ours: a zero update"
    if "clipnorm" in settings and "clipvalue" in settings:
        case["ours"] = None
        case["why_not"] = (
            "clips by value, then by norm there; ours: ValueError"
            if legacy
            else "ignores clipvalue there; ours: ValueError"
        )
    return dict(case, params=_format.params(), steps=steps)


def ftrl(which, name, variant, settings):
    symbol, make = FTRLS[which]
    arguments, schedule = built(settings)
    steps = run(make(**arguments), variant, accumulators_and_linears, schedule)
    case = {
        "name": which + "-" + name,
        "symbol": symbol,
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
    }
    if settings["initial_accumulator_value"] == 0.0 and which == "ftrl":
        case["ours"] = None
        case["why_not"] = "0 / 0 is NaN there; ours: a weight of 0"
    return dict(case, params=_format.params(), steps=steps)


class OfTheOperation:
    """FTRL with ``multiply_linear_by_lr``, an option of the operation alone."""

    def __init__(self, learning_rate, learning_rate_power, **settings):
        self.schedule, self.power = learning_rate, learning_rate_power
        self.iterations = tf.Variable(0)
        self.start = settings.pop("initial_accumulator_value")
        self.strengths = {
            "l1": settings.pop("l1_regularization_strength"),
            "l2": settings.pop("l2_regularization_strength"),
            "l2_shrinkage": settings.pop("l2_shrinkage_regularization_strength"),
        }
        assert settings == {"multiply_linear_by_learning_rate": True}
        self.kept = {}

    def apply_gradients(self, pairs):
        for grad, var in pairs:
            start = tf.fill(var.shape, self.start), tf.zeros(var.shape)
            kept = self.kept.setdefault(var.name, [tf.Variable(x) for x in start])
            tf.raw_ops.ResourceApplyFtrlV2(
                var=var.handle,
                accum=kept[0].handle,
                linear=kept[1].handle,
                grad=grad,
                lr=self.schedule(self.iterations),
                lr_power=self.power,
                multiply_linear_by_lr=True,
                **self.strengths,
            )
        self.iterations.assign_add(1)

    def slots(self, params):
        return {
            slot: {k: self.kept[var.name][i].numpy() for k, var in params.items()}
            for i, slot in enumerate(("accumulator", "linear"))
        }


def multiplied_ftrl(name, variant, settings):
    settings = dict(settings, multiply_linear_by_learning_rate=True)
    arguments, schedule = built(settings)
    steps = run(OfTheOperation(**arguments), variant, OfTheOperation.slots, schedule)
    return {
        "name": "multiplied-ftrl-" + name,
        "symbol": "tf.raw_ops.ResourceApplyFtrlV2",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
        "params": _format.params(),
        "steps": steps,
    }


def moments(opt, params):
    return {
        slot: {name: opt.get_slot(var, slot).numpy() for name, var in params.items()}
        for slot in ("m", "v")
    }


NOVOGRAD = {
    "learning_rate": 0.1,
    "beta_1": 0.95,
    "beta_2": 0.98,
    "epsilon": 1e-8,
    "weight_decay": 0.0,
    "grad_averaging": False,
}


def novograd(name, variant, **changed):
    settings = dict(NOVOGRAD, **changed)
    arguments, schedule = built(settings)
    steps = run(tfa.optimizers.NovoGrad(**arguments), variant, moments, schedule)
    ours = {
        "transformation": "novograd",
        "learning_rate": _format.rates(settings, steps),
        "b1": settings["beta_1"],
        "b2": settings["beta_2"],
        "eps": settings["epsilon"],
        "weight_decay": settings["weight_decay"],
        "grad_averaging": settings["grad_averaging"],
        "eps_in_sqrt": False,
        "lr_in_momentum": True,
    }
    for clip in ("clipnorm", "clipvalue", "global_clipnorm"):
        if clip in settings:
            ours[clip] = settings[clip]
    case = {
        "name": "novograd-" + name,
        "symbol": "tfa.optimizers.NovoGrad",
        "settings": settings,
        "variant": variant,
        "ours": ours,
    }
    if settings["grad_averaging"]:
        case["ours"] = None
        case["why_not"] = "the first step is not averaged there; ours: every step is"
    if settings["epsilon"] == 0.0:
        ours["eps"] = 1e-7  # the original takes 0 to mean its default
    return dict(case, params=_format.params(), steps=steps)


def main():
    cases = []
    for which in ADAGRADS:
        for case in [*_format.ADAGRAD, _format.GLOBAL_CLIPNORM, _format.TWO_CLIPS]:
            cases.append(adagrad(which, *case))
    cases += [
        adagrad("adagrad", *_format.COSINE),
        novograd("default", "plain", beta_1=0.9, beta_2=0.999, epsilon=1e-7),
        novograd("plain", "plain"),
        novograd("scales", "scales"),
        novograd("zero-start", "zero-start"),
        novograd("zero-epsilon", "zero-start", epsilon=0.0),
        novograd("weight-decay", "plain", weight_decay=0.01),
        novograd("weight-decay-zero-start", "zero-start", weight_decay=0.01),
        novograd("grad-averaging", "plain", grad_averaging=True),
        novograd("large-epsilon", "scales", epsilon=1e-3),
        novograd("exponential-decay", "plain", learning_rate=_format.EXPONENTIAL),
        novograd(
            "exponential-decay-weight-decay",
            "scales",
            learning_rate=_format.EXPONENTIAL,
            weight_decay=0.01,
        ),
        novograd("clipnorm", "scales", clipnorm=1.0, epsilon=1e-3),
        novograd("global-clipnorm", "scales", global_clipnorm=1.0, epsilon=1e-3),
    ]
    for which in FTRLS:
        for case in [
            *_format.KERAS_FTRL,
            _format.BETA,
            _format.FTRL_GLOBAL_CLIPNORM,
        ]:
            cases.append(ftrl(which, *case))
    cases += [multiplied_ftrl(*case) for case in _format.MULTIPLIED_FTRL]
    versions = {"tensorflow": tf.__version__, "tensorflow-addons": tfa.__version__}
    _format.write(__file__, versions, cases)


if __name__ == "__main__":
    main()
