"""What an operation does to the slices of an array: a table with a rule for each.

An array may have slices along an axis, such as the rows of a table or the layers of a
stack. A rule says along which axis of the result they lie. An operation without a rule
may mix them, and so may one with a parameter that its rule does not know.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gradxform._jax import versions
from gradxform._jax.versions import Op
from gradxform._trees.types import Shape

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


class Along(NamedTuple):
    """Slices follow each other along an axis.

    Attributes:
      axis: it. A negative one is no axis of a result: the operation adds up all slices.
        Operands that are added up together have the same one.
      entries: how many entries of the axis each slice has.
    """

    axis: int
    entries: int = 1

    def of(self, shape: Shape, length: int) -> Shape:
        """The shape of an array that has another number of slices."""
        return *shape[: self.axis], self.entries * length, *shape[self.axis + 1 :]


# (equation, index of an operand, its slices, how many) -> those of the result, or None
# if the operation mixes them, or if the operand is the same for each slice
After: TypeAlias = Callable[["JaxprEqn", int, Along, int], Along | None]


class Rule(NamedTuple):
    """A rule of the table.

    Attributes:
      after: the function that says where the slices of a result lie.
      reads: the parameters that it reads, because they say where entries go. None: no
        parameter of the operation says that.
    """

    after: After
    reads: frozenset[str] | None = None

    @classmethod
    def of(cls, after: After, *reads: str) -> Rule:
        """A rule that reads these parameters."""
        return cls(after, frozenset(reads))

    def knows(self, eqn: JaxprEqn) -> bool:
        """Whether no other parameter of the equation may say where entries go."""
        if self.reads is None:
            return True
        return eqn.params.keys() <= self.reads | versions.NO_PLACES


def shape_of(x: Any) -> Shape:
    """The shape of an array or of a variable."""
    x = getattr(x, "aval", x)
    return x.shape if hasattr(x, "shape") else np.shape(x)


def _elementwise(
    eqn: JaxprEqn, operand: int, along: Along, length: int
) -> Along | None:
    """An operand may have one entry along an axis, for all entries of the result."""
    del length
    shape, made = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    is_there = along.axis < len(made) and shape[along.axis] == made[along.axis]
    return along if is_there else None


def _broadcast(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    del length
    axis = eqn.params["broadcast_dimensions"][along.axis]
    sizes = shape_of(eqn.invars[operand])[along.axis], shape_of(eqn.outvars[0])[axis]
    return along._replace(axis=axis) if sizes[0] == sizes[1] else None


def _transposed(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along:
    del operand, length
    return along._replace(axis=eqn.params["permutation"].index(along.axis))


def _reshaped(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """The entries of each slice stay together, and in order.

    ``dimensions`` is the order in which the axes are read, as in Fortran's.
    """
    shape, made = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    axes = eqn.params["dimensions"] or tuple(range(len(shape)))
    in_front = math.prod(shape[a] for a in axes[: axes.index(along.axis)])
    for axis, size in enumerate(made):
        if math.prod(made[:axis]) == in_front and size and not size % length:
            return Along(axis, size // length)
    return None


def _beside(
    axes: str, eqn: JaxprEqn, operand: int, along: Along, length: int
) -> Along | None:
    """The operation mixes entries along other axes, and may drop these.

    ``axes`` is the parameter with these axes.
    """
    del length
    own = eqn.params.get(axes, -1)  # JAX 0.7 has `top_k` of the last axis alone.
    before, after = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    own = own if isinstance(own, tuple) else (own % len(before),)
    kept = _without(own, along)
    return along if kept and len(before) == len(after) else kept


def _in_front(
    axes: int, eqn: JaxprEqn, operand: int, along: Along, length: int
) -> Along | None:
    """So many last axes are one object; others are a batch."""
    del operand, length
    rank = max(len(shape_of(x)) for x in eqn.invars)
    return along if along.axis < rank - axes else None


def _transformed(
    eqn: JaxprEqn, operand: int, along: Along, length: int
) -> Along | None:
    """Fourier's transforms are along the last axes; axes in front are a batch."""
    del length
    first = len(shape_of(eqn.invars[operand])) - len(eqn.params["fft_lengths"])
    return along if along.axis < first else None


def _cut(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """The axis of the slices is left as it is."""
    del length
    axis, size = along.axis, shape_of(eqn.invars[operand])[along.axis]
    names = ("start_indices", "limit_indices", "strides")
    cut = [(eqn.params[name] or {axis: 1})[axis] for name in names]
    return along if cut == [0, size, 1] else None


def _stacked(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along:
    del operand, length
    return along._replace(axis=along.axis + (eqn.params["axis"] <= along.axis))


def _written(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """What is written has entries of each slice."""
    del operand, length
    whole, part, *_ = map(shape_of, eqn.invars)
    return along if whole[along.axis] == part[along.axis] else None


def _read(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """Each slice has its own indices, or each index reads of all slices."""
    del length
    size = shape_of(eqn.invars[operand])[along.axis]
    for axis, axes in enumerate(_axes(eqn, eqn.outvars[0])):
        if axes[operand] == along.axis and shape_of(eqn.outvars[0])[axis] == size:
            return along._replace(axis=axis)
    return None


def _scattered(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """The array, the indices and what is written have the same slices."""
    del length
    whole, _, part = map(shape_of, eqn.invars)
    for axis, axes in enumerate(_axes(eqn, eqn.invars[2])):
        is_it = (*axes, axis)[operand] == along.axis
        if is_it and axes[0] is not None and whole[axes[0]] == part[axis]:
            return along._replace(axis=axes[0])
    return None


def _axes(eqn: JaxprEqn, part: Any) -> list[tuple[int | None, int | None]]:
    """For each axis of a part that is read or written, those of array and indices."""
    window, dropped, _, batch, of_indices, *_ = eqn.params["dimension_numbers"]
    array = range(len(shape_of(eqn.invars[0])))
    kept = iter([a for a in array if a not in (*dropped, *batch)])
    indices, of_array = itertools.count(), dict(zip(of_indices, batch, strict=True))
    return [
        (next(kept), None) if a in window else (of_array.get(i := next(indices)), i)
        for a in range(len(shape_of(part)))
    ]


def _scanned(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """A scan over slices, as ``jax.lax.map``, takes none of them to the next one."""
    del length
    constants, carry = versions.scan_lengths(eqn)
    is_alone = operand >= constants and not (carry or along.axis or eqn.effects)
    return along if is_alone else None


def _reduced(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along:
    del operand, length
    return _without(eqn.params["axes"], along) or along._replace(axis=-1)


def _without(axes: tuple[int, ...], along: Along) -> Along | None:
    if along.axis in axes:
        return None
    return along._replace(axis=sum(a not in axes for a in range(along.axis)))


def _padded(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """Entries may be added along other axes."""
    del operand, length
    return None if any(eqn.params["padding_config"][along.axis]) else along


def _windowed(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """Each window has one entry along the axis, and there is one for each entry."""
    del operand, length
    axis = along.axis
    names = ("window_dimensions", "window_strides", "base_dilation")
    sizes = [eqn.params[name][axis] for name in names if name in eqn.params]
    is_alone = {*sizes} == {1} and not any(eqn.params["padding"][axis])
    return along if is_alone else None


def _tiled(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    del operand, length
    return along if eqn.params["reps"][along.axis] == 1 else None


def _convolved(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """Slices of a batch, of filters for one array, or groups of an array and filters.

    A slice has as many groups as another one. A filter gives one feature of the result.
    """
    array, filters, made = eqn.params["dimension_numbers"]
    name, groups = _groups(eqn)
    is_batch = name == "batch_group_count"
    if operand == 0 and along.axis == array[0] and not is_batch:
        return along._replace(axis=made[0])
    if along.axis != (array[0 if is_batch else 1], filters[0])[operand]:
        return None
    if groups % length and (operand == 0 or groups > 1):
        return None
    return Along(made[1], shape_of(eqn.outvars[0])[made[1]] // length)


def _groups(eqn: JaxprEqn) -> tuple[str, int]:
    """The groups of a convolution: they divide the features, or else the batch."""
    names = ("batch_group_count", "feature_group_count")
    name = names[eqn.params[names[0]] == 1]
    return name, eqn.params[name]


def _multiplied(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along:
    del length
    contracted, batch = eqn.params["dimension_numbers"]
    ours, axis = contracted[operand], along.axis
    if axis in ours:
        return along._replace(axis=-1 - ours.index(axis))
    if axis in batch[operand]:
        return along._replace(axis=batch[operand].index(axis))
    gone = *ours, *batch[operand]
    before = sum(a not in gone for a in range(axis)) + len(batch[operand])
    if operand == 1:
        before += len(shape_of(eqn.invars[0])) - len(contracted[0]) - len(batch[0])
    return along._replace(axis=before)


def _drawn(eqn: JaxprEqn, operand: int, along: Along, length: int) -> Along | None:
    """Each key draws its bits; only keys of Threefry do so in an array of keys."""
    del operand, length
    return along if versions.are_drawn_alone(eqn.invars[0]) else None


_OF_WINDOWS = (
    *("window_dimensions", "window_strides", "padding"),
    *("base_dilation", "window_dilation"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(versions.ELEMENTWISE | versions.SAME_VALUES, Rule(_elementwise)),
    **dict.fromkeys(versions.REDUCTIONS, Rule.of(_reduced, "axes")),
    **{
        op: Rule.of(functools.partial(_beside, axes), axes)
        for op, axes in versions.OWN_AXES.items()
    },
    **dict.fromkeys(versions.OF_MATRICES, Rule(functools.partial(_in_front, 2))),
    **dict.fromkeys(versions.SCATTERS, Rule.of(_scattered, "dimension_numbers")),
    **dict.fromkeys(versions.WINDOWS, Rule.of(_windowed, *_OF_WINDOWS)),
    Op.BROADCAST: Rule.of(_broadcast, "broadcast_dimensions", "shape"),
    Op.CONVOLUTION: Rule.of(
        _convolved,
        *("batch_group_count", "dimension_numbers", "feature_group_count"),
        *("lhs_dilation", "padding", "rhs_dilation", "window_strides"),
    ),
    Op.DOT: Rule.of(_multiplied, "dimension_numbers"),
    Op.DYNAMIC_SLICE: Rule.of(_elementwise, "slice_sizes"),
    Op.DYNAMIC_UPDATE_SLICE: Rule.of(_written),
    Op.FFT: Rule.of(_transformed, "fft_lengths"),
    Op.GATHER: Rule.of(_read, "dimension_numbers", "slice_sizes"),
    Op.IOTA: Rule.of(_elementwise, "dimension", "shape"),
    Op.PAD: Rule.of(_padded, "padding_config"),
    Op.PIVOTS: Rule.of(functools.partial(_in_front, 1)),
    Op.RANDOM_BITS: Rule.of(_drawn, "shape"),
    Op.RESHAPE: Rule.of(_reshaped, "dimensions", "new_sizes"),
    Op.SCAN: Rule.of(_scanned, "length", *versions.SCAN_LENGTHS),
    Op.SLICE: Rule.of(_cut, "start_indices", "limit_indices", "strides"),
    Op.STACK: Rule.of(_stacked, "axis"),
    Op.TILE: Rule.of(_tiled, "reps"),
    Op.TRANSPOSE: Rule.of(_transposed, "permutation"),
}


def after(
    name: str, eqn: JaxprEqn, operand: int, along: Along, length: int
) -> Along | None:
    """The slices of a result, from those of an operand that has ``length`` of them.

    None: the operation mixes them, or nothing is known of it, or the operand is the
    same for each slice.
    """
    rule = RULES.get(name)
    if rule is None or not rule.knows(eqn):
        return None
    return rule.after(eqn, operand, along, length)


def is_made(name: str, eqn: JaxprEqn, along: Along) -> bool:
    """Whether the operation makes the entries of each slice itself."""
    is_counted = name == Op.IOTA and eqn.params["dimension"] == along.axis
    return name in versions.MAKES and not is_counted


def resized(name: str, eqn: JaxprEqn, along: Along, length: int) -> JaxprEqn:
    """The same equation for another number of slices of the result."""
    if name == Op.CONVOLUTION:
        return _regrouped(eqn, along, length)
    if name in versions.PLACEMENTS:
        return _replaced(name, eqn, along.axis)
    if name not in versions.OF_SHAPE:
        return eqn
    shape: Any = along.of(shape_of(eqn.outvars[0]), length)
    if name == Op.RANDOM_BITS:  # The keys have the first axes.
        shape = shape[len(shape_of(eqn.invars[0])) :]
    elif name == Op.SLICE:
        shape = along.of(eqn.params["limit_indices"], length)
    elif name == Op.SCAN:
        shape = shape[0]
    elif name == Op.GATHER:
        axis, index = _axes(eqn, eqn.outvars[0])[along.axis]
        shape = eqn.params["slice_sizes"]
        if axis is not None and index is None:
            shape = along._replace(axis=axis).of(shape, length)
    return eqn.replace(params=eqn.params | {versions.OF_SHAPE[name]: shape})


def _replaced(name: str, eqn: JaxprEqn, axis: int) -> JaxprEqn:
    """A placement for some slices, which no mesh axis cuts."""
    sharding = eqn.params[versions.PLACEMENTS[name]]
    cuts = [*sharding.spec]
    if axis >= len(cuts) or not isinstance(cuts[axis], str | tuple):
        return eqn
    cuts[axis] = None
    new = sharding.update(spec=sharding.spec.update(partitions=cuts))
    return eqn.replace(params=eqn.params | {versions.PLACEMENTS[name]: new})


def _regrouped(eqn: JaxprEqn, along: Along, length: int) -> JaxprEqn:
    """A convolution with the groups of another number of slices."""
    *_, made = eqn.params["dimension_numbers"]
    if along.axis != made[1]:
        return eqn
    before = shape_of(eqn.outvars[0])[made[1]] // along.entries
    name, groups = _groups(eqn)
    if groups % before:  # Filters for one array.
        return eqn
    return eqn.replace(params=eqn.params | {name: groups // before * length})
