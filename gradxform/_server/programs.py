"""The compiled steps of a server, and the places of its arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from gradxform._late import gate
from gradxform._late.counters import dropped, outermost
from gradxform._late.worker_mean import num_workers_of
from gradxform._server.placement import Arrays, Placement, bring, compiled, copy
from gradxform._server.rows import RowPrograms, in_sizes
from gradxform._server.sharded import ShardedParams
from gradxform._training.apply import apply_gradients
from gradxform._transforms.measure_cosine import cosines
from gradxform._trees import checks, maps
from gradxform._trees.indexed_slices import IndexedSlices, is_sparse
from gradxform._trees.types import Leaf, Param, PyTree

MAX_PROGRAMS = 256  # Each is a compiled step of the model; the oldest goes first.


# (leaves of (params, state), leaves of (grads, extra), local_step)
# -> (leaves of (params, state), counters)
# It takes leaves, not trees: with 1M parameters in 16 leaves that saves a tenth.
Leaves: TypeAlias = list[jax.Array]
Stepped: TypeAlias = tuple[Leaves, jax.Array]
Step: TypeAlias = Callable[[Leaves, Leaves, np.int32], Stepped]
# The structure of (grads, extra), the types of its leaves, and `jax_disable_jit`.
Types: TypeAlias = tuple[jax.core.ShapedArray, ...]
Signature: TypeAlias = tuple[jax.tree_util.PyTreeDef, Types, bool]


class Program(NamedTuple):
    """The program for pushes of one signature."""

    step: Step
    shardings: list[Sharding]  # The place where it needs each leaf of (grads, extra).


class Refusal(NamedTuple):
    """The error for a signature that the transformation does not accept."""

    kind: type[Exception]
    message: str


class PushPrograms:
    """The step of a server, compiled once for each signature of a push.

    It is compiled on the thread that pushes, under that thread's configuration of JAX,
    while other pushes go on. The compiled step runs on any thread.

    Args:
      tx: a transformation behind a gate.
      params: the parameters, settled.
      state: the state of ``tx``, settled.
      donate: whether a step takes the memory of parameters and state.
      require_finite: whether gradients must be finite.
      sharded: how the arrays lie over several processes; None for one process. With it,
        a push brings the parts of this process.

    Attributes:
      devices: how many hold the parameters.
      gated: whether parameters change only where the global step does. If a gate lies
        inside another transformation, that one may still change them.
      num_workers: for how many workers a :func:`worker_mean` in ``tx`` has a row; None
        without one.
      rows: the programs that read rows of the parameters.
      sharded: as given.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: optax.Params,
        state: optax.OptState,
        donate: bool,
        require_finite: bool,
        sharded: ShardedParams | None = None,
    ) -> None:
        self._tx, self._donate, self.sharded = tx, donate, sharded
        self.gated = gate.guard_of(tx) is not None
        self._require_finite = require_finite
        arrays = params, state
        self._placement = place = Placement(arrays)
        self.devices = len(place.everywhere.device_set)
        self._shardings = jax.tree.map(lambda x: x.sharding, arrays)
        self._arrays = jax.tree.map(
            lambda x: place.abstract(x.aval, x.sharding), arrays
        )
        self._structure = jax.tree.structure(arrays)
        self._params_structure: jax.tree_util.PyTreeDef = jax.tree.structure(params)
        self.num_workers = num_workers_of(state)
        self.rows = RowPrograms(self._arrays[0], place)
        self._params = {
            path: (x.shape, x.sharding) for path, x in jax.tree.leaves_with_path(params)
        }
        self._programs: dict[Signature, Program | Refusal] = {}
        self._compiling = threading.RLock()  # A signal handler may push, too.

    def trees(self, leaves: Leaves) -> Arrays:
        """Parameters and state from these leaves."""
        return jax.tree.unflatten(self._structure, leaves)

    def state(self, leaves: Leaves) -> dict[str, Any]:
        """The same as :meth:`ParameterServer.state` gives them."""
        return _named(self.trees(leaves))

    def like(self, leaves: Leaves) -> dict[str, Any]:
        """Describes the parameters and state that will replace these leaves.

        If they lie over several processes, they are deleted, to make room.
        """
        if not self.sharded:
            return self.state(leaves)
        for x in leaves:
            x.delete()
        return _named(self._arrays)

    def leaves_of_params(self, leaves: Leaves) -> Leaves:
        """The leaves of a version that are parameters."""
        return leaves[: self._params_structure.num_leaves]

    def params(self, leaves: list[Any]) -> optax.Params:
        """The parameters from these leaves."""
        return jax.tree.unflatten(self._params_structure, leaves)

    def prepare(
        self, grads: optax.Updates, extra: dict[str, Any]
    ) -> tuple[Step, Leaves]:
        """The compiled step for a push, and its leaves, computed and at their places.

        Raises:
          TypeError: ``grads`` does not fit, or the transformation raises it.
          ValueError: the transformation raises it, or it has no row for ``worker``.
        """
        worker, n = extra.get("worker"), self.num_workers
        if n is not None and worker is not None:
            # In the compiled step it is traced, and `worker_mean` would drop the push.
            checks.integer_scalar("worker", worker)
            checks.in_range("worker", jax.device_get(worker), f"[0, {n})")
        if self.sharded:
            return self._prepare_parts(self.sharded, grads, extra)
        grads = maps.without_float0(grads)
        leaves, tree = jax.tree.flatten((grads, extra), is_leaf=is_sparse)
        if IndexedSlices in map(type, leaves):
            with jax.transfer_guard("allow"):
                pushed = jax.tree.unflatten(tree, map(in_sizes, leaves))
                leaves, tree = jax.tree.flatten(pushed)
        program = self._program(leaves, tree)
        if [getattr(x, "sharding", None) for x in leaves] != program.shardings:
            leaves = list(map(bring, leaves, program.shardings))
        # Here, not under the lock: a worker whose computation takes long or fails does
        # not hold up the others.
        jax.block_until_ready(leaves)
        if self._require_finite:
            _check_finite(jax.tree.unflatten(tree, leaves)[0])
        return program.step, leaves

    def _prepare_parts(
        self, sharded: ShardedParams, grads: optax.Updates, extra: dict[str, Any]
    ) -> tuple[Step, Leaves]:
        """The same for the parts of one of several processes, without the others."""
        if self._require_finite:  # Before `bring`: an array of the mesh asks everybody.
            _check_finite(grads)
        pushed = sharded.bring(grads), sharded.bring(extra, depth=1)
        leaves, tree = jax.tree.flatten(pushed)
        return self._program(leaves, tree).step, jax.block_until_ready(leaves)

    def _program(self, leaves: Leaves, tree: jax.tree_util.PyTreeDef) -> Program:
        types = _types(leaves, tree.children()[0].num_leaves)
        signature = tree, types, jax.config.jax_disable_jit
        program = self._programs.get(signature)
        if program is None:
            program = self._compile(signature, *jax.tree.unflatten(tree, leaves))
        if isinstance(program, Refusal):
            raise program.kind(program.message)
        return program

    def place(self, state: dict[str, Any]) -> Arrays:
        """Parameters and state from any device, brought where the server's lie.

        Raises:
          TypeError: they differ from the server's; the error names the first path.
        """
        # By path, into the server's own structure: a loader may have turned tuples into
        # lists, or sorted the keys of a dict.
        own = _named(self._arrays)
        if self.sharded:  # Parts, or arrays of the mesh.
            names = enumerate(own)
            state = {k: self.sharded.own(state[k], of=i) for i, k in names}
        leaves = _leaves_like("state", state, "the server's state", own)
        if self.sharded:
            return jax.block_until_ready(self.trees(leaves))
        # A copy first: JAX may share the caller's memory with the part that stays on
        # its device, even with `may_alias=False`.
        return self._placed(copy(self.trees(leaves)))

    def _placed(self, arrays: Arrays) -> Arrays:
        placed = jax.device_put(arrays, self._shardings)
        if not self._placement.committed:  # `placed` is committed; this frees it.
            with self._placement.default_device():
                free = compiled(lambda arrays: arrays, self._arrays, donate_argnums=0)
            placed = free(placed)
        return jax.block_until_ready(placed)

    def _compile(
        self, signature: Signature, grads: optax.Updates, extra: dict[str, Any]
    ) -> Program | Refusal:
        # The cheap checks come first: a push that does not fit never costs a trace.
        if self.sharded is None:  # Otherwise `Message.of` has checked it.
            checks.same_shapes("grads", grads, "params", self._arrays[0])
            checks.same_dtypes("grads", grads, "params", self._arrays[0])
        with self._compiling:
            known = self._programs.get(signature)
            if known is not None:  # Another thread has compiled it meanwhile.
                return known
            while len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            try:
                program = self._compiled(signature, grads, extra)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                self._programs[signature] = Refusal(kind, str(error))
                raise
            self._programs[signature] = program
            return program

    def _compiled(
        self, signature: Signature, grads: optax.Updates, extra: dict[str, Any]
    ) -> Program:
        tree, types, by_hand = signature
        shardings = [
            *self._shardings_of(grads, 0),
            *self._shardings_of(extra, 1),  # Each argument is a tree of its own.
        ]
        pushed = [
            self._placement.abstract(*pair)
            for pair in zip(types, shardings, strict=True)
        ]

        def step(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            params, state = self.trees(leaves)
            grads, extra = jax.tree.unflatten(tree, pushed)
            if self.sharded:
                (params, state), grads, extra = self.sharded.entered(
                    self._tx.init, (params, state), grads, extra
                )
            params, state = apply_gradients(
                self._tx, grads, state, params, local_step=local_step, **extra
            )
            # One small array, so that the host waits for one transfer.
            counters = [outermost(state, "global_step"), dropped(state)]
            counters += [as_bits(x) for x in cosines(state)[:1]]
            if self.sharded:
                params, state = self.sharded.left((params, state))
            return jax.tree.leaves((params, state)), jnp.stack(counters)

        def step_by_hand(
            leaves: Leaves, pushed: Leaves, local_step: np.int32
        ) -> Stepped:
            with jax.disable_jit(), jax.transfer_guard("allow"):
                with self._placement.default_device():
                    leaves, counters = step(leaves, pushed, local_step)
                return jax.tree.leaves(self._placed(self.trees(leaves))), counters

        if by_hand and not self.sharded:
            return Program(step_by_hand, shardings)
        with self._placement.default_device():
            program = compiled(
                step,
                jax.tree.leaves(self._arrays),
                pushed,
                np.int32(0),
                donate_argnums=0 if self._donate else (),
                # Along automatic axes the compiler may choose other shardings.
                out_shardings=(
                    jax.tree.leaves(self._shardings),
                    self._placement.everywhere,
                )
                if self._placement.committed
                else None,
            )
            return Program(program, shardings)

    def _shardings_of(self, tree: PyTree[Leaf], depth: int) -> Iterator[Sharding]:
        """A leaf like a parameter has its sharding; others are whole on each device."""
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=maps.is_leaf):
            if isinstance(leaf, IndexedSlices):
                yield from [self._placement.everywhere] * 2  # Values and indices.
            elif maps.has_gradient(leaf):
                shape, sharding = self._params.get(path[depth:], (None, None))
                yield (
                    sharding if shape == np.shape(leaf) else self._placement.everywhere
                )


def _named(arrays: Arrays) -> dict[str, Any]:
    return dict(zip(("params", "state"), arrays, strict=True))


def as_bits(x: jax.Array) -> jax.Array:
    """The bits of a float32 as an int32, to travel in an array of int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _types(leaves: Leaves, of_grads: int) -> Types:
    """The key by which jit tells arrays apart, but no gradient has a weak type."""
    try:  # For JAX's arrays this is faster than `jax.typeof`.
        types = [x.aval for x in leaves]
    except AttributeError:
        types = [jax.typeof(x) for x in leaves]
    for i, x in enumerate(types[:of_grads]):
        if x.weak_type:
            types[i] = x.update(weak_type=False)
    return tuple(types)


def _leaves_like(
    name: str, tree: PyTree[Leaf], reference_name: str, reference: PyTree[Param]
) -> Leaves:
    """The leaves of ``tree``, sorted by path into the order of ``reference``."""
    checks.same_shapes(name, tree, reference_name, reference, nodes=False)
    checks.same_dtypes(name, tree, reference_name, reference)
    given = dict(jax.tree.leaves_with_path(tree))
    leaves = []
    for path, leaf in jax.tree.leaves_with_path(reference):
        if path not in given:
            raise TypeError(
                f"{name} has no array at {checks.path_name(path)}, where "
                f"{reference_name} has one of shape {list(leaf.shape)}."
            )
        leaves.append(given[path])
    return leaves


def _check_finite(grads: optax.Updates) -> None:
    flat = jax.tree.leaves_with_path(grads, is_leaf=maps.is_leaf)
    flat = [(path, leaf) for path, leaf in flat if maps.has_gradient(leaf)]
    with jax.transfer_guard("allow"):  # Some may be numbers of the host.
        finite = np.asarray(_all_finite([leaf for _, leaf in flat]))
    for (path, _), is_finite in zip(flat, finite, strict=True):
        if not is_finite:
            where = checks.path_name(path)
            raise ValueError(f"grads must be finite, got NaN or inf at {where}.")


@jax.jit
def _all_finite(leaves: list[Any]) -> jax.Array:
    return jnp.stack(list(map(maps.all_finite, leaves)))
