"""The folder of a run by itself: whose it is, and which checkpoints are whole.

``tests/engines/test_folders.py`` has the same with runs, processes and orbax.
"""

import errno
import json
import os
import re
import socket
import zlib

import pytest

from gradxform._server import folder
from gradxform._server.folder import LOCK, OWNER, SAVED, SUMS, Folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    pytest.importorskip("filelock")
    monkeypatch.setattr(folder, "PATIENCE", 0.0)


def test_a_folder_is_that_of_the_run_that_took_it(tmp_path):
    where = tmp_path / "a" / "b"
    first = Folder(str(where))
    first.take()
    process = f"run {first.run} of process {os.getpid()} on {socket.gethostname()}"
    assert re.fullmatch("[0-9a-f]{8}", first.run)
    assert (where / OWNER).read_text() == process + "\n"
    second = Folder(str(where))
    assert second.run != first.run
    with pytest.raises(OSError, match=f"^checkpoint: {process} saves itself in"):
        second.take()
    first.release()
    second.take()
    second.release()
    with pytest.raises(OSError, match="names another run, or was changed"):
        first.check_own()


def test_a_run_goes_on_in_its_own_folder_alone(tmp_path):
    first = Folder(str(tmp_path))
    first.take()
    first.release()
    for saved in (False, True):
        again = Folder(str(tmp_path), first.run)
        again.take()
        assert (again.run, again.has_saved) == (first.run, saved)
        text = (tmp_path / OWNER).read_text()
        assert text.count(SAVED) == saved
        for _ in range(2):  # The second time it is known.
            again.mark_saved()
        assert again.has_saved
        text = (tmp_path / OWNER).read_text()
        assert (text.count(SAVED), text.count("run ")) == (1, 1)
        again.check_own()
        again.release()
    (tmp_path / LOCK).unlink(missing_ok=True)
    with pytest.raises(OSError, match="names another run"):
        Folder(str(tmp_path), "another").take()
    (tmp_path / OWNER).write_text(" \n")
    with pytest.raises(OSError, match="is missing or empty"):
        Folder(str(tmp_path), first.run).take()
    assert not (tmp_path / LOCK).exists()
    with pytest.raises(OSError, match="was deleted or moved"):
        Folder(str(tmp_path / "no"), first.run).take()
    assert not (tmp_path / "no").exists()


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("7", "file", True),
        ("7", ["state"], False),
        ("7", ["state", "default"], True),
        ("7", ["other"], True),
        ("0", [], False),
        ("07", "file", False),
        ("7.broken", "file", False),
        ("seven", ["other"], False),
    ],
)
def test_an_entry_with_the_name_of_a_checkpoint_is_one(
    name, content, refused, tmp_path
):
    if content == "file":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
        for item in content:
            (tmp_path / name / item).mkdir()
    taken = Folder(str(tmp_path))
    if not refused:
        taken.take()
        return taken.release()
    with pytest.raises(
        ValueError, match=f"{tmp_path / name} is no checkpoint of a run"
    ):
        taken.take()
    (tmp_path / name).rename(tmp_path / "away")
    taken.take()  # It was left free.
    taken.release()


FILES = {"state/deep/a": b"abc" * 400_000, "state/b": b"", "counters/c": b"xyz"}


@pytest.fixture
def sealed(tmp_path):
    """A checkpoint with some files, and its folder."""
    for name, content in FILES.items():
        path = tmp_path / "40" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    own = Folder(str(tmp_path))
    own.seal(40)
    return own, tmp_path / "40"


def test_a_seal_has_size_and_checksum_of_each_file(sealed):
    own, where = sealed
    expected = {name: [len(x), zlib.crc32(x)] for name, x in FILES.items()}
    assert json.loads((where / SUMS).read_text()) == expected
    assert own.fault(40) is None


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda w: (w / "state/b").unlink(), "state/b is missing since"),
        (lambda w: (w / "state/b").write_text("x"), "state/b has changed since"),
        (lambda w: (w / "counters/c").write_text("xyw"), "counters/c has changed"),
        (lambda w: (w / SUMS).write_text("{"), f"{SUMS}: "),
        (lambda w: (w / SUMS).write_bytes(b"\xff\xff\xff"), f"{SUMS}: "),
        (lambda w: (w / SUMS).unlink(), None),  # The disk was full.
    ],
)
def test_a_fault_is_named(change, fault, sealed):
    own, where = sealed
    change(where)
    found = own.fault(40)
    assert found is None if fault is None else found.startswith(fault)


def test_without_checksums_each_item_has_to_be_there(sealed):
    own, where = sealed
    (where / SUMS).unlink()
    (where / "counters").rename(where / "gone")
    assert own.fault(40) == "it has no counters"


def test_an_old_checkpoint_is_deleted_its_checksums_last(sealed, monkeypatch):
    own, where = sealed
    removed, remove = [], folder.shutil.rmtree
    monkeypatch.setattr(
        folder.shutil, "rmtree", lambda path: (removed.append(path), remove(path))
    )
    (where / "more").touch()
    own.delete(40)
    assert removed == [where / "counters", where / "state", where]
    assert not where.exists()
    where.mkdir()
    own.delete(40)  # Half of it was gone.
    where.symlink_to(where.parent)
    with pytest.raises(OSError) as raised:  # noqa: PT011
        own.delete(40)
    assert (raised.value.errno, raised.value.filename) == (errno.ELOOP, str(where))
    assert where.is_symlink()


def test_a_broken_checkpoint_gets_a_name_that_is_free(sealed):
    own, where = sealed
    assert own.set_aside(40) == f"{where}.broken"
    assert not where.exists()
    where.mkdir()
    second = own.set_aside(40)
    assert re.fullmatch(rf"{where}\.broken-[0-9]+", second)
    assert sorted(x.name for x in where.parent.iterdir()) == sorted(
        ["40.broken", os.path.basename(second)]
    )


def test_a_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.write_text("old")

    def fsync(number):
        half = tmp_path / "file.tmp"
        with open(half) as file:
            assert os.path.sameopenfile(number, file.fileno())
        seen.append((half.read_text(), path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    folder._write(path, "new")
    assert seen == [("new", "old")]
    assert path.read_text() == "new"


def test_a_path_is_absolute_and_not_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of")
    for given, path in {
        "x": str(tmp_path / "x"),
        b"x": str(tmp_path / "x"),
        tmp_path: str(tmp_path),
        "~/x": "/home/of/x",
        "gs://bucket/~/x": "gs://bucket/~/x",
    }.items():
        assert folder.path_of("name", given) == path
    for given, error in (("", ValueError), (3, TypeError), (None, TypeError)):
        with pytest.raises(error, match=rf"^name must be a path, got {given!r}"):
            folder.path_of("name", given)
