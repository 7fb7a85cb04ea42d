"""What a state says about itself, by a mark on its class.

A state of somebody else may have fields of the same names, so fields say nothing. What
is known of optax's classes stands in a table at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import optax

from gradxform._trees import maps
from gradxform._trees.types import Path, T

_MARK = "_gradxform_mark"
# The extra arguments that any marked class of this library reads.
KNOWN_WORDS: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Mark:
    """Marks a class of states, as its decorator. Trees and pickles keep the class.

    Attributes:
      gate: whether it is the state of a gate. Then it has an ``inner_state``, and
        counters of its own.
      takes_none: whether its transformation has rules of its own for a leaf without a
        gradient.
      needs: extra arguments that its transformation must not lose, and for each the
        field that is not empty then.
      reads: other extra arguments that it reads.
      kept: the fields that must not have 8 bits: steps would be lost beside them.
      not_by_row: why the rows of a table cannot act alone, although the state has a
        row for each.
      hints: fields that may have no layer for each layer, and with which argument they
        have.
    """

    gate: bool = False
    takes_none: bool = False
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: Collection[str] = ()
    kept: Collection[str] = ()
    not_by_row: str = ""
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, kind: type[T]) -> type[T]:
        """The same class, marked."""
        setattr(kind, _MARK, self)
        KNOWN_WORDS.update(self.needs, self.reads)
        return kind


def mark_of(kind: type) -> Mark:
    """The mark of a class of states; nothing is known of one without a mark."""
    is_of_optax = kind.__module__.partition(".")[0] == "optax"
    table = OF_OPTAX if is_of_optax else {}
    mark: Mark = getattr(kind, _MARK, table.get(kind.__name__, Mark()))
    return mark


def has_field(node: optax.OptState, field: str) -> bool:
    """Whether a state has a field that is not empty."""
    return not isinstance(getattr(node, field, ()), tuple)


def gates(
    state: optax.OptState, field: str | None = None
) -> list[tuple[Path, optax.OptState]]:
    """The states of the outermost gates, with this field, and the paths to them."""

    def is_gate(node: optax.OptState) -> bool:
        return mark_of(type(node)).gate and (field is None or has_field(node, field))

    return maps.nodes(state, is_gate)


def needs(state: optax.OptState, name: str) -> bool:
    """Whether an outermost gate in a state must not lose this extra argument."""
    found = [(node, mark_of(type(node)).needs.get(name)) for _, node in gates(state)]
    return any(field and has_field(node, field) for node, field in found)


def words(state: optax.OptState) -> set[str]:
    """The extra arguments that transformations with a mark read, at any depth."""

    def reads(node: optax.OptState) -> bool:
        mark = mark_of(type(node))
        return mark.gate or bool(mark.reads)

    found: set[str] = set()
    for _, node in maps.nodes(state, reads):
        mark = mark_of(type(node))
        found.update(mark.reads)
        found.update(name for name, x in mark.needs.items() if has_field(node, x))
        if mark.gate:
            found |= words(node.inner_state)
    return found


def takes_none(state: optax.OptState) -> bool:
    """Whether an outermost gate in a state has rules of its own for a missing leaf."""
    return any(mark_of(type(node)).takes_none for _, node in gates(state))


def has_gate(state: optax.OptState, field: str | None = None) -> bool:
    """Whether a state holds that of a gate, with this field."""
    return bool(gates(state, field))


ADDS_STEPS = (
    "adds up several steps, and each touches other rows, so it belongs around lazy"
)
_MIXED = "mixes the rows of a matrix"
_AGAIN = "takes several steps on the same rows, and each touches others"
_LINE_SEARCH = "value", "grad", "value_fn"

OF_OPTAX = {
    "ApplyEvery": Mark(not_by_row=ADDS_STEPS),
    "MultiStepsState": Mark(not_by_row=ADDS_STEPS),
    "MuonState": Mark(not_by_row=_MIXED),
    # Parameters, or their copy: a step changes less than the next code does.
    "DoGState": Mark(kept=["init_params"]),
    "DoWGState": Mark(kept=["init_params"]),
    "MechanicState": Mark(kept=["x0"]),
    "SAMState": Mark(kept=["cache"], not_by_row=_AGAIN),
    "ScaleByDistanceOverGradientsState": Mark(kept=["init_params"]),
    "ScheduleFreeState": Mark(kept=["z"]),
    # Sums over all steps, which parameters are computed from.
    "COCOBState": Mark(
        kept=["init_particles", "cumulative_gradients", "reward", "subgradients"]
    ),
    "DAdaptAdamWState": Mark(kept=["grad_sum"]),
    "MadgradState": Mark(kept=["x0", "s"]),
    "ProdigyState": Mark(kept=["params0", "grad_sum"]),
    # A line search evaluates the loss elsewhere.
    "ScaleByBacktrackingLinesearchState": Mark(reads=_LINE_SEARCH),
    "ScaleByZoomLinesearchState": Mark(reads=_LINE_SEARCH),
    # Numbers that are subtracted from others near to them.
    "MomoAdamState": Mark(kept=["exp_avg"]),
    "MomoState": Mark(kept=["exp_avg"]),
    "ScaleByLBFGSState": Mark(kept=["params", "updates"]),
    "ScaleByRStdDevState": Mark(kept=["mu", "nu"]),
    "ScaleByRStdDevWithCountState": Mark(kept=["mu", "nu"]),
}
