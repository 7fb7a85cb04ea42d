"""The TPU compiler without a TPU, and what a compiled step costs by its count.

It needs libtpu, in an environment of its own (with it installed, JAX looks for a TPU):
``pip install "jax[tpu]" -e .``. It takes every topology that libtpu knows: ``v4:2x2x1``
and ``tpu7x:2x2x1`` are two more than those of ``benchmarks.grid``.

A topology of up to 8 chips stands for one chip. On a larger one, parameters, state and
gradients are sharded over all chips. Each array is cut along the largest dimension that
the number of chips divides; other arrays are replicated. There, ``bytes`` also counts
the padding of thin shards.

All figures are exact, in units of N, the parameters' bytes on one chip:

- temp: temporary HBM, from ``memory_analysis()``. Beside arrays it holds 32 kB for each
  of some hundred instructions: tens of MB in all, less on wider models.
- bytes: ``cost_analysis()["bytes accessed"]``. The compiler copies arrays between HBM
  and VMEM before or after their use. This count adds each copy to the use: three times
  if the array is copied in slices, four times if it is copied whole.
- own: operands and results of everything except these copies, in any memory. The least
  is 6 for a clip and one array of state: gradients twice, the rest in and out once.
- prefetched, written back: the bytes that these copies bring into VMEM, and out of it.
- hbm: all that is read from HBM and written to it, each of these copies counted once.

The last four are read from the text of the compiled program. There an operand counts in
full, even if only a part of it is read. Of a conditional, the branch that moves more
counts.
"""

import functools
import math
import os
import re
from collections import Counter

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.step import gx_step

COLLECTIVES = [
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
]
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def mesh(topology):
    """The chips of a topology that is not there: one if it has up to 8, else all."""
    # libtpu would ask a machine with a TPU for these; it reads them when it is loaded.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # Whatever is asked.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # In others, too.
    jax.config.update("jax_platforms", "cpu")  # Nothing here runs on a TPU.
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return Mesh(np.array(devices if len(devices) > 8 else devices[:1]), "chips")


def placed(tree, mesh):
    """Shapes with their placement on the mesh."""

    def place(x):
        divisible = [d for d in range(x.ndim) if x.shape[d] % mesh.size == 0]
        spec = [None] * x.ndim
        if mesh.size > 1 and divisible:
            spec[max(divisible, key=lambda d: x.shape[d])] = "chips"
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def size_on_a_chip(tree):
    """Bytes of all leaves on one of the chips on which they are placed."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def lower_step(tx, params, write=gx_step, grads=None):
    """The whole step on placed shapes, with parameters and state donated.

    Gradients are like the parameters, unless others are given.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    state = placed(jax.eval_shape(tx.init, params), mesh)
    like = jax.tree.map(lambda x: x.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=like)
    def step(params, state, grads):
        return write(tx, params, state, grads)

    return step.lower(params, state, params if grads is None else grads)


def lower_training(tx, params, loss_fn, *batch, write=gx_step, scanned=False, **extra):
    """The step as users write it, loss and gradients inside, on placed shapes.

    Parameters and state are donated. With ``scanned`` the arrays of the batch have one
    axis more, in front, and a scan over it makes a push of each part. ``extra`` are the
    shapes of extra arguments of ``tx``. The step returns the loss as well.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    state = placed(jax.eval_shape(tx.init, params), mesh)
    like = jax.tree.map(lambda x: x.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(like, None))
    def step(params, state, *batch, **extra):
        def push(model, batch):
            loss, grads = jax.value_and_grad(loss_fn)(model[0], *batch)
            return write(tx, *model, grads, **extra), loss

        model = params, state
        return jax.lax.scan(push, model, batch) if scanned else push(model, batch)

    batch, extra = placed((batch, extra), mesh)
    return step.lower(params, state, *batch, **extra)


def arrays(types):
    """Bytes and memory space (0 is HBM, 1 VMEM) of each array in the text of a type."""
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](?:{([^}]*)})?", types):
        space = re.search(r"S\((\d+)\)", layout)
        size = math.prod(int(d) for d in dims.split(",") if d)
        yield BYTES[dtype] * size, int(space[1]) if space else 0


# %name = type opcode(operands), attributes
INSTRUCTION = re.compile(r" %(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:, (.*))?$", re.M)
MOVES_NOTHING = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|.*-done"
)


def traffic(hlo):
    """Bytes that the entry computation of a compiled program moves, by column."""
    computations = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*{\n((?: .*\n)*)}", hlo, re.M))

    @functools.cache
    def of(computation):
        total = Counter({"own": 0, "prefetched": 0, "written back": 0, "hbm": 0})
        types = {}
        for name, result, opcode, operands, rest in INSTRUCTION.findall(
            computations[computation]
        ):
            types[name] = result
            if MOVES_NOTHING.fullmatch(opcode) or "ConcatBitcast" in rest:
                continue
            if opcode == "conditional":
                branches = re.search(r"branch_computations={(.*?)}", rest)[1]
                branches = map(of, re.findall(r"%([\w.-]+)", branches))
                total.update(max(branches, key=lambda moved: moved["hbm"]))
            elif opcode in ("copy-start", "slice-start"):
                # The type is (to, from, …) of a copy, ((from), to, …) of a slice.
                n, space = list(arrays(result))[opcode == "slice-start"]
                total.update({"prefetched" if space else "written back": n, "hbm": n})
            else:
                read = [types[o] for o in re.findall(r"%([\w.-]+)", operands)]
                moved = [a for text in (*read, result) for a in arrays(text)]
                total["own"] += sum(n for n, _ in moved)
                total["hbm"] += sum(n for n, space in moved if space == 0)
        return total

    return of(re.search(r"^ENTRY %(\S+)", hlo, re.M)[1])


def count(hlo, opcode):
    """The number of instructions of a kind in the program's text."""
    return hlo.count(f" {opcode}(") + hlo.count(f" {opcode}-start(")


def figures(compiled, n):
    """What a compiled step on parameters of ``n`` bytes costs, in N."""
    in_bytes = {
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "bytes": compiled.cost_analysis()["bytes accessed"],
        **traffic(compiled.as_text()),
    }
    return {key: value / n for key, value in in_bytes.items()}


def collectives(hlo):
    """The number of collectives of each kind, if there are any."""
    counts = {kind: count(hlo, kind) for kind in COLLECTIVES}
    return {kind: n for kind, n in counts.items() if n}
