"""Bytes of optimizer state per parameter of GPT-2-small, in float32 and in bfloat16.

``python -m benchmarks.memory`` makes no array. It takes the shapes and dtypes that
``tx.init`` would return, with scalars such as counts.
"""

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.measure import arguments, report
from benchmarks.models import gpt2_small, size

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


def main():
    """Prints the table."""
    options = arguments(__doc__).parse_args()
    report("bytes of state per parameter", list(measure()), options.json)


if __name__ == "__main__":
    main()
