"""A GPU's working time on the donated step, ours and optax's, by JAX's profiler.

``python -m benchmarks.kernels --model gpt2_small`` takes those rows of
``benchmarks.step`` that run on JAX. By the clock, the host limits a single step,
because it hands many buffers in and out. A program that computes the gradients too
takes that time anyway. So this measures the work of the device in one step:

- ``kernels``: kernels and copies that it ran.
- ``device ms``: the time that they took, all together.
- ``speed``: that time of the group's first row, divided by this one's.

XLA records kernels as graphs, and the profiler sees each graph as one event. With
``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` it sees the kernels.
"""

import pathlib
import tempfile

import jax

from benchmarks.measure import arguments, draw, report
from benchmarks.models import tree
from benchmarks.step import chosen

STEPS = 3


def on_device(run):
    """Seconds of each kernel and copy that the device has run in one step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
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


def measure(rows, grads):
    """A group's lines of the table."""
    shapes = jax.eval_shape(lambda: grads)
    first = None
    for row in rows:
        step = row.build(shapes, grads)
        step.run()  # A first run, so that everything is loaded.
        seconds = on_device(step.run)
        total = sum(seconds) / STEPS
        first = first or total
        yield {
            "name": row.name,
            "kernels": round(len(seconds) / STEPS),
            "device ms": round(total * 1e3, 3),
            "speed": round(first / total, 2),
        }


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="gpt2_small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", default="", help="rows with this in their name")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("This measures a GPU, and JAX has none here.")
    grads, lines = draw(tree(options.model, options.dtype), 0), []
    for group in chosen(options.only):
        by_jax = [row for row in group if row.name.split()[0] in ("optax", "gx")]
        lines += measure(by_jax, grads)
        jax.clear_caches()
    report(f"{options.model}, {options.dtype}", lines, options.json)


if __name__ == "__main__":
    main()
