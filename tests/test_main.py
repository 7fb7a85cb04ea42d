"""The demo: its parts by hand-made cases, and the command as a user runs it."""

import contextlib
import dataclasses
import errno
import functools
import io
import logging
import os
import pathlib
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
import tomllib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import __main__ as job
from gradxform import engines
from gradxform._demo import command_line, ctrl_c, report
from tests.conftest import KILLED, OF_RAY, promotion, xla_flags

SHORT = ("--steps", "60", "--engine", "simulated")
OUTCOMES = ("accepted", "dropped")


# Another process may be writing a program just then; see pyproject.toml.
BEING_WRITTEN = "ignore:Error reading persistent compilation cache entry:UserWarning"


def environment(**changes):
    """The environment of a process, with these changes."""
    given = {"PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": BEING_WRITTEN}
    return {**os.environ, **given, **changes}


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


def on_terminal(columns, *options, meanwhile=lambda process, text: True):
    """The command on a terminal: its exit code, and what it wrote, with the times.

    ``meanwhile`` is called with what it has written, until it returns True.
    """
    done = False
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    start, log = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-m", "gradxform", *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(**QUICK, TERM="xterm", COLUMNS="", FORCE_COLOR=""),
    )
    os.close(theirs)
    with contextlib.suppress(OSError):  # Linux says so that the terminal is closed.
        while data := os.read(ours, 2**16):
            log.append((time.monotonic() - start, data.decode()))
            done = done or meanwhile(process, "".join(text for _, text in log))
    os.close(ours)
    return process.wait(), log


def rows_of(text):
    """The rows of a terminal, also those that were written over."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text))


def unexpected(stderr):
    """What stderr says beside the progress."""
    progress = r"loading, compiling|[ \d]+%, step \d+, loss \S+(, \d+ s left)?"
    return [line for line in stderr.splitlines() if not re.fullmatch(progress, line)]


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
    assert digits.labels[:8].tolist() == [3, 9, 1, 3, 1, 9, 4, 4]  # Always the same.
    assert images.min() == 0.0
    assert images.max() == 1.0


def test_workers_shift_digits_by_at_most_a_pixel():
    images = np.zeros((5, 8, 8), np.float32)
    images[:, 3, 3] = labels = np.arange(1, 6)  # One lit pixel, as bright as its label.
    digits = job.Digits(images, images, labels, labels)
    batch, drawn = job.make_worker(None, digits, 1.0, [0]).batch(3)
    which, down, right = np.nonzero(batch)
    assert which.tolist() == list(range(64))
    assert batch[which, down, right].tolist() == drawn.tolist()
    assert set(zip(down, right, strict=True)) == {
        (d, r) for d in (2, 3, 4) for r in (2, 3, 4)
    }
    assert set(drawn) == set(labels)


def test_the_model_is_a_small_convolutional_net():
    """Its logits, by NumPy; and the loss and its gradient, by their traces."""
    model, images = job.build_model(2), np.zeros((2, 8, 8), np.float32)
    images[0, 2:5, 3], images[1] = 1.0, np.arange(64.0).reshape(8, 8) / 64
    x, layers = images[..., None].astype(np.float64), model.params["layers"]

    def leaky(x):
        return np.where(x > 0, x, x / 100)

    def convolved(x, layer, stride):
        kernel, high = layer["kernel"][...], len(x[0])
        left = (3 - stride) // 2  # Of "SAME" padding, for an even size.
        x = np.pad(x, ((0, 0), (left, 2 - left), (left, 2 - left), (0, 0)))
        down, right = np.mgrid[:3, :3].reshape(2, 9)
        cut = [
            x[:, d : d + high, r : r + high] for d, r in zip(down, right, strict=True)
        ]
        cut = [each[:, ::stride, ::stride] for each in cut]
        matrices = kernel.reshape(9, *kernel.shape[2:])
        return leaky(sum(map(np.matmul, cut, matrices)))

    kernels = [layers[i]["kernel"][...].shape for i in (0, 2, 5, 7)]
    assert kernels == [(3, 3, 1, 16), (3, 3, 16, 32), (512, 64), (64, 10)]
    x = convolved(convolved(x, layers[0], 1), layers[2], 2).reshape(2, -1)
    x = leaky(x @ layers[5]["kernel"][...]) @ layers[7]["kernel"][...]
    with promotion():
        logits = model.logits(model.params, images)
        np.testing.assert_allclose(logits, x, rtol=1e-4, atol=1e-5)
        loss, grads = jax.eval_shape(model.gradient, model.params, images, np.arange(2))
    assert loss.shape == ()
    assert jax.tree.structure(grads) == jax.tree.structure(model.params)


@pytest.mark.slow
def test_a_fresh_model_guesses_and_its_seed_decides_the_weights():
    models = [job.build_model(seed) for seed in (0, 0, 1)]
    first, again, other = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(model.params)])
        for model in models
    )
    assert (first == again).all()
    assert np.mean(first != other) > 0.9  # All but the biases.
    model, digits = models[0], job.load_digits()
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
    normal = np.random.default_rng((0, 1, 7, 1)).standard_normal()
    np.testing.assert_allclose(first[1], np.exp(0.25 * normal - 0.25**2 / 2))
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
    drawn = [[*map(worker.duration, range(2000))] for worker in workers]
    np.testing.assert_allclose(np.mean(drawn, 1), [0.1, 0.1, 0.5], rtol=0.03)
    np.testing.assert_allclose(np.std(np.log(drawn), 1), [0.25] * 3, rtol=0.05)


@pytest.mark.slow
def test_the_rate_rises_for_a_tenth_and_falls_to_zero(monkeypatch):
    rates = []
    follow = lambda rate: rates.append(rate) or optax.identity()  # noqa: E731
    monkeypatch.setitem(job.OPTIMIZERS, "adagrad", (follow, 0.5))
    tx = job.make_optimizer("adagrad", 100, 4)
    expected = {0: 0.0, 5: 0.5, 10: 1.0, 55: 0.5, 100: 0.0}  # Twice the peak.
    for step, rate in expected.items():
        np.testing.assert_allclose(rates[0](step), rate, atol=1e-6)
    large = jnp.array([30.0, 40.0])
    updates, _ = tx.update(large, tx.init(large), large)
    np.testing.assert_allclose(updates, [0.6, 0.8], rtol=1e-6)


@pytest.mark.every
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--steps", "23"], ("novograd", 23, 1)),
        (["--steps", "23", "--mode", "sync"], ("novograd", 5, 4)),
        (["--steps", "2", "--mode", "backup"], ("novograd", 1, 3)),
        (["--steps", "9", "--optimizer", "adagrad"], ("adagrad", 9, 1)),
    ],
)
def test_the_rate_knows_how_many_steps_the_pushes_make(options, expected, monkeypatch):
    made = mock.Mock(return_value=optax.identity())
    monkeypatch.setattr(job, "make_optimizer", made)
    state = make_job(*options).tx.init(jnp.zeros(1))
    made.assert_called_once_with(*expected)
    gates = gx.DropStaleState, gx.ConditionalAccumulatorState
    assert type(state) is gates["--mode" in options]


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
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
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
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
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
    assert piped.returncode == 0
    first, second, *others = piped.stderr.splitlines()
    assert first == "loading, compiling"
    assert re.fullmatch(r"  2%, step 1, loss 2\.\d{3}", second)
    assert not unexpected("\n".join(others))
    for text in (piped.stdout, piped.stderr):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
        assert max(map(len, text.splitlines())) <= 80
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
def test_the_optimizer_and_the_limit_are_the_given_ones(short):
    done = call(*SHORT, "--optimizer", "adagrad")
    assert done.stdout.startswith("async on simulated, adagrad, workers 4, seed 0")
    assert list(histogram(done.stdout)) == list(histogram(short.stdout))
    norm = "gradient norm"
    assert row(done.stdout, norm) != row(short.stdout, norm)
    stdout = call(*SHORT, "--workers", "3", "--max-staleness", "1").stdout
    assert stdout.startswith("async on simulated, novograd, workers 3, seed 0")
    check_bars(stdout, limit=1)
    assert {low for low, *_, late in histogram(stdout) if not late} == {0, 1}


@pytest.mark.slow
def test_a_terminal_sees_a_bar():
    code, log = on_terminal(120, *SHORT[2:], "--steps", "300")
    assert code == 0
    text = "".join(text for _, text in log)
    rows = rows_of(text)
    assert rows[0] == "loading, compiling"
    assert max(map(len, rows)) <= 80
    bars = [row for row in rows if "━" in row]
    assert any("compiling" in row for row in bars)
    assert re.search(r"100% ━+ step \d+, loss \d\.\d{3} \d:\d\d:\d\d", bars[-1])
    (began,) = [at for at, text in log if "\x1b[?25l" in text]  # It hides the cursor.
    (ended,) = [at for at, text in log if "\x1b[?25h" in text]
    assert len(bars) <= 10 * (ended - began) + 3  # Its first, its last, and rounding.
    assert re.fullmatch(r"test accuracy 0\.\d{3}", rows[-2])


def pushed(number, *, loss=1.0, applied=True, staleness=0):
    """A push that is the ``number``-th step."""
    result = gx.PushResult(applied, staleness, number)
    return engines.Push(0, number, 0, loss, 1.0, result)


def test_lines_come_every_five_seconds_with_an_estimate(monkeypatch, capsys):
    """Ten pushes a second, of 400: at second t it takes another 40 - t."""
    clock = types.SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(report, "time", clock)
    with report.progress(400) as show:
        for number in range(1, 126):
            clock.now = number / 10 - 0.1
            counts = mock.Mock(accepted=number, dropped=0)
            show(pushed(number, loss=number / 1000), counts)
    assert capsys.readouterr().err.splitlines() == [
        "  0%, step 1, loss 0.001",
        " 13%, step 51, loss 0.051, 35 s left",
        " 25%, step 101, loss 0.101, 30 s left",
    ]


@pytest.mark.every
@pytest.mark.parametrize(
    ("stream", "setting", "width"),
    [
        (Terminal, {"COLUMNS": "40", "TERM": "xterm"}, 40),
        (Terminal, {"COLUMNS": "200", "TERM": "xterm"}, 80),
        (Terminal, {"TERM": "dumb"}, None),
        (io.TextIOWrapper, {"FORCE_COLOR": "1", "TERM": "xterm"}, None),
    ],
)
def test_a_bar_on_a_terminal_is_lines_elsewhere(stream, setting, width, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    err = stream(io.BytesIO(), "utf-8")
    counts = mock.Mock(accepted=2, dropped=1)
    with contextlib.redirect_stderr(err), report.progress(4) as show:
        show(pushed(2, loss=0.25), counts)
    err.seek(0)
    text = err.read()
    if width is None:
        assert text == " 75%, step 2, loss 0.250\n"
        return
    first, *_, last = rows = [*filter(None, rows_of(text))]
    assert "compiling" in first
    assert max(map(len, rows)) <= width
    if width == 80:
        assert re.fullmatch(" 75% [━╸]{30} step 2, loss 0.250 -:--:--", last)


def test_orbax_is_quiet(monkeypatch, capsys):
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    before = [each.level for each in loggers]
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    try:
        report.quiet_orbax()
        assert not any(each.isEnabledFor(logging.ERROR) for each in loggers)
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)
    sys.unraisablehook(mock.Mock())
    assert capsys.readouterr() == ("", "")


def test_the_table_has_a_row_for_each_number():
    """By hand: 21 steps late need ranges of two."""
    by_worker = {1: engines.WorkerCounts(9, 4), 2: engines.WorkerCounts(7, 3)}
    counts = mock.Mock(accepted=16, dropped=7, by_worker=by_worker)
    counts.configure_mock(worker_deaths=2, server_deaths=0, lost=5)
    ended = mock.Mock(resumed=8, counts=lambda: counts)
    late = [0, 1, 1, 1, 1, 1, 5, 20]
    pushes = [pushed(i, staleness=n, applied=n < 5) for i, n in enumerate(late)]
    state = gx.drop_stale(gx.clip_by_global_norm(1.0), 1).init(jnp.zeros(1))
    options = job.parse(["--workers", "3", "--seed", "5"])
    text = report.make_report(options, ended, pushes, state, 12.34)
    assert text.splitlines() == [
        "async on threads, novograd, workers 3, seed 5",
        "steps               0             8 before this run",
        "pushes accepted     16",
        "pushes dropped      7             3 of the last worker",
        "deaths of workers   2",
        "pushes lost         5",
        "staleness fraction  0.000         too late / (steps + 1)",
        f"staleness 0 to 1    6             {'#' * 20}",
        "staleness 2 to 3    0",
        "staleness 4 to 5    1, 1 dropped  ###",
        *(f"{f'staleness {n} to {n + 1}':<18}  0" for n in range(6, 20, 2)),
        "staleness 20 to 21  1, 1 dropped  ###",
        "gradient norm       0.000         of the last step, not clipped",
        "seconds             12.3          of starting and training",
    ]


def test_no_row_of_the_table_is_wider_than_80_columns():
    options = job.parse(["--workers", "1000", "--seed", f"{2**31 - 1}"])
    many = 9_999_999
    worker = engines.WorkerCounts(many, many, many)
    counts = mock.Mock(accepted=many, dropped=many, by_worker={999: worker})
    counts.configure_mock(worker_deaths=999, server_deaths=999, lost=many)
    ended = mock.Mock(resumed=many, counts=lambda: counts)
    pushes = [pushed(i, staleness=i, applied=i % 2) for i in range(0, 12_000, 7)]
    state = gx.drop_stale(gx.clip_by_global_norm(1.0), 1).init(jnp.zeros(1))
    text = report.make_report(options, ended, pushes, state, 99_999.9)
    assert max(map(len, text.splitlines())) <= 80
    assert [high - low > 0 for low, high, *_ in histogram(text)] == [True] * 20
    many = ("staleness 12000 to 12599", "1234567, 1234567 dropped", "")
    rows = [many, ("", "", "x" * 27)]  # The longest remark has 27 characters.
    assert max(map(len, report.align(rows).splitlines())) == 79


# The picture.


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved meanwhile."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


@pytest.mark.slow
def test_a_picture_shows_every_push(tmp_path, drawn, short):
    path = tmp_path / "plot.png"
    done = call(*SHORT, "--plot", str(path))
    assert results(done) == results(short)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (figure,) = drawn
    above, below = figure.axes
    loss, mean = above.lines
    assert loss.get_xdata().tolist() == [*range(1, 61)]
    window = 7  # A tenth of the pushes, and one.
    expected = [np.mean(loss.get_ydata()[i : i + window]) for i in range(54)]
    np.testing.assert_allclose(mean.get_ydata(), expected, rtol=1e-6)
    assert mean.get_xdata().tolist() == [*range(window, 61)]
    points = {line.get_label(): line for line in below.lines}
    for low, high, count, late in histogram(done.stdout):
        assert low == high
        for label, number in (("accepted", count - late), ("dropped", late)):
            if label in points:
                assert (points[label].get_ydata() == low).sum() == number
    assert {*points} >= {"accepted"}


@pytest.mark.slow
def test_a_picture_has_the_format_of_its_name(tmp_path):
    report.save_plot(str(tmp_path / "plot.svg"), "title", [pushed(1)])
    assert "<svg" in (tmp_path / "plot.svg").read_text()


@pytest.fixture
def planned():
    """A function that gives the figure of some pushes, and saves no file."""

    def planned(pushes):
        with mock.patch("matplotlib.figure.Figure.savefig", autospec=True) as saved:
            report.save_plot("x.png", "title", pushes)
        figure, path = saved.call_args.args
        assert path == "x.png"
        return figure

    return planned


@pytest.mark.every
@pytest.mark.parametrize("count", [1, 30, 600])
def test_a_picture_shows_the_loss_of_each_push_and_means(count, planned):
    losses = 1 + np.arange(count) * 7 % 11
    pushes = [pushed(i, loss=loss) for i, loss in enumerate(losses)]
    (loss, mean), window = planned(pushes).axes[0].lines, {1: 1, 30: 4, 600: 50}[count]
    assert loss.get_label() == "one minibatch"
    assert loss.get_xydata().tolist() == [[i + 1, x] for i, x in enumerate(losses)]
    assert mean.get_label() == f"mean of {window} pushes"
    assert mean.get_xdata().tolist() == [*range(window, count + 1)]
    expected = [np.mean(losses[i - window : i]) for i in range(window, count + 1)]
    np.testing.assert_allclose(mean.get_ydata(), expected, rtol=1e-12)


@pytest.mark.every
@pytest.mark.parametrize("applied", [[True], [False], [True, False, True]])
def test_a_picture_shows_what_was_dropped(applied, planned):
    pushes = [pushed(i, applied=x, staleness=i % 2) for i, x in enumerate(applied)]
    below = planned(pushes).axes[1]
    expected = {}
    for i, x in enumerate(applied):
        name = "accepted" if x else "dropped"
        expected.setdefault(name, []).append([i + 1, i % 2])
    assert {x.get_label(): x.get_xydata().tolist() for x in below.lines} == expected
    if len(applied) == 1:  # The axis would have ticks between integers.
        ticks = below.yaxis.get_major_locator().tick_values(0.0, 1.0)
        assert (ticks % 1 == 0).all()


def test_a_picture_has_its_size_its_words_and_legends_above_the_points(planned):
    figure = planned([pushed(1), pushed(2, applied=False)])
    assert (figure.get_size_inches() * figure.dpi).tolist() == [1050, 825]
    assert figure.get_suptitle() == "title"
    above, below = figure.axes
    assert above.get_shared_x_axes().joined(above, below)
    assert (above.get_ylabel(), below.get_ylabel()) == (
        "loss [nat]",
        "staleness [steps]",
    )
    assert (above.get_yscale(), below.get_xlabel()) == ("log", "push")
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert all(line.get_visible() for line in axes.get_xgridlines())
        legend, box = axes.get_legend(), axes.bbox
        assert not legend.get_frame_on()
        place = legend.get_window_extent()
        assert box.y1 < place.y0 < box.y1 + 50
        assert box.x0 < place.x0 < place.x1 < box.x1 + 1


def test_a_picture_that_cannot_be_saved_is_told(monkeypatch, capsys):
    full = mock.Mock(side_effect=OSError("it is full"))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(SystemExit) as raised:
        report.save_plot("x.png", "title", [pushed(1)])
    assert raised.value.code == 2
    told = "python -m gradxform: error: argument --plot: it is full\n"
    assert capsys.readouterr().err == told


@pytest.mark.slow
def test_a_picture_that_cannot_be_saved_costs_no_results(monkeypatch, tmp_path, short):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", mock.Mock(side_effect=full))
    done = call(*SHORT, "--plot", str(tmp_path / "plot.png"))
    assert done.returncode == 2
    assert results(done) == results(short)
    assert "error: argument --plot: [Errno 28] No space left" in done.stderr


# The command on an engine that has made its pushes.


class Done:
    """The run of an engine that has made these pushes, as the command uses it."""

    def __init__(self, pushes, ends=lambda: None):
        self.pushes, self.resumed, self.ends = self.counted(pushes), None, ends
        counts = types.SimpleNamespace(accepted=0, dropped=0, by_worker={})
        deaths = dict.fromkeys(("worker_deaths", "server_deaths", "lost"), 0)
        vars(counts).update(deaths)
        self.counts = lambda: counts
        state = gx.drop_stale(gx.clip_by_global_norm(1.0), 1).init(jnp.zeros(1))
        self.server = mock.Mock()
        self.server.state.return_value = {"params": "trained", "state": state}

    def counted(self, pushes):
        for push in pushes:
            self.counts().accepted += 1
            yield push

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ends()


def logits(params, images):
    """Right for the first three quarters of all test images."""
    assert params == "trained"
    labels = job.load_digits().test_labels
    return -np.abs(np.arange(10) - (labels + (np.arange(360) >= 270))[:, None] % 10)


@pytest.fixture
def call_on(monkeypatch):
    """Calls the command on a run; gives also its job, its options and its pictures."""

    def call_on(run, *options):
        began = mock.Mock(side_effect=[run])
        drawn, model = mock.Mock(), job.Model(jnp.zeros(1), "gradient", logits)
        monkeypatch.setattr(engines, "simulated", began)
        monkeypatch.setattr(report, "save_plot", drawn)
        made = mock.Mock(return_value=model)
        monkeypatch.setattr(sys.modules[__name__], "build_model", made)
        given = "--engine", "simulated", "--steps", "12", "--seed", "3", *options
        done = call(*given)
        made.assert_called_once_with(3)
        return done, began, drawn

    return call_on


def test_the_command_trains_reports_and_draws(call_on, tmp_path, monkeypatch):
    boards = mock.MagicMock()
    monkeypatch.setattr(engines, "TensorBoard", boards)
    picture, logs = str(tmp_path / "x.png"), str(tmp_path / "logs")
    pushes = [pushed(number, loss=number / 4) for number in range(1, 13)]
    before = signal.signal(signal.SIGINT, ctrl_c.interrupt)
    try:
        run = Done(pushes)
        done, began, drawn = call_on(run, "--plot", picture, "--logdir", logs)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
    assert done.stderr.startswith("  8%, step 1, loss 0.250\n")
    title = "async on simulated, novograd, workers 4, seed 3"
    assert done.stdout.startswith(title + "\n")
    assert "nothing" not in done.stdout
    assert row(done.stdout, "pushes accepted") == "12"
    assert 0 <= float(row(done.stdout, "seconds")) < 60
    assert done.stdout.endswith("\ntest accuracy 0.750\n")
    drawn.assert_called_once_with(picture, title, pushes)
    ((made,), more) = began.call_args
    assert (made.pushes, len(made.workers), more) == (12, 4, {})
    assert made.workers[0].gradient == "gradient"
    boards.assert_called_once_with(logs, run)
    board = boards.return_value.__enter__.return_value
    assert board.call_args_list == [mock.call(push) for push in pushes]


def test_the_command_says_so_when_nothing_is_left(call_on, tmp_path):
    done, _, drawn = call_on(Done([]), "--plot", str(tmp_path / "x.png"))
    assert done.returncode == 0
    says = "nothing is left to do: all 12 pushes were made before; try more --steps\n"
    assert done.stdout.endswith(says + "test accuracy 0.750\n")
    drawn.assert_not_called()


def test_an_end_that_cannot_be_saved_costs_no_results(call_on):
    full = mock.Mock(side_effect=OSError("it is full"))
    done, *_ = call_on(Done([pushed(1)], full))
    assert done.returncode == 2
    assert done.stdout.endswith("test accuracy 0.750\n")
    told = "argument --checkpoint: the end was not saved: it is full"
    assert unexpected(done.stderr) == [f"python -m gradxform: error: {told}"]


def test_a_picture_is_drawn_even_if_nobody_reads_the_results(call_on, monkeypatch):
    monkeypatch.setattr(job, "say", mock.Mock(side_effect=SystemExit(141)))
    done, _, drawn = call_on(Done([pushed(1)]), "--plot", "x.png")
    assert (done.returncode, done.stdout) == (141, "")
    drawn.assert_called_once()


def test_an_engine_that_does_not_begin_gets_one_line(call_on):
    from_elsewhere = OSError("a traceback")
    from_elsewhere.cause = OSError("no such folder")
    done, *_ = call_on(mock.MagicMock(__enter__=mock.Mock(side_effect=from_elsewhere)))
    check_one_line(done, ["error: no such folder\n"])


def test_an_engine_gets_the_options_that_are_its_own(monkeypatch, tmp_path):
    folder, began = str(tmp_path), mock.Mock()
    for name in ("threads", "ray"):
        monkeypatch.setattr(engines, name, getattr(began, name))
    every = ["--checkpoint", folder, "--checkpoint-every", "7"]
    job.make_run(job.parse(every), "a job")
    settings = {
        "mode": "async",
        "optimizer": "novograd",
        "workers": 4,
        "seed": 0,
        "backups": 1,
        "max_staleness": 4,
    }
    saved = engines.Checkpoint(folder, every_seconds=7.0, settings=settings)
    began.threads.assert_called_once_with("a job", checkpoint=saved)
    more = ["--address", "auto", "--connect-timeout", "9", "--server-processes", "2"]
    job.make_run(job.parse(["--engine", "ray", *more]), "a job")
    began.ray.assert_called_once_with(
        "a job", address="auto", connect_timeout=9.0, server_processes=2
    )


def test_ctrl_c_is_heard_until_all_is_loaded(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        ctrl_c.interrupt()
    os._exit.assert_called_once_with(130)
    assert capfd.readouterr().err == INTERRUPTED
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ctrl_c.loaded()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ctrl_c.hear()
        assert signal.getsignal(signal.SIGINT) is ctrl_c.interrupt
        ctrl_c.loaded()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for heard in (ctrl_c.hear, ctrl_c.loaded):
            heard()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Before anything is loaded.


LOADING, INTERRUPTED = "loading, compiling\n", "python -m gradxform: interrupted\n"
CTRL_C = "import os, signal; os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)"
# As ``nohup`` and a shell's ``&`` ask for.
IGNORING = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
GRADXFORM = ["-m", "gradxform"]


def begun(folder, code, *command, first=(), module="jax"):
    """A command of Python's where the import of JAX is this code."""
    (folder / f"{module}.py").write_text(code)
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "__init__.py").write_text("import gradxform")
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [*first, sys.executable, *command],
        capture_output=True,
        env=environment(**QUICK, PYTHONPATH=path),
        encoding="utf-8",
        check=False,
    )


@pytest.mark.every
@pytest.mark.parametrize(
    ("code", "options", "first", "ends"),
    [
        # A line comes before JAX is imported, and answers to questions do, too.
        ("raise SystemExit(7)", [], [], (7, "", LOADING)),
        ("", ["--version"], [], (0, f"gradxform {gx.__version__}\n", "")),
        (CTRL_C, [], [], (130, "", LOADING + INTERRUPTED)),
        (CTRL_C, [], IGNORING, (7, "", LOADING)),
    ],
)
def test_before_jax_is_there_it_says_so_and_hears_ctrl_c(
    code, options, first, ends, tmp_path
):
    code = code or "raise SystemExit(7)"
    done = begun(tmp_path, code, *GRADXFORM, *options, first=first)
    assert (done.returncode, done.stdout, done.stderr) == ends
    if "--version" in options:
        done = begun(tmp_path, code, *GRADXFORM, "--step", "3")
        check_one_line(done, ["--step"])


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "inspect"])
def test_ctrl_c_is_heard_before_the_options_are_read(module, tmp_path):
    """What its first module imports is imported before this, in a hundredth second."""
    done = begun(tmp_path, CTRL_C, *GRADXFORM, module=module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", INTERRUPTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import gradxform"],
        ["-c", "import gradxform", "-m", "gradxform"],
        ["-m", "other", "gradxform"],
        ["-m", "other", "-m", "gradxform"],
    ],
)
def test_an_import_by_another_program_prints_nothing(command, tmp_path):
    """And Ctrl-C stays that program's own."""
    done = begun(tmp_path, CTRL_C, *command)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.startswith("Traceback")
    assert "interrupted\n" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_while_the_demo_loads(tmp_path):
    """JAX is there, and Flax is being imported."""
    done = begun(tmp_path, CTRL_C, *GRADXFORM, module="flax")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == LOADING + INTERRUPTED


@pytest.mark.slow
def test_ctrl_c_while_it_trains_gives_the_terminal_its_cursor_back():
    def interrupt(process, text):
        if "step" in text and not text.endswith("\x1b[?25h"):
            process.send_signal(signal.SIGINT)
            return True
        return False

    code, log = on_terminal(80, meanwhile=interrupt)
    text = "".join(text for _, text in log)
    assert code == 130
    assert "Traceback" not in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith(INTERRUPTED.replace("\n", "\r\n"))


def test_the_optimizers_of_the_command_line_are_there():
    assert (*job.OPTIMIZERS,) == command_line.OPTIMIZERS


def test_extras_bring_what_uses_them():
    text = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    demo = {re.split(r"[>=]", each)[0] for each in extras["demo"]}
    assert demo >= {"flax", "rich", "scikit-learn", "matplotlib"}
    assert {"gradxform[demo]", "gradxform[notebooks]"} <= {*extras["test"]}


@pytest.mark.slow
def test_ascii_output_is_enough():
    done = call(*SHORT, encoding="ascii")
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
    assert done.stdout.isascii()


def test_the_defaults_are_those_of_the_help():
    assert dataclasses.asdict(job.parse([])) == {
        "mode": "async",
        "engine": "threads",
        "optimizer": "novograd",
        "workers": 4,
        "backups": 1,
        "max_staleness": 4,
        "steps": 3000,
        "work": 0.01,
        "straggler": 1.0,
        "seed": 0,
        "checkpoint": None,
        "checkpoint_every": 5.0,
        "logdir": None,
        "address": None,
        "server_processes": 1,
        "connect_timeout": 30.0,
        "plot": None,
    }


def test_options_say_which_packages_they_need():
    always = [("", name, "demo") for name in ("flax", "rich", "sklearn")]
    for options, more in (
        ([], []),
        (["--engine", "ray"], [("engine", "ray", "ray")]),
        (["--checkpoint", "x"], [("checkpoint", "orbax.checkpoint", "checkpoint")]),
        (["--logdir", "x"], [("logdir", "tensorboardX", "tensorboard")]),
        (["--plot", "x.png"], [("plot", "matplotlib", "demo")]),
    ):
        assert [*job.parse(options).packages()] == always + more


def test_the_first_line_comes_after_the_options_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradxform", "--steps", "0"])
    with pytest.raises(SystemExit):
        command_line.begin()
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gradxform", "--steps", "1"])
    command_line.begin()
    assert capsys.readouterr() == ("", LOADING)


def test_places_that_can_be_written_are_taken(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "gs:").touch()  # It has nothing to do with a bucket.
    for folder in ("new/run", "~/new", "~", "gs://bucket/file", str(tmp_path)):
        assert job.parse(["--logdir", folder]).logdir == folder
    for picture in ("x.PNG", str(tmp_path / "x.svg")):
        assert job.parse(["--plot", picture]).plot == picture
    (tmp_path / "folder.png").mkdir()
    for option, path in (
        ("--plot", "folder.png"),
        ("--logdir", "file/run"),
        ("--logdir", "~/file"),
    ):
        check_one_line(call(option, path), [f"argument {option}: '"])


@pytest.mark.every
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (
            OSError(errno.ENOSPC, "it is full"),
            2,
            "python -m gradxform: error: the results cannot be printed: it is full\n",
        ),
    ],
)
def test_results_that_nobody_can_read_end_it(error, code, says, tmp_path, capsys):
    with open(tmp_path / "out", "w") as file:
        stream = mock.Mock(write=mock.Mock(side_effect=error), fileno=file.fileno)
        with pytest.raises(SystemExit) as raised:
            command_line.say("results", stream)
        assert (raised.value.code, capsys.readouterr().err) == (code, says)
        file.write("more")  # As Python does in the end.
    assert (tmp_path / "out").read_text() == ""
    stream = mock.Mock()
    command_line.say("results", stream)
    assert [name for name, *_ in stream.mock_calls] == ["write", "write", "flush"]
    assert "".join(call.args[0] for call in stream.write.mock_calls) == "results"


def test_help_explains_every_option(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, call("--help").stdout.splitlines())) == 68
    monkeypatch.setenv("COLUMNS", "200")
    done = call("--help")
    assert max(map(len, done.stdout.splitlines())) == 78
    assert (done.returncode, done.stderr) == (0, "")
    options = done.stdout.split("options:")[1]
    for kind, names in {
        r"\{novograd,adagrad\}": ["optimizer"],
        r"\{async,backup,sync\}": ["mode"],
        r"\{threads,ray,simulated\}": ["engine"],
        "N": [
            "workers",
            "backups",
            "max-staleness",
            "steps",
            "seed",
            "server-processes",
        ],
        "X": ["work", "straggler", "checkpoint-every", "connect-timeout"],
        "DIR": ["checkpoint", "logdir"],
        "FILE": ["plot"],
        "ADDRESS": ["address"],
    }.items():
        for name in names:
            assert re.search(rf"--{name} {kind}\s+\w+ \w+", options)
    assert options.count("(default:") == 14
    assert "exit code 143" in " ".join(done.stdout.split())


@pytest.mark.every
@pytest.mark.parametrize(
    ("options", "words"),
    [
        # No abbreviations: they would not last.
        (["--step", "3"], ["--step 3", "did you mean --steps?"]),
        (["--optimiser=adagrad"], ["adagrad; did you mean --optimizer?"]),
        (["--checkpoint-dir", "x"], ["did you mean --checkpoint?"]),
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
        (["--checkpoint", __file__], ["--checkpoint", f"{__file__}' is not a folder"]),
        (["--checkpoint", f"{__file__}/in"], ["--checkpoint", "is not a folder"]),
        (["--logdir", __file__], ["--logdir", f"{__file__}' is not a folder"]),
        (["--logdir", ""], ["--logdir", "must be a path", "''"]),
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
        (["--checkpoint", ""], ["--checkpoint", "must be a path", "''"]),
        (["--plot", "plot.jpg"], ["--plot", ".png, .pdf, .svg", "'plot.jpg'"]),
        (["--plot", "no/folder/x.png"], ["--plot", "'no/folder/x.png' cannot be"]),
        (["--plot", "/.png/x.PDF"], ["--plot", "cannot be written"]),
    ],
)
def test_a_bad_option_gets_one_line(options, words):
    check_one_line(call(*options), words)


@pytest.mark.parametrize("option", ["checkpoint", "logdir"])
def test_a_folder_that_nobody_may_write_is_refused_at_once(
    option, tmp_path, monkeypatch
):
    def access(path, mode):  # Root may write everywhere.
        assert mode == os.W_OK | os.X_OK
        return pathlib.Path(path) != tmp_path

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(job, "build_model", mock.Mock(side_effect=AssertionError))
    for folder in (tmp_path, tmp_path / "new" / "run"):
        done = call(f"--{option}", str(folder))
        check_one_line(done, [f"argument --{option}:", "cannot be written"])
    # Only the cluster knows its folders.
    elsewhere = ["--engine", "ray", "--address", "10.0.0.1:6379"]
    if option == "checkpoint":
        job.parse([f"--{option}", str(tmp_path), *elsewhere])


@pytest.mark.slow
def test_a_full_disk_costs_no_results_and_few_lines(tmp_path):
    """A limit for the size of files stands for the disk: see `full_disk`."""
    limits = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (20_000, 20_000)); "
    limits += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    (tmp_path / "sitecustomize.py").write_text(limits)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    options = [*SHORT, "--checkpoint", str(tmp_path / "run")]
    none = {"JAX_COMPILATION_CACHE_DIR": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run(*options, "--checkpoint-every", "1", PYTHONPATH=path, **none)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("test accuracy 0.")
    *before, last = unexpected(done.stderr)
    assert all("no checkpoint was written" in line for line in before)
    assert last.startswith("python -m gradxform: error: argument --checkpoint: the end")
    assert "File too large" in last


@pytest.mark.slow
def test_the_same_command_goes_on_where_it_was(tmp_path):
    """In the end its counts are those of a run without a stop: 80 pushes by four."""
    folder = str(tmp_path / "new" / "checkpoints")
    options = ["--engine", "simulated", "--mode", "sync", "--checkpoint", folder]
    assert call(*options, "--steps", "40").returncode == 0
    done = call(*options, "--steps", "80")
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
    assert "10 before this run" in done.stdout
    assert done.stderr.startswith(" 51%, step 10, ")
    assert row(done.stdout, "steps") == "20"
    assert row(done.stdout, "pushes accepted") == "80"
    assert sum(count for *_, count, _ in histogram(done.stdout)) == 40
    again = call(*options, "--steps", "80", "--plot", str(tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()
    assert results(again).split()[:4] == results(done).split()[:4]
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]
    assert not [*histogram(again.stdout)]
    other = call(*options, "--steps", "80", "--optimizer", "adagrad")
    check_one_line(other, ["is of another job", folder])
    assert "nothing is left to do: all 80 pushes" in again.stdout


@pytest.mark.slow
def test_a_run_can_be_watched_and_warns_of_changed_settings(tmp_path, caplog):
    from tensorboard.backend.event_processing import event_accumulator

    options = [*SHORT, "--checkpoint", str(tmp_path)]
    done = call(*options, "--logdir", str(tmp_path / "logs"))
    assert (done.returncode, unexpected(done.stderr)) == (0, [])
    events = event_accumulator.EventAccumulator(str(tmp_path / "logs")).Reload()
    for outcome in OUTCOMES:
        last = events.Scalars(outcome)[-1]
        assert last.value == int(row(done.stdout, f"pushes {outcome}"))
        assert last.step == int(row(done.stdout, "steps"))
    assert call(*options, "--steps", "70").returncode == 0
    assert not caplog.messages
    done = call(*options, "--steps", "80", "--seed", "7", "--max-staleness", "2")
    assert done.returncode == 0
    assert [text.partition("70 has ")[2] for text in caplog.messages] == [
        "seed=0, and the run goes on with 7",
        "max_staleness=4, and the run goes on with 2",
    ]


def into(stdout, stderr):
    return subprocess.run(
        [sys.executable, "-m", "gradxform", *SHORT],
        stdout=stdout,
        stderr=stderr,
        env=environment(**QUICK),
        encoding="utf-8",
        check=False,
    )


@pytest.mark.slow
def test_a_full_device_gets_one_line_and_a_closed_pipe_none():
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            done = into(full, subprocess.PIPE)
        assert done.returncode == 2
        (line,) = unexpected(done.stderr)
        assert "No space left on device" in line
    read, write = os.pipe()
    os.close(read)
    done = into(write, subprocess.STDOUT)
    os.close(write)
    assert done.returncode == 141


@pytest.mark.slow
def test_a_cluster_that_is_not_there_gets_one_line():
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:  # It is not a cluster.
        address = f"127.0.0.1:{server.getsockname()[1]}"
        options = ["--engine", "ray", "--address", address, "--connect-timeout", "0.5"]
        done = call(*options)
    check_one_line(done, ["address:", address, "connect_timeout=0.5 seconds"])


def check_one_line(done, words):
    """The output is one line: an error that has these words."""
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("python -m gradxform: error: ")
    assert all(word in done.stderr for word in words)


PACKAGES = dict.fromkeys(("flax", "matplotlib", "rich", "sklearn"), "demo")
PACKAGES |= {"ray": "ray", "tensorboardX": "tensorboard"}
ASKING = {"ray": ["--engine", "ray"], "tensorboardX": ["--logdir", "logs"]}
ASKING |= {"matplotlib": ["--plot", "x.png"]}


def lose(package, folder):
    """Puts a package that cannot be imported into a folder."""
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\")"
    (folder / f"{package}.py").write_text(missing)


@pytest.mark.every
@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_gets_one_line(package, tmp_path, monkeypatch):
    """At once if it is not there, and later if its import fails."""
    option, *_ = asking = ASKING.get(package, [""])
    extra = f"python -m pip install 'gradxform[{PACKAGES[package]}]'"
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, package, None)
        missing.setattr(job, "build_model", mock.Mock(side_effect=AssertionError))
        done = call(*filter(None, asking))
        check_one_line(done, [f"'{package}'", extra, option and f"argument {option}:"])
    lose(package, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    check_one_line(call(*filter(None, asking)), [f"'{package}'", extra])


@pytest.mark.parametrize("package", ["orbax", "orbax.checkpoint"])
def test_without_orbax_a_checkpoint_gets_one_line(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    words = ["argument --checkpoint:", "'gradxform[checkpoint]'"]
    check_one_line(call("--checkpoint", "here"), words)
