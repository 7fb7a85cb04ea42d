"""Workers one after the other, by a virtual clock: a run repeats exactly."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.recoverable import RecoverableServer
from gradxform.engines._ending import served
from gradxform.engines._job import Job, Push, Run, Worker
from gradxform.engines._pool import Stopped, WorkerPool
from gradxform.engines._work import GivenUpError, WorkerGradient


@contextlib.contextmanager
def simulated(
    job: Job, *, checkpoint: Checkpoint | str | os.PathLike[str] | None = None
) -> Iterator[Run]:
    """Runs workers one after the other, ordered by a virtual clock.

    Every worker pulls, takes its duration, pushes, waits if the job says so, and pulls
    again. If pushes arrive at the same time, the lower index goes first. A run that
    goes on from a checkpoint repeats exactly, too; its workers pull anew. If each step
    needs every worker, a resumed run equals an uninterrupted one, to the bit.

    Args:
      job: what to run.
      checkpoint: where the run is saved, and from where it goes on: a directory, or a
        :class:`Checkpoint`.

    Raises:
      ValueError: too few workers for a step; a checkpoint of another job.
      SystemExit: at the end of the context, if ``SIGTERM`` has ended the run.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax
    >>> from gradxform import engines
    >>> gradient = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((w - x) ** 2)))
    >>> def worker(batch, seconds):
    ...     return engines.Worker(gradient, lambda _: batch, lambda _: seconds)
    >>> job = engines.Job(
    ...     jnp.zeros(2),
    ...     gx.drop_stale(optax.sgd(0.1), max_staleness=2),
    ...     [worker((jnp.ones(2),), seconds) for seconds in (1.0, 1.0, 5.0)],
    ...     pushes=60,
    ... )
    >>> with engines.simulated(job) as run:
    ...     late = [push.worker for push in run.pushes if not push.result.applied]
    ...     w = run.server.state()["params"]
    >>> assert set(late) == {2} and jnp.allclose(w, 1.0, atol=0.1)
    """
    run = _Simulated(job)
    with served(run, job, Checkpoint.of(checkpoint)):
        yield run


class _Simulated(WorkerPool):
    """See :class:`Run`; there are no threads or processes."""

    server: RecoverableServer

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._now = 0.0
        self._arrivals: dict[int, float] = {}  # Of the gradients under way.

    @property
    def workers(self) -> dict[int, None]:  # type: ignore[override]
        return dict.fromkeys(self._members)

    def _awaited(self) -> int:
        return 0  # By a virtual clock a wasted gradient costs no time.

    def _start(self, index: int, worker: Worker, number: int) -> WorkerGradient:
        gradient = WorkerGradient(index, number, worker, self.server, self._limit)
        self._arrivals[index] = self._now + gradient.duration(1.0)
        return gradient

    def _clock(self) -> float:
        return self._now

    def _hand_out(self) -> bool:
        """Gives up late gradients; starts them again, and those of idle workers."""
        for index in [i for i, each in self._busy.items() if each.is_over()]:
            del self._arrivals[index]
            self._take(index, GivenUpError())
        return super()._hand_out()

    def _next(self) -> Iterator[Push]:
        time, index = min((time, index) for index, time in self._arrivals.items())
        if time == math.inf:  # Then all others never arrive, either.
            raise Stopped
        del self._arrivals[index]
        self._now = time
        took = time - self._ledger.begun[index].at
        outcome: Push | Exception
        try:
            outcome = self._busy[index].push()._replace(computing=took)
        except Exception as error:
            outcome = error
        self.server.flush()  # So that a repeated run writes the same checkpoints.
        if push := self._take(index, outcome):
            yield push
