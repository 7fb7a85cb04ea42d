"""Where the arrays of a server lie, and how others come there."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from gradxform._late import gate
from gradxform._late.drop_stale import drop_stale
from gradxform._trees import checks


def copy(tree: Any) -> Any:
    """The same on memory of its own, on the same devices, committed to them or not.

    The runtime copies: no program has to be compiled for it.
    """
    tree = jax.tree.map(_own, tree)
    if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
        return jax.device_put(tree, may_alias=False)
    return jax.tree.map(_copy_of_shards, tree)


def _copy_of_shards(x: jax.Array) -> jax.Array:
    """Of an array that other processes have parts of: these do not take part."""
    parts = jax.device_put([s.data for s in x.addressable_shards], may_alias=False)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _own(x: Any) -> Any:
    # Whatever it is told, JAX looks at the memory of NumPy's arrays where it can.
    return np.array(x) if isinstance(x, np.ndarray) else x


def is_function(params: Any) -> bool:
    """Whether it makes parameters. A module may be called as well, and is a tree."""
    return callable(params) and jax.tree_util.all_leaves([params])


def made(params: Any) -> Any:
    """The parameters, where a function gives them."""
    return params() if is_function(params) else params


LOOKAHEAD = (
    "a server applies what workers push to all that it keeps. Give it params.fast and "
    "the optimizer without lookahead."
)


def settle(
    tx: optax.GradientTransformation, params: Any
) -> tuple[optax.GradientTransformation, Any, Any]:
    """A transformation with a gate, and parameters and state where they will stay.

    Where the caller has committed the parameters to devices, the state is committed to
    them, too. Else all is uncommitted, so that JAX lets workers on other devices
    calculate with what they pull.
    """
    params = copy(made(params))
    state = tx.init(params)
    checks.no_lookahead(params, state, LOOKAHEAD)
    if not gate.states(state):
        tx = drop_stale(tx, np.iinfo(np.int32).max)  # A gate that is always open.
        state = tx.init(params)
    arrays = params, copy(state)  # It may hold the parameters themselves.
    place = Place(arrays)
    if place.committed:
        arrays = jax.tree.map(
            lambda x: x if x.committed else jax.device_put(x, place.everywhere), arrays
        )
    return tx, *arrays


class Place:
    """The devices of some arrays.

    Attributes:
      committed: whether one of the arrays is bound to its devices.
      everywhere: the sharding that puts the whole of an array on each of the devices.
    """

    def __init__(self, arrays: Any) -> None:
        leaves = jax.tree.leaves(arrays)
        self.committed = any(x.committed for x in leaves)
        most = max(leaves, key=lambda x: (x.committed, len(x.sharding.device_set)))
        at = most.sharding
        self.everywhere: Sharding = (
            NamedSharding(at.mesh, P()) if isinstance(at, NamedSharding) else at
        )

    def abstract(self, type_: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
        """For lowering: bound to where it lies, if the arrays here are."""
        return jax.ShapeDtypeStruct(
            type_.shape,
            type_.dtype,
            weak_type=type_.weak_type,
            sharding=sharding if self.committed else None,
        )

    def default_device(self) -> contextlib.AbstractContextManager[Any]:
        """Makes what is bound to no device come here."""
        if self.committed:
            return contextlib.nullcontext()
        return jax.default_device(next(iter(self.everywhere.device_set)))

    def put(self, x: np.ndarray[Any, Any]) -> jax.Array:
        """Brings an array of the host here whole, bound if the arrays here are."""
        with self.default_device():
            return jax.device_put(x, self.everywhere if self.committed else None)


def bring(x: Any, sharding: Sharding) -> jax.Array:
    """Brings a pushed array where a program takes it."""
    there = getattr(x, "sharding", None)
    if there == sharding or (there and there.is_equivalent_to(sharding, x.ndim)):
        return x
    return jax.device_put(x, sharding, may_alias=False)
