"""The checkpoints in a directory, which orbax writes while workers go on."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradxform._checks import structures
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.folder import BRING_BACK, Folder, is_remote
from gradxform._server.records import Snapshot, summary

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


logger = logging.getLogger("gradxform")

EMPTY = "a node without arrays"
# The errors of a copy for which there is no memory.
NO_MEMORY = MemoryError, jax.errors.JaxRuntimeError


class Store:
    """The checkpoints of one run in their directory, written on a thread of its own.

    Processes that write together each have a store. Only the first one opens the
    directory and chooses the newest checkpoint. The others read its choice, and no
    process waits for another. When each has copied its parts of the same snapshot, all
    write together. They wait for each other through JAX's coordination service, never
    in a collective: it could come between those of a step.

    Args:
      checkpoint: where, and how many are kept.
      together: whether all processes of JAX write together.

    Attributes:
      checkpoint: as given.
      saved: how many pushes the last one holds that was written or read.
    """

    def __init__(self, checkpoint: Checkpoint, together: bool = False) -> None:
        self._orbax = require("orbax.checkpoint", "checkpoint")
        require("filelock", "checkpoint")
        self.checkpoint, self._together = checkpoint, together
        self._attempts = itertools.count()  # The same in all processes.
        self.saved: int | None = None
        self._failed = False  # Whether the last attempt has failed, or is under way.
        self._left: set[int] = set()  # Old ones that cannot be deleted.
        self._folder: Folder | None = None  # Once it is taken; a bucket has none.
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._begun = time.monotonic()
        # The last work that nobody waits for. This one starts the thread now, as
        # memory may be short later.
        self._last: Future[Any] = self._thread.submit(time.monotonic)

    def _manager(
        self, *, clean: bool = False, attempt: int | None = None
    ) -> CheckpointManager:
        """A manager of orbax, of this process alone unless it is for an attempt."""
        together = self._together and attempt is not None
        processes = {*range(jax.process_count())} if together else {jax.process_index()}
        options = self._orbax.options.MultiprocessingOptions(
            primary_host=min(processes),
            active_processes=processes,
            # A new name each time: the last attempt may have failed halfway.
            barrier_sync_key_prefix=f"checkpoint {attempt}" if together else None,
        )
        manager: CheckpointManager = self._orbax.CheckpointManager(
            self.checkpoint.directory,
            options=self._orbax.CheckpointManagerOptions(
                # An old one that cannot be deleted is no reason to fail: see `_prune`.
                max_to_keep=None,
                create=False,
                cleanup_tmp_directories=clean,
                multiprocessing_options=options,
                # This one's thread waits anyway. Asynchronous writers find each other
                # by a number that all managers of a process share, and two that
                # write at once may wait for each other forever.
                enable_async_checkpointing=False,
            ),
        )
        return manager

    def open(self, state: Mapping[str, Any], run: str | None = None) -> str | None:
        """Takes the directory; returns what identifies the run there.

        Args:
          state: describes what will be saved there.
          run: what identifies it, if its server has died.

        Raises:
          OSError: another run writes there, or the directory is not writable, or not
            that of the run.
          ValueError: it holds something else; or orbax cannot save an array of
            ``state``, or cannot tell two of them apart.
        """
        if self._folder is not None:
            return self._folder.run
        _check_names(state)
        _check_arrays(state)
        directory = os.fspath(self.checkpoint.directory)
        if not is_remote(directory):
            folder = Folder(directory, run)
            folder.take()
            self._folder = folder
        with self._manager(clean=True):
            pass  # It has removed what was left half written.
        return None if self._folder is None else self._folder.run

    def newest(self) -> int | None:
        """How many pushes the newest holds; None where there is none.

        Raises:
          OSError: there is none, though the run had one before its server died.
        """
        with self._manager() as manager:
            newest = manager.latest_step()
        if newest is None and self._folder is not None and self._folder.has_saved:
            where = self.checkpoint.directory
            raise OSError(f"checkpoint: {where} has no checkpoint left. {BRING_BACK}")
        return newest

    def is_due(self, global_step: int) -> bool:
        """Whether the state after this step should be saved."""
        if not self._last.done():
            return False
        steps, seconds = self.checkpoint.every_steps, self.checkpoint.every_seconds
        if steps is not None and global_step % steps == 0:
            return True
        return seconds is not None and time.monotonic() - self._begun >= seconds

    def write_soon(self, take: Callable[[], Snapshot | None]) -> None:
        """Takes a snapshot after a step, and has it written; returns before it is.

        Without memory for the snapshot nothing is written, and the run goes on.
        """
        self._begun = time.monotonic()
        try:
            snapshot = take()
        except NO_MEMORY as error:
            _tell(error)
        else:
            assert snapshot is not None  # The step has just succeeded.
            self._last = self._thread.submit(self._write_or_tell, snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint, after what was begun before; returns when it is there.

        Raises:
          OSError: another run writes there, or the disk is full.
        """
        self._thread.submit(self._write, snapshot).result()

    def flush(self) -> None:
        """Waits until what was begun is written."""
        wait([self._last])

    def _write_or_tell(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except Exception as error:  # The next checkpoint may succeed.
            _tell(error)

    def _write(self, snapshot: Snapshot) -> None:
        snapshot.ready()
        arrays, settings = array_types(snapshot.state), self.checkpoint.settings
        counters = snapshot.counters | {"arrays": arrays, "settings": settings}
        args = self._orbax.args
        state, counted = args.StandardSave(snapshot.state), args.JsonSave(counters)
        items = args.Composite(state=state, counters=counted)
        attempt = next(self._attempts)  # Also if this process now raises an error.
        if self._folder is not None:
            self._folder.check_own()
        # To clean needs threads, and memory for one may be short. All that write
        # together have to agree.
        clean, self._failed = self._together or self._failed, True
        with self._manager(clean=clean, attempt=attempt) as manager:
            saved = manager.save(snapshot.pushes, args=items)
        if not saved:
            raise OSError(
                f"{self.checkpoint.directory} holds a checkpoint of more than "
                f"{snapshot.pushes} pushes: another run writes there. Give each run a "
                "directory of its own."
            )
        self.saved, self._failed = snapshot.pushes, False
        if self._folder is not None:
            self._folder.seal(snapshot.pushes)
            self._folder.mark_saved()
        if not self._together or jax.process_index() == 0:
            self._prune()

    def _prune(self) -> None:
        """Deletes old checkpoints. One that cannot be deleted is told once, and stays.

        Each later checkpoint tries again.
        """
        if (most := self.checkpoint.max_to_keep) is None:
            return
        with self._manager() as manager:
            for pushes in sorted(manager.all_steps())[:-most]:
                try:
                    (self._folder or manager).delete(pushes)
                except FileNotFoundError:
                    continue  # Somebody else has deleted it.
                except OSError as error:
                    if pushes not in self._left:
                        logger.warning(
                            "checkpoint: %s is old, but cannot be deleted: %s",
                            self._where(pushes),
                            summary(error),
                        )
                    self._left.add(pushes)

    def read_newest(
        self, like: dict[str, Any], read: Callable[[int], Snapshot] | None = None
    ) -> tuple[Snapshot, list[str]]:
        """The newest complete one, its arrays placed as those of ``like``; and notes.

        Newer ones, which are broken, are renamed. The notes tell the user of them, and
        of changed settings. Only the files decide which ones are broken. Any error
        while one is read is raised: it may lack memory, for example.

        Args:
          like: parameters and state, or their descriptions.
          read: reads one, by its number of pushes; by default :meth:`read`.

        Raises:
          ValueError: it belongs to another job, or none is complete.
        """
        with self._manager() as manager:
            found = sorted(manager.all_steps(), reverse=True)
        folder = self._folder  # A bucket has neither locks nor checksums.
        faults: dict[int, str] = {}
        for pushes in found:
            if folder is None or (fault := folder.fault(pushes)) is None:
                break
            faults[pushes] = fault
        else:
            pushes, fault = next(iter(faults.items()))
            raise ValueError(
                f"checkpoint: {self._where(pushes)} is not whole, {fault}, and there "
                "is no other to go on from. Move it away, or give another directory."
            )
        try:
            snapshot = read(pushes) if read else self.read(pushes, like)
        except BaseException as error:
            error.add_note(f"Raised while {self._where(pushes)} was read.")
            raise
        if folder is not None:
            folder.mark_saved()
        where = self._where(pushes)
        notes = [
            f"checkpoint: {self._where(broken)} is not whole, {fault}. It is now "
            f"{folder.set_aside(broken)}, and the run goes on from {where}"
            for broken, fault in faults.items()
            if folder is not None  # No fault is known of those in a bucket.
        ]
        before, now = snapshot.counters["settings"], self.checkpoint.settings
        notes += [
            f"checkpoint: {where} has {name}={before[name]!r}, and the run goes on "
            f"with {now[name]!r}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        return snapshot, notes

    def _where(self, pushes: int) -> str:
        return f"{self.checkpoint.directory}/{pushes}"

    def read(self, pushes: int, like: dict[str, Any]) -> Snapshot:
        """One checkpoint, its arrays placed as those of ``like``.

        The directory need not be taken.

        Raises:
          ValueError: it belongs to another job.
        """
        args, target = self._orbax.args, self._orbax.utils.to_shape_dtype_struct
        with self._manager() as manager:
            counted = args.Composite(counters=args.JsonRestore())
            counters = manager.restore(pushes, args=counted)["counters"]
            self._check_job(pushes, like, counters.pop("arrays"))
            restore = args.StandardRestore(jax.tree.map(target, like))
            state = manager.restore(pushes, args=args.Composite(state=restore))["state"]
        self.saved = pushes
        return Snapshot(pushes, state, counters)

    def _check_job(
        self, pushes: int, like: dict[str, Any], saved: dict[str, str]
    ) -> None:
        """Raises ``ValueError`` unless a checkpoint has these arrays, and no others."""
        wanted = array_types(like)
        differ = [x for x in {**wanted, **saved} if saved.get(x) != wanted.get(x)]
        if differ:  # The error names an array, if it can.
            path = min(differ, key=lambda x: EMPTY in (saved.get(x), wanted.get(x)))
            raise ValueError(
                f"checkpoint: {self._where(pushes)} is of another job. At {path} it "
                f"has {saved.get(path, 'nothing')}, and this job "
                f"{wanted.get(path, 'nothing')}. Give another directory."
            )

    def close(self) -> None:
        """Finishes the checkpoint that was begun, then lets go of the directory."""
        self._thread.shutdown()
        if self._folder is not None:
            self._folder.release()


def array_types(state: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of every array, by its path. Other ones are of another job.

    Nodes without children are in it, too. Orbax needs the same ones to read.
    """

    def is_empty(node: object) -> bool:
        return not jax.tree.leaves(node, is_leaf=lambda child: child is not node)

    return {
        jax.tree_util.keystr(path): EMPTY
        if is_empty(x)
        else jax.core.ShapedArray(x.shape, x.dtype).str_short()
        for path, x in jax.tree.leaves_with_path(state, is_leaf=is_empty)
    }


def _check_names(state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if orbax would save two arrays under one name."""
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    for name, same in structures.by_name(paths, separator=".").items():
        if len(same) > 1:
            raise ValueError(
                f"checkpoint: {' and '.join(map(structures.path_name, same))} would be "
                f"saved under the one name {name!r}. Rename one of them."
            )


def _check_arrays(state: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if orbax could not save one of the arrays."""
    tensorstore = require("tensorstore", "checkpoint")  # In it orbax saves arrays.
    for path, x in jax.tree.leaves_with_path(state):
        if x.size == 0:
            raise ValueError(
                f"checkpoint: orbax cannot save {structures.path_name(path)}, of shape "
                f"{list(x.shape)}: it has no entries. Leave it out of the job."
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            continue  # A key of JAX, whose numbers orbax saves.
        try:
            tensorstore.dtype(x.dtype.name)
        except ValueError:
            raise ValueError(
                f"checkpoint: orbax cannot save {structures.path_name(path)}, of dtype "
                f"{x.dtype}. Keep it in a dtype that it knows, such as uint8."
            ) from None


def _tell(error: Exception) -> None:
    logger.error("no checkpoint was written: %s", summary(error))
