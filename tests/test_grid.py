"""No step costs more than optax's: on CPU here, on TPU in tests/tpu."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gradxform as gx
from benchmarks import grid
from benchmarks.compilers import traffic

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 10), reason="its compiler keeps copies of its own"
    ),
]


def model(dtype, blocks=None):
    return {f"{i}": jax.ShapeDtypeStruct((512, 512), dtype) for i in range(3)}


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", grid.DTYPES)
def test_no_cell_on_cpu_is_worse(dtypes, monkeypatch):
    monkeypatch.setattr(grid, "gpt2_short", model)
    rows = list(grid.rows("cpu", dtypes))
    assert len(rows) == 7 * len(grid.LOOPS)
    assert not [row for row in rows if row["worse"]]


def test_a_loop_counts_each_turn_and_a_slice_its_part():
    rows = jnp.zeros((8, 512, 512))

    def step(total, row):
        return total + row, None

    def whole(rows):
        return jax.lax.scan(step, jnp.zeros((512, 512)), rows)[0]

    moved = traffic(jax.jit(whole).lower(rows).compile().as_text())["hbm"]
    turn = 512 * 512 * 4  # Each turn reads a row and the sum, and writes the sum.
    assert 24 * turn <= moved < 27 * turn


def test_the_page_names_worse_cells():
    theirs = {"temp": 0.0, "moved": 8.0, "hbm": 5.0, "collectives": 1}
    assert grid.worse(theirs, theirs) == []
    assert grid.worse({**theirs, "moved": 8.15, "hbm": 5.11}, theirs) == ["hbm"]
    assert grid.worse({**theirs, "temp": 0.02}, theirs) == []
    assert grid.worse({**theirs, "temp": 0.04}, theirs) == ["temp"]
    assert grid.worse({**theirs, "temp": 0.04}, theirs, kept=0.05) == []
    assert grid.worse({**theirs, "collectives": 2}, theirs) == ["collectives"]


class Weights(nnx.Module):
    def __init__(self, dtype):
        self.weights = nnx.Dict(
            {k: nnx.Param(jnp.zeros(x.shape, dtype)) for k, x in model(dtype).items()}
        )


def in_nnx(tx, dtype):
    """The donated step of an NNX loop, compiled."""

    def make():
        weights = Weights(dtype)
        return weights, nnx.Optimizer(weights, tx, wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, grads):
        weights, optimizer = nnx.merge(graph, state)
        optimizer.update(weights, grads)
        return nnx.state((weights, optimizer))

    grads = nnx.state(nnx.eval_shape(lambda: Weights(dtype)), nnx.Param)
    return step.lower(state, grads).compile()


def in_a_train_state(tx, dtype):
    """The donated step of a Linen loop, compiled."""
    make = functools.partial(TrainState.create, apply_fn=None, tx=tx)
    state = jax.eval_shape(lambda params: make(params=params), model(dtype))
    step = jax.jit(
        lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0
    )
    return step.lower(state, model(dtype)).compile()


@pytest.mark.parametrize("loop", [in_nnx, in_a_train_state])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flaxs_loops_are_optaxs(loop, dtype):
    tx = optax.chain(
        gx.clip_by_global_norm(1.0), gx.adagrad(0.1, accumulator_dtype=dtype)
    )
    compiled, n = loop(tx, dtype), 3 * 512 * 512 * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * n
    # A counter of its own counts the steps.
    assert 8 * n <= compiled.cost_analysis()["bytes accessed"] < 8.01 * n
