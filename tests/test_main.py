"""The demo: its parts by hand-made cases, and the command as a user runs it."""

import contextlib
import functools
import io
import os
import re
import socket
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradxform as gx
from gradxform import __main__ as job
from tests.conftest import KILLED, OF_RAY, promotion, xla_flags

SHORT = ("--steps", "60", "--engine", "simulated")
OUTCOMES = ("accepted", "dropped")


def environment(**changes):
    """The environment of a process, with these changes."""
    return {**os.environ, "PYTHONIOENCODING": "utf-8", **changes}


# The stage of CI that runs the demo compiles its programs as a user does.
QUICK = {"XLA_FLAGS": xla_flags(level=0)}


def run(*options, **environ):
    """The command as a user runs it, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gradxform", *options],
        capture_output=True,
        env=environment(**{**QUICK, **environ}),
        encoding="utf-8",
        check=False,
    )


# Commands in this process share a model and its compiled programs.
build_model = functools.cache(job.build_model)


class Terminal(io.TextIOWrapper):
    """A stream that says that someone can see it."""

    def isatty(self):
        return True


def call(*options, encoding="utf-8", stream=io.TextIOWrapper):
    """The command in this process, which need not import everything anew."""
    out, err = (stream(io.BytesIO(), encoding) for _ in range(2))
    code = 0
    with (
        promotion(),
        mock.patch.object(job, "build_model", build_model),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            job.main(options)
        except SystemExit as end:
            code = end.code
    for each in (out, err):
        each.seek(0)
    return subprocess.CompletedProcess(options, code, out.read(), err.read())


def row(stdout, name):
    """The value beside ``name`` in the table."""
    return re.search(rf"^{name}  +(\S+)", stdout, re.M)[1]


def histogram(stdout):
    """(lowest staleness, highest, pushes, dropped ones) of each bar of the table."""
    bar = r"^staleness (\d+)(?: to (\d+))?  +(\d+)(?:, (\d+) dropped)? *#*$"
    for low, high, count, late in re.findall(bar, stdout, re.M):
        yield int(low), int(high or low), int(count), int(late or 0)


def check_bars(stdout, limit):
    """The bars hold every push, in few rows, and those above ``limit`` were dropped."""
    bars = list(histogram(stdout))
    assert 1 <= len(bars) <= 21
    accepted, dropped = (int(row(stdout, f"pushes {what}")) for what in OUTCOMES)
    assert sum(count for *_, count, _ in bars) == accepted + dropped
    assert sum(late for *_, late in bars) == dropped
    assert all(late == count for low, _, count, late in bars if low > limit)
    assert all(late == 0 for _, high, _, late in bars if high <= limit)
    return accepted, dropped


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
    digits = job.Digits(images, images, labels, labels)
    batch, drawn = job.make_worker(None, digits, 1.0, [0]).batch(3)
    which, down, right = np.nonzero(batch)
    assert which.tolist() == list(range(job.BATCH_SIZE))
    assert batch[which, down, right].tolist() == drawn.tolist()
    assert set(zip(down, right, strict=True)) == {
        (d, r) for d in (2, 3, 4) for r in (2, 3, 4)
    }
    assert set(drawn) == set(labels)


@pytest.mark.slow
def test_a_seed_decides_the_weights():
    first, again, other = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model.params)])
        for model in map(job.build_model, (0, 0, 1))
    )
    assert (first == again).all()
    assert np.mean(first != other) > 0.9  # All but the biases.


@pytest.mark.slow
def test_a_fresh_model_guesses():
    model, digits = job.build_model(0), job.load_digits()
    loss, grads = model.gradient(model.params, digits.images[:9], digits.labels[:9])
    assert 2.0 < loss < 3.0  # log(10)
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)


def test_minibatches_and_durations_are_functions_of_seed_worker_and_number():
    digits = job.load_digits()

    def drawn(*seed, number):
        worker = job.make_worker(None, digits, 1.0, seed)
        images, _ = worker.batch(number)
        return images.tobytes(), worker.duration(number)

    first = drawn(0, 1, number=7)
    assert first == drawn(0, 1, number=7)
    for other in (drawn(0, 1, number=8), drawn(0, 2, number=7), drawn(1, 1, number=7)):
        assert first[0] != other[0]
        assert first[1] != other[1]


# Workers and transformation.


def make_job(*options):
    """The command line's job for a model that is one number."""
    model = job.Model(jnp.zeros(1), lambda params, *batch: batch, None)
    images, labels = np.zeros((5, 8, 8), np.float32), np.arange(5)
    digits = job.Digits(images, images, labels, labels)
    return job.make_job(job.parse(options), model, digits)


def test_the_last_worker_is_the_straggler():
    workers = make_job("--workers", "3", "--straggler", "5", "--work", "0.1").workers
    means = [np.mean([*map(worker.duration, range(4000))]) for worker in workers]
    np.testing.assert_allclose(means, [0.1, 0.1, 0.5], rtol=0.03)


@pytest.mark.parametrize(
    ("options", "required"),
    [
        (["--mode", "async", "--max-staleness", "0"], None),
        (["--mode", "sync"], 5),
        (["--mode", "backup"], 4),
        (["--mode", "backup", "--backups", "3"], 2),
    ],
)
def test_the_mode_says_how_many_pushes_a_step_requires(
    options, required, standard_promotion
):
    made = make_job("--workers", "5", *options)
    assert made.required == required
    params, state = made.params, made.tx.init(made.params)
    grads, step = jnp.ones(1), jax.jit(functools.partial(gx.apply_gradients, made.tx))
    for push in range(1, 11):  # All from step 0.
        params, state = step(grads, state, params, local_step=np.int32(0))
        assert gx.global_step(state) == (push >= (required or 1))
    assert state.stale_count == 10 - (required or 1)


# The command.


@pytest.mark.slow
def test_the_defaults_learn_and_drop():
    # CI's first stage takes all of the 3,000 steps.
    done = run("--steps", "1000")
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.fullmatch(r"test accuracy (0\.\d{3})", done.stdout.splitlines()[-1])
    assert float(accuracy[1]) >= 0.95  # Eight seeds have reached 0.958 to 0.975.
    accepted, dropped = check_bars(done.stdout, limit=4)
    assert accepted + dropped == 1000
    assert int(row(done.stdout, "steps")) == accepted
    assert 0 < dropped < 500  # 60 or so, but on a busy machine a thread may starve.
    fraction = float(row(done.stdout, "staleness fraction"))
    assert fraction == pytest.approx(dropped / (accepted + 1), abs=5e-4)
    assert float(row(done.stdout, "gradient norm")) > 0
    assert float(row(done.stdout, "seconds")) > 0


@pytest.mark.slow
def test_ray_trains_in_silence():
    pytest.importorskip("ray")
    options = ["--engine", "ray", "--steps", "30", "--workers", "1"]
    # Its worker is killed in the end.
    done = run(*options, **OF_RAY, **KILLED)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("async on ray, novograd, workers 1, seed 0")
    assert row(done.stdout, "steps") == "30"


@pytest.fixture(scope="module")
def short():
    """A short simulation, for the tests that only look at it."""
    return call(*SHORT)


@pytest.fixture(scope="module")
def piped():
    """The same in a process of its own."""
    return run(*SHORT)


@pytest.fixture(scope="module")
def shown():
    """The same for a terminal."""
    return call(*SHORT, stream=Terminal)


@pytest.mark.slow
def test_a_pipe_gets_the_results_without_control_characters(piped):
    assert (piped.returncode, piped.stderr) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", piped.stdout)
    assert re.fullmatch(r"test accuracy 0\.\d{3}", piped.stdout.splitlines()[-1])


def results(done):
    """What was printed, without what the machine decides."""
    return re.sub(r"seconds .*", "", done.stdout)


@pytest.mark.slow
def test_a_seed_gives_the_same_result_in_every_process(short, piped, shown):
    other = call(*SHORT, "--seed", "1")
    assert "staleness 1 " in short.stdout
    assert results(piped) == results(shown) == results(short)
    assert list(histogram(other.stdout)) != list(histogram(short.stdout))


@pytest.mark.slow
def test_the_optimizer_is_the_given_one(short):
    done = call(*SHORT, "--optimizer", "adagrad")
    assert done.stdout.startswith("async on simulated, adagrad, workers 4, seed 0")
    assert list(histogram(done.stdout)) == list(histogram(short.stdout))
    norm = "gradient norm"
    assert row(done.stdout, norm) != row(short.stdout, norm)


@pytest.mark.slow
def test_the_limit_is_the_given_one():
    stdout = call(*SHORT, "--workers", "3", "--max-staleness", "1").stdout
    assert stdout.startswith("async on simulated, novograd, workers 3, seed 0")
    check_bars(stdout, limit=1)
    assert {low for low, *_, late in histogram(stdout) if not late} == {0, 1}


@pytest.mark.slow
def test_a_terminal_sees_the_progress(shown):
    assert shown.returncode == 0
    assert re.search(r"100%, step \d+, loss \d\.\d{3}", shown.stderr)
    assert "%" not in shown.stdout


@pytest.mark.slow
def test_ascii_output_is_enough():
    done = call(*SHORT, encoding="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_help_explains_every_option():
    done = call("--help")
    assert (done.returncode, done.stderr) == (0, "")
    options, words = done.stdout.split("options:")[1], r"\s+\w+ \w+"
    assert re.search(r"--optimizer \{novograd,adagrad\}" + words, options)
    assert re.search(r"--mode \{async,backup,sync\}" + words, options)
    assert re.search(r"--engine \{threads,ray,simulated\}" + words, options)
    integers = "workers", "backups", "max-staleness", "steps", "seed"
    integers += ("server-processes",)
    for option in integers:
        assert re.search(rf"--{option} N{words}", options)
    for option in ("work", "straggler", "checkpoint-every", "connect-timeout"):
        assert re.search(rf"--{option} X{words}", options)
    for option in ("checkpoint DIR", "logdir DIR", "address ADDRESS"):
        assert re.search(f"--{option}{words}", options)
    assert options.count("(default:") == 14
    assert "exit code 143" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "3"], ["--step", "3"]),  # No abbreviations: they would not last.
        (["--mode", "late"], ["--mode", "async", "backup", "sync", "'late'"]),
        (["--engine", "dask"], ["--engine", "threads", "ray", "simulated", "'dask'"]),
        (["--mode", "backup", "--backups", "4"], ["--backups", "--workers", "4"]),
        (["--straggler", "0.9"], ["--straggler", "a number in [1, 1000]", "'0.9'"]),
        (["--straggler", "nan"], ["--straggler", "[1, 1000]", "'nan'"]),
        (["--work", "0"], ["--work", "[0.001, 60]", "'0'"]),
        (["--optimizer", "adam"], ["--optimizer", "novograd", "adagrad", "'adam'"]),
        (["--workers", "0"], ["--workers", "[1, 1000]", "'0'"]),
        (["--workers", "2.5"], ["--workers", "[1, 1000]", "'2.5'"]),
        (["--steps", "0"], ["--steps", "[1, 2147483647]", "'0'"]),
        (["--max-staleness", "-1"], ["--max-staleness", "[0, 2147483647]", "'-1'"]),
        (["--seed", "-1"], ["--seed", "[0, 2147483647]", "'-1'"]),
        (["--seed"], ["--seed", "expected one argument"]),
        (["two\nlines"], ["two lines"]),
        (["--checkpoint", __file__], [__file__]),
        (["--checkpoint", f"{__file__}/in"], ["Not a directory", __file__]),
        (["--logdir", __file__], [__file__]),
        (["--checkpoint-every", "-1"], ["--checkpoint-every", "[0, inf]", "'-1'"]),
        (["--address", "auto"], ["--address: needs --engine ray"]),
        (["--server-processes", "2"], ["--server-processes", "--engine ray"]),
        (["--connect-timeout", "9"], ["--connect-timeout: needs --engine ray"]),
        (["--checkpoint-every", "9"], ["--checkpoint-every: needs --checkpoint"]),
        (["--backups", "1"], ["--backups: needs --mode backup"]),
        (
            ["--mode", "sync", "--max-staleness", "4"],  # The default, but it is given.
            ["--max-staleness: needs --mode async"],
        ),
        (["--checkpoint", ""], ["checkpoint must be a path", "''"]),
    ],
)
def test_a_bad_option_gets_one_line(options, words):
    check_one_line(call(*options), words)


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_was(tmp_path):
    """In the end its counts are those of a run without a stop: 80 pushes by four."""
    folder = str(tmp_path / "new" / "checkpoints")
    options = ["--engine", "simulated", "--mode", "sync", "--checkpoint", folder]
    assert call(*options, "--steps", "40").returncode == 0
    done = call(*options, "--steps", "80")
    assert (done.returncode, done.stderr) == (0, "")
    assert "10 of them before this run" in done.stdout
    assert row(done.stdout, "steps") == "20"
    assert row(done.stdout, "pushes accepted") == "80"
    assert sum(count for *_, count, _ in histogram(done.stdout)) == 40
    again = call(*options, "--steps", "80")
    assert results(again).split()[:4] == results(done).split()[:4]
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert not [*histogram(again.stdout)]
    other = call(*options, "--steps", "80", "--optimizer", "adagrad")
    check_one_line(other, ["is of another job", folder])
    assert "nothing is left to do: all 80 pushes" in again.stdout


@pytest.mark.slow
def test_a_resumed_run_warns_of_changed_settings(tmp_path, caplog):
    options = [*SHORT, "--checkpoint", str(tmp_path)]
    assert call(*options).returncode == 0
    assert call(*options, "--steps", "70").returncode == 0
    assert not caplog.messages
    done = call(*options, "--steps", "80", "--seed", "7", "--max-staleness", "2")
    assert done.returncode == 0
    assert [text.partition("70 has ")[2] for text in caplog.messages] == [
        "seed=0, and the run goes on with 7",
        "max_staleness=4, and the run goes on with 2",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device")
def test_a_full_device_gets_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gradxform", *SHORT],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(**QUICK),
            encoding="utf-8",
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_ends_in_silence():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gradxform", *SHORT],
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(**QUICK),
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_a_cluster_that_is_not_there_gets_one_line():
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:  # It is not a cluster.
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = ["--engine", "ray", "--address", address, "--connect-timeout", "0.5"]
        done = call(*options)
    check_one_line(done, ["address:", address, "connect_timeout=0.5 seconds"])


@pytest.mark.slow
def test_a_run_can_be_watched(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    done = call(*SHORT, "--logdir", str(tmp_path / "logs"))
    assert (done.returncode, done.stderr) == (0, "")
    events = event_accumulator.EventAccumulator(str(tmp_path / "logs")).Reload()
    for outcome in OUTCOMES:
        last = events.Scalars(outcome)[-1]
        assert last.value == int(row(done.stdout, f"pushes {outcome}"))
        assert last.step == int(row(done.stdout, "steps"))


def check_one_line(done, words):
    """The output is one line: an error that has these words."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("python -m gradxform: error: ")
    assert all(word in done.stderr for word in words)


PACKAGES = dict.fromkeys(("flax", "sklearn"), "demo")
PACKAGES |= {"ray": "ray", "tensorboardX": "tensorboard"}
ASKING = {"ray": ["--engine", "ray"], "tensorboardX": ["--logdir", "logs"]}


def lose(package, folder):
    """Puts a package that cannot be imported into a folder."""
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\")"
    (folder / f"{package}.py").write_text(missing)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_gets_one_line(package, tmp_path, monkeypatch):
    lose(package, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    done = call(*ASKING.get(package, []))
    extra = f"python -m pip install 'gradxform[{PACKAGES[package]}]'"
    check_one_line(done, [f"'{package}'", extra])


def test_without_orbax_a_checkpoint_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    check_one_line(call("--checkpoint", "here"), ["'gradxform[checkpoint]'"])
