"""Optimizers of matrices on a mesh, with ``gx.whole_matrices`` and by XLA alone.

Like ``benchmarks.compilers`` it needs libtpu, and no TPU. Parameters and gradients are
cut by both axes of the mesh, as for FSDP and tensor parallelism. The state lies where
``gx.abstract_state`` says. The step is donated.

Beside optax's Muon these are the small optimizers of the tests: as people write them,
with bases and roots that are computed every second step. Both branches of a conditional
count, so the figures are those of a step that computes them.

- collectives: of the whole program.
- traffic: bytes of the results of all collectives on one chip, in N, the parameters'
  bytes on all chips.
- temp: temporary HBM on one chip, in N.
- flops: of one chip, in 1e9.
- explicit: what JAX says on explicit axes without ``whole_matrices``.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

import gradxform as gx
from benchmarks import compilers, pod
from benchmarks.measure import arguments, report
from tests.training.matrix_optimizers import ALL

OF_STACK = MuonDimensionNumbers(1, 2)


def transformer(layers, width):
    """Stacks, cut by rows and columns alternately, and dimension numbers."""
    shapes = {
        "qkv": ((layers, width, 8, 3 * width // 8), P(None, "x", "y")),
        "out": ((layers, width, width), P(None, "y", "x")),
        "up": ((layers, width, 4 * width), P(None, "x", "y")),
        "down": ((layers, 4 * width, width), P(None, "y", "x")),
        "norm": ((layers, width), P()),
    }
    numbers = dict.fromkeys(shapes, OF_STACK)
    numbers |= {"qkv": MuonDimensionNumbers(1, 3), "norm": None}
    return shapes, muon(0.1, muon_weight_dimension_numbers=numbers)


def leaves(layers, width):
    """A leaf for each layer."""
    sizes = {"o": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
    return {
        f"{name}{n}": (shape, P("x", "y"))
        for name, shape in sizes.items()
        for n in range(layers)
    }, muon(0.1)


def stack(layers, width, spec=P(None, "x", "y")):  # noqa: B008
    """One stack."""
    shapes = {"w": ((layers, width, width), spec)}
    return shapes, muon(0.1, muon_weight_dimension_numbers={"w": OF_STACK})


def chips(sizes):
    """Those of v5e, which are not there."""
    return compilers.mesh(f"v5e:{sizes[0]}x{sizes[1]}").devices.reshape(sizes)


def step(model, tx, sizes, axis_type, wrap, dtype=jnp.float32):
    """The compiled step on v5e, and the bytes of the parameters."""
    traced, size = lowered(model, tx, sizes, axis_type, wrap, dtype)
    return traced.compile(), size


def lowered(model, tx, sizes, axis_type, wrap, dtype=jnp.float32):
    """The step before XLA compiles it, and the bytes of the parameters."""
    mesh = Mesh(chips(sizes), ("x", "y"), axis_types=(axis_type,) * 2)
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in model.items()
    }
    if wrap:
        is_automatic = axis_type == AxisType.Auto
        shardings = {name: p.sharding for name, p in params.items()}
        tx = gx.whole_matrices(tx, shardings if is_automatic else None)
    state = gx.abstract_state(tx, params)

    def update(params, state, grads):
        return gx.apply_gradients(tx, grads, state, params)

    like = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=like)
    traced = jitted.lower(params, state, params)
    return traced, sum(x.size * x.dtype.itemsize for x in params.values())


def apart(layers, width):
    """One leaf for each layer."""
    return {f"w{n}": ((width, width), P("x", "y")) for n in range(layers)}


LAYERS, WIDTH = 16, 256  # Those of all optimizers.
# The shapes, the optimizer, and the mesh.
MUON = {
    "4 x 4, transformer, 16 layers of width 512": (*transformer(16, 512), (4, 4)),
    "4 x 4, 12 layers of width 512, a leaf each": (*leaves(12, 512), (4, 4)),
    "16 x 16, a stack of 256 layers of width 512": (*stack(256, 512), (16, 16)),
    "16 x 16, a stack of 32 layers of width 512": (*stack(32, 512), (16, 16)),
}


def of_optimizers():
    """Each optimizer, for a stack and for a leaf each."""
    stacked, of_stack = stack(LAYERS, WIDTH)
    models = {"a stack": stacked, "a leaf each": apart(LAYERS, WIDTH)}
    return {
        "muon, a stack": (stacked, of_stack, (4, 4)),
        "muon, a leaf each": (models["a leaf each"], muon(0.1), (4, 4)),
    } | {
        f"{name}, {kind}": (model, make(), (4, 4))
        for name, make in ALL.items()
        for kind, model in models.items()
    }


def on_explicit_axes(model, tx, sizes):
    """What JAX says there without ``whole_matrices``."""
    try:
        lowered(model, tx, sizes, AxisType.Explicit, wrap=False)
    except Exception as error:  # JAX does not export the type.
        return type(error).__name__
    return "runs"


def row(name, model, tx, sizes):
    """A line of the table."""
    found = {"name": name}
    for wrap, by in ((True, ""), (False, "XLA ")):
        program, size = step(model, tx, sizes, AxisType.Auto, wrap)
        moved = pod.collectives(program.as_text())
        temporary = program.memory_analysis().temp_size_in_bytes
        found |= {
            f"{by}collectives": moved.total(),
            f"{by}traffic": round(pod.nbytes(moved) / size, 4),
            f"{by}temp": round(temporary / size, 4),
            f"{by}flops": round(program.cost_analysis()["flops"] / 1e9, 2),
        }
    return found | {"explicit": on_explicit_axes(model, tx, sizes)}


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    cases = MUON | of_optimizers()
    rows = [row(name, *case) for name, case in cases.items() if options.only in name]
    report(
        f"{LAYERS} layers of width {WIDTH}, on 4 x 4, or as named", rows, options.json
    )


if __name__ == "__main__":
    main()
