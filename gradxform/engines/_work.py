"""One gradient of a worker, from its minibatch to the answer, on any engine."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Callable, Generator
from typing import SupportsFloat, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._server.placement import is_function
from gradxform._server.records import AnsweredError, TakesNoMoreError
from gradxform._transforms.clipping import global_norm
from gradxform._trees import checks, maps
from gradxform._trees.types import T
from gradxform.engines._job import LossAndGrads, Push, Server, Worker
from gradxform.engines._stops import GivenUpError, in_pieces

_norm = jax.jit(global_norm)
ARRAYS = jax.Array, np.ndarray, np.generic


class StreamEndedError(Exception):
    """The worker has no more minibatches."""


class RefusedError(Exception):
    """The server takes no more pushes; the argument is the local step of this one."""


class SupersededError(Exception):
    """The server has answered this push, and a later one of the same worker.

    Another worker was first, as this one had passed its deadline.
    """


class ServerDiedError(Exception):
    """The server died while a worker pulled or pushed; the driver starts another."""


class Gradient:
    """One gradient, by its number; it pulls its parameters when it is made."""

    def __init__(self, index: int, number: int, worker: Worker, server: Server) -> None:
        self._push_id = index, number
        self._began = time.monotonic()
        self._worker, self._server = worker, server
        try:
            self._batch = worker.batch(number)
        except StopIteration as end:
            raise StreamEndedError from end
        except ValueError as error:
            if str(error) == "generator already executing":
                error.add_note(
                    "Two workers draw from one stream at once: give each a stream of "
                    "its own, or let batch draw under a lock."
                )
            raise
        if not isinstance(self._batch, tuple | list):  # `*` would unpack an array.
            raise TypeError(
                "batch: it must give a tuple, the arguments of gradient after the "
                f"parameters, got {type(self._batch).__name__}: return (x,)."
            )
        rows = {} if worker.rows is None else worker.rows(*self._batch)
        self._params, self.local_step = server.pull(rows, worker.pull_dtype)

    def push(
        self,
        ready: Callable[[], object] = lambda: None,
        is_over: Callable[[int], bool] = lambda local_step: False,
    ) -> Push:
        """Computes it, waits until it is ``ready``, and pushes it.

        Raises:
          GivenUpError: it became too late, as ``is_over(local_step)`` says.
        """

        def over() -> bool:
            return is_over(self.local_step)

        worker, params, batch = self._worker, self._params, self._batch
        where: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if worker.device is not None:
            where = jax.default_device(worker.device)
            params, batch = _moved((params, batch), worker.device)
        with where:
            given = worker.gradient(params, *batch)
            loss, grads = _pair(in_pieces(given, over))
            with jax.transfer_guard_host_to_device("allow"):
                norm = _norm(grads)
            extra = {} if worker.extra is None else worker.extra(params, *batch)
        with jax.transfer_guard_device_to_host("allow"):
            loss, norm = float(loss), float(norm)  # Waits until they are computed.
        ready()
        computing = time.monotonic() - self._began
        if over():
            raise GivenUpError
        extra = {"worker": self._push_id[0], "value": loss, **extra}
        try:
            result = self._server.push(
                grads, self.local_step, push_id=self._push_id, **extra
            )
        except TakesNoMoreError as error:
            raise RefusedError(self.local_step) from error
        except AnsweredError as error:
            raise SupersededError from error
        answered = *self._push_id, self.local_step, loss, norm, result
        return Push(*answered, computing=computing)


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
        checks.same_shapes("grads", grads, "params", like)
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
    if isinstance(loss, tuple):
        raise TypeError(f"{must}got a tuple as the loss: leave has_aux out.")
    if not _is_real_scalar(loss):
        raise TypeError(
            f"{must}the loss a scalar, got {_described(loss)} as the loss: take its "
            "mean. A function from jax.grad leaves the loss out."
        )
    return loss, grads


def _is_real_scalar(x: object) -> TypeGuard[SupportsFloat]:
    if not isinstance(x, ARRAYS):
        return isinstance(x, SupportsFloat)
    return x.shape == () and not jnp.issubdtype(x.dtype, jnp.complexfloating)


def _described(x: object) -> str:
    if isinstance(x, ARRAYS):
        return f"{x.dtype}{list(x.shape)}"
    length = f" of {len(x)}" if isinstance(x, tuple | list | dict) else ""
    return f"a {type(x).__name__}{length}"


def _moved(tree: T, device: jax.Device) -> T:
    """The same tree with all arrays on the device."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, device) if isinstance(x, (jax.Array, np.ndarray)) else x
        ),
        tree,
    )


def duration(index: int, number: int, worker: Worker) -> float | None:
    """The seconds that a gradient should take; None if the worker does not say."""
    if worker.duration is None:
        return None
    name = f"duration({number}) of worker {index}, the seconds that its gradient takes,"
    return float(checks.in_range(name, worker.duration(number), "[0, inf]"))


def work(
    index: int,
    number: int,
    worker: Worker,
    server: Server,
    sleep: Callable[[float], object],
    is_over: Callable[[int], bool],
) -> Push:
    """Computes and pushes a gradient, in the time that ``duration`` says.

    Raises:
      StreamEndedError: there is no minibatch for it.
      RefusedError: the server does not take it.
      SupersededError: the server has taken it from another worker.
      GivenUpError: it became too late before it was pushed.
    """
    gradient = Gradient(index, number, worker, server)
    seconds = duration(index, number, worker)
    if seconds is None:
        return gradient.push(is_over=is_over)
    # No sleep takes longer.
    end = min(time.monotonic() + seconds, threading.TIMEOUT_MAX)
    return gradient.push(lambda: sleep(max(0.0, end - time.monotonic())), is_over)
