"""What a state says about itself, by a mark on its class.

A state of somebody else may have fields of the same names, so fields say nothing.
"""

from __future__ import annotations

import dataclasses

import optax

from gradxform._trees import maps
from gradxform._trees.types import Path, T

_MARK = "_gradxform_mark"


@dataclasses.dataclass(frozen=True)
class Mark:
    """Marks a class of states, as its decorator. Trees and pickles keep the class.

    Attributes:
      gate: whether it is the state of a gate. Then it has an ``inner_state``, and
        counters of its own.
    """

    gate: bool = False

    def __call__(self, kind: type[T]) -> type[T]:
        """The same class, marked."""
        setattr(kind, _MARK, self)
        return kind


def mark_of(node: object) -> Mark:
    """The mark of a node of a state; nothing is known of a class without one."""
    mark: Mark = getattr(type(node), _MARK, Mark())
    return mark


def has_field(node: optax.OptState, field: str) -> bool:
    """Whether a state has a field that is not empty."""
    return not isinstance(getattr(node, field, ()), tuple)


def gates(
    state: optax.OptState, field: str | None = None
) -> list[tuple[Path, optax.OptState]]:
    """The states of the outermost gates, with this field, and the paths to them."""
    return maps.nodes(
        state,
        lambda node: mark_of(node).gate and (field is None or has_field(node, field)),
    )


def has_gate(state: optax.OptState, field: str | None = None) -> bool:
    """Whether a state holds that of a gate, with this field."""
    return bool(gates(state, field))
