"""The one part with a memory of its own: parameters that many workers share."""

from __future__ import annotations

import collections
import operator
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform import _checks
from gradxform._apply import apply_gradients
from gradxform._drop_stale import drop_stale, outermost
from gradxform._gate import GatedTransformation


class PushResult(NamedTuple):
    """What became of one push.

    Attributes:
      applied: False where it was dropped as stale.
      staleness: steps taken since the worker's local step.
      global_step: after the push.
    """

    applied: bool
    staleness: int
    global_step: int


class ServerClosedError(RuntimeError):
    """A call to a server that was closed, which is how workers learn of the end."""


class ServerStats(NamedTuple):
    """What a server has done since it was made.

    Attributes:
      accepted: pushes that were applied or added; an accumulator takes several to a
        step.
      dropped: pushes that came too late.
      staleness: how many pushes came how late, by steps.
      pushes_per_second: from the first push to the last; 0 before the second.
      global_step: steps taken.
    """

    accepted: int
    dropped: int
    staleness: dict[int, int]
    pushes_per_second: float
    global_step: int


class ParameterServer:
    """Parameters and optimizer state that workers on many threads pull and push to.

    Every push is one compiled :func:`apply_gradients`, one push after the other. All
    methods may be called from any thread; none but :meth:`wait` waits for another
    worker. ``ray.remote(gx.ParameterServer)`` is the same on many machines: give the
    actor a ``max_concurrency`` above its number of workers, for those that wait.

    The server updates parameters and state in place, and hands out copies: an array
    that a worker pulled stays valid whatever the server does next. That costs one copy
    of the parameters for each version that somebody pulls, and none for pushes or for
    a second pull of a version. With ``donate=False`` pulls are free instead, and each
    step allocates new arrays: better where every version is pulled at once by all, at
    the price of as many models in memory as workers hold versions.

    Args:
      params: the initial parameters; they are copied.
      tx: any ``optax.GradientTransformation``. A gate in it (:func:`drop_stale`,
        :func:`conditional_accumulator`) decides what is dropped; without one nothing
        is. It receives ``local_step`` and all extra arguments of :meth:`push`.
      donate: whether steps update the server's own arrays in place.
      require_finite: whether gradients that hold NaN or inf are refused with an error,
        at the price of one more pass over them.

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
    >>> assert jnp.abs(params["w"]).max() < 1e-3
    >>> stats = server.stats()
    >>> assert stats.accepted + stats.dropped == 200
    >>> assert stats.accepted == global_step
    """

    def __init__(
        self,
        params: optax.Params,
        tx: optax.GradientTransformation,
        *,
        donate: bool = True,
        require_finite: bool = False,
    ) -> None:
        self._params = _copy(params)
        if not optax.tree.get_all_with_path(tx.init(self._params), "global_step"):
            tx = drop_stale(tx, np.iinfo(np.int32).max)  # A gate that is always open.
        self._state = tx.init(self._params)
        self._global_step = int(outermost(self._state, "global_step"))
        self._stale_count = int(outermost(self._state, "stale_count"))

        def step(
            params: Any, state: Any, grads: Any, local_step: Any, extra: dict[str, Any]
        ) -> tuple[Any, Any, jax.Array]:
            # Gradients are checked while tracing, so once for each of their signatures:
            # those of a signature that does not fit never come to be compiled.
            new_params, state = apply_gradients(
                tx, grads, state, params, local_step=local_step, **extra
            )
            _checks.same_dtypes("grads", grads, "params", params)
            # One small array, so that the host waits for one transfer.
            counters = [
                outermost(state, "global_step"),
                outermost(state, "stale_count"),
            ]
            return new_params, state, jnp.stack(counters)

        self._donate = donate
        self._step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        # Only behind a gate do parameters stay what they are unless the step grows.
        self._gated = isinstance(tx, GatedTransformation)
        self._require_finite = require_finite
        self._published: optax.Params | None = None  # The copy that pulls hand out.
        self._staleness: collections.Counter[int] = collections.Counter()
        self._applied = 0
        self._first_push = self._last_push = 0.0
        self._closed = False
        self._changed = threading.Condition()

    def pull(self) -> tuple[optax.Params, int]:
        """The parameters and the global step they belong to: the next ``local_step``.

        Raises:
          ServerClosedError: the server is closed.
        """
        with self._changed:
            self._check_open()
            if not self._donate:
                return self._params, self._global_step
            if self._published is None:
                self._published = _copy(self._params)
            return self._published, self._global_step

    def push(self, grads: optax.Updates, local_step: int, **extra: Any) -> PushResult:
        """Applies gradients, adds them to a sum, or drops them, as ``tx`` decides.

        A push that raises changes nothing.

        Args:
          grads: gradients of the structure, shapes and dtypes of the parameters;
            ``None`` where there is none.
          local_step: the global step that :meth:`pull` gave with the parameters.
          **extra: extra arguments for ``tx``, such as ``worker_params``.

        Raises:
          TypeError: naming the first path at which structure, shape or dtype differ
            from the parameters'; or ``local_step`` is no integer.
          ValueError: ``local_step`` is negative or ahead of the server; no leaf has a
            gradient; a leaf is not finite although ``require_finite`` is set.
          ServerClosedError: the server is closed.
        """
        if self._require_finite:
            _check_finite(grads)
        if type(local_step) is not int:  # The checks are slower than what they save.
            _checks.integer_scalar("local_step", local_step)
            local_step = operator.index(local_step)
        with self._changed:
            self._check_open()
            if not 0 <= local_step <= self._global_step:
                _checks.in_range("local_step", local_step, f"[0, {self._global_step}]")
            self._params, self._state, counters = self._step(
                self._params, self._state, grads, np.int32(local_step), extra
            )
            staleness = self._global_step - local_step
            global_step, stale_count = map(int, np.asarray(counters))
            applied = stale_count == self._stale_count
            if global_step > self._global_step or not self._gated:
                self._published = None
            self._global_step, self._stale_count = global_step, stale_count
            self._applied += applied
            self._staleness[staleness] += 1
            self._last_push = time.monotonic()
            self._first_push = self._first_push or self._last_push
            self._changed.notify_all()
        return PushResult(applied, staleness, global_step)

    def wait(self, global_step: int, timeout: float | None = None) -> int:
        """Blocks until the server has passed a step; returns its global step then.

        Args:
          global_step: the step to be passed, as a rule the one just pulled.
          timeout: seconds to wait at most; ``None`` waits for good.

        Raises:
          TimeoutError: the server has not passed ``global_step`` within ``timeout``.
          ServerClosedError: the server is closed, before or meanwhile.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._global_step > global_step, timeout
            )
            self._check_open()
            if self._global_step <= global_step:
                raise TimeoutError(
                    f"the server is at step {self._global_step} and has not passed "
                    f"global_step={global_step} within timeout={timeout} seconds."
                )
            return self._global_step

    def stats(self) -> ServerStats:
        """What the server has done so far; also after :meth:`close`."""
        with self._changed:
            pushes = sum(self._staleness.values())
            seconds = self._last_push - self._first_push
            return ServerStats(
                accepted=self._applied,
                dropped=pushes - self._applied,
                staleness=dict(sorted(self._staleness.items())),
                pushes_per_second=(pushes - 1) / seconds if seconds else 0.0,
                global_step=self._global_step,
            )

    def state(self) -> dict[str, Any]:
        """A copy of parameters and optimizer state, a tree that orbax can save.

        Also after :meth:`close`.
        """
        with self._changed:
            return {"params": _copy(self._params), "state": _copy(self._state)}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state` gave; the statistics go on as well.

        After going back to an earlier step, workers must pull again: a push with a step
        from the future is refused.

        Args:
          state: a tree of the structure, shapes and dtypes of :meth:`state`; orbax
            gives it where the server's own ``state()`` is the target of the restore.

        Raises:
          TypeError: naming the first path at which it differs; nothing is changed.
          ServerClosedError: the server is closed.
        """
        with self._changed:
            self._check_open()
            current = {"params": self._params, "state": self._state}
            _checks.same_shapes(
                "state", state, "the server's state", current, nodes=False
            )
            _checks.same_dtypes("state", state, "the server's state", current)
            # Into the server's own structure: a loader may have made lists of tuples,
            # whose paths are the same.
            leaves = jax.tree.leaves(_copy(state))
            restored = jax.tree.unflatten(jax.tree.structure(current), leaves)
            self._params, self._state = restored["params"], restored["state"]
            self._global_step = int(outermost(self._state, "global_step"))
            self._stale_count = int(outermost(self._state, "stale_count"))
            self._published = None
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the service: workers that wait wake, and their calls raise from now on.

        :meth:`state` and :meth:`stats` still answer.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ServerClosedError("the parameter server is closed.")


def _check_finite(grads: optax.Updates) -> None:
    finite = _all_finite(jax.tree.leaves(grads))
    for (path, _), is_finite in zip(
        jax.tree.leaves_with_path(grads), finite, strict=True
    ):
        if not is_finite:
            where = _checks.place(path)
            raise ValueError(f"grads must be finite, got NaN or inf at {where}.")


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def _all_finite(leaves: list[Any]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(x)) for x in leaves]
