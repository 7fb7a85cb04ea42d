"""Muon on a mesh, with ``gx.whole_matrices`` and without: what travels.

Like ``benchmarks.compilers`` it needs libtpu, and no TPU. Parameters, state and
gradients are cut by both axes of the mesh, as for FSDP and tensor parallelism; heads
are apart. The step is donated.

- collectives: of the whole program.
- traffic: bytes of the results of all collectives on one chip, in N, the parameters'
  bytes on all chips.
- temp: temporary HBM on one chip, in N.
- flops: of one chip, in 1e9.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon

import gradxform as gx
from benchmarks import compilers, pod
from benchmarks.measure import arguments, report

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
    return shapes, numbers | {"qkv": MuonDimensionNumbers(1, 3), "norm": None}


def leaves(layers, width):
    """A leaf for each layer."""
    sizes = {"o": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
    return {
        f"{name}{n}": (shape, P("x", "y"))
        for name, shape in sizes.items()
        for n in range(layers)
    }, None


def stack(layers, width, spec=P(None, "x", "y")):  # noqa: B008
    """One stack."""
    return {"w": ((layers, width, width), spec)}, {"w": OF_STACK}


def step(model, numbers, sizes, axis_type, wrap, dtype=jnp.float32):
    """The compiled step of Muon on v5e, and the bytes of the parameters."""
    devices = compilers.mesh(f"v5e:{sizes[0]}x{sizes[1]}").devices.reshape(sizes)
    mesh = Mesh(devices, ("x", "y"), axis_types=(axis_type,) * 2)
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in model.items()
    }
    tx = muon(0.1, muon_weight_dimension_numbers=numbers)

    state = gx.abstract_state(tx, params)
    if wrap:
        is_automatic = axis_type == AxisType.Auto
        shardings = {name: p.sharding for name, p in params.items()}
        tx = gx.whole_matrices(tx, shardings if is_automatic else None)

    def update(params, state, grads):
        return gx.apply_gradients(tx, grads, state, params)

    like = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(update, donate_argnums=(0, 1), out_shardings=like)
    program = jitted.lower(params, state, params).compile()
    return program, sum(x.size * x.dtype.itemsize for x in params.values())


CASES = {
    "4 x 4, transformer, 16 layers of width 512": (transformer(16, 512), (4, 4)),
    "4 x 4, 12 layers of width 512, a leaf each": (leaves(12, 512), (4, 4)),
    "16 x 16, a stack of 256 layers of width 512": (stack(256, 512), (16, 16)),
    "16 x 16, a stack of 32 layers of width 512": (stack(32, 512), (16, 16)),
}


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    rows = []
    for name, (model, sizes) in CASES.items():
        for wrap in (False, True) if options.only in name else ():
            program, size = step(*model, sizes, AxisType.Auto, wrap)
            found = pod.collectives(program.as_text())
            temporary = program.memory_analysis().temp_size_in_bytes
            rows.append(
                {
                    "name": f"{name}{', whole_matrices' if wrap else ''}",
                    "collectives": pod.by_kind(found),
                    "traffic": round(pod.nbytes(found) / size, 4),
                    "temp": round(temporary / size, 4),
                    "flops": round(program.cost_analysis()["flops"] / 1e9, 2),
                }
            )
    report("Muon on v5e", rows, options.json)


if __name__ == "__main__":
    main()
