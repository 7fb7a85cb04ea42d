"""The folder of a run's checkpoints: its one writer, and which ones are complete."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import socket
import time
import zlib

LOCK = "gradxform.lock"
OWNER = "gradxform.owner"
SUMS = "checksums.json"
ITEMS = "counters", "state"
PATIENCE = 5.0  # Seconds for a process that has died, or is about to end.

# Errors of opening a path that mean that no such file is there.
NO_FILE = FileNotFoundError, NotADirectoryError, IsADirectoryError


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
        from filelock import FileLock

        self._path = pathlib.Path(directory)
        # Any thread may release it.
        self._lock = FileLock(self._path / LOCK, PATIENCE, thread_local=False)
        run = f"run {secrets.token_hex(4)} of process {os.getpid()}"
        self._owner = f"{run} on {socket.gethostname()}"

    def take(self) -> None:
        """Locks the folder for this run, until :meth:`release` or this process's end.

        Raises:
          OSError: another run writes there, or the folder is not writable.
        """
        self._path.mkdir(parents=True, exist_ok=True)
        owner = self._path / OWNER
        try:
            self._lock.acquire()
        except TimeoutError:
            other = owner.read_text() if owner.exists() else "another run"
            raise OSError(
                f"checkpoint: {other} saves itself in {self._path}: wait until it "
                "ends, or give another directory."
            ) from None
        try:
            owner.write_text(self._owner)
        except BaseException:
            self.release()
            raise

    def is_there(self) -> bool:
        """Whether the folder at this path is the one that this run has taken."""
        try:
            return (self._path / OWNER).read_text() == self._owner
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlocks the folder for other runs."""
        self._lock.release()

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
