"""How many parameters one chip of 16 GB holds, as its compiler says."""

import pytest

pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install -e '.[tpu]'")

from benchmarks import largest, schedule
from benchmarks.compilers import Program, mesh


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("layers, state on the host", 2.4),
        ("master weights, layers, state on the host", 6.5),
    ],
)
def test_one_chip_holds_a_large_model(name, billions):
    chip, training = mesh("v5e:2x2"), largest.TRAININGS[name]
    layers = round(billions * 1e9 / (12 * largest.MODEL["width"] ** 2))
    on_chip, on_host = largest.needed(largest.lower(training, layers, chip), 15.75)
    assert on_chip <= 15.75
    assert on_host > 6 * billions  # GiB; bytes of state for each parameter.


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("name", "layers", "most"),
    [
        ("layers, all of it on the host", 80, 3.0),
        ("master weights, layers, all of it on the host", 400, 4.5),
    ],
)
def test_the_chip_holds_two_layers_of_a_model_on_the_host(name, layers, most):
    """4.0 billion parameters in float32, 20.1 billion in bfloat16."""
    chip, training = mesh("v5e:2x2"), largest.TRAININGS[name]
    on_chip, _ = largest.needed(largest.lower(training, layers, chip), 15.75)
    assert on_chip <= most


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", schedule.ON_HOST)
def test_the_loops_move_layers_beside_the_arithmetic(name):
    """Of 16 layers, with 8,192 tokens, over a link of 32 GB/s in each direction."""
    program = Program(schedule.compiled(largest.TRAININGS[name], 16, 8))
    forward, backward = schedule.loops(program)
    assert schedule.played(program, forward, 32e9)["ratio"] <= 1.1
    assert schedule.played(program, backward, 32e9)["ratio"] <= 1.25
