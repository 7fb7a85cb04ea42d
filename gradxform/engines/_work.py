"""One gradient of a worker, from its minibatch to the answer, on any engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gradxform._transforms.clipping import global_norm
from gradxform.engines._job import Push, Worker

_norm = jax.jit(global_norm)


class Gradient:
    """The gradient of a number, of parameters that are pulled when it is made."""

    def __init__(self, index: int, number: int, worker: Worker, server: Any) -> None:
        self._push_id = index, number
        self._worker, self._server = worker, server
        self._batch = worker.batch(number)
        if not isinstance(self._batch, tuple | list):  # An array would be unpacked.
            raise TypeError(
                "batch: it must give a tuple, the arguments of gradient behind the "
                f"parameters, got {type(self._batch).__name__}: return (x,)."
            )
        rows = {} if worker.rows is None else worker.rows(*self._batch)
        self._params, self.local_step = server.pull(rows) if rows else server.pull()

    def push(self, ready: Callable[[], object] = lambda: None) -> Push:
        """Computes it, waits until it is ``ready``, and pushes it."""
        worker, params, batch = self._worker, self._params, self._batch
        where: Any = contextlib.nullcontext()
        if worker.device is not None:
            where = jax.default_device(worker.device)
            params, batch = _moved((params, batch), worker.device)
        with where:
            loss, grads = worker.gradient(params, *batch)
            if isinstance(loss, tuple):
                raise TypeError(
                    "gradient: it must give (loss, grads), got a tuple as the loss: "
                    "leave has_aux out."
                )
            norm = _norm(grads)
            extra = {} if worker.extra is None else worker.extra(params, *batch)
        loss, norm = float(loss), float(norm)  # Waits until they are computed.
        ready()
        result = self._server.push(
            grads, self.local_step, push_id=self._push_id, **extra
        )
        return Push(*self._push_id, self.local_step, loss, norm, result)


def _moved(tree: Any, device: jax.Device) -> Any:
    """The same with all arrays on the device."""
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, device) if isinstance(x, (jax.Array, np.ndarray)) else x
        ),
        tree,
    )


def work(
    index: int,
    number: int,
    worker: Worker,
    server: Any,
    sleep: Callable[[float], object],
) -> Push:
    """A gradient in the time that it shall take."""
    gradient = Gradient(index, number, worker, server)
    if worker.duration is None:
        return gradient.push()
    end = time.monotonic() + worker.duration(number)
    return gradient.push(lambda: sleep(max(0.0, end - time.monotonic())))
