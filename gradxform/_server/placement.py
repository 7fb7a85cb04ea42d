"""A server's arrays: their trees, the devices that hold them, how others get there."""

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
from gradxform._devices import host
from gradxform._gates.drop_stale import drop_stale
from gradxform._trees.states import has_gate
from gradxform._trees.types import Leaf, Param, PyTree, T

Arrays: TypeAlias = dict[str, Any]  # What a server holds: "params" and "state".
Leaves: TypeAlias = list[jax.Array]


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
    structures.check_no_lookahead(params, state, hint)
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
        structures.check_arrays(params)
        host.check_served("params", params)
        params = copy(params)
        state = tx.init(params)
        host.check_served("tx.init(params)", state)
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


class Specs:
    """Descriptions of parameters and state, whose arrays every step replaces.

    A server hands lists of leaves around, not trees: with 1M parameters in 16 leaves
    that saves a tenth of a push. The parameters come first.

    Attributes:
      placement: where the arrays lie.
      types: parameters and state, as lowering takes them.
      shardings: of the same structure.
      num_params: how many leaves are parameters.
    """

    def __init__(self, params: optax.Params, state: optax.OptState) -> None:
        arrays = {"params": params, "state": state}
        self.placement = placement = Placement(arrays)
        self.types: Arrays = jax.tree.map(
            lambda x: placement.abstract(x.aval, x.sharding), arrays
        )
        self.shardings = jax.tree.map(lambda x: x.sharding, arrays)
        self._structure = jax.tree.structure(arrays)
        self._params_structure = jax.tree.structure(params)
        self.num_params = len(jax.tree.leaves(params))

    def arrays(self, leaves: list[Any]) -> Arrays:
        """Parameters and state from all leaves, as :meth:`ParameterServer.state`."""
        return jax.tree.unflatten(self._structure, leaves)

    def params(self, leaves: list[Any]) -> optax.Params:
        """The parameters from these leaves, or from what stands for them."""
        return jax.tree.unflatten(self._params_structure, leaves)

    def put(self, state: Arrays) -> Arrays:
        """Parameters and state from any device, brought where the server's lie.

        Raises:
          TypeError: they differ from the server's; the error names the first path.
        """
        leaves = leaves_like("state", state, "the server's state", self.types)
        # A copy first: JAX may share the caller's memory with the part that stays on
        # its device, even with `may_alias=False`.
        arrays = jax.device_put(copy(self.arrays(leaves)), self.shardings)
        if not self.placement.committed:  # `arrays` are committed; this frees them.
            with self.placement.default_device():
                free = compiled(lambda arrays: arrays, self.types, donate_argnums=0)
            arrays = free(arrays)
        return jax.block_until_ready(arrays)


def leaves_like(
    name: str, tree: PyTree[Leaf], reference_name: str, reference: PyTree[Param]
) -> Leaves:
    """The leaves of ``tree``, in the order of ``reference``.

    They are found by path: a loader may have turned tuples into lists, or sorted the
    keys of a dict.

    Raises:
      TypeError: the two differ; the error names the first path.
    """
    structures.check_shapes(name, tree, reference_name, reference, same_nodes=False)
    structures.check_dtypes(name, tree, reference_name, reference)
    given = dict(jax.tree.leaves_with_path(tree))
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(reference):
        if path not in given:
            raise TypeError(
                f"{name} has no array at {structures.path_name(path)}, where "
                f"{reference_name} has one of shape {list(leaf.shape)}."
            )
        leaves.append(given[path])
    return leaves
