"""Stacks of layers in the jaxpr of a loss, and the scans that go over them.

A stack is an input of the jaxpr. It may be cast, transposed or divided into groups of
layers, and then a ``scan`` goes over it. These equations are evaluated again for each
layer, so nothing needs the whole stack. If a ``scan`` goes over groups, and another one
inside of it over layers, a group is a layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from gradxform._devices import host
from gradxform._devices.stacked import Stacked
from gradxform._jax import jaxprs, programs, versions
from gradxform._jax.jaxprs import LeafVariable
from gradxform._jax.versions import Op
from gradxform._slices.rules import Along, after, resized, shape_of

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Var


@dataclasses.dataclass(frozen=True)
class StackVariable(LeafVariable):
    """A variable that has the values of a stack."""

    def layers(self, length: int) -> list[Along] | None:
        """Where the layers lie in the stack, then in each equation's result.

        In the last result, the variable, they lie along the first axis. ``length`` is
        the number of layers. None: a reshape mixes them.
        """
        first = next(iter(self.equations), None)
        shape = shape_of(first.invars[jaxprs.operand(first)]) if first else (length,)
        for axis, size in enumerate(shape):
            found = [Along(axis, size // length)]
            for eqn in self.equations if not size % length else ():
                k = jaxprs.operand(eqn)
                along = after(jaxprs.name_of(eqn), eqn, k, found[-1], length)
                if along is None:
                    break
                found.append(along)
            if len(found) > len(self.equations) and not found[-1].axis:
                return found
        return None

    def axis(self, length: int) -> int | None:
        """The axis of the stack along which its layers lie; None if there is none."""
        layers = self.layers(length) if length else None
        return layers[0].axis if layers else None

    def layer(self, part: jax.Array, length: int) -> jax.Array:
        """A layer of the variable, from the layer's part of the stack."""
        layers = self.layers(length) or []
        pairs = zip(self.equations, layers[1:], strict=True)
        of_layer = (resized(jaxprs.name_of(eqn), eqn, x, 1) for eqn, x in pairs)
        return jnp.squeeze(jaxprs.evaluated(of_layer, part), 0)

    @property
    def order(self) -> tuple[int, ...] | None:
        """The axes of the stack, in the order of the variable; None: it is no order."""
        order: tuple[int, ...] | None = None
        for eqn in self.equations:
            name, ndim = jaxprs.name_of(eqn), len(shape_of(eqn.outvars[0]))
            order = order or tuple(range(ndim))
            if name == Op.TRANSPOSE:
                order = tuple(order[k] for k in eqn.params["permutation"])
            elif name not in versions.SAME_VALUES:
                return None
        return order or ()

    @property
    def is_itself(self) -> bool:
        """Whether it is the stack itself."""
        return self.order is not None and [*self.order] == sorted(self.order)

    def part(self, layer: jax.Array) -> jax.Array:
        """The layer's part of the stack, from a layer of a variable with an order."""
        part = jnp.expand_dims(layer, 0)
        if not (order := self.order):
            return part
        return part.transpose([order.index(k) for k in range(len(order))])

    def whole(self, array: jax.Array) -> jax.Array:
        """All of the variable, on the device, from the stack."""
        return jaxprs.evaluated(self.equations, host.to_device(array))

    @property
    def has_derivative(self) -> bool:
        """Whether the stack may get a gradient through it."""
        made = (eqn.outvars[0] for eqn in self.equations)
        return not self.is_stopped and all(map(_is_real, made))

    def refuse(self, reason: str) -> NoReturn:
        """Raises ``ValueError``: something else than a scan reads the stack."""
        raise ValueError(
            f"{self.path!r} is one of layers, but {reason}. A jax.lax.scan of the loss "
            "must go over it, and nothing else that has a derivative may read it. Read "
            f"each layer inside of the scan, or leave {self.path!r} out of layers."
        )


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan over stacks.

    Attributes:
      eqn: it.
      stacks: those among its inputs, by the position of the input.
    """

    eqn: JaxprEqn
    stacks: Mapping[int, StackVariable]

    @property
    def length(self) -> int:
        """The number of layers."""
        return self.eqn.params["length"]

    @functools.cached_property
    def lengths(self) -> tuple[int, int]:
        """How many of its inputs are constants, and how many are its carry."""
        return versions.scan_lengths(self.eqn)

    @property
    def is_reverse(self) -> bool:
        """Whether the last layer is the first."""
        return self.eqn.params["reverse"]

    @functools.cached_property
    def stacked(self) -> dict[int, Stacked]:
        """Where each stack has layers, by its index."""
        stacks, length = self.stacks.values(), self.length
        pairs = ((stack.index, stack.axis(length)) for stack in stacks)
        return {n: Stacked(length, axis) for n, axis in pairs if axis is not None}

    def with_layers(
        self, inputs: Sequence[Any], parts: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Inputs of the scan's body, with a layer of each stack.

        ``parts`` has each stack's part for this layer, by the index of the stack.
        """
        layers = {
            k: stack.layer(parts[stack.index], self.length)
            for k, stack in self.stacks.items()
        }
        return [layers.get(k, x) for k, x in enumerate(inputs)]

    def layer_results(self, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the scan's body: the carry, and what it gives further."""
        return programs.program(self.eqn).run(inputs)


def _is_real(x: Var) -> bool:
    aval: Any = x.aval
    return jnp.issubdtype(aval.dtype, jnp.inexact)
