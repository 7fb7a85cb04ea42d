"""The one class with state of its own: parameters that many workers share."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Any, Generic, NoReturn, Self, SupportsIndex, overload

import jax
import optax

from gradxform._checks import arguments
from gradxform._server import records
from gradxform._server.core import Woken
from gradxform._server.records import PushResult, ServerClosedError, ServerStats
from gradxform._server.transport import Transport
from gradxform._trees.types import Params, RowsByPath


class ThreadServer(Generic[Params]):
    """The server behind a transport to its workers.

    The public class, in ``_ray``, makes the transport, and has the text for users.

    Args:
      transport: to its workers, with its core.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._core = transport, transport.core
        self._turns = transport.turns

    @overload
    def pull(
        self, rows: None = None, dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[Params, int]: ...
    @overload
    def pull(
        self, rows: RowsByPath | None = None, dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[Any, int]: ...
    def pull(
        self, rows: RowsByPath | None = None, dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[Any, int]:
        """The parameters and the global step they belong to: the next ``local_step``.

        The arrays are the caller's own. The step is an integer that also knows its
        server's incarnation: the time until the next :meth:`restore` or restart. So the
        server recognizes gradients from an earlier incarnation.

        Args:
          rows: the ids that the worker will read, integers of any shape, for tables
            named by their paths (as ``"encoder/emb"``). Each such table is replaced by
            these rows, a :class:`TableRows` with as many rows as ids: in ascending
            order, each once, and padding after them. :func:`lookup` reads from it as
            from the table, and the gradients can be pushed as they are.
          dtype: the dtype of all floating leaves and rows, for example
            ``jnp.bfloat16``, which halves what a pull of float32 sends. Leaves of other
            dtypes stay as they are. The gradients of such parameters have this dtype,
            too: cast them back before they are pushed. By default each leaf has its own
            dtype.

        Raises:
          TypeError: ids are no integers, or ``dtype`` is no dtype of floating numbers.
          ValueError: ``rows`` names no table, or an id lies outside of the table.
          RuntimeError: it is called inside of ``jit`` or the like, where it would run
            only once; so are :meth:`push` and :meth:`state`.
          ServerClosedError: the server is closed, or has lost its parameters.

        >>> import gradxform as gx, jax.numpy as jnp, optax
        >>> server = gx.ParameterServer({"w": jnp.array([1.0, 0.1])}, optax.sgd(0.1))
        >>> params, _ = server.pull(dtype=jnp.bfloat16)
        >>> params["w"]
        Array([1, 0.100098], dtype=bfloat16)
        """
        arguments.check_not_tracing("pull")
        return self._transport.pull(self._transport.tables.request(rows, dtype))

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
            error names the first such path; ``local_step`` is no integer, or
            ``push_id`` no such pair; or nothing in ``tx`` reads an extra argument.
          ValueError: ``local_step`` is negative, ahead of the server, or from before a
            :meth:`restore`; ``push_id`` is below the last one of its worker; no leaf
            has a gradient; a leaf is not finite although ``require_finite`` is set;
            ``worker`` has no row in a :func:`worker_mean`.
          RuntimeError: an array was deleted, or donated to a program; or ``push`` is
            called inside of ``jit`` or the like.
          ServerClosedError: the server is closed, or has lost its parameters.
        """
        arguments.check_not_tracing("push")
        # The cheap checks come first, and none of them delays other workers.
        local_step = records.as_step("local_step", local_step)
        if push_id is not None:
            push_id = records.as_push_id(push_id, of_run=self._core.numbered)
        self._core.check_usable()
        records.check_step(local_step, self._core.version)
        with self._transport.prepared(grads, extra) as prepared:
            return self._turns.run(self._core.commit, prepared, local_step, push_id)

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
        global_step = records.as_step("global_step", global_step)
        if timeout is not None:
            arguments.in_range("timeout", timeout, "[0, inf]")
        core = self._core
        answer = core.outcome(global_step)
        if answer is None:
            seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            self._turns.check()
            woken: Woken = queue.SimpleQueue()
            try:
                core.waiting[woken] = global_step
                answer = core.outcome(global_step)  # It may have stepped meanwhile.
                if answer is None:
                    answer = woken.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError(
                    f"the server is at step {core.version.global_step} and has not "
                    f"passed global_step={global_step} within timeout={timeout} "
                    "seconds."
                ) from None
            finally:  # Also after an interrupt.
                core.waiting.pop(woken, None)
        if isinstance(answer, ServerClosedError):
            raise answer
        return answer

    def stats(self) -> ServerStats:
        """What the server has done so far. It may be called at any time."""
        return self._turns.run(self._core.stats)

    def state(self) -> dict[str, Any]:
        """A copy of parameters and optimizer state, a tree that orbax can save.

        It still answers after :meth:`close`.

        Raises:
          ServerClosedError: the server has lost its parameters.
        """
        arguments.check_not_tracing("state")
        return self._turns.run(self._transport.state)

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
        self._core.check_usable(if_lost=False)
        arrays = self._core.specs.put(state)
        self._turns.run(self._core.restore, arrays)

    def close(self) -> None:
        """Ends the service: waiting workers wake, and their calls raise from now on.

        :meth:`state` and :meth:`stats` still answer.
        """
        self._turns.run(self._core.close)

    def __repr__(self) -> str:
        core = getattr(self, "_core", None)  # None while it is being made.
        return f"{type(self).__name__}({core or ''})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a ParameterServer can be neither copied nor pickled: make another one "
            "with the same params and tx, and restore(server.state()) there. If other "
            "processes need it, make it an actor, as the class says."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
