"""A run's pushes as curves: TensorBoard's event files, without TensorFlow."""

from __future__ import annotations

import concurrent.futures
import os
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradxform._checks import arguments
from gradxform._server.extras import require
from gradxform._server.folder import path_of
from gradxform.engines._job import Push, Run

NAME = "events.out.tfevents."  # A number follows.
DIGITS = 19  # Of a time in nanoseconds, until the year 2286.


class TensorBoard:
    """Writes the numbers of a run's pushes as event files, for TensorBoard to show.

    Call it with each push in the loop over them; workers and server are not involved.
    It collects pushes and writes at most every ``every_seconds``, once the global step
    has moved. A point at that step describes the pushes since the last point:

    - ``loss`` and ``gradient norm``: their means; the norm is from before any clip;
    - ``staleness``: a histogram of how many steps late they were, one bucket a step;
    - ``seconds computing``, ``seconds until answered``: the two parts of a gradient's
      time, in which it becomes late: the worker's, and that of the way and the server;
    - ``idle share``: the part of the workers' time in which they waited to begin;
    - ``pushes a second``, ``steps a second``: by the wall clock, with waiting and
      compiling; no point for less than ``every_seconds``.

    These curves describe all pushes so far:

    - ``accepted``, ``dropped``, ``lost``: as in :class:`Counts`;
    - ``share of worker 0`` and so on: each worker's part of the accepted pushes. If it
      differs from its part of the data, the training is biased;
    - ``Gradient_staleness_percentage``: TensorFlow's fraction, ``dropped / (global_step
      + 1)``, under the name that TensorFlow 1.15 gave it.

    A folder shows one run. A new run hides the older files. A run that goes on from a
    checkpoint hides later points. A run whose server died and went back does so, too,
    and begins another file. Nothing is ever deleted. A clock that goes back hides
    nothing; points keep the time that it showed.

    ``tensorboardX`` writes the files, on a thread of its own. ``clu``'s writers would
    need TensorFlow or PyTorch. If the disk is full the run goes on, and a warning at
    the end says that curves are not complete.

    Args:
      logdir: the folder; it is made if it does not exist.
      run: the run of these pushes.
      every_seconds: the shortest time between two points, in [0, inf).

    Raises:
      ImportError: tensorboardX is not installed.
      TypeError: ``logdir`` is no path, or ``every_seconds`` no number.
      ValueError: ``logdir`` is empty, ``every_seconds`` is out of range, or a push
        comes after ``close``.
      OSError: the folder cannot be made, or is not writable.

    References:
      ``tf.contrib.opt.DropStaleGradientOptimizer``, for the fraction.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax, tempfile
    >>> from gradxform import engines
    >>> from tensorboard.backend.event_processing import event_accumulator
    >>> gradient = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((w - x) ** 2)))
    >>> worker = engines.Worker(gradient, lambda number: (jnp.arange(4.0),))
    >>> tx = gx.drop_stale(optax.sgd(0.1), max_staleness=1)  # the last of three is late
    >>> job = engines.Job(jnp.zeros(4), tx, [worker] * 3, pushes=30)
    >>> logdir = tempfile.TemporaryDirectory()
    >>> with (
    ...     engines.simulated(job) as run,
    ...     engines.TensorBoard(logdir.name, run, every_seconds=0) as board,
    ... ):
    ...     for push in run.pushes:
    ...         board(push)
    >>> events = event_accumulator.EventAccumulator(logdir.name).Reload()
    >>> last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    >>> dropped, step = last["dropped"].value, last["dropped"].step
    >>> assert last["accepted"].value == step == 30 - dropped < 30
    >>> fraction = last["Gradient_staleness_percentage"].value
    >>> assert abs(fraction - dropped / (step + 1)) < 1e-6
    >>> assert last["loss"].value < 1 < 3 < events.Scalars("loss")[0].value
    >>> logdir.cleanup()
    """

    def __init__(
        self, logdir: str | os.PathLike[str], run: Run, every_seconds: float = 1.0
    ) -> None:
        arguments.in_range("every_seconds", every_seconds, "[0, inf)")
        self._tensorboardx = require("tensorboardX", "tensorboard")
        self._logdir = _writable(logdir)
        self._run = run
        self._every_seconds = every_seconds
        self._gathered: list[Push] = []
        # The lives of the server so far; the last one is the present one.
        self._incarnations: list[str | None] = []
        self._reached = 0  # The largest step of the present incarnation.
        self._time, self._step = time.monotonic(), 0  # Of the last point.
        self._file: Any = None  # Made for the first push. tensorboardX has no types.
        # The thread that writes. If the disk is full, the thread of tensorboardX's own
        # writers ends, and the next call waits forever.
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "tensorboard")
        self._error: OSError | None = None
        self._closed = False

    def __call__(self, push: Push) -> None:
        """Takes a push, and writes a point when one is due."""
        if self._closed:
            raise ValueError("this TensorBoard was closed: make another one.")
        self._gathered.append(push)
        # A server's step knows the server's incarnation: a restart begins a new one.
        incarnation = getattr(push.local_step, "incarnation", None)
        begins = incarnation not in self._incarnations
        if begins:
            self._begin(push)
            self._incarnations.append(incarnation)
        # A late answer of a server that has died does not count.
        if incarnation == self._incarnations[-1]:
            self._reached = max(self._reached, push.result.global_step)
        # If two points have one step, TensorBoard may show only the later one.
        due = time.monotonic() - self._time >= self._every_seconds
        if begins or (due and self._reached > self._step):
            self._write()

    def close(self) -> None:
        """Writes what is left, and waits until it is on disk."""
        if self._closed:
            return
        self._closed = True
        if self._gathered:
            self._write()
        if self._file is not None:
            self._disk.submit(self._file.close)
        self._disk.shutdown()
        if self._error is not None:  # A warning, as an error would end the training.
            message = f"the curves in {self._logdir} are not complete: {self._error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    def __enter__(self) -> TensorBoard:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes, also after an error."""
        self.close()

    def _write(self) -> None:
        """Writes a point of every curve from the collected pushes."""
        pushes, self._gathered = self._gathered, []
        counts, now, step = self._run.counts(), time.monotonic(), self._reached
        scalars = {
            "loss": sum(push.loss for push in pushes) / len(pushes),
            "gradient norm": sum(push.norm for push in pushes) / len(pushes),
            "accepted": counts.accepted,
            "dropped": counts.dropped,
            "lost": counts.lost,
            # TensorFlow calls it "Gradient staleness percentage", and writes this tag.
            "Gradient_staleness_percentage": counts.dropped / (step + 1),
        }
        computing = sum(push.computing for push in pushes)
        busy = sum(push.time - push.started for push in pushes)
        idle = sum(push.waited for push in pushes)
        if idle + busy > 0:
            scalars["seconds computing"] = computing / len(pushes)
            scalars["seconds until answered"] = (busy - computing) / len(pushes)
            scalars["idle share"] = idle / (idle + busy)
        accepted = sum(each.accepted for each in counts.by_worker.values())
        for index, each in counts.by_worker.items() if accepted else ():
            scalars[f"share of worker {index}"] = each.accepted / accepted
        seconds = now - self._time
        if seconds > 0 and seconds >= self._every_seconds:
            scalars["pushes a second"] = len(pushes) / seconds
            scalars["steps a second"] = (step - self._step) / seconds
        proto = self._tensorboardx.proto.summary_pb2
        summary = proto.Summary()
        for tag, value in scalars.items():
            summary.value.add(tag=tag, simple_value=value)
        staleness = self._histogram([push.result.staleness for push in pushes])
        summary.value.add(tag="staleness", histo=staleness)
        self._save(step=step, summary=summary)
        self._time, self._step = now, step

    def _histogram(self, values: Sequence[int]) -> Any:  # tensorboardX has no types.
        """A histogram in which each integer has its own bucket.

        ``n`` lies in ``[n, n + 1)``. Absent integers between two others share an empty
        one.
        """
        ends = sorted({end for n in values for end in (n, n + 1)})
        histogram = self._tensorboardx.summary.make_histogram(np.array(values), ends)
        histogram.max = ends[-1]  # TensorBoard takes it as the end of the last bucket.
        return histogram

    def _begin(self, push: Push) -> None:
        """Begins a file. It hides points of others after its incarnation's start."""
        if self._file is None:
            began = self._run.resumed
        else:
            self._disk.submit(self._file.close)
            began = push.local_step
        path = os.path.join(self._logdir, _next_name(self._logdir))
        self._file = self._tensorboardx.RecordWriter(path)
        self._save(file_version="brain.Event:2")
        # Also in the first file: TensorBoard ignores the first start that it reads.
        log = self._tensorboardx.proto.event_pb2.SessionLog
        hidden = 0 if began is None else min(began + 1, push.result.global_step)
        self._save(step=hidden, session_log=log(status=log.START))
        self._reached = self._step = began or 0

    def _save(self, **fields: object) -> None:
        """Lets the writing thread append an event to the file."""
        event = self._tensorboardx.proto.event_pb2.Event
        record = event(wall_time=time.time(), **fields).SerializeToString()
        self._disk.submit(self._append, self._file, record)

    def _append(self, file: Any, record: bytes) -> None:
        if self._error is None:  # TensorBoard reads nothing after half a record.
            try:
                file.write(record)
                file.flush()
            except OSError as error:
                self._error = error


def _next_name(logdir: str) -> str:
    """A name for a new file, after those of the files that are there.

    TensorBoard reads files in the order of their names, which hold the time. The clock
    of this machine may be behind that of an earlier run.
    """
    found = (re.match(re.escape(NAME) + "([0-9]+)", x) for x in os.listdir(logdir))
    # Some writers take seconds, and no nanoseconds: the next second comes after these.
    before = [int(x[1][:DIGITS].ljust(DIGITS, "9")) for x in found if x]
    return f"{NAME}{max([time.time_ns(), *(x + 1 for x in before)])}"


def _writable(logdir: str | os.PathLike[str]) -> str:
    """The folder's absolute path; makes the folder, and tries to write a file there."""
    # Absolute, as tensorboardX takes a name like "s3:x" for a bucket.
    path = os.path.abspath(path_of("logdir", logdir))
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # Permissions alone do not tell.
    except OSError as error:
        message = f"logdir must be a folder that is writable, got {path!r}"
        raise OSError(error.errno, f"{message}: {error.strerror}.") from error
    return path
