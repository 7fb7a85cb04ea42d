"""Reads and writes the layers of arrays, wherever these lie."""

from __future__ import annotations

from typing import NamedTuple

import jax

from gradxform._devices import host
from gradxform._jax import compilers


class Stacked(NamedTuple):
    """Where an array has layers.

    Attributes:
      length: how many they are.
      axis: the axis along which they follow each other.
    """

    length: int
    axis: int

    def readable(self, x: jax.Array) -> jax.Array:
        """The array where its layers can be read: as it lies, or on the device."""
        return x if host.can_slice(x, self.axis) else host.to_device(x)

    def read(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Layer ``i``, on the device."""
        part = compilers.part(x, i, self.length, self.axis)
        return compilers.laid_out(host.to_device(part))

    def read_on(self, x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Layer ``i``, and the array for the next turn of a loop that only reads."""
        if host.is_on_host(x):
            return self.read(x, i), x
        return compilers.read_layer(x, i, self.length, self.axis)

    def write(self, x: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
        """The array with another layer ``i``, in its own memory."""
        return compilers.with_part(x, host.to_memory_of(new, x), i, self.axis)
