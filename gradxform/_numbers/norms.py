"""Norms of trees: one pass over the entries, few kernels, sharded or not."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from gradxform._checks import structures
from gradxform._devices import mesh
from gradxform._devices.mesh import AxisName
from gradxform._jax import compilers
from gradxform._numbers import arithmetic
from gradxform._trees import dtypes, maps
from gradxform._trees.types import Leaf, Path, Prefix, PyTree

# How many leading axes of a leaf stack layers.
StackedAxes: TypeAlias = Prefix[int] | None
# An array for each leaf, with one number for each of its layers.
Layers: TypeAlias = PyTree[jax.Array]

# Arrays of at most _SMALL entries are summed together, up to _TOGETHER in one kernel.
# Every kernel takes milliseconds to compile and microseconds to start: a GPU starts 261
# of them for a clip and Adagrad on GPT-2-small, instead of 348. With more arrays in one
# kernel its operands would take longer to compile than more kernels do.
_SMALL, _TOGETHER = 4096, 32


def check_stacked(stacked_axes: StackedAxes, params: optax.Params) -> PyTree[int]:
    """How many axes stack layers, leaf by leaf.

    Raises:
      TypeError: it does not hold ints.
      ValueError: a leaf has fewer axes.
    """

    def check(path: Path, p: jax.typing.ArrayLike, stacked: object) -> None:
        if isinstance(stacked, bool) or not isinstance(stacked, int):
            raise TypeError(
                f"stacked_axes must hold ints, got {stacked!r}; under "
                "optax.inject_hyperparams name it in static_args."
            )
        if not 0 <= stacked <= jnp.ndim(p):
            where = structures.path_name(path)
            raise ValueError(
                f"stacked_axes must be in [0, {jnp.ndim(p)}] at {where}, a leaf of "
                f"shape {list(jnp.shape(p))}, got {stacked}."
            )

    structures.check_leaves(params)
    axes = structures.prefix("stacked_axes", _or_zero(stacked_axes), params)
    jax.tree.map_with_path(check, params, axes)
    return axes


def _or_zero(stacked_axes: StackedAxes) -> Prefix[int]:
    """The same, but 0 without any. A traced number, which is an error, has no truth."""
    return 0 if stacked_axes is None else stacked_axes


def squared_norms(
    updates: optax.Updates,
    *,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
    squared: bool = False,
) -> tuple[Layers, jax.Array]:
    """``Σ|g|²`` of each layer, and of all together; real, in at least float32.

    A layer is a leaf, or one slice of a leaf's first ``stacked_axes`` axes (an int, or
    a prefix tree of ints; by default none). A leaf that varies over some of the mesh
    axes in ``axis_name`` is sharded there, and its sum runs over them, too. ``squared``
    says that the updates are squares already. Sparse leaves have each entry once.
    """
    sums = functools.partial(_sum_of_squares, squared=squared)
    leaves, treedef = maps.flatten(maps.stored(updates))
    stacked = jax.tree.leaves(maps.broadcast(_or_zero(stacked_axes), updates))
    depths = iter(stacked)
    squares: list[jax.Array | None] = [None] * len(leaves)
    small: dict[int, jax.Array] = {}
    for i, g in enumerate(leaves):
        if not maps.has_gradient(g):
            continue
        x, axes = jnp.asarray(g), next(depths)
        if axes or not _is_small(x):
            squares[i] = sums(x, stacked=axes)
        else:
            small[i] = x
    terms = [s for s in squares if s is not None]
    for members, rows in _together(sums, small):
        terms.append(rows)
        for k, i in enumerate(members):
            squares[i] = rows[k]
    layers = jax.tree.unflatten(treedef, squares)
    if axis_name is not None:
        names = maps.prefix_of(axis_name, updates)
        layers, terms = mesh.sums(layers, names, stacked)
    return layers, total(terms)


def means(
    tree: PyTree[Leaf], *, axis_name: AxisName = None, stacked_axes: StackedAxes = None
) -> Layers:
    """The mean of the entries of each layer; layers as in :func:`squared_norms`.

    ``None`` stays. The entries have the dtype in which they are added up.
    """
    depths = maps.broadcast(_or_zero(stacked_axes), tree)

    def mean(x: jax.Array, stacked: int) -> jax.Array:
        return jnp.mean(x, axis=tuple(range(stacked, x.ndim)))

    layers = maps.map_updates(mean, tree, depths)
    if axis_name is None:
        return layers
    names = maps.prefix_of(axis_name, tree)
    return mesh.layer_means(layers, names, jax.tree.leaves(depths))


def alone(updates: optax.Updates) -> optax.Updates:
    """Updates to take :func:`squared_norms` of, whose squares nothing else shares.

    Otherwise the compiler for CPU writes the squares for AdamW or Adagrad behind: 1 N,
    and 2 N moved. All who ask for the same norms share them. In half precision each sum
    has a barrier of its own, and a second one would cost 0.25 N with a loss inside.
    """
    return maps.map_updates(
        lambda g: g if g.dtype.itemsize < 4 else compilers.unshared(g), updates
    )


def products(
    updates: optax.Updates,
    others: optax.Updates,
    squares: Layers,
    *,
    axis_name: AxisName = None,
    stacked_axes: StackedAxes = None,
) -> tuple[Layers, jax.Array]:
    """``Re⟨g, h⟩`` of each layer, and of all together; as :func:`squared_norms`.

    ``squares`` are those of the layers, which others have computed: they come first.
    """

    def product(
        g: jax.Array, h: jax.typing.ArrayLike, stacked: int, square: jax.Array
    ) -> jax.Array:
        g, h = (_read_again(x, square) for x in (g, jnp.asarray(h)))
        h = h.astype(g.dtype)
        if jnp.iscomplexobj(g):
            return _sum(g.real * h.real + g.imag * h.imag, stacked)
        return _sum(g * h, stacked)

    depths = maps.broadcast(_or_zero(stacked_axes), updates)
    layers = maps.map_updates(product, updates, others, depths, squares)
    terms = jax.tree.leaves(layers)
    if axis_name is not None:
        names = maps.prefix_of(axis_name, updates)
        layers, terms = mesh.sums(layers, names, jax.tree.leaves(depths))
    return layers, total(terms)


def _read_again(x: jax.Array, square: jax.Array) -> jax.Array:
    """The widened array, read once more after its sum of squares is known.

    A bfloat16 array is widened within each sum. For sums of a float16 array, the
    compiler for CPU writes a widened copy, so the sums should share one.
    """
    if x.dtype == jnp.bfloat16:
        return dtypes.widen(compilers.barrier_after(x, square))
    return dtypes.widen(compilers.unshared(x) if x.dtype.itemsize < 4 else x)


def squared_rows(updates: optax.Updates) -> PyTree[jax.Array]:
    """``Σ|g|²`` of each row that is there, over all axes but the first.

    On CPU, barriers keep all of it apart from the clip of the updates. Otherwise it
    would read the clip's results from memory: 1 N, and 7 N moved instead of 4 N. The
    results have a barrier, too, because XLA turns a sum of sums into one sum of all
    entries.
    """

    def sums(g: jax.Array) -> jax.Array:
        squares = arithmetic.abs_sq(compilers.unshared(g))
        return compilers.unshared(_sum(squares, min(1, g.ndim)))

    return maps.map_leaves(
        lambda g: sums(jnp.asarray(g)) if maps.has_gradient(g) else g,
        maps.stored(updates),
    )


@functools.partial(jax.jit, static_argnames=("stacked", "squared"))  # Traced once.
def _sum_of_squares(x: jax.Array, *, stacked: int, squared: bool) -> jax.Array:
    if x.dtype.itemsize < 4:
        x = compilers.unshared(x)
    return _sum(x if squared else arithmetic.abs_sq(x), stacked)


def _sum(x: jax.Array, stacked: int) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(stacked, x.ndim)))


def _is_small(x: jax.Array) -> bool:
    """Whether it has few entries, on one device; sharded arrays do not count."""
    mesh = jax.typeof(x).sharding.mesh
    on_one = mesh.empty or mesh.size == 1
    return x.size <= _SMALL and on_one


def _together(
    sums: Callable[..., jax.Array], arrays: dict[int, jax.Array]
) -> Iterator[tuple[list[int], jax.Array]]:
    """The sum of each of the arrays; arrays of one type share a kernel."""

    def grouped(*members: jax.Array) -> jax.Array:
        # Without the barrier every reader of one sum would compute them all again.
        stacked = jnp.stack(members)
        return jax.lax.optimization_barrier(sums(stacked, stacked=1))

    def one_by_one(*members: jax.Array) -> jax.Array:
        return jnp.stack([sums(x, stacked=0) for x in members])

    groups = collections.defaultdict(list)
    for i, x in arrays.items():
        groups[x.shape, x.dtype].append(i)
    for members in groups.values():
        for start in range(0, len(members), _TOGETHER):
            batch = members[start : start + _TOGETHER]
            # A TPU prefetches small arrays one by one, at no cost. So do slices, which
            # may be those of several arrays.
            chosen = compilers.off_tpu(grouped, one_by_one)
            yield batch, chosen(*(arrays[i] for i in batch))


def total(terms: list[jax.Array]) -> jax.Array:
    """The sum of all entries, in the widest of their dtypes."""
    sums = [jnp.sum(term) for term in terms]
    dtype = max((s.dtype for s in sums), key=lambda d: d.itemsize, default=jnp.float32)
    return sum((s.astype(dtype) for s in sums), jnp.zeros((), dtype))
