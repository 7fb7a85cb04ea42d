"""The largest transformer that a machine with one chip trains, by its compiler.

``python -m benchmarks.largest --machine v5e`` compiles whole steps, and runs none.
Like ``benchmarks.compilers`` it needs libtpu, or for ``--machine h100`` CUDA's JAX. On
a described GPU JAX drops the host's memory, so trainings with arrays there are left
out. The layers of the transformer are scanned, with width 2,048 and ``jax.checkpoint``.
A batch is one sequence of 1,024 tokens. A training gets as many layers as fit both
memories, the chip's and nine tenths of the host's. The compiler of a TPU refuses a
program that needs more than the chip has, and says how much it needs. 8 bits on the
host need a flag of libtpu that makes other trainings larger on a v6e. So name such a
training alone: ``--only "8 bits of state, layers, all of it on the host"``.

First it prints what will fit by arithmetic (``benchmarks.fits``), and what each
training keeps of a model with ``--layers``. ``--plan`` prints that alone, for the
machine at hand: nothing is compiled, and nothing runs.

``--run NAME --layers N`` trains such a model on the device that is there, and prints
what was measured: the losses, the median time of a step, the device's own peak, and
tokens a second. ``--compiler-options xla_gpu_enable_latency_hiding_scheduler=true``
compiles the step with options of XLA.

``--check`` asks whether the compiler is right, on the device that is there. It trains
by layers with arrays on the host, and again with all of them on the device. It compares
the losses of the steps, the loss by ``gradxform.evaluate``, and the change of each
layer. It says "are equal", or by how much they differ, and ends with 1 if one is wrong.
Run it after an upgrade of JAX or of a driver. All ``--layers`` must fit the device.

- parameters: in billions.
- chip GiB: what the step needs on the chip: parameters, state and temporaries.
- host GiB: what it keeps in the host's memory.
- move s: the time in which this comes to the chip and goes back, parameters twice to
  the chip, at 16, 32 and 64 GB/s, one after the other. A link that moves in both
  directions at once takes about half of it.
- free from: the tokens of a step whose arithmetic takes as long, at each of these
  rates, on a chip that does half of its bfloat16 peak. A token takes 8 operations for
  each parameter: 2 forward, 2 again since layers are computed again, and 4 backward.
- sequence GiB: what each further sequence of a batch keeps, the inputs of all layers.

``--json FILE`` adds the trainings that a file of this machine lacks, each when it is
known. ``--draw OUT FILE ...`` draws such files, of one chip on several hosts:
``OUT-light.svg`` and ``OUT-dark.svg``.
"""

import functools
import json
import math
import pathlib
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import fits, host_check
from benchmarks.compilers import mesh, placed
from benchmarks.measure import arguments, report
from benchmarks.models import size, transformer
from benchmarks.plot import WIDTH, save
from benchmarks.trainings import (
    HOST_SHARE,
    LENGTH,
    MACHINES,
    MODEL,
    TRAININGS,
    drawn_model,
    largest,
    set_small_tiles,
    shapes,
    state_of,
    step_of,
)


def lower(training, layers, chip):
    """The step of a training with so many layers."""
    tokens = placed(jax.ShapeDtypeStruct((1, LENGTH), jnp.int32), chip)
    return step_of(training).lower(*shapes(training, layers, chip), tokens)


# The two ways in which the compiler of a TPU says what a program would need.
REFUSED = re.compile(r"\(([\d.]+)G\) exceeds available HBM|Used ([\d.]+)G of")


def needed(lowered, memory):
    """GiB that a step needs on the chip, and on the host if it is compiled."""
    try:
        found = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        refused = REFUSED.search(str(error))
        if not refused:
            raise
        # The number is rounded.
        return max(float(refused[1] or refused[2]), memory + 0.005), None
    return kept(found, memory)


def kept(found, memory):
    """GiB that a compiled step needs on the chip, and on the host."""
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    # The sum has some reserve of the compiler's. The peak also counts the host.
    total = found.argument_size_in_bytes + found.temp_size_in_bytes
    total += found.output_size_in_bytes - found.alias_size_in_bytes
    chip = min(total, found.peak_memory_in_bytes) / 2**30
    return min(chip, memory), host / 2**30  # What it accepts fits.


def row(name, training, machine):
    """The line of the table for a training on a machine."""
    devices, host = mesh(machine.target), HOST_SHARE * machine.host

    def filled(layers):
        """The larger share of a memory that arrays alone take."""
        parts = [[], []]
        for x in jax.tree.leaves(shapes(training, layers, devices)):
            parts[x.sharding.memory_kind == "pinned_host"].append(x)
        on_chip, on_host = (size(part) / 2**30 for part in parts)
        return max(on_chip / machine.memory, on_host / host)

    @functools.cache
    def found(layers):
        return needed(lower(training, layers, devices), machine.memory)

    def need(layers):
        if (share := filled(layers)) > 1:  # No compiler is needed to see this.
            return share
        on_chip, on_host = found(layers)
        return max(on_chip / machine.memory, (on_host or 0) / host)

    first = math.floor(8 / filled(8))
    layers = largest(need, 1, first)
    on_chip, on_host = found(layers)
    model = jax.tree.leaves(transformer(layers, **MODEL))
    parameters = sum(x.size for x in model)
    itemsize = jnp.dtype(training.dtype).itemsize
    moved = 2 * on_host * 2**30
    moved += parameters * itemsize if training.params_too else 0  # Forward pass.
    seconds = [moved / rate for rate in (16e9, 32e9, 64e9)]
    tokens = [s * machine.peak / 2 / (8 * parameters) for s in seconds]
    sequence = layers * LENGTH * MODEL["width"] * itemsize / 2**30
    return {
        "name": name,
        "dtype": training.dtype,
        "layers": layers,
        "parameters": round(parameters / 1e9, 2),
        "chip GiB": round(on_chip, 2),
        "host GiB": round(on_host, 2),
        "move s": ", ".join(f"{s:.2f}" for s in seconds) if on_host else "",
        "free from": ", ".join(f"{n:,.0f}" for n in tokens) if on_host else "",
        "sequence GiB": round(sequence, 3),
    }


def draw(files, theme):
    """The figure: a training's name, and a bar for each machine if they differ."""
    from matplotlib.figure import Figure

    machines = [results["title"].split(", ")[-1] for results in files]
    known = [{line["name"]: line for line in results["rows"]} for results in files]
    figure = Figure((WIDTH, 5.6), layout="constrained")
    ax = figure.subplots()
    place, before = 0.0, None
    for name, first in known[0].items():
        dtype = first["dtype"]
        if dtype != before:
            place += 0.5
            at = (0, place)
            ax.annotate(f"parameters in {dtype}", at, weight="bold", va="center")
            place += 0.8
        colour = theme["gx"] if "optax" not in name else theme["keras"]
        ax.annotate(name, (0, place), va="center")
        sizes = [rows[name]["parameters"] for rows in known]
        differ = len(set(sizes)) > 1
        bars = list(zip(sizes, machines, strict=True))
        for billions, machine in bars if differ else bars[:1]:
            place += 0.6
            ax.barh(place, billions, color=colour, height=0.5)
            said = f" {billions:.1f} billion" + (f", {machine}" if differ else "")
            ax.annotate(said, (billions, place), va="center")
        place, before = place + 0.8, dtype
    chip = files[0]["title"].split(", ")[0]
    ax.set_title(f"The largest model on one {chip}", fontsize=11)
    largest = max(line["parameters"] for rows in known for line in rows.values())
    ax.set_xlim(0, 1.6 * largest)
    ax.set_ylim(place - 0.3, 0)
    ax.grid(visible=False)
    ax.set_axis_off()
    return figure


def run(training, layers, sequences, steps, options):
    """Trains a model on the device that is there: what was measured."""
    device = jax.devices()[0]
    start = time.perf_counter()
    params, tokens = drawn_model(training, layers, sequences)
    state = state_of(training, params)
    seconds_to_make = time.perf_counter() - start
    lowered = step_of(training).lower(params, state, tokens)
    step = lowered.compile(compiler_options=options)
    number = sum(x.size for x in jax.tree.leaves(params))
    on_host = step.memory_analysis().host_argument_size_in_bytes
    losses, times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "parameters": round(number / 1e9, 2),
        "losses": ", ".join(f"{x:.4f}" for x in losses),
        "make s": round(seconds_to_make, 1),
        "ms": round(1e3 * seconds),
        "peak GiB": peak and round(peak / 2**30, 2),
        "host GiB": round(on_host / 2**30, 2),
        "tokens/s": round(tokens.size / seconds),
    }


def main():
    """Prints the tables of a machine, draws one, trains a model, or checks a device."""
    parser = arguments(__doc__)
    parser.add_argument("--machine", default="v5e", choices=MACHINES)
    parser.add_argument("--run", choices=TRAININGS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--compiler-options", nargs="+", default=[], metavar="KEY=VALUE"
    )
    parser.add_argument("--only", nargs="+", default=TRAININGS, choices=TRAININGS)
    parser.add_argument("--draw", nargs="+", type=pathlib.Path, metavar="OUT FILE ...")
    options = parser.parse_args()
    if options.draw:
        out, *paths = options.draw
        files = [json.loads(path.read_text()) for path in paths]
        save(lambda theme: draw(files, theme), out, 9)
        return
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    names = [options.run] if options.run else options.only
    if small_tiles := all(TRAININGS[name].small_tiles for name in names):
        set_small_tiles()
    at_hand = options.plan or options.run or options.check
    if not at_hand:
        jax.config.update("jax_platforms", "cpu")  # The chip is only described.
    machine = fits.here() if at_hand else MACHINES[options.machine]
    fits.plan(machine, options.layers, options.sequences if at_hand else 1)
    if options.plan:
        return
    if options.check:
        names = [name for name in names if TRAININGS[name].on_host]
        rows = [
            {"name": name}
            | host_check.check(
                TRAININGS[name], options.layers, options.sequences, options.steps
            )
            for name in names
        ]
        report("arrays on the host, and on the device", rows, options.json)
        sys.exit(not all(line["is"] == "right" for line in rows))
    if options.run:
        given = dict(pair.split("=", 1) for pair in options.compiler_options)
        measured = run(
            TRAININGS[options.run],
            options.layers,
            options.sequences,
            options.steps,
            given,
        )
        report(options.run, [measured], options.json)
        return
    path, rows = options.json, []
    if path and path.exists():
        rows = json.loads(path.read_text())["rows"]
    known = {line["name"]: line for line in rows}
    for name, training in TRAININGS.items():
        can_count = machine.target != "h100" or not training.on_host
        can_count &= training.small_tiles == small_tiles
        if can_count and name in options.only and name not in known:
            known[name] = row(name, training, machine)
            rows = [known[name] for name in TRAININGS if name in known]
            report(machine.title, rows, path)


if __name__ == "__main__":
    main()
