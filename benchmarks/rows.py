"""A batch that touches 8,192 rows of a table: Adagrad and Adam; optax and torch.

``python -m benchmarks.rows`` takes tables of 100,000, 1,000,000 and 10,000,000 rows of
64 float32 numbers, and times one step from the rows' gradients to the new parameters.
optax's step has to make the dense gradient first, as ``jax.grad`` of a lookup does. It
is left out for the largest table. torch is ``torch.optim.Adagrad``, and ``SparseAdam``,
on a sparse gradient (extra ``benchmarks``).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from benchmarks.measure import arguments, in_place, interleaved, report, times

HEIGHTS, WIDTH, ROWS = (100_000, 1_000_000, 10_000_000), 64, 8192
# By the row, and for each the name of the yardsticks.
CHAINS = {
    "adagrad": (gx.adagrad(0.1), "Adagrad"),
    "clip + adagrad": (
        optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
        "Adagrad",
    ),
    "adagrad(row_wise)": (gx.adagrad(0.1, row_wise=True), "Adagrad"),
    "lazy(optax.adagrad)": (gx.lazy(optax.adagrad(0.1)), "Adagrad"),
    "lazy(optax.adam)": (gx.lazy(optax.adam(0.1)), "Adam"),
    "lazy(optax.adamw)": (gx.lazy(optax.adamw(0.1)), "Adam"),
}
DENSE = {"Adagrad": optax.adagrad(0.1), "Adam": optax.adam(0.1)}


def stepper(tx, height, grads):
    """A run of the donated step, and the compiler's figures for it."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return gx.apply_gradients(tx, grads, state, params)

    params = jnp.zeros((height, WIDTH))
    model = params, tx.init(params)
    compiled = step.lower(*model, grads).compile()
    return in_place(compiled, model, grads), compiled


def torch_stepper(name, height, indices, values):
    """A run of torch's optimizer on a sparse gradient; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    table = torch.nn.Parameter(torch.zeros(height, WIDTH))
    if name == "Adam":
        opt = torch.optim.SparseAdam([table], lr=0.1)
    else:
        opt = torch.optim.Adagrad([table], lr=0.1, initial_accumulator_value=0.1)
    at, rows = torch.from_numpy(indices)[None].long(), torch.from_numpy(values)

    def run():
        table.grad = torch.sparse_coo_tensor(
            at, rows, table.shape, check_invariants=False
        )
        opt.step()

    return run


def measure(height, rounds):
    """The table's rows of the report."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, height, ROWS).astype(np.int32)
    values = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    grads = gx.IndexedSlices(indices, values, (height, WIDTH))
    runs, compiled = {}, {}
    for name, (tx, _) in CHAINS.items():
        runs[name], compiled[name] = stepper(tx, height, grads)
    for kind, tx in DENSE.items():
        if height < HEIGHTS[-1]:
            dense, name = optax.chain(gx.densify(), tx), f"optax {kind}, dense"
            runs[name], compiled[name] = stepper(dense, height, grads)
        if run := torch_stepper(kind, height, indices, values):
            runs[f"torch {kind}, sparse"] = run
    seconds = interleaved(runs, rounds)
    for name, measured in seconds.items():
        row = {"name": f"{height:,} rows: {name}", **times(measured)}
        if name in compiled:
            row["temp bytes"] = compiled[name].memory_analysis().temp_size_in_bytes
        for other in ("optax {}, dense", "torch {}, sparse"):
            if name in CHAINS and (known := other.format(CHAINS[name][1])) in seconds:
                speed = times(measured, seconds[known])["speed, median"]
                row["x " + other.format("").replace(" ,", ",")] = speed
        yield row


def main():
    """Prints the table."""
    options = arguments(__doc__, rounds=30).parse_args()
    rows = [row for height in HEIGHTS for row in measure(height, options.rounds)]
    report(f"one step on {ROWS:,} rows of {WIDTH} numbers", rows, options.json)


if __name__ == "__main__":
    main()
