"""The server as other processes see it: the driver, which runs the job, and workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import optax

from gradxform._group.actors import LOOK
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.records import PushResult, ServerStats, ServerStatus
from gradxform._server.recoverable import RecoverableServer
from gradxform._trees.types import T
from gradxform.engines._connect import Connection
from gradxform.engines._work import ServerDiedError

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger("gradxform")

AGAIN = 0.1  # Seconds between two questions to an actor that does not answer yet.


# What a worker sends: gradients and extra arguments, as the actor takes them.
Message: TypeAlias = Callable[
    [optax.Updates, dict[str, Any]], tuple[object, dict[str, Any]]
]


class Processes(Protocol):
    """The processes that make up the server."""

    @property
    def message(self) -> Message:
        """Makes the message of a push."""
        ...

    def cause(self) -> str | None:
        """Why they have died, if they have said so."""
        ...

    def start(
        self, checkpoint: Checkpoint | None, check: Callable[[], object]
    ) -> ActorHandle[Any]:
        """Starts them; returns the actor that answers for them."""
        ...

    def kill(self) -> None:
        """Ends them."""
        ...


def unchanged(
    grads: optax.Updates, extra: dict[str, Any]
) -> tuple[object, dict[str, Any]]:
    """The message to a server of one process."""
    return grads, extra


class One:
    """A server in one process; see :class:`Processes`."""

    message = staticmethod(unchanged)

    def __init__(
        self,
        params: optax.Params,
        tx: optax.GradientTransformation,
        server_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._ray = ray = require("ray", "ray")
        self._start = ray.remote(RecoverableServer).options(**options).remote
        self._begun_with = ray.put(params), ray.put(tx)
        self._options = server_options
        self._actor: ActorHandle[RecoverableServer] | None = None

    def cause(self) -> None:
        """See :class:`Processes`."""

    def start(
        self, checkpoint: Checkpoint | None, check: Callable[[], object]
    ) -> ActorHandle[Any]:
        """See :class:`Processes`."""
        self._actor = self._start(*self._begun_with, checkpoint, **self._options)
        return self._actor

    def kill(self) -> None:
        """See :class:`Processes`."""
        if self._actor is not None:
            self._ray.kill(self._actor)


class RayServer:
    """The server for the driver; each call waits for its answer.

    ``actor`` is the actor that answers for it. If it has died, the next call replaces
    it. ``deaths`` says how often that has happened.
    """

    def __init__(
        self,
        processes: Processes,
        checkpoint: Checkpoint | None,
        max_deaths: int,
        connection: Connection,
    ) -> None:
        self._ray = require("ray", "ray")
        self._processes = processes
        self.message = processes.message
        self._checkpoint = checkpoint
        self._max_deaths, self._connection = max_deaths, connection
        self.deaths = 0
        self._lock = threading.Lock()  # Only one of two threads replaces a dead actor.
        self.actor: Any = None  # An ActorHandle, once it has begun.

    def begin(self, check: Callable[[], object]) -> ServerStatus:
        """Starts it if necessary; returns where its incarnation began.

        ``check`` is called while it waits, and may end the wait by raising.
        """
        if self.actor is None:
            try:
                self.actor = self._processes.start(self._checkpoint, check)
            except self._ray.exceptions.RayActorError as error:
                self._replace(None, error, check)
        return self._ask("begin", check=check)

    def _ask(
        self,
        name: str,
        *args: object,
        check: Callable[[], object] = lambda: None,
        **options: object,
    ) -> Any:  # What the actor's method returns.
        exceptions = self._ray.exceptions
        while True:
            self._connection.check()
            actor = self.actor
            try:
                return self._answer(
                    getattr(actor, name).remote(*args, **options), check
                )
            except (exceptions.ActorUnavailableError, exceptions.ObjectLostError):
                time.sleep(AGAIN)  # It may still be alive.
            except exceptions.RaySystemError as error:
                if not of_a_lost_object(error):
                    raise
                time.sleep(AGAIN)
            except exceptions.RayActorError as error:
                self._replace(actor, error, check)

    def _answer(self, asked: ObjectRef[T], check: Callable[[], object]) -> T:
        while not self._ray.wait([asked], timeout=LOOK)[0]:
            self._connection.check()
            check()
        return self._ray.get(asked)

    def _replace(
        self,
        dead: ActorHandle[Any] | None,
        error: Exception,
        check: Callable[[], object],
    ) -> None:
        """Starts another from the last checkpoint, once for all threads."""
        with self._lock:
            while self.actor is dead:
                if (cause := self._processes.cause()) is not None:
                    error.add_note(f"The server has ended: {cause}.")
                if self._checkpoint is None:
                    error.add_note("The run was not saved: give it a checkpoint.")
                    raise error
                if self.deaths == self._max_deaths:
                    error.add_note("The server has died more than max_deaths times.")
                    raise error
                self.deaths += 1
                if cause is not None:
                    logger.warning("the server has ended: %s", cause)
                # Even with `resume=False` it must go on from this run's own ones.
                known = self._checkpoint._replace(resume=True)
                try:
                    actor = self._processes.start(known, check)
                    # It must begin before anybody else can call it.
                    self._answer(actor.begin.remote(), check)
                except self._ray.exceptions.RayActorError as again:
                    error = again
                else:
                    self.actor = actor

    def pull(self, *request: Any, **options: Any) -> tuple[optax.Params, int]:
        """See :meth:`ParameterServer.pull`."""
        return self._ask("pull", *request, **options)

    def push(
        self, grads: optax.Updates, local_step: int, **extra: object
    ) -> PushResult:
        """See :meth:`ParameterServer.push`; raises if the server dies meanwhile."""
        grads, extra = self.message(grads, extra)
        pushed = self.actor.push.remote(grads, local_step, **extra)
        return self._ray.get(pushed)

    def state(self) -> dict[str, Any]:
        """See :meth:`ParameterServer.state`."""
        return self._ask("state")

    def stats(self) -> ServerStats:
        """See :meth:`ParameterServer.stats`."""
        return self._ask("stats")

    def status(self) -> ServerStatus:
        """See :meth:`RecoverableServer.status`."""
        return self._ask("status")

    def note(self, ahead: dict[int, int | None]) -> None:
        """See :meth:`RecoverableServer.note`; does not wait for it."""
        self.actor.note.remote(ahead)

    def rest(self) -> ServerStatus:
        """See :meth:`RecoverableServer.rest`."""
        return self._ask("rest")

    def save(self) -> int | None:
        """See :meth:`RecoverableServer.save`."""
        return self._ask("save")

    def kill(self) -> None:
        """Ends its processes, unless they have ended with the cluster."""
        if not self._connection.lost:
            self._processes.kill()


class WorkersServer:
    """The server for a worker: one actor, which is never replaced."""

    def __init__(self, actor: ActorHandle[Any], message: Message) -> None:
        self._actor, self._message = actor, message
        self._ray = require("ray", "ray")

    def _ask(self, name: str, *args: object, **extra: object) -> Any:  # See received.
        exceptions = self._ray.exceptions
        try:
            asked = getattr(self._actor, name).remote(*args, **extra)
            return self._ray.get(asked)
        except exceptions.RayTaskError as error:
            if isinstance(error, exceptions.RayActorError):  # Of one of its processes.
                raise ServerDiedError from error
            raise  # The server has raised it, so it is alive.
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            raise ServerDiedError from error
        except exceptions.RaySystemError as error:
            if of_a_lost_object(error):
                raise ServerDiedError from error
            raise

    def pull(self, *request: Any, **options: Any) -> tuple[optax.Params, int]:
        return self._ask("pull", *request, **options)

    def push(
        self, grads: optax.Updates, local_step: int, **extra: object
    ) -> PushResult:
        grads, extra = self._message(grads, extra)
        return self._ask("push", grads, local_step, **extra)

    def global_step(self) -> int:
        return self._ask("global_step")


def of_a_lost_object(error: Exception) -> bool:
    """Whether parameters were lost between an answer and its arrival.

    Ray wraps the error of an answer that fetches more when it arrives.
    """
    cause = getattr(error, "client_exc", None)
    exceptions = require("ray", "ray").exceptions
    return isinstance(cause, exceptions.ObjectLostError | exceptions.RayActorError)
