"""Makes keras3.json: traces of Keras 3 on its JAX backend.

With Python 3.11, from the repository's root:

    pip install "keras==3.15.1" "jax==0.10.2"
    python benchmarks/golden/make_keras3.py
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import _format
import jax
import keras
import numpy as np

STEPS = 6


def run(make, variant, settings, *slots):
    """Pushes a variant's gradients through an optimizer."""
    opt = make(**_format.build(settings, keras.optimizers.schedules))
    params = {
        key: keras.Variable(value, name=key) for key, value in _format.params().items()
    }
    opt.build(list(params.values()))
    steps = []
    for values in _format.gradients(variant, STEPS):
        step = {"grads": values, "learning_rate": np.asarray(opt.learning_rate)}
        opt.apply([values[key] for key in params])
        step["iterations"] = np.asarray(opt.iterations)
        step["params"] = {key: np.asarray(var) for key, var in params.items()}
        step["slots"] = {
            slot: {
                key: np.asarray(getattr(opt, "_" + slot + "s")[i])
                for i, key in enumerate(params)
            }
            for slot in slots
        }
        steps.append(step)
    return steps


def adagrad(name, variant, settings):
    steps = run(keras.optimizers.Adagrad, variant, settings, "accumulator")
    case = {
        "name": "adagrad-" + name,
        "symbol": "keras.optimizers.Adagrad",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_adagrad(settings, steps, eps_in_sqrt=True),
    }
    if settings.get("clipnorm") == 0.0:
        case["note"] = "0 means no clipping there: none in ours"
        case["ours"].pop("clipnorm")
    if settings["epsilon"] == 0.0:
        case["ours"] = None
        case["why_not"] = "0 / sqrt(0) is NaN there; ours: a zero update"
    return dict(case, params=_format.params(), steps=steps)


def ftrl(name, variant, settings):
    steps = run(keras.optimizers.Ftrl, variant, settings, "accumulator", "linear")
    case = {
        "name": "ftrl-" + name,
        "symbol": "keras.optimizers.Ftrl",
        "settings": settings,
        "variant": variant,
        "ours": _format.ours_ftrl(settings, steps),
    }
    if settings["initial_accumulator_value"] == 0.0:
        case["ours"] = None
        case["why_not"] = "0 / 0 is NaN there; ours: a weight of 0"
    return dict(case, params=_format.params(), steps=steps)


def main():
    run = [*_format.ADAGRAD, _format.GLOBAL_CLIPNORM, _format.COSINE]
    cases = [adagrad(*case) for case in run]
    for name, t_mul in (("restarts", 2.0), ("equal-restarts", 1.0)):
        case = _format.scheduled(
            "cosine-decay-" + name,
            schedule="CosineDecayRestarts",
            initial_learning_rate=0.5,
            first_decay_steps=2,
            t_mul=t_mul,
            m_mul=0.8,
            alpha=0.1,
        )
        cases.append(adagrad(*case))
    cases += [ftrl(*case) for case in _format.KERAS_FTRL]
    cases += [ftrl(*_format.BETA), ftrl(*_format.FTRL_GLOBAL_CLIPNORM)]
    versions = {"keras": keras.__version__, "backend": "jax", "jax": jax.__version__}
    _format.write(__file__, versions, cases)


if __name__ == "__main__":
    main()
