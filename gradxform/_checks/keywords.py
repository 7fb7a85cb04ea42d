"""The keywords of a compiled function: which are static, who reads them, who does not.

Whatever a user hands over by keyword reaches somebody, or is an error. A leaf that is
an array or a number is traced. Any other one is static: a flag, a string, a function.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax

from gradxform._checks import structures
from gradxform._jax import versions
from gradxform._trees import states
from gradxform._trees.extra_args import Words, words_of

# A loop may give these to any transformation, and optax drops them.
CONVENTIONAL = "value", "grad", "value_fn"
_ARRAYS = (
    *(jax.Array, np.ndarray, np.generic, int, float, complex),
    *(jax.ShapeDtypeStruct, jax.core.ShapedArray),
)
# What JAX raises where a program needs the value of a number.
_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def is_static(x: object) -> bool:
    """Whether a leaf is neither an array nor a number."""
    if isinstance(x, bool | str | enum.Enum):  # Some of them are numbers for Python.
        return True
    return not (isinstance(x, _ARRAYS) or hasattr(type(x), "__jax_array__"))


class _Static(NamedTuple):
    """The static leaves of a keyword; ``True`` and ``1`` are equal, but their types."""

    name: str
    structure: Hashable
    leaves: tuple[tuple[int, type, Hashable], ...]


Statics: TypeAlias = tuple[_Static, ...]


def divided(
    keywords: Mapping[str, Any],
    keeps_bools: Callable[[str], bool] = lambda name: False,
) -> tuple[Statics, dict[str, Any]]:
    """The static leaves of keywords, and their arrays by the same names.

    Raises:
      TypeError: a static leaf has no hash.
    """
    statics: list[_Static] = []
    arrays: dict[str, Any] = {}
    for name, value in sorted(keywords.items()):
        leaves, structure = jax.tree.flatten(value)
        static = {
            i: x
            for i, x in enumerate(leaves)
            if is_static(x) and not (isinstance(x, bool) and keeps_bools(name))
        }
        if not static:
            arrays[name] = value
            continue
        for i, x in static.items():
            _check_hash(name, value, i, x)
        found = tuple((i, type(x), x) for i, x in static.items())
        statics.append(_Static(name, structure, found))
        if len(static) < len(leaves):
            arrays[name] = {i: x for i, x in enumerate(leaves) if i not in static}
    return tuple(statics), arrays


def joined(statics: Statics, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that were divided."""
    keywords = dict(arrays)
    for name, structure, leaves in statics:
        found = arrays.get(name, {}) | {i: x for i, _, x in leaves}
        keywords[name] = jax.tree.unflatten(
            structure, [x for _, x in sorted(found.items())]
        )
    return keywords


def _check_hash(name: str, value: object, index: int, x: object) -> None:
    try:
        hash(x)
    except TypeError:
        path, _ = jax.tree.leaves_with_path(value)[index]
        where = jax.tree_util.keystr(path)
        raise TypeError(
            f"the keyword {name}{where} is a {type(x).__name__}, which is neither an "
            "array nor hashable. What is no array is static: the function is compiled "
            "for each value of it, and finds that by its hash. Make it a tuple, a "
            "frozenset or a frozen dataclass, or bind it with functools.partial."
        ) from None


class Jitted:
    """``jax.jit(f)``, whose keywords may hold leaves that are no arrays: static ones.

    It is compiled once for each of their values.

    Args:
      f: a function of trees of arrays, and of keywords.
      trees: how many of its first arguments are parameters and states. Those after them
        are a batch.
      keeps_bools: says whether a bool is an array in a keyword of this name, beside
        these arguments.
      donate_argnums: as in ``jax.jit``.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        *,
        trees: int,
        keeps_bools: Callable[[str, tuple[Any, ...]], bool] = lambda name, args: False,
        donate_argnums: tuple[int, ...] = (),
    ) -> None:
        functools.update_wrapper(self, f)
        self._trees, self._keeps_bools = trees, keeps_bools

        def run(statics: Statics, /, *args: Any, **arrays: Any) -> Any:
            try:
                return f(*args, **joined(statics, arrays))
            except _NOT_KNOWN as error:
                _explain(error, arrays)
                raise

        # Programs and JAX's errors have the names of the arguments. JAX fails if a
        # keyword has the name of one, too, which is by position only.
        signature = inspect.signature(f)
        first = inspect.Parameter("statics_", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [
            x.replace(name=f"{x.name}_") if x.kind is x.POSITIONAL_ONLY else x
            for x in signature.parameters.values()
        ]
        named = signature.replace(parameters=[first, *parameters])
        vars(run)["__signature__"] = named
        run.__name__, run.__qualname__ = f.__name__, f.__qualname__
        donated = [n + 1 for n in donate_argnums]
        self._jitted = jax.jit(run, static_argnums=0, donate_argnums=donated)

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Runs the function."""
        statics, arrays = self._checked(args, keywords)
        return self._jitted(statics, *args, **arrays)

    def lower(self, /, *args: Any, **keywords: Any) -> jax.stages.Lowered:
        """As of a jitted function; what it compiles takes the arrays alone."""
        statics, arrays = self._checked(args, keywords)
        return self._jitted.lower(statics, *args, **arrays)

    def trace(self, /, *args: Any, **keywords: Any) -> jax.stages.Traced:
        """As of a jitted function."""
        statics, arrays = self._checked(args, keywords)
        return self._jitted.trace(statics, *args, **arrays)

    def eval_shape(self, /, *args: Any, **keywords: Any) -> Any:
        """As of a jitted function."""
        statics, arrays = self._checked(args, keywords)
        return self._jitted.eval_shape(statics, *args, **arrays)

    def __getattr__(self, name: str) -> Any:
        """The other attributes of the jitted function."""
        if name == "_jitted":  # It is being made, from a pickle.
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def _checked(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Statics, dict[str, Any]]:
        batch = args[self._trees :]
        if any(map(is_static, jax.tree.leaves(batch))):
            _raise_static(batch)
        if not keywords:
            return (), {}
        return divided(keywords, lambda name: self._keeps_bools(name, args))


def _raise_static(batch: tuple[Any, ...]) -> None:
    """Raises ``TypeError`` for the first leaf of a batch that is no array."""
    for path, x in jax.tree.leaves_with_path(batch):
        if is_static(x):
            raise TypeError(
                f"the batch has {_short(x)} at {structures.path_name(path)}, which is "
                "no array. By position only arrays and numbers are taken. Pass it by "
                "keyword: there it is static, and the function is compiled for each "
                "value of it."
            )


def _explain(error: Exception, arrays: Mapping[str, Any]) -> None:
    """Adds to JAX's error about a number whose value is not known, which it may be."""
    if names := [k for k, x in arrays.items() if any(map(_is_number, _leaves(x)))]:
        error.add_note(
            f"A number in a keyword is an array here: {_listed(names)}. If the "
            f"function needs its value, bind it: functools.partial(f, {names[0]}=...)."
        )


def _leaves(x: Any) -> list[Any]:
    leaves: list[Any] = jax.tree.leaves(x)
    return leaves


def _is_number(x: Any) -> bool:
    """Whether an array was a number of Python."""
    return not np.shape(x) and bool(getattr(x, "weak_type", False))


def named_by(tx: optax.GradientTransformation, state: optax.OptState) -> frozenset[str]:
    """The extra arguments that a transformation names; gates in it do, at any depth."""
    return words_of(tx).names | states.words(state)


def routed(
    keywords: Mapping[str, Any], loss: Words, named: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of a loss, and those of a transformation that names some.

    One that both name goes to both. A loss that takes any keyword gets those that the
    transformation does not name.
    """
    of_loss = {
        k: x
        for k, x in keywords.items()
        if k in loss.names or (loss.others and k not in named)
    }
    extra = {k: x for k, x in keywords.items() if k not in of_loss or k in named}
    return of_loss, extra


def check_read(
    tx: optax.GradientTransformation,
    state: optax.OptState,
    extra: Mapping[str, Any],
    update: Callable[[dict[str, Any]], Any],
    *,
    loss: Words | None = None,
    given: Collection[str] = (),
) -> None:
    """Raises ``TypeError`` if nobody reads an extra argument.

    If ``tx`` takes any keyword and names another one, its update is traced, with the
    arrays of that keyword alone as its inputs.

    Args:
      tx: the transformation.
      state: its state.
      extra: its extra arguments.
      update: ``update(extra)`` runs it.
      loss: what the loss takes, if there is one.
      given: further words that need no reader.
    """
    unknown = {k: x for k, x in extra.items() if k not in {*CONVENTIONAL, *given}}
    if not unknown:
        return
    named = named_by(tx, state)
    unknown = {k: x for k, x in unknown.items() if k not in named}
    if not unknown:
        return
    lost = [*unknown]
    if others := words_of(tx).others:
        known = named | (loss.names if loss else frozenset())
        slips = [k for k in unknown if slip(k, known)]
        try:
            lost = _unread(lambda words: update({**extra, **words}), unknown)
        except TypeError:  # A gate misses the word that is meant.
            if not slips:
                raise
            lost = slips
        for k, x in unknown.items():
            # Nobody can see who reads what is no array. To a step it is new.
            is_static = not any(map(_is_traced, _leaves(x)))
            if is_static and (k in slips or (loss and _leaves(x))):
                lost.append(k)
    if lost:
        raise TypeError(_words_of_error(lost[0], loss, named, others=others))


def check_loss_reads(
    loss_fn: Callable[[dict[str, Any]], Any],
    of_loss: dict[str, Any],
    loss: Words,
    named: Collection[str],
) -> None:
    """Raises ``TypeError`` if a loss with ``**kwargs`` drops a slip in a gate's word.

    ``loss_fn(of_loss)`` runs it. It is traced a second time only if there may be such
    a slip. What it drops otherwise, as of a batch with many names, nobody else misses.
    """
    others = {k: x for k, x in of_loss.items() if k not in loss.names}
    slips = {
        k: x
        for k, x in others.items()
        if slip(k, named) and not any(map(is_static, _leaves(x)))
    }
    for word in _unread(lambda words: loss_fn({**of_loss, **words}), slips):
        raise TypeError(_words_of_error(word, loss, named, others=False))


def check_slips(extra: Collection[str], named: Collection[str]) -> None:
    """Raises ``TypeError`` if an extra argument is one slip away from one of these.

    Any other may be for another transformation of the same chain.
    """
    for word in {*extra}.difference(named, CONVENTIONAL, states.KNOWN_WORDS):
        if slip(word, named):
            raise TypeError(_words_of_error(word, None, named, others=False))


def slip(word: str, known: Collection[str]) -> str | None:
    """The word of these, or of the conventional ones, that is one slip away."""
    alike = [x for x in {*known, *CONVENTIONAL} if abs(len(x) - len(word)) <= 1]
    return next(iter(difflib.get_close_matches(word, sorted(alike), 1, 0.75)), None)


def _is_traced(x: object) -> bool:
    return isinstance(x, bool) or not is_static(x)


def _unread(
    update: Callable[[dict[str, Any]], Any], words: dict[str, Any]
) -> list[str]:
    """Those of some keywords whose arrays no equation of an update reads."""
    leaves = {
        k: {i: x for i, x in enumerate(_leaves(value)) if _is_traced(x)}
        for k, value in words.items()
    }
    leaves = {k: found for k, found in leaves.items() if found}

    def run(arrays: dict[str, dict[int, Any]]) -> Any:
        filled = dict(words)
        for k, found in arrays.items():
            old, structure = jax.tree.flatten(words[k])
            new = [found.get(i, x) for i, x in enumerate(old)]
            filled[k] = jax.tree.unflatten(structure, new)
        return update(filled)

    if not leaves:
        return []
    try:
        closed = jax.make_jaxpr(run)(leaves)
    except _NOT_KNOWN:  # The update needs the value of one.
        return []
    structure: Any = jax.tree.structure(leaves)
    used = structure.unflatten(versions.used_inputs(closed.jaxpr))
    return [k for k in leaves if not any(used[k].values())]


def _words_of_error(
    word: str, loss: Words | None, named: Collection[str], *, others: bool
) -> str:
    """The words of the error for a keyword that nobody reads."""
    known = (
        {*named, *CONVENTIONAL} | states.KNOWN_WORDS | (loss.names if loss else set())
    )
    near = difflib.get_close_matches(word, sorted(known - {word}), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    takes = f"reads {_listed(sorted(named))}" if named else "names no keyword"
    if others:
        takes += ", and its update does not read this one"
    of_loss = f" The loss takes {_listed(sorted(loss.names))}." if loss else ""
    return (
        f"nobody reads the keyword {word!r}, so it would be lost.{hint}{of_loss} The "
        f"transformation {takes}."
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "no keyword"


def _short(x: object) -> str:
    text = repr(x)
    return text if len(text) <= 200 else f"{text[:200]}..."
