"""What TensorBoard's own readers read of a run.

Each test scripts the run: it gives pushes and counts by hand.
"""

import collections
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorboardX
from tensorboard.backend.event_processing import (
    event_accumulator,
    plugin_event_accumulator,
)

import gradxform as gx
from gradxform._server.records import GlobalStep  # Only a server makes one.
from gradxform.engines import Counts, Push, TensorBoard, WorkerCounts
from tests.engines.jobs import full_disk

TAGS = {
    "loss",
    "gradient norm",
    "accepted",
    "dropped",
    "lost",
    "Gradient_staleness_percentage",  # TensorFlow 1.15.5's name.
    "pushes a second",
    "steps a second",
    "seconds computing",
    "seconds until answered",
    "idle share",
}


class Run:
    """A run as a board sees it."""

    def __init__(self, resumed=None):
        self.resumed, self.now = resumed, Counts()

    def counts(self):
        return self.now


def push(step, loss=1.0, norm=2.0, staleness=0, applied=True, incarnation="first"):
    """A push after which the server is at that step."""
    local_step = GlobalStep(step - applied - staleness, incarnation)
    result = gx.PushResult(applied, staleness, step)
    # Of its 4 seconds the worker computed for 3; before, it had waited for 12.
    return Push(0, 0, local_step, loss, norm, result, 20.0, 16.0, 12.0, 3.0)


def board(logdir, *pushes, resumed=None):
    """Writes a point at each push."""
    with TensorBoard(logdir, Run(resumed), every_seconds=0) as write:
        for each in pushes:
            write(each)


def read(logdir):
    """All that there is to see: step and value of each point, by tag."""
    everything = {"scalars": 0, "histograms": 0}
    events = event_accumulator.EventAccumulator(str(logdir), everything).Reload()
    tags = events.Tags()
    found = {x: [(e.step, e.value) for e in events.Scalars(x)] for x in tags["scalars"]}
    for tag in tags["histograms"]:
        found[tag] = [(e.step, e.histogram_value) for e in events.Histograms(tag)]
    return found


def steps(logdir):
    """The steps of all points, which are the same for every tag."""
    (found,) = {tuple(step for step, _ in curve) for curve in read(logdir).values()}
    return list(found)


@pytest.fixture
def clock(monkeypatch):
    """A clock for the test to set: its seconds, in a list."""
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


# What is written.


def test_every_curve_equals_the_pushes(tmp_path, clock):
    rng, run, step = np.random.default_rng(0), Run(), 0
    # The first push is written at once, the last ones when the board is closed.
    sizes = [1, *rng.integers(1, 40, size=20), 5]
    expected = collections.defaultdict(list)
    with TensorBoard(tmp_path, run, every_seconds=2.0) as write:
        for size in sizes:
            losses, norms = rng.lognormal(size=(2, size))
            staleness = rng.choice([0, 1, 2, 3, 7, 1000], size=size)
            staleness[-1] = 0  # That one makes a step.
            start, begin = clock[0], step
            for number, values in enumerate(
                zip(losses, norms, staleness.tolist(), strict=True), 1
            ):
                applied = values[2] < 7
                step += applied
                pushed, dropped = run.now.pushed + 1, run.now.dropped + (not applied)
                by_worker = {1: WorkerCounts(step), 4: WorkerCounts(3 * step)}
                lost = pushed // 50
                run.now = Counts(pushed, step, dropped, lost, by_worker=by_worker)
                clock[0] += 0.04
                if number == size and size != sizes[-1]:
                    clock[0] = start + 2.0 + rng.exponential()
                write(push(step, *values, applied))
            seconds = clock[0] - start
            expected["step"].append(step)
            expected["loss"].append(losses.mean())
            expected["gradient norm"].append(norms.mean())
            for tag in ("accepted", "dropped", "lost"):
                expected[tag].append(getattr(run.now, tag))
            fraction = run.now.dropped / (step + 1)
            expected["Gradient_staleness_percentage"].append(fraction)
            expected["seconds computing"].append(3.0)
            expected["seconds until answered"].append(1.0)
            expected["idle share"].append(0.75)
            expected["share of worker 1"].append(0.25)
            expected["share of worker 4"].append(0.75)
            expected["pushes a second"].append(size / seconds)
            expected["steps a second"].append((step - begin) / seconds)
            expected["staleness"].append(staleness)
    for tag in ("pushes a second", "steps a second"):
        expected[tag].pop()  # The end comes too soon for a rate.
    curves = read(tmp_path)
    shares = {"share of worker 1", "share of worker 4"}
    assert curves.keys() == TAGS | shares | {"staleness"}
    for tag, curve in curves.items():
        at, values = zip(*curve, strict=True)
        assert list(at) == expected["step"][: len(at)]
        if tag == "staleness":
            for histogram, pushes in zip(values, expected[tag], strict=True):
                check_histogram(histogram, pushes)
        else:
            np.testing.assert_allclose(values, expected[tag], rtol=1e-6)


def check_histogram(histogram, values):
    """Each integer has a bucket of length 1, which counts how often it occurs."""
    ends = np.array(histogram.bucket_limit)
    starts = np.array([histogram.min, *ends[:-1]])
    counts = np.array(histogram.bucket)
    full = counts > 0
    found, expected = np.unique(values, return_counts=True)
    np.testing.assert_array_equal(starts[full], found)
    np.testing.assert_array_equal(ends[full], found + 1)
    np.testing.assert_array_equal(counts[full], expected)
    assert histogram.max == ends[-1]
    assert len(ends) <= 2 * len(found)
    moments = histogram.num, histogram.sum, histogram.sum_squares
    assert moments == (len(values), values.sum(), np.square(values).sum())


def test_a_point_waits_for_its_time_and_for_a_step(tmp_path, clock):
    seconds, reached = [0, 0.9, 1, 1.5, 3, 4, 5], [1, 2, 3, 4, 4, 4, 5]
    with TensorBoard(tmp_path, Run(), every_seconds=1.0) as write:
        for second, step in zip(seconds, reached, strict=True):
            clock[0] = 100.0 + second
            write(push(step, loss=float(second)))
    # At 0.9 s and 1.5 s it is too soon, and at 4 s its step has a point already.
    means = [0.0, pytest.approx((0.9 + 1) / 2), (1.5 + 3) / 2, (4 + 5) / 2]
    assert read(tmp_path)["loss"] == [*zip([1, 3, 4, 5], means, strict=True)]


def test_rates_count_from_the_checkpoint_and_need_time(tmp_path, clock):
    with TensorBoard(tmp_path, Run(resumed=20), every_seconds=0) as write:
        for clock[0], step in [(102, 30), (102, 31), (103, 33)]:
            write(push(step))
    found = read(tmp_path)
    assert found["pushes a second"] == [(30, 1 / 2), (33, 1.0)]
    assert found["steps a second"] == [(30, 10 / 2), (33, 2.0)]


def test_infinities_of_both_signs_have_no_mean(tmp_path, clock):
    with TensorBoard(tmp_path, Run()) as write:
        for step, loss in enumerate([0.0, np.inf, -np.inf], 1):
            write(push(step, loss))
    assert np.isnan(read(tmp_path)["loss"][-1][1])


# What is hidden.


def legacy(logdir):
    """The steps that TensorBoard shows with ``--load_fast false``."""
    events = plugin_event_accumulator.EventAccumulator(str(logdir)).Reload()
    return [event.step for event in events.Tensors("loss")]


FAST = """
import json, sys, time
from tensorboard import context
from tensorboard.data import server_ingester as s
from tensorboard.util.grpc_util import ChannelCredsType

binary, local = s.get_server_binary(), ChannelCredsType.LOCAL
server = s.SubprocessServerDataIngester(
    binary, sys.argv[1], reload_interval=0, channel_creds_type=local
)
server.start()
found, asked = {}, {"experiment_id": "", "plugin_name": "scalars", "downsample": 1000}
while not found:
    found = server.data_provider.read_scalars(context.RequestContext(), **asked)
found = {name: [p.step for p in curves["loss"]] for name, curves in found.items()}
print(json.dumps(found))
"""


def fast(logdir):
    """The steps that TensorBoard shows where it has its data server, for each run."""
    # In a process of its own, so that the server ends with it.
    command = [sys.executable, "-c", FAST, str(logdir)]
    return json.loads(subprocess.check_output(command, text=True, timeout=300))


def at(*steps, loss=1.0, **more):
    return [push(step, loss, **more) for step in steps]


FIRST, SECOND = at(*range(1, 31)), {"loss": 2.0, "incarnation": "second"}
ANOTHER = [push(s, 2.0, staleness=s - 21, incarnation="second") for s in (23, 21, 25)]
NO_STEP = [*at(20, 21, applied=False), *at(20, applied=False, **SECOND)]
# Under way at a death: pushes of two incarnations in turn.
IN_TURN = [push(30, 0.0), *at(21, **SECOND), push(31, 2.0), *at(22, **SECOND)]
TO_20 = dict.fromkeys(range(1, 21), 1.0)
HISTORIES = {  # Boards, each by where its run resumed; and the losses that are seen.
    "in another order": (
        [(None, at(1, 2, 4, 3, 5, 4))],
        dict.fromkeys((1, 2, 4, 5), 1),
    ),
    "nan": ([(None, at(1) + at(2, loss=np.nan))], {1: 1.0, 2: np.nan}),
    "inf": ([(None, at(1) + at(2, loss=-np.inf, norm=1e300))], {1: 1.0, 2: -np.inf}),
    "new run": ([(None, FIRST), (None, at(1, 5, loss=2.0))], {1: 2.0, 5: 2.0}),
    "resumed": (
        [(None, FIRST), (20, at(21, 25, 28, loss=2.0))],
        TO_20 | {21: 2.0, 25: 2.0, 28: 2.0},
    ),
    "restarted": (
        [(None, FIRST + at(21, 22, 25, **SECOND))],
        TO_20 | {21: 2.0, 22: 2.0, 25: 2.0},
    ),
    "where it began": ([(None, FIRST + ANOTHER)], TO_20 | {23: 2.0, 25: 2.0}),
    "no step": ([(None, FIRST), (20, NO_STEP)], TO_20 | {20: 2.0}),
    "in turn": ([(None, IN_TURN)], {21: 2.0, 22: 2.0}),
}


def write_all(logdir, name):
    """The losses that are to be seen."""
    boards, expected = HISTORIES[name]
    for resumed, pushes in boards:
        board(logdir, *pushes, resumed=resumed)
    return expected


@pytest.mark.every
@pytest.mark.parametrize("name", HISTORIES)
def test_what_has_not_happened_is_hidden(tmp_path, name):
    expected = write_all(tmp_path, name)
    for shown in (steps, legacy):
        assert shown(tmp_path) == sorted(shown(tmp_path))
        assert {*shown(tmp_path)} == {*expected}
    found = read(tmp_path)
    np.testing.assert_equal(dict(found["loss"]), expected)
    assert all(0 <= rate < np.inf for _, rate in found["steps a second"])
    if name == "inf":
        assert found["gradient norm"][-1] == (2, np.inf)  # Points are float32.


@pytest.mark.slow
def test_the_data_server_hides_it_too(tmp_path):
    expected = {name: write_all(tmp_path / name, name) for name in HISTORIES}
    found = fast(tmp_path)
    for name in HISTORIES.keys() - {"in another order", "where it began"}:
        assert found[name] == sorted(expected[name])


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3600, legacy),
        (-1e-9, steps),
        (3600, legacy),
        pytest.param(-3600, lambda x: fast(x)["."], marks=pytest.mark.slow),
    ],
)
def test_a_clock_that_is_set_hides_nothing(tmp_path, shown, seconds, monkeypatch):
    """The clock of another machine, on which a run goes on, may be behind."""
    now = time.time_ns()

    def set_clock(shift):
        at = now + round(shift * 10**9)
        monkeypatch.setattr(time, "time_ns", lambda: at)
        monkeypatch.setattr(time, "time", lambda: at / 10**9)

    set_clock(0)
    board(tmp_path, *FIRST)
    set_clock(seconds)
    board(tmp_path, *at(21, 25, 28, loss=2.0), resumed=20)
    set_clock(2 * seconds)  # A server that starts again makes another file.
    with TensorBoard(tmp_path, Run(resumed=25), every_seconds=0) as write:
        write(push(26, loss=3.0))
        set_clock(3 * seconds)
        for each in at(26, 27, loss=4.0, incarnation="second"):
            write(each)
    assert shown(tmp_path) == [*range(1, 21), 21, 25, 26, 27]
    expected = [1.0] * 20 + [2.0] * 2 + [4.0] * 2
    assert [loss for _, loss in read(tmp_path)["loss"]] == expected


@pytest.mark.every
@pytest.mark.parametrize(
    "name",
    [
        "events.out.tfevents.9{rest}",  # Nanoseconds, as ours.
        "events.out.tfevents.9{seconds}.host",  # Of TensorFlow and tensorboardX.
        "events.out.tfevents.9{seconds}.host.7.v2",
        "events.out.tfevents.9{rest}000",
    ],
)
def test_a_file_comes_after_those_of_other_writers(tmp_path, name):
    given = name.format(rest="9" * 17 + "0", seconds="9" * 8 + "0")
    (tmp_path / given).touch()
    (tmp_path / "notes.txt").touch()
    board(tmp_path, *at(1, 5))
    assert max(path.name for path in tmp_path.glob("events*")) > given
    assert steps(tmp_path) == [1, 5]


# Ends, and errors.


def test_a_run_without_a_push_leaves_no_file(tmp_path):
    with TensorBoard(tmp_path / "a" / "b", Run()) as write:
        pass
    write.close()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_interrupt_loses_nothing_and_after_it_nothing_is_taken(tmp_path):
    write = TensorBoard(os.fspath(tmp_path), Run(), every_seconds=1000)

    def interrupted():
        with write:
            for step in (1, 2, 3):
                write(push(step))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    write.close()
    assert steps(tmp_path) == [1, 3]
    with pytest.raises(ValueError, match="closed"):
        write(push(4))


def test_no_push_waits_for_the_disk(tmp_path, monkeypatch):
    going, real = threading.Event(), tensorboardX.RecordWriter.write

    def slow(file, record):
        assert going.wait(60)
        real(file, record)

    monkeypatch.setattr(tensorboardX.RecordWriter, "write", slow)
    with TensorBoard(tmp_path, Run(), every_seconds=0) as write:
        for step in range(1, 101):
            write(push(step))
        going.set()  # It would hang if it had waited.
    assert steps(tmp_path) == [*range(1, 101)]


def test_written_events_can_be_read_at_once(tmp_path):
    with TensorBoard(tmp_path, Run(), every_seconds=0) as write:
        write(push(1))
        end = time.monotonic() + 60
        while not read(tmp_path) and time.monotonic() < end:
            time.sleep(0.01)
        assert steps(tmp_path) == [1]


def test_a_full_disk_ends_no_run(tmp_path):
    write = TensorBoard(tmp_path, Run(), every_seconds=0)
    write(push(1))
    with full_disk(4096):
        for step in range(2, 200):
            write(push(step))
        write._disk.submit(int).result()  # Every write has been tried by now.
    write(push(200))  # The points between would be missing.
    with pytest.warns(RuntimeWarning, match="curves .* not complete: .*too large"):
        write.close()
    found = steps(tmp_path)
    assert found == [*range(1, len(found) + 1)]
    assert 0 < len(found) < 20


def test_bad_arguments_are_told_at_once(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for logdir in (file, file / "below", "/proc"):
        with pytest.raises(OSError, match=rf"logdir must be a folder .*{logdir}"):
            TensorBoard(logdir, Run())
    for logdir, seconds, error, match in (
        (None, 1.0, TypeError, "logdir must be a path, got None"),
        ("", 1.0, ValueError, "logdir must be a path, got ''"),
        *((tmp_path, x, ValueError, "every_seconds") for x in (-1.0, np.nan, np.inf)),
    ):
        with pytest.raises(error, match=match):
            TensorBoard(logdir, Run(), every_seconds=seconds)


def test_a_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for logdir, where in ("~/curves", "curves"), ("s3:curves", "s3:curves"):
        with TensorBoard(logdir, Run()) as write:
            write(push(1))
        assert steps(tmp_path / where) == [1]
