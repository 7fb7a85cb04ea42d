"""The folder of a run's checkpoints: its one writer, and which ones are complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import time
import zlib

LOCK = "gradxform.lock"
OWNER = "gradxform.owner"
SAVED = "It has had a checkpoint here.\n"
BRING_BACK = "Bring the directory back, and make the same call again."
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
    file with their checksums, as orbax does not notice changed bytes. Another file says
    whose the folder is, and whether that run has a checkpoint there.

    Args:
      directory: its path.
      run: identifies the run, if another process of it had the folder, and has died.

    Attributes:
      run: as given, or a new one.
      has_saved: whether the run has had a checkpoint there.
    """

    def __init__(self, directory: str, run: str | None = None) -> None:
        from filelock import FileLock

        self._path, self._goes_on = pathlib.Path(directory), run is not None
        # Any thread may release it.
        self._lock = FileLock(self._path / LOCK, PATIENCE, thread_local=False)
        self.run, self.has_saved = run or secrets.token_hex(4), False

    def take(self) -> None:
        """Locks the folder for this run, until :meth:`release` or this process's end.

        Raises:
          OSError: another run writes there; or the folder is not writable, cannot be
            locked, or is not that of the run.
          ValueError: an entry has the name of a checkpoint but is none.
        """
        if self._goes_on:
            self.check_own()  # Before the lock makes a new folder.
            self.has_saved = SAVED in self._text(OWNER)
        else:
            self._path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except TimeoutError:
            other = self._text(OWNER).partition("\n")[0] or "another run"
            message = (
                f"checkpoint: {other} saves itself in {self._path}: wait until it "
                "ends, or give another directory."
            )
            # Where files cannot be locked, the file itself is the lock, with a content.
            if self._text(LOCK):
                message += f" If that process has died, delete {self._path / LOCK}."
            raise OSError(message) from None
        except OSError as error:
            message = f"checkpoint: {self._path / LOCK} cannot be locked"
            raise OSError(error.errno, f"{message}: {error.strerror}.") from error
        try:
            if self._goes_on:  # Another run may have had it meanwhile.
                self.check_own()
            process = f"process {os.getpid()} on {socket.gethostname()}\n"
            said = f"run {self.run} of {process}{SAVED * self.has_saved}"
            try:
                _write(self._path / OWNER, said)
            except OSError as error:
                message = f"checkpoint: {self._path / OWNER} cannot be written"
                raise OSError(error.errno, f"{message}: {error.strerror}.") from error
            self._check_entries()
        except BaseException:
            self.release()
            raise

    def _text(self, name: str) -> str:
        """The content of a file; nothing if it is missing."""
        try:
            return (self._path / name).read_text(errors="replace")
        except NO_FILE:
            return ""

    def check_own(self) -> None:
        """Raises ``OSError`` unless the folder at this path is that of this run."""
        said, file = self._text(OWNER), self._path / OWNER
        if said.startswith(f"run {self.run} of "):
            return
        why = f"{file} names another run, or was changed"
        if not said.strip():
            why = f"{file} is missing or empty: {self._path} may be another directory"
        if not self._path.is_dir():
            why = f"{self._path} was deleted or moved during the run"
        raise OSError(f"checkpoint: {why}. {BRING_BACK}")

    def mark_saved(self) -> None:
        """Notes in the file of the owner that this run has a checkpoint here."""
        if not self.has_saved:
            # On a full disk the file stays as it is.
            with contextlib.suppress(OSError):
                _write(self._path / OWNER, self._text(OWNER) + SAVED)
                self.has_saved = True

    def release(self) -> None:
        """Unlocks the folder for other runs."""
        self._lock.release()

    def _check_entries(self) -> None:
        """Raises ``ValueError`` if an entry has the name of a checkpoint but is none.

        A run would read it, or remove it as an old one.
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
        # A full disk leaves it without checksums; it can still be read.
        with contextlib.suppress(OSError):
            _write(where / SUMS, json.dumps(_sums(where)))

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

    def delete(self, number: int) -> None:
        """Deletes an old checkpoint.

        Raises:
          OSError: it cannot be deleted; or it is a link, which somebody has made.
        """
        where = self._path / f"{number}"
        if where.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(where))
        # Its checksums last: with them the rest of it does not pass for all of it.
        for item in ITEMS:
            if (where / item).exists():
                shutil.rmtree(where / item)
        shutil.rmtree(where)

    def set_aside(self, number: int) -> str:
        """Renames a broken checkpoint, which frees its number; returns the new name."""
        new = self._path / f"{number}.broken"
        if os.path.lexists(new):  # Also if it is a link to nothing.
            new = self._path / f"{number}.broken-{time.time_ns()}"
        os.rename(self._path / f"{number}", new)
        return str(new)


def _write(path: pathlib.Path, text: str) -> None:
    """Replaces a file of the folder by a new one.

    If the path is a link, the link is replaced, and its target does not change. A
    reader sees the old file or the new one, never half of it.
    """
    half = path.with_name(f"{path.name}.tmp")
    half.unlink(missing_ok=True)  # A process may have died with it.
    try:
        with open(half, "x") as file:  # A new file: "x" opens nothing that is there.
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


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
