"""How long a loop over layers on the host takes, by the schedule of a TPU's compiler.

It needs libtpu, like ``benchmarks.compilers``, and runs no step. The steps are those of
``benchmarks.largest`` with parameters on the host. The compiler orders the instructions
of a loop, and estimates the cycles of each. This program plays an iteration of the loop
in that order. An instruction takes its cycles. The link between the host and the chip
has a queue for each direction. A transfer takes its bytes at the rate of the link, and
the instruction that ends it waits for it. Every transfer ends in the iteration in which
it starts, so all iterations take equally long. What the compiler copies between HBM and
VMEM beside the arithmetic takes no time here.

- GB/s: the rate of the link in each direction.
- ms: an iteration of the loop.
- arithmetic, read, write: the ms that it would take if it did only this.
- ratio: of these ms to the largest of the three.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp

from benchmarks.compilers import Program, arrays, mesh, placed
from benchmarks.measure import arguments, report
from benchmarks.trainings import LENGTH, TRAININGS, set_small_tiles, shapes, step_of

# A v5e has four units of 128 x 128 multipliers, so this clock gives its 197e12
# operations a second. Its compiler gives a product of two matrices of 4,096 in bfloat16
# 1.03 times the cycles that such units need.
CLOCK = 1.5e9
HOST = 5  # The number of its memory space.
CYCLES = re.compile(r'estimated_cycles":"(\d+)"')
# These name an array and do nothing with it.
NAMES = "parameter", "tuple", "get-tuple-element", "bitcast"
ON_HOST = [name for name, training in TRAININGS.items() if training.params_too]


def on_host(types):
    """Whether the text of a type has an array on the host."""
    return any(space == HOST for _, space in arrays(types))


def transfer(opcode, result, operands):
    """The way of a transfer and its bytes, by the texts of its types.

    The way is "read" from the host, "write" to it, or "" for one on the chip.
    """
    if opcode == "dynamic-update-slice-start":
        target, source = operands[:2]
        ((size, _),) = arrays(source)
        to_host = on_host(target)
    else:
        source = operands[0]
        # The type is (to, from, …) of a copy, ((from, …), to, …) of a slice.
        place = 0 if opcode == "copy-start" else len(operands)
        size, space = list(arrays(result))[place]
        to_host = space == HOST
    if on_host(source) == to_host:
        return "", size
    return "write" if to_host else "read", size


def played(program, body, rate):
    """The columns of a loop with this body, at so many bytes a second."""
    lines = program.lines[body]
    types = {name: result for name, result, *_ in lines}
    now, alone = 0.0, Counter({"arithmetic": 0.0, "read": 0.0, "write": 0.0})
    free, ends = Counter(), {}  # When a queue is empty, when a transfer ends.
    for name, result, opcode, operands, rest in lines:
        given = [types[x] for x in operands if x in types]
        if opcode.endswith("-start"):
            way, size = transfer(opcode, result, given)
            seconds = size / rate if way else 0.0
            ends[name] = free[way] = max(now, free[way]) + seconds
            alone[way] += seconds
        elif opcode.endswith("-done"):
            now = max(now, ends.pop(operands[0]))
        elif opcode not in NAMES:
            if any(map(on_host, [result, *given])):
                raise ValueError(f"{name} is a transfer that nothing can run beside.")
            cycles = CYCLES.search(rest)
            seconds = int(cycles[1]) / CLOCK if cycles else 0.0
            now += seconds
            alone["arithmetic"] += seconds
    if ends:
        raise ValueError(f"These transfers do not end in the iteration: {[*ends]}.")
    del alone[""]
    columns = {"ms": now, **alone}
    columns = {key: round(1e3 * seconds, 2) for key, seconds in columns.items()}
    return columns | {"ratio": round(now / max(alone.values()), 3)}


def loops(program):
    """The bodies of the loops over arrays on the host, in their order."""
    return [
        re.search(r"body=%([\w.-]+)", rest)[1]
        for _, result, opcode, _, rest in program.lines[program.entry]
        if opcode == "while" and on_host(result)
    ]


def compiled(training, layers, shape):
    """A training's compiled step on tokens of this shape."""
    chip = mesh("v5e:2x2")
    tokens = placed(jax.ShapeDtypeStruct(shape, jnp.int32), chip)
    lowered = step_of(training).lower(*shapes(training, layers, chip), tokens)
    return lowered.compile()


def main():
    """Prints a table of the loops at each rate."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=ON_HOST, choices=ON_HOST)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8, help="of 1,024 tokens")
    parser.add_argument("--rate", nargs="+", type=float, default=[16e9, 32e9, 64e9])
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    set_small_tiles()
    rows = []
    for name in options.only:
        step = compiled(TRAININGS[name], options.layers, (options.sequences, LENGTH))
        program = Program(step.as_text())
        for loop, body in zip(("forward", "backward"), loops(program), strict=True):
            for rate in options.rate:
                row = {"name": f"{name}: {loop}", "GB/s": rate / 1e9}
                rows.append(row | played(program, body, rate))
    report("An iteration of a loop on a TPU v5e", rows, options.json)


if __name__ == "__main__":
    main()
