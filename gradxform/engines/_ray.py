"""The server and each worker as a Ray actor, a process of its own."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.records import PushResult, ServerStats
from gradxform._server.recoverable import RecoverableServer, Standing, tell
from gradxform._trees import checks
from gradxform.engines._crew import LOOK, Crew, server_options
from gradxform.engines._ending import ending, starting, terminated, uninterrupted
from gradxform.engines._job import Job, Push, Run, Worker
from gradxform.engines._reach import reach
from gradxform.engines._stops import GivenUpError, Stops
from gradxform.engines._streams import check_none
from gradxform.engines._work import RefusedError, StreamEndedError, work

logger = logging.getLogger("gradxform")

AGAIN = 0.1  # Seconds until an actor that is being started again is asked again.


@contextlib.contextmanager
def ray(
    job: Job,
    *,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    address: str | None = None,
    connect_timeout: float = 30.0,
    max_deaths: int = 3,
    worker_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
) -> Iterator[Run]:
    """Runs the server and each worker as a Ray actor, a process of its own.

    On the cluster that ``ray.init`` has connected to, or that of ``address``; without
    either, on a local cluster that lasts as long as the context.

    A worker whose process dies is replaced by one with the same index, which computes
    again what that was at. A server whose process dies is started again from its last
    checkpoint, the workers pull anew, and the run goes on; what it had answered since
    is counted as lost and pushed again. What a worker raises is raised where the pushes
    are iterated, as its class and as ``ray.exceptions.RayTaskError``.

    Args:
      job: what to run; its workers are pickled.
      checkpoint: where it is saved, and goes on from: a directory, or a
        :class:`Checkpoint`. Without it, the run dies with its server.
      address: of a cluster to connect to, as ``ray.init`` takes it.
      connect_timeout: how many seconds it may take until that answers, in (0, inf].
      max_deaths: how often each worker, and the server, may die.
      worker_options: Ray's options for the workers' actors, as ``{"num_gpus": 1}``.
      server_options: those for the server's.

    Raises:
      ConnectionError: no cluster has answered at ``address``.
      ImportError: Ray is not installed.
      ray.exceptions.RayActorError: a worker, or the server, has died too often.
      ValueError: too few workers for a step; a checkpoint of another job; a worker with
        a device, or with a stream.
      SystemExit: as the context ends, where ``SIGTERM`` has ended the run.
    """
    ray = require("ray", "ray")
    given = Checkpoint.of(checkpoint)
    checks.integer_scalar("max_deaths", max_deaths)
    checks.in_range("max_deaths", max_deaths, "[0, inf)")
    checks.in_range("connect_timeout", connect_timeout, "(0, inf]")
    run = _Ray(ray, job, max_deaths, dict(worker_options or {}))
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            if address:
                with starting(given):
                    reach(address, connect_timeout)
            try:
                stack.enter_context(_cluster(len(job.workers) + 1, address))
            except SystemExit:  # Ray's own answer to ``SIGTERM``, while it starts.
                terminated(None, given)
        # For all workers at once, and for whoever asks beside them.
        options = {"max_concurrency": len(job.workers) + 8, **(server_options or {})}
        start = ray.remote(RecoverableServer).options(**options).remote
        # So early, as until then ``SIGTERM`` meets a handler of Ray's that aborts.
        with ending(run, given):
            server = RayServer(start, job, given, max_deaths)
            stack.callback(server.kill)
            stack.callback(run.close)
            run.begin(server)
            yield run


@contextlib.contextmanager
def _cluster(num_cpus: int, address: str | None) -> Iterator[None]:
    """A connection to a cluster, or a local one with a CPU for each actor."""
    ray = require("ray", "ray")
    before = signal.getsignal(signal.SIGTERM)
    try:
        _connect(num_cpus, address)
        yield
    finally:
        uninterrupted(ray.shutdown)()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has one of its own.


@uninterrupted  # Processes of half a cluster would live on.
def _connect(num_cpus: int, address: str | None) -> None:
    ray = require("ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # It would report home.
    # Without an address Ray would look for a cluster that somebody else has started.
    own = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    with warnings.catch_warnings():
        # Ray forks to start its processes. JAX warns about that; they exec at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\)", RuntimeWarning)
        ray.init(
            **({"address": address} if address else own),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


class RayServer:
    """The server as the process sees it that runs the job; each call waits.

    ``actor`` is the actor itself, until it dies: another one takes its place as soon
    as somebody asks.
    """

    def __init__(
        self,
        start: Callable[..., Any],
        job: Job,
        checkpoint: Checkpoint | None,
        max_deaths: int,
    ) -> None:
        self._ray = ray = require("ray", "ray")
        self._start = start
        self._begun_with = ray.put(job.params), ray.put(job.tx)
        self._options = server_options(job)
        self._checkpoint = checkpoint
        self._deaths_left = max_deaths if checkpoint else 0
        self._lock = threading.Lock()  # That of two who find it dead one replaces it.
        self.actor = start(*self._begun_with, checkpoint, **self._options)

    def begin(self, check: Callable[[], None]) -> Standing:
        """Where its life began: at first, and after it has died.

        ``check`` may raise what ends the wait for it.
        """
        standing: Standing = self._ask("begin", check=check)
        return standing

    def _ask(
        self, name: str, *args: Any, check: Callable[[], object] = lambda: None
    ) -> Any:
        while True:
            actor = self.actor
            try:
                return self._answer(getattr(actor, name).remote(*args), check)
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(AGAIN)  # It may yet turn out to be alive.
            except self._ray.exceptions.RayActorError as error:
                self._replace(actor, error, check)

    def _answer(self, asked: Any, check: Callable[[], object]) -> Any:
        while not self._ray.wait([asked], timeout=LOOK)[0]:
            check()
        return self._ray.get(asked)

    def _replace(
        self, dead: Any, error: Exception, check: Callable[[], object]
    ) -> None:
        """Starts another from the last checkpoint, once for all who find it dead."""
        with self._lock:
            if self.actor is not dead:
                return
            if self._checkpoint is None:
                error.add_note("The run was not saved: see checkpoint.")
                raise error
            if self._deaths_left == 0:
                error.add_note("The server has died more than max_deaths times.")
                raise error
            self._deaths_left -= 1
            # What this run itself has saved is there, too.
            known = self._checkpoint._replace(resume=True)
            actor = self._start(*self._begun_with, known, **self._options)
            with contextlib.suppress(self._ray.exceptions.RayActorError):
                # Before anybody else asks it.
                self._answer(actor.begin.remote(), check)
            self.actor = actor

    def pull(
        self, rows: Mapping[str, jax.typing.ArrayLike] | None = None
    ) -> tuple[optax.Params, int]:
        """See :meth:`ParameterServer.pull`."""
        pulled: tuple[optax.Params, int] = self._ask("pull", rows)
        return pulled

    def push(self, grads: optax.Updates, local_step: int, **extra: Any) -> PushResult:
        """See :meth:`ParameterServer.push`; one that meets a death raises."""
        pushed = self.actor.push.remote(grads, local_step, **extra)
        result: PushResult = self._ray.get(pushed)
        return result

    def state(self) -> dict[str, Any]:
        """See :meth:`ParameterServer.state`."""
        state: dict[str, Any] = self._ask("state")
        return state

    def stats(self) -> ServerStats:
        """See :meth:`ParameterServer.stats`."""
        stats: ServerStats = self._ask("stats")
        return stats

    def rest(self) -> Standing:
        """See :meth:`RecoverableServer.rest`."""
        standing: Standing = self._ask("rest")
        return standing

    def save(self) -> int | None:
        """See :meth:`RecoverableServer.save`."""
        step: int | None = self._ask("save")
        return step

    def kill(self) -> None:
        """Ends its process."""
        self._ray.kill(self.actor)


class _ServerDiedError(Exception):
    """What a worker meets that pulls or pushes; who runs the job sees to it."""


class _WorkersServer:
    """The server as a worker sees it: one actor, in its only life."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._ray = actor, require("ray", "ray")

    def _ask(self, name: str, *args: Any, **extra: Any) -> Any:
        try:
            return self._ray.get(getattr(self._actor, name).remote(*args, **extra))
        except self._ray.exceptions.RayTaskError:
            raise  # What the server itself has raised.
        except self._ray.exceptions.RayActorError as error:
            raise _ServerDiedError from error

    def pull(self, *args: Any) -> Any:
        return self._ask("pull", *args)

    def push(self, *args: Any, **extra: Any) -> Any:
        return self._ask("push", *args, **extra)

    def global_step(self) -> Any:
        return self._ask("global_step")


class _RayWorker:
    """A worker in a process of its own."""

    def __init__(self, index: int, worker: Worker, stops: Stops) -> None:
        self._index, self._worker, self._stops = index, worker, stops

    def work(self, number: int, actor: Any) -> Push | Exception:
        """One gradient, from its minibatch to the answer, or why there is none."""
        server = _WorkersServer(actor)
        reasons = _ServerDiedError, StreamEndedError, RefusedError, GivenUpError

        def is_over(local_step: int) -> bool:
            # Who never gives up need not ask.
            stops = self._stops
            return stops.ends and stops.is_over(server.global_step(), local_step)

        try:
            return work(self._index, number, self._worker, server, time.sleep, is_over)
        except reasons as reason:
            return type(reason)(*reason.args)  # Without what led to it.


class _Ray(Crew):
    """See :class:`Run`; ``workers`` are the actors, and ``server.actor`` is one."""

    server: RayServer
    workers: dict[int, Any]

    def __init__(
        self, ray: Any, job: Job, max_deaths: int, options: dict[str, Any]
    ) -> None:
        super().__init__(job)
        for index, worker in self._members.items():
            _check(index, worker)
        self._ray, self._max_deaths = ray, max_deaths
        start = ray.remote(_RayWorker)
        self._start_actor = start.options(**options).remote if options else start.remote
        self._deaths: collections.Counter[int] = collections.Counter()
        self.workers = {}

    def _member(self, worker: Worker) -> Worker:
        return worker  # Here a minibatch is a function of its number.

    def begin(self, server: RayServer) -> None:
        """With this server, as it stands."""
        self.server = server
        standing = server.begin(self.check)
        tell(standing)  # Its process cannot.
        self._begin(standing)

    def _next(self) -> Iterator[Push]:
        ray, of = self._ray, {push: index for index, push in self._busy.items()}
        ready, _ = ray.wait([*of], num_returns=1, timeout=LOOK)
        for done in ready:
            index = of[done]
            outcome: Any
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                outcome = error  # From the worker's code: the process is well.
            except ray.exceptions.RayActorError as error:
                self._bury(index, error)
                continue
            if isinstance(outcome, _ServerDiedError):
                del self._busy[index]
                self._go_back()
                continue
            for push in self._take(index, outcome):
                self._hand_out()  # Before the consumer takes its time.
                yield push

    def _start(self, index: int, worker: Worker, number: int) -> Any:
        if index not in self.workers:
            self.workers[index] = self._start_actor(index, worker, self._stops)
        return self.workers[index].work.remote(number, self.server.actor)

    def _dismiss(self, index: int) -> None:
        self._ray.kill(self.workers.pop(index))

    def _bury(self, index: int, error: Exception) -> None:
        """Another takes the place of a worker that has died."""
        with contextlib.suppress(Exception):  # Where only the way to it is gone.
            self._ray.kill(self.workers[index])
        del self.workers[index], self._busy[index]
        self._ledger.worker_deaths += 1
        self._deaths[index] += 1
        if self._deaths[index] > self._max_deaths:
            error.add_note(
                f"Worker {index} has died more than max_deaths={self._max_deaths} "
                "times."
            )
            raise error
        logger.warning("worker %s died and is replaced", index)

    def _go_back(self) -> None:
        """To where the server's life begins, if it is another one."""
        standing = self.server.begin(self.check)
        lost = self._ledger.go_back(standing)
        if lost is None:  # Another worker has noticed before.
            return
        self._waits.reset()
        self._refused.clear()
        tell(standing)  # Its process cannot.
        logger.warning(
            "the server died and goes on from step %s; pushes to be done again: %s",
            standing.global_step,
            lost,
        )

    def add(self, worker: Worker) -> int:
        _check("to come", worker)
        return super().add(worker)

    def rest(self) -> None:
        """See :meth:`Crew.rest`; a server that has died goes back before."""
        if not self._begun:
            return
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # For good.
            while (standing := self.server.rest()).life != self._ledger.life:
                self._go_back()
            self._ledger.settle(standing)

    def close(self) -> None:
        """Ends all workers."""
        super().close()
        for each in self.workers.values():
            self._ray.kill(each)


def _check(index: object, worker: Worker) -> None:
    check_none(index, worker)
    if worker.device is not None:
        raise ValueError(
            f"workers: on Ray worker {index} is a process of its own and cannot have "
            f"the device {worker.device} of this one: give worker_options."
        )
