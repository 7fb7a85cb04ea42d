"""Validation with one message shape: the argument, the allowed values, the given one.

Only concrete values are checked. A traced value (a hyperparameter under ``jit``,
``vmap`` or ``optax.inject_hyperparams``) passes: its value is not known yet. One that
misses the end of its range by a rounding is that end, traced or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradxform._trees import dtypes, maps, versions
from gradxform._trees.types import (
    Gradient,
    Leaf,
    Path,
    Prefix,
    PyTree,
    SparseLeaf,
    T,
)

COUNTS = f"[1, {np.iinfo(np.int32).max}]"  # For counts, which are int32 on devices.
_REAL = (jnp.floating, jnp.integer)
# How far a schedule may miss a number: the end of its range, or an integer. Compilers
# make n · (1 / n) of n / n, with an error of 2^-24. So a schedule through numbers up to
# 128 misses its end by at most this. Its own end may be 0, and says nothing about that.
ROUNDING = 2.0**-17


def scalar(name: str, value: Any, *, integer: bool = False) -> None:  # Of any type.
    """Raises ``TypeError`` unless ``value`` is a real scalar, or an integer one.

    A traced value is checked, too.
    """
    if type(value) is int:  # Of any size: NumPy could not hold all of them.
        return
    dtype = dtypes.dtype_of(value)
    is_right = jnp.issubdtype(dtype, jnp.integer) if integer else is_real(value)
    if np.shape(value) or not is_right:
        kind = "an integer" if integer else "a real"
        raise TypeError(f"{name} must be {kind} scalar, got {value!r}.")


def in_range(
    name: str, value: Any, interval: str, *, integer: bool = False
) -> Any:  # Any kind of number.
    """A real scalar inside ``interval``, such as ``"[0, 1)"``; a traced value passes.

    A number in a JAX array may come from a schedule. So it may be the end of the range,
    and outside by a rounding it becomes that end, see :func:`to_end`. Any other number
    is what a person wrote. A complex number without an imaginary part is real, see
    :func:`real`. An int that no int32 holds comes back as a float, which JAX takes.
    With ``integer`` it has to be an integer, traced or not.

    Raises:
      TypeError: ``value`` is not a real scalar, or not an integer one.
      ValueError: ``value`` is outside the interval, or NaN; or the interval excludes
        inf, and JAX would round ``value`` to inf.
    """
    if integer:
        scalar(name, value, integer=True)
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    has_low, has_high = interval.startswith("["), interval.endswith("]")
    value = real(value)
    if isinstance(value, jax.Array):
        value = to_end(value, low, high)
        has_low, has_high = has_low or low > -math.inf, has_high or high < math.inf
    if isinstance(value, jax.core.Tracer):
        return value
    given = value
    if type(value) is int and abs(value) > np.iinfo(np.int32).max:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf if value > 0 else -math.inf
    array = np.asarray(value)
    if array.shape or not is_real(array):
        raise TypeError(f"{name} must be a real scalar in {interval}, got {value!r}.")
    number = array.item()
    if jnp.issubdtype(array.dtype, jnp.floating):  # An end is rounded as the number is.
        with np.errstate(over="ignore"):
            low, high = (float(np.asarray(end, array.dtype)) for end in (low, high))
    above = low <= number if has_low else low < number
    below = number <= high if has_high else number < high
    if not (above and below):  # NaN compares false with everything and ends here.
        shown = given if type(given) is int else number
        raise ValueError(f"{name} must be in {interval}, got {shown!r}.")
    widest = jnp.finfo(jnp.result_type(float))  # float64 only with jax_enable_x64.
    if "inf]" not in interval and abs(number) > float(widest.max):
        raise ValueError(f"{name} must be finite in {widest.dtype}, got {number!r}.")
    return value


def to_end(value: Any, low: float, high: float) -> Any:  # As `in_range`.
    """The end of a range that a number misses by a rounding; any other as it is."""
    if not jnp.issubdtype(dtypes.dtype_of(value), jnp.floating):
        return value
    traced = isinstance(value, jax.core.Tracer)
    x, own = (value, jnp) if traced else (np.asarray(value), np)
    eps = float(jnp.finfo(x.dtype).eps)  # An end such as 1/3 is rounded itself.
    below = (x < low) & (x >= low - ROUNDING - eps * abs(low))
    above = (x > high) & (x <= high + ROUNDING + eps * abs(high))
    if not (traced or np.any(below | above)):
        return value
    x = own.where(below, low, own.where(above, high, x)).astype(x.dtype)
    return x


def is_real(value: object) -> bool:
    """Whether a value, traced or not, holds real numbers."""
    return any(jnp.issubdtype(dtypes.dtype_of(value), kind) for kind in _REAL)


def is_known(value: jax.typing.ArrayLike, number: float) -> bool:
    """Whether a value is this number; a traced value may be any number.

    NumPy compares: while JAX traces, it would trace the comparison with an array, too.
    """
    return not isinstance(value, jax.core.Tracer) and bool(np.asarray(value) == number)


def scheduled(
    name: str, schedule: optax.Schedule, global_step: jax.Array, interval: str
) -> jax.typing.ArrayLike:
    """A schedule's number for a global step; raises like :func:`in_range`."""
    name = f"{name}(global_step)"
    value: jax.typing.ArrayLike = schedule(global_step)
    scalar(name, value)
    return whole(in_range(name, value, interval))


def whole(value: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """The nearest integer if a number for counts misses it by a rounding.

    Its own size counts, too: 1,000 may be missed by 1,000 times as much as 1.
    """
    if not jnp.issubdtype(dtypes.dtype_of(value), jnp.floating):
        return value
    traced = isinstance(value, jax.core.Tracer)
    x, own = (value, jnp) if traced else (np.asarray(value), np)
    nearest = own.round(x)
    most = ROUNDING * own.maximum(1, abs(nearest))
    is_missed = (nearest + most >= x) & (x + most >= nearest)  # No inf - inf.
    return own.where(is_missed, nearest, x)


def real(value: T) -> T:
    """The real part of a complex number that is traced or has no imaginary part.

    Any other value is returned as it is. ``optax.inject_hyperparams`` makes all numbers
    complex if parameters are complex.
    """
    if not _is_complex(value):
        return value
    known = not isinstance(value, jax.core.Tracer)
    real_part: T = value.real  # type: ignore[attr-defined]  # Its dtype is complex.
    return value if known and np.any(np.asarray(value).imag != 0) else real_part


def at_most_one(**arguments: object) -> None:
    """Raises ``ValueError`` if more than one of the arguments is not None."""
    pairs = arguments.items()
    given = [f"{name}={value!r}" for name, value in pairs if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"at most one of {', '.join(arguments)} may be given, got "
            f"{', '.join(given)}."
        )


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of the allowed words."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {words}, got {value!r}.")


def extra_argument(
    transformation: str, name: str, value: jax.typing.ArrayLike | None, meaning: str
) -> jax.typing.ArrayLike:
    """An extra argument of ``update``; ``TypeError`` if it is missing."""
    if value is None:
        raise TypeError(
            f"{transformation} needs {name}: pass update(..., {name}={name}), "
            f"{meaning} these gradients."
        )
    return value


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
    same_shapes("updates", updates, "params", params)
    return params


def local_step(transformation: str, value: jax.typing.ArrayLike | None) -> jax.Array:
    """The local step of a push as an int32 scalar; ``TypeError`` if it is not one."""
    meaning = "the global step that the worker saw before it computed"
    value = extra_argument(transformation, "local_step", value, meaning)
    scalar("local_step", value, integer=True)
    if not isinstance(value, jax.Array):  # To check an array may mean to wait for it.
        in_range("local_step", value, f"[0, {np.iinfo(np.int32).max}]")
    return dtypes.saturated(value)


def transformation(name: str, value: object) -> None:
    """Raises ``TypeError`` unless ``value`` has ``init`` and ``update``."""
    if not all(callable(getattr(value, f, None)) for f in ("init", "update")):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, with init and update, "
            f"got {value!r}."
        )


def no_lookahead(
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


def flags(**arguments: bool) -> None:
    """Raises ``TypeError`` unless each argument is a bool, which is not traced."""
    for name, value in arguments.items():
        if not isinstance(value, bool | np.bool):
            raise TypeError(f"{name} must be True or False, not traced, got {value!r}.")


def flag(name: str, value: Any) -> jax.Array:  # Of any type.
    """A bool, which may be traced, as an array; ``TypeError`` if it is none."""
    if np.shape(value) or dtypes.dtype_of(value) != jnp.bool:
        raise TypeError(f"{name} must be a bool, or an array bool[], got {value!r}.")
    return jnp.asarray(value)


def non_negative(**arguments: jax.typing.ArrayLike) -> list[Any]:  # As `in_range`.
    """The arguments, each a finite scalar ≥ 0; raises like :func:`in_range`."""
    return [in_range(name, value, "[0, inf)") for name, value in arguments.items()]


def length(name: str, value: Any, interval: str) -> int:  # Any kind of number.
    """The length of an axis: an integer inside ``interval``, which is not traced."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a shape, so it cannot be traced; under "
            f"optax.inject_hyperparams name {name.split('[')[0]} in static_args."
        )
    return int(in_range(name, value, interval, integer=True))


def state_dtype(
    name: str, dtype: jax.typing.DTypeLike | None, *, complex_too: bool = False
) -> None:
    """Raises ``TypeError`` unless ``dtype`` is None or one in which state can be kept.

    With ``complex_too`` it may be complex, too.
    """
    if dtype is None:
        return
    allowed = jnp.inexact if complex_too else jnp.floating
    try:
        # NumPy would take an array for its dtype.
        is_array = isinstance(dtype, jax.Array)
        if not is_array and jnp.issubdtype(np.dtype(dtype), allowed):
            return
    except TypeError:  # NumPy knows no such dtype.
        pass
    words = "a floating or complex" if complex_too else "a real floating"
    raise TypeError(
        f"{name} must be {words} dtype, got {dtype!r}; under "
        "optax.inject_hyperparams name it in static_args."
    )


def of_same_kind(
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


def named(name: str, given: str, of: str, known: Mapping[str, list[Path]]) -> Path:
    """The one path with the given name; ``known`` is from :func:`by_name`.

    Raises:
      ValueError: no path has this name, or several have.
    """
    paths = known.get(given, [])
    if not paths:
        raise ValueError(
            f"{name} must name {of}, got {given!r}; there are "
            f"{', '.join(map(repr, known))}."
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
    known = by_name(paths)
    for each in given:
        named(name, each, of, known)
    return given.__contains__


def fits(leaf: Gradient, reference: Leaf) -> bool:
    """Whether a gradient has the shape of its reference, and loses nothing there.

    A gradient of shape (3, 1) for a parameter of shape (3,) would broadcast, and a
    complex one for a real parameter would lose its imaginary part.
    """
    return (
        maps.has_gradient(reference)
        and np.shape(leaf) == np.shape(reference)
        and (_is_complex(reference) or not _is_complex(leaf))
    )


def same_shapes(
    name: str,
    tree: PyTree[Leaf],
    reference_name: str,
    reference: PyTree[Leaf],
    fit: Callable[[Gradient, Leaf], bool] = fits,
) -> None:
    """As :func:`same_leaves`, and the nodes are of the same kinds.

    ``jax.tree.map`` over both needs that.
    """
    same_leaves(name, tree, reference_name, reference, fit)
    if not _same_nodes(tree, reference):
        _differ(name, reference_name, reference, *_other_node(tree, reference))


def same_leaves(
    name: str,
    tree: PyTree[Leaf],
    reference_name: str,
    reference: PyTree[Leaf],
    fit: Callable[[Gradient, Leaf], bool] = fits,
) -> None:
    """Raises unless two trees have leaves at the same paths, and these ``fit``.

    Shapes are known while tracing, so the check costs nothing in a compiled step.

    Args:
      name: the name of ``tree`` in messages.
      tree: the tree to check; ``None`` (no gradient for this leaf) fits anything.
      reference_name: the name of ``reference`` in messages.
      reference: the tree it must match.
      fit: whether a leaf of ``tree`` fits that of ``reference``.

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


def own_state(state: optax.OptState, expected: optax.OptState) -> None:
    """Raises ``TypeError`` if a state has not the nodes that ``init`` makes."""
    if not _same_nodes(state, expected):
        raise _not_own(*_other_node(state, expected))


def own_kind(state: optax.OptState, kind: type) -> None:
    """Raises ``TypeError`` if a state is not of the class that ``init`` makes."""
    if not isinstance(state, kind):
        raise _not_own((), f"a node {_name(type(state))}", f"a node {_name(kind)}")


def _not_own(path: Path, given: str, wanted: str) -> TypeError:
    return TypeError(
        f"state is not that of tx: at {path_name(path)} it has {given}, and tx.init"
        f"(params) has {wanted}. Pass what tx.init or the last step returned."
    )


def arrays(params: optax.Params) -> None:
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
    for path, p in flat:
        if not hasattr(p, "dtype") and not isinstance(p, complex | float | int):
            raise TypeError(
                f"params has {p!r} at {path_name(path)}, which is no array. Pass the "
                "arrays of a module alone: those of Equinox are "
                "eqx.filter(module, eqx.is_inexact_array)."
            )


def is_usable(leaf: object) -> bool:
    """Whether a leaf of a tree holds numbers now: an array, or a number."""
    if isinstance(leaf, jax.Array):
        return not isinstance(leaf, jax.core.Tracer) and not leaf.is_deleted()
    return hasattr(leaf, "dtype") or isinstance(leaf, complex | float | int)


def usable(name: str, tree: PyTree[Leaf]) -> None:
    """Raises unless each leaf of a tree holds numbers now.

    Raises:
      TypeError: one is no array, or traced; the error names its path.
      RuntimeError: one was deleted, or donated to a program.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        if is_usable(leaf):
            continue
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{name} has a traced array at {path_name(path)}, which has no numbers "
                "yet. Call this outside of jit, grad and vmap."
            )
        if isinstance(leaf, jax.Array):
            raise RuntimeError(  # As JAX does.
                f"{name} has a deleted array at {path_name(path)}, {describe(leaf)}: "
                "it was donated to a program, or deleted. Use it before that, or give "
                "the program a copy."
            )
        raise TypeError(f"{name} has {leaf!r} at {path_name(path)}, which is no array.")


def not_while_tracing(method: str) -> None:
    """Raises ``RuntimeError`` if JAX traces the caller, so that it would run once."""
    # Outside of all transformations nothing of JAX runs here: a signal's handler may
    # raise at any moment, and JAX gives its caches' users another error then.
    if versions.is_outside():
        return
    # Inside of jit JAX traces each operation, also one on an array that is known.
    with jax.transfer_guard("allow"):
        if not isinstance(jnp.zeros(()), jax.core.Tracer):
            return
    raise RuntimeError(
        f"{method} was called while JAX traces a function, as inside of jit or "
        "scan. There it would run once, and its result would be a constant of the "
        "program. Call it outside, and pass its result to the function."
    )


def same_dtypes(
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


def _is_complex(value: object) -> bool:
    return jnp.issubdtype(dtypes.dtype_of(value), jnp.complexfloating)


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
