"""Whether trees fit each other, and how messages name their leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._checks import arguments
from gradxform._trees import dtypes, maps
from gradxform._trees.placeholders import state_for
from gradxform._trees.types import Gradient, Leaf, Path, Prefix, PyTree, SparseLeaf, T


def params_given(
    name: str, params: optax.Params | None, hint: str = ""
) -> optax.Params:
    """The parameters; ``ValueError`` if ``update`` was called without them."""
    if params is None:
        raise ValueError(
            f"{name} needs params: call update(updates, state, params).{hint}"
        )
    return params


def params_like(
    name: str, updates: optax.Updates, params: optax.Params | None
) -> optax.Params:
    """The parameters; raises also if updates differ from them in structure or shape."""
    params = params_given(name, params)
    check_shapes("updates", updates, "params", params)
    return params


def check_no_lookahead(
    params: optax.Params,
    state: optax.OptState,
    hint: str = "call tx.update(grads, state, params), and "
    "gradxform.apply_updates(params, updates).",
) -> None:
    """Raises ``TypeError`` if ``optax.lookahead`` keeps two copies of parameters."""
    kinds = optax.LookaheadParams, optax.LookaheadState
    if maps.nodes((params, state), lambda node: isinstance(node, kinds)):
        raise TypeError(
            "optax.lookahead keeps two copies of the parameters, LookaheadParams, and "
            f"takes the gradients of only one, params.fast: {hint}"
        )


def only(name: str, found: Sequence[tuple[Path, Any]], hint: str) -> Any:  # A node.
    """The one node of a state that was looked for, by :func:`maps.nodes`.

    Raises:
      ValueError: there is none, or there are several.
    """
    if not found:
        raise ValueError(f"the state holds no {name}: {hint}.")
    if len(found) > 1:
        paths = ", ".join(path_name(path) for path, _ in found)
        raise ValueError(f"the state holds several {name}, at {paths}: pass one part.")
    return found[0][1]


def check_state_dtype(
    name: str, dtype: jax.typing.DTypeLike | None, *, real_only: bool = False
) -> None:
    """Raises ``TypeError`` unless ``dtype`` is None or one in which state can be kept.

    With ``real_only`` it must not be complex.
    """
    allowed = jnp.floating if real_only else jnp.inexact
    try:
        # NumPy would take an array for its dtype.
        is_array = isinstance(dtype, jax.Array)
        if dtype is None or (not is_array and jnp.issubdtype(dtype, allowed)):
            return
    except TypeError:  # NumPy knows no such dtype.
        pass
    words = "a real floating" if real_only else "a floating or complex"
    raise TypeError(
        f"{name} must be {words} dtype, got {dtype!r}; under "
        "optax.inject_hyperparams name it in static_args."
    )


def check_same_kind(
    name: str, dtype: jax.typing.DTypeLike | None, params: optax.Params
) -> None:
    """Raises ``TypeError`` unless all parameters and ``dtype`` are complex, or none is.

    Otherwise imaginary parts would be lost.
    """
    if dtype is None:
        return
    is_complex = jnp.issubdtype(jnp.dtype(dtype), jnp.complexfloating)
    for path, p in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(dtypes.dtype_of(p), jnp.complexfloating) != is_complex:
            raise TypeError(
                f"{name}={jnp.dtype(dtype)} does not fit {path_name(path)}, which is "
                f"{dtypes.dtype_of(p)}: real leaves need a real dtype, complex ones a "
                "complex dtype."
            )


def prefix(
    name: str, given: Prefix[T], tree: PyTree[Leaf], tree_name: str = "params"
) -> PyTree[T]:
    """One value of a prefix tree for each leaf of ``tree``, as :func:`maps.broadcast`.

    Raises:
      TypeError: it has no value for a leaf, or has one where ``tree`` has nothing; the
        error names the first such path.
    """
    hint = (
        f"Pass one value, or a tree with the keys of {tree_name}, in which one value "
        "may stand for a whole branch."
    )
    if not jax.tree.leaves(tree):  # Nothing to fit, as in `optax.tree.map_params`.
        return tree
    given = maps.prefix_of(given, tree)
    ends = {path for path, _ in maps.leaves_with_path(tree)}
    nodes = {path[:n] for path in ends for n in range(len(path))}
    for path, value in jax.tree.leaves_with_path(given):
        # One below a masked node is for a leaf that another transformation trains.
        if path not in nodes and not ends & {path[:n] for n in range(len(path) + 1)}:
            raise TypeError(
                f"{name} has {value!r} at {path_name(path)}, where {tree_name} has "
                f"nothing. {hint}"
            )
    try:
        return maps.broadcast(given, tree)
    except LookupError as error:
        (path,) = error.args
        raise TypeError(
            f"{name} has no value for {tree_name} at {path_name(path)}. {hint}"
        ) from None


def bools(name: str, given: Prefix[bool], params: optax.Params) -> PyTree[bool]:
    """One bool of a prefix tree for each leaf of ``params``.

    None may be traced, as they decide what is computed.

    Raises:
      TypeError: it holds something else, or is no prefix of ``params``.
    """
    values = prefix(name, given, params)

    def check(path: Path, p: Leaf, value: jax.typing.ArrayLike) -> None:
        if not maps.has_gradient(p):
            return
        traced = isinstance(value, jax.core.Tracer)
        if traced or np.shape(value) or np.asarray(value).dtype != bool:
            raise TypeError(
                f"{name} must hold a bool for each leaf, not traced, got {value!r} for "
                f"{path_name(path)}."
            )

    maps.map_with_path(check, params, values)
    return values


def path_name(path: Path) -> str:
    """The name of the leaf at this path of a tree, for messages."""
    return jax.tree_util.keystr(path) or "the root"


def path_str(path: Path, separator: str = "/") -> str:
    """The name of a leaf for users: its keys with slashes between them."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def by_name(paths: Iterable[Path], separator: str = "/") -> dict[str, list[Path]]:
    """The paths by their names. Keys may hold slashes, so two may have one name."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(path_str(path, separator), []).append(path)
    return found


def named(name: str, given: str, of: str, choices: Mapping[str, list[Path]]) -> Path:
    """The one path with the given name; ``choices`` is from :func:`by_name`.

    Raises:
      ValueError: no path has this name, or several have.
    """
    paths = choices.get(given, [])
    if not paths:
        raise ValueError(
            f"{name} must name {of}, got {given!r}; there are "
            f"{', '.join(map(repr, choices))}."
        )
    if len(paths) > 1:
        raise ValueError(
            f"{name} must name one of {of}, got {given!r}, which is "
            f"{' and '.join(map(path_name, paths))}. Rename one of them."
        )
    return paths[0]


def names(
    name: str,
    given: Collection[str] | Callable[[str], bool],
    of: str,
    paths: Iterable[Path],
) -> Callable[[str], bool]:
    """Whether a name is one of those given; each has to be that of one path."""
    if callable(given):
        return given
    choices = by_name(paths)
    for each in given:
        named(name, each, of, choices)
    return given.__contains__


def fits(leaf: Gradient, reference: Leaf) -> bool:
    """Whether a gradient has the shape of its reference, and loses nothing there.

    A gradient of shape (3, 1) for a parameter of shape (3,) would broadcast, and a
    complex one for a real parameter would lose its imaginary part.
    """
    # A number of Python has no dtype. NumPy takes None for float64.
    is_alike = getattr(leaf, "dtype", "") == getattr(reference, "dtype", None)
    if is_alike or not arguments.is_complex(leaf) or arguments.is_complex(reference):
        return has_shape(leaf, reference)
    return False


def has_shape(leaf: Gradient, reference: Leaf) -> bool:
    """Whether a gradient has the shape of its reference, such as a sum of |g|²."""
    return maps.has_gradient(reference) and np.shape(leaf) == np.shape(reference)


def check_shapes(
    name: str,
    tree: PyTree[Leaf],
    reference_name: str,
    reference: PyTree[Leaf],
    fit: Callable[[Gradient, Leaf], bool] = fits,
    *,
    same_nodes: bool = True,
) -> None:
    """Raises unless two trees have leaves at the same paths, and these ``fit``.

    Shapes are known while tracing, so the check costs nothing in a compiled step.

    Args:
      name: the name of ``tree`` in messages.
      tree: the tree to check; ``None`` (no gradient for this leaf) fits anything.
      reference_name: the name of ``reference`` in messages.
      reference: the tree it must match.
      fit: whether a leaf of ``tree`` fits that of ``reference``.
      same_nodes: whether the nodes must be of the same kinds, too: ``jax.tree.map``
        over both needs that.

    Raises:
      TypeError: the two differ; the error names the first such path.
    """
    flat, wanted = (dict(maps.leaves_with_path(x)) for x in (tree, reference))
    for path in wanted | flat:
        leaf = flat.get(path)
        in_both = path in flat and path in wanted
        if in_both and (not maps.has_gradient(leaf) or fit(leaf, wanted[path])):
            continue
        given = describe(leaf) if path in flat else _node_at(path, tree)
        like = describe(wanted[path]) if path in wanted else "no leaf"
        _differ(name, reference_name, reference, path, given, like)
    if same_nodes and not _same_nodes(tree, reference):
        _differ(name, reference_name, reference, *_other_node(tree, reference))


def _differ(
    name: str,
    reference_name: str,
    reference: PyTree[Leaf],
    path: Path,
    given: str,
    wanted: str,
) -> NoReturn:
    hint = ""
    if any(kind.__module__ == "flax.nnx.module" for kind in type(reference).mro()):
        hint = f" Of an NNX module, {reference_name} is nnx.state(module, nnx.Param)."
    raise TypeError(
        f"{name} and {reference_name} differ at {path_name(path)}: {name} has {given}, "
        f"{reference_name} has {wanted}. Pass {name} with the structure and shapes of "
        f"{reference_name}, real for real ones, and None where there is none.{hint}"
    )


def _node_at(path: Path, tree: PyTree[Leaf]) -> str:
    """What a tree has at the path of a leaf of another tree."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda at, _: at == path, is_leaf_takes_path=True
    )
    found = [node for at, node in nodes if at == path]
    return f"a node {_name(type(found[0]))}, no array" if found else "no leaf"


def _same_nodes(tree: PyTree[Leaf], reference: PyTree[Leaf]) -> bool:
    nodes: Any = maps.structure
    return bool(nodes(tree) == nodes(reference))


def _other_node(tree: PyTree[Leaf], reference: PyTree[Leaf]) -> tuple[Path, str, str]:
    """The first path where two trees have different nodes."""

    def top(
        node: PyTree[Leaf],
    ) -> tuple[list[tuple[Path, PyTree[Leaf]]], jax.tree_util.PyTreeDef]:
        return jax.tree.flatten_with_path(node, is_leaf=lambda x: x is not node)

    (children, node), (wanted_children, wanted) = top(tree), top(reference)
    if node == wanted:
        for (key, child), (_, like) in zip(children, wanted_children, strict=True):
            if not _same_nodes(child, like):
                path, given, expected = _other_node(child, like)
                return (*key, *path), given, expected
    names = _name(type(tree)), _name(type(reference))
    if len(set(names)) == 1:  # One kind, but with other keys or static fields.
        names = str(node), str(wanted)
    has_node = f"a node {names[0]}"
    if maps.is_leaf(reference) or jax.tree_util.all_leaves([reference]):
        return (), has_node, describe(reference)
    return (), has_node, f"a node {names[1]}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def check_own_state(state: optax.OptState, expected: optax.OptState) -> None:
    """Raises ``TypeError`` if a state has not the nodes that ``init`` makes."""
    if not _same_nodes(state, expected):
        raise _not_own(*_other_node(state, expected))


def check_own_shapes(state: optax.OptState, expected: optax.OptState) -> None:
    """Raises ``TypeError`` if a state has not the shapes that ``init`` makes."""
    wanted = dict(jax.tree.leaves_with_path(expected))
    for path, x in jax.tree.leaves_with_path(state):
        if path in wanted and np.shape(x) != np.shape(wanted[path]):
            raise _not_own(path, describe(x), describe(wanted[path]))


def check_own(
    state: optax.OptState, init: optax.TransformInitFn, params: optax.Params | None
) -> None:
    """Raises ``TypeError`` if ``init`` makes a state of other nodes or shapes."""
    expected = None if params is None else state_for(init, maps.described(params))
    if expected is not None:
        check_own_state(state, expected)
        check_own_shapes(state, expected)


@contextlib.contextmanager
def own_state(
    state: optax.OptState, init: optax.TransformInitFn, params: optax.Params | None
) -> Iterator[None]:
    """If a step fails, :func:`check_own` says whether the state is why."""
    try:
        yield
    except Exception:
        check_own(state, init, params)
        raise


def same_shapes(tree: PyTree[Leaf], other: PyTree[Leaf]) -> bool:
    """Whether two trees have as many leaves, and these the same shapes."""
    shapes = ([*map(np.shape, jax.tree.leaves(x))] for x in (tree, other))
    return next(shapes) == next(shapes)


def check_own_kind(state: optax.OptState, kind: type) -> None:
    """Raises ``TypeError`` if a state is not of the class that ``init`` makes."""
    if not isinstance(state, kind):
        raise _not_own((), f"a node {_name(type(state))}", f"a node {_name(kind)}")


def _not_own(path: Path, given: str, wanted: str) -> TypeError:
    return TypeError(
        f"state is not that of tx: at {path_name(path)} it has {given}, and tx.init"
        f"(params) has {wanted}. Pass what tx.init or the last step returned."
    )


# The way out for a module that has more than its parameters.
_DIVIDE = (
    "Pass the arrays of a module alone. Of Equinox: params, rest = eqx.partition("
    "module, eqx.is_inexact_array), and eqx.combine(params, rest) in the loss."
)


def check_arrays(params: optax.Params) -> None:
    """Raises unless parameters are arrays or numbers, and there are any.

    Raises:
      ValueError: there are none.
      TypeError: one is something else; the error names its path.
    """
    flat = jax.tree.leaves_with_path(params)
    if not flat:
        raise ValueError(
            f"params has no array, got {params!r}: pass a tree with at least one."
        )
    check_leaves(params)


def check_leaves(params: optax.Params) -> None:
    """Raises ``TypeError`` at the first parameter that is neither array nor number."""
    for path, p in jax.tree.leaves_with_path(params):
        if not hasattr(p, "dtype") and not isinstance(p, complex | float | int):
            raise TypeError(
                f"params has {p!r} at {path_name(path)}, which is no array. {_DIVIDE}"
            )


def check_learnable(params: optax.Params) -> None:
    """Raises ``TypeError`` at the first parameter that has no derivative."""
    for path, p in maps.leaves_with_path(params):
        if p is not None and not jnp.issubdtype(dtypes.dtype_of(p), jnp.inexact):
            raise TypeError(
                f"params has {describe(p)} at {path_name(path)}, which has no "
                f"gradient: let trainable be False there. {_DIVIDE}"
            )


def check_some_gradient(name: str, grads: optax.Updates) -> None:
    """Raises ``ValueError`` if no leaf has a gradient."""
    if not any(map(maps.has_gradient, jax.tree.leaves(grads))):
        raise ValueError(
            f"{name} has no gradient for any leaf of params; differentiate a loss that "
            "depends on at least one of them."
        )


def is_usable(leaf: object) -> bool:
    """Whether a leaf of a tree holds numbers now: an array, or a number."""
    if isinstance(leaf, SparseLeaf):  # Its other arrays are made from the indices.
        leaf = leaf.values
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer) and not leaf.is_deleted()
    if type(leaf) is np.ndarray:  # Faster than to ask JAX.
        return _is_taken(leaf.dtype)
    return _refusal(leaf) is None


@functools.cache
def _is_taken(dtype: np.dtype[Any]) -> bool:
    return _refusal(np.empty((), dtype)) is None


def _refusal(leaf: object) -> str | None:
    """JAX's words about something that is no array for it; None if it is one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):  # For JAX it has a type.
        return "It has no numbers."
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        return str(error)
    return None


def check_usable(**trees: PyTree[Leaf]) -> None:
    """Raises unless each leaf of some trees, by their names, holds numbers now.

    Raises:
      TypeError: one is traced, or no array that JAX takes, such as a big-endian or a
        masked one; the error names its path.
      RuntimeError: one was deleted, or donated to a program.
    """
    flat = [(x, *pair) for x in trees for pair in jax.tree.leaves_with_path(trees[x])]
    for name, path, leaf in flat:
        if is_usable(leaf):
            continue
        where = path_name(path)
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{name} has a traced array at {where}, which has no numbers yet. Call "
                "this outside of jit, grad and vmap."
            )
        if isinstance(leaf, jax.Array):
            raise RuntimeError(  # As JAX does.
                f"{name} has a deleted array at {where}, {describe(leaf)}: it was "
                "donated to a program, or deleted. Use it before that, or give the "
                "program a copy."
            )
        raise TypeError(_no_array(name, where, leaf))


def _no_array(name: str, where: str, leaf: object) -> str:
    """The words of the error for a leaf that is no array for JAX."""
    if isinstance(leaf, np.ndarray | np.generic):
        given = f"a {type(leaf).__name__} of dtype {leaf.dtype}"
    elif isinstance(leaf, int):
        given = f"an integer of {leaf.bit_length()} bits"
    else:
        given = repr(leaf)
        given = given if len(given) <= 200 else f"{given[:200]}..."
        return f"{name} has {given} at {where}, which is no array."
    why = str(_refusal(leaf)).rstrip(".")
    return f"{name} has {given} at {where}, which JAX does not take: {why}. Convert it."


def check_dtypes(
    name: str, tree: PyTree[Leaf], reference_name: str, reference: PyTree[jax.Array]
) -> None:
    """Raises ``TypeError`` at the first path where two like trees differ in dtype."""
    flat = dict(jax.tree.leaves_with_path(reference))
    for path, leaf in maps.leaves_with_path(tree):
        if maps.has_gradient(leaf) and dtypes.dtype_of(leaf) != flat[path].dtype:
            raise TypeError(
                f"{name} and {reference_name} differ in dtype at {path_name(path)}: "
                f"{name} has {describe(leaf)}, {reference_name} has "
                f"{describe(flat[path])}. Cast it."
            )


def describe(leaf: object) -> str:
    """A leaf's type, for messages."""
    if leaf is None or isinstance(leaf, optax.MaskedNode):
        return repr(leaf)
    if isinstance(leaf, SparseLeaf):
        stored = describe(leaf.values)
        return f"{type(leaf).__name__} of {stored} for {list(leaf.shape)}"
    if isinstance(leaf, np.ndarray | np.generic | complex | float | int):
        # `jax.typeof` gives the dtype that JAX would make of it.
        leaf = jax.core.ShapedArray(np.shape(leaf), dtypes.dtype_of(leaf))
    aval = leaf if isinstance(leaf, jax.core.ShapedArray) else jax.typeof(leaf)
    return aval.str_short()
