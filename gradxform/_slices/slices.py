"""Evaluates a jaxpr of whole arrays for a few slices of them, as rows of a table.

The function is traced once, with the shapes of the whole arrays. So whatever looks at
sizes sees the truth: masks, labels, the number of entries in a mean. The evaluation
knows of each value whether it has slices, and along which axis, from the arguments on:
``rules`` says what each operation does to them. What has no slices is evaluated
as it is. Arrays that an update makes itself, such as zeros, are made only when they are
read: beside slices there are as many of theirs.

A policy says what differs: which operations may add up slices, and the words of errors.
An evaluation adds no array of the size of a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._devices import host
from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.programs import InnerProgram
from gradxform._jax.versions import Op
from gradxform._numbers import arithmetic
from gradxform._slices.rules import RULES, Along, after, is_made, resized, shape_of
from gradxform._trees import maps
from gradxform._trees.types import ByIndex, Path, PyTree

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, JaxprEqn

# An equation, after those that it is inside of, each by its ``id``.
EquationPath: TypeAlias = tuple[int, ...]


class MixedSlicesError(TypeError):
    """The function cannot run on a few slices; the message says what it does."""


class Source(NamedTuple):
    """Whose slices they are; only those of one source belong together.

    Attributes:
      length: how many the whole array has.
      present: how many are there.
      is_complete: whether these are all of them, in order.
      path: that of the table; stacks of one scan belong together.
    """

    length: int
    present: int
    is_complete: bool = False
    path: Path = ()


class Kind(NamedTuple):
    """An array has slices of this source, along this axis."""

    source: Source
    along: Along


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices that are there, of an array that has slices."""

    array: jax.Array
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that the function neither gets nor computes."""

    array: Any  # Also of NumPy.


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """The result of an equation that makes an array, or that reads only such arrays."""

    name: str
    eqn: JaxprEqn
    inputs: list[Any]


class Missing(NamedTuple):
    """A value that is not there, and why.

    Attributes:
      why: why the slices that are there do not give it.
      is_absent: whether the cause is an argument that is not there now.
      by: the first operation that has used this argument.
    """

    why: str
    is_absent: bool = False
    by: JaxprEqn | None = None

    @property
    def is_input(self) -> bool:
        """Whether it was given, and no operation has used it yet."""
        return self.is_absent and self.by is None

    @property
    def reason(self) -> str:
        """The reason, and the operation."""
        return f"{self.why}, by {jaxprs.with_line(self.by)}" if self.by else self.why

    def used(self, eqn: JaxprEqn) -> Missing:
        """The result of an operation that needs it."""
        return self._replace(by=eqn) if self.is_input else self


# An array without slices, a literal, or one of the classes above.
Value: TypeAlias = Any


class Policy(NamedTuple):
    """What differs from one use to another.

    Attributes:
      slice: the word in messages for a slice.
      array: the word in messages for an array that has slices.
      refused: operations that it does not take, in spite of their rules.
      add_up: (equation, kinds of its operands, operands) -> the results of an equation
        that adds up all slices; None if it must not.
      is_indexed: whether a slice knows its index. So it may read arrays that have one
        entry for each slice.
    """

    slice: str
    array: str
    refused: Collection[str]
    add_up: Callable[[JaxprEqn, list[Kind | None], list[Any]], list[jax.Array] | None]
    is_indexed: bool = False


class Notes(NamedTuple):
    """What a first pass over all slices finds out for a second one.

    Attributes:
      scalars: the results of equations that have no larger ones.
      contributions: equations that add up all slices, and what those there give.
    """

    scalars: dict[EquationPath, list[jax.Array]]
    contributions: dict[EquationPath, tuple[JaxprEqn, jax.Array]]


class WholeProgram(NamedTuple):
    """A function of whole arrays, traced with their shapes."""

    closed: ClosedJaxpr
    structure: Any  # That of the results.


def trace_whole(
    f: Callable[..., PyTree[Any]],
    args: PyTree[Any],
    kinds: Mapping[int, Kind],
    inputs: Mapping[int, Any],
) -> WholeProgram:
    """The jaxpr of ``f(*args)``, as a function of the leaves in ``inputs``.

    ``inputs`` has leaves by their index, slices of those that have a kind, or arrays of
    their types. Other leaves are constants.
    """
    leaves, treedef = maps.flatten(args)

    def call(values: ByIndex) -> PyTree[jax.Array]:
        filled = [values.get(i, x) for i, x in enumerate(leaves)]
        return f(*jax.tree.unflatten(treedef, filled))

    def described(i: int, x: Any) -> Any:
        shape, kind = np.shape(leaves[i]), kinds.get(i)
        if kind is not None:  # A table without rows is traced as if it had one.
            shape = kind.along.of(shape, kind.source.length)
        return jax.typeof(x).update(shape=shape, memory_space=host.DEVICE)

    types = {i: described(i, x) for i, x in inputs.items()}
    with jax.disable_jit(False):  # Otherwise it would unroll loops.
        closed, results = jax.make_jaxpr(call, return_shape=True)(types)
    return WholeProgram(programs.with_placements(closed), jax.tree.structure(results))


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates equations for the slices that are there.

    With one pass ``noted`` and ``notes`` stay empty. An example of two is a clip by the
    norm of all layers: in the first pass each layer adds its sum of squares to
    ``notes.contributions``. The total is ``noted`` in the second pass.

    Attributes:
      policy: the rules of this use alone.
      noted: results of equations that a first pass has found out. A second pass takes
        them from here, and does not evaluate these equations.
      notes: a first pass writes here what it finds out, and the caller hands it to the
        second pass as ``noted``. Effects wait for the second one. None: there is
        no second pass, or this is it.
      at: the equation that it is inside of.
      first: int32[] for each source, the index of its first slice that is there.
        Others follow it. Without it nobody knows the indices of slices.
      made: deferred results that are there already, as slices or, for None, whole. One
        that many equations read is made once.
    """

    policy: Policy
    noted: Mapping[EquationPath, list[jax.Array]] = dataclasses.field(
        default_factory=dict
    )
    notes: Notes | None = None
    at: EquationPath = ()
    first: Mapping[Source, jax.Array] = dataclasses.field(default_factory=dict)
    made: dict[tuple[Deferred, Kind | None], Any] = dataclasses.field(
        default_factory=dict
    )

    def results(
        self, closed: ClosedJaxpr | InnerProgram, inputs: Sequence[Value]
    ) -> list[Value]:
        """The results of a jaxpr; some of them may be missing, as some inputs are."""
        consts = [Constant(x) if shape_of(x) else x for x in closed.consts]
        return jaxprs.run(closed.jaxpr, [*consts, *inputs], self._anew().apply)

    def arrays(
        self, values: Iterable[Value], kinds: Iterable[Kind | None]
    ) -> list[jax.Array]:
        """Results as arrays: their slices, if they should have any.

        Raises:
          MixedSlicesError: one of them is missing, or has no such slices.
        """
        return list(map(self._anew()._array, values, kinds))

    def _array(
        self, x: Value, kind: Kind | None, eqn: JaxprEqn | None = None
    ) -> jax.Array:
        if isinstance(x, Missing):
            raise MixedSlicesError(x.reason)
        if kind is not None:
            return self._sliced(x, kind, eqn)
        if isinstance(x, Slices) and not x.kind.source.is_complete:
            self._mixes(eqn)
        return self._materialized(x)

    def apply(self, name: str, inputs: list[Value], eqn: JaxprEqn) -> list[Value]:
        """The results of an equation."""
        path = self._path(eqn)
        if path in self.noted:
            return self.noted[path]
        results = self._attempt(name, inputs, eqn)
        if self.notes is not None and all(map(_is_scalar, results)):
            self.notes.scalars[path] = results
        return results

    def _attempt(self, name: str, inputs: list[Value], eqn: JaxprEqn) -> list[Value]:
        if not (eqn.outvars or eqn.effects):  # JAX leaves such loops in a program.
            return []
        missing = _missing(inputs)
        if missing and name not in _CALLS:
            # A sum over a mesh axis is an effect, too, but only its result counts.
            is_effect = eqn.effects and (not eqn.outvars or jaxprs.calls_host(eqn))
            # It may belong to a later part of the program.
            if is_effect and self.notes is None and not missing.is_input:
                raise MixedSlicesError(missing.reason)
            return [missing.used(eqn)] * len(eqn.outvars)
        try:
            return self._by_rule(name, inputs, eqn)
        except MixedSlicesError as error:  # Perhaps nobody needs its results.
            if eqn.effects or not eqn.outvars:
                raise
            return [Missing(str(error))] * len(eqn.outvars)

    def _by_rule(self, name: str, inputs: list[Value], eqn: JaxprEqn) -> list[Value]:
        is_special = any(isinstance(x, _SPECIAL) for x in inputs)
        if name in _CALLS and (is_special or (name == Op.JIT and _makes_shapes(eqn))):
            return _CALLS[name](self, eqn, inputs)
        if any(isinstance(x, Slices) for x in inputs):
            return self._of_slices(name, inputs, eqn)
        if _is_deferred(name, inputs, eqn):
            return [Deferred(name, eqn, inputs)]
        return versions.bind(eqn, list(map(self._materialized, inputs)))

    def _of_slices(self, name: str, inputs: list[Value], eqn: JaxprEqn) -> list[Value]:
        """The results of an equation that reads slices."""
        if name in versions.DEBUG and versions.jit_is_disabled():
            return versions.bind(eqn, list(map(self._materialized, inputs)))
        found = {
            self._after(name, eqn, k, x.kind)
            for k, x in enumerate(inputs)
            if isinstance(x, Slices)
        }
        kind, *more = found
        if more or kind is None:
            if all(x.kind.source.is_complete for x in inputs if isinstance(x, Slices)):
                return versions.bind(eqn, list(map(self._materialized, inputs)))
            self._mixes(eqn)
        kinds, operands = self._operands(name, inputs, eqn, kind)
        if kind.along.axis < 0:
            if self.notes is not None:
                (part,) = versions.bind(eqn, operands)
                self.notes.contributions[self._path(eqn)] = eqn, part
            results = self.policy.add_up(eqn, kinds, operands)
            return self._mixes(eqn) if results is None else results
        eqn = resized(name, eqn, kind.along, kind.source.present)
        return [Slices(x, kind) for x in versions.bind(eqn, operands)]

    def _after(self, name: str, eqn: JaxprEqn, operand: int, kind: Kind) -> Kind | None:
        """The slices of a result, from those of an operand."""
        if name in self.policy.refused:
            return None
        along = after(name, eqn, operand, kind.along, kind.source.length)
        return along and Kind(kind.source, along)

    def _operands(
        self, name: str, inputs: list[Value], eqn: JaxprEqn, kind: Kind
    ) -> tuple[list[Kind | None], list[Any]]:
        """Operands of an equation whose result is of this kind, and their kinds.

        Those that are slices give this kind.
        """
        source, kinds = kind.source, list(map(_kind, inputs))
        for k, x in enumerate(inputs):
            if isinstance(x, Slices):
                continue
            for axis, size in enumerate(shape_of(eqn.invars[k])):
                before = Kind(source, Along(axis, size // source.length))
                fits = not size % source.length
                if fits and self._after(name, eqn, k, before) == kind:
                    kinds[k] = before
                    break
        pairs = zip(inputs, kinds, strict=True)
        return kinds, [
            self._materialized(x) if kind is None else self._sliced(x, kind, eqn)
            for x, kind in pairs
        ]

    def _sliced(self, x: Value, kind: Kind, eqn: JaxprEqn | None = None) -> jax.Array:
        """A value as slices: as many as the source has.

        ``eqn`` is the equation that reads it.
        """
        source, along = kind
        if isinstance(x, Slices):
            return x.array if x.kind == kind or source.is_complete else self._mixes(eqn)
        try:
            if isinstance(x, Deferred):
                return self._made(x, kind)
        except MixedSlicesError:
            is_short = math.prod(shape := shape_of(x.eqn.outvars[0])) == max(shape)
            if source.length > 1 and not (is_short and source in self.first):
                raise
        if source.length == 1:  # It is the only slice.
            array = self._materialized(x)
            times = [
                source.present if a == along.axis else 1 for a in range(array.ndim)
            ]
            return array if source.present == 1 else jnp.tile(array, times)
        if source in self.first:
            start, size = self.first[source], along.entries * source.present
            array = jnp.asarray(self._materialized(x))
            return jax.lax.dynamic_slice_in_dim(
                array, start * along.entries, size, along.axis
            )
        if isinstance(x, Constant):
            raise MixedSlicesError(
                f"its update has a constant of shape {list(shape_of(x.array))}, which "
                f"depends on the number of {self.policy.slice}s: use jax.numpy, as in "
                "jnp.zeros"
            )
        return self._mixes(eqn)

    def _made(self, x: Deferred, kind: Kind) -> jax.Array:
        """A deferred result as slices."""
        if (x, kind) in self.made:
            return self.made[x, kind]
        name, eqn, along = x.name, x.eqn, kind.along
        kinds, operands = self._operands(name, x.inputs, eqn, kind)
        # Each layer would get the same bits, unless it has a key of its own.
        is_same = name == Op.RANDOM_BITS and self.policy.is_indexed
        is_read = any(kinds) or (is_made(name, eqn, along) and not is_same)
        is_counted = not is_read and name == Op.IOTA and kind.source in self.first
        if not (is_read or is_counted) or name in self.policy.refused:
            self._mixes(eqn)
        eqn = resized(name, eqn, along, kind.source.present)
        (array,) = versions.bind(eqn, operands)
        if is_counted:
            start = self.first[kind.source] * along.entries
            array = array + start.astype(array.dtype)
        self.made[x, kind] = array
        return array

    def _materialized(self, x: Value) -> Any:
        """A value without slices as an array, or as it is."""
        if not isinstance(x, Deferred):
            return x.array if isinstance(x, (Constant, Slices)) else x
        if (x, None) not in self.made:
            (array,) = versions.bind(x.eqn, list(map(self._materialized, x.inputs)))
            self.made[x, None] = array
        return self.made[x, None]

    def _mixes(self, eqn: JaxprEqn | None = None) -> NoReturn:
        how = "in its results" if eqn is None else f"by {jaxprs.with_line(eqn)}"
        raise MixedSlicesError(f"its update may mix {self.policy.slice}s, {how}")

    def _path(self, eqn: JaxprEqn) -> EquationPath:
        return *self.at, id(eqn)

    def _inside(self, eqn: JaxprEqn, branch: int = 0) -> Evaluator:
        """The same for a program inside of an equation."""
        return dataclasses.replace(self, at=(*self.at, id(eqn), branch))

    def _anew(self) -> Evaluator:
        """The same without arrays that were made before, perhaps in another trace."""
        return dataclasses.replace(self, made={})

    def _traced(self) -> Evaluator:
        """The same within another trace: nobody outside can use values from there."""
        return dataclasses.replace(self._anew(), notes=None)

    def _once(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of an operation that runs its program once."""
        # As `programs.program` has it. A call for each equation would be many.
        name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
        return self._inside(eqn).results(eqn.params[name], inputs)

    def _checkpoint(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        return jaxprs.run(eqn.params["jaxpr"], inputs, self._inside(eqn).apply)

    def _scan(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of a scan. It goes over slices, or each step has all of them."""
        num_consts, num_carry = versions.scan_lengths(eqn)
        start = num_consts + num_carry
        xs = [
            x if isinstance(x, _READ) else self._materialized(x) for x in inputs[start:]
        ]
        if any(isinstance(x, Slices) and not x.kind.along.axis for x in xs):
            if missing := _missing(inputs):
                return [missing.used(eqn)] * len(eqn.outvars)
            return self._of_slices(Op.SCAN, inputs, eqn)
        inside, each = self._inside(eqn)._traced(), [_moved(x, -1) for x in xs]

        def step(carry: list[Value], flat: ByIndex) -> list[Value]:
            values = [*inputs[:num_consts], *carry, *_filled(each, flat)]
            return inside.results(eqn.params["jaxpr"], values)

        def loop(f: Callable[..., Any], init: ByIndex) -> Any:
            how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
            return jax.lax.scan(f, init, _flat(xs), **how)

        carry, after = self._settled(eqn, inputs[num_consts:start], step, loop)
        like = [*carry, *after[num_carry:]]
        ys = [k for k in range(num_carry, len(like)) if not _missing([like[k]])]

        def f(flat: ByIndex, x: ByIndex) -> tuple[ByIndex, ByIndex]:
            new = step(_filled(carry, flat), x)
            arrays = functools.partial(inside._alike, like, new, eqn)
            return arrays(flat), arrays(ys)

        last, flat = loop(f, _flat(carry))
        results = _filled(like, last | flat)
        return results[:num_carry] + [_moved(x, 1) for x in results[num_carry:]]

    def _while(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of a loop, which slices leave one by one if it is a vmapped one.

        Those that have left it stay as they are.
        """
        ends, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        num_ends = eqn.params["cond_nconsts"]
        start = num_ends + eqn.params["body_nconsts"]
        inside, (pred_type,) = self._inside(eqn)._traced(), ends.out_avals
        goes_on = jax.make_jaxpr(jnp.any)(pred_type)
        chosen = jax.make_jaxpr(
            lambda pred, *both: jax.tree.map(
                lambda x, y: jnp.where(arithmetic.expand(pred, x), x, y), *both
            )
        )(pred_type, body.out_avals, body.out_avals)

        def predicate(carry: list[Value]) -> Value:
            return inside.results(ends, [*inputs[:num_ends], *carry])[0]

        def step(carry: list[Value]) -> list[Value]:
            new = inside.results(body, [*inputs[num_ends:start], *carry])
            if not pred_type.shape:
                return new
            return inside.results(chosen, [predicate(carry), *new, *carry])

        carry, _ = self._settled(eqn, inputs[start:], step, lambda f, init: f(init))

        def cond(flat: ByIndex) -> jax.Array:
            pred = predicate(_filled(carry, flat))
            if isinstance(pred, Slices):  # Each ends by itself: no other one counts.
                source = pred.kind.source._replace(is_complete=True)
                pred = Slices(pred.array, pred.kind._replace(source=source))
            return inside.arrays(inside.results(goes_on, [pred]), [None])[0]

        def f(flat: ByIndex) -> ByIndex:
            return inside._alike(carry, step(_filled(carry, flat)), eqn, flat)

        return _filled(carry, jax.lax.while_loop(cond, f, _flat(carry)))

    def _settled(
        self,
        eqn: JaxprEqn,
        carry: list[Value],
        step: Callable[..., list[Value]],
        loop: Callable[..., Any],
    ) -> tuple[list[Value], list[Value]]:
        """The first carry of a loop, like the carry that its steps give.

        A carry may begin without slices and get some: in ``x = 0; x += row`` the zero
        has none, and the sum has one for each row. JAX wants one type for both. So the
        step is traced, and the carry becomes like its result, until nothing changes.
        Values only go from less to more: from an array to slices, to a missing value.
        So it ends. The results of a step are returned, too, without their arrays.
        """
        carry, after = list(map(jaxprs.as_array, carry, eqn.outvars)), list[Value]()

        def f(flat: ByIndex, *x: ByIndex) -> tuple[ByIndex, None]:
            new = step(_filled(carry, flat), *x)
            pairs = itertools.zip_longest(new, carry)
            after[:] = [y if y is x else _without_array(y) for y, x in pairs]
            return flat, None

        while True:
            once = functools.partial(f)  # JAX would not trace one function twice.
            jax.eval_shape(functools.partial(loop, once), _flat(carry))
            pairs = list(zip(carry, after, strict=False))
            new = [self._carried(x, y, eqn) for x, y in pairs]
            if all(map(operator.is_, new, carry)):
                new = [
                    self._materialized(x)
                    if isinstance(x, _UNREAD) and x is not y
                    else x
                    for x, y in pairs
                ]
            if all(map(operator.is_, new, carry)):
                return carry, after
            carry = new

    def _alike(
        self,
        like: list[Value],
        new: list[Value],
        eqn: JaxprEqn,
        positions: Iterable[int],
    ) -> ByIndex:
        """Results at these positions as arrays, with the slices that others have."""
        array = self._anew()._array
        return {k: array(new[k], _kind(like[k]), eqn) for k in positions}

    def _carried(self, x: Value, y: Value, eqn: JaxprEqn) -> Value:
        """A carry like the one that a step gives for it."""
        if isinstance(x, Missing):
            return x
        if isinstance(y, Slices) and not isinstance(x, Slices):
            return Slices(self._sliced(x, y.kind, eqn), y.kind)
        return y if isinstance(y, Missing) else x

    def _barrier(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Each result is one of the inputs."""
        flat = _flat(inputs)
        new = versions.bind(eqn, list(flat.values())) if flat else []
        by_position = dict(zip(flat, new, strict=True))
        return _filled(inputs, by_position)

    def _over_mesh(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Each result is one of the inputs, of all devices along named axes."""
        is_named = all(isinstance(axis, str) for axis in versions.mesh_axes(eqn))
        if not is_named or jaxprs.name_of(eqn) in self.policy.refused:
            self._mixes(eqn)
        there = [self._materialized(x) if isinstance(x, _UNREAD) else x for x in inputs]
        results = self._barrier(eqn, there)
        return [x.used(eqn) if isinstance(x, Missing) else x for x in results]

    def _cond(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of a conditional; one is missing if it is in any branch."""
        index, *operands = inputs
        branches = eqn.params["branches"]
        insides = [self._inside(eqn, n) for n in range(len(branches))]
        platforms = eqn.params.get("branches_platforms") or ()
        if None in platforms:  # Forms for one platform are for whole arrays.
            k = platforms.index(None)
            return insides[k].results(branches[k], operands)
        if self.notes is not None:  # An equation inside may add up slices.
            pairs = zip(insides, branches, strict=True)
            sides = [inside.results(branch, operands) for inside, branch in pairs]
        if isinstance(index, Missing):
            return [index.used(eqn)] * len(eqn.outvars)
        if self.notes is not None:
            return [
                self._selected(index, column) for column in zip(*sides, strict=True)
            ]

        def results(n: int, flat: ByIndex) -> list[Value]:
            inside = insides[n]._traced()
            return inside.results(branches[n], _filled(operands, flat))

        return self._switch(index, len(branches), results, _flat(operands))

    def _selected(self, index: jax.Array, column: Sequence[Value]) -> Value:
        """A result of a conditional, from those of its branches."""
        if missing := _missing(column):
            return missing
        kind = next(filter(None, map(_kind, column)), None)
        arrays = [self._array(x, kind) for x in column]
        return _of_kind(jax.lax.select_n(index, *arrays), kind)

    def _switch(
        self,
        index: jax.Array,
        num_branches: int,
        results: Callable[[int, ByIndex], list[Value]],
        flat: ByIndex,
    ) -> list[Value]:
        """``jax.lax.switch`` over functions of arrays whose results are any values."""
        from jax.extend.core import jaxpr_as_fun

        each_side: list[list[Value]] = []

        def there(n: int, flat: ByIndex) -> ByIndex:
            values = results(n, flat)
            each_side.append(list(map(_without_array, values)))
            array, each = self._anew()._array, enumerate(values)
            return {k: array(x, _kind(x)) for k, x in each if not _missing([x])}

        programs = [
            jax.make_jaxpr(functools.partial(there, n), return_shape=True)(flat)
            for n in range(num_branches)
        ]
        columns = list(zip(*each_side, strict=True))
        kinds = [next(filter(None, map(_kind, column)), None) for column in columns]
        missing = list(map(_missing, columns))
        pairs = zip(columns, kinds, missing, strict=True)
        are_alike = all(
            reason or {*map(_kind, column)} == {kind} for column, kind, reason in pairs
        )

        def taken(n: int, flat: ByIndex) -> list[jax.Array]:
            if are_alike:
                program, types = programs[n]
                arrays = jaxpr_as_fun(program)(*jax.tree.leaves(flat))
                pairs = zip(types, arrays, strict=True)
                return [x for k, x in pairs if not missing[k]]
            # Now it is known which slices the results of other branches have.
            triples = zip(results(n, flat), kinds, missing, strict=True)
            there = [(x, kind) for x, kind, reason in triples if not reason]
            return self.arrays(*zip(*there, strict=True)) if there else []

        sides = [functools.partial(taken, n) for n in range(num_branches)]
        arrays = iter(jax.lax.switch(index, sides, flat))
        return [
            reason or _of_kind(next(arrays), kind)
            for reason, kind in zip(missing, kinds, strict=True)
        ]

    def _opened(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of an operation that JAX makes of others, with its derivative."""
        # They are other equations each time, so no note can name one.
        return dataclasses.replace(self, notes=None)._custom_jvp(eqn, inputs)

    def _device_put(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Arrays stay where they are, unless it says where whole ones should lie."""
        if any(device is not None for device in eqn.params["devices"]):
            self._mixes(eqn)
        return inputs

    def _custom_jvp(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """The results of a ``custom_jvp``, with its derivative."""
        closed, num_results = programs.program(eqn), len(eqn.outvars)
        run = functools.partial(self._inside(eqn).results, closed)
        if _missing(inputs):  # It has no derivative either.
            return run(inputs)
        if not any(isinstance(x, Slices) for x in inputs):
            return versions.bind(eqn, list(map(self._materialized, inputs)))
        if self.notes is not None:  # As in a conditional.
            run(inputs)
        operands = [self._beside(x, k, eqn, inputs) for k, x in enumerate(inputs)]
        before, kinds = list(map(_kind, operands)), list[Kind | None]()
        # A program keeps the rule, so the rule may keep no array of this trace.
        rebuild, held = self._inside(eqn)._rebuilt()

        def results(
            inside: Evaluator, program: ClosedJaxpr | InnerProgram, *arrays: jax.Array
        ) -> list[Value]:
            each = before * (len(arrays) // len(before))
            values = inside.results(program, list(map(_of_kind, arrays, each)))
            kinds[:] = map(_kind, values[:num_results])
            return values

        @jax.custom_jvp
        def f(held: Any, *arrays: jax.Array) -> list[jax.Array]:
            inside = rebuild(held)
            return inside.arrays(results(inside, closed, *arrays), kinds)

        @f.defjvp
        def rule(
            primals: Sequence[Any], tangents: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            inside, arrays = rebuild(primals[0]), (*primals[1:], *tangents[1:])
            values = results(inside, _derivative(eqn), *arrays)
            new = inside.arrays(values[:num_results], kinds)
            pairs = zip(new, kinds, strict=True)
            real = [kind for x, kind in pairs if _is_real(x)]
            moved = iter(inside.arrays(values[num_results:], real))
            return new, [
                next(moved) if _is_real(x) else np.zeros(x.shape, jax.dtypes.float0)
                for x in new
            ]

        arrays = f(held, *map(self._materialized, operands))
        return list(map(_of_kind, arrays, kinds))

    def _rebuilt(self) -> tuple[Callable[[Any], Evaluator], Any]:
        """A function that makes the same evaluator of the arrays of a trace, and these.

        The function itself keeps no array.
        """
        bare = dataclasses.replace(self._traced(), noted={}, first={})
        places, sources = list(self.noted), list(self.first)

        def rebuild(arrays: Any) -> Evaluator:
            noted = dict(zip(places, arrays[0], strict=True))
            first = dict(zip(sources, arrays[1], strict=True))
            return dataclasses.replace(bare, noted=noted, first=first)

        return rebuild, (list(self.noted.values()), list(self.first.values()))

    def _beside(
        self, x: Value, operand: int, eqn: JaxprEqn, inputs: list[Value]
    ) -> Value:
        """An operand of a function: if it is not made yet, like one with slices."""
        if not isinstance(x, Deferred):
            return x
        shape = shape_of(eqn.invars[operand])
        for other, var in zip(inputs, eqn.invars, strict=True):
            if not isinstance(other, Slices):
                continue
            ours, axis = shape_of(var), other.kind.along.axis
            if len(ours) == len(shape) and ours[axis] == shape[axis]:
                with contextlib.suppress(MixedSlicesError):
                    return Slices(self._sliced(x, other.kind, eqn), other.kind)
        return x


# These run programs inside, and some of their results need only some of their inputs.
_CALLS: dict[str, Callable[[Evaluator, JaxprEqn, list[Value]], list[Value]]] = {
    Op.BARRIER: Evaluator._barrier,
    Op.CALL: Evaluator._once,
    Op.CHECKPOINT: Evaluator._checkpoint,
    Op.COND: Evaluator._cond,
    Op.CUSTOM_JVP: Evaluator._custom_jvp,
    Op.CUSTOM_VJP: Evaluator._custom_jvp,  # The derivative of its rule is refused.
    Op.DEVICE_PUT: Evaluator._device_put,
    Op.HIGH: Evaluator._opened,
    Op.JIT: Evaluator._once,
    Op.LINEAR_SOLVE: Evaluator._opened,
    Op.SCAN: Evaluator._scan,
    Op.WHILE: Evaluator._while,
    **dict.fromkeys(versions.OVER_MESH, Evaluator._over_mesh),
}
_READ, _UNREAD = (Slices, Missing), (Constant, Deferred)
_SPECIAL = *_READ, *_UNREAD


def _missing(values: Iterable[Value]) -> Missing | None:
    """The first missing value; if it can be, one that no other argument would give."""
    missing = [x for x in values if isinstance(x, Missing)]
    return min(missing, key=lambda x: x.is_absent, default=None)


def _is_scalar(x: Value) -> bool:
    """Whether it is there, and has one entry."""
    return not (isinstance(x, _SPECIAL) or np.ndim(x))


def _kind(x: Value) -> Kind | None:
    return x.kind if isinstance(x, Slices) else None


def _of_kind(x: jax.Array, kind: Kind | None) -> Value:
    return x if kind is None else Slices(x, kind)


def _without_array(x: Value) -> Value:
    """A value without its array, which nobody outside of the trace can use."""
    if isinstance(x, Slices):
        return Slices(jax.typeof(x.array), x.kind)
    return x if isinstance(x, Missing) else None


def _like(array: jax.Array | None, old: Value) -> Value:
    """An array that replaces another value; for None it is the other value."""
    return old if array is None else _of_kind(array, _kind(old))


def _filled(values: Sequence[Value], flat: ByIndex) -> list[Value]:
    """The same values with these arrays, by position."""
    return [_like(flat.get(k), x) for k, x in enumerate(values)]


def _moved(x: Value, by: int) -> Value:
    """A value whose axes begin earlier or later."""
    if not isinstance(x, Slices):
        return x
    (axis, entries), source = x.kind.along, x.kind.source
    return Slices(x.array, Kind(source, Along(axis + by, entries)))


def _flat(values: Sequence[Value]) -> ByIndex:
    """The arrays among values, by position; of an array with slices those."""
    return {
        k: x.array if isinstance(x, Slices) else x
        for k, x in enumerate(values)
        if not isinstance(x, (*_UNREAD, Missing))
    }


def _makes_shapes(eqn: JaxprEqn) -> bool:
    """Whether a result has a shape that no input has."""
    shapes = {(), *map(shape_of, eqn.invars)}
    return not shapes.issuperset(map(shape_of, eqn.outvars))


def _is_deferred(name: str, inputs: list[Value], eqn: JaxprEqn) -> bool:
    """Whether the result of an equation without slices is made when it is read.

    An array of its shape that is there already would have to be cut.
    """
    shape = shape_of(eqn.outvars[0]) if len(eqn.outvars) == 1 else ()
    if not shape or name in versions.MAKES:
        return bool(shape)
    if name not in RULES:
        return False
    deferred = [isinstance(x, Deferred) for x in inputs]
    pairs = zip(deferred, map(shape_of, eqn.invars), strict=True)
    others = [shape for is_deferred, shape in pairs if shape and not is_deferred]
    if name == Op.GATHER and deferred[1]:  # Each slice has its own indices.
        return True
    return not others or (name in versions.ELEMENTWISE and shape not in others)


def _derivative(eqn: JaxprEqn) -> ClosedJaxpr:
    """The results of an equation and the tangents of the real ones, as JAX has them."""
    primals: list[Any] = [x.aval for x in eqn.invars]
    num_inputs = len(primals)

    def jvp(*args: jax.Array) -> list[jax.Array]:
        values, tangents = jax.jvp(
            lambda *x: versions.bind(eqn, x), args[:num_inputs], args[num_inputs:]
        )
        return [*values, *(t for t in tangents if _is_real(t))]

    return jax.make_jaxpr(jvp)(*primals, *(x.to_tangent_aval() for x in primals))


def _is_real(x: jax.Array) -> bool:
    """Whether it has a derivative: integers have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
