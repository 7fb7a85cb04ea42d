"""Makes torch_sparse.json: PyTorch's SparseAdam on row-sparse gradients.

With Python 3.11, from the repository's root:

    pip install "torch==2.14.1" "numpy==2.4.6"
    python benchmarks/golden/make_torch_sparse.py

SparseAdam takes no dense gradients, so there is no "b".
"""

import _format
import _sparse
import torch

SLOTS = ("exp_avg", "exp_avg_sq")


def as_tensor(value):
    if isinstance(value, dict):
        indices = torch.from_numpy(value["indices"])[None]
        values = torch.from_numpy(value["values"].copy())
        values = values.reshape(-1, *value["dense_shape"][1:])
        return torch.sparse_coo_tensor(indices, values, value["dense_shape"])
    return torch.from_numpy(value.copy())


def sparse_adam(name, variant, given, table="w", as_dense=False):
    rate, b1, b2, epsilon = given
    settings = {"lr": rate, "betas": [b1, b2], "eps": epsilon}
    sequence = [{table: g[table]} for g in _sparse.gradients(variant, table, as_dense)]
    initial = _sparse.params(sequence[0])
    params = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in initial.items()}
    opt = torch.optim.SparseAdam(list(params.values()), rate, (b1, b2), epsilon)

    def read(values):
        return {k: x.detach().numpy().copy() for k, x in values.items()}

    steps = []
    for grads in sequence:
        for k, var in params.items():
            var.grad = as_tensor(grads[k])
        opt.step()
        state = {s: {k: opt.state[v][s] for k, v in params.items()} for s in SLOTS}
        slots = {slot: read(values) for slot, values in state.items()}
        steps.append({"grads": grads, "params": read(params), "slots": slots})
    return {
        "name": "sparse-adam-" + name,
        "symbol": "torch.optim.SparseAdam",
        "settings": settings,
        "variant": variant,
        **_sparse.ours_lazy_adam(rate, b1, b2, epsilon),
        "params": _sparse.params(sequence[0]),
        "steps": steps,
    }


def main():
    cases = [sparse_adam(*case) for case in _sparse.LAZY_ADAM if not case[4:]]
    _format.write(__file__, {"torch": torch.__version__}, cases)


if __name__ == "__main__":
    main()
