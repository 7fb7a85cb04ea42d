"""The TPU compiler's figures for a whole train step on a pod, without a pod.

``python -m benchmarks.pod`` compiles the step of a decoder-only transformer, from loss
to parameters, for 16 to 512 chips. Like ``benchmarks.compilers`` it needs libtpu. The
layers run under ``lax.scan``, rematerialized. Parameters, gradients and optimizer state
are sharded over all chips (FSDP). The weights of a layer are gathered in bfloat16 for
the time of their use, and their gradients are summed and scattered. Each chip has one
sequence.

The model is mapped over the chips by hand, so that its collectives are the same with
every optimizer. The compiler divides the optimizer, as it does for users. Each chain is
compared with plain SGD, which needs no collective.

- collectives: of the whole program; those in the body of a loop count once. The
  compiler turns gathers and scatters of small arrays into all-reduces.
- new: those that SGD's program does not have. If the compiler joins the optimizer's
  sums with the sum of the loss, the joined one is new, and SGD's is "gone".
- added B: bytes that each chip contributes to collectives, beyond SGD's.
- temp: temporary HBM on one chip; the gradients are in it.
- arguments: parameters, state and tokens on one chip, shards padded to whole tiles.
- compile s: CPU time of all threads, on the machine that ran it.
"""

import functools
import re
import time
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradxform as gx
from benchmarks.compilers import COLLECTIVES, INSTRUCTION, arrays, mesh
from benchmarks.measure import arguments, report
from benchmarks.models import cross_entropy, decoder_layer, size, transformer
from benchmarks.step import ADAGRAD, CLIP, OPTAX_NOVOGRAD, gx_step, optax_step

STACKED = {"embed": 0, "layers": 1, "norm": 0}  # Axes that stack layers.
CHAINS = {
    "gradients alone": None,
    "optax sgd": optax.sgd(0.1),
    "clip + adagrad": optax.chain(CLIP, gx.adagrad(0.1)),
    "adagrad(global_clipnorm)": ADAGRAD,
    "clip + novograd": optax.chain(CLIP, gx.novograd(0.1, stacked_axes=STACKED)),
    "novograd(global_clipnorm)": gx.novograd(
        0.1, global_clipnorm=1.0, stacked_axes=STACKED
    ),
    "optax clip + novograd": OPTAX_NOVOGRAD,
}
GROWING = ["optax sgd", "clip + adagrad", "novograd(global_clipnorm)"]


class Model(NamedTuple):
    """The size of a transformer, and of the sequence that each chip gets."""

    layers: int = 8
    width: int = 4096
    vocabulary: int = 8192
    length: int = 256


# The cases: all chains for the first, then more chips, layers and parameters.
CASES = [
    ("v5e:16x16", Model(), CHAINS),
    ("v5p:8x8x8", Model(), GROWING),
    ("v5e:8x8", Model(), GROWING),
    ("v5e:4x4", Model(), GROWING),
    ("v5e:16x16", Model(layers=2), GROWING),
    ("v5e:16x16", Model(layers=32), GROWING),
    ("v5e:16x16", Model(width=2048), GROWING),
]


def shapes(model):
    """The parameters; those of all layers are stacked."""
    return transformer(model.layers, model.width, model.vocabulary)


def specs(tree):
    """Cuts arrays of layers along the first axis of the layer; scalars are everywhere.

    So the rows of matrices are divided. The last axis would be padded to 128.
    """

    def spec(path, x):
        stacked = jax.tree_util.DictKey("layers") in path
        return P(*[None] * stacked, "chips") if x.ndim > stacked else P()

    return jax.tree.map_with_path(spec, tree)


def placed(tree, mesh):
    """Shapes of parameters or state with their placement on the mesh."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        specs(tree),
    )


def gathered(shard):
    """A sharded array as a whole; its gradient comes back summed and scattered."""
    return jax.lax.all_gather(shard.astype(jnp.bfloat16), "chips", tiled=True)


@jax.checkpoint
def layer(x, shards):
    """One layer on one chip, in the form of a scan's body."""
    return decoder_layer(x, jax.tree.map(gathered, shards))


def loss_on(mesh, params, tokens):
    """Mean cross-entropy of each next token, over all sequences of all chips."""

    def on_a_chip(params, tokens):
        embed = gathered(params["embed"])
        x, _ = jax.lax.scan(layer, embed[tokens], params["layers"])
        loss = cross_entropy(x, gathered(params["norm"]), embed, tokens)
        return jax.lax.pmean(loss, "chips")

    mapped = jax.shard_map(
        on_a_chip, mesh=mesh, in_specs=(specs(params), P("chips")), out_specs=P()
    )
    return mapped(params, tokens)


def train_step(tx, mesh, write=gx_step):
    """``(params, state, tokens) -> (params, state, loss)``, jitted and donated.

    Without a ``tx`` the gradients take the place of the new parameters.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(functools.partial(loss_on, mesh))(
            params, tokens
        )
        if tx:
            params, state = write(tx, params, state, grads)
        else:
            params = grads
        like = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs((params, state))
        )
        return *jax.lax.with_sharding_constraint((params, state), like), loss

    return step


def compiled(name, topology, model):
    """The train step of a chain, for a topology that is not there."""
    tx, chips = CHAINS[name], mesh(topology)
    params = shapes(model)
    state = jax.eval_shape(tx.init, params) if tx else ()
    tokens = jax.ShapeDtypeStruct(
        (chips.size, model.length),
        jnp.int32,
        sharding=NamedSharding(chips, P("chips")),
    )
    write = optax_step if name.startswith("optax") else gx_step
    step = train_step(tx, chips, write)
    return step.lower(placed(params, chips), placed(state, chips), tokens).compile()


def collectives(hlo):
    """The number of each collective, by its kind and the types of its results.

    The compiler cuts some in pieces to hide them behind other work. It gives all
    pieces of a chain the same number.
    """
    found = {}
    for name, result, opcode, _, rest in INSTRUCTION.findall(hlo):
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            chain = re.search(r'chain_id="(\d+)"', rest)
            types = tuple(sorted(re.findall(r"\w+\[[\d,]*\]", result)))
            found[chain[1] if chain else name] = kind, types
    return Counter(found.values())


def nbytes(found):
    """Bytes of the results of collectives."""
    return sum(
        n * size
        for (_, types), n in found.items()
        for size, _ in arrays(" ".join(types))
    )


def by_kind(found):
    """A count of collectives, in words."""
    kinds = Counter()
    for (kind, _), n in found.items():
        kinds[kind] += n
    return ", ".join(f"{kinds[k]} {k}" for k in COLLECTIVES if kinds[k])


def lines(topology, model, chains):
    """The table's lines for one model on one topology; SGD comes before the others."""
    sgd = None
    for name in chains:
        start = time.process_time()
        step = compiled(name, topology, model)
        seconds = time.process_time() - start
        found, memory = collectives(step.as_text()), step.memory_analysis()
        line = {
            "name": f"{topology}, {model.layers} x {model.width}: {name}",
            "params M": round(size(shapes(model)) / 4e6, 1),
            "collectives": by_kind(found),
        }
        if name == "optax sgd":
            sgd = found
        elif sgd:
            new, gone = found - sgd, sgd - found
            line |= {
                "new": by_kind(new),
                "gone": by_kind(gone),
                "added B": nbytes(new) - nbytes(gone),
            }
        yield line | {
            "temp MB": round(memory.temp_size_in_bytes / 1e6, 2),
            "arguments MB": round(memory.argument_size_in_bytes / 1e6, 2),
            "compile s": round(seconds, 1),
        }


def main():
    """Prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    rows = []
    for topology, model, chains in CASES:
        if options.only in f"{topology}, {model.layers} x {model.width}":
            rows += lines(topology, model, chains)
    report(f"a train step, {Model()}", rows, options.json)


if __name__ == "__main__":
    main()
