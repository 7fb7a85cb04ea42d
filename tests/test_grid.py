"""No step costs more than optax's: on CPU here, on TPU in tests/tpu."""

import functools
import pathlib

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


RESULTS = grid.read(pathlib.Path("benchmarks/results/grid.csv"))
PAGE = pathlib.Path("docs/grid.md")
# The chains, scanned or not, whose worse cells the page explains, by machine.
NOVOGRAD = {"clip + novograd", "novograd(global_clipnorm)"}
ADAGRAD = {"clip + adagrad", "adagrad(global_clipnorm)"}
CLIPS = {f"clip + optax.{name}" for name in ("adamw", "sgd", "lion")}
SUMS = {f"accumulate({name})" for name in ("sgd", "adam", "clip + adamw")}
ON_TPU = {"accumulate(sgd)", "accumulate(clip + adamw)"}
EXPLAINED = {
    "cpu": {*NOVOGRAD, *ADAGRAD, *CLIPS, "accumulate(adam)"},
    "v5e:2x2": {*NOVOGRAD, "clip + optax.adamw", *ON_TPU},
    "v6e:2x2": {*NOVOGRAD, *ADAGRAD, *ON_TPU},
    "v5p:2x2x1": {*NOVOGRAD, *ADAGRAD, *CLIPS},
    "h100": SUMS,
}


def worse_cells(results):
    """Each cell of these results that is worse, with its loop."""
    return {
        (key, loop)
        for key, found in results.items()
        for loop in grid.worse_loops(key, found)
    }


def measured(model, dtypes, only=""):
    """Cells of this machine, compiled now."""
    names = {name for name, *_ in grid.steps(dtypes, model) if only in name}
    cells = grid.Cells("cpu", dtypes, model).compared(names)
    return {(release(), "cpu", model, dtypes, name): found for name, found in cells}


def release():
    """This release of JAX if it has results on CPU, or the newest that has."""
    found = [release for release, target in grid.machines(RESULTS) if target == "cpu"]
    return jax.__version__ if jax.__version__ in found else found[0]


@pytest.mark.parametrize(
    ("model", "only"),
    [
        ("dense", "clip + optax.adamw"),
        ("dense", "clip + novograd"),
        ("embedding", "accumulate(adam)"),
    ],
)
def test_in_a_whole_step_only_the_listed_cells_are_worse(model, only):
    cells = measured(model, "float32", only)
    assert len(cells) >= 2  # One push in a program, and four in a scan.
    assert worse_cells(cells) <= worse_cells(RESULTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "embedding"])
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16"])
def test_of_all_whole_steps_only_the_listed_cells_are_worse(model, dtypes):
    cells = measured(model, dtypes)
    assert len(cells) == 2 * (7 + 4)
    assert worse_cells(cells) <= worse_cells(RESULTS)


def test_a_cell_in_the_file_is_not_compiled_again(tmp_path, monkeypatch):
    path, compiled = tmp_path / "grid.csv", []
    figures = {"temp": 1.0, "moved": 7.25}
    found = dict.fromkeys([*grid.LOOPS, "theirs"], figures)

    class Cells:
        def __init__(self, *place):
            self.place = place

        def compared(self, names):
            for name in sorted(names):
                compiled.append((*self.place, name))
                yield name, found

    monkeypatch.setattr(grid, "Cells", Cells)
    place = "cpu", "float32", "dense"
    names = ["accumulate(adam)", "accumulate(adam), scanned", "accumulate(sgd)"]
    for only in (names[1], "accumulate(adam)", names[2]):
        grid.add(path, "cpu", "dense", "float32", only)
    names = [names[1], names[0], names[2], f"{names[2]}, scanned"]
    assert compiled == [(*place, name) for name in names]
    key = jax.__version__, "cpu", "dense", "float32"
    assert grid.read(path) == {(*key, name): found for name in names}


def test_the_page_has_the_results(tmp_path):
    path = tmp_path / "grid.md"
    path.write_text(PAGE.read_text())
    grid.write_page(path, RESULTS)
    command = "python -m benchmarks.grid --targets --results FILE --page docs/grid.md"
    assert path.read_text() == PAGE.read_text(), f"it needs: {command}"


def test_the_page_explains_each_worse_cell():
    found = {}
    for (_, target, *_, chain), _ in worse_cells(RESULTS):
        found.setdefault(target, set()).add(chain.removesuffix(grid.SCANNED))
    assert found == EXPLAINED


def test_a_loop_counts_each_turn_and_a_slice_its_part():
    rows = jnp.zeros((8, 512, 512))

    def step(total, row):
        return total + row, None

    def whole(rows):
        return jax.lax.scan(step, jnp.zeros((512, 512)), rows)[0]

    moved = traffic(jax.jit(whole).lower(rows).compile().as_text())["hbm"]
    turn = 512 * 512 * 4  # Each turn reads a row and the sum, and writes the sum.
    assert 24 * turn <= moved < 27 * turn


def test_each_conditional_counts_with_the_branch_that_is_taken():
    def step(first, second, x, y):
        x = jax.lax.cond(first, lambda x: x + 1, lambda x: x, x)
        return x, jax.lax.cond(second, lambda y: y + x, lambda y: y, y)

    n = 512 * 512 * 4
    x = jnp.zeros((512, 512))
    lowered = jax.jit(step, donate_argnums=(2, 3)).lower(False, True, x, x)
    hlo = lowered.compile().as_text()
    found = {
        taken: traffic(hlo, taken)["hbm"] // n
        for taken in [(max,), (max, min), (min, max), (min,)]
    }
    assert list(found.values()) == [5, 2, 3, 0]  # x in and out; x and y in, y out.


def test_a_fusion_reads_all_that_it_passes_on():
    hlo = """
%fused (p: f32[8,128]) -> f32[1024] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %b = f32[1024]{0} bitcast(%p)
}

ENTRY %main (x: f32[8,128]) -> f32[1024] {
  %x = f32[8,128]{1,0} parameter(0)
  ROOT %f = f32[1024]{0:S(1)} fusion(%x), kind=kLoop, calls=%fused
}
"""
    assert traffic(hlo)["hbm"] == 8 * 128 * 4


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
