"""The folder of a run's checkpoints: its one writer, and which ones are complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import socket
import threading
import time
import zlib

try:
    import fcntl
except ImportError:  # Windows: there only runs of the same process exclude each other.
    fcntl = None  # type: ignore[assignment]

LOCK = "gradxform.lock"
SUMS = "checksums.json"
ITEMS = "counters", "state"
PATIENCE = 5.0  # Seconds for a process that has died, or is about to end.

# What `flock` raises where a file system has no locks.
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
# Errors of opening a path that mean that no such file is there.
NO_FILE = FileNotFoundError, NotADirectoryError, IsADirectoryError

# The open lock files of all folders that runs of this process write to, by device and
# inode. No other file gets the inode of an open one.
_taken: dict[tuple[int, int], int] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    # A child shares the locks of its parent, and would keep them after its end.
    for file in _taken.values():
        os.close(file)
    _taken.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_after_fork)


def path_of(name: str, given: str | os.PathLike[str]) -> str:
    """A caller's path made absolute, with the user's home instead of ``~``.

    Raises:
      TypeError: it is no path.
      ValueError: it is empty, which would mean the working directory.
    """
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise TypeError(f"{name} must be a path, got {given!r}.") from None
    if not path:
        raise ValueError(f"{name} must be a path, got {given!r}: '.' is this folder.")
    if is_remote(path):
        return path
    return os.path.abspath(os.path.expanduser(path))


def is_remote(path: str) -> bool:
    """Whether it is a cloud's bucket."""
    return "://" in path


class Folder:
    """A folder that belongs to one run at a time.

    Each checkpoint is a folder in it, named by a number. Beside orbax's files lies a
    file with their checksums, as orbax does not notice changed bytes.
    """

    def __init__(self, directory: str) -> None:
        self._path = pathlib.Path(directory)
        self._identity: tuple[int, int] | None = None  # Of the lock file, once taken.

    def take(self) -> None:
        """Locks the folder for this run, until :meth:`release` or this process's end.

        Raises:
          OSError: another run writes there, or the folder is not writable.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        identity = _identity(os.fstat(file))
        with _lock:
            if identity in _taken:
                os.close(file)
                raise self._in_use("another run of this process")
            _taken[identity] = file
        self._identity = identity
        try:
            if fcntl is not None:
                self._lock(file)
        except BaseException:
            self.release()
            raise

    def _lock(self, file: int) -> None:
        """Waits for the lock, and writes down who has it."""
        deadline = time.monotonic() + PATIENCE
        while not _locked(file):
            if time.monotonic() > deadline:
                owner = os.pread(file, 1000, 0).decode(errors="replace").strip()
                raise self._in_use(owner or "another process")
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # A full disk: later errors lack the name.
            os.ftruncate(file, 0)
            owner = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(file, owner.encode(), 0)

    def retake(self) -> bool:
        """Takes the folder again if it was deleted or moved; returns whether it was.

        Raises:
          OSError: as :meth:`take`. Another run may have begun there meanwhile.
        """
        if self.is_there():
            return False
        self.release()
        self.take()
        return True

    def is_there(self) -> bool:
        """Whether the folder that this run has taken is still at its path."""
        try:
            there = _identity(os.stat(self._path / LOCK))
        except FileNotFoundError:
            return False
        return there == self._identity and there in _taken

    def _in_use(self, owner: str) -> OSError:
        return OSError(
            f"checkpoint: {owner} saves a run in {self._path}: wait until it ends, "
            "or give another directory."
        )

    def release(self) -> None:
        """Unlocks the folder for other runs."""
        identity, self._identity = self._identity, None
        with _lock:
            if identity is not None and identity in _taken:
                os.close(_taken.pop(identity))

    def check(self) -> None:
        """Looks for entries that no run has made.

        Raises:
          ValueError: an entry has the name of a checkpoint but is none. A run would
            read it, or remove it as an old one.
        """
        for entry in sorted(self._path.iterdir()):
            if not re.fullmatch("0|[1-9][0-9]*", entry.name):
                continue
            names = {x.name for x in entry.iterdir()} if entry.is_dir() else {""}
            if names and (not names & {*ITEMS} or names & {"", "default"}):
                raise ValueError(
                    f"checkpoint: {entry} is no checkpoint of a run. Give a directory "
                    "that holds nothing else."
                )

    def sweep(self) -> None:
        """Removes what failed checkpoints have left half written.

        Threads of orbax may go on after a failure, and make a removed folder again.
        """
        if self.is_there():
            for half in self._path.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half, ignore_errors=True)

    def seal(self, number: int) -> None:
        """Writes the checksums of a checkpoint's files."""
        where = self._path / f"{number}"
        half = where / f"{SUMS}.tmp"
        # A full disk leaves it without checksums; it can still be read.
        with contextlib.suppress(OSError):
            with open(half, "w") as file:
                json.dump(_sums(where), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(half, where / SUMS)

    def fault(self, number: int) -> str | None:
        """The fault in the content of a checkpoint; None if none is known.

        Raises:
          OSError: it cannot be read now, which says nothing about its content.
        """
        where = self._path / f"{number}"
        try:
            sums = json.loads((where / SUMS).read_bytes())
        except NO_FILE:  # The disk was full.
            lacking = [x for x in ITEMS if not (where / x).exists()]
            return f"it has no {lacking[0]}" if lacking else None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return f"{SUMS}: {error}"
        for name, each in sums.items():
            if (found := _sum(where / name)) != each:
                how = "is missing" if found is None else "has changed"
                return f"{name} {how} since it was written"
        return None

    def set_aside(self, number: int) -> str:
        """Renames a broken checkpoint, which frees its number; returns the new name."""
        new = self._path / f"{number}.broken"
        if new.exists():
            new = self._path / f"{number}.broken-{time.time_ns()}"
        os.rename(self._path / f"{number}", new)
        return str(new)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _locked(file: int) -> bool:
    """Locks an open file, unless another process has locked it; returns whether."""
    try:
        # Not `lockf`: its lock ends as soon as this process closes the file anywhere,
        # also after `shutil.copytree` has read it.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _sums(where: pathlib.Path) -> dict[str, list[int] | None]:
    """Size and CRC-32 of each file of a checkpoint."""
    # Not `rglob`, which leaves out a folder that it cannot read.
    walks = [os.walk(where / item, onerror=_raise) for item in ITEMS]
    files = [pathlib.Path(top, x) for walk in walks for top, _, xs in walk for x in xs]
    return {str(x.relative_to(where)): _sum(x) for x in files}


def _raise(error: OSError) -> None:
    raise error


def _sum(path: pathlib.Path) -> list[int] | None:
    """Size and CRC-32 of a file; None if it is not there."""
    crc = size = 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    except NO_FILE:
        return None
    return [size, crc]
