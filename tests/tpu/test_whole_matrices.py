"""Muon on the chips of v5e: what travels, and the temporaries, by the TPU compiler."""

import functools

import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install -e '.[tpu]'")

from benchmarks import pod
from benchmarks.matrices import leaves, stack, step, transformer

pytestmark = pytest.mark.usefixtures("standard_promotion")

AUTOMATIC, EXPLICIT = AxisType.Auto, AxisType.Explicit


MODELS = {
    "transformer": (transformer(16, 256), (4, 4), 2 / 16, 8),
    # 12 leaves on 16 chips.
    "leaves": (leaves(12, 256), (4, 4), 2 / 16 * 16 / 12, 6),
    "256 chips": (stack(256, 256), (16, 16), 2 / 256, 2),
}


@functools.cache
def compiled(name, axis_type=AUTOMATIC, *, wrap=True):
    """The step, and the bytes of its parameters."""
    model, sizes, *_ = MODELS[name]
    return step(*model, sizes, axis_type, wrap=wrap)


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [
        *(("transformer", kind) for kind in (AUTOMATIC, EXPLICIT)),
        *(("leaves", kind) for kind in (AUTOMATIC, EXPLICIT)),
        ("256 chips", AUTOMATIC),
    ],
)
def test_two_all_to_alls_for_each_group(name, axis_type):
    _, _, moved, groups = MODELS[name]
    program, size = compiled(name, axis_type)
    found = pod.collectives(program.as_text())
    assert pod.by_kind(found) == f"{groups} all-to-all"
    assert pod.nbytes(found) <= (moved + 0.001) * size


def test_bfloat16_travels_as_it_is():
    model, sizes, moved, _ = MODELS["transformer"]
    program, size = step(*model, sizes, AUTOMATIC, wrap=True, dtype=jnp.bfloat16)
    assert pod.nbytes(pod.collectives(program.as_text())) <= (moved + 0.001) * size


@pytest.mark.parametrize(("name", "share"), [("transformer", 0.6), ("leaves", 0.25)])
def test_fewer_temporaries_than_without(name, share):
    ours, theirs = (compiled(name, wrap=wrap)[0] for wrap in (True, False))
    ours, theirs = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    assert ours <= share * theirs
