"""One gradient of a worker, from its minibatch to the answer, on any engine."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import types
from collections.abc import Callable, Generator
from typing import Any, SupportsFloat, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments, structures
from gradxform._server.placement import is_function
from gradxform._server.records import TakesNoMoreError
from gradxform._transforms.clipping import global_norm
from gradxform._trees import maps
from gradxform._trees.types import T
from gradxform.engines._job import LossAndGrads, Push, Worker

_norm = jax.jit(global_norm)
MaxStaleness: TypeAlias = jax.typing.ArrayLike | optax.Schedule | None
# How late a gradient under way may be at a step; None if no gradient is cancelled.
Limit: TypeAlias = Callable[[int], float] | None


class UnansweredError(Exception):
    """A gradient ends without an answer, though its worker has not failed."""


class GivenUpError(UnansweredError):
    """The gradient became too late while it was computed, and was not pushed."""


class StreamEndedError(UnansweredError):
    """The worker has no more minibatches."""


class RefusedError(UnansweredError):
    """The server takes no more pushes; the argument is the local step of this one."""


class ServerDiedError(UnansweredError):
    """The server died while a worker pulled or pushed; the driver starts another."""


def limit_of(max_staleness: MaxStaleness) -> Limit:
    """``Job.max_staleness``, checked, as a function of the server's step."""
    if max_staleness is None:
        return None
    if not callable(max_staleness):
        number = float(arguments.in_range("max_staleness", max_staleness, "[0, inf]"))
        return lambda global_step: number

    @functools.lru_cache(maxsize=1)  # All workers ask for the same step.
    def limit(global_step: int) -> float:
        # As in `drop_stale`, the schedule calculates with JAX.
        with jax.transfer_guard("allow"):
            step = jnp.asarray(min(global_step, np.iinfo(np.int32).max), jnp.int32)
            most = arguments.scheduled("max_staleness", max_staleness, step, "[0, inf]")
            return float(np.asarray(most))

    return limit


class WorkerGradient:
    """One gradient, by its number; it pulls its parameters when it is made."""

    # The server has `pull`, `push` and `global_step`.
    def __init__(
        self, index: int, number: int, worker: Worker, server: Any, limit: Limit
    ) -> None:
        self._push_id = index, number
        self._began = time.monotonic()
        self._worker, self._server, self._limit = worker, server, limit
        try:
            self._batch = worker.batch(number)
        except StopIteration as end:
            raise StreamEndedError from end
        if not isinstance(self._batch, tuple | list):  # `*` would unpack an array.
            raise TypeError(
                "batch: it must give a tuple, the arguments of gradient after the "
                f"parameters, got {type(self._batch).__name__}: return (x,)."
            )
        rows = {} if worker.rows is None else worker.rows(*self._batch)
        self._params, self.local_step = server.pull(rows, worker.pull_dtype)

    def duration(self, default: float) -> float:
        """The seconds that it should take, if the worker says so."""
        if self._worker.duration is None:
            return default
        index, number = self._push_id
        name = f"duration({number}) of worker {index}, the seconds that its gradient"
        seconds = self._worker.duration(number)
        return float(arguments.in_range(f"{name} takes,", seconds, "[0, inf]"))

    def work(self, sleep: Callable[[float], object]) -> Push:
        """Computes and pushes it, in the time that ``duration`` says.

        Raises:
          UnansweredError: it ends without an answer.
        """
        # No sleep takes longer.
        end = min(time.monotonic() + self.duration(0.0), threading.TIMEOUT_MAX)
        return self.push(lambda: sleep(max(0.0, end - time.monotonic())))

    def is_over(self) -> bool:
        """Whether it has become too late."""
        if self._limit is None:  # Then the server is not asked.
            return False
        global_step = int(self._server.global_step())
        return global_step - self.local_step > self._limit(global_step)

    def push(self, ready: Callable[[], object] = lambda: None) -> Push:
        """Computes it, waits until it is ``ready``, and pushes it.

        Raises:
          GivenUpError: it became too late.
        """
        worker, params, batch = self._worker, self._params, self._batch
        where: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if worker.device is not None:
            where = jax.default_device(worker.device)
            params, batch = _moved((params, batch), worker.device)
        with where:
            given = worker.gradient(params, *batch)
            loss, grads = _pair(in_pieces(given, self.is_over))
            with jax.transfer_guard_host_to_device("allow"):
                norm = _norm(grads)
            extra = {} if worker.extra is None else worker.extra(params, *batch)
        with jax.transfer_guard_device_to_host("allow"):
            loss, norm = float(loss), float(norm)  # Waits until they are computed.
        ready()
        computing = time.monotonic() - self._began
        if self.is_over():
            raise GivenUpError
        extra = {"worker": self._push_id[0], "value": loss, **extra}
        try:
            result = self._server.push(
                grads, self.local_step, push_id=self._push_id, **extra
            )
        except TakesNoMoreError as error:
            raise RefusedError(self.local_step) from error
        answered = *self._push_id, self.local_step, loss, norm, result
        return Push(*answered, computing=computing)


def in_pieces(given: object, is_over: Callable[[], bool]) -> object:
    """The result of a gradient function; a generator is run piece by piece.

    Raises:
      GivenUpError: after one of the pieces, ``is_over`` said so.
    """
    if not isinstance(given, types.GeneratorType):
        return given
    try:
        while True:
            next(given)
            if is_over():
                raise GivenUpError
    except StopIteration as end:
        return end.value
    finally:
        given.close()


def cast_back(worker: Worker, params: optax.Params) -> Worker:
    """A worker whose gradients have the dtypes of the job's parameters.

    It is the worker itself, unless it pulls in a dtype of its own.
    """
    if worker.pull_dtype is None:
        return worker
    like = jax.eval_shape(params if is_function(params) else lambda: params)

    def gradient(*args: object) -> Generator[object, None, LossAndGrads]:
        given = worker.gradient(*args)
        if isinstance(given, types.GeneratorType):
            given = yield from given
        loss, grads = _pair(given)
        structures.check_shapes("grads", grads, "params", like)
        return loss, maps.map_updates(lambda g, p: g.astype(p.dtype), grads, like)

    return worker._replace(gradient=gradient)


def _pair(given: object) -> LossAndGrads:
    """Checks the result of a gradient function; returns loss and gradients."""
    must = "gradient: it must give (loss, grads), as jax.value_and_grad does, "
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(
            f"{must}got {_described(given)}: a function from jax.grad leaves the loss "
            "out."
        )
    loss, grads = given
    has_float = isinstance(loss, SupportsFloat)  # As arrays of any shape and dtype.
    if not has_float or np.iscomplexobj(loss) or np.ndim(loss):
        raise TypeError(
            f"{must}the loss a scalar, got {_described(loss)} as the loss: take its "
            "mean, and leave has_aux out. A function from jax.grad leaves the loss out."
        )
    structures.check_usable(grads=grads)
    return loss, grads


def _described(x: object) -> str:
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return f"{x.dtype}{list(x.shape)}"
    length = f" of {len(x)}" if isinstance(x, tuple | list | dict) else ""
    return f"a {type(x).__name__}{length}"


def _moved(tree: T, device: jax.Device) -> T:
    """The same tree with all arrays on the device."""

    def moved(x: Any) -> Any:  # Of any type.
        return jax.device_put(x, device) if isinstance(x, jax.Array | np.ndarray) else x

    return jax.tree.map(moved, tree)
