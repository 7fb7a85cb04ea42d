"""Checkpoints that are written while workers go on."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from gradxform._server.extras import require
from gradxform._server.folder import Folder, path_of
from gradxform._server.records import summary
from gradxform._server.sharded import ShardedParams
from gradxform._trees import checks

logger = logging.getLogger("gradxform")


class Checkpoint(NamedTuple):
    """Where a run is saved, how often, and how many of its checkpoints are kept.

    A checkpoint holds parameters, optimizer state, and each worker's last answers, all
    of one moment: right after a step. Orbax's ``CheckpointManager`` writes it while the
    run goes on. A checkpoint that falls due while the last one is still being written
    is skipped. Its name is the number of pushes that it holds. A run is saved once more
    at its end, also if ``SIGTERM`` or an exception ends it; but not after Ctrl-C, nor
    after a failed step of the server. Until a checkpoint is written, it takes the
    memory of a second model and optimizer state.

    The directory belongs to one run at a time: a second run gets an error that names
    the first. Each checkpoint holds checksums of its files. If the newest checkpoint
    has changed, lacks parts or cannot be read, the run goes on from the newest complete
    one, with a warning, and renames the broken one, for example to ``40.broken``.

    Attributes:
      directory: the path of the checkpoints' folder. On Ray, the server's machine and
        any machine that takes its place must both have it.
      every_steps: saves whenever the global step is a multiple of it; None for never.
      every_seconds: saves after a step if this many seconds have passed since the last
        checkpoint was begun; None for never.
      max_to_keep: how many of the newest are kept; None for all.
      resume: whether to go on from the newest checkpoint, if there is one. If False, an
        existing checkpoint is an error: nothing is ever overwritten.
      settings: what the run depends on besides its job, by name, such as
        ``{"seed": 0}``: any JSON value. They are saved, too, and a run that goes on
        with other settings says so.
    """

    directory: str | os.PathLike[str]
    every_steps: int | None = None
    every_seconds: float | None = 60.0
    max_to_keep: int | None = 3
    resume: bool = True
    settings: Mapping[str, Any] = {}

    @classmethod
    def of(cls, given: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
        """A checkpoint, or the directory of one, or None; each number checked."""
        if given is None:
            return None
        self = given if isinstance(given, Checkpoint) else cls(given)
        for name in ("every_steps", "max_to_keep"):
            if getattr(self, name) is not None:
                checks.integer_scalar(name, getattr(self, name))
                checks.in_range(name, getattr(self, name), "[1, inf)")
        if self.every_seconds is not None:
            checks.in_range("every_seconds", self.every_seconds, "[0, inf]")
        try:  # The form in which a checkpoint gives them back.
            settings = json.loads(json.dumps(dict(self.settings)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"settings must be JSON values, got {self.settings!r}: {error}."
            ) from error
        directory = path_of("checkpoint", self.directory)
        return self._replace(directory=directory, settings=settings)


class Snapshot(NamedTuple):
    """All that a server needs to go on, taken at one moment."""

    pushes: int  # How many it has answered.
    state: dict[str, Any]
    counters: dict[str, Any]


class OtherJobError(ValueError):
    """A checkpoint is complete, but belongs to another job."""


class Saver:
    """Writes snapshots on a thread of its own, and reads the newest.

    Where the arrays lie over several processes, each process has a saver. Only the
    first one opens the directory and chooses the newest checkpoint. The others call
    :meth:`read` with its choice, and no process waits for another. All write together,
    each its parts of the same snapshots. They wait for each other through JAX's
    coordination service, never in a collective: it could come between those of a step.

    Args:
      checkpoint: where, and how often.
      sharded: how the arrays lie over several processes.

    Attributes:
      checkpoint: as given.
    """

    def __init__(
        self, checkpoint: Checkpoint, sharded: ShardedParams | None = None
    ) -> None:
        self._orbax = require("orbax.checkpoint", "checkpoint")
        self.checkpoint = checkpoint
        self._sharded = sharded
        self._several = jax.process_count() > 1
        self._is_first = jax.process_index() == 0
        self._turns = itertools.count()  # The same in all processes.
        self._held: int | None = None  # How many pushes the newest one holds.
        self._folder = Folder(os.fspath(checkpoint.directory))
        self._manager: Any = None  # Orbax's, once the directory is open.
        self._idle = threading.Event()
        self._idle.set()
        self._begun = time.monotonic()
        # What to write, and a queue for the error of whoever waits; None at the end.
        self._commands: queue.SimpleQueue[
            tuple[Snapshot, queue.SimpleQueue[BaseException | None] | None] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name="checkpoints", daemon=True
        )
        self._thread.start()

    def open(self) -> None:
        """Takes the directory.

        Raises:
          OSError: another run writes there, or the directory is not writable.
          ValueError: it holds something else.
        """
        if self._manager is not None:
            return
        self._folder.take()
        try:
            self._folder.check()
            self._manage()
        except BaseException:
            self._folder.release()
            raise

    def _manage(self) -> None:
        self._manager = self._made(clean=self._is_first)

    def _made(self, *, clean: bool = False, together: str | None = None) -> Any:
        """A manager for this process alone, or for all that write ``together``."""
        ocp, several = self._orbax, {}
        if self._several:
            here = jax.process_index()
            several["create"] = False
            several["multiprocessing_options"] = ocp.options.MultiprocessingOptions(
                primary_host=0 if together else here,
                active_processes={*range(jax.process_count())} if together else {here},
                barrier_sync_key_prefix=together,
            )
        return ocp.CheckpointManager(
            self.checkpoint.directory,
            options=ocp.CheckpointManagerOptions(
                **several,
                max_to_keep=self.checkpoint.max_to_keep,
                # Removes the half-written ones of a killed process.
                cleanup_tmp_directories=clean,
                # This thread waits anyway. Asynchronous writers find each other by a
                # number that all managers of a process share, and two that write at
                # once may wait for each other forever.
                enable_async_checkpointing=False,
            ),
        )

    def is_due(self, global_step: int) -> bool:
        """Whether the state after this step should be saved."""
        _, steps, seconds, *_ = self.checkpoint
        if not self._idle.is_set():
            return False
        if steps is not None and global_step % steps == 0:
            return True
        return seconds is not None and time.monotonic() - self._begun >= seconds

    def rest(self) -> None:
        """No checkpoint is due from now on."""
        self.checkpoint = self.checkpoint._replace(every_steps=None, every_seconds=None)

    def start(self, snapshot: Snapshot) -> None:
        """Has it written; returns at once."""
        self._idle.clear()
        self._begun = time.monotonic()
        self._commands.put((snapshot, None))

    def write(self, snapshot: Snapshot) -> None:
        """Has it written, after what was begun before; returns when it is there."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._commands.put((snapshot, done))
        if (error := done.get()) is not None:
            raise error

    def wait(self) -> None:
        """Waits until nothing is being written."""
        self._idle.wait()

    def _serve(self) -> None:
        for snapshot, done in iter(self._commands.get, None):
            error = None
            try:
                self._save(snapshot)
            except Exception as raised:
                error = raised
                if done is None:  # The run goes on, and the next one may succeed.
                    logger.error("no checkpoint was written: %s", summary(error))
            self._idle.set()
            if done is not None:
                done.put(error)

    def _save(self, snapshot: Snapshot) -> None:
        if snapshot.pushes == self._held:
            return  # It is saved already.
        turn = next(self._turns)
        if self._is_first and self._folder.retake():
            self._manage()  # It forgets the checkpoints that are gone.
            if self.newest() not in (None, self._held):
                self._folder.release()
                raise OSError(
                    f"{self.checkpoint.directory} was deleted or moved during the run, "
                    "and another run has saved itself there: give each run a directory "
                    "of its own."
                )
        args, manager = self._orbax.args, self._manager
        counters = {
            **snapshot.counters,
            "arrays": self._described(snapshot.state),
            "settings": self.checkpoint.settings,
        }
        try:
            if self._several:  # A new name: the last one may have failed halfway.
                manager = self._made(together=f"checkpoint {turn}")
            saved = manager.save(
                snapshot.pushes,
                args=args.Composite(
                    state=args.StandardSave(snapshot.state),
                    counters=args.JsonSave(counters),
                ),
            )
        except BaseException:
            if self._is_first:
                with contextlib.suppress(Exception):
                    self._manage()  # Removes the half-written checkpoint.
            raise
        finally:
            if manager is not self._manager:
                manager.close()
        if not saved:
            raise OSError(
                f"{self.checkpoint.directory} holds a checkpoint of more than "
                f"{snapshot.pushes} pushes: another run writes there. Give each run a "
                "directory of its own."
            )
        self._held = snapshot.pushes
        if self._is_first:
            self._folder.seal(snapshot.pushes)

    def newest(self) -> int | None:
        """How many pushes the newest holds; None where there is none."""
        return self._manager.latest_step()

    def read_newest(
        self, like: dict[str, Any], read: Callable[[int], Snapshot] | None = None
    ) -> tuple[Snapshot, list[str]]:
        """The newest complete one, its arrays placed as those of ``like``; and notes.

        Newer ones, which are broken, are renamed. The notes tell the user of them, and
        of changed settings.

        Args:
          like: parameters and state, or their descriptions.
          read: reads one, by its number of pushes, in all processes; by default
            :meth:`read` in this process.

        Raises:
          ValueError: it belongs to another job, or none is complete.
        """
        faults: dict[int, str] = {}
        for pushes in sorted(self._manager.all_steps(), reverse=True):
            fault = self._folder.fault(pushes)
            if fault is None:
                try:
                    snapshot = read(pushes) if read else self.read(pushes, like)
                    break
                except OtherJobError:
                    raise
                except Exception as error:
                    fault = summary(error)
            faults[pushes] = fault
        else:
            pushes, fault = next(iter(faults.items()))
            raise ValueError(
                f"checkpoint: {self._where(pushes)} is not whole, {fault}, and there "
                "is no other to go on from. Move it away, or give another directory."
            )
        notes = [
            f"checkpoint: {self._where(broken)} is not whole, {fault}. It is now "
            f"{self._folder.set_aside(broken)}, and the run goes on from "
            f"{self._where(pushes)}"
            for broken, fault in faults.items()
        ]
        if faults:
            self._manage()
        return snapshot, notes + self._changed(pushes, snapshot.counters)

    def _where(self, pushes: int) -> str:
        return f"{self.checkpoint.directory}/{pushes}"

    def _changed(self, pushes: int, counters: dict[str, Any]) -> list[str]:
        """One line for each setting that differs from the run's."""
        before, now = counters.get("settings", {}), self.checkpoint.settings
        changes = [
            f"{name}={before[name]!r}, and the run goes on with {now[name]!r}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        return [f"checkpoint: {self._where(pushes)} has {each}" for each in changes]

    def read(self, pushes: int, like: dict[str, Any]) -> Snapshot:
        """One checkpoint, its arrays placed as those of ``like``: the parts here.

        Raises:
          ValueError: it belongs to another job.
        """
        if self._manager is None:  # A follower has none yet.
            self._manage()
        where, args = self._where(pushes), self._orbax.args
        read = self._manager.restore
        counters = read(pushes, args=args.Composite(counters=args.JsonRestore()))
        saved, wanted = counters["counters"].pop("arrays"), self._described(like)
        for path in {**wanted, **saved}:
            if saved.get(path) != wanted.get(path):
                raise OtherJobError(
                    f"checkpoint: {where} is of another job. At {path} it has "
                    f"{saved.get(path, 'nothing')}, and this job "
                    f"{wanted.get(path, 'nothing')}. Give another directory."
                )
        target = jax.tree.map(self._orbax.utils.to_shape_dtype_struct, like)
        # Another number of processes has another padding. The shapes that users see
        # are equal, as checked above.
        restore = args.StandardRestore(target, strict=False)
        state = read(pushes, args=args.Composite(state=restore))
        self._held = pushes
        return Snapshot(pushes, state["state"], counters["counters"])

    def close(self) -> None:
        """Finishes the checkpoint that was begun, then ends."""
        self._commands.put(None)
        self._thread.join()
        if self._manager is not None:
            self._manager.close()
        self._folder.release()

    def _described(self, state: dict[str, Any]) -> dict[str, str]:
        """Dtype and shape of every array, by its path, as users see them."""
        types = jax.tree.map(jax.typeof, state)
        if self._sharded is not None:
            of_params, of_state = self._sharded.layouts
            types = {"params": of_params.types, "state": of_state.types}
        flat, _ = jax.tree.flatten_with_path(types)
        return {jax.tree_util.keystr(path): _short(x) for path, x in flat}


def _short(x: jax.ShapeDtypeStruct) -> str:
    return jax.core.ShapedArray(x.shape, x.dtype).str_short()
