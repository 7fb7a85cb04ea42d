"""Workers one after the other, by a virtual clock: a run repeats exactly."""

from __future__ import annotations

import contextlib
import heapq
import os
from collections.abc import Iterator

from gradxform._server.checkpoints import Checkpoint
from gradxform._server.recoverable import RecoverableServer
from gradxform.engines._crew import Crew, Waits
from gradxform.engines._ending import ending
from gradxform.engines._job import Job, Push, Run
from gradxform.engines._work import Gradient


@contextlib.contextmanager
def simulated(
    job: Job, *, checkpoint: Checkpoint | str | os.PathLike[str] | None = None
) -> Iterator[Run]:
    """Runs workers one after the other, ordered by a virtual clock.

    Every worker pulls, takes its duration, pushes, waits where the job says so, and
    pulls again. Of pushes that arrive at once, that of the lower index goes first. A
    run that goes on from a checkpoint repeats exactly, too: the workers pull anew.
    Where each step needs every worker it is the run that never stopped, to the bit.

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
    given = Checkpoint.of(checkpoint)
    run = _Simulated(job)
    with RecoverableServer(job.params, job.tx, given) as server:
        run.begin(server)
        with ending(run, given):
            yield run


class _Simulated(Crew):
    """See :class:`Run`; there are no threads or processes."""

    server: RecoverableServer

    def begin(self, server: RecoverableServer) -> None:
        """With this server, as it stands."""
        self.server = server
        self._begin(server.begin())
        self._waits = Waits(self._job, self._ledger)
        self._now = 0.0
        self._busy: dict[int, Gradient] = {}
        self._arrivals: list[tuple[float, int]] = []

    @property
    def workers(self) -> dict[int, None]:  # type: ignore[override]
        return dict.fromkeys(self._members)

    def _next(self) -> Iterator[Push]:
        for index, worker in self._members.items():
            if index in self._busy or index in self._waits:
                continue
            number = self._ledger.next(index)
            self._busy[index] = Gradient(index, number, worker, self.server)
            seconds = 1.0 if worker.duration is None else worker.duration(number)
            heapq.heappush(self._arrivals, (self._now + seconds, index))
        self._now, index = heapq.heappop(self._arrivals)
        push = self._busy.pop(index).push()
        self._ledger.add(push)
        self._waits.add(push)
        self.server.flush()  # So that which checkpoints there are repeats, too.
        yield push
