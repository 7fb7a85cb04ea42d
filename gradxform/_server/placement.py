"""The devices that hold a server's arrays, and how other arrays get there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from gradxform._checks import structures
from gradxform._gates.counters import has_gate
from gradxform._gates.drop_stale import drop_stale
from gradxform._trees.types import PyTree, T

Arrays: TypeAlias = dict[str, Any]  # What a server holds: "params" and "state".


def copy(tree: T) -> T:
    """A copy in memory of its own, on the same devices, committed or not as before.

    The runtime copies, so no program has to be compiled.
    """
    # JAX may share the memory of a NumPy array, even with `may_alias=False`.
    tree = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, tree)
    if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
        return jax.device_put(tree, may_alias=False)
    return jax.tree.map(_copy_of_shards, tree)


def _copy_of_shards(x: jax.Array) -> jax.Array:
    """Copies this process's parts of an array; the other processes take no part."""
    parts = jax.device_put([s.data for s in x.addressable_shards], may_alias=False)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def compiled(f: Callable[..., T], *args: object, **options: Any) -> Callable[..., T]:
    """Compiles ``f`` for such arguments, with these options of ``jax.jit``.

    The program takes numbers of the host, also under ``jax_transfer_guard``. It runs
    under ``jax_disable_jit`` as well.
    """
    return built(traced(f, *args, **options))


def traced(f: Callable[..., T], *args: object, **options: Any) -> jax.stages.Traced:
    """The first half of :func:`compiled`."""
    with jax.disable_jit(False):
        return jax.jit(f, **options).trace(*args)


def built(traced: jax.stages.Traced) -> Callable[..., Any]:
    """The second half of it."""
    with jax.disable_jit(False):
        return functools.partial(_run, traced.lower().compile())


def _run(program: Callable[..., T], *args: object) -> T:
    with jax.transfer_guard_host_to_device("allow"), jax.disable_jit(False):
        return program(*args)


def is_function(params: object) -> TypeGuard[Callable[[], optax.Params]]:
    """Whether it makes parameters. A module is callable too, but it is a tree."""
    return callable(params) and jax.tree_util.all_leaves([params])


def with_gate(
    tx: optax.GradientTransformation, params: optax.Params, state: optax.OptState
) -> optax.GradientTransformation:
    """``tx`` itself, or in a gate that is always open if its state has none.

    Raises:
      TypeError: it is ``optax.lookahead``.
    """
    hint = (
        "a server applies pushes to all its parameters. Give it params.fast, and the "
        "optimizer without lookahead."
    )
    structures.no_lookahead(params, state, hint)
    has = has_gate(state, "global_step")
    return tx if has else drop_stale(tx, np.iinfo(np.int32).max)


def initialize(
    tx: optax.GradientTransformation, params: optax.Params
) -> tuple[optax.GradientTransformation, optax.Params, optax.OptState]:
    """A transformation with a gate, and parameters and state where they will stay.

    If the caller has committed the parameters to devices, the state is committed to
    them, too. Otherwise all is uncommitted, so that workers on other devices can
    calculate with the arrays that they pull.
    """
    with jax.transfer_guard("allow"):  # Every zero in a first state is a transfer.
        params = params() if is_function(params) else params
        structures.arrays(params)
        params = copy(params)
        state = tx.init(params)
        gated = with_gate(tx, params, state)
        if gated is not tx:
            state = gated.init(params)
    arrays = params, copy(state)  # It may hold the parameters themselves.
    placement = Placement(arrays)
    if placement.committed:
        arrays = jax.tree.map(
            lambda x: x if x.committed else jax.device_put(x, placement.everywhere),
            arrays,
        )
    return gated, *arrays


class Placement:
    """The devices of some arrays.

    Attributes:
      committed: whether one of the arrays is committed (bound) to its devices.
      everywhere: the sharding that puts the whole of an array on each of the devices.
    """

    def __init__(self, arrays: PyTree[jax.Array]) -> None:
        leaves = jax.tree.leaves(arrays)
        self.committed = any(x.committed for x in leaves)
        most = max(leaves, key=lambda x: (x.committed, len(x.sharding.device_set)))
        at = most.sharding
        self.everywhere: Sharding = (
            NamedSharding(at.mesh, P()) if isinstance(at, NamedSharding) else at
        )

    def abstract(
        self, type_: jax.ShapeDtypeStruct | jax.core.ShapedArray, sharding: Sharding
    ) -> jax.ShapeDtypeStruct:
        """A description for lowering, with a sharding if the arrays are committed."""
        return jax.ShapeDtypeStruct(
            type_.shape,
            type_.dtype,
            weak_type=type_.weak_type,
            sharding=sharding if self.committed else None,
        )

    def default_device(self) -> contextlib.AbstractContextManager[Any]:
        """Sends uncommitted arrays to this placement, if it is uncommitted itself."""
        if self.committed:
            return contextlib.nullcontext()
        return jax.default_device(next(iter(self.everywhere.device_set)))

    def put(self, x: np.ndarray[Any, Any]) -> jax.Array:
        """Brings a whole NumPy array here, committed if the arrays here are."""
        with self.default_device():
            return jax.device_put(x, self.everywhere if self.committed else None)


def bring(
    x: jax.Array | np.ndarray[Any, Any] | float, sharding: Sharding
) -> jax.typing.ArrayLike:
    """Brings a pushed array to where a program needs it; a number stays."""
    if isinstance(x, (int, float)):  # The program itself takes these faster.
        return x
    there = getattr(x, "sharding", None)
    if there == sharding or (there and there.is_equivalent_to(sharding, x.ndim)):
        return x
    return jax.device_put(x, sharding, may_alias=False)
