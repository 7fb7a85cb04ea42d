"""Donated memory: shared arrays are copied first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from gradxform._checks import structures
from gradxform._checks.keywords import Jitted
from gradxform._trees import maps
from gradxform._trees.types import PyTree

_HOST_LIMIT = (
    "XLA gives a program for a GPU 64 GB of the host's memory, unless the environment "
    "variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says more. Its allocator takes more "
    "than the arrays need, so leave some memory free."
)


class Donating:
    """A jitted ``step(params, state, *batch, **words)`` that takes its arrays' memory.

    Memory can be taken once, and only if nobody else needs it. The state of some
    optimizers begins with the parameters' own arrays: D-adaptation measures how far
    they have moved. Other states begin with an array that the caller gave as a
    hyperparameter, and the states of all workers share it. Such arrays are copied
    before the step. The step returns new arrays, so this happens only once.

    Args:
      step: the function, jitted, with these arguments donated.
      tx: the transformation whose state it takes.
      params_too: whether ``params`` are donated, or only the state.
    """

    lower: Callable[..., jax.stages.Lowered]

    def __init__(
        self,
        step: Jitted,
        tx: optax.GradientTransformation,
        *,
        params_too: bool,
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._tx, self._params_too = step, tx, params_too
        # These make it a jax.stages.Wrapped.
        for name in ("lower", "trace", "eval_shape"):
            setattr(self, name, getattr(step, name))
        self._captured: list[jax.Array] | None = None

    def __call__(
        self,
        params: optax.Params,
        state: optax.OptState,
        /,
        *batch: object,
        **words: object,
    ) -> Any:  # What the step returns.
        """Runs the step; copies arrays that anybody else holds."""
        donated: PyTree[jax.Array] = (params, state) if self._params_too else state
        kept = (batch, words) if self._params_too else (params, batch, words)
        leaves, structure = jax.tree.flatten(donated)
        if self._captured is None:
            structures.check_arrays(params)
            self._captured = _captured(self._tx, params)
        elsewhere = set(map(id, [*jax.tree.leaves(kept), *self._captured]))
        mine = set(map(id, leaves))
        if len(mine) < len(leaves) or not mine.isdisjoint(elsewhere):
            for i, x in enumerate(leaves):
                if id(x) in elsewhere and _has_memory(x):
                    # The runtime copies, so no program has to be compiled.
                    leaves[i] = jax.device_put(x, may_alias=False)
                elsewhere.add(id(x))
            donated = jax.tree.unflatten(structure, leaves)
            params, state = donated if self._params_too else (params, donated)
        try:
            return self._step(params, state, *batch, **words)
        except jax.errors.JaxRuntimeError as error:
            if "gpu_host_bfc" in str(error):  # The name of XLA's allocator.
                error.add_note(_HOST_LIMIT)
            raise

    def __getattr__(self, name: str) -> Any:
        """The other attributes of the jitted function."""
        return getattr(self._step, name)

    def __reduce__(self) -> tuple[Callable[..., Donating], tuple[object, ...]]:
        """It can be pickled if the jitted function can."""
        make = functools.partial(Donating, params_too=self._params_too)
        return make, (self._step, self._tx)


def _has_memory(x: object) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _captured(
    tx: optax.GradientTransformation, params: optax.Params
) -> list[jax.Array]:
    """Arrays that ``tx.init`` holds, and that a new state may begin with."""
    params = maps.stored(params)
    try:
        return jax.make_jaxpr(tx.init)(params).consts
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        # It reads values, so it has to run. What it holds is in each of its states.
        once, again = (jax.tree.leaves(tx.init(params)) for _ in range(2))
        return [x for x in once if any(x is y for y in again)]
