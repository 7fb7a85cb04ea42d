"""The main job: its parts by hand-made cases, and the command as a user runs it."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradxform as gx
from gradxform import __main__ as job

SHORT = ("--steps", "60")
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


# The engine. Every gradient is 1 and every step subtracts it, so that the parameters
# are minus the global step they belong to.


def make_server(max_staleness, params=0.0):
    inner = optax.chain(gx.clip_by_global_norm(1.0), optax.sgd(1.0))
    return job.Server(gx.drop_stale(inner, max_staleness), jnp.asarray(params))


def worker(params):
    return params, jnp.ones_like(params)


def simulate(max_staleness, workers=5, pushes=200):
    duration = job.random_durations(workers, np.random.default_rng(0))
    server = make_server(max_staleness)
    return server, list(job.simulate(server, [worker] * workers, duration, pushes))


def test_events_happen_in_the_order_of_their_times():
    server = make_server(max_staleness=1)
    pushes = job.simulate(server, [worker] * 2, (2.0, 3.0).__getitem__, 7)
    assert [(p.worker, p.local_step, *p.result[:2]) for p in pushes] == [
        (0, 0, True, 0),  # At 2, of the parameters at step 0.
        (1, 0, True, 1),  # At 3.
        (0, 1, True, 1),  # At 4.
        (0, 3, True, 0),  # At 6: the lower index goes first.
        (1, 2, False, 2),  # At 6.
        (0, 4, True, 0),  # At 8.
        (1, 4, True, 1),  # At 9, pulled at 6 after the drop.
    ]


def test_staleness_is_the_steps_taken_since_the_pull():
    _, pushes = simulate(max_staleness=4)
    global_step, pulled = 0, dict.fromkeys(range(5), 0)
    for push in pushes:
        assert push.local_step == pulled[push.worker]
        assert push.result.staleness == global_step - push.local_step
        global_step += push.result.applied
        pulled[push.worker] = global_step
    assert {push.worker for push in pushes} == set(range(5))


def test_gradients_are_of_the_parameters_that_were_pulled():
    server, pushes = simulate(max_staleness=4)
    assert [push.loss for push in pushes] == [-push.local_step for push in pushes]
    assert int(server.params) == -int(gx.global_step(server.state)) < 0


def test_every_push_is_accepted_or_dropped():
    server, pushes = simulate(max_staleness=4)
    applied = sum(push.result.applied for push in pushes)
    assert applied == gx.global_step(server.state)
    assert len(pushes) - applied == server.state.stale_count
    assert 0 < applied < len(pushes) == 200


def test_drops_happen_exactly_above_max_staleness():
    _, pushes = simulate(max_staleness=4)
    assert {p.result.staleness for p in pushes} >= {4, 5}
    assert all(p.result.applied == (p.result.staleness <= 4) for p in pushes)


def test_one_worker_is_never_late():
    _, pushes = simulate(max_staleness=0, workers=1)
    assert all(push.result == (True, 0, 1.0) for push in pushes)


def test_workers_keep_what_they_pulled():
    server = make_server(max_staleness=9, params=[0.0, 0.0])
    pulled, _ = server.pull()
    for _ in range(2):
        server.push(jnp.ones(2), 0)
    assert pulled.tolist() == [0.0, 0.0]
    assert server.params.tolist() != [0.0, 0.0]


def test_pushes_compile_once():
    traces = []

    def update(updates, params):
        traces.append(params)
        return updates

    inner = optax.chain(gx.clip_by_global_norm(1.0), optax.stateless(update))
    server = job.Server(gx.drop_stale(inner, 1), jnp.asarray(0.0))
    server.push(jnp.asarray(1.0), 0)
    once = len(traces)
    results = [server.push(jnp.asarray(1.0), 1 + step // 2) for step in range(20)]
    assert {result.applied for result in results} == {True, False}
    assert len(traces) == once > 0


def test_the_norm_is_that_before_clipping():
    server = make_server(max_staleness=0, params=[0.0, 0.0])
    assert server.push(jnp.array([3.0, 4.0]), 0).global_norm == 5.0


def test_durations_spread_from_fast_to_slow():
    duration = job.random_durations(3, np.random.default_rng(0))
    means = [np.mean([duration(index) for _ in range(4000)]) for index in range(3)]
    jitter = np.exp(job.JITTER**2 / 2)
    expected = np.array([1.0, (1 + job.SLOWEST) / 2, job.SLOWEST]) * jitter
    np.testing.assert_allclose(means, expected, rtol=0.03)


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
    work = job.make_worker(model, digits, np.random.default_rng(0))
    batch, drawn = work(None)
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


@pytest.mark.parametrize("optimizer", job.OPTIMIZERS)
def test_a_few_steps_lower_the_loss(optimizer, standard_promotion):
    model, digits = job.build_model(0), job.load_digits()
    server = job.Server(job.make_transformation(optimizer, 2, 80), model.params)
    workers = [job.make_worker(model, digits, np.random.default_rng(0))]
    losses = [push.loss for push in job.simulate(server, workers, lambda _: 1.0, 80)]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert jax.tree.map(jnp.shape, server.params) == jax.tree.map(
        jnp.shape, model.params
    )


# The command.


def test_the_defaults_learn_and_drop(tmp_path):
    done = run("--plot", str(tmp_path / "plot.png"))
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.fullmatch(r"test accuracy (0\.\d{3})", done.stdout.splitlines()[-1])
    assert float(accuracy[1]) >= 0.96
    accepted = int(row(done.stdout, "pushes accepted"))
    dropped = int(row(done.stdout, "pushes dropped"))
    assert accepted + dropped == 3000
    assert 0.05 <= dropped / 3000 <= 0.15
    fraction = float(row(done.stdout, "staleness fraction"))
    assert fraction == pytest.approx(dropped / (accepted + 1), abs=5e-4)
    bars = histogram(done.stdout)
    assert sum(count for _, count, late in bars if not late) == accepted
    assert sum(count for _, count, late in bars if late) == dropped
    assert all(late == (step > 6) for step, count, late in bars if count)
    assert float(row(done.stdout, "gradient norm")) > 0
    assert float(row(done.stdout, "seconds")) < 60
    plot = (tmp_path / "plot.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(plot) > 10_000


@pytest.fixture(scope="module")
def short():
    """A short run at the defaults, for the tests that only look at it."""
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
    assert done.stdout.startswith("adagrad, workers 4, seed 0")
    assert histogram(done.stdout) == histogram(short.stdout)
    norm = "gradient norm"
    assert row(done.stdout, norm) != row(short.stdout, norm)


def test_the_limit_is_the_given_one(capsys, standard_promotion):
    job.main([*SHORT, "--workers", "3", "--max-staleness", "1"])
    stdout = capsys.readouterr().out
    assert stdout.startswith("novograd, workers 3, seed 0")
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
    for option in ("workers", "max-staleness", "steps", "seed"):
        assert re.search(rf"--{option} N{words}", options)
    assert re.search(r"--plot FILE" + words, options)
    assert options.count("(default:") == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "ray"], ["--engine", "ray"]),
        (["--work", "3"], ["--work", "3"]),  # No abbreviations: they would not last.
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


@pytest.mark.parametrize("package", ["flax", "matplotlib", "rich", "sklearn"])
def test_a_missing_package_gets_one_line(package, tmp_path):
    missing = f"raise ModuleNotFoundError(\"No module named '{package}'\")"
    (tmp_path / f"{package}.py").write_text(missing)
    done = run(PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"'{package}'" in done.stderr
    assert "python -m pip install 'gradxform[demo]'" in done.stderr


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
