"""The main job: its parts by hand-made cases, and the command as a user runs it."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from gradxform import __main__ as job
from gradxform._server import engines

SHORT = ("--steps", "60", "--engine", "simulated")
COLOR = re.compile(r"\x1b\[[\d;]*(?:3|9)[0-7]m")


def run(*options, **environ):
    """The command, away from any terminal unless ``environ`` says otherwise."""
    forced = {"FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"}
    kept = {name: value for name, value in os.environ.items() if name not in forced}
    return subprocess.run(
        [sys.executable, "-m", "gradxform", *options],
        capture_output=True,
        env={**kept, "PYTHONIOENCODING": "utf-8", **environ},
        encoding="utf-8",
        check=False,
    )


def row(stdout, name):
    """The value beside ``name`` in the table."""
    return re.search(rf"│ {name} +│ (\S+)", stdout)[1]


def histogram(stdout):
    """(staleness, pushes, whether they were dropped), from the table's bars."""
    lines = re.findall(r"│ staleness (\d+) +│ (\d+)(, all dropped)?", stdout)
    return [(int(step), int(count), bool(late)) for step, count, late in lines]


# Data and model.


def test_the_split_is_stratified_and_complete():
    digits = job.load_digits()
    assert digits.images.shape == (1437, 8, 8)
    assert digits.test_images.shape == (360, 8, 8)
    train, test = np.bincount(digits.labels), np.bincount(digits.test_labels)
    np.testing.assert_allclose(test, (train + test) / 5, atol=1)
    images = np.concatenate([digits.images, digits.test_images]).reshape(1797, 64)
    assert len(np.unique(images, axis=0)) == 1797  # No digit on both sides.
    assert images.min() == 0.0
    assert images.max() == 1.0


def test_workers_shift_digits_by_at_most_a_pixel():
    images = np.zeros((5, 8, 8), np.float32)
    images[:, 3, 3] = labels = np.arange(1, 6)  # One lit pixel, as bright as its label.
    model = job.Model(None, lambda params, *batch: batch, None)
    digits = job.Digits(images, images, labels, labels)
    worker = job.make_worker(model, digits, 1.0, np.random.default_rng(0))
    batch, drawn = worker.gradient(None)
    which, down, right = np.nonzero(batch)
    assert which.tolist() == list(range(job.BATCH_SIZE))
    assert batch[which, down, right].tolist() == drawn.tolist()
    assert set(zip(down, right, strict=True)) == {
        (d, r) for d in (2, 3, 4) for r in (2, 3, 4)
    }
    assert set(drawn) == set(labels)


def test_a_seed_decides_the_weights():
    first, again, other = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model.params)])
        for model in map(job.build_model, (0, 0, 1))
    )
    assert (first == again).all()
    assert np.mean(first != other) > 0.9  # All but the biases.


def test_the_norm_is_that_of_the_gradient():
    model, digits = job.build_model(0), job.load_digits()
    batch = digits.images[:9], digits.labels[:9]
    loss, norm, grads = model.gradient(model.params, *batch)
    squares = [np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)]
    np.testing.assert_allclose(norm, np.sqrt(np.sum(squares)), rtol=1e-6)
    assert 2.0 < loss < 3.0  # log(10) for a guess


# Workers and transformation.


def arguments(*options):
    return job.make_parser().parse_args(options)


def make_job(*options):
    """The job of the command line, of a model that is one number."""
    model = job.Model(jnp.zeros(1), lambda params, *batch: batch, None)
    images, labels = np.zeros((5, 8, 8), np.float32), np.arange(5)
    digits = job.Digits(images, images, labels, labels)
    return job.make_job(arguments(*options), model, digits)


def test_the_last_worker_is_the_straggler():
    workers = make_job("--workers", "3", "--straggler", "5", "--work", "0.1").workers
    means = [np.mean([worker.duration() for _ in range(4000)]) for worker in workers]
    np.testing.assert_allclose(means, [0.1, 0.1, 0.5], rtol=0.03)


@pytest.mark.parametrize(
    ("options", "required"),
    [
        (["--mode", "async"], None),
        (["--mode", "sync"], 5),
        (["--mode", "backup"], 4),
        (["--mode", "backup", "--backups", "3"], 2),
    ],
)
def test_a_step_requires_what_the_mode_says(options, required, standard_promotion):
    made = make_job("--workers", "5", "--max-staleness", "0", *options)
    assert made.required == required
    params, state = made.params, made.tx.init(made.params)
    for push in range(1, 11):  # All from step 0.
        params, state = gx.apply_gradients(
            made.tx, jnp.ones(1), state, params, local_step=0
        )
        assert gx.global_step(state) == (push >= (required or 1))
    assert state.stale_count == 10 - (required or 1)


@pytest.mark.parametrize("mode", job.MODES)
@pytest.mark.parametrize("optimizer", job.OPTIMIZERS)
def test_a_few_steps_lower_the_loss(optimizer, mode, standard_promotion):
    options = ["--mode", mode, "--optimizer", optimizer, "--steps", "120"]
    made = job.make_job(arguments(*options), job.build_model(0), job.load_digits())
    with engines.simulated(made) as run:
        losses = [push.loss for push in run.pushes]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]


# The command.


def test_the_defaults_learn_and_drop(tmp_path):
    done = run("--plot", str(tmp_path / "plot.png"))
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.fullmatch(r"test accuracy (0\.\d{3})", done.stdout.splitlines()[-1])
    assert float(accuracy[1]) >= 0.96
    accepted = int(row(done.stdout, "pushes accepted"))
    dropped = int(row(done.stdout, "pushes dropped"))
    assert accepted + dropped == 3000
    assert int(row(done.stdout, "steps")) == accepted
    assert 0.005 <= dropped / 3000 <= 0.2
    fraction = float(row(done.stdout, "staleness fraction"))
    assert fraction == pytest.approx(dropped / (accepted + 1), abs=5e-4)
    bars = histogram(done.stdout)
    assert sum(count for _, count, late in bars if not late) == accepted
    assert sum(count for _, count, late in bars if late) == dropped
    assert all(late == (step > 4) for step, count, late in bars if count)
    assert float(row(done.stdout, "gradient norm")) > 0
    assert float(row(done.stdout, "seconds")) < 60
    plot = (tmp_path / "plot.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(plot) > 10_000


@pytest.mark.parametrize(
    ("options", "steps", "dropped"),
    [(["--mode", "sync"], 15, 0), (["--mode", "backup", "--straggler", "9"], 19, 2)],
)
def test_threads_wait_for_those_they_require(options, steps, dropped):
    done = run("--steps", "60", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{options[1]} on threads, novograd, workers 4")
    assert abs(int(row(done.stdout, "steps")) - steps) <= (dropped and 4)
    assert (int(row(done.stdout, "pushes dropped")) > 0) == (dropped > 0)


def test_ray_trains_in_silence():
    pytest.importorskip("ray")
    done = run("--engine", "ray", "--steps", "30", "--workers", "2", "--mode", "sync")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sync on ray, novograd, workers 2, seed 0")
    assert row(done.stdout, "steps") == "15"


@pytest.fixture(scope="module")
def short():
    """A short simulation, for the tests that only look at it."""
    return run(*SHORT)


def test_a_pipe_gets_no_control_characters(short):
    assert (short.returncode, short.stderr) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", short.stdout)
    assert re.fullmatch(r"test accuracy 0\.\d{3}", short.stdout.splitlines()[-1])


def test_a_seed_gives_the_same_result(short):
    again, other = run(*SHORT, "--seed", "0"), run(*SHORT, "--seed", "1")
    first, again, other = (
        re.sub(r"seconds .*", "", done.stdout) for done in (short, again, other)
    )
    assert "staleness 1 " in first
    assert first == again
    assert histogram(first) != histogram(other)


def test_the_optimizer_is_the_given_one(short):
    done = run(*SHORT, "--optimizer", "adagrad")
    assert done.stdout.startswith("async on simulated, adagrad, workers 4, seed 0")
    assert histogram(done.stdout) == histogram(short.stdout)
    norm = "gradient norm"
    assert row(done.stdout, norm) != row(short.stdout, norm)


def test_the_limit_is_the_given_one(capsys, standard_promotion):
    job.main([*SHORT, "--workers", "3", "--max-staleness", "1"])
    stdout = capsys.readouterr().out
    assert stdout.startswith("async on simulated, novograd, workers 3, seed 0")
    assert {step for step, _, late in histogram(stdout) if not late} == {0, 1}


@pytest.mark.parametrize("setting", [{}, {"NO_COLOR": "1"}])
def test_a_terminal_gets_a_progress_bar_and_colors(setting):
    done = run(*SHORT, FORCE_COLOR="1", TERM="xterm", **setting)
    assert done.returncode == 0
    assert "100%" in done.stderr
    assert re.search(r"loss \d\.\d{3}", done.stderr)
    assert bool(COLOR.search(done.stdout)) == bool(COLOR.search(done.stderr))
    assert bool(COLOR.search(done.stdout)) == (not setting)
    assert re.fullmatch(r"test accuracy 0\.\d{3}", done.stdout.splitlines()[-1])


def test_ascii_output_is_enough():
    done = run(*SHORT, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_help_explains_every_option():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    options, words = done.stdout.split("options:")[1], r"\s+\w+ \w+"
    assert re.search(r"--optimizer \{novograd,adagrad\}" + words, options)
    assert re.search(r"--mode \{async,backup,sync\}" + words, options)
    assert re.search(r"--engine \{threads,ray,simulated\}" + words, options)
    for option in ("workers", "backups", "max-staleness", "steps", "seed"):
        assert re.search(rf"--{option} N{words}", options)
    for option in ("work", "straggler"):
        assert re.search(rf"--{option} X{words}", options)
    assert re.search(r"--plot FILE" + words, options)
    assert options.count("(default:") == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "3"], ["--step", "3"]),  # No abbreviations: they would not last.
        (["--mode", "late"], ["--mode", "async", "backup", "sync", "'late'"]),
        (["--engine", "dask"], ["--engine", "threads", "ray", "simulated", "'dask'"]),
        (["--mode", "backup", "--backups", "4"], ["--backups", "--workers", "4"]),
        (["--mode", "backup", "--workers", "1"], ["--backups", "--workers", "1"]),
        (["--backups", "0"], ["--backups", "[1, 999]", "'0'"]),
        (["--straggler", "0.9"], ["--straggler", "a number in [1, 1000]", "'0.9'"]),
        (["--straggler", "nan"], ["--straggler", "[1, 1000]", "'nan'"]),
        (["--straggler", "slow"], ["--straggler", "[1, 1000]", "'slow'"]),
        (["--work", "0"], ["--work", "[0.001, 60]", "'0'"]),
        (["--work", "inf"], ["--work", "[0.001, 60]", "'inf'"]),
        (["--optimizer", "adam"], ["--optimizer", "novograd", "adagrad", "'adam'"]),
        (["--workers", "0"], ["--workers", "[1, 1000]", "'0'"]),
        (["--workers", "1001"], ["--workers", "[1, 1000]", "'1001'"]),
        (["--workers", "2.5"], ["--workers", "[1, 1000]", "'2.5'"]),
        (["--steps", "0"], ["--steps", "[1, 2147483647]", "'0'"]),
        (["--steps", "many"], ["--steps", "[1, 2147483647]", "'many'"]),
        (["--max-staleness", "-1"], ["--max-staleness", "[0, 2147483647]", "'-1'"]),
        (["--max-staleness", "1e3"], ["--max-staleness", "[0, 2147483647]", "'1e3'"]),
        (["--seed", "-1"], ["--seed", "[0, 2147483647]", "'-1'"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["two\nlines"], ["two lines"]),
        (["--plot", "no/such/directory.png"], ["--plot", "'no/such/directory.png'"]),
        (["--plot", "plot.pdf"], ["--plot", ".png", "'plot.pdf'"]),
    ],
)
def test_a_bad_option_gets_one_line(options, words):
    done = run(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("python -m gradxform: error: ")
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize(
    ("package", "extra"),
    [(name, "demo") for name in ("flax", "matplotlib", "rich", "sklearn")]
    + [("ray", "ray")],
)
def test_a_missing_package_gets_one_line(package, extra, tmp_path):
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\")"
    (tmp_path / f"{package}.py").write_text(missing)
    engine = "ray" if package == "ray" else "threads"
    done = run("--engine", engine, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"'{package}'" in done.stderr
    assert f"python -m pip install 'gradxform[{extra}]'" in done.stderr


INTERRUPTED = "python -m gradxform: interrupted\n"


def test_an_interrupt_during_the_imports_gets_one_line(tmp_path):
    interrupting = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT)"
    swallowing = (
        f"try: exec({interrupting!r}); time.sleep(60)\nexcept BaseException: pass"
    )
    (tmp_path / "sklearn.py").write_text(swallowing)
    done = run(*SHORT, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", INTERRUPTED)


def processes_of(mark):
    """Those that inherited the mark."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            found += [path] * (mark.encode() in path.read_bytes())
    return found


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks for processes there")
@pytest.mark.parametrize("engine", engines.ENGINES)
def test_an_interrupt_ends_every_engine(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray")
    mark, plot = str(tmp_path), tmp_path / "plot.png"
    command = [sys.executable, "-m", "gradxform", "--steps", "1000000"]
    visible = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "MARK": mark}
    with subprocess.Popen(
        [*command, "--engine", engine, "--plot", str(plot)],
        env=os.environ | visible,
        start_new_session=True,  # A terminal interrupts all of a group.
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        seen = b""
        while b"loss" not in seen:  # The first push has arrived.
            seen += os.read(process.stderr.fileno(), 4096) or pytest.fail(str(seen))
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, b"")
    assert stderr.decode().endswith(INTERRUPTED)
    assert b"Traceback" not in stderr
    assert not plot.exists()
    deadline = time.monotonic() + 30
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(mark)


def test_trying_the_plot_leaves_files_as_they_are(tmp_path):
    old, new = tmp_path / "old.png", tmp_path / "new.png"
    old.write_bytes(b"precious")
    assert job.writable_png(str(old)) == str(old)
    assert job.writable_png(str(new)) == str(new)
    assert old.read_bytes() == b"precious"
    assert not new.exists()


def test_a_plot_that_fails_in_the_end_gets_one_line(
    tmp_path, capsys, monkeypatch, standard_promotion
):
    def save_plot(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "save_plot", save_plot)
    with pytest.raises(SystemExit, match="2"):
        job.main([*SHORT, "--plot", str(tmp_path / "plot.png")])
    stdout, stderr = capsys.readouterr()
    assert "test accuracy" in stdout  # The results are not lost with it.
    assert stderr.count("\n") == 1
    assert "--plot" in stderr
