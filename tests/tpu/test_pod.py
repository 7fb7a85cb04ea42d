"""A whole train step on pods that are not there; see ``benchmarks.pod``.

Like the other exact figures of the TPU compiler they need libtpu, and no TPU.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install -e '.[tpu]'")

from benchmarks import pod
from benchmarks.models import size

# JAX's own attention promotes dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, LEAVES = 1024, 8
SCALARS = {  # What each chip contributes to the sums, at most.
    "clip + adagrad": LEAVES,
    "novograd(global_clipnorm)": LEAVES + 6 * LAYERS,  # Six leaves stack layers.
}
CHAINS = pytest.mark.parametrize("name", SCALARS)
TOPOLOGIES = pytest.mark.parametrize("topology", ["v5e:16x16"])


def model(topology):
    """Deep and narrow: a copy of the gradients is more than the work on one layer.

    The layers are scanned, so that it compiles in seconds.
    """
    width = 2 * pod.mesh(topology).size
    return pod.Model(layers=LAYERS, width=width, vocabulary=1024, length=16)


@functools.cache
def compiled(name, topology):
    return pod.compiled(name, topology, model(topology))


@TOPOLOGIES
@CHAINS
def test_the_optimizer_needs_one_all_reduce_of_scalars(name, topology):
    """The optimizer shares it with the loss, so there are no more than with SGD."""
    ours, theirs = (
        pod.collectives(compiled(chain, topology).as_text())
        for chain in (name, "optax sgd")
    )
    new, gone = ours - theirs, theirs - ours
    assert pod.by_kind(new) == "1 all-reduce"
    assert gone == {("all-reduce", ("f32[]",)): 1}  # The loss.
    assert 8 <= pod.nbytes(new) <= 4 + 4 * SCALARS[name]


@TOPOLOGIES
@CHAINS
def test_the_optimizer_needs_no_temporary_memory(name, topology):
    """It needs none beyond SGD's, which are the model's."""
    ours, theirs = (
        compiled(chain, topology).memory_analysis().temp_size_in_bytes
        for chain in (name, "optax sgd")
    )
    gradients = size(pod.shapes(model(topology))) / pod.mesh(topology).size
    assert ours <= theirs + 0.09 * gradients


def test_pieces_of_one_collective_count_once():
    hlo = """
  %a.1 = bf16[8,128]{1,0:T(8,128)} all-gather(%p), x={chain_id="4"}
  %a.2 = bf16[8,128]{1,0:T(8,128)S(1)} all-gather(%q), x={chain_id="4"}
  %r.1 = (f32[]{:T(128)}, f32[4]{0:T(128)S(1)}) all-reduce(%r, %s), to_apply=%add
"""
    found = pod.collectives(hlo)
    assert pod.by_kind(found) == "1 all-reduce, 1 all-gather"
    assert pod.nbytes(found) == 2 * 8 * 128 + 4 + 4 * 4


def losses(devices):
    """The losses of 10 steps on one batch of 8 sequences."""
    small = pod.Model(layers=2, width=128, vocabulary=64, length=16)
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), "chips")
    shapes, treedef = jax.tree.flatten(pod.placed(pod.shapes(small), mesh))
    rng = np.random.default_rng(0)
    drawn = [
        jax.device_put(
            0.1 * rng.standard_normal(x.shape, x.dtype)
            + np.float32(x.ndim == len(x.sharding.spec)),
            x.sharding,
        )
        for x in shapes
    ]
    params = jax.tree.unflatten(treedef, drawn)
    tx = pod.CHAINS["clip + adagrad"]
    state, step = jax.jit(tx.init)(params), pod.train_step(tx, mesh)
    tokens = rng.integers(64, size=(8, small.length), dtype=np.int32)
    for _ in range(10):
        params, state, loss = step(params, state, tokens)
        yield float(loss)


def test_the_model_learns_as_well_on_two_chips_as_on_one():
    (first, *_, last), alone = losses(2), next(losses(1))
    assert first == pytest.approx(alone, rel=0.01)
    assert last < 0.7 * first
