"""Each worker on a thread of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.recoverable import RecoverableServer
from gradxform.engines._crew import Crew
from gradxform.engines._ending import ending
from gradxform.engines._job import Job, Push, Run, Worker
from gradxform.engines._work import work


@contextlib.contextmanager
def threads(
    job: Job, *, checkpoint: Checkpoint | str | os.PathLike[str] | None = None
) -> Iterator[Run]:
    """Runs each worker on a thread of its own, and where it says so on its own device.

    What a worker raises is raised where the pushes are iterated. On leaving the
    context, with an exception or without, all threads end, those that sleep or wait as
    well.

    Args:
      job: what to run.
      checkpoint: where it is saved, and goes on from: a directory, or a
        :class:`Checkpoint`.

    Raises:
      ValueError: too few workers for a step; a checkpoint of another job.
      SystemExit: as the context ends, where ``SIGTERM`` has ended the run.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> from gradxform import engines
    >>> gradient = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((w - x) ** 2)))
    >>> def worker(device):
    ...     batch = (jnp.ones(2),)
    ...     return engines.Worker(gradient, lambda _: batch, device=device)
    >>> job = engines.Job(
    ...     jnp.zeros(2),
    ...     gx.drop_stale(optax.sgd(0.1), max_staleness=8),
    ...     [worker(device) for device in jax.local_devices()],
    ...     pushes=100,
    ... )
    >>> with engines.threads(job) as run:
    ...     for push in run.pushes:
    ...         assert push.result.global_step <= 100
    ...     w = run.server.state()["params"]
    >>> counts = run.counts()
    >>> assert counts.accepted + counts.dropped == counts.pushed == 100
    >>> assert jnp.allclose(w, 1.0, atol=0.1)
    """
    given = Checkpoint.of(checkpoint)
    run = _Threads(job)
    with RecoverableServer(job.params, job.tx, given) as server:
        run.begin(server)
        try:
            with ending(run, given):
                yield run
        finally:
            run.join()


class _Threads(Crew):
    """See :class:`Run`; ``workers`` are the threads."""

    server: RecoverableServer
    workers: dict[int, threading.Thread]

    def begin(self, server: RecoverableServer) -> None:
        """With this server, as it stands."""
        self.server = server
        self._begin(server.begin())
        self.workers = {}
        self._halt = threading.Event()
        # One a push, so that none is too many.
        self._tickets = threading.Semaphore(
            max(0, self._job.pushes - self._ledger.stands)
        )
        self._arrived: queue.SimpleQueue[Push | BaseException | None]
        self._arrived = queue.SimpleQueue()

    def _next(self) -> Iterator[Push]:
        for index, worker in self._members.items():
            if index not in self.workers:
                self.workers[index] = thread = threading.Thread(
                    target=self._work,
                    args=(index, worker),
                    name=f"worker-{index}",
                    daemon=True,  # A second Ctrl-C ends the process whatever they do.
                )
                thread.start()
        arrival = self._arrived.get()
        if isinstance(arrival, BaseException):
            raise arrival
        if arrival is not None:
            self._ledger.add(arrival)
            yield arrival

    def _work(self, index: int, worker: Worker) -> None:
        number = self._ledger.next(index)
        local_step = self._ledger.in_sum().get(index, -1)
        try:
            while index in self._members and not self._halt.is_set():
                # First the wait, then the ticket: who holds one is sure to push.
                if self._job.required is not None:
                    self.server.wait(local_step)
                if not self._tickets.acquire(blocking=False):
                    return
                push = work(index, number, worker, self.server, self._halt.wait)
                number, local_step = number + 1, push.local_step
                self._arrived.put(push)
        except BaseException as error:
            self._arrived.put(error)  # That the server is closed, too; nobody reads it.

    def _wake(self) -> None:
        self._arrived.put(None)

    def add(self, worker: Worker) -> int:
        index = super().add(worker)
        self._wake()
        return index

    def join(self) -> None:
        """Ends all threads."""
        self._halt.set()
        self.server.close()
        for thread in self.workers.values():
            thread.join()
