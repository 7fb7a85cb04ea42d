"""Ends runs of the demo by signals at random moments, and checks what is left.

``python -m tests.soak.kills`` (extras ``demo``, ``ray`` and ``checkpoint``; Linux)
starts the demo, which saves itself five times a second, and ends it by a signal.
Three of four times the signal comes up to two seconds after the first checkpoint, and
once at any moment of the start. Ctrl-C (``INT``) reaches the whole process group, as
from a terminal; the other signals reach only the process. Then the program looks for
processes and files that are left, and lets a run go on from the last checkpoint. A row
counts what all runs with one signal have left. Faults are listed below the row: a wrong
exit code, a process that lives on, a checkpoint that does not load or is not the last
one. If there is any, the program exits with 1. Ray always leaves its logs in its
temporary folder; they are not counted.
"""

import argparse
import collections
import contextlib
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np

from gradxform import __main__ as main_job
from gradxform import engines

# The options with which each is started. In a group the server is two processes.
ENGINES = {name: (name,) for name in ("threads", "ray", "simulated")}
ENGINES["group"] = "ray", "--server-processes", "2"
JOB = "--steps", "1000000", "--workers", "2"
SAVING = "--checkpoint-every", "0.2"
CODES = {"TERM": 143, "INT": 130, "KILL": -signal.SIGKILL}
# Until it handles signals, it ends as Python does: with 1 while Python starts.
BEFORE = {"TERM": {-signal.SIGTERM}, "INT": {-signal.SIGINT, 1}, "KILL": set()}
AFTER = 2.0  # Seconds from the first checkpoint to the signal, at most.
# Seconds to its end, and from there to the end of the processes that it has started:
# two of Ray's notice after a minute that their cluster was killed.
LIMIT, GRACE = 60.0, 90.0
# A killed process may leave half of a file. So it reads the cache, but adds nothing.
COMPILED = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
TEMPORARY = "*.orbax-checkpoint-tmp*"


class End(NamedTuple):
    """How a run ended, and what it left behind."""

    code: int | None  # None if it had to be killed.
    seconds: float  # From the signal to the end.
    after: float  # Seconds from then to the end of the last of its processes.
    processes: list[str]  # Those that live on.
    folders: list[str]  # Half-written checkpoints.
    files: list[str]  # In its temporary folder.
    faults: list[str]


def saved(folder):
    """The number of pushes in each checkpoint, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def processes_of(folder):
    """Names of all other processes whose environment or files name the folder, by id.

    The processes of Ray write their titles over their environments.
    """
    found, mark = {}, str(folder)
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
            if mark.encode() in (path / "environ").read_bytes() or any(
                mark in os.readlink(link) for link in (path / "fd").iterdir()
            ):
                found[int(path.name)] = (path / "comm").read_text().strip()
    found.pop(os.getpid(), None)  # This process reads their output.
    return found


@contextlib.contextmanager
def started(engine, folder, cache, **environ):
    """The demo in its own session; the folder's name marks all that it starts."""
    for name in ("run", "tmp"):
        (folder / name).mkdir()
    environ = {
        **os.environ,
        "MARK": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **environ,
    }
    which = ENGINES[engine]
    command = [sys.executable, "-m", "gradxform", "--engine", *which, *JOB, *SAVING]
    with (
        open(folder / "stderr", "wb") as stderr,
        subprocess.Popen(
            [*command, "--checkpoint", str(folder / "run")],
            env=environ,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for each in processes_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def train(process, folder):
    """Waits for the first checkpoint, or for an earlier end; returns the seconds."""
    start = time.monotonic()
    while process.poll() is None and not saved(folder / "run"):
        time.sleep(0.02)
    return time.monotonic() - start


def strike(process, name, folder):
    """Sends the signal; returns exit code, seconds to it and after it, who lives on."""
    start = time.monotonic()
    if process.poll() is None:  # If it has failed, another process may have its id.
        number = getattr(signal, f"SIG{name}")
        (os.killpg if name == "INT" else os.kill)(process.pid, number)
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
        process.wait()
    end = time.monotonic()
    while (left := processes_of(folder)) and time.monotonic() < end + GRACE:
        time.sleep(0.1)
    return code, end - start, time.monotonic() - end, sorted(left.values())


def take_up(job, folder):
    """The pushes and the step from which a run goes on; and it does go on."""
    with engines.simulated(job, checkpoint=folder) as run:
        pushes = run.counts().pushed
        assert np.isfinite(next(run.pushes).loss)
        return pushes, run.resumed


def wrong(name, code, seen, folder, job):
    """The faults in exit code, message and checkpoints."""
    stderr = (folder / "stderr").read_text()
    pythons = not seen and code in BEFORE[name]
    if code == 1 and not stderr.endswith("KeyboardInterrupt\n"):
        pythons = False
    if code != CODES[name] and not pythons:
        yield f"exit code {code}"
    # If Python drops an exception, it says so first.
    if "Traceback" in stderr.partition("Exception ignored")[0] and not pythons:
        yield "a traceback"
    if code == 130 and not stderr.endswith("python -m gradxform: interrupted\n"):
        yield "no message"
    said = re.search(r"terminated: (?:step (\d+) is|nothing was done)", stderr)
    if code == 143 and not said:
        yield "no message"
    there = saved(folder / "run")
    if seen and there[-1:] < seen[-1:]:
        yield f"the checkpoint of {seen[-1]} pushes is gone"
    try:
        pushes, step = take_up(job, folder / "run")
    except Exception as error:  # Whatever it is, it is reported here.
        yield f"does not load: {error!r}"
        return
    if pushes != (there[-1] if there else 0):
        yield f"goes on from {pushes} pushes, of {there}"
    if code == 143 and said and step != (int(said[1]) if said[1] else None):
        yield f"goes on from step {step}, not from the one that was saved"
    if list((folder / "run").glob(TEMPORARY)):
        yield "a temporary folder stays"


def kill(engine, name, moment, cache, job, compiled="inf"):
    """One run and its end; ``moment`` waits until the end should come.

    It keeps programs that took at least ``compiled`` seconds to compile.
    """
    with tempfile.TemporaryDirectory(
        prefix="kill-", ignore_cleanup_errors=True
    ) as temporary:
        folder = pathlib.Path(temporary)
        with started(engine, folder, cache, **{COMPILED: compiled}) as process:
            when = moment(process, folder)
            seen = saved(folder / "run")
            code, seconds, after, processes = strike(process, name, folder)
            folders = [path.name for path in (folder / "run").glob(TEMPORARY)]
            files = sorted({path.name for path in (folder / "tmp").iterdir()} - {"ray"})
            faults = [*wrong(name, code, seen, folder, job)]
        if processes:
            faults.append(f"processes left: {', '.join(processes)}")
        lines = (folder / "stderr").read_text().splitlines()[-8:]
        faults = [f"{when}: {fault}; it said {lines}" for fault in faults]
        return End(code, seconds, after, processes, folders, files, faults)


def kills(engine, name, times, rng, cache, job):
    """The ends of this many runs; every fourth is interrupted while it starts."""
    took = 0.0  # Seconds to its first checkpoint, of the last run that reached one.

    def training(process, folder):
        nonlocal took
        took = train(process, folder)
        seconds = rng.uniform(0.0, AFTER)
        time.sleep(seconds)
        return f"{seconds:.2f} s after its first checkpoint"

    def starting(process, folder):
        seconds = rng.uniform(0.0, took)
        time.sleep(seconds)
        return f"{seconds:.2f} s after its start, of {took:.2f} s"

    for number in range(times):
        moment = starting if number % 4 == 3 else training
        yield kill(engine, name, moment, cache, job)


def compile_all(cache, job):
    """Fills the cache with all that a run compiles; all runs compile the same.

    Returns the faults of the run that has done so.
    """

    def trained(process, folder):
        train(process, folder)
        return "at the first checkpoint of the first run"

    return kill("threads", "TERM", trained, cache, job, compiled="0").faults


def report(engine, name, ends):
    """Prints a row, and below it the faults."""
    codes = collections.Counter(end.code for end in ends)
    seconds = [end.seconds for end in ends]
    row = [engine, name, len(ends)]
    row.append(", ".join(f"{code}: {n}" for code, n in codes.most_common()))
    row.append(f"{np.median(seconds):.1f} {max(seconds):.1f}")
    row.append(f"{max(end.after for end in ends):.1f}")
    row += [sum(map(len, column)) for column in list(zip(*ends, strict=True))[3:]]
    print(ROW.format(*row), flush=True)
    for fault in (fault for end in ends for fault in end.faults):
        print("   ", fault, flush=True)
    files = collections.Counter(file for end in ends for file in end.files)
    if files:
        print("    files:", dict(files), flush=True)


ROW = "{:10} {:6} {:>5}  {:22} {:>12} {:>9} {:>10} {:>8} {:>6} {:>7}"
HEAD = "engine", "signal", "runs", "exit codes", "s median max", "s after"
HEAD += "processes", "folders", "files", "faults"


def table(pairs, times, seed):
    """Prints a row for each pair of an engine and a signal; counts what is wrong."""
    rng, faults = np.random.default_rng(seed), 0
    args = main_job.parse(JOB)
    job = main_job.make_job(args, main_job.build_model(0), main_job.load_digits())
    with tempfile.TemporaryDirectory(prefix="kills-") as cache:
        for fault in compile_all(cache, job):
            print(fault, flush=True)
            faults += 1
        print(ROW.format(*HEAD), flush=True)
        for engine, name in pairs:
            ends = [*kills(engine, name, times, rng, cache, job)]
            report(engine, name, ends)
            faults += sum(len(end.faults) for end in ends)
    return faults


def main():
    """Prints what is left of each engine after each signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--times", type=int, default=20, help="runs for each pair")
    for option, names in (("engines", ENGINES), ("signals", CODES)):
        text = f"by default {', '.join(names)}"
        parser.add_argument(
            f"--{option}", choices=names, default=[*names], help=text, **several
        )
    parser.add_argument("--seed", type=int, default=0, help="for random moments")
    options = parser.parse_args()
    # A process that a shell starts in the background ignores Ctrl-C. So would its own
    # processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pairs = itertools.product(options.engines, options.signals)
    sys.exit(table(pairs, options.times, options.seed) > 0)


if __name__ == "__main__":
    main()
