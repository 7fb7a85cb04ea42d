"""The benchmarks run and count right. These tests do not judge what they measure."""

import contextlib
import functools
import importlib.util
import json
import math
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from benchmarks import compile as compile_benchmark
from benchmarks import (
    compilers,
    fits,
    host_check,
    largest,
    matrices,
    measure,
    models,
    schedule,
    step,
    trainings,
)
from benchmarks.__main__ import main, programs
from benchmarks.models import small_leaves, tree
from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from tests.training.losses import OLD


@pytest.mark.parametrize(
    ("name", "leaves", "parameters"),
    [
        ("gpt2_small", 148, 124_439_808),
        ("resnet50", 161, 25_557_032),
        ("small_leaves", 2000, 512_000),
        ("7", 7, 1792),
    ],
)
def test_the_models_have_the_size_that_they_claim(name, leaves, parameters):
    model = tree(name, jnp.bfloat16)
    assert len(model) == leaves
    assert sum(x.size for x in model.values()) == parameters
    assert {x.dtype for x in model.values()} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture
def run(monkeypatch, capsys):
    """``python -m benchmarks`` in this process: its exit code, and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().out

    return run


@pytest.mark.slow
def test_every_program_is_listed_with_its_first_line(run):
    _, listed = run()
    assert run("--help") == (0, listed)
    for name, line in programs().items():
        assert f"  {name:10}{line}\n" in listed
    assert {"backup", "compile", "memory", "plot", "rows", "server", "step"} <= set(
        programs()
    )
    assert "measure" not in programs()


# Other tests here have imported some of the programs.
@pytest.mark.filterwarnings("ignore:'benchmarks.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", programs())
def test_every_program_has_a_help(name, run):
    code, shown = run(name, "--help")
    assert not code
    assert programs()[name] in " ".join(shown.split())


def test_a_speed_is_the_others_time_by_ours():
    assert measure.times([0.002, 0.001, 0.004], [0.003, 0.009, 0.004]) == {
        "min ms": 1.0,
        "median ms": 2.0,
        "speed, min": 3.0,
        "speed, median": 2.0,
    }


def test_a_report_reads_back(tmp_path, capsys):
    rows = [{"name": "one", "min ms": 1.5}, {"name": "two", "speed": 2.0}]
    path = tmp_path / "results" / "report.json"
    measure.report("a title", rows, path, bandwidth=[1e9])
    read = json.loads(path.read_text())
    assert read["rows"] == rows
    assert (read["title"], read["bandwidth"]) == ("a title", [1e9])
    assert read["versions"]["jax"] == jax.__version__
    assert read["cpus"] > 0
    assert {"date", "device"} <= set(read)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["a title", "name  min ms  speed"]


@pytest.mark.parametrize("first", [3, 17, 40, 300])
@pytest.mark.parametrize("memory", [1.0, 15.75, 80.0])
def test_the_search_ends_at_the_largest_that_fits(memory, first):
    """Memory grows with layers by uneven amounts, as a compiler counts it."""
    asked = []

    def need(n):
        asked.append(n)
        return 0.3 + 0.81 * n + 0.2 * (n % 3 == 0)

    found = trainings.largest(need, memory, first)
    assert found == max(n for n in range(400) if n == 0 or need(n) <= memory)
    assert len(asked) - 399 <= 8  # Each costs a minute.


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("machine", ["v5e", "v5e-4", "v6e", "h100"])
def test_a_plan_keeps_nearly_what_the_compiler_counted(machine):
    """The compiler counted in whole programs, so it found some more."""
    results = pathlib.Path(largest.__file__).with_name("results")
    counted = (results / f"largest_{machine}.json").read_text()
    for line in json.loads(counted)["rows"]:
        training = trainings.TRAININGS[line["name"]]
        kept = fits.kept(training, line["layers"], sequences=1)
        assert abs(kept.host / 2**30 - line["host GiB"]) < 0.01
        chip = kept.chip / 2**30
        assert chip < line["chip GiB"] < max(chip + 2, 1.14 * chip), line["name"]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("command", [["--plan"], ["--run", "layers"], ["--check"]])
def test_a_plan_comes_before_anything_runs(command, monkeypatch, capsys):
    monkeypatch.setattr(trainings, "MODEL", {"width": 128, "vocabulary": 128})
    machine = trainings.Machine("a machine", "gpu", 0.003, 1.0, 0.02)
    monkeypatch.setattr(fits, "here", lambda: machine)
    started = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(largest, "run", started)
    monkeypatch.setattr("benchmarks.host_check.check", started)
    monkeypatch.setattr(sys, "argv", ["largest", "--layers", "2", *command])
    with contextlib.suppress(KeyboardInterrupt):
        largest.main()
    assert started.called == (command != ["--plan"])
    title, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert title == "by arithmetic: a machine; 8 sequences of 1,024 tokens"
    for row, name in zip(rows, trainings.TRAININGS, strict=True):
        assert row.startswith(name)
    # 2 layers of 196,864 parameters, and 16,512 of the rest: 16 bytes for each and the
    # inputs of two layers, 8 MiB, are more than the 3.1 MiB of the chip.
    assert "too large" in rows[0]
    assert "none" in rows[0]


def wrong_layer(read):
    """Reads each layer of an array on the host from the next layer's place."""

    def of_next(self, x, i):
        return read(self, x, (i + host.is_on_host(x)) % self.length)

    return of_next


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="no result stays in the host's memory")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_check_finds_a_layer_from_a_wrong_place(monkeypatch, is_wrong, capsys):
    monkeypatch.setattr(trainings, "MODEL", {"width": 128, "vocabulary": 128})
    monkeypatch.setattr(trainings, "LENGTH", 16)
    name = "layers, all of it on the host"
    command = ["largest", "--check", "--only", name, "--layers", "3", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", command)
    if is_wrong:
        monkeypatch.setattr(Stacked, "read", wrong_layer(Stacked.read))
    with pytest.raises(SystemExit) as ended:
        largest.main()
    assert ended.value.code == is_wrong
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(name)
    assert lines[-2].split()[-1] == ("WRONG" if is_wrong else "right")
    assert ("are equal" in lines[-2]) == (not is_wrong)


def test_a_check_says_where_a_layer_differs():
    before = {"layers": {"w": np.zeros((3, 2))}, "norm": np.ones(2)}
    after = {"layers": {"w": np.ones((3, 2))}, "norm": 2 * np.ones(2)}
    wrong = {"layers": {"w": np.ones((3, 2))}, "norm": 2 * np.ones(2)}
    wrong["layers"]["w"][1] = 1, 3
    losses = np.array([2.0, 1.0])
    one = host_check.Trained(losses, before, wrong)
    other = host_check.Trained(losses * [1, 2], before, after)
    found = host_check.differences(one, other, ["layers"])
    assert found == {
        "the losses": 0.5,
        "layers/w, layer 0": 0,
        "layers/w, layer 1": pytest.approx(2 / 2**0.5),
        "layers/w, layer 2": 0,
        "norm": 0,
    }
    # Nothing learned, so there is nothing to divide by.
    found = host_check.differences(one, other._replace(after=before), ["layers"])
    assert (found["layers/w, layer 2"], found["norm"]) == (1, 1)


# One layer has 32 MB, the other 64 MB. In the compiler's text a number of cycles stands
# among other attributes, and an operand has no type.
SCHEDULED = """\
%body (given: (f32[9,8000,1000], f32[9,8000,2000])) -> (f32[9,8000,1000]) {
  %given = (f32[9,8000,1000]{2,1,0:S(5)}, f32[9,8000,2000]{2,1,0:S(5)}) parameter(0)
  %x = f32[9,8000,1000]{2,1,0:S(5)} get-tuple-element(%given), index=0
  %y = f32[9,8000,2000]{2,1,0:S(5)} get-tuple-element(%given), index=1
  %i = s32[] constant(3)
  %a = ((f32[9,8000,1000]{2,1,0:S(5)}, s32[]), f32[1,8000,1000]{2,1,0}, u32[]{:S(2)}) dynamic-slice-start(%x, %i), dynamic_slice_sizes={1,8000,1000}
  %b = ((f32[9,8000,2000]{2,1,0:S(5)}, s32[]), f32[1,8000,2000]{2,1,0}, u32[]{:S(2)}) dynamic-slice-start(%y, %i), dynamic_slice_sizes={1,8000,2000}
  %one = f32[1000] fusion(%i), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1500000","n":[]}
  %copied = (f32[1000]{0:S(1)}, f32[1000]{0}, u32[]{:S(2)}) copy-start(%one)
  %a.done = f32[1,8000,1000]{2,1,0} dynamic-slice-done(%a)
  %copied.done = f32[1000]{0:S(1)} copy-done(%copied)
  %two = f32[1,8000,1000]{2,1,0} fusion(%a.done), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"3000000"}
  %b.done = f32[1,8000,2000]{2,1,0} dynamic-slice-done(%b)
  %three = f32[1,8000,1000]{2,1,0} fusion(%two, %b.done), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1500000"}
  %w = ((f32[9,8000,1000]{2,1,0:S(5)}, f32[1,8000,1000]{2,1,0}, s32[]), f32[9,8000,1000]{2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%x, %three, %i)
  %four = f32[1000] fusion(%one), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"750000"}
  %w.done = f32[9,8000,1000]{2,1,0:S(5)} dynamic-update-slice-done(%w)
  ROOT %made = (f32[9,8000,1000]{2,1,0:S(5)}) tuple(%w.done)
}

ENTRY %main (x: f32[9,8000,1000]) -> (f32[9,8000,1000]) {
  %first = (f32[4]{0}) while(%none), condition=%c, body=%other
  ROOT %w = (f32[9,8000,1000]{2,1,0:S(5)}) while(%first), condition=%c, body=%body
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("rate", "ms", "read", "write"),
    # At 32 GB/s the last write ends at 1 + 2 + 1 + 1 ms, and no read is waited for. At
    # 16 GB/s both are: it ends at 6 + 1 + 2 ms.
    [(32e9, 5.0, 3.0, 1.0), (16e9, 9.0, 6.0, 2.0)],
)
def test_a_schedule_is_played(rate, ms, read, write):
    program = compilers.Program(SCHEDULED)
    (body,) = schedule.loops(program)
    assert schedule.played(program, body, rate) == {
        "ms": ms,
        "arithmetic": 4.5,
        "read": read,
        "write": write,
        "ratio": round(ms / max(4.5, read), 3),
    }


@pytest.mark.parametrize(
    ("line", "other", "error"),
    [
        ("dynamic-slice-done(%b)", "iota()", "do not end in the iteration: .'b'"),
        ("fusion(%one)", "fusion(%x)", "four is a transfer"),
    ],
)
def test_a_schedule_that_cannot_be_played_is_refused(line, other, error):
    with pytest.raises(ValueError, match=error):
        schedule.played(compilers.Program(SCHEDULED.replace(line, other)), "body", 32e9)


INSTALLED = [
    library for library in ("keras", "torch") if importlib.util.find_spec(library)
]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("group", ["clip + adagrad", "late pushes"])
def test_a_step_is_measured(group, capsys, monkeypatch):
    monkeypatch.setattr(step, "GROUPS", {group: step.GROUPS[group]})
    matrix = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}  # Not sorted.
    grads = measure.draw(matrix | small_leaves(n=4, size=128), 0)
    (rows,) = step.chosen()
    lines, rate = step.measure(rows, grads, rounds=2, added=2**16)
    left_out = capsys.readouterr().out.count("left out: ")
    assert len(lines) + left_out == len(step.GROUPS[group])
    libraries = {line["name"].split()[0] for line in lines}
    if group == "clip + adagrad":
        assert libraries == {"optax", "gx", *INSTALLED}
    assert rate > 0
    for line in lines:
        numbers = [value for value in line.values() if not isinstance(value, str)]
        assert all(map(math.isfinite, numbers))
        assert line["min ms"] > 0
    assert "against" not in lines[0]
    assert {line["against"] for line in lines[1:]} == {lines[0]["name"]}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_whole_step_is_measured(monkeypatch):
    def small(name, dtype, small):
        assert (name, small) == ("dense", True)
        batch = (jax.ShapeDtypeStruct((8, 16), dtype),)
        return models.Training(models.dense_layers(2, 16, dtype), batch, models.squares)

    monkeypatch.setattr(step, "training", small)
    shapes = small("dense", jnp.float32, True).params
    for rows in step.chosen("adamw", step.whole("dense")):
        lines, _ = step.measure(rows, measure.draw(shapes, 0), rounds=2, added=2**16)
        assert [line["name"].split()[0] for line in lines] == ["optax", "gx"]
        for line in lines:
            assert line["min ms"] > 0
            assert not {"bytes/N", "least/N"} & set(line)  # Those are of the update.


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_scan_of_pushes_trains_as_the_pushes_do():
    step_of = functools.partial(
        step.training_step, gx.accumulate(optax.sgd(0.1), 2), models.squares
    )
    layers = models.dense_layers(2, 16)
    params = jax.tree.map(lambda x: 0.3 * x, measure.draw(layers, 0))
    model = params, gx.accumulate(optax.sgd(0.1), 2).init(params)
    batches = jax.random.normal(jax.random.key(1), (4, 8, 16))
    scanned, losses = step_of(scanned=True)(*model, batches)
    expected = []
    for batch in batches:
        model, loss = step_of()(*model, batch)
        expected.append(loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, leaf in model[0].items():
        np.testing.assert_allclose(scanned[0][name], leaf, rtol=1e-5)
    assert expected[0] != expected[-1]


LEAST = {
    "clip + adagrad": [6] * 8,
    "adagrad": [5, 5],
    "clip + novograd": [6] * 3,
    "novograd": [6, 6],
    "clip + adamw": [8, 8],
    "late pushes": [6, 6, 0, 9],
    "added pushes": [3, 3],
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("group", LEAST)
def test_the_least_that_a_step_moves(group):
    """In units of N; the rest is scalars."""
    shapes = {"w": jax.ShapeDtypeStruct((300, 1000), jnp.float32)}
    grads = measure.draw(shapes, 0)
    for row, least in zip(step.GROUPS[group], LEAST[group], strict=True):
        if step.available(row):
            state = row.build(shapes, grads).state
            moved = step.least_bytes(row, shapes, state)
            assert moved == pytest.approx(least * 300 * 1000 * 4, abs=100)


@pytest.mark.slow
def test_compiling_is_measured(monkeypatch):
    monkeypatch.setattr(compile_benchmark, "STEPS", 2)
    lines = list(compile_benchmark.measure("three", tree("3"), rounds=1))
    assert len(lines) == len(compile_benchmark.CHAINS)
    for line in lines:
        numbers = [value for value in line.values() if not isinstance(value, str)]
        assert all(map(math.isfinite, numbers))
        assert line["name"].startswith("three: ")
        assert line["first s"] >= line["trace s"] + line["compile s"] - 0.002
    assert lines[0]["equations"] == 0 < lines[1]["equations"]


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.usefixtures("standard_promotion")
def test_optimizers_of_matrices_are_compared(tmp_path, monkeypatch, capsys):
    """Eight devices of the CPU stand for v5e's chips."""
    here = np.array(jax.devices()).reshape(4, 2)
    monkeypatch.setattr(matrices, "chips", lambda _: here)
    monkeypatch.setattr(matrices, "LAYERS", 8)
    monkeypatch.setattr(matrices, "WIDTH", 16)
    path = tmp_path / "matrices.json"
    options = "--only", "normuon, a stack", "--json", str(path)
    monkeypatch.setattr(sys, "argv", ["matrices", *options])
    matrices.main()
    assert capsys.readouterr().out.startswith("8 layers of width 16, on 4 x 4")
    (line,) = json.loads(path.read_text())["rows"]
    assert line["collectives"] == 2
    assert line["traffic"] == 2 / 8
    assert line["XLA collectives"] > 2
    assert line["XLA traffic"] > 2 / 8
    assert line["explicit"] == "ShardingTypeError"


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_steps_of_several_models_in_one_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step, "bandwidth", lambda _: measure.bandwidth(2**16))
    path = tmp_path / "step.json"
    options = "--model 2 3 --dtype bfloat16 --only gx --rounds 1 --json"
    monkeypatch.setattr(step, "GROUPS", {"adagrad": step.GROUPS["adagrad"]})
    monkeypatch.setattr(sys, "argv", ["step", *options.split(), str(path)])
    step.main()
    shown = capsys.readouterr().out
    for leaves in (2, 3):
        assert f"{leaves} leaves, bfloat16, N = 0.0 MB, " in shown
        read = json.loads((tmp_path / f"step_{leaves}.json").read_text())
        assert [row["name"] for row in read["rows"]] == ["optax adagrad", "gx adagrad"]
        assert read["bandwidth"][0] > 0
