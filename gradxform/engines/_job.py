"""The job that an engine runs, and the records of its run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import (
    Any,
    NamedTuple,
    Protocol,
    SupportsFloat,
    TypeAlias,
    runtime_checkable,
)

import jax
import optax

from gradxform._server.records import PushResult, ServerStats
from gradxform._trees.types import Leaf, PyTree
from gradxform.engines._pacing import Progress

LossAndGrads: TypeAlias = tuple[SupportsFloat, PyTree[Leaf]]


def _nothing(number: int) -> tuple[object, ...]:
    return ()


class Worker(NamedTuple):
    """What one worker does, again and again: a minibatch, a pull, a gradient, a push.

    Its gradients are numbered from 0. If the worker or the server dies before a
    gradient is answered, the gradient is computed again, under the same number. A
    resumed run goes on with the numbers that its checkpoint lacks. So no minibatch is
    lost and none acts twice, as long as ``batch`` is a function of the number.

    Attributes:
      gradient: the loss, a scalar, and the gradients of the parameters on a minibatch,
        ``gradient(params, *batch) -> (loss, grads)``: as a rule
        ``jax.jit(jax.value_and_grad(loss))``. It may also be a generator function. It
        yields where the gradient can be cancelled, between micro-batches or local
        steps, and returns loss and gradients.
      batch: the minibatch of a number, ``batch(number) -> (x, y)``: any arrays. It is
        drawn before the parameters are pulled. A stream of data is used with
        ``lambda _: next(stream)``, as a rule one for each worker: several may share one
        if they draw under a lock. When the stream ends, the worker leaves, as by
        :meth:`Run.remove`. A stream is not a function of the number: a resumed run goes
        on where the new stream begins. A worker on Ray makes its stream itself, when
        ``batch`` is first called. By default a gradient needs no minibatch.
      duration: the seconds that a gradient takes, ``duration(number) -> float`` in
        [0, inf]. On :func:`simulated` they are virtual; elsewhere a worker that is done
        earlier sleeps for the rest. By default a gradient takes 1 virtual second, and
        elsewhere its real time.
      rows: the rows of tables that the gradient on a minibatch reads,
        ``rows(*batch) -> {"path/to/table": ids}``, for
        :meth:`~gradxform.ParameterServer.pull`. By default tables are pulled whole.
      extra: extra arguments for the transformation, ``extra(params, *batch) ->
        {"name": value}``, such as the ``worker_params`` of
        :func:`~gradxform.compensate_delay`. Every push also has ``worker``, the index
        of the worker, and ``value``, the loss, unless they are given here.
      device: the device for parameters and minibatch, and JAX's default device while
        the gradient is computed; by default all stay where they are. On Ray a worker is
        a process of its own, which gets its devices by ``worker_options``.
      pull_dtype: the dtype of the floating parameters that it pulls: see
        :meth:`~gradxform.ParameterServer.pull`. The gradients are cast back to the
        dtypes of the parameters before they are pushed. By default no leaf is cast.
    """

    gradient: Callable[..., LossAndGrads | Generator[object, None, LossAndGrads]]
    batch: Callable[[int], tuple[object, ...]] = _nothing
    duration: Callable[[int], float] | None = None
    rows: Callable[..., Mapping[str, jax.typing.ArrayLike]] | None = None
    extra: Callable[..., Mapping[str, object]] | None = None
    device: jax.Device | None = None
    pull_dtype: jax.typing.DTypeLike | None = None


_BATCH = (
    "It is called with the number of a gradient: pass lambda number: batches[number] "
    "for a list, or lambda _: next(stream) for a stream or a loader."
)


def check_worker(worker: Worker) -> None:
    """Raises ``TypeError`` unless these fields of a worker are functions, or None."""
    for name in ("batch", "duration", "rows", "extra"):
        value = getattr(worker, name)
        if not callable(value) and (value is not None or name == "batch"):
            kind = type(value).__name__
            hint = f" {_BATCH}" if name == "batch" else ""
            raise TypeError(
                f"{name} of an engines.Worker must be a function, got a {kind}.{hint}"
            )


@functools.wraps(Worker.__new__)
def _checked_worker(cls: type[Worker], *args: Any, **kwargs: Any) -> Worker:
    worker: Worker = _new_worker(cls, *args, **kwargs)
    check_worker(worker)
    return worker


# The class of a named tuple cannot have a `__new__` of its own.
_new_worker = Worker.__new__
Worker.__new__ = _checked_worker  # type: ignore[assignment]


class Job(NamedTuple):
    """What an engine runs.

    Attributes:
      params: the initial parameters; or a function without arguments that gives them.
        It is called where the server is. Over several processes the function is
        compiled, so that each process makes only its parts, and arrays that it
        calculates with JAX are never whole in one place.
      tx: any transformation. A gate in it (:func:`~gradxform.drop_stale`, for example)
        decides which pushes are dropped.
      workers: the workers, by index; more may be added to a run.
      pushes: how many pushes reach the server, accepted or dropped. Pushes before a
        resumed run count; pushes lost in a death do not.
      required: how many pushes make a step. A worker that has pushed waits for the
        step, as :func:`~gradxform.conditional_accumulator` with this ``num_required``
        needs it. With None every push may be a step of its own, and nobody waits. If
        all workers wait for a step that needs more pushes, the run ends with a
        ``ValueError``.
      max_staleness: how late a gradient may become while it is computed, ≥ 0 or inf, or
        a schedule of the global step. After each step, a gradient is cancelled if its
        ``global_step - local_step`` is larger. Its number begins again, on the same
        minibatch, with the newest parameters. On :func:`simulated` that happens at the
        step. On :func:`threads` and :func:`ray` it happens between the pieces of a
        generator's gradient, and before any push. By default none is cancelled.
      require_finite: whether a push that holds NaN or inf ends the run with an error,
        before it has changed anything: see :class:`~gradxform.ParameterServer`.
      donate: whether steps update the server's own arrays in place: see
        :class:`~gradxform.ParameterServer`.
      pace: says whether a worker may begin its next gradient now, ``pace(progress) ->
        bool``, with a :class:`Progress`: :func:`bounded_staleness`,
        :func:`stale_synchronous`, :func:`admission`, or a function of your own. All
        free workers are asked at least after every push, and whenever a worker comes or
        leaves; the one that has waited longest is asked first, then the lower index. If
        it lets nobody begin while no gradient is under way, the run ends with a
        ``ValueError``. By default every free worker begins.
    """

    params: optax.Params | Callable[[], optax.Params]
    tx: optax.GradientTransformation
    workers: Sequence[Worker]
    pushes: int
    required: int | None = None
    max_staleness: jax.typing.ArrayLike | optax.Schedule | None = None
    require_finite: bool = False
    donate: bool = True
    pace: Callable[[Progress], bool] | None = None


class Push(NamedTuple):
    """One push that was answered.

    Attributes:
      worker: the index of its worker.
      number: which of that worker's gradients it is, from 0.
      local_step: the global step that the worker saw before it computed.
      loss: the loss of its minibatch, at the parameters that the worker had pulled.
      norm: the global norm of its gradients, before any clip.
      result: the server's answer.
      time: seconds from the beginning of the run to the answer; virtual ones on
        :func:`simulated`.
      started: seconds from the beginning of the run to that of the gradient.
      waited: seconds that its worker waited until it could begin.
      computing: seconds from its beginning until it was ready. The rest of ``time -
        started`` passed on the way to the server, and there.
    """

    worker: int
    number: int
    local_step: int
    loss: float
    norm: float
    result: PushResult
    time: float = 0.0
    started: float = 0.0
    waited: float = 0.0
    computing: float = 0.0


class WorkerCounts(NamedTuple):
    """Counts of one worker's gradients.

    Attributes:
      accepted: pushes that were applied or added.
      dropped: pushes that came too late.
      given_up: gradients that were cancelled, in this run.
    """

    accepted: int = 0
    dropped: int = 0
    given_up: int = 0


class Counts(NamedTuple):
    """Counts of all gradients and pushes so far.

    ``accepted + dropped + lost == pushed``, and ``pushed + given_up + unanswered +
    under_way == started``.

    Attributes:
      pushed: pushes that the server has answered, including those before a resumed run.
        If the server died before its answer arrived, the push counts if it is in the
        checkpoint; otherwise it is pushed again as if for the first time.
      accepted: pushes among these that were applied or added.
      dropped: pushes that came too late.
      lost: pushes whose effect died with the server, after its last checkpoint. They
        are computed and pushed again.
      worker_deaths: processes of workers that died and were replaced.
      server_deaths: deaths of the server after which it was started again, also while
        it started. A server of several processes dies as one.
      given_up: gradients that became too late while they were computed, and so were
        never pushed: see ``max_staleness`` of :class:`Job`.
      started: gradients that were begun. A resumed run begins with the pushes in its
        checkpoint.
      under_way: gradients that workers compute or push now.
      unanswered: gradients without an answer of their own: the worker or the server
        died, the worker has raised, the stream had ended, or the server needed no more.
      by_worker: the counts of each worker, by its index.
    """

    pushed: int = 0
    accepted: int = 0
    dropped: int = 0
    lost: int = 0
    worker_deaths: int = 0
    server_deaths: int = 0
    given_up: int = 0
    started: int = 0
    under_way: int = 0
    unanswered: int = 0
    by_worker: Mapping[int, WorkerCounts] = {}  # Nobody changes it.


class Server(Protocol):
    """What a :class:`~gradxform.ParameterServer` can do on any engine."""

    def pull(
        self,
        rows: Mapping[str, jax.typing.ArrayLike] | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> tuple[optax.Params, int]:
        """The parameters and their global step."""

    def push(self, grads: optax.Updates, local_step: int, **extra: Any) -> PushResult:
        """Applies gradients, adds them to a sum, or drops them.

        The run counts a push with ``push_id=(worker, number)`` as one of that worker.
        So both are integers, and the numbers of a worker are 0, 1, 2 and so on. Take an
        index that no worker of the run has.
        """

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state."""

    def stats(self) -> ServerStats:
        """What the server has done so far."""


@runtime_checkable
class Run(Protocol):
    """A job under way; nothing happens before ``pushes`` is iterated.

    Attributes:
      pushes: an iterator over the pushes as they are answered. It ends with the job, or
        when streams have ended and too few workers are left for a step: none, or fewer
        than ``Job.required``. It raises a worker's error; the run is saved all the
        same. While nobody asks for the next push, each worker finishes its present
        gradient, and rests. Only one thread may read it.
      server: may be asked for parameters and state at any time, also after the last
        push. It cannot be restored: a run goes back by itself, to its checkpoints.
      workers: the threads or Ray actors of the workers, by index. Workers that have
        left are not in it.
      resumed: the global step of the checkpoint that the run goes on from, or None.
    """

    @property
    def pushes(self) -> Iterator[Push]: ...
    @property
    def server(self) -> Server: ...
    @property
    def workers(self) -> Mapping[int, Any]: ...  # Threads, or handles of Ray.
    @property
    def resumed(self) -> int | None: ...

    def counts(self) -> Counts:
        """Counts of the pushes that ``pushes`` has given so far.

        After the end of ``pushes``, or of the context, they count all pushes that the
        server has answered, also those that ``stop``, ``break`` or a signal cut off.
        The last checkpoint has the same counts, unless Ctrl-C or a failed step of the
        server has ended the run.
        """

    def add(self, worker: Worker) -> int:
        """Adds a worker; returns its index. Any thread may call it."""

    def remove(self, index: int) -> None:
        """Lets a worker go after its present push. Any thread may call it.

        Raises:
          ValueError: there is no such worker, or too few would be left for a step.
        """

    def stop(self) -> None:
        """Ends ``pushes`` early, and the training with it.

        Gradients under way are not pushed; a resumed run computes them again. Any
        thread may call it, and signal handlers, too.
        """
