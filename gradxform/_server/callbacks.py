"""The callbacks of a step to the host, on whatever thread the runtime calls them."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from gradxform._server.records import summary
from gradxform._trees.types import T

if TYPE_CHECKING:
    from jax.extend.core import (
        ClosedJaxpr,
        JaxprEqn,
    )

Callback: TypeAlias = Callable[..., Sequence[Any]]


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

    def inside(self, step: Callable[..., T], *args: object) -> Callable[..., T]:
        """The same step, for such arguments, with this object around each callback."""
        from jax.extend.core import jaxpr_as_fun

        closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
        evaluate = jaxpr_as_fun(_map(closed, kinds_of(closed), self._callback))
        tree = jax.tree.structure(shape)
        return lambda *args: jax.tree.unflatten(tree, evaluate(*jax.tree.leaves(args)))

    def _callback(self, eqn: JaxprEqn) -> Callback:
        callback: Callback = eqn.params["callback"]
        types: list[Any] = [x.aval for x in eqn.outvars]  # Of arrays.

        def call(*args: object) -> Sequence[Any]:
            try:
                return self._context.copy().run(callback, *args)
            except Exception as error:
                if self._devices == 1:
                    raise
                self._errors.append(error)
                return [np.zeros(x.shape, x.dtype) for x in types]

        return call


def has_callbacks(closed: ClosedJaxpr) -> bool:
    """Whether the jaxpr calls back to the host."""
    found: list[JaxprEqn] = []
    _map(closed, kinds_of(closed), found.append)
    return bool(found)


# The classes of closed jaxprs and of jaxprs, which are one since JAX 0.12. To import
# them would take a tenth of a second.
Kinds: TypeAlias = tuple[type[Any], type[Any]]


def kinds_of(closed: ClosedJaxpr) -> Kinds:
    """The classes of this one and of the jaxpr in it."""
    return type(closed), type(closed.jaxpr)


def _map(x: Any, kinds: Kinds, of_callback: Callable[[JaxprEqn], object]) -> Any:
    """Replaces callbacks in a jaxpr, or in a parameter that may hold jaxprs."""
    closed, plain = kinds
    if type(x) is tuple:
        return tuple(_map(each, kinds, of_callback) for each in x)
    if isinstance(x, plain):
        return x.replace(eqns=[_mapped(eqn, kinds, of_callback) for eqn in x.eqns])
    if isinstance(x, closed):
        return x.replace(jaxpr=_map(x.jaxpr, kinds, of_callback))
    return x


def _mapped(
    eqn: JaxprEqn, kinds: Kinds, of_callback: Callable[[JaxprEqn], object]
) -> JaxprEqn:
    params = {name: _map(x, kinds, of_callback) for name, x in eqn.params.items()}
    if callable(params.get("callback")):
        params["callback"] = of_callback(eqn)
    return eqn.replace(params=params)
