"""The one class with state of its own: parameters that many workers share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Any, Generic, NoReturn, Self, SupportsIndex, overload

import jax
import numpy as np
import optax

from gradxform._server.actor import Publisher, is_actor, was_restarted
from gradxform._server.placement import copy, initialize, on_host
from gradxform._server.programs import Leaves, PushPrograms, Step
from gradxform._server.records import (
    NO_COPY,
    Counters,
    PushResult,
    ServerClosedError,
    ServerStats,
    Version,
    as_step,
    check_push_id,
    check_step,
    is_past,
    summary,
    unusable,
)
from gradxform._server.rows import RowRequest
from gradxform._server.serial_executor import SerialExecutor
from gradxform._server.sharded import ShardedParams
from gradxform._server.waiters import Waiters
from gradxform._trees import checks
from gradxform._trees.types import Params, Rows


class ParameterServer(Generic[Params]):
    """Parameters and optimizer state that workers on many threads pull and push to.

    Every push is one compiled :func:`apply_gradients`, one push after the other. All
    methods may be called from any thread, and from signal handlers. Only :meth:`wait`
    waits for another worker. ``ray.remote(gx.ParameterServer)`` does the same on many
    machines. Its ``max_concurrency`` must exceed the number of workers, as some wait.

    A pull gives the worker a copy of its own, which stays valid and may be donated.
    Gradients may come from any device. The server moves them, never the parameters.

    A push that raises changes nothing, and harms only the worker that pushed. Errors in
    a gradient show before its step begins. An exception may interrupt a method at any
    moment: the server is then at the old step or the new one. (JAX itself may not
    survive an exception in the pushing thread while that traces the first of a kind.)

    There is one limit. The server updates its arrays in place, so a step that fails
    while it runs (out of memory, or in a callback) destroys them. Every call then
    raises :class:`ServerClosedError`, which names the cause, until :meth:`restore`
    brings back an earlier :meth:`state`. With ``donate=False`` such a failure changes
    nothing either, but a step needs memory for a second model and optimizer state. A
    Ray actor that was started again (``max_restarts``) has lost its parameters, too.

    Args:
      params: the initial parameters; they are copied.
      tx: any ``optax.GradientTransformation`` but ``optax.lookahead``. A gate in it
        (:func:`drop_stale`, :func:`conditional_accumulator`) decides what is dropped;
        without one, or with :func:`accumulate`, nothing is too late. It receives
        ``local_step`` and all extra arguments of :meth:`push`.
      donate: whether steps update the server's own arrays in place.
      require_finite: whether gradients that hold NaN or inf are refused with an error,
        at the price of one more pass over them. Padding of :class:`IndexedSlices`
        counts for nothing.

    Source: the parameter servers of TensorFlow 1.x, ``tf.train.SyncReplicasOptimizer``
    and ``tf.contrib.opt.DropStaleGradientOptimizer``.

    >>> import gradxform as gx, jax, jax.numpy as jnp, optax, threading
    >>> tx = gx.drop_stale(optax.sgd(0.1), max_staleness=4)
    >>> server = gx.ParameterServer({"w": jnp.array([1.0, -2.0])}, tx)
    >>> def work():
    ...     for _ in range(50):
    ...         params, seen = server.pull()
    ...         server.push(jax.tree.map(lambda w: 2 * w, params), seen)
    >>> threads = [threading.Thread(target=work) for _ in range(4)]
    >>> for thread in threads: thread.start()
    >>> for thread in threads: thread.join()
    >>> params, global_step = server.pull()
    >>> assert jnp.allclose(params["w"], 0, atol=1e-3)
    >>> stats = server.stats()
    >>> assert stats.accepted + stats.dropped == 200
    >>> assert stats.accepted == global_step
    """

    def __init__(
        self,
        params: Params,
        tx: optax.GradientTransformation,
        *,
        donate: bool = True,
        require_finite: bool = False,
    ) -> None:
        sharded = params if isinstance(params, ShardedParams) else None
        tx, params, state = (
            sharded.initialize(tx) if sharded else initialize(tx, params)
        )
        self._programs = PushPrograms(
            tx, params, state, donate, require_finite, sharded
        )
        # Only calls on `_thread` write what follows.
        self._version = Version.of(params, state)
        self._answered: dict[Hashable, tuple[int, PushResult]] = {}  # By worker.
        self._waiters = Waiters()
        self._counters = Counters()
        self._closed = False
        self._lost: str | None = None
        self._publisher = Publisher() if is_actor(self) else None
        if was_restarted(self):
            self._lost = "its Ray actor has died and was started again"
        self._thread = SerialExecutor("parameter-server")

    @overload
    def pull(self, rows: None = None) -> tuple[Params, int]: ...
    @overload
    def pull(self, rows: Rows | None = None) -> tuple[Any, int]: ...
    def pull(self, rows: Rows | None = None) -> tuple[Any, int]:
        """The parameters and the global step they belong to: the next ``local_step``.

        The arrays are the caller's own. The step is an integer that also knows its
        server's incarnation: the time until the next :meth:`restore` or restart. So the
        server recognizes gradients from an earlier incarnation.

        Args:
          rows: the ids that the worker will read, integers of any shape, for tables
            named by their paths (as ``"encoder/emb"``). Each such table is replaced by
            these rows, an :class:`IndexedSlices` with as many rows as ids: in ascending
            order, each once, and padding after them. :func:`lookup` reads from it as
            from the table, and the gradients can be pushed as they are.

        Raises:
          TypeError: ids are no integers.
          ValueError: ``rows`` names no table, or an id lies outside of it.
          ServerClosedError: the server is closed, or has lost its parameters.
        """
        wanted = self._programs.rows.prepare({} if rows is None else rows)
        read: dict[int, Any] = {}
        seen: int
        others: Any = None  # Leaves by their numbers; with a publisher a reference.
        if self._publisher and not wanted:  # What is published needs no turn.
            self._check_usable()
            version = self._version
            others, seen = self._publisher.find(version, frozenset()), version.step()
        if others is None:
            read, others, seen = self._thread.run(self._pull, wanted)
        parts = {i: self._programs.rows.part(i, wanted[i], x) for i, x in read.items()}
        if self._publisher:
            return self._publisher.answer(others, parts), seen
        leaves = {**others, **parts}
        return self._programs.params([leaves[i] for i in range(len(leaves))]), seen

    def _pull(self, wanted: dict[int, RowRequest]) -> tuple[dict[int, Any], Any, int]:
        """The wanted rows, and all other leaves, by their numbers."""
        self._check_usable()
        version = self._version
        leaves = self._programs.leaves_of_params(version.leaves)
        read = {i: each.read(leaves[i]) for i, each in wanted.items()}
        if self._publisher is None:
            others = copy({i: x for i, x in enumerate(leaves) if i not in wanted})
            return read, others, version.step()
        params = self._programs.params(
            [i if i in wanted else x for i, x in enumerate(leaves)]
        )
        ref = self._publisher.publish(version, frozenset(wanted), params)
        return read, ref, version.step()

    def push(
        self,
        grads: optax.Updates,
        local_step: int,
        *,
        push_id: tuple[Hashable, int] | None = None,
        **extra: object,
    ) -> PushResult:
        """Applies gradients, adds them to a sum, or drops them, as ``tx`` decides.

        A push that raises changes nothing, unless its step fails while it runs: see the
        class. An exception of a signal handler only ends the wait: the push itself goes
        on, and may be repeated with its ``push_id``.

        Args:
          grads: gradients with the structure, shapes and dtypes of the parameters;
            ``None`` where there is none. If they are still being computed, only this
            push waits.
          local_step: the global step that :meth:`pull` gave with the parameters.
          push_id: ``(worker, number)``; the number grows with each push of that worker.
            A worker may repeat a push whose answer was lost. It acts only once, and
            gets the first answer again. The server remembers one push for each worker.
          **extra: extra arguments for ``tx``, such as ``worker_params``.

        Raises:
          TypeError: structure, shape or dtype differ from the parameters', and the
            error names the first such path; or ``local_step`` is no integer, or
            ``push_id`` no such pair.
          ValueError: ``local_step`` is negative, ahead of the server, or from before a
            :meth:`restore`; ``push_id`` is below the last one of its worker; no leaf
            has a gradient; a leaf is not finite although ``require_finite`` is set;
            ``worker`` has no row in a :func:`worker_mean`.
          ServerClosedError: the server is closed, or has lost its parameters.
        """
        # The cheap checks come first, and none of them delays other workers.
        local_step = as_step("local_step", local_step)
        if push_id is not None:
            check_push_id(push_id)
        self._check_usable()
        check_step(local_step, self._version)
        step, pushed = self._prepare(grads, extra)
        return self._thread.run(self._push, step, pushed, local_step, push_id)

    def _prepare(
        self, grads: optax.Updates, extra: dict[str, Any]
    ) -> tuple[Step, Leaves]:
        return self._programs.prepare(grads, extra)

    def _push(
        self,
        step: Step,
        pushed: Leaves,
        local_step: int,
        push_id: tuple[Hashable, int] | None,
    ) -> PushResult:
        self._check_usable()
        if push_id is not None and push_id[0] in self._answered:
            number, result = self._answered[push_id[0]]
            if push_id[1] == number:
                return result
            if push_id[1] < number:
                raise ValueError(
                    f"push_id={push_id} comes after {push_id[0], number}: give each "
                    "push of a worker a higher number than the one before."
                )
        check_step(local_step, self._version)
        old = self._version
        try:
            leaves, counted = step(old.leaves, pushed, np.int32(local_step))
            if self._programs.devices > 1:  # The counters come from one device alone.
                jax.block_until_ready(leaves)
            counters = on_host(counted)
            global_step, dropped = map(int, counters[:2])
        except BaseException as error:
            if any(x.is_deleted() for x in old.leaves):
                self._lost = f"a step failed after it had taken them, {summary(error)}"
                self._wake()
                error.add_note(str(self._unusable()))
            raise
        if self._publisher and not self._programs.gated:
            self._publisher.forget()
        self._version = Version(leaves, global_step, dropped, old.incarnation)
        applied = dropped == old.dropped
        staleness = old.global_step - local_step
        self._counters.count(applied, staleness)
        cosines = counters[2:].view(np.float32).tolist()
        result = PushResult(applied, staleness, global_step, *cosines)
        if push_id is not None:
            self._answered[push_id[0]] = push_id[1], result
        self._waiters.wake_passed(old.global_step, global_step)
        return result

    def wait(self, global_step: int, timeout: float | None = None) -> int:
        """Blocks until the server has passed a step; returns its global step then.

        A step from before a :meth:`restore` counts as passed.

        Args:
          global_step: the step to pass, usually the one that was just pulled.
          timeout: seconds to wait at most; ``None`` or inf waits without end.

        Raises:
          TimeoutError: the server has not passed ``global_step`` within ``timeout``.
          TypeError: ``global_step`` is no integer, or ``timeout`` no number.
          ValueError: ``timeout`` is negative or NaN.
          ServerClosedError: the server is closed or has lost its parameters, before or
            meanwhile.
        """
        global_step = as_step("global_step", global_step)
        if timeout is not None:
            checks.in_range("timeout", timeout, "[0, inf]")
        answer = self._outcome(global_step)
        if answer is None:
            seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            woken: queue.SimpleQueue[Any] = queue.SimpleQueue()
            try:
                self._thread.start(self._wait, global_step, woken)
                answer = woken.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError(
                    f"the server is at step {self._version.global_step} and has not "
                    f"passed global_step={global_step} within timeout={timeout} "
                    "seconds."
                ) from None
            finally:  # Also after an interrupt.
                self._thread.start(self._waiters.remove, global_step, woken)
        if isinstance(answer, ServerClosedError):
            raise answer
        return answer

    def _outcome(self, global_step: int) -> int | ServerClosedError | None:
        """The answer to a wait; None if it still has to wait."""
        error, version = self._unusable(), self._version
        if error is not None:
            return error
        if version.global_step > global_step or is_past(
            global_step, version.incarnation
        ):
            return version.global_step
        return None

    def _wait(self, global_step: int, woken: queue.SimpleQueue[Any]) -> None:
        if (answer := self._outcome(global_step)) is None:
            self._waiters.add(global_step, woken)
        else:
            woken.put(answer)

    def _wake(self) -> None:
        """Wakes all waiters whose answer has come."""
        for global_step, woken in self._waiters.take_all():
            self._wait(global_step, woken)

    def stats(self) -> ServerStats:
        """What the server has done so far. It may be called at any time."""
        return self._thread.run(self._stats)

    def _stats(self) -> ServerStats:
        return self._counters.stats(self._version.global_step, self._lost)

    def state(self) -> dict[str, Any]:
        """A copy of parameters and optimizer state, a tree that orbax can save.

        It still answers after :meth:`close`.

        Raises:
          ServerClosedError: the server has lost its parameters.
        """
        return self._thread.run(self._state)

    def _state(self) -> dict[str, Any]:
        return self._copies()

    def _copies(self) -> dict[str, Any]:
        if self._lost is not None:
            self._check_usable()
        return copy(self._programs.state(self._version.leaves))

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from an earlier :meth:`state`; the statistics go on as well.

        A new incarnation begins: workers must pull again. The server recognizes a push
        or a wait with an older step. A server that has lost its parameters is well
        again.

        Args:
          state: a tree with the paths, shapes and dtypes of :meth:`state`, on any
            device. Orbax gives one if a server's ``state()`` is the restore's target.

        Raises:
          TypeError: it differs from :meth:`state`, and the error names the path;
            nothing is changed.
          ServerClosedError: the server is closed.
        """
        if self._closed:
            self._check_usable()
        self._thread.run(self._restore, Version.of(*self._programs.place(state)))

    def _restore(self, version: Version) -> None:
        if self._closed:
            self._check_usable()
        self._version = version
        self._lost = None
        self._answered = {}  # A worker that repeats an older push must pull again.
        self._wake()

    def close(self) -> None:
        """Ends the service: waiting workers wake, and their calls raise from now on.

        :meth:`state` and :meth:`stats` still answer.
        """
        self._thread.run(self._close)

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def __repr__(self) -> str:
        name, version = type(self).__name__, getattr(self, "_version", None)
        if version is None:  # It is still being made.
            return f"{name}()"
        leaves = self._programs.leaves_of_params(version.leaves)
        return f"{name}({version.described(leaves, self._unusable())})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(NO_COPY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unusable(self) -> ServerClosedError | None:
        return unusable(self._closed, self._lost)

    def _check_usable(self) -> None:
        if (error := self._unusable()) is not None:
            raise error
