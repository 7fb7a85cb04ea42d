"""Each worker on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import TypeAlias

from gradxform._checks import arguments
from gradxform._server.checkpoints import Checkpoint
from gradxform._server.recoverable import RecoverableServer
from gradxform.engines._ending import served
from gradxform.engines._job import Job, Push, Run, Worker
from gradxform.engines._pool import LOOK, WorkerPool
from gradxform.engines._work import WorkerGradient

logger = logging.getLogger("gradxform")

# The number of the next gradient, and how it is computed; None is the end.
_Commands: TypeAlias = "queue.SimpleQueue[tuple[int, Worker] | None]"


@contextlib.contextmanager
def threads(
    job: Job,
    *,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    join_timeout: float = 10.0,
) -> Iterator[Run]:
    """Runs each worker on a thread of its own, and on its own device if it names one.

    The iteration over the pushes raises a worker's error. At the end of the context,
    with an exception or without, all threads end, also those that sleep or wait. The
    one exception is a worker that blocks, for example on a queue or a file: a warning
    names it, and its thread stays until the process ends.

    Args:
      job: what to run.
      checkpoint: where the run is saved, and from where it goes on: a directory, or a
        :class:`Checkpoint`.
      join_timeout: how many seconds the end of the context waits for busy workers, in
        [0, inf]. After Ctrl-C it waits for half a second at most.

    Raises:
      ValueError: too few workers for a step; a checkpoint of another job.
      SystemExit: at the end of the context, if ``SIGTERM`` has ended the run.

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
    arguments.in_range("join_timeout", join_timeout, "[0, inf]")
    run = _Threads(job, join_timeout)
    with served(run, job, Checkpoint.of(checkpoint)):
        yield run


class _Threads(WorkerPool):
    """See :class:`Run`; ``workers`` are the threads."""

    server: RecoverableServer
    workers: dict[int, threading.Thread]

    def __init__(self, job: Job, join_timeout: float) -> None:
        super().__init__(job)
        self._join_timeout = join_timeout
        self.workers = {}
        self._commands: dict[int, _Commands] = {}
        self._halt = threading.Event()
        self._arrived: queue.SimpleQueue[tuple[int, Push | BaseException] | None]
        self._arrived = queue.SimpleQueue()

    def _next(self) -> Iterator[Push]:
        try:
            arrival = self._arrived.get(timeout=LOOK)
        except queue.Empty:
            return
        if arrival and (push := self._take(*arrival)):
            self._hand_out()  # Before the consumer works on this push.
            yield push

    def _start(self, index: int, worker: Worker, number: int) -> None:
        if index not in self.workers:
            commands = self._commands[index] = queue.SimpleQueue()
            self.workers[index] = thread = threading.Thread(
                target=self._work,
                args=(index, commands),
                name=f"worker-{index}",
                daemon=True,  # They do not keep the process alive.
            )
            thread.start()
        self._commands[index].put((number, worker))

    def _work(self, index: int, commands: _Commands) -> None:
        for task in iter(commands.get, None):
            try:
                gradient = WorkerGradient(index, *task, self.server, self._limit)
                self._arrived.put((index, gradient.work(self._halt.wait)))
            except BaseException as error:
                self._arrived.put((index, error))  # After the end nobody reads it.

    def _dismiss(self, index: int) -> None:
        self._commands.pop(index).put(None)
        del self.workers[index]

    def _wake(self) -> None:
        self._arrived.put(None)

    def rest(self) -> None:
        super().rest()
        self._halt.set()  # Wakes the workers that sleep.
        for commands in self._commands.values():
            commands.put(None)

    def close(self) -> None:
        """Ends all threads; leaves those behind that do not end in time."""
        # `join` takes no inf.
        wait = min(float(self._join_timeout), threading.TIMEOUT_MAX / 2)
        limit = f"after join_timeout={self._join_timeout} seconds"
        if isinstance(self._last_word, KeyboardInterrupt) and wait > LOOK:
            # Ctrl-C ends a run at once.
            wait, limit = LOOK, f"{LOOK} seconds after Ctrl-C"
        super().close()
        self.rest()
        self.server.close()
        deadline = time.monotonic() + wait
        for thread in self.workers.values():
            if thread.ident is not None:  # An interrupt may come before it starts.
                thread.join(max(0.0, deadline - time.monotonic()))
        busy = [str(i) for i, thread in self.workers.items() if thread.is_alive()]
        if busy:
            names = ", ".join(busy)
            logger.warning("worker %s: still busy %s, so left behind", names, limit)
