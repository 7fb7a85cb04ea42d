"""Whole matrices on the chips of v5e: traffic and temporaries by the TPU compiler."""

import functools

import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install -e '.[tpu]'")

from benchmarks import pod
from benchmarks.matrices import apart, leaves, stack, step, transformer
from tests.training.matrix_optimizers import ALL

pytestmark = pytest.mark.usefixtures("standard_promotion")

AUTOMATIC, EXPLICIT = AxisType.Auto, AxisType.Explicit


MODELS = {
    "transformer": (transformer(16, 128), (4, 4), 2 / 16, 8),
    # 12 leaves on 16 chips.
    "leaves": (leaves(12, 128), (4, 4), 2 / 16 * 16 / 12, 6),
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


@pytest.mark.parametrize(("name", "share"), [("transformer", 0.35), ("leaves", 0.25)])
def test_fewer_temporaries_than_without(name, share):
    ours, theirs = (compiled(name, wrap=wrap)[0] for wrap in (True, False))
    ours, theirs = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    assert ours <= share * theirs


@functools.cache
def of_a_stack(name, axis_type=AUTOMATIC, *, wrap=True):
    """The same of 16 matrices, with another optimizer."""
    return step(stack(16, 128)[0], ALL[name](), (4, 4), axis_type, wrap=wrap)


@pytest.mark.parametrize("axis_type", [AUTOMATIC, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ALL)
def test_the_state_of_a_stack_does_not_travel(name, axis_type):
    program, size = of_a_stack(name, axis_type)
    found = pod.collectives(program.as_text())
    assert pod.by_kind(found) == "2 all-to-all"
    assert pod.nbytes(found) <= (2 / 16 + 0.01) * size


# Each matrix and its state travel there, the update and moments back. One axis of the
# mesh cuts a factor, so its four copies get a quarter of it each. All branches of
# conditionals count.
OF_LEAVES = {"soap": 7 / 16 + 3 / 16 + 4 / 4, "one-sided": 4 / 16 + 2 / 16 + 2 / 4}


@pytest.mark.parametrize("name", OF_LEAVES)
def test_the_state_of_leaves_travels_once(name):
    program, size = step(apart(16, 128), ALL[name](), (4, 4), AUTOMATIC, wrap=True)
    found = pod.collectives(program.as_text())
    assert pod.by_kind(found) == f"{found.total()} all-to-all"
    assert pod.nbytes(found) <= (OF_LEAVES[name] + 0.1) * size


@pytest.mark.parametrize(
    ("name", "share"), [("soap", 0.42), ("shampoo", 0.55), ("kron", 0.48)]
)
def test_fewer_temporaries_than_without_it(name, share):
    ours, theirs = (of_a_stack(name, wrap=wrap)[0] for wrap in (True, False))
    ours, theirs = (x.memory_analysis().temp_size_in_bytes for x in (ours, theirs))
    assert ours <= share * theirs
