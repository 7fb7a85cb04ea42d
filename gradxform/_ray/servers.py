"""The server as other processes see it: the driver, which runs the job, and workers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import optax

from gradxform._checks import arguments
from gradxform._ray.actors import Check, Processes, message
from gradxform._ray.connect import Connection
from gradxform._ray.layout import ServerLayout
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.records import Ahead, PushResult, ServerStatus
from gradxform.engines._work import ServerDiedError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger("gradxform")

AGAIN = 0.1  # Seconds between two questions to an actor that does not answer yet.


@dataclasses.dataclass(eq=False)
class RayServer:
    """The server for the driver; each call waits for its answer.

    ``actor`` is the actor that answers for it. If it has died, the next call replaces
    it. ``deaths`` says how often that has happened.

    Args:
      processes: those of the server.
      checkpoint: where it is saved.
      max_deaths: how often it may die.
      connection: to Ray's cluster.
      check: is called while it starts, and may end that by raising.
    """

    processes: Processes
    checkpoint: Checkpoint | None
    max_deaths: int
    connection: Connection
    check: Check
    deaths: int = 0
    actor: Any = None  # An ActorHandle, once it has begun.

    def __post_init__(self) -> None:
        self._ray = require("ray", "ray")
        self._run: str | None = None  # Identifies the run in its directory.
        self._refused: Exception | None = None  # Why no other server can begin.
        self._lock = threading.Lock()  # Only one of two threads replaces a dead actor.

    def begin(self) -> ServerStatus:
        """Starts it if necessary; returns where its incarnation began."""
        self._start(None, None, self.check)
        return self._ask("begin", check=self.check)

    def _ask(
        self, name: str, *args: object, check: Check | None = None, **options: object
    ) -> Any:  # What the actor's method returns.
        arguments.check_not_tracing(name)
        check = check or self.connection.check
        exceptions = self._ray.exceptions
        while True:
            self.connection.check()
            actor = self.actor
            try:
                asked = getattr(actor, name).remote(*args, **options)
                return self.processes.answers([asked], check)[0]
            except exceptions.RayError as error:
                if not tells_of_a_death(error):
                    raise
                gone = isinstance(error, exceptions.RayActorError)
                if gone and not isinstance(error, exceptions.ActorUnavailableError):
                    self._start(actor, error, check)
                else:
                    time.sleep(AGAIN)  # It may still be alive.

    def _start(
        self, dead: ActorHandle[Any] | None, error: Exception | None, check: Check
    ) -> None:
        """Starts it, or another one if it has died; once for all threads."""
        checkpoint = self.checkpoint
        with self._lock:
            while self.actor is dead:
                if self._refused is not None:
                    raise self._refused
                if error is not None:
                    checkpoint = self._count(error)
                try:
                    actor = self.processes.start(checkpoint, check)
                    # It must begin before anybody else can call it.
                    begins: ObjectRef[ServerStatus] = actor.begin.remote(self._run)
                    self._run = self.processes.answers([begins], check)[0].run
                except self._ray.exceptions.RayActorError as again:
                    error = again
                except self._ray.exceptions.RayTaskError as refusal:
                    self._refused = refusal
                    raise
                else:
                    self.actor = actor

    def _count(self, error: Exception) -> Checkpoint:
        """Counts a death; returns the checkpoint to go on from, or raises the error."""
        if (cause := self.processes.cause()) is not None:
            error.add_note(f"The server has ended: {cause}.")
        if self.checkpoint is None:
            error.add_note("The run was not saved: give it a checkpoint.")
            raise error
        if self.deaths == self.max_deaths:
            error.add_note("The server has died more than max_deaths times.")
            raise error
        self.deaths += 1
        if cause is not None:
            logger.warning("the server has ended: %s", cause)
        # Even with `resume=False` it must go on from this run's own ones.
        return self.checkpoint._replace(resume=True)

    # The methods of a `RecoverableServer`, by their own arguments.
    pull = functools.partialmethod(_ask, "pull")
    state = functools.partialmethod(_ask, "state")
    stats = functools.partialmethod(_ask, "stats")
    status = functools.partialmethod(_ask, "status")
    rest = functools.partialmethod(_ask, "rest")
    save = functools.partialmethod(_ask, "save")
    restore = functools.partialmethod(_ask, "restore")

    def push(self, grads: optax.Updates, local_step: int, **extra: Any) -> PushResult:
        """See :meth:`ParameterServer.push`; raises if the server dies meanwhile."""
        arguments.check_not_tracing("push")
        grads, extra = message(self.processes.layout, grads, extra)
        return self._ray.get(self.actor.push.remote(grads, local_step, **extra))

    def note(self, ahead: Ahead) -> None:
        """See :meth:`RecoverableServer.note`; does not wait for it."""
        self.actor.note.remote(ahead)

    def kill(self) -> None:
        """Ends its processes, unless they have ended with the cluster."""
        if not self.connection.lost:
            self.processes.kill()


class WorkersServer:
    """The server for a worker: one actor, which is never replaced."""

    def __init__(self, actor: ActorHandle[Any], layout: ServerLayout | None) -> None:
        self._actor, self._layout = actor, layout
        self._ray = require("ray", "ray")

    def _ask(self, name: str, *args: object, **options: object) -> Any:  # As above.
        try:
            return self._ray.get(getattr(self._actor, name).remote(*args, **options))
        except self._ray.exceptions.RayError as error:
            if tells_of_a_death(error):
                raise ServerDiedError from error
            raise

    pull = functools.partialmethod(_ask, "pull")
    global_step = functools.partialmethod(_ask, "global_step")

    def push(self, grads: optax.Updates, local_step: int, **extra: Any) -> PushResult:
        """See :meth:`ParameterServer.push`."""
        grads, extra = message(self._layout, grads, extra)
        return self._ask("push", grads, local_step, **extra)


def tells_of_a_death(error: Exception) -> bool:
    """Whether the server may have died, before its answer or on the answer's way.

    Then the answer itself, or parameters that it refers to, can be lost.
    """
    exceptions = require("ray", "ray").exceptions
    if isinstance(error, exceptions.RayTaskError):  # Raised by a server that lives.
        return isinstance(error, exceptions.RayActorError)  # Of another process of it.
    # Ray wraps the error of an answer that fetches more when it arrives.
    error = getattr(error, "client_exc", error)
    return isinstance(error, exceptions.ObjectLostError | exceptions.RayActorError)
