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
    from jax.extend.core import JaxprEqn

Callback: TypeAlias = Callable[..., Sequence[Any]]
Jaxpr: TypeAlias = Any  # Closed or not; both have one class since JAX 0.12.


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
        evaluate = jaxpr_as_fun(_with_callbacks(closed, self._callback))
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


def has_callbacks(jaxpr: Jaxpr) -> bool:
    """Whether a closed jaxpr calls back to the host."""
    kinds = _kinds_of(jaxpr)

    def has(x: object) -> bool:
        if type(x) is tuple:
            return any(map(has, x))
        eqns: Sequence[JaxprEqn] = x.eqns if isinstance(x, kinds) else ()
        return any(
            _calls_back(eqn) or any(map(has, eqn.params.values())) for eqn in eqns
        )

    return has(jaxpr)


def _calls_back(eqn: JaxprEqn) -> bool:
    return callable(eqn.params.get("callback"))


def _kinds_of(closed: Jaxpr) -> tuple[type[Any], type[Any]]:
    """The classes of jaxprs, open and closed; to import them takes 0.1 seconds."""
    return type(closed.jaxpr), type(closed)


def _with_callbacks(closed: Jaxpr, of: Callable[[JaxprEqn], Callback]) -> Jaxpr:
    """The same jaxpr; ``of(eqn)`` gives the callback of each equation that has one."""
    plain, _ = kinds = _kinds_of(closed)

    def mapped(x: Any) -> Any:  # A parameter of any type.
        if type(x) is tuple:
            return tuple(map(mapped, x))
        if isinstance(x, plain):
            return x.replace(eqns=[of_eqn(eqn) for eqn in x.eqns])
        return x.replace(jaxpr=mapped(x.jaxpr)) if isinstance(x, kinds) else x

    def of_eqn(eqn: JaxprEqn) -> JaxprEqn:
        params = {name: mapped(x) for name, x in eqn.params.items()}
        if _calls_back(eqn):
            params["callback"] = of(eqn)
        return eqn.replace(params=params)

    return mapped(closed)
