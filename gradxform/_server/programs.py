"""The compiled steps of a server, one for each kind of push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from gradxform._checks import structures
from gradxform._gates.counters import dropped, outermost
from gradxform._rows import boundary
from gradxform._rows.stored_rows import padded
from gradxform._server.callbacks import Callbacks
from gradxform._server.placement import Leaves, Specs, bring, built, compiled, traced
from gradxform._server.reader import size_for
from gradxform._steps.apply import applied
from gradxform._trees import dtypes, maps
from gradxform._trees.types import Leaf, PyTree, SparseLeaf

MAX_PROGRAMS = 256  # Each is a compiled step of the model; the oldest goes first.
# A server and its engines give these to any transformation.
_GIVEN = "local_step", "worker"

# (leaves of (params, state), leaves of (grads, extra), local_step)
# -> (leaves of (params, state), counters)
Stepped: TypeAlias = tuple[Leaves, jax.Array]
PushStep: TypeAlias = Callable[[Leaves, Leaves, np.int32], Stepped]
# The structure of (grads, extra), and the types of its leaves.
Types: TypeAlias = tuple[jax.core.ShapedArray, ...]
Signature: TypeAlias = tuple[jax.tree_util.PyTreeDef, Types]


class Prepared(NamedTuple):
    """A push that only waits for its turn."""

    step: PushStep  # Compiled for it.
    leaves: Leaves  # Of (grads, extra), computed and at their places.


class PushProgram(NamedTuple):
    """The program for pushes of one signature."""

    step: PushStep
    shardings: list[Sharding]  # The place where it needs each leaf of (grads, extra).


class PushPrograms:
    """The step of a server, compiled once for each signature of a push.

    It is compiled on the thread that pushes, under that thread's configuration of JAX,
    while other pushes go on. The compiled step runs on any thread.

    Args:
      tx: a transformation behind a gate.
      specs: of the server's arrays.
      donate: whether a step takes the memory of parameters and state.
    """

    def __init__(
        self, tx: optax.GradientTransformation, specs: Specs, donate: bool
    ) -> None:
        self._tx, self._specs, self._donate = tx, specs, donate
        shardings = jax.tree.leaves(specs.shardings["params"])
        everywhere = specs.placement.everywhere
        self._sharding_of = maps.matching(specs.types["params"], shardings, everywhere)
        self._programs: dict[Signature, PushProgram] = {}
        self._compiling = threading.RLock()  # A signal handler may push, too.

    def find(self, leaves: Leaves, tree: jax.tree_util.PyTreeDef) -> PushProgram:
        """The program for a push; ``tree`` is the structure of (grads, extra).

        Raises:
          TypeError: ``grads`` does not fit, or the transformation raises it.
          ValueError: the transformation raises it.
        """
        types = _types(leaves, tree.children()[0].num_leaves)
        signature = tree, types
        if (program := self._programs.get(signature)) is not None:
            return program
        grads, extra = jax.tree.unflatten(tree, leaves)
        # The cheap checks come first: a push that does not fit never costs a trace.
        check_fits(self._specs.types["params"], grads)
        with self._compiling:
            if signature not in self._programs:  # No other thread has compiled it.
                while len(self._programs) >= MAX_PROGRAMS:
                    del self._programs[next(iter(self._programs))]
                self._programs[signature] = self._compiled(signature, grads, extra)
            return self._programs[signature]

    def _compiled(
        self, signature: Signature, grads: optax.Updates, extra: dict[str, Any]
    ) -> PushProgram:
        (tree, types), specs, placement = signature, self._specs, self._specs.placement
        # Each extra argument is a tree of its own.
        shardings = [*self._shardings_of(grads, 0), *self._shardings_of(extra, 1)]
        pushed = [
            placement.abstract(*pair) for pair in zip(types, shardings, strict=True)
        ]

        def step(leaves: Leaves, pushed: Leaves, local_step: np.int32) -> Stepped:
            """The counters are one small array: the host waits for one transfer.

            They are the global step, and how many pushes were dropped: 0 or 1.
            """
            arrays = specs.arrays(leaves)
            params, state = arrays["params"], arrays["state"]
            grads, extra = jax.tree.unflatten(tree, pushed)
            before = dropped(state)
            extra |= {"local_step": local_step}
            params, state = applied(self._tx, grads, state, params, extra, _GIVEN)
            counters = [outermost(state, "global_step"), dropped(state) - before]
            return jax.tree.leaves((params, state)), jnp.stack(counters)

        args = jax.tree.leaves(specs.types), pushed, np.int32(0)
        options: dict[str, Any] = {"donate_argnums": 0} if self._donate else {}
        if placement.committed:  # Along automatic axes the compiler may choose others.
            kept = jax.tree.leaves(specs.shardings)
            options["out_shardings"] = kept, placement.everywhere
        with placement.default_device():
            trace = traced(step, *args, **options)
            callbacks = Callbacks(len(placement.everywhere.device_set))
            if (inside := callbacks.inside(trace)) is None:
                return PushProgram(built(trace), shardings)
            program = compiled(inside, *args, **options)
            return PushProgram(callbacks.around(program), shardings)

    def _shardings_of(self, tree: PyTree[Leaf], depth: int) -> Iterator[Sharding]:
        """A leaf like a parameter has its sharding; others are whole on each device."""
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=maps.is_leaf):
            if maps.has_gradient(leaf):
                # Of a sparse leaf the values and the indices.
                arrays = 1 + isinstance(leaf, SparseLeaf)
                yield from [self._sharding_of(path[depth:], leaf)] * arrays


def prepare(
    require_finite: bool,
    programs: PushPrograms,
    grads: optax.Updates,
    extra: dict[str, Any],
) -> Prepared:
    """Brings a push to where its program needs it, and waits until it is there.

    Raises:
      TypeError: ``grads`` does not fit, or the transformation raises it.
      ValueError: the transformation raises it; or with ``require_finite`` a gradient
        holds NaN or inf.
      RuntimeError: an array is deleted.
    """
    grads = maps.without_float0(grads)
    leaves, tree = jax.tree.flatten((grads, extra), is_leaf=_is_sparse_leaf)
    if not all(map(structures.is_usable, leaves)):
        structures.check_usable(grads=grads, extra=extra)
    if any(map(_is_sparse_leaf, leaves)):
        with jax.transfer_guard("allow"):
            pushed = jax.tree.unflatten(tree, map(in_sizes, leaves))
            leaves, tree = jax.tree.flatten(pushed)
    program = programs.find(leaves, tree)
    leaves = list(map(bring, leaves, program.shardings))
    # Here, before its turn: a worker whose computation takes long or fails does not
    # hold up the others.
    jax.block_until_ready(leaves)
    if require_finite:
        check_finite(jax.tree.unflatten(tree, leaves)[0])
    return Prepared(program.step, leaves)


def _is_sparse_leaf(x: object) -> bool:
    return isinstance(x, SparseLeaf)


def in_sizes(leaf: Leaf) -> Leaf:
    """Pads the rows of a leaf to one of few numbers; returns an array as it is.

    So few programs take all pushes.
    """
    if not isinstance(leaf, SparseLeaf) or leaf.values.ndim != leaf.ndim:
        return leaf
    length = len(leaf.values)
    local = getattr(leaf.values, "is_fully_addressable", True)
    if length == size_for(length) or not local:
        return leaf
    return padded(leaf, size_for(length))


def checked(
    params: PyTree[Any], grads: optax.Updates, extra: dict[str, Any]
) -> optax.Updates:
    """Gradients without ``float0``, after all checks before a push is sent in parts.

    One process finds the same when it prepares the push.

    Raises:
      TypeError: ``grads`` does not fit, or a leaf of either is no array.
      ValueError: no leaf has a gradient.
      RuntimeError: an array is deleted.
    """
    grads = maps.without_float0(grads)
    structures.check_usable(grads=grads, extra=extra)
    check_fits(params, grads)
    structures.check_some_gradient("grads", grads)
    return grads


def check_fits(params: PyTree[Any], grads: optax.Updates) -> None:
    """Raises ``TypeError`` if shapes or dtypes differ, and names the first path.

    The leaves of both may be descriptions.
    """
    structures.check_shapes("grads", grads, "params", params)
    structures.check_dtypes("grads", grads, "params", params)


def check_finite(grads: optax.Updates) -> None:
    """Raises ``ValueError`` if a gradient holds NaN or inf, and names its path."""
    flat = jax.tree.leaves_with_path(grads, is_leaf=maps.is_leaf)
    flat = [(path, leaf) for path, leaf in flat if maps.has_gradient(leaf)]
    with jax.transfer_guard("allow"):  # Some may be numbers of the host.
        finite = np.asarray(_all_finite([leaf for _, leaf in flat]))
    for (path, _), is_finite in zip(flat, finite, strict=True):
        if not is_finite:
            where = structures.path_name(path)
            raise ValueError(f"grads must be finite, got NaN or inf at {where}.")


@jax.jit
def _all_finite(leaves: list[Any]) -> jax.Array:
    return jnp.stack(list(map(boundary.all_finite, leaves)))


def _types(leaves: Leaves, of_grads: int) -> Types:
    """The key by which jit tells arrays apart, but no gradient has a weak type."""
    try:  # For JAX's arrays this is faster than `jax.typeof`.
        types = [x.aval for x in leaves]
    except AttributeError:
        types = [jax.typeof(x) for x in leaves]
    for i, x in enumerate(leaves[:of_grads]):
        if not isinstance(x, jax.Array):  # JAX would take a float64 for a float32.
            types[i] = jax.core.ShapedArray(np.shape(x), dtypes.dtype_of(x))
        elif types[i].weak_type:
            types[i] = types[i].update(weak_type=False)
    return tuple(types)
