"""Folders of checkpoints: broken, foreign, full, or used by two runs at once."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import gradxform as gx
from gradxform import engines

# `folder`: for another process that needs no JAX, its patience, the names of its files.
from gradxform._server import core, folder
from gradxform._server import store as stores
from gradxform._server.recoverable import RecoverableServer
from gradxform._server.transport import Transport
from tests.engines.jobs import (
    bits,
    ended,
    fails,
    full_disk,
    list_all,
    make_job,
    steps_in,
    told,
    training,
    worker,
)


def every(steps, directory, **options):
    return engines.Checkpoint(directory, steps, None, **options)


def save(directory, pushes=20, **options):
    """Makes a run with checkpoints at 10 and 20 pushes; returns what ``ended`` does."""
    job = training(pushes, required=1, count=1)
    return ended(engines.simulated, job, checkpoint=every(10, directory, **options))


def resumed(directory, job):
    """Where the job goes on, to its end."""
    return ended(engines.simulated, job, checkpoint=directory)[2].resumed


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The folder that a run of 20 pushes has left, and its last state."""
    directory = tmp_path_factory.mktemp("template")
    return directory, save(directory)[1]


@pytest.fixture
def saved(template, tmp_path):
    """A copy of that folder for one test; returns the last state."""
    directory, state = template
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return state


def files_in(directory):
    """The bytes of every file, by its path."""
    found = pathlib.Path(directory).rglob("*")
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in found
        if path.is_file() and path.name not in (folder.LOCK, folder.OWNER)
    }


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.2)


# Two at once.


@pytest.mark.slow
def test_runs_beside_each_other_save_themselves(tmp_path, caplog):
    """orbax's managers share what they use to write in the background."""
    ends, job = {}, training(60, seconds=0.0)

    def run(index):
        checkpoint = engines.Checkpoint(tmp_path / f"{index}", every_steps=1)
        ends[index] = ended(engines.threads, job, checkpoint=checkpoint)[1:]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not told(caplog)
    for index, (state, run) in ends.items():
        where = tmp_path / f"{index}"
        assert run.counts().pushed == 60 == max(steps_in(where))
        again = ended(engines.simulated, training(60), checkpoint=where)
        assert bits(again[1]) == bits(state)


@pytest.mark.slow
def test_two_runs_of_a_process_on_one_folder(engine, tmp_path, impatient):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    with engine(training(30), checkpoint=tmp_path / "run") as run:
        first = [next(run.pushes) for _ in range(9)]
        match = rf"process {os.getpid()} on .*link:"
        fails(engine, training(30), OSError, match, checkpoint=link)
        rest = [*run.pushes]
    assert len(first) + len(rest) == 30
    assert [*steps_in(link)] == [30]
    assert ended(engine, training(31), checkpoint=link)[2].resumed is not None


HOLDER = """
import runpy, sys
taken = runpy.run_path(sys.argv[1])["Folder"](sys.argv[2])  # It needs no JAX.
taken.take()
print("taken", flush=True)
sys.stdin.read()
"""


def holder(directory):
    """Another process, which takes the folder until its stdin is closed."""
    code = [sys.executable, "-c", HOLDER, folder.__file__, str(directory)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(code, **pipes)


@pytest.mark.slow
def test_two_processes_on_one_folder(saved, tmp_path, monkeypatch):
    before = files_in(tmp_path)
    half = tmp_path / "30.orbax-checkpoint-tmp"  # The other one is writing this.
    half.mkdir()
    with holder(tmp_path) as other:
        assert other.stdout.readline() == b"taken\n"
        says = rf"process {other.pid} on .* saves itself in"
        with monkeypatch.context() as patch:
            patch.setattr(folder, "PATIENCE", 0.2)
            with pytest.raises(OSError, match=says):
                save(tmp_path, pushes=30)
        assert half.exists()
        assert files_in(tmp_path) == before
        # A run waits for a folder that is about to be free: its end releases it.
        threading.Timer(0.3, other.kill).start()
        save(tmp_path, pushes=30)
    assert max(steps_in(tmp_path)) == 30
    assert not half.exists()


def refused(directory):
    """The error of another process that takes the folder; None if it gets it."""
    with holder(directory) as other:
        _, error = other.communicate()
    return re.search(rb"process \d+ on .* saves itself in", error)


@pytest.mark.slow
def test_a_copy_of_the_folder_inside_of_the_loop_leaves_it_locked(tmp_path):
    """A process that closes a file loses all POSIX locks that it has on it."""
    directory = tmp_path / "run"
    with engines.simulated(training(30), checkpoint=directory) as run:
        next(run.pushes)
        shutil.copytree(directory, tmp_path / "copy")
        assert refused(directory)
    assert not refused(directory)


ORPHAN = """
import os, runpy, sys, time
taken = runpy.run_path(sys.argv[1])["Folder"](sys.argv[2])
taken.take()
if os.fork() == 0:
    time.sleep(60)
print(flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_child_does_not_hold_the_folder_of_a_dead_process(tmp_path, impatient):
    code = [sys.executable, "-c", ORPHAN, folder.__file__, str(tmp_path)]
    with subprocess.Popen(
        code, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        assert parent.stdout.readline() == b"\n"
        parent.wait()
        try:
            taken = folder.Folder(str(tmp_path))
            taken.take()
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # The child.
    taken.release()


def failing(monkeypatch, owner, name, error, times=1):
    """Lets a function fail for the first times."""
    function, left = getattr(owner, name), [error] * times

    def fail(*args, **options):
        if left:
            raise left.pop()
        return function(*args, **options)

    monkeypatch.setattr(owner, name, fail)


NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.every
@pytest.mark.parametrize("error", [NO_DESCRIPTOR, KeyboardInterrupt()])
def test_a_folder_that_could_not_be_taken_is_free(error, tmp_path, monkeypatch):
    wanted = folder.Folder(str(tmp_path))
    with monkeypatch.context() as patch:
        failing(patch, os, "replace", error)
        with pytest.raises(type(error)):
            wanted.take()
    with pytest.raises(OSError, match="owner is missing or empty"):
        wanted.check_own()
    other = folder.Folder(str(tmp_path))
    other.take()
    other.check_own()
    other.release()


def flockless(monkeypatch, number):
    """A file system whose ``flock`` fails with this number."""

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_file_system_that_cannot_lock_is_named(tmp_path, monkeypatch):
    flockless(monkeypatch, errno.ENOLCK)
    with pytest.raises(OSError, match=rf"{tmp_path}/gradxform.lock cannot be locked: "):
        folder.Folder(str(tmp_path)).take()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_locks_a_dead_host_leaves_a_file_that_is_named(
    tmp_path, monkeypatch, impatient
):
    """Only the same host knows that a process of it has died."""
    flockless(monkeypatch, errno.ENOSYS)
    first = folder.Folder(str(tmp_path))
    first.take()
    lock = tmp_path / "gradxform.lock"
    left = lock.read_text().replace(socket.gethostname(), "another-host")
    assert "another-host" in left
    first.release()
    lock.write_text(left)
    owner = "run 12 of process 7 on another-host"
    (tmp_path / "gradxform.owner").write_text(f"{owner}\n")
    says = rf"{owner} saves itself in {tmp_path}: .* has died, delete {lock}\."
    with pytest.raises(OSError, match=says):
        folder.Folder(str(tmp_path)).take()
    lock.unlink()
    folder.Folder(str(tmp_path)).take()


def test_who_has_the_folder_is_named_whatever_the_file_holds(tmp_path, impatient):
    first = folder.Folder(str(tmp_path))
    first.take()
    (tmp_path / "gradxform.owner").write_bytes(b"\xff\xfe")
    with pytest.raises(OSError, match=rf"saves itself in {tmp_path}: wait until"):
        folder.Folder(str(tmp_path)).take()
    first.release()


# What may happen to a folder, while its run goes on or while its server is dead.


def remove(directory):
    # A new folder may get its inode. Workers on threads may have had one more written.
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)
    shutil.rmtree(directory, ignore_errors=True)


def move(directory):
    directory.rename(directory.with_name("moved"))


def clear(directory):
    remove(directory)
    directory.mkdir()


def exchange(directory):
    """As if another disk were mounted there, which holds a run of the same job."""
    move(directory)
    save(directory, pushes=10)


def forget_checkpoints(directory):
    for where in directory.iterdir():
        if where.name.isdigit():
            shutil.rmtree(where)


def owned_by(content):
    def change(directory):
        (directory / "gradxform.owner").write_bytes(content)

    return change


CHANGES = {
    remove: "run was deleted or moved during the run",
    move: "run was deleted or moved during the run",
    clear: "gradxform.owner is missing or empty",
    exchange: "gradxform.owner names another run",
    owned_by(b""): "gradxform.owner is missing or empty",
    owned_by(b"\xff\xfe\x00"): "gradxform.owner names another run, or was changed",
    forget_checkpoints: "run has no checkpoint left",
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [*CHANGES][:-1])
def test_a_folder_that_changes_during_a_run_gets_no_more(change, tmp_path, caplog):
    directory = tmp_path / "run"
    # Half of the cases for each engine.
    engine = (engines.simulated, engines.threads)[[*CHANGES].index(change) % 2]

    def go():
        checkpoint = every(5, directory, max_to_keep=None)
        with engine(training(10**6), checkpoint=checkpoint) as run:
            while not steps_in(directory):
                next(run.pushes)
            run.server.flush()  # Nothing is being written.
            change(directory)
            while not any(CHANGES[change] in line for line in told(caplog)):
                next(run.pushes)
            if change in (remove, move):
                save(directory, pushes=10)  # Another run may begin there.
            run.stop()

    says = CHANGES[exchange if change in (remove, move) else change]
    with pytest.raises(OSError, match=says):
        go()
    if change in (remove, move, exchange):
        assert max(steps_in(directory)) == 10
    else:  # A second run may begin in a folder with such a file.
        assert (resumed(directory, training(1)) is None) == (change is clear)


def recoverable():
    job = training(10**6, required=1, count=1)
    core_ = core.of_one_process(job.params, job.tx)
    return functools.partial(RecoverableServer, Transport(core_))


def push(server, times):
    for _ in range(times):
        params, step = server.pull()
        server.push(jax.tree.map(jnp.ones_like, params), step, push_id=(0, step))


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_that_has_died_does_not_begin_anew(change, resumed, tmp_path):
    directory = tmp_path / "run"
    checkpoint = every(5, directory)
    with recoverable()(checkpoint) as server:
        run = server.begin().run
        push(server, 6)
        server.flush()
    assert [*steps_in(directory)] == [5]
    if resumed:  # The next one has saved nothing itself.
        with recoverable()(checkpoint) as server:
            other, run = run, server.begin().run
        assert other != run
    change(directory)
    before = files_in(tmp_path)
    with recoverable()(checkpoint) as server:
        for _ in range(2):
            with pytest.raises(OSError, match=CHANGES[change]):
                server.begin(run)
    assert files_in(tmp_path) == before
    assert directory.exists() == (change not in (remove, move))
    # The same call made again may begin there.
    with recoverable()(checkpoint) as server:
        server.begin()


@pytest.mark.slow
def test_a_server_that_has_died_goes_on_in_its_folder(tmp_path):
    link = tmp_path / "link"
    (tmp_path / "run").mkdir()
    link.symlink_to(tmp_path / "run")
    checkpoint = every(5, link)
    with recoverable()(checkpoint) as server:
        run = server.begin().run
        push(server, 3)  # Nothing is saved yet.
    for step in (0, 5):
        with recoverable()(checkpoint) as server:
            status = server.begin(run)
            assert (status.run, status.global_step) == (run, step)
            push(server, 6)
            server.flush()
    move(tmp_path / "run")  # Then it does not begin anew.
    gone = pytest.raises(OSError, match="was deleted or moved during the run")
    with recoverable()(checkpoint) as server, gone:
        server.begin(run)
    assert not (tmp_path / "run").exists()


# Broken ones.


def largest(where):
    """The file that holds most of the arrays."""
    files = [path for path in (where / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(where):
    """Flips bits. orbax alone would read wrong numbers."""
    data = bytearray(largest(where).read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest(where).write_bytes(data)


def empty(where):
    shutil.rmtree(where)
    where.mkdir()


def garble(where):
    (where / "counters" / "metadata").write_text('{"answers": [[')


def lose_state(where):
    shutil.rmtree(where / "state")


def unseal(where):
    """Takes away the checksums, and then the state."""
    (where / folder.SUMS).unlink()
    lose_state(where)


def unseal_and_garble(where):
    (where / folder.SUMS).write_text("{")


BREAKS = {
    flip: "has changed since it was written",
    empty: "it has no counters",
    garble: "has changed since it was written",
    lose_state: "is missing since it was written",
    unseal: "it has no state",
    unseal_and_garble: "checksums.json: ",
}


@pytest.mark.parametrize("change", BREAKS)
def test_a_run_goes_on_from_the_newest_whole_one(change, saved, tmp_path, caplog):
    change(tmp_path / "20")
    broken = files_in(tmp_path / "20")
    with caplog.at_level(logging.WARNING, "gradxform"):
        pushes, again, run = save(tmp_path)
    (message,) = told(caplog)
    assert f"{tmp_path / '20'} is not whole" in message
    assert f"goes on from {tmp_path / '10'}" in message
    assert BREAKS[change] in message
    assert run.resumed == 10
    assert len(pushes) == 10
    assert bits(again) == bits(saved)  # As if it had never stopped.
    assert run.counts()[:7] == (20, 20, 0, 0, 0, 0, 0)
    # Nothing is lost: the broken one is kept aside, and its number is free.
    assert files_in(tmp_path / "20.broken") == broken
    assert {*steps_in(tmp_path)} == {10, 20}
    caplog.clear()  # It is told once.
    with caplog.at_level(logging.WARNING, "gradxform"):
        assert save(tmp_path, pushes=25)[2].resumed == 20
    assert not told(caplog)


@pytest.mark.slow
def test_several_may_be_broken_and_again(tmp_path, caplog):
    for _ in range(2):
        save(tmp_path, max_to_keep=None)
        save(tmp_path, pushes=30, max_to_keep=None)
        flip(tmp_path / "30")
        garble(tmp_path / "20")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gradxform"):
        assert save(tmp_path, pushes=30)[2].resumed == 10
    assert len(told(caplog)) == 2
    assert len([*tmp_path.glob("*.broken*")]) == 4


def test_a_run_does_not_begin_without_a_whole_checkpoint(engine, saved, tmp_path):
    """Nor with another job's."""
    garble(tmp_path / "20")
    job = training(30)
    other = job._replace(params={**job.params, "w": jnp.zeros(9)})
    no_other = rf"{tmp_path}/20 is not whole, .* no other"
    for given, says in ((other, r"10 is of another job"), (job, no_other)):
        before = files_in(tmp_path)
        fails(engine, given, ValueError, says, checkpoint=tmp_path)
        assert files_in(tmp_path) == before
        if given is other:
            lose_state(tmp_path / "10")


def test_one_without_checksums_as_of_a_full_disk_is_read(saved, tmp_path):
    (tmp_path / "20" / folder.SUMS).unlink()
    assert save(tmp_path)[2].resumed == 20


# Whole ones that cannot be read now.


READS = (folder.zlib, "crc32"), (pathlib.Path, "read_bytes")
RESTORE = ocp.CheckpointManager, "restore"


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (*READS[0], MemoryError("no memory")),
        (*READS[1], NO_DESCRIPTOR),
        (*READS[0], TimeoutError("an alarm's handler raises it anywhere")),
        (*RESTORE, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")),
        (*RESTORE, ValueError("RESOURCE_EXHAUSTED: too many open files [tensorstore]")),
        (*RESTORE, TimeoutError("an alarm's handler raises it anywhere")),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_of_reading_is_no_fault_of_a_checkpoint(
    error, owner, name, saved, tmp_path, monkeypatch
):
    before = files_in(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, owner, name, error, times=2)
        with pytest.raises(type(error)) as raised:
            save(tmp_path, pushes=30)
    assert raised.value is error
    if name == "restore":
        assert f"{tmp_path}/20 was read" in error.__notes__[-1]
    assert files_in(tmp_path) == before  # Nothing was renamed.
    _, again, run = save(tmp_path)
    assert run.resumed == 20
    assert bits(again) == bits(saved)


def test_a_folder_that_cannot_be_listed_is_not_sealed(saved, tmp_path, monkeypatch):
    """Checksums of some of the files would hide what is missing of the others."""
    (tmp_path / "20" / folder.SUMS).unlink()
    with monkeypatch.context() as patch:
        failing(patch, os, "scandir", NO_DESCRIPTOR)
        folder.Folder(str(tmp_path)).seal(20)
    assert not (tmp_path / "20" / folder.SUMS).exists()
    folder.Folder(str(tmp_path)).seal(20)
    sums = json.loads((tmp_path / "20" / folder.SUMS).read_bytes())
    assert {*sums} == {*files_in(tmp_path / "20")} - {
        folder.SUMS,
        *(name for name in files_in(tmp_path / "20") if "/" not in name),
    }


# Old ones.


def keep_by_a_link(directory, monkeypatch):
    directory.rename(directory.parent.parent / "elsewhere")
    directory.symlink_to(directory.parent.parent / "elsewhere")


def keep_by_permissions(directory, monkeypatch):
    """As for a user who is not root."""
    unlink = os.unlink

    def refuse(path, *args, dir_fd=None):
        at = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        if f"{directory}/" in os.path.join(at, path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path, *args, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [keep_by_a_link, keep_by_permissions])
def test_an_old_checkpoint_that_cannot_be_deleted_stays(
    engine, keep, tmp_path, monkeypatch, caplog
):
    directory = tmp_path / "run"
    checkpoint = engines.Checkpoint(directory, 10, None, max_to_keep=2)

    def train(pushes):
        job = training(pushes, required=1, count=1)
        with engine(job, checkpoint=checkpoint) as run:
            for _ in run.pushes:
                run.server.flush()
            return run.counts()[:3], run.resumed

    assert train(20) == ((20, 20, 0), None)
    before = files_in(directory / "10")
    with monkeypatch.context() as patch:
        keep(directory / "10", patch)
        assert train(60) == ((60, 60, 0), 20)
        assert files_in(directory / "10") == before
    assert {*steps_in(directory)} == {10, 50, 60}
    sealed = directory.glob(f"*/{folder.SUMS}")
    assert {path.parent.name for path in sealed} == {"10", "50", "60"}
    (message,) = told(caplog)  # Once, though four checkpoints were written.
    assert f"{directory}/10 is old, but cannot be deleted: " in message
    caplog.clear()
    assert train(70) == ((70, 70, 0), 60)
    if keep is keep_by_permissions:  # Now it can be deleted.
        assert {*steps_in(directory)} == {60, 70}
        assert not told(caplog)
    else:
        assert {*steps_in(directory)} == {10, 60, 70}
        assert files_in(tmp_path / "elsewhere") == before


def test_half_of_a_deleted_checkpoint_is_not_taken_for_all_of_it(saved, tmp_path):
    """The end of the process may come between any two files."""
    total = len(files_in(tmp_path / "10")) + 1
    unlink, left = os.unlink, 0

    def stop(path, *args, **options):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        unlink(path, *args, **options)

    mine = folder.Folder(str(tmp_path))
    whole = tmp_path.parent / f"{tmp_path.name} whole"
    shutil.copytree(tmp_path / "10", whole)
    for files in range(total):
        shutil.rmtree(tmp_path / "10", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "10")
        left = files
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", stop)
            with contextlib.suppress(KeyboardInterrupt):
                mine.delete(10)
        if (tmp_path / "10").exists():
            assert (mine.fault(10) is None) == (files == 0)
    assert not (tmp_path / "10").exists()


# Links.


@pytest.mark.slow
@pytest.mark.parametrize("name", [folder.LOCK, folder.OWNER, f"{folder.OWNER}.tmp"])
@pytest.mark.parametrize("kind", ["link", "hard link", "link to nothing", "folder"])
def test_no_file_outside_of_the_folder_changes(name, kind, tmp_path):
    """Whatever has the name of one of our files."""
    directory, outside = tmp_path / "run", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()
    (outside / "precious").write_text("precious\n")
    path = directory / name
    if kind == "link":
        path.symlink_to(outside / "precious")
    elif kind == "hard link":
        path.hardlink_to(outside / "precious")
    elif kind == "link to nothing":
        path.symlink_to(outside / "nothing")
    else:
        path.mkdir()
    if kind == "folder" or (name == folder.LOCK and "hard" not in kind):
        # Two runs that lock different files would both have the folder.
        where = re.escape(str(directory / name).removesuffix(".tmp"))
        with pytest.raises(OSError, match=f"checkpoint: {where} cannot be "):
            save(directory)
        assert {*directory.iterdir()} <= {path, directory / folder.LOCK}
    else:
        state = save(directory)[1]
        assert not (directory / folder.OWNER).is_symlink()
        text = (directory / folder.OWNER).read_text()
        assert text.startswith("run ")
        assert text.endswith(folder.SAVED)
        assert bits(save(directory)[1]) == bits(state)  # It goes on from there.
    assert files_in(outside) == {"precious": b"precious\n"}


@pytest.mark.every
@pytest.mark.parametrize("kind", ["link", "hard link"])
def test_a_link_that_is_made_during_a_run_is_not_followed(kind, tmp_path):
    """The second and third time that files of the folder are written."""
    precious = tmp_path / "precious"
    mine = folder.Folder(str(tmp_path / "run"))
    mine.take()
    owner = tmp_path / "run" / folder.OWNER
    sums = tmp_path / "run" / "10" / folder.SUMS
    sums.parent.mkdir()
    for path in (owner, sums, sums.with_name(f"{folder.SUMS}.tmp")):
        text = path.read_text() if path == owner else "precious\n"
        precious.write_text(text)
        path.unlink(missing_ok=True)
        path.symlink_to(precious) if kind == "link" else path.hardlink_to(precious)
        if path == owner:
            mine.mark_saved()
            assert owner.read_text() == text + folder.SAVED
        else:
            for item in folder.ITEMS:
                (sums.parent / item).mkdir(exist_ok=True)
                (sums.parent / item / "x").write_text("x")
            mine.seal(10)
            assert {*json.loads(sums.read_text())} == {"counters/x", "state/x"}
            assert not sums.is_symlink()
        assert precious.read_text() == text
    mine.release()


def test_a_broken_checkpoint_takes_the_name_of_no_link(saved, tmp_path, caplog):
    (tmp_path / "20.broken").symlink_to(tmp_path / "nothing")
    for path in (tmp_path / "20" / "state").iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    assert save(tmp_path)[2].resumed == 10
    (note,) = told(caplog)
    assert "It is now" in note
    assert (tmp_path / "20.broken").is_symlink()
    assert [*tmp_path.glob("20.broken-*")]


# Another job's.


X, Y = np.arange(3, dtype=np.float32), 10 + np.arange(3, dtype=np.float32)
of_norm = jax.jit(jax.value_and_grad(lambda p: optax.tree.norm(p, squared=True)))


def job_of(params, tx, gradient=of_norm):
    return make_job([worker(gradient)], 3, tx, params=params)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"b": {}}, {}, "['params']['b']"),
        ({}, {"b": None}, "['params']['b']"),
        ({"b": {"c": {}}}, {"b": {}}, "['params']['b']"),
        ({"b": [(), ()]}, {"b": [()]}, "['params']['b'][1]"),
        ({"b": ()}, {"b": {}}, None),  # Orbax reads these.
        # AdamW's state is Adam's, with one more node that has no array.
        (optax.adam, optax.adamw, "['state'].inner_state[2]"),
    ],
)
def test_nodes_without_arrays_belong_to_a_job(
    one, other, where, tmp_path, standard_promotion
):
    first, second = (
        job_of({"w": X}, gx.drop_stale(given(0.1), 9))
        if callable(given)
        else job_of({"w": X, **given}, optax.sgd(0.1))
        for given in (one, other)
    )
    resumed(tmp_path, first)
    before = files_in(tmp_path)
    if where is None:
        assert resumed(tmp_path, second) == 3
        return
    match = re.escape(f"{tmp_path}/3 is of another job. At {where}")
    fails(engines.simulated, second, ValueError, match, checkpoint=tmp_path)
    assert files_in(tmp_path) == before
    assert resumed(tmp_path, first) == 3


def with_state(state):
    return optax.GradientTransformation(lambda _: state, lambda u, s, p=None: (u, s))


@pytest.mark.every
@pytest.mark.parametrize(
    ("params", "state", "one", "other"),
    [
        ({"a.b": X, "a": {"b": Y}}, {}, "['params']['a.b']", "['params']['a']['b']"),
        ({"a": [X], "a.0": Y}, {}, "['params']['a'][0]", "['params']['a.0']"),
        ({"a": {"": X}, "a.": Y}, {}, "['params']['a']['']", "['params']['a.']"),
        ({"w": X}, {"m.n": X, "m": {"n": Y}}, "['m.n']", "['m']['n']"),
    ],
)
def test_arrays_that_orbax_cannot_tell_apart_are_refused_at_once(
    params, state, one, other, tmp_path
):
    job, directory = job_of(params, with_state(state)), tmp_path / "run"
    match = "under the one name"
    error, _ = fails(engines.simulated, job, ValueError, match, checkpoint=directory)
    assert one in str(error)
    assert other in str(error)
    assert not directory.exists()
    assert len(list_all(engines.simulated, job)) == 3  # Nothing is saved.


def saves(x, directory):
    """Whether orbax alone saves an array, and reads it."""
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(directory, options=options) as manager:
        try:
            manager.save(1, args=ocp.args.StandardSave({"x": x}))
        except ValueError:
            return False
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"x": x})
        read = manager.restore(1, args=ocp.args.StandardRestore(like))["x"]
    assert read.dtype == x.dtype
    return True


EMPTY = np.zeros((0, 3), np.float32), np.zeros((3, 0), np.int32)
NAMES = "bool", "int8", "uint8", "bfloat16", "float8_e4m3fn", "complex64"
NAMES += "uint4", "float8_e4m3"  # Which it cannot save.
ARRAYS = [*EMPTY, *(np.zeros(2, jnp.dtype(name)) for name in NAMES)]
ARRAYS += [np.zeros((1, 1), np.float32), np.float32(0.0)]
ARRAYS += [jax.random.key(0), jax.random.split(jax.random.key(0), 0)]


@pytest.mark.parametrize("number", range(len(ARRAYS)))
def test_an_array_that_orbax_cannot_save_is_refused_at_once(number, tmp_path):
    """Orbax alone says which ones it saves."""
    x = jax.device_put(ARRAYS[number])
    where = ("params", "state")[number % 2]
    params = {"w": jnp.asarray(X)} | ({"x": x} if where == "params" else {})
    tx = with_state({"x": x} if where == "state" else {})
    none = dict.fromkeys(params) | {"w": X}
    job, directory = job_of(params, tx, lambda _: (0.0, none)), tmp_path / "run"
    if saves(x, tmp_path / "alone"):
        assert [resumed(directory, job) for _ in range(2)] == [None, 3]
        return
    match = rf"orbax cannot save .*'{where}'.*'x'\], of (shape|dtype) "
    fails(engines.simulated, job, ValueError, match, checkpoint=directory)
    assert not directory.exists()
    assert len(list_all(engines.simulated, job)) == 3  # Nothing is saved.


# No memory.


@pytest.mark.parametrize(
    "error", [MemoryError("none"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")]
)
def test_a_snapshot_without_memory_costs_one_checkpoint(
    engine, error, tmp_path, monkeypatch, caplog
):
    """The push that it belongs to has acted: it gets its answer."""
    job = training(30, required=1, count=1)
    checkpoint = engines.Checkpoint(tmp_path, 10, None, max_to_keep=None)
    state, pushes = core.ServerCore.state, []

    def short(self):
        if self.version.global_step == 20:
            raise error
        return state(self)

    monkeypatch.setattr(core.ServerCore, "state", short)
    with (
        caplog.at_level(logging.ERROR, "gradxform"),
        engine(job, checkpoint=checkpoint) as run,
    ):
        for push in run.pushes:
            pushes.append(push)
            run.server.flush()
    assert [push.result.global_step for push in pushes] == [*range(1, 31)]
    assert run.counts()[:3] == (30, 30, 0)
    assert {*steps_in(tmp_path)} == {10, 30}
    (message,) = told(caplog)
    assert message.startswith(f"no checkpoint was written: {type(error).__name__}")


def test_a_checkpoint_needs_no_new_thread(tmp_path, monkeypatch):
    """A push has acted when the first one is due."""

    def start(thread):
        raise RuntimeError("can't start new thread")

    job = training(20, required=1, count=1)
    checkpoint = engines.Checkpoint(tmp_path, 10, None)
    with engines.simulated(job, checkpoint=checkpoint) as run:
        for _ in range(9):
            next(run.pushes)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert next(run.pushes).result.global_step == 10
    assert {*steps_in(tmp_path)} == {10}


def test_after_a_snapshot_without_memory_the_next_one_is_not_at_once(caplog):
    """A run that is saved by the clock would otherwise copy after every step."""

    def take():
        raise MemoryError

    store = stores.Store(engines.Checkpoint("", None, 0.2))
    time.sleep(0.25)
    assert store.is_due(1)
    store.write_soon(take)
    assert not store.is_due(2)
    time.sleep(0.25)
    assert store.is_due(3)
    assert told(caplog) == ["no checkpoint was written: MemoryError: "]


# Files of others.


def a_year(directory):
    (directory / "2024").mkdir()
    (directory / "2024" / "january.csv").write_text("1,2,3")
    return "2024 is no checkpoint of a run"


def a_file(directory):
    save(directory)
    (directory / "15").write_text("a file")
    return "15 is no checkpoint of a run"


def of_orbax(directory, named=False):
    with ocp.CheckpointManager(directory) as manager:
        args = ocp.args.StandardSave({"w": np.arange(3.0)})
        manager.save(7, args=ocp.args.Composite(state=args) if named else args)
        manager.wait_until_finished()
    return "7 is no"


@pytest.mark.slow
@pytest.mark.parametrize(
    "foreign", [a_year, a_file, of_orbax, functools.partial(of_orbax, named=True)]
)
def test_a_folder_with_something_of_another_program_is_refused(foreign, tmp_path):
    says = foreign(tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}/{says}"):
        save(tmp_path)
    assert files_in(tmp_path) == before
    (tmp_path / says.split()[0]).rename(tmp_path / "kept")
    assert save(tmp_path)[2].resumed == (20 if foreign is a_file else None)


# A full disk.


def settled(path):
    """Returns when nothing has been written under the path for a second."""
    before = None
    while (now := {*path.rglob("*")}) != before:
        before = now
        time.sleep(1.0)


def test_half_of_a_file_that_a_process_left_behind_is_replaced(tmp_path):
    path, half = tmp_path / "owner", tmp_path / "owner.tmp"
    half.write_text("ha")
    folder._write(path, "whole")
    assert path.read_text() == "whole"
    assert not half.exists()


def test_a_file_that_cannot_be_replaced_leaves_no_half(tmp_path, monkeypatch):
    path = tmp_path / "owner"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("it is full")))
    with pytest.raises(OSError, match="it is full"):
        folder._write(path, "whole")
    assert [x.name for x in tmp_path.iterdir()] == ["owner"]
    assert path.read_text() == "old"


# After its error, threads of orbax write on, and make a folder again that was removed.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_failed_checkpoints_do_not_pile_up(tmp_path, caplog):
    params = {"w": jnp.asarray(np.random.default_rng(0).standard_normal(20_000))}
    job = make_job([worker(of_norm)], 5, optax.sgd(0.01), params=params)
    checkpoint = engines.Checkpoint(tmp_path, every_steps=1)
    again = tmp_path / "2.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp"
    with (
        caplog.at_level(logging.ERROR, "gradxform"),
        engines.simulated(job, checkpoint=checkpoint) as run,
    ):
        next(run.pushes)
        with full_disk(8192):
            for _ in range(3):
                next(run.pushes)
                settled(tmp_path)
                # What the threads have made again is gone after the next one.
                assert len([*tmp_path.glob("*.orbax-checkpoint-tmp*")]) <= 1
        assert len(told(caplog)) == 3
        again.mkdir(parents=True, exist_ok=True)
        next(run.pushes)
        assert not again.exists()
    assert not [*tmp_path.glob("*.orbax-checkpoint-tmp*")]
    assert {*steps_in(tmp_path)} == {1, 5}


# Where a folder is, and the settings of its run.


def test_a_directory_is_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, where in (
        (b"bytes", tmp_path / "bytes"),
        (pathlib.Path("~") / "path", tmp_path / "home" / "path"),
        (".", tmp_path),
    ):
        assert engines.Checkpoint.of(given).directory == str(where)
    ended(engines.simulated, training(3), checkpoint="~/runs")
    assert [*steps_in(tmp_path / "home" / "runs")] == [3]
    no_path = r"^checkpoint must be a path, got"
    for given, error, says in (
        *((x, ValueError, no_path + r" b?''") for x in ("", b"")),
        *((x, TypeError, no_path) for x in (False, 3, engines.Checkpoint(None))),
    ):
        fails(engines.simulated, training(3), error, says, checkpoint=given)


@pytest.mark.slow
def test_a_warning_names_changed_settings(tmp_path, caplog):
    engine = engines.simulated
    first = engines.Checkpoint(tmp_path, settings={"seed": 0, "sizes": (1, 2)})
    ended(engine, training(10), checkpoint=first)
    with caplog.at_level(logging.WARNING, "gradxform"):
        ended(engine, training(12), checkpoint=first)
        assert not told(caplog)
        other = first._replace(settings={"seed": 1, "sizes": [1, 2], "more": True})
        ended(engine, training(14), checkpoint=other)
        ended(engine, training(16), checkpoint=other)
        ended(engine, training(18), checkpoint=tmp_path)  # This one has no settings.
    assert told(caplog) == [
        f"checkpoint: {tmp_path}/12 has seed=0, and the run goes on with 1"
    ]
    saved = json.loads((tmp_path / "16" / "counters" / "metadata").read_text())
    assert saved["settings"] == {"seed": 1, "sizes": [1, 2], "more": True}


def of_aliases(levels):
    """As from a file of YAML with a line for each level."""
    value = 1.0
    for _ in range(levels):
        value = [value] * 9 if levels < 100 else [value]
    return {"x": value, "y": value}


ENTRIES, JSON = "has more than 100,000 entries", "must be JSON values, got"


@pytest.mark.every
@pytest.mark.parametrize(
    ("settings", "error", "says", "most"),
    [
        *((of_aliases(n), ValueError, ENTRIES, 500) for n in (5, 9, 40)),
        (of_aliases(200), ValueError, "is nested more than 100 deep", 500),
        ({"seed": np.int32(3)}, TypeError, JSON, 1200),
        (3, TypeError, JSON, 1200),
        ({(1, 2): 3}, TypeError, JSON, 1200),
        ({"x" * 10**6: np.int32(3)}, TypeError, JSON, 1200),
    ],
    ids=range(8),
)
def test_settings_that_are_no_json_or_too_many_are_refused_at_once(
    settings, error, says, most, tmp_path
):
    given = engines.Checkpoint(tmp_path / "new", settings=settings)
    match = f"settings {says}"
    raised, _ = fails(engines.simulated, training(9), error, match, checkpoint=given)
    assert len(str(raised)) < most
    assert not (tmp_path / "new").exists()
