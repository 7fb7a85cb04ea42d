"""Bytes of optimizer state per parameter of GPT-2-small, in float32 and in bfloat16.

``python -m benchmarks.memory`` makes no array. It takes the shapes and dtypes that
``tx.init`` would return, with scalars such as counts.

``--targets cpu v5e:2x2`` compiles the donated steps of half precision instead, and
runs nothing. They are on twelve dense layers, or with ``--model transformer`` on 16
layers that a ``scan`` stacks. The gradients are arguments, and then the
loss is inside. ``benchmarks.compilers`` explains the columns. They are in N, the bytes
of the parameters. ``least`` is what a step has to move: the parameters and the state in
and out, and the gradients in. ``held`` is in bytes for each parameter: parameters,
state and temporaries, and gradients that are arguments.
"""

import itertools

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.compilers import figures, lower_step, lower_training, placed
from benchmarks.grid import devices
from benchmarks.measure import arguments, report
from benchmarks.models import TRAININGS, gpt2_small, size, training

ADAMW = optax.adamw(1e-3)
# With the dtype of the parameters.
HALF_PRECISION = {
    "optax.adamw, float32": ("float32", ADAMW),
    "optax.adamw": ("bfloat16", ADAMW),
    "gx.master_weights": ("bfloat16", gx.master_weights(ADAMW)),
    "gx.master_weights(residual_dtype=bfloat16)": (
        "bfloat16",
        gx.master_weights(ADAMW, residual_dtype="bfloat16"),
    ),
    "gx.master_weights(residual_dtype=int8)": (
        "bfloat16",
        gx.master_weights(ADAMW, residual_dtype="int8"),
    ),
    "gx.round_stochastically": (
        "bfloat16",
        optax.chain(ADAMW, gx.round_stochastically(0)),
    ),
    "gx.low_bit_state": ("float32", gx.low_bit_state(ADAMW)),
    "gx.master_weights(gx.low_bit_state, residual_dtype=int8)": (
        "bfloat16",
        gx.master_weights(gx.low_bit_state(ADAMW), residual_dtype="int8"),
    ),
}

OPTIMIZERS = {
    "optax.adam": optax.adam(1e-3),
    "optax.adamw": optax.adamw(1e-3),
    "optax.sgd(momentum)": optax.sgd(0.1, momentum=0.9),
    "optax.adagrad": optax.adagrad(0.1),
    "gx.adagrad": gx.adagrad(0.1),
    "gx.adagrad(row_wise)": gx.adagrad(0.1, row_wise=True),
    "gx.adagrad(accumulator_dtype=bfloat16)": gx.adagrad(
        0.1, accumulator_dtype=jnp.bfloat16
    ),
    "optax.novograd": optax.novograd(0.1),
    "gx.novograd": gx.novograd(0.1),
    "gx.novograd(mu_dtype=bfloat16)": gx.novograd(0.1, mu_dtype=jnp.bfloat16),
    "gx.novograd(mu_dtype=float32)": gx.novograd(0.1, mu_dtype=jnp.float32),
    **{name: tx for name, (_, tx) in HALF_PRECISION.items() if name.startswith("gx")},
}


def state_bytes(tx, params):
    """Bytes of the state of ``tx``, per parameter."""
    parameters = sum(p.size for p in jax.tree.leaves(params))
    return size(jax.eval_shape(tx.init, params)) / parameters


def measure():
    """The lines of the table."""
    trees = {d: gpt2_small(jnp.dtype(d)) for d in ("float32", "bfloat16")}
    for name, tx in OPTIMIZERS.items():
        columns = {d: round(state_bytes(tx, tree), 5) for d, tree in trees.items()}
        yield {"name": name, **columns}


def steps(target, inside, model):
    """The lines of the second table, for one machine."""
    for name, (dtype, tx) in HALF_PRECISION.items():
        params, batch, loss_fn = training(model, dtype)
        params = placed(params, devices(target))
        step = (
            lower_training(tx, params, loss_fn, *batch)
            if inside
            else lower_step(tx, params)
        ).compile()
        n, state = size(params), size(jax.eval_shape(tx.init, params))
        found = {
            "temp": step.memory_analysis().temp_size_in_bytes / n,
            "bytes": step.cost_analysis()["bytes accessed"] / n,
            "least": 3 + 2 * state / n,
        }
        held = (2 - inside + found["temp"]) * n + state
        found["held"] = held / sum(p.size for p in jax.tree.leaves(params))
        if target != "cpu":
            found |= figures(step, n)
        where = f"{target}, loss inside" if inside else target
        columns = {key: round(value, 2) for key, value in found.items()}
        yield {"name": f"{where}: {name}", **columns}


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--targets", nargs="+", help="of compiled steps")
    parser.add_argument("--model", choices=TRAININGS, default="dense")
    options = parser.parse_args()
    title, rows = "bytes of state per parameter", list(measure())
    if options.targets:
        jax.config.update("jax_numpy_dtype_promotion", "standard")
        title = "the donated step, in N"
        both = itertools.product(options.targets, (False, True))
        rows = [row for each in both for row in steps(*each, options.model)]
    report(title, rows, options.json)


if __name__ == "__main__":
    main()
