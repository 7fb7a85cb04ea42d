"""A batch that touches 8,192 rows of a table: Adagrad and Adam; optax and torch.

``python -m benchmarks.rows`` takes tables of 100,000, 1,000,000 and 10,000,000 rows of
64 float32 numbers, and times one step from the rows' gradients to the new parameters.
optax's step has to make the dense gradient first, as ``jax.grad`` of a lookup does. It
is left out for the largest table. torch is ``torch.optim.Adagrad``, and ``SparseAdam``,
on a sparse gradient (extra ``benchmarks``).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradxform as gx
from benchmarks.measure import arguments, in_place, interleaved, report, times

HEIGHTS, WIDTH, ROWS = (100_000, 1_000_000, 10_000_000), 64, 8192
# By the row, in groups that are timed together: all their tables are in memory at once.
CHAINS = {
    "Adagrad": {
        "adagrad": gx.adagrad(0.1),
        "clip + adagrad": optax.chain(gx.clip_by_global_norm(1.0), gx.adagrad(0.1)),
        "adagrad(row_wise)": gx.adagrad(0.1, row_wise=True),
    },
    "Adam": {"lazy(optax.adam)": gx.lazy(optax.adam(0.1))},
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


def measure(kind, height, rounds):
    """A group's rows of the report, for a table of this height."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, height, ROWS).astype(np.int32)
    values = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    grads = gx.IndexedSlices(indices, values, (height, WIDTH))
    runs, compiled = {}, {}
    for name, tx in CHAINS[kind].items():
        runs[name], compiled[name] = stepper(tx, height, grads)
    dense, sparse = f"optax {kind}, dense", f"torch {kind}, sparse"
    if height < HEIGHTS[-1]:
        tx = optax.chain(gx.densify(), DENSE[kind])
        runs[dense], compiled[dense] = stepper(tx, height, grads)
    if run := torch_stepper(kind, height, indices, values):
        runs[sparse] = run
    seconds = interleaved(runs, rounds)
    for name, measured in seconds.items():
        row = {"name": f"{height:,} rows: {name}", **times(measured)}
        if name in compiled:
            row["temp bytes"] = compiled[name].memory_analysis().temp_size_in_bytes
        for column, other in (("x optax, dense", dense), ("x torch, sparse", sparse)):
            if name in CHAINS[kind] and other in seconds:
                row[column] = times(measured, seconds[other])["speed, median"]
        yield row


def main():
    """Prints the table."""
    options = arguments(__doc__, rounds=30).parse_args()
    groups = itertools.product(CHAINS, HEIGHTS)
    rows = [row for group in groups for row in measure(*group, options.rounds)]
    report(f"one step on {ROWS:,} rows of {WIDTH} numbers", rows, options.json)


if __name__ == "__main__":
    main()
