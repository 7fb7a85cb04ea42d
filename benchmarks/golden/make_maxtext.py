"""Makes maxtext.json: traces of MaxText's wrapper that skips steps.

With Python 3.11, from the repository's root, with a checkout of MaxText elsewhere. Two
of its functions are read and run, and nothing else in it:

    git clone https://github.com/AI-Hypercomputer/maxtext ../maxtext  # at e591f30c
    pip install "jax==0.10.2" "optax==0.2.8"
    python benchmarks/golden/make_maxtext.py ../maxtext
"""

import ast
import os
import sys

import _format
import jax
import jax.numpy as jnp
import numpy as np
import optax


def load(checkout):
    """The wrapper, and the function that it calls."""
    path = os.path.join(checkout, "src", "maxtext", "optimizers", "optimizers.py")
    found = {"jax": jax, "jnp": jnp, "optax": optax}
    with open(path) as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if getattr(node, "name", "") in (
            "_compute_rolling_stats",
            "skip_step_on_spikes",
        ):
            exec(ast.unparse(node), found)
    return found["skip_step_on_spikes"]


def run(wrapper, name, pairs, window, sigmas, why_not=None):
    """One case."""
    theirs = wrapper(optax.adam(0.1), window, sigmas)
    params = start = {"w": np.float32([0.5, -0.25, 1.0])}
    state, events = theirs.init(params), []
    for grads, loss in pairs:
        numbers = {"loss": np.float32(loss), "grad_norm": optax.global_norm(grads)}
        updates, state = theirs.update(grads, state, params, **numbers)
        params = optax.apply_updates(params, updates)
        event = {"grads": grads, "value": np.float64(np.float32(loss))}
        event["applied"] = not bool(state["is_skipped"])
        events.append(dict(event, params={"w": np.asarray(params["w"])}))
    case = {"name": name, "symbol": "maxtext.optimizers.skip_step_on_spikes"}
    ours = {"transformation": "skip_spikes", "window": window, "sigmas": sigmas}
    ours["warmup"] = max(2, window // 2) - 1
    ours["inner"] = {"transformation": "optax.adam", "learning_rate": 0.1}
    settings = {"interval": window, "scaling_factor": sigmas}
    case.update(settings=settings, **_format.compared(ours, why_not))
    return dict(case, params=start, events=events)


if __name__ == "__main__":
    wrapper = load(sys.argv[1])
    nan = "ours skips the push and lets NaN into no history"
    cases = [
        run(wrapper, "six-sigmas", _format.spiky(1, 120), 32, 6.0),
        run(wrapper, "two-sigmas", _format.spiky(2, 120), 16, 2.0),
        run(wrapper, "nan-loss", _format.spoiled(12, "loss"), 8, 6.0, nan),
        run(wrapper, "nan-gradient-at-first", _format.spoiled(1, "grads"), 8, 6.0, nan),
    ]
    versions = {"maxtext": "e591f30c", "jax": jax.__version__}
    _format.write(__file__, versions, cases)
