"""When a store writes, in whose name, and what it deletes: orbax only takes notes here.

Files, and what is read from them, are in ``tests/engines/test_folders.py``.
"""

import threading
import types

import jax
import numpy as np
import pytest

from gradxform._server import store as module
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.records import Snapshot
from gradxform._server.store import Store

orbax = pytest.importorskip("orbax.checkpoint")
STATE = {"params": np.ones(2, np.float32)}
BUCKET = "gs://bucket/run"


class Notes:
    """In place of orbax's manager: what each was made with, and what is there."""

    def __init__(self):
        self.options, self.there = [], []
        self.meanwhile = lambda: None  # Runs while one is saved.
        self.takes = True

    def __call__(self, directory, *, options):
        assert directory == BUCKET
        self.options.append(options)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def save(self, pushes, args):
        self.meanwhile()
        if self.takes:
            self.there.append(pushes)
        return self.takes

    def latest_step(self):
        return max(self.there, default=None)

    def all_steps(self):
        return self.there

    def delete(self, pushes):
        self.there.remove(pushes)


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()
    monkeypatch.setattr(orbax, "CheckpointManager", notes)
    return notes


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=50.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    return clock


def made(together=False, **options):
    return Store(Checkpoint.of(Checkpoint(BUCKET, **options)), together)


def taken(pushes):
    return Snapshot(pushes, STATE, {"global_step": pushes})


@pytest.mark.every
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("process", [0, 1])
def test_who_writes_together_and_who_deletes(together, process, notes, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    store = made(together, max_to_keep=2)
    assert store.open(STATE) is None  # A bucket has no lock.
    assert store.newest() is None
    for pushes in (3, 5, 8):
        store.write(taken(pushes))
        assert store.saved == pushes
    store.close()
    deletes = not (together and process)
    assert notes.there == ([5, 8] if deletes else [3, 5, 8])
    opened, looked, *saves = notes.options
    if deletes:
        saves, pruned = saves[::2], saves[1::2]
    else:
        pruned = []
    assert [each.cleanup_tmp_directories for each in (opened, looked)] == [True, False]
    for each in (opened, looked, *pruned):
        of = each.multiprocessing_options
        assert (of.primary_host, of.active_processes) == (process, {process})
        assert of.barrier_sync_key_prefix is None
    assert len(saves) == 3
    for number, each in enumerate(saves):
        of = each.multiprocessing_options
        assert of.primary_host == (0 if together else process)
        assert of.active_processes == ({0, 1, 2} if together else {process})
        name = f"checkpoint {number}" if together else None
        assert of.barrier_sync_key_prefix == name
        assert each.cleanup_tmp_directories == together
        assert each.max_to_keep is None
        assert (each.create, each.enable_async_checkpointing) == (False, False)


def test_what_fails_is_told_and_the_next_one_cleans_up(notes, caplog):
    store, raised = made(), [OSError("it is full"), None, None]

    def meanwhile():
        if error := raised.pop(0):
            raise error

    notes.meanwhile = meanwhile
    for pushes in (3, 5, 8):
        store.write_soon(lambda pushes=pushes: taken(pushes))
        store.flush()
        assert store.saved == (None if pushes == 3 else pushes)
    saves = notes.options[:1] + notes.options[1::2]
    assert [each.cleanup_tmp_directories for each in saves] == [False, True, False]
    assert notes.there == [5, 8]
    assert caplog.messages == ["no checkpoint was written: OSError: it is full"]
    raised[:] = [OSError("it is full")]
    with pytest.raises(OSError, match="it is full"):  # The last one is no mere note.
        store.write(taken(10))
    store.close()


def test_one_that_orbax_refuses_is_another_run_s(notes):
    store, notes.takes = made(), False
    says = f"^{BUCKET} holds a checkpoint of more than 4 pushes: another run writes"
    with pytest.raises(OSError, match=says):
        store.write(taken(4))
    assert store.saved is None
    store.close()


def test_an_old_one_that_cannot_be_deleted_is_told_once(notes, caplog):
    delete = notes.delete

    def stuck(pushes):
        if pushes in (3, 5):
            raise OSError("it is a link") if pushes == 3 else FileNotFoundError
        delete(pushes)

    store, notes.delete = made(max_to_keep=1), stuck
    for pushes in (3, 5, 8, 9):
        store.write(taken(pushes))
    store.close()
    assert notes.there == [3, 5, 9]
    told = (
        f"checkpoint: {BUCKET}/3 is old, but cannot be deleted: OSError: it is a link"
    )
    assert caplog.messages == [told]


def test_without_memory_for_a_snapshot_none_is_written(notes, caplog):
    def take():
        raise MemoryError("there is no room")

    store = made()
    store.write_soon(take)
    store.close()
    assert caplog.messages == [
        "no checkpoint was written: MemoryError: there is no room"
    ]
    assert not notes.options


def test_one_is_due_by_steps_or_seconds_unless_one_is_written(notes, clock):
    store = made(every_steps=4, every_seconds=10.0)
    store.flush()
    assert [step for step in range(13) if store.is_due(step)] == [0, 4, 8, 12]
    clock.now = 59.5
    assert not store.is_due(5)
    clock.now = 60.0
    assert store.is_due(5)
    goes_on = threading.Event()
    notes.meanwhile = goes_on.wait
    store.write_soon(lambda: taken(5))
    clock.now = 70.0
    assert not any(map(store.is_due, (6, 8)))  # It is still being written.
    goes_on.set()
    store.flush()
    assert store.is_due(6)
    clock.now = 69.0  # The seconds count from its beginning.
    assert not store.is_due(6)
    store.close()


def test_a_checkpoint_says_where_and_how_often():
    assert Checkpoint.of(None) is None
    given = Checkpoint.of(BUCKET)
    assert given == Checkpoint(BUCKET, None, 60.0, 3, True, {})
    assert Checkpoint.of(given) == given
    none = given._replace(every_steps=None, every_seconds=None, max_to_keep=None)
    assert Checkpoint.of(none) == none
    least = given._replace(every_steps=1, every_seconds=0, max_to_keep=1, resume=False)
    assert Checkpoint.of(least) == least
    found = Checkpoint.of(given._replace(settings={"sizes": (1, 2)}))
    assert found.settings == {"sizes": [1, 2]}


@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("every_steps", 0, ValueError),
        ("every_steps", 2.5, TypeError),
        ("max_to_keep", 0, ValueError),
        ("max_to_keep", 2.5, TypeError),
        ("every_seconds", -1.0, ValueError),
        ("every_seconds", float("nan"), ValueError),
        ("resume", 1, TypeError),
    ],
)
def test_numbers_that_are_none_are_named(name, value, error):
    with pytest.raises(error, match=f"^{name} must be"):
        Checkpoint.of(Checkpoint(BUCKET)._replace(**{name: value}))


@pytest.mark.every
@pytest.mark.parametrize("length", [999, 1000, 1001])
def test_settings_that_are_no_json_are_shown_in_a_thousand_letters(length):
    bare = len(repr({"": b""}))
    settings = {"x" * (length - bare): b""}
    shown = repr(settings)
    assert len(shown) == length
    shown = shown if length <= 1000 else f"{shown[:1000]} ..."
    with pytest.raises(TypeError) as raised:
        Checkpoint.of(Checkpoint(BUCKET, settings=settings))
    assert str(raised.value).startswith(f"settings must be JSON values, got {shown}: ")


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.every
def test_a_rule_that_is_none_makes_none_due(steps, notes, clock):
    store = made(every_steps=steps, every_seconds=None)
    store.flush()
    clock.now = 1e9
    due = [step for step in range(1, 8) if store.is_due(step)]
    assert due == ([3, 6] if steps else [])
    store.close()
