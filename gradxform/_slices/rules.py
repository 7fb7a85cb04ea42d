"""What an operation does to the slices of an array: a table with a rule for each.

An array may have slices along an axis, such as the rows of a table or the layers of a
stack. A rule says along which axis of the result they lie. An operation without a rule
may mix them.
"""

from __future__ import annotations

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

    def of(self, shape: Shape, number: int) -> Shape:
        """The shape of an array that has another number of slices."""
        return *shape[: self.axis], self.entries * number, *shape[self.axis + 1 :]


# (equation, number of an operand, its slices, how many) -> those of the result, or None
# if the operation mixes them, or if the operand is the same for each slice
Rule: TypeAlias = Callable[["JaxprEqn", int, Along, int], Along | None]


def shape_of(x: Any) -> Shape:
    """The shape of an array or of a variable."""
    x = getattr(x, "aval", x)
    return x.shape if hasattr(x, "shape") else np.shape(x)


def _elementwise(
    eqn: JaxprEqn, operand: int, along: Along, number: int
) -> Along | None:
    """An operand may have one entry along an axis, for all entries of the result."""
    del number
    shape, made = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    is_there = along.axis < len(made) and shape[along.axis] == made[along.axis]
    return along if is_there else None


def _broadcast(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along | None:
    del number
    axis = eqn.params["broadcast_dimensions"][along.axis]
    sizes = shape_of(eqn.invars[operand])[along.axis], shape_of(eqn.outvars[0])[axis]
    return along._replace(axis=axis) if sizes[0] == sizes[1] else None


def _transposed(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along:
    del operand, number
    return along._replace(axis=eqn.params["permutation"].index(along.axis))


def _reshaped(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along | None:
    """The entries of each slice stay together, and in order."""
    shape, made = shape_of(eqn.invars[operand]), shape_of(eqn.outvars[0])
    in_front = math.prod(shape[: along.axis])
    for axis, size in enumerate(made):
        if math.prod(made[:axis]) == in_front and size and not size % number:
            return Along(axis, size // number)
    return None


def _squeezed(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along | None:
    del operand, number
    return _without(eqn.params["dimensions"], along)


def _reduced(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along:
    del operand, number
    return _without(eqn.params["axes"], along) or along._replace(axis=-1)


def _without(axes: tuple[int, ...], along: Along) -> Along | None:
    if along.axis in axes:
        return None
    return along._replace(axis=along.axis - sum(a < along.axis for a in axes))


def _padded(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along | None:
    """Entries may be added along other axes."""
    del number
    is_kept = operand == 0 and not any(eqn.params["padding_config"][along.axis])
    return along if is_kept else None


def _multiplied(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along:
    del number
    contracted, batch = eqn.params["dimension_numbers"]
    ours, axis = contracted[operand], along.axis
    if axis in ours:
        return along._replace(axis=-1 - ours.index(axis))
    if axis in batch[operand]:
        return along._replace(axis=batch[operand].index(axis))
    gone = *ours, *batch[operand]
    before = sum(a < axis and a not in gone for a in range(axis)) + len(batch[operand])
    if operand == 1:
        before += len(shape_of(eqn.invars[0])) - len(contracted[0]) - len(batch[0])
    return along._replace(axis=before)


def _drawn(eqn: JaxprEqn, operand: int, along: Along, number: int) -> Along:
    """An array of keys draws bits for each of them."""
    del eqn, operand, number
    return along


RULES: dict[str, Rule] = {
    **dict.fromkeys(versions.ELEMENTWISE | versions.SAME_VALUES, _elementwise),
    **dict.fromkeys(versions.REDUCTIONS, _reduced),
    Op.BROADCAST: _broadcast,
    Op.DOT: _multiplied,
    Op.IOTA: _elementwise,
    Op.PAD: _padded,
    Op.RANDOM_BITS: _drawn,
    Op.RESHAPE: _reshaped,
    Op.SLICE: _elementwise,  # Where it leaves an axis as it is.
    Op.SQUEEZE: _squeezed,
    Op.TRANSPOSE: _transposed,
}


def is_made(name: str, eqn: JaxprEqn, along: Along) -> bool:
    """Whether the operation makes the entries of each slice itself."""
    is_counted = name == Op.IOTA and eqn.params["dimension"] == along.axis
    return name in versions.MAKES and not is_counted


def resized(name: str, eqn: JaxprEqn, along: Along, number: int) -> JaxprEqn:
    """The same equation for another number of slices of the result."""
    if name not in versions.OF_SHAPE:
        return eqn
    shape = along.of(shape_of(eqn.outvars[0]), number)
    if name == Op.RANDOM_BITS:  # The keys have the first axes.
        shape = shape[len(shape_of(eqn.invars[0])) :]
    elif name == Op.SLICE:
        shape = along.of(eqn.params["limit_indices"], number)
    return eqn.replace(params=eqn.params | {versions.OF_SHAPE[name]: shape})
