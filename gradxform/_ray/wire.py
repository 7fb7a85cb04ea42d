"""JAX's arrays on their way through Ray: as bytes beside the message.

JAX pickles an array into the message itself, which each side then copies once more.
Here the array is an out-of-band buffer: Ray copies it into its object store once, and
the receiver reads it there. On CPU it becomes a JAX array without another copy.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradxform._trees import maps
from gradxform._trees.types import T

SMALL = 1 << 15  # Bytes: anything smaller travels in the message itself.


@functools.cache  # Once a process is enough.
def register() -> None:
    """Makes JAX's arrays travel this way in all that this process sends through Ray."""
    array_type = type(jnp.zeros(()))
    sys.modules["ray"].util.register_serializer(
        array_type, serializer=_leave, deserializer=_arrive
    )


def _leave(x: jax.Array) -> object:
    if x.weak_type:
        return x.__reduce__()  # JAX's own way.
    return jax.device_put, (Bytes(np.asarray(x)),)


def _arrive(sent: tuple[Callable[..., jax.Array], tuple[Any, ...]]) -> jax.Array:
    make, args = sent
    return make(*args)


class Bytes:
    """Wraps a NumPy array of any dtype, so that pickle takes it out of band.

    The receiver gets the array itself.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.nbytes = array, array.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        x = self.array
        bits = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        return _from_bytes, (pickle.PickleBuffer(bits.data), x.dtype.name, x.shape)


def _from_bytes(
    bits: memoryview, dtype: str, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    return np.frombuffer(bits, jnp.dtype(dtype)).reshape(shape)


class Payload(NamedTuple):
    """Something to send: a reference into the object store, or the value itself."""

    ref: object
    value: Any  # Of any type.

    @classmethod
    def of(cls, tree: T, copy: Callable[[T], T] = lambda tree: tree) -> Payload:
        """Puts a large tree into the store, and copies a small one."""
        leaves = jax.tree.leaves(tree, is_leaf=maps.is_leaf)
        size = sum(getattr(getattr(x, "values", x), "nbytes", 0) for x in leaves)
        if size < SMALL:
            return cls(None, copy(tree))
        return cls(sys.modules["ray"].put(tree), None)

    def received(self) -> Any:
        """The value."""
        return self.value if self.ref is None else sys.modules["ray"].get(self.ref)
