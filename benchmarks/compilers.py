"""The TPU compiler without a TPU, and what a compiled step costs by its count.

It needs libtpu, in an environment of its own (with it installed, JAX looks for a TPU):
``pip install "jax[tpu]" -e .``. It takes every topology that libtpu knows: ``v4:2x2x1``
and ``tpu7x:2x2x1`` are two more than those of ``benchmarks.grid``.

``h100`` is an NVIDIA H100. Its compiler needs no GPU either: ``pip install
"jax[cuda13]" -e .``, with JAX 0.12 or later. ``h100.txtpb`` describes the card. Without
a card the compiler cannot try which kernels are fastest.

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

The last four are read from the text of the compiled program. An operand counts in full,
unless a slice or a gather reads a part of it. The body of a loop counts as often as it
runs. Of a conditional, the branch that moves more counts, or for ``min`` in ``taken``
the other one.
"""

import functools
import math
import os
import pathlib
import re
from collections import Counter

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.step import gx_step, training_step

COLLECTIVES = [
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
]
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def mesh(topology):
    """The chips of a topology that is not there: one if it has up to 8, else all."""
    # libtpu would ask a machine with a TPU for these; it reads them when it is loaded.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # Whatever is asked.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # In others, too.
    jax.config.update("jax_platforms", "cpu")  # Nothing here runs on a TPU.
    options = {"platform": "tpu"}
    if topology == "h100":
        described = pathlib.Path(__file__).with_name("h100.txtpb").read_text()
        options = {"platform": "cuda", "topology": "1x1x1", "target_config": described}
    devices = topologies.get_topology_desc(topology, **options).devices
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

    It is ``benchmarks.step.training_step``, and parameters and state are donated.
    ``extra`` are the shapes of extra arguments of ``tx``.
    """
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    state = placed(jax.eval_shape(tx.init, params), mesh)
    like = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(
        training_step(tx, loss_fn, write, scanned),
        donate_argnums=(0, 1),
        out_shardings=(like, None),
    )
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


READS_A_PART = "slice", "dynamic-slice", "gather"  # of the first operand
FUSIONS = "fusion", "fusion-start"
WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": 2}  # this one, into the first


class Program:
    """The computations of a compiled program, by its text.

    ``taken`` chooses the branch that counts, by its ``hbm``, for each conditional of a
    computation in turn; the last one also for all others.

    Attributes:
      entry: the name of the computation with which the program begins.
      lines: the instructions of each computation, in the order of the schedule. One has
        its name, the text of its type, its opcode, the names of its operands, and the
        text of its attributes.
    """

    def __init__(self, hlo, taken=(max,)):
        self._taken = taken
        found = re.findall(r"^(?:ENTRY )?%(\S+) .*{\n((?: .*\n)*)}", hlo, re.M)
        self.lines = {
            computation: [
                (name, result, opcode, named(operands) or operands, rest)
                for name, result, opcode, operands, rest in INSTRUCTION.findall(body)
            ]
            for computation, body in found
        }
        self._values = {
            computation: {line[0]: line for line in lines}
            for computation, lines in self.lines.items()
        }
        self._moved = {}
        self.entry = re.search(r"^ENTRY %(\S+)", hlo, re.M)[1]

    def moved(self, computation):
        """Bytes that a computation moves, by column."""
        if computation not in self._moved:
            total = Counter({"own": 0, "prefetched": 0, "written back": 0, "hbm": 0})
            for line in self.lines[computation]:
                total.update(self._moved_by(computation, *line))
            self._moved[computation] = total
        return self._moved[computation]

    def _moved_by(self, computation, name, result, opcode, operands, rest):
        if MOVES_NOTHING.fullmatch(opcode) or "ConcatBitcast" in rest:
            return {}
        if opcode == "conditional":
            branches = re.search(r"branch_computations={.*?}|true_.*false_\S+", rest)[0]
            moved = map(self.moved, named(branches))
            return self._choice(computation, name)(moved, key=lambda x: x["hbm"])
        if opcode == "while":
            moved = self.moved(re.search(r"body=%([\w.-]+)", rest)[1])
            return {k: self._turns(rest) * n for k, n in moved.items()}
        if opcode == "call":
            return self.moved(re.search(r"to_apply=%([\w.-]+)", rest)[1])
        if opcode in ("copy-start", "slice-start"):
            # The type is (to, from, …) of a copy, ((from), to, …) of a slice.
            n, space = list(arrays(result))[opcode == "slice-start"]
            return {"prefetched" if space else "written back": n, "hbm": n}
        values = self._values[computation]
        moved = list(self._written(computation, name))
        for i, operand in enumerate(operands):
            whole = list(arrays(values[operand][1]))
            n = self._used(computation, name, i)
            moved += [(n, whole[0][1])] if len(whole) == 1 else whole
        return {
            "own": sum(n for n, _ in moved),
            "hbm": sum(n for n, space in moved if space == 0),
        }

    def _choice(self, computation, name):
        """``max`` or ``min``, for a conditional."""
        lines = self.lines[computation]
        number = [line[0] for line in lines if line[2] == "conditional"].index(name)
        return self._taken[min(number, len(self._taken) - 1)]

    def _turns(self, rest):
        """How often the body of a loop runs."""
        known = re.search(r'known_trip_count":{"n":"(\d+)"', rest)
        if known:
            return int(known[1])
        condition = re.search(r"condition=%([\w.-]+)", rest)[1]
        constants = [line[3] for line in self.lines[condition] if line[2] == "constant"]
        return max(map(int, constants))

    def _read(self, computation, value):
        """Bytes that a computation reads of a value: less if it takes parts of it."""
        whole = size_of(self._values[computation][value][1])
        if value == self.lines[computation][-1][0]:  # The result, for the caller.
            return whole
        uses = sum(
            self._used(computation, name, i)
            for name, _, _, operands, _ in self.lines[computation]
            for i, operand in enumerate(operands)
            if operand == value
        )
        return min(uses, whole)

    def _used(self, computation, name, i):
        """Bytes that an instruction reads of one of its operands."""
        values = self._values[computation]
        _, result, opcode, operands, rest = values[name]
        if opcode == "bitcast":
            return self._read(computation, name)
        if opcode in READS_A_PART and i == 0:
            return size_of(result)
        if opcode in WRITES_A_PART and i == 0:
            return 0
        if opcode in FUSIONS:
            called = re.search(r"calls=%([\w.-]+)", rest)[1]
            for parameter, _, opcode, number, _ in self.lines[called]:
                if opcode == "parameter" and number == str(i):
                    return self._read(called, parameter)
        return size_of(values[operands[i]][1])

    def _written(self, computation, name):
        """Bytes and memory of each array that an instruction writes."""
        values = self._values[computation]
        _, result, opcode, operands, rest = values[name]
        outer = list(arrays(result))
        inner = outer
        if opcode == "bitcast":
            inner = self._written(computation, operands[0])
        elif opcode == "tuple":
            inner = [x for o in operands for x in self._written(computation, o)]
        elif opcode in WRITES_A_PART:
            inner = arrays(values[operands[WRITES_A_PART[opcode]]][1])
        elif opcode in FUSIONS:
            called = re.search(r"calls=%([\w.-]+)", rest)[1]
            inner = self._written(called, self.lines[called][-1][0])
            if opcode != "fusion":  # Its type is ((from), to, …).
                outer = outer[len(operands) :][: len(inner)]
        return [(n, space) for (n, _), (_, space) in zip(inner, outer, strict=True)]


def named(text):
    """The names in a part of a line."""
    return re.findall(r"%([\w.-]+)", text)


def size_of(types):
    """Bytes of all arrays in the text of a type."""
    return sum(n for n, _ in arrays(types))


def traffic(hlo, taken=(max,)):
    """Bytes that a compiled program moves, by column."""
    program = Program(hlo, taken)
    return program.moved(program.entry)


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
