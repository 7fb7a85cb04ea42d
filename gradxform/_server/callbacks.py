"""The callbacks of a step to the host, on whatever thread the runtime calls them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gradxform._jax import jaxprs
from gradxform._server.records import summary
from gradxform._trees.types import T

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class Callbacks:
    """What lies around the callbacks of one program.

    They run in the context of the thread that runs the program. So a callback that asks
    the server of that program gets an error, on any thread. On several devices an error
    of a callback is raised when the program is done: if one of the devices fails, the
    others wait for it until XLA ends the process.

    Args:
      devices: on how many the program runs.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._context = contextvars.Context()
        self._errors: list[Exception] = []
        self._found = False

    def around(self, program: Callable[..., T]) -> Callable[..., T]:
        """The same program, which raises its callbacks' errors."""

        def run(*args: object) -> T:
            self._context = contextvars.copy_context()
            self._errors.clear()
            result = jax.block_until_ready(program(*args))
            for error in self._errors:
                raise jax.errors.JaxRuntimeError(
                    f"a callback of tx has failed, {summary(error)}"
                ) from error
            return result

        return run

    def inside(self, traced: jax.stages.Traced) -> Callable[..., Any] | None:
        """The function that was traced, with this object around each callback.

        None if it has no callback.
        """
        from jax.extend.core import jaxpr_as_fun

        replaced = jaxprs.replaced(traced.jaxpr, self._around)
        if not self._found:
            return None
        evaluate = jaxpr_as_fun(replaced)
        tree = jax.tree.structure(traced.out_info)
        return lambda *args: jax.tree.unflatten(tree, evaluate(*jax.tree.leaves(args)))

    def _around(self, eqn: JaxprEqn) -> JaxprEqn:
        """The same equation; a callback in it runs in the context of the program."""
        callback: Callable[..., Sequence[Any]] | None = eqn.params.get("callback")
        if not callable(callback):
            return eqn
        self._found = True
        types: list[Any] = [x.aval for x in eqn.outvars]  # Of arrays.

        def call(*args: object) -> Sequence[Any]:
            try:
                return self._context.copy().run(callback, *args)
            except Exception as error:
                if self._devices == 1:
                    raise
                self._errors.append(error)
                return [np.zeros(x.shape, x.dtype) for x in types]

        return eqn.replace(params=eqn.params | {"callback": call})
