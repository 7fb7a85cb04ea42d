"""The folder of a run's checkpoints: its one writer, and which ones are complete."""

from __future__ import annotations

import contextlib
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
COUNTERS = "counters/metadata"
ITEMS = "counters", "state"
PATIENCE = 5.0  # Seconds for a process that has died, or is about to end.

# All folders that runs of this process write to, by device and inode.
_taken: dict[tuple[int, int], Folder] = {}
_lock = threading.Lock()


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
    file with their checksums, as orbax does not notice changed bytes. A bucket has
    neither locks nor checksums.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._path = None if is_remote(directory) else pathlib.Path(directory)
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Locks the folder for this run, until :meth:`release` or this process's end.

        Raises:
          OSError: another run writes there, or the folder is not writable.
        """
        if self._path is None:
            return
        self._path.mkdir(parents=True, exist_ok=True)
        stat = os.stat(self._path)
        identity = stat.st_dev, stat.st_ino
        with _lock:
            other = _taken.get(identity)
            if other is not None and other.is_there():
                raise self._in_use("another run of this process")
            _taken[identity] = self
            self._identity = identity
        if fcntl is None:
            return
        # This lock ends with the process, and child processes do not inherit it.
        self._file = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + PATIENCE
        while not self._locked():
            if time.monotonic() > deadline:
                owner = os.pread(self._file, 1000, 0).decode(errors="replace").strip()
                self.release()
                raise self._in_use(owner or "another process")
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # A full disk: later errors lack the name.
            os.ftruncate(self._file, 0)
            owner = f"process {os.getpid()} on {socket.gethostname()}"
            os.pwrite(self._file, owner.encode(), 0)

    def retake(self) -> bool:
        """Takes the folder again if it was deleted or moved; returns whether it was.

        Raises:
          OSError: as :meth:`take`. Another run may have begun there meanwhile.
        """
        if self._path is None or self.is_there():
            return False
        self.release()
        self.take()
        return True

    def is_there(self) -> bool:
        """Whether the folder that this run has taken is still at its path."""
        assert self._path is not None
        try:
            if self._file is None:
                stat = os.stat(self._path)
                return (stat.st_dev, stat.st_ino) == self._identity
            # A new folder may get the inode of the old one. An open file keeps its own.
            return os.path.samestat(os.stat(self._path / LOCK), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _locked(self) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # Some file systems have no locks.
            pass
        return True

    def _in_use(self, owner: str) -> OSError:
        return OSError(
            f"checkpoint: {owner} saves a run in {self.directory}: wait until it ends, "
            "or give another directory."
        )

    def release(self) -> None:
        """Unlocks the folder for other runs."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        with _lock:
            if self._identity and _taken.get(self._identity) is self:
                del _taken[self._identity]
            self._identity = None

    def check(self) -> None:
        """Looks for entries that no run has made.

        Raises:
          ValueError: an entry has the name of a checkpoint but is none. A run would
            read it, or remove it as an old one.
        """
        if self._path is None:
            return
        numbers = [
            x for x in self._path.iterdir() if re.fullmatch("0|[1-9][0-9]*", x.name)
        ]
        for entry in sorted(numbers, key=lambda x: int(x.name)):
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
        if self._path is not None and self.is_there():
            for half in self._path.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(half, ignore_errors=True)

    def seal(self, number: int) -> None:
        """Writes the checksums of a checkpoint's files."""
        if self._path is None:
            return
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
        """The fault of a checkpoint; None if none is known."""
        if self._path is None:
            return None
        where = self._path / f"{number}"
        try:
            counters = json.loads((where / COUNTERS).read_bytes())
            counters["arrays"], counters["answers"]
        except FileNotFoundError:
            return f"it has no {COUNTERS}"
        except KeyError as error:
            return f"{COUNTERS} has no {error}"
        except (OSError, TypeError, ValueError) as error:  # Also of json and of UTF-8.
            return f"{COUNTERS}: {error}"
        if not (where / SUMS).exists():  # Of an older version, or of a full disk.
            return None
        try:
            sums = json.loads((where / SUMS).read_bytes())
        except ValueError as error:
            return f"{SUMS}: {error}"
        found = _sums(where)
        for name, each in sums.items():
            if found.get(name) != each:
                how = "has changed" if name in found else "is missing"
                return f"{name} {how} since it was written"
        return None

    def set_aside(self, number: int) -> str:
        """Renames a broken checkpoint, which frees its number; returns the new name."""
        if self._path is None:
            raise ValueError(f"checkpoint: move {self.directory}/{number} away.")
        new = self._path / f"{number}.broken"
        if new.exists():
            new = self._path / f"{number}.broken-{time.time_ns()}"
        os.rename(self._path / f"{number}", new)
        return str(new)


def _sums(where: pathlib.Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each file of a checkpoint."""
    files = [path for item in ITEMS for path in (where / item).rglob("*")]
    return {str(x.relative_to(where)): _sum(x) for x in files if x.is_file()}


def _sum(path: pathlib.Path) -> list[int]:
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return [size, crc]
