"""Makes torchao.json: torchao's stochastic rounding, and its AdamW in 8 bits.

With Python 3.11, from the repository's root:

    pip install "torchao==0.18.0" "torch==2.13.0" "numpy==2.4.6"
    python benchmarks/golden/make_torchao.py
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Its steps run as written, uncompiled.

import _format
import numpy as np
import torch
from torchao.optim import AdamW8bit, _AdamW
from torchao.optim.quant_utils import _fp32_to_bf16_sr
from torchao.optim.subclass_8bit import OptimState8bit

DRAWS, STEPS, EVERY = 4096, 400, 40
SETTINGS = {"lr": 5e-4, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
OURS = {"learning_rate": 5e-4, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.01}


def rounded():
    """Each number rounded often: its two neighbours, and how often to the upper one."""
    torch.manual_seed(0)
    x = _format.wide(21, 48)
    draws = _fp32_to_bf16_sr(torch.tensor(np.tile(x, (DRAWS, 1)))).float().numpy()
    low, high = draws.min(0), draws.max(0)
    share = (draws == high).sum(0)
    assert ((draws == low) | (draws == high)).all()
    case = {"name": "stochastic-rounding", "symbol": "_fp32_to_bf16_sr"}
    case.update(
        settings={"draws": DRAWS}, ours={"transformation": "round_stochastically"}
    )
    return dict(case, numbers=x, low=low, high=high, high_count=share)


def quantized(name, x, signed, block_size=128):
    """One array, kept in 8 bits and read again."""
    kept = OptimState8bit.zeros(x.shape, signed=signed, block_size=block_size)
    kept.copy_(torch.tensor(x))
    case = {"name": name, "symbol": "OptimState8bit"}
    case.update(settings={"signed": signed, "block_size": block_size}, ours=None)
    case["why_not"] = "another companding: compare the errors"
    return dict(case, numbers=x, read=kept.dequantize().numpy())


def trained(name, kind, dtype, stochastic=False, ours=None):
    """The losses of one training."""
    torch.manual_seed(1)
    bowl = _format.Bowl()
    w = torch.nn.Parameter(torch.tensor(bowl.start, dtype=getattr(torch, dtype)))
    settings = dict(SETTINGS, bf16_stochastic_round=stochastic)
    theirs, losses = kind([w], **settings), []
    for step in range(STEPS):
        grad = bowl.gradient(w.detach().float().numpy())
        w.grad = torch.tensor(grad, dtype=w.dtype)
        theirs.step()
        if step % EVERY == EVERY - 1:
            losses.append(bowl.loss(w.detach().float().numpy()))
    case = {"name": name, "symbol": "torchao.optim." + kind.__name__}
    case.update(settings=dict(settings, dtype=dtype), ours=ours)
    return dict(case, loss=losses)


if __name__ == "__main__":
    first = _format.wide(22, 256)
    adamw = dict(OURS, transformation="optax.adamw")
    low_bit = {"transformation": "low_bit_state", "inner": adamw}
    cases = [
        rounded(),
        quantized("first-moment", first, signed=True),
        quantized("second-moment", np.square(first), signed=False),
        trained("adamw", _AdamW, "float32", ours=adamw),
        trained("adamw-8bit", AdamW8bit, "float32", ours=low_bit),
        trained("adamw-stochastic", _AdamW, "bfloat16", True, adamw),
        trained("adamw-nearest", _AdamW, "bfloat16", False, adamw),
    ]
    versions = {"torchao": "0.18.0", "torch": torch.__version__.partition("+")[0]}
    _format.write(__file__, versions, cases)
