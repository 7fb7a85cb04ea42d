"""The donated step: ours against optax's, Keras's and torch's.

``python -m benchmarks.step --whole dense transformer embedding`` times whole steps, as
users write them: loss, gradients and update in one program, and micro-batches in a
``scan``. The models are those of ``benchmarks.grid``, but smaller. Everything else
below is about steps from gradients to parameters.

``python -m benchmarks.step --model gpt2_small --dtype float32`` takes the chains group
by group. A group's rows are interleaved in one run. An addition that reads and writes
512 MB runs with them and measures the bandwidth. Then the group's memory is freed (at
most 21 N are alive at a time, 10.5 GB for GPT-2-small). N is the model's bytes. The
columns are:

- ``temp/N``, ``bytes/N``: the compiler's exact counts of temporaries, and of bytes that
  the loops of the program read and write. It counts both sides of a conditional.
- ``least/N``: the bytes that any program must move: the gradients as often as they have
  to be read (twice if a norm comes first), parameters and state in and out once.
- ``speed``: the time of the group's first row divided by this one's, by the minima and
  by the medians. On a shared machine only these ratios count.
- ``x bytes``, ``x least``: the fastest round, in units of the time that ``bytes/N`` and
  ``least/N`` take at the measured bandwidth.

optax's rows end in ``optax.apply_updates``, ours are ``gx.apply_gradients``. Keras runs
on JAX, and its step is jitted and donated like ours. torch runs on the device that JAX
has: by default (a loop over the leaves), with ``foreach``, and with ``fused``, which
its Adagrad has only on CPU. If one of them is not installed, its rows are left out.

``python -m benchmarks.step --model gpt2_small 1000 2000 --dtype bfloat16`` measures one
model after the other. A number stands for so many leaves with 256 numbers each. This is
the command for a GPU. 2,000 leaves take minutes to compile.

``--kernels`` measures the work of a GPU in one step, by JAX's profiler, of those rows
that run on JAX. By the clock, the host limits a single step, because it hands many
buffers in and out. A program that computes the gradients too takes that time anyway.
The columns are the number of ``kernels`` and copies, their time together, ``device
ms``, and its ``speed``. XLA records kernels as graphs, and the profiler sees each graph
as one event. With ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` it sees the kernels.
"""

import functools
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.measure import (
    arguments,
    bandwidth,
    draw,
    in_place,
    interleaved,
    report,
    times,
)
from benchmarks.models import TRAININGS, size, training, tree

PROFILED = 3  # Steps.
ROWS = 1000  # From which a batch of a whole step takes some.
MICRO = 4  # Pushes in a scan.
ADDED = 2**29  # Bytes of the array that measures the bandwidth.
FRESH, STALE = 2**30, -(2**30)  # Local steps that are always fresh, and always stale.


class Built(NamedTuple):
    """A step that is ready to be timed."""

    run: Callable[[], None]
    state: Any  # The model's shapes.
    compiled: jax.stages.Compiled | None = None


class Row(NamedTuple):
    """One line of the table."""

    name: str
    build: Callable[[Any, Any], Built]  # From the model's shapes and gradients.
    reads: int = 2  # How often the gradients have to be read.
    # The parts of parameters and state that must be read and written.
    touches: Callable[[Any, Any], Any] = lambda params, state: (params, state)


class Whole(NamedTuple):
    """One line of the table, for a whole step."""

    name: str
    build: Callable[[Any, Any], Built]  # From the model's shapes and parameters.


def donated(step, shapes, state, grads, **extra):
    """The run of a jitted ``step(params, state, grads) -> (params, state)``."""
    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(shapes, state, grads, **extra).compile()
    model = jax.tree.map(jnp.copy, grads), state
    run = in_place(compiled, model, grads, **extra)
    return Built(run, jax.eval_shape(lambda: state), compiled)


def optax_step(tx, params, state, grads, **extra):
    """As users of optax write it."""
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def gx_step(tx, params, state, grads, **extra):
    """As users of gradxform write it."""
    return gx.apply_gradients(tx, grads, state, params, **extra)


def training_step(tx, loss_fn, write=gx_step, scanned=False):
    """The step as users write it, loss and gradients inside.

    With ``scanned`` the arrays of the batch have one axis more, in front, and a scan
    over it makes a push of each part. The step returns the model and the loss.
    """

    def step(params, state, *batch, **extra):
        def push(model, batch):
            loss, grads = jax.value_and_grad(loss_fn)(model[0], *batch)
            return write(tx, *model, grads, **extra), loss

        model = params, state
        return jax.lax.scan(push, model, batch) if scanned else push(model, batch)

    return step


def trained(model, tx, write=gx_step, pushes=1):
    """A whole step of one of the ``TRAININGS``, or a scan of several."""

    def build(shapes, params):
        _, batch, loss_fn = training(model, jax.tree.leaves(shapes)[0].dtype, True)
        if pushes > 1:
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((pushes, *x.shape), x.dtype), batch
            )
        batch = [inputs(x) for x in batch]
        step = jax.jit(
            training_step(tx, loss_fn, write, pushes > 1), donate_argnums=(0, 1)
        )
        state = tx.init(params)
        compiled = step.lower(params, state, *batch).compile()
        parameters_and_state = jax.tree.map(jnp.copy, params), state
        run = in_place(lambda *xs: compiled(*xs)[0], parameters_and_state, *batch)
        return Built(run, jax.eval_shape(lambda: state), compiled)

    return build


def inputs(x):
    """Numbers of this shape: normal ones, or indices of the first rows."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(0), x.shape, 0, ROWS, x.dtype)
    return jax.random.normal(jax.random.key(0), x.shape, x.dtype)


def by_optax(tx):
    """The step that users of optax write."""
    step = functools.partial(optax_step, tx)
    return lambda shapes, grads: donated(step, shapes, tx.init(grads), grads)


def by_gx(tx, **extra):
    """Our step; if there is a gate, at this local step."""
    step = functools.partial(gx_step, tx)
    return lambda shapes, grads: donated(
        step, shapes, tx.init(grads), grads, **jax.tree.map(jnp.int32, extra)
    )


def by_keras(tx=None):
    """Keras's Adagrad with its own clip, or ours, without the model around it."""

    def build(shapes, grads):
        os.environ["KERAS_BACKEND"] = "jax"
        import keras

        from gradxform.keras import Optimizer

        theirs = keras.optimizers.Adagrad(0.1, global_clipnorm=1.0)
        optimizer = theirs if tx is None else Optimizer(tx)
        optimizer.build(
            [
                keras.Variable("zeros", x.shape, str(x.dtype))
                for x in jax.tree.leaves(shapes)
            ]
        )

        def step(params, state, grads):
            return optimizer.stateless_apply(state, grads, params)

        state = [variable.value for variable in optimizer.variables]
        return donated(step, jax.tree.leaves(shapes), state, jax.tree.leaves(grads))

    return build


def by_torch(**kind):
    """Torch's Adagrad in one of its forms; its clip scales the gradients in place."""

    def build(shapes, grads):
        # Threads that spin while they wait for each other take cores from XLA and from
        # one another. On a busy machine this made these steps tens of times as slow.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        import torch

        del grads
        device = "cpu" if jax.default_backend() == "cpu" else "cuda"
        params = [
            torch.nn.Parameter(
                torch.zeros(x.shape, dtype=getattr(torch, str(x.dtype)), device=device)
            )
            for x in jax.tree.leaves(shapes)
        ]
        for p in params:
            p.grad = torch.randn_like(p)
        adagrad = torch.optim.Adagrad(
            params, lr=0.1, initial_accumulator_value=0.1, **kind
        )

        def run():
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            adagrad.step()
            if device == "cuda":
                torch.cuda.synchronize()

        return Built(run, shapes)

    return build


OPTAX_CLIP = optax.clip_by_global_norm(1.0)
OPTAX_ADAGRAD = optax.chain(OPTAX_CLIP, optax.adagrad(0.1))
OPTAX_NOVOGRAD = optax.chain(OPTAX_CLIP, optax.novograd(0.1))
CLIP = gx.clip_by_global_norm(1.0)
ADAGRAD = gx.adagrad(0.1, global_clipnorm=1.0)
NEVER = 2**20  # A number of pushes that is never reached, so the sum is never complete.

# The first row of a group is the reference for the others.
GROUPS = {
    "clip + adagrad": [
        Row("optax clip + adagrad", by_optax(OPTAX_ADAGRAD)),
        Row("gx clip + adagrad", by_gx(optax.chain(CLIP, gx.adagrad(0.1)))),
        Row("gx adagrad(global_clipnorm)", by_gx(ADAGRAD)),
        Row("keras Adagrad(global_clipnorm)", by_keras()),
        Row("keras Optimizer(gx.adagrad)", by_keras(ADAGRAD)),
        Row("torch clip + Adagrad", by_torch()),
        Row("torch clip + Adagrad(foreach)", by_torch(foreach=True)),
        Row("torch clip + Adagrad(fused)", by_torch(fused=True)),
    ],
    "adagrad": [
        Row("optax adagrad", by_optax(optax.adagrad(0.1)), reads=1),
        Row("gx adagrad", by_gx(gx.adagrad(0.1)), reads=1),
    ],
    "clip + novograd": [
        Row("optax clip + novograd", by_optax(OPTAX_NOVOGRAD)),
        Row("gx clip + novograd", by_gx(optax.chain(CLIP, gx.novograd(0.1)))),
        Row("gx novograd(global_clipnorm)", by_gx(gx.novograd(0.1, global_clipnorm=1))),
    ],
    "novograd": [
        Row("optax novograd", by_optax(optax.novograd(0.1))),
        Row("gx novograd", by_gx(gx.novograd(0.1))),
    ],
    "clip + adamw": [
        Row("optax clip + adamw", by_optax(optax.chain(OPTAX_CLIP, optax.adamw(0.1)))),
        Row("gx clip + optax adamw", by_gx(optax.chain(CLIP, optax.adamw(0.1)))),
    ],
    "late pushes": [
        Row("gx adagrad(global_clipnorm)", by_gx(ADAGRAD)),
        Row("gx drop_stale, fresh", by_gx(gx.drop_stale(ADAGRAD, 1), local_step=FRESH)),
        Row(
            "gx drop_stale, stale",
            by_gx(gx.drop_stale(ADAGRAD, 1), local_step=STALE),
            reads=0,
            touches=lambda params, state: (),
        ),
        Row(
            "gx accumulator, acting",
            by_gx(gx.conditional_accumulator(ADAGRAD, 1), local_step=FRESH),
            reads=3,  # The sum has to be read twice as well, once for the clip.
        ),
    ],
    "added pushes": [
        Row(
            "optax MultiSteps, adding",
            by_optax(optax.MultiSteps(OPTAX_ADAGRAD, NEVER).gradient_transformation()),
            reads=1,
            touches=lambda params, state: state.acc_grads,
        ),
        Row(
            "gx accumulator, adding",
            by_gx(gx.conditional_accumulator(ADAGRAD, NEVER), local_step=FRESH),
            reads=1,
            touches=lambda params, state: state.accumulated,
        ),
    ],
}


def whole(model):
    """The groups of whole steps of one of the ``TRAININGS``, by name."""
    chains = {
        "clip + adagrad": (
            OPTAX_ADAGRAD,
            {
                "clip + adagrad": optax.chain(CLIP, gx.adagrad(0.1)),
                "adagrad(global_clipnorm)": ADAGRAD,
            },
        ),
        "clip + novograd": (
            OPTAX_NOVOGRAD,
            {
                "clip + novograd": optax.chain(CLIP, gx.novograd(0.1)),
                "novograd(global_clipnorm)": gx.novograd(0.1, global_clipnorm=1),
            },
        ),
        "clip + adamw": (
            optax.chain(OPTAX_CLIP, optax.adamw(0.1)),
            {"clip + optax adamw": optax.chain(CLIP, optax.adamw(0.1))},
        ),
    }
    micro = {
        "adam": (optax.adam(0.1),) * 2,
        "clip + adamw": (
            chains["clip + adamw"][0],
            *chains["clip + adamw"][1].values(),
        ),
    }
    found = {
        name: [
            Whole(f"optax {name}", trained(model, theirs, optax_step)),
            *(Whole(f"gx {mine}", trained(model, tx)) for mine, tx in ours.items()),
        ]
        for name, (theirs, ours) in chains.items()
    }
    for name, (theirs, ours) in micro.items():
        multi = optax.MultiSteps(theirs, MICRO).gradient_transformation()
        sums = gx.accumulate(ours, MICRO)
        found[f"{MICRO} micro-batches, {name}"] = [
            Whole(
                f"optax MultiSteps({name})", trained(model, multi, optax_step, MICRO)
            ),
            Whole(f"gx accumulate({name})", trained(model, sums, pushes=MICRO)),
        ]
    return found


def available(row):
    """Whether the row can be built here; prints it if not."""
    library, backend = row.name.split()[0], jax.default_backend()
    why = None
    if library in ("keras", "torch") and not importlib.util.find_spec(library):
        why = "not installed"
    elif library == "torch" and (
        backend not in ("cpu", "gpu") or (backend == "gpu" and "fused" in row.name)
    ):
        why = f"not on {backend.upper()}"
    if why:
        print(f"left out: {row.name} ({why})")
    return why is None


def least_bytes(row, shapes, state):
    """The bytes that any program for this row must read and write."""
    touched = row.touches(shapes, state)
    return row.reads * size(shapes) + 2 * size(touched)


def measure(rows, grads, rounds, added=ADDED):
    """A group's lines of the table, and the bandwidth in bytes a second."""
    shapes = jax.eval_shape(lambda: grads)
    built = {row.name: row.build(shapes, grads) for row in rows}
    runs = {name: step.run for name, step in built.items()}
    seconds = interleaved({**runs, "bandwidth": bandwidth(added)}, rounds)
    rate = 2 * added / min(seconds["bandwidth"])
    n, first, lines = size(shapes), rows[0].name, []
    for row in rows:
        step, line = built[row.name], {"name": row.name}
        moved = {}
        if step.compiled:
            temporaries = step.compiled.memory_analysis().temp_size_in_bytes
            line["temp/N"] = round(temporaries / n, 3)
            if isinstance(row, Row):
                moved["bytes"] = step.compiled.cost_analysis()["bytes accessed"]
        if isinstance(row, Row):
            moved["least"] = least_bytes(row, shapes, step.state)
        line |= {f"{k}/N": round(moved[k] / n, 2) for k in moved}
        against = None if row.name == first else seconds[first]
        line |= times(seconds[row.name], against)
        floors = {k: nbytes / rate for k, nbytes in moved.items() if nbytes}
        line |= {
            f"x {k}": round(min(seconds[row.name]) / floor, 2)
            for k, floor in floors.items()
        }
        if against:
            line["against"] = first
        lines.append(line)
    return lines, rate


def on_device(run):
    """Seconds of each kernel and copy that a GPU runs for some steps."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                run()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return [
        event.duration_ns * 1e-9
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    ]


def kernels(rows, grads):
    """A group's lines of the table of kernels."""
    shapes, first = jax.eval_shape(lambda: grads), None
    for row in rows:
        if row.name.split()[0] in ("optax", "gx"):
            run = row.build(shapes, grads).run
            run()  # A first run, so that everything is loaded.
            seconds = on_device(run)
            total = sum(seconds) / PROFILED
            first = first or total
            yield {
                "name": row.name,
                "kernels": round(len(seconds) / PROFILED),
                "device ms": round(total * 1e3, 3),
                "speed": round(first / total, 2),
            }


def chosen(word="", groups=None):
    """Groups of the rows whose names contain the word; always with the first row."""
    for group, (first, *others) in (groups or GROUPS).items():
        named = [row for row in others if word in f"{group}: {row.name}"]
        if named or word in f"{group}: {first.name}":
            yield [row for row in (first, *named) if available(row)]


def main():
    """Prints the table."""
    parser = arguments(__doc__, rounds=12)
    parser.add_argument("--model", nargs="+", default=["gpt2_small"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--kernels", action="store_true", help="those of a GPU")
    parser.add_argument("--whole", nargs="+", choices=TRAININGS, help="whole steps")
    options = parser.parse_args()
    if options.kernels and jax.default_backend() != "gpu":
        raise SystemExit("--kernels measures a GPU, and JAX has none here.")
    for model in options.whole or options.model:
        if options.whole:
            shapes = training(model, options.dtype, True).params
            grads, groups = (
                jax.tree.map(lambda x: 0.02 * inputs(x), shapes),
                whole(model),
            )
        else:
            shapes = tree(model, options.dtype)
            grads, groups = draw(shapes, 0), GROUPS
        lines, rates = [], []
        for rows in chosen(options.only, groups):
            if options.kernels:
                lines += kernels(rows, grads)
            else:
                measured, rate = measure(rows, grads, options.rounds)
                lines += measured
                rates.append(rate)
            jax.clear_caches()  # Steps over thousands of leaves hold gigabytes.
        name = f"{int(model):,} leaves" if model.isdigit() else model
        path = options.json
        if path and len(options.whole or options.model) > 1:
            path = path.with_stem(f"{path.stem}_{model}")
        title = f"{name}, {options.dtype}, N = {size(shapes) / 1e6:.1f} MB"
        if rates:
            title += f", {min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f} GB/s"
        report(title, lines, path, bandwidth=rates)


if __name__ == "__main__":
    main()
