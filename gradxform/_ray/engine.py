"""The server and each worker as a Ray actor, a process of its own."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gradxform._checks import arguments
from gradxform._ray.actors import Processes, layout_of, options_of
from gradxform._ray.connect import Connection, connect
from gradxform._ray.layout import ServerLayout, Shardings
from gradxform._ray.servers import RayServer, WorkersServer
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.extras import require
from gradxform._server.records import ServerStatus, is_past, summary
from gradxform.engines import _ending, _work
from gradxform.engines._job import Counts, Job, Push, Run, Worker
from gradxform.engines._pool import LOOK, WorkerPool
from gradxform.engines._work import MaxStaleness

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


logger = logging.getLogger("gradxform")


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
    server_processes: int = 1,
    server_shardings: Shardings | None = None,
) -> Iterator[Run]:
    """Runs the server and each worker as a Ray actor, a process of its own.

    They run on the cluster that ``ray.init`` has connected to, or on the one at
    ``address``. Without either, they run on a local cluster that lasts as long as the
    context.

    If a worker's process dies, a new one with the same index replaces it and computes
    its gradient again. If the server's process dies, it is started again from its last
    checkpoint, the workers pull anew, and the run goes on. Pushes that it had answered
    since that checkpoint are counted as lost and pushed again. The iteration over the
    pushes raises a worker's error, as its class and as ``ray.exceptions.RayTaskError``.

    Args:
      job: what to run; its workers are pickled.
      checkpoint: where the run is saved, and from where it goes on: a directory, or a
        :class:`Checkpoint`. Without one, the run dies with its server.
      address: the address of a cluster to connect to, as ``ray.init`` takes it.
      connect_timeout: how many seconds the cluster may take to answer, in (0, inf].
      max_deaths: how often each worker, and the server, may die.
      worker_options: Ray's options for the workers' actors, as ``{"num_gpus": 1}``.
      server_options: Ray's options for the server's actor, or for each of its actors.
        ``max_restarts`` and ``max_task_retries`` are always 0, for workers, too: see
        ``max_deaths``. Some options are an error, as a run would not work with them.
        With several processes, a ``PlacementGroupSchedulingStrategy`` of Ray says
        where each lies, as on a machine of its own.
      server_processes: how many processes make up the server. Each has a part of the
        parameters and of the state. This is for models that do not fit into the memory
        of one machine. The processes run the same steps in the same order, so the
        numbers are those of one process. If one dies, all are started again from the
        last checkpoint.
      server_shardings: which leaves of the parameters are cut, and along which axis: a
        tree like the parameters, or a prefix of one, of ``PartitionSpec`` over the axis
        ``"server"``; or a function ``(path, shape) -> PartitionSpec``, with paths such
        as ``"encoder/emb"``. By default, and where it says None, leaves of more than a
        megabyte are cut along their first axis, and each process has all other leaves
        whole. The number of processes must divide the length of an axis that is cut.

    Raises:
      ConnectionError: no cluster has answered at ``address``.
      ImportError: Ray is not installed.
      ray.exceptions.RayActorError: a worker, or the server, has died too often.
      RuntimeError: ``ray.shutdown()`` was called during the run.
      ValueError: too few workers for a step; a checkpoint of another job; a worker with
        a device; no process for the server; impossible shardings.
      SystemExit: at the end of the context, if ``SIGTERM`` has ended the run.
    """
    ray = require("ray", "ray")
    given = Checkpoint.of(checkpoint)
    arguments.in_range("max_deaths", max_deaths, "[0, inf)", integer=True)
    arguments.in_range("connect_timeout", connect_timeout, "(0, inf]")
    layout = layout_of(job.params, server_processes, server_shardings)
    # For all workers at once, and some for other callers.
    options = {"max_concurrency": len(job.workers) + 8}
    options |= options_of("server_options", server_options)
    # Several workers cannot have one name.
    of_worker = options_of("worker_options", worker_options, "name")
    run = _Ray(ray, job, max_deaths, of_worker)
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            ends = _ending.ends_runs(signal.SIGTERM)
            try:
                if address:
                    with _ending.handled(signal.SIGTERM, lambda *_: sys.exit(), ends):
                        connect(address, connect_timeout)
                cpus = len(job.workers) + server_processes
                stack.enter_context(_cluster(ray, cpus, address))
            except SystemExit:  # Also Ray's own answer to ``SIGTERM``, while it starts.
                _ending.terminated(None, given)
        # As early as possible: Ray's handler ends the process without saving the run.
        own = signal.SIG_DFL if before is None or _is_rays(before) else before
        rays = _is_rays(signal.getsignal(signal.SIGTERM))
        with _ending.handled(signal.SIGTERM, own, rays), _ending.ending(run, given):
            processes = Processes(layout, job, options)
            how = given, max_deaths, Connection(ray), run.check
            server = RayServer(processes, *how)
            stack.callback(server.kill)
            stack.callback(run.close)
            run.begin(server)
            yield run


@contextlib.contextmanager
def _cluster(ray: ModuleType, num_cpus: int, address: str | None) -> Iterator[None]:
    """A connection to a cluster, or a local one with a CPU for each actor."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Sends no usage reports.
    # With "local" Ray does not look for a cluster that somebody else has started.
    own = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False}
    options = {"address": address} if address else own
    before = signal.getsignal(signal.SIGTERM)
    connection = None
    try:
        with warnings.catch_warnings():
            # Ray forks to start its processes, and JAX warns about that. The forks are
            # harmless, as they call exec at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\)", RuntimeWarning)
            # An interrupt would leave processes of half a cluster behind.
            with _ending.uninterrupted():
                ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        connection = Connection(ray)
        yield
    finally:
        if connection is None or not connection.lost:
            with _ending.uninterrupted():
                ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            # Ray has set a handler of its own.
            _ending.give_back(signal.SIGTERM, before)


def _is_rays(handler: object) -> bool:
    """Whether Ray has set the handler of a signal."""
    return getattr(handler, "__module__", "").startswith("ray.")


class _RayWorker:
    """A worker in a process of its own."""

    def __init__(
        self,
        index: int,
        worker: Worker,
        layout: ServerLayout | None,
        late: MaxStaleness,
    ) -> None:
        self._index, self._worker, self._layout = index, worker, layout
        self._limit = _work.limit_of(late)

    def work(
        self, number: int, actor: ActorHandle[Any], incarnation: str
    ) -> Push | Exception:
        """One gradient, from its minibatch to the answer, or the reason for none.

        Args:
          number: its number.
          actor: the server.
          incarnation: of the server, for which it is the next number.
        """
        server, worker = WorkersServer(actor, self._layout), self._worker
        try:
            gradient = _work.WorkerGradient(
                self._index, number, worker, server, self._limit
            )
            if is_past(gradient.local_step, incarnation):
                raise _work.ServerDiedError  # Another caller has replaced it.
            return gradient.work(time.sleep)
        except _work.UnansweredError as reason:
            return type(reason)(*reason.args)  # Without its cause and traceback.
        except Exception as error:
            try:
                sys.modules["ray"].cloudpickle.dumps(error)
            except Exception:  # For some of these Ray would end the process.
                why = f"{summary(error)} (this exception cannot be pickled)"
                raise RuntimeError(why) from error
            raise


class _Ray(WorkerPool):
    """See :class:`Run`; ``workers`` are the actors, and ``server.actor`` is one."""

    server: RayServer
    workers: dict[int, ActorHandle[_RayWorker]]

    def __init__(
        self, ray: ModuleType, job: Job, max_deaths: int, options: dict[str, Any]
    ) -> None:
        super().__init__(job)
        self._ray, self._max_deaths = ray, max_deaths
        self._start_actor = ray.remote(_RayWorker).options(**options).remote
        self._deaths: collections.Counter[int] = collections.Counter()
        self._gone = False  # The loop knows that the server has died too often.
        self.workers = {}

    def _joining(self, index: int, worker: Worker) -> Worker:
        joined = super()._joining(index, worker)
        if worker.device is not None:
            raise ValueError(
                f"workers: on Ray worker {index} is a process of its own and cannot "
                f"have the device {worker.device} of this one: give worker_options."
            )
        # A minibatch is always a function of its number here, so none is kept.
        return joined._replace(batch=worker.batch)

    def check(self) -> None:
        self.server.connection.check()
        super().check()

    def _next(self) -> Iterator[Push]:
        ray, of = self._ray, {push: index for index, push in self._busy.items()}
        ready, _ = ray.wait([*of], num_returns=1, timeout=LOOK)
        for done in ready:
            index = of[done]
            outcome: Push | Exception
            try:
                outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                raised = isinstance(error, ray.exceptions.RayTaskError)
                if isinstance(error, ray.exceptions.RayActorError) and not raised:
                    self._replace_worker(index, error)
                    continue
                outcome = error  # The worker's code has raised; its process lives.
            if push := self._take(index, outcome):
                self._hand_out()  # Before the consumer works on this push.
                yield push

    def _start(
        self, index: int, worker: Worker, number: int
    ) -> ObjectRef[Push | Exception]:
        if index not in self.workers:
            try:
                self.workers[index] = self._start_actor(
                    index, worker, self.server.processes.layout, self._job.max_staleness
                )
            except TypeError as error:  # It cannot be pickled.
                error.add_note(
                    f"Worker {index} is sent to a process of its own. A stream cannot "
                    "go there: let batch make it when it is first called."
                )
                raise
        return self.workers[index].work.remote(
            number, self.server.actor, self._ledger.incarnation
        )

    def _dismiss(self, index: int) -> None:
        self._ray.kill(self.workers.pop(index))

    def _replace_worker(self, index: int, error: Exception) -> None:
        """Replaces a worker that has died."""
        with contextlib.suppress(Exception):  # If only the connection is lost.
            self._dismiss(index)
        self._take(index, _work.ServerDiedError())
        self._ledger.worker_deaths += 1
        self._deaths[index] += 1
        if self._deaths[index] > self._max_deaths:
            error.add_note(
                f"Worker {index} has died more than max_deaths={self._max_deaths} "
                "times."
            )
            raise error
        logger.warning("worker %s died and is replaced", index)

    def _is_done(self) -> bool:
        if not super()._is_done():
            return False
        self._hear()
        if super()._is_done():
            # The end of the context tries again, and raises.
            with contextlib.suppress(self._ray.exceptions.RayTaskError):
                self.save()
            self._hear()
        return super()._is_done()

    def _hear(self) -> None:
        try:
            self.server.begin()  # Starts another one if it has died.
            self._ledger.hear(self._standing(self.server.status))
        except self._ray.exceptions.RayActorError:
            self._gone = True
            raise

    def _standing(self, ask: Callable[[], ServerStatus]) -> ServerStatus:
        while (status := ask()).incarnation != self._ledger.incarnation:
            self._go_back()
        return status

    def _go_back(self) -> None:
        """Goes back to the beginning of the server's new incarnation."""
        status = self.server.begin()
        lost = self._ledger.go_back(status)
        self._refused.clear()
        self._go_on(status)
        logger.warning(
            "the server died and goes on from step %s; pushes to be done again: %s",
            status.global_step,
            lost,
        )

    def counts(self) -> Counts:
        return super().counts()._replace(server_deaths=self.server.deaths)

    def rest(self) -> None:
        """See :meth:`WorkerPool.rest`; starts a server that has died again before."""
        # The error means that the server has died too often.
        with contextlib.suppress(self._ray.exceptions.RayActorError):
            if self._begun:
                self._ledger.settle(self._standing(self.server.rest))

    def save(self) -> int | None:
        """See :meth:`WorkerPool.save`."""
        return None if self._gone else super().save()

    def close(self) -> None:
        """Ends all workers."""
        super().close()
        if self.workers and not self.server.connection.lost:
            for each in self.workers.values():
                self._ray.kill(each)
