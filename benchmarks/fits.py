"""What will fit on a machine, by arithmetic: no compiler is asked, and nothing runs.

``python -m benchmarks.largest`` prints this table before it starts, and ``--plan``
prints it alone. A step keeps parameters and state, where the training has them; the
gradients, unless they are applied by layers; and the input of each layer for the
backward pass. A compiler keeps more: one layer's gradients and activations, the logits.
By the compilers for v5e, v6e and an H100 it was up to 2 GiB or 13 % more.

- billions: parameters of the largest model that fits both memories.
- chip GiB, host GiB: what it keeps there.
- of N layers: whether a model with so many layers fits, and what it keeps.
"""

import os
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import trainings
from benchmarks.measure import report
from benchmarks.models import size, transformer

GPU_HOST = 64e9  # Of the host's memory XLA gives so much to a program on a GPU.


class Kept(NamedTuple):
    """What a step keeps, in bytes."""

    chip: float
    host: float


def here():
    """The machine at hand. A CPU's device memory is its host's."""
    device = jax.devices()[0]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chip = (device.memory_stats() or {}).get("bytes_limit", host)
    if device.platform == "gpu":
        limit = os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
        host = min(host, float(limit) * 1e9 if limit else GPU_HOST)
    memories = f"{chip / 2**30:.0f} GiB, host with {host / 2**30:.0f} GiB"
    title = f"{device.device_kind} with {memories}"
    return trainings.Machine(title, device.platform, chip / 2**30, np.nan, host / 2**30)


def kept(training, layers, sequences):
    """What a step of a training keeps, with so many layers and sequences."""
    one = Mesh(np.array(jax.devices()[:1]), "chips")
    params, state = trainings.shapes(training, layers, one)
    on_host = [
        x
        for x in jax.tree.leaves((params, state))
        if x.sharding.memory_kind == "pinned_host"
    ]
    host = size(on_host)
    gradients = 0 if training.layers else size(params)
    inputs = layers * sequences * trainings.LENGTH * trainings.MODEL["width"]
    inputs *= jax.numpy.dtype(training.dtype).itemsize
    return Kept(size((params, state)) - host + gradients + inputs, host)


def share(machine, found):
    """The larger share of a memory that is taken; a CPU has one memory for all."""
    chip, host = machine.memory, trainings.HOST_SHARE * machine.host
    if machine.target == "cpu":
        return sum(found) / 2**30 / host
    return max(found.chip / 2**30 / chip, found.host / 2**30 / host)


def plan(machine, layers, sequences):
    """Prints what will fit on a machine, and what a model of so many layers keeps."""
    rows = []
    for name, training in trainings.TRAININGS.items():

        def need(n, training=training):
            return share(machine, kept(training, n, sequences))

        most = trainings.largest(need, 1, 8)
        model = transformer(most, **trainings.MODEL)
        billions = sum(x.size for x in jax.tree.leaves(model)) / 1e9
        full, asked = (kept(training, n, sequences) for n in (most, layers))
        rows.append(
            {
                "name": name,
                "dtype": training.dtype,
                "billions": f"{billions:.1f}" if most else "none",
                "layers": most,
                "chip GiB": f"{full.chip / 2**30:.1f}",
                "host GiB": f"{full.host / 2**30:.1f}" if full.host else "",
                f"of {layers} layers": "fits" if layers <= most else "too large",
                "its chip GiB": f"{asked.chip / 2**30:.1f}",
                "its host GiB": f"{asked.host / 2**30:.1f}" if asked.host else "",
            }
        )
    batch = f"{sequences} sequences of {trainings.LENGTH:,} tokens"
    report(f"by arithmetic: {machine.title}; {batch}", rows)
