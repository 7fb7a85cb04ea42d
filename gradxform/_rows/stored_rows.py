"""What the kinds of row-sparse leaves share: they refuse functions for arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import jax

from gradxform._trees.types import SparseLeaf

Rows = TypeVar("Rows", bound=type[SparseLeaf])

_OPERATORS = (
    "add radd sub rsub mul rmul neg truediv rtruediv pow matmul rmatmul getitem array"
)


class RowSparseError(TypeError):
    """Row-sparse leaves were given to a function for arrays."""


def node(hint: str) -> Callable[[Rows], Rows]:
    """Makes a class a pytree node; each operator it lacks raises an error.

    Args:
      hint: what to do instead of a calculation.
    """

    def refuse(*_: object) -> NoReturn:
        raise RowSparseError(hint)

    def decorate(kind: Rows) -> Rows:
        for name in _OPERATORS.split():
            if f"__{name}__" not in vars(kind):
                setattr(kind, f"__{name}__", refuse)
        return jax.tree_util.register_pytree_with_keys_class(kind)

    return decorate
