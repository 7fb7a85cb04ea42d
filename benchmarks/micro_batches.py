"""What a step of four micro-batches holds, with optax and here, by the compiler.

``python -m benchmarks.micro_batches --targets cpu v5e:2x2`` compiles donated steps of
AdamW on 32 layers, once as a chain and once stacked, for a ``scan``, and runs nothing.
A sum over pushes is part of the state, and ``optax.microbatching.microbatch`` takes the
whole batch at once. So ``held`` compares them: parameters, state and temporaries
together, in N, the bytes of the parameters. ``benchmarks.compilers`` explains targets.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import gradxform as gx
from benchmarks.compilers import placed
from benchmarks.grid import devices
from benchmarks.measure import arguments, report
from benchmarks.models import dense_layers, size, squares
from benchmarks.step import optax_step, training_step

MICRO, LAYERS, WIDTH, EXAMPLES = 4, 32, 1024, 64
ADAMW = optax.adamw(1e-3)


def stacked_squares(params, x):
    """As :func:`squares`, with the layers in one array that a scan goes over."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jnp.square(x))


def microbatched(tx, loss_fn):
    """A step that takes all micro-batches at once, and no sum in the state."""
    whole = optax.microbatching.microbatch(
        jax.value_and_grad(loss_fn),
        argnums=1,
        microbatch_size=EXAMPLES,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )

    def step(params, state, batch):
        _, grads = whole(params, batch.reshape(-1, *batch.shape[2:]))
        return optax_step(tx, params, state, grads)

    return step


def in_layers(tx, loss_fn):
    """A scan of pushes that add the gradient of each layer as soon as it is known."""
    one = gx.minimize(loss_fn, tx, layers=["layers"])

    def step(params, state, batch):
        def push(model, x):
            return one(*model, x)[:2], None

        return jax.lax.scan(push, (params, state), batch)[0]

    return step


MULTI = optax.MultiSteps(ADAMW, MICRO).gradient_transformation()
OURS = gx.accumulate(ADAMW, MICRO)
TRAININGS = {
    "optax.MultiSteps": (
        MULTI,
        functools.partial(training_step, write=optax_step, scanned=True),
    ),
    "optax.microbatching.microbatch": (ADAMW, microbatched),
    "gx.accumulate": (OURS, functools.partial(training_step, scanned=True)),
    "gx.accumulate, layers": (OURS, in_layers),
}
MODELS = {
    "a chain": (dense_layers(LAYERS, WIDTH), squares),
    "scanned": (
        {"layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)},
        stacked_squares,
    ),
}


def measure(target):
    """The lines of the table for one machine."""
    where = devices(target)
    batch = placed(jax.ShapeDtypeStruct((MICRO, EXAMPLES, WIDTH), jnp.float32), where)
    for model, (shapes, loss_fn) in MODELS.items():
        params, n = placed(shapes, where), size(shapes)
        for name, (tx, make) in TRAININGS.items():
            if name.endswith("layers") and "layers" not in params:
                continue
            state = placed(jax.eval_shape(tx.init, params), where)
            step = jax.jit(make(tx, loss_fn), donate_argnums=(0, 1))
            found = step.lower(params, state, batch).compile().memory_analysis()
            temp = found.temp_size_in_bytes / n
            yield {
                "name": f"{target}, {model}: {name}",
                "state": round(size(state) / n, 2),
                "temp": round(temp, 2),
                "held": round(1 + size(state) / n + temp, 2),
            }


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--targets", nargs="+", default=["cpu"])
    options = parser.parse_args()
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    rows = [row for target in options.targets for row in measure(target)]
    report("four micro-batches, in N", rows, options.json)


if __name__ == "__main__":
    main()
