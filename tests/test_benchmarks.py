"""The benchmarks run and count right. These tests do not judge what they measure."""

import functools
import importlib.util
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from benchmarks import compile as compile_benchmark
from benchmarks import measure, memory, models, plot, race, step
from benchmarks.__main__ import main, programs
from benchmarks.models import MODELS, small_leaves, tree


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


def test_all_models_are_listed():
    assert set(MODELS) == {"gpt2_small", "resnet50", "small_leaves"}


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


def test_every_program_is_listed_with_its_first_line(run):
    _, listed = run()
    assert run("--help") == (0, listed)
    for name, line in programs().items():
        assert f"  {name:10}{line}\n" in listed
    assert {"backup", "compile", "memory", "plot", "rows", "server", "step"} <= set(
        programs()
    )
    assert "measure" not in programs()


def test_an_unknown_program_is_refused():
    command = [sys.executable, "-m", "benchmarks", "stpe"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no program 'stpe'" in refused.stderr


# Other tests here have imported some of the programs.
@pytest.mark.filterwarnings("ignore:'benchmarks.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", programs())
def test_every_program_has_a_help(name, run):
    code, shown = run(name, "--help")
    assert not code
    assert programs()[name] in " ".join(shown.split())


def test_everything_takes_its_turn_in_every_round():
    turns = []
    runs = {name: lambda name=name: turns.append(name) for name in "abc"}
    seconds = measure.interleaved(runs, 5)
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys(
        "abc", 5
    )
    rounds = [sorted(turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert rounds == [["a", "b", "c"]] * 6  # The first one does not count.
    assert len({tuple(turns[i : i + 3]) for i in range(0, len(turns), 3)}) > 1


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


INSTALLED = [
    library for library in ("keras", "torch") if importlib.util.find_spec(library)
]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("group", step.GROUPS)
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


@pytest.mark.parametrize(
    ("backend", "left_out"),
    [("cpu", []), ("gpu", ["(fused)"]), ("tpu", ["Adagrad", "(foreach)", "(fused)"])],
)
def test_torch_runs_where_it_can(backend, left_out, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rows = [row for row in step.GROUPS["clip + adagrad"] if "torch" in row.name]
    missing = [row.name for row in rows if not step.available(row)]
    assert len(rows) == 3
    assert len(missing) == len(left_out)
    assert all(name.endswith(e) for name, e in zip(missing, left_out, strict=True))
    assert capsys.readouterr().out.count(f"(not on {backend.upper()})") == len(missing)


def test_rows_are_chosen_by_a_word():
    names = [[row.name for row in rows] for rows in step.chosen("stale, never")]
    assert names == []
    names = [[row.name for row in rows] for rows in step.chosen("drop_stale")]
    assert names == [
        ["gx adagrad(global_clipnorm)", "gx drop_stale, fresh", "gx drop_stale, stale"]
    ]


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


def test_equations_of_inner_functions_count_at_each_call():
    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2  # Two equations.

    def outer(x):
        return inner(x) + jax.lax.cond(True, inner, jnp.cos, x) + inner(x)

    # Two calls have three equations each. The branches of the conditional have three
    # and one. Around them are two sums and the conditional itself.
    traced = jax.make_jaxpr(outer)(1.0)
    assert compile_benchmark.equations(traced) == 2 * 3 + 3 + 1 + 3


@pytest.mark.slow
def test_bytes_of_state():
    leaves, rows = 148, 50257 + 1024 + 12 * (768 * 3 + 3072)
    vectors = 12 * (3 * 768 + 768 + 4 * 768 + 768 + 4 * 768) + 2 * 768
    parameters = 124_439_808
    scalar, layers = 4 / parameters, 4 * leaves / parameters
    # 8 bits and a scale for up to 128 of them, but vectors are too small for that. 768
    # and 3,072 are divided into blocks of 96, so that there are 8 and 32 of them.
    matrices = 12 * 768 * (3 + 1 + 4 + 4) * 768
    scales = (matrices / 96 + (1024 / 128 + 393) * 768) / parameters
    vector = vectors / parameters
    low_bits, low_bits_half = (
        2 * (1 - vector + size * (vector + scales)) + scalar for size in (4, 2)
    )
    expected = {
        "gx.master_weights": (8 + scalar, 10 + scalar),
        "gx.master_weights(residual_dtype=bfloat16)": (8 + scalar, 10 + scalar),
        "gx.master_weights(residual_dtype=int8)": (8 + scalar, 9 + scalar),
        "gx.round_stochastically": (8 + 4 * scalar, 4 + 4 * scalar),
        "gx.low_bit_state": (low_bits, low_bits_half),
        "gx.master_weights(gx.low_bit_state, residual_dtype=int8)": (
            low_bits,
            low_bits + 1,
        ),
        "optax.adam": (8 + scalar, 4 + scalar),
        "optax.adamw": (8 + scalar, 4 + scalar),
        "optax.sgd(momentum)": (4, 2),
        "optax.adagrad": (4, 2),
        "gx.adagrad": (4, 4),
        "gx.adagrad(row_wise)": (4 * (rows + vectors) / parameters,) * 2,
        "gx.adagrad(accumulator_dtype=bfloat16)": (2, 2),
        "optax.novograd": (4 + scalar + layers, 2 + scalar + layers / 2),
        "gx.novograd": (4 + scalar + layers, 2 + scalar + layers),
        "gx.novograd(mu_dtype=bfloat16)": (2 + scalar + layers,) * 2,
        "gx.novograd(mu_dtype=float32)": (4 + scalar + layers,) * 2,
    }
    measured = {
        row["name"]: (row["float32"], row["bfloat16"]) for row in memory.measure()
    }
    assert measured.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_allclose(measured[name], numbers, atol=6e-6, err_msg=name)


def test_a_picture_has_a_bar_a_row_and_a_panel_a_file(tmp_path, monkeypatch):
    row = {"speed, min": 2.0, "speed, median": 1.5, "against": "optax clip + adagrad"}
    rows = [
        {"name": "optax clip + adagrad"},
        {"name": "gx clip + adagrad", **row},
        {"name": "keras Adagrad", **row, "speed, median": 0.5},
        {"name": "gx drop_stale, stale", **row, "against": "gx adagrad"},
    ]
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"title": "a model", "rows": rows}))
    for only, bars in (((), 2), (["gx clip + adagrad"], 1)):
        files = [json.loads(path.read_text())] * 2
        figure = plot.draw(files, plot.THEMES["dark"], only)
        assert [len(ax.patches) for ax in figure.axes] == [bars, bars]
        assert "optax" in figure.axes[-1].get_xlabel()
        assert figure.get_figwidth() * 96 <= 441  # A phone shows it nearly as wide.
    out = tmp_path / "pictures" / "step"
    monkeypatch.setattr(sys, "argv", ["plot", str(path), "--out", str(out)])
    written = []
    for _ in range(2):  # Nothing in them depends on the time.
        plot.main()
        written.append([file.read_bytes() for file in sorted(out.parent.iterdir())])
    assert [file.name for file in sorted(out.parent.iterdir())] == [
        *("step-dark.svg", "step-light.svg")
    ]
    assert written[0] == written[1]
    assert written[0][0] != written[0][1]
    path.write_text(json.dumps({"title": "another table", "rows": rows[:1]}))
    with pytest.raises(SystemExit, match="held against optax"):
        plot.main()


@pytest.mark.slow
def test_the_methods_of_the_race_wait_or_drop_or_take_all(monkeypatch):
    monkeypatch.setattr(race, "SECONDS", 12)
    data = race.digits()
    runs = {name: race.train(name, 0.1, 0, data) for name in race.METHODS}
    # The slowest worker takes at least 4 seconds.
    assert len({*runs["synchronous"].losses[:5]}) == 1
    # With eight workers, a gradient is seven steps late.
    assert 6 < runs["asynchronous"].late < 7.5
    assert runs["scale_by_staleness"].late == runs["asynchronous"].late
    for name, run in runs.items():
        assert run.losses[12] < run.losses[0]
        assert (run.dropped > 0.5) == (name == "drop_stale")
        assert run.dropped == 0 or run.slow == 0 < runs["asynchronous"].slow
        assert (run.idle > 0.3) == (name == "synchronous")
    assert runs["drop_stale"].late <= race.LIMIT
    assert runs["drop_stale"] == race.train("drop_stale", 0.1, 0, data)


def test_the_race_shows_all_rates_and_the_best_one_of_the_synchronous_training():
    falling, rates = np.linspace(2, 1, race.SECONDS + 1), len(race.RATES)
    curves = {
        name: np.stack([falling * (1 + abs(place - best)) for place in range(rates)])
        for best, name in enumerate(race.METHODS, 2)  # "synchronous" is the first.
    }
    figure = race.draw(curves, plot.THEMES["light"])
    above, below = figure.axes
    for best, (over_rates, over_time) in enumerate(
        zip(above.lines, below.lines, strict=True), 2
    ):
        ends = [1 + abs(place - best) for place in range(rates)]
        np.testing.assert_allclose(over_rates.get_ydata(), ends)
        np.testing.assert_allclose(over_time.get_ydata(), falling * (best - 1))
    assert f"{race.RATES[2]:g}" in below.get_xlabel()
    assert figure.get_figwidth() * 96 <= 441  # A phone shows it nearly as wide.
