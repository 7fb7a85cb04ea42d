"""Where a run is saved, and what of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from gradxform._checks import arguments, nested
from gradxform._server.folder import path_of


class Checkpoint(NamedTuple):
    """Where a run is saved, how often, and how many of its checkpoints are kept.

    A checkpoint holds parameters, optimizer state, and each worker's last answers, all
    of one moment: right after a step. Orbax's ``CheckpointManager`` writes it while the
    run goes on. A checkpoint that falls due while the last one is still being written
    is skipped. Its name is the number of pushes that it holds. A run is saved once more
    at its end, also if ``SIGTERM`` or an exception ends it; but not after Ctrl-C, nor
    after a failed step of the server. Until a checkpoint is written, it takes the
    memory of a second model and optimizer state. Without that memory it is skipped, and
    an error is logged.

    The directory belongs to one run at a time: a second run gets an error that names
    the first. Each checkpoint holds checksums of its files. If files of the newest
    checkpoint have changed or are missing, the run goes on from the newest complete
    one, with a warning, and renames the broken one, for example to ``40.broken``. Any
    other error while a checkpoint is read is raised, and renames nothing.

    Orbax names each array by its keys with dots between them. Two arrays with one name,
    as in ``{"a.b": x, "a": {"b": y}}``, are an error at the beginning. So is an array
    that orbax cannot save, because it has no entries or a dtype such as ``uint4``.

    Attributes:
      directory: the path of the checkpoints' folder. On Ray, the server's machine and
        any machine that takes its place must both have it.
      every_steps: saves whenever the global step is a multiple of it; None for never.
      every_seconds: saves after a step if this many seconds have passed since the last
        checkpoint was begun; None for never.
      max_to_keep: how many of the newest are kept; None for all. An older one that
        cannot be deleted, or that is a link, stays, and a warning names it.
      resume: whether to go on from the newest checkpoint, if there is one. If False, an
        existing checkpoint is an error: nothing is ever overwritten.
      settings: what the run depends on besides its job, by name, such as
        ``{"seed": 0}``: any JSON value of at most 100,000 entries. They are saved, too,
        and a run that goes on with other settings says so.
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
        arguments.check_flags(resume=self.resume)
        for name in ("every_steps", "max_to_keep"):
            if getattr(self, name) is not None:
                arguments.in_range(name, getattr(self, name), "[1, inf)", integer=True)
        if self.every_seconds is not None:
            arguments.in_range("every_seconds", self.every_seconds, "[0, inf]")
        nested.check_small("settings", self.settings)
        try:  # The form in which a checkpoint gives them back.
            settings = json.loads(json.dumps(dict(self.settings)))
        except (TypeError, ValueError) as error:
            shown = repr(self.settings)
            shown = shown if len(shown) <= 1000 else f"{shown[:1000]} ..."
            raise TypeError(
                f"settings must be JSON values, got {shown}: {error}."
            ) from error
        directory = path_of("checkpoint", self.directory)
        return self._replace(directory=directory, settings=settings)
